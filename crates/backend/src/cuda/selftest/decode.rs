//! Attention of steps as decode makes them: many requests of uneven length, a token or a few of each.

use super::cases::Case;
use super::{Probe, Random};
use crate::{Attention, AttentionBatch, AttentionRow, KvLayout, QkvShape, RopeAndStore};
use lockstep_core::config::RopeFrequencies;

/// Positions of all requests together.
const POSITIONS_MAX: usize = 6000;

/// Requests of one step.
struct DecodeCase {
    shape: QkvShape,
    page_size: usize,
    /// Positions of each request, and how many of the last ones the step computes.
    requests: Vec<(usize, usize)>,
    softcap: Option<f32>,
    window: Option<usize>,
}

impl DecodeCase {
    fn new(random: &mut Random) -> Self {
        let head_dim = random.pick(&[64, 128, 128, 80, 256]);
        let (kv_heads, group) = (1 + random.below(2), random.pick(&[1, 2, 4, 5, 8, 16, 17]));
        let shape =
            QkvShape { local_heads: kv_heads * group, local_kv_heads: kv_heads, head_dim, norm_eps: 1e-6 };
        let count = random.pick(&[1, 2, 3, 9, 40, 300]);
        let requests = (0..count)
            .map(|_| {
                let positions = 1 + random.below(POSITIONS_MAX / count);
                (positions, random.pick(&[1, 1, 1, 3, 7]).min(positions))
            })
            .collect();
        Self {
            shape,
            page_size: random.pick(&[1, 16, 16, 64]),
            requests,
            softcap: random.pick(&[None, None, Some(5.0), Some(50.0)]),
            window: random.pick(&[None, None, Some(1), Some(100), Some(1000)]),
        }
    }

    fn describe(&self) -> String {
        let positions = self.requests.iter().map(|(positions, _)| positions).sum::<usize>();
        format!(
            "{}/{} heads of {}, page {}, {} requests of {positions} positions, window {:?}, cap {:?}",
            self.shape.local_heads,
            self.shape.local_kv_heads,
            self.shape.head_dim,
            self.page_size,
            self.requests.len(),
            self.window,
            self.softcap
        )
    }
}

/// Stores K and V of all positions, then computes the last tokens of each request in one step.
pub(super) fn decode<P: Probe>(backend: &mut P, mut random: Random) -> Case {
    let case = DecodeCase::new(&mut random);
    let (shape, page_size) = (case.shape, case.page_size);
    let pages_of = |positions: usize| positions.div_ceil(page_size);
    let num_pages = case.requests.iter().map(|(positions, _)| pages_of(*positions)).sum::<usize>() + 3;
    let layout = KvLayout {
        local_layers: 1,
        local_kv_heads: shape.local_kv_heads,
        head_dim: shape.head_dim,
        page_size,
        num_pages,
        dtype: backend.kv_dtype(),
    };
    let mut cache = backend.kv_cache(layout)?;
    let mut free: Vec<u32> = (0..num_pages as u32).collect();
    backend.poison(&mut cache, &free);
    let (mut rows, mut pages, mut positions, mut slots) = (vec![], vec![], vec![], vec![]);
    let mut tokens = 0;
    for &(end, computed) in &case.requests {
        let table: Vec<u32> =
            (0..pages_of(end)).map(|_| free.swap_remove(random.below(free.len()))).collect();
        rows.push(AttentionRow {
            first_token: tokens,
            token_count: computed as u32,
            start_position: (end - computed) as u32,
            first_page: pages.len() as u32,
        });
        tokens += computed as u32;
        for position in 0..end {
            positions.push(position as u32);
            slots.push(table[position / page_size] * page_size as u32 + (position % page_size) as u32);
        }
        pages.extend(table);
    }
    // Queries do not matter to what is stored: one head of them.
    let stored = QkvShape { local_heads: 1, ..shape };
    let width = |shape: &QkvShape| (shape.local_heads + 2 * shape.local_kv_heads) * shape.head_dim;
    let mut qkv = backend.filled(&random.values(positions.len() * width(&stored)), width(&stored))?;
    let frequencies = RopeFrequencies { inverse: vec![1.0, 0.1, 0.01, 0.001], attention_factor: 1.0 };
    let rope = backend.rope_table(&frequencies, POSITIONS_MAX)?;
    let store = RopeAndStore {
        layer: 0,
        shape: stored,
        qk_norm: None,
        rope: &rope,
        positions: &positions,
        slots: &slots,
    };
    backend.rope_and_store(store, &mut qkv, &mut cache);
    let values: Vec<f32> = random.values(tokens as usize * width(&shape)).iter().map(|v| v * 4.0).collect();
    let qkv = backend.filled(&values, width(&shape))?;
    let mut out = backend.empty(tokens as usize, shape.local_heads * shape.head_dim)?;
    let args = Attention {
        layer: 0,
        shape,
        batch: AttentionBatch { rows: &rows, pages: &pages },
        scale: 1.0 / (shape.head_dim as f32).sqrt(),
        softcap: case.softcap,
        window: case.window,
    };
    backend.attention(args, &qkv, &cache, &mut out);
    Ok((backend.read(&out, tokens as usize)?.into_owned(), case.describe()))
}
