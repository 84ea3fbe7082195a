//! Opens files below an allowed folder; neither `..` nor a symbolic link can lead out of it. Reads no content.

use std::fs::File;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::Mode;

use super::Failure;

/// Opens the regular file at the relative path. Also returns its size in bytes.
///
/// # Errors
/// There is no such file below the folder, it is not a regular file, the worker may not read it, or it cannot be read
/// now.
pub(super) fn open_below(folder: &Path, path: &Path) -> Result<(File, u64), Failure> {
    let unavailable = |error: Errno| Failure::Unavailable(format!("cannot be read now: {}", error.desc()));
    let refused = |reason: &str| Failure::Refused(reason.to_owned());
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let folder = open(folder, flags, Mode::empty()).map_err(unavailable)?;
    let how = OpenHow::new()
        // With O_NONBLOCK, opening a FIFO does not wait for a writer.
        .flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOCTTY)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let file = openat2(&folder, path, how).map_err(|error| match error {
        Errno::ENOENT | Errno::ENOTDIR => refused("does not exist"),
        // ELOOP means a magic link, which could lead anywhere, or a circle of links.
        Errno::EXDEV | Errno::ELOOP => refused("leads out of its folder"),
        Errno::EACCES | Errno::EPERM => refused("may not be read by the worker"),
        Errno::ENAMETOOLONG => refused("has too long a name"),
        // These are the errors of opening a socket, or a device without a driver.
        Errno::ENXIO | Errno::ENODEV => refused("is not a regular file"),
        other => unavailable(other),
    })?;
    let file = File::from(file);
    let metadata = file.metadata().map_err(|error| Failure::Unavailable(error.to_string()))?;
    if !metadata.is_file() {
        return Err(refused("is not a regular file"));
    }
    Ok((file, metadata.len()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_regular_files_below_the_folder_are_opened() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("in");
        std::fs::create_dir_all(folder.join("sub")).unwrap();
        std::fs::write(root.path().join("secret"), "secret").unwrap();
        std::fs::write(folder.join("sub/a.wav"), "sound").unwrap();
        symlink("sub/a.wav", folder.join("inside")).unwrap();
        symlink("../secret", folder.join("outside")).unwrap();
        symlink(root.path().join("secret"), folder.join("absolute")).unwrap();
        symlink("/proc/self/root", folder.join("magic")).unwrap();
        symlink("..", folder.join("up")).unwrap();
        symlink("loop", folder.join("loop")).unwrap();
        nix::unistd::mkfifo(&folder.join("fifo"), Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        let _socket = UnixListener::bind(folder.join("socket")).unwrap();
        let opened = |path: &str| match open_below(&folder, Path::new(path)) {
            Ok((_, size)) => Ok(size),
            Err(Failure::Refused(reason) | Failure::Unavailable(reason) | Failure::TooLarge(reason)) => {
                Err(reason)
            }
            Err(Failure::OverBudget) => unreachable!("opening takes no memory"),
        };
        assert_eq!(opened("sub/a.wav"), Ok(5));
        assert_eq!(opened("inside"), Ok(5));
        for (path, reason) in [
            ("missing", "does not exist"),
            ("sub/a.wav/b", "does not exist"),
            ("outside", "leads out of its folder"),
            ("../secret", "leads out of its folder"),
            ("absolute", "leads out of its folder"),
            ("magic/etc/passwd", "leads out of its folder"),
            ("up/secret", "leads out of its folder"),
            ("loop", "leads out of its folder"),
            ("sub", "is not a regular file"),
            ("fifo", "is not a regular file"),
            ("socket", "is not a regular file"),
        ] {
            assert_eq!(opened(path), Err(reason.to_owned()), "{path}");
        }
        let missing = open_below(&root.path().join("none"), Path::new("a"));
        assert!(matches!(missing, Err(Failure::Unavailable(_))), "the folder may be mounted later");
    }
}
