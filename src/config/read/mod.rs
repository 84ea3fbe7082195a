//! Readers of settings: they turn the merged tree into values and collect every mistake. `reader` walks the keys of a
//! section. The other modules read single values; each error says what was expected.

mod addresses;
mod names;
mod queues;
mod reader;
mod sources;
mod values;

pub use addresses::Secret;
pub use names::Devices;
pub use queues::TaskQueue;
pub use sources::AllowedSource;

pub(super) use super::files::BUILT_IN;
pub(super) use super::problem::Problem;
pub(super) use addresses::{endpoint, listen, optional_secret, urls};
pub(super) use names::{devices, exchange, optional_queue, queue, served_names, task_queue};
pub(super) use queues::task_queues;
pub(super) use reader::{Expected, Reader, Report, origin};
pub(super) use sources::{service, sources};
pub(super) use values::{
    choice, duration, name, optional_file, optional_name, paths, share, size, switch, text, typed, unless,
    whole, whole_seconds,
};
