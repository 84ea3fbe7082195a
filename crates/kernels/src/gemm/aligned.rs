//! Numbers that begin at a cache line.

use std::ops::{Deref, DerefMut};

/// Bytes of a cache line and of the widest register: reading a register across two lines costs twice.
const LINE: usize = 64;
/// The most numbers that are skipped to reach a cache line.
const SKIPPED: usize = LINE / size_of::<f32>() - 1;

/// A buffer of numbers, aligned to a cache line. Derefs to the numbers.
#[derive(Default)]
pub struct AlignedVec {
    /// The largest length so far, plus the numbers that may be skipped.
    room: Vec<f32>,
    len: usize,
}

impl AlignedVec {
    /// Sets the length to `len` numbers, of any value.
    pub fn set_len(&mut self, len: usize) {
        self.len = len;
        if self.room.len() < len + SKIPPED {
            self.room.resize(len + SKIPPED, 0.0);
        }
    }

    fn start(&self) -> usize {
        self.room.as_ptr().align_offset(LINE).min(self.room.len() - self.len)
    }
}

impl Deref for AlignedVec {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.room[self.start()..][..self.len]
    }
}

impl DerefMut for AlignedVec {
    fn deref_mut(&mut self) -> &mut [f32] {
        let start = self.start();
        &mut self.room[start..][..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_begin_with_a_line_whatever_their_number() {
        let mut lines = AlignedVec::default();
        assert!(lines.is_empty());
        for len in [1, 16, 1_000, 3] {
            lines.set_len(len);
            assert_eq!(lines.len(), len);
            assert_eq!(lines.as_ptr().align_offset(LINE), 0, "{len} numbers");
            lines[len - 1] = 1.0;
        }
    }
}
