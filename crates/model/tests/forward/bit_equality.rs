//! The promise of `docs/architecture.md`, "Numbers": logits are bit-equal whatever the tp size among
//! 1, 2, 4, 8, the batch, the chunk, the page size and the thread count.

use crate::group::{Layout, Logits, first_difference, interleaved, one_by_one, run};
use lockstep_testkit::{Fixture, TempDir};

/// Five prompts of different lengths; the longest crosses an attention segment (64 positions).
fn prompts() -> Vec<Vec<u32>> {
    let prompt = |len: u32, salt: u32| (0..len).map(|i| (i * 29 + salt * 7 + 3) % 320).collect();
    vec![prompt(83, 0), prompt(1, 1), prompt(17, 2), prompt(64, 3), prompt(30, 4)]
}

fn assert_equal(expected: &Logits, got: &Logits, what: &str) {
    if let Some(difference) = first_difference(expected, got) {
        panic!("{what}: {difference}");
    }
}

#[test]
fn logits_do_not_depend_on_how_they_are_computed() {
    let temp = TempDir::new("bit-equality");
    for name in ["rand_heads8", "rand_kv2_tp4", "rand_bf16"] {
        let fixture = Fixture::named(name);
        let folder = fixture.write_into(temp.path());
        let prompts = prompts();
        let whole = one_by_one(&prompts, usize::MAX >> 1);
        let base = run(&folder, Layout::default(), &prompts, &whole);
        for chunk in [1, 7, 64] {
            let got = run(&folder, Layout::default(), &prompts, &one_by_one(&prompts, chunk));
            assert_equal(&base, &got, &format!("{name}, chunk {chunk}"));
        }
        for page_size in [1, 2, 3, 16, 64] {
            let layout = Layout { page_size, ..Layout::default() };
            assert_equal(
                &base,
                &run(&folder, layout, &prompts, &whole),
                &format!("{name}, page size {page_size}"),
            );
        }
        let mixed = interleaved(&prompts);
        for threads in [1, 2, 3] {
            let layout = Layout { threads, ..Layout::default() };
            assert_equal(
                &base,
                &run(&folder, layout, &prompts, &mixed),
                &format!("{name}, mixed, {threads} threads"),
            );
        }
        for &tp in fixture.expect.tp_sizes.iter().filter(|&&tp| tp > 1) {
            for (steps, page_size) in [(&whole, 16), (&mixed, 3)] {
                let layout = Layout { tp, page_size, ..Layout::default() };
                assert_equal(&base, &run(&folder, layout, &prompts, steps), &format!("{name}, tp {tp}"));
            }
        }
    }
}

/// One model of each kind of layer, with KV heads that are replicated at tp 4 and 8 and a vocabulary
/// that no tp size divides.
#[test]
fn every_family_is_bit_equal_too() {
    let temp = TempDir::new("bit-equality-families");
    for name in [
        "rand_mistral_window",
        "rand_qwen2_window",
        "rand_qwen3_window",
        "rand_phi3_longrope",
        "rand_gemma2",
        "rand_gemma3",
        "rand_qwen3_moe",
        "rand_qwen3_moe_sparse_step",
    ] {
        let fixture = Fixture::named(name);
        let folder = fixture.write_into(temp.path());
        let prompts = prompts();
        let (whole, mixed) = (one_by_one(&prompts, usize::MAX >> 1), interleaved(&prompts));
        let base = run(&folder, Layout::default(), &prompts, &whole);
        let chunked =
            run(&folder, Layout { page_size: 3, ..Layout::default() }, &prompts, &one_by_one(&prompts, 7));
        assert_equal(&base, &chunked, &format!("{name}, chunk 7, page size 3"));
        for tp in [1, 2, 4, 8] {
            assert!(fixture.expect.tp_sizes.contains(&tp));
            let layout = Layout { tp, threads: if tp == 1 { 2 } else { 1 }, ..Layout::default() };
            assert_equal(&base, &run(&folder, layout, &prompts, &mixed), &format!("{name}, mixed, tp {tp}"));
        }
    }
}

#[test]
fn odd_tp_sizes_agree_within_the_bound() {
    let temp = TempDir::new("odd-tp");
    for (name, tp) in [("rand_heads3", 3), ("rand_heads6", 6), ("rand_qwen3_moe_heads6", 6)] {
        let folder = Fixture::named(name).write_into(temp.path());
        let prompts = prompts();
        let whole = one_by_one(&prompts, usize::MAX >> 1);
        let base = run(&folder, Layout::default(), &prompts, &whole);
        let got = run(&folder, Layout { tp, ..Layout::default() }, &prompts, &whole);
        for (x, y) in base.iter().flatten().zip(got.iter().flatten()) {
            let scale = x.iter().fold(0f32, |m, v| m.max(v.abs()));
            let error = x.iter().zip(y).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(error <= 1e-4 * scale, "{name} tp {tp}: error {error}, largest logit {scale}");
        }
    }
}
