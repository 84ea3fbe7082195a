//! A queue inside the launcher process, for `sconce run-batch`: no RabbitMQ. `queue` decides who
//! gets what, `hub` holds the queues, `server` and `connection` serve worker processes over a Unix
//! socket, `client` is the worker's end of it, `wire` the frames between them. In memory: what is
//! queued ends with the launcher. Knows neither tasks nor models.

mod client;
mod connection;
mod hub;
mod outlet;
mod queue;
mod server;
mod wire;

pub use client::{Subscription, connect};
pub use hub::{DeliveryLimit, QueueSpec};
pub use queue::Stats;
pub use server::{EmbeddedBroker, LocalConsumer, Taken};
pub use wire::{MAX_MESSAGE, reread};
