//! Generates images for measurements from texts; the same text gives the same file. They are not photographs, but
//! take as long to decode as a photograph of the same size.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use image::codecs::jpeg::JpegEncoder;
use image::{Rgb, RgbImage};
use serde_json::json;

use crate::model::family::Sample;
use crate::protocol::batch_line::RequestBody;

/// The sides of an image, in pixels.
const SIDES: [u32; 2] = [480, 360];
/// The side of the squares that an image consists of, in pixels.
const SQUARE: u32 = 12;

/// A task for `url` with an image for each text. A single image is the body itself; several are data URLs.
pub fn images(url: &'static str, texts: &[String]) -> Sample {
    if let [alone] = texts {
        let media_type = Some("image/jpeg".to_owned());
        let body = RequestBody { media_type, ..jpeg(alone).into() };
        return Sample { url: Some(url), body, inputs: 1 };
    }
    let data_url = |text: &String| format!("data:image/jpeg;base64,{}", STANDARD.encode(jpeg(text)));
    let urls: Vec<String> = texts.iter().map(data_url).collect();
    Sample::json(url, &json!({ "image_url": urls }), texts.len())
}

/// A JPEG of squares, each with a gradient. The text determines their colours.
fn jpeg(text: &str) -> Vec<u8> {
    let colour = |x: u32, y: u32| {
        let mut hash = DefaultHasher::new();
        (text, x / SQUARE, y / SQUARE).hash(&mut hash);
        let [r, g, b, ..] = hash.finish().to_le_bytes();
        let shade = (x % SQUARE + y % SQUARE) as u8;
        Rgb([r, g, b].map(|level| level.saturating_add(shade)))
    };
    let [width, height] = SIDES;
    let mut file = Vec::new();
    let written = RgbImage::from_fn(width, height, colour).write_with_encoder(JpegEncoder::new(&mut file));
    debug_assert!(written.is_ok(), "writing to memory cannot fail: {written:?}");
    file
}
