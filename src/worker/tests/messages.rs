//! Tests of what a message is, by its properties and its body, and of what its reply or dead letter carries: the contract
//! with requesters. That a broker carries every property unchanged is shown over each broker (`tests/broker_conformance`).

use super::*;
use crate::broker::Published;
use crate::broker::memory::Reaction;
use crate::protocol::{Sentinels, Value as Field};

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn input(input: Value) -> Message {
    task("id", "mine", &json!({ "input": input }))
}

fn with(mut message: Message, change: impl FnOnce(&mut Properties)) -> Message {
    change(&mut message.properties);
    message
}

fn header<'a>(message: &'a Message, name: &str) -> &'a str {
    message.properties.headers.get(name).and_then(Field::as_str).unwrap_or_default()
}

fn id(message: &Message) -> &str {
    message.properties.correlation_id.as_deref().unwrap_or_default()
}

/// Delivers `message`, and returns the message that is then published to `queue`.
async fn next(rig: &Rig, queue: &str, message: Message) -> Message {
    let before = rig.memory.published(queue).len();
    rig.memory.deliver([message]);
    rig.memory.until_published(queue, before + 1).await.remove(before)
}

/// Returns the reply to `message`, which is to go to the queue `mine`.
async fn reply(rig: &Rig, message: Message) -> Message {
    next(rig, "mine", message).await
}

/// What is wrong with a task, as its reply says it: status code, field, words.
fn refusal(reply: &Message) -> (i64, Value, String) {
    let error = &body(reply)["error"];
    (status(reply), error["param"].clone(), error["message"].as_str().unwrap_or_default().to_owned())
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_reply_carries_every_property_and_header_of_the_contract() {
    let rig = Rig::start("echo?faults", |_| ());
    let mut ids = Vec::new();
    for mode in [1, 2] {
        let traced =
            with_headers(input(json!(["a", "b"])), &[("traceparent", TRACE), ("tracestate", "vendor=1")]);
        let task = with(traced, |it| {
            it.message_id = Some("m-1".into());
            it.delivery_mode = Some(mode);
            it.priority = Some(3);
        });
        let reply = reply(&rig, task).await;
        let Properties { message_id, correlation_id, kind, delivery_mode, content_type, .. } =
            &reply.properties;
        assert_eq!((correlation_id.as_deref(), kind.as_deref()), (Some("id"), Some("reply")));
        assert_eq!(*delivery_mode, Some(mode), "as the task's");
        assert_eq!(content_type.as_deref(), Some("application/json"));
        assert_eq!(body(&reply), json!({"object": "echo", "input": ["a", "b"], "model": "echo"}));
        ids.push(message_id.clone().unwrap_or_default());
        check_headers(&reply.properties.headers);
    }
    assert!(ids[0] != ids[1] && ids.iter().all(|id| !id.is_empty() && id != "m-1"), "{ids:?}");
}

/// The headers of a reply to task `m-1`, with two inputs, in a batch of its own.
fn check_headers(headers: &Headers) {
    let texts = [
        ("device", "cpu"),
        ("dtype", "f32"),
        ("model", "echo?faults"),
        ("status", "succeeded"),
        ("task_id", "m-1"),
        ("traceparent", TRACE),
        ("tracestate", "vendor=1"),
        ("worker", "host/test/0"),
    ];
    let numbers = [("attempt", 1), ("batch_size", 2), ("batch_tokens", 2), ("status_code", 200)];
    let times = ["compute_us", "prepare_us", "queue_us", "wait_us"];
    let mut expected: Vec<_> =
        texts.iter().map(|(name, _)| *name).chain(numbers.map(|(name, _)| name)).collect();
    expected.extend(times);
    expected.sort_unstable();
    assert_eq!(headers.keys().map(String::as_str).collect::<Vec<_>>(), expected);
    for (name, value) in texts {
        assert_eq!(headers[name].as_str(), Some(value), "{name}");
    }
    for (name, value) in numbers {
        assert_eq!(headers[name].as_i64(), Some(value), "{name}");
    }
    for name in times {
        let us = headers[name].as_i64().unwrap_or(-1);
        assert!((0..60_000_000).contains(&us), "{name} is {us}");
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_tasks_id_is_its_message_id_else_its_correlation_id_else_one_is_made() {
    let rig = Rig::start("echo", |_| ());
    let named = with(input(json!("a")), |it| it.message_id = Some("mess".into()));
    assert_eq!(header(&reply(&rig, named).await, "task_id"), "mess");
    assert_eq!(header(&reply(&rig, input(json!("a"))).await, "task_id"), "id");
    let nameless = reply(&rig, with(input(json!("a")), |it| it.correlation_id = None)).await;
    assert!(header(&nameless, "task_id").len() > 8, "{nameless:?}");
    assert_eq!(nameless.properties.correlation_id, None, "there is none to echo");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_reply_goes_to_the_queue_that_the_task_names_else_to_the_pools_else_nowhere() {
    for pools in [Some(REPLIES), None] {
        let rig = Rig::start("echo", |assignment| assignment.pool.reply_queue = pools.map(str::to_owned));
        rig.memory.deliver([input(json!("own")), with(input(json!("pool's")), |it| it.reply_to = None)]);
        rig.memory.until_settled(2).await;
        assert_eq!(body(&rig.memory.published("mine")[0])["input"], "own");
        let inputs: Vec<_> =
            rig.memory.published(REPLIES).iter().map(|it| body(it)["input"].clone()).collect();
        assert_eq!(inputs, Vec::from_iter(pools.map(|_| json!("pool's"))));
        assert_eq!(rig.memory.published(DEAD), []);
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn no_reply_goes_to_a_task_retry_or_dead_letter_queue() {
    let rig = Rig::start("echo", |assignment| assignment.reserved_queues = vec!["of another pool".into()]);
    let queues = [TASKS, DEAD, "tasks.retry-1000ms", "tasks.retry.1000ms", "of another pool"];
    for (number, queue) in queues.into_iter().enumerate() {
        rig.memory.deliver([task(queue, queue, &json!({"input": 1}))]);
        let letter = rig.memory.until_published(DEAD, number + 1).await.remove(number);
        assert_eq!((id(&letter), header(&letter, "reason")), (queue, "unroutable"));
        assert!(header(&letter, "error").contains(queue), "{letter:?}");
        assert_eq!(rig.memory.until_settled(number + 1).await.len(), number + 1);
    }
    let letters = rig.memory.published(DEAD).len();
    let elsewhere: usize = queues.iter().map(|queue| rig.memory.published(queue).len()).sum();
    assert_eq!((letters, elsewhere), (5, 5), "only the dead letters");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn tasks_of_different_sizes_share_a_batch_and_each_gets_its_own_reply() {
    let rig = Rig::start("echo", |_| ());
    let inputs = [json!("one"), json!(["two", "three"]), json!(["four", "five", "six"])];
    rig.memory.deliver([task("busy", "mine", &json!({"input": "busy", "sleep_ms": 500}))]);
    rig.until_computing("busy").await;
    rig.memory.deliver((0..3).map(|n| task(&n.to_string(), "mine", &json!({"input": inputs[n]}))));
    for reply in rig.memory.until_published("mine", 4).await {
        let batch = reply.properties.headers["batch_size"].as_i64();
        match id(&reply).parse::<usize>() {
            Ok(n) => assert_eq!((&body(&reply)["input"], batch), (&inputs[n], Some(6))),
            Err(_) => assert_eq!(batch, Some(1)),
        }
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_past_its_deadline_is_answered_as_expired_and_not_computed() {
    let rig = Rig::start("echo?faults", |_| ());
    // A fault that would show if it were computed.
    let deadly =
        |expires| with_headers(task("id", "mine", &json!({"fail": "device"})), &[("expires", expires)]);
    let late = reply(&rig, deadly("2020-01-01T00:00:00Z")).await;
    assert_eq!((header(&late, "status"), status(&late)), ("expired", 408));
    assert_eq!(late.properties.headers["batch_size"].as_i64(), Some(0), "it was in no batch");
    assert_eq!(body(&late)["error"]["code"], "expired");
    let in_a_minute = (jiff::Timestamp::now() + jiff::SignedDuration::from_secs(60)).to_string();
    let in_time = with_headers(input(json!(1)), &[("expires", &in_a_minute)]);
    let in_time = with(in_time, |it| it.expiration = Some("60000".into()));
    assert_eq!(status(&reply(&rig, in_time).await), 200);
    let (code, field, words) = refusal(&reply(&rig, deadly("tomorrow")).await);
    assert_eq!((code, field), (400, json!("expires")));
    assert!(words.contains("tomorrow"), "{words}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn an_undecodable_message_is_dead_lettered_as_it_came_and_answered() {
    let rig = Rig::start("echo", |_| ());
    for (number, bytes) in [&b"{\"input\": \"\xff\xfe\"}"[..], &[0, 159, 146, 150]].into_iter().enumerate() {
        let odd =
            Message { body: bytes.to_vec().into(), ..with_headers(input(json!(1)), &[("mine", "kept")]) };
        let odd = with(odd, |it| {
            it.message_id = Some("m-9".into());
            it.app_id = Some("producer".into());
            it.priority = Some(2);
            it.delivery_mode = Some(2);
        });
        let reply = reply(&rig, odd).await;
        assert_eq!((id(&reply), header(&reply, "status"), status(&reply)), ("id", "rejected", 400));
        assert_eq!(body(&reply)["error"]["code"], "undecodable");
        let letter = rig.memory.until_published(DEAD, number + 1).await.remove(number);
        assert_eq!(letter.body, bytes);
        let Properties { message_id, app_id, priority, delivery_mode, .. } = &letter.properties;
        assert_eq!((message_id.as_deref(), app_id.as_deref()), (Some("m-9"), Some("producer")));
        assert_eq!((*priority, *delivery_mode), (Some(2), Some(2)));
        let headers =
            [("reason", "undecodable"), ("task_id", "m-9"), ("mine", "kept"), ("worker", "host/test/0")];
        for (name, value) in headers {
            assert_eq!(header(&letter, name), value, "{name}");
        }
        assert!(header(&letter, "error").contains("not JSON"), "{letter:?}");
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn an_unknown_control_message_is_dead_lettered_and_stops_nobody() {
    let rig = Rig::start("echo", |_| ());
    let typed = |kind: &str| with(input(json!(1)), |it| it.kind = Some(kind.into()));
    let refused = reply(&rig, typed("control.reboot")).await;
    assert_eq!(status(&refused), 400);
    let letter = rig.memory.until_published(DEAD, 1).await.remove(0);
    assert_eq!(header(&letter, "reason"), "unknown_control");
    assert_eq!(letter.properties.kind.as_deref(), Some("control.reboot"));
    assert!(header(&letter, "error").contains("control.reboot"), "{letter:?}");
    assert_eq!(status(&reply(&rig, typed("job")).await), 200, "any other type is a task");
    assert_eq!(rig.finish().await.0, Ended::Drained);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_content_type_or_encoding_that_is_not_read_is_refused_by_name() {
    let rig = Rig::start("echo", |_| ());
    let typed = |kind: &str| with(input(json!(1)), |it| it.content_type = Some(kind.into()));
    assert_eq!(status(&reply(&rig, typed("application/json; charset=utf-8")).await), 200);
    let (code, field, words) = refusal(&reply(&rig, typed("application/x-pickle")).await);
    assert!((code, &field) == (400, &json!("content_type")) && words.contains("x-pickle"), "{field} {words}");
    let letter = rig.memory.until_published(DEAD, 1).await.remove(0);
    assert_eq!(header(&letter, "reason"), "undecodable");
    let encoded = |encoding: &str| with(input(json!(1)), |it| it.content_encoding = Some(encoding.into()));
    assert_eq!(status(&reply(&rig, encoded("binary")).await), 200, "kombu marks bytes so");
    let (code, field, words) = refusal(&reply(&rig, encoded("gzip")).await);
    assert!((code, &field) == (400, &json!("content_encoding")) && words.contains("gzip"), "{field} {words}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_celery_message_is_named_in_its_refusal_or_else_in_its_dead_letter() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.set_reaction("gone", Reaction::Answer(Published::Unroutable));
    let celery = |id: &str, to: &str| {
        let body =
            json!([["a text"], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]);
        with_headers(task(id, to, &body), &[("task", "shop.tasks.embed"), ("id", id)])
    };
    let answered = reply(&rig, celery("answered", "mine")).await;
    let (code, _, words) = refusal(&answered);
    assert!(code == 400 && words.contains("Celery"), "{words}");
    assert_eq!(body(&answered)["status"], "FAILURE", "Celery's rpc:// backend reads it");
    let letter = next(&rig, DEAD, celery("lost", "gone")).await;
    assert_eq!((id(&letter), header(&letter, "reason")), ("lost", "refused"));
    let error = header(&letter, "error");
    assert!(error.contains("Celery") && error.contains("gone"), "{error}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_sentinel_is_a_type_or_a_null_body_and_nothing_else_is_one() {
    let typed = with(input(json!("any body")), |it| it.kind = Some("control.shutdown".into()));
    let raw = |body: &'static str| Message { body: body.into(), ..input(json!(1)) };
    for sentinel in [typed, raw("null"), raw(" null\n")] {
        let rig = Rig::start("echo", |_| ());
        for word in ["STOP", "null", "control.shutdown", "{\"type\":\"control.shutdown\"}"] {
            assert_eq!(body(&reply(&rig, input(json!(word))).await)["input"], word);
        }
        assert_eq!(status(&reply(&rig, input(Value::Null)).await), 200);
        assert_eq!(status(&reply(&rig, raw("STOP")).await), 400, "a body that is no JSON is a bad task");
        rig.memory.until_settled(6).await;
        rig.memory.deliver([sentinel]);
        let memory = rig.memory.clone();
        assert_eq!(rig.join().await.0.unwrap(), Ended::OnRequest);
        assert_eq!(memory.settled().last(), Some(&Settled::Acked(7)));
        assert_eq!(memory.published("mine").len(), 6, "a sentinel is not answered");
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn where_the_settings_say_so_a_null_or_any_sentinel_stops_nobody() {
    let null = || Message { body: "null".into(), ..input(json!(1)) };
    let typed = || with(input(json!(1)), |it| it.kind = Some("control.shutdown".into()));
    let rig = Rig::start("echo", |assignment| assignment.pool.sentinels = Sentinels::Type);
    assert_eq!(id(&reply(&rig, null()).await), "id", "it is a task");
    assert_eq!(status(&reply(&rig, input(json!(1))).await), 200);
    rig.memory.deliver([typed()]);
    assert_eq!(rig.join().await.0.unwrap(), Ended::OnRequest);
    let rig = Rig::start("echo", |assignment| assignment.pool.sentinels = Sentinels::None);
    let letter = next(&rig, DEAD, typed()).await;
    assert_eq!(header(&letter, "reason"), "unknown_control");
    assert_eq!(id(&reply(&rig, null()).await), "id");
    assert_eq!(rig.finish().await.0, Ended::Drained);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn an_expired_sentinel_stops_nobody_and_is_no_dead_letter() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.deliver([with_headers(sentinel(), &[("expires", "2020-01-01T00:00:00Z")])]);
    assert_eq!(rig.memory.until_settled(1).await, [Settled::Acked(1)]);
    assert_eq!(status(&reply(&rig, input(json!(1))).await), 200);
    assert_eq!(rig.memory.published(DEAD), []);
    assert_eq!(rig.finish().await.0, Ended::Drained);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_sentinel_has_the_batch_in_hand_computed_at_once() {
    let minute = Duration::from_secs(60);
    let rig = Rig::start("echo", |assignment| assignment.pool.batch.max_delay = minute);
    rig.memory.deliver([task("busy", "mine", &json!({"input": 1, "sleep_ms": 500}))]);
    rig.until_computing("busy").await;
    let begun = tokio::time::Instant::now();
    rig.memory
        .deliver((0..3).map(|n| task(&n.to_string(), "mine", &json!({"input": n}))).chain([sentinel()]));
    let memory = rig.memory.clone();
    assert_eq!(rig.join().await.0.unwrap(), Ended::OnRequest);
    assert!(begun.elapsed() < minute, "not after max_delay: {:?}", begun.elapsed());
    for reply in memory.published("mine") {
        let size = if id(&reply) == "busy" { 1 } else { 3 };
        assert_eq!((status(&reply), reply.properties.headers["batch_size"].as_i64()), (200, Some(size)));
    }
    assert_eq!(memory.published("mine").len(), 4);
}
