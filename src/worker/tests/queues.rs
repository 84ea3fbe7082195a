//! Tests of a pool with several queues: each gets its share whatever another holds, and tasks stay with their queue.

use tokio::time::Instant;

use super::*;
use crate::broker::memory::Reaction;
use crate::broker::{Published, Source};
use crate::config::TaskQueue;

/// The second queue of the pool.
const OTHER: &str = "other";
const SECOND: Source = Source(1);

/// A worker of two queues, with these shares in thousandths. Each batch has one task.
fn start(model: &str, shares: [u32; 2], change: impl FnOnce(&mut Assignment)) -> Rig {
    Rig::start(model, |assignment| {
        let queue = |name: &str, share| TaskQueue { share, ..TaskQueue::new(name) };
        assignment.pool.queue = vec![queue(TASKS, shares[0]), queue(OTHER, shares[1])];
        assignment.pool.batch.max_requests = 1;
        change(assignment);
    })
}

/// A task whose forward pass takes 10 ms, of a requester of its own.
fn of_stranger(number: usize) -> Message {
    slow(&format!("flood {number}"), &format!("stranger {number}"))
}

fn slow(id: &str, to: &str) -> Message {
    task(id, to, &json!({"input": id, "sleep_ms": 10}))
}

/// How long each of ten tasks of the second queue waits for its reply, one after the other.
async fn waits(rig: &Rig) -> Vec<Duration> {
    let mut waits = Vec::new();
    for number in 0..10 {
        let begun = Instant::now();
        rig.memory.deliver_from(SECOND, [slow(&number.to_string(), "innocent")]);
        rig.memory.until_published("innocent", number + 1).await;
        waits.push(begun.elapsed());
    }
    waits
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_flood_of_many_requesters_in_one_queue_delays_another_queue_by_the_batches_on_the_device() {
    let rig = start("echo", [1_000, 1_000], |_| ());
    let alone = waits(&rig).await;
    let rig = start("echo", [1_000, 1_000], |_| ());
    rig.memory.deliver((0..2_000).map(of_stranger));
    rig.until_computing("flood 0").await;
    let beside_flood = waits(&rig).await;
    let order: Vec<String> =
        rig.memory.published("innocent").iter().map(|it| body(it)["input"].to_string()).collect();
    assert_eq!(order, (0..10).map(|number| format!("\"{number}\"")).collect::<Vec<_>>());
    // One batch is on the device, and one more of the flood is next while a task of this queue is being prepared.
    for (beside, alone) in beside_flood.iter().zip(&alone) {
        assert!(*beside <= *alone + Duration::from_millis(25), "{beside_flood:?}, alone {alone:?}");
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn two_floods_are_answered_by_the_shares_of_their_queues() {
    let rig = start("echo", [1_000, 3_000], |_| ());
    rig.memory.deliver((0..400).map(of_stranger));
    rig.memory.deliver_from(SECOND, (0..400).map(|number| slow(&format!("{number}"), "one")));
    rig.memory.until_settled(200).await;
    let of_second = rig.memory.published("one").len();
    assert!((140..=160).contains(&of_second), "{of_second} of 200");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn long_answers_in_one_queue_do_not_hold_up_a_short_one_in_another() {
    let rig = Rig::start("script", |assignment| {
        assignment.pool.queue = vec![TaskQueue::new(TASKS), TaskQueue::new(OTHER)];
    });
    let generate = |id: &str, to: &str, max_tokens: usize| {
        task(id, to, &json!({"prompt": 4, "max_tokens": max_tokens, "step_ms": 10}))
    };
    let long = |number: usize| generate(&format!("{number}"), &format!("stranger {number}"), 400);
    rig.memory.deliver((0..100).map(long));
    rig.until_computing("0").await;
    let begun = Instant::now();
    rig.memory.deliver_from(SECOND, [generate("short", "innocent", 2)]);
    rig.memory.until_published("innocent", 1).await;
    let wait = begun.elapsed();
    assert!(rig.memory.published("stranger 0").is_empty(), "the long ones go on");
    assert!(wait < Duration::from_millis(500), "{wait:?}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_sentinel_of_any_queue_ends_the_consuming_of_all_behind_what_was_accepted() {
    let rig = start("echo", [1_000, 1_000], |_| ());
    rig.memory.deliver([slow("a", "mine")]);
    rig.until_computing("a").await;
    rig.memory.deliver_from(SECOND, [sentinel()]);
    rig.wait_for_event(|event| matches!(event, Event::Draining { .. })).await;
    let memory = rig.memory.clone();
    let (ended, _) = rig.join().await;
    assert_eq!(ended.unwrap(), Ended::OnRequest);
    assert_eq!(memory.settled(), [Settled::Acked(1), Settled::Acked(2)], "the sentinel is acked last");
    memory.deliver([slow("b", "mine")]);
    memory.deliver_from(SECOND, [slow("c", "mine")]);
    assert!(!memory.has_session());
    assert_eq!(memory.published("mine").len(), 1);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_failed_task_returns_to_its_own_queue_and_its_dead_letter_names_it() {
    let rig = start("echo?faults", [1_000, 1_000], |assignment| assignment.pool.retry.max_attempts = 2);
    let failing = |to: &str| task("bad", to, &json!({"input": 1, "fail": "error"}));
    rig.memory.deliver_from(SECOND, [failing("mine")]);
    let again = rig.memory.until_published("other, later", 1).await.remove(0);
    rig.memory.deliver_from(SECOND, [again]);
    let letter = rig.memory.until_published(DEAD, 1).await.remove(0);
    assert_eq!(letter.properties.headers["queue"].as_str(), Some(OTHER));
    assert!(rig.memory.published("tasks, later").is_empty());
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn tasks_of_the_short_form_background_queue_return_through_the_task_queue() {
    let rig = Rig::start("echo?faults", |assignment| {
        assignment.pool.background_queue = Some("background".to_owned());
    });
    let failing = task("bad", "mine", &json!({"input": 1, "fail": "error"}));
    rig.memory.deliver_from(SECOND, [failing]);
    rig.memory.until_published("tasks, later", 1).await;
    assert!(rig.memory.published("background, later").is_empty());
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn without_a_retry_queue_of_its_own_a_failed_task_of_a_further_queue_is_dead_lettered() {
    let rig = start("echo?faults", [1_000, 1_000], |_| ());
    rig.memory.set_reaction("other, later", Reaction::Answer(Published::Unroutable));
    rig.memory.deliver_from(SECOND, [task("bad", "mine", &json!({"input": 1, "fail": "error"}))]);
    let letter = rig.memory.until_published(DEAD, 1).await.remove(0);
    assert_eq!(letter.properties.headers["queue"].as_str(), Some(OTHER));
    assert_eq!(status(&rig.memory.until_published("mine", 1).await[0]), 500);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn answers_are_counted_by_queue() {
    let rig = start("echo", [1_000, 1_000], |_| ());
    rig.memory.deliver([slow("a", "mine")]);
    rig.memory.deliver_from(SECOND, [slow("b", "mine"), slow("c", "mine")]);
    rig.memory.until_settled(3).await;
    let mut queues = std::collections::BTreeMap::<String, u64>::new();
    for event in rig.finish().await.1 {
        if let Event::Stats(stats) = event {
            stats.queues.into_iter().for_each(|(queue, count)| *queues.entry(queue).or_default() += count);
        }
    }
    assert_eq!(queues.into_iter().collect::<Vec<_>>(), [(OTHER.to_owned(), 2), (TASKS.to_owned(), 1)]);
}
