//! A model of one's own, served by sconce: counts letters on a Candle device.
//!
//!     cargo run --example custom_model -- launch --set 'pool[0].model=letters'
//!     cargo run --example custom_model -- publish --wait abba

use candle_core::{DType, Device, Tensor};
use sconce::app::{self, Registry};
use sconce::model::{Codec, Costed, ForwardError, LoadError, LoadSpec, Model, Prepared, Step, Steps};
use sconce::protocol::{Message, TaskError, TaskErrorKind};
use serde_json::{Value, json};

/// The weights: one row a byte, one column a letter.
struct Letters(Tensor);

struct LettersCodec;

impl Codec for LettersCodec {
    type Request = ();
    type Input = Vec<u32>;
    type Output = Vec<f32>;

    fn endpoint(&self) -> &'static str {
        "/v1/letters"
    }

    fn prepare(&self, message: &Message) -> Result<Prepared<Self>, TaskError> {
        let body: Value = serde_json::from_slice(&message.body)
            .map_err(|error| TaskError::new(TaskErrorKind::Undecodable, error.to_string()))?;
        let text = body["input"].as_str().filter(|text| !text.is_empty());
        let text = text.ok_or_else(|| TaskError::bad_input("input", "input must be a text, not empty"))?;
        let input: Vec<u32> = text.bytes().map(u32::from).collect();
        Ok(Prepared { request: (), inputs: vec![Costed { tokens: input.len(), input }] })
    }

    fn respond(&self, (): (), counts: Vec<Vec<f32>>) -> Result<Vec<u8>, TaskError> {
        Ok(json!({"object": "letters", "counts": counts}).to_string().into_bytes())
    }
}

impl Model for Letters {
    type Codec = LettersCodec;

    fn load(_: &LoadSpec) -> Result<(Self, LettersCodec), LoadError> {
        let row = |byte: u8| (b'a'..=b'z').map(move |letter| f32::from(letter == byte));
        let weights =
            Tensor::from_iter((0..=255).flat_map(row), &Device::Cpu).and_then(|it| it.reshape((256, 26)));
        let failed =
            |error: candle_core::Error| LoadError::Device { device: "cpu".into(), reason: error.to_string() };
        Ok((Self(weights.map_err(failed)?), LettersCodec))
    }

    fn device(&self) -> String {
        "cpu".into()
    }

    fn forward(&mut self, inputs: &[&Vec<u32>]) -> Result<Steps<Self>, ForwardError> {
        let count = |text: &Vec<u32>| {
            let rows = Tensor::new(text.as_slice(), self.0.device())?;
            self.0.index_select(&rows, 0)?.sum(0)?.to_dtype(DType::F32)?.to_vec1::<f32>()
        };
        let counted: Result<Vec<_>, candle_core::Error> = inputs.iter().map(|text| count(text)).collect();
        let counted = counted.map_err(|error| ForwardError::Failed(error.to_string()))?;
        Ok(counted.into_iter().map(|counts| Ok(Step::Done(counts))).collect())
    }
}

fn main() -> std::process::ExitCode {
    app::main(&Registry::default().with::<Letters>("letters"))
}
