//! The rows of an input, whatever it is: lines or files. A row is read only when the iterator is advanced.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json};

use super::input::CountedInput;
use super::lines::{InputLine, MAX_LINE};
use crate::protocol::batch_line::{self, BatchRequest, InvalidLine, RequestBody};
use crate::protocol::requests::body_of_text;
use crate::protocol::results::FileFormat;

/// One request of an input.
#[derive(Debug)]
pub struct InputRow {
    /// Its line number, blank lines included, or its number among the files; from 1.
    pub number: usize,
    /// The request, or why the row is not a request.
    pub request: Result<BatchRequest, InvalidLine>,
}

impl From<InputLine> for InputRow {
    fn from(InputLine { number, bytes }: InputLine) -> Self {
        let request = match bytes {
            Some(bytes) => batch_line::parse(&bytes),
            None => Err(InvalidLine { custom_id: None, problem: format!("longer than {MAX_LINE} bytes") }),
        };
        Self { number, request }
    }
}

/// The rows of an input that are not answered yet.
pub trait Rows: Iterator<Item = io::Result<InputRow>> + Send {
    /// A message that says how the input has changed since it was counted; none if it has not. Called when all rows are
    /// read.
    ///
    /// # Errors
    /// The file system's.
    fn changed(&mut self) -> io::Result<Option<String>>;
}

/// The rows of lines.
pub(super) struct LineRows(pub(super) CountedInput);

impl Iterator for LineRows {
    type Item = io::Result<InputRow>;

    fn next(&mut self) -> Option<Self::Item> {
        Some(self.0.next()?.map(InputRow::from))
    }
}

impl Rows for LineRows {
    fn changed(&mut self) -> io::Result<Option<String>> {
        self.0.changed()
    }
}

/// A file that is one request, and the name of the file that its result is written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputFile {
    /// The file.
    pub path: PathBuf,
    /// Its number among the files of the command, from 1.
    pub number: usize,
    /// The name of the file with its result, which is its `custom_id`.
    pub result: String,
    /// The URL of its request.
    pub url: String,
    /// The media type of its bytes; none: it is a text.
    pub media_type: Option<&'static str>,
    /// The format of its result.
    pub format: FileFormat,
    /// Fields of its request, beside the file.
    pub fields: Map<String, Json>,
    /// The largest file that is sent, in bytes.
    pub max_bytes: u64,
}

impl InputFile {
    fn request(&self) -> Result<BatchRequest, InvalidLine> {
        // Errors do not name the file, because the remarks of the results' folder do.
        let invalid = |problem: String| InvalidLine { custom_id: Some(self.result.clone()), problem };
        let bytes = read_at_most(&self.path, self.max_bytes).map_err(|error| invalid(error.to_string()))?;
        let body = self.body(bytes).map_err(invalid)?;
        Ok(BatchRequest { custom_id: self.result.clone(), url: self.url.clone(), body })
    }

    /// The body of a request for a file of this content.
    ///
    /// # Errors
    /// A message: the file is not UTF-8 and should be a text, one of the fields holds that text, or results cannot have the
    /// format.
    pub fn body(&self, content: Vec<u8>) -> Result<RequestBody, String> {
        let mut body: RequestBody = match self.media_type {
            Some(media_type) => RequestBody { media_type: Some(media_type.to_owned()), ..content.into() },
            None => {
                let text = String::from_utf8(content)
                    .map_err(|error| format!("not UTF-8 after byte {}", error.utf8_error().valid_up_to()))?;
                body_of_text(&self.url, text.trim_end()).into()
            }
        };
        body.add_fields(&self.fields)?;
        self.format.ask(Some(&self.url), &mut body)?;
        Ok(body)
    }
}

/// Whether a file is a table, by the ending of its name.
pub fn is_table(path: &Path) -> bool {
    ends_with(path, "csv") || ends_with(path, "parquet")
}

/// Whether the name of a file has this ending.
pub(super) fn ends_with(path: &Path, ending: &str) -> bool {
    path.extension().and_then(|it| it.to_str()).is_some_and(|it| it.eq_ignore_ascii_case(ending))
}

/// Reads a file, which may be a pipe, unless it has more bytes.
fn read_at_most(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        let problem = format!("the file has more than {max_bytes} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    Ok(bytes)
}

/// The rows of files.
pub(super) struct FileRows(pub(super) std::vec::IntoIter<InputFile>);

impl Iterator for FileRows {
    type Item = io::Result<InputRow>;

    fn next(&mut self) -> Option<Self::Item> {
        let file = self.0.next()?;
        Some(Ok(InputRow { number: file.number, request: file.request() }))
    }
}

impl Rows for FileRows {
    fn changed(&mut self) -> io::Result<Option<String>> {
        // If a file changes later, the next run detects that by its size and its time.
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::protocol::endpoints::{SPEECH_URL, TRANSCRIPTIONS_URL};

    #[test]
    fn a_file_is_a_request_for_the_format_of_its_result() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.mp3");
        fs::write(&path, "ID3").unwrap();
        let recording = InputFile {
            path: path.clone(),
            number: 7,
            result: "a.srt".into(),
            url: TRANSCRIPTIONS_URL.into(),
            media_type: Some("audio/mpeg"),
            format: FileFormat::Srt,
            fields: Map::from_iter([("language".to_owned(), "en".into())]),
            max_bytes: 3,
        };
        let mut rows = FileRows(vec![recording.clone()].into_iter());
        let InputRow { number, request } = rows.next().unwrap().unwrap();
        let request = request.unwrap();
        assert_eq!((number, request.custom_id.as_str()), (7, "a.srt"));
        assert_eq!(&request.body[..], b"ID3");
        let expected = [("language", "en"), ("response_format", "srt")];
        assert_eq!(
            request.body.headers(),
            expected.map(|(name, text)| (name.to_owned(), text.into())).into()
        );
        let small = InputFile { max_bytes: 2, ..recording.clone() };
        let error = small.request().unwrap_err();
        assert!(
            error.problem.contains("the file has more than 2 bytes") && error.custom_id.is_some(),
            "{error}"
        );
        fs::write(&path, "Hello \u{fc}.\n").unwrap();
        let fields = Map::from_iter([("speed".to_owned(), 2.into())]);
        let speech =
            InputFile { url: SPEECH_URL.into(), media_type: None, fields, max_bytes: 99, ..recording };
        let text = InputFile { format: FileFormat::Wav, ..speech.clone() };
        assert_eq!(
            &text.request().unwrap().body[..],
            "{\"input\":\"Hello \u{fc}.\",\"response_format\":\"wav\",\"speed\":2}".as_bytes()
        );
        assert!(speech.request().unwrap_err().problem.contains("only as .wav, .flac, .pcm"));
        fs::write(&path, b"\xff").unwrap();
        assert!(text.request().unwrap_err().problem.contains("not UTF-8 after byte 0"));
    }
}
