//! One [`Problem`] for each mistake in the settings, and the [`ConfigError`] that shows them all to the
//! operator. Masks secrets. Never decides what is a mistake.

use std::fmt;

use super::redact::redact_url;
use super::text;

/// One mistake: its path, the written value, the expected one, and its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Dotted path of the setting (`pool[0].batch.max_delay`), or the file that could not be read.
    pub path: String,
    /// The written value as TOML, secrets masked; none if the value is not the mistake.
    pub value: Option<String>,
    /// What was expected instead, or what is wrong, such as "unknown key".
    pub expected: String,
    /// The origin of the value: a file, an environment variable, a flag, the built-in default.
    pub origin: Option<String>,
}

impl Problem {
    /// A problem whose value does not matter or must not be shown.
    pub(super) fn new(path: impl Into<String>, expected: impl Into<String>) -> Self {
        Self { path: path.into(), value: None, expected: expected.into(), origin: None }
    }

    /// Adds the written value, masked here so that no caller can forget it.
    pub(super) fn with_value(self, value: &::config::Value) -> Self {
        self.with_text(&text::as_toml(value))
    }

    /// Adds the value, given as TOML text. Masks it as [`Problem::with_value`] does.
    pub(super) fn with_text(mut self, value: &str) -> Self {
        self.value = Some(shorten(&redact_url(value)));
        self
    }

    /// Adds the origin.
    pub(super) fn with_origin(mut self, origin: impl Into<String>) -> Self {
        self.origin = Some(origin.into());
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&text::without_controls(&self.path))?;
        if let Some(value) = &self.value {
            write!(f, " = {}", text::without_controls(value))?;
        }
        write!(f, ": {}", text::without_controls(&self.expected))?;
        match &self.origin {
            Some(origin) => write!(f, " ({})", text::without_controls(origin)),
            None => Ok(()),
        }
    }
}

/// Every mistake in the settings. The operator must act; nothing was started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ConfigError {
    problems: Vec<Problem>,
}

impl ConfigError {
    /// An error with at least one problem.
    pub(super) fn new(problems: Vec<Problem>) -> Self {
        debug_assert!(!problems.is_empty(), "an error without a problem");
        Self { problems }
    }

    /// An error if there is a problem.
    pub(super) fn unless_empty(problems: Vec<Problem>) -> Result<(), Self> {
        if problems.is_empty() { Ok(()) } else { Err(Self { problems }) }
    }

    /// The problems, in the order of the settings.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.problems.len() {
            1 => f.write_str("1 problem in the settings:")?,
            count => write!(f, "{count} problems in the settings:")?,
        }
        for problem in &self.problems {
            write!(f, "\n  {problem}")?;
        }
        Ok(())
    }
}

fn shorten(text: &str) -> String {
    const MAX_CHARACTERS: usize = 160;
    match text.char_indices().nth(MAX_CHARACTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// The message for a key that is not known in its section.
pub(super) fn unknown_key<'a>(key: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    match nearest(key, known) {
        Some(name) => format!("unknown key; did you mean `{name}`?"),
        None => "unknown key".to_owned(),
    }
}

/// Finds the closest known name, if the written one is likely a typo. At most a third of the known name's letters may
/// be wrong, or one letter of a name with fewer than three.
pub(super) fn nearest<'a>(written: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let written = written.to_ascii_lowercase().replace(['-', ' '], "_");
    let distances = known.into_iter().map(|name| (strsim::osa_distance(&written, name), name));
    let close = distances.filter(|(distance, name)| *distance <= (name.len() / 3).max(1));
    close.min().map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_lists_one_problem_per_line() {
        let error = ConfigError::new(vec![
            Problem::new("broker.heartbeat", "expected a duration")
                .with_value(&::config::Value::from(5_i64))
                .with_origin("file a.toml"),
            Problem::new("pool[0].nam", "unknown key"),
        ]);
        assert_eq!(
            error.to_string(),
            "2 problems in the settings:\n  \
             broker.heartbeat = 5: expected a duration (file a.toml)\n  \
             pool[0].nam: unknown key"
        );
    }

    #[test]
    fn a_password_in_a_value_is_masked() {
        let value = ::config::Value::from("amqp://me:hunter2@host");
        let problem = Problem::new("broker.url", "expected better").with_value(&value);
        assert_eq!(problem.to_string(), r#"broker.url = "amqp://me:***@host": expected better"#);
    }

    #[test]
    fn a_line_break_in_a_value_does_not_break_the_list() {
        let value = ::config::Value::from("a\nb");
        let problem = Problem::new("pool[0].name\n", "x").with_value(&value);
        assert_eq!(problem.to_string().lines().count(), 1);
    }

    #[test]
    fn a_long_value_is_cut() {
        let value = ::config::Value::from("é".repeat(1000));
        let problem = Problem::new("pool[0].name", "x").with_value(&value);
        assert!(problem.to_string().chars().count() < 200);
    }

    const KNOWN: [&str; 4] = ["name", "task_queue", "reply_queue", "url"];

    #[test]
    fn a_typo_finds_the_name_that_was_meant() {
        assert_eq!(nearest("nmae", KNOWN), Some("name"));
        assert_eq!(nearest("taskqueue", KNOWN), Some("task_queue"));
        assert_eq!(nearest("Task-Queue", KNOWN), Some("task_queue"));
        assert_eq!(nearest("urls", KNOWN), Some("url"));
    }

    #[test]
    fn an_unrelated_name_finds_nothing() {
        assert_eq!(nearest("gpu", KNOWN), None);
        assert_eq!(nearest("concurrency", KNOWN), None);
        assert_eq!(nearest("", KNOWN), None);
    }
}
