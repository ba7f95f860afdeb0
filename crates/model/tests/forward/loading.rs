//! Every parameter is filled exactly once, and what is wrong is named.

use lockstep_backend::cpu::{CpuBackend, CpuOptions};
use lockstep_core::shard::{Group, Piece, RowCut, WeightRule};
use lockstep_core::{DType, ParallelInfo, WeightMode, config::hf};
use lockstep_model::{DummyWeights, Loader, ModelRules};
use lockstep_testkit::ModelSpec;

#[test]
fn twice_and_never_are_errors() {
    let config = hf::parse(ModelSpec::default().config_json().to_string().as_bytes()).unwrap();
    let rules = ModelRules::new(&config);
    let source = DummyWeights::new(config, DType::F32, 1);
    let backend = CpuBackend::new(CpuOptions::default()).unwrap();
    let loader = Loader::new(&source, &backend, ParallelInfo::SINGLE, WeightMode::AsStored, &|_, _| {});
    let all: Vec<&WeightRule> = rules.iter().collect();
    for (i, rule) in all.iter().enumerate() {
        let message = loader.check_complete(&rules).unwrap_err().to_string();
        let count = all[i..].iter().map(|rule| rule.pieces.len()).sum::<usize>();
        assert!(message.starts_with(&format!("{count} parameters were never filled")), "{message}");
        assert!(message.contains(&rule.pieces[0].tensor), "{message}");
        match rule.columns {
            Some(_) => drop(loader.matrix(rule).unwrap()),
            None => drop(loader.vector(rule).unwrap()),
        }
    }
    loader.check_complete(&rules).unwrap();
    let message = loader.vector(rules.final_norm.as_ref().unwrap()).err().unwrap().to_string();
    assert!(message.contains("model.norm.weight fills two parameters"), "{message}");
}

#[test]
fn a_tensor_that_is_not_there_is_named() {
    let config = hf::parse(ModelSpec::default().config_json().to_string().as_bytes()).unwrap();
    let source = DummyWeights::new(config, DType::F32, 1);
    let backend = CpuBackend::new(CpuOptions::default()).unwrap();
    let loader = Loader::new(&source, &backend, ParallelInfo::SINGLE, WeightMode::AsStored, &|_, _| {});
    let pieces = vec![Piece::whole("model.layers.9.x.weight", 4, RowCut::Replicated)];
    let rule = WeightRule { group: Group::Norms, pieces, columns: None };
    let message = loader.vector(&rule).err().unwrap().to_string();
    assert!(message.contains("model.layers.9.x.weight is missing"), "{message}");
}
