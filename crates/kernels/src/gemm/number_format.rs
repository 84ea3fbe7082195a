//! The number formats of a [`Matrix`](super::Matrix). Owns no state.

/// The columns of a panel, whose words are interleaved.
pub const PANEL: usize = 64;

/// The number format of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum NumberFormat {
    /// 32 bits.
    F32,
    /// bf16, the upper half of an f32.
    Bf16,
    /// Whole numbers from 0 to 15, with a scale and an offset for each 32 of them.
    Bits4,
    /// Whole numbers from 0 to 255, with a scale and an offset for each 32 of them.
    Bits8,
    /// Whole numbers from 0 to 255, with a scale and an offset for each 16 of them.
    Bits8By16,
}

impl NumberFormat {
    /// Numbers of a column in a group: those that share a scale and an offset, or one word.
    pub fn group(self) -> usize {
        match self {
            Self::F32 => 1,
            Self::Bf16 => 2,
            Self::Bits4 | Self::Bits8 => 32,
            Self::Bits8By16 => 16,
        }
    }

    /// Numbers in a word of 32 bits.
    pub(super) fn per_word(self) -> usize {
        match self {
            Self::F32 => 1,
            Self::Bf16 => 2,
            Self::Bits4 => 8,
            Self::Bits8 | Self::Bits8By16 => 4,
        }
    }

    /// The largest quantised number.
    pub(super) fn max_quantised(self) -> u8 {
        if self == Self::Bits4 { 15 } else { 255 }
    }

    /// Whether the numbers are quantised: whole numbers with a scale and an offset for each group.
    pub(super) fn is_scaled(self) -> bool {
        matches!(self, Self::Bits4 | Self::Bits8 | Self::Bits8By16)
    }

    /// The words of a group of one column, including scale and offset.
    pub(super) fn words(self) -> usize {
        self.group() / self.per_word() + if self.is_scaled() { 2 } else { 0 }
    }
}

/// The format to which rows are converted before they are multiplied with a quantised matrix, or with one in bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowFormat {
    /// Rows are not converted.
    #[default]
    F32,
    /// Whole numbers with a scale for each 32: of 15 bits with AVX512-VNNI, of 16 bits with AVX2. Nearly as exact as f32,
    /// and faster.
    Int16,
    /// Whole numbers of 8 bits, with a scale for each 32: the fastest. Only with AVX512-VNNI.
    Int8,
    /// bf16, for a matrix in bf16. With AMX also for a quantised matrix, whose numbers are rounded to bf16 too.
    Bf16,
}
