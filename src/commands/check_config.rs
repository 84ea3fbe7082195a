//! `sconce check-config`.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::{Context as _, anyhow};

use super::{Registry, start_logging, tolerate_broken_pipe};
use crate::cli::{CheckConfig, SettingsArguments};
use crate::commands::exits::ExitsWith as _;
use crate::config::{Pool, Tls};
use crate::launcher::{Host, plan};
use crate::python;
use crate::shutdown::Exit;
use crate::telemetry::QUIET;
use crate::worker::pool_spec;

/// Imports a pool's class in Python, in a process without a GPU, and prints what it is.
/// Returns what is wrong with it, if it cannot be imported.
fn describe_python(pool: &Pool) -> anyhow::Result<Option<String>> {
    let described = match python::describe(pool, &pool_spec(pool, "cpu")) {
        Ok(described) => described,
        Err(error) => return Ok(Some(format!("pool {:?}: {error}", pool.name))),
    };
    let (name, model, executable) = (&pool.name, &pool.model, &pool.python.executable);
    let head = format!("# pool {name:?} will load {model:?}: {described}");
    let how =
        format!("#   its module was imported now by {executable:?}, without a GPU; the model was not loaded");
    for line in [head, how].into_iter().chain(described.options().map(|option| format!("#   {option}"))) {
        tolerate_broken_pipe(writeln!(std::io::stdout(), "{line}"))?;
    }
    Ok(None)
}

/// Prints the effective settings, and the code that serves each pool's model. Checks what can be checked without
/// starting a worker or connecting to the broker: TLS files, the devices of this host, the models' options and the
/// headers of their files.
pub(super) fn run(arguments: &CheckConfig, registry: &Registry) -> anyhow::Result<Exit> {
    // Also checks SCONCE_LOG.
    start_logging(Some(QUIET))?;
    let mut config = arguments.settings.config.clone();
    config.extend(arguments.file.clone());
    let loaded = registry.load(&SettingsArguments { config, set: arguments.settings.set.clone() }, &[])?;
    // The checks go on if the reader has closed its end, as in `… | head`.
    tolerate_broken_pipe(writeln!(std::io::stdout(), "{}", loaded.effective))?;
    let Tls { ca_file, cert_file, key_file } = &loaded.settings.broker.tls;
    for file in [ca_file, cert_file, key_file].into_iter().flatten() {
        File::open(file)
            .with_context(|| format!("broker.tls: {}", file.display()))
            .exits_with(Exit::Config)?;
    }
    let slots = plan(&loaded.settings, &Host::here())?;
    // Those of all classes in Python. Another model that cannot be served ends the command at once.
    let mut problems = Vec::new();
    for pool in &loaded.settings.pools {
        if pool.python_class().is_some() {
            problems.extend(describe_python(pool)?);
            continue;
        }
        let description = registry
            .check(pool, &slots)
            .with_context(|| format!("pool {:?}", pool.name))
            .exits_with(Exit::ModelFailed)?;
        // The built-in default is looked for in `models` too, under another name.
        let is_as_written = |folder: &&Path| pool.model.contains('/') && folder.ends_with(&pool.model);
        let mistyped = pool.missing_folder.as_deref().filter(|_| description.is_none()).filter(is_as_written);
        if let Some((folder, parent)) = mistyped.and_then(|folder| Some((folder, folder.parent()?)))
            && parent.is_dir()
        {
            let (name, folder, parent) = (&pool.name, folder.display(), parent.display());
            return Err(anyhow!(
                "pool {name:?}: there is no folder {folder}, although there is {parent}, and the hub's cache on this host has \
                 no model {:?}",
                pool.model
            )
            .exits_with(Exit::ModelFailed));
        }
        let description = description.unwrap_or_else(|| match &pool.missing_folder {
            Some(folder) => {
                format!(
                    "there is no folder {}, and the model is not in the hub's cache on this host",
                    folder.display()
                )
            }
            None => "its files are not on this host".to_owned(),
        });
        let line = format!("# pool {:?} will load {:?}: {description}", pool.name, pool.model);
        tolerate_broken_pipe(writeln!(std::io::stdout(), "{line}"))?;
        for note in registry.notes(pool, &slots) {
            tolerate_broken_pipe(writeln!(std::io::stdout(), "#   {note}"))?;
        }
        for assumed in registry.assumptions(pool).unwrap_or_default() {
            tolerate_broken_pipe(writeln!(std::io::stdout(), "#   assumed: {assumed}"))?;
        }
    }
    match problems.is_empty() {
        true => Ok(Exit::Done),
        false => Err(anyhow!(problems.join("\n")).exits_with(Exit::ModelFailed)),
    }
}
