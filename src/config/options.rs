//! `[pool.options]`: settings whose names only the model knows.

use std::collections::BTreeMap;

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
        let of_json = |(name, value)| (name, typed(&value).try_deserialize().unwrap_or_default());
        Some(reader.take_rest().into_iter().map(of_json).collect())
    }
}
