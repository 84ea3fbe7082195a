//! The headers of frames between the worker and the process that holds a class in Python.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The version of these messages.
pub(super) const VERSION: u32 = 1;

/// From the worker. `drop` has the ids of tasks that the process must forget.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ToProcess<'a> {
    /// The first frame on the model channel.
    Start(&'a StartHeader<'a>),
    /// On the side channel: make the inputs of a task, whose body is the buffer.
    Prepare { task: u64, url: &'a str, content_type: &'a str, headers: Map<String, Value>, drop: &'a [u64] },
    /// On the side channel: write the reply of a task.
    Finish { task: u64, usage_tokens: usize, drop: &'a [u64] },
    /// On the side channel, without an answer.
    Drop { drop: &'a [u64] },
    /// On the model channel: compute a batch.
    Forward { inputs: &'a [Range] },
    /// On the model channel: run a task beside others.
    Stream { task: u64 },
    /// On the model channel: end such a task.
    Cancel { task: u64, reason: &'a str },
}

/// Adjacent inputs of a task: its id, the index of the first, and their number.
pub(super) type Range = (u64, u32, u32);

/// What is to be loaded, and where. Of `module` and `file`, one is given.
#[derive(Serialize)]
pub(super) struct StartHeader<'a> {
    pub(super) version: u32,
    pub(super) mode: &'a str,
    pub(super) module: Option<&'a str>,
    pub(super) file: Option<&'a str>,
    pub(super) class: &'a str,
    /// `cpu` or `cuda`: the only card that the process sees.
    pub(super) device: &'a str,
    pub(super) device_name: &'a str,
    pub(super) dtype: &'a str,
    pub(super) threads: usize,
    pub(super) slot: &'a str,
    pub(super) slot_index: u64,
    pub(super) seed: u32,
    pub(super) model: &'a str,
    pub(super) model_name: &'a str,
    pub(super) served_names: &'a [String],
    pub(super) max_inputs: usize,
    pub(super) options: &'a BTreeMap<String, Value>,
}

/// From the process. Bodies are the buffers. Fields that this version does not know are ignored.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum FromProcess {
    /// The class is imported.
    Described(Box<Description>),
    /// The model is loaded.
    Ready { probe: Option<ProbeHeader> },
    /// The class cannot be imported or loaded, or a batch has failed.
    Failed(Failure),
    /// The inputs of a task are made.
    Prepared(Prepared),
    /// A task is refused, or the class has failed on it.
    Refused(Failure),
    /// The reply of a task.
    Finished(Reply),
    /// The results of a batch.
    Outputs(Outputs),
    /// A part of the reply of a task that runs beside others.
    Part(Reply),
    /// Such a task has ended, with its whole reply.
    Done(Reply),
    /// Such a task has ended, with an error.
    Ended(Failure),
}

/// What a class is.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Description {
    pub(super) package: String,
    pub(super) python: String,
    pub(super) urls: Vec<Url>,
    pub(super) options: Vec<DescribedOption>,
    pub(super) work: Work,
    /// Whether values come with the results of a batch, and templates with the inputs of a task.
    pub(super) values: bool,
    /// Whether preparing a task may take long.
    pub(super) slow: bool,
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

/// Whether a class computes batches, or runs tasks side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Work {
    Batches,
    Streams,
}

/// The message that a model must be able to answer.
#[derive(Deserialize)]
pub(super) struct ProbeHeader {
    pub(super) url: String,
    pub(super) content_type: String,
}

/// The sizes of a task's inputs, which stay in the process.
#[derive(Deserialize)]
pub(super) struct Prepared {
    pub(super) task: u64,
    pub(super) tokens: Vec<usize>,
    pub(super) bytes: Vec<usize>,
    pub(super) template: Option<TemplateHeader>,
    /// Whether the requester wants its reply in parts.
    pub(super) parts: bool,
}

/// How the values of a task become its reply. The texts around them are the buffers.
#[derive(Deserialize)]
pub(super) struct TemplateHeader {
    pub(super) content_type: String,
    #[serde(rename = "as")]
    pub(super) form: Form,
}

/// How a vector is written: as a list of numbers, as a text with its bytes in base64, or as its only number.
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

/// The results of a batch.
#[derive(Deserialize)]
pub(super) struct Outputs {
    pub(super) count: usize,
    #[serde(default)]
    pub(super) lengths: Lengths,
    /// The inputs without an output, each by its index in the batch.
    pub(super) errors: Vec<(usize, Failure)>,
}

/// The number of values of each output.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Lengths {
    Same(usize),
    Each(Vec<usize>),
}

impl Default for Lengths {
    fn default() -> Self {
        Self::Same(0)
    }
}

/// Why there is no result.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Failure {
    #[serde(default)]
    pub(super) task: u64,
    pub(super) kind: FailureKind,
    /// Of a refused task.
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
    /// The class or the settings must be changed.
    Operator,
    /// The class has failed while it was loaded.
    Model,
    /// The class refuses a task.
    Task,
    /// The class has failed.
    Error,
    /// The device or the host had no memory.
    OutOfMemory,
}
