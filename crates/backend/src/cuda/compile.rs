//! Kernel sources to machine code: NVRTC when they are needed first, a cache on disk afterwards.
//!
//! The cache is keyed by a hash of source, options and architecture, so that a new version never meets
//! old code; files appear whole, by a rename, so that ranks may race. **Invariant:** sources include
//! nothing, so the compiler library alone is enough.

use super::attention::DecodePlan;
use super::device::Device;
use super::launch::Module;
use super::ring;
use crate::{BackendError, Result};
use lockstep_comm::function_table;
use lockstep_comm::library::{Library, LibraryError};
use lockstep_core::{DType, folders};
use sha2::{Digest, Sha256};
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// One file of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// `pointwise.cu`.
    Pointwise,
    /// `norm.cu`.
    Norm,
    /// `rope.cu`.
    Rope,
    /// `gemv.cu`.
    Gemv,
    /// `skinny.cu`.
    Skinny,
    /// `moe.cu`.
    Moe,
    /// `experts.cu`.
    Experts,
    /// `peers.cu` for so many ranks.
    Peers(usize),
    /// `stages.cu`, which moves bytes of any type.
    Stages,
    /// `sample.cu`; logits are f32 whatever the type.
    Sample,
    /// `attention_token.cu` for heads of at most so many elements.
    AttentionToken(usize),
    /// `attention_decode.cu` likewise.
    AttentionDecode(usize),
    /// `attention_tile.cu` likewise.
    AttentionTile(usize),
    /// `attention_hopper.cu` likewise, 64 or 128; for sm_90a alone.
    AttentionHopper(usize),
}

impl Source {
    /// Name for messages and cache files.
    fn name(self) -> String {
        match self {
            Self::Pointwise => "pointwise".into(),
            Self::Norm => "norm".into(),
            Self::Rope => "rope".into(),
            Self::Gemv => "gemv".into(),
            Self::Skinny => "skinny".into(),
            Self::Moe => "moe".into(),
            Self::Experts => "experts".into(),
            Self::Peers(ranks) => format!("peers_{ranks}"),
            Self::Stages => "stages".into(),
            Self::Sample => "sample".into(),
            Self::AttentionToken(dim) => format!("attention_token_{dim}"),
            Self::AttentionDecode(dim) => format!("attention_decode_{dim}"),
            Self::AttentionTile(dim) => format!("attention_tile_{dim}"),
            Self::AttentionHopper(dim) => format!("attention_hopper_{dim}"),
        }
    }

    /// Everything that is compiled.
    fn text(self) -> String {
        let attention = include_str!("../../kernels/attention.cuh");
        let mma = include_str!("../../kernels/mma.cuh");
        let ring = include_str!("../../kernels/ring.cuh");
        let waits = include_str!("../../kernels/waits.cuh");
        let parts: &[&str] = match self {
            Self::Pointwise => &[include_str!("../../kernels/pointwise.cu")],
            Self::Norm => &[include_str!("../../kernels/norm.cu")],
            Self::Rope => &[include_str!("../../kernels/rope.cu")],
            Self::Gemv => &[include_str!("../../kernels/gemv.cu")],
            Self::Skinny => &[mma, include_str!("../../kernels/skinny.cu")],
            Self::Moe => &[include_str!("../../kernels/moe.cu")],
            Self::Experts => &[mma, ring, include_str!("../../kernels/experts.cu")],
            Self::Peers(_) => &[waits, include_str!("../../kernels/peers.cu")],
            Self::Stages => &[waits, include_str!("../../kernels/stages.cu")],
            Self::Sample => &[include_str!("../../kernels/sample.cu")],
            Self::AttentionToken(_) => &[attention, include_str!("../../kernels/attention_token.cu")],
            Self::AttentionDecode(_) => &[attention, mma, include_str!("../../kernels/attention_decode.cu")],
            Self::AttentionTile(_) => &[attention, mma, include_str!("../../kernels/attention_tile.cu")],
            Self::AttentionHopper(_) => &[attention, mma, include_str!("../../kernels/attention_hopper.cu")],
        };
        format!("{}{}", include_str!("../../kernels/common.cuh"), parts.concat())
    }

    fn options(self, dtype: DType, architecture: &str) -> Vec<String> {
        let element = match dtype {
            DType::F32 => 0,
            DType::Bf16 => 1,
            DType::F16 => 2,
        };
        let mut options = vec![
            format!("--gpu-architecture={architecture}"),
            "--std=c++17".into(),
            "-default-device".into(),
            format!("-DELEM={element}"),
        ];
        if let Self::AttentionToken(dim)
        | Self::AttentionDecode(dim)
        | Self::AttentionTile(dim)
        | Self::AttentionHopper(dim) = self
        {
            options.push(format!("-DDIM={dim}"));
        }
        match self {
            Self::AttentionDecode(dim) => {
                options.push(format!("-DSTAGES={}", DecodePlan::new(architecture, dim).stages));
            }
            Self::Peers(ranks) => options.push(format!("-DRANKS={ranks}")),
            Self::Experts => options.extend(ring::options(architecture)),
            _ => {}
        }
        options
    }

    /// What every backend of a type loads when it is made.
    pub fn of_every_model(dtype: DType) -> Vec<(Self, DType)> {
        let mut sources = vec![Self::Pointwise, Self::Norm, Self::Rope, Self::Gemv];
        if dtype != DType::F32 {
            sources.push(Self::Skinny);
        }
        sources.into_iter().map(|source| (source, dtype)).chain([(Self::Sample, DType::F32)]).collect()
    }

    /// The kernels of this file on `device`, from the cache or compiled.
    pub fn load(self, device: &Rc<Device>, dtype: DType) -> Result<Module> {
        let architecture = device.architecture();
        let cached = self.cached(dtype, &architecture);
        if let Some(code) = cached.as_ref().and_then(|path| std::fs::read(path).ok())
            && let Ok(module) = Module::load(device, &code)
        {
            return Ok(module);
        }
        let code = self.compile(&Compiler::open()?, (dtype, &architecture), cached.as_deref())?;
        Module::load(device, &code)
    }

    /// Compiles what the cache lacks of some files all at once, a thread each, so that a first start takes as long as
    /// the slowest. What goes wrong is for [`Self::load`] to report, which compiles what is still missing.
    pub fn compile_missing(sources: &[(Self, DType)], architecture: &str) {
        let missing: Vec<_> = sources
            .iter()
            .filter_map(|(source, dtype)| Some((source, *dtype, source.cached(*dtype, architecture)?)))
            .filter(|(_, _, path)| !path.exists())
            .collect();
        if missing.len() < 2 {
            return;
        }
        let Ok(compiler) = Compiler::open() else { return };
        std::thread::scope(|scope| {
            for (source, dtype, path) in &missing {
                scope.spawn(|| drop(source.compile(&compiler, (*dtype, architecture), Some(path))));
            }
        });
    }

    /// Compiles this file for a type and an architecture, and keeps the code in the file `cached`.
    fn compile(
        self,
        compiler: &Compiler,
        (dtype, architecture): (DType, &str),
        cached: Option<&Path>,
    ) -> Result<Vec<u8>> {
        let started = std::time::Instant::now();
        let options = self.options(dtype, architecture);
        let code = compiler.compile(&self.name(), &self.text(), &options)?.code;
        tracing::info!("compiled {} kernels in {:.1} s", self.name(), started.elapsed().as_secs_f64());
        if let Some(path) = cached
            && let Err(error) = store(path, &code)
        {
            tracing::warn!("compiled kernels cannot be kept in {}: {error}", path.display());
        }
        Ok(code)
    }

    fn cached(self, dtype: DType, architecture: &str) -> Option<PathBuf> {
        kernel_cache().map(|folder| folder.join(self.file_name(dtype, architecture)))
    }

    /// The name of its file in the cache, which tells versions apart.
    pub fn file_name(self, dtype: DType, architecture: &str) -> String {
        let mut depends_on = vec![self.text()];
        depends_on.extend(self.options(dtype, architecture));
        file_name(&self.name(), "cubin", &depends_on)
    }
}

/// The folder of compiled kernels; `None` on a machine without a cache folder.
pub fn kernel_cache() -> Option<PathBuf> {
    folders::cache_folder().map(|cache| cache.join("kernels"))
}

/// The file of the cache for something that depends on all of `depends_on`; `None` where there is no cache.
pub(super) fn cached_file(name: &str, extension: &str, depends_on: &[String]) -> Option<PathBuf> {
    kernel_cache().map(|folder| folder.join(file_name(name, extension, depends_on)))
}

fn file_name(name: &str, extension: &str, depends_on: &[String]) -> String {
    let mut hash = Sha256::new();
    depends_on.iter().for_each(|part| hash.update([part.as_bytes(), b"\0"].concat()));
    let digest: String = hash.finalize()[..12].iter().map(|b| format!("{b:02x}")).collect();
    format!("{name}-{digest}.{extension}")
}

/// Writes a file of the cache, whole: by a rename, so that ranks may race.
pub(super) fn store(path: &Path, content: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let unfinished = path.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&unfinished, content)?;
    std::fs::rename(&unfinished, path)
}

type Program = *mut std::ffi::c_void;

function_table! {
    /// Functions of `libnvrtc.so`; names and types as in `nvrtc.h`.
    Nvrtc {
        create = c"nvrtcCreateProgram"
            (*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
        compile = c"nvrtcCompileProgram" (Program, c_int, *const *const c_char);
        code_size = c"nvrtcGetCUBINSize" (Program, *mut usize);
        code = c"nvrtcGetCUBIN" (Program, *mut c_char);
        log_size = c"nvrtcGetProgramLogSize" (Program, *mut usize);
        log = c"nvrtcGetProgramLog" (Program, *mut c_char);
        destroy = c"nvrtcDestroyProgram" (*mut Program);
        version = c"nvrtcVersion" (*mut c_int, *mut c_int);
    }
}

fn open() -> std::result::Result<Library, LibraryError> {
    let hint = "install it with `pip install nvidia-cuda-nvrtc`, or set LOCKSTEP_CUDA_LIBS to its folder";
    Library::open(&["libnvrtc.so.13", "libnvrtc.so.12"], hint)
}

/// NVRTC's file and version.
pub(super) fn library_version() -> std::result::Result<(String, String), LibraryError> {
    let library = open()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the out-pointers are valid.
    unsafe { (Nvrtc::load(&library)?.version)(&raw mut major, &raw mut minor) };
    Ok((library.file(), format!("{major}.{minor}")))
}

/// What came of a source.
struct Compiled {
    code: Vec<u8>,
    /// Warnings, and whatever the options ask for.
    #[cfg_attr(not(test), expect(dead_code, reason = "the check of all kernels reads it"))]
    log: String,
}

/// The compiler library.
struct Compiler(Nvrtc);

impl Compiler {
    fn open() -> Result<Self> {
        let library = open()?;
        // NVRTC opens this one itself, by its bare name, and would not find it beside itself.
        if let Some(folder) = Path::new(library.path()).parent().filter(|f| !f.as_os_str().is_empty()) {
            let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
            let is_builtins = |path: &PathBuf| {
                path.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"libnvrtc-builtins.so."))
            };
            // One that cannot be opened shows when a compilation asks for it.
            files.filter(is_builtins).for_each(|path| drop(Library::open_path(&path)));
        }
        Ok(Self(Nvrtc::load(&library)?))
    }

    /// Machine code of one source. Errors with what the compiler complains of.
    fn compile(&self, name: &str, text: &str, options: &[String]) -> Result<Compiled> {
        let c_string =
            |text: &str| CString::new(text).expect("invariant: sources and options hold no zero byte");
        let (text, file) = (c_string(text), c_string(&format!("{name}.cu")));
        let options: Vec<CString> = options.iter().map(|option| c_string(option)).collect();
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program: Program = std::ptr::null_mut();
        let nvrtc = &self.0;
        // SAFETY: strings end with zeros and outlive the calls; sizes are those the library gave.
        unsafe {
            let none = std::ptr::null();
            let code = (nvrtc.create)(&raw mut program, text.as_ptr(), file.as_ptr(), 0, none, none);
            check(code, name, "the program cannot be made")?;
            let code = (nvrtc.compile)(program, options.len() as c_int, options.as_ptr());
            let (mut size, mut log_size) = (0, 0);
            (nvrtc.log_size)(program, &raw mut log_size);
            let mut log = vec![0u8; log_size];
            (nvrtc.log)(program, log.as_mut_ptr().cast());
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
            check(code, name, &log)?;
            check((nvrtc.code_size)(program, &raw mut size), name, "there is no machine code")?;
            let mut machine_code = vec![0u8; size];
            check((nvrtc.code)(program, machine_code.as_mut_ptr().cast()), name, "there is no machine code")?;
            (nvrtc.destroy)(&raw mut program);
            Ok(Compiled { code: machine_code, log })
        }
    }
}

fn check(code: c_int, name: &str, problem: &str) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let operation = format!("compiling {name} kernels");
    Err(BackendError::Device { operation, problem: format!("{problem} (NVRTC error {code})") })
}

#[cfg(test)]
mod check;
