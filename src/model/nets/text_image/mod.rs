//! Networks of candle-transformers that compute vectors of texts and of images in one space: CLIP and SigLIP. Decides how
//! the inputs of a batch are padded and put together. Owns the loaded network. The result of an input does not depend on
//! the others in its batch, except for the order of sums in matrix products.

pub mod config;

use candle_core::{DType, Device, Result as Candle, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{clip, siglip};

use self::config::{Networks, TextImageConfig};
use super::fitness;
use super::image::Pixels;
use crate::model::load::ModelFiles;
use crate::model::load::tokenizer::Tokens;
use crate::model::load::weights::{Precision, Weights};
use crate::model::nets::image::Sides;
use crate::model::ops::pooling::normalize;
use crate::model::{Forward, ForwardError, LoadError, LoadSpec, TaskError, device};

type Loaded<T> = Result<T, LoadError>;

/// A text or an image.
pub enum TextOrImage {
    /// The tokens of a text.
    Text(Tokens),
    /// An image of the network's size.
    Image(Pixels),
}

/// How the similarity of two vectors becomes a score, for zero-shot classification.
#[derive(Clone, Copy, Debug)]
pub struct Similarity {
    /// The factor of the cosine.
    pub scale: f32,
    /// Added to the product. None if a label's score depends on the other labels: it is then their softmax, else the
    /// sigmoid.
    pub bias: Option<f32>,
}

/// A network on one device.
pub struct TextImageNetwork {
    network: Network,
    device: Device,
    dtype: DType,
    sides: Sides,
    /// The id that fills texts up.
    pad: u32,
    /// The number of tokens to which texts are filled up. None for the length of the longest text of the batch.
    padded_len: Option<usize>,
    similarity: Similarity,
}

enum Network {
    Clip(clip::ClipModel),
    Siglip(siglip::Model),
}

impl TextImageNetwork {
    /// Loads a network, and compares its results on its device with those of a CPU in f32. `pad` is the id that fills
    /// SigLIP's texts up.
    ///
    /// # Errors
    /// [`LoadError`] for a file that is missing or invalid, and for a device that computes wrongly.
    pub fn load(
        spec: &LoadSpec,
        device: &Device,
        files: &ModelFiles,
        config: &TextImageConfig,
        pad: u32,
    ) -> Loaded<Self> {
        let precision = super::uniform_precision(spec)?;
        if device.is_cpu() && precision.tensors == DType::BF16 {
            let reason = "dtype is \"bf16\", in which Candle multiplies no matrices on a CPU; f32 and f16 are supported";
            return Err(LoadError::Unsupported { model: spec.source.clone(), reason: reason.to_owned() });
        }
        let mut network = Self::load_on(device, precision, files, config, pad)?;
        if fitness::needs_comparison(device, spec.dtype) {
            let mut reference = Self::load_on(&Device::Cpu, Precision::F32, files, config, pad)?;
            let ids: Vec<u32> = (0..config.max_tokens.min(8) as u32).collect();
            let text = Tokens { second: ids.len(), ids, truncated: false };
            let known =
                [("text", TextOrImage::Text(text)), ("image", TextOrImage::Image(config.sides.known()))];
            for (what, input) in &known {
                let numbers = |network: &mut Self| {
                    let output = network.forward(&[input]).map_err(|error| fitness::failed(spec, &error))?;
                    Ok::<_, LoadError>(output.into_iter().next().and_then(Result::ok))
                };
                let (found, expected) = (numbers(&mut network)?, numbers(&mut reference)?);
                fitness::compare(spec, what, found.as_deref(), expected.as_deref())?;
            }
        }
        Ok(network)
    }

    fn load_on(
        device: &Device,
        precision: Precision,
        files: &ModelFiles,
        config: &TextImageConfig,
        pad: u32,
    ) -> Loaded<Self> {
        let weights = Weights::read(&files.weights()?, "", "logit_scale", device, precision)?;
        let builder = VarBuilder::from_tensors(weights.all()?, precision.tensors, device);
        if let Networks::Clip(sizes) = &config.networks {
            // candle-transformers would take random numbers in its place.
            weights.get("vision_model.embeddings.class_embedding", &[sizes.vision_config.embed_dim])?;
        }
        let (network, has_bias) = match &config.networks {
            Networks::Clip(sizes) => (clip::ClipModel::new(builder, sizes).map(Network::Clip), false),
            Networks::Siglip(sizes) => (siglip::Model::new(sizes, builder).map(Network::Siglip), true),
        };
        let network = weights.checked("the network", network)?;
        let number = |name: &str| {
            // CLIP's has no dimension, SigLIP's has one.
            let values = weights.values(name, if has_bias { &[1] } else { &[] })?;
            Ok::<_, LoadError>(values[0])
        };
        Ok(Self {
            network,
            device: device.clone(),
            dtype: precision.tensors,
            sides: config.sides,
            // What follows a text in CLIP does not change its vector, because earlier tokens do not see later ones.
            pad: if config.pads_texts() { pad } else { 0 },
            padded_len: config.pads_texts().then_some(config.max_tokens),
            similarity: Similarity {
                scale: number("logit_scale")?.exp(),
                bias: if has_bias { Some(number("logit_bias")?) } else { None },
            },
        })
    }

    /// How similarities become scores.
    pub fn similarity(&self) -> Similarity {
        self.similarity
    }

    /// The vectors of texts, `[texts, width]`.
    fn texts(&self, texts: &[&Tokens]) -> Candle<Tensor> {
        let longest = texts.iter().map(|text| text.ids.len()).max().unwrap_or(0);
        let len = self.padded_len.unwrap_or(longest).max(longest);
        let mut ids = vec![self.pad; texts.len() * len];
        for (row, text) in ids.chunks_exact_mut(len).zip(texts) {
            row[..text.ids.len()].copy_from_slice(&text.ids);
        }
        let ids = Tensor::from_vec(ids, (texts.len(), len), &self.device)?;
        match &self.network {
            Network::Clip(model) => model.get_text_features(&ids),
            Network::Siglip(model) => model.get_text_features(&ids),
        }
    }

    /// The vectors of images, `[images, width]`.
    fn images(&self, images: &[&Pixels]) -> Candle<Tensor> {
        let Sides { height, width } = self.sides;
        let numbers: Vec<f32> = images.iter().flat_map(|Pixels(numbers)| numbers).copied().collect();
        let x = Tensor::from_vec(numbers, (images.len(), height, width, 3), &Device::Cpu)?;
        let x = x.permute((0, 3, 1, 2))?.contiguous()?.to_device(&self.device)?.to_dtype(self.dtype)?;
        match &self.network {
            Network::Clip(model) => model.get_image_features(&x),
            Network::Siglip(model) => model.get_image_features(&x),
        }
    }

    fn vectors(&self, inputs: &[&TextOrImage]) -> Candle<Vec<Vec<f32>>> {
        let (mut texts, mut images) = (Vec::new(), Vec::new());
        for input in inputs {
            match input {
                TextOrImage::Text(tokens) => texts.push(tokens),
                TextOrImage::Image(pixels) => images.push(pixels),
            }
        }
        let rows = |vectors: Candle<Tensor>| vectors?.to_dtype(DType::F32)?.to_vec2::<f32>();
        let mut of_texts = if texts.is_empty() { Vec::new() } else { rows(self.texts(&texts))? }.into_iter();
        let mut of_images =
            if images.is_empty() { Vec::new() } else { rows(self.images(&images))? }.into_iter();
        let next = |input: &&TextOrImage| match input {
            TextOrImage::Text(_) => of_texts.next(),
            TextOrImage::Image(_) => of_images.next(),
        };
        Ok(inputs.iter().filter_map(next).collect())
    }
}

impl Forward for TextImageNetwork {
    type Input = TextOrImage;
    type Output = Vec<f32>;
    type Pending = Vec<Result<Vec<f32>, TaskError>>;

    fn submit(&mut self, inputs: &[&TextOrImage]) -> Result<Self::Pending, ForwardError> {
        let vectors = self.vectors(inputs).map_err(|error| device::forward_error(&error))?;
        let checked = |mut vector: Vec<f32>| {
            normalize(&mut vector);
            match vector.iter().find(|number| !number.is_finite()) {
                None => Ok(vector),
                Some(bad) => {
                    Err(TaskError::internal(format!("the model gave {bad} in the vector of an input")))
                }
            }
        };
        Ok(vectors.into_iter().map(checked).collect())
    }

    fn wait(&mut self, pending: Self::Pending) -> Result<Self::Pending, ForwardError> {
        Ok(pending)
    }
}
