//! A TCP stream between two processes that know the same key, for what hosts have to agree on.
//!
//! ```text
//! client → server   "LOCKSTEP", version, purpose, 32 random bytes c
//! server → client   "LOCKSTEP", version, purpose, 32 random bytes s, tag(key, "server" c s)
//! client → server   tag(key, "client" c s)
//! both ways         length (4 bytes), message, tag(session key, direction, number of the message, message)
//! ```
//! **Invariants**
//! - The key is never sent. The session key is derived from it and from both ends' random numbers, so nothing that was
//!   recorded can be played again, and no message can be changed, repeated, left out or sent back.
//! - Messages are readable on the wire: nothing that is secret goes through here.
//! - Before the last tag has been checked a peer makes this process hold 106 bytes, and only for
//!   [`HANDSHAKE_PATIENCE`]; afterwards a message has at most [`MESSAGE_BYTES_MAX`].
//!
//! Used by launchers of several hosts, and by ranks once at start. Blocking, for threads.

use crate::secret::{KEY_BYTES, Key};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Longest message.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// How long a handshake may take.
pub const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(5);

/// How long the other end's system may take no bytes.
const WRITE_PATIENCE: Duration = Duration::from_secs(5);
const MAGIC: &[u8; 8] = b"LOCKSTEP";
/// Raised whenever the above changes.
const VERSION: u8 = 1;
const OPENING_BYTES: usize = MAGIC.len() + 2 + KEY_BYTES;
pub(crate) const CLIENT: &[u8] = b"client";
pub(crate) const SERVER: &[u8] = b"server";

/// What a connection is for; each has a key of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Purpose {
    /// The launcher of another host joins.
    Host = b'h',
    /// Ranks tell each other their addresses.
    Rank = b'r',
}

/// Why there is no such stream, or none any more. Displays as the rest of a sentence about the peer.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The system failed.
    #[error("{what} failed: {source}")]
    System {
        /// The call.
        what: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// What speaks there is something else.
    #[error("it is not a lockstep launcher")]
    NotLockstep,
    /// It is one with another handshake.
    #[error(
        "it speaks version {theirs} of the handshake, this one {VERSION}; use the same lockstep everywhere"
    )]
    OtherVersion {
        /// Its version.
        theirs: u8,
    },
    /// It does not know the key.
    #[error("it has another secret; give every host the same --dist-secret-file or LOCKSTEP_DIST_SECRET")]
    OtherSecret,
    /// It ended the connection.
    #[error("it closed the connection")]
    Closed,
    /// It said nothing.
    #[error("nothing came from it for {:.1} s", .0.as_secs_f64())]
    Silent(Duration),
    /// A message is not what was sent.
    #[error("a message from it was changed on its way")]
    Changed,
    /// A message is too long.
    #[error("a message of {got} bytes; at most {MESSAGE_BYTES_MAX} are possible")]
    TooLong {
        /// Its size.
        got: usize,
    },
}

/// Result of this module.
pub type Result<T> = std::result::Result<T, TrustError>;

/// The sending half.
#[derive(Debug)]
pub struct TrustedWriter {
    stream: TcpStream,
    session: Key,
    direction: &'static [u8],
    number: u64,
}

/// The receiving half.
#[derive(Debug)]
pub struct TrustedReader {
    stream: TcpStream,
    session: Key,
    direction: &'static [u8],
    number: u64,
}

/// Connects to `address` within `patience` and shows that this end knows `key`.
pub fn connect(
    address: SocketAddr,
    (purpose, key): (Purpose, &Key),
    patience: Duration,
) -> Result<(TrustedReader, TrustedWriter)> {
    let stream = TcpStream::connect_timeout(&address, patience).map_err(system("connecting"))?;
    prepare(&stream)?;
    introduce(stream, (purpose, key))
}

/// The client's part of the handshake.
pub(crate) fn introduce(
    mut stream: TcpStream,
    (purpose, key): (Purpose, &Key),
) -> Result<(TrustedReader, TrustedWriter)> {
    let deadline = Instant::now() + HANDSHAKE_PATIENCE;
    let mine = opening(purpose);
    write(&mut stream, &mine)?;
    let mut theirs = [0; OPENING_BYTES];
    read(&mut stream, &mut theirs, deadline)?;
    check_opening(&theirs)?;
    let mut proof = [0; KEY_BYTES];
    read(&mut stream, &mut proof, deadline)?;
    let (c, s) = (nonce(&mine), nonce(&theirs));
    if !key.vouches(&[SERVER, c, s], &proof) {
        return Err(TrustError::OtherSecret);
    }
    write(&mut stream, &key.tag_parts(&[CLIENT, c, s]))?;
    halves(stream, session(key, c, s), CLIENT, SERVER)
}

/// The other end of [`connect`], for a connection that was accepted. `key` gives the key of a purpose, if that is
/// served here.
pub fn accept(
    stream: TcpStream,
    key: impl FnOnce(Purpose) -> Option<Key>,
) -> Result<(Purpose, TrustedReader, TrustedWriter)> {
    prepare(&stream)?;
    receive(stream, key)
}

/// The server's part of the handshake.
pub(crate) fn receive(
    mut stream: TcpStream,
    key: impl FnOnce(Purpose) -> Option<Key>,
) -> Result<(Purpose, TrustedReader, TrustedWriter)> {
    let deadline = Instant::now() + HANDSHAKE_PATIENCE;
    let mut theirs = [0; OPENING_BYTES];
    read(&mut stream, &mut theirs, deadline)?;
    let purpose = match check_opening(&theirs)? {
        b'h' => Purpose::Host,
        b'r' => Purpose::Rank,
        _ => return Err(TrustError::NotLockstep),
    };
    let key = key(purpose).ok_or(TrustError::NotLockstep)?;
    let mine = opening(purpose);
    let (c, s) = (nonce(&theirs), nonce(&mine));
    write(&mut stream, &[&mine[..], &key.tag_parts(&[SERVER, c, s])].concat())?;
    let mut proof = [0; KEY_BYTES];
    match read(&mut stream, &mut proof, deadline) {
        // Whoever sees that this end has another secret leaves.
        Err(TrustError::Closed) => return Err(TrustError::OtherSecret),
        other => other?,
    }
    if !key.vouches(&[CLIENT, c, s], &proof) {
        return Err(TrustError::OtherSecret);
    }
    let session = session(&key, c, s);
    let (reader, writer) = halves(stream, session, SERVER, CLIENT)?;
    Ok((purpose, reader, writer))
}

impl TrustedWriter {
    /// Sends one message.
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(TrustError::TooLong { got: message.len() });
        }
        let length = (message.len() as u32).to_le_bytes();
        let tag = self.session.tag_parts(&[self.direction, &self.number.to_le_bytes(), message]);
        self.number += 1;
        write(&mut self.stream, &[&length, message, &tag].concat())
    }

    /// Ends the connection in both directions; the reader finds it closed.
    pub fn close(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

impl TrustedReader {
    /// The next message, complete within `patience`. After an error there are no more.
    pub fn recv(&mut self, patience: Duration) -> Result<Vec<u8>> {
        let deadline = Instant::now() + patience;
        let silent =
            |error| if matches!(error, TrustError::Silent(_)) { TrustError::Silent(patience) } else { error };
        let mut length = [0; 4];
        read(&mut self.stream, &mut length, deadline).map_err(silent)?;
        let got = u32::from_le_bytes(length) as usize;
        if got > MESSAGE_BYTES_MAX {
            return Err(TrustError::TooLong { got });
        }
        let mut bytes = vec![0; got + KEY_BYTES];
        read(&mut self.stream, &mut bytes, deadline).map_err(silent)?;
        let (message, tag) = bytes.split_at(got);
        if !self.session.vouches(&[self.direction, &self.number.to_le_bytes(), message], tag) {
            return Err(TrustError::Changed);
        }
        self.number += 1;
        bytes.truncate(got);
        Ok(bytes)
    }

    /// Whether something can be read within `patience` (a message, or the end of the connection).
    pub fn is_readable(&self, patience: Duration) -> Result<bool> {
        self.stream.set_read_timeout(Some(patience)).map_err(system("setsockopt"))?;
        match self.stream.peek(&mut [0]) {
            Ok(_) => Ok(true),
            Err(e) if is_timeout(&e) => Ok(false),
            Err(source) => Err(TrustError::System { what: "reading", source }),
        }
    }

    /// This end's address, as the other end reaches it.
    pub fn local_address(&self) -> Result<SocketAddr> {
        self.stream.local_addr().map_err(system("getsockname"))
    }

    /// The other end's address.
    pub fn peer_address(&self) -> Result<SocketAddr> {
        self.stream.peer_addr().map_err(system("getpeername"))
    }
}

/// Both halves of a stream after the handshake that made `session`: what goes out and what comes back is tagged as theirs.
pub(crate) fn halves(
    stream: TcpStream,
    session: Key,
    out: &'static [u8],
    back: &'static [u8],
) -> Result<(TrustedReader, TrustedWriter)> {
    let writing = stream.try_clone().map_err(system("duplicating a socket"))?;
    let writer = TrustedWriter { stream: writing, session: session.clone(), direction: out, number: 0 };
    Ok((TrustedReader { stream, session, direction: back, number: 0 }, writer))
}

fn session(key: &Key, c: &[u8], s: &[u8]) -> Key {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    key.derive(&format!("session {} {}", hex(c), hex(s)))
}

fn opening(purpose: Purpose) -> [u8; OPENING_BYTES] {
    let mut opening = [0; OPENING_BYTES];
    opening[..8].copy_from_slice(MAGIC);
    opening[8] = VERSION;
    opening[9] = purpose as u8;
    crate::random::fill(&mut opening[10..]);
    opening
}

fn nonce(opening: &[u8; OPENING_BYTES]) -> &[u8] {
    &opening[10..]
}

/// The purpose's byte.
fn check_opening(opening: &[u8; OPENING_BYTES]) -> Result<u8> {
    match (opening[..8] == MAGIC[..], opening[8]) {
        (false, _) => Err(TrustError::NotLockstep),
        (true, VERSION) => Ok(opening[9]),
        (true, theirs) => Err(TrustError::OtherVersion { theirs }),
    }
}

fn prepare(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true).map_err(system("setsockopt"))?;
    stream.set_write_timeout(Some(WRITE_PATIENCE)).map_err(system("setsockopt"))
}

fn write(stream: &mut TcpStream, bytes: &[u8]) -> Result<()> {
    stream.write_all(bytes).map_err(|e| if is_end(&e) { TrustError::Closed } else { system("sending")(e) })
}

/// Fills `bytes` until `deadline`, however slowly they come.
fn read(stream: &mut TcpStream, mut bytes: &mut [u8], deadline: Instant) -> Result<()> {
    let patience = deadline.saturating_duration_since(Instant::now());
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(TrustError::Silent(patience));
        }
        stream.set_read_timeout(Some(left)).map_err(system("setsockopt"))?;
        match stream.read(bytes) {
            Ok(0) => return Err(TrustError::Closed),
            Ok(n) => bytes = &mut bytes[n..],
            Err(e) if e.kind() == ErrorKind::Interrupted || is_timeout(&e) => {}
            Err(e) if is_end(&e) => return Err(TrustError::Closed),
            Err(e) => return Err(system("reading")(e)),
        }
    }
    Ok(())
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof)
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> TrustError {
    move |source| TrustError::System { what, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    const LONG: Duration = Duration::from_secs(60);

    fn key(secret: &str) -> Key {
        Key::of_secret(secret).unwrap()
    }

    /// Both ends' results with these keys.
    #[expect(clippy::type_complexity)]
    fn meet(
        client: &str,
        server: &str,
    ) -> (Result<(TrustedReader, TrustedWriter)>, Result<(Purpose, TrustedReader, TrustedWriter)>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            let there = scope.spawn(|| connect(address, (Purpose::Rank, &key(client)), LONG));
            let here = accept(listener.accept().unwrap().0, |_| Some(key(server)));
            (there.join().unwrap(), here)
        })
    }

    #[test]
    fn messages_arrive_both_ways_in_order() {
        let (there, here) = meet("the same secret for both", "the same secret for both");
        let ((mut reader, mut writer), (purpose, mut theirs, mut back)) = (there.unwrap(), here.unwrap());
        assert_eq!(purpose, Purpose::Rank);
        for number in 0..3u8 {
            writer.send(&[number; 5]).unwrap();
        }
        back.send(&[]).unwrap();
        for number in 0..3u8 {
            assert_eq!(theirs.recv(LONG).unwrap(), [number; 5]);
        }
        assert!(reader.recv(LONG).unwrap().is_empty());
        assert!(matches!(writer.send(&vec![0; MESSAGE_BYTES_MAX + 1]), Err(TrustError::TooLong { .. })));
        assert!(matches!(reader.recv(Duration::from_millis(20)), Err(TrustError::Silent(_))));
        drop((reader, writer));
        assert!(matches!(theirs.recv(LONG), Err(TrustError::Closed)));
    }

    #[test]
    fn another_secret_is_named_on_both_sides() {
        let (there, here) = meet("one secret, long enough", "and another, long enough");
        assert!(matches!(there, Err(TrustError::OtherSecret)), "{there:?}");
        assert!(matches!(here, Err(TrustError::OtherSecret)), "{here:?}");
    }

    #[test]
    fn a_changed_or_repeated_message_is_noticed() {
        let (there, here) = meet("the same secret for both", "the same secret for both");
        let ((_reader, mut writer), (_, mut theirs, _)) = (there.unwrap(), here.unwrap());
        writer.send(b"first").unwrap();
        assert!(theirs.recv(LONG).is_ok());
        writer.number = 0;
        writer.send(b"first").unwrap();
        assert!(matches!(theirs.recv(LONG), Err(TrustError::Changed)));
    }

    #[test]
    fn strangers_are_named_and_get_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let refusal = |bytes: &[u8]| {
            let mut stranger = TcpStream::connect(address).unwrap();
            stranger.write_all(bytes).unwrap();
            stranger.shutdown(std::net::Shutdown::Write).unwrap();
            accept(listener.accept().unwrap().0, |_| Some(key("the secret nobody knows"))).unwrap_err()
        };
        let http = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: x\r\n\r\n";
        assert!(matches!(refusal(http), TrustError::NotLockstep));
        assert!(matches!(refusal(b"LOCKSTEP"), TrustError::Closed));
        let mut other = opening(Purpose::Host);
        other[8] = 9;
        assert!(matches!(refusal(&other), TrustError::OtherVersion { theirs: 9 }));
        let guess = [&opening(Purpose::Host)[..], &[7; KEY_BYTES]].concat();
        assert!(matches!(refusal(&guess), TrustError::OtherSecret));
    }
}
