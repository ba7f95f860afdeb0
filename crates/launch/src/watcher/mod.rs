//! The supervising thread: one poll over process descriptors, log pipes, signals and commands.
//!
//! **Invariant:** nothing here blocks except `poll` itself: pipes are non-blocking, stderr is a
//! bounded queue, and a child is only waited for after its descriptor says it has ended. The thread
//! must not end before its children have (the kernel's death signal hangs on it).
//!
//! Reading order: `remote` (what is asked), `watched` (a child), this file.

mod remote;
mod watched;

pub(crate) use remote::{Command, Remote};

use crate::cause::Verdict;
use crate::child::exit_at_once;
use crate::signals::Signals;
use crate::spawn::{self, Program};
use crate::supervisor::{LAST_LINES, UNKILLABLE_AFTER};
use crate::{ChildSpec, ChildStatus, Event, Failure, LaunchError, Phase, ShutdownReport, StderrSink};
use lockstep_core::ExitCode;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::process::{Signal, pidfd_send_signal};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, channel};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;
use watched::{Watched, send_all};

/// Bytes taken from one log pipe before others get their turn.
const READ_BYTES_MAX: usize = 64 << 10;
/// How long a second signal waits for the killed children.
const SUDDEN_END_WAIT: Duration = Duration::from_secs(1);

/// A shutdown under way.
struct Ending {
    kill_at: Instant,
    give_up_at: Option<Instant>,
    report: ShutdownReport,
    done: Vec<SyncSender<ShutdownReport>>,
}

/// A replica that is ended while others go on.
struct Leaving {
    replica: usize,
    kill_at: Instant,
    is_killed: bool,
}

/// What a poll entry belongs to.
#[derive(Clone, Copy)]
enum Source {
    Wake,
    Signals,
    Process(usize),
    Stdin(usize),
    Output(usize, usize),
}

pub(crate) struct Watcher {
    commands: Receiver<Command>,
    wake: Arc<OwnedFd>,
    signals: Signals,
    program: Program,
    stderr: StderrSink,
    events: UnboundedSender<Event>,
    children: Vec<Watched>,
    phase: Phase,
    /// Of replicas that are started again while others serve.
    replica_phases: BTreeMap<usize, Phase>,
    /// By what fails together: each replica, and the rest of the server.
    verdicts: BTreeMap<Option<usize>, Verdict>,
    leaving: Vec<Leaving>,
    ending: Option<Ending>,
    cleanups: Vec<Box<dyn FnOnce() + Send>>,
    signalled: bool,
    stopping: bool,
}

impl Watcher {
    pub(crate) fn new(
        stderr: StderrSink,
        events: UnboundedSender<Event>,
    ) -> Result<(Self, Remote), LaunchError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = Arc::new(eventfd(0, flags).map_err(LaunchError::system("eventfd"))?);
        let (sender, commands) = channel();
        let watcher = Self {
            commands,
            wake: wake.clone(),
            signals: Signals::start()?,
            program: Program::open()?,
            stderr,
            events,
            children: Vec::new(),
            phase: Phase::Loading,
            replica_phases: BTreeMap::new(),
            verdicts: BTreeMap::new(),
            leaving: Vec::new(),
            ending: None,
            cleanups: Vec::new(),
            signalled: false,
            stopping: false,
        };
        Ok((watcher, Remote { commands: sender, wake }))
    }

    /// The thread's body; returns when stopped and no child is left.
    pub(crate) fn run(mut self) {
        while !(self.stopping && (self.children.is_empty() || self.ending.is_none())) {
            let (sources, ready) = self.wait();
            // Output first, so that a dead child's last words are complete; deaths last and from
            // the back, because they remove entries.
            for (source, _) in sources.iter().zip(&ready).filter(|(_, ready)| **ready) {
                match *source {
                    Source::Output(child, which) => {
                        self.children[child].forward(which, READ_BYTES_MAX, &self.stderr)
                    }
                    Source::Stdin(child) => self.children[child].feed(),
                    Source::Signals => self.take_signals(),
                    Source::Wake | Source::Process(_) => {}
                }
            }
            let dead: Vec<usize> = sources
                .iter()
                .zip(&ready)
                .filter_map(|(source, ready)| match source {
                    Source::Process(child) if *ready => Some(*child),
                    _ => None,
                })
                .collect();
            // Commands before deaths: who announced a drain before telling a child to end must not
            // see that end reported as a death.
            self.take_commands();
            self.reap(&dead);
            self.keep_deadlines(Instant::now());
        }
    }

    /// Polls everything; what was polled, and which of it is ready.
    fn wait(&self) -> (Vec<Source>, Vec<bool>) {
        let mut sources = vec![Source::Wake];
        let mut fds = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        for fd in self.signals.fds() {
            sources.push(Source::Signals);
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        }
        for (i, child) in self.children.iter().enumerate() {
            sources.push(Source::Process(i));
            fds.push(PollFd::new(&child.pidfd, PollFlags::IN));
            if child.sent < child.unsent.len() {
                sources.push(Source::Stdin(i));
                fds.push(PollFd::new(&child.stdin, PollFlags::OUT));
            }
            for (which, output) in child.outputs.iter().enumerate() {
                if let Some(pipe) = &output.pipe {
                    sources.push(Source::Output(i, which));
                    fds.push(PollFd::new(pipe, PollFlags::IN));
                }
            }
        }
        let timeout = self.next_deadline().map(|at| {
            // Rounded up: waking a moment early would spin until the deadline.
            let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => fds.iter_mut().for_each(PollFd::clear_revents),
            Err(e) => panic!("invariant: poll takes what this thread opened: {e}"),
        }
        let ready = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        (sources, ready)
    }

    fn next_deadline(&self) -> Option<Instant> {
        let ending = self.ending.as_ref().map(|e| e.give_up_at.unwrap_or(e.kill_at));
        let verdicts = self.verdicts.values().filter_map(Verdict::due);
        let leaving = self.leaving.iter().filter(|l| !l.is_killed).map(|l| l.kill_at);
        verdicts.chain(leaving).chain(ending).min()
    }

    fn keep_deadlines(&mut self, now: Instant) {
        let failures: Vec<_> = self.verdicts.values_mut().filter_map(|verdict| verdict.decide(now)).collect();
        failures.into_iter().for_each(|failure| self.report(Event::Failed(failure)));
        for leaving in self.leaving.iter_mut().filter(|l| !l.is_killed && now >= l.kill_at) {
            leaving.is_killed = true;
            send_all(self.children.iter().filter(|c| c.replica == Some(leaving.replica)), Signal::KILL);
        }
        let Some(ending) = &mut self.ending else { return };
        match ending.give_up_at {
            None if now >= ending.kill_at => {
                ending.give_up_at = Some(now + UNKILLABLE_AFTER);
                ending.report.killed = self.children.iter().map(|c| c.name.clone()).collect();
                send_all(&self.children, Signal::KILL);
            }
            Some(at) if now >= at => {
                ending.report.left = self.children.iter().map(|c| c.name.clone()).collect();
                self.finish_ending();
            }
            _ => {}
        }
    }

    fn take_commands(&mut self) {
        let mut counter = [0; 8];
        let _ = rustix::io::read(&*self.wake, &mut counter);
        while let Ok(command) = self.commands.try_recv() {
            match command {
                // A reply nobody waits for any more is no error.
                Command::Spawn(spec, reply) => drop(reply.send(self.start(&spec))),
                Command::SetPhase(phase) => self.phase = phase,
                Command::SetReplicaPhase(replica, phase) => {
                    self.replica_phases.insert(replica, phase);
                }
                Command::EndReplica { replica, grace } => self.begin_leaving(replica, grace),
                Command::GiveUp { name, why } => {
                    if let Some(child) = self.children.iter_mut().find(|child| child.name == name) {
                        child.given_up = Some(why);
                        let _ = pidfd_send_signal(&child.pidfd, Signal::KILL);
                    }
                }
                Command::List(reply) => {
                    let list = self.children.iter().map(|c| (c.name.clone(), c.pid)).collect();
                    drop(reply.send(list));
                }
                Command::Elsewhere(event) => self.take_elsewhere(*event),
                Command::AtSuddenEnd(cleanup) => self.cleanups.push(cleanup),
                Command::Shutdown { grace, done } => self.begin_ending(grace, done),
                Command::Stop => self.stopping = true,
            }
        }
    }

    /// Deaths on other hosts and those here have one first cause. While everything is ended they are none.
    fn take_elsewhere(&mut self, event: Event) {
        match event {
            Event::Failed(_) | Event::ChildDied { .. } if self.ending.is_some() => {}
            Event::Failed(failure) => {
                self.verdicts.entry(failure.replica).or_default().add(failure, Instant::now());
            }
            other => self.report(other),
        }
    }

    fn start(&mut self, spec: &ChildSpec) -> Result<u32, LaunchError> {
        let started = spawn::start(&self.program, spec)?;
        let pid = started.pid;
        self.children.push(Watched::new(spec, started));
        Ok(pid)
    }

    fn begin_leaving(&mut self, replica: usize, grace: Duration) {
        self.leaving.push(Leaving { replica, kill_at: Instant::now() + grace, is_killed: false });
        send_all(self.children.iter().filter(|c| c.replica == Some(replica)), Signal::TERM);
        self.finish_leaving();
    }

    /// Tells of replicas that are gone.
    fn finish_leaving(&mut self) {
        let is_there = |l: &Leaving| self.children.iter().any(|c| c.replica == Some(l.replica));
        let (there, gone): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.leaving).into_iter().partition(is_there);
        self.leaving = there;
        for Leaving { replica, .. } in gone {
            self.verdicts.remove(&Some(replica));
            self.report(Event::ReplicaEnded(replica));
        }
    }

    fn begin_ending(&mut self, grace: Duration, done: Option<SyncSender<ShutdownReport>>) {
        let failures: Vec<_> = self.verdicts.values_mut().filter_map(Verdict::decide_now).collect();
        failures.into_iter().for_each(|failure| self.report(Event::Failed(failure)));
        let kill_at = Instant::now() + grace;
        let ending = self.ending.get_or_insert_with(|| Ending {
            kill_at,
            give_up_at: None,
            report: ShutdownReport::default(),
            done: Vec::new(),
        });
        // A second, more impatient shutdown shortens the first.
        ending.kill_at = ending.kill_at.min(kill_at);
        ending.done.extend(done);
        if self.children.is_empty() {
            self.finish_ending();
        } else {
            send_all(&self.children, Signal::TERM);
        }
    }

    fn finish_ending(&mut self) {
        let Some(ending) = self.ending.take() else { return };
        // A process that SIGKILL could not end is given up; it stays our zombie until we exit.
        self.children.clear();
        self.verdicts.clear();
        self.leaving.clear();
        self.replica_phases.clear();
        self.phase = Phase::Loading;
        self.report(Event::AllExited);
        for done in ending.done {
            let _ = done.send(ending.report.clone());
        }
    }

    fn report(&self, event: Event) {
        // Nobody listens during the launcher's own end.
        let _ = self.events.send(event);
    }

    fn take_signals(&mut self) {
        while let Some(signal) = self.signals.next() {
            // A terminal that closes sends SIGHUP twice (shell and kernel): never "hurry up".
            if self.signalled && signal != libc::SIGHUP {
                // What was asked for before counts: cleanups above all, when both signals come in one turn of the loop.
                self.take_commands();
                self.sudden_end(signal);
            }
            self.signalled = true;
            self.report(Event::Signal(signal));
        }
    }

    /// The user asked twice: everything ends now.
    fn sudden_end(&mut self, signal: i32) -> ! {
        send_all(&self.children, Signal::KILL);
        let deadline = Instant::now() + SUDDEN_END_WAIT;
        for child in &self.children {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let _ = poll(&mut [PollFd::new(&child.pidfd, PollFlags::IN)], Some(&timeout));
        }
        for cleanup in self.cleanups.drain(..) {
            cleanup();
        }
        let (name, code) = match signal {
            libc::SIGINT => ("SIGINT", ExitCode::Interrupted),
            _ => ("SIGTERM", ExitCode::Terminated),
        };
        self.stderr.write_line(format!("lockstep: second signal ({name}): ended without drain").as_bytes());
        self.stderr.flush_within(LAST_LINES);
        exit_at_once(code.code())
    }

    /// Takes the statuses of children whose descriptors say that they have ended.
    fn reap(&mut self, dead: &[usize]) {
        let now = Instant::now();
        let mut deaths = Vec::new();
        for &i in dead.iter().rev() {
            let Some(status) = self.children[i].status() else { continue };
            for which in [0, 1] {
                // More than a pipe holds; a grandchild may write to it for ever.
                self.children[i].forward(which, 1 << 20, &self.stderr);
            }
            let mut child = self.children.remove(i);
            for output in &mut child.outputs {
                output.lines.finish(|line| {
                    self.stderr.write_line(line);
                    child.tail.push(line);
                });
            }
            deaths.push((child, status));
        }
        let any = !deaths.is_empty();
        for (child, status) in deaths.into_iter().rev() {
            self.judge(child, status, now);
        }
        if any {
            self.finish_leaving();
        }
        if any && self.children.is_empty() {
            match self.ending {
                Some(_) => self.finish_ending(),
                None => self.report(Event::AllExited),
            }
        }
    }

    fn judge(&mut self, mut child: Watched, status: ChildStatus, now: Instant) {
        let (name, role, replica) = (child.name, child.role, child.replica);
        let phase = self.phase_of(replica);
        let is_leaving = self.leaving.iter().any(|l| replica == Some(l.replica));
        if phase == Phase::Draining && status == ChildStatus::Exit(0) {
            self.report(Event::ChildExited { name, role });
        } else if self.ending.is_none() && !is_leaving {
            self.report(Event::ChildDied { name: name.clone(), role, status });
            let reason = child.given_up.take();
            let failure = Failure::new(name, role, status, phase, child.tail.take());
            let failure = Failure { reason, replica, ..failure };
            self.verdicts.entry(replica).or_default().add(failure, now);
        }
    }

    /// What a child's part of the server is doing.
    fn phase_of(&self, replica: Option<usize>) -> Phase {
        let own = replica.and_then(|replica| self.replica_phases.get(&replica));
        if self.phase == Phase::Draining { self.phase } else { own.copied().unwrap_or(self.phase) }
    }
}
