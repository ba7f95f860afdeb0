//! A plain HTTP/1.1 client over `std::net`, so that tests see every byte a server sends and can
//! misbehave on purpose: drop a stream, send half a request, read events one by one.
//!
//! One connection per request; every read and write is under a deadline.

use serde_json::Value;
use std::io::{self, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Default limit of one whole request.
pub const REQUEST_LIMIT: Duration = Duration::from_secs(60);
/// Largest length of a header or chunk-size line, in bytes.
const LINE_BYTES_MAX: usize = 64 << 10;

/// A server's address, with the limit of each request.
#[derive(Clone, Copy, Debug)]
pub struct HttpClient {
    /// Where the server listens.
    pub address: SocketAddr,
    /// Limit of one request from connecting to the last byte.
    pub limit: Duration,
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Response {
    /// Status code.
    pub status: u16,
    /// Headers with lower-case names, in order.
    pub headers: Vec<(String, String)>,
    /// The body, chunks joined.
    pub body: Vec<u8>,
}

impl Response {
    /// The first header called `name` (lower case).
    pub fn header(&self, name: &str) -> Option<&str> {
        find_header(&self.headers, name)
    }

    /// The body as JSON. Panics, showing the body, when it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("not JSON ({e}): {:?}", String::from_utf8_lossy(&self.body)))
    }
}

impl HttpClient {
    /// A client for a port of this host.
    pub fn local(port: u16) -> Self {
        Self { address: SocketAddr::from(([127, 0, 0, 1], port)), limit: REQUEST_LIMIT }
    }

    /// The same client with another limit.
    pub fn with_limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// GET.
    pub fn get(&self, path: &str) -> io::Result<Response> {
        self.request("GET", path, &[], b"")
    }

    /// POST of JSON.
    pub fn post(&self, path: &str, body: &Value) -> io::Result<Response> {
        self.request("POST", path, &[("Content-Type", "application/json")], body.to_string().as_bytes())
    }

    /// Any request, whole answer.
    pub fn request(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<Response> {
        let mut answer = self.open(method, path, headers, body)?;
        let mut body = Vec::new();
        answer.body.read_to_end(&mut body)?;
        Ok(Response { status: answer.status, headers: answer.headers, body })
    }

    /// Sends exactly these bytes and reads one answer; for requests that no client should send. A
    /// server that answers and closes before it has read everything is fine.
    pub fn raw(&self, bytes: &[u8]) -> io::Result<Response> {
        let mut answer = self.exchange("POST", &[bytes])?;
        let mut body = Vec::new();
        answer.body.read_to_end(&mut body)?;
        Ok(Response { status: answer.status, headers: answer.headers, body })
    }

    /// POST of JSON whose answer is read event by event.
    pub fn open_stream(&self, path: &str, body: &Value) -> io::Result<EventStream> {
        let headers = [("Content-Type", "application/json")];
        self.open("POST", path, &headers, body.to_string().as_bytes())
    }

    fn open(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<EventStream> {
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", self.address);
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        if !body.is_empty() || method == "POST" {
            head += &format!("Content-Length: {}\r\n", body.len());
        }
        head += "\r\n";
        self.exchange(method, &[head.as_bytes(), body])
    }

    /// Connects, sends `parts`, and reads the answer's head. A server may answer and close before
    /// it has read a large body; what it said is then still returned.
    fn exchange(&self, method: &str, parts: &[&[u8]]) -> io::Result<EventStream> {
        let deadline = Instant::now() + self.limit;
        let socket = TcpStream::connect_timeout(&self.address, self.limit)?;
        socket.set_nodelay(true)?;
        socket.set_write_timeout(Some(self.limit))?;
        let sent = parts.iter().try_for_each(|part| (&socket).write_all(part));
        let mut lines = BufReader::new(Deadlined { socket, deadline });
        match read_head(&mut lines) {
            Ok((status, headers)) => {
                let framing = Framing::of(method, status, &headers);
                Ok(EventStream { status, headers, body: Body { inner: lines, framing } })
            }
            Err(e) => Err(sent.err().unwrap_or(e)),
        }
    }
}

/// An answer being read. Dropping it closes the connection.
pub struct EventStream {
    /// Status code.
    pub status: u16,
    /// Headers with lower-case names, in order.
    pub headers: Vec<(String, String)>,
    body: Body,
}

impl EventStream {
    /// The first header called `name` (lower case).
    pub fn header(&self, name: &str) -> Option<&str> {
        find_header(&self.headers, name)
    }

    /// The data of the next server-sent event; `None` at the end of the body. Comment lines
    /// (keep-alives) are skipped.
    ///
    /// Errors: the connection broke, the body ended inside a chunk, or the deadline passed.
    pub fn next_event(&mut self) -> io::Result<Option<String>> {
        let mut data: Option<String> = None;
        while let Some(line) = read_line(&mut self.body)? {
            if line.is_empty() {
                if data.is_some() {
                    return Ok(data);
                }
            } else if let Some(text) = line.strip_prefix("data:") {
                let text = text.strip_prefix(' ').unwrap_or(text);
                data = Some(match data {
                    Some(before) => before + "\n" + text,
                    None => text.to_owned(),
                });
            }
        }
        Ok(data)
    }

    /// The rest of the body.
    pub fn rest(&mut self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.body.read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

/// A socket whose every read ends at one deadline.
struct Deadlined {
    socket: TcpStream,
    deadline: Instant,
}

impl Read for Deadlined {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the request's limit has passed"));
        }
        self.socket.set_read_timeout(Some(left))?;
        match self.socket.read(buffer) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                Err(io::Error::new(io::ErrorKind::TimedOut, "the request's limit has passed"))
            }
            other => other,
        }
    }
}

/// How the end of a body is found.
enum Framing {
    /// A known number of bytes is left.
    Length(u64),
    /// Bytes left of the current chunk; 0 before a chunk's size line.
    Chunked(u64),
    /// The last chunk was read.
    Ended,
    /// The connection's end is the body's end.
    UntilClose,
}

impl Framing {
    fn of(method: &str, status: u16, headers: &[(String, String)]) -> Self {
        if method == "HEAD" || status == 204 || status == 304 {
            return Framing::Ended;
        }
        if find_header(headers, "transfer-encoding").is_some_and(|v| v.eq_ignore_ascii_case("chunked")) {
            return Framing::Chunked(0);
        }
        match find_header(headers, "content-length").and_then(|v| v.trim().parse().ok()) {
            Some(len) => Framing::Length(len),
            None => Framing::UntilClose,
        }
    }
}

/// A body without its framing.
struct Body {
    inner: BufReader<Deadlined>,
    framing: Framing,
}

impl Read for Body {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Framing::Chunked(0) = self.framing {
            let line = read_line(&mut self.inner)?.ok_or_else(|| cut_short("before a chunk"))?;
            let size = line.split(';').next().unwrap_or("").trim();
            match u64::from_str_radix(size, 16) {
                Ok(0) => {
                    while read_line(&mut self.inner)?.is_some_and(|trailer| !trailer.is_empty()) {}
                    self.framing = Framing::Ended;
                }
                Ok(size) => self.framing = Framing::Chunked(size),
                Err(_) => {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, format!("chunk size {line:?}")));
                }
            }
        }
        let left = match &mut self.framing {
            Framing::Ended => return Ok(0),
            Framing::UntilClose => return self.inner.read(buffer),
            Framing::Length(0) => return Ok(0),
            Framing::Length(left) | Framing::Chunked(left) => left,
        };
        let wanted = buffer.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
        let n = self.inner.read(&mut buffer[..wanted])?;
        if n == 0 && wanted > 0 {
            return Err(cut_short("inside the body"));
        }
        *left -= n as u64;
        if let Framing::Chunked(0) = self.framing {
            read_line(&mut self.inner)?;
        }
        Ok(n)
    }
}

fn cut_short(place: &str) -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, format!("the connection ended {place}"))
}

/// Status and headers; skips `100 Continue`.
fn read_head(lines: &mut impl Read) -> io::Result<(u16, Vec<(String, String)>)> {
    loop {
        let first = read_line(lines)?.ok_or_else(|| cut_short("before the answer"))?;
        let status = first.split(' ').nth(1).and_then(|s| s.parse().ok()).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("not an HTTP status line: {first:?}"))
        })?;
        let mut headers = Vec::new();
        while let Some(line) = read_line(lines)?.filter(|l| !l.is_empty()) {
            let (name, value) = line.split_once(':').unwrap_or((&line, ""));
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        if status != 100 {
            return Ok((status, headers));
        }
    }
}

/// One line without its end; `None` at the end of input. Reads byte by byte from what are
/// buffered readers underneath, so that nothing beyond the line is taken.
fn read_line(reader: &mut impl Read) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    let mut byte = [0];
    loop {
        if reader.read(&mut byte)? == 0 {
            return if line.is_empty() { Ok(None) } else { Err(cut_short("inside a line")) };
        }
        match byte[0] {
            b'\n' => break,
            other => line.push(other),
        }
        if line.len() > LINE_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a line is longer than 64 KiB"));
        }
    }
    if line.last() == Some(&b'\r') {
        line.pop();
    }
    String::from_utf8(line).map(Some).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

fn find_header<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
}

/// A one-request server on a free port, for this crate's own tests: it reads a request head and
/// sends `answer`, then closes.
#[cfg(test)]
fn answer_once(answer: &'static str) -> HttpClient {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let client = HttpClient { address: listener.local_addr().unwrap(), limit: Duration::from_secs(10) };
    std::thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        let mut lines = std::io::BufRead::lines(BufReader::new(socket.try_clone().unwrap()));
        while lines.next().is_some_and(|l| !l.unwrap().is_empty()) {}
        (&socket).write_all(answer.as_bytes()).unwrap();
    });
    client
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_and_chunked_bodies() {
        let plain = answer_once("HTTP/1.1 404 Not Found\r\nContent-Length: 7\r\nX-A: b\r\n\r\n{\"a\":1}");
        let response = plain.get("/x").unwrap();
        assert_eq!((response.status, response.header("x-a")), (404, Some("b")));
        assert_eq!(response.json()["a"], 1);
        let chunked = answer_once(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n",
        );
        assert_eq!(chunked.get("/").unwrap().body, b"abcde");
    }

    #[test]
    fn events_across_chunks_and_comments() {
        let client = answer_once(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
             9\r\ndata: one\r\n14\r\n\n\n: alive\n\ndata: two\r\n10\r\n\n\ndata: [DONE]\n\n\r\n0\r\n\r\n",
        );
        let mut stream = client.open_stream("/", &Value::Null).unwrap();
        let mut events = Vec::new();
        while let Some(event) = stream.next_event().unwrap() {
            events.push(event);
        }
        assert_eq!(events, ["one", "two", "[DONE]"]);
    }

    #[test]
    fn a_body_cut_short_is_an_error() {
        let client = answer_once("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata:");
        let mut stream = client.open_stream("/", &Value::Null).unwrap();
        assert_eq!(stream.next_event().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
