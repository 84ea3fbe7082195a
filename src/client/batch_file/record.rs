//! The record beside an output, `OUTPUT.run.json`: its path, and how it is read and written. Its content is defined by
//! the caller. The caller holds the output's lock, so there is one writer.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The path of the record of an output.
pub(crate) fn record_path(output: &Path) -> PathBuf {
    with_suffix(output, ".run.json")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Reads a record; none if there is no file.
///
/// # Errors
/// The file system's, and what is wrong with the content, which is [`io::ErrorKind::InvalidData`].
pub(crate) fn read_record<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes a record under another name and renames it, so that a reader finds the whole file or none.
///
/// # Errors
/// The file system's.
pub(crate) fn write_record(path: &Path, record: &impl Serialize) -> io::Result<()> {
    let unfinished = with_suffix(path, ".new");
    let mut file = File::create(&unfinished)?;
    file.write_all(&serde_json::to_vec_pretty(record)?)?;
    file.write_all(b"\n")?;
    file.sync_all()?;
    fs::rename(&unfinished, path)
}
