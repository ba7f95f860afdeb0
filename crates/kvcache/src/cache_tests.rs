//! Pool and tree together: accounting, duplicates, flush, `--cache none`.

use super::*;
use crate::test_random::Random;

/// A request: the tokens whose KV exists fill all pages of its table.
struct User {
    table: PageTable,
    namespace: Namespace,
    tokens: Vec<TokenId>,
}

#[test]
fn a_hundred_thousand_operations_keep_the_accounting_exact() {
    for (seed, page_size, cache) in [(1, 1, true), (2, 2, true), (3, 3, true), (4, 16, true), (5, 2, false)] {
        println!("seed {seed}, page size {page_size}, cache {cache}");
        random_run(Random(seed << 32), KvCache::new(page_size, 40, cache, true), 21_000);
    }
}

fn random_run(mut random: Random, mut kv: KvCache, ops: usize) {
    let page_size = kv.page_size();
    let (mut users, mut duplicates, mut freed) = (Vec::<User>::new(), Vec::new(), Vec::new());
    // The content of every page: the tokens up to and including its own. Poisoned when freed.
    let mut content: Vec<Option<Vec<TokenId>>> = vec![None; 40];
    for op in 0..ops {
        match random.below(8) {
            0..3 if users.len() < 8 => {
                let len = 1 + random.below(6 * page_size);
                let tokens: Vec<TokenId> = {
                    let kinds: Vec<usize> = (0..6).map(|_| random.below(4)).collect();
                    (0..len).map(|at| TokenId::from(kinds[at / page_size] == 0)).collect()
                };
                let mut user = User { table: PageTable::new(), namespace: None, tokens };
                let probe = kv.probe(&user.namespace, &user.tokens);
                let cached_len = kv.attach(&user.namespace, &user.tokens, &mut user.table);
                assert_eq!(cached_len, probe.pages * page_size);
                assert!(cached_len < user.tokens.len());
                if kv.grow(&mut user.table, user.tokens.len().div_ceil(page_size)) {
                    poison(&mut kv, &mut freed, &mut content);
                    for (n, &page) in user.table.pages().iter().enumerate().skip(cached_len / page_size) {
                        content[page as usize] = Some(user.tokens[..len.min((n + 1) * page_size)].to_vec());
                    }
                    users.push(user);
                } else {
                    kv.release(&mut user.table);
                }
            }
            0..5 if !users.is_empty() => {
                let at = random.below(users.len());
                let User { table, namespace, tokens } = &mut users[at];
                kv.publish(namespace, tokens, table, &mut duplicates);
            }
            5 if op % 50 == 0 => kv.flush(),
            5 => kv.free(&std::mem::take(&mut duplicates)),
            _ if !users.is_empty() => {
                let at = random.below(users.len());
                kv.release(&mut users.swap_remove(at).table);
            }
            _ => {}
        }
        poison(&mut kv, &mut freed, &mut content);
        for user in &users {
            for (n, &page) in user.table.pages().iter().enumerate() {
                let end = user.tokens.len().min((n + 1) * page_size);
                assert_eq!(content[page as usize].as_deref(), Some(&user.tokens[..end]), "op {op}");
            }
        }
        kv.check(users.iter().map(|u| &u.table), &duplicates).unwrap();
        let counts = kv.counts();
        assert_eq!(counts.free + counts.cached + counts.held, counts.total);
    }
    users.iter_mut().for_each(|user| kv.release(&mut user.table));
    kv.free(&duplicates);
    kv.flush();
    assert_eq!(kv.counts().free, 40, "every page comes back");
}

fn poison(kv: &mut KvCache, freed: &mut Vec<PageId>, content: &mut [Option<Vec<TokenId>>]) {
    kv.take_freed(freed);
    freed.drain(..).for_each(|page| content[page as usize] = None);
}

#[test]
fn the_second_of_two_equal_prefixes_is_pointed_at_the_first() {
    let mut kv = KvCache::new(2, 8, true, false);
    let prompt = [1, 2, 3, 4, 5];
    let (mut a, mut b, mut duplicates) = (PageTable::new(), PageTable::new(), Vec::new());
    assert!(kv.grow(&mut a, 3) && kv.grow(&mut b, 3));
    let before = b.fingerprint();
    kv.publish(&None, &prompt, &mut a, &mut duplicates);
    kv.publish(&None, &prompt, &mut b, &mut duplicates);
    assert_eq!((a.pages(), b.pages(), duplicates.as_slice()), (&[0, 1, 2][..], &[0, 1, 5][..], &[3, 4][..]));
    assert_eq!((a.shared_len(), b.shared_len()), (2, 2));
    assert_ne!(b.fingerprint(), before);
    kv.check([&a, &b].into_iter(), &duplicates).unwrap();
    kv.free(&duplicates);
    kv.release(&mut a);
    assert_eq!(kv.counts(), KvCounts { free: 5, cached: 0, held: 3, total: 8 });
    kv.release(&mut b);
    assert_eq!(kv.counts(), KvCounts { free: 6, cached: 2, held: 0, total: 8 });
}

#[test]
fn growing_evicts_only_what_is_missing_and_fails_whole() {
    let mut kv = KvCache::new(1, 4, true, false);
    let mut table = PageTable::new();
    assert!(kv.grow(&mut table, 3));
    kv.publish(&None, &[1, 2, 3], &mut table, &mut Vec::new());
    kv.release(&mut table);
    assert!(kv.grow(&mut table, 2), "one free page, one evicted");
    assert_eq!(kv.probe(&None, &[1, 2, 3, 4]).pages, 2, "the tail went first");
    assert!(!kv.grow(&mut table, 5));
    assert_eq!((table.len(), kv.evicted_pages()), (2, 1));
    kv.release(&mut table);
}
