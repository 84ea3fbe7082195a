//! BLIP, computed by candle-transformers: an encoder turns an image into vectors, and a decoder writes a text from
//! them. Refuses models that it does not compute as published. candle-transformers keeps the keys and values of a text
//! in the decoder object, so that each sequence has a clone of it. The clones share the weights.

use candle_core::{DType, Device, Result as CandleResult, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::blip::{BlipForConditionalGeneration, Config};
use candle_transformers::models::blip_text::TextLMHeadModel;
use serde::Deserialize;

use super::fitness;
use super::image::{Pixels, Sides, stacked};
use crate::model::load::ModelFiles;
use crate::model::load::weights::{NumberFormats, Weights};
use crate::model::{LoadError, LoadSpec};

/// The names of two tied tensors: the embeddings of tokens, and the matrix of the last layer.
const EMBEDDINGS: &str = "text_decoder.bert.embeddings.word_embeddings.weight";
const LAST_MATRIX: &str = "text_decoder.cls.predictions.decoder.weight";
/// The architecture, as `model_type` names it.
pub const ARCHITECTURE: &str = "blip";

/// What `config.json` says.
pub struct BlipConfig {
    network: Config,
    /// The sides of an image, in pixels.
    pub sides: Sides,
    /// The number of tokens of an image: its patches and the class token.
    pub image_tokens: usize,
    /// Token ids are below this number.
    pub vocabulary: usize,
    /// Maximum number of tokens of a text, its prompt included.
    pub context: usize,
    /// The token that begins every text.
    pub start: u32,
    /// The token that ends a text.
    pub end: u32,
}

#[derive(Deserialize)]
struct SpecialTokens {
    text_config: TextTokens,
}

/// The defaults are those of the transformers library.
#[derive(Deserialize)]
struct TextTokens {
    #[serde(default = "default_start")]
    bos_token_id: u32,
    #[serde(default = "default_end")]
    sep_token_id: u32,
}

fn default_start() -> u32 {
    30_522
}

fn default_end() -> u32 {
    102
}

impl BlipConfig {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// [`LoadError::File`] if it is missing or invalid, [`LoadError::Unsupported`] for sizes that do not fit together.
    pub fn read(files: &ModelFiles, spec: &LoadSpec) -> Result<Self, LoadError> {
        let network: Config = files.required_json("config.json")?;
        let SpecialTokens { text_config: TextTokens { bos_token_id: start, sep_token_id: end } } =
            files.required_json("config.json")?;
        let (text, vision) = (&network.text_config, &network.vision_config);
        if text.encoder_hidden_size != vision.hidden_size {
            return Err(spec.unsupported(format!(
                "text_config.encoder_hidden_size is {}, and vision_config.hidden_size is {}; they must be equal",
                text.encoder_hidden_size, vision.hidden_size
            )));
        }
        if !text.is_decoder {
            return Err(spec.unsupported("text_config.is_decoder is false; captions need a decoder"));
        }
        let divides = |hidden: usize, heads: usize| heads > 0 && hidden.is_multiple_of(heads);
        if !divides(text.hidden_size, text.num_attention_heads)
            || !divides(vision.hidden_size, vision.num_attention_heads)
        {
            return Err(spec.unsupported("hidden_size cannot be divided among num_attention_heads"));
        }
        let (image, patch) = (vision.image_size, vision.patch_size);
        let Some(side @ 1..) = image.checked_div(patch).filter(|_| image.is_multiple_of(patch)) else {
            return Err(spec.unsupported(format!(
                "vision_config.image_size {image} is not a multiple of patch_size {patch}"
            )));
        };
        let vocabulary = text.vocab_size;
        if start as usize >= vocabulary || end as usize >= vocabulary {
            return Err(spec.unsupported(format!(
                "bos_token_id {start} and sep_token_id {end} must be below vocab_size, {vocabulary}"
            )));
        }
        Ok(Self {
            sides: Sides { height: image, width: image },
            image_tokens: side * side + 1,
            vocabulary,
            context: text.max_position_embeddings,
            start,
            end,
            network,
        })
    }
}

/// Refuses a number format in which the network does not compute.
///
/// # Errors
/// [`LoadError::Unsupported`] for any but f32.
pub fn check_dtype(spec: &LoadSpec) -> Result<(), LoadError> {
    if super::uniform_formats(spec)?.tensors == DType::F32 {
        return Ok(());
    }
    let reason = format!("dtype is {:?}; candle-transformers computes BLIP in f32 only", spec.dtype.name());
    Err(spec.unsupported(reason))
}

/// The network on one device.
pub struct Blip {
    network: BlipForConditionalGeneration,
    device: Device,
    sides: Sides,
}

/// The decoder of one text, with the keys and values of the tokens that it has read.
#[derive(Clone)]
pub struct TextDecoder {
    decoder: TextLMHeadModel,
    device: Device,
    /// The number of tokens that it has read.
    read: usize,
}

impl Blip {
    /// Loads the network, and compares the encoder's results on its device with those of a CPU.
    ///
    /// # Errors
    /// [`LoadError`] for a file that is missing or invalid, and for a device that computes wrongly.
    pub fn load(
        spec: &LoadSpec,
        device: &Device,
        files: &ModelFiles,
        config: &BlipConfig,
    ) -> Result<Self, LoadError> {
        check_dtype(spec)?;
        let load_on = |device: &Device| {
            let weights = Weights::read(&files.weights()?, "", "", device, NumberFormats::F32)?;
            let mut tensors = weights.all()?;
            // Some files have the tied tensor only once, as the embeddings.
            if let Some(embeddings) = tensors.get(EMBEDDINGS).cloned() {
                tensors.entry(LAST_MATRIX.to_owned()).or_insert(embeddings);
            }
            let builder = VarBuilder::from_tensors(tensors, DType::F32, device);
            let network = BlipForConditionalGeneration::new(&config.network, builder);
            let network = weights.checked("the network", network)?;
            Ok::<_, LoadError>(Self { network, device: device.clone(), sides: config.sides })
        };
        let network = load_on(device)?;
        if fitness::needs_comparison(device, spec.dtype) {
            let vectors = |network: &Self| network.encode(&[&config.sides.known()])?.flatten_all()?.to_vec1();
            let reference = load_on(&Device::Cpu)?;
            fitness::compare_computed(spec, "image", vectors(&network), vectors(&reference))?;
        }
        Ok(network)
    }

    /// The vectors of images, `[images, image_tokens, hidden]`.
    ///
    /// # Errors
    /// The device fails.
    pub fn encode(&self, images: &[&Pixels]) -> CandleResult<Tensor> {
        // Permuted on the device: for a GPU's batch, that would take a CPU longer than the network takes the GPU.
        let x = stacked(images, self.sides, &self.device)?.permute((0, 3, 1, 2))?.contiguous()?;
        x.apply(self.network.vision_model())
    }

    /// A decoder that has read nothing.
    pub fn decoder(&mut self) -> TextDecoder {
        TextDecoder { decoder: self.network.text_decoder().clone(), device: self.device.clone(), read: 0 }
    }
}

impl TextDecoder {
    /// Reads tokens, and returns the logits of the token that follows them. `image` is `[1, image_tokens, hidden]`.
    ///
    /// # Errors
    /// The device fails. Afterwards the decoder must not be used.
    pub fn read(&mut self, ids: &[u32], image: &Tensor) -> CandleResult<Vec<f32>> {
        // candle-transformers makes its causal mask without the earlier tokens. Several tokens can be read at once only
        // if there are none.
        let chunk_len = if self.read == 0 { ids.len() } else { 1 };
        let mut logits = None;
        for chunk in ids.chunks(chunk_len.max(1)) {
            let chunk = Tensor::new(chunk, &self.device)?.unsqueeze(0)?;
            logits = Some(self.decoder.forward(&chunk, image)?);
        }
        self.read += ids.len();
        let Some(logits) = logits else { return Ok(Vec::new()) };
        logits.narrow(1, logits.dim(1)? - 1, 1)?.flatten_all()?.to_vec1()
    }
}
