//! What all readers of call sections share.
//!
//! A *section* is the part of an answer from a format's opening marker to its end, e.g. from
//! `<tool_call>` to `</tool_call>`. A reader takes it a character at a time.

use super::event::Sink;

/// What a reader made of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Taken, and perhaps text after all: separators, markers, the head of a call that has not started.
    More,
    /// Taken as part of a call that was told, with everything before it.
    Used,
    /// Taken; the section is complete. Only after at least one call.
    Done,
    /// Not taken: the section ended before this character.
    Fail,
}

/// A reader of one section. It never takes back a call that it started.
pub(super) trait Section: std::fmt::Debug + Send {
    /// Takes the next character.
    fn push(&mut self, c: char, sink: &mut Sink) -> Step;

    /// The text since the last call is markup only (separators, a closing marker), so it needs no
    /// showing should the answer end here.
    fn is_between_calls(&self) -> bool;

    /// The answer ends here: tells what was held back of a call's arguments.
    fn finish(&mut self, _sink: &mut Sink) {}
}

/// Matches one of several markers, a character at a time.
#[derive(Debug)]
pub(super) struct Markers {
    candidates: &'static [&'static str],
    seen: String,
}

impl Markers {
    pub(super) fn new(candidates: &'static [&'static str]) -> Self {
        Self { candidates, seen: String::new() }
    }

    /// Nothing of a marker was seen.
    pub(super) fn is_fresh(&self) -> bool {
        self.seen.is_empty()
    }

    /// `Ok(Some(marker))`: complete (and ready for the next one). `Ok(None)`: more must come.
    /// `Err`: no marker continues like this.
    pub(super) fn push(&mut self, c: char) -> Result<Option<&'static str>, ()> {
        self.seen.push(c);
        if !self.candidates.iter().any(|marker| marker.starts_with(&self.seen)) {
            return Err(());
        }
        let complete = self.candidates.iter().copied().find(|marker| *marker == self.seen);
        if complete.is_some() {
            self.seen.clear();
        }
        Ok(complete)
    }
}
