//! How long ways of a matrix product take, and the file that remembers the fastest from one start to the next.
//!
//! The file lies beside the compiled kernels, named by a hash of everything that its content depends on. A line is a
//! shape, its way, and after a `#` the times, for people. **Invariant:** what cannot be read counts as not timed.

use super::compile::{Source, cached_file, store};
use super::device::{Device, Event};
use super::few_rows::FewRowsWay;
use super::gemm::{Algorithm, Shape};
use super::memory::Buffer;
use super::products::Way;
use crate::Result;
use lockstep_core::DType;
use std::collections::HashMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::rc::Rc;

/// Changes with the meaning of a line.
const FORMAT: &str = "2";

/// Times what is queued, with caches that hold nothing of it: in a step weights come from memory.
pub(super) struct Stopwatch {
    start: Event,
    end: Event,
    /// Twice the second-level cache.
    flushed: Buffer,
    device: Rc<Device>,
}

impl Stopwatch {
    /// Takes the memory that flushes the cache.
    pub fn new(device: &Rc<Device>) -> Result<Self> {
        Ok(Self {
            start: Event::timed(device)?,
            end: Event::timed(device)?,
            flushed: Buffer::zeroed(device, 2 * device.l2_bytes, "timing matrix products")?,
            device: Rc::clone(device),
        })
    }

    /// Microseconds that the device takes for what `queue` queues. Waits for it.
    pub fn us(&self, queue: impl FnOnce() -> Result<()>) -> Result<f32> {
        self.flushed.fill(0)?;
        self.start.record()?;
        queue()?;
        self.end.record()?;
        self.device.wait_for(&self.end)?;
        self.end.us_since(&self.start)
    }
}

/// The fastest ways known.
pub(super) struct TimedWays {
    file: Option<PathBuf>,
    ways: HashMap<Shape, (Way, String)>,
}

impl TimedWays {
    /// Those of earlier starts.
    pub fn read(device: &Device, dtype: DType, library_version: usize) -> Self {
        let mut depends_on: Vec<String> = [Source::Gemv, Source::Skinny]
            .map(|source| source.file_name(dtype, &device.architecture()))
            .to_vec();
        depends_on.extend([FORMAT.into(), device.name.clone(), dtype.name().into()]);
        depends_on.extend([device.sm_count, library_version].map(|n| n.to_string()));
        depends_on.push(format!("{:?}", device.driver_version));
        let file = cached_file("products", "txt", &depends_on);
        let text = file.as_ref().and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
        let takes = |(shape, (way, _)): &(Shape, (Way, String))| match way {
            Way::FewRows(way) => way.takes(shape, dtype),
            Way::Library(_) => true,
        };
        Self { file, ways: text.lines().filter_map(parse).filter(takes).collect() }
    }

    /// The way of a shape, if it was timed.
    pub fn get(&self, shape: &Shape) -> Option<Way> {
        self.ways.get(shape).map(|(way, _)| *way)
    }

    /// Remembers the fastest of `times`, which are in microseconds.
    pub fn insert(&mut self, shape: Shape, fastest: Way, times: &[(f32, Way)]) {
        let mut note = String::new();
        for (us, way) in times {
            let name = match way {
                Way::FewRows(way) => name(*way),
                Way::Library(_) => LIBRARY,
            };
            write!(note, " {name} {us:.2}").expect("invariant: a string takes everything");
        }
        tracing::debug!("{shape:?} in us:{note}");
        self.ways.insert(shape, (fastest, note));
    }

    /// Writes all of them, whole.
    pub fn store(&self) {
        let Some(file) = &self.file else { return };
        let mut lines: Vec<_> = self.ways.iter().collect();
        lines.sort_by_key(|(Shape { m, n, k, bias, gated, .. }, _)| (*n, *k, *m, *bias, *gated));
        let lines: String = lines.iter().map(|(shape, (way, note))| line(shape, way, note.trim())).collect();
        if let Err(error) = store(file, lines.as_bytes()) {
            tracing::warn!("times of matrix products cannot be kept in {}: {error}", file.display());
        }
    }
}

const LIBRARY: &str = "library";

fn name(way: FewRowsWay) -> &'static str {
    match way {
        FewRowsWay::Gemv => "gemv",
        FewRowsWay::Skinny => "skinny",
    }
}

fn line(shape: &Shape, way: &Way, note: &str) -> String {
    let Shape { m, n, k, out, bias, gated } = shape;
    let way = match way {
        Way::FewRows(way) => name(*way).to_owned(),
        Way::Library(words) => {
            words.iter().fold(LIBRARY.to_owned(), |text, word| format!("{text} {word:016x}"))
        }
    };
    let bias = if *bias { "bias" } else { "plain" };
    let gated = if *gated { "gated" } else { "whole" };
    format!("{m} {n} {k} {} {bias} {gated} {way} # {note}\n", out.name())
}

fn parse(line: &str) -> Option<(Shape, (Way, String))> {
    let (line, note) = line.split_once('#')?;
    let mut words = line.split_whitespace();
    let mut number = || words.next()?.parse().ok();
    let (m, n, k) = (number()?, number()?, number()?);
    let out = words.next()?;
    let out = [DType::F32, DType::Bf16, DType::F16].into_iter().find(|dtype| dtype.name() == out)?;
    let bias = match words.next()? {
        "bias" => true,
        "plain" => false,
        _ => return None,
    };
    let gated = match words.next()? {
        "gated" => true,
        "whole" => false,
        _ => return None,
    };
    let kind = words.next()?;
    let way = if kind == LIBRARY {
        let mut algorithm: Algorithm = [0; 8];
        for word in &mut algorithm {
            *word = u64::from_str_radix(words.next()?, 16).ok()?;
        }
        Way::Library(algorithm)
    } else {
        Way::FewRows(FewRowsWay::ALL.into_iter().find(|way| name(*way) == kind)?)
    };
    words.next().is_none().then(|| (Shape { m, n, k, out, bias, gated }, (way, note.trim().to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_were_written() {
        let algorithm = [1, u64::MAX, 3, 0, 5, 6, 7, 8];
        for (way, gated) in [(Way::FewRows(FewRowsWay::Skinny), true), (Way::Library(algorithm), false)] {
            let shape = Shape { m: 32, n: 4096, k: 12_288, out: DType::Bf16, bias: true, gated };
            let line = line(&shape, &way, "skinny 9.10 library 12.70");
            let (read, (read_way, note)) = parse(line.trim_end()).unwrap();
            assert_eq!((read, read_way, note.as_str()), (shape, way, "skinny 9.10 library 12.70"));
        }
    }

    #[test]
    fn lines_that_make_no_sense_count_as_none() {
        for line in [
            "",
            "1 2 3 bf16 plain whole gemv",
            "1 2 bf16 plain whole gemv #",
            "1 2 3 q4 plain whole gemv #",
            "1 2 3 bf16 maybe whole gemv #",
            "1 2 3 bf16 plain gemv #",
            "1 2 3 bf16 plain whole magic #",
            "1 2 3 bf16 plain whole library 0 1 2 #",
            "1 2 3 bf16 plain whole gemv more #",
        ] {
            assert!(parse(line).is_none(), "{line}");
        }
    }
}
