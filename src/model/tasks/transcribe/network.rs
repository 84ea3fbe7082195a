//! The sequences of Whisper: one for each window. Decides when a text ends, when a doubtful one is written again with a
//! higher temperature, and where in the window the next text begins if a text ends too early. A step changes sequences
//! only after all that may fail, so that a failed step can be repeated (`Generate::step`).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::rules::{Chosen, Rules, TIMESTAMP_STEP};
use super::segments::{Heard, Window, compression_ratio, text};
use super::tokens::{Multilingual, SpeechTokens};
use super::words::{Said, said};
use crate::model::load::vocabulary::TokenTexts;
use crate::model::nets::whisper::config::POSITIONS;
use crate::model::nets::whisper::{Span, Whisper};
use crate::model::ops::{exponentials, largest};
use crate::model::random::Seed;
use crate::model::sequences::sampler::Sampler;
use crate::model::sound::RATE;
use crate::model::sound::features::{FRAMES, WINDOW};
use crate::model::{
    Advance, Advances, Capacity, Encoding, Feed, ForwardError, Generate, Row, SizedInput, Slot, TaskError,
    TaskErrorKind,
};
use crate::protocol::generate::Sampling;

/// The temperatures that are tried in turn until a text is not doubtful. OpenAI's program has the same.
const TEMPERATURES: [f32; 6] = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0];
/// Above this compression ratio a text is doubtful, because it repeats itself.
const MAX_COMPRESSION: f32 = 2.4;
/// Below this mean log probability of its tokens, a text is doubtful.
const MIN_LOGPROB: f32 = -1.0;
/// The most texts that are written one after the other for a window, and joined.
const MAX_TEXTS: usize = 6;
/// The shortest part of a window that gets a text of its own, in [`TIMESTAMP_STEP`]s: 1 s.
const MIN_STEPS: usize = 50;
/// Frames of features in a [`TIMESTAMP_STEP`].
const FRAMES_IN_STEP: usize = 2;
/// Above this probability of no speech, a window is taken to have no speech, unless its text is likely.
const MIN_NO_SPEECH: f32 = 0.6;
/// Seconds of a window.
const WINDOW_SECONDS: f64 = (WINDOW / RATE as usize) as f64;
/// Texts of speech are short. Windows are therefore encoded more often than by default while texts are written, so that
/// slots do not stay empty.
const ENCODING: Encoding = Encoding { interval: 4, batch: 4 };

/// One window to transcribe.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// `[mels, FRAMES]`.
    pub features: Arc<[f32]>,
    /// Its place in the recording.
    pub window: Window,
    /// The token that introduces a preceding text, and then that text's tokens. Empty without a preceding text.
    pub previous: Arc<[u32]>,
    /// The tokens of the language and of the task, for a model of several languages.
    pub languages: Option<LanguagePrompt>,
    /// The most tokens of the text.
    pub max_tokens: usize,
    /// The temperature. If it is 0, a doubtful text is written again with a higher one.
    pub temperature: f32,
    /// Whether the times of words are wanted.
    pub words: bool,
    /// The seed of the random choices.
    pub seed: Seed,
}

/// The tokens by which a model of several languages is told what to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LanguagePrompt {
    /// The token of the language. None if it is to be detected.
    pub language: Option<u32>,
    /// The token that says to transcribe or to translate.
    pub task: u32,
}

impl Prompt {
    /// The number of tokens before the text.
    pub fn tokens(&self) -> usize {
        self.previous.len() + 1 + if self.languages.is_some() { 2 } else { 0 }
    }

    /// The prompt with its sizes.
    pub fn sized(self) -> SizedInput<Self> {
        let (tokens, answer_tokens) = (self.tokens(), self.max_tokens);
        SizedInput { encode_tokens: POSITIONS, tokens, answer_tokens, input: self }
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
    texts: TokenTexts,
    open: BTreeMap<Slot, Sequence>,
    /// Reused by the next step.
    logits: Vec<f32>,
}

struct Sequence {
    prompt: Prompt,
    /// The token of the language, once it is known.
    language: Option<u32>,
    is_encoded: bool,
    /// Tokens of the prompt that were fed.
    fed: usize,
    /// The text so far.
    answer: Vec<u32>,
    /// The sum of the log probabilities of its tokens and, once it has ended, of the end token.
    logprobs: f32,
    /// The probability that there is no speech.
    no_speech: f32,
    temperature: f32,
    /// Where in the window the text began, in [`TIMESTAMP_STEP`]s.
    began: usize,
    /// The texts before this one.
    before: Texts,
}

/// Texts of a window that were written one after the other.
#[derive(Default)]
struct Texts {
    /// Their tokens. The times among them count from the beginning of the window.
    tokens: Vec<u32>,
    /// When each token of text was said, if that is wanted.
    said: Vec<Said>,
    logprobs: f32,
    /// How many log probabilities `logprobs` is the sum of.
    count: usize,
    /// The probability that there is no speech, as found with the first text.
    no_speech: f32,
    /// The highest temperature of a text.
    temperature: f32,
    /// How many texts were written.
    number: usize,
}

/// The tokens that a row computes in a step.
struct Chunk {
    slot: Slot,
    /// Tokens of the prompt by which `Sequence::fed` advances.
    take: usize,
    ids: Vec<u32>,
    /// The position of the first token.
    first: usize,
    /// Which of the tokens begins the text, if one does. The logits after it say whether there is speech.
    start: Option<usize>,
    /// Whether a next token is chosen after this chunk.
    is_last: bool,
}

/// What a step computes for a row.
struct Computed {
    chunk: Chunk,
    no_speech: Option<f32>,
    chosen: Option<Chosen>,
}

impl Transcriber {
    /// A network that has heard nothing. It has as many slots as `capacity` has sequences.
    pub fn new(network: Whisper, capacity: Capacity, tokens: &SpeechTokens) -> Self {
        Self {
            network,
            capacity,
            start_token: tokens.start,
            no_speech_token: tokens.no_speech,
            multilingual: tokens.multilingual.clone(),
            rules: tokens.rules.clone(),
            texts: tokens.texts(),
            open: BTreeMap::new(),
            logits: Vec::new(),
        }
    }

    /// Encodes the windows of these slots, and detects their languages where they are not known.
    fn encode(&mut self, slots: &[Slot]) -> Result<Advances<Self>, ForwardError> {
        let waits = |slot: &Slot| self.open.get(slot).is_some_and(|it| !it.is_encoded);
        let slots: Vec<Result<Slot, TaskError>> =
            slots.iter().map(|slot| if waits(slot) { Ok(*slot) } else { Err(out_of_turn()) }).collect();
        let waiting: Vec<Slot> = slots.iter().flatten().copied().collect();
        let windows: Vec<&[f32]> =
            waiting.iter().filter_map(|slot| self.open.get(slot)).map(|it| &*it.prompt.features).collect();
        let numbers: Vec<usize> = waiting.iter().map(|slot| slot.0).collect();
        self.network.encode(&numbers, &windows).map_err(|error| ForwardError::from(&error))?;
        for slot in &waiting {
            if self.open.get(slot).is_some_and(|it| it.prompt.words) {
                self.network.keep_queries(slot.0);
            }
        }
        let unknown: Vec<Slot> = waiting.iter().filter(|slot| self.lacks_language(**slot)).copied().collect();
        let detected = self.detect(&unknown).map_err(|error| ForwardError::from(&error))?;
        // Nothing fails from here on.
        for (slot, language) in unknown.iter().zip(detected) {
            if let Some(sequence) = self.open.get_mut(slot) {
                sequence.language = language;
            }
        }
        for slot in &waiting {
            if let Some(sequence) = self.open.get_mut(slot) {
                sequence.is_encoded = true;
            }
        }
        Ok(slots.into_iter().map(|slot| slot.map(|_| Advance::Fed)).collect())
    }

    fn lacks_language(&self, slot: Slot) -> bool {
        self.open.get(&slot).is_some_and(|it| it.language.is_none() && it.prompt.languages.is_some())
    }

    /// The likeliest language of each slot: the likeliest token of a language after the token that begins a text. That
    /// token is computed at position 0, where the prompt later replaces it.
    fn detect(&mut self, slots: &[Slot]) -> candle_core::Result<Vec<Option<u32>>> {
        let Some(multilingual) = &self.multilingual else { return Ok(vec![None; slots.len()]) };
        let ids = vec![self.start_token; slots.len()];
        let spans: Vec<Span> = slots.iter().map(|slot| Span { slot: slot.0, first: 0, count: 1 }).collect();
        let wanted: Vec<usize> = (0..slots.len()).collect();
        self.network.forward(&ids, &spans, &wanted, &mut self.logits)?;
        let width = self.logits.len() / slots.len().max(1);
        let likeliest = |logits: &[f32]| {
            let of = |id: &u32| logits.get(*id as usize).copied().unwrap_or(f32::NEG_INFINITY);
            multilingual.languages.values().copied().max_by(|a, b| of(a).total_cmp(&of(b)))
        };
        Ok(self.logits.chunks_exact(width.max(1)).map(likeliest).collect())
    }

    /// The tokens that a row computes: those of the prompt, or the last one of the text so far.
    fn feed(&self, Row { slot, feed }: Row) -> Result<Chunk, TaskError> {
        let sequence = self.open.get(&slot).filter(|it| it.is_encoded).ok_or_else(out_of_turn)?;
        let prompt = sequence.tokens(self.start_token);
        let (first, ids, take) = if sequence.fed < prompt.len() {
            let take = feed.tokens().min(prompt.len() - sequence.fed);
            (sequence.fed, prompt[sequence.fed..sequence.fed + take].to_vec(), take)
        } else {
            // There is no text yet, because it is written again: the last token of the prompt is computed once more, to
            // choose the first token.
            let last = sequence.answer.last().or(prompt.last()).copied();
            (prompt.len() + sequence.answer.len() - 1, last.into_iter().collect(), 0)
        };
        let start = if take == 0 { None } else { sequence.prompt.previous.len().checked_sub(first) };
        let is_last = sequence.fed + take == prompt.len();
        Ok(Chunk { slot, take, start: start.filter(|at| *at < ids.len()), ids, first, is_last })
    }

    /// Chooses the next token of a row, and reads the probability that there is no speech. Does not change the
    /// sequence. If the chunk has the token that begins the text, `logits` first yields the logits after that token. If
    /// a token is chosen, it next yields those after the chunk's last token, unless that is the same token. `step`
    /// requests the logits in this order.
    fn choose<'a>(
        &self,
        chunk: Chunk,
        mut logits: impl Iterator<Item = &'a mut [f32]>,
    ) -> Result<Computed, TaskError> {
        let sequence = self.open.get(&chunk.slot).ok_or_else(out_of_turn)?;
        let after_start = chunk.start.and_then(|_| logits.next());
        let no_speech =
            after_start.as_deref().zip(self.no_speech_token).map(|(it, id)| probability(it, id as usize));
        if !chunk.is_last {
            return Ok(Computed { chunk, no_speech, chosen: None });
        }
        // The token that begins the text may be the last one of the prompt.
        let last = if chunk.start == Some(chunk.ids.len() - 1) { after_start } else { logits.next() };
        let mut sampler = sequence.sampler();
        let chosen = last.and_then(|last| self.rules.choose(&sequence.answer, last, sampler.as_mut()));
        let chosen = chosen.ok_or_else(|| {
            let at = sequence.answer.len();
            TaskError::internal(format!("the model gave no finite numbers for token {at} of the text"))
        })?;
        Ok(Computed { chunk, no_speech, chosen: Some(chosen) })
    }

    /// Records what a row has computed. Decides how its text goes on: with a next token, again from its start with a
    /// higher temperature, in the rest of its window, or not at all.
    fn advance(&mut self, computed: &Computed) -> Result<Advance<(), Heard>, TaskError> {
        let Computed { chunk, no_speech, chosen } = computed;
        let sequence = self.open.get_mut(&chunk.slot).ok_or_else(out_of_turn)?;
        sequence.fed += chunk.take;
        sequence.no_speech = no_speech.unwrap_or(sequence.no_speech);
        let Some(Chosen { id, logprob }) = *chosen else { return Ok(Advance::Fed) };
        sequence.logprobs += logprob;
        if id != self.rules.end {
            sequence.answer.push(id);
            if sequence.answer.len() < sequence.prompt.max_tokens {
                return Ok(Advance::More(()));
            }
        }
        let mut heard = sequence.heard();
        match next_temperature(&sequence.prompt, &heard, &text(&heard.tokens, &self.rules, &self.texts)) {
            None => {
                if sequence.prompt.words {
                    let is_whole = id == self.rules.end;
                    heard.said = sequence.said(&self.network, chunk.slot, is_whole, &self.rules)?;
                }
                Ok(sequence.end(&heard, &self.rules))
            }
            Some(temperature) => {
                sequence.temperature = temperature;
                sequence.logprobs = 0.0;
                sequence.answer.clear();
                Ok(Advance::More(()))
            }
        }
    }
}

/// The temperature with which a text is written again. None if the text is not doubtful, if it was written with all
/// temperatures, if there is no speech, or if the request has a temperature other than 0.
fn next_temperature(prompt: &Prompt, heard: &Heard, text: &str) -> Option<f32> {
    let is_unlikely = heard.avg_logprob < MIN_LOGPROB;
    let is_doubtful = is_unlikely || compression_ratio(text) > MAX_COMPRESSION;
    let next = TEMPERATURES.into_iter().find(|it| *it > heard.temperature);
    next.filter(|_| prompt.temperature == 0.0 && is_doubtful && !has_no_speech(heard))
}

/// Whether there is no speech in a window, by OpenAI's rule: "no speech" is likely, and the text is unlikely.
pub fn has_no_speech(heard: &Heard) -> bool {
    heard.no_speech > MIN_NO_SPEECH && heard.avg_logprob < MIN_LOGPROB
}

/// The probability of a token by these logits.
fn probability(logits: &[f32], id: usize) -> f32 {
    let most = largest(logits);
    let sum = exponentials(&mut logits.to_vec(), 1.0);
    logits.get(id).map_or(0.0, |x| (x - most).exp() / sum)
}

/// Where the rest of a window begins.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Rest {
    /// How many tokens of the text are before it.
    kept: usize,
    /// Its distance from the beginning of the text's part of the window, in [`TIMESTAMP_STEP`]s.
    steps: usize,
}

/// Where a text is to go on, by OpenAI's rule: at its last pair of adjacent timestamp tokens, the end of a segment and the
/// start of the next. None if there is no pair, or if the text ends with a single timestamp.
fn rest(tokens: &[u32], rules: &Rules) -> Option<Rest> {
    let is_time = |at: usize| tokens.get(at).is_some_and(|id| rules.is_time(*id));
    let last = tokens.len().checked_sub(1)?;
    if is_time(last) && !last.checked_sub(1).is_some_and(is_time) {
        return None;
    }
    let pair = (1..=last).rfind(|at| is_time(at - 1) && is_time(*at))?;
    Some(Rest { kept: pair, steps: (tokens[pair] - rules.first_time) as usize })
}

/// The features from the frame `from` on, followed by silence. Silence is 2 below the largest feature, because `LogMel`
/// raises all smaller features to that value.
fn shifted_features(features: &[f32], from: usize) -> Vec<f32> {
    let silence = largest(features) - 2.0;
    let rest = |bin: &[f32]| {
        bin[from..].iter().copied().chain(std::iter::repeat_n(silence, from)).collect::<Vec<_>>()
    };
    features.chunks_exact(FRAMES).flat_map(rest).collect()
}

fn out_of_turn() -> TaskError {
    TaskError::internal("a row of a sequence that is not open, or out of turn")
}

impl Sequence {
    /// The tokens before the text.
    fn tokens(&self, start: u32) -> Vec<u32> {
        let mut tokens = self.prompt.previous.to_vec();
        tokens.push(start);
        if let Some(LanguagePrompt { task, .. }) = self.prompt.languages {
            tokens.extend(self.language);
            tokens.push(task);
        }
        tokens
    }

    /// What draws the next token; none if the likeliest is chosen.
    fn sampler(&self) -> Option<Sampler> {
        // Each temperature draws other numbers.
        let Seed { task, sequence } = self.prompt.seed;
        let seed = Seed { task: task ^ u64::from(self.temperature.to_bits()), sequence };
        (self.temperature > 0.0).then(|| Sampler::new(Sampling::at(self.temperature), seed, &[]))
    }

    /// When each token of the text was said. `is_whole`: the text has its end, so that all of its tokens were computed.
    ///
    /// # Errors
    /// The device fails.
    fn said(
        &self,
        network: &Whisper,
        slot: Slot,
        is_whole: bool,
        rules: &Rules,
    ) -> Result<Vec<Said>, TaskError> {
        let (before, computed) = (self.prompt.tokens(), self.answer.len() - usize::from(!is_whole));
        // The attention that belongs to a token is that of the position before it, at which it was chosen. The last
        // token's own position, if it was computed, is added: it tells when that token ends.
        let text = (0..self.answer.len()).filter(|at| self.answer[*at] < rules.end);
        let mut positions: Vec<usize> = text.map(|at| before + at - 1).collect();
        let tokens = positions.len();
        positions.extend(positions.last().map(|last| last + 1).filter(|at| *at < before + computed));
        let sound = (self.prompt.window.seconds / TIMESTAMP_STEP) as usize;
        let keys = sound.saturating_sub(self.began).clamp(1, POSITIONS);
        let weights = network.alignment(slot.0, &positions, keys);
        let weights = weights.map_err(|error| TaskError::new(TaskErrorKind::Fault, error.to_string()))?;
        Ok(said(weights, positions.len(), keys, tokens, self.began))
    }

    /// Adds a text that has ended to those before it. Begins again in the rest of the window, if there is one.
    fn end(&mut self, heard: &Heard, rules: &Rules) -> Advance<(), Heard> {
        let has_speech = !has_no_speech(heard);
        let window_steps = (heard.window.seconds / TIMESTAMP_STEP) as usize;
        let rest = rest(&heard.tokens, rules).filter(|rest| {
            rest.steps >= MIN_STEPS
                && self.began + rest.steps + MIN_STEPS <= window_steps
                && self.before.number + 1 < MAX_TEXTS
                && has_speech
        });
        let kept = rest.map_or(heard.tokens.len(), |rest| rest.kept);
        let before = &mut self.before;
        let is_first = before.number == 0;
        if is_first {
            before.no_speech = heard.no_speech;
        }
        // Without speech in the rest of a window, its text is left out.
        if is_first || has_speech {
            let last = rules.first_time + (WINDOW_SECONDS / TIMESTAMP_STEP) as u32;
            let shifted =
                |id: &u32| if rules.is_time(*id) { (*id + self.began as u32).min(last) } else { *id };
            before.tokens.extend(heard.tokens[..kept].iter().map(shifted));
            let words = heard.tokens[..kept].iter().filter(|id| **id < rules.end).count();
            before.said.extend(heard.said.iter().take(words));
            before.logprobs += self.logprobs;
            before.count += heard.tokens.len() + 1;
            before.temperature = before.temperature.max(heard.temperature);
        }
        before.number += 1;
        let Some(Rest { steps, .. }) = rest else {
            let Texts { tokens, said, logprobs, count, no_speech, temperature, .. } = std::mem::take(before);
            let avg_logprob = logprobs / count as f32;
            return Advance::Done(
                None,
                Heard { tokens, said, avg_logprob, no_speech, temperature, ..heard.clone() },
            );
        };
        self.began += steps;
        self.prompt.features = shifted_features(&self.prompt.features, steps * FRAMES_IN_STEP).into();
        (self.is_encoded, self.fed, self.logprobs) = (false, 0, 0.0);
        self.temperature = self.prompt.temperature;
        self.answer.clear();
        Advance::Again
    }

    fn heard(&self) -> Heard {
        Heard {
            window: self.prompt.window.clone(),
            language: self.language,
            tokens: self.answer.clone(),
            avg_logprob: self.logprobs / (self.answer.len() + 1) as f32,
            no_speech: self.no_speech,
            temperature: self.temperature,
            said: Vec::new(),
        }
    }
}

impl Generate for Transcriber {
    type Prompt = Prompt;
    type Piece = ();
    type Output = Heard;

    fn capacity(&self) -> Capacity {
        self.capacity
    }

    fn encoding(&self) -> Encoding {
        ENCODING
    }

    fn open(&mut self, slot: Slot, prompt: &Prompt) -> Result<(), TaskError> {
        let sequence = Sequence {
            language: prompt.languages.and_then(|it| it.language),
            is_encoded: false,
            fed: 0,
            answer: Vec::new(),
            logprobs: 0.0,
            no_speech: 0.0,
            temperature: prompt.temperature,
            began: 0,
            before: Texts::default(),
            prompt: prompt.clone(),
        };
        self.open.insert(slot, sequence);
        Ok(())
    }

    fn step(&mut self, rows: &[Row]) -> Result<Advances<Self>, ForwardError> {
        if rows.iter().any(|row| row.feed == Feed::Encode) {
            return self.encode(&rows.iter().map(|row| row.slot).collect::<Vec<_>>());
        }
        let chunks: Vec<Result<Chunk, TaskError>> = rows.iter().map(|row| self.feed(*row)).collect();
        let (mut ids, mut spans, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        for chunk in chunks.iter().flatten() {
            let (first, last) = (ids.len(), ids.len() + chunk.ids.len() - 1);
            wanted.extend(chunk.start.map(|at| first + at));
            wanted.extend(Some(last).filter(|_| chunk.is_last && chunk.start != Some(last - first)));
            ids.extend_from_slice(&chunk.ids);
            spans.push(Span { slot: chunk.slot.0, first: chunk.first, count: chunk.ids.len() });
        }
        let mut all = std::mem::take(&mut self.logits);
        self.network.forward(&ids, &spans, &wanted, &mut all).map_err(|error| ForwardError::from(&error))?;
        let width = all.len() / wanted.len().max(1);
        let mut logits = all.chunks_exact_mut(width.max(1));
        // All choices, which may fail, come before all advances, so that a step that fails can be computed again.
        let computed: Vec<Result<Computed, TaskError>> =
            chunks.into_iter().map(|chunk| self.choose(chunk?, &mut logits)).collect();
        let advances = computed.into_iter().map(|row| row.and_then(|row| self.advance(&row))).collect();
        self.logits = all;
        Ok(advances)
    }

    fn close(&mut self, slot: Slot) {
        if self.open.remove(&slot).is_some() {
            self.network.release(slot.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(avg_logprob: f32, no_speech: f32, temperature: f32) -> Heard {
        let (window, tokens, said) = (Window::default(), Vec::new(), Vec::new());
        Heard { window, language: None, tokens, avg_logprob, no_speech, temperature, said }
    }

    #[test]
    fn a_doubtful_text_is_written_again_with_the_next_temperature() {
        let prompt = |temperature| Prompt {
            features: Arc::default(),
            window: Window::default(),
            previous: Arc::default(),
            languages: None,
            max_tokens: 1,
            temperature,
            words: false,
            seed: Seed { task: 0, sequence: 0 },
        };
        let next = |heard: &Heard, text: &str| next_temperature(&prompt(0.0), heard, text);
        let (speech, repeated) = ("He was not an ill-disposed young man.", "again and ".repeat(20));
        assert_eq!(next(&heard(-0.9, 0.1, 0.0), speech), None);
        assert_eq!(next(&heard(-1.1, 0.1, 0.0), speech), Some(0.2));
        assert_eq!(next(&heard(-0.9, 0.1, 0.4), &repeated), Some(0.6));
        assert_eq!(next(&heard(-1.1, 0.1, 1.0), speech), None, "it was written often enough");
        assert_eq!(next(&heard(-1.1, 0.7, 0.0), speech), None, "there is no speech");
        assert_eq!(next_temperature(&prompt(0.2), &heard(-1.1, 0.1, 0.2), speech), None, "as requested");
    }

    #[test]
    fn a_text_goes_on_at_its_last_pair_of_times_unless_it_ends_with_a_single_time() {
        let rules = Rules { end: 5, first_time: 10, ..Rules::default() };
        for (tokens, expected) in [
            (&[10, 0, 30, 30][..], Some(Rest { kept: 3, steps: 20 })),
            (&[10, 0, 30, 35, 1], Some(Rest { kept: 3, steps: 25 })),
            (&[10, 0, 30, 35, 1, 40], None),
            (&[10, 0, 30], None),
            (&[10, 0], None),
            (&[], None),
        ] {
            assert_eq!(rest(tokens, &rules), expected, "{tokens:?}");
        }
    }

    #[test]
    fn the_features_of_the_rest_of_a_window_are_followed_by_silence() {
        let features: Vec<f32> = (0..2 * FRAMES).map(|at| at as f32 / FRAMES as f32).collect();
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
