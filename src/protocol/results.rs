//! Takes results out of replies: the content of a file, whose format the ending of its name decides, and the vector of an
//! embedding. Decides which formats the replies of a URL can have, and which `response_format` asks for each. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use super::batch_line::{RequestBody, is_json_object};
use super::endpoints::Endpoint;
pub use super::endpoints::FileFormat;
use super::from_base64;
use super::requests::text_in;

/// The field, and for a body that is not JSON the header, that asks for a form of the reply.
pub const RESPONSE_FORMAT: &str = "response_format";

impl FileFormat {
    /// The format that the ending of a file's name says; none if it has another ending, or none.
    pub fn of_name(name: &str) -> Option<Self> {
        let (stem, ending) = name.rsplit_once('.')?;
        let is_named = |known: &str| !stem.is_empty() && ending.eq_ignore_ascii_case(known);
        Self::ALL.into_iter().find(|(_, known)| is_named(known)).map(|(format, _)| format)
    }

    /// The endings of all formats, for errors.
    pub fn endings(formats: &[Self]) -> String {
        formats.iter().map(|it| format!(".{}", it.ending())).collect::<Vec<_>>().join(", ")
    }

    /// The `response_format` that asks for this format at `url`. None if replies have it without being asked, or if the URL is
    /// that of a model that is not built in, which may not know the field. Without a URL, it is asked for.
    ///
    /// # Errors
    /// A message: replies of this URL cannot have this format.
    pub fn response_format(self, url: Option<&str>) -> Result<Option<&'static str>, String> {
        let endpoint = url.and_then(Endpoint::of);
        let formats = endpoint.map_or(&[][..], |endpoint| endpoint.results);
        if let Some(Endpoint { url, .. }) = endpoint.filter(|_| !formats.contains(&self)) {
            let (ending, possible) = (self.ending(), Self::endings(formats));
            return Err(format!("a result of {url} cannot be written as .{ending}, only as {possible}"));
        }
        Ok(match self {
            Self::Text if formats.contains(&Self::Srt) => Some("text"),
            Self::Text | Self::Json => None,
            Self::Srt | Self::Vtt | Self::Wav | Self::Flac | Self::Pcm | Self::Png => {
                let is_ours = url.is_none() || endpoint.is_some();
                is_ours.then(|| self.ending())
            }
        })
    }

    /// The format that the `response_format` of a JSON body asks for, if it is that of a file.
    pub fn asked_by(body: &RequestBody) -> Option<Self> {
        #[derive(Deserialize)]
        struct Asked {
            response_format: String,
        }
        if let Some(name) = body.parameters.get(RESPONSE_FORMAT).and_then(|name| name.as_str()) {
            return Self::of_response_format(name);
        }
        is_json_object(body)
            .then(|| serde_json::from_slice::<Asked>(&body.bytes).ok())
            .flatten()
            .and_then(|asked| Self::of_response_format(&asked.response_format))
    }

    fn of_response_format(name: &str) -> Option<Self> {
        match name {
            "text" => Some(Self::Text),
            "verbose_json" | "b64_json" => Some(Self::Json),
            name => Self::ALL.into_iter().find(|(_, ending)| *ending == name).map(|(format, _)| format),
        }
    }

    /// Makes a request ask for this format, if its reply would have another one otherwise.
    ///
    /// # Errors
    /// A message: replies of this URL cannot have this format, or the request asks for another one.
    pub fn ask(self, url: Option<&str>, body: &mut RequestBody) -> Result<(), String> {
        let wanted = self.response_format(url)?;
        let ending = self.ending();
        if let Some(asked) = Self::asked_by(body)
            && asked != self
        {
            return Err(format!(
                "{RESPONSE_FORMAT} asks for .{}, and the name of its file ends with .{ending}",
                asked.ending()
            ));
        }
        let Some(wanted) = wanted else { return Ok(()) };
        if !is_json_object(body) {
            body.parameters.insert(RESPONSE_FORMAT.to_owned(), wanted.into());
            return Ok(());
        }
        let Ok(mut fields) = serde_json::from_slice::<BTreeMap<String, Box<RawValue>>>(&body.bytes) else {
            // The pool refuses it with a better message.
            return Ok(());
        };
        if !fields.contains_key(RESPONSE_FORMAT)
            && let Ok(value) = to_raw_value(wanted)
        {
            fields.insert(RESPONSE_FORMAT.to_owned(), value);
            body.bytes = serde_json::to_vec(&fields).unwrap_or_default().into();
        }
        Ok(())
    }

    /// The content of a file of this format, from the body of an output line (`batch_line::body_value`).
    ///
    /// # Errors
    /// A message: the reply has another format.
    pub fn content_of(self, body: &RawValue) -> Result<Vec<u8>, String> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Encoded {
            content_type: String,
            base64: String,
        }
        let json = body.get();
        let encoded = serde_json::from_str::<Encoded>(json).ok();
        let text = || serde_json::from_str::<String>(json).ok();
        let is_of_type = |encoded: &Encoded| {
            let essence = encoded.content_type.split(';').next().unwrap_or_default().trim();
            essence.rsplit_once('/').is_some_and(|(_, subtype)| {
                subtype.strip_prefix("x-").unwrap_or(subtype).eq_ignore_ascii_case(self.ending())
            })
        };
        let content = match (self, &encoded) {
            (Self::Wav | Self::Flac | Self::Pcm | Self::Png, Some(encoded)) if is_of_type(encoded) => {
                Some(from_base64(&encoded.base64)?)
            }
            (Self::Srt | Self::Vtt, None) => text().map(String::into_bytes),
            (Self::Text, None) => text().or_else(|| text_in(json.as_bytes())).map(String::into_bytes),
            (Self::Json, None) if !json.starts_with('"') => Some(json.as_bytes().to_vec()),
            _ => None,
        };
        content.ok_or_else(|| {
            let is = match encoded {
                Some(Encoded { content_type, .. }) => content_type,
                None if json.starts_with('"') => "a text".to_owned(),
                None => "JSON".to_owned(),
            };
            format!("the reply is {is}, which cannot be written as .{}", self.ending())
        })
    }
}

/// An output line, as far as results are taken out of it.
#[derive(Debug, Deserialize, Serialize)]
pub struct ResultLine<'a> {
    id: String,
    /// The id of the request.
    pub custom_id: Option<String>,
    /// The reply; none if the line has an error instead.
    #[serde(borrow)]
    pub response: Option<ResultResponse<'a>>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

/// The reply in an output line.
#[derive(Debug, Deserialize, Serialize)]
pub struct ResultResponse<'a> {
    status_code: u16,
    request_id: String,
    /// What the reply's headers say about its result.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub notes: Option<&'a RawValue>,
    /// The body as JSON.
    #[serde(borrow)]
    pub body: Option<&'a RawValue>,
}

/// Status of a reply that has a result.
const SUCCEEDED: u16 = 200;

impl<'a> ResultLine<'a> {
    /// Reads an output line.
    ///
    /// # Errors
    /// It is no output line.
    pub fn parse(line: &'a [u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(line)
    }

    /// The reply's body; none if there is no reply, or its status is not 200.
    pub fn result(&self) -> Option<&'a RawValue> {
        let response = self.response.as_ref().filter(|response| response.status_code == SUCCEEDED)?;
        Some(response.body.unwrap_or(RawValue::NULL))
    }

    /// The line without the body of its reply.
    pub fn without_body(self) -> Vec<u8> {
        let response = self.response.map(|response| ResultResponse { body: None, ..response });
        Self { response, ..self }.written()
    }

    /// The line with an error in the place of its reply.
    pub fn with_error(self, code: &str, message: &str) -> Vec<u8> {
        let error = to_raw_value(&serde_json::json!({"code": code, "message": message}));
        // The value has only strings, so writing cannot fail.
        let error = error.unwrap_or_else(|_| RawValue::NULL.to_owned());
        ResultLine { response: None, error: Some(&error), id: self.id, custom_id: self.custom_id }.written()
    }

    fn written(&self) -> Vec<u8> {
        let mut line = serde_json::to_vec(self).unwrap_or_default();
        line.push(b'\n');
        line
    }
}

/// The only vector in the body of a reply of `/v1/embeddings`. None if the reply has another form.
///
/// # Errors
/// A message: the reply has another number of vectors, or an error in the place of one.
pub fn vector_of(body: &RawValue) -> Result<Option<Vec<f32>>, String> {
    #[derive(Deserialize)]
    struct Reply {
        data: Vec<Item>,
    }
    #[derive(Deserialize)]
    struct Item {
        embedding: Option<Numbers>,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Numbers {
        Float(Vec<f32>),
        Base64(String),
    }
    let Ok(Reply { data }) = serde_json::from_str(body.get()) else { return Ok(None) };
    let count = data.len();
    let mut items = data.into_iter();
    let (Some(Item { embedding }), None) = (items.next(), items.next()) else {
        return Err(format!("the reply has {count} vectors, and a row of the output has one"));
    };
    match embedding {
        Some(Numbers::Float(vector)) => Ok(Some(vector)),
        Some(Numbers::Base64(text)) => {
            let bytes = from_base64(&text)?;
            let (numbers, rest) = bytes.as_chunks::<4>();
            if !rest.is_empty() {
                return Err(format!("the vector has {} bytes, which are no numbers of 4 bytes", bytes.len()));
            }
            Ok(Some(numbers.iter().map(|number| f32::from_le_bytes(*number)).collect()))
        }
        None => Err("the reply has an error in the place of its vector".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::protocol::endpoints::{CHAT_URL, SPEECH_URL, TRANSCRIPTIONS_URL};

    const TRANSCRIPTS: Option<&str> = Some(TRANSCRIPTIONS_URL);

    fn raw(value: &serde_json::Value) -> Box<RawValue> {
        to_raw_value(value).unwrap()
    }

    #[test]
    fn the_ending_of_a_name_decides_the_format() {
        for (name, format) in [
            ("a.srt", Some(FileFormat::Srt)),
            ("episode 1.SRT", Some(FileFormat::Srt)),
            ("a.b.png", Some(FileFormat::Png)),
            ("c.jpg", None),
            ("srt", None),
            (".srt", None),
        ] {
            assert_eq!(FileFormat::of_name(name), format, "{name}");
        }
    }

    #[test]
    fn a_format_is_asked_for_in_the_body_or_beside_it_or_refused() {
        let mut json = RequestBody::from(r#"{"file_url":"data:,"}"#);
        FileFormat::Srt.ask(TRANSCRIPTS, &mut json).unwrap();
        assert_eq!(&json[..], br#"{"file_url":"data:,","response_format":"srt"}"#);
        FileFormat::Srt.ask(TRANSCRIPTS, &mut json).unwrap();
        let error = FileFormat::Vtt.ask(TRANSCRIPTS, &mut json).unwrap_err();
        assert_eq!(error, "response_format asks for .srt, and the name of its file ends with .vtt");
        let mut sound = RequestBody::from_data_url("data:audio/wav;base64,UklGRg==").unwrap();
        FileFormat::Text.ask(TRANSCRIPTS, &mut sound).unwrap();
        assert_eq!((&sound[..], &sound.parameters[RESPONSE_FORMAT]), (&b"RIFF"[..], &json!("text")));
        let mut speech = RequestBody::from(r#"{"input":"a"}"#);
        let error = FileFormat::Png.ask(Some(SPEECH_URL), &mut speech).unwrap_err();
        assert!(error.ends_with("cannot be written as .png, only as .wav, .flac, .pcm"), "{error}");
        let mut chat = RequestBody::from(r#"{"messages":[],"response_format":{"type":"json_object"}}"#);
        let before = chat.clone();
        FileFormat::Text.ask(Some(CHAT_URL), &mut chat).unwrap();
        assert_eq!(chat, before);
        let mut own = RequestBody::from("{}");
        FileFormat::Png.ask(Some("/my/model"), &mut own).unwrap();
        assert_eq!(&own[..], b"{}", "a model of one's own may refuse the field");
    }

    #[test]
    fn a_file_holds_what_its_ending_says_or_is_not_written() {
        let sound = raw(&json!({"content_type": "audio/wav", "base64": "UklGRg=="}));
        assert_eq!(FileFormat::Wav.content_of(&sound).unwrap(), b"RIFF");
        let error = FileFormat::Flac.content_of(&sound).unwrap_err();
        assert_eq!(error, "the reply is audio/wav, which cannot be written as .flac");
        assert!(FileFormat::Json.content_of(&sound).is_err());
        let text = raw(&json!("1\n00:00\n"));
        assert_eq!(FileFormat::Srt.content_of(&text).unwrap(), b"1\n00:00\n");
        assert!(FileFormat::Json.content_of(&text).unwrap_err().contains("a text"));
        let chat = raw(&json!({"choices": [{"index": 0, "message": {"content": "Yes."}}]}));
        assert_eq!(FileFormat::Text.content_of(&chat).unwrap(), b"Yes.");
        let caption = raw(&json!([{"generated_text": "a cat"}]));
        assert_eq!(FileFormat::Text.content_of(&caption).unwrap(), b"a cat");
        assert!(FileFormat::Srt.content_of(&chat).unwrap_err().contains("JSON"));
        assert_eq!(FileFormat::Json.content_of(&chat).unwrap(), chat.get().as_bytes());
    }

    #[test]
    fn a_vector_is_read_from_digits_or_base64_and_only_one() {
        let reply = |data: serde_json::Value| raw(&json!({"object": "list", "data": data}));
        assert_eq!(vector_of(&reply(json!([{"embedding": [1.0, -2.0]}]))), Ok(Some(vec![1.0, -2.0])));
        assert_eq!(vector_of(&reply(json!([{"embedding": "AACAPwAAAMA="}]))), Ok(Some(vec![1.0, -2.0])));
        assert_eq!(vector_of(&reply(json!("x"))), Ok(None), "of another kind");
        for (data, message) in [
            (json!([]), "0 vectors"),
            (json!([{"embedding": [1.0]}, {"embedding": [1.0]}]), "2 vectors"),
            (json!([{"object": "error"}]), "an error in the place"),
            (json!([{"embedding": "AACAPwA="}]), "5 bytes"),
        ] {
            let error = vector_of(&reply(data)).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn a_line_is_kept_without_its_body_or_with_an_error_in_its_place() {
        let line = br#"{"id":"batch_req_1","custom_id":"a","response":{"status_code":200,"request_id":"1","notes":{"truncated":2},"body":{"data":[]}},"error":null}"#;
        let kept = ResultLine::parse(line).unwrap().without_body();
        let expected = r#"{"id":"batch_req_1","custom_id":"a","response":{"status_code":200,"request_id":"1","notes":{"truncated":2},"body":null},"error":null}"#;
        assert_eq!(String::from_utf8(kept).unwrap(), format!("{expected}\n"));
        let failed = ResultLine::parse(line).unwrap().with_error("no_vector", "why");
        let error = super::super::batch_line::read_output(&failed).unwrap().error.unwrap();
        assert_eq!((error.code.as_str(), error.message.as_str()), ("no_vector", "why"));
    }
}
