//! What the radix cache costs: `cargo bench -p lockstep-kvcache`. Figures in `docs/performance.md`.

use divan::Bencher;
use lockstep_core::TokenId;
use lockstep_kvcache::{KvCache, PageTable};

const PROMPT: usize = 100_000;

fn main() {
    divan::main();
}

/// Attaches `prompt`, grows the table to hold it, publishes and releases it: all that a request costs the cache.
fn whole_life(cache: &mut KvCache, prompt: &[TokenId]) -> usize {
    let (mut table, mut duplicates) = (PageTable::new(), Vec::new());
    let hit = cache.attach(&None, prompt, &mut table);
    assert!(cache.grow(&mut table, prompt.len().div_ceil(cache.page_size())));
    cache.publish(&None, prompt, &mut table, &mut duplicates);
    cache.release(&mut table);
    hit
}

/// Match and insert of a 100,000-token prompt that nobody has sent before, by page size.
#[divan::bench(args = [1, 16, 64])]
fn insert_100k_tokens(bencher: Bencher<'_, '_>, page_size: usize) {
    let mut first = 0;
    let mut cache = KvCache::new(page_size, 4 * PROMPT / page_size, true, false);
    bencher
        .with_inputs(|| {
            first += 1;
            (0..PROMPT as TokenId).map(|i| if i == 0 { first } else { i }).collect::<Vec<_>>()
        })
        .bench_local_refs(|prompt| assert_eq!(whole_life(&mut cache, prompt), 0));
}

/// The same prompt again: everything but the last page is found.
#[divan::bench(args = [1, 16, 64])]
fn hit_100k_tokens(bencher: Bencher<'_, '_>, page_size: usize) {
    let mut cache = KvCache::new(page_size, 4 * PROMPT / page_size, true, false);
    let prompt: Vec<TokenId> = (0..PROMPT as TokenId).collect();
    whole_life(&mut cache, &prompt);
    bencher.bench_local(|| assert!(whole_life(&mut cache, &prompt) > PROMPT - 100));
}

/// A 1,000-token prompt in a tree that already has `nodes` branches, evicting one branch for another.
#[divan::bench(args = [100, 10_000, 100_000])]
fn insert_beside_nodes(bencher: Bencher<'_, '_>, nodes: u32) {
    let prompt = |branch: TokenId| -> Vec<TokenId> {
        (0..1_000).map(|i| if i < 500 { i } else { i + 1_000 * (branch + 1) }).collect()
    };
    let mut cache = KvCache::new(16, 32 * nodes as usize + 100, true, false);
    for branch in 0..nodes {
        whole_life(&mut cache, &prompt(branch));
    }
    let mut branch = nodes;
    bencher
        .with_inputs(|| {
            branch += 1;
            prompt(branch)
        })
        .bench_local_refs(|prompt| whole_life(&mut cache, prompt));
}
