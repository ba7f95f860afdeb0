//! Pages for the next tokens of running requests, at the expense of the newest if need be.
//!
//! A retracted request goes to the front of the queue with its generated tokens as part of what it
//! has to compute; what it computed stays cached while pages last. Its random numbers are keyed by output
//! index, so it goes on as if nothing had happened.
//!
//! **Progress:** requests keep their pages by precedence, and each fits the pool alone (`submit` refuses the
//! others), so the first running request is never retracted and every step brings it forward.

use super::Scheduler;
use super::step::Room;
use crate::entry::{Slot, State};

impl Scheduler {
    /// Gives every request that can decode a page for its next token, the first ones first.
    ///
    /// Retraction waits until no step is in flight: then all tokens are known and no page is in use. That
    /// costs one step without overlap, or a pipeline that runs empty once, and only when pages have run out.
    pub(super) fn make_room_for_decodes(&mut self) -> Room {
        let mut room = Room::Ready;
        let mut at = 0;
        while at < self.running.len() {
            let slot = self.running[at];
            at += 1;
            if !self.may_decode(slot) {
                continue;
            }
            while !self.has_page_for_next_token(slot) {
                if !self.launched.is_empty() {
                    return Room::MustDrain;
                }
                let &newest = self.running.last().expect("invariant: `slot` is running");
                self.retract(newest);
                room = Room::Retracted;
                if newest == slot {
                    break;
                }
            }
        }
        room
    }

    /// Whether the table covers the position after `computed`, growing it if a page can be had.
    fn has_page_for_next_token(&mut self, slot: Slot) -> bool {
        let entry = &mut self.entries[slot];
        let pages = (entry.computed + 1).div_ceil(self.config.page_size);
        self.kv.grow(&mut entry.table, pages)
    }

    /// Puts a running request back to the front of the queue and releases its pages.
    fn retract(&mut self, slot: Slot) {
        self.leave_running(slot);
        self.release_pages(slot);
        let entry = &mut self.entries[slot];
        assert!(entry.pending.is_none(), "invariant: without a step in flight every token is known");
        entry.state = State::Waiting;
        entry.retractions += 1;
        (entry.computed, entry.completed, entry.prefill_end) = (0, 0, 0);
        (entry.hit_epoch, entry.wait_key, entry.awaits_prefix) = (None, None, false);
        self.queue.push(slot, entry.precedence(), false);
        self.growth.retracted();
        self.totals.retractions += 1;
    }
}
