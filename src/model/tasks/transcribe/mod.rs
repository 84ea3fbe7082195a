//! Speech recognition by Whisper: turns recordings into windows, and the texts of windows into transcripts. Windows are
//! independent of each other: windows of different tasks can share a batch, and the text of one does not depend on the
//! others (on a GPU only up to rounding). Only `load` and `network` use the device.

mod network;
mod options;
mod reply;
mod request;
mod rules;
mod sample;
mod segments;
mod speech;
mod tokens;
mod windows;
mod words;

use std::sync::Arc;

pub use self::network::{Transcriber, WindowInput};
pub use self::segments::{Part, WindowPlace, WindowText};

use self::network::{LanguageTokens, WindowPace, has_no_speech};
use self::options::Options;
use self::reply::{Segment, Transcript, delta};
use self::request::{Format, KEYS, SpeechTask, TranscriptionRequest};
use self::segments::segments;
use self::speech::Speech;
use self::tokens::SpecialTokens;
use self::windows::{Decoded, TOKENS_PER_WINDOW, Windows};
use super::names::ServedNames;
use crate::model::family::{Example, Family, FileRules, Serves};
use crate::model::load::vocabulary::TokenTexts;
use crate::model::load::{ModelFiles, weights};
use crate::model::nets::whisper::config::{MODEL_TYPE, WhisperConfig};
use crate::model::nets::whisper::{Whisper, check_dtype};
use crate::model::random::{Seed, seed_of_task};
use crate::model::sound::decode::{Channels, Limits};
use crate::model::sound::features::LogMel;
use crate::model::sound::voice::{Listener, VoiceDetector};
use crate::model::{
    Announced, Body, Device, FileUrl, Files, Inputs, LoadError, LoadSpec, Message, Preprocessed, Processor,
    Properties, Route, Streaming, TaskError,
};
use crate::protocol::endpoints::{TRANSCRIPTIONS_URL, TRANSLATIONS_URL};
use crate::protocol::{BYTES, JSON, KOMBU_BYTES};

/// The media types of requests. A file's format is found in the file itself.
const MEDIA_TYPES: &[&str] = &[
    JSON,
    "audio/wav",
    "audio/x-wav",
    "audio/wave",
    "audio/vnd.wave",
    "audio/flac",
    "audio/x-flac",
    "audio/mpeg",
    "audio/mp3",
    "audio/ogg",
    "application/ogg",
    "audio/*",
    BYTES,
    KOMBU_BYTES,
];

/// Models that recognise speech.
pub static FAMILY: Family = Family {
    name: "transcribe",
    routes: &[
        Route { url: TRANSCRIPTIONS_URL, media_types: MEDIA_TYPES },
        Route { url: TRANSLATIONS_URL, media_types: MEDIA_TYPES },
    ],
    fields: &[(TRANSCRIPTIONS_URL, &KEYS), (TRANSLATIONS_URL, &KEYS)],
    serves: Serves::Files(FileRules {
        configs: &[MODEL_TYPE],
        fewer_routes: Some(routes_of),
        ..FileRules::new(request_files, check)
    }),
    options: &options::OPTIONS,
    sample: sample::recordings,
    // The limit is low for the fuzz target, whose files may declare any length.
    example: Example { model: "whisper-random", options: &[("max_seconds", 120)] },
};

/// The routes of a model with these files. A model of English only does not translate. What is wrong with the files is
/// found when they are loaded.
fn routes_of(files: &ModelFiles) -> &'static [Route] {
    let is_multilingual = WhisperConfig::read(files, "")
        .and_then(|config| tokens::Settings::read(files).map(|settings| settings.is_multilingual(&config)));
    if is_multilingual.unwrap_or(true) { FAMILY.routes } else { &FAMILY.routes[..1] }
}

/// Requests every file that loading may read, the weights last.
fn request_files(files: &ModelFiles) -> Result<(), LoadError> {
    files.required("config.json")?;
    files.optional("generation_config.json")?;
    files.required("tokenizer.json")?;
    files.optional("tokenizer_config.json")?;
    files.weights().map(drop)
}

fn check(spec: &LoadSpec) -> Result<(), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = WhisperConfig::read(&files, &spec.source)?;
    Options::read(spec)?;
    check_dtype(spec, &config)?;
    files.required("tokenizer.json")?;
    weights::check(&files.weights()?)
}

/// Loads a model that recognises speech.
///
/// # Errors
/// [`LoadError`] for a file that is missing or invalid, an unknown option, and a device or number format that is not
/// supported.
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(TranscribeProcessor, Transcriber), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = WhisperConfig::read(&files, &spec.source)?;
    let options = Options::read(spec)?;
    let tokens = SpecialTokens::read(&files, &config)?;
    let network = Whisper::load(spec, device, &config, options.sequences)?;
    let pace = WindowPace::new(TOKENS_PER_WINDOW as f32);
    let transcriber = Transcriber::new(network, options.capacity(config.context), &tokens, pace.clone());
    let processor = TranscribeProcessor {
        names: ServedNames::new(spec),
        log_mel: Arc::new(LogMel::new(config.mels)),
        voice: Arc::new(VoiceDetector::load()?),
        token_texts: tokens.texts(),
        has_alignment: !config.alignment.is_empty(),
        max_context: config.context,
        pace,
        tokens,
        options,
    };
    Ok((processor, transcriber))
}

/// Turns requests for transcripts into windows, and their texts into replies.
pub struct TranscribeProcessor {
    names: ServedNames,
    tokens: SpecialTokens,
    token_texts: TokenTexts,
    log_mel: Arc<LogMel>,
    voice: Arc<VoiceDetector>,
    /// Whether words can get times.
    has_alignment: bool,
    pace: WindowPace,
    /// The maximum number of tokens of a prompt and its text together.
    max_context: usize,
    options: Options,
}

/// What the reply needs of its request.
pub struct TranscribeContext {
    task: SpeechTask,
    /// The requested language.
    language: Option<String>,
    format: Format,
    stream: bool,
    /// Whether the request wants the times of words.
    wants_word_times: bool,
    announced: Option<Announced>,
    /// How much of the recording was decoded.
    decoded: Arc<Decoded>,
    /// Whether nothing in the recording says where it ends.
    has_unmarked_end: bool,
}

impl TranscribeProcessor {
    /// What all windows of a request have in common. [`Windows`] adds the sound of each.
    fn window_template(
        &self,
        request: &TranscriptionRequest,
        properties: &Properties,
    ) -> Result<WindowInput, TaskError> {
        let previous = self.tokens.previous_text(&request.keywords, request.prompt.as_deref())?;
        if request.words && !self.has_alignment {
            let message = "timestamp_granularities is [\"word\"], but this model's generation_config.json names no \
                           alignment_heads, which the times of words are computed from";
            return Err(TaskError::bad_input("timestamp_granularities", message));
        }
        let language = self.tokens.language(request.language.as_deref())?;
        let language_tokens = self.tokens.task(request.task)?.map(|task| LanguageTokens { language, task });
        let mut template = WindowInput {
            features: Arc::default(),
            place: WindowPlace::default(),
            previous: previous.into(),
            language_tokens,
            // As in openai/whisper, a text has at most half of the context.
            max_tokens: self.max_context / 2,
            temperature: request.temperature,
            wants_word_times: request.words,
            seed: Seed { task: seed_of_task(self.options.seed, properties), sequence: 0 },
        };
        let room = self.max_context.saturating_sub(template.prompt_tokens());
        template.max_tokens = template.max_tokens.min(room);
        Ok(template)
    }

    /// The segments of a window; none if there is no speech in it.
    fn segments(&self, window_text: &WindowText, task: SpeechTask) -> Vec<Segment> {
        if has_no_speech(window_text) {
            return Vec::new();
        }
        let language = match task {
            SpeechTask::Transcribe => self.tokens.code(window_text.language),
            SpeechTask::Translate => None,
        };
        segments(window_text, language.as_deref(), &self.tokens.rules, &self.token_texts)
    }
}

impl Processor for TranscribeProcessor {
    type Context = TranscribeContext;
    type Input = WindowInput;
    type Piece = ();
    type Output = WindowText;

    fn routes(&self) -> &[Route] {
        // The second route translates; as in `routes_of`.
        if self.tokens.multilingual.is_some() { FAMILY.routes } else { &FAMILY.routes[..1] }
    }

    fn probe(&self) -> Option<Message> {
        let mut message = Message { body: sample::probe().into(), ..Message::default() };
        message.properties.content_type = Some("audio/wav".to_owned());
        // At temperature 0 a doubtful text is written again at higher temperatures. A tiny temperature prevents this,
        // and still yields the likeliest text. Voice detection would drop the tone, which is no speech.
        for (name, value) in [("url", TRANSCRIPTIONS_URL), ("temperature", "0.00001"), ("vad", "false")] {
            message.properties.headers.insert(name.to_owned(), value.into());
        }
        Some(message)
    }

    fn file_urls(&self, message: &Message) -> Vec<FileUrl> {
        TranscriptionRequest::file_url(message).into_iter().collect()
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        self.preprocess_with(message, &Files::default())
    }

    fn preprocess_with(&self, message: &Message, files: &Files) -> Result<Preprocessed<Self>, TaskError> {
        let request = TranscriptionRequest::parse(message, files)?;
        self.names.check(request.model.as_deref())?;
        let template = self.window_template(&request, &message.properties)?;
        let TranscriptionRequest { sound, task, language, format, stream, vad, words, .. } = request;
        let channels = if request.split_channels { Channels::Split } else { Channels::Mix };
        let new_speech = || match &vad {
            Some(settings) => Speech::detected(Listener::new(self.voice.clone()), settings),
            None => Speech::all(),
        };
        let limits = Limits::of_seconds(self.options.max_seconds);
        let with_field = move |error: TaskError| match sound.field {
            Some(field) => error.with_param(field),
            None => error,
        };
        let windows =
            Windows::open(sound.bytes, limits, channels, self.log_mel.clone(), new_speech, template)
                .map_err(with_field)?;
        let context = TranscribeContext {
            task,
            language,
            format,
            stream,
            wants_word_times: words,
            announced: windows.announced(self.pace.tokens()),
            decoded: windows.decoded(),
            has_unmarked_end: windows.has_unmarked_end(),
        };
        let windows = windows.map(move |window| window.map_err(with_field));
        Ok((context, Inputs::Slices(Box::new(windows))))
    }

    fn bytes(&self, input: &WindowInput) -> usize {
        size_of_val(&*input.features)
    }

    fn announced(&self, context: &TranscribeContext) -> Option<Announced> {
        context.announced
    }

    fn streaming(&self, context: &TranscribeContext) -> Streaming {
        Streaming::Outputs.if_requested(context.stream)
    }

    fn output_parts(&self, context: &mut TranscribeContext, _: usize, output: &WindowText) -> Vec<Body> {
        let text: String =
            self.segments(output, context.task).into_iter().map(|segment| segment.text).collect();
        if text.is_empty() { Vec::new() } else { vec![delta(&text)] }
    }

    fn finish(&self, context: TranscribeContext, outputs: Vec<WindowText>) -> Result<Body, TaskError> {
        let TranscribeContext { task, language, format, wants_word_times, decoded, has_unmarked_end, .. } =
            context;
        let first_language = outputs.first().and_then(|first| first.language);
        let mut segments: Vec<Segment> =
            outputs.iter().flat_map(|output| self.segments(output, task)).collect();
        // The windows of several channels overlap, so their segments are not in order yet.
        segments.sort_by(|one, other| one.start.total_cmp(&other.start));
        let transcript = Transcript {
            task,
            language: language.or_else(|| self.tokens.code(first_language)),
            seconds: decoded.seconds(),
            // The windows hold what voice detection kept. Silent windows are not among them.
            speech_seconds: outputs.iter().map(|output| output.place.seconds).sum(),
            segments,
            wants_word_times,
            has_unmarked_end,
            has_silent_mix: decoded.has_silent_mix(),
        };
        transcript.body(format)
    }
}
