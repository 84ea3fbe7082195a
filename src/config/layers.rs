//! Merges the layers: built-in defaults < files < `AMQP_URL` < `SCONCE_…` variables < flags. A pool's missing
//! keys come from the built-in pool. Never checks a value.

use std::path::PathBuf;

use ::config::{Config, ConfigError as SourceError, Value, ValueKind};

use super::files::{self, Layer};
use super::overrides;
use super::problem::Problem;

/// Merges all layers into one tree, in which every setting is present with its origin. Also returns the
/// problems of variables and flags that name no setting.
///
/// # Errors
/// The problem of each unusable file. Nothing else is checked in this case: without the file's settings, further
/// problems would mislead.
pub(super) fn merge(
    defaults: &str,
    files: &[PathBuf],
    environment: impl IntoIterator<Item = (String, String)>,
    flags: &[(String, String)],
) -> Result<(Value, Vec<Problem>), Vec<Problem>> {
    let defaults = files::defaults(defaults).map_err(|problem| vec![problem])?;
    let file_layers = files::read(files)?;

    let mut built_in = overlay([defaults.clone()])?;
    let mut tree = overlay(std::iter::once(defaults).chain(file_layers))?;
    let Some([template]) = pools(&mut built_in).map(|pools| pools.as_slice()) else {
        return Err(vec![Problem::new("settings", "expected one built-in pool")]);
    };
    for pool in pools(&mut tree).into_iter().flatten() {
        fill_missing(pool, template);
    }

    let mut problems = Vec::new();
    let [amqp_url, variables] = overrides::from_environment(environment, &tree, &mut problems);
    let flags = overrides::from_flags(flags, &tree, &mut problems);
    let ValueKind::Table(table) = tree.kind else {
        return Err(vec![Problem::new("settings", "expected a table")]);
    };
    let merged = overlay([Layer::new(table), amqp_url, variables, flags])?;
    Ok((merged, problems))
}

/// Merges the layers; later ones win.
fn overlay(layers: impl IntoIterator<Item = Layer>) -> Result<Value, Vec<Problem>> {
    let mut builder = Config::builder();
    for layer in layers {
        builder = builder.add_source(layer);
    }
    let failed = |error: SourceError| vec![Problem::new("settings", error.to_string())];
    Ok(builder.build().map_err(failed)?.cache)
}

fn pools(tree: &mut Value) -> Option<&mut Vec<Value>> {
    let ValueKind::Table(root) = &mut tree.kind else { return None };
    match root.get_mut("pool").map(|pools| &mut pools.kind) {
        Some(ValueKind::Array(pools)) => Some(pools),
        _ => None,
    }
}

/// Adds the keys of `template` that `value` lacks, also in nested tables.
fn fill_missing(value: &mut Value, template: &Value) {
    let (ValueKind::Table(table), ValueKind::Table(template_keys)) = (&mut value.kind, &template.kind) else {
        return;
    };
    for (key, template) in template_keys {
        match table.get_mut(key) {
            Some(present) => fill_missing(present, template),
            None => drop(table.insert(key.clone(), template.clone())),
        }
    }
}
