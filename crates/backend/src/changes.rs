//! What a request changes in the logits of one position before a token is chosen.
//!
//! [`LogitChanges::apply`] does it on the host and says what it means; a device that chooses tokens itself does the
//! same, in the same f32 operations (`sample_mask` and `sample_change` of `sample.cu`), so that both choose alike.

use bytemuck::{Pod, Zeroable};
use lockstep_core::TokenId;

/// Changes of one row of logits, in the order of the fields. No token stands twice in `bias` or `seen`.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogitChanges<'a> {
    /// Tokens that may be chosen, a bit each, the lowest bit of a word first; tokens beyond its end may not.
    /// `None`: all.
    pub allowed: Option<&'a [u32]>,
    /// What is added to logits.
    pub bias: &'a [(TokenId, f32)],
    /// How tokens that occurred already are made less likely.
    pub penalties: Option<Penalties<'a>>,
    /// Tokens that may not be chosen.
    pub banned: &'a [TokenId],
}

/// Penalties as vLLM and OpenAI define them.
#[derive(Clone, Copy, Debug)]
pub struct Penalties<'a> {
    /// Divides positive logits of tokens of the prompt or the answer and multiplies others.
    pub repetition: f32,
    /// Taken from the logits of the answer's tokens, as often as they occur.
    pub frequency: f32,
    /// Taken from the logits of the answer's tokens once.
    pub presence: f32,
    /// The tokens that occurred.
    pub seen: &'a [SeenToken],
}

/// A token of the prompt or the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SeenToken {
    /// Which.
    pub token: TokenId,
    /// How often it is in the answer.
    pub in_output: u32,
}

impl LogitChanges<'_> {
    /// Changes the logits of the whole vocabulary.
    pub fn apply(&self, logits: &mut [f32]) {
        if let Some(allowed) = self.allowed {
            for (index, part) in logits.chunks_mut(32).enumerate() {
                keep_only(part, allowed.get(index).copied().unwrap_or(0));
            }
        }
        for &(token, bias) in self.bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        if let Some(penalties) = &self.penalties {
            penalties.apply(logits);
        }
        for &token in self.banned {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

impl Penalties<'_> {
    fn apply(&self, logits: &mut [f32]) {
        for seen in self.seen {
            let Some(logit) = logits.get_mut(seen.token as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / self.repetition } else { *logit * self.repetition };
            if seen.in_output > 0 {
                *logit -= self.frequency * seen.in_output as f32;
                *logit -= self.presence;
            }
        }
    }
}

/// Makes impossible those of at most 32 tokens whose bit is not set.
fn keep_only(logits: &mut [f32], bits: u32) {
    // Most words of most masks allow nothing at all.
    match bits {
        0 => logits.fill(f32::NEG_INFINITY),
        u32::MAX => {}
        bits => {
            let excluded = logits.iter_mut().enumerate().filter(|(bit, _)| bits >> bit & 1 == 0);
            excluded.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: f32 = f32::NEG_INFINITY;

    #[test]
    fn penalties_count_prompt_and_answer_as_documented() {
        let seen = [(0, 0), (1, 1), (2, 2), (9, 1)].map(|(token, in_output)| SeenToken { token, in_output });
        let penalties = Penalties { repetition: 2.0, frequency: 0.25, presence: 0.5, seen: &seen };
        let mut logits = [4.0f32, -4.0, 4.0, 4.0];
        LogitChanges { penalties: Some(penalties), ..Default::default() }.apply(&mut logits);
        // Prompt only; prompt and once in the answer; twice in the answer; nowhere.
        assert_eq!(logits, [2.0, -8.0 - 0.25 - 0.5, 2.0 - 0.5 - 0.5, 4.0]);
    }

    #[test]
    fn what_is_not_allowed_stays_so_whatever_is_added() {
        let mut logits = [1.0f32; 40];
        let changes = LogitChanges {
            allowed: Some(&[0b1011]),
            bias: &[(0, 2.0), (2, 100.0), (39, 100.0), (40, 1.0)],
            banned: &[1, 77],
            ..Default::default()
        };
        changes.apply(&mut logits);
        assert_eq!(logits[..5], [3.0, NEVER, NEVER, 1.0, NEVER]);
        assert!(logits[5..].iter().all(|logit| *logit == NEVER));
        let mut none = [1.0f32; 3];
        LogitChanges { allowed: Some(&[]), ..Default::default() }.apply(&mut none);
        assert_eq!(none, [NEVER; 3]);
    }
}
