//! Decides what serves a model that is loaded from files, by the architecture and head in its `config.json` (or
//! GGUF file) and the pool's `task`. Anything not in the table is refused, with a list of what is.

use std::fmt;

use serde::Deserialize;
use serde_json::Value;

use super::LoadError;
use super::load::ModelFiles;
use super::load::gguf::Gguf;
use super::nets::decoder::config::Family as Decoder;
use super::nets::image::ARCHITECTURES;
use super::nets::text::config::Family;

/// A kind of request that file-based models serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Vectors for texts.
    Embed,
    /// A score for each pair of texts.
    Rerank,
    /// Labels for texts.
    Classify,
    /// Labels for images.
    ClassifyImages,
    /// Texts that continue others.
    Generate,
}

impl Task {
    /// The name in settings.
    fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::Rerank => "rerank",
            Self::Classify | Self::ClassifyImages => "classify",
            Self::Generate => "generate",
        }
    }

    /// The URLs that it answers.
    pub fn urls(self) -> &'static [&'static str] {
        match self {
            Self::Embed => &["/v1/embeddings"],
            Self::Rerank => &["/v1/rerank", "/v1/score"],
            Self::Classify | Self::ClassifyImages => &["/classify"],
            Self::Generate => &["/v1/completions", "/v1/chat/completions"],
        }
    }
}

/// What ends the name of a class with a classification head, in `architectures`.
const WITH_HEAD: &str = "ForSequenceClassification";

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
        write!(f, "{} for {} ({})", self.architecture, self.task.name(), self.task.urls().join(", "))
    }
}

/// What of `config.json` decides. The fields besides `model_type` may mean something else in an architecture that is not
/// served: they are read only where they are of the usual type.
#[derive(Default, Deserialize)]
struct Config {
    model_type: Option<String>,
    #[serde(default)]
    architectures: Value,
    #[serde(default)]
    id2label: Value,
    #[serde(default)]
    num_labels: Value,
}

impl Config {
    /// The tasks of the model; the first is the default.
    fn tasks(&self) -> &'static [Task] {
        let is = |known: fn(&str) -> bool| self.model_type.as_ref().is_some_and(|kind| known(kind));
        if is(|kind| ARCHITECTURES.contains(&kind)) {
            return &[Task::ClassifyImages];
        }
        if is(|kind| Decoder::named(kind).is_some()) {
            return &[Task::Generate];
        }
        let mut classes = self.architectures.as_array().into_iter().flatten().filter_map(Value::as_str);
        if !classes.any(|class| class.ends_with(WITH_HEAD)) {
            return &[Task::Embed];
        }
        // The transformers library takes two labels for granted, and leaves them out.
        let labels = self.id2label.as_object().map(|labels| labels.len() as u64);
        match labels.or(self.num_labels.as_u64()).unwrap_or(2) {
            1 => &[Task::Rerank, Task::Classify, Task::Embed],
            _ => &[Task::Classify, Task::Embed],
        }
    }
}

/// Finds what serves the model `source`, for `task` if the pool sets it.
///
/// # Errors
/// [`LoadError::Unsupported`] with the unknown architecture or task and those that are served;
/// [`LoadError::File`] or [`LoadError::Hub`] if the model's files cannot be read.
pub fn served(source: &str, task: Option<&str>) -> Result<Served, LoadError> {
    of_files(&ModelFiles::locate(source)?, source, task)
}

/// The same without using the network. None: the files are not all on this host.
///
/// # Errors
/// As [`served`].
pub fn served_here(source: &str, task: Option<&str>) -> Result<Option<Served>, LoadError> {
    ModelFiles::at_hand(source).map(|files| of_files(&files, source, task)).transpose()
}

fn of_files(files: &ModelFiles, source: &str, task: Option<&str>) -> Result<Served, LoadError> {
    let Some(path) = files.gguf() else { return find(source, files.required_json("config.json")?, task) };
    let architecture = Gguf::architecture(&path)?;
    let is_read = Decoder::named(&architecture).is_some();
    let name = if is_read { architecture } else { format!("{architecture} in GGUF") };
    find(source, Config { model_type: Some(name), ..Config::default() }, task)
}

fn find(source: &str, config: Config, asked: Option<&str>) -> Result<Served, LoadError> {
    let refused = |reason: String| LoadError::Unsupported { model: source.to_owned(), reason };
    let tasks = config.tasks();
    let architecture = config.model_type.unwrap_or_else(|| "(none)".to_owned());
    let decoders = Decoder::ALL.map(|(name, _)| name);
    let mut known = Family::ALL.iter().map(|(name, _)| *name).chain(ARCHITECTURES).chain(decoders);
    if !known.clone().any(|name| name == architecture) {
        let known = known.by_ref().collect::<Vec<_>>().join(", ");
        return Err(refused(format!("nothing serves the architecture {architecture:?}; served are {known}")));
    }
    let task = tasks.iter().find(|task| asked.is_none_or(|asked| task.name() == asked)).ok_or_else(|| {
        let known: Vec<&str> = tasks.iter().map(|task| task.name()).collect();
        let (asked, known) = (asked.unwrap_or_default(), known.join(", "));
        refused(format!(
            "{architecture:?} with these weights is not served for the task {asked:?}, but for {known}"
        ))
    })?;
    Ok(Served { architecture, task: *task })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use candle_core::quantized::gguf_file;

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
    fn a_head_with_one_label_scores_pairs_and_one_with_more_classifies() {
        let task = |config: &str, task| of(config, task).map(|served| served.task);
        let one =
            r#"{"model_type":"bert","architectures":["BertForSequenceClassification"],"id2label":{"0":"x"}}"#;
        assert_eq!(task(one, None), Ok(Task::Rerank));
        assert_eq!(task(one, Some("classify")), Ok(Task::Classify));
        let two = r#"{"model_type":"roberta","architectures":["RobertaForSequenceClassification"]}"#;
        assert_eq!(task(two, None), Ok(Task::Classify));
        assert_eq!(task(two, Some("embed")), Ok(Task::Embed));
        assert!(task(two, Some("rerank")).unwrap_err().contains("\"rerank\", but for classify, embed"));
    }

    #[test]
    fn what_nothing_serves_is_refused_with_what_is_served() {
        let error = of(r#"{"model_type":"t5"}"#, None).unwrap_err();
        assert!(error.contains("\"t5\"") && error.contains("xlm-roberta, camembert"), "{error}");
        let error = of(r#"{"model_type":"t5","architectures":null,"id2label":[],"num_labels":"x"}"#, None)
            .unwrap_err();
        assert!(error.contains("\"t5\""), "its type comes before the fields that it implies: {error}");
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
