//! The threads of workers: how many compute.

use std::fs;
use std::num::NonZero;

use serde_json::json;

use super::messages::{minilm, serve};
use crate::support::client::Task;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::Settings;

/// Clock ticks that each thread of a process has computed for, with its name.
fn ticks(pid: u32) -> Vec<(u64, String)> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("a process").flatten();
    let ticks = |thread: fs::DirEntry| {
        let stat = fs::read_to_string(thread.path().join("stat")).ok()?;
        let (name, rest) = stat.rsplit_once(") ")?;
        let fields: Vec<&str> = rest.split(' ').collect();
        let (user, system): (u64, u64) = (fields.get(11)?.parse().ok()?, fields.get(12)?.parse().ok()?);
        Some((user + system, name.split('(').nth(1)?.to_owned()))
    };
    threads.filter_map(ticks).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn four_cpu_workers_compute_on_no_more_threads_than_there_are_cores() {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let workers = cores.min(4);
    let settings = Settings::echo(Rabbit::shared().url())
        .set("pool[0].model", minilm().display())
        .set("pool[0].workers_per_device", workers)
        .set("pool[0].threads", "auto");
    let (sconce, client, mut inbox) = serve(&settings).await;
    client.consumers_become(&settings.tasks, workers as u32).await;
    let text = "The quick brown fox jumps over the lazy dog. ".repeat(10);
    let tasks = (0..10 * workers).map(|_| Task::new(json!({"input": vec![&text; 8]})));
    client.publish_all(&settings.tasks, tasks).await;
    inbox.take(10 * workers).await;
    let threads: Vec<_> = sconce.workers().into_iter().flat_map(ticks).collect();
    let most = threads.iter().map(|(ticks, _)| *ticks).max().unwrap_or(0);
    assert!(most > 10, "nothing was computed: {threads:?}");
    // The others read, write and prepare: a small part of what the forward pass takes.
    let computing: Vec<_> = threads.iter().filter(|(ticks, _)| *ticks * 3 > most).collect();
    assert!(computing.len() <= cores, "{computing:?} on {cores} cores");
}
