//! Benchmarks of the kernels of a forward pass on one thread, for 1,024 tokens and the sizes of all-MiniLM-L6-v2.
//! `benches/candle.rs` measures candle's own operations for comparison. Run both with `make bench-parts`.

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BatchSize, BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group};
use sconce_kernels::attention::Attention;
use sconce_kernels::causal::{CrossSpan, attend_across};
use sconce_kernels::feed_forward::{FeedForward, FeedForwardWeights};
use sconce_kernels::kv::{BLOCK, CachePosition, KvBlocks, KvNumbers, KvShape};
use sconce_kernels::{
    Activation, CpuFeatures, Disentangled, Epilogue, Group, Linear, Matrix, Norm, NumberFormat, Panels,
    PositionTerms, RowFormat, may_use_int16, multiply_rows, use_features,
};

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
    Norm { rows, eps: 1e-12, is_centred: true }
}

/// Computes as another kind of CPU if `CPU_FEATURES` names one, such as "avx2".
fn use_features_of_environment() {
    let Ok(name) = std::env::var("CPU_FEATURES") else { return };
    let known = CpuFeatures::ALL.iter().find(|(_, known)| *known == name);
    let (features, _) = known.unwrap_or_else(|| panic!("CPU_FEATURES is {name:?}"));
    use_features(*features).expect("the CPU has them");
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
        let packed = |format| Linear::new(&noise(width * depth), depth, format).expect("whole groups");
        let widened = Linear::Narrow(Matrix::of_bf16(&noise(width * depth), depth));
        for (name, matrix) in [
            ("bf16", packed(NumberFormat::Bf16)),
            ("bf16, widened", widened),
            ("int8", packed(NumberFormat::Bits8)),
        ] {
            group.bench_function(BenchmarkId::new(name, format!("{depth}x{width}")), |bencher| {
                bencher.iter(|| matrix.multiply(black_box(&rows), &mut out, |_, _| {}));
            });
        }
        let q = std::array::from_fn(|at| (at * 37 % 256) as u8);
        let quantised = |_, _| Group { scale: 0.01, offset: -1.28, q };
        let matrix =
            Matrix::of_groups(NumberFormat::Bits8, [depth, width], &quantised).with_rows_as(RowFormat::Int16);
        if may_use_int16() {
            let name = BenchmarkId::new("8 bits, rows of 16 bits", format!("{depth}x{width}"));
            group.bench_function(name, |bencher| {
                bencher.iter(|| matrix.multiply(black_box(&rows), &mut out));
            });
        }
    }
    group.finish();
}

/// A product of a few rows with a matrix that no cache holds: Whisper tiny's last layer. The throughput is in bytes of
/// the matrix.
fn few_rows(criterion: &mut Criterion) {
    const VOCABULARY: usize = 51_864;
    let mut group = group(criterion, "few-rows");
    let matrix = Matrix::of_f32(&noise(VOCABULARY * HIDDEN), HIDDEN);
    group.throughput(Throughput::Bytes((VOCABULARY * HIDDEN * 4) as u64));
    for count in [1, 4, 8, 16] {
        let (rows, mut out) = (noise(count * HIDDEN), vec![0.0; count * VOCABULARY]);
        group.bench_function(BenchmarkId::new("f32", count), |bencher| {
            bencher.iter(|| matrix.multiply(black_box(&rows), &mut out));
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
    for length in [8, 32, 128, 512, 1024] {
        let lengths = vec![length; TOKENS / length];
        group.bench_function(BenchmarkId::new("sublayer", length), |bencher| {
            let run = |x: &mut Vec<f32>| {
                sublayer.attend(x, &lengths, &PositionTerms::default(), Epilogue::Norm(&norm))
            };
            bencher.iter_batched_ref(|| x.clone(), run, BatchSize::LargeInput);
        });
    }
    // Disentangled attention, with the 512 vectors of DeBERTa v3: far tokens share the first and the last ones.
    let vectors = || noise(HIDDEN * 512);
    let by_distance = (-511_i32..=511).map(|distance| (256 - distance).clamp(0, 511) as u32).collect();
    let disentangled = Disentangled::new(vectors(), &vectors(), noise(HIDDEN), by_distance);
    let position_terms =
        PositionTerms { disentangled: Some(disentangled.into()), ..PositionTerms::default() };
    for length in [32, 128, 512] {
        let lengths = vec![length; TOKENS / length];
        group.bench_function(BenchmarkId::new("disentangled sublayer", length), |bencher| {
            let run = |x: &mut Vec<f32>| sublayer.attend(x, &lengths, &position_terms, Epilogue::Norm(&norm));
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

/// The attention sublayer of Whisper tiny's encoder, for one window.
fn attention_of_a_window(criterion: &mut Criterion) {
    const POSITIONS: usize = 1_500;
    let mut group = group(criterion, "attention");
    let matrix = || noise(HIDDEN * HIDDEN);
    let sublayer =
        Attention::new([matrix(), matrix(), matrix()], noise(HIDDEN), &matrix(), 6, NumberFormat::F32);
    let (sublayer, bias, x) = (sublayer.expect("whole groups"), noise(HIDDEN), noise(POSITIONS * HIDDEN));
    group.bench_function("window", |bencher| {
        let run = |x: &mut Vec<f32>| {
            sublayer.attend(x, &[POSITIONS], &PositionTerms::default(), Epilogue::Bias(&bias))
        };
        bencher.iter_batched_ref(|| x.clone(), run, BatchSize::LargeInput);
    });
    group.finish();
}

/// The cross attention of a layer of Whisper tiny: one token of each sequence over all positions of its window. The
/// throughput is in bytes of keys and values, which are more than the caches hold.
fn cross_attention(criterion: &mut Criterion) {
    const SEQUENCES: usize = 8;
    const KEYS: usize = 1_500;
    let mut group = group(criterion, "cross-attention");
    let shape = KvShape { layers: 4, heads: 6, width: 64, numbers: KvNumbers::F32 };
    let blocks_of_one = KEYS.div_ceil(BLOCK);
    let mut kv = KvBlocks::with_groups(shape, SEQUENCES, blocks_of_one).expect("memory");
    kv.use_large_pages();
    let numbers = noise(2 * shape.width);
    for block in 0..SEQUENCES * blocks_of_one {
        for (layer, head) in
            (0..shape.layers).flat_map(|layer| (0..shape.heads).map(move |head| (layer, head)))
        {
            for offset in 0..BLOCK {
                let (key, value) = numbers.split_at(shape.width);
                kv.put(CachePosition { block: block as u32, offset }, layer, head, key, value);
            }
        }
    }
    let tables: Vec<Vec<u32>> = (0..SEQUENCES)
        .map(|at| (at * blocks_of_one..(at + 1) * blocks_of_one).map(|block| block as u32).collect())
        .collect();
    let spans: Vec<_> = tables.iter().map(|blocks| CrossSpan { blocks, keys: KEYS, count: 1 }).collect();
    let queries = noise(SEQUENCES * shape.heads * shape.width);
    let mut out = vec![0.0; queries.len()];
    group.throughput(Throughput::Bytes((SEQUENCES * shape.heads * KEYS * shape.width * 2 * 4) as u64));
    let mut layer = 0;
    group.bench_function(BenchmarkId::new("one token each, sequences", SEQUENCES), |bencher| {
        bencher.iter(|| {
            layer = (layer + 1) % shape.layers;
            attend_across(&kv, layer, &spans, black_box(&queries), &mut out);
        });
    });
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

criterion_group!(
    benches,
    product,
    few_rows,
    attention,
    feed_forward,
    attention_of_a_window,
    cross_attention,
    residual
);

fn main() {
    use_features_of_environment();
    benches();
}
