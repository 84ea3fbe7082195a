//! Finds a quote in a CSV file that swallows the rows after it: a quote that is never closed, or that is closed in the
//! middle of a later row. The CSV reader would read either as one long cell, and rows would be missing. Holds no text.

/// What the CSV file has at the byte that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CellState {
    /// At the beginning of a cell.
    Start,
    /// In a cell without quotes.
    Bare,
    /// In a cell that a quote opened.
    Quoted,
    /// After a quote in such a cell, which closes it unless another quote follows.
    Closing,
}

/// Reads the bytes of a CSV file, which may come in pieces.
#[derive(Debug)]
pub(super) struct Quotes {
    state: CellState,
    /// The line that is read, from 1.
    line: usize,
    /// The line in which the last quote opened a cell.
    opened: usize,
    /// What is left of the byte order mark that may begin the file.
    mark: &'static [u8],
    is_after_return: bool,
}

impl Quotes {
    pub(super) fn new() -> Self {
        let mark = "\u{feff}".as_bytes();
        Self { state: CellState::Start, line: 1, opened: 1, mark, is_after_return: false }
    }

    /// Reads the next bytes of the file.
    ///
    /// # Errors
    /// A message that names the line of a quote which takes in several lines and is closed in the middle of a cell.
    pub(super) fn read(&mut self, bytes: &[u8]) -> Result<(), String> {
        for byte in bytes {
            if let Some(rest) = self.mark.strip_prefix(&[*byte]) {
                self.mark = rest;
                continue;
            }
            self.mark = &[];
            let is_break = matches!(byte, b'\n' | b'\r');
            self.state = match (self.state, byte) {
                (CellState::Start, b'"') => {
                    self.opened = self.line;
                    CellState::Quoted
                }
                (CellState::Quoted, b'"') => CellState::Closing,
                (CellState::Quoted, _) | (CellState::Closing, b'"') => CellState::Quoted,
                (_, b',' | b'\n' | b'\r') => CellState::Start,
                (CellState::Closing, _) if self.line > self.opened => {
                    return Err(format!(
                        "the quote that opens a cell in line {} is closed in the middle of line {}, so that the lines between \
                         would be one cell: is one of these quotes missing, or not doubled?",
                        self.opened, self.line
                    ));
                }
                _ => CellState::Bare,
            };
            // A return and a newline are one break.
            self.line += usize::from(is_break && !(self.is_after_return && *byte == b'\n'));
            self.is_after_return = *byte == b'\r';
        }
        Ok(())
    }

    /// Call it at the end of the file.
    ///
    /// # Errors
    /// A message that names the line of a quote which is not closed.
    pub(super) fn end(&self) -> Result<(), String> {
        if self.state == CellState::Quoted {
            let line = self.opened;
            return Err(format!(
                "the quote that opens a cell in line {line} is not closed, so that all lines after it would be one cell"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(content: &str) -> Result<(), String> {
        let mut quotes = Quotes::new();
        // A byte at a time, as at the worst borders of pieces.
        content.as_bytes().chunks(1).try_for_each(|piece| quotes.read(piece))?;
        quotes.end()
    }

    #[test]
    fn cells_with_line_breaks_commas_and_doubled_quotes_are_whole() {
        for content in [
            "",
            "a,b\n1,\"two\nlines, \"\"quoted\"\"\"\n2,\"\"\n",
            "\u{feff}\"a\",b\r\n\"1\r\n2\",\"3\"",
            "a,5\" nails\n",
            "a,\"in one line\" and more\n",
        ] {
            assert_eq!(check(content), Ok(()), "{content:?}");
        }
    }

    #[test]
    fn a_quote_that_takes_in_later_rows_is_named_by_its_line() {
        let unclosed = check("\u{feff}a,b\r\n1,one\r\n2,\"two\r\n3,three\r\n").unwrap_err();
        assert!(unclosed.starts_with("the quote that opens a cell in line 3 is not closed"), "{unclosed}");
        let stray = check("a,b\n1,\"stray\n2,two\n3,\"three, four\"\n").unwrap_err();
        assert!(stray.contains("a cell in line 2 is closed in the middle of line 4"), "{stray}");
        assert!(check("\u{feff}\"a").is_err(), "behind a byte order mark");
    }
}
