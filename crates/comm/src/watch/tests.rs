use super::*;
use crate::shm::Operation;
use std::sync::atomic::{AtomicBool, Ordering};

fn page(marks: usize) -> WatchPage {
    WatchPage::create(marks).unwrap().1
}

#[test]
fn a_mapped_page_shows_what_another_mapping_wrote() {
    let (fd, made) = WatchPage::create(3).unwrap();
    let mapped = WatchPage::map(&fd).unwrap();
    assert_eq!((mapped.marks(), made.read(1).beat_ns), (3, 0));
    let mark = mapped.mark(1);
    mark.enter(Activity::Plan, 7);
    mark.note(Track::Tensors, 5, Operation::AllReduce as u8, true);
    let seen = made.read(1);
    let (at, tensors) = (seen.track(Track::Loop), seen.track(Track::Tensors));
    assert_eq!((at.activity(), at.sequence), (Activity::Plan, 7));
    assert_eq!((tensors.operation(), tensors.sequence, tensors.inside), (Operation::AllReduce, 5, true));
    assert!(seen.beat_ns >= at.since_ns && at.since_ns > 0);
    assert_eq!((made.read(0).beat_ns, made.read(2).beat_ns), (0, 0), "other marks are untouched");
    made.reset(1);
    assert_eq!((made.read(1).beat_ns, made.read(1).track(Track::Tensors).inside), (0, false));
}

#[test]
fn strange_memory_is_refused() {
    assert!(WatchPage::create(0).is_err() && WatchPage::create(100_000).is_err());
    let other = crate::mapping::Mapping::create(c"other", 1 << 20).unwrap();
    assert!(WatchPage::map(&other).unwrap_err().to_string().contains("none of this binary"));
    let small = crate::mapping::Mapping::create(c"small", 64).unwrap();
    assert!(WatchPage::map(&small).unwrap_err().to_string().contains("64 bytes"));
}

#[test]
fn times_add_up_and_the_oldest_token_counts() {
    let page = page(2);
    let [a, b] = [page.mark(0), page.mark(1)];
    assert_eq!(page.token_age([0, 1]), None);
    a.token();
    assert_eq!(page.token_age([0, 1]), None, "one of them never had one");
    b.token();
    // Asked first: ages grow meanwhile.
    let of_one = page.token_age([1]).unwrap();
    assert!(page.token_age([0, 1]).unwrap() >= of_one);
    a.enter(Activity::Launch, 1);
    a.enter(Activity::Wait, 1);
    a.note(Track::Group, 1, Operation::Barrier as u8, true);
    a.note(Track::Group, 1, Operation::Barrier as u8, false);
    let seen = page.read(0);
    let launch = seen.spent_ns[Activity::Launch as usize];
    assert!(launch > 0 && seen.spent_ns[Activity::Wait as usize] == 0, "{seen:?}");
    assert!(seen.track(Track::Group).inside_ns > 0 && !seen.track(Track::Group).inside);
}

#[test]
fn a_ring_gives_what_is_left_and_counts_what_is_not() {
    let page = page(1);
    let mark = page.mark(0);
    let note = |sequence: u64| mark.note(Track::Group, sequence, Operation::Barrier as u8, true);
    (0..10).for_each(note);
    let mut events = Vec::new();
    let (next, lost) = page.events(0, Track::Group, 0, &mut events);
    assert_eq!((next, lost, events.len()), (10, 0, 10));
    assert!(events.windows(2).all(|w| w[0].at_ns <= w[1].at_ns && w[0].sequence + 1 == w[1].sequence));
    let more = 3 * RING_EVENTS as u64;
    (10..10 + more).for_each(note);
    events.clear();
    let (next, lost) = page.events(0, Track::Group, next, &mut events);
    // The oldest place may be written while it is read, so it never counts.
    assert_eq!((next, events.len()), (10 + more, RING_EVENTS - 1));
    assert_eq!(lost, more - events.len() as u64);
    assert_eq!(page.events(0, Track::Group, next, &mut events), (next, 0));
    assert_eq!(page.events(0, Track::Group, u64::MAX, &mut events), (next, 0), "a number from another life");
}

#[test]
fn no_event_is_read_torn_while_its_ring_is_written() {
    let page = page(1);
    let (mark, stop) = (page.mark(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for sequence in 0.. {
                mark.note(Track::Tensors, sequence, (sequence % 7) as u8, sequence.is_multiple_of(2));
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let (mut next, mut events) = (0, Vec::new());
        while next < 200_000 {
            events.clear();
            let from = next;
            let (end, lost) = page.events(0, Track::Tensors, from, &mut events);
            assert_eq!(end - from, lost + events.len() as u64);
            for (event, number) in events.iter().zip(from + lost..) {
                let seen = (event.sequence, event.code, event.inside);
                assert_eq!(seen, (number, (number % 7) as u8, number.is_multiple_of(2)));
            }
            next = end;
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn steps_of_a_device_are_bars_that_do_not_overlap() {
    let (_, page) = WatchPage::create(1).unwrap();
    let mark = page.mark(0);
    mark.computed(7, Duration::from_nanos(1));
    // Longer than there was time since the one before.
    mark.computed(8, Duration::from_secs(1 << 30));
    let mut events = Vec::new();
    page.events(0, Track::Device, 0, &mut events);
    let steps: Vec<_> = events.iter().map(|event| (event.sequence, event.inside)).collect();
    assert_eq!(steps, [(7, true), (7, false), (8, true), (8, false)]);
    assert!(events.is_sorted_by_key(|event| event.at_ns));
    assert_eq!(events[1].at_ns, events[2].at_ns);
    let seen = page.read(0);
    assert!(!seen.track(Track::Device).inside && seen.beat_ns == 0, "no sign of life of the loop");
    let inside_ns = events[3].at_ns - events[2].at_ns + events[1].at_ns - events[0].at_ns;
    assert_eq!(seen.track(Track::Device).inside_ns, inside_ns);
}
