//! Texts a second of one worker's forward pass, beside the rate of the matrix product it rests on.
//!
//! `RAYON_NUM_THREADS=1 CANDLE_NUM_THREADS=1 cargo run --release --example embed_speed [tokens]`
//!
//! 1,000 texts of 4 to 256 tokens, 35 on average, in batches of about `tokens` tokens (1,000).

#![expect(clippy::print_stderr, reason = "a measurement for a person")]

use std::time::Instant;

use anyhow::{Context as _, anyhow};
use candle_core::{Device, Tensor};
use sconce::model::sentence::{Sentence, SentenceEncoder};
use sconce::model::{Codec as _, Costed, LoadSpec, Model as _};
use sconce::protocol::Message;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Multiplications and additions a token in the linear layers of all-MiniLM-L6-v2.
const FLOP_PER_TOKEN: f64 = 6.0 * 2.0 * (4.0 * 384.0 * 384.0 + 2.0 * 384.0 * 1536.0);

fn main() -> anyhow::Result<()> {
    let limit: usize = std::env::args().nth(1).map_or(Ok(1_000), |text| text.parse())?;
    let (mut model, codec) = SentenceEncoder::load(&LoadSpec {
        source: "models/all-MiniLM-L6-v2".into(),
        served_names: Vec::new(),
        device: "cpu".into(),
        max_inputs: 10_000,
    })
    .context("the real weights are needed: make models")?;
    let body = serde_json::json!({ "input": texts() }).to_string();
    let start = Instant::now();
    let message = Message { body: body.into(), ..Message::default() };
    let prepared = codec.prepare(&message).map_err(|error| anyhow!("{error}"))?;
    let prepare = start.elapsed().as_secs_f64();
    let inputs = &prepared.inputs;
    let tokens: usize = inputs.iter().map(|input| input.tokens).sum();
    let texts = inputs.len();
    anyhow::ensure!(texts > 0);
    eprintln!("{texts} texts, {tokens} tokens, {:.1} a text", tokens as f64 / texts as f64);
    eprintln!("prepare  {:8.0} texts/s", texts as f64 / prepare);
    let mut vectors = Vec::new();
    for _ in 0..3 {
        let product = product_rate()?;
        let start = Instant::now();
        vectors = forward(&mut model, inputs, limit)?;
        let seconds = start.elapsed().as_secs_f64();
        let flops = FLOP_PER_TOKEN * tokens as f64 / seconds;
        let (rate, most) = (texts as f64 / seconds, product * texts as f64 / tokens as f64 / FLOP_PER_TOKEN);
        eprintln!(
            "forward  {rate:8.1} texts/s  {:.1} GFLOP/s; products alone {:.1} GFLOP/s, {most:.0} texts/s",
            flops / 1e9,
            product / 1e9
        );
    }
    let start = Instant::now();
    let body = codec.respond(prepared.request, vectors).map_err(|error| anyhow!("{error}"))?;
    let respond = start.elapsed().as_secs_f64();
    eprintln!("respond  {:8.0} texts/s, {} bytes each", texts as f64 / respond, body.len() / texts);
    Ok(())
}

/// Reproducible texts: most short, few long.
fn texts() -> Vec<String> {
    const WORDS: [&str; 12] = [
        "queue", "message", "tide", "carries", "a", "the", "worker", "of", "light", "and", "reads", "slowly",
    ];
    let mut state = 42u32;
    let mut next = |below: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % below
    };
    let mut text = || {
        let skew = f64::from(next(1_000)) / 1_000.0;
        let words = 2 + (skew.powf(6.4) * 251.0) as usize;
        (0..words).map(|_| WORDS[next(12) as usize]).collect::<Vec<_>>().join(" ")
    };
    (0..1_000).map(|_| text()).collect()
}

/// Runs all inputs in batches of at most `limit` tokens, or of one text.
fn forward(
    model: &mut SentenceEncoder,
    inputs: &[Costed<Sentence>],
    limit: usize,
) -> anyhow::Result<Vec<Vec<f32>>> {
    let mut vectors = Vec::with_capacity(inputs.len());
    let mut rest = inputs;
    while !rest.is_empty() {
        let mut tokens = 0;
        let fits = rest.iter().take_while(|input| {
            tokens += input.tokens;
            tokens <= limit
        });
        let (batch, others) = rest.split_at(fits.count().max(1));
        rest = others;
        let batch: Vec<&Sentence> = batch.iter().map(|input| &input.input).collect();
        for step in model.forward(&batch)? {
            match step.map_err(|error| anyhow!("{error}"))? {
                sconce::model::Step::Done(vector) => vectors.push(vector),
                other => return Err(anyhow!("not computed to its end: {other:?}")),
            }
        }
    }
    Ok(vectors)
}

/// Operations a second in products of the shapes that the network has, at 1,000 tokens.
fn product_rate() -> anyhow::Result<f64> {
    let device = Device::Cpu;
    let mut done = 0.0;
    let mut seconds = 0.0;
    for (from, to) in [(384, 1152), (384, 384), (384, 1536), (1536, 384)] {
        let a = Tensor::ones((1_000, from), candle_core::DType::F32, &device)?;
        let b = Tensor::ones((from, to), candle_core::DType::F32, &device)?;
        let start = Instant::now();
        for _ in 0..10 {
            a.matmul(&b)?;
        }
        seconds += start.elapsed().as_secs_f64();
        done += 10.0 * 2.0 * 1_000.0 * from as f64 * to as f64;
    }
    Ok(done / seconds)
}
