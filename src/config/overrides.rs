//! Reads environment variables and flags into layers. Decides which variables are settings. Refuses a name that is
//! neither in the tree of the lower layers nor an option of a model. The caller passes the environment in.

use std::collections::BTreeMap;

use ::config::{Map, Value, ValueKind};

use super::files::Layer;
use super::path::{SettingPath, Step};
use super::problem::{Problem, unknown_key};
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
    let mut amqp_url = Map::new();
    let mut sconce_variables = Map::new();
    for (name, text) in variables {
        let origin = format!("environment variable {name}");
        if name == AMQP_URL && !text.is_empty() {
            amqp_url.insert("broker.url".to_owned(), Value::new(Some(&origin), text));
            continue;
        }
        let Some(setting) = name.strip_prefix(PREFIX) else {
            continue;
        };
        let is_kubernetes_service = KUBERNETES_SERVICE.iter().any(|prefix| name.starts_with(prefix));
        if is_kubernetes_service || NOT_SETTINGS.contains(&name.as_str()) {
            continue;
        }
        match SettingPath::from_variable(setting).map(|path| locate(path, tree)) {
            Some(Ok(path)) => {
                sconce_variables.insert(path, Value::new(Some(&origin), text));
            }
            Some(Err(mut problem)) => {
                if let Some(meant) = same_but_underscores(setting, tree) {
                    problem.expected = format!("unknown key; did you mean `{PREFIX}{meant}`?");
                }
                problems.push(problem.with_origin(origin));
            }
            None => problems.push(Problem::new(
                name.as_str(),
                "expected SCONCE_ and a setting, with `__` between levels: SCONCE_BROKER__URL",
            )),
        }
    }
    [Layer::new(amqp_url), Layer::new(sconce_variables)]
}

/// Reads the flags. If two name the same setting, the later one wins. `tree` holds all settings of the lower layers.
pub(super) fn from_flags(flags: &[(String, String)], tree: &Value, problems: &mut Vec<Problem>) -> Layer {
    let mut values = Map::new();
    for (written, text) in flags {
        // If the user forgot the path, `written` is the value, which may be an address with a password.
        let shown = redact_url(written);
        let origin = format!("flag --set {shown}");
        match SettingPath::from_flag(written).map(|path| locate(path, tree)) {
            Some(Ok(path)) => {
                // A model's option may need its quotes: they tell a string from a number.
                let text = if path.contains(".options.") { text } else { unquoted(text) };
                values.insert(path, Value::new(Some(&origin), text));
            }
            Some(Err(problem)) => problems.push(problem.with_origin(origin)),
            None => problems.push(Problem::new(
                format!("--set {shown}"),
                "expected a setting's path, such as broker.url or pool[0].model",
            )),
        }
    }
    Layer::new(values)
}

/// The text of a string in TOML's quotes. What is not quoted, or has more quotes or escapes, stays as it is.
fn unquoted(text: &str) -> &str {
    let inner = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    inner.filter(|inner| !inner.contains(['"', '\\'])).unwrap_or(text)
}

/// Checks that the path leads to a single setting. Returns it in the syntax of the `config` crate.
fn locate(path: SettingPath, tree: &Value) -> Result<String, Problem> {
    let refuse = |expected: String| Err(Problem::new(path.to_string(), expected));
    if is_model_option(path.steps(), tree) {
        return Ok(path.to_string());
    }
    let mut value = tree;
    for step in path.steps() {
        value = match (step, &value.kind) {
            (Step::Key(key), ValueKind::Table(table)) => match table.get(key) {
                Some(value) => value,
                None => return refuse(unknown_key(key, table.keys().map(String::as_str))),
            },
            (Step::Index(index), ValueKind::Array(items)) if holds_sections(items) => {
                match items.get(*index) {
                    Some(value) => value,
                    None => return refuse(index_out_of_range(items.len())),
                }
            }
            (Step::Key(_), ValueKind::Array(items)) if holds_sections(items) => {
                return refuse("expected a number after the list's name: pool[0]".to_owned());
            }
            (_, ValueKind::Table(_)) => return refuse("expected a key, not a number".to_owned()),
            _ => return refuse("no such setting: its parent is a single value".to_owned()),
        };
    }
    match &value.kind {
        ValueKind::Table(_) => refuse("expected one of the keys of this section".to_owned()),
        ValueKind::Array(items) if holds_sections(items) || path.to_string() == "pool" => {
            refuse("expected one of the keys of one pool, such as pool[0].model".to_owned())
        }
        _ => Ok(path.to_string()),
    }
}

/// The variable, without the prefix, that differs from `written` only in its numbers of underscores. None if no setting
/// has such a variable.
fn same_but_underscores(written: &str, tree: &Value) -> Option<String> {
    fn collect(name: String, value: &Value, all: &mut Vec<String>) {
        let child_name = |level: &str| {
            if name.is_empty() { level.to_uppercase() } else { format!("{name}__{}", level.to_uppercase()) }
        };
        match &value.kind {
            ValueKind::Table(table) => {
                for (key, value) in table {
                    collect(child_name(key), value, all);
                }
            }
            ValueKind::Array(items) if holds_sections(items) => {
                for (index, value) in items.iter().enumerate() {
                    collect(child_name(&index.to_string()), value, all);
                }
            }
            _ => all.push(name),
        }
    }
    let with_single =
        |name: &str| name.split('_').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("_");
    let mut all = Vec::new();
    collect(String::new(), tree, &mut all);
    let written = with_single(&written.to_uppercase());
    all.into_iter().filter(|name| with_single(name) == written).min()
}

/// Whether the path is an option of a pool's model. Any name is accepted, because only the model knows its options.
fn is_model_option(steps: &[Step], tree: &Value) -> bool {
    let [Step::Key(pool), Step::Index(index), Step::Key(options), Step::Key(_)] = steps else { return false };
    let pools = match &tree.kind {
        ValueKind::Table(table) => table.get("pool"),
        _ => None,
    };
    let has_index = |pools: &Value| matches!(&pools.kind, ValueKind::Array(items) if *index < items.len());
    pool == "pool" && options == "options" && pools.is_some_and(has_index)
}

fn holds_sections(items: &[Value]) -> bool {
    let is_table = |item: &Value| matches!(item.kind, ValueKind::Table(_));
    items.first().is_some_and(is_table)
}

fn index_out_of_range(pools: usize) -> String {
    match pools {
        1 => "there is 1 pool, pool[0]; write further ones as [[pool]] in a file".to_owned(),
        _ => format!("there are {pools} pools, counted from 0; write further ones in a file"),
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
            ("SCONCE_BROKR__URL", "brokr.url: unknown key; did you mean `broker`?"),
            ("SCONCE_POOL__1__MODEL", "pool[1].model: there is 1 pool"),
            ("SCONCE_POOL__MODEL", "pool.model: expected a number"),
            ("SCONCE_POOL", "pool: expected one of the keys"),
            ("SCONCE_BROKER", "broker: expected one of the keys"),
            ("SCONCE_BROKER__0", "broker[0]: expected a key"),
            ("SCONCE_BROKER__URL__X", "broker.url.x: no such setting"),
            ("SCONCE_", "SCONCE_: expected SCONCE_ and a setting"),
        ] {
            let (_, set, problems) = environment(&[(name, "hunter2")]);
            assert!(set.is_empty());
            assert_eq!(problems.len(), 1, "{name}");
            assert!(problems[0].starts_with(complaint), "{}", problems[0]);
            assert!(problems[0].contains(name) && !problems[0].contains("hunter2"));
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
    fn a_malformed_flag_is_refused() {
        let mut problems = Vec::new();
        from_flags(&[("pool[".to_owned(), "x".to_owned())], &tree(), &mut problems);
        assert!(problems[0].to_string().starts_with("--set pool[: expected a setting's path"));
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
