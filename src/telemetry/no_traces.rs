//! [`Traces`] in a build without the feature `otlp`: nothing is recorded.

use std::convert::Infallible;
use std::time::Duration;

/// No links, since no spans are recorded.
pub const MAX_LINKS: usize = 0;

pub use super::span::{DeliveredTask, SpanOrigin};

/// A finished forward pass.
pub type ForwardPass<'a> = super::span::ForwardPass<'a, TaskLink>;

/// Cannot be created in this build.
pub struct TaskSpan(Infallible);

/// Cannot be created in this build.
#[derive(Clone, Debug)]
pub struct TaskLink(Infallible);

/// Creates no spans.
#[derive(Clone, Default)]
pub struct Traces(());

#[expect(missing_docs, reason = "as in a build with the feature")]
impl Traces {
    pub fn start(_: &str, _: f64, _: SpanOrigin<'_>) -> Result<Self, String> {
        Err("this build is without the feature `otlp`".to_owned())
    }

    pub fn is_on(&self) -> bool {
        false
    }

    pub fn task<'a>(&self, _: impl FnOnce() -> DeliveredTask<'a>) -> Option<TaskSpan> {
        None
    }

    pub fn batch(&self, _: ForwardPass<'_>) {}

    pub fn finish(&self, _: Duration) {}
}

#[expect(missing_docs, reason = "as in a build with the feature")]
impl TaskSpan {
    pub fn traceparent(&self) -> String {
        match self.0 {}
    }

    pub fn is_continued(&self) -> bool {
        match self.0 {}
    }

    pub fn link(&self) -> Option<TaskLink> {
        match self.0 {}
    }

    pub fn set_attribute<T>(&self, _: &'static str, _: T) {
        match self.0 {}
    }

    pub fn fail(&self, _: String) {
        match self.0 {}
    }
}
