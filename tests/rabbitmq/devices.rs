//! Devices that break: no task is answered for it.

use std::fs;

use serde_json::json;

use super::messages::serve;
use crate::support::client::Task;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::Settings;

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
