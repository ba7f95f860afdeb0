//! Tokens chosen from random logits, on the device and by the host's sampler.

use super::cases::Case;
use super::{Probe, Random};
use crate::choice::{Choice, RowChoice};
use crate::sampler::Sampler;
use lockstep_comm::OneRank;

/// Peaked and flat logits, with ties, holes and padding; the tokens of all rows.
pub(super) fn choose<P: Probe>(backend: &mut P, mut random: Random) -> Case {
    let vocab = random.pick(&[1, 3, 1000, 4097, 32_000, 151_936]);
    let padded = vocab + random.pick(&[0, 5, 64]);
    let count = if vocab > 40_000 { 1 + random.below(3) } else { 1 + random.below(24) };
    let (spread, step) = (random.pick(&[0.05, 2.0, 6.0, 20.0]), random.pick(&[0.0, 0.0, 0.5]));
    let has_holes = random.below(4) == 0;
    let mut logit = |column: usize| {
        // The sum of four is a bell; its tails are the likely tokens.
        let value = spread * (0..4).map(|_| random.value()).sum::<f32>();
        let value = if step > 0.0 { (value / step).round() * step } else { value };
        match has_holes && random.below(3) == 0 {
            _ if column >= vocab => 1e9,
            true => [f32::NEG_INFINITY, f32::NAN][random.below(2)],
            false => value,
        }
    };
    let values: Vec<f32> = (0..count * padded).map(|i| logit(i % padded)).collect();
    let rows: Vec<RowChoice> = (0..count)
        .map(|_| RowChoice {
            temperature: random.pick(&[0.0, 0.6, 1.0, 1.7]),
            top_p: random.pick(&[1.0, 1.0, 0.1, 0.9, 0.95, 0.9999]),
            min_p: random.pick(&[0.0, 0.0, 0.05]),
            top_k: random.pick(&[0, 0, 5, 50, 3000]),
            seed: random.next(),
            choice: random.below(3) as u32,
            output_index: random.below(5000) as u32,
        })
        .collect();
    let mut tokens = Vec::new();
    if rows.iter().all(|row| backend.can_choose(row)) {
        let mut logits = backend.empty_f32(count, padded)?;
        backend.put(&mut logits, &values)?;
        let choice = Choice { rows: &rows, local_vocab: padded, local_real: vocab, vocab_size: vocab };
        backend.choose(&OneRank, &logits, &choice)?;
        backend.take_chosen(&mut tokens)?;
    } else {
        let mut sampler = Sampler::default();
        let all = values.chunks(padded).zip(&rows);
        tokens.extend(all.filter_map(|(logits, row)| sampler.sample(&logits[..vocab], row)));
    }
    let words = format!("{count} rows of {vocab}, spread {spread}, step {step}, holes {has_holes}");
    Ok((tokens.into_iter().map(|token| token as f32).collect(), words))
}
