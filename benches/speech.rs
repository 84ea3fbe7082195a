//! What a window of 30 s costs on one thread, with Whisper tiny.en: each stage as it is, and the matrix products of the
//! encoder and of a step of the decoder alone, with the same shapes. The products alone plus the other stages are the
//! limit of transcription on this CPU. `make bench-parts`.

use std::hint::black_box;
use std::io::Cursor;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use sconce::model::LoadSpec;
use sconce::model::load::ModelFiles;
use sconce::model::nets::whisper::config::{POSITIONS, WhisperConfig};
use sconce::model::nets::whisper::{HostWhisper, Span};
use sconce::model::ops::{Matrix, Panels, multiply_rows};
use sconce::model::sound::decode::{Channels, Limits, Recording};
use sconce::model::sound::features::{FRAMES, LogMel, WINDOW};
use sconce::model::sound::voice::{Listener, VoiceDetector};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/whisper-tiny.en");
const READING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/sound/reading.flac");
/// The sequences of a step, as a worker has them by default.
const SEQUENCES: usize = 8;
/// The position of the token that is computed: the middle of a usual text.
const POSITION: usize = 40;

/// A matrix product: rows, depth and width.
type Shape = [usize; 3];

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|at| ((at % 251) as f32 * 0.37).sin() * 0.1).collect()
}

/// The products of the encoder for one window. Attention has two for each head.
fn encoder_shapes(config: &WhisperConfig) -> Vec<Shape> {
    let (width, inner, heads) = (config.width, config.encoder.inner, config.encoder.heads);
    let mut shapes = vec![[FRAMES, 3 * config.mels, width], [POSITIONS, 3 * width, width]];
    for _ in 0..config.encoder.count {
        shapes.extend([[POSITIONS, width, 3 * width], [POSITIONS, width, width]]);
        shapes.extend([[POSITIONS, width, inner], [POSITIONS, inner, width]]);
        for _ in 0..heads {
            shapes.extend([[POSITIONS, width / heads, POSITIONS], [POSITIONS, POSITIONS, width / heads]]);
        }
    }
    // Keys and values for the decoder.
    shapes.extend((0..2 * config.decoder.count).map(|_| [POSITIONS, width, width]));
    shapes
}

/// The products of a step with weights, and those of each sequence with its keys and values.
fn decoder_shapes(config: &WhisperConfig) -> (Vec<Shape>, Vec<Shape>) {
    let (width, inner, heads) = (config.width, config.decoder.inner, config.decoder.heads);
    let (mut of_step, mut of_sequence) = (Vec::new(), Vec::new());
    for _ in 0..config.decoder.count {
        of_step.extend((0..6).map(|_| [SEQUENCES, width, width]));
        of_step.extend([[SEQUENCES, width, inner], [SEQUENCES, inner, width]]);
        for _ in 0..heads {
            of_sequence.extend([[1, width / heads, POSITIONS], [1, POSITIONS, width / heads]]);
        }
    }
    of_step.push([SEQUENCES, width, config.vocabulary]);
    (of_step, of_sequence)
}

fn speech(criterion: &mut Criterion) {
    let files = ModelFiles::locate(FOLDER).expect("the real weights: scripts/fetch-whisper");
    let config = WhisperConfig::read(&files, FOLDER).expect("a configuration");
    let mut network = HostWhisper::load(&LoadSpec::new(FOLDER), &config, SEQUENCES).expect("weights");
    let file = std::fs::read(READING).expect("a recording");
    let decode = || {
        let limits = Limits::of_seconds(60.0);
        let mut recording = Recording::open(Cursor::new(file.clone()), limits, Channels::Mix).expect("sound");
        let mut samples = Vec::new();
        while let Some(block) = recording.next_block().expect("sound") {
            samples.extend_from_slice(&block[0]);
        }
        samples
    };
    let mut samples = decode();
    let seconds = samples.len() as f64 / f64::from(sconce::model::sound::RATE);
    let log_mel = LogMel::new(config.mels);
    let voice = Arc::new(VoiceDetector::load().expect("weights"));

    let mut group = criterion.benchmark_group("speech");
    group.sample_size(20).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(4));
    group.bench_function(BenchmarkId::new("decode FLAC, seconds", seconds), |bencher| bencher.iter(decode));
    group.bench_function(BenchmarkId::new("voice detection, seconds", seconds), |bencher| {
        bencher.iter(|| Listener::new(voice.clone()).probabilities(black_box(&samples)));
    });
    samples.resize(WINDOW, 0.0);
    group.bench_function("features of a window", |bencher| {
        bencher.iter(|| log_mel.features(black_box(&samples)));
    });
    let features = log_mel.features(&samples);
    group.bench_function("encoder and keys of a window", |bencher| {
        bencher.iter(|| {
            let encoded = network.encoder.forward(black_box(&[&features])).expect("an encoded window");
            network.decoder.set_window(0, &encoded);
        });
    });
    let mut products: Vec<_> = encoder_shapes(&config)
        .into_iter()
        .map(|[rows, depth, width]| {
            let right = Panels::new(&numbers(depth * width), depth);
            (numbers(rows * depth), right, vec![0.0; rows * width])
        })
        .collect();
    group.bench_function("products of the encoder alone", |bencher| {
        bencher.iter(|| {
            products.iter_mut().for_each(|(rows, right, out)| multiply_rows(rows, right, out, |_, _| {}));
        });
    });

    let encoded = network.encoder.forward(&[&features]).expect("an encoded window");
    let ids = vec![5; SEQUENCES];
    let wanted: Vec<usize> = (0..SEQUENCES).collect();
    let mut logits = Vec::new();
    for slot in 0..SEQUENCES {
        network.decoder.set_window(slot, &encoded);
        let prompt = vec![7; POSITION];
        let span = Span { slot, first: 0, count: POSITION };
        network.decoder.forward(&prompt, &[span], &[], &mut logits);
    }
    let spans: Vec<Span> = (0..SEQUENCES).map(|slot| Span { slot, first: POSITION, count: 1 }).collect();
    group.bench_function(BenchmarkId::new("decoder step, sequences", SEQUENCES), |bencher| {
        bencher.iter(|| network.decoder.forward(black_box(&ids), &spans, &wanted, &mut logits));
    });
    let (of_step, of_sequence) = decoder_shapes(&config);
    let matrix = |[rows, depth, width]: Shape| {
        (numbers(rows * depth), Matrix::of_f32(&numbers(depth * width), depth), vec![0.0; rows * width])
    };
    let mut step: Vec<_> = of_step.into_iter().map(matrix).collect();
    let mut sequences: Vec<_> = (0..SEQUENCES).flat_map(|_| of_sequence.clone()).map(matrix).collect();
    group.bench_function(
        BenchmarkId::new("products of a decoder step alone, sequences", SEQUENCES),
        |bencher| {
            bencher.iter(|| {
                step.iter_mut()
                    .chain(&mut sequences)
                    .for_each(|(rows, right, out)| right.multiply(rows, out));
            });
        },
    );
    group.finish();
}

criterion_group!(benches, speech);
criterion_main!(benches);
