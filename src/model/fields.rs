//! Reads the fields of a JSON request. Decides what is refused: a field that other servers support and this one
//! does not, a field that is probably mistyped, a value of another type. Other unknown fields are ignored, because
//! clients of OpenAI send some. Values are scanned in place, and copied only when they are read.

use std::fmt;
use std::ops::RangeInclusive;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Number, Value as Json};

use crate::protocol::{Files, Headers, TaskError, TaskErrorKind, Value};

/// Number of characters of an invalid value that an error message quotes.
const EXCERPT_CHARS: usize = 40;

/// How many unknown fields of a request are compared with the known ones. A body of 8 MiB has room for 800,000, each of which
/// would be compared with some 30 names.
pub const MAX_COMPARED_KEYS: usize = 100;

/// Fields of other requests or servers that are one letter away from a supported field. They are not reported as typos.
const NOT_TYPOS: [&str; 8] =
    ["inputs", "text", "texts", "documents", "document", "models", "prompts", "users"];

/// Fields of other servers, and ours that mean the same.
const INSTEAD: [(&str, &str); 15] = [
    ("guided_json", "response_format"),
    ("guided_regex", "response_format"),
    ("initial_prompt", "prompt"),
    ("hotwords", "keywords"),
    ("inputs", "input"),
    ("json_schema", "response_format"),
    ("max_output_tokens", "max_tokens"),
    ("output_dimension", "dimensions"),
    ("repeat_penalty", "repetition_penalty"),
    ("stop_sequences", "stop"),
    ("structured_outputs", "response_format"),
    ("texts", "input"),
    ("top_logprobs", "logprobs"),
    ("vad_filter", "vad"),
    ("word_timestamps", "timestamp_granularities"),
];

/// The fields of a kind of request.
#[derive(Clone, Copy, Debug)]
pub struct Keys {
    /// Fields that this server reads.
    pub supported: &'static [&'static str],
    /// Fields that other servers support and this one does not.
    pub unsupported: &'static [Unsupported],
}

/// A field that other servers support and this one does not.
#[derive(Clone, Copy, Debug)]
pub struct Unsupported {
    /// Its name.
    pub key: &'static str,
    /// The JSON value that means the same as its absence. Any value but this one and `null` is refused.
    pub only_value: &'static str,
}

/// Writes [`Keys`]: the fields that are read, then each unsupported one with the only value that is not refused.
macro_rules! keys {
    ($($supported:literal),+ $(; $($key:literal = $only_value:literal),+)?) => {
        $crate::model::fields::Keys {
            supported: &[$($supported),+],
            unsupported: &[
                $($($crate::model::fields::Unsupported { key: $key, only_value: $only_value }),+)?
            ],
        }
    };
}
pub(super) use keys;

/// The fields of one request; `null` counts as absent.
#[derive(Debug)]
pub struct Fields<'a> {
    values: Vec<(&'static str, &'a RawValue)>,
}

impl<'a> Fields<'a> {
    /// Reads a body.
    ///
    /// # Errors
    /// `Undecodable` for a body that is not UTF-8 or not JSON; `BadInput` if it is not an object, or for a field
    /// that occurs twice, is refused or probably mistyped.
    pub fn parse(body: &'a [u8], keys: &Keys) -> Result<Self, TaskError> {
        let body = std::str::from_utf8(body).map_err(|error| {
            undecodable(format!(
                "the body is not UTF-8: {error}. A message without content_type is read as JSON; a file needs one, such as \
                 application/octet-stream"
            ))
        })?;
        // Some programs write a byte order mark, which is no part of the text.
        let body = body.strip_prefix('\u{feff}').unwrap_or(body);
        let start = body.trim_start_matches([' ', '\t', '\r', '\n']);
        if !start.starts_with('{') {
            return Err(match serde_json::from_str::<IgnoredAny>(body) {
                Ok(_) => bad_body(format!("the body must be a JSON object, got {}", excerpt(start))),
                Err(error) => undecodable(format!("the body is not JSON: {error}")),
            });
        }
        let mut visitor = FieldVisitor {
            keys,
            values: Vec::with_capacity(keys.supported.len()),
            unknown_keys: 0,
            error: None,
        };
        let mut json = serde_json::Deserializer::from_str(body);
        let end = json.deserialize_map(&mut visitor).and_then(|()| json.end());
        end.map_err(|error| match error.classify() {
            serde_json::error::Category::Data => bad_body(format!("the body is refused: {error}")),
            _ => undecodable(format!("the body is not JSON: {error}")),
        })?;
        match visitor.error {
            Some(error) => Err(error),
            None => Ok(Self { values: visitor.values }),
        }
    }

    /// A field's value.
    pub fn get(&self, key: &str) -> Option<&'a RawValue> {
        self.values.iter().find(|(name, _)| *name == key).map(|(_, value)| *value)
    }

    /// A field that must be there.
    ///
    /// # Errors
    /// `BadInput` if it is missing.
    pub fn required(&self, key: &str) -> Result<&'a RawValue, TaskError> {
        self.get(key).ok_or_else(|| TaskError::bad_input(key, format!("{key} is missing")))
    }

    /// The one of two names of the same field that the request uses; `name` if it uses neither.
    ///
    /// # Errors
    /// `BadInput` if it uses both.
    pub fn either(&self, name: &'static str, other: &'static str) -> Result<&'static str, TaskError> {
        match (self.get(name), self.get(other)) {
            (None, Some(_)) => Ok(other),
            (Some(_), Some(_)) => {
                let message = format!("{other} means the same as {name}: send one of them");
                Err(TaskError::bad_input(other, message))
            }
            _ => Ok(name),
        }
    }

    /// The fields of an object.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn object(&self, key: &str, keys: &Keys) -> Result<Option<Self>, TaskError> {
        self.get(key).map(|raw| Self::parse(raw.get().as_bytes(), keys)).transpose()
    }

    /// A string.
    ///
    /// # Errors
    /// `BadInput` if it is of another type.
    pub fn string(&self, key: &str) -> Result<Option<String>, TaskError> {
        self.get(key).map(|raw| string(raw.get(), key)).transpose()
    }

    /// A string of at most `max_bytes` bytes.
    ///
    /// # Errors
    /// `BadInput` if it is longer or of another type.
    pub fn bounded_string(&self, key: &str, max_bytes: usize) -> Result<Option<String>, TaskError> {
        self.get(key).map(|raw| bounded_string(raw.get(), key, max_bytes)).transpose()
    }

    /// A boolean; `default` if it is absent.
    ///
    /// # Errors
    /// `BadInput` if it is of another type.
    pub fn boolean(&self, key: &str, default: bool) -> Result<bool, TaskError> {
        match self.get(key).map(RawValue::get) {
            None => Ok(default),
            Some("true") => Ok(true),
            Some("false") => Ok(false),
            Some(other) => Err(invalid(key, "true or false", other)),
        }
    }

    /// The value that is paired with the field's text, which must be one of these names.
    ///
    /// # Errors
    /// `BadInput` if it is anything else.
    pub fn choice<T: Copy>(&self, key: &str, all: &[(T, &str)]) -> Result<Option<T>, TaskError> {
        let Some(raw) = self.get(key) else { return Ok(None) };
        let text = string(raw.get(), key)?;
        let found = all.iter().find(|(_, name)| *name == text).map(|(value, _)| *value);
        found.map(Some).ok_or_else(|| {
            let names: Vec<String> = all.iter().map(|(_, name)| format!("{name:?}")).collect();
            invalid(key, &format!("one of {}", names.join(", ")), raw.get())
        })
    }

    /// A number within the range.
    ///
    /// # Errors
    /// `BadInput` if it is anything else.
    pub fn number_within(&self, key: &str, range: RangeInclusive<f32>) -> Result<Option<f32>, TaskError> {
        let number = |raw: &RawValue| match serde_json::from_str(raw.get()) {
            Ok(number) if range.contains(&number) => Ok(number),
            _ => Err(invalid(key, &format!("a number from {} to {}", range.start(), range.end()), raw.get())),
        };
        self.get(key).map(number).transpose()
    }

    /// A whole number of 64 bits.
    ///
    /// # Errors
    /// `BadInput` if it is anything else.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, TaskError> {
        let number = |raw: &RawValue| {
            serde_json::from_str(whole(raw.get()))
                .map_err(|_| invalid(key, "a whole number from 0 to 2^64 - 1", raw.get()))
        };
        self.get(key).map(number).transpose()
    }

    /// A whole number, at least 1.
    ///
    /// # Errors
    /// `BadInput` if it is anything else.
    pub fn positive(&self, key: &str) -> Result<Option<usize>, TaskError> {
        let number = |raw: &RawValue| match serde_json::from_str(whole(raw.get())) {
            Ok(number) if number > 0 => Ok(number),
            _ => Err(invalid(key, "a positive integer", raw.get())),
        };
        self.get(key).map(number).transpose()
    }
}

struct FieldVisitor<'k, 'a> {
    keys: &'k Keys,
    values: Vec<(&'static str, &'a RawValue)>,
    unknown_keys: usize,
    /// The first error. It is returned only if the rest of the body is valid JSON.
    error: Option<TaskError>,
}

impl<'de> Visitor<'de> for &mut FieldVisitor<'_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<Key<'de>>()? {
            let key = key.0.as_ref();
            if let Some(name) = self.keys.supported.iter().find(|name| **name == key) {
                if self.values.iter().any(|(known, _)| known == name) {
                    return Err(A::Error::custom(format!("duplicate field `{name}`")));
                }
                let value: &RawValue = map.next_value()?;
                if value.get() != "null" {
                    self.values.push((name, value));
                }
            } else if let Some(unsupported) = self.keys.unsupported.iter().find(|it| it.key == key) {
                let Unsupported { key: name, only_value } = *unsupported;
                let value: &RawValue = map.next_value()?;
                if value.get() != "null" && whole(value.get()) != only_value {
                    let instead = INSTEAD
                        .iter()
                        .find(|(other, ours)| *other == name && self.keys.supported.contains(ours));
                    let message = match instead {
                        Some((_, ours)) => format!("{name} is not supported here; send {ours} in its place"),
                        None => format!("{name} is not supported here; leave it out, or send {only_value}"),
                    };
                    self.error.get_or_insert(TaskError::bad_input(name, message));
                }
            } else {
                self.unknown_keys += 1;
                if self.unknown_keys <= MAX_COMPARED_KEYS && self.error.is_none() {
                    self.error = self.keys.mistyped(key);
                }
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

impl Keys {
    /// Whether requests have a field of this name, which this server may refuse.
    pub fn has(&self, name: &str) -> bool {
        self.supported.contains(&name) || self.unsupported.iter().any(|it| it.key == name)
    }

    /// The error of an unknown `key` that is one letter away from a known one.
    pub fn mistyped(&self, key: &str) -> Option<TaskError> {
        if NOT_TYPOS.contains(&key) {
            return None;
        }
        let names = self.supported.iter().chain(self.unsupported.iter().map(|it| &it.key));
        // A comparison takes time and memory in proportion to the product of the lengths, and a key can be as long as
        // the body. One letter has at most four bytes.
        // Any other letter is one letter away from `n`.
        let is_near = |name: &&str| name.len() > 1 && key.len().abs_diff(name.len()) <= 4;
        let suggestion = names.copied().filter(is_near).find(|name| strsim::osa_distance(name, key) == 1)?;
        let message = format!("{key} is not a field of this request; did you mean {suggestion}?");
        Some(TaskError::bad_input(key, message))
    }
}

/// A whole number without its decimals, if they are zeros: some languages write 4 as `4.0`. Any other text stays as it is.
pub fn whole(raw: &str) -> &str {
    match raw.split_once('.') {
        Some((number, zeros)) if !zeros.is_empty() && zeros.bytes().all(|digit| digit == b'0') => number,
        _ => raw,
    }
}

/// A field's name; it is copied only if it has escapes.
#[derive(Deserialize)]
#[serde(transparent)]
struct Key<'a>(#[serde(borrow)] std::borrow::Cow<'a, str>);

/// Reads one string or a list of strings. Errors name the path of the item (`input`, `input[3]`).
///
/// # Errors
/// `BadInput` if it is neither, or an empty list; `TooLarge` over `max_items` items.
pub fn texts(raw: &RawValue, key: &str, max_items: usize) -> Result<Vec<String>, TaskError> {
    if raw.get().starts_with('"') {
        return Ok(vec![string(raw.get(), key)?]);
    }
    if !raw.get().starts_with('[') {
        return Err(invalid(key, "a string or a list of strings", raw.get()));
    }
    each_item(&list(raw.get(), key, max_items)?, key, string)
}

/// The texts of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Texts {
    /// At least one.
    pub items: Vec<String>,
    /// Whether they came as a list. If so, errors name a text by its index.
    pub is_list: bool,
    /// The field that has them.
    field: &'static str,
}

impl Texts {
    /// Reads the one of two fields that the request has.
    ///
    /// # Errors
    /// As [`texts`], and `BadInput` if it has both or neither.
    pub fn read(
        fields: &Fields<'_>,
        name: &'static str,
        other: &'static str,
        max_items: usize,
    ) -> Result<Self, TaskError> {
        let field = fields.either(name, other)?;
        let input = fields.required(field)?;
        Ok(Self { items: texts(input, field, max_items)?, is_list: input.get().starts_with('['), field })
    }

    /// The path of text `index` in the body.
    pub fn path(&self, index: usize) -> String {
        if self.is_list { format!("{}[{index}]", self.field) } else { self.field.to_owned() }
    }
}

/// Reads each item of the list at `path`. `read` takes the item and its path.
///
/// # Errors
/// The first of `read`.
pub fn each_item<T>(
    items: &[&RawValue],
    path: &str,
    read: impl Fn(&str, &str) -> Result<T, TaskError>,
) -> Result<Vec<T>, TaskError> {
    items.iter().enumerate().map(|(index, item)| read(item.get(), &format!("{path}[{index}]"))).collect()
}

/// The items of a list.
///
/// # Errors
/// `BadInput` if it is not a list, or is empty; `TooLarge` over `max_items` items.
pub fn list<'a>(raw: &'a str, path: &str, max_items: usize) -> Result<Vec<&'a RawValue>, TaskError> {
    if !raw.starts_with('[') {
        return Err(invalid(path, "a list", raw));
    }
    let FirstItems { items, count } = first_items(raw, path, max_items)?;
    if count == 0 {
        return Err(TaskError::bad_input(path, format!("{path} is an empty list")));
    }
    if count > max_items {
        let message = format!("{path} holds {count} items; this pool takes at most {max_items}");
        return Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param(path));
    }
    Ok(items)
}

/// The first items of a list.
pub struct FirstItems<'a> {
    /// At most the `max_items` of [`first_items`].
    pub items: Vec<&'a RawValue>,
    /// The number of items of the whole list.
    pub count: usize,
}

/// The first items of a list, which may be empty. Items over `max_items` are counted and not kept, because an item
/// takes 16 bytes in the result, but may take only two in the body.
///
/// # Errors
/// `BadInput` if it is not a list.
pub fn first_items<'a>(raw: &'a str, path: &str, max_items: usize) -> Result<FirstItems<'a>, TaskError> {
    let mut items = Vec::new();
    let count = for_each_item(raw, path, |index, item| {
        if index < max_items {
            items.push(item);
        }
    })?;
    Ok(FirstItems { items, count })
}

/// A list of token ids, at least one.
///
/// # Errors
/// `BadInput`, with the path of the first item that is not a token id.
pub fn token_ids(raw: &str, path: &str) -> Result<Vec<u32>, TaskError> {
    match serde_json::from_str::<Vec<u32>>(raw) {
        Ok(ids) if ids.is_empty() => Err(TaskError::bad_input(path, format!("{path} is an empty list"))),
        Ok(ids) => Ok(ids),
        // The items are read one by one only after an error, to find the wrong one.
        Err(_) => {
            let mut first_bad = None;
            for_each_item(raw, path, |index, item| {
                if first_bad.is_none() && serde_json::from_str::<u32>(item.get()).is_err() {
                    first_bad = Some((index, item.get()));
                }
            })?;
            let (index, value) = first_bad.unwrap_or_default();
            Err(invalid(&format!("{path}[{index}]"), "a token id (an integer from 0)", value))
        }
    }
}

/// Whether a value is a number.
pub fn is_number(raw: &str) -> bool {
    raw.starts_with(|c: char| c == '-' || c.is_ascii_digit())
}

/// Calls `visit` with each item of a list and its index. Returns the number of items.
fn for_each_item<'a>(
    raw: &'a str,
    path: &str,
    visit: impl FnMut(usize, &'a RawValue),
) -> Result<usize, TaskError> {
    ItemVisitor(visit)
        .deserialize(&mut serde_json::Deserializer::from_str(raw))
        .map_err(|error| unreadable(path, &error))
}

struct ItemVisitor<F>(F);

impl<'de, F: FnMut(usize, &'de RawValue)> DeserializeSeed<'de> for ItemVisitor<F> {
    type Value = usize;

    fn deserialize<D: Deserializer<'de>>(self, list: D) -> Result<usize, D::Error> {
        list.deserialize_seq(self)
    }
}

impl<'de, F: FnMut(usize, &'de RawValue)> Visitor<'de> for ItemVisitor<F> {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<usize, A::Error> {
        let mut count = 0;
        while let Some(item) = list.next_element()? {
            (self.0)(count, item);
            count += 1;
        }
        Ok(count)
    }
}

/// Reads a string.
///
/// # Errors
/// `BadInput` if it is of another type.
pub fn string(raw: &str, path: &str) -> Result<String, TaskError> {
    if raw.starts_with('"') { deserialize(raw, path) } else { Err(invalid(path, "a string", raw)) }
}

/// Reads a string of at most `max_bytes` bytes.
///
/// # Errors
/// `BadInput` if it is longer or of another type.
pub fn bounded_string(raw: &str, path: &str, max_bytes: usize) -> Result<String, TaskError> {
    let text = string(raw, path)?;
    if text.len() > max_bytes {
        let message = format!("{path} has {} bytes; at most {max_bytes} are taken", text.len());
        return Err(TaskError::bad_input(path, message));
    }
    Ok(text)
}

/// The headers with these names as a JSON object: the parameters of a message whose body is a file. A text in the header
/// of a field in `non_texts` is read as JSON, because some clients can send only texts as headers.
///
/// # Errors
/// `BadInput` for a header whose value cannot be JSON.
pub fn headers_as_json<'a>(
    headers: &Headers,
    names: impl IntoIterator<Item = &'a str>,
    non_texts: &[&str],
) -> Result<String, TaskError> {
    let mut fields = Map::new();
    for name in names {
        match headers.get(name) {
            None | Some(Value::Void) => {}
            Some(value) => {
                let json = header_as_json(value, non_texts.contains(&name)).ok_or_else(|| {
                    let expected = "a text, a number, a boolean or a list of texts";
                    TaskError::bad_input(name, format!("the header {name} must be {expected}"))
                });
                fields.insert(name.to_owned(), json?);
            }
        }
    }
    Ok(Json::Object(fields).to_string())
}

/// A header's value as JSON. None if it cannot be JSON.
fn header_as_json(value: &Value, may_hold_json: bool) -> Option<Json> {
    let number = |number: f64| Number::from_f64(number).map(Json::Number);
    match value {
        Value::Bool(value) => Some((*value).into()),
        Value::F32(value) => number(f64::from(*value)),
        Value::F64(value) => number(*value),
        Value::Array(items) => {
            let texts: Option<Vec<&str>> = items.iter().map(Value::as_str).collect();
            texts.map(Json::from)
        }
        _ => match (value.as_i64(), value.as_str()) {
            (Some(value), _) => Some(value.into()),
            (None, Some(text)) if may_hold_json => {
                Some(serde_json::from_str(text).unwrap_or_else(|_| text.into()))
            }
            (None, text) => text.map(Json::from),
        },
    }
}

/// The file of the URL in the field at `path`.
///
/// # Errors
/// `BadInput` if the field is not a string, or its file was not fetched and it is not a data URL.
pub fn file(raw: &RawValue, path: &str, files: &Files) -> Result<Bytes, TaskError> {
    files.read(&string(raw.get(), path)?).map_err(|message| {
        TaskError::bad_input(path, format!("{path} {message}, got {}", excerpt(raw.get())))
    })
}

/// Deserializes a value whose JSON type the caller has checked.
///
/// # Errors
/// `BadInput`, for example for an invalid escape in a string.
pub fn deserialize<'a, T: Deserialize<'a>>(raw: &'a str, path: &str) -> Result<T, TaskError> {
    serde_json::from_str(raw).map_err(|error| unreadable(path, &error))
}

fn unreadable(path: &str, error: &serde_json::Error) -> TaskError {
    // serde_json has several messages for half a surrogate pair; all of them describe the escape.
    let message = match error.to_string() {
        it if it.contains("surrogate") || it.contains("hex escape") => {
            "it has one half of a surrogate pair (\\ud800 to \\udfff), which is not a character".to_owned()
        }
        it => it,
    };
    TaskError::bad_input(path, format!("{path} cannot be read: {message}"))
}

/// The error for a value of the wrong type or range.
pub fn invalid(path: &str, wanted: &str, raw: &str) -> TaskError {
    TaskError::bad_input(path, format!("{path} must be {wanted}, got {}", excerpt(raw)))
}

fn undecodable(message: String) -> TaskError {
    TaskError::new(TaskErrorKind::Undecodable, message)
}

fn bad_body(message: String) -> TaskError {
    TaskError::new(TaskErrorKind::BadInput, message)
}

/// The beginning of a value, to be quoted in an error message.
pub fn excerpt(raw: &str) -> String {
    let raw = raw.trim_end();
    match raw.char_indices().nth(EXCERPT_CHARS) {
        Some((end, _)) => format!("{}…", &raw[..end]),
        None => raw.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: Keys = keys! { "query", "documents", "top_n"; "stream" = "false", "rank_fields" = "[]" };

    fn refusal(body: &str) -> (TaskErrorKind, Option<String>, String) {
        let error = Fields::parse(body.as_bytes(), &KEYS).expect_err(body);
        (error.kind, error.param, error.message)
    }

    #[test]
    fn a_mistyped_field_is_looked_for_among_the_first_unknown_ones_only() {
        let parsed = |unknown: usize| {
            let fields: String = (0..unknown).map(|field| format!(r#""unknown_{field}":1,"#)).collect();
            Fields::parse(format!(r#"{{{fields}"documnts":1}}"#).as_bytes(), &KEYS).map(|_| ())
        };
        assert!(parsed(MAX_COMPARED_KEYS - 1).is_err());
        assert!(parsed(MAX_COMPARED_KEYS).is_ok());
    }

    #[test]
    fn an_unsupported_field_is_refused_unless_it_has_its_default() {
        let (kind, param, message) = refusal(r#"{"query":"a","stream":true}"#);
        assert_eq!((kind, param.as_deref()), (TaskErrorKind::BadInput, Some("stream")));
        assert_eq!(message, "stream is not supported here; leave it out, or send false");
        for body in [r#"{"stream":false}"#, r#"{"stream":null}"#, r#"{"rank_fields":[]}"#, "\u{feff} {}"] {
            assert!(Fields::parse(body.as_bytes(), &KEYS).is_ok(), "{body}");
        }
    }

    #[test]
    fn a_whole_number_may_have_decimals_that_are_zeros() {
        let number =
            |raw: &str| Fields::parse(format!(r#"{{"top_n":{raw}}}"#).as_bytes(), &KEYS)?.positive("top_n");
        assert_eq!((number("4.0").unwrap(), number("12.000").unwrap()), (Some(4), Some(12)));
        for raw in ["4.5", "4.01", "0.0", "-4.0", "4e0"] {
            assert!(number(raw).is_err(), "{raw}");
        }
    }

    #[test]
    fn a_field_one_letter_off_is_refused_with_a_suggestion() {
        for (written, suggestion) in
            [("querry", "query"), ("qeury", "query"), ("top-n", "top_n"), ("steam", "stream")]
        {
            let (kind, param, message) = refusal(&format!(r#"{{"{written}":1}}"#));
            assert_eq!((kind, param.as_deref()), (TaskErrorKind::BadInput, Some(written)));
            assert!(message.ends_with(&format!("did you mean {suggestion}?")), "{message}");
        }
        for known in [r#"{"user":"u"}"#, r#"{"document":"d"}"#, r#"{"metadata":{"a":[1]}}"#] {
            assert!(Fields::parse(known.as_bytes(), &KEYS).is_ok(), "{known}");
        }
    }

    #[test]
    fn invalid_json_is_undecodable_even_after_a_refused_field() {
        assert_eq!(refusal(r#"{"stream":true"#).0, TaskErrorKind::Undecodable);
        assert_eq!(refusal(r#"{"query":"a"} x"#).0, TaskErrorKind::Undecodable);
        assert_eq!(refusal(r#"{"query":1,"query":2}"#).0, TaskErrorKind::BadInput);
    }

    #[test]
    fn items_over_the_bound_are_counted_and_not_kept() {
        let raw = format!("[{}0]", "0,".repeat(999));
        let error = list(&raw, "a", 7).unwrap_err();
        assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::TooLarge, Some("a")));
        assert_eq!(error.message, "a holds 1000 items; this pool takes at most 7");
        assert_eq!(list(&raw, "a", 1_000).unwrap().len(), 1_000);
        let raw = format!("[{}-1,true]", "0,".repeat(999));
        let error = token_ids(&raw, "a").unwrap_err();
        assert_eq!(error.message, "a[999] must be a token id (an integer from 0), got -1");
    }

    #[test]
    fn a_short_text_is_measured_in_bytes() {
        let fields = Fields::parse(r#"{"query":"\u00e9é"}"#.as_bytes(), &KEYS).unwrap();
        assert_eq!(fields.bounded_string("query", 4).unwrap().as_deref(), Some("éé"));
        let error = fields.bounded_string("query", 3).unwrap_err();
        assert_eq!(error.message, "query has 4 bytes; at most 3 are taken");
    }

    #[test]
    fn an_escaped_name_is_the_same_field() {
        let fields = Fields::parse(br#"{"qu\u0065ry":"a\n"}"#, &KEYS).unwrap();
        assert_eq!(fields.string("query").unwrap().as_deref(), Some("a\n"));
    }
}
