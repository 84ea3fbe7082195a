//! Decides which traces are recorded. A decision from upstream is followed.

use opentelemetry::trace::{Link, SpanKind, TraceId};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{Sampler, SamplingDecision, SamplingResult, ShouldSample};

/// A batch with a recorded task is recorded; for all other spans the parent or `others` decides.
#[derive(Clone, Debug)]
pub(super) struct Sampling {
    others: Sampler,
}

impl Sampling {
    /// Records the share `sample` of traces that begin here.
    pub(super) fn of(sample: f64) -> Self {
        Self { others: Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(sample))) }
    }
}

impl ShouldSample for Sampling {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        trace: TraceId,
        name: &str,
        kind: &SpanKind,
        attributes: &[KeyValue],
        links: &[Link],
    ) -> SamplingResult {
        let mut result = self.others.should_sample(parent, trace, name, kind, attributes, links);
        if !links.is_empty() {
            result.decision = SamplingDecision::RecordAndSample;
        }
        result
    }
}
