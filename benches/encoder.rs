//! What a forward pass of the real all-MiniLM-L6-v2 costs on one thread, by the number and length of
//! its texts. The kernels alone: `crates/kernels/benches/kernels.rs`. `make bench-parts`.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sconce::model::load::tokenizer::Tokens;
use sconce::model::tasks::embed;
use sconce::model::{Device, Forward as _, LoadSpec, Processor as _};
use sconce::protocol::Message;
use serde_json::json;

// As in the program: large outputs cost page faults with the system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Texts and tokens of each. Six of them make a full batch of 1,024 tokens: the linear layers cost all
/// of those the same, so that what differs is attention.
const BATCHES: [(usize, usize); 8] =
    [(1, 8), (1, 32), (256, 4), (64, 16), (32, 32), (16, 64), (8, 128), (4, 256)];

/// Some word's token; the network's arithmetic is the same for all.
const TOKEN: u32 = 2_000;

fn forward(criterion: &mut Criterion) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/models/all-MiniLM-L6-v2");
    let spec = LoadSpec::new(folder);
    let (processor, mut model) = embed::load(&spec, &Device::Cpu).expect("the real weights: make models");
    let mut group = criterion.benchmark_group("forward");
    group.sample_size(20).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(3));
    for (texts, length) in BATCHES {
        // The two special tokens are put around them.
        let body = json!({ "input": vec![vec![TOKEN; length - 2]; texts] });
        let message = Message { body: body.to_string().into(), ..Message::default() };
        let inputs = processor.preprocess(&message).and_then(|it| it.1.all()).expect("a task");
        let sentences: Vec<&Tokens> = inputs.iter().map(|sized| &sized.input).collect();
        group.throughput(Throughput::Elements((texts * length) as u64));
        let name = BenchmarkId::from_parameter(format!("{texts}x{length}"));
        group.bench_function(name, |bencher| {
            bencher.iter(|| model.forward(black_box(&sentences)).expect("vectors"));
        });
    }
    group.finish();
}

criterion_group!(benches, forward);
criterion_main!(benches);
