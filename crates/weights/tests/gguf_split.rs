//! GGUF files in parts, and the ways in which parts can be wrong.
#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking too

mod common;

use common::{Folder, Gguf, f32_bytes};
use lockstep_weights::ModelFiles;
use std::path::{Path, PathBuf};

const UP: &str = "model.layers.0.mlp.up_proj.weight";
const NORM: &str = "model.norm.weight";

fn name(part: u32, count: u32) -> String {
    format!("Tiny Modell 模型-{part:05}-of-{count:05}.gguf")
}

fn split(gguf: Gguf, no: u16, count: u16) -> Gguf {
    gguf.raw("split.no", 2, &no.to_le_bytes()).raw("split.count", 2, &count.to_le_bytes())
}

/// Three parts: metadata and the embedding, a matrix, a norm.
fn parts() -> [Gguf; 3] {
    let first = Gguf::model("qwen2").raw("split.tensors.count", 5, &3i32.to_le_bytes());
    let second = Gguf::default().tensor("blk.0.ffn_up.weight", &[2, 2], 0, f32_bytes([1.0, 2.0, 3.0, 4.0]));
    let third = Gguf::default().tensor("output_norm.weight", &[2], 0, f32_bytes([5.0, 6.0]));
    [split(first, 0, 3), split(second, 1, 3), split(third, 2, 3)]
}

fn write(folder: &Folder, parts: &[Gguf]) -> Vec<PathBuf> {
    let write = |(i, part): (usize, &Gguf)| folder.write(&name(i as u32 + 1, 3), part.bytes());
    parts.iter().enumerate().map(write).collect()
}

fn error(path: &Path) -> String {
    ModelFiles::open(path).unwrap_err().to_string()
}

#[test]
fn the_identity_is_that_of_all_parts() {
    let folder = Folder::new();
    let paths = write(&folder, &parts());
    let identity = |path: &Path| ModelFiles::open(path).unwrap().identity().unwrap();
    let first = identity(&paths[0]);
    assert_eq!((identity(&paths[2]), first.lines().count()), (first.clone(), 4), "{first}");
    let time = std::fs::metadata(&paths[1]).unwrap().modified().unwrap();
    let touch =
        |time| std::fs::File::options().write(true).open(&paths[1]).unwrap().set_modified(time).unwrap();
    touch(time + std::time::Duration::from_secs(1));
    assert_ne!(identity(&paths[0]), first, "another time");
    touch(time);
    assert_eq!(identity(&paths[0]), first);
    // The same size and time, other content.
    let mut bytes = std::fs::read(&paths[1]).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&paths[1], bytes).unwrap();
    touch(time);
    assert_ne!(identity(&paths[0]), first, "other content");
}

#[test]
fn any_part_or_the_folder_opens_the_whole() {
    let folder = Folder::new();
    let mut paths = write(&folder, &parts());
    paths.push(folder.path().to_owned());
    for path in paths {
        let files = ModelFiles::open(&path).unwrap();
        let mut out = Vec::new();
        files.read_rows(UP, 1..2, 0..2, &mut out).unwrap();
        assert_eq!(out, f32_bytes([3.0, 4.0]));
        assert_eq!(files.read_vector(NORM, 0..2).unwrap(), [5.0, 6.0]);
        assert_eq!(files.config().vocab_size, 4);
        assert_eq!(files.gguf().unwrap().tokens().unwrap().len(), 4);
        assert_eq!(files.source_label(), "gguf F32, 3 files");
        files.release(UP);
        let message = files.expect_shape("absent", &[1]).unwrap_err().to_string();
        assert!(message.contains(&name(1, 3)) && message.contains(&name(3, 3)), "{message}");
    }
}

#[test]
fn a_missing_part_is_named() {
    let folder = Folder::new();
    let paths = write(&folder, &parts());
    std::fs::remove_file(&paths[1]).unwrap();
    for path in [&paths[0], &paths[2], &folder.path().to_owned()] {
        let message = error(path);
        assert!(message.contains(&name(2, 3)) && message.contains("is missing"), "{message}");
        assert!(message.contains("split.count 3"), "{message}");
    }
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    for (which, part, expected) in [
        (1, split(parts()[1].clone(), 2, 3), "split.no: expected 1, found 2"),
        (1, split(parts()[1].clone(), 1, 4), "split.count: expected 3, found 4"),
        (2, parts()[2].clone().without("split.count"), "split.count: expected 3, found absent"),
        (2, split(Gguf::default(), 2, 3), "split.tensors.count (tensors in all parts): expected 3, found 2"),
        (2, parts()[2].clone().tensor("token_embd.weight", &[1], 0, vec![0; 4]), "expected 3, found 4"),
        (
            2,
            split(parts()[1].clone(), 2, 3),
            "tensor model.layers.0.mlp.up_proj.weight: expected one description",
        ),
    ] {
        let folder = Folder::new();
        let mut all = parts();
        all[which] = part;
        let paths = write(&folder, &all);
        let message = error(&paths[0]);
        assert!(message.contains(expected), "{expected:?} not in: {message}");
    }
    let folder = Folder::new();
    let paths = write(&folder, &parts());
    std::fs::write(&paths[2], b"version https://git-lfs.github.com/spec/v1\nsize 77\n").unwrap();
    let message = error(&paths[0]);
    assert!(message.contains(&name(3, 3)) && message.contains("git-lfs pointer"), "{message}");
    let whole = parts()[1].bytes();
    std::fs::write(&paths[2], &whole[..whole.len() - 20]).unwrap();
    assert!(error(&paths[0]).contains("file length for tensor blk.0.ffn_up.weight"));
}

#[test]
fn a_part_under_another_name_says_so() {
    let folder = Folder::new();
    for other in ["model.gguf", "model-00001-of-00004.gguf"] {
        let message = error(&folder.write(other, parts()[0].bytes()));
        assert!(
            message.contains("is one of 3 parts") && message.contains("-00001-of-00003.gguf"),
            "{message}"
        );
    }
    // Two files that are not parts of one model: the user must choose.
    write(&folder, &parts());
    assert!(error(folder.path()).contains("holds 5 GGUF files"));
}

#[test]
fn links_to_parts_are_followed_by_their_names() {
    let folder = Folder::new();
    let blobs = folder.path().join("blobs");
    let links = folder.path().join("links with spaces");
    std::fs::create_dir(&blobs).unwrap();
    std::fs::create_dir(&links).unwrap();
    for (i, part) in parts().iter().enumerate() {
        let blob = blobs.join(format!("{i}"));
        std::fs::write(&blob, part.bytes()).unwrap();
        std::os::unix::fs::symlink(&blob, links.join(name(i as u32 + 1, 3))).unwrap();
    }
    let files = ModelFiles::open(&links.join(name(2, 3))).unwrap();
    assert_eq!(files.read_vector(NORM, 0..1).unwrap(), [5.0]);
}
