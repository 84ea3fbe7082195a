//! Spans: one for each task, in the trace that its producer began.
//! Holds the tracer, which may be off. Decides the names and parents of spans. Ending a span never waits.
//!
//! | file | decides |
//! |---|---|
//! | `context` | how W3C trace headers are read and written |
//! | `task` | which attributes a task's span gets, and its trace headers |
//! | `export` | how finished spans reach the collector, and which are lost |

mod context;
#[cfg_attr(not(feature = "otlp"), path = "traces/no_export.rs")]
mod export;
mod task;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use opentelemetry::global::BoxedTracer;
use opentelemetry::trace::{SpanKind, TraceContextExt, Tracer};
use opentelemetry::{Context, KeyValue};

pub use task::TaskSpan;

/// The worker that writes the spans. It is the same for all spans of a process.
#[derive(Clone, Copy, Debug)]
pub struct SpanOrigin<'a> {
    /// The worker's name, `launcher/pool/index`; OpenTelemetry's `service.instance.id`.
    pub worker: &'a str,
    /// The slot's name, `pool/index`.
    pub slot: &'a str,
    /// `cpu`, or the GPU's UUID.
    pub device: &'a str,
    /// The model's name.
    pub model: &'a str,
    /// The queue that tasks come from.
    pub queue: &'a str,
    /// OpenTelemetry's name of the broker: `rabbitmq`.
    pub system: &'static str,
}

/// A task as it was delivered.
#[derive(Clone, Copy, Debug)]
pub struct DeliveredTask<'a> {
    /// Its id.
    pub id: &'a str,
    /// Its correlation id.
    pub correlation_id: Option<&'a str>,
    /// The header `traceparent`, unparsed.
    pub traceparent: Option<&'a str>,
    /// The header `tracestate`, unparsed.
    pub tracestate: Option<&'a str>,
    /// The size of its body in bytes.
    pub size: usize,
    /// When the worker received it.
    pub received_at: SystemTime,
}

/// Creates spans, or none if tracing is off. Clones share the exporter.
#[derive(Clone, Default)]
pub struct Traces(Option<Arc<Active>>);

/// Sends the ended spans within a time; returns why it could not.
type Flush = Box<dyn Fn(Duration) -> Result<(), String> + Send + Sync>;

/// The tracer, and what the spans of this worker have in common.
struct Active {
    tracer: BoxedTracer,
    /// Sends the ended spans to the collector, and blocks until they are sent, for at most this time.
    flush: Flush,
    /// The name of every task's span.
    task_name: String,
    /// The constant attributes of a task's span.
    task_attributes: Vec<KeyValue>,
}

impl Traces {
    /// Exports to the collector at `endpoint`, under OTLP's path `/v1/traces`. Records the share `sample` (0 to 1) of
    /// the traces that have no sampling decision from upstream.
    ///
    /// # Errors
    /// The exporter cannot use the address, or a variable `OTEL_EXPORTER_OTLP_…`; or this build has no exporter.
    pub fn start(endpoint: &str, sample: f64, origin: SpanOrigin<'_>) -> Result<Self, String> {
        let (tracer, flush) = export::open(endpoint, sample, origin.worker)?;
        Ok(Self::new(tracer, flush, origin))
    }

    fn new(tracer: BoxedTracer, flush: Flush, origin: SpanOrigin<'_>) -> Self {
        let SpanOrigin { slot, device, model, queue, system, .. } = origin;
        let text = |key: &'static str, value: &str| KeyValue::new(key, Arc::<str>::from(value));
        let task_attributes = vec![
            KeyValue::new("messaging.system", system),
            text("messaging.destination.name", queue),
            KeyValue::new("messaging.operation.type", "process"),
            KeyValue::new("messaging.operation.name", "process"),
            text("sconce.slot", slot),
            text("sconce.device", device),
            text("sconce.model", model),
        ];
        let task_name = format!("process {queue}");
        Self(Some(Arc::new(Active { tracer, flush, task_name, task_attributes })))
    }

    /// Begins the span of a task; none if tracing is off.
    pub fn task<'a>(&self, delivered: impl FnOnce() -> DeliveredTask<'a>) -> Option<TaskSpan> {
        let active = self.0.as_ref()?;
        let delivered = delivered();
        let parent = delivered.traceparent.and_then(|parent| context::parse(parent, delivered.tracestate));
        let mut attributes = Vec::with_capacity(active.task_attributes.len() + 16);
        attributes.extend(active.task_attributes.iter().cloned());
        attributes.push(KeyValue::new("messaging.message.id", delivered.id.to_owned()));
        attributes.push(KeyValue::new("messaging.message.body.size", delivered.size as i64));
        attributes.extend(
            delivered
                .correlation_id
                .map(|id| KeyValue::new("messaging.message.conversation_id", id.to_owned())),
        );
        let builder = active
            .tracer
            .span_builder(active.task_name.clone())
            .with_kind(SpanKind::Consumer)
            .with_start_time(delivered.received_at)
            .with_attributes(attributes);
        let continued = parent.is_some();
        let context = match parent {
            Some(parent) => Context::new().with_remote_span_context(parent),
            None => Context::new(),
        };
        let span = active.tracer.build_with_context(builder, &context);
        Some(TaskSpan::new(span, continued))
    }

    /// Sends the ended spans to the collector, and blocks until they are sent, for at most `timeout`. Spans that end
    /// later are lost.
    pub fn finish(&self, timeout: Duration) {
        let Some(active) = &self.0 else { return };
        if let Err(error) = (active.flush)(timeout) {
            tracing::debug!(error, "the last spans did not reach the collector");
        }
    }
}

/// Traces whose ended spans are stored, for tests.
#[cfg(all(test, feature = "otlp"))]
pub(crate) mod recording {
    use opentelemetry_sdk::error::OTelSdkResult;
    use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
    use parking_lot::Mutex;

    use super::*;

    /// Stores the ended spans.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct Recorder(Arc<Mutex<Vec<SpanData>>>);

    impl SpanProcessor for Recorder {
        fn on_start(&self, _: &mut Span, _: &Context) {}

        fn on_end(&self, span: SpanData) {
            self.0.lock().push(span);
        }

        fn force_flush(&self) -> OTelSdkResult {
            Ok(())
        }

        fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
            Ok(())
        }
    }

    impl Recorder {
        /// Returns the ended spans, and forgets them.
        pub(crate) fn take(&self) -> Vec<SpanData> {
            std::mem::take(&mut *self.0.lock())
        }
    }

    /// Traces that record this share of those without a decision from upstream.
    pub(crate) fn traces(sample: f64) -> (Traces, Recorder) {
        let recorder = Recorder::default();
        let (tracer, flush) = export::tracer_and_flush(recorder.clone(), sample, "h/p/0");
        let origin = SpanOrigin {
            worker: "h/p/0",
            slot: "p/0",
            device: "cpu",
            model: "m",
            queue: "q",
            system: "rabbitmq",
        };
        (Traces::new(tracer, flush, origin), recorder)
    }
}

#[cfg(feature = "otlp")]
#[cfg(test)]
mod tests {
    use super::recording::{Recorder, traces};
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const PARENT: &str = "b7ad6b7169203331";

    fn only(recorder: &Recorder) -> opentelemetry_sdk::trace::SpanData {
        let mut spans = recorder.take();
        assert_eq!(spans.len(), 1, "{spans:?}");
        spans.remove(0)
    }

    fn begin(traces: &Traces, traceparent: Option<&str>) -> TaskSpan {
        let received_at = std::time::SystemTime::now();
        let delivered = DeliveredTask {
            id: "t",
            correlation_id: None,
            traceparent,
            tracestate: Some("vendor=1"),
            size: 2,
            received_at,
        };
        traces.task(|| delivered).unwrap()
    }

    #[test]
    fn with_tracing_off_no_span_begins_and_no_task_data_is_gathered() {
        let off = Traces::default();
        assert!(off.task(|| unreachable!()).is_none());
        off.finish(Duration::ZERO);
    }

    #[test]
    fn a_task_continues_its_trace_and_keeps_the_last_value_of_an_attribute() {
        let (traces, recorder) = traces(0.0);
        let span = begin(&traces, Some(&format!("00-{TRACE}-{PARENT}-01")));
        let header = span.traceparent();
        assert!(
            span.is_continued() && header.starts_with(&format!("00-{TRACE}-")) && header.ends_with("-01")
        );
        assert!(!header.contains(PARENT), "{header}");
        span.set_attribute("sconce.status", "succeeded");
        span.set_attribute("sconce.status", "failed");
        span.fail("no".into());
        drop(span);
        let span = only(&recorder);
        assert_eq!((span.name.as_ref(), span.parent_span_id.to_string().as_str()), ("process q", PARENT));
        assert_eq!(span.span_context.trace_state().header(), "vendor=1");
        let found: Vec<_> = span.attributes.iter().filter(|it| it.key.as_str() == "sconce.status").collect();
        assert_eq!((found.len(), found[0].value.as_str().as_ref()), (1, "failed"));
        assert_eq!(span.status, opentelemetry::trace::Status::error("no"));
    }

    #[test]
    fn a_context_that_cannot_be_read_begins_a_trace() {
        let (traces, recorder) = traces(1.0);
        let span = begin(&traces, Some("00-1-2-01"));
        assert!(!span.is_continued() && context::parse(&span.traceparent(), None).is_some());
        drop(span);
        assert_eq!(only(&recorder).span_context.trace_state().header(), "");
    }
}
