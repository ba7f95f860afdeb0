//! The side of every other host: its connection to host 0.

use super::Fact;
use super::beat_interval;
use super::messages::{FromHost, Join, ToHost};
use crate::{ChildStatus, Failure, LaunchError};
use lockstep_comm::secret::Key;
use lockstep_comm::trusted::{self, Purpose, TrustError, TrustedReader, TrustedWriter};
use lockstep_wire::Role;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Pause between two attempts to reach host 0.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// How long one attempt may take.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
/// How often the log says that host 0 is waited for.
const REMINDER: Duration = Duration::from_secs(10);

/// How to join.
#[derive(Debug)]
pub struct HeadSpec {
    /// Host 0's name or address, with its port; looked up at every attempt.
    pub target: String,
    /// Stands for the shared secret.
    pub key: Key,
    /// Hosts.
    pub nnodes: usize,
    /// Which of them this is, at least 1.
    pub node_rank: usize,
    /// What must be equal.
    pub facts: Vec<Fact>,
    /// How long host 0 may take to be there.
    pub patience: Duration,
}

/// The connection to host 0. Its end, or silence beyond host 0's limit, is the last thing that arrives.
pub struct Head {
    way: Arc<Mutex<TrustedWriter>>,
    orders: UnboundedReceiver<Result<ToHost, String>>,
    /// The key of this run.
    pub run_key: Key,
    /// The name of this run.
    pub run: String,
    /// Host 0.
    pub address: SocketAddr,
    /// This host, as host 0 reaches it.
    pub local_address: IpAddr,
}

/// The key of the run called `run`.
pub(super) fn run_key(key: &Key, run: &str) -> Key {
    key.derive(&format!("run {run}"))
}

impl Head {
    /// Joins host 0, waiting for it to be there. Blocks; errors with a sentence when it refuses or time is over.
    pub fn join(spec: HeadSpec) -> Result<Self, String> {
        let (address, mut reader, mut writer) = reach(&spec)?;
        let HeadSpec { key, nnodes, node_rank, facts, .. } = spec;
        let said = |error: TrustError| format!("host 0 at {address}: {error}");
        send(&mut writer, &FromHost::Join(Join { nnodes, node_rank, facts })).map_err(said)?;
        let answer = reader.recv(trusted::HANDSHAKE_PATIENCE).map_err(said)?;
        let (run, limit) = match serde_json::from_slice(&answer) {
            Ok(ToHost::Welcome { run, limit_ms }) => (run, Duration::from_millis(limit_ms)),
            Ok(ToHost::Refused(why)) => return Err(format!("host 0 at {address} refuses this host: {why}")),
            _ => {
                return Err(format!(
                    "host 0 at {address} says nothing that can be understood; use the same lockstep"
                ));
            }
        };
        let local_address = reader.local_address().map_err(said)?.ip();
        let way = Arc::new(Mutex::new(writer));
        let (sender, orders) = unbounded_channel();
        let started = spawn("head-read", move || listen(reader, limit, &sender)).and_then(|()| {
            let way = Arc::downgrade(&way);
            spawn("head-beat", move || beat(&way, beat_interval(limit)))
        });
        started.map_err(|e| e.to_string())?;
        Ok(Self { way, orders, run_key: run_key(&key, &run), run, address, local_address })
    }

    /// The next order. An error is the last: host 0 is lost, for that reason.
    pub async fn next(&mut self) -> Result<ToHost, String> {
        self.orders.recv().await.unwrap_or_else(|| Err("the thread that listens to it is gone".into()))
    }

    /// A child has ended although nobody asked it to.
    pub fn died(&self, name: String, role: Role, status: ChildStatus) {
        self.tell(&FromHost::Died { name, role, status });
    }

    /// The first cause among the children here.
    pub fn failed(&self, failure: Failure) {
        self.tell(&FromHost::Failed(Box::new(failure)));
    }

    /// There are no children any more.
    pub fn ended(&self) {
        self.tell(&FromHost::Ended);
    }

    /// [`ToHost::Draining`] is heeded from here on.
    pub fn drain_noted(&self) {
        self.tell(&FromHost::DrainNoted);
    }

    /// This launcher was sent a signal.
    pub fn signalled(&self, signal: i32) {
        self.tell(&FromHost::Signal(signal));
    }

    /// A failure to send is seen by the reading thread, too, which tells it.
    fn tell(&self, message: &FromHost) {
        let mut way = self.way.lock().unwrap_or_else(PoisonError::into_inner);
        if send(&mut way, message).is_err() {
            way.close();
        }
    }
}

impl Drop for Head {
    fn drop(&mut self) {
        self.way.lock().unwrap_or_else(PoisonError::into_inner).close();
    }
}

/// Connects, as often as it takes.
fn reach(spec: &HeadSpec) -> Result<(SocketAddr, TrustedReader, TrustedWriter), String> {
    let start = Instant::now();
    let mut reminded = start;
    loop {
        let why = match lookup(&spec.target) {
            Ok(address) => match trusted::connect(address, (Purpose::Host, &spec.key), CONNECT_PATIENCE) {
                Ok((reader, writer)) => return Ok((address, reader, writer)),
                // It is there, and will not be another one the next time.
                Err(error @ (TrustError::OtherSecret | TrustError::OtherVersion { .. })) => {
                    return Err(format!("host 0 at {address}: {error}"));
                }
                Err(error) => error.to_string(),
            },
            Err(error) => error,
        };
        if start.elapsed() >= spec.patience {
            return Err(format!(
                "host 0 cannot be reached at {} within {:.0} s: {why}; start it there with --node-rank 0, or raise \
                 --dist-timeout",
                spec.target,
                spec.patience.as_secs_f64()
            ));
        }
        if reminded.elapsed() >= REMINDER || reminded == start {
            reminded = Instant::now();
            tracing::info!("waiting for host 0 at {}: {why}", spec.target);
        }
        std::thread::sleep(RETRY_PAUSE);
    }
}

fn lookup(target: &str) -> Result<SocketAddr, String> {
    let mut found = target.to_socket_addrs().map_err(|e| e.to_string())?;
    found.next().ok_or_else(|| "the name has no address".into())
}

/// The reading thread.
fn listen(mut reader: TrustedReader, limit: Duration, orders: &UnboundedSender<Result<ToHost, String>>) {
    loop {
        let order = match reader.recv(limit) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|e| format!("what it says is no order: {e}")),
            Err(TrustError::Closed) => Err("its launcher has ended".into()),
            Err(error) => Err(error.to_string()),
        };
        let is_last = order.is_err();
        if order == Ok(ToHost::Beat) {
            continue;
        }
        if orders.send(order).is_err() || is_last {
            return;
        }
    }
}

/// The thread that sends signs of life, for as long as there is somebody to have them.
fn beat(way: &Weak<Mutex<TrustedWriter>>, interval: Duration) {
    loop {
        std::thread::sleep(interval);
        let Some(way) = way.upgrade() else { return };
        let mut way = way.lock().unwrap_or_else(PoisonError::into_inner);
        if send(&mut way, &FromHost::Beat).is_err() {
            return way.close();
        }
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), LaunchError> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(body);
    spawned.map(drop).map_err(LaunchError::system("starting a thread"))
}

fn send(writer: &mut TrustedWriter, message: &FromHost) -> Result<(), TrustError> {
    writer.send(&serde_json::to_vec(message).expect("invariant: strings and numbers serialise"))
}
