//! Sentence embeddings by BERT's family, loaded as sentence-transformers publishes them, and equal to its
//! results to 1e-5. Owns the loaded model; does not know where tasks come from or how they are batched.
//!
//! The network runs without padding: a batch is one matrix of all its tokens, so that texts of any lengths go
//! together, and each costs only its own tokens.

mod config;
mod encoder;
mod fast_word_piece;
mod fitness;
pub mod kernels;
#[cfg(feature = "cuda")]
mod on_gpu;
pub mod pooling;
mod processor;
mod served;
mod settings;
mod tokenize;
mod weights;

pub use processor::{EmbeddingOptions, Sentence, SentenceProcessor};

use candle_core::{DType, Tensor};

use self::config::NetworkConfig;
use self::encoder::Encoder;
use self::pooling::Pooling;
use self::served::ServedNames;
use self::settings::SentenceSettings;
use self::tokenize::TextTokenizer;
use self::weights::Weights;
use super::source::ModelFiles;
use super::{Device, Dtype, Forward, ForwardError, LoadError, LoadSpec, TaskError, TaskErrorKind, device};

/// The digest of all files that the model `source` is loaded from, by [`ModelFiles::digest`]. It stays the same
/// when a folder is copied or other files are added. A hub model that is not in the cache is downloaded.
///
/// # Errors
/// As [`load`], for a file that is missing or invalid.
pub fn digest(source: &str) -> Result<String, LoadError> {
    let files = ModelFiles::locate(source)?;
    NetworkConfig::read(&files, source)?;
    SentenceSettings::read(&files, source)?;
    files.required("tokenizer.json")?;
    files.weights()?;
    files.digest()
}

/// A sentence-embedding model on one device.
pub struct SentenceEncoder {
    encoder: Encoder,
    pooling: Pooling,
    #[cfg(feature = "cuda")]
    gpu: Option<on_gpu::OnGpu>,
}

/// Loads the model onto its device, and compares what it computes there with what a CPU computes.
///
/// # Errors
/// [`LoadError`] for a file that is missing or invalid, for a model of another kind, and for a device that
/// computes wrongly.
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(SentenceProcessor, SentenceEncoder), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = NetworkConfig::read(&files, &spec.source)?;
    let settings = SentenceSettings::read(&files, &spec.source)?;
    let path = files.required("tokenizer.json")?;
    let tokenizer = TextTokenizer::read(path, &settings, config.max_tokens(), config.vocabulary)?;
    let paths = files.weights()?;
    let dtype = candle_dtype(spec.dtype);
    let on = |device: &Device, dtype| {
        let weights = Weights::read(&paths, config.family.base(), device, dtype)?;
        Ok(SentenceEncoder {
            encoder: Encoder::load(&weights, &config)?,
            pooling: settings.pooling.clone(),
            #[cfg(feature = "cuda")]
            gpu: on_gpu::OnGpu::new(device).map_err(|error| LoadError::Device {
                device: spec.device.clone(),
                reason: error.to_string(),
            })?,
        })
    };
    let mut encoder = on(device, dtype)?;
    if fitness::is_to_be_compared(device, dtype) {
        fitness::compare(&mut encoder, on(&Device::Cpu, DType::F32)?, &tokenizer, spec)?;
    }
    let processor = SentenceProcessor {
        tokenizer,
        names: ServedNames::new(spec),
        width: settings.pooling.width(config.hidden),
        pooling: settings.pooling.clone(),
        max_inputs: spec.max_inputs,
    };
    Ok((processor, encoder))
}

/// The vectors of a batch, or a batch in progress.
pub enum Pending {
    /// Already computed.
    Vectors(Vec<Result<Vec<f32>, TaskError>>),
    /// Submitted to the device, with the tokens of each text.
    #[cfg(feature = "cuda")]
    OnGpu(on_gpu::Begun, Vec<usize>),
}

impl Forward for SentenceEncoder {
    type Input = Sentence;
    type Output = Vec<f32>;
    type Pending = Pending;

    fn submit(&mut self, inputs: &[&Sentence]) -> Result<Pending, ForwardError> {
        if inputs.is_empty() {
            return Ok(Pending::Vectors(Vec::new()));
        }
        let (ids, lengths) = joined(inputs);
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &mut self.gpu {
            let begun = gpu.begin((&self.encoder, &self.pooling), &ids, lengths.clone());
            let begun = begun.map_err(|error| device::forward_error(&error))?;
            return Ok(Pending::OnGpu(begun, lengths));
        }
        let rows = self.encoder.forward(ids, &lengths).and_then(|rows| host(&rows));
        let rows = rows.map_err(|error| device::forward_error(&error))?;
        let width = self.encoder.width();
        let mut rest = &*rows;
        let pooled = lengths.iter().map(|length| {
            let (text, others) = rest.split_at(length * width);
            rest = others;
            checked(self.pooling.pool(text, width), *length)
        });
        Ok(Pending::Vectors(pooled.collect()))
    }

    fn wait(&mut self, pending: Pending) -> Result<Vec<Result<Vec<f32>, TaskError>>, ForwardError> {
        match pending {
            Pending::Vectors(vectors) => Ok(vectors),
            #[cfg(feature = "cuda")]
            Pending::OnGpu(begun, lengths) => {
                let Some(gpu) = &mut self.gpu else { return Ok(Vec::new()) };
                let vectors = gpu.finish(begun, &self.pooling);
                let vectors = vectors.map_err(|error| device::forward_error(&error))?;
                Ok(vectors.into_iter().zip(lengths).map(|(vector, length)| checked(vector, length)).collect())
            }
        }
    }

    #[cfg(feature = "cuda")]
    fn is_asynchronous(&self) -> bool {
        self.gpu.is_some()
    }
}

/// The ids of all inputs in a row, and the number of ids of each.
fn joined(inputs: &[&Sentence]) -> (Vec<u32>, Vec<usize>) {
    let ids = inputs.iter().flat_map(|input| &input.ids).copied().collect();
    (ids, inputs.iter().map(|input| input.ids.len()).collect())
}

/// The vector of an input with `tokens` tokens, if all its numbers are finite.
fn checked(vector: Vec<f32>, tokens: usize) -> Result<Vec<f32>, TaskError> {
    match vector.iter().find(|number| !number.is_finite()) {
        None => Ok(vector),
        Some(bad) => {
            let words = format!("the model gave {bad} in the embedding of an input of {tokens} tokens");
            Err(TaskError::new(TaskErrorKind::Internal, words))
        }
    }
}

/// Copies the tokens' vectors to the host, where they are pooled.
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
