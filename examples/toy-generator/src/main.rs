//! Goes on with a word, letter by letter, and streams what it finds:
//!
//!     cargo run -p toy-generator -- launch --set 'pool[0].model=letters'
//!
//! The network is a table of which letter follows which. Its state, a sequence's KV cache, is the last letter.

use std::collections::BTreeMap;
use std::process::ExitCode;

use candle_core::{Device, Result as CandleResult, Tensor};
use sconce::app::{self, Registry};
use sconce::model::{
    Advance, Advances, Body, Capacity, ForwardError, Generate, LoadError, LoadSpec, Message, Preprocessed,
    Processor, Route, Row, SizedInput, Slot, Streaming, TaskError, TaskErrorKind,
};
use serde_json::{Value, json};

const LEARNT_FROM: &[u8] = b"a sconce holds candles and a candle holds a light so a sconce holds a light ";

/// Requests → letters; letters → replies and their parts.
struct Texts;

/// Letters, and how many are to follow.
struct Prompt(Vec<u8>, usize);

/// `[256, 256]`: how often a letter (column) follows another (row); and the running sequences.
struct Follows(Tensor, BTreeMap<Slot, Sequence>);

/// What is left of the prompt and of the answer, the last letter, and the answer so far.
struct Sequence(Vec<u8>, usize, u8, String);

impl Processor for Texts {
    type Context = bool;
    type Input = Prompt;
    type Piece = char;
    type Output = String;

    fn routes(&self) -> &[Route] {
        &[const { Route::json("/v1/completions") }]
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let body: Value = serde_json::from_slice(&message.body)
            .map_err(|error| TaskError::new(TaskErrorKind::Undecodable, error.to_string()))?;
        let letters = body["prompt"].as_str().unwrap_or_default().as_bytes().to_vec();
        if letters.is_empty() {
            return Err(TaskError::bad_input("prompt", "prompt must be a text, not empty"));
        }
        let max_tokens = body["max_tokens"].as_u64().unwrap_or(16).clamp(1, 256) as usize;
        let (tokens, answer_tokens, stream) = (letters.len(), max_tokens, body["stream"] == true);
        let prompt =
            SizedInput { input: Prompt(letters, max_tokens), encode_tokens: 0, tokens, answer_tokens };
        Ok((stream, vec![prompt].into()))
    }

    fn streaming(&self, stream: &bool) -> Streaming {
        Streaming::Pieces.if_requested(*stream)
    }

    fn parts(&self, _: &mut bool, index: usize, pieces: Vec<char>) -> Vec<Body> {
        let choices = [json!({"index": index, "text": String::from_iter(pieces)})];
        vec![Body::json(json!({"object": "text_completion", "choices": choices}).to_string())]
    }

    fn finish(&self, _: bool, texts: Vec<String>) -> Result<Body, TaskError> {
        let choices = [json!({"index": 0, "text": texts.concat(), "finish_reason": "length"})];
        Ok(Body::json(json!({"object": "text_completion", "choices": choices}).to_string()))
    }
}

impl Generate for Follows {
    type Prompt = Prompt;
    type Piece = char;
    type Output = String;

    fn capacity(&self) -> Capacity {
        Capacity { sequences: 16, tokens: 16 * 1_024, context: 1_024 }
    }

    fn open(&mut self, slot: Slot, prompt: &Prompt) -> Result<(), TaskError> {
        self.1.insert(slot, Sequence(prompt.0.clone(), prompt.1, b' ', String::new()));
        Ok(())
    }

    fn step(&mut self, rows: &[Row]) -> Result<Advances<Self>, ForwardError> {
        // All that can fail comes first: after an error, each sequence is where it was.
        let fed = |row: &Row| {
            self.1
                .get(&row.slot)
                .map_or(b' ', |it| *it.0.get(..row.feed.tokens()).and_then(<[_]>::last).unwrap_or(&it.2))
        };
        let letters: Vec<u32> = rows.iter().map(|row| u32::from(fed(row))).collect();
        let next = || -> CandleResult<Vec<u32>> {
            self.0.index_select(&Tensor::new(letters.as_slice(), self.0.device())?, 0)?.argmax(1)?.to_vec1()
        };
        let next = next().map_err(|error| ForwardError::from(&error))?;
        let missing = || TaskError::new(TaskErrorKind::Internal, "no such sequence");
        let advance = |(row, next): (&Row, u32)| {
            let Sequence(prompt, left, last, answer) = self.1.get_mut(&row.slot).ok_or_else(missing)?;
            prompt.drain(..row.feed.tokens().min(prompt.len()));
            if !prompt.is_empty() {
                return Ok(Advance::Fed);
            }
            (*last, *left) = (next as u8, *left - 1);
            let piece = char::from(*last);
            answer.push(piece);
            Ok(if *left == 0 { Advance::Done(Some(piece), answer.clone()) } else { Advance::More(piece) })
        };
        Ok(rows.iter().zip(next).map(advance).collect())
    }

    fn close(&mut self, slot: Slot) {
        self.1.remove(&slot);
    }
}

fn load(spec: &LoadSpec, device: &Device) -> Result<(Texts, Follows), LoadError> {
    let mut counts = vec![0_f32; 256 * 256];
    // The settings: [pool.options] text = "…"
    let given = spec.options.get("text").and_then(Value::as_str);
    for pair in given.map_or(LEARNT_FROM, str::as_bytes).windows(2) {
        counts[usize::from(pair[0]) * 256 + usize::from(pair[1])] += 1.0;
    }
    let table = Tensor::from_vec(counts, (256, 256), device).map_err(|error| spec.failed(error))?;
    Ok((Texts, Follows(table, BTreeMap::new())))
}

fn main() -> ExitCode {
    app::main(&Registry::default().with_generate("letters", load))
}
