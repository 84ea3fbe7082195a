//! The worker's side of a model that is a class in Python: the process that holds it, the frames on its sockets, and its
//! faults. As for any model, the worker forms batches and settles tasks. The process holds the class, the inputs of tasks, and
//! the outputs from which it writes replies itself. This room knows no kind of request and no queue.
//!
//! | file | decides |
//! |---|---|
//! | `frames` | how a header and buffers are written to a socket and read from it; their bounds |
//! | `messages` | what the headers say |
//! | `process` | how the process is started and watched, and when it is given up |
//! | `supervisor` | how the process is ended with all processes that it has started |
//! | `environment` | which environment variables the process gets |
//! | `output` | which of its printed lines are logged |
//! | `descendants` | which processes it has started, and how much memory they use |
//! | `load` | how a class is loaded, and whether the operator must act if that fails |
//! | `replies` | how numbers become replies, and failures errors of tasks |
//! | `processor` | how tasks are prepared and replies written, over the side channel |
//! | `batches` | how batches are computed, over the model channel |
//! | `streams` | how streams run side by side, over the model channel |
//!
//! The process has two sockets, so that a body that takes long to prepare does not hold up a batch: one thread of the process
//! computes what comes over the *model channel*, and another one serves the *side channel*.

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
