//! Voice activity detection by silero-vad 6.2 (MIT, see LICENSE.silero). Computes the probability of speech in each
//! [`CHUNK`] of a recording. The network is small: it takes about 0.7 million multiplications for a chunk. The weights
//! are part of the program; scripts/convert-silero-vad.py made the file from the published one.
//!
//! The network consists of a Fourier transform as a convolution, four convolutions with ReLU over the magnitudes, an
//! LSTM over the chunks, ReLU, and a linear layer with a sigmoid.

use std::sync::Arc;

use safetensors::SafeTensors;
use sconce_kernels::Matrix;

use crate::model::LoadError;

/// Samples of a chunk, which gets one probability: 32 ms at 16 kHz.
pub const CHUNK: usize = 512;

/// Samples before a chunk that the network sees with it. The chunk's last samples, equally many, are mirrored after it.
const EDGE: usize = 64;
/// Samples of a frame, which is transformed as a whole.
const FRAME: usize = 256;
/// Samples from the beginning of a frame to the beginning of the next.
const HOP: usize = 128;
/// Frames of a chunk.
const FRAMES: usize = (CHUNK + 2 * EDGE - FRAME) / HOP + 1;
const BINS: usize = FRAME / 2 + 1;
/// The size of the LSTM's hidden state.
const HIDDEN: usize = 128;
/// The gates for each number of the hidden state: input, forget, cell, output.
const GATES: usize = 4;
/// The steps that the kernel of a convolution spans.
const KERNEL: usize = 3;
/// The input channels, the output channels and the stride of each convolution.
const CONVOLUTIONS: [[usize; 3]; 4] = [[BINS, 128, 1], [128, 64, 2], [64, 64, 2], [64, HIDDEN, 1]];

const FILE: &str = "silero_vad.safetensors";
static WEIGHTS: &[u8] = include_bytes!("silero_vad.safetensors");

/// The network's weights. Threads share them.
pub struct VoiceDetector {
    transform: Matrix,
    convolutions: Vec<Convolution>,
    input_gates: Matrix,
    state_gates: Matrix,
    /// The sum of the biases for the input and for the state.
    gate_bias: Vec<f32>,
    output: Vec<f32>,
    output_bias: f32,
}

struct Convolution {
    /// The columns are the channels of the kernel's first step, then the channels of its second step, and so on.
    matrix: Matrix,
    bias: Vec<f32>,
    stride: usize,
}

impl VoiceDetector {
    /// Reads the weights.
    ///
    /// # Errors
    /// The program was built with a broken file.
    pub fn load() -> Result<Self, LoadError> {
        let broken = |reason: String| LoadError::File { path: FILE.into(), reason };
        let file = SafeTensors::deserialize(WEIGHTS).map_err(|error| broken(error.to_string()))?;
        let read = |name: &str, shape: &[usize]| {
            let tensor = file.tensor(name).map_err(|error| broken(error.to_string()))?;
            if tensor.shape() != shape {
                return Err(broken(format!("{name} has the shape {:?}, not {shape:?}", tensor.shape())));
            }
            let numbers = tensor.data().chunks_exact(4).filter_map(|it| it.try_into().ok());
            Ok(numbers.map(f32::from_le_bytes).collect::<Vec<f32>>())
        };
        let convolution = |(layer, [inputs, outputs, stride]): (usize, [usize; 3])| {
            let weights = read(&format!("encoder.{layer}.weight"), &[outputs, inputs, KERNEL])?;
            // Transposes `[outputs, inputs, KERNEL]` to `[outputs, KERNEL, inputs]`, because `Convolution::forward`
            // puts a row together step by step.
            let transposed = |index: usize| {
                let (output, within) = (index / (KERNEL * inputs), index % (KERNEL * inputs));
                weights[output * KERNEL * inputs + within % inputs * KERNEL + within / inputs]
            };
            let columns: Vec<f32> = (0..weights.len()).map(transposed).collect();
            let bias = read(&format!("encoder.{layer}.bias"), &[outputs])?;
            Ok(Convolution { matrix: Matrix::of_f32(&columns, KERNEL * inputs), bias, stride })
        };
        let gates = GATES * HIDDEN;
        let biases = [read("lstm.bias_ih", &[gates])?, read("lstm.bias_hh", &[gates])?];
        Ok(Self {
            transform: Matrix::of_f32(&read("stft.weight", &[2 * BINS, 1, FRAME])?, FRAME),
            convolutions: CONVOLUTIONS.into_iter().enumerate().map(convolution).collect::<Result<_, _>>()?,
            input_gates: Matrix::of_f32(&read("lstm.weight_ih", &[gates, HIDDEN])?, HIDDEN),
            state_gates: Matrix::of_f32(&read("lstm.weight_hh", &[gates, HIDDEN])?, HIDDEN),
            gate_bias: biases[0].iter().zip(&biases[1]).map(|(one, other)| one + other).collect(),
            output: read("output.weight", &[1, HIDDEN, 1])?,
            output_bias: read("output.bias", &[1])?[0],
        })
    }

    /// Computes the inputs of the LSTM, `[chunks, HIDDEN]`. For each chunk, `chunks` holds the [`EDGE`] samples before
    /// it, the chunk itself, and room for [`EDGE`] mirrored samples.
    fn encode(&self, mut chunks: Vec<f32>) -> Vec<f32> {
        const PADDED: usize = CHUNK + 2 * EDGE;
        for chunk in chunks.chunks_exact_mut(PADDED) {
            let (sound, mirrored) = chunk.split_at_mut(PADDED - EDGE);
            // The last sample itself is not repeated.
            mirrored.iter_mut().zip(sound.iter().rev().skip(1)).for_each(|(to, from)| *to = *from);
        }
        let frames: Vec<f32> = chunks
            .chunks_exact(PADDED)
            .flat_map(|chunk| (0..FRAMES).flat_map(|frame| &chunk[frame * HOP..frame * HOP + FRAME]))
            .copied()
            .collect();
        let spectrum = product(&self.transform, &frames);
        let magnitudes = spectrum.chunks_exact(2 * BINS).flat_map(|bins| {
            let (real, imaginary) = bins.split_at(BINS);
            real.iter().zip(imaginary).map(|(re, im)| (re * re + im * im).sqrt())
        });
        let (mut x, mut steps) = (magnitudes.collect::<Vec<f32>>(), FRAMES);
        for convolution in &self.convolutions {
            (x, steps) = convolution.forward(&x, steps);
        }
        x
    }
}

impl Convolution {
    /// Convolves `x` `[chunks, steps, inputs]`, and applies ReLU. Returns the output, and its number of steps.
    fn forward(&self, x: &[f32], steps: usize) -> (Vec<f32>, usize) {
        let inputs = self.matrix.depth() / KERNEL;
        let out_steps = (steps - 1) / self.stride + 1;
        let mut rows = Vec::with_capacity(x.len() / steps * out_steps * KERNEL);
        for chunk in x.chunks_exact(steps * inputs) {
            for step in 0..out_steps {
                // A chunk is padded with one step of zeros before it and one after it.
                for padded_step in (0..KERNEL).map(|tap| step * self.stride + tap) {
                    match padded_step.checked_sub(1).filter(|step| *step < steps) {
                        Some(step) => rows.extend_from_slice(&chunk[step * inputs..(step + 1) * inputs]),
                        None => rows.extend(std::iter::repeat_n(0.0, inputs)),
                    }
                }
            }
        }
        let mut out = product(&self.matrix, &rows);
        for row in out.chunks_exact_mut(self.bias.len()) {
            row.iter_mut().zip(&self.bias).for_each(|(value, bias)| *value = (*value + bias).max(0.0));
        }
        (out, out_steps)
    }
}

/// The product of each row with the matrix.
fn product(matrix: &Matrix, rows: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; rows.len() / matrix.depth() * matrix.width()];
    matrix.multiply_single_threaded(rows, &mut out);
    out
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Detects the speech of one recording. Owns the LSTM's state.
pub struct Listener {
    detector: Arc<VoiceDetector>,
    /// The last samples of the previous chunk.
    edge: [f32; EDGE],
    hidden: Vec<f32>,
    cell: Vec<f32>,
}

impl Listener {
    /// Begins a recording.
    pub fn new(detector: Arc<VoiceDetector>) -> Self {
        Self { detector, edge: [0.0; EDGE], hidden: vec![0.0; HIDDEN], cell: vec![0.0; HIDDEN] }
    }

    /// Computes the probability of speech in each of the next chunks. Only the last chunk of a recording may be shorter
    /// than [`CHUNK`].
    pub fn probabilities(&mut self, samples: &[f32]) -> Vec<f32> {
        let mut chunks = Vec::with_capacity(samples.len() + samples.len() / CHUNK * 2 * EDGE);
        for chunk in samples.chunks(CHUNK) {
            chunks.extend_from_slice(&self.edge);
            chunks.extend_from_slice(chunk);
            chunks.extend(std::iter::repeat_n(0.0, CHUNK - chunk.len() + EDGE));
            let end = chunks.len() - EDGE;
            self.edge.copy_from_slice(&chunks[end - EDGE..end]);
        }
        let encoded = self.detector.clone().encode(chunks);
        let gates = product(&self.detector.input_gates, &encoded);
        gates.chunks_exact(GATES * HIDDEN).map(|gates| self.step(gates)).collect()
    }

    /// Advances the LSTM by a chunk, and returns the probability.
    fn step(&mut self, from_input: &[f32]) -> f32 {
        let VoiceDetector { state_gates, gate_bias, output, output_bias, .. } = &*self.detector;
        let mut gates = product(state_gates, &self.hidden);
        gates
            .iter_mut()
            .zip(from_input)
            .zip(gate_bias)
            .for_each(|((gate, input), bias)| *gate += input + bias);
        let mut sum = *output_bias;
        for index in 0..HIDDEN {
            let [input, forget, cell, out] = [0, 1, 2, 3].map(|gate: usize| gates[gate * HIDDEN + index]);
            self.cell[index] = sigmoid(forget) * self.cell[index] + sigmoid(input) * cell.tanh();
            self.hidden[index] = sigmoid(out) * self.cell[index].tanh();
            sum += output[index] * self.hidden[index].max(0.0);
        }
        sigmoid(sum)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use crate::model::sound::decode::{Channels, Limits, Recording};

    fn probabilities(sound: &[f32], block: usize) -> Vec<f32> {
        let mut listener = Listener::new(Arc::new(VoiceDetector::load().unwrap()));
        sound.chunks(block).flat_map(|block| listener.probabilities(block)).collect()
    }

    #[test]
    fn a_recording_has_the_probabilities_of_the_published_model() {
        let file = std::fs::read("tests/fixtures/sound/reading.flac").unwrap();
        let mut recording =
            Recording::open(Cursor::new(file), Limits::of_seconds(60.0), Channels::Mix).unwrap();
        let mut sound = Vec::new();
        while let Some(block) = recording.next_block().unwrap() {
            sound.extend_from_slice(&block[0]);
        }
        let expected = std::fs::read("tests/fixtures/sound/voice.json").unwrap();
        let expected: Vec<f32> = serde_json::from_slice(&expected).unwrap();
        for block in [CHUNK, 16 * CHUNK] {
            let found = probabilities(&sound, block);
            assert_eq!(found.len(), expected.len());
            let difference = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(difference < 1e-3, "{difference}");
        }
        assert!(expected.iter().any(|it| *it > 0.9) && expected.iter().any(|it| *it < 0.1));
    }

    #[test]
    fn silence_and_noise_are_no_speech() {
        let noise: Vec<f32> = noise_of(20 * CHUNK);
        for sound in [vec![0.0; 20 * CHUNK + 7], noise] {
            let found = probabilities(&sound, CHUNK);
            assert_eq!(found.len(), sound.len().div_ceil(CHUNK));
            assert!(found.iter().all(|it| *it < 0.5), "{found:?}");
        }
    }

    /// Noise of a tenth of full scale.
    fn noise_of(length: usize) -> Vec<f32> {
        let mut state = 1_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..length).map(|_| next() * 0.1).collect()
    }
}
