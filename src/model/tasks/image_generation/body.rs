//! Reads requests for images of a text (`/v1/images/generations`), and writes the replies: JSON with PNG files in base64, or
//! one PNG file. Does no I/O; knows no model.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::model::fields::{Fields, Keys, bounded_string, invalid, keys, string};
use crate::model::tasks::{Usage, to_json};
use crate::protocol::message::text_header;
use crate::protocol::{Body, Message, TaskError, TaskErrorKind};

/// Maximum size of a prompt, in bytes. Both prompts are written into each image.
const MAX_PROMPT_BYTES: usize = 16_384;
/// The default number of steps, if the pool allows as many.
pub const DEFAULT_STEPS: usize = 25;
/// The default of `guidance_scale`, as in diffusers.
const DEFAULT_GUIDANCE: f32 = 7.5;
/// The largest `guidance_scale`: far beyond what is of use. Above about 20, images are oversaturated.
const MAX_GUIDANCE: f32 = 100.0;

pub const KEYS: Keys = keys! {
    "guidance_scale", "model", "n", "negative_prompt", "num_inference_steps", "prompt", "response_format", "seed", "size",
    "steps", "stream", "truncate";
    "background" = "\"auto\"", "cfg_scale" = "null", "complexity" = "null", "frame_count" = "null",
    "frame_duration_ms" = "null", "height" = "null", "image" = "null", "moderation" = "\"auto\"",
    "output_compression" = "100", "output_format" = "\"png\"", "partial_images" = "0", "quality" = "\"auto\"",
    "sampler" = "null", "scheduler" = "null", "style" = "\"vivid\"", "svg" = "null", "width" = "null"
};

/// A request for images.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageRequest {
    /// What is to be seen.
    pub prompt: String,
    /// What is not to be seen; possibly empty.
    pub negative_prompt: String,
    /// The model asked for, if any.
    pub model: Option<String>,
    /// The number of images, at least 1.
    pub count: usize,
    /// The size of the images, if the request gives it.
    pub size: Option<ImageSize>,
    /// The number of steps of each image, at least 1, if the request gives it.
    pub steps: Option<usize>,
    /// By how much the difference between the two prompts counts. Up to 1, the negative prompt is not used.
    pub guidance: f32,
    /// The seed of the first image, if it is given; that of each further image is larger by 1.
    pub seed: Option<u64>,
    /// The form of the reply.
    pub format: ImageFormat,
    /// Whether parts of the reply report the progress.
    pub stream: bool,
    /// Whether prompts that are too long are cut. Otherwise they are refused.
    pub truncate: bool,
}

/// The size of an image, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSize {
    /// Columns.
    pub width: usize,
    /// Rows.
    pub height: usize,
}

named! {
    /// The form of a reply.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ImageFormat as name {
        /// JSON with the images in base64.
        Json => "b64_json",
        /// The PNG file of the only image.
        Png => "png",
    }
}

impl ImageRequest {
    /// Reads a message. It may ask for at most `max_images` images.
    ///
    /// # Errors
    /// `Undecodable` for a body that is not JSON, `TooLarge` for too many images, else `BadInput` with the field and the
    /// value.
    pub fn parse(message: &Message, max_images: usize) -> Result<Self, TaskError> {
        let fields = Fields::parse(&message.body, &KEYS)?;
        let prompt = bounded_string(fields.required("prompt")?.get(), "prompt", MAX_PROMPT_BYTES)?;
        let count = fields.positive("n")?.unwrap_or(1);
        if count > max_images {
            let message =
                format!("n is {count}; this pool takes at most {max_images} images in a task (max_images)");
            return Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param("n"));
        }
        let format = match fields.get(FORMAT) {
            Some(raw) => format(&string(raw.get(), FORMAT)?)?,
            None => match text_header(&message.properties.headers, FORMAT)? {
                Some(name) => format(&name)?,
                None => ImageFormat::Json,
            },
        };
        if format == ImageFormat::Png && count > 1 {
            let message = format!("{FORMAT} is \"png\" and n is {count}; a PNG file holds one image");
            return Err(TaskError::bad_input(FORMAT, message));
        }
        Ok(Self {
            prompt,
            negative_prompt: fields.bounded_string("negative_prompt", MAX_PROMPT_BYTES)?.unwrap_or_default(),
            model: fields.string("model")?,
            count,
            size: fields.get("size").map(size).transpose()?.flatten(),
            steps: fields.positive(fields.either("steps", "num_inference_steps")?)?,
            guidance: fields.number_within("guidance_scale", 0.0..=MAX_GUIDANCE)?.unwrap_or(DEFAULT_GUIDANCE),
            seed: fields.unsigned("seed")?,
            format,
            stream: fields.boolean("stream", false)?,
            truncate: fields.boolean("truncate", true)?,
        })
    }
}

const FORMAT: &str = "response_format";

fn format(name: &str) -> Result<ImageFormat, TaskError> {
    match ImageFormat::ALL.into_iter().find(|(_, known)| *known == name) {
        Some((format, _)) => Ok(format),
        None => {
            let message = format!("{FORMAT} is {name:?}; \"b64_json\" and \"png\" are supported");
            Err(TaskError::bad_input(FORMAT, message))
        }
    }
}

/// Reads `512x512`. None for `auto`.
fn size(raw: &RawValue) -> Result<Option<ImageSize>, TaskError> {
    let text = string(raw.get(), "size")?;
    if text == "auto" {
        return Ok(None);
    }
    let number =
        |digits: &str| digits.parse().ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit()));
    let sides = text
        .split_once('x')
        .and_then(|(width, height)| Some(ImageSize { width: number(width)?, height: number(height)? }));
    sides
        .map(Some)
        .ok_or_else(|| invalid("size", "width and height in pixels, such as \"512x512\"", raw.get()))
}

/// An image of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GeneratedImage {
    /// Its size.
    pub size: ImageSize,
    /// Red, green and blue of each pixel, row by row.
    pub pixels: Vec<u8>,
    /// With this seed it alone is generated again.
    pub seed: u64,
}

/// Writes an image as a PNG file. `parameters` is its text under this name, by which programs show how an image was
/// made.
///
/// # Errors
/// `Internal` if it cannot be written.
pub fn png(image: &GeneratedImage, parameters: &str) -> Result<Vec<u8>, TaskError> {
    let failed =
        |error: png::EncodingError| TaskError::internal(format!("the image cannot be written: {error}"));
    let side = |pixels: usize| u32::try_from(pixels).unwrap_or(u32::MAX);
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, side(image.size.width), side(image.size.height));
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.add_itxt_chunk("parameters".to_owned(), parameters.to_owned()).map_err(failed)?;
    let mut writer = encoder.write_header().map_err(failed)?;
    writer.write_image_data(&image.pixels).map_err(failed)?;
    writer.finish().map_err(failed)?;
    Ok(file)
}

#[derive(Serialize)]
struct Reply {
    /// The time in seconds since 1970.
    created: u64,
    data: Vec<ReplyImage>,
    usage: Usage,
}

#[derive(Serialize)]
struct ReplyImage {
    b64_json: String,
    seed: u64,
}

/// A PNG file and the seed with which it is generated again.
pub struct SeededFile {
    /// The file.
    pub png: Vec<u8>,
    /// The seed.
    pub seed: u64,
}

/// Writes the reply with these images. `prompt_tokens` counts the tokens of both prompts, and `created` is the time in
/// seconds since 1970.
///
/// # Errors
/// `Internal` if it cannot be written.
pub fn write_images(
    files: Vec<SeededFile>,
    format: ImageFormat,
    prompt_tokens: usize,
    created: u64,
) -> Result<Body, TaskError> {
    match format {
        ImageFormat::Png => match files.into_iter().next() {
            Some(SeededFile { png, seed }) => {
                Ok(Body::new("image/png", png).header("seed", seed.to_string()))
            }
            None => Err(TaskError::internal("there is no image")),
        },
        ImageFormat::Json => {
            let image = |SeededFile { png, seed }| ReplyImage { b64_json: STANDARD.encode(png), seed };
            let data = files.into_iter().map(image).collect();
            to_json(&Reply { created, data, usage: Usage::new(prompt_tokens) }).map(Body::json)
        }
    }
}

/// How far an image of a task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename = "image_generation.progress")]
pub struct Progress {
    /// The index of the image within its task.
    pub index: usize,
    /// The number of steps that are done.
    pub step: usize,
    /// The number of all steps.
    pub steps: usize,
}

impl Progress {
    /// The part of the reply that reports it.
    ///
    /// # Errors
    /// `Internal` if it cannot be written.
    pub fn part(self) -> Result<Body, TaskError> {
        to_json(&self).map(Body::json)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Properties;

    fn parse(body: &str) -> Result<ImageRequest, TaskError> {
        ImageRequest::parse(&Message { body: body.to_owned().into(), ..Message::default() }, 4)
    }

    #[test]
    fn a_request_has_defaults() {
        let expected = ImageRequest {
            prompt: "a cat".into(),
            negative_prompt: String::new(),
            model: None,
            count: 1,
            size: None,
            steps: None,
            guidance: 7.5,
            seed: None,
            format: ImageFormat::Json,
            stream: false,
            truncate: true,
        };
        assert_eq!(parse(r#"{"prompt":"a cat"}"#).unwrap(), expected);
        let body = r#"{"prompt":"a","negative_prompt":"b","n":2,"size":"640x512","steps":9,"guidance_scale":0,
            "seed":18446744073709551615,"stream":true,"quality":"auto","user":"x","response_format":"b64_json"}"#;
        let request = parse(body).unwrap();
        assert_eq!(request.size, Some(ImageSize { width: 640, height: 512 }));
        assert_eq!((request.count, request.steps, request.guidance), (2, Some(9), 0.0));
        assert_eq!((request.seed, request.stream, &*request.negative_prompt), (Some(u64::MAX), true, "b"));
    }

    #[test]
    fn the_form_of_the_reply_may_be_a_header() {
        let headers = [("response_format".to_owned(), "png".into())].into();
        let properties = Properties { headers, ..Properties::default() };
        let message = |body: &str| Message { body: body.to_owned().into(), properties: properties.clone() };
        let request = ImageRequest::parse(&message(r#"{"prompt":"a"}"#), 4).unwrap();
        assert_eq!(request.format, ImageFormat::Png);
        let error = ImageRequest::parse(&message(r#"{"prompt":"a","n":2}"#), 4).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("response_format"), "{error}");
    }

    #[test]
    fn a_wrong_field_is_named_with_its_value() {
        for (fields, param, message) in [
            (r#""n":5"#, "n", "n is 5; this pool takes at most 4"),
            (r#""n":0"#, "n", "got 0"),
            (r#""steps":0"#, "steps", "got 0"),
            (r#""steps":2.5"#, "steps", "got 2.5"),
            (r#""size":"512""#, "size", "got \"512\""),
            (r#""size":"512x+12""#, "size", "got \"512x+12\""),
            (r#""size":"99999999999999999999x8""#, "size", "such as \"512x512\""),
            (r#""size":512"#, "size", "got 512"),
            (r#""guidance_scale":-1"#, "guidance_scale", "a number from 0 to 100, got -1"),
            (r#""guidance_scale":1e9"#, "guidance_scale", "got 1e9"),
            (r#""seed":-1"#, "seed", "got -1"),
            (r#""response_format":"url""#, "response_format", "\"b64_json\" and \"png\""),
            (r#""width":512"#, "width", "not supported"),
            (r#""steps":9,"num_inference_steps":9"#, "num_inference_steps", "means the same as steps"),
            (r#""scheduler":"ddim""#, "scheduler", "not supported"),
            (r#""promt":"x""#, "promt", "did you mean prompt"),
        ] {
            let error = parse(&format!(r#"{{"prompt":"a",{fields}}}"#)).unwrap_err();
            assert!(error.message.contains(message), "{fields}: {}", error.message);
            assert_eq!(error.param.as_deref(), Some(param), "{fields}");
        }
        assert_eq!(parse("{}").unwrap_err().param.as_deref(), Some("prompt"));
        let long = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(MAX_PROMPT_BYTES + 1));
        assert_eq!(parse(&long).unwrap_err().param.as_deref(), Some("prompt"));
    }

    #[test]
    fn a_png_file_has_the_pixels_and_the_parameters() {
        let size = ImageSize { width: 2, height: 1 };
        let image = GeneratedImage { size, pixels: vec![1, 2, 3, 250, 251, 252], seed: 7 };
        let file = png(&image, "a naïve cat\nSeed: 7").unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(&file)).read_info().unwrap();
        let text = reader.info().utf8_text[0].clone();
        assert_eq!((&*text.keyword, text.get_text().unwrap()), ("parameters", "a naïve cat\nSeed: 7".into()));
        let mut pixels = vec![0; 6];
        reader.next_frame(&mut pixels).unwrap();
        assert_eq!(pixels, image.pixels);
    }

    #[test]
    fn a_reply_is_json_or_one_file() {
        let files = || vec![SeededFile { png: b"file".to_vec(), seed: u64::MAX }];
        let body = write_images(files(), ImageFormat::Json, 154, 9).unwrap();
        let expected = r#"{"created":9,"data":[{"b64_json":"ZmlsZQ==","seed":18446744073709551615}],"usage":{"prompt_tokens":154,"total_tokens":154}}"#;
        assert_eq!(body.bytes, expected.as_bytes());
        let body = write_images(files(), ImageFormat::Png, 154, 9).unwrap();
        assert_eq!((&*body.content_type, &*body.bytes), ("image/png", &b"file"[..]));
        let part = Progress { index: 0, step: 1, steps: 2 }.part().unwrap();
        assert_eq!(part.bytes, &br#"{"type":"image_generation.progress","index":0,"step":1,"steps":2}"#[..]);
    }
}
