//! A file with a decoder's matrices, packed in the layout that the kernels read. It is written to the user's cache
//! folder when a model is loaded for the first time, and then mapped by every worker, so that all share its pages. If
//! the file cannot be written or read, the worker keeps the matrices in its own memory instead.
//!
//! The file consists of the length of an index (8 bytes, little-endian), the index (JSON), and the matrices, each at a
//! multiple of `ALIGNMENT`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use serde::{Deserialize, Serialize};

use super::weights::map_file;
use crate::model::Dtype;
use crate::model::ops::{Matrix, NumberFormat, PackedWords};

/// The version of the layout. It is raised when the layout or the names of matrices change.
const VERSION: u32 = 2;
/// The alignment of matrices in bytes: a cache line.
const ALIGNMENT: usize = 64;

/// The mapped matrices of a file.
pub struct PackedCache {
    file: Arc<Mmap>,
    index: BTreeMap<String, Entry>,
    /// The offset of the first matrix.
    start: usize,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    numbers: NumberFormat,
    depth: usize,
    width: usize,
    /// The distance from the first matrix, in bytes.
    offset: usize,
    bytes: usize,
}

/// The path of the file for the model with this digest, with its matrices in `dtype` (f32: as in the model's files). None
/// if this user has no cache folder.
pub fn path(digest: &str, dtype: Dtype) -> Option<PathBuf> {
    let configured = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = configured.or_else(|| Some(std::env::home_dir()?.join(".cache")))?;
    let format = if dtype == Dtype::F32 { String::new() } else { format!("-{}", dtype.name()) };
    Some(folder.join("sconce").join(format!("{digest}{format}-{VERSION}.matrices")))
}

/// Writes a file atomically.
///
/// # Errors
/// The system's error.
pub fn write<'a>(path: &Path, matrices: impl Iterator<Item = (String, &'a Matrix)>) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut end = 0;
    let entry_of = |(name, matrix): (String, &'a Matrix)| {
        let offset = end;
        let bytes = size_of_val(matrix.words());
        end = (offset + bytes).next_multiple_of(ALIGNMENT);
        let (numbers, depth, width) = (matrix.format(), matrix.depth(), matrix.width());
        ((name, Entry { numbers, depth, width, offset, bytes }), matrix)
    };
    let (index, matrices): (Vec<_>, Vec<_>) = matrices.map(entry_of).unzip();
    let sizes: Vec<usize> = index.iter().map(|(_, entry)| entry.bytes).collect();
    let index = serde_json::to_vec(&index.into_iter().collect::<BTreeMap<_, _>>())?;
    let scratch = folder.join(format!("{}.tmp", uuid::Uuid::new_v4().simple()));
    let written = File::create_new(&scratch).and_then(|file| {
        let mut out = BufWriter::new(file);
        out.write_all(&(index.len() as u64).to_le_bytes())?;
        out.write_all(&index)?;
        pad(&mut out, 8 + index.len())?;
        for (matrix, size) in matrices.into_iter().zip(sizes) {
            out.write_all(bytemuck::cast_slice(matrix.words()))?;
            pad(&mut out, size)?;
        }
        out.flush()?;
        fs::rename(&scratch, path)
    });
    if written.is_err() {
        let _ = fs::remove_file(&scratch);
    }
    written
}

/// Pads `written` bytes with zeros to a multiple of [`ALIGNMENT`].
fn pad(out: &mut impl Write, written: usize) -> io::Result<()> {
    out.write_all(&[0; ALIGNMENT][..written.next_multiple_of(ALIGNMENT) - written])
}

impl PackedCache {
    /// Maps a file. None if it does not exist or is not complete.
    pub fn open(path: &Path) -> Option<Self> {
        let file = Arc::new(map_file(path).ok()?);
        let length = usize::try_from(u64::from_le_bytes(*file.first_chunk()?)).ok()?;
        let end = length.checked_add(8)?;
        let index: BTreeMap<String, Entry> = serde_json::from_slice(file.get(8..end)?).ok()?;
        let start = end.next_multiple_of(ALIGNMENT);
        let is_valid = |entry: &Entry| {
            let end = start.checked_add(entry.offset).and_then(|begin| begin.checked_add(entry.bytes));
            end.is_some_and(|end| end <= file.len())
                && entry.offset.is_multiple_of(ALIGNMENT)
                && entry.bytes.is_multiple_of(4)
        };
        index.values().all(is_valid).then_some(())?;
        Some(Self { file, index, start })
    }

    /// The matrix `[depth, width]` of this name.
    pub fn matrix(&self, name: &str, [depth, width]: [usize; 2]) -> Option<Matrix> {
        let entry = self.index.get(name).filter(|entry| (entry.depth, entry.width) == (depth, width))?;
        let range = self.start + entry.offset..self.start + entry.offset + entry.bytes;
        Matrix::of_words(entry.numbers, [depth, width], PackedWords::Mapped(self.file.clone(), range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_are_read_back_and_a_broken_file_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sconce/a.matrices");
        assert!(PackedCache::open(&path).is_none());
        let columns: Vec<f32> = (0..12).map(|x| x as f32).collect();
        let (first, second) = (Matrix::of_f32(&columns, 4), Matrix::of_bf16(&columns, 2));
        write(&path, [("b".to_owned(), &first), ("a".to_owned(), &second)].into_iter()).unwrap();
        let file = PackedCache::open(&path).unwrap();
        let column = |matrix: &Matrix, column| {
            let mut out = vec![0.0; matrix.depth()];
            matrix.column(column, &mut out);
            out
        };
        assert_eq!(column(&file.matrix("b", [4, 3]).unwrap(), 2), [8.0, 9.0, 10.0, 11.0]);
        assert_eq!(column(&file.matrix("a", [2, 6]).unwrap(), 1), [2.0, 3.0]);
        assert!(file.matrix("b", [4, 2]).is_none() && file.matrix("c", [4, 3]).is_none());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no scratch file remains");
        let bytes = fs::read(&path).unwrap();
        for broken in [&bytes[..bytes.len() - 64], &bytes[..20], b"", &[0xff; 64]] {
            fs::write(&path, broken).unwrap();
            assert!(PackedCache::open(&path).is_none(), "{} bytes", broken.len());
        }
    }
}
