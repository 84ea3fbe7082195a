//! Convolution of images whose pixels follow each other with all their channels (`[images, height, width,
//! channels]`). On a CPU a pixel is a row of a matrix, so that a convolution is the product of its patches
//! with the weights, and one of 1 × 1 the product of the pixels themselves. Depthwise convolutions have a kernel
//! of their own. Elsewhere both are candle's. Owns the packed weights.

use std::cell::RefCell;

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};
use pulp::{Simd, WithSimd};

use super::product::{Panels, Rows, by_blocks, multiply_rows};
use super::{dispatch, host_values, values};

/// What is put around an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// So many pixels on each side.
    Each(usize),
    /// As many as give a result of the image's size divided by the stride, the odd one to the right and below.
    Same,
}

/// The least and the largest number of a result, after the bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clamp(pub f32, pub f32);

impl Clamp {
    /// Any number.
    pub const NONE: Self = Self(f32::NEG_INFINITY, f32::INFINITY);
    /// max(x, 0).
    pub const RELU: Self = Self(0.0, f32::INFINITY);
    /// min(max(x, 0), 6).
    pub const RELU6: Self = Self(0.0, 6.0);
}

/// A convolution as published.
pub struct Filters<'a> {
    /// `[out, in, size, size]`, or for a depthwise convolution `[channels, 1, size, size]`.
    pub weights: &'a Tensor,
    /// `[out]`.
    pub bias: &'a Tensor,
    /// Pixels from one patch to the next.
    pub stride: usize,
    /// What is put around an image; zeros.
    pub padding: Padding,
    /// The bounds of the result.
    pub clamp: Clamp,
    /// Whether each channel is convolved by itself.
    pub is_depthwise: bool,
}

/// One convolution with its bias and bounds.
pub struct Convolution {
    weights: Weights,
    size: usize,
    stride: usize,
    padding: Padding,
    clamp: Clamp,
    /// Channels of the result.
    width: usize,
}

enum Weights {
    /// On a CPU, in f32: `[size·size·in, out]`.
    Packed { matrix: Panels, bias: Vec<f32> },
    /// On a CPU, in f32: `[size·size, channels]`.
    Depthwise { taps: Vec<f32>, bias: Vec<f32> },
    /// For candle's operations: as published, and the bias `[1, out, 1, 1]`.
    Plain { weights: Tensor, bias: Tensor, groups: usize },
}

impl Convolution {
    /// Takes over the weights.
    ///
    /// # Errors
    /// Shapes do not match, or the device fails.
    pub fn new(filters: &Filters<'_>) -> Result<Self> {
        let Filters { weights, bias, stride, padding, clamp, is_depthwise } = *filters;
        let (width, _, size, _) = weights.dims4()?;
        // Candle has no convolution in bf16 on a CPU.
        let on_cpu = |tensor: &Tensor| {
            if tensor.device().is_cpu() { tensor.to_dtype(DType::F32) } else { Ok(tensor.clone()) }
        };
        let (weights, bias) = (&on_cpu(weights)?, &on_cpu(bias)?);
        // Each patch has its pixels one after the other, each with all its channels.
        let by_pixel = weights.permute((0, 2, 3, 1))?.contiguous()?;
        let packed = match (host_values(&by_pixel)?, host_values(bias)?) {
            (Some(_), Some(bias)) if is_depthwise => {
                let taps = by_pixel.reshape((width, size * size))?.t()?.flatten_all()?;
                Weights::Depthwise { taps: taps.to_vec1()?, bias }
            }
            (Some(numbers), Some(bias)) => {
                Weights::Packed { matrix: Panels::new(&numbers, numbers.len() / width), bias }
            }
            _ => Weights::Plain {
                weights: weights.clone(),
                bias: bias.reshape((1, width, 1, 1))?,
                groups: if is_depthwise { width } else { 1 },
            },
        };
        Ok(Self { weights: packed, size, stride, padding, clamp, width })
    }

    /// Convolves `x` `[images, height, width, channels]`.
    ///
    /// # Errors
    /// Shapes or types do not match: a bug of the caller.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (_, height, width, _) = x.dims4()?;
        match &self.weights {
            Weights::Plain { weights, bias, groups } => {
                let ((top, bottom), (left, right)) = (self.around(height), self.around(width));
                let x = x.permute((0, 3, 1, 2))?.contiguous()?;
                let x = x.pad_with_zeros(2, top, bottom)?.pad_with_zeros(3, left, right)?;
                let x = x.conv2d(weights, 0, self.stride, 1, *groups)?.broadcast_add(bias)?;
                let Clamp(least, most) = self.clamp;
                let x = if least.is_finite() { x.maximum(f64::from(least))? } else { x };
                let x = if most.is_finite() { x.minimum(f64::from(most))? } else { x };
                x.permute((0, 2, 3, 1))?.contiguous()
            }
            _ => x.to_dtype(DType::F32)?.apply_op1_no_bwd(self)?.to_dtype(x.dtype()),
        }
    }

    /// Zeros before and after `length` pixels.
    fn around(&self, length: usize) -> (usize, usize) {
        match self.padding {
            Padding::Each(count) => (count, count),
            Padding::Same => {
                let reached = (length.div_ceil(self.stride) - 1) * self.stride + self.size;
                let count = reached.saturating_sub(length);
                (count / 2, count - count / 2)
            }
        }
    }

    fn side(&self, length: usize) -> Side {
        let (before, after) = self.around(length);
        Side { length, out: (length + before + after).saturating_sub(self.size) / self.stride + 1, before }
    }
}

/// One direction of an image.
#[derive(Clone, Copy)]
struct Side {
    /// Pixels of the image and of the result.
    length: usize,
    out: usize,
    /// Zeros before the image.
    before: usize,
}

impl Side {
    /// The taps of the patch `place` that are within the image, and the pixel of the first.
    fn taps(self, place: usize, size: usize, stride: usize) -> (std::ops::Range<usize>, usize) {
        let start = place * stride;
        let first = self.before.saturating_sub(start).min(size);
        let end = (self.length + self.before).saturating_sub(start).min(size);
        (first..end.max(first), (start + first).saturating_sub(self.before))
    }
}

thread_local! {
    /// The patches of a block of results, and their layout for the product.
    static PATCHES: RefCell<(Vec<f32>, Rows)> = RefCell::default();
}

impl CustomOp1 for Convolution {
    fn name(&self) -> &'static str {
        "convolution"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let &[images, height, width, channels] = layout.dims() else {
            bail!("a convolution of {:?}, not of images", layout.dims());
        };
        let x = values(x, layout)?;
        let (rows, columns) = (self.side(height), self.side(width));
        let mut out = vec![0.0; images * rows.out * columns.out * self.width];
        let image = Images { x, rows, columns, channels };
        match &self.weights {
            Weights::Packed { matrix, bias } => {
                if matrix.depth() != self.size * self.size * channels {
                    bail!("a convolution for {} numbers got {channels} channels", matrix.depth());
                }
                self.product(&image, matrix, bias, &mut out);
            }
            Weights::Depthwise { taps, bias } => {
                if self.width != channels {
                    bail!("a depthwise convolution of {} channels got {channels}", self.width);
                }
                let line = columns.out * channels;
                by_blocks(&mut out, line, |first, lines| {
                    for (index, line) in lines.chunks_exact_mut(line).enumerate() {
                        dispatch(DepthwiseLine {
                            of: self,
                            image: &image,
                            taps,
                            bias,
                            index: first + index,
                            line,
                        });
                    }
                });
            }
            Weights::Plain { .. } => bail!("the weights are not on the CPU"),
        }
        Ok((CpuStorage::F32(out), (images, rows.out, columns.out, self.width).into()))
    }
}

struct Images<'a> {
    x: &'a [f32],
    rows: Side,
    columns: Side,
    channels: usize,
}

impl Convolution {
    fn product(&self, image: &Images<'_>, matrix: &Panels, bias: &[f32], out: &mut [f32]) {
        let end = |_: usize, block: &mut [f32]| {
            let Clamp(least, most) = self.clamp;
            for row in block.chunks_exact_mut(self.width) {
                row.iter_mut().zip(bias).for_each(|(x, bias)| *x = (*x + bias).clamp(least, most));
            }
        };
        if self.size == 1 && out.len() / self.width == image.x.len() / image.channels {
            return multiply_rows(image.x, matrix, out, end);
        }
        let depth = matrix.depth();
        by_blocks(out, self.width, |first, block| {
            let (mut patches, mut left) = PATCHES.take();
            patches.clear();
            patches.resize(block.len() / self.width * depth, 0.0);
            for (index, patch) in patches.chunks_exact_mut(depth).enumerate() {
                self.fill(image, first + index, patch);
            }
            left.lay(&patches, depth);
            left.multiply(0, matrix, block, self.width);
            PATCHES.set((patches, left));
            end(first, block);
        });
    }

    /// Copies the pixels of the patch of result `index`; what is outside the image stays as it is.
    fn fill(&self, image: &Images<'_>, index: usize, patch: &mut [f32]) {
        let Images { x, rows, columns, channels } = *image;
        let (line, column) = (index / columns.out, index % columns.out);
        let (of_rows, row) = rows.taps(line % rows.out, self.size, self.stride);
        let (of_columns, first) = columns.taps(column, self.size, self.stride);
        let start = line / rows.out * rows.length + row;
        for (tap, row) in of_rows.zip(start..) {
            let from = &x[(row * columns.length + first) * channels..][..of_columns.len() * channels];
            patch[(tap * self.size + of_columns.start) * channels..][..from.len()].copy_from_slice(from);
        }
    }
}

/// One line of a depthwise convolution's result.
struct DepthwiseLine<'a> {
    of: &'a Convolution,
    image: &'a Images<'a>,
    taps: &'a [f32],
    bias: &'a [f32],
    /// Counts the lines of all images.
    index: usize,
    /// `[columns, channels]`.
    line: &'a mut [f32],
}

/// Registers of channels that are summed together.
const REGISTERS: usize = 4;

impl WithSimd for DepthwiseLine<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { of, image, taps, bias, index, line } = self;
        let Images { x, rows, columns, channels } = *image;
        let (of_rows, row) = rows.taps(index % rows.out, of.size, of.stride);
        let start = index / rows.out * rows.length + row;
        let (least, most) = (simd.splat_f32s(of.clamp.0), simd.splat_f32s(of.clamp.1));
        for (column, out) in line.chunks_exact_mut(channels).enumerate() {
            let (of_columns, first) = columns.taps(column, of.size, of.stride);
            // Many channels at a time, so that their sums stay in registers for all taps.
            let wide = REGISTERS * S::F32_LANES;
            let mut channel = 0;
            while channel < channels {
                let count = (channels - channel).min(wide);
                let mut sums = [simd.splat_f32s(0.0); REGISTERS];
                load(simd, &bias[channel..][..count], &mut sums);
                for (tap, row) in of_rows.clone().zip(start..) {
                    let pixels = (row * columns.length + first) * channels + channel;
                    let weights = (tap * of.size + of_columns.start) * channels + channel;
                    for place in 0..of_columns.len() {
                        let pixel = &x[pixels + place * channels..][..count];
                        let weight = &taps[weights + place * channels..][..count];
                        add_product(simd, pixel, weight, &mut sums);
                    }
                }
                let to = &mut out[channel..][..count];
                for (to, sum) in to.chunks_mut(S::F32_LANES).zip(sums) {
                    // On some CPUs the min and max instructions drop NaN.
                    let is_number = simd.equal_f32s(sum, sum);
                    let bounded = simd.min_f32s(most, simd.max_f32s(least, sum));
                    let sum = simd.select_f32s(is_number, bounded, sum);
                    match to.len() == S::F32_LANES {
                        true => S::as_mut_simd_f32s(to).0[0] = sum,
                        false => simd.partial_store_f32s(to, sum),
                    }
                }
                channel += count;
            }
        }
    }
}

#[inline(always)]
fn load<S: Simd>(simd: S, from: &[f32], to: &mut [S::f32s; REGISTERS]) {
    for (from, to) in from.chunks(S::F32_LANES).zip(to) {
        *to = simd.partial_load_f32s(from);
    }
}

/// sums += pixel · weight, channel by channel.
#[inline(always)]
fn add_product<S: Simd>(simd: S, pixel: &[f32], weight: &[f32], sums: &mut [S::f32s; REGISTERS]) {
    if pixel.len() == REGISTERS * S::F32_LANES {
        let (pixel, weight) = (S::as_simd_f32s(pixel).0, S::as_simd_f32s(weight).0);
        for index in 0..REGISTERS {
            sums[index] = simd.mul_add_e_f32s(pixel[index], weight[index], sums[index]);
        }
        return;
    }
    let lanes = pixel.chunks(S::F32_LANES).zip(weight.chunks(S::F32_LANES)).zip(sums);
    for ((pixel, weight), sum) in lanes {
        *sum = simd.mul_add_e_f32s(simd.partial_load_f32s(pixel), simd.partial_load_f32s(weight), *sum);
    }
}

/// The largest of each 3 × 3 pixels, at every second one, of `x` `[images, height, width, channels]` without
/// negative numbers.
///
/// # Errors
/// Shapes do not match: a bug of the caller.
pub fn max_pool(x: &Tensor) -> Result<Tensor> {
    // Zeros around it are never larger than what is there.
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
    use super::super::testing::{difference, noise, on_every_cpu};
    use super::*;

    /// The same by candle's operations.
    fn plain(filters: &Filters<'_>) -> Convolution {
        let ours = Convolution::new(filters).unwrap();
        let width = ours.width;
        let weights = Weights::Plain {
            weights: filters.weights.clone(),
            bias: filters.bias.reshape((1, width, 1, 1)).unwrap(),
            groups: if filters.is_depthwise { width } else { 1 },
        };
        Convolution { weights, ..ours }
    }

    #[test]
    fn it_equals_candles_own_for_every_shape_on_every_cpu() {
        on_every_cpu(equals_candles_own);
    }

    fn equals_candles_own() {
        let paddings = [Padding::Same, Padding::Each(0), Padding::Each(1)];
        for (size, stride) in [(1, 1), (1, 2), (3, 1), (3, 2), (5, 2), (5, 1), (7, 2), (8, 8)] {
            for (padding, is_depthwise) in paddings.into_iter().flat_map(|it| [(it, false), (it, true)]) {
                for (height, width, channels, clamp) in
                    [(9, 12, 3, Clamp::RELU), (8, 8, 19, Clamp::NONE), (10, 8, 80, Clamp::RELU6)]
                {
                    if size == 8 && (padding != Padding::Each(0) || height % 8 + width % 8 > 0) {
                        continue;
                    }
                    let out = if is_depthwise { channels } else { 5 };
                    let each = if is_depthwise { 1 } else { channels };
                    let weights = noise(&[out, each, size, size], 0.5, 1).unwrap();
                    let bias = noise(&[out], 0.5, 2).unwrap();
                    let filters =
                        Filters { weights: &weights, bias: &bias, stride, padding, clamp, is_depthwise };
                    let x = noise(&[2, height, width, channels], 1.0, 3).unwrap();
                    let right = plain(&filters).forward(&x).unwrap();
                    let ours = Convolution::new(&filters).unwrap().forward(&x).unwrap();
                    let off = difference(&ours, &right).unwrap();
                    assert!(off < 5e-5, "{size} by {stride}, {padding:?}, depthwise: {is_depthwise}: {off}");
                }
            }
        }
    }

    #[test]
    fn not_a_number_stays_so() {
        on_every_cpu(|| {
            let bias = noise(&[5], 0.5, 2).unwrap();
            for is_depthwise in [false, true] {
                let weights = noise(&[5, if is_depthwise { 1 } else { 5 }, 3, 3], 0.5, 1).unwrap();
                let (stride, padding, clamp) = (1, Padding::Same, Clamp::RELU6);
                let filters =
                    Filters { weights: &weights, bias: &bias, stride, padding, clamp, is_depthwise };
                let x = Tensor::full(f32::NAN, (1, 3, 3, 5), &candle_core::Device::Cpu).unwrap();
                let out = Convolution::new(&filters).unwrap().forward(&x).unwrap();
                let out: Vec<f32> = out.flatten_all().unwrap().to_vec1().unwrap();
                assert!(out.iter().all(|x| x.is_nan()), "{out:?}");
            }
        });
    }

    #[test]
    fn an_image_does_not_see_its_neighbours_in_the_batch() {
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
