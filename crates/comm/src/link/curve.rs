//! Keys of CURVE, libzmq's encryption (curve25519), for links that leave the host.
//!
//! The publisher's secret key is derived from the key of the run ([`crate::secret`]), so every host has its public key
//! without its being sent; CURVE does not send it either, so only who knows the run's key can connect. Subscribers make
//! their own keys. Sessions have fresh keys besides: what was recorded stays unreadable when the secret becomes known.

use super::socket::reason;
use super::{LinkError, Result, ffi};
use crate::secret::Key;
use serde::{Deserialize, Serialize};
use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt;

/// Characters of a key in Z85, without the zero byte at the end.
const Z85_CHARS: usize = 40;

/// The key that a publisher proves itself with.
#[derive(Clone, Serialize, Deserialize)]
pub struct CurveSecret(CString);

/// What its subscribers have to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CurvePublic(CString);

impl fmt::Debug for CurveSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CurveSecret(..)")
    }
}

impl CurveSecret {
    /// The secret key whose bytes are those of `key`.
    pub fn of(key: &Key) -> Self {
        let mut text = [0; Z85_CHARS + 1];
        // SAFETY: 32 bytes make 40 characters and a zero byte.
        let done = unsafe { ffi::zmq_z85_encode(text.as_mut_ptr(), key.bytes().as_ptr(), key.bytes().len()) };
        assert!(!done.is_null(), "invariant: a key's length is a multiple of four");
        Self(owned(&text))
    }

    /// Its public key. Errors without CURVE in this binary.
    pub fn public(&self) -> Result<CurvePublic> {
        let mut text = [0; Z85_CHARS + 1];
        // SAFETY: room for a key; the secret is a C string of 40 characters.
        check("derive", unsafe { ffi::zmq_curve_public(text.as_mut_ptr(), self.0.as_ptr()) })?;
        Ok(CurvePublic(owned(&text)))
    }

    pub(super) fn text(&self) -> &CStr {
        &self.0
    }
}

impl CurvePublic {
    pub(super) fn text(&self) -> &CStr {
        &self.0
    }
}

/// A new pair of keys.
pub(super) fn fresh() -> Result<(CurvePublic, CurveSecret)> {
    let (mut public, mut secret) = ([0; Z85_CHARS + 1], [0; Z85_CHARS + 1]);
    // SAFETY: room for two keys.
    check("make", unsafe { ffi::zmq_curve_keypair(public.as_mut_ptr(), secret.as_mut_ptr()) })?;
    Ok((CurvePublic(owned(&public)), CurveSecret(owned(&secret))))
}

fn owned(text: &[c_char; Z85_CHARS + 1]) -> CString {
    let bytes: Vec<u8> = text[..Z85_CHARS].iter().map(|c| *c as u8).collect();
    CString::new(bytes).expect("invariant: Z85 has no zero byte")
}

fn check(operation: &'static str, rc: c_int) -> Result<()> {
    if rc == 0 { Ok(()) } else { Err(LinkError::Curve { operation, reason: reason() }) }
}
