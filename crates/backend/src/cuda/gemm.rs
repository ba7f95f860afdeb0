//! Matrix products by cuBLASLt: `y[M, N] = x[M, K] W[N, K]ᵀ`, summed in f32.
//!
//! In f32 mode products are true f32 (no TF32). **Invariant:** a shape's descriptors are made once. Which of its algorithms
//! runs is for [`Products`](super::products::Products) to say.

use super::device::Device;
use super::driver::Address;
use super::memory::Buffer;
use super::products::Bias;
use crate::{BackendError, Result};
use lockstep_comm::function_table;
use lockstep_comm::library::{Library, LibraryError};
use lockstep_core::DType;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::rc::Rc;

type Opaque = *mut c_void;

function_table! {
    /// Functions of `libcublasLt.so`; names and types as in `cublasLt.h`.
    CublasLt {
        create = c"cublasLtCreate" (*mut Opaque);
        version = c"cublasLtGetVersion" ();
        operation_create = c"cublasLtMatmulDescCreate" (*mut Opaque, c_int, c_int);
        operation_set = c"cublasLtMatmulDescSetAttribute" (Opaque, c_int, *const c_void, usize);
        layout_create = c"cublasLtMatrixLayoutCreate" (*mut Opaque, c_int, u64, u64, i64);
        preference_create = c"cublasLtMatmulPreferenceCreate" (*mut Opaque);
        preference_set = c"cublasLtMatmulPreferenceSetAttribute" (Opaque, c_int, *const c_void, usize);
        heuristic = c"cublasLtMatmulAlgoGetHeuristic"
            (Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, c_int, *mut Candidate, *mut c_int);
        matmul = c"cublasLtMatmul"
            (Opaque, Opaque, *const c_void, Address, Opaque, Address, Opaque, *const c_void, Address, Opaque,
             Address, Opaque, *const [u64; 8], Address, usize, Opaque);
    }
}

/// `cublasLtMatmulAlgo_t`: how the library runs a product; means something to the same version alone.
pub(super) type Algorithm = [u64; 8];

/// Algorithms of a shape that the library is asked for, at most.
pub(super) const ALGORITHMS_MAX: usize = 8;

fn open() -> std::result::Result<Library, LibraryError> {
    let hint = "install it with `pip install nvidia-cublas`, or set LOCKSTEP_CUDA_LIBS to its folder";
    Library::open(&["libcublasLt.so.13", "libcublasLt.so.12"], hint)
}

/// cuBLASLt's file and version.
pub(super) fn library_version() -> std::result::Result<(String, String), LibraryError> {
    let library = open()?;
    let version = version(&CublasLt::load(&library)?);
    Ok((library.file(), format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)))
}

/// The library's version, which fits an int though it is declared wider.
fn version(api: &CublasLt) -> usize {
    // SAFETY: the function takes nothing and may be called at any time.
    unsafe { (api.version)() as usize }
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Candidate {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

const COMPUTE_F32: c_int = 68;
const TRANSPOSE_A: c_int = 3;
const EPILOGUE: c_int = 7;
const BIAS_POINTER: c_int = 8;
const EPILOGUE_BIAS: c_int = 4;
const WORKSPACE_BYTES_MAX: c_int = 1;
const TRANSPOSED: c_int = 1;

/// Scratch of the library's kernels; what NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// `cudaDataType` of an element.
fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 2,
        DType::Bf16 => 14,
    }
}

/// What a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Rows of x.
    pub m: usize,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// Type of y.
    pub out: DType,
    /// Whether a bias is added.
    pub bias: bool,
    /// Whether W is n/2 rows of gates, then n/2 rows of what they gate, for an MLP whose activation follows.
    pub gated: bool,
}

struct Plan {
    operation: Opaque,
    weights: Opaque,
    input: Opaque,
    output: Opaque,
}

/// The addresses of one product.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    /// `[n, k]`.
    pub weights: Address,
    /// `[m, k]`.
    pub x: Address,
    /// `[n]`.
    pub bias: Option<Bias>,
    /// `[m, n]`; `[m, n/2]` where the way does a gated product's activation too.
    pub y: Address,
    /// The activation of a gated product, as kernels name it.
    pub activation: usize,
}

/// The library, and the plans of the shapes met so far.
pub(super) struct Gemm {
    device: Rc<Device>,
    api: CublasLt,
    handle: Opaque,
    preference: Opaque,
    workspace: Buffer,
    dtype: DType,
    plans: HashMap<Shape, Plan>,
}

impl Gemm {
    /// For matrices of `dtype`. Errors when the library is not installed.
    pub fn new(device: &Rc<Device>, dtype: DType) -> Result<Self> {
        let api = CublasLt::load(&open()?)?;
        let (mut handle, mut preference): (Opaque, Opaque) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: out-pointers are valid; the attribute is a 64-bit number of bytes.
        unsafe {
            check((api.create)(&raw mut handle), "starting cuBLASLt")?;
            check((api.preference_create)(&raw mut preference), "starting cuBLASLt")?;
            let bytes = WORKSPACE_BYTES as u64;
            let code = (api.preference_set)(preference, WORKSPACE_BYTES_MAX, (&raw const bytes).cast(), 8);
            check(code, "limiting cuBLASLt's workspace")?;
        }
        let workspace = Buffer::zeroed(device, WORKSPACE_BYTES, "the workspace of matrix products")?;
        let device = Rc::clone(device);
        Ok(Self { device, api, handle, preference, workspace, dtype, plans: HashMap::new() })
    }

    /// The library's version.
    pub fn version(&self) -> usize {
        version(&self.api)
    }

    /// Queues one product by one of the shape's algorithms.
    ///
    /// # Safety
    /// The operands are valid for `shape` and do not overlap.
    pub unsafe fn run(&mut self, shape: Shape, algorithm: &Algorithm, operands: Operands) -> Result<()> {
        self.make_plan(shape)?;
        let plan = &self.plans[&shape];
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: the plan's descriptors were made for this shape; scalars are host floats, as the
        // default pointer mode wants; the rest is the caller's promise.
        unsafe {
            if let Some(bias) = operands.bias {
                let pointer = (&raw const bias.rounded).cast();
                let code = (self.api.operation_set)(plan.operation, BIAS_POINTER, pointer, 8);
                check(code, "setting a bias")?;
            }
            let code = (self.api.matmul)(
                self.handle,
                plan.operation,
                (&raw const one).cast(),
                operands.weights,
                plan.weights,
                operands.x,
                plan.input,
                (&raw const zero).cast(),
                operands.y,
                plan.output,
                operands.y,
                plan.output,
                std::ptr::from_ref(algorithm),
                self.workspace.address(),
                WORKSPACE_BYTES,
                self.device.stream,
            );
            check(code, "a matrix product")
        }
    }

    /// At most `most` algorithms that the library has for a shape, the one that it takes for the fastest first; at
    /// least one. Panics when `most` is not in `1..=ALGORITHMS_MAX`.
    pub fn algorithms(&mut self, shape: Shape, most: usize) -> Result<Vec<Algorithm>> {
        assert!((1..=ALGORITHMS_MAX).contains(&most), "{most} algorithms");
        self.make_plan(shape)?;
        let plan = &self.plans[&shape];
        let operation = || format!("choosing an algorithm for {shape:?}");
        let mut found: c_int = 0;
        // SAFETY: descriptors are valid, and room for as many candidates as are asked for is passed; zeros are a
        // candidate.
        let candidates = unsafe {
            let mut room = [std::mem::zeroed::<Candidate>(); ALGORITHMS_MAX];
            let code = (self.api.heuristic)(
                self.handle,
                plan.operation,
                plan.weights,
                plan.input,
                plan.output,
                plan.output,
                self.preference,
                most as c_int,
                room.as_mut_ptr(),
                &raw mut found,
            );
            check(code, &operation())?;
            room
        };
        let usable = candidates[..(found.max(0) as usize).min(most)].iter().filter(|c| c.state == 0);
        let algorithms: Vec<Algorithm> = usable.map(|candidate| candidate.algorithm).collect();
        if algorithms.is_empty() {
            let problem = "cuBLASLt has none".into();
            return Err(BackendError::Device { operation: operation(), problem });
        }
        Ok(algorithms)
    }

    fn make_plan(&mut self, shape: Shape) -> Result<()> {
        if !self.plans.contains_key(&shape) {
            let plan = self.plan(shape)?;
            self.plans.insert(shape, plan);
        }
        Ok(())
    }

    /// Descriptors of a shape. In the library's column-major words: `yᵀ[N, M]` is `W` (stored `[K, N]`,
    /// transposed) times `xᵀ[K, M]`.
    fn plan(&self, shape: Shape) -> Result<Plan> {
        let Shape { m, n, k, out, bias, .. } = shape;
        let (api, null) = (&self.api, std::ptr::null_mut());
        let mut plan = Plan { operation: null, weights: null, input: null, output: null };
        let layout = |target: &mut Opaque, dtype: DType, rows: usize, columns: usize| {
            // SAFETY: the out-pointer is valid; the leading dimension is the number of rows.
            let code = unsafe {
                (api.layout_create)(target, data_type(dtype), rows as u64, columns as u64, rows as i64)
            };
            check(code, "describing a matrix")
        };
        layout(&mut plan.weights, self.dtype, k, n)?;
        layout(&mut plan.input, self.dtype, k, m)?;
        layout(&mut plan.output, out, n, m)?;
        // SAFETY: the out-pointer is valid; attributes are ints.
        unsafe {
            let code = (api.operation_create)(&raw mut plan.operation, COMPUTE_F32, data_type(DType::F32));
            check(code, "describing a product")?;
            let set = |attribute, value: &c_int| {
                let pointer = std::ptr::from_ref(value).cast();
                check((api.operation_set)(plan.operation, attribute, pointer, 4), "describing a product")
            };
            set(TRANSPOSE_A, &TRANSPOSED)?;
            if bias {
                set(EPILOGUE, &EPILOGUE_BIAS)?;
            }
        }
        Ok(plan)
    }
}

fn check(code: c_int, operation: &str) -> Result<()> {
    match code {
        0 => Ok(()),
        code => {
            Err(BackendError::Device { operation: operation.into(), problem: format!("cuBLAS error {code}") })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_candidate_is_laid_out_as_the_library_declares_it() {
        assert_eq!(size_of::<Candidate>(), 96);
        assert_eq!(std::mem::offset_of!(Candidate, state), 72);
    }
}
