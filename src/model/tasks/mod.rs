//! Kinds of requests. Each public module has the processor of one kind and loads its network; its `FAMILY` describes
//! the kind to other modules. Its `body`, or `request` and `reply`, reads requests and writes replies; `nets` has the
//! networks.

mod candidate_labels;
#[cfg(feature = "candle-transformers")]
pub mod caption;
pub mod embed;
pub mod generate;
pub mod image;
#[cfg(feature = "candle-transformers")]
pub mod image_generation;
pub mod labels;
mod logit_score;
mod names;
pub mod pairs;
pub(super) mod sentence_settings;
pub mod sparse;
pub mod speak;
#[cfg(feature = "candle-transformers")]
pub mod text_image;
pub mod token_labels;
pub mod transcribe;

use std::mem;
use std::sync::Arc;
use std::vec::IntoIter;

use parking_lot::Mutex;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use self::sentence_settings::SentenceSettings;
use super::family::{Family, OptionDefault, OptionProblem, OptionSpec, Takes};
use super::load::tokenizer::{TextLimits, TextTokenizer, Tokens};
use super::load::{ModelFiles, weights};
use super::nets::encoder::text_config::{MAX_DECODER_TOKENS, TextConfig};
use super::nets::encoder::{Output, TextNetwork};
use super::{Device, Effort, Inputs, LoadError, LoadSpec, SizedInput, TaskError, TaskErrorKind};
use crate::protocol::Body;

/// The largest cost of a body that counts as brief, in bytes of text. A tokenizer takes about 2 ms for 4 KiB of text, so
/// it takes about 1 ms.
const BRIEF_COST: usize = 2 << 10;
/// Bytes of the texts in a slice, for each thread: tokenising them takes about 16 ms. A longer text is a slice by
/// itself.
const SLICE_BYTES: usize = 32 << 10;
/// The cost of a text beside its bytes, expressed in bytes.
const TEXT_OVERHEAD: usize = 64;
/// From this number of texts on, the threads of the caller's pool share them.
const MANY_TEXTS: usize = 64;

/// The most tokens of a text or pair, unless the pool says another number. While a text of this length is computed, other
/// tasks wait: on two cores some seconds with BERT-base, and a minute with a decoder of a billion weights.
const DEFAULT_MAX_SEQ_LENGTH: usize = 8_192;

/// The option of families whose models may take long texts.
const MAX_SEQ_LENGTH: OptionSpec = OptionSpec {
    name: "max_seq_length",
    takes: Takes::Whole(8..=MAX_DECODER_TOKENS as u64),
    default: OptionDefault::Derived("the model's, at most 8,192"),
    help: "the most tokens of a text or pair. Longer ones are cut. Other tasks wait while a long text is computed",
};

/// The option of families whose answers are drawn at random.
const SEED: OptionSpec = OptionSpec {
    name: "seed",
    takes: Takes::Whole(0..=u64::MAX),
    default: OptionDefault::Value("0"),
    help: "with a task's id, the seed of the random numbers of tasks that set none",
};

#[derive(Deserialize)]
struct LengthOption {
    max_seq_length: Option<usize>,
}

/// The limits of texts, by the model's files and the pool's options.
fn text_limits(
    family: &Family,
    spec: &LoadSpec,
    files: &ModelFiles,
    config: &TextConfig,
) -> Result<TextLimits, LoadError> {
    let LengthOption { max_seq_length } = family.read_options(spec)?;
    let mut limits = SentenceSettings::limits(files)?;
    let own = limits.max_tokens.unwrap_or(usize::MAX).min(config.max_tokens());
    if let Some(wanted) = max_seq_length.filter(|wanted| *wanted > own) {
        let expected = format!("at most {own}, which is the model's");
        return Err(spec.refused_option(OptionProblem::expected(MAX_SEQ_LENGTH.name, wanted, expected)));
    }
    limits.max_tokens = Some(max_seq_length.unwrap_or(own.min(DEFAULT_MAX_SEQ_LENGTH)));
    Ok(limits)
}

/// Requests the files of a model for texts.
fn request_text_files(files: &ModelFiles) -> Result<(), LoadError> {
    files.required("config.json")?;
    SentenceSettings::request_files(files)?;
    files.optional("tokenizer.json")?;
    files.weights().map(drop)
}

/// Checks the options and the files that every network for texts has, as
/// [`FileRules::check`](super::family::FileRules::check) does.
fn check_text_files(family: &Family, files: &ModelFiles, spec: &LoadSpec) -> Result<(), LoadError> {
    let config = TextConfig::read(files, &spec.source)?;
    config.check(spec)?;
    text_limits(family, spec, files, &config)?;
    files.required("tokenizer.json")?;
    weights::check(&files.weights()?)
}

/// Loads a network for texts, and its tokenizer.
pub(super) fn load_text_model(
    spec: &LoadSpec,
    device: &Device,
    files: &ModelFiles,
    config: &TextConfig,
    limits: TextLimits,
    output: &Output,
) -> Result<(TextTokenizer, TextNetwork), LoadError> {
    let tokenizer = read_tokenizer(files, config, limits)?;
    let network = TextNetwork::load(spec, device, files, config, &tokenizer, output)?;
    Ok((tokenizer, network))
}

/// Reads the tokenizer of a network for texts.
fn read_tokenizer(
    files: &ModelFiles,
    config: &TextConfig,
    limits: TextLimits,
) -> Result<TextTokenizer, LoadError> {
    let path = files.required("tokenizer.json")?;
    TextTokenizer::read(path, limits, config.max_tokens(), config.vocabulary())
}

/// How long it takes to prepare the texts of a JSON body, if a prompt of at most `prompt_bytes` bytes is put before each.
/// It is judged before anything is computed, by what the bytes allow: a short body may have many texts or lists of token
/// ids, and normalising may make many characters of one.
fn effort_of_texts(body: &[u8], prompt_bytes: usize) -> Effort {
    let cost = |byte: &u8| match byte {
        // A text has two quotation marks.
        b'"' | b'[' => (TEXT_OVERHEAD + prompt_bytes).div_ceil(2),
        // The escape of a character has six bytes. No character becomes more than 33.
        b'\\' => 8,
        0x80.. => 4,
        _ => 1,
    };
    Effort::brief_if(body.len() <= BRIEF_COST && body.iter().map(cost).sum::<usize>() <= BRIEF_COST)
}

/// Prepares each item, given its index. If there are `many` items or more, the threads of the caller's pool share them.
fn prepare_all<T: Send, O: Send>(
    items: Vec<T>,
    many: usize,
    prepare: impl Fn(usize, T) -> Result<O, TaskError> + Sync,
) -> Result<Vec<O>, TaskError> {
    // Outside a pool rayon would use its global threads, which may be busy for long.
    if items.len() < many || rayon::current_thread_index().is_none() {
        return items.into_iter().enumerate().map(|(index, item)| prepare(index, item)).collect();
    }
    let items = items.into_par_iter().enumerate().with_min_len((many / 4).max(1));
    // All items are prepared before the results are checked, so that the first failing item gives the error.
    let results: Vec<_> = items.map(|(index, item)| prepare(index, item)).collect();
    results.into_iter().collect()
}

/// The time in seconds since 1970, for `created` in replies.
fn unix_seconds() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |elapsed| elapsed.as_secs())
}

/// Makes the input of a text network from a text's tokens. Refuses a text that was cut to the model's `max_tokens`,
/// unless `truncate` is set. The error names the text's `path` in the request.
fn text_input(
    tokens: Tokens,
    truncate: bool,
    path: impl FnOnce() -> String,
    max_tokens: usize,
) -> Result<SizedInput<Tokens>, TaskError> {
    if tokens.truncated && !truncate {
        let path = path();
        let message = format!(
            "{path} is too long: this model takes at most {max_tokens} tokens, special ones included, and truncate is false"
        );
        return Err(TaskError::bad_input(path, message));
    }
    let size = tokens.ids.len();
    Ok(SizedInput::new(tokens, size))
}

/// Makes the inputs of the texts in `field` of a request. A text that is too long fails the task.
pub(super) fn tokenized(
    tokenizer: &Arc<TextTokenizer>,
    field: &'static str,
    texts: Vec<String>,
    max_inputs: usize,
) -> Result<Inputs<Tokens>, TaskError> {
    if texts.len() > max_inputs {
        let message = format!("{field} holds {} items; this pool takes at most {max_inputs}", texts.len());
        return Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param(field));
    }
    let tokenizer = tokenizer.clone();
    let texts = TextInputs::new(texts, String::len, OnError::FailTask, move |index, text| {
        let path = || format!("{field}[{index}]");
        let tokens = tokenizer.text(&text).map_err(|error| error.with_param(path()))?;
        if tokens.truncated {
            let (path, max) = (path(), tokenizer.max_tokens());
            let message =
                format!("{path} is too long: this model takes at most {max} tokens, special ones included");
            return Err(TaskError::bad_input(path, message));
        }
        let size = tokens.ids.len();
        Ok(SizedInput::new(tokens, size))
    });
    texts.into_inputs().map(|(_, inputs)| inputs)
}

/// Makes inputs of a task's texts, and of images among them: all at once if they are few, else slice by slice.
struct TextInputs<T, F> {
    items: IntoIter<T>,
    /// The index of the next item.
    next: usize,
    /// Returns the bytes of an item's text, or for another item the bytes of a text that takes as long.
    bytes: fn(&T) -> usize,
    on_error: OnError,
    /// From this number of items on, the threads of the caller's pool share the items of a slice.
    many: usize,
    /// Makes an item's input or inputs, given its index.
    make_input: F,
    report: Arc<SharedReport>,
}

/// What becomes of an error in one input.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OnError {
    /// The first error fails the task.
    FailTask,
    /// The reply has each error in the place of its input's output.
    ReplaceOutput,
}

/// The threads that make the inputs write it, and `finish` reads it.
#[derive(Debug, Default)]
struct SharedReport(Mutex<InputReport>);

/// The counts and errors of a task's inputs.
#[derive(Debug, Default)]
struct InputReport {
    counts: InputCounts,
    /// Errors by the indices of their inputs.
    errors: Vec<(usize, TaskError)>,
}

/// The inputs of a task, and their report, which is complete once all inputs are made.
type ReportedInputs<I> = (Arc<SharedReport>, Inputs<I>);

/// An input that may be a text.
trait MayBeCut: Send + 'static {
    /// Whether it is a text that was cut to the model's limit.
    fn is_cut(&self) -> bool;
}

impl MayBeCut for Tokens {
    fn is_cut(&self) -> bool {
        self.truncated
    }
}

/// What is made of an item: one input or several.
trait Made: Send {
    type Input: MayBeCut;

    fn into_inputs(self) -> impl Iterator<Item = SizedInput<Self::Input>>;
}

impl<I: MayBeCut> Made for SizedInput<I> {
    type Input = I;

    fn into_inputs(self) -> impl Iterator<Item = Self> {
        std::iter::once(self)
    }
}

impl<I: MayBeCut> Made for Vec<SizedInput<I>> {
    type Input = I;

    fn into_inputs(self) -> impl Iterator<Item = SizedInput<I>> {
        self.into_iter()
    }
}

impl SharedReport {
    fn take(&self) -> InputReport {
        mem::take(&mut *self.0.lock())
    }
}

impl<T, F, M> TextInputs<T, F>
where
    T: Send + 'static,
    F: Fn(usize, T) -> Result<M, TaskError> + Send + Sync + 'static,
    M: Made,
{
    fn new(items: Vec<T>, bytes: fn(&T) -> usize, on_error: OnError, make_input: F) -> Self {
        let report = Arc::default();
        Self { items: items.into_iter(), next: 0, bytes, on_error, many: MANY_TEXTS, make_input, report }
    }

    /// Shares the items of a slice among threads from this number of items on.
    #[cfg(feature = "candle-transformers")]
    fn shared_from(self, many: usize) -> Self {
        Self { many, ..self }
    }

    /// Makes the inputs, or the iterator that makes them.
    fn into_inputs(mut self) -> Result<ReportedInputs<M::Input>, TaskError> {
        let report = self.report.clone();
        if self.count_within(SLICE_BYTES) < self.items.len() {
            return Ok((report, Inputs::Slices(Box::new(self))));
        }
        let inputs = self.make_inputs(self.items.len())?;
        Ok((report, Inputs::All(inputs)))
    }

    /// The number of the next items that have at most this many bytes together.
    fn count_within(&self, mut bytes: usize) -> usize {
        let fits = |item: &&T| match bytes.checked_sub((self.bytes)(item) + TEXT_OVERHEAD) {
            Some(left) => {
                bytes = left;
                true
            }
            None => false,
        };
        self.items.as_slice().iter().take_while(fits).count()
    }

    /// Makes the inputs of the next `count` items, and reports their counts and errors.
    fn make_inputs(&mut self, count: usize) -> Result<Vec<SizedInput<M::Input>>, TaskError> {
        let (first, make_input, on_error) = (self.next, &self.make_input, self.on_error);
        let items: Vec<T> = self.items.by_ref().take(count).collect();
        self.next += items.len();
        let results = prepare_all(items, self.many, |index, item| match make_input(first + index, item) {
            Err(error) if on_error == OnError::ReplaceOutput => Ok(Err((first + index, error))),
            result => result.map(Ok),
        })?;
        let mut report = self.report.0.lock();
        let mut inputs = Vec::with_capacity(results.len());
        for result in results {
            match result {
                Ok(made) => inputs.extend(made.into_inputs()),
                Err(error) => report.errors.push(error),
            }
        }
        report.counts.add(&inputs);
        Ok(inputs)
    }
}

impl<T, F, M> Iterator for TextInputs<T, F>
where
    T: Send + 'static,
    F: Fn(usize, T) -> Result<M, TaskError> + Send + Sync + 'static,
    M: Made,
{
    type Item = Result<Vec<SizedInput<M::Input>>, TaskError>;

    fn next(&mut self) -> Option<Self::Item> {
        let threads = if rayon::current_thread_index().is_some() { rayon::current_num_threads() } else { 1 };
        let count = self.count_within(SLICE_BYTES.saturating_mul(threads)).max(1);
        (self.items.len() > 0).then(|| self.make_inputs(count))
    }

    /// Each slice takes at least one text, so there are at most as many slices as texts.
    fn size_hint(&self) -> (usize, Option<usize>) {
        (usize::from(self.items.len() > 0), Some(self.items.len()))
    }
}

/// The counts of a task's inputs, for the usage and the headers of the reply.
#[derive(Clone, Copy, Debug, Default)]
struct InputCounts {
    tokens: usize,
    /// The number of inputs that were cut.
    truncated: usize,
}

impl InputCounts {
    fn add<I: MayBeCut>(&mut self, inputs: &[SizedInput<I>]) {
        self.tokens += inputs.iter().map(|sized| sized.tokens).sum::<usize>();
        self.truncated += inputs.iter().filter(|sized| sized.input.is_cut()).count();
    }

    /// A JSON body, with the header `truncated` if any input was cut.
    fn body(self, json: Vec<u8>) -> Body {
        let body = Body::json(json);
        if self.truncated == 0 { body } else { body.header("truncated", self.truncated as i64) }
    }
}

/// OpenAI's `usage` of requests that generate no tokens.
#[derive(Clone, Copy, Debug, Serialize)]
struct Usage {
    prompt_tokens: usize,
    total_tokens: usize,
}

impl Usage {
    /// The usage of a request whose inputs have `tokens` tokens in all, special ones included.
    fn new(tokens: usize) -> Self {
        Self { prompt_tokens: tokens, total_tokens: tokens }
    }
}

/// Serializes a body as JSON.
///
/// # Errors
/// `Internal` if the value cannot be written.
fn to_json(body: &impl Serialize) -> Result<Vec<u8>, TaskError> {
    serde_json::to_vec(body)
        .map_err(|error| TaskError::internal(format!("the reply cannot be written: {error}")))
}

#[cfg(test)]
mod tests {
    use tokenizers::NormalizedString;

    use super::*;

    #[test]
    fn the_content_of_a_body_decides_whether_its_texts_are_brief() {
        let effort = |body: String, prompt| effort_of_texts(body.as_bytes(), prompt);
        let one = |text: &str| format!(r#"{{"model":"m","input":"{text}","encoding_format":"base64"}}"#);
        let sentence = "A sconce holds candles, and each worker of it is one candle on one device. ";
        assert_eq!(effort(one(&sentence.repeat(4)), 40), Effort::Brief);
        assert_eq!(effort(one(&"\u{4e2d}".repeat(40)), 40), Effort::Brief);
        let many = format!(r#"{{"input":[{}""]}}"#, r#""","#.repeat(50));
        let lists = format!(r#"{{"input":[{}[1]]}}"#, "[1],".repeat(100));
        let growing = "\u{fdfa}".repeat(300);
        for body in [many, lists, one(&sentence.repeat(40)), one(&growing), one(&"\\ufdfa".repeat(200))] {
            assert!(body.len() <= BRIEF_COST + 2_000, "{}", body.len());
            assert_eq!(effort(body.clone(), 0), Effort::Usual, "{body}");
        }
        let few = r#"{"input":["a","b","c","d"]}"#.to_owned();
        assert_eq!((effort(few.clone(), 0), effort(few, 500)), (Effort::Brief, Effort::Usual));
    }

    #[test]
    fn normalising_makes_at_most_three_bytes_of_a_counted_one() {
        for character in (0x80..=0x10_ffff).filter_map(char::from_u32) {
            let mut normalized = NormalizedString::from(character.to_string());
            let bytes = normalized.nfkd().get().len().max(normalized.nfkc().get().len());
            assert!(bytes <= 3 * 4 * character.len_utf8(), "{character:?}");
        }
    }
}
