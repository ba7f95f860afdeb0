use super::*;
use lockstep_core::{RequestId, SamplingParams};
use lockstep_scheduler::{SchedulerConfig, StepPlan};
use lockstep_wire::TextParams;

/// Three requests on a pool that holds one and a half of them, so that the recording has retractions, planned one
/// step ahead, so that snapshots hold steps in flight.
fn recording(segment_bytes: usize) -> Vec<u8> {
    let config = SchedulerConfig { page_size: 2, num_pages: 12, reserve_percent: 0, ..Default::default() };
    let mut recorder = FlightRecorder::new(Some(1000), segment_bytes);
    let (mut scheduler, mut plan, mut in_flight) = (Scheduler::new(config), StepPlan::new(), Vec::new());
    for id in 0..3 {
        let submitted = SubmitRequest {
            id: RequestId(id),
            prompt: vec![1, 2, id as TokenId],
            sampling: SamplingParams { max_tokens: Some(12), ..SamplingParams::default() },
            text: TextParams::default(),
            cache_salt: Some("tenant".into()),
            priority: 0,
        };
        recorder.step(5, &scheduler);
        recorder.message(&ToScheduler::Submit(Box::new(submitted.clone())));
        scheduler.submit(request_of(submitted, 5, Some(1000)), 5).unwrap();
    }
    let mut events = Vec::new();
    while scheduler.has_work() {
        recorder.step(6, &scheduler);
        let planned = scheduler.plan_into(&mut plan);
        recorder.plan(planned, scheduler.digest());
        in_flight.extend(planned.then(|| (plan.step, plan.sample_count())));
        while in_flight.len() > usize::from(planned) {
            let (step, count) = in_flight.remove(0);
            recorder.tokens(&vec![9; count]);
            scheduler.complete(step, &vec![9; count]);
        }
        scheduler.take_events(&mut events);
    }
    assert!(scheduler.counters().retractions > 0);
    recorder.bytes()
}

#[test]
fn a_replay_reproduces_every_decision() {
    let report = replay_bytes(&recording(SEGMENT_BYTES)).unwrap();
    assert_eq!((report.messages, report.tokens, &report.difference), (3, 36, &None), "{report}");
    assert!(report.first_step == 0 && report.steps > 12, "{report}");
}

#[test]
fn a_ring_that_went_round_replays_from_its_snapshot() {
    let whole = replay_bytes(&recording(SEGMENT_BYTES)).unwrap();
    for segment_bytes in [1, 64, 200, 500] {
        let report = replay_bytes(&recording(segment_bytes)).unwrap();
        assert_eq!(report.difference, None, "{segment_bytes}: {report}");
        assert!(report.first_step > 0 && report.steps > 0, "{segment_bytes}: {report}");
        assert_eq!(report.first_step + report.steps, whole.steps, "{segment_bytes}: {report}");
    }
}

#[test]
fn a_changed_decision_is_found_and_damage_is_refused() {
    let good = recording(SEGMENT_BYTES);
    let mut other = good.clone();
    // The last plan record: PLAN, planned, four words, then tokens; change its token hash.
    let at = other.windows(2).rposition(|pair| pair == [PLAN, 1]).unwrap();
    other[at + 2 + 24] ^= 1;
    assert!(replay_bytes(&other).unwrap().difference.unwrap().contains("token_hash"));
    for len in [0, 4, 8, 50, good.len() - 1] {
        assert!(matches!(replay_bytes(&good[..len]), Err(FlightError::Damaged(_))), "{len} bytes");
    }
    // The free list's length, early in the snapshot: the pool no longer adds up.
    let mut broken = good;
    let free_list = broken.windows(12).position(|w| w == [11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]).unwrap();
    broken[free_list] = 3;
    assert!(matches!(replay_bytes(&broken), Err(FlightError::Damaged(_))));
}

#[test]
fn without_a_folder_nothing_is_written() {
    let recorder = FlightRecorder::new(None, SEGMENT_BYTES);
    assert!(recorder.write().unwrap_err().to_string().contains("--flight-dir"));
}
