//! A buffer of numbers that begins at a cache line.

use std::ops::{Deref, DerefMut};

/// Bytes of a cache line and of the widest register. Reading a register across two lines takes twice as long.
const LINE: usize = 64;
/// The largest number of elements that are skipped to reach a cache line.
const MAX_SKIPPED: usize = LINE / size_of::<f32>() - 1;

/// A buffer of numbers, aligned to a cache line. Derefs to the numbers.
#[derive(Default)]
pub struct AlignedVec {
    /// As long as the largest length so far plus [`MAX_SKIPPED`].
    storage: Vec<f32>,
    len: usize,
}

impl AlignedVec {
    /// Sets the length to `len` numbers. Their values are unspecified.
    pub fn set_len(&mut self, len: usize) {
        self.len = len;
        if self.storage.len() < len + MAX_SKIPPED {
            self.storage.resize(len + MAX_SKIPPED, 0.0);
        }
    }

    fn start(&self) -> usize {
        self.storage.as_ptr().align_offset(LINE).min(self.storage.len() - self.len)
    }
}

impl Deref for AlignedVec {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.storage[self.start()..][..self.len]
    }
}

impl DerefMut for AlignedVec {
    fn deref_mut(&mut self) -> &mut [f32] {
        let start = self.start();
        &mut self.storage[start..][..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_of_any_length_begins_at_a_cache_line() {
        let mut buffer = AlignedVec::default();
        assert!(buffer.is_empty());
        for len in [1, 16, 1_000, 3] {
            buffer.set_len(len);
            assert_eq!(buffer.len(), len);
            assert_eq!(buffer.as_ptr().align_offset(LINE), 0, "{len} numbers");
            buffer[len - 1] = 1.0;
        }
    }
}
