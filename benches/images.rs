//! What one image costs on one thread: EfficientNet-Lite0 by the number of images in a batch, and the way from a
//! JPEG file to pixels. `make bench-parts`.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sconce::model::nets::image::Pixels;
use sconce::model::tasks::image;
use sconce::model::{Device, Forward as _, LoadSpec, Processor as _};
use sconce::protocol::{Message, Properties};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn classify(criterion: &mut Criterion) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/models/efficientnet-lite0");
    let (processor, mut network) = image::load(&LoadSpec::new(folder), &Device::Cpu)
        .expect("the real weights: scripts/fetch-efficientnet");
    let file =
        std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/images/cat.jpg")).expect("a photograph");
    let properties = Properties { content_type: Some("image/jpeg".into()), ..Properties::default() };
    let message = Message { properties, body: file.into() };
    let inputs =
        |message: &Message| processor.preprocess(message).and_then(|it| it.1.all()).expect("an image");
    let mut group = criterion.benchmark_group("images");
    group.sample_size(20).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(3));
    group.throughput(Throughput::Elements(1));
    group.bench_function("preprocess", |bencher| {
        bencher.iter(|| inputs(black_box(&message)));
    });
    let inputs = inputs(&message);
    for count in [1, 4, 8] {
        let images: Vec<&Pixels> = std::iter::repeat_n(&inputs[0].input, count).collect();
        group.throughput(Throughput::Elements(count as u64));
        group.bench_function(BenchmarkId::new("forward", count), |bencher| {
            bencher.iter(|| network.forward(black_box(&images)).expect("labels"));
        });
    }
    group.finish();
}

criterion_group!(benches, classify);
criterion_main!(benches);
