//! Speech synthesis: turns requests into sentences of phonemes, and the sound of sentences into files. Sentences are
//! independent of each other, so that those of different tasks can share a batch. Only `load` and `network` use the
//! device.

mod network;
mod options;
mod sentences;

use self::network::{Sentence, Sound, Speaker};
use self::options::Options;
use super::names::ServedNames;
use crate::model::family::{Example, Family, FileRules, Sample, Serves};
use crate::model::load::{ModelFiles, weights};
use crate::model::nets::hibari::Hibari;
use crate::model::nets::hibari::config::{HibariConfig, MODEL_TYPE, Voice};
use crate::model::random::{Seed, seed_of_task};
use crate::model::{
    Body, Device, Inputs, LoadError, LoadSpec, Message, Preprocessed, Processor, Route, SizedInput,
    Streaming, TaskError, TaskErrorKind,
};
use crate::protocol::shorten;
use crate::protocol::speech::{
    ListedVoice, SPEECH_URL, SoundFormat, SpeechRequest, Spoken, VOICES_URL, read_voices_request,
    write_sound, write_voices,
};

/// The frames that a symbol takes on average at speed 1: 85 ms. A sentence's size is computed with it, since its true
/// length is known only after the network's first part.
const FRAMES_PER_SYMBOL: f32 = 7.0;

/// Models that speak.
pub static FAMILY: Family = Family {
    name: "speak",
    routes: &[Route::json(SPEECH_URL), Route::json(VOICES_URL)],
    serves: Serves::Files(FileRules {
        configs: &[MODEL_TYPE],
        ggufs: &[],
        pipelines: &[],
        accepts: |_| true,
        request_files,
        check,
    }),
    options: &options::OPTIONS,
    sample,
    example: Example { model: "tiny-hibari", options: &[("max_seconds", 60)] },
};

/// A task with a sentence for each text. It has phonemes that every voice has, as many as the text has characters.
fn sample(texts: &[String]) -> Sample {
    let phonemes = |text: &String| "həlˈo wˈʌn, ".chars().cycle().take(text.chars().count().max(1)).collect();
    Sample::of_texts(SPEECH_URL, "phonemes", &texts.iter().map(phonemes).collect::<Vec<String>>())
}

fn request_files(files: &ModelFiles) -> Result<(), LoadError> {
    let config: HibariConfig = files.required_json("config.json")?;
    config.voices.iter().try_for_each(|voice| files.required(&weights_of(voice)).map(drop))
}

fn check(spec: &LoadSpec) -> Result<(), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = HibariConfig::read(&files, spec)?;
    Options::read(spec)?;
    let paths = config.voices.iter().map(|voice| files.required(&weights_of(voice)));
    weights::check(&paths.collect::<Result<Vec<_>, _>>()?)
}

/// The file with a voice's weights.
fn weights_of(voice: &Voice) -> String {
    format!("{}.safetensors", voice.id)
}

/// Loads a model that speaks.
///
/// # Errors
/// [`LoadError`] for a file that is missing or invalid, an unknown option, and a device or precision that is not
/// supported.
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(SpeechProcessor, Speaker), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = HibariConfig::read(&files, spec)?;
    let options = Options::read(spec)?;
    let load = |voice: &Voice| {
        let path = files.required(&weights_of(voice))?;
        Hibari::load(spec, device, &config, path)
    };
    let voices = config.voices.iter().map(load).collect::<Result<_, _>>()?;
    let speaker = Speaker::new(voices, &config);
    Ok((
        SpeechProcessor { names: ServedNames::new(spec), config, options, max_inputs: spec.max_inputs },
        speaker,
    ))
}

/// Turns requests into sentences, and their sound into replies.
pub struct SpeechProcessor {
    names: ServedNames,
    config: HibariConfig,
    options: Options,
    /// The most sentences of a task.
    max_inputs: usize,
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
    },
}

impl SpeechProcessor {
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

    /// The ids of a sentence's symbols, with 0 before and after them.
    fn ids(&self, phonemes: &str, path: &str) -> Result<Vec<u32>, TaskError> {
        let mut ids = vec![0];
        for symbol in phonemes.chars() {
            let id = self.config.vocabulary.get(&symbol).ok_or_else(|| {
                let shown = shorten(phonemes, 80);
                TaskError::bad_input(
                    path,
                    format!("{path} has {symbol:?}, which is no phoneme of this model: {shown:?}"),
                )
            })?;
            ids.push(*id);
        }
        ids.push(0);
        Ok(ids)
    }

    /// The sentences of a request, as phonemes that the network takes at once.
    fn sentences(&self, request: &SpeechRequest) -> Result<Vec<Vec<u32>>, TaskError> {
        let mut all = Vec::new();
        match &request.input {
            Spoken::Text(_) => {
                let message = "this model speaks phonemes only: send phonemes in the place of input";
                return Err(TaskError::bad_input("input", message));
            }
            Spoken::Phonemes(sentences) => {
                let is_alone = sentences.len() == 1;
                for (index, phonemes) in sentences.iter().enumerate() {
                    let path = if is_alone { "phonemes".to_owned() } else { format!("phonemes[{index}]") };
                    for part in sentences::cut(phonemes) {
                        all.push(self.ids(part, &path)?);
                    }
                }
            }
        }
        let symbols: usize = all.iter().map(|ids| ids.len()).sum();
        let seconds =
            self.frames(symbols, request.speed) * self.config.hop as f32 / self.config.sample_rate as f32;
        let most = self.options.max_seconds;
        if seconds > most {
            let message = format!(
                "its {symbols} phonemes would take about {seconds:.0} s to speak, and {most:.0} s are allowed \
                 (max_seconds)"
            );
            return Err(TaskError::new(TaskErrorKind::TooLarge, message));
        }
        if all.len() > self.max_inputs {
            let (count, most) = (all.len(), self.max_inputs);
            let message = format!("it has {count} sentences; this pool takes at most {most} inputs");
            return Err(TaskError::new(TaskErrorKind::TooLarge, message));
        }
        Ok(all)
    }

    /// The frames that so many symbols take on average.
    fn frames(&self, symbols: usize, speed: f32) -> f32 {
        symbols as f32 * FRAMES_PER_SYMBOL / speed
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
        // Each vowel and consonant of the vocabulary, as far as there is room in one sentence.
        let symbols = self.config.vocabulary.keys().filter(|symbol| symbol.is_alphabetic());
        let phonemes: String = symbols.take(40).collect();
        let body = serde_json::json!({ "phonemes": phonemes, "seed": 0 }).to_string();
        Some(Message { body: body.into(), ..Message::default() })
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        if message.url() == Some(VOICES_URL) {
            self.names.check(read_voices_request(&message.body)?.as_deref())?;
            return Ok((SpeechContext::Voices, Vec::new().into()));
        }
        let request = SpeechRequest::parse(&message.body, self.max_inputs)?;
        self.names.check(request.model.as_deref())?;
        let voice = self.voice(request.voice.as_deref())?;
        let task = request.seed.unwrap_or_else(|| seed_of_task(self.options.seed, &message.properties));
        let speed = request.speed;
        let sized = |(index, ids): (usize, Vec<u32>)| {
            let tokens = self.frames(ids.len(), speed).ceil() as usize;
            let seed = Seed { task, sequence: index as u64 };
            SizedInput::new(Sentence { voice, ids, speed, seed }, tokens)
        };
        let inputs: Vec<_> = self.sentences(&request)?.into_iter().enumerate().map(sized).collect();
        let context = SpeechContext::Sound { format: request.format, stream: request.stream };
        Ok((context, Inputs::All(inputs)))
    }

    fn streaming(&self, context: &SpeechContext) -> Streaming {
        Streaming::Outputs.if_requested(matches!(context, SpeechContext::Sound { stream: true, .. }))
    }

    fn output_parts(&self, context: &mut SpeechContext, sentence: usize, sound: &Sound) -> Vec<Body> {
        let SpeechContext::Sound { format, .. } = context else { return Vec::new() };
        let part = write_sound(&sound.samples, self.config.sample_rate, *format);
        // What cannot be written is reported with the whole reply.
        part.map(|body| body.header("sentence", sentence as i64)).into_iter().collect()
    }

    fn finish(&self, context: SpeechContext, sounds: Vec<Sound>) -> Result<Body, TaskError> {
        match context {
            SpeechContext::Voices => {
                let voices = self.config.voices.iter();
                let listed = voices.map(|Voice { id, name, language }| ListedVoice { id, name, language });
                write_voices(&listed.collect::<Vec<_>>())
            }
            SpeechContext::Sound { format, .. } => {
                let samples: Vec<i16> = sounds.into_iter().flat_map(|sound| sound.samples).collect();
                write_sound(&samples, self.config.sample_rate, format)
            }
        }
    }
}
