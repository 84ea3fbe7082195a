//! Messages that nobody sends by mistake: the worker that takes one lives on, and answers the next.

use std::collections::BTreeMap;

use serde_json::json;

use super::messages::serve;
use crate::support::client::Task;
use crate::support::rabbit::Rabbit;
use crate::support::raw_amqp::{LARGEST_TABLE, nested, publish};
use crate::support::sconce::Settings;

#[tokio::test(flavor = "multi_thread")]
async fn headers_nested_as_deeply_as_a_frame_allows_kill_no_worker() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).set("launcher.max_quick_failures", 2);
    let (sconce, client, mut inbox) = serve(&settings).await;
    let workers = sconce.workers();
    let deepest = LARGEST_TABLE / 5 - 2;
    for (depth, body) in [(100, "{\"input\":1}"), (deepest, "{\"input\":2}"), (deepest, "no JSON")] {
        publish(rabbit.address(), &settings.tasks, &nested(depth), body.as_bytes());
    }
    client.publish(&settings.tasks, Task::new(json!({"input": "next"})).id("next")).await;
    // Over a letter that is too large for a frame the broker closes the connection, and what was on its way
    // beside it is published again.
    let mut answered = BTreeMap::new();
    while answered.len() < 4 {
        let reply = inbox.next().await;
        answered.insert(reply.header("task_id"), reply.status_code());
    }
    let mut codes: Vec<i64> = answered.into_values().collect();
    codes.sort_unstable();
    assert_eq!(codes, [200, 200, 200, 400]);
    let letter = client.get(&settings.dead).await;
    assert_eq!((letter.header("reason").as_str(), &letter.raw[..]), ("undecodable", &b"no JSON"[..]));
    assert_eq!(sconce.workers(), workers, "the same process");
    assert_eq!(sconce.stop().await, 0);
}
