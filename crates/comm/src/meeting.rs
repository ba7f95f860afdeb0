//! Where ranks on several hosts tell each other how to reach them, before they have any other connection.
//!
//! The launcher of host 0 keeps the [`MeetingRoom`]; every rank comes once ([`meet`]), says who it is and what the
//! others have to know, and gets what everybody said when the last one has come. Only who knows the key of the run
//! comes in, and only to a meeting that the launcher has called.

use crate::secret::Key;
use crate::shm::AbortHandle;
use crate::trusted::{self, Purpose, TrustError, TrustedReader, TrustedWriter};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long somebody who has come in may take to say who it is.
const INTRODUCTION_PATIENCE: Duration = Duration::from_secs(5);
/// How often a waiting rank looks for an abort.
const ABORT_INTERVAL: Duration = Duration::from_millis(50);
/// How long a connection attempt may take before the next one.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

/// How to get into a meeting; equal for all ranks of a replica.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Invitation {
    /// Where host 0's launcher listens.
    pub address: SocketAddr,
    /// The key of this run.
    pub key: Key,
    /// Which meeting.
    pub name: String,
}

/// What a rank says when it comes.
#[derive(Debug, Serialize, Deserialize)]
struct Introduction {
    name: String,
    rank: usize,
    size: usize,
    message: Vec<u8>,
}

/// Tells `message` to the other ranks of the meeting and returns what each said, by rank. Waits for the last one,
/// until `abort` or at most `patience`.
///
/// **Collective:** all ranks of the meeting.
pub fn meet(
    invitation: &Invitation,
    (rank, size): (usize, usize),
    message: &[u8],
    (abort, patience): (&AbortHandle, Duration),
) -> Result<Vec<Vec<u8>>, String> {
    let deadline = Instant::now() + patience;
    let address = invitation.address;
    let host = |error: TrustError| format!("the launcher of host 0 at {address}: {error}");
    let (mut reader, mut writer) = loop {
        match trusted::connect(address, (Purpose::Rank, &invitation.key), CONNECT_PATIENCE) {
            Ok(halves) => break halves,
            Err(TrustError::System { .. } | TrustError::Silent(_)) if Instant::now() < deadline => {
                std::thread::sleep(ABORT_INTERVAL);
            }
            Err(error) => return Err(host(error)),
        }
        give_way(abort)?;
    };
    let bytes = introduction(&invitation.name, (rank, size), message)?;
    writer.send(&bytes).map_err(host)?;
    while !reader.is_readable(ABORT_INTERVAL).map_err(host)? {
        give_way(abort)?;
        if Instant::now() >= deadline {
            return Err(format!(
                "after {:.0} s not all {size} ranks have said how to reach them; the launchers' logs say who is missing",
                patience.as_secs_f64()
            ));
        }
    }
    let all = reader.recv(INTRODUCTION_PATIENCE).map_err(host)?;
    lockstep_wire::decode(&all).map_err(|e| e.to_string())
}

/// What rank `rank` of `size` says when it comes to the meeting `name`.
pub(crate) fn introduction(
    name: &str,
    (rank, size): (usize, usize),
    message: &[u8],
) -> Result<Vec<u8>, String> {
    let introduction = Introduction { name: name.into(), rank, size, message: message.to_vec() };
    lockstep_wire::encode(&introduction).map_err(|e| e.to_string())
}

fn give_way(abort: &AbortHandle) -> Result<(), String> {
    abort.cause().map_or(Ok(()), |cause| Err(format!("the rank group was aborted: {cause}")))
}

/// The meeting of now. Shared by the threads that answer connections.
#[derive(Debug, Default)]
pub struct MeetingRoom {
    meeting: Mutex<Option<Meeting>>,
}

#[derive(Debug)]
struct Meeting {
    name: String,
    size: usize,
    /// What came, and the way back, by rank.
    present: Vec<Option<(Vec<u8>, TrustedWriter)>>,
}

impl MeetingRoom {
    /// Ranks of `name` may come; those of an earlier meeting leave without an answer.
    pub fn call(&self, name: &str, size: usize) {
        let present = std::iter::repeat_with(|| None).take(size).collect();
        *self.meeting() = Some(Meeting { name: name.into(), size, present });
    }

    /// Serves one rank that has come in. Returns a sentence when it does not belong here.
    pub fn attend(&self, mut reader: TrustedReader, writer: TrustedWriter) -> Result<(), String> {
        let bytes = reader.recv(INTRODUCTION_PATIENCE).map_err(|e| e.to_string())?;
        let who: Introduction = lockstep_wire::decode(&bytes).map_err(|e| e.to_string())?;
        let mut meeting = self.meeting();
        let Some(now) = meeting.as_mut().filter(|now| now.name == who.name && now.size == who.size) else {
            return Err(format!("rank {} of {} comes to a meeting that is not held now", who.rank, who.size));
        };
        let Some(seat @ None) = now.present.get_mut(who.rank) else {
            return Err(format!("rank {} of {} has come before", who.rank, who.size));
        };
        *seat = Some((who.message, writer));
        if now.present.iter().all(Option::is_some) {
            let present: Vec<_> = meeting.take().into_iter().flat_map(|now| now.present).flatten().collect();
            drop(meeting);
            let all: Vec<&[u8]> = present.iter().map(|(message, _)| &**message).collect();
            let all = lockstep_wire::encode(&all).map_err(|e| e.to_string())?;
            for (_, mut writer) in present {
                // One that has died meanwhile is its launcher's business.
                let _ = writer.send(&all);
            }
        }
        Ok(())
    }

    fn meeting(&self) -> MutexGuard<'_, Option<Meeting>> {
        // Every change is one assignment.
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
