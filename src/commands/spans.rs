//! A worker's tracer: made from its assignment, and flushed when the worker has ended.

use std::time::Duration;

use crate::config::Assignment;
use crate::shutdown::{Phase, Stop};
use crate::telemetry::traces::{Place, Traces};
use crate::worker::{Ended, WorkerError, load_spec};

/// Longest wait for sending the last spans.
const LAST: Duration = Duration::from_secs(1);

/// The tracer of a worker, off where the settings say so. If it cannot be made, the worker runs without it.
pub(super) fn tracer(assignment: &Assignment) -> Traces {
    let Some(endpoint) = &assignment.telemetry.otlp_endpoint else { return Traces::default() };
    let is_embedded = assignment.broker.delivery_timeout().is_none();
    let spec = load_spec(assignment);
    let place = Place {
        worker: &assignment.worker,
        slot: &assignment.slot,
        device: &assignment.device,
        model: spec.model_name(),
        queue: &assignment.pool.task_queue,
        system: if is_embedded { "sconce" } else { "rabbitmq" },
    };
    let started = Traces::start(endpoint, assignment.telemetry.trace_sample, place);
    started.unwrap_or_else(|error| {
        tracing::warn!(endpoint, error, "no spans will be exported");
        Traces::default()
    })
}

/// Sends the last spans of a worker that has ended, unless it is aborting.
pub(super) async fn send_last(traces: Traces, stop: &Stop, ended: &Result<Ended, WorkerError>) {
    if matches!(ended, Ok(Ended::Aborted)) {
        return;
    }
    tokio::select! {
        () = stop.reached(Phase::Aborting) => {}
        _ = tokio::task::spawn_blocking(move || traces.finish(LAST)) => {}
    }
}
