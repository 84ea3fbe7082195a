//! A vocoder: computes the waveform from the pitch and the spectra of frames, as the Python package hibari-tts does. The
//! waveform has three parts: a pulse train with the pitch, filtered by the first two spectra; noise, shaped by the third;
//! and a remainder with a phase of its own. An inverse short-time Fourier transform adds overlapping windows. The noise
//! depends only on the seed, the frame's index and the frequency. Does no I/O; computes on the caller's thread.

use std::f32::consts::{PI, TAU};
use std::f64::consts::TAU as TAU_F64;
use std::sync::Arc;

use realfft::num_complex::Complex;
use realfft::{ComplexToReal, RealFftPlanner, RealToComplex};
use sconce_kernels::{bounded_exp, gaussian_radii, polar_to_complex, sines, tanh};

use crate::model::random::{Seed, splitmix64};

/// The length of a window, in hops.
const HOPS: usize = 4;
/// Below this pitch a frame is unvoiced, in Hz.
const MIN_PITCH: f32 = 40.0;
/// The highest harmonic of a pulse, in Hz.
const MAX_HARMONIC: f32 = 11_000.0;
/// Larger natural logarithms of a magnitude are clamped to this.
const MAX_LOG_MAGNITUDE: f32 = 7.0;
/// If |2·sin(t/2)| is at most this at the phase t, a pulse is computed as its limit for t → 0.
const MIN_DIVISOR: f32 = 2e-3;
/// Number of spectra of a frame. `Hibari::spectra` lists them. Each has [`Synthesizer::bins`] values.
pub const SPECTRA: usize = 5;

/// Computes waveforms. Shared by threads.
pub struct Synthesizer {
    forward: Arc<dyn RealToComplex<f32>>,
    inverse: Arc<dyn ComplexToReal<f32>>,
    /// A Hann window, `[HOPS·hop]`.
    window: Vec<f32>,
    /// Samples from one frame to the next.
    hop: usize,
    /// Samples per second.
    rate: f32,
}

/// Some frames of a sentence.
pub struct Frames<'a> {
    /// The index of the first frame in its sentence.
    pub first: usize,
    /// `[frames, SPECTRA, bins]`.
    pub spectra: &'a [f32],
    /// The key of the noise.
    pub seed: Seed,
}

impl Synthesizer {
    /// Prepares the transforms for frames that are `hop` samples apart.
    pub fn new(hop: usize, rate: u32) -> Self {
        let length = HOPS * hop;
        let mut planner = RealFftPlanner::new();
        let window =
            (0..length).map(|index| (0.5 - 0.5 * (TAU_F64 * index as f64 / length as f64).cos()) as f32);
        Self {
            forward: planner.plan_fft_forward(length),
            inverse: planner.plan_fft_inverse(length),
            window: window.collect(),
            hop,
            rate: rate as f32,
        }
    }

    /// Samples from one frame to the next.
    pub fn hop(&self) -> usize {
        self.hop
    }

    /// The number of frequencies of a spectrum.
    pub fn bins(&self) -> usize {
        self.window.len() / 2 + 1
    }

    /// A pulse train, `[frames·hop]`. `pitch` has a value in Hz for each frame. In a pulse all harmonics
    /// below [`MAX_HARMONIC`] have the same amplitude. Unvoiced samples are 0.
    pub fn pulses(&self, pitch: &[f32]) -> Vec<f32> {
        let mut phase = 0.0_f64;
        let count = pitch.len() * self.hop;
        // For each sample, with the phase t and the number n of harmonics: t/2, (n + ½)·t, and n + ½. In unvoiced samples
        // n + ½ is stored as 0.
        let (mut half_phases, mut numerators, mut harmonics) =
            (Vec::with_capacity(count), Vec::with_capacity(count), Vec::with_capacity(count));
        for frame in 0..pitch.len() {
            let pitch_of = |frame: usize| pitch[frame.min(pitch.len() - 1)];
            for sample in 0..self.hop {
                // The pitch is interpolated linearly between the centres of frames.
                let position = (sample as f32 + 0.5) / self.hop as f32 - 0.5;
                let (share, [from, to]) = if position < 0.0 {
                    (position + 1.0, [pitch_of(frame.saturating_sub(1)), pitch_of(frame)])
                } else {
                    (position, [pitch_of(frame), pitch_of(frame + 1)])
                };
                let hertz = from * (1.0 - share) + to * share;
                let is_voiced = hertz > MIN_PITCH;
                let hertz = hertz.max(MIN_PITCH);
                phase += f64::from(hertz) / f64::from(self.rate);
                if phase >= 1.0 {
                    phase = phase.fract();
                }
                let t = (phase * TAU_F64) as f32;
                let number = if is_voiced { (MAX_HARMONIC / hertz) as u32 as f32 + 0.5 } else { 0.0 };
                half_phases.push(0.5 * t);
                numerators.push(number * t);
                harmonics.push(number);
            }
        }
        sines(&mut half_phases);
        sines(&mut numerators);
        // Each numerator is replaced by its sample.
        for ((pulse, sine_of_half), harmonics) in numerators.iter_mut().zip(half_phases).zip(harmonics) {
            *pulse = pulse_of(2.0 * sine_of_half, *pulse, harmonics);
        }
        numerators
    }

    /// Adds these frames to `sound`, which begins [`HOPS`]/2 hops before the centre of the first of them, and has
    /// [`Synthesizer::buffer_len`] samples or more. `pulses` are those of the whole sentence.
    pub fn add(&self, Frames { first, spectra, seed }: Frames<'_>, pulses: &[f32], sound: &mut [f32]) {
        let (bins, length) = (self.bins(), self.window.len());
        let mut samples = self.forward.make_input_vec();
        let mut spectrum = self.forward.make_output_vec();
        let mut forward_scratch = self.forward.make_scratch_vec();
        let mut inverse_scratch = self.inverse.make_scratch_vec();
        let mut shaper = Shaper::new(bins);
        // The transforms are not normalized. The window's sum is 2·hop, so that the peak of a cosine of amplitude 1
        // becomes 1.
        let (scale_in, scale_out) = (1.0 / self.hop as f32, 1.0 / length as f32);
        for (index, spectra) in spectra.chunks_exact(SPECTRA * bins).enumerate() {
            let start = ((first + index) * self.hop) as isize - (length / 2) as isize;
            for (offset, (sample, window)) in samples.iter_mut().zip(&self.window).enumerate() {
                *sample = mirrored(pulses, start + offset as isize) * window * scale_in;
            }
            // A transform fails only if a length differs from the plan's.
            if self.forward.process_with_scratch(&mut samples, &mut spectrum, &mut forward_scratch).is_err() {
                return;
            }
            shaper.shape(&mut spectrum, spectra, seed.bits((first + index) as u64));
            // The real transform has no imaginary part at these frequencies.
            spectrum[0].im = 0.0;
            spectrum[bins - 1].im = 0.0;
            if self.inverse.process_with_scratch(&mut spectrum, &mut samples, &mut inverse_scratch).is_err() {
                return;
            }
            let target = &mut sound[index * self.hop..][..length];
            for ((sum, sample), window) in target.iter_mut().zip(&samples).zip(&self.window) {
                *sum += sample * window * scale_out;
            }
        }
    }

    /// Divides `sound`, to which the frames of a whole sentence were added, by the sum of the squared windows. Returns the
    /// `frames`·hop samples from the centre of the first frame on.
    pub fn finish(&self, sound: &[f32], frames: usize) -> Vec<f32> {
        // The gain of each sample of a hop. `distances` says how many hops earlier each window that covers it began.
        let gains = |distances: &[usize]| -> Vec<f32> {
            let gain = |offset: usize| {
                let squares =
                    distances.iter().map(|distance| self.window[distance * self.hop + offset].powi(2));
                1.0 / squares.sum::<f32>().max(1e-11)
            };
            (0..self.hop).map(gain).collect()
        };
        let all: Vec<usize> = (0..HOPS).collect();
        let usual_gains = gains(&all);
        let mut samples = Vec::with_capacity(frames * self.hop);
        for hop in HOPS / 2..HOPS / 2 + frames {
            let is_frame = |distance: &usize| hop.checked_sub(*distance).is_some_and(|frame| frame < frames);
            let distances: Vec<usize> = all.iter().copied().filter(is_frame).collect();
            let edge_gains = if distances == all { None } else { Some(gains(&distances)) };
            let gains = edge_gains.as_ref().unwrap_or(&usual_gains);
            let of_hop = &sound[hop * self.hop..][..self.hop];
            samples.extend(of_hop.iter().zip(gains).map(|(sample, gain)| sample * gain));
        }
        samples
    }

    /// The length of the buffer for [`Synthesizer::add`], for this number of frames.
    pub fn buffer_len(&self, frames: usize) -> usize {
        (frames + HOPS - 1) * self.hop
    }
}

/// A sample of the pulse train: Σ cos(k·t) for k from 1 to n, which is `sine` / `divisor` - ½ with `sine` = sin((n + ½)·t)
/// and `divisor` = 2·sin(t/2). 0 if `harmonics`, which is n + ½, is 0: the sample is unvoiced.
fn pulse_of(divisor: f32, sine: f32, harmonics: f32) -> f32 {
    if harmonics == 0.0 {
        return 0.0;
    }
    let sum = if divisor.abs() <= MIN_DIVISOR { harmonics } else { sine / divisor };
    sum - 0.5
}

/// The sample at `index`. The sound is mirrored at its ends, without repeating the sample there.
fn mirrored(sound: &[f32], index: isize) -> f32 {
    let last = sound.len() as isize - 1;
    let index = if index < 0 { -index } else { index };
    let index = if index > last { 2 * last - index } else { index };
    sound.get(index as usize).copied().unwrap_or(0.0)
}

/// Buffers in which the spectrum of a frame is shaped. Each row has one number for each frequency.
struct Shaper {
    /// The frame's spectra.
    rows: [Vec<f32>; SPECTRA],
    /// The real and the imaginary parts of the noise.
    noise: [Vec<f32>; 2],
}

impl Shaper {
    fn new(bins: usize) -> Self {
        Self { rows: std::array::from_fn(|_| vec![0.0; bins]), noise: [vec![0.0; bins], vec![0.0; bins]] }
    }

    /// Filters the spectrum of the pulses by a frame's spectra, and adds the noise and the remainder.
    fn shape(&mut self, spectrum: &mut [Complex<f32>], spectra: &[f32], bits: u64) {
        for (row, given) in self.rows.iter_mut().zip(spectra.chunks_exact(spectrum.len())) {
            row.copy_from_slice(given);
        }
        let [harmonic, phase, noise_magnitude, remainder, remainder_phase] = &mut self.rows;
        for magnitude in [&mut *harmonic, &mut *noise_magnitude, &mut *remainder] {
            bounded_exp(magnitude, MAX_LOG_MAGNITUDE);
        }
        tanh(phase);
        // The magnitudes become the real parts, the phases the imaginary parts.
        polar_to_complex(harmonic, phase, PI);
        polar_to_complex(remainder, remainder_phase, 1.0);
        normals(&mut self.noise, bits);
        let [real, imaginary] = &self.noise;
        for (bin, value) in spectrum.iter_mut().enumerate() {
            *value = *value * Complex::new(harmonic[bin], phase[bin])
                + Complex::new(real[bin], imaginary[bin]) * noise_magnitude[bin]
                + Complex::new(remainder[bin], remainder_phase[bin]);
        }
    }
}

/// Normally distributed real and imaginary parts, by the Box–Muller transform. `bits` determine them.
fn normals([real, imaginary]: &mut [Vec<f32>; 2], bits: u64) {
    const UNIT: f32 = 1.0 / (1 << 24) as f32;
    for (bin, (real, imaginary)) in real.iter_mut().zip(imaginary.iter_mut()).enumerate() {
        let bits = splitmix64(bits ^ bin as u64);
        *real = ((bits >> 40) + 1) as f32 * UNIT;
        *imaginary = (bits & 0xff_ffff) as f32 * UNIT;
    }
    gaussian_radii(real);
    polar_to_complex(real, imaginary, TAU);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pulse_train_has_the_pitch_and_unvoiced_frames_are_silent() {
        let synthesizer = Synthesizer::new(300, 24_000);
        let pulses = synthesizer.pulses(&[240.0; 8]);
        // 240 Hz is a pulse every 100 samples.
        let peaks: Vec<usize> = (0..pulses.len()).filter(|at| pulses[*at] > 40.0).collect();
        assert!(peaks.windows(2).all(|two| two[1] - two[0] == 100), "{peaks:?}");
        assert!(synthesizer.pulses(&[39.0; 4]).iter().all(|sample| *sample == 0.0));
        assert!(synthesizer.pulses(&[]).is_empty());
    }

    #[test]
    fn the_noise_is_normally_distributed() {
        let mut parts = [vec![0.0; 20_000], vec![0.0; 20_000]];
        normals(&mut parts, 7);
        let [real, imaginary] = &parts;
        let drawn: Vec<_> = real.iter().zip(imaginary).map(|(re, im)| Complex::new(*re, *im)).collect();
        let mean = drawn.iter().sum::<Complex<f32>>() / 20_000.0;
        let variance: f32 = drawn.iter().map(|z| (z - mean).norm_sqr()).sum::<f32>() / 20_000.0;
        assert!(mean.norm() < 0.03 && (variance - 2.0).abs() < 0.06, "{mean} {variance}");
    }

    #[test]
    fn the_result_does_not_depend_on_where_frames_are_divided() {
        let synthesizer = Synthesizer::new(30, 24_000);
        let (frames, width) = (10, SPECTRA * synthesizer.bins());
        let spectra: Vec<f32> = (0..frames * width).map(|at| ((at % 89) as f32 * 0.7).sin() - 2.0).collect();
        let pulses = synthesizer.pulses(&[180.0; 10]);
        let seed = Seed { task: 3, sequence: 1 };
        let made = |at: usize| {
            let mut sound = vec![0.0; synthesizer.buffer_len(frames)];
            for (first, count) in [(0, at), (at, frames - at)] {
                let spectra = &spectra[first * width..][..count * width];
                synthesizer.add(Frames { first, spectra, seed }, &pulses, &mut sound[first * 30..]);
            }
            synthesizer.finish(&sound, frames)
        };
        assert_eq!(made(0).len(), frames * 30);
        assert_eq!(made(0), made(4));
    }
}
