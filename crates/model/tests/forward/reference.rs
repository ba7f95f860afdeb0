//! Every random fixture at every tp size worth testing: greedy tokens and logits against the testkit's
//! own f64 forward.

use crate::group::{Layout, one_by_one, run};
use lockstep_testkit::fixtures::random_models::TABLE;
use lockstep_testkit::{Fixture, Reference, TempDir};

/// Largest error of a logit, relative to the largest logit of its position.
const AGREE: f64 = 1e-4;

#[test]
fn fixtures_give_their_known_answers() {
    let temp = TempDir::new("reference");
    for row in TABLE {
        let fixture = Fixture::named(row.name);
        let folder = fixture.write_into(temp.path());
        let expect = &fixture.expect;
        // Teacher-forced: the prompt followed by the known answer, all logits at once.
        let (prompt, answer) = (&expect.prompt_ids, &expect.greedy_ids);
        let mut ids = prompt.clone();
        ids.extend(&answer[..answer.len() - 1]);
        let spec = row.spec(row.seed);
        let weights = spec.weights();
        let mut reference = Reference::new(&spec, &weights);
        let mut wanted = vec![reference.logits(prompt)];
        wanted.extend(answer[..answer.len() - 1].iter().map(|&id| reference.logits(&[id])));
        for &tp in &expect.tp_sizes {
            let prompts = [ids.clone()];
            let logits =
                run(&folder, Layout { tp, ..Layout::default() }, &prompts, &one_by_one(&prompts, 1000));
            for (i, (want, &id)) in wanted.iter().zip(answer).enumerate() {
                let got = &logits[0][prompt.len() - 1 + i];
                let best = (0..got.len()).max_by(|&a, &b| got[a].total_cmp(&got[b])).unwrap();
                assert_eq!(best as u32, id, "{} tp {tp} token {i}", row.name);
                let scale = want.iter().fold(0f64, |m, v| m.max(v.abs()));
                let error = want.iter().zip(got).fold(0f64, |m, (a, b)| m.max((a - f64::from(*b)).abs()));
                assert_eq!(want.len(), got.len(), "{} tp {tp}", row.name);
                assert!(error <= AGREE * scale, "{} tp {tp}: error {error}, largest logit {scale}", row.name);
            }
        }
    }
}
