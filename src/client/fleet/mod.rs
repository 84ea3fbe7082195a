//! The fleet over its control exchange: sends requests to running launchers and gathers their answers. Watches them and
//! the queues of their pools, and computes rates, depths, and which launchers are silent. Knows no terminal.

mod control;
#[cfg(all(test, feature = "top"))]
pub(crate) mod fixtures;
#[cfg(feature = "top")]
mod history;
#[cfg(feature = "top")]
mod pools;
#[cfg(feature = "top")]
mod rates;
#[cfg(all(test, feature = "top"))]
mod tests;
#[cfg(feature = "top")]
mod watch;

pub(crate) use control::{AnswerWait, Control, FleetError};
#[cfg(feature = "top")]
pub(crate) use history::{History, SlotHistory, SlotKey};
#[cfg(feature = "top")]
pub(crate) use pools::{Depth, PoolQueues, Total, totals};
#[cfg(feature = "top")]
pub(crate) use watch::{Order, Update, Watch};
