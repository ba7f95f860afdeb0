//! Builds the vendored libzmq 4.3.5 (MPL-2.0, unmodified) as a static library; needs only a C++ compiler.
fn main() {
    zeromq_src::Build::new().build();
    println!("cargo:rerun-if-changed=build.rs");
}
