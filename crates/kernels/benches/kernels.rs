//! Benchmarks of the kernels of a forward pass on one thread, for 1,024 tokens and the sizes of all-MiniLM-L6-v2.
//! `benches/candle.rs` measures candle's own operations for comparison. Run both with `make bench-parts`.

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{
    BatchSize, BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main,
};
use sconce_kernels::attention::Attention;
use sconce_kernels::feed_forward::{FeedForward, FeedForwardWeights};
use sconce_kernels::{Activation, Epilogue, Norm, NumberFormat, Panels, PositionTerms, multiply_rows};

// The program uses mimalloc, too. With the system's allocator, large outputs cost page faults.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const TOKENS: usize = 1_024;
const HIDDEN: usize = 384;
const INNER: usize = 1_536;
const HEADS: usize = 12;

/// Reproducible values between -0.1 and 0.1, about the size of weights.
fn noise(count: usize) -> Vec<f32> {
    let mut state = 12_345_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * 0.1
    };
    (0..count).map(|_| next()).collect()
}

fn norm() -> Norm {
    let mut rows = vec![0.0; 3 * HIDDEN];
    rows[HIDDEN..2 * HIDDEN].fill(1.0);
    Norm { rows, eps: 1e-12 }
}

fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(20).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    group
}

/// A matrix product. The throughput is in floating-point operations.
fn product(criterion: &mut Criterion) {
    let mut group = group(criterion, "product");
    for (depth, width) in [(HIDDEN, 2 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)] {
        let (rows, panels) = (noise(TOKENS * depth), Panels::new(&noise(width * depth), depth));
        let mut out = vec![0.0; TOKENS * width];
        group.throughput(Throughput::Elements((2 * TOKENS * depth * width) as u64));
        group.bench_function(BenchmarkId::new("ours", format!("{depth}x{width}")), |bencher| {
            bencher.iter(|| multiply_rows(black_box(&rows), &panels, &mut out, |_, _| {}));
        });
    }
    group.finish();
}

/// The whole attention sublayer of a block, by the length of the texts.
fn attention(criterion: &mut Criterion) {
    let mut group = group(criterion, "attention");
    group.throughput(Throughput::Elements(TOKENS as u64));
    let matrix = || noise(HIDDEN * HIDDEN);
    let qkv = [matrix(), matrix(), matrix()];
    let sublayer =
        Attention::new(qkv, noise(HIDDEN), &matrix(), HEADS, NumberFormat::F32).expect("whole groups");
    let (norm, x) = (norm(), noise(TOKENS * HIDDEN));
    for length in [8, 32, 128, 512] {
        let lengths = vec![length; TOKENS / length];
        group.bench_function(BenchmarkId::new("sublayer", length), |bencher| {
            let run = |x: &mut Vec<f32>| {
                sublayer.attend(x, &lengths, &PositionTerms::default(), Epilogue::Norm(&norm))
            };
            bencher.iter_batched_ref(|| x.clone(), run, BatchSize::LargeInput);
        });
    }
    group.finish();
}

fn feed_forward(criterion: &mut Criterion) {
    let mut group = group(criterion, "feed-forward");
    group.throughput(Throughput::Elements(TOKENS as u64));
    let (norm, x) = (norm(), noise(TOKENS * HIDDEN));
    let (up, down) = (noise(INNER * HIDDEN), noise(HIDDEN * INNER));
    for activation in [Activation::Gelu, Activation::GeluTanh, Activation::Relu] {
        let up_bias = noise(INNER);
        let weights =
            FeedForwardWeights { up: &up, up_bias, gate: None, down: &down, format: NumberFormat::F32 };
        let sublayer = FeedForward::new(weights, activation).expect("whole groups");
        group.bench_function(BenchmarkId::new("sublayer", format!("{activation:?}")), |bencher| {
            let run = |x: &mut Vec<f32>| sublayer.forward(x, Epilogue::Norm(&norm));
            bencher.iter_batched_ref(|| x.clone(), run, BatchSize::LargeInput);
        });
    }
    group.finish();
}

fn residual(criterion: &mut Criterion) {
    let mut group = group(criterion, "add-norm");
    group.throughput(Throughput::Elements(TOKENS as u64));
    let (norm, x, residual) = (norm(), noise(TOKENS * HIDDEN), noise(TOKENS * HIDDEN));
    group.bench_function("ours", |bencher| {
        let run = |x: &mut Vec<f32>| norm.add(x, &residual);
        bencher.iter_batched_ref(|| x.clone(), run, BatchSize::LargeInput);
    });
    group.finish();
}

criterion_group!(benches, product, attention, feed_forward, residual);
criterion_main!(benches);
