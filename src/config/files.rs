//! Reads the built-in defaults and the given files, each into a [`Layer`] whose values carry their file. Never
//! interprets the settings.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use ::config::{ConfigError as SourceError, FileFormat, Format, Map, Source, Value};

use super::problem::Problem;

/// Largest file, in bytes: enough for a thousand pools. Because of this limit, a device or a log that is given by
/// mistake is not read to its end.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The origin of the built-in defaults.
pub(super) const BUILT_IN: &str = "built-in default";

/// How the origin of a file's values begins; the file's path follows.
pub(super) const FILE_PREFIX: &str = "file ";

/// One layer of settings, which overrides those before it.
#[derive(Clone, Debug, Default)]
pub(super) struct Layer(Map<String, Value>);

impl Layer {
    /// A layer with these values, by their path.
    pub(super) fn new(values: Map<String, Value>) -> Self {
        Self(values)
    }
}

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, SourceError> {
        Ok(self.0.clone())
    }
}

/// Reads the built-in defaults from the text of `config/default.toml`.
pub(super) fn defaults(text: &str) -> Result<Layer, Problem> {
    parse(text, BUILT_IN).map_err(|reason| Problem::new(BUILT_IN, reason))
}

/// Reads the files in order.
///
/// # Errors
/// One problem for each file that cannot be read or parsed.
pub(super) fn read(files: &[PathBuf]) -> Result<Vec<Layer>, Vec<Problem>> {
    let mut layers = Vec::new();
    let mut problems = Vec::new();
    for file in files {
        let origin = format!("{FILE_PREFIX}{}", file.display());
        let layer = read_text(file).and_then(|text| parse(&text, &origin));
        match layer {
            Ok(layer) => layers.push(layer),
            Err(reason) => problems.push(Problem::new(origin, reason)),
        }
    }
    if problems.is_empty() { Ok(layers) } else { Err(problems) }
}

fn read_text(file: &Path) -> Result<String, String> {
    let mut text = String::new();
    let read = File::open(file).and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text));
    match read {
        Ok(length) if length as u64 > MAX_FILE_BYTES => {
            Err(format!("larger than settings may be ({MAX_FILE_BYTES} bytes)"))
        }
        Ok(_) => Ok(text),
        Err(error) => Err(format!("cannot be read: {error}")),
    }
}

fn parse(text: &str, origin: &str) -> Result<Layer, String> {
    let origin = origin.to_owned();
    let table = Format::parse(&FileFormat::Toml, Some(&origin), text)
        .map_err(|error| without_excerpt(&error.to_string()))?;
    // The `config` crate takes a quoted top-level key for a path, which could reach into other sections.
    if let Some(key) = table.keys().find(|key| key.contains(['.', '[', ']'])) {
        return Err(format!("top-level key {key:?} is not a setting"));
    }
    Ok(Layer(table))
}

/// The parser's message without the quoted line of the file, which may hold a password.
fn without_excerpt(message: &str) -> String {
    let is_excerpt =
        |line: &str| line.trim_start_matches(|c: char| c.is_ascii_digit() || c == ' ').starts_with('|');
    let lines = message.lines().filter(|line| !is_excerpt(line));
    lines.map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_syntax_error_names_the_line_but_not_its_content() {
        let text = "[broker]\nurl = \"amqp://me:hunter2@host\n";
        let reason = parse(text, "x").expect_err("an open string");
        assert!(reason.contains("line 2"), "{reason}");
        assert!(!reason.contains("hunter2"), "{reason}");
        assert!(reason.len() > "TOML parse error at line 2, column 30: ".len());
    }

    #[test]
    fn every_file_that_cannot_be_used_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let broken = folder.path().join("broken.toml");
        fs::write(&broken, "a = \n").expect("written");
        let missing = folder.path().join("missing.toml");
        let problems = read(&[broken, missing]).expect_err("neither can be used");
        assert!(problems[0].to_string().contains("broken.toml: TOML parse error at line 1"));
        assert!(problems[1].to_string().contains("missing.toml: cannot be read"));
    }

    #[test]
    fn a_file_over_the_size_limit_is_refused_with_the_limit() {
        let folder = tempfile::tempdir().expect("a folder");
        let large = folder.path().join("large.toml");
        let file = File::create(&large).expect("a file");
        file.set_len(1 << 40).expect("a sparse file");
        let problems = read(&[large, "/dev/zero".into()]).expect_err("neither can be used");
        for problem in problems {
            assert!(
                problem.to_string().ends_with("larger than settings may be (1048576 bytes)"),
                "{problem}"
            );
        }
    }

    #[test]
    fn a_quoted_top_level_key_cannot_pose_as_a_path() {
        let reason = parse("\"pool[99]\" = 1", "x").expect_err("no such key");
        assert!(reason.contains("pool[99]"), "{reason}");
    }

    #[test]
    fn values_carry_their_file_as_origin() {
        let layer = parse("[a]\nb = [1]", "file x").expect("TOML");
        let table = layer.0["a"].clone().into_table().expect("a table");
        assert_eq!(table["b"].origin(), Some("file x"));
    }
}
