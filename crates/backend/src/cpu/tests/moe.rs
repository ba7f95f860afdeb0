//! Mixtures of experts: bit-equal to the reference whatever batch, type, team, instruction set and
//! tp size are, and close to a plain f64 mixture.

use super::reference::{self, file_bytes, softmax, stored};
use super::{Random, assert_same, backend, backends, empty, tensor};
use crate::cpu::{CpuBackend, CpuExperts, Isa};
use crate::{Backend, ExpertWeights, LinearSpec, MoeArgs, MoeShape};
use lockstep_core::DType;
use lockstep_core::config::Activation;
use lockstep_core::shard::leaf_bounds;

/// Runs some rows through experts; nothing is written beyond them. `rows_max` of the shape is made here.
pub(super) fn run_mixture(
    backend: &mut CpuBackend,
    experts: &CpuExperts,
    shape: MoeShape,
    (norm_topk_prob, activation): (bool, Activation),
    (logits, x): (&[f32], &[f32]),
) -> Vec<f32> {
    let (rows, hidden) = (x.len() / shape.hidden, shape.hidden);
    let mut work = backend.moe_workspace(MoeShape { rows_max: rows + 1, ..shape }).unwrap();
    let (logits, x) = (tensor(backend, logits, shape.num_experts), tensor(backend, x, hidden));
    let mut out = empty(backend, rows, hidden);
    let args = MoeArgs {
        router_logits: &logits,
        experts_per_token: shape.experts_per_token,
        norm_topk_prob,
        activation,
    };
    backend.moe(args, experts, &x, rows, (&mut work, &mut out));
    assert!(out.rows(rows + 1)[rows * hidden..].iter().all(|v| v.is_nan()), "wrote beyond the rows");
    out.rows(rows).to_vec()
}

/// The chosen experts of a token with their weights, by ascending expert.
pub(super) fn route(logits: &[f32], per_token: usize, normalise: bool) -> Vec<(usize, f32)> {
    let probabilities = softmax(logits);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| probabilities[b].total_cmp(&probabilities[a]).then(a.cmp(&b)));
    order.truncate(per_token);
    let sum = order.iter().fold(0.0f32, |sum, &e| sum + probabilities[e]);
    let divisor = if normalise { sum } else { 1.0 };
    order.sort_unstable();
    order.into_iter().map(|e| (e, probabilities[e] / divisor)).collect()
}

/// A layer with random experts, its weights as stored.
struct Layer {
    hidden: usize,
    inner: usize,
    per_token: usize,
    normalise: bool,
    activation: Activation,
    dtype: DType,
    /// Of each expert: gate `[inner, hidden]`, up `[inner, hidden]`, down `[hidden, inner]`.
    experts: Vec<[Vec<f32>; 3]>,
}

impl Layer {
    fn random(random: &mut Random, hidden: usize, inner: usize, experts: usize, per_token: usize) -> Self {
        let dtype = random.pick(&[DType::F32, DType::F16, DType::Bf16]);
        let matrix = |random: &mut Random| {
            random.values(hidden * inner).iter().map(|&v| stored(v, dtype)).collect::<Vec<f32>>()
        };
        Self {
            hidden,
            inner,
            per_token,
            normalise: random.below(2) == 0,
            activation: random.pick(&[Activation::Silu, Activation::GeluTanh]),
            dtype,
            experts: (0..experts).map(|_| std::array::from_fn(|_| matrix(random))).collect(),
        }
    }

    /// Packs what rank `rank` of `tp` holds.
    fn pack(&self, backend: &CpuBackend, rank: usize, tp: usize) -> CpuExperts {
        let local = self.inner / tp;
        let expert = |[gate, up, down]: &[Vec<f32>; 3]| {
            let spec = LinearSpec::single_leaf(2 * local, self.hidden, self.dtype);
            let mut gate_up = backend.linear(spec).unwrap();
            for (part, first_row) in [(gate, 0), (up, local)] {
                let rows = &part[rank * local * self.hidden..][..local * self.hidden];
                backend.pack_rows(&mut gate_up, first_row, &file_bytes(rows, self.dtype));
            }
            let mut spec = LinearSpec::single_leaf(self.hidden, local, self.dtype);
            spec.leaves = leaf_bounds(self.inner, 1, rank, tp);
            let mut packed = backend.linear(spec).unwrap();
            let columns: Vec<f32> =
                down.chunks(self.inner).flat_map(|row| row[rank * local..][..local].to_vec()).collect();
            backend.pack_rows(&mut packed, 0, &file_bytes(&columns, self.dtype));
            ExpertWeights { gate_up, down: packed }
        };
        backend.experts(self.experts.iter().map(expert).collect()).unwrap()
    }

    /// Runs some rows on rank `rank` of `tp`.
    fn run(
        &self,
        backend: &mut CpuBackend,
        (logits, x): (&[f32], &[f32]),
        rank: usize,
        tp: usize,
    ) -> Vec<f32> {
        let experts = self.pack(backend, rank, tp);
        let shape = MoeShape {
            rows_max: 0,
            num_experts: self.experts.len(),
            experts_per_token: self.per_token,
            local_inner: self.inner / tp,
            hidden: self.hidden,
        };
        run_mixture(backend, &experts, shape, (self.normalise, self.activation), (logits, x))
    }

    /// The documented formula for one token.
    fn reference(&self, logits: &[f32], x: &[f32]) -> Vec<f32> {
        let chain = |w: &[f32]| x.iter().zip(w).fold(0.0f32, |acc, (x, w)| x.mul_add(*w, acc));
        let leaves = leaf_bounds(self.inner, 1, 0, 1);
        let mut sums = vec![vec![0.0f32; self.hidden]; leaves.len() - 1];
        for (e, weight) in route(logits, self.per_token, self.normalise) {
            let [gate, up, down] = &self.experts[e];
            let rows = gate.chunks(self.hidden).zip(up.chunks(self.hidden));
            let gated: Vec<f32> =
                rows.map(|(g, u)| reference::gated(self.activation, chain(g), chain(u)) * weight).collect();
            for (sums, ends) in sums.iter_mut().zip(leaves.windows(2)) {
                for (sum, w) in sums.iter_mut().zip(down.chunks(self.inner)) {
                    *sum = (ends[0]..ends[1]).fold(*sum, |acc, k| gated[k].mul_add(w[k], acc));
                }
            }
        }
        tree(sums)
    }

    /// A plain mixture in f64.
    fn exact(&self, logits: &[f32], x: &[f32]) -> Vec<f64> {
        let max = logits.iter().fold(f64::MIN, |a, &b| a.max(b.into()));
        let exps: Vec<f64> = logits.iter().map(|&l| (f64::from(l) - max).exp()).collect();
        let chosen = route(logits, self.per_token, self.normalise);
        let total: f64 =
            if self.normalise { chosen.iter().map(|c| exps[c.0]).sum() } else { exps.iter().sum() };
        let dot = |a: &[f32]| a.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let mut out = vec![0.0; self.hidden];
        for (e, _) in chosen {
            let [gate, up, down] = &self.experts[e];
            let rows = gate.chunks(self.hidden).zip(up.chunks(self.hidden));
            let gated: Vec<f64> =
                rows.map(|(g, u)| reference::gated_f64(self.activation, dot(g), dot(u))).collect();
            for (out, w) in out.iter_mut().zip(down.chunks(self.inner)) {
                let sum: f64 = gated.iter().zip(w).map(|(g, w)| g * f64::from(*w)).sum();
                *out += exps[e] / total * sum;
            }
        }
        out
    }
}

/// ((r0+r1)+(r2+r3))+..., as leaves and ranks are joined.
pub(super) fn tree(mut parts: Vec<Vec<f32>>) -> Vec<f32> {
    while parts.len() > 1 {
        parts = parts.chunks(2).map(|p| p[0].iter().zip(&p[1]).map(|(a, b)| a + b).collect()).collect();
    }
    parts.remove(0)
}

/// Router logits; sometimes with equal ones.
fn logits(random: &mut Random, rows: usize, experts: usize) -> Vec<f32> {
    let coarse = random.below(2) == 0;
    let value = |v: f32| if coarse { (v * 4.0).round() / 4.0 } else { v * 3.0 };
    random.values(rows * experts).into_iter().map(value).collect()
}

#[test]
fn random_mixtures_are_bit_equal_to_the_reference_and_accurate() {
    let seed = 71;
    let mut random = Random(seed);
    for mut backend in backends() {
        for case in 0..6 {
            let (hidden, inner) = (1 + random.below(70), 8 * (1 + random.below(12)));
            let experts = 1 + random.below(20);
            let per_token = 1 + random.below(experts.min(4));
            let layer = Layer::random(&mut random, hidden, inner, experts, per_token);
            let rows = random.pick(&[1, 2, 5, 30, 90]);
            let (logits, x) = (logits(&mut random, rows, experts), random.values(rows * hidden));
            let what = format!(
                "seed {seed} case {case} {}: {rows} rows, {hidden}/{inner}, {per_token} of {experts}, {:?}",
                backend.describe(),
                layer.dtype
            );
            let got = layer.run(&mut backend, (&logits, &x), 0, 1);
            for ((got, logits), x) in got.chunks(hidden).zip(logits.chunks(experts)).zip(x.chunks(hidden)) {
                assert_same(got, &layer.reference(logits, x), &what);
                let exact = layer.exact(logits, x);
                let size = exact.iter().fold(1.0f64, |a, b| a.max(b.abs()));
                for (got, exact) in got.iter().zip(exact) {
                    assert!((f64::from(*got) - exact).abs() < 1e-5 * size, "{what}: {got}, want {exact}");
                }
            }
        }
    }
}

#[test]
fn a_token_has_the_same_bits_alone_and_in_batches_beyond_band_and_slab() {
    let (hidden, inner, experts) = (40, 24, 6);
    for isa in Isa::available() {
        let mut random = Random(73);
        let layer = Layer::random(&mut random, hidden, inner, experts, 2);
        let mut backend = backend(isa, 2);
        let rows = 1100;
        let (logits, x) = (logits(&mut random, rows, experts), random.values(rows * hidden));
        let whole = layer.run(&mut backend, (&logits, &x), 0, 1);
        for row in [0, 1, 255, 256, 257, 511, 512, 777, 1023, 1024, 1099] {
            let alone = (&logits[row * experts..][..experts], &x[row * hidden..][..hidden]);
            let got = layer.run(&mut backend, alone, 0, 1);
            assert_same(&got, &whole[row * hidden..][..hidden], &format!("{isa:?} row {row}"));
        }
        for count in [2, 7, 8, 9, 48, 300] {
            let part = (&logits[..count * experts], &x[..count * hidden]);
            let got = layer.run(&mut backend, part, 0, 1);
            assert_same(&got, &whole[..count * hidden], &format!("{isa:?} {count} rows"));
        }
    }
}

#[test]
fn one_expert_for_all_tokens_uses_the_widened_panel_and_keeps_the_bits() {
    let (hidden, inner, rows) = (33, 256, 130);
    let mut random = Random(79);
    let mut backend = backend(Isa::detect(), 3);
    let layer = Layer::random(&mut random, hidden, inner, 3, 1);
    let x = random.values(rows * hidden);
    let logits = [0.0, 4.0, 1.0].repeat(rows);
    let got = layer.run(&mut backend, (&logits, &x), 0, 1);
    for (got, x) in got.chunks(hidden).zip(x.chunks(hidden)) {
        assert_same(got, &layer.reference(&logits[..3], x), "row");
    }
}

#[test]
fn shards_inside_the_experts_add_up_to_the_whole_bit_for_bit() {
    let (hidden, inner, experts, rows) = (45, 8 * 13, 9, 21);
    let mut random = Random(83);
    let mut backend = backend(Isa::detect(), 2);
    let layer = Layer::random(&mut random, hidden, inner, experts, 3);
    let (logits, x) = (logits(&mut random, rows, experts), random.values(rows * hidden));
    let whole = layer.run(&mut backend, (&logits, &x), 0, 1);
    for tp in [2, 4, 8] {
        let partials = (0..tp).map(|rank| layer.run(&mut backend, (&logits, &x), rank, tp)).collect();
        assert_same(&tree(partials), &whole, &format!("tp {tp}"));
    }
}

#[test]
fn only_chosen_experts_are_read() {
    let (hidden, inner) = (20, 16);
    let mut random = Random(89);
    let mut backend = backend(Isa::detect(), 2);
    let mut layer = Layer::random(&mut random, hidden, inner, 4, 2);
    layer.dtype = DType::F32;
    layer.experts[1].iter_mut().for_each(|w| w.fill(f32::NAN));
    let logits = [1.0, -1.0, 0.5, 0.0].repeat(3);
    let got = layer.run(&mut backend, (&logits, &random.values(3 * hidden)), 0, 1);
    assert!(got.iter().all(|v| v.is_finite()));
}

#[test]
fn the_workspace_takes_the_bytes_announced() {
    let shape =
        MoeShape { rows_max: 2000, num_experts: 128, experts_per_token: 8, local_inner: 768, hidden: 2048 };
    // 512 tokens at a time: gate and up of each pair, of up to seven empty slots for each expert and band, and a
    // little for routing.
    let pairs = (512 * 8 + 128 * 2 * 7) * 2 * 768 * 4;
    let bytes = CpuBackend::moe_workspace_bytes(&shape);
    assert!((pairs..pairs + (1 << 20)).contains(&bytes), "{bytes} bytes");
    assert_eq!(CpuBackend::moe_workspace_bytes(&MoeShape { rows_max: 512, ..shape }), bytes);
}
