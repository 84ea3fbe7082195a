//! What a batch writes: lines, a matrix, or a file for each result. The ending of the output's name decides which. Opens
//! the output, and finds the rows that are left. Callers pass in output lines, whatever the form of the output.

use std::fs::Metadata;
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::FileError;
use super::errors::ErrorCounts;
use super::fields::CommonFields;
use super::folder::{Folder, OpenFolder};
use super::input::InputDigest;
use super::matrix::{Matrix, ids_path, rows_on_disk};
use super::record::record_path;
use super::resume::{Claimed, ResumePoint, claim};
use super::rows::{FileRows, InputFile, LineRows, Rows, ends_with, is_table};
#[cfg(feature = "tables")]
use super::tables::{Join, Table};
use crate::protocol::batch_line::OutputError;
use crate::protocol::results::FileFormat;

/// What a batch reads, and where its results go.
#[derive(Clone, Debug)]
pub enum Batch {
    /// Rows in one order, whose results go to one file.
    Rows {
        /// Their input.
        source: Source,
        /// The output.
        output: PathBuf,
    },
    /// Files, whose results go to a file each.
    Files {
        /// In the order of the command.
        inputs: Vec<InputFile>,
        /// The folder of the results.
        folder: PathBuf,
    },
}

/// An input with rows in one order.
#[derive(Clone, Debug)]
pub enum Source {
    /// The lines of files, read one after the other.
    Lines(Vec<PathBuf>),
    /// The rows of a table.
    #[cfg(feature = "tables")]
    Table(Table),
}

/// An open output.
#[derive(Debug)]
pub enum Results {
    /// JSON lines.
    Lines(Claimed),
    /// A matrix of vectors.
    Matrix(Matrix),
    /// A matrix, which becomes a Parquet file once all rows are answered.
    #[cfg(feature = "tables")]
    Parquet(Box<(Matrix, Join)>),
    /// A Parquet file that has all rows.
    #[cfg(feature = "tables")]
    Finished,
    /// A file for each result.
    Folder(Box<Folder>),
}

/// An open output, and the rows that it lacks.
pub struct OpenBatch {
    /// The output, locked.
    pub results: Results,
    /// Where the run continues.
    pub point: ResumePoint,
    /// The rows that are left.
    pub rows: Box<dyn Rows>,
}

/// Endings of formats that an output cannot have.
const OTHER_ENDINGS: [&str; 7] = ["jpg", "jpeg", "mp3", "ogg", "csv", "npz", "xlsx"];

/// The form of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Lines,
    Matrix,
    #[cfg(feature = "tables")]
    Parquet,
}

impl Form {
    /// The form of an output of this name.
    ///
    /// # Errors
    /// Its ending is that of a format which such an output cannot have.
    fn of(output: &Path) -> Result<Self, FileError> {
        if ends_with(output, "npy") {
            return Ok(Self::Matrix);
        }
        let shown = output.display();
        if ends_with(output, "parquet") {
            #[cfg(feature = "tables")]
            return Ok(Self::Parquet);
            #[cfg(not(feature = "tables"))]
            return Err(FileError::Refused(format!(
                "--output {shown}: this program is built without `tables`"
            )));
        }
        let formats = FileFormat::ALL.into_iter().filter(|(format, _)| *format != FileFormat::Json);
        let mut others = formats.map(|(_, ending)| ending).chain(OTHER_ENDINGS);
        if let Some(ending) = others.find(|ending| ends_with(output, ending)) {
            return Err(FileError::Refused(format!(
                "--output {shown} would hold JSON lines, which are not .{ending}: name it .jsonl, or for vectors .npy \
                 or .parquet; for a file for each result, give files and --output-dir"
            )));
        }
        Ok(Self::Lines)
    }

    /// The path of the matrix of an output, if it has one.
    fn matrix(self, output: &Path) -> Option<PathBuf> {
        match self {
            Self::Lines => None,
            Self::Matrix => Some(output.to_owned()),
            #[cfg(feature = "tables")]
            Self::Parquet => {
                let mut part = output.as_os_str().to_owned();
                part.push(".part");
                Some(part.into())
            }
        }
    }
}

/// Whether the only results that an output of this name takes are vectors.
///
/// # Errors
/// Its ending is that of a format which an output cannot have.
pub fn is_of_vectors(output: &Path) -> Result<bool, FileError> {
    Ok(Form::of(output)? != Form::Lines)
}

impl Source {
    /// Its files.
    pub fn paths(&self) -> &[PathBuf] {
        match self {
            Self::Lines(inputs) => inputs,
            #[cfg(feature = "tables")]
            Self::Table(table) => std::slice::from_ref(&table.path),
        }
    }

    /// Finds where a run continues: after the lines in `lines`, or after the first `most` of them.
    fn find(&self, lines: &Path, most: usize) -> Result<ResumePoint, FileError> {
        match self {
            Self::Lines(inputs) => ResumePoint::find(inputs, lines, most),
            #[cfg(feature = "tables")]
            Self::Table(table) => table.find(lines, most),
        }
    }

    /// The rows that are left.
    fn rows(&self, point: &ResumePoint) -> Result<Box<dyn Rows>, FileError> {
        match self {
            Self::Lines(inputs) => {
                let rows = point.open_input(inputs).map_err(FileError::at("the input"))?;
                Ok(Box::new(LineRows(rows)))
            }
            #[cfg(feature = "tables")]
            Self::Table(table) => Ok(Box::new(table.rows_after(point.done)?)),
        }
    }

    /// What becomes of the matrix of a Parquet file.
    #[cfg(feature = "tables")]
    fn join(&self, output: &Path, matrix: &Path) -> Join {
        let table = match self {
            Self::Lines(_) => None,
            Self::Table(table) => Some(table.clone()),
        };
        Join { table, matrix: matrix.to_owned(), ids: ids_path(matrix), output: output.to_owned() }
    }
}

impl Batch {
    /// The path beside which the record of a run is.
    pub fn record_of(&self) -> PathBuf {
        match self {
            Self::Rows { output, .. } => output.clone(),
            Self::Files { folder, .. } => Folder::record_of(folder),
        }
    }

    /// Whether the inputs are files, which can be read again. Checked before the output is created, so that a wrong name
    /// leaves no file. No input is opened here: the writer of a FIFO would lose its reader when the FIFO is closed again.
    ///
    /// # Errors
    /// These files cannot be inputs and output of one run.
    pub fn has_files(&self) -> Result<bool, FileError> {
        let Self::Rows { source, output } = self else { return Ok(true) };
        let shown = output.display();
        if output == Path::new("-") || output.metadata().is_ok_and(|it| !it.is_file()) {
            let problem = format!("the output {shown} is no file: an interrupted run could not continue it");
            return Err(FileError::Refused(problem));
        }
        let file_of = |metadata: Metadata| (metadata.dev(), metadata.ino());
        let existing = output.metadata().ok().map(file_of);
        let (mut are_files, inputs) = (true, source.paths());
        for input in inputs {
            if existing.is_some() && input.metadata().ok().map(file_of) == existing {
                let problem = format!("the output {shown} is also an input; give another name");
                return Err(FileError::Refused(problem));
            }
            if input.is_dir() {
                return Err(FileError::Refused(format!("the input {} is a folder", input.display())));
            }
            let is_stdin = input == Path::new("-");
            let is_file = || input.metadata().map(|it| it.is_file()).map_err(FileError::at(input.display()));
            are_files &= !is_stdin && is_file()?;
        }
        if !are_files && inputs.len() > 1 {
            let problem = "an input that is no file, such as standard input or a pipe, must be the only one";
            return Err(FileError::Refused(problem.to_owned()));
        }
        if !are_files && inputs.iter().any(|input| is_table(input)) {
            return Err(FileError::Refused("a table must be a file, which is read twice".to_owned()));
        }
        Ok(are_files)
    }

    /// The fields that the command gives to each request, the URL included, unless rows are answered already.
    pub fn common_fields(&self, point: Option<&ResumePoint>) -> CommonFields {
        if point.is_some_and(|point| point.errors.total() < point.done as u64) {
            return CommonFields::default();
        }
        let (fields, own) = match self {
            Self::Rows { source: Source::Lines(_), .. } => return CommonFields::default(),
            #[cfg(feature = "tables")]
            Self::Rows { source: Source::Table(table), .. } => (Some(&table.fields), "encoding_format"),
            Self::Files { inputs, .. } => (inputs.first().map(|input| &input.fields), "response_format"),
        };
        let names = fields.into_iter().flat_map(|fields| fields.keys());
        CommonFields::new(names.map(String::as_str).chain(["url", own]))
    }

    /// Opens and locks the output, and finds the rows that it lacks. `check` is called before anything written so far is
    /// changed, and refuses to continue the output of another run.
    ///
    /// # Errors
    /// These files cannot be used, or `check` refuses them.
    pub fn open<E: From<FileError>>(
        &self,
        check: impl FnOnce(&ResumePoint) -> Result<(), E>,
    ) -> Result<OpenBatch, E> {
        match self {
            Self::Rows { source, output } => open_single_output(source, output, check),
            Self::Files { inputs, folder } => {
                let OpenFolder { folder, left, done, results } = Folder::open(folder, inputs)?;
                let (input, errors) = (InputDigest::default(), ErrorCounts::default());
                let point = ResumePoint { done, total: inputs.len(), whole_bytes: 0, input, errors };
                // The results of other inputs must not have been made by another run either.
                check(&ResumePoint { done: results, ..point.clone() })?;
                let rows = Box::new(FileRows(left.into_iter()));
                Ok(OpenBatch { results: Results::Folder(Box::new(folder)), point, rows })
            }
        }
    }
}

/// Opens the one output of all rows.
fn open_single_output<E: From<FileError>>(
    source: &Source,
    output: &Path,
    check: impl FnOnce(&ResumePoint) -> Result<(), E>,
) -> Result<OpenBatch, E> {
    let form = Form::of(output)?;
    let (matrix, record) = (form.matrix(output), record_path(output));
    let (lines, most) = match &matrix {
        Some(matrix) => {
            let (rows, ids) = (rows_on_disk(matrix, &record)?, ids_path(matrix));
            if rows.is_some_and(|rows| rows > 0) && !ids.exists() {
                let (ids, matrix, rows) = (ids.display(), matrix.display(), rows.unwrap_or(0));
                let problem = format!(
                    "{ids} is missing, which tells what the {rows} rows of {matrix} are; put it back, or remove {matrix} to \
                     compute them again"
                );
                return Err(FileError::Refused(problem).into());
            }
            (ids, rows.map_or(usize::MAX, |rows| rows as usize))
        }
        None => (output.to_owned(), usize::MAX),
    };
    if matrix.is_some()
        && !record.exists()
        && let Some(foreign) = [&lines, output].into_iter().find(|path| path.exists())
    {
        let foreign = foreign.display();
        let problem =
            format!("{foreign} exists, and was not written here; remove it, or give another --output");
        return Err(FileError::Refused(problem).into());
    }
    #[cfg(feature = "tables")]
    if let (Form::Parquet, Some(matrix)) = (form, &matrix) {
        source.join(output, matrix).check()?;
    }
    let mut claimed = claim(&lines, &beside(&record, matrix.as_deref()))?;
    let point = source.find(&lines, most)?;
    if let Some(matrix) = &matrix
        && !matrix.exists()
        && !output.exists()
        && point.errors.total() < point.done as u64
    {
        let (output, lines, done) = (output.display(), lines.display(), point.done);
        let problem = format!(
            "{output} is missing, and {lines} says that {done} of {} rows are answered; put it back, or remove {lines} to \
             compute them again",
            point.total
        );
        return Err(FileError::Refused(problem).into());
    }
    check(&point)?;
    #[cfg(feature = "tables")]
    if form == Form::Parquet && output.exists() && matrix.as_ref().is_some_and(|matrix| !matrix.exists()) {
        if point.done < point.total {
            let (output, lines) = (output.display(), lines.display());
            let problem = format!("{output} is whole, but {lines} lacks lines; remove both to begin again");
            return Err(FileError::Refused(problem).into());
        }
        let rows = source.rows(&point)?;
        return Ok(OpenBatch { results: Results::Finished, point, rows });
    }
    point.cut(&mut claimed, &lines)?;
    let rows = source.rows(&point)?;
    let results = Results::open(source, output, form, claimed, &point)?;
    Ok(OpenBatch { results, point, rows })
}

impl Results {
    #[cfg_attr(not(feature = "tables"), expect(unused_variables, reason = "only Parquet needs the source"))]
    fn open(
        source: &Source,
        output: &Path,
        form: Form,
        lines: Claimed,
        point: &ResumePoint,
    ) -> Result<Self, FileError> {
        let Some(path) = form.matrix(output) else { return Ok(Self::Lines(lines)) };
        let matrix = Matrix::open(&path, lines, point.done, &point.errors)?;
        Ok(match form {
            #[cfg(feature = "tables")]
            Form::Parquet => Self::Parquet(Box::new((matrix, source.join(output, &path)))),
            _ => Self::Matrix(matrix),
        })
    }

    /// Opens an output for an input that can be read only once. The output must not have lines yet.
    ///
    /// # Errors
    /// The output has lines already, or cannot be opened.
    pub fn begin(output: &Path) -> Result<Self, FileError> {
        let form = Form::of(output)?;
        let matrix = form.matrix(output);
        let lines = matrix.as_deref().map_or_else(|| output.to_owned(), ids_path);
        if matrix.is_some() && output.exists() {
            return Err(has_lines(output));
        }
        let claimed = claim(&lines, &beside(&record_path(output), matrix.as_deref()))?;
        if claimed.file.metadata().map_err(FileError::at(lines.display()))?.len() > 0 {
            return Err(has_lines(&lines));
        }
        let (input, errors) = (InputDigest::default(), ErrorCounts::default());
        let point = ResumePoint { done: 0, total: 0, whole_bytes: 0, input, errors };
        Self::open(&Source::Lines(Vec::new()), output, form, claimed, &point)
    }

    /// Whether the results must come in the order of the rows.
    pub fn is_ordered(&self) -> bool {
        !matches!(self, Self::Folder(_))
    }

    /// Takes the result out of an output line, and writes it. The error tells why the result of a line that has one was
    /// not written.
    ///
    /// # Errors
    /// The file system's.
    pub fn write(&mut self, line: &[u8]) -> io::Result<Option<OutputError>> {
        match self {
            Self::Lines(claimed) => claimed.file.write_all(line).map(|()| None),
            Self::Matrix(matrix) => matrix.write(line),
            #[cfg(feature = "tables")]
            Self::Parquet(parts) => parts.0.write(line),
            #[cfg(feature = "tables")]
            Self::Finished => Ok(None),
            Self::Folder(folder) => folder.write(line),
        }
    }

    /// Flushes the results to the disk. Once all rows are answered, this also joins the parts of the output.
    ///
    /// # Errors
    /// The file system's.
    pub fn sync(&mut self, is_complete: bool) -> io::Result<()> {
        if is_complete {
            self.keep();
        }
        match self {
            Self::Lines(claimed) => claimed.file.sync_all(),
            Self::Matrix(matrix) => matrix.sync(),
            #[cfg(feature = "tables")]
            Self::Parquet(parts) => {
                let (matrix, join) = &mut **parts;
                matrix.sync()?;
                if is_complete && matrix.has_vectors() {
                    join.write().map_err(io::Error::other)
                } else {
                    Ok(())
                }
            }
            #[cfg(feature = "tables")]
            Self::Finished => Ok(()),
            Self::Folder(folder) => folder.sync(),
        }
    }

    /// Lets the files stay, even if nothing was written.
    fn keep(&mut self) {
        match self {
            Self::Lines(claimed) => claimed.keep(),
            Self::Matrix(matrix) => matrix.keep(),
            #[cfg(feature = "tables")]
            // Without rows there is nothing to continue.
            Self::Parquet(parts) if parts.0.rows() == 0 => {}
            #[cfg(feature = "tables")]
            Self::Parquet(parts) => parts.0.keep(),
            #[cfg(feature = "tables")]
            Self::Finished => {}
            Self::Folder(folder) => folder.keep(),
        }
    }

    /// Whether the remarks name each error, so that nothing else has to.
    pub fn names_errors(&self) -> bool {
        matches!(self, Self::Folder(_))
    }

    /// Remarks on single results, for an output without lines that hold them.
    pub fn remarks(&self) -> Vec<String> {
        match self {
            #[cfg(feature = "tables")]
            Self::Parquet(parts) if !parts.0.has_vectors() => {
                vec![format!("{} is not written: no row has a vector", parts.1.output.display())]
            }
            Self::Folder(folder) => folder.remarks(),
            _ => Vec::new(),
        }
    }
}

/// The files that a run makes beside its lines.
fn beside(record: &Path, matrix: Option<&Path>) -> Vec<PathBuf> {
    [Some(record), matrix].into_iter().flatten().map(Path::to_owned).collect()
}

fn has_lines(output: &Path) -> FileError {
    let output = output.display();
    FileError::Refused(format!(
        "{output} has lines already, and an input that is no file cannot be read again to continue them"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ending_of_an_output_decides_its_form_or_is_refused() {
        for (name, expected) in
            [("x.npy", true), ("x.NPY", true), ("x.jsonl", false), ("x", false), ("x.json", false)]
        {
            assert_eq!(is_of_vectors(Path::new(name)).unwrap(), expected, "{name}");
        }
        for name in ["x.srt", "x.PNG", "x.txt", "x.csv", "x.jpg"] {
            let error = is_of_vectors(Path::new(name)).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(".npy"), "{error}");
        }
    }
}
