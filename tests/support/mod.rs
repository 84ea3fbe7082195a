//! What the tests over a real broker stand on: a RabbitMQ node of their own, the `sconce` binary as
//! a child, a client, a TCP proxy, bounded waits. Nothing here outlives the test process, not even
//! one that is killed.

#![allow(dead_code, reason = "each test crate uses a part of it")]
#![allow(clippy::print_stderr, reason = "what a failed test shows")]

pub mod client;
pub mod cluster;
pub mod collector;
pub mod engine;
pub mod processes;
pub mod proxy;
pub mod rabbit;
pub mod raw_amqp;
pub mod sconce;
pub mod wait;
