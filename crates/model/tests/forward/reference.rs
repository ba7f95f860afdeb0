//! Every random fixture at every tp size worth testing: greedy tokens and logits against the testkit's
//! own f64 forward.

use crate::group::{Layout, one_by_one, run};
use lockstep_testkit::fixtures::random_models::TABLE;
use lockstep_testkit::{Fixture, Reference, TempDir};

#[test]
fn fixtures_give_their_known_answers() {
    let temp = TempDir::new("reference");
    for row in TABLE {
        let fixture = Fixture::named(row.name);
        let folder = fixture.write_into(temp.path());
        let expect = &fixture.expect;
        // Teacher-forced: the prompt followed by the known answer, all logits at once.
        let mut ids = expect.prompt_ids.clone();
        ids.extend(&expect.greedy_ids);
        ids.pop();
        let spec = row.spec(row.seed);
        let weights = spec.weights();
        let want: Vec<f64> = Reference::new(&spec, &weights).logits(&ids);
        for &tp in &expect.tp_sizes {
            let prompts = [ids.clone()];
            let logits =
                run(&folder, Layout { tp, ..Layout::default() }, &prompts, &one_by_one(&prompts, 1000));
            for (i, &id) in expect.greedy_ids.iter().enumerate() {
                let row_logits = &logits[0][expect.prompt_ids.len() - 1 + i];
                let best =
                    (0..row_logits.len()).max_by(|&a, &b| row_logits[a].total_cmp(&row_logits[b])).unwrap();
                assert_eq!(best as u32, id, "{} tp {tp} token {i}", row.name);
            }
            let got = logits[0].last().unwrap();
            let scale = want.iter().fold(0f64, |m, v| m.max(v.abs()));
            let error = want.iter().zip(got).fold(0f64, |m, (a, b)| m.max((a - f64::from(*b)).abs()));
            assert_eq!(want.len(), got.len(), "{} tp {tp}", row.name);
            assert!(error <= 1e-4 * scale, "{} tp {tp}: error {error}, largest logit {scale}", row.name);
        }
    }
}
