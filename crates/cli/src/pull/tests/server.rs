//! An HTTP/1.1 server of a few lines, scripted answer by answer.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

/// What came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub path: String,
    /// First byte asked for.
    pub from: Option<usize>,
    /// What follows `Authorization: Bearer`, in lower case.
    pub token: Option<String>,
}

/// What goes out, after which the connection is closed.
#[derive(Clone)]
pub enum Answer {
    /// The content from where it was asked for, cut after so many bytes of body.
    Content { bytes: Vec<u8>, cut_after: usize },
    /// The whole content, whatever was asked for.
    Whole(Vec<u8>),
    /// The whole content without saying how long it is.
    Unsized(Vec<u8>),
    /// A status and headers without body.
    Status(&'static str),
    /// Nothing at all.
    Hangup,
}

impl Answer {
    pub fn full(bytes: &[u8]) -> Self {
        Answer::Content { bytes: bytes.to_vec(), cut_after: usize::MAX }
    }

    fn head_and_body(&self, from: Option<usize>) -> (String, &[u8]) {
        let status = |status: &str| format!("HTTP/1.1 {status}\r\nConnection: close\r\n");
        match self {
            Answer::Content { bytes, cut_after } => {
                let (start, total) = (from.unwrap_or(0), bytes.len());
                let mut head = match from {
                    None => status("200 OK"),
                    Some(_) => format!(
                        "{}Content-Range: bytes {start}-{}/{total}\r\n",
                        status("206 Partial Content"),
                        total - 1
                    ),
                };
                head += &format!("Content-Length: {}\r\n\r\n", total - start);
                (head, &bytes[start..total.min(start.saturating_add(*cut_after))])
            }
            Answer::Whole(bytes) => {
                (format!("{}Content-Length: {}\r\n\r\n", status("200 OK"), bytes.len()), bytes)
            }
            Answer::Unsized(bytes) => (status("200 OK") + "\r\n", bytes),
            Answer::Status(line) => (format!("{}Content-Length: 0\r\n\r\n", status(line)), &[]),
            Answer::Hangup => (String::new(), &[]),
        }
    }
}

/// Answers one request after the other.
pub struct Server {
    address: std::net::SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub fn of(content: &[u8]) -> Self {
        Self::scripted(vec![Answer::full(content)])
    }

    /// Answers the script in order, then repeats its last answer.
    pub fn scripted(script: Vec<Answer>) -> Self {
        Self::answering(move |i, _| script[i.min(script.len() - 1)].clone())
    }

    /// Answers with what `answer` says about the number of the request, from 0, and the request.
    pub fn answering(answer: impl Fn(usize, &Request) -> Answer + Send + 'static) -> Self {
        Self::at("127.0.0.1", answer)
    }

    /// The same at another address of this machine.
    pub fn at(host: &str, answer: impl Fn(usize, &Request) -> Answer + Send + 'static) -> Self {
        let listener = TcpListener::bind((host, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = requests.clone();
        // Lives until the test process ends; it owns nothing that outlives that.
        std::thread::spawn(move || {
            for (i, stream) in listener.incoming().enumerate() {
                let mut stream = stream.unwrap();
                let request = read_request(&mut BufReader::new(&stream));
                let answer = answer(i, &request);
                let (head, body) = answer.head_and_body(request.from);
                seen.lock().unwrap().push(request);
                // A client that has seen enough hangs up.
                let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
            }
        });
        Self { address, requests }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

fn read_request(reader: &mut impl BufRead) -> Request {
    let mut lines = reader.lines().map(|line| line.unwrap_or_default()).take_while(|line| !line.is_empty());
    let path = lines.next().and_then(|l| l.split(' ').nth(1).map(str::to_owned)).unwrap_or_default();
    let headers: Vec<String> = lines.map(|line| line.to_ascii_lowercase()).collect();
    let header = |start| headers.iter().find_map(|line| line.strip_prefix(start));
    let range = header("range: bytes=").map(|range| range.trim_end_matches('-').parse().unwrap());
    Request { path, from: range, token: header("authorization: bearer ").map(str::to_owned) }
}
