//! Says which colour an image is, of a PNG as the body of a message:
//!
//!     cargo run -p image-classifier -- launch --set 'pool[0].model=colours'
//!
//! The network is a small one: a convolution that tells colours apart, and the mean over the image.

use std::io::Cursor;
use std::process::ExitCode;

use candle_core::{Device, Result as CandleResult, Tensor};
use candle_nn::ops::softmax_last_dim;
use sconce::app::{self, Registry};
use sconce::model::{
    Body, Forward, ForwardError, LoadError, LoadSpec, Message, Preprocessed, Processor, Route, SizedInput,
    TaskError, TaskErrorKind,
};
use serde_json::{Value, json};

/// Pixels of the largest image that is decoded: a small file can hold a giant one.
const MOST_PIXELS: usize = 1 << 22;

/// PNG files → pixels; scores → JSON.
struct Images {
    labels: Vec<String>,
}

/// Numbers from 0 to 1: all of red, then green, then blue.
struct Pixels {
    numbers: Vec<f32>,
    height: usize,
    width: usize,
}

/// `[labels, 3, 1, 1]`, on its device.
struct Colours(Tensor);

impl Processor for Images {
    type Context = ();
    type Input = Pixels;
    type Piece = ();
    type Output = Vec<f32>;

    fn routes(&self) -> &[Route] {
        &[Route { url: "/classify", media_types: &["image/png"] }]
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let bad = |error: String| TaskError::new(TaskErrorKind::BadInput, format!("the image: {error}"));
        let mut decoder = png::Decoder::new(Cursor::new(&message.body));
        decoder.set_transformations(png::Transformations::EXPAND | png::Transformations::STRIP_16);
        let mut reader = decoder.read_info().map_err(|error| bad(error.to_string()))?;
        let (width, height) = (reader.info().width as usize, reader.info().height as usize);
        if width * height > MOST_PIXELS {
            return Err(bad(format!("it has {width} × {height} pixels; at most {MOST_PIXELS} are taken")));
        }
        let channels = reader.output_color_type().0.samples();
        let mut bytes = vec![0; width * height * channels];
        reader.next_frame(&mut bytes).map_err(|error| bad(error.to_string()))?;
        // Grey is all three colours; what comes behind them is how opaque a pixel is.
        let of = |colour: usize| if channels < 3 { 0 } else { colour };
        let numbers = (0..3).flat_map(|colour| bytes.chunks(channels).map(move |pixel| (pixel, of(colour))));
        let numbers = numbers.map(|(pixel, colour)| f32::from(pixel[colour]) / 255.0).collect();
        let tokens = (width * height).div_ceil(256);
        Ok(((), vec![SizedInput::new(Pixels { numbers, height, width }, tokens)].into()))
    }

    fn finish(&self, (): (), scores: Vec<Vec<f32>>) -> Result<Body, TaskError> {
        let mut rows: Vec<(&String, f32)> = self.labels.iter().zip(scores.into_iter().flatten()).collect();
        rows.sort_by(|a, b| b.1.total_cmp(&a.1));
        let rows: Vec<Value> =
            rows.iter().map(|(label, score)| json!({"label": label, "score": score})).collect();
        Ok(Body::json(Value::from(rows).to_string()))
    }
}

impl Forward for Colours {
    type Input = Pixels;
    type Output = Vec<f32>;
    type Pending = Vec<Tensor>;

    fn submit(&mut self, images: &[&Pixels]) -> Result<Vec<Tensor>, ForwardError> {
        let score = |image: &&Pixels| {
            let shape = (1, 3, image.height, image.width);
            let image = Tensor::from_slice(&image.numbers, shape, self.0.device())?;
            let found = image.conv2d(&self.0, 0, 1, 1, 1)?.flatten_from(2)?.mean(2)?;
            softmax_last_dim(&(found * 10.0)?)?.squeeze(0)
        };
        images.iter().map(score).collect::<CandleResult<_>>().map_err(|error| ForwardError::from(&error))
    }

    fn wait(&mut self, scores: Vec<Tensor>) -> Result<Vec<Result<Vec<f32>, TaskError>>, ForwardError> {
        let scores = scores.iter().map(|scores| Ok(Ok(scores.to_vec1()?)));
        scores.collect::<CandleResult<_>>().map_err(|error| ForwardError::from(&error))
    }
}

fn load(spec: &LoadSpec, device: &Device) -> Result<(Images, Colours), LoadError> {
    // The settings: [pool.options] labels = ["rouge", "vert", "bleu"]
    let given = spec.options.get("labels").and_then(Value::as_array);
    let given: Option<Vec<String>> =
        given.and_then(|it| it.iter().map(|it| it.as_str().map(str::to_owned)).collect());
    let labels = given.filter(|labels| labels.len() == 3);
    let labels = labels.unwrap_or_else(|| ["red", "green", "blue"].map(str::to_owned).into());
    let weights = Tensor::eye(3, candle_core::DType::F32, device).and_then(|it| it.reshape((3, 3, 1, 1)));
    Ok((Images { labels }, Colours(weights.map_err(|error| spec.failed(error))?)))
}

fn main() -> ExitCode {
    app::main(&Registry::default().with_forward("colours", load))
}
