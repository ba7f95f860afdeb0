//! The integrity check, callable at any time; O(tree).

use super::{NO_NODE, NodeIndex, PrefixLock, RadixCache};
use lockstep_core::PageId;
use std::collections::BTreeSet;

impl RadixCache {
    /// Verifies links, keys, accounting, stamps and the evictable set; the error names the node.
    pub fn check(&self) -> Result<(), String> {
        let vacant: BTreeSet<NodeIndex> = self.vacant.iter().copied().collect();
        if vacant.len() != self.vacant.len() {
            return Err("tree: a place is vacant twice".into());
        }
        let (mut reached, mut pages, mut locked) = (0, 0, 0);
        let (mut stamps, mut leaves) = (BTreeSet::new(), BTreeSet::new());
        let mut stack: Vec<NodeIndex> = Vec::new();
        for (namespace, &root) in &self.roots {
            if self.node(root).root_of.as_ref() != Some(namespace) || self.node(root).children.is_empty() {
                return Err(format!("tree: node {root} is not the root of {namespace:?} or has no child"));
            }
            stack.push(root);
        }
        while let Some(index) = stack.pop() {
            if vacant.contains(&index) {
                return Err(format!("tree: node {index} is vacant and in use"));
            }
            let node = self.node(index);
            reached += 1;
            pages += node.pages.len();
            locked += if node.locks > 0 { node.pages.len() } else { 0 };
            if !stamps.insert(node.stamp) || node.stamp > self.clock {
                return Err(format!(
                    "tree: stamp {} of node {index} is not unique or in the future",
                    node.stamp
                ));
            }
            if node.parent != NO_NODE && node.locks == 0 && node.children.is_empty() {
                leaves.insert((node.stamp, index));
            }
            self.check_children(index)?;
            stack.extend(node.children.values());
        }
        if reached != self.node_count() || pages != self.pages_total || locked != self.pages_locked {
            return Err(format!(
                "tree: reached (nodes, pages, locked) = {:?}, counters say {:?}",
                (reached, pages, locked),
                (self.node_count(), self.pages_total, self.pages_locked)
            ));
        }
        if leaves != self.evictable {
            return Err(format!("tree: evictable is {:?}, unlocked leaves are {leaves:?}", self.evictable));
        }
        Ok(())
    }

    fn check_children(&self, index: NodeIndex) -> Result<(), String> {
        let node = self.node(index);
        let mut locks = 0;
        for (key, &child_index) in &node.children {
            let child = self.node(child_index);
            if child.parent != index || child.root_of.is_some() || child.pages.is_empty() {
                return Err(format!("tree: node {child_index} is a bad child of node {index}"));
            }
            if child.tokens.len() != child.pages.len() * self.page_size || !child.tokens.starts_with(key) {
                return Err(format!(
                    "tree: node {child_index} has tokens that fit neither its pages nor its key"
                ));
            }
            locks += child.locks;
        }
        if node.parent != NO_NODE && node.locks < locks {
            return Err(format!("tree: node {index} has {} locks, its children {locks}", node.locks));
        }
        Ok(())
    }

    /// Verifies that the lock counts are exactly those of the given holds.
    pub fn check_locks<'a>(&self, locks: impl Iterator<Item = &'a PrefixLock>) -> Result<(), String> {
        let mut counts = vec![0; self.nodes.len()];
        for lock in locks {
            if self.node(lock.node).generation != lock.generation {
                return Err(format!("tree: a hold on node {} outlived the node", lock.node));
            }
            let mut index = lock.node;
            while self.node(index).parent != NO_NODE {
                counts[index as usize] += 1;
                index = self.node(index).parent;
            }
        }
        let vacant: BTreeSet<NodeIndex> = self.vacant.iter().copied().collect();
        for (index, &expected) in counts.iter().enumerate() {
            let locks = self.nodes[index].locks;
            if locks != expected && !vacant.contains(&(index as NodeIndex)) {
                return Err(format!(
                    "tree: node {index} has {locks} locks, but {expected} holds pass through it"
                ));
            }
        }
        Ok(())
    }

    /// Verifies that `pages` is the path that `lock` holds.
    pub fn check_path(&self, lock: &PrefixLock, pages: &[PageId]) -> Result<(), String> {
        let (mut index, mut rest) = (lock.node, pages);
        while self.node(index).parent != NO_NODE {
            let node = self.node(index);
            rest = rest.strip_suffix(node.pages.as_slice()).ok_or_else(|| {
                format!("tree: a table differs from the pages of node {index} that it holds")
            })?;
            index = node.parent;
        }
        if rest.is_empty() {
            Ok(())
        } else {
            Err(format!("tree: a table claims {} pages too many", rest.len()))
        }
    }

    /// All pages of the tree, in no particular order.
    pub fn pages(&self) -> impl Iterator<Item = PageId> {
        self.nodes.iter().flat_map(|node| node.pages.iter().copied())
    }
}
