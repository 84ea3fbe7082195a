//! Exports finished spans to the collector: the SDK's bounded queue and its thread, which sends over OTLP (HTTP,
//! protobuf). Decides which spans are recorded. Ending a span never waits: if the queue is full, the span is lost.

use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use opentelemetry::global::BoxedTracer;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry::{Key, KeyValue, Value};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{ExporterBuildError, Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracerProvider, SpanProcessor,
};
use parking_lot::Mutex;

use super::Flush;
use crate::telemetry::Throttle;

/// Maximum number of finished spans in the queue: a few seconds of a busy worker, about 10 MiB.
const QUEUE_SIZE: usize = 4_096;
/// Maximum number of spans in one request.
const BATCH_SIZE: usize = 512;
/// How long a span may wait for others to be sent with it.
const EXPORT_DELAY: Duration = Duration::from_secs(1);
/// Time-out for connecting to the collector.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time-out for a whole request.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum time between two log lines about a collector that takes no spans.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of bytes that are read of a collector's response.
const MAX_RESPONSE_BYTES: u64 = 64 << 10;

/// A tracer whose spans are sent to the collector at `endpoint`, and the function that sends those that have ended.
/// Records the share `sample` of the traces that have no sampling decision from upstream.
///
/// # Errors
/// The exporter cannot use the address, or a variable `OTEL_EXPORTER_OTLP_…` cannot be read.
pub(super) fn open(endpoint: &str, sample: f64, worker: &str) -> Result<(BoxedTracer, Flush), String> {
    let span_queue = span_queue(endpoint).map_err(|error| error.to_string())?;
    Ok(tracer_and_flush(span_queue, sample, worker))
}

/// A tracer over a processor of spans, and the function that sends its ended spans.
pub(super) fn tracer_and_flush(
    processor: impl SpanProcessor + 'static,
    sample: f64,
    worker: &str,
) -> (BoxedTracer, Flush) {
    let provider = SdkTracerProvider::builder()
        .with_span_processor(processor)
        .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(sample))))
        .with_resource(resource(worker))
        .build();
    let tracer = BoxedTracer::new(Box::new(provider.tracer("sconce")));
    // Never dropped, since its `drop` waits for the collector.
    let provider = ManuallyDrop::new(provider);
    let flush = move |timeout| provider.shutdown_with_timeout(timeout).map_err(|error| error.to_string());
    (tracer, Box::new(flush))
}

/// The queue, its thread and the exporter for a collector at `endpoint`.
///
/// # Errors
/// The exporter cannot use the address, or a variable `OTEL_EXPORTER_OTLP_…` cannot be read.
fn span_queue(endpoint: &str) -> Result<impl SpanProcessor + 'static, ExporterBuildError> {
    let agent = ureq::AgentBuilder::new()
        .timeout_connect(CONNECT_TIMEOUT)
        .timeout(EXPORT_TIMEOUT)
        .redirects(0)
        .build();
    let url = format!("{}/v1/traces", endpoint.trim_end_matches('/'));
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_http()
        .with_http_client(BlockingClient { agent, losses: Mutex::default() })
        .with_protocol(Protocol::HttpBinary)
        .with_timeout(EXPORT_TIMEOUT)
        .with_endpoint(&url)
        .build()?;
    let sizes = BatchConfigBuilder::default()
        .with_max_queue_size(QUEUE_SIZE)
        .with_max_export_batch_size(BATCH_SIZE)
        .with_scheduled_delay(EXPORT_DELAY);
    Ok(BatchSpanProcessor::builder(exporter).with_batch_config(sizes.build()).build())
}

/// The service's resource attributes. `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` take precedence.
fn resource(worker: &str) -> Resource {
    let detected = Resource::builder().build();
    // If the environment names no service, the SDK makes up the name `unknown_service`.
    let is_made_up =
        |key: &Key, value: &Value| key.as_str() == "service.name" && value.as_str().starts_with("unknown");
    let detected = detected.iter().filter(|(key, value)| !is_made_up(key, value));
    Resource::builder_empty()
        .with_service_name("sconce")
        .with_attributes([
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("service.instance.id", worker.to_owned()),
        ])
        .with_attributes(detected.map(|(key, value)| KeyValue::new(key.clone(), value.clone())))
        .build()
}

/// The exporter's HTTP client. It may block, since the exporter calls it on a thread of its own.
#[derive(Debug)]
struct BlockingClient {
    agent: ureq::Agent,
    /// Limits how often the loss of spans is logged. It is logged here because the exporter does not log the reason.
    losses: Mutex<Throttle>,
}

impl BlockingClient {
    fn log_lost_spans(&self, collector: &str, error: &str) {
        if self.losses.lock().pass(LOG_INTERVAL, Instant::now()).is_some() {
            tracing::warn!(collector, error, "spans are lost; tasks do not wait for them");
        }
    }
}

#[async_trait]
impl HttpClient for BlockingClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let url = request.uri().to_string();
        let mut post = self.agent.post(&url);
        for (name, value) in request.headers() {
            post = post.set(name.as_str(), value.to_str()?);
        }
        let received = match post.send_bytes(request.body()) {
            Ok(received) | Err(ureq::Error::Status(_, received)) => received,
            Err(error) => {
                self.log_lost_spans(&url, &error.to_string());
                return Err(error.into());
            }
        };
        let status = received.status();
        if status >= 400 {
            self.log_lost_spans(&url, &format!("the collector answered {status}"));
        }
        let mut response = Response::builder().status(status);
        if let Some(retry_after) = received.header("retry-after") {
            response = response.header("retry-after", retry_after);
        }
        let mut body = Vec::new();
        let reader = received.into_reader();
        std::io::Read::read_to_end(&mut std::io::Read::take(reader, MAX_RESPONSE_BYTES), &mut body)?;
        Ok(response.body(body.into())?)
    }
}
