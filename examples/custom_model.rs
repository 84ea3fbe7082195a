//! A model of one's own, served by sconce: counts letters on a Candle device.
//!
//!     cargo run --example custom_model -- launch --set 'pool[0].model=letters'
//!     cargo run --example custom_model -- publish --wait abba

use candle_core::{DType, Tensor};
use sconce::app::{self, Registry};
use sconce::model::{
    Body, Device, Forward, ForwardError, LoadError, LoadSpec, Message, Preprocessed, Processor, Route,
    SizedInput, TaskError, TaskErrorKind,
};
use serde_json::{Value, json};

/// The weights: one row a byte, one column a letter.
struct Letters(Tensor);

struct LettersProcessor;

impl Processor for LettersProcessor {
    type Context = ();
    type Input = Vec<u32>;
    type Piece = ();
    type Output = Vec<f32>;

    fn routes(&self) -> &[Route] {
        &[const { Route::json("/v1/letters") }]
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let body: Value = serde_json::from_slice(&message.body)
            .map_err(|error| TaskError::new(TaskErrorKind::Undecodable, error.to_string()))?;
        let text = body["input"].as_str().filter(|text| !text.is_empty());
        let text = text.ok_or_else(|| TaskError::bad_input("input", "input must be a text, not empty"))?;
        let input: Vec<u32> = text.bytes().map(u32::from).collect();
        let tokens = input.len();
        Ok(((), vec![SizedInput::new(input, tokens)]))
    }

    fn finish(&self, (): (), counts: Vec<Vec<f32>>) -> Result<Body, TaskError> {
        Ok(Body::json(json!({"object": "letters", "counts": counts}).to_string()))
    }
}

impl Forward for Letters {
    type Input = Vec<u32>;
    type Output = Vec<f32>;
    type Pending = Vec<Vec<f32>>;

    fn submit(&mut self, texts: &[&Vec<u32>]) -> Result<Vec<Vec<f32>>, ForwardError> {
        let count = |text: &Vec<u32>| {
            let rows = Tensor::new(text.as_slice(), self.0.device())?;
            self.0.index_select(&rows, 0)?.sum(0)?.to_dtype(DType::F32)?.to_vec1::<f32>()
        };
        let counted: candle_core::Result<_> = texts.iter().map(|text| count(text)).collect();
        counted.map_err(|error| ForwardError::from(&error))
    }

    fn wait(&mut self, counts: Vec<Vec<f32>>) -> Result<Vec<Result<Vec<f32>, TaskError>>, ForwardError> {
        Ok(counts.into_iter().map(Ok).collect())
    }
}

fn load(spec: &LoadSpec, device: &Device) -> Result<(LettersProcessor, Letters), LoadError> {
    let row = |byte: u8| (b'a'..=b'z').map(move |letter| f32::from(letter == byte));
    let weights = Tensor::from_iter((0..=255).flat_map(row), device).and_then(|it| it.reshape((256, 26)));
    let weights = weights.map_err(|error| spec.failed(error))?;
    Ok((LettersProcessor, Letters(weights)))
}

fn main() -> std::process::ExitCode {
    app::main(&Registry::default().with_forward("letters", load))
}
