//! Scores texts by a head of two linear layers on a BERT; its encoder and tokenizer are sconce's. A task's body is
//! `{"input": ["a text", …]}`. The reply has an object for each text, with a score from 0 to 1 for each label:
//!
//!     cargo run -p text-head -- launch --set 'pool[0].model=text-head:models/my-bert'

use std::process::ExitCode;

use sconce::app::{self, Registry};
use sconce::model::text::{Mode, Pooling, TextEncoder, TextNetwork, Tokenizer, Tokens};
use sconce::model::{
    Body, Device, Forward, ForwardError, LoadError, LoadSpec, Message, Preprocessed, Processor, Route,
    TaskError, Value,
};
use serde::Deserialize;

// The outputs of the head's last layer, in order, and the width between its layers.
const LABELS: [&str; 3] = ["calm", "glad", "urgent"];
const INNER: usize = 32;

#[derive(Deserialize)]
struct Request {
    input: Vec<String>,
}

/// Texts → tokens; scores → JSON.
struct Texts(Tokenizer);

impl Processor for Texts {
    type Context = ();
    type Input = Tokens;
    type Piece = ();
    type Output = Vec<f32>;

    fn routes(&self) -> &[Route] {
        const { &[Route::json("/scores")] }
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let request = serde_json::from_slice(&message.body);
        let Request { input } = request.map_err(|error| TaskError::bad_input("body", error.to_string()))?;
        Ok(((), self.0.inputs("input", input)?))
    }

    fn finish(&self, (): (), outputs: Vec<Vec<f32>>) -> Result<Body, TaskError> {
        let labelled = |scores| LABELS.into_iter().zip(scores).collect::<Value>();
        Ok(Body::json(outputs.into_iter().map(labelled).collect::<Value>().to_string()))
    }
}

/// A linear layer: its matrix `[to, from]` and bias `[to]`.
struct Linear(Vec<f32>, Vec<f32>);

impl Linear {
    fn read(encoder: &TextEncoder, name: &str, [to, from]: [usize; 2]) -> Result<Self, LoadError> {
        let matrix = encoder.head_tensor(&format!("{name}.weight"), &[to, from])?;
        Ok(Self(matrix, encoder.head_tensor(&format!("{name}.bias"), &[to])?))
    }

    /// Computes one text alone, so that no other text of its batch changes its result.
    fn apply(&self, x: &[f32], activation: fn(f32) -> f32) -> Vec<f32> {
        let dot = |row: &[f32]| row.iter().zip(x).map(|(a, b)| a * b).sum::<f32>();
        self.0.chunks_exact(x.len()).zip(&self.1).map(|(row, bias)| activation(dot(row) + bias)).collect()
    }
}

struct Scorer(TextNetwork, [Linear; 2]);

impl Forward for Scorer {
    type Input = Tokens;
    type Output = Vec<f32>;
    type Pending = <TextNetwork as Forward>::Pending;

    fn submit(&mut self, texts: &[&Tokens]) -> Result<Self::Pending, ForwardError> {
        self.0.submit(texts)
    }

    fn wait(&mut self, pending: Self::Pending) -> Result<Vec<Result<Vec<f32>, TaskError>>, ForwardError> {
        let [dense, out] = &self.1;
        let head = |x: Vec<f32>| out.apply(&dense.apply(&x, |x| x.max(0.0)), |x| 1.0 / (1.0 + (-x).exp()));
        Ok(self.0.wait(pending)?.into_iter().map(|vector| vector.map(head)).collect())
    }

    fn is_asynchronous(&self) -> bool {
        self.0.is_asynchronous()
    }
}

fn load(spec: &LoadSpec, device: &Device) -> Result<(Texts, Scorer), LoadError> {
    let spec = LoadSpec { source: spec.source.replacen("text-head:", "", 1), ..spec.clone() };
    let pooling = Pooling { modes: vec![Mode::Mean], normalize: false };
    let encoder = TextEncoder::load(&spec, device, Some(pooling))?;
    let dense = Linear::read(&encoder, "head.dense", [INNER, encoder.width])?;
    let out = Linear::read(&encoder, "head.out", [LABELS.len(), INNER])?;
    Ok((Texts(encoder.tokenizer), Scorer(encoder.network, [dense, out])))
}

fn main() -> ExitCode {
    app::main(&Registry::default().with_forward("text-head", load))
}
