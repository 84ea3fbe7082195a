//! activation(x + bias) on any device.

use candle_core::{Result, Tensor};
use sconce_kernels::Activation;

/// activation(x + bias) of `x` `[rows, width]` and `bias` `[width]`: on a GPU by its kernel in `x`'s memory, elsewhere
/// by candle's operations.
///
/// # Errors
/// Shapes or types do not match: a bug of the caller.
pub fn bias_activation(x: Tensor, bias: &Tensor, activation: Activation) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && has_kernel(activation) && super::gpu::cuda::activate(&x, bias, activation)? {
        return Ok(x);
    }
    let x = x.broadcast_add(bias)?;
    match activation {
        Activation::Gelu => x.gelu_erf(),
        Activation::GeluTanh => x.gelu(),
        Activation::Relu => x.relu(),
        Activation::Silu => x.silu(),
        Activation::Identity => Ok(x),
    }
}

/// Whether the GPU's kernel computes this activation.
#[cfg(feature = "cuda")]
fn has_kernel(activation: Activation) -> bool {
    !matches!(activation, Activation::Silu | Activation::Identity)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use sconce_kernels::activate;

    use super::super::testing::{difference, noise};
    use super::*;

    const ALL: [Activation; 5] =
        [Activation::Gelu, Activation::GeluTanh, Activation::Relu, Activation::Silu, Activation::Identity];

    #[test]
    fn each_activation_is_within_1e_6_of_candles_own() {
        for activation in ALL {
            for (range, seed) in [(0.5, 1), (4.0, 2), (12.0, 3), (90.0, 4)] {
                let x = noise(&[70, 37], range, seed).unwrap();
                let bias = noise(&[37], 0.7, seed + 9).unwrap();
                let mut ours: Vec<f32> = x.flatten_all().unwrap().to_vec1().unwrap();
                let expected = bias_activation(x, &bias, activation).unwrap();
                activate(&mut ours, &bias.to_vec1::<f32>().unwrap(), activation);
                let ours = Tensor::from_vec(ours, expected.shape(), &Device::Cpu).unwrap();
                let error = difference(&ours, &expected).unwrap();
                // candle's own f32 differs in the last place of large values.
                assert!(error <= 1e-6_f32.max(range * 1.2e-7), "{activation:?} ±{range}: {error}");
            }
        }
    }
}
