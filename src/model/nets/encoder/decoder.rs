//! Loads decoders as networks for texts, which are computed in one pass, with the head that computes labels or a score
//! from the vector of a text's last token.

use candle_core::Device;

use super::head::Head;
use super::sentence_head::SentenceHead;
use super::{Body, Output, ScoreTokens, TextNetwork, fitness};
use crate::model::load::ModelFiles;
use crate::model::load::tokenizer::TextTokenizer;
use crate::model::nets::decoder::config::DecoderConfig;
use crate::model::nets::decoder::{DecoderWeights, OnePassDecoder, ProductFormats};
use crate::model::nets::fitness::COMPARED_LAYERS;
use crate::model::nets::needs_comparison;
use crate::model::ops::NumberFormat;
use crate::model::ops::pooling::{Mode, Pooling};
use crate::model::{LoadError, LoadSpec};

/// Loads a decoder, and compares its results with those of a CPU in f32.
///
/// # Errors
/// As [`TextNetwork::load`], and [`LoadError::Unsupported`] for a number format that is not supported.
pub(super) fn load(
    spec: &LoadSpec,
    device: &Device,
    files: &ModelFiles,
    config: &DecoderConfig,
    tokenizer: &TextTokenizer,
    output: &Output,
) -> Result<TextNetwork, LoadError> {
    let formats = ProductFormats::of(spec)?;
    let pooling_by = |mode| Pooling { modes: vec![mode], normalize: false };
    let sentence_head: SentenceHead = match output {
        Output::Pooled(head) => head.clone(),
        // The comparison with f32 needs a vector of each text. The pooling is dropped after it.
        Output::Tokens => pooling_by(Mode::Mean).into(),
        Output::Labels(_) | Output::LogitScore(_) => pooling_by(Mode::LastToken).into(),
        Output::TokenLabels(_) => {
            let reason = "labels of tokens are not supported for decoders";
            return Err(spec.unsupported(reason));
        }
    };
    let padding = match output {
        Output::Labels(_) => config.padding,
        _ => None,
    };
    let build = |device: &Device, config: &DecoderConfig, formats| {
        let decoder = OnePassDecoder::load(spec, device, files, config, formats, tokenizer.max_tokens())?;
        let body = Body::Decoder(Box::new(decoder));
        Ok::<_, LoadError>(TextNetwork { padding, ..TextNetwork::new(body, Some(sentence_head.clone())) })
    };
    let mut network = build(device, config, formats)?;
    let weights = || DecoderWeights::from_safetensors(files, config, NumberFormat::F32);
    let head = match output {
        Output::Labels(labels) => {
            Some(Head::of_rows(&weights()?.label_rows([*labels, config.hidden])?, config.hidden))
        }
        Output::LogitScore(ScoreTokens { yes, no }) => {
            let ids: Vec<u32> = std::iter::once(*yes).chain(*no).collect();
            Some(Head::of_logits(&weights()?.logit_rows(&ids, config)?, config))
        }
        Output::Tokens | Output::Pooled(_) | Output::TokenLabels(_) => None,
    };
    let cpu = &Device::Cpu;
    if needs_comparison(device, spec.dtype) && device.is_cpu() && spec.is_dtype_auto {
        // All layers are computed, since errors grow from layer to layer.
        fitness::compare(
            &mut network,
            build(cpu, config, ProductFormats::F32)?,
            head.as_ref(),
            tokenizer,
            spec,
        )?;
    } else if needs_comparison(device, spec.dtype) {
        // The first layers are enough to show a device that computes wrongly, and the host may not have the memory for all.
        let mut first = config.clone();
        first.layers.truncate(COMPARED_LAYERS);
        let mut found = build(device, &first, formats)?;
        fitness::compare(&mut found, build(cpu, &first, ProductFormats::F32)?, None, tokenizer, spec)?;
    }
    network.head = head;
    if matches!(output, Output::Tokens) {
        network.pooling = None;
    }
    Ok(network)
}
