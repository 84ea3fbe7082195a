//! Labels of tokens, such as the names in a text, equal to the pipeline `token-classification` of the transformers library
//! within 1e-5. Turns `/token-classification` bodies into tokens with their places in the text, and the labels' logits into
//! entities. Decides in how many windows a long text is read. Only the network uses the
//! device, not the processor.

mod body;
mod entities;
mod network;

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use serde::Deserialize;

use self::body::{Entity, EntityWriter, KEYS, Strategy, TokenLabelsRequest};
use self::entities::{FoundEntity, Labelled, Token, is_by_word, without_overlaps};
use self::network::{LabelledWindow, TaskLabels};
pub use self::network::{TokenLabelNetwork, WindowInput};
use super::labels::{Labels, assumptions};
use super::names::ServedNames;
use super::{
    MAX_SEQ_LENGTH, MayBeCut, OnError, SharedReport, TextInputs, check_text_files, load_text_model,
    request_text_files, text_input, text_limits,
};
use crate::model::family::{Example, Family, FileRules, Sample, Serves};
use crate::model::load::ModelFiles;
use crate::model::load::tokenizer::{Reading, TextTokenizer, Window};
use crate::model::load::vocabulary::TokenField;
use crate::model::nets::encoder::Output;
use crate::model::nets::encoder::config::{Family as Architecture, NetworkConfig};
use crate::model::nets::encoder::text_config::TextConfig;
use crate::model::nets::held::Held;
use crate::model::{
    Body, Device, Inputs, LoadError, LoadSpec, Message, Preprocessed, Processor, Route, SizedInput,
    TaskError, TaskErrorKind,
};
use crate::protocol::endpoints::TOKEN_LABELS_URL as URL;

/// The maximum number of labels of a model. Each token has a number for each of them, so the bound limits the memory of a
/// batch.
const MAX_LABELS: usize = 4_096;
/// The maximum number of tokens of a task. They are kept with their labels until the task is answered, and take up to 56
/// MiB.
const MAX_TOKENS: usize = 1 << 20;
/// The maximum number of tokens of all windows of a text. The tokenizers library takes 100 bytes for each while it divides
/// the text.
const MAX_WINDOW_TOKENS: usize = 1 << 20;
/// The tokens of further windows that a task may have, for each byte of its texts, and those that it may have in any case.
/// A message of a few bytes would otherwise have thousands of windows, which differ by a token.
const WINDOW_TOKENS_PER_BYTE: usize = 4;
const FREE_WINDOW_TOKENS: usize = 1 << 16;
/// A text of more bytes that is read in windows is tokenised on the thread for long preparation.
const LONG_TEXT: usize = 32 << 10;
/// From this number of tokens on, the reply is written on the thread for long preparation. A token takes about 1 µs.
const MANY_TOKENS: usize = 10_000;

/// The suffix in `architectures` of classes with a head for tokens.
const HEAD_SUFFIX: &str = "ForTokenClassification";

/// Models that label the tokens of texts.
pub static FAMILY: Family = Family {
    name: "token-classification",
    routes: &[Route::json(URL)],
    fields: &[(URL, &KEYS)],
    serves: Serves::Files(FileRules {
        configs: &Architecture::NAMES,
        accepts: |model| {
            let has_head = model.classes().next().is_some_and(|class| class.ends_with(HEAD_SUFFIX));
            // No fixture shows that the heads of T5 are computed as in the reference implementation.
            has_head && model.architecture != "t5"
        },
        assumptions,
        ..FileRules::new(request_text_files, check)
    }),
    options: &[MAX_SEQ_LENGTH],
    sample: |texts| Sample::of_texts(URL, "input", texts),
    example: Example { model: "token-bert", options: &[] },
};

fn check(spec: &LoadSpec) -> Result<(), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    read_labels(&files, spec)?;
    check_text_files(&FAMILY, &files, spec)
}

/// The names of the labels.
fn read_labels(files: &ModelFiles, spec: &LoadSpec) -> Result<Vec<String>, LoadError> {
    let names = Labels::read(files, &spec.source)?.names;
    if names.is_empty() || names.len() > MAX_LABELS {
        let reason = format!("it has {} labels; from 1 to {MAX_LABELS} are supported", names.len());
        return Err(LoadError::File { path: files.required("config.json")?, reason });
    }
    Ok(names)
}

/// The file in which a tokenizer's special tokens are named.
#[derive(Default, Deserialize)]
struct TokenizerConfig {
    unk_token: Option<TokenField>,
}

/// The id of the token for unknown words: the one that the model's files name, else the usual one of BERT or RoBERTa.
fn unknown_id(files: &ModelFiles, tokenizer: &TextTokenizer) -> Result<Option<u32>, LoadError> {
    let config: TokenizerConfig = files.json("tokenizer_config.json")?.unwrap_or_default();
    Ok(match config.unk_token {
        Some(token) => tokenizer.id_of_token(&token.text()),
        None => ["[UNK]", "<unk>"].iter().find_map(|token| tokenizer.id_of_token(token)),
    })
}

/// Loads a model that labels tokens.
///
/// # Errors
/// As [`embed::load`](super::embed::load).
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(TokenLabelProcessor, TokenLabelNetwork), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = TextConfig::Encoder(NetworkConfig::read(&files, &spec.source)?);
    let labels: Arc<[String]> = read_labels(&files, spec)?.into();
    let limits = text_limits(&FAMILY, spec, &files, &config)?;
    let output = Output::TokenLabels(labels.len());
    let (tokenizer, network) = load_text_model(spec, device, &files, &config, limits, &output)?;
    let unknown = unknown_id(&files, &tokenizer)?;
    let (tokenizer, names) = (Arc::new(tokenizer), ServedNames::new(spec));
    let network = TokenLabelNetwork { network, names: labels.clone() };
    let processor = TokenLabelProcessor { tokenizer, labels, unknown, names, max_inputs: spec.max_inputs };
    Ok((processor, network))
}

/// Turns requests to label tokens into tokens, and the labels' logits into responses.
pub struct TokenLabelProcessor {
    tokenizer: Arc<TextTokenizer>,
    labels: Arc<[String]>,
    /// The id of the token for unknown words.
    unknown: Option<u32>,
    names: ServedNames,
    max_inputs: usize,
}

/// The parts of a request that its response needs.
pub struct TokenLabelContext {
    task: Arc<TaskLabels>,
    is_list: bool,
    /// In the order of the texts. The threads that make the inputs write it, and `finish` reads it.
    texts: Arc<Mutex<Vec<Text>>>,
    report: Arc<SharedReport>,
}

/// A text, as far as it was read.
#[derive(Default)]
struct Text {
    content: String,
    /// The tokens of each window.
    windows: Vec<Arc<[Token]>>,
}

/// Makes the inputs of a task's texts, and keeps what its response needs of them.
struct Preparation {
    tokenizer: Arc<TextTokenizer>,
    unknown: Option<u32>,
    request: TokenLabelsRequest,
    reading: Reading,
    task: Arc<TaskLabels>,
    /// The maximum number of windows of all texts.
    max_windows: usize,
    /// The windows of all texts.
    windows: AtomicUsize,
    /// The tokens of all texts.
    tokens: AtomicUsize,
    texts: Arc<Mutex<Vec<Text>>>,
}

impl Preparation {
    /// Makes the input of each window of a text.
    fn inputs(&self, index: usize, mut text: String) -> Result<Vec<SizedInput<WindowInput>>, TaskError> {
        let path = || self.request.texts.path(index);
        let max_windows = self.max_windows;
        let too_large = |what: String| TaskError::new(TaskErrorKind::TooLarge, what).with_param(path());
        let windows =
            self.tokenizer.windows(&text, self.reading).map_err(|error| error.with_param(path()))?;
        if self.windows.fetch_add(windows.len(), Ordering::Relaxed) + windows.len() > max_windows {
            return Err(too_large(format!(
                "the texts have more than {max_windows} windows together, the most for texts of these lengths; a smaller stride \
                 makes fewer"
            )));
        }
        let count: usize = windows.iter().map(|window| window.tokens.ids.len()).sum();
        if self.tokens.fetch_add(count, Ordering::Relaxed) + count > MAX_TOKENS {
            return Err(too_large(format!(
                "the texts have more than {MAX_TOKENS} tokens together; send fewer texts"
            )));
        }
        let spans = windows.iter().flat_map(|window| window.spans.iter().flatten());
        let end = spans.map(|span| span[1] as usize).max().unwrap_or(0);
        // `tokens` also reads the character at the start of a token, which a token without characters does not contain.
        let characters: Vec<char> = text.chars().take(end + 1).collect();
        let tokens: Vec<Arc<[Token]>> =
            windows.iter().map(|window| self.tokens(window, &characters).into()).collect();
        // What was cut off is not kept.
        if let Some((end_byte, _)) = text.char_indices().nth(end) {
            text.truncate(end_byte);
            text.shrink_to_fit();
        }
        self.texts.lock()[index] = Text { content: text, windows: tokens.clone() };
        let (truncate, max_tokens) = (self.request.truncate, self.tokenizer.max_tokens());
        let input = |(at, (window, labelled)): (usize, (Window, Arc<[Token]>))| {
            let SizedInput { input: tokens, tokens: size, .. } =
                text_input(window.tokens, truncate, path, max_tokens)?;
            let input = WindowInput { tokens, labelled, is_further: at > 0, task: self.task.clone() };
            Ok(SizedInput::new(input, size))
        };
        windows.into_iter().zip(tokens).enumerate().map(input).collect()
    }

    /// The tokens of a window, except for added special ones. Words are found as the library finds them: a token
    /// continues a word if the vocabulary has it with a prefix such as `##`. In a vocabulary without such a prefix,
    /// words begin at spaces.
    fn tokens(&self, window: &Window, characters: &[char]) -> Vec<Token> {
        let is_by_word = is_by_word(self.request.strategy);
        let has_prefix = self.tokenizer.has_prefix_of_continuations();
        let tokens = window.tokens.ids.iter().zip(&window.spans).enumerate();
        let token = |(index, (id, span)): (usize, (&u32, &Option<[u32; 2]>))| {
            let span = (*span)?;
            let [start, end] = span.map(|at| at as usize);
            let continues_word = if !is_by_word || Some(*id) == self.unknown {
                false
            } else if has_prefix {
                self.tokenizer.token(*id).chars().count() != end - start
            } else {
                start > 0 && !characters[start - 1..].iter().take(2).any(|character| *character == ' ')
            };
            Some(Token { index, id: *id, span, continues_word })
        };
        tokens.filter_map(token).collect()
    }
}

impl MayBeCut for WindowInput {
    fn is_cut(&self) -> bool {
        self.tokens.truncated
    }
}

impl Processor for TokenLabelProcessor {
    type Context = TokenLabelContext;
    type Input = WindowInput;
    type Piece = ();
    type Output = LabelledWindow;

    fn routes(&self) -> &[Route] {
        FAMILY.routes
    }

    fn probe(&self) -> Option<Message> {
        Some(Message { body: r#"{"input":"a candle in a sconce"}"#.into(), ..Message::default() })
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let mut request = TokenLabelsRequest::parse(&message.body, self.max_inputs)?;
        self.names.check(request.model.as_deref())?;
        let items = mem::take(&mut request.texts.items);
        let bytes: usize = items.iter().map(String::len).sum();
        let further = FREE_WINDOW_TOKENS.max(bytes * WINDOW_TOKENS_PER_BYTE) / self.tokenizer.max_tokens();
        let max_windows = self.max_inputs.min(items.len() + further);
        let reading = match request.stride {
            None => Reading::Cut,
            Some(stride) => {
                self.tokenizer.check_stride(stride)?;
                let of_one_text = (MAX_WINDOW_TOKENS / self.tokenizer.max_tokens()).max(1);
                Reading::Windows { stride, max_windows: max_windows.min(of_one_text) }
            }
        };
        let is_long = request.stride.is_some() && items.iter().any(|text| text.len() > LONG_TEXT);
        let texts = Arc::new(Mutex::new(items.iter().map(|_| Text::default()).collect::<Vec<_>>()));
        let (strategy, stride, is_list) =
            (request.strategy, request.stride.unwrap_or(0), request.texts.is_list);
        let ignored = mem::take(&mut request.ignored);
        let task = Arc::new(TaskLabels { strategy, ignored, stride, bytes: Held::default() });
        let preparation = Preparation {
            tokenizer: self.tokenizer.clone(),
            unknown: self.unknown,
            request,
            reading,
            task: task.clone(),
            max_windows,
            windows: AtomicUsize::new(0),
            tokens: AtomicUsize::new(0),
            texts: texts.clone(),
        };
        let inputs = TextInputs::new(items, String::len, OnError::FailTask, move |index, text| {
            preparation.inputs(index, text)
        });
        let report = inputs.report.clone();
        let inputs = if is_long {
            Inputs::Later(Box::new(move || inputs.into_inputs()?.1.all().map(Inputs::All)))
        } else {
            inputs.into_inputs()?.1
        };
        Ok((TokenLabelContext { task, is_list, texts, report }, inputs))
    }

    fn bytes(&self, input: &WindowInput) -> usize {
        input.tokens.bytes() + size_of_val(&*input.labelled)
    }

    fn is_finish_slow(&self, context: &TokenLabelContext) -> bool {
        context.report.0.lock().counts.tokens >= MANY_TOKENS
    }

    fn finish(&self, context: TokenLabelContext, outputs: Vec<LabelledWindow>) -> Result<Body, TaskError> {
        let mut writer = EntityWriter::new(context.is_list);
        let mut outputs = outputs.into_iter();
        for text in mem::take(&mut *context.texts.lock()) {
            writer.begin_text();
            self.write_text(&context, &text, outputs.by_ref().take(text.windows.len()), &mut writer)?;
            writer.end_text();
        }
        Ok(context.report.take().counts.body(writer.finish()))
    }
}

impl TokenLabelProcessor {
    /// Writes the entities of a text, given each of its windows.
    fn write_text(
        &self,
        context: &TokenLabelContext,
        text: &Text,
        outputs: impl Iterator<Item = LabelledWindow>,
        writer: &mut EntityWriter,
    ) -> Result<(), TaskError> {
        let TaskLabels { strategy, ignored, .. } = &*context.task;
        let strategy = *strategy;
        let outputs: Vec<LabelledWindow> = outputs.collect();
        let mut found: Vec<FoundEntity<'_>> = Vec::new();
        for (window, (tokens, LabelledWindow { parts, .. })) in text.windows.iter().zip(&outputs).enumerate()
        {
            found.extend(entities::entities(window, tokens, parts, &self.labels, strategy, ignored));
        }
        if text.windows.len() > 1 {
            found = without_overlaps(found);
        }
        let characters: Vec<char> = text.content.chars().collect();
        for FoundEntity { name, score, window, parts: part_range, span: [start, end] } in found {
            let tokens = &text.windows[window];
            let labelled = &outputs[window].parts[part_range];
            let is_token = strategy == Strategy::None;
            writer.push(&Entity {
                entity_group: (!is_token).then_some(name),
                entity: is_token.then_some(name),
                score,
                index: is_token.then(|| tokens[labelled[0].tokens.start].index),
                word: self.word(strategy, tokens, labelled, &characters)?,
                start,
                end,
            })?;
        }
        Ok(())
    }

    /// The text that the tokenizer makes of an entity's tokens. If words have the labels, the tokens of each word are
    /// joined first, and then the words, as in the library.
    fn word(
        &self,
        strategy: Strategy,
        tokens: &[Token],
        parts: &[Labelled],
        characters: &[char],
    ) -> Result<String, TaskError> {
        let token = |token: &Token| {
            if Some(token.id) == self.unknown {
                let [start, end] = token.span.map(|at| at as usize);
                characters[start..end].iter().collect()
            } else {
                self.tokenizer.token(token.id)
            }
        };
        let mut words = Vec::with_capacity(parts.len());
        for part in parts {
            let mut tokens: Vec<String> = tokens[part.tokens.clone()].iter().map(token).collect();
            if is_by_word(strategy) {
                tokens = vec![self.tokenizer.join(tokens)?];
            }
            words.append(&mut tokens);
        }
        if strategy == Strategy::None { Ok(words.concat()) } else { self.tokenizer.join(words) }
    }
}
