//! Convolution of images in the layout `[images, height, width, channels]`, on any device. Decides the form in which
//! its weights are kept, and owns them.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};
use sconce_kernels::convolution::{
    Clamp, Convolution as PackedConvolution, Filters as PackedFilters, Padding, Patches,
};

use super::{host_values, values};

/// A convolution as stored in the checkpoint.
pub struct Filters<'a> {
    /// `[out, in, size, size]`, or for a depthwise convolution `[channels, 1, size, size]`.
    pub weights: &'a Tensor,
    /// `[out]`.
    pub bias: &'a Tensor,
    /// Pixels from one patch to the next.
    pub stride: usize,
    /// The zeros around an image.
    pub padding: Padding,
    /// The bounds of the result.
    pub clamp: Clamp,
    /// Whether this is a depthwise convolution: each channel is convolved separately.
    pub is_depthwise: bool,
}

/// One convolution with its bias and bounds.
pub struct Convolution {
    weights: Weights,
    patches: Patches,
    clamp: Clamp,
}

enum Weights {
    /// On a CPU, in f32.
    Packed(PackedConvolution),
    /// For candle's operations: the weights as in the checkpoint, and the bias `[1, out, 1, 1]`.
    Plain { weights: Tensor, bias: Tensor, groups: usize },
}

impl Convolution {
    /// Prepares the weights for their device.
    ///
    /// # Errors
    /// Shapes do not match, or the device fails.
    pub fn new(filters: &Filters<'_>) -> Result<Self> {
        let Filters { weights, bias, stride, padding, clamp, is_depthwise } = *filters;
        let (out_channels, _, size, _) = weights.dims4()?;
        let patches = Patches { size, stride, padding };
        // Candle has no convolution in bf16 on a CPU.
        let f32_if_on_cpu = |tensor: &Tensor| {
            if tensor.device().is_cpu() { tensor.to_dtype(DType::F32) } else { Ok(tensor.clone()) }
        };
        let (weights, bias) = (&f32_if_on_cpu(weights)?, &f32_if_on_cpu(bias)?);
        // The layout of a patch: pixel after pixel, each with all its channels.
        let by_pixel = weights.permute((0, 2, 3, 1))?.contiguous()?;
        let weights = match (host_values(&by_pixel)?, host_values(bias)?) {
            (Some(numbers), Some(bias)) => {
                let weights = &numbers[..];
                let filters = PackedFilters { weights, bias, patches, clamp, is_depthwise };
                Weights::Packed(PackedConvolution::new(filters))
            }
            _ => Weights::Plain {
                weights: weights.clone(),
                bias: bias.reshape((1, out_channels, 1, 1))?,
                groups: if is_depthwise { out_channels } else { 1 },
            },
        };
        Ok(Self { weights, patches, clamp })
    }

    /// Convolves `x` `[images, height, width, channels]`.
    ///
    /// # Errors
    /// Shapes or types do not match: a bug of the caller.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (_, height, width, _) = x.dims4()?;
        match &self.weights {
            Weights::Plain { weights, bias, groups } => {
                let ((top, bottom), (left, right)) =
                    (self.patches.zeros_around(height), self.patches.zeros_around(width));
                let x = x.permute((0, 3, 1, 2))?.contiguous()?;
                let x = x.pad_with_zeros(2, top, bottom)?.pad_with_zeros(3, left, right)?;
                let x = x.conv2d(weights, 0, self.patches.stride, 1, *groups)?.broadcast_add(bias)?;
                let Clamp(min, max) = self.clamp;
                let x = if min.is_finite() { x.maximum(f64::from(min))? } else { x };
                let x = if max.is_finite() { x.minimum(f64::from(max))? } else { x };
                x.permute((0, 2, 3, 1))?.contiguous()
            }
            Weights::Packed(packed) => {
                x.to_dtype(DType::F32)?.apply_op1_no_bwd(&Convolve(packed))?.to_dtype(x.dtype())
            }
        }
    }
}

/// The CPU's kernel, applied to images.
struct Convolve<'a>(&'a PackedConvolution);

impl CustomOp1 for Convolve<'_> {
    fn name(&self) -> &'static str {
        "convolution"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let &[images, height, width, channels] = layout.dims() else {
            bail!("a convolution of {:?}, not of images", layout.dims());
        };
        if channels != self.0.channels() {
            bail!("a convolution of {} channels got {channels}", self.0.channels());
        }
        let (out, shape) = self.0.forward(values(x, layout)?, [images, height, width]);
        Ok((CpuStorage::F32(out), Shape::from(&shape)))
    }
}

/// Max pooling over 3 × 3 pixels with stride 2. `x` `[images, height, width, channels]` has no negative numbers.
///
/// # Errors
/// Shapes do not match: a bug of the caller.
pub fn max_pool(x: &Tensor) -> Result<Tensor> {
    // Zeros never exceed a number of `x`, so they can pad it.
    let x = x.permute((0, 3, 1, 2))?.pad_with_zeros(2, 1, 1)?.pad_with_zeros(3, 1, 1)?.contiguous()?;
    x.max_pool2d_with_stride(3, 2)?.permute((0, 2, 3, 1))?.contiguous()
}

/// The mean of all pixels: `[images, channels]` from `[images, height, width, channels]`, in f32.
///
/// # Errors
/// Shapes do not match: a bug of the caller.
pub fn mean_pool(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::F32)?.flatten(1, 2)?.mean(1)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{difference, noise};
    use super::*;

    /// The same convolution by candle's operations.
    fn plain(filters: &Filters<'_>) -> Convolution {
        let ours = Convolution::new(filters).unwrap();
        let out_channels = filters.weights.dim(0).unwrap();
        let weights = Weights::Plain {
            weights: filters.weights.clone(),
            bias: filters.bias.reshape((1, out_channels, 1, 1)).unwrap(),
            groups: if filters.is_depthwise { out_channels } else { 1 },
        };
        Convolution { weights, ..ours }
    }

    #[test]
    fn the_kernel_equals_candles_convolution_for_every_shape() {
        let paddings = [Padding::Same, Padding::Each(0), Padding::Each(1)];
        for (size, stride) in [(1, 1), (1, 2), (3, 1), (3, 2), (5, 2), (5, 1), (7, 2), (8, 8)] {
            for (padding, is_depthwise) in paddings.into_iter().flat_map(|it| [(it, false), (it, true)]) {
                for (height, width, channels, clamp) in
                    [(9, 12, 3, Clamp::RELU), (8, 8, 19, Clamp::NONE), (10, 8, 80, Clamp::RELU6)]
                {
                    // Size 8 is a patch embedding: without padding, and of sides that are multiples of 8.
                    if size == 8 && (padding != Padding::Each(0) || height % 8 + width % 8 > 0) {
                        continue;
                    }
                    let out = if is_depthwise { channels } else { 5 };
                    let in_per_filter = if is_depthwise { 1 } else { channels };
                    let weights = noise(&[out, in_per_filter, size, size], 0.5, 1).unwrap();
                    let bias = noise(&[out], 0.5, 2).unwrap();
                    let filters =
                        Filters { weights: &weights, bias: &bias, stride, padding, clamp, is_depthwise };
                    let x = noise(&[2, height, width, channels], 1.0, 3).unwrap();
                    let expected = plain(&filters).forward(&x).unwrap();
                    let ours = Convolution::new(&filters).unwrap().forward(&x).unwrap();
                    let largest_error = difference(&ours, &expected).unwrap();
                    assert!(
                        largest_error < 5e-5,
                        "{size} by {stride}, {padding:?}, depthwise: {is_depthwise}: {largest_error}"
                    );
                }
            }
        }
    }

    #[test]
    fn an_image_does_not_depend_on_the_others_in_its_batch() {
        let weights = noise(&[4, 3, 3, 3], 0.5, 1).unwrap();
        let bias = noise(&[4], 0.5, 2).unwrap();
        let (stride, padding, clamp, is_depthwise) = (2, Padding::Same, Clamp::RELU, false);
        let filters = Filters { weights: &weights, bias: &bias, stride, padding, clamp, is_depthwise };
        let convolution = Convolution::new(&filters).unwrap();
        let x = noise(&[3, 7, 9, 3], 1.0, 3).unwrap();
        let together = convolution.forward(&x).unwrap();
        let alone = convolution.forward(&x.narrow(0, 1, 1).unwrap().copy().unwrap()).unwrap();
        assert_eq!(difference(&together.narrow(0, 1, 1).unwrap(), &alone).unwrap(), 0.0);
    }
}
