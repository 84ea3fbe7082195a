//! Everything that needs a real RabbitMQ, in one test crate, so that one node serves it all.

#[path = "../broker_conformance/cases.rs"]
mod cases;
#[path = "../broker_conformance/rig.rs"]
mod conformance_rig;
#[path = "../support/mod.rs"]
mod support;

#[path = "rig.rs"]
mod amqp_rig;
use conformance_rig as rig;
use support::wait;

mod access;
mod admin;
mod alarm;
mod bench;
mod cluster;
mod dead_command;
mod dead_letters;
mod devices;
mod embeddings;
mod files;
mod generate;
mod hostile;
mod logs;
mod loss;
mod media_types;
mod messages;
mod outage;
mod own_models;
mod plumbing;
mod pressure;
mod processes;
mod publish;
mod queues;
mod raw_strings;
mod replies;
mod retries;
mod scores;
mod sentinels;
mod sequences;
mod settling;
mod several_queues;
mod shutdown;
mod start_page;
mod strict;
mod submit;
mod threads;
mod tls;
mod tracing;
mod unhappy;

conformance!(declared_queues, crate::amqp_rig::DeclaredRig);
conformance!(classic_queues, crate::amqp_rig::ClassicRig);
// In the embedded queue nothing expires.
conformance!(expiry_in_declared_queues, crate::amqp_rig::DeclaredRig: an_expired_message_is_never_delivered,);
conformance!(expiry_in_classic_queues, crate::amqp_rig::ClassicRig: an_expired_message_is_never_delivered,);
