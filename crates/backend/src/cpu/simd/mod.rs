//! Sixteen lanes of f32 or of four bytes: AVX-512 (with or without VNNI), AVX2+FMA, NEON (with or without products of
//! bytes in one instruction), portable Rust.
//!
//! A kernel is written once as a [`Kernel`] over [`Simd`]; [`Isa::run`] enters it under the target
//! features of the instruction set chosen at run time.
//!
//! **Invariant:** every [`Simd`] operation gives the same bits in every implementation. Arithmetic
//! is IEEE single precision with fused multiply-add; reductions use one fixed tree: lane `i` plus
//! lane `i+8`, then `i+4`, `i+2`, `i+1`. So the portable form is the definition of every result.
//!
//! Called by the kernels beside this folder only.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

pub(super) use portable::Portable;

/// Lanes of [`Simd::V`], and outputs of one weight tile.
pub(super) const LANES: usize = 16;

/// Instruction set of the kernels. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512Vnni,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX2, FMA and F16C.
    Avx2,
    /// NEON and `i8mm`.
    NeonI8mm,
    /// NEON and `dotprod`.
    NeonDot,
    /// NEON alone.
    Neon,
    /// Plain Rust, for every architecture.
    Portable,
}

impl Isa {
    /// The fastest one of this machine.
    pub fn detect() -> Self {
        *Self::available().first().expect("invariant: portable code runs everywhere")
    }

    /// Those that this machine can run, fastest first.
    pub fn available() -> Vec<Self> {
        let all =
            [Isa::Avx512Vnni, Isa::Avx512, Isa::Avx2, Isa::NeonI8mm, Isa::NeonDot, Isa::Neon, Isa::Portable];
        all.into_iter().filter(|isa| isa.is_supported()).collect()
    }

    /// Whether this machine can run it.
    pub fn is_supported(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Isa::Avx512.is_supported() && is_x86_feature_detected!("avx512vnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && Isa::Avx2.is_supported()
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx512Vnni | Isa::Avx512 | Isa::Avx2 => false,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => Isa::Neon.is_supported() && std::arch::is_aarch64_feature_detected!("i8mm"),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => Isa::Neon.is_supported() && std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(not(target_arch = "aarch64"))]
            Isa::NeonI8mm | Isa::NeonDot | Isa::Neon => false,
            Isa::Portable => true,
        }
    }

    /// The name in logs and `/server_info`.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Avx512Vnni => "avx512-vnni",
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::NeonI8mm => "neon-i8mm",
            Isa::NeonDot => "neon-dotprod",
            Isa::Neon => "neon",
            Isa::Portable => "portable",
        }
    }

    /// Accumulators of 16 lanes that a register-blocked kernel can hold; see [`Simd::ACCUMULATORS`].
    pub(super) const fn accumulators(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni | Isa::Avx512 => avx512::Avx512::<false>::ACCUMULATORS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::Avx2::ACCUMULATORS,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm | Isa::NeonDot | Isa::Neon => neon::Neon::<{ neon::WIDEN }>::ACCUMULATORS,
            _ => Portable::ACCUMULATORS,
        }
    }

    /// Runs `kernel` under this instruction set.
    ///
    /// # Safety
    /// `self.is_supported()` on this machine, and the kernel's own contract holds.
    #[inline]
    pub(super) unsafe fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: the caller promises that the machine has the features and that the kernel's
        // arguments are valid.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Vnni => avx512::enter_vnni(kernel),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => avx512::enter(kernel),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::enter(kernel),
                #[cfg(target_arch = "aarch64")]
                Isa::NeonI8mm => neon::enter_i8mm(kernel),
                #[cfg(target_arch = "aarch64")]
                Isa::NeonDot => neon::enter_dotprod(kernel),
                #[cfg(target_arch = "aarch64")]
                Isa::Neon => neon::enter(kernel),
                _ => kernel.run::<Portable>(),
            }
        }
    }
}

/// A piece of work over raw memory, generic over the instruction set. Its fields are the arguments.
pub(super) trait Kernel: Copy {
    /// What it returns.
    type Output;

    /// The work. Implementations are `#[inline(always)]`, so that the vector operations end up in
    /// a function that has the target features.
    ///
    /// # Safety
    /// The pointers and lengths of the fields are valid as the type documents, and the machine
    /// supports `S`.
    unsafe fn run<S: Simd>(self) -> Self::Output;
}

/// Operations on 16 lanes: floats, and bytes multiplied into integers.
///
/// # Safety
/// Every method requires that the machine supports the instruction set; those that take a pointer
/// require it valid for 16 elements (`n` for the `_partial` forms; nothing beyond is touched). No
/// alignment is required.
pub(super) trait Simd: Copy + 'static {
    /// Sixteen lanes.
    type V: Copy;

    /// How many accumulators fit into the registers beside the operands.
    const ACCUMULATORS: usize;

    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self::V;
    /// Lane `i` = `p[i]`.
    unsafe fn load(p: *const f32) -> Self::V;
    /// Lanes from `n` on are zero.
    unsafe fn load_partial(p: *const f32, n: usize) -> Self::V;
    /// Widened exactly.
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    /// Widened exactly.
    unsafe fn load_f16(p: *const u16) -> Self::V;
    /// `p[i]` = lane `i`.
    unsafe fn store(p: *mut f32, v: Self::V);
    /// Lanes from `n` on are dropped.
    unsafe fn store_partial(p: *mut f32, v: Self::V, n: usize);
    /// `a + b`.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b`, so `b` when either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? a : b`, so `b` when either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `2^(n-1)` of lanes that hold `1.5 * 2^23 + n`, `-125 <= n <= 128`; see [`super::exp`].
    unsafe fn exponent(v: Self::V) -> Self::V;
    /// `x < limit ? 0 : v`.
    unsafe fn zero_below(v: Self::V, x: Self::V, limit: Self::V) -> Self::V;
    /// Lanes from `n` on replaced by those of `fill`.
    unsafe fn keep_first(v: Self::V, n: usize, fill: Self::V) -> Self::V;
    /// Sum of the lanes by the fixed tree.
    unsafe fn sum(v: Self::V) -> f32;
    /// Largest lane, by the same tree with [`Simd::max`].
    unsafe fn largest(v: Self::V) -> f32;
    /// Lane `i` = [`Simd::sum`] of `v[i]`.
    unsafe fn sums(v: [Self::V; LANES]) -> Self::V;
    /// Lane `j` of `v[i]` and lane `i` of `v[j]` change places.
    unsafe fn transpose(v: [Self::V; LANES]) -> [Self::V; LANES];
    /// Hints that the cache line of `p` is needed soon; `p` need not be valid.
    unsafe fn prefetch(p: *const u8);
    /// The same for the second-level cache, for what is needed later than what the first level holds.
    unsafe fn prefetch_far(p: *const u8);

    /// Sixteen 32-bit integers, or 64 bytes: lane `i` is bytes `4i..4i + 4`.
    type I: Copy;

    /// All lanes `x`.
    unsafe fn splat_i32(x: i32) -> Self::I;
    /// The 64 bytes at `p`.
    unsafe fn load_bytes(p: *const u8) -> Self::I;
    /// Writes all bytes to `p`.
    unsafe fn store_bytes(p: *mut u8, v: Self::I);
    /// The lowest byte of each lane's bits, in order, to `p`.
    unsafe fn store_low_bytes(p: *mut i8, v: Self::V);
    /// Each byte shifted right by `RIGHT` (left if negative, -7..=7), then `& mask`. The mask leaves out the bits
    /// that come from the neighbouring byte.
    unsafe fn field<const RIGHT: i32>(v: Self::I, mask: u8) -> Self::I;
    /// Bitwise.
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    /// Lane `i` of `acc` plus the sum over `j` of the unsigned byte `4i + j` of `codes` times the signed byte `4i + j` of
    /// `x`. Exact. With `NARROW` the codes are below 64.
    unsafe fn dot<const NARROW: bool>(acc: Self::I, codes: Self::I, x: Self::I) -> Self::I;
    /// The bits of each integer as those of a float.
    unsafe fn as_floats(v: Self::I) -> Self::V;
}

/// Elements `i..i+16` of `p[..len]`, zero beyond `len`.
///
/// # Safety
/// `p` is valid for `len` elements, `i < len`, and the machine supports `S`.
#[inline(always)]
pub(super) unsafe fn load_at<S: Simd>(p: *const f32, i: usize, len: usize) -> S::V {
    // SAFETY: passed on to the caller.
    unsafe { if i + LANES <= len { S::load(p.add(i)) } else { S::load_partial(p.add(i), len - i) } }
}

/// Writes `v` to elements `i..i+16` of `p[..len]`, dropping what is beyond `len`.
///
/// # Safety
/// `p` is valid for `len` elements, `i < len`, and the machine supports `S`.
#[inline(always)]
pub(super) unsafe fn store_at<S: Simd>(p: *mut f32, i: usize, len: usize, v: S::V) {
    // SAFETY: passed on to the caller.
    unsafe { if i + LANES <= len { S::store(p.add(i), v) } else { S::store_partial(p.add(i), v, len - i) } }
}
