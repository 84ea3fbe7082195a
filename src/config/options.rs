//! What `[pool.options]` may hold: how a model declares its options, and the check of the values that the settings
//! give. Does not know which model takes which options. Does no I/O.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use serde_json::Value;

use super::problem::{nearest, unknown_key};

/// The options of a pool's model, by name.
pub type Options = BTreeMap<String, Value>;

/// An option that a model takes.
#[derive(Clone, Debug)]
pub struct OptionSpec {
    /// Its name in `[pool.options]`.
    pub name: &'static str,
    /// Its type and range.
    pub takes: Takes,
    /// The value if it is not set.
    pub default: OptionDefault,
    /// What it is for, as Markdown in one line.
    pub help: &'static str,
}

/// The type of an option, with its range.
#[derive(Clone, Debug)]
pub enum Takes {
    /// A whole number within the range.
    Whole(RangeInclusive<u64>),
    /// `true` or `false`.
    Switch,
    /// Text.
    Text,
    /// One of these texts.
    Choice(&'static [&'static str]),
}

/// The default of an option.
#[derive(Clone, Copy, Debug)]
pub enum OptionDefault {
    /// This value, in JSON.
    Value(&'static str),
    /// A value that follows from the model or from other options; the text says how.
    Derived(&'static str),
}

/// A mistake in one option.
#[derive(Clone, Debug, PartialEq)]
pub struct OptionProblem {
    /// The option's name, as written.
    pub option: String,
    /// Its value; none if the name is the mistake.
    pub value: Option<Value>,
    /// What is wrong, or what was expected.
    pub problem: String,
}

impl OptionProblem {
    /// The problem of a value that is not what `expected` describes.
    pub fn expected(option: &str, value: impl Into<Value>, expected: impl fmt::Display) -> Self {
        let problem = format!("expected {expected}");
        Self { option: option.to_owned(), value: Some(value.into()), problem }
    }
}

impl fmt::Display for OptionProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.option)?;
        if let Some(value) = &self.value {
            write!(f, " = {value}")?;
        }
        write!(f, ": {}", self.problem)
    }
}

impl Takes {
    fn accepts(&self, value: &Value) -> bool {
        match self {
            Self::Whole(range) => value.as_u64().is_some_and(|number| range.contains(&number)),
            Self::Switch => value.is_boolean(),
            Self::Text => value.is_string(),
            Self::Choice(names) => value.as_str().is_some_and(|name| names.contains(&name)),
        }
    }
}

/// Completes a sentence that begins with "expected".
impl fmt::Display for Takes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(range) => match (range.start(), range.end()) {
                (start, &u64::MAX) => write!(f, "a whole number, at least {start}"),
                (start, end) => write!(f, "a whole number from {start} to {end}"),
            },
            Self::Switch => f.write_str("true or false"),
            Self::Text => f.write_str("text in quotes"),
            Self::Choice(names) => {
                let names: Vec<String> = names.iter().map(|name| format!("\"{name}\"")).collect();
                f.write_str(&names.join(" or "))
            }
        }
    }
}

/// Checks the options `written` in the settings for a model that takes `specs`. Returns one problem for each wrong
/// option.
pub fn check_options(specs: &[OptionSpec], written: &Options) -> Vec<OptionProblem> {
    let problem_of = |(name, value): (&String, &Value)| {
        let Some(spec) = specs.iter().find(|spec| spec.name == name) else {
            let known = || specs.iter().map(|spec| spec.name);
            let problem = match nearest(name, known()) {
                Some(_) => unknown_key(name, known()),
                None => format!("{}; {}", unknown_key(name, known()), list_known(specs)),
            };
            return Some(OptionProblem { option: name.clone(), value: None, problem });
        };
        let is_accepted = spec.takes.accepts(value);
        (!is_accepted).then(|| OptionProblem::expected(name, value.clone(), &spec.takes))
    };
    written.iter().filter_map(problem_of).collect()
}

fn list_known(specs: &[OptionSpec]) -> String {
    if specs.is_empty() {
        return "this model takes no options".to_owned();
    }
    let names: Vec<String> = specs.iter().map(|spec| format!("`{}`", spec.name)).collect();
    format!("this model takes {}", names.join(", "))
}

/// The options `written` in the settings, and the defaults of all others. An option that is not written and whose
/// default is derived is left out.
pub fn with_defaults(specs: &[OptionSpec], written: &Options) -> serde_json::Map<String, Value> {
    let default = |spec: &OptionSpec| match spec.default {
        OptionDefault::Value(json) => Some((spec.name.to_owned(), serde_json::from_str(json).ok()?)),
        OptionDefault::Derived(_) => None,
    };
    let written = written.iter().map(|(name, value)| (name.clone(), value.clone()));
    specs.iter().filter_map(default).chain(written).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SPECS: [OptionSpec; 4] = [
        OptionSpec {
            name: "context",
            takes: Takes::Whole(2..=9),
            default: OptionDefault::Derived("the model's"),
            help: "",
        },
        OptionSpec { name: "is_on", takes: Takes::Switch, default: OptionDefault::Value("false"), help: "" },
        OptionSpec {
            name: "numbers",
            takes: Takes::Choice(&["f32", "bf16"]),
            default: OptionDefault::Value("\"f32\""),
            help: "",
        },
        OptionSpec { name: "prompt", takes: Takes::Text, default: OptionDefault::Derived("none"), help: "" },
    ];

    fn problems(specs: &[OptionSpec], written: Value) -> Vec<String> {
        let written = written.as_object().unwrap().clone().into_iter().collect();
        check_options(specs, &written).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn options_of_the_right_type_and_range_pass() {
        let written = json!({"context": 9, "is_on": true, "numbers": "bf16", "prompt": ""});
        assert!(problems(&SPECS, written).is_empty());
        assert!(problems(&[], json!({})).is_empty());
    }

    #[test]
    fn a_value_of_another_type_or_range_is_shown_with_what_was_expected() {
        let written = json!({"context": 1, "is_on": 1, "numbers": "f8", "prompt": 5});
        let expected = [
            "context = 1: expected a whole number from 2 to 9",
            "is_on = 1: expected true or false",
            "numbers = \"f8\": expected \"f32\" or \"bf16\"",
            "prompt = 5: expected text in quotes",
        ];
        assert_eq!(problems(&SPECS, written), expected);
        for value in [json!(-2), json!(2.5), json!("3"), json!(null)] {
            assert_eq!(problems(&SPECS, json!({ "context": value })).len(), 1);
        }
    }

    #[test]
    fn an_unknown_option_gets_a_suggestion_or_the_list_of_known_ones() {
        let contxt = json!({"contxt": 1});
        assert_eq!(problems(&SPECS, contxt), ["contxt: unknown key; did you mean `context`?"]);
        let other = problems(&SPECS, json!({"temperature": 1}));
        let all = "temperature: unknown key; this model takes `context`, `is_on`, `numbers`, `prompt`";
        assert_eq!(other, [all]);
        assert_eq!(problems(&[], json!({"a": 1})), ["a: unknown key; this model takes no options"]);
    }

    #[test]
    fn a_written_option_overrides_its_default() {
        let written = [("numbers".to_owned(), json!("bf16"))].into();
        let all = Value::Object(with_defaults(&SPECS, &written));
        assert_eq!(all, json!({"is_on": false, "numbers": "bf16"}));
    }
}
