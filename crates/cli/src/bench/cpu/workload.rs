//! The columns: what is asked, what of it is timed, and the steps that it needs at least.
//!
//! Counts are those of `tests/bench/http_load.py`, so that figures with and without HTTP can be compared.

use super::{Engine, OfflineSet, Random};
use lockstep_engine::offline::OfflineReport;
use lockstep_planner::work::Row;

/// Tokens of the long prompt.
const PREFILL: usize = 512;
/// Prompt of the request that decodes alone, and the steps that are timed.
const DECODE: (usize, usize) = (16, 128);
/// Prompt and answer of requests at once.
const AT_ONCE: (usize, usize) = (64, 64);
/// A burst: requests, common prefix, own tokens, answer.
const BURST: (usize, usize, usize, usize) = (REQUESTS_MAX, 1000, 20, 32);
/// Tokens of the short prompt.
const SHORT: usize = 32;
/// Most requests at once.
pub(super) const REQUESTS_MAX: usize = 32;
/// Positions of the longest request.
pub(super) const LONGEST: usize = BURST.1 + BURST.2 + BURST.3;

/// A column but start and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Workload {
    /// A prompt of 512 tokens.
    Prefill,
    /// One request alone.
    Decode,
    /// So many requests of 64 tokens and 64 of answer.
    AtOnce(usize),
    /// 32 requests of one 1,000-token prefix; `warm`: it is in the cache.
    Burst { warm: bool },
    /// The first token after 32.
    FirstToken,
}

/// In which unit a time is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// So many tokens were computed in it.
    TokensPerS(usize),
    /// As it is.
    S,
    /// In milliseconds.
    Ms,
}

impl Workload {
    /// In the order of the table.
    pub const ALL: [Self; 7] = [
        Self::Prefill,
        Self::Decode,
        Self::AtOnce(8),
        Self::AtOnce(REQUESTS_MAX),
        Self::Burst { warm: false },
        Self::Burst { warm: true },
        Self::FirstToken,
    ];

    /// What it is called, in the table and in JSON.
    pub fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Prefill => ("prefill 512, tok/s", "prefill"),
            Self::Decode => ("decode b=1, tok/s", "decode"),
            Self::AtOnce(REQUESTS_MAX) => ("32 at once, tok/s", "conc32"),
            Self::AtOnce(_) => ("8 at once, tok/s", "conc8"),
            Self::Burst { warm: false } => ("cold prefix burst, s", "prefix"),
            Self::Burst { warm: true } => ("warm, s", "prefix_warm"),
            Self::FirstToken => ("TTFT of 32 tokens, ms", "ttft"),
        }
    }

    /// How its time is shown. Of requests at once the tokens of answers count, prefill's time included.
    pub fn unit(self) -> Unit {
        match self {
            Self::Prefill => Unit::TokensPerS(PREFILL),
            Self::Decode => Unit::TokensPerS(DECODE.1),
            Self::AtOnce(count) => Unit::TokensPerS(count * AT_ONCE.1),
            Self::Burst { .. } => Unit::S,
            Self::FirstToken => Unit::Ms,
        }
    }

    /// Sets that [`sets`](Self::sets) gives.
    pub fn set_count(self) -> usize {
        if self == (Self::Burst { warm: true }) { 2 } else { 1 }
    }

    /// Fresh requests, greedy; the last set is the one that is timed.
    pub fn sets(self, engine: &Engine, random: &mut Random) -> Vec<OfflineSet> {
        let one = |prompt: Vec<u32>, answer| vec![Engine::request(0, prompt, answer, 0.0)];
        match self {
            Self::Prefill => vec![one(engine.prompt(PREFILL, random), 1).into()],
            Self::Decode => vec![one(engine.prompt(DECODE.0, random), DECODE.1 + 1).into()],
            Self::FirstToken => vec![one(engine.prompt(SHORT, random), 1).into()],
            Self::AtOnce(count) => {
                let request = |i| Engine::request(i, engine.prompt(AT_ONCE.0, random), AT_ONCE.1, 0.0);
                vec![(0..count).map(request).collect::<Vec<_>>().into()]
            }
            Self::Burst { warm } => {
                let (count, shared, own, answer) = BURST;
                let prefix = engine.prompt(shared, random);
                let mut with_prefix = |own| [prefix.clone(), engine.prompt(own, random)].concat();
                let before: Vec<OfflineSet> =
                    if warm { vec![one(with_prefix(1), 1).into()] } else { Vec::new() };
                let request = |i| Engine::request(i, with_prefix(own), answer, 0.0);
                let burst = OfflineSet { requests: (0..count).map(request).collect(), keeps_cache: warm };
                before.into_iter().chain([burst]).collect()
            }
        }
    }

    /// Seconds of a run that count: of a request alone those between its first token and its last.
    pub fn seconds(self, report: &OfflineReport) -> f64 {
        let until_first = match self {
            Self::Decode => report.first_tokens(1).unwrap_or_default(),
            _ => Default::default(),
        };
        (report.elapsed - until_first).as_secs_f64()
    }

    /// The rows of each step that is needed at least: prompts in full steps of `chunk` tokens, a prefix once, then every
    /// request decodes in every step.
    pub fn steps(self, chunk: usize) -> Vec<Vec<Row>> {
        match self {
            Self::Prefill => prompts(&[(0, PREFILL)], 0, chunk),
            Self::FirstToken => prompts(&[(0, SHORT)], 0, chunk),
            Self::Decode => decode(1, 0, DECODE.0, DECODE.1),
            Self::AtOnce(count) => {
                let (prompt, answer) = AT_ONCE;
                let mut steps = prompts(&vec![(0, prompt); count], 0, chunk);
                steps.extend(decode(count, 0, prompt, answer - 1));
                steps
            }
            Self::Burst { warm } => {
                let (count, shared, own, answer) = BURST;
                let (prompt, others) = (shared + own, if warm { count } else { count - 1 });
                let mut steps = if warm { Vec::new() } else { prompts(&[(0, prompt)], 0, chunk) };
                steps.extend(prompts(&vec![(shared, prompt); others], shared, chunk));
                steps.extend(decode(count, shared, prompt, answer - 1));
                steps
            }
        }
    }
}

impl Unit {
    /// A time in this unit.
    pub fn value(self, seconds: f64) -> f64 {
        match self {
            Self::TokensPerS(tokens) => tokens as f64 / seconds,
            Self::S => seconds,
            Self::Ms => 1e3 * seconds,
        }
    }
}

/// A small set that makes everything happen once.
pub(super) fn warm_up(engine: &Engine, random: &mut Random) -> OfflineSet {
    vec![Engine::request(0, engine.prompt(SHORT, random), 8, 0.0)].into()
}

/// Prompts from the first to the second position, packed into steps of `chunk` tokens. K and V of the first `shared`
/// positions are read once a step.
fn prompts(spans: &[(usize, usize)], shared: usize, chunk: usize) -> Vec<Vec<Row>> {
    let mut steps: Vec<Vec<Row>> = Vec::new();
    let mut room = 0;
    for &(start, end) in spans {
        let mut at = start;
        while at < end {
            if room == 0 {
                steps.push(Vec::new());
                room = chunk;
            }
            let step = steps.last_mut().expect("invariant: there is room in a step");
            let tokens = room.min(end - at);
            let own_from = if step.is_empty() { 0 } else { shared };
            step.push(Row { start: at, tokens, own_from, logits: at + tokens == end });
            (at, room) = (at + tokens, room - tokens);
        }
    }
    steps
}

/// Steps in which `count` requests decode that had `prompt` tokens.
fn decode(count: usize, shared: usize, prompt: usize, steps: usize) -> Vec<Vec<Row>> {
    let row = |request: usize, step: usize| Row {
        own_from: if request == 0 { 0 } else { shared },
        ..Row::decode(prompt + 1 + step)
    };
    (0..steps).map(|step| (0..count).map(|request| row(request, step)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(steps: &[Vec<Row>]) -> Vec<usize> {
        steps.iter().map(|rows| rows.iter().map(|row| row.tokens).sum()).collect()
    }

    #[test]
    fn steps_are_full_and_compute_every_token_once() {
        assert_eq!(tokens(&Workload::Prefill.steps(512)), [512]);
        assert_eq!(tokens(&Workload::Prefill.steps(200)), [200, 200, 112]);
        assert_eq!(tokens(&Workload::Decode.steps(512)), [1; 128]);
        // 2,048 tokens of prompts, then 63 of each request: the prompts' steps give the first of 64.
        let many = Workload::AtOnce(32).steps(512);
        assert_eq!(tokens(&many), [&[512; 4][..], &[32; 63]].concat());
        assert_eq!(many[4][0], Row { start: 64, tokens: 1, own_from: 0, logits: true });
        // A prompt of 1,020 tokens, 31 times 20 own tokens, 31 steps of decoding.
        let cold = Workload::Burst { warm: false }.steps(512);
        assert_eq!(tokens(&cold), [&[512, 508, 512, 108][..], &[32; 31]].concat());
        let warm = Workload::Burst { warm: true }.steps(512);
        assert_eq!(tokens(&warm), [&[512, 128][..], &[32; 31]].concat());
        // Each answer's first token comes from its prompt.
        let logits = |steps: &[Vec<Row>]| steps.iter().flatten().filter(|row| row.logits).count();
        assert_eq!((logits(&cold), logits(&warm), logits(&many)), (32 * 32, 32 * 32, 32 * 64));
        // The prefix is read for one row of a step, what is not common for all.
        let own: Vec<usize> = warm[0].iter().map(|row| row.own_from).collect();
        assert_eq!((own[0], own[1], own.len()), (0, 1000, 26));
        assert!(warm[2][1..].iter().all(|row| row.own_from == 1000 && row.start == 1020));
    }
}
