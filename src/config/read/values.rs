//! Readers of single values: text, names, numbers, switches, lists, durations, sizes. Each error says what was
//! expected. Environment variables and flags are always text, which the readers accept for any type.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use ::config::{File, FileFormat, Source, Value, ValueKind};

use super::super::text::{A_DURATION, A_SIZE, parse_duration, parse_size, show_duration, show_size};
use super::reader::Expected;

/// Prefixes of the origins whose values can only be text.
const TEXT_ORIGINS: [&str; 2] = ["flag ", "environment variable "];

/// Any text.
pub(crate) fn text(value: &Value) -> Result<String, Expected> {
    match &value.kind {
        ValueKind::String(text) => Ok(text.clone()),
        _ => Err("text in quotes".to_owned()),
    }
}

/// Text that is not empty, without blanks around it or control characters in it.
pub(crate) fn name(value: &Value) -> Result<String, Expected> {
    let text = text(value)?;
    if text.is_empty() {
        return Err("a name that is not empty".to_owned());
    }
    if text.trim() != text || text.contains(char::is_control) {
        return Err("a name without blanks around it or control characters in it".to_owned());
    }
    Ok(text)
}

/// A [`name`], or `""` for none.
pub(crate) fn optional_name(value: &Value) -> Result<Option<String>, Expected> {
    match text(value)?.as_str() {
        "" => Ok(None),
        _ => name(value).map(Some),
    }
}

/// A file's path, or `""` for none.
pub(crate) fn optional_file(value: &Value) -> Result<Option<PathBuf>, Expected> {
    Ok(optional_name(value)?.map(PathBuf::from))
}

/// One of these names; returns the value that is paired with it.
pub(crate) fn choice<T: Copy>(all: &'static [(T, &str)]) -> impl Fn(&Value) -> Result<T, Expected> {
    move |value| {
        let written = text(value).ok();
        let found = all.iter().find(|(_, name)| written.as_deref() == Some(*name));
        found.map(|(it, _)| *it).ok_or_else(|| {
            let names: Vec<String> = all.iter().map(|(_, name)| format!("\"{name}\"")).collect();
            names.join(" or ")
        })
    }
}

/// `true` or `false`, also as text.
pub(crate) fn switch(value: &Value) -> Result<bool, Expected> {
    match &value.kind {
        ValueKind::Boolean(switch) => Ok(*switch),
        ValueKind::String(text) if text == "true" => Ok(true),
        ValueKind::String(text) if text == "false" => Ok(false),
        _ => Err("true or false".to_owned()),
    }
}

/// A whole number within the range, also as text.
pub(crate) fn whole<T: TryFrom<u64>>(range: RangeInclusive<u64>) -> impl Fn(&Value) -> Result<T, Expected> {
    move |value| {
        let number = match &value.kind {
            ValueKind::I64(number) => u64::try_from(*number).ok(),
            ValueKind::String(text) => text.parse().ok(),
            _ => None,
        };
        number.filter(|number| range.contains(number)).and_then(|number| T::try_from(number).ok()).ok_or_else(
            || match (*range.start(), *range.end()) {
                (start, u64::MAX) => format!("a whole number, at least {start}"),
                (start, end) => format!("a whole number from {start} to {end}"),
            },
        )
    }
}

/// None for the text `word`; any other value is read with `read`.
pub(crate) fn unless<T>(
    word: &'static str,
    read: impl Fn(&Value) -> Result<T, Expected>,
) -> impl Fn(&Value) -> Result<Option<T>, Expected> {
    move |value| match &value.kind {
        ValueKind::String(text) if text == word => Ok(None),
        _ => read(value).map(Some).map_err(|expected| format!("\"{word}\" or {expected}")),
    }
}

/// A value with a unit, within the range. `parse` reads it. Errors call it `what`, describe the expected `form`, and
/// show the range's limits with `show`.
fn with_unit<T: PartialOrd + Copy>(
    what: &'static str,
    form: &'static str,
    range: RangeInclusive<T>,
    parse: fn(&str) -> Option<T>,
    show: fn(T) -> String,
) -> impl Fn(&Value) -> Result<T, Expected> {
    move |value| {
        let read = text(value).ok().and_then(|text| parse(text.trim())).ok_or(form)?;
        let [start, end] = [range.start(), range.end()].map(|limit| show(*limit));
        if range.contains(&read) { Ok(read) } else { Err(format!("a {what} from {start} to {end}")) }
    }
}

/// A duration within the range.
pub(crate) fn duration(range: RangeInclusive<Duration>) -> impl Fn(&Value) -> Result<Duration, Expected> {
    with_unit("duration", A_DURATION, range, parse_duration, show_duration)
}

/// A duration within the range, in whole seconds.
pub(crate) fn whole_seconds(
    range: RangeInclusive<Duration>,
) -> impl Fn(&Value) -> Result<Duration, Expected> {
    move |value| match duration(range.clone())(value)? {
        it if it.subsec_nanos() == 0 => Ok(it),
        _ => Err("a duration in whole seconds".to_owned()),
    }
}

/// A size in bytes within the range.
pub(crate) fn size(range: RangeInclusive<u64>) -> impl Fn(&Value) -> Result<u64, Expected> {
    with_unit("size", A_SIZE, range, parse_size, show_size)
}

/// A share from 0 to 1, also as text.
pub(crate) fn share(value: &Value) -> Result<f64, Expected> {
    let number = match &value.kind {
        ValueKind::Float(number) => Some(*number),
        ValueKind::I64(number) => Some(*number as f64),
        ValueKind::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    number.filter(|number| (0.0..=1.0).contains(number)).ok_or_else(|| "a number from 0 to 1".to_owned())
}

/// A list of texts. It may also be one text: comma-separated, or an array in TOML or JSON. Blanks around parts are
/// dropped. `a,,b` has three parts, of which the second is empty; an empty text has none.
pub(crate) fn list(value: &Value) -> Result<Vec<String>, Expected> {
    match &value.kind {
        ValueKind::String(written) if written.trim_start().starts_with('[') => {
            let array = parse_array(written).ok_or_else(a_list)?;
            list(&array)
        }
        ValueKind::String(written) if written.trim().is_empty() => Ok(Vec::new()),
        ValueKind::String(written) => Ok(written.split(',').map(|part| part.trim().to_owned()).collect()),
        ValueKind::Array(items) => {
            let parts = items.iter().map(|item| text(item).map_err(|_| a_list()));
            parts.map(|part| Ok(part?.trim().to_owned())).collect()
        }
        _ => Err(a_list()),
    }
}

/// A list of paths.
pub(crate) fn paths(value: &Value) -> Result<Vec<String>, Expected> {
    let paths = list(value)?;
    match paths.iter().any(|path| path.is_empty() || path.contains([':', '\0'])) {
        true => Err("a list of folders, none of them empty or with a \":\" in its name".to_owned()),
        false => Ok(paths),
    }
}

fn a_list() -> Expected {
    "a list of text, such as [\"a\", \"b\"]".to_owned()
}

/// Reads a text that is an array; none for any other text.
pub(crate) fn parse_array(written: &str) -> Option<Value> {
    parse_value(written).filter(|value| matches!(value.kind, ValueKind::Array(_)))
}

/// Parses a flag's or variable's text as a TOML value. Text that is not TOML, and any other value, is returned
/// unchanged.
pub(crate) fn typed(value: &Value) -> Value {
    let is_text = value.origin().is_some_and(|origin| TEXT_ORIGINS.iter().any(|it| origin.starts_with(it)));
    match &value.kind {
        ValueKind::String(text) if is_text => parse_value(text).unwrap_or_else(|| value.clone()),
        _ => value.clone(),
    }
}

/// Reads a text that is one TOML value; none for any other text.
pub(crate) fn parse_value(written: &str) -> Option<Value> {
    let document = format!("value = {}", written.trim());
    let table = File::from_str(&document, FileFormat::Toml).collect().ok()?;
    table.get("value").filter(|_| table.len() == 1).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str) -> Value {
        Value::from(text)
    }

    #[test]
    fn numbers_and_switches_may_be_text() {
        assert_eq!(whole::<u32>(1..=9)(&written("2")), Ok(2));
        assert_eq!(whole::<u32>(1..=9)(&Value::from(2_i64)), Ok(2));
        assert_eq!(switch(&written("true")), Ok(true));
        assert_eq!(switch(&written("false")), Ok(false));
        assert_eq!(switch(&Value::from(true)), Ok(true));
    }

    #[test]
    fn a_value_that_is_no_number_in_range_is_refused_with_the_range() {
        for value in [
            Value::from(0_i64),
            Value::from(10_i64),
            Value::from(-1_i64),
            Value::from(2.0),
            Value::from(true),
            written("many"),
            written(""),
        ] {
            let expected = Err("a whole number from 1 to 9".to_owned());
            assert_eq!(whole::<u32>(1..=9)(&value), expected, "{value}");
        }
        let expected = Err("a whole number, at least 1".to_owned());
        assert_eq!(whole::<u64>(1..=u64::MAX)(&written("0")), expected);
    }

    #[test]
    fn only_true_and_false_are_switches() {
        for value in [written("yes"), written(""), Value::from(1_i64)] {
            assert!(switch(&value).is_err(), "{value}");
        }
    }

    #[test]
    fn a_list_may_come_in_four_spellings() {
        let expected = Ok(vec!["cpu".to_owned(), "cuda:1".to_owned()]);
        assert_eq!(list(&Value::from(vec!["cpu", "cuda:1"])), expected);
        assert_eq!(list(&written("cpu, cuda:1")), expected);
        assert_eq!(list(&written(r#"["cpu","cuda:1"]"#)), expected);
        assert_eq!(list(&written(" ['cpu', 'cuda:1',] ")), expected);
        assert_eq!(list(&written("")), Ok(Vec::new()));
        assert_eq!(list(&written("a,,b")).map(|parts| parts.len()), Ok(3));
    }

    #[test]
    fn what_is_no_list_of_text_is_refused() {
        for value in [
            Value::from(1_i64),
            Value::from(vec![1_i64]),
            written("[1]"),
            written("[\"cpu\""),
            written("[\"cpu\"]\nmore = 1"),
        ] {
            assert!(list(&value).is_err(), "{value}");
        }
    }

    #[test]
    fn a_name_has_no_surrounding_blanks_or_control_characters() {
        assert!(name(&written("embed")).is_ok());
        for value in [written(""), written(" "), written("a "), written("a\nb"), Value::from(1_i64)] {
            assert!(name(&value).is_err(), "{value}");
        }
    }

    #[test]
    fn a_bare_number_is_neither_duration_nor_size() {
        let any = Duration::ZERO..=Duration::MAX;
        assert!(duration(any)(&Value::from(5_i64)).is_err());
        assert!(size(0..=u64::MAX)(&Value::from(5_i64)).is_err());
    }

    #[test]
    fn a_duration_out_of_range_is_refused_with_the_range() {
        let range = Duration::from_secs(1)..=Duration::from_secs(90);
        let expected = Err("a duration from 1s to 1m30s".to_owned());
        assert_eq!(duration(range)(&written("2m")), expected);
    }

    #[test]
    fn a_share_may_be_text_or_a_whole_number() {
        for (written, expected) in [("0", 0.0), ("0.25", 0.25), ("1e-3", 0.001), ("1", 1.0)] {
            assert_eq!(share(&Value::from(written)), Ok(expected));
        }
        assert_eq!((share(&Value::from(1_i64)), share(&Value::from(0.5))), (Ok(1.0), Ok(0.5)));
        for wrong in ["-0.1", "1.01", "NaN", "inf", "all", ""] {
            assert!(share(&Value::from(wrong)).is_err(), "{wrong}");
        }
    }
}
