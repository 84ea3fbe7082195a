//! `[pool.options]`: settings whose names only the model knows.

use std::collections::BTreeMap;

use ::config::{Value, ValueKind};

use super::define::{Outline, Section};
use super::read::{Reader, typed};

/// The model's own settings, by name.
pub type Options = BTreeMap<String, serde_json::Value>;

impl Section for Options {
    fn outline() -> Outline {
        let about: &[&str] =
            &[" Settings of the model's own. Their names are the model's: its documentation has them."];
        Outline { about, keys: &[], nested: Vec::new() }
    }

    fn read(mut reader: Reader<'_>) -> Option<Self> {
        let of_json = |(name, value): (String, Value)| (name, plain(&typed(&value)));
        Some(reader.take_rest().into_iter().map(of_json).collect())
    }
}

fn plain(value: &Value) -> serde_json::Value {
    match &value.kind {
        ValueKind::Nil => serde_json::Value::Null,
        ValueKind::Boolean(switch) => (*switch).into(),
        ValueKind::I64(number) => (*number).into(),
        ValueKind::U64(number) => (*number).into(),
        ValueKind::Float(number) => (*number).into(),
        ValueKind::Array(items) => items.iter().map(plain).collect(),
        ValueKind::Table(table) => table.iter().map(|(name, value)| (name.clone(), plain(value))).collect(),
        other => other.to_string().into(),
    }
}
