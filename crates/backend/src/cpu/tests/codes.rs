//! Products with codes: bit-equal to the documented formula in every layout, shape, team and instruction set.

use super::{Random, assert_gated, assert_same, backend, backends, multiply};
use crate::cpu::{CpuBackend, Isa, PackedLinear};
use crate::{Backend, LinearSpec};
use half::f16;
use lockstep_core::shard::leaf_bounds;
use lockstep_core::{CODE_GROUP, CodeLayout, WeightType};
use std::ops::Range;

/// One of each number of bits, with and without bases and halves.
fn layouts() -> Vec<CodeLayout> {
    let ranges = [(-8, 7), (0, 15), (-16, 15), (0, 31), (-32, 31), (-128, 127)];
    let forms = [(false, false), (true, false), (false, true), (true, true)];
    ranges
        .iter()
        .flat_map(|&(low, high)| forms.map(|(base, halves)| CodeLayout::new(low, high, base, halves)))
        .collect()
}

/// A random matrix as it comes from a file, and what it means.
pub(super) struct Matrix {
    spec: LinearSpec,
    layout: CodeLayout,
    staged: Vec<u8>,
}

/// Factors and codes of one group of one output.
pub(super) struct Group {
    scales: [f32; 2],
    bases: [f32; 2],
    codes: Vec<i32>,
}

impl Matrix {
    pub(super) fn random(
        random: &mut Random,
        out: usize,
        inputs: usize,
        layout: CodeLayout,
        leaves: Vec<usize>,
    ) -> Self {
        let weight_type = WeightType::Coded(layout);
        let mut staged = Vec::new();
        for _ in 0..out * inputs / CODE_GROUP {
            for _ in 0..layout.factors() {
                staged.extend(f16::from_f32(random.value() * 0.01).to_le_bytes());
            }
            let codes =
                (0..CODE_GROUP).map(|_| (random.below(1 << layout.bits()) as i32 + layout.lowest()) as u8);
            staged.extend(codes);
        }
        Self {
            spec: LinearSpec { out_features: out, in_features: inputs, weight_type, leaves },
            layout,
            staged,
        }
    }

    /// Some of its rows, and of their columns whole groups.
    pub(super) fn part(&self, rows: &[usize], columns: Range<usize>, leaves: Vec<usize>) -> Self {
        let spec = LinearSpec {
            out_features: rows.len(),
            in_features: columns.len(),
            weight_type: self.spec.weight_type,
            leaves,
        };
        let bytes = |columns: usize| self.spec.weight_type.staged_bytes(columns);
        let columns = bytes(columns.start)..bytes(columns.end);
        let staged =
            rows.iter().flat_map(|row| self.staged[row * self.row_bytes()..][columns.clone()].to_vec());
        Self { spec, layout: self.layout, staged: staged.collect() }
    }

    fn row_bytes(&self) -> usize {
        self.spec.weight_type.staged_bytes(self.spec.in_features)
    }

    /// Packed in bands of `band` rows.
    pub(super) fn pack(&self, backend: &CpuBackend, band: usize) -> PackedLinear {
        let mut linear = backend.linear(self.spec.clone()).unwrap();
        for (i, rows) in self.staged.chunks(band * self.row_bytes()).enumerate() {
            backend.pack_rows(&mut linear, i * band, rows);
        }
        linear
    }

    pub(super) fn group(&self, output: usize, group: usize) -> Group {
        let bytes = &self.staged[output * self.row_bytes() + group * self.layout.staged_group_bytes()..];
        let factor = |index: usize| f16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f32();
        let last = self.layout.scales() - 1;
        let base =
            |half: usize| if self.layout.has_base() { factor(self.layout.scales() + half) } else { 0.0 };
        let codes = &bytes[2 * self.layout.factors()..][..CODE_GROUP];
        Group {
            scales: [factor(0), factor(last)],
            bases: [base(0), base(last)],
            codes: codes.iter().map(|code| i32::from(*code as i8)).collect(),
        }
    }

    /// The elements of a row.
    fn row(&self, output: usize) -> Vec<f32> {
        let groups = (0..self.spec.in_features / CODE_GROUP).map(|group| self.group(output, group));
        groups
            .flat_map(|g| {
                (0..CODE_GROUP).map(move |i| {
                    let half = i / (CODE_GROUP / 2);
                    g.scales[half] * g.codes[i] as f32 + g.bases[half]
                })
            })
            .collect()
    }

    /// One output for one row of activations, by the formula.
    fn product(&self, output: usize, x: &[f32], bias: f32) -> f32 {
        let rounded: Vec<(f32, Vec<i32>)> = x.chunks(CODE_GROUP).map(round).collect();
        let leaves = self.spec.leaves.windows(2).map(|ends| {
            let mut sum = 0.0f32;
            for g in ends[0] / CODE_GROUP..ends[1] / CODE_GROUP {
                self.step(&self.group(output, g), &rounded[g], &mut sum);
            }
            sum
        });
        let mut sums: Vec<f32> = leaves.collect();
        while sums.len() > 1 {
            sums = sums.chunks(2).map(|pair| pair[0] + pair[1]).collect();
        }
        sums[0] + bias
    }

    /// What one group adds.
    pub(super) fn step(&self, group: &Group, (scale, x): &(f32, Vec<i32>), sum: &mut f32) {
        let half = CODE_GROUP / 2;
        let step = CODE_GROUP / self.layout.scales();
        for part in (0..CODE_GROUP).step_by(step).map(|start| start..start + step) {
            let at = part.start / half;
            let products: i32 = part.clone().map(|i| group.codes[i] * x[i]).sum();
            *sum = group.scales[at].mul_add(scale * products as f32, *sum);
            if self.layout.has_base() {
                let inputs: i32 = x[part].iter().sum();
                *sum = group.bases[at].mul_add(scale * inputs as f32, *sum);
            }
        }
    }
}

/// A group of activations as scale and signed bytes.
pub(super) fn round(x: &[f32]) -> (f32, Vec<i32>) {
    let largest = x.iter().fold(0.0f32, |most, v| most.max(v.abs()));
    if largest < 1e-30 {
        return (0.0, vec![0; x.len()]);
    }
    let mut power = f32::MIN_POSITIVE;
    while 2.0 * power <= largest / 127.0 {
        power *= 2.0;
    }
    let parts = [1.0, 1.25, 1.5, 1.75, 2.0];
    let scale = parts.map(|part| part * power).into_iter().find(|scale| *scale >= largest / 127.0).unwrap();
    let inverse = 1.0 / scale;
    // Rounded once, as the kernels' fused operation does.
    let code = |v: &f32| (f64::from(*v) * f64::from(inverse)).round_ties_even() as i32;
    (scale, x.iter().map(code).collect())
}

#[test]
fn random_shapes_are_bit_equal_to_the_formula() {
    let seed = 31;
    let mut random = Random(seed);
    for mut backend in backends() {
        for (case, layout) in layouts().into_iter().enumerate() {
            let (rows, out) = (1 + random.below(20), 1 + random.below(90));
            let inputs = CODE_GROUP * (1 + random.below(9));
            let leaves = leaf_bounds(inputs, CODE_GROUP, 0, random.pick(&[1, 2, 4, 8]));
            let inputs = *leaves.last().unwrap();
            if inputs == 0 {
                continue;
            }
            let what = format!(
                "seed {seed} case {case} {}: {rows}x{inputs}x{out} {layout:?} {leaves:?}",
                backend.describe()
            );
            let matrix = Matrix::random(&mut random, out, inputs, layout, leaves);
            let mut x = random.values(rows * inputs);
            x[..CODE_GROUP].fill(0.0);
            let bias = (case % 3 == 0).then(|| random.values(out));
            let linear = matrix.pack(&backend, 1 + random.below(out + 8));
            let got = multiply(&mut backend, &linear, &x, bias.as_deref());
            let want: Vec<f32> = x
                .chunks(inputs)
                .flat_map(|x| {
                    let bias = |o: usize| bias.as_ref().map_or(0.0, |b| b[o]);
                    (0..out).map(|o| matrix.product(o, x, bias(o))).collect::<Vec<_>>()
                })
                .collect();
            assert_same(&got, &want, &what);
        }
    }
}

#[test]
fn gate_and_up_at_once_have_the_bits_of_one_after_the_other() {
    let mut random = Random(32);
    for mut backend in backends() {
        for layout in [CodeLayout::new(0, 15, true, false), CodeLayout::new(-16, 15, false, true)] {
            for (rows, inner, groups) in [(1, 48, 3), (5, 16, 2), (450, 80, 25), (9, 23, 1)] {
                let inputs = groups * CODE_GROUP;
                let matrix = Matrix::random(&mut random, 2 * inner, inputs, layout, vec![0, inputs]);
                let linear = matrix.pack(&backend, 2 * inner);
                let x = random.values(rows * inputs);
                let bias = random.pick(&[true, false]).then(|| random.values(2 * inner));
                let what = format!("{rows} rows of {inputs}, {inner} gates, {layout:?}");
                assert_gated(&mut backend, &linear, &x, bias.as_deref(), &what);
            }
        }
    }
}

#[test]
fn every_row_count_gives_a_row_the_same_bits_as_alone() {
    let (out, inputs) = (70, 5 * CODE_GROUP);
    for isa in Isa::available() {
        for layout in [CodeLayout::new(0, 15, true, false), CodeLayout::new(-128, 127, false, true)] {
            let mut random = Random(9);
            let mut backend = backend(isa, 2);
            let matrix = Matrix::random(&mut random, out, inputs, layout, vec![0, inputs]);
            let linear = matrix.pack(&backend, out);
            let x = random.values(200 * inputs);
            let alone: Vec<f32> =
                x.chunks(inputs).flat_map(|x| multiply(&mut backend, &linear, x, None)).collect();
            for rows in (1..=20).chain([33, 200]) {
                let got = multiply(&mut backend, &linear, &x[..rows * inputs], None);
                assert_same(&got, &alone[..rows * out], &format!("{isa:?} {layout:?} {rows} rows"));
            }
        }
    }
}

#[test]
fn inputs_beyond_the_panel_are_taken_in_parts_with_the_same_bits() {
    let (out, inputs) = (35, 700 * CODE_GROUP);
    for isa in Isa::available() {
        for layout in [CodeLayout::new(0, 15, true, false), CodeLayout::new(-32, 31, false, true)] {
            let mut random = Random(10);
            let mut backend = backend(isa, 2);
            let leaves = leaf_bounds(inputs, CODE_GROUP, 0, 1);
            let matrix = Matrix::random(&mut random, out, inputs, layout, leaves);
            let linear = matrix.pack(&backend, out);
            let x = random.values(10 * inputs);
            let got = multiply(&mut backend, &linear, &x, None);
            let alone: Vec<f32> =
                x.chunks(inputs).flat_map(|x| multiply(&mut backend, &linear, x, None)).collect();
            assert_same(&got, &alone, &format!("{isa:?} {layout:?}"));
            assert_eq!(got[out - 1].to_bits(), matrix.product(out - 1, &x[..inputs], 0.0).to_bits());
        }
    }
}

#[test]
fn rows_come_back_as_they_went_in() {
    let mut random = Random(4);
    let (out, inputs) = (37, 4 * CODE_GROUP);
    for layout in layouts() {
        let mut backend = backend(Isa::detect(), 2);
        let matrix = Matrix::random(&mut random, out, inputs, layout, vec![0, inputs]);
        let linear = matrix.pack(&backend, 11);
        let ids: Vec<u32> = (0..out as u32).collect();
        let mut rows = backend.tensor(out, inputs).unwrap();
        backend.embed(&linear, 0, &ids, &mut rows);
        for row in 0..out {
            assert_same(&rows.rows(out)[row * inputs..][..inputs], &matrix.row(row), &format!("{layout:?}"));
        }
    }
}

/// A backend of each instruction set with a matrix of two groups of inputs in each form, and what they are.
fn two_groups(random: &mut Random) -> Vec<(CpuBackend, Matrix, String)> {
    let forms = [(false, false), (true, false), (false, true), (true, true)];
    let mut all = Vec::new();
    for isa in Isa::available() {
        for (base, halves) in forms {
            let layout = CodeLayout::new(-8, 7, base, halves);
            let matrix = Matrix::random(random, 20, 2 * CODE_GROUP, layout, vec![0, 2 * CODE_GROUP]);
            all.push((backend(isa, 1), matrix, format!("{isa:?} {layout:?}")));
        }
    }
    all
}

#[test]
fn what_is_not_finite_shows_in_its_row_and_only_there() {
    let mut random = Random(6);
    // NaN of the largest bits, on which integers are summed all the same; and what is too large.
    let nans = [f32::NAN, f32::from_bits(0x7fff_ffff), f32::from_bits(0xffff_ffff)];
    let large = [f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 2.0f32.powi(112), -2.0f32.powi(112)];
    for (mut backend, matrix, what) in two_groups(&mut random) {
        let linear = matrix.pack(&backend, 20);
        for bad in nans.into_iter().chain(large) {
            for (rows, row) in [(1, 0), (9, 3), (9, 8)] {
                let mut x = random.values(rows * 2 * CODE_GROUP);
                let good = multiply(&mut backend, &linear, &x, None);
                x[row * 2 * CODE_GROUP + 40] = bad;
                let got = multiply(&mut backend, &linear, &x, None);
                for (index, (got, good)) in got.chunks(20).zip(good.chunks(20)).enumerate() {
                    let what = format!("{what}: {bad:e} in row {row} of {rows}, row {index}");
                    if index == row {
                        assert!(got.iter().all(|v| v.is_nan()), "{what}: {got:?}");
                    } else {
                        assert_same(got, good, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn tiny_groups_count_as_zero_and_scales_are_rounded_up_at_their_borders() {
    let mut random = Random(7);
    for (mut backend, matrix, what) in two_groups(&mut random) {
        let linear = matrix.pack(&backend, 20);
        let mut x = random.values(9 * 2 * CODE_GROUP);
        let mut tiny = x.clone();
        for row in x.chunks_mut(2 * CODE_GROUP) {
            row[..CODE_GROUP].fill(0.0);
        }
        for row in tiny.chunks_mut(2 * CODE_GROUP) {
            row[..CODE_GROUP].iter_mut().for_each(|v| *v *= 1e-31);
        }
        let want = multiply(&mut backend, &linear, &x, None);
        assert_same(&multiply(&mut backend, &linear, &tiny, None), &want, &what);
        for power in [-90, -1, 0, 7, 100] {
            for part in [1.0, 1.25, 1.5, 1.75f32] {
                let border = 127.0 * part * 2.0f32.powi(power);
                let mut x = random.values(9 * 2 * CODE_GROUP);
                x.iter_mut().for_each(|v| *v *= border / 2.0);
                for (row, x) in x.chunks_mut(2 * CODE_GROUP).enumerate() {
                    // It is the largest of its group, whose others are up to a half of it.
                    x[5] = [border, border.next_up(), -border.next_down()][row % 3];
                    x[40] = -x[5];
                }
                let got = multiply(&mut backend, &linear, &x, None);
                let want: Vec<f32> = x
                    .chunks(2 * CODE_GROUP)
                    .flat_map(|x| (0..20).map(|output| matrix.product(output, x, 0.0)))
                    .collect();
                assert_same(&got, &want, &format!("{what}: {part} * 2^{power}"));
            }
        }
    }
}
