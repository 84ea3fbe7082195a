//! Exports finished spans to the collector: a bounded queue, a thread that sends from it over OTLP (HTTP,
//! protobuf), and log lines about lost spans. Ending a span never waits: if the queue is full, the span is lost
//! and counted.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use opentelemetry::Context;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{ExporterBuildError, Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Span, SpanData, SpanExporter, SpanProcessor,
};

/// The most finished spans in the queue: a few seconds of a busy worker, about 10 MiB.
const WAITING: usize = 4_096;
const REQUEST: usize = 512;
/// The longest wait of a span for others to send with it.
const DELAY: Duration = Duration::from_secs(1);
/// The longest time to connect to the collector, and for a whole request.
const CONNECT: Duration = Duration::from_secs(2);
const EXPORT: Duration = Duration::from_secs(5);
/// The time between two log lines about lost spans.
const SILENCE: Duration = Duration::from_secs(60);
/// The most bytes read of a collector's answer.
const ANSWER: u64 = 64 << 10;

/// The queue, its thread and the exporter for a collector at `endpoint`.
///
/// # Errors
/// The exporter cannot use the address, or a variable `OTEL_EXPORTER_OTLP_…` cannot be read.
pub(super) fn span_queue(endpoint: &str) -> Result<impl SpanProcessor + 'static, ExporterBuildError> {
    let losses = Arc::new(Losses::default());
    let agent = ureq::AgentBuilder::new().timeout_connect(CONNECT).timeout(EXPORT).redirects(0).build();
    let url = format!("{}/v1/traces", endpoint.trim_end_matches('/'));
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_http()
        .with_http_client(Wire { agent, losses: losses.clone() })
        .with_protocol(Protocol::HttpBinary)
        .with_timeout(EXPORT)
        .with_endpoint(&url)
        .build()?;
    Ok(SpanQueue::before(Watched { exporter, url, losses }))
}

/// Counts the spans that did not reach the collector. Written by those who end spans and by the exporter's
/// thread, which alone logs it.
#[derive(Debug, Default)]
struct Losses {
    waiting: AtomicUsize,
    /// Spans lost since the last log line.
    lost: AtomicU64,
    /// Locked for the few instructions of a copy; never across an export.
    last: Mutex<Last>,
}

#[derive(Debug, Default)]
struct Last {
    /// When losses were last logged.
    said: Option<Instant>,
    /// The last reason for which the collector was not reached.
    words: String,
}

impl Losses {
    /// The losses to log now, and their reason; none if the last log line is recent.
    fn to_say(&self, now: Instant) -> Option<(u64, String)> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.said.is_some_and(|said| now.saturating_duration_since(said) < SILENCE) {
            return None;
        }
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost == 0 {
            return None;
        }
        last.said = Some(now);
        Some((lost, std::mem::take(&mut last.words)))
    }

    fn remember(&self, words: String) {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).words = words;
    }
}

/// Wraps the SDK's queue, which drops spans silently when it is full, and never lets it fill.
#[derive(Debug)]
struct SpanQueue {
    queue: BatchSpanProcessor,
    losses: Arc<Losses>,
}

impl SpanQueue {
    fn before(exporter: Watched<impl SpanExporter + 'static>) -> Self {
        let losses = exporter.losses.clone();
        let sizes = BatchConfigBuilder::default()
            .with_max_queue_size(WAITING)
            .with_max_export_batch_size(REQUEST)
            .with_scheduled_delay(DELAY);
        Self { queue: BatchSpanProcessor::builder(exporter).with_batch_config(sizes.build()).build(), losses }
    }
}

impl SpanProcessor for SpanQueue {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.queue.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if self.losses.waiting.fetch_add(1, Ordering::Relaxed) < WAITING {
            return self.queue.on_end(span);
        }
        self.losses.waiting.fetch_sub(1, Ordering::Relaxed);
        self.losses.lost.fetch_add(1, Ordering::Relaxed);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.queue.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.queue.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.queue.set_resource(resource);
    }
}

/// An exporter whose failures are counted, and logged at intervals.
#[derive(Debug)]
struct Watched<E> {
    exporter: E,
    url: String,
    losses: Arc<Losses>,
}

impl<E: SpanExporter> SpanExporter for Watched<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        self.losses.waiting.fetch_sub(spans, Ordering::Relaxed);
        let exported = self.exporter.export(batch).await;
        if exported.is_err() {
            self.losses.lost.fetch_add(spans as u64, Ordering::Relaxed);
        }
        if let Some((lost, words)) = self.losses.to_say(Instant::now()) {
            let error = match &exported {
                Ok(()) => "spans end faster than the collector takes them".to_owned(),
                Err(_) if !words.is_empty() => words,
                Err(error) => error.to_string(),
            };
            tracing::warn!(collector = self.url, lost, error, "spans are lost; tasks do not wait for them");
        }
        exported
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// The exporter's HTTP client, which it calls on its own thread: it may block there.
#[derive(Debug)]
struct Wire {
    agent: ureq::Agent,
    losses: Arc<Losses>,
}

#[async_trait]
impl HttpClient for Wire {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let mut post = self.agent.post(&request.uri().to_string());
        for (name, value) in request.headers() {
            post = post.set(name.as_str(), value.to_str()?);
        }
        let answer = match post.send_bytes(request.body()) {
            Ok(answer) | Err(ureq::Error::Status(_, answer)) => answer,
            Err(error) => {
                // The exporter does not log the error.
                self.losses.remember(error.to_string());
                return Err(error.into());
            }
        };
        let status = answer.status();
        self.losses.remember(if status < 400 { String::new() } else { format!("it answers {status}") });
        let mut response = Response::builder().status(status);
        if let Some(after) = answer.header("retry-after") {
            response = response.header("retry-after", after);
        }
        let mut body = Vec::new();
        std::io::Read::read_to_end(&mut std::io::Read::take(answer.into_reader(), ANSWER), &mut body)?;
        Ok(response.body(body.into())?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

    use opentelemetry::trace::{Tracer, TracerProvider};
    use opentelemetry_sdk::trace::SdkTracerProvider;

    use super::*;

    /// An exporter that reports when it gets spans, and then waits for permission.
    #[derive(Debug)]
    struct Stuck {
        given: SyncSender<usize>,
        go: Mutex<Receiver<()>>,
    }

    impl SpanExporter for Stuck {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            self.given.send(batch.len()).unwrap();
            let _ = self.go.lock().unwrap().recv();
            Ok(())
        }
    }

    #[test]
    fn with_a_full_queue_spans_are_lost_and_counted_and_nobody_waits() {
        let (given, exported) = sync_channel(WAITING);
        let (let_go, go) = sync_channel(1);
        let losses = Arc::new(Losses::default());
        let exporter = Stuck { given, go: Mutex::new(go) };
        let span_queue = SpanQueue::before(Watched { exporter, url: String::new(), losses: losses.clone() });
        let provider = SdkTracerProvider::builder().with_span_processor(span_queue).build();
        let tracer = provider.tracer("test");
        (0..REQUEST).for_each(|_| drop(tracer.start("first")));
        let under_way = exported.recv().unwrap();
        // The spans still in the queue when the exporter blocked, and those that end later.
        let waiting = losses.waiting.load(Ordering::Relaxed);
        assert_eq!(under_way + waiting, REQUEST);
        (waiting..WAITING + 7).for_each(|_| drop(tracer.start("further")));
        assert_eq!(losses.lost.load(Ordering::Relaxed), 7);
        drop(let_go);
        provider.shutdown().unwrap();
        assert_eq!(exported.iter().sum::<usize>() + under_way, REQUEST + WAITING - waiting);
    }

    #[test]
    fn losses_are_spoken_of_once_a_minute_and_none_is_forgotten() {
        let (losses, start) = (Losses::default(), Instant::now());
        assert_eq!(losses.to_say(start), None, "nothing is lost");
        losses.lost.fetch_add(3, Ordering::Relaxed);
        losses.remember("refused".into());
        assert_eq!(losses.to_say(start), Some((3, "refused".into())));
        losses.lost.fetch_add(4, Ordering::Relaxed);
        assert_eq!(losses.to_say(start + SILENCE / 2), None);
        losses.lost.fetch_add(5, Ordering::Relaxed);
        assert_eq!(losses.to_say(start + SILENCE), Some((9, String::new())));
    }
}
