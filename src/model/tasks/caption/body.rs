//! Reads requests for captions of images, and writes the replies. Both have the form of Hugging Face's `image-to-text`.
//! Images are given as in `image::request`. Pure: images are not decoded here.

use serde::Serialize;

use crate::model::fields::{Fields, Keys, bounded_string, keys};
use crate::model::tasks::image::request::{ImageFile, ImageMessage, RequestedImages, urls_of_images};
use crate::model::tasks::to_json;
use crate::protocol::{FileUrl, Files, Message, TaskError};

/// Maximum size of a prompt, in bytes.
const MAX_PROMPT_BYTES: usize = 4_096;
/// The default of `max_new_tokens`: the length of captions in the generation settings of published models.
const DEFAULT_MAX_TOKENS: usize = 20;

pub const KEYS: Keys = keys! {
    "image_url", "input", "inputs", "max_new_tokens", "model", "parameters", "prompt";
    "stream" = "false"
};
const PARAMETERS: Keys = keys! { "max_new_tokens", "prompt"; "generate_kwargs" = "null" };

/// Images to describe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptionRequest {
    /// At least one.
    pub images: Vec<ImageFile>,
    /// Whether they came as a list. If so, the reply is a list too.
    pub is_list: bool,
    /// The model asked for, if any.
    pub model: Option<String>,
    /// The beginning of each caption; possibly empty.
    pub prompt: String,
    /// Maximum number of tokens that are written after the prompt; at least 1.
    pub max_tokens: usize,
}

#[derive(Serialize)]
struct Caption<'a> {
    generated_text: &'a str,
}

impl CaptionRequest {
    /// Reads a message; `max_images` bounds the number of images.
    ///
    /// # Errors
    /// `Undecodable` for a body that is not JSON, `TooLarge` for too many images, else `BadInput` with the field and
    /// the value.
    pub fn parse(message: &Message, max_images: usize, files: &Files) -> Result<Self, TaskError> {
        let sent = ImageMessage::read(message, &["max_new_tokens", "model", "prompt"])?;
        let fields = Fields::parse(&sent.fields, &KEYS)?;
        let parameters = fields.object("parameters", &PARAMETERS)?;
        let RequestedImages { images, is_list } = sent.images(&fields, max_images, files)?;
        let in_parameters = parameters.as_ref();
        let prompt = match fields.get("prompt").or_else(|| in_parameters?.get("prompt")) {
            Some(raw) => bounded_string(raw.get(), "prompt", MAX_PROMPT_BYTES)?,
            None => String::new(),
        };
        let max_tokens = match fields.positive("max_new_tokens")? {
            Some(max_tokens) => Some(max_tokens),
            None => in_parameters.map(|fields| fields.positive("max_new_tokens")).transpose()?.flatten(),
        };
        Ok(Self {
            images,
            is_list,
            model: fields.string("model")?,
            prompt,
            max_tokens: max_tokens.unwrap_or(DEFAULT_MAX_TOKENS),
        })
    }

    /// The URLs of images in a message, except data URLs. Empty if the message cannot be read.
    pub fn file_urls(message: &Message, max_images: usize) -> Vec<FileUrl> {
        urls_of_images(message, &KEYS, max_images)
    }
}

/// The body of the reply: a list with the caption. With `is_list` it is a list with such a list for each image; otherwise
/// there is one text.
///
/// # Errors
/// `Internal` if the body cannot be written.
pub fn write_captions(texts: &[String], is_list: bool) -> Result<Vec<u8>, TaskError> {
    let all: Vec<[Caption<'_>; 1]> = texts.iter().map(|text| [Caption { generated_text: text }]).collect();
    match all.as_slice() {
        [only] if !is_list => to_json(only),
        _ => to_json(&all),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Properties, Value};

    fn json(body: &str) -> Result<CaptionRequest, TaskError> {
        let message = Message { body: body.to_owned().into(), ..Message::default() };
        CaptionRequest::parse(&message, 3, &Files::default())
    }

    #[test]
    fn prompt_and_length_come_in_our_form_or_in_that_of_hugging_face() {
        let ours = json(r#"{"image_url":"data:image/png;base64,ZmlsZQ==","prompt":"a","max_new_tokens":3}"#)
            .unwrap();
        assert_eq!((ours.prompt.as_str(), ours.max_tokens, ours.is_list), ("a", 3, false));
        let theirs = json(r#"{"inputs":["ZmlsZQ=="],"parameters":{"max_new_tokens":4}}"#).unwrap();
        assert_eq!((theirs.prompt.as_str(), theirs.max_tokens, theirs.is_list), ("", 4, true));
        let headers = [("prompt".to_owned(), Value::from("a")), ("max_new_tokens".to_owned(), Value::I32(5))];
        let content_type = Some("image/png".to_owned());
        let properties = Properties { headers: headers.into(), content_type, ..Properties::default() };
        let message = Message { properties, body: b"file"[..].into() };
        let raw = CaptionRequest::parse(&message, 3, &Files::default()).unwrap();
        assert_eq!((raw.prompt.as_str(), raw.max_tokens), ("a", 5));
    }

    #[test]
    fn a_refusal_names_the_field() {
        for (fields, param) in [
            (r#""max_new_tokens":0"#.to_owned(), "max_new_tokens"),
            (r#""prompt":7"#.to_owned(), "prompt"),
            (format!(r#""prompt":"{}""#, "x".repeat(4_097)), "prompt"),
            (r#""stream":true"#.to_owned(), "stream"),
        ] {
            let error = json(&format!(r#"{{"inputs":"ZmlsZQ==",{fields}}}"#)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{error}");
        }
    }

    #[test]
    fn the_reply_has_the_form_of_the_request() {
        let texts = ["a".to_owned()];
        assert_eq!(write_captions(&texts, false).unwrap(), br#"[{"generated_text":"a"}]"#);
        assert_eq!(write_captions(&texts, true).unwrap(), br#"[[{"generated_text":"a"}]]"#);
    }
}
