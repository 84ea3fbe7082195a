//! What forming batches costs: 10,000 inputs of mixed cost go in and come out. `make bench-parts`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sconce::batching::{Batcher, DeviceState, Owner, Policy, QueueShare};

const INPUTS: usize = 10_000;
const OWNER: Owner = Owner { queue: QueueShare::LONE, requester: 1, background: false };

/// All at once, as after a restart with a full prefetch; or one by one with a look after each, as they
/// come in.
fn batches(criterion: &mut Criterion) {
    let inputs: Vec<(usize, usize)> = (0..INPUTS).map(|index| (index, 4 + index * 7_919 % 253)).collect();
    let size = |input: &(usize, usize)| input.1;
    let now = Instant::now();
    let mut group = criterion.benchmark_group("batcher");
    group.throughput(Throughput::Elements(INPUTS as u64));
    for max_tokens in [1_024, 32_768] {
        let policy = Policy::new(max_tokens, 512, Duration::from_millis(2));
        group.bench_function(BenchmarkId::new("all_at_once", max_tokens), |bencher| {
            bencher.iter(|| {
                let mut batcher = Batcher::new(policy, size);
                inputs.iter().for_each(|input| batcher.push(vec![*input], OWNER, now));
                while let Some(batch) = batcher.take(now, DeviceState::Idle, false) {
                    black_box(batch);
                }
            });
        });
        group.bench_function(BenchmarkId::new("one_by_one", max_tokens), |bencher| {
            bencher.iter(|| {
                let mut batcher = Batcher::new(policy, size);
                for input in &inputs {
                    batcher.push(vec![*input], OWNER, now);
                    black_box(batcher.take(now, DeviceState::Busy, true));
                }
            });
        });
    }
    group.finish();
}

criterion_group!(benches, batches);
criterion_main!(benches);
