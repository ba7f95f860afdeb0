//! The tree against a map from every cached prefix to its page.

use super::{Namespace, PrefixLock, RadixCache};
use crate::test_random::Random;
use lockstep_core::{PageId, TokenId};
use std::collections::BTreeMap;
use std::time::Instant;

/// What the model knows of one cached page.
struct ModelPage {
    page: PageId,
    locks: usize,
    last_use: u64,
}

/// One holder of a path.
struct Hold {
    lock: PrefixLock,
    namespace: Namespace,
    tokens: Vec<TokenId>,
    pages: Vec<PageId>,
}

/// Each cached prefix (whole pages) and the page at its end.
struct Model {
    page_size: usize,
    pages: BTreeMap<(Namespace, Vec<TokenId>), ModelPage>,
    now: u64,
}

impl Model {
    fn key(&self, namespace: &Namespace, tokens: &[TokenId], pages: usize) -> (Namespace, Vec<TokenId>) {
        (namespace.clone(), tokens[..pages * self.page_size].to_vec())
    }

    fn hit(&self, namespace: &Namespace, prompt: &[TokenId]) -> Vec<PageId> {
        let usable = (prompt.len() - 1) / self.page_size;
        (1..=usable).map_while(|n| self.pages.get(&self.key(namespace, prompt, n)).map(|p| p.page)).collect()
    }

    fn change_locks(
        &mut self,
        namespace: &Namespace,
        tokens: &[TokenId],
        pages: std::ops::Range<usize>,
        by: isize,
    ) {
        for n in pages {
            let key = self.key(namespace, tokens, n + 1);
            let page = self.pages.get_mut(&key).expect("held prefixes stay");
            page.locks = page.locks.checked_add_signed(by).expect("no lock is released twice");
            page.last_use = self.now;
        }
    }

    /// Prefixes that no longer prefix extends and nobody locks, with their last use.
    fn leaves(&self) -> impl Iterator<Item = (&(Namespace, Vec<TokenId>), &ModelPage)> {
        self.pages.iter().filter(|(key, page)| {
            let mut longer = self.pages.range((*key).clone()..).skip(1);
            page.locks == 0 && !longer.next().is_some_and(|(k, _)| k.0 == key.0 && k.1.starts_with(&key.1))
        })
    }

    fn evicted(&mut self, page: PageId) {
        let oldest = self.leaves().map(|(_, p)| p.last_use).min().expect("something was evictable");
        let (key, used) = self
            .leaves()
            .find(|(_, p)| p.page == page)
            .map(|(key, p)| (key.clone(), p.last_use))
            .expect("an unlocked leaf was evicted");
        assert_eq!(used, oldest, "the least recently used leaf goes first");
        self.pages.remove(&key);
    }
}

struct Run {
    random: Random,
    tree: RadixCache,
    model: Model,
    holds: Vec<Hold>,
    next_page: PageId,
    /// Hit, duplicate and evicted pages, to see that the run tries all of them.
    seen: [usize; 3],
}

impl Run {
    /// Pages of few kinds, so that beginnings repeat; now and then one differs in its last token only.
    fn tokens(&mut self, len: usize) -> Vec<TokenId> {
        let page_size = self.model.page_size;
        let kinds: Vec<usize> = (0..len.div_ceil(page_size)).map(|_| self.random.below(16)).collect();
        let token = |at: usize| {
            let kind = kinds[at / page_size];
            TokenId::from(kind < 4 || (kind < 6 && at % page_size == page_size - 1))
        };
        (0..len).map(token).collect()
    }

    fn namespace(&mut self) -> Namespace {
        (self.random.below(4) == 0).then(|| "salt".into())
    }

    fn acquire(&mut self) {
        let len = 1 + self.random.below(8 * self.model.page_size);
        let (namespace, prompt) = (self.namespace(), self.tokens(len));
        let expected = self.model.hit(&namespace, &prompt);
        let probe = self.tree.probe(&namespace, &prompt);
        assert_eq!(probe.pages, expected.len());
        let before = self.tree.unlocked_pages();
        let mut pages = Vec::new();
        let lock = self.tree.acquire(&namespace, &prompt, &mut pages);
        assert_eq!(pages, expected);
        self.seen[0] += pages.len();
        assert_eq!(before - self.tree.unlocked_pages(), probe.unlocked_pages);
        assert_eq!(lock.as_ref().map_or(0, PrefixLock::pages), pages.len());
        if let Some(lock) = lock {
            self.model.change_locks(&namespace, &prompt, 0..pages.len(), 1);
            let tokens = prompt[..pages.len() * self.model.page_size].to_vec();
            self.holds.push(Hold { lock, namespace, tokens, pages });
        }
    }

    fn insert(&mut self) {
        let (lock, namespace, mut tokens, mut pages) = match self.random.below(3) {
            0 if !self.holds.is_empty() => {
                let hold = self.holds.swap_remove(self.random.below(self.holds.len()));
                (Some(hold.lock), hold.namespace, hold.tokens, hold.pages)
            }
            _ => (None, self.namespace(), Vec::new(), Vec::new()),
        };
        let (held, added) = (pages.len(), 1 + self.random.below(4));
        tokens.extend(self.tokens(added * self.model.page_size));
        let own = self.next_page..self.next_page + added as PageId;
        self.next_page = own.end;
        pages.extend(own);
        let (given, mut duplicates, mut expected_duplicates) = (pages.clone(), Vec::new(), Vec::new());
        let inserted = self.tree.insert(lock, &namespace, &tokens, &mut pages, &mut duplicates);
        let mut adopted = 0;
        for n in held..pages.len() {
            let key = self.model.key(&namespace, &tokens, n + 1);
            match self.model.pages.get(&key) {
                Some(cached) => {
                    assert_eq!(pages[n], cached.page);
                    expected_duplicates.push(given[n]);
                }
                None => {
                    adopted += 1;
                    let page = ModelPage { page: given[n], locks: 0, last_use: self.model.now };
                    self.model.pages.insert(key, page);
                }
            }
        }
        self.seen[1] += duplicates.len();
        assert_eq!((inserted.adopted_pages, &duplicates), (adopted, &expected_duplicates));
        self.model.change_locks(&namespace, &tokens, held..pages.len(), 1);
        self.holds.push(Hold { lock: inserted.lock, namespace, tokens, pages });
    }

    fn release(&mut self) {
        if self.holds.is_empty() {
            return;
        }
        let hold = self.holds.swap_remove(self.random.below(self.holds.len()));
        self.model.change_locks(&hold.namespace, &hold.tokens, 0..hold.pages.len(), -1);
        self.tree.release(hold.lock);
    }

    fn evict(&mut self, count: usize) {
        let unlocked = self.tree.unlocked_pages();
        let mut evicted = Vec::new();
        self.tree.evict(count, &mut evicted);
        assert_eq!(evicted.len(), count.min(unlocked));
        self.seen[2] += evicted.len();
        evicted.into_iter().for_each(|page| self.model.evicted(page));
    }

    fn check(&self) {
        self.tree.check().unwrap();
        self.tree.check_locks(self.holds.iter().map(|h| &h.lock)).unwrap();
        for hold in &self.holds {
            self.tree.check_path(&hold.lock, &hold.pages).unwrap();
        }
        assert_eq!(self.tree.total_pages(), self.model.pages.len());
        let unlocked = self.model.pages.values().filter(|p| p.locks == 0).count();
        assert_eq!(self.tree.unlocked_pages(), unlocked);
    }
}

#[test]
fn a_hundred_thousand_operations_agree_with_the_model() {
    for (seed, page_size) in [(1, 1), (2, 2), (3, 3), (4, 16)] {
        println!("seed {seed}, page size {page_size}");
        let mut run = Run {
            random: Random(seed << 32),
            tree: RadixCache::new(page_size),
            model: Model { page_size, pages: BTreeMap::new(), now: 0 },
            holds: Vec::new(),
            next_page: 0,
            seen: [0; 3],
        };
        for op in 0..26_000 {
            run.model.now += 1;
            match run.random.below(10) {
                0..3 => run.acquire(),
                3..5 => run.insert(),
                _ if run.holds.len() > 12 => run.release(),
                5..8 => run.release(),
                _ => {
                    let count = run.random.below(6) + run.tree.unlocked_pages().saturating_sub(60);
                    run.evict(count);
                }
            }
            if op % 4 == 0 {
                run.check();
            }
        }
        println!("hit, duplicate and evicted pages: {:?}", run.seen);
        assert!(run.seen.iter().all(|&count| count > 1000));
        while !run.holds.is_empty() {
            run.release();
        }
        run.evict(usize::MAX);
        run.check();
        assert_eq!(run.tree.node_count(), 0, "empty namespaces leave no root behind");
    }
}

#[test]
fn a_hit_never_covers_the_last_token() {
    let mut tree = RadixCache::new(4);
    let tokens: Vec<TokenId> = (0..8).collect();
    let lock = tree.insert(None, &None, &tokens, &mut [10, 11], &mut Vec::new()).lock;
    assert_eq!(tree.probe(&None, &tokens).pages, 1, "8 tokens: the second page holds the last one");
    assert_eq!(tree.probe(&None, &[0, 1, 2, 3, 4, 5, 6, 7, 8]).pages, 2);
    assert_eq!(tree.probe(&None, &[0, 1, 2]).pages, 0, "shorter than a page");
    assert_eq!(tree.probe(&None, &[0, 1, 2, 9, 4]).pages, 0, "differs inside the first page");
    assert_eq!(tree.probe(&Some("other".into()), &tokens).pages, 0);
    tree.release(lock);
}

#[test]
fn chunks_of_one_prompt_stay_one_node_and_a_second_holder_does_not_hold_the_growth() {
    let mut tree = RadixCache::new(1);
    let (tokens, mut pages): (Vec<TokenId>, Vec<PageId>) = ((0..6).collect(), (0..6).collect());
    let mut unused = Vec::new();
    let lock = tree.insert(None, &None, &tokens[..2], &mut pages[..2], &mut unused).lock;
    let lock = tree.insert(Some(lock), &None, &tokens[..4], &mut pages[..4], &mut unused).lock;
    assert_eq!(tree.node_count(), 2, "root and one node");
    let second = tree.acquire(&None, &tokens, &mut Vec::new()).expect("four pages are cached");
    let lock = tree.insert(Some(lock), &None, &tokens, &mut pages, &mut unused).lock;
    assert_eq!(tree.node_count(), 3);
    tree.release(lock);
    assert_eq!(tree.unlocked_pages(), 2, "the second holder keeps its own four pages only");
    tree.release(second);
    tree.check().unwrap();
}

#[test]
fn long_prompts_and_many_nodes_stay_fast() {
    let tokens: Vec<TokenId> = (0..100_000).collect();
    let mut pages: Vec<PageId> = (0..6250).collect();
    let mut tree = RadixCache::new(16);
    for i in 0..100_000u32 {
        let lock = tree.insert(None, &None, &[1_000_000 + i; 16], &mut [10_000 + i], &mut Vec::new()).lock;
        tree.release(lock);
    }
    let start = Instant::now();
    let miss = tree.acquire(&None, &tokens, &mut Vec::new());
    let lock = tree.insert(miss, &None, &tokens, &mut pages, &mut Vec::new()).lock;
    tree.release(lock);
    let hit = tree.acquire(&None, &tokens, &mut Vec::new()).expect("it was just inserted");
    println!("match and insert of 100,000 tokens beside 100,000 nodes, then a hit: {:?}", start.elapsed());
    tree.release(hit);
    let start = Instant::now();
    let mut evicted = Vec::new();
    tree.evict(50_000, &mut evicted);
    println!("eviction of 50,000 nodes: {:?}", start.elapsed());
    assert_eq!(evicted[0], 10_000, "the oldest goes first");
    tree.check().unwrap();
}
