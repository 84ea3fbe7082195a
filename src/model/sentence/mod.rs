//! Sentence embeddings by BERT's family, loaded as sentence-transformers publishes them, and equal
//! to its results to 1e-5. Owns the loaded model; knows neither where tasks come from nor how they
//! are batched.
//!
//! The network runs without padding: a batch is one matrix of all its tokens, so that texts of any
//! lengths go together and none costs more than its own tokens.

mod codec;
mod config;
mod encoder;
mod footprint;
pub mod kernels;
pub mod pooling;
mod served;
mod settings;
mod tokenize;
mod weights;

pub use codec::{EmbeddingOptions, Sentence, SentenceCodec};

use candle_core::{DType, Tensor};

use self::config::NetworkConfig;
use self::encoder::Encoder;
use self::pooling::Pooling;
use self::served::ServedNames;
use self::settings::SentenceSettings;
use self::tokenize::TextTokenizer;
use self::weights::Weights;
use super::source::ModelFiles;
use super::{Dtype, Footprint, ForwardError, LoadError, LoadSpec, Model, Step, Steps, device};
use crate::protocol::{TaskError, TaskErrorKind};

/// A sentence-embedding model on one device.
pub struct SentenceEncoder {
    encoder: Encoder,
    pooling: Pooling,
    /// Numbers in a token's vector.
    hidden: usize,
    device: String,
}

impl Model for SentenceEncoder {
    type Codec = SentenceCodec;

    fn load(spec: &LoadSpec) -> Result<(Self, SentenceCodec), LoadError> {
        let (device, opened) = device::open(&spec.device)?;
        let files = ModelFiles::locate(&spec.source)?;
        let config = NetworkConfig::read(&files, &spec.source)?;
        let settings = SentenceSettings::read(&files, &spec.source)?;
        let path = files.required("tokenizer.json")?;
        let tokenizer = TextTokenizer::read(path, &settings, config.max_tokens(), config.vocabulary)?;
        // Last of all files: a cache that holds it is complete.
        let path = files.required("model.safetensors")?;
        let weights = Weights::read(path, config.family.base(), &device, candle_dtype(spec.dtype))?;
        let encoder = Encoder::load(&weights, &config)?;
        let codec = SentenceCodec {
            tokenizer,
            names: ServedNames::new(spec),
            width: settings.pooling.width(config.hidden),
            pooling: settings.pooling.clone(),
            max_inputs: spec.max_inputs,
        };
        let (pooling, hidden) = (settings.pooling, config.hidden);
        Ok((Self { encoder, pooling, hidden, device: opened }, codec))
    }

    fn footprint(spec: &LoadSpec, tokens: usize) -> Option<Footprint> {
        footprint::footprint(spec, tokens)
    }

    fn device(&self) -> String {
        self.device.clone()
    }

    fn forward(&mut self, inputs: &[&Sentence]) -> Result<Steps<Self>, ForwardError> {
        if inputs.is_empty() {
            return Ok(Vec::new());
        }
        let ids = inputs.iter().flat_map(|input| &input.ids).copied().collect();
        let lengths: Vec<usize> = inputs.iter().map(|input| input.ids.len()).collect();
        let rows = self.encoder.forward(ids, &lengths).and_then(|rows| host(&rows));
        let rows = rows.map_err(|error| device::forward_error(&error))?;
        let mut rest = &*rows;
        let pooled = lengths.iter().map(|n| {
            let (text, others) = rest.split_at(n * self.hidden);
            rest = others;
            let vector = self.pooling.pool(text, self.hidden);
            match vector.iter().find(|number| !number.is_finite()) {
                None => Ok(Step::Done(vector)),
                Some(bad) => {
                    let words = format!("the model gave {bad} in the embedding of an input of {n} tokens");
                    Err(TaskError::new(TaskErrorKind::Internal, words))
                }
            }
        });
        Ok(pooled.collect())
    }
}

/// Copies token vectors to the host, where they are pooled.
fn host(rows: &Tensor) -> candle_core::Result<Vec<f32>> {
    rows.flatten_all()?.to_dtype(DType::F32)?.to_vec1()
}

fn candle_dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F32 => DType::F32,
        Dtype::Bf16 => DType::BF16,
        Dtype::F16 => DType::F16,
    }
}
