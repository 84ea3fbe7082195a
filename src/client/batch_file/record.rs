//! The record beside an output, `OUTPUT.run.json`: its path, and how it is read and written. Its content is defined by
//! the caller. The caller holds the output's lock, so there is one writer.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::client::whole_file::write_whole;

/// The path of the record of an output.
pub(crate) fn record_path(output: &Path) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(".run.json");
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

/// Writes a record.
///
/// # Errors
/// The file system's.
pub(crate) fn write_record(path: &Path, record: &impl Serialize) -> io::Result<()> {
    let mut content = serde_json::to_vec_pretty(record)?;
    content.push(b'\n');
    write_whole(path, &content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = record_path(&folder.path().join("out"));
        assert_eq!(read_record::<u32>(&path).unwrap(), None);
        write_record(&path, &7).unwrap();
        assert_eq!(read_record(&path).unwrap(), Some(7));
    }
}
