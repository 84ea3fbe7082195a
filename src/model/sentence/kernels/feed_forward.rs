//! The feed-forward half of a block: LayerNorm(activation(x·U + bias)·D + bias + x). Decides the form in which
//! its weights are kept, and owns them. A CPU computes it in blocks of rows, so that the numbers between the
//! two products are still in a near cache.

use std::cell::RefCell;

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor};

use super::activation::{Activation, bias_activation};
use super::add_norm::{NormParams, add_norm, norm_rows};
use super::product::{Panels, RUN, Rows, by_blocks};
use super::{host_values, rows_of};

/// One feed-forward half.
pub struct FeedForward {
    weights: Weights,
    activation: Activation,
    /// With the bias of D.
    norm: NormParams,
}

enum Weights {
    /// f32 on a CPU.
    Packed { up: Panels, up_bias: Vec<f32>, down: Panels },
    /// `[hidden, inner]`, `[inner]`, `[inner, hidden]`.
    Plain { up: Tensor, up_bias: Tensor, down: Tensor },
}

impl FeedForward {
    /// Takes over U `[inner, hidden]` and D `[hidden, inner]` as published, and U's bias.
    ///
    /// # Errors
    /// The device fails.
    pub fn new(
        (up, up_bias): (&Tensor, Tensor),
        down: &Tensor,
        norm: NormParams,
        activation: Activation,
    ) -> Result<Self> {
        let weights = match (host_values(up)?, host_values(&up_bias)?, host_values(down)?) {
            (Some(up), Some(mut up_bias), Some(down)) => {
                let hidden = up.len() / up_bias.len();
                let down = Panels::new(&down, up_bias.len());
                up_bias.resize(up_bias.len().next_multiple_of(RUN), 0.0);
                Weights::Packed { up: Panels::new(&up, hidden), up_bias, down }
            }
            _ => Weights::Plain { up: up.t()?.contiguous()?, up_bias, down: down.t()?.contiguous()? },
        };
        Ok(Self { weights, activation, norm })
    }

    /// Computes `x` `[rows, hidden]`, in `x`'s memory.
    ///
    /// # Errors
    /// Shapes or types do not match: a bug of the caller.
    pub fn forward(&self, x: Tensor) -> Result<Tensor> {
        match &self.weights {
            Weights::Packed { up, up_bias, down } => {
                let Self { activation, ref norm, .. } = *self;
                x.inplace_op1(&Fused { up, up_bias, down, activation, norm })?;
                Ok(x)
            }
            Weights::Plain { up, up_bias, down } => {
                let inner = bias_activation(x.matmul(up)?, up_bias, self.activation)?;
                add_norm(x, &inner.matmul(down)?, &self.norm)
            }
        }
    }
}

struct Fused<'a> {
    up: &'a Panels,
    up_bias: &'a [f32],
    down: &'a Panels,
    activation: Activation,
    norm: &'a NormParams,
}

/// The buffers of one block of rows.
#[derive(Default)]
struct Scratch {
    rows: Rows,
    inner: Rows,
    out: Vec<f32>,
}

thread_local! {
    /// Reused by the next block: new memory costs a page fault every 4 KiB.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl InplaceOp1 for Fused<'_> {
    fn name(&self) -> &'static str {
        "feed-forward"
    }

    fn cpu_fwd(&self, x: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let hidden = self.up.depth();
        by_blocks(rows_of(x, layout, hidden)?, hidden, |_, x| {
            let mut scratch = SCRATCH.take();
            scratch.out.resize(x.len(), 0.0);
            scratch.rows.lay(x, hidden);
            scratch.rows.multiply_activated(self.up, (self.up_bias, self.activation), &mut scratch.inner);
            scratch.inner.multiply(0, self.down, &mut scratch.out, hidden);
            norm_rows(x, &scratch.out, self.norm);
            SCRATCH.set(scratch);
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{difference, noise, norm_params, on_every_cpu};
    use super::*;

    #[test]
    fn fused_it_equals_its_steps_on_every_cpu() {
        on_every_cpu(fused_equals_its_steps);
    }

    fn fused_equals_its_steps() {
        for (rows, hidden, inner) in [(1, 32, 64), (50, 24, 40), (131, 384, 1536)] {
            let up = noise(&[inner, hidden], 0.1, 1).unwrap();
            let up_bias = noise(&[inner], 0.5, 6).unwrap();
            let down = noise(&[hidden, inner], 0.1, 2).unwrap();
            let norm = norm_params(hidden, 3).unwrap();
            let plain = FeedForward {
                weights: Weights::Plain {
                    up: up.t().unwrap(),
                    up_bias: up_bias.clone(),
                    down: down.t().unwrap(),
                },
                activation: Activation::Gelu,
                norm: norm_params(hidden, 3).unwrap(),
            };
            let fused = FeedForward::new((&up, up_bias), &down, norm, Activation::Gelu).unwrap();
            assert!(matches!(fused.weights, Weights::Packed { .. }));
            let x = noise(&[rows, hidden], 1.0, 7).unwrap();
            let right = plain.forward(x.copy().unwrap()).unwrap();
            let off = difference(&fused.forward(x).unwrap(), &right).unwrap();
            assert!(off < 1e-5, "{rows}×{hidden}×{inner}: {off}");
        }
    }

    #[test]
    fn rows_of_another_width_are_refused() {
        let matrix = noise(&[16, 16], 1.0, 1).unwrap();
        let norm = norm_params(16, 3).unwrap();
        let bias = noise(&[16], 1.0, 2).unwrap();
        let half = FeedForward::new((&matrix, bias), &matrix, norm, Activation::Relu).unwrap();
        let error = half.forward(noise(&[3, 17], 1.0, 2).unwrap()).unwrap_err().to_string();
        assert!(error.contains("rows of 16 numbers") && error.contains("[3, 17]"), "{error}");
    }
}
