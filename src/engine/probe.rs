//! Decides what a failed probe means: a mistake of the model's author, weights that are not finite, or a device that
//! cannot be trusted. Owns no state.

use std::fmt::Display;

use crate::model::load::check_finite;
use crate::model::{LoadError, LoadSpec, TaskError};

/// Why the probe of a model has failed.
#[derive(Debug, thiserror::Error)]
#[error("a known input fails: {0}")]
pub(super) enum ProbeError {
    /// The model refuses the probe as a bad request. The author of the probe must correct it.
    Refused(String),
    /// Its computation failed: the device cannot be trusted, unless the weights are not finite.
    Failed(String),
}

impl ProbeError {
    pub(super) fn failed(error: impl Display) -> Self {
        Self::Failed(error.to_string())
    }

    /// The error with which loading the model fails.
    pub(super) fn load_error(self, spec: &LoadSpec, device: &str) -> LoadError {
        match self {
            Self::Refused(reason) => LoadError::Probe { model: spec.source.clone(), reason },
            Self::Failed(_) => match check_finite(spec) {
                Ok(()) => LoadError::Device { device: device.to_owned(), reason: self.to_string() },
                Err(error) => error,
            },
        }
    }
}

impl From<TaskError> for ProbeError {
    /// A refusal is not the device's fault: it would be the same on any device.
    fn from(error: TaskError) -> Self {
        if error.kind.is_refusal() { Self::Refused(error.message) } else { Self::Failed(error.message) }
    }
}
