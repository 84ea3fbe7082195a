//! Finds where an interrupted run continues: after the last whole line of the output, because the output is written in
//! the order of the input. The lines of the output must answer this input. Decides what is a torn line, and what is the
//! output of another input. Reads all files once, as streams. Does not check which model made the existing lines.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::FileError;
use super::errors::ErrorCounts;
use super::input::{CountedInput, HashedLines, InputDigest};
use super::lines::{InputLine, read_line};
use crate::protocol::batch_line::{OutputError, OutputSummary, is_torn_output, parse, read_output};

/// The longest output line that resuming reads, in bytes: 1 GiB. A reply is far below it.
const MAX_OUTPUT_LINE: usize = 1 << 30;

/// Where a run continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResumePoint {
    /// Requests whose output line is written: skip this many non-blank input lines.
    pub done: usize,
    /// Number of requests.
    pub total: usize,
    /// Length of the output's whole lines in bytes; a torn line may follow.
    pub whole_bytes: u64,
    /// The digest of the current input. Empty for files, since each file is known by its name.
    pub input: InputDigest,
    /// The errors in the output's whole lines.
    pub errors: ErrorCounts,
}

/// An open and locked output. If nothing was written to it when it is dropped, the files that this run has made are removed:
/// a refused command leaves none.
#[derive(Debug)]
pub struct Claimed {
    pub(super) file: File,
    /// The output and the files beside it, as far as they did not exist before.
    made: Vec<PathBuf>,
}

impl Claimed {
    /// This run has also made this folder. It is removed last, unless other files are in it.
    pub(super) fn also_made(&mut self, folder: PathBuf) {
        self.made.push(folder);
    }

    /// Lets the output stay, even if it is empty.
    pub(super) fn keep(&mut self) {
        self.made.clear();
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if self.file.metadata().is_ok_and(|it| it.len() == 0) {
            for path in &self.made {
                let _ = if path.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) };
            }
        }
    }
}

/// Opens the output, creates it if it does not exist, and locks it until the file is closed. Call it before
/// [`ResumePoint::find`], so that no lines are counted or cut off that another run is still writing. `beside` are the
/// other files that the run will make, in the order in which they are removed if it writes nothing.
///
/// # Errors
/// The file system's, or another run writes it.
pub fn claim(output: &Path, beside: &[PathBuf]) -> Result<Claimed, FileError> {
    let is_missing = |path: &&PathBuf| path.symlink_metadata().is_err();
    let made = [output.to_owned()].iter().chain(beside).filter(is_missing).cloned().collect();
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(output);
    let file = file.map_err(|error| match output.parent() {
        Some(folder) if error.kind() == io::ErrorKind::NotFound && folder != "" && !folder.exists() => {
            FileError::Refused(format!("the output's folder {} does not exist", folder.display()))
        }
        _ => FileError::at(output.display())(error),
    })?;
    match file.try_lock() {
        // Another run that wrote nothing has removed it meanwhile.
        Ok(()) if file.metadata().is_ok_and(|it| it.nlink() == 0) => claim(output, beside),
        Ok(()) => Ok(Claimed { file, made }),
        Err(TryLockError::WouldBlock) => {
            Err(FileError::Refused(format!("{}: another run writes it", output.display())))
        }
        Err(TryLockError::Error(error)) => Err(FileError::at(output.display())(error)),
    }
}

impl ResumePoint {
    /// Compares the output written so far, if any, with the input. Changes neither. At most the first `most` lines of the
    /// output count.
    ///
    /// # Errors
    /// The output is not of this input, or a file cannot be read.
    pub fn find(input: &[PathBuf], output: &Path, most: usize) -> Result<Self, FileError> {
        // The errors of `HashedLines::open` already name the file.
        let mut requests =
            HashedLines::open(input, 0).map_err(|error| FileError::Refused(error.to_string()))?;
        let ids = requests.by_ref().map(|line| line.map(RequestId::of).map_err(FileError::at("the input")));
        let point = Self::compare(ids, output, most)?;
        Ok(Self { input: requests.digest(), ..point })
    }

    /// Compares the output written so far, if any, with the ids of the requests. The digest of the input is left empty.
    pub(super) fn compare(
        requests: impl Iterator<Item = Result<RequestId, FileError>>,
        output: &Path,
        most: usize,
    ) -> Result<Self, FileError> {
        let mut answers = match File::open(output) {
            Ok(file) => Some(OutputLines::new(BufReader::new(file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(FileError::at(output.display())(error)),
        };
        let (mut done, mut total, mut whole_bytes, mut errors) = (0, 0, 0, ErrorCounts::default());
        let mut next_answer = || match &mut answers {
            Some(answers) if answers.line < most => answers.next(output),
            _ => Ok(None),
        };
        let mut answer = next_answer()?;
        for request in requests {
            let request = request?;
            total += 1;
            let Some(OutputLine { custom_id, error, end }) = answer else { continue };
            check_same_id(total, custom_id, request)?;
            error.into_iter().for_each(|error| errors.add(error));
            (done, whole_bytes) = (total, end);
            answer = next_answer()?;
        }
        if answer.is_some() {
            let problem =
                format!("the output has more lines than the input has requests ({total}): not its output");
            return Err(FileError::Refused(problem));
        }
        Ok(Self { done, total, whole_bytes, input: InputDigest::default(), errors })
    }

    /// Cuts off the torn end of the output, which [`claim`] returned, and moves it after its whole lines.
    ///
    /// # Errors
    /// The file system's.
    pub fn cut(&self, claimed: &mut Claimed, output: &Path) -> Result<(), FileError> {
        let file = &mut claimed.file;
        let cut = file.set_len(self.whole_bytes).and_then(|()| file.seek(SeekFrom::End(0)));
        cut.map(drop).map_err(FileError::at(output.display()))
    }

    /// Opens the input after the requests that are done.
    ///
    /// # Errors
    /// The file system's, with the file's name.
    pub fn open_input(&self, input: &[PathBuf]) -> io::Result<CountedInput> {
        CountedInput::open(input, self.done, self.input.clone())
    }
}

/// One whole output line.
struct OutputLine {
    custom_id: Option<String>,
    error: Option<OutputError>,
    /// Offset after its newline.
    end: u64,
}

/// The whole lines of an output.
struct OutputLines<R> {
    reader: R,
    /// Number of lines read.
    line: usize,
    /// Length of the whole lines read, in bytes.
    end: u64,
}

impl<R: BufRead> OutputLines<R> {
    fn new(reader: R) -> Self {
        Self { reader, line: 0, end: 0 }
    }

    /// The next whole line; none at the end, and at a torn last line. A torn line lacks only its newline, or holds the
    /// beginning of an output line or only zeros (`is_torn_output`).
    fn next(&mut self, output: &Path) -> Result<Option<OutputLine>, FileError> {
        let name = output.display();
        let line = read_line(&mut self.reader, MAX_OUTPUT_LINE).map_err(FileError::at(&name))?;
        let Some(line) = line else { return Ok(None) };
        self.line += 1;
        let number = self.line;
        let Some(bytes) = line.bytes else {
            let problem = format!("{name}: line {number} is longer than {MAX_OUTPUT_LINE} bytes");
            return Err(FileError::Refused(problem));
        };
        let problem = match read_output(&bytes) {
            Ok(OutputSummary { custom_id, error }) if line.complete => {
                self.end += line.length;
                return Ok(Some(OutputLine { custom_id, error, end: self.end }));
            }
            Ok(_) => return Ok(None),
            Err(problem) => problem,
        };
        let is_last = self.reader.fill_buf().map_err(FileError::at(&name))?.is_empty();
        // A file with any other line may have been named as the output by mistake, and must never be cut.
        if is_last && is_torn_output(&bytes) {
            Ok(None)
        } else {
            let problem = format!("{name}: line {number} of the output is not batch output: {problem}");
            Err(FileError::Refused(problem))
        }
    }
}

/// The id of a request of the input.
pub(super) struct RequestId {
    /// Its number in the input, from 1.
    pub(super) number: usize,
    /// None if it has no readable id.
    pub(super) custom_id: Option<String>,
}

impl RequestId {
    fn of(line: InputLine) -> Self {
        let custom_id = line.bytes.and_then(|bytes| match parse(&bytes) {
            Ok(request) => Some(request.custom_id),
            Err(invalid) => invalid.custom_id,
        });
        Self { number: line.number, custom_id }
    }
}

/// Checks that an output line has the `custom_id` of the request in its place.
fn check_same_id(output_line: usize, answered: Option<String>, request: RequestId) -> Result<(), FileError> {
    let requested = request.custom_id;
    if answered == requested {
        return Ok(());
    }
    let shown = |id: Option<String>| id.map_or("null".to_owned(), |id| format!("{id:?}"));
    let (output_id, input_line, input_id) = (shown(answered), request.number, shown(requested));
    Err(FileError::Refused(format!(
        "line {output_line} of the output answers {output_id}, line {input_line} of the input asks \
         {input_id}: not the output of this input; give another output file, or remove this one"
    )))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::slice;

    use super::super::lines::InputLines;
    use super::*;
    use crate::protocol::batch_line::{Notes, body_value, error_line, response_line};
    use crate::protocol::{Message, Properties};

    /// Five requests, one of them broken, with blank lines between.
    const INPUT: &str = concat!(
        "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/embeddings\",\"body\":{}}\n",
        "\n",
        "{\"custom_id\":\"b\",\"method\":\"POST\",\"url\":\"/v1/embeddings\",\"body\":{}}\n",
        "no request\n",
        "  \n",
        "{\"custom_id\":\"c\",\"method\":\"GET\",\"url\":\"/v1/embeddings\",\"body\":{}}\n",
        "{\"custom_id\":\"d\",\"method\":\"POST\",\"url\":\"/v1/embeddings\",\"body\":{}}",
    );

    struct Files {
        _folder: tempfile::TempDir,
        input: PathBuf,
        output: PathBuf,
    }

    fn files(input: &str, output: Option<&[u8]>) -> Files {
        let folder = tempfile::tempdir().unwrap();
        let files = Files {
            input: folder.path().join("in.jsonl"),
            output: folder.path().join("out.jsonl"),
            _folder: folder,
        };
        std::fs::write(&files.input, input).unwrap();
        if let Some(output) = output {
            std::fs::write(&files.output, output).unwrap();
        }
        files
    }

    /// Replies of each kind: JSON, a text, and a file.
    fn reply(custom_id: &str) -> Message {
        let (content_type, body): (_, &[u8]) = match custom_id {
            "a" => ("application/json", b"{\"data\":\"\xc3\xbc\"}"),
            "b" => ("text/plain", b"a\n\xc3\xbc"),
            _ => ("audio/wav", b"RIFF\xff\0\n"),
        };
        let properties = Properties { content_type: Some(content_type.into()), ..Properties::default() };
        Message { properties, body: body.into() }
    }

    fn answer(line: &InputLine) -> Vec<u8> {
        match parse(line.bytes.as_deref().unwrap()) {
            Ok(request) => {
                let reply = reply(&request.custom_id);
                response_line(&request.custom_id, 200, "r", &Notes::new(), &body_value(&reply))
            }
            Err(invalid) => error_line(line.number, &invalid),
        }
    }

    /// The output of an uninterrupted run.
    fn whole_output() -> Vec<u8> {
        InputLines::new(INPUT.as_bytes()).flat_map(|line| answer(&line.unwrap())).collect()
    }

    fn run(files: &Files) -> ResumePoint {
        let point = ResumePoint::find(slice::from_ref(&files.input), &files.output, usize::MAX).unwrap();
        let mut output = claim(&files.output, &[]).unwrap();
        point.cut(&mut output, &files.output).unwrap();
        for line in point.open_input(slice::from_ref(&files.input)).unwrap() {
            output.file.write_all(&answer(&line.unwrap())).unwrap();
        }
        point
    }

    #[test]
    fn without_an_output_all_requests_are_to_do() {
        let files = files(INPUT, None);
        let point = run(&files);
        assert_eq!((point.done, point.whole_bytes, point.input.lines), (0, 0, 5));
        assert_eq!(point.input.bytes, INPUT.len() as u64);
        assert_eq!(std::fs::read(&files.output).unwrap(), whole_output());
    }

    #[test]
    fn a_finished_output_leaves_nothing_to_do() {
        let whole = whole_output();
        let files = files(INPUT, Some(&whole));
        let point = run(&files);
        assert_eq!((point.done, point.whole_bytes), (5, whole.len() as u64));
        assert_eq!(point.errors.total(), 2, "the lines that are no requests");
        assert_eq!(std::fs::read(&files.output).unwrap(), whole);
    }

    #[test]
    fn cut_at_any_byte_the_resumed_output_equals_the_uninterrupted_one() {
        let whole = whole_output();
        for cut in 0..whole.len() {
            let files = files(INPUT, Some(&whole[..cut]));
            let point = run(&files);
            let newlines = whole[..cut].iter().filter(|byte| **byte == b'\n').count();
            assert_eq!(point.done, newlines, "cut at {cut}");
            assert_eq!(std::fs::read(&files.output).unwrap(), whole, "cut at {cut}");
        }
    }

    #[test]
    fn a_last_line_that_is_not_json_is_torn_and_redone() {
        let whole = whole_output();
        for torn in [&b"{\"id\":\n"[..], b"\0\0\0\0\n", b"\n"] {
            let keep = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
            let files = files(INPUT, Some(&[&whole[..keep], torn].concat()));
            assert_eq!(run(&files).done, 1);
            assert_eq!(std::fs::read(&files.output).unwrap(), whole);
        }
    }

    #[test]
    fn a_broken_line_in_the_middle_is_an_error_with_its_number() {
        let whole = String::from_utf8(whole_output()).unwrap();
        let broken = whole.replacen("\n", "\nbroken\n", 1);
        let files = files(INPUT, Some(broken.as_bytes()));
        let error = format!(
            "{:#}",
            ResumePoint::find(slice::from_ref(&files.input), &files.output, usize::MAX).unwrap_err()
        );
        assert!(error.contains("line 2 of the output is not"), "{error}");
        assert_eq!(std::fs::read(&files.output).unwrap(), broken.as_bytes());
    }

    #[test]
    fn a_file_that_is_not_batch_output_is_refused_and_left_unchanged() {
        for other in ["my notes", "my notes\n", "{\"a\":1}\n", INPUT] {
            let files = files(INPUT, Some(other.as_bytes()));
            let error = format!(
                "{:#}",
                ResumePoint::find(slice::from_ref(&files.input), &files.output, usize::MAX).unwrap_err()
            );
            assert!(error.contains("line 1 of the output is not"), "{error}");
        }
    }

    #[test]
    fn the_output_of_another_input_is_an_error_that_names_both_lines_and_ids() {
        let other = INPUT.replace("\"b\"", "\"z\"");
        let files = files(&other, Some(&whole_output()));
        let error = ResumePoint::find(slice::from_ref(&files.input), &files.output, usize::MAX)
            .unwrap_err()
            .to_string();
        let expected = "line 2 of the output answers \"b\", line 3 of the input asks \"z\"";
        assert!(error.starts_with(expected), "{error}");
    }

    #[test]
    fn an_output_longer_than_its_input_is_an_error() {
        let first = INPUT.lines().next().unwrap();
        let files = files(first, Some(&whole_output()));
        let error = ResumePoint::find(slice::from_ref(&files.input), &files.output, usize::MAX)
            .unwrap_err()
            .to_string();
        assert!(error.contains("more lines than the input has requests (1)"), "{error}");
    }

    #[test]
    fn a_missing_input_is_an_error_that_names_it() {
        let files = files(INPUT, None);
        let missing = files.input.with_file_name("missing.jsonl");
        let error = ResumePoint::find(&[missing], &files.output, usize::MAX).unwrap_err().to_string();
        assert!(error.contains("missing.jsonl"), "{error}");
        assert!(!files.output.exists());
    }

    #[test]
    fn an_output_to_which_nothing_was_written_is_removed_with_what_was_made_beside_it() {
        let files = files(INPUT, None);
        let beside = ["old", "new"].map(|name| files.output.with_file_name(name));
        std::fs::write(&beside[0], "").unwrap();
        let begin = || {
            let claimed = claim(&files.output, &beside).unwrap();
            std::fs::write(&beside[1], "").unwrap();
            claimed
        };
        drop(begin());
        assert!(beside[0].exists() && !beside[1].exists() && !files.output.exists());
        begin().file.write_all(b"a line\n").unwrap();
        assert!(beside[1].exists() && files.output.exists());
        std::fs::remove_file(&files.output).unwrap();
        begin().keep();
        assert!(files.output.exists());
        drop(begin());
        assert!(files.output.exists(), "it was there before, empty");
    }

    #[test]
    fn new_lines_are_written_after_the_kept_lines() {
        let whole = whole_output();
        let files = files(INPUT, Some(&whole[..whole.len() - 3]));
        let point = ResumePoint::find(slice::from_ref(&files.input), &files.output, usize::MAX).unwrap();
        let mut claimed = claim(&files.output, &[]).unwrap();
        point.cut(&mut claimed, &files.output).unwrap();
        claimed.file.write_all(b"next\n").unwrap();
        let kept = usize::try_from(point.whole_bytes).unwrap();
        assert_eq!(std::fs::read(&files.output).unwrap(), [&whole[..kept], b"next\n"].concat());
    }
}
