//! sconce: model inference behind a message queue. A launcher starts one worker process per device;
//! each loads a model of its own, takes tasks from a RabbitMQ queue (or from one inside the
//! launcher), batches them by tokens, and publishes replies.
//!
//! This is a library with a thin binary: to serve a model of your own, implement [`model::Processor`] and
//! [`model::Forward`] or [`model::Generate`], register their loader in an [`app::Registry`], and call
//! [`app::main`]; see `docs/own-models.md`. `docs/contributing/architecture.md` follows one task through these files
//! and defines the project's terms.
//!
//! # Rooms, and who may import whom
//!
//! Imports only point down, and the files of a room have no import cycles; `tests/architecture.rs` checks this.
//!
//! | level | room | decides |
//! |---|---|---|
//! | – | `crates/kernels` | what networks compute on a CPU, on slices. A separate crate, used by `model/ops`; `config` takes only the names of vector units from it |
//! | 0 | `enum_names` | how an enum and the names of its values are written |
//! | 0 | `protocol` | how bytes become a task, reply, part of a reply, sentinel, control line or batch line, and back; what clients know of each endpoint |
//! | 0 | `batching` | when a batch is full, due or flushed; which sequences run, and which rows a step computes; which queue is next |
//! | 0 | `backoff` | capped, jittered delays |
//! | 0 | `shutdown` | causes, phases, exit codes, the signal source |
//! | 1 | `config` | how raw settings become validated ones; the worker's assignment |
//! | 2 | `telemetry` | where log lines and spans go, and how they look |
//! | 2 | `model` | the traits of models; loading; devices; the networks; the kinds of requests with their bodies; what serves which architecture; models for tests |
//! | 2 | `fetch` | from which sources the files that tasks name by URL may be fetched, and how many bytes of them are in memory |
//! | 2 | `broker` | how messages are delivered, published with a confirm, and settled; when to reconnect |
//! | 3 | `engine` | the model thread: batches of one pass, sequences, what a failed batch means |
//! | 4 | `python` | the worker's side of a model that is a class in Python: its process, sockets and faults |
//! | 4 | `worker` | the way of a task: session, intake, preprocessing, engine, settlement; the drain; isolation |
//! | 4 | `launcher` | which devices and slots there are; when workers are spawned, restarted and stopped |
//! | 4 | `client` | how tasks are published and each reply is gathered once; jobs; fleet statistics; dead letters |
//! | 5 | `admin` | what operators can see and change in a running launcher: metrics, health, remote control |
//! | 5 | `cli` | the grammar of the command line |
//! | 6 | `commands` | one file or folder for each command; the registry of models |
//! | 7 | `app` | the program's entry point, and which exit code an error has |
//!
//! `worker` and `launcher` never import each other: they share only control lines.
//!
//! # Invariants
//!
//! - `confirm-before-ack`: reply published mandatory → confirmed and not returned → task acked.
//! - `one-reply-per-task`: one final reply from the worker that acks. A crash between confirm and
//!   ack makes a duplicate with the same `correlation_id`: the service is at-least-once.
//! - `no-loss-over-no-duplicate`: when in doubt, requeue.
//! - `nobody-stops-the-others`: a reply queue, a bad task or a refusal by the broker affects only its own tasks.
//!   Whatever one queue of a pool holds, the others get their shares. Requesters who share a queue share its order.
//! - `sentinel-after-work`: a sentinel never overtakes work accepted before it, and is acked last.
//! - `bounded-everything`: every channel, buffer, retry and wait has a bound.
//! - `device-or-fail`: a requested device that cannot be opened is an error.
//! - `batch-equals-single`: a task's result does not depend on its batch-mates.
//! - `nobody-waits-for-a-giant`: queues are served by their shares, and batches take inputs of all waiting tasks of a
//!   queue in turn, so that a task of ten thousand inputs does not hold up the others.

#[macro_use]
mod enum_names;

pub mod app;
mod backoff;
mod cli;
mod client;
mod commands;
mod engine;
mod fetch;
pub mod model;
mod python;
mod worker;

// Public only for the tests and benches in this repository; not part of the public interface.
#[doc(hidden)]
pub mod admin;
#[doc(hidden)]
pub mod batching;
#[doc(hidden)]
pub mod broker;
#[doc(hidden)]
pub mod config;
#[doc(hidden)]
pub mod launcher;
#[doc(hidden)]
pub mod protocol;
#[doc(hidden)]
pub mod shutdown;
#[doc(hidden)]
pub mod telemetry;
