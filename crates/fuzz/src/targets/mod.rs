//! The targets, by what they read.

mod files;
mod forms;
mod hosts;
mod shared;
mod text;

pub(crate) use files::{GGUF_WORDS, config, gguf, safetensors};
pub(crate) use forms::{FORM_WORDS, forms};
pub(crate) use hosts::{HOST_WORDS, hosts};
pub(crate) use shared::shared;
pub(crate) use text::{TEMPLATE_WORDS, template, tokenizer};

use lockstep_wire::codec::WIRE_VERSION;
use lockstep_wire::{Broadcast, ToApi, ToDetokenizer, ToScheduler, ToTokenizer, decode, encode};

/// A request's body at every endpoint.
pub(crate) fn requests(input: &[u8]) {
    lockstep_api::fuzzing::read_everywhere(input);
}

/// A message, with the version that makes it worth reading in front.
pub(crate) fn wire(input: &[u8]) {
    let message = [&[WIRE_VERSION], input].concat();
    let again = |encoded: Result<Vec<u8>, _>| {
        assert!(encoded.is_ok(), "what was decoded can be encoded: {encoded:?}");
    };
    // A message of one kind is mostly none of another, so all are tried.
    let _ = decode::<ToApi>(&message).map(|message| again(encode(&message)));
    let _ = decode::<ToTokenizer>(&message).map(|message| again(encode(&message)));
    let _ = decode::<ToScheduler>(&message).map(|message| again(encode(&message)));
    let _ = decode::<ToDetokenizer>(&message).map(|message| again(encode(&message)));
    let _ = decode::<Broadcast>(&message).map(|message| again(encode(&message)));
}

/// The files that an input stands for.
fn files_of(input: &[u8]) -> impl Iterator<Item = &[u8]> {
    input.split(|byte| *byte == 0)
}
