//! Eviction: least recently used leaf first, from its last page backwards.

use super::{NO_NODE, NodeIndex, RadixCache};
use lockstep_core::PageId;

impl RadixCache {
    /// Gives up to `count` unlocked pages away, appending them to `out`; fewer when fewer are unlocked.
    /// O(log nodes) per node touched plus O(1) per page.
    pub fn evict(&mut self, count: usize, out: &mut Vec<PageId>) {
        let target = out.len() + count.min(self.unlocked_pages());
        while out.len() < target {
            let &(stamp, index) =
                self.evictable.first().expect("invariant: unlocked pages have an unlocked leaf");
            let page_size = self.page_size;
            let node = self.node_mut(index);
            let keep = node.pages.len().saturating_sub(target - out.len());
            let before = out.len();
            out.extend(node.pages.drain(keep..).rev());
            self.pages_total -= out.len() - before;
            self.epoch += 1;
            if keep > 0 {
                self.node_mut(index).tokens.truncate(keep * page_size);
            } else {
                self.evictable.remove(&(stamp, index));
                self.remove_leaf(index);
            }
        }
    }

    /// Removes a leaf without pages; its parent may become evictable, an empty root goes too.
    fn remove_leaf(&mut self, index: NodeIndex) {
        let page_size = self.page_size;
        let node = self.node_mut(index);
        assert!(node.locks == 0 && node.children.is_empty(), "invariant: only unlocked leaves are evicted");
        let (parent, tokens) = (node.parent, std::mem::take(&mut node.tokens));
        self.vacate(index);
        let parent_node = self.node_mut(parent);
        let removed = parent_node.children.remove(&tokens[..page_size]);
        assert_eq!(removed, Some(index), "invariant: a child is in its parent's map");
        if !parent_node.children.is_empty() || parent_node.locks > 0 {
            return;
        }
        if parent_node.parent != NO_NODE {
            let stamp = parent_node.stamp;
            self.evictable.insert((stamp, parent));
        } else if let Some(namespace) = parent_node.root_of.take() {
            self.roots.remove(&namespace);
            self.vacate(parent);
        }
    }

    fn vacate(&mut self, index: NodeIndex) {
        let node = self.node_mut(index);
        node.generation = node.generation.wrapping_add(1);
        node.pages = Vec::new();
        self.vacant.push(index);
    }
}
