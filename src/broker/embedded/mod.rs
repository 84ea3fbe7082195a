//! A queue inside the launcher process, for `sconce run-batch` without RabbitMQ. `queue` decides which consumer gets
//! which message, `queue_store` holds the queues, `server` and `connection` serve workers over a Unix socket, `client`
//! is the worker's side, and `wire` defines the frames between them. The queues are in memory: messages are lost when
//! the launcher ends, and nothing expires. Knows neither tasks nor models.

mod client;
mod connection;
mod queue;
mod queue_store;
mod server;
mod wire;

pub use client::connect;
pub use queue::QueueCounts;
pub use queue_store::QueueSpec;
pub use server::EmbeddedBroker;
pub use wire::MAX_MESSAGE;
