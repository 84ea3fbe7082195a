//! Tests of tasks that fail and may pass at another time: how often they are tried, what is said at the end, and which
//! batches are made smaller. That a retry queue gives its messages back is shown over RabbitMQ (`tests/rabbitmq`).

use super::*;
use crate::broker::Published;
use crate::broker::memory::Reaction;

/// The queue where tasks wait for their next attempt.
const LATER: &str = "tasks, later";

fn failing(kind: &str) -> Message {
    task(kind, "mine", &json!({"input": "a", "fail": kind}))
}

fn header(message: &Message, name: &str) -> Option<String> {
    message.properties.headers.get(name).and_then(|value| value.as_str().map(str::to_owned))
}

fn attempt(reply: &Message) -> i64 {
    reply.properties.headers["attempt"].as_i64().unwrap()
}

/// Delivers each task that waits for its next attempt, until so many replies have come. Returns the replies, and how many
/// tasks have waited.
async fn with_retries(rig: &Rig, replies: usize) -> (Vec<Message>, usize) {
    let mut again = 0;
    loop {
        let come = rig.memory.published("mine");
        if come.len() >= replies {
            return (come, again);
        }
        match rig.memory.published(LATER).get(again) {
            Some(task) => {
                rig.memory.deliver([task.clone()]);
                again += 1;
            }
            None => rig.memory.wait_for_change().await,
        }
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn what_fails_once_is_tried_again_and_answered() {
    let rig = Rig::start("echo?faults", |_| ());
    rig.memory.deliver([failing("once")]);
    let (replies, again) = with_retries(&rig, 1).await;
    assert_eq!((status(&replies[0]), attempt(&replies[0]), again), (200, 2, 1));
    assert_eq!(rig.memory.published(DEAD), []);
    assert_eq!(rig.memory.until_settled(2).await, [Settled::Acked(1), Settled::Acked(2)]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn what_always_fails_is_answered_and_dead_lettered_after_its_last_attempt() {
    let rig = Rig::start("echo?faults", |assignment| assignment.pool.retry.max_attempts = 4);
    let mut failing = with_headers(failing("error"), &[("own", "kept")]);
    failing.properties.message_id = Some("m".into());
    rig.memory.deliver([failing]);
    let (replies, again) = with_retries(&rig, 1).await;
    assert_eq!((status(&replies[0]), attempt(&replies[0]), again), (500, 4, 3));
    let letter = rig.memory.until_published(DEAD, 1).await.remove(0);
    assert_eq!(header(&letter, "reason").as_deref(), Some("attempts"));
    assert_eq!((header(&letter, "task_id"), header(&letter, "own")), (Some("m".into()), Some("kept".into())));
    assert!(!letter.properties.headers.contains_key("sconce_attempt"), "{letter:?}");
    assert_eq!(body(&letter), json!({"input": "a", "fail": "error"}));
    // Put back by hand, it begins anew.
    rig.memory.deliver([letter]);
    assert_eq!(attempt(&with_retries(&rig, 2).await.0[1]), 4);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_whose_time_is_over_before_its_next_attempt_is_answered_at_once_with_its_error() {
    let rig = Rig::start("echo?faults", |assignment| assignment.pool.retry.delay = Duration::from_secs(30));
    let mut failing = failing("error");
    failing.properties.expiration = Some("10000".into());
    let begun = tokio::time::Instant::now();
    rig.memory.deliver([failing]);
    let reply = rig.memory.until_published("mine", 1).await.remove(0);
    assert_eq!((status(&reply), attempt(&reply)), (500, 1));
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert_eq!((rig.memory.published(DEAD), rig.memory.published(LATER)), (Vec::new(), Vec::new()));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_deadline_holds_over_attempts() {
    let rig = Rig::start("echo?faults", |assignment| assignment.pool.retry.max_attempts = 9);
    let mut failing = failing("error");
    failing.properties.expiration = Some("3000".into());
    rig.memory.deliver([failing]);
    let again = rig.memory.until_published(LATER, 1).await.remove(0);
    assert_eq!(again.properties.expiration, None, "it would begin anew");
    let deadline: jiff::Timestamp = header(&again, "expires").unwrap().parse().unwrap();
    let left = deadline.duration_since(jiff::Timestamp::now()).as_millis();
    assert!((1..=3_000).contains(&left), "{left} ms");
    // It is late when it returns.
    let late = with_headers(again, &[("expires", "2020-01-01T00:00:00Z"), ("sconce_attempt", "2")]);
    rig.memory.deliver([late]);
    assert_eq!(status(&rig.memory.until_published("mine", 1).await[0]), 408);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_out_of_deliveries_is_dead_lettered_with_that_reason_and_answered() {
    let rig = Rig::start("echo", |assignment| assignment.broker.delivery_limit = 2);
    let mut again = task("again", "mine", &json!({"input": "again"}));
    again.properties.message_id = Some("m".into());
    rig.memory.deliver_again(again, 2);
    let letter = rig.memory.until_published(DEAD, 1).await.remove(0);
    assert_eq!(header(&letter, "reason").as_deref(), Some("attempts"));
    assert_eq!(header(&letter, "task_id").as_deref(), Some("m"));
    assert!(header(&letter, "error").is_some_and(|error| error.contains("2 times")), "{letter:?}");
    assert_eq!(status(&rig.memory.until_published("mine", 1).await[0]), 500);
    assert_eq!(rig.memory.until_settled(1).await, [Settled::Acked(1)]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_panic_or_failure_in_the_forward_pass_is_an_error_of_one_task_alone() {
    for (kind, code) in [("panic", 500), ("error", 500), ("oom", 507)] {
        let rig = Rig::start("echo?faults", |_| ());
        rig.memory.deliver([task("busy", "mine", &json!({"input": 1, "sleep_ms": 500}))]);
        rig.until_computing("busy").await;
        let good = |n: usize| task(&n.to_string(), "mine", &json!({"input": n}));
        let mut tasks: Vec<_> = (0..7).map(good).collect();
        tasks.insert(3, failing(kind));
        rig.memory.deliver(tasks);
        let (replies, _) = with_retries(&rig, 9).await;
        for reply in &replies {
            let is_bad = reply.properties.correlation_id.as_deref() == Some(kind);
            assert_eq!(status(reply), if is_bad { code } else { 200 }, "{kind}: {reply:?}");
            if is_bad {
                assert_eq!((header(reply, "status").as_deref(), attempt(reply)), (Some("failed"), 3));
                assert!(
                    body(reply)["error"]["message"].as_str().is_some_and(|it| !it.is_empty()),
                    "{reply:?}"
                );
            }
        }
        assert_eq!((replies.len(), rig.memory.published(DEAD).len()), (9, 1), "out of attempts");
        assert_eq!(rig.finish().await.0, Ended::Drained, "the same worker");
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn after_running_out_of_memory_batches_keep_the_size_that_fits() {
    let rig = Rig::start("echo?faults", |assignment| assignment.pool.batch.max_requests = 8);
    for round in 0..3 {
        let busy = format!("busy {round}");
        rig.memory.deliver([task(&busy, "busy", &json!({"input": 1, "sleep_ms": 500}))]);
        rig.until_computing(&busy).await;
        rig.memory.deliver((0..8).map(|n| task(&n.to_string(), "mine", &json!({"input": n, "fits": 2}))));
        let replies = rig.memory.until_published("mine", 8 * (round + 1)).await;
        for reply in &replies[8 * round..] {
            let size = reply.properties.headers["batch_size"].as_i64();
            assert!(status(reply) == 200 && (round == 0 || size <= Some(2)), "{reply:?}");
        }
    }
    assert_eq!(rig.finish().await.0, Ended::Drained);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn where_no_queue_is_there_to_wait_in_the_first_attempt_is_the_last() {
    let rig = Rig::start("echo?faults", |_| ());
    rig.memory.set_reaction(LATER, Reaction::Answer(Published::Unroutable));
    rig.memory.deliver([failing("once")]);
    let reply = rig.memory.until_published("mine", 1).await.remove(0);
    assert_eq!((status(&reply), attempt(&reply)), (500, 1));
    let message = body(&reply)["error"]["message"].to_string();
    assert!(message.contains("no queue to wait in"), "{message}");
    assert_eq!(rig.memory.until_settled(1).await, [Settled::Acked(1)]);
}
