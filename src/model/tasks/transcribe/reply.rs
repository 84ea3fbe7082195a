//! Writes replies in OpenAI's formats: JSON, JSON with segments, text, SubRip, WebVTT.

use serde::{Serialize, Serializer};
use serde_json::json;

use super::request::{Format, SpeechTask};
use crate::model::tasks::to_json;
use crate::protocol::{Body, TaskError};

/// The media type of the formats that are not JSON.
const PLAIN: &str = "text/plain; charset=utf-8";

/// How a format of subtitles differs from the others.
#[derive(Clone, Copy)]
struct SubtitleStyle {
    /// Stands before the milliseconds.
    decimal_mark: char,
    /// Whether each block begins with its number.
    is_numbered: bool,
}

const SRT: SubtitleStyle = SubtitleStyle { decimal_mark: ',', is_numbered: true };
const VTT: SubtitleStyle = SubtitleStyle { decimal_mark: '.', is_numbered: false };

/// The text of a recording.
#[derive(Clone, Debug, PartialEq)]
pub struct Transcript {
    /// Whether the text is in the language of the recording or in English.
    pub task: SpeechTask,
    /// The code of the spoken language; none if no speech was heard and the request does not name the language.
    pub language: Option<String>,
    /// Seconds of sound.
    pub seconds: f64,
    /// Seconds of sound that were transcribed: all but the silence that was left out. Split channels are summed up.
    pub speech_seconds: f64,
    /// In the order of time.
    pub segments: Vec<Segment>,
    /// Whether word timestamps were requested.
    pub wants_word_times: bool,
    /// Whether nothing in the recording says where it ends, so that a missing end cannot be noticed.
    pub has_unmarked_end: bool,
    /// Whether the channels cancelled each other, so that their mix is silent.
    pub has_silent_mix: bool,
}

/// A part of the text, about a sentence long.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Segment {
    /// When the window in which it was heard begins, in seconds from the beginning of the recording.
    #[serde(skip)]
    pub window_start: f64,
    /// When it begins, in seconds.
    #[serde(serialize_with = "write_rounded_to_ms")]
    pub start: f64,
    /// When it ends.
    #[serde(serialize_with = "write_rounded_to_ms")]
    pub end: f64,
    /// The text. It begins with a space in languages that separate words by spaces.
    pub text: String,
    /// Its token ids, timestamp tokens included.
    pub tokens: Vec<u32>,
    /// The temperature with which its window was decoded.
    #[serde(serialize_with = "write_temperature")]
    pub temperature: f32,
    /// The mean log probability of its window's tokens.
    pub avg_logprob: f64,
    /// The length of its window's text, divided by its length after compression.
    pub compression_ratio: f64,
    /// The probability that there is no speech in its window.
    pub no_speech_prob: f64,
    /// Its words, if word timestamps were requested.
    #[serde(skip)]
    pub words: Vec<Word>,
    /// The channel in which it was heard, counted from 0, if each channel is transcribed separately.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel: Option<usize>,
}

/// A word with the time at which it was said.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Word {
    /// The word with its punctuation.
    pub word: String,
    /// When it begins, in seconds.
    #[serde(serialize_with = "write_rounded_to_ms")]
    pub start: f64,
    /// When it ends.
    #[serde(serialize_with = "write_rounded_to_ms")]
    pub end: f64,
}

impl Transcript {
    /// Writes the reply.
    ///
    /// # Errors
    /// `Internal` if it cannot be written.
    pub fn body(&self, format: Format) -> Result<Body, TaskError> {
        let body = match format {
            Format::Json => Body::json(to_json(&ShortReply { text: self.text(), usage: self.usage() })?),
            Format::VerboseJson => Body::json(to_json(&self.verbose())?),
            Format::Text => Body::new(PLAIN, format!("{}\n", self.text())),
            Format::Srt => Body::new(PLAIN, self.subtitles(SRT)),
            Format::Vtt => Body::new(PLAIN, format!("WEBVTT\n\n{}", self.subtitles(VTT))),
        };
        // Whole numbers, because pika truncates floats to integers.
        let ms = |seconds: f64| (seconds * 1e3).round() as i64;
        let mut body = body.header("audio_ms", ms(self.seconds)).header("speech_ms", ms(self.speech_seconds));
        if self.has_unmarked_end {
            body = body.header("recording_end", "unmarked");
        }
        if self.has_silent_mix {
            let warning = "the mix of the channels is silent, because they cancel each other; with channels = \"split\" \
                           each of them is transcribed";
            body = body.header("warning", warning);
        }
        Ok(body)
    }

    /// The whole text.
    fn text(&self) -> String {
        self.segments.iter().map(|segment| segment.text.as_str()).collect::<String>().trim().to_owned()
    }

    fn usage(&self) -> Usage {
        Usage { kind: "duration", seconds: self.seconds.ceil() as u64 }
    }

    fn verbose(&self) -> VerboseReply<'_> {
        VerboseReply {
            task: self.task.name(),
            language: self.language.as_deref(),
            duration: rounded_to_ms(self.seconds),
            text: self.text(),
            segments: self.segments.iter().enumerate().map(VerboseSegment::of).collect(),
            words: self
                .wants_word_times
                .then(|| self.segments.iter().flat_map(|segment| &segment.words).collect()),
            usage: self.usage(),
        }
    }

    /// Returns a block for each segment, with its times and its text.
    fn subtitles(&self, SubtitleStyle { decimal_mark, is_numbered }: SubtitleStyle) -> String {
        let mut out = String::new();
        for (index, segment) in self.segments.iter().enumerate() {
            if is_numbered {
                out.push_str(&format!("{}\n", index + 1));
            }
            // Players would read a `-->` in the text as a line of timestamps.
            let text = segment.text.trim().replace("-->", "->");
            let (start, end) = (timestamp(segment.start, decimal_mark), timestamp(segment.end, decimal_mark));
            out.push_str(&format!("{start} --> {end}\n{text}\n\n"));
        }
        out
    }
}

/// Writes a time as hours, minutes, seconds and milliseconds. `decimal_mark` stands before the milliseconds.
fn timestamp(seconds: f64, decimal_mark: char) -> String {
    let total_ms = (seconds * 1_000.0).round() as u64;
    let (hours, minutes, seconds) = (total_ms / 3_600_000, total_ms / 60_000 % 60, total_ms / 1_000 % 60);
    format!("{hours:02}:{minutes:02}:{seconds:02}{decimal_mark}{:03}", total_ms % 1_000)
}

/// Rounds seconds to whole milliseconds; the result is in seconds.
fn rounded_to_ms(seconds: f64) -> f64 {
    (seconds * 1_000.0).round() / 1_000.0
}

fn write_rounded_to_ms<S: Serializer>(seconds: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(rounded_to_ms(*seconds))
}

/// Writes the temperature with four decimals, so that 0.2 is not written with the rounding error of f32.
fn write_temperature<S: Serializer>(temperature: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64((f64::from(*temperature) * 1e4).round() / 1e4)
}

#[derive(Serialize)]
struct ShortReply {
    text: String,
    usage: Usage,
}

#[derive(Serialize)]
struct Usage {
    #[serde(rename = "type")]
    kind: &'static str,
    seconds: u64,
}

#[derive(Serialize)]
struct VerboseReply<'a> {
    task: &'static str,
    language: Option<&'a str>,
    duration: f64,
    text: String,
    segments: Vec<VerboseSegment<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    words: Option<Vec<&'a Word>>,
    usage: Usage,
}

#[derive(Serialize)]
struct VerboseSegment<'a> {
    id: usize,
    /// The beginning of its window, in frames of 10 ms.
    seek: u64,
    #[serde(flatten)]
    segment: &'a Segment,
}

impl<'a> VerboseSegment<'a> {
    fn of((id, segment): (usize, &'a Segment)) -> Self {
        Self { id, seek: (segment.window_start * 100.0).round() as u64, segment }
    }
}

/// A part of a reply: the text of a window.
pub fn delta(text: &str) -> Body {
    Body::json(json!({"type": "transcript.text.delta", "delta": text}).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::requests::text_in;

    fn transcript() -> Transcript {
        let segment = |start: f64, end: f64, text: &str| Segment {
            window_start: 30.0,
            start,
            end,
            text: text.to_owned(),
            tokens: vec![50_363, 7],
            temperature: 0.2,
            avg_logprob: -0.25,
            compression_ratio: 1.5,
            no_speech_prob: 0.125,
            words: vec![Word { word: text.trim().to_owned(), start, end }],
            channel: None,
        };
        Transcript {
            wants_word_times: false,
            task: SpeechTask::Transcribe,
            language: Some("en".to_owned()),
            seconds: 3_725.250_4,
            speech_seconds: 3_000.5,
            has_unmarked_end: false,
            has_silent_mix: false,
            segments: vec![segment(0.0, 1.5, " One --> two."), segment(3_723.456, 3_725.25, " Three.")],
        }
    }

    fn text(format: Format) -> String {
        let body = transcript().body(format).unwrap();
        assert_eq!(body.headers["audio_ms"], 3_725_250.into());
        assert_eq!(body.headers["speech_ms"], 3_000_500.into());
        assert_eq!(
            body.content_type.starts_with("text/plain"),
            !matches!(format, Format::Json | Format::VerboseJson)
        );
        String::from_utf8(body.bytes.to_vec()).unwrap()
    }

    #[test]
    fn each_format_is_written_as_openai_does() {
        let usage = r#""usage":{"type":"duration","seconds":3726}"#;
        assert_eq!(text(Format::Json), format!(r#"{{"text":"One --> two. Three.",{usage}}}"#));
        assert_eq!(text(Format::Text), "One --> two. Three.\n");
        let srt =
            "1\n00:00:00,000 --> 00:00:01,500\nOne -> two.\n\n2\n01:02:03,456 --> 01:02:05,250\nThree.\n\n";
        assert_eq!(text(Format::Srt), srt);
        let vtt = "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne -> two.\n\n01:02:03.456 --> 01:02:05.250\nThree.\n\n";
        assert_eq!(text(Format::Vtt), vtt);
        let verbose: serde_json::Value = serde_json::from_str(&text(Format::VerboseJson)).unwrap();
        assert_eq!([&verbose["language"], &verbose["duration"]], [&json!("en"), &json!(3_725.25)]);
        let segment = json!({
            "id": 1, "seek": 3000, "start": 3_723.456, "end": 3_725.25, "text": " Three.", "tokens": [50_363, 7],
            "temperature": 0.2, "avg_logprob": -0.25, "compression_ratio": 1.5, "no_speech_prob": 0.125,
        });
        assert_eq!(verbose["segments"][1], segment);
        assert!(verbose.get("words").is_none(), "they were not asked for");
        let with_words =
            Transcript { wants_word_times: true, ..transcript() }.body(Format::VerboseJson).unwrap();
        let verbose: serde_json::Value = serde_json::from_slice(&with_words.bytes).unwrap();
        let expected = json!([
            {"word": "One --> two.", "start": 0.0, "end": 1.5},
            {"word": "Three.", "start": 3_723.456, "end": 3_725.25},
        ]);
        assert_eq!(verbose["words"], expected);
    }

    #[test]
    fn headers_say_what_cannot_be_known_and_what_was_not_heard() {
        let plain = transcript().body(Format::Json).unwrap().headers;
        assert!(!plain.contains_key("recording_end") && !plain.contains_key("warning"));
        let doubtful = Transcript { has_unmarked_end: true, has_silent_mix: true, ..transcript() };
        let headers = doubtful.body(Format::Json).unwrap().headers;
        assert_eq!(headers["recording_end"], "unmarked".into());
        assert!(headers["warning"].as_str().unwrap().contains("channels = \"split\""));
    }

    #[test]
    fn the_text_of_a_reply_and_of_its_parts_is_found() {
        assert_eq!(text_in(text(Format::VerboseJson).as_bytes()).as_deref(), Some("One --> two. Three."));
        assert_eq!(text_in(&delta(" a").bytes).as_deref(), Some(" a"));
        assert_eq!(text_in(b"[]"), None);
    }
}
