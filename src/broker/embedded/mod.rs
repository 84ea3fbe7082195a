//! A queue inside the launcher process, for `sconce run-batch`: no RabbitMQ. `queue` decides who
//! gets what, `queue_store` holds the queues, `server` and `connection` serve worker processes over a Unix
//! socket, `client` is the worker's end of it, `wire` the frames between them. In memory: what is
//! queued ends with the launcher, and nothing expires. Knows neither tasks nor models.

mod client;
mod connection;
mod consumer_sender;
mod queue;
mod queue_store;
mod server;
mod wire;

pub use client::{Subscription, connect};
pub use queue::Stats;
pub use queue_store::QueueSpec;
pub use server::EmbeddedBroker;
pub use wire::{MAX_MESSAGE, reread};
