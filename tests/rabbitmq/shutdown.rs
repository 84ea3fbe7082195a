//! Signals: what a worker has on its device is answered, everything else is ready again at once.

use nix::sys::signal::Signal;
use serde_json::json;

use super::messages::{busy_with, serve};
use crate::support::client::Task;
use crate::support::processes::lives;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Settings, signal};

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
