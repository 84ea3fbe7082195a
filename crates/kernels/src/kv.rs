//! The keys and values of sequences' tokens, in blocks of memory that sequences hold by a table of block numbers.
//! Owns the memory, which the system gives page by page when it is written for the first time. Knows no
//! sequence: which block is whose is the caller's matter.

use std::io;

use memmap2::{MmapMut, UncheckedAdvice};
use pulp::bytemuck;

/// Tokens of a block.
pub const BLOCK: usize = 32;
/// Keys that lie side by side.
pub const KEYS: usize = 16;

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvNumbers {
    /// 32 bits.
    F32,
    /// The upper half of an f32, rounded to the nearest.
    Bf16,
}

/// What each token has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers.
    pub layers: usize,
    /// Heads of keys and values.
    pub heads: usize,
    /// Numbers of a head; even.
    pub width: usize,
    /// How they are kept.
    pub numbers: KvNumbers,
}

impl KvShape {
    /// The width of a value in memory: full cache lines of f32.
    pub fn stride(&self) -> usize {
        self.width.next_multiple_of(16)
    }

    /// Words of 32 bits for the keys of one layer and head of a block.
    fn key_words(&self) -> usize {
        self.words(BLOCK * self.width)
    }

    /// The same for keys and values.
    fn head_words(&self) -> usize {
        self.key_words() + self.words(BLOCK * self.stride())
    }

    fn words(&self, numbers: usize) -> usize {
        match self.numbers {
            KvNumbers::F32 => numbers,
            KvNumbers::Bf16 => numbers / 2,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.layers * self.heads * self.head_words() * 4
    }
}

/// Blocks of memory for keys and values.
pub struct KvBlocks {
    shape: KvShape,
    memory: MmapMut,
}

/// The keys and values of one layer and head of a block, two numbers after each other or in one word.
#[derive(Clone, Copy)]
pub struct Held<'a> {
    /// `[BLOCK / KEYS, width, KEYS]`.
    pub keys: &'a [u32],
    /// `[BLOCK, stride]`.
    pub values: &'a [u32],
}

/// Where a token's keys and values are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldAt {
    /// The block.
    pub block: u32,
    /// The token's index in the block, below [`BLOCK`].
    pub offset: usize,
}

impl KvBlocks {
    /// Memory for so many blocks. None of it is used yet.
    ///
    /// # Errors
    /// The system has not so much address space.
    pub fn new(shape: KvShape, blocks: usize) -> io::Result<Self> {
        let bytes = blocks.max(1).saturating_mul(shape.block_bytes());
        Ok(Self { shape, memory: MmapMut::map_anon(bytes)? })
    }

    /// What each token has.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Gives a block's memory back to the system.
    #[expect(unsafe_code, reason = "the system forgets what the pages hold; no safe interface has it")]
    pub fn release(&mut self, block: u32) {
        let bytes = self.shape.block_bytes();
        // SAFETY: the map is private and anonymous, so its pages become zeros, which are numbers. Where it
        // fails, the memory stays with this process.
        let _ = unsafe {
            self.memory.unchecked_advise_range(UncheckedAdvice::DontNeed, block as usize * bytes, bytes)
        };
    }

    /// One layer and head of a block.
    pub fn held(&self, block: u32, layer: usize, head: usize) -> Held<'_> {
        let (start, words) = self.place(block, layer, head);
        let words: &[u32] = bytemuck::cast_slice(&self.memory[start * 4..(start + words) * 4]);
        let (keys, values) = words.split_at(self.shape.key_words());
        Held { keys, values }
    }

    fn place(&self, block: u32, layer: usize, head: usize) -> (usize, usize) {
        let words = self.shape.head_words();
        (((block as usize * self.shape.layers) + layer) * self.shape.heads * words + head * words, words)
    }

    /// Writes the key and the value of a token. Tokens of a block are written in order.
    pub fn put(&mut self, at: HeldAt, layer: usize, head: usize, key: &[f32], value: &[f32]) {
        let KvShape { width, numbers, .. } = self.shape;
        let stride = self.shape.stride();
        let place = at.offset;
        let (start, words) = self.place(at.block, layer, head);
        let words: &mut [u32] = bytemuck::cast_slice_mut(&mut self.memory[start * 4..(start + words) * 4]);
        let (keys, values) = words.split_at_mut(self.shape.key_words());
        match numbers {
            KvNumbers::F32 => {
                let lanes = keys[place / KEYS * width * KEYS..].iter_mut().skip(place % KEYS).step_by(KEYS);
                lanes.zip(key).for_each(|(to, x)| *to = x.to_bits());
                let values = &mut values[place * stride..];
                values.iter_mut().zip(value).for_each(|(to, x)| *to = x.to_bits());
                if place.is_multiple_of(2) {
                    // The kernel reads values in twos, and multiplies the second by 0 if it is not there yet.
                    values[stride..2 * stride].fill(0);
                }
            }
            KvNumbers::Bf16 => {
                let lanes =
                    keys[place / KEYS * width / 2 * KEYS..].iter_mut().skip(place % KEYS).step_by(KEYS);
                lanes.zip(key.as_chunks::<2>().0).for_each(|(to, [a, b])| *to = upper(*a) | upper(*b) >> 16);
                let values = values[place / 2 * stride..].iter_mut().zip(value);
                if place.is_multiple_of(2) {
                    values.for_each(|(to, x)| *to = upper(*x));
                } else {
                    values.for_each(|(to, x)| *to |= upper(*x) >> 16);
                }
            }
        }
    }
}

/// The upper half of an f32, rounded to the nearest; the lower half is 0.
pub fn upper(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() {
        (bits | 0x0040_0000) & 0xffff_0000
    } else {
        (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_keep_their_places_and_a_released_block_is_empty() {
        for numbers in [KvNumbers::F32, KvNumbers::Bf16] {
            let shape = KvShape { layers: 2, heads: 3, width: 4, numbers };
            let mut blocks = KvBlocks::new(shape, 3).unwrap();
            for place in 0..5 {
                let x = place as f32;
                blocks.put(
                    HeldAt { block: 1, offset: place },
                    1,
                    2,
                    &[x, 10.0 + x, 20.0 + x, 30.0 + x],
                    &[x, 1.0, 2.0, 3.0],
                );
            }
            let Held { keys, values } = blocks.held(1, 1, 2);
            let number = |word: u32, half: usize| match numbers {
                KvNumbers::F32 => f32::from_bits(word),
                KvNumbers::Bf16 => f32::from_bits(word << (16 * half) & 0xffff_0000),
            };
            let two = if numbers == KvNumbers::F32 { 2 } else { 1 };
            assert_eq!((number(keys[3], 0), number(keys[two * KEYS + 3], 0)), (3.0, 23.0));
            assert_eq!(number(values[2 * two * 16], 0), 4.0);
            assert!(
                blocks.held(1, 1, 1).keys.iter().chain(blocks.held(0, 1, 2).values).all(|word| *word == 0)
            );
            blocks.release(1);
            assert!(blocks.held(1, 1, 2).values.iter().all(|word| *word == 0));
        }
    }
}
