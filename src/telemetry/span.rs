//! The plain values of which spans are made. They exist with and without the feature `otlp`.

use std::time::SystemTime;

/// The process whose spans these are; the same for all of them.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// launcher/pool/index; OpenTelemetry's `service.instance.id`.
    pub worker: &'a str,
    /// pool/index.
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
    /// Links to the recorded tasks in it, `MAX_LINKS` at most.
    pub links: Vec<L>,
    /// The number of all tasks in it.
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
    pub at: SystemTime,
}
