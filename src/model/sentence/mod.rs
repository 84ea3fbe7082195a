//! Sentence embeddings by BERT's family, loaded as sentence-transformers publishes them, and equal
//! to its results to 1e-5. Owns the loaded model; knows neither where tasks come from nor how they
//! are batched.
//!
//! The network runs without padding: a batch is one matrix of all its tokens, so that texts of any
//! lengths go together and none costs more than its own tokens.

mod codec;
mod config;
mod encoder;
mod fitness;
mod footprint;
pub mod kernels;
#[cfg(feature = "cuda")]
mod on_gpu;
mod plain;
pub mod pooling;
mod served;
mod settings;
mod tokenize;
mod weights;

pub use codec::{EmbeddingOptions, Sentence, SentenceCodec};

use candle_core::{DType, Device, Tensor};

use self::config::NetworkConfig;
use self::encoder::Encoder;
use self::pooling::Pooling;
use self::served::ServedNames;
use self::settings::SentenceSettings;
use self::tokenize::TextTokenizer;
use self::weights::Weights;
#[cfg(feature = "cuda")]
use super::Rest;
use super::source::ModelFiles;
use super::{Dtype, Footprint, ForwardError, LoadError, LoadSpec, Model, Step, Steps, device};
use crate::protocol::{TaskError, TaskErrorKind};

/// The digest of all files that the model `source` is loaded from, as [`ModelFiles::digest`] makes it: it
/// stays when a folder is copied or other files are put there. A model of the hub that the cache does not
/// hold is fetched.
///
/// # Errors
/// As [`Model::load`], for a file that is missing or not what it should be.
pub fn digest(source: &str) -> Result<String, LoadError> {
    let files = ModelFiles::locate(source)?;
    NetworkConfig::read(&files, source)?;
    SentenceSettings::read(&files, source)?;
    files.required("tokenizer.json")?;
    // Last of all files, as when it is loaded: a cache that holds it is complete.
    files.required("model.safetensors")?;
    files.digest()
}

/// A sentence-embedding model on one device.
pub struct SentenceEncoder {
    encoder: Encoder,
    pooling: Pooling,
    device: String,
    #[cfg(feature = "cuda")]
    gpu: Option<on_gpu::OnGpu>,
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
        let dtype = candle_dtype(spec.dtype);
        let on = |device: &Device, dtype| {
            let weights = Weights::read(path.clone(), config.family.base(), device, dtype)?;
            Ok(Self {
                encoder: Encoder::load(&weights, &config)?,
                pooling: settings.pooling.clone(),
                device: opened.clone(),
                #[cfg(feature = "cuda")]
                gpu: on_gpu::OnGpu::new(device).map_err(|error| LoadError::Device {
                    device: opened.clone(),
                    reason: error.to_string(),
                })?,
            })
        };
        let mut model = on(&device, dtype)?;
        if fitness::is_to_be_compared(&device, dtype) {
            fitness::compare(&mut model, on(&Device::Cpu, DType::F32)?, &tokenizer, spec.dtype)?;
        }
        let codec = SentenceCodec {
            tokenizer,
            names: ServedNames::new(spec),
            width: settings.pooling.width(config.hidden),
            pooling: settings.pooling.clone(),
            max_inputs: spec.max_inputs,
        };
        Ok((model, codec))
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
        if let Some(rest) = self.begin(inputs)? {
            return rest(self);
        }
        let (ids, lengths) = joined(inputs);
        let rows = self.encoder.forward(ids, &lengths).and_then(|rows| host(&rows));
        let rows = rows.map_err(|error| device::forward_error(&error))?;
        let width = self.encoder.width();
        let mut rest = &*rows;
        let pooled = lengths.iter().map(|length| {
            let (text, others) = rest.split_at(length * width);
            rest = others;
            checked(self.pooling.pool(text, width), *length)
        });
        Ok(pooled.collect())
    }

    #[cfg(feature = "cuda")]
    fn computes_aside(&self) -> bool {
        self.gpu.is_some()
    }

    #[cfg(feature = "cuda")]
    fn begin(&mut self, inputs: &[&Sentence]) -> Result<Option<Rest<Self>>, ForwardError> {
        let Some(gpu) = &mut self.gpu else { return Ok(None) };
        let (ids, lengths) = joined(inputs);
        let begun = gpu.begin((&self.encoder, &self.pooling), &ids, lengths.clone());
        let begun = begun.map_err(|error| device::forward_error(&error))?;
        Ok(Some(Box::new(move |model| {
            let Some(gpu) = &mut model.gpu else { return Ok(Vec::new()) };
            let vectors = gpu.finish(begun, &model.pooling).map_err(|error| device::forward_error(&error))?;
            Ok(vectors.into_iter().zip(lengths).map(|(vector, length)| checked(vector, length)).collect())
        })))
    }
}

/// The ids of all inputs, one behind the other, and how many each has.
fn joined(inputs: &[&Sentence]) -> (Vec<u32>, Vec<usize>) {
    let ids = inputs.iter().flat_map(|input| &input.ids).copied().collect();
    (ids, inputs.iter().map(|input| input.ids.len()).collect())
}

/// The vector of an input of so many tokens, if it is numbers.
fn checked(vector: Vec<f32>, tokens: usize) -> Result<Step<Vec<f32>>, TaskError> {
    match vector.iter().find(|number| !number.is_finite()) {
        None => Ok(Step::Done(vector)),
        Some(bad) => {
            let words = format!("the model gave {bad} in the embedding of an input of {tokens} tokens");
            Err(TaskError::new(TaskErrorKind::Internal, words))
        }
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
