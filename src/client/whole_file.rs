//! Writes whole files: a reader finds the whole file or none.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use tempfile::NamedTempFile;

/// Writes a file under a random name beside it and renames it, so that neither a link nor a leftover of an earlier run
/// matters. What is no regular file, such as a device or a pipe, is written to as it is.
///
/// # Errors
/// The file system's.
pub(crate) fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    if is_special(path) {
        return write_special(path, content);
    }
    written_beside(path, content)?.persist(path)?;
    Ok(())
}

/// As [`write_whole`], but never replaces a file.
///
/// # Errors
/// The file system's, also [`io::ErrorKind::AlreadyExists`].
pub(crate) fn write_new(path: &Path, content: &[u8]) -> io::Result<()> {
    if is_special(path) {
        return write_special(path, content);
    }
    written_beside(path, content)?.persist_noclobber(path)?;
    Ok(())
}

/// Whether this is a device, a pipe or a socket. `/dev/stdout` is a link to a pipe or a terminal.
pub(crate) fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|it| !it.is_file() && !it.is_dir())
}

fn write_special(path: &Path, content: &[u8]) -> io::Result<()> {
    fs::OpenOptions::new().write(true).open(path)?.write_all(content)
}

/// A file with this content under a random name in the folder of `path`.
fn written_beside(path: &Path, content: &[u8]) -> io::Result<NamedTempFile> {
    let mut file = begin_beside(path)?;
    file.write_all(content)?;
    file.as_file().sync_all()?;
    Ok(file)
}

/// An empty file under a random name in the folder of `path`, for a content that is too large for memory.
///
/// # Errors
/// The file system's.
pub(crate) fn begin_beside(path: &Path) -> io::Result<NamedTempFile> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The umask takes its part of these permissions.
    let permissions = fs::Permissions::from_mode(0o666);
    tempfile::Builder::new().prefix(".sconce").permissions(permissions).tempfile_in(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_written_through_no_link_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let (path, target) = (folder.path().join("a"), folder.path().join("target"));
        fs::write(&target, "mine").unwrap();
        std::os::unix::fs::symlink(&target, &path).unwrap();
        write_whole(&path, b"new").unwrap();
        assert_eq!(
            (fs::read(&path).unwrap(), fs::read(&target).unwrap()),
            (b"new".to_vec(), b"mine".to_vec())
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o444, 0o444);
        write_whole(Path::new("/dev/null"), b"nothing").unwrap();
    }

    #[test]
    fn a_new_file_replaces_none_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        write_new(&path, b"one").unwrap();
        assert_eq!(write_new(&path, b"two").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        write_new(Path::new("/dev/null"), b"nothing").unwrap();
    }
}
