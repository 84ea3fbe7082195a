//! Launches of `paged_attention.cu`, and the tiles into which the attention of a step is cut. Decides how many queries a
//! thread block computes, by which kernel, and into how many parts their keys are cut: this depends on the sequence alone,
//! so that its results do not depend on the other sequences of the step.

use super::super::causal::{Scoring, Span};
use super::super::kv::BLOCK;
use super::{Argument, ElementType, Launch, MAX_GRID_Y, Pointer, Source, WARP, has_matrix_units};

/// Warps of a thread block.
const WARPS: u32 = 4;
/// The numbers of queries for which there is a kernel.
const MOST_QUERIES: [u32; 3] = [1, 4, 8];
/// The largest number of queries of a thread block.
const MAX_QUERIES: u32 = 8;
/// The same for the kernel for matrix units.
const MAX_QUERIES_BY_MATRICES: u32 = 64;
/// The widths of heads for which there is a kernel for matrix units.
const WIDTHS_BY_MATRICES: [u32; 5] = [64, 80, 96, 128, 256];
/// The width of the widest head for which there is a kernel.
const MAX_WIDTH: u32 = 256;
/// The width of the widest head of which a thread has one group of four columns.
const MAX_WIDTH_OF_ONE_GROUP: u32 = 128;
/// The number of keys from which on they are cut into parts.
const PART_KEYS: u32 = 256;
/// The largest number of thread blocks among which the keys of a span are divided, for each head.
const MAX_PARTS: u32 = 32;

/// The heads of a network whose keys and values lie in blocks.
#[derive(Clone, Copy, Debug)]
pub struct PagedHeads {
    /// Heads of queries.
    pub count: u32,
    /// Heads of keys and values; they divide `count`.
    pub kv_count: u32,
    /// The width of a head.
    pub width: u32,
    /// The type of the numbers of keys and values.
    pub kv_type: ElementType,
}

impl PagedHeads {
    /// Whether the kernels fit these heads.
    pub fn have_kernel(self) -> bool {
        self.width.is_multiple_of(8) && self.width <= MAX_WIDTH && self.count <= MAX_GRID_Y
    }

    /// The number of heads of queries that share a head of keys.
    fn sharing(self) -> u32 {
        self.count / self.kv_count
    }

    /// Whether the kernel for matrix units computes the attention of this many rows of a sequence.
    fn use_matrix_units(self, rows: u32) -> bool {
        let has_kernel = has_matrix_units(self.kv_type) && WIDTHS_BY_MATRICES.contains(&self.width);
        has_kernel && rows > 1 && rows * self.sharing() > MAX_QUERIES
    }
}

/// The memory of keys and values of one layer: `[blocks, heads, width, 32]` numbers each.
#[derive(Clone, Copy, Debug)]
pub struct PagedKv {
    /// The keys.
    pub keys: Pointer,
    /// The values.
    pub values: Pointer,
}

/// Arrays of words that are copied to the device together.
#[derive(Clone, Debug, Default)]
pub struct Words {
    /// All arrays, one after the other.
    pub all: Vec<u32>,
}

impl Words {
    /// Appends an array. Returns the index of its first word.
    pub fn append(&mut self, array: impl IntoIterator<Item = u32>) -> usize {
        let first = self.all.len();
        self.all.extend(array);
        first
    }
}

/// The keys to which the rows of a step attend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// Those up to the row's own whose distance from it is smaller than the window, if there is one.
    Causal {
        /// The window.
        window: Option<usize>,
    },
    /// Those on either side whose distance is smaller than the window. Spans are whole sequences.
    BothWays {
        /// The window.
        window: Option<usize>,
    },
}

impl Keys {
    fn window(self) -> u32 {
        let (Self::Causal { window } | Self::BothWays { window }) = self;
        window.and_then(|window| u32::try_from(window).ok()).unwrap_or(u32::MAX)
    }

    /// The first key of a query, and the key after its last one. The sequence has `end` keys.
    fn of(self, position: u32, end: u32) -> [u32; 2] {
        let window = self.window();
        let last = match self {
            Self::Causal { .. } => position + 1,
            Self::BothWays { .. } => position.saturating_add(window).min(end),
        };
        [(position + 1).saturating_sub(window), last]
    }
}

/// The attention of a step's rows: which thread block computes which queries, over which keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagedTiles {
    keys: Keys,
    /// For each kernel that is used.
    lists: Vec<TileList>,
    /// The index of the first join in the words.
    first_join: usize,
    joins: u32,
    partial_rows: u32,
}

/// Tiles of one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TileList {
    by_matrices: bool,
    /// The index of the first tile in the words.
    first: usize,
    count: u32,
    /// The largest number of rows in a tile.
    rows_at_once: u32,
}

/// A part of the keys of some rows, as the kernel reads it.
struct Tile {
    row: u32,
    rows: u32,
    position: u32,
    end: u32,
    table: u32,
    keys: [u32; 2],
    /// The first row of the partial results, if the keys have several parts.
    partial: Option<u32>,
}

/// A row whose partial results are joined, as the kernel reads it.
struct Join {
    row: u32,
    first_partial: u32,
    /// The number of rows between two partial results.
    distance: u32,
    parts: u32,
}

impl PagedTiles {
    /// Appends the tiles of the rows of `spans` to `words`. `tables` is the index of each span's first block in the words
    /// of all tables.
    pub fn new(words: &mut Words, spans: &[Span<'_>], tables: &[u32], heads: PagedHeads, keys: Keys) -> Self {
        let (mut tiles, mut joins) = ([Vec::new(), Vec::new()], Vec::new());
        let (mut first_row, mut partial_rows, mut rows_at_once) = (0, 0, [1; 2]);
        for (span, table) in spans.iter().zip(tables) {
            let [first, count] = [span.first, span.count].map(|number| number as u32);
            let by_matrices = heads.use_matrix_units(count);
            let max_queries = if by_matrices { MAX_QUERIES_BY_MATRICES } else { MAX_QUERIES };
            let most_rows = (max_queries / heads.sharing()).clamp(1, count.max(1));
            let list = usize::from(by_matrices);
            rows_at_once[list] = most_rows.max(rows_at_once[list]);
            let max_parts = (MAX_PARTS / count.div_ceil(most_rows).max(1)).max(1);
            for skipped in (0..count).step_by(most_rows as usize) {
                let (row, position) = (first_row + skipped, first + skipped);
                let rows = most_rows.min(count - skipped);
                let end = first + count;
                let begin = keys.of(position, end)[0];
                let last = keys.of(position + rows - 1, end)[1];
                let parts = cut([begin, last], max_parts);
                let is_whole = parts.len() == 1;
                let tile = |(part, keys): (u32, &[u32; 2])| Tile {
                    row,
                    rows,
                    position,
                    end,
                    table: *table,
                    keys: *keys,
                    partial: (!is_whole).then_some(partial_rows + part * rows),
                };
                tiles[list].extend((0..).zip(&parts).map(tile));
                if is_whole {
                    continue;
                }
                let parts = parts.len() as u32;
                joins.extend((0..rows).map(|at| Join {
                    row: row + at,
                    first_partial: partial_rows + at,
                    distance: rows,
                    parts,
                }));
                partial_rows += parts * rows;
            }
            first_row += count;
        }
        let tile = |tile: &Tile| {
            let Tile { row, rows, position, end, table, keys: [first, last], partial } = *tile;
            [row, rows, position, end, table, first, last, partial.unwrap_or(u32::MAX)]
        };
        let join = |join: &Join| [join.row, join.first_partial, join.distance, join.parts];
        let list = |(list, rows_at_once): (usize, u32)| TileList {
            by_matrices: list == 1,
            first: words.append(tiles[list].iter().flat_map(tile)),
            count: tiles[list].len() as u32,
            rows_at_once,
        };
        let lists = (0..).zip(rows_at_once).map(list).filter(|list| list.count > 0).collect();
        let first_join = words.append(joins.iter().flat_map(join));
        Self { keys, lists, first_join, joins: joins.len() as u32, partial_rows }
    }

    /// The numbers of the partial results, in f32.
    pub fn partial_numbers(&self, heads: PagedHeads) -> usize {
        self.partial_rows as usize * heads.count as usize * (heads.width as usize + 2)
    }
}

/// Cuts keys into at most `max_parts` parts, at the ends of blocks. Each part but the last has the same number of blocks for
/// each warp.
fn cut([begin, last]: [u32; 2], max_parts: u32) -> Vec<[u32; 2]> {
    let block = BLOCK as u32;
    let first_block = begin / block;
    let blocks = last.div_ceil(block) - first_block;
    let parts = (last - begin).div_ceil(PART_KEYS).clamp(1, max_parts);
    let blocks_of_part = blocks.div_ceil(parts).next_multiple_of(WARPS);
    let part = |first: u32| {
        let end = first_block + first + blocks_of_part;
        [begin.max((first_block + first) * block), last.min(end.saturating_mul(block))]
    };
    (0..blocks).step_by(blocks_of_part as usize).map(part).collect()
}

/// `out` `[rows, heads, width]` ← attention of the rows of `tiles`. `queries` has the shape of `out`, in f32. `partials` has
/// room for [`PagedTiles::partial_numbers`]. `words` is the address of the step's [`Words`], and `tables` that of the
/// tables of blocks.
pub fn attend_blocks(
    (out, out_type): (Pointer, ElementType),
    [partials, queries]: [Pointer; 2],
    kv: PagedKv,
    heads: PagedHeads,
    scoring: Scoring,
    tiles: &PagedTiles,
    [words, tables]: [Pointer; 2],
) -> Vec<Launch> {
    let PagedHeads { count, kv_count, width, .. } = heads;
    // The kernels compute powers of 2, so scores are multiplied by log2(e).
    let log2_e = std::f32::consts::LOG2_E;
    let [scale, cap] = match scoring.soft_cap {
        Some(cap) => [scoring.scale / cap, cap * log2_e],
        None => [scoring.scale * log2_e, 0.0],
    };
    let address = |first_word: usize| Argument::Pointer(words + (first_word * size_of::<u32>()) as Pointer);
    let attend = |list: &TileList| {
        let kv_type = heads.kv_type.name();
        let (kernel, most) = if list.by_matrices {
            (format!("attend_blocks_by_matrices_{kv_type}_{width}"), MAX_QUERIES_BY_MATRICES)
        } else {
            let queries_at_once = heads.sharing().min(MAX_QUERIES) * list.rows_at_once;
            let most = MOST_QUERIES.into_iter().find(|most| *most >= queries_at_once).unwrap_or(MAX_QUERIES);
            let groups_of_columns = if width <= MAX_WIDTH_OF_ONE_GROUP { 1 } else { 2 };
            (format!("attend_blocks_{kv_type}_{most}_{groups_of_columns}"), most)
        };
        let arguments = vec![
            Argument::Pointer(out),
            Argument::Pointer(partials),
            Argument::Pointer(queries),
            Argument::Pointer(kv.keys),
            Argument::Pointer(kv.values),
            address(list.first),
            Argument::Pointer(tables),
            Argument::F32(scale),
            Argument::F32(cap),
            Argument::U32(tiles.keys.window()),
            Argument::U32(u32::from(matches!(tiles.keys, Keys::Causal { .. }))),
            Argument::U32(count),
            Argument::U32(kv_count),
            Argument::U32(width),
            Argument::U32(out_type.code()),
        ];
        let grid = [list.count, kv_count * heads.sharing().div_ceil(most), 1];
        Launch {
            source: Source::PagedAttention,
            kernel,
            grid,
            threads: WARPS * WARP,
            shared_bytes: 0,
            arguments,
        }
    };
    let mut launches: Vec<Launch> = tiles.lists.iter().map(attend).collect();
    if tiles.joins == 0 {
        return launches;
    }
    let join = Launch {
        source: Source::PagedAttention,
        kernel: "join_parts".into(),
        grid: [tiles.joins, count, 1],
        threads: width.next_multiple_of(WARP),
        shared_bytes: 0,
        arguments: vec![
            Argument::Pointer(out),
            Argument::Pointer(partials),
            address(tiles.first_join),
            Argument::U32(count),
            Argument::U32(width),
            Argument::U32(out_type.code()),
        ],
    };
    launches.push(join);
    launches
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: PagedHeads = PagedHeads { count: 8, kv_count: 2, width: 64, kv_type: ElementType::Bf16 };

    /// The tiles and joins of these spans, each with its first position and its count, as the kernel reads them.
    fn planned(spans: &[(usize, usize)], keys: Keys) -> (PagedTiles, Vec<[u32; 8]>, Vec<[u32; 4]>) {
        let spans: Vec<Span<'_>> =
            spans.iter().map(|(first, count)| Span { blocks: &[], first: *first, count: *count }).collect();
        let mut words = Words { all: vec![7; 3] };
        let tables: Vec<u32> = (0..spans.len() as u32).collect();
        let tiles = PagedTiles::new(&mut words, &spans, &tables, HEADS, keys);
        let of_tiles = words.all[tiles.lists[0].first..tiles.first_join].as_chunks().0.to_vec();
        let of_joins = words.all[tiles.first_join..].as_chunks().0.to_vec();
        let count: u32 = tiles.lists.iter().map(|list| list.count).sum();
        assert_eq!((count as usize, tiles.joins as usize), (of_tiles.len(), of_joins.len()));
        (tiles, of_tiles, of_joins)
    }

    #[test]
    fn each_row_gets_each_of_its_keys_once() {
        let spans = [(0, 1), (5000, 1), (40, 7), (0, 300), (90_000, 1)];
        for keys in [
            Keys::Causal { window: None },
            Keys::Causal { window: Some(70) },
            Keys::Causal { window: Some(3000) },
            Keys::BothWays { window: None },
            Keys::BothWays { window: Some(40) },
        ] {
            let (planned, tiles, joins) = planned(&spans, keys);
            let mut partial_rows = vec![0; planned.partial_rows as usize];
            let mut first_row = 0;
            for (table, (first, count)) in spans.into_iter().enumerate() {
                for at in 0..count as u32 {
                    let [begin, end] = keys.of(first as u32 + at, (first + count) as u32);
                    let row = first_row + at;
                    let of_row: Vec<&[u32; 8]> =
                        tiles.iter().filter(|tile| (tile[0]..tile[0] + tile[1]).contains(&row)).collect();
                    assert!(
                        of_row
                            .iter()
                            .all(|tile| tile[4] == table as u32
                                && tile[2] + row - tile[0] == first as u32 + at)
                    );
                    assert!(of_row.windows(2).all(|pair| pair[0][6] == pair[1][5] && pair[0][6] % 32 == 0));
                    assert!(of_row[0][5] <= begin && of_row[of_row.len() - 1][6] >= end);
                    let join = joins.iter().find(|join| join[0] == row);
                    assert_eq!(join.map_or(1, |join| join[3] as usize), of_row.len());
                    for (part, tile) in (0..).zip(of_row) {
                        let partial = join.map(|join| join[1] + part * join[2]);
                        assert_eq!(partial.unwrap_or(u32::MAX), tile[7].saturating_add(row - tile[0]));
                        partial.into_iter().for_each(|partial| partial_rows[partial as usize] += 1);
                    }
                }
                first_row += count as u32;
            }
            assert!(partial_rows.iter().all(|times| *times == 1), "{keys:?}");
        }
    }

    #[test]
    fn the_partial_results_do_not_grow_with_the_context() {
        for context in [10_000, 1_000_000] {
            for count in [1, 7, 500] {
                let (planned, _, _) = planned(&[(context, count)], Keys::Causal { window: None });
                let most = MAX_PARTS * MAX_QUERIES_BY_MATRICES;
                assert!(planned.partial_rows <= most, "{context}, {count}: {}", planned.partial_rows);
            }
        }
    }
}
