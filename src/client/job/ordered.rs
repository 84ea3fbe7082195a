//! Writes results in the order of the input, if the output needs an order. Owns the lines that wait for an earlier one: some in
//! memory, the rest in spill files. Those are unnamed files in the output's folder, which the system removes when this
//! process ends.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::client::batch_file::Results;
use crate::protocol::batch_line::OutputError;

/// Maximum bytes of waiting lines in memory.
const MAX_BYTES_IN_MEMORY: usize = 8 << 20;
/// Size in bytes at which the next spill file begins. The space of a file is freed when none of its lines waits.
const SPILL_FILE_BYTES: u64 = 64 << 20;
/// Maximum number of waiting lines. Each takes about 50 bytes of memory, wherever it waits.
pub(super) const MAX_WAITING: usize = 500_000;

/// An output whose lines arrive in any order.
pub(super) struct Ordered {
    pub(super) results: Results,
    folder: PathBuf,
    /// The number of the next line to write.
    next: u64,
    waiting: BTreeMap<u64, WaitingLine>,
    /// Bytes of waiting lines in memory.
    in_memory: usize,
    /// Spill files by number; only the last one grows.
    spill_files: BTreeMap<u64, SpillFile>,
}

enum WaitingLine {
    Memory(Vec<u8>),
    Disk { file: u64, offset: u64, length: usize },
}

struct SpillFile {
    file: File,
    /// Its length in bytes.
    end: u64,
    /// Number of its lines that still wait.
    lines: usize,
}

impl Ordered {
    /// Writes to `results`, which has those before the one with the number `next`. Spill files are beside `path`.
    pub(super) fn new(results: Results, path: &Path, next: u64) -> Self {
        let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
        let folder = folder.to_owned();
        Self { results, folder, next, waiting: BTreeMap::new(), in_memory: 0, spill_files: BTreeMap::new() }
    }

    /// Number of lines written, those of earlier runs included.
    pub(super) fn written(&self) -> u64 {
        self.next
    }

    /// Number of lines that wait for an earlier one.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Takes the line with this number, and writes those whose turn it is: each whole, so that an interrupted run
    /// continues after it. If the output needs no order, the line is written now. Returns why results were not written,
    /// though their lines have one.
    ///
    /// # Errors
    /// The file system's.
    pub(super) fn put(&mut self, number: u64, line: Vec<u8>) -> io::Result<Vec<OutputError>> {
        if number != self.next && self.results.is_ordered() {
            return self.store(number, line).map(|()| Vec::new());
        }
        let mut failed = Vec::from_iter(self.write(&line)?);
        while let Some(entry) = self.waiting.first_entry().filter(|entry| *entry.key() == self.next) {
            let line = match entry.remove() {
                WaitingLine::Memory(line) => {
                    self.in_memory -= line.len();
                    line
                }
                WaitingLine::Disk { file, offset, length } => self.read_spilled(file, offset, length)?,
            };
            failed.extend(self.write(&line)?);
        }
        Ok(failed)
    }

    fn write(&mut self, line: &[u8]) -> io::Result<Option<OutputError>> {
        let failed = self.results.write(line)?;
        self.next += 1;
        Ok(failed)
    }

    /// Keeps a line until its turn: in memory if there is room, otherwise on disk.
    fn store(&mut self, number: u64, line: Vec<u8>) -> io::Result<()> {
        if self.in_memory + line.len() <= MAX_BYTES_IN_MEMORY {
            self.in_memory += line.len();
            self.waiting.insert(number, WaitingLine::Memory(line));
            return Ok(());
        }
        let mut last = self.spill_files.last_key_value().map_or(0, |(number, _)| *number);
        if self.spill_files.get(&last).is_some_and(|spill_file| spill_file.end >= SPILL_FILE_BYTES) {
            last += 1;
        }
        let spill_file = match self.spill_files.entry(last) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                entry.insert(SpillFile { file: tempfile::tempfile_in(&self.folder)?, end: 0, lines: 0 })
            }
        };
        spill_file.file.seek(SeekFrom::Start(spill_file.end))?;
        spill_file.file.write_all(&line)?;
        self.waiting
            .insert(number, WaitingLine::Disk { file: last, offset: spill_file.end, length: line.len() });
        spill_file.end += line.len() as u64;
        spill_file.lines += 1;
        Ok(())
    }

    /// Reads a waiting line from the spill file with this number. Removes the file after its last waiting line.
    fn read_spilled(&mut self, number: u64, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut line = vec![0; length];
        let Some(spill_file) = self.spill_files.get_mut(&number) else { return Ok(line) };
        spill_file.file.seek(SeekFrom::Start(offset))?;
        spill_file.file.read_exact(&mut line)?;
        spill_file.lines -= 1;
        if spill_file.lines == 0 {
            self.spill_files.remove(&number);
        }
        Ok(line)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ordered(next: u64) -> (tempfile::TempDir, PathBuf, Ordered) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.jsonl");
        let ordered = Ordered::new(Results::begin(&path).unwrap(), &path, next);
        (folder, path, ordered)
    }

    #[test]
    fn lines_that_wait_for_a_late_one_are_spilled_and_leave_no_file() {
        let (folder, path, mut ordered) = ordered(0);
        let line = |number: u64| {
            let mut line = vec![b'a' + (number % 26) as u8; 1 << 20];
            line.push(b'\n');
            line
        };
        (1..90).for_each(|number| _ = ordered.put(number, line(number)).unwrap());
        assert_eq!((ordered.written(), ordered.waiting(), ordered.spill_files.len()), (0, 89, 2));
        assert!(ordered.in_memory <= MAX_BYTES_IN_MEMORY);
        assert_eq!(std::fs::read(&path).unwrap(), b"");
        ordered.put(0, line(0)).unwrap();
        let all: Vec<u8> = (0..90).flat_map(line).collect();
        assert!(std::fs::read(&path).unwrap() == all);
        assert_eq!((ordered.waiting(), ordered.in_memory), (0, 0));
        assert!(ordered.spill_files.is_empty(), "their space is free");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no second file has a name");
    }

    proptest! {
        #[test]
        fn any_order_is_written_in_order(order in Just((5u64..40).collect::<Vec<_>>()).prop_shuffle()) {
            let (_folder, path, mut ordered) = ordered(5);
            for number in order {
                ordered.put(number, format!("{number}\n").into_bytes()).unwrap();
            }
            let expected: String = (5..40).map(|number| format!("{number}\n")).collect();
            prop_assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
        }
    }
}
