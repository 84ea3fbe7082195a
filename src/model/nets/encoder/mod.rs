//! Networks for texts: encoders of BERT's family, and decoders that compute whole texts. From each text they compute a
//! vector, or a number for each label. Owns the loaded network; does not know where texts come from or how they are
//! batched.
//!
//! The network runs without padding: a batch is one matrix of all its tokens. So texts of any lengths can share a
//! batch, and each costs only its own tokens.

pub mod config;
mod decoder;
mod fitness;
pub(super) mod head;
mod network;
#[cfg(feature = "cuda")]
mod on_gpu;
mod relative_positions;
pub mod sentence_head;
pub mod sparse;
pub mod text_config;

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device};

use self::config::NetworkConfig;
use self::head::Head;
use self::network::Encoder;
use self::sentence_head::{SentenceHead, SentenceModule};
use self::text_config::TextConfig;
use super::decoder::OnePassDecoder;
use crate::model::load::ModelFiles;
use crate::model::load::tokenizer::{TextTokenizer, Tokens};
use crate::model::load::weights::{NumberFormats, Weights};
use crate::model::ops::pooling::{Mode, Pooling};
use crate::model::{Forward, ForwardError, LoadError, LoadSpec, TaskError};

/// A network for texts on one device.
pub struct TextNetwork {
    body: Body,
    /// Without pooling, a text's output is the vectors of its tokens, or what the head makes of each.
    pooling: Option<Pooling>,
    /// The modules after the pooling, in order. They change the pooled vectors.
    modules: Arc<[SentenceModule]>,
    /// Without a head, a text's output is its vector, or the vectors of its tokens.
    head: Option<Head>,
    /// The padding token, which is skipped at the end of a text if only the last token's vector is wanted.
    padding: Option<u32>,
    #[cfg(feature = "cuda")]
    gpu: Option<on_gpu::OnGpu>,
}

/// What computes the vectors of tokens.
enum Body {
    Encoder(Box<Encoder>),
    Decoder(Box<OnePassDecoder>),
}

/// The kind of a text's output.
#[derive(Clone)]
pub enum Output {
    /// The vectors of its tokens, one after the other: `[tokens, hidden]`.
    Tokens,
    /// One vector, made of its tokens' vectors.
    Pooled(SentenceHead),
    /// One number for each label; the field is the number of labels.
    Labels(usize),
    /// For each of its tokens one number for each label, `[tokens, labels]`; the field is the number of labels.
    TokenLabels(usize),
    /// A decoder's score: the logit of one token as the next after the text, minus the logit of another one.
    LogitScore(ScoreTokens),
}

/// The tokens whose logits are a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreTokens {
    /// The token that means that a document is relevant.
    pub yes: u32,
    /// The token that means that it is not. Without it, the logit of `yes` is the score.
    pub no: Option<u32>,
}

impl TextNetwork {
    /// Loads the network onto its device, and compares its results with those of a CPU.
    ///
    /// # Errors
    /// [`LoadError`] for a file that is missing or invalid, and for a device that computes wrongly.
    pub(in crate::model) fn load(
        spec: &LoadSpec,
        device: &Device,
        files: &ModelFiles,
        config: &TextConfig,
        tokenizer: &TextTokenizer,
        output: &Output,
    ) -> Result<Self, LoadError> {
        match config {
            TextConfig::Encoder(config) => Self::load_encoder(spec, device, files, config, tokenizer, output),
            TextConfig::Decoder(config) => decoder::load(spec, device, files, config, tokenizer, output),
        }
    }

    fn load_encoder(
        spec: &LoadSpec,
        device: &Device,
        files: &ModelFiles,
        config: &NetworkConfig,
        tokenizer: &TextTokenizer,
        output: &Output,
    ) -> Result<Self, LoadError> {
        let paths = files.weights()?;
        let pooling_by = |mode| Pooling { modes: vec![mode], normalize: false };
        let head: Option<SentenceHead> = match output {
            // The comparison with a CPU needs a vector of each text. The pooling is dropped after it.
            Output::Tokens => Some(pooling_by(Mode::Mean).into()),
            Output::Pooled(head) => Some(head.clone()),
            Output::Labels(_) => {
                Some(pooling_by(if config.head_uses_mean { Mode::Mean } else { Mode::Cls }).into())
            }
            Output::TokenLabels(_) => None,
            Output::LogitScore(_) => {
                let reason = "an encoder of BERT's family does not predict the token after a text";
                return Err(spec.unsupported(reason));
            }
        };
        let (base, marker) = (config.family.base(), config.family.token_embeddings());
        let read = |device: &Device, formats| Weights::read(&paths, base, marker, device, formats);
        let build = |weights: &Weights| {
            Ok(Self {
                #[cfg(feature = "cuda")]
                gpu: on_gpu::OnGpu::new(weights.device()).map_err(|error| spec.failed(error))?,
                ..Self::new(Body::Encoder(Box::new(Encoder::load(weights, config)?)), head.clone())
            })
        };
        let weights = read(device, super::number_formats(spec)?)?;
        let mut network = build(&weights)?;
        let head = match output {
            Output::Tokens | Output::Pooled(_) | Output::LogitScore(_) => None,
            Output::Labels(labels) => Some(Head::load(&weights, config, *labels)?),
            Output::TokenLabels(labels) => Some(Head::of_tokens(&weights, config, *labels)?),
        };
        if super::needs_comparison(device, spec.dtype) {
            let reference = build(&read(&Device::Cpu, NumberFormats::F32)?)?;
            fitness::compare(&mut network, reference, head.as_ref(), tokenizer, spec)?;
        }
        network.head = head;
        if matches!(output, Output::Tokens) {
            network.pooling = None;
        }
        Ok(network)
    }

    /// A network on the host without a head for labels. `head` makes a text's vector.
    fn new(body: Body, head: Option<SentenceHead>) -> Self {
        let (pooling, modules) = head.map(|head| (head.pooling, head.modules)).unzip();
        Self {
            body,
            pooling,
            modules: modules.unwrap_or_default(),
            head: None,
            padding: None,
            #[cfg(feature = "cuda")]
            gpu: None,
        }
    }

    /// The vectors of the texts, on the host. `lengths` are the numbers of tokens of the texts.
    fn vectors(&mut self, inputs: &[&Tokens], lengths: &[usize]) -> candle_core::Result<Vec<Vec<f32>>> {
        let Self { body, pooling, padding, .. } = self;
        let pooling = &*pooling;
        let pooled = |text: &[f32], width, skip| match pooling {
            None => text.to_vec(),
            Some(pooling) => pooling.pool(text, width, skip),
        };
        match body {
            Body::Encoder(encoder) => {
                let rows = encoder.forward(inputs, lengths)?;
                // Pooling runs on the host.
                let rows = rows.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
                let width = encoder.width();
                let mut remaining = &*rows;
                let vectors = inputs.iter().map(|input| {
                    let (text, rest) = remaining.split_at(input.ids.len() * width);
                    remaining = rest;
                    pooled(text, width, input.unpooled)
                });
                Ok(vectors.collect())
            }
            Body::Decoder(decoder) => {
                let (width, needs_last) =
                    (decoder.width(), pooling.as_ref().is_some_and(|it| it.modes == [Mode::LastToken]));
                let wanted = |ids: &[u32]| if needs_last { last_token(ids, *padding) } else { 0..ids.len() };
                let texts: Vec<&[u32]> = inputs.iter().map(|input| &*input.ids).collect();
                let rows = decoder.forward(&texts, wanted)?;
                // A text of which only the last token is computed has no tokens to skip.
                let skips = inputs.iter().map(|input| if needs_last { 0 } else { input.unpooled });
                Ok(rows.iter().zip(skips).map(|(text, skip)| pooled(text, width, skip)).collect())
            }
        }
    }

    /// Computes the outputs of texts from their vectors. `lengths` are the numbers of tokens of the texts.
    fn outputs(&self, vectors: Vec<Vec<f32>>, lengths: &[usize]) -> Vec<Result<Vec<f32>, TaskError>> {
        // Where something follows, the vectors are checked as well as the outputs: an activation can turn a number that is
        // not finite into one that is.
        let are_outputs = self.modules.is_empty() && self.head.is_none();
        let check = |(vector, length): (&Vec<f32>, &usize)| match are_outputs {
            true => Ok(()),
            false => check_finite(vector, *length),
        };
        let checks: Vec<_> = vectors.iter().zip(lengths).map(check).collect();
        let vectors = self.modules.iter().fold(vectors, |vectors, module| module.apply(vectors));
        let outputs = match (&self.head, &self.pooling) {
            (None, _) => vectors,
            (Some(head), Some(_)) => head.apply(&vectors),
            (Some(head), None) => {
                let mut rows = head.apply(&vectors).into_iter();
                lengths.iter().map(|length| rows.by_ref().take(*length).flatten().collect()).collect()
            }
        };
        let outputs = outputs.into_iter().zip(lengths).zip(checks);
        outputs
            .map(|((output, length), check)| check.and(check_finite(&output, *length)).map(|()| output))
            .collect()
    }
}

/// The outputs of a batch, or a batch in progress.
pub enum Pending {
    /// Already computed.
    Outputs(Vec<Result<Vec<f32>, TaskError>>),
    /// Submitted to the device, with the number of tokens of each text.
    #[cfg(feature = "cuda")]
    OnGpu(on_gpu::Submitted, Vec<usize>),
}

impl Forward for TextNetwork {
    type Input = Tokens;
    type Output = Vec<f32>;
    type Pending = Pending;

    fn submit(&mut self, inputs: &[&Tokens]) -> Result<Pending, ForwardError> {
        if inputs.is_empty() {
            return Ok(Pending::Outputs(Vec::new()));
        }
        let lengths: Vec<usize> = inputs.iter().map(|input| input.ids.len()).collect();
        #[cfg(feature = "cuda")]
        if let (Some(gpu), Some(pooling), Body::Encoder(encoder)) = (&mut self.gpu, &self.pooling, &self.body)
        {
            let submitted = gpu.submit(encoder, pooling, inputs, lengths.clone())?;
            return Ok(Pending::OnGpu(submitted, lengths));
        }
        let vectors = self.vectors(inputs, &lengths)?;
        Ok(Pending::Outputs(self.outputs(vectors, &lengths)))
    }

    fn wait(&mut self, pending: Pending) -> Result<Vec<Result<Vec<f32>, TaskError>>, ForwardError> {
        match pending {
            Pending::Outputs(outputs) => Ok(outputs),
            #[cfg(feature = "cuda")]
            Pending::OnGpu(submitted, lengths) => {
                let (Some(gpu), Some(pooling)) = (&mut self.gpu, &self.pooling) else {
                    return Ok(Vec::new());
                };
                let vectors = gpu.finish(submitted, pooling)?;
                Ok(self.outputs(vectors, &lengths))
            }
        }
    }

    #[cfg(feature = "cuda")]
    fn is_asynchronous(&self) -> bool {
        self.gpu.is_some() && self.pooling.is_some()
    }
}

/// The last token of a text that is not padding. If all tokens are padding, it is the first, as in the transformers
/// library.
fn last_token(ids: &[u32], padding: Option<u32>) -> Range<usize> {
    let last = match padding {
        Some(padding) => ids.iter().rposition(|id| *id != padding).unwrap_or_default(),
        None => ids.len() - 1,
    };
    last..last + 1
}

/// Checks that all numbers of the vector or output of a text with `tokens` tokens are finite.
fn check_finite(output: &[f32], tokens: usize) -> Result<(), TaskError> {
    match output.iter().find(|number| !number.is_finite()) {
        None => Ok(()),
        Some(bad) => Err(TaskError::internal(format!(
            "the model gave {bad} in the output of an input of {tokens} tokens"
        ))),
    }
}
