//! Splits a file into lines, one in memory at a time. A line is any bytes up to a newline or the end, valid
//! UTF-8 or not. Blank lines are skipped. Owns the read position.

use std::io::{self, BufRead};

/// The longest input line, in bytes: 64 MiB.
pub const MAX_LINE: usize = 64 << 20;

/// A non-blank line of the input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputLine {
    /// Its line number, from 1, blank lines included.
    pub number: usize,
    /// Its bytes without the newline. None: it is longer than [`MAX_LINE`].
    pub bytes: Option<Vec<u8>>,
}

/// A line of the file, blank or not.
pub(super) struct RawLine {
    /// Its bytes without the newline. None: it is over the limit.
    pub bytes: Option<Vec<u8>>,
    /// Its length in the file, newline included.
    pub length: u64,
    /// Whether it ends with a newline; otherwise the file ended.
    pub complete: bool,
}

/// Reads the next line; none at the end. A line over `limit` bytes is returned without its bytes.
pub(super) fn read_line(reader: &mut impl BufRead, limit: usize) -> io::Result<Option<RawLine>> {
    let mut kept = Vec::new();
    let mut line = RawLine { bytes: None, length: 0, complete: false };
    let mut is_too_long = false;
    while !line.complete {
        let chunk = match reader.fill_buf() {
            Ok(chunk) => chunk,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if chunk.is_empty() {
            break;
        }
        let newline = chunk.iter().position(|byte| *byte == b'\n');
        let content = &chunk[..newline.unwrap_or(chunk.len())];
        is_too_long |= kept.len() + content.len() > limit;
        if !is_too_long {
            kept.extend_from_slice(content);
        }
        line.complete = newline.is_some();
        let consumed = content.len() + usize::from(line.complete);
        line.length += consumed as u64;
        reader.consume(consumed);
    }
    line.bytes = (!is_too_long).then_some(kept);
    Ok((line.length > 0).then_some(line))
}

/// The non-blank lines of an input, as a stream.
#[derive(Debug)]
pub struct InputLines<R> {
    reader: R,
    number: usize,
    limit: usize,
}

impl<R: BufRead> InputLines<R> {
    /// Reads from the start of `reader`.
    pub fn new(reader: R) -> Self {
        Self { reader, number: 0, limit: MAX_LINE }
    }

    /// Reads `reader` from its start and skips its first `done` non-blank lines.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn after(reader: R, done: usize) -> io::Result<Self> {
        let mut lines = Self::new(reader);
        for _ in 0..done {
            if lines.next_line()?.is_none() {
                break;
            }
        }
        Ok(lines)
    }

    /// The reader. It has read ahead of the lines, into its buffer.
    pub(super) fn get_ref(&self) -> &R {
        &self.reader
    }

    fn next_line(&mut self) -> io::Result<Option<InputLine>> {
        while let Some(RawLine { mut bytes, .. }) = read_line(&mut self.reader, self.limit)? {
            self.number += 1;
            if let Some(bytes) = &mut bytes {
                // Windows editors begin a file with a byte order mark, which is not JSON.
                if self.number == 1 && bytes.starts_with(b"\xef\xbb\xbf") {
                    bytes.drain(..3);
                }
                if bytes.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
            }
            return Ok(Some(InputLine { number: self.number, bytes }));
        }
        Ok(None)
    }
}

impl<R: BufRead> Iterator for InputLines<R> {
    type Item = io::Result<InputLine>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_line().transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(input: &[u8]) -> Vec<(usize, Vec<u8>)> {
        // With a buffer of three bytes each line needs several reads.
        let reader = io::BufReader::with_capacity(3, input);
        let lines = InputLines::new(reader).map(|line| line.unwrap());
        lines.map(|line| (line.number, line.bytes.unwrap())).collect()
    }

    #[test]
    fn blank_lines_are_skipped_but_counted() {
        let lines = read(b"\na\n  \r\n\tb\r\n\n");
        assert_eq!(lines, [(2, b"a".to_vec()), (4, b"\tb\r".to_vec())]);
    }

    #[test]
    fn a_last_line_without_newline_is_a_line() {
        assert_eq!(read(b"a\nbcdefgh"), [(1, b"a".to_vec()), (2, b"bcdefgh".to_vec())]);
        assert_eq!(read(b""), []);
    }

    #[test]
    fn bytes_that_are_not_utf8_are_a_line_too() {
        assert_eq!(read(b"\xff\xfe\n"), [(1, b"\xff\xfe".to_vec())]);
    }

    #[test]
    fn a_byte_order_mark_is_not_part_of_the_first_line() {
        assert_eq!(read(b"\xef\xbb\xbfa\n"), [(1, b"a".to_vec())]);
        assert_eq!(read(b"\xef\xbb\xbf\nb\n"), [(2, b"b".to_vec())]);
    }

    #[test]
    fn a_line_over_the_limit_has_no_bytes_and_the_next_line_is_intact() {
        let mut lines = InputLines::new(io::BufReader::with_capacity(3, &b"12345\n123456\n1\n"[..]));
        lines.limit = 5;
        let lines: Vec<InputLine> = lines.map(|line| line.unwrap()).collect();
        let lengths: Vec<_> = lines.iter().map(|line| line.bytes.as_ref().map(Vec::len)).collect();
        assert_eq!(lengths, [Some(5), None, Some(1)]);
    }

    #[test]
    fn after_skipping_lines_the_line_numbers_are_right() {
        let input = &b"a\n\nb\nc\n"[..];
        let rest: Vec<InputLine> = InputLines::after(input, 2).unwrap().map(|l| l.unwrap()).collect();
        assert_eq!(rest, [InputLine { number: 4, bytes: Some(b"c".to_vec()) }]);
        assert_eq!(InputLines::after(input, 9).unwrap().count(), 0);
    }
}
