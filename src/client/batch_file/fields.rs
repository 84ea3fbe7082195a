//! Compares the fields that a command gives to each request with those of an earlier run. Pure.

use serde_json::{Map, Value as Json};

/// A sentence for each field that differs, with both values.
pub(super) fn field_differences(then: &Map<String, Json>, now: &Map<String, Json>) -> Vec<String> {
    let names = then.keys().chain(now.keys().filter(|name| !then.contains_key(*name)));
    let shown = |value: Option<&Json>| value.map_or("missing".to_owned(), Json::to_string);
    let differs = |name: &&String| then.get(*name) != now.get(*name);
    let sentence = |name: &String| {
        format!("--field {name} was {}, and is {}", shown(then.get(name)), shown(now.get(name)))
    };
    names.filter(differs).map(sentence).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_field_that_differs_is_named_with_both_values() {
        let map = |value: Json| value.as_object().unwrap().clone();
        let (then, now) = (map(json!({"a": 1, "b": "x", "c": 2})), map(json!({"a": 1, "c": 3, "d": null})));
        assert_eq!(
            field_differences(&then, &now),
            [
                "--field b was \"x\", and is missing",
                "--field c was 2, and is 3",
                "--field d was missing, and is null"
            ]
        );
        assert!(field_differences(&now, &now).is_empty());
    }
}
