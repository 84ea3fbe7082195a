//! Reads environment variables and flags into layers. Decides which variables are settings. Refuses a name that is
//! neither in the tree of the lower layers nor an option of a model. A setting has three spellings: `pool[0].model` in
//! messages and flags, `pool.0.model` in flags, `SCONCE_POOL__0__MODEL` as a variable. The caller passes the
//! environment in.

use std::collections::{BTreeMap, BTreeSet};

use ::config::{Map, Value, ValueKind};

use super::files::Layer;
use super::problem::{Problem, nearest};
use super::redact::redact_url;

const PREFIX: &str = "SCONCE_";

/// The variable in which hosting platforms give the broker's address. It overrides files, and
/// `SCONCE_BROKER__URL` overrides it; empty counts as absent.
const AMQP_URL: &str = "AMQP_URL";

/// Variables with our prefix that are not settings: log filter, log format, and the default of `--config`.
/// Other code reads them.
pub const NOT_SETTINGS: [&str; 3] = ["SCONCE_LOG", "SCONCE_LOG_FORMAT", "SCONCE_CONFIG"];

/// Prefixes of the variables that Kubernetes sets in every container for a Service named `sconce`. No setting's
/// variable has such a prefix.
const KUBERNETES_SERVICE: [&str; 2] = ["SCONCE_PORT", "SCONCE_SERVICE_"];

/// Reads two layers: `AMQP_URL`, and `SCONCE_…` over it. `tree` holds all settings of the lower layers.
pub(super) fn from_environment(
    environment: impl IntoIterator<Item = (String, String)>,
    tree: &Value,
    problems: &mut Vec<Problem>,
) -> [Layer; 2] {
    // Sorted, so that the order of problems does not change.
    let variables: BTreeMap<String, String> = environment.into_iter().collect();
    let known = Known::of(tree);
    let mut amqp_url = Map::new();
    let mut sconce_variables = Map::new();
    for (name, text) in variables {
        let origin = format!("environment variable {name}");
        if name == AMQP_URL && !text.is_empty() {
            amqp_url.insert("broker.url".to_owned(), Value::new(Some(&origin), text));
            continue;
        }
        let is_kubernetes_service = KUBERNETES_SERVICE.iter().any(|prefix| name.starts_with(prefix));
        if !name.starts_with(PREFIX) || is_kubernetes_service || NOT_SETTINGS.contains(&name.as_str()) {
            continue;
        }
        match known.find(&name.to_uppercase(), variable, str::to_lowercase) {
            Some(path) => drop(sconce_variables.insert(path, Value::new(Some(&origin), text))),
            None => {
                let lower = name.trim_start_matches(PREFIX).to_lowercase().replace("__", ".");
                let expected = known.explain(&lower, variable);
                problems.push(Problem::new(name, expected));
            }
        }
    }
    [Layer::new(amqp_url), Layer::new(sconce_variables)]
}

/// Reads the flags. If two name the same setting, the later one wins. `tree` holds all settings of the lower layers.
pub(super) fn from_flags(flags: &[(String, String)], tree: &Value, problems: &mut Vec<Problem>) -> Layer {
    let known = Known::of(tree);
    let mut values = Map::new();
    for (written, text) in flags {
        // If the user forgot the path, `written` is the value, which may be an address with a password.
        let shown = redact_url(written);
        let origin = format!("flag --set {shown}");
        match known.find(written.trim(), dotted, str::to_owned) {
            Some(path) => {
                // A model's option may need its quotes: they tell a string from a number.
                let text = if path.contains(".options.") { text } else { unquoted(text) };
                values.insert(path, Value::new(Some(&origin), text));
            }
            None => {
                let expected = known.explain(&dotted(written), str::to_owned);
                problems.push(Problem::new(format!("--set {shown}"), expected));
            }
        }
    }
    Layer::new(values)
}

/// The text of a string in TOML's quotes. What is not quoted, or has more quotes or escapes, stays as it is.
fn unquoted(text: &str) -> &str {
    let inner = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    inner.filter(|inner| !inner.contains(['"', '\\'])).unwrap_or(text)
}

/// The path of a setting with a dot before an index, too: `pool.0.model`.
fn dotted(path: &str) -> String {
    path.replace('[', ".").replace(']', "")
}

/// The name of a setting's variable.
fn variable(path: &str) -> String {
    format!("{PREFIX}{}", dotted(path).replace('.', "__").to_uppercase())
}

/// The settings that the lower layers have.
struct Known {
    /// Their paths, in the syntax of the `config` crate.
    paths: BTreeSet<String>,
    pools: usize,
}

impl Known {
    fn of(tree: &Value) -> Self {
        let mut known = Self { paths: BTreeSet::new(), pools: 0 };
        known.collect("", tree);
        known
    }

    fn collect(&mut self, path: &str, value: &Value) {
        match &value.kind {
            ValueKind::Table(table) => {
                for (key, value) in table {
                    let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                    self.collect(&path, value);
                }
            }
            ValueKind::Array(items) => {
                for (index, item) in items.iter().enumerate() {
                    if matches!(item.kind, ValueKind::Table(_)) {
                        self.collect(&format!("{path}[{index}]"), item);
                    }
                }
                if path == "pool" {
                    self.pools = items.len();
                } else {
                    self.paths.insert(path.to_owned());
                }
            }
            _ => drop(self.paths.insert(path.to_owned())),
        }
    }

    /// Finds a setting by what is `written`: its path, or what `spell` makes of its path. Returns the path. An option of a
    /// pool's model may have any name, because only the model knows its options; `read_option` makes the option's name
    /// from what is written. An environment variable of a model's process may have any name too, and is read as written.
    fn find(
        &self,
        written: &str,
        spell: fn(&str) -> String,
        read_option: fn(&str) -> String,
    ) -> Option<String> {
        let is_meant = |path: &&String| **path == written || spell(path) == written;
        let named_in = |section: String, read: fn(&str) -> String| {
            let name = written.strip_prefix(&section).or_else(|| written.strip_prefix(&spell(&section)))?;
            let is_letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
            let is_name = !name.is_empty() && !name.contains("__") && name.chars().all(is_letter);
            is_name.then(|| format!("{section}{}", read(name)))
        };
        let any_name = |pool: usize| {
            let option = named_in(format!("pool[{pool}].options."), read_option);
            option.or_else(|| named_in(format!("pool[{pool}].python.env."), str::to_owned))
        };
        let known = self.paths.iter().find(is_meant).cloned();
        known.or_else(|| (0..self.pools).find_map(any_name))
    }

    /// Why no setting was found, and which one was probably meant; `spell` makes its name from its path. `written` has
    /// dots between its levels, as in `pool.0.model`.
    fn explain(&self, written: &str, spell: fn(&str) -> String) -> String {
        let pool =
            written.strip_prefix("pool.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        if pool.is_some_and(|pool| pool >= self.pools) {
            return match self.pools {
                1 => "there is 1 pool, pool[0]; write further ones as [[pool]] in a file".to_owned(),
                pools => format!("there are {pools} pools, counted from 0; write further ones in a file"),
            };
        }
        let letters = |name: &str| name.replace(['.', '_'], "");
        let by_name: BTreeMap<String, &String> = self.paths.iter().map(|path| (dotted(path), path)).collect();
        let names = || by_name.keys().map(String::as_str);
        let meant =
            names().find(|name| letters(name) == letters(written)).or_else(|| nearest(written, names()));
        match meant.and_then(|name| by_name.get(name)) {
            Some(path) => format!("no such setting; did you mean `{}`?", spell(path)),
            None => "no such setting; `sconce check-config` lists all".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::config::{Config, Source};

    fn tree() -> Value {
        let defaults = super::super::files::defaults(&super::super::default_file()).expect("TOML");
        let built = Config::builder().add_source(defaults).build();
        built.expect("layered").cache
    }

    fn environment(pairs: &[(&str, &str)]) -> (Map<String, Value>, Map<String, Value>, Vec<String>) {
        let mut problems = Vec::new();
        let pairs = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        let layers = from_environment(pairs, &tree(), &mut problems);
        let problems = problems.iter().map(Problem::to_string).collect();
        let [amqp_url, sconce_variables] = layers.map(|layer| layer.collect().expect("a layer"));
        (amqp_url, sconce_variables, problems)
    }

    #[test]
    fn options_of_a_model_may_have_any_name() {
        let mut problems = Vec::new();
        let flags = [("pool[0].options.depth", "3"), ("pool[1].options.depth", "3"), ("pool[0].depth", "3")];
        let flags = flags.map(|(path, value)| (path.to_owned(), value.to_owned()));
        from_flags(&flags, &tree(), &mut problems);
        assert_eq!(problems.len(), 2, "{problems:?}");
    }

    #[test]
    fn a_variable_sets_its_setting_and_is_recorded_as_its_origin() {
        let (_, set, problems) = environment(&[("SCONCE_POOL__0__BATCH__MAX_TOKENS", "2")]);
        assert!(problems.is_empty(), "{problems:?}");
        let value = &set["pool[0].batch.max_tokens"];
        let origin = value.origin();
        assert_eq!(origin, Some("environment variable SCONCE_POOL__0__BATCH__MAX_TOKENS"));
    }

    #[test]
    fn variables_that_are_no_settings_are_left_alone() {
        let mut pairs: Vec<_> = NOT_SETTINGS.iter().map(|name| (*name, "x")).collect();
        pairs.extend([("PATH", "/bin"), ("SCONCES", "x"), ("AMQP_URL", "")]);
        let (amqp_url, sconce_variables, problems) = environment(&pairs);
        assert!(amqp_url.is_empty() && sconce_variables.is_empty());
        assert!(problems.is_empty(), "{problems:?}");
    }

    #[test]
    fn a_variable_that_names_no_setting_is_refused() {
        for (name, complaint) in [
            ("SCONCE_BROKR__URL", "no such setting; did you mean `SCONCE_BROKER__URL`?"),
            ("SCONCE_POOL__1__MODEL", "there is 1 pool"),
            ("SCONCE_POOL__MODEL", "no such setting; did you mean `SCONCE_POOL__0__MODEL`?"),
            ("SCONCE_POOL", "no such setting; `sconce check-config` lists all"),
            ("SCONCE_BROKER", "no such setting"),
            ("SCONCE_BROKER__0", "no such setting"),
            ("SCONCE_BROKER__URL__X", "no such setting; did you mean `SCONCE_BROKER__URL`?"),
            ("SCONCE_", "no such setting"),
        ] {
            let (_, set, problems) = environment(&[(name, "hunter2")]);
            assert!(set.is_empty());
            assert_eq!(problems.len(), 1, "{name}");
            assert!(problems[0].starts_with(&format!("{name}: {complaint}")), "{}", problems[0]);
            assert!(!problems[0].contains("hunter2"));
        }
    }

    #[test]
    fn a_variable_with_wrong_underscores_gets_the_right_spelling() {
        for (written, meant) in [
            ("SCONCE_BROKER_URL", "SCONCE_BROKER__URL"),
            ("SCONCE_BROKER___URL", "SCONCE_BROKER__URL"),
            ("SCONCE_BROKER_CONNECT_TIMEOUT", "SCONCE_BROKER__CONNECT_TIMEOUT"),
            ("SCONCE_POOL_0_BATCH_MAX_TOKENS", "SCONCE_POOL__0__BATCH__MAX_TOKENS"),
            ("SCONCE_POOL__0_TASK_QUEUE", "SCONCE_POOL__0__TASK_QUEUE"),
        ] {
            let (_, set, problems) = environment(&[(written, "hunter2")]);
            assert!(set.is_empty());
            let shown = problems.join("\n");
            assert!(shown.contains(&format!("did you mean `{meant}`?")), "{shown}");
            assert!(shown.contains(written) && !shown.contains("hunter2"), "{shown}");
        }
    }

    #[test]
    fn of_two_flags_for_one_setting_the_later_wins() {
        let flags = [("pool[0].model", "a"), ("pool.0.model", "b")];
        let flags = flags.map(|(k, v)| (k.to_owned(), v.to_owned()));
        let mut problems = Vec::new();
        let layer = from_flags(&flags, &tree(), &mut problems).collect().expect("a layer");
        assert_eq!(layer["pool[0].model"].to_string(), "b");
        assert_eq!(layer["pool[0].model"].origin(), Some("flag --set pool.0.model"));
        assert!(problems.is_empty());
    }

    #[test]
    fn the_quotes_of_a_string_may_be_written_and_options_keep_them() {
        let flags = [("pool[0].model", "\"a\""), ("pool[0].options.depth", "\"3\"")];
        let flags = flags.map(|(path, value)| (path.to_owned(), value.to_owned()));
        let layer = from_flags(&flags, &tree(), &mut Vec::new()).collect().expect("a layer");
        assert_eq!(layer["pool[0].model"].to_string(), "a");
        assert_eq!(layer["pool[0].options.depth"].to_string(), "\"3\"");
        assert_eq!(unquoted("a \"b\""), "a \"b\"");
    }

    #[test]
    fn a_malformed_or_unknown_path_of_a_flag_is_refused() {
        for (written, complaint) in [
            ("", "no such setting"),
            ("pool[", "no such setting"),
            ("pool[0]model", "no such setting; did you mean `pool[0].model`?"),
            ("pool[x].model", "no such setting; did you mean `pool[0].model`?"),
            ("pool[0].options.", "no such setting"),
            ("pool[0].options.a b", "no such setting"),
            ("brokr.url", "no such setting; did you mean `broker.url`?"),
            ("pool[7].model", "there is 1 pool"),
        ] {
            let mut problems = Vec::new();
            from_flags(&[(written.to_owned(), "x".to_owned())], &tree(), &mut problems);
            let said = problems[0].to_string();
            assert!(said.starts_with(&format!("--set {written}: {complaint}")), "{said}");
        }
    }

    #[test]
    fn an_address_in_the_place_of_a_flags_path_is_masked() {
        let mut problems = Vec::new();
        let written = "amqp://me:hunter2@host".to_owned();
        from_flags(&[(written, String::new())], &tree(), &mut problems);
        assert_eq!(problems.len(), 1);
        assert!(!problems[0].to_string().contains("hunter2"));
    }
}
