//! The lines of `sconce run-batch` and `sconce submit`: reads OpenAI's batch input, writes its batch output. Decides
//! what a request line must hold, and how a reply that is not JSON is written in a line. Pure; request bodies are
//! passed on byte for byte.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Deref;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value as Json};

use super::{Headers, Message, Value, data_url, shorten};

/// Longest problem text, in bytes. The text may contain the invalid value, which can be long.
const MAX_PROBLEM_BYTES: usize = 500;

/// A request line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchRequest {
    /// The caller's id of the request, echoed on the output line.
    pub custom_id: String,
    /// The endpoint, as written (`/v1/embeddings`).
    pub url: String,
    /// The request body: a JSON object, byte for byte as in the line, or the decoded content of a data URL.
    pub body: RequestBody,
}

/// The body of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestBody {
    /// The bytes.
    pub bytes: Bytes,
    /// Their media type; none means JSON.
    pub media_type: Option<String>,
    /// Fields of the request that are sent as headers, because bytes have no room for them. Empty for JSON.
    pub parameters: Map<String, Json>,
}

/// Whether a body may be a JSON object, in which parameters are fields.
pub(super) fn is_json_object(body: &RequestBody) -> bool {
    body.media_type.as_deref().is_none_or(|media_type| media_type == super::JSON)
}

impl<T: Into<Bytes>> From<T> for RequestBody {
    /// A JSON body.
    fn from(json: T) -> Self {
        Self { bytes: json.into(), media_type: None, parameters: Map::new() }
    }
}

impl Deref for RequestBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl RequestBody {
    /// The body that a data URL contains.
    ///
    /// # Errors
    /// A message that says what is wrong with it.
    pub fn from_data_url(url: &str) -> Result<Self, String> {
        let (media_type, bytes) = data_url(url)?;
        Ok(Self { bytes: bytes.into(), media_type: Some(media_type), parameters: Map::new() })
    }

    /// Adds fields to the request. A body that should be JSON and is not stays as it is: the pool refuses it.
    ///
    /// # Errors
    /// A message: the request has one of these fields already.
    pub fn add_fields(&mut self, fields: &Map<String, Json>) -> Result<(), String> {
        let taken = |name: &str| format!("the field {name} is not free: this command fills it in itself");
        if fields.is_empty() {
            return Ok(());
        }
        if !is_json_object(self) {
            if let Some(name) = fields.keys().find(|name| self.parameters.contains_key(*name)) {
                return Err(taken(name));
            }
            self.parameters.extend(fields.clone());
            return Ok(());
        }
        let Ok(mut all) = serde_json::from_slice::<Map<String, Json>>(&self.bytes) else { return Ok(()) };
        if let Some(name) = fields.keys().find(|name| all.contains_key(*name)) {
            return Err(taken(name));
        }
        all.extend(fields.clone());
        self.bytes = serde_json::to_vec(&all).unwrap_or_default().into();
        Ok(())
    }

    /// The headers of a message with this body.
    pub fn headers(&self) -> Headers {
        let value = |value: &Json| match value {
            Json::Null => Value::Void,
            Json::Bool(switch) => Value::Bool(*switch),
            Json::String(text) => text.as_str().into(),
            Json::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(number), _) => number.into(),
                (None, number) => number.unwrap_or_default().into(),
            },
            // Lists and objects travel as a text of JSON.
            other => other.to_string().into(),
        };
        self.parameters.iter().map(|(name, field)| (name.clone(), value(field))).collect()
    }
}

/// A line that is not a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct InvalidLine {
    /// The line's `custom_id`, if it could be read.
    pub custom_id: Option<String>,
    /// What is wrong, in one sentence that names the field.
    pub problem: String,
}

/// The four fields, each as any JSON value, so that the error can name the wrong one.
#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(borrow)]
    custom_id: Option<&'a RawValue>,
    #[serde(borrow)]
    method: Option<&'a RawValue>,
    #[serde(borrow)]
    url: Option<&'a RawValue>,
    #[serde(borrow)]
    body: Option<&'a RawValue>,
}

/// Reads one input line.
///
/// # Errors
/// [`InvalidLine`]. The caller answers it with [`error_line`]; the other lines are unaffected.
pub fn parse(line: &[u8]) -> Result<BatchRequest, InvalidLine> {
    let without_id =
        |problem: String| InvalidLine { custom_id: None, problem: shorten(&problem, MAX_PROBLEM_BYTES) };
    let text = std::str::from_utf8(line)
        .map_err(|error| without_id(format!("not UTF-8 after byte {}", error.valid_up_to())))?;
    let fields: Fields<'_> =
        serde_json::from_str(text).map_err(|error| without_id(not_an_object(text, &error)))?;
    let custom_id = string("custom_id", fields.custom_id).map_err(without_id)?;
    let with_id = |problem: String| InvalidLine { custom_id: Some(custom_id.clone()), ..without_id(problem) };
    // OpenAI requires the method. Only POST exists, so a line without a method is accepted.
    if let Some(method) = fields.method {
        let method = string("method", Some(method)).map_err(with_id)?;
        if method != "POST" {
            return Err(with_id(format!("method must be \"POST\", is {method:?}")));
        }
    }
    let url = string("url", fields.url).map_err(with_id)?;
    let body = present("body", fields.body).map_err(with_id)?;
    let body = match json_type(body) {
        "an object" => Bytes::copy_from_slice(body.get().as_bytes()).into(),
        "a string" => {
            let url = string("body", Some(body)).map_err(with_id)?;
            RequestBody::from_data_url(&url).map_err(|message| with_id(format!("body {message}")))?
        }
        other => return Err(with_id(format!("body must be an object or a data URL, is {other}"))),
    };
    Ok(BatchRequest { custom_id, url, body })
}

fn not_an_object(text: &str, error: &serde_json::Error) -> String {
    match serde_json::from_str::<&RawValue>(text) {
        Ok(value) if json_type(value) != "an object" => {
            format!("must be a JSON object, is {}", json_type(value))
        }
        // For example, a duplicate field.
        Ok(_) => error.to_string(),
        Err(error) => format!("not JSON: {error}"),
    }
}

fn present<'a>(name: &str, value: Option<&'a RawValue>) -> Result<&'a RawValue, String> {
    value.ok_or_else(|| format!("{name} is missing"))
}

fn string(name: &str, value: Option<&RawValue>) -> Result<String, String> {
    let value = present(name, value)?;
    if json_type(value) != "a string" {
        return Err(format!("{name} must be a string, is {}", json_type(value)));
    }
    serde_json::from_str(value.get()).map_err(|error| format!("{name}: {error}"))
}

fn json_type(value: &RawValue) -> &'static str {
    match value.get().as_bytes().first() {
        Some(b'{') => "an object",
        Some(b'[') => "an array",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        _ => "a number",
    }
}

#[derive(Serialize)]
struct OutputLine<'a> {
    id: String,
    custom_id: Option<&'a str>,
    response: Option<Response<'a>>,
    error: Option<LineError>,
}

#[derive(Serialize)]
struct Response<'a> {
    status_code: u16,
    request_id: &'a str,
    #[serde(skip_serializing_if = "Notes::is_empty")]
    notes: &'a Notes,
    body: &'a RawValue,
}

#[derive(Serialize)]
struct LineError {
    code: &'static str,
    message: String,
}

/// What a reply's headers say about its result, by their names.
pub type Notes = BTreeMap<&'static str, serde_json::Value>;

/// The headers of a reply without which its result could be misunderstood.
pub fn notes_of(reply: &Message) -> Notes {
    let note = |name: &'static str| {
        let value = reply.properties.headers.get(name)?;
        let number = value.as_i64().map(Into::into);
        Some((name, number.or_else(|| value.as_str().map(Into::into))?))
    };
    ["truncated", "recording_end", "warning"].into_iter().filter_map(note).collect()
}

/// Returns the body of a reply as a JSON value: JSON as it is, `text/*` as a string, and anything else as
/// `{"content_type", "base64"}`. A body that is not what its content type says also becomes such an object.
pub fn body_value(reply: &Message) -> Cow<'_, RawValue> {
    #[derive(Serialize)]
    struct Other<'a> {
        content_type: &'a str,
        base64: String,
    }
    if let Some(json) = reply.is_json().then(|| serde_json::from_slice(&reply.body).ok()).flatten() {
        return Cow::Borrowed(json);
    }
    let value = match reply.text() {
        Some(text) => to_raw_value(text),
        None => to_raw_value(&Other {
            content_type: reply.properties.content_type.as_deref().unwrap_or_default(),
            base64: STANDARD.encode(&reply.body),
        }),
    };
    // The value has only strings, so writing cannot fail.
    value.map_or(Cow::Borrowed(RawValue::NULL), Cow::Owned)
}

/// Writes the output line of a request that was answered, with a result or an error. It ends with a newline and
/// contains no other. Its `id` is derived from `request_id`, so that the same reply gives the same line.
pub fn response_line(
    custom_id: &str,
    status_code: u16,
    request_id: &str,
    notes: &Notes,
    body: &RawValue,
) -> Vec<u8> {
    let unprefixed = request_id.strip_prefix("req_").unwrap_or(request_id);
    let line = OutputLine {
        id: format!("batch_req_{unprefixed}"),
        custom_id: Some(custom_id),
        response: Some(Response { status_code, request_id, notes, body }),
        error: None,
    };
    write(&line)
}

/// Writes the output line of input line `number`, counted from 1, which was not a request. It ends with a newline and
/// contains no other.
pub fn error_line(number: usize, invalid: &InvalidLine) -> Vec<u8> {
    failed_line(number, "invalid_line", invalid)
}

/// Writes the output line of input line `number`, which failed for another reason; `code` names the reason.
pub fn failed_line(number: usize, code: &'static str, invalid: &InvalidLine) -> Vec<u8> {
    let message = format!("line {number}: {}", invalid.problem);
    let line = OutputLine {
        id: format!("batch_req_line_{number}"),
        custom_id: invalid.custom_id.as_deref(),
        response: None,
        error: Some(LineError { code, message }),
    };
    write(&line)
}

fn write(line: &OutputLine<'_>) -> Vec<u8> {
    // It holds only numbers, strings and JSON, so writing cannot fail.
    let mut bytes = serde_json::to_vec(line).unwrap_or_default();
    // A raw line break in JSON is white space between values, so a space can replace it.
    for byte in &mut bytes {
        if matches!(byte, b'\n' | b'\r') {
            *byte = b' ';
        }
    }
    bytes.push(b'\n');
    bytes
}

/// Whether `bytes` can be the start of an output line that was cut off, which resuming may remove.
pub fn is_torn_output(bytes: &[u8]) -> bool {
    let start = b"{\"id\":\"batch_req_";
    // Zeros come from blocks that the file system had allocated but not written when the power failed.
    bytes.starts_with(start) || start.starts_with(bytes) || bytes.iter().all(|byte| *byte == 0)
}

/// Summary of an output line.
#[derive(Debug, PartialEq, Eq)]
pub struct OutputSummary {
    /// The id of the request. None if the input line had no readable id.
    pub custom_id: Option<String>,
    /// Why the request has no result; none if it has one.
    pub error: Option<OutputError>,
}

/// The error of an output line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputError {
    /// The status code of the reply. For a line without a reply, the code of its error, such as `invalid_line`.
    pub code: String,
    /// The message, shortened, without the number of the line.
    pub message: String,
}

/// Longest message of an [`OutputError`], in bytes.
const MAX_MESSAGE_BYTES: usize = 200;

/// Reads an output line. Checks that the whole line is JSON.
///
/// # Errors
/// The line is cut off, or was not written by sconce.
pub fn read_output(line: &[u8]) -> serde_json::Result<OutputSummary> {
    #[derive(Deserialize)]
    struct Line<'a> {
        #[serde(borrow)]
        response: &'a RawValue,
        #[serde(borrow)]
        error: &'a RawValue,
        // The field must be present but may be null: a plain `Option` would accept its absence.
        #[serde(deserialize_with = "Option::deserialize")]
        custom_id: Option<String>,
    }
    let line: Line<'_> = serde_json::from_slice(line)?;
    let error = line_error(line.error).or_else(|| reply_error(line.response));
    Ok(OutputSummary { custom_id: line.custom_id, error })
}

/// The error of a line without a reply.
fn line_error(error: &RawValue) -> Option<OutputError> {
    #[derive(Deserialize)]
    struct Failed {
        code: String,
        message: String,
    }
    let Failed { code, message } = serde_json::from_str::<Option<Failed>>(error.get()).ok()??;
    // The line number is removed, so that lines that fail for the same reason are counted together.
    let after_number =
        message.strip_prefix("line ").map(|rest| rest.trim_start_matches(|it: char| it.is_ascii_digit()));
    let message = after_number.and_then(|rest| rest.strip_prefix(": ")).unwrap_or(&message);
    Some(OutputError {
        code: shorten(&code, MAX_MESSAGE_BYTES),
        message: shorten(message, MAX_MESSAGE_BYTES),
    })
}

/// The error of a reply.
fn reply_error(response: &RawValue) -> Option<OutputError> {
    #[derive(Deserialize)]
    struct Reply<'a> {
        status_code: u16,
        #[serde(borrow)]
        body: &'a RawValue,
    }
    #[derive(Deserialize)]
    struct Body {
        error: ErrorObject,
    }
    #[derive(Deserialize)]
    struct ErrorObject {
        message: String,
    }
    let Reply { status_code, body } = serde_json::from_str::<Option<Reply<'_>>>(response.get()).ok()??;
    if status_code == 200 {
        return None;
    }
    let message = serde_json::from_str::<Body>(body.get()).map(|body| body.error.message);
    let message = message.unwrap_or_else(|_| body.get().to_owned());
    Some(OutputError { code: status_code.to_string(), message: shorten(&message, MAX_MESSAGE_BYTES) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::protocol::{JSON, Properties};

    const GOOD: &str =
        r#"{"custom_id":"a-1","method":"POST","url":"/v1/embeddings","body":{"input" : "x","n":1.10}}"#;

    fn problem(line: &str) -> (Option<String>, String) {
        let invalid = parse(line.as_bytes()).unwrap_err();
        (invalid.custom_id, invalid.problem)
    }

    #[test]
    fn an_output_line_says_why_its_request_has_no_result() {
        let error = |line: Vec<u8>| read_output(&line).unwrap().error.map(|it| (it.code, it.message));
        let reply = |status, body: Value| {
            response_line("a", status, "r", &Notes::new(), &to_raw_value(&body).unwrap())
        };
        assert_eq!(error(reply(200, json!({"error": {"message": "part of a result"}}))), None);
        let expected = |code: &str, message: &str| Some((code.to_owned(), message.to_owned()));
        let body = json!({"error": {"message": "no such URL", "code": "url"}});
        assert_eq!(error(reply(404, body)), expected("404", "no such URL"));
        assert_eq!(error(reply(500, json!("broken"))), expected("500", "\"broken\""));
        for number in [3, 14] {
            let invalid = InvalidLine { custom_id: None, problem: "not JSON: line 1".into() };
            assert_eq!(error(error_line(number, &invalid)), expected("invalid_line", "not JSON: line 1"));
        }
        let long = error(reply(400, json!({"error": {"message": "x".repeat(9_000)}}))).unwrap();
        assert!(long.1.len() <= MAX_MESSAGE_BYTES + 30, "{}", long.1.len());
    }

    #[test]
    fn a_request_line_keeps_its_body_byte_for_byte() {
        let request = parse(GOOD.as_bytes()).unwrap();
        assert_eq!(request.custom_id, "a-1");
        assert_eq!(request.url, "/v1/embeddings");
        assert_eq!(request.body.bytes, r#"{"input" : "x","n":1.10}"#);
    }

    #[test]
    fn unknown_fields_surrounding_space_and_a_missing_method_are_ignored() {
        let line = GOOD.replace("{\"custom_id\"", "  {\"extra\":[1,{}],\"custom_id\"") + "\r";
        assert_eq!(parse(line.as_bytes()).unwrap(), parse(GOOD.as_bytes()).unwrap());
        let line = GOOD.replace("\"method\":\"POST\",", "");
        assert_eq!(parse(line.as_bytes()).unwrap(), parse(GOOD.as_bytes()).unwrap());
    }

    #[test]
    fn an_invalid_line_gets_an_error_that_names_the_field() {
        let id = Some("a-1".to_owned());
        let cases = [
            (GOOD.replace("\"custom_id\"", "\"id\""), None, "custom_id is missing"),
            (GOOD.replace("\"a-1\"", "null"), None, "custom_id is missing"),
            (GOOD.replace("\"a-1\"", "7"), None, "custom_id must be a string, is a number"),
            (GOOD.replace("POST", "GET"), id.clone(), "method must be \"POST\", is \"GET\""),
            (GOOD.replace("\"POST\"", "true"), id.clone(), "method must be a string, is a boolean"),
            (GOOD.replace("\"url\"", "\"uri\""), id.clone(), "url is missing"),
            (GOOD.replace("\"body\"", "\"data\""), id.clone(), "body is missing"),
            (
                GOOD.replace("{\"input\" : \"x\",\"n\":1.10}", "[1]"),
                id,
                "body must be an object or a data URL, is an array",
            ),
            ("[1]".to_owned(), None, "must be a JSON object, is an array"),
            ("\"x\"".to_owned(), None, "must be a JSON object, is a string"),
        ];
        for (line, custom_id, expected) in cases {
            assert_eq!(problem(&line), (custom_id, expected.to_owned()), "{line}");
        }
    }

    #[test]
    fn what_is_not_json_or_not_utf8_is_an_error_not_a_panic() {
        assert!(problem("{\"custom_id\":").1.starts_with("not JSON: "));
        assert!(problem("").1.starts_with("not JSON: "));
        let twice = GOOD.replace("\"url\"", "\"custom_id\"");
        assert!(problem(&twice).1.contains("duplicate field `custom_id`"));
        let invalid = parse(b"{\"custom_id\":\"\xff\"}").unwrap_err();
        assert_eq!(invalid.problem, "not UTF-8 after byte 14");
    }

    #[test]
    fn a_line_has_the_notes_of_its_reply() {
        let mut reply = reply(JSON, b"{}");
        let line = |reply: &Message| -> Value { serde_json::from_slice(&answered("a", "r", reply)).unwrap() };
        assert_eq!(line(&reply)["response"].get("notes"), None);
        for (name, value) in [("truncated", 2.into()), ("recording_end", "unmarked".into()), ("x", 1.into())]
        {
            reply.properties.headers.insert(name.to_owned(), value);
        }
        assert_eq!(line(&reply)["response"]["notes"], json!({"truncated": 2, "recording_end": "unmarked"}));
    }

    #[test]
    fn a_problem_is_bounded_whatever_the_line_holds() {
        let (_, problem) = problem(&GOOD.replace("POST", &"P".repeat(1 << 20)));
        assert!(problem.starts_with("method must be \"POST\", is \"PPP") && problem.len() < 600);
    }

    fn reply(content_type: &str, body: &[u8]) -> Message {
        let properties = Properties { content_type: Some(content_type.into()), ..Properties::default() };
        Message { properties, body: Bytes::copy_from_slice(body) }
    }

    /// The line of a reply with status 200.
    fn answered(custom_id: &str, request_id: &str, reply: &Message) -> Vec<u8> {
        response_line(custom_id, 200, request_id, &notes_of(reply), &body_value(reply))
    }

    #[test]
    fn an_answered_request_is_written_as_openai_does() {
        let line = answered("a-1", "req_7", &reply(JSON, b"{\"data\":[]}"));
        assert_eq!(
            String::from_utf8(line).unwrap(),
            "{\"id\":\"batch_req_7\",\"custom_id\":\"a-1\",\"response\":{\"status_code\":200,\
             \"request_id\":\"req_7\",\"body\":{\"data\":[]}},\"error\":null}\n"
        );
    }

    #[test]
    fn an_invalid_line_is_answered_with_its_line_number() {
        let invalid = parse(b"{}").unwrap_err();
        let line: Value = serde_json::from_slice(&error_line(7, &invalid)).unwrap();
        let expected = json!({
            "id": "batch_req_line_7", "custom_id": null, "response": null,
            "error": {"code": "invalid_line", "message": "line 7: custom_id is missing"},
        });
        assert_eq!(line, expected);
    }

    #[test]
    fn a_body_over_several_lines_becomes_one_line() {
        let line = answered("a", "r", &reply(JSON, b"{\r\n  \"x\": \"a\\nb\"\n}\n"));
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        let line: Value = serde_json::from_slice(&line).unwrap();
        assert_eq!(line["response"]["body"], json!({"x": "a\nb"}));
    }

    #[test]
    fn a_reply_that_is_not_json_is_a_string_or_base64_with_its_content_type() {
        let text: &[u8] = "one\ntwo \u{2028}\"ü\"".as_bytes();
        let base64 =
            |content_type: &str, base64: &str| json!({"content_type": content_type, "base64": base64});
        let cases: [(&str, &[u8], Value); 8] = [
            ("text/vtt; charset=utf-8", text, json!("one\ntwo \u{2028}\"ü\"")),
            ("text/plain", b"{\"not\": \"parsed\"}", json!("{\"not\": \"parsed\"}")),
            ("text/plain", b"", json!("")),
            ("text/plain", b"\xff\n", base64("text/plain", "/wo=")),
            ("text/plain; charset=latin1", b"\xc3\xbc", base64("text/plain; charset=latin1", "w7w=")),
            ("audio/wav", b"RIFF\0\n", base64("audio/wav", "UklGRgAK")),
            // A body that is not what its content type says is kept whole.
            (JSON, b"{\"x\":", base64(JSON, "eyJ4Ijo=")),
            (JSON, b"", base64(JSON, "")),
        ];
        for (content_type, body, expected) in cases {
            let line = answered("a", "r", &reply(content_type, body));
            assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1, "{content_type}");
            assert_eq!(read_output(&line).unwrap().custom_id.as_deref(), Some("a"));
            let line: Value = serde_json::from_slice(&line).unwrap();
            assert_eq!(line["response"]["body"], expected, "{content_type}");
        }
        let written = String::from_utf8(answered("a", "r", &reply("audio/wav", b"x"))).unwrap();
        assert!(written.contains(r#""body":{"content_type":"audio/wav","base64":"eA=="}"#), "{written}");
        let unnamed = Message { body: "{\"x\":1}".into(), ..Message::default() };
        assert_eq!(body_value(&unnamed).get(), "{\"x\":1}", "a reply without a content type is JSON");
    }

    #[test]
    fn a_line_without_the_fields_of_an_output_line_is_refused() {
        assert!(read_output(b"{\"response\":null,\"error\":null}").is_err());
        assert!(read_output(b"{\"custom_id\":\"x\",\"response\":null").is_err());
        assert!(read_output(GOOD.as_bytes()).is_err(), "an input line is not an output line");
        let nameless = b"{\"custom_id\":null,\"response\":null,\"error\":{}}";
        assert_eq!(read_output(nameless).unwrap().custom_id, None);
    }

    #[test]
    fn every_prefix_of_an_output_line_is_torn_and_other_text_is_not() {
        let line = answered("a", "r", &reply(JSON, b"{}"));
        assert!((0..line.len()).all(|cut| is_torn_output(&line[..cut])));
        assert!(is_torn_output(&[0; 16]));
        assert!(!is_torn_output(b"my notes"));
        assert!(!is_torn_output(GOOD.as_bytes()));
    }

    proptest! {
        #[test]
        fn ids_and_bodies_survive_from_input_to_output(
            custom_id in ".*", url in ".*", input in ".*", code in 100u16..600,
        ) {
            let body = json!({"input": input}).to_string();
            let line = format!(
                "{{\"custom_id\":{},\"method\":\"POST\",\"url\":{},\"body\":{body}}}",
                json!(custom_id), json!(url),
            );
            let request = parse(line.as_bytes()).unwrap();
            prop_assert_eq!(&request.custom_id, &custom_id);
            prop_assert_eq!(&request.url, &url);
            prop_assert_eq!(&request.body[..], body.as_bytes());
            let line = response_line(&custom_id, code, "r", &Notes::new(), &body_value(&reply(JSON, &request.body)));
            prop_assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
            prop_assert_eq!(read_output(&line).unwrap().custom_id, Some(custom_id));
            let line: Value = serde_json::from_slice(&line).unwrap();
            prop_assert_eq!(&line["response"]["body"]["input"], &json!(input));
            prop_assert_eq!(&line["response"]["status_code"], &json!(code));
        }

        #[test]
        fn parsing_never_panics_and_every_error_line_is_readable(line in any::<Vec<u8>>()) {
            if let Err(invalid) = parse(&line) {
                let written = error_line(1, &invalid);
                prop_assert_eq!(read_output(&written).unwrap().custom_id, invalid.custom_id);
            }
        }
    }
}
