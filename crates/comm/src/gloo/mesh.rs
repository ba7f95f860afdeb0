//! Connections between all ranks of a replica, and waits that an abort can end.

use super::transport::{Buffer, Transport};
use super::transport_types::{Outcome, Pair};
use crate::collective::{CollectiveError, Result};
use crate::secret::Key;
use crate::shm::AbortHandle;
use crate::watch::Mark;
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often an abort is looked for, and a waiting rank shows that it lives.
const ABORT_INTERVAL: Duration = Duration::from_millis(20);
/// Where pairs show each other the key. Lanes come after it.
const PROOF_SLOT: u64 = 0;

/// Where a rank stands in its mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshPlace {
    /// Its number, `0..size`.
    pub rank: usize,
    /// Ranks of the mesh.
    pub size: usize,
    /// The address of this host to bind to.
    pub address: IpAddr,
}

/// A rank's connections to all others. Lanes keep it alive.
#[derive(Debug)]
pub struct Mesh {
    transport: Transport,
    place: MeshPlace,
    abort: AbortHandle,
    waits: Arc<Waits>,
    watcher: Option<JoinHandle<()>>,
}

/// The waits of now, for the thread that looks for an abort.
#[derive(Debug, Default)]
struct Waits {
    now: Mutex<Now>,
    stopped: Condvar,
}

#[derive(Debug, Default)]
struct Now {
    buffers: Vec<Arc<Buffer>>,
    mark: Option<Mark>,
    is_over: bool,
}

impl Waits {
    fn now(&self) -> MutexGuard<'_, Now> {
        // Nothing is left half done by a panic here.
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        self.waits.now().is_over = true;
        self.waits.stopped.notify_all();
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

impl Mesh {
    /// Listens, lets `meet` exchange what the ranks have to tell each other (every rank's bytes, by rank), connects
    /// and shows the other ranks that this one knows `key`. `abort` is that of this host's ranks. Connecting may take
    /// `patience`.
    ///
    /// **Collective:** all ranks of the mesh.
    pub fn join(
        place: MeshPlace,
        key: &Key,
        (abort, patience): (AbortHandle, Duration),
        meet: impl FnOnce(&[u8]) -> std::result::Result<Vec<Vec<u8>>, String>,
    ) -> Result<Arc<Self>> {
        let failed = |problem| CollectiveError::Mesh { rank: place.rank, problem };
        let transport = Transport::open(place.rank, place.size, place.address, patience).map_err(failed)?;
        let peers = || (0..place.size).filter(|peer| *peer != place.rank);
        let mut mine = vec![Vec::new(); place.size];
        for peer in peers() {
            mine[peer] = transport.address(peer).map_err(failed)?;
        }
        let all = meet(&pack(&mine)).map_err(failed)?;
        for peer in peers() {
            let theirs = all.get(peer).and_then(|bytes| unpack(bytes, place.size));
            let Some(theirs) = theirs else {
                return Err(failed(format!("what rank {peer} says about its addresses cannot be read")));
            };
            transport.connect(peer, &theirs[place.rank]).map_err(|words| {
                failed(format!("rank {peer} cannot be reached from {}: {words}", place.address))
            })?;
        }
        let waits = Arc::<Waits>::default();
        let watcher = watch(waits.clone(), abort.clone()).map_err(|e| failed(e.to_string()))?;
        let mesh = Self { transport, place, abort, waits, watcher: Some(watcher) };
        peers().try_for_each(|peer| mesh.prove(peer, key, patience).map_err(failed))?;
        Ok(Arc::new(mesh))
    }

    /// This rank and its host.
    pub fn place(&self) -> MeshPlace {
        self.place
    }

    /// Beats on the watch page while a wait lasts.
    pub fn watch(&self, mark: Mark) {
        self.waits.now().mark = Some(mark);
    }

    pub(super) fn abort(&self) -> &AbortHandle {
        &self.abort
    }

    pub(super) fn buffer(&self, bytes: usize) -> Result<Arc<Buffer>> {
        let failed = |problem| CollectiveError::Mesh { rank: self.place.rank, problem };
        self.transport.buffer(bytes).map(Arc::new).map_err(failed)
    }

    /// Waits for the operation of `buffer`. Ends at an abort of this host's ranks, too.
    pub(super) fn wait(&self, buffer: &Arc<Buffer>, is_send: bool, patience: Duration) -> Outcome {
        self.waits.now().buffers.push(buffer.clone());
        let outcome = buffer.wait(is_send, patience);
        self.waits.now().buffers.retain(|waiting| !Arc::ptr_eq(waiting, buffer));
        outcome
    }

    /// Shows `peer` that this rank knows the key, and sees that the peer does, and that it is that rank.
    fn prove(&self, peer: usize, key: &Key, patience: Duration) -> std::result::Result<(), String> {
        let (rank, size) = (self.place.rank, self.place.size);
        let proof = |from: usize, to: usize| key.tag(format!("mesh {size} {from} {to}").as_bytes());
        let bytes = proof(rank, peer).len();
        let (out, back) = (self.transport.buffer(bytes)?, Arc::new(self.transport.buffer(bytes)?));
        back.start(Pair::Recv(peer, PROOF_SLOT), bytes)?;
        // SAFETY: `bytes` of a buffer without an operation.
        unsafe { std::ptr::copy_nonoverlapping(proof(rank, peer).as_ptr(), out.data(), bytes) };
        out.start(Pair::Send(peer, PROOF_SLOT), bytes)?;
        for (buffer, is_send) in [(&Arc::new(out), true), (&back, false)] {
            match self.wait(buffer, is_send, patience) {
                Outcome::Done => {}
                Outcome::Aborted => return Err(self.abort.cause().unwrap_or_default()),
                Outcome::Expired => return Err(format!("rank {peer} does not answer")),
                Outcome::Failed(words) => return Err(format!("rank {peer}: {words}")),
            }
        }
        // SAFETY: `bytes` that were received; nothing is pending any more.
        let theirs = unsafe { std::slice::from_raw_parts(back.data(), bytes) };
        if theirs == proof(peer, rank) {
            return Ok(());
        }
        Err(format!("whoever is connected as rank {peer} does not know this server's key"))
    }
}

/// Starts the thread that ends the waits of an aborted group.
fn watch(waits: Arc<Waits>, abort: AbortHandle) -> std::io::Result<JoinHandle<()>> {
    let look = move || {
        let mut now = waits.now();
        while !now.is_over {
            let woken = waits.stopped.wait_timeout(now, ABORT_INTERVAL);
            now = woken.unwrap_or_else(PoisonError::into_inner).0;
            if now.buffers.is_empty() {
                continue;
            }
            if abort.cause().is_some() {
                now.buffers.iter().for_each(|buffer| buffer.abort());
            }
            if let Some(mark) = &now.mark {
                mark.beat();
            }
        }
    };
    std::thread::Builder::new().name("gloo-abort".into()).stack_size(64 << 10).spawn(look)
}

/// Addresses for every peer as one message: each with its length, two bytes little-endian.
fn pack(addresses: &[Vec<u8>]) -> Vec<u8> {
    addresses
        .iter()
        .flat_map(|a| (a.len() as u16).to_le_bytes().into_iter().chain(a.iter().copied()))
        .collect()
}

/// What another rank's [`pack`] has made for `size` ranks; none for anything else.
pub(crate) fn unpack(mut bytes: &[u8], size: usize) -> Option<Vec<Vec<u8>>> {
    let mut addresses = Vec::new();
    while let Some((len, rest)) = bytes.split_first_chunk() {
        let (address, rest) = rest.split_at_checked(u16::from_le_bytes(*len).into())?;
        addresses.push(address.to_vec());
        bytes = rest;
    }
    (bytes.is_empty() && addresses.len() == size).then_some(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_message_and_damage_is_noticed() {
        let addresses = vec![vec![1, 2, 3], vec![], vec![9; 300]];
        let packed = pack(&addresses);
        assert_eq!(unpack(&packed, 3), Some(addresses));
        assert_eq!(unpack(&packed, 2), None);
        for cut in [1, 4, packed.len() - 1] {
            assert_eq!(unpack(&packed[..cut], 3), None, "{cut}");
        }
    }
}
