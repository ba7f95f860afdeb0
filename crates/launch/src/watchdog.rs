//! The watchdog: a thread of the launcher that reads the watch page and tells who does not answer.
//!
//! A loop that waits beats on the page all the time ([`BEAT_INTERVAL`]), so one without a beat computes, is
//! stopped or is stuck. Whether it computes is told by its process's CPU time: one that does is left alone, since
//! nobody can tell a long computation from an endless one. Any other is *suspect* after [`Limits::report`], told
//! with the positions of all loops, and *lost* after [`Limits::end`]. While a server loads, nobody beats, and a slow
//! disk or driver is no reason to end it: then only processes that a signal has stopped are silent ([`Stage`]).
//!
//! **Invariants**
//! - Silence is counted in the watchdog's own ticks, each at most twice its nominal length: when the launcher or
//!   the whole machine was stopped for a while, nobody is suspect for it afterwards.
//! - Idle is never mistaken for stuck: ranks and text processes beat while they wait for work.
//! - The thread shares nothing with the api's event loop, which is itself one of the watched loops.

use crate::StderrSink;
use crate::child::exit_at_once;
use crate::kernel;
use crate::supervisor::LAST_LINES;
use lockstep_comm::watch::{Activity, BEAT_INTERVAL, Seen, Track, WatchPage, now_ns};
use lockstep_core::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Time between two looks at the page.
const TICK: Duration = Duration::from_millis(250);
/// From this much silence on the CPU time is looked at.
const CPU_FROM: Duration = Duration::from_secs(1);
/// A loop whose process uses at least one part in so many of the time computes.
const COMPUTING_PART: u32 = 4;

/// A loop to watch.
#[derive(Clone, Debug)]
pub struct WatchedLoop {
    /// The process it runs in.
    pub process: String,
    /// Its number.
    pub pid: u32,
    /// What it does there: `TP1`, `tokenizer`.
    pub label: String,
    /// Its mark on the page.
    pub mark: usize,
    /// Its rank, if it is one.
    pub rank: Option<usize>,
    /// The replica that fails with it, while others go on; `None`: the whole server does.
    pub replica: Option<usize>,
}

/// How long a loop may be silent.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Until it is told.
    pub report: Duration,
    /// Until it is given up.
    pub end: Duration,
}

impl Limits {
    /// Told after 5 s, or half of `timeout` if that is less; given up after `timeout`.
    pub fn of(timeout: Duration) -> Self {
        let report = Duration::from_secs(5).min(timeout / 2);
        // Never within what a healthy loop may take between two beats.
        Self { report: report.max(2 * BEAT_INTERVAL), end: timeout.max(3 * BEAT_INTERVAL) }
    }
}

/// What the watched loops are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// They load: one is silent while its process is stopped by a signal.
    Loading,
    /// They serve: one is silent while it does not beat.
    Serving,
}

/// What the watchdog has to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Concern {
    /// Some loops do not answer. Their positions are in the log.
    Suspect {
        /// Which, in one sentence.
        text: String,
        /// The replicas that it concerns; none: the whole server.
        replicas: Vec<usize>,
    },
    /// All of them answer again.
    Recovered,
    /// A process is given up.
    Lost {
        /// Its name.
        process: String,
        /// Why, to follow "because".
        why: String,
    },
}

/// Where concerns arrive.
pub type Concerns = UnboundedReceiver<Concern>;

/// The running thread; ends when dropped.
#[derive(Debug)]
pub struct Watchdog {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches `loops` on `page`. The launcher's own loop, in this process, is given up by ending the process at
    /// once with exit code 1, which ends its children too: nobody else could.
    pub fn start(
        page: WatchPage,
        loops: Vec<WatchedLoop>,
        (stage, limits): (Stage, Limits),
        stderr: StderrSink,
    ) -> std::io::Result<(Self, Concerns)> {
        let (sender, concerns) = unbounded_channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let judge = Judge::new(loops.len(), limits);
        let watch = Watch { judge, stage, page, loops, sender, stderr, told: None };
        let thread =
            std::thread::Builder::new().name("watchdog".into()).spawn(move || watch.run(&stopped))?;
        Ok((Self { stop, thread: Some(thread) }, concerns))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// The thread's state.
struct Watch {
    judge: Judge,
    stage: Stage,
    page: WatchPage,
    loops: Vec<WatchedLoop>,
    sender: UnboundedSender<Concern>,
    stderr: StderrSink,
    /// The suspicion that was told last.
    told: Option<String>,
}

impl Watch {
    fn run(mut self, stopped: &AtomicBool) {
        let mut last = Instant::now();
        loop {
            std::thread::park_timeout(TICK);
            if stopped.load(Ordering::Relaxed) {
                return;
            }
            let now = Instant::now();
            self.look(now - last);
            last = now;
        }
    }

    fn look(&mut self, elapsed: Duration) {
        let seen: Vec<Seen> = self.loops.iter().map(|l| self.page.read(l.mark)).collect();
        let now = now_ns();
        let mut suspects = Vec::new();
        for (index, watched) in self.loops.iter().enumerate() {
            let has_ended = seen[index].track(Track::Loop).activity() == Activity::Ended;
            let is_excused = has_ended || self.stage == Stage::Loading && !kernel::is_stopped(watched.pid);
            let beat = if is_excused { now } else { seen[index].beat_ns };
            match self.judge.observe(index, elapsed, beat, || kernel::cpu_time(watched.pid)) {
                Judged::Answers => {}
                Judged::Suspect => suspects.push(index),
                Judged::Lost(silent) => {
                    suspects.push(index);
                    self.give_up(watched, silent);
                }
            }
        }
        self.tell(&suspects, &seen, now);
    }

    /// Tells a new suspicion, with all positions, or the end of the last one.
    fn tell(&mut self, suspects: &[usize], seen: &[Seen], now: u64) {
        let names: Vec<&str> = suspects.iter().map(|i| self.loops[*i].label.as_str()).collect();
        let suspicion = (!names.is_empty()).then(|| names.join(", "));
        if suspicion == self.told {
            return;
        }
        match &suspicion {
            None => {
                tracing::warn!("{} answers again", self.told.as_deref().unwrap_or_default());
                let _ = self.sender.send(Concern::Recovered);
            }
            Some(names) => {
                let text = match missing(&self.loops, seen, suspects) {
                    Some(operation) => {
                        format!("{names} does not answer; other ranks wait for it in {operation}")
                    }
                    None => format!("{names} does not answer"),
                };
                tracing::error!("{text}");
                for (watched, seen) in self.loops.iter().zip(seen) {
                    let process = kernel::describe(watched.pid);
                    tracing::error!(
                        "{} (pid {}): {}; {process}",
                        watched.label,
                        watched.pid,
                        position(seen, now)
                    );
                }
                let of_replicas: Option<Vec<usize>> =
                    suspects.iter().map(|i| self.loops[*i].replica).collect();
                let replicas = of_replicas.unwrap_or_default();
                let _ = self.sender.send(Concern::Suspect { text, replicas });
            }
        }
        self.told = suspicion;
    }

    fn give_up(&self, watched: &WatchedLoop, silent: Duration) {
        let process = kernel::describe(watched.pid);
        let why = format!("{} did not answer for {:.1} s: {process}", watched.label, silent.as_secs_f64());
        if watched.pid == std::process::id() {
            self.stderr.write_line(format!("lockstep: {why}; ended").as_bytes());
            self.stderr.flush_within(LAST_LINES);
            exit_at_once(ExitCode::Internal.code());
        }
        let _ = self.sender.send(Concern::Lost { process: watched.process.clone(), why });
    }
}

/// The operation in which other ranks wait for one of `suspects`.
fn missing(loops: &[WatchedLoop], seen: &[Seen], suspects: &[usize]) -> Option<String> {
    let is_rank = |index: &usize| loops[*index].rank.is_some();
    let suspect = *suspects.iter().find(|i| is_rank(i))?;
    let others = (0..loops.len())
        .filter(|i| is_rank(i) && loops[*i].replica == loops[suspect].replica && !suspects.contains(i));
    others.into_iter().find_map(|index| {
        [Track::Tensors, Track::Group].into_iter().find_map(|track| {
            let (theirs, its) = (seen[index].track(track), seen[suspect].track(track));
            // Waiting for the next step of an idle server is no waiting for a rank.
            let is_idle = seen[index].track(Track::Loop).activity() == Activity::Idle;
            let waits = theirs.inside && !is_idle && (its.sequence < theirs.sequence || !its.inside);
            waits.then(|| format!("{} (operation {})", theirs.operation().name(), theirs.sequence))
        })
    })
}

/// Where a loop stands, in words.
fn position(seen: &Seen, now: u64) -> String {
    let ago = |at: u64| now.saturating_sub(at) as f64 / 1e9;
    if seen.beat_ns == 0 {
        return "no sign since its start".into();
    }
    let at = seen.track(Track::Loop);
    let mut text = format!(
        "last sign {:.1} s ago, {} of step {} since {:.1} s",
        ago(seen.beat_ns),
        at.activity().name(),
        at.sequence,
        ago(at.since_ns)
    );
    for track in [Track::Group, Track::Tensors] {
        let operation = seen.track(track);
        if operation.sequence > 0 {
            let inside = if operation.inside { "in" } else { "left" };
            let (name, number, since) =
                (operation.operation().name(), operation.sequence, ago(operation.since_ns));
            text.push_str(&format!(", {inside} {name} {number} since {since:.1} s"));
        }
    }
    text
}

/// What is thought of a loop after a look at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Judged {
    Answers,
    Suspect,
    /// Silent for so long; said once.
    Lost(Duration),
}

/// Counts silence; pure, time and CPU time are arguments.
#[derive(Debug)]
struct Judge {
    limits: Limits,
    loops: Vec<Silence>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Silence {
    beat: u64,
    silent: Duration,
    /// CPU time when the silence reached [`CPU_FROM`], and the silence then.
    cpu: Option<(Duration, Duration)>,
    is_lost: bool,
}

impl Judge {
    fn new(loops: usize, limits: Limits) -> Self {
        Self { limits, loops: vec![Silence::default(); loops] }
    }

    /// One look: loop `index` showed `beat`, `elapsed` after the last look.
    fn observe(
        &mut self,
        index: usize,
        elapsed: Duration,
        beat: u64,
        cpu: impl Fn() -> Option<Duration>,
    ) -> Judged {
        let (limits, state) = (self.limits, &mut self.loops[index]);
        if state.beat != beat {
            *state = Silence { beat, ..Silence::default() };
            return Judged::Answers;
        }
        state.silent += elapsed.min(2 * TICK);
        if state.cpu.is_none() && state.silent >= CPU_FROM.min(limits.report / 2) {
            state.cpu = cpu().map(|used| (used, state.silent));
        }
        if state.silent < limits.report {
            return Judged::Answers;
        }
        if let (Some((before, from)), Some(used)) = (state.cpu, cpu())
            && used.saturating_sub(before) * COMPUTING_PART > state.silent - from
        {
            return Judged::Answers;
        }
        if state.silent < limits.end || state.is_lost {
            return Judged::Suspect;
        }
        state.is_lost = true;
        Judged::Lost(state.silent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { report: Duration::from_secs(5), end: Duration::from_secs(30) };

    /// Looks every tick for `seconds`; when it became suspect, and lost, in seconds.
    fn watch(
        seconds: u64,
        beat: impl Fn(u64) -> u64,
        cpu_ms: impl Fn(u64) -> u64,
    ) -> (Option<f64>, Option<f64>) {
        let mut judge = Judge::new(1, LIMITS);
        let (mut suspect, mut lost) = (None, None);
        for tick in 1..=seconds * 4 {
            let ms = tick * 250;
            match judge.observe(0, TICK, beat(ms), || Some(Duration::from_millis(cpu_ms(ms)))) {
                Judged::Answers => {}
                Judged::Suspect => drop(suspect.get_or_insert(ms as f64 / 1e3)),
                Judged::Lost(_) => assert_eq!(lost.replace(ms as f64 / 1e3), None, "lost once"),
            }
        }
        (suspect, lost)
    }

    #[test]
    fn silence_is_told_and_then_given_up() {
        assert_eq!(watch(40, |_| 1, |_| 0), (Some(5.25), Some(30.25)));
        assert_eq!(watch(40, |ms| ms.min(10_000), |_| 7), (Some(15.0), Some(40.0)));
    }

    #[test]
    fn beats_and_computation_are_answers() {
        assert_eq!(watch(60, |ms| ms / 500, |_| 0), (None, None));
        assert_eq!(watch(60, |_| 1, |ms| ms), (None, None), "one core at work");
        assert_eq!(watch(60, |_| 1, |ms| ms / 3), (None, None), "a third of one");
        let slow = watch(60, |_| 1, |ms| ms / 100);
        assert_eq!(slow, (Some(5.25), Some(30.25)), "a background thread is no computation");
    }

    #[test]
    fn a_stop_of_the_watchdog_itself_counts_for_nobody() {
        let mut judge = Judge::new(1, LIMITS);
        let mut observe = |seconds| judge.observe(0, Duration::from_secs(seconds), 1, || None);
        assert_eq!(observe(0), Judged::Answers);
        assert_eq!(observe(3600), Judged::Answers);
    }

    #[test]
    fn limits_follow_the_timeout() {
        let of = |seconds: f64| {
            let limits = Limits::of(Duration::from_secs_f64(seconds));
            (limits.report.as_secs_f64(), limits.end.as_secs_f64())
        };
        assert_eq!((of(30.0), of(4.0), of(1.0)), ((5.0, 30.0), (2.0, 4.0), (1.0, 1.5)));
    }

    #[test]
    fn a_missing_rank_is_told_with_the_operation() {
        let (_, page) = WatchPage::create(2).unwrap();
        let loops: Vec<WatchedLoop> = (0..2)
            .map(|rank| WatchedLoop {
                process: format!("lockstep-TP{rank}-scheduler"),
                pid: 1,
                label: format!("TP{rank}"),
                mark: rank,
                rank: Some(rank),
                replica: None,
            })
            .collect();
        page.mark(0).enter(Activity::Launch, 3);
        let seen = [page.read(0), page.read(1)];
        assert_eq!(missing(&loops, &seen, &[1]), None, "nobody waits");
        assert!(position(&seen[0], now_ns()).contains("launch of step 3"));
        assert_eq!(position(&seen[1], now_ns()), "no sign since its start");
    }
}
