//! MessagePack with named fields (readable from Python's `msgpack`), a version byte in front and a
//! size limit.

use lockstep_core::limits::WIRE_MESSAGE_BYTES_MAX;
use serde::{Serialize, de::DeserializeOwned};

/// First byte of every message; raised whenever a message changes its meaning.
pub const WIRE_VERSION: u8 = 9;

/// Why a message was refused.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// Written by another version of the binary.
    #[error(
        "control message has version {got}, this process speaks {WIRE_VERSION}; run one version of lockstep everywhere"
    )]
    Version {
        /// The first byte received.
        got: u8,
    },
    /// Empty or above the limit.
    #[error("control message has {got} bytes, accepted are 2..={WIRE_MESSAGE_BYTES_MAX}")]
    Size {
        /// Bytes received.
        got: usize,
    },
    /// Not a message of the expected kind.
    #[error("control message cannot be decoded: {0}")]
    Malformed(String),
}

/// Encodes one message. Errors when it would exceed the size limit.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, WireError> {
    let mut bytes = Vec::with_capacity(256);
    bytes.push(WIRE_VERSION);
    rmp_serde::encode::write_named(&mut bytes, message).map_err(|e| WireError::Malformed(e.to_string()))?;
    if bytes.len() > WIRE_MESSAGE_BYTES_MAX {
        return Err(WireError::Size { got: bytes.len() });
    }
    Ok(bytes)
}

/// Decodes one message.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    if bytes.len() < 2 || bytes.len() > WIRE_MESSAGE_BYTES_MAX {
        return Err(WireError::Size { got: bytes.len() });
    }
    if bytes[0] != WIRE_VERSION {
        return Err(WireError::Version { got: bytes[0] });
    }
    rmp_serde::from_slice(&bytes[1..]).map_err(|e| WireError::Malformed(e.to_string()))
}
