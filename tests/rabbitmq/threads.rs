//! The threads of launcher and workers: which of them the kernel ties workers to, and how many
//! compute.

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZero;

use nix::sys::signal::Signal;
use serde_json::json;

use super::messages::{minilm, serve};
use crate::support::client::Task;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Settings, signal};
use crate::support::wait::until;

/// Children of one thread, by the kernel's account.
fn children(process: u32, thread: u32) -> BTreeSet<u32> {
    let path = format!("/proc/{process}/task/{thread}/children");
    let listed = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    listed.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// The thread of that name.
fn thread_named(process: u32, name: &str) -> u32 {
    let threads = fs::read_dir(format!("/proc/{process}/task")).expect("a process").flatten();
    let is_it = |thread: &fs::DirEntry| {
        fs::read_to_string(thread.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name)
    };
    let found: Vec<_> = threads.filter(is_it).collect();
    assert_eq!(found.len(), 1, "threads named {name}");
    found[0].file_name().to_str().and_then(|id| id.parse().ok()).expect("a thread's id")
}

/// The kernel ends a worker with the *thread* that spawned it (`PR_SET_PDEATHSIG`), so a thread that
/// ends when it is idle would take healthy workers along. The thread `main`, which runs the command, lives
/// as long as its process: workers that are its children are safe however long the launcher is idle.
#[tokio::test(flavor = "multi_thread")]
async fn workers_are_tied_to_the_main_thread_that_lives_as_long_as_the_launcher() {
    let settings = Settings::echo(Rabbit::shared().url()).set("pool[0].workers_per_device", 2);
    let (sconce, client, _inbox) = serve(&settings).await;
    let of_main_thread = || {
        let workers: BTreeSet<_> = sconce.workers().into_iter().collect();
        let children = children(sconce.pid(), thread_named(sconce.pid(), "main"));
        assert!(workers.len() == 2 && workers.is_subset(&children), "{workers:?} among {children:?}");
        workers
    };
    let first = of_main_thread();
    // One that is started again has the same parent.
    let killed = *first.first().expect("two workers");
    signal(killed, Signal::SIGKILL);
    until("another in its place", || async {
        let workers = sconce.workers();
        (workers.len() == 2 && !workers.contains(&killed)).then_some(())
    })
    .await;
    client.consumers_become(&settings.tasks, 2).await;
    of_main_thread();
}

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
