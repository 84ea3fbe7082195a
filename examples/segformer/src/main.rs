//! Classifies images by SegFormer of candle-transformers, such as `nvidia/mit-b0`. The body of a task is a JPEG or PNG file;
//! the reply lists the labels with their probabilities:
//!
//!     cargo run -p segformer -- launch --set 'pool[0].model=segformer' --set 'pool[0].options.folder=models/mit-b0'

use std::io::Cursor;
use std::process::ExitCode;

use candle_core::{DType, Device, Module as _, Tensor};
use candle_nn::VarBuilder;
use candle_nn::ops::softmax_last_dim;
use candle_transformers::models::segformer::{Config, ImageClassificationModel};
use image::{ImageReader, Limits, imageops::FilterType};
use sconce::app::{self, Registry};
use sconce::model::{
    Body, Forward, ForwardError, LoadError, LoadSpec, Message, Preprocessed, Processor, Route, SizedInput,
    TaskError, TaskErrorKind,
};
use serde_json::{Value, json};

/// Images are resized to squares of this side, in pixels, so that all images of a batch have one shape.
const SIDE: usize = 224;
/// The maximum width and height of an image, in pixels. A small file can hold a giant image.
const MAX_SIDE: u32 = 8_192;
/// Mean and standard deviation of each colour in ImageNet, with which published models were trained.
const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const DEVIATION: [f32; 3] = [0.229, 0.224, 0.225];

/// Files → pixels; probabilities → JSON.
struct Images {
    labels: Vec<String>,
}

struct Segformer {
    network: ImageClassificationModel,
    device: Device,
}

impl Processor for Images {
    type Context = ();
    type Input = Vec<f32>;
    type Piece = ();
    type Output = Vec<f32>;

    fn routes(&self) -> &[Route] {
        &[Route { url: "/classify", media_types: &["image/png", "image/jpeg"] }]
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let bad = |error: String| TaskError::new(TaskErrorKind::BadInput, format!("the image: {error}"));
        let reader = ImageReader::new(Cursor::new(&message.body)).with_guessed_format();
        let mut reader = reader.map_err(|error| bad(error.to_string()))?;
        let mut limits = Limits::default();
        (limits.max_image_width, limits.max_image_height) = (Some(MAX_SIDE), Some(MAX_SIDE));
        reader.limits(limits);
        let image = reader.decode().map_err(|error| bad(error.to_string()))?;
        let image = image.resize_exact(SIDE as u32, SIDE as u32, FilterType::Triangle).to_rgb8();
        let channel = |colour: usize| {
            let level = move |pixel: &image::Rgb<u8>| f32::from(pixel[colour]) / 255.0;
            image.pixels().map(move |pixel| (level(pixel) - MEAN[colour]) / DEVIATION[colour])
        };
        let numbers: Vec<f32> = (0..3).flat_map(channel).collect();
        // A token is a patch of 16 by 16 pixels.
        Ok(((), vec![SizedInput::new(numbers, SIDE * SIDE / 256)].into()))
    }

    fn bytes(&self, numbers: &Vec<f32>) -> usize {
        size_of_val(&**numbers)
    }

    fn finish(&self, (): (), outputs: Vec<Vec<f32>>) -> Result<Body, TaskError> {
        let mut rows: Vec<(&String, f32)> = self.labels.iter().zip(outputs.into_iter().flatten()).collect();
        rows.sort_by(|a, b| b.1.total_cmp(&a.1));
        let rows: Vec<Value> =
            rows.iter().map(|(label, score)| json!({"label": label, "score": score})).collect();
        Ok(Body::json(Value::from(rows).to_string()))
    }
}

impl Forward for Segformer {
    type Input = Vec<f32>;
    type Output = Vec<f32>;
    type Pending = Vec<Result<Vec<f32>, TaskError>>;

    fn submit(&mut self, images: &[&Vec<f32>]) -> Result<Self::Pending, ForwardError> {
        let shape = (images.len(), 3, SIDE, SIDE);
        let numbers = images.iter().flat_map(|numbers| numbers.iter().copied()).collect();
        let logits = self.network.forward(&Tensor::from_vec(numbers, shape, &self.device)?)?;
        let probabilities: Vec<Vec<f32>> = softmax_last_dim(&logits)?.to_vec2()?;
        Ok(probabilities.into_iter().map(Ok).collect())
    }

    fn wait(&mut self, pending: Self::Pending) -> Result<Self::Pending, ForwardError> {
        Ok(pending)
    }
}

fn load(spec: &LoadSpec, device: &Device) -> Result<(Images, Segformer), LoadError> {
    let folder = spec.options.get("folder").and_then(Value::as_str).unwrap_or("models/mit-b0");
    let read = |name: &str| {
        let path = format!("{folder}/{name}");
        std::fs::read(&path).map_err(|error| spec.failed(format!("{path}: {error}")))
    };
    let config: Config = serde_json::from_slice(&read("config.json")?).map_err(|error| spec.failed(error))?;
    let label = |index: usize| config.id2label.get(&index.to_string()).cloned().unwrap_or_default();
    let labels: Vec<String> = (0..config.id2label.len()).map(label).collect();
    let weights = VarBuilder::from_buffered_safetensors(read("model.safetensors")?, DType::F32, device);
    let network = weights.and_then(|weights| ImageClassificationModel::new(&config, labels.len(), weights));
    let network = network.map_err(|error| spec.failed(error))?;
    Ok((Images { labels }, Segformer { network, device: device.clone() }))
}

fn main() -> ExitCode {
    app::main(&Registry::default().with_forward("segformer", load))
}
