//! Writes the lines of an output in the order of the input. Owns the lines that wait for an earlier one: some in
//! memory, the rest in files without names beside the output, which the system removes with this process.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The most bytes of waiting lines in memory.
const IN_MEMORY: usize = 8 << 20;
/// Bytes of such a file, after which the next one begins: the space of a file is free again when none of its lines
/// waits.
const ASIDE: u64 = 64 << 20;
/// The most waiting lines: each takes some 50 bytes of memory, wherever it waits.
pub(super) const MOST_WAITING: usize = 500_000;

/// An output whose lines come in any order.
pub(super) struct Ordered {
    file: File,
    folder: PathBuf,
    /// The number of the next line to write.
    next: u64,
    waiting: BTreeMap<u64, Place>,
    /// Bytes of waiting lines in memory.
    in_memory: usize,
    /// Lines that wait on disk, by the number of their file; only the last file grows.
    aside: BTreeMap<u64, Aside>,
}

enum Place {
    Memory(Vec<u8>),
    Disk { file: u64, at: u64, length: usize },
}

struct Aside {
    file: File,
    end: u64,
    lines: usize,
}

impl Ordered {
    /// Writes to `file`, which is at its end; lines before number `next` are in it.
    pub(super) fn new(file: File, path: &Path, next: u64) -> Self {
        let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
        let folder = folder.to_owned();
        Self { file, folder, next, waiting: BTreeMap::new(), in_memory: 0, aside: BTreeMap::new() }
    }

    /// Lines written, those of earlier runs included.
    pub(super) fn written(&self) -> u64 {
        self.next
    }

    /// Lines that wait for an earlier one.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Takes the line with this number, and writes those whose turn it is: each whole, so that an interrupted run
    /// continues after it.
    ///
    /// # Errors
    /// The file system's.
    pub(super) fn put(&mut self, number: u64, line: Vec<u8>) -> io::Result<()> {
        if number != self.next {
            return self.set_aside(number, line);
        }
        self.file.write_all(&line)?;
        self.next += 1;
        while let Some(entry) = self.waiting.first_entry().filter(|entry| *entry.key() == self.next) {
            let line = match entry.remove() {
                Place::Memory(line) => {
                    self.in_memory -= line.len();
                    line
                }
                Place::Disk { file, at, length } => self.read_aside(file, at, length)?,
            };
            self.file.write_all(&line)?;
            self.next += 1;
        }
        Ok(())
    }

    /// The lines are on the disk.
    ///
    /// # Errors
    /// The file system's.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    fn set_aside(&mut self, number: u64, line: Vec<u8>) -> io::Result<()> {
        if self.in_memory + line.len() <= IN_MEMORY {
            self.in_memory += line.len();
            self.waiting.insert(number, Place::Memory(line));
            return Ok(());
        }
        let mut last = self.aside.last_key_value().map_or(0, |(number, _)| *number);
        if self.aside.get(&last).is_some_and(|aside| aside.end >= ASIDE) {
            last += 1;
        }
        let aside = match self.aside.entry(last) {
            Entry::Occupied(aside) => aside.into_mut(),
            Entry::Vacant(none) => {
                none.insert(Aside { file: tempfile::tempfile_in(&self.folder)?, end: 0, lines: 0 })
            }
        };
        aside.file.seek(SeekFrom::Start(aside.end))?;
        aside.file.write_all(&line)?;
        self.waiting.insert(number, Place::Disk { file: last, at: aside.end, length: line.len() });
        aside.end += line.len() as u64;
        aside.lines += 1;
        Ok(())
    }

    fn read_aside(&mut self, number: u64, at: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut line = vec![0; length];
        let Some(aside) = self.aside.get_mut(&number) else { return Ok(line) };
        aside.file.seek(SeekFrom::Start(at))?;
        aside.file.read_exact(&mut line)?;
        aside.lines -= 1;
        if aside.lines == 0 {
            self.aside.remove(&number);
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
        let ordered = Ordered::new(File::create(&path).unwrap(), &path, next);
        (folder, path, ordered)
    }

    #[test]
    fn a_late_line_holds_back_any_amount_of_others_on_disk_and_nothing_is_left_there() {
        let (folder, path, mut ordered) = ordered(0);
        let line = |number: u64| {
            let mut line = vec![b'a' + (number % 26) as u8; 1 << 20];
            line.push(b'\n');
            line
        };
        (1..90).for_each(|number| ordered.put(number, line(number)).unwrap());
        assert_eq!((ordered.written(), ordered.waiting(), ordered.aside.len()), (0, 89, 2));
        assert!(ordered.in_memory <= IN_MEMORY);
        assert_eq!(std::fs::read(&path).unwrap(), b"");
        ordered.put(0, line(0)).unwrap();
        let all: Vec<u8> = (0..90).flat_map(line).collect();
        assert!(std::fs::read(&path).unwrap() == all);
        assert_eq!((ordered.waiting(), ordered.in_memory), (0, 0));
        assert!(ordered.aside.is_empty(), "their space is free");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no second file has a name");
    }

    proptest! {
        #[test]
        fn any_order_is_written_in_order(order in Just((5u64..40).collect::<Vec<_>>()).prop_shuffle()) {
            let (_folder, path, mut ordered) = ordered(5);
            for number in order {
                ordered.put(number, format!("{number}\n").into_bytes()).unwrap();
            }
            let right: String = (5..40).map(|number| format!("{number}\n")).collect();
            prop_assert_eq!(std::fs::read_to_string(&path).unwrap(), right);
        }
    }
}
