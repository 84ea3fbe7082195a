//! Keeps the speech of a recording, and drops the silence. Decides by the probabilities of a voice detector where speech
//! begins and ends. Joins the parts that are kept, and records where in the recording each of them was.

use std::sync::Arc;

use super::segments::{Part, Window};
use crate::model::sound::RATE;
use crate::model::sound::voice::{CHUNK, Listener};
use crate::protocol::transcriptions::VoiceDetection;

/// Silence begins only when the probability of speech is this far below the threshold, so that a doubtful sound does not
/// begin it.
const HYSTERESIS: f32 = 0.15;

/// The sound of a recording that is to be transcribed.
pub struct Speech {
    /// None: all sound is kept.
    detection: Option<Detection>,
    kept: Vec<f32>,
    /// The parts of `kept`, in their order.
    parts: Vec<KeptPart>,
    /// The number in the recording of the next sample that is kept or dropped.
    position: u64,
}

/// The beginning of a part, which has no gap in the recording.
struct KeptPart {
    /// Its first sample in what is kept.
    in_kept: usize,
    /// The same sample's number in the recording.
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
    rest: Vec<f32>,
    /// While there is no speech: the last samples. When speech begins, the last `pad` of them are kept before it.
    before: Vec<f32>,
    is_speech: bool,
    /// Samples since silence began within speech; 0 if there is none. Silence begins below the threshold less
    /// [`HYSTERESIS`].
    silent: usize,
}

impl Speech {
    /// Keeps all sound.
    pub fn all() -> Self {
        Self { detection: None, kept: Vec::new(), parts: Vec::new(), position: 0 }
    }

    /// Keeps what the listener takes for speech.
    pub fn detected(listener: Listener, by: &VoiceDetection) -> Self {
        let samples = |ms: u32| (u64::from(ms) * u64::from(RATE) / 1_000) as usize;
        let detection = Detection {
            listener,
            threshold: by.threshold,
            min_silence: samples(by.min_silence_ms),
            pad: samples(by.speech_pad_ms),
            rest: Vec::new(),
            before: Vec::new(),
            is_speech: false,
            silent: 0,
        };
        Self { detection: Some(detection), ..Self::all() }
    }

    /// What is kept and was not taken.
    pub fn kept(&self) -> &[f32] {
        &self.kept
    }

    /// The sample of the recording at which what is kept begins.
    pub fn start(&self) -> u64 {
        self.parts.first().map_or(self.position, |part| part.in_recording)
    }

    /// Where parts begin in what is kept, except at 0. Silence was dropped at these places.
    pub fn cuts(&self) -> impl DoubleEndedIterator<Item = usize> {
        self.parts.iter().map(|part| part.in_kept).filter(|at| *at > 0)
    }

    /// Takes the next samples of the recording.
    pub fn push(&mut self, samples: &[f32]) {
        let Some(detection) = &mut self.detection else { return self.keep(samples) };
        detection.rest.extend_from_slice(samples);
        let whole = detection.rest.len() / CHUNK * CHUNK;
        let chunks: Vec<f32> = detection.rest.drain(..whole).collect();
        self.judge(&chunks);
    }

    /// Ends the recording: decides on the samples that are left, and ends the last part.
    pub fn end(&mut self) {
        let rest = self.detection.as_mut().map(|it| std::mem::take(&mut it.rest)).unwrap_or_default();
        self.judge(&rest);
        if self.detection.as_ref().is_some_and(|it| it.is_speech) {
            self.end_part();
        }
    }

    fn judge(&mut self, chunks: &[f32]) {
        let Some(detection) = &mut self.detection else { return };
        let probabilities = detection.listener.probabilities(chunks);
        for (chunk, probability) in chunks.chunks(CHUNK).zip(probabilities) {
            self.decide(chunk, probability);
        }
    }

    /// Keeps a chunk of speech, or of a pause within speech. Others are only remembered, in case speech follows.
    fn decide(&mut self, chunk: &[f32], probability: f32) {
        let Some(detection) = &mut self.detection else { return };
        let has_speech = probability >= detection.threshold;
        if !detection.is_speech && !has_speech {
            detection.before.extend_from_slice(chunk);
            // Shortened only when it is twice as long as needed, because that moves the samples that are left.
            if detection.before.len() > 2 * detection.pad + CHUNK {
                detection.before.drain(..detection.before.len() - detection.pad);
            }
            self.position += chunk.len() as u64;
            return;
        }
        if !detection.is_speech {
            detection.is_speech = true;
            let mut before = std::mem::take(&mut detection.before);
            before.drain(..before.len().saturating_sub(detection.pad));
            // These samples were counted as dropped, and are kept after all.
            self.position -= before.len() as u64;
            self.keep(&before);
        }
        self.keep(chunk);
        let Some(detection) = &mut self.detection else { return };
        // Silence begins well below the threshold, and ends only at it.
        let begins_silence = probability < detection.threshold - HYSTERESIS;
        let continues_silence = detection.silent > 0 && !has_speech;
        let is_silent = begins_silence || continues_silence;
        detection.silent = if is_silent { detection.silent + chunk.len() } else { 0 };
        // `min_silence` may be 0. It must not end a part within speech then, hence `is_silent`.
        if is_silent && detection.silent >= detection.min_silence {
            self.end_part();
        }
    }

    /// Keeps samples that follow in the recording.
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
        // Not more than is left: some of the silence may have been taken into a window already.
        let dropped = detection.silent.saturating_sub(detection.pad).min(self.kept.len());
        let silence = self.kept.split_off(self.kept.len() - dropped);
        detection.before.extend_from_slice(&silence[silence.len().saturating_sub(detection.pad)..]);
        (detection.is_speech, detection.silent) = (false, 0);
        let end = self.kept.len();
        self.parts.retain(|part| part.in_kept < end);
    }

    /// Takes the first samples, and says where in the recording they were.
    pub fn take(&mut self, samples: usize) -> (Vec<f32>, Window) {
        let seconds = |samples: u64| samples as f64 / f64::from(RATE);
        let within = self.parts.iter().take_while(|part| part.in_kept < samples);
        let place = |part: &KeptPart| Part {
            in_window: seconds(part.in_kept as u64),
            in_recording: seconds(part.in_recording),
        };
        let parts: Arc<[Part]> = within.map(place).collect();
        // Parts that end before the cut are dropped. The part that contains the cut begins at the cut from now on.
        let first = self.parts.iter().rposition(|part| part.in_kept <= samples).unwrap_or(0);
        self.parts.drain(..first);
        for KeptPart { in_kept, in_recording } in &mut self.parts {
            *in_recording += samples.saturating_sub(*in_kept) as u64;
            *in_kept = in_kept.saturating_sub(samples);
        }
        let rest = self.kept.split_off(samples);
        let taken = std::mem::replace(&mut self.kept, rest);
        let window = Window { parts, seconds: seconds(taken.len() as u64), channel: None };
        if self.kept.is_empty() {
            self.parts.clear();
        }
        (taken, window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::sound::voice::VoiceDetector;

    /// Each sample is the number of its chunk.
    fn speech(probabilities: &[f32], min_silence_ms: u32, speech_pad_ms: u32) -> Speech {
        let listener = Listener::new(Arc::new(VoiceDetector::load().unwrap()));
        let by = VoiceDetection { threshold: 0.5, min_silence_ms, speech_pad_ms };
        let mut speech = Speech::detected(listener, &by);
        for (number, probability) in probabilities.iter().enumerate() {
            speech.decide(&[number as f32; CHUNK], *probability);
        }
        speech.end();
        speech
    }

    /// The chunks at which parts begin: in the window, and in the recording.
    type Parts = Vec<(usize, usize)>;

    /// The numbers of the chunks that are kept, in the windows of `most` chunks, with the chunks at which parts begin.
    fn windows(speech: &mut Speech, most: usize) -> Vec<(Vec<usize>, Parts)> {
        let chunk = |seconds: f64| (seconds * f64::from(RATE) / CHUNK as f64).round() as usize;
        let mut windows = Vec::new();
        while !speech.kept().is_empty() {
            let (sound, window) = speech.take(speech.kept().len().min(most * CHUNK));
            let numbers = sound.chunks(CHUNK).map(|chunk| chunk[0] as usize).collect();
            windows.push((
                numbers,
                window.parts.iter().map(|part| (chunk(part.in_window), chunk(part.in_recording))).collect(),
            ));
        }
        windows
    }

    const TWO_CHUNKS_MS: u32 = 64;

    #[test]
    fn silence_is_dropped_and_a_pad_is_kept_around_speech() {
        let mut quiet = speech(&[0.0, 0.4, 0.1], TWO_CHUNKS_MS, 32);
        assert!(windows(&mut quiet, 9).is_empty());
        //                     0    1    2    3    4    5    6    7    8    9
        let heard: [f32; 10] = [0.0, 0.0, 0.9, 0.4, 0.0, 0.0, 0.0, 0.0, 0.9, 0.0];
        let mut of = speech(&heard, 2 * TWO_CHUNKS_MS, 32);
        assert_eq!(windows(&mut of, 9), [(vec![1, 2, 3, 4, 7, 8, 9], vec![(0, 1), (4, 7)])]);
        let mut of = speech(&heard, 2 * TWO_CHUNKS_MS, 32);
        assert_eq!(of.cuts().collect::<Vec<_>>(), [4 * CHUNK]);
        let all =
            [(vec![1, 2, 3], vec![(0, 1)]), (vec![4, 7, 8], vec![(0, 4), (1, 7)]), (vec![9], vec![(0, 9)])];
        assert_eq!(windows(&mut of, 3), all, "a window may have several parts");
    }

    #[test]
    fn a_short_pause_and_a_doubtful_sound_are_kept() {
        let mut of = speech(&[0.9, 0.4, 0.0, 0.4, 0.9, 0.4, 0.4, 0.4], 4 * TWO_CHUNKS_MS, 0);
        assert_eq!(windows(&mut of, 9), [((0..8).collect(), vec![(0, 0)])]);
        let mut of = speech(&[0.9, 0.0, 0.4, 0.9, 0.0, 0.4, 0.0], TWO_CHUNKS_MS, 0);
        assert_eq!(
            windows(&mut of, 9),
            [(vec![0, 3], vec![(0, 0), (1, 3)])],
            "a doubtful sound does not end silence"
        );
    }

    #[test]
    fn silence_that_begins_in_a_taken_window_is_dropped_after_that_window() {
        let mut of = speech(&[], 4 * TWO_CHUNKS_MS, 0);
        [0.9, 0.0, 0.0, 0.0].iter().enumerate().for_each(|(at, it)| of.decide(&[at as f32; CHUNK], *it));
        assert_eq!(of.take(3 * CHUNK).0.len(), 3 * CHUNK);
        (4..9).for_each(|at| of.decide(&[at as f32; CHUNK], 0.0));
        of.decide(&[9.0; CHUNK], 0.9);
        of.end();
        assert_eq!(windows(&mut of, 9), [(vec![9], vec![(0, 9)])]);
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
