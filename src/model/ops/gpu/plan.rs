//! The plan of a batch for the kernels: the tokens' ids and positions, the texts' first rows, and the tiles of
//! attention, in one array that is copied to the device at once. Decides how texts are cut into tiles: into tiles of
//! the largest size, and a remainder. The remainder gets the smallest tile that holds it, so that short texts leave few
//! threads idle. Long texts come first, so that none starts when all others are done.

use super::WARP;

/// The number of queries in the largest tile.
const MAX_TILE: u32 = 64;

/// The plan of one batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// `ids`, `positions`, `starts`, `tiles`, in this order.
    pub words: Vec<u32>,
    /// The tokens of all texts: the number of ids, and of positions.
    pub tokens: usize,
    /// The number of texts. There is one more start, which is `tokens`.
    pub texts: usize,
    /// The groups of tiles of one size, the largest first. In `words` a tile has three numbers.
    pub tiles: Vec<Tiles>,
}

/// Tiles of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// The number of queries in each tile.
    pub size: u32,
    /// The index of the first tile in [`Plan::words`].
    pub first_word: usize,
    /// The number of tiles.
    pub count: u32,
}

impl Plan {
    /// The plan of texts with `lengths` tokens. `positions` are the rows of the tokens `ids` in the table of positions.
    /// `smallest` is the number of queries in the smallest tile; larger tiles have twice and four times as many, up to
    /// 64.
    pub fn new(ids: &[u32], positions: &[u32], lengths: &[usize], smallest: u32) -> Self {
        let mut words = Vec::with_capacity(2 * ids.len() + 4 * lengths.len());
        words.extend(ids);
        words.extend(positions);
        let mut start = 0;
        let mut texts: Vec<[u32; 2]> = Vec::with_capacity(lengths.len());
        for length in lengths {
            words.push(start);
            texts.push([start, *length as u32]);
            start += *length as u32;
        }
        words.push(start);
        texts.sort_by_key(|[_, length]| std::cmp::Reverse(*length));
        let mut tiles = Vec::new();
        let mut size = MAX_TILE;
        while size >= smallest {
            let first_word = words.len();
            for text in &texts {
                words.extend(
                    cut(*text, smallest)
                        .filter(|(tile_size, _)| *tile_size == size)
                        .flat_map(|(_, tile)| tile),
                );
            }
            let count = (words.len() - first_word) / 3;
            if count > 0 {
                tiles.push(Tiles { size, first_word, count: count as u32 });
            }
            size /= 2;
        }
        Self { words, tokens: ids.len(), texts: lengths.len(), tiles }
    }

    /// The index in [`Plan::words`] at which the list of the texts' first rows begins.
    pub fn starts(&self) -> usize {
        2 * self.tokens
    }
}

/// The tiles of one text, each with its size: the text's first row, its length, the tile's first query.
fn cut([start, length]: [u32; 2], smallest: u32) -> impl Iterator<Item = (u32, [u32; 3])> {
    (0..length).step_by(MAX_TILE as usize).map(move |first| {
        let queries = (length - first).min(MAX_TILE);
        (queries.next_power_of_two().max(smallest), [start, length, first])
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
        let positions: Vec<u32> = (0..).take(tokens).collect();
        let plan = Plan::new(&ids, &positions, &lengths, 16);
        assert_eq!((&plan.words[..tokens], &plan.words[tokens..2 * tokens]), (&*ids, &*positions));
        assert_eq!(plan.words[plan.starts()..][..7], [0, 70, 71, 88, 152, 282, 315]);
        let mut seen = vec![0; tokens];
        for tiles in &plan.tiles {
            let of_size = plan.words[tiles.first_word..][..3 * tiles.count as usize].as_chunks::<3>().0;
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
