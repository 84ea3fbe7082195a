//! Processes that die, fail or cannot start: what is left, which code they exit with, and that no
//! secret shows anywhere.

use std::fs;

use nix::sys::signal::Signal;
use serde_json::json;

use super::messages::{busy_with, serve};
use crate::support::client::{Client, Task};
use crate::support::processes::lives;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings, signal};
use crate::support::wait::until;

fn settings() -> Settings {
    Settings::echo(Rabbit::shared().url()).set("launcher.restart_delay", "50ms")
}

fn fault(kind: &str) -> Task {
    Task::new(json!({"input": "bad", "fail": kind})).id(kind)
}

/// Seven tasks and, as their fourth, `culprit`, in one batch if the model takes it: they come while
/// it is busy.
async fn among_seven(sconce: &Sconce, client: &Client, settings: &Settings, culprit: Task) {
    let gate = busy_with(sconce, client, settings, Task::new(json!({"input": "busy"})).id("first")).await;
    let good = |n: usize| Task::new(json!({"input": n})).id(n.to_string());
    let mut tasks: Vec<_> = (0..7).map(good).collect();
    tasks.insert(3, culprit);
    client.publish_all(&settings.tasks, tasks).await;
    client.ready_becomes(&settings.tasks, 0).await;
    gate.open();
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_launcher_is_killed_its_workers_are_gone_within_seconds() {
    let settings = settings().set("pool[0].devices", "[\"cpu\", \"cpu\"]");
    let (sconce, client, _inbox) = serve(&settings).await;
    client.consumers_become(&settings.tasks, 2).await;
    // One of them cannot end its batch.
    busy_with(&sconce, &client, &settings, Task::new(json!({"input": 1}))).await;
    let workers = sconce.workers();
    sconce.signal(Signal::SIGKILL);
    until("no worker lives", || async { workers.iter().all(|pid| !lives(*pid)).then_some(()) }).await;
    client.ready_becomes(&settings.tasks, 1).await;
}

async fn are_gone(processes: &[u32]) {
    let what = format!("{processes:?} are gone");
    until(&what, || async { processes.iter().all(|pid| !lives(*pid)).then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_guard_in_place_of_a_killed_one_guards_the_workers_before_it_too() {
    let settings = settings()
        .set("pool[0].devices", "[\"cpu\", \"cpu\"]")
        .set("pool[0].batch.max_requests", 1)
        .set("pool[0].prefetch", 2)
        .set("launcher.shutdown_grace", "2s");
    let (sconce, client, _inbox) = serve(&settings).await;
    client.consumers_become(&settings.tasks, 2).await;
    let gates: Vec<_> = (0..4).map(|_| sconce.gate()).collect();
    let held = |gate| Task::new(json!({"input": 1})).held_at(gate);
    client.publish_all(&settings.tasks, gates.iter().map(held)).await;
    let one_each = || async { (gates.iter().filter(|gate| gate.is_held()).count() == 2).then_some(()) };
    until("each worker has one on its device", one_each).await;
    let (before, workers) = (sconce.guard().expect("a guard"), sconce.workers());
    signal(before, Signal::SIGKILL);
    are_gone(&[before]).await;
    signal(workers[0], Signal::SIGKILL);
    let guard = until("another guard", || async { sconce.guard() }).await;
    let replaced = async || {
        let workers = sconce.workers();
        (workers.len() == 2).then_some(workers)
    };
    let all = until("another worker", replaced).await;
    assert!(guard != before && all.contains(&workers[1]), "{all:?} after {workers:?}");
    sconce.signal(Signal::SIGKILL);
    // It is computing, and cannot have ended yet.
    signal(workers[1], Signal::SIGSTOP);
    are_gone(&all).await;
    are_gone(&[guard]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_started_by_hand_works_and_stops_on_sigterm() {
    let settings = settings();
    let mut worker = Sconce::run(&settings, &["worker", "--pool", &settings.name]);
    let client = Client::connect(&Rabbit::shared().url()).await;
    worker.consumes(1).await;
    let mut inbox = client.inbox(&settings.replies).await;
    client.publish(&settings.tasks, Task::new(json!({"input": "by hand"}))).await;
    let reply = inbox.next().await;
    assert_eq!(reply.body["input"], "by hand");
    assert!(reply.header("worker").contains(&settings.name), "{}", reply.header("worker"));
    worker.signal(Signal::SIGTERM);
    assert_eq!(worker.exit_code().await, 0);
    let mut worker = Sconce::run(&settings, &["worker"]);
    client.publish(&settings.tasks, Task::sentinel()).await;
    assert_eq!(worker.exit_code().await, 80, "stopped on request");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_breaks_a_device_which_is_well_without_it_is_dead_lettered() {
    let settings = settings();
    let (sconce, client, mut inbox) = serve(&settings).await;
    client.publish(&settings.tasks, fault("device")).await;
    let reply = inbox.next().await;
    assert_eq!((reply.correlation_id.as_str(), reply.status_code()), ("device", 500));
    let letter = client.get(&settings.dead).await;
    assert_eq!(letter.header("reason"), "poison");
    assert_eq!(letter.header("exit"), "exit status: 83 (the device failed)");
    assert_eq!(sconce.stop().await, 0);
    client.becomes(&settings.tasks, (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_device_does_not_drain_the_queue_into_errors() {
    let settings = settings().set("launcher.max_quick_failures", 2);
    let mut sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&Rabbit::shared().url()).await;
    client.publish(&settings.tasks, fault("device")).await;
    // Prepared while the device fails: none of them may be answered for it.
    let behind = (0..500).map(|n| Task::new(json!({"input": "good"})).id(format!("good {n}")));
    client.publish_all(&settings.tasks, behind).await;
    assert_eq!(sconce.exit_code().await, 83);
    let ready = async |queue: &str| client.look(queue).await.map_or(0, |(ready, _)| ready);
    let answered = ready(&settings.replies).await;
    let back = async || (ready(&settings.tasks).await + answered >= 501).then_some(());
    until("all tasks are answered or back", back).await;
    assert_eq!(client.look(&settings.dead).await, Some((0, 0)));
    for _ in 0..answered {
        assert_eq!(client.get(&settings.replies).await.status_code(), 200, "an error for a good task");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_kills_workers_is_dead_lettered_and_others_are_answered() {
    for (kind, devices) in [("exit", r#"["cpu", "cpu", "cpu"]"#), ("prepare", r#"["cpu"]"#)] {
        let settings = settings().set("pool[0].devices", devices);
        let (sconce, client, mut inbox) = serve(&settings).await;
        among_seven(&sconce, &client, &settings, fault(kind)).await;
        let mut codes = std::collections::BTreeMap::new();
        while codes.len() < 9 {
            let reply = inbox.next().await;
            codes.insert(reply.correlation_id.clone(), reply.status_code());
        }
        assert_eq!(codes.remove(kind), Some(500));
        assert!(codes.values().all(|code| *code == 200), "{codes:?}");
        let letter = client.get(&settings.dead).await;
        assert_eq!((letter.header("reason").as_str(), letter.correlation_id.as_str()), ("poison", kind));
        assert_eq!(letter.body, json!({"input": "bad", "fail": kind}));
        assert!(!letter.header("error").is_empty() && letter.header("task_id") == kind);
        assert_eq!(letter.header("exit"), "signal: 6 (SIGABRT)");
        assert!(
            letter.headers["deaths"].as_i64() >= Some(3) && letter.header("last_log").contains("consuming")
        );
        client.publish(&settings.tasks, Task::new(json!({"input": "on"})).id("on")).await;
        // A worker that dies between a confirm and the ack leaves a second reply behind.
        while inbox.next().await.correlation_id != "on" {}
        assert_eq!(sconce.stop().await, 0);
        client.becomes(&settings.tasks, (0, 0)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_is_in_no_argument_log_reply_or_dead_letter() {
    const SECRET: &str = "s3cr3t-0f-th3-t3st";
    let rabbit = Rabbit::shared();
    rabbit.add_user("worker", SECRET, [".*", ".*", ".*"]);
    let settings = settings().over(rabbit.url_for(&format!("worker:{SECRET}"), "/"));
    // Lapin would show its frames, with the password as a list of bytes.
    let settings = settings.environment("SCONCE_LOG", "trace");
    let (mut sconce, client, mut inbox) = serve(&settings).await;
    let mut seen = Vec::new();
    for pid in sconce.workers().into_iter().chain([sconce.pid()]) {
        seen.push(fs::read(format!("/proc/{pid}/cmdline")).expect("a process"));
    }
    client.publish(&settings.tasks, Task::raw("no JSON")).await;
    let (reply, letter) = (inbox.next().await, client.get(&settings.dead).await);
    seen.extend([reply.raw.clone(), letter.raw.clone(), format!("{reply:?} {letter:?}").into_bytes()]);
    sconce.signal(Signal::SIGTERM);
    assert_eq!(sconce.exit_code().await, 0);
    seen.push(sconce.log().into_bytes());
    // And where it is wrong: a broker that refuses it is named without it.
    rabbit.change_password("worker", "another");
    let mut refused = Sconce::launch(&settings);
    assert_eq!(refused.exit_code().await, 78);
    assert!(refused.log().contains("127.0.0.1") && refused.log().contains("worker:***"), "{}", refused.log());
    seen.push(refused.log().into_bytes());
    let mut shown = Sconce::run(&settings, &["check-config"]);
    assert_eq!(shown.exit_code().await, 0);
    seen.push(shown.log().into_bytes());
    let spelled = format!("{:?}", SECRET.as_bytes());
    let spelled = spelled.trim_matches(['[', ']']).to_owned();
    for bytes in seen {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        assert!(!text.contains(SECRET) && !text.contains(&spelled), "{text}");
    }
}
