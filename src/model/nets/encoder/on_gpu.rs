//! An asynchronous forward pass on a GPU: the copy of the batch's plan, the network, and the copy of the texts' vectors
//! are all submitted before the host waits for any of them. Owns the streams and memory of the copies.

use candle_core::{Device, Result};

use super::network::Encoder;
use crate::model::device::{Copies, DeviceToHost};
use crate::model::load::tokenizer::Tokens;
use crate::model::ops::gpu::cuda::{Planned, pool};
use crate::model::ops::pooling::{Pooling, normalize};

/// Runs forward passes on a GPU; keeps the buffers for copies.
pub struct OnGpu(Copies);

/// A submitted pass.
pub struct Submitted {
    fetched: DeviceToHost,
    /// The width of a text's vector.
    width: usize,
}

impl OnGpu {
    /// Prepares copies for this device; none if it is a CPU.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(device: &Device) -> Result<Option<Self>> {
        if device.is_cuda() { Copies::new(device).map(|copies| Some(Self(copies))) } else { Ok(None) }
    }

    /// Submits texts with `lengths` tokens.
    ///
    /// # Errors
    /// The error of candle or the device.
    pub fn submit(
        &mut self,
        encoder: &Encoder,
        pooling: &Pooling,
        texts: &[&Tokens],
        lengths: Vec<usize>,
    ) -> Result<Submitted> {
        let mut plan = encoder.plan(texts, &lengths);
        let skips = plan.words.len();
        plan.words.extend(texts.iter().map(|text| text.unpooled as u32));
        let uploaded = self.0.upload(&plan.words)?;
        let planned = Planned { plan, lengths, words: uploaded.tensor.clone() };
        let rows = encoder.forward_planned(&planned);
        let computed = rows.and_then(|rows| pool(&rows, &planned, skips, &pooling.modes));
        let fetched = self.0.fetch(uploaded, computed)?;
        Ok(Submitted { fetched, width: pooling.width(encoder.width()) })
    }

    /// Waits for the texts' vectors.
    ///
    /// # Errors
    /// The device's error.
    pub fn finish(&mut self, submitted: Submitted, pooling: &Pooling) -> Result<Vec<Vec<f32>>> {
        let numbers = self.0.wait(submitted.fetched)?;
        let mut vectors: Vec<Vec<f32>> = numbers.chunks_exact(submitted.width).map(<[f32]>::to_vec).collect();
        if pooling.normalize {
            vectors.iter_mut().for_each(|vector| normalize(vector));
        }
        Ok(vectors)
    }
}
