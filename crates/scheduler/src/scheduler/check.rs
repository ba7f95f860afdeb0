//! The full integrity check, for tests, the simulator and idle times.

use super::Scheduler;
use crate::entry::{Entry, Slot, State};
use lockstep_core::PageId;

impl Scheduler {
    /// Verifies every invariant of scheduler, queue, page tables, tree and pool, and the exact page
    /// accounting. O(requests + pages + tree); the error says what is inconsistent.
    pub fn check(&self) -> Result<(), String> {
        let duplicates: Vec<PageId> =
            self.launched.iter().flat_map(|l| l.duplicates.iter().copied()).collect();
        self.kv.check(self.entries.iter().map(|(_, entry)| &entry.table), &duplicates)?;
        let counters = self.counters();
        if counters.pages_free + counters.pages_cached + counters.pages_held != counters.pages_total {
            return Err(format!("pages do not add up: {counters:?}"));
        }
        let mut states = (0, 0);
        for (slot, entry) in self.entries.iter() {
            self.check_entry(slot, entry)
                .map_err(|what| format!("request {}: {what}; {entry:?}", entry.id))?;
            states.0 += usize::from(entry.state == State::Waiting);
            states.1 += usize::from(entry.state == State::Running);
        }
        if states != (self.queue.len(), self.running.len()) {
            return Err(format!("(waiting, running) are {states:?} by state, but {counters:?}"));
        }
        let deadlines = self.entries.iter().filter(|(_, entry)| entry.deadline_ms.is_some()).count();
        if deadlines != self.deadlines.len() {
            return Err(format!("{} deadlines for {deadlines} requests", self.deadlines.len()));
        }
        if self.running.len() > self.config.max_running {
            return Err(format!(
                "{} requests run, max_running is {}",
                self.running.len(),
                self.config.max_running
            ));
        }
        Ok(())
    }

    fn check_entry(&self, slot: Slot, entry: &Entry) -> Result<(), &'static str> {
        let page_size = self.config.page_size;
        let rows = self.launched.iter().flat_map(|l| &l.rows).filter(|row| row.slot == slot).count();
        let rules = [
            (entry.launched as usize == rows, "its launched rows are miscounted"),
            (entry.tokens.len() < entry.len_max || entry.state == State::Draining, "it is past its end"),
            (entry.completed <= entry.computed, "more is completed than launched"),
            (entry.completed <= entry.tokens.len(), "KV of unknown tokens counts as completed"),
            (
                entry.table.shared_len() * page_size <= entry.completed,
                "pages are shared before they are computed",
            ),
        ];
        if let Some((_, what)) = rules.iter().find(|(holds, _)| !holds) {
            return Err(what);
        }
        let holds = match entry.state {
            State::Waiting => {
                self.queue.contains(slot, entry.precedence())
                    && entry.table.is_empty()
                    && entry.launched == 0
                    && entry.computed == 0
            }
            State::Running => {
                self.running_position(slot).is_ok_and(|at| self.running[at] == slot)
                    && entry.table.len() * page_size >= entry.computed.max(entry.prefill_end)
            }
            State::Draining => entry.launched > 0,
        };
        if holds { Ok(()) } else { Err("its state does not fit its place, pages or steps") }
    }
}
