//! Records what made an output (model, input, settings) in `OUTPUT.run.json` beside it, and decides whether a
//! run may continue the output. Owns that file; the caller holds the output's lock, so there is one writer.
//! Never reads or changes the output itself.

use std::path::Path;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

use crate::client::batch_file::{InputDigest, beside, read_record, write_record};
use crate::config::{Dtype, Pool};
use crate::model::model_name;

/// Version of the file's format; other versions are refused.
const FORMAT: u32 = 2;

/// What made an output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeBy {
    format: u32,
    input: InputDigest,
    /// In the order of the settings.
    pools: Vec<MadeInPool>,
}

/// What made the replies of one pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct MadeInPool {
    /// The model's name as in replies: for a folder, its last component, wherever the folder is.
    model: String,
    /// The digest of its files; none for a registered model, of which only the name is known.
    weights: Option<String>,
    settings: ReplySettings,
}

/// The pool's settings that decide the content of replies. Other settings decide only when tasks are computed,
/// or how often a failed one is tried again; different devices give different last digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ReplySettings {
    dtype: Dtype,
    max_inputs: usize,
    max_body: u64,
    /// Sorted, because the order has no meaning.
    served_names: Vec<String>,
}

/// One criterion: whether it is equal, and how it is shown.
type Part = (bool, fn(&MadeInPool) -> String);

impl MadeBy {
    /// The record of a run of `input` in these pools, each with the digest of its model's files.
    pub fn new(pools: &[(Pool, Option<String>)], input: InputDigest) -> Self {
        let pools = pools.iter().map(|(pool, weights)| MadeInPool::new(pool, weights.clone())).collect();
        Self { format: FORMAT, input, pools }
    }

    /// Compares this run with the record of the `done` whole lines of the output, and writes the record of the
    /// next lines where there is none yet. Returns the number of lines whose maker is not known then.
    /// An error is for the operator, who has to name another output; then nothing is changed.
    pub fn continue_output(self, output: &Path, done: usize) -> anyhow::Result<usize> {
        let path = beside(output);
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

    /// The differences, as they are in `self` and in `now`.
    fn differences(&self, now: &Self) -> Option<(String, String)> {
        let (mut then, mut other) = (Vec::new(), Vec::new());
        if self.pools.len() != now.pools.len() {
            then.push(format!("{} pools", self.pools.len()));
            other.push(format!("{} pools", now.pools.len()));
        }
        for (old, new) in self.pools.iter().zip(&now.pools) {
            for (_, show) in old.parts(new).iter().filter(|(same, _)| !*same) {
                then.push(show(old));
                other.push(show(new));
            }
        }
        if self.input != now.input {
            then.push(format!("an input of {}", self.input));
            other.push(format!("an input of {}", now.input));
        }
        (!then.is_empty()).then(|| (then.join(", "), other.join(", ")))
    }

    /// Reads the record; none where there is no file.
    fn read(path: &Path, output: &Path) -> anyhow::Result<Option<Self>> {
        let problem = match read_record::<Self>(path) {
            Ok(None) => return Ok(None),
            Ok(Some(made)) if made.format == FORMAT => return Ok(Some(made)),
            Ok(Some(made)) => format!("its format is {}, this program reads {FORMAT}", made.format),
            Err(error) => error.to_string(),
        };
        let (path, output) = (path.display(), output.display());
        bail!(
            "{path} does not say what made {output}: {problem}; give another output file, or remove these two"
        )
    }
}

impl MadeInPool {
    fn new(pool: &Pool, weights: Option<String>) -> Self {
        let mut served_names = pool.served_names.clone();
        served_names.sort_unstable();
        served_names.dedup();
        let Pool { dtype, max_inputs, max_body, .. } = *pool;
        let settings = ReplySettings { dtype, max_inputs, max_body, served_names };
        Self { model: model_name(&pool.model).to_owned(), weights, settings }
    }

    /// What is compared with another run.
    fn parts(&self, other: &Self) -> [Part; 5] {
        let (old, new) = (&self.settings, &other.settings);
        [
            ((&self.model, &self.weights) == (&other.model, &other.weights), Self::shown_model),
            (old.dtype == new.dtype, |made| format!("dtype {}", made.settings.dtype.name())),
            (old.max_inputs == new.max_inputs, |made| format!("max_inputs {}", made.settings.max_inputs)),
            (old.max_body == new.max_body, |made| format!("max_body {} bytes", made.settings.max_body)),
            (old.served_names == new.served_names, |made| {
                format!("served_names {:?}", made.settings.served_names)
            }),
        ]
    }

    fn shown_model(&self) -> String {
        match &self.weights {
            Some(sha256) => format!("model {:?} (weights sha256 {sha256:.12})", self.model),
            None => format!("model {:?}", self.model),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    fn run() -> MadeBy {
        let input = InputDigest { lines: 3, bytes: 90, sha256: "0123456789abcdef".repeat(4) };
        let settings =
            ReplySettings { dtype: Dtype::F32, max_inputs: 8, max_body: 1_024, served_names: vec![] };
        let weights = Some("fedcba9876543210".repeat(4));
        let pools = vec![MadeInPool { model: "a".into(), weights, settings }];
        MadeBy { format: FORMAT, input, pools }
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

        fn told(&self) -> String {
            fs::read_to_string(beside(&self.path)).unwrap()
        }
    }

    #[test]
    fn the_same_run_goes_on_and_nothing_else_is_left_in_the_folder() {
        let output = Output::new();
        assert_eq!(run().continue_output(&output.path, 0).unwrap(), 0);
        let told = output.told();
        assert_eq!(run().continue_output(&output.path, 2).unwrap(), 0);
        assert_eq!(output.told(), told);
        let names = fs::read_dir(output.path.parent().unwrap()).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["out.jsonl.run.json"]);
    }

    #[test]
    fn whatever_differs_is_refused_and_named_as_it_was_and_as_it_is() {
        type Alter = fn(&mut MadeBy);
        let cases: [(Alter, &str, &str); 8] = [
            (
                |it| it.pools[0].model = "b".into(),
                "model \"a\" (weights sha256 fedcba987654)",
                "model \"b\" (weights sha256 fedcba987654)",
            ),
            (|it| it.pools[0].weights = None, "model \"a\" (weights sha256 fedcba987654)", "model \"a\""),
            (
                |it| it.input.sha256 = "f".repeat(64),
                "an input of 3 lines (90 bytes, sha256 0123456789ab)",
                "an input of 3 lines (90 bytes, sha256 ffffffffffff)",
            ),
            (|it| it.pools[0].settings.dtype = Dtype::Bf16, "dtype f32", "dtype bf16"),
            (|it| it.pools[0].settings.max_inputs = 9, "max_inputs 8", "max_inputs 9"),
            (|it| it.pools[0].settings.max_body = 9, "max_body 1024 bytes", "max_body 9 bytes"),
            (
                |it| it.pools[0].settings.served_names = vec!["x".into()],
                "served_names []",
                "served_names [\"x\"]",
            ),
            (|it| it.pools.push(it.pools[0].clone()), "1 pools", "2 pools"),
        ];
        for (alter, then, now) in cases {
            let output = Output::new();
            run().continue_output(&output.path, 0).unwrap();
            let told = output.told();
            let mut other = run();
            alter(&mut other);
            let error = other.continue_output(&output.path, 1).unwrap_err().to_string();
            let expected = format!("the output was made with {then}; this run has {now}: give another");
            assert!(error.starts_with(&expected), "{error}");
            assert!(error.ends_with("out.jsonl.run.json"), "{error}");
            assert_eq!(output.told(), told);
        }
    }

    #[test]
    fn digests_that_begin_alike_are_told_apart() {
        let output = Output::new();
        run().continue_output(&output.path, 0).unwrap();
        let mut other = run();
        other.input.sha256.replace_range(63.., "0");
        assert!(other.continue_output(&output.path, 1).is_err());
    }

    #[test]
    fn all_that_differs_is_named_in_one_error() {
        let mut other = run();
        other.pools[0].model = "b".into();
        other.input.lines = 4;
        other.pools[0].settings.max_inputs = 9;
        let (then, now) = run().differences(&other).unwrap();
        for (text, model, lines, most) in [(then, "\"a\"", "3 lines", "8"), (now, "\"b\"", "4 lines", "9")] {
            let most = format!("max_inputs {most}");
            let order = [model, most.as_str(), lines].map(|part| text.find(part).unwrap());
            assert!(order.is_sorted(), "{text}");
        }
    }

    #[test]
    fn an_output_without_whole_lines_is_made_by_whoever_comes() {
        let output = Output::new();
        fs::write(beside(&output.path), "not JSON").unwrap();
        let other = MadeBy { pools: Vec::new(), ..run() };
        assert_eq!(other.continue_output(&output.path, 0).unwrap(), 0);
        assert_eq!(run().continue_output(&output.path, 0).unwrap(), 0);
        assert_eq!(serde_json::from_str::<MadeBy>(&output.told()).unwrap(), run());
    }

    #[test]
    fn of_lines_that_were_there_before_nothing_tells_the_maker() {
        let output = Output::new();
        assert_eq!(run().continue_output(&output.path, 2).unwrap(), 2);
        assert_eq!(run().continue_output(&output.path, 3).unwrap(), 0, "said once");
        let other = MadeBy { pools: Vec::new(), ..run() };
        assert!(other.continue_output(&output.path, 3).is_err());
    }

    #[test]
    fn a_file_that_does_not_tell_is_named_and_left_alone() {
        let other_format = serde_json::to_string(&MadeBy { format: 1, ..run() }).unwrap();
        for content in ["", "{}", "null", other_format.as_str()] {
            let output = Output::new();
            fs::write(beside(&output.path), content).unwrap();
            let error = run().continue_output(&output.path, 1).unwrap_err();
            let named = error.to_string();
            assert!(named.contains("does not say what made"), "{named}");
            assert!(named.contains(beside(&output.path).to_str().unwrap()), "{named}");
            assert_eq!(output.told(), content);
        }
    }
}
