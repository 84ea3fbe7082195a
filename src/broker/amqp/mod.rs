//! RabbitMQ, and any AMQP 0-9-1 broker, through lapin. Consuming and publishing use separate connections,
//! because a broker under a memory or disk alarm stops reading from connections that publish, while acks must
//! still get through. Lapin's own recovery stays off: after a channel error it leaves a consumer that never yields
//! again. So each session is built and dropped as a whole.

mod ack_tracker;
mod acker;
mod admin;
mod cause;
mod channel_choice;
mod confirmed_publish;
mod connect;
mod consumer;
mod control;
mod convert;
mod dead_letter_browser;
mod publisher;
mod sending;
mod session;
mod shared_connection;
mod topology;
mod withdrawals;

pub use acker::AmqpAcker;
pub use admin::{QueueDepth, declare, declare_job, depth_of};
pub use connect::{Connector, RefusalPolicy};
pub use consumer::{AmqpConsumer, subscribe, subscribe_all};
pub use control::ControlClient;
pub use dead_letter_browser::{DeadLetterBrowser, NearLimit};
pub use publisher::AmqpPublisher;
pub use session::Subscription;
pub use topology::{Consumed, Topology, retry_queue, retry_queues};
pub use withdrawals::read_withdrawals;
