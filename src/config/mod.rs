//! Settings: merges layers of text into one validated [`Settings`]. Collects every problem before it fails. The
//! environment is passed in; secrets are masked wherever settings are shown. Knows neither broker nor model nor
//! command line.
//!
//! | file | decides |
//! |---|---|
//! | `settings` | every setting: key, type, default, range, help; what must go together |
//! | `options` | how models declare their `[pool.options]`, and the check of the values given for them |
//! | `define` | how a setting is defined, and the text of `config/default.toml` |
//! | `read/` | merged tree → values or problems |
//! | `assignment` | what one worker is to run |
//! | `layers` | which layer wins |
//! | `files` | the built-in defaults and files → layers |
//! | `overrides` | environment variables and flags → layers |
//! | `text` | values as TOML, durations, sizes |
//! | `model_folder` | which folder a pool's `model` may name |
//! | `python` | which class in Python a pool's `model` names |
//! | `public_address` | which addresses belong to public hosts |
//! | `problem` | how a mistake is shown; "did you mean" |
//! | `effective` | the text that `sconce check-config` prints; what differs between two loads |
//! | `redact` | which parts of a broker address may be shown |

pub mod assignment;
mod define;
mod effective;
mod files;
mod layers;
mod model_folder;
mod options;
mod overrides;
mod problem;
mod public_address;
mod python;
mod read;
mod redact;
pub mod settings;
mod text;

use std::collections::BTreeMap;
use std::path::PathBuf;

pub use assignment::Assignment;
pub use options::{OptionDefault, OptionProblem, OptionSpec, Options, Takes, check_options, with_defaults};
pub use overrides::NOT_SETTINGS;
pub use problem::{ConfigError, Problem};
pub use public_address::is_public;
pub use python::{Environment, PythonClass, PythonPlace, class_name as python_class_name};
pub use read::{AllowedSource, Devices, Secret, TaskQueue};
pub use redact::redact_url;
pub use settings::{
    Admin, Batch, Broker, CpuFeatures, Drain, Dtype, Fetch, Launcher, Pool, Python, Replace, Retry, S3,
    Settings, Telemetry, Tls,
};

/// Validated settings, and their origins.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadedSettings {
    /// The validated settings.
    pub settings: Settings,
    /// The settings as TOML, each with a comment that gives its origin; secrets masked.
    pub effective: String,
    /// The value of each setting, for the comparison with a later load.
    values: effective::Effective,
    /// The origin of each setting, by its path.
    origins: BTreeMap<String, String>,
}

impl LoadedSettings {
    /// The settings in which `later` differs, each with its new value; secrets masked.
    pub fn changes(&self, later: &Self) -> Vec<String> {
        self.values.changes(&later.values)
    }

    /// The folder that the `model` of a pool may name. Does not check that it exists. None if there is no such pool.
    pub fn model_folder(&self, pool: usize) -> Option<PathBuf> {
        let origin = origin_in(&self.origins, &format!("pool[{pool}].model"));
        Some(model_folder::of(&self.settings.pools.get(pool)?.model, origin))
    }

    /// Makes the paths of pools whose model is a class in Python absolute. An executable without a `/` is looked for in
    /// the `PATH`.
    fn resolve_python(&mut self) {
        for (index, pool) in self.settings.pools.iter_mut().enumerate() {
            let resolve = |key: &str, path: &str| {
                let origin = origin_in(&self.origins, &format!("pool[{index}].{key}"));
                model_folder::of(path, origin).display().to_string()
            };
            let Some(model) = python::resolved(&pool.model, |file| resolve("model", file)) else { continue };
            pool.model = model;
            for folder in &mut pool.python.path {
                *folder = resolve("python.path", folder);
            }
            if pool.python.executable.contains('/') {
                pool.python.executable = resolve("python.executable", &pool.python.executable);
            }
        }
    }

    /// Refuses pools whose model is a class in Python.
    ///
    /// # Errors
    /// There is such a pool.
    pub fn refuse_python(&self, expected: &str) -> Result<(), ConfigError> {
        let pools = self.settings.pools.iter().enumerate().filter(|(_, pool)| pool.python_class().is_some());
        let problem = |(index, pool): (usize, &Pool)| {
            let path = format!("pool[{index}].model");
            let origin = origin_in(&self.origins, &path);
            Problem::new(path, expected).with_origin(origin).with_text(&pool.model)
        };
        ConfigError::unless_empty(pools.map(problem).collect())
    }

    /// Turns the problems that the caller has found in `[pool.options]` into one error, and adds the origins of the
    /// options. Each problem comes with the index of its pool. The caller finds the problems, since this module does
    /// not know which options a model takes.
    ///
    /// # Errors
    /// `problems` is not empty. The operator must act.
    pub fn check_option_problems(
        &self,
        problems: impl IntoIterator<Item = (usize, OptionProblem)>,
    ) -> Result<(), ConfigError> {
        let with_path = |(pool, OptionProblem { option, value, problem }): (usize, OptionProblem)| {
            let path = format!("pool[{pool}].options.{option}");
            let origin = origin_in(&self.origins, &path);
            let problem = Problem::new(path, problem).with_origin(origin);
            if let Some(value) = value { problem.with_text(&value.to_string()) } else { problem }
        };
        ConfigError::unless_empty(problems.into_iter().map(with_path).collect())
    }
}

/// The origin of the setting at this path.
fn origin_in<'a>(origins: &'a BTreeMap<String, String>, path: &str) -> &'a str {
    origins.get(path).map_or(read::BUILT_IN, String::as_str)
}

/// Loads the settings. Later layers win: built-in defaults < `files` in their order < `AMQP_URL` <
/// `SCONCE_…` variables of `environment` < `flags`, which are pairs of a dotted path and a value.
///
/// # Errors
/// All problems of the settings together: the operator must act, and nothing can be started. If a file cannot be read
/// or parsed, only the problems of files are reported.
pub fn load(
    files: &[PathBuf],
    environment: impl IntoIterator<Item = (String, String)>,
    flags: &[(String, String)],
) -> Result<LoadedSettings, ConfigError> {
    let (merged, unknown_keys) =
        layers::merge(&default_file(), files, environment, flags).map_err(ConfigError::new)?;
    let mut report = read::Report::default();
    let settings = Settings::read(merged.clone(), &mut report);
    report.problems.extend(unknown_keys);
    match settings {
        Some(settings) if report.problems.is_empty() => {
            let values = effective::Effective::of(&merged, &settings::outline());
            let (effective, origins) = (values.render(), report.origins);
            let mut loaded = LoadedSettings { settings, effective, values, origins };
            loaded.resolve_python();
            Ok(loaded)
        }
        _ => Err(ConfigError::new(report.problems)),
    }
}

/// The text of `config/default.toml`.
fn default_file() -> String {
    define::default_file(&settings::outline())
}
