//! The operator's side of a running launcher: metrics and health over HTTP, remote control over the
//! broker. Reads the launcher's board, and asks the launcher by its handle; owns neither.
//!
//! | file | decides |
//! |---|---|
//! | `http` | what is served under which path |
//! | `health` | whether the launcher lives, is ready, has started |
//! | `metrics` | names, units and labels of what is counted |
//! | `devices` | what the devices themselves say, and how often they are asked |
//! | `remote` | what a request does, and what its answer says |

#[cfg(feature = "http")]
mod devices;
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "only the server asks"))]
mod health;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "http")]
mod metrics;
mod remote;

pub use health::Check;
#[cfg(feature = "http")]
pub use http::serve;
pub use remote::{Place, control};
