//! Decides what serves a model that is loaded from files, by the architecture in its `config.json` (or GGUF
//! file) and the pool's `task`. Anything not in the table is refused, with a list of what is.

use std::fmt;
use std::fs::File;
use std::path::Path;

use candle_core::quantized::gguf_file;
use serde::Deserialize;

use super::LoadError;
use super::source::ModelFiles;

/// A kind of request that file-based models serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Vectors for texts.
    Embed,
}

impl Task {
    /// All tasks, with their names in settings.
    pub const ALL: [(Self, &str); 1] = [(Self::Embed, "embed")];

    /// The name in settings.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(task, _)| *task == self).map_or("", |(_, name)| *name)
    }

    /// The URLs of the task.
    fn urls(self) -> &'static str {
        match self {
            Self::Embed => "/v1/embeddings",
        }
    }
}

/// Architectures, as `model_type` names them, and the tasks of each; the first task is the default.
const SERVED: &[(&str, &[Task])] = &[
    ("bert", &[Task::Embed]),
    ("roberta", &[Task::Embed]),
    ("xlm-roberta", &[Task::Embed]),
    ("camembert", &[Task::Embed]),
    ("distilbert", &[Task::Embed]),
];

/// What serves a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// The architecture that the files name.
    pub architecture: String,
    /// The task that it is used for.
    pub task: Task,
}

impl fmt::Display for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {} ({})", self.architecture, self.task.name(), self.task.urls())
    }
}

#[derive(Deserialize)]
struct Config {
    model_type: Option<String>,
}

/// Finds what serves the model `source`, for `task` if the pool sets it.
///
/// # Errors
/// [`LoadError::Unsupported`] with the unknown architecture or task and those that are served;
/// [`LoadError::File`] or [`LoadError::Hub`] if the model's files cannot be read.
pub fn served(source: &str, task: Option<&str>) -> Result<Served, LoadError> {
    if source.ends_with(".gguf") {
        // Nothing here can read GGUF weights yet.
        return find(source, format!("{} in GGUF", gguf_architecture(Path::new(source))?), task);
    }
    of_files(&ModelFiles::locate(source)?, source, task)
}

/// The same without using the network. None: the files are not all on this host.
///
/// # Errors
/// As [`served`].
pub fn served_here(source: &str, task: Option<&str>) -> Result<Option<Served>, LoadError> {
    if source.ends_with(".gguf") {
        return served(source, task).map(Some);
    }
    ModelFiles::at_hand(source).map(|files| of_files(&files, source, task)).transpose()
}

fn of_files(files: &ModelFiles, source: &str, task: Option<&str>) -> Result<Served, LoadError> {
    let config: Config = files.required_json("config.json")?;
    find(source, config.model_type.unwrap_or_else(|| "(none)".to_owned()), task)
}

fn find(source: &str, architecture: String, task: Option<&str>) -> Result<Served, LoadError> {
    let refused = |reason: String| LoadError::Unsupported { model: source.to_owned(), reason };
    let Some((_, tasks)) = SERVED.iter().find(|(name, _)| *name == architecture) else {
        let known: Vec<&str> = SERVED.iter().map(|(name, _)| *name).collect();
        let known = known.join(", ");
        return Err(refused(format!("nothing serves the architecture {architecture:?}; served are {known}")));
    };
    let found = match task {
        None => tasks.first(),
        Some(asked) => tasks.iter().find(|task| task.name() == asked),
    };
    let task = *found.ok_or_else(|| {
        let known: Vec<&str> = tasks.iter().map(|task| task.name()).collect();
        let (asked, known) = (task.unwrap_or_default(), known.join(", "));
        refused(format!(
            "the architecture {architecture:?} is not served for the task {asked:?}, but for {known}"
        ))
    })?;
    Ok(Served { architecture, task })
}

/// The architecture that a GGUF file names.
fn gguf_architecture(path: &Path) -> Result<String, LoadError> {
    let fault = |reason: String| LoadError::File { path: path.into(), reason };
    let mut file = File::open(path).map_err(|error| fault(error.to_string()))?;
    let content = gguf_file::Content::read(&mut file).map_err(|error| fault(error.to_string()))?;
    let architecture = content.metadata.get("general.architecture");
    let architecture = architecture.and_then(|value| value.to_string().ok()).cloned();
    architecture.ok_or_else(|| fault("the file names no general.architecture".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(config: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        folder
    }

    fn of(config: &str, task: Option<&str>) -> Result<Served, String> {
        let folder = folder(config);
        served(folder.path().to_str().unwrap(), task).map_err(|error| error.to_string())
    }

    #[test]
    fn an_architecture_is_served_for_its_first_task_or_the_one_that_is_asked_for() {
        let bert = Served { architecture: "bert".into(), task: Task::Embed };
        assert_eq!(of(r#"{"model_type":"bert"}"#, None), Ok(bert.clone()));
        assert_eq!(of(r#"{"model_type":"bert"}"#, Some("embed")), Ok(bert.clone()));
        assert_eq!(bert.to_string(), "bert for embed (/v1/embeddings)");
    }

    #[test]
    fn what_nothing_serves_is_refused_with_what_is_served() {
        let error = of(r#"{"model_type":"t5"}"#, None).unwrap_err();
        assert!(error.contains("\"t5\"") && error.contains("xlm-roberta, camembert"), "{error}");
        let error = of("{}", None).unwrap_err();
        assert!(error.contains("\"(none)\""), "{error}");
        let error = of(r#"{"model_type":"bert"}"#, Some("generate")).unwrap_err();
        assert!(error.contains("\"generate\", but for embed"), "{error}");
    }

    #[test]
    fn a_gguf_file_names_its_architecture_itself() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let mut file = File::create(&path).unwrap();
        let architecture = gguf_file::Value::String("bert".into());
        gguf_file::write(&mut file, &[("general.architecture", &architecture)], &[]).unwrap();
        let error = served(path.to_str().unwrap(), None).unwrap_err().to_string();
        assert!(error.contains("\"bert in GGUF\""), "{error}");
        std::fs::write(&path, "GGUF").unwrap();
        let error = served(path.to_str().unwrap(), None).unwrap_err().to_string();
        assert!(error.contains("model.gguf"), "{error}");
    }

    #[test]
    fn of_a_model_that_is_not_here_nothing_is_said() {
        assert_eq!(served_here("nobody/no-such-model-of-sconce", None).unwrap(), None);
    }
}
