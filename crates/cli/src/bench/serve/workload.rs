//! The whole workload before its first request: bodies as they will be sent, and when.

use super::prompts::{Form, Prompt};
use super::trace::TraceLine;
use crate::bench::random::Random;
use crate::flags::bench_serve::{Arrival, BenchEndpoint, BenchServeFlags};
use anyhow::{Result, bail};
use hyper::body::Bytes;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Tokens that a `hash_id` of a trace stands for.
const SECTION_TOKENS: usize = 512;

/// Streams of random numbers.
#[derive(Clone, Copy)]
enum Purpose {
    Lengths,
    Prefix,
    Prompts,
    Arrivals,
}

/// A request that will be sent.
#[derive(Clone, Debug)]
pub struct Planned {
    /// JSON.
    pub body: Bytes,
    /// When, counted from the start; `None` as soon as there is room.
    pub at: Option<Duration>,
}

/// All requests, in the order in which they are sent.
#[derive(Debug)]
pub struct Workload {
    /// What is sent.
    pub requests: Vec<Planned>,
    /// Most requests in flight.
    pub concurrency: Option<usize>,
    /// For one answer.
    pub limit: Duration,
}

impl Workload {
    /// From a trace or from random numbers: the same flags give the same requests.
    pub fn new(
        flags: &BenchServeFlags,
        lines: Option<Vec<TraceLine>>,
        form: Form,
        model: &str,
    ) -> Result<Self> {
        let maker = Maker { flags, form, model };
        let (bodies, times) = match lines {
            Some(lines) => maker.recorded(lines)?,
            None => (maker.made_up(), None),
        };
        let times = maker.arrivals(bodies.len()).or(times);
        let concurrency = flags.concurrency_max(times.is_some());
        let at = |index: usize| times.as_ref().map(|times| times[index]);
        let requests =
            bodies.into_iter().enumerate().map(|(i, body)| Planned { body: body.into(), at: at(i) });
        Ok(Self { requests: requests.collect(), concurrency, limit: Duration::from_secs_f64(flags.timeout) })
    }
}

struct Maker<'a> {
    flags: &'a BenchServeFlags,
    form: Form,
    model: &'a str,
}

impl Maker<'_> {
    fn random(&self, purpose: Purpose) -> Random {
        Random::new(self.flags.seed, purpose as u64)
    }

    /// Prompts of random length and content behind one prefix.
    fn made_up(&self) -> Vec<String> {
        let flags = self.flags;
        let (mut lengths, mut prompts) = (self.random(Purpose::Lengths), self.random(Purpose::Prompts));
        let prefix = match flags.prefix_len {
            0 => None,
            tokens => Some(self.form.prompt(tokens, false, &mut self.random(Purpose::Prefix))),
        };
        let body = |_| {
            let input = draw(flags.input_len, flags.range_ratio, &mut lengths);
            let output = draw(flags.output_len, flags.range_ratio, &mut lengths);
            let own = self.form.prompt(input, true, &mut prompts);
            let prompt = prefix.clone().map_or(own.clone(), |prefix| prefix.then(own));
            self.body(self.content(prompt), Some(output))
        };
        (0..flags.made_up_requests()).map(body).collect()
    }

    /// Bodies, and times counted from the first.
    fn recorded(&self, mut lines: Vec<TraceLine>) -> Result<(Vec<String>, Option<Vec<Duration>>)> {
        lines.truncate(self.flags.num_requests.unwrap_or(usize::MAX));
        lines.sort_by(|a, b| a.timestamp.unwrap_or(0.0).total_cmp(&b.timestamp.unwrap_or(0.0)));
        let first = lines.first().and_then(|line| line.timestamp);
        let times = first.map(|first| {
            let since = |line: &TraceLine| (line.timestamp.unwrap_or(first) - first) / 1e3;
            lines.iter().map(|line| Duration::from_secs_f64(since(line))).collect()
        });
        let mut prompts = self.random(Purpose::Prompts);
        let bodies = lines.into_iter().map(|line| self.trace_body(line, &mut prompts));
        Ok((bodies.collect::<Result<_>>()?, times))
    }

    fn trace_body(&self, line: TraceLine, prompts: &mut Random) -> Result<String> {
        let chat = self.flags.endpoint == BenchEndpoint::Chat;
        let (content, output) = match line {
            TraceLine { body: Some(body), output_length, .. } => (body, output_length),
            TraceLine { messages: Some(messages), output_length, .. } => {
                (Map::from_iter([("messages".to_owned(), messages)]), output_length)
            }
            TraceLine { prompt: Some(prompt), output_length, .. } => {
                let prompt = match (chat, prompt) {
                    (true, text @ Value::String(_)) => {
                        ("messages", json!([{"role": "user", "content": text}]))
                    }
                    (true, _) => bail!("the trace has prompts of token ids; use --endpoint completions"),
                    (false, prompt) => ("prompt", prompt),
                };
                (Map::from_iter([(prompt.0.to_owned(), prompt.1)]), output_length)
            }
            TraceLine { input_length, hash_ids, output_length, .. } => {
                let prompt = self.sections(input_length.unwrap_or(1), &hash_ids, prompts);
                (self.content(prompt), output_length)
            }
        };
        if content.contains_key("messages") != chat {
            bail!(
                "the trace and --endpoint do not go together: chats have messages, completions have prompts"
            );
        }
        // A whole body may name its limit itself.
        let limited = ["max_tokens", "max_completion_tokens"].iter().any(|name| content.contains_key(*name));
        Ok(self.body(content, output.or((!limited).then_some(self.flags.output_len))))
    }

    /// A prompt of `tokens` whose sections are the same wherever their id is.
    fn sections(&self, tokens: usize, hash_ids: &[u64], prompts: &mut Random) -> Prompt {
        let (mut left, mut prompt) = (tokens, None);
        for &id in hash_ids {
            let here = left.min(SECTION_TOKENS);
            if here == 0 {
                break;
            }
            left -= here;
            // Ids of a trace are far from the few purposes.
            let section =
                self.form.prompt(here, false, &mut Random::new(self.flags.seed, id.wrapping_add(1 << 32)));
            prompt = Some(match prompt {
                None => section,
                Some(before) => Prompt::then(before, section),
            });
        }
        match prompt {
            None => self.form.prompt(tokens, true, prompts),
            Some(prompt) if left == 0 => prompt,
            Some(prompt) => prompt.then(self.form.prompt(left, false, prompts)),
        }
    }

    fn content(&self, prompt: Prompt) -> Map<String, Value> {
        let (name, value) = match (self.flags.endpoint, prompt) {
            (BenchEndpoint::Chat, Prompt::Text(text)) => {
                ("messages", json!([{"role": "user", "content": text}]))
            }
            (_, Prompt::Text(text)) => ("prompt", text.into()),
            (_, Prompt::Ids(ids)) => ("prompt", ids.into()),
        };
        Map::from_iter([(name.to_owned(), value)])
    }

    fn body(&self, content: Map<String, Value>, output: Option<usize>) -> String {
        let mut body = Map::from_iter([("temperature".to_owned(), json!(0))]);
        body.extend(content);
        body.insert("model".into(), self.model.into());
        if let Some(tokens) = output {
            body.insert("max_tokens".into(), tokens.into());
        }
        if self.flags.ignore_eos {
            body.insert("ignore_eos".into(), true.into());
        }
        body.extend(self.flags.params.iter().cloned());
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), json!({"include_usage": true}));
        Value::Object(body).to_string()
    }

    /// Times of `--request-rate`.
    fn arrivals(&self, requests: usize) -> Option<Vec<Duration>> {
        let rate = self.flags.request_rate?;
        let mut random = self.random(Purpose::Arrivals);
        let mut at = 0.0;
        let next = |index: usize| {
            match self.flags.arrival {
                Arrival::Constant => at = index as f64 / rate,
                Arrival::Poisson => at += random.waiting_s(rate),
            }
            Duration::from_secs_f64(at)
        };
        Some((0..requests).map(next).collect())
    }
}

/// A length around `mean`, at least 1.
fn draw(mean: usize, ratio: f64, random: &mut Random) -> usize {
    let low = (mean as f64 * (1.0 - ratio)).round().max(1.0);
    let high = (mean as f64 * (1.0 + ratio)).round().max(low);
    random.between(low as u64, high as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::super::trace::TraceLine;
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: BenchServeFlags,
    }

    const IDS: Form = Form::Ids { low: 5, high: 9 };

    fn workload(args: &[&str], lines: Option<Vec<TraceLine>>, form: Form) -> Result<Workload> {
        let flags = Line::parse_from([&["x"], args].concat()).flags;
        flags.check()?;
        Workload::new(&flags, lines, form, "m")
    }

    fn bodies(workload: &Workload) -> Vec<Value> {
        workload.requests.iter().map(|r| serde_json::from_slice(&r.body).unwrap()).collect()
    }

    #[test]
    fn made_up_requests_follow_the_flags_and_the_seed() {
        let args =
            ["--num-requests", "50", "--input-len", "20", "--output-len", "10", "--range-ratio", "0.5"];
        let more = ["--prefix-len", "7", "--ignore-eos", "--param", "top_p=0.5"];
        let made = workload(&[&args[..], &more].concat(), None, IDS).unwrap();
        assert_eq!((made.requests.len(), made.concurrency), (50, Some(32)));
        assert!(made.requests.iter().all(|r| r.at.is_none()));
        let made = bodies(&made);
        let prompts: Vec<&Vec<Value>> = made.iter().map(|b| b["prompt"].as_array().unwrap()).collect();
        assert!(prompts.iter().all(|p| p[..7] == prompts[0][..7] && (17..=37).contains(&p.len())));
        assert!(prompts.iter().any(|p| p.len() < 22) && prompts.iter().any(|p| p.len() > 32));
        assert!(made.iter().all(|b| (5..=15).contains(&b["max_tokens"].as_u64().unwrap())));
        assert!(made.iter().all(|b| b["ignore_eos"] == true && b["top_p"] == 0.5 && b["stream"] == true));
        let again = bodies(&workload(&[&args[..], &more].concat(), None, IDS).unwrap());
        assert_eq!(made, again);
        let other = bodies(&workload(&[&args[..], &more, &["--seed", "1"]].concat(), None, IDS).unwrap());
        assert_ne!(made, other);
    }

    #[test]
    fn rates_give_times() {
        let times = |more: &[&str]| {
            let args = [&["--num-requests", "400", "--request-rate", "20"], more].concat();
            let made = workload(&args, None, IDS).unwrap();
            assert_eq!(made.concurrency, None);
            made.requests.iter().map(|r| r.at.unwrap().as_secs_f64()).collect::<Vec<_>>()
        };
        let constant = times(&["--arrival", "constant"]);
        assert!((constant[0], constant[399]) == (0.0, 19.95));
        let poisson = times(&[]);
        assert!(poisson.is_sorted() && (15.0..25.0).contains(&poisson[399]), "{}", poisson[399]);
    }

    #[test]
    fn traces_keep_times_sections_and_bodies() {
        let line = |text: &str| serde_json::from_str::<TraceLine>(text).unwrap();
        let lines = vec![
            line(r#"{"timestamp": 3000, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}"#),
            line(r#"{"timestamp": 1000, "input_length": 513, "output_length": 5, "hash_ids": [1, 3]}"#),
        ];
        let made = workload(&[], Some(lines), IDS).unwrap();
        let seconds: Vec<_> = made.requests.iter().map(|r| r.at.unwrap().as_secs_f64()).collect();
        assert_eq!((seconds, made.concurrency), (vec![0.0, 2.0], None));
        let made = bodies(&made);
        let prompt = |i: usize| made[i]["prompt"].as_array().unwrap();
        assert_eq!((prompt(0).len(), prompt(1).len()), (513, 600));
        assert_eq!(prompt(0)[..512], prompt(1)[..512]);
        assert_eq!((made[0]["max_tokens"].clone(), made[1]["max_tokens"].clone()), (json!(5), json!(4)));

        let lines =
            vec![line(r#"{"body": {"messages": [], "max_tokens": 9, "model": "x", "temperature": 1}}"#)];
        assert!(workload(&[], Some(lines.clone()), IDS).unwrap_err().to_string().contains("--endpoint"));
        let made = bodies(&workload(&["--endpoint", "chat"], Some(lines), IDS).unwrap());
        let expected = (json!(9), json!("m"), json!(1));
        assert_eq!(
            (made[0]["max_tokens"].clone(), made[0]["model"].clone(), made[0]["temperature"].clone()),
            expected
        );
    }
}
