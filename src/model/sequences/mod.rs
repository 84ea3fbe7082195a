//! The parts shared by all models whose answers are sequences of tokens: which sequence holds which blocks of keys and
//! values (`blocks`), which token comes next (`sampler`, `grammar`), and which text may be sent (`text`). Knows
//! neither requests nor networks.

pub mod blocks;
pub mod grammar;
pub mod sampler;
pub mod text;

use crate::model::TaskError;

/// The error of a row that its sequence cannot compute now: a bug of the caller.
pub fn out_of_turn() -> TaskError {
    TaskError::internal("a row of a sequence that is not open, or that cannot compute this row now")
}
