//! [`Collective`] over NCCL, for ranks that have a GPU each, on one host or several.
//!
//! Host tensors (stream [`StreamHandle::HOST`]) go to the collective of CPUs that every rank has
//! anyway; device tensors go to NCCL, queued on the caller's stream. Ranks on several hosts meet, and talk where there
//! is nothing faster, through the network interface of the address that their host is reached at
//! ([`NcclCollective::use_interface_of`]). NCCL is found when the first
//! communicator is made. NVLink multicast stays off (`NCCL_NVLS_ENABLE=0`): programs that end while using
//! it can put GPUs out of service.
//!
//! **Invariants:** all ranks make the communicator at the same point of their start; an operation that
//! NCCL refuses is an error at once, one that fails later shows when the device is waited for.
//! A communicator is never left: that waits for the peers, one of which may be why this rank ends, and the
//! process ends right after. A sum of two ranks is one rounded addition, the same bits on both.

use crate::collective::{Collective, CollectiveError, Result, StreamHandle};
use crate::function_table;
use crate::group::{Patience, ProcessGroup};
use crate::interface;
use crate::library::{Library, LibraryError};
use lockstep_core::DType;
use std::ffi::{c_int, c_void};
use std::net::IpAddr;

/// What NCCL is told unless the user says otherwise: no NVLink multicast, and all connections made when
/// the ranks meet. Made at the first sum, they would wait on the host, without a limit, for a rank that has
/// stopped.
const SETTINGS: [(&str, &str); 2] = [("NCCL_NVLS_ENABLE", "0"), ("NCCL_RUNTIME_CONNECT", "0")];
/// What tells NCCL which interfaces it may use, and which kind of their addresses.
const INTERFACE: &str = "NCCL_SOCKET_IFNAME";
const FAMILY: &str = "NCCL_SOCKET_FAMILY";
/// Bytes of `ncclUniqueId`.
const UNIQUE_ID_BYTES: usize = 128;

/// `ncclUniqueId`: where the ranks meet.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId([u8; UNIQUE_ID_BYTES]);

type Communicator = *mut c_void;
type Stream = *mut c_void;

function_table! {
    /// Functions of `libnccl.so.2`; names and types as in `nccl.h`.
    Nccl {
        unique_id = c"ncclGetUniqueId" (*mut UniqueId);
        join = c"ncclCommInitRank" (*mut Communicator, c_int, UniqueId, c_int);
        all_reduce = c"ncclAllReduce"
            (*const c_void, *mut c_void, usize, c_int, c_int, Communicator, Stream);
        all_gather = c"ncclAllGather" (*const c_void, *mut c_void, usize, c_int, Communicator, Stream);
        send = c"ncclSend" (*const c_void, usize, c_int, c_int, Communicator, Stream);
        recv = c"ncclRecv" (*mut c_void, usize, c_int, c_int, Communicator, Stream);
        version = c"ncclGetVersion" (*mut c_int);
    }
}

fn open() -> std::result::Result<Library, LibraryError> {
    let hint = "install it with `pip install nvidia-nccl-cu13`, or set LOCKSTEP_CUDA_LIBS to its folder";
    Library::open(&["libnccl.so.2"], hint)
}

/// NCCL's file and version.
pub fn library_version() -> std::result::Result<(String, String), LibraryError> {
    let library = open()?;
    let mut version = 0;
    // SAFETY: the out-pointer is valid.
    unsafe { (Nccl::load(&library)?.version)(&raw mut version) };
    Ok((library.file(), format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)))
}

/// `ncclSum`.
const SUM: c_int = 0;

/// `ncclDataType_t` of an element.
fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::F16 => 6,
        DType::F32 => 7,
        DType::Bf16 => 9,
    }
}

/// A TP group, or the ranks of a pipeline, with a GPU each.
pub struct NcclCollective {
    api: Nccl,
    communicator: Communicator,
    host: Box<dyn Collective>,
}

// SAFETY: a communicator may move between threads; it is used from one at a time, as `&self` methods
// need the `!Sync` value.
unsafe impl Send for NcclCollective {}

impl NcclCollective {
    /// Sets what NCCL is told where the user has not. A process whose ranks are threads calls it before it starts
    /// them.
    ///
    /// # Safety
    /// No other thread reads or writes the environment meanwhile, unless this was called before.
    pub unsafe fn prepare_environment() {
        for (name, value) in SETTINGS {
            if std::env::var_os(name).is_none() {
                // SAFETY: the caller's promise.
                unsafe { std::env::set_var(name, value) };
            }
        }
    }

    /// Has NCCL use the network interface of `address`, one of this host, unless the user has said which; gives what it
    /// is told, for people. Errors when no interface has that address.
    ///
    /// # Safety
    /// As [`Self::prepare_environment`].
    pub unsafe fn use_interface_of(address: IpAddr) -> std::result::Result<String, String> {
        if let Some(own) = std::env::var_os(INTERFACE) {
            return Ok(format!("{INTERFACE}={}", own.display()));
        }
        let settings = interface_settings(address)?;
        for (name, value) in &settings {
            // SAFETY: the caller's promise.
            unsafe { std::env::set_var(name, value) };
        }
        Ok(settings.map(|(name, value)| format!("{name}={value}")).join(" "))
    }

    /// Joins the ranks of `host` on the devices whose contexts are current. `group` carries the meeting
    /// point and must have the same ranks. **Collective: all ranks of the group.**
    ///
    /// Errors when NCCL is not installed or the ranks cannot meet (two on one GPU, say).
    pub fn new(host: Box<dyn Collective>, group: &mut dyn ProcessGroup) -> Result<Self> {
        let rank = host.rank();
        let failed = |problem: String| CollectiveError::Invalid { rank, operation: "join NCCL", problem };
        let api =
            open().and_then(|library| Nccl::load(&library)).map_err(|error| failed(error.to_string()))?;
        // SAFETY: a rank process joins at its start, from its main thread, and none of its other threads reads or
        // writes the environment; ranks that are threads find it prepared, so that nothing is written.
        unsafe { Self::prepare_environment() };
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        if rank == 0 {
            // SAFETY: the out-pointer is valid. NCCL reads its settings from the environment here.
            check(unsafe { (api.unique_id)(&raw mut id) }, rank, "find a meeting point")?;
        }
        group.broadcast(&mut id.0, 0, Patience::Idle)?;
        let mut communicator = std::ptr::null_mut();
        let size = host.size() as c_int;
        // SAFETY: the out-pointer is valid and the id is rank 0's.
        let code = unsafe { (api.join)(&raw mut communicator, size, id, rank as c_int) };
        check(code, rank, "join NCCL")?;
        Ok(Self { api, communicator, host })
    }

    fn check(&self, code: c_int, operation: &'static str) -> Result<()> {
        check(code, self.host.rank(), operation)
    }
}

/// What NCCL is told so that it uses the interface of `address`.
fn interface_settings(address: IpAddr) -> std::result::Result<[(&'static str, String); 2], String> {
    let of_system = |e| format!("the network interfaces of this host cannot be read: {e}");
    let name = interface::of_address(address).map_err(of_system)?.ok_or_else(|| {
        format!("no network interface of this host has {address}; give --dist-address one that has, or {INTERFACE}")
    })?;
    // Without `=` it would be the beginning of names.
    let family = if address.is_ipv4() { "AF_INET" } else { "AF_INET6" };
    Ok([(INTERFACE, format!("={name}")), (FAMILY, family.to_owned())])
}

fn check(code: c_int, rank: usize, operation: &'static str) -> Result<()> {
    match code {
        0 => Ok(()),
        code => {
            let left = rustix::fs::statvfs("/dev/shm").ok().map(|disk| disk.f_bavail * disk.f_frsize);
            Err(error_of(code, (rank, operation), left))
        }
    }
}

/// `ncclRemoteError`: another rank's process or the network between hosts is gone.
const REMOTE: c_int = 6;

/// The error of result `code`; `left` as for [`problem_of`].
fn error_of(code: c_int, (rank, operation): (usize, &'static str), left: Option<u64>) -> CollectiveError {
    let problem = problem_of(code, left);
    match code {
        REMOTE => CollectiveError::LostAny { rank, operation, problem },
        _ => CollectiveError::Invalid { rank, operation, problem },
    }
}

/// Room in `/dev/shm` below which it is a likely cause: two ranks took 20 to 30 MiB.
const SHARED_MEMORY_MIN: u64 = 64 << 20;

/// NCCL's result codes in words, and what is likely behind one, which NCCL itself says in its log at most. `left` is the
/// room in `/dev/shm`, in bytes.
fn problem_of(code: c_int, left: Option<u64>) -> String {
    let words = match code {
        1 => "an error of CUDA",
        2 => "an error of the system",
        3 => "an internal error",
        4 => "an invalid argument",
        5 => "an invalid use, such as two ranks on one GPU",
        REMOTE => "another rank's process or the network has ended",
        _ => "a result that this version does not know",
    };
    match left.filter(|&left| code == 2 && left < SHARED_MEMORY_MIN) {
        Some(left) => format!(
            "NCCL error {code} ({words}): /dev/shm has only {} KiB left, where NCCL keeps buffers; give it 1 GiB \
             (docker run --shm-size=1g)",
            left >> 10
        ),
        None => format!("NCCL error {code} ({words}); NCCL_DEBUG=WARN says more"),
    }
}

impl Collective for NcclCollective {
    fn rank(&self) -> usize {
        self.host.rank()
    }

    fn size(&self) -> usize {
        self.host.size()
    }

    unsafe fn all_reduce(
        &self,
        data: *mut c_void,
        count: usize,
        dtype: DType,
        stream: StreamHandle,
    ) -> Result<()> {
        if stream.0.is_null() {
            // SAFETY: the caller's promise.
            return unsafe { self.host.all_reduce(data, count, dtype, stream) };
        }
        let (kind, communicator) = (data_type(dtype), self.communicator);
        // SAFETY: the caller's promise; in place is allowed.
        let code = unsafe { (self.api.all_reduce)(data, data, count, kind, SUM, communicator, stream.0) };
        self.check(code, "all-reduce")
    }

    unsafe fn all_gather(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: DType,
        stream: StreamHandle,
    ) -> Result<()> {
        if stream.0.is_null() {
            // SAFETY: the caller's promise.
            return unsafe { self.host.all_gather(send, recv, count, dtype, stream) };
        }
        let (kind, communicator) = (data_type(dtype), self.communicator);
        // SAFETY: the caller's promise.
        let code = unsafe { (self.api.all_gather)(send, recv, count, kind, communicator, stream.0) };
        self.check(code, "all-gather")
    }

    unsafe fn send(
        &self,
        data: *const c_void,
        count: usize,
        dtype: DType,
        peer: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        if stream.0.is_null() {
            // SAFETY: the caller's promise.
            return unsafe { self.host.send(data, count, dtype, peer, stream) };
        }
        let (kind, communicator) = (data_type(dtype), self.communicator);
        // SAFETY: the caller's promise.
        let code = unsafe { (self.api.send)(data, count, kind, peer as c_int, communicator, stream.0) };
        self.check(code, "send")
    }

    unsafe fn recv(
        &self,
        data: *mut c_void,
        count: usize,
        dtype: DType,
        peer: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        if stream.0.is_null() {
            // SAFETY: the caller's promise.
            return unsafe { self.host.recv(data, count, dtype, peer, stream) };
        }
        let (kind, communicator) = (data_type(dtype), self.communicator);
        // SAFETY: the caller's promise.
        let code = unsafe { (self.api.recv)(data, count, kind, peer as c_int, communicator, stream.0) };
        self.check(code, "receive")
    }
}

#[cfg(test)]
mod tests {
    use super::{REMOTE, error_of, interface_settings, problem_of};

    #[test]
    fn a_rank_that_loses_another_is_not_the_first_cause() {
        assert!(error_of(REMOTE, (0, "all-reduce"), None).is_consequence());
        assert!((1..6).all(|code| !error_of(code, (0, "all-reduce"), None).is_consequence()));
    }

    #[test]
    fn nccl_is_told_exactly_the_interface_of_an_address() {
        for (address, family) in [("127.0.0.1", "AF_INET"), ("127.0.0.2", "AF_INET")] {
            let settings = interface_settings(address.parse().unwrap()).unwrap();
            assert_eq!(settings.map(|(_, value)| value), ["=lo", family], "{address}");
        }
        // For documentation only, so nobody has it.
        let refused = interface_settings("192.0.2.1".parse().unwrap()).unwrap_err();
        assert!(refused.contains("192.0.2.1") && refused.contains("--dist-address"), "{refused}");
    }

    #[test]
    fn a_full_dev_shm_is_named_where_it_can_be_the_cause() {
        let full = problem_of(2, Some(1 << 20));
        assert!(full.contains("/dev/shm has only 1024 KiB left") && full.contains("--shm-size"), "{full}");
        for (code, left) in [(2, Some(1 << 30)), (2, None), (5, Some(0))] {
            let other = problem_of(code, left);
            assert!(!other.contains("/dev/shm") && other.contains("NCCL_DEBUG"), "{code}, {left:?}: {other}");
        }
    }
}
