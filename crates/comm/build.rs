//! Builds the vendored libzmq 4.3.5 (MPL-2.0, unmodified) as a static library; needs only a C++ compiler.
//!
//! `zeromq-src` leaves out what libzmq's own `configure` would find on Linux. Lockstep needs it:
//! - `SO_PEERCRED`: without it `ZMQ_IPC_FILTER_UID` is refused, and any user of the host could
//!   connect to the private links;
//! - close-on-exec: without it the launcher's children inherit its sockets and keep them alive;
//! - `eventfd`: one system call to wake a thread where a socket pair takes two.
//!
//! With the feature `gloo`: CURVE in libzmq, from the system's libsodium, and the shim over the system's Gloo.
//!
//! The crate has no hook for further definitions, so they go through the compiler flags that `cc`
//! reads from the environment, after any flags that the user has set there.

const LINUX_DEFINES: [&str; 6] = [
    "-DZMQ_HAVE_SO_PEERCRED=1",
    "-DZMQ_HAVE_SOCK_CLOEXEC=1",
    "-DHAVE_ACCEPT4=1",
    "-DZMQ_IOTHREAD_POLLER_USE_EPOLL_CLOEXEC=1",
    "-DZMQ_HAVE_EVENTFD=1",
    "-DZMQ_HAVE_EVENTFD_CLOEXEC=1",
];

fn main() {
    let target = std::env::var("TARGET").expect("invariant: cargo sets TARGET for build scripts");
    // The order in which `cc` looks; the first that is set wins, so the result goes to the first.
    let names = [
        format!("CXXFLAGS_{target}"),
        format!("CXXFLAGS_{}", target.replace('-', "_")),
        "TARGET_CXXFLAGS".to_owned(),
        "CXXFLAGS".to_owned(),
    ];
    let user_flags = names.iter().find_map(|name| std::env::var(name).ok()).unwrap_or_default();
    // SAFETY: a build script has one thread, so nobody reads the environment meanwhile.
    unsafe { std::env::set_var(&names[0], format!("{user_flags} {}", LINUX_DEFINES.join(" ")).trim()) };
    let mut libzmq = zeromq_src::Build::new();
    #[cfg(feature = "gloo")]
    gloo::add(&mut libzmq);
    libzmq.build();
    println!("cargo:rerun-if-changed=build.rs");
}

#[cfg(feature = "gloo")]
mod gloo {
    use std::path::{Path, PathBuf};

    const SHIM: &str = "src/gloo/shim.cc";
    const HEADERS: [&str; 2] = ["gloo/transport/tcp/device.h", "sodium.h"];

    /// Compiles the shim and lets `libzmq` find libsodium. Ends with one sentence when a package is missing.
    pub(super) fn add(libzmq: &mut zeromq_src::Build) {
        let include = Path::new("/usr/include");
        for header in HEADERS {
            assert!(
                include.join(header).exists(),
                "the feature `gloo` needs {header}: apt install libgloo-dev libsodium-dev, or build without it"
            );
        }
        libzmq.with_libsodium(Some(zeromq_src::LibLocation::new(sodium_folder(), include)));
        cc::Build::new().cpp(true).std("c++17").file(SHIM).compile("lockstepgloo");
        println!("cargo:rustc-link-lib=gloo");
        println!("cargo:rerun-if-changed={SHIM}");
    }

    /// Where libsodium.a is: the folder of the target's architecture on Debian, else /usr/lib.
    fn sodium_folder() -> PathBuf {
        let arch = std::env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
        let multiarch = PathBuf::from(format!("/usr/lib/{arch}-linux-gnu"));
        if multiarch.join("libsodium.a").exists() { multiarch } else { PathBuf::from("/usr/lib") }
    }
}
