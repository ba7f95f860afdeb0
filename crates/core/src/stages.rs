//! Which layers each pipeline stage of a replica has.
//!
//! **Invariant:** the stages' layers are consecutive, none is left out, and each stage has one at least. The first stage
//! embeds, the last one norms and computes logits. Used by the launcher, by every rank and by `plan`.

use crate::config::{ConfigError, ModelConfig};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The consecutive layers of one stage. One stage of one has all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageLayers {
    /// Global index of its first layer.
    pub first: usize,
    /// Global index of the layer after its last one.
    pub end: usize,
    /// Layers of the model.
    pub of: usize,
}

impl StageLayers {
    /// All layers of a model of `num_layers`.
    pub const fn whole(num_layers: usize) -> Self {
        Self { first: 0, end: num_layers, of: num_layers }
    }

    /// Global indices of its layers.
    pub const fn range(&self) -> Range<usize> {
        self.first..self.end
    }

    /// How many they are.
    pub const fn count(&self) -> usize {
        self.end - self.first
    }

    /// Whether it turns tokens into the residual stream.
    pub const fn embeds(&self) -> bool {
        self.first == 0
    }

    /// Whether it turns the residual stream into logits.
    pub const fn has_logits(&self) -> bool {
        self.end == self.of
    }

    /// The layers of all `pp_size` stages of `config`, in order: `counts` of them (`--pp-layers`), or so many that the
    /// stage which computes longest is as short as it can be ([`layer_costs`]).
    ///
    /// Errors, in a sentence for whoever gave the flags, when there are fewer layers than stages or `counts` are not
    /// the model's.
    pub fn of_stages(
        config: &ModelConfig,
        pp_size: usize,
        counts: Option<&[usize]>,
    ) -> Result<Vec<Self>, ConfigError> {
        let of = config.num_layers;
        if !(1..=of).contains(&pp_size) {
            return Err(ConfigError::IllegalStages(format!(
                "--pp {pp_size} stages cannot have a layer each, since the model has {of} layers; use --pp 1 to {of}"
            )));
        }
        let counts = match counts {
            None => balanced(&layer_costs(config), pp_size),
            Some(counts) if counts.len() != pp_size || counts.contains(&0) => {
                return Err(ConfigError::IllegalStages(format!(
                    "--pp-layers {} must have a number above 0 for each of the {pp_size} stages of --pp",
                    listed(counts)
                )));
            }
            Some(counts) if counts.iter().try_fold(0usize, |sum, n| sum.checked_add(*n)) != Some(of) => {
                return Err(ConfigError::IllegalStages(format!(
                    "--pp-layers {} must add up to the model's {of} layers",
                    listed(counts)
                )));
            }
            Some(counts) => counts.to_vec(),
        };
        let mut first = 0;
        let stage = |count: usize| {
            let stage = Self { first, end: first + count, of };
            first = stage.end;
            stage
        };
        Ok(counts.into_iter().map(stage).collect())
    }
}

fn listed(counts: &[usize]) -> String {
    let counts: Vec<String> = counts.iter().map(usize::to_string).collect();
    counts.join(",")
}

/// Multiplications of one token in each layer, those of the embedding (a row that is copied) in the first and those of
/// the head in the last one: what a decode step computes and, about, reads.
pub fn layer_costs(config: &ModelConfig) -> Vec<u64> {
    let ModelConfig { hidden_size, head_dim, num_heads, num_kv_heads, vocab_size, .. } = *config;
    let attention = hidden_size * head_dim * 2 * (num_heads + num_kv_heads);
    let mut costs: Vec<u64> = (0..config.num_layers)
        .map(|layer| {
            let inner = match config.moe_of(layer) {
                None => config.intermediate_size,
                Some(moe) => moe.experts_per_token * moe.expert_intermediate_size,
            };
            (attention + 3 * hidden_size * inner) as u64
        })
        .collect();
    if let Some(first) = costs.first_mut() {
        *first += hidden_size as u64;
    }
    if let Some(last) = costs.last_mut() {
        *last += (vocab_size * hidden_size) as u64;
    }
    costs
}

/// How many of the layers with these costs each of `stages` takes, so that the largest sum is as small as possible;
/// among such cuts one with even sums. `stages` is at most `costs.len()`.
fn balanced(costs: &[u64], stages: usize) -> Vec<usize> {
    let layers = costs.len();
    let sums: Vec<u128> = std::iter::once(0)
        .chain(costs.iter().scan(0u128, |sum, cost| {
            *sum += u128::from(*cost);
            Some(*sum)
        }))
        .collect();
    // best[s][end]: (largest sum, sum of squares, start of the last stage) of the first `end` layers in `s + 1` stages.
    let mut best: Vec<Vec<(u128, u128, usize)>> = vec![sums.iter().map(|sum| (*sum, sum * sum, 0)).collect()];
    for stage in 1..stages {
        let before = &best[stage - 1];
        let cut = |end: usize| {
            let from = |start: usize| {
                let (last, (largest, squares, _)) = (sums[end] - sums[start], before[start]);
                (largest.max(last), squares + last * last, start)
            };
            (stage..end).map(from).min().unwrap_or((u128::MAX, u128::MAX, 0))
        };
        let row = (0..=layers).map(cut).collect();
        best.push(row);
    }
    let (mut counts, mut end) = (vec![0; stages], layers);
    for stage in (0..stages).rev() {
        let start = if stage == 0 { 0 } else { best[stage][end].2 };
        counts[stage] = end - start;
        end = start;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::hf;

    fn config(layers: usize, vocab: usize) -> ModelConfig {
        let text = format!(
            r#"{{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 8,
            "num_key_value_heads": 4, "intermediate_size": 128, "num_hidden_layers": {layers},
            "vocab_size": {vocab}, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64}}"#
        );
        hf::parse(text.as_bytes()).unwrap()
    }

    fn counts(layers: usize, vocab: usize, stages: usize) -> Vec<usize> {
        let stages = StageLayers::of_stages(&config(layers, vocab), stages, None).unwrap();
        assert!(stages.first().unwrap().embeds() && stages.last().unwrap().has_logits());
        assert!(stages.windows(2).all(|pair| pair[0].end == pair[1].first));
        stages.iter().map(StageLayers::count).collect()
    }

    #[test]
    fn stages_are_balanced_with_the_head() {
        assert_eq!(counts(12, 1, 1), [12]);
        assert_eq!(counts(12, 1, 3), [4, 4, 4]);
        assert_eq!(counts(10, 1, 4).iter().max(), Some(&3));
        assert_eq!(counts(4, 1, 4), [1, 1, 1, 1]);
        // A layer multiplies 64 * 8 * 24 + 3 * 64 * 128 = 36,864 weights: a head of 2,304 rows counts as four.
        assert_eq!(counts(12, 2304, 2), [8, 4]);
        assert_eq!(counts(4, 1 << 20, 2), [3, 1], "each stage has a layer");
    }

    #[test]
    fn illegal_stages_are_refused_in_a_sentence() {
        let model = config(4, 1);
        let refused = |pp, counts: Option<&[usize]>| {
            StageLayers::of_stages(&model, pp, counts).unwrap_err().to_string()
        };
        assert!(refused(5, None).contains("the model has 4 layers; use --pp 1 to 4"));
        assert!(refused(0, None).contains("use --pp 1 to 4"));
        assert!(
            refused(2, Some(&[4])).contains("--pp-layers 4 must have a number above 0 for each of the 2")
        );
        assert!(refused(2, Some(&[4, 0])).contains("above 0"));
        assert!(refused(2, Some(&[2, 1])).contains("--pp-layers 2,1 must add up to the model's 4 layers"));
        let chosen = StageLayers::of_stages(&model, 2, Some(&[3, 1])).unwrap();
        assert_eq!(chosen.iter().map(StageLayers::range).collect::<Vec<_>>(), [0..3, 3..4]);
    }
}
