//! Traces: whose trace a reply is in, which spans a collector is sent, and that nobody waits for one
//! that is not there.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use serde_json::json;

use super::messages::{are_taken, busy_with, serve};
use crate::support::client::{Received, Task};
use crate::support::collector::{Collector, attribute, hex};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::Settings;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PRODUCER: &str = "b7ad6b7169203331";

fn settings(endpoint: &str) -> Settings {
    let settings = Settings::echo(Rabbit::shared().url()).set("telemetry.otlp_endpoint", endpoint);
    settings.set("pool[0].retry.delay", "50ms")
}

/// A task of the producer's trace, which is recorded or not.
fn traced(id: &str, flags: &str) -> Task {
    let task = Task::new(json!({"input": ["a", "b"]})).id(id);
    task.header("traceparent", &format!("00-{TRACE}-{PRODUCER}-{flags}")).header("tracestate", "vendor=1")
}

/// Trace, span and flags of a reply's `traceparent`.
fn context(reply: &Received) -> [String; 3] {
    let header = reply.header("traceparent");
    let fields: Vec<_> = header.split('-').collect();
    let ["00", trace, span, flags] = fields[..] else { panic!("traceparent is {header:?}") };
    assert!(trace.len() == 32 && span.len() == 16, "{header}");
    [trace, span, flags].map(str::to_owned)
}

fn is_task(span: &Span) -> bool {
    span.name.starts_with("process ")
}

fn is_batch(span: &Span) -> bool {
    span.name == "forward"
}

fn has_id(id: &str) -> impl Fn(&Span) -> bool {
    move |span| is_task(span) && attribute(span, "messaging.message.id") == id
}

fn is_error(span: &Span) -> bool {
    span.status.as_ref().is_some_and(|status| status.code() == StatusCode::Error)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_continues_the_trace_of_its_task_whose_span_is_between_them() {
    let collector = Collector::start().await;
    let settings = settings(&collector.endpoint());
    let settings = settings.environment("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer t0ken");
    let (_sconce, client, mut inbox) = serve(&settings).await;
    let task = traced("corr", "01").with(|it| it.with_message_id("m-1".into()));
    client.publish(&settings.tasks, task).await;
    let reply = inbox.next().await;
    let [trace, span_id, flags] = context(&reply);
    assert_eq!((trace.as_str(), flags.as_str()), (TRACE, "01"));
    assert_ne!(span_id, PRODUCER);
    assert_eq!(reply.header("tracestate"), "vendor=1");

    let span = collector.wait_for("the task's", 1, is_task).await.remove(0);
    assert_eq!((hex(&span.trace_id), hex(&span.span_id)), (trace, span_id));
    assert_eq!((hex(&span.parent_span_id).as_str(), span.trace_state.as_str()), (PRODUCER, "vendor=1"));
    assert_eq!(
        (span.name.as_str(), span.kind()),
        (&*format!("process {}", settings.tasks), SpanKind::Consumer)
    );
    for (name, value) in [
        ("messaging.system", json!("rabbitmq")),
        ("messaging.destination.name", json!(settings.tasks)),
        ("messaging.operation.type", json!("process")),
        ("messaging.message.id", json!("m-1")),
        ("messaging.message.conversation_id", json!("corr")),
        ("sconce.slot", json!(format!("{}/0", settings.name))),
        ("sconce.device", json!("cpu")),
        ("sconce.model", json!("echo?faults")),
        ("sconce.status", json!("succeeded")),
        ("sconce.status_code", json!(200)),
        ("sconce.attempt", json!(1)),
        ("sconce.batch.size", json!(2)),
    ] {
        assert_eq!(attribute(&span, name), value, "{name}");
    }
    for stage in ["prepare", "wait", "compute", "publish"] {
        let us = attribute(&span, &format!("sconce.{stage}_us")).as_i64().unwrap_or(-1);
        assert!((0..60_000_000).contains(&us), "{stage}: {us}");
    }
    assert!(!is_error(&span) && span.end_time_unix_nano > span.start_time_unix_nano);
    assert_eq!(collector.resource("service.name"), "sconce");
    assert_eq!(collector.resource("service.instance.id"), reply.header("worker"));
    assert_eq!(collector.header("authorization"), "Bearer t0ken");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batchs_span_links_to_each_of_its_tasks_once() {
    let collector = Collector::start().await;
    let settings = settings(&collector.endpoint());
    let (sconce, client, mut inbox) = serve(&settings).await;
    let gate = busy_with(&sconce, &client, &settings, Task::new(json!({"input": "busy"})).id("first")).await;
    client.publish_all(&settings.tasks, ["a", "b"].map(|id| traced(id, "01"))).await;
    are_taken(&client, &settings, &mut inbox).await;
    gate.open();
    let replies = inbox.take(3).await;
    let [alone, batch]: [Span; 2] =
        collector.wait_for("batches", 2, is_batch).await.try_into().expect("two batches");
    assert_eq!((alone.links.len(), attribute(&alone, "sconce.batch.tasks")), (1, json!(1)));
    for (name, number) in [("size", 4), ("tokens", 4), ("tasks", 2)] {
        assert_eq!(attribute(&batch, &format!("sconce.batch.{name}")), number, "{name}");
    }
    assert_eq!(attribute(&batch, "sconce.device"), "cpu");
    assert!(batch.parent_span_id.is_empty(), "in a trace of its own");
    let links: Vec<_> = batch.links.iter().map(|link| (hex(&link.trace_id), hex(&link.span_id))).collect();
    let tasks = replies.iter().filter(|reply| reply.correlation_id != "first").map(context);
    let mut tasks: Vec<_> = tasks.map(|[trace, span, _]| (trace, span)).collect();
    // They came in this order; their replies in any.
    tasks.sort_by_key(|task| links.iter().position(|link| link == task));
    assert_eq!(links, tasks);
    assert_ne!(hex(&batch.trace_id), TRACE);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_context_that_can_be_read_a_trace_begins_here() {
    let collector = Collector::start().await;
    let settings = settings(&collector.endpoint());
    let (_sconce, client, mut inbox) = serve(&settings).await;
    let malformed = Task::new(json!({"input": 1})).id("malformed");
    let malformed = malformed.header("traceparent", "00-1-2-01").header("tracestate", "vendor=1");
    let tasks = [Task::new(json!({"input": 1})).id("none"), malformed];
    client.publish_all(&settings.tasks, tasks).await;
    for reply in inbox.take(2).await {
        assert_eq!(reply.status_code(), 200);
        let [trace, span_id, flags] = context(&reply);
        assert!(!trace.trim_matches('0').is_empty() && flags == "01", "{reply:?}");
        assert_eq!(reply.header("tracestate"), "", "another trace's");
        let span = collector.wait_for("the task's", 1, has_id(&reply.correlation_id)).await.remove(0);
        assert_eq!((hex(&span.trace_id), hex(&span.span_id)), (trace, span_id));
        assert!(span.parent_span_id.is_empty(), "{span:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_upstream_decided_about_recording_wins_over_the_sample() {
    let collector = Collector::start().await;
    let settings = settings(&collector.endpoint()).set("telemetry.trace_sample", 0);
    let (sconce, client, mut inbox) = serve(&settings).await;
    let tasks = [traced("unrecorded", "00"), Task::new(json!({"input": 1})).id("undecided")];
    client.publish_all(&settings.tasks, tasks).await;
    for reply in inbox.take(2).await {
        let [trace, span_id, flags] = context(&reply);
        assert_eq!(flags, "00", "{reply:?}");
        assert_eq!(trace == TRACE, reply.correlation_id == "unrecorded");
        assert_ne!(span_id, PRODUCER);
    }
    client.publish(&settings.tasks, traced("recorded", "01")).await;
    assert_eq!(context(&inbox.next().await)[2], "01");
    let batch = collector.wait_for("a batch with a recorded task", 1, is_batch).await.remove(0);
    assert_eq!(sconce.stop().await, 0);
    let tasks = collector.wait_for("tasks", 1, is_task).await;
    assert_eq!(attribute(&tasks[0], "messaging.message.id"), "recorded");
    assert_eq!(batch.links[0].span_id, tasks[0].span_id);
}

#[tokio::test(flavor = "multi_thread")]
async fn all_attempts_at_a_task_are_in_one_trace() {
    let collector = Collector::start().await;
    let settings = settings(&collector.endpoint());
    let (_sconce, client, mut inbox) = serve(&settings).await;
    let failing = || json!({"input": "a", "fail": "error"}).to_string().into_bytes();
    let with = Task { body: failing(), ..traced("with", "01") };
    client.publish_all(&settings.tasks, [with, Task::raw(failing()).id("without")]).await;
    for reply in inbox.take(2).await {
        assert_eq!((reply.status_code(), reply.header("attempt").as_str()), (500, "3"));
        let [trace, span_id, _] = context(&reply);
        let spans = collector.wait_for("its attempts", 3, has_id(&reply.correlation_id)).await;
        assert!(spans.iter().all(|span| hex(&span.trace_id) == trace && is_error(span)), "{spans:?}");
        let statuses: Vec<_> = spans.iter().map(|span| attribute(span, "sconce.status")).collect();
        assert_eq!(statuses, ["retried", "retried", "failed"]);
        assert_eq!(hex(&spans[2].span_id), span_id);
        assert_eq!(attribute(&spans[2], "sconce.dead_letter.reason"), "attempts");
        assert_eq!(attribute(&spans[2], "error.type"), "internal_error");
        let parents: Vec<_> = spans.iter().map(|span| hex(&span.parent_span_id)).collect();
        if reply.correlation_id == "with" {
            assert_eq!(parents, [PRODUCER; 3], "side by side");
        } else {
            let first = hex(&spans[0].span_id);
            assert_eq!(parents, [String::new(), first.clone(), first], "behind the first");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_is_in_the_trace_of_its_task_even_if_that_came_without() {
    let collector = Collector::start().await;
    let settings = settings(&collector.endpoint());
    let (_sconce, client, mut inbox) = serve(&settings).await;
    client.publish(&settings.tasks, Task::raw("no JSON")).await;
    let reply = inbox.next().await;
    assert_eq!(context(&client.get(&settings.dead).await), context(&reply));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_sends_the_last_spans_and_says_which_tasks_were_handed_back() {
    let collector = Collector::start().await;
    let settings = settings(&collector.endpoint()).set("pool[0].batch.max_requests", 1);
    let settings = settings.set("pool[0].prefetch", 10);
    let (mut sconce, client, mut inbox) = serve(&settings).await;
    let task = |id: &str| Task::new(json!({"input": id})).id(id);
    let gate = busy_with(&sconce, &client, &settings, task("slow")).await;
    // What needs no device is answered at once, and shows that the worker has what came before it.
    client.publish_all(&settings.tasks, [task("behind"), Task::raw("not JSON").id("refused")]).await;
    assert_eq!(inbox.next().await.correlation_id, "refused");
    sconce.signal(Signal::SIGTERM);
    client.ready_becomes(&settings.tasks, 1).await;
    gate.open();
    assert_eq!(sconce.exit_code().await, 0);
    assert_eq!(inbox.next().await.correlation_id, "slow");
    // Not later: nobody is left to send them.
    let status = |id| collector.spans(has_id(id)).iter().map(|it| attribute(it, "sconce.status")).collect();
    let statuses: [Vec<_>; 3] = [status("slow"), status("behind"), status("refused")];
    assert_eq!(statuses, [[json!("succeeded")], [json!("returned")], [json!("rejected")]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_do_not_wait_for_an_absent_collector_and_a_drain_not_for_long() {
    // One refuses, one takes connections and never says a word.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = (format!("http://{}", silent.local_addr().expect("an address")), silent);
    for endpoint in ["http://127.0.0.1:1", &silent.0] {
        let settings = settings(endpoint).set("launcher.shutdown_grace", "10m");
        let (mut sconce, client, mut inbox) = serve(&settings).await;
        let tasks = |from: usize| (from..from + 50).map(|n| traced(&n.to_string(), "01"));
        client.publish_all(&settings.tasks, tasks(0)).await;
        assert!(inbox.take(50).await.iter().all(|reply| reply.status_code() == 200));
        sconce.wait_for_log("spans are lost").await;
        client.publish_all(&settings.tasks, tasks(50)).await;
        assert!(inbox.take(50).await.iter().all(|reply| reply.status_code() == 200));
        let asked = Instant::now();
        sconce.signal(Signal::SIGTERM);
        assert_eq!(sconce.exit_code().await, 0);
        assert!(asked.elapsed() < Duration::from_secs(10), "{endpoint}: {:?}", asked.elapsed());
        assert_eq!(sconce.logged("spans are lost"), 1, "{}", sconce.log());
    }
}
