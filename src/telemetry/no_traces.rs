//! [`Traces`] in a build without the feature `otlp`: nothing is recorded.

use std::convert::Infallible;
use std::time::{Duration, SystemTime};

/// As in a build with the feature.
pub const MAX_LINKS: usize = 0;

/// As in a build with the feature.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "as in a build with the feature")]
pub struct Place<'a> {
    pub worker: &'a str,
    pub slot: &'a str,
    pub device: &'a str,
    pub model: &'a str,
    pub queue: &'a str,
    pub system: &'static str,
}

/// As in a build with the feature.
#[derive(Debug)]
#[expect(missing_docs, reason = "as in a build with the feature")]
pub struct Passed<'a> {
    pub began: SystemTime,
    pub links: Vec<TaskLink>,
    pub tasks: usize,
    pub inputs: usize,
    pub tokens: usize,
    pub fault: Option<&'a str>,
}

/// As in a build with the feature.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "as in a build with the feature")]
pub struct Came<'a> {
    pub id: &'a str,
    pub correlation_id: Option<&'a str>,
    pub traceparent: Option<&'a str>,
    pub tracestate: Option<&'a str>,
    pub size: usize,
    pub at: SystemTime,
}

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
    pub fn start(_: &str, _: f64, _: Place<'_>) -> Result<Self, String> {
        Err("this build is without the feature `otlp`".to_owned())
    }

    pub fn is_on(&self) -> bool {
        false
    }

    pub fn task<'a>(&self, _: impl FnOnce() -> Came<'a>) -> Option<TaskSpan> {
        None
    }

    pub fn batch(&self, _: Passed<'_>) {}

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

    pub fn is_recorded(&self) -> bool {
        match self.0 {}
    }

    pub fn tell<T>(&self, _: &'static str, _: T) {
        match self.0 {}
    }

    pub fn fail(&self, _: String) {
        match self.0 {}
    }
}
