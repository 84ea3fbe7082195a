//! Records the provenance of an output (model, input, settings) in `OUTPUT.run.json` beside it, and decides whether a
//! run may continue the output. Owns that file; the caller holds the output's lock, so there is one writer.
//! Never reads or changes the output itself.

use std::path::Path;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

use crate::client::batch_file::{InputDigest, read_record, record_path, write_record};
use crate::config::{Options, Pool};
use crate::model::model_name;
use crate::worker::pool_spec;

/// The version of the record's format; other versions are refused.
const FORMAT: u32 = 3;

/// The models, the settings and the input that produced the lines of an output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    format: u32,
    input: InputDigest,
    /// In the order of the settings.
    pools: Vec<PoolProvenance>,
}

/// The model of one pool, and those of its settings that decide the content of replies. Other settings decide only when
/// tasks are computed, or how often a failed one is tried again. The device is left out, because it changes only the last
/// digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PoolProvenance {
    /// The model's name as in replies. For a folder, this is the last component of its path. Of a class in Python, also the
    /// name of its module or file.
    model: String,
    /// The digest of the model's files, or of the file of a class in Python; none for a registered model, because only its
    /// code knows its files.
    weights: Option<String>,
    /// As the settings name it; for "auto" with what the table of this CPU takes first.
    dtype: String,
    max_inputs: usize,
    max_body: u64,
    /// Sorted, because the order has no meaning.
    served_names: Vec<String>,
    task: Option<String>,
    /// The options that decide the content of replies.
    options: Options,
}

/// The options that decide only how many sequences run at once.
const CAPACITY_OPTIONS: [&str; 2] = ["kv_tokens", "sequences"];

/// One property of a pool. Two are equal if the whole digests are, of which only the beginning is shown.
#[derive(PartialEq)]
struct Property {
    shown: String,
    digest: Option<String>,
}

impl Provenance {
    /// The record of a run of `input` in these pools, each with the digest of its model's files.
    pub fn new(pools: &[(Pool, Option<String>)], input: InputDigest) -> Self {
        let pools = pools.iter().map(|(pool, weights)| PoolProvenance::new(pool, weights.clone())).collect();
        Self { format: FORMAT, input, pools }
    }

    /// Compares this run with the record of the output, which has `done` whole lines. If there is no record or no whole
    /// line, writes this run's record. Returns the number of lines of unknown origin: `done` without a record, else 0.
    ///
    /// # Errors
    /// The output was made by another model, input or setting, or its record cannot be read. The operator has to name
    /// another output. Nothing is changed.
    pub fn continue_output(self, output: &Path, done: usize) -> anyhow::Result<usize> {
        let path = record_path(output);
        let earlier = if done > 0 { Self::read(&path, output)? } else { None };
        let Some(earlier) = earlier else {
            write_record(&path, &self).with_context(|| path.display().to_string())?;
            return Ok(done);
        };
        if let Some((then, now)) = earlier.differences(&self) {
            bail!(
                "the output was made with {then}; this run has {now}: give another output file, or remove {} and {}",
                output.display(),
                path.display()
            );
        }
        Ok(0)
    }

    /// The properties that differ: their values in `self`, and their values in `new`. None if all are equal.
    fn differences(&self, new: &Self) -> Option<(String, String)> {
        let (mut old_values, mut new_values) = (Vec::new(), Vec::new());
        if self.pools.len() != new.pools.len() {
            old_values.push(format!("{} pools", self.pools.len()));
            new_values.push(format!("{} pools", new.pools.len()));
        }
        for (old_pool, new_pool) in self.pools.iter().zip(&new.pools) {
            let pairs = old_pool.properties().into_iter().zip(new_pool.properties());
            for (old, new) in pairs.filter(|(old, new)| old != new) {
                old_values.push(old.shown);
                new_values.push(new.shown);
            }
        }
        if self.input != new.input {
            let (then, now) = self.input.differences(&new.input);
            old_values.push(then);
            new_values.push(now);
        }
        (!old_values.is_empty()).then(|| (old_values.join(", "), new_values.join(", ")))
    }

    /// Reads the record; none if there is no file.
    fn read(path: &Path, output: &Path) -> anyhow::Result<Option<Self>> {
        let problem = match read_record::<Self>(path) {
            Ok(None) => return Ok(None),
            Ok(Some(record)) if record.format == FORMAT => return Ok(Some(record)),
            Ok(Some(record)) => format!("its format is {}, this program reads {FORMAT}", record.format),
            Err(error) => error.to_string(),
        };
        let (path, output) = (path.display(), output.display());
        bail!(
            "{path} does not say what made {output}: {problem}; give another output file, or remove these two"
        )
    }
}

/// A pool's `dtype`. "auto" means other types on other CPUs, whose results must not be mixed in one file.
fn recorded_dtype(pool: &Pool) -> String {
    if let Some(dtype) = pool.dtype {
        return dtype.name().to_owned();
    }
    let candidates = pool_spec(pool, "cpu").candidates();
    let first = candidates.first().map(|first| first.dtype.name()).unwrap_or_default();
    format!("auto, on this CPU {first} first")
}

impl PoolProvenance {
    fn new(pool: &Pool, weights: Option<String>) -> Self {
        let mut served_names = pool.served_names.clone();
        served_names.sort_unstable();
        served_names.dedup();
        let mut options = pool.options.clone();
        options.retain(|name, _| !CAPACITY_OPTIONS.contains(&name.as_str()));
        let class = pool.python_class().map(|class| class.to_string());
        Self {
            model: class.unwrap_or_else(|| model_name(&pool.model).to_owned()),
            weights,
            dtype: recorded_dtype(pool),
            max_inputs: pool.max_inputs,
            max_body: pool.max_body,
            served_names,
            task: pool.task.clone(),
            options,
        }
    }

    /// The properties that must not change between runs.
    fn properties(&self) -> [Property; 6] {
        let Self { model, weights, dtype, max_inputs, max_body, served_names, task, options } = self;
        let digest = weights.as_ref().map(|sha256| format!(" (files sha256 {sha256:.12})"));
        let (task, options) = (task.as_deref().unwrap_or("auto"), serde_json::to_string(options));
        let plain = |shown: String| Property { shown, digest: None };
        [
            Property {
                shown: format!("model {model:?}{}", digest.unwrap_or_default()),
                digest: weights.clone(),
            },
            plain(format!("dtype {dtype}")),
            plain(format!("max_inputs {max_inputs}")),
            plain(format!("max_body {max_body} bytes")),
            plain(format!("served_names {served_names:?}")),
            plain(format!("task {task:?} with the options {}", options.unwrap_or_default())),
        ]
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    fn run() -> Provenance {
        let input =
            InputDigest { lines: 3, bytes: 90, sha256: "0123456789abcdef".repeat(4), parameters: None };
        let pool = PoolProvenance {
            model: "a".into(),
            weights: Some("fedcba9876543210".repeat(4)),
            dtype: "f32".to_owned(),
            max_inputs: 8,
            max_body: 1_024,
            served_names: vec![],
            task: None,
            options: Options::new(),
        };
        Provenance { format: FORMAT, input, pools: vec![pool] }
    }

    struct Output {
        _folder: tempfile::TempDir,
        path: PathBuf,
    }

    impl Output {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("out.jsonl");
            Self { _folder: folder, path }
        }

        fn record(&self) -> String {
            fs::read_to_string(record_path(&self.path)).unwrap()
        }
    }

    #[test]
    fn the_same_run_resumes_and_leaves_only_its_record() {
        let output = Output::new();
        assert_eq!(run().continue_output(&output.path, 0).unwrap(), 0);
        let record = output.record();
        assert_eq!(run().continue_output(&output.path, 2).unwrap(), 0);
        assert_eq!(output.record(), record);
        let names = fs::read_dir(output.path.parent().unwrap()).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["out.jsonl.run.json"]);
    }

    #[test]
    fn any_difference_is_refused_with_the_old_and_the_new_value() {
        type Alter = fn(&mut Provenance);
        let cases: [(Alter, &str, &str); 8] = [
            (
                |it| it.pools[0].model = "b".into(),
                "model \"a\" (files sha256 fedcba987654)",
                "model \"b\" (files sha256 fedcba987654)",
            ),
            (|it| it.pools[0].weights = None, "model \"a\" (files sha256 fedcba987654)", "model \"a\""),
            (
                |it| it.input.sha256 = "f".repeat(64),
                "an input of 3 lines (90 bytes, sha256 0123456789ab)",
                "an input of 3 lines (90 bytes, sha256 ffffffffffff)",
            ),
            (|it| it.pools[0].dtype = "bf16".to_owned(), "dtype f32", "dtype bf16"),
            (|it| it.pools[0].max_inputs = 9, "max_inputs 8", "max_inputs 9"),
            (|it| it.pools[0].max_body = 9, "max_body 1024 bytes", "max_body 9 bytes"),
            (|it| it.pools[0].served_names = vec!["x".into()], "served_names []", "served_names [\"x\"]"),
            (|it| it.pools.push(it.pools[0].clone()), "1 pools", "2 pools"),
        ];
        for (alter, then, now) in cases {
            let output = Output::new();
            run().continue_output(&output.path, 0).unwrap();
            let record = output.record();
            let mut other = run();
            alter(&mut other);
            let error = other.continue_output(&output.path, 1).unwrap_err().to_string();
            let expected = format!("the output was made with {then}; this run has {now}: give another");
            assert!(error.starts_with(&expected), "{error}");
            assert!(error.ends_with("out.jsonl.run.json"), "{error}");
            assert_eq!(output.record(), record);
        }
    }

    #[test]
    fn another_option_or_task_is_refused() {
        let with = |task: Option<&str>, seed: u64| {
            let mut run = run();
            run.pools[0].options = Options::from([("seed".to_owned(), seed.into())]);
            run.pools[0].task = task.map(Into::into);
            run
        };
        let differences = with(None, 1).differences(&with(Some("rerank"), 2));
        let (then, now) = differences.unwrap();
        assert_eq!(then, r#"task "auto" with the options {"seed":1}"#);
        assert_eq!(now, r#"task "rerank" with the options {"seed":2}"#);
        assert_eq!(with(None, 1).differences(&with(None, 1)), None);
    }

    #[test]
    fn digests_with_a_common_prefix_are_distinguished() {
        let output = Output::new();
        run().continue_output(&output.path, 0).unwrap();
        let mut other = run();
        other.input.sha256.replace_range(63.., "0");
        assert!(other.continue_output(&output.path, 1).is_err());
    }

    #[test]
    fn all_differences_are_named_in_one_error() {
        let mut other = run();
        other.pools[0].model = "b".into();
        other.input.lines = 4;
        other.pools[0].max_inputs = 9;
        let (then, now) = run().differences(&other).unwrap();
        for (text, model, lines, limit) in [(then, "\"a\"", "3 lines", "8"), (now, "\"b\"", "4 lines", "9")] {
            let limit = format!("max_inputs {limit}");
            let order = [model, limit.as_str(), lines].map(|part| text.find(part).unwrap());
            assert!(order.is_sorted(), "{text}");
        }
    }

    #[test]
    fn the_record_of_an_output_without_whole_lines_is_replaced() {
        let output = Output::new();
        fs::write(record_path(&output.path), "not JSON").unwrap();
        let other = Provenance { pools: Vec::new(), ..run() };
        assert_eq!(other.continue_output(&output.path, 0).unwrap(), 0);
        assert_eq!(run().continue_output(&output.path, 0).unwrap(), 0);
        assert_eq!(serde_json::from_str::<Provenance>(&output.record()).unwrap(), run());
    }

    #[test]
    fn lines_of_unknown_origin_are_reported_once() {
        let output = Output::new();
        assert_eq!(run().continue_output(&output.path, 2).unwrap(), 2);
        assert_eq!(run().continue_output(&output.path, 3).unwrap(), 0, "reported once");
        let other = Provenance { pools: Vec::new(), ..run() };
        assert!(other.continue_output(&output.path, 3).is_err());
    }

    #[test]
    fn an_unreadable_record_is_named_and_left_unchanged() {
        let other_format = serde_json::to_string(&Provenance { format: 1, ..run() }).unwrap();
        for content in ["", "{}", "null", other_format.as_str()] {
            let output = Output::new();
            fs::write(record_path(&output.path), content).unwrap();
            let error = run().continue_output(&output.path, 1).unwrap_err();
            let named = error.to_string();
            assert!(named.contains("does not say what made"), "{named}");
            assert!(named.contains(record_path(&output.path).to_str().unwrap()), "{named}");
            assert_eq!(output.record(), content);
        }
    }
}
