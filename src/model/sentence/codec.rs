//! `/v1/embeddings` bodies → token ids, and vectors → response bodies. Decides limits and names;
//! never touches the device.

use super::pooling::{Pooling, normalize};
use super::served::ServedNames;
use super::tokenize::TextTokenizer;
use crate::model::{Codec, Costed, Prepared};
use crate::protocol::embeddings::{EmbeddingRequest, EmbeddingResponse, Encoding, Text, write_response};
use crate::protocol::{Message, TaskError};

/// One text, as the network takes it.
#[derive(Clone, Debug)]
pub struct Sentence {
    /// Token ids, special ones included; at least one, all within the vocabulary.
    pub(super) ids: Vec<u32>,
}

/// What a response needs of its request.
#[derive(Clone, Debug)]
pub struct EmbeddingOptions {
    encoding: Encoding,
    dimensions: Option<usize>,
    /// Tokens of all inputs.
    prompt_tokens: usize,
}

/// Turns embedding requests into sentences and vectors into responses.
pub struct SentenceCodec {
    pub(super) tokenizer: TextTokenizer,
    pub(super) names: ServedNames,
    pub(super) pooling: Pooling,
    /// Numbers in a vector.
    pub(super) width: usize,
    pub(super) max_inputs: usize,
}

impl Codec for SentenceCodec {
    type Request = EmbeddingOptions;
    type Input = Sentence;
    type Output = Vec<f32>;

    fn endpoint(&self) -> &'static str {
        "/v1/embeddings"
    }

    fn known_input(&self) -> Option<Message> {
        Some(Message { body: r#"{"input":"a candle in a sconce"}"#.into(), ..Message::default() })
    }

    /// A tokenizer takes some 2 ms for 4 KiB of text; 384 numbers are written in 10 µs.
    fn is_brief(&self, bytes: usize, inputs: usize) -> bool {
        bytes <= 1 << 10 && inputs <= 4
    }

    fn prepare(&self, message: &Message) -> Result<Prepared<Self>, TaskError> {
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
        Ok(Prepared { request: EmbeddingOptions { encoding, dimensions, prompt_tokens }, inputs })
    }

    fn respond(&self, request: EmbeddingOptions, mut outputs: Vec<Vec<f32>>) -> Result<Vec<u8>, TaskError> {
        if let Some(dimensions) = request.dimensions.filter(|n| *n < self.width) {
            for vector in &mut outputs {
                vector.truncate(dimensions);
                if self.pooling.normalize {
                    normalize(vector);
                }
            }
        }
        write_response(&EmbeddingResponse {
            model: self.names.own(),
            vectors: &outputs,
            encoding: request.encoding,
            prompt_tokens: request.prompt_tokens,
        })
    }
}

impl SentenceCodec {
    fn sentences(&self, mut request: EmbeddingRequest) -> Result<Vec<Costed<Sentence>>, TaskError> {
        let texts = std::mem::take(&mut request.texts);
        let sentences = texts.into_iter().enumerate().map(|(index, text)| {
            let ids = match text {
                Text::Plain(text) => {
                    self.tokenizer.text(&text).map_err(|error| error.at(request.path(index)))?
                }
                Text::Ids(ids) => self.tokenizer.ids(ids, &request.path(index))?,
            };
            Ok(Costed { tokens: ids.len(), input: Sentence { ids } })
        });
        sentences.collect()
    }
}
