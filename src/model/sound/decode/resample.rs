//! Resamples any rate to 16 kHz, block by block, by the Fourier transforms of `rubato`. That library is maintained, has
//! a steep filter, and takes a small part of the time of decoding. Owns the samples that wait for a whole chunk.
//! Removes the filter's delay, so that times stay as they are in the recording.

use std::ops::Range;

use rubato::audioadapter_buffers::direct::SequentialSliceOfVecs;
use rubato::{
    Fft, FixedSync, Indexing, ResampleError, Resampler, ResamplerConstructionError, WindowFunction,
};

use crate::model::sound::RATE;

/// Frames that are resampled together, counted at the lower of both rates. The filter has the same length.
const CHUNK: usize = 512;
/// The maximum number of frames in a common period of both rates, since transforms are at least two periods long. All
/// usual rates have 441 or fewer. If the period of a rate is longer (47,999 Hz), the nearest ratio within this limit is
/// taken. The error is 61 in a million at most, and the clocks of sound cards are no better.
const MAX_PERIOD: usize = 8_192;

/// One or more streams of one rate, resampled together.
pub(super) struct Resample {
    /// None if the rate is 16 kHz already.
    resampler: Option<Fft<f32>>,
    rate: u32,
    /// Frames that do not fill a chunk yet, for each stream.
    waiting: Vec<Vec<f32>>,
    /// A buffer for the resampled chunk, for each stream.
    output_chunk: Vec<Vec<f32>>,
    /// Frames of the filter's delay that must still be dropped.
    delay: usize,
    /// The number of frames that were pushed.
    input_frames: u64,
    /// The number of resampled frames that were returned.
    output_frames: u64,
}

impl Resample {
    /// Prepares to resample `streams` streams of `rate` Hz, in blocks of any length.
    ///
    /// # Errors
    /// The rates cannot be resampled.
    pub(super) fn new(rate: u32, streams: usize) -> Result<Self, ResamplerConstructionError> {
        let resampler = if rate == RATE { None } else { Some(resampler(rate, streams)?) };
        let (chunk_frames, delay) = match &resampler {
            Some(resampler) => (resampler.output_frames_max(), resampler.output_delay()),
            None => (0, 0),
        };
        Ok(Self {
            resampler,
            rate,
            waiting: vec![Vec::new(); streams],
            output_chunk: vec![vec![0.0; chunk_frames]; streams],
            delay,
            input_frames: 0,
            output_frames: 0,
        })
    }

    /// Adds the `piece` of each stream, and appends to `out` the frames that are resampled by now.
    ///
    /// # Errors
    /// The library fails.
    pub(super) fn push(
        &mut self,
        streams: &[Vec<f32>],
        piece: Range<usize>,
        out: &mut [Vec<f32>],
    ) -> Result<(), ResampleError> {
        self.input_frames += piece.len() as u64;
        let to = if self.resampler.is_none() { &mut *out } else { &mut self.waiting[..] };
        to.iter_mut().zip(streams).for_each(|(to, stream)| to.extend_from_slice(&stream[piece.clone()]));
        if self.resampler.is_none() {
            return Ok(());
        }
        self.resample(out, u64::MAX)
    }

    /// Appends the remaining frames to `out`. Must be called last.
    ///
    /// # Errors
    /// The library fails.
    pub(super) fn finish(&mut self, out: &mut [Vec<f32>]) -> Result<(), ResampleError> {
        let expected = (self.input_frames * u64::from(RATE)).div_ceil(u64::from(self.rate));
        while self.resampler.is_some() && self.output_frames < expected {
            // Silence after the end flushes the filter.
            self.waiting.iter_mut().for_each(|waiting| waiting.resize(waiting.len() + CHUNK, 0.0));
            self.resample(out, expected)?;
        }
        Ok(())
    }

    /// Resamples the whole chunks that wait. Appends to `out` only up to `max_output_frames` since the beginning.
    fn resample(&mut self, out: &mut [Vec<f32>], max_output_frames: u64) -> Result<(), ResampleError> {
        let Some(resampler) = &mut self.resampler else { return Ok(()) };
        let streams = self.waiting.len();
        let mut used = 0;
        while self.waiting[0].len() - used >= resampler.input_frames_next() {
            let capacity = self.output_chunk[0].len();
            let input = SequentialSliceOfVecs::new(&self.waiting, streams, self.waiting[0].len());
            let output = SequentialSliceOfVecs::new_mut(&mut self.output_chunk, streams, capacity);
            // These cannot fail, since the sizes are those of the vectors.
            let (Ok(input), Ok(mut output)) = (input, output) else { break };
            let from = Indexing::new().input_offset(used);
            let (read, written) = resampler.process_into_buffer(&input, &mut output, Some(&from))?;
            used += read;
            let delayed = self.delay.min(written);
            self.delay -= delayed;
            let room = usize::try_from(max_output_frames - self.output_frames).unwrap_or(usize::MAX);
            let kept = room.min(written - delayed);
            for (out, chunk) in out.iter_mut().zip(&self.output_chunk) {
                out.extend_from_slice(&chunk[delayed..delayed + kept]);
            }
            self.output_frames += kept as u64;
        }
        self.waiting.iter_mut().for_each(|waiting| drop(waiting.drain(..used)));
        Ok(())
    }
}

fn resampler(rate: u32, streams: usize) -> Result<Fft<f32>, ResamplerConstructionError> {
    let (from, to) = ratio(rate);
    // The filter's delay is half of a chunk, which the library rounds down to whole samples. With an even number of
    // periods there is nothing to round.
    let periods = (CHUNK * from.max(to)).div_ceil(to * from).next_multiple_of(2);
    let window = WindowFunction::BlackmanHarris2;
    Fft::new_custom(from, to, periods * from, 1, streams, window, FixedSync::Both)
}

/// The ratio of `rate` to 16 kHz in the smallest numbers, or the nearest ratio of numbers up to [`MAX_PERIOD`].
fn ratio(rate: u32) -> (usize, usize) {
    let exact = f64::from(rate) / f64::from(RATE);
    let mut best = (f64::INFINITY, (1, 1));
    for to in 1..=MAX_PERIOD {
        let from = (exact * to as f64).round() as usize;
        let error = (from as f64 / to as f64 - exact).abs();
        if error < best.0 && (1..=MAX_PERIOD).contains(&from) {
            best = (error, (from, to));
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use std::f64::consts::TAU;

    use super::*;

    fn tone(rate: u32, hertz: f64, seconds: f64) -> Vec<f32> {
        let frames = (f64::from(rate) * seconds) as usize;
        (0..frames).map(|index| (0.5 * (TAU * hertz * index as f64 / f64::from(rate)).sin()) as f32).collect()
    }

    /// Resamples in blocks of several lengths.
    fn resampled(rate: u32, streams: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let mut resample = Resample::new(rate, streams.len()).unwrap();
        let mut out = vec![Vec::new(); streams.len()];
        let (mut at, mut length) = (0, 1);
        while at < streams[0].len() {
            let end = (at + length).min(streams[0].len());
            resample.push(streams, at..end, &mut out).unwrap();
            (at, length) = (end, length * 3 % 4_999 + 1);
        }
        resample.finish(&mut out).unwrap();
        out
    }

    /// The difference relative to the sound, in dB, without the first and last 50 ms, where the filter meets silence.
    fn noise(found: &[f32], expected: &[f32]) -> f64 {
        let inner = 800..expected.len() - 800;
        let power = |samples: &mut dyn Iterator<Item = f64>| samples.map(|it| it * it).sum::<f64>();
        let pairs = found[inner.clone()].iter().zip(&expected[inner.clone()]);
        let noise = power(&mut pairs.map(|(a, b)| f64::from(a - b)));
        let sound = power(&mut expected[inner].iter().map(|it| f64::from(*it)));
        10.0 * (noise / sound).log10()
    }

    #[test]
    fn tones_of_every_rate_keep_their_length_phase_and_shape() {
        let rates = [8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 192_000];
        // The ratios of unusual rates may be rounded. A low tone tolerates that.
        let tones = [1_000, 4_001, 15_999, 44_056, 47_999, 191_999].map(|rate| (rate, 100.0, -20.0));
        let highest = |rate: u32| f64::from(rate.min(RATE)) * 0.4;
        let exact = rates
            .into_iter()
            .flat_map(|rate| [100.0, highest(rate) / 2.0, highest(rate)].map(|hertz| (rate, hertz, -60.0)));
        for (rate, hertz, max_noise) in exact.chain(tones) {
            let streams = [tone(rate, hertz, 1.003), tone(rate, hertz / 2.0, 1.003)];
            let found = resampled(rate, &streams);
            for (found, hertz) in found.iter().zip([hertz, hertz / 2.0]) {
                let frames = (streams[0].len() as u64 * u64::from(RATE)).div_ceil(u64::from(rate));
                assert_eq!(found.len() as u64, frames, "{rate} Hz");
                let expected = tone(RATE, hertz, 1.01);
                let noise = noise(found, &expected[..found.len()]);
                assert!(noise < max_noise, "{rate} Hz, {hertz} Hz: {noise} dB");
            }
        }
    }

    #[test]
    fn ratios_are_exact_or_within_61_millionths() {
        assert_eq!(ratio(8_000), (1, 2));
        assert_eq!(ratio(44_100), (441, 160));
        assert_eq!(ratio(192_000), (12, 1));
        for rate in (1_000..=192_000).step_by(331) {
            let (from, to) = ratio(rate);
            let error = from as f64 / to as f64 / (f64::from(rate) / f64::from(RATE)) - 1.0;
            assert!(error.abs() < 61e-6, "{rate} Hz: {error}");
        }
    }

    #[test]
    fn frequencies_above_8_khz_are_filtered_and_not_aliased() {
        for rate in [44_100, 48_000, 47_999, 192_000] {
            let loudest = |hertz: f64| {
                let found = resampled(rate, &[tone(rate, hertz, 1.0)]);
                found[0][800..15_200].iter().fold(0.0f32, |loudest, it| loudest.max(it.abs()))
            };
            assert!(loudest(9_000.0) < 5e-4, "{rate}: {}", loudest(9_000.0));
            assert!(loudest(15_000.0) < 5e-4, "{rate}: {}", loudest(15_000.0));
        }
    }
}
