//! A summary of a dead letter. Its texts are shortened, because those of a dead letter may be of any length.

use std::time::SystemTime;

use jiff::Timestamp;
use serde::Serialize;

use crate::broker::Delivery;
use crate::protocol::dead_letter::DeadLetter;
use crate::protocol::raw_text::visible;
use crate::protocol::shorten;

/// Longest text of a summary, in bytes. The `error` header of a worker is shorter, so it is not cut a second time.
const TEXT_BYTES: usize = 2_100;

/// A dead letter in a list, and its line of JSON.
#[derive(Debug, Serialize)]
pub(crate) struct DeadLetterSummary {
    pub(crate) task_id: Option<String>,
    pub(crate) message_id: Option<String>,
    pub(crate) correlation_id: Option<String>,
    pub(crate) reason: String,
    /// ISO-8601, so sorting texts sorts times.
    pub(crate) dead_lettered_at: Option<String>,
    pub(crate) age_s: Option<u64>,
    pub(crate) worker: Option<String>,
    pub(crate) error: Option<String>,
    /// Bytes of its body.
    pub(crate) size: usize,
    /// Where it would be moved, or why it is left; none if that was not requested.
    #[serde(skip)]
    pub(crate) destination: Option<String>,
}

impl DeadLetterSummary {
    /// Summarizes a dead letter. Its age is counted up to `now`.
    pub(crate) fn of(delivery: &Delivery, now: SystemTime) -> Self {
        let (message, dead_letter) = (&delivery.message, DeadLetter::new(&delivery.message));
        let text = |text: Option<&str>| text.map(|text| shorten(&visible(text), TEXT_BYTES));
        Self {
            task_id: text(dead_letter.task_id()),
            message_id: text(message.properties.message_id.as_deref()),
            correlation_id: text(message.properties.correlation_id.as_deref()),
            reason: shorten(dead_letter.reason(), TEXT_BYTES),
            dead_lettered_at: dead_letter.dead_lettered_at().and_then(iso),
            age_s: dead_letter.age(now).map(|age| age.as_secs()),
            worker: text(dead_letter.worker()),
            // Not an id: it is read and not copied, and printing replaces its control characters.
            error: dead_letter.error().map(|error| shorten(error, TEXT_BYTES)),
            size: message.body.len(),
            destination: None,
        }
    }

    pub(crate) fn with_destination(self, destination: String) -> Self {
        Self { destination: Some(destination), ..self }
    }
}

/// Formats a time as ISO-8601 with milliseconds; none if it is out of range.
pub(crate) fn iso(at: SystemTime) -> Option<String> {
    Timestamp::try_from(at).ok().map(|at| format!("{at:.3}"))
}
