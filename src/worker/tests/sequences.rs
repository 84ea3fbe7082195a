//! Tests of tasks whose sequences take many steps: they are streamed, cancelled, or handed back.

use super::*;
use crate::broker::memory::Reaction;
use crate::broker::{Published, QueueState};
use crate::protocol::control::Cancellation;

/// A sequence of `max_tokens` tokens, whose steps take 10 ms.
fn generate(id: &str, to: &str, max_tokens: usize, stream: bool) -> Message {
    task(id, to, &json!({"prompt": 4, "max_tokens": max_tokens, "step_ms": 10, "stream": stream}))
}

fn kind(message: &Message) -> &str {
    message.properties.kind.as_deref().unwrap_or_default()
}

fn words(count: usize) -> String {
    (0..count).map(|word| format!("{word} ")).collect()
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn parts_precede_the_reply_and_concatenate_to_its_text() {
    let rig = Rig::start("script", |_| ());
    rig.memory.deliver([generate("a", "mine", 30, true)]);
    rig.memory.until_settled(1).await;
    let messages = rig.memory.published("mine");
    let (reply, parts) = messages.split_last().unwrap();
    assert_eq!((kind(reply), status(reply)), ("reply", 200));
    assert_eq!(body(reply)["text"], words(30));
    assert!((5..9).contains(&parts.len()), "at most one each 50 ms of 300: {}", parts.len());
    let mut text = String::new();
    for (seq, part) in parts.iter().enumerate() {
        let headers = &part.properties.headers;
        assert_eq!((kind(part), headers["seq"].as_i64()), ("reply.part", Some(seq as i64)));
        assert_eq!(headers["stream_id"], parts[0].properties.headers["stream_id"]);
        assert_eq!(part.properties.delivery_mode, Some(1));
        assert_eq!(part.properties.correlation_id.as_deref(), Some("a"));
        text.push_str(body(part)["text"].as_str().unwrap());
    }
    assert_eq!(text, words(30));
    let first = reply.properties.headers["first_token_us"].as_i64().unwrap();
    assert!((10_000..20_000).contains(&first), "{first}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn non_json_answers_carry_their_content_type_and_errors_are_json() {
    let rig = Rig::start("script", |_| ());
    let body = |prompt: usize| json!({"prompt": prompt, "max_tokens": 9, "step_ms": 10, "stream": true, "content_type": "audio/pcm"});
    rig.memory.deliver([task("a", "mine", &body(4)), task("b", "other", &body(0))]);
    rig.memory.until_settled(2).await;
    let messages = rig.memory.published("mine");
    let (reply, parts) = messages.split_last().unwrap();
    assert_eq!((kind(reply), status(reply), parts.is_empty()), ("reply", 200, false));
    for message in &messages {
        assert_eq!(message.properties.content_type.as_deref(), Some("audio/pcm"));
        assert_eq!(message.properties.content_encoding, None);
    }
    let joined: Vec<u8> = parts.iter().flat_map(|part| part.body.to_vec()).collect();
    assert_eq!((&joined[..], &reply.body[..]), (words(9).as_bytes(), words(9).as_bytes()));
    let error = rig.memory.published("other").remove(0);
    assert_eq!(error.properties.content_type.as_deref(), Some("application/json"));
    assert_eq!((status(&error), &super::body(&error)["error"]["param"]), (400, &json!("prompt")));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn parts_are_sent_only_on_request_and_only_to_a_reply_to_queue() {
    let rig = Rig::start("script", |_| ());
    let mut nowhere = generate("b", "", 10, true);
    nowhere.properties.reply_to = None;
    rig.memory.deliver([generate("a", "mine", 10, false), nowhere]);
    rig.memory.until_settled(2).await;
    assert_eq!((rig.memory.published("mine").len(), rig.memory.published(REPLIES).len()), (1, 1));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn ten_seconds_of_unroutable_parts_end_the_sequence_and_keep_its_task() {
    let rig = Rig::start("script?context=5000&tokens=20000", |_| ());
    rig.memory.set_reaction("gone", Reaction::Answer(Published::Unroutable));
    rig.memory.deliver([generate("gone", "gone", 4_000, true), generate("a", "mine", 20, false)]);
    let begun = tokio::time::Instant::now();
    assert_eq!(rig.memory.until_settled(2).await, [Settled::Acked(2), Settled::Acked(1)]);
    assert!((10..13).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    let letters = rig.memory.published(DEAD);
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].properties.headers["reason"].as_str(), Some("unroutable"));
    assert_eq!(body(&letters[0])["max_tokens"], 4_000, "the task");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn unroutable_parts_end_a_task_only_if_the_queue_state_is_unknown() {
    for (state, settled) in [(None, 10..13), (Some(QueueState::Unavailable), 30..31)] {
        let rig = Rig::start("script?context=5000&tokens=20000", |_| ());
        rig.memory.set_reaction("own", Reaction::Answer(Published::Unroutable));
        rig.memory.set_queue_state("own", state);
        rig.memory.deliver([generate("a", "own", 3_000, true)]);
        let begun = tokio::time::Instant::now();
        rig.memory.until_settled(1).await;
        assert!(settled.contains(&begun.elapsed().as_secs()), "{state:?}: {:?}", begun.elapsed());
        let letters = rig.memory.published(DEAD);
        assert_eq!(letters[0].properties.headers["reason"].as_str(), Some("unroutable"));
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_reply_queue_missing_for_a_moment_costs_parts_but_no_task() {
    let rig = Rig::start("script?context=5000&tokens=20000", |_| ());
    rig.memory.deliver([generate("a", "own", 3_000, true), generate("b", "own", 3_000, false)]);
    // The queue is missing for 1.5 s twice. Checks find it missing, but not for ten seconds.
    for second in [4_500, 9_000] {
        tokio::time::sleep(Duration::from_millis(second)).await;
        rig.memory.set_reaction("own", Reaction::Answer(Published::Unroutable));
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        rig.memory.set_reaction("own", Reaction::Answer(Published::Confirmed));
    }
    rig.memory.until_settled(2).await;
    let messages = rig.memory.published("own");
    let replies: Vec<_> = messages.iter().filter(|it| kind(it) == "reply").collect();
    assert_eq!(replies.len(), 2);
    for reply in replies {
        assert_eq!((status(reply), &body(reply)["text"]), (200, &json!(words(3_000))));
    }
    assert_eq!(rig.memory.published(DEAD), []);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_cancelled_task_without_a_reply_queue_leaves_no_dead_letter() {
    let rig = Rig::start("script", |_| ());
    rig.memory.deliver([generate("a", "gone", 900, false)]);
    rig.until_computing("a").await;
    rig.memory.set_reaction("gone", Reaction::Answer(Published::Unroutable));
    // For each cancellation, the launcher is told how many such tasks the worker held.
    for (task, tasks) in [("nope", 0), ("a", 1)] {
        let cancellation = Cancellation { task: Some(task.into()), ..Cancellation::default() };
        assert!(rig.control.cancellations.add(vec![cancellation.clone()]));
        rig.wait_for_event(|event| *event == Event::Cancelled { cancellation: cancellation.clone(), tasks })
            .await;
    }
    assert_eq!(rig.memory.until_settled(1).await, [Settled::Acked(1)]);
    assert_eq!(rig.memory.published(DEAD), []);
    let (_, events) = rig.finish().await;
    let is_cancelled = |event: &Event| match event {
        Event::Stats(stats) => stats.of_status("cancelled") == 1,
        _ => false,
    };
    assert!(events.iter().any(is_cancelled), "it is counted");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_is_kept_if_its_answer_ends_before_its_first_part_is_returned() {
    let rig = Rig::start("script", |_| ());
    rig.memory.set_reaction("gone", Reaction::Answer(Published::Unroutable));
    rig.memory.deliver([generate("gone", "gone", 1, true)]);
    assert_eq!(rig.memory.until_settled(1).await, [Settled::Acked(1)]);
    let letters = rig.memory.published(DEAD);
    assert_eq!(letters[0].properties.headers["reason"].as_str(), Some("unroutable"));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn an_unchanged_set_of_sequences_is_announced_every_second() {
    let rig = Rig::start("script", |_| ());
    rig.memory.deliver([generate("long", "mine", 1_000, false)]);
    rig.memory.until_settled(1).await;
    let (_, events) = rig.finish().await;
    let announced =
        events.iter().filter(|event| matches!(event, Event::Forward { tasks } if !tasks.is_empty()));
    assert!((10..=12).contains(&announced.count()), "10 s");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_reader_that_stops_reading_delays_neither_steps_nor_other_tasks() {
    let rig = Rig::start("script", |_| ());
    rig.memory.set_reaction("stuck", Reaction::Nothing);
    rig.memory.deliver([generate("stuck", "stuck", 40, true), generate("a", "mine", 40, true)]);
    let begun = tokio::time::Instant::now();
    assert_eq!(rig.memory.until_settled(1).await, [Settled::Acked(2)]);
    assert!(begun.elapsed() < Duration::from_millis(450), "{:?}", begun.elapsed());
    let letter = rig.memory.until_published(DEAD, 1).await.remove(0);
    assert_eq!(letter.properties.headers["reason"].as_str(), Some("unconfirmed"));
    let stuck = rig.memory.published("stuck");
    let kinds: Vec<_> = stuck.iter().map(kind).collect();
    assert_eq!(kinds, ["reply.part"], "one part, which may yet arrive, and no reply before it");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn readers_whose_queue_is_full_hold_up_no_other() {
    let rig = Rig::start("script", |_| ());
    rig.memory.set_reaction("full", Reaction::Answer(Published::Nacked));
    let tasks = |to: &'static str, max_tokens, count: usize| {
        (0..count).map(move |n| generate(&format!("{to} {n}"), to, max_tokens, true))
    };
    let begun = tokio::time::Instant::now();
    rig.memory.deliver(tasks("full", 60, 8).chain(tasks("mine", 20, 4)));
    // Each of the four is settled before the first of those whose replies no queue takes.
    let settled = rig.memory.until_settled(4).await;
    assert!(settled.iter().all(|it| matches!(it, Settled::Acked(9..))), "{settled:?}");
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    let messages = rig.memory.published("mine");
    for n in 0..4 {
        let own: Vec<_> =
            messages.iter().filter(|it| it.properties.correlation_id == Some(format!("mine {n}"))).collect();
        let (reply, parts) = own.split_last().unwrap();
        assert_eq!((kind(reply), &body(reply)["text"]), ("reply", &json!(words(20))));
        assert!(!parts.is_empty() && parts.iter().all(|part| kind(part) == "reply.part"));
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn no_part_is_under_way_when_the_reply_is_sent() {
    let rig = Rig::start("script", |_| ());
    // Longer than the 250 ms for which the reply waits for parts that are not sent yet.
    rig.memory.set_reaction("slow", Reaction::AnswerAfter(Duration::from_millis(700), Published::Confirmed));
    let begun = tokio::time::Instant::now();
    rig.memory.deliver([generate("a", "slow", 30, true)]);
    rig.memory.until_published("slow", 2).await;
    // The first part is published after 10 ms; the text is complete after 300 ms.
    assert!(begun.elapsed() >= Duration::from_millis(700), "{:?}", begun.elapsed());
    rig.memory.until_settled(1).await;
    let messages = rig.memory.published("slow");
    let kinds: Vec<_> = messages.iter().map(kind).collect();
    assert_eq!(kinds, ["reply.part", "reply"], "parts that were not sent by then are left out");
    assert_eq!(body(&messages[1])["text"], words(30));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_slow_reader_gets_fewer_parts_with_more_in_each() {
    let rig = Rig::start("script", |_| ());
    rig.memory.set_reaction("slow", Reaction::AnswerAfter(Duration::from_millis(200), Published::Confirmed));
    rig.memory.deliver([generate("a", "slow", 60, true)]);
    rig.memory.until_settled(1).await;
    let messages = rig.memory.published("slow");
    let (reply, parts) = messages.split_last().unwrap();
    assert_eq!(body(reply)["text"], words(60));
    assert!(parts.len() <= 5, "{}", parts.len());
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_drain_hands_back_running_sequences_and_a_soft_stop_finishes_them() {
    // One sequence that decodes, and one whose window is being encoded.
    let decodes = generate("a", "mine", 100, false);
    let encodes = task("a", "mine", &json!({"max_tokens": 100, "step_ms": 10, "encode_ms": 400}));
    for a in [decodes, encodes] {
        for (phase, settled) in
            [(Phase::Returning, Settled::Requeued(1)), (Phase::Finishing, Settled::Acked(1))]
        {
            let rig = Rig::start("script", |_| ());
            rig.memory.deliver([a.clone()]);
            rig.until_computing("a").await;
            rig.stop.advance(phase, "test");
            let memory = rig.memory.clone();
            assert_eq!(rig.join().await.0.unwrap(), Ended::Drained);
            assert_eq!(memory.settled(), [settled], "{phase:?}");
            assert_eq!(memory.published("mine").len(), usize::from(phase == Phase::Finishing));
        }
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_sentinel_lets_the_sequences_before_it_finish() {
    let rig = Rig::start("script", |_| ());
    rig.memory.deliver([generate("a", "mine", 50, false), sentinel(), generate("b", "mine", 50, false)]);
    let memory = rig.memory.clone();
    assert_eq!(rig.join().await.0.unwrap(), Ended::OnRequest);
    assert_eq!(memory.settled(), [Settled::Requeued(3), Settled::Acked(1), Settled::Acked(2)]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_deadline_that_passes_during_an_answer_ends_it() {
    let rig = Rig::start("script", |_| ());
    let mut late = generate("late", "mine", 1_000, false);
    late.properties.expiration = Some("300".into());
    rig.memory.deliver([late, generate("a", "mine", 50, false)]);
    let replies = rig.memory.until_published("mine", 2).await;
    assert_eq!((status(&replies[0]), status(&replies[1])), (408, 200));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_prompt_that_can_never_fit_is_refused() {
    let rig = Rig::start("script?sequences=2&context=50", |_| ());
    rig.memory.deliver([generate("large", "mine", 100, false)]);
    let reply = rig.memory.until_published("mine", 1).await.remove(0);
    assert_eq!(status(&reply), 400);
    assert!(body(&reply)["error"]["message"].as_str().unwrap().contains("holds 50"), "{reply:?}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_requester_cancels_only_its_own_tasks_and_an_operator_any() {
    let rig = Rig::start("script?sequences=3", |_| ());
    let tasks = ["a", "b", "c"].map(|id| generate(id, "mine", 1_000, false));
    rig.memory.deliver(
        tasks.into_iter().chain([generate("a", "other", 50, false), generate("d", "mine", 9, false)]),
    );
    rig.until_computing("c").await;
    let of = |correlation_id: &str, reply_to: &str| Cancellation {
        correlation_id: Some(correlation_id.into()),
        reply_to: Some(reply_to.into()),
        ..Cancellation::default()
    };
    let begun = tokio::time::Instant::now();
    for cancellation in [
        of("a", "mine"),
        of("b", "elsewhere"),
        Cancellation { task: Some("c".into()), ..Cancellation::default() },
    ] {
        assert!(rig.control.cancellations.add(vec![cancellation]));
    }
    let replies = rig.memory.until_published("mine", 3).await;
    assert!(begun.elapsed() < Duration::from_millis(300), "{:?}", begun.elapsed());
    let found =
        replies.iter().map(|reply| (reply.properties.correlation_id.as_deref().unwrap(), status(reply)));
    assert_eq!(found.collect::<Vec<_>>(), [("a", 499), ("c", 499), ("d", 200)], "and d gets the free slot");
    assert_eq!(
        status(&rig.memory.until_published("other", 1).await[0]),
        200,
        "the same id, but of another requester"
    );
    let (_, events) = rig.finish().await;
    assert!(
        events.iter().any(|event| matches!(event, Event::Stats(stats) if stats.of_status("cancelled") == 2))
    );
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_departed_requester_without_parts_is_noticed_and_its_task_is_kept() {
    let rig = Rig::start("script?context=5000&tokens=20000", |_| ());
    rig.memory.deliver([generate("left", "left", 4_000, false), generate("a", "mine", 2_000, false)]);
    rig.until_computing("a").await;
    rig.memory.set_reaction("left", Reaction::Answer(Published::Unroutable));
    let begun = tokio::time::Instant::now();
    assert_eq!(rig.memory.until_settled(1).await, [Settled::Acked(1)]);
    assert!((14..17).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    let letters = rig.memory.published(DEAD);
    assert_eq!(letters[0].properties.headers["reason"].as_str(), Some("unroutable"));
    rig.memory.until_settled(2).await;
    assert_eq!(status(&rig.memory.published("mine")[0]), 200);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_is_kept_if_its_requester_leaves_while_its_inputs_are_made() {
    let rig = Rig::start("script", |_| ());
    rig.memory.set_reaction("left", Reaction::Answer(Published::Unroutable));
    rig.memory.deliver([task("left", "left", &json!({"empty_slices": 100_000}))]);
    assert_eq!(rig.memory.until_settled(1).await, [Settled::Acked(1)]);
    let letters = rig.memory.published(DEAD);
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].properties.headers["reason"].as_str(), Some("unroutable"));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_too_long_for_the_consumer_timeout_is_refused_at_known_pace() {
    let model = "script?sequences=2&context=100000&tokens=200000";
    let rig = Rig::start(model, |assignment| assignment.broker.consumer_timeout = Duration::from_secs(60));
    // The task takes 50 s, and is accepted because the pace is unknown. After three quarters of the consumer
    // timeout it fails, and is published for another attempt.
    rig.memory.deliver([generate("first", "mine", 5_000, false)]);
    assert_eq!(rig.memory.until_settled(1).await, [Settled::Acked(1)]);
    assert_eq!(rig.memory.published("tasks, later").len(), 1);
    rig.memory.deliver([generate("again", "mine", 5_000, false), generate("short", "mine", 1_000, false)]);
    let replies = rig.memory.until_published("mine", 2).await;
    assert_eq!((status(&replies[0]), status(&replies[1])), (413, 200));
    let message = body(&replies[0])["error"]["message"].to_string();
    assert!(message.contains("consumer_timeout") && message.contains("a task may take 22 s"), "{message}");
    // So is one whose inputs are not made yet, by what it announces.
    rig.memory.deliver([task(
        "later",
        "mine",
        &json!({"max_tokens": 5_000, "step_ms": 10, "empty_slices": 9}),
    )]);
    assert_eq!(status(&rig.memory.until_published("mine", 3).await[2]), 413);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn tasks_of_one_user_count_as_one_requester_whatever_their_reply_queues() {
    let rig = Rig::start("script?sequences=2", |_| ());
    let task = |id: &str, user: &str, max_tokens| {
        let mut task = generate(id, id, max_tokens, false);
        task.properties.user_id = Some(user.to_owned());
        task
    };
    rig.memory.deliver([task("long", "a", 900), task("longer", "a", 1_000)]);
    tokio::time::sleep(Duration::from_millis(100)).await;
    rig.memory.deliver([task("other", "b", 5), task("short", "a", 5)]);
    let settled = rig.memory.until_settled(4).await;
    let expected = [3, 1, 4, 2].map(Settled::Acked);
    assert_eq!(
        settled, expected,
        "the task of user b goes first, and the short one waits for its own user's tasks"
    );
}
