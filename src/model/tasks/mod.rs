//! Kinds of requests. Each public module has the processor of one kind and loads its network; its `FAMILY` describes
//! it to other modules. Bodies are read and written by `protocol`; the networks are in `nets`.

pub mod embed;
pub mod generate;
pub mod image;
pub mod labels;
mod names;
pub mod pairs;
mod sentence_settings;
pub mod transcribe;

use std::mem;
use std::sync::Arc;
use std::vec::IntoIter;

use parking_lot::Mutex;
use rayon::prelude::*;

use self::sentence_settings::SentenceSettings;
use super::load::tokenizer::{TextLimits, TextTokenizer, Tokens};
use super::load::{ModelFiles, weights};
use super::nets::encoder::config::NetworkConfig;
use super::nets::encoder::{Output, TextNetwork};
use super::{Device, Inputs, LoadError, LoadSpec, SizedInput, TaskError};
use crate::protocol::Body;

/// The largest body of texts that counts as brief, in bytes. A tokenizer takes about 2 ms for 4 KiB of text,
/// so this body takes about 1 ms.
const BRIEF_BODY: usize = 2 << 10;
/// Bytes of the texts in a slice, for each thread: tokenising them takes about 16 ms. A longer text is a slice by
/// itself.
const SLICE_BYTES: usize = 32 << 10;
/// The cost of a text beside its bytes, expressed in bytes.
const TEXT_BYTES: usize = 64;
/// The fewest texts that are divided among the threads of the caller's pool.
const MANY_TEXTS: usize = 64;

/// Requests the files of a model for texts.
fn find_text_files(files: &ModelFiles) -> Result<(), LoadError> {
    files.required("config.json")?;
    SentenceSettings::find(files)?;
    files.optional("tokenizer.json")?;
    files.weights().map(drop)
}

/// Checks the files that every network for texts has, as [`FileRules::check`](super::family::FileRules::check) does.
fn check_text_files(files: &ModelFiles, source: &str) -> Result<(), LoadError> {
    NetworkConfig::read(files, source)?;
    files.required("tokenizer.json")?;
    weights::check(&files.weights()?)
}

/// Loads a network for texts, and its tokenizer.
fn text_model(
    spec: &LoadSpec,
    device: &Device,
    files: &ModelFiles,
    config: &NetworkConfig,
    limits: TextLimits,
    output: &Output,
) -> Result<(TextTokenizer, TextNetwork), LoadError> {
    let path = files.required("tokenizer.json")?;
    let tokenizer = TextTokenizer::read(path, limits, config.max_tokens(), config.vocabulary)?;
    let network = TextNetwork::load(spec, device, files, config, &tokenizer, output)?;
    Ok((tokenizer, network))
}

/// Prepares each item, given its index. If there are `many` items or more, the threads of the caller's pool share them.
fn prepared<T: Send, O: Send>(
    items: Vec<T>,
    many: usize,
    prepare: impl Fn(usize, T) -> Result<O, TaskError> + Sync,
) -> Result<Vec<O>, TaskError> {
    // Outside a pool rayon would use its global threads, which may be busy for long.
    if items.len() < many || rayon::current_thread_index().is_none() {
        return items.into_iter().enumerate().map(|(index, item)| prepare(index, item)).collect();
    }
    let shared = items.into_par_iter().enumerate().with_min_len((many / 4).max(1));
    // All items are prepared before the results are checked, so that the error is that of the first failing item.
    let all: Vec<_> = shared.map(|(index, item)| prepare(index, item)).collect();
    all.into_iter().collect()
}

/// Makes the input of a text network from a text's tokens. Refuses a text that was cut to the `most` tokens of the
/// model, unless `truncate` is set. The error names the text's `path` in the request.
fn sized(
    tokens: Tokens,
    truncate: bool,
    path: impl FnOnce() -> String,
    most: usize,
) -> Result<SizedInput<Tokens>, TaskError> {
    if tokens.truncated && !truncate {
        let path = path();
        let message = format!(
            "{path} is too long: this model takes at most {most} tokens, special ones included, and truncate is false"
        );
        return Err(TaskError::bad_input(path, message));
    }
    let size = tokens.ids.len();
    Ok(SizedInput::new(tokens, size))
}

/// Makes inputs of a task's texts: all at once if they are few, else slice by slice.
struct Texts<T, F> {
    items: IntoIter<T>,
    /// The index of the next item.
    next: usize,
    /// Bytes of an item's text.
    bytes: fn(&T) -> usize,
    /// Makes an item's input, by its index.
    input: F,
    /// Whether each input with an error is answered by the error. Otherwise the first error fails the task.
    each: bool,
    made: Arc<Made>,
}

/// The counts and errors of a task's inputs. Written by the threads that make the inputs, read when the reply is
/// written.
#[derive(Debug, Default)]
struct Made(Mutex<(InputCounts, Vec<(usize, TaskError)>)>);

impl Made {
    /// Takes the counts, and the errors that replace inputs in the reply, with their indices.
    fn take(&self) -> (InputCounts, Vec<(usize, TaskError)>) {
        mem::take(&mut *self.0.lock())
    }
}

impl<T, F> Texts<T, F>
where
    T: Send + 'static,
    F: Fn(usize, T) -> Result<SizedInput<Tokens>, TaskError> + Send + Sync + 'static,
{
    fn new(items: Vec<T>, bytes: fn(&T) -> usize, each: bool, input: F) -> Self {
        Self { items: items.into_iter(), next: 0, bytes, input, each, made: Arc::default() }
    }

    /// The inputs, and their counts and errors, which are complete once all inputs are made.
    fn inputs(mut self) -> Result<(Arc<Made>, Inputs<Tokens>), TaskError> {
        let made = self.made.clone();
        if self.fit(SLICE_BYTES) < self.items.len() {
            return Ok((made, Inputs::Slices(Box::new(self))));
        }
        let inputs = self.slice(self.items.len())?;
        Ok((made, Inputs::All(inputs)))
    }

    /// How many of the next items fit into so many bytes.
    fn fit(&self, mut bytes: usize) -> usize {
        let fits = |item: &&T| match bytes.checked_sub((self.bytes)(item) + TEXT_BYTES) {
            Some(left) => {
                bytes = left;
                true
            }
            None => false,
        };
        self.items.as_slice().iter().take_while(fits).count()
    }

    /// Makes the inputs of the next `count` items, and records their counts and errors.
    fn slice(&mut self, count: usize) -> Result<Vec<SizedInput<Tokens>>, TaskError> {
        let (first, input, each) = (self.next, &self.input, self.each);
        let items: Vec<T> = self.items.by_ref().take(count).collect();
        self.next += items.len();
        let made = prepared(items, MANY_TEXTS, |index, item| match input(first + index, item) {
            Err(error) if each => Ok(Err((first + index, error))),
            made => made.map(Ok),
        })?;
        let mut report = self.made.0.lock();
        let (counts, errors) = &mut *report;
        let mut inputs = Vec::with_capacity(made.len());
        for made in made {
            match made {
                Ok(input) => inputs.push(input),
                Err(error) => errors.push(error),
            }
        }
        counts.add(&inputs);
        Ok(inputs)
    }
}

impl<T, F> Iterator for Texts<T, F>
where
    T: Send + 'static,
    F: Fn(usize, T) -> Result<SizedInput<Tokens>, TaskError> + Send + Sync + 'static,
{
    type Item = Result<Vec<SizedInput<Tokens>>, TaskError>;

    fn next(&mut self) -> Option<Self::Item> {
        let threads = if rayon::current_thread_index().is_some() { rayon::current_num_threads() } else { 1 };
        let count = self.fit(SLICE_BYTES.saturating_mul(threads)).max(1);
        (self.items.len() > 0).then(|| self.slice(count))
    }

    /// Each slice takes at least one text, so there are at most as many slices as texts.
    fn size_hint(&self) -> (usize, Option<usize>) {
        (usize::from(self.items.len() > 0), Some(self.items.len()))
    }
}

/// The counts of inputs for a reply's usage and headers.
#[derive(Clone, Copy, Debug, Default)]
struct InputCounts {
    tokens: usize,
    truncated: usize,
}

impl InputCounts {
    fn add(&mut self, inputs: &[SizedInput<Tokens>]) {
        self.tokens += inputs.iter().map(|sized| sized.tokens).sum::<usize>();
        self.truncated += inputs.iter().filter(|sized| sized.input.truncated).count();
    }

    /// A JSON body, with the header `truncated` if any input was cut.
    fn body(self, json: Vec<u8>) -> Body {
        let body = Body::json(json);
        if self.truncated == 0 { body } else { body.header("truncated", self.truncated as i64) }
    }
}
