//! Everything a seed decides before the first event.

use crate::oracle::EOS;
use crate::random::Random;
use lockstep_core::{RequestId, SamplingParams, TokenId};
use lockstep_scheduler::{CachePolicy, QueueOrder, SchedulerConfig, StepOrder};
use lockstep_wire::{SubmitRequest, TextParams};

/// One run, apart from the random delays in it.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Ranks of the replica.
    pub ranks: usize,
    /// The scheduler's configuration, equal on all ranks.
    pub config: SchedulerConfig,
    /// Whether devices run a step at the latest legal moment.
    pub lazy_devices: bool,
    /// Messages rank 0 takes from its inbox in one step, at most.
    pub messages_per_step_max: usize,
    /// Milliseconds after which a request is ended.
    pub request_timeout_ms: Option<u64>,
    /// How long things take.
    pub timing: Timing,
    /// A rank that dies or stops.
    pub fault: Option<Fault>,
    /// When the client asks for the end; `None`: when every request has been answered.
    pub shutdown_us: Option<u64>,
    /// What the client sends, in order of time.
    pub requests: Vec<PlannedRequest>,
    /// When it asks to flush the cache.
    pub flushes_us: Vec<u64>,
    /// When it asks for the state.
    pub queries_us: Vec<u64>,
    /// Segment of the flight recorders: so small that they go round many times, or so large that they never do.
    pub flight_segment_bytes: usize,
}

/// Ranges of delays in microseconds; each event draws its own.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// A message on any link.
    pub link_us: u64,
    /// One message in this many takes 30 times as long, and all behind it wait.
    pub stall_one_in: u64,
    /// Waking up after a collective.
    pub wake_us: u64,
    /// A step on the device.
    pub compute_us: u64,
    /// A rank whose delays are 20 times as long.
    pub slow_rank: Option<usize>,
    /// One call in this many is interrupted by another process.
    pub preempt_one_in: u64,
}

/// What happens to a rank.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// Which.
    pub rank: usize,
    /// When.
    pub at_us: u64,
    /// How.
    pub kind: FaultKind,
}

/// The two ways in which a process ceases to work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// It dies, the launcher notices and aborts the group. What it had sent but was not delivered is lost.
    Killed,
    /// It is stopped and nobody notices: the others must give up by themselves.
    Stopped,
}

/// A request, and what its client does.
#[derive(Clone, Debug)]
pub struct PlannedRequest {
    /// When it is sent.
    pub at_us: u64,
    /// The tokenizer's link it takes.
    pub link: usize,
    /// The message.
    pub request: SubmitRequest,
    /// When the client aborts it.
    pub abort: Option<AbortAt>,
    /// The abort is sent twice.
    pub abort_twice: bool,
}

/// The moment of an abort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbortAt {
    /// Directly behind the request.
    Once,
    /// So many microseconds after it.
    After(u64),
    /// When the client hears that it was accepted.
    Begin,
    /// When the client has so many tokens.
    Tokens(usize),
    /// When it has ended already.
    End,
}

/// Links from tokenizers to rank 0.
const TOKENIZER_LINKS: usize = 3;

impl Scenario {
    /// The scenario of a seed; `ranks` overrides the seed's number of ranks.
    pub fn of(random: &mut Random, ranks: Option<usize>) -> Self {
        let ranks = ranks.unwrap_or(random.pick(&[1, 2, 2, 2, 3, 3, 4, 6]));
        let config = scheduler_config(random, ranks);
        let context_max = config.context_max.min(config.num_pages * config.page_size);
        let requests = requests(random, context_max);
        let horizon_us = requests.last().map_or(0, |r| r.at_us) + 3_000;
        let moments = |random: &mut Random, count_max: u64| {
            let count = random.below(count_max + 1);
            (0..count).map(|_| random.below(horizon_us)).collect::<Vec<_>>()
        };
        let has_fault = random.one_in(12);
        let kind = random.pick(&[FaultKind::Killed, FaultKind::Stopped]);
        let fault = Fault { rank: random.index(ranks), at_us: random.below(horizon_us), kind };
        Self {
            ranks,
            config,
            lazy_devices: !random.one_in(3),
            messages_per_step_max: random.pick(&[1, 4, 256, 256]),
            request_timeout_ms: random.one_in(5).then(|| random.between(1, 60)),
            timing: timing(random, ranks),
            fault: has_fault.then_some(fault),
            shutdown_us: random.one_in(15).then(|| random.below(horizon_us)),
            flushes_us: moments(random, 3),
            queries_us: moments(random, 3),
            requests,
            flight_segment_bytes: random.pick(&[200, 2_000, 20_000, 1 << 24]),
        }
    }
}

fn timing(random: &mut Random, ranks: usize) -> Timing {
    Timing {
        link_us: random.pick(&[1, 20, 200, 1000]),
        stall_one_in: random.pick(&[10, 50, 1_000]),
        wake_us: random.pick(&[1, 20, 200]),
        compute_us: random.pick(&[1, 50, 300]),
        slow_rank: random.one_in(4).then(|| random.index(ranks)),
        preempt_one_in: random.pick(&[4, 20, 200]),
    }
}

/// Pipeline stages of so many ranks: one, or any number that gives each stage equally many.
fn stages(random: &mut Random, ranks: usize) -> usize {
    let legal: Vec<usize> = (1..=ranks).filter(|stages| ranks.is_multiple_of(*stages)).collect();
    if random.one_in(2) { 1 } else { random.pick(&legal) }
}

fn scheduler_config(random: &mut Random, ranks: usize) -> SchedulerConfig {
    let page_size = random.between(1, 17) as usize;
    // Now and then as small as pools can be, or so large that long prefixes are shared.
    let (pool_tokens, context_max) = match random.below(16) {
        0 => (2, random.between(2, 20)),
        1..4 => (random.between(300, 1200), random.between(100, 300)),
        _ => (random.between(20, 160), random.between(10, 120)),
    };
    SchedulerConfig {
        page_size,
        num_pages: (pool_tokens as usize).div_ceil(page_size),
        max_running: random.between(1, 14) as usize,
        token_budget: if pool_tokens < 300 {
            random.pick(&[1, 3, 7, 16, 64, 256])
        } else {
            random.pick(&[7, 64, 128, 512])
        },
        context_max: context_max as usize,
        cache: if random.one_in(4) { CachePolicy::None } else { CachePolicy::Radix },
        mixed: !random.one_in(3),
        overlap: !random.one_in(3),
        stages: stages(random, ranks),
        eos_tokens: vec![EOS],
        waiting_max: random.pick(&[4, 30, 1000, 1000, 1000]),
        queue_order: random.pick(&[QueueOrder::Fcfs, QueueOrder::LongestPrefix]),
        step_order: random.pick(&[StepOrder::PrefillFirst, StepOrder::DecodeFirst]),
        reserve_percent: random.pick(&[0, 0, 50, 100]),
        track_freed: true,
    }
}

/// Bursts, pauses, and now and then a flood of small requests over a big one of low priority.
fn requests(random: &mut Random, context_max: usize) -> Vec<PlannedRequest> {
    let is_flood = random.one_in(10);
    let count = if is_flood { random.between(80, 160) } else { random.between(5, 60) };
    let abort_one_in = random.pick(&[2, 5, 20, 1000]);
    let gap_us = random.pick(&[10, 200, 2_000]);
    let (mut at_us, mut planned) = (0, Vec::new());
    for id in 0..count {
        let mut request = request(random, context_max, RequestId(id));
        if is_flood {
            let is_big = id % 40 == 0;
            request.priority = if is_big { -1 } else { 0 };
            request.prompt.truncate(if is_big { context_max } else { 3 });
            request.sampling.max_tokens = Some(3);
        } else if !random.one_in(3) {
            // Otherwise in the same instant as the one before.
            at_us += random.below(gap_us) * if random.one_in(20) { 50 } else { 1 };
        }
        let answer_max = context_max as u64;
        let abort = random.one_in(abort_one_in).then(|| match random.below(5) {
            0 => AbortAt::Once,
            1 => AbortAt::After(random.below(20 * gap_us)),
            2 => AbortAt::Begin,
            3 => AbortAt::Tokens(random.between(1, answer_max) as usize),
            _ => AbortAt::End,
        });
        planned.push(PlannedRequest {
            at_us,
            link: random.index(TOKENIZER_LINKS),
            request,
            abort,
            abort_twice: random.one_in(3),
        });
    }
    planned
}

/// Prompts share beginnings: one of three base texts, cut anywhere, with a tail of its own. Some are empty
/// or too long.
fn request(random: &mut Random, context_max: usize, id: RequestId) -> SubmitRequest {
    let len_max = if random.one_in(2) { context_max as u64 + 2 } else { 8 };
    let len = if random.one_in(60) { 0 } else { random.between(1, len_max) };
    let (base, own) = (random.below(3), random.below(len / 2 + 1));
    let mut prompt: Vec<TokenId> = (0..len - own).map(|i| (100 * base + i % 7) as TokenId).collect();
    prompt.extend((0..own).map(|_| random.below(3) as TokenId));
    let sampling = SamplingParams {
        temperature: 1.0,
        max_tokens: (!random.one_in(4)).then(|| random.between(1, 60) as u32),
        min_tokens: if random.one_in(4) { random.below(10) as u32 } else { 0 },
        ignore_eos: random.one_in(2),
        stop_token_ids: if random.one_in(5) { vec![11, 12] } else { Vec::new() },
        seed: random.next(),
        ..SamplingParams::default()
    };
    SubmitRequest {
        id,
        prompt,
        sampling,
        text: TextParams::default(),
        cache_salt: random.one_in(4).then(|| "tenant".to_owned()),
        priority: if random.one_in(4) { random.below(5) as i32 - 2 } else { 0 },
    }
}
