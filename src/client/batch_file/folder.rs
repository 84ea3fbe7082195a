//! A folder with a file for each result. Decides which results are there already, and never replaces a file. Owns the
//! list of the files that it has written, `.sconce.files.jsonl` in the folder: each is listed before it appears.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value as Json};

use super::FileError;
use super::fields::field_differences;
use super::record::record_path;
use super::resume::{Claimed, claim};
use super::rows::InputFile;
use crate::client::whole_file::{is_special, write_new};
use crate::protocol::batch_line::{OutputError, read_output};
use crate::protocol::printable;
use crate::protocol::results::{FileFormat, ResultLine};

/// The name of the list of written files.
const LIST: &str = ".sconce.files.jsonl";
/// Maximum number of messages that are kept for the end of a run.
const MAX_REMARKS: usize = 1_000;
/// Maximum number of files that one error names.
const MAX_NAMED: usize = 5;

/// A written file, and the input that it is the result of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Written {
    file: String,
    #[serde(flatten)]
    input: InputStamp,
}

/// What tells an input from another one of the same name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct InputStamp {
    /// Its path, absolute and without links.
    path: String,
    url: String,
    /// In bytes.
    size: u64,
    /// When it was last changed, in nanoseconds since 1970; none for a device or a pipe.
    modified: Option<i64>,
    /// The fields of the request beside the file.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    fields: Map<String, Json>,
}

impl InputStamp {
    fn of(input: &InputFile) -> io::Result<Self> {
        let metadata = fs::metadata(&input.path)?;
        // Opening it would wait for a writer, and a run could not be continued.
        if metadata.file_type().is_fifo() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a pipe, and is not read"));
        }
        let nanoseconds =
            metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec());
        let modified = metadata.is_file().then_some(nanoseconds);
        // A device may have no path without links.
        let path = fs::canonicalize(&input.path).or_else(|_| std::path::absolute(&input.path))?;
        let (url, fields) = (input.url.clone(), input.fields.clone());
        let path = path.to_string_lossy().into_owned();
        Ok(Self { path, url, size: metadata.len(), modified, fields })
    }

    /// What differs between this input and the same one as it is now; empty if nothing does.
    fn differences(&self, now: &Self) -> Vec<String> {
        let mut differences = Vec::new();
        if self.size != now.size {
            differences.push(format!("it had {} bytes, and has {}", self.size, now.size));
        } else if self.modified != now.modified || now.modified.is_none() {
            differences.push("it may have changed since, by its time of change".to_owned());
        }
        if self.url != now.url {
            differences.push(format!("it was sent to {}, and would be to {}", self.url, now.url));
        }
        differences.extend(field_differences(&self.fields, &now.fields));
        differences
    }
}

/// A folder that results are written to.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    list: Claimed,
    /// The files to write, by their names.
    results: HashMap<String, Pending>,
    /// In the order of the first file of each. Bound: [`MAX_REMARKS`].
    remarks: Vec<Remark>,
    /// The places in `remarks`, by the messages.
    by_message: HashMap<String, usize>,
    /// Messages for which `remarks` had no room.
    more_remarks: usize,
}

/// A file to write.
#[derive(Debug)]
struct Pending {
    format: FileFormat,
    stamp: InputStamp,
    /// Its input as the command names it.
    input: String,
}

/// A message of one or more files.
#[derive(Debug)]
struct Remark {
    message: String,
    /// The first input that it is about.
    first: String,
    count: usize,
}

/// A folder, and the inputs whose results are not in it yet.
pub(super) struct OpenFolder {
    pub(super) folder: Folder,
    pub(super) left: Vec<InputFile>,
    /// The number of inputs whose results are in it.
    pub(super) done: usize,
    /// The number of results in it, those of other inputs included.
    pub(super) results: usize,
}

/// Checks that each result has a name of its own.
///
/// # Errors
/// Names the inputs whose results would have one name.
pub fn check_names(inputs: &[InputFile]) -> Result<(), FileError> {
    let mut by_name: HashMap<&str, &InputFile> = HashMap::new();
    let mut clashes = Vec::new();
    for input in inputs {
        if let Some(other) = by_name.insert(&input.result, input) {
            let (one, two) = (other.path.display(), input.path.display());
            clashes.push(format!("{} would be the result of {one} and of {two}", input.result));
        }
    }
    refuse(&clashes, "; rename them, or give each its own --output-dir")
}

/// An error that lists these problems, if there are any, and ends with the hint.
fn refuse(problems: &[String], hint: &str) -> Result<(), FileError> {
    if problems.is_empty() {
        return Ok(());
    }
    let mut message = problems.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join("; ");
    if problems.len() > MAX_NAMED {
        message += &format!("; and {} more", problems.len() - MAX_NAMED);
    }
    Err(FileError::Refused(message + hint))
}

impl Folder {
    /// Opens and locks a folder, creates it if it does not exist, and finds which results are in it. Nothing is created
    /// if an input cannot be found.
    ///
    /// # Errors
    /// The file system's; another run writes to the folder; or a file has the name of a result, and is not that result.
    pub(super) fn open(path: &Path, inputs: &[InputFile]) -> Result<OpenFolder, FileError> {
        check_names(inputs)?;
        let stamp = |input: &InputFile| InputStamp::of(input).map_err(FileError::at(input.path.display()));
        let stamps = inputs.iter().map(stamp).collect::<Result<Vec<_>, _>>()?;
        let list_path = path.join(LIST);
        let is_new = !path.exists();
        fs::create_dir_all(path).map_err(FileError::at(path.display()))?;
        let mut list = claim(&list_path, &[record_path(&list_path)])?;
        if is_new {
            list.also_made(path.to_owned());
        }
        let written = read_list(&mut list.file, &list_path)?;
        let (mut left, mut by_name) = (Vec::new(), HashMap::new());
        let (mut changed, mut foreign, mut collisions) = (Vec::new(), Vec::new(), Vec::new());
        for (input, stamp) in inputs.iter().zip(stamps) {
            let result = path.join(&input.result);
            let is_there = result.symlink_metadata().is_ok() && !is_special(&result);
            match written.get(&input.result) {
                _ if !is_there => {
                    left.push(input.clone());
                    let shown = input.path.display().to_string();
                    let pending = Pending { format: input.format, stamp, input: shown };
                    by_name.insert(input.result.clone(), pending);
                }
                Some(earlier) if earlier.path != stamp.path => {
                    let (result, other, input) = (result.display(), &earlier.path, input.path.display());
                    collisions
                        .push(format!("{result} is the result of {other}, and would be that of {input}"));
                }
                Some(earlier) => match earlier.differences(&stamp) {
                    differences if differences.is_empty() => {}
                    differences => changed.push((result, &input.path, differences)),
                },
                None => foreign.push(result),
            }
        }
        let others = |count: usize, verb: &str| match count {
            0 | 1 => String::new(),
            count => format!(", and so {verb} {} other files", count - 1),
        };
        if let Some(result) = foreign.first() {
            return Err(FileError::Refused(format!(
                "{} exists, and was not written here{}; remove or rename what is yours, or give another --output-dir",
                result.display(),
                others(foreign.len(), "do")
            )));
        }
        refuse(&collisions, "; give another --output-dir, or remove these results if the inputs were moved")?;
        if let Some((result, input, differences)) = changed.first() {
            return Err(FileError::Refused(format!(
                "{} is the result of {} as it was before: {}{}; give another --output-dir, or remove these results to make \
                 them again",
                result.display(),
                input.display(),
                differences.join(", "),
                others(changed.len(), "are")
            )));
        }
        let done = inputs.len() - left.len();
        let results = written.keys().filter(|name| path.join(name).exists()).count();
        let path = path.to_owned();
        let (remarks, by_message) = (Vec::new(), HashMap::new());
        let folder = Self { path, list, results: by_name, remarks, by_message, more_remarks: 0 };
        Ok(OpenFolder { folder, left, done, results })
    }

    /// The path whose record tells what made the files.
    pub(super) fn record_of(path: &Path) -> PathBuf {
        path.join(LIST)
    }

    /// Writes the result in an output line. The error tells why a result was not written.
    ///
    /// # Errors
    /// The file system's.
    pub(super) fn write(&mut self, line: &[u8]) -> io::Result<Option<OutputError>> {
        let parsed = ResultLine::parse(line)?;
        let name = parsed.custom_id.clone().unwrap_or_default();
        let Some(body) = parsed.result() else {
            if let Some(OutputError { code, message }) = read_output(line)?.error {
                self.remark(&name, &format!("{code}: {message}"));
            }
            return Ok(None);
        };
        if let Some(notes) = parsed.response.as_ref().and_then(|response| response.notes) {
            self.remark(&name, notes.get());
        }
        let failed = self.write_result(&name, body)?;
        if let Some(OutputError { code, message }) = &failed {
            self.remark(&name, &format!("{code}: {message}"));
        }
        Ok(failed)
    }

    fn write_result(&mut self, name: &str, body: &RawValue) -> io::Result<Option<OutputError>> {
        let failed = |code: &str, message: String| Ok(Some(OutputError { code: code.to_owned(), message }));
        let path = self.path.join(name);
        let appeared = || format!("{} has appeared since the run began, and stays", path.display());
        let Some(Pending { format, stamp, .. }) = self.results.get(name) else { return Ok(None) };
        let content = match format.content_of(body) {
            Ok(content) => content,
            Err(message) => return failed("wrong_format", message),
        };
        if path.symlink_metadata().is_ok() && !is_special(&path) {
            return failed("file_exists", appeared());
        }
        let mut entry = serde_json::to_vec(&Written { file: name.to_owned(), input: stamp.clone() })?;
        entry.push(b'\n');
        // The list is written before the file: later runs take a file that is not listed for somebody else's.
        self.list.file.write_all(&entry)?;
        match write_new(&path, &content) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => failed("file_exists", appeared()),
            written => written.map(|()| None),
        }
    }

    /// Keeps a message about the input of the result `name` for the end of the run.
    fn remark(&mut self, name: &str, message: &str) {
        let message = printable(message);
        if let Some(index) = self.by_message.get(&message) {
            self.remarks[*index].count += 1;
        } else if self.remarks.len() < MAX_REMARKS {
            let first = printable(self.results.get(name).map_or(name, |pending| &pending.input));
            self.by_message.insert(message.clone(), self.remarks.len());
            self.remarks.push(Remark { message, first, count: 1 });
        } else {
            self.more_remarks += 1;
        }
    }

    /// Remarks on the files: why some were not written, and which errors replies report. The same remark on several files
    /// is one line with their number.
    pub(super) fn remarks(&self) -> Vec<String> {
        let more = (self.more_remarks > 0).then(|| format!("and {} more messages", self.more_remarks));
        let line = |Remark { message, first, count }: &Remark| match count {
            1 => format!("{first}: {message}"),
            count => format!("{count:>8} × {message}, first of {first}"),
        };
        self.remarks.iter().map(line).chain(more).collect()
    }

    /// Lets the folder stay, even if nothing was written.
    pub(super) fn keep(&mut self) {
        self.list.keep();
    }

    pub(super) fn sync(&self) -> io::Result<()> {
        self.list.file.sync_all()
    }
}

/// Reads the list of written files, and cuts off a torn last line.
fn read_list(list: &mut File, path: &Path) -> Result<HashMap<String, InputStamp>, FileError> {
    let mut written = HashMap::new();
    let mut whole = 0;
    let mut reader = BufReader::new(File::open(path).map_err(FileError::at(path.display()))?);
    loop {
        let mut line = Vec::new();
        let length = reader.read_until(b'\n', &mut line).map_err(FileError::at(path.display()))?;
        if line.last() != Some(&b'\n') {
            break;
        }
        let Written { file, input } = serde_json::from_slice(&line)
            .map_err(|error| FileError::Refused(format!("{}: {error}; remove it", path.display())))?;
        written.insert(file, input);
        whole += length as u64;
    }
    let cut = list.set_len(whole).and_then(|()| list.seek(SeekFrom::End(0)));
    cut.map_err(FileError::at(path.display()))?;
    Ok(written)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    struct TestFolder {
        folder: tempfile::TempDir,
    }

    impl TestFolder {
        fn new(inputs: &[&str]) -> Self {
            let folder = tempfile::tempdir().unwrap();
            inputs.iter().for_each(|name| fs::write(folder.path().join(name), name).unwrap());
            Self { folder }
        }

        fn input(&self, name: &str) -> InputFile {
            InputFile {
                path: self.folder.path().join(name),
                number: 1,
                result: format!("{}.srt", name.split('.').next().unwrap()),
                url: "/v1/audio/transcriptions".into(),
                media_type: Some("audio/mpeg"),
                format: FileFormat::Srt,
                fields: Map::new(),
                max_bytes: 99,
            }
        }

        fn subs(&self) -> PathBuf {
            self.folder.path().join("subs")
        }

        fn open(&self, inputs: &[&str]) -> Result<OpenFolder, FileError> {
            let inputs: Vec<_> = inputs.iter().map(|name| self.input(name)).collect();
            Folder::open(&self.subs(), &inputs)
        }

        fn refused(&self, inputs: &[&str]) -> String {
            self.open(inputs).err().unwrap().to_string()
        }
    }

    fn line(name: &str, body: &serde_json::Value) -> Vec<u8> {
        let response = json!({"status_code": 200, "request_id": "1", "body": body});
        json!({"id": "1", "custom_id": name, "response": response, "error": null}).to_string().into_bytes()
    }

    #[test]
    fn results_are_written_once_and_a_later_run_knows_its_own() {
        let files = TestFolder::new(&["a.mp3", "b.mp3"]);
        let mut open = files.open(&["a.mp3", "b.mp3"]).unwrap();
        assert_eq!((open.done, open.left.len()), (0, 2));
        assert!(files.refused(&["a.mp3"]).contains("another run writes it"));
        assert_eq!(open.folder.write(&line("a.srt", &json!("one"))).unwrap(), None);
        let wrong = open.folder.write(&line("b.srt", &json!({"text": "two"}))).unwrap().unwrap();
        assert_eq!(wrong.code, "wrong_format");
        drop(open);
        // As after a crash: the last entry is torn.
        let list = files.subs().join(LIST);
        let mut content = fs::read(&list).unwrap();
        content.extend(b"{\"file\":\"b.s");
        fs::write(&list, &content).unwrap();
        fs::write(files.subs().join("a.srt"), "corrected by hand").unwrap();
        let mut open = files.open(&["a.mp3", "b.mp3"]).unwrap();
        assert_eq!((open.done, open.results, open.left[0].result.as_str()), (1, 1, "b.srt"));
        assert_eq!(open.folder.write(&line("b.srt", &json!("two"))).unwrap(), None);
        drop(open);
        assert_eq!(fs::read_to_string(files.subs().join("a.srt")).unwrap(), "corrected by hand");
        assert_eq!(fs::read_to_string(files.subs().join("b.srt")).unwrap(), "two");
        fs::remove_file(files.subs().join("b.srt")).unwrap();
        assert_eq!(files.open(&["a.mp3", "b.mp3"]).unwrap().left.len(), 1, "made again");
    }

    #[test]
    fn however_many_inputs_have_changed_one_sentence_says_so() {
        let files = TestFolder::new(&["a.mp3", "b.mp3", "c.mp3"]);
        let inputs = ["a.mp3", "b.mp3", "c.mp3"];
        let mut open = files.open(&inputs).unwrap();
        for name in ["a.srt", "b.srt", "c.srt"] {
            assert_eq!(open.folder.write(&line(name, &json!("text"))).unwrap(), None);
        }
        drop(open);
        let touch = |name: &str| fs::write(files.folder.path().join(name), "again").unwrap();
        inputs.iter().for_each(|name| touch(name));
        let refused = files.refused(&inputs);
        assert!(refused.contains("a.srt is the result of") && !refused.contains("b.srt"), "{refused}");
        assert!(
            refused.contains("by its time of change, and so are 2 other files; give another --output-dir"),
            "{refused}"
        );
    }

    #[test]
    fn the_result_of_another_path_is_a_collision_that_names_both_inputs() {
        let files = TestFolder::new(&[]);
        for day in ["monday", "tuesday"] {
            fs::create_dir(files.folder.path().join(day)).unwrap();
            let file = File::create(files.folder.path().join(day).join("a.mp3")).unwrap();
            file.set_modified(std::time::UNIX_EPOCH).unwrap();
        }
        let open = |path: &str| {
            let input = InputFile { result: "a.srt".into(), ..files.input(path) };
            Folder::open(&files.subs(), &[input])
        };
        let mut open_monday = open("monday/a.mp3").unwrap();
        open_monday.folder.write(&line("a.srt", &json!("one"))).unwrap();
        drop(open_monday);
        assert_eq!(open("tuesday/../monday/a.mp3").unwrap().done, 1, "the same file under another name");
        let refused = open("tuesday/a.mp3").err().unwrap().to_string();
        let monday = fs::canonicalize(files.folder.path().join("monday/a.mp3")).unwrap();
        assert!(refused.contains(&format!("a.srt is the result of {}", monday.display())), "{refused}");
        assert!(refused.contains("tuesday/a.mp3; give another --output-dir"), "{refused}");
    }

    #[test]
    fn equal_errors_are_one_line_and_name_the_input() {
        let names: Vec<String> = (0..30).map(|number| format!("{number}.mp3")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let files = TestFolder::new(&names);
        let mut open = files.open(&names).unwrap();
        let error = |message: &str| json!({"error": {"message": message}});
        for number in 0..30 {
            let response = json!({"status_code": 400, "request_id": "1", "body": error("no field x\u{1b}")});
            let line =
                json!({"id": "1", "custom_id": format!("{number}.srt"), "response": response, "error": null});
            open.folder.write(line.to_string().as_bytes()).unwrap();
        }
        open.folder.write(&line("7.srt", &json!({"text": "two"}))).unwrap().unwrap();
        let (first, seventh) = (files.folder.path().join("0.mp3"), files.folder.path().join("7.mp3"));
        let remarks = open.folder.remarks();
        assert_eq!(remarks[0], format!("      30 × 400: no field x , first of {}", first.display()));
        assert!(remarks[1].starts_with(&format!("{}: wrong_format: ", seventh.display())), "{remarks:?}");
        assert_eq!(remarks.len(), 2);
    }

    #[test]
    fn a_folder_to_which_nothing_was_written_is_removed_unless_it_was_there() {
        let files = TestFolder::new(&["a.mp3"]);
        drop(files.open(&["a.mp3"]).unwrap());
        assert!(!files.subs().exists());
        fs::create_dir(files.subs()).unwrap();
        drop(files.open(&["a.mp3"]).unwrap());
        assert_eq!(fs::read_dir(files.subs()).unwrap().count(), 0);
    }

    #[test]
    fn foreign_files_and_results_of_other_inputs_are_refused_before_any_work() {
        let files = TestFolder::new(&["a.mp3", "b.mp3", "a.wav"]);
        let clash = files.refused(&["a.mp3", "b.mp3", "a.wav"]);
        assert!(clash.contains("a.srt would be the result of") && clash.contains("a.wav"), "{clash}");
        assert!(!files.subs().exists());
        assert!(files.refused(&["a.mp3", "missing.mp3"]).contains("missing.mp3"));
        assert!(!files.subs().exists());
        fs::create_dir(files.subs()).unwrap();
        fs::write(files.subs().join("b.srt"), "mine").unwrap();
        assert!(files.refused(&["a.mp3", "b.mp3"]).contains("b.srt exists, and was not written here"));
        let mut open = files.open(&["a.mp3"]).unwrap();
        open.folder.write(&line("a.srt", &json!("one"))).unwrap();
        drop(open);
        fs::write(files.folder.path().join("a.mp3"), "a longer recording").unwrap();
        assert!(files.refused(&["a.mp3"]).contains("as it was before"));
        fs::remove_file(files.subs().join("a.srt")).unwrap();
        let mut open = files.open(&["a.mp3"]).unwrap();
        fs::write(files.subs().join("a.srt"), "mine").unwrap();
        let error = open.folder.write(&line("a.srt", &json!("two"))).unwrap().unwrap();
        assert_eq!(error.code, "file_exists");
        assert_eq!(fs::read_to_string(files.subs().join("a.srt")).unwrap(), "mine");
    }
}
