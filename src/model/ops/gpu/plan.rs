//! The plan of a batch for the kernels: the tokens' ids and positions, the texts' first rows, and the tiles of
//! attention, in one array that is copied to the device at once. Decides how texts are cut into tiles: into the largest
//! ones, and a rest. The rest gets the smallest tile that holds it, so that short texts leave few threads idle. Long
//! texts come first, so that none starts when all others are done.

use super::WARP;

/// The queries of the largest tile.
const MAX_TILE: u32 = 64;

/// The plan of one batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// `ids`, `places`, `starts`, `tiles`, in this order.
    pub words: Vec<u32>,
    /// The tokens of all texts: the number of ids, and of places.
    pub tokens: usize,
    /// The number of texts. There is one more start, which is `tokens`.
    pub texts: usize,
    /// The groups of tiles of one size, the largest first. In `words` a tile has three numbers.
    pub tiles: Vec<Tiles>,
}

/// Tiles of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// The queries of each tile.
    pub size: u32,
    /// The index of the first tile in [`Plan::words`].
    pub at: usize,
    /// The number of tiles.
    pub count: u32,
}

impl Plan {
    /// The plan of texts with `lengths` tokens. `places` are the rows of the tokens `ids` in the table of positions.
    /// `smallest` is the number of queries in the smallest tile; larger tiles have twice and four times as many, up to
    /// 64.
    pub fn new(ids: &[u32], places: &[u32], lengths: &[usize], smallest: u32) -> Self {
        let mut words = Vec::with_capacity(2 * ids.len() + 4 * lengths.len());
        words.extend(ids);
        words.extend(places);
        let mut next = 0;
        let mut texts: Vec<[u32; 2]> = Vec::with_capacity(lengths.len());
        for length in lengths {
            words.push(next);
            texts.push([next, *length as u32]);
            next += *length as u32;
        }
        words.push(next);
        texts.sort_by_key(|[_, length]| std::cmp::Reverse(*length));
        let mut tiles = Vec::new();
        let mut size = MAX_TILE;
        while size >= smallest {
            let at = words.len();
            for text in &texts {
                words.extend(cuts(*text, smallest).filter(|cut| cut.0 == size).flat_map(|cut| cut.1));
            }
            let count = (words.len() - at) / 3;
            if count > 0 {
                tiles.push(Tiles { size, at, count: count as u32 });
            }
            size /= 2;
        }
        Self { words, tokens: ids.len(), texts: lengths.len(), tiles }
    }

    /// Returns the index in [`Plan::words`] at which the list of the texts' first rows begins.
    pub fn starts(&self) -> usize {
        2 * self.tokens
    }
}

/// The tiles of one text, each with its size: the text's first row, its length, the tile's first query.
fn cuts([start, length]: [u32; 2], smallest: u32) -> impl Iterator<Item = (u32, [u32; 3])> {
    (0..length).step_by(MAX_TILE as usize).map(move |first| {
        let left = (length - first).min(MAX_TILE);
        (left.next_power_of_two().max(smallest), [start, length, first])
    })
}

impl Tiles {
    /// Threads of a block in which each warp computes `queries` queries.
    pub(super) fn threads(self, queries: u32) -> u32 {
        self.size.div_ceil(queries) * WARP
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_one_array_whose_tiles_cover_every_query_once() {
        let lengths = [70, 1, 17, 64, 130, 33];
        let tokens = lengths.iter().sum::<usize>();
        let ids: Vec<u32> = (100..).take(tokens).collect();
        let places: Vec<u32> = (0..).take(tokens).collect();
        let plan = Plan::new(&ids, &places, &lengths, 16);
        assert_eq!((&plan.words[..tokens], &plan.words[tokens..2 * tokens]), (&*ids, &*places));
        assert_eq!(plan.words[plan.starts()..][..7], [0, 70, 71, 88, 152, 282, 315]);
        let mut seen = vec![0; tokens];
        for tiles in &plan.tiles {
            let of_size = plan.words[tiles.at..][..3 * tiles.count as usize].as_chunks::<3>().0;
            assert!(of_size.is_sorted_by_key(|tile| std::cmp::Reverse(tile[1])), "long texts first");
            for [start, length, first] in of_size {
                let is_full = length - first > tiles.size / 2 || tiles.size == 16;
                assert!(is_full, "{} queries in {tiles:?}", length - first);
                (*first..*length.min(&(first + tiles.size)))
                    .for_each(|query| seen[(start + query) as usize] += 1);
            }
        }
        assert!(seen.iter().all(|times| *times == 1), "{seen:?}");
    }
}
