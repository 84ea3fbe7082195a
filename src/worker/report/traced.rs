//! Writes the span of a task: its outcome, the durations of its stages and the size of its batch. If tracing is off,
//! each call costs one branch.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::protocol::dead_letter::Reason;
use crate::protocol::reply::micros;
use crate::protocol::{Message, Task, TaskError, Timings, shorten};
use crate::telemetry::traces::{DeliveredTask, TaskSpan, Traces};

const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";
/// The most characters of an error in a span.
const MAX_ERROR_CHARS: usize = 300;

/// A task's span, from its acceptance until this is dropped; none if tracing is off.
pub(in crate::worker) struct Traced(Option<Box<Begun>>);

struct Begun {
    span: TaskSpan,
    /// When its outcome was ready to be published.
    settling_since: Option<Instant>,
    /// Whether the recorded outcome is final.
    settled: AtomicBool,
}

impl Drop for Begun {
    fn drop(&mut self) {
        if !*self.settled.get_mut() {
            self.span.set_attribute("sconce.status", "returned");
        } else if let Some(since) = self.settling_since {
            self.span.set_attribute("sconce.publish_us", micros(since.elapsed()));
        }
    }
}

impl Traced {
    pub(in crate::worker) fn off() -> Self {
        Self(None)
    }

    pub(in crate::worker) fn begin(traces: &Traces, task: &Task, redeliveries: i64) -> Self {
        let header = |name| task.message.properties.headers.get(name).and_then(|value| value.as_str());
        let span = traces.task(|| DeliveredTask {
            id: &task.id,
            correlation_id: task.message.properties.correlation_id.as_deref(),
            traceparent: header(TRACEPARENT),
            tracestate: header(TRACESTATE),
            size: task.message.body.len(),
            received_at: task.received,
        });
        let begun = span.map(|span| {
            span.set_attribute("sconce.redeliveries", redeliveries);
            Box::new(Begun { span, settling_since: None, settled: AtomicBool::new(false) })
        });
        Self(begun)
    }

    /// Records these timings, and that the task's outcome is about to be published.
    pub(in crate::worker) fn record_timings(&mut self, timings: &Timings, attempt: i64) {
        let Some(begun) = &mut self.0 else { return };
        begun.settling_since = Some(Instant::now());
        begun.span.set_attribute("sconce.attempt", attempt);
        begun.span.set_attribute("sconce.queue_us", timings.queue_us);
        begun.span.set_attribute("sconce.prepare_us", timings.prepare_us);
        begun.span.set_attribute("sconce.wait_us", timings.wait_us);
        begun.span.set_attribute("sconce.compute_us", timings.compute_us);
        begun.span.set_attribute("sconce.batch.size", timings.batch_size);
        begun.span.set_attribute("sconce.batch.tokens", timings.batch_tokens);
    }

    /// Records that the task is answered: with a result, or with this error.
    pub(in crate::worker) fn answered(&self, error: Option<&TaskError>) {
        let Some(span) = self.span() else { return };
        let (status, code) = error.map_or(("succeeded", 200), |error| {
            let names = error.kind.names();
            (names.status, names.status_code)
        });
        span.set_attribute("sconce.status", status);
        span.set_attribute("sconce.status_code", code);
        if let Some(error) = error {
            fail(span, error);
        }
    }

    pub(in crate::worker) fn retried(&self, error: &TaskError) {
        let Some(span) = self.span() else { return };
        span.set_attribute("sconce.status", "retried");
        fail(span, error);
    }

    /// Records that the task is put off, and will be delivered again.
    pub(in crate::worker) fn put_off(&self) {
        if let Some(span) = self.span() {
            span.set_attribute("sconce.status", "put_off");
        }
    }

    /// Records that the task is acked, so that the recorded outcome is final. Without this, the task counts as returned
    /// to the broker.
    pub(in crate::worker) fn settled(&self) {
        if let Some(begun) = &self.0 {
            begun.settled.store(true, Ordering::Relaxed);
        }
    }

    /// Records that the task becomes a dead letter; an error reply may follow.
    pub(in crate::worker) fn dead_lettered(&self, reason: Reason) {
        if let Some(span) = self.span() {
            span.set_attribute("sconce.dead_letter.reason", reason.as_str());
        }
    }

    /// Adds the trace context of this span to the reply.
    pub(in crate::worker) fn propagate_in(&self, mut reply: Message) -> Message {
        let Some(begun) = &self.0 else { return reply };
        let headers = &mut reply.properties.headers;
        headers.insert(TRACEPARENT.into(), begun.span.traceparent().into());
        if !begun.span.is_continued() {
            // The `tracestate` belongs to a trace that could not be continued.
            headers.remove(TRACESTATE);
        }
        reply
    }

    /// Adds a trace context to the task's next attempt or dead letter. A task keeps the context that it arrived
    /// with, so that all attempts are siblings in one trace; a task without one gets the context of this span.
    pub(in crate::worker) fn propagate(&self, mut message: Message) -> Message {
        let Some(begun) = self.0.as_ref().filter(|begun| !begun.span.is_continued()) else { return message };
        let headers = &mut message.properties.headers;
        headers.insert(TRACEPARENT.into(), begun.span.traceparent().into());
        headers.remove(TRACESTATE);
        message
    }

    fn span(&self) -> Option<&TaskSpan> {
        self.0.as_ref().map(|begun| &begun.span)
    }
}

fn fail(span: &TaskSpan, error: &TaskError) {
    span.set_attribute("error.type", error.kind.names().code);
    span.fail(shorten(&error.message, MAX_ERROR_CHARS));
}
