//! Exports finished spans to the collector: the SDK's bounded queue, whose thread sends over OTLP (HTTP,
//! protobuf). Ending a span never waits: if the queue is full, the span is lost.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{ExporterBuildError, Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::trace::{BatchConfigBuilder, BatchSpanProcessor, SpanProcessor};

/// The most finished spans in the queue: a few seconds of a busy worker, about 10 MiB.
const WAITING: usize = 4_096;
const REQUEST: usize = 512;
/// The longest wait of a span for others to send with it.
const DELAY: Duration = Duration::from_secs(1);
/// The longest time to connect to the collector, and for a whole request.
const CONNECT: Duration = Duration::from_secs(2);
const EXPORT: Duration = Duration::from_secs(5);
/// The time between two log lines about a collector that takes no spans.
const SILENCE: Duration = Duration::from_secs(60);
/// The most bytes read of a collector's answer.
const ANSWER: u64 = 64 << 10;

/// The queue, its thread and the exporter for a collector at `endpoint`.
///
/// # Errors
/// The exporter cannot use the address, or a variable `OTEL_EXPORTER_OTLP_…` cannot be read.
pub(super) fn span_queue(endpoint: &str) -> Result<impl SpanProcessor + 'static, ExporterBuildError> {
    let agent = ureq::AgentBuilder::new().timeout_connect(CONNECT).timeout(EXPORT).redirects(0).build();
    let url = format!("{}/v1/traces", endpoint.trim_end_matches('/'));
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_http()
        .with_http_client(Wire { agent, said: Mutex::default() })
        .with_protocol(Protocol::HttpBinary)
        .with_timeout(EXPORT)
        .with_endpoint(&url)
        .build()?;
    let sizes = BatchConfigBuilder::default()
        .with_max_queue_size(WAITING)
        .with_max_export_batch_size(REQUEST)
        .with_scheduled_delay(DELAY);
    Ok(BatchSpanProcessor::builder(exporter).with_batch_config(sizes.build()).build())
}

/// The exporter's HTTP client, which it calls on its own thread: it may block there.
#[derive(Debug)]
struct Wire {
    agent: ureq::Agent,
    /// When it was last logged that spans are lost. The exporter itself does not log why.
    said: Mutex<Option<Instant>>,
}

impl Wire {
    fn say(&self, collector: &str, error: &str) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.is_none_or(|said| said.elapsed() >= SILENCE) {
            *said = Some(Instant::now());
            tracing::warn!(collector, error, "spans are lost; tasks do not wait for them");
        }
    }
}

#[async_trait]
impl HttpClient for Wire {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let url = request.uri().to_string();
        let mut post = self.agent.post(&url);
        for (name, value) in request.headers() {
            post = post.set(name.as_str(), value.to_str()?);
        }
        let answer = match post.send_bytes(request.body()) {
            Ok(answer) | Err(ureq::Error::Status(_, answer)) => answer,
            Err(error) => {
                self.say(&url, &error.to_string());
                return Err(error.into());
            }
        };
        let status = answer.status();
        if status >= 400 {
            self.say(&url, &format!("it answers {status}"));
        }
        let mut response = Response::builder().status(status);
        if let Some(after) = answer.header("retry-after") {
            response = response.header("retry-after", after);
        }
        let mut body = Vec::new();
        std::io::Read::read_to_end(&mut std::io::Read::take(answer.into_reader(), ANSWER), &mut body)?;
        Ok(response.body(body.into())?)
    }
}
