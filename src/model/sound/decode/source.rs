//! The source of a sound file's bytes: memory or a file. Limits how many bytes one call of a library may read, so that
//! a call ends early if the file has no sound. Never seeks while a library reads.

use std::io::{self, Read, Seek, SeekFrom};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use symphonia::core::io::MediaSource;

/// A sound file: a cursor over bytes, or an open file.
pub trait Source: Read + Seek + Send + Sync + 'static {}

impl<T: Read + Seek + Send + Sync + 'static> Source for T {}

/// Reads this many bytes, or those up to the end.
pub(super) fn read_up_to(source: &mut dyn Source, bytes: u64) -> io::Result<Vec<u8>> {
    let mut read = Vec::new();
    source.take(bytes).read_to_end(&mut read)?;
    Ok(read)
}

/// What a file says about where its sound ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The header or the last page states it.
    Stated,
    /// Nothing states it, and the file ends where sound may end.
    Unmarked,
    /// The file ends within a page of an Ogg file, or within a packet.
    CutOff,
}

/// The number of bytes that may still be read until the next [`Allowance::renew`]. `Recording` and the source, which
/// the library's reader owns, share it; one thread at a time uses both.
#[derive(Clone, Default)]
pub(super) struct Allowance(Arc<AtomicU64>);

impl Allowance {
    /// Allows the next call of the library to read this many bytes.
    pub(super) fn renew(&self, bytes: u64) {
        self.0.store(bytes, Ordering::Relaxed);
    }

    /// Whether all bytes that were allowed have been read.
    pub(super) fn is_spent(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }
}

/// A source that a library reads in order, from the source's current position.
pub(super) struct Metered {
    pub(super) source: Box<dyn Read + Send + Sync>,
    pub(super) allowance: Allowance,
}

impl Read for Metered {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.allowance.0.load(Ordering::Relaxed);
        let allowed = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        if allowed == 0 && !buffer.is_empty() {
            return Err(io::Error::other("too many bytes without sound"));
        }
        let read = self.source.read(&mut buffer[..allowed])?;
        self.allowance.0.store(left - read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

impl Seek for Metered {
    fn seek(&mut self, _: SeekFrom) -> io::Result<u64> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Not seekable, so that libraries read a file in order instead of guessing its length from a few of its bytes.
impl MediaSource for Metered {
    fn is_seekable(&self) -> bool {
        false
    }

    fn byte_len(&self) -> Option<u64> {
        None
    }
}
