//! A pool that generates or transcribes text, under the faults that reach it: workers and launchers are killed,
//! connections are cut. Each task must be answered with the same words as without any fault, and none may become a dead
//! letter.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::task::block_in_place;

use super::plan::Dice;
use crate::support::client::{Client, Task};
use crate::support::proxy::Proxy;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings, signal};
use crate::support::wait::until;

/// From one fault to the next; a short storm has faults of each kind in its time.
const FAULT_EVERY: Duration = Duration::from_secs(5);
/// Each comes once, and then they come by chance.
pub const KINDS_OF_FAULTS: usize = 4;

/// What a pool is asked.
pub struct Work {
    model: PathBuf,
    /// Further settings of the pool.
    settings: Vec<(&'static str, String)>,
    url: &'static str,
    /// Different requests; each is asked again and again.
    requests: Vec<Value>,
    /// Tasks that are open at once: more than two workers run.
    open: usize,
    /// Where a reply has its text.
    text: &'static str,
}

impl Work {
    /// Drawn texts of some hundred tokens, which take a tiny model about a second beside others.
    pub fn generation() -> Self {
        let request = |number: usize| {
            json!({"prompt": format!("text {number}"), "max_tokens": 120 + 10 * number, "temperature": 0.9,
                   "seed": number, "ignore_eos": true, "stream": number.is_multiple_of(3)})
        };
        Self {
            model: root().join("tests/fixtures/generate-llama"),
            settings: Vec::new(),
            url: "/v1/completions",
            requests: (0..12).map(request).collect(),
            open: 24,
            text: "/choices/0/text",
        }
    }

    /// Recordings that the workers fetch from a folder.
    pub fn transcription() -> Self {
        let folder = root().join("models/recordings");
        let named = |name: &str| format!("file://{}/{name}.wav", folder.display());
        let request = |(number, name): (usize, &str)| json!({"file_url": named(name), "stream": number.is_multiple_of(2)});
        let names = ["cards-001", "cards-005", "librivox-0880", "librivox-0930"];
        Self {
            model: root().join("models/whisper-tiny.en"),
            settings: vec![("pool[0].allowed_sources", format!("file://{}/", folder.display()))],
            url: "/v1/audio/transcriptions",
            requests: names.into_iter().enumerate().map(request).collect(),
            open: 12,
            text: "/text",
        }
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// What came of one storm.
#[derive(Debug, Default)]
pub struct Texts {
    pub answered: usize,
    pub repeated: usize,
    pub faults: usize,
}

struct Producer {
    client: Client,
    queue: String,
    work: Work,
    /// Open tasks, with the number of their request.
    open: BTreeMap<String, usize>,
    published: usize,
}

impl Producer {
    async fn publish(&mut self) {
        while self.open.len() < self.work.open {
            let number = self.published % self.work.requests.len();
            let id = format!("t{}", self.published);
            self.published += 1;
            let task = Task::new(self.work.requests[number].clone()).id(&*id).header("url", self.work.url);
            self.client.publish(&self.queue, task).await;
            self.open.insert(id, number);
        }
    }
}

/// Kills one worker or all, or their launcher, which is started again, or cuts all connections.
fn strike(drawn: u64, sconce: &mut Sconce, proxy: &Proxy, settings: &Settings) {
    match drawn {
        0 => proxy.cut(),
        1 => {
            sconce.signal(Signal::SIGKILL);
            *sconce = Sconce::launch(settings);
        }
        2 => sconce.workers().iter().for_each(|worker| signal(*worker, Signal::SIGKILL)),
        _ => {
            if let Some(worker) = sconce.workers().first() {
                signal(*worker, Signal::SIGKILL);
            }
        }
    }
}

/// Publishes tasks for so long, with a fault every five seconds or more often; then waits until all are answered.
pub async fn storm(seed: u64, time: Duration, work: Work) -> Texts {
    let rabbit = block_in_place(Rabbit::private);
    let proxy = Proxy::before(rabbit.address()).await;
    let settings = Settings::echo(proxy.url())
        .set("pool[0].model", work.model.display())
        .set("pool[0].devices", "cpu,cpu")
        .set("broker.heartbeat", "2s")
        .set("launcher.restart_delay", "100ms")
        .set("launcher.restart_delay_max", "1s")
        .set("launcher.max_quick_failures", 1_000);
    let settings = work.settings.iter().fold(settings, |settings, (path, value)| settings.set(path, value));
    let mut sconce = Sconce::launched(&settings).await;
    // The broker's own address: what is tried is the service, not the test's connection.
    let client = Client::connect(&rabbit.url()).await;
    let mut inbox = client.inbox(&settings.replies).await;
    let queue = settings.tasks.clone();
    let mut producer = Producer { client, queue, work, open: BTreeMap::new(), published: 0 };
    let (mut texts, mut right) = (Texts::default(), BTreeMap::<usize, String>::new());
    let (mut dice, begun) = (Dice::new(seed), Instant::now());
    let pace = FAULT_EVERY.min(time / (KINDS_OF_FAULTS as u32 + 1));
    let mut next_fault = begun + pace;
    while begun.elapsed() < time || !producer.open.is_empty() {
        let is_stormy = begun.elapsed() < time;
        if is_stormy {
            producer.publish().await;
        }
        // Faults come by the clock, and not only when a reply does: on a slow machine replies are rare.
        let reply = tokio::select! {
            reply = inbox.next() => reply,
            () = tokio::time::sleep_until(next_fault.into()), if is_stormy => {
                next_fault += pace;
                let is_first = texts.faults < KINDS_OF_FAULTS;
                let drawn = if is_first { texts.faults as u64 } else { dice.below(KINDS_OF_FAULTS as u64) };
                texts.faults += 1;
                strike(drawn, &mut sconce, &proxy, &settings);
                continue;
            }
        };
        if reply.kind == "reply.part" {
            continue;
        }
        let Some(number) = producer.open.remove(&reply.correlation_id) else {
            texts.repeated += 1;
            continue;
        };
        assert_eq!(reply.status_code(), 200, "{reply:?}");
        let text = reply.body.pointer(producer.work.text).and_then(Value::as_str).expect("a text").to_owned();
        let known = right.entry(number).or_insert_with(|| text.clone());
        assert_eq!(text, *known, "request {number}: the same text each time");
        texts.answered += 1;
    }
    until("no task is left", || async {
        producer.client.look(&producer.queue).await.filter(|(ready, _)| *ready == 0)
    })
    .await;
    assert_eq!(producer.client.look(&settings.dead).await.expect("a queue").0, 0, "none is blamed");
    assert_eq!(right.len(), producer.work.requests.len());
    // A launcher that the last fault has started may not handle signals yet.
    sconce.wait_for_log("worker spawned").await;
    assert_eq!(sconce.stop().await, 0);
    texts
}
