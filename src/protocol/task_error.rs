//! The error of one task, reported to its producer. The process is healthy: errors of the process are
//! `worker::WorkerError`, and errors that the operator must fix are `config::ConfigError` and
//! `launcher::LaunchError`.

use super::shorten;

/// Longest message, in bytes. The error text of a library may contain the whole value.
const MAX_MESSAGE_BYTES: usize = 2_000;

named_enum! {
    /// The kind of failure, which decides the reply's `status` and `status_code`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum TaskErrorKind as code {
        /// The body does not match its content type (not JSON, not UTF-8): 400, and dead-lettered.
        Undecodable => "undecodable",
        /// The request is well-formed, but this model cannot answer it: 400.
        BadInput => "invalid_value",
        /// The request names a model that this pool does not serve: 404.
        UnknownModel => "model_not_found",
        /// The request names a URL that this pool does not answer: 404.
        UnknownUrl => "unknown_url",
        /// The deadline passed before the task was computed: 408.
        Expired => "expired",
        /// The request exceeds a limit of this pool: 413.
        TooLarge => "too_large",
        /// The model or this program failed on a valid input, and would fail again: 500.
        Internal => "internal_error",
        /// A forward pass failed on this input alone, on a healthy device: 500, when a retry fails too.
        Fault => "internal_error",
        /// A file that the task names by its URL could not be fetched: 502, when a retry fails too.
        Unavailable => "file_unavailable",
        /// The device had too little memory for this input, even alone: 507, when a retry fails too.
        OutOfMemory => "out_of_device_memory",
        /// The answer is no longer wanted: 499.
        Cancelled => "cancelled",
    }
}

impl TaskErrorKind {
    /// Returns whether the error blames the model itself. A broken device would cause the same error, so the device is
    /// checked then.
    pub fn blames_the_model(self) -> bool {
        matches!(self, Self::Internal | Self::Fault | Self::OutOfMemory)
    }

    /// Whether the request itself is refused, so that a retry would be refused again.
    pub fn is_refusal(self) -> bool {
        matches!(
            self,
            Self::Undecodable | Self::BadInput | Self::UnknownModel | Self::UnknownUrl | Self::TooLarge
        )
    }
}

/// Why a task was not answered with a result.
///
/// The message names the field and the value. It is sent to the producer unchanged, so it must not contain a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct TaskError {
    /// The kind of failure.
    pub kind: TaskErrorKind,
    /// One sentence for the producer.
    pub message: String,
    /// The field at fault, as a path into the body (`input[3]`), when there is one.
    pub param: Option<String>,
}

impl TaskError {
    /// An error that no single field causes.
    pub fn new(kind: TaskErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: shorten(&message.into(), MAX_MESSAGE_BYTES), param: None }
    }

    /// A failure of the model or this program.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(TaskErrorKind::Internal, message)
    }

    /// A bad value in the field `param`.
    pub fn bad_input(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(TaskErrorKind::BadInput, message).with_param(param)
    }

    /// The same error, caused by the field `param`.
    #[must_use]
    pub fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_bounded_whatever_a_library_put_into_it() {
        let error = TaskError::bad_input("input", "é".repeat(1 << 20));
        assert!(error.message.len() < MAX_MESSAGE_BYTES + 30, "{}", error.message.len());
        assert!(error.message.ends_with("… (2097152 bytes)"));
    }
}
