//! The fields that a command gives to each of its requests. Compares them with those of an earlier run, and decides when
//! a pool's refusal of one of them concerns all requests. Does no I/O.

use serde::Deserialize;
use serde_json::{Map, Value as Json};

use crate::protocol::{Message, printable};

/// The names of the fields that all requests of a command have in common; none once a pool has taken them. If a pool
/// refuses one of these fields, it would refuse all requests.
#[derive(Clone, Debug, Default)]
pub struct CommonFields(Vec<String>);

impl CommonFields {
    /// The fields of these names.
    pub fn new<'a>(names: impl Iterator<Item = &'a str>) -> Self {
        Self(names.map(str::to_owned).collect())
    }

    /// Why the pool would refuse every request of the command; none if this reply does not say so.
    pub fn refusal_in(&mut self, status: i64, reply: &Message) -> Option<String> {
        #[derive(Deserialize)]
        struct Body {
            error: Refusal,
        }
        #[derive(Deserialize)]
        struct Refusal {
            message: String,
            param: String,
        }
        if status == 200 {
            self.0.clear();
        }
        if self.0.is_empty() || ![400, 404, 413].contains(&status) {
            return None;
        }
        let Body { error: Refusal { message, param } } = serde_json::from_slice(&reply.body).ok()?;
        // The path of an item of a list, such as `labels[2]`, begins with the field.
        let field = param.split(['[', '.']).next()?;
        self.0.iter().any(|name| name == field).then(|| printable(&message))
    }
}

/// The names of the values that differ.
pub(super) fn changed<'a>(then: &'a Map<String, Json>, now: &'a Map<String, Json>) -> Vec<&'a String> {
    let names = then.keys().chain(now.keys().filter(|name| !then.contains_key(*name)));
    names.filter(|name| then.get(*name) != now.get(*name)).collect()
}

/// A sentence for each field that differs, with both values.
pub(super) fn field_differences(then: &Map<String, Json>, now: &Map<String, Json>) -> Vec<String> {
    let shown = |value: Option<&Json>| value.map_or("missing".to_owned(), Json::to_string);
    let sentence = |name: &String| {
        format!("--field {name} was {}, and is {}", shown(then.get(name)), shown(now.get(name)))
    };
    changed(then, now).into_iter().map(sentence).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_refused_field_of_the_command_concerns_all_requests_until_one_is_answered() {
        let refusal = |fields: &mut CommonFields, status, param: &str| {
            let body = json!({"error": {"message": "no\u{1b}", "param": param, "code": "invalid_value"}});
            fields.refusal_in(status, &Message { body: body.to_string().into(), ..Message::default() })
        };
        let fields = || CommonFields::new(["labels", "url"].into_iter());
        for (status, param, is_common) in [
            (400, "labels", true),
            (413, "labels[2]", true),
            (404, "url", true),
            (500, "labels", false),
            (400, "input", false),
        ] {
            let found = refusal(&mut fields(), status, param);
            assert_eq!(found.as_deref(), is_common.then_some("no "), "{status} {param}");
        }
        let mut answered = fields();
        assert_eq!(refusal(&mut answered, 200, "labels"), None);
        assert_eq!(refusal(&mut answered, 400, "labels"), None, "it is that row's fault");
        assert_eq!(CommonFields::default().refusal_in(400, &Message::default()), None);
    }

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
