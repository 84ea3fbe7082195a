//! Reads requests for speech (`/v1/audio/speech`) and for the list of voices (`/v1/audio/voices`), and writes sound as
//! WAV, PCM or FLAC. Does no I/O; knows no model.

use flacenc::bitsink::ByteSink;
use flacenc::component::BitRepr as _;
use flacenc::error::Verify as _;
use flacenc::source::MemSource;
use serde::Serialize;

use crate::model::fields::{Fields, Keys, keys, string, texts};
use crate::model::tasks::to_json;
use crate::protocol::{Body, TaskError, TaskErrorKind};

/// The URL of requests for the list of voices.
pub const VOICES_URL: &str = "/v1/audio/voices";

/// The range of `speed`, as in OpenAI's API.
const SPEEDS: std::ops::RangeInclusive<f32> = 0.25..=4.0;
/// Maximum length of `voice`, in bytes.
const VOICE_BYTES: usize = 64;

pub const KEYS: Keys = keys! {
    "input", "model", "phonemes", "response_format", "seed", "speed", "stream", "voice";
    "instructions" = "\"\"", "stream_format" = "\"audio\"", "lang_code" = "null", "language" = "null",
    "return_timestamps" = "false", "sample_rate" = "null", "volume_multiplier" = "1"
};
const VOICES_KEYS: Keys = keys! { "model" };

/// A request for the sound of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeechRequest {
    /// What is spoken.
    pub input: Spoken,
    /// The model asked for, if any.
    pub model: Option<String>,
    /// The voice asked for, if any.
    pub voice: Option<String>,
    /// 1 is the voice's own pace, 2 is twice as fast.
    pub speed: f32,
    /// The form of the sound.
    pub format: SoundFormat,
    /// Whether each sentence is sent as a part of the reply.
    pub stream: bool,
    /// The seed of the noise in the voice, if it is given.
    pub seed: Option<u64>,
}

/// What is spoken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Spoken {
    /// A text.
    Text(String),
    /// The phonemes of sentences.
    Phonemes(Vec<String>),
}

impl Spoken {
    /// Its field in the request.
    pub fn field(&self) -> &'static str {
        match self {
            Self::Text(_) => "input",
            Self::Phonemes(_) => "phonemes",
        }
    }

    /// The number of its characters.
    pub fn characters(&self) -> usize {
        match self {
            Self::Text(text) => text.chars().count(),
            Self::Phonemes(sentences) => sentences.iter().map(|phonemes| phonemes.chars().count()).sum(),
        }
    }
}

named_enum! {
    /// The form of sound.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum SoundFormat as name {
        /// A WAV file with samples of 16 bits.
        Wav => "wav",
        /// The samples alone, each of 16 bits, the low byte first.
        Pcm => "pcm",
        /// A FLAC file with samples of 16 bits.
        Flac => "flac",
    }
}

impl SoundFormat {
    /// Formats of OpenAI and of other servers that sconce does not write.
    const OTHERS: [&str; 4] = ["mp3", "opus", "aac", "ogg"];
}

impl SpeechRequest {
    /// Reads a body. `phonemes` may have at most `max_sentences` sentences.
    ///
    /// # Errors
    /// `Undecodable` for a body that is not JSON, `TooLarge` for too many sentences, else `BadInput` with the field and
    /// the value.
    pub fn parse(body: &[u8], max_sentences: usize) -> Result<Self, TaskError> {
        let fields = Fields::parse(body, &KEYS)?;
        let input = match (fields.get("input"), fields.get("phonemes")) {
            (Some(_), Some(_)) => {
                let message = "send either input or phonemes, not both";
                return Err(TaskError::bad_input("phonemes", message));
            }
            (None, Some(raw)) => Spoken::Phonemes(texts(raw, "phonemes", max_sentences)?),
            _ => Spoken::Text(string(fields.required("input")?.get(), "input")?),
        };
        Ok(Self {
            input,
            model: fields.string("model")?,
            voice: fields.bounded_string("voice", VOICE_BYTES)?,
            speed: fields.number_within("speed", SPEEDS)?.unwrap_or(1.0),
            format: format(&fields)?,
            stream: fields.boolean("stream", false)?,
            seed: fields.unsigned("seed")?,
        })
    }
}

fn format(fields: &Fields<'_>) -> Result<SoundFormat, TaskError> {
    const KEY: &str = "response_format";
    if let Some(name) = fields.get(KEY).and_then(|raw| string(raw.get(), KEY).ok())
        && SoundFormat::OTHERS.contains(&name.as_str())
    {
        let message = format!("{KEY} is {name:?}, which is not supported; send \"wav\", \"pcm\" or \"flac\"");
        return Err(TaskError::bad_input(KEY, message));
    }
    Ok(fields.choice(KEY, &SoundFormat::ALL)?.unwrap_or(SoundFormat::Wav))
}

/// Reads a request for the list of voices: an empty body, or an object. Returns the model asked for, if any.
///
/// # Errors
/// As [`SpeechRequest::parse`].
pub fn read_voices_request(body: &[u8]) -> Result<Option<String>, TaskError> {
    if body.is_empty() {
        return Ok(None);
    }
    Fields::parse(body, &VOICES_KEYS)?.string("model")
}

/// A voice in the list of voices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ListedVoice<'a> {
    /// The name in requests.
    pub id: &'a str,
    /// The name for people.
    pub name: &'a str,
    /// The language, such as `en-US`.
    pub language: &'a str,
}

/// Writes the list of voices.
///
/// # Errors
/// `Internal` if it cannot be written.
pub fn write_voices(voices: &[ListedVoice<'_>]) -> Result<Body, TaskError> {
    #[derive(Serialize)]
    struct Voices<'a> {
        voices: &'a [ListedVoice<'a>],
    }
    to_json(&Voices { voices }).map(Body::json)
}

/// Writes sound with one channel, with the headers `audio_ms` and `sample_rate`.
///
/// # Errors
/// `TooLarge` if it is longer than a file can be, `Internal` if it cannot be written.
pub fn write_sound(samples: &[i16], sample_rate: u32, format: SoundFormat) -> Result<Body, TaskError> {
    let body = match format {
        SoundFormat::Wav => Body::new("audio/wav", wav(samples, sample_rate)?),
        SoundFormat::Pcm => Body::new("audio/pcm", pcm(samples)),
        SoundFormat::Flac => Body::new("audio/flac", flac(samples, sample_rate)?),
    };
    let ms = samples.len() as f64 * 1e3 / f64::from(sample_rate);
    Ok(body.header("audio_ms", ms.round() as i64).header("sample_rate", i64::from(sample_rate)))
}

fn pcm(samples: &[i16]) -> Vec<u8> {
    samples.iter().flat_map(|sample| sample.to_le_bytes()).collect()
}

fn wav(samples: &[i16], sample_rate: u32) -> Result<Vec<u8>, TaskError> {
    const HEADER: u32 = 44;
    let length = u32::try_from(2 * samples.len()).ok().filter(|length| *length < u32::MAX - HEADER);
    let length = length.ok_or_else(|| {
        TaskError::new(
            TaskErrorKind::TooLarge,
            format!("{} samples are too many for a WAV file", samples.len()),
        )
    })?;
    let mut file = b"RIFF".to_vec();
    file.reserve(HEADER as usize + length as usize);
    file.extend((length + HEADER - 8).to_le_bytes());
    // Bytes of the chunk `fmt `: 16; format: 1 is PCM; channels: 1.
    file.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    file.extend(sample_rate.to_le_bytes());
    // Bytes per second.
    file.extend((2 * sample_rate).to_le_bytes());
    // Bytes per sample of all channels: 2; bits per sample: 16.
    file.extend(b"\x02\0\x10\0data");
    file.extend(length.to_le_bytes());
    file.extend(pcm(samples));
    Ok(file)
}

/// A FLAC file. The encoder fails only for parameters that are out of its range, such as a sample rate of 0.
fn flac(samples: &[i16], sample_rate: u32) -> Result<Vec<u8>, TaskError> {
    const BITS: usize = 16;
    let failed =
        |reason: String| TaskError::internal(format!("the sound cannot be written as FLAC: {reason}"));
    let config = flacenc::config::Encoder::default().into_verified();
    let config = config.map_err(|(_, error)| failed(error.to_string()))?;
    let samples: Vec<i32> = samples.iter().copied().map(i32::from).collect();
    let source = MemSource::from_samples(&samples, 1, BITS, sample_rate as usize);
    let mut stream = flacenc::encode_with_fixed_block_size(&config, source, config.block_size)
        .map_err(|error| failed(format!("{error:?}")))?;
    // The encoder writes the length of the shorter last block as the minimum block size, from which decoders conclude that
    // the sizes vary. The format leaves the last block out of that field.
    let sizes = stream.stream_info_mut().set_block_sizes(config.block_size, config.block_size);
    sizes.map_err(|error| failed(error.to_string()))?;
    let mut file = ByteSink::new();
    stream.write(&mut file).map_err(|error| failed(error.to_string()))?;
    Ok(file.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str) -> Result<SpeechRequest, TaskError> {
        SpeechRequest::parse(body.as_bytes(), 3)
    }

    #[test]
    fn a_request_has_a_text_or_phonemes_and_defaults() {
        let request = parse(r#"{"input":"Hello.","model":"m","instructions":""}"#).unwrap();
        assert_eq!(
            request,
            SpeechRequest {
                input: Spoken::Text("Hello.".into()),
                model: Some("m".into()),
                voice: None,
                speed: 1.0,
                format: SoundFormat::Wav,
                stream: false,
                seed: None,
            }
        );
        let request = parse(
            r#"{"phonemes":["a","b"],"voice":"heart","speed":4,"response_format":"pcm","seed":18446744073709551615}"#,
        )
        .unwrap();
        assert_eq!(request.input, Spoken::Phonemes(vec!["a".into(), "b".into()]));
        assert_eq!((request.speed, request.format, request.seed), (4.0, SoundFormat::Pcm, Some(u64::MAX)));
        assert_eq!(parse(r#"{"phonemes":"a"}"#).unwrap().input, Spoken::Phonemes(vec!["a".into()]));
    }

    #[test]
    fn a_wrong_field_is_named_with_its_value() {
        for (body, field, message) in [
            ("{}", "input", "input is missing"),
            (r#"{"input":"a","phonemes":"b"}"#, "phonemes", "send either input or phonemes"),
            (r#"{"input":7}"#, "input", "7"),
            (r#"{"input":"a","speed":0}"#, "speed", "a number from 0.25 to 4, got 0"),
            (r#"{"input":"a","speed":100}"#, "speed", "got 100"),
            (r#"{"input":"a","speed":"fast"}"#, "speed", "got \"fast\""),
            (
                r#"{"input":"a","response_format":"mp3"}"#,
                "response_format",
                "\"mp3\", which is not supported",
            ),
            (r#"{"input":"a","response_format":"x"}"#, "response_format", "one of \"wav\""),
            (r#"{"input":"a","seed":-1}"#, "seed", "got -1"),
            (r#"{"input":"a","instructions":"slowly"}"#, "instructions", "not supported"),
            (r#"{"input":"a","stream_format":"sse"}"#, "stream_format", "not supported"),
            (r#"{"input":"a","voices":"x"}"#, "voices", "did you mean voice"),
            (r#"{"phonemes":["a","b","c","d"]}"#, "phonemes", "at most 3"),
            (r#"{"phonemes":[1]}"#, "phonemes[0]", "got 1"),
        ] {
            let error = parse(body).unwrap_err();
            assert!(error.message.contains(message), "{body}: {}", error.message);
            assert_eq!(error.param.as_deref(), Some(field), "{body}");
        }
    }

    #[test]
    fn a_wav_file_says_its_length_and_holds_the_pcm() {
        let samples = [0, 1, -1, i16::MAX, i16::MIN];
        let body = write_sound(&samples, 24_000, SoundFormat::Wav).unwrap();
        let raw = write_sound(&samples, 24_000, SoundFormat::Pcm).unwrap();
        assert_eq!((&*body.content_type, &*raw.content_type), ("audio/wav", "audio/pcm"));
        assert_eq!(body.bytes.len(), 54);
        assert_eq!(body.bytes[4..8], 46_u32.to_le_bytes());
        assert_eq!(body.bytes[24..28], 24_000_u32.to_le_bytes());
        assert_eq!(body.bytes[40..44], 10_u32.to_le_bytes());
        assert_eq!(body.bytes[44..], raw.bytes);
        assert_eq!(raw.bytes[..6], [0, 0, 1, 0, 0xff, 0xff]);
    }

    #[test]
    fn a_request_for_voices_may_be_empty() {
        assert_eq!(read_voices_request(b"").unwrap(), None);
        assert_eq!(read_voices_request(br#"{"model":"x"}"#).unwrap(), Some("x".into()));
        assert!(read_voices_request(b"[]").is_err());
        let voices = [ListedVoice { id: "heart", name: "Heart", language: "en-US" }];
        let body = write_voices(&voices).unwrap();
        assert_eq!(&*body.bytes, br#"{"voices":[{"id":"heart","name":"Heart","language":"en-US"}]}"#);
    }
}
