//! Classification of images: turns files into pixels, and the labels' logits into response bodies. Decides which files
//! are decoded and in which slices. Checks the headers of all files before it decodes any of them. Never touches the
//! device.

mod decode;
mod format;
mod jpeg;
mod orientation;
mod preprocessing;
pub(super) mod request;
mod resize;
mod sample;

use std::sync::Arc;
use std::vec::IntoIter;

use serde::Deserialize;

use self::decode::{Error, Header, Limits, decode, header};
use self::preprocessing::Preprocessing;
use self::request::{ImageFile, ImagesRequest, KEYS};
pub(super) use self::sample::images as sample_of_images;
use super::labels::{Labels, write_best_labels};
use super::names::ServedNames;
use super::prepare_all;
use crate::model::family::{Example, Family, FileRules, OptionDefault, OptionSpec, Serves, Takes};
use crate::model::load::{self, ModelFiles, weights};
use crate::model::nets::image::{ARCHITECTURES, ImageNetwork, Pixels, check_dtype};
use crate::model::{
    Body, Device, FileUrl, Files, Inputs, LoadError, LoadSpec, Message, Preprocessed, Processor, Properties,
    Route, SizedInput, TaskError, TaskErrorKind,
};
use crate::protocol::endpoints::CLASSIFY_URL as URL;
use crate::protocol::{BYTES, Headers, JSON, KOMBU_BYTES};

/// The media types of requests with images. A file's bytes tell its format, whatever its media type. Clients choose one
/// with a subtype by the ending of a file's name.
pub(super) const MEDIA_TYPES: &[&str] =
    &[JSON, "image/jpeg", "image/png", "image/webp", "image/*", BYTES, KOMBU_BYTES];

/// The default of `max_task_pixels`, as a multiple of `max_pixels`.
const DEFAULT_TASK_IMAGES: u64 = 4;
/// Bytes of decoded samples for each allowed pixel: red, green, blue and alpha.
const BYTES_PER_PIXEL: u64 = 4;
/// The side of a patch that counts as a token, in pixels.
const PATCH: usize = 16;
/// From this number of images on, threads share them.
pub(super) const MANY_IMAGES: usize = 2;
/// Pixels of the images in a slice, for each thread: decoding them takes about 10 ms. A larger image is a slice by
/// itself.
pub(super) const SLICE_PIXELS: u64 = 1 << 20;
/// The maximum number of images in a slice, for each thread, since each image has a cost beside its pixels.
const SLICE_IMAGES: usize = 16;

/// A PNG file of one pixel, for the probe.
const PROBE: [u8; 69] = [
    137, 80, 78, 71, 13, 10, 26, 10, 0, 0, 0, 13, 73, 72, 68, 82, 0, 0, 0, 1, 0, 0, 0, 1, 8, 2, 0, 0, 0, 144,
    119, 83, 222, 0, 0, 0, 12, 73, 68, 65, 84, 120, 218, 99, 216, 82, 97, 3, 0, 3, 76, 1, 105, 234, 19, 15,
    219, 0, 0, 0, 0, 73, 69, 78, 68, 174, 66, 96, 130,
];

/// The most pixels of an image: an option of every family that takes images.
pub(super) const MAX_PIXELS: OptionSpec = OptionSpec {
    name: "max_pixels",
    takes: Takes::Whole(1..=u64::MAX),
    default: OptionDefault::Value("40000000"),
    help: "the most pixels of a decoded image; the default is a photograph of 7,300 × 5,400",
};
/// The most pixels of a task: an option of every family that takes images.
pub(super) const MAX_TASK_PIXELS: OptionSpec = OptionSpec {
    name: "max_task_pixels",
    takes: Takes::Whole(1..=u64::MAX),
    default: OptionDefault::Derived("4 × `max_pixels`"),
    help: "the most pixels of all images of a task",
};

/// Models that classify images.
pub static FAMILY: Family = Family {
    name: "classify",
    routes: &[Route { url: URL, media_types: MEDIA_TYPES }],
    fields: &[(URL, &KEYS)],
    serves: Serves::Files(FileRules { configs: &ARCHITECTURES, ..FileRules::new(request_files, check) }),
    options: &[MAX_PIXELS, MAX_TASK_PIXELS],
    sample: |texts| sample_of_images(URL, texts),
    // The limit is low for the fuzz target, whose files may declare any number of pixels.
    example: Example { model: "tiny-vit", options: &[("max_pixels", 1_000_000)] },
};

/// Requests every file that loading may read, the weights last.
fn request_files(files: &ModelFiles) -> Result<(), LoadError> {
    files.required("config.json")?;
    files.optional("preprocessor_config.json")?;
    files.weights().map(drop)
}

fn check(spec: &LoadSpec) -> Result<(), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    Labels::read(&files, &spec.source)?;
    PixelLimits::read(&FAMILY, spec)?;
    read_preprocessing(&files, spec)?;
    check_dtype(spec, &files)?;
    weights::check(&files.weights()?)
}

/// Reads `preprocessor_config.json`.
pub(super) fn read_preprocessing(files: &ModelFiles, spec: &LoadSpec) -> Result<Preprocessing, LoadError> {
    let path = files.required("preprocessor_config.json")?;
    let text = String::from_utf8(load::read(&path)?).map_err(|error| spec.unsupported(error.to_string()))?;
    Preprocessing::read(&text)
        .map_err(|problem| spec.unsupported(format!("preprocessor_config.json: {problem}")))
}

/// Loads a model that classifies images.
///
/// # Errors
/// [`LoadError`] for a file that is missing or invalid, for a model of another kind, and for a device that
/// computes wrongly.
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(ImageProcessor, ImageNetwork), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let labels = Labels::read(&files, &spec.source)?;
    let preprocessing = read_preprocessing(&files, spec)?;
    let limits = PixelLimits::read(&FAMILY, spec)?;
    let sides = preprocessing.sides();
    let network = ImageNetwork::load(spec, device, &files, sides, labels.names.len())?;
    let tokens = (sides.height * sides.width).div_ceil(PATCH * PATCH);
    let processor = ImageProcessor {
        decoder: Arc::new(Decoder { preprocessing, limits, tokens }),
        labels,
        names: ServedNames::new(spec),
        max_inputs: spec.max_inputs,
    };
    Ok((processor, network))
}

/// The maximum numbers of pixels that are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PixelLimits {
    /// Pixels of one image.
    image: u64,
    /// Pixels of all images of a task. Few bytes can declare many pixels, each of which takes time and memory.
    task: u64,
}

impl PixelLimits {
    /// The limits in the pool's options, which include [`MAX_PIXELS`] and [`MAX_TASK_PIXELS`].
    ///
    /// # Errors
    /// [`LoadError::Option`] for an option that is unknown or not a positive number.
    pub(super) fn read(family: &Family, spec: &LoadSpec) -> Result<Self, LoadError> {
        #[derive(Deserialize)]
        struct Options {
            max_pixels: u64,
            max_task_pixels: Option<u64>,
        }
        let Options { max_pixels: image, max_task_pixels } = family.read_options(spec)?;
        let task = max_task_pixels.unwrap_or(image.saturating_mul(DEFAULT_TASK_IMAGES));
        Ok(Self { image, task })
    }

    fn image_limits(self) -> Limits {
        Limits { pixels: self.image, bytes: self.image.saturating_mul(BYTES_PER_PIXEL) }
    }
}

/// Turns files into pixels, and the labels' logits into responses.
pub struct ImageProcessor {
    decoder: Arc<Decoder>,
    labels: Labels,
    names: ServedNames,
    max_inputs: usize,
}

/// Turns files into a model's inputs.
pub(super) struct Decoder {
    pub(super) preprocessing: Preprocessing,
    pub(super) limits: PixelLimits,
    /// The size of each input in tokens.
    pub(super) tokens: usize,
}

/// A request with an image of one pixel, for the probe.
pub(super) fn probe_message(headers: Headers) -> Message {
    let properties = Properties { content_type: Some("image/png".into()), headers, ..Properties::default() };
    Message { properties, body: PROBE.to_vec().into() }
}

/// The parts of a request that its response needs.
pub struct ImageContext {
    top_k: usize,
    is_list: bool,
    raw_scores: bool,
}

impl Processor for ImageProcessor {
    type Context = ImageContext;
    type Input = Pixels;
    type Piece = ();
    type Output = Vec<f32>;

    fn routes(&self) -> &[Route] {
        FAMILY.routes
    }

    fn probe(&self) -> Option<Message> {
        Some(probe_message(Headers::new()))
    }

    fn file_urls(&self, message: &Message) -> Vec<FileUrl> {
        ImagesRequest::file_urls(message, self.max_inputs)
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        self.preprocess_with(message, &Files::default())
    }

    fn preprocess_with(&self, message: &Message, files: &Files) -> Result<Preprocessed<Self>, TaskError> {
        let ImagesRequest { images, is_list, model, top_k, raw_scores } =
            ImagesRequest::parse(message, self.max_inputs, files)?;
        self.names.check(model.as_deref())?;
        let images = self.decoder.read_headers(images)?;
        let slices = slices(self.decoder.clone(), images);
        Ok((ImageContext { top_k, is_list, raw_scores }, Inputs::Slices(Box::new(slices))))
    }

    fn bytes(&self, Pixels(numbers): &Pixels) -> usize {
        size_of_val(&**numbers)
    }

    fn finish(&self, context: ImageContext, mut outputs: Vec<Vec<f32>>) -> Result<Body, TaskError> {
        if !context.raw_scores {
            outputs.iter_mut().for_each(|logits| self.labels.apply_function(logits));
        }
        write_best_labels(&outputs, &self.labels.names, context.top_k, context.is_list).map(Body::json)
    }
}

/// An image whose header was read, but which was not decoded yet.
pub(super) struct UndecodedImage {
    file: ImageFile,
    header: Header,
}

#[cfg(feature = "candle-transformers")]
impl UndecodedImage {
    /// The pixels that its header declares.
    pub(super) fn pixels(&self) -> u64 {
        self.header.pixels
    }
}

/// The inputs of a task's images, which are decoded slice by slice.
pub(super) fn slices(
    decoder: Arc<Decoder>,
    images: Vec<UndecodedImage>,
) -> impl Iterator<Item = Result<Vec<SizedInput<Pixels>>, TaskError>> + Send {
    Slicer { decoder, images: images.into_iter() }
}

/// Decodes the images of a task slice by slice. The sizes in the images' headers limit a slice to about ten
/// milliseconds of work.
struct Slicer {
    decoder: Arc<Decoder>,
    images: IntoIter<UndecodedImage>,
}

impl Iterator for Slicer {
    type Item = Result<Vec<SizedInput<Pixels>>, TaskError>;

    fn next(&mut self) -> Option<Self::Item> {
        let threads = if rayon::current_thread_index().is_some() { rayon::current_num_threads() } else { 1 };
        let count = slice_length(self.images.as_slice(), threads);
        let slice: Vec<_> = self.images.by_ref().take(count).collect();
        if slice.is_empty() {
            return None;
        }
        Some(prepare_all(slice, MANY_IMAGES, |_, image| self.decoder.pixels(&image)))
    }

    /// Each slice has at least one image, so there are at most as many slices as images.
    fn size_hint(&self) -> (usize, Option<usize>) {
        (usize::from(self.images.len() > 0), Some(self.images.len()))
    }
}

/// The number of images in the next slice for this number of threads; at least 1. `images` are those that remain.
fn slice_length(images: &[UndecodedImage], threads: usize) -> usize {
    let mut left = SLICE_PIXELS.saturating_mul(threads as u64);
    let fits = |image: &&UndecodedImage| match left.checked_sub(image.header.pixels) {
        Some(pixels) => {
            left = pixels;
            true
        }
        None => false,
    };
    images.iter().take(SLICE_IMAGES.saturating_mul(threads)).take_while(fits).count().max(1)
}

impl Decoder {
    /// Reads the headers of all images of a task, and refuses the task if they declare too many pixels.
    pub(super) fn read_headers(&self, files: Vec<ImageFile>) -> Result<Vec<UndecodedImage>, TaskError> {
        self.read_each_header(files)?.into_iter().collect()
    }

    /// Reads the headers of all images of a task. The outer error refuses the task, because its images declare too many
    /// pixels. An inner error concerns only its image.
    pub(super) fn read_each_header(
        &self,
        files: Vec<ImageFile>,
    ) -> Result<Vec<Result<UndecodedImage, TaskError>>, TaskError> {
        let mut pixels: u64 = 0;
        let mut read = |file: ImageFile| {
            let image = self.read_header(file);
            if let Ok(UndecodedImage { file, header, .. }) = &image {
                pixels = pixels.saturating_add(header.pixels);
                if pixels > self.limits.task {
                    let max_pixels = self.limits.task;
                    let reason = format!(
                        "with this image the task has {pixels} pixels, and {max_pixels} are allowed (max_task_pixels)"
                    );
                    return Err(image_error(file, TaskErrorKind::TooLarge, &reason));
                }
            }
            Ok(image)
        };
        files.into_iter().map(&mut read).collect()
    }

    fn read_header(&self, file: ImageFile) -> Result<UndecodedImage, TaskError> {
        let to_task_error = |error| decoding_error(&file, &error);
        let header = header(&file.bytes).map_err(to_task_error)?;
        self.limits.image_limits().check(header).map_err(to_task_error)?;
        Ok(UndecodedImage { file, header })
    }

    /// Decodes an image, and turns it into the model's input.
    pub(super) fn pixels(&self, image: &UndecodedImage) -> Result<SizedInput<Pixels>, TaskError> {
        let image = decode(&image.file.bytes, self.limits.image_limits())
            .map_err(|error| decoding_error(&image.file, &error))?;
        Ok(SizedInput::new(Pixels(self.preprocessing.apply(&image)), self.tokens))
    }
}

/// The error of an image that cannot be decoded.
fn decoding_error(file: &ImageFile, error: &Error) -> TaskError {
    let kind = match error {
        Error::TooManyPixels { .. } | Error::TooLargePicture { .. } | Error::TooMuchMemory { .. } => {
            TaskErrorKind::TooLarge
        }
        // The image is the body itself, and it is no image or broken.
        _ if file.path.is_none() => TaskErrorKind::Undecodable,
        _ => TaskErrorKind::BadInput,
    };
    image_error(file, kind, &error.to_string())
}

/// The error of one image of a request.
fn image_error(ImageFile { path, .. }: &ImageFile, kind: TaskErrorKind, reason: &str) -> TaskError {
    match path {
        Some(path) => TaskError::new(kind, format!("{path}: {reason}")).with_param(path),
        None => TaskError::new(kind, reason),
    }
}

#[cfg(test)]
pub(crate) mod test_files {
    use super::decode::{Limits, Rgb8, decode};

    pub(super) fn read(file: &str) -> Vec<u8> {
        let path = format!("{}/tests/fixtures/images/{file}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    pub(super) fn expected() -> serde_json::Value {
        serde_json::from_slice(&read("expected.json")).unwrap()
    }

    /// A lossless WebP file of one colour, whose pixels take no bits.
    pub(crate) fn one_colour_webp(width: u32, height: u32) -> Vec<u8> {
        let mut bits: u64 = 0;
        let mut length = 0;
        let mut push = |value: u64, count: u32| {
            bits |= value << length;
            length += count;
        };
        // No transform, no colour cache, no meta prefix codes.
        push(0, 3);
        // Five prefix codes, each with one symbol: green, red, blue, alpha, distance.
        for symbol in [7, 5, 3, 255, 0] {
            // A simple code, of one symbol, of 8 bits.
            push(0b101, 3);
            push(symbol, 8);
        }
        let sides = (width - 1) | (height - 1) << 14;
        let mut data = [&[0x2f], &sides.to_le_bytes()[..], &bits.to_le_bytes()[..]].concat();
        data.push(0);
        let mut file = b"RIFF\0\0\0\0WEBPVP8L".to_vec();
        file.extend((data.len() as u32).to_le_bytes());
        file.extend(data);
        let length = file.len() as u32 - 8;
        file[4..8].copy_from_slice(&length.to_le_bytes());
        file
    }

    pub(super) fn png(file: &str) -> Rgb8 {
        decode(&read(file), Limits { pixels: 1 << 24, bytes: 1 << 26 }).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::format::Format;
    use super::*;

    #[test]
    fn a_slice_takes_about_ten_milliseconds_or_is_one_image() {
        let declared = |pixels: u64| UndecodedImage {
            file: ImageFile { bytes: Vec::new().into(), path: None },
            header: Header { format: Format::WebP, width: 1, height: pixels as u32, pixels },
        };
        let length = |pixels: &[u64], threads| {
            slice_length(&pixels.iter().map(|pixels| declared(*pixels)).collect::<Vec<_>>(), threads)
        };
        assert_eq!(length(&[40_000_000, 1, 1], 1), 1);
        assert_eq!(length(&[500_000, 500_000, 500_000], 1), 2);
        assert_eq!(length(&[500_000; 20], 8), 16);
        assert_eq!(length(&[1; 100], 1), SLICE_IMAGES);
    }

    fn limits(options: &[(&str, Value)]) -> Result<PixelLimits, String> {
        let options = options.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        let spec = LoadSpec { options, ..LoadSpec::new("a") };
        PixelLimits::read(&FAMILY, &spec).map_err(|error| error.to_string())
    }

    #[test]
    fn by_default_a_task_may_have_four_times_max_pixels() {
        assert_eq!(limits(&[]), Ok(PixelLimits { image: 40_000_000, task: 160_000_000 }));
        assert_eq!(limits(&[("max_pixels", json!(10))]), Ok(PixelLimits { image: 10, task: 40 }));
        let both = [("max_pixels", json!(10)), ("max_task_pixels", json!(15))];
        assert_eq!(limits(&both), Ok(PixelLimits { image: 10, task: 15 }));
        for (name, value) in [("max_pixels", json!(0)), ("max_task_pixels", json!("many"))] {
            let error = limits(&[(name, value.clone())]).unwrap_err();
            assert!(error.contains(&format!("{name} = {value}")), "{error}");
        }
        let error = limits(&[("max_pixel", json!(1))]).unwrap_err();
        assert!(error.contains("did you mean `max_pixels`?"), "{error}");
    }
}
