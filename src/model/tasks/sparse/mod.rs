//! Sparse vectors of texts by SPLADE models in the format of sentence-transformers, equal to its results within 1e-4.
//! Turns `/embed_sparse` bodies into token ids, and vectors into response bodies. Decides limits, prompts and how many
//! numbers are kept. Only the network uses the device, not the processor.

mod body;

use std::sync::Arc;

use serde::Deserialize;

use self::body::{KEYS, SparseRequest, write_vectors};
use super::names::ServedNames;
use super::sentence_settings::{Prompts, SentenceSettings};
use super::{
    MAX_SEQ_LENGTH, MayBeCut, OnError, SharedReport, TextInputs, check_text_files, read_tokenizer,
    request_text_files, text_input, text_limits,
};
use crate::model::family::{
    Description, Example, Family, FileRules, LIBRARY_CONFIG, MODULES, Module, Sample, Serves,
};
use crate::model::load::ModelFiles;
use crate::model::load::tokenizer::TextTokenizer;
use crate::model::nets::encoder::config::{Family as Architecture, NetworkConfig};
use crate::model::nets::encoder::sparse::{
    HeadNames, Selection, SparseHead, SparseInput, SparseNetwork, SparsePooling, SparseVector,
};
use crate::model::nets::encoder::text_config::TextConfig;
use crate::model::{
    Body, Device, LoadError, LoadSpec, Message, Preprocessed, Processor, Route, SizedInput, TaskError,
};
use crate::protocol::endpoints::SPARSE_URL as URL;

/// The suffix in `architectures` of classes with a head for masked tokens.
const HEAD_SUFFIX: &str = "ForMaskedLM";
/// The module that pools the logits of that head.
const SPLADE: &str = "SpladePooling";
/// A reply of this many numbers takes about 10 ms to write.
const MANY_NUMBERS: usize = 50_000;

/// Models that compute a sparse vector for each text.
pub static FAMILY: Family = Family {
    name: "embed_sparse",
    routes: &[Route::json(URL)],
    fields: &[(URL, &KEYS)],
    serves: Serves::Files(FileRules {
        configs: &Architecture::NAMES,
        libraries: &["SparseEncoder"],
        modules: &[SPLADE],
        accepts: |model| model.classes().next().is_some_and(|class| class.ends_with(HEAD_SUFFIX)),
        heads: &[HEAD_SUFFIX],
        assumptions,
        ..FileRules::new(request_text_files, check)
    }),
    options: &[MAX_SEQ_LENGTH],
    sample: |texts| Sample::of_texts(URL, "inputs", texts),
    example: Example { model: "sparse-bert", options: &[] },
};

fn check(spec: &LoadSpec) -> Result<(), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    Settings::read(&files, &NetworkConfig::read(&files, &spec.source)?, &spec.source)?;
    check_text_files(&FAMILY, &files, spec)
}

/// The pooling is assumed if `modules.json` does not have SpladePooling.
fn assumptions(model: &Description) -> Vec<String> {
    let assumption = || {
        format!(
            "for each token of the vocabulary, a text's vector has the largest log(1 + max(logit, 0)) of the text's tokens, and \
             no prompt is put before the text: the model has no {MODULES} with {SPLADE}"
        )
    };
    (!model.has_module(SPLADE)).then(assumption).into_iter().collect()
}

/// How vectors are made.
struct Settings {
    head: SparseHead,
    /// The most numbers of a vector, unless the request has `top_k`.
    top_k: Option<usize>,
    prompts: Prompts,
}

#[derive(Deserialize)]
struct PoolingConfig {
    pooling_strategy: Option<String>,
    activation_function: Option<String>,
}

#[derive(Default, Deserialize)]
struct LibraryConfig {
    max_active_dims: Option<usize>,
}

#[derive(Deserialize)]
struct HeadConfig {
    tie_word_embeddings: Option<bool>,
}

impl Settings {
    /// Reads the settings of the model `source`.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] naming the module, mode or head that is not supported, [`LoadError::File`] for an
    /// invalid file.
    fn read(files: &ModelFiles, config: &NetworkConfig, source: &str) -> Result<Self, LoadError> {
        let refused = |reason: String| LoadError::Unsupported { model: source.to_owned(), reason };
        let family = config.family;
        let names = HeadNames::of(config)
            .ok_or_else(|| refused(format!("the head for masked tokens of {family:?} is not supported")))?;
        let modules: Option<Vec<Module>> = files.json(MODULES)?;
        let (strategy, activation) = match modules.as_deref() {
            None => (None, None),
            Some(modules) => {
                let kinds: Vec<&str> = modules.iter().map(Module::kind).collect();
                let (["Transformer" | "MLMTransformer", SPLADE], [first, second]) = (&*kinds, modules) else {
                    return Err(refused(format!(
                        "{MODULES} lists {kinds:?}; Transformer, {SPLADE} is supported"
                    )));
                };
                if !first.path.is_empty() {
                    let path = &first.path;
                    return Err(refused(format!(
                        "the Transformer module is in the folder {path:?}; only the top of the model is supported"
                    )));
                }
                let pooling: PoolingConfig = files.required_json(&format!("{}/config.json", second.path))?;
                (pooling.pooling_strategy, pooling.activation_function)
            }
        };
        let sums = match strategy.as_deref() {
            None | Some("max") => false,
            Some("sum") => true,
            Some(other) => {
                return Err(refused(format!("pooling_strategy is {other:?}; max and sum are supported")));
            }
        };
        let logarithms = match activation.as_deref() {
            None | Some("relu") => 1,
            Some("log1p_relu") => 2,
            Some(other) => {
                let known = "relu and log1p_relu are supported";
                return Err(refused(format!("activation_function is {other:?}; {known}")));
            }
        };
        let library: LibraryConfig = files.json(LIBRARY_CONFIG)?.unwrap_or_default();
        if library.max_active_dims == Some(0) {
            return Err(refused("max_active_dims is 0; it must be at least 1".to_owned()));
        }
        let head: HeadConfig = files.required_json("config.json")?;
        let (pooling, is_tied) =
            (SparsePooling { sums, logarithms }, head.tie_word_embeddings.unwrap_or(true));
        Ok(Self {
            head: SparseHead { pooling, names, is_tied },
            top_k: library.max_active_dims,
            prompts: SentenceSettings::prompts(files, source)?,
        })
    }
}

/// Loads a model for sparse vectors.
///
/// # Errors
/// As [`embed::load`](super::embed::load).
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(SparseProcessor, SparseNetwork), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = NetworkConfig::read(&files, &spec.source)?;
    let Settings { head, top_k, prompts } = Settings::read(&files, &config, &spec.source)?;
    let text_config = TextConfig::Encoder(config.clone());
    let tokenizer = read_tokenizer(&files, &text_config, text_limits(&FAMILY, spec, &files, &text_config)?)?;
    let network = SparseNetwork::load(spec, device, &files, &config, &tokenizer, &head)?;
    let (tokenizer, names) = (Arc::new(tokenizer), ServedNames::new(spec));
    let processor = SparseProcessor { tokenizer, names, prompts, top_k, max_inputs: spec.max_inputs };
    Ok((processor, network))
}

/// Turns requests for sparse vectors into tokens, and vectors into responses.
pub struct SparseProcessor {
    tokenizer: Arc<TextTokenizer>,
    names: ServedNames,
    prompts: Prompts,
    /// The most numbers of a vector, unless the request has `top_k`.
    top_k: Option<usize>,
    max_inputs: usize,
}

/// The parts of a request that its response needs.
pub struct SparseContext {
    selection: Arc<Selection>,
    report: Arc<SharedReport>,
}

impl MayBeCut for SparseInput {
    fn is_cut(&self) -> bool {
        self.tokens.truncated
    }
}

impl Processor for SparseProcessor {
    type Context = SparseContext;
    type Input = SparseInput;
    type Piece = ();
    type Output = SparseVector;

    fn routes(&self) -> &[Route] {
        FAMILY.routes
    }

    fn probe(&self) -> Option<Message> {
        Some(Message { body: r#"{"inputs":"a candle in a sconce"}"#.into(), ..Message::default() })
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let mut request = SparseRequest::parse(&message.body, self.max_inputs)?;
        self.names.check(request.model.as_deref())?;
        let prompt = self.prompts.named(request.prompt_name.as_deref())?.to_owned();
        let selection = Arc::new(Selection::new(request.top_k.or(self.top_k), request.threshold));
        let (texts, tokenizer) = (std::mem::take(&mut request.texts.items), self.tokenizer.clone());
        let task_selection = selection.clone();
        let texts = TextInputs::new(texts, String::len, OnError::FailTask, move |index, text| {
            let path = || request.texts.path(index);
            let text = if prompt.is_empty() { text } else { format!("{prompt}{text}") };
            let tokens = tokenizer.text(&text).map_err(|error| error.with_param(path()))?;
            let sized = text_input(tokens, request.truncate, path, tokenizer.max_tokens())?;
            let input = SparseInput { tokens: sized.input, selection: task_selection.clone() };
            Ok(SizedInput::new(input, sized.tokens))
        });
        let (report, inputs) = texts.into_inputs()?;
        Ok((SparseContext { selection, report }, inputs))
    }

    fn bytes(&self, input: &SparseInput) -> usize {
        input.tokens.bytes()
    }

    fn is_finish_slow(&self, context: &SparseContext) -> bool {
        context.selection.held() > MANY_NUMBERS
    }

    fn finish(&self, context: SparseContext, outputs: Vec<SparseVector>) -> Result<Body, TaskError> {
        let written = write_vectors(outputs.iter().map(SparseVector::pairs));
        written.map(|body| context.report.take().counts.body(body))
    }
}
