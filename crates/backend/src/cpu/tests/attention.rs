//! Rope, the KV store and attention: bit-equal to the reference whatever pages, chunks, batch and
//! threads are, and blind to every slot that is not a visible position.

use super::reference;
use super::{Random, assert_same, backend, backends, empty, tensor};
use crate::cpu::memory::HUGE_PAGE;
use crate::cpu::{CpuBackend, CpuKvCache, Isa};
use crate::{Attention, AttentionBatch, AttentionRow, Backend, KvLayout, QkvShape, RopeAndStore};
use lockstep_core::DType;
use lockstep_core::config::RopeFrequencies;
use reference::Scores;

const LAYERS: usize = 2;
const LAYER: usize = 1;

/// One request: its q|k|v per token as the projections give it.
struct Request {
    qkv: Vec<f32>,
    tokens: usize,
}

/// A model's attention shape, and how its tokens are cut into steps and pages.
struct Case {
    shape: QkvShape,
    page_size: usize,
    frequencies: RopeFrequencies,
    scores: Scores,
    norms: Option<(Vec<f32>, Vec<f32>)>,
}

impl Case {
    fn new(random: &mut Random, head_dim: usize, kv_heads: usize, group: usize, page_size: usize) -> Self {
        let shape =
            QkvShape { local_heads: kv_heads * group, local_kv_heads: kv_heads, head_dim, norm_eps: 1e-6 };
        let rotary_dim = [head_dim, head_dim / 4 * 2][random.below(2)];
        let inverse =
            (0..rotary_dim / 2).map(|i| 10_000f64.powf(-2.0 * i as f64 / rotary_dim as f64)).collect();
        let frequencies = RopeFrequencies { inverse, attention_factor: random.pick(&[1.0, 1.19]) };
        let scores = Scores {
            scale: random.pick(&[0.25, 1.0 / (head_dim as f32).sqrt()]),
            softcap: random.pick(&[None, Some(5.0), Some(50.0)]),
            window: random.pick(&[None, None, Some(1), Some(3), Some(17), Some(64), Some(100)]),
        };
        let norms = (random.below(2) == 0).then(|| (random.values(head_dim), random.values(head_dim)));
        Self { shape, page_size, frequencies, scores, norms }
    }

    fn width(&self) -> usize {
        (self.shape.local_heads + 2 * self.shape.local_kv_heads) * self.shape.head_dim
    }

    fn request(&self, random: &mut Random, tokens: usize) -> Request {
        Request { qkv: random.values(tokens * self.width()).iter().map(|v| v * 3.0).collect(), tokens }
    }

    /// The reference output `[tokens, heads * head_dim]`; also in f64, to judge accuracy.
    fn reference(&self, request: &Request) -> (Vec<f32>, Vec<f64>) {
        let (dim, heads, kv_heads) = (self.shape.head_dim, self.shape.local_heads, self.shape.local_kv_heads);
        let mut rows = Vec::new();
        for (position, row) in request.qkv.chunks(self.width()).enumerate() {
            let mut row = row.to_vec();
            for (head, x) in row.chunks_mut(dim).take(heads + kv_heads).enumerate() {
                if let Some((q, k)) = &self.norms {
                    let weight = if head < heads { q } else { k };
                    x.copy_from_slice(&reference::rms_norm(x, weight, self.shape.norm_eps));
                }
                reference::rope(x, &self.frequencies, position as u32);
            }
            rows.push(row);
        }
        let (mut out, mut exact) = (Vec::new(), Vec::new());
        for (position, row) in rows.iter().enumerate() {
            for head in 0..heads {
                let kv = head / (heads / kv_heads);
                let at = |row: &'_ Vec<f32>, index: usize| -> Vec<f32> { row[index * dim..][..dim].to_vec() };
                let keys: Vec<Vec<f32>> = rows[..=position].iter().map(|r| at(r, heads + kv)).collect();
                let values: Vec<Vec<f32>> =
                    rows[..=position].iter().map(|r| at(r, heads + kv_heads + kv)).collect();
                let keys: Vec<&[f32]> = keys.iter().map(Vec::as_slice).collect();
                let values: Vec<&[f32]> = values.iter().map(Vec::as_slice).collect();
                out.extend(reference::attention(&row[head * dim..][..dim], &keys, &values, self.scores));
                exact.extend(reference::attention_f64(
                    &row[head * dim..][..dim],
                    &keys,
                    &values,
                    self.scores,
                ));
            }
        }
        (out, exact)
    }

    /// A pool for these requests, all of it poisoned, and each request's pages in shuffled order.
    fn pool(
        &self,
        random: &mut Random,
        backend: &CpuBackend,
        requests: &[Request],
    ) -> (CpuKvCache, Vec<Vec<u32>>) {
        let needed: Vec<usize> = requests.iter().map(|r| r.tokens.div_ceil(self.page_size)).collect();
        let num_pages = needed.iter().sum::<usize>() + 3;
        let layout = KvLayout {
            local_layers: LAYERS,
            local_kv_heads: self.shape.local_kv_heads,
            head_dim: self.shape.head_dim,
            page_size: self.page_size,
            num_pages,
            dtype: DType::F32,
        };
        let mut cache = backend.kv_cache(layout).unwrap();
        let (k, v) = cache.parts_mut();
        k.fill(f32::NAN);
        v.fill(f32::NAN);
        let mut free: Vec<u32> = (0..num_pages as u32).collect();
        let mut take = |_| free.swap_remove(random.below(free.len()));
        let tables = needed.iter().map(|&n| (0..n).map(&mut take).collect()).collect();
        (cache, tables)
    }

    /// Runs all requests to their end, each step taking up to `chunk` tokens of each request, and
    /// returns each request's output.
    fn run(
        &self,
        random: &mut Random,
        backend: &mut CpuBackend,
        requests: &[Request],
        chunk: usize,
    ) -> Vec<Vec<f32>> {
        let (mut cache, tables) = self.pool(random, backend, requests);
        let longest = requests.iter().map(|r| r.tokens).max().unwrap();
        let rope = backend.rope_table(&self.frequencies, longest).unwrap();
        let norms =
            self.norms.as_ref().map(|(q, k)| (backend.vector(q).unwrap(), backend.vector(k).unwrap()));
        let mut outputs = vec![Vec::new(); requests.len()];
        let (width, out_width) = (self.width(), self.shape.local_heads * self.shape.head_dim);
        for start in (0..longest).step_by(chunk) {
            let (mut rows, mut pages, mut positions, mut slots, mut data) =
                (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
            let active: Vec<usize> = (0..requests.len()).filter(|&i| requests[i].tokens > start).collect();
            for &i in &active {
                let end = requests[i].tokens.min(start + chunk);
                rows.push(AttentionRow {
                    first_token: positions.len() as u32,
                    token_count: (end - start) as u32,
                    start_position: start as u32,
                    first_page: pages.len() as u32,
                });
                pages.extend(&tables[i]);
                data.extend(&requests[i].qkv[start * width..end * width]);
                for position in start..end {
                    positions.push(position as u32);
                    let page = tables[i][position / self.page_size] as usize;
                    slots.push((page * self.page_size + position % self.page_size) as u32);
                }
            }
            let mut qkv = tensor(backend, &data, width);
            let mut out = empty(backend, positions.len(), out_width);
            let qk_norm = norms.as_ref().map(|(q, k)| (q, k));
            let store = RopeAndStore {
                layer: LAYER,
                shape: self.shape,
                qk_norm,
                rope: &rope,
                positions: &positions,
                slots: &slots,
            };
            backend.rope_and_store(store, &mut qkv, &mut cache);
            let batch = AttentionBatch { rows: &rows, pages: &pages };
            let Scores { scale, softcap, window } = self.scores;
            let args = Attention { layer: LAYER, shape: self.shape, batch, scale, softcap, window };
            backend.attention(args, &qkv, &cache, &mut out);
            for (row, &i) in rows.iter().zip(&active) {
                let (first, count) = (row.first_token as usize, row.token_count as usize);
                outputs[i].extend(&out.rows(first + count)[first * out_width..]);
            }
        }
        outputs
    }
}

#[test]
fn random_batches_are_bit_equal_to_the_reference() {
    let seed = 101;
    let mut random = Random(seed);
    for mut backend in backends() {
        for index in 0..6 {
            let head_dim = random.pick(&[8, 20, 32, 64, 80, 96, 128]);
            let (kv_heads, group) = (1 + random.below(3), 1 + random.below(8));
            let page_size = random.pick(&[1, 2, 3, 16, 64]);
            let case = Case::new(&mut random, head_dim, kv_heads, group, page_size);
            let requests: Vec<Request> = (0..1 + random.below(3))
                .map(|_| {
                    let n = 1 + random.below(150);
                    case.request(&mut random, n)
                })
                .collect();
            let chunk = random.pick(&[1, 7, 64, 200]);
            let what = format!(
                "seed {seed} case {index} {} dim {head_dim} kv {kv_heads} group {group} page {} chunk {chunk}",
                backend.describe(),
                case.page_size
            );
            for (got, request) in case.run(&mut random, &mut backend, &requests, chunk).iter().zip(&requests)
            {
                let (want, exact) = case.reference(request);
                assert_same(got, &want, &what);
                for (got, exact) in got.iter().zip(exact) {
                    assert!((f64::from(*got) - exact).abs() < 2e-5, "{what}: got {got}, want {exact}");
                }
            }
        }
    }
}

#[test]
fn page_size_chunk_batch_and_threads_do_not_change_a_bit() {
    for head_dim in [32, 64, 80, 96, 128] {
        let mut random = Random(head_dim as u64);
        let mut case = Case::new(&mut random, head_dim, 2, 3, 16);
        let requests: Vec<Request> = [131, 64, 1, 65].map(|n| case.request(&mut random, n)).into();
        let mut alone = Vec::new();
        let mut single = backend(Isa::detect(), 1);
        for request in requests.chunks(1) {
            alone.extend(case.run(&mut random, &mut single, request, 1000));
        }
        for page_size in [1, 2, 3, 16, 64] {
            for (chunk, threads) in [(1, 2), (7, 1), (64, 3), (1000, 2)] {
                case.page_size = page_size;
                let mut team = backend(Isa::detect(), threads);
                let batched = case.run(&mut random, &mut team, &requests, chunk);
                for (got, want) in batched.iter().zip(&alone) {
                    let what =
                        format!("head_dim {head_dim} page {page_size} chunk {chunk} threads {threads}");
                    assert_same(got, want, &what);
                }
            }
        }
    }
}

#[test]
fn splits_of_long_contexts_do_not_change_a_bit() {
    let mut random = Random(113);
    let cases = [
        (1, 1, None, [1100, 520]),
        (1, 3, Some(700), [1100, 520]),
        (2, 2, Some(40), [600, 520]),
        (1, 70, None, [530, 1]),
    ];
    for (kv_heads, group, window, tokens) in cases {
        let mut case = Case::new(&mut random, 16, kv_heads, group, 16);
        case.scores.window = window;
        let requests: Vec<Request> = tokens.map(|n| case.request(&mut random, n)).into();
        let want: Vec<Vec<f32>> = requests.iter().map(|r| case.reference(r).0).collect();
        // One thread never cuts by splits, three cut the few tasks of a step, many tasks stay whole.
        for (threads, chunk) in [(1, 300), (3, 300), (3, 13), (2, 2000)] {
            let mut team = backend(Isa::detect(), threads);
            for (got, want) in case.run(&mut random, &mut team, &requests, chunk).iter().zip(&want) {
                let what = format!("kv {kv_heads} group {group} {window:?} threads {threads} chunk {chunk}");
                assert_same(got, want, &what);
            }
        }
    }
}

#[test]
fn pages_before_the_window_may_be_gone() {
    let mut random = Random(127);
    let (page_size, window, tokens) = (4, 30, 700);
    for threads in [1, 3] {
        let mut backend = backend(Isa::detect(), threads);
        let mut case = Case::new(&mut random, 32, 2, 2, page_size);
        case.scores.window = Some(window);
        case.norms = None;
        let request = case.request(&mut random, tokens);
        let (want, _) = case.reference(&request);
        let pages = tokens.div_ceil(page_size);
        let layout = KvLayout {
            local_layers: LAYERS,
            local_kv_heads: 2,
            head_dim: 32,
            page_size,
            num_pages: pages,
            dtype: DType::F32,
        };
        let mut cache = backend.kv_cache(layout).unwrap();
        let rope = backend.rope_table(&case.frequencies, tokens).unwrap();
        let mut table: Vec<u32> = (0..pages as u32).collect();
        for (position, row) in request.qkv.chunks(case.width()).enumerate() {
            let mut qkv = tensor(&backend, row, case.width());
            let mut out = empty(&backend, 1, 4 * 32);
            let (positions, slots) = ([position as u32], [position as u32]);
            let (layer, shape) = (LAYER, case.shape);
            let (positions, slots) = (&positions[..], &slots[..]);
            let store = RopeAndStore { layer, shape, qk_norm: None, rope: &rope, positions, slots };
            backend.rope_and_store(store, &mut qkv, &mut cache);
            // Pages that no later token sees: given back, filled by others, no longer in the table.
            let gone = (position + 1).saturating_sub(window) / page_size;
            backend.poison(&mut cache, &(0..gone as u32).collect::<Vec<_>>());
            table[..gone].fill(u32::MAX);
            let row = AttentionRow {
                first_token: 0,
                token_count: 1,
                start_position: position as u32,
                first_page: 0,
            };
            let batch = AttentionBatch { rows: &[row], pages: &table };
            let Scores { scale, softcap, window } = case.scores;
            backend.attention(
                Attention { layer, shape, batch, scale, softcap, window },
                &qkv,
                &cache,
                &mut out,
            );
            assert_same(out.rows(1), &want[position * 4 * 32..][..4 * 32], &format!("position {position}"));
        }
    }
}

#[test]
fn poison_fills_these_pages_of_every_layer_and_no_other() {
    let mut backend = backend(Isa::detect(), 1);
    let layout = KvLayout {
        local_layers: 2,
        local_kv_heads: 2,
        head_dim: 8,
        page_size: 4,
        num_pages: 5,
        dtype: DType::F32,
    };
    let mut cache = backend.kv_cache(layout).unwrap();
    backend.poison(&mut cache, &[1, 4]);
    let (k, v) = cache.parts_mut();
    for part in [k, v] {
        for (index, page) in part.chunks(2 * 4 * 8).enumerate() {
            let poisoned = page.iter().filter(|x| x.is_nan()).count();
            let want = if [1, 4].contains(&(index % 5)) { page.len() } else { 0 };
            assert_eq!(poisoned, want, "layer {} page {}", index / 5, index % 5);
        }
    }
}

#[test]
fn layers_of_a_pool_on_huge_pages_begin_at_one_and_do_not_overlap() {
    let mut random = Random(10);
    let mut backend = backend(Isa::detect(), 2);
    let case = Case::new(&mut random, 32, 2, 2, 16);
    let layout = KvLayout {
        local_layers: 2,
        local_kv_heads: 2,
        head_dim: 32,
        page_size: 16,
        num_pages: 2049,
        dtype: DType::F32,
    };
    let page_len = 2 * 16 * 32;
    let layer_len = layout.num_pages * page_len;
    assert_eq!(layer_len * 4, 4 * HUGE_PAGE + page_len * 4, "a page more than huge pages hold");
    let stride = 5 * HUGE_PAGE / 4;
    let mut cache = backend.kv_cache(layout).unwrap();
    let layers = [0, 1].map(|layer| cache.page(layer, 0, 0));
    for [first, second] in [layers.map(|at| at.0 as usize), layers.map(|at| at.1 as usize)] {
        assert!(first.is_multiple_of(HUGE_PAGE), "K or V begins at a huge page");
        assert_eq!(second - first, stride * 4, "the next layer begins at the next huge page");
    }
    let rope = backend.rope_table(&case.frequencies, 8).unwrap();
    let last_page = layout.num_pages as u32 - 1;
    for (layer, slot) in [(0, last_page * 16 + 15), (1, 0)] {
        let mut qkv = tensor(&backend, &random.values(case.width()), case.width());
        let (shape, positions, slots) = (case.shape, &[6u32][..], &[slot][..]);
        let store = RopeAndStore { layer, shape, qk_norm: None, rope: &rope, positions, slots };
        backend.rope_and_store(store, &mut qkv, &mut cache);
    }
    // The last slot of layer 0 and the first of layer 1, each of two heads.
    let last = layer_len - page_len + 15 * 32;
    let starts = [last, last + 16 * 32, stride, stride + 16 * 32];
    let stored: Vec<usize> = starts.into_iter().flat_map(|start| start..start + 32).collect();
    let (k, v) = cache.parts_mut();
    for part in [k, v] {
        let written: Vec<usize> = (0..part.len()).filter(|&i| part[i] != 0.0).collect();
        assert_eq!(written, stored);
    }
    backend.poison(&mut cache, &[0, last_page]);
    let pages = [0, layer_len - page_len, stride, stride + layer_len - page_len];
    let poisoned: Vec<usize> = pages.into_iter().flat_map(|start| start..start + page_len).collect();
    let (k, v) = cache.parts_mut();
    for part in [k, v] {
        let not_zero: Vec<usize> = (0..part.len()).filter(|&i| part[i] != 0.0).collect();
        assert_eq!(not_zero, poisoned);
        assert!(poisoned.iter().all(|&i| part[i].is_nan()));
    }
}

#[test]
fn only_the_slots_of_the_step_are_written() {
    let mut random = Random(9);
    let mut backend = backend(Isa::detect(), 2);
    let case = Case::new(&mut random, 32, 2, 2, 4);
    let layout = KvLayout {
        local_layers: 2,
        local_kv_heads: 2,
        head_dim: 32,
        page_size: 4,
        num_pages: 5,
        dtype: DType::F32,
    };
    let mut cache = backend.kv_cache(layout).unwrap();
    assert_eq!(layout.pool_bytes(), (cache.parts_mut().0.len() + cache.parts_mut().1.len()) * 4);
    let rope = backend.rope_table(&case.frequencies, 8).unwrap();
    let mut qkv = tensor(&backend, &random.values(case.width()), case.width());
    let (positions, slots) = ([6u32], [3 * 4 + 2u32]);
    let args = RopeAndStore {
        layer: 1,
        shape: case.shape,
        qk_norm: None,
        rope: &rope,
        positions: &positions,
        slots: &slots,
    };
    backend.rope_and_store(args, &mut qkv, &mut cache);
    let (k, v) = cache.parts_mut();
    for part in [k, v] {
        for (index, head) in part.chunks(32).enumerate() {
            let (layer, page, slot) = (index / (5 * 2 * 4), index / 8 % 5, index % 4);
            let written = (layer, page, slot) == (1, 3, 2);
            assert_eq!(head.iter().any(|&x| x != 0.0), written, "layer {layer} page {page} slot {slot}");
        }
    }
}
