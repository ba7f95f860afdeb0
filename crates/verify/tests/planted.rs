//! `verify` keeps quiet about a sound model and finds every planted fault: each is a checkpoint that tells the truth
//! to one rank alone and lies to the ranks of a larger group, as a wrong implementation of that rule would.
#![allow(clippy::unwrap_used)] // tests may unwrap

use lockstep_core::shard::HeadShard;
use lockstep_core::{DType, ModelConfig, ParallelInfo, Topology, WeightMode};
use lockstep_model::{Result, WeightSource};
use lockstep_testkit::{Fixture, TempDir};
use lockstep_verify::{Comparison, Device, Options, Report, Subject, WholeSource, report, verify};
use lockstep_weights::ModelFiles;
use std::collections::HashSet;
use std::ops::Range;

/// A checkpoint and what `lie` makes of it for the ranks of groups of more than one.
struct Planted<'a> {
    truth: &'a ModelFiles,
    /// One per rank of the largest group.
    lies: Vec<Lie<'a>>,
}

impl Subject for Planted<'_> {
    fn source(&self, p: ParallelInfo) -> &dyn WeightSource {
        if p.replica_size() == 1 { self.truth } else { &self.lies[p.replica_rank()] }
    }
}

/// Changes what one rank reads.
struct Lie<'a> {
    truth: &'a ModelFiles,
    config: ModelConfig,
    fault: Fault,
    p: ParallelInfo,
}

/// The faults; each is what its name says.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    BiasOnEveryRank,
    WrongKvHead,
    PlainRopeForYarn,
    PaddedLogitsSampled,
    SliceZeroOnEveryRank,
    WrongColumns,
    VocabularyInReverse,
    PartialSumLost,
    HeadNormsLeftOut,
    ExpertsExchanged,
    WindowIgnored,
    StorageFormDependsOnTp,
    NoNumber,
}

impl Lie<'_> {
    /// The same run of rows, moved to where another rank's begin.
    fn moved(rows: &Range<usize>, to: usize) -> Range<usize> {
        to..to + rows.len()
    }
}

impl WeightSource for Lie<'_> {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn dtype_of(&self, tensor: &str) -> Option<DType> {
        match self.fault {
            Fault::StorageFormDependsOnTp => Some(DType::Bf16),
            _ => WeightSource::dtype_of(self.truth, tensor),
        }
    }

    fn expect_shape(&self, tensor: &str, shape: &[usize]) -> Result<()> {
        match self.fault {
            Fault::PaddedLogitsSampled => Ok(()),
            _ => WeightSource::expect_shape(self.truth, tensor, shape),
        }
    }

    fn read_rows(
        &self,
        tensor: &str,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<DType> {
        let last = self.p.tp_rank == self.p.tp_size - 1;
        let is = |name: &str| tensor.contains(name);
        let mut rows = rows;
        let mut cols = cols;
        match self.fault {
            Fault::WrongKvHead if is("k_proj") => {
                let heads = HeadShard::kv_heads(self.config.num_kv_heads, self.p.tp_rank, self.p.tp_size);
                let other = (heads.start + 1) % self.config.num_kv_heads * self.config.head_dim;
                rows = Self::moved(&rows, other + rows.start % self.config.head_dim);
            }
            Fault::SliceZeroOnEveryRank if is("gate_proj") => {
                let local = self.config.intermediate_size / self.p.tp_size;
                rows = Self::moved(&rows, rows.start % local);
            }
            Fault::WrongColumns if is("down_proj") => {
                cols = Self::moved(&cols, self.config.intermediate_size - cols.end);
            }
            Fault::VocabularyInReverse if is("lm_head") => {
                rows = Self::moved(&rows, self.config.vocab_size - rows.end);
            }
            Fault::ExpertsExchanged if is("experts.0.") => {
                let other = tensor.replace("experts.0.", "experts.1.");
                return WeightSource::read_rows(self.truth, &other, rows, cols, out);
            }
            Fault::PaddedLogitsSampled if is("embed_tokens") || is("lm_head") => {
                let real = self.config.vocab_size - 1;
                let read = rows.start.min(real)..rows.end.min(real);
                let dtype = WeightSource::read_rows(self.truth, tensor, read, cols.clone(), out)?;
                out.resize(rows.len() * cols.len() * dtype.size_bytes(), 0);
                return Ok(dtype);
            }
            _ => {}
        }
        let dtype = WeightSource::read_rows(self.truth, tensor, rows, cols, out)?;
        if self.fault == Fault::PartialSumLost && last && is("layers.1.self_attn.o_proj") {
            out.fill(0);
        }
        if self.fault == Fault::NoNumber && is("layers.1.mlp.down_proj") {
            out[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        }
        if self.fault == Fault::StorageFormDependsOnTp {
            let f32s: Vec<u8> = std::mem::take(out);
            let narrowed =
                f32s.as_chunks::<4>().0.iter().map(|b| half::bf16::from_f32(f32::from_le_bytes(*b)));
            out.extend(narrowed.flat_map(|v| v.to_le_bytes()));
            return Ok(DType::Bf16);
        }
        Ok(dtype)
    }

    fn read_vector(&self, tensor: &str, range: Range<usize>) -> Result<Vec<f32>> {
        let mut values = WeightSource::read_vector(self.truth, tensor, range)?;
        if self.fault == Fault::BiasOnEveryRank && tensor.contains("o_proj.bias") {
            // Added once by each of the ranks.
            values.iter_mut().for_each(|v| *v *= self.p.tp_size as f32);
        }
        if self.fault == Fault::HeadNormsLeftOut && (tensor.contains("q_norm") || tensor.contains("k_norm")) {
            values.fill(1.0);
        }
        Ok(values)
    }

    fn release(&self, tensor: &str) {
        WeightSource::release(self.truth, tensor);
    }

    fn unused_report(&self, used: &HashSet<String>) -> Option<String> {
        WeightSource::unused_report(self.truth, used)
    }
}

fn options(fixture: &Fixture, tp_sizes: &[usize]) -> Options {
    let prompt = &fixture.expect.prompt_ids;
    let long: Vec<u32> = (0..70).map(|i| 1 + (i * 37) % 200).collect();
    Options {
        gpus: Default::default(),
        devices: vec![Device::Cpu { weights: WeightMode::AsStored, coded: false }],
        pp_sizes: vec![1],
        tp_sizes: tp_sizes.to_vec(),
        prompts: vec![prompt.clone(), long, vec![5]],
        tokens: 6,
        threads: 1,
        bisect: true,
        memory_bytes: usize::MAX,
        memory_origin: String::new(),
    }
}

fn open(name: &str) -> (TempDir, Fixture, ModelFiles) {
    let (temp, fixture) = (TempDir::new("verify"), Fixture::named(name));
    let files = ModelFiles::open(&fixture.write_into(temp.path())).unwrap();
    (temp, fixture, files)
}

/// The report on a fixture whose tp 2 ranks are lied to.
fn planted(name: &str, fault: Fault) -> Report {
    planted_at(name, fault, Topology::tensor_parallel(2))
}

/// The report on a fixture whose ranks at `topology` are lied to.
fn planted_at(name: &str, fault: Fault, topology: Topology) -> Report {
    let (_temp, fixture, files) = open(name);
    let lie = |rank| {
        let mut config = files.config().clone();
        match fault {
            Fault::PlainRopeForYarn => config.rope.scaling = lockstep_core::config::RopeScaling::None,
            Fault::PaddedLogitsSampled => config.vocab_size += 1,
            Fault::WindowIgnored => config.sliding_window = None,
            _ => {}
        }
        Lie { truth: &files, config, fault, p: topology.place(rank) }
    };
    let subject = Planted { truth: &files, lies: (0..topology.world_size()).map(lie).collect() };
    let sizes = |size| if size == 1 { vec![1] } else { vec![1, size] };
    let options = options(&fixture, &sizes(topology.tp_size));
    let options = Options { pp_sizes: sizes(topology.pp_size), ..options };
    verify(&subject, &options, &|_| ()).unwrap()
}

/// The comparison of tp 2's logits with tp 1's.
fn logits_at_2(report: &Report) -> &Comparison {
    report.comparisons.iter().find(|c| c.what == "cpu tp 2 against cpu tp 1").unwrap()
}

#[test]
fn sound_models_of_every_kind_pass() {
    for (name, tp_sizes) in [
        ("rand_llama", &[1, 2][..]),
        ("rand_heads8", &[1, 2, 4, 8]),
        ("rand_heads3", &[1, 3]),
        ("rand_vocab_odd", &[2, 1]),
        ("rand_bias", &[1, 2]),
        ("rand_yarn", &[1, 2]),
        ("rand_qwen3_qknorm", &[1, 2]),
        ("rand_qwen3_moe", &[1, 2]),
        ("rand_mistral_window", &[1, 2]),
        ("rand_gemma3", &[1, 2]),
        ("rand_phi3", &[1, 2]),
    ] {
        let (_temp, fixture, files) = open(name);
        let found = verify(&WholeSource(&files), &options(&fixture, tp_sizes), &|_| ()).unwrap();
        assert!(found.passed(), "{name}\n{}", report::render(&found));
        let odd = tp_sizes.contains(&3);
        assert!(found.first_layers.is_empty(), "{name}: nothing to look for, also where closeness is enough");
        assert!(odd || found.comparisons.iter().all(|c| c.max_error == 0.0), "{}", report::render(&found));
        // Two per further size, then 4 schedules and 3 variants at the first and at the last.
        assert_eq!(found.comparisons.len(), 2 * (tp_sizes.len() - 1) + 14, "{}", report::render(&found));
    }
}

#[test]
fn sound_models_pass_in_stages() {
    for name in ["rand_llama", "rand_qwen3_moe", "rand_gemma3", "rand_mistral_window"] {
        let (_temp, fixture, files) = open(name);
        let options = Options { pp_sizes: vec![1, 2], ..options(&fixture, &[1, 2]) };
        let found = verify(&WholeSource(&files), &options, &|_| ()).unwrap();
        assert!(found.passed(), "{name}\n{}", report::render(&found));
        assert!(found.comparisons.iter().all(|c| c.max_error == 0.0), "{}", report::render(&found));
        // Four places, with schedules and variants at the first and at the last.
        assert_eq!(found.comparisons.len(), 2 * 3 + 14, "{}", report::render(&found));
        let last = &found.comparisons.last().unwrap().what;
        assert!(last.contains("cpu tp 2 pp 2"), "{last}");
    }
    let (_temp, fixture, files) = open("rand_llama");
    let many = Options { pp_sizes: vec![1, 60], ..options(&fixture, &[1]) };
    let error = verify(&WholeSource(&files), &many, &|_| ()).unwrap_err().to_string();
    assert!(error.contains("--pp 60 stages cannot have a layer each"), "{error}");
}

#[test]
fn faults_of_one_stage_are_found_with_their_layer() {
    let two_stages = Topology { pp_size: 2, ..Topology::tensor_parallel(1) };
    // Such as a rank can have that holds whole matrices.
    for (name, fault, first) in [
        ("rand_qwen3_qknorm", Fault::HeadNormsLeftOut, "layer 0"),
        ("rand_qwen3_moe", Fault::ExpertsExchanged, "layer 0"),
        ("rand_llama", Fault::PartialSumLost, "layer 1"),
    ] {
        let found = planted_at(name, fault, two_stages);
        let logits = found.comparisons.iter().find(|c| c.what == "cpu tp 1 pp 2 against cpu tp 1").unwrap();
        assert!(!logits.passed, "{fault:?} was not found:\n{}", report::render(&found));
        assert!(found.first_layers[0].contains(first), "{fault:?}: {:?}", found.first_layers);
    }
    let found = planted_at("rand_llama", Fault::NoNumber, two_stages);
    let errors: Vec<&str> = found.comparisons.iter().filter_map(|c| c.error.as_deref()).collect();
    assert!(errors.len() == 1 && errors[0].starts_with("NaN first after layer 1: prompt 0"), "{errors:?}");
}

#[test]
fn every_planted_fault_is_found() {
    for (name, fault, first) in [
        ("rand_bias", Fault::BiasOnEveryRank, "layer 0"),
        ("rand_llama", Fault::WrongKvHead, "layer 0"),
        ("rand_yarn", Fault::PlainRopeForYarn, "layer 0"),
        ("rand_llama", Fault::SliceZeroOnEveryRank, "layer 0"),
        ("rand_llama", Fault::WrongColumns, "layer 0"),
        ("rand_llama", Fault::VocabularyInReverse, "the head"),
        ("rand_llama", Fault::PartialSumLost, "layer 1"),
        ("rand_qwen3_qknorm", Fault::HeadNormsLeftOut, "layer 0"),
        ("rand_qwen3_moe", Fault::ExpertsExchanged, "layer 0"),
        ("rand_mistral_window", Fault::WindowIgnored, "layer 0"),
        ("rand_llama", Fault::StorageFormDependsOnTp, "the embedding"),
    ] {
        let found = planted(name, fault);
        assert!(!found.passed(), "{fault:?} was not found:\n{}", report::render(&found));
        assert!(!logits_at_2(&found).passed, "{fault:?}: logits tell\n{}", report::render(&found));
        assert!(found.first_layers[0].contains(first), "{fault:?}: {:?}", found.first_layers);
        assert_eq!(found.first_layers.len(), 1);
    }
    let found = planted("rand_vocab_odd", Fault::PaddedLogitsSampled);
    let error = logits_at_2(&found).error.as_ref().unwrap();
    assert!(error.contains("322 tokens against one of 321"), "{error}");
}

#[test]
fn what_is_no_number_is_a_finding_where_it_appears_and_never_equal() {
    let where_it_is = "NaN first after layer 1: prompt 0, position 0, element 0";
    let findings = |found: &Report| -> Vec<(String, String)> {
        let failed = found.comparisons.iter().filter(|c| !c.passed);
        failed.map(|c| (c.what.clone(), c.error.clone().unwrap_or_default())).collect()
    };
    // The ranks of tp 2 alone: the reference is sound.
    let found = planted("rand_llama", Fault::NoNumber);
    let [(what, error)] = &findings(&found)[..] else { panic!("{}", report::render(&found)) };
    assert!(what == "cpu tp 2, every value a number" && error.starts_with(where_it_is), "{what}: {error}");
    // All ranks alike: the same bits everywhere are not the same answers.
    let (_temp, fixture, files) = open("rand_llama");
    let config = files.config().clone();
    let lie = Lie { truth: &files, config, fault: Fault::NoNumber, p: ParallelInfo::SINGLE };
    let found = verify(&WholeSource(&lie), &options(&fixture, &[1, 2]), &|_| ()).unwrap();
    assert!(found.comparisons.len() == 2 && !found.passed(), "{}", report::render(&found));
    for ((what, error), place) in findings(&found).iter().zip(["cpu tp 1", "cpu tp 2"]) {
        assert!(what.starts_with(place) && error.starts_with(where_it_is), "{what}: {error}");
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_numbers_before_it_is_loaded() {
    let (_temp, fixture, files) = open("rand_llama");
    let mut options = options(&fixture, &[1, 2]);
    (options.memory_bytes, options.memory_origin) = (1 << 20, "90 % of 1 MiB available".into());
    let ran = std::cell::Cell::new(false);
    let error = verify(&WholeSource(&files), &options, &|_| ran.set(true)).unwrap_err();
    let words = error.to_string();
    assert!(
        words.starts_with("the ranks of cpu tp 1 may use 1 MiB (90 % of 1 MiB available), but"),
        "{words}"
    );
    assert!(words.contains("KV pages and results") && words.contains("fewer --tokens"), "{words}");
    assert_eq!((error.exit_code(), ran.get()), (lockstep_core::ExitCode::Memory, false));
}

#[test]
fn what_cannot_run_is_a_finding_or_one_sentence() {
    let (_temp, fixture, files) = open("rand_llama");
    let mut wrong = options(&fixture, &[1, 3]);
    let found = verify(&WholeSource(&files), &wrong, &|_| ()).unwrap();
    let errors: Vec<&str> = found.comparisons.iter().filter_map(|c| c.error.as_deref()).collect();
    assert_eq!(errors.len(), 1, "nothing else can run there: {errors:?}");
    assert!(
        errors[0].contains("--tp 3 does not divide"),
        "the cause, not that another rank left: {errors:?}"
    );
    assert!(!found.passed() && found.first_layers.is_empty(), "there are no layers to search");
    wrong.prompts = vec![vec![]];
    assert!(
        verify(&WholeSource(&files), &wrong, &|_| ()).unwrap_err().to_string().contains("at least one token")
    );
}
