//! Reads the `model` setting of a pool whose model is a class in Python. Does not check whether its file exists, and starts
//! nothing.

use std::collections::BTreeMap;
use std::fmt;

use super::define::{Outline, Section};
use super::read::{Expected, Reader, Secret, text};

/// What the `model` setting of such a pool begins with.
const SCHEME: &str = "python:";

/// A class in Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PythonClass<'a> {
    /// Where it is defined.
    pub place: PythonPlace<'a>,
    /// Its name.
    pub class: &'a str,
}

/// Where a class in Python is defined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PythonPlace<'a> {
    /// In a module that the interpreter finds, such as `shop.models`.
    Module(&'a str),
    /// In a file, such as `./embedder.py`.
    File(&'a str),
}

/// The environment variables of a Python process, by name. Their values may be secrets.
pub type Environment = BTreeMap<String, Secret>;

/// The class that `model` names. None if it names no class in Python, an error if its form is wrong.
pub(super) fn python_class(model: &str) -> Option<Result<PythonClass<'_>, Expected>> {
    let rest = model.strip_prefix(SCHEME)?;
    let is_name = |name: &str| {
        let starts = name.starts_with(|first: char| first == '_' || first.is_alphabetic());
        starts && name.chars().all(|character| character == '_' || character.is_alphanumeric())
    };
    let read = rest.rsplit_once(':').and_then(|(place, class)| {
        let place = match place {
            file if file.contains('/') || file.ends_with(".py") => PythonPlace::File(file),
            module if module.split('.').all(is_name) => PythonPlace::Module(module),
            _ => return None,
        };
        is_name(class).then_some(PythonClass { place, class })
    });
    let expected = "\"python:MODULE:CLASS\", such as \"python:shop.models:Embedder\", or \"python:FILE:CLASS\", such as \
                    \"python:./embedder.py:Embedder\"";
    Some(read.ok_or_else(|| expected.to_owned()))
}

/// As in settings, but without the folder of a file.
impl fmt::Display for PythonClass<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self.place {
            PythonPlace::Module(module) => module,
            PythonPlace::File(file) => file.rsplit('/').next().unwrap_or(file),
        };
        write!(f, "{SCHEME}{place}:{}", self.class)
    }
}

/// The same `model`, with the path of its file made absolute by `resolve`.
pub(super) fn resolved(model: &str, resolve: impl Fn(&str) -> String) -> Option<String> {
    match python_class(model)?.ok()? {
        PythonClass { place: PythonPlace::File(file), class } => {
            Some(format!("{SCHEME}{}:{class}", resolve(file)))
        }
        PythonClass { place: PythonPlace::Module(_), .. } => Some(model.to_owned()),
    }
}

/// The class in Python that `model` names.
pub fn class_name(model: &str) -> Option<&str> {
    Some(python_class(model)?.ok()?.class)
}

impl Section for Environment {
    fn outline() -> Outline {
        let about: &[&str] = &[
            " Environment variables of the Python process, beside PATH, HOME, the locale, TMPDIR and its device. It gets none",
            " of the worker's others. `sconce check-config` masks the values, since some are secrets.",
        ];
        Outline { about, keys: &[], nested: Vec::new(), has_secrets: true }
    }

    fn read(mut reader: Reader<'_>) -> Option<Self> {
        let mut variables = Self::new();
        for (name, value) in reader.read_rest() {
            match text(&value) {
                Ok(value) if !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0') => {
                    variables.insert(name, Secret::new(value));
                }
                _ => reader.refuse(&name, "***", "a variable's name and its value, a text".to_owned()),
            }
        }
        Some(variables)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_in_a_module_or_in_a_file() {
        let module = |place, class| Some(Ok(PythonClass { place: PythonPlace::Module(place), class }));
        let file = |place, class| Some(Ok(PythonClass { place: PythonPlace::File(place), class }));
        assert_eq!(python_class("python:shop.models:Embedder"), module("shop.models", "Embedder"));
        assert_eq!(python_class("python:m:embed"), module("m", "embed"));
        assert_eq!(python_class("python:./e.py:E"), file("./e.py", "E"));
        assert_eq!(python_class("python:e.py:E"), file("e.py", "E"));
        assert_eq!(python_class("python:/srv/a:b/e.py:E"), file("/srv/a:b/e.py", "E"));
        assert_eq!(python_class("org/name"), None);
        for wrong in
            ["python:", "python:m", "python:m:", "python::E", "python:a b:E", "python:m:E()", "python:a..b:E"]
        {
            assert!(python_class(wrong).is_some_and(|read| read.is_err()), "{wrong}");
        }
    }

    #[test]
    fn paths_are_relative_to_the_file_that_names_them_and_values_of_variables_are_masked() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let file = root.join("a.toml");
        let text = "[[pool]]\nmodel = \"python:./e.py:E\"\n[pool.python]\nexecutable = \"./.venv/bin/python\"\npath = [\"lib\"]\n\
                    [pool.python.env]\nHF_TOKEN = \"hf_secret\"\n";
        std::fs::write(&file, text).unwrap();
        let own = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let variable = own("SCONCE_POOL__0__PYTHON__ENV__HF_HOME", "/data");
        let flag = own("pool[0].python.env.http_proxy", "http://proxy");
        let loaded = super::super::load(&[file], [variable], &[flag]).unwrap();
        let pool = &loaded.settings.pools[0];
        assert_eq!(pool.model, format!("python:{}:E", root.join("e.py").display()));
        assert_eq!(pool.python.executable, root.join(".venv/bin/python").display().to_string());
        assert_eq!(pool.python.path, [root.join("lib").display().to_string()]);
        let environment = pool.python.env.iter().map(|(name, value)| (name.as_str(), value.expose()));
        let expected = [("HF_HOME", "/data"), ("HF_TOKEN", "hf_secret"), ("http_proxy", "http://proxy")];
        assert!(environment.eq(expected), "{:?}", pool.python.env);
        assert!(loaded.effective.contains("\"HF_TOKEN\" = \"***\""), "{}", loaded.effective);
        assert!(!loaded.effective.contains("hf_secret"), "{}", loaded.effective);
    }
}
