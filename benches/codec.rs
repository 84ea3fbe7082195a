//! What lies between bytes and the network: a task's body to token ids, and a vector to a reply's
//! body, as digits and as base64. `make bench-parts`.

use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sconce::model::tasks::embed::{self, EmbeddingProcessor};
use sconce::model::{Device, LoadSpec, Processor as _};
use sconce::protocol::Message;
use serde_json::{Value, json};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Numbers in a vector.
const WIDTH: usize = 384;

fn processor() -> EmbeddingProcessor {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/models/all-MiniLM-L6-v2");
    let spec = LoadSpec::new(folder);
    embed::load(&spec, &Device::Cpu).expect("the real weights: make models").0
}

fn message(body: &Value) -> Message {
    Message { body: body.to_string().into(), ..Message::default() }
}

fn preprocess(criterion: &mut Criterion) {
    let processor = processor();
    let mut group = criterion.benchmark_group("preprocess");
    for words in [2, 33, 254] {
        let text = "the tide carries a message to the queue ".split_inclusive(' ').cycle().take(words);
        let task = message(&json!({ "input": text.collect::<String>() }));
        group.throughput(Throughput::Elements(1));
        group.bench_function(BenchmarkId::new("text", words), |bencher| {
            bencher.iter(|| processor.preprocess(black_box(&task)).expect("a task"));
        });
    }
    let task = message(&json!({ "input": vec![2_000; 33] }));
    group.bench_function("ids/33", |bencher| {
        bencher.iter(|| processor.preprocess(black_box(&task)).expect("a task"));
    });
    group.finish();
}

fn finish(criterion: &mut Criterion) {
    let processor = processor();
    // Digits as long as those of a real vector.
    let vector: Vec<f32> = (0..WIDTH).map(|index| (index as f32 * 0.731).sin() * 0.051).collect();
    let mut group = criterion.benchmark_group("finish");
    group.throughput(Throughput::Elements(1));
    for encoding in ["float", "base64"] {
        let task = message(&json!({ "input": "a", "encoding_format": encoding }));
        let (context, _) = processor.preprocess(&task).expect("a task");
        group.bench_function(encoding, |bencher| {
            let setup = || (context.clone(), vec![vector.clone()]);
            let routine = |(context, vectors)| processor.finish(context, vectors).expect("a body");
            bencher.iter_batched(setup, routine, BatchSize::SmallInput);
        });
    }
    group.finish();
}

criterion_group!(benches, preprocess, finish);
criterion_main!(benches);
