//! Handling of dead letters: which ones are meant, what they say, putting them back into their task queue, and deleting
//! them. Owns the session with the dead-letter queue. Knows no command line and no terminal: texts of dead letters are
//! handed on as they are.

mod listing;
mod requeue;
mod selection;
mod session;
mod summary;

pub(crate) use listing::Listing;
pub(crate) use requeue::{Requeued, requeue};
pub(crate) use selection::{Filters, Selection};
pub(crate) use session::{BrowserSession, Fate, Left};
pub(crate) use summary::{DeadLetterSummary, iso};
