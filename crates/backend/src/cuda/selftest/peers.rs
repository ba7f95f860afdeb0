//! Sums and gathers over two ranks that share the GPU, against the CPU: the kernels, the protocol and its turns.
//!
//! The ranks are threads of this process, so that no other process is needed; a server's are processes.

use super::{Outcome, Probe, Random, difference};
use crate::cpu::{CpuBackend, CpuOptions};
use crate::cuda::peers::{DataPlane, PeerMode, Way};
use crate::cuda::{CudaBackend, CudaOptions, CudaTensor, OtherRanks};
use crate::{Backend, BackendError, ReduceAddNorm, Result};
use lockstep_comm::group::{Patience, ProcessGroup};
use lockstep_comm::shm::{self, ShmCollective, ShmGroup, ShmOptions};
use lockstep_comm::{Collective, OneRank};
use lockstep_core::DType;
use std::time::Duration;

/// Ranks that share the GPU.
const RANKS: usize = 2;
/// How long one waits for the other.
const PATIENCE: Duration = Duration::from_secs(20);
/// What a case has: names, and roundings to the type as in [`super::cases`]. The one rounding of a plain sum counts for
/// more: small cases have a few dozen elements, whose roundings do not always average out.
const PARTS: [(&str, f64); 5] = [
    ("sum of 2 ranks, one shot", 1.5),
    ("sum of 2 ranks, two shots", 1.5),
    ("sum and norm, one shot", 2.5),
    ("sum and norm, two shots", 3.0),
    ("gather of 2 ranks", 0.0),
];

/// Runs `cases` random cases; `on_outcome` hears of each operation.
///
/// Errors when the GPU cannot be used or fails, or when the ranks lose each other; a wrong result is an [`Outcome`].
pub fn run_shared(
    options: CudaOptions,
    seed: u64,
    cases: usize,
    on_outcome: &mut dyn FnMut(&Outcome),
) -> Result<Vec<Outcome>> {
    let shm = ShmOptions { deadline: PATIENCE, ranks_share_cores: false };
    let ends = shm::as_threads(RANKS, shm, |group, collective| {
        rank_results(options, group, &collective, seed, cases)
    })?;
    let panicked = |_| BackendError::Device {
        operation: "testing two ranks".into(),
        problem: "one of them panicked".into(),
    };
    let ranks: Result<Vec<_>> = ends.into_iter().map(|end| end.map_err(panicked)?).collect();
    let ranks = ranks?;
    let mut cpu = CpuBackend::new(CpuOptions::default())?;
    let mut outcomes: Vec<Outcome> = PARTS.iter().map(|part| outcome(*part, options.dtype, cases)).collect();
    for (case, (first, second)) in ranks[0].iter().zip(&ranks[1]).enumerate() {
        let inputs = Inputs::of(seed, case, options.dtype);
        let want = inputs.on_cpu(&mut cpu)?;
        for (part, outcome) in outcomes.iter_mut().enumerate() {
            let (got, other) = (&first[part], &second[part]);
            let is_equal = got.iter().zip(other).all(|(a, b)| a.to_bits() == b.to_bits());
            let error = if is_equal { difference(got, &want[part]) } else { f64::INFINITY };
            if error > outcome.error_max || outcome.worst.is_empty() {
                let differ = if is_equal { "" } else { ", the ranks differ" };
                outcome.error_max = error;
                outcome.worst = format!("case {case}: {}x{}{differ}", inputs.rows, inputs.cols);
            }
        }
    }
    outcomes.iter().for_each(on_outcome);
    Ok(outcomes)
}

fn outcome((operation, roundings): (&'static str, f64), dtype: DType, cases: usize) -> Outcome {
    let bound = match dtype {
        DType::Bf16 => roundings * 2e-3,
        DType::F16 => roundings * 3e-4,
        DType::F32 => 2e-5,
    };
    Outcome { operation, cases, error_max: 0.0, bound, worst: String::new() }
}

/// The numbers of one case, the same on both ranks.
struct Inputs {
    rows: usize,
    cols: usize,
    partial: [Vec<f32>; RANKS],
    residual: Vec<f32>,
    bias: Option<Vec<f32>>,
    post_norm: Option<Vec<f32>>,
    weight: Vec<f32>,
}

impl Inputs {
    fn of(seed: u64, case: usize, dtype: DType) -> Self {
        let mut random = Random { state: seed ^ (case as u64) << 32 ^ 0x5eed, dtype };
        let rows = random.pick(&[1, 1, 2, 3, 7, 16, 33, 70]);
        let cols = random.pick(&[8, 64, 576, 896, 1024, 2048, 3072]);
        let some = |random: &mut Random| random.pick(&[true, false]).then(|| random.values(cols));
        Self {
            rows,
            cols,
            partial: [random.values(rows * cols), random.values(rows * cols)],
            residual: random.values(rows * cols),
            bias: some(&mut random),
            post_norm: some(&mut random),
            weight: random.values(cols),
        }
    }

    /// What every part must come to.
    fn on_cpu(&self, cpu: &mut CpuBackend) -> Result<[Vec<f32>; PARTS.len()]> {
        let sum: Vec<f32> = self.partial[0].iter().zip(&self.partial[1]).map(|(a, b)| a + b).collect();
        let mut partial = cpu.filled(&sum, self.cols)?;
        let (mut residual, mut out) =
            (cpu.filled(&self.residual, self.cols)?, cpu.empty(self.rows, self.cols)?);
        let (bias, post_norm) = (self.optional(cpu, &self.bias)?, self.optional(cpu, &self.post_norm)?);
        let weight = cpu.vector(&self.weight)?;
        let args = ReduceAddNorm {
            bias: bias.as_ref(),
            post_norm: post_norm.as_ref(),
            norm_weight: &weight,
            norm_eps: 1e-5,
        };
        cpu.reduce_add_norm(&OneRank, args, &mut partial, (&mut residual, &mut out), self.rows)?;
        let normed = [cpu.read(&residual, self.rows)?, cpu.read(&out, self.rows)?].concat();
        Ok([sum.clone(), sum, normed.clone(), normed, self.partial.concat()])
    }

    fn optional<B: Backend>(&self, backend: &B, values: &Option<Vec<f32>>) -> Result<Option<B::Vector>> {
        values.as_deref().map(|values| backend.vector(values)).transpose()
    }
}

/// What one rank comes to, by case and part.
fn rank_results(
    options: CudaOptions,
    mut group: ShmGroup,
    collective: &ShmCollective,
    seed: u64,
    cases: usize,
) -> Result<Vec<[Vec<f32>; PARTS.len()]>> {
    let others = OtherRanks { patience: PATIENCE, rank: group.rank(), host: 0, abort: None };
    let mut gpu = CudaBackend::among(Some(others), options)?;
    gpu.connect((&mut group, 0), PeerMode::SharedGpu)?;
    let case = |case| case_on_gpu(&mut gpu, &mut group, collective, &Inputs::of(seed, case, options.dtype));
    (0..cases).map(case).collect()
}

fn case_on_gpu(
    gpu: &mut CudaBackend,
    group: &mut dyn ProcessGroup,
    collective: &dyn Collective,
    inputs: &Inputs,
) -> Result<[Vec<f32>; PARTS.len()]> {
    let (rank, rows, cols) = (group.rank(), inputs.rows, inputs.cols);
    let bytes = rows * cols * gpu.dtype.size_bytes();
    let mine = &inputs.partial[rank];
    let tensor = |gpu: &mut CudaBackend, values: &[f32]| gpu.filled(values, cols);
    let sums: [CudaTensor; 2] = [tensor(gpu, mine)?, tensor(gpu, mine)?];
    let partials: [CudaTensor; 2] = [tensor(gpu, mine)?, tensor(gpu, mine)?];
    let residuals: [CudaTensor; 2] = [tensor(gpu, &inputs.residual)?, tensor(gpu, &inputs.residual)?];
    let outs: [CudaTensor; 2] = [gpu.empty(rows, cols)?, gpu.empty(rows, cols)?];
    let gathered = gpu.empty(RANKS * rows, cols)?;
    let (bias, post_norm) = (inputs.optional(gpu, &inputs.bias)?, inputs.optional(gpu, &inputs.post_norm)?);
    let weight = gpu.vector(&inputs.weight)?;
    let args = ReduceAddNorm {
        bias: bias.as_ref(),
        post_norm: post_norm.as_ref(),
        norm_weight: &weight,
        norm_eps: 1e-5,
    };
    gpu.wait()?;
    // Memory is taken and kernels are loaded before one waits for the other: both can wait for the whole GPU.
    group.barrier(Patience::Deadline(PATIENCE))?;
    let plane = DataPlane { peers: gpu.peers.as_deref(), collective, device: &gpu.device };
    let peers = plane.peers.expect("invariant: shared GPUs are joined or an error");
    for (index, way) in [Way::OneShot, Way::TwoShot].into_iter().enumerate() {
        let sum = gpu.sum_norm(&args, (&partials[index], &residuals[index], &outs[index]), rows);
        // SAFETY: tensors and vectors have the sizes that are given.
        unsafe {
            peers.queue_sum(way, sums[index].buffer.address(), bytes);
            peers.queue_sum_norm(way, &sum);
        }
    }
    let first = &partials[0];
    // SAFETY: `gathered` has room for the parts of both ranks.
    unsafe { plane.all_gather(first.buffer.address(), gathered.buffer.address(), bytes / size_of::<u32>())? };
    let [one, two] = [0, 1].map(|index| -> Result<(Vec<f32>, Vec<f32>)> {
        let normed = [gpu.read(&residuals[index], rows)?, gpu.read(&outs[index], rows)?].concat();
        Ok((gpu.read(&sums[index], rows)?.into_owned(), normed))
    });
    let ((one, one_normed), (two, two_normed)) = (one?, two?);
    Ok([one, two, one_normed, two_normed, gpu.read(&gathered, RANKS * rows)?.into_owned()])
}
