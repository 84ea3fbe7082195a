//! Refuses what llguidance 1.9 is known to compile wrongly, so that no answer breaks its format: names of properties,
//! numbers and expressions of a JSON schema. Each check names the defect. Pure.

use llguidance::derivre::{RegexAst, RegexBuilder};
use llguidance::regex_to_lark;
use regex_syntax::hir::{Class, Hir, HirKind};
use serde_json::{Map, Number, Value};

/// The limit of the work for one pattern of names, in derivre's units: as llguidance's own checks of names.
const CHECK_LIMIT: u64 = 10_000;
/// The largest whole number that a double holds exactly. llguidance converts bounds and constants to doubles.
const MAX_EXACT: f64 = 9_007_199_254_740_991.0;
/// The largest `multipleOf` whose remainders, times ten, fit into the 32 bits that derivre computes them in.
const MAX_MULTIPLE: f64 = 400_000_000.0;
/// Keywords whose content is a value, which may look like a schema.
const VALUES: [&str; 4] = ["const", "enum", "default", "examples"];
/// Keywords whose content is an object of schemas by names, which may look like keywords.
const MAPS: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

/// Checks a schema and those inside it.
///
/// # Errors
/// What of the schema cannot be taken.
pub(super) fn check(schema: &Value) -> Result<(), String> {
    match schema {
        Value::Object(fields) => {
            check_names(fields)?;
            check_numbers(fields)?;
            check_expressions(fields)?;
            for (name, inner) in fields {
                match inner {
                    _ if VALUES.contains(&&**name) => {}
                    Value::Object(map) if MAPS.contains(&&**name) => map.values().try_for_each(check)?,
                    _ => check(inner)?,
                }
            }
            Ok(())
        }
        Value::Array(all) => all.iter().try_for_each(check),
        _ => Ok(()),
    }
}

/// Refuses `patternProperties` that match only names that `properties` already gives, while `additionalProperties`
/// forbids all others. No further property can follow then, but llguidance allows the comma before one, and the text
/// ends in the middle.
fn check_names(schema: &Map<String, Value>) -> Result<(), String> {
    let object = |field: &str| schema.get(field).and_then(Value::as_object);
    let (Some(properties), Some(patterns)) = (object("properties"), object("patternProperties")) else {
        return Ok(());
    };
    if schema.get("additionalProperties") != Some(&Value::Bool(false)) || patterns.is_empty() {
        return Ok(());
    }
    let names = properties.keys().cloned().map(RegexAst::Literal).collect();
    let other = RegexAst::Not(Box::new(RegexAst::Or(names)));
    if patterns.keys().any(|pattern| matches_some(pattern, &other)) {
        return Ok(());
    }
    let first = patterns.keys().next().map_or("", String::as_str);
    Err(format!(
        "patternProperties such as {first:?} match only names that properties has, and additionalProperties is false: \
         write what they require into properties"
    ))
}

/// Whether the pattern matches a name among `others`. Also true if that cannot be found out within the limit, or if the
/// pattern is broken, which llguidance reports.
fn matches_some(pattern: &str, others: &RegexAst) -> bool {
    let found = || -> Option<bool> {
        let mut builder = RegexBuilder::new();
        let pattern = builder.mk_regex_for_serach(&regex_to_lark(pattern, "dw")).ok()?;
        let both = builder.mk(&RegexAst::And(vec![RegexAst::ExprRef(pattern), others.clone()])).ok()?;
        Some(!builder.to_regex_limited(both, CHECK_LIMIT).ok()?.always_empty())
    };
    found().unwrap_or(true)
}

/// Refuses numbers that llguidance rounds, and ranges whose excluded end it allows.
fn check_numbers(schema: &Map<String, Value>) -> Result<(), String> {
    let constants = schema.get("const").into_iter();
    let listed = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
    let bounds = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
    let bounds = bounds.into_iter().filter_map(|name| schema.get(name));
    for number in constants.chain(listed).chain(bounds).filter_map(Value::as_number) {
        if !is_exact(number) {
            return Err(format!(
                "{number} is beyond ±9007199254740991, where whole numbers are not exact: use a string with a pattern"
            ));
        }
    }
    let number = |name: &str| schema.get(name).and_then(Value::as_f64);
    if let Some(multiple) = number("multipleOf").filter(|it| *it > MAX_MULTIPLE) {
        return Err(format!("multipleOf is {multiple}; at most {MAX_MULTIPLE} is taken"));
    }
    let (low, high) = (number("exclusiveMinimum"), number("exclusiveMaximum"));
    let (lowest, highest) = (low.or(number("minimum")), high.or(number("maximum")));
    // Between a whole number and the next one, llguidance begins with that number's own digits.
    let is_wrong = |excluded: f64, other: f64| excluded.fract() == 0.0 && (other - excluded).abs() < 1.0;
    let is_integer = schema.get("type").and_then(Value::as_str) == Some("integer");
    let from = low.zip(highest).filter(|(low, high)| *low >= 0.0 && is_wrong(*low, *high));
    let to = high.zip(lowest).filter(|(high, low)| *high <= 0.0 && is_wrong(*high, *low));
    match from.or(to).filter(|_| !is_integer) {
        Some((excluded, other)) => Err(format!(
            "the range between {excluded} (exclusive) and {other} is not supported: exclude a number that is not whole"
        )),
        None => Ok(()),
    }
}

/// Whether a whole number is one that a double holds exactly. Other numbers are doubles already.
fn is_exact(number: &Number) -> bool {
    number.is_f64() || number.as_f64().is_some_and(|value| value.abs() <= MAX_EXACT)
}

/// Refuses expressions with a class of characters that has all control characters, but not the quotation mark or the
/// backslash: derivre adds these two, which it needs to write control characters in JSON.
fn check_expressions(schema: &Map<String, Value>) -> Result<(), String> {
    let pattern = schema.get("pattern").and_then(Value::as_str).into_iter();
    let names = schema.get("patternProperties").and_then(Value::as_object).into_iter().flat_map(Map::keys);
    for expression in pattern.chain(names.map(String::as_str)) {
        // llguidance reports what is broken.
        if regex_syntax::parse(expression).is_ok_and(|parsed| has_wrong_class(&parsed)) {
            return Err(format!(
                "the expression {expression:?} has a class such as [^\"] that excludes the quotation mark or the backslash, \
                 but no control characters: exclude these too, as in [^\"\\x00-\\x1f]"
            ));
        }
    }
    Ok(())
}

fn has_wrong_class(expression: &Hir) -> bool {
    match expression.kind() {
        HirKind::Class(Class::Unicode(class)) => {
            let has = |character: char| {
                class.iter().any(|range| range.start() <= character && character <= range.end())
            };
            // A class without the line feed, which `.` is too, counts as one with all.
            ('\0'..='\x1f').all(|it| it == '\n' || has(it)) && !(has('"') && has('\\'))
        }
        HirKind::Class(Class::Bytes(_)) | HirKind::Empty | HirKind::Literal(_) | HirKind::Look(_) => false,
        HirKind::Repetition(repetition) => has_wrong_class(&repetition.sub),
        HirKind::Capture(capture) => has_wrong_class(&capture.sub),
        HirKind::Concat(all) | HirKind::Alternation(all) => all.iter().any(has_wrong_class),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn patterns_that_match_no_further_name_are_refused() {
        let object = |patterns: Value, additional: Value| {
            json!({
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "patternProperties": patterns,
                "additionalProperties": additional,
            })
        };
        let inside = |schema: Value| json!({"items": {"anyOf": [{"type": "null"}, schema]}});
        let named = object(json!({"^(a|b)$": {"minimum": 3}}), json!(false));
        for refused in
            [named.clone(), inside(named.clone()), object(json!({"^a$": {}, "^b$": {}}), json!(false))]
        {
            let reason = check(&refused).unwrap_err();
            assert!(reason.contains("patternProperties"), "{reason}");
        }
        for accepted in [
            object(json!({"^(a|b)$": {}}), json!(true)),
            object(json!({"^(a|b|c)$": {}}), json!(false)),
            object(json!({"^a": {}}), json!(false)),
            object(json!({}), json!(false)),
            object(json!({"(": {}}), json!(false)),
            json!({"const": named}),
        ] {
            assert_eq!(check(&accepted), Ok(()), "{accepted}");
        }
        // A property may be called as a keyword is.
        assert!(check(&json!({"properties": {"enum": named, "const": {"type": "string"}}})).is_err());
    }

    #[test]
    fn numbers_that_would_be_rounded_are_refused() {
        for refused in [
            json!({"const": 9_007_199_254_740_993_u64}),
            json!({"enum": ["a", 1_152_921_504_606_846_977_u64]}),
            json!({"properties": {"id": {"type": "integer", "minimum": 1_700_000_000_000_000_001_u64}}}),
            json!({"const": i64::MIN}),
            json!({"type": "integer", "multipleOf": 4_294_967_295_u64}),
        ] {
            assert!(check(&refused).is_err(), "{refused}");
        }
        for accepted in [
            json!({"const": 9_007_199_254_740_991_u64}),
            json!({"minimum": -5, "maximum": 1e300}),
            json!({"multipleOf": 0.01}),
            json!({"default": u64::MAX}),
        ] {
            assert_eq!(check(&accepted), Ok(()), "{accepted}");
        }
    }

    #[test]
    fn ranges_whose_excluded_end_would_be_allowed_are_refused() {
        for refused in [
            json!({"type": "number", "exclusiveMinimum": 0, "maximum": 0.001}),
            json!({"type": "number", "exclusiveMinimum": 7, "exclusiveMaximum": 7.5}),
            json!({"type": "number", "minimum": -0.001, "exclusiveMaximum": 0}),
        ] {
            assert!(check(&refused).is_err(), "{refused}");
        }
        for accepted in [
            json!({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
            json!({"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.7}),
            json!({"type": "number", "exclusiveMinimum": 0}),
            json!({"type": "number", "minimum": 0, "maximum": 0.5}),
        ] {
            assert_eq!(check(&accepted), Ok(()), "{accepted}");
        }
    }

    #[test]
    fn classes_to_which_quotation_marks_would_be_added_are_refused() {
        let pattern = |pattern: &str| json!({"type": "string", "pattern": pattern});
        for refused in ["^[^\"]$", "^[^\"\\\\]{12}$", "[\\x00-\\x1f]", "a([^ -~]|b)+", "^[^\"\\n]*$"] {
            assert!(check(&pattern(refused)).is_err(), "{refused}");
        }
        for accepted in [
            "^[a-z]+$",
            "^.*$",
            "[^a]",
            "\\s",
            "[\\t\\n]",
            "[\\x00-\\x08]",
            "^[^\\s\"]$",
            "^[^\"\\x00-\\x1f]*$",
            "(",
        ] {
            assert_eq!(check(&pattern(accepted)), Ok(()), "{accepted}");
        }
        assert!(check(&json!({"patternProperties": {"^[^\"]$": {}}})).is_err());
    }
}
