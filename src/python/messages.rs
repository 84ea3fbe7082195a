//! What the worker and the process that holds a class in Python say to each other: the headers of their frames, and answers
//! with the buffers of their frames. Owns no state.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::frames::read_frame;

/// The version of these messages.
pub(super) const VERSION: u32 = 1;

/// From the worker. `drop` lists the ids of tasks that the process must forget.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ToProcess<'a> {
    /// The first frame on the model channel.
    Start(&'a StartHeader<'a>),
    /// On the side channel: make the inputs of a task, whose body is the buffer.
    Prepare { task: u64, url: &'a str, content_type: &'a str, headers: Map<String, Value>, drop: Vec<u64> },
    /// On the side channel: write the reply of a task.
    Finish { task: u64, drop: Vec<u64> },
    /// On the side channel, without an answer: only forget tasks.
    Drop { drop: Vec<u64> },
    /// On the model channel: compute a batch.
    Forward { inputs: &'a [InputRange] },
    /// On the model channel: start the stream of a task.
    Stream { task: u64 },
    /// On the model channel: cancel the stream of a task. It answers `ended`, or `done` if it has just ended.
    Cancel { task: u64, reason: &'a str },
}

/// Adjacent inputs of a task. Written as a list of three numbers.
#[derive(Clone, Copy, Serialize)]
#[serde(into = "(u64, u32, u32)")]
pub(super) struct InputRange {
    pub(super) task: u64,
    /// The index of the first input in its task.
    pub(super) first: u32,
    pub(super) count: u32,
}

impl From<InputRange> for (u64, u32, u32) {
    fn from(InputRange { task, first, count }: InputRange) -> Self {
        (task, first, count)
    }
}

/// What is to be loaded, and where. Either `module` or `file` is given.
#[derive(Serialize)]
pub(super) struct StartHeader<'a> {
    pub(super) version: u32,
    /// `serve`, or `describe` if the process must end once it has described the class.
    pub(super) mode: &'a str,
    pub(super) module: Option<&'a str>,
    pub(super) file: Option<&'a str>,
    pub(super) class: &'a str,
    /// `cpu`, or `cuda` for the only GPU that the process sees.
    pub(super) device: &'a str,
    /// `cpu`, or the UUID of the GPU.
    pub(super) device_name: &'a str,
    pub(super) dtype: &'a str,
    pub(super) threads: usize,
    pub(super) slot: &'a str,
    pub(super) slot_index: u64,
    pub(super) seed: u32,
    pub(super) model_name: &'a str,
    pub(super) served_names: &'a [String],
    pub(super) max_inputs: usize,
    pub(super) options: &'a BTreeMap<String, Value>,
}

/// From the process. A body is the only buffer of its frame. Unknown fields are ignored.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum FromProcess {
    /// Answers `start`: the class is imported.
    Described(Box<Description>),
    /// Follows `described`: the model is loaded.
    Ready { probe: Option<ProbeHeader> },
    /// Answers `start` or `forward`: the class cannot be imported or loaded, or a batch has failed.
    Failed(Failure),
    /// Answers `prepare`: the inputs of a task are made.
    Prepared(Prepared),
    /// Answers `prepare` or `finish`: the class refuses the task, or has failed on it.
    Refused(Failure),
    /// Answers `finish`: the reply of a task.
    Finished(Reply),
    /// Answers `forward`: the results of a batch.
    Outputs(Outputs),
    /// Answers `stream`, any number of times: a part of the reply.
    Part(Reply),
    /// Ends a stream, with the whole reply.
    Done(Reply),
    /// Ends a stream, with an error.
    Ended(Failure),
}

/// A message from the process, with the buffers of its frame.
pub(super) struct Answer {
    pub(super) message: FromProcess,
    pub(super) buffers: Vec<Bytes>,
}

impl Answer {
    /// Reads the next message. `time`: how long it may take; none: for ever.
    ///
    /// # Errors
    /// As [`read_frame`]; `InvalidData` for a message that this version does not know.
    pub(super) fn read(socket: &UnixStream, time: Option<Duration>) -> io::Result<Self> {
        let frame = read_frame(socket, time)?;
        Ok(Self { message: frame.header()?, buffers: frame.buffers })
    }

    /// The only buffer; empty if there is none.
    pub(super) fn body(&mut self) -> Bytes {
        self.buffers.pop().unwrap_or_default()
    }
}

/// What a class is.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Description {
    pub(super) package: String,
    pub(super) python: String,
    pub(super) urls: Vec<Url>,
    pub(super) options: Vec<DescribedOption>,
    pub(super) work: Work,
    /// Whether the outputs are numbers, from which the worker writes the replies. If not, the process keeps the outputs and
    /// writes the replies.
    pub(super) gives_numbers: bool,
    /// Whether the class has its own `preprocess`, which may take as long as it likes.
    pub(super) has_preprocess: bool,
    /// The number of streams that may run at once.
    pub(super) concurrency: usize,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Url {
    pub(super) url: String,
    pub(super) media_types: Vec<String>,
}

/// An option, with the value in force.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct DescribedOption {
    pub(super) name: String,
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) value: Value,
}

/// Whether a class computes batches or runs streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Work {
    Batches,
    Streams,
}

/// The probe of a class, whose body is the buffer.
#[derive(Deserialize)]
pub(super) struct ProbeHeader {
    pub(super) url: String,
    pub(super) content_type: String,
}

/// The sizes of a task's inputs, which stay in the process. If the outputs are numbers, the buffers are the texts around them
/// in the reply.
#[derive(Deserialize)]
pub(super) struct Prepared {
    pub(super) task: u64,
    /// Of each input.
    pub(super) tokens: Vec<usize>,
    /// Of each input.
    pub(super) bytes: Vec<usize>,
    /// Given if the outputs are numbers.
    pub(super) form: Option<Form>,
    /// Whether the requester wants its reply in parts.
    pub(super) parts: bool,
}

/// How a reply gives a vector: as a list of numbers, as a text with its bytes in base64, or as its only number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Form {
    Json,
    Base64,
    Number,
}

/// A reply or a part of one.
#[derive(Deserialize)]
pub(super) struct Reply {
    pub(super) task: u64,
    pub(super) content_type: String,
}

/// The results of a batch. If the outputs are numbers, those of all outputs are the buffer, as little-endian `f32`.
#[derive(Deserialize)]
pub(super) struct Outputs {
    pub(super) count: usize,
    /// How many numbers each output has, if the outputs are numbers.
    #[serde(default)]
    pub(super) lengths: Vec<usize>,
    pub(super) errors: Vec<InputFailure>,
}

/// Why an input of a batch has no output. Read from a list of both.
#[derive(Deserialize)]
pub(super) struct InputFailure {
    /// The index of the input in the batch.
    pub(super) index: usize,
    pub(super) failure: Failure,
}

/// Why there is no result.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Failure {
    #[serde(default)]
    pub(super) task: u64,
    pub(super) kind: FailureKind,
    /// The status that the class has given to a refused task.
    #[serde(default)]
    pub(super) status: u16,
    pub(super) message: String,
    /// The field of the body at fault.
    #[serde(default)]
    pub(super) param: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FailureKind {
    /// The class cannot be loaded until somebody changes it or the settings.
    Operator,
    /// The class could not be loaded. Another attempt may succeed.
    Model,
    /// The class refuses a task.
    Task,
    /// The class has raised an exception on a task or a batch.
    Error,
    /// The device or the host had no memory.
    OutOfMemory,
}
