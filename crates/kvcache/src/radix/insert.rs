//! Insertion of computed pages.

use super::{Inserted, NO_NODE, Namespace, Node, NodeIndex, PrefixLock, RadixCache};
use lockstep_core::{PageId, TokenId};
use std::collections::BTreeMap;

impl RadixCache {
    /// Puts `pages`, which hold the KV of `tokens`, into the tree and holds all of them.
    ///
    /// `lock` is the caller's hold from an earlier call; the pages it covers must be the first ones given.
    /// Where the tree has a page for the same tokens already, it wins: `pages[i]` is replaced and the
    /// caller's page goes to
    /// `duplicates`. Afterwards `pages` is exactly the locked path. O(tokens beyond the lock).
    ///
    /// Panics unless `tokens.len() == pages.len() * page_size` and there is at least one page.
    pub fn insert(
        &mut self,
        lock: Option<PrefixLock>,
        namespace: &Namespace,
        tokens: &[TokenId],
        pages: &mut [PageId],
        duplicates: &mut Vec<PageId>,
    ) -> Inserted {
        assert!(!pages.is_empty() && tokens.len() == pages.len() * self.page_size, "full pages only");
        let (start, mut done) = match &lock {
            Some(lock) => (self.locked_node(lock), lock.pages()),
            None => (self.root(namespace), 0),
        };
        assert!(done <= pages.len(), "the held pages come first");
        let mut node = start;
        while let Some((child, common)) = self.step_down(node, &tokens[done * self.page_size..]) {
            node = if common < self.node(child).pages.len() { self.split(child, common) } else { child };
            for (mine, &cached) in pages[done..done + common].iter_mut().zip(&self.node(node).pages) {
                duplicates.push(std::mem::replace(mine, cached));
            }
            done += common;
        }
        let adopted_pages = pages.len() - done;
        // The hold moves down from `start`, which stays locked by its path; a first insertion
        // locks up to the root.
        let stop = if lock.is_some() { start } else { NO_NODE };
        if adopted_pages > 0 {
            let (new_tokens, new_pages) = (&tokens[done * self.page_size..], &pages[done..]);
            self.epoch += 1;
            self.pages_total += adopted_pages;
            if lock.is_some() && node == start && self.is_leaf_of_one(node) {
                self.extend(node, new_tokens, new_pages);
            } else {
                node = self.add_child(node, new_tokens, new_pages);
            }
        }
        self.lock_path(node, stop);
        let lock = PrefixLock { node, generation: self.node(node).generation, pages: pages.len() as u32 };
        Inserted { lock, adopted_pages }
    }

    /// A leaf that only the caller locks may grow in place: a long prompt in many chunks stays one node.
    /// With a second holder it may not, because that one would then hold the new pages too.
    fn is_leaf_of_one(&self, index: NodeIndex) -> bool {
        let node = self.node(index);
        node.locks == 1 && node.children.is_empty()
    }

    fn extend(&mut self, index: NodeIndex, tokens: &[TokenId], pages: &[PageId]) {
        self.pages_locked += pages.len();
        let node = self.node_mut(index);
        node.tokens.extend_from_slice(tokens);
        node.pages.extend_from_slice(pages);
    }

    fn add_child(&mut self, parent: NodeIndex, tokens: &[TokenId], pages: &[PageId]) -> NodeIndex {
        self.clock += 1;
        let stamp = self.clock;
        let was_evictable = (self.node(parent).stamp, parent);
        self.evictable.remove(&was_evictable);
        let child = self.add_node(Node {
            generation: 0,
            parent,
            root_of: None,
            tokens: tokens.to_vec(),
            pages: pages.to_vec(),
            children: BTreeMap::new(),
            locks: 0,
            stamp,
        });
        // `lock_path`, which the caller runs next, expects an unlocked leaf to be here.
        self.evictable.insert((stamp, child));
        let key = tokens[..self.page_size].into();
        let previous = self.node_mut(parent).children.insert(key, child);
        assert!(previous.is_none(), "invariant: the walk stopped because there was no such child");
        child
    }

    fn root(&mut self, namespace: &Namespace) -> NodeIndex {
        if let Some(&root) = self.roots.get(namespace) {
            return root;
        }
        self.clock += 1;
        let root = self.add_node(Node {
            generation: 0,
            parent: NO_NODE,
            root_of: Some(namespace.clone()),
            tokens: Vec::new(),
            pages: Vec::new(),
            children: BTreeMap::new(),
            locks: 0,
            stamp: self.clock,
        });
        self.roots.insert(namespace.clone(), root);
        root
    }
}
