//! Semantic segmentation by SegFormer of candle-transformers. The body of a task is a JPEG or PNG file. The reply is a grey
//! PNG file, in which the value of a pixel is the index of its label (`id2label` in the model's `config.json`):
//!
//!     cargo run -p segmenter -- launch --set 'pool[0].model=segformer' --set 'pool[0].options.folder=models/segformer-b0'

use std::io::Cursor;
use std::process::ExitCode;

use candle_core::{DType, Device, Module as _, Result as CandleResult, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::segformer::{Config, SemanticSegmentationModel};
use image::{GrayImage, ImageFormat, ImageReader, Limits, imageops::FilterType};
use sconce::app::{self, Registry};
use sconce::model::{
    Body, Forward, ForwardError, LoadError, LoadSpec, Message, Preprocessed, Processor, Route, SizedInput,
    TaskError, TaskErrorKind,
};
use serde_json::Value;

/// Images are resized to squares of this side, in pixels, so that all images of a batch have one shape. Replies have a
/// quarter of this side.
const SIDE: usize = 512;
/// The maximum width and height of an image, in pixels. A small file can hold a giant image.
const MAX_SIDE: u32 = 8_192;
/// Mean and standard deviation of each colour in ImageNet, with which published models were trained.
const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const DEVIATION: [f32; 3] = [0.229, 0.224, 0.225];

struct Images;

struct Segmenter(SemanticSegmentationModel, Device);

impl Processor for Images {
    type Context = ();
    type Input = Vec<f32>;
    type Piece = ();
    type Output = Vec<u8>;

    fn routes(&self) -> &[Route] {
        &[Route { url: "/segment", media_types: &["image/png", "image/jpeg"] }]
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let bad = |error: String| TaskError::new(TaskErrorKind::BadInput, format!("the image: {error}"));
        let mut reader = ImageReader::new(Cursor::new(&message.body))
            .with_guessed_format()
            .map_err(|e| bad(e.to_string()))?;
        let mut limits = Limits::default();
        (limits.max_image_width, limits.max_image_height) = (Some(MAX_SIDE), Some(MAX_SIDE));
        reader.limits(limits);
        let image = reader.decode().map_err(|error| bad(error.to_string()))?;
        let image = image.resize_exact(SIDE as u32, SIDE as u32, FilterType::Triangle).to_rgb8();
        let level = |colour: usize| {
            image
                .pixels()
                .map(move |pixel| (f32::from(pixel[colour]) / 255.0 - MEAN[colour]) / DEVIATION[colour])
        };
        let numbers: Vec<f32> = (0..3).flat_map(level).collect();
        // A token is a patch of 16 by 16 pixels.
        Ok(((), vec![SizedInput::new(numbers, SIDE * SIDE / 256)].into()))
    }

    fn bytes(&self, numbers: &Vec<f32>) -> usize {
        size_of_val(&**numbers)
    }

    fn finish(&self, (): (), outputs: Vec<Vec<u8>>) -> Result<Body, TaskError> {
        let side = SIDE as u32 / 4;
        let image = GrayImage::from_raw(side, side, outputs.concat())
            .ok_or_else(|| TaskError::internal("no image"))?;
        let mut file = Cursor::new(Vec::new());
        image
            .write_to(&mut file, ImageFormat::Png)
            .map_err(|error| TaskError::internal(error.to_string()))?;
        Ok(Body::new("image/png", file.into_inner()))
    }
}

impl Forward for Segmenter {
    type Input = Vec<f32>;
    type Output = Vec<u8>;
    type Pending = Vec<Result<Vec<u8>, TaskError>>;

    fn submit(&mut self, images: &[&Vec<f32>]) -> Result<Self::Pending, ForwardError> {
        let labels = || -> CandleResult<_> {
            let shape = (images.len(), 3, SIDE, SIDE);
            let numbers = images.iter().flat_map(|numbers| numbers.iter().copied()).collect();
            let scores = self.0.forward(&Tensor::from_vec(numbers, shape, &self.1)?)?;
            scores.argmax(1)?.flatten_from(1)?.to_dtype(DType::U8)?.to_vec2()
        };
        Ok(labels().map_err(|error| ForwardError::from(&error))?.into_iter().map(Ok).collect())
    }

    fn wait(&mut self, pending: Self::Pending) -> Result<Self::Pending, ForwardError> {
        Ok(pending)
    }
}

fn load(spec: &LoadSpec, device: &Device) -> Result<(Images, Segmenter), LoadError> {
    let folder = spec.options.get("folder").and_then(Value::as_str).unwrap_or("models/segformer");
    let read = |name: &str| {
        std::fs::read(format!("{folder}/{name}"))
            .map_err(|error| spec.failed(format!("{folder}/{name}: {error}")))
    };
    let config: Config = serde_json::from_slice(&read("config.json")?).map_err(|error| spec.failed(error))?;
    let weights = VarBuilder::from_buffered_safetensors(read("model.safetensors")?, DType::F32, device);
    let network =
        weights.and_then(|weights| SemanticSegmentationModel::new(&config, config.id2label.len(), weights));
    Ok((Images, Segmenter(network.map_err(|error| spec.failed(error))?, device.clone())))
}

fn main() -> ExitCode {
    app::main(&Registry::default().with_forward("segformer", load))
}
