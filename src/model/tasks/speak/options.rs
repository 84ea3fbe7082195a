//! The settings of a pool that speaks: `[pool.options]`. Decides their defaults.

use serde::Deserialize;

use super::FAMILY;
use crate::model::family::{OptionDefault, OptionSpec, Takes};
use crate::model::tasks::SEED;
use crate::model::{LoadError, LoadSpec};

/// The largest `max_seconds`: a WAV file of 345 MB. RabbitMQ 4 accepts messages up to 16 MiB by default.
const MAX_SECONDS: u64 = 7_200;

/// What each option takes, its default and its help.
pub static OPTIONS: [OptionSpec; 2] = [
    OptionSpec {
        name: "max_seconds",
        takes: Takes::Whole(1..=MAX_SECONDS),
        default: OptionDefault::Value("300"),
        help: "the most seconds of sound that a task may ask for, estimated from its phonemes and its speed. A longer \
               task gets 413. A second takes 48 kB as WAV, and RabbitMQ 4 refuses messages over 16 MiB by default",
    },
    SEED,
];

/// The values of the options of one pool.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Options {
    /// Maximum duration of a task's sound, in seconds.
    pub max_seconds: f32,
    /// Together with a task's id, the seed of its noise.
    pub seed: u64,
}

impl Options {
    /// Reads the pool's options.
    ///
    /// # Errors
    /// [`LoadError::Option`] for an option that is not known or out of its bounds.
    pub fn read(spec: &LoadSpec) -> Result<Self, LoadError> {
        FAMILY.read_options(spec)
    }
}
