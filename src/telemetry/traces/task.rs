//! The span of one task, as a worker holds it: what is told of it is kept until it ends. Decides what goes
//! into the headers of what comes after it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use opentelemetry::trace::{Span as _, SpanContext, Status};
use opentelemetry::{KeyValue, Value};
use opentelemetry_sdk::trace::Span;

use super::context;

/// A task as it came.
#[derive(Clone, Copy, Debug)]
pub struct Came<'a> {
    /// Its id.
    pub id: &'a str,
    /// Its correlation id.
    pub correlation_id: Option<&'a str>,
    /// Its header `traceparent`, as it was written.
    pub traceparent: Option<&'a str>,
    /// Its header `tracestate`, as it was written.
    pub tracestate: Option<&'a str>,
    /// Bytes of its body.
    pub size: usize,
    /// When the worker received it.
    pub at: SystemTime,
}

/// The span of a task. It ends when it is dropped: without anything told of it, the task was handed back.
pub struct TaskSpan {
    context: SpanContext,
    /// Its trace began upstream.
    continued: bool,
    /// Held for the few instructions of noting something; never across an await.
    open: Mutex<Open>,
}

struct Open {
    span: Span,
    /// What was told of it, by name; the last word counts.
    told: BTreeMap<&'static str, Value>,
    error: Option<String>,
}

/// The way from a batch to one of its tasks.
#[derive(Clone, Debug)]
pub struct TaskLink(SpanContext);

impl From<TaskLink> for SpanContext {
    fn from(link: TaskLink) -> Self {
        link.0
    }
}

impl TaskSpan {
    pub(super) fn of(span: Span, continued: bool) -> Self {
        let context = span.span_context().clone();
        let open = Open { span, told: BTreeMap::new(), error: None };
        Self { context, continued, open: Mutex::new(open) }
    }

    /// The header `traceparent` of what comes after this span.
    pub fn traceparent(&self) -> String {
        context::traceparent(&self.context)
    }

    /// The task's own headers say which trace it is of, so that its `tracestate` goes with it.
    pub fn is_continued(&self) -> bool {
        self.continued
    }

    /// For the batches that the task is in; none where it is not recorded.
    pub fn link(&self) -> Option<TaskLink> {
        self.context.is_sampled().then(|| TaskLink(self.context.clone()))
    }

    /// Whether anything told of it is kept.
    pub fn is_recorded(&self) -> bool {
        self.context.is_sampled()
    }

    /// Notes an attribute, in the place of what was noted by that name before.
    pub fn tell(&self, name: &'static str, value: impl Into<Value>) {
        if self.is_recorded() {
            self.lock().told.insert(name, value.into());
        }
    }

    /// Notes that the task failed, and why.
    pub fn fail(&self, error: String) {
        self.lock().error = Some(error);
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TaskSpan {
    fn drop(&mut self) {
        let open = self.open.get_mut().unwrap_or_else(PoisonError::into_inner);
        let told = std::mem::take(&mut open.told).into_iter();
        open.span.set_attributes(told.map(|(name, value)| KeyValue::new(name, value)));
        if let Some(error) = open.error.take() {
            open.span.set_status(Status::error(error));
        }
        open.span.end();
    }
}
