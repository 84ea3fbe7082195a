//! Whisper, OpenAI's network for speech recognition: an encoder of windows of 30 s, and a decoder that writes the text
//! of a window. The names of tensors are those of the transformers library. `encoder` and `decoder` compute on a CPU,
//! `on_device` on any device by candle's operations. They own the weights, and the keys and values of each slot.

pub mod config;
mod decoder;
mod encoder;
mod on_device;

pub use decoder::{Decoder, Span};
pub use encoder::Encoder;
pub use on_device::DeviceWhisper;

use candle_core::{DType, Device};

use self::config::{Layers, WhisperConfig};
use super::{fitness, uniform_formats};
use crate::model::load::ModelFiles;
use crate::model::load::weights::{NumberFormats, Weights};
use crate::model::ops::{Matrix, layer_norm};
use crate::model::sound::features::FRAMES;
use crate::model::{Dtype, ForwardError, LoadError, LoadSpec};

/// The tokens of the known text by which a number format or a device is compared with a CPU in f32.
const KNOWN_TOKENS: usize = 8;
/// Added to the variance of each norm.
const EPS: f32 = 1e-5;

/// Both networks. A slot is the place of one window and its text.
pub enum Whisper {
    /// On a CPU. Results are equal to the bit, whatever else is in the batch.
    Host(Box<HostWhisper>),
    /// On a GPU.
    Device(Box<DeviceWhisper>),
}

/// Both networks on a CPU.
pub struct HostWhisper {
    /// Encodes windows.
    pub encoder: Encoder,
    /// Writes the texts of encoded windows.
    pub decoder: Decoder,
}

impl Whisper {
    /// Reads the weights. There are `slots` places for windows with their texts. Except for a CPU in f32, results are
    /// compared with those of a CPU in f32.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that is missing or has another shape, [`LoadError::Unsupported`] for a
    /// number format that is not supported, [`LoadError::Device`] if the memory for keys and values is missing,
    /// [`LoadError::Unfit`] for results that differ.
    pub fn load(
        spec: &LoadSpec,
        device: &Device,
        config: &WhisperConfig,
        slots: usize,
    ) -> Result<Self, LoadError> {
        let network = Self::read(spec, device, config, slots)?;
        Self::compare(spec, device, config)?;
        Ok(network)
    }

    fn read(
        spec: &LoadSpec,
        device: &Device,
        config: &WhisperConfig,
        slots: usize,
    ) -> Result<Self, LoadError> {
        if device.is_cpu() {
            return Ok(Self::Host(Box::new(HostWhisper::load(spec, config, slots)?)));
        }
        Ok(Self::Device(Box::new(DeviceWhisper::load(spec, device, config, slots)?)))
    }

    /// Compares the results of some layers for a known window with those of a CPU in f32.
    fn compare(spec: &LoadSpec, device: &Device, config: &WhisperConfig) -> Result<(), LoadError> {
        if !fitness::needs_comparison(device, spec.dtype) {
            return Ok(());
        }
        let first = |layers: Layers| Layers { count: layers.count.min(fitness::COMPARED_LAYERS), ..layers };
        let config = WhisperConfig {
            encoder: first(config.encoder),
            decoder: first(config.decoder),
            alignment: Vec::new(),
            ..config.clone()
        };
        let in_f32 = LoadSpec { dtype: Dtype::F32, ..spec.clone() };
        let logits = |network: Result<Self, LoadError>| {
            let logits = network?.known_logits(&config);
            logits.map_err(|error| fitness::failed(spec, &ForwardError::from(&error)))
        };
        let found = logits(Self::read(spec, device, &config, 1))?;
        let expected = logits(Self::read(&in_f32, &Device::Cpu, &config, 1))?;
        fitness::compare_logits(spec, "window of 30 s", found, expected)
    }

    /// The logits after some tokens for a window of synthetic features.
    fn known_logits(mut self, config: &WhisperConfig) -> candle_core::Result<Vec<f32>> {
        let wave = |index: usize| ((index % 97) as f32 * 0.13).sin();
        let features: Vec<f32> = (0..config.mels * FRAMES).map(wave).collect();
        self.encode(&[0], &[&features])?;
        // 7,919 is a prime, so that the tokens differ.
        let ids: Vec<u32> = (1..=KNOWN_TOKENS).map(|n| (n * 7_919 % config.vocabulary) as u32).collect();
        let (first, last) = ids.split_at(KNOWN_TOKENS - 1);
        let mut logits = Vec::new();
        self.forward(first, &[Span { slot: 0, first: 0, count: first.len() }], &[], &mut logits)?;
        self.forward(last, &[Span { slot: 0, first: first.len(), count: 1 }], &[0], &mut logits)?;
        Ok(logits)
    }

    /// Encodes windows, each given by its features `[mels, FRAMES]`, and stores each in its slot, where it replaces the
    /// previous one.
    ///
    /// # Errors
    /// The device fails.
    pub fn encode(&mut self, slots: &[usize], windows: &[&[f32]]) -> candle_core::Result<()> {
        match self {
            Self::Host(host) => {
                let encoded = host.encoder.forward(windows)?;
                if let Some(window_len) = encoded.len().checked_div(slots.len()) {
                    let windows = slots.iter().zip(encoded.chunks_exact(window_len));
                    windows.for_each(|(slot, window)| host.decoder.set_window(*slot, window));
                }
                Ok(())
            }
            Self::Device(device) => device.encode(slots, windows),
        }
    }

    /// Makes a slot keep the queries that [`Whisper::alignment`] needs, from its next token on, until its release.
    pub fn keep_queries(&mut self, slot: usize) {
        match self {
            Self::Host(host) => host.decoder.keep_queries(slot),
            Self::Device(device) => device.keep_queries(slot),
        }
    }

    /// As [`Decoder::alignment`].
    ///
    /// # Errors
    /// The device fails.
    pub fn alignment(&self, slot: usize, positions: &[usize], keys: usize) -> candle_core::Result<Vec<f32>> {
        match self {
            Self::Host(host) => Ok(host.decoder.alignment(slot, positions, keys)),
            Self::Device(device) => device.alignment(slot, positions, keys),
        }
    }

    /// As [`Decoder::forward`].
    ///
    /// # Errors
    /// The device has no memory for the step, or fails.
    pub fn forward(
        &mut self,
        ids: &[u32],
        spans: &[Span],
        wanted: &[usize],
        logits: &mut Vec<f32>,
    ) -> candle_core::Result<()> {
        match self {
            Self::Host(host) => {
                host.decoder.forward(ids, spans, wanted, logits);
                Ok(())
            }
            Self::Device(device) => device.forward(ids, spans, wanted, logits),
        }
    }

    /// Ends the text of a slot. On a CPU the memory of all slots is returned to the system once none has a text.
    pub fn release(&mut self, slot: usize) {
        match self {
            Self::Host(host) => host.decoder.release(slot),
            Self::Device(device) => device.release(slot),
        }
    }
}

impl HostWhisper {
    /// Reads the weights, for `slots` windows with their texts.
    ///
    /// # Errors
    /// As [`Whisper::load`].
    pub fn load(spec: &LoadSpec, config: &WhisperConfig, slots: usize) -> Result<Self, LoadError> {
        let weights = weights(spec, &Device::Cpu, check_dtype(spec, config)?)?;
        let decoder = Decoder::load(&weights, config, slots)?;
        Ok(Self {
            encoder: Encoder::load(&weights, config)?,
            decoder: decoder.map_err(|error| spec.failed(format!("keys and values: {error}")))?,
        })
    }
}

/// The number format of the pool's `dtype`.
///
/// # Errors
/// [`LoadError::Unsupported`] if Whisper of these sizes cannot have it on this device.
pub fn check_dtype(spec: &LoadSpec, config: &WhisperConfig) -> Result<NumberFormats, LoadError> {
    if spec.device != "cpu" {
        return uniform_formats(spec);
    }
    let formats = super::number_formats(spec)?;
    if formats.tensors != DType::F32 {
        let dtype = spec.dtype.name();
        let reason = format!("dtype is {dtype:?}; on a CPU, Whisper is computed in f32, bf16 or int8");
        return Err(spec.unsupported(reason));
    }
    let WhisperConfig { width, encoder, decoder, .. } = config;
    let (of_encoder, of_decoder) = (("encoder's inner", encoder.inner), ("decoder's inner", decoder.inner));
    super::check_widths(spec, &[("hidden", *width), of_encoder, of_decoder])?;
    Ok(formats)
}

fn weights(spec: &LoadSpec, device: &Device, formats: NumberFormats) -> Result<Weights, LoadError> {
    let paths = ModelFiles::locate(&spec.source)?.weights()?;
    Weights::read(&paths, "model", "decoder.embed_tokens.weight", device, formats)
}

/// The numbers of the tensor `name`.
fn values(weights: &Weights, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
    weights.values(&format!("{}{name}", weights.prefix()), shape)
}

/// The parameters of a layer norm.
struct LayerNorm {
    weight: Vec<f32>,
    shift: Vec<f32>,
}

impl LayerNorm {
    fn load(weights: &Weights, name: &str, width: usize) -> Result<Self, LoadError> {
        Ok(Self {
            weight: values(weights, &format!("{name}.weight"), &[width])?,
            shift: values(weights, &format!("{name}.bias"), &[width])?,
        })
    }

    /// `out` ← LayerNorm(`rows`), both `[n, width]`.
    fn apply(&self, rows: &[f32], out: &mut Vec<f32>) {
        out.resize(rows.len(), 0.0);
        layer_norm(rows, &self.weight, &self.shift, EPS, out);
    }
}

/// A linear layer with its bias.
struct Linear {
    matrix: Matrix,
    bias: Vec<f32>,
}

impl Linear {
    /// Reads the layer `name`, from rows of `depth` numbers to rows of `width` numbers.
    fn load(weights: &Weights, name: &str, [depth, width]: [usize; 2]) -> Result<Self, LoadError> {
        Ok(Self {
            matrix: weights.matrix(&format!("{name}.weight"), [depth, width])?,
            bias: values(weights, &format!("{name}.bias"), &[width])?,
        })
    }

    /// The product without the bias: `out` `[n, width]` ← `rows` `[n, depth]` times the matrix.
    fn multiply(&self, rows: &[f32], out: &mut Vec<f32>) {
        out.resize(rows.len() / self.matrix.depth() * self.matrix.width(), 0.0);
        self.matrix.multiply(rows, out);
    }
}
