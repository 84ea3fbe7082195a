//! Decides which sequence holds which blocks of keys and values. A full block is published: it is found by its tokens
//! and the blocks before it, so that another sequence that begins with the same tokens reuses it instead of computing
//! it (prefix reuse). Published blocks are kept after their sequences have closed. They are evicted when memory is
//! needed, the least recently used first. Only sequences of one owner share blocks. Does not own the keys and values.

use std::collections::{BTreeMap, HashMap};

use sha2::{Digest, Sha256};

use crate::model::ops::kv::BLOCK;

/// Who may share a block: the SHA-256 of the requester's name. The hash has a fixed size, unlike the name, and a block
/// keeps it for as long as it is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner([u8; 32]);

impl Owner {
    /// The owner that a request names by this text.
    pub fn of(text: &str) -> Self {
        Self(Sha256::digest(text).into())
    }
}

/// What precedes a block in its sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Predecessor {
    /// No block: it is the first one of a sequence of this owner.
    Owner(Owner),
    /// The published block with this id.
    Block(BlockId),
}

/// The content of a published block.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Content {
    predecessor: Predecessor,
    tokens: [u32; BLOCK],
}

/// The id of a published block. Unlike its index, it is never used again.
type BlockId = u64;

#[derive(Clone, Debug, Default)]
struct Block {
    /// The number of sequences that hold it.
    holders: usize,
    /// Its id and content, if it can be shared.
    published: Option<(BlockId, Content)>,
    /// When its last holder released it, by [`Blocks::clock`].
    released: u64,
}

/// All blocks.
pub struct Blocks {
    blocks: Vec<Block>,
    /// Blocks without content.
    empty: Vec<u32>,
    published: HashMap<Content, u32>,
    /// Published blocks that no sequence holds, by the time of their release.
    unused: BTreeMap<u64, u32>,
    /// The last id that was assigned.
    last_id: BlockId,
    /// A counter of releases: the time for `released` and `unused`.
    clock: u64,
}

/// The index of a block that the sequence has released, since no token attends to it any more.
const RELEASED: u32 = u32::MAX;

/// The blocks of one sequence.
#[derive(Debug)]
pub struct Table {
    /// The indices of the blocks, in the order of the sequence. `u32::MAX` stands for a block that was released.
    pub blocks: Vec<u32>,
    /// The number of blocks that were released, the first ones.
    released: usize,
    owner: Owner,
    /// The ids of its first blocks, as far as they are published.
    ids: Vec<BlockId>,
}

impl Table {
    /// The empty table of a sequence of this owner.
    pub fn new(owner: Owner) -> Self {
        Self { blocks: Vec::new(), released: 0, owner, ids: Vec::new() }
    }

    fn content(&self, index: usize, tokens: &[u32]) -> Option<Content> {
        let predecessor = match index.checked_sub(1) {
            None => Predecessor::Owner(self.owner),
            Some(last) => Predecessor::Block(*self.ids.get(last)?),
        };
        Some(Content { predecessor, tokens: tokens.get(index * BLOCK..)?.first_chunk().copied()? })
    }
}

impl Blocks {
    /// Makes `count` blocks, all empty.
    pub fn new(count: u32) -> Self {
        Self {
            blocks: vec![Block::default(); count as usize],
            empty: (0..count).rev().collect(),
            published: HashMap::new(),
            unused: BTreeMap::new(),
            last_id: 0,
            clock: 0,
        }
    }

    /// Extends a table by published blocks with the tokens of `prompt`. At least the last token is left to be computed.
    /// All blocks of the table must be full. Returns the number of tokens that the table holds now.
    pub fn reuse(&mut self, table: &mut Table, prompt: &[u32]) -> usize {
        while (table.blocks.len() + 1) * BLOCK < prompt.len()
            && let Some(content) = table.content(table.blocks.len(), prompt)
            && let Some(index) = self.published.get(&content).copied()
        {
            let block = &mut self.blocks[index as usize];
            if block.holders == 0 {
                self.unused.remove(&block.released);
            }
            block.holders += 1;
            table.ids.extend(block.published.as_ref().map(|(id, _)| *id));
            table.blocks.push(index);
        }
        table.blocks.len() * BLOCK
    }

    /// Extends a table to `tokens` tokens. None if there are too few blocks; the table keeps those that it got.
    pub fn grow(&mut self, table: &mut Table, tokens: usize) -> Option<()> {
        while table.blocks.len() * BLOCK < tokens {
            let block = self.empty.pop().or_else(|| self.evict())?;
            self.blocks[block as usize].holders = 1;
            table.blocks.push(block);
        }
        Some(())
    }

    /// Evicts the least recently used block, and returns it empty.
    fn evict(&mut self) -> Option<u32> {
        let (_, block) = self.unused.pop_first()?;
        if let Some((_, content)) = self.blocks[block as usize].published.take() {
            self.published.remove(&content);
        }
        Some(block)
    }

    /// Publishes the full blocks of a table, so that other sequences can reuse them. `tokens` are the sequence's
    /// computed tokens.
    pub fn publish(&mut self, table: &mut Table, tokens: &[u32]) {
        while let Some(content) = table.content(table.ids.len(), tokens) {
            let block = table.blocks[table.ids.len()];
            // Another sequence has computed the same block meanwhile, so this copy is not published. It may have been
            // released since.
            if block == RELEASED || self.published.contains_key(&content) {
                break;
            }
            self.last_id += 1;
            self.published.insert(content.clone(), block);
            self.blocks[block as usize].published = Some((self.last_id, content));
            table.ids.push(self.last_id);
        }
    }

    /// Releases the first `count` blocks of a table. Returns those that are empty now.
    pub fn release_first(&mut self, table: &mut Table, count: usize) -> Vec<u32> {
        let range = table.released..count.max(table.released);
        table.released = range.end;
        let blocks: Vec<u32> =
            table.blocks[range].iter_mut().map(|block| std::mem::replace(block, RELEASED)).collect();
        self.release_all(blocks)
    }

    /// Releases the blocks of a table. Returns those that are empty now.
    pub fn release(&mut self, mut table: Table) -> Vec<u32> {
        self.release_all(table.blocks.split_off(table.released))
    }

    fn release_all(&mut self, blocks: Vec<u32>) -> Vec<u32> {
        let mut emptied = Vec::new();
        // The last block is released first, and so evicted first, since a block is useless without its predecessors.
        for index in blocks.into_iter().rev() {
            let block = &mut self.blocks[index as usize];
            block.holders -= 1;
            if block.holders > 0 {
                continue;
            }
            if block.published.is_some() {
                self.clock += 1;
                block.released = self.clock;
                self.unused.insert(self.clock, index);
            } else {
                self.empty.push(index);
                emptied.push(index);
            }
        }
        emptied
    }

    /// The number of blocks that sequences hold.
    #[cfg(test)]
    fn held(&self) -> usize {
        self.blocks.len() - self.empty.len() - self.unused.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn computed(blocks: &mut Blocks, owner: &str, tokens: &[u32]) -> (Table, usize) {
        let mut table = Table::new(Owner::of(owner));
        let reused = blocks.reuse(&mut table, tokens);
        blocks.grow(&mut table, tokens.len()).unwrap();
        blocks.publish(&mut table, tokens);
        (table, reused)
    }

    fn tokens(seed: u32, count: usize) -> Vec<u32> {
        (0..count as u32).map(|index| index * 7 + seed).collect()
    }

    #[test]
    fn a_common_prefix_is_reused_from_running_and_closed_sequences() {
        let mut blocks = Blocks::new(10);
        let (first, reused) = computed(&mut blocks, "a", &tokens(1, 70));
        assert_eq!(reused, 0);
        let (second, reused) = computed(&mut blocks, "a", &tokens(1, 70));
        assert_eq!((reused, &second.blocks[..2]), (64, &first.blocks[..2]));
        assert_eq!(blocks.held(), 4);
        assert_eq!(blocks.release(first).len(), 1);
        assert_eq!(blocks.release(second).len(), 1);
        assert_eq!(blocks.held(), 0);
        let (third, reused) = computed(&mut blocks, "a", &tokens(1, 64));
        assert_eq!(reused, 32, "the last token is computed");
        blocks.release(third);
    }

    #[test]
    fn another_owner_or_another_prefix_shares_nothing() {
        let mut blocks = Blocks::new(10);
        let (first, _) = computed(&mut blocks, "a", &tokens(1, 70));
        assert_eq!(computed(&mut blocks, "b", &tokens(1, 70)).1, 0);
        let mut other = tokens(1, 70);
        other[0] = 999;
        assert_eq!(computed(&mut blocks, "a", &other).1, 0, "the second block is the same, the first is not");
        blocks.release(first);
    }

    #[test]
    fn the_size_of_a_block_does_not_depend_on_its_owners_name() {
        let long = "s".repeat(1 << 20);
        let mut blocks = Blocks::new(10);
        let (first, _) = computed(&mut blocks, &long, &tokens(1, 70));
        blocks.release(first);
        let kept: Vec<&Predecessor> = blocks.published.keys().map(|content| &content.predecessor).collect();
        assert!(kept.contains(&&Predecessor::Owner(Owner::of(&long))), "{kept:?}");
        assert!(size_of::<Content>() <= size_of::<[u32; BLOCK]>() + 40, "{}", size_of::<Content>());
        assert_eq!(computed(&mut blocks, &long, &tokens(1, 70)).1, 64);
        assert_eq!(computed(&mut blocks, &long[1..], &tokens(1, 70)).1, 0, "it belongs to another owner");
    }

    #[test]
    fn the_least_recently_used_blocks_are_evicted() {
        let mut blocks = Blocks::new(4);
        for seed in [1, 2] {
            let (table, _) = computed(&mut blocks, "a", &tokens(seed, 65));
            blocks.release(table);
        }
        // Each sequence takes three blocks, two of which are full. For the second one, a full block of the first was
        // evicted.
        let (table, reused) = computed(&mut blocks, "a", &tokens(2, 65));
        assert_eq!(reused, 64);
        blocks.release(table);
        let mut table = Table::new(Owner::of("a"));
        assert_eq!(blocks.grow(&mut table, 5 * BLOCK), None, "there are only four");
        assert_eq!(blocks.release(table).len(), 4);
        assert_eq!(computed(&mut blocks, "a", &tokens(2, 65)).1, 0);
    }

    proptest! {
        #[test]
        fn no_block_is_lost_or_shared_by_sequences_that_differ(
            runs in prop::collection::vec((0_u32..3, 1_usize..150, 0_usize..4), 1..60),
        ) {
            let mut blocks = Blocks::new(16);
            let mut running: Vec<(Vec<u32>, Table)> = Vec::new();
            for (seed, count, leaves) in runs {
                let own = tokens(seed, count);
                let mut table = Table::new(Owner::of("a"));
                blocks.reuse(&mut table, &own);
                if blocks.grow(&mut table, count).is_some() {
                    blocks.publish(&mut table, &own);
                    running.push((own, table));
                } else {
                    blocks.release(table);
                }
                for _ in 0..leaves.min(running.len()) {
                    let (_, table) = running.remove(0);
                    blocks.release(table);
                }
                for (own, table) in &running {
                    for (other, others) in &running {
                        for (index, block) in table.blocks.iter().enumerate() {
                            if let Some(at) = others.blocks.iter().position(|other| other == block) {
                                let end = |tokens: &[u32]| tokens[..((index + 1) * BLOCK).min(tokens.len())].to_vec();
                                prop_assert_eq!((at, end(own)), (index, end(other)));
                            }
                        }
                    }
                }
                let distinct: std::collections::BTreeSet<u32> =
                    running.iter().flat_map(|(_, table)| table.blocks.clone()).collect();
                prop_assert_eq!(blocks.held(), distinct.len());
                prop_assert_eq!(blocks.empty.len() + blocks.unused.len() + distinct.len(), 16);
            }
        }
    }
}
