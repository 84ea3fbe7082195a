//! Signals: what a worker has on its device is answered, everything else is ready again at once.

use nix::sys::signal::Signal;
use serde_json::json;

use super::messages::{busy_with, serve};
use crate::support::client::Task;
use crate::support::processes::lives;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings, signal};
use crate::support::wait::until;

fn settings() -> Settings {
    let settings = Settings::echo(Rabbit::shared().url()).set("pool[0].prefetch", 10);
    settings.set("pool[0].batch.max_requests", 1)
}

fn task(id: usize) -> Task {
    Task::new(json!({"input": id})).id(id.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_answers_the_batch_on_the_device_and_returns_the_rest_at_once() {
    let settings = settings();
    let (mut sconce, client, mut inbox) = serve(&settings).await;
    let gate = busy_with(&sconce, &client, &settings, task(0)).await;
    client.publish_all(&settings.tasks, (1..6).map(task)).await;
    client.ready_becomes(&settings.tasks, 0).await;
    let workers = sconce.workers();
    sconce.signal(Signal::SIGTERM);
    client.ready_becomes(&settings.tasks, 5).await;
    assert!(lives(workers[0]), "before the batch ends");
    gate.open();
    assert_eq!(sconce.exit_code().await, 0);
    assert_eq!(inbox.next().await.correlation_id, "0");
    for id in 1..6 {
        assert_eq!(client.get(&settings.tasks).await.correlation_id, id.to_string(), "in their order");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_past_the_deadline_goes_back_and_the_exit_says_so() {
    let settings = settings().set("launcher.shutdown_grace", "500ms");
    let (mut sconce, client, _inbox) = serve(&settings).await;
    busy_with(&sconce, &client, &settings, task(1)).await;
    let workers = sconce.workers();
    sconce.signal(Signal::SIGTERM);
    // The batch never ends.
    assert_eq!(sconce.exit_code().await, 84);
    assert!(!lives(workers[0]));
    client.ready_becomes(&settings.tasks, 1).await;
    let returned = client.get(&settings.tasks).await;
    assert!(returned.redelivered && returned.correlation_id == "1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_sigterm_does_not_wait_for_the_batch() {
    let settings = settings().set("launcher.shutdown_grace", "10m");
    let (mut sconce, client, _inbox) = serve(&settings).await;
    busy_with(&sconce, &client, &settings, task(1)).await;
    sconce.signal(Signal::SIGTERM);
    sconce.wait_for_log("worker draining").await;
    // Again and again, because one that comes at once counts as the first.
    until("sconce ends", || async {
        sconce.signal(Signal::SIGTERM);
        (!lives(sconce.pid())).then_some(())
    })
    .await;
    assert_eq!(sconce.exit_code().await, 84);
    client.ready_becomes(&settings.tasks, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ctrl_c_that_reaches_launcher_and_workers_counts_once() {
    let settings = settings();
    let (mut sconce, client, mut inbox) = serve(&settings).await;
    let gate = busy_with(&sconce, &client, &settings, task(0)).await;
    client.publish_all(&settings.tasks, (1..3).map(task)).await;
    client.ready_becomes(&settings.tasks, 0).await;
    let workers = sconce.workers();
    sconce.signal(Signal::SIGINT);
    workers.iter().for_each(|pid| signal(*pid, Signal::SIGINT));
    client.ready_becomes(&settings.tasks, 2).await;
    gate.open();
    assert_eq!(sconce.exit_code().await, 0);
    assert_eq!(inbox.next().await.correlation_id, "0");
    client.ready_becomes(&settings.tasks, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_has_its_own_process_group_so_that_ctrl_c_is_the_launchers() {
    let settings = settings();
    let (sconce, _client, _inbox) = serve(&settings).await;
    let group =
        |pid: u32| nix::unistd::getpgid(Some(nix::unistd::Pid::from_raw(pid as i32))).expect("a group");
    assert_ne!(group(sconce.pid()), group(sconce.workers()[0]));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_service_stops_with_0_and_does_not_wait_for_the_grace() {
    let settings = settings().set("launcher.shutdown_grace", "10m");
    let (mut sconce, client, _inbox) = serve(&settings).await;
    sconce.signal(Signal::SIGTERM);
    assert_eq!(sconce.exit_code().await, 0);
    client.consumers_become(&settings.tasks, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sigterm_during_a_sentinels_work_hands_the_sentinel_back() {
    let settings = settings();
    let (mut sconce, client, mut inbox) = serve(&settings).await;
    let gate = busy_with(&sconce, &client, &settings, task(0)).await;
    client.publish_all(&settings.tasks, [task(1), Task::sentinel()]).await;
    sconce.wait_for_log("sentinel received").await;
    sconce.signal(Signal::SIGTERM);
    client.ready_becomes(&settings.tasks, 2).await;
    gate.open();
    assert_eq!(sconce.exit_code().await, 0);
    assert_eq!(inbox.next().await.correlation_id, "0");
    client.becomes(&settings.tasks, (2, 0)).await;
    assert_eq!(client.get(&settings.tasks).await.correlation_id, "1");
    assert_eq!(client.get(&settings.tasks).await.kind, "control.shutdown");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_never_found_its_broker_stops_at_once_too() {
    let nowhere = Settings::echo("amqp://guest:guest@127.0.0.1:1/%2f").set("launcher.shutdown_grace", "10m");
    let mut sconce = Sconce::launch(&nowhere);
    sconce.wait_for_log("127.0.0.1:1").await;
    sconce.wait_for_log("worker ready").await;
    sconce.signal(Signal::SIGTERM);
    assert_eq!(sconce.exit_code().await, 0, "it holds nothing");
}
