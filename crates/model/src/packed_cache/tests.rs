//! What comes from a file is what was packed, bit for bit, and whatever is wrong with a file costs only time.

use super::folder::Folder;
use super::*;
use crate::{DummyWeights, Loader};
use lockstep_backend::cpu::{CpuBackend, CpuOptions};
use lockstep_core::{DType, ParallelInfo, QuantizeFormat};
use lockstep_testkit::TempDir;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

fn source() -> DummyWeights {
    let text = br#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 320, "num_hidden_layers": 2, "vocab_size": 9000,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64,
        "tie_word_embeddings": true}"#;
    DummyWeights::new(lockstep_core::config::hf::parse(text).unwrap(), DType::Bf16, 7)
}

fn key(folder: &Path, description: &str) -> CacheKey {
    CacheKey { folder: folder.into(), name: "model".into(), description: description.into() }
}

/// Loads every matrix of a rank; gives their bytes, and whether they came from the file. Waits until it is written.
fn load(cache: Option<CacheKey>, mode: WeightMode, p: ParallelInfo) -> (Vec<Vec<u8>>, bool) {
    let (source, options) = (source(), CpuOptions { threads: 2, ..CpuOptions::default() });
    let backend = CpuBackend::new(options).unwrap();
    let cache = cache.map(|key| PackedCache::open(key, 3));
    let loader = Loader::new(&source, &backend, p, mode, &|_, _| {}).with_cache(cache);
    let rules = ModelRules::new(source.config());
    let mut bytes = Vec::new();
    for rule in rules.iter().filter(|rule| rule.columns.is_some()) {
        let linear = loader.matrix(rule).unwrap();
        bytes.push((*backend.packed(&linear)).as_ref().to_vec());
    }
    let cache = loader.take_cache();
    let reads = cache.as_ref().is_some_and(PackedCache::reads);
    if let Some(thread) = cache.and_then(PackedCache::finish) {
        thread.join().unwrap();
    }
    (bytes, reads)
}

const MODE: WeightMode = WeightMode::Quantize(QuantizeFormat::Q4K);

fn only_file(folder: &Path) -> PathBuf {
    let names: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [file] = &names[..] else { panic!("{names:?} instead of one file") };
    assert_eq!(file.extension().unwrap(), "packed");
    file.clone()
}

#[test]
fn what_was_written_is_read_bit_for_bit_on_every_rank() {
    for mode in [WeightMode::AsStored, MODE, WeightMode::Quantize(QuantizeFormat::Q8_0)] {
        for p in
            [ParallelInfo::SINGLE, ParallelInfo::tensor_parallel(0, 2), ParallelInfo::tensor_parallel(1, 2)]
        {
            let dir = TempDir::new("packed");
            let key = || Some(key(&dir.path().join("a/b"), "this"));
            let (packed, _) = load(None, mode, p);
            assert_eq!(load(key(), mode, p), (packed.clone(), false));
            assert_eq!(load(key(), mode, p), (packed, true), "{mode:?} {p:?}");
        }
    }
}

#[test]
fn a_damaged_file_is_found_out_and_replaced() {
    let (packed, _) = load(None, MODE, ParallelInfo::SINGLE);
    let dir = TempDir::new("packed");
    let run = || load(Some(key(dir.path(), "this")), MODE, ParallelInfo::SINGLE);
    run();
    let file = only_file(dir.path());
    let whole = fs::read(&file).unwrap();
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 4;
        bytes
    };
    let last = whole.len() - 1;
    let damaged = [0, 9, 17, 21, 4096, 4096 + 700_000, last - 20, last].map(flipped);
    let cut = [0, 10, 5000, whole.len() / 2, last].map(|len| whole[..len].to_vec());
    let mut longer = whole.clone();
    longer[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
    for (case, bytes) in damaged.into_iter().chain(cut).chain([longer]).enumerate() {
        fs::write(&file, bytes).unwrap();
        assert_eq!(run(), (packed.clone(), false), "case {case}");
        assert_eq!(fs::read(only_file(dir.path())).unwrap(), whole, "case {case}: it was replaced");
        assert_eq!(run(), (packed.clone(), true), "case {case}: it is read again");
    }
}

#[test]
fn what_was_made_from_something_else_is_not_read() {
    let dir = TempDir::new("packed");
    load(Some(key(dir.path(), "this")), MODE, ParallelInfo::SINGLE);
    let file = only_file(dir.path());
    // Under the name that another description has.
    let other = Folder::new(dir.path().into(), "model", "packed weights, layout 3\nthat").file();
    fs::copy(&file, &other).unwrap();
    let (packed, _) = load(None, MODE, ParallelInfo::SINGLE);
    assert_eq!(load(Some(key(dir.path(), "that")), MODE, ParallelInfo::SINGLE), (packed, false));
    // The right words over other matrices: another form, and another rank's.
    for (mode, p) in
        [(WeightMode::AsStored, ParallelInfo::SINGLE), (MODE, ParallelInfo::tensor_parallel(1, 2))]
    {
        let dir = TempDir::new("packed");
        load(Some(key(dir.path(), "this")), MODE, ParallelInfo::SINGLE);
        let (packed, _) = load(None, mode, p);
        assert_eq!(load(Some(key(dir.path(), "this")), mode, p), (packed, false), "{mode:?} {p:?}");
    }
}

#[test]
fn of_two_processes_one_writes_and_neither_waits() {
    let dir = TempDir::new("packed");
    let (packed, _) = load(None, MODE, ParallelInfo::SINGLE);
    let run = || load(Some(key(dir.path(), "this")), MODE, ParallelInfo::SINGLE);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(run)).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap().0, packed);
        }
    });
    assert_eq!(run(), (packed, true));
    only_file(dir.path());
    let folder = Folder::new(dir.path().into(), "another", "this");
    let nested = folder.write(1, |_| {
        assert!(!folder.write(1, |_| unreachable!("somebody else writes")).unwrap());
        Ok(())
    });
    assert_eq!(nested, Ok(true));
}

#[test]
fn a_folder_that_cannot_be_written_costs_nothing_else() {
    let dir = TempDir::new("packed");
    let file = dir.path().join("file");
    fs::write(&file, "no folder").unwrap();
    let (packed, _) = load(None, MODE, ParallelInfo::SINGLE);
    for _ in 0..2 {
        assert_eq!(load(Some(key(&file, "this")), MODE, ParallelInfo::SINGLE), (packed.clone(), false));
    }
    let folder = Folder::new(dir.path().join("new"), "model", "this");
    let problem = folder.write(1, |_| Err(std::io::ErrorKind::StorageFull.into())).unwrap_err();
    assert!(problem.contains("cannot write"), "{problem}");
    assert_eq!(fs::read_dir(dir.path().join("new")).unwrap().count(), 0, "nothing stays of what was begun");
}

#[test]
fn files_give_way_by_their_last_use_and_abandoned_ones_at_once() {
    let dir = TempDir::new("packed");
    let folder = |name: &str| Folder::new(dir.path().into(), name, "").with_bytes_max(300);
    let write = |name: &str, bytes: usize| {
        folder(name)
            .write(bytes as u64, |file| std::os::unix::fs::FileExt::write_all_at(file, &vec![1; bytes], 0))
    };
    let names = || {
        let mut names: Vec<String> = fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().split('-').next().unwrap().to_owned())
            .collect();
        names.sort();
        names
    };
    for (age, name) in [(30, "a"), (40, "b"), (10, "c")] {
        assert_eq!(write(name, 100), Ok(true));
        let used = SystemTime::now() - Duration::from_secs(age);
        fs::File::open(folder(name).file()).unwrap().set_modified(used).unwrap();
    }
    fs::write(dir.path().join("x-1.part"), [0; 1000]).unwrap();
    fs::write(dir.path().join("notes.txt"), [0; 1000]).unwrap();
    assert_eq!(write("d", 150), Ok(true));
    assert_eq!(names(), ["c", "d", "notes.txt"]);
    let problem = write("e", 301).unwrap_err();
    assert!(problem.contains("more than the 300"), "{problem}");
    assert_eq!(write("d", 200), Ok(true), "its own file does not count");
    assert_eq!(names(), ["c", "d", "notes.txt"]);
}
