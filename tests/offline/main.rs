//! What needs no RabbitMQ, no network and no weights, in one test crate: the program from outside, the launcher over
//! workers that are scripts, the embedded queue, settings, the GPU's kernels on an emulated one, `deploy/`.

mod bench_device;
mod check_config;
mod deploy;
mod devices;
mod embedded_broker;
mod kernels;
mod launcher;
mod python_models;
mod run_batch;
mod settings;
mod silent;
mod start;
mod without_broker;

// One suite over every broker: what `sconce::broker` promises, each promise a case in `cases`, each broker a `Rig`.
// RabbitMQ's rig is in the crate `rabbitmq`, which has a node.
#[path = "../broker_conformance/cases.rs"]
mod cases;
#[path = "../broker_conformance/embedded.rs"]
mod embedded_rig;
#[path = "../broker_conformance/rig.rs"]
mod rig;

mod support;
use support::wait;

conformance!(embedded_queue, crate::embedded_rig::EmbeddedRig);
