//! One large job (`sconce submit`) under the faults that reach it: its client, workers and launchers are killed,
//! connections are cut, the broker is restarted. Each row must be answered once, in its place, without an error.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::task::block_in_place;

use super::plan::Dice;
use crate::support::proxy::Proxy;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings, signal};
use crate::support::wait::until_within;

/// From one fault to the next; a short storm has faults of each kind in its time.
const FAULT_EVERY: Duration = Duration::from_secs(5);
/// Each comes once, and then they come by chance.
pub const KINDS_OF_FAULTS: usize = 5;
/// Rows for each second of the storm: the workers can answer 400 a second.
const ROWS_A_SECOND: u64 = 200;
/// After the storm, most time to the end of the job: rows that the broker lost are asked for again.
const ENDING: Duration = Duration::from_secs(120);

/// What came of one storm.
#[derive(Debug, Default)]
pub struct Done {
    pub faults: usize,
    pub runs: usize,
}

struct Scene {
    rabbit: Rabbit,
    proxy: Proxy,
    settings: Settings,
    sconce: Sconce,
    job: Sconce,
    files: [String; 2],
    runs: usize,
}

impl Scene {
    fn submit(settings: &Settings, [input, output]: &[String; 2]) -> Sconce {
        let flags = ["--reply-timeout", "15s", "--attempts", "9", "--rows-per-task", "1"];
        Sconce::run(settings, &[&["submit", "-i", input, "-o", output][..], &flags].concat())
    }

    /// The client again, if it has ended before its time: it may give up where the broker is away.
    fn keep_going(&mut self) {
        if self.job.ended().is_some_and(|code| code != 0) {
            self.job = Self::submit(&self.settings, &self.files);
            self.runs += 1;
        }
    }

    fn strike(&mut self, drawn: u64) {
        match drawn {
            0 => self.proxy.cut(),
            1 => {
                self.sconce.signal(Signal::SIGKILL);
                self.sconce = Sconce::launch(&self.settings);
            }
            2 => self.sconce.workers().iter().for_each(|worker| signal(*worker, Signal::SIGKILL)),
            3 => block_in_place(|| {
                self.rabbit.kill();
                self.rabbit.start();
            }),
            _ => self.job.signal(Signal::SIGKILL),
        }
    }
}

/// Runs a job for at least so long, with a fault every five seconds or more often; then waits until all is answered.
pub async fn storm(seed: u64, time: Duration) -> Done {
    let rabbit = block_in_place(Rabbit::private);
    let proxy = Proxy::before(rabbit.address()).await;
    let settings = Settings::echo(proxy.url())
        .set("pool[0].devices", "cpu,cpu")
        .set("pool[0].batch.max_requests", 2)
        .set("broker.heartbeat", "2s")
        .set("launcher.restart_delay", "100ms")
        .set("launcher.restart_delay_max", "1s")
        .set("launcher.max_quick_failures", 1_000);
    let folder = tempfile::tempdir().expect("a folder");
    let rows = time.as_secs() * ROWS_A_SECOND;
    let line = |number: u64| {
        let body = json!({"input": format!("text {number}"), "sleep_ms": 10});
        json!({"custom_id": format!("row-{number}"), "method": "POST", "url": "/v1/embeddings", "body": body})
    };
    let files = ["in.jsonl", "out.jsonl"].map(|name| folder.path().join(name).display().to_string());
    let lines: String = (0..rows).map(|number| format!("{}\n", line(number))).collect();
    fs::write(&files[0], lines).expect("an input");
    let sconce = Sconce::launched(&settings).await;
    let job = Scene::submit(&settings, &files);
    let mut scene = Scene { rabbit, proxy, settings, sconce, job, files, runs: 1 };
    let pace = FAULT_EVERY.min(time / (KINDS_OF_FAULTS as u32));
    let (mut dice, begun, mut faults) = (Dice::new(seed), Instant::now(), 0);
    while begun.elapsed() < time || faults < KINDS_OF_FAULTS {
        tokio::time::sleep(pace).await;
        let is_first = faults < KINDS_OF_FAULTS;
        let drawn = if is_first { faults as u64 } else { dice.below(KINDS_OF_FAULTS as u64) };
        scene.strike(drawn);
        faults += 1;
        scene.keep_going();
    }
    until_within(ENDING, "the job's end", || {
        scene.keep_going();
        let ended = scene.job.ended() == Some(0);
        async move { ended.then_some(()) }
    })
    .await;
    check(Path::new(&scene.files[1]), rows);
    assert_eq!(scene.sconce.stop().await, 0);
    Done { faults, runs: scene.runs }
}

fn check(output: &Path, rows: u64) {
    let written = fs::read_to_string(output).expect("an output");
    assert_eq!(written.lines().count() as u64, rows);
    for (number, line) in written.lines().enumerate() {
        let line: Value = serde_json::from_str(line).expect("JSON");
        assert_eq!(line["custom_id"], format!("row-{number}"), "{line}");
        assert_eq!(line["response"]["body"]["input"], format!("text {number}"), "{line}");
    }
}
