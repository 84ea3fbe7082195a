//! Tables: the rows of a CSV or Parquet file, each of which is a request for the text in one column, and a Parquet file
//! with the columns of the input and the vectors. Holds a batch of rows in memory at a time.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use arrow_array::cast::AsArray as _;
use arrow_array::{
    Array, ArrayRef, FixedSizeListArray, Float32Array, RecordBatch, StringArray, downcast_integer_array,
};
use arrow_buffer::NullBuffer;
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use parquet::arrow::ArrowWriter;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::Compression;
use parquet::file::properties::WriterProperties;
use serde_json::{Map, Value as Json, json};
use sha2::{Digest as _, Sha256};

use super::FileError;
use super::input::InputDigest;
use super::lines::MAX_LINE;
use super::matrix::read_dimensions;
use super::quotes::Quotes;
use super::resume::{RequestId, ResumePoint};
use super::rows::{InputRow, Rows, ends_with};
use crate::client::whole_file::begin_beside;
use crate::protocol::batch_line::{BatchRequest, InvalidLine, RequestBody, read_output};
use crate::protocol::endpoints::EMBEDDINGS_URL;
use crate::protocol::requests::body_of_text;

/// The number of rows in memory at a time. A row may have megabytes, and nothing bounds the bytes of several rows.
const BATCH_ROWS: usize = 1;
/// The largest number of columns of a CSV file.
const MAX_COLUMNS: usize = 10_000;
/// The largest number of bytes of a CSV file's header.
const MAX_HEADER: u64 = 1 << 20;
/// Bytes of a file that are read at once for its digest: 64 KiB.
const READ_BYTES: usize = 64 << 10;
/// Bytes of a row group of a file, which the writer holds in memory: 32 MiB.
const ROW_GROUP_BYTES: usize = 32 << 20;
/// The column with the vectors, and the one that says why a row has none.
const VECTORS: &str = "embedding";
const ERRORS: &str = "error";
/// The only other column if the input has none.
const IDS: &str = "custom_id";

/// A table whose rows are requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// A file whose name ends with `.csv` or `.parquet`.
    pub path: PathBuf,
    /// The column with the texts.
    pub column: String,
    /// The column with the ids; none: the number of a row from 0 is its id.
    pub id_column: Option<String>,
    /// The URL of the requests.
    pub url: String,
    /// Fields of each request, beside the text.
    pub fields: Map<String, Json>,
    /// Whether vectors are asked for in base64, which is shorter than digits.
    pub asks_base64: bool,
}

type Batches = Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + Send>;

impl Table {
    /// The columns, and the rows in batches. With `only`, reads these columns alone if the format can.
    fn read(&self, only: Option<&[usize]>) -> Result<(SchemaRef, Batches), FileError> {
        let refused =
            |error: &dyn std::fmt::Display| FileError::Refused(format!("{}: {error}", self.path.display()));
        let file = File::open(&self.path).map_err(FileError::at(self.path.display()))?;
        if ends_with(&self.path, "parquet") {
            let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| refused(&error))?;
            let chunks = builder.metadata().row_groups().iter().flat_map(|group| group.columns());
            if let Some(codec) = chunks.map(|chunk| chunk.compression()).find_map(unread_codec) {
                let path = self.path.display();
                let problem = format!("{path} is compressed with {codec}; Snappy and zstd are read");
                return Err(FileError::Refused(problem));
            }
            let schema = builder.schema().clone();
            let mask = match only {
                Some(columns) => ProjectionMask::roots(builder.parquet_schema(), columns.iter().copied()),
                None => ProjectionMask::all(),
            };
            let reader = builder.with_projection(mask).with_batch_size(BATCH_ROWS).build();
            return Ok((schema, Box::new(reader.map_err(|error| refused(&error))?)));
        }
        let mut header = Vec::new();
        BufReader::new(&file)
            .take(MAX_HEADER)
            .read_until(b'\n', &mut header)
            .map_err(|error| refused(&error))?;
        let columns = header.iter().filter(|byte| **byte == b',').count() + 1;
        if columns > MAX_COLUMNS || header.len() as u64 == MAX_HEADER {
            let (count, bytes) = (MAX_COLUMNS, MAX_HEADER);
            return Err(refused(&format!("a header may have {count} columns and {bytes} bytes at most")));
        }
        let file = File::open(&self.path).map_err(FileError::at(self.path.display()))?;
        read_csv(file).map_err(|error| refused(&error))
    }

    /// The index of the column with the texts, followed by the index of the column with the ids, if there is one.
    fn columns_in(&self, schema: &Schema) -> Result<Vec<usize>, FileError> {
        let refused = |problem: String| FileError::Refused(format!("{}: {problem}", self.path.display()));
        let names =
            || schema.fields().iter().map(|field| field.name().as_str()).collect::<Vec<_>>().join(", ");
        let index_of = |name: &String, is_id: bool| {
            let index = schema.fields().iter().position(|field| field.name() == name);
            let index = index.ok_or_else(|| refused(format!("has no column {name:?}, only {}", names())))?;
            let count = schema.fields().iter().filter(|field| field.name() == name).count();
            if count > 1 {
                return Err(refused(format!("has {count} columns {name:?}; rename all but one")));
            }
            let data_type = schema.field(index).data_type();
            let inner = if let DataType::Dictionary(_, values) = data_type { values } else { data_type };
            match inner {
                DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Ok(index),
                other if is_id && other.is_integer() => Ok(index),
                other if is_id => {
                    Err(refused(format!("the column {name:?} has no texts or whole numbers, but {other}")))
                }
                other => Err(refused(format!("the column {name:?} has no texts, but {other}"))),
            }
        };
        let ids = self.id_column.iter().map(|name| index_of(name, true));
        std::iter::once(index_of(&self.column, false)).chain(ids).collect()
    }

    /// Checks the table, and finds where a run continues: after the lines in `lines`, or after the first `most` of them.
    ///
    /// # Errors
    /// The table cannot be read or lacks a column, or the lines are not of this table.
    pub(super) fn find(&self, lines: &Path, most: usize) -> Result<ResumePoint, FileError> {
        let (input, rows) = (self.digest()?, self.rows_after(0)?);
        let ids = rows.map(|row| {
            let InputRow { number, request } = row.map_err(FileError::at(self.path.display()))?;
            let custom_id =
                request.map_or_else(|invalid| invalid.custom_id, |request| Some(request.custom_id));
            Ok(RequestId { number, custom_id })
        });
        let point = ResumePoint::compare(ids, lines, most)?;
        let input = InputDigest { lines: point.total, ..input };
        Ok(ResumePoint { input, ..point })
    }

    /// The digest of the table's bytes, and of how its rows become requests. The number of rows is left 0.
    ///
    /// # Errors
    /// The file system's, or a quote of a CSV file takes in rows after its own.
    fn digest(&self) -> Result<InputDigest, FileError> {
        let refused = |problem: String| FileError::Refused(format!("{}: {problem}", self.path.display()));
        let (mut sha256, mut bytes) = (Sha256::new(), 0);
        let mut quotes = (!ends_with(&self.path, "parquet")).then(Quotes::new);
        let file = File::open(&self.path).map_err(FileError::at(self.path.display()))?;
        let mut reader = BufReader::with_capacity(READ_BYTES, file);
        loop {
            let piece = reader.fill_buf().map_err(FileError::at(self.path.display()))?;
            if piece.is_empty() {
                break;
            }
            sha256.update(piece);
            quotes.iter_mut().try_for_each(|quotes| quotes.read(piece)).map_err(refused)?;
            let read = piece.len();
            bytes += read as u64;
            reader.consume(read);
        }
        quotes.iter().try_for_each(Quotes::end).map_err(refused)?;
        // Another column of the same table is another input.
        sha256.update(format!("\0{}\0{}", self.column, self.url));
        if self.id_column.is_some() || !self.fields.is_empty() {
            sha256.update(json!([self.id_column, self.fields]).to_string());
        }
        let flags = [("--column", Some(&self.column)), ("--id-column", self.id_column.as_ref())];
        let flags = flags.into_iter().chain([("--url", Some(&self.url))]);
        let flags = flags.filter_map(|(flag, value)| Some((flag.to_owned(), Json::from(value?.as_str()))));
        let fields = self.fields.iter().map(|(name, value)| (format!("--field {name}"), value.clone()));
        let (sha256, parameters) = (format!("{:x}", sha256.finalize()), Some(flags.chain(fields).collect()));
        Ok(InputDigest { lines: 0, bytes, sha256, parameters })
    }

    /// The rows after the first `done`.
    ///
    /// # Errors
    /// The table cannot be read.
    pub(super) fn rows_after(&self, done: usize) -> Result<TableRows, FileError> {
        let (schema, _) = self.read(None)?;
        let columns = self.columns_in(&schema)?;
        let (_, batches) = self.read(Some(&columns))?;
        let stamp = stamp(&self.path).map_err(FileError::at(self.path.display()))?;
        Ok(TableRows { table: self.clone(), batches, batch: None, next: 0, at: 0, skip: done, stamp })
    }

    fn request(&self, row: usize, id: Option<&str>, text: Option<&str>) -> Result<BatchRequest, InvalidLine> {
        let custom_id = if self.id_column.is_some() { id.map(str::to_owned) } else { Some(row.to_string()) };
        let empty = |column: &String| format!("the cell in column {column:?} is empty");
        let invalid = |custom_id, problem: String| InvalidLine { custom_id, problem };
        let Some(custom_id) = custom_id else {
            return Err(invalid(None, self.id_column.as_ref().map(empty).unwrap_or_default()));
        };
        let with_id = |problem: String| invalid(Some(custom_id.clone()), problem);
        let text = text.ok_or_else(|| with_id(empty(&self.column)))?;
        if text.len() > MAX_LINE {
            let problem = format!("the text in column {:?} is longer than {MAX_LINE} bytes", self.column);
            return Err(with_id(problem));
        }
        let body = self.body(text).map_err(with_id)?;
        Ok(BatchRequest { custom_id, url: self.url.clone(), body })
    }

    /// The body of a request for this text.
    ///
    /// # Errors
    /// A message: one of the fields holds the text.
    pub fn body(&self, text: &str) -> Result<RequestBody, String> {
        let mut body: RequestBody = if self.asks_base64 && self.url == EMBEDDINGS_URL {
            json!({"input": text, "encoding_format": "base64"}).to_string().into()
        } else {
            body_of_text(&self.url, text).into()
        };
        body.add_fields(&self.fields)?;
        Ok(body)
    }
}

/// The columns of a CSV file, and its rows in batches of one. All cells are texts, so that "007" stays as it is. An empty
/// cell is null.
fn read_csv(file: File) -> Result<(SchemaRef, Batches), csv::Error> {
    let mut reader = csv::Reader::from_reader(file);
    let fields = reader.headers()?.iter().map(|name| {
        // Windows editors begin a file with a byte order mark.
        Field::new(name.trim_start_matches('\u{feff}'), DataType::Utf8, true)
    });
    let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    let of_batch = schema.clone();
    let batches = reader.into_records().map(move |record| {
        let record = record.map_err(|error| ArrowError::CsvError(error.to_string()))?;
        let column = |cell: &str| -> ArrayRef {
            Arc::new(StringArray::from(vec![Some(cell).filter(|cell| !cell.is_empty())]))
        };
        RecordBatch::try_new(of_batch.clone(), record.iter().map(column).collect())
    });
    Ok((schema, Box::new(batches)))
}

/// The text in a row of a column of texts or whole numbers; none if the cell is empty.
fn text_in(column: &dyn Array, row: usize) -> Option<String> {
    if column.is_null(row) {
        return None;
    }
    downcast_integer_array!(
        column => Some(column.value(row).to_string()),
        DataType::Utf8 => Some(column.as_string::<i32>().value(row).to_owned()),
        DataType::LargeUtf8 => Some(column.as_string::<i64>().value(row).to_owned()),
        DataType::Utf8View => Some(column.as_string_view().value(row).to_owned()),
        DataType::Dictionary(..) => {
            let dictionary = column.as_any_dictionary();
            text_in(dictionary.values(), dictionary.normalized_keys()[row])
        }
        // `columns_in` has refused all others.
        _ => None,
    )
}

/// The name of a compression that this program does not read.
fn unread_codec(compression: Compression) -> Option<String> {
    if matches!(compression, Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::ZSTD(_)) {
        return None;
    }
    // The level follows the name, in parentheses.
    compression.to_string().split('(').next().map(str::to_ascii_lowercase)
}

/// Length and time of the last change.
fn stamp(path: &Path) -> io::Result<(u64, SystemTime)> {
    let metadata = fs::metadata(path)?;
    Ok((metadata.len(), metadata.modified()?))
}

/// The rows of a table.
pub(super) struct TableRows {
    table: Table,
    batches: Batches,
    batch: Option<RecordBatch>,
    /// The next row of `batch`.
    next: usize,
    /// The number of the next row, from 0.
    at: usize,
    /// The rows before this one are answered.
    skip: usize,
    stamp: (u64, SystemTime),
}

impl TableRows {
    fn next_row(&mut self) -> Result<Option<InputRow>, ArrowError> {
        loop {
            let Some(batch) = self.batch.as_ref().filter(|batch| self.next < batch.num_rows()) else {
                let Some(batch) = self.batches.next().transpose()? else { return Ok(None) };
                (self.batch, self.next) = (Some(batch), 0);
                continue;
            };
            let (row, number) = (self.next, self.at);
            (self.next, self.at) = (row + 1, number + 1);
            if number < self.skip {
                continue;
            }
            let cell = |name: &String| -> Result<Option<String>, ArrowError> {
                Ok(text_in(batch.column(batch.schema().index_of(name)?), row))
            };
            let (text, id) =
                (cell(&self.table.column)?, self.table.id_column.as_ref().map(cell).transpose()?);
            let request = self.table.request(number, id.flatten().as_deref(), text.as_deref());
            return Ok(Some(InputRow { number: self.at, request }));
        }
    }
}

impl Iterator for TableRows {
    type Item = io::Result<InputRow>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_row().map_err(io::Error::other).transpose()
    }
}

impl Rows for TableRows {
    fn changed(&mut self) -> io::Result<Option<String>> {
        let path = &self.table.path;
        let has_changed = stamp(path)? != self.stamp;
        let shown = path.display();
        Ok(has_changed
            .then(|| format!("{shown} has changed since the run began; run again with another output")))
    }
}

/// What a Parquet file is made of once all rows are answered.
#[derive(Clone, Debug)]
pub struct Join {
    /// The input with its columns. None: the input is JSON lines, and the file has their ids.
    pub(super) table: Option<Table>,
    /// The matrix and its lines.
    pub(super) matrix: PathBuf,
    pub(super) ids: PathBuf,
    pub(super) output: PathBuf,
}

impl Join {
    /// Checks that the columns of the input leave room for those of the results.
    ///
    /// # Errors
    /// A column has the name of one of these.
    pub(super) fn check(&self) -> Result<(), FileError> {
        let Some(table) = &self.table else { return Ok(()) };
        let (schema, _) = table.read(None)?;
        match [VECTORS, ERRORS].iter().find(|name| schema.column_with_name(name).is_some()) {
            Some(name) => {
                let path = table.path.display();
                Err(FileError::Refused(format!(
                    "{path} has a column {name:?}, which the output adds; rename it"
                )))
            }
            None => Ok(()),
        }
    }

    /// Writes the file, and removes the matrix.
    ///
    /// # Errors
    /// The file system's, or the input cannot be read any more.
    pub(super) fn write(&self) -> Result<(), FileError> {
        let shown = self.output.display();
        let mut matrix =
            BufReader::new(File::open(&self.matrix).map_err(FileError::at(self.matrix.display()))?);
        let dimensions =
            read_dimensions(&mut matrix).map_err(FileError::at(self.matrix.display()))?.unwrap_or(0);
        let failed = |error: &dyn std::fmt::Display| FileError::Refused(format!("{shown}: {error}"));
        let (columns, batches) = match &self.table {
            Some(table) => table.read(None)?,
            None => id_batches(&self.ids)?,
        };
        let item = Arc::new(Field::new("item", DataType::Float32, false));
        let vectors = DataType::FixedSizeList(item.clone(), dimensions as i32);
        let added = [Field::new(VECTORS, vectors, true), Field::new(ERRORS, DataType::Utf8, true)];
        let fields = columns.fields().iter().cloned().chain(added.into_iter().map(Arc::new));
        let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        let mut file = begin_beside(&self.output).map_err(FileError::at(shown.to_string()))?;
        let properties = WriterProperties::builder()
            .set_compression(Compression::SNAPPY)
            .set_max_row_group_bytes(Some(ROW_GROUP_BYTES))
            .build();
        let mut writer = ArrowWriter::try_new(file.as_file_mut(), schema.clone(), Some(properties))
            .map_err(|error| failed(&error))?;
        let mut lines = BufReader::new(File::open(&self.ids).map_err(FileError::at(self.ids.display()))?);
        for batch in batches {
            let batch = batch.map_err(|error| failed(&error))?;
            let rows = batch.num_rows();
            let errors = read_errors(&mut lines, rows).map_err(FileError::at(self.ids.display()))?;
            let mut bytes = vec![0; rows * dimensions * 4];
            matrix.read_exact(&mut bytes).map_err(FileError::at(self.matrix.display()))?;
            let (numbers, _) = bytes.as_chunks::<4>();
            let numbers: Float32Array = numbers.iter().map(|it| Some(f32::from_le_bytes(*it))).collect();
            // This drops the bitmap of nulls, since no number is null.
            let numbers = Float32Array::new(numbers.values().clone(), None);
            let is_valid: NullBuffer = errors.iter().map(Option::is_none).collect::<Vec<_>>().into();
            let vectors = FixedSizeListArray::try_new(
                item.clone(),
                dimensions as i32,
                Arc::new(numbers),
                Some(is_valid),
            );
            let vectors: ArrayRef = Arc::new(vectors.map_err(|error| failed(&error))?);
            let errors: ArrayRef = Arc::new(StringArray::from(errors));
            let all = batch.columns().iter().cloned().chain([vectors, errors]).collect();
            let batch = RecordBatch::try_new(schema.clone(), all).map_err(|error| failed(&error))?;
            writer.write(&batch).map_err(|error| failed(&error))?;
        }
        writer.close().map_err(|error| failed(&error))?;
        file.as_file().sync_all().map_err(FileError::at(shown.to_string()))?;
        file.persist(&self.output).map_err(|error| FileError::at(shown.to_string())(error.error))?;
        fs::remove_file(&self.matrix).map_err(FileError::at(self.matrix.display()))
    }
}

/// Why each of the next `rows` rows has no vector; none if it has one.
fn read_errors(lines: &mut impl io::BufRead, rows: usize) -> io::Result<Vec<Option<String>>> {
    let mut line = Vec::new();
    let mut errors = Vec::with_capacity(rows);
    for _ in 0..rows {
        line.clear();
        lines.read_until(b'\n', &mut line)?;
        errors.push(read_output(&line)?.error.map(|error| format!("{}: {}", error.code, error.message)));
    }
    Ok(errors)
}

/// The ids of the rows, as a table of one column.
fn id_batches(ids: &Path) -> Result<(SchemaRef, Batches), FileError> {
    let schema = Arc::new(Schema::new(vec![Field::new(IDS, DataType::Utf8, true)]));
    let mut lines = BufReader::new(File::open(ids).map_err(FileError::at(ids.display()))?);
    let batch_schema = schema.clone();
    let batches = std::iter::from_fn(move || {
        let mut read = || -> io::Result<Vec<Option<String>>> {
            let (mut line, mut ids) = (Vec::new(), Vec::new());
            while ids.len() < BATCH_ROWS {
                line.clear();
                if lines.read_until(b'\n', &mut line)? == 0 {
                    break;
                }
                ids.push(read_output(&line)?.custom_id);
            }
            Ok(ids)
        };
        match read() {
            Err(error) => Some(Err(ArrowError::IoError(error.to_string(), error))),
            Ok(ids) if ids.is_empty() => None,
            Ok(ids) => {
                let column: ArrayRef = Arc::new(StringArray::from(ids));
                Some(RecordBatch::try_new(batch_schema.clone(), vec![column]))
            }
        }
    });
    Ok((schema, Box::new(batches)))
}

#[cfg(test)]
mod tests {
    use arrow_array::types::Int8Type;
    use arrow_array::{DictionaryArray, Int8Array, LargeStringArray, StringViewArray, UInt64Array};

    use super::super::errors::ErrorCounts;
    use super::super::matrix::{Matrix, ids_path};
    use super::super::resume::claim;
    use super::*;

    const CSV: &str = "number,text\n007,one\n8,\"two, three\"\n9,\n";

    struct TestFolder {
        folder: tempfile::TempDir,
    }

    impl TestFolder {
        fn new() -> Self {
            let files = Self { folder: tempfile::tempdir().unwrap() };
            fs::write(files.path("t.csv"), CSV).unwrap();
            files
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn table(&self, name: &str, column: &str) -> Table {
            Table {
                path: self.path(name),
                column: column.to_owned(),
                id_column: None,
                fields: Map::new(),
                url: EMBEDDINGS_URL.to_owned(),
                asks_base64: true,
            }
        }

        /// Writes a Parquet file of the table and of these lines.
        fn join(&self, lines: &[String]) -> Join {
            let matrix = self.path("x.parquet.part");
            let ids = claim(&ids_path(&matrix), &[]).unwrap();
            let mut open = Matrix::open(&matrix, ids, 0, &ErrorCounts::default()).unwrap();
            lines.iter().for_each(|line| _ = open.write(line.as_bytes()).unwrap());
            open.sync().unwrap();
            let table = Some(self.table("t.csv", "text"));
            Join { table, ids: ids_path(&matrix), matrix, output: self.path("x.parquet") }
        }
    }

    fn line(row: usize, status: u16, body: &serde_json::Value) -> String {
        let response = json!({"status_code": status, "request_id": "1", "body": body});
        let line =
            json!({"id": "batch_req_1", "custom_id": row.to_string(), "response": response, "error": null});
        format!("{line}\n")
    }

    fn vector(row: usize, numbers: [f32; 2]) -> String {
        line(row, 200, &json!({"data": [{"embedding": numbers}]}))
    }

    #[test]
    fn the_rows_of_a_table_are_requests_for_the_text_in_one_column() {
        let files = TestFolder::new();
        let table = files.table("t.csv", "text");
        let input_of = |table: &Table| table.find(&files.path("none"), usize::MAX).map(|point| point.input);
        let digest = input_of(&table).unwrap();
        assert_eq!((digest.lines, digest.bytes), (3, CSV.len() as u64));
        assert_ne!(input_of(&files.table("t.csv", "number")).unwrap(), digest);
        let fields = Map::from_iter([("prompt_name".to_owned(), "query".into())]);
        assert_ne!(input_of(&Table { fields, ..table.clone() }).unwrap(), digest);
        let rows: Vec<InputRow> = table.rows_after(1).unwrap().map(|row| row.unwrap()).collect();
        assert_eq!(rows.iter().map(|row| row.number).collect::<Vec<_>>(), [2, 3]);
        let request = rows[0].request.as_ref().unwrap();
        let body: serde_json::Value = serde_json::from_slice(&request.body).unwrap();
        assert_eq!((request.custom_id.as_str(), &body["input"]), ("1", &json!("two, three")));
        assert_eq!(body["encoding_format"], "base64");
        let empty = rows[1].request.as_ref().unwrap_err();
        assert_eq!(
            (empty.custom_id.as_deref(), empty.problem == "the cell in column \"text\" is empty"),
            (Some("2"), true)
        );
        let fields = Map::from_iter([("prompt_name".to_owned(), "query".into())]);
        let other = input_of(&Table { fields, column: "number".to_owned(), ..table.clone() }).unwrap();
        let (then, now) = digest.differences(&other);
        assert_eq!(then, "--column \"text\", no --field prompt_name");
        assert_eq!(now, "--column \"number\", --field prompt_name \"query\"");
        let missing = input_of(&files.table("t.csv", "txt")).unwrap_err().to_string();
        assert!(missing.contains("no column \"txt\", only number, text"), "{missing}");
        let mut rows = table.rows_after(0).unwrap();
        assert_eq!(rows.changed().unwrap(), None);
        fs::write(&table.path, format!("{CSV}10,four\n")).unwrap();
        assert!(rows.changed().unwrap().is_some());
    }

    #[test]
    fn a_quote_that_is_not_closed_and_a_column_of_the_same_name_are_refused() {
        let files = TestFolder::new();
        let refused = |content: &str| {
            fs::write(files.path("t.csv"), content).unwrap();
            let table = Table { id_column: Some("number".to_owned()), ..files.table("t.csv", "text") };
            table.find(&files.path("none"), usize::MAX).unwrap_err().to_string()
        };
        let unclosed = refused("number,text\n1,one\n2,\"two\n3,three\n4,four\n");
        assert!(
            unclosed.contains("t.csv: the quote that opens a cell in line 3 is not closed"),
            "{unclosed}"
        );
        let twice = refused("number,text,more,text\n1,one,x,two\n");
        assert!(twice.ends_with("t.csv: has 2 columns \"text\"; rename all but one"), "{twice}");
        let twice = refused("number,text,number\n1,one,2\n");
        assert!(twice.ends_with("has 2 columns \"number\"; rename all but one"), "{twice}");
        fs::write(files.path("t.csv"), "text,more,more\none,1,2\n").unwrap();
        assert_eq!(files.table("t.csv", "text").find(&files.path("none"), usize::MAX).unwrap().total, 1);
    }

    #[test]
    fn a_column_may_have_the_ids_and_fields_are_in_each_request() {
        let files = TestFolder::new();
        let fields = Map::from_iter([("prompt_name".to_owned(), "query".into())]);
        let table = files.table("t.csv", "text");
        let table = Table { id_column: Some("number".to_owned()), fields, ..table };
        let rows: Vec<InputRow> = table.rows_after(0).unwrap().map(|row| row.unwrap()).collect();
        let request = rows[0].request.as_ref().unwrap();
        let body: serde_json::Value = serde_json::from_slice(&request.body).unwrap();
        assert_eq!((request.custom_id.as_str(), &body["prompt_name"]), ("007", &json!("query")));
        assert_eq!(rows[2].request.as_ref().unwrap_err().custom_id.as_deref(), Some("9"));
        // A run continues by these ids.
        let lines = files.path("lines");
        fs::write(&lines, line(0, 200, &json!({})).replace("\"0\"", "\"007\"")).unwrap();
        let point = table.find(&lines, usize::MAX).unwrap();
        assert_eq!((point.done, point.total, point.input.lines), (1, 3, 3));
        let missing = Table { id_column: Some("id".to_owned()), ..table.clone() };
        assert!(missing.rows_after(0).err().unwrap().to_string().contains("no column \"id\""));
        let taken = Table { fields: Map::from_iter([("input".to_owned(), "x".into())]), ..table };
        assert!(taken.body("a").unwrap_err().contains("the field input is not free"));
    }

    #[test]
    fn texts_and_ids_are_read_from_columns_of_every_type_that_holds_them() {
        let texts = ["one", "two"];
        let dictionary: DictionaryArray<Int8Type> = texts.into_iter().collect();
        let columns: [(ArrayRef, [&str; 2]); 6] = [
            (Arc::new(StringArray::from(texts.to_vec())), texts),
            (Arc::new(LargeStringArray::from(texts.to_vec())), texts),
            (Arc::new(StringViewArray::from(texts.to_vec())), texts),
            (Arc::new(dictionary), texts),
            (Arc::new(Int8Array::from(vec![-1, 2])), ["-1", "2"]),
            (Arc::new(UInt64Array::from(vec![0, u64::MAX])), ["0", "18446744073709551615"]),
        ];
        for (column, expected) in columns {
            let found = [0, 1].map(|row| text_in(&column, row));
            assert_eq!(found.each_ref().map(Option::as_deref), expected.map(Some), "{}", column.data_type());
        }
        let nothing: DictionaryArray<Int8Type> = [None::<&str>].into_iter().collect();
        assert_eq!(text_in(&nothing, 0), None);
    }

    #[test]
    fn a_csv_file_with_a_byte_order_mark_has_the_columns_that_it_names_and_uneven_rows_are_refused() {
        let files = TestFolder::new();
        fs::write(files.path("t.csv"), "\u{feff}\"text\",number\na,1\n").unwrap();
        assert_eq!(files.table("t.csv", "text").find(&files.path("none"), usize::MAX).unwrap().total, 1);
        fs::write(files.path("t.csv"), "text,number\na,1\nb\n").unwrap();
        let error = files.table("t.csv", "text").rows_after(0).unwrap().nth(1).unwrap().unwrap_err();
        assert!(error.to_string().contains("line: 3"), "{error}");
    }

    #[test]
    fn a_row_that_is_too_long_is_an_error_and_the_next_one_a_request() {
        let files = TestFolder::new();
        let long = "x".repeat(MAX_LINE + 1);
        fs::write(files.path("t.csv"), format!("text\n{long}\nshort\n")).unwrap();
        let table = files.table("t.csv", "text");
        let rows: Vec<InputRow> = table.rows_after(0).unwrap().map(|row| row.unwrap()).collect();
        let error = rows[0].request.as_ref().unwrap_err();
        assert_eq!(error.problem, "the text in column \"text\" is longer than 67108864 bytes");
        assert!(rows.len() == 2 && rows[1].request.is_ok());
    }

    #[test]
    fn a_parquet_file_has_the_columns_of_the_input_the_vectors_and_the_errors() {
        let files = TestFolder::new();
        let error = line(2, 400, &json!({"error": {"message": "empty"}}));
        let join = files.join(&[vector(0, [1.0, 2.0]), vector(1, [3.0, 4.0]), error]);
        join.check().unwrap();
        join.write().unwrap();
        assert!(!join.matrix.exists() && join.ids.exists());
        let table = files.table("x.parquet", "text");
        assert_eq!(table.find(&files.path("none"), usize::MAX).unwrap().total, 3);
        let (schema, batches) = table.read(None).unwrap();
        let names: Vec<_> = schema.fields().iter().map(|field| field.name().as_str()).collect();
        assert_eq!(names, ["number", "text", VECTORS, ERRORS]);
        let batches: Vec<RecordBatch> = batches.map(|batch| batch.unwrap()).collect();
        let number = batches[0].column(0).as_string::<i32>();
        assert_eq!(number.value(0), "007", "nothing is guessed");
        let vector = |row: usize| batches[row].column(2).as_fixed_size_list();
        let second = vector(1).value(0);
        let second = second.as_primitive::<arrow_array::types::Float32Type>();
        assert_eq!(second.values()[..], [3.0, 4.0]);
        assert!(vector(2).is_null(0) && vector(0).is_valid(0));
        let error = |row: usize| batches[row].column(3).as_string::<i32>();
        assert!(error(0).is_null(0) && error(2).value(0) == "400: empty");
        let column = files.table("x.parquet", VECTORS).rows_after(0).err().unwrap().to_string();
        assert!(column.contains("has no texts"), "{column}");
        // Its columns leave no room for those of another output.
        let join = Join { table: Some(table), ..join };
        assert!(join.check().unwrap_err().to_string().contains("has a column \"embedding\""));
    }

    #[test]
    fn a_compression_that_is_not_read_is_named() {
        for (compression, expected) in [
            (Compression::GZIP(Default::default()), Some("gzip")),
            (Compression::BROTLI(Default::default()), Some("brotli")),
            (Compression::LZ4_RAW, Some("lz4_raw")),
            (Compression::SNAPPY, None),
            (Compression::ZSTD(Default::default()), None),
            (Compression::UNCOMPRESSED, None),
        ] {
            assert_eq!(unread_codec(compression).as_deref(), expected);
        }
    }

    #[test]
    fn without_a_table_the_ids_are_the_only_other_column() {
        let files = TestFolder::new();
        let join = Join { table: None, ..files.join(&[vector(0, [1.0, 2.0]), vector(1, [3.0, 4.0])]) };
        join.write().unwrap();
        let (schema, batches) = files.table("x.parquet", IDS).read(None).unwrap();
        let names: Vec<_> = schema.fields().iter().map(|field| field.name().as_str()).collect();
        assert_eq!(names, [IDS, VECTORS, ERRORS]);
        let rows: usize = batches.map(|batch| batch.unwrap().num_rows()).sum();
        assert_eq!(rows, 2);
    }
}
