//! The operator's access to a running launcher: metrics and health over HTTP, remote control over the broker.
//! Reads the launcher's status board and sends orders through its handle; owns neither.
//!
//! | file | decides |
//! |---|---|
//! | `http` | what is served under which path |
//! | `health` | whether the launcher is live and ready, and whether it has started |
//! | `metrics` | names, units and labels of the metrics |
//! | `devices` | when the driver is queried for the devices' values |
//! | `remote` | what a control request does, and what its answer contains |
//! | `cancellations` | what becomes of the cancellations that requesters send |

mod cancellations;
#[cfg(feature = "http")]
mod devices;
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "only the HTTP server uses it"))]
mod health;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "http")]
mod metrics;
mod remote;

pub use cancellations::cancellations;
pub use health::{Check, LAUNCHER_HEADER};
#[cfg(feature = "http")]
pub use http::serve;
pub use remote::{ControlledLauncher, control};
