//! The same decoder without a queue: `generate_in_process MODEL.gguf PROMPTS.jsonl SEQUENCES SECONDS`. Answers
//! the prompts of the file in turn, SEQUENCES at once, and prints tokens a second. `RAYON_NUM_THREADS` says how
//! many threads compute.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Write as _, stdout};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use sconce::model::tasks::generate::{self, Prompt, TextGenerator};
use sconce::model::{Advance, Device, Feed, Generate as _, LoadSpec, Processor as _, Row, SizedInput, Slot};
use sconce::protocol::Message;
use serde_json::{Value, json};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The most tokens of a step, as `batch.max_tokens`.
const STEP: usize = 512;

#[derive(Default)]
struct Done {
    prompts: usize,
    answers: usize,
    prompting: Duration,
    answering: Duration,
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, prompts, sequences, seconds] = &arguments[..] else {
        return Err(anyhow!("usage: generate_in_process MODEL.gguf PROMPTS.jsonl SEQUENCES SECONDS"));
    };
    let options = std::env::var("OPTIONS").unwrap_or_else(|_| "{}".to_owned());
    let options: BTreeMap<String, Value> = serde_json::from_str(&options).context("OPTIONS")?;
    let (processor, mut generator) =
        generate::load(&LoadSpec { options, ..LoadSpec::new(model.as_str()) }, &Device::Cpu)?;
    let mut prompted = Vec::new();
    for line in fs::read_to_string(prompts)?.lines() {
        let mut message = Message { body: line.to_owned().into(), ..Message::default() };
        let url = if line.contains("\"messages\"") { "/v1/chat/completions" } else { "/v1/completions" };
        message.properties.headers.insert("url".to_owned(), url.into());
        let inputs = processor.preprocess(&message).and_then(|it| it.1.all());
        let inputs = inputs.map_err(|error| anyhow!("{error}"))?;
        prompted.extend(inputs);
    }
    let seconds = Duration::from_secs_f64(seconds.parse().context("SECONDS")?);
    let done = run(&mut generator, &prompted, sequences.parse().context("SEQUENCES")?, seconds)?;
    let rate = |count: usize, time: Duration| count as f64 / time.as_secs_f64();
    let all = done.prompting + done.answering;
    let report = json!({
        "answer_tokens_per_second": rate(done.answers, all),
        "answer_tokens_per_second_without_prompts": rate(done.answers, done.answering),
        "prompt_tokens_per_second": rate(done.prompts, done.prompting),
    });
    writeln!(stdout(), "{report}")?;
    Ok(())
}

fn run(
    generator: &mut TextGenerator,
    prompts: &[SizedInput<Prompt>],
    sequences: usize,
    seconds: Duration,
) -> anyhow::Result<Done> {
    let mut left: BTreeMap<usize, usize> = BTreeMap::new();
    let (mut next, mut done) = (prompts.iter().cycle(), Done::default());
    let begun = Instant::now();
    while begun.elapsed() < seconds {
        for slot in 0..sequences {
            if !left.contains_key(&slot)
                && let Some(prompt) = next.next()
            {
                generator.open(Slot(slot), &prompt.input).map_err(|error| anyhow!("{error}"))?;
                left.insert(slot, prompt.tokens);
            }
        }
        let mut room = STEP;
        let mut rows = Vec::new();
        for (slot, left) in &left {
            let take = (*left).clamp(1, room.max(1));
            if *left == 0 || room > 0 {
                rows.push(Row { slot: Slot(*slot), feed: Feed::Tokens(take) });
                room = room.saturating_sub(take);
            }
        }
        let began = Instant::now();
        let advances = generator.step(&rows)?;
        let is_prompt = rows.iter().any(|row| left[&row.slot.0] > 0);
        let time = if is_prompt { &mut done.prompting } else { &mut done.answering };
        *time += began.elapsed();
        for (row, advance) in rows.iter().zip(advances) {
            let left_of = left.entry(row.slot.0).or_default();
            if *left_of > 0 {
                done.prompts += row.feed.tokens();
            }
            *left_of = left_of.saturating_sub(row.feed.tokens());
            match advance.map_err(|error| anyhow!("{error}"))? {
                Advance::Fed | Advance::Again | Advance::Waits => {}
                Advance::More(_) => done.answers += 1,
                Advance::Done(..) => {
                    done.answers += 1;
                    left.remove(&row.slot.0);
                    generator.close(row.slot);
                }
            }
        }
    }
    Ok(done)
}
