//! The worker's side of a model that is a class in Python: the process that holds it, the frames on its sockets, and its
//! faults. The worker stays what it is for any model: it forms batches and settles tasks. The process holds the class, the
//! inputs that it has prepared, and the outputs that it has not written into replies. Knows no kind of request and no
//! queue.
//!
//! | file | decides |
//! |---|---|
//! | `frames` | how a header and buffers are written to a socket and read from it; their bounds |
//! | `messages` | what the headers say |
//! | `process` | how the process is started and watched, and when it is given up |
//! | `supervisor` | that nothing which the process has started outlives it or the worker |
//! | `environment` | which variables it gets |
//! | `output` | which of its printed lines are logged |
//! | `descendants` | which processes it has started, and how much memory they use |
//! | `load` | what a class that is loaded, or is not, means |
//! | `replies` | bodies and errors as the class gives them |
//! | `processor` | preparing tasks and writing replies, over the side channel |
//! | `batches` | batches, over the model channel |
//! | `streams` | tasks that run side by side, over the model channel |
//!
//! The process has two sockets, so that a body that takes long to prepare does not hold up a batch: its main thread reads
//! the *model channel*, and another thread the *side channel*.

mod batches;
mod descendants;
mod environment;
mod frames;
mod load;
mod messages;
mod output;
mod process;
mod processor;
mod replies;
mod streams;
mod supervisor;
#[cfg(test)]
mod tests;

pub use load::{describe, load};
pub use supervisor::supervise;
