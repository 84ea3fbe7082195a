//! One suite over every broker: what `sconce::broker` promises, each promise a case in `cases`,
//! each broker a `Rig`. RabbitMQ's rig is in the crate `rabbitmq`, which has a node.

mod cases;
mod embedded;
mod rig;
#[path = "../support/wait.rs"]
#[allow(dead_code, reason = "each test crate uses a part of it")]
mod wait;

conformance!(embedded_queue, crate::embedded::EmbeddedRig);
