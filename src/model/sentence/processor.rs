//! From `/v1/embeddings` bodies to token ids, and from vectors to response bodies. Decides limits and names;
//! never touches the device.

use rayon::prelude::*;

use super::pooling::{Pooling, normalize};
use super::served::ServedNames;
use super::tokenize::TextTokenizer;
use crate::model::{Body, Message, Preprocessed, Processor, Route, SizedInput, TaskError};
use crate::protocol::embeddings::{EmbeddingRequest, EmbeddingResponse, Encoding, Text, write_response};

/// From this number on, texts are divided among the threads of the caller's pool.
const MANY: usize = 64;
/// The fewest texts for one thread.
const SHARE: usize = 16;

/// One text for the network.
#[derive(Clone, Debug)]
pub struct Sentence {
    /// Token ids with the special ones; at least one, all within the vocabulary.
    pub(super) ids: Vec<u32>,
}

/// What the response needs of its request.
#[derive(Clone, Debug)]
pub struct EmbeddingOptions {
    encoding: Encoding,
    dimensions: Option<usize>,
    /// The tokens of all inputs.
    prompt_tokens: usize,
}

/// Turns embedding requests into sentences and vectors into responses.
pub struct SentenceProcessor {
    pub(super) tokenizer: TextTokenizer,
    pub(super) names: ServedNames,
    pub(super) pooling: Pooling,
    /// The width of a vector.
    pub(super) width: usize,
    pub(super) max_inputs: usize,
}

impl Processor for SentenceProcessor {
    type Context = EmbeddingOptions;
    type Input = Sentence;
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
        if let Some(asked) = &request.model {
            self.names.check(asked)?;
        }
        if let Some(dimensions) = request.dimensions.filter(|n| *n > self.width) {
            let width = self.width;
            let message = format!("dimensions is {dimensions}; this model gives {width} numbers");
            return Err(TaskError::bad_input("dimensions", message));
        }
        let (encoding, dimensions) = (request.encoding, request.dimensions);
        let inputs = self.sentences(request)?;
        let prompt_tokens = inputs.iter().map(|input| input.tokens).sum();
        Ok((EmbeddingOptions { encoding, dimensions, prompt_tokens }, inputs))
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
            encoding: request.encoding,
            prompt_tokens: request.prompt_tokens,
        });
        response.map(Body::json)
    }
}

impl SentenceProcessor {
    fn sentences(&self, mut request: EmbeddingRequest) -> Result<Vec<SizedInput<Sentence>>, TaskError> {
        let texts = std::mem::take(&mut request.texts);
        let sentence = |(index, text): (usize, Text)| {
            let ids = match text {
                Text::Plain(text) => {
                    self.tokenizer.text(&text).map_err(|error| error.at(request.path(index)))?
                }
                Text::Ids(ids) => self.tokenizer.ids(ids, &request.path(index))?,
            };
            let tokens = ids.len();
            Ok(SizedInput::new(Sentence { ids }, tokens))
        };
        // Outside a pool rayon would use its global threads, which may be computing for long.
        if texts.len() < MANY || rayon::current_thread_index().is_none() {
            return texts.into_iter().enumerate().map(sentence).collect();
        }
        let shared = texts.into_par_iter().enumerate().with_min_len(SHARE);
        // All are computed before the check, so that the error is that of the first failing text.
        let sentences: Vec<_> = shared.map(sentence).collect();
        sentences.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Device, LoadSpec, sentence};

    fn processor() -> SentenceProcessor {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny-bert-cls");
        let spec = LoadSpec { max_inputs: 500, ..LoadSpec::new(folder) };
        sentence::load(&spec, &Device::Cpu).unwrap().0
    }

    /// The ids of each input, or the path of the refused one; also if threads share the work.
    fn prepared(input: &serde_json::Value) -> Result<Vec<Vec<u32>>, Option<String>> {
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
    fn threads_that_share_many_texts_keep_their_order() {
        let texts: Vec<String> = (0..300).map(|n| format!("text {n} {}", "a b ".repeat(n % 7))).collect();
        assert_eq!(prepared(&texts.into()).unwrap().len(), 300);
    }

    #[test]
    fn the_first_of_several_bad_inputs_is_named_whoever_finds_it() {
        let mut inputs = vec![vec![5]; 300];
        for bad in [71, 150, 299] {
            inputs[bad] = vec![4_000_000_000_u32];
        }
        assert_eq!(prepared(&inputs.into()).unwrap_err().as_deref(), Some("input[71]"));
    }
}
