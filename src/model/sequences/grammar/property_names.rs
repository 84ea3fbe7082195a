//! Refuses schemas whose `patternProperties` match only names that `properties` already gives, while
//! `additionalProperties` forbids all others. No further property can follow then, but llguidance allows the comma before
//! one, and the text ends in the middle. Pure.

use llguidance::derivre::{RegexAst, RegexBuilder};
use llguidance::regex_to_lark;
use serde_json::{Map, Value};

/// The limit of the work for one schema object, in derivre's units: as llguidance's own checks of names.
const CHECK_LIMIT: u64 = 10_000;

/// Checks a schema and those inside it.
///
/// # Errors
/// An object of the schema has such `patternProperties`.
pub(super) fn check(schema: &Value) -> Result<(), String> {
    match schema {
        Value::Object(fields) => {
            check_object(fields)?;
            // These hold values, which may look like schemas.
            let is_value = |name: &str| ["const", "enum", "default", "examples"].contains(&name);
            fields.iter().filter(|(name, _)| !is_value(name)).try_for_each(|(_, inner)| check(inner))
        }
        Value::Array(all) => all.iter().try_for_each(check),
        _ => Ok(()),
    }
}

fn check_object(schema: &Map<String, Value>) -> Result<(), String> {
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
    }
}
