//! Speech synthesis: hibari's network and the synthesis held against onnxruntime and the package's own
//! (`scripts/make-hibari-fixtures.py`), and against themselves: a sentence's sound is the same to the bit in any
//! company.

use std::io::Cursor;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use sconce::model::load::ModelFiles;
use sconce::model::nets::hibari::config::HibariConfig;
use sconce::model::nets::hibari::{Decoded, Hibari, Symbols};
use sconce::model::random::Seed;
use sconce::model::sound::decode::{Channels, Limits, Recording};
use sconce::model::sound::synthesis::{Frames, SPECTRA, Synthesizer};
use sconce::model::tasks::speak::{self, Sentence, Speaker, SpeechProcessor, VOICES_URL};
use sconce::model::{Device, Dtype, Forward as _, LoadSpec, Processor as _};
use sconce::protocol::endpoints::SPEECH_URL;
use sconce::protocol::{Body, Headers, Message, Properties, TaskError, TaskErrorKind};
use serde_json::{Value, json};

/// The most difference of numbers from those of the reference.
const TOLERANCE: f32 = 1e-3;
/// Every so many numbers of a spectrum are in the fixtures.
const SPECTRUM_STEP: usize = 97;
/// The task's seed in the fixtures.
const SEED: u64 = 7;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// The sentences of the fixtures: the voice, the key of the expected numbers, the phonemes, speed, and the sentence's
/// number.
const TINY: [(&str, &str, &str, f32, u64); 2] =
    [("one", "one", "həlˈo, wˈʌn?", 1.0, 3), ("two", "two", "həlˈo, wˈʌn?", 1.0, 3)];
const REAL: [(&str, &str, &str, f32, u64); 3] = [
    ("heart", "hello", "həlˈO ðˈɛɹ.", 1.0, 0),
    ("heart", "fox", "ðə kwˈɪk bɹˈWn fˈɑks ʤˈʌmps ˌOvəɹ ðə lˈAzi dˈɔɡ, ænd ɹˈʌnz əwˈA.", 1.0, 0),
    ("heart", "slow", "jˈɛs.", 0.5, 0),
];

struct Model {
    config: HibariConfig,
    voice: Hibari,
}

impl Model {
    fn load(folder: &str, voice: &str) -> Self {
        Self::load_as(folder, voice, Dtype::F32)
    }

    fn load_as(folder: &str, voice: &str, dtype: Dtype) -> Self {
        let weights = path(folder).join(format!("{voice}.safetensors"));
        assert!(weights.is_file(), "{} is missing: run scripts/fetch-hibari", weights.display());
        let spec = LoadSpec { dtype, ..LoadSpec::new(path(folder).to_str().expect("a path in UTF-8")) };
        let files = ModelFiles::locate(&spec.source).expect("files");
        let config = HibariConfig::read(&files, &spec).expect("a configuration");
        let voice = Hibari::load(&spec, &Device::Cpu, &config, weights);
        Self { config, voice: voice.unwrap_or_else(|error| panic!("{error}")) }
    }

    fn ids(&self, phonemes: &str) -> Vec<u32> {
        let ids = phonemes.chars().map(|symbol| self.config.vocabulary[&symbol]);
        std::iter::once(0).chain(ids).chain([0]).collect()
    }

    /// Decodes sentences, and gives the durations of their symbols in frames.
    fn decode(&self, sentences: &[(Vec<u32>, f32)]) -> Vec<Decoded> {
        let symbols: Vec<Symbols> =
            sentences.iter().map(|(ids, speed)| Symbols { ids, speed: *speed }).collect();
        let encoded = self.voice.encode(&symbols).expect("encoded sentences");
        self.voice.decode(&encoded, &vec![true; sentences.len()]).expect("decoded sentences")
    }

    fn spectra(&self, decoded: &Decoded) -> Vec<f32> {
        self.voice.spectra(decoded, 0, decoded.pitch.len()).expect("spectra")
    }

    fn sound(&self, pitch: &[f32], spectra: &[f32], sentence: u64) -> Vec<f32> {
        let synthesizer = Synthesizer::new(self.config.hop, self.config.sample_rate);
        let pulses = synthesizer.pulses(pitch);
        let mut sound = vec![0.0; synthesizer.buffer_len(pitch.len())];
        let seed = Seed { task: SEED, sequence: sentence };
        synthesizer.add(Frames { first: 0, spectra, seed }, &pulses, &mut sound);
        synthesizer.finish(&sound, pitch.len())
    }
}

fn worst(found: impl Iterator<Item = f32>, expected: impl Iterator<Item = f32>) -> f32 {
    let off = found.zip(expected).map(|(found, expected)| (found - expected).abs());
    // `f32::max` would drop NaN.
    off.fold(0.0, |most, off| if off > most || off.is_nan() { off } else { most })
}

fn is_the_reference(folder: &str, fixtures: &str, sentences: &[(&str, &str, &str, f32, u64)]) {
    let data = std::fs::read(path(fixtures).join("expected.safetensors")).expect("fixtures");
    let expected = SafeTensors::deserialize(&data).expect("tensors");
    let four = |name: &str| {
        let data = expected.tensor(name).expect("a tensor").data();
        data.as_chunks::<4>().0.to_vec()
    };
    for (voice, key, phonemes, speed, number) in sentences {
        let model = Model::load(folder, voice);
        let decoded = model.decode(&[(model.ids(phonemes), *speed)]).remove(0);
        let rows: i32 = four(&format!("{key}.durations")).into_iter().map(i32::from_le_bytes).sum();
        assert_eq!(decoded.pitch.len(), 2 * rows as usize, "{key}");
        let pitch: Vec<f32> = four(&format!("{key}.f0")).into_iter().map(f32::from_le_bytes).collect();
        // In the network's own unit, 100 Hz.
        let off = worst(decoded.pitch.iter().map(|x| x / 100.0), pitch.iter().map(|x| x / 100.0));
        assert!(off < TOLERANCE, "{key}: the pitch is off by {off}");
        let spectra = model.spectra(&decoded);
        let kept = four(&format!("{key}.spectra")).into_iter().map(f32::from_le_bytes);
        assert_eq!(spectra.len(), pitch.len() * SPECTRA * model.config.bins(), "{key}");
        let off = worst(spectra.iter().copied().step_by(SPECTRUM_STEP), kept);
        assert!(off < TOLERANCE, "{key}: the spectra are off by {off}");
        let data = expected.tensor(&format!("{key}.sound")).expect("a tensor").data();
        let samples =
            data.as_chunks::<2>().0.iter().map(|two| f32::from(i16::from_le_bytes(*two)) / 32_767.0);
        let sound = model.sound(&decoded.pitch, &spectra, *number);
        assert_eq!(sound.len(), data.len() / 2, "{key}");
        let off = worst(sound.iter().map(|x| x.clamp(-1.0, 1.0)), samples);
        assert!(off < TOLERANCE, "{key}: the sound is off by {off}");
    }
}

#[test]
fn a_tiny_random_model_gives_the_numbers_of_the_reference() {
    is_the_reference("tests/fixtures/tiny-hibari", "tests/fixtures/tiny-hibari", &TINY);
}

#[test]
fn the_real_voice_gives_the_numbers_of_onnxruntime_and_the_packages_sound() {
    is_the_reference("models/hibari", "tests/fixtures/hibari", &REAL);
}

#[test]
fn a_sentence_has_the_same_bits_in_any_company() {
    let model = Model::load("models/hibari", "heart");
    let sentence = (model.ids("həlˈO ðˈɛɹ."), 1.0);
    let other = (model.ids("ðə kwˈɪk bɹˈWn fˈɑks ʤˈʌmps."), 0.7);
    let alone = model.decode(std::slice::from_ref(&sentence)).remove(0);
    for (batch, at) in [(vec![other.clone(), sentence.clone()], 1), (vec![sentence, other.clone(), other], 0)]
    {
        let together = model.decode(&batch).remove(at);
        assert!(together.pitch == alone.pitch);
        assert!(model.spectra(&together) == model.spectra(&alone));
    }
}

#[test]
fn real_speech_is_neither_silent_nor_clipped_and_has_its_pitch() {
    let model = Model::load("models/hibari", "heart");
    let (_, _, phonemes, speed, _) = REAL[1];
    let decoded = model.decode(&[(model.ids(phonemes), speed)]).remove(0);
    let sound = model.sound(&decoded.pitch, &model.spectra(&decoded), 0);
    let loudest = sound.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    assert!((0.1..1.0).contains(&loudest), "{loudest}");
    // A woman's voice: the voiced frames lie between 120 and 330 Hz, and are most of the sentence.
    let voiced: Vec<f32> = decoded.pitch.iter().copied().filter(|hertz| *hertz > 40.0).collect();
    let mean = voiced.iter().sum::<f32>() / voiced.len() as f32;
    assert!(voiced.len() * 2 > decoded.pitch.len() && (120.0..330.0).contains(&mean), "{mean}");
}

#[test]
fn narrow_weights_keep_durations_and_pitch_and_change_the_sound_little() {
    let exact = Model::load("models/hibari", "heart");
    let (_, _, phonemes, speed, number) = REAL[1];
    let decoded = exact.decode(&[(exact.ids(phonemes), speed)]).remove(0);
    let sound = exact.sound(&decoded.pitch, &exact.spectra(&decoded), number);
    let power: f32 = sound.iter().map(|x| x * x).sum();
    // In decibels: 16 bits of a loud sound have 90, and 30 are still hard to hear beside speech.
    for (dtype, least) in [(Dtype::Bf16, 45.0), (Dtype::Int8, 32.0)] {
        let narrow = Model::load_as("models/hibari", "heart", dtype);
        let found = narrow.decode(&[(narrow.ids(phonemes), speed)]).remove(0);
        assert!(found.pitch == decoded.pitch, "{dtype:?}");
        let other = narrow.sound(&found.pitch, &narrow.spectra(&found), number);
        let error: f32 = sound.iter().zip(&other).map(|(x, y)| (x - y).powi(2)).sum();
        let decibels = 10.0 * (power / error).log10();
        assert!(decibels > least && decibels < 90.0, "{dtype:?}: {decibels} dB");
    }
}

/// A processor and its network.
fn load(folder: &str) -> (SpeechProcessor, Speaker) {
    load_for(folder, 64)
}

/// As [`load`], for tasks of at most `max_inputs` sentences.
fn load_for(folder: &str, max_inputs: usize) -> (SpeechProcessor, Speaker) {
    let spec = LoadSpec { max_inputs, ..LoadSpec::new(path(folder).to_str().expect("a path in UTF-8")) };
    speak::load(&spec, &Device::Cpu).unwrap_or_else(|error| panic!("{error}; run scripts/fetch-hibari"))
}

fn message(url: &str, body: &Value) -> Message {
    let headers = Headers::from([("url".to_owned(), url.into())]);
    let message_id = Some("task-1".to_owned());
    Message {
        properties: Properties { headers, message_id, ..Properties::default() },
        body: body.to_string().into(),
    }
}

/// Speaks: the parts, and the reply.
fn answer(
    (processor, network): &mut (SpeechProcessor, Speaker),
    body: &Value,
) -> Result<(Vec<Body>, Body), TaskError> {
    let (mut context, inputs) = processor.preprocess(&message(SPEECH_URL, body))?;
    let inputs = inputs.all()?;
    let batch: Vec<&Sentence> = inputs.iter().map(|sized| &sized.input).collect();
    let sounds = network.forward(&batch).expect("a batch").into_iter().collect::<Result<Vec<_>, _>>()?;
    let parts = sounds
        .iter()
        .enumerate()
        .flat_map(|(index, sound)| processor.output_parts(&mut context, index, sound));
    let parts = parts.collect();
    Ok((parts, processor.finish(context, sounds)?))
}

#[test]
fn joined_parts_are_the_whole_reply_and_each_is_a_file_of_its_own() {
    let mut model = load("models/hibari");
    let text = "Hello there. How are you today? It cost $12.";
    let of = |format: &str| json!({"input": text, "response_format": format, "stream": true});
    let (parts, whole) = answer(&mut model, &of("pcm")).unwrap();
    assert_eq!(parts.len(), 3);
    assert_eq!(parts.iter().flat_map(|part| part.bytes.to_vec()).collect::<Vec<_>>(), whole.bytes);
    assert_eq!(parts[2].headers["sentence"], Headers::from([("a".to_owned(), 2_i64.into())])["a"]);
    for (format, first) in [("wav", b"RIFF"), ("flac", b"fLaC")] {
        let (files, file) = answer(&mut model, &of(format)).unwrap();
        let samples = |file: &Body| {
            let source = Cursor::new(file.bytes.to_vec());
            let mut recording =
                Recording::open(source, Limits::of_seconds(60.0), Channels::Mix).expect("sound");
            let mut count = 0;
            while let Some(block) = recording.next_block().expect("sound") {
                count += block[0].len();
            }
            count
        };
        assert!(files.iter().chain([&file]).all(|file| file.bytes.starts_with(first)), "{format}");
        // The decoder resamples to 16 kHz.
        let (expected, found) = (whole.bytes.len() / 2 * 2 / 3, samples(&file));
        assert!(found.abs_diff(expected) < 64, "{format}: {found} samples, not {expected}");
        assert!(files.iter().map(samples).sum::<usize>().abs_diff(expected) < 200, "{format}");
    }
}

#[test]
fn the_same_seed_gives_the_same_sound_and_another_does_not() {
    let mut model = load("models/hibari");
    let mut sound = |body: Value| answer(&mut model, &body).unwrap().1.bytes;
    let of_task = sound(json!({"input": "Good morning."}));
    assert!(of_task == sound(json!({"input": "Good morning."})), "a redelivered task");
    let seeded = sound(json!({"input": "Good morning.", "seed": 1}));
    assert!(seeded == sound(json!({"input": "Good morning.", "seed": 1})) && seeded != of_task);
    assert_eq!(seeded.len(), of_task.len());
    let slow = sound(json!({"input": "Good morning.", "speed": 0.5})).len();
    assert!(slow > of_task.len() * 3 / 2 && slow < of_task.len() * 3, "{slow}");
}

#[test]
fn what_cannot_be_spoken_is_refused_by_name_and_value() {
    let mut model = load("models/hibari");
    for (body, field, part) in [
        (json!({"input": ""}), "input", "input has nothing that can be spoken"),
        (json!({"input": "😀 \u{1}"}), "input", "nothing that can be spoken"),
        (json!({"phonemes": " "}), "phonemes", "nothing that can be spoken"),
        (json!({"phonemes": ["həlˈO", "日"]}), "phonemes[1]", "'日', which is no phoneme"),
        (json!({"input": "a", "voice": "nobody"}), "voice", "this model has the voices heart"),
        (
            json!({"input": "a".repeat(100_000)}),
            "input",
            "the task's 100000 characters would take about 6500 s",
        ),
        (json!({"input": "a", "speed": 0}), "speed", "0.25 to 4"),
    ] {
        let error = answer(&mut model, &body).err().unwrap_or_else(|| panic!("{field} is taken"));
        assert!(error.message.contains(part), "{}", error.message);
        assert_eq!(error.param.as_deref(), Some(field), "{}", error.message);
    }
    let long = json!({"phonemes": "ˈæ ".repeat(5_000)});
    let error = answer(&mut model, &long).expect_err("it is too long");
    assert_eq!(error.kind, TaskErrorKind::TooLarge);
    // The silence around one symbol is longer than the symbol: together these last 722 s.
    let short_sentences = json!({"phonemes": vec!["ˈæ"; 1_724]});
    let error = answer(&mut load_for("models/hibari", 2_048), &short_sentences).expect_err("it is too long");
    assert!(error.message.contains("in 1724 sentences would take about 724 s"), "{}", error.message);
    assert!(error.message.contains("300 s are allowed (max_seconds)"), "{}", error.message);
    let word = answer(&mut model, &json!({"input": "a".repeat(4_000)})).unwrap();
    assert!(!word.1.bytes.is_empty(), "a word of 4,000 letters is spoken");
    let mut tiny = load("tests/fixtures/tiny-hibari");
    let error = answer(&mut tiny, &json!({"input": "Hello."})).expect_err("it has no pronunciation");
    assert!(error.message.contains("send phonemes"), "{}", error.message);
}

#[test]
fn a_task_ends_with_the_sentence_that_makes_its_sound_too_long() {
    let (processor, mut network) = load("models/hibari");
    let mut message = message(SPEECH_URL, &json!({"input": "Hello there, how are you today?"}));
    message.properties.message_id = Some("a".into());
    let (_, inputs) = processor.preprocess(&message).expect("a sentence");
    let inputs = inputs.all().expect("a sentence");
    let sentence = &inputs[0].input;
    let mut speak = || network.forward(&[sentence]).expect("a batch").remove(0);
    let samples = speak().expect("it is short").samples.len();
    // 300 s at 24 kHz, and a tenth more.
    let fitting = 330 * 24_000 / samples;
    sentence.limit.samples.store((fitting - 1) * samples, std::sync::atomic::Ordering::Relaxed);
    assert!(speak().is_ok());
    let error = speak().expect_err("it is too long");
    assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::TooLarge, Some("input")));
    assert!(error.message.contains("at most 330 s are allowed (1.1 × max_seconds)"), "{}", error.message);
}

#[test]
fn voices_are_listed_and_each_has_a_sound_of_its_own() {
    let mut tiny = load("tests/fixtures/tiny-hibari");
    for body in ["", "{}"] {
        let request = Message { body: body.as_bytes().to_vec().into(), ..message(VOICES_URL, &Value::Null) };
        let (context, inputs) = tiny.0.preprocess(&request).unwrap();
        assert!(inputs.all().unwrap().is_empty());
        let list: Value = serde_json::from_slice(&tiny.0.finish(context, Vec::new()).unwrap().bytes).unwrap();
        assert_eq!(list["voices"][1], json!({"id": "two", "name": "Two", "language": "en-GB"}));
    }
    let mut sound =
        |voice: &str| answer(&mut tiny, &json!({"phonemes": "həlˈo", "voice": voice})).unwrap().1.bytes;
    let (one, two) = (sound("one"), sound("two"));
    assert!(one != two);
    // A batch with both voices gives the same as each alone.
    let (processor, network) = &mut tiny;
    let mut inputs = Vec::new();
    for voice in ["two", "one"] {
        let request = message(SPEECH_URL, &json!({"phonemes": "həlˈo", "voice": voice}));
        inputs.extend(processor.preprocess(&request).unwrap().1.all().unwrap());
    }
    let batch: Vec<&Sentence> = inputs.iter().map(|sized| &sized.input).collect();
    let sounds = network.forward(&batch).unwrap();
    let samples = |bytes: &[u8]| {
        bytes[44..].as_chunks::<2>().0.iter().map(|two| i16::from_le_bytes(*two)).collect::<Vec<_>>()
    };
    for (sound, alone) in sounds.into_iter().zip([&two, &one]) {
        assert!(sound.unwrap().samples == samples(alone));
    }
}
