//! Connections of lapin that survive short strings that are not UTF-8.
//!
//! RabbitMQ takes any bytes for the short strings of a message: its properties, the names of its headers, its
//! routing key. Lapin takes only UTF-8. It ends the connection at any other bytes, and meets the same message
//! again after each reconnection. So the stream between lapin and the broker is filtered: lapin receives `?`
//! in the place of each invalid byte, and [`Strings::take`] gives the original bytes. To send such bytes,
//! lapin is given a token for them ([`Strings::token`]), which the filter replaces by the bytes.
//!
//! | file | decides |
//! |---|---|
//! | `filter` | what is replaced in a frame; does no I/O |
//! | `strings` | which originals and tokens a connection remembers |
//! | `stream` | how lapin is given the filtered stream |

mod filter;
mod stream;
mod strings;

#[doc(hidden)] // for the fuzz target
pub use filter::Inbound;
pub use stream::{Socket, connect};
pub use strings::{Property, RawStrings, Strings, replaced};
