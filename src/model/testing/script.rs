//! A generator that computes nothing: each task describes how its sequence runs. It serves to try out a deployment that
//! streams, and to test continuous batching. The `model` setting is `script`, or `script?` with options joined by `&`:
//! `sequences=16` (at once), `tokens=16384` (of all sequences), `context=1024` (tokens of one sequence),
//! `encode_interval=8` (at least this many token steps between two encoded windows, while sequences decode),
//! `encode_batch=4` (at most this many windows encoded together, while none decodes), `faults` (for tests). The numbers
//! here are the defaults.
//!
//! A body is `{"prompt": 12, "max_tokens": 20}`: the number of tokens of the prompt and of the answer. The answer is
//! `0 1 2 …`. Further fields:
//!
//! - `stream`: the reply is sent in parts.
//! - `step_ms`: the least duration of a step with this sequence.
//! - `encode_ms`: how long the encoding of its window takes, before its prompt is fed. The prompt may then be 0.
//!   Windows that are encoded together take the sum of their times.
//! - `encode_at`: before the piece with this number, which is at least 1, the window is encoded a second time. The
//!   first piece has the number 0.
//! - `content_type`: the media type of the parts and of the reply. Their bodies are then the numbers alone, not JSON.
//! - `sequences`: a list that replaces `max_tokens`. There is one sequence for each of its numbers, with this many
//!   tokens. The reply joins their answers, and each answer is one part.
//! - `empty_slices`: the inputs are made on demand, after this many slices without any.
//!
//! Only with `faults`:
//!
//! - `fail`: the fault of a step that begins when the sequence has produced `at` pieces (default 0). `error`: the step
//!   fails. `row`: the sequence fails. `panic`: the step panics. `oom`: the step runs out of memory if it has more than
//!   `fits` tokens. `device`: the device fails. `exit`: the process aborts. `stall`: the step takes `stall_ms`.
//! - `fail_encode`: the fault of the step that encodes the window. The values are the same, but with `oom` the step
//!   fails if it has more than `fits` windows.

use std::collections::BTreeMap;
use std::iter;
use std::mem;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;

use super::echo;
use crate::model::family::{Example, Family, Sample, Serves};
use crate::model::{
    Advance, Advances, Announced, Body, Capacity, Device, Effort, Encoding, Feed, ForwardError, Generate,
    Inputs, LoadError, LoadSpec, Message, Preprocessed, Processor, Route, Row, SizedInput, Slot, Streaming,
    TaskError, TaskErrorKind, clock,
};

/// The `model` setting of a script pool.
pub const SCRIPT: &str = "script";

/// Generates as many tokens as each task requests.
pub static FAMILY: Family = Family {
    name: SCRIPT,
    routes: echo::ANY_JSON,
    fields: &[],
    serves: Serves::ItsName,
    options: &[],
    sample: |texts| {
        let words: usize = texts.iter().map(|text| text.split_whitespace().count()).sum();
        let body = json!({"prompt": words.clamp(1, MAX_TOKENS), "max_tokens": SAMPLE_TOKENS});
        Sample { url: None, ..Sample::json(Route::ANY, &body, 1) }
    },
    example: Example { model: SCRIPT, options: &[] },
};

/// The number of tokens of the answer in a sample.
const SAMPLE_TOKENS: usize = 32;
/// The largest number of tokens of a prompt or an answer.
const MAX_TOKENS: usize = 1_000_000;
/// The largest `encode_ms`.
const MAX_ENCODE_MS: u64 = 600_000;

/// Decodes scripts and writes replies.
#[derive(Debug)]
pub struct ScriptProcessor {
    faults: bool,
    max_inputs: usize,
}

/// Runs scripts.
#[derive(Debug)]
pub struct ScriptNetwork {
    capacity: Capacity,
    encoding: Encoding,
    open: BTreeMap<Slot, Sequence>,
}

#[derive(Debug)]
struct Sequence {
    script: Script,
    is_encoded: bool,
    /// Tokens of the prompt that were fed.
    fed: usize,
    /// Pieces that were produced.
    produced: usize,
    /// Whether its window was encoded a second time, or will be.
    is_second_window: bool,
}

/// A task's description of its sequence.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Script {
    #[serde(default = "one")]
    prompt: usize,
    #[serde(default = "one")]
    max_tokens: usize,
    sequences: Vec<usize>,
    empty_slices: usize,
    stream: bool,
    step_ms: u64,
    encode_ms: u64,
    encode_at: usize,
    content_type: Option<String>,
    fail: Option<Fault>,
    fail_encode: Option<Fault>,
    at: usize,
    fits: usize,
    stall_ms: u64,
}

fn one() -> usize {
    1
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Fault {
    Error,
    Row,
    Panic,
    Oom,
    Device,
    Exit,
    Stall,
}

/// Loads the model with the options in the source.
///
/// # Errors
/// [`LoadError::Unsupported`] for another source.
pub fn load(spec: &LoadSpec, _: &Device) -> Result<(ScriptProcessor, ScriptNetwork), LoadError> {
    let unsupported = |option: &str| {
        spec.unsupported(format!(
            "{option:?} is no option; there are sequences=N, tokens=N, context=N, encode_interval=N, encode_batch=N \
             and faults"
        ))
    };
    let options = match spec.source.strip_prefix(SCRIPT) {
        Some("") => "",
        Some(rest) => rest.strip_prefix('?').ok_or_else(|| unsupported(rest))?,
        None => return Err(unsupported(&spec.source)),
    };
    let mut capacity = Capacity { sequences: 16, tokens: 16 * 1_024, context: 1_024 };
    let (mut encoding, mut faults) = (Encoding::default(), false);
    for option in options.split('&').filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let number = || value.parse().map_err(|_| unsupported(option));
        match name {
            "sequences" => capacity.sequences = number()?,
            "tokens" => capacity.tokens = number()?,
            "context" => capacity.context = number()?,
            "encode_interval" => encoding.interval = number()?,
            "encode_batch" => encoding.batch = number()?,
            "faults" => faults = true,
            _ => return Err(unsupported(option)),
        }
    }
    let max_inputs = spec.max_inputs;
    Ok((ScriptProcessor { faults, max_inputs }, ScriptNetwork { capacity, encoding, open: BTreeMap::new() }))
}

impl Processor for ScriptProcessor {
    type Context = Script;
    type Input = Script;
    type Piece = usize;
    type Output = usize;

    fn routes(&self) -> &[Route] {
        echo::ANY_JSON
    }

    fn probe(&self) -> Option<Message> {
        Some(Message { body: r#"{"prompt":2,"max_tokens":2}"#.into(), ..Message::default() })
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let body: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(&message.body).map_err(|error| bad_input(&error))?;
        let mut script: Script = serde_json::from_value(body.into()).map_err(|error| bad_input(&error))?;
        if script.sequences.len() > self.max_inputs {
            let (count, max) = (script.sequences.len(), self.max_inputs);
            let message = format!("there are {count} sequences; this pool takes at most {max} in a task");
            return Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param("sequences"));
        }
        let encodes = script.encode_ms > 0;
        let answers = script.sequences.iter().map(|count| ("sequences", *count, 1));
        let counts = [("prompt", script.prompt, usize::from(!encodes)), ("max_tokens", script.max_tokens, 1)];
        for (name, count, min) in counts.into_iter().chain(answers) {
            if !(min..=MAX_TOKENS).contains(&count) {
                let message = format!("{name} must be {min} to {MAX_TOKENS}, got {count}");
                return Err(TaskError::bad_input(name, message));
            }
        }
        if script.encode_ms > MAX_ENCODE_MS {
            let message = format!("encode_ms must be at most {MAX_ENCODE_MS}, got {}", script.encode_ms);
            return Err(TaskError::bad_input("encode_ms", message));
        }
        if !self.faults {
            (script.fail, script.fail_encode) = (None, None);
        }
        let context = script.clone();
        // Each input has a copy of the script without its fields of unbounded length.
        script.content_type = None;
        let mut lengths = mem::take(&mut script.sequences);
        if lengths.is_empty() {
            lengths.push(script.max_tokens);
        }
        let input = |max_tokens: usize| {
            let input = Script { max_tokens, ..script.clone() };
            SizedInput {
                input,
                encode_tokens: usize::from(encodes),
                tokens: script.prompt,
                answer_tokens: max_tokens,
            }
        };
        let inputs: Vec<_> = lengths.into_iter().map(input).collect();
        let inputs = match script.empty_slices {
            0 => inputs.into(),
            count => {
                let empty = iter::repeat_with(|| Ok(Vec::new())).take(count);
                Inputs::Slices(Box::new(empty.chain(iter::once(Ok(inputs)))))
            }
        };
        Ok((context, inputs))
    }

    fn announced(&self, script: &Script) -> Option<Announced> {
        let inputs = script.sequences.len().max(1);
        (script.empty_slices > 0).then_some(Announced { inputs, answer_tokens: script.max_tokens })
    }

    fn effort(&self, message: &Message) -> Effort {
        Effort::brief_if(message.body.len() <= echo::BRIEF_BODY)
    }

    fn streaming(&self, script: &Script) -> Streaming {
        let parts = if script.sequences.is_empty() { Streaming::Pieces } else { Streaming::Outputs };
        parts.if_requested(script.stream)
    }

    fn are_parts_brief(&self, script: &Script) -> bool {
        script.sequences.is_empty()
    }

    fn parts(&self, script: &mut Script, _: usize, pieces: Vec<usize>) -> Vec<Body> {
        vec![body(script, json!({"object": "script.chunk", "text": text(&pieces)}))]
    }

    fn output_parts(&self, script: &mut Script, index: usize, tokens: &usize) -> Vec<Body> {
        let text = text(&(0..*tokens).collect::<Vec<_>>());
        vec![body(script, json!({"object": "script.chunk", "index": index, "text": text}))]
    }

    fn finish(&self, script: Script, outputs: Vec<usize>) -> Result<Body, TaskError> {
        let prompts = outputs.len() * script.prompt;
        let pieces: Vec<usize> = outputs.into_iter().flat_map(|tokens| 0..tokens).collect();
        let usage = json!({"prompt_tokens": prompts, "completion_tokens": pieces.len()});
        Ok(body(&script, json!({"object": "script", "text": text(&pieces), "usage": usage})))
    }
}

/// The body with these `fields`, in the media type that the script requests.
fn body(script: &Script, fields: serde_json::Value) -> Body {
    match &script.content_type {
        Some(content_type) => {
            Body::new(content_type.clone(), fields["text"].as_str().unwrap_or_default().to_owned())
        }
        None => Body::json(fields.to_string()),
    }
}

fn bad_input(error: &serde_json::Error) -> TaskError {
    TaskError::new(TaskErrorKind::BadInput, format!("the body is no script: {error}"))
}

fn text(pieces: &[usize]) -> String {
    pieces.iter().map(|piece| format!("{piece} ")).collect()
}

impl Sequence {
    /// The fault that a step with this feed has.
    fn fault(&self, feed: Feed) -> Option<Fault> {
        match feed {
            Feed::Encode => self.script.fail_encode,
            Feed::Tokens(_) => self.script.fail.filter(|_| self.produced == self.script.at),
        }
    }

    /// The least duration of a step with this feed.
    fn time(&self, feed: Feed) -> Duration {
        Duration::from_millis(if feed == Feed::Encode { self.script.encode_ms } else { self.script.step_ms })
    }

    fn advance(&mut self, feed: Feed) -> Result<Advance<usize, usize>, TaskError> {
        if self.fault(feed) == Some(Fault::Row) {
            return Err(TaskError::new(TaskErrorKind::Fault, "as the task asked for"));
        }
        let encodes = self.script.encode_ms > 0 && !self.is_encoded;
        let take = match feed {
            Feed::Encode if encodes => {
                self.is_encoded = true;
                return Ok(Advance::Fed);
            }
            Feed::Tokens(take) if !encodes => take,
            wrong => {
                return Err(TaskError::new(TaskErrorKind::Internal, format!("{wrong:?} is out of turn")));
            }
        };
        if self.fed < self.script.prompt {
            self.fed += take;
            if self.fed < self.script.prompt {
                return Ok(Advance::Fed);
            }
        }
        if self.script.encode_at > 0 && self.produced == self.script.encode_at && !self.is_second_window {
            (self.is_encoded, self.fed, self.is_second_window) = (false, 0, true);
            return Ok(Advance::Again);
        }
        let piece = self.produced;
        self.produced += 1;
        let is_last = self.produced == self.script.max_tokens;
        Ok(if is_last { Advance::Done(Some(piece), self.produced) } else { Advance::More(piece) })
    }
}

impl Generate for ScriptNetwork {
    type Prompt = Script;
    type Piece = usize;
    type Output = usize;

    fn capacity(&self) -> Capacity {
        self.capacity
    }

    fn encoding(&self) -> Encoding {
        self.encoding
    }

    fn open(&mut self, slot: Slot, script: &Script) -> Result<(), TaskError> {
        let is_free = slot.0 < self.capacity.sequences && !self.open.contains_key(&slot);
        if !is_free {
            return Err(TaskError::new(TaskErrorKind::Internal, format!("slot {} is not free", slot.0)));
        }
        self.open.insert(
            slot,
            Sequence {
                script: script.clone(),
                is_encoded: false,
                fed: 0,
                produced: 0,
                is_second_window: false,
            },
        );
        Ok(())
    }

    fn step(&mut self, rows: &[Row]) -> Result<Advances<Self>, ForwardError> {
        let message = || "as the task asked for".to_owned();
        let tokens: usize = rows.iter().map(|row| row.feed.tokens()).sum();
        let windows = rows.iter().filter(|row| row.feed == Feed::Encode).count();
        if windows != 0 && windows != rows.len() {
            return Err(ForwardError::Failed("a step has encode rows beside other rows".into()));
        }
        let mut time = Duration::ZERO;
        for row in rows {
            let sequence = self.open.get(&row.slot);
            let sequence = sequence.ok_or_else(|| ForwardError::Failed("a row of a closed slot".into()))?;
            let (script, row_time) = (&sequence.script, sequence.time(row.feed));
            time = if windows > 0 { time + row_time } else { time.max(row_time) };
            match sequence.fault(row.feed) {
                None | Some(Fault::Row) => {}
                Some(Fault::Error) => return Err(ForwardError::Failed(message())),
                Some(Fault::Oom) if tokens.max(windows) > script.fits => {
                    return Err(ForwardError::OutOfMemory(message()));
                }
                Some(Fault::Oom) => {}
                Some(Fault::Device) => return Err(ForwardError::Device(message())),
                Some(Fault::Panic) => panic!("{}", message()),
                Some(Fault::Exit) => std::process::abort(),
                Some(Fault::Stall) => time = time.max(Duration::from_millis(script.stall_ms)),
            }
        }
        if !time.is_zero() {
            clock::pass(time);
        }
        let held: usize = self.open.values().map(|it| it.fed + it.produced).sum();
        if held + tokens > self.capacity.tokens {
            return Err(ForwardError::Failed(format!(
                "{held} tokens are held, and {tokens} more exceed the capacity"
            )));
        }
        let advance = |row: &Row| match self.open.get_mut(&row.slot) {
            Some(sequence) => sequence.advance(row.feed),
            None => Err(TaskError::new(TaskErrorKind::Internal, "a row of a closed slot")),
        };
        Ok(rows.iter().map(advance).collect())
    }

    fn close(&mut self, slot: Slot) {
        self.open.remove(&slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_encoded_once_and_first_and_its_prompt_may_be_empty() {
        let (processor, mut network) = load(&LoadSpec::new(SCRIPT), &Device::Cpu).unwrap();
        let message =
            Message { body: r#"{"prompt":0,"max_tokens":1,"encode_ms":1}"#.into(), ..Message::default() };
        let (_, inputs) = processor.preprocess(&message).unwrap();
        let sized = inputs.all().unwrap().remove(0);
        assert_eq!((sized.encode_tokens, sized.tokens, sized.answer_tokens), (1, 0, 1));
        network.open(Slot(0), &sized.input).unwrap();
        let mut step = |feed| network.step(&[Row { slot: Slot(0), feed }]).unwrap().remove(0);
        assert!(step(Feed::Tokens(1)).is_err());
        assert_eq!(step(Feed::Encode), Ok(Advance::Fed));
        assert!(step(Feed::Encode).is_err());
        assert_eq!(step(Feed::Tokens(1)), Ok(Advance::Done(Some(0), 1)));
    }

    #[test]
    fn options_are_read_and_unknown_ones_are_named_in_the_error() {
        let (_, network) = load(&LoadSpec::new("script?sequences=2&context=9&faults"), &Device::Cpu).unwrap();
        assert_eq!((network.capacity.sequences, network.capacity.context), (2, 9));
        for bad in ["script?slots=2", "script?tokens=many", "scripted"] {
            let error = load(&LoadSpec::new(bad), &Device::Cpu).unwrap_err().to_string();
            assert!(error.contains("is no option"), "{error}");
        }
    }

    #[test]
    fn a_sequence_follows_its_script_after_its_prompt_is_fed() {
        let (processor, mut network) = load(&LoadSpec::new(SCRIPT), &Device::Cpu).unwrap();
        let message = Message { body: r#"{"prompt":3,"max_tokens":2}"#.into(), ..Message::default() };
        let (context, inputs) = processor.preprocess(&message).unwrap();
        let inputs = inputs.all().unwrap();
        let slot = Slot(4);
        network.open(slot, &inputs[0].input).unwrap();
        assert!(network.open(slot, &inputs[0].input).is_err(), "it is taken");
        let mut step =
            |take| network.step(&[Row { slot, feed: Feed::Tokens(take) }]).unwrap().remove(0).unwrap();
        assert_eq!(step(2), Advance::Fed);
        assert_eq!(step(1), Advance::More(0));
        assert_eq!(step(1), Advance::Done(Some(1), 2));
        let body = processor.finish(context, vec![2]).unwrap();
        let body: serde_json::Value = serde_json::from_slice(&body.bytes).unwrap();
        assert_eq!(body["text"], "0 1 ");
        for bad in [r#"{"prompt":0}"#, r#"{"max_tokens":2000000}"#, r#"{"encode_ms":600001}"#, "[]"] {
            let message = Message { body: bad.into(), ..Message::default() };
            assert!(processor.preprocess(&message).is_err(), "{bad}");
        }
    }
}
