//! The worker process: started as a launcher starts one, with its assignment on its stdin; and the CPU
//! time of its threads, by the kernel's account.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::{fs, thread};

use anyhow::{Context as _, ensure};
use sconce::config::{self, Assignment, Secret};
use sconce::protocol::control::{self, Event};

use super::card;
use super::load::{Queue, TASKS};

/// Of `/proc/*/stat`.
pub const TICKS: f64 = 100.0;

/// What worker to start.
pub struct Setup {
    pub device: String,
    pub threads: usize,
    /// Of the card, in texts a second; 0: no bound.
    pub rate: f64,
    /// As `taskset` takes them; empty: all.
    pub cores: String,
    /// As with `--set`.
    pub settings: Vec<(String, String)>,
}

/// A running worker; ends with this.
pub struct Worker {
    child: Child,
}

impl Worker {
    /// Starts one, and waits until it takes tasks.
    pub fn start(setup: &Setup, queue: &Queue) -> anyhow::Result<Self> {
        let program = std::env::current_exe()?;
        let program = program.to_str().context("where is this program?")?;
        let launcher = std::process::id().to_string();
        let threads = setup.threads.to_string();
        let mut words = vec![program, "worker", "--launched-by", &launcher, "--slot", "feed/0"];
        if !setup.cores.is_empty() {
            words.splice(0..0, ["taskset", "-c", &setup.cores]);
        }
        let mut child = Command::new(words[0])
            .args(&words[1..])
            .env("RAYON_NUM_THREADS", &threads)
            .env("SCONCE_LOG", std::env::var("SCONCE_LOG").unwrap_or_else(|_| "off".into()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let start = control::Command::Start {
            assignment: serde_json::to_value(assignment(setup, queue)?)?,
            deaths: Vec::new(),
            paused: false,
        };
        child.stdin.as_mut().context("a pipe")?.write_all(&control::encode(&start))?;
        let mut lines = BufReader::new(child.stdout.take().context("a pipe")?).lines();
        let serving = lines.by_ref().map_while(Result::ok).any(|line| {
            let event = control::decode(&line);
            matches!(event, Ok(Event::Serving))
        });
        ensure!(serving, "the worker ended before it took tasks");
        thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        Ok(Self { child })
    }

    /// Seconds that its threads have computed for so far, by their names.
    pub fn seconds(&self) -> anyhow::Result<BTreeMap<String, f64>> {
        let mut seconds = BTreeMap::new();
        for thread in fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            // One that ends meanwhile has done little.
            let Ok(stat) = fs::read_to_string(thread?.path().join("stat")) else { continue };
            let (name, rest) = stat.rsplit_once(") ").context("stat")?;
            let name = name.split_once('(').context("stat")?.1;
            let ticks = rest.split(' ').skip(11).take(2).filter_map(|it| it.parse::<f64>().ok());
            *seconds.entry(name.to_owned()).or_default() += ticks.sum::<f64>() / TICKS;
        }
        Ok(seconds)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The end of its stdin: its launcher is gone.
        self.child.stdin = None;
        let _ = self.child.wait();
    }
}

fn assignment(setup: &Setup, queue: &Queue) -> anyhow::Result<Assignment> {
    let settings = config::load(&[], [], &setup.settings)?.settings;
    let mut pool = settings.pools.into_iter().next().context("no pool")?;
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/models/all-MiniLM-L6-v2");
    pool.model = format!("{}:{}:{model}", card::NAME, setup.rate);
    pool.task_queue = TASKS.into();
    let mut broker = settings.broker;
    broker.urls = vec![Secret::new(queue.url.clone())];
    Ok(Assignment {
        slot: "feed/0".into(),
        worker: "here/feed/0".into(),
        device: setup.device.clone(),
        sharers: 1,
        numa_node: None,
        threads: setup.threads,
        pool,
        broker,
        telemetry: settings.telemetry,
        reserved_queues: Vec::new(),
        broker_reached: false,
    })
}
