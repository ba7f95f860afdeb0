//! Host 0's side: who has joined, what they say, what they are told.
//!
//! Threads: one accepts, one for each connection reads, one sends signs of life. All they share is behind one lock,
//! which is never held while something is sent or received.

use super::Fact;
use super::beat_interval;
use super::messages::{FromHost, Join, StartOrder, ToHost, disagreement};
use crate::{ChildStatus, Event, Failure, LaunchError, Phase, Reporter};
use lockstep_comm::meeting::MeetingRoom;
use lockstep_comm::secret::Key;
use lockstep_comm::trusted::{self, Purpose, TrustError, TrustedReader, TrustedWriter};
use lockstep_core::{ExitCode, HostMap};
use lockstep_wire::Role;
use rustix::net::Shutdown;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Connections whose peer has not shown yet that it knows the secret.
const HANDSHAKES_MAX: usize = 32;
/// How long a host may take to say what it was started with.
const JOIN_PATIENCE: Duration = Duration::from_secs(5);

/// What a room is for.
#[derive(Debug)]
pub struct RoomSpec {
    /// Where to listen: an address of this host.
    pub address: SocketAddr,
    /// Stands for the shared secret.
    pub key: Key,
    /// Hosts and their ranks.
    pub map: HostMap,
    /// What must be equal.
    pub facts: Vec<Fact>,
    /// How long a host may be silent before it is lost.
    pub limit: Duration,
}

/// The hosts of this server, seen from host 0.
pub struct Room {
    shared: Arc<Shared>,
    address: SocketAddr,
}

struct Shared {
    spec: RoomSpec,
    run: String,
    listener: TcpListener,
    reporter: Reporter,
    meeting: MeetingRoom,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// By node rank; the first, this one, is never used.
    hosts: Vec<Host>,
    /// The last host that came and was sent away, and why.
    refused: Option<String>,
    handshakes: usize,
    /// What the server does, for what is said of a host that is lost.
    phase: Phase,
    is_closing: bool,
}

#[derive(Default)]
struct Host {
    /// While it is here.
    way: Option<Arc<Mutex<TrustedWriter>>>,
    address: Option<IpAddr>,
    has_ended: bool,
    has_noted_drain: bool,
    /// It has ranks that nobody has asked to end: what it says of deaths counts.
    is_running: bool,
}

impl Room {
    /// Listens. What hosts say arrives at the supervisor of `reporter`.
    pub fn open(spec: RoomSpec, reporter: Reporter) -> Result<Self, LaunchError> {
        let listener = TcpListener::bind(spec.address)
            .map_err(|source| LaunchError::Listen { address: spec.address, source })?;
        let address = listener.local_addr().map_err(LaunchError::system("getsockname"))?;
        let hosts = std::iter::repeat_with(Host::default).take(spec.map.nnodes()).collect();
        let state = State { hosts, refused: None, handshakes: 0, phase: Phase::Loading, is_closing: false };
        let shared = Arc::new(Shared {
            run: lockstep_comm::link::random_prefix(),
            listener,
            reporter,
            meeting: MeetingRoom::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            spec,
        });
        for (name, body) in
            [("hosts-accept", Shared::accept as fn(&Arc<Shared>)), ("hosts-beat", Shared::beat)]
        {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name(name.into())
                .spawn(move || body(&shared))
                .map_err(LaunchError::system("starting a thread"))?;
        }
        Ok(Self { shared, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The key of this run.
    pub fn run_key(&self) -> Key {
        super::head::run_key(&self.shared.spec.key, &self.shared.run)
    }

    /// Waits until every host is here, at most `patience`. Errors with a sentence that names those who are not.
    pub fn wait_for_all(&self, patience: Duration) -> Result<(), String> {
        let missing = |state: &State| -> Vec<usize> {
            (1..state.hosts.len()).filter(|host| state.hosts[*host].way.is_none()).collect()
        };
        let state = self.wait_until(patience, |state| missing(state).is_empty());
        let who = missing(&state);
        if who.is_empty() {
            return Ok(());
        }
        let names: Vec<String> = who.iter().map(|host| format!("host {host}")).collect();
        let refused = state.refused.as_ref().map(|why| format!("; last refused: {why}"));
        Err(format!(
            "{} of {} hosts have joined at {} within {:.0} s, {} {} missing{}; start it there with --node-rank, the same \
             flags and the same secret, or raise --dist-timeout",
            state.hosts.len() - who.len(),
            state.hosts.len(),
            self.address,
            patience.as_secs_f64(),
            names.join(" and "),
            if names.len() == 1 { "is" } else { "are" },
            refused.unwrap_or_default()
        ))
    }

    /// Hosts that are not here.
    pub fn missing(&self) -> Vec<usize> {
        let state = self.shared.state();
        (1..state.hosts.len()).filter(|host| state.hosts[*host].way.is_none()).collect()
    }

    /// Has every host start its ranks, and lets `ranks` ranks meet under the name `meeting`.
    pub fn start(&self, order: StartOrder, meeting: (&str, usize)) {
        self.shared.meeting.call(meeting.0, meeting.1);
        for host in &mut self.shared.state().hosts {
            (host.has_ended, host.has_noted_drain, host.is_running) = (false, false, true);
        }
        self.tell(&ToHost::Start(order));
    }

    /// What the server does from now on.
    pub fn set_phase(&self, phase: Phase) {
        self.shared.state().phase = phase;
        match phase {
            Phase::Loading => {}
            Phase::Serving => self.tell(&ToHost::Serving),
            Phase::Draining => self.tell(&ToHost::Draining),
        }
    }

    /// Waits until every host has heard of the drain, at most `patience`.
    pub fn wait_drain_noted(&self, patience: Duration) {
        drop(self.wait_until(patience, |state| state.hosts[1..].iter().all(Host::knows_drain)));
    }

    /// Wakes every rank on other hosts that waits for one that is dead.
    pub fn abort(&self, cause: &str) {
        self.tell(&ToHost::Abort(cause.into()));
    }

    /// Has every host end its ranks.
    pub fn end(&self, cause: &str) {
        self.shared.state().hosts.iter_mut().for_each(|host| host.is_running = false);
        self.tell(&ToHost::End(cause.into()));
    }

    /// Waits until no host has a child any more, at most `patience`; whether that is so.
    pub fn wait_ended(&self, patience: Duration) -> bool {
        let ended = |state: &State| state.hosts[1..].iter().all(|host| host.has_ended || host.way.is_none());
        ended(&self.wait_until(patience, ended))
    }

    /// Ends every host's launcher. What they say from now on is not heard.
    pub fn goodbye(&self, code: ExitCode, why: &str) {
        self.shared.close();
        self.tell(&ToHost::Goodbye { code, why: why.into() });
    }

    fn tell(&self, message: &ToHost) {
        self.shared.tell(message);
    }

    /// Waits until `holds`, at most `patience`, and not beyond the end of the room.
    fn wait_until(&self, patience: Duration, holds: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let state = self.shared.state();
        let waited = self
            .shared
            .changed
            .wait_timeout_while(state, patience, |state| !holds(state) && !state.is_closing);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.shared.close();
        // Wakes the accepting thread.
        let _ = rustix::net::shutdown(&self.shared.listener, Shutdown::Both);
    }
}

impl Host {
    fn knows_drain(&self) -> bool {
        self.has_noted_drain || self.has_ended || self.way.is_none()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // No step of a change leaves it inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing is reported any more, and nobody waits for a host.
    fn close(&self) {
        self.state().is_closing = true;
        self.changed.notify_all();
    }

    /// The accepting thread.
    fn accept(self: &Arc<Self>) {
        loop {
            let accepted = self.listener.accept();
            let mut state = self.state();
            if state.is_closing {
                return;
            }
            let Ok((stream, peer)) = accepted else { continue };
            if state.handshakes >= HANDSHAKES_MAX {
                continue;
            }
            state.handshakes += 1;
            drop(state);
            let shared = self.clone();
            let serve = move || shared.serve(stream, peer);
            if std::thread::Builder::new().name("hosts-peer".into()).spawn(serve).is_err() {
                self.state().handshakes -= 1;
            }
        }
    }

    /// The thread of one connection.
    fn serve(self: Arc<Self>, stream: TcpStream, peer: SocketAddr) {
        let ranks = super::head::run_key(&self.spec.key, &self.run).derive("ranks");
        let met = trusted::accept(stream, |purpose| match purpose {
            Purpose::Host => Some(self.spec.key.clone()),
            Purpose::Rank => Some(ranks),
        });
        self.state().handshakes -= 1;
        match met {
            Ok((Purpose::Host, reader, writer)) => self.serve_host(reader, writer, peer),
            Ok((Purpose::Rank, reader, writer)) => {
                if let Err(why) = self.meeting.attend(reader, writer) {
                    tracing::warn!("a rank at {peer} was sent away: {why}");
                }
            }
            Err(error) => self.refuse(format!("whoever connects from {peer}: {error}")),
        }
    }

    fn refuse(&self, why: String) {
        tracing::warn!("refused: {why}");
        self.state().refused = Some(why);
    }

    /// Kept before it is said: whoever has heard a refusal finds it named here.
    fn send_away(&self, writer: &mut TrustedWriter, why: String) {
        self.refuse(why.clone());
        let _ = send(writer, &ToHost::Refused(why));
    }

    fn serve_host(&self, mut reader: TrustedReader, mut writer: TrustedWriter, peer: SocketAddr) {
        let join = match reader.recv(JOIN_PATIENCE).map(|bytes| serde_json::from_slice(&bytes)) {
            Ok(Ok(FromHost::Join(join))) => join,
            Ok(_) => {
                return self.refuse(format!("the launcher at {peer} says nothing that can be understood"));
            }
            Err(error) => return self.refuse(format!("the launcher at {peer}: {error}")),
        };
        let host = join.node_rank;
        let limit_ms = self.spec.limit.as_millis() as u64;
        let welcome = ToHost::Welcome { run: self.run.clone(), limit_ms };
        if let Err(why) = self.check(&join).and_then(|()| {
            send(&mut writer, &welcome).map_err(|error| format!("host {host} at {peer}: {error}"))
        }) {
            return self.send_away(&mut writer, why);
        }
        if let Err((why, mut writer)) = self.seat(host, writer, peer) {
            return self.send_away(&mut writer, why);
        }
        tracing::info!("host {host} has joined from {}", peer.ip());
        let why = loop {
            match reader.recv(self.spec.limit) {
                Ok(bytes) => match serde_json::from_slice(&bytes) {
                    Ok(message) => self.hear(host, message),
                    Err(error) => break format!("what it says cannot be understood: {error}"),
                },
                Err(TrustError::Closed) => break "its launcher has ended".into(),
                Err(error) => break error.to_string(),
            }
        };
        self.lose(host, why);
    }

    fn check(&self, join: &Join) -> Result<(), String> {
        let nnodes = self.spec.map.nnodes();
        let Join { node_rank: host, .. } = join;
        if join.nnodes != nnodes {
            return Err(format!("host {host} has --nnodes {}, host 0 has {nnodes}", join.nnodes));
        }
        if !(1..nnodes).contains(host) {
            return Err(format!("a host comes with --node-rank {host}, possible are 1..={}", nnodes - 1));
        }
        disagreement(*host, &join.facts, &self.spec.facts).map_or(Ok(()), Err)
    }

    /// Gives a host its place. Errors when that is taken.
    fn seat(
        &self,
        host: usize,
        writer: TrustedWriter,
        peer: SocketAddr,
    ) -> Result<(), (String, TrustedWriter)> {
        let mut state = self.state();
        let place = &mut state.hosts[host];
        if place.way.is_some() {
            let there = place.address.map(|address| format!(" at {address}")).unwrap_or_default();
            return Err((
                format!("a second host comes with --node-rank {host}, the first is{there} still there"),
                writer,
            ));
        }
        let way = Some(Arc::new(Mutex::new(writer)));
        *place = Host { way, address: Some(peer.ip()), ..Host::default() };
        // It has no children yet.
        place.has_ended = true;
        self.changed.notify_all();
        Ok(())
    }

    fn hear(&self, host: usize, message: FromHost) {
        let named = |name: String| format!("{name} on host {host}");
        let is_running = self.state().hosts[host].is_running;
        match message {
            FromHost::Beat | FromHost::Join(_) => {}
            FromHost::Died { .. } | FromHost::Failed(_) if !is_running => {}
            FromHost::Died { name, role, status } => {
                self.report(Event::ChildDied { name: named(name), role, status });
            }
            FromHost::Failed(failure) => {
                let Failure { process, .. } = &*failure;
                let process = named(process.clone());
                self.report(Event::Failed(Failure { process, replica: None, ..*failure }));
            }
            FromHost::Signal(signal) => {
                tracing::info!("host {host} was sent signal {signal}");
                self.report(Event::Signal(signal));
            }
            FromHost::Ended | FromHost::DrainNoted => {
                let mut state = self.state();
                let place = &mut state.hosts[host];
                place.has_noted_drain = true;
                place.has_ended |= matches!(message, FromHost::Ended);
                self.changed.notify_all();
            }
        }
    }

    /// A host is gone: its place is free, and that is one more death.
    fn lose(&self, host: usize, why: String) {
        let mut state = self.state();
        let phase = state.phase;
        let place = &mut state.hosts[host];
        let Some(way) = place.way.take() else { return };
        let address = place.address.map(|address| format!(" ({address})")).unwrap_or_default();
        let had_ended = std::mem::replace(&mut place.has_ended, true);
        let was_running = std::mem::replace(&mut place.is_running, false);
        let is_closing = state.is_closing;
        self.changed.notify_all();
        drop(state);
        way.lock().unwrap_or_else(PoisonError::into_inner).close();
        if is_closing || !was_running || (phase == Phase::Draining && had_ended) {
            tracing::info!("host {host}{address} has left: {why}");
            return;
        }
        let name = format!("host {host}{address}");
        let (role, status) = (Role::Scheduler(self.spec.map.ranks_of(host).start), ChildStatus::Lost);
        let failure = Failure::new(name.clone(), role, status, phase, Vec::new());
        self.report(Event::ChildDied { name, role, status });
        self.report(Event::Failed(Failure { reason: Some(why), ..failure }));
    }

    fn report(&self, event: Event) {
        if !self.state().is_closing {
            self.reporter.report(event);
        }
    }

    /// The thread that sends signs of life.
    fn beat(self: &Arc<Self>) {
        let interval = beat_interval(self.spec.limit);
        let mut last = Instant::now();
        loop {
            let state = self.state();
            if state.is_closing {
                return;
            }
            let left = interval.saturating_sub(last.elapsed());
            drop(self.changed.wait_timeout(state, left));
            if last.elapsed() >= interval {
                last = Instant::now();
                self.tell(&ToHost::Beat);
            }
        }
    }

    /// Sends to every host that is here.
    fn tell(&self, message: &ToHost) {
        let ways: Vec<_> = {
            let state = self.state();
            let hosts = state.hosts.iter().enumerate();
            hosts.filter_map(|(host, place)| Some((host, place.way.clone()?))).collect()
        };
        for (host, way) in ways {
            let sent = send(&mut way.lock().unwrap_or_else(PoisonError::into_inner), message);
            if let Err(error) = sent {
                self.lose(host, error.to_string());
            }
        }
    }
}

fn send(writer: &mut TrustedWriter, message: &ToHost) -> Result<(), TrustError> {
    writer.send(&serde_json::to_vec(message).expect("invariant: strings and numbers serialise"))
}
