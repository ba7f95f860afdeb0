//! The file: a fixed head, the matrices, and a table that says what they are.
//!
//! ```text
//! 0    magic, then offset, length and CRC-32 of the table, little-endian     (written last)
//! 4096 the matrices, each from a multiple of 4096 on
//!      the table, JSON
//! ```

use lockstep_backend::{Backend, PACKED_CHUNK_BYTES, PackedBytes};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::SystemTime;

const MAGIC: &[u8; 8] = b"LOCKPAK1";
const HEAD_BYTES: usize = 24;
/// Matrices start at multiples of this.
const ALIGN: u64 = 4096;
/// Of a table; one of a large mixture has some MiB.
const TABLE_BYTES_MAX: u32 = 256 << 20;

/// What a file holds.
#[derive(Serialize, Deserialize)]
struct Table {
    description: String,
    matrices: Vec<Entry>,
}

/// One matrix.
#[derive(Serialize, Deserialize)]
pub(super) struct Entry {
    pub what: String,
    pub offset: u64,
    pub bytes: u64,
    /// CRC-32 of each [`PACKED_CHUNK_BYTES`].
    pub checksums: Vec<u32>,
}

/// A file whose table is right; its matrices are checked as they are read.
pub(super) struct PackedFile {
    file: File,
    matrices: std::vec::IntoIter<Entry>,
}

impl PackedFile {
    /// `None` when there is none. Errors say what is wrong with it.
    pub fn open(path: &Path, description: &str) -> Result<Option<Self>, String> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("the file cannot be opened: {error}")),
        };
        let table = read_table(&file)?;
        if table.description != description {
            let differ = table.description.lines().zip(description.lines()).find(|(a, b)| a != b);
            let (theirs, ours) = differ.unwrap_or(("another description", "this one"));
            return Err(format!("they were made from something else ({theirs}, now {ours})"));
        }
        Ok(Some(Self { file, matrices: table.matrices.into_iter() }))
    }

    /// Fills the next matrices, which are what `wanted` says.
    pub fn read<B: Backend>(
        &mut self,
        backend: &B,
        linears: &mut [B::Linear],
        wanted: impl Iterator<Item = String>,
    ) -> Result<(), String> {
        let mut entries = Vec::with_capacity(linears.len());
        for (linear, wanted) in linears.iter().zip(wanted) {
            let entry = self.matrices.next().ok_or("matrices are missing at its end")?;
            if entry.what != wanted {
                return Err(format!("it has {} where {wanted} is needed", entry.what));
            }
            let bytes = backend.linear_bytes(linear);
            if entry.bytes != bytes as u64 || entry.checksums.len() != bytes.div_ceil(PACKED_CHUNK_BYTES) {
                return Err(format!("{wanted} has {} bytes instead of {bytes}", entry.bytes));
            }
            entries.push(entry);
        }
        let problem = Mutex::new(None);
        let read = |matrix: usize, at: usize, piece: &mut [u8]| {
            let entry: &Entry = &entries[matrix];
            let start = entry.offset + at as u64;
            let trouble = match self.file.read_exact_at(piece, start) {
                Ok(()) if crc32fast::hash(piece) == entry.checksums[at / PACKED_CHUNK_BYTES] => return true,
                Ok(()) => format!("the MiB at byte {start} has a wrong checksum"),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => "the file is cut off".into(),
                Err(error) => format!("the file cannot be read: {error}"),
            };
            problem
                .lock()
                .expect("invariant: nothing panics while it holds the problem")
                .get_or_insert(trouble);
            false
        };
        backend.fill_packed(linears, &read);
        match problem.into_inner().expect("invariant: nothing panics while it holds the problem") {
            Some(problem) => Err(problem),
            None => Ok(()),
        }
    }

    /// Files that are used stay longest. A failure costs at most that.
    pub fn mark_used(&self) {
        let _ = self.file.set_modified(SystemTime::now());
    }
}

fn read_table(file: &File) -> Result<Table, String> {
    let mut head = [0; HEAD_BYTES];
    let cut = |error: io::Error| match error.kind() {
        io::ErrorKind::UnexpectedEof => "the file is cut off".to_owned(),
        _ => format!("the file cannot be read: {error}"),
    };
    file.read_exact_at(&mut head, 0).map_err(cut)?;
    if &head[..8] != MAGIC {
        return Err("the file is of another version, or none of Lockstep's".into());
    }
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let (offset, len, checksum) = (u64::from(word(8)) | u64::from(word(12)) << 32, word(16), word(20));
    if len > TABLE_BYTES_MAX {
        return Err(format!("its table has {len} bytes, more than {TABLE_BYTES_MAX}"));
    }
    // The file's size bounds what is allocated.
    let size = file.metadata().map_err(cut)?.len();
    if offset.checked_add(len.into()).is_none_or(|end| end > size) {
        return Err("the file is cut off".into());
    }
    let mut table = vec![0; len as usize];
    file.read_exact_at(&mut table, offset).map_err(cut)?;
    if crc32fast::hash(&table) != checksum {
        return Err("its table has a wrong checksum".into());
    }
    serde_json::from_slice(&table).map_err(|error| format!("its table cannot be understood: {error}"))
}

/// Writes a whole file of these matrices, and waits until the disk has it.
pub(super) fn write(file: &File, description: &str, matrices: &[(String, PackedBytes)]) -> io::Result<()> {
    let (mut offset, mut entries) = (ALIGN, Vec::with_capacity(matrices.len()));
    for (what, packed) in matrices {
        let packed: &[u8] = (**packed).as_ref();
        let mut checksums = Vec::with_capacity(packed.len().div_ceil(PACKED_CHUNK_BYTES));
        for (index, piece) in packed.chunks(PACKED_CHUNK_BYTES).enumerate() {
            checksums.push(crc32fast::hash(piece));
            file.write_all_at(piece, offset + (index * PACKED_CHUNK_BYTES) as u64)?;
        }
        let bytes = packed.len() as u64;
        entries.push(Entry { what: what.clone(), offset, bytes, checksums });
        offset = (offset + packed.len() as u64).next_multiple_of(ALIGN);
    }
    let table = Table { description: description.into(), matrices: entries };
    let table = serde_json::to_vec(&table).map_err(io::Error::other)?;
    let len = u32::try_from(table.len()).map_err(io::Error::other)?;
    file.write_all_at(&table, offset)?;
    let mut head = Vec::with_capacity(HEAD_BYTES);
    head.extend_from_slice(MAGIC);
    head.extend_from_slice(&offset.to_le_bytes());
    head.extend_from_slice(&len.to_le_bytes());
    head.extend_from_slice(&crc32fast::hash(&table).to_le_bytes());
    file.write_all_at(&head, 0)?;
    file.sync_all()
}
