//! Token-exact prefix tree over full pages.
//!
//! An edge carries `k` pages and their `k * page_size` tokens; children of a node are keyed by the tokens of
//! their first page, so the tree branches at page boundaries only. Each namespace (cache salt) has its own
//! root.
//!
//! **Invariants:** a node's lock count is at least the sum of its children's, so nodes on the path of
//! a locked node are locked; exactly the unlocked leaves are evictable, ordered by (stamp, node). Stamps come
//! from a logical counter that ticks per touched node: no two are equal and no clock is read, hence all ranks
//! evict the same page. [`RadixCache::check`] verifies all of it.
//!
//! Follows TGI `backends/v3/src/radix.rs` (counter as time) and mini-SGLang `kvcache/radix_cache.py`
//! (lock path, split); differs: the evictable leaves are an ordered set instead of being
//! searched, a node is evicted from its tail page by page, and a lock moves down with its request's
//! insertions.
//!
//! Reading order: this file (nodes, probe, acquire, release), `insert`, `evict`, `check`.

mod check;
mod evict;
mod insert;
#[cfg(test)]
mod tests;

use lockstep_core::{PageId, TokenId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Requests share cached prefixes only within one namespace; `None` is the common one.
pub type Namespace = Option<Arc<str>>;

type NodeIndex = u32;

/// Parent of the roots.
const NO_NODE: NodeIndex = NodeIndex::MAX;

/// A hold on a path of the tree; its pages stay until [`RadixCache::release`] takes it back.
///
/// Neither `Clone` nor `Copy`, so that a path cannot be released twice; it is serialized only with its tree,
/// as part of a scheduler's snapshot.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[must_use = "a lock that is dropped keeps its pages for ever; give it to RadixCache::release"]
pub struct PrefixLock {
    node: NodeIndex,
    generation: u32,
    pages: u32,
}

impl PrefixLock {
    /// Pages from the root to the end of the locked path.
    pub fn pages(&self) -> usize {
        self.pages as usize
    }
}

/// What the tree has of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// Cached pages of the prompt's beginning.
    pub pages: usize,
    /// Of these, pages that nobody locks: taking them makes that many fewer available.
    pub unlocked_pages: usize,
}

/// What [`RadixCache::insert`] did.
#[derive(Debug)]
pub struct Inserted {
    /// The hold on all inserted pages; replaces the one given.
    pub lock: PrefixLock,
    /// How many of the last pages given are now the tree's.
    pub adopted_pages: usize,
}

#[derive(Debug, Serialize, Deserialize)]
struct Node {
    /// Counts reuses of this place, so that a stale lock is noticed.
    generation: u32,
    parent: NodeIndex,
    /// Set on roots only.
    root_of: Option<Namespace>,
    /// Tokens of this edge, `pages.len() * page_size`; empty on roots.
    tokens: Vec<TokenId>,
    pages: Vec<PageId>,
    /// By the tokens of the child's first page.
    children: BTreeMap<Box<[TokenId]>, NodeIndex>,
    locks: u32,
    /// Logical time of the last use; unique.
    stamp: u64,
}

/// The tree. It owns its pages' numbers but not their state; see [`crate::KvCache`].
#[derive(Debug, Serialize, Deserialize)]
pub struct RadixCache {
    page_size: usize,
    nodes: Vec<Node>,
    /// Unused places in `nodes`.
    vacant: Vec<NodeIndex>,
    roots: BTreeMap<Namespace, NodeIndex>,
    /// Unlocked leaves, least recently used first.
    evictable: BTreeSet<(u64, NodeIndex)>,
    /// Logical time.
    clock: u64,
    pages_total: usize,
    pages_locked: usize,
    epoch: u64,
}

impl RadixCache {
    /// An empty tree over pages of `page_size` tokens.
    pub fn new(page_size: usize) -> Self {
        assert!(page_size > 0, "a page holds at least one token");
        Self {
            page_size,
            nodes: Vec::new(),
            vacant: Vec::new(),
            roots: BTreeMap::new(),
            evictable: BTreeSet::new(),
            clock: 0,
            pages_total: 0,
            pages_locked: 0,
            epoch: 0,
        }
    }

    /// Pages in the tree.
    pub fn total_pages(&self) -> usize {
        self.pages_total
    }

    /// Pages that nobody locks; all of them can be evicted.
    pub fn unlocked_pages(&self) -> usize {
        self.pages_total - self.pages_locked
    }

    /// Nodes in the tree, roots included.
    pub fn node_count(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// Changes with every insertion and eviction.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The cached prefix of `prompt`, never all of it; changes nothing. O(prompt).
    pub fn probe(&self, namespace: &Namespace, prompt: &[TokenId]) -> Probe {
        let mut probe = Probe::default();
        let Some(&root) = self.roots.get(namespace) else { return probe };
        let tokens = &prompt[..self.usable_len(prompt.len())];
        let mut node = root;
        while let Some((child, common)) = self.step_down(node, &tokens[probe.pages * self.page_size..]) {
            probe.pages += common;
            if self.node(child).locks == 0 {
                probe.unlocked_pages += common;
            }
            if common < self.node(child).pages.len() {
                break;
            }
            node = child;
        }
        probe
    }

    /// Locks the cached prefix of `prompt`, never all of it, and appends its pages to `pages`.
    /// `None` when nothing is cached. O(prompt + path).
    pub fn acquire(
        &mut self,
        namespace: &Namespace,
        prompt: &[TokenId],
        pages: &mut Vec<PageId>,
    ) -> Option<PrefixLock> {
        let &root = self.roots.get(namespace)?;
        let tokens = &prompt[..self.usable_len(prompt.len())];
        let (mut node, mut matched) = (root, 0);
        while let Some((child, common)) = self.step_down(node, &tokens[matched * self.page_size..]) {
            node = if common < self.node(child).pages.len() { self.split(child, common) } else { child };
            pages.extend_from_slice(&self.node(node).pages);
            matched += common;
        }
        if matched == 0 {
            return None;
        }
        self.lock_path(node, NO_NODE);
        Some(PrefixLock { node, generation: self.node(node).generation, pages: matched as u32 })
    }

    /// Gives a hold back; its pages stay cached until they are evicted. O(path).
    pub fn release(&mut self, lock: PrefixLock) {
        let mut index = self.locked_node(&lock);
        while self.node(index).parent != NO_NODE {
            self.clock += 1;
            let stamp = self.clock;
            let node = self.node_mut(index);
            assert!(node.locks > 0, "invariant: a locked path is locked up to its root");
            node.locks -= 1;
            // Deeper nodes are stamped first, hence evicted first.
            node.stamp = stamp;
            let (parent, pages) = (node.parent, node.pages.len());
            if node.locks == 0 {
                let is_leaf = node.children.is_empty();
                self.pages_locked -= pages;
                if is_leaf {
                    self.evictable.insert((stamp, index));
                }
            }
            index = parent;
        }
    }

    /// Locks every node from `index` up to, not including, `stop` or the root.
    fn lock_path(&mut self, mut index: NodeIndex, stop: NodeIndex) {
        while index != stop && self.node(index).parent != NO_NODE {
            self.clock += 1;
            let stamp = self.clock;
            let node = self.node_mut(index);
            let old_stamp = std::mem::replace(&mut node.stamp, stamp);
            node.locks += 1;
            let (parent, pages) = (node.parent, node.pages.len());
            if node.locks == 1 {
                let is_leaf = node.children.is_empty();
                self.pages_locked += pages;
                if is_leaf {
                    self.evictable.remove(&(old_stamp, index));
                }
            }
            index = parent;
        }
    }

    /// The child of `index` that begins like `tokens`, and how many pages they share (at least one).
    fn step_down(&self, index: NodeIndex, tokens: &[TokenId]) -> Option<(NodeIndex, usize)> {
        let first = tokens.get(..self.page_size)?;
        let &child = self.node(index).children.get(first)?;
        Some((child, common_len(&self.node(child).tokens, tokens) / self.page_size))
    }

    /// Cuts a node after `pages` pages. The lower part keeps the place (locks stay valid); returns the
    /// new upper part, which has the same locks.
    fn split(&mut self, lower: NodeIndex, pages: usize) -> NodeIndex {
        let cut = pages * self.page_size;
        self.clock += 1;
        let stamp = self.clock;
        let page_size = self.page_size;
        let node = self.node_mut(lower);
        let lower_tokens = node.tokens.split_off(cut);
        let upper_tokens = std::mem::replace(&mut node.tokens, lower_tokens);
        let lower_pages = node.pages.split_off(pages);
        let upper_pages = std::mem::replace(&mut node.pages, lower_pages);
        let lower_key = node.tokens[..page_size].into();
        let (parent, locks) = (node.parent, node.locks);
        let upper = self.add_node(Node {
            generation: 0,
            parent,
            root_of: None,
            tokens: upper_tokens,
            pages: upper_pages,
            children: BTreeMap::from([(lower_key, lower)]),
            locks,
            stamp,
        });
        self.node_mut(lower).parent = upper;
        let nodes = &mut self.nodes;
        let (parent, upper_node) = pair_mut(nodes, parent, upper);
        let place = parent.children.get_mut(&upper_node.tokens[..page_size]);
        *place.expect("invariant: a child is in its parent's map") = upper;
        upper
    }

    /// Puts a node into a vacant place, keeping that place's generation.
    fn add_node(&mut self, mut node: Node) -> NodeIndex {
        match self.vacant.pop() {
            Some(index) => {
                node.generation = self.node(index).generation;
                self.nodes[index as usize] = node;
                index
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as NodeIndex
            }
        }
    }

    /// The part of a prompt that a hit may cover: whole pages, and never the last token, whose
    /// logits must be computed.
    fn usable_len(&self, prompt_len: usize) -> usize {
        prompt_len.saturating_sub(1) / self.page_size * self.page_size
    }

    fn locked_node(&self, lock: &PrefixLock) -> NodeIndex {
        assert_eq!(
            self.node(lock.node).generation,
            lock.generation,
            "invariant: a locked node is not removed"
        );
        lock.node
    }

    fn node(&self, index: NodeIndex) -> &Node {
        &self.nodes[index as usize]
    }

    fn node_mut(&mut self, index: NodeIndex) -> &mut Node {
        &mut self.nodes[index as usize]
    }
}

/// Two different nodes at once.
fn pair_mut(nodes: &mut [Node], a: NodeIndex, b: NodeIndex) -> (&mut Node, &mut Node) {
    let [a, b] =
        nodes.get_disjoint_mut([a as usize, b as usize]).expect("invariant: a node is not its own parent");
    (a, b)
}

/// How many leading elements are equal. Compares 64 at a time, which is a `memcmp`.
pub fn common_len(a: &[TokenId], b: &[TokenId]) -> usize {
    const STRIDE: usize = 64;
    let len = a.len().min(b.len());
    let mut at = 0;
    while at + STRIDE <= len && a[at..at + STRIDE] == b[at..at + STRIDE] {
        at += STRIDE;
    }
    at + a[at..len].iter().zip(&b[at..len]).take_while(|(x, y)| x == y).count()
}
