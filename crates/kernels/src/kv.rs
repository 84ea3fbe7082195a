//! The paged cache of keys and values: blocks of memory, which a sequence refers to by a table of block numbers. Owns
//! the memory, which the system provides page by page when it is written for the first time. The caller decides which
//! block belongs to which sequence.

use std::io;
use std::ops::Range;

use memmap2::{MmapMut, UncheckedAdvice};
use pulp::bytemuck;

use super::gemm::in_parallel;

/// Tokens in a block.
pub const BLOCK: usize = 32;
/// Keys in a group, one in each lane: the keys of this many consecutive tokens are interleaved, number by number.
pub const KEY_LANES: usize = 16;

/// A multiple of the size of a page in bytes. Other CPUs than x86-64 may have pages of up to 64 KiB.
const PAGE: usize = if cfg!(target_arch = "x86_64") { 4 << 10 } else { 64 << 10 };

/// The number format of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvNumbers {
    /// 32 bits.
    F32,
    /// The upper half of an f32, rounded to the nearest.
    Bf16,
}

/// The shape of the keys and values of one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers.
    pub layers: usize,
    /// Heads of keys and values.
    pub heads: usize,
    /// Numbers in a head; even.
    pub width: usize,
    /// The number format of keys and values.
    pub numbers: KvNumbers,
}

impl KvShape {
    /// The distance between two values in memory, in words of 32 bits: the width, rounded up to a multiple of 16, so
    /// that each value begins at a cache line. In bf16 the values of two tokens share these words.
    pub fn stride(&self) -> usize {
        self.width.next_multiple_of(16)
    }

    /// Words of 32 bits for the keys of one layer and head of a block.
    fn key_words(&self) -> usize {
        self.words(BLOCK * self.width)
    }

    /// Words of 32 bits for the values of one layer and head of a block.
    fn value_words(&self) -> usize {
        self.words(BLOCK * self.stride())
    }

    /// Words of 32 bits for this many numbers.
    fn words(&self, numbers: usize) -> usize {
        match self.numbers {
            KvNumbers::F32 => numbers,
            KvNumbers::Bf16 => numbers / 2,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.layers * self.heads * (self.key_words() + self.value_words()) * 4
    }
}

/// The blocks of memory for keys and values: `[groups, layers, heads]`, and for each of them first the keys of all blocks
/// of the group, then their values. So the keys of a long sequence follow each other in memory if its blocks are a
/// group: reading them from memory is then about twice as fast.
pub struct KvBlocks {
    shape: KvShape,
    /// The blocks of a group. A group's blocks have consecutive numbers.
    group_blocks: usize,
    memory: MmapMut,
}

/// The keys and values of one layer and head of a block, in words of 32 bits. A word holds one f32, or two bf16, the
/// first in the upper half.
#[derive(Clone, Copy)]
pub struct HeadBlock<'a> {
    /// For f32 the shape is `[BLOCK / KEY_LANES, width, KEY_LANES]`. For bf16 it is
    /// `[BLOCK / KEY_LANES, width / 2, KEY_LANES]`, and a word holds two consecutive numbers of a key.
    pub keys: &'a [u32],
    /// For f32 the shape is `[BLOCK, stride]`. For bf16 it is `[BLOCK / 2, stride]`, and a word holds the same number
    /// of the values of two consecutive tokens.
    pub values: &'a [u32],
}

/// The position of a token's keys and values in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachePosition {
    /// The number of the block.
    pub block: u32,
    /// The token's index in the block, below [`BLOCK`].
    pub offset: usize,
}

impl KvBlocks {
    /// Reserves address space for this many blocks, each a group of its own. No memory is used yet.
    ///
    /// # Errors
    /// The system has not enough address space.
    pub fn new(shape: KvShape, blocks: usize) -> io::Result<Self> {
        Self::with_groups(shape, blocks, 1)
    }

    /// As [`new`](Self::new), for groups of this many blocks.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_groups(shape: KvShape, groups: usize, group_blocks: usize) -> io::Result<Self> {
        let bytes = groups.max(1).saturating_mul(group_blocks).saturating_mul(shape.block_bytes());
        Ok(Self { shape, group_blocks, memory: MmapMut::map_anon(bytes)? })
    }

    /// Asks the system for pages of 2 MiB. Fewer of a group's addresses have to be translated then, but its first number
    /// takes such a page of each layer and head. For groups that are always filled.
    pub fn use_large_pages(&self) {
        // Without large pages, reading is slower, and nothing else changes.
        let _ = self.memory.advise(memmap2::Advice::HugePage);
    }

    /// The shape of the keys and values of one token.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Returns the memory of a group to the system, except for pages that it shares with other groups.
    #[expect(unsafe_code, reason = "no safe interface exists for discarding the contents of pages")]
    pub fn release(&mut self, group: usize) {
        let bytes = self.group_blocks * self.shape.block_bytes();
        // The system discards whole pages, and would discard what is beside the group.
        let start = (group * bytes).next_multiple_of(PAGE);
        let end = (group + 1) * bytes / PAGE * PAGE;
        if start >= end {
            return;
        }
        // SAFETY: the map is private and anonymous, so its pages become zeros, which are valid numbers. No other group has
        // numbers in them. If the call fails, the process keeps the memory.
        let _ = unsafe { self.memory.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) };
    }

    /// The keys and values of one layer and head of a block.
    pub fn head_block(&self, block: u32, layer: usize, head: usize) -> HeadBlock<'_> {
        let [keys, values] = self.ranges(block, layer, head);
        let words: &[u32] = bytemuck::cast_slice(&self.memory);
        HeadBlock { keys: &words[keys], values: &words[values] }
    }

    /// The words of a block's keys and of its values.
    fn ranges(&self, block: u32, layer: usize, head: usize) -> [Range<usize>; 2] {
        let KvShape { layers, heads, .. } = self.shape;
        let (key_words, value_words) = (self.shape.key_words(), self.shape.value_words());
        let (group, index) = (block as usize / self.group_blocks, block as usize % self.group_blocks);
        let start = ((group * layers + layer) * heads + head) * self.group_blocks * (key_words + value_words);
        let keys = start + index * key_words;
        let values = start + self.group_blocks * key_words + index * value_words;
        [keys..keys + key_words, values..values + value_words]
    }

    /// Writes the key and the value of a token. The tokens of a block must be written in order, because writing one
    /// with an even index discards the value of the one after it.
    pub fn put(&mut self, position: CachePosition, layer: usize, head: usize, key: &[f32], value: &[f32]) {
        let shape = self.shape;
        let [keys, values] = self.ranges(position.block, layer, head);
        let words: &mut [u32] = bytemuck::cast_slice_mut(&mut self.memory);
        let (before, words) = words.split_at_mut(values.start);
        shape.put(position.offset, (key, value), &mut before[keys], &mut words[..values.len()]);
    }

    /// Writes the keys and values of a group's first tokens for one layer, each `[tokens, heads·width]`. In parallel if
    /// there are several threads.
    pub fn put_group(&mut self, group: usize, layer: usize, keys: &[f32], values: &[f32]) {
        let (shape, group_blocks) = (self.shape, self.group_blocks);
        let KvShape { layers, heads, width, .. } = shape;
        let (key_words, value_words) = (shape.key_words(), shape.value_words());
        let head_words = group_blocks * (key_words + value_words);
        let words: &mut [u32] = bytemuck::cast_slice_mut(&mut self.memory);
        let words = &mut words[(group * layers + layer) * heads * head_words..][..heads * head_words];
        in_parallel(words.chunks_exact_mut(head_words).enumerate(), |(head, words)| {
            let rows = keys.chunks_exact(heads * width).zip(values.chunks_exact(heads * width));
            let (key_blocks, value_blocks) = words.split_at_mut(group_blocks * key_words);
            for (token, (key, value)) in rows.enumerate() {
                let (block, offset) = (token / BLOCK, token % BLOCK);
                let of_head = head * width..(head + 1) * width;
                let keys = &mut key_blocks[block * key_words..][..key_words];
                let values = &mut value_blocks[block * value_words..][..value_words];
                shape.put(offset, (&key[of_head.clone()], &value[of_head]), keys, values);
            }
        });
    }
}

impl KvShape {
    /// Writes the key and the value of a token to the keys and values of a block, for one layer and head.
    fn put(&self, offset: usize, (key, value): (&[f32], &[f32]), keys: &mut [u32], values: &mut [u32]) {
        let stride = self.stride();
        let (group, lane) = (offset / KEY_LANES, offset % KEY_LANES);
        let key_words =
            keys[group * self.words(self.width * KEY_LANES)..].iter_mut().skip(lane).step_by(KEY_LANES);
        match self.numbers {
            KvNumbers::F32 => {
                key_words.zip(key).for_each(|(to, x)| *to = x.to_bits());
                let values = &mut values[offset * stride..];
                values.iter_mut().zip(value).for_each(|(to, x)| *to = x.to_bits());
                if offset.is_multiple_of(2) {
                    // The kernel reads the values of two tokens at a time, and multiplies the second by 0 if it is not
                    // written yet. So it must not be NaN.
                    values[stride..2 * stride].fill(0);
                }
            }
            KvNumbers::Bf16 => {
                key_words
                    .zip(key.as_chunks::<2>().0)
                    .for_each(|(to, [a, b])| *to = bf16_bits(*a) | bf16_bits(*b) >> 16);
                let values = values[offset / 2 * stride..].iter_mut().zip(value);
                if offset.is_multiple_of(2) {
                    values.for_each(|(to, x)| *to = bf16_bits(*x));
                } else {
                    values.for_each(|(to, x)| *to |= bf16_bits(*x) >> 16);
                }
            }
        }
    }
}

/// An f32 rounded to the nearest bf16, as the bits of an f32: the lower half is 0.
pub fn bf16_bits(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() {
        (bits | 0x0040_0000) & 0xffff_0000
    } else {
        (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::noise;
    use super::*;

    #[test]
    fn a_released_block_leaves_its_neighbours_as_they_are() {
        // A block takes 4,608 bytes, and so shares its pages with others.
        let shape = KvShape { layers: 1, heads: 1, width: 20, numbers: KvNumbers::F32 };
        let mut blocks = KvBlocks::new(shape, 40).unwrap();
        let (key, value) = (vec![1.0; 20], vec![2.0; 20]);
        for block in 0..40 {
            (0..BLOCK).for_each(|offset| blocks.put(CachePosition { block, offset }, 0, 0, &key, &value));
        }
        let words = |blocks: &KvBlocks, block: u32| {
            let HeadBlock { keys, values } = blocks.head_block(block, 0, 0);
            [keys, values].concat()
        };
        let whole = words(&blocks, 0);
        (1..39).step_by(2).for_each(|block| blocks.release(block));
        (0..40).step_by(2).for_each(|block| assert_eq!(words(&blocks, block), whole, "{block}"));
        // This one takes 128 KiB: whole pages, of which nothing is left.
        let shape = KvShape { layers: 8, heads: 1, width: 64, numbers: KvNumbers::F32 };
        let mut blocks = KvBlocks::new(shape, 3).unwrap();
        let (key, value) = (vec![1.0; 64], vec![2.0; 64]);
        blocks.put(CachePosition { block: 1, offset: 0 }, 7, 0, &key, &value);
        blocks.release(1);
        assert!(blocks.head_block(1, 7, 0).values.iter().all(|word| *word == 0));
    }

    #[test]
    fn tokens_are_stored_at_their_places() {
        for numbers in [KvNumbers::F32, KvNumbers::Bf16] {
            let shape = KvShape { layers: 2, heads: 3, width: 4, numbers };
            let mut blocks = KvBlocks::new(shape, 3).unwrap();
            for offset in 0..5 {
                let x = offset as f32;
                blocks.put(
                    CachePosition { block: 1, offset },
                    1,
                    2,
                    &[x, 10.0 + x, 20.0 + x, 30.0 + x],
                    &[x, 1.0, 2.0, 3.0],
                );
            }
            let HeadBlock { keys, values } = blocks.head_block(1, 1, 2);
            let number = |word: u32, half: usize| match numbers {
                KvNumbers::F32 => f32::from_bits(word),
                KvNumbers::Bf16 => f32::from_bits(word << (16 * half) & 0xffff_0000),
            };
            // The words that two numbers of a key take.
            let two = if numbers == KvNumbers::F32 { 2 } else { 1 };
            assert_eq!((number(keys[3], 0), number(keys[two * KEY_LANES + 3], 0)), (3.0, 23.0));
            assert_eq!(number(values[2 * two * 16], 0), 4.0);
            assert!(
                blocks
                    .head_block(1, 1, 1)
                    .keys
                    .iter()
                    .chain(blocks.head_block(0, 1, 2).values)
                    .all(|word| *word == 0)
            );
        }
    }

    #[test]
    fn a_group_that_is_written_at_once_has_the_same_words() {
        for numbers in [KvNumbers::F32, KvNumbers::Bf16] {
            let shape = KvShape { layers: 2, heads: 3, width: 18, numbers };
            let new = || KvBlocks::with_groups(shape, 2, 3).unwrap();
            let (mut one_by_one, mut at_once) = (new(), new());
            let tokens = 2 * BLOCK + 5;
            let (keys, values) = (noise(&[tokens, 3 * 18], 1.0, 1), noise(&[tokens, 3 * 18], 1.0, 2));
            at_once.put_group(1, 1, &keys, &values);
            let rows = keys.chunks_exact(18).zip(values.chunks_exact(18));
            for (index, (key, value)) in rows.enumerate() {
                let (token, head) = (index / 3, index % 3);
                let position = CachePosition { block: (3 + token / BLOCK) as u32, offset: token % BLOCK };
                one_by_one.put(position, 1, head, key, value);
            }
            assert!(one_by_one.memory[..] == at_once.memory[..], "{numbers:?}");
        }
    }

    #[test]
    fn the_keys_of_a_group_follow_each_other_and_a_group_is_released_alone() {
        let shape = KvShape { layers: 2, heads: 2, width: 16, numbers: KvNumbers::F32 };
        let mut blocks = KvBlocks::with_groups(shape, 2, 3).unwrap();
        blocks.use_large_pages();
        let heads = (0..6).flat_map(|block| (0..4).map(move |head| (block, head / 2, head % 2)));
        for (block, layer, head) in heads.clone() {
            let number = (block as usize * 4 + layer * 2 + head) as f32;
            for offset in 0..BLOCK {
                blocks.put(CachePosition { block, offset }, layer, head, &[number; 16], &[-number; 16]);
            }
        }
        let check = |blocks: &KvBlocks, kept: Range<u32>| {
            for (block, layer, head) in heads.clone() {
                let number = (block as usize * 4 + layer * 2 + head) as f32;
                let expected = if kept.contains(&block) { number } else { 0.0 };
                let HeadBlock { keys, values } = blocks.head_block(block, layer, head);
                assert!(keys.iter().all(|word| f32::from_bits(*word) == expected), "{block} {layer} {head}");
                assert!(
                    values.iter().all(|word| f32::from_bits(*word) == -expected),
                    "{block} {layer} {head}"
                );
            }
        };
        check(&blocks, 0..6);
        let keys = |block| blocks.head_block(block, 1, 1).keys.as_ptr_range();
        assert_eq!((keys(3).end, keys(4).end), (keys(4).start, keys(5).start));
        blocks.release(0);
        check(&blocks, 3..6);
    }
}
