//! Candle's own product and norm on one thread, beside those of `crates/kernels/benches/kernels.rs`: the same sizes and
//! names. `make bench-parts`.

use std::hint::black_box;
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

// As in the program: large outputs cost page faults with the system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const TOKENS: usize = 1_024;
const HIDDEN: usize = 384;
const INNER: usize = 1_536;

fn noise(shape: &[usize]) -> Result<Tensor> {
    Tensor::randn(0f32, 0.05, shape, &Device::Cpu)
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
        let (rows, weights) = (noise(&[TOKENS, depth]), noise(&[depth, width]));
        let (rows, weights) = (rows.expect("rows"), weights.expect("weights"));
        group.throughput(Throughput::Elements((2 * TOKENS * depth * width) as u64));
        group.bench_function(BenchmarkId::new("candle", format!("{depth}x{width}")), |bencher| {
            bencher.iter(|| black_box(&rows).matmul(&weights).expect("a product"));
        });
    }
    group.finish();
}

fn residual(criterion: &mut Criterion) {
    let mut group = group(criterion, "add-norm");
    group.throughput(Throughput::Elements(TOKENS as u64));
    let (x, residual) = (noise(&[TOKENS, HIDDEN]), noise(&[TOKENS, HIDDEN]));
    let (x, residual) = (x.expect("x"), residual.expect("residual"));
    let weight = Tensor::ones(HIDDEN, DType::F32, &Device::Cpu).expect("weight");
    let shift = weight.zeros_like().expect("shift");
    group.bench_function("candle", |bencher| {
        bencher.iter(|| candle_nn::ops::layer_norm(&(black_box(&x) + &residual)?, &weight, &shift, 1e-12));
    });
    group.finish();
}

criterion_group!(benches, product, residual);
criterion_main!(benches);
