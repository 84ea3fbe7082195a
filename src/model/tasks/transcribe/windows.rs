//! Makes the windows of a recording on demand: decodes its sound block by block, drops what is no speech, cuts it into
//! pieces of at most 30 s, and computes their features. Decides where a recording is cut: near the end of a window,
//! where silence was dropped, or else at the quietest place, so that few words are divided. A silent or very
//! short window is left out, because Whisper invents a word for it. Holds about one window of sound for each stream.

use std::io::Cursor;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;

use super::network::WindowInput;
use super::segments::WindowPlace;
use super::speech::Speech;
use crate::model::random::Seed;
use crate::model::sound::RATE;
use crate::model::sound::decode::{Channels, Limits, Recording};
use crate::model::sound::features::{LogMel, WINDOW};
use crate::model::{Announced, SizedInput, TaskError};

/// Blocks of half a second that are decoded in one call of `next`, summed over the streams: about ten milliseconds of
/// work.
const BLOCKS_PER_CALL: usize = 4;
/// The last samples of a full window, among which it is cut: 8 s. Most speakers pause more often.
const CUT_RANGE: usize = 8 * RATE as usize;
/// Samples whose loudness is compared to find a cut: 200 ms, the length of a short pause.
const PAUSE: usize = RATE as usize / 5;
/// Samples from the beginning of one compared place to that of the next: 20 ms.
const STEP: usize = RATE as usize / 50;
/// Samples whose loudness decides whether a window is silent: 100 ms, about as long as a short syllable.
const SYLLABLE: usize = RATE as usize / 10;
/// A window is silent if the mean power of its loudest syllable is below this: -60 dB of full scale. Quiet speech is 20
/// dB louder.
const SILENCE: f32 = 1e-6;
/// Samples of the shortest window that can hold a word: 100 ms. A shorter one is left out.
const SHORTEST: usize = SYLLABLE;
/// How many seconds of dense speech a window holds on average: it is cut within its last 8 s.
const SPEECH_PER_WINDOW: f64 = 26.0;
/// The tokens of a window of dense speech, times included. The average of the windows before may be higher, if texts are
/// written several times.
pub(super) const TOKENS_PER_WINDOW: usize = 100;

/// What was decoded so far. Written by the thread that makes windows, and read when the reply is written.
#[derive(Debug, Default)]
pub struct Decoded {
    samples: AtomicU64,
    has_silent_mix: AtomicBool,
}

impl Decoded {
    /// The seconds of each stream, which is the mix of all channels, or one channel.
    pub fn seconds(&self) -> f64 {
        self.samples.load(Ordering::Relaxed) as f64 / f64::from(RATE)
    }

    /// Whether the recording has ended, and its channels cancelled each other in the mix.
    pub fn has_silent_mix(&self) -> bool {
        self.has_silent_mix.load(Ordering::Relaxed)
    }
}

/// The windows of a recording.
pub struct Windows {
    recording: Recording,
    log_mel: Arc<LogMel>,
    /// What all windows have in common.
    template: WindowInput,
    /// The sound of each stream that is in no window yet.
    speech: Vec<Speech>,
    /// Whether there is a stream for each channel.
    is_split: bool,
    decoded: Arc<Decoded>,
    /// The number of windows so far, silent ones included.
    count: u64,
    /// Whether nothing more is decoded: the recording has ended, or is broken.
    has_ended: bool,
}

impl Windows {
    /// Reads the header of a recording. All windows have `template` in common. `new_speech` is called once for each
    /// stream, and returns the [`Speech`] that collects its sound.
    ///
    /// # Errors
    /// The file is of no supported format, is broken, or declares more than the limits allow.
    pub fn open(
        file: Bytes,
        limits: Limits,
        channels: Channels,
        log_mel: Arc<LogMel>,
        new_speech: impl Fn() -> Speech,
        template: WindowInput,
    ) -> Result<Self, TaskError> {
        let recording = Recording::open(Cursor::new(file), limits, channels)?;
        let speech = std::iter::repeat_with(new_speech).take(recording.streams()).collect();
        Ok(Self {
            recording,
            log_mel,
            template,
            speech,
            is_split: channels == Channels::Split,
            decoded: Arc::default(),
            count: 0,
            has_ended: false,
        })
    }

    /// What was decoded. The returned value is updated as decoding continues.
    pub fn decoded(&self) -> Arc<Decoded> {
        self.decoded.clone()
    }

    /// Whether nothing in the file says where its sound ends.
    pub fn has_unmarked_end(&self) -> bool {
        self.recording.has_unmarked_end()
    }

    /// What the recording will need if all of it is speech, with this number of tokens for a window. None if the file does
    /// not declare its length.
    pub fn announced(&self, tokens_per_window: f32) -> Option<Announced> {
        let seconds = self.recording.declared_seconds()? * self.speech.len() as f64;
        let inputs = (seconds / SPEECH_PER_WINDOW).ceil() as usize;
        let (usual, chosen) =
            (TOKENS_PER_WINDOW.min(self.template.max_tokens), tokens_per_window.ceil() as usize);
        Some(Announced { inputs, answer_tokens: usual.max(chosen) })
    }

    /// Decodes a few blocks.
    fn decode(&mut self) -> Result<(), TaskError> {
        let blocks = BLOCKS_PER_CALL / self.speech.len().max(1);
        for _ in 0..blocks.max(1) {
            match self.recording.next_block()? {
                Some(block) => {
                    let samples = block.first().map_or(0, Vec::len) as u64;
                    self.decoded.samples.fetch_add(samples, Ordering::Relaxed);
                    self.speech.iter_mut().zip(&block).for_each(|(speech, samples)| speech.push(samples));
                }
                None => {
                    self.has_ended = true;
                    self.decoded.has_silent_mix.store(self.recording.has_silent_mix(), Ordering::Relaxed);
                    self.speech.iter_mut().for_each(Speech::end);
                    break;
                }
            }
        }
        Ok(())
    }

    /// A stream with enough sound for a window; of several, the one whose sound begins first in the recording.
    fn ready_stream(&self) -> Option<usize> {
        // A window is cut once more than a full one is kept. When the recording has ended, any remainder is a window.
        let too_few = if self.has_ended { 0 } else { WINDOW };
        let ready = self.speech.iter().enumerate().filter(|(_, speech)| speech.kept().len() > too_few);
        ready.min_by_key(|(_, speech)| speech.start()).map(|(stream, _)| stream)
    }

    /// Makes a window of the first samples of a stream; none if it is silent.
    fn next_window(&mut self, stream: usize) -> Option<SizedInput<WindowInput>> {
        let speech = &mut self.speech[stream];
        let kept = speech.kept();
        let length = if kept.len() <= WINDOW {
            kept.len()
        } else {
            let dropped_silence =
                speech.cuts().rfind(|cut| *cut <= WINDOW).filter(|cut| *cut > WINDOW - CUT_RANGE);
            dropped_silence.unwrap_or_else(|| quietest_cut(&kept[..WINDOW]))
        };
        let (sound, place) = speech.take(length);
        let place = WindowPlace { channel: self.is_split.then_some(stream), ..place };
        let seed = Seed { sequence: self.count, ..self.template.seed };
        self.count += 1;
        if sound.len() < SHORTEST || is_silent(&sound) {
            return None;
        }
        let features = self.log_mel.features(&sound).into();
        Some(WindowInput { features, place, seed, ..self.template.clone() }.sized())
    }
}

impl Iterator for Windows {
    type Item = Result<Vec<SizedInput<WindowInput>>, TaskError>;

    /// Does a bounded piece of work. Either makes a window, and returns it unless it is silent; or decodes a few
    /// blocks, and returns an empty list.
    fn next(&mut self) -> Option<Self::Item> {
        match self.ready_stream() {
            Some(stream) => Some(Ok(self.next_window(stream).into_iter().collect())),
            None if self.has_ended => None,
            None => Some(match self.decode() {
                Ok(()) => Ok(Vec::new()),
                Err(error) => {
                    // Nothing follows an error.
                    self.has_ended = true;
                    self.speech.clear();
                    Err(error)
                }
            }),
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let is_over = self.has_ended && self.ready_stream().is_none();
        (usize::from(!is_over), is_over.then_some(0))
    }
}

/// Whether no part of a window is loud enough to be speech.
fn is_silent(window: &[f32]) -> bool {
    let power = |part: &[f32]| part.iter().map(|x| x * x).sum::<f32>() / part.len() as f32;
    window.chunks(SYLLABLE).all(|part| power(part) < SILENCE)
}

/// The middle of the quietest place in the last seconds of a window; of places that are equally quiet, the last.
fn quietest_cut(window: &[f32]) -> usize {
    let earliest = window.len().saturating_sub(CUT_RANGE);
    let energy = |start: usize| -> f32 { window[start..start + PAUSE].iter().map(|x| x * x).sum() };
    let places = (earliest..=window.len() - PAUSE).step_by(STEP).map(|start| (energy(start), start));
    let quietest = places.reduce(|best, next| if next.0 <= best.0 { next } else { best });
    quietest.map_or(window.len(), |(_, start)| start + PAUSE / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_cut_in_the_middle_of_the_last_pause() {
        let mut sound = vec![0.5; WINDOW];
        assert_eq!(quietest_cut(&sound), WINDOW - PAUSE / 2, "without a pause, near the end");
        let pause = 25 * RATE as usize;
        sound[pause..pause + PAUSE].fill(0.01);
        sound[pause / 2..pause / 2 + PAUSE].fill(0.0);
        assert_eq!(quietest_cut(&sound), pause + PAUSE / 2, "an earlier pause would make the window short");
    }

    #[test]
    fn a_window_is_silent_if_no_syllable_is_loud() {
        let mut sound = vec![0.0009; 30 * SYLLABLE];
        assert!(is_silent(&sound) && is_silent(&[]));
        sound[7 * SYLLABLE..8 * SYLLABLE].fill(0.002);
        assert!(!is_silent(&sound));
    }
}
