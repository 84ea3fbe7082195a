//! The operator's access to a running launcher: metrics and health over HTTP, remote control over the broker.
//! Reads the launcher's board and uses its handle; owns neither.
//!
//! | file | decides |
//! |---|---|
//! | `http` | what is served under which path |
//! | `health` | whether the launcher is live, is ready, has started |
//! | `metrics` | names, units and labels of the metrics |
//! | `devices` | when the driver is queried for the devices' values |
//! | `remote` | what a control request does, and what its answer contains |

#[cfg(feature = "http")]
mod devices;
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "only the HTTP server uses it"))]
mod health;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "http")]
mod metrics;
mod remote;

pub use health::{Check, LAUNCHER};
#[cfg(feature = "http")]
pub use http::serve;
pub use remote::{ControlledLauncher, control};
