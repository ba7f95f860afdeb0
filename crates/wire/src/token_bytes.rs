//! Token ids as one little-endian byte string: 4 bytes a token and one copy, where MessagePack's
//! number list costs a branch per id.

use lockstep_core::TokenId;
use serde::{Deserialize, Deserializer, Serializer, de::Error};

pub(crate) fn serialize<S: Serializer>(ids: &[TokenId], serializer: S) -> Result<S::Ok, S::Error> {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    serializer.serialize_bytes(&bytes)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<TokenId>, D::Error> {
    let bytes = serde_bytes::ByteBuf::deserialize(deserializer)?;
    let (ids, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(D::Error::custom(format!("token ids take 4 bytes each, got {} bytes", bytes.len())));
    }
    Ok(ids.iter().map(|id| TokenId::from_le_bytes(*id)).collect())
}
