//! What one worker is to run: a slot with all its settings. The launcher's plan makes it, the
//! `start` control line carries it.

use serde::{Deserialize, Serialize};

use super::{Broker, Pool, Telemetry};

/// Tokens a forward pass for each CPU thread: enough to fill the matrix products, few enough that a
/// batch stays within a fraction of a second.
const CPU_TOKENS: usize = 1_024;
/// Tokens a forward pass on a GPU.
const GPU_TOKENS: usize = 32_768;
/// A short text, in tokens: before any has come, messages are taken for these.
const SHORT_TEXT: usize = 16;
/// Most threads that prepare tasks: with the slowest tokenizers, some 80,000 short texts a second.
const MOST_FEEDERS: usize = 8;
/// Most messages to hold before it is known how many tokens they carry.
const MOST_SHORT_TEXTS: usize = 256;

/// One worker's assignment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// The slot's name: pool and index.
    pub slot: String,
    /// host/pool/index, as in replies.
    pub worker: String,
    /// `cpu`, or the GPU's UUID.
    pub device: String,
    /// Workers of the launcher that may compute on the device at once, this one included. A plan says 1; who
    /// starts a worker says how many there are then.
    #[serde(default = "alone")]
    pub sharers: usize,
    /// Threads that compute, or on a GPU's worker those that feed it.
    pub threads: usize,
    /// The pool.
    pub pool: Pool,
    /// The broker.
    pub broker: Broker,
    /// Where its spans go.
    pub telemetry: Telemetry,
    /// Task and dead-letter queues of all pools: no reply goes there.
    #[serde(default)]
    pub reserved_queues: Vec<String>,
    /// The broker has taken a worker by the same settings before: if it refuses this one, that passes.
    #[serde(default)]
    pub broker_reached: bool,
}

fn alone() -> usize {
    1
}

impl Assignment {
    /// Most tokens of a batch: the pool's, or by device.
    pub fn max_tokens(&self) -> usize {
        let by_device = if self.device == "cpu" { CPU_TOKENS * self.threads.max(1) } else { GPU_TOKENS };
        self.pool.batch.max_tokens.unwrap_or(by_device)
    }

    /// Share of what the device could do that it has to reach: the pool's, for each that computes on it.
    pub fn min_speed(&self) -> f64 {
        self.pool.min_speed / self.sharers.max(1) as f64
    }

    /// Threads that prepare tasks, and as many that write replies: they take turns on the cores. Those of
    /// a CPU worker compute.
    pub fn feeders(&self) -> usize {
        if self.device == "cpu" { 1 } else { self.threads.clamp(1, MOST_FEEDERS) }
    }

    /// Unacked messages at first, while nobody knows how large they are: the pool's, or as many of the
    /// largest as its bytes allow.
    pub fn first_prefetch(&self) -> u16 {
        let affordable = (self.pool.prefetch_bytes / self.pool.max_body.max(1)).clamp(1, u16::MAX.into());
        self.pool.prefetch.unwrap_or(self.usual_prefetch().min(affordable as u16))
    }

    /// Unacked messages where they are short texts: the pool's, or two batches of them.
    pub fn usual_prefetch(&self) -> u16 {
        let batch = self.max_tokens().div_ceil(SHORT_TEXT).min(self.pool.batch.max_requests);
        let auto = (2 * batch).clamp(2, MOST_SHORT_TEXTS) as u16;
        self.pool.prefetch.unwrap_or(auto)
    }
}
