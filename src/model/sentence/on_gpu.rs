//! A forward pass on a GPU, which computes beside this thread: the batch's plan is copied in, the network is
//! given to the device, and the texts' vectors are copied out, all before anything is waited for. Owns what
//! copies.

use candle_core::{Device, Result};

use super::encoder::Encoder;
use super::kernels::gpu::cuda::{Planned, pool};
use super::pooling::{Pooling, normalize};
use crate::model::device::{Copies, DeviceToHost};

/// Runs forward passes on a GPU; keeps the buffers that copy to it and back.
pub struct OnGpu(Copies);

/// A pass that was given to the device.
pub struct Begun {
    fetched: DeviceToHost,
    /// Numbers of a text's vector.
    width: usize,
}

impl OnGpu {
    /// On this device; none on a CPU.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Device) -> Result<Option<Self>> {
        if device.is_cuda() { Copies::new(device).map(|copies| Some(Self(copies))) } else { Ok(None) }
    }

    /// Gives the device the texts of `lengths` tokens, whose ids are `ids`, one text behind the other.
    ///
    /// # Errors
    /// What candle or the device met.
    pub fn begin(
        &mut self,
        (encoder, pooling): (&Encoder, &Pooling),
        ids: &[u32],
        lengths: Vec<usize>,
    ) -> Result<Begun> {
        let plan = encoder.plan(ids, &lengths);
        let brought = self.0.bring(&plan.words)?;
        let planned = Planned { plan, lengths, words: brought.tensor.clone() };
        let rows = encoder.forward_planned(&planned);
        let computed = rows.and_then(|rows| pool(&rows, &planned, &pooling.modes));
        let fetched = self.0.fetch(brought, computed)?;
        Ok(Begun { fetched, width: pooling.width(encoder.width()) })
    }

    /// Waits for the texts' vectors.
    ///
    /// # Errors
    /// What the device met.
    pub fn finish(&mut self, begun: Begun, pooling: &Pooling) -> Result<Vec<Vec<f32>>> {
        let numbers = self.0.wait(begun.fetched)?;
        let mut vectors: Vec<Vec<f32>> = numbers.chunks_exact(begun.width).map(<[f32]>::to_vec).collect();
        if pooling.normalize {
            vectors.iter_mut().for_each(|vector| normalize(vector));
        }
        Ok(vectors)
    }
}
