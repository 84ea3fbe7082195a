//! A matrix of vectors in NumPy's format, a row for each row of the input, and beside it the output lines without the
//! vectors, `X.ids.jsonl`. A row without a vector is NaN. Owns both files. A vector is written before its line, so that
//! the lines tell how many rows there are.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use super::FileError;
use super::errors::ErrorCounts;
use super::resume::Claimed;
use crate::protocol::batch_line::OutputError;
use crate::protocol::results::{ResultLine, vector_of};

/// The maximum length of a vector.
const MAX_DIMENSIONS: usize = 1 << 16;

/// Length of the header in bytes, which NumPy's format wants to be a multiple of 64. It has room for any shape.
const HEADER_BYTES: usize = 128;
/// The beginning of a file in version 1.0 of the format.
const MAGIC: &[u8] = b"\x93NUMPY\x01\x00";
/// What the header says of the numbers: little-endian f32, row by row.
const NUMBERS: &str = "{'descr': '<f4', 'fortran_order': False, 'shape': (";
/// Bytes of a number.
const NUMBER_BYTES: u64 = 4;

/// An open matrix.
#[derive(Debug)]
pub struct Matrix {
    file: File,
    ids: Claimed,
    /// The length of each vector; none until the first one comes.
    dimensions: Option<usize>,
    rows: u64,
}

/// The path of the lines of a matrix: `X.ids.jsonl` of `X.npy`.
pub(super) fn ids_path(path: &Path) -> PathBuf {
    path.with_extension("ids.jsonl")
}

/// The number of rows that a matrix has on the disk; none as long as it has no vector. `record` is the path of the record
/// that is beside each output.
///
/// # Errors
/// The file system's, or it was not written here.
pub(super) fn rows_on_disk(path: &Path, record: &Path) -> Result<Option<u64>, FileError> {
    let refused = |problem: &str| {
        let path = path.display();
        FileError::Refused(format!("{path} {problem}; remove it, or give another --output"))
    };
    let mut file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(FileError::at(path.display()))?,
    };
    if !record.exists() {
        return Err(refused("exists, and was not written here"));
    }
    let length = file.metadata().map_err(FileError::at(path.display()))?.len();
    if length < HEADER_BYTES as u64 {
        return Ok(None);
    }
    let dimensions = read_dimensions(&mut file).map_err(FileError::at(path.display()))?;
    let dimensions = dimensions.ok_or_else(|| refused("is no matrix that was written here"))?;
    let row_bytes = dimensions as u64 * NUMBER_BYTES;
    Ok((length - HEADER_BYTES as u64).checked_div(row_bytes))
}

/// Reads the header, which says the length of the vectors; none if it has another form than ours.
pub(super) fn read_dimensions(file: &mut impl Read) -> io::Result<Option<usize>> {
    let mut header = [0; HEADER_BYTES];
    file.read_exact(&mut header)?;
    let text = header.strip_prefix(MAGIC).and_then(|rest| rest.get(2..));
    let shape = text.and_then(|text| std::str::from_utf8(text).ok()?.strip_prefix(NUMBERS));
    let columns = shape.and_then(|shape| shape.split_once(", ")?.1.split_once(')'));
    Ok(columns.and_then(|(columns, _)| columns.parse().ok()))
}

fn header(rows: u64, dimensions: usize) -> Vec<u8> {
    let shape = format!("{NUMBERS}{rows}, {dimensions}), }}");
    let text_bytes = HEADER_BYTES - MAGIC.len() - 2;
    let mut header = MAGIC.to_vec();
    header.extend((text_bytes as u16).to_le_bytes());
    header.extend(format!("{shape:<width$}\n", width = text_bytes - 1).into_bytes());
    header
}

impl Matrix {
    /// Opens a matrix, to write after its first `rows` rows. `ids` has the lines of these rows, and is positioned after
    /// them. `errors` are the errors in these lines.
    ///
    /// # Errors
    /// The file system's, or the vectors of these rows are missing.
    pub(super) fn open(
        path: &Path,
        ids: Claimed,
        rows: usize,
        errors: &ErrorCounts,
    ) -> Result<Self, FileError> {
        let open = || {
            let mut file =
                OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
            let has_header = file.metadata()?.len() >= HEADER_BYTES as u64;
            let dimensions = if has_header { read_dimensions(&mut file)? } else { None };
            let dimensions = dimensions.filter(|dimensions| *dimensions > 0);
            let row_bytes = dimensions.unwrap_or(0) as u64 * NUMBER_BYTES;
            let header_bytes = dimensions.map_or(0, |_| HEADER_BYTES as u64);
            file.set_len(header_bytes + rows as u64 * row_bytes)?;
            file.seek(SeekFrom::End(0))?;
            Ok((file, dimensions))
        };
        let (file, dimensions) = open().map_err(FileError::at(path.display()))?;
        if dimensions.is_none() && errors.total() != rows as u64 {
            let (ids, path) = (ids_path(path), path.display());
            let ids = ids.display();
            let problem =
                format!("{path} lacks the vectors of the rows in {ids}; remove both to begin again");
            return Err(FileError::Refused(problem));
        }
        Ok(Self { file, ids, dimensions, rows: rows as u64 })
    }

    /// Writes the vector in an output line, and the rest of the line. The error tells why a reply has no vector for the
    /// row.
    ///
    /// # Errors
    /// The file system's. [`io::ErrorKind::Unsupported`] if the first reply has another form, so that the run is of no use.
    pub(super) fn write(&mut self, line: &[u8]) -> io::Result<Option<OutputError>> {
        let parsed = ResultLine::parse(line)?;
        let vector = match parsed.result().map(vector_of) {
            // The other rows would have no vector either, so they need not be computed.
            Some(Ok(None)) if self.dimensions.is_none() => {
                let id = parsed.custom_id.as_deref().unwrap_or_default();
                let problem = format!(
                    "it takes vectors, and the reply to {id:?} has none: does the model embed? For other replies, give an \
                     output that ends with .jsonl"
                );
                return Err(io::Error::new(io::ErrorKind::Unsupported, problem));
            }
            Some(Ok(None)) => Some(Err("the reply has no vectors".to_owned())),
            Some(Ok(Some(vector))) => Some(self.checked(vector)),
            Some(Err(message)) => Some(Err(message)),
            None => None,
        };
        let (kept, failed) = match vector {
            None => (line.to_vec(), None),
            Some(Ok(vector)) => {
                self.put_header(vector.len())?;
                let numbers: Vec<u8> = vector.iter().flat_map(|number| number.to_le_bytes()).collect();
                self.file.write_all(&numbers)?;
                self.rows += 1;
                self.ids.file.write_all(&parsed.without_body())?;
                return Ok(None);
            }
            Some(Err(message)) => {
                let code = "no_vector".to_owned();
                (parsed.with_error(&code, &message), Some(OutputError { code, message }))
            }
        };
        if let Some(dimensions) = self.dimensions {
            self.put_nan(1, dimensions)?;
        }
        self.rows += 1;
        self.ids.file.write_all(&kept)?;
        Ok(failed)
    }

    /// Checks the length of a vector.
    fn checked(&self, vector: Vec<f32>) -> Result<Vec<f32>, String> {
        match self.dimensions {
            _ if vector.is_empty() => Err("the vector is empty".to_owned()),
            // A row without a vector takes as many bytes on the disk, so the first reply must not set a huge length.
            _ if vector.len() > MAX_DIMENSIONS => {
                Err(format!("the vector has {} numbers; at most {MAX_DIMENSIONS} are written", vector.len()))
            }
            Some(dimensions) if dimensions != vector.len() => {
                Err(format!("the vector has {} numbers, and those before have {dimensions}", vector.len()))
            }
            _ => Ok(vector),
        }
    }

    /// Writes the header once the length of vectors is known, and the rows that came before.
    fn put_header(&mut self, dimensions: usize) -> io::Result<()> {
        if self.dimensions.is_some() {
            return Ok(());
        }
        self.dimensions = Some(dimensions);
        self.file.write_all(&header(0, dimensions))?;
        self.put_nan(self.rows, dimensions)
    }

    fn put_nan(&mut self, rows: u64, dimensions: usize) -> io::Result<()> {
        let row: Vec<u8> = std::iter::repeat_n(f32::NAN.to_le_bytes(), dimensions).flatten().collect();
        (0..rows).try_for_each(|_| self.file.write_all(&row))
    }

    /// Lets the files stay, even if no row was written.
    pub(super) fn keep(&mut self) {
        self.ids.keep();
    }

    /// Whether any row has a vector.
    #[cfg(feature = "tables")]
    pub(super) fn has_vectors(&self) -> bool {
        self.dimensions.is_some()
    }

    /// The number of rows written so far.
    #[cfg(feature = "tables")]
    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    /// Writes the shape of the rows written so far, and flushes both files to the disk.
    ///
    /// # Errors
    /// The file system's.
    pub(super) fn sync(&self) -> io::Result<()> {
        // If no row has a vector, these are rows of no numbers. The next run begins the file again.
        self.file.write_all_at(&header(self.rows, self.dimensions.unwrap_or(0)), 0)?;
        self.file.sync_all()?;
        self.ids.file.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::super::record::record_path;
    use super::super::resume::claim;
    use super::*;

    fn line(id: &str, body: &serde_json::Value, status: u16) -> Vec<u8> {
        let response = json!({"status_code": status, "request_id": "1", "body": body});
        let line = json!({"id": "batch_req_1", "custom_id": id, "response": response, "error": null});
        format!("{line}\n").into_bytes()
    }

    fn vector(id: &str, numbers: &[f32]) -> Vec<u8> {
        line(id, &json!({"data": [{"embedding": numbers}]}), 200)
    }

    struct TestFolder {
        folder: tempfile::TempDir,
    }

    impl TestFolder {
        fn new() -> Self {
            let files = Self { folder: tempfile::tempdir().unwrap() };
            fs::write(record_path(&files.path()), "{}").unwrap();
            files
        }

        fn path(&self) -> PathBuf {
            self.folder.path().join("x.npy")
        }

        fn open(&self, rows: usize, errors: u64) -> Result<Matrix, FileError> {
            let mut ids = claim(&ids_path(&self.path()), &[])?;
            ids.file.seek(SeekFrom::End(0)).unwrap();
            let mut counts = ErrorCounts::default();
            let error = || OutputError { code: "400".into(), message: String::new() };
            (0..errors).for_each(|_| counts.add(error()));
            Matrix::open(&self.path(), ids, rows, &counts)
        }

        /// The header's text, and the numbers.
        fn read(&self) -> (String, Vec<f32>) {
            let content = fs::read(self.path()).unwrap();
            let (numbers, _) = content[HEADER_BYTES..].as_chunks::<4>();
            let text = String::from_utf8_lossy(&content[10..HEADER_BYTES]).into_owned();
            (text, numbers.iter().map(|it| f32::from_le_bytes(*it)).collect())
        }
    }

    #[test]
    fn a_row_without_a_vector_is_nan_and_its_line_says_why() {
        let files = TestFolder::new();
        let mut matrix = files.open(0, 0).unwrap();
        assert_eq!(rows_on_disk(&files.path(), &record_path(&files.path())).unwrap(), None);
        let refused = json!({"error": {"message": "too long"}});
        assert_eq!(matrix.write(&line("a", &refused, 400)).unwrap(), None);
        assert_eq!(matrix.write(&vector("b", &[1.0, 2.0])).unwrap(), None);
        let failed = matrix.write(&vector("c", &[1.0, 2.0, 3.0])).unwrap().unwrap();
        assert_eq!((failed.code.as_str(), failed.message.contains("has 3 numbers")), ("no_vector", true));
        matrix.sync().unwrap();
        let (header, numbers) = files.read();
        assert!(
            header.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }"),
            "{header}"
        );
        assert!(header.ends_with(" \n") && numbers.len() == 6, "{header:?}");
        assert!(numbers[..2].iter().chain(&numbers[4..]).all(|it| it.is_nan()));
        assert_eq!(numbers[2..4], [1.0, 2.0]);
        let ids = fs::read_to_string(ids_path(&files.path())).unwrap();
        let ids: Vec<serde_json::Value> = ids.lines().map(|it| serde_json::from_str(it).unwrap()).collect();
        assert_eq!(ids[0]["response"]["body"], refused);
        assert_eq!((&ids[1]["custom_id"], &ids[1]["response"]["body"]), (&"b".into(), &json!(null)));
        assert_eq!(ids[2]["error"]["code"], "no_vector");
        assert_eq!(rows_on_disk(&files.path(), &record_path(&files.path())).unwrap(), Some(3));
    }

    #[test]
    fn a_matrix_continues_after_its_whole_rows() {
        let files = TestFolder::new();
        let mut matrix = files.open(0, 0).unwrap();
        ["a", "b", "c"].iter().for_each(|id| _ = matrix.write(&vector(id, &[1.0, 2.0])).unwrap());
        drop(matrix);
        // As after a crash: a vector without its line, and half a vector.
        OpenOptions::new().append(true).open(files.path()).unwrap().write_all(&[7; 4]).unwrap();
        assert_eq!(rows_on_disk(&files.path(), &record_path(&files.path())).unwrap(), Some(3));
        let mut matrix = files.open(2, 0).unwrap();
        matrix.write(&vector("c", &[3.0, 4.0])).unwrap();
        matrix.sync().unwrap();
        assert_eq!(files.read().1, [1.0, 2.0, 1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn rows_without_any_vector_are_kept_until_one_comes() {
        let files = TestFolder::new();
        let refused = line("a", &json!({}), 400);
        let mut matrix = files.open(0, 0).unwrap();
        matrix.write(&refused).unwrap();
        matrix.sync().unwrap();
        assert!(files.read().0.contains("'shape': (1, 0)"), "{}", files.read().0);
        drop(matrix);
        assert_eq!(rows_on_disk(&files.path(), &record_path(&files.path())).unwrap(), None);
        let mut matrix = files.open(1, 1).unwrap();
        matrix.write(&vector("b", &[5.0])).unwrap();
        matrix.sync().unwrap();
        let (header, numbers) = files.read();
        assert!(header.contains("'shape': (2, 1)") && numbers[0].is_nan() && numbers[1] == 5.0, "{header}");
    }

    #[test]
    fn a_foreign_file_and_missing_vectors_are_refused() {
        let files = TestFolder::new();
        assert!(files.open(2, 1).unwrap_err().to_string().contains("lacks the vectors"));
        fs::write(files.path(), [0; 200]).unwrap();
        assert!(
            rows_on_disk(&files.path(), &record_path(&files.path()))
                .unwrap_err()
                .to_string()
                .contains("no matrix that was written")
        );
        fs::remove_file(record_path(&files.path())).unwrap();
        assert!(
            rows_on_disk(&files.path(), &record_path(&files.path()))
                .unwrap_err()
                .to_string()
                .contains("was not written here")
        );
    }
}
