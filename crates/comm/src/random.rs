//! The kernel's random numbers.

/// Fills `bytes` with them. Not deterministic.
pub fn fill(bytes: &mut [u8]) {
    let mut filled = 0;
    while filled < bytes.len() {
        // Requests up to 256 bytes are only ever interrupted before they start (getrandom(2)).
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => filled += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => panic!("the kernel gives no random numbers: {e}"),
        }
    }
}
