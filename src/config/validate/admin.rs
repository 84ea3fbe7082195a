//! The rules of `[admin]`.

use std::net::SocketAddr;

use ::config::Value;

use super::super::settings::Admin;
use super::section::{Expected, Section};
use super::values::{optional_name, text};

/// AMQP's, for a name.
const LONGEST_NAME: usize = 255;

/// Reads `[admin]`.
pub(super) fn admin(mut section: Section<'_>) -> Option<Admin> {
    let listen = section.read("listen", listen);
    let control_exchange = section.read("control_exchange", exchange);
    section.finish();
    Some(Admin { listen: listen?, control_exchange: control_exchange? })
}

fn listen(value: &Value) -> Result<Option<SocketAddr>, Expected> {
    let expected =
        || "an address and a port, such as \"127.0.0.1:9464\" or \"[::]:9464\", or \"\"".to_owned();
    match text(value).map_err(|_| expected())?.trim() {
        "" => Ok(None),
        address => address.parse().map(Some).map_err(|_| expected()),
    }
}

fn exchange(value: &Value) -> Result<Option<String>, Expected> {
    let exchange = optional_name(value).map_err(|_| "the name of an exchange, or \"\"".to_owned())?;
    match &exchange {
        Some(name) if name.len() > LONGEST_NAME => Err(format!("a name of at most {LONGEST_NAME} bytes")),
        Some(name) if name.starts_with("amq.") => {
            Err("a name that does not start with `amq.`, the broker's own".to_owned())
        }
        _ => Ok(exchange),
    }
}
