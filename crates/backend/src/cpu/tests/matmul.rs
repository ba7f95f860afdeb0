//! The matrix product: bit-equal to the reference in every shape, type, team and instruction set.

use super::reference::{file_bytes, product, stored};
use super::{Random, assert_gated, assert_same, backend, backends, empty, multiply};
use crate::cpu::{CpuBackend, Isa, PackedLinear};
use crate::{Backend, LinearSpec};
use lockstep_core::DType;
use lockstep_core::shard::leaf_bounds;

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

/// A random matrix with its values as stored.
struct Matrix {
    spec: LinearSpec,
    values: Vec<f32>,
}

impl Matrix {
    fn random(random: &mut Random, out: usize, inputs: usize, dtype: DType, leaves: usize) -> Self {
        let leaves = (0..=leaves).map(|i| i * inputs / leaves).collect();
        let values = (0..out * inputs).map(|_| stored(random.value(), dtype)).collect();
        let spec = LinearSpec { out_features: out, in_features: inputs, weight_type: dtype.into(), leaves };
        Self { spec, values }
    }

    /// Packed in bands of `band` rows.
    fn pack(&self, backend: &CpuBackend, band: usize) -> PackedLinear {
        let mut linear = backend.linear(self.spec.clone()).unwrap();
        let chunk = band * self.spec.in_features.max(1);
        for (i, rows) in self.values.chunks(chunk).enumerate() {
            backend.pack_rows(&mut linear, i * band, &file_bytes(rows, self.spec.weight_type.as_float()));
        }
        linear
    }

    /// The reference result for every row of `x`.
    fn times(&self, x: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        let inputs = self.spec.in_features;
        let row = |x: &[f32]| -> Vec<f32> {
            let one = |o: usize| {
                let w = &self.values[o * inputs..(o + 1) * inputs];
                product(x, w, &self.spec.leaves, bias.map(|b| b[o]))
            };
            (0..self.spec.out_features).map(one).collect()
        };
        x.chunks(inputs).flat_map(row).collect()
    }
}

#[test]
fn random_shapes_are_bit_equal_to_the_reference() {
    let seed = 11;
    let mut random = Random(seed);
    for mut backend in backends() {
        for case in 0..24 {
            let rows = 1 + random.below(70);
            let (out, inputs) = (1 + random.below(90), 1 + random.below(430));
            let (dtype, leaves) = (random.pick(&DTYPES), random.pick(&[1, 2, 4, 8]));
            let what = format!(
                "seed {seed} case {case} {}: {rows}x{inputs}x{out} {dtype:?} {leaves} leaves",
                backend.describe()
            );
            let matrix = Matrix::random(&mut random, out, inputs, dtype, leaves);
            let x = random.values(rows * inputs);
            let bias = (case % 3 == 0).then(|| random.values(out));
            let linear = matrix.pack(&backend, 1 + random.below(out + 8));
            let got = multiply(&mut backend, &linear, &x, bias.as_deref());
            assert_same(&got, &matrix.times(&x, bias.as_deref()), &what);
        }
    }
}

#[test]
fn gate_and_up_at_once_have_the_bits_of_one_after_the_other() {
    let mut random = Random(31);
    for mut backend in backends() {
        // Halves of whole tiles and not, few rows and more than one band has.
        for (rows, inner, inputs) in [(1, 16, 70), (7, 112, 33), (450, 80, 210), (9, 23, 40), (64, 7, 16)] {
            let dtype = random.pick(&DTYPES);
            let matrix = Matrix::random(&mut random, 2 * inner, inputs, dtype, 1);
            let linear = matrix.pack(&backend, 2 * inner);
            let x = random.values(rows * inputs);
            let bias = random.pick(&[true, false]).then(|| random.values(2 * inner));
            let what = format!("{rows} rows of {inputs}, {inner} gates, {dtype:?}");
            assert_gated(&mut backend, &linear, &x, bias.as_deref(), &what);
        }
    }
}

#[test]
fn every_row_count_gives_a_row_the_same_bits_as_alone() {
    for isa in Isa::available() {
        for dtype in DTYPES {
            let mut random = Random(7);
            let matrix = Matrix::random(&mut random, 100, 229, dtype, 4);
            let mut backend = backend(isa, 2);
            let linear = matrix.pack(&backend, 100);
            let x = random.values(230 * 229);
            let alone: Vec<f32> =
                x.chunks(229).flat_map(|x| multiply(&mut backend, &linear, x, None)).collect();
            for rows in (1..=20).chain([33, 64, 70, 193, 230]) {
                let got = multiply(&mut backend, &linear, &x[..rows * 229], None);
                assert_same(&got, &alone[..rows * 100], &format!("{isa:?} {dtype:?} {rows} rows"));
            }
        }
    }
}

#[test]
fn inputs_beyond_the_panel_are_taken_in_parts_with_the_same_bits() {
    let (rows, inputs, out) = (20, 6_400, 19);
    for isa in Isa::available() {
        for (dtype, leaves) in [(DType::Bf16, 1), (DType::F32, 8), (DType::F16, 4)] {
            let mut random = Random(13);
            let matrix = Matrix::random(&mut random, out, inputs, dtype, leaves);
            let mut backend = backend(isa, 2);
            let linear = matrix.pack(&backend, out);
            let x = random.values(rows * inputs);
            let got = multiply(&mut backend, &linear, &x, None);
            assert_same(&got, &matrix.times(&x, None), &format!("{isa:?} {dtype:?} {leaves} leaves"));
        }
    }
}

#[test]
fn shards_of_a_row_parallel_matrix_add_up_to_the_whole_bit_for_bit() {
    let (inputs, out, rows) = (8 * 37, 45, 5);
    let mut random = Random(3);
    let mut backend = backend(Isa::detect(), 2);
    let mut whole = Matrix::random(&mut random, out, inputs, DType::Bf16, 1);
    whole.spec.leaves = leaf_bounds(inputs, 1, 0, 1);
    let x = random.values(rows * inputs);
    let linear = whole.pack(&backend, out);
    let want = multiply(&mut backend, &linear, &x, None);
    for tp in [2, 4, 8] {
        let local = inputs / tp;
        let columns = |data: &[f32], rank: usize| -> Vec<f32> {
            data.chunks(inputs).flat_map(|row| row[rank * local..(rank + 1) * local].to_vec()).collect()
        };
        let mut partials: Vec<Vec<f32>> = (0..tp)
            .map(|rank| {
                let spec = LinearSpec {
                    in_features: local,
                    leaves: leaf_bounds(inputs, 1, rank, tp),
                    ..whole.spec.clone()
                };
                let shard = Matrix { spec, values: columns(&whole.values, rank) };
                let linear = shard.pack(&backend, 7);
                multiply(&mut backend, &linear, &columns(&x, rank), None)
            })
            .collect();
        // What the collective does: ((r0+r1)+(r2+r3))+...
        while partials.len() > 1 {
            partials =
                partials.chunks(2).map(|p| p[0].iter().zip(&p[1]).map(|(a, b)| a + b).collect()).collect();
        }
        assert_same(&partials[0], &want, &format!("tp {tp}"));
    }
}

#[test]
fn products_are_accurate() {
    let mut random = Random(19);
    let mut backend = backend(Isa::detect(), 1);
    let matrix = Matrix::random(&mut random, 33, 2048, DType::F32, 8);
    let x = random.values(2048);
    let linear = matrix.pack(&backend, 33);
    for (got, w) in multiply(&mut backend, &linear, &x, None).iter().zip(matrix.values.chunks(2048)) {
        let want: f64 = x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        assert!((f64::from(*got) - want).abs() < 2e-5, "got {got}, want {want}");
    }
}

#[test]
fn special_values_follow_ieee_and_leave_other_outputs_alone() {
    for mut backend in backends() {
        let spec = LinearSpec::single_leaf(18, 3, DType::F32);
        let mut values = vec![1.0f32; 18 * 3];
        (values[0], values[4], values[9]) = (f32::INFINITY, f32::NAN, -0.0);
        let linear = Matrix { spec, values }.pack(&backend, 18);
        let got = multiply(&mut backend, &linear, &[1.0, 2.0, 3.0], None);
        assert!(got[0] == f32::INFINITY && got[1].is_nan() && got[3] == 5.0);
        assert!(got[4..].iter().all(|&v| v == 6.0));
    }
}

#[test]
fn embedding_reads_rows_of_the_packed_table_and_zero_elsewhere() {
    for dtype in DTYPES {
        let mut random = Random(5);
        for mut backend in [backend(Isa::Portable, 1), backend(Isa::detect(), 3)] {
            let matrix = Matrix::random(&mut random, 37, 45, dtype, 1);
            let table = matrix.pack(&backend, 16);
            let ids: Vec<u32> = (0..500).map(|_| 90 + random.below(60) as u32).collect();
            let mut out = empty(&backend, ids.len(), 45);
            backend.embed(&table, 100, &ids, &mut out);
            for (&id, got) in ids.iter().zip(out.rows(ids.len()).chunks(45)) {
                match (100..137).contains(&id) {
                    true => assert_same(got, &matrix.values[(id as usize - 100) * 45..][..45], "row"),
                    false => assert_same(got, &[0.0; 45], "id of another rank"),
                }
            }
        }
    }
}
