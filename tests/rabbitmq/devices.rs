//! Devices that break, and those that are too small: no task is answered for it.

use std::fs;
use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::admin::metrics;
use super::messages::{are_taken, busy_with, minilm, serve};
use crate::support::client::Task;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings, signal};
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

#[tokio::test(flavor = "multi_thread")]
async fn after_running_out_of_memory_batches_keep_the_size_that_fits() {
    let settings = Settings::echo(Rabbit::shared().url()).set("pool[0].batch.max_requests", 8);
    let (sconce, client, mut inbox) = serve(&settings).await;
    for round in 0..3 {
        let gate = busy_with(&sconce, &client, &settings, Task::new(json!({"input": "busy"}))).await;
        let task = |n: usize| Task::new(json!({"input": n, "fits": 2})).id(format!("{round} {n}"));
        client.publish_all(&settings.tasks, (0..8).map(task)).await;
        are_taken(&client, &settings, &mut inbox).await;
        gate.open();
        for reply in inbox.take(9).await {
            assert_eq!(reply.status_code(), 200, "{reply:?}");
            assert!(round == 0 || reply.headers["batch_size"].as_i64() <= Some(2), "{reply:?}");
        }
    }
    assert_eq!(sconce.logged("smaller batches from now on"), 1, "{}", sconce.log());
    assert_eq!(sconce.stop().await, 0);
}

/// A copy of the real model in `folder`, with no numbers in one of its tensors.
fn copy_without_numbers(folder: &Path) {
    fs::create_dir(folder.join("1_Pooling")).expect("a folder");
    for file in ["config.json", "modules.json", "tokenizer.json", "1_Pooling/config.json"] {
        fs::copy(minilm().join(file), folder.join(file)).expect("a copy");
    }
    let mut weights = fs::read(minilm().join("model.safetensors")).expect("the weights");
    let (length, rest) = weights.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("8 bytes")) as usize;
    let header: Value = serde_json::from_slice(&rest[..length]).expect("a header");
    let tensor = &header["embeddings.LayerNorm.weight"]["data_offsets"];
    let place = |index: usize| 8 + length + tensor[index].as_u64().expect("an offset") as usize;
    for number in weights[place(0)..place(1)].chunks_exact_mut(4) {
        number.copy_from_slice(&f32::NAN.to_le_bytes());
    }
    fs::write(folder.join("model.safetensors"), weights).expect("a file");
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_that_give_no_numbers_are_found_before_any_task_is_taken() {
    let folder = tempfile::tempdir().expect("a folder");
    copy_without_numbers(folder.path());
    let settings = Settings::echo(Rabbit::shared().url())
        .set("pool[0].model", folder.path().display())
        .set("launcher.max_quick_failures", 1);
    let mut sconce = Sconce::launch(&settings);
    assert_eq!(sconce.exit_code().await, 82);
    let named = "tensor embeddings.LayerNorm.weight is not finite: its number 0 is NaN";
    assert!(sconce.log().contains(named), "{}", sconce.log());
    assert_eq!(sconce.logged("consuming"), 0);
}
