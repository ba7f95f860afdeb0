//! Point-to-point transfers: a ring of 16 KiB chunks per ordered pair of ranks, as many as the layout says.
//!
//! A transfer is asynchronous: the sender goes on when its last chunk is in the ring, and waits only while the ring
//! is full. The sender's line holds the count of chunks written and its sleepers; the receiver's line the count of
//! chunks read and its sleepers; each chunk begins with its signature. Counts are u32 and wrap; each is written by one
//! rank only, so its own copy is kept here and the shared one is never read back.
//!
//! Ordering: the sender writes a chunk and then publishes the count (SeqCst, so at least Release);
//! the receiver acquires the count before it reads. The way back is the same: the receiver's count
//! is published after its copy, and the sender acquires it before it overwrites.

use super::channel::{Channel, Signature};
use super::layout::{LINE, PAIR_CHUNK_BYTES, PAIR_DATA};
use super::operation::Operation;
use super::wait::publish;
use crate::collective::Result;
use crate::group::Patience;
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const SLEEPERS: usize = 4;
/// Bytes of data in a chunk.
const DATA_BYTES: usize = PAIR_CHUNK_BYTES - PAIR_DATA;

/// This rank's own counts: chunks written to and read from each peer.
#[derive(Debug)]
pub(super) struct Pairs {
    written: Vec<Cell<u32>>,
    read: Vec<Cell<u32>>,
}

impl Pairs {
    pub(super) fn new(size: usize) -> Self {
        Self { written: vec![Cell::new(0); size], read: vec![Cell::new(0); size] }
    }

    /// Sends `bytes` to `peer`; returns when the last chunk is in the ring. An empty transfer is one
    /// empty chunk, so that sizes that differ are noticed.
    ///
    /// # Safety
    /// `data` is readable for `bytes`; `peer` is another rank of the channel.
    pub(super) unsafe fn send(
        &self,
        channel: &Channel,
        peer: usize,
        (data, bytes): (*const u8, usize),
        signature: Signature,
        patience: Patience,
    ) -> Result<()> {
        let ring = Ring { channel, from: channel.member(channel.rank), to: channel.member(peer) };
        for (start, len) in chunks(bytes) {
            let written = self.written[peer].get();
            // Room: fewer chunks are on their way than the ring has.
            let room = |read: u32| written.wrapping_sub(read) < ring.chunks() as u32;
            channel.wait(ring.place(LINE), room, peer, Operation::Send, patience)?;
            ring.signature(written).store(signature.0, Ordering::Relaxed);
            if len > 0 {
                // SAFETY: `start + len <= bytes`; the receiver is done with this chunk (`room`).
                unsafe { std::ptr::copy_nonoverlapping(data.add(start), ring.chunk(written), len) };
            }
            self.written[peer].set(written.wrapping_add(1));
            let (word, sleepers) = ring.place(0);
            publish(word, sleepers, written.wrapping_add(1));
        }
        Ok(())
    }

    /// Receives exactly `bytes` from `peer`. Errors when the sender announced another transfer.
    ///
    /// # Safety
    /// `data` is writable for `bytes`; `peer` is another rank of the channel.
    pub(super) unsafe fn recv(
        &self,
        channel: &Channel,
        peer: usize,
        (data, bytes): (*mut u8, usize),
        signature: Signature,
        patience: Patience,
    ) -> Result<()> {
        let ring = Ring { channel, from: channel.member(peer), to: channel.member(channel.rank) };
        for (start, len) in chunks(bytes) {
            let read = self.read[peer].get();
            let there = |written: u32| written != read;
            channel.wait(ring.place(0), there, peer, Operation::Recv, patience)?;
            let theirs = Signature(ring.signature(read).load(Ordering::Relaxed));
            channel.check_signature(peer, signature, theirs)?;
            if len > 0 {
                // SAFETY: `start + len <= bytes`; the chunk is complete since the Acquire in `wait`.
                unsafe { std::ptr::copy_nonoverlapping(ring.chunk(read), data.add(start), len) };
            }
            self.read[peer].set(read.wrapping_add(1));
            let (word, sleepers) = ring.place(LINE);
            publish(word, sleepers, read.wrapping_add(1));
        }
        Ok(())
    }
}

/// The ring of one ordered pair of ranks of the region.
struct Ring<'a> {
    channel: &'a Channel,
    from: usize,
    to: usize,
}

impl<'a> Ring<'a> {
    fn line(&self) -> usize {
        self.channel.region.layout().pair_line(self.from, self.to)
    }

    /// The sender's (0) or the receiver's (LINE) count and its sleepers.
    fn place(&self, line: usize) -> (&'a AtomicU32, &'a AtomicU32) {
        let at = self.line() + line;
        (self.channel.region.word(at), self.channel.region.word(at + SLEEPERS))
    }

    fn chunks(&self) -> usize {
        self.channel.region.layout().pair_chunks()
    }

    fn signature(&self, index: u32) -> &'a AtomicU64 {
        self.channel.region.long(self.slot(index))
    }

    fn chunk(&self, index: u32) -> *mut u8 {
        self.channel.region.bytes(self.slot(index) + PAIR_DATA, DATA_BYTES)
    }

    fn slot(&self, index: u32) -> usize {
        // The number of chunks divides 2^32, so the position survives the wrap.
        let chunk = index as usize % self.chunks();
        self.channel.region.layout().pair_slot(self.from, self.to, chunk)
    }
}

/// (start, length) of each chunk of a transfer; one empty chunk for an empty transfer.
fn chunks(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes.div_ceil(DATA_BYTES).max(1)).map(move |index| {
        let start = index * DATA_BYTES;
        (start, DATA_BYTES.min(bytes - start))
    })
}
