//! The card: takes what a sentence encoder takes, and gives vectors that nobody computed.

use std::thread;
use std::time::{Duration, Instant};

use sconce::model::device::Proven;
use sconce::model::sentence::{Sentence, SentenceCodec, SentenceEncoder};
use sconce::model::{ForwardError, LoadError, LoadSpec, Model, Rest, Step, Steps};

/// The `model` setting begins so; behind it its rate in texts a second, and the encoder's folder, between
/// colons. 0: at once.
pub const NAME: &str = "card";

/// Numbers in a vector.
const WIDTH: usize = 384;

/// A device that only keeps time.
pub struct Card {
    device: String,
    rate: f64,
    vector: Vec<f32>,
    /// When it is through with what it has been given.
    free: Instant,
}

impl Model for Card {
    type Codec = SentenceCodec;

    fn prove(_: &LoadSpec, _: f64) -> Result<Option<Proven>, LoadError> {
        Ok(None)
    }

    fn load(spec: &LoadSpec) -> Result<(Self, SentenceCodec), LoadError> {
        let unsupported = || LoadError::Unsupported {
            model: spec.source.clone(),
            reason: "expected card:RATE:FOLDER".into(),
        };
        let (rate, folder) = spec
            .source
            .strip_prefix(NAME)
            .and_then(|rest| rest.strip_prefix(':')?.split_once(':'))
            .ok_or_else(unsupported)?;
        let rate = rate.parse().map_err(|_| unsupported())?;
        let encoder = LoadSpec { source: folder.into(), device: "cpu".into(), ..spec.clone() };
        let (_, codec) = SentenceEncoder::load(&encoder)?;
        // Digits as long as those of a real vector.
        let vector = (0..WIDTH).map(|index| (index as f32 * 0.731).sin() * 0.051).collect();
        Ok((Self { device: spec.device.clone(), rate, vector, free: Instant::now() }, codec))
    }

    fn device(&self) -> String {
        self.device.clone()
    }

    fn forward(&mut self, inputs: &[&Sentence]) -> Result<Steps<Self>, ForwardError> {
        let rest = self.begin(inputs)?;
        rest.map_or_else(|| Ok(Vec::new()), |rest| rest(self))
    }

    fn computes_aside(&self) -> bool {
        true
    }

    fn begin(&mut self, inputs: &[&Sentence]) -> Result<Option<Rest<Self>>, ForwardError> {
        let (count, now) = (inputs.len(), Instant::now());
        let seconds = if self.rate > 0.0 { count as f64 / self.rate } else { 0.0 };
        self.free = self.free.max(now) + Duration::from_secs_f64(seconds);
        let done = self.free;
        Ok(Some(Box::new(move |card| {
            thread::sleep(done.saturating_duration_since(Instant::now()));
            Ok((0..count).map(|_| Ok(Step::Done(card.vector.clone()))).collect())
        })))
    }
}
