//! The feed-forward sublayer of a block on any device. Its last product is
//!
//! - without a gate: (activation(x·U + bias))·D
//! - with a gate G: (activation(x·U) * (x·G))·D
//!
//! An [`Epilogue`] adds the bias of D to this product. With a norm, it also adds x, and then norms the sum. Decides the
//! form in which its weights are kept, and owns them.

use candle_core::{CpuStorage, Error, InplaceOp1, Layout, Result, Tensor};
use sconce_kernels::{Activation, NumberFormat, feed_forward};

use super::activation::bias_activation;
use super::add_norm::Epilogue;
use super::{host_values, rows_of};

/// One feed-forward sublayer.
pub struct FeedForward {
    weights: Weights,
    activation: Activation,
    /// The last step, with the bias of D.
    epilogue: Epilogue,
}

enum Weights {
    /// For a CPU, if the given weights are f32; kept in the format [`InputWeights::format`].
    Packed(feed_forward::FeedForward),
    /// For another type or device: `up` and `gate` `[hidden, inner]`, `up_bias` `[inner]` and `down`
    /// `[inner, hidden]`.
    Plain { up: Tensor, up_bias: Tensor, gate: Option<Tensor>, down: Tensor },
}

/// The weights by which the input is multiplied, as in the model's file: matrices `[inner, hidden]`.
pub struct InputWeights {
    /// U.
    pub matrix: Tensor,
    /// U's bias `[inner]`. It must be 0 if there is a gate.
    pub bias: Tensor,
    /// G.
    pub gate: Option<Tensor>,
    /// If the weights are f32 and on a CPU, the format to which U, G and D are converted.
    pub format: NumberFormat,
}

impl FeedForward {
    /// Prepares the weights for their device. `down` is D `[hidden, inner]`, as in the model's file.
    ///
    /// # Errors
    /// The device fails.
    pub fn new(
        input: InputWeights,
        down: &Tensor,
        epilogue: Epilogue,
        activation: Activation,
    ) -> Result<Self> {
        let InputWeights { matrix: up, bias: up_bias, gate, format } = input;
        let weights = match (host_values(&up)?, host_values(&up_bias)?, host_values(down)?) {
            (Some(up), Some(up_bias), Some(down)) => {
                let gate: Option<Vec<f32>> = gate.map(|gate| gate.flatten_all()?.to_vec1()).transpose()?;
                let (up, gate, down) = (&up[..], gate.as_deref(), &down[..]);
                let weights = feed_forward::FeedForwardWeights { up, up_bias, gate, down, format };
                Weights::Packed(feed_forward::FeedForward::new(weights, activation).map_err(Error::msg)?)
            }
            _ => {
                let columns = |matrix: &Tensor| matrix.t()?.contiguous();
                let gate = gate.as_ref().map(columns).transpose()?;
                Weights::Plain { up: columns(&up)?, up_bias, gate, down: columns(down)? }
            }
        };
        Ok(Self { weights, activation, epilogue })
    }

    /// The CPU's kernel and the bias of D, if the weights are packed and the epilogue only adds the bias.
    pub(super) fn packed(&self) -> Option<(&feed_forward::FeedForward, &[f32])> {
        match (&self.weights, self.epilogue.on_host()) {
            (Weights::Packed(packed), sconce_kernels::Epilogue::Bias(bias)) => Some((packed, bias)),
            _ => None,
        }
    }

    /// Computes the sublayer on `x` `[rows, hidden]`, in `x`'s memory.
    ///
    /// # Errors
    /// Shapes or types do not match: a bug of the caller.
    pub fn forward(&self, x: Tensor) -> Result<Tensor> {
        match &self.weights {
            Weights::Packed(weights) => {
                x.inplace_op1(&Fused { weights, epilogue: &self.epilogue })?;
                Ok(x)
            }
            Weights::Plain { up, up_bias, gate, down } => {
                let mut inner = bias_activation(x.matmul(up)?, up_bias, self.activation)?;
                if let Some(gate) = gate {
                    inner = (inner * x.matmul(gate)?)?;
                }
                self.epilogue.apply(x, &inner.matmul(down)?)
            }
        }
    }
}

/// The CPU's kernel, applied to rows.
struct Fused<'a> {
    weights: &'a feed_forward::FeedForward,
    epilogue: &'a Epilogue,
}

impl InplaceOp1 for Fused<'_> {
    fn name(&self) -> &'static str {
        "feed-forward"
    }

    fn cpu_fwd(&self, x: &mut CpuStorage, layout: &Layout) -> Result<()> {
        self.weights.forward(rows_of(x, layout, self.weights.hidden())?, self.epilogue.on_host());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{difference, noise, norm_params};
    use super::*;

    #[test]
    fn the_kernel_equals_candles_operations() {
        for (rows, hidden, inner) in [(1, 32, 64), (50, 24, 40), (131, 384, 1536)] {
            let up = noise(&[inner, hidden], 0.1, 1).unwrap();
            let up_bias = noise(&[inner], 0.5, 6).unwrap();
            let down = noise(&[hidden, inner], 0.1, 2).unwrap();
            let gate = noise(&[inner, hidden], 0.1, 8).unwrap();
            let norm = || Epilogue::Norm(norm_params(hidden, 3).unwrap());
            let bias = || Epilogue::bias(&noise(&[hidden], 0.5, 9).unwrap()).unwrap();
            let cases: [(_, &dyn Fn() -> Epilogue, _); 3] = [
                (None, &norm, Activation::Gelu),
                (Some(&gate), &norm, Activation::Silu),
                (Some(&gate), &bias, Activation::Gelu),
            ];
            for (gate, epilogue, activation) in cases {
                let bias = if gate.is_some() { up_bias.zeros_like().unwrap() } else { up_bias.clone() };
                let plain = FeedForward {
                    weights: Weights::Plain {
                        up: up.t().unwrap(),
                        up_bias: bias.clone(),
                        gate: gate.map(|gate| gate.t().unwrap()),
                        down: down.t().unwrap(),
                    },
                    activation,
                    epilogue: epilogue(),
                };
                let input =
                    InputWeights { matrix: up.clone(), bias, gate: gate.cloned(), format: NumberFormat::F32 };
                let fused = FeedForward::new(input, &down, epilogue(), activation).unwrap();
                assert!(matches!(fused.weights, Weights::Packed(_)));
                let x = noise(&[rows, hidden], 1.0, 7).unwrap();
                let expected = plain.forward(x.copy().unwrap()).unwrap();
                let error = difference(&fused.forward(x).unwrap(), &expected).unwrap();
                assert!(error < 2e-5, "{rows}×{hidden}×{inner}, {activation:?}: {error}");
            }
        }
    }

    #[test]
    fn rows_of_another_width_are_refused() {
        let matrix = noise(&[16, 16], 1.0, 1).unwrap();
        let norm = Epilogue::Norm(norm_params(16, 3).unwrap());
        let (bias, format) = (noise(&[16], 1.0, 2).unwrap(), NumberFormat::F32);
        let input = InputWeights { matrix: matrix.clone(), bias, gate: None, format };
        let sublayer = FeedForward::new(input, &matrix, norm, Activation::Relu).unwrap();
        let error = sublayer.forward(noise(&[3, 17], 1.0, 2).unwrap()).unwrap_err().to_string();
        assert!(error.contains("rows of 16 numbers") && error.contains("[3, 17]"), "{error}");
    }
}
