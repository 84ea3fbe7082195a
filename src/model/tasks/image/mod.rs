//! Classification of images: from files to pixels, and from the labels' numbers to response bodies. Decides which
//! files are decoded, bounded before they are. Never touches the device.

mod decode;
mod preprocessing;
mod resize;

use self::decode::{Error, Format, Limits, decode};
use self::preprocessing::Preprocessing;
use super::labels::Labels;
use super::names::ServedNames;
use super::prepared;
use crate::model::load::{self, ModelFiles};
use crate::model::nets::image::{ImageNetwork, Pixels, Sides};
use crate::model::{
    Body, Device, LoadError, LoadSpec, Message, Preprocessed, Processor, Properties, Route, SizedInput,
    TaskError, TaskErrorKind,
};
use crate::protocol::images::{ImageFile, ImagesRequest, write_images};

/// Pixels of a decoded image, unless the pool's options say otherwise: a photograph of 7,300 × 5,500.
const MOST_PIXELS: u64 = 40_000_000;
/// Bytes of decoded samples for each allowed pixel: red, green, blue and alpha.
const BYTES_OF_PIXEL: u64 = 4;
/// The side of a patch that counts as a token, in pixels.
const PATCH: usize = 16;
/// The fewest images that are divided among threads.
const MANY: usize = 2;

/// One pixel.
const PROBE: [u8; 69] = [
    137, 80, 78, 71, 13, 10, 26, 10, 0, 0, 0, 13, 73, 72, 68, 82, 0, 0, 0, 1, 0, 0, 0, 1, 8, 2, 0, 0, 0, 144,
    119, 83, 222, 0, 0, 0, 12, 73, 68, 65, 84, 120, 218, 99, 216, 82, 97, 3, 0, 3, 76, 1, 105, 234, 19, 15,
    219, 0, 0, 0, 0, 73, 69, 78, 68, 174, 66, 96, 130,
];

/// Loads a model that classifies images.
///
/// # Errors
/// [`LoadError`] for a file that is missing or invalid, for a model of another kind, and for a device that
/// computes wrongly.
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(ImageProcessor, ImageNetwork), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let labels = Labels::read(&files, &spec.source)?;
    let refused = |reason: String| LoadError::Unsupported { model: spec.source.clone(), reason };
    let path = files.required("preprocessor_config.json")?;
    let text = String::from_utf8(load::read(&path)?).map_err(|error| refused(error.to_string()))?;
    let preprocessing = Preprocessing::read(&text).map_err(|error| refused(error.to_string()))?;
    let mut pixels = MOST_PIXELS;
    for (option, value) in &spec.options {
        pixels = value.as_u64().filter(|most| option == "max_pixels" && *most > 0).ok_or_else(|| {
            refused(format!(
                "[pool.options] has {option} = {value}; max_pixels = a positive integer is known"
            ))
        })?;
    }
    let sides = Sides { height: preprocessing.height, width: preprocessing.width };
    let network = ImageNetwork::load((spec, device), &files, sides, labels.names.len())?;
    let processor = ImageProcessor {
        preprocessing,
        labels,
        limits: Limits { pixels, bytes: pixels.saturating_mul(BYTES_OF_PIXEL) },
        tokens: (sides.height * sides.width).div_ceil(PATCH * PATCH),
        names: ServedNames::new(spec),
        max_inputs: spec.max_inputs,
    };
    Ok((processor, network))
}

/// Turns files into pixels, and the labels' numbers into responses.
pub struct ImageProcessor {
    preprocessing: Preprocessing,
    labels: Labels,
    limits: Limits,
    /// The size of each input.
    tokens: usize,
    names: ServedNames,
    max_inputs: usize,
}

/// What the response needs of its request.
pub struct ImageOptions {
    top_k: usize,
    listed: bool,
    raw_scores: bool,
}

impl Processor for ImageProcessor {
    type Context = ImageOptions;
    type Input = Pixels;
    type Piece = ();
    type Output = Vec<f32>;

    fn routes(&self) -> &[Route] {
        const MEDIA: &[&str] = &["application/json", "image/jpeg", "image/png", "image/webp"];
        const ROUTES: &[Route] = &[Route { url: "/classify", media_types: MEDIA }];
        ROUTES
    }

    fn probe(&self) -> Option<Message> {
        let properties = Properties { content_type: Some("image/png".into()), ..Properties::default() };
        Some(Message { properties, body: PROBE.to_vec().into() })
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let ImagesRequest { images, listed, model, top_k, raw_scores } =
            ImagesRequest::parse(message, self.max_inputs)?;
        self.names.check(model.as_deref())?;
        let inputs = prepared(images, MANY, |_, file| self.pixels(&file))?;
        Ok((ImageOptions { top_k, listed, raw_scores }, inputs))
    }

    fn finish(&self, request: ImageOptions, mut outputs: Vec<Vec<f32>>) -> Result<Body, TaskError> {
        if !request.raw_scores {
            outputs.iter_mut().for_each(|numbers| self.labels.probabilities(numbers));
        }
        let form = (request.top_k, request.listed);
        write_images(&outputs, &self.labels.names, form).map(Body::json)
    }
}

impl ImageProcessor {
    fn pixels(&self, file: &ImageFile) -> Result<SizedInput<Pixels>, TaskError> {
        let bytes = &file.bytes;
        let said = file.media_type.as_deref().map(|media_type| {
            Format::from_media_type(media_type).ok_or_else(|| {
                format!("the media type is {media_type:?}; image/jpeg, image/png and image/webp are decoded")
            })
        });
        let format = match said {
            Some(format) => format,
            None => Format::guess(bytes).ok_or_else(|| "it is no image of type JPEG, PNG or WebP".to_owned()),
        };
        let image = match format {
            Ok(format) => decode(bytes, format, self.limits),
            Err(reason) => return Err(bad(file, TaskErrorKind::BadInput, &reason)),
        };
        let image = image.map_err(|error| {
            let kind = match &error {
                Error::TooManyPixels { .. } | Error::TooMuchMemory { .. } => TaskErrorKind::TooLarge,
                // A body that is not what its media type says.
                _ if file.path.is_none() => TaskErrorKind::Undecodable,
                _ => TaskErrorKind::BadInput,
            };
            bad(file, kind, &error.to_string())
        })?;
        Ok(SizedInput::new(Pixels(self.preprocessing.apply(&image)), self.tokens))
    }
}

/// The error of one image of a request.
fn bad(ImageFile { path, .. }: &ImageFile, kind: TaskErrorKind, reason: &str) -> TaskError {
    match path {
        Some(path) => TaskError::new(kind, format!("{path}: {reason}")).at(path),
        None => TaskError::new(kind, reason),
    }
}

#[cfg(test)]
mod test_files {
    use super::decode::{Format, Limits, Rgb8, decode};

    pub(super) fn read(file: &str) -> Vec<u8> {
        let path = format!("{}/tests/fixtures/images/{file}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    pub(super) fn expected() -> serde_json::Value {
        serde_json::from_slice(&read("expected.json")).unwrap()
    }

    pub(super) fn png(file: &str) -> Rgb8 {
        decode(&read(file), Format::Png, Limits { pixels: 1 << 24, bytes: 1 << 26 }).unwrap()
    }
}
