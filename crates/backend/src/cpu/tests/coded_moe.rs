//! Mixtures whose experts are codes: bit-equal to the documented formula whatever batch, team, instruction set and tp size
//! are, with either projection as floats too.

use super::codes::{Matrix, round};
use super::moe::{route, run_mixture, tree};
use super::reference::{self, file_bytes, stored};
use super::{Random, assert_same, backend, backends};
use crate::cpu::{CpuBackend, CpuExperts, Isa, PackedLinear};
use crate::{Backend, ExpertWeights, LinearSpec, MoeShape};
use lockstep_core::config::Activation;
use lockstep_core::shard::leaf_bounds;
use lockstep_core::{CODE_GROUP, CodeLayout, DType};
use std::ops::Range;

/// A projection of an expert.
enum Projection {
    Codes(Matrix),
    /// `[out][in]` of bf16.
    Floats(Vec<f32>, usize),
}

impl Projection {
    fn random(random: &mut Random, out: usize, inputs: usize, layout: Option<CodeLayout>) -> Self {
        match layout {
            Some(layout) => Self::Codes(Matrix::random(random, out, inputs, layout, vec![0, inputs])),
            None => {
                let values = random.values(out * inputs);
                Self::Floats(values.iter().map(|&v| stored(v * 0.1, DType::Bf16)).collect(), inputs)
            }
        }
    }

    /// Packs some of its rows and columns.
    fn pack(
        &self,
        backend: &CpuBackend,
        rows: &[usize],
        columns: Range<usize>,
        leaves: Vec<usize>,
    ) -> PackedLinear {
        match self {
            Self::Codes(matrix) => matrix.part(rows, columns, leaves).pack(backend, 9),
            Self::Floats(values, inputs) => {
                let part: Vec<f32> =
                    rows.iter().flat_map(|row| values[row * inputs..][columns.clone()].to_vec()).collect();
                let mut spec = LinearSpec::single_leaf(rows.len(), columns.len(), DType::Bf16);
                spec.leaves = leaves;
                let mut linear = backend.linear(spec).unwrap();
                backend.pack_rows(&mut linear, 0, &file_bytes(&part, DType::Bf16));
                linear
            }
        }
    }

    /// Adds the products of `inputs` to the sum of a leaf: codes from 0 and then at once, floats one by one.
    fn add(&self, output: usize, x: &[f32], inputs: Range<usize>, sum: f32) -> f32 {
        match self {
            Self::Codes(matrix) => {
                let mut leaf = 0.0;
                for g in inputs.start / CODE_GROUP..inputs.end / CODE_GROUP {
                    let rounded = round(&x[g * CODE_GROUP..][..CODE_GROUP]);
                    matrix.step(&matrix.group(output, g), &rounded, &mut leaf);
                }
                if inputs.is_empty() { sum } else { sum + leaf }
            }
            Self::Floats(values, columns) => {
                inputs.fold(sum, |sum, k| x[k].mul_add(values[output * columns + k], sum))
            }
        }
    }
}

/// A layer of experts that take `hidden` to `inner` and back.
struct Layer {
    hidden: usize,
    inner: usize,
    per_token: usize,
    /// Gate over up, `[2 * inner][hidden]`, and down, `[hidden][inner]`.
    experts: Vec<[Projection; 2]>,
}

impl Layer {
    fn random(
        random: &mut Random,
        (hidden, inner): (usize, usize),
        (experts, per_token): (usize, usize),
        (gate_up, down): (Option<CodeLayout>, Option<CodeLayout>),
    ) -> Self {
        let mut expert = || {
            let gate_up = Projection::random(random, 2 * inner, hidden, gate_up);
            [gate_up, Projection::random(random, hidden, inner, down)]
        };
        Self { hidden, inner, per_token, experts: (0..experts).map(|_| expert()).collect() }
    }

    /// What rank `rank` of `tp` holds.
    fn pack(&self, backend: &CpuBackend, rank: usize, tp: usize) -> CpuExperts {
        let local = self.inner / tp;
        let own = rank * local..(rank + 1) * local;
        let gate_up: Vec<usize> = own.clone().chain(own.clone().map(|row| self.inner + row)).collect();
        let all: Vec<usize> = (0..self.hidden).collect();
        let expert = |[first, second]: &[Projection; 2]| {
            let block = if matches!(second, Projection::Codes(_)) { CODE_GROUP } else { 1 };
            ExpertWeights {
                gate_up: first.pack(backend, &gate_up, 0..self.hidden, vec![0, self.hidden]),
                down: second.pack(backend, &all, own.clone(), leaf_bounds(self.inner, block, rank, tp)),
            }
        };
        backend.experts(self.experts.iter().map(expert).collect()).unwrap()
    }

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
        run_mixture(backend, &experts, shape, (true, Activation::Silu), (logits, x))
    }

    /// The documented formula for one token.
    fn reference(&self, logits: &[f32], x: &[f32]) -> Vec<f32> {
        let block = if matches!(self.experts[0][1], Projection::Codes(_)) { CODE_GROUP } else { 1 };
        let leaves = leaf_bounds(self.inner, block, 0, 1);
        let mut sums = vec![vec![0.0f32; self.hidden]; leaves.len() - 1];
        for (e, weight) in route(logits, self.per_token, true) {
            let [gate_up, down] = &self.experts[e];
            let product = |output: usize| gate_up.add(output, x, 0..self.hidden, 0.0);
            let gated: Vec<f32> = (0..self.inner)
                .map(|i| reference::gated(Activation::Silu, product(i), product(self.inner + i)) * weight)
                .collect();
            for (sums, ends) in sums.iter_mut().zip(leaves.windows(2)) {
                for (output, sum) in sums.iter_mut().enumerate() {
                    *sum = down.add(output, &gated, ends[0]..ends[1], *sum);
                }
            }
        }
        tree(sums)
    }
}

const Q4_1: CodeLayout = CodeLayout::new(0, 15, true, false);
const Q6_K: CodeLayout = CodeLayout::new(-32, 31, false, true);
const Q8_0: CodeLayout = CodeLayout::new(-128, 127, false, false);

#[test]
fn random_mixtures_are_bit_equal_to_the_formula() {
    let seed = 61;
    let mut random = Random(seed);
    let forms = [
        (Some(Q4_1), Some(Q4_1)),
        (Some(Q4_1), Some(Q6_K)),
        (Some(Q8_0), Some(CodeLayout::new(0, 31, true, true))),
        (None, Some(Q8_0)),
        (Some(Q6_K), None),
    ];
    for mut backend in backends() {
        for (case, form) in forms.into_iter().enumerate() {
            let widths = (CODE_GROUP * (1 + random.below(3)), CODE_GROUP * (1 + random.below(9)));
            let experts = 2 + random.below(7);
            let chosen = 1 + random.below(2);
            let layer = Layer::random(&mut random, widths, (experts, chosen), form);
            let rows = random.pick(&[1, 2, 3, 9, 40]);
            let (logits, x) = (random.values(rows * experts), random.values(rows * widths.0));
            let what = format!("seed {seed} case {case} {}: {rows} rows, {widths:?}", backend.describe());
            let got = layer.run(&mut backend, (&logits, &x), 0, 1);
            let tokens = got.chunks(widths.0).zip(logits.chunks(experts)).zip(x.chunks(widths.0));
            for ((got, logits), x) in tokens {
                assert_same(got, &layer.reference(logits, x), &what);
            }
        }
    }
}

#[test]
fn a_token_has_the_same_bits_alone_and_in_batches_beyond_band_and_slab() {
    let (hidden, inner, experts) = (CODE_GROUP, 3 * CODE_GROUP, 5);
    for isa in Isa::available() {
        for form in [(Some(Q4_1), Some(Q6_K)), (None, Some(Q4_1)), (Some(Q8_0), None)] {
            let mut random = Random(67);
            let layer = Layer::random(&mut random, (hidden, inner), (experts, 2), form);
            let mut backend = backend(isa, 2);
            let rows = 780;
            let (logits, x) = (random.values(rows * experts), random.values(rows * hidden));
            let whole = layer.run(&mut backend, (&logits, &x), 0, 1);
            for row in [0, 1, 255, 256, 511, 512, 779] {
                let alone = (&logits[row * experts..][..experts], &x[row * hidden..][..hidden]);
                let got = layer.run(&mut backend, alone, 0, 1);
                assert_same(&got, &whole[row * hidden..][..hidden], &format!("{isa:?} row {row}"));
            }
            for count in [2, 7, 8, 48, 300] {
                let part = (&logits[..count * experts], &x[..count * hidden]);
                let got = layer.run(&mut backend, part, 0, 1);
                assert_same(&got, &whole[..count * hidden], &format!("{isa:?} {count} rows"));
            }
        }
    }
}

#[test]
fn inputs_beyond_the_panel_are_taken_in_parts_with_the_same_bits() {
    let (hidden, inner, experts, rows) = (CODE_GROUP, 130 * CODE_GROUP, 2, 75);
    for isa in Isa::available() {
        let mut random = Random(101);
        let layer = Layer::random(&mut random, (hidden, inner), (experts, 1), (Some(Q4_1), Some(Q6_K)));
        let mut backend = backend(isa, 2);
        let (logits, x) = (random.values(rows * experts), random.values(rows * hidden));
        let whole = layer.run(&mut backend, (&logits, &x), 0, 1);
        for row in [0, 1, 63, 64, 74] {
            let (logits, x) = (&logits[row * experts..][..experts], &x[row * hidden..][..hidden]);
            let alone = layer.run(&mut backend, (logits, x), 0, 1);
            assert_same(&alone, &whole[row * hidden..][..hidden], &format!("{isa:?} row {row}"));
        }
        assert_same(&whole[..hidden], &layer.reference(&logits[..experts], &x[..hidden]), "the first row");
    }
}

#[test]
fn shards_inside_the_experts_add_up_to_the_whole_bit_for_bit() {
    let (hidden, inner, experts, rows) = (2 * CODE_GROUP, 8 * CODE_GROUP, 6, 21);
    let mut random = Random(83);
    let mut backend = backend(Isa::detect(), 2);
    let layer = Layer::random(&mut random, (hidden, inner), (experts, 3), (Some(Q4_1), Some(Q6_K)));
    let (logits, x) = (random.values(rows * experts), random.values(rows * hidden));
    let whole = layer.run(&mut backend, (&logits, &x), 0, 1);
    for tp in [2, 4, 8] {
        let partials = (0..tp).map(|rank| layer.run(&mut backend, (&logits, &x), rank, tp)).collect();
        assert_same(&tree(partials), &whole, &format!("tp {tp}"));
    }
}
