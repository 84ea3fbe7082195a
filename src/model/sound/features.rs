//! Log-mel features as OpenAI's Whisper computes them. There is a centred frame of 25 ms every 10 ms. The window is
//! mirrored at both ends. The mel filters follow Slaney's formula. Logarithms more than 8 below the largest one are
//! raised to that bound. Keeps no state between windows.

use std::f64::consts::TAU;
use std::sync::Arc;

use realfft::num_complex::Complex;
use realfft::{RealFftPlanner, RealToComplex};

use super::RATE;

/// Samples of a window: 30 s. A shorter piece is padded with silence.
pub const WINDOW: usize = 30 * RATE as usize;
/// Frames of a window.
pub const FRAMES: usize = WINDOW / HOP;

/// Samples of a frame, and of its Fourier transform: 25 ms.
const FRAME: usize = 400;
/// Samples from one frame's middle to the next: 10 ms.
const HOP: usize = 160;
/// Bins of a frame's spectrum.
const BINS: usize = FRAME / 2 + 1;
/// The least power whose logarithm is taken.
const MIN_POWER: f32 = 1e-10;

/// Computes features. Threads share it.
pub struct LogMel {
    fft: Arc<dyn RealToComplex<f32>>,
    /// The Hann window.
    window: Vec<f32>,
    filters: Vec<Filter>,
}

/// A triangular filter over the spectrum.
struct Filter {
    /// The bin of the first weight.
    first_bin: usize,
    weights: Vec<f32>,
}

impl LogMel {
    /// Prepares the transform and the filters for models with this number of mel bins: 80, or 128 from large-v3 on.
    pub fn new(mels: usize) -> Self {
        let window = (0..FRAME).map(|index| (0.5 - 0.5 * (TAU * index as f64 / FRAME as f64).cos()) as f32);
        Self {
            fft: RealFftPlanner::new().plan_fft_forward(FRAME),
            window: window.collect(),
            filters: filters(mels),
        }
    }

    /// Mel bins of a frame.
    pub fn mels(&self) -> usize {
        self.filters.len()
    }

    /// The features of a piece of 30 s at most, `[mels, FRAMES]`. Samples beyond [`WINDOW`] are left out.
    pub fn features(&self, samples: &[f32]) -> Vec<f32> {
        let samples = &samples[..samples.len().min(WINDOW)];
        // Later frames are silent: they begin after the sound. The last frames of a full window hold mirrored sound.
        let frames = ((samples.len() + FRAME / 2).div_ceil(HOP)).min(FRAMES);
        let mut features = vec![MIN_POWER.log10(); self.mels() * FRAMES];
        let mut frame = vec![0.0; FRAME];
        let mut spectrum = vec![Complex::default(); BINS];
        let mut scratch = self.fft.make_scratch_vec();
        let mut power = [0.0; BINS];
        for frame_index in 0..frames {
            for (offset, (value, window)) in frame.iter_mut().zip(&self.window).enumerate() {
                let index = (frame_index * HOP + offset) as isize - (FRAME / 2) as isize;
                *value = window * mirrored(samples, index);
            }
            // It fails only if a length differs from the plan's.
            if self.fft.process_with_scratch(&mut frame, &mut spectrum, &mut scratch).is_err() {
                break;
            }
            power.iter_mut().zip(&spectrum).for_each(|(power, bin)| *power = bin.norm_sqr());
            for (filter, row) in self.filters.iter().zip(features.chunks_exact_mut(FRAMES)) {
                let bins = power[filter.first_bin..].iter().zip(&filter.weights);
                let energy: f32 = bins.map(|(power, weight)| power * weight).sum();
                row[frame_index] = energy.max(MIN_POWER).log10();
            }
        }
        let largest = features.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        features.iter_mut().for_each(|value| *value = (value.max(largest - 8.0) + 4.0) / 4.0);
        features
    }
}

/// The sample at this index of a window, which is mirrored beyond its ends, without repeating the samples there.
fn mirrored(samples: &[f32], index: isize) -> f32 {
    let last = WINDOW as isize - 1;
    let index = index.abs();
    let index = if index > last { 2 * last - index } else { index };
    samples.get(index as usize).copied().unwrap_or(0.0)
}

/// Triangles whose corners lie at equal distances on the mel scale. The height of each is 2 over its width in Hz, so
/// its area is 1.
fn filters(mels: usize) -> Vec<Filter> {
    let highest = mel(f64::from(RATE) / 2.0);
    let corner = |index: usize| hertz(highest * index as f64 / (mels + 1) as f64);
    let bin_hertz = f64::from(RATE) / FRAME as f64;
    let filter = |index: usize| {
        let (low, middle, high) = (corner(index), corner(index + 1), corner(index + 2));
        let weight = |bin: usize| {
            let hertz = bin as f64 * bin_hertz;
            let height = ((hertz - low) / (middle - low)).min((high - hertz) / (high - middle));
            (height.max(0.0) * 2.0 / (high - low)) as f32
        };
        let first_bin = (0..BINS).find(|bin| weight(*bin) > 0.0).unwrap_or(BINS);
        let weights = (first_bin..BINS).map(weight).take_while(|weight| *weight > 0.0).collect();
        Filter { first_bin, weights }
    };
    (0..mels).map(filter).collect()
}

/// Hz per mel where Slaney's mel scale is linear: below [`BREAK_HERTZ`].
const HERTZ_PER_MEL: f64 = 200.0 / 3.0;
/// From this frequency on, Slaney's mel scale is logarithmic: 27 mels for a factor of 6.4.
const BREAK_HERTZ: f64 = 1_000.0;
const BREAK_MEL: f64 = BREAK_HERTZ / HERTZ_PER_MEL;

fn mel(hertz: f64) -> f64 {
    if hertz < BREAK_HERTZ {
        return hertz / HERTZ_PER_MEL;
    }
    BREAK_MEL + (hertz / BREAK_HERTZ).ln() * 27.0 / 6.4f64.ln()
}

fn hertz(mel: f64) -> f64 {
    if mel < BREAK_MEL {
        return mel * HERTZ_PER_MEL;
    }
    BREAK_HERTZ * ((mel - BREAK_MEL) * 6.4f64.ln() / 27.0).exp()
}
