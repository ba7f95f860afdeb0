//! What the ranks of one host are told about those of others, on host 0 and elsewhere.

use super::facts::facts;
use super::plan::ServePlan;
use super::ready::by_signal;
use crate::error::{CliError, Result};
use crate::flags::hosts::SeveralHosts;
use lockstep_comm::link::Endpoint;
use lockstep_comm::link::curve::CurveSecret;
use lockstep_comm::meeting::Invitation;
use lockstep_comm::secret::Key;
use lockstep_core::ExitCode;
use lockstep_engine::config::RankHosts;
use lockstep_engine::links::RemoteBroadcast;
use lockstep_launch::hosts::{Head, Room, RoomSpec, StartOrder};
use lockstep_launch::{Event, Events, Reporter};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The part of a set of ranks that is about other hosts.
pub struct Abroad {
    /// How ranks join those of other hosts.
    pub hosts: RankHosts,
    /// The broadcast between hosts, for rank 0 or for those that follow it.
    pub remote: RemoteBroadcast,
    /// Rank 0's socket for it.
    pub listener: Option<Arc<OwnedFd>>,
}

/// The secret key of the broadcast of a set of ranks.
fn broadcast_key(run: &Key, incarnation: usize) -> CurveSecret {
    CurveSecret::of(&run.derive(&format!("broadcast {incarnation}")))
}

fn rank_hosts(
    plan: &SeveralHosts,
    run: &Key,
    (room, own): (SocketAddr, IpAddr),
    incarnation: usize,
) -> RankHosts {
    let invitation = Invitation { address: room, key: run.derive("ranks"), name: meeting(incarnation) };
    RankHosts { map: plan.map, address: own, invitation }
}

/// What the meeting of the ranks of a set is called.
fn meeting(incarnation: usize) -> String {
    format!("ranks {incarnation}")
}

/// Opens the room of host 0 and waits until every host is there. Errors on a signal, too.
pub async fn open_room(
    plan: &ServePlan,
    hosts: &SeveralHosts,
    (reporter, events): (Reporter, &mut Events),
) -> Result<Arc<Room>> {
    let flag = CliError::with::<anyhow::Error>(ExitCode::Flags);
    let spec = RoomSpec {
        address: hosts.listen_address().map_err(flag)?,
        key: hosts.key.clone(),
        map: hosts.map,
        facts: facts(plan)?,
        limit: plan.collective_timeout,
    };
    let room = Arc::new(Room::open(spec, reporter).map_err(CliError::with(ExitCode::Flags))?);
    let missing = room.missing().len();
    tracing::info!(
        "waiting at {} for {missing} other hosts, at most {:.0} s",
        room.address(),
        hosts.patience.as_secs_f64()
    );
    match wait_for_all(&room, hosts, events).await {
        Ok(()) => Ok(room),
        Err(error) => {
            room.goodbye(error.code, &error.message);
            Err(error)
        }
    }
}

/// Waits until every host is there. Errors on a signal, too.
pub async fn wait_for_all(room: &Arc<Room>, hosts: &SeveralHosts, events: &mut Events) -> Result<()> {
    let (waiting, patience) = (room.clone(), hosts.patience);
    let mut all = tokio::task::spawn_blocking(move || waiting.wait_for_all(patience));
    loop {
        tokio::select! {
            joined = &mut all => {
                let joined = joined.map_err(CliError::with(ExitCode::Internal))?;
                return joined.map_err(CliError::with(ExitCode::ChildDied));
            }
            event = events.recv() => match event {
                Some(Event::Signal(signal)) => return Err(by_signal(signal)),
                Some(_) => {}
                None => return Err(CliError::new(ExitCode::Internal, "the supervising thread is gone")),
            },
        }
    }
}

impl Abroad {
    /// On host 0: has the other hosts start their ranks of set `incarnation`, and says what those here need.
    pub fn of_head(plan: &ServePlan, hosts: &SeveralHosts, room: &Room, incarnation: usize) -> Result<Self> {
        let internal =
            |what: &str, e: &dyn std::fmt::Display| CliError::new(ExitCode::Internal, format!("{what}: {e}"));
        let own = room.address().ip();
        let listener = TcpListener::bind((own, 0)).map_err(|e| internal("no port for the broadcast", &e))?;
        let address = listener.local_addr().map_err(|e| internal("no port for the broadcast", &e))?;
        listener.set_nonblocking(true).map_err(|e| internal("no port for the broadcast", &e))?;
        let run = room.run_key();
        let secret = broadcast_key(&run, incarnation);
        // Without CURVE in this binary nobody is told to start.
        secret.public().map_err(CliError::with(ExitCode::Internal))?;
        let order = StartOrder { incarnation, broadcast_port: address.port() };
        room.start(order, (&meeting(incarnation), plan.layout.topology.replica_size()));
        Ok(Self {
            hosts: rank_hosts(hosts, &run, (room.address(), own), incarnation),
            remote: RemoteBroadcast::Publish { endpoint: tcp(address), secret, listener: None },
            listener: Some(Arc::new(listener.into())),
        })
    }

    /// On another host: what its ranks need for the set that host 0 has ordered.
    pub fn of_other(hosts: &SeveralHosts, head: &Head, order: &StartOrder) -> Result<Self> {
        let StartOrder { incarnation, broadcast_port } = *order;
        let secret = broadcast_key(&head.run_key, incarnation);
        let server = secret.public().map_err(CliError::with(ExitCode::Internal))?;
        let own = hosts.address.unwrap_or(head.local_address);
        let endpoint = tcp(SocketAddr::new(head.address.ip(), broadcast_port));
        Ok(Self {
            hosts: rank_hosts(hosts, &head.run_key, (head.address, own), incarnation),
            remote: RemoteBroadcast::Follow { endpoint, server },
            listener: None,
        })
    }
}

fn tcp(address: SocketAddr) -> Endpoint {
    Endpoint(format!("tcp://{address}"))
}
