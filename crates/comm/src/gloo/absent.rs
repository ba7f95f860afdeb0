//! Stands in for [`transport`](super::transport) in a build without the feature `gloo`: it cannot be opened, and
//! what cannot be opened is never used.

use super::transport_types::{Outcome, Pair};
use std::net::IpAddr;
use std::time::Duration;

/// Cannot exist.
#[derive(Debug)]
pub(super) enum Transport {}

/// Cannot exist.
#[derive(Debug)]
pub(super) enum Buffer {}

impl Transport {
    pub(super) fn open(_: usize, _: usize, _: IpAddr, _: Duration) -> Result<Self, String> {
        Err("this binary was built without Gloo; build it with `cargo build --features gloo` (Debian: \
             libgloo-dev, libsodium-dev)"
            .into())
    }

    pub(super) fn address(&self, _: usize) -> Result<Vec<u8>, String> {
        match *self {}
    }

    pub(super) fn connect(&self, _: usize, _: &[u8]) -> Result<(), String> {
        match *self {}
    }

    pub(super) fn buffer(&self, _: usize) -> Result<Buffer, String> {
        match *self {}
    }
}

impl Buffer {
    pub(super) fn data(&self) -> *mut u8 {
        match *self {}
    }

    pub(super) fn start(&self, _: Pair, _: usize) -> Result<(), String> {
        match *self {}
    }

    pub(super) fn wait(&self, _: bool, _: Duration) -> Outcome {
        match *self {}
    }

    pub(super) fn abort(&self) {
        match *self {}
    }
}
