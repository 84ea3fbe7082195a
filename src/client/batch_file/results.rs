//! What a batch writes: lines, a matrix, or a file for each result. The ending of the output's name decides which. Opens
//! the output, and finds the rows that are left. Everything else hands over output lines, whatever becomes of them.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use super::FileError;
use super::errors::ErrorCounts;
use super::folder::{Folder, OpenFolder};
use super::input::InputDigest;
use super::matrix::{Matrix, ids_path, rows_on_disk};
use super::record::record_path;
use super::resume::{ResumePoint, claim};
use super::rows::{FileRows, InputFile, LineRows, Rows};
use crate::protocol::batch_line::OutputError;
use crate::protocol::results::FileFormat;

/// What a batch reads, and where its results go.
#[derive(Clone, Debug)]
pub enum Batch {
    /// The lines of files, whose results go to one file.
    Lines {
        /// Read one after the other.
        inputs: Vec<PathBuf>,
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

/// An open output.
#[derive(Debug)]
pub enum Results {
    /// JSON lines.
    Lines(File),
    /// A matrix of vectors.
    Matrix(Matrix),
    /// A file for each result.
    Folder(Box<Folder>),
}

/// An open output, and the rows that it lacks.
pub struct OpenBatch {
    /// The output, locked.
    pub results: Results,
    /// How far it is.
    pub point: ResumePoint,
    /// The rows that are left.
    pub rows: Box<dyn Rows>,
}

/// Endings of formats that an output cannot have.
const OTHER_ENDINGS: [&str; 8] = ["jpg", "jpeg", "mp3", "ogg", "csv", "parquet", "npz", "xlsx"];

/// Whether the name of an output asks for a matrix. Otherwise it is of JSON lines.
///
/// # Errors
/// Its ending is that of a format which such an output cannot have.
pub fn is_matrix(output: &Path) -> Result<bool, FileError> {
    let ending = output.extension().and_then(|it| it.to_str()).unwrap_or_default().to_ascii_lowercase();
    let is_result =
        FileFormat::ALL.iter().any(|(format, known)| *format != FileFormat::Json && *known == ending);
    if is_result || OTHER_ENDINGS.contains(&&*ending) {
        let output = output.display();
        return Err(FileError::Refused(format!(
            "--output {output} would hold JSON lines, which are not .{ending}: name it .jsonl, or .npy for a matrix \
             of vectors; for a file for each result, give files and --output-dir"
        )));
    }
    Ok(ending == "npy")
}

impl Batch {
    /// The path beside which the record of a run is.
    pub fn record_of(&self) -> PathBuf {
        match self {
            Self::Lines { output, .. } => output.clone(),
            Self::Files { folder, .. } => Folder::record_of(folder),
        }
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
            Self::Lines { inputs, output } => {
                let is_matrix = is_matrix(output)?;
                let (lines, most) = if is_matrix {
                    let rows = rows_on_disk(output)?;
                    (ids_path(output), rows.map_or(usize::MAX, |rows| rows as usize))
                } else {
                    (output.clone(), usize::MAX)
                };
                if is_matrix && lines.exists() && !record_path(output).exists() {
                    let lines = lines.display();
                    let problem = format!("{lines} exists, and was not written here; remove it");
                    return Err(FileError::Refused(problem).into());
                }
                let mut claimed = claim(&lines)?;
                let point = ResumePoint::find(inputs, &lines, most)?;
                check(&point)?;
                point.cut(&mut claimed, &lines)?;
                let rows = point.open_input(inputs).map_err(FileError::at("the input"))?;
                let results = if is_matrix {
                    Results::Matrix(Matrix::open(output, claimed, point.done, &point.errors)?)
                } else {
                    Results::Lines(claimed)
                };
                Ok(OpenBatch { results, point, rows: Box::new(LineRows(rows)) })
            }
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

impl Results {
    /// An output for an input that can be read only once: without lines as yet.
    ///
    /// # Errors
    /// The output has lines already, or cannot be opened.
    pub fn begin(output: &Path) -> Result<Self, FileError> {
        let is_matrix = is_matrix(output)?;
        let lines = if is_matrix { ids_path(output) } else { output.to_owned() };
        if is_matrix && rows_on_disk(output)?.is_some() {
            return Err(has_lines(output));
        }
        let claimed = claim(&lines)?;
        if claimed.metadata().map_err(FileError::at(lines.display()))?.len() > 0 {
            return Err(has_lines(&lines));
        }
        if is_matrix {
            return Ok(Self::Matrix(Matrix::open(output, claimed, 0, &ErrorCounts::default())?));
        }
        Ok(Self::Lines(claimed))
    }

    /// Whether the results must come in the order of the rows.
    pub fn is_ordered(&self) -> bool {
        !matches!(self, Self::Folder(_))
    }

    /// Writes the result in an output line. The error tells why a result is not written, though the line has one.
    ///
    /// # Errors
    /// The file system's.
    pub fn write(&mut self, line: &[u8]) -> io::Result<Option<OutputError>> {
        match self {
            Self::Lines(file) => file.write_all(line).map(|()| None),
            Self::Matrix(matrix) => matrix.write(line),
            Self::Folder(folder) => folder.write(line),
        }
    }

    /// Flushes the results to the disk.
    ///
    /// # Errors
    /// The file system's.
    pub fn sync(&self) -> io::Result<()> {
        match self {
            Self::Lines(file) => file.sync_all(),
            Self::Matrix(matrix) => matrix.sync(),
            Self::Folder(folder) => folder.sync(),
        }
    }

    /// What is to be said of single results that are in no output line.
    pub fn remarks(&self) -> Vec<String> {
        match self {
            Self::Lines(_) | Self::Matrix(_) => Vec::new(),
            Self::Folder(folder) => folder.remarks(),
        }
    }
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
            assert_eq!(is_matrix(Path::new(name)).unwrap(), expected, "{name}");
        }
        for name in ["x.srt", "x.PNG", "x.txt", "x.csv", "x.jpg"] {
            let error = is_matrix(Path::new(name)).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(".npy"), "{error}");
        }
    }
}
