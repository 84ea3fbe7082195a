//! How the numbers of a [`Matrix`](super::Matrix) are kept. Owns no state.

/// Columns that lie side by side.
pub const PANEL: usize = 64;

/// How the numbers of a matrix are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Numbers {
    /// 32 bits.
    F32,
    /// The upper half of an f32.
    Bf16,
    /// 0 to 15, with a scale and an offset for 32 numbers.
    Bits4,
    /// 0 to 255, with a scale and an offset for 32 numbers.
    Bits8,
    /// 0 to 255, with a scale and an offset for 16 numbers.
    Bits8By16,
}

impl Numbers {
    /// Numbers of a column that share a scale and an offset, or that lie in one word.
    pub fn group(self) -> usize {
        match self {
            Self::F32 => 1,
            Self::Bf16 => 2,
            Self::Bits4 | Self::Bits8 => 32,
            Self::Bits8By16 => 16,
        }
    }

    /// Numbers in a word of 32 bits.
    pub(super) fn in_word(self) -> usize {
        match self {
            Self::F32 => 1,
            Self::Bf16 => 2,
            Self::Bits4 => 8,
            Self::Bits8 | Self::Bits8By16 => 4,
        }
    }

    /// The largest whole number.
    pub(super) fn most(self) -> u8 {
        if self == Self::Bits4 { 15 } else { 255 }
    }

    pub(super) fn is_scaled(self) -> bool {
        matches!(self, Self::Bits4 | Self::Bits8 | Self::Bits8By16)
    }

    /// The words of a group of one column.
    pub(super) fn words(self) -> usize {
        self.group() / self.in_word() + if self.is_scaled() { 2 } else { 0 }
    }
}
