//! The entries of a zip archive, as PyTorch writes it. Decides which archives are read: the directory is at the end of the
//! file and agrees with the headers, and each entry is stored without compression, has a name of its own, and shares no byte
//! with another. Owns nothing, copies nothing out of the file, and does not know what the entries mean.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::ops::Range;

use zip::result::ZipError;
use zip::{CompressionMethod, ZipArchive};

use super::shown::shown;

/// The most entries of an archive. One storage of numbers takes one entry.
const MAX_ENTRIES: usize = 1 << 15;
/// Bytes of the record at the end of an archive without a comment.
const END_BYTES: usize = 22;
/// Bytes before it in an archive with 64-bit sizes: a wider record, and where this one is.
const WIDE_BYTES: usize = 56;
const LOCATOR_BYTES: usize = 20;

/// Where the data of each entry is in the file, by the entry's name.
pub(super) type Entries = BTreeMap<String, Range<usize>>;

/// Reads the directory of an archive.
///
/// # Errors
/// What is wrong with the archive, if it is cut off, contradicts itself, or has an entry that is not read.
pub(super) fn read(file: &[u8]) -> Result<Entries, String> {
    let end = file.len().checked_sub(END_BYTES).map(|end| &file[end..]);
    if end.is_none_or(|end| !end.starts_with(b"PK\x05\x06")) {
        return Err("it has no zip directory at its end, so it is cut off or was changed".to_owned());
    }
    check_wide_record(file)?;
    let fault = |error: ZipError| format!("its zip directory cannot be read: {error}");
    let mut archive = ZipArchive::new(Cursor::new(file)).map_err(fault)?;
    if archive.len() > MAX_ENTRIES {
        return Err(too_many(archive.len() as u64));
    }
    archive.validate_header_consistency().map_err(fault)?;
    let mut entries = Entries::new();
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index).map_err(fault)?;
        let name = entry.name().map_err(fault)?;
        let shown = shown(&name);
        if entry.compression() != CompressionMethod::Stored || entry.encrypted() {
            return Err(format!(
                "its entry {shown} is compressed or encrypted; only stored entries are read"
            ));
        }
        let (packed, size) = (entry.compressed_size(), entry.size());
        if packed != size {
            return Err(format!("its entry {shown} is stored, but takes {packed} bytes for {size}"));
        }
        let range = entry.data_start().and_then(|start| {
            let end = usize::try_from(start.checked_add(size)?).ok()?;
            Some(usize::try_from(start).ok()?..end)
        });
        let range = range.filter(|range| range.end <= file.len());
        let range = range.ok_or_else(|| format!("its entry {shown} of {size} bytes is not in the file"))?;
        entries.insert(name.into_owned(), range);
    }
    Ok(entries)
}

/// Refuses a directory that is too long before it is read. Without a wide record it has at most 65,535 entries.
fn check_wide_record(file: &[u8]) -> Result<(), String> {
    let Some(wide) = file.len().checked_sub(WIDE_BYTES + LOCATOR_BYTES + END_BYTES) else { return Ok(()) };
    let (record, locator) = file[wide..].split_at(WIDE_BYTES);
    if !locator.starts_with(b"PK\x06\x07") {
        return Ok(());
    }
    let number = |bytes: &[u8]| bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    if number(&locator[8..]) != wide as u64 {
        return Err("its zip directory contradicts itself about where its records are".to_owned());
    }
    match number(&record[32..]) {
        count if count > MAX_ENTRIES as u64 => Err(too_many(count)),
        _ => Ok(()),
    }
}

fn too_many(count: u64) -> String {
    format!("its zip directory has {count} entries, and at most {MAX_ENTRIES} are read")
}
