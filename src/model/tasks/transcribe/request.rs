//! Reads requests. Either the body of the message is the recording, and its headers are the parameters; or the body is
//! JSON, whose field `file_url` holds or names the recording.
//! Decides what is accepted and what an absent field means. Errors name the field and the value.

use std::ops::RangeInclusive;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::model::fields::{
    Fields, Keys, MAX_COMPARED_KEYS, bounded_string, each_item, file, headers_as_json, invalid, keys, list,
};
use crate::protocol::endpoints::TRANSLATIONS_URL;
use crate::protocol::message::Headers;
use crate::protocol::{FileUrl, Files, Message, TaskError};

/// The field with a recording in JSON.
const FILE_URL: &str = "file_url";
/// Maximum length of `prompt` in bytes. A model reads only its last 223 tokens, which are about as many words.
const MAX_PROMPT_BYTES: usize = 8 << 10;
/// Maximum length of `language` in bytes; the longest code has 3.
const MAX_LANGUAGE_BYTES: usize = 16;
/// Maximum number of items of `timestamp_granularities`: there are two kinds, `segment` and `word`.
const MAX_GRANULARITIES: usize = 2;

pub const KEYS: Keys = keys! {
    "channels", "file_url", "keywords", "language", "model", "prompt", "response_format", "stream", "task",
    "temperature", "timestamp_granularities", "timestamp_granularities[]", "vad";
    "chunking_strategy" = "null", "file" = "null", "frequency_penalty" = "0", "hotwords" = "null",
    "include" = "[]", "include[]" = "[]", "include_stop_str_in_output" = "false",
    "known_speaker_names" = "[]", "known_speaker_names[]" = "[]",
    "known_speaker_references" = "[]", "known_speaker_references[]" = "[]",
    "languages" = "[]", "languages[]" = "[]", "length_penalty" = "1", "max_completion_tokens" = "null",
    "min_p" = "0", "n" = "1", "presence_penalty" = "0", "repetition_penalty" = "1", "seed" = "null",
    "stream_continuous_usage_stats" = "false", "stream_include_usage" = "false", "to_language" = "null",
    "top_k" = "0", "top_p" = "1", "use_beam_search" = "false", "vad_filter" = "false", "vllm_xargs" = "null",
    "watermarking" = "null", "beam_size" = "null", "best_of" = "null",
    "condition_on_previous_text" = "false", "diarize" = "false", "initial_prompt" = "null",
    "no_speech_threshold" = "null", "without_timestamps" = "false", "word_timestamps" = "false"
};
/// The fields whose values are not texts.
const NON_TEXT_FIELDS: [&str; 6] =
    [KEYWORDS, "stream", "temperature", GRANULARITIES[0], GRANULARITIES[1], VAD];

/// The names of the field that asks for the times of words. OpenAI's clients send the second.
const GRANULARITIES: [&str; 2] = ["timestamp_granularities", "timestamp_granularities[]"];

const KEYWORDS: &str = "keywords";
/// Maximum number of keywords of a request, and the maximum length of one in bytes. A model reads the first 223 tokens
/// of all keywords together, or half as many if there is also a prompt.
const MAX_KEYWORDS: usize = 100;
const MAX_KEYWORD_BYTES: usize = 64;

const VAD: &str = "vad";
/// Maximum of the durations in `vad`, in milliseconds.
const MAX_VAD_MS: f64 = 30_000.0;

/// A request for the text of a recording.
#[derive(Clone, Debug, PartialEq)]
pub struct TranscriptionRequest {
    /// The recording.
    pub sound: Sound,
    /// The model asked for, if any.
    pub model: Option<String>,
    /// Whether the text is in the language of the recording or in English.
    pub task: SpeechTask,
    /// The code of the spoken language; none: the model detects it.
    pub language: Option<String>,
    /// A text that might precede the recording, whose style and spelling the model follows.
    pub prompt: Option<String>,
    /// Words that the model should prefer.
    pub keywords: Vec<String>,
    /// Whether each channel is transcribed separately.
    pub split_channels: bool,
    /// The form of the reply.
    pub format: Format,
    /// From 0 to 1. If it is 0, windows with a doubtful text are decoded again with higher temperatures.
    pub temperature: f32,
    /// How speech is detected. Silence is left out. None: the whole recording is transcribed.
    pub vad: Option<VoiceDetection>,
    /// Whether the text of each finished window is sent as a reply part.
    pub stream: bool,
    /// Whether the reply says when each word was said.
    pub words: bool,
}

/// An audio file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sound {
    /// The file.
    pub bytes: Bytes,
    /// Its field in the request, for errors; none if it is the body.
    pub field: Option<&'static str>,
}

/// How speech is detected in a recording.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VoiceDetection {
    /// The probability above which there is speech.
    pub threshold: f32,
    /// Milliseconds of silence that end speech. A shorter pause is kept.
    pub min_silence_ms: u32,
    /// Milliseconds that are kept before and after speech.
    pub speech_pad_ms: u32,
}

impl Default for VoiceDetection {
    fn default() -> Self {
        Self { threshold: 0.5, min_silence_ms: 2_000, speech_pad_ms: 400 }
    }
}

named_enum! {
    /// Whether the text is in the language of the recording or in English.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum SpeechTask as name {
        /// The text is in the language of the recording.
        Transcribe => "transcribe",
        /// The text is in English.
        Translate => "translate",
    }

    /// The form of a reply.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Format as name {
        /// JSON with the text.
        Json => "json",
        /// The text alone.
        Text => "text",
        /// JSON with the text, its language and its segments.
        VerboseJson => "verbose_json",
        /// Subtitles in SubRip's format.
        Srt => "srt",
        /// Subtitles in WebVTT's format.
        Vtt => "vtt",
    }
}

impl TranscriptionRequest {
    /// The URL of the recording in a message; none if the message holds the recording, or cannot be read.
    pub fn file_url(message: &Message) -> Option<FileUrl> {
        let fields = message.is_json().then(|| Fields::parse(&message.body, &KEYS).ok())??;
        FileUrl::from_field(fields.get(FILE_URL)?, FILE_URL)
    }

    /// Reads a message. `files` are those that were fetched for it.
    ///
    /// # Errors
    /// `Undecodable` for a body that should be JSON and is not, else `BadInput` with the field and the value.
    pub fn parse(message: &Message, files: &Files) -> Result<Self, TaskError> {
        let default_task = if message.url() == Some(TRANSLATIONS_URL) {
            SpeechTask::Translate
        } else {
            SpeechTask::Transcribe
        };
        if message.is_json() {
            let fields = Fields::parse(&message.body, &KEYS)?;
            return Self::from_fields(&fields, sound_from_url(&fields, files)?, default_task);
        }
        if message.body.is_empty() {
            return Err(TaskError::bad_input("body", "the body is empty; it should be a recording"));
        }
        let headers = parameters(&message.properties.headers)?;
        let fields = Fields::parse(headers.as_bytes(), &KEYS)?;
        if fields.get(FILE_URL).is_some() {
            let text = "file_url is for a body of JSON; here the body is the recording";
            return Err(TaskError::bad_input(FILE_URL, text));
        }
        Self::from_fields(&fields, Sound { bytes: message.body.clone(), field: None }, default_task)
    }

    fn from_fields(fields: &Fields<'_>, sound: Sound, default_task: SpeechTask) -> Result<Self, TaskError> {
        let format = fields.choice("response_format", &Format::ALL)?.unwrap_or(Format::Json);
        Ok(Self {
            sound,
            model: fields.string("model")?,
            task: fields.choice("task", &SpeechTask::ALL)?.unwrap_or(default_task),
            language: fields
                .bounded_string("language", MAX_LANGUAGE_BYTES)?
                .map(|code| code.to_ascii_lowercase()),
            prompt: fields.bounded_string("prompt", MAX_PROMPT_BYTES)?,
            keywords: keywords(fields)?,
            split_channels: fields.choice("channels", &[(false, "mix"), (true, "split")])?.unwrap_or(false),
            words: asks_for_words(fields, format)?,
            format,
            temperature: fields.number_within("temperature", 0.0..=1.0)?.unwrap_or(0.0),
            vad: voice_detection(fields)?,
            stream: fields.boolean("stream", false)?,
        })
    }
}

/// `vad`, if it is an object.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct VadFields {
    threshold: f64,
    min_silence_ms: f64,
    speech_pad_ms: f64,
}

impl Default for VadFields {
    fn default() -> Self {
        let VoiceDetection { threshold, min_silence_ms, speech_pad_ms } = VoiceDetection::default();
        let (min_silence_ms, speech_pad_ms) = (min_silence_ms.into(), speech_pad_ms.into());
        Self { threshold: threshold.into(), min_silence_ms, speech_pad_ms }
    }
}

fn voice_detection(fields: &Fields<'_>) -> Result<Option<VoiceDetection>, TaskError> {
    let raw = match fields.get(VAD).map(RawValue::get) {
        None | Some("true") => return Ok(Some(VoiceDetection::default())),
        Some("false") => return Ok(None),
        Some(raw) if raw.starts_with('{') => raw,
        Some(other) => {
            let expected = "true, false or an object with threshold, min_silence_ms or speech_pad_ms";
            return Err(invalid(VAD, expected, other));
        }
    };
    let given: VadFields = serde_json::from_str(raw)
        .map_err(|error| TaskError::bad_input(VAD, format!("{VAD} is not as it should be: {error}")))?;
    let in_range = |key: &str, number: f64, range: RangeInclusive<f64>| {
        let path = format!("{VAD}.{key}");
        let wanted = format!("a number from {} to {}", range.start(), range.end());
        if range.contains(&number) { Ok(number) } else { Err(invalid(&path, &wanted, &number.to_string())) }
    };
    Ok(Some(VoiceDetection {
        threshold: in_range("threshold", given.threshold, 0.01..=0.99)? as f32,
        min_silence_ms: in_range("min_silence_ms", given.min_silence_ms, 0.0..=MAX_VAD_MS)? as u32,
        speech_pad_ms: in_range("speech_pad_ms", given.speech_pad_ms, 0.0..=MAX_VAD_MS)? as u32,
    }))
}

/// The recording in a JSON request.
fn sound_from_url(fields: &Fields<'_>, files: &Files) -> Result<Sound, TaskError> {
    let Some(raw) = fields.get(FILE_URL) else {
        let message = "file_url is missing; send a recording as a URL in file_url, or as the body of a message whose \
                       content_type is audio/wav, audio/flac, audio/mpeg or audio/ogg";
        return Err(TaskError::bad_input(FILE_URL, message));
    };
    let bytes = file(raw, FILE_URL, files)?;
    Ok(Sound { bytes, field: Some(FILE_URL) })
}

/// The headers that are parameters, as JSON. Others are ignored, unless one is a mistyped parameter.
fn parameters(headers: &Headers) -> Result<String, TaskError> {
    let mut unknown = headers.keys().filter(|name| !KEYS.has(name)).take(MAX_COMPARED_KEYS);
    if let Some(error) = unknown.find_map(|name| KEYS.mistyped(name)) {
        return Err(error);
    }
    let names = KEYS.supported.iter().copied().chain(KEYS.unsupported.iter().map(|it| it.key));
    headers_as_json(headers, names, &NON_TEXT_FIELDS)
}

fn keywords(fields: &Fields<'_>) -> Result<Vec<String>, TaskError> {
    let Some(raw) = fields.get(KEYWORDS) else { return Ok(Vec::new()) };
    let items = list(raw.get(), KEYWORDS, MAX_KEYWORDS)?;
    each_item(&items, KEYWORDS, |raw, path| bounded_string(raw, path, MAX_KEYWORD_BYTES))
}

/// Whether word timestamps are requested, by a list of kinds, or by one of them. Segment timestamps are in every reply that
/// has times.
fn asks_for_words(fields: &Fields<'_>, format: Format) -> Result<bool, TaskError> {
    let [name, other] = GRANULARITIES;
    let (key, raw) = match (fields.get(name), fields.get(other)) {
        (None, None) => return Ok(false),
        (Some(raw), None) => (name, raw),
        (None, Some(raw)) => (other, raw),
        (Some(_), Some(_)) => {
            let message = format!("{name} and {other} are the same field: send one of them");
            return Err(TaskError::bad_input(other, message));
        }
    };
    let items = if raw.get().starts_with('"') { vec![raw] } else { list(raw.get(), key, MAX_GRANULARITIES)? };
    let mut wants_words = false;
    for item in items {
        match item.get() {
            "\"segment\"" => {}
            "\"word\"" if format == Format::VerboseJson => wants_words = true,
            "\"word\"" => {
                let message =
                    format!("{key} has \"word\", for which response_format must be \"verbose_json\"");
                return Err(TaskError::bad_input(key, message));
            }
            other => return Err(invalid(key, "\"segment\", \"word\" or a list of them", other)),
        }
    }
    Ok(wants_words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Properties, TaskErrorKind, Value};

    const SOUND: &str = r#""file_url":"data:audio/wav;base64,ZmlsZQ==""#;

    fn json(body: &str) -> Result<TranscriptionRequest, TaskError> {
        let message = Message { body: body.to_owned().into(), ..Message::default() };
        TranscriptionRequest::parse(&message, &Files::default())
    }

    fn raw(body: &'static [u8], headers: &[(&str, Value)]) -> Result<TranscriptionRequest, TaskError> {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        let content_type = Some("audio/WAV; rate=1".to_owned());
        let properties = Properties { headers, content_type, ..Properties::default() };
        TranscriptionRequest::parse(&Message { properties, body: body.into() }, &Files::default())
    }

    #[test]
    fn a_recording_is_the_body_with_headers_or_a_data_url_in_json() {
        let headers = [
            ("language", "EN".into()),
            ("temperature", "0.5".into()),
            ("stream", "true".into()),
            ("response_format", "srt".into()),
            ("timestamp_granularities", Value::Array(vec!["segment".into()])),
            ("keywords", Value::Array(vec!["Norland".into(), "Dashwood".into()])),
            ("channels", "split".into()),
            ("x-death", Value::Array(vec![Value::Void])),
        ];
        let from_body = raw(b"file", &headers).unwrap();
        assert_eq!((&*from_body.sound.bytes, from_body.sound.field), (&b"file"[..], None));
        let from_json = json(
            r#"{"file_url":"data:audio/wav;base64,ZmlsZQ==","language":"en","temperature":0.5,"stream":true,
            "response_format":"srt","timestamp_granularities":["segment"],"prompt":null,
            "keywords":["Norland","Dashwood"],"channels":"split"}"#,
        )
        .unwrap();
        assert_eq!(from_json.sound.field, Some("file_url"));
        assert_eq!(TranscriptionRequest { sound: from_body.sound.clone(), ..from_json }, from_body);
        let plain = raw(b"file", &[("temperature", Value::F32(0.0)), ("prompt", Value::Void)]).unwrap();
        let TranscriptionRequest { task, language, format, temperature, stream, .. } = plain;
        assert_eq!((task, language, format), (SpeechTask::Transcribe, None, Format::Json));
        assert_eq!((temperature, stream), (0.0, false));
    }

    #[test]
    fn the_granularity_word_asks_for_the_times_of_words() {
        let wants_words = |value: Value| {
            let headers = [("response_format", "verbose_json".into()), ("timestamp_granularities", value)];
            raw(b"file", &headers).unwrap().words
        };
        assert!(
            wants_words(Value::Array(vec!["segment".into(), "word".into()]))
                && wants_words(r#"["word"]"#.into())
        );
        assert!(!wants_words(Value::Array(vec!["segment".into()])) && !wants_words(Value::Void));
        assert!(wants_words("word".into()) && !wants_words("segment".into()));
        // OpenAI's clients name the field so.
        for value in [r#""word""#, r#"["word"]"#] {
            let field = format!(r#""timestamp_granularities[]":{value}"#);
            assert!(json(&format!(r#"{{{SOUND},"response_format":"verbose_json",{field}}}"#)).unwrap().words);
            let error =
                json(&format!(r#"{{{SOUND},{field},"timestamp_granularities":["segment"]}}"#)).unwrap_err();
            assert!(error.message.contains("are the same field"), "{}", error.message);
        }
    }

    #[test]
    fn voice_detection_is_on_unless_it_is_switched_off() {
        let vad = |value: Value| raw(b"file", &[("vad", value)]).unwrap().vad;
        let default = Some(VoiceDetection::default());
        assert_eq!((raw(b"file", &[]).unwrap().vad, vad("true".into())), (default, default));
        assert_eq!((vad(Value::Bool(false)), vad("false".into())), (None, None));
        let given = vad(r#"{"threshold": 0.25, "speech_pad_ms": 100}"#.into()).unwrap();
        assert_eq!(given, VoiceDetection { threshold: 0.25, min_silence_ms: 2_000, speech_pad_ms: 100 });
    }

    #[test]
    fn the_url_or_the_field_task_asks_for_a_translation() {
        let task_of = |url: &str, task: Option<&str>| {
            let mut headers: Vec<(&str, Value)> = vec![("url", url.into())];
            headers.extend(task.map(|task| ("task", task.into())));
            raw(b"file", &headers).unwrap().task
        };
        assert_eq!(task_of("/v1/audio/transcriptions", None), SpeechTask::Transcribe);
        assert_eq!(task_of("/v1/audio/transcriptions", Some("translate")), SpeechTask::Translate);
        assert_eq!(task_of("/v1/audio/translations", None), SpeechTask::Translate);
    }

    #[test]
    fn a_refusal_names_the_field_and_the_value() {
        let with = |field: &str| json(&format!(r#"{{"file_url":"data:audio/wav;base64,ZmlsZQ==",{field}}}"#));
        let long = format!(r#""prompt":"{}""#, "a".repeat(MAX_PROMPT_BYTES + 1));
        let wide = format!(r#""keywords":["{}"]"#, "a".repeat(MAX_KEYWORD_BYTES + 1));
        for (field, param, message) in [
            (r#""temperature":1.5"#, "temperature", "temperature must be a number from 0 to 1, got 1.5"),
            (
                r#""temperature":"hot""#,
                "temperature",
                "temperature must be a number from 0 to 1, got \"hot\"",
            ),
            (
                r#""response_format":"pdf""#,
                "response_format",
                "response_format must be one of \"json\", \"text\"",
            ),
            (r#""task":"sing""#, "task", "task must be one of \"transcribe\", \"translate\", got \"sing\""),
            (r#""language":7"#, "language", "language must be a string, got 7"),
            (r#""language":"a language of the far north""#, "language", "language has 27 bytes; at most 16"),
            (&long, "prompt", "prompt has 8193 bytes; at most 8192 are taken"),
            (
                r#""timestamp_granularities":["letter"]"#,
                "timestamp_granularities",
                "timestamp_granularities must be \"segment\", \"word\" or a list of them, got \"letter\"",
            ),
            (
                r#""timestamp_granularities":["segment","word"]"#,
                "timestamp_granularities",
                "timestamp_granularities has \"word\", for which response_format must be",
            ),
            (r#""keywords":"a""#, "keywords", "keywords must be"),
            (r#""keywords":["a",7]"#, "keywords[1]", "keywords[1] must be a string, got 7"),
            (&wide, "keywords[0]", "keywords[0] has 65 bytes; at most 64 are taken"),
            (r#""channels":"left""#, "channels", "channels must be one of \"mix\", \"split\", got \"left\""),
            (
                r#""vad":1"#,
                "vad",
                "vad must be true, false or an object with threshold, min_silence_ms or speech_pad_ms, got 1",
            ),
            (
                r#""vad":{"threshold":1}"#,
                "vad.threshold",
                "vad.threshold must be a number from 0.01 to 0.99, got 1",
            ),
            (
                r#""vad":{"speech_pad_ms":-1}"#,
                "vad.speech_pad_ms",
                "vad.speech_pad_ms must be a number from 0 to 30000",
            ),
            (
                r#""vad":{"treshold":0.1}"#,
                "vad",
                "vad is not as it should be: unknown field `treshold`, expected one of `threshold`, `min_silence_ms`, \
                 `speech_pad_ms`",
            ),
            (
                r#""langauge":"en""#,
                "langauge",
                "langauge is not a field of this request; did you mean language?",
            ),
        ] {
            let error = with(field).unwrap_err();
            assert_eq!(
                (error.kind, error.param.as_deref()),
                (TaskErrorKind::BadInput, Some(param)),
                "{field}"
            );
            assert!(error.message.starts_with(message), "{error}");
        }
        let many = format!(r#""keywords":["a"{}]"#, r#","a""#.repeat(MAX_KEYWORDS));
        let error = with(&many).unwrap_err();
        assert_eq!(
            (error.kind, error.param.as_deref()),
            (TaskErrorKind::TooLarge, Some("keywords")),
            "{error}"
        );
        for (body, message) in [
            ("{}", "file_url is missing"),
            (r#"{"file_url":"https://example.org/a.wav"}"#, "file_url must be a data URL"),
            (r#"{"file_url":"data:audio/wav;base64,?"}"#, "file_url is not base64"),
        ] {
            let error = json(body).unwrap_err();
            assert!(error.message.starts_with(message), "{error}");
        }
        assert!(raw(b"", &[]).unwrap_err().message.starts_with("the body is empty"));
        for (name, value, message) in [
            ("temperature", Value::F64(f64::NAN), "the header temperature must be"),
            ("temperature", "warm".into(), "temperature must be a number from 0 to 1, got \"warm\""),
            ("prompt", Value::Text(vec![0xff]), "the header prompt must be a text"),
            (
                "respons_format",
                "srt".into(),
                "respons_format is not a field of this request; did you mean response_format?",
            ),
            ("prompt", Value::I32(7), "prompt must be a string, got 7"),
            ("file_url", "data:".into(), "file_url is for a body of JSON"),
            ("channels", Value::Bool(true), "channels must be a string, got true"),
        ] {
            let error = raw(b"file", &[(name, value)]).unwrap_err();
            assert!(error.message.starts_with(message), "{error}");
        }
    }
}
