//! The file of answers: one whole line per decided request, and what an earlier run left in it.

use super::input::{Input, Line};
use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// What became of a request that was sent.
#[derive(Clone, Debug, PartialEq)]
pub enum Decided {
    /// The server answered.
    Answered {
        /// HTTP status.
        status: u16,
        /// The server's name for the request.
        request_id: Option<String>,
        /// JSON, or the text of what is none.
        body: Value,
    },
    /// There was no answer.
    Unanswered {
        /// A short name.
        code: String,
        /// A sentence.
        message: String,
    },
}

impl Decided {
    /// Whether the answer is the one that was asked for.
    pub fn is_good(&self) -> bool {
        matches!(self, Self::Answered { status: 200..=299, .. })
    }
}

/// The part of an output line that says whether its request is done.
#[derive(Deserialize)]
struct Written {
    custom_id: String,
    /// Null, or an object; a line of an input has none.
    response: Value,
}

impl Written {
    fn is_good(&self) -> bool {
        self.response["status_code"].as_u64().is_some_and(|status| (200..300).contains(&status))
    }
}

/// The output file, locked against a second run.
#[derive(Debug)]
pub struct Output {
    file: File,
    path: PathBuf,
    /// Requests that have their line, and whether it is a good answer.
    pub done: HashMap<String, bool>,
}

impl Output {
    /// Opens or creates the file, reads what it holds and cuts a torn last line.
    ///
    /// Errors when another run has it open, or a line is not of this format: the file is someone else's.
    pub fn open(path: &Path) -> Result<Self> {
        let named = || format!("--output {}", path.display());
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let file = file.with_context(named)?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            bail!(
                "--output {} is being written by another run; wait for it or name another file",
                path.display()
            );
        }
        let mut output = Self { file, path: path.to_owned(), done: HashMap::new() };
        let end = output.read().with_context(named)?;
        output.file.set_len(end).with_context(named)?;
        output.file.seek(SeekFrom::End(0)).with_context(named)?;
        Ok(output)
    }

    /// Notes the lines that are there; returns where the last whole one ends.
    fn read(&mut self) -> Result<u64> {
        let mut reader = BufReader::new(&self.file);
        let (mut end, mut line) = (0, Vec::new());
        for number in 1.. {
            line.clear();
            let read = reader.read_until(b'\n', &mut line)?;
            if line.last() != Some(&b'\n') {
                break;
            }
            match serde_json::from_slice::<Written>(&line) {
                Ok(written) => {
                    let good = written.is_good();
                    self.done.insert(written.custom_id, good);
                }
                Err(e) => bail!("line {number} is no answer of a batch ({e}); name another file"),
            }
            end += read as u64;
        }
        Ok(end)
    }

    /// Every answer belongs to a line of `input`; otherwise the files do not go together.
    pub fn check_belongs_to(&self, input: &Input) -> Result<()> {
        let ids: HashSet<&str> = input.lines.iter().map(|line| line.custom_id.as_str()).collect();
        let mut strangers: Vec<&str> =
            self.done.keys().map(String::as_str).filter(|id| !ids.contains(id)).collect();
        strangers.sort_unstable();
        match strangers.first() {
            None => Ok(()),
            Some(first) => bail!(
                "--output {} holds {} answers to requests that the input lacks (such as custom_id {first:?}); \
                 name another file",
                self.path.display(),
                strangers.len()
            ),
        }
    }

    /// Takes out the lines that are no good answers, so that their requests are sent again. The file is
    /// replaced in one step.
    pub fn forget_failed(&mut self) -> Result<()> {
        if self.done.values().all(|good| *good) {
            return Ok(());
        }
        let temporary = self.path.with_extension("part");
        let named = || format!("{}", temporary.display());
        let mut kept =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&temporary)?;
        flock(&kept, FlockOperation::NonBlockingLockExclusive).with_context(named)?;
        self.file.rewind()?;
        for line in BufReader::new(&self.file).split(b'\n') {
            let mut line = line?;
            if serde_json::from_slice::<Written>(&line).is_ok_and(|written| written.is_good()) {
                line.push(b'\n');
                kept.write_all(&line).with_context(named)?;
            }
        }
        kept.sync_data().with_context(named)?;
        std::fs::rename(&temporary, &self.path).with_context(named)?;
        self.file = kept;
        self.done.retain(|_, good| *good);
        Ok(())
    }

    /// Writes the line of a decided request.
    pub fn write(&mut self, line: &Line, decided: &Decided) -> Result<()> {
        let (response, error) = match decided {
            Decided::Answered { status, request_id, body } => {
                let response = json!({"status_code": status, "request_id": request_id, "body": body});
                (response, Value::Null)
            }
            Decided::Unanswered { code, message } => (Value::Null, json!({"code": code, "message": message})),
        };
        let id = batch_request_id(&line.custom_id);
        let json = json!({"id": id, "custom_id": line.custom_id, "response": response, "error": error});
        self.file
            .write_all(format!("{json}\n").as_bytes())
            .with_context(|| format!("--output {} cannot be written", self.path.display()))?;
        self.done.insert(line.custom_id.clone(), decided.is_good());
        Ok(())
    }

    /// Waits until everything is on the disk.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().with_context(|| format!("--output {}", self.path.display()))
    }
}

/// The same for the same request in every run.
fn batch_request_id(custom_id: &str) -> String {
    let hash = Sha256::digest(custom_id.as_bytes());
    let hex: String = hash.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
    format!("batch_req_{hex}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_testkit::TempDir;

    fn input(temp: &TempDir, ids: &[&str]) -> Input {
        let line =
            |id: &&str| json!({"custom_id": id, "method": "POST", "url": "/v1/completions", "body": {}});
        let text: Vec<String> = ids.iter().map(|id| line(id).to_string()).collect();
        std::fs::write(temp.join("in.jsonl"), text.join("\n")).unwrap();
        Input::read(&temp.join("in.jsonl")).unwrap()
    }

    fn answered(status: u16) -> Decided {
        Decided::Answered { status, request_id: None, body: json!({"x": "\n"}) }
    }

    #[test]
    fn a_torn_line_is_cut_and_whole_ones_are_kept() {
        let temp = TempDir::new("batch-output");
        let (path, input) = (temp.join("out.jsonl"), input(&temp, &["a", "b", "c"]));
        let mut output = Output::open(&path).unwrap();
        output.write(&input.lines[0], &answered(200)).unwrap();
        output.write(&input.lines[1], &answered(400)).unwrap();
        drop(output);
        let whole = std::fs::read(&path).unwrap();
        // Cut at every byte: the lines before stay, the torn one goes.
        let first = whole.iter().position(|b| *b == b'\n').unwrap() + 1;
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let output = Output::open(&path).unwrap();
            let kept = if cut == whole.len() {
                whole.len()
            } else if cut >= first {
                first
            } else {
                0
            };
            assert_eq!(std::fs::read(&path).unwrap(), whole[..kept], "cut at {cut}");
            assert_eq!(output.done.len(), whole[..kept].iter().filter(|b| **b == b'\n').count());
            output.check_belongs_to(&input).unwrap();
        }
    }

    #[test]
    fn failed_lines_are_forgotten_on_demand() {
        let temp = TempDir::new("batch-failed");
        let (path, input) = (temp.join("out.jsonl"), input(&temp, &["a", "b", "c"]));
        let mut output = Output::open(&path).unwrap();
        let unanswered = Decided::Unanswered { code: "timeout".into(), message: "no".into() };
        for (line, decided) in input.lines.iter().zip([answered(400), answered(200), unanswered]) {
            output.write(line, &decided).unwrap();
        }
        output.forget_failed().unwrap();
        output.write(&input.lines[0], &answered(200)).unwrap();
        drop(output);
        let done = Output::open(&path).unwrap().done;
        assert_eq!(done, HashMap::from([("b".to_owned(), true), ("a".to_owned(), true)]));
    }

    #[test]
    fn other_files_and_other_runs_are_left_alone() {
        let temp = TempDir::new("batch-other");
        let (path, input) = (temp.join("out.jsonl"), input(&temp, &["a"]));
        for text in
            ["notes of mine\n".to_owned(), std::fs::read_to_string(temp.join("in.jsonl")).unwrap() + "\n"]
        {
            std::fs::write(&path, &text).unwrap();
            assert!(format!("{:#}", Output::open(&path).unwrap_err()).contains("line 1"));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        std::fs::write(&path, "{\"custom_id\":\"z\",\"response\":null}\n").unwrap();
        let first = Output::open(&path).unwrap();
        assert!(first.check_belongs_to(&input).unwrap_err().to_string().contains("\"z\""));
        assert!(Output::open(&path).unwrap_err().to_string().contains("another run"));
    }
}
