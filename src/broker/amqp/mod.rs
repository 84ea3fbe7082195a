//! RabbitMQ, and any AMQP 0-9-1 broker, through lapin. Consuming and publishing use separate connections,
//! because a broker under a memory or disk alarm stops reading from connections that publish, while acks must
//! still get through. Lapin's own recovery stays off: after a channel error it leaves a consumer that never yields
//! again. So each session is built and dropped as a whole.

mod ack_tracker;
mod acker;
mod admin;
mod cause;
mod confirmed_publish;
mod connect;
mod consumer;
mod control;
mod convert;
mod dead_letter_browser;
mod publisher;
mod routes;
mod sending;
mod session;
mod topology;
mod withdrawals;

pub use acker::AmqpAcker;
pub use admin::{consumers_of, declare, declare_job};
pub use connect::{Connector, RefusalPolicy};
pub use consumer::{AmqpConsumer, subscribe};
pub use control::{ControlClient, QueueDepth};
pub use dead_letter_browser::{DeadLetterBrowser, NearLimit};
pub use publisher::AmqpPublisher;
pub use session::Subscription;
pub use topology::{Topology, retry_queue};
pub use withdrawals::read_withdrawals;
