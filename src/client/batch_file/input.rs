//! Reads the input of a run: computes its digest, returns the lines that were counted when the run began, and checks
//! afterwards that the files have not changed. Owns the read position. Never writes a file.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use sha2::{Digest as _, Sha256};

use super::fields::changed;
use super::lines::{InputLine, InputLines};

/// Identifies an input by its content, and by how it becomes requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputDigest {
    /// Number of requests: lines that are not blank.
    pub lines: usize,
    /// Size of all files in bytes, with the newlines added between them.
    pub bytes: u64,
    /// SHA-256 of these bytes and of `parameters`, 64 hex digits.
    pub sha256: String,
    /// The flags that make requests of a table, for errors. None for lines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<Map<String, Json>>,
}

impl InputDigest {
    /// What differs between this input and the one of another run: what was there, and what is there now. If only the flags
    /// are known to differ, these are named.
    pub fn differences(&self, now: &Self) -> (String, String) {
        let inputs = || (format!("an input of {self}"), format!("an input of {now}"));
        let (Some(old), Some(new)) = (&self.parameters, &now.parameters) else { return inputs() };
        if old == new || (self.lines, self.bytes) != (now.lines, now.bytes) {
            return inputs();
        }
        let names = changed(old, new);
        let shown = |flags: &Map<String, Json>| {
            let flag = |name: &&String| match flags.get(*name) {
                Some(value) => format!("{name} {value}"),
                None => format!("no {name}"),
            };
            names.iter().map(flag).collect::<Vec<_>>().join(", ")
        };
        (shown(old), shown(new))
    }
}

impl fmt::Display for InputDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} lines ({} bytes, sha256 {:.12})", self.lines, self.bytes, self.sha256)
    }
}

/// A reader that counts and hashes the bytes it passes on.
#[derive(Debug)]
struct Hashing<R> {
    reader: R,
    bytes: u64,
    sha256: Sha256,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.bytes += read as u64;
        self.sha256.update(&buffer[..read]);
        Ok(read)
    }
}

/// The bytes of several files, one after the other. Where a file is followed by another one, a last line without its
/// newline gets one.
#[derive(Debug)]
struct Files {
    paths: VecDeque<PathBuf>,
    open: Option<File>,
    /// Whether the last byte read is not a newline.
    is_within_line: bool,
}

impl Files {
    fn open(paths: &[PathBuf]) -> io::Result<Self> {
        let mut paths: VecDeque<PathBuf> = paths.iter().cloned().collect();
        let open = paths.pop_front().map(open).transpose()?;
        Ok(Self { paths, open, is_within_line: false })
    }
}

impl Read for Files {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        while let Some(file) = &mut self.open {
            let read = file.read(buffer)?;
            if read > 0 {
                self.is_within_line = buffer[read - 1] != b'\n';
                return Ok(read);
            }
            // The last file stays open: it may grow.
            let Some(next) = self.paths.pop_front() else { break };
            self.open = Some(open(next)?);
            if std::mem::take(&mut self.is_within_line) {
                buffer[0] = b'\n';
                return Ok(1);
            }
        }
        Ok(0)
    }
}

fn open(path: PathBuf) -> io::Result<File> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    File::open(&path).map_err(named)
}

/// The lines of an input, whose bytes are hashed as they are read.
#[derive(Debug)]
pub(super) struct HashedLines {
    lines: InputLines<BufReader<Hashing<Files>>>,
    /// Number of lines read or skipped.
    count: usize,
}

impl HashedLines {
    /// Opens the files after their first `done` non-blank lines.
    ///
    /// # Errors
    /// The file system's, with the file's name.
    pub fn open(paths: &[PathBuf], done: usize) -> io::Result<Self> {
        let reader = Hashing { reader: Files::open(paths)?, bytes: 0, sha256: Sha256::new() };
        Ok(Self { lines: InputLines::after(BufReader::new(reader), done)?, count: done })
    }

    /// The digest of the bytes read so far, which is that of the whole input once all lines are read.
    pub fn digest(&self) -> InputDigest {
        let Hashing { bytes, sha256, .. } = self.lines.get_ref().get_ref();
        let sha256 = format!("{:x}", sha256.clone().finalize());
        InputDigest { lines: self.count, bytes: *bytes, sha256, parameters: None }
    }
}

impl Iterator for HashedLines {
    type Item = io::Result<InputLine>;

    fn next(&mut self) -> Option<Self::Item> {
        let line = self.lines.next();
        self.count += usize::from(matches!(line, Some(Ok(_))));
        line
    }
}

/// The lines of an input that were counted when the run began, and none after them.
#[derive(Debug)]
pub struct CountedInput {
    lines: HashedLines,
    counted: InputDigest,
}

impl CountedInput {
    /// Opens the `counted` input after its first `done` lines.
    pub(super) fn open(paths: &[PathBuf], done: usize, counted: InputDigest) -> io::Result<Self> {
        Ok(Self { lines: HashedLines::open(paths, done)?, counted })
    }

    /// A message that says how the file has changed since it was counted; none if it has not. Call it when all lines
    /// are read and answered, so that late changes are detected too. Two changes are not detected: a new file with the
    /// same name, and a file that is truncated after it was read to the end.
    pub fn changed(&mut self) -> io::Result<Option<String>> {
        let (answered, counted) = (self.lines.count, self.counted.lines);
        let how = match self.lines.next().transpose()? {
            Some(_) => "grown",
            None if answered < counted => "become shorter",
            None if self.lines.digest() != self.counted => "changed",
            None => return Ok(None),
        };
        Ok(Some(format!(
            "the input has {how} since the run began; {answered} of the {counted} lines that it had then were \
             answered; run again with another output for the new input"
        )))
    }
}

impl Iterator for CountedInput {
    type Item = io::Result<InputLine>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.lines.count < self.counted.lines { self.lines.next() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    struct Input {
        _folder: tempfile::TempDir,
        path: PathBuf,
    }

    impl Input {
        fn new(content: &str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("in.jsonl");
            fs::write(&path, content).unwrap();
            Self { _folder: folder, path }
        }

        fn digest(&self) -> InputDigest {
            let mut lines = HashedLines::open(std::slice::from_ref(&self.path), 0).unwrap();
            lines.by_ref().for_each(|line| assert!(line.is_ok()));
            lines.digest()
        }

        fn open(&self, done: usize, counted: &InputDigest) -> CountedInput {
            CountedInput::open(std::slice::from_ref(&self.path), done, counted.clone()).unwrap()
        }
    }

    fn texts(lines: &mut CountedInput) -> Vec<String> {
        let bytes = lines.map(|line| line.unwrap().bytes.unwrap());
        bytes.map(|bytes| String::from_utf8(bytes).unwrap()).collect()
    }

    #[test]
    fn the_digest_covers_all_bytes_wherever_reading_began() {
        let input = Input::new("abc");
        let digest = input.digest();
        assert_eq!((digest.lines, digest.bytes), (1, 3));
        // FIPS 180-2, appendix B.1.
        assert_eq!(digest.sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(digest.to_string(), "1 lines (3 bytes, sha256 ba7816bf8f01)");
        let long = Input::new(&"a line\n\n".repeat(20_000));
        let counted = long.digest();
        assert_eq!((counted.lines, counted.bytes), (20_000, 160_000));
        let mut behind = long.open(15_000, &counted);
        assert_eq!(texts(&mut behind).len(), 5_000);
        assert_eq!(behind.changed().unwrap(), None);
    }

    #[test]
    fn several_files_are_read_as_if_they_were_one() {
        let [one, two, three] = ["a\nb", "", "c\n"].map(Input::new);
        let paths = [&one, &two, &three].map(|input| input.path.clone());
        let mut lines = HashedLines::open(&paths, 1).unwrap();
        let read: Vec<_> = lines.by_ref().map(|line| line.unwrap()).collect();
        let shown: Vec<_> = read.iter().map(|line| (line.number, line.bytes.as_deref().unwrap())).collect();
        assert_eq!(shown, [(2, &b"b"[..]), (3, b"c")]);
        assert_eq!(lines.digest(), Input::new("a\nb\nc\n").digest());
        let missing = three.path.with_file_name("missing.jsonl");
        let error = HashedLines::open(std::slice::from_ref(&missing), 0).unwrap_err().to_string();
        assert!(error.contains(missing.to_str().unwrap()), "{error}");
    }

    #[test]
    fn lines_added_after_the_count_are_not_returned() {
        let input = Input::new("a\nb\n");
        let counted = input.digest();
        let mut lines = input.open(0, &counted);
        fs::write(&input.path, "a\nb\nc\n").unwrap();
        assert_eq!(texts(&mut lines), ["a", "b"]);
        let changed = lines.changed().unwrap().unwrap();
        let expected = "the input has grown since the run began; 2 of the 2 lines that it had then";
        assert!(changed.starts_with(expected), "{changed}");
    }

    #[test]
    fn growth_after_the_end_was_read_is_detected() {
        let input = Input::new("a\nb");
        let mut lines = input.open(0, &input.digest());
        assert_eq!(texts(&mut lines), ["a", "b"]);
        fs::write(&input.path, "a\nb\nc").unwrap();
        assert!(lines.changed().unwrap().unwrap().contains("has grown"));
    }

    #[test]
    fn an_input_with_fewer_lines_than_counted_is_reported_as_shorter() {
        let input = Input::new("a\nb\nc\n");
        let counted = input.digest();
        fs::write(&input.path, "a\nb\n").unwrap();
        let mut lines = input.open(1, &counted);
        assert_eq!(texts(&mut lines), ["b"]);
        let changed = lines.changed().unwrap().unwrap();
        assert!(changed.contains("has become shorter since the run began; 2 of the 3 lines"), "{changed}");
    }

    #[test]
    fn other_bytes_in_the_same_number_of_lines_are_a_change() {
        let input = Input::new("a\nb\n");
        let counted = input.digest();
        for other in ["a\nB\n", "A\nb\n", "a\n\nb\n", "a\nb"] {
            fs::write(&input.path, other).unwrap();
            let mut lines = input.open(1, &counted);
            assert_eq!(texts(&mut lines).len(), 1);
            assert!(lines.changed().unwrap().unwrap().contains("has changed"), "{other:?}");
        }
    }
}
