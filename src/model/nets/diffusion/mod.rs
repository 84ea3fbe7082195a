//! Stable Diffusion 1.5 and 2.1: a text encoder turns a prompt into vectors, a network removes noise from latents step
//! by step, and a decoder turns the latents into an image. The last two are those of candle-transformers. Owns the
//! loaded networks. On a CPU each image is computed alone, so that it does not depend on others. On a GPU some share a
//! call, and may differ by rounding.

pub mod config;
pub mod schedule;
mod text;

use std::f64::consts::PI;

use candle_core::{DType, Device, Result as CandleResult, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::stable_diffusion::unet_2d::UNet2DConditionModel;
use candle_transformers::models::stable_diffusion::vae::AutoEncoderKL;

use self::config::DiffusionConfig;
use self::text::TextEncoder;
use super::fitness;
use crate::model::load::weights::{NumberFormats, Weights};
use crate::model::load::{ModelFiles, PIPELINE_WEIGHTS};
use crate::model::random::Seed;
use crate::model::{LoadError, LoadSpec};

/// The sides of latents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LatentSides {
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

/// Latents from which one step of denoising is computed.
pub struct Noisy<'a> {
    /// `[channels, height, width]`.
    pub latents: &'a [f32],
    /// The sides of the latents.
    pub sides: LatentSides,
    /// The timestep of the step.
    pub timestep: usize,
    /// `[1, tokens, hidden]`, or `[2, tokens, hidden]` with the vectors of the negative prompt first.
    pub prompt: &'a Tensor,
    /// By how much the difference to the negative prompt counts.
    pub guidance: f32,
}

/// The networks on one device.
pub struct Diffusion {
    text: TextEncoder,
    unet: UNet2DConditionModel,
    vae: AutoEncoderKL,
    device: Device,
    /// The type of numbers in the text encoder and the denoising network. The decoder computes in f32, because its
    /// numbers exceed the range of f16.
    dtype: DType,
    channels: usize,
    scaling_factor: f64,
}

impl Diffusion {
    /// Loads the networks, and compares the denoising network's results on its device with those of a CPU.
    ///
    /// # Errors
    /// [`LoadError`] for a file that is missing or invalid, for a number format that is not supported, and for a device
    /// that computes wrongly.
    pub fn load(
        spec: &LoadSpec,
        device: &Device,
        files: &ModelFiles,
        config: &DiffusionConfig,
    ) -> Result<Self, LoadError> {
        let dtype = check_dtype(spec)?;
        let load_as = |device: &Device, dtype: DType| {
            let read = |part: &str, dtype: DType| {
                let formats = NumberFormats { tensors: dtype, ..NumberFormats::F32 };
                let weights = Weights::read(&files.weights_of(part)?, "", "", device, formats)?;
                let builder = VarBuilder::from_tensors(weights.all()?, dtype, device);
                Ok::<_, LoadError>((weights, builder))
            };
            const COLORS: usize = 3;
            let use_flash_attention = false;
            let [of_text, of_unet, of_vae] = PIPELINE_WEIGHTS;
            let (weights, builder) = read(of_text, dtype)?;
            let text = weights.checked("the text encoder", TextEncoder::load(&builder, &config.text))?;
            let (weights, builder) = read(of_unet, dtype)?;
            let channels = config.channels;
            let unet = UNet2DConditionModel::new(
                builder,
                channels,
                channels,
                use_flash_attention,
                config.unet.clone(),
            );
            let unet = weights.checked("the denoising network", unet)?;
            let (weights, builder) = read(of_vae, DType::F32)?;
            let vae = AutoEncoderKL::new(builder, COLORS, COLORS, config.vae.clone());
            Ok::<_, LoadError>(Self {
                text,
                unet,
                vae: weights.checked("the decoder", vae)?,
                device: device.clone(),
                dtype,
                channels,
                scaling_factor: config.scaling_factor,
            })
        };
        let diffusion = load_as(device, dtype)?;
        if fitness::needs_comparison(device, spec.dtype) {
            let on_cpu = load_as(&Device::Cpu, DType::F32)?;
            let (found, expected) = (diffusion.known_step(config), on_cpu.known_step(config));
            fitness::compare_computed(spec, "prompt", found, expected)?;
        }
        Ok(diffusion)
    }

    /// The result of a step for a known prompt.
    fn known_step(&self, config: &DiffusionConfig) -> CandleResult<Vec<f32>> {
        let ids: Vec<u32> = (0..config.prompt_tokens()).map(|id| (id % config.vocabulary()) as u32).collect();
        let prompt = self.encode(&[&ids])?;
        let sides = LatentSides { height: 8, width: 8 };
        let latents = self.noise(0, sides);
        let noisy = Noisy { latents: &latents, sides, timestep: 500, prompt: &prompt, guidance: 1.0 };
        Ok(self.denoise(&[noisy])?.remove(0))
    }

    /// The noise from which an image begins, `[channels, height, width]`: normally distributed numbers that follow from
    /// the seed.
    pub fn noise(&self, seed: u64, sides: LatentSides) -> Vec<f32> {
        let seed = Seed { task: seed, sequence: 0 };
        let count = self.channels * sides.height * sides.width;
        let number = |index: u64| {
            // The Box–Muller transform: two uniform numbers give two normal ones.
            let pair = index / 2 * 2;
            let radius = (-2.0 * (1.0 - seed.uniform(pair)).ln()).sqrt();
            let angle = 2.0 * PI * seed.uniform(pair + 1);
            (radius * if index == pair { angle.cos() } else { angle.sin() }) as f32
        };
        (0..count as u64).map(number).collect()
    }

    /// The vectors of prompts of equal length, `[prompts, tokens, hidden]`.
    ///
    /// # Errors
    /// The device fails.
    pub fn encode(&self, prompts: &[&[u32]]) -> CandleResult<Tensor> {
        let ids = Tensor::from_vec(prompts.concat(), (prompts.len(), prompts[0].len()), &self.device)?;
        self.text.forward(&ids)
    }

    /// The network's results for these latents, each as long as its latents. On a GPU, those of one timestep and size
    /// are computed together.
    ///
    /// # Errors
    /// The device fails.
    pub fn denoise(&self, noisy: &[Noisy<'_>]) -> CandleResult<Vec<Vec<f32>>> {
        let mut outputs = vec![Vec::new(); noisy.len()];
        let mut left: Vec<usize> = (0..noisy.len()).collect();
        while let Some(first) = left.first() {
            let first = &noisy[*first];
            let is_alike = |other: &Noisy<'_>| {
                (other.timestep, other.sides) == (first.timestep, first.sides)
                    && other.prompt.shape() == first.prompt.shape()
            };
            let together = if self.device.is_cpu() { 1 } else { IMAGES_AT_ONCE };
            let batch: Vec<usize> =
                left.iter().copied().filter(|index| is_alike(&noisy[*index])).take(together).collect();
            let rows: Vec<&Noisy<'_>> = batch.iter().map(|index| &noisy[*index]).collect();
            for (index, output) in batch.iter().zip(self.denoise_alike(&rows)?) {
                outputs[*index] = output;
            }
            left.retain(|index| !batch.contains(index));
        }
        Ok(outputs)
    }

    /// As [`denoise`](Self::denoise), for latents of one timestep and size.
    fn denoise_alike(&self, rows: &[&Noisy<'_>]) -> CandleResult<Vec<Vec<f32>>> {
        let Noisy { sides: LatentSides { height, width }, timestep, prompt, .. } = rows[0];
        let copies = prompt.dim(0)?;
        let latents: Vec<f32> = rows.iter().flat_map(|row| row.latents.repeat(copies)).collect();
        let shape = (rows.len() * copies, self.channels, *height, *width);
        let latents = Tensor::from_vec(latents, shape, &self.device)?.to_dtype(self.dtype)?;
        let prompts: Vec<&Tensor> = rows.iter().map(|row| row.prompt).collect();
        let output = self.unet.forward(&latents, *timestep as f64, &Tensor::cat(&prompts, 0)?)?;
        let output = output.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let guided = |(row, output): (&&Noisy<'_>, &[f32])| {
            if copies == 1 {
                return output.to_vec();
            }
            let (without, with) = output.split_at(output.len() / 2);
            without
                .iter()
                .zip(with)
                .map(|(without, with)| without + row.guidance * (with - without))
                .collect()
        };
        Ok(rows.iter().zip(output.chunks_exact(output.len() / rows.len())).map(guided).collect())
    }

    /// The image of latents: red, green and blue of each pixel, row by row.
    ///
    /// # Errors
    /// The device fails.
    pub fn decode(
        &self,
        latents: &[f32],
        LatentSides { height, width }: LatentSides,
    ) -> CandleResult<Vec<u8>> {
        let latents = Tensor::from_slice(latents, (1, self.channels, height, width), &self.device)?;
        let image = self.vae.decode(&(latents / self.scaling_factor)?)?;
        let image = image.squeeze(0)?.permute((1, 2, 0))?.flatten_all()?.to_vec1::<f32>()?;
        let byte = |number: &f32| ((number / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8;
        Ok(image.iter().map(byte).collect())
    }
}

/// The number of images that one call of the network computes on a GPU. At 512 × 512 pixels with guidance, attention
/// holds about three matrices of scores for each, of 1.1 GB: 2 prompts × 8 heads × 4096² numbers of 4 bytes.
const IMAGES_AT_ONCE: usize = 4;

/// The type of numbers on the device.
///
/// # Errors
/// [`LoadError::Unsupported`] for a type in which the networks are wrong.
pub fn check_dtype(spec: &LoadSpec) -> Result<DType, LoadError> {
    let dtype = super::uniform_formats(spec)?.tensors;
    if dtype == DType::BF16 {
        let reason = "dtype is \"bf16\"; candle-transformers computes the timestep in the type of the latents, and bf16 \
                      has too few digits for it. Set f32 or f16";
        return Err(spec.unsupported(reason));
    }
    Ok(dtype)
}
