//! Tokens chosen from random logits, on the device and by the host's sampler.

use super::cases::Case;
use super::{Probe, Random};
use crate::changes::{LogitChanges, Penalties, SeenToken};
use crate::choice::{Choice, RowChoice};
use crate::sampler::Sampler;
use lockstep_comm::OneRank;
use lockstep_core::{NO_TOKEN, TokenId};

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
    let changed = Changed::random(&mut random, vocab);
    let changes: Vec<_> =
        (0..count).filter(|row| !(row + 2).is_multiple_of(3)).map(|row| (row, changed.of(row))).collect();
    let changes = if random.below(2) == 0 { &changes[..] } else { &[] };
    let mut tokens = Vec::new();
    if rows.iter().all(|row| backend.can_choose(row)) {
        let mut logits = backend.empty_f32(count, padded)?;
        backend.put(&mut logits, &values)?;
        let choice = Choice {
            rows: &rows,
            changes,
            first_id: 0,
            local_vocab: padded,
            local_real: vocab,
            vocab_size: vocab,
        };
        backend.choose(&OneRank, &mut logits, &choice)?;
        backend.take_chosen(&mut tokens)?;
    } else {
        let mut sampler = Sampler::default();
        let mut values = values;
        for (row, change) in changes {
            change.apply(&mut values[row * padded..][..vocab]);
        }
        let all = values.chunks(padded).zip(&rows);
        tokens.extend(all.map(|(logits, row)| sampler.sample(&logits[..vocab], row).unwrap_or(NO_TOKEN)));
    }
    let words = format!(
        "{count} rows of {vocab}, spread {spread}, step {step}, holes {has_holes}, {} changed",
        changes.len()
    );
    Ok((tokens.into_iter().map(|token| token as f32).collect(), words))
}

/// Something of everything that a row may change.
struct Changed {
    words: Vec<u32>,
    bias: Vec<(TokenId, f32)>,
    seen: Vec<SeenToken>,
    banned: Vec<TokenId>,
}

impl Changed {
    fn random(random: &mut Random, vocab: usize) -> Self {
        let density = random.pick(&[0, 1, 2]);
        let word = |random: &mut Random| match density {
            0 => 0,
            1 => (random.next() & random.next() & random.next()) as u32,
            _ => u32::MAX,
        };
        // A mask may be longer and shorter than the vocabulary.
        let len = vocab.div_ceil(32) + random.below(3) - random.below(2);
        let words = (0..len).map(|_| word(random)).collect();
        let stride = 1 + random.below(7);
        let ids = || (0..vocab.min(4000)).step_by(stride).map(|id| (vocab - 1 - id) as TokenId);
        Self {
            words,
            bias: ids().take(300).map(|id| (id, 4.0 * random.value())).collect(),
            seen: ids().map(|token| SeenToken { token, in_output: random.below(3) as u32 }).collect(),
            banned: ids().filter(|id| id % 5 == 0).chain([vocab as TokenId + 3]).collect(),
        }
    }

    /// What row `row` changes of it.
    fn of(&self, row: usize) -> LogitChanges<'_> {
        let penalties = Penalties { repetition: 1.1, frequency: 0.3, presence: -0.7, seen: &self.seen };
        LogitChanges {
            allowed: row.is_multiple_of(2).then_some(&self.words),
            bias: if row % 4 < 3 { &self.bias } else { &[] },
            penalties: (row % 5 != 2).then_some(penalties),
            banned: if row % 7 < 4 { &self.banned } else { &[] },
        }
    }
}
