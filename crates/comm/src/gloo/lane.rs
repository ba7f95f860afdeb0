//! One group's share of a mesh: rounds of messages between its members.
//!
//! **A member is at most one round ahead.** To finish round `k+1` it needs the message that this rank sends in `k+1`,
//! which this rank does after it has finished round `k`. So two incoming buffers for each member are enough: the one
//! of round `k` is posted again after it was read, for round `k+2`. Messages of a pair in one slot keep their order,
//! and receipts are posted in order, so the n-th message meets the n-th receipt.

use super::mesh::Mesh;
use super::transport::Buffer;
use super::transport_types::{Outcome, Pair};
use crate::collective::{CollectiveError, Result};
use crate::group::Patience;
use crate::shm::{Operation, Signature};
use crate::watch::{Mark, Track};
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

/// Signature and payload bytes, and room that keeps the payload aligned.
pub(super) const HEADER_BYTES: usize = 64;
/// Long enough to be for ever.
const IDLE: Duration = Duration::from_secs(100 * 24 * 3600);

/// One rank's view of one lane. Used by one thread at a time (`Send`, not `Sync`).
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) mesh: Arc<Mesh>,
    /// Ranks of the mesh, by position in the group.
    members: Vec<usize>,
    /// This rank's position.
    pub(super) rank: usize,
    slot: u64,
    piece_bytes: usize,
    seats: Vec<Option<Seat>>,
    round: Cell<usize>,
    /// A member whose connection had ended when a receipt was posted, with the transport's words. That is an error
    /// when the member is needed again, which it is not at the end of a server.
    gone: RefCell<Option<(usize, String)>>,
    sequence: Cell<u64>,
    track: Track,
    mark: Option<Mark>,
}

/// What a lane has for one other member.
#[derive(Debug)]
struct Seat {
    outgoing: Arc<Buffer>,
    incoming: [Arc<Buffer>; 2],
}

impl Lane {
    /// The lane with number `number` of `mesh`, for the ranks `members`, of which this must be one. Payloads have at
    /// most `piece_bytes`. Does not wait for the others.
    pub(super) fn new(
        mesh: Arc<Mesh>,
        members: Vec<usize>,
        (number, piece_bytes): (u64, usize),
        track: Track,
    ) -> Result<Self> {
        let own = mesh.place().rank;
        let problem = || format!("rank {own} is not one of {members:?}");
        let rank = members.iter().position(|rank| *rank == own);
        let rank = rank.ok_or_else(|| CollectiveError::Mesh { rank: own, problem: problem() })?;
        let mut lane = Self {
            // Two slots each, behind the mesh's own: rounds, and transfers between two.
            slot: 2 + 2 * number,
            seats: Vec::new(),
            round: Cell::new(0),
            gone: RefCell::new(None),
            sequence: Cell::new(0),
            mark: None,
            mesh,
            members,
            rank,
            piece_bytes,
            track,
        };
        for position in 0..lane.size() {
            let seat = if position == rank { None } else { Some(lane.seat(position)?) };
            lane.seats.push(seat);
        }
        Ok(lane)
    }

    fn seat(&self, position: usize) -> Result<Seat> {
        let buffer = || self.mesh.buffer(HEADER_BYTES + self.piece_bytes);
        let seat = Seat { outgoing: buffer()?, incoming: [buffer()?, buffer()?] };
        seat.incoming.iter().for_each(|incoming| self.post(incoming, position));
        Ok(seat)
    }

    /// Posts a receipt for a message of a round to come.
    fn post(&self, incoming: &Buffer, position: usize) {
        let pair = Pair::Recv(self.members[position], self.slot);
        if let Err(words) = incoming.start(pair, HEADER_BYTES + self.piece_bytes) {
            self.gone.borrow_mut().get_or_insert((position, words));
        }
    }

    /// Ranks of the group.
    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    /// Largest payload of a message.
    pub(super) fn piece_bytes(&self) -> usize {
        self.piece_bytes
    }

    /// The slot of transfers between two members.
    pub(super) fn transfer_slot(&self) -> u64 {
        self.slot + 1
    }

    /// The rank of the mesh at `position`.
    pub(super) fn member(&self, position: usize) -> usize {
        self.members[position]
    }

    /// Shows what this rank does here on the watch page.
    pub(super) fn watch(&mut self, mark: Mark) {
        self.mesh.watch(mark.clone());
        self.mark = Some(mark);
    }

    /// Runs one operation: noted on the watch page, refused when the group is already aborted.
    pub(super) fn run(&self, operation: Operation, body: impl FnOnce() -> Result<()>) -> Result<()> {
        self.sequence.set(self.sequence.get() + 1);
        self.note(operation, true);
        if self.mesh.abort().cause().is_some() {
            return Err(self.aborted(operation));
        }
        body()?;
        self.note(operation, false);
        Ok(())
    }

    /// One round: `fill` writes what the member at a position gets and says how many bytes that are; from each
    /// member come `expected(position)` bytes. `read` finds the payload of each other member at the given address,
    /// readable until it returns.
    pub(super) fn round<R>(
        &self,
        (signature, patience): (Signature, Patience),
        fill: impl Fn(usize, *mut u8) -> usize,
        expected: impl Fn(usize) -> usize,
        read: impl FnOnce(&dyn Fn(usize) -> *const u8) -> R,
    ) -> Result<R> {
        let operation = signature.operation();
        if let Some((position, words)) = self.gone.take() {
            return Err(self.lost(operation, position, words));
        }
        let turn = self.round.get() & 1;
        self.round.set(self.round.get().wrapping_add(1));
        for (position, seat) in self.others() {
            // SAFETY: the buffer has room for a header; its last message has left (the end of this function).
            let bytes = fill(position, unsafe { seat.outgoing.data().add(HEADER_BYTES) });
            self.send(&seat.outgoing, position, self.slot, (signature, bytes))?;
        }
        for (position, seat) in self.others() {
            self.complete(&seat.incoming[turn], (position, false), operation, patience)?;
            self.check(&seat.incoming[turn], position, (signature, expected(position)))?;
        }
        for (position, seat) in self.others() {
            self.complete(&seat.outgoing, (position, true), operation, patience)?;
        }
        let payload = |position: usize| {
            let seat = self.seats[position].as_ref().expect("invariant: asked for other members only");
            // SAFETY: in bounds of the buffer.
            unsafe { seat.incoming[turn].data().add(HEADER_BYTES).cast_const() }
        };
        let result = read(&payload);
        self.others().for_each(|(position, seat)| self.post(&seat.incoming[turn], position));
        Ok(result)
    }

    /// Starts to send a message whose payload is in `buffer` behind the header.
    pub(super) fn send(
        &self,
        buffer: &Buffer,
        position: usize,
        slot: u64,
        (signature, bytes): (Signature, usize),
    ) -> Result<()> {
        let header = [signature.0, bytes as u64];
        // SAFETY: the buffer has room for the header and is aligned for it; nothing is pending.
        unsafe { buffer.data().cast::<[u64; 2]>().write(header) };
        buffer
            .start(Pair::Send(self.members[position], slot), HEADER_BYTES + bytes)
            .map_err(|words| self.lost(signature.operation(), position, words))
    }

    /// Waits for an operation with the member at `position`.
    pub(super) fn complete(
        &self,
        buffer: &Arc<Buffer>,
        (position, is_send): (usize, bool),
        operation: Operation,
        patience: Patience,
    ) -> Result<()> {
        let (patience, waited_ms) = match patience {
            Patience::Deadline(deadline) => (deadline, deadline.as_millis() as u64),
            Patience::Idle => (IDLE, IDLE.as_millis() as u64),
        };
        match self.mesh.wait(buffer, is_send, patience) {
            Outcome::Done => Ok(()),
            Outcome::Aborted => Err(self.aborted(operation)),
            Outcome::Failed(words) => Err(self.lost(operation, position, words)),
            Outcome::Expired => Err(self.give_up(CollectiveError::Timeout {
                rank: self.members[self.rank],
                missing: self.members[position],
                operation: operation.name(),
                sequence: self.sequence.get(),
                waited_ms,
            })),
        }
    }

    /// Errors, and aborts the group, unless the message in `buffer` is the one that is due.
    pub(super) fn check(
        &self,
        buffer: &Buffer,
        position: usize,
        (signature, bytes): (Signature, usize),
    ) -> Result<()> {
        // SAFETY: aligned, in bounds, and received completely.
        let [theirs, their_bytes] = unsafe { buffer.data().cast::<[u64; 2]>().read() };
        if (theirs, their_bytes) == (signature.0, bytes as u64) {
            return Ok(());
        }
        Err(self.give_up(CollectiveError::Mismatch {
            rank: self.members[self.rank],
            peer: self.members[position],
            sequence: self.sequence.get(),
            mine: format!("{} ({bytes} bytes now)", signature.describe()),
            theirs: format!("{} ({their_bytes} bytes now)", Signature(theirs).describe()),
        }))
    }

    /// The error for arguments no rank may pass; aborts the group, since the others will wait.
    pub(super) fn invalid(&self, operation: Operation, problem: String) -> CollectiveError {
        let rank = self.members[self.rank];
        self.give_up(CollectiveError::Invalid { rank, operation: operation.name(), problem })
    }

    /// The connection with a member has ended. When this host knows why, that is the error.
    pub(super) fn lost(&self, operation: Operation, position: usize, problem: String) -> CollectiveError {
        if self.mesh.abort().cause().is_some() {
            return self.aborted(operation);
        }
        self.give_up(CollectiveError::Lost {
            rank: self.members[self.rank],
            missing: self.members[position],
            operation: operation.name(),
            sequence: self.sequence.get(),
            problem,
        })
    }

    /// Other members, beginning with the next one, so that not everybody asks the same first.
    fn others(&self) -> impl Iterator<Item = (usize, &Seat)> {
        let positions = (1..self.size()).map(|i| (self.rank + i) % self.size());
        positions.filter_map(|position| Some((position, self.seats.get(position)?.as_ref()?)))
    }

    fn give_up(&self, error: CollectiveError) -> CollectiveError {
        self.mesh.abort().abort(&error.to_string());
        error
    }

    fn aborted(&self, operation: Operation) -> CollectiveError {
        CollectiveError::Aborted {
            rank: self.members[self.rank],
            operation: operation.name(),
            cause: self.mesh.abort().cause().unwrap_or_else(|| "unknown".into()),
        }
    }

    fn note(&self, operation: Operation, inside: bool) {
        if let Some(mark) = &self.mark {
            mark.note(self.track, self.sequence.get(), operation as u8, inside);
        }
    }
}
