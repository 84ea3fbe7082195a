//! Computes the digest of a model's files. Decides which bytes of a large file it covers. Owns nothing, writes nothing,
//! and does not decide which files belong to a model.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use crate::model::LoadError;

/// The largest file that is read whole, in bytes. Tokenizers and settings are smaller.
const MAX_WHOLE: u64 = 32 << 20;
/// Bytes that are read at the beginning and at the end of a larger file.
const END_BYTES: usize = 64 << 10;
/// The number of blocks of a larger file that are read.
const BLOCKS: u64 = 64;
/// Bytes of one block.
const BLOCK_BYTES: usize = 16 << 10;

/// The digest of these files, by name.
pub(super) fn of(files: &BTreeMap<String, PathBuf>) -> Result<String, LoadError> {
    let mut sha256 = Sha256::new();
    for (name, path) in files {
        add_file(&mut sha256, name, path)
            .map_err(|error| LoadError::File { path: path.clone(), reason: error.to_string() })?;
    }
    Ok(format!("{:x}", sha256.finalize()))
}

fn add_file(sha256: &mut Sha256, name: &str, path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    // The length comes first, so that different lists of files never give the same bytes.
    sha256.update((name.len() as u64).to_le_bytes());
    sha256.update(name);
    sha256.update(size.to_le_bytes());
    for (offset, length) in pieces(size) {
        let mut piece = vec![0_u8; length];
        file.read_exact_at(&mut piece, offset)?;
        sha256.update(&piece);
    }
    Ok(())
}

/// Offset and length of each piece that is read from a file of `size` bytes.
fn pieces(size: u64) -> Vec<(u64, usize)> {
    if size <= MAX_WHOLE {
        return vec![(0, size as usize)];
    }
    let distance = (size - BLOCK_BYTES as u64) / (BLOCKS - 1);
    let blocks = (0..BLOCKS).map(|n| (n * distance, BLOCK_BYTES));
    [(0, END_BYTES), (size - END_BYTES as u64, END_BYTES)].into_iter().chain(blocks).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn digest(&self, names: &[&str]) -> String {
            let files = names.iter().map(|name| ((*name).to_owned(), self.0.path().join(name)));
            of(&files.collect()).unwrap()
        }

        fn write(&self, name: &str, content: &str) {
            std::fs::write(self.0.path().join(name), content).unwrap();
        }
    }

    #[test]
    fn a_copy_has_the_same_digest_and_other_names_or_bytes_have_another() {
        let folders = [Folder::new(), Folder::new()];
        for folder in &folders {
            folder.write("a", "one");
            folder.write("b", "two");
        }
        let digest = folders[0].digest(&["a", "b"]);
        assert_eq!(digest.len(), 64);
        assert_eq!(folders[1].digest(&["a", "b"]), digest);
        assert_ne!(folders[1].digest(&["a"]), digest);
        folders[1].write("b", "twO");
        assert_ne!(folders[1].digest(&["a", "b"]), digest);
        folders[1].write("a", "onet");
        folders[1].write("b", "wo");
        assert_ne!(folders[1].digest(&["a", "b"]), digest);
    }

    #[test]
    fn the_digest_of_a_large_file_depends_on_its_size_ends_and_blocks() {
        let folder = Folder::new();
        let size = 2 * MAX_WHOLE + 12_345;
        let file = File::create(folder.0.path().join("large")).unwrap();
        file.set_len(size).unwrap();
        let zeros = folder.digest(&["large"]);
        // Some bytes of each sixtieth of the file are read.
        let part = size / 60;
        for (offset, length) in [(0, 1), (size - 1, 1), (size / 2, part), (size / 3, part)] {
            file.write_all_at(&vec![1; length as usize], offset).unwrap();
            assert_ne!(folder.digest(&["large"]), zeros, "{length} bytes at {offset}");
            file.write_all_at(&vec![0; length as usize], offset).unwrap();
        }
        assert_eq!(folder.digest(&["large"]), zeros);
        file.set_len(size + 1).unwrap();
        assert_ne!(folder.digest(&["large"]), zeros);
    }

    #[test]
    fn a_file_of_any_size_is_read_within_its_bounds() {
        for size in [0, 1, MAX_WHOLE, MAX_WHOLE + 1, 3 * MAX_WHOLE, u64::MAX >> 1] {
            for (offset, length) in pieces(size) {
                assert!(offset + length as u64 <= size, "{length} at {offset} of {size}");
            }
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let path = PathBuf::from("/no/such/file");
        let error = of(&BTreeMap::from([("a".to_owned(), path)])).unwrap_err().to_string();
        assert!(error.starts_with("/no/such/file: "), "{error}");
    }
}
