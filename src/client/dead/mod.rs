//! Handling of dead letters: selects them, summarizes them, publishes them to their task queue again, and deletes
//! them. Owns the session with the dead-letter queue. Knows no command line and no terminal: texts of dead letters are
//! passed on unchanged.

mod listing;
mod requeue;
mod selection;
mod session;
mod summary;

pub(crate) use listing::Listing;
pub(crate) use requeue::{Requeued, requeue};
pub(crate) use selection::{Filters, Selection};
pub(crate) use session::{BrowserSession, Fate};
pub(crate) use summary::{DeadLetterSummary, iso};
