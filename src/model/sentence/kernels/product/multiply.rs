//! Products of matrices that are laid out for them.

use super::super::activation::Activation;
use super::super::dispatch;
use super::layout::{Panels, Rows};
use super::size::{RUN, Tile};
use super::tile::{Multiply, RowByRow, activated};

impl Rows {
    /// `out` `[count, stride]`, of which the first `width` columns ← these rows, from the row `first`
    /// on, times `right`. `first` is the first row of a tile.
    pub fn multiply(&self, first: usize, right: &Panels, out: &mut [f32], stride: usize) {
        let row = self.depth.next_multiple_of(RUN);
        let tiles = &self.tiles[first * row..];
        let wanted = (out.len() / stride).next_multiple_of(Tile::of_this_cpu().rows) * row;
        let tiles = &tiles[..wanted.min(tiles.len())];
        dispatch(Multiply { tiles, right, to: RowByRow { out, stride, width: right.width } });
    }

    /// `to` ← activation(these rows times `right` + `bias`), laid out for the next product. `bias` has
    /// zeros behind its last number, up to a whole run.
    pub fn multiply_activated(&self, right: &Panels, bias: (&[f32], Activation), to: &mut Rows) {
        let rows = self.tiles.len() / self.depth.next_multiple_of(RUN);
        to.depth = right.width;
        to.tiles.set_len(rows * to.depth.next_multiple_of(RUN));
        if !to.depth.is_multiple_of(RUN) {
            // What no panel reaches is read all the same, and what was there may be no number.
            to.tiles.fill(0.0);
        }
        activated(&self.tiles, right, bias, &mut to.tiles);
    }
}
