//! The feed-forward half of a block: LayerNorm(activation(x·U + bias)·D + bias + x). With a gate G it is
//! (activation(x·U) * x·G)·D in the place of the product; without the norm, x is not added. Decides the form in
//! which its weights are kept, and owns them. A CPU computes it in blocks of rows, so that the numbers between the
//! two products are still in a near cache.

use std::cell::RefCell;

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor};

use super::activation::{Activation, activate, bias_activation};
use super::add_norm::After;
use super::product::{Matrix, Numbers, Panels, RUN, Rows, by_blocks, narrow};
use super::{host_values, rows_of};

/// One feed-forward half.
pub struct FeedForward {
    weights: Weights,
    activation: Activation,
    /// With the bias of D.
    after: After,
}

enum Weights {
    /// f32 on a CPU.
    Packed { up: Panels, up_bias: Vec<f32>, gate: Option<Panels>, down: Panels },
    /// 16 bits or 8 on a CPU.
    Narrow { up: Matrix, up_bias: Vec<f32>, gate: Option<Matrix>, down: Matrix },
    /// `[hidden, inner]`, `[inner]`, `[hidden, inner]`, `[inner, hidden]`.
    Plain { up: Tensor, up_bias: Tensor, gate: Option<Tensor>, down: Tensor },
}

/// The first linear layer as published: matrices `[inner, hidden]`.
pub struct Up {
    /// U.
    pub matrix: Tensor,
    /// U's bias `[inner]`.
    pub bias: Tensor,
    /// G.
    pub gate: Option<Tensor>,
    /// What U, G and D are kept as where they are f32 on a CPU.
    pub numbers: Numbers,
}

impl FeedForward {
    /// Takes over U and G, and D `[hidden, inner]`, as published.
    ///
    /// # Errors
    /// The device fails.
    pub fn new(published: Up, down: &Tensor, after: After, activation: Activation) -> Result<Self> {
        let Up { matrix: up, bias: up_bias, gate, numbers } = published;
        let weights = match (host_values(&up)?, host_values(&up_bias)?, host_values(down)?) {
            (Some(up), Some(mut up_bias), Some(down)) => {
                let (hidden, inner) = (up.len() / up_bias.len(), up_bias.len());
                let gate: Option<Vec<f32>> = gate.map(|gate| gate.flatten_all()?.to_vec1()).transpose()?;
                if numbers == Numbers::F32 {
                    up_bias.resize(inner.next_multiple_of(RUN), 0.0);
                    let gate = gate.map(|gate| Panels::new(&gate, hidden));
                    let (up, down) = (Panels::new(&up, hidden), Panels::new(&down, inner));
                    Weights::Packed { up, up_bias, gate, down }
                } else {
                    let gate = gate.map(|gate| narrow(&gate, hidden, numbers)).transpose()?;
                    let (up, down) = (narrow(&up, hidden, numbers)?, narrow(&down, inner, numbers)?);
                    Weights::Narrow { up, up_bias, gate, down }
                }
            }
            _ => {
                let columns = |matrix: &Tensor| matrix.t()?.contiguous();
                let gate = gate.as_ref().map(columns).transpose()?;
                Weights::Plain { up: columns(&up)?, up_bias, gate, down: columns(down)? }
            }
        };
        Ok(Self { weights, activation, after })
    }

    /// Computes `x` `[rows, hidden]`, in `x`'s memory.
    ///
    /// # Errors
    /// Shapes or types do not match: a bug of the caller.
    pub fn forward(&self, x: Tensor) -> Result<Tensor> {
        match &self.weights {
            Weights::Packed { up, up_bias, gate, down } => {
                let Self { activation, ref after, .. } = *self;
                let gate = gate.as_ref();
                x.inplace_op1(&Fused { up, up_bias, gate, down, activation, after })?;
                Ok(x)
            }
            Weights::Narrow { up, up_bias, gate, down } => {
                let Self { activation, ref after, .. } = *self;
                let gate = gate.as_ref();
                x.inplace_op1(&Narrow { up, up_bias, gate, down, activation, after })?;
                Ok(x)
            }
            Weights::Plain { up, up_bias, gate, down } => {
                let mut inner = bias_activation(x.matmul(up)?, up_bias, self.activation)?;
                if let Some(gate) = gate {
                    inner = (inner * x.matmul(gate)?)?;
                }
                self.after.end(x, &inner.matmul(down)?)
            }
        }
    }
}

struct Fused<'a> {
    up: &'a Panels,
    up_bias: &'a [f32],
    gate: Option<&'a Panels>,
    down: &'a Panels,
    activation: Activation,
    after: &'a After,
}

/// The buffers of one block of rows.
#[derive(Default)]
struct Scratch {
    rows: Rows,
    inner: Rows,
    gate: Rows,
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
            if let Some(gate) = self.gate {
                // A gate has no bias; U's is then 0 too.
                scratch.rows.multiply_activated(
                    gate,
                    (self.up_bias, Activation::Identity),
                    &mut scratch.gate,
                );
                scratch.inner.gate(&scratch.gate);
            }
            scratch.inner.multiply(0, self.down, &mut scratch.out, hidden);
            self.after.end_rows(x, &scratch.out);
            SCRATCH.set(scratch);
        });
        Ok(())
    }
}

struct Narrow<'a> {
    up: &'a Matrix,
    up_bias: &'a [f32],
    gate: Option<&'a Matrix>,
    down: &'a Matrix,
    activation: Activation,
    after: &'a After,
}

thread_local! {
    /// As `SCRATCH`: the numbers between the two products, those of the gate, and the result.
    static BETWEEN: RefCell<[Vec<f32>; 3]> = RefCell::default();
}

impl InplaceOp1 for Narrow<'_> {
    fn name(&self) -> &'static str {
        "feed-forward"
    }

    fn cpu_fwd(&self, x: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (hidden, width) = (self.up.depth(), self.up.width());
        by_blocks(rows_of(x, layout, hidden)?, hidden, |_, x| {
            let [mut inner, mut gates, mut out] = BETWEEN.take();
            let count = x.len() / hidden * width;
            inner.resize(count, 0.0);
            self.up.multiply_alone(x, &mut inner);
            activate(&mut inner, self.up_bias, self.activation);
            if let Some(gate) = self.gate {
                gates.resize(count, 0.0);
                gate.multiply_alone(x, &mut gates);
                inner.iter_mut().zip(&gates).for_each(|(x, gate)| *x *= gate);
            }
            out.resize(x.len(), 0.0);
            self.down.multiply_alone(&inner, &mut out);
            self.after.end_rows(x, &out);
            BETWEEN.set([inner, gates, out]);
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
            let gate = noise(&[inner, hidden], 0.1, 8).unwrap();
            let norm = || After::Norm(norm_params(hidden, 3).unwrap());
            let bias = || After::bias(&noise(&[hidden], 0.5, 9).unwrap()).unwrap();
            let cases: [(_, &dyn Fn() -> After, _); 3] = [
                (None, &norm, Activation::Gelu),
                (Some(&gate), &norm, Activation::Silu),
                (Some(&gate), &bias, Activation::Gelu),
            ];
            for (gate, after, activation) in cases {
                let bias = if gate.is_some() { up_bias.zeros_like().unwrap() } else { up_bias.clone() };
                let plain = FeedForward {
                    weights: Weights::Plain {
                        up: up.t().unwrap(),
                        up_bias: bias.clone(),
                        gate: gate.map(|gate| gate.t().unwrap()),
                        down: down.t().unwrap(),
                    },
                    activation,
                    after: after(),
                };
                let published = Up { matrix: up.clone(), bias, gate: gate.cloned(), numbers: Numbers::F32 };
                let fused = FeedForward::new(published, &down, after(), activation).unwrap();
                assert!(matches!(fused.weights, Weights::Packed { .. }));
                let x = noise(&[rows, hidden], 1.0, 7).unwrap();
                let right = plain.forward(x.copy().unwrap()).unwrap();
                let off = difference(&fused.forward(x).unwrap(), &right).unwrap();
                assert!(off < 2e-5, "{rows}×{hidden}×{inner}, {activation:?}: {off}");
            }
        }
    }

    #[test]
    fn rows_of_another_width_are_refused() {
        let matrix = noise(&[16, 16], 1.0, 1).unwrap();
        let norm = After::Norm(norm_params(16, 3).unwrap());
        let (bias, numbers) = (noise(&[16], 1.0, 2).unwrap(), Numbers::F32);
        let published = Up { matrix: matrix.clone(), bias, gate: None, numbers };
        let half = FeedForward::new(published, &matrix, norm, Activation::Relu).unwrap();
        let error = half.forward(noise(&[3, 17], 1.0, 2).unwrap()).unwrap_err().to_string();
        assert!(error.contains("rows of 16 numbers") && error.contains("[3, 17]"), "{error}");
    }
}
