//! Keeps the speech of a recording, and drops the silence. Decides by the probabilities of a voice detector where
//! speech begins and ends. Joins the parts that are kept, and records the place of each in the recording.

use std::collections::VecDeque;
use std::sync::Arc;

use super::request::VoiceDetection;
use super::segments::{Part, WindowPlace};
use crate::model::sound::RATE;
use crate::model::sound::voice::{CHUNK, Listener};

/// Silence begins only when the probability of speech is this far below the threshold. A doubtful sound within speech
/// is therefore no silence.
const HYSTERESIS: f32 = 0.15;

/// The sound of a recording that is to be transcribed.
pub struct Speech {
    /// None: all sound is kept.
    detection: Option<Detection>,
    /// The samples that are kept and in no window yet.
    kept: Vec<f32>,
    /// The parts of `kept`, in their order.
    parts: Vec<KeptPart>,
    /// The index in the recording of the next sample that is kept or dropped.
    position: u64,
}

/// The beginning of a part. A part has no gap in the recording.
struct KeptPart {
    /// The index in `Speech::kept` of its first sample.
    in_kept: usize,
    /// The index of the same sample in the recording.
    in_recording: u64,
}

struct Detection {
    listener: Listener,
    threshold: f32,
    /// Samples of silence that end a part.
    min_silence: usize,
    /// Samples that are kept before and after speech.
    pad: usize,
    /// Samples that are no whole chunk yet.
    incomplete: Vec<f32>,
    /// The last samples, while there is no speech. When speech begins, the last `pad` of them are kept before it.
    dropped: VecDeque<f32>,
    is_speech: bool,
    /// The length in samples of the current silence within speech; 0 if there is none. Silence begins below the
    /// threshold less [`HYSTERESIS`].
    silence: usize,
}

impl Speech {
    /// Keeps all sound.
    pub fn all() -> Self {
        Self { detection: None, kept: Vec::new(), parts: Vec::new(), position: 0 }
    }

    /// Keeps what the listener takes for speech.
    pub fn detected(listener: Listener, settings: &VoiceDetection) -> Self {
        let samples = |ms: u32| (u64::from(ms) * u64::from(RATE) / 1_000) as usize;
        let detection = Detection {
            listener,
            threshold: settings.threshold,
            min_silence: samples(settings.min_silence_ms),
            pad: samples(settings.speech_pad_ms),
            incomplete: Vec::new(),
            dropped: VecDeque::new(),
            is_speech: false,
            silence: 0,
        };
        Self { detection: Some(detection), ..Self::all() }
    }

    /// The samples that are kept and were not taken yet.
    pub fn kept(&self) -> &[f32] {
        &self.kept
    }

    /// The index in the recording of the first sample that is kept.
    pub fn start(&self) -> u64 {
        self.parts.first().map_or(self.position, |part| part.in_recording)
    }

    /// The indexes in [`Speech::kept`] before which silence was dropped: the beginnings of all parts but the first.
    pub fn cuts(&self) -> impl DoubleEndedIterator<Item = usize> {
        self.parts.iter().map(|part| part.in_kept).filter(|index| *index > 0)
    }

    /// Takes the next samples of the recording.
    pub fn push(&mut self, samples: &[f32]) {
        let Some(detection) = &mut self.detection else { return self.keep(samples) };
        detection.incomplete.extend_from_slice(samples);
        let whole = detection.incomplete.len() / CHUNK * CHUNK;
        let chunks: Vec<f32> = detection.incomplete.drain(..whole).collect();
        self.detect(&chunks);
    }

    /// Ends the recording: decides on the samples that are left, and ends the last part.
    pub fn end(&mut self) {
        let incomplete = self.detection.as_mut().map(|it| std::mem::take(&mut it.incomplete));
        self.detect(&incomplete.unwrap_or_default());
        if self.detection.as_ref().is_some_and(|it| it.is_speech) {
            self.end_part();
        }
    }

    /// Keeps or drops chunks, the last of which may be incomplete, by their probabilities of speech.
    fn detect(&mut self, chunks: &[f32]) {
        let Some(detection) = &mut self.detection else { return };
        let probabilities = detection.listener.probabilities(chunks);
        for (chunk, probability) in chunks.chunks(CHUNK).zip(probabilities) {
            self.add_chunk(chunk, probability);
        }
    }

    /// Keeps a chunk of speech, or of a pause within speech. Drops any other, but remembers it in case speech follows.
    fn add_chunk(&mut self, chunk: &[f32], probability: f32) {
        let Some(detection) = &mut self.detection else { return };
        let has_speech = probability >= detection.threshold;
        if !detection.is_speech && !has_speech {
            detection.dropped.extend(chunk);
            detection.dropped.drain(..detection.dropped.len().saturating_sub(detection.pad));
            self.position += chunk.len() as u64;
            return;
        }
        if !detection.is_speech {
            detection.is_speech = true;
            let lead_in = Vec::from(std::mem::take(&mut detection.dropped));
            // These samples were counted as dropped, and are kept after all.
            self.position -= lead_in.len() as u64;
            self.keep(&lead_in);
        }
        self.keep(chunk);
        let Some(detection) = &mut self.detection else { return };
        // Silence begins well below the threshold, and ends only at it.
        let begins_silence = probability < detection.threshold - HYSTERESIS;
        let continues_silence = detection.silence > 0 && !has_speech;
        let is_silent = begins_silence || continues_silence;
        detection.silence = if is_silent { detection.silence + chunk.len() } else { 0 };
        // `min_silence` may be 0. It must not end a part within speech then, hence `is_silent`.
        if is_silent && detection.silence >= detection.min_silence {
            self.end_part();
        }
    }

    /// Keeps the next samples of the recording. Begins a new part if samples before them were dropped.
    fn keep(&mut self, samples: &[f32]) {
        if samples.is_empty() {
            return;
        }
        let in_kept = self.kept.len();
        let follows = |part: &KeptPart| part.in_recording + (in_kept - part.in_kept) as u64 == self.position;
        if !self.parts.last().is_some_and(follows) {
            self.parts.push(KeptPart { in_kept, in_recording: self.position });
        }
        self.kept.extend_from_slice(samples);
        self.position += samples.len() as u64;
    }

    /// Ends a part: drops the silence after its speech, except for the pad.
    fn end_part(&mut self) {
        let Some(detection) = &mut self.detection else { return };
        // `kept` may be shorter than the silence: a window may have taken some of the silence already.
        let excess = detection.silence.saturating_sub(detection.pad).min(self.kept.len());
        let dropped = self.kept.split_off(self.kept.len() - excess);
        detection.dropped.extend(&dropped[dropped.len().saturating_sub(detection.pad)..]);
        (detection.is_speech, detection.silence) = (false, 0);
        let end = self.kept.len();
        self.parts.retain(|part| part.in_kept < end);
    }

    /// Takes the first samples for a window. Returns them and their place in the recording.
    pub fn take(&mut self, samples: usize) -> (Vec<f32>, WindowPlace) {
        let seconds = |samples: u64| samples as f64 / f64::from(RATE);
        let within = self.parts.iter().take_while(|part| part.in_kept < samples);
        let to_part = |part: &KeptPart| Part {
            in_window: seconds(part.in_kept as u64),
            in_recording: seconds(part.in_recording),
        };
        let parts: Arc<[Part]> = within.map(to_part).collect();
        // Parts that end before the cut are dropped. The part that contains the cut begins at the cut from now on.
        let first = self.parts.iter().rposition(|part| part.in_kept <= samples).unwrap_or(0);
        self.parts.drain(..first);
        for KeptPart { in_kept, in_recording } in &mut self.parts {
            *in_recording += samples.saturating_sub(*in_kept) as u64;
            *in_kept = in_kept.saturating_sub(samples);
        }
        let rest = self.kept.split_off(samples);
        let taken = std::mem::replace(&mut self.kept, rest);
        let place = WindowPlace { parts, seconds: seconds(taken.len() as u64), channel: None };
        if self.kept.is_empty() {
            self.parts.clear();
        }
        (taken, place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::sound::voice::VoiceDetector;

    /// Each sample is the number of its chunk.
    fn speech_of(probabilities: &[f32], min_silence_ms: u32, speech_pad_ms: u32) -> Speech {
        let listener = Listener::new(Arc::new(VoiceDetector::load().unwrap()));
        let settings = VoiceDetection { threshold: 0.5, min_silence_ms, speech_pad_ms };
        let mut speech = Speech::detected(listener, &settings);
        for (number, probability) in probabilities.iter().enumerate() {
            speech.add_chunk(&[number as f32; CHUNK], *probability);
        }
        speech.end();
        speech
    }

    /// The chunks at which parts begin: in the window, and in the recording.
    type Parts = Vec<(usize, usize)>;

    /// The numbers of the chunks that are kept, in windows of up to `max_chunks`, with the chunks that begin parts.
    fn windows(speech: &mut Speech, max_chunks: usize) -> Vec<(Vec<usize>, Parts)> {
        let chunk = |seconds: f64| (seconds * f64::from(RATE) / CHUNK as f64).round() as usize;
        let mut windows = Vec::new();
        while !speech.kept().is_empty() {
            let (sound, place) = speech.take(speech.kept().len().min(max_chunks * CHUNK));
            let numbers = sound.chunks(CHUNK).map(|chunk| chunk[0] as usize).collect();
            windows.push((
                numbers,
                place.parts.iter().map(|part| (chunk(part.in_window), chunk(part.in_recording))).collect(),
            ));
        }
        windows
    }

    const TWO_CHUNKS_MS: u32 = 64;

    #[test]
    fn silence_is_dropped_and_a_pad_is_kept_around_speech() {
        let mut quiet = speech_of(&[0.0, 0.4, 0.1], TWO_CHUNKS_MS, 32);
        assert!(windows(&mut quiet, 9).is_empty());
        //                             0    1    2    3    4    5    6    7    8    9
        let probabilities: [f32; 10] = [0.0, 0.0, 0.9, 0.4, 0.0, 0.0, 0.0, 0.0, 0.9, 0.0];
        let mut speech = speech_of(&probabilities, 2 * TWO_CHUNKS_MS, 32);
        assert_eq!(windows(&mut speech, 9), [(vec![1, 2, 3, 4, 7, 8, 9], vec![(0, 1), (4, 7)])]);
        let mut speech = speech_of(&probabilities, 2 * TWO_CHUNKS_MS, 32);
        assert_eq!(speech.cuts().collect::<Vec<_>>(), [4 * CHUNK]);
        let all =
            [(vec![1, 2, 3], vec![(0, 1)]), (vec![4, 7, 8], vec![(0, 4), (1, 7)]), (vec![9], vec![(0, 9)])];
        assert_eq!(windows(&mut speech, 3), all, "a window may have several parts");
    }

    #[test]
    fn a_short_pause_and_a_doubtful_sound_are_kept() {
        let mut speech = speech_of(&[0.9, 0.4, 0.0, 0.4, 0.9, 0.4, 0.4, 0.4], 4 * TWO_CHUNKS_MS, 0);
        assert_eq!(windows(&mut speech, 9), [((0..8).collect(), vec![(0, 0)])]);
        let mut speech = speech_of(&[0.9, 0.0, 0.4, 0.9, 0.0, 0.4, 0.0], TWO_CHUNKS_MS, 0);
        assert_eq!(
            windows(&mut speech, 9),
            [(vec![0, 3], vec![(0, 0), (1, 3)])],
            "a doubtful sound does not end silence"
        );
    }

    #[test]
    fn silence_that_begins_in_a_taken_window_is_dropped_after_that_window() {
        let mut speech = speech_of(&[], 4 * TWO_CHUNKS_MS, 0);
        for (number, probability) in [0.9, 0.0, 0.0, 0.0].into_iter().enumerate() {
            speech.add_chunk(&[number as f32; CHUNK], probability);
        }
        assert_eq!(speech.take(3 * CHUNK).0.len(), 3 * CHUNK);
        (4..9).for_each(|at| speech.add_chunk(&[at as f32; CHUNK], 0.0));
        speech.add_chunk(&[9.0; CHUNK], 0.9);
        speech.end();
        assert_eq!(windows(&mut speech, 9), [(vec![9], vec![(0, 9)])]);
    }

    #[test]
    fn without_detection_everything_is_kept() {
        let mut all = Speech::all();
        (0..5).for_each(|at| all.push(&[at as f32; CHUNK]));
        all.end();
        let expected = [(vec![0, 1, 2], vec![(0, 0)]), (vec![3, 4], vec![(0, 3)])];
        assert_eq!(windows(&mut all, 3), expected);
    }
}
