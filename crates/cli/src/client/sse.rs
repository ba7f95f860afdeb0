//! Server-sent events out of a body's bytes, however they are cut.
//!
//! Follows the WHATWG event stream format for lines that end in LF or CRLF; event names and ids are
//! not used by the APIs spoken here and are passed over, as comments are.

/// Bytes of an event that has no end yet; more is no event stream.
const EVENT_BYTES_MAX: usize = 64 << 20;

/// Cuts a body into the data of its events. Cost is linear in the body's length.
#[derive(Debug, Default)]
pub struct EventParser {
    buffer: Vec<u8>,
    /// Where the first line that was not taken begins.
    start: usize,
    /// Up to here no end of that line was found.
    searched: usize,
    /// Data of the event that is being read.
    data: Option<String>,
}

impl EventParser {
    /// Takes in more of the body. False when an event is longer than any server's.
    #[must_use]
    pub fn push(&mut self, bytes: &[u8]) -> bool {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.searched -= self.start;
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
        self.buffer.len() + self.data.as_ref().map_or(0, String::len) <= EVENT_BYTES_MAX
    }

    /// The data of the next whole event.
    pub fn next_data(&mut self) -> Option<String> {
        while let Some(at) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n') {
            let end = self.searched + at;
            let line = &self.buffer[self.start..end];
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            (self.start, self.searched) = (end + 1, end + 1);
            if line.is_empty() {
                match self.data.take() {
                    Some(data) => return Some(data),
                    None => continue,
                }
            }
            if let Some(text) = line.strip_prefix(b"data:") {
                let text = String::from_utf8_lossy(text.strip_prefix(b" ").unwrap_or(text));
                match &mut self.data {
                    Some(data) => data.extend(["\n", &text]),
                    None => self.data = Some(text.into_owned()),
                }
            }
        }
        self.searched = self.buffer.len();
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &str =
        ": hello\n\ndata: one\n\ndata:two\r\ndata: lines\r\n\r\nevent: x\nid: 3\n\ndata: é漢\n\ndata: cut";

    fn events(pieces: &[&[u8]]) -> Vec<String> {
        let mut parser = EventParser::default();
        let mut events = Vec::new();
        for piece in pieces {
            assert!(parser.push(piece));
            events.extend(std::iter::from_fn(|| parser.next_data()));
        }
        events
    }

    #[test]
    fn events_are_the_same_however_the_body_is_cut() {
        let expected = ["one", "two\nlines", "é漢"];
        assert_eq!(events(&[BODY.as_bytes()]), expected);
        for size in 1..BODY.len() {
            assert_eq!(
                events(&BODY.as_bytes().chunks(size).collect::<Vec<_>>()),
                expected,
                "pieces of {size}"
            );
        }
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut parser = EventParser::default();
        assert!(parser.push(b"data: "));
        assert!(!parser.push(&vec![b'x'; EVENT_BYTES_MAX]));
    }
}
