//! Who has acknowledged that it finished loading; pure. The launcher feeds it the `Ready` messages
//! and opens the HTTP port when nobody is missing.

use crate::layout::Layout;
use lockstep_wire::Role;

/// What an acknowledgement changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acknowledged {
    /// Others are still missing.
    Waiting,
    /// That was the last one: the server is ready. Returned exactly once.
    Complete,
    /// The role had acknowledged before; nothing changed.
    Repeated,
    /// Nobody waits for this role (a rank that is not primary, or not in the layout): a bug of the
    /// sender, worth a log line.
    Unexpected,
}

/// Roles that still have to acknowledge. **Invariant:** `missing` and `arrived` are disjoint and
/// together always what the layout asks for.
#[derive(Clone, Debug)]
pub struct ReadyTracker {
    missing: Vec<Role>,
    arrived: Vec<Role>,
}

impl ReadyTracker {
    /// Waits for everyone in [`Layout::acknowledging`].
    pub fn new(layout: &Layout) -> Self {
        Self { missing: layout.acknowledging(), arrived: Vec::new() }
    }

    /// Takes one acknowledgement.
    pub fn acknowledge(&mut self, role: Role) -> Acknowledged {
        match self.missing.iter().position(|r| *r == role) {
            Some(at) => {
                self.arrived.push(self.missing.remove(at));
                if self.missing.is_empty() { Acknowledged::Complete } else { Acknowledged::Waiting }
            }
            None if self.arrived.contains(&role) => Acknowledged::Repeated,
            None => Acknowledged::Unexpected,
        }
    }

    /// Roles not heard of yet, in layout order; for progress lines.
    pub fn missing(&self) -> &[Role] {
        &self.missing
    }

    /// Whether everyone has acknowledged.
    pub fn is_ready(&self) -> bool {
        self.missing.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_core::Topology;

    #[test]
    fn completes_once_in_any_order() {
        let layout = Layout { topology: Topology::tensor_parallel(2), num_tokenizer: 1 };
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut ready = ReadyTracker::new(&layout);
            let roles = [Role::Scheduler(0), Role::Tokenizer(0), Role::Detokenizer];
            let results = order.map(|i| ready.acknowledge(roles[i]));
            assert_eq!(results, [Acknowledged::Waiting, Acknowledged::Waiting, Acknowledged::Complete]);
            assert!(ready.is_ready());
            assert_eq!(ready.acknowledge(Role::Detokenizer), Acknowledged::Repeated);
        }
    }

    #[test]
    fn ranks_that_do_not_speak_for_a_replica_are_unexpected() {
        let layout = Layout { topology: Topology::tensor_parallel(2), num_tokenizer: 0 };
        let mut ready = ReadyTracker::new(&layout);
        assert_eq!(ready.acknowledge(Role::Scheduler(1)), Acknowledged::Unexpected);
        assert_eq!(ready.acknowledge(Role::Tokenizer(0)), Acknowledged::Unexpected);
        assert_eq!(ready.missing(), [Role::Scheduler(0), Role::Detokenizer]);
    }
}
