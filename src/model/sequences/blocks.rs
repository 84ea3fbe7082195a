//! Which sequence holds which blocks of keys and values. Full blocks stay after their sequences, so that a later
//! sequence that begins with the same tokens takes them instead of computing them (prefix reuse); they are
//! given up, the longest unused first, when room is needed. Blocks are shared only within one owner. Owns no
//! numbers.

use std::collections::{BTreeMap, HashMap};

use sha2::{Digest, Sha256};

use crate::model::ops::kv::BLOCK;

/// Who may share a block: the SHA-256 of the requester's text, which a block would keep for as long as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner([u8; 32]);

impl Owner {
    /// The owner that a request names by this text.
    pub fn of(text: &str) -> Self {
        Self(Sha256::digest(text).into())
    }
}

/// Whose block it is, and what precedes it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Before {
    /// Nothing; with the owner.
    Owner(Owner),
    /// The known block with this name.
    Known(u64),
}

/// What a known block holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Content {
    before: Before,
    tokens: [u32; BLOCK],
}

/// A known block's name, which is never used again; not its place.
type Name = u64;

#[derive(Clone, Debug, Default)]
struct Block {
    /// Sequences that hold it.
    holders: usize,
    /// Its name and content, if it can be shared.
    known: Option<(Name, Content)>,
    /// When its last holder left.
    left: u64,
}

/// All blocks.
pub struct Blocks {
    blocks: Vec<Block>,
    /// Blocks that hold nothing.
    empty: Vec<u32>,
    known: HashMap<Content, u32>,
    /// Known blocks that no sequence holds, by the time since when.
    unused: BTreeMap<u64, u32>,
    names: Name,
    clock: u64,
}

/// The blocks of one sequence.
#[derive(Debug)]
pub struct Table {
    /// In order.
    pub blocks: Vec<u32>,
    owner: Owner,
    /// The names of its first blocks; as many as are known.
    names: Vec<Name>,
}

impl Table {
    /// An empty table of a sequence of this owner.
    pub fn new(owner: Owner) -> Self {
        Self { blocks: Vec::new(), owner, names: Vec::new() }
    }

    fn content(&self, index: usize, tokens: &[u32]) -> Option<Content> {
        let before = match index.checked_sub(1) {
            None => Before::Owner(self.owner),
            Some(last) => Before::Known(*self.names.get(last)?),
        };
        Some(Content { before, tokens: tokens.get(index * BLOCK..)?.first_chunk().copied()? })
    }
}

impl Blocks {
    /// So many blocks, all empty.
    pub fn new(count: u32) -> Self {
        Self {
            blocks: vec![Block::default(); count as usize],
            empty: (0..count).rev().collect(),
            known: HashMap::new(),
            unused: BTreeMap::new(),
            names: 0,
            clock: 0,
        }
    }

    /// Takes known blocks that continue a table with `prompt`, whose last token is left to be computed. The table
    /// must end with a full block. Returns the tokens that it holds then.
    pub fn reuse(&mut self, table: &mut Table, prompt: &[u32]) -> usize {
        while (table.blocks.len() + 1) * BLOCK < prompt.len()
            && let Some(content) = table.content(table.blocks.len(), prompt)
            && let Some(block) = self.known.get(&content).copied()
        {
            let held = &mut self.blocks[block as usize];
            if held.holders == 0 {
                self.unused.remove(&held.left);
            }
            held.holders += 1;
            table.names.extend(held.known.as_ref().map(|(name, _)| *name));
            table.blocks.push(block);
        }
        table.blocks.len() * BLOCK
    }

    /// Gives a table room for `tokens` tokens. None: there is none; the table keeps what it has got.
    pub fn grow(&mut self, table: &mut Table, tokens: usize) -> Option<()> {
        while table.blocks.len() * BLOCK < tokens {
            let block = self.empty.pop().or_else(|| self.give_up())?;
            self.blocks[block as usize].holders = 1;
            table.blocks.push(block);
        }
        Some(())
    }

    /// Makes the longest unused block empty.
    fn give_up(&mut self) -> Option<u32> {
        let (_, block) = self.unused.pop_first()?;
        if let Some((_, content)) = self.blocks[block as usize].known.take() {
            self.known.remove(&content);
        }
        Some(block)
    }

    /// Makes the full blocks of a table known; `tokens` are those computed so far.
    pub fn publish(&mut self, table: &mut Table, tokens: &[u32]) {
        while let Some(content) = table.content(table.names.len(), tokens) {
            let block = table.blocks[table.names.len()];
            // Another sequence computed the same meanwhile: this one's own stays unknown.
            if self.known.contains_key(&content) {
                break;
            }
            self.names += 1;
            self.known.insert(content.clone(), block);
            self.blocks[block as usize].known = Some((self.names, content));
            table.names.push(self.names);
        }
    }

    /// Takes a table back. Returns the blocks that hold nothing now.
    pub fn leave(&mut self, table: Table) -> Vec<u32> {
        let mut emptied = Vec::new();
        // The last first: a block is of no use without those before it.
        for block in table.blocks.into_iter().rev() {
            let held = &mut self.blocks[block as usize];
            held.holders -= 1;
            if held.holders > 0 {
                continue;
            }
            if held.known.is_some() {
                self.clock += 1;
                held.left = self.clock;
                self.unused.insert(self.clock, block);
            } else {
                self.empty.push(block);
                emptied.push(block);
            }
        }
        emptied
    }

    /// Blocks that sequences hold.
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
        (0..count as u32).map(|at| at * 7 + seed).collect()
    }

    #[test]
    fn the_same_beginning_is_taken_from_a_running_sequence_and_from_one_that_left() {
        let mut blocks = Blocks::new(10);
        let (first, reused) = computed(&mut blocks, "a", &tokens(1, 70));
        assert_eq!(reused, 0);
        let (second, reused) = computed(&mut blocks, "a", &tokens(1, 70));
        assert_eq!((reused, &second.blocks[..2]), (64, &first.blocks[..2]));
        assert_eq!(blocks.held(), 4);
        assert_eq!(blocks.leave(first).len(), 1);
        assert_eq!(blocks.leave(second).len(), 1);
        assert_eq!(blocks.held(), 0);
        let (third, reused) = computed(&mut blocks, "a", &tokens(1, 64));
        assert_eq!(reused, 32, "the last token is computed");
        blocks.leave(third);
    }

    #[test]
    fn another_owner_or_another_beginning_shares_nothing() {
        let mut blocks = Blocks::new(10);
        let (first, _) = computed(&mut blocks, "a", &tokens(1, 70));
        assert_eq!(computed(&mut blocks, "b", &tokens(1, 70)).1, 0);
        let mut other = tokens(1, 70);
        other[0] = 999;
        assert_eq!(computed(&mut blocks, "a", &other).1, 0, "the second block is the same, the first is not");
        blocks.leave(first);
    }

    #[test]
    fn a_block_is_as_large_for_an_owner_of_any_length() {
        let long = "s".repeat(1 << 20);
        let mut blocks = Blocks::new(10);
        let (first, _) = computed(&mut blocks, &long, &tokens(1, 70));
        blocks.leave(first);
        let kept: Vec<&Before> = blocks.known.keys().map(|content| &content.before).collect();
        assert!(kept.contains(&&Before::Owner(Owner::of(&long))), "{kept:?}");
        assert!(size_of::<Content>() <= size_of::<[u32; BLOCK]>() + 40, "{}", size_of::<Content>());
        assert_eq!(computed(&mut blocks, &long, &tokens(1, 70)).1, 64);
        assert_eq!(computed(&mut blocks, &long[1..], &tokens(1, 70)).1, 0, "another one's");
    }

    #[test]
    fn what_is_longest_unused_makes_room() {
        let mut blocks = Blocks::new(4);
        for seed in [1, 2] {
            let (table, _) = computed(&mut blocks, "a", &tokens(seed, 65));
            blocks.leave(table);
        }
        // Three blocks each: two of the first were given up, its first block among them.
        let (table, reused) = computed(&mut blocks, "a", &tokens(2, 65));
        assert_eq!(reused, 64);
        blocks.leave(table);
        let mut table = Table::new(Owner::of("a"));
        assert_eq!(blocks.grow(&mut table, 5 * BLOCK), None, "there are four");
        assert_eq!(blocks.leave(table).len(), 4);
        assert_eq!(computed(&mut blocks, "a", &tokens(2, 65)).1, 0);
    }

    proptest! {
        #[test]
        fn no_block_is_lost_or_held_by_two_that_differ(
            works in prop::collection::vec((0_u32..3, 1_usize..150, 0_usize..4), 1..60),
        ) {
            let mut blocks = Blocks::new(16);
            let mut running: Vec<(Vec<u32>, Table)> = Vec::new();
            for (seed, count, leaves) in works {
                let own = tokens(seed, count);
                let mut table = Table::new(Owner::of("a"));
                blocks.reuse(&mut table, &own);
                if blocks.grow(&mut table, count).is_some() {
                    blocks.publish(&mut table, &own);
                    running.push((own, table));
                } else {
                    blocks.leave(table);
                }
                for _ in 0..leaves.min(running.len()) {
                    let (_, table) = running.remove(0);
                    blocks.leave(table);
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
