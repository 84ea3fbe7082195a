//! The span of one task: collects its attributes and its error until the span ends. Decides the `traceparent` of the
//! messages that result from the task.

use std::collections::BTreeMap;

use opentelemetry::global::BoxedSpan;
use opentelemetry::trace::{Span as _, SpanContext, Status};
use opentelemetry::{KeyValue, Value};
use parking_lot::Mutex;

use super::context;

/// The span of a task. The span ends when this is dropped.
pub struct TaskSpan {
    context: SpanContext,
    /// Whether its trace began upstream.
    continued: bool,
    /// Locked only to record an attribute or an error; never across an await.
    open: Mutex<OpenSpan>,
}

struct OpenSpan {
    span: BoxedSpan,
    /// The attributes by name, each with its last value.
    attributes: BTreeMap<&'static str, Value>,
    error: Option<String>,
}

impl TaskSpan {
    pub(super) fn new(span: BoxedSpan, continued: bool) -> Self {
        let context = span.span_context().clone();
        let open = OpenSpan { span, attributes: BTreeMap::new(), error: None };
        Self { context, continued, open: Mutex::new(open) }
    }

    /// The header `traceparent` for messages that result from the task.
    pub fn traceparent(&self) -> String {
        context::traceparent(&self.context)
    }

    /// Whether the task's own headers name its trace. If so, their `tracestate` is passed on too.
    pub fn is_continued(&self) -> bool {
        self.continued
    }

    /// Records an attribute; replaces an earlier one of the same name.
    pub fn set_attribute(&self, name: &'static str, value: impl Into<Value>) {
        if self.context.is_sampled() {
            self.open.lock().attributes.insert(name, value.into());
        }
    }

    /// Records that the task failed, and why.
    pub fn fail(&self, error: String) {
        self.open.lock().error = Some(error);
    }
}

impl Drop for TaskSpan {
    fn drop(&mut self) {
        let open = self.open.get_mut();
        let attributes = std::mem::take(&mut open.attributes).into_iter();
        open.span.set_attributes(attributes.map(|(name, value)| KeyValue::new(name, value)));
        if let Some(error) = open.error.take() {
            open.span.set_status(Status::error(error));
        }
        open.span.end();
    }
}
