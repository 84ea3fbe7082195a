//! Sentence embeddings by models in the format of sentence-transformers, equal to its results within 1e-5. Turns
//! `/v1/embeddings` bodies into token ids, and vectors into response bodies. Decides limits, names and prompts; never
//! touches the device.

mod reply;
mod request;

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use self::reply::{EmbeddingResponse, Encoding, write_response};
pub use self::request::{EmbeddingRequest, Input, KEYS};
use super::names::ServedNames;
use super::sentence_settings::{Prompts, SentenceSettings};
use super::{
    InputReport, MAX_SEQ_LENGTH, OnError, ReportedInputs, SharedReport, TextInputs, check_text_files,
    effort_of_texts, load_text_model, request_text_files, text_input, text_limits,
};
use crate::model::family::{
    Description, Example, Family, FileRules, MODULES, OptionDefault, OptionSpec, POOLING, Sample, Serves,
    Takes,
};
use crate::model::load::ModelFiles;
use crate::model::load::tokenizer::{TextTokenizer, Tokens};
use crate::model::nets::decoder::architectures::CONFIG_ARCHITECTURES;
use crate::model::nets::encoder::text_config::{NAMES, TextConfig};
use crate::model::nets::encoder::{Output, TextNetwork};
use crate::model::ops::pooling::normalize;
use crate::model::{
    Body, Device, Effort, LoadError, LoadSpec, Message, Preprocessed, Processor, Route, TaskError,
};
use crate::protocol::endpoints::EMBEDDINGS_URL as URL;

/// Models that compute a vector for each text.
pub static FAMILY: Family = Family {
    name: "embed",
    routes: &[Route::json(URL)],
    fields: &[(URL, &KEYS)],
    serves: Serves::Files(FileRules {
        configs: &NAMES,
        libraries: &["SentenceTransformer"],
        modules: &[POOLING],
        accepts,
        heads: &["Model", "ForMaskedLM", "ForPreTraining"],
        assumptions,
        ..FileRules::new(request_text_files, check)
    }),
    options: &[
        OptionSpec {
            name: "prompt_name",
            takes: Takes::Text,
            default: OptionDefault::Derived("the model's"),
            help: "the prompt of the model's `config_sentence_transformers.json` that is put before texts whose request \
                   names none",
        },
        MAX_SEQ_LENGTH,
    ],
    sample: |texts| Sample::of_texts(URL, "input", texts),
    example: Example { model: "tiny-bert-cls", options: &[] },
};

/// Whether a model of an architecture that also generates text is one of vectors: the encoder of T5, or a decoder whose
/// class is known.
fn accepts(model: &Description) -> bool {
    let class = model.classes().next();
    match &*model.architecture {
        _ if model.has_pooling() => true,
        "t5" => class == Some("T5EncoderModel"),
        architecture => class.is_some() || !CONFIG_ARCHITECTURES.contains(&architecture),
    }
}

/// Pooling is assumed without `modules.json`, and a head that is not used is named.
fn assumptions(model: &Description) -> Vec<String> {
    if model.has_pooling() {
        return Vec::new();
    }
    let is_causal = model.fields.get("is_causal") != Some(&Value::Bool(false))
        && model.classes().next().is_some_and(|class| class.ends_with("ForCausalLM"));
    let vector = if is_causal { "the vector of its last token" } else { "the mean of its tokens' vectors" };
    let mut all = vec![format!(
        "a text's vector is {vector}, not normalised, and no prompt is put before the text: the model has no {MODULES} with \
         {POOLING}"
    )];
    if let Some(class) = model.classes().next().filter(|class| !class.ends_with("Model")) {
        all.push(format!("the head of {class} is not used"));
    }
    all
}

#[derive(Deserialize)]
struct Options {
    prompt_name: Option<String>,
}

impl Options {
    /// The model's prompts, with the default that the pool sets.
    fn prompts(spec: &LoadSpec, prompts: Prompts) -> Result<Prompts, LoadError> {
        let Self { prompt_name } = FAMILY.read_options(spec)?;
        prompts.with_default(prompt_name.as_deref()).map_err(|problem| spec.refused_option(problem))
    }
}

fn check(spec: &LoadSpec) -> Result<(), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let hidden = TextConfig::read(&files, &spec.source)?.hidden();
    let settings = SentenceSettings::read(&files, &spec.source, hidden)?;
    Options::prompts(spec, settings.prompts)?;
    check_text_files(&FAMILY, &files, spec)
}

/// Loads a model for embeddings.
///
/// # Errors
/// [`LoadError`] for a file that is missing or invalid, for a model of another kind, and for a device that
/// computes wrongly.
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(EmbeddingProcessor, TextNetwork), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = TextConfig::read(&files, &spec.source)?;
    let settings = SentenceSettings::read(&files, &spec.source, config.hidden())?;
    let vectors =
        Vectors { width: settings.head.width(config.hidden()), normalize: settings.head.normalizes() };
    let output = Output::Pooled(settings.head);
    let limits = text_limits(&FAMILY, spec, &files, &config)?;
    let (tokenizer, network) = load_text_model(spec, device, &files, &config, limits, &output)?;
    let processor = EmbeddingProcessor {
        tokenizer: Arc::new(tokenizer),
        names: ServedNames::new(spec),
        vectors,
        prompts: Options::prompts(spec, settings.prompts)?,
        include_prompt: settings.include_prompt,
        max_inputs: spec.max_inputs,
    };
    Ok((processor, network))
}

/// The parts of a request that its response needs.
#[derive(Clone, Debug)]
pub struct EmbeddingContext {
    pub(super) encoding: Encoding,
    pub(super) dimensions: Option<usize>,
    pub(super) report: Arc<SharedReport>,
}

/// The vectors of a model.
#[derive(Clone, Copy)]
pub(super) struct Vectors {
    /// Their number of dimensions.
    pub(super) width: usize,
    /// Whether they have the length 1, also after some of their dimensions are dropped.
    pub(super) normalize: bool,
}

impl Vectors {
    /// Refuses a request for more dimensions than there are.
    pub(super) fn check_dimensions(self, request: &EmbeddingRequest) -> Result<(), TaskError> {
        let Some(dimensions) = request.dimensions.filter(|n| *n > self.width) else { return Ok(()) };
        let width = self.width;
        let message = format!("dimensions is {dimensions}; this model gives {width} numbers");
        Err(TaskError::bad_input("dimensions", message))
    }
}

impl EmbeddingContext {
    /// Writes the response.
    pub(super) fn reply(
        self,
        names: &ServedNames,
        Vectors { width, normalize: normalizes }: Vectors,
        mut outputs: Vec<Vec<f32>>,
    ) -> Result<Body, TaskError> {
        let InputReport { counts, errors } = self.report.take();
        // If no input is good, the task fails by the first error.
        if let Some((_, error)) = errors.first().filter(|_| outputs.is_empty()) {
            return Err(error.clone());
        }
        if let Some(dimensions) = self.dimensions.filter(|n| *n < width) {
            for vector in &mut outputs {
                vector.truncate(dimensions);
                if normalizes {
                    normalize(vector);
                }
            }
        }
        let response = write_response(&EmbeddingResponse {
            model: names.reply_name(),
            vectors: &outputs,
            errors: &errors,
            encoding: self.encoding,
            prompt_tokens: counts.tokens,
        });
        response.map(|body| counts.body(body))
    }
}

/// Turns embedding requests into tokens, and vectors into responses.
pub struct EmbeddingProcessor {
    pub(in crate::model) tokenizer: Arc<TextTokenizer>,
    names: ServedNames,
    vectors: Vectors,
    prompts: Prompts,
    /// Whether the tokens of a prompt are pooled too.
    include_prompt: bool,
    max_inputs: usize,
}

impl Processor for EmbeddingProcessor {
    type Context = EmbeddingContext;
    type Input = Tokens;
    type Piece = ();
    type Output = Vec<f32>;

    fn routes(&self) -> &[Route] {
        FAMILY.routes
    }

    fn probe(&self) -> Option<Message> {
        Some(Message { body: r#"{"input":"a candle in a sconce"}"#.into(), ..Message::default() })
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let request = EmbeddingRequest::parse(&message.body, self.max_inputs)?;
        self.names.check(request.model.as_deref())?;
        self.vectors.check_dimensions(&request)?;
        let (encoding, dimensions) = (request.encoding, request.dimensions);
        let (report, inputs) = self.inputs(request)?;
        Ok((EmbeddingContext { encoding, dimensions, report }, inputs))
    }

    fn effort(&self, message: &Message) -> Effort {
        effort_of_texts(&message.body, self.prompts.longest())
    }

    fn bytes(&self, tokens: &Tokens) -> usize {
        tokens.bytes()
    }

    fn finish(&self, context: EmbeddingContext, outputs: Vec<Vec<f32>>) -> Result<Body, TaskError> {
        context.reply(&self.names, self.vectors, outputs)
    }
}

impl EmbeddingProcessor {
    /// Makes the inputs, and the report of their counts and errors.
    fn inputs(&self, mut request: EmbeddingRequest) -> Result<ReportedInputs<Tokens>, TaskError> {
        let prompt = self.prompts.named(request.prompt_name.as_deref())?.to_owned();
        let texts = std::mem::take(&mut request.inputs);
        let on_error = if request.errors_per_input { OnError::ReplaceOutput } else { OnError::FailTask };
        let bytes = |text: &Result<Input, TaskError>| match text {
            Ok(Input::Text(text)) => text.len(),
            Ok(Input::Ids(ids)) => ids.len(),
            Ok(Input::Image(_)) | Err(_) => 0,
        };
        let tokenizer = self.tokenizer.clone();
        let unpooled =
            if self.include_prompt || prompt.is_empty() { 0 } else { tokenizer.prompt_length(&prompt)? };
        let texts = TextInputs::new(texts, bytes, on_error, move |index, text| {
            let path = || request.path(index);
            let tokens = match text? {
                Input::Text(text) if prompt.is_empty() => tokenizer.text(&text),
                Input::Text(text) => tokenizer
                    .text(&format!("{prompt}{text}"))
                    .and_then(|tokens| tokens.without_first(unpooled)),
                Input::Ids(ids) => tokenizer.ids(ids, &path()),
                Input::Image(_) => Err(TaskError::internal("a model of texts got an image")),
            };
            let tokens = tokens
                .map_err(|error| if error.param.is_some() { error } else { error.with_param(path()) })?;
            text_input(tokens, request.truncate, path, tokenizer.max_tokens())
        });
        texts.into_inputs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Inputs;

    fn processor() -> EmbeddingProcessor {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny-bert-cls");
        let spec = LoadSpec { max_inputs: 1_000, ..LoadSpec::new(folder) };
        load(&spec, &Device::Cpu).unwrap().0
    }

    /// The ids of each input, or the path of the refused one. Checks that the number of threads does not matter.
    fn ids_of(input: &serde_json::Value) -> Result<Vec<Vec<u32>>, Option<String>> {
        let processor = processor();
        let body = serde_json::json!({ "input": input }).to_string();
        let message = Message { body: body.into(), ..Message::default() };
        let prepare = || {
            let inputs =
                processor.preprocess(&message).and_then(|it| it.1.all()).map_err(|error| error.param)?;
            Ok(inputs.into_iter().map(|sized| sized.input.ids).collect())
        };
        let alone = prepare();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
        assert_eq!(pool.install(prepare), alone);
        alone
    }

    #[test]
    fn the_first_tokens_of_a_long_text_equal_those_of_the_whole_text() {
        let prose = "Über  die “ﬁne” 中文 art,\tof tokenising: e\u{301}clairs\u{a0}&c. don’t x1234567890 ";
        for name in ["tiny-bert-cls", "tiny-xlm-roberta", "tiny-modernbert", "tiny-mpnet", "tiny-deberta"] {
            let folder = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
            let processor = load(&LoadSpec::new(&folder), &Device::Cpu).unwrap().0;
            let path = format!("{folder}/tokenizer.json");
            let mut library = tokenizers::Tokenizer::from_file(path).unwrap();
            library.with_padding(None).with_truncation(None).unwrap();
            for text in [prose.repeat(2_000), prose.replace(' ', "").repeat(1_000), "中".repeat(100_000)] {
                let ours = processor.tokenizer.pieces(&text).unwrap();
                let whole = library.encode(text.as_str(), false).unwrap();
                let same = ours.iter().zip(whole.get_ids()).take_while(|(a, b)| a == b).count();
                // For a text that is too long, `pieces` returns one token more than fits.
                assert_eq!(same, whole.len().min(processor.tokenizer.max_tokens() + 1), "{name}");
            }
        }
    }

    #[test]
    fn many_texts_are_tokenised_slice_by_slice_and_a_long_one_alone() {
        let lengths = |texts: Vec<String>| {
            let body = serde_json::json!({ "input": texts }).to_string();
            let message = Message { body: body.into(), ..Message::default() };
            match processor().preprocess(&message).unwrap().1 {
                Inputs::All(_) | Inputs::Later(_) => None,
                Inputs::Slices(slices) => Some(slices.map(|slice| slice.unwrap().len()).collect::<Vec<_>>()),
            }
        };
        assert_eq!(lengths(vec!["a b ".repeat(500); 15]), None);
        assert_eq!(lengths(vec!["a b ".repeat(500); 40]), Some(vec![15, 15, 10]));
        let long = "a ".repeat(20_000);
        assert_eq!(lengths(vec![long.clone(), "a".into(), "b".into(), long]), Some(vec![1, 2, 1]));
    }

    #[test]
    fn threads_that_share_many_texts_keep_their_order() {
        let texts: Vec<String> = (0..300).map(|n| format!("text {n} {}", "a b ".repeat(n % 7))).collect();
        assert_eq!(ids_of(&texts.into()).unwrap().len(), 300);
    }

    #[test]
    fn errors_each_computes_good_inputs_and_reports_bad_ones() {
        let answered = |body: &str| {
            let message = Message { body: body.to_owned().into(), ..Message::default() };
            let processor = processor();
            let (context, inputs) = processor.preprocess(&message).map_err(|error| error.param)?;
            let outputs =
                vec![vec![0.0; processor.vectors.width]; inputs.all().map_err(|error| error.param)?.len()];
            let reply = processor.finish(context, outputs).map_err(|error| error.param)?;
            let reply: serde_json::Value = serde_json::from_slice(&reply.bytes).unwrap();
            let data = reply["data"].as_array().unwrap();
            Ok::<_, Option<String>>(data.iter().map(|one| one["embedding"].is_array()).collect::<Vec<_>>())
        };
        let one_bad = r#"{"errors":"each","input":[[5],[4000000000],[5]]}"#;
        assert_eq!(answered(one_bad), Ok(vec![true, false, true]));
        let all_bad = r#"{"errors":"each","input":[[4000000000],[4000000000]]}"#;
        assert_eq!(answered(all_bad), Err(Some("input[0]".to_owned())));
        // A thousand inputs are made in slices.
        let inputs: Vec<u32> =
            (0..1_000).map(|index| if index % 7 == 3 { 4_000_000_000 } else { 5 }).collect();
        let inputs: Vec<[u32; 1]> = inputs.into_iter().map(|id| [id]).collect();
        let some_bad = serde_json::json!({"errors": "each", "input": inputs}).to_string();
        let expected = (0..1_000).map(|index| index % 7 != 3).collect();
        assert_eq!(answered(&some_bad), Ok(expected));
    }

    #[test]
    fn the_first_of_several_bad_inputs_is_named_by_any_number_of_threads() {
        let mut inputs = vec![vec![5]; 300];
        for bad in [71, 150, 299] {
            inputs[bad] = vec![4_000_000_000_u32];
        }
        assert_eq!(ids_of(&inputs.into()).unwrap_err().as_deref(), Some("input[71]"));
    }
}
