//! Sentence embeddings, by models as sentence-transformers publishes them, and equal to its results to 1e-5:
//! from `/v1/embeddings` bodies to token ids, and from vectors to response bodies. Decides limits, names and
//! prompts; never touches the device.

use super::names::ServedNames;
use super::sentence_settings::{Prompts, SentenceSettings};
use super::{InputCounts, MANY_TEXTS, prepared, sized, text_model};
use crate::model::load::ModelFiles;
use crate::model::load::tokenizer::{TextTokenizer, Tokens};
use crate::model::nets::text::config::NetworkConfig;
use crate::model::nets::text::{Output, TextNetwork};
use crate::model::ops::pooling::{Pooling, normalize};
use crate::model::{
    Body, Device, LoadError, LoadSpec, Message, Preprocessed, Processor, Route, SizedInput, TaskError,
};
use crate::protocol::embeddings::{EmbeddingRequest, EmbeddingResponse, Encoding, Text, write_response};

/// Loads a model for embeddings.
///
/// # Errors
/// [`LoadError`] for a file that is missing or invalid, for a model of another kind, and for a device that
/// computes wrongly.
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(EmbeddingProcessor, TextNetwork), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = NetworkConfig::read(&files, &spec.source)?;
    let settings = SentenceSettings::read(&files, &spec.source)?;
    let output = Output::Pooled(settings.pooling.clone());
    let (tokenizer, network) = text_model((spec, device), (&files, &config), settings.limits, &output)?;
    let processor = EmbeddingProcessor {
        tokenizer,
        names: ServedNames::new(spec),
        width: settings.pooling.width(config.hidden),
        pooling: settings.pooling,
        prompts: settings.prompts.with_default_of(spec)?,
        max_inputs: spec.max_inputs,
    };
    Ok((processor, network))
}

/// What the response needs of its request.
#[derive(Clone, Debug)]
pub struct EmbeddingOptions {
    encoding: Encoding,
    dimensions: Option<usize>,
    counts: InputCounts,
    /// Errors of inputs that are answered in their places, with their indices.
    errors: Vec<(usize, TaskError)>,
}

/// Turns embedding requests into tokens and vectors into responses.
pub struct EmbeddingProcessor {
    pub(in crate::model) tokenizer: TextTokenizer,
    names: ServedNames,
    pooling: Pooling,
    prompts: Prompts,
    /// The width of a vector.
    width: usize,
    max_inputs: usize,
}

impl Processor for EmbeddingProcessor {
    type Context = EmbeddingOptions;
    type Input = Tokens;
    type Piece = ();
    type Output = Vec<f32>;

    fn routes(&self) -> &[Route] {
        const ROUTES: &[Route] = &[Route::json("/v1/embeddings")];
        ROUTES
    }

    fn probe(&self) -> Option<Message> {
        Some(Message { body: r#"{"input":"a candle in a sconce"}"#.into(), ..Message::default() })
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let request = EmbeddingRequest::parse(&message.body, self.max_inputs)?;
        self.names.check(request.model.as_deref())?;
        if let Some(dimensions) = request.dimensions.filter(|n| *n > self.width) {
            let width = self.width;
            let message = format!("dimensions is {dimensions}; this model gives {width} numbers");
            return Err(TaskError::bad_input("dimensions", message));
        }
        let (encoding, dimensions) = (request.encoding, request.dimensions);
        let (inputs, errors) = self.inputs(request)?;
        let counts = InputCounts::of(&inputs);
        Ok((EmbeddingOptions { encoding, dimensions, counts, errors }, inputs))
    }

    fn finish(&self, request: EmbeddingOptions, mut outputs: Vec<Vec<f32>>) -> Result<Body, TaskError> {
        if let Some(dimensions) = request.dimensions.filter(|n| *n < self.width) {
            for vector in &mut outputs {
                vector.truncate(dimensions);
                if self.pooling.normalize {
                    normalize(vector);
                }
            }
        }
        let response = write_response(&EmbeddingResponse {
            model: self.names.own(),
            vectors: &outputs,
            errors: &request.errors,
            encoding: request.encoding,
            prompt_tokens: request.counts.tokens,
        });
        response.map(|body| request.counts.body(body))
    }
}

/// The inputs of a request, and the errors of those that have none, with their indices.
type Prepared = (Vec<SizedInput<Tokens>>, Vec<(usize, TaskError)>);

impl EmbeddingProcessor {
    /// The inputs that can be computed, and the errors of the others; if none can be, the first error.
    fn inputs(&self, mut request: EmbeddingRequest) -> Result<Prepared, TaskError> {
        let prompt = self.prompts.of(request.prompt_name.as_deref())?;
        let texts = std::mem::take(&mut request.texts);
        let input = |index: usize, text: Result<Text, TaskError>| {
            let path = || request.path(index);
            let tokens = match text? {
                Text::Plain(text) if prompt.is_empty() => self.tokenizer.text(&text),
                Text::Plain(text) => self.tokenizer.text(&format!("{prompt}{text}")),
                Text::Ids(ids) => self.tokenizer.ids(ids, &path()),
            };
            let tokens =
                tokens.map_err(|error| if error.param.is_some() { error } else { error.at(path()) })?;
            sized(tokens, request.truncate, path, self.tokenizer.max_tokens())
        };
        if !request.each {
            return Ok((prepared(texts, MANY_TEXTS, input)?, Vec::new()));
        }
        let all = prepared(texts, MANY_TEXTS, |index, text| Ok(input(index, text)))?;
        let (mut inputs, mut errors) = (Vec::new(), Vec::new());
        for (index, input) in all.into_iter().enumerate() {
            match input {
                Ok(input) => inputs.push(input),
                Err(error) => errors.push((index, error)),
            }
        }
        match errors.first() {
            Some((_, error)) if inputs.is_empty() => Err(error.clone()),
            _ => Ok((inputs, errors)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processor() -> EmbeddingProcessor {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny-bert-cls");
        let spec = LoadSpec { max_inputs: 500, ..LoadSpec::new(folder) };
        load(&spec, &Device::Cpu).unwrap().0
    }

    /// The ids of each input, or the path of the refused one; also if threads share the work.
    fn ids_of(input: &serde_json::Value) -> Result<Vec<Vec<u32>>, Option<String>> {
        let processor = processor();
        let body = serde_json::json!({ "input": input }).to_string();
        let message = Message { body: body.into(), ..Message::default() };
        let prepare = || {
            let (_, inputs) = processor.preprocess(&message).map_err(|error| error.param)?;
            Ok(inputs.into_iter().map(|sized| sized.input.ids).collect())
        };
        let alone = prepare();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
        assert_eq!(pool.install(prepare), alone);
        alone
    }

    #[test]
    fn of_a_long_text_the_first_tokens_are_those_of_the_whole() {
        let prose = "Über  die “ﬁne” 中文 art,\tof tokenising: e\u{301}clairs\u{a0}&c. don’t x1234567890 ";
        for name in ["tiny-bert-cls", "tiny-xlm-roberta", "tiny-modernbert", "tiny-mpnet"] {
            let folder = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
            let processor = load(&LoadSpec::new(&folder), &Device::Cpu).unwrap().0;
            let path = format!("{folder}/tokenizer.json");
            let mut library = tokenizers::Tokenizer::from_file(path).unwrap();
            library.with_padding(None).with_truncation(None).unwrap();
            for text in [prose.repeat(2_000), prose.replace(' ', "").repeat(1_000), "中".repeat(100_000)] {
                let ours = processor.tokenizer.pieces(&text).unwrap();
                let whole = library.encode(text.as_str(), false).unwrap();
                let same = ours.iter().zip(whole.get_ids()).take_while(|(a, b)| a == b).count();
                assert_eq!(same, whole.len().min(processor.tokenizer.max_tokens() + 1), "{name}");
            }
        }
    }

    #[test]
    fn threads_that_share_many_texts_keep_their_order() {
        let texts: Vec<String> = (0..300).map(|n| format!("text {n} {}", "a b ".repeat(n % 7))).collect();
        assert_eq!(ids_of(&texts.into()).unwrap().len(), 300);
    }

    #[test]
    fn where_each_is_answered_by_itself_good_inputs_are_computed_and_bad_ones_named() {
        let preprocess = |body: &str| {
            let message = Message { body: body.to_owned().into(), ..Message::default() };
            let (options, inputs) = processor().preprocess(&message).map_err(|error| error.param)?;
            Ok::<_, Option<String>>((
                options.errors.into_iter().map(|(index, _)| index).collect(),
                inputs.len(),
            ))
        };
        let one_bad = r#"{"errors":"each","input":[[5],[4000000000],[5]]}"#;
        assert_eq!(preprocess(one_bad), Ok((vec![1], 2)));
        let all_bad = r#"{"errors":"each","input":[[4000000000],[4000000000]]}"#;
        assert_eq!(preprocess(all_bad), Err(Some("input[0]".to_owned())));
    }

    #[test]
    fn the_first_of_several_bad_inputs_is_named_whoever_finds_it() {
        let mut inputs = vec![vec![5]; 300];
        for bad in [71, 150, 299] {
            inputs[bad] = vec![4_000_000_000_u32];
        }
        assert_eq!(ids_of(&inputs.into()).unwrap_err().as_deref(), Some("input[71]"));
    }
}
