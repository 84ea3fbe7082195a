//! The names by which requests may call a model.

use crate::model::LoadSpec;
use crate::protocol::{TaskError, TaskErrorKind, shorten};

/// One model's names.
#[derive(Clone, Debug)]
pub struct ServedNames {
    reply_name: String,
    aliases: Vec<String>,
}

impl ServedNames {
    /// The names of the model in `spec`: its source, with and without revision, and its `served_names`.
    pub fn new(spec: &LoadSpec) -> Self {
        let source = spec.source.trim_end_matches('/');
        let mut aliases = vec![source.to_owned()];
        aliases.extend(source.split_once('@').filter(|_| !spec.is_folder()).map(|(id, _)| id.to_owned()));
        aliases.extend(spec.served_names.iter().cloned());
        Self { reply_name: spec.model_name().to_owned(), aliases }
    }

    /// The name in replies, which is [`LoadSpec::model_name`].
    pub fn reply_name(&self) -> &str {
        &self.reply_name
    }

    /// Accepts a request that names this model, or none. Last components are compared too, so that the folder
    /// `models/all-MiniLM-L6-v2` answers to `sentence-transformers/all-MiniLM-L6-v2`.
    ///
    /// # Errors
    /// `UnknownModel`, with the requested name and the one that is served.
    pub fn check(&self, requested: Option<&str>) -> Result<(), TaskError> {
        let Some(requested) = requested else { return Ok(()) };
        let matches = |name: &String| name == requested || last_component(name) == last_component(requested);
        if requested == self.reply_name || self.aliases.iter().any(matches) {
            return Ok(());
        }
        let served = &self.reply_name;
        let message = format!("this pool serves the model {served:?}, not {:?}", shorten(requested, 200));
        Err(TaskError::new(TaskErrorKind::UnknownModel, message).with_param("model"))
    }
}

fn last_component(name: &str) -> &str {
    name.trim_end_matches('/').rsplit('/').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(source: &str, served: &[&str]) -> ServedNames {
        let served_names = served.iter().map(|name| (*name).into()).collect();
        ServedNames::new(&LoadSpec { served_names, ..LoadSpec::new(source) })
    }

    #[test]
    fn an_id_answers_to_itself_with_and_without_revision() {
        let names = names("org/name@v2", &["text-embedding-3-small"]);
        for requested in ["org/name@v2", "org/name", "name", "text-embedding-3-small"] {
            assert!(names.check(Some(requested)).is_ok(), "{requested}");
        }
        assert_eq!(names.reply_name(), "org/name@v2");
        let error = names.check(Some("gpt-5")).unwrap_err();
        assert_eq!(error.kind, TaskErrorKind::UnknownModel);
        assert!(error.message.contains("gpt-5") && error.message.contains("org/name@v2"));
    }

    #[test]
    fn a_folder_answers_to_an_id_with_the_same_last_component() {
        let names = names("./models/all-MiniLM-L6-v2/", &[]);
        assert_eq!(names.reply_name(), "all-MiniLM-L6-v2");
        assert!(names.check(Some("sentence-transformers/all-MiniLM-L6-v2")).is_ok());
        assert!(names.check(Some("./models/all-MiniLM-L6-v2")).is_ok());
        assert!(names.check(Some("")).is_err());
    }
}
