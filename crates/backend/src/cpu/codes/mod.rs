//! Matrices kept as codes with scales ([`CodeLayout`](lockstep_core::CodeLayout)), and products with them in integers.
//!
//! ```text
//! of each group g of 32 inputs of a row of activations:
//!   xs[g] = max|x| / 127          xq[k] = round(x[k] * (127 / max|x|))
//! of an output, for ascending g of a leaf, from 0:
//!   sum = fma(scale[g], xs[g] * Σ code[k]*xq[k], sum)
//!   sum = fma(base[g],  xs[g] * Σ xq[k],         sum)     where the layout has bases
//! ```
//! The integer sums are exact, and with [`has_base`](lockstep_core::CodeLayout::has_base) and
//! [`scales`](lockstep_core::CodeLayout::scales) the float operations above are all there are, in this order; so,
//! as for floats, one row or many, on any thread and instruction set, the bits are the same. Halves with
//! scales of their own are two steps of the loop.
//!
//! Activations are rounded to 8 bits for each group as they come (as ggml and others do for such
//! weights), which is what makes products 3 to 4 times as fast as in f32 and weights a quarter as large.

mod blocks;
mod inputs;
mod kernels;
mod pack;
mod panel;

pub(super) use blocks::CodeBlocks;
pub(super) use inputs::{BLOCK_ROWS, CodedInputs, CodedRows};
pub(super) use pack::{pack_row, unpack_row};
