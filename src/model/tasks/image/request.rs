//! Reads requests to classify images, and the images in requests of other kinds. An image is the body of the message,
//! with parameters as headers; or a data URL or base64 within JSON (the form of Hugging Face's `image-classification`).
//! Pure: images are not decoded here.

use std::borrow::Cow;

use bytes::Bytes;
use serde_json::value::RawValue;

use crate::model::fields::{Fields, Keys, file, headers_as_json, keys, list, string};
use crate::protocol::{FileUrl, Files, JSON, Message, TaskError, TaskErrorKind, from_base64};

/// The number of labels for each image, if the request does not say how many.
const DEFAULT_TOP_K: usize = 5;

/// The field that holds the texts in a request to classify texts, which has the same URL.
const INPUT: &str = "input";
pub const KEYS: Keys = keys! {
    "image_url", "input", "inputs", "model", "parameters", "raw_scores", "top_k";
    "candidate_labels" = "null", "function_to_apply" = "null", "hypothesis_template" = "null", "labels" = "null"
};
const PARAMETERS: Keys = keys! { "top_k"; "function_to_apply" = "null" };

/// A function that reads the image in a JSON value. The second argument is the path of that value, for errors.
type ReadImage = fn(&RawValue, &str, &Files) -> Result<ImageFile, TaskError>;

/// An image file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFile {
    /// The file.
    pub bytes: Bytes,
    /// Its path in the request, for errors; none if it is the body.
    pub path: Option<String>,
}

/// Images to classify.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImagesRequest {
    /// At least one.
    pub images: Vec<ImageFile>,
    /// Whether they came as a list. If so, the reply is a list too.
    pub is_list: bool,
    /// The model asked for, if any.
    pub model: Option<String>,
    /// The number of labels with the highest scores to list for each image.
    pub top_k: usize,
    /// Whether the reply has the model's raw scores instead of probabilities.
    pub raw_scores: bool,
}

impl ImagesRequest {
    /// Reads a message; `max_images` bounds the number of images.
    ///
    /// # Errors
    /// `Undecodable` for a body that is not JSON, `TooLarge` for too many images, else `BadInput` with the field
    /// and the value.
    pub fn parse(message: &Message, max_images: usize, files: &Files) -> Result<Self, TaskError> {
        let sent = ImageMessage::read(message, &["model", "raw_scores", "top_k"])?;
        if sent.image.is_some() && message.properties.headers.contains_key("labels") {
            let message = "labels is not supported here: this model has labels of its own";
            return Err(TaskError::bad_input("labels", message));
        }
        let fields = Fields::parse(&sent.fields, &KEYS)?;
        let parameters = fields.object("parameters", &PARAMETERS)?;
        let top_k_in_parameters = parameters.map(|it| it.positive("top_k")).transpose()?.flatten();
        let RequestedImages { images, is_list } = sent.images(&fields, max_images, files)?;
        Ok(Self {
            images,
            is_list,
            model: fields.string("model")?,
            top_k: fields.positive("top_k")?.or(top_k_in_parameters).unwrap_or(DEFAULT_TOP_K),
            raw_scores: fields.boolean("raw_scores", false)?,
        })
    }

    /// The URLs of images in a message, except data URLs. Empty if the message cannot be read.
    pub fn file_urls(message: &Message, max_images: usize) -> Vec<FileUrl> {
        urls_of_images(message, &KEYS, max_images)
    }
}

/// The images of a request.
pub struct RequestedImages {
    /// At least one.
    pub images: Vec<ImageFile>,
    /// Whether they came as a list.
    pub is_list: bool,
}

/// A message with images: JSON, or one image, whose parameters are headers.
pub struct ImageMessage<'a> {
    /// The fields of the request, as JSON.
    pub fields: Cow<'a, [u8]>,
    /// The image that is the whole body.
    pub image: Option<ImageFile>,
}

/// The headers whose values are not texts.
const NON_TEXTS: [&str; 6] = ["dimensions", "labels", "max_new_tokens", "raw_scores", "top_k", "truncate"];

impl<'a> ImageMessage<'a> {
    /// Reads a message. `headers` are the parameters of an image that is the whole body.
    ///
    /// # Errors
    /// `BadInput` for an empty body, and for a header whose value cannot be JSON.
    pub fn read(message: &'a Message, headers: &[&str]) -> Result<Self, TaskError> {
        let Some(image) = raw_image(message)? else {
            return Ok(Self { fields: (&*message.body).into(), image: None });
        };
        let fields = headers_as_json(&message.properties.headers, headers.iter().copied(), &NON_TEXTS)?;
        Ok(Self { fields: fields.into_bytes().into(), image: Some(image) })
    }

    /// The images: the body, or those in `fields`.
    ///
    /// # Errors
    /// As [`ImagesRequest::parse`].
    pub fn images(
        &self,
        fields: &Fields<'_>,
        max_images: usize,
        files: &Files,
    ) -> Result<RequestedImages, TaskError> {
        match &self.image {
            Some(image) => Ok(RequestedImages { images: vec![image.clone()], is_list: false }),
            None => images_in(fields, max_images, files),
        }
    }
}

/// The images in the fields of a JSON request.
fn images_in(fields: &Fields<'_>, max_images: usize, files: &Files) -> Result<RequestedImages, TaskError> {
    let (key, read): (_, ReadImage) = match (fields.get("image_url"), fields.get("inputs")) {
        _ if fields.get(INPUT).is_some() => {
            let message = "this pool classifies images, and input holds texts; send an image as a data URL in \
                           image_url, as base64 in inputs, or as the body of a message of type image/jpeg, \
                           image/png or image/webp";
            return Err(TaskError::new(TaskErrorKind::UnknownUrl, message).with_param(INPUT));
        }
        (Some(_), Some(_)) => {
            return Err(TaskError::bad_input(
                "inputs",
                "image_url and inputs both hold images: send one of them",
            ));
        }
        (None, None) => {
            let message = "image_url is missing; send an image as a data URL in image_url, as base64 in inputs, \
                           or as the body of a message of type image/jpeg, image/png or image/webp";
            return Err(TaskError::bad_input("image_url", message));
        }
        (Some(_), None) => ("image_url", image_from_url),
        (None, Some(_)) => ("inputs", image_from_base64),
    };
    let raw = fields.required(key)?;
    let is_list = raw.get().starts_with('[');
    let images = if is_list {
        let items = list(raw.get(), key, max_images)?;
        let image = |(index, item): (usize, &&RawValue)| read(item, &format!("{key}[{index}]"), files);
        items.iter().enumerate().map(image).collect::<Result<_, _>>()?
    } else {
        vec![read(raw, key, files)?]
    };
    Ok(RequestedImages { images, is_list })
}

/// The URLs in the field `image_url` of a message with these keys, except data URLs.
pub fn urls_of_images(message: &Message, keys: &Keys, max_images: usize) -> Vec<FileUrl> {
    let fields = message.is_json().then(|| Fields::parse(&message.body, keys).ok()).flatten();
    let Some(raw) = fields.as_ref().and_then(|fields| fields.get("image_url")) else { return Vec::new() };
    if !raw.get().starts_with('[') {
        return file_url(raw, "image_url").into_iter().collect();
    }
    let items = list(raw.get(), "image_url", max_images).unwrap_or_default();
    let numbered = items.iter().enumerate();
    numbered.filter_map(|(index, item)| file_url(item, &format!("image_url[{index}]"))).collect()
}

/// The URL in a value that [`url_in`] reads, unless it is a data URL.
fn file_url(raw: &RawValue, path: &str) -> Option<FileUrl> {
    let (raw, path) = url_in(raw, path).ok()?;
    FileUrl::from_field(raw, &path)
}

/// The image that is the whole body of a message; none if the body is JSON.
fn raw_image(message: &Message) -> Result<Option<ImageFile>, TaskError> {
    if message.media_type().is_none_or(|media_type| media_type == JSON) {
        return Ok(None);
    }
    if message.body.is_empty() {
        return Err(TaskError::bad_input("body", "the body is empty; it should be an image"));
    }
    Ok(Some(ImageFile { bytes: message.body.clone(), path: None }))
}

/// The fields of an image among other inputs, which is OpenAI's `{"type": "image_url", "image_url": {"url": …}}`.
const OBJECT_KEYS: Keys = keys! { "image_url"; "type" = "\"image_url\"" };

/// The image in an object with the field `image_url`.
///
/// # Errors
/// `BadInput` with the path of what is wrong.
pub fn image_in_object(raw: &RawValue, path: &str, files: &Files) -> Result<ImageFile, TaskError> {
    let fields = Fields::parse(raw.get().as_bytes(), &OBJECT_KEYS).map_err(|error| error.with_param(path))?;
    let url = fields.required("image_url").map_err(|error| error.with_param(path))?;
    image_from_url(url, &format!("{path}.image_url"), files)
}

/// The URL in an object with the field `image_url`, unless it is a data URL.
pub fn object_url(raw: &RawValue, path: &str) -> Option<FileUrl> {
    let object = raw.get().starts_with('{').then_some(raw.get().as_bytes())?;
    let fields = Fields::parse(object, &OBJECT_KEYS).ok()?;
    file_url(fields.get("image_url")?, &format!("{path}.image_url"))
}

/// Returns the URL in a value, and the path of the URL. The value is a string, or OpenAI's object with the field `url`.
fn url_in<'a>(raw: &'a RawValue, path: &str) -> Result<(&'a RawValue, String), TaskError> {
    const KEYS: Keys = keys! { "url"; "detail" = "\"auto\"" };
    if !raw.get().starts_with('{') {
        return Ok((raw, path.to_owned()));
    }
    let fields = Fields::parse(raw.get().as_bytes(), &KEYS).map_err(|error| error.with_param(path))?;
    Ok((fields.required("url")?, format!("{path}.url")))
}

/// Reads the image that a URL names or holds.
fn image_from_url(raw: &RawValue, path: &str, files: &Files) -> Result<ImageFile, TaskError> {
    let (raw, path) = url_in(raw, path)?;
    let bytes = file(raw, &path, files)?;
    Ok(ImageFile { bytes, path: Some(path) })
}

/// Reads the image in a value that is base64 or a data URL.
fn image_from_base64(raw: &RawValue, path: &str, files: &Files) -> Result<ImageFile, TaskError> {
    if raw.get().starts_with("\"data:") {
        return image_from_url(raw, path, files);
    }
    decode_base64(&string(raw.get(), path)?, path)
}

fn decode_base64(base64: &str, path: &str) -> Result<ImageFile, TaskError> {
    let bytes =
        from_base64(base64).map_err(|problem| TaskError::bad_input(path, format!("{path} {problem}")))?;
    Ok(ImageFile { bytes: bytes.into(), path: Some(path.to_owned()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Properties, Value};

    fn json(body: &str) -> Result<ImagesRequest, TaskError> {
        ImagesRequest::parse(
            &Message { body: body.to_owned().into(), ..Message::default() },
            3,
            &Files::default(),
        )
    }

    fn raw(body: &'static [u8], headers: &[(&str, Value)]) -> Result<ImagesRequest, TaskError> {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        let content_type = Some("image/PNG; q=1".to_owned());
        let properties = Properties { headers, content_type, ..Properties::default() };
        ImagesRequest::parse(&Message { properties, body: body.into() }, 3, &Files::default())
    }

    #[test]
    fn an_image_is_the_body_with_headers_or_a_part_of_json() {
        let body = raw(b"file", &[("top_k", Value::I32(2)), ("model", "m".into())]).unwrap();
        assert_eq!((&*body.images[0].bytes, body.images[0].path.as_deref()), (&b"file"[..], None));
        assert_eq!((body.top_k, body.model.as_deref(), body.is_list), (2, Some("m"), false));
        let url = json(r#"{"image_url":"data:image/jpeg;base64,ZmlsZQ==","top_k":1}"#).unwrap();
        assert_eq!((&*url.images[0].bytes, url.images[0].path.as_deref()), (&b"file"[..], Some("image_url")));
        let object = json(r#"{"image_url":{"url":"data:image/jpeg;base64,ZmlsZQ=="},"top_k":1}"#).unwrap();
        assert_eq!((object.images[0].bytes.clone(), object.top_k), (url.images[0].bytes.clone(), 1));
        let several = json(r#"{"inputs":["ZmlsZQ==","Zmls\nZQ"],"parameters":{"top_k":4}}"#).unwrap();
        assert_eq!((several.images.len(), several.is_list, several.top_k), (2, true, 4));
        assert_eq!(several.images[1].bytes, several.images[0].bytes);
        assert_eq!(several.images[1].path.as_deref(), Some("inputs[1]"));
    }

    #[test]
    fn a_refusal_names_the_field_and_the_value() {
        for (body, message) in [
            (r#"{"inputs":"?"}"#, "inputs is not base64"),
            (r#"{"image_url":"https://example.org/a.png"}"#, "image_url must be a data URL"),
            (r#"{"image_url":["data:image/png,abc"]}"#, "image_url[0] must be a data URL in base64"),
            (r#"{"inputs":[]}"#, "inputs is an empty list"),
            (r#"{"inputs":7}"#, "inputs must be a string, got 7"),
            (r#"{}"#, "image_url is missing"),
            (r#"{"inputs":"ZmlsZQ==","top_k":0}"#, "top_k must be a positive integer, got 0"),
            (r#"{"inputs":"ZmlsZQ==","candidate_labels":["cat"]}"#, "candidate_labels is not supported here"),
            (r#"{"inputs":"ZmlsZQ==","labels":["cat"]}"#, "labels is not supported here"),
            (r#"{"inputs":"ZmlsZQ==","parameters":{"topk":3}}"#, "topk is not a field of this request"),
        ] {
            let error = json(body).unwrap_err();
            assert_eq!(error.kind, TaskErrorKind::BadInput, "{body}");
            assert!(error.message.starts_with(message), "{body}: {error}");
        }
        for texts in [r#"{"input":["a text"]}"#, r#"{"input":"a text","inputs":"ZmlsZQ=="}"#] {
            let error = json(texts).unwrap_err();
            assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::UnknownUrl, Some("input")));
            assert!(error.message.starts_with("this pool classifies images"), "{error}");
        }
        assert_eq!(json(r#"{"inputs":["","","",""]}"#).unwrap_err().kind, TaskErrorKind::TooLarge);
        assert!(raw(b"", &[]).unwrap_err().message.starts_with("the body is empty"));
        assert!(
            raw(b"x", &[("labels", "[\"cat\"]".into())]).unwrap_err().message.starts_with("labels is not")
        );
        assert!(raw(b"x", &[("top_k", "many".into())]).unwrap_err().message.starts_with("top_k must be"));
    }
}
