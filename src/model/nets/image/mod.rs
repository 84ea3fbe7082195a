//! Networks that classify images of one size, by a number for each label. Owns the loaded network.

mod efficientnet;
mod resnet;
mod vit;

use std::f64::consts::PI;

use candle_core::{DType, Device, Result as Candle, Tensor};
use serde::Deserialize;

use super::encoder::head::Linear;
use super::fitness;
use crate::model::load::ModelFiles;
use crate::model::load::weights::{NumberFormats, Weights};
use crate::model::ops::{Clamp, Convolution, Filters, Padding, Panels};
use crate::model::{Forward, ForwardError, LoadError, LoadSpec, TaskError};

type Loaded<T> = Result<T, LoadError>;

/// The architectures, as `model_type` names them.
pub const ARCHITECTURES: [&str; 3] = ["efficientnet_lite", "resnet", VIT];
const VIT: &str = "vit";

/// A network for images on one device.
pub struct ImageNetwork {
    backbone: Box<dyn Backbone>,
    labels: Linear,
    /// Where images are computed, and in which type.
    device: Device,
    dtype: DType,
    sides: Sides,
}

/// The sides of an image, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sides {
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

/// An image for a network: `[height, width, 3]`.
pub struct Pixels(pub Vec<f32>);

/// A network without its last layer.
trait Backbone {
    /// One vector for each image of `x` `[images, height, width, 3]`: `[images, width of the vectors]`, f32.
    fn forward(&self, x: &Tensor) -> Candle<Tensor>;
}

#[derive(Deserialize)]
struct Kind {
    model_type: String,
}

/// Checks that the network can have the pool's `dtype`.
///
/// # Errors
/// [`LoadError::Unsupported`] if it cannot, [`LoadError::File`] if `config.json` cannot be read.
pub fn check_dtype(spec: &LoadSpec, files: &ModelFiles) -> Loaded<()> {
    let Kind { model_type } = files.required_json("config.json")?;
    if model_type == VIT {
        let config: vit::Config = files.required_json("config.json")?;
        return super::check_widths(spec, &config.widths());
    }
    number_formats(spec, &model_type).map(drop)
}

/// In ViT the linear layers take nearly all the time and memory; in the other networks the convolutions do.
fn number_formats(spec: &LoadSpec, model_type: &str) -> Loaded<NumberFormats> {
    if model_type == VIT { super::number_formats(spec) } else { super::uniform_formats(spec) }
}

impl ImageNetwork {
    /// Loads a network for images with these sides and for this number of labels, and compares its results on its
    /// device with those of a CPU.
    ///
    /// # Errors
    /// [`LoadError`] for a file that is missing or invalid, for a size the network cannot have, and for a device
    /// that computes wrongly.
    pub fn load(
        spec: &LoadSpec,
        device: &Device,
        files: &ModelFiles,
        sides: Sides,
        labels: usize,
    ) -> Loaded<Self> {
        let Kind { model_type } = files.required_json("config.json")?;
        let formats = number_formats(spec, &model_type)?;
        let paths = files.weights()?;
        let load_on = |device: &Device, formats: NumberFormats| {
            let read = |base, marker| Weights::read(&paths, base, marker, device, formats);
            let (backbone, weights, [name, bias], width): (Box<dyn Backbone>, _, _, _) =
                match model_type.as_str() {
                    "efficientnet_lite" => {
                        let weights = read("efficientnet", "_conv_stem.weight")?;
                        let config = files.required_json("config.json")?;
                        let (backbone, width) = efficientnet::Lite::load(&weights, &config, spec)?;
                        (Box::new(backbone), weights, ["_fc.weight", "_fc.bias"], width)
                    }
                    "resnet" => {
                        let weights = read("resnet", "embedder.embedder.convolution.weight")?;
                        let config = files.required_json("config.json")?;
                        let (backbone, width) = resnet::ResNet::load(&weights, &config, spec)?;
                        (Box::new(backbone), weights, ["classifier.1.weight", "classifier.1.bias"], width)
                    }
                    VIT => {
                        let weights = read("vit", "embeddings.cls_token")?;
                        let config = files.required_json("config.json")?;
                        let (backbone, width) = vit::Vit::load(&weights, &config, sides, spec)?;
                        (Box::new(backbone), weights, ["classifier.weight", "classifier.bias"], width)
                    }
                    other => {
                        let known = ARCHITECTURES.join(", ");
                        let reason = format!("model_type is {other:?}; images are classified by {known}");
                        return Err(spec.unsupported(reason));
                    }
                };
            let labels = Linear {
                weights: Panels::new(&weights.values(name, &[labels, width])?, width),
                bias: weights.values(bias, &[labels])?,
            };
            Ok(Self { backbone, labels, device: device.clone(), dtype: formats.tensors, sides })
        };
        let network = load_on(device, formats)?;
        if fitness::needs_comparison(device, spec.dtype) {
            let (reference, known) = (load_on(&Device::Cpu, NumberFormats::F32)?, sides.known());
            let (found, expected) = (network.numbers(&[&known]), reference.numbers(&[&known]));
            fitness::compare_computed(spec, "image", found, expected)?;
        }
        Ok(network)
    }

    /// The numbers of the labels of each image, one image after the other.
    fn numbers(&self, images: &[&Pixels]) -> Candle<Vec<f32>> {
        let x = stacked(images, self.sides, &self.device)?.to_dtype(self.dtype)?;
        let vectors: Vec<f32> = self.backbone.forward(&x)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        Ok(self.labels.apply(&vectors, |x| x))
    }
}

/// Images as one tensor `[images, height, width, 3]` on the device.
pub(super) fn stacked(images: &[&Pixels], sides: Sides, device: &Device) -> Candle<Tensor> {
    let numbers: Vec<f32> = images.iter().flat_map(|Pixels(numbers)| numbers).copied().collect();
    Tensor::from_vec(numbers, (images.len(), sides.height, sides.width, 3), device)
}

impl Sides {
    /// A known image, with waves of several lengths in each colour.
    pub(super) fn known(self) -> Pixels {
        let number = |index: usize| {
            let (pixel, colour) = (index / 3, index % 3);
            let (row, column) = ((pixel / self.width) as f64, (pixel % self.width) as f64);
            let wave = (column * PI / (7.0 + 9.0 * colour as f64)).sin() * (row * PI / 23.0).cos();
            wave as f32
        };
        Pixels((0..self.height * self.width * 3).map(number).collect())
    }
}

impl Forward for ImageNetwork {
    type Input = Pixels;
    type Output = Vec<f32>;
    type Pending = Vec<Result<Vec<f32>, TaskError>>;

    fn submit(&mut self, inputs: &[&Pixels]) -> Result<Self::Pending, ForwardError> {
        let numbers = self.numbers(inputs)?;
        let checked = |numbers: &[f32]| match numbers.iter().find(|number| !number.is_finite()) {
            None => Ok(numbers.to_vec()),
            Some(bad) => Err(TaskError::internal(format!("the model gave {bad} in the output of an image"))),
        };
        Ok(numbers.chunks_exact(self.labels.bias.len()).map(checked).collect())
    }

    fn wait(&mut self, pending: Self::Pending) -> Result<Self::Pending, ForwardError> {
        Ok(pending)
    }
}

/// A convolution without a bias, and the batch norm after it, as in the checkpoint.
struct NormedConvolution<'a> {
    convolution: String,
    norm: String,
    /// `[out, in, size, size]`.
    shape: [usize; 4],
    stride: usize,
    padding: Padding,
    clamp: Clamp,
    is_depthwise: bool,
    eps: f64,
    weights: &'a Weights,
}

impl NormedConvolution<'_> {
    /// Reads both as one convolution. The constants of the norm are folded into the weights and the bias, in f64.
    fn load(&self) -> Loaded<Convolution> {
        let (weights, out) = (self.weights, self.shape[0]);
        let full = |name: &str| format!("{}{name}", weights.prefix());
        let mut matrix = weights.values(&full(&self.convolution), &self.shape)?;
        let part = |part: &str| weights.values(&full(&format!("{}.{part}", self.norm)), &[out]);
        let [gain, shift, mean, variance] =
            [part("weight")?, part("bias")?, part("running_mean")?, part("running_var")?];
        let filter_len = matrix.len() / out;
        let mut bias = Vec::with_capacity(out);
        for (index, filter) in matrix.chunks_exact_mut(filter_len).enumerate() {
            let scale = f64::from(gain[index]) / (f64::from(variance[index]) + self.eps).sqrt();
            filter.iter_mut().for_each(|x| *x = (f64::from(*x) * scale) as f32);
            bias.push((f64::from(shift[index]) - f64::from(mean[index]) * scale) as f32);
        }
        let folded = weights.tensor_of(matrix, &self.shape).and_then(|matrix| {
            let (weights, bias) = (&matrix, &weights.tensor_of(bias, &[out])?);
            let Self { stride, padding, clamp, is_depthwise, .. } = *self;
            Convolution::new(&Filters { weights, bias, stride, padding, clamp, is_depthwise })
        });
        weights.checked(&self.convolution, folded)
    }
}
