//! Traces: which spans a collector is sent, and that nobody waits for one that is not there. Which task is in which trace
//! is shown in `src/worker/tests/tracing.rs`.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use serde_json::json;

use super::messages::{busy_with, serve};
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
