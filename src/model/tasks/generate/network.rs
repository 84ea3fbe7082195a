//! The sequences of a decoder: the tokens that each was fed, its blocks, its sampler and its text. Decides when an
//! answer ends. A step changes a sequence only when its result is known (`Generate::step`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::model::load::vocabulary::TokenTexts;
use crate::model::nets::decoder::WithBlocks;
use crate::model::ops::causal::Span;
use crate::model::ops::kv::BLOCK;
use crate::model::random::Seed;
use crate::model::sequences::blocks::{Blocks, Owner, Table};
use crate::model::sequences::grammar::{Constraint, Masks};
use crate::model::sequences::sampler::{Sampler, log_probabilities};
use crate::model::sequences::text::Text;
use crate::model::{Advance, Advances, Capacity, Feed, ForwardError, Generate, Row, Slot, TaskError};
use crate::protocol::generate::{Finish, Sampling, TokenScore};

/// One answer to compute.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Tokens; at least one, all in the vocabulary.
    pub ids: Arc<[u32]>,
    /// The most tokens of the answer.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// The seed of the random choices.
    pub seed: Seed,
    /// Strings before which the answer ends; shared by all answers of a task.
    pub stop: Arc<[String]>,
    /// Whether the answer goes on after the model's end token. A grammar overrides this.
    pub ignore_eos: bool,
    /// How many of the likeliest tokens are listed beside each chosen one. With `None`, not even the chosen ones are
    /// listed.
    pub logprobs: Option<usize>,
    /// The grammar that the text must match.
    pub constraint: Option<Constraint>,
    /// The owner of the prompt: only prompts of one owner share computed prefixes.
    pub owner: Owner,
}

/// What a step adds to an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// Text that can be sent now.
    pub text: String,
    /// The token's probability, if it was requested.
    pub score: Option<TokenScore>,
    /// Why the answer ends with this piece, and the tokens of the prompt that were reused.
    pub end: Option<(Finish, usize)>,
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
    /// Its tokens, the model's end token included.
    pub tokens: usize,
    /// Tokens of the prompt that were reused instead of computed.
    pub cached: usize,
    /// The tokens' probabilities, if they were requested.
    pub scores: Option<Vec<TokenScore>>,
}

/// A decoder with its sequences.
pub struct TextGenerator {
    decoder: WithBlocks,
    blocks: Blocks,
    capacity: Capacity,
    texts: TokenTexts,
    ends: BTreeSet<u32>,
    open: BTreeMap<Slot, Sequence>,
    /// Reused by the next step.
    logits: Vec<f32>,
}

struct Sequence {
    prompt: Prompt,
    /// Tokens of the prompt that the scheduler has fed, including those that were reused.
    fed: usize,
    /// Tokens whose keys and values are in the blocks.
    held: usize,
    /// Tokens of the prompt that were reused.
    cached: usize,
    table: Table,
    /// The answer's tokens so far.
    answer: Vec<u32>,
    sampler: Sampler,
    masks: Option<Masks>,
    text: Text,
    scores: Vec<TokenScore>,
}

/// The tokens that a row computes in a step.
struct Chunk {
    slot: Slot,
    /// Tokens of the prompt by which `Sequence::fed` advances.
    take: usize,
    ids: Vec<u32>,
    /// The position of the first token in the sequence.
    first: usize,
    /// Whether a next token is chosen after this chunk.
    is_last: bool,
}

/// The next token of an answer, with its probability if it was requested.
struct Chosen {
    id: u32,
    score: Option<TokenScore>,
}

impl TextGenerator {
    /// A generator that has computed nothing. The decoder has [`TextGenerator::blocks`] blocks.
    pub fn new(decoder: WithBlocks, capacity: Capacity, texts: TokenTexts, ends: BTreeSet<u32>) -> Self {
        let blocks = Blocks::new(Self::blocks(capacity) as u32);
        Self { decoder, blocks, capacity, texts, ends, open: BTreeMap::new(), logits: Vec::new() }
    }

    /// The number of blocks for this capacity. There is one more for each sequence, whose last block may be nearly
    /// empty. The bounds of the options keep the number within 32 bits.
    pub fn blocks(capacity: Capacity) -> usize {
        capacity.tokens.div_ceil(BLOCK) + capacity.sequences
    }

    /// The tokens that a row computes: those of the prompt that are neither computed nor reused, or the answer's last
    /// one.
    fn feed(&mut self, Row { slot, feed }: Row) -> Result<Chunk, TaskError> {
        let Feed::Tokens(take) = feed else {
            return Err(TaskError::internal("a text generator has no encoder"));
        };
        let sequence = self.open.get_mut(&slot).ok_or_else(|| TaskError::internal("no such sequence"))?;
        let prompt = sequence.prompt.ids.clone();
        if sequence.fed == prompt.len() {
            let last = sequence.answer.last().copied();
            let ids: Vec<u32> = last.into_iter().collect();
            let first = sequence.held;
            self.blocks.grow(&mut sequence.table, first + 1).ok_or_else(no_block)?;
            return Ok(Chunk { slot, take: 0, ids, first, is_last: true });
        }
        // Only whole blocks are reused, so all blocks of the table must be full.
        if sequence.held == sequence.table.blocks.len() * BLOCK {
            let held = self.blocks.reuse(&mut sequence.table, &prompt);
            sequence.cached += held - sequence.held;
            sequence.held = held;
        }
        let end = (sequence.fed + take).min(prompt.len());
        let first = sequence.held;
        let ids = prompt.get(first..end).unwrap_or_default().to_vec();
        self.blocks.grow(&mut sequence.table, end).ok_or_else(no_block)?;
        Ok(Chunk { slot, take: end - sequence.fed, ids, first, is_last: end == prompt.len() })
    }

    /// Chooses the next token after a row; none if more of the prompt must be fed first. `logits` are those of the
    /// row's last token. May be called again for the same row.
    fn choose(&mut self, chunk: &Chunk, logits: &mut [f32]) -> Result<Option<Chosen>, TaskError> {
        if !chunk.is_last {
            return Ok(None);
        }
        let sequence =
            self.open.get_mut(&chunk.slot).ok_or_else(|| TaskError::internal("no such sequence"))?;
        sequence.choose(logits, &self.texts).map(Some)
    }

    /// Records that a row was computed, and the token that was chosen after it.
    fn advance(
        &mut self,
        chunk: &Chunk,
        chosen: Option<Chosen>,
    ) -> Result<Advance<Piece, Answer>, TaskError> {
        let sequence =
            self.open.get_mut(&chunk.slot).ok_or_else(|| TaskError::internal("no such sequence"))?;
        sequence.fed += chunk.take;
        sequence.held += chunk.ids.len();
        if sequence.held / BLOCK > (sequence.held - chunk.ids.len()) / BLOCK {
            let tokens = sequence.prompt.ids.iter().chain(&sequence.answer).copied();
            let tokens: Vec<u32> = tokens.take(sequence.held).collect();
            self.blocks.publish(&mut sequence.table, &tokens);
        }
        let Some(chosen) = chosen else { return Ok(Advance::Fed) };
        Ok(sequence.take(chosen, &self.texts, &self.ends))
    }
}

fn no_block() -> TaskError {
    TaskError::internal("there is no block left for its keys and values")
}

impl Sequence {
    /// The next token. It may be chosen again until it is taken.
    fn choose(&mut self, logits: &mut [f32], texts: &TokenTexts) -> Result<Chosen, TaskError> {
        #[cfg(test)]
        assert_ne!(self.prompt.seed.sequence, tests::BROKEN, "a test breaks this row");
        let raw = self.prompt.logprobs.map(|count| (count, logits.to_vec()));
        let position = self.answer.len();
        if let Some(masks) = &mut self.masks {
            masks.apply(logits)?;
        }
        let id = self.sampler.choose(logits, position).ok_or_else(|| {
            TaskError::internal(format!(
                "the model gave no finite numbers for token {position} of the answer"
            ))
        })?;
        let score = raw.map(|(count, raw)| {
            let (logprob, top) = log_probabilities(&raw, id, count);
            let text =
                |id: u32| (String::from_utf8_lossy(texts.get(id)).into_owned(), texts.get(id).to_vec());
            let listed = |(id, logprob): (u32, f32)| {
                let (text, bytes) = text(id);
                (text, bytes, logprob)
            };
            let (text, bytes) = text(id);
            TokenScore { text, bytes, logprob, top: top.into_iter().map(listed).collect() }
        });
        Ok(Chosen { id, score })
    }

    /// Appends a token to the answer.
    fn take(&mut self, chosen: Chosen, texts: &TokenTexts, ends: &BTreeSet<u32>) -> Advance<Piece, Answer> {
        let Chosen { id, score } = chosen;
        self.answer.push(id);
        if let Some(masks) = &mut self.masks {
            masks.take(id);
        }
        // A text with a grammar ends at the end token, even with `ignore_eos`.
        let is_end = ends.contains(&id) && (!self.prompt.ignore_eos || self.masks.is_some());
        let is_stopped = !is_end && self.text.push(texts.get(id));
        let score = score.filter(|_| !is_end);
        self.scores.extend(score.clone());
        let finish = if is_end || is_stopped {
            Finish::Stop
        } else if self.answer.len() == self.prompt.max_tokens {
            Finish::Length
        } else {
            return Advance::More(Piece { text: self.text.new_part(), score, end: None });
        };
        let piece = Piece { text: self.text.end(), score, end: Some((finish, self.cached)) };
        let answer = Answer {
            text: self.text.text().to_owned(),
            finish,
            tokens: self.answer.len(),
            cached: self.cached,
            scores: self.prompt.logprobs.map(|_| std::mem::take(&mut self.scores)),
        };
        Advance::Done(Some(piece), answer)
    }
}

impl Generate for TextGenerator {
    type Prompt = Prompt;
    type Piece = Piece;
    type Output = Answer;

    fn capacity(&self) -> Capacity {
        self.capacity
    }

    fn open(&mut self, slot: Slot, prompt: &Prompt) -> Result<(), TaskError> {
        let sampler = Sampler::new(prompt.sampling, prompt.seed, &prompt.ids);
        let sequence = Sequence {
            fed: 0,
            held: 0,
            cached: 0,
            table: Table::new(prompt.owner),
            answer: Vec::new(),
            sampler,
            masks: prompt.constraint.as_ref().map(Constraint::begin).transpose()?,
            text: Text::new(prompt.stop.clone()),
            scores: Vec::new(),
            prompt: prompt.clone(),
        };
        self.open.insert(slot, sequence);
        Ok(())
    }

    fn step(&mut self, rows: &[Row]) -> Result<Advances<Self>, ForwardError> {
        let chunks: Vec<Result<Chunk, TaskError>> = rows.iter().map(|row| self.feed(*row)).collect();
        let (mut ids, mut spans, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        for chunk in chunks.iter().flatten() {
            let Some(sequence) = self.open.get(&chunk.slot) else { continue };
            ids.extend_from_slice(&chunk.ids);
            let (blocks, count) = (&*sequence.table.blocks, chunk.ids.len());
            spans.push(Span { blocks, first: chunk.first, count });
            if chunk.is_last {
                wanted.push(ids.len() - 1);
            }
        }
        let mut all = std::mem::take(&mut self.logits);
        let computed = self.decoder.forward(&ids, &spans, &wanted, &mut all);
        computed.map_err(|error| ForwardError::from(&error))?;
        let width = all.len() / wanted.len().max(1);
        let mut logits = all.chunks_exact_mut(width.max(1));
        // All choices, which may fail, come before all advances. If a choice panics, no sequence has advanced yet. The
        // step is then computed again without that row, and the other rows are not fed a second time.
        let choose = |chunk: Result<Chunk, TaskError>| {
            let chunk = chunk?;
            let row_logits = if chunk.is_last { logits.next() } else { None };
            let chosen = self.choose(&chunk, row_logits.unwrap_or_default())?;
            Ok((chunk, chosen))
        };
        let chosen: Vec<Result<_, TaskError>> = chunks.into_iter().map(choose).collect();
        let advances =
            chosen.into_iter().map(|row| row.and_then(|(chunk, chosen)| self.advance(&chunk, chosen)));
        let advances = advances.collect();
        self.logits = all;
        Ok(advances)
    }

    fn close(&mut self, slot: Slot) {
        if let Some(sequence) = self.open.remove(&slot) {
            for block in self.blocks.release(sequence.table) {
                self.decoder.release(block);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::model::tasks::generate::load;
    use crate::model::{Device, LoadSpec};

    /// A sequence with this number in its seed panics when its next token is chosen.
    pub(super) const BROKEN: u64 = u64::MAX;

    fn prompt() -> Prompt {
        let sampling = Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            frequency_penalty: 1.5,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
        };
        Prompt {
            ids: [5, 6, 7].into(),
            max_tokens: 12,
            sampling,
            seed: Seed { task: 1, sequence: 0 },
            stop: Arc::default(),
            ignore_eos: true,
            logprobs: Some(1),
            constraint: None,
            owner: Owner::of(""),
        }
    }

    fn piece(generator: &mut TextGenerator, take: usize) -> Piece {
        let rows = [Row { slot: Slot(0), feed: Feed::Tokens(take) }];
        match generator.step(&rows).unwrap().remove(0).unwrap() {
            Advance::More(piece) | Advance::Done(Some(piece), _) => piece,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn after_a_panic_at_one_row_the_other_rows_repeat_their_step() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/generate-llama");
        let (_, mut generator) =
            load(&LoadSpec::new(path), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
        let broken = Prompt { seed: Seed { task: 1, sequence: BROKEN }, ..prompt() };
        generator.open(Slot(0), &prompt()).unwrap();
        let right = [3, 1, 1, 1].map(|take| piece(&mut generator, take));
        generator.close(Slot(0));
        generator.open(Slot(0), &prompt()).unwrap();
        let again = [3, 1, 1, 1].map(|take| {
            generator.open(Slot(1), &broken).unwrap();
            let both = [
                Row { slot: Slot(0), feed: Feed::Tokens(take) },
                Row { slot: Slot(1), feed: Feed::Tokens(3) },
            ];
            assert!(catch_unwind(AssertUnwindSafe(|| drop(generator.step(&both)))).is_err());
            generator.close(Slot(1));
            piece(&mut generator, take)
        });
        assert_eq!(again, right);
    }
}
