//! A server that says what a test wants, byte for byte, one connection per answer.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::thread::JoinHandle;

/// A server that ends when it has given all its answers.
pub struct ScriptedServer {
    /// Its address.
    pub url: String,
    thread: JoinHandle<Vec<String>>,
}

impl ScriptedServer {
    /// Gives `answers` in order; an empty one closes the connection without a word.
    pub fn start(answers: &'static [&'static str]) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let thread = std::thread::spawn(move || {
            let give = |answer: &&str| {
                let (mut socket, _) = listener.accept().unwrap();
                let request = read_request(&mut BufReader::new(socket.try_clone().unwrap()));
                socket.write_all(answer.as_bytes()).unwrap();
                request
            };
            answers.iter().map(give).collect()
        });
        Self { url, thread }
    }

    /// The requests that were answered: head and body.
    pub fn requests(self) -> Vec<String> {
        self.thread.join().unwrap()
    }
}

fn read_request(reader: &mut impl BufRead) -> String {
    let mut request = String::new();
    let mut length = 0;
    while !request.ends_with("\r\n\r\n") {
        let from = request.len();
        assert!(reader.read_line(&mut request).unwrap() > 0, "the head ends: {request:?}");
        if let Some(value) = request[from..].to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    request + &String::from_utf8(body).unwrap()
}
