//! hibari, a network for speech synthesis: from the symbols of sentences it computes, for each frame of 12.5 ms, a
//! pitch and five spectra, from which `sound::synthesis` makes the waveform. Sentences follow each other without
//! padding, and do not change each other's results: on a CPU not even in the last bit. Owns the weights of one voice.

pub mod config;

use std::path::PathBuf;

use candle_core::{DType, Device, Result, Tensor};
use sconce_kernels::NumberFormat;

use self::config::{DecoderSizes, HibariConfig, ProsodySizes, TextSizes};
use super::block::{Block, Blocks, PreNormBlock, PreNormReader, normed};
use super::fitness;
use crate::model::load::weights::{NumberFormats, Weights};
use crate::model::ops::{
    Activation, ConvolutionBlock, Epilogue, FeedForward, InputWeights, NormParams, TimeConvolution,
};
use crate::model::sound::synthesis::SPECTRA;
use crate::model::{Dtype, LoadError, LoadSpec};

type Loaded<T> = std::result::Result<T, LoadError>;

/// Added to the variance of each norm.
const EPS: f32 = 1e-5;
/// Number of frames for which the prosody network computes one row.
const FRAMES_PER_ROW: usize = 2;
/// The unit of the network's pitch, in Hz.
const PITCH_UNIT: f32 = 100.0;
/// The decoder gets the logarithm of the pitch, divided by this.
const LOG_PITCH_UNIT: f32 = 5.0;

/// The network of one voice.
pub struct Hibari {
    text: TextEncoder,
    prosody: Prosody,
    decoder: Decoder,
    device: Device,
}

/// The symbols of a sentence.
#[derive(Clone, Copy, Debug)]
pub struct Symbols<'a> {
    /// Their ids; the first and the last are 0.
    pub ids: &'a [u32],
    /// Durations are divided by this.
    pub speed: f32,
}

/// The encoders' output for some sentences.
pub struct Encoded {
    /// One row for each symbol, for the decoder.
    text: Tensor,
    /// One row for each symbol, for the prosody network.
    prosody: Tensor,
    /// For each sentence, the duration of each of its symbols, in rows of two frames.
    durations: Vec<Vec<usize>>,
}

impl Encoded {
    /// The number of frames of each sentence.
    pub fn frames(&self) -> impl Iterator<Item = usize> + '_ {
        self.durations.iter().map(|durations| durations.iter().sum::<usize>() * FRAMES_PER_ROW)
    }
}

/// The decoded frames of a sentence.
pub struct Decoded {
    /// The pitch of each frame, in Hz. At 40 Hz and below, it is unvoiced.
    pub pitch: Vec<f32>,
    /// `[frames, width of the decoder]`.
    vectors: Tensor,
}

impl Hibari {
    /// Reads the weights of a voice. If the device is not a CPU, its results are compared with those of a CPU.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that is missing or has another shape, [`LoadError::Unsupported`] for a
    /// number format that is not supported, [`LoadError::Unfit`] for a device that computes something else than a CPU.
    pub fn load(spec: &LoadSpec, device: &Device, config: &HibariConfig, path: PathBuf) -> Loaded<Self> {
        let NumberFormats { tensors, matrices } = super::number_formats(spec)?;
        check_type(spec, tensors == DType::F32)?;
        let network = Self::read(device, config, path.clone(), matrices)?;
        if fitness::needs_comparison(device, spec.dtype) {
            let reference = Self::read(&Device::Cpu, config, path, NumberFormat::F32)?;
            let (found, expected) = (network.known_spectra(config), reference.known_spectra(config));
            fitness::compare_computed(spec, "sentence", found, expected)?;
        }
        Ok(network)
    }

    /// Reads the weights. `format` is the number format of the decoder's matrices. The others are kept in f32, so that
    /// every format gives the same durations; they take little time.
    fn read(device: &Device, config: &HibariConfig, path: PathBuf, format: NumberFormat) -> Loaded<Self> {
        // The names of the tensors have no common prefix.
        let weights = Weights::read(&[path], "model", "m.head.bias", device, NumberFormats::F32)?;
        let reader = Reader { weights: &weights, format: NumberFormat::F32 };
        let decoder = Reader { format, ..reader };
        Ok(Self {
            text: reader.text("m.text", config.symbols, config.text)?,
            prosody: reader.prosody(config.symbols, &config.prosody)?,
            decoder: decoder.decoder(config.text.width, config.decoder, config.bins())?,
            device: device.clone(),
        })
    }

    /// The spectra of a known sentence. All its symbols have the same duration, because computed durations are rounded
    /// and may differ between two devices by a whole row.
    fn known_spectra(&self, config: &HibariConfig) -> Result<Vec<f32>> {
        const SYMBOLS: u32 = 24;
        let ids: Vec<u32> = (0..SYMBOLS).map(|index| index * 7 % config.symbols as u32).collect();
        let mut encoded = self.encode(&[Symbols { ids: &ids, speed: 1.0 }])?;
        encoded.durations = vec![vec![2; ids.len()]];
        let decoded = self.decode(&encoded, &[true])?;
        let of_sentence = |decoded: &Decoded| self.spectra(decoded, 0, decoded.pitch.len());
        decoded.first().map_or_else(|| Ok(Vec::new()), of_sentence)
    }

    /// Encodes sentences, and finds the durations of their symbols.
    ///
    /// # Errors
    /// The device fails.
    pub fn encode(&self, sentences: &[Symbols<'_>]) -> Result<Encoded> {
        let lengths: Vec<usize> = sentences.iter().map(|sentence| sentence.ids.len()).collect();
        let ids: Vec<u32> = sentences.iter().flat_map(|sentence| sentence.ids).copied().collect();
        let ids = Tensor::from_vec(ids, lengths.iter().sum::<usize>(), &self.device)?;
        let text = self.text.forward(&ids, &lengths)?;
        let prosody = self.prosody.text.forward(&ids, &lengths)?;
        let inner = self.prosody.durations[0].forward(&prosody, &lengths)?.gelu_erf()?;
        let log_durations: Vec<f32> =
            self.prosody.durations[1].forward(&inner, &lengths)?.flatten_all()?.to_vec1()?;
        let mut log_durations = &log_durations[..];
        let durations = sentences.iter().map(|sentence| {
            let (of_sentence, others) = log_durations.split_at(sentence.ids.len());
            log_durations = others;
            of_sentence.iter().map(|log_duration| duration(*log_duration, sentence.speed)).collect()
        });
        let durations = durations.collect();
        Ok(Encoded { text, prosody, durations })
    }

    /// Decodes those sentences for which `wanted` is true.
    ///
    /// # Errors
    /// The device fails.
    pub fn decode(&self, encoded: &Encoded, wanted: &[bool]) -> Result<Vec<Decoded>> {
        let Encoded { text, prosody, durations } = encoded;
        // The index of the sentence's first symbol.
        let mut first = 0;
        let (mut symbol_of_row, mut rows) = (Vec::new(), Vec::new());
        for (durations, wanted) in durations.iter().zip(wanted) {
            if *wanted {
                let rows_of_symbol =
                    |(index, count): (usize, &usize)| std::iter::repeat_n((first + index) as u32, *count);
                symbol_of_row.extend(durations.iter().enumerate().flat_map(rows_of_symbol));
                rows.push(durations.iter().sum::<usize>());
            }
            first += durations.len();
        }
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let frames: Vec<usize> = rows.iter().map(|rows| rows * FRAMES_PER_ROW).collect();
        let indices = Tensor::new(&symbol_of_row[..], &self.device)?;
        let pitch_and_energy = self.prosody.forward(&prosody.index_select(&indices, 0)?, &rows)?;
        let symbol_of_frame: Vec<u32> =
            symbol_of_row.iter().flat_map(|symbol| std::iter::repeat_n(*symbol, FRAMES_PER_ROW)).collect();
        let text = text.index_select(&Tensor::new(symbol_of_frame, &self.device)?, 0)?;
        let vectors = self.decoder.forward(&text, &pitch_and_energy, &frames)?;
        let mut start = 0;
        let of_sentence = |count: &usize| {
            let frames = start..start + count;
            start += count;
            let pitch = pitch_and_energy[frames.clone()].iter().map(|[pitch, _]| *pitch).collect();
            Ok(Decoded { pitch, vectors: vectors.narrow(0, frames.start, frames.len())? })
        };
        frames.iter().map(of_sentence).collect()
    }

    /// The spectra of `count` frames from the frame `first` on, `[count, SPECTRA, bins]`. They are, in this order: the
    /// log magnitude of the harmonic part, its phase before tanh, the log magnitude of the noise, the log magnitude of
    /// the remainder, and its phase.
    ///
    /// # Errors
    /// The device fails.
    pub fn spectra(&self, sentence: &Decoded, first: usize, count: usize) -> Result<Vec<f32>> {
        let vectors = sentence.vectors.narrow(0, first, count)?;
        self.decoder.head.forward(&vectors, &[count])?.flatten_all()?.to_vec1()
    }
}

/// Refuses a `dtype` that no device has, or that a model with these sizes cannot have.
///
/// # Errors
/// [`LoadError::Unsupported`].
pub fn check_dtype(spec: &LoadSpec, DecoderSizes { width, inner, .. }: DecoderSizes) -> Loaded<()> {
    check_type(spec, spec.dtype != Dtype::F16)?;
    super::check_widths(spec, &[("decoder's", width), ("decoder's inner", inner)])
}

fn check_type(spec: &LoadSpec, is_supported: bool) -> Loaded<()> {
    if is_supported {
        return Ok(());
    }
    let reason = format!(
        "dtype is {:?}; speech is synthesized in f32, and on a CPU also in bf16 and int8",
        spec.dtype.name()
    );
    Err(spec.unsupported(reason))
}

/// The duration of a symbol in rows. The network computes ln(1 + duration) at speed 1. The result is rounded half to
/// even, as in the Python package.
fn duration(log_duration: f32, speed: f32) -> usize {
    // The largest duration is refused later.
    if log_duration.is_nan() {
        return MAX_DURATION;
    }
    (((log_duration.exp() - 1.0) / speed).round_ties_even().max(1.0) as usize).min(MAX_DURATION)
}

/// Maximum duration of a symbol, in rows. Sums of such durations do not overflow.
const MAX_DURATION: usize = 1 << 24;

/// An encoder of symbols.
struct TextEncoder {
    /// `[symbols, width]`.
    embeddings: Tensor,
    convolutions: Vec<ConvolutionBlock>,
    /// The transformer's only layer.
    layer: Blocks,
    /// How often the layer is applied.
    layer_repeats: usize,
    norm: NormParams,
}

impl TextEncoder {
    fn forward(&self, ids: &Tensor, lengths: &[usize]) -> Result<Tensor> {
        let mut x = self.embeddings.index_select(ids, 0)?;
        for block in &self.convolutions {
            x = block.forward(&x, lengths)?;
        }
        for _ in 0..self.layer_repeats {
            x = self.layer.forward(x, |attention, x| attention.forward(x, lengths))?;
        }
        normed(&x, Some(&self.norm))
    }
}

/// The network for durations and pitch.
struct Prosody {
    text: TextEncoder,
    /// Two convolutions, with GELU between them.
    durations: [TimeConvolution; 2],
    input: TimeConvolution,
    blocks: Vec<ConvolutionBlock>,
    output: TimeConvolution,
}

impl Prosody {
    /// The pitch in Hz and the energy of each frame, from `x` `[rows, width]`. `rows` are the rows of each sentence.
    fn forward(&self, x: &Tensor, rows: &[usize]) -> Result<Vec<[f32; 2]>> {
        let mut x = self.input.forward(x, rows)?;
        for block in &self.blocks {
            x = block.forward(&x, rows)?;
        }
        let numbers: Vec<f32> = self.output.forward(&x, rows)?.flatten_all()?.to_vec1()?;
        // Each row has the pitches of its two frames, and then their energies.
        let frames = numbers.as_chunks::<{ 2 * FRAMES_PER_ROW }>().0.iter();
        Ok(frames.flat_map(|[p1, p2, e1, e2]| [[p1 * PITCH_UNIT, *e1], [p2 * PITCH_UNIT, *e2]]).collect())
    }
}

/// The network for the spectra.
struct Decoder {
    input: TimeConvolution,
    blocks: Vec<ConvolutionBlock>,
    norm: NormParams,
    /// The linear layer from a frame's vector to its spectra.
    head: TimeConvolution,
}

impl Decoder {
    /// The frames' vectors. `text` is `[frames of all sentences, width of the text]`, `frames` are those of each.
    fn forward(&self, text: &Tensor, pitch_and_energy: &[[f32; 2]], frames: &[usize]) -> Result<Tensor> {
        let of_frame = |[pitch, energy]: &[f32; 2]| [pitch.max(0.0).ln_1p() / LOG_PITCH_UNIT, *energy];
        let numbers: Vec<f32> = pitch_and_energy.iter().flat_map(of_frame).collect();
        let numbers = Tensor::from_vec(numbers, (pitch_and_energy.len(), 2), text.device())?;
        let mut x = self.input.forward(&Tensor::cat(&[text, &numbers], 1)?, frames)?;
        for block in &self.blocks {
            x = block.forward(&x, frames)?;
        }
        normed(&x, Some(&self.norm))
    }
}

/// Reads the weights of the network's parts.
#[derive(Clone, Copy)]
struct Reader<'a> {
    weights: &'a Weights,
    /// The number format of matrices.
    format: NumberFormat,
}

impl Reader<'_> {
    fn blocks(&self) -> PreNormReader<'_> {
        PreNormReader { weights: self.weights, format: self.format, eps: EPS }
    }

    fn norm(&self, name: &str, width: usize) -> Loaded<NormParams> {
        self.blocks().norm(name, width)
    }

    /// The convolution `name` from `channels` to `width` channels, over `taps` neighbouring vectors: of symbols, rows
    /// or frames.
    fn convolution(&self, name: &str, [channels, width, taps]: [usize; 3]) -> Loaded<TimeConvolution> {
        let weights = self.weights.get(&format!("{name}.weight"), &[width, channels, taps])?;
        let bias = self.weights.get(&format!("{name}.bias"), &[width])?;
        self.weights.checked(name, TimeConvolution::new(&weights, &bias, 1, false))
    }

    /// A ConvNeXt block: x + γ·(feed-forward of the normed depthwise convolution of x). γ becomes part of the
    /// feed-forward sublayer's weights.
    fn block(
        &self,
        name: &str,
        [width, inner]: [usize; 2],
        taps: usize,
        dilation: usize,
    ) -> Loaded<ConvolutionBlock> {
        let get = |part: &str, shape: &[usize]| self.weights.get(&format!("{name}.{part}"), shape);
        let gamma = get("gamma", &[width])?;
        let scaled = |part: &str, shape: &[usize], gamma: Result<Tensor>| {
            let scaled =
                get(part, shape).map(|tensor| gamma.and_then(|gamma| tensor.broadcast_mul(&gamma)))?;
            self.weights.checked(name, scaled)
        };
        let down = scaled("pw2.weight", &[width, inner], gamma.reshape((width, 1)))?;
        let down_bias = scaled("pw2.bias", &[width], Ok(gamma))?;
        let up = InputWeights {
            matrix: get("pw1.weight", &[inner, width])?,
            bias: get("pw1.bias", &[inner])?,
            gate: None,
            format: self.format,
        };
        let depthwise = (get("dw.weight", &[width, 1, taps])?, get("dw.bias", &[width])?);
        let convolution = TimeConvolution::new(&depthwise.0, &depthwise.1, dilation, true);
        let epilogue = self.weights.checked(name, Epilogue::bias(&down_bias))?;
        Ok(ConvolutionBlock {
            convolution: self.weights.checked(name, convolution)?,
            norm: self.norm(&format!("{name}.norm"), width)?,
            feed_forward: self
                .weights
                .checked(name, FeedForward::new(up, &down, epilogue, Activation::Gelu))?,
        })
    }

    /// The transformer's layer.
    fn layer(&self, name: &str, TextSizes { width, inner, heads, .. }: TextSizes) -> Loaded<Block> {
        let get = |part: &str, shape: &[usize]| self.weights.get(&format!("{name}.{part}"), shape);
        let joint = get("self_attn.in_proj_weight", &[3 * width, width])?;
        let joint_bias = get("self_attn.in_proj_bias", &[3 * width])?;
        let projection = |index: usize| {
            let slice = |joint: &Tensor| joint.narrow(0, index * width, width)?.contiguous();
            self.weights.checked(name, slice(&joint).and_then(|matrix| Ok((matrix, slice(&joint_bias)?))))
        };
        let block = PreNormBlock {
            prefix: name,
            norms: ["norm1", "norm2"],
            out: "self_attn.out_proj",
            feed_forward: ["linear1", "linear2"],
            inner,
            heads,
            activation: Activation::Gelu,
        };
        self.blocks().block(block, [projection(0)?, projection(1)?, projection(2)?])
    }

    fn text(&self, name: &str, symbols: usize, sizes: TextSizes) -> Loaded<TextEncoder> {
        const TAPS: usize = 5;
        let TextSizes { width, inner, convolutions, layers, .. } = sizes;
        let block = |index| self.block(&format!("{name}.convs.{index}"), [width, inner], TAPS, 1);
        Ok(TextEncoder {
            embeddings: self.weights.get(&format!("{name}.emb.weight"), &[symbols, width])?,
            convolutions: (0..convolutions).map(block).collect::<Loaded<_>>()?,
            layer: Blocks { blocks: vec![self.layer(&format!("{name}.attn"), sizes)?], last_norm: None },
            layer_repeats: layers,
            norm: self.norm(&format!("{name}.norm"), width)?,
        })
    }

    fn prosody(&self, symbols: usize, ProsodySizes { text, dilations }: &ProsodySizes) -> Loaded<Prosody> {
        const TAPS: usize = 7;
        let TextSizes { width, inner, .. } = *text;
        let block = |(index, dilation): (usize, &usize)| {
            self.block(&format!("pn.pro.{index}"), [width, inner], TAPS, *dilation)
        };
        Ok(Prosody {
            text: self.text("pn.text", symbols, *text)?,
            durations: [
                self.convolution("pn.dur.0", [width, width, 3])?,
                self.convolution("pn.dur.2", [width, 1, 1])?,
            ],
            input: self.convolution("pn.pro_in", [width, width, 1])?,
            blocks: dilations.iter().enumerate().map(block).collect::<Loaded<_>>()?,
            output: self.convolution("pn.pro_out", [width, 2 * FRAMES_PER_ROW, 1])?,
        })
    }

    fn decoder(&self, text_width: usize, sizes: DecoderSizes, bins: usize) -> Loaded<Decoder> {
        const TAPS: usize = 7;
        let DecoderSizes { width, inner, blocks } = sizes;
        let block = |index| self.block(&format!("m.dec.{index}"), [width, inner], TAPS, 1);
        let matrix = self.weights.get("m.head.weight", &[SPECTRA * bins, width])?;
        let bias = self.weights.get("m.head.bias", &[SPECTRA * bins])?;
        let head = TimeConvolution::linear(&matrix, &bias, self.format);
        Ok(Decoder {
            input: self.convolution("m.dec_in", [text_width + 2, width, TAPS])?,
            blocks: (0..blocks).map(block).collect::<Loaded<_>>()?,
            norm: self.norm("m.dec_norm", width)?,
            head: self.weights.checked("m.head", head)?,
        })
    }
}
