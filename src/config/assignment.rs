//! What one worker runs: a slot with all its settings. The launcher's plan creates it, and the `start` control line
//! carries it to the worker.

use serde::{Deserialize, Serialize};

use super::{Broker, Pool, Telemetry};

/// Tokens per forward pass for each CPU thread. They are enough for efficient matrix products, and few enough that a
/// batch takes a fraction of a second.
const CPU_TOKENS: usize = 1_024;
/// Tokens per forward pass on a GPU.
const GPU_TOKENS: usize = 32_768;
/// Tokens of a short text: the assumed size of a message before the first one has arrived.
const SHORT_TEXT: usize = 16;
/// Most preprocess threads: with the slowest tokenizers, 8 do about 80,000 short texts a second.
const MAX_PREPROCESS_THREADS: usize = 8;
/// Upper bound of the automatic prefetch while the number of tokens of a message is unknown.
const MAX_USUAL_PREFETCH: usize = 256;

/// One worker's assignment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// The slot's name: pool and index.
    pub slot: String,
    /// The worker's name, `launcher/pool/index`, as in replies.
    pub worker: String,
    /// `cpu`, or the GPU's UUID.
    pub device: String,
    /// Workers of the launcher that may compute on the device at once, this one included. It is 1 in a plan; the
    /// code that starts a worker sets the number at that time.
    #[serde(default = "one_sharer")]
    pub sharers: usize,
    /// Compute threads; for a GPU's worker, preprocess threads.
    pub threads: usize,
    /// The pool.
    pub pool: Pool,
    /// The broker.
    pub broker: Broker,
    /// Where tracing spans are sent.
    pub telemetry: Telemetry,
    /// The task, background and dead-letter queues of all pools. No reply may go there.
    #[serde(default)]
    pub reserved_queues: Vec<String>,
    /// Whether the broker has accepted a worker with the same settings before. If so, a refusal is worth retrying.
    #[serde(default)]
    pub broker_reached: bool,
}

fn one_sharer() -> usize {
    1
}

impl Assignment {
    /// Most tokens of a batch: the pool's setting, or the device's default.
    pub fn max_tokens(&self) -> usize {
        let default = if self.device == "cpu" { CPU_TOKENS * self.threads.max(1) } else { GPU_TOKENS };
        self.pool.batch.max_tokens.unwrap_or(default)
    }

    /// The share of the device's possible speed that this worker must reach: the pool's setting, divided by the number
    /// of workers that share the device.
    pub fn min_speed(&self) -> f64 {
        self.pool.min_speed / self.sharers.max(1) as f64
    }

    /// Number of preprocess threads, and also of threads that write replies. A CPU worker has one of each, because its
    /// cores are needed for computing.
    pub fn preprocess_threads(&self) -> usize {
        if self.device == "cpu" { 1 } else { self.threads.clamp(1, MAX_PREPROCESS_THREADS) }
    }

    /// The first prefetch of each queue, while the size of messages is unknown: the pool's setting. Without one, the usual
    /// prefetch, but at most as many messages as fit into the queue's part of `prefetch_bytes` if all have the largest
    /// size.
    pub fn first_prefetch(&self) -> u16 {
        let affordable =
            (self.pool.queue_prefetch_bytes() / self.pool.max_body.max(1)).clamp(1, u16::MAX.into());
        self.pool.prefetch.unwrap_or(self.usual_prefetch().min(affordable as u16))
    }

    /// Prefetch for short texts: the pool's setting, or two batches of them.
    pub fn usual_prefetch(&self) -> u16 {
        let batch = self.max_tokens().div_ceil(SHORT_TEXT).min(self.pool.batch.max_requests);
        let auto = (2 * batch).clamp(2, MAX_USUAL_PREFETCH) as u16;
        self.pool.prefetch.unwrap_or(auto)
    }
}
