//! The settings of a pool that recognises speech: `[pool.options]`. Decides their defaults.

use serde::Deserialize;

use super::FAMILY;
use crate::model::family::{OptionDefault, OptionSpec, Takes};
use crate::model::tasks::SEED;
use crate::model::{Capacity, LoadError, LoadSpec};

/// The largest `max_seconds`: a day.
const MAX_SECONDS: u64 = 86_400;
/// The largest `sequences`. It keeps the tables that have a row for each slot within any host's memory.
const MAX_SEQUENCES: u64 = 4_096;

/// What each option takes, its default and its help.
pub static OPTIONS: [OptionSpec; 3] = [
    OptionSpec {
        name: "max_seconds",
        takes: Takes::Whole(1..=MAX_SECONDS),
        default: OptionDefault::Value("7200"),
        help: "the most seconds of a recording, as its header declares them and as it is decoded. A longer one gets 413. \
               A worker must finish a recording before `broker.consumer_timeout`",
    },
    OptionSpec {
        name: "sequences",
        takes: Takes::Whole(1..=MAX_SEQUENCES),
        default: OptionDefault::Value("8"),
        help: "the most windows of 30 s that are transcribed at once; `batch.max_requests` bounds them too. With \
               Whisper tiny a window takes 24 MB of memory in f32, with large-v3 640 MB; memory is allocated when it is used",
    },
    SEED,
];

/// The values of the options of one pool.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Options {
    /// The maximum length of a recording, in seconds.
    pub max_seconds: f64,
    /// The maximum number of windows that are transcribed at once.
    pub sequences: usize,
    /// Together with a task's id, the seed of its random numbers.
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

    /// The capacity of a network with these options and this context. Each slot has a whole context.
    pub fn capacity(self, context: usize) -> Capacity {
        Capacity { sequences: self.sequences, tokens: self.sequences * context, context }
    }
}
