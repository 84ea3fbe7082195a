//! The input of spans, as plain values. They exist with and without the feature `otlp`.

use std::time::SystemTime;

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

/// A finished forward pass.
#[derive(Debug)]
pub struct ForwardPass<'a, L> {
    /// When it began.
    pub began: SystemTime,
    /// Links to the recorded tasks in it, at most `MAX_LINKS`.
    pub links: Vec<L>,
    /// The number of tasks in it, recorded or not.
    pub tasks: usize,
    /// The number of inputs in it.
    pub inputs: usize,
    /// The number of tokens in it.
    pub tokens: usize,
    /// Why the device failed, if it did.
    pub fault: Option<&'a str>,
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
