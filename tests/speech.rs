//! Speech synthesis: hibari's network and the synthesis held against onnxruntime and the package's own
//! (`scripts/make-hibari-fixtures.py`), and against themselves: a sentence's sound is the same to the bit in any
//! company.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use sconce::model::load::ModelFiles;
use sconce::model::nets::hibari::config::HibariConfig;
use sconce::model::nets::hibari::{Decoded, Hibari, SPECTRA, Symbols};
use sconce::model::random::Seed;
use sconce::model::sound::synthesis::{Frames, Synthesizer};
use sconce::model::{Device, LoadSpec};

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
        let weights = path(folder).join(format!("{voice}.safetensors"));
        assert!(weights.is_file(), "{} is missing: run scripts/fetch-hibari", weights.display());
        let spec = LoadSpec::new(path(folder).to_str().expect("a path in UTF-8"));
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
        let mut sound = vec![0.0; synthesizer.room(pitch.len())];
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
