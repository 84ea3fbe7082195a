//! The sequences of Whisper: one for each window. Decides when a text ends, when a doubtful one is written again with a
//! higher temperature, and where in the window the next text begins if a text ends too early. A step that
//! fails as a whole leaves all sequences as they were, so that it can be repeated (`Generate::step`). An error of one row
//! ends that row's task.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use rayon::prelude::*;

use super::rules::{Chosen, Rules, TIMESTAMP_STEP};
use super::segments::{WindowPlace, WindowText, compression_ratio, plain_text};
use super::tokens::{Multilingual, SpecialTokens};
use super::words::{TimeRange, token_times};
use crate::model::load::vocabulary::TokenTexts;
use crate::model::nets::whisper::config::POSITIONS;
use crate::model::nets::whisper::{Span, Whisper};
use crate::model::ops::{exponentials, largest};
use crate::model::random::Seed;
use crate::model::sequences::out_of_turn;
use crate::model::sequences::sampler::Sampler;
use crate::model::sequences::sampler::Sampling;
use crate::model::sound::RATE;
use crate::model::sound::features::{FRAMES, WINDOW};
use crate::model::{
    Advance, Advances, Capacity, Encoding, Feed, ForwardError, Generate, Row, SizedInput, Slot, TaskError,
    TaskErrorKind,
};

/// The temperatures that are tried in turn until a text is not doubtful, as in openai/whisper.
const TEMPERATURES: [f32; 6] = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0];
/// Above this compression ratio a text is doubtful, because it repeats itself.
const MAX_COMPRESSION: f32 = 2.4;
/// Below this mean log probability of its tokens, a text is doubtful.
const MIN_LOGPROB: f32 = -1.0;
/// Once so many tokens were chosen for a window, discarded ones included, its texts are not written again: four times
/// OpenAI's longest text.
const MAX_CHOSEN: usize = 4 * 224;
/// The weight of the latest window in the average number of tokens that are chosen for a window.
const LATEST_WEIGHT: f32 = 1.0 / 32.0;
/// The maximum number of texts that are written one after the other for a window, and joined.
const MAX_TEXTS: usize = 6;
/// The shortest part of a window that gets a text of its own, in [`TIMESTAMP_STEP`]s: 1 s.
const MIN_STEPS: usize = 50;
/// The frames of features in a [`TIMESTAMP_STEP`], 10 ms each.
const FRAMES_PER_STEP: usize = 2;
/// Above this probability of no speech, a window is taken to have no speech, unless its text is likely.
const MIN_NO_SPEECH: f32 = 0.6;
/// Seconds of a window.
const WINDOW_SECONDS: f64 = (WINDOW / RATE as usize) as f64;
/// Texts of speech are short, so slots become free often. Windows are therefore encoded more often than by default
/// while texts are written.
const ENCODING: Encoding = Encoding { interval: 4, batch: 4 };

/// One window to transcribe.
#[derive(Clone, Debug)]
pub struct WindowInput {
    /// The features of the sound, `[mels, FRAMES]`.
    pub features: Arc<[f32]>,
    /// The window's place in the recording.
    pub place: WindowPlace,
    /// The token that introduces a preceding text, and then that text's tokens. Empty without a preceding text.
    pub previous: Arc<[u32]>,
    /// The tokens of the language and of the task; none for a model of English only.
    pub language_tokens: Option<LanguageTokens>,
    /// The maximum number of tokens of the text.
    pub max_tokens: usize,
    /// The temperature. If it is 0, a doubtful text is written again with a higher one.
    pub temperature: f32,
    /// Whether the request wants the times of words.
    pub wants_word_times: bool,
    /// The seed of the random choices.
    pub seed: Seed,
}

/// The tokens that tell a model of several languages what to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LanguageTokens {
    /// The token of the language. None if it is to be detected.
    pub language: Option<u32>,
    /// The token that says to transcribe or to translate.
    pub task: u32,
}

impl WindowInput {
    /// The number of tokens before the text: the preceding text, the start token, and the tokens of language and task.
    pub fn prompt_tokens(&self) -> usize {
        self.previous.len() + 1 + if self.language_tokens.is_some() { 2 } else { 0 }
    }

    /// The input with its sizes.
    pub fn sized(self) -> SizedInput<Self> {
        let (tokens, answer_tokens) = (self.prompt_tokens(), self.max_tokens);
        SizedInput { encode_tokens: POSITIONS, tokens, answer_tokens, input: self }
    }
}

/// How many tokens are chosen for a window on average, discarded ones included. Written by the network, read to estimate
/// how long a recording takes. Clones share the average.
#[derive(Clone, Debug)]
pub struct WindowPace(Arc<AtomicU32>);

impl WindowPace {
    /// Starts with an assumed number of tokens.
    pub fn new(tokens: f32) -> Self {
        Self(Arc::new(AtomicU32::new(tokens.to_bits())))
    }

    /// The average number of tokens.
    pub fn tokens(&self) -> f32 {
        f32::from_bits(self.0.load(Relaxed))
    }

    fn learn(&self, tokens: usize) {
        let average = self.tokens() * (1.0 - LATEST_WEIGHT) + tokens as f32 * LATEST_WEIGHT;
        self.0.store(average.to_bits(), Relaxed);
    }
}

/// Whisper with its sequences.
pub struct Transcriber {
    network: Whisper,
    capacity: Capacity,
    /// `<|startoftranscript|>`, which precedes the tokens of the language and the task, and then the text.
    start_token: u32,
    /// The token whose probability says that there is no speech.
    no_speech_token: Option<u32>,
    multilingual: Option<Multilingual>,
    rules: Rules,
    token_texts: TokenTexts,
    pace: WindowPace,
    sequences: BTreeMap<Slot, Sequence>,
    /// A buffer that each step reuses.
    logits: Vec<f32>,
}

/// A window whose text is being written.
struct Sequence {
    input: WindowInput,
    /// The token of the language, once it is known.
    language: Option<u32>,
    is_encoded: bool,
    /// The number of tokens of the prompt that were computed.
    fed: usize,
    /// The tokens of the text so far, with its timestamps.
    output: Vec<u32>,
    /// The sum of the log probabilities of `output` and, once the text has ended, of the end token.
    logprobs: f32,
    /// The probability that there is no speech.
    no_speech: f32,
    temperature: f32,
    /// Where in the window this text begins, in [`TIMESTAMP_STEP`]s.
    first_step: usize,
    /// The number of tokens that were chosen for this window, discarded ones included.
    chosen: usize,
    /// The best of the texts in the place of this one that were discarded.
    best: Option<Attempt>,
    /// The texts before this one.
    finished: FinishedTexts,
}

/// A text as it was written with one temperature.
#[derive(Clone, Debug, PartialEq)]
struct Attempt {
    text: WindowText,
    logprobs: f32,
    is_repetitive: bool,
}

/// What becomes of a text that has ended.
#[derive(Debug, PartialEq)]
enum Verdict {
    /// This one is kept.
    Keep(Attempt),
    /// It is written again. `best`: the best one so far.
    Again { temperature: f32, best: Attempt },
}

impl Attempt {
    /// Whether this is the better text: it does not repeat itself, or is likelier.
    fn is_better_than(&self, other: &Self) -> bool {
        let key = |it: &Self| (!it.is_repetitive, it.text.avg_logprob);
        key(self) > key(other)
    }

    /// Decides whether this text is kept: if it is not doubtful or was written with the last temperature, so that there is
    /// no `next` one, as in openai/whisper. Once many tokens were `chosen` for the window, the best text so far is kept.
    /// `best` is the best of the texts before this one.
    fn judge(self, best: Option<Self>, next: Option<f32>, chosen: usize) -> Verdict {
        let Some(temperature) = next else { return Verdict::Keep(self) };
        let best = match best {
            Some(best) if !self.is_better_than(&best) => best,
            _ => self,
        };
        if chosen >= MAX_CHOSEN { Verdict::Keep(best) } else { Verdict::Again { temperature, best } }
    }
}

/// Texts of a window that were written one after the other.
#[derive(Default)]
struct FinishedTexts {
    /// The tokens of all texts. The times among them count from the beginning of the window.
    tokens: Vec<u32>,
    /// When each token of text was spoken; empty unless the request wants the times of words.
    token_times: Vec<TimeRange>,
    /// The sum of the log probabilities of all tokens, end tokens included.
    logprobs: f32,
    /// The number of log probabilities in that sum.
    logprob_count: usize,
    /// The probability that there is no speech, as found with the first text.
    no_speech: f32,
    /// The highest temperature of a text.
    temperature: f32,
    /// The number of texts.
    count: usize,
}

/// The tokens that a row computes in a step.
struct Chunk {
    slot: Slot,
    /// The number of tokens of the prompt among them, by which `Sequence::fed` advances.
    prompt_tokens: usize,
    ids: Vec<u32>,
    /// The position of the first token.
    first_position: usize,
    /// The index in `ids` of the start token, if it is there. The logits after it say whether there is speech.
    start_index: Option<usize>,
    /// Whether a next token is chosen after this chunk.
    chooses_next: bool,
}

impl Chunk {
    /// The indices in `ids` of the tokens after which logits are wanted: the start token, and the last token if a next
    /// one is chosen.
    fn wanted(&self) -> impl Iterator<Item = usize> + use<> {
        let last = self.ids.len() - 1;
        let last = (self.chooses_next && self.start_index != Some(last)).then_some(last);
        self.start_index.into_iter().chain(last)
    }
}

/// What a step computes for a row.
struct Computed {
    chunk: Chunk,
    no_speech: Option<f32>,
    chosen: Option<Chosen>,
}

impl Transcriber {
    /// A transcriber without sequences. It has as many slots as `capacity` has sequences.
    pub fn new(network: Whisper, capacity: Capacity, tokens: &SpecialTokens, pace: WindowPace) -> Self {
        Self {
            network,
            capacity,
            start_token: tokens.start,
            no_speech_token: tokens.no_speech,
            multilingual: tokens.multilingual.clone(),
            rules: tokens.rules.clone(),
            token_texts: tokens.texts(),
            pace,
            sequences: BTreeMap::new(),
            logits: Vec::new(),
        }
    }

    /// Encodes the windows of these slots, and detects their languages where they are not known.
    fn encode(&mut self, slots: &[Slot]) -> Result<Advances<Self>, ForwardError> {
        let is_waiting = |slot: &Slot| self.sequences.get(slot).is_some_and(|it| !it.is_encoded);
        let slots: Vec<Result<Slot, TaskError>> =
            slots.iter().map(|slot| if is_waiting(slot) { Ok(*slot) } else { Err(out_of_turn()) }).collect();
        let waiting: Vec<Slot> = slots.iter().flatten().copied().collect();
        let features: Vec<&[f32]> =
            waiting.iter().filter_map(|slot| Some(&*self.sequences.get(slot)?.input.features)).collect();
        let numbers: Vec<usize> = waiting.iter().map(|slot| slot.0).collect();
        self.network.encode(&numbers, &features)?;
        for slot in &waiting {
            if self.sequences.get(slot).is_some_and(|it| it.input.wants_word_times) {
                self.network.keep_queries(slot.0);
            }
        }
        let unknown: Vec<Slot> = waiting.iter().filter(|slot| self.lacks_language(**slot)).copied().collect();
        let detected = self.detect_languages(&unknown)?;
        // Nothing fails from here on.
        for (slot, language) in unknown.iter().zip(detected) {
            if let Some(sequence) = self.sequences.get_mut(slot) {
                sequence.language = language;
            }
        }
        for slot in &waiting {
            if let Some(sequence) = self.sequences.get_mut(slot) {
                sequence.is_encoded = true;
            }
        }
        Ok(slots.into_iter().map(|slot| slot.map(|_| Advance::Fed)).collect())
    }

    fn lacks_language(&self, slot: Slot) -> bool {
        let lacks = |it: &Sequence| it.language.is_none() && it.input.language_tokens.is_some();
        self.sequences.get(&slot).is_some_and(lacks)
    }

    /// The likeliest language of each slot: the likeliest language token after the start token. The start token is
    /// computed at position 0, where the first token of the prompt later replaces it.
    fn detect_languages(&mut self, slots: &[Slot]) -> candle_core::Result<Vec<Option<u32>>> {
        let Some(multilingual) = &self.multilingual else { return Ok(vec![None; slots.len()]) };
        let ids = vec![self.start_token; slots.len()];
        let spans: Vec<Span> = slots.iter().map(|slot| Span { slot: slot.0, first: 0, count: 1 }).collect();
        let wanted: Vec<usize> = (0..slots.len()).collect();
        self.network.forward(&ids, &spans, &wanted, &mut self.logits)?;
        let vocab_size = self.logits.len() / slots.len().max(1);
        let likeliest = |logits: &[f32]| {
            let logit = |id: &u32| logits.get(*id as usize).copied().unwrap_or(f32::NEG_INFINITY);
            multilingual.languages.values().copied().max_by(|a, b| logit(a).total_cmp(&logit(b)))
        };
        Ok(self.logits.chunks_exact(vocab_size.max(1)).map(likeliest).collect())
    }

    /// The tokens that a row computes: those of the prompt, or the last one of the text so far.
    fn chunk(&self, Row { slot, feed }: Row) -> Result<Chunk, TaskError> {
        let sequence = self.sequences.get(&slot).filter(|it| it.is_encoded).ok_or_else(out_of_turn)?;
        let prompt = sequence.prompt(self.start_token);
        let (first_position, ids, prompt_tokens) = if sequence.fed < prompt.len() {
            let count = feed.tokens().min(prompt.len() - sequence.fed);
            (sequence.fed, prompt[sequence.fed..sequence.fed + count].to_vec(), count)
        } else {
            // If a text is written again, it has no token yet. Then the last token of the prompt is computed once more,
            // to choose the first token.
            let last = sequence.output.last().or(prompt.last()).copied();
            (prompt.len() + sequence.output.len() - 1, last.into_iter().collect(), 0)
        };
        let start_position = sequence.input.previous.len();
        let start_index = if prompt_tokens == 0 { None } else { start_position.checked_sub(first_position) };
        let start_index = start_index.filter(|index| *index < ids.len());
        let chooses_next = sequence.fed + prompt_tokens == prompt.len();
        Ok(Chunk { slot, prompt_tokens, ids, first_position, start_index, chooses_next })
    }

    /// Chooses the next token of a row, and reads the probability that there is no speech. Does not change the
    /// sequence. If the chunk has the start token, `logits` first yields the logits after that token. If a token is
    /// chosen, `logits` next yields those after the chunk's last token, unless that is the start token. `step` requests
    /// the logits in this order.
    fn choose<'a>(
        &self,
        chunk: Chunk,
        mut logits: impl Iterator<Item = &'a mut [f32]>,
    ) -> Result<Computed, TaskError> {
        let sequence = self.sequences.get(&chunk.slot).ok_or_else(out_of_turn)?;
        let after_start = chunk.start_index.and_then(|_| logits.next());
        let no_speech =
            after_start.as_deref().zip(self.no_speech_token).map(|(it, id)| probability(it, id as usize));
        if !chunk.chooses_next {
            return Ok(Computed { chunk, no_speech, chosen: None });
        }
        // The start token may be the last one of the prompt.
        let is_start_last = chunk.start_index == Some(chunk.ids.len() - 1);
        let after_last = if is_start_last { after_start } else { logits.next() };
        let mut sampler = sequence.sampler();
        let chosen =
            after_last.and_then(|logits| self.rules.choose(&sequence.output, logits, sampler.as_mut()));
        let chosen = chosen.ok_or_else(|| {
            let index = sequence.output.len();
            TaskError::internal(format!("the model's numbers allow no token {index} of the text"))
        })?;
        Ok(Computed { chunk, no_speech, chosen: Some(chosen) })
    }

    /// Records what a row has computed. Decides how its text continues: with a next token, again from its start with a
    /// higher temperature, with another text for the rest of the window, or not at all.
    fn advance(&mut self, computed: &Computed) -> Result<Advance<(), WindowText>, TaskError> {
        let Computed { chunk, no_speech, chosen } = computed;
        let sequence = self.sequences.get_mut(&chunk.slot).ok_or_else(out_of_turn)?;
        sequence.fed += chunk.prompt_tokens;
        sequence.no_speech = no_speech.unwrap_or(sequence.no_speech);
        let Some(Chosen { id, logprob }) = *chosen else { return Ok(Advance::Fed) };
        sequence.logprobs += logprob;
        sequence.chosen += 1;
        if id != self.rules.end {
            sequence.output.push(id);
            if sequence.output.len() < sequence.input.max_tokens {
                return Ok(Advance::More(()));
            }
        }
        let mut text = sequence.window_text();
        if sequence.input.wants_word_times {
            // Computed now, because the next text of the window overwrites the keys of this one.
            let is_whole = id == self.rules.end;
            text.token_times = sequence.token_times(&self.network, chunk.slot, is_whole, &self.rules)?;
        }
        let words = plain_text(&text.tokens, &self.rules, &self.token_texts);
        let next = next_temperature(&sequence.input, &text, &words);
        let is_repetitive = compression_ratio(&words) > MAX_COMPRESSION;
        let attempt = Attempt { text, logprobs: sequence.logprobs, is_repetitive };
        match attempt.judge(sequence.best.take(), next, sequence.chosen) {
            Verdict::Again { temperature, best } => {
                sequence.best = Some(best);
                sequence.temperature = temperature;
                sequence.logprobs = 0.0;
                sequence.output.clear();
                Ok(Advance::More(()))
            }
            Verdict::Keep(kept) => {
                sequence.logprobs = kept.logprobs;
                let advance = sequence.finish_text(&kept.text, &self.rules);
                if let Advance::Done(..) = advance {
                    self.pace.learn(sequence.chosen);
                }
                Ok(advance)
            }
        }
    }
}

/// The temperature with which a text is written again. None if the text is not doubtful, if it was written with all
/// temperatures, if there is no speech, or if the request has a temperature other than 0.
fn next_temperature(input: &WindowInput, window_text: &WindowText, text: &str) -> Option<f32> {
    let is_unlikely = window_text.avg_logprob < MIN_LOGPROB;
    let is_doubtful = is_unlikely || compression_ratio(text) > MAX_COMPRESSION;
    let next = TEMPERATURES.into_iter().find(|it| *it > window_text.temperature);
    next.filter(|_| input.temperature == 0.0 && is_doubtful && !has_no_speech(window_text))
}

/// Whether there is no speech in a window, by OpenAI's rule: "no speech" is likely, and the text is unlikely.
pub fn has_no_speech(window_text: &WindowText) -> bool {
    window_text.no_speech > MIN_NO_SPEECH && window_text.avg_logprob < MIN_LOGPROB
}

/// The probability of a token by these logits.
fn probability(logits: &[f32], id: usize) -> f32 {
    let max_logit = largest(logits);
    let sum = exponentials(&mut logits.to_vec(), 1.0);
    logits.get(id).map_or(0.0, |x| (x - max_logit).exp() / sum)
}

/// Where the next text of a window begins.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Continuation {
    /// The number of tokens of the current text that are kept; the next text replaces the others.
    kept_tokens: usize,
    /// The distance from the beginning of the current text, in [`TIMESTAMP_STEP`]s.
    steps: usize,
}

/// Where the next text of a window is to begin, by OpenAI's rule: at the last pair of adjacent timestamps, the end of a
/// segment and the start of the next. None if there is no pair, or if the text ends with a single timestamp.
fn continuation(tokens: &[u32], rules: &Rules) -> Option<Continuation> {
    let is_time = |index: usize| tokens.get(index).is_some_and(|id| rules.is_time(*id));
    let last = tokens.len().checked_sub(1)?;
    if is_time(last) && !last.checked_sub(1).is_some_and(is_time) {
        return None;
    }
    let start = (1..=last).rfind(|index| is_time(index - 1) && is_time(*index))?;
    Some(Continuation { kept_tokens: start, steps: (tokens[start] - rules.first_time) as usize })
}

/// The features from the frame `from` on, followed by silence. Silence is 2 below the largest feature, because `LogMel`
/// raises all smaller features to that value.
fn shifted_features(features: &[f32], from: usize) -> Vec<f32> {
    let silence = largest(features) - 2.0;
    let shifted = |bin: &[f32]| {
        bin[from..].iter().copied().chain(std::iter::repeat_n(silence, from)).collect::<Vec<_>>()
    };
    features.chunks_exact(FRAMES).flat_map(shifted).collect()
}

impl Sequence {
    /// The tokens before the text.
    fn prompt(&self, start_token: u32) -> Vec<u32> {
        let mut tokens = self.input.previous.to_vec();
        tokens.push(start_token);
        if let Some(LanguageTokens { task, .. }) = self.input.language_tokens {
            tokens.extend(self.language);
            tokens.push(task);
        }
        tokens
    }

    /// The sampler of the next token; none if the likeliest one is chosen.
    fn sampler(&self) -> Option<Sampler> {
        // Each temperature has its own random numbers.
        let Seed { task, sequence } = self.input.seed;
        let seed = Seed { task: task ^ u64::from(self.temperature.to_bits()), sequence };
        (self.temperature > 0.0).then(|| Sampler::new(Sampling::at(self.temperature), seed, &[]))
    }

    /// When each token of the text was spoken. If `is_whole`, the text has ended, and its last token was computed, too.
    ///
    /// # Errors
    /// The device fails.
    fn token_times(
        &self,
        network: &Whisper,
        slot: Slot,
        is_whole: bool,
        rules: &Rules,
    ) -> Result<Vec<TimeRange>, TaskError> {
        let prompt_tokens = self.input.prompt_tokens();
        let computed = prompt_tokens + self.output.len() - usize::from(!is_whole);
        // A token is chosen at the position before it, and that position's attention shows when it is spoken. The
        // position of the last token is added if it was computed: its attention shows when that token ends.
        let text = (0..self.output.len()).filter(|index| rules.is_text(self.output[*index]));
        let mut positions: Vec<usize> = text.map(|index| prompt_tokens + index - 1).collect();
        let tokens = positions.len();
        positions.extend(positions.last().map(|last| last + 1).filter(|position| *position < computed));
        let window_steps = (self.input.place.seconds / TIMESTAMP_STEP) as usize;
        let keys = window_steps.saturating_sub(self.first_step).clamp(1, POSITIONS);
        let weights = network.alignment(slot.0, &positions, keys);
        let weights = weights.map_err(|error| TaskError::new(TaskErrorKind::Fault, error.to_string()))?;
        Ok(token_times(weights, positions.len(), keys, tokens, self.first_step))
    }

    /// Adds a text that has ended to those before it. Begins the next text of the window, if there is to be one.
    fn finish_text(&mut self, window_text: &WindowText, rules: &Rules) -> Advance<(), WindowText> {
        let has_speech = !has_no_speech(window_text);
        let window_steps = (self.input.place.seconds / TIMESTAMP_STEP) as usize;
        let next = continuation(&window_text.tokens, rules).filter(|next| {
            next.steps >= MIN_STEPS
                && self.first_step + next.steps + MIN_STEPS <= window_steps
                && self.finished.count + 1 < MAX_TEXTS
                && has_speech
        });
        let kept = &window_text.tokens[..next.map_or(window_text.tokens.len(), |next| next.kept_tokens)];
        let finished = &mut self.finished;
        let is_first = finished.count == 0;
        if is_first {
            finished.no_speech = window_text.no_speech;
        }
        // A later text is left out if there is no speech in its part of the window.
        if is_first || has_speech {
            let last_time = rules.first_time + (WINDOW_SECONDS / TIMESTAMP_STEP) as u32;
            let in_window = |id: &u32| {
                if rules.is_time(*id) { (*id + self.first_step as u32).min(last_time) } else { *id }
            };
            finished.tokens.extend(kept.iter().map(in_window));
            let text_tokens = kept.iter().filter(|id| rules.is_text(**id)).count();
            finished.token_times.extend(window_text.token_times.iter().take(text_tokens));
            finished.logprobs += self.logprobs;
            finished.logprob_count += window_text.tokens.len() + 1;
            finished.temperature = finished.temperature.max(window_text.temperature);
        }
        finished.count += 1;
        let avg_logprob = finished.logprobs / finished.logprob_count as f32;
        let Some(Continuation { steps, .. }) = next else {
            let FinishedTexts { tokens, token_times, no_speech, temperature, .. } = std::mem::take(finished);
            let whole = WindowText {
                tokens,
                token_times,
                avg_logprob,
                no_speech,
                temperature,
                ..window_text.clone()
            };
            return Advance::Done(None, whole);
        };
        self.first_step += steps;
        self.input.features = shifted_features(&self.input.features, steps * FRAMES_PER_STEP).into();
        (self.is_encoded, self.fed, self.logprobs) = (false, 0, 0.0);
        self.temperature = self.input.temperature;
        self.output.clear();
        Advance::Again
    }

    /// The current text, without the times of its tokens.
    fn window_text(&self) -> WindowText {
        WindowText {
            place: self.input.place.clone(),
            language: self.language,
            tokens: self.output.clone(),
            avg_logprob: self.logprobs / (self.output.len() + 1) as f32,
            no_speech: self.no_speech,
            temperature: self.temperature,
            token_times: Vec::new(),
        }
    }
}

impl Generate for Transcriber {
    type Prompt = WindowInput;
    type Piece = ();
    type Output = WindowText;

    fn capacity(&self) -> Capacity {
        self.capacity
    }

    fn encoding(&self) -> Encoding {
        ENCODING
    }

    fn open(&mut self, slot: Slot, input: &WindowInput) -> Result<(), TaskError> {
        let sequence = Sequence {
            language: input.language_tokens.and_then(|it| it.language),
            is_encoded: false,
            fed: 0,
            output: Vec::new(),
            logprobs: 0.0,
            no_speech: 0.0,
            temperature: input.temperature,
            first_step: 0,
            chosen: 0,
            best: None,
            finished: FinishedTexts::default(),
            input: input.clone(),
        };
        self.sequences.insert(slot, sequence);
        Ok(())
    }

    fn step(&mut self, rows: &[Row]) -> Result<Advances<Self>, ForwardError> {
        if rows.iter().any(|row| row.feed == Feed::Encode) {
            return self.encode(&rows.iter().map(|row| row.slot).collect::<Vec<_>>());
        }
        let chunks: Vec<Result<Chunk, TaskError>> = rows.iter().map(|row| self.chunk(*row)).collect();
        let (mut ids, mut spans, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        for chunk in chunks.iter().flatten() {
            wanted.extend(chunk.wanted().map(|index| ids.len() + index));
            ids.extend_from_slice(&chunk.ids);
            spans.push(Span { slot: chunk.slot.0, first: chunk.first_position, count: chunk.ids.len() });
        }
        let mut buffer = std::mem::take(&mut self.logits);
        self.network.forward(&ids, &spans, &wanted, &mut buffer)?;
        let vocab_size = buffer.len() / wanted.len().max(1);
        let mut logits = buffer.chunks_exact_mut(vocab_size.max(1));
        let with_logits = chunks.into_iter().map(|chunk| {
            let chunk = chunk?;
            let wanted = chunk.wanted().count();
            Ok((chunk, logits.by_ref().take(wanted).collect::<Vec<_>>()))
        });
        let with_logits: Vec<Result<_, TaskError>> = with_logits.collect();
        // Choosing takes all threads, and changes no sequence. All choices come before all advances, so that a step can be
        // computed again if a choice panics.
        let computed: Vec<Result<Computed, TaskError>> = with_logits
            .into_par_iter()
            .map(|row| row.and_then(|(chunk, logits)| self.choose(chunk, logits.into_iter())))
            .collect();
        let advances = computed.into_iter().map(|row| row.and_then(|row| self.advance(&row))).collect();
        self.logits = buffer;
        Ok(advances)
    }

    fn close(&mut self, slot: Slot) {
        if self.sequences.remove(&slot).is_some() {
            self.network.release(slot.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window_text(avg_logprob: f32, no_speech: f32, temperature: f32) -> WindowText {
        let (place, tokens, token_times) = (WindowPlace::default(), Vec::new(), Vec::new());
        WindowText { place, language: None, tokens, avg_logprob, no_speech, temperature, token_times }
    }

    #[test]
    fn a_doubtful_text_is_written_again_with_the_next_temperature() {
        let input = |temperature| WindowInput {
            features: Arc::default(),
            place: WindowPlace::default(),
            previous: Arc::default(),
            language_tokens: None,
            max_tokens: 1,
            temperature,
            wants_word_times: false,
            seed: Seed { task: 0, sequence: 0 },
        };
        let next = |window_text: &WindowText, text: &str| next_temperature(&input(0.0), window_text, text);
        let (speech, repeated) = ("He was not an ill-disposed young man.", "again and ".repeat(20));
        assert_eq!(next(&window_text(-0.9, 0.1, 0.0), speech), None);
        assert_eq!(next(&window_text(-1.1, 0.1, 0.0), speech), Some(0.2));
        assert_eq!(next(&window_text(-0.9, 0.1, 0.4), &repeated), Some(0.6));
        assert_eq!(next(&window_text(-1.1, 0.1, 1.0), speech), None, "it was written often enough");
        assert_eq!(next(&window_text(-1.1, 0.7, 0.0), speech), None, "there is no speech");
        assert_eq!(next_temperature(&input(0.2), &window_text(-1.1, 0.1, 0.2), speech), None, "as requested");
    }

    #[test]
    fn once_a_window_has_taken_many_tokens_its_best_text_is_kept() {
        let attempt = |avg_logprob, is_repetitive| {
            let text = window_text(avg_logprob, 0.1, 0.0);
            Attempt { text, logprobs: 10.0 * avg_logprob, is_repetitive }
        };
        let (likely, unlikely, repetitive) =
            (attempt(-1.2, false), attempt(-3.0, false), attempt(-0.1, true));
        let again = |best: &Attempt| Verdict::Again { temperature: 0.2, best: best.clone() };
        assert_eq!(repetitive.clone().judge(None, Some(0.2), 224), again(&repetitive));
        assert_eq!(unlikely.clone().judge(Some(repetitive.clone()), Some(0.2), 448), again(&unlikely));
        assert_eq!(likely.clone().judge(Some(unlikely.clone()), Some(0.2), MAX_CHOSEN - 1), again(&likely));
        let kept = repetitive.clone().judge(Some(likely.clone()), Some(0.2), MAX_CHOSEN);
        assert_eq!(kept, Verdict::Keep(likely.clone()));
        let last = unlikely.clone().judge(Some(likely), None, 20);
        assert_eq!(last, Verdict::Keep(unlikely), "the text of the last temperature");
    }

    #[test]
    fn the_average_of_tokens_follows_the_windows() {
        let pace = WindowPace::new(100.0);
        (0..200).for_each(|_| pace.learn(1_000));
        assert!((900.0..=1_000.0).contains(&pace.tokens()), "{}", pace.tokens());
    }

    #[test]
    fn a_text_goes_on_at_its_last_pair_of_times_if_no_single_time_ends_it() {
        let rules = Rules { end: 5, first_time: 10, ..Rules::default() };
        for (tokens, expected) in [
            (&[10, 0, 30, 30][..], Some(Continuation { kept_tokens: 3, steps: 20 })),
            (&[10, 0, 30, 35, 1], Some(Continuation { kept_tokens: 3, steps: 25 })),
            (&[10, 0, 30, 35, 1, 40], None),
            (&[10, 0, 30], None),
            (&[10, 0], None),
            (&[], None),
        ] {
            assert_eq!(continuation(tokens, &rules), expected, "{tokens:?}");
        }
    }

    #[test]
    fn the_features_of_the_rest_of_a_window_are_followed_by_silence() {
        let features: Vec<f32> = (0..2 * FRAMES).map(|index| index as f32 / FRAMES as f32).collect();
        let later = shifted_features(&features, FRAMES - 1);
        assert_eq!((later[0], later[FRAMES]), (features[FRAMES - 1], features[2 * FRAMES - 1]));
        assert!(later[1..FRAMES].iter().all(|it| *it == features[2 * FRAMES - 1] - 2.0));
    }

    #[test]
    fn a_probability_is_the_softmax_of_the_logits() {
        let logits = [0.25_f32, 0.5, 0.25].map(f32::ln);
        assert!((probability(&logits, 1) - 0.5).abs() < 1e-6);
        assert_eq!(probability(&logits, 9), 0.0);
    }
}
