//! Reads names of queues and exchanges, and names by which requests call a model.

use ::config::Value;

use super::reader::Expected;
use super::values::{list, name, optional_name};

/// AMQP carries a name's length in one byte.
const LONGEST: usize = 255;
/// The longest suffix of a task queue's name: `.retry-2592000000ms`.
const LONGEST_SUFFIX: usize = 19;

/// A queue.
pub(crate) fn queue(value: &Value) -> Result<String, Expected> {
    at_most(value, LONGEST)
}

/// A queue, with room for the suffix of its retry queues.
pub(crate) fn task_queue(value: &Value) -> Result<String, Expected> {
    at_most(value, LONGEST - LONGEST_SUFFIX)
}

/// A queue, or `""` for none.
pub(crate) fn optional_queue(value: &Value) -> Result<Option<String>, Expected> {
    optional_name(value)?.map(|_| queue(value)).transpose()
}

fn at_most(value: &Value, longest: usize) -> Result<String, Expected> {
    let queue = name(value).map_err(|_| "the name of a queue".to_owned())?;
    if queue.len() > longest {
        return Err(format!("a queue name of at most {longest} bytes"));
    }
    if queue.starts_with("amq.") {
        return Err("a queue name that does not start with `amq.`, the broker's own".to_owned());
    }
    Ok(queue)
}

/// An exchange, or `""` for none.
pub(crate) fn exchange(value: &Value) -> Result<Option<String>, Expected> {
    let exchange = optional_name(value).map_err(|_| "the name of an exchange, or \"\"".to_owned())?;
    match &exchange {
        Some(name) if name.len() > LONGEST => Err(format!("a name of at most {LONGEST} bytes")),
        Some(name) if name.starts_with("amq.") => {
            Err("a name that does not start with `amq.`, the broker's own".to_owned())
        }
        _ => Ok(exchange),
    }
}

/// Names of a model.
pub(crate) fn served_names(value: &Value) -> Result<Vec<String>, Expected> {
    let names = list(value)?;
    match names.iter().any(String::is_empty) {
        true => Err("a list without empty names".to_owned()),
        false => Ok(names),
    }
}
