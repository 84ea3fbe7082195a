//! The same encoder without a queue, and the matrix products that it rests on. One process stands for
//! one worker: a model of its own, texts prepared one by one as messages bring them, batches as the
//! worker makes them.
//!
//! `in_process MODEL TEXTS.jsonl SECONDS` says `{"ready": true}` once the model is loaded; then, for each
//! line of stdin, it embeds texts for so many seconds, multiplies matrices for a second, and prints what
//! it reached. Whoever starts several writes to all of them at once, so that they share the machine as
//! workers do. `RAYON_NUM_THREADS=1 CANDLE_NUM_THREADS=1` make each a worker of one thread.

use std::io::{BufRead as _, Write as _, stdin, stdout};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use candle_core::{DType, Device, Tensor};
use sconce::batching::{self, Batcher, Owner, Policy};
use sconce::config::{self, Assignment};
use sconce::model::load::tokenizer::Tokens;
use sconce::model::nets::encoder::TextNetwork;
use sconce::model::tasks::embed::{self, EmbeddingProcessor};
use sconce::model::{Forward as _, LoadSpec, Processor as _};
use sconce::protocol::Message;
use serde_json::json;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Rows and columns of the products: those of the network's linear layers, and a large one.
const PRODUCTS: [(usize, usize); 5] = [(384, 1152), (384, 384), (384, 1536), (1536, 384), (1024, 1024)];
/// Rows of the left matrix: the tokens of a batch.
const ROWS: usize = 1_024;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, texts, seconds] = &arguments[..] else {
        return Err(anyhow!("usage: in_process MODEL TEXTS.jsonl SECONDS"));
    };
    let seconds = Duration::from_secs_f64(seconds.parse().context("SECONDS")?);
    let texts = read(Path::new(texts))?;
    let policy = policy()?;
    let spec = LoadSpec::new(model.as_str());
    let (processor, mut model) = embed::load(&spec, &Device::Cpu)?;
    // Touches weights and buffers once.
    embed(&mut model, &processor, &texts, policy, Duration::from_millis(500))?;
    say(&json!({ "ready": true }))?;
    for line in stdin().lock().lines() {
        line?;
        let done = embed(&mut model, &processor, &texts, policy, seconds)?;
        let products = products(Duration::from_secs(1))?;
        let rate = |count: usize, seconds: Duration| count as f64 / seconds.as_secs_f64();
        say(&json!({
            "texts_per_second": rate(done.texts, done.elapsed),
            "tokens_per_second": rate(done.tokens, done.elapsed),
            "texts_per_second_prepared": rate(done.texts, done.preparing),
            "texts_per_second_computed": rate(done.texts, done.computing),
            "products_flops": products,
        }))?;
    }
    Ok(())
}

fn say(line: &serde_json::Value) -> anyhow::Result<()> {
    writeln!(stdout(), "{line}")?;
    Ok(stdout().flush()?)
}

/// The tasks of a file, as a worker receives them.
fn read(path: &Path) -> anyhow::Result<Vec<Message>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let message = |line: &str| Message { body: line.to_owned().into(), ..Message::default() };
    let texts: Vec<Message> = text.lines().map(message).collect();
    ensure!(!texts.is_empty(), "{} is empty", path.display());
    Ok(texts)
}

/// The batches of a CPU worker of one thread, by the built-in settings.
fn policy() -> anyhow::Result<Policy> {
    let mut settings = config::load(&[], [], &[])?.settings;
    let pool = settings.pools.remove(0);
    let batch = pool.batch.clone();
    let assignment = Assignment {
        slot: String::new(),
        worker: String::new(),
        device: "cpu".into(),
        sharers: 1,
        threads: 1,
        pool,
        broker: settings.broker,
        telemetry: settings.telemetry,
        reserved_queues: Vec::new(),
        broker_reached: false,
    };
    Ok(Policy::new(assignment.max_tokens(), batch.max_requests, batch.max_delay))
}

/// What was embedded in how long.
struct Done {
    texts: usize,
    tokens: usize,
    elapsed: Duration,
    preparing: Duration,
    computing: Duration,
}

/// Embeds the texts over and over for so long; ends with a whole batch.
fn embed(
    model: &mut TextNetwork,
    processor: &EmbeddingProcessor,
    texts: &[Message],
    policy: Policy,
    limit: Duration,
) -> anyhow::Result<Done> {
    let mut batcher = Batcher::new(policy, |input: &Tokens| input.ids.len());
    let mut done =
        Done { texts: 0, tokens: 0, elapsed: limit, preparing: Duration::ZERO, computing: Duration::ZERO };
    let start = Instant::now();
    for text in texts.iter().cycle() {
        let begun = Instant::now();
        let inputs = processor.preprocess(text).and_then(|it| it.1.all());
        let inputs = inputs.map_err(|error| anyhow!("{error}"))?;
        let owner = Owner { requester: 1, ..Owner::default() };
        batcher.push(inputs.into_iter().map(|sized| sized.input).collect(), owner, begun);
        done.preparing += begun.elapsed();
        let Some(batch) = batcher.take(begun, batching::DeviceState::Busy, true) else { continue };
        let begun = Instant::now();
        let inputs: Vec<&Tokens> = batch.inputs.iter().collect();
        for output in model.forward(&inputs)? {
            output.map_err(|error| anyhow!("{error}"))?;
        }
        done.computing += begun.elapsed();
        done.texts += inputs.len();
        done.tokens += batch.tokens;
        done.elapsed = start.elapsed();
        if done.elapsed >= limit {
            break;
        }
    }
    Ok(done)
}

/// Floating-point operations a second in the fastest matrix product met within so long.
fn products(limit: Duration) -> anyhow::Result<f64> {
    let ones = |rows, columns| Tensor::ones((rows, columns), DType::F32, &Device::Cpu);
    let matrices = PRODUCTS.iter().map(|(rows, columns)| Ok((ones(ROWS, *rows)?, ones(*rows, *columns)?)));
    let matrices = matrices.collect::<candle_core::Result<Vec<_>>>()?;
    let mut best = 0.0_f64;
    let start = Instant::now();
    while start.elapsed() < limit {
        for ((left, right), (rows, columns)) in matrices.iter().zip(PRODUCTS) {
            let begun = Instant::now();
            left.matmul(right)?;
            let operations = (2 * ROWS * rows * columns) as f64;
            best = best.max(operations / begun.elapsed().as_secs_f64());
        }
    }
    Ok(best)
}
