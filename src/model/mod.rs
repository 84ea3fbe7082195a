//! Models: how one is loaded on a device, how a task becomes inputs (`Codec::prepare`), what a
//! forward pass does (`Model::forward`), and how its outputs become a reply (`Codec::respond`).
//! Everything here blocks, and the worker decides where. Knows neither broker nor tokio nor acks.
//!
//! # Implementing a model
//!
//! A model comes in two parts, because they run on different threads:
//!
//! - the [`Model`] owns weights and device. It is made on the thread that will run it and stays
//!   there for life, so it need not be `Send`; nothing of it is global or inherited.
//! - its [`Codec`] holds what turns bytes into inputs and outputs into bytes (a tokenizer, an image
//!   decoder). It is shared by the threads that work on the next and the last batch while the model
//!   computes this one.
//!
//! **Inputs that are not text.** `prepare` gets the whole message: body, content type and headers.
//! A model of images lists `image/png` in [`Codec::content_types`] and decodes the body; its
//! `Input` is a tensor or a pixel buffer, and [`Costed::tokens`] its number of patches. Nothing in
//! the worker looks into an input; batches are formed by cost alone.
//!
//! **Answers that come in steps.** [`Model::forward`] returns a [`Step`] for each input.
//! [`Step::Done`] completes it. Generation adds a variant that hands the input (with its cache) back
//! with the cost of its next step, and the worker puts it at the head of the next batch: that is
//! continuous batching, decided where batches are formed. `Step` is `non_exhaustive` for it.

pub mod device;
pub mod echo;
pub mod sentence;
pub mod source;

use std::path::{Path, PathBuf};

pub use crate::config::Dtype;
pub use crate::protocol::control::Unfit;
use crate::protocol::{Message, TaskError};

/// An input and what it costs a forward pass.
#[derive(Debug)]
pub struct Costed<I> {
    /// The input, ready for the device.
    pub input: I,
    /// Its cost in tokens (patches, frames): what `max_tokens` of the batch policy bounds.
    pub tokens: usize,
}

/// A task, ready to be computed.
#[derive(Debug)]
pub struct Prepared<C: Codec + ?Sized> {
    /// What [`Codec::respond`] needs to know of the task beside the outputs.
    pub request: C::Request,
    /// One or more inputs, in the order in which the reply lists their outputs.
    pub inputs: Vec<Costed<C::Input>>,
}

/// Turns messages into inputs and outputs into reply bodies. Runs beside the model, on other threads.
pub trait Codec: Send + Sync + 'static {
    /// What `respond` needs of a task: its encoding, its dimensions.
    type Request: Send + 'static;
    /// One row of a batch.
    type Input: Send + 'static;
    /// The result of one input.
    type Output: Send + 'static;

    /// The OpenAI path whose requests this model answers, as batch lines name it in `url`.
    fn endpoint(&self) -> &'static str;

    /// Media types of bodies that `prepare` reads. A message without a content type is taken as
    /// the first.
    fn content_types(&self) -> &'static [&'static str] {
        &["application/json"]
    }

    /// A small task that this model is known to answer. It is computed before the worker takes work,
    /// and again when the model fails on an input: where it fails too, the device is broken, and the
    /// worker ends instead of answering tasks with errors. None: no such proof, and inputs are blamed.
    fn known_input(&self) -> Option<Message> {
        None
    }

    /// Whether a task of so many bytes is prepared in a millisecond at most. Then that is done where the
    /// worker's messages come and go, which for so long have to wait; what takes longer has threads of its
    /// own, waits until those have woken, and is overtaken meanwhile. On a GPU's worker all of it has.
    fn prepares_briefly(&self, bytes: usize) -> bool {
        let _ = bytes;
        false
    }

    /// The same of the response to a task of so many bytes, with so many inputs.
    fn responds_briefly(&self, bytes: usize, inputs: usize) -> bool {
        let _ = (bytes, inputs);
        false
    }

    /// Decodes a task and makes its inputs.
    ///
    /// # Errors
    /// What is wrong with this task; it is answered with the error, and its neighbours proceed.
    fn prepare(&self, message: &Message) -> Result<Prepared<Self>, TaskError>;

    /// Writes the reply's JSON body from the outputs, which are in the order of the inputs.
    ///
    /// # Errors
    /// When the outputs cannot be a reply (a number is not finite); the task is answered with it.
    fn respond(&self, request: Self::Request, outputs: Vec<Self::Output>) -> Result<Vec<u8>, TaskError>;
}

/// What became of one input in a forward pass.
#[derive(Debug)]
#[non_exhaustive]
pub enum Step<O> {
    /// Computed to its end.
    Done(O),
}

/// The input type of a model.
pub type InputOf<M> = <<M as Model>::Codec as Codec>::Input;
/// The output type of a model.
pub type OutputOf<M> = <<M as Model>::Codec as Codec>::Output;
/// What a forward pass gives: for each input, in order, a step or the input's own error.
pub type Steps<M> = Vec<Result<Step<OutputOf<M>>, TaskError>>;

/// What is left to do of a pass that was begun: wait for the device and take its results, one entry an
/// input, in order.
pub type Rest<M> = Box<dyn FnOnce(&mut M) -> Result<Steps<M>, ForwardError>>;

/// Weights on one device.
pub trait Model: Sized + 'static {
    /// Its decoder and encoder.
    type Codec: Codec;

    /// Has the device multiply known matrices, before anything is loaded. For a model whose device candle
    /// does not open there is nothing to keep.
    ///
    /// # Errors
    /// As [`device::prove`].
    fn prove(spec: &LoadSpec, min_speed: f64) -> Result<Option<device::Proven>, LoadError> {
        device::prove(&spec.device, spec.dtype, min_speed).map(Some)
    }

    /// Opens the device, loads the weights onto it. Called once, on the model's own thread, after
    /// [`Model::prove`].
    ///
    /// # Errors
    /// [`LoadError`] ends the worker with the code for its variant.
    fn load(spec: &LoadSpec) -> Result<(Self, Self::Codec), LoadError>;

    /// What a worker takes of its device's memory when it computes so many tokens at once, found without
    /// loading anything. None: not known.
    fn footprint(spec: &LoadSpec, tokens: usize) -> Option<Footprint> {
        let _ = (spec, tokens);
        None
    }

    /// The device that was really opened: `cpu`, or the GPU's UUID.
    fn device(&self) -> String;

    /// Computes one batch; returns one entry an input, in order. The result of an input must not
    /// depend on its batch-mates (`batch-equals-single`). The inputs stay the caller's, who runs
    /// halves of a batch again when a whole one failed.
    ///
    /// # Errors
    /// [`ForwardError`] for what concerns the batch or the device rather than one input.
    fn forward(&mut self, inputs: &[&InputOf<Self>]) -> Result<Steps<Self>, ForwardError>;

    /// Whether the device computes beside this thread, which can give it the next batch meanwhile.
    fn computes_aside(&self) -> bool {
        false
    }

    /// Where the device computes beside this thread: hands it one batch and does not wait for it. At most
    /// two are begun at a time, and the first of them is waited for first. None: there is
    /// [`Model::forward`] alone.
    ///
    /// # Errors
    /// As [`Model::forward`].
    fn begin(&mut self, inputs: &[&InputOf<Self>]) -> Result<Option<Rest<Self>>, ForwardError> {
        let _ = inputs;
        Ok(None)
    }
}

/// Memory on a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Of the weights.
    pub weights: u64,
    /// Of the largest forward pass.
    pub working: u64,
}

/// What a model is loaded from.
#[derive(Clone, Debug)]
pub struct LoadSpec {
    /// The pool's `model` setting: a folder, a Hugging Face id (`org/name`, `org/name@revision`),
    /// or whatever a registered model makes of it.
    pub source: String,
    /// Further names that requests may call the model by.
    pub served_names: Vec<String>,
    /// The device to open: `cpu`, or a GPU's UUID. CUDA shows this process that GPU alone, as number 0;
    /// [`device::open`] opens it.
    pub device: String,
    /// Most inputs one task may carry.
    pub max_inputs: usize,
    /// The numbers to keep the weights in and to multiply.
    pub dtype: Dtype,
}

impl LoadSpec {
    /// The model's name in replies: the source, or a folder's last component.
    pub fn model_name(&self) -> &str {
        model_name(&self.source)
    }

    /// The source is a folder rather than a hub id or a registered name.
    pub fn is_folder(&self) -> bool {
        is_folder(&self.source)
    }
}

/// A model's name in replies: its source, or a folder's last component.
pub fn model_name(source: &str) -> &str {
    let name = source.trim_end_matches('/');
    if is_folder(source) { name.rsplit('/').next().unwrap_or(name) } else { name }
}

fn is_folder(source: &str) -> bool {
    source.starts_with(['.', '/', '~']) || Path::new(source).is_dir()
}

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file is missing, unreadable or not what its name says.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The model is of a kind that this program does not compute.
    #[error("model {model:?}: {reason}")]
    Unsupported {
        /// The `model` setting.
        model: String,
        /// Which property, with its value, and what is supported.
        reason: String,
    },
    /// The device that was asked for cannot be opened. There is no fall-back.
    #[error("device {device:?}: {reason}")]
    Device {
        /// The device asked for.
        device: String,
        /// The driver's words.
        reason: String,
    },
    /// The device is there, and not fit to be given work.
    #[error("device {device:?} is unfit: {reason}")]
    Unfit {
        /// The device.
        device: String,
        /// What is wrong with it.
        why: Unfit,
        /// The same with numbers, and what to do.
        reason: String,
    },
    /// The hub could not deliver the model.
    #[error("model {model:?} from the Hugging Face hub: {reason}")]
    Hub {
        /// The id.
        model: String,
        /// What the hub or the network said.
        reason: String,
    },
}

/// Why a forward pass gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// The device had no memory for this batch; a smaller one may fit.
    #[error("out of device memory: {0}")]
    OutOfMemory(String),
    /// The computation failed on these inputs; the device is well.
    #[error("{0}")]
    Failed(String),
    /// The device is gone or its context is poisoned: no later call can succeed.
    #[error("device fault: {0}")]
    Device(String),
}
