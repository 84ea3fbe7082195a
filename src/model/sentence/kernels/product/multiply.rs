//! Products of packed matrices.

use super::super::activation::Activation;
use super::super::dispatch;
use super::layout::{Panels, Rows};
use super::size::{RUN, Tile};
use super::tile::{Multiply, RowByRow, activated};

impl Rows {
    /// The first `width` columns of `out` `[count, stride]` ← these rows, from row `first` on, times `right`.
    /// `first` must be the first row of a tile.
    pub fn multiply(&self, first: usize, right: &Panels, out: &mut [f32], stride: usize) {
        let row = self.depth.next_multiple_of(RUN);
        let tiles = &self.tiles[first * row..];
        let wanted = (out.len() / stride).next_multiple_of(Tile::of_this_cpu().rows) * row;
        let tiles = &tiles[..wanted.min(tiles.len())];
        dispatch(Multiply { tiles, right, to: RowByRow { out, stride, width: right.width } });
    }

    /// `to` ← activation(these rows times `right` + `bias`), laid out for the next product. `bias` has zeros
    /// after its last number, up to a whole run.
    pub fn multiply_activated(&self, right: &Panels, bias: (&[f32], Activation), to: &mut Rows) {
        let rows = self.tiles.len() / self.depth.next_multiple_of(RUN);
        to.depth = right.width;
        to.tiles.set_len(rows * to.depth.next_multiple_of(RUN));
        if !to.depth.is_multiple_of(RUN) {
            // The numbers after the depth are read too, and could be NaN otherwise.
            to.tiles.fill(0.0);
        }
        activated(&self.tiles, right, bias, &mut to.tiles);
    }
}
