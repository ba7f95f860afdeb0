//! What the processes of one server on several hosts know and nobody else does: the shared secret, and keys from it.
//!
//! **Invariant:** no key and no secret is ever sent or shown. Two ends prove that they know one by tags (HMAC-SHA-256,
//! RFC 2104) of fresh random numbers ([`crate::trusted`]); what must differ from run to run, or for another purpose,
//! is derived with a label of its own, so that the key of one purpose says nothing about that of another.

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use std::fmt;

/// Bytes of a key and of a tag.
pub const KEY_BYTES: usize = 32;
/// Fewest bytes of a shared secret: anybody who talks to a host once can try words for it at leisure.
pub const SECRET_BYTES_MIN: usize = 16;

/// A key of 256 bits. Travels to child processes through the launcher's pipe, never over a network.
#[derive(Clone, Serialize, Deserialize)]
pub struct Key([u8; KEY_BYTES]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// The key that stands for a shared secret. Errors with a sentence when that is too short.
    pub fn of_secret(secret: &str) -> Result<Self, String> {
        let secret = secret.trim();
        if secret.len() < SECRET_BYTES_MIN {
            return Err(format!(
                "the secret has {} characters, at least {SECRET_BYTES_MIN} are needed; make one with \
                 `openssl rand -hex 32`",
                secret.len()
            ));
        }
        Ok(Self(tag(secret.as_bytes(), &[b"lockstep several hosts"])))
    }

    /// Another key for the purpose that `label` names.
    pub fn derive(&self, label: &str) -> Self {
        Self(tag(&self.0, &[b"derive ", label.as_bytes()]))
    }

    /// Shows that its maker knew this key and `message`.
    pub fn tag(&self, message: &[u8]) -> [u8; KEY_BYTES] {
        self.tag_parts(&[message])
    }

    /// The tag of the parts, one after the other.
    pub fn tag_parts(&self, parts: &[&[u8]]) -> [u8; KEY_BYTES] {
        tag(&self.0, parts)
    }

    /// Whether `tag` is [`Self::tag_parts`] of `parts`; takes as long whatever it is.
    pub fn vouches(&self, parts: &[&[u8]], tag: &[u8]) -> bool {
        hmac(&self.0, parts).verify_slice(tag).is_ok()
    }

    /// The key itself, for libraries that take one.
    pub fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

fn hmac(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut hmac = Hmac::<Sha256>::new_from_slice(key).expect("invariant: HMAC takes keys of any length");
    parts.iter().for_each(|part| hmac.update(part));
    hmac
}

fn tag(key: &[u8], parts: &[&[u8]]) -> [u8; KEY_BYTES] {
    hmac(key, parts).finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_hmac_sha_256() {
        // RFC 4231, test case 2.
        let hex: String = tag(b"Jefe", &[b"what do ya want ", b"for nothing?"])
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }

    #[test]
    fn a_key_vouches_for_its_own_tags_only() {
        let key = Key::of_secret("a secret of enough characters\n").unwrap();
        let same = Key::of_secret("a secret of enough characters").unwrap();
        let tag = key.tag(b"message");
        assert!(same.vouches(&[b"mess", b"age"], &tag));
        assert!(!same.vouches(&[b"massage"], &tag));
        assert!(!same.derive("x").vouches(&[b"message"], &tag));
        assert!(!same.vouches(&[b"message"], &tag[..31]));
        assert_eq!(format!("{key:?}"), "Key(..)");
    }

    #[test]
    fn short_secrets_are_refused() {
        let refused = Key::of_secret(" 123456789012345 \n").unwrap_err();
        assert!(refused.contains("15 characters, at least 16"), "{refused}");
    }
}
