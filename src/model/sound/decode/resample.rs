//! From any sample rate to 16 kHz, block by block, by `rubato`: it is maintained, has both methods that are needed
//! here, and takes 0.1 % of the sound's time. Owns the samples that wait for a whole chunk. The delay of the filter
//! is taken off, so that times stay as they are in the recording.

use rubato::audioadapter_buffers::direct::SequentialSliceOfVecs;
use rubato::{
    Async, Fft, FixedAsync, FixedSync, Indexing, ResampleError, ResamplerConstructionError,
    SincInterpolationParameters, WindowFunction,
};

use crate::model::sound::RATE;

/// Frames that are resampled together, counted at the lower of both rates. The filter is as long.
const CHUNK: usize = 512;
/// Up to this many input frames in a period of both rates, samples are resampled by Fourier transforms, which are the
/// fastest. All usual rates have 441 at most. Odd rates (47,999 Hz) would need transforms of a whole second, which take
/// long and much memory; they are interpolated between windowed sincs.
const LONGEST_PERIOD: usize = 4_096;
/// Length of the sinc filter for rates up to 16 kHz, in input frames. Higher rates need as many more as they have
/// frames, for the same steepness in Hz.
const SINC_FRAMES: usize = 128;

/// One or more streams of one rate, resampled together.
pub(super) struct Resample {
    /// None: the rate is right already.
    resampler: Option<Box<dyn rubato::Resampler<f32>>>,
    rate: u32,
    /// Frames that do not fill a chunk yet, for each stream.
    waiting: Vec<Vec<f32>>,
    /// Room for the resampled chunk, for each stream.
    chunk: Vec<Vec<f32>>,
    /// Frames of the filter's delay that are still to be left out.
    delay: usize,
    /// Frames that came in, and that went out.
    taken: u64,
    given: u64,
}

impl Resample {
    /// # Errors
    /// The rates cannot be resampled.
    pub(super) fn new(rate: u32, streams: usize) -> Result<Self, ResamplerConstructionError> {
        let resampler = if rate == RATE { None } else { Some(resampler(rate, streams)?) };
        let (chunk, delay) =
            resampler.as_ref().map_or((0, 0), |it| (it.output_frames_max(), it.output_delay()));
        Ok(Self {
            resampler,
            rate,
            waiting: vec![Vec::new(); streams],
            chunk: vec![vec![0.0; chunk]; streams],
            delay,
            taken: 0,
            given: 0,
        })
    }

    /// Adds frames, and appends to `out` what can be given already.
    ///
    /// # Errors
    /// The library fails.
    pub(super) fn push(&mut self, frames: &[Vec<f32>], out: &mut [Vec<f32>]) -> Result<(), ResampleError> {
        self.taken += frames[0].len() as u64;
        if self.resampler.is_none() {
            out.iter_mut().zip(frames).for_each(|(out, frames)| out.extend_from_slice(frames));
            return Ok(());
        }
        self.waiting.iter_mut().zip(frames).for_each(|(waiting, frames)| waiting.extend_from_slice(frames));
        self.resample(out, u64::MAX)
    }

    /// Appends the rest to `out`. No frames may follow.
    ///
    /// # Errors
    /// The library fails.
    pub(super) fn finish(&mut self, out: &mut [Vec<f32>]) -> Result<(), ResampleError> {
        let expected = (self.taken * u64::from(RATE)).div_ceil(u64::from(self.rate));
        while self.resampler.is_some() && self.given < expected {
            // Silence behind the end brings out what is within the filter.
            self.waiting.iter_mut().for_each(|waiting| waiting.resize(waiting.len() + CHUNK, 0.0));
            self.resample(out, expected)?;
        }
        Ok(())
    }

    /// Resamples whole chunks, until `most` frames were given.
    fn resample(&mut self, out: &mut [Vec<f32>], most: u64) -> Result<(), ResampleError> {
        let Some(resampler) = &mut self.resampler else { return Ok(()) };
        let streams = self.waiting.len();
        let mut used = 0;
        while self.waiting[0].len() - used >= resampler.input_frames_next() {
            let room = self.chunk[0].len();
            let input = SequentialSliceOfVecs::new(&self.waiting, streams, self.waiting[0].len());
            let output = SequentialSliceOfVecs::new_mut(&mut self.chunk, streams, room);
            // The sizes are those of the vectors.
            let (Ok(input), Ok(mut output)) = (input, output) else { break };
            let from = Indexing::new().input_offset(used);
            let (read, written) = resampler.process_into_buffer(&input, &mut output, Some(&from))?;
            used += read;
            let late = self.delay.min(written);
            self.delay -= late;
            let kept = usize::try_from(most - self.given).unwrap_or(usize::MAX).min(written - late);
            for (out, chunk) in out.iter_mut().zip(&self.chunk) {
                out.extend_from_slice(&chunk[late..late + kept]);
            }
            self.given += kept as u64;
        }
        self.waiting.iter_mut().for_each(|waiting| drop(waiting.drain(..used)));
        Ok(())
    }
}

fn resampler(
    rate: u32,
    streams: usize,
) -> Result<Box<dyn rubato::Resampler<f32>>, ResamplerConstructionError> {
    let (from, to) = (rate as usize, RATE as usize);
    let period = from / greatest_common_divisor(from, to);
    if period <= LONGEST_PERIOD {
        // The filter's delay is half of a chunk. Where that is half a sample, the library leaves it out.
        let chunk = period * (CHUNK * from.max(to)).div_ceil(to * period).next_multiple_of(2);
        return Ok(Box::new(Fft::new_custom(
            from,
            to,
            chunk,
            1,
            streams,
            WindowFunction::BlackmanHarris2,
            FixedSync::Both,
        )?));
    }
    let length = SINC_FRAMES * from.div_ceil(to);
    let sinc = SincInterpolationParameters::new(length, WindowFunction::BlackmanHarris2);
    let ratio = to as f64 / from as f64;
    Ok(Box::new(Async::new_sinc(ratio, 1.0, &sinc, CHUNK, streams, FixedAsync::Input)?))
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use std::f64::consts::TAU;

    use super::*;

    fn tone(rate: u32, hertz: f64, seconds: f64) -> Vec<f32> {
        let frames = (f64::from(rate) * seconds) as usize;
        (0..frames).map(|at| (0.5 * (TAU * hertz * at as f64 / f64::from(rate)).sin()) as f32).collect()
    }

    /// Resamples in blocks of several lengths.
    fn resampled(rate: u32, streams: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let mut resample = Resample::new(rate, streams.len()).unwrap();
        let mut out = vec![Vec::new(); streams.len()];
        let (mut at, mut length) = (0, 1);
        while at < streams[0].len() {
            let end = (at + length).min(streams[0].len());
            let block: Vec<Vec<f32>> = streams.iter().map(|stream| stream[at..end].to_vec()).collect();
            resample.push(&block, &mut out).unwrap();
            (at, length) = (end, length * 3 % 4_999 + 1);
        }
        resample.finish(&mut out).unwrap();
        out
    }

    /// The difference as a part of the sound, in dB, without the first and last 50 ms, where the filter meets silence.
    fn noise(found: &[f32], expected: &[f32]) -> f64 {
        let inner = 800..expected.len() - 800;
        let power = |samples: &mut dyn Iterator<Item = f64>| samples.map(|it| it * it).sum::<f64>();
        let pairs = found[inner.clone()].iter().zip(&expected[inner.clone()]);
        let noise = power(&mut pairs.map(|(a, b)| f64::from(a - b)));
        let sound = power(&mut expected[inner].iter().map(|it| f64::from(*it)));
        10.0 * (noise / sound).log10()
    }

    #[test]
    fn tones_of_every_rate_keep_their_length_place_and_form() {
        let rates = [8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 192_000];
        for rate in rates.into_iter().chain([1_000, 4_001, 15_999, 44_056, 47_999, 191_999]) {
            let highest = f64::from(rate.min(RATE)) * 0.4;
            for hertz in [100.0, highest / 2.0, highest] {
                let streams = [tone(rate, hertz, 1.003), tone(rate, hertz / 2.0, 1.003)];
                let found = resampled(rate, &streams);
                for (found, hertz) in found.iter().zip([hertz, hertz / 2.0]) {
                    let frames = (streams[0].len() as u64 * u64::from(RATE)).div_ceil(u64::from(rate));
                    assert_eq!(found.len() as u64, frames, "{rate} Hz");
                    let expected = tone(RATE, hertz, 1.01);
                    let noise = noise(found, &expected[..found.len()]);
                    assert!(noise < -60.0, "{rate} Hz, {hertz} Hz: {noise} dB");
                }
            }
        }
    }

    #[test]
    fn what_is_too_high_for_16_khz_is_silenced_and_not_mirrored() {
        for rate in [44_100, 48_000, 47_999, 192_000] {
            let loudest = |hertz: f64| {
                let found = resampled(rate, &[tone(rate, hertz, 1.0)]);
                found[0][800..15_200].iter().fold(0.0f32, |most, it| most.max(it.abs()))
            };
            assert!(loudest(9_000.0) < 5e-4, "{rate}: {}", loudest(9_000.0));
            assert!(loudest(15_000.0) < 5e-4, "{rate}: {}", loudest(15_000.0));
        }
    }
}
