//! What one host says to another, as bytes, for whatever feeds it nonsense: the crate `fuzz`. The functions are those that
//! read a network; the stream is a pair of local sockets whose other end has said everything.

use crate::gloo::mesh::unpack;
use crate::meeting::MeetingRoom;
use crate::secret::Key;
use crate::trusted::{
    self, CLIENT, MESSAGE_BYTES_MAX, Purpose, SERVER, TrustError, TrustedReader, TrustedWriter,
};
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Longer than anything takes that does not wait; what waits would be a finding.
const PATIENCE: Duration = Duration::from_secs(60);
/// The meeting of [`frames`], and its size.
const MEETING: (&str, usize) = ("meeting", 2);

fn key() -> Key {
    Key::of_secret("known to every input").expect("invariant: long enough")
}

/// A stream from which exactly `input` comes, and the end that must live as long.
fn stream_of(input: &[u8]) -> (TcpStream, UnixStream) {
    let (here, mut there) = UnixStream::pair().expect("a pair of sockets");
    // Whoever has stopped reading has refused it.
    there.set_nonblocking(true).expect("a socket");
    let _ = there.write(input);
    let _ = there.shutdown(Shutdown::Write);
    (TcpStream::from(OwnedFd::from(here)), there)
}

/// The halves of a stream whose handshake is over.
fn session(stream: TcpStream) -> (TrustedReader, TrustedWriter) {
    trusted::halves(stream, key(), SERVER, CLIENT).expect("a socket that can be duplicated")
}

/// `messages` as their sender puts them on the wire, for inputs to begin with.
pub fn framed(messages: &[&[u8]]) -> Vec<u8> {
    let (mine, theirs) = UnixStream::pair().expect("a pair of sockets");
    let stream = TcpStream::from(OwnedFd::from(mine));
    let (_, mut writer) = trusted::halves(stream, key(), CLIENT, SERVER).expect("a socket");
    messages.iter().for_each(|message| writer.send(message).expect("a message that fits"));
    drop(writer);
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut &theirs, &mut bytes).expect("what was sent");
    bytes
}

/// What a rank says when it comes to the meeting that [`frames`] holds.
pub fn introduction(rank: usize, message: &[u8]) -> Vec<u8> {
    crate::meeting::introduction(MEETING.0, (rank, MEETING.1), message).expect("a message that fits")
}

/// Reads `input` as the messages that come after a handshake, and each of them with `read`.
pub fn frames(input: &[u8], mut read: impl FnMut(&[u8])) {
    let (stream, _there) = stream_of(input);
    let (mut reader, _writer) = session(stream);
    let mut is_first = true;
    let end = loop {
        match reader.recv(PATIENCE) {
            Ok(message) => {
                assert!(message.len() <= MESSAGE_BYTES_MAX, "{} bytes", message.len());
                read(&message);
                is_first = false;
            }
            Err(error) => break error,
        }
    };
    let is_fault = |error: &TrustError| {
        matches!(error, TrustError::Closed | TrustError::Changed | TrustError::TooLong { .. })
    };
    assert!(is_fault(&end), "{end}");
    if let Some(length) = input.first_chunk() {
        let is_too_long = u32::from_le_bytes(*length) as usize > MESSAGE_BYTES_MAX;
        let is_refused = is_first && matches!(end, TrustError::TooLong { .. });
        assert_eq!(is_refused, is_too_long, "a first length of {length:?}: {end}");
    }
    // The first message is a rank's, where ranks meet.
    let room = MeetingRoom::default();
    room.call(MEETING.0, MEETING.1);
    let (stream, _there) = stream_of(input);
    let (reader, writer) = session(stream);
    let _ = room.attend(reader, writer);
    // Who has come once does not come again.
    let (stream, _there) = stream_of(input);
    let (reader, writer) = session(stream);
    assert!(room.attend(reader, writer).is_err());
}

/// Reads `input` as what a stranger sends who connects here, and as what it answers when this end connects to it. Without the
/// key nobody comes in.
pub fn handshake(input: &[u8]) {
    let (stream, _there) = stream_of(input);
    assert!(trusted::receive(stream, |_| Some(key())).is_err(), "a stranger came in");
    let (stream, _there) = stream_of(input);
    assert!(trusted::introduce(stream, (Purpose::Host, &key())).is_err(), "a stranger was believed");
}

/// Reads `input` as what ranks of a mesh have said of their addresses.
pub fn addresses(input: &[u8]) {
    for size in [1, 2, 8] {
        let lists = unpack(input, size);
        assert!(lists.is_none_or(|lists| lists.len() == size));
    }
}
