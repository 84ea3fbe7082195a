//! Devices that break: no task is answered for it.

use std::fs;

use nix::sys::signal::Signal;
use serde_json::json;

use super::admin::metrics;
use super::messages::serve;
use crate::support::client::Task;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Settings, signal};
use crate::support::wait::until;

#[tokio::test(flavor = "multi_thread")]
async fn a_known_input_finds_a_broken_device_which_answers_nobody_until_well() {
    let folder = tempfile::tempdir().expect("a folder");
    let broken = folder.path().join("broken");
    let settings = Settings::echo(Rabbit::shared().url())
        .set("pool[0].model", format!("echo?faults={}", broken.display()))
        .set("launcher.restart_delay", "50ms")
        .set("launcher.restart_delay_max", "200ms")
        .set("launcher.max_quick_failures", 1000);
    let (sconce, client, mut inbox) = serve(&settings).await;
    fs::write(&broken, "").expect("a file");
    let tasks = (0..50).map(|n| Task::new(json!({"input": n})).id(n.to_string()));
    client.publish_all(&settings.tasks, tasks).await;
    // Tried at the start of each worker, before it consumes.
    sconce.wait_for_log_times("a known input fails", 4).await;
    assert_eq!(sconce.logged("consuming"), 1, "{}", sconce.log());
    client.ready_becomes(&settings.tasks, 50).await;
    fs::remove_file(&broken).expect("the file");
    for reply in inbox.take(50).await {
        assert_eq!((reply.status_code(), reply.header("device").as_str()), (200, "cpu"), "{reply:?}");
    }
    assert_eq!(sconce.stop().await, 0);
    assert_eq!(client.look(&settings.dead).await, Some((0, 0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_on_an_unfit_device_takes_no_work_and_says_why_until_it_is_fit() {
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state");
    let settings = Settings::echo(Rabbit::shared().url())
        .set("pool[0].model", format!("echo?faults={}", state.display()))
        .set("launcher.restart_delay", "50ms")
        .set("launcher.restart_delay_max", "200ms")
        .set("launcher.max_quick_failures", 1000);
    let (sconce, client, mut inbox) = serve(&settings).await;
    fs::write(&state, "wrong_result").expect("a file");
    signal(sconce.workers()[0], Signal::SIGKILL);
    sconce.wait_for_log_times("exit=83", 2).await;
    client.publish(&settings.tasks, Task::new(json!({"input": 1})).id("1")).await;
    client.ready_becomes(&settings.tasks, 1).await;
    let admin = sconce.admin().await;
    let counted = || async {
        let seen = metrics(&admin).await;
        let name = |it: &str| it.starts_with("sconce_worker_restarts") && it.contains("\"wrong_result\"");
        seen.iter().any(|(it, count)| name(it) && *count >= 2.0).then_some(())
    };
    until("they are counted by their reason", counted).await;
    assert_eq!(sconce.logged("consuming"), 1, "{}", sconce.log());
    fs::remove_file(&state).expect("the file");
    assert_eq!(inbox.take(1).await[0].status_code(), 200);
    assert_eq!(sconce.stop().await, 0);
}
