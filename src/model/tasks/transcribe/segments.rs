//! Divides the tokens of a window's text into segments, by their timestamps. Also measures how repetitive a text is,
//! and maps times of a window to its recording. Pure functions.

use std::io::Write as _;
use std::sync::Arc;

use flate2::Compression;
use flate2::write::ZlibEncoder;

use super::reply::{Segment, Word};
use super::rules::{Rules, TIMESTAMP_STEP};
use super::words::{TimeRange, TimedWord, timed_words};
use crate::model::load::vocabulary::TokenTexts;

/// The place of a window in its recording. Its sound may be several parts of the recording, back to back.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WindowPlace {
    /// The parts in their order; the first begins at 0.
    pub parts: Arc<[Part]>,
    /// Seconds of sound in the window, 30 at most.
    pub seconds: f64,
    /// The window's channel, if each channel is transcribed by itself.
    pub channel: Option<usize>,
}

/// Where a part of a window was in the recording.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    /// Its beginning, in seconds of the window.
    pub in_window: f64,
    /// Its beginning, in seconds of the recording.
    pub in_recording: f64,
}

impl WindowPlace {
    /// Where the window begins, in seconds of the recording.
    pub fn start(&self) -> f64 {
        self.parts.first().map_or(0.0, |part| part.in_recording)
    }

    /// Maps the start of a segment or a word from seconds of the window to seconds of the recording. The border of two
    /// parts maps to the start of the later one.
    fn start_in_recording(&self, second: f64) -> f64 {
        let part = self.parts.iter().rfind(|part| part.in_window <= second);
        part.map_or(second, |part| part.in_recording + (second - part.in_window))
    }

    /// Maps the end of a segment or a word, as [`WindowPlace::start_in_recording`] maps its start. The border of two
    /// parts maps to the end of the earlier one.
    fn end_in_recording(&self, second: f64) -> f64 {
        match self.parts.iter().rfind(|part| part.in_window < second) {
            Some(part) => part.in_recording + (second - part.in_window),
            None => self.start_in_recording(second),
        }
    }
}

/// The text of a window.
#[derive(Clone, Debug, PartialEq)]
pub struct WindowText {
    /// The window's place in the recording.
    pub place: WindowPlace,
    /// The token of the language; none if the model knows only one.
    pub language: Option<u32>,
    /// Tokens of text and timestamp tokens, without the token that ends the text.
    pub tokens: Vec<u32>,
    /// The mean log probability of the tokens, the end included.
    pub avg_logprob: f32,
    /// The probability that there is no speech.
    pub no_speech: f32,
    /// The temperature with which the text was written.
    pub temperature: f32,
    /// When each token of text was spoken; empty unless the request wants the times of words.
    pub token_times: Vec<TimeRange>,
}

/// The text of tokens, without times and special tokens.
pub fn plain_text(tokens: &[u32], rules: &Rules, token_texts: &TokenTexts) -> String {
    let text_tokens = tokens.iter().filter(|id| rules.is_text(**id));
    let bytes: Vec<u8> = text_tokens.flat_map(|id| token_texts.get(*id)).copied().collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The size of a text divided by its size when it is compressed. A text of repetitions has a large ratio.
pub fn compression_ratio(text: &str) -> f32 {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    // Writing to a Vec cannot fail.
    let compressed = encoder.write_all(text.as_bytes()).and_then(|()| encoder.finish());
    compressed.map_or(0.0, |bytes| text.len() as f32 / bytes.len() as f32)
}

/// The segments of a window. `language` is the code of the text's language; without one, words are separated at
/// spaces.
pub fn segments(
    window_text: &WindowText,
    language: Option<&str>,
    rules: &Rules,
    token_texts: &TokenTexts,
) -> Vec<Segment> {
    let WindowText { place, tokens, token_times, .. } = window_text;
    let ratio = compression_ratio(&plain_text(tokens, rules, token_texts));
    let words = timed_words(tokens, token_times, language, rules, token_texts).into_iter();
    let mut words = WordsInOrder { place, words, taken_tokens: 0, segment_tokens: 0 };
    let segment = |span: TokenSpan<'_>| {
        let words = words.of_next_segment(&span, rules);
        let text = plain_text(span.tokens, rules, token_texts);
        // The model always hears 30 s. It may place the end of a shorter window in the silence that was added.
        let begins = span.start.min(place.seconds);
        let ends = span.end.unwrap_or(place.seconds).clamp(begins, place.seconds);
        let start = place.start_in_recording(begins);
        let segment = Segment {
            window_start: place.start(),
            start,
            end: place.end_in_recording(ends).max(start),
            tokens: span.tokens.to_vec(),
            temperature: window_text.temperature,
            avg_logprob: window_text.avg_logprob.into(),
            compression_ratio: ratio.into(),
            no_speech_prob: window_text.no_speech.into(),
            channel: place.channel,
            text,
            words,
        };
        // OpenAI's rule drops a segment without length. It also drops text after the end of the sound, which the model
        // has invented.
        (begins < ends && !segment.text.trim().is_empty()).then_some(segment)
    };
    token_spans(tokens, rules).into_iter().filter_map(segment).collect()
}

/// Distributes a window's words over its segments, in their order.
struct WordsInOrder<'a> {
    place: &'a WindowPlace,
    words: std::vec::IntoIter<TimedWord>,
    /// The number of tokens of text in the words that belong to a segment by now.
    taken_tokens: usize,
    /// The number of tokens of text in the segments so far.
    segment_tokens: usize,
}

impl WordsInOrder<'_> {
    /// The words of the next segment, with times of the recording. A word that two segments share belongs to the first.
    fn of_next_segment(&mut self, span: &TokenSpan<'_>, rules: &Rules) -> Vec<Word> {
        self.segment_tokens += span.tokens.iter().filter(|id| rules.is_text(**id)).count();
        let mut words = Vec::new();
        while self.taken_tokens < self.segment_tokens
            && let Some(word) = self.words.next()
        {
            self.taken_tokens += word.tokens;
            let TimeRange { start, end } = word.time;
            let start = self.place.start_in_recording(start.min(self.place.seconds));
            let end = self.place.end_in_recording(end.min(self.place.seconds)).max(start);
            words.push(Word { word: word.text.trim().to_owned(), start, end });
        }
        words.retain(|it| !it.word.is_empty());
        words
    }
}

/// The tokens from one time to the next, these two included.
#[derive(Debug, PartialEq)]
struct TokenSpan<'a> {
    /// Seconds from the beginning of the window.
    start: f64,
    /// Seconds from the beginning of the window. None if the tokens end without a time.
    end: Option<f64>,
    tokens: &'a [u32],
}

/// Divides tokens at their times. Spans without text are left out.
fn token_spans<'a>(tokens: &'a [u32], rules: &Rules) -> Vec<TokenSpan<'a>> {
    let time = |id: u32| f64::from(id - rules.first_time) * TIMESTAMP_STEP;
    let (mut spans, mut first, mut start, mut has_text) = (Vec::new(), 0, 0.0, false);
    for (index, id) in tokens.iter().enumerate() {
        if !rules.is_time(*id) {
            has_text = true;
            continue;
        }
        if has_text {
            spans.push(TokenSpan { start, end: Some(time(*id)), tokens: &tokens[first..=index] });
            (first, has_text) = (index + 1, false);
        } else {
            first = index;
        }
        start = time(*id);
    }
    if has_text {
        spans.push(TokenSpan { start, end: None, tokens: &tokens[first..] });
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> Rules {
        Rules { end: 5, first_time: 10, ..Rules::default() }
    }

    fn window_text(tokens: &[u32]) -> WindowText {
        WindowText {
            place: place(),
            language: None,
            tokens: tokens.to_vec(),
            avg_logprob: -0.5,
            no_speech: 0.25,
            temperature: 0.0,
            token_times: Vec::new(),
        }
    }

    /// A window that begins at 30 s of the recording. After its first second, 10 s of the recording are left out.
    fn place() -> WindowPlace {
        let parts =
            [Part { in_window: 0.0, in_recording: 30.0 }, Part { in_window: 1.0, in_recording: 41.0 }];
        WindowPlace { parts: parts.into(), seconds: 2.0, channel: None }
    }

    /// The start, the end and the text of each segment.
    fn found(tokens: &[u32]) -> Vec<(f64, f64, String)> {
        let texts = TokenTexts::of(&[" a", " b", " ", "c", "d"]);
        let round = |second: f64| (second * 1e6).round() / 1e6;
        let segments = segments(&window_text(tokens), None, &rules(), &texts).into_iter();
        segments.map(|it| (round(it.start), round(it.end), it.text)).collect()
    }

    #[test]
    fn segments_lie_between_times() {
        let expected = [(30.0, 30.4, " a"), (30.5, 31.0, " bc")].map(|(a, b, text)| (a, b, text.to_owned()));
        assert_eq!(found(&[10, 0, 30, 35, 1, 3, 60]), expected);
        assert_eq!(found(&[10, 0, 30, 35, 1, 3, 60, 60]), expected);
    }

    #[test]
    fn words_belong_to_the_segment_of_their_first_token() {
        let texts = TokenTexts::of(&[" a", " b", " ", "c", "."]);
        let time = |index: usize| TimeRange { start: 0.2 * index as f64, end: 0.2 * (index + 1) as f64 };
        let token_times = (0..5).map(time).collect();
        let window_text = WindowText { token_times, ..window_text(&[10, 0, 3, 30, 35, 3, 1, 4, 60]) };
        let words: Vec<Vec<(f64, f64, String)>> = segments(&window_text, None, &rules(), &texts)
            .into_iter()
            .map(|it| it.words.into_iter().map(|it| (it.start, it.end, it.word)).collect())
            .collect();
        // The second segment begins within the word of the first; after 1 s of the window 10 s were left out.
        let round = |second: f64| (second * 1e6).round() / 1e6;
        let rounded: Vec<Vec<_>> = words
            .into_iter()
            .map(|it| it.into_iter().map(|(start, end, word)| (round(start), round(end), word)).collect())
            .collect();
        assert_eq!(rounded, [vec![(30.0, 30.6, "acc".to_owned())], vec![(30.6, 30.8, "b.".to_owned())]]);
    }

    #[test]
    fn the_last_segment_may_lack_its_end_and_none_without_length_is_kept() {
        assert_eq!(found(&[20, 0]), [(30.2, 42.0, " a".to_owned())]);
        assert_eq!(found(&[10, 0, 200]), [(30.0, 42.0, " a".to_owned())]);
        assert!(found(&[200, 0, 210]).is_empty(), "it begins after the sound");
        assert!(found(&[20, 0, 20]).is_empty(), "it ends where it begins");
        assert_eq!(found(&[0, 30]), [(30.0, 30.4, " a".to_owned())]);
        assert!(found(&[10, 2, 30]).is_empty(), "a blank is no text");
        assert!(found(&[]).is_empty());
    }

    #[test]
    fn times_are_those_of_the_recording() {
        let (start, end) = (place().start_in_recording(0.5), place().end_in_recording(1.0));
        assert_eq!((start, end), (30.5, 31.0));
        assert_eq!((place().start_in_recording(1.0), place().end_in_recording(1.5)), (41.0, 41.5));
        let whole = WindowPlace { seconds: 2.0, ..WindowPlace::default() };
        assert_eq!((whole.start_in_recording(1.0), whole.end_in_recording(0.0)), (1.0, 0.0));
    }

    #[test]
    fn a_text_of_repetitions_compresses_well() {
        assert!(compression_ratio(&" again and".repeat(20)) > 5.0);
        assert!(compression_ratio("He was not an ill-disposed young man.") < 1.5);
        assert_eq!(compression_ratio(""), 0.0);
    }
}
