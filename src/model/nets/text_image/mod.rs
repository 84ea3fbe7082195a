//! Networks of candle-transformers that compute vectors of texts and of images in one space: CLIP and SigLIP. Decides
//! how the inputs of a batch are padded and stacked. Owns the loaded network. The other inputs of a batch change a
//! result only by the rounding of matrix products.

pub mod config;

use candle_core::{DType, Device, Result as CandleResult, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::clip::text_model::ClipTextTransformer;
use candle_transformers::models::{clip, siglip};

use self::config::{NetworkConfig, TextImageConfig};
use super::fitness::{self, Compared};
use super::image::{Pixels, Sides, stacked};
use crate::model::load::ModelFiles;
use crate::model::load::tokenizer::Tokens;
use crate::model::load::weights::{NumberFormats, Weights};
use crate::model::ops::pooling::normalize;
use crate::model::{Forward, ForwardError, LoadError, LoadSpec, TaskError};

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
    /// SigLIP's bias, which is added before the sigmoid. None for CLIP, whose scores are a softmax over the labels.
    pub bias: Option<f32>,
}

/// A network on one device.
pub struct TextImageNetwork {
    network: Network,
    device: Device,
    dtype: DType,
    sides: Sides,
    /// The id of the padding token.
    pad: u32,
    /// The length to which texts are padded. None pads to the longest text of the batch.
    padded_len: Option<usize>,
    similarity: Similarity,
}

enum Network {
    Clip(Clip),
    Siglip(siglip::Model),
}

/// CLIP. The vector of a text is that of its first end token. `ClipModel` looks for that token by `argmax`, which on a
/// GPU may find a later one if the text contains several. So the network for texts is called without `ClipModel`.
struct Clip {
    images: clip::ClipModel,
    texts: ClipTextTransformer,
    /// `[width of the network, width of the vectors]`.
    projection: Tensor,
}

impl Clip {
    fn load(builder: &VarBuilder<'_>, sizes: &clip::ClipConfig) -> CandleResult<Self> {
        let text = &sizes.text_config;
        let projection = builder.get((text.projection_dim, text.embed_dim), "text_projection.weight")?.t()?;
        Ok(Self {
            images: clip::ClipModel::new(builder.clone(), sizes)?,
            texts: ClipTextTransformer::new(builder.pp("text_model"), text)?,
            projection,
        })
    }

    /// The vectors of texts. `ids` are `[texts, len]`, and `ends` the index of each text's end token among all ids.
    fn texts(&self, ids: &Tensor, ends: &Tensor) -> CandleResult<Tensor> {
        let rows = self.texts.forward_with_mask(ids, usize::MAX)?.flatten_to(1)?;
        rows.index_select(ends, 0)?.matmul(&self.projection)
    }
}

/// The number format of a network for this specification.
///
/// # Errors
/// [`LoadError::Unsupported`] for a `dtype` that the device does not have.
pub fn check_dtype(spec: &LoadSpec) -> Loaded<NumberFormats> {
    let formats = super::uniform_formats(spec)?;
    if spec.device == "cpu" && formats.tensors == DType::BF16 {
        let reason = "dtype is \"bf16\"; Candle has no matrix product in bf16 on CPUs; use f32 or f16";
        return Err(spec.unsupported(reason));
    }
    Ok(formats)
}

impl TextImageNetwork {
    /// Loads a network, and compares its results on its device with those of a CPU in f32. `pad` is the id of
    /// SigLIP's padding token.
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
        let formats = check_dtype(spec)?;
        let load_on = |device: &Device, formats: NumberFormats| {
            let weights = Weights::read(&files.weights()?, "", "logit_scale", device, formats)?;
            let builder = VarBuilder::from_tensors(weights.all()?, formats.tensors, device);
            if let NetworkConfig::Clip(sizes) = &config.network {
                // candle-transformers fills a missing class embedding with random numbers.
                weights.get("vision_model.embeddings.class_embedding", &[sizes.vision_config.embed_dim])?;
            }
            let (network, has_bias) = match &config.network {
                NetworkConfig::Clip(sizes) => (Clip::load(&builder, sizes).map(Network::Clip), false),
                NetworkConfig::Siglip(sizes) => {
                    (siglip::Model::new(sizes, builder).map(Network::Siglip), true)
                }
            };
            let network = weights.checked("the network", network)?;
            let number = |name: &str| {
                // The shape of such a tensor is [] in CLIP and [1] in SigLIP.
                let values = weights.values(name, if has_bias { &[1] } else { &[] })?;
                Ok::<_, LoadError>(values[0])
            };
            Ok::<_, LoadError>(Self {
                network,
                device: device.clone(),
                dtype: formats.tensors,
                sides: config.sides,
                // CLIP's attention over texts is causal, so that the padding after a text does not change its vector.
                pad: if config.pads_texts() { pad } else { 0 },
                padded_len: config.pads_texts().then_some(config.max_tokens),
                similarity: Similarity {
                    scale: number("logit_scale")?.exp(),
                    bias: if has_bias { Some(number("logit_bias")?) } else { None },
                },
            })
        };
        let mut network = load_on(device, formats)?;
        if fitness::needs_comparison(device, spec.dtype) {
            let mut reference = load_on(&Device::Cpu, NumberFormats::F32)?;
            let ids: Vec<u32> = (0..config.max_tokens.min(8) as u32).collect();
            let text = Tokens { second: ids.len(), ids, truncated: false, unpooled: 0 };
            let known =
                [("text", TextOrImage::Text(text)), ("image", TextOrImage::Image(config.sides.known()))];
            let mut compared = Vec::new();
            for (what, input) in &known {
                let numbers = |network: &mut Self| {
                    let output = network.forward(&[input]).map_err(|error| fitness::failed(spec, &error))?;
                    Ok::<_, LoadError>(output.into_iter().next().and_then(Result::ok))
                };
                let (found, expected) = (numbers(&mut network)?, numbers(&mut reference)?);
                compared.push(Compared { what: (*what).to_owned(), found, expected });
            }
            fitness::compare_all(spec, &compared)?;
        }
        Ok(network)
    }

    /// How similarities become scores.
    pub fn similarity(&self) -> Similarity {
        self.similarity
    }

    /// The vectors of texts, `[texts, width]`.
    fn texts(&self, texts: &[&Tokens]) -> CandleResult<Tensor> {
        let longest = texts.iter().map(|text| text.ids.len()).max().unwrap_or(0);
        let len = self.padded_len.unwrap_or(longest).max(longest);
        let mut ids = vec![self.pad; texts.len() * len];
        for (row, text) in ids.chunks_exact_mut(len).zip(texts) {
            row[..text.ids.len()].copy_from_slice(&text.ids);
        }
        let ids = Tensor::from_vec(ids, (texts.len(), len), &self.device)?;
        match &self.network {
            Network::Clip(clip) => {
                // The end token has the largest id.
                let end = |(row, text): (usize, &&Tokens)| {
                    let largest = text.ids.iter().max();
                    let index = text.ids.iter().position(|id| Some(id) == largest).unwrap_or(0);
                    (row * len + index) as u32
                };
                let ends: Vec<u32> = texts.iter().enumerate().map(end).collect();
                clip.texts(&ids, &Tensor::new(ends, &self.device)?)
            }
            Network::Siglip(model) => model.get_text_features(&ids),
        }
    }

    /// The vectors of images, `[images, width]`.
    fn images(&self, images: &[&Pixels]) -> CandleResult<Tensor> {
        // Permuted on the device: for a GPU's batch, that would take a CPU longer than the network takes the GPU.
        let x = stacked(images, self.sides, &self.device)?;
        let x = x.to_dtype(self.dtype)?.permute((0, 3, 1, 2))?.contiguous()?;
        match &self.network {
            Network::Clip(clip) => clip.images.get_image_features(&x),
            Network::Siglip(model) => model.get_image_features(&x),
        }
    }

    /// The vectors in the order of the inputs. Texts and images are two batches.
    fn vectors(&self, inputs: &[&TextOrImage]) -> CandleResult<Vec<Vec<f32>>> {
        let (mut texts, mut images) = (Vec::new(), Vec::new());
        for input in inputs {
            match input {
                TextOrImage::Text(tokens) => texts.push(tokens),
                TextOrImage::Image(pixels) => images.push(pixels),
            }
        }
        let rows = |vectors: CandleResult<Tensor>| vectors?.to_dtype(DType::F32)?.to_vec2::<f32>();
        let mut of_texts = if texts.is_empty() { Vec::new() } else { rows(self.texts(&texts))? }.into_iter();
        let mut of_images =
            if images.is_empty() { Vec::new() } else { rows(self.images(&images))? }.into_iter();
        let vector_of = |input: &&TextOrImage| match input {
            TextOrImage::Text(_) => of_texts.next(),
            TextOrImage::Image(_) => of_images.next(),
        };
        Ok(inputs.iter().filter_map(vector_of).collect())
    }
}

impl Forward for TextImageNetwork {
    type Input = TextOrImage;
    type Output = Vec<f32>;
    type Pending = Vec<Result<Vec<f32>, TaskError>>;

    fn submit(&mut self, inputs: &[&TextOrImage]) -> Result<Self::Pending, ForwardError> {
        let vectors = self.vectors(inputs)?;
        let checked = |mut vector: Vec<f32>| {
            normalize(&mut vector);
            match vector.iter().find(|number| !number.is_finite()) {
                None => Ok(vector),
                Some(bad) => Err(TaskError::internal(format!("the vector of an input contains {bad}"))),
            }
        };
        Ok(vectors.into_iter().map(checked).collect())
    }

    fn wait(&mut self, pending: Self::Pending) -> Result<Self::Pending, ForwardError> {
        Ok(pending)
    }
}
