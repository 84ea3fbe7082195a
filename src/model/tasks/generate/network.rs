//! The sequences of a decoder: the tokens, the blocks, the sampler and the text of each. Decides when an answer ends. A
//! step changes a sequence only when its result is known (`Generate::step`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::reply::{Finish, TokenScore, TopScore};
use crate::model::load::vocabulary::TokenTexts;
use crate::model::nets::decoder::CachedDecoder;
use crate::model::ops::causal::Span;
use crate::model::ops::gpu::{Draw, Drawn};
use crate::model::ops::kv::BLOCK;
use crate::model::random::Seed;
use crate::model::sequences::blocks::{Blocks, Owner, Table};
use crate::model::sequences::grammar::{Constraint, Masks, is_any_readable};
use crate::model::sequences::sampler::Sampling;
use crate::model::sequences::sampler::{Sampler, log_probabilities};
use crate::model::sequences::text::Text;
use crate::model::{Advance, Advances, Capacity, Feed, ForwardError, Generate, Row, Slot, TaskError};

/// How long a step waits for the first mask of a grammar if no row can advance without one. Then the engine looks after
/// cancellations and deadlines.
const MASK_PATIENCE: Duration = Duration::from_millis(20);

/// One answer to compute.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// The tokens of the prompt: at least one, all in the vocabulary.
    pub ids: Arc<[u32]>,
    /// The maximum number of tokens of the answer.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// The seed of the random choices.
    pub seed: Seed,
    /// Strings before which the answer ends; shared by all answers of a task.
    pub stop: Arc<[String]>,
    /// Whether the answer continues after the model's end token. A grammar overrides this.
    pub ignore_eos: bool,
    /// The number of likeliest tokens that are listed beside each chosen one. With `None`, not even the chosen ones are
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
    /// The end of the answer, if this is the last piece.
    pub end: Option<AnswerEnd>,
}

/// How an answer has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnswerEnd {
    /// Why it ended.
    pub finish: Finish,
    /// The number of tokens of the prompt that were reused instead of computed.
    pub cached: usize,
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
    /// The number of tokens, the model's end token included.
    pub tokens: usize,
    /// The number of tokens of the prompt that were reused instead of computed.
    pub cached: usize,
    /// The tokens' probabilities, if they were requested.
    pub scores: Option<Vec<TokenScore>>,
}

/// A decoder with its sequences.
pub struct TextGenerator {
    decoder: CachedDecoder,
    blocks: Blocks,
    capacity: Capacity,
    /// The largest number of tokens that a token attends to in any layer. None if there is no limit.
    window: Option<usize>,
    token_texts: TokenTexts,
    end_tokens: BTreeSet<u32>,
    sequences: BTreeMap<Slot, Sequence>,
    /// A buffer that each step reuses.
    logits: Vec<f32>,
}

/// An answer that is being written.
struct Sequence {
    prompt: Prompt,
    /// The number of tokens of the prompt that the scheduler has fed, including those that were reused.
    fed: usize,
    /// The number of tokens whose keys and values are in the blocks.
    stored: usize,
    /// The number of tokens of the prompt that were reused.
    cached: usize,
    table: Table,
    /// The tokens of the answer so far.
    answer: Vec<u32>,
    sampler: Sampler,
    masks: Option<Masks>,
    /// Whether its row was computed before the mask of the next token had arrived. It is not computed again until then.
    is_late: bool,
    text: Text,
    scores: Vec<TokenScore>,
}

/// The tokens that a row computes in a step.
struct Chunk {
    slot: Slot,
    /// The number of tokens of the prompt by which `Sequence::fed` advances.
    prompt_tokens: usize,
    ids: Vec<u32>,
    /// The position in the sequence of the first token.
    first_position: usize,
    /// Whether a next token is chosen after this chunk.
    is_last: bool,
}

/// What the decoder gives for a row after which a token is chosen.
enum RowResult<'a> {
    Logits(&'a mut [f32]),
    /// The token that the device has chosen.
    Drawn(Drawn),
}

/// Why a row does not advance.
enum NotAdvanced {
    /// The mask of its next token has not arrived yet.
    Waits,
    Failed(TaskError),
}

impl From<TaskError> for NotAdvanced {
    fn from(error: TaskError) -> Self {
        Self::Failed(error)
    }
}

/// The next token of an answer, with its probability if it was requested.
struct Chosen {
    id: u32,
    score: Option<TokenScore>,
}

impl TextGenerator {
    /// A generator without sequences. The decoder must have [`TextGenerator::blocks`] blocks.
    pub fn new(
        decoder: CachedDecoder,
        capacity: Capacity,
        window: Option<usize>,
        token_texts: TokenTexts,
        end_tokens: BTreeSet<u32>,
    ) -> Self {
        let blocks = Blocks::new(Self::blocks(capacity) as u32);
        let sequences = BTreeMap::new();
        Self { decoder, blocks, capacity, window, token_texts, end_tokens, sequences, logits: Vec::new() }
    }

    /// The number of blocks for this capacity. It includes one more block for each sequence, because a sequence's last
    /// block may be nearly empty. The bounds of the options keep the number within 32 bits.
    pub fn blocks(capacity: Capacity) -> usize {
        capacity.tokens.div_ceil(BLOCK) + capacity.sequences
    }

    /// The tokens that a row computes: those of the prompt that are neither computed nor reused, or the answer's last
    /// one.
    fn chunk(&mut self, Row { slot, feed }: Row) -> Result<Chunk, NotAdvanced> {
        let Feed::Tokens(count) = feed else {
            return Err(TaskError::internal("a text generator has no encoder").into());
        };
        let sequence =
            self.sequences.get_mut(&slot).ok_or_else(|| TaskError::internal("no such sequence"))?;
        if sequence.is_late && sequence.awaits_mask() {
            return Err(NotAdvanced::Waits);
        }
        let prompt = sequence.prompt.ids.clone();
        if sequence.fed == prompt.len() {
            let last = sequence.answer.last().copied();
            let ids: Vec<u32> = last.into_iter().collect();
            let first_position = sequence.stored;
            self.blocks.grow(&mut sequence.table, first_position + 1).ok_or_else(no_block)?;
            return Ok(Chunk { slot, prompt_tokens: 0, ids, first_position, is_last: true });
        }
        // Only whole blocks are reused, so all blocks of the table must be full.
        if sequence.stored == sequence.table.blocks.len() * BLOCK {
            let stored = self.blocks.reuse(&mut sequence.table, &prompt);
            sequence.cached += stored - sequence.stored;
            sequence.stored = stored;
        }
        let end = (sequence.fed + count).min(prompt.len());
        let first_position = sequence.stored;
        let ids = prompt.get(first_position..end).unwrap_or_default().to_vec();
        self.blocks.grow(&mut sequence.table, end).ok_or_else(no_block)?;
        let (prompt_tokens, is_last) = (end - sequence.fed, end == prompt.len());
        Ok(Chunk { slot, prompt_tokens, ids, first_position, is_last })
    }

    /// Chooses the next token after a row; none if more of the prompt must be fed first. `result` is that of the row's last
    /// token. May be called again for the same row.
    fn choose(&mut self, chunk: &Chunk, result: RowResult<'_>) -> Result<Option<Chosen>, NotAdvanced> {
        if !chunk.is_last {
            return Ok(None);
        }
        let sequence =
            self.sequences.get_mut(&chunk.slot).ok_or_else(|| TaskError::internal("no such sequence"))?;
        sequence.is_late = sequence.awaits_mask();
        if sequence.is_late {
            return Err(NotAdvanced::Waits);
        }
        let chosen = match result {
            RowResult::Logits(logits) => sequence.choose(logits, &self.token_texts)?,
            RowResult::Drawn(drawn) => sequence.take(drawn, &self.token_texts)?,
        };
        Ok(Some(chosen))
    }

    /// Reads the masks of these sequences that have arrived. If none has and `waits`, waits for the first one for at most
    /// [`MASK_PATIENCE`].
    fn receive_masks(&mut self, slots: &[Slot], waits: bool) {
        if waits {
            let masks = |slot| self.sequences.get(slot)?.masks.as_ref();
            let masks: Vec<&Masks> = slots.iter().filter_map(masks).collect();
            if masks.iter().all(|masks| masks.is_awaited()) {
                is_any_readable(&masks, MASK_PATIENCE);
            }
        }
        for slot in slots {
            if let Some(masks) = self.sequences.get_mut(slot).and_then(|sequence| sequence.masks.as_mut()) {
                masks.receive();
            }
        }
    }

    /// Records that a row was computed, and the token that was chosen after it.
    fn advance(
        &mut self,
        chunk: &Chunk,
        chosen: Option<Chosen>,
    ) -> Result<Advance<Piece, Answer>, TaskError> {
        let sequence =
            self.sequences.get_mut(&chunk.slot).ok_or_else(|| TaskError::internal("no such sequence"))?;
        sequence.fed += chunk.prompt_tokens;
        sequence.stored += chunk.ids.len();
        let has_filled_a_block = sequence.stored / BLOCK > (sequence.stored - chunk.ids.len()) / BLOCK;
        if has_filled_a_block {
            let tokens = sequence.prompt.ids.iter().chain(&sequence.answer).copied();
            let tokens: Vec<u32> = tokens.take(sequence.stored).collect();
            self.blocks.publish(&mut sequence.table, &tokens);
            if let Some(window) = self.window {
                // The next token attends to the last `window` tokens, itself included.
                let unseen = (sequence.stored + 1).saturating_sub(window);
                for block in self.blocks.release_first(&mut sequence.table, unseen / BLOCK) {
                    self.decoder.release(block);
                }
            }
        }
        let Some(chosen) = chosen else { return Ok(Advance::Fed) };
        Ok(sequence.append(chosen, &self.token_texts, &self.end_tokens))
    }
}

fn no_block() -> TaskError {
    TaskError::internal("there is no block left for its keys and values")
}

fn no_finite_number(position: usize) -> TaskError {
    TaskError::internal(format!("the model gave no finite numbers for token {position} of the answer"))
}

impl Sequence {
    /// Whether the mask of its next token has not arrived.
    fn awaits_mask(&self) -> bool {
        self.masks.as_ref().is_some_and(Masks::is_awaited)
    }

    /// How a device chooses the next token.
    fn draw(&mut self) -> Draw {
        let draw = self.sampler.draw(self.answer.len());
        Draw { logprobs: self.prompt.logprobs, is_masked: self.masks.is_some(), ..draw }
    }

    /// The next token, which the device has chosen. It may be chosen again until it is appended.
    fn take(&mut self, drawn: Drawn, token_texts: &TokenTexts) -> Result<Chosen, TaskError> {
        if let Some(masks) = &self.masks {
            masks.allowed()?;
        }
        let position = self.answer.len();
        let Drawn { id, logprob, top } = drawn;
        let id = id.ok_or_else(|| no_finite_number(position))?;
        self.sampler.take(id, position);
        let score = self.prompt.logprobs.map(|_| token_score((id, logprob), top, token_texts));
        Ok(Chosen { id, score })
    }

    /// The next token. It may be chosen again until it is appended.
    fn choose(&mut self, logits: &mut [f32], token_texts: &TokenTexts) -> Result<Chosen, TaskError> {
        #[cfg(test)]
        assert_ne!(self.prompt.seed.sequence, tests::BROKEN, "a test breaks this row");
        // Probabilities are listed as they are without the grammar and the sampling.
        let raw_logits = self.prompt.logprobs.map(|count| (count, logits.to_vec()));
        let position = self.answer.len();
        if let Some(masks) = &self.masks {
            masks.apply(logits)?;
        }
        let id = self.sampler.choose(logits, position).ok_or_else(|| no_finite_number(position))?;
        let score = raw_logits.map(|(count, logits)| {
            let (logprob, top) = log_probabilities(&logits, id, count);
            token_score((id, logprob), top, token_texts)
        });
        Ok(Chosen { id, score })
    }

    /// Appends a token to the answer.
    fn append(
        &mut self,
        chosen: Chosen,
        token_texts: &TokenTexts,
        end_tokens: &BTreeSet<u32>,
    ) -> Advance<Piece, Answer> {
        let Chosen { id, score } = chosen;
        self.answer.push(id);
        if let Some(masks) = &mut self.masks {
            masks.take(id);
        }
        // A text with a grammar ends at the end token, even with `ignore_eos`.
        let is_end = end_tokens.contains(&id) && (!self.prompt.ignore_eos || self.masks.is_some());
        let is_stopped = !is_end && self.text.push(token_texts.get(id));
        let score = score.filter(|_| !is_end);
        self.scores.extend(score.clone());
        let finish = if is_end || is_stopped {
            Finish::Stop
        } else if self.answer.len() == self.prompt.max_tokens {
            Finish::Length
        } else {
            return Advance::More(Piece { text: self.text.new_part(), score, end: None });
        };
        let end = AnswerEnd { finish, cached: self.cached };
        let piece = Piece { text: self.text.end(), score, end: Some(end) };
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

/// The probability of a chosen token, and those of the likeliest tokens.
fn token_score(chosen: (u32, f32), top: Vec<(u32, f32)>, token_texts: &TokenTexts) -> TokenScore {
    let score = |(id, logprob): (u32, f32)| {
        let bytes = token_texts.get(id).to_vec();
        TopScore { text: String::from_utf8_lossy(&bytes).into_owned(), bytes, logprob }
    };
    let TopScore { text, bytes, logprob } = score(chosen);
    TokenScore { text, bytes, logprob, top: top.into_iter().map(score).collect() }
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
            stored: 0,
            cached: 0,
            table: Table::new(prompt.owner),
            answer: Vec::new(),
            sampler,
            masks: prompt.constraint.as_ref().map(Constraint::begin).transpose()?,
            is_late: false,
            text: Text::new(prompt.stop.clone()),
            scores: Vec::new(),
            prompt: prompt.clone(),
        };
        self.sequences.insert(slot, sequence);
        Ok(())
    }

    fn step(&mut self, rows: &[Row]) -> Result<Advances<Self>, ForwardError> {
        let is_late = |slot: &Slot| self.sequences.get(slot).is_some_and(|sequence| sequence.is_late);
        let late: Vec<Slot> = rows.iter().map(|row| row.slot).filter(is_late).collect();
        self.receive_masks(&late, late.len() == rows.len());
        let chunks: Vec<Result<Chunk, NotAdvanced>> = rows.iter().map(|row| self.chunk(*row)).collect();
        let can_choose = self.decoder.can_choose();
        let draw = |chunk: &Chunk| {
            let sequence = self.sequences.get_mut(&chunk.slot).filter(|_| chunk.is_last && can_choose);
            sequence.map(Sequence::draw)
        };
        let draws: Vec<Draw> = chunks.iter().flatten().filter_map(draw).collect();
        let (mut ids, mut spans, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        for chunk in chunks.iter().flatten() {
            let Some(sequence) = self.sequences.get(&chunk.slot) else { continue };
            ids.extend_from_slice(&chunk.ids);
            let (blocks, count) = (&*sequence.table.blocks, chunk.ids.len());
            spans.push(Span { blocks, first: chunk.first_position, count });
            if chunk.is_last {
                wanted.push(ids.len() - 1);
            }
        }
        let mut buffer = std::mem::take(&mut self.logits);
        let choice = self.decoder.forward(&ids, &spans, &wanted, &draws, &mut buffer)?;
        let is_masked = |chunk: &&Chunk| {
            chunk.is_last && self.sequences.get(&chunk.slot).is_some_and(|sequence| sequence.masks.is_some())
        };
        let masked: Vec<Slot> = chunks.iter().flatten().filter(is_masked).map(|chunk| chunk.slot).collect();
        self.receive_masks(&masked, masked.len() == rows.len());
        let mut drawn = match choice {
            Some(choice) => {
                // Nothing can be chosen without a mask.
                let allowed = |slot| {
                    let masks = self.sequences.get(slot)?.masks.as_ref()?;
                    Some(masks.allowed().unwrap_or_default())
                };
                choice(&masked.iter().filter_map(allowed).collect::<Vec<_>>())?
            }
            None => Vec::new(),
        }
        .into_iter()
        .peekable();
        let faults = self.decoder.faults().clone();
        let vocab_size = buffer.len() / wanted.len().max(1);
        let mut logits = buffer.chunks_exact_mut(vocab_size.max(1));
        let mut first_row = 0;
        // All choices, which may fail, come before all advances. If a choice panics, no sequence has advanced yet. The
        // step is then computed again without that row, and the other rows are not fed a second time.
        let choose = |chunk: Result<Chunk, NotAdvanced>| {
            let chunk = chunk?;
            let result = match (chunk.is_last, drawn.next_if(|_| chunk.is_last)) {
                (_, Some(drawn)) => RowResult::Drawn(drawn),
                (true, None) => RowResult::Logits(logits.next().unwrap_or_default()),
                (false, None) => RowResult::Logits(&mut []),
            };
            let rows = first_row..first_row + chunk.ids.len();
            first_row = rows.end;
            // In a later layer the fault spreads to other rows of the sequence.
            if let Some(fault) = faults.range(rows).map(|(_, fault)| fault).min_by_key(|fault| fault.layer) {
                return Err(TaskError::internal(fault.to_string()).into());
            }
            let chosen = self.choose(&chunk, result)?;
            Ok((chunk, chosen))
        };
        let chosen: Vec<Result<_, NotAdvanced>> = chunks.into_iter().map(choose).collect();
        let advance = |row| match row {
            Ok((chunk, chosen)) => self.advance(&chunk, chosen),
            Err(NotAdvanced::Waits) => Ok(Advance::Waits),
            Err(NotAdvanced::Failed(error)) => Err(error),
        };
        let advances = chosen.into_iter().map(advance).collect();
        self.logits = buffer;
        Ok(advances)
    }

    fn close(&mut self, slot: Slot) {
        if let Some(sequence) = self.sequences.remove(&slot) {
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

    fn piece(generator: &mut TextGenerator, count: usize) -> Piece {
        let rows = [Row { slot: Slot(0), feed: Feed::Tokens(count) }];
        match generator.step(&rows).unwrap().remove(0).unwrap() {
            Advance::More(piece) | Advance::Done(Some(piece), _) => piece,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_row_waits_for_its_mask_while_the_other_rows_advance() {
        use std::io::Write;
        use std::os::unix::net::UnixStream;

        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/generate-llama");
        let (_, mut generator) =
            load(&LoadSpec::new(path), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
        for slot in [0, 1] {
            generator.open(Slot(slot), &prompt()).unwrap();
        }
        let (masks, mut matcher) = UnixStream::pair().unwrap();
        generator.sequences.get_mut(&Slot(1)).unwrap().masks = Some(Masks::from(masks));
        // Tokens are allowed in bytes of eight: these are 16 and 17.
        let mut frame = vec![0, 3, 0, 0, 0, 0, 0, 0b11];
        let both = |count| [0, 1].map(|slot| Row { slot: Slot(slot), feed: Feed::Tokens(count) });
        let mut step = |rows: &[Row]| generator.step(rows).unwrap().into_iter().map(Result::unwrap);
        let advances: Vec<_> = step(&both(3)).collect();
        assert!(matches!(advances[..], [Advance::More(_), Advance::Waits]), "{advances:?}");
        let one_fed_a_token = [both(1)[0], both(3)[1]];
        let advances: Vec<_> = step(&one_fed_a_token).collect();
        assert!(matches!(advances[..], [Advance::More(_), Advance::Waits]), "{advances:?}");
        // It waits alone, too, without an end.
        assert_eq!(step(&both(3)[1..]).collect::<Vec<_>>(), [Advance::Waits]);
        matcher.write_all(&frame).unwrap();
        assert!(matches!(step(&one_fed_a_token).nth(1), Some(Advance::More(_))));
        // The token is told to the matcher, whose next answer is an error of this sequence alone.
        frame[0] = 3;
        matcher.write_all(&frame).unwrap();
        let results = generator.step(&both(1)).unwrap();
        assert!(matches!(results[..], [Ok(Advance::More(_)), Err(_)]), "{results:?}");
        assert!([16, 17].contains(&generator.sequences[&Slot(1)].answer[0]));
    }

    #[test]
    fn after_a_panic_at_one_row_the_other_rows_repeat_their_step() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/generate-llama");
        let (_, mut generator) =
            load(&LoadSpec::new(path), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
        let broken = Prompt { seed: Seed { task: 1, sequence: BROKEN }, ..prompt() };
        generator.open(Slot(0), &prompt()).unwrap();
        let expected = [3, 1, 1, 1].map(|count| piece(&mut generator, count));
        generator.close(Slot(0));
        generator.open(Slot(0), &prompt()).unwrap();
        let repeated = [3, 1, 1, 1].map(|count| {
            generator.open(Slot(1), &broken).unwrap();
            let both = [
                Row { slot: Slot(0), feed: Feed::Tokens(count) },
                Row { slot: Slot(1), feed: Feed::Tokens(3) },
            ];
            assert!(catch_unwind(AssertUnwindSafe(|| drop(generator.step(&both)))).is_err());
            generator.close(Slot(1));
            piece(&mut generator, count)
        });
        assert_eq!(repeated, expected);
    }
}
