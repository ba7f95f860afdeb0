//! Made-up prompts of a wanted length: token ids where the server takes them, else words.
//!
//! How many words make so many tokens is asked of the server itself, with two prompts of different
//! lengths; their difference is the price of a word, the rest that of the chat template.

use crate::bench::random::Random;
use crate::client::chunk::Usage;
use crate::client::{ClientError, Target};
use crate::flags::bench_serve::{BenchEndpoint, BenchServeFlags, PromptForm};
use anyhow::{Result, bail};
use serde_json::{Value, json};
use std::time::Duration;

/// Largest ids that are tried, the first that the server takes is used: vocabularies from large to tiny.
const IDS_HIGH: [u32; 5] = [30_000, 8_000, 2_000, 500, 100];
/// Ids below are often special.
const IDS_LOW: u32 = 300;
/// Words of the two prompts that words are priced with.
const PROBE_WORDS: [usize; 2] = [16, 80];
/// How long a probe may take; a server may be warming up.
const PROBE_LIMIT: Duration = Duration::from_secs(120);
/// Common words; most vocabularies have each as one token.
const WORDS: [&str; 48] = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
];

/// How prompts are written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    /// Ids from a range.
    Ids {
        /// Smallest.
        low: u32,
        /// Largest.
        high: u32,
    },
    /// Words.
    Words {
        /// What a word costs.
        tokens_per_word: f64,
        /// What every prompt costs.
        tokens_around: f64,
    },
}

/// A part of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Token ids.
    Ids(Vec<u32>),
    /// Text.
    Text(String),
}

impl Prompt {
    /// Both, one after the other.
    pub fn then(self, other: Self) -> Self {
        match (self, other) {
            (Self::Ids(mut ids), Self::Ids(more)) => {
                ids.extend(more);
                Self::Ids(ids)
            }
            (Self::Text(text), Self::Text(more)) => Self::Text(text + &more),
            _ => unreachable!("invariant: one form makes all prompts"),
        }
    }
}

impl Form {
    /// Asks the server what it takes. The requests also warm it up.
    pub async fn probe(flags: &BenchServeFlags, target: &Target) -> Result<Self> {
        let takes_ids =
            flags.endpoint == BenchEndpoint::Completions && flags.prompt_form != PromptForm::Words;
        if takes_ids && let Some(form) = Self::probe_ids(target).await? {
            return Ok(form);
        }
        if flags.prompt_form == PromptForm::Ids {
            bail!("{} takes no token ids as prompt; use --prompt-form words", target.client.base());
        }
        let mut counts = [0.0; 2];
        for (count, words) in counts.iter_mut().zip(PROBE_WORDS) {
            let mut random = Random::new(flags.seed, u64::MAX);
            let text = text_of(words, &mut random);
            let prompt = match flags.endpoint {
                BenchEndpoint::Completions => json!({"prompt": text}),
                BenchEndpoint::Chat => json!({"messages": [{"role": "user", "content": text}]}),
            };
            match count_tokens(target, flags.endpoint, prompt).await? {
                Ok(tokens) => *count = tokens as f64,
                Err(refusal) => bail!("{}: {refusal}", target.client.base()),
            }
        }
        let tokens_per_word = (counts[1] - counts[0]) / (PROBE_WORDS[1] - PROBE_WORDS[0]) as f64;
        if tokens_per_word <= 0.0 {
            bail!(
                "{} gives no token counts (usage); prompts of a length cannot be made",
                target.client.base()
            );
        }
        Ok(Self::Words {
            tokens_per_word,
            tokens_around: (counts[0] - PROBE_WORDS[0] as f64 * tokens_per_word).max(0.0),
        })
    }

    async fn probe_ids(target: &Target) -> Result<Option<Self>> {
        for high in IDS_HIGH {
            let ids = vec![high; PROBE_WORDS[0]];
            let counted = count_tokens(target, BenchEndpoint::Completions, json!({"prompt": ids})).await?;
            // A server that reads the list as text counts otherwise; one token may open the prompt.
            if counted.is_ok_and(|tokens| (ids.len() as u64..=ids.len() as u64 + 1).contains(&tokens)) {
                return Ok(Some(Self::Ids { low: IDS_LOW.min(high / 2), high }));
            }
        }
        Ok(None)
    }

    /// Random content worth `tokens`; `whole` counts what the server adds to every prompt.
    pub fn prompt(self, tokens: usize, whole: bool, random: &mut Random) -> Prompt {
        match self {
            Self::Ids { low, high } => {
                let id = |_| random.between(low.into(), high.into()) as u32;
                Prompt::Ids((0..tokens).map(id).collect())
            }
            Self::Words { tokens_per_word, tokens_around } => {
                let around = if whole { tokens_around } else { 0.0 };
                let words = ((tokens as f64 - around) / tokens_per_word).round().max(1.0);
                Prompt::Text(text_of(words as usize, random))
            }
        }
    }
}

fn text_of(words: usize, random: &mut Random) -> String {
    (0..words).map(|_| format!(" {}", random.pick(&WORDS))).collect()
}

/// Tokens of a prompt, as the server counts them, or its refusal. Errors when it cannot be reached.
async fn count_tokens(
    target: &Target,
    endpoint: BenchEndpoint,
    prompt: Value,
) -> Result<std::result::Result<u64, ClientError>> {
    let mut body = prompt;
    body["model"] = target.model.clone().into();
    body["max_tokens"] = 1.into();
    let post = target.client.post(endpoint.path(), body.to_string().into());
    let answer = match tokio::time::timeout(PROBE_LIMIT, post).await {
        Ok(answer) => answer?,
        Err(_) => {
            bail!(ClientError::Timeout { base: target.client.base(), seconds: PROBE_LIMIT.as_secs_f64() })
        }
    };
    if !answer.is_success() {
        return Ok(Err(answer.refusal()));
    }
    let json: Value = serde_json::from_slice(&answer.body)?;
    let usage: Usage = serde_json::from_value(json["usage"].clone()).unwrap_or_default();
    Ok(Ok(usage.prompt_tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_have_their_length_in_either_form() {
        let ids = Form::Ids { low: 10, high: 12 };
        let Prompt::Ids(drawn) = ids.prompt(50, true, &mut Random::new(1, 1)) else { panic!("not ids") };
        assert!(drawn.len() == 50 && drawn.iter().all(|id| (10..=12).contains(id)), "{drawn:?}");

        let words = Form::Words { tokens_per_word: 2.0, tokens_around: 10.0 };
        let count = |tokens, whole| match words.prompt(tokens, whole, &mut Random::new(1, 1)) {
            Prompt::Text(text) => text.split(' ').count() - 1,
            Prompt::Ids(_) => panic!("not words"),
        };
        assert_eq!((count(110, true), count(110, false), count(1, true)), (50, 55, 1));
    }
}
