//! A cursor over one section of the merged settings. Each key is read once. Unreadable values and keys that were never
//! read become problems in the [`Report`].

use std::collections::BTreeMap;

use ::config::{Map, Value, ValueKind};

use super::super::files::BUILT_IN;
use super::super::problem::{Problem, unknown_key};

/// What was expected in the place of an invalid value; completes a sentence that begins with "expected".
pub(crate) type Expected = String;

/// The result of validation: the problems, and the origin of each setting.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Every problem, in the order of the settings.
    pub(crate) problems: Vec<Problem>,
    /// Dotted path → origin of the effective value.
    pub(crate) origins: BTreeMap<String, String>,
}

/// One section that is being read.
pub(crate) struct Reader<'r> {
    path: String,
    /// The keys that were not read yet, with their values.
    unread: Map<String, Value>,
    /// The keys that were read.
    known: Vec<&'static str>,
    /// Gets the problems and the origins.
    report: &'r mut Report,
}

impl<'r> Reader<'r> {
    /// Opens the section at `path` (empty: the root). A value that is not a table is a problem.
    pub(crate) fn open(path: String, value: Value, report: &'r mut Report) -> Option<Self> {
        let problem = Problem::new(path.as_str(), "expected a section with keys")
            .with_value(&value)
            .with_origin(origin(&value));
        let ValueKind::Table(unread) = value.kind else {
            report.problems.push(problem);
            return None;
        };
        let known = Vec::new();
        Some(Self { path, unread, known, report })
    }

    /// Reads a key's value with `read`. None if it is missing or invalid, which is reported.
    pub(crate) fn read<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&Value) -> Result<T, Expected>,
    ) -> Option<T> {
        let value = self.take(key)?;
        let path = self.path_of(key);
        let origin = origin(&value);
        let result = read(&value);
        self.report.origins.insert(path.clone(), origin);
        match result {
            Ok(value) => Some(value),
            Err(expected) => {
                self.report.refuse(path, value, expected);
                None
            }
        }
    }

    /// Opens a section within this one.
    pub(crate) fn section(&mut self, key: &'static str) -> Option<Reader<'_>> {
        let value = self.take(key)?;
        Reader::open(self.path_of(key), value, self.report)
    }

    /// Removes a key and returns its raw value. None if it is missing, which is reported.
    pub(crate) fn take(&mut self, key: &'static str) -> Option<Value> {
        self.known.push(key);
        let value = self.unread.remove(key);
        if value.is_none() {
            let problem = Problem::new(self.path_of(key), "missing");
            self.report.problems.push(problem);
        }
        value
    }

    /// Adds a problem of a key whose value is valid by itself, but not together with others.
    pub(crate) fn refuse(&mut self, key: &str, value: impl Into<Value>, expected: Expected) {
        let path = self.path_of(key);
        self.report.refuse(path, value, expected);
    }

    /// The origin of a key that was read before.
    pub(crate) fn origin_of(&self, key: &str) -> String {
        self.report.origin_of(&self.path_of(key))
    }

    /// The dotted path of a key of this section.
    pub(crate) fn path_of(&self, key: &str) -> String {
        match self.path.as_str() {
            "" => key.to_owned(),
            path => format!("{path}.{key}"),
        }
    }

    /// The report, for a caller that opens the sections of a list itself, such as `[[pool]]`.
    pub(crate) fn report(&mut self) -> &mut Report {
        self.report
    }

    /// Returns the raw values of all keys that were not read yet.
    pub(crate) fn read_rest(&mut self) -> Map<String, Value> {
        let unread = std::mem::take(&mut self.unread);
        for (key, value) in &unread {
            let path = self.path_of(key);
            self.report.origins.insert(path, origin(value));
        }
        unread
    }

    /// Ends the section. Reports each key that was not read as unknown, without its value, because that may be a
    /// secret: the key may be a typo of a setting that holds one.
    pub(crate) fn finish(self) {
        let mut unread: Vec<_> = self.unread.iter().collect();
        unread.sort_by_key(|(key, _)| key.as_str());
        for (key, value) in unread {
            let expected = unknown_key(key, self.known.iter().copied());
            let problem = Problem::new(self.path_of(key), expected).with_origin(origin(value));
            self.report.problems.push(problem);
        }
    }
}

impl Report {
    /// Adds a problem of the setting at `path`, which was read before.
    pub(crate) fn refuse(&mut self, path: String, value: impl Into<Value>, expected: Expected) {
        let origin = self.origin_of(&path);
        let is_secret = path.ends_with(".secret_access_key");
        let problem = Problem::new(path, format!("expected {expected}")).with_origin(origin);
        self.problems.push(if is_secret { problem } else { problem.with_value(&value.into()) });
    }

    /// The origin of the setting at `path`.
    pub(crate) fn origin_of(&self, path: &str) -> String {
        self.origins.get(path).map_or(BUILT_IN, String::as_str).to_owned()
    }
}

/// The origin of a value. A section merged from several layers has no origin itself; it gets the alphabetically first
/// origin of its settings, so that the result does not depend on the order in a map.
pub(crate) fn origin(value: &Value) -> String {
    fn first_origin(value: &Value) -> Option<&str> {
        let of_children = || match &value.kind {
            ValueKind::Table(table) => table.values().filter_map(first_origin).min(),
            ValueKind::Array(items) => items.iter().find_map(first_origin),
            _ => None,
        };
        value.origin().or_else(of_children)
    }
    first_origin(value).unwrap_or(BUILT_IN).to_owned()
}
