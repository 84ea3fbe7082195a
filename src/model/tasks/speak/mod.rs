//! Speech synthesis: turns requests into sentences of phonemes, and the sound of sentences into files. Sentences are
//! independent of each other: sentences of different tasks can share a batch. Only `load` and `network` use the device.

mod body;
mod network;
mod options;
mod pronunciations;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use sconce_phonemes::{Memory, parts};

pub use self::body::VOICES_URL;
use self::body::{
    KEYS, ListedVoice, SoundFormat, SpeechRequest, Spoken, read_voices_request, write_sound, write_voices,
};
use self::network::{DURATION_SLACK, SoundLimit};
pub use self::network::{Sentence, Sound, Speaker};
use self::options::Options;
use self::pronunciations::Pronunciations;
use super::names::ServedNames;
use crate::model::family::{Example, Family, FileRules, Sample, Serves};
use crate::model::load::{ModelFiles, weights};
use crate::model::nets::hibari::config::{HibariConfig, MODEL_TYPE, Voice};
use crate::model::nets::hibari::{Hibari, check_dtype};
use crate::model::random::{Seed, seed_of_task};
use crate::model::{
    Body, Device, Inputs, LoadError, LoadSpec, Message, Preprocessed, Processor, Route, SizedInput,
    Streaming, TaskError, TaskErrorKind,
};
use crate::protocol::endpoints::SPEECH_URL;
use crate::protocol::shorten;

/// Number of frames of 12.5 ms that is assumed for a symbol at speed 1, by which batches and memory are planned: the true
/// number is known only after the network's first part. It is 4.6 on average; 7 leaves room for slow sentences.
const FRAMES_PER_SYMBOL: f32 = 7.0;

/// Average duration of a phoneme of English prose at speed 1, in seconds, by which `max_seconds` is checked before
/// anything is computed. The true duration is checked with each sentence.
const SECONDS_PER_PHONEME: f32 = 0.058;
/// The shortest duration of a sentence at speed 1, in seconds: one symbol between silences.
const MIN_SENTENCE_SECONDS: f32 = 0.42;

/// Maximum number of symbols in a sentence at speed 1 and above: 23 s of sound on average, 35 s at the assumed number of
/// frames. At lower speeds it is smaller in proportion, because the sound is longer. Longer sentences are cut.
const MAX_SYMBOLS: f32 = 400.0;
/// Average duration of a character of English at speed 1, in seconds, for texts whose phonemes are not known yet.
const SECONDS_PER_CHARACTER: f32 = 0.065;
/// The largest number of characters at speed 1 whose FLAC file is compressed on the usual threads: 13 s of sound, about 9
/// ms. Longer ones go to the thread for long work.
const SHORT_FLAC_CHARACTERS: f32 = 200.0;
/// The size of the longest text, in bytes, whose phonemes are found on the usual threads: less than 1 ms, or about 13 ms if
/// all of its words are unknown. Longer ones go to a separate thread, where requesters take turns.
const SHORT_TEXT_BYTES: usize = 1 << 8;

/// Models that speak.
pub static FAMILY: Family = Family {
    name: "speak",
    routes: &[Route::json(SPEECH_URL), Route::json(VOICES_URL)],
    fields: &[(SPEECH_URL, &KEYS)],
    serves: Serves::Files(FileRules { configs: &[MODEL_TYPE], ..FileRules::new(request_files, check) }),
    options: &options::OPTIONS,
    sample,
    example: Example { model: "tiny-hibari", options: &[("max_seconds", 60)] },
};

/// For `sconce bench`: a task with a sentence for each text, which has as many phonemes as the text has characters. The
/// phonemes are some that every model has.
fn sample(texts: &[String]) -> Sample {
    let phonemes = |text: &String| "həlˈo wˈʌn, ".chars().cycle().take(text.chars().count().max(1)).collect();
    Sample::of_texts(SPEECH_URL, "phonemes", &texts.iter().map(phonemes).collect::<Vec<String>>())
}

/// Requests every file that loading may read.
fn request_files(files: &ModelFiles) -> Result<(), LoadError> {
    let config: HibariConfig = files.required_json("config.json")?;
    config.voices.iter().try_for_each(|voice| files.required(&weights_file(voice)).map(drop))?;
    Pronunciations::request_files(files)
}

fn check(spec: &LoadSpec) -> Result<(), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = HibariConfig::read(&files, spec)?;
    Options::read(spec)?;
    check_dtype(spec, config.decoder)?;
    let paths = config.voices.iter().map(|voice| files.required(&weights_file(voice)));
    weights::check(&paths.collect::<Result<Vec<_>, _>>()?)
}

/// The name of the file with a voice's weights.
fn weights_file(voice: &Voice) -> String {
    format!("{}.safetensors", voice.id)
}

/// Loads a model that speaks.
///
/// # Errors
/// [`LoadError`] for a file that is missing or invalid, an unknown option, and a device or number format that is not
/// supported.
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(SpeechProcessor, Speaker), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = HibariConfig::read(&files, spec)?;
    let options = Options::read(spec)?;
    let load = |voice: &Voice| {
        let path = files.required(&weights_file(voice))?;
        Hibari::load(spec, device, &config, path)
    };
    let voices = config.voices.iter().map(load).collect::<Result<_, _>>()?;
    let speaker = Speaker::new(voices, &config);
    let planner = Planner {
        pronunciations: Pronunciations::load(&files, &config)?,
        config,
        max_seconds: options.max_seconds,
        max_sentences: spec.max_inputs,
    };
    Ok((
        SpeechProcessor { names: ServedNames::new(spec), planner: Arc::new(planner), seed: options.seed },
        speaker,
    ))
}

/// Turns requests into sentences, and their sound into replies.
pub struct SpeechProcessor {
    names: ServedNames,
    planner: Arc<Planner>,
    /// The pool's seed.
    seed: u64,
}

/// What the reply needs of its request.
pub enum SpeechContext {
    /// A request for the list of voices.
    Voices,
    /// A request for sound.
    Sound {
        /// The form of the sound.
        format: SoundFormat,
        /// Whether each sentence is a part of the reply.
        stream: bool,
        /// The field of the request that holds what is spoken.
        field: &'static str,
        /// Whether writing the file takes long.
        is_slow: bool,
    },
}

/// Divides what is spoken into sentences. Shared by threads.
struct Planner {
    config: HibariConfig,
    pronunciations: Pronunciations,
    /// Maximum duration of a task's sound, in seconds.
    max_seconds: f32,
    /// Maximum number of sentences of a task.
    max_sentences: usize,
}

/// Parameters with which all sentences of a task are spoken.
#[derive(Clone, Copy)]
struct SpeechParameters {
    /// The index of the voice.
    voice: usize,
    speed: f32,
    /// The task's seed.
    seed: u64,
}

impl SpeechParameters {
    fn max_symbols(self) -> usize {
        (MAX_SYMBOLS * self.speed.min(1.0)) as usize
    }
}

impl Planner {
    /// The index of the voice with this name; the first voice without a name.
    fn voice(&self, requested: Option<&str>) -> Result<usize, TaskError> {
        let Some(requested) = requested else { return Ok(0) };
        let voices = &self.config.voices;
        voices.iter().position(|voice| voice.id == requested).ok_or_else(|| {
            let known: Vec<&str> = voices.iter().map(|voice| voice.id.as_str()).collect();
            let known = known.join(", ");
            TaskError::bad_input(
                "voice",
                format!("voice is {requested:?}; this model has the voices {known}"),
            )
        })
    }

    /// Refuses what would take too long to speak, by its length alone.
    fn check_length(&self, spoken: &Spoken, speed: f32) -> Result<(), TaskError> {
        let (seconds_per_character, unit) = match spoken {
            Spoken::Text(_) => (SECONDS_PER_CHARACTER, "characters"),
            Spoken::Phonemes(_) => (SECONDS_PER_PHONEME, "phonemes"),
        };
        let count = spoken.characters();
        let seconds = count as f32 * seconds_per_character / speed;
        self.check_seconds(seconds, &format!("{count} {unit}"))
            .map_err(|error| error.with_param(spoken.field()))
    }

    fn check_seconds(&self, seconds: f32, what: &str) -> Result<(), TaskError> {
        let max = self.max_seconds;
        if seconds <= max {
            return Ok(());
        }
        let message = format!(
            "the task's {what} would take about {seconds:.0} s to speak, and {max:.0} s are allowed (max_seconds)"
        );
        Err(TaskError::new(TaskErrorKind::TooLarge, message))
    }

    /// The sentences of a task.
    fn sentences(
        &self,
        spoken: &Spoken,
        parameters: SpeechParameters,
    ) -> Result<Vec<SizedInput<Sentence>>, TaskError> {
        let all_ids = match spoken {
            Spoken::Text(text) => self.ids_of_text(text, parameters)?,
            Spoken::Phonemes(sentences) => self.ids_of_phonemes(sentences, parameters)?,
        };
        if all_ids.len() > self.max_sentences {
            let (count, max) = (all_ids.len(), self.max_sentences);
            let message =
                format!("the task has {count} sentences; this pool takes at most {max} inputs (max_inputs)");
            return Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param(spoken.field()));
        }
        let symbols: usize = all_ids.iter().map(Vec::len).sum();
        let of_sentence = |ids: &Vec<u32>| (ids.len() as f32 * SECONDS_PER_PHONEME).max(MIN_SENTENCE_SECONDS);
        let seconds = all_ids.iter().map(of_sentence).sum::<f32>() / parameters.speed;
        let what = format!("{symbols} phonemes in {} sentences", all_ids.len());
        let check = self.check_seconds(seconds, &what);
        check.map_err(|error| error.with_param(spoken.field()))?;
        let limit = Arc::new(SoundLimit {
            seconds: self.max_seconds * DURATION_SLACK,
            field: spoken.field(),
            samples: AtomicUsize::default(),
        });
        let sized = |(index, ids): (usize, Vec<u32>)| {
            let frames = self.frames(ids.len(), parameters.speed);
            let seed = Seed { task: parameters.seed, sequence: index as u64 };
            let SpeechParameters { voice, speed, .. } = parameters;
            SizedInput::new(Sentence { voice, ids, speed, seed, limit: limit.clone() }, frames)
        };
        Ok(all_ids.into_iter().enumerate().map(sized).collect())
    }

    /// The ids of the symbols of each sentence.
    fn ids_of_text(&self, text: &str, parameters: SpeechParameters) -> Result<Vec<Vec<u32>>, TaskError> {
        let pronunciation = self.pronunciations.for_voice(&self.config.voices[parameters.voice]).ok_or_else(|| {
            let message = "this model's folder has no pronunciation (g2p), so that it speaks phonemes only: send phonemes \
                           in the place of input";
            TaskError::bad_input("input", message)
        })?;
        let mut memory = Memory::default();
        let mut all = Vec::new();
        for sentence in pronunciation.sentences(text) {
            let phonemes = pronunciation.of_sentence_with(sentence, &mut memory);
            // Phonemes for which the model has no symbol are not spoken.
            let known: String =
                phonemes.chars().filter(|symbol| self.config.vocabulary.contains_key(symbol)).collect();
            for part in parts(&known, parameters.max_symbols()) {
                all.push(self.ids(part, "input")?);
            }
        }
        Ok(all)
    }

    /// The ids of the symbols of each sentence, from its phonemes.
    fn ids_of_phonemes(
        &self,
        sentences: &[String],
        parameters: SpeechParameters,
    ) -> Result<Vec<Vec<u32>>, TaskError> {
        let mut all = Vec::new();
        for (index, phonemes) in sentences.iter().enumerate() {
            let path =
                if sentences.len() == 1 { "phonemes".to_owned() } else { format!("phonemes[{index}]") };
            for part in parts(phonemes, parameters.max_symbols()) {
                all.push(self.ids(part, &path)?);
            }
        }
        Ok(all)
    }

    /// The ids of a sentence's symbols, with 0 before and after them.
    fn ids(&self, phonemes: &str, path: &str) -> Result<Vec<u32>, TaskError> {
        let mut ids = vec![0];
        for symbol in phonemes.chars() {
            let id = self.config.vocabulary.get(&symbol).ok_or_else(|| {
                let excerpt = shorten(phonemes, 80);
                let message =
                    format!("{path} has {symbol:?}, which is no phoneme of this model: {excerpt:?}");
                TaskError::bad_input(path, message)
            })?;
            ids.push(*id);
        }
        ids.push(0);
        Ok(ids)
    }

    /// The estimated number of frames for this many symbols.
    fn frames(&self, symbols: usize, speed: f32) -> usize {
        (symbols as f32 * FRAMES_PER_SYMBOL / speed).ceil() as usize
    }
}

impl Processor for SpeechProcessor {
    type Context = SpeechContext;
    type Input = Sentence;
    type Piece = ();
    type Output = Sound;

    fn routes(&self) -> &[Route] {
        FAMILY.routes
    }

    fn probe(&self) -> Option<Message> {
        // Forty letters of the phoneme alphabet are enough to run every part of the network.
        let symbols = self.planner.config.vocabulary.keys().filter(|symbol| symbol.is_alphabetic());
        let phonemes: String = symbols.take(40).collect();
        let body = serde_json::json!({ "phonemes": phonemes, "seed": 0 }).to_string();
        Some(Message { body: body.into(), ..Message::default() })
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        if message.url() == Some(VOICES_URL) {
            self.names.check(read_voices_request(&message.body)?.as_deref())?;
            return Ok((SpeechContext::Voices, Vec::new().into()));
        }
        let planner = self.planner.clone();
        let SpeechRequest { input, model, voice, speed, format, stream, seed } =
            SpeechRequest::parse(&message.body, planner.max_sentences)?;
        self.names.check(model.as_deref())?;
        let voice = planner.voice(voice.as_deref())?;
        let seed = seed.unwrap_or_else(|| seed_of_task(self.seed, &message.properties));
        let parameters = SpeechParameters { voice, speed, seed };
        planner.check_length(&input, speed)?;
        let field = input.field();
        let is_long = matches!(&input, Spoken::Text(text) if text.len() > SHORT_TEXT_BYTES);
        let usual_pace_characters = input.characters() as f32 / speed;
        let is_slow = format == SoundFormat::Flac && usual_pace_characters > SHORT_FLAC_CHARACTERS;
        let context = SpeechContext::Sound { format, stream, field, is_slow };
        let sentences = move || planner.sentences(&input, parameters);
        let inputs = if is_long {
            Inputs::Later(Box::new(move || sentences().map(Inputs::All)))
        } else {
            Inputs::All(sentences()?)
        };
        Ok((context, inputs))
    }

    /// The expected size of the sentence's sound. While the sentences that wait have `pool.prepared_bytes` together, the
    /// worker prepares no further task. This bounds the sound that it will hold.
    fn bytes(&self, sentence: &Sentence) -> usize {
        let frames = self.planner.frames(sentence.ids.len(), sentence.speed);
        frames * self.planner.config.hop * size_of::<i16>()
    }

    fn streaming(&self, context: &SpeechContext) -> Streaming {
        Streaming::Outputs.if_requested(matches!(context, SpeechContext::Sound { stream: true, .. }))
    }

    fn output_parts(&self, context: &mut SpeechContext, sentence: usize, sound: &Sound) -> Vec<Body> {
        let SpeechContext::Sound { format, .. } = context else { return Vec::new() };
        let part = write_sound(&sound.samples, self.planner.config.sample_rate, *format);
        // An error is reported by `finish`, which writes the whole reply.
        part.map(|body| body.header("sentence", sentence as i64)).into_iter().collect()
    }

    fn is_finish_slow(&self, context: &SpeechContext) -> bool {
        matches!(context, SpeechContext::Sound { is_slow: true, .. })
    }

    fn finish(&self, context: SpeechContext, sounds: Vec<Sound>) -> Result<Body, TaskError> {
        let HibariConfig { voices, sample_rate, .. } = &self.planner.config;
        match context {
            SpeechContext::Voices => {
                let listed =
                    voices.iter().map(|Voice { id, name, language }| ListedVoice { id, name, language });
                write_voices(&listed.collect::<Vec<_>>())
            }
            SpeechContext::Sound { field, .. } if sounds.is_empty() => {
                Err(TaskError::bad_input(field, format!("{field} has nothing that can be spoken")))
            }
            SpeechContext::Sound { format, .. } => {
                let samples: Vec<i16> = sounds.into_iter().flat_map(|sound| sound.samples).collect();
                write_sound(&samples, *sample_rate, format)
            }
        }
    }
}
