//! A collector of spans: what takes OTLP over HTTP, and keeps what it was sent.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use serde_json::Value;

use super::wait::until;

/// A running collector; it ends with the test.
pub struct Collector {
    address: SocketAddr,
    received: Arc<Mutex<Received>>,
}

/// What came in.
#[derive(Default)]
struct Received {
    spans: Vec<Span>,
    resource: Vec<KeyValue>,
    headers: HeaderMap,
}

impl Collector {
    /// Listens on a port of its own.
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let received = Arc::<Mutex<Received>>::default();
        let routes = Router::new().route("/v1/traces", post(take)).with_state(received.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        Self { address, received }
    }

    /// The value of `telemetry.otlp_endpoint`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The spans so far that `wanted` takes.
    pub fn spans(&self, wanted: impl Fn(&Span) -> bool) -> Vec<Span> {
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        received.spans.iter().filter(|span| wanted(span)).cloned().collect()
    }

    /// Waits for `count` spans that `wanted` takes, and gives them in the order of their beginnings.
    pub async fn wait_for(&self, what: &str, count: usize, wanted: impl Fn(&Span) -> bool) -> Vec<Span> {
        let mut spans = until(&format!("{count} spans: {what}"), || async {
            Some(self.spans(&wanted)).filter(|spans| spans.len() >= count)
        })
        .await;
        assert_eq!(spans.len(), count, "{what}: {spans:?}");
        spans.sort_by_key(|span| span.start_time_unix_nano);
        spans
    }

    /// An attribute of the service that sent them.
    pub fn resource(&self, name: &str) -> Value {
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        find(&received.resource, name)
    }

    /// A header of the last request.
    pub fn header(&self, name: &str) -> String {
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        let value = received.headers.get(name).and_then(|value| value.to_str().ok());
        value.unwrap_or_default().to_owned()
    }
}

async fn take(State(received): State<Arc<Mutex<Received>>>, headers: HeaderMap, body: Bytes) {
    let request = ExportTraceServiceRequest::decode(body).expect("OTLP");
    let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
    received.headers = headers;
    for of_resource in request.resource_spans {
        received.resource = of_resource.resource.map(|it| it.attributes).unwrap_or_default();
        received.spans.extend(of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans));
    }
}

/// An attribute of a span; null when it is missing.
pub fn attribute(span: &Span, name: &str) -> Value {
    find(&span.attributes, name)
}

/// The digits of an id.
pub fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn find(attributes: &[KeyValue], name: &str) -> Value {
    let found: Vec<_> = attributes.iter().filter(|attribute| attribute.key == name).collect();
    assert!(found.len() < 2, "{name} is there twice: {attributes:?}");
    match found.first().and_then(|found| found.value.clone()) {
        Some(AnyValue { value: Some(value) }) => match value {
            any_value::Value::StringValue(text) => text.into(),
            any_value::Value::IntValue(number) => number.into(),
            any_value::Value::DoubleValue(number) => number.into(),
            other => panic!("{name} is {other:?}"),
        },
        _ => Value::Null,
    }
}
