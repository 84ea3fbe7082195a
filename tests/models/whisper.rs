//! Whisper's networks, held against what transformers computes with the same weights
//! (`scripts/make-whisper-fixtures.py`), and against themselves: a window's numbers are the same to the bit in any
//! company.

use std::io::Cursor;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use sconce::model::load::ModelFiles;
use sconce::model::nets::whisper::config::{POSITIONS, WhisperConfig};
use sconce::model::nets::whisper::{DeviceWhisper, HostWhisper, Span, Whisper};
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
fn network(model: &str) -> (HostWhisper, Vec<f32>) {
    assert!(path(model).join("model.safetensors").is_file(), "{model} is missing: run scripts/fetch-whisper");
    let spec = LoadSpec::new(path(model).to_str().expect("a path in UTF-8"));
    let files = ModelFiles::locate(&spec.source).expect("files");
    let config = WhisperConfig::read(&files, &spec.source).expect("a configuration");
    let network = HostWhisper::load(&spec, &config, 4).unwrap_or_else(|error| panic!("{error}"));
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
        network.decoder.set_window(2, &encoded);
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
            network.decoder.set_window(slot, encoded);
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
        network.decoder.set_window(1, first);
        let mut logits = [Vec::new(), Vec::new()];
        for (slot, logits) in logits.iter_mut().enumerate() {
            network.decoder.forward(&ids, &[span(slot, 0, 10)], &[9], logits);
        }
        assert!(logits[0] == logits[1] && logits[0] != whole, "{model}");
    }
}

#[test]
fn candles_operations_give_the_numbers_of_the_cpus_kernels() {
    for (model, _, start) in MODELS {
        let (host, features) = network(model);
        let spec = LoadSpec::new(path(model).to_str().expect("a path in UTF-8"));
        let config = WhisperConfig::read(&ModelFiles::locate(&spec.source).expect("files"), &spec.source);
        let config = config.expect("a configuration");
        let on_device = DeviceWhisper::load(&spec, &Device::Cpu, &config, 4);
        let on_device = on_device.unwrap_or_else(|error| panic!("{error}"));
        let mut networks = [Whisper::Host(Box::new(host)), Whisper::Device(Box::new(on_device))];
        let other: Vec<f32> = features.iter().rev().copied().collect();
        let span = |slot, first, count| Span { slot, first, count };
        let [expected, found] = networks.each_mut().map(|network| {
            let mut all = Vec::new();
            network.encode(&[2, 0], &[&features, &other]).expect("encoded windows");
            network.keep_queries(2);
            let mut forward = |ids: &[u32], spans: &[Span], wanted: &[usize]| {
                let mut logits = Vec::new();
                network.forward(ids, spans, wanted, &mut logits).expect("a step");
                all.extend(logits);
            };
            // Two prompts of different lengths, then a token of each, and then one of them beside a longer span.
            forward(&[start, 5, 6, start, 7], &[span(2, 0, 3), span(0, 0, 2)], &[2, 4]);
            forward(&[8, 9], &[span(0, 2, 1), span(2, 3, 1)], &[1, 0]);
            forward(&[10, 11, 12], &[span(2, 4, 1), span(0, 3, 2)], &[0, 2]);
            let weights = network.alignment(2, &[1, 3, 4], 700).expect("weights of attention");
            assert_eq!(network.alignment(0, &[1], 700).expect("weights"), [0.0; 0], "it keeps no queries");
            network.release(2);
            (all, weights)
        });
        assert_eq!((expected.0.len(), expected.1.len()), (found.0.len(), found.1.len()), "{model}");
        assert!(!expected.1.is_empty() || config.alignment.is_empty());
        let off = worst(found.0.into_iter(), &expected.0);
        assert!(off < TOLERANCE, "{model}: logits differ by {off}");
        let off = worst(found.1.into_iter(), &expected.1);
        assert!(off < 1e-4, "{model}: weights of attention differ by {off}");
    }
}
