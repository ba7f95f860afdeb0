//! Times sums over the ranks, each way, as a captured graph repeats them; for `lockstep bench comm`.

use super::peers::{DataPlane, Way};
use super::recording::CudaRecording;
use super::{CudaBackend, CudaTensor, CudaVector};
use crate::{Backend, BackendError, ReduceAddNorm, Result};
use lockstep_comm::collective::Collective;
use lockstep_comm::group::{Patience, ProcessGroup};
use std::rc::Rc;
use std::time::Instant;

/// Sums of one graph, for messages up to [`LARGE_BYTES`] and beyond.
const SUMS: [usize; 2] = [100, 20];
/// From here on a sum takes long enough to be timed in few repetitions.
const LARGE_BYTES: usize = 4 << 20;
/// Replays that are timed together; the best of [`ROUNDS`] counts.
const REPLAYS: usize = 5;
const ROUNDS: usize = 5;
/// Elements of which the sum is compared with the exact one.
const CHECKED: usize = 1 << 16;

/// What is summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumSize {
    /// Rows (tokens).
    pub rows: usize,
    /// Columns (hidden size).
    pub cols: usize,
    /// With the residual add and the norm that end a half layer.
    pub with_norm: bool,
}

/// What one size came to on this rank.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Bytes of one rank's part.
    pub bytes: usize,
    /// Microseconds in one shot, in two shots, by NCCL; `None` where that way is not to be had.
    pub micros: [Option<f64>; 3],
    /// Whether every way gave the same bits on all ranks.
    pub is_equal: bool,
    /// Largest `|got - want| / |want|` of a way.
    pub error_max: f64,
}

/// One sum and how it is formed.
#[derive(Clone, Copy)]
struct Sum<'a> {
    collective: &'a dyn Collective,
    size: SumSize,
    way: Way,
}

/// The tensors of one size.
struct Tensors {
    partial: CudaTensor,
    residual: CudaTensor,
    out: CudaTensor,
    weight: CudaVector,
}

impl CudaBackend {
    /// Sums by every way there is and times it. **Collective: all ranks of the TP group, with the same sizes.**
    pub fn time_sums(
        &mut self,
        collective: &dyn Collective,
        group: &mut dyn ProcessGroup,
        size: SumSize,
    ) -> Result<Sample> {
        let SumSize { rows, cols, with_norm } = size;
        let mut tensors = Tensors {
            partial: self.tensor(rows, cols)?,
            residual: self.tensor(if with_norm { rows } else { 1 }, cols)?,
            out: self.tensor(if with_norm { rows } else { 1 }, cols)?,
            weight: self.vector(&vec![1.0; cols])?,
        };
        let bytes = rows * cols * self.dtype.size_bytes();
        let mut sample = Sample { bytes, micros: [None; 3], is_equal: true, error_max: 0.0 };
        for (index, way) in [Way::OneShot, Way::TwoShot, Way::Library].into_iter().enumerate() {
            let is_there = match (&self.peers, way) {
                (None, way) => way == Way::Library,
                (Some(peers), Way::Library) => peers.has_library(),
                (Some(peers), _) => !with_norm || peers.takes_rows(cols),
            };
            if is_there {
                let sum = Sum { collective, size, way };
                let (is_equal, error) = self.check_way(sum, group, &mut tensors)?;
                sample.is_equal &= is_equal;
                sample.error_max = sample.error_max.max(error);
                sample.micros[index] = Some(self.time_way(sum, group, &mut tensors)?);
            }
        }
        Ok(sample)
    }

    /// Queues one sum of `tensors`.
    fn queue_way(&self, Sum { collective, size, way }: Sum<'_>, tensors: &Tensors) -> Result<()> {
        let Tensors { partial, residual, out, weight } = tensors;
        let args = ReduceAddNorm { bias: None, post_norm: None, norm_weight: weight, norm_eps: 1e-6 };
        let peers = self.peers.as_deref().filter(|_| way != Way::Library);
        match (peers, size.with_norm) {
            (Some(peers), true) => {
                // SAFETY: `sum_norm` checks the tensors.
                unsafe {
                    peers.queue_sum_norm(way, &self.sum_norm(&args, (partial, residual, out), size.rows));
                };
            }
            (Some(peers), false) => {
                // SAFETY: the tensor holds as many bytes.
                unsafe { peers.queue_sum(way, partial.buffer.address(), partial.bytes(size.rows)) };
            }
            (None, with_norm) => {
                let plane = DataPlane { peers: None, collective, device: &self.device };
                // SAFETY: the tensor holds as many elements.
                unsafe { plane.all_reduce(partial.buffer.address(), size.rows * size.cols, self.dtype)? };
                if with_norm {
                    self.add_norm(&self.sum_norm(&args, (partial, residual, out), size.rows));
                }
            }
        }
        self.device.report()
    }

    /// Sums known values once; gives whether all ranks have the same bits, and the error.
    fn check_way(
        &mut self,
        sum: Sum<'_>,
        group: &mut dyn ProcessGroup,
        tensors: &mut Tensors,
    ) -> Result<(bool, f64)> {
        let Sum { collective, size, .. } = sum;
        let count = size.rows * size.cols;
        let mine: Vec<f32> = (0..count).map(|i| value(collective.rank(), i)).collect();
        self.write(&mut tensors.partial, &mine)?;
        if size.with_norm {
            self.write(&mut tensors.residual, &vec![0.0; count])?;
        }
        self.wait()?;
        group.barrier(Patience::Idle)?;
        self.queue_way(sum, tensors)?;
        let sums = if size.with_norm { &tensors.residual } else { &tensors.partial };
        let sums = self.read(sums, size.rows)?.into_owned();
        let mut hash = hash_of(&sums);
        if size.with_norm {
            hash ^= hash_of(&self.read(&tensors.out, size.rows)?).rotate_left(1);
        }
        let mut all = vec![0u8; 8 * group.size()];
        group.all_gather(&hash.to_le_bytes(), &mut all, Patience::Idle)?;
        let is_equal = all.chunks_exact(8).all(|other| *other == hash.to_le_bytes());
        let want = |i: usize| (0..collective.size()).map(|rank| f64::from(value(rank, i))).sum::<f64>();
        let (mut apart, mut length) = (0.0, 0.0);
        for (i, sum) in sums.iter().enumerate().take(CHECKED) {
            apart += (f64::from(*sum) - want(i)).powi(2);
            length += want(i).powi(2);
        }
        let error = if apart.is_finite() { (apart / length).sqrt() } else { f64::INFINITY };
        Ok((is_equal, error))
    }

    /// Microseconds of a sum of zeros, which stay zeros however often they are summed.
    fn time_way(&mut self, sum: Sum<'_>, group: &mut dyn ProcessGroup, tensors: &mut Tensors) -> Result<f64> {
        let size = sum.size;
        let zeros = vec![0.0; size.rows * size.cols];
        self.write(&mut tensors.partial, &zeros)?;
        self.wait()?;
        let sums = SUMS[usize::from(tensors.partial.bytes(size.rows) > LARGE_BYTES)];
        let device = Rc::clone(&self.device);
        let recording =
            CudaRecording::of(&device, || (0..sums).try_for_each(|_| self.queue_way(sum, tensors)))?;
        let mut best = f64::INFINITY;
        for round in 0..=ROUNDS {
            group.barrier(Patience::Idle)?;
            let started = Instant::now();
            (0..REPLAYS).try_for_each(|_| recording.replay())?;
            self.wait()?;
            // The first one meets everything for the first time.
            if round > 0 {
                best = best.min(started.elapsed().as_secs_f64() * 1e6 / (REPLAYS * sums) as f64);
            }
        }
        Ok::<f64, BackendError>(best)
    }
}

/// Element `i` of rank `rank`'s part: exact in every type, and different for each rank.
fn value(rank: usize, i: usize) -> f32 {
    ((i * 31 + rank * 17) % 127) as f32 / 64.0 - 1.0
}

/// FNV-1a over the bits.
fn hash_of(values: &[f32]) -> u64 {
    values.iter().fold(0xcbf2_9ce4_8422_2325, |hash, value| {
        (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
