//! What the kernels of a forward pass cost on one thread, products and norm beside candle's own: 1,024
//! tokens, all-MiniLM-L6-v2's sizes. `make bench-parts`.

use std::hint::black_box;
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sconce::model::ops::{
    Activation, After, Distances, FeedForward, NormParams, Numbers, Panels, Published, SelfAttention, Up,
    add_norm, multiply_rows,
};

// As in the program: large outputs cost page faults with the system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const TOKENS: usize = 1_024;
const HIDDEN: usize = 384;
const INNER: usize = 1_536;
const HEADS: usize = 12;

fn noise(shape: &[usize]) -> Result<Tensor> {
    Tensor::randn(0f32, 0.05, shape, &Device::Cpu)
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

fn norm() -> Result<NormParams> {
    let zeros = Tensor::zeros(HIDDEN, DType::F32, &Device::Cpu)?;
    NormParams::new(&zeros, &zeros.ones_like()?, &zeros, 1e-12)
}

fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(20).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    group
}

/// Throughput in floating-point operations.
fn product(criterion: &mut Criterion) {
    let mut group = group(criterion, "product");
    for (depth, width) in [(HIDDEN, 2 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)] {
        let (rows, weights) = (noise(&[TOKENS, depth]), noise(&[width, depth]));
        let (rows, weights) = (rows.expect("rows"), weights.expect("weights"));
        let plain = weights.t().and_then(|it| it.contiguous()).expect("a matrix");
        let panels = Panels::new(&values(&weights).expect("weights"), depth);
        let left = values(&rows).expect("rows");
        let mut out = vec![0.0; TOKENS * width];
        group.throughput(Throughput::Elements((2 * TOKENS * depth * width) as u64));
        let shape = format!("{depth}x{width}");
        group.bench_function(BenchmarkId::new("ours", &shape), |bencher| {
            bencher.iter(|| multiply_rows(black_box(&left), &panels, &mut out, |_, _| {}));
        });
        group.bench_function(BenchmarkId::new("candle", &shape), |bencher| {
            bencher.iter(|| black_box(&rows).matmul(&plain).expect("a product"));
        });
    }
    group.finish();
}

/// A whole half, by the length of the texts.
fn attention(criterion: &mut Criterion) {
    let mut group = group(criterion, "attention");
    group.throughput(Throughput::Elements(TOKENS as u64));
    let part = || Result::Ok((noise(&[HIDDEN, HIDDEN])?, noise(&[HIDDEN])?));
    let published = || -> Result<Published> {
        let (qkv, out) = ([part()?, part()?, part()?], noise(&[HIDDEN, HIDDEN])?);
        Ok(Published { qkv, out, heads: HEADS, distances: Distances::default(), numbers: Numbers::F32 })
    };
    let half = published().and_then(|it| SelfAttention::new(it, After::Norm(norm()?))).expect("weights");
    for length in [8, 32, 128, 512] {
        let lengths = vec![length; TOKENS / length];
        let x = noise(&[TOKENS, HIDDEN]).expect("tokens");
        group.bench_function(BenchmarkId::new("half", length), |bencher| {
            bencher.iter(|| half.forward(black_box(&x).copy()?, &lengths));
        });
    }
    group.finish();
}

fn feed_forward(criterion: &mut Criterion) {
    let mut group = group(criterion, "feed-forward");
    group.throughput(Throughput::Elements(TOKENS as u64));
    let x = noise(&[TOKENS, HIDDEN]).expect("tokens");
    for activation in [Activation::Gelu, Activation::GeluTanh, Activation::Relu] {
        let make = || {
            let up = Up {
                matrix: noise(&[INNER, HIDDEN])?,
                bias: noise(&[INNER])?,
                gate: None,
                numbers: Numbers::F32,
            };
            FeedForward::new(up, &noise(&[HIDDEN, INNER])?, After::Norm(norm()?), activation)
        };
        let half = make().expect("weights");
        group.bench_function(BenchmarkId::new("half", format!("{activation:?}")), |bencher| {
            bencher.iter(|| half.forward(black_box(&x).copy()?));
        });
    }
    group.finish();
}

fn residual(criterion: &mut Criterion) {
    let mut group = group(criterion, "add-norm");
    group.throughput(Throughput::Elements(TOKENS as u64));
    let (x, residual) = (noise(&[TOKENS, HIDDEN]), noise(&[TOKENS, HIDDEN]));
    let (x, residual, params) = (x.expect("x"), residual.expect("residual"), norm().expect("norm"));
    group.bench_function("ours", |bencher| {
        bencher.iter(|| add_norm(black_box(&x).copy()?, &residual, &params));
    });
    let weight = Tensor::ones(HIDDEN, DType::F32, &Device::Cpu).expect("weight");
    let shift = weight.zeros_like().expect("shift");
    group.bench_function("candle", |bencher| {
        bencher.iter(|| candle_nn::ops::layer_norm(&(black_box(&x) + &residual)?, &weight, &shift, 1e-12));
    });
    group.finish();
}

criterion_group!(benches, product, attention, feed_forward, residual);
criterion_main!(benches);
