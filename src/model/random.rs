//! Random numbers that are a function of a key and of the place where they are used, so that a task that is computed
//! again gets the same result. Does no I/O.

use sha2::{Digest, Sha256};

use super::Properties;

/// The key of the random numbers of a sequence: of a text, or of the noise in a spoken sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed {
    /// The task's seed.
    pub task: u64,
    /// The sequence's index within its task.
    pub sequence: u64,
}

impl Seed {
    /// 64 random bits for this position: of a token in its text, of a frame in its sentence.
    pub fn bits(self, position: u64) -> u64 {
        splitmix64(splitmix64(splitmix64(self.task) ^ self.sequence) ^ position)
    }

    /// A random number of at least 0 and below 1 for this position.
    pub fn uniform(self, position: u64) -> f64 {
        (self.bits(position) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The seed of a task that sets none: a hash of the pool's seed and of the task's id. A task without an id gets a
/// random seed.
pub fn seed_of_task(pool_seed: u64, properties: &Properties) -> u64 {
    let id = properties.message_id.as_ref().or(properties.correlation_id.as_ref());
    let Some(id) = id else { return uuid::Uuid::new_v4().as_u64_pair().0 };
    let digest = Sha256::new().chain_update(pool_seed.to_le_bytes()).chain_update(id).finalize();
    digest.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// The output function of SplitMix64.
pub fn splitmix64(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}
