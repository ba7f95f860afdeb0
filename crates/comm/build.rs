//! Builds the vendored libzmq 4.3.5 (MPL-2.0, unmodified) as a static library; needs only a C++ compiler.
//!
//! `zeromq-src` leaves out what libzmq's own `configure` would find on Linux. Lockstep needs it:
//! - `SO_PEERCRED`: without it `ZMQ_IPC_FILTER_UID` is refused, and any user of the host could
//!   connect to the private links;
//! - close-on-exec: without it the launcher's children inherit its sockets and keep them alive;
//! - `eventfd`: one system call to wake a thread where a socket pair takes two.
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
    zeromq_src::Build::new().build();
    println!("cargo:rerun-if-changed=build.rs");
}
