//! Models: the traits that a model implements, and what it is loaded from. Everything here blocks; the `engine` module
//! decides on which thread it runs. Nothing here knows the broker, tokio or acks.
//!
//! # Implementing a model
//!
//! A model has two parts, because they run on different threads:
//!
//! - A [`Processor`] turns messages into inputs, and outputs into bodies (a tokenizer, an image decoder).
//!   Several threads share it. They preprocess the next tasks and write the last replies while the device computes.
//! - The network owns the weights. It is loaded on the thread that will run it and stays there, so that it
//!   need not be `Send`. It is either [`Forward`] (one pass: embeddings, classification, images) or
//!   [`Generate`] (sequences that take many steps: text generation, speech recognition).
//!
//! One function returns both: `fn(&LoadSpec, &Device) -> Result<(Processor, Network), LoadError>`. It is registered in
//! an `app::Registry`. It gets the device, already open, onto which it must load.
//!
//! **Inputs that are not text.** [`Processor::preprocess`] gets the whole message: body, content type and
//! headers. A model of images has a [`Route`] with `image/png` and decodes the body; its input is a tensor
//! or a pixel buffer, and its size is the number of patches. Batches are formed by size alone. If a task has many
//! inputs, or costly ones, they are made on demand ([`Inputs::Slices`]).
//!
//! **A head on an encoder of texts.** [`text`] loads the encoder and its tokenizer; only the head is yours.

pub(crate) mod clock;
pub mod device;
#[doc(hidden)]
pub mod family;
mod fields;
#[doc(hidden)]
pub mod load;
#[doc(hidden)]
pub mod nets;
#[doc(hidden)]
pub mod ops;
#[doc(hidden)]
pub mod random;
pub mod registry;
#[doc(hidden)]
pub mod sequences;
#[doc(hidden)]
pub mod sound;
#[doc(hidden)]
pub mod tasks;
pub mod testing;
pub mod text;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use candle_core::Device;
pub use serde_json::Value;

pub use crate::batching::Encoding;
pub use crate::batching::sequences::Feed;
pub use crate::config::{CpuFeatures, Dtype, OptionProblem};
pub use crate::protocol::control::Unfit;
pub use crate::protocol::{Body, FileUrl, Files, Message, Properties, TaskError, TaskErrorKind};

/// A URL that a model answers, and the media types of its bodies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The OpenAI path, as in the header `url` and in batch lines; [`Route::ANY`] stands for all.
    pub url: &'static str,
    /// Media types of bodies, lower case and without parameters; `image/*` stands for all that begin with `image/`, and
    /// [`Route::ANY_TYPE`] for all. A message without a content type counts as the first.
    pub media_types: &'static [&'static str],
}

impl Route {
    /// The URL of a model that answers every URL.
    pub const ANY: &'static str = "*";
    /// The media type of a model that takes every one.
    pub const ANY_TYPE: &'static str = "*/*";

    /// A URL whose bodies are JSON.
    pub const fn json(url: &'static str) -> Self {
        Self { url, media_types: &[crate::protocol::JSON] }
    }

    /// Whether bodies may have this media type.
    pub fn takes(&self, media_type: &str) -> bool {
        self.media_types.iter().any(|taken| Self::stands_for(taken, media_type))
    }

    /// Whether `taken`, one of a route's media types, is this media type or stands for it.
    pub fn stands_for(taken: &str, media_type: &str) -> bool {
        match taken.strip_suffix('*') {
            _ if taken == Self::ANY_TYPE => true,
            Some(prefix) => media_type.starts_with(prefix),
            None => taken == media_type,
        }
    }
}

/// One row of a batch, or one sequence, with its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SizedInput<I> {
    /// The input, ready for the device.
    pub input: I,
    /// The tokens (frames, patches) that the model's encoder computes before the sequence is fed any token. An encoding
    /// is computed whole, by a separate row ([`Feed::Encode`]). 0 without an encoding, and for every one-pass model.
    pub encode_tokens: usize,
    /// The tokens (patches, frames) of the input. `batch.max_tokens` bounds their sum over a batch. For a sequence
    /// these are the tokens of its prompt; 0 is allowed if it has an encoding.
    pub tokens: usize,
    /// The largest number of tokens of its answer. They are reserved together with `tokens` when the sequence begins. 0
    /// for a one-pass model.
    pub answer_tokens: usize,
}

impl<I> SizedInput<I> {
    /// An input of a one-pass model.
    pub fn new(input: I, tokens: usize) -> Self {
        Self { input, encode_tokens: 0, tokens, answer_tokens: 0 }
    }
}

/// The inputs of a task, in the order of the reply's outputs. If there are none, the reply is written at once.
pub enum Inputs<I> {
    /// All of them. A `Vec` converts to this.
    All(Vec<SizedInput<I>>),
    /// Slices that are made on demand, for a task that takes long to prepare or whose inputs together would take much
    /// memory. The first slice is made after [`Processor::preprocess`], and a further one whenever few of the task's
    /// inputs wait for the model. Tasks take turns between slices, so a slice should take about ten milliseconds at
    /// most. An error ends the task. If the upper bound of `size_hint` is 0, the task is complete with its last slice.
    Slices(Slices<I>),
    /// Inputs that take longer to make than [`Effort::Usual`], such as those with a grammar. They are made on a
    /// separate thread, where the requesters take turns, so that other tasks need not wait. Do in
    /// [`Processor::preprocess`] whatever takes no longer than usual, and refuse a bad task there.
    Later(Later<I>),
}

/// The inputs that a task is expected to have: [`Processor::announced`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announced {
    /// Their number.
    pub inputs: usize,
    /// The tokens of each answer.
    pub answer_tokens: usize,
}

/// What makes the inputs of [`Inputs::Later`]. It may return `Later` again, which runs at once.
pub type Later<I> = Box<dyn FnOnce() -> Result<Inputs<I>, TaskError> + Send>;

/// Slices of a task's inputs, for [`Inputs::Slices`]. The preprocess threads request one slice at a time.
pub type Slices<I> = Box<dyn Iterator<Item = Result<Vec<SizedInput<I>>, TaskError>> + Send>;

impl<I> From<Vec<SizedInput<I>>> for Inputs<I> {
    fn from(inputs: Vec<SizedInput<I>>) -> Self {
        Self::All(inputs)
    }
}

impl<I> Inputs<I> {
    /// Makes all inputs now. For tests and measurements.
    ///
    /// # Errors
    /// The error of the first slice that cannot be made.
    pub fn all(self) -> Result<Vec<SizedInput<I>>, TaskError> {
        match self {
            Self::All(inputs) => Ok(inputs),
            Self::Later(later) => later()?.all(),
            Self::Slices(slices) => {
                Ok(slices.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
            }
        }
    }
}

/// A preprocessed task: the context for [`Processor::finish`], and its inputs.
pub type Preprocessed<P> = (<P as Processor>::Context, Inputs<<P as Processor>::Input>);

/// How long the preprocessing of a message may take, judged by the message alone, before anything is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// About a millisecond at most, for any content. A worker with one preprocess thread does such work on the thread
    /// that talks to the broker, which saves waking another. Decoders and templates are never brief: a few bytes can keep
    /// them busy for long.
    Brief,
    /// About ten milliseconds at most, or slices that each take as long. Use [`Inputs::Later`] for what takes longer.
    Usual,
    /// Perhaps longer. The preprocessing runs on a separate thread, where requesters take turns.
    Long,
}

impl Effort {
    /// Returns `Brief` if `is_brief` is true, else `Usual`.
    pub fn brief_if(is_brief: bool) -> Self {
        if is_brief { Self::Brief } else { Self::Usual }
    }
}

/// Whether parts of a reply are sent before the whole reply, and what the parts are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Streaming {
    /// There are no parts.
    Off,
    /// Parts are made of the pieces of sequences as they are produced: [`Processor::parts`].
    Pieces,
    /// Parts are made of the outputs of finished inputs, in the order of the inputs: [`Processor::output_parts`]. An
    /// input that finishes early waits for those before it. This suits one-pass models, and sequences whose pieces are
    /// of no use by themselves (speech recognition).
    Outputs,
}

impl Streaming {
    /// `self` if the task requested parts, else `Off`.
    pub fn if_requested(self, is_requested: bool) -> Self {
        if is_requested { self } else { Self::Off }
    }
}

/// The CPU part of a model: messages ↔ inputs and outputs. Shared by threads.
pub trait Processor: Send + Sync + 'static {
    /// What `finish` and the parts of a reply need to know of a task beside its outputs, such as its encoding.
    type Context: Send + 'static;
    /// One row of a batch, or the prompt of one sequence.
    type Input: Send + 'static;
    /// What a sequence produces before its end, for replies in parts. `()` for a one-pass model, and where parts are
    /// made of outputs.
    type Piece: Send + 'static;
    /// The result of one input.
    type Output: Send + 'static;

    /// The URLs that this model answers. A message without a `url` goes to the first route.
    fn routes(&self) -> &[Route];

    /// Decodes a message and makes its inputs, or returns what makes them on demand ([`Inputs::Slices`]) or on a
    /// separate thread ([`Inputs::Later`]). The message's URL and media type match a route.
    ///
    /// # Errors
    /// What is wrong with this task. The task is answered with the error; other tasks are not affected.
    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError>;

    /// The URLs that the message gives in place of files. The worker fetches those that `pool.allowed_sources` admits,
    /// and refuses the task if there are others. Not called for pools that admit none.
    /// Empty if the message cannot be read: [`Processor::preprocess`] finds the error.
    fn file_urls(&self, message: &Message) -> Vec<FileUrl> {
        let _ = message;
        Vec::new()
    }

    /// As [`Processor::preprocess`], with the files that were fetched for the message.
    ///
    /// # Errors
    /// As [`Processor::preprocess`].
    fn preprocess_with(&self, message: &Message, files: &Files) -> Result<Preprocessed<Self>, TaskError> {
        let _ = files;
        self.preprocess(message)
    }

    /// Returns how long `preprocess` takes at most for this message, whatever its content. The same bound must hold for
    /// `finish` with a few outputs.
    fn effort(&self, message: &Message) -> Effort {
        let _ = message;
        Effort::Usual
    }

    /// Bytes of memory that an input holds until it is computed; 0 if they are too few to count. A worker bounds their
    /// sum (`pool.prepared_bytes`).
    fn bytes(&self, input: &Self::Input) -> usize {
        let _ = input;
        0
    }

    /// Whether the task requested its reply in parts, and what these are made of.
    fn streaming(&self, context: &Self::Context) -> Streaming {
        let _ = context;
        Streaming::Off
    }

    /// What a task whose inputs are made on demand is expected to compute, as far as it is known in advance. The worker
    /// refuses a task that would take longer than the broker allows.
    fn announced(&self, context: &Self::Context) -> Option<Announced> {
        let _ = context;
        None
    }

    /// Whether the parts of 32 pieces or outputs are written within about ten microseconds, whatever they hold. If so,
    /// up to 32 pieces or outputs are handled on the thread that talks to the broker, since waking another thread would
    /// take as long. All others are handled on the reply threads.
    fn are_parts_brief(&self, context: &Self::Context) -> bool {
        let _ = context;
        false
    }

    /// Writes parts of the reply from the pieces that a sequence has produced since the last call, 256 at most. `input`
    /// is the index of the sequence's input. Usually this is one part; none if there is nothing to send yet. Called
    /// with [`Streaming::Pieces`].
    fn parts(&self, context: &mut Self::Context, input: usize, pieces: Vec<Self::Piece>) -> Vec<Body> {
        let _ = (context, input, pieces);
        Vec::new()
    }

    /// Writes parts of the reply, usually one, from the output of an input. Called with [`Streaming::Outputs`], at most
    /// once for each input, in their order. The engine may omit the call for the inputs that finish last, since the
    /// whole reply has them.
    fn output_parts(&self, context: &mut Self::Context, input: usize, output: &Self::Output) -> Vec<Body> {
        let _ = (context, input, output);
        Vec::new()
    }

    /// Whether `finish` may take longer than about ten milliseconds. It then runs on the thread for long preparation, where
    /// requesters take turns, so that the replies to other tasks need not wait.
    fn is_finish_slow(&self, context: &Self::Context) -> bool {
        let _ = context;
        false
    }

    /// Writes the reply from the outputs, which are in the order of the inputs.
    ///
    /// # Errors
    /// The outputs cannot be a reply (e.g. a number is not finite); the task is answered with this error.
    fn finish(&self, context: Self::Context, outputs: Vec<Self::Output>) -> Result<Body, TaskError>;

    /// A small task that this model can certainly answer. It is computed before the worker takes work, and
    /// again when the model fails on an input. If the probe then fails too, the device is broken, and the worker ends
    /// instead of answering tasks with errors. Without a probe, the input is blamed. For a one-pass model the probe has
    /// one input or more, otherwise it is one sequence. If the model refuses the probe as a bad request, loading fails
    /// with [`LoadError::Probe`]: the model's author must correct it.
    fn probe(&self) -> Option<Message> {
        None
    }
}

/// A network that answers in one pass. The result of an input must depend on this input alone (`batch-equals-single`),
/// so that a failed batch may be halved and computed again.
pub trait Forward: 'static {
    /// The processor's input.
    type Input;
    /// The processor's output.
    type Output;
    /// A submitted batch.
    type Pending;

    /// Submits a batch to the device.
    ///
    /// # Errors
    /// [`ForwardError`] for what concerns the batch or the device rather than one input.
    fn submit(&mut self, batch: &[&Self::Input]) -> Result<Self::Pending, ForwardError>;

    /// Waits for a submitted batch and returns its results, one for each input, in order.
    ///
    /// # Errors
    /// As [`Forward::submit`].
    fn wait(&mut self, pending: Self::Pending) -> Result<Vec<Result<Self::Output, TaskError>>, ForwardError>;

    /// Computes a batch.
    ///
    /// # Errors
    /// As [`Forward::submit`].
    fn forward(
        &mut self,
        batch: &[&Self::Input],
    ) -> Result<Vec<Result<Self::Output, TaskError>>, ForwardError> {
        let pending = self.submit(batch)?;
        self.wait(pending)
    }

    /// Whether [`Forward::submit`] returns before the device has computed the batch. If so, the next batch is
    /// submitted before the engine waits for the last one; at most two batches are in progress.
    fn is_asynchronous(&self) -> bool {
        false
    }
}

/// The place of a sequence in the network's state (its KV cache), from 0 to [`Capacity::sequences`] - 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub usize);

/// How much state a network holds at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Sequences.
    pub sequences: usize,
    /// Tokens of all sequences, answers included.
    pub tokens: usize,
    /// Tokens of one sequence, its answer included.
    pub context: usize,
}

/// What one sequence does in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The sequence's slot.
    pub slot: Slot,
    /// What it is fed.
    pub feed: Feed,
}

/// The progress of a sequence in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Advance<P, O> {
    /// It was encoded, or was fed tokens of its prompt, and must be fed more.
    Fed,
    /// It has produced a piece, and continues.
    More(P),
    /// It starts over with another window: it must be encoded again, and then be fed its prompt again.
    Again,
    /// It was not fed, since it waits for something beside the network. The next step feeds it the same.
    Waits,
    /// It has ended, perhaps with a last piece.
    Done(Option<P>, O),
}

/// The results of a step: one for each row, in order.
pub type Advances<G> = Vec<Result<Advance<<G as Generate>::Piece, <G as Generate>::Output>, TaskError>>;

/// A network whose sequences take many steps, and join and leave a running batch. Its state stays on its
/// thread.
pub trait Generate: 'static {
    /// The processor's input.
    type Prompt;
    /// What a sequence produces in a step.
    type Piece;
    /// What a sequence produces at its end.
    type Output;

    /// How much state this network holds at once. Called once, after loading.
    fn capacity(&self) -> Capacity;

    /// The defaults of `batch.encode_interval` and `batch.encode_batch`, which spread encode rows among steps. Called
    /// once, after loading. It has no effect for a model without an encoder.
    fn encoding(&self) -> Encoding {
        Encoding::default()
    }

    /// Whether steps take about as long for any sequences. If so, a task is refused whose answer would take too long by
    /// the average time of a step. Called after each step.
    fn has_even_steps(&self) -> bool {
        true
    }

    /// Begins a sequence in a free slot, without feeding it.
    ///
    /// # Errors
    /// What is wrong with the prompt; the slot stays free.
    fn open(&mut self, slot: Slot, prompt: &Self::Prompt) -> Result<(), TaskError>;

    /// Computes one step: feeds each row's sequence what the row says. A sequence whose [`SizedInput::encode_tokens`]
    /// are not 0 has one [`Feed::Encode`] first, whose result is [`Advance::Fed`] unless it ends the sequence. Then it
    /// is fed the tokens of its prompt, in chunks, and then one token of its answer in each step. After
    /// [`Advance::Again`] all this follows once more. Either all rows of a step are [`Feed::Encode`], or none is. A
    /// step must be repeatable: an error for the step or for one row leaves the sequences concerned unchanged, and the
    /// step may be computed again with fewer rows.
    ///
    /// # Errors
    /// [`ForwardError`] for what concerns the step or the device rather than one sequence.
    fn step(&mut self, rows: &[Row]) -> Result<Advances<Self>, ForwardError>;

    /// Ends a sequence, at any time. Frees its slot and state.
    fn close(&mut self, slot: Slot);
}

/// What a model is loaded from.
#[derive(Clone, Debug)]
pub struct LoadSpec {
    /// The pool's `model` setting: a folder, a Hugging Face id (`org/name`, `org/name@revision`), or a name
    /// that a registered model knows.
    pub source: String,
    /// Further names by which requests may call the model.
    pub served_names: Vec<String>,
    /// The device to load onto: `cpu`, or a GPU's UUID.
    pub device: String,
    /// The largest number of inputs in one task.
    pub max_inputs: usize,
    /// The type of the weights and of their products. If it is chosen, loading is tried with one type after another,
    /// until the model neither refuses it ([`LoadError::Unsupported`]) nor computes something else than in f32
    /// ([`LoadError::Unfit`]).
    pub dtype: Dtype,
    /// Whether the type is chosen for this device: the pool's `dtype` is "auto". The accepted difference from f32 is then
    /// smaller than for a type that the operator set. In the specification of a pool `dtype` means nothing then.
    pub is_dtype_auto: bool,
    /// The vector units that a CPU computes with: the pool's `cpu_features` setting.
    pub cpu_features: CpuFeatures,
    /// The pool's `[pool.options]`: settings that only this model knows.
    pub options: BTreeMap<String, Value>,
    /// Whether a model of which something must be assumed is refused: the pool's `strict_model` setting.
    pub is_strict: bool,
}

impl LoadSpec {
    /// The model's name in replies: the source, a folder's last component, or a GGUF file's name without its extension.
    pub fn model_name(&self) -> &str {
        model_name(&self.source)
    }

    /// The specifications with which loading is tried, in this order. If the type is chosen: on a CPU one for each of its
    /// fast number formats, on a GPU bf16 and f16, and then f32. Otherwise only this one.
    pub fn candidates(&self) -> Vec<Self> {
        if !self.is_dtype_auto {
            return vec![self.clone()];
        }
        let faster = if self.device == "cpu" {
            let formats = ops::fast_formats(self.cpu_features).iter();
            formats
                .map(|format| if *format == ops::NumberFormat::Bits8 { Dtype::Int8 } else { Dtype::Bf16 })
                .collect()
        } else {
            vec![Dtype::Bf16, Dtype::F16]
        };
        let dtypes = faster.into_iter().chain([Dtype::F32]);
        dtypes.map(|dtype| Self { dtype, ..self.clone() }).collect()
    }

    /// How this CPU multiplies bf16, for the operator: if that is the type, or if the type is chosen and AVX512-BF16 is too
    /// slow for bf16 to be a candidate.
    pub fn bf16_note(&self) -> Option<String> {
        let may_be_bf16 = self.is_dtype_auto || self.dtype == Dtype::Bf16;
        if self.device != "cpu" || !may_be_bf16 {
            return None;
        }
        match ops::bf16_products(self.cpu_features) {
            products if !self.is_dtype_auto => Some(products.to_string()),
            products @ ops::Bf16Products::Avx512 { .. } if !products.use_unit() => {
                Some(format!("dtype = \"auto\" does not try bf16, because {products}"))
            }
            _ => None,
        }
    }

    /// Tries the [candidates](Self::candidates) in turn, and returns the first result that is no error of the number format,
    /// with that format. If the model's files are at fault, the last candidate, f32, fails too.
    ///
    /// # Errors
    /// That of the last candidate, or one that no other number format would mend.
    pub fn first_that<T>(
        &self,
        mut attempt: impl FnMut(&Self) -> Result<T, LoadError>,
    ) -> Result<(T, Dtype), LoadError> {
        let mut candidates = self.candidates();
        let last = candidates.pop().unwrap_or_else(|| self.clone());
        for candidate in candidates {
            let dtype = candidate.dtype.name();
            match attempt(&candidate) {
                Err(error @ (LoadError::Unsupported { .. } | LoadError::File { .. })) => {
                    tracing::debug!(dtype, %error, "the model cannot have this number format; trying the next");
                }
                Err(LoadError::Unfit { why: Unfit::WrongResult, reason, .. }) => {
                    tracing::warn!(
                        dtype,
                        reason,
                        "results in this number format differ too much; trying the next"
                    );
                }
                result => return result.map(|value| (value, candidate.dtype)),
            }
        }
        attempt(&last).map(|value| (value, last.dtype))
    }

    /// Whether the source is a folder rather than a hub id or a registered name.
    pub fn is_folder(&self) -> bool {
        is_folder(&self.source)
    }

    /// A model on the CPU, with defaults for everything else.
    pub fn new(source: impl Into<String>) -> Self {
        Self {
            source: source.into(),
            served_names: Vec::new(),
            device: "cpu".to_owned(),
            max_inputs: 2_048,
            dtype: Dtype::F32,
            is_dtype_auto: false,
            cpu_features: CpuFeatures::Auto,
            options: BTreeMap::new(),
            is_strict: false,
        }
    }

    /// The error of a model that its files describe, and that is not supported, for this reason.
    pub fn unsupported(&self, reason: impl Into<String>) -> LoadError {
        LoadError::Unsupported { model: self.source.clone(), reason: reason.into() }
    }

    /// Makes the error for a pool's option that the model does not take.
    pub(crate) fn refused_option(&self, problem: OptionProblem) -> LoadError {
        LoadError::Option { model: self.source.clone(), problem: Box::new(problem) }
    }

    /// Converts an error of candle during loading into a [`LoadError::Device`].
    pub fn failed(&self, error: impl std::fmt::Display) -> LoadError {
        LoadError::Device { device: self.device.clone(), reason: error.to_string() }
    }
}

/// A model's name in replies: its source, a folder's last component, a GGUF file's name without its extension, or the name
/// of a class in Python.
pub fn model_name(source: &str) -> &str {
    if let Some(class) = crate::config::python_class_name(source) {
        return class;
    }
    let name = source.trim_end_matches('/');
    if let (true, Some(stem)) = (load::is_gguf(name), Path::new(name).file_stem()) {
        return stem.to_str().unwrap_or(name);
    }
    if is_folder(source) { name.rsplit('/').next().unwrap_or(name) } else { name }
}

fn is_folder(source: &str) -> bool {
    source.starts_with(['.', '/', '~']) || Path::new(source).is_dir()
}

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file is missing, unreadable or invalid.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The model has a property that this program does not support.
    #[error("model {model:?}: {reason}")]
    Unsupported {
        /// The `model` setting.
        model: String,
        /// The property with its value, and what is supported.
        reason: String,
    },
    /// The pool's `[pool.options]` hold something that the model does not take.
    #[error("model {model:?}: pool.options.{problem}")]
    Option {
        /// The `model` setting.
        model: String,
        /// The option, and what is wrong with it.
        problem: Box<OptionProblem>,
    },
    /// The model refuses its own probe ([`Processor::probe`]). The author of the model must correct it.
    #[error("model {model:?} refuses its own probe: {reason}")]
    Probe {
        /// The `model` setting.
        model: String,
        /// Why it is refused.
        reason: String,
    },
    /// The device cannot be opened. No other device is used instead.
    #[error("device {device:?}: {reason}")]
    Device {
        /// The requested device.
        device: String,
        /// The driver's message.
        reason: String,
    },
    /// The device exists, but computes wrongly or too slowly.
    #[error("device {device:?} is unfit: {reason}")]
    Unfit {
        /// The device.
        device: String,
        /// What is wrong with it.
        why: Unfit,
        /// The measured values, and what to do.
        reason: String,
    },
    /// The process of a model that runs in one of its own has ended, has failed to load it, or has taken too long.
    #[error("model {model:?}: {reason}")]
    Process {
        /// The `model` setting.
        model: String,
        /// What happened, with the last line of its output.
        reason: String,
    },
    /// The hub could not deliver the model.
    #[error("model {model:?}: there is no folder {}; from the Hugging Face hub: {reason}", folder.display())]
    Hub {
        /// The id.
        model: String,
        /// The folder that was looked for before the hub.
        folder: PathBuf,
        /// The message of the hub or the network.
        reason: String,
        /// Whether another attempt would fail too: the hub must not be asked, or refuses access.
        is_lasting: bool,
    },
}

impl LoadError {
    /// The same error, with `folder` as the folder that was looked for before the hub.
    #[must_use]
    pub fn without_folder(self, folder: Option<&Path>) -> Self {
        match (self, folder) {
            (Self::Hub { model, reason, is_lasting, .. }, Some(folder)) => {
                Self::Hub { model, folder: folder.into(), reason, is_lasting }
            }
            (other, _) => other,
        }
    }
}

/// Why a forward pass has no results.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// The device had no memory for this batch; a smaller one may fit.
    #[error("out of device memory: {0}")]
    OutOfMemory(String),
    /// The computation failed on these inputs; the device works.
    #[error("{0}")]
    Failed(String),
    /// The device or its context has failed: no later call can succeed.
    #[error("device fault: {0}")]
    Device(String),
}

impl From<candle_core::Error> for ForwardError {
    fn from(error: candle_core::Error) -> Self {
        Self::from(&error)
    }
}

impl From<&candle_core::Error> for ForwardError {
    /// Classifies the error by what the worker must do.
    fn from(error: &candle_core::Error) -> Self {
        device::forward_error(error)
    }
}
