//! Whisper's networks, held against what transformers computes with the same weights
//! (`scripts/make-whisper-fixtures.py`), and against themselves: a window's numbers are the same to the bit in any
//! company.

use std::io::Cursor;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use sconce::model::load::ModelFiles;
use sconce::model::nets::whisper::config::{POSITIONS, WhisperConfig};
use sconce::model::nets::whisper::{Span, Whisper};
use sconce::model::sound::decode::{Channels, Limits, Recording};
use sconce::model::sound::features::LogMel;
use sconce::model::{Device, LoadSpec};

/// The folders of models, each with the folder of its fixtures and the token that begins a text.
const MODELS: [(&str, &str, u32); 2] = [
    ("tests/fixtures/whisper-random", "tests/fixtures/whisper-random", 301),
    ("models/whisper-tiny.en", "tests/fixtures/whisper-tiny.en", 50_257),
];
const READING: &str = "tests/fixtures/sound/reading.flac";
/// The most difference of numbers from those of transformers.
const TOLERANCE: f32 = 1e-3;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn reading() -> Vec<f32> {
    let file = Cursor::new(bytes(READING));
    let mut recording = Recording::open(file, Limits::of_seconds(60.0), Channels::Mix).expect("sound");
    let mut samples = Vec::new();
    while let Some(block) = recording.next_block().expect("sound") {
        samples.extend_from_slice(&block[0]);
    }
    samples
}

fn numbers<T>(tensors: &SafeTensors<'_>, name: &str, read: fn([u8; 4]) -> T) -> Vec<T> {
    let data = tensors.tensor(name).expect("a tensor").data();
    data.as_chunks::<4>().0.iter().map(|bytes| read(*bytes)).collect()
}

/// A network with four slots, and the features of the reading for it.
fn network(model: &str) -> (Whisper, Vec<f32>) {
    assert!(path(model).join("model.safetensors").is_file(), "{model} is missing: run scripts/fetch-whisper");
    let spec = LoadSpec::new(path(model).to_str().expect("a path in UTF-8"));
    let files = ModelFiles::locate(&spec.source).expect("files");
    let config = WhisperConfig::read(&files, &spec.source).expect("a configuration");
    let network = Whisper::load(&spec, &Device::Cpu, &config, 4).unwrap_or_else(|error| panic!("{error}"));
    (network, LogMel::new(config.mels).features(&reading()))
}

fn worst(found: impl Iterator<Item = f32>, expected: &[f32]) -> f32 {
    let off = found.zip(expected).map(|(found, expected)| (found - expected).abs());
    // `f32::max` would drop NaN.
    off.fold(0.0, |most, off| if off > most || off.is_nan() { off } else { most })
}

#[test]
fn the_encoder_and_the_first_step_give_the_numbers_of_transformers() {
    for (model, fixtures, start) in MODELS {
        let (mut network, features) = network(model);
        let data = bytes(&format!("{fixtures}/numbers.safetensors"));
        let tensors = SafeTensors::deserialize(&data).expect("tensors");
        let encoded = network.encoder.forward(&[&features]).expect("an encoded window");
        let width = encoded.len() / POSITIONS;
        let places = numbers(&tensors, "positions", i32::from_le_bytes);
        let rows = places.iter().flat_map(|at| encoded[*at as usize * width..][..width].iter().copied());
        let off = worst(rows, &numbers(&tensors, "encoded", f32::from_le_bytes));
        assert!(off < TOLERANCE, "{model}: {off}");
        network.decoder.hold(2, &encoded);
        let mut logits = Vec::new();
        network.decoder.forward(&[start], &[Span { slot: 2, first: 0, count: 1 }], &[0], &mut logits);
        let ids = numbers(&tensors, "ids", i32::from_le_bytes);
        let off = worst(
            ids.iter().map(|id| logits[*id as usize]),
            &numbers(&tensors, "logits", f32::from_le_bytes),
        );
        assert!(off < TOLERANCE, "{model}: {off}");
    }
}

#[test]
fn windows_and_tokens_have_the_same_bits_in_any_company() {
    for (model, _, start) in MODELS {
        let (mut network, features) = network(model);
        let other: Vec<f32> = features.iter().rev().copied().collect();
        let alone = network.encoder.forward(&[&features]).expect("an encoded window");
        let together = network.encoder.forward(&[&other, &features, &other]).expect("encoded windows");
        let [first, second, third] = [0, 1, 2].map(|at| &together[at * alone.len()..(at + 1) * alone.len()]);
        assert!(second == alone && first == third && first != second, "{model}");
        for (slot, encoded) in [first, second, third].into_iter().enumerate() {
            network.decoder.hold(slot, encoded);
        }
        let ids = [start, 5, 6, 7, 8, 9, 10, 11, 12, 13];
        let mut forward = |ids: &[u32], spans: &[Span], wanted: &[usize]| {
            let mut logits = Vec::new();
            network.decoder.forward(ids, spans, wanted, &mut logits);
            logits
        };
        let span = |slot, first, count| Span { slot, first, count };
        let whole = forward(&ids, &[span(1, 0, 10)], &[9]);
        // One by one, beside others.
        let mut last = Vec::new();
        for (position, id) in ids.iter().enumerate() {
            let beside = [*id, start, 3, *id];
            let spans = [span(0, position, 1), span(2, 0, 2), span(1, position, 1)];
            last = forward(&beside, &spans, &[3]);
        }
        assert!(last == whole, "{model}");
        // A slot that was released holds another window.
        network.decoder.release(1);
        network.decoder.hold(1, first);
        let mut logits = [Vec::new(), Vec::new()];
        for (slot, logits) in logits.iter_mut().enumerate() {
            network.decoder.forward(&ids, &[span(slot, 0, 10)], &[9], logits);
        }
        assert!(logits[0] == logits[1] && logits[0] != whole, "{model}");
    }
}
