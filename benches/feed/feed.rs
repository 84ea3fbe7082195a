//! How many texts a second one worker process can feed to its card, and what it takes of the cores. The
//! worker is the real one, started as the launcher does, with its queues, its tokenizer and its replies;
//! in place of the card stands one that gives each batch its vectors at once, or at a given rate.
//!
//! `make feed QUEUES=embedded,rabbitmq INPUTS=32,1 ENCODINGS=float,base64 THREADS=4 SECONDS=5 RATE=40000
//! ACCENTS=1 CORES=0,1 DEVICE=cpu SET='pool[0].batch.max_requests=1024;…'`: each may be left out. RATE is the
//! card's, in texts a second; ACCENTS make texts that the tokenizer's short way does not take; CORES are the
//! worker's.

mod card;
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../../tests/support/engine.rs"]
mod engine;
mod load;
#[allow(dead_code, clippy::print_stderr, reason = "the tests use the rest, and show why they failed")]
#[path = "../../tests/support/rabbit.rs"]
mod rabbit;
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../../tests/support/wait.rs"]
mod wait;
mod worker;

use std::error::Error;
use std::io::{Write as _, stdout};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context as _;
use sconce::app::{self, Registry};

use card::Card;
use load::{Load, Queue};
use rabbit::Rabbit;
use worker::{Setup, Worker};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Until the prefetch has followed the messages.
const WARM_UP: Duration = Duration::from_secs(4);

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some("worker") {
        return app::main(&Registry::default().with::<Card>(card::NAME));
    }
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "feed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// A variable of the environment.
fn asked(name: &str, usual: &str) -> String {
    std::env::var(name).ok().filter(|given| !given.is_empty()).unwrap_or_else(|| usual.to_owned())
}

fn list<T: FromStr<Err: Error + Send + Sync + 'static>>(name: &str, usual: &str) -> anyhow::Result<Vec<T>> {
    asked(name, usual).split(',').map(|it| it.parse().with_context(|| format!("{name}: {it:?}"))).collect()
}

fn measure() -> anyhow::Result<()> {
    let cores = std::thread::available_parallelism()?.to_string();
    let seconds = Duration::from_secs_f64(asked("SECONDS", "5").parse().context("SECONDS")?);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    writeln!(stdout(), "| {} |\n|{}", HEADINGS.join(" | "), "---|".repeat(HEADINGS.len()))?;
    for name in list::<String>("QUEUES", "embedded,rabbitmq")? {
        let rabbit = (name == "rabbitmq").then(Rabbit::private);
        for load in loads()? {
            for threads in list("THREADS", &cores)? {
                let setup = setup(threads)?;
                let row = runtime.block_on(async {
                    let queue = Queue::open(rabbit.as_ref().map(Rabbit::url)).await?;
                    let worker = Worker::start(&setup, &queue)?;
                    queue.drive(&load, &worker, (WARM_UP, seconds)).await
                })?;
                let (inputs, encoding) = (load.inputs, &load.encoding);
                let cells = row.cells().collect::<Vec<_>>().join(" | ");
                writeln!(stdout(), "| {name} | {inputs} | {encoding} | {threads} | {cells} |")?;
            }
        }
    }
    Ok(())
}

fn loads() -> anyhow::Result<Vec<Load>> {
    let accents = !asked("ACCENTS", "").is_empty();
    let encodings: Vec<String> = list("ENCODINGS", "float,base64")?;
    let load = |inputs, encoding: &String| Load { inputs, encoding: encoding.clone(), accents };
    let loads =
        |inputs: usize| encodings.iter().map(move |encoding| load(inputs, encoding)).collect::<Vec<_>>();
    Ok(list("INPUTS", "32,1")?.into_iter().flat_map(loads).collect())
}

fn setup(threads: usize) -> anyhow::Result<Setup> {
    let pair =
        |setting: &str| setting.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    Ok(Setup {
        device: asked("DEVICE", "GPU-feed"),
        threads,
        rate: asked("RATE", "0").parse().context("RATE")?,
        cores: asked("CORES", ""),
        settings: asked("SET", "").split(';').filter_map(pair).collect(),
    })
}

/// Of the threads, and what was idle: cores, on average.
const HEADINGS: [&str; 14] = [
    "queue",
    "texts a message",
    "encoding",
    "threads",
    "texts/s",
    "MB/s of replies",
    "tokens a text",
    "texts a batch",
    "worker's cores",
    "runtime",
    "prepare",
    "respond",
    "others",
    "idle",
];
