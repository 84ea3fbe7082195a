//! Tests of spans: in which trace a task, its attempts, its reply and its dead letter are.
//! How they reach a collector is shown over RabbitMQ (`tests/rabbitmq`).

use opentelemetry_sdk::trace::SpanData;

use super::*;
use crate::telemetry::traces::recording::{Recorder, traces};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PRODUCER: &str = "b7ad6b7169203331";
const NOBODY: &str = "0000000000000000";

fn start(sample: f64) -> (Rig, Recorder) {
    let (traces, recorder) = traces(sample);
    (Rig::start_traced(&one_pass(echo::load), "echo?faults", traces, |_| ()), recorder)
}

/// A task of the producer's trace, which is recorded or not.
fn traced(id: &str, flags: &str) -> Message {
    let message = task(id, "mine", &json!({"input": ["a", "b"]}));
    let parent = format!("00-{TRACE}-{PRODUCER}-{flags}");
    with_headers(message, &[("traceparent", &parent), ("tracestate", "vendor=1")])
}

fn untraced(id: &str) -> Message {
    task(id, "mine", &json!({"input": id}))
}

fn id(message: &Message) -> &str {
    message.properties.correlation_id.as_deref().unwrap()
}

/// Trace, span and flags of a message's `traceparent`.
fn context(message: &Message) -> [String; 3] {
    let header = message.properties.headers["traceparent"].as_str().unwrap();
    let fields: Vec<_> = header.split('-').collect();
    let ["00", trace, span, flags] = fields[..] else { panic!("traceparent is {header:?}") };
    assert!(trace.len() == 32 && span.len() == 16, "{header}");
    [trace, span, flags].map(str::to_owned)
}

fn attribute(span: &SpanData, name: &str) -> String {
    let found = span.attributes.iter().filter(|it| it.key.as_str() == name);
    found.map(|it| it.value.as_str().into_owned()).collect::<Vec<_>>().join(" and ")
}

fn ids(context: &opentelemetry::trace::SpanContext) -> [String; 2] {
    [context.trace_id().to_string(), context.span_id().to_string()]
}

/// Ends the worker, and returns the spans of its tasks in the order of their beginnings.
async fn spans(rig: Rig, recorder: &Recorder) -> Vec<SpanData> {
    assert_eq!(rig.finish().await.0, Ended::Drained);
    let mut spans = recorder.take();
    spans.sort_by_key(|span| span.start_time);
    spans
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn without_a_context_that_can_be_read_a_trace_begins_here() {
    let (rig, recorder) = start(1.0);
    let unreadable = [("traceparent", "00-1-2-01"), ("tracestate", "vendor=1")];
    rig.memory.deliver([untraced("none"), with_headers(untraced("malformed"), &unreadable)]);
    let replies = rig.memory.until_published("mine", 2).await;
    let tasks = spans(rig, &recorder).await;
    for reply in &replies {
        let [trace, span_id, flags] = context(reply);
        assert!(status(reply) == 200 && !trace.trim_matches('0').is_empty() && flags == "01", "{reply:?}");
        assert!(!reply.properties.headers.contains_key("tracestate"), "another trace's");
        let span = tasks.iter().find(|span| attribute(span, "messaging.message.id") == id(reply)).unwrap();
        assert_eq!((ids(&span.span_context), &*span.parent_span_id.to_string()), ([trace, span_id], NOBODY));
    }
    assert_eq!(tasks.len(), 2);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn what_upstream_decided_about_recording_wins_over_the_sample() {
    let (rig, recorder) = start(0.0);
    rig.memory.deliver([traced("unrecorded", "00"), untraced("undecided")]);
    for reply in rig.memory.until_published("mine", 2).await {
        let [trace, span_id, flags] = context(&reply);
        assert_eq!((&*flags, trace == TRACE), ("00", id(&reply) == "unrecorded"), "{reply:?}");
        assert_ne!(span_id, PRODUCER);
    }
    rig.memory.deliver([traced("recorded", "01")]);
    assert_eq!(context(&rig.memory.until_published("mine", 3).await[2])[2], "01");
    let tasks = spans(rig, &recorder).await;
    let [task] = &tasks[..] else { panic!("{tasks:?}") };
    assert_eq!(attribute(task, "messaging.message.id"), "recorded");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn all_attempts_at_a_task_are_in_one_trace() {
    let (rig, recorder) = start(1.0);
    let failing = |message: Message| Message { body: json!({"fail": "error"}).to_string().into(), ..message };
    rig.memory.deliver([failing(traced("with", "01")), failing(untraced("without"))]);
    for attempt in 1..3 {
        let again = rig.memory.until_published("tasks, later", 2 * attempt).await;
        rig.memory.deliver(again[2 * attempt - 2..].iter().cloned());
    }
    let replies = rig.memory.until_published("mine", 2).await;
    let tasks = spans(rig, &recorder).await;
    for reply in &replies {
        assert_eq!((status(reply), reply.properties.headers["attempt"].as_i64()), (500, Some(3)));
        let [trace, span_id, _] = context(reply);
        let of_task = |span: &&SpanData| attribute(span, "messaging.message.id") == id(reply);
        let spans: Vec<_> = tasks.iter().filter(of_task).collect();
        let statuses: Vec<_> = spans.iter().map(|span| attribute(span, "sconce.status")).collect();
        assert_eq!(statuses, ["retried", "retried", "failed"]);
        for span in &spans {
            assert_eq!(span.span_context.trace_id().to_string(), trace);
            assert!(matches!(span.status, opentelemetry::trace::Status::Error { .. }), "{span:?}");
        }
        assert_eq!(spans[2].span_context.span_id().to_string(), span_id);
        assert_eq!(attribute(spans[2], "sconce.dead_letter.reason"), "attempts");
        assert_eq!(attribute(spans[2], "error.type"), "internal_error");
        let parents: Vec<_> = spans.iter().map(|span| span.parent_span_id.to_string()).collect();
        let first = spans[0].span_context.span_id().to_string();
        let (side_by_side, behind_the_first) = ([PRODUCER; 3], [NOBODY, &*first, &*first]);
        assert_eq!(parents, if id(reply) == "with" { side_by_side } else { behind_the_first });
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_dead_letter_is_in_the_trace_of_its_task_even_if_that_came_without() {
    let (rig, _recorder) = start(1.0);
    rig.memory.deliver([Message { body: "no JSON".into(), ..untraced("bad") }]);
    let reply = rig.memory.until_published("mine", 1).await.remove(0);
    assert_eq!(context(&rig.memory.published(DEAD)[0]), context(&reply));
}
