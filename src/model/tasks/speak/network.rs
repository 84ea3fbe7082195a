//! Computes batches of sentences: first hibari's network for each voice of the batch, then the waveform of each
//! sentence on the threads of the worker. Decides how long a sentence may become, and how its sound ends. A sentence's
//! sound does not depend on the others in its batch.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use rayon::prelude::*;

use crate::model::nets::hibari::config::HibariConfig;
use crate::model::nets::hibari::{Decoded, Hibari, Symbols};
use crate::model::random::Seed;
use crate::model::sound::synthesis::{Frames, SPECTRA, Synthesizer};
use crate::model::{Forward, ForwardError, TaskError, TaskErrorKind};

/// Maximum duration of one sentence at speed 1, in seconds. The network needs 0.5 MB of memory for each second.
const MAX_SECONDS: f32 = 60.0;
/// The longest sound of a task, as a multiple of `max_seconds`: the estimate may be wrong by as much.
pub const DURATION_SLACK: f32 = 1.1;
/// Number of frames whose spectra are computed at once: 3.2 s of sound, 3 MB of spectra.
const FRAMES_AT_ONCE: usize = 256;
/// Frames that one thread synthesizes at once.
const FRAMES_PER_THREAD: usize = 64;
/// Duration of the fade-in and of the fade-out of a sentence, in seconds.
const FADE_SECONDS: f32 = 0.005;

/// One sentence to speak.
#[derive(Clone, Debug)]
pub struct Sentence {
    /// The index of its voice.
    pub voice: usize,
    /// The ids of its symbols; the first and the last are 0.
    pub ids: Vec<u32>,
    /// 1 is the voice's own pace.
    pub speed: f32,
    /// The key of its noise.
    pub seed: Seed,
    /// The limit of the sound of its task.
    pub limit: Arc<SoundLimit>,
}

/// The limit of the sound of a task. Shared by its sentences, so that the task ends with the sentence that exceeds it.
#[derive(Debug)]
pub struct SoundLimit {
    /// The longest sound, in seconds.
    pub seconds: f32,
    /// The field of the request that holds what is spoken.
    pub field: &'static str,
    /// The number of samples so far. Written once for each sentence that was spoken.
    pub samples: AtomicUsize,
}

impl SoundLimit {
    /// Adds the samples of a sentence.
    ///
    /// # Errors
    /// The sentences so far are longer than the limit.
    fn add(&self, samples: usize, sample_rate: u32) -> Result<(), TaskError> {
        let samples = self.samples.fetch_add(samples, Relaxed) + samples;
        let (seconds, max) = (samples as f32 / sample_rate as f32, self.seconds);
        if seconds <= max {
            return Ok(());
        }
        let message = format!(
            "the task's sound lasts {seconds:.0} s or more, and at most {max:.0} s are allowed ({DURATION_SLACK} × \
             max_seconds)"
        );
        Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param(self.field))
    }
}

/// The sound of a sentence.
#[derive(Clone, Debug)]
pub struct Sound {
    /// The samples of one channel.
    pub samples: Vec<i16>,
}

/// The voices of a model.
pub struct Speaker {
    voices: Vec<Hibari>,
    synthesizer: Synthesizer,
    sample_rate: u32,
}

type Sounds = Vec<Result<Sound, TaskError>>;

impl Speaker {
    /// A network with these voices, in the order of `config.voices`.
    pub fn new(voices: Vec<Hibari>, config: &HibariConfig) -> Self {
        let synthesizer = Synthesizer::new(config.hop, config.sample_rate);
        Self { voices, synthesizer, sample_rate: config.sample_rate }
    }

    /// The sound of sentences of one voice.
    fn speak(&self, voice: &Hibari, sentences: &[&Sentence]) -> candle_core::Result<Sounds> {
        let symbols: Vec<Symbols<'_>> =
            sentences.iter().map(|sentence| Symbols { ids: &sentence.ids, speed: sentence.speed }).collect();
        let encoded = voice.encode(&symbols)?;
        let checks: Vec<Result<(), TaskError>> = encoded
            .frames()
            .zip(sentences)
            .map(|(frames, sentence)| self.check_length(frames, sentence.speed))
            .collect();
        let wanted: Vec<bool> = checks.iter().map(Result::is_ok).collect();
        let mut decoded = voice.decode(&encoded, &wanted)?.into_iter();
        let mut sounds = Vec::with_capacity(sentences.len());
        for (check, sentence) in checks.into_iter().zip(sentences) {
            sounds.push(match check {
                Err(error) => Err(error),
                Ok(()) => match decoded.next() {
                    Some(frames) => self.synthesize(voice, &frames, sentence.seed)?,
                    None => Err(TaskError::internal("a sentence was not decoded")),
                },
            });
        }
        Ok(sounds)
    }

    fn check_length(&self, frames: usize, speed: f32) -> Result<(), TaskError> {
        let seconds = frames as f32 * self.synthesizer.hop() as f32 / self.sample_rate as f32;
        let max = MAX_SECONDS / speed;
        if seconds <= max {
            return Ok(());
        }
        let message = format!("a sentence would take {seconds:.0} s to speak, and {max:.0} s are allowed");
        Err(TaskError::new(TaskErrorKind::TooLarge, message))
    }

    /// The sound of a sentence. The outer error fails the batch, the inner one only this sentence.
    fn synthesize(
        &self,
        voice: &Hibari,
        frames: &Decoded,
        seed: Seed,
    ) -> candle_core::Result<Result<Sound, TaskError>> {
        let (synthesizer, count) = (&self.synthesizer, frames.pitch.len());
        let width = SPECTRA * synthesizer.bins();
        let pulses = synthesizer.pulses(&frames.pitch);
        let mut sound = vec![0.0; synthesizer.buffer_len(count)];
        for start in (0..count).step_by(FRAMES_AT_ONCE) {
            let spectra = voice.spectra(frames, start, FRAMES_AT_ONCE.min(count - start))?;
            let parts = spectra.par_chunks(FRAMES_PER_THREAD * width).enumerate().map(|(index, spectra)| {
                let first = start + index * FRAMES_PER_THREAD;
                let mut part = vec![0.0; synthesizer.buffer_len(spectra.len() / width)];
                synthesizer.add(Frames { first, spectra, seed }, &pulses, &mut part);
                (first, part)
            });
            // Neighbouring parts overlap, and are added in their order.
            for (first, part) in parts.collect::<Vec<_>>() {
                let target = &mut sound[first * synthesizer.hop()..][..part.len()];
                target.iter_mut().zip(&part).for_each(|(sum, sample)| *sum += sample);
            }
        }
        let mut samples = synthesizer.finish(&sound, count);
        if samples.iter().any(|sample| !sample.is_finite()) {
            return Ok(Err(TaskError::internal("the network computed a sound that is not finite")));
        }
        fade(&mut samples, (FADE_SECONDS * self.sample_rate as f32) as usize);
        let samples =
            samples.iter().map(|sample| (sample.clamp(-1.0, 1.0) * 32_767.0).round() as i16).collect();
        Ok(Ok(Sound { samples }))
    }
}

/// Fades the sound in and out: the gain of the first `count` samples rises from 0, that of the last ones falls to 0.
fn fade(samples: &mut [f32], count: usize) {
    let count = count.min(samples.len() / 2);
    let gains = (0..count).map(|index| index as f32 / count as f32);
    samples.iter_mut().zip(gains.clone()).for_each(|(sample, gain)| *sample *= gain);
    samples.iter_mut().rev().zip(gains).for_each(|(sample, gain)| *sample *= gain);
}

impl Forward for Speaker {
    type Input = Sentence;
    type Output = Sound;
    type Pending = Sounds;

    fn submit(&mut self, batch: &[&Sentence]) -> Result<Sounds, ForwardError> {
        let mut sounds: Vec<Option<Result<Sound, TaskError>>> = vec![None; batch.len()];
        for (voice_index, voice) in self.voices.iter().enumerate() {
            let indices: Vec<usize> =
                (0..batch.len()).filter(|index| batch[*index].voice == voice_index).collect();
            if indices.is_empty() {
                continue;
            }
            let sentences: Vec<&Sentence> = indices.iter().map(|index| batch[*index]).collect();
            let spoken = self.speak(voice, &sentences)?;
            indices.into_iter().zip(spoken).for_each(|(index, sound)| sounds[index] = Some(sound));
        }
        // From here on only single sentences fail. If the batch failed, it would be repeated, and they would be counted
        // twice.
        let checked = |(sound, sentence): (Option<Result<Sound, TaskError>>, &&Sentence)| {
            let sound =
                sound.unwrap_or_else(|| Err(TaskError::internal("a sentence has an unknown voice")))?;
            sentence.limit.add(sound.samples.len(), self.sample_rate)?;
            Ok(sound)
        };
        Ok(sounds.into_iter().zip(batch).map(checked).collect())
    }

    fn wait(&mut self, pending: Sounds) -> Result<Sounds, ForwardError> {
        Ok(pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sound_begins_and_ends_with_silence() {
        let mut samples = vec![1.0; 100];
        fade(&mut samples, 10);
        assert_eq!((samples[0], samples[5], samples[10], samples[99]), (0.0, 0.5, 1.0, 0.0));
        assert!(samples[10..90].iter().all(|sample| *sample == 1.0));
        fade(&mut [1.0; 3], 10);
    }
}
