//! Rows that are converted to the format in which an x86-64 CPU multiplies them with a [`Matrix`](super::matrix::Matrix).
//! Decides which kernel multiplies them. The memory of converted rows is reused by the next product of the thread.

use std::cell::RefCell;
use std::mem;
use std::thread::LocalKey;

use super::amx::{AmxRows, round_panel};
use super::bytes::ByteRows;
use super::gemv::Unpack;
use super::half_rows::HalfRows;
use super::number_format::{NumberFormat, PANEL, RowFormat};
use super::shorts::ShortRows;
use crate::cpu::has_amx;
use crate::{dispatch, may_use_vnni};

thread_local! {
    static BYTE_ROWS: RefCell<ByteRows> = RefCell::default();
    static SHORT_ROWS: RefCell<ShortRows> = RefCell::default();
    static HALF_ROWS: RefCell<HalfRows> = RefCell::default();
    static AMX_ROWS: RefCell<AmxRows> = RefCell::default();
    /// The numbers of a panel, and the same in bf16.
    static PANELS: RefCell<(Vec<f32>, Vec<u32>)> = RefCell::default();
}

/// A value that a thread keeps for its next use, and that is taken from there until this is dropped: new memory costs a
/// page fault every 4 KiB.
pub struct Reused<T: Default + 'static> {
    value: T,
    kept_in: &'static LocalKey<RefCell<T>>,
}

impl<T: Default> Reused<T> {
    fn filled(kept_in: &'static LocalKey<RefCell<T>>, fill: impl FnOnce(&mut T)) -> Self {
        let mut value = kept_in.take();
        fill(&mut value);
        Self { value, kept_in }
    }
}

impl<T: Default> Drop for Reused<T> {
    fn drop(&mut self) {
        self.kept_in.set(mem::take(&mut self.value));
    }
}

/// Rows in the format of one kernel.
pub enum ConvertedRows {
    Bytes(Reused<ByteRows>),
    Shorts(Reused<ShortRows>),
    Halves(Reused<HalfRows>),
    Tiles(Reused<AmxRows>),
}

impl ConvertedRows {
    /// Converts `rows` `[count, depth]` for matrices of a format. None if they are multiplied as they are.
    pub fn new(rows: &[f32], depth: usize, to: RowFormat, format: NumberFormat) -> Option<Self> {
        Some(match to {
            RowFormat::F32 => return None,
            RowFormat::Int8 => Self::Bytes(Reused::filled(&BYTE_ROWS, |to| to.pack(rows, depth, format, 1))),
            RowFormat::Int16 if may_use_vnni() => {
                Self::Bytes(Reused::filled(&BYTE_ROWS, |to| to.pack(rows, depth, format, 2)))
            }
            RowFormat::Int16 => Self::Shorts(Reused::filled(&SHORT_ROWS, |to| to.pack(rows, depth, format))),
            RowFormat::Bf16 if has_amx() => Self::Tiles(Reused::filled(&AMX_ROWS, |to| to.pack(rows, depth))),
            RowFormat::Bf16 => Self::Halves(Reused::filled(&HALF_ROWS, |to| to.pack(rows, depth))),
        })
    }

    /// Writes the product with some panels of a matrix to `out` `[rows, stride]`.
    pub fn multiply(&self, format: NumberFormat, panels: &[u32], out: &mut [f32], stride: usize) {
        match self {
            Self::Bytes(rows) => rows.value.multiply(panels, out, stride),
            Self::Shorts(rows) => rows.value.multiply(panels, out, stride),
            Self::Halves(rows) => rows.value.multiply(panels, out, stride),
            Self::Tiles(rows) if format == NumberFormat::Bf16 => rows.value.multiply(panels, 0, out, stride),
            Self::Tiles(rows) => {
                let (mut columns, mut words) = PANELS.take();
                let count = stride.div_ceil(PANEL);
                for (index, panel) in panels.chunks_exact(panels.len() / count).enumerate() {
                    dispatch(Unpack { format, panel, to: &mut columns });
                    round_panel(&columns, &mut words);
                    rows.value.multiply(&words, index * PANEL, out, stride);
                }
                PANELS.set((columns, words));
            }
        }
    }
}
