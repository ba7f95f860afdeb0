//! Matrices kept as codes with scales ([`CodeLayout`](lockstep_core::CodeLayout)), and products with them in integers.
//!
//! ```text
//! of each group g of 32 inputs of a row of activations:
//!   xs[g] = max|x| / 127, rounded up to three bits          xq[k] = round(x[k] * (1 / xs[g]))
//! of an output, for ascending g of a leaf, from 0:
//!   sum = fma(scale[g], xs[g] * Σ code[k]*xq[k], sum)
//!   sum = fma(base[g],  xs[g] * Σ xq[k],         sum)     where the layout has bases
//! ```
//! A scale of three bits is a power of two times 4, 5, 6 or 7 quarters. The power needs no multiplication: products are summed
//! onto the bits of a float whose last place is worth it, and what is above that float is their sum times the power, exactly. The
//! quarters go into `scale[g]`, once for many rows; that product is exact too. The time that the
//! multipliers need for many rows, the bound of that kernel, is a tenth less so. Activations are rounded at most a quarter more
//! coarsely than with scales of all bits, a tenth on average.
//!
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
