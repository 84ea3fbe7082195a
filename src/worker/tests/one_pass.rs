//! Tests of one-pass tasks: they are accepted, computed, answered and settled, or handed back.

use super::*;
use crate::broker::Published;
use crate::broker::memory::Reaction;
use crate::protocol::stats::{Stage, Stats};

fn echo(id: &str) -> Message {
    task(id, "mine", &json!({"input": id}))
}

fn slow(id: &str, sleep_ms: u64) -> Message {
    task(id, "mine", &json!({"input": id, "sleep_ms": sleep_ms}))
}

fn ids(messages: &[Message]) -> Vec<&str> {
    messages.iter().map(|message| message.properties.correlation_id.as_deref().unwrap()).collect()
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn simultaneous_tasks_form_a_batch_and_are_acked_after_their_confirms() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.set_reaction("late", Reaction::AnswerAfter(Duration::from_millis(100), Published::Confirmed));
    rig.memory.deliver([echo("a"), task("b", "late", &json!({"input": 1})), echo("c")]);
    let replies = rig.memory.until_published("mine", 2).await;
    assert_eq!(ids(&replies), ["a", "c"]);
    for reply in &replies {
        assert_eq!((status(reply), reply.properties.headers["batch_size"].as_i64()), (200, Some(3)));
    }
    assert_eq!(rig.memory.until_settled(2).await, [Settled::Acked(1), Settled::Acked(3)]);
    assert_eq!(rig.memory.until_settled(3).await[2], Settled::Acked(2), "its queue confirms after 100 ms");
    assert_eq!(rig.finish().await.0, Ended::Drained);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_sentinel_is_acked_last_and_later_deliveries_go_back_in_order() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.deliver([slow("a", 500), echo("b"), sentinel(), echo("c"), sentinel(), echo("d")]);
    let memory = rig.memory.clone();
    let (ended, _) = rig.join().await;
    assert_eq!(ended.unwrap(), Ended::OnRequest);
    let settled = memory.settled();
    assert_eq!(settled[..3], [Settled::Requeued(4), Settled::Requeued(5), Settled::Requeued(6)]);
    assert_eq!(settled.last(), Some(&Settled::Acked(3)));
    assert_eq!(ids(&memory.published("mine")), ["a", "b"]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_drain_finishes_what_is_on_the_device_and_hands_back_what_waits() {
    let rig = Rig::start("echo", |assignment| assignment.pool.batch.max_requests = 1);
    rig.memory.deliver([slow("a", 500), echo("b"), echo("c")]);
    rig.until_computing("a").await;
    rig.stop.advance(Phase::Returning, "test");
    let memory = rig.memory.clone();
    assert_eq!(rig.join().await.0.unwrap(), Ended::Drained);
    assert_eq!(memory.settled(), [Settled::Requeued(2), Settled::Requeued(3), Settled::Acked(1)]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn an_abort_waits_for_nothing() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.deliver([slow("a", 60_000)]);
    rig.until_computing("a").await;
    rig.stop.advance(Phase::Aborting, "test");
    let memory = rig.memory.clone();
    assert_eq!(rig.join().await.0.unwrap(), Ended::Aborted);
    assert_eq!(memory.settled(), []);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_pause_ends_the_session_and_the_next_begins_when_resumed() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.deliver([echo("a")]);
    rig.memory.until_settled(1).await;
    rig.control.pause.set(true);
    rig.wait_for_event(|event| *event == Event::Paused).await;
    rig.memory.deliver([echo("b")]);
    assert!(!rig.memory.has_session(), "it waits in the queue");
    rig.control.pause.set(false);
    rig.memory.until_settled(2).await;
    let (_, events) = rig.finish().await;
    let name = |event: &Event| match event {
        Event::Serving => Some("serving"),
        Event::Paused => Some("paused"),
        _ => None,
    };
    let names: Vec<_> = events.iter().filter_map(name).collect();
    assert_eq!(names, ["serving", "paused", "serving"]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn bad_tasks_are_answered_with_what_is_wrong_and_their_neighbours_go_on() {
    let rig = Rig::start("echo", |assignment| assignment.pool.max_body = 1_000);
    let mut expired = echo("expired");
    expired.properties.expiration = Some("0".into());
    let mut typed = echo("typed");
    typed.properties.content_type = Some("image/png".into());
    let large = task("large", "mine", &json!({"input": "x".repeat(1_000)}));
    let undecodable = Message { body: "{".into(), ..echo("undecodable") };
    rig.memory.deliver([expired, typed, large, undecodable, echo("good")]);
    let replies = rig.memory.until_published("mine", 5).await;
    let mut found: Vec<_> = ids(&replies).into_iter().zip(replies.iter().map(status)).collect();
    found.sort_unstable();
    let expected = [("expired", 408), ("good", 200), ("large", 413), ("typed", 400), ("undecodable", 400)];
    assert_eq!(found, expected);
    let mut dead = rig.memory.published(DEAD);
    dead.sort_by_key(|letter| letter.properties.correlation_id.clone());
    assert_eq!(ids(&dead), ["typed", "undecodable"]);
    assert_eq!(rig.memory.until_settled(5).await.len(), 5);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_that_expires_while_it_waits_for_the_device_is_answered_at_once() {
    let rig = Rig::start("echo", |assignment| assignment.pool.batch.max_requests = 1);
    let mut late = echo("late");
    late.properties.expiration = Some("300".into());
    let begun = tokio::time::Instant::now();
    rig.memory.deliver([slow("a", 500), late]);
    let replies = rig.memory.until_published("mine", 1).await;
    assert_eq!((ids(&replies), status(&replies[0])), (vec!["late"], 408));
    assert!((300..400).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    assert_eq!(ids(&rig.memory.until_published("mine", 2).await), ["late", "a"]);
    assert_eq!(rig.memory.until_settled(2).await, [Settled::Acked(2), Settled::Acked(1)]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_queue_that_confirms_nothing_costs_its_own_task_alone() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.set_reaction("stuck", Reaction::Nothing);
    rig.memory.deliver([task("stuck", "stuck", &json!({"input": 1})), echo("a"), echo("b")]);
    assert_eq!(rig.memory.until_settled(2).await, [Settled::Acked(2), Settled::Acked(3)]);
    let begun = tokio::time::Instant::now();
    let letter = rig.memory.until_published(DEAD, 1).await.remove(0);
    assert_eq!(letter.properties.headers["reason"].as_str(), Some("unconfirmed"));
    let waited = begun.elapsed().as_secs();
    assert!((85..100).contains(&waited), "pool.reply_timeout is 90 s: {waited}");
    assert_eq!(rig.memory.until_settled(3).await[2], Settled::Acked(1));
}

fn to(queue: &str, id: &str) -> Message {
    task(id, queue, &json!({"input": id}))
}

/// The tasks that were computed.
fn computed(events: &[Event]) -> Vec<String> {
    let forward = |event: &Event| match event {
        Event::Forward { tasks } => tasks.iter().map(|task| task.id.clone()).collect(),
        _ => Vec::new(),
    };
    events.iter().flat_map(forward).collect()
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn half_the_prefetch_may_wait_for_a_full_queue_and_the_rest_is_put_off() {
    // The worker wants more than the broker grants.
    let rig = Rig::start("echo", |assignment| assignment.pool.prefetch = Some(200));
    rig.memory.set_granted(8);
    rig.memory.set_reaction("full", Reaction::Answer(Published::Nacked));
    rig.memory.deliver((0..20).map(|n| to("full", &n.to_string())));
    let begun = tokio::time::Instant::now();
    let again = rig.memory.until_published("tasks, later", 16).await;
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    for task in &again {
        let headers = &task.properties.headers;
        assert!(headers["sconce_put_off_since"].as_str().is_some(), "{headers:?}");
        assert!(!headers.contains_key("sconce_attempt"), "no attempt is counted: {headers:?}");
    }
    assert_eq!(rig.memory.published(DEAD), []);
    rig.memory.until_settled(16).await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn tasks_are_put_off_also_if_the_broker_is_slow_to_refuse_their_replies() {
    let rig = Rig::start("echo", |assignment| assignment.pool.prefetch = Some(200));
    rig.memory.set_granted(8);
    rig.memory.set_reaction("full", Reaction::AnswerAfter(Duration::from_millis(1_700), Published::Nacked));
    rig.memory.deliver((0..20).map(|n| to("full", &n.to_string())));
    rig.memory.until_published("tasks, later", 16).await;
    assert_eq!(rig.memory.published(DEAD), []);
    rig.memory.until_settled(16).await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_is_not_computed_until_its_reply_queue_accepts_messages() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.set_reaction("full", Reaction::Answer(Published::Nacked));
    rig.memory.deliver([to("full", "first")]);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mut second = to("full", "second");
    second.properties.priority = Some(3);
    rig.memory.deliver([second, echo("other")]);
    assert_eq!(ids(&rig.memory.until_published("mine", 1).await), ["other"]);
    let again = rig.memory.until_published("tasks, later", 1).await.remove(0);
    assert_eq!((ids(std::slice::from_ref(&again)), again.properties.priority), (vec!["second"], Some(3)));
    rig.memory.set_reaction("full", Reaction::Answer(Published::Confirmed));
    rig.memory.until_settled(3).await;
    rig.memory.deliver([again]);
    rig.memory.until_settled(4).await;
    let replies = rig.memory.published("full");
    assert_eq!((ids(&replies).last(), status(replies.last().unwrap())), (Some(&"second"), 200));
    let (_, events) = rig.finish().await;
    assert_eq!(computed(&events), ["first", "other", "second"], "each once");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_full_queue_without_waiting_replies_is_probed_by_one_task_at_a_time() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.set_reaction("full", Reaction::Answer(Published::Nacked));
    rig.memory.deliver([to("full", "first")]);
    assert_eq!(ids(&rig.memory.until_published(DEAD, 1).await), ["first"]);
    tokio::time::sleep(Duration::from_secs(6)).await;
    rig.memory.deliver([task("probe", "full", &json!({"input": 1, "sleep_ms": 500}))]);
    rig.until_computing("probe").await;
    rig.memory.deliver([to("full", "a"), to("full", "b")]);
    assert_eq!(rig.memory.until_published("tasks, later", 2).await.len(), 2);
    assert!(!rig.memory.published("full").iter().any(|it| ids(std::slice::from_ref(it)) == ["probe"]));
    rig.memory.set_reaction("full", Reaction::Answer(Published::Confirmed));
    rig.memory.until_settled(4).await;
    rig.memory.deliver([to("full", "c")]);
    rig.memory.until_settled(5).await;
    assert_eq!(rig.memory.published("tasks, later").len(), 2);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn tasks_of_many_refusing_queues_are_put_off_within_a_second() {
    let rig = Rig::start("echo", |assignment| assignment.pool.prefetch = Some(200));
    rig.memory.set_granted(8);
    let queues: Vec<String> = (0..20).map(|n| format!("full {n}")).collect();
    for queue in &queues {
        rig.memory.set_reaction(queue, Reaction::Answer(Published::Nacked));
    }
    rig.memory.deliver(queues.iter().map(|queue| to(queue, queue)));
    let begun = tokio::time::Instant::now();
    rig.memory.until_published("tasks, later", 16).await;
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert_eq!(rig.memory.published(DEAD), []);
    // The worker remembers the queues: their next tasks are not computed.
    rig.memory.deliver([to(&queues[0], "again")]);
    assert_eq!(ids(&rig.memory.until_published("tasks, later", 17).await).last(), Some(&"again"));
    assert_eq!(
        rig.memory.published(&queues[0]).iter().filter(|it| ids(&[(*it).clone()]) == ["again"]).count(),
        0
    );
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn expired_tasks_with_a_full_reply_queue_free_their_places_at_once() {
    let rig = Rig::start("echo", |assignment| assignment.pool.prefetch = Some(200));
    rig.memory.set_granted(8);
    rig.memory.set_reaction("full", Reaction::Answer(Published::Nacked));
    let past = [("expires", "2001-01-01T00:00:00Z")];
    rig.memory.deliver((0..20).map(|n| with_headers(to("full", &n.to_string()), &past)));
    let begun = tokio::time::Instant::now();
    // The replies of half of the granted tasks may wait, here for one second.
    rig.memory.until_published(DEAD, 16).await;
    assert!(begun.elapsed() < Duration::from_millis(900), "{:?}", begun.elapsed());
    rig.memory.until_published(DEAD, 20).await;
    rig.memory.until_settled(20).await;
    // The worker knows now that the queue accepts nothing.
    rig.memory.deliver([to("full", "again")]);
    assert_eq!(ids(&rig.memory.until_published("tasks, later", 1).await), ["again"]);
    let (_, events) = rig.finish().await;
    assert!(computed(&events).is_empty(), "{:?}", computed(&events));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_that_claims_to_have_waited_for_years_is_not_put_off_for_a_probe() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.set_reaction("full", Reaction::Answer(Published::Nacked));
    rig.memory.deliver([to("full", "first")]);
    rig.memory.until_published(DEAD, 1).await;
    tokio::time::sleep(Duration::from_secs(6)).await;
    rig.memory.deliver([task("probe", "full", &json!({"input": 1, "sleep_ms": 500}))]);
    rig.until_computing("probe").await;
    let since = [("sconce_put_off_since", "2020-01-01T00:00:00Z")];
    rig.memory.deliver([with_headers(to("full", "late"), &since)]);
    assert_eq!(ids(&rig.memory.until_published(DEAD, 2).await), ["first", "late"]);
    assert_eq!(rig.memory.published("tasks, later"), []);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_whose_waiting_time_is_over_becomes_a_dead_letter_uncomputed() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.set_reaction("full", Reaction::Answer(Published::Nacked));
    rig.memory.deliver([to("full", "first")]);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let since = [("sconce_put_off_since", "2020-01-01T00:00:00Z")];
    rig.memory.deliver([with_headers(to("full", "late"), &since)]);
    let letter = rig.memory.until_published(DEAD, 1).await.remove(0);
    assert_eq!(ids(std::slice::from_ref(&letter)), ["late"]);
    let headers = &letter.properties.headers;
    assert_eq!(headers["reason"].as_str(), Some("unconfirmed"));
    assert!(
        !headers.contains_key("sconce_put_off_since"),
        "an operator who requeues it gets a full waiting time"
    );
    rig.memory.until_settled(1).await;
    let late = |it: &Message| ids(std::slice::from_ref(it)) == ["late"];
    assert!(!rig.memory.published("full").iter().any(late));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn without_a_retry_queue_tasks_are_computed_and_their_replies_wait() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.set_reaction("full", Reaction::Answer(Published::Nacked));
    rig.memory.set_reaction("tasks, later", Reaction::Answer(Published::Unroutable));
    rig.memory.deliver([to("full", "first")]);
    tokio::time::sleep(Duration::from_secs(3)).await;
    rig.memory.deliver([to("full", "second")]);
    rig.until_computing("second").await;
    rig.memory.set_reaction("full", Reaction::Answer(Published::Confirmed));
    rig.memory.until_settled(2).await;
    assert_eq!(rig.memory.published(DEAD), []);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_reply_that_reaches_nobody_parks_the_task_and_not_the_result() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.set_reaction("gone", Reaction::Answer(Published::Unroutable));
    rig.memory.deliver([task("a", "gone", &json!({"input": "twice"}))]);
    let letter = rig.memory.until_published(DEAD, 1).await.remove(0);
    assert_eq!(letter.properties.headers["reason"].as_str(), Some("unroutable"));
    assert!(letter.properties.headers["error"].as_str().is_some_and(|error| error.contains("gone")));
    assert_eq!(body(&letter), json!({"input": "twice"}));
    assert_eq!(rig.memory.until_settled(1).await, [Settled::Acked(1)]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_that_fails_is_tried_again_later_and_its_neighbours_are_answered() {
    let rig = Rig::start("echo?faults", |_| ());
    let failing = task("bad", "mine", &json!({"input": 1, "fail": "error"}));
    rig.memory.deliver([echo("a"), failing, echo("b")]);
    let again = rig.memory.until_published("tasks, later", 1).await;
    assert_eq!(ids(&again), ["bad"]);
    assert_eq!(again[0].properties.headers["sconce_attempt"].as_i64(), Some(2));
    assert_eq!(ids(&rig.memory.until_published("mine", 2).await), ["a", "b"]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn tasks_of_a_lost_session_are_neither_answered_nor_acked() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.deliver([slow("lost", 500)]);
    rig.until_computing("lost").await;
    rig.memory.lose_session();
    rig.memory.deliver([echo("next")]);
    // The next task is computed after the lost one, which is not settled.
    assert_eq!(rig.memory.until_settled(1).await, [Settled::Acked(2)]);
    assert_eq!(ids(&rig.memory.published("mine")), ["next"]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_redelivered_twice_runs_apart_from_the_others() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.deliver_again(echo("suspect"), 2);
    rig.memory.deliver_again(echo("ordinary"), 1);
    rig.memory.until_settled(2).await;
    let (_, events) = rig.finish().await;
    let isolated: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            Event::Isolated { tasks, .. } => {
                Some(tasks.iter().map(|task| task.id.clone()).collect::<Vec<_>>())
            }
            _ => None,
        })
        .collect();
    assert_eq!(isolated, [vec!["suspect".to_owned()], Vec::new()]);
    let together = events.iter().any(|event| matches!(event, Event::Forward { tasks } if tasks.len() > 1));
    assert!(!together, "{events:?}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_device_failure_ends_the_worker_and_leaves_open_tasks_unsettled() {
    let rig = Rig::start("echo?faults", |_| ());
    rig.memory.deliver([task("bad", "mine", &json!({"input": 1, "fail": "device"}))]);
    let memory = rig.memory.clone();
    let error = rig.join().await.0.unwrap_err();
    assert_eq!(error.exit(), Exit::DeviceFailed);
    assert_eq!(memory.settled(), []);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn echo_answers_any_url() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.deliver([with_headers(echo("any"), &[("url", "/v1/whatever")])]);
    assert_eq!(status(&rig.memory.until_published("mine", 1).await[0]), 200, "echo answers all URLs");
}

#[test]
fn a_refused_probe_exits_as_a_model_failure_not_a_device_failure() {
    let error = |error: LoadError| WorkerError::from(error).exit();
    let (model, reason) = ("own".to_owned(), "no".to_owned());
    assert_eq!(error(LoadError::Probe { model, reason }), Exit::ModelFailed);
    let (device, reason) = ("cpu".to_owned(), "no".to_owned());
    assert_eq!(error(LoadError::Device { device, reason }), Exit::DeviceFailed);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn the_launcher_knows_which_tasks_are_preprocessed_on_another_thread() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.deliver([echo("brief"), task("long", "mine", &json!({"input": "x".repeat(4 << 10)}))]);
    rig.memory.until_settled(2).await;
    let (_, events) = rig.finish().await;
    let known = events.iter().filter_map(|event| match event {
        Event::Preprocessing { tasks } => Some(tasks.iter().map(|task| &*task.id).collect::<Vec<_>>()),
        _ => None,
    });
    assert_eq!(known.collect::<Vec<_>>(), [vec!["long"], vec![]]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_drain_during_the_work_before_a_sentinel_hands_the_sentinel_back() {
    let rig = Rig::start("echo", |assignment| assignment.pool.batch.max_requests = 1);
    rig.memory.deliver([slow("a", 500), echo("b"), sentinel()]);
    rig.until_computing("a").await;
    rig.stop.advance(Phase::Returning, "test");
    let memory = rig.memory.clone();
    assert_eq!(rig.join().await.0.unwrap(), Ended::Drained);
    let mut settled = memory.settled();
    assert_eq!(settled.pop(), Some(Settled::Acked(1)));
    settled.sort_by_key(|settled| format!("{settled:?}"));
    assert_eq!(settled, [Settled::Requeued(2), Settled::Requeued(3)]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn an_idle_worker_drains_at_once() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.deliver([echo("a")]);
    rig.memory.until_settled(1).await;
    rig.stop.advance(Phase::Returning, "test");
    let begun = tokio::time::Instant::now();
    assert_eq!(rig.join().await.0.unwrap(), Ended::Drained);
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn every_task_is_counted_by_its_outcome_and_every_stage_is_timed() {
    let rig = Rig::start("echo?faults", |_| ());
    let undecodable = Message { body: "no JSON".into(), ..echo("undecodable") };
    let invalid = task("invalid", "mine", &json!({"input": 1, "sleep_ms": "long"}));
    let late = with_headers(echo("late"), &[("expires", "2001-01-01T00:00:00Z")]);
    rig.memory.deliver((0..20).map(|n| echo(&n.to_string())).chain([undecodable, invalid, late]));
    rig.memory.until_settled(23).await;
    rig.wait_for_event(|event| matches!(event, Event::Stats(stats) if stats.now.connected)).await;
    let (_, events) = rig.finish().await;
    let mut all = Stats::default();
    for event in &events {
        if let Event::Stats(stats) = event {
            all.add(stats);
        }
    }
    all.answers.sort();
    let counts: Vec<_> = all.answers.iter().map(|it| (&*it.status, &*it.reason, it.count)).collect();
    assert_eq!(
        counts,
        [
            ("expired", "expired", 1),
            ("rejected", "invalid_value", 1),
            ("rejected", "undecodable", 1),
            ("succeeded", "", 20)
        ]
    );
    assert_eq!(all.dead_lettered, [("undecodable".to_owned(), 1)].into());
    assert_eq!((all.inputs, all.batch_inputs.sum()), (20, 20.0));
    for ((stage, name), tasks) in Stage::ALL.into_iter().zip([23, 23, 20, 20, 23]) {
        assert_eq!(all.stages[stage as usize].count(), tasks, "{name}");
    }
    assert!(all.now.resident > 100_000, "{:?}", all.now);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn what_waits_and_what_computes_is_reported_while_it_does() {
    let rig = Rig::start("echo", |assignment| assignment.pool.batch.max_requests = 1);
    rig.memory.deliver([slow("long", 60_000)]);
    rig.until_computing("long").await;
    rig.memory.deliver((0..4).map(|n| echo(&n.to_string())));
    // One on the device, and four that wait.
    rig.wait_for_event(|event| matches!(event, Event::Stats(stats) if stats.now.held == 5)).await;
    assert_eq!(computed(&rig.stdout.events()), ["long"]);
    assert_eq!(rig.memory.settled(), []);
}
