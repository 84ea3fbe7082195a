//! Convolution of images in channels-last layout, `[images, height, width, channels]`. A convolution is the matrix
//! product of the image's patches with the weights. For a 1 × 1 convolution the rows are the pixels themselves.
//! Depthwise convolutions have a separate kernel. Owns the packed weights.

use std::cell::RefCell;

use pulp::{Simd, WithSimd};

use super::dispatch;
use super::gemm::{Panels, Rows, by_blocks, multiply_rows};

/// The zeros around an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// This many pixels on each side.
    Each(usize),
    /// Just enough that the result has one pixel for each `stride` pixels of the image's side, rounded up. If their
    /// number is odd, the extra one is to the right or below.
    Same,
}

/// The least and the largest number of a result, applied after the bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clamp(pub f32, pub f32);

impl Clamp {
    /// No bounds.
    pub const NONE: Self = Self(f32::NEG_INFINITY, f32::INFINITY);
    /// max(x, 0).
    pub const RELU: Self = Self(0.0, f32::INFINITY);
    /// min(max(x, 0), 6).
    pub const RELU6: Self = Self(0.0, 6.0);
}

/// How the patches of a convolution lie in an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patches {
    /// The side of a patch, in pixels.
    pub size: usize,
    /// Pixels from one patch to the next.
    pub stride: usize,
    /// The zeros around an image.
    pub padding: Padding,
}

/// The parameters of a convolution, as in the checkpoint except for the order of the weights.
pub struct Filters<'a> {
    /// `[out, size, size, in]`, or for a depthwise convolution `[channels, size, size]`: the pixels of a patch follow
    /// each other, each with all its channels.
    pub weights: &'a [f32],
    /// `[out]`.
    pub bias: Vec<f32>,
    /// Where the patches lie.
    pub patches: Patches,
    /// The bounds of the result.
    pub clamp: Clamp,
    /// Whether this is a depthwise convolution: each channel is convolved separately.
    pub is_depthwise: bool,
}

/// One convolution with its bias and bounds.
pub struct Convolution {
    weights: Weights,
    bias: Vec<f32>,
    patches: Patches,
    clamp: Clamp,
}

enum Weights {
    /// `[size·size·in, out]`.
    Packed(Panels),
    /// `[size·size, channels]`.
    Depthwise(Vec<f32>),
}

impl Convolution {
    /// Packs the weights.
    pub fn new(filters: Filters<'_>) -> Self {
        let Filters { weights, bias, patches, clamp, is_depthwise } = filters;
        let per_out_channel = weights.len() / bias.len();
        let weights = if is_depthwise {
            let taps = (0..per_out_channel).flat_map(|tap| weights[tap..].iter().step_by(per_out_channel));
            Weights::Depthwise(taps.copied().collect())
        } else {
            Weights::Packed(Panels::new(weights, per_out_channel))
        };
        Self { weights, bias, patches, clamp }
    }

    /// The channels of the input images.
    pub fn channels(&self) -> usize {
        match &self.weights {
            Weights::Packed(matrix) => matrix.depth() / (self.patches.size * self.patches.size),
            Weights::Depthwise(_) => self.out_channels(),
        }
    }

    /// The channels of the result.
    fn out_channels(&self) -> usize {
        self.bias.len()
    }

    /// Convolves `x` `[images, height, width, channels]`, whose first three dimensions are given. Returns the result
    /// and its four dimensions.
    pub fn forward(&self, x: &[f32], [images, height, width]: [usize; 3]) -> (Vec<f32>, [usize; 4]) {
        let (rows, columns, channels) =
            (self.patches.side(height), self.patches.side(width), self.channels());
        let mut out = vec![0.0; images * rows.out * columns.out * self.out_channels()];
        let image = Images { x, rows, columns, channels };
        match &self.weights {
            Weights::Packed(matrix) => self.multiply_patches(&image, matrix, &mut out),
            Weights::Depthwise(taps) => {
                let width = columns.out * channels;
                by_blocks(&mut out, width, |first, lines| {
                    for (index, line) in lines.chunks_exact_mut(width).enumerate() {
                        dispatch(DepthwiseLine {
                            convolution: self,
                            image: &image,
                            taps,
                            bias: &self.bias,
                            index: first + index,
                            line,
                        });
                    }
                });
            }
        }
        (out, [images, rows.out, columns.out, self.out_channels()])
    }
}

impl Patches {
    /// The number of zeros before and after `length` pixels.
    pub fn zeros_around(self, length: usize) -> (usize, usize) {
        match self.padding {
            Padding::Each(count) => (count, count),
            Padding::Same => {
                let reached = (length.div_ceil(self.stride) - 1) * self.stride + self.size;
                let count = reached.saturating_sub(length);
                (count / 2, count - count / 2)
            }
        }
    }

    fn side(self, length: usize) -> Side {
        let (before, after) = self.zeros_around(length);
        Side { length, out: (length + before + after).saturating_sub(self.size) / self.stride + 1, before }
    }
}

/// One dimension of an image, height or width.
#[derive(Clone, Copy)]
struct Side {
    /// Pixels of the image.
    length: usize,
    /// Pixels of the result.
    out: usize,
    /// Zeros before the image.
    before: usize,
}

impl Side {
    /// The taps of patch number `patch` that are within the image, and the pixel of the first one.
    fn taps(self, patch: usize, size: usize, stride: usize) -> (std::ops::Range<usize>, usize) {
        let start = patch * stride;
        let first = self.before.saturating_sub(start).min(size);
        let end = (self.length + self.before).saturating_sub(start).min(size);
        (first..end.max(first), (start + first).saturating_sub(self.before))
    }
}

thread_local! {
    /// The patches of a block of results, and the same packed for the product. Reused by the next block.
    static PATCHES: RefCell<(Vec<f32>, Rows)> = RefCell::default();
}

struct Images<'a> {
    x: &'a [f32],
    rows: Side,
    columns: Side,
    channels: usize,
}

impl Convolution {
    /// Computes the convolution as a matrix product.
    fn multiply_patches(&self, image: &Images<'_>, matrix: &Panels, out: &mut [f32]) {
        let add_bias_and_clamp = |_: usize, block: &mut [f32]| {
            let Clamp(min, max) = self.clamp;
            for row in block.chunks_exact_mut(self.out_channels()) {
                row.iter_mut().zip(&self.bias).for_each(|(x, bias)| *x = (*x + bias).clamp(min, max));
            }
        };
        if self.patches.size == 1 && out.len() / self.out_channels() == image.x.len() / image.channels {
            return multiply_rows(image.x, matrix, out, add_bias_and_clamp);
        }
        let depth = matrix.depth();
        by_blocks(out, self.out_channels(), |first, block| {
            let (mut patches, mut left) = PATCHES.take();
            patches.clear();
            patches.resize(block.len() / self.out_channels() * depth, 0.0);
            for (index, patch) in patches.chunks_exact_mut(depth).enumerate() {
                self.copy_patch(image, first + index, patch);
            }
            left.pack(&patches, depth);
            left.multiply(0, matrix, block, self.out_channels());
            PATCHES.set((patches, left));
            add_bias_and_clamp(first, block);
        });
    }

    /// Copies the patch for pixel `index` of the result to `patch`. Leaves the pixels outside the image unchanged.
    fn copy_patch(&self, image: &Images<'_>, index: usize, patch: &mut [f32]) {
        let Images { x, rows, columns, channels } = *image;
        let Patches { size, stride, .. } = self.patches;
        let (line, column) = (index / columns.out, index % columns.out);
        let (row_taps, row) = rows.taps(line % rows.out, size, stride);
        let (column_taps, first) = columns.taps(column, size, stride);
        let start = line / rows.out * rows.length + row;
        for (tap, row) in row_taps.zip(start..) {
            let from = &x[(row * columns.length + first) * channels..][..column_taps.len() * channels];
            patch[(tap * size + column_taps.start) * channels..][..from.len()].copy_from_slice(from);
        }
    }
}

/// Computes one line of a depthwise convolution's result.
struct DepthwiseLine<'a> {
    convolution: &'a Convolution,
    image: &'a Images<'a>,
    taps: &'a [f32],
    bias: &'a [f32],
    /// The index of the line among the lines of all images.
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
        let Self { convolution, image, taps, bias, index, line } = self;
        let Images { x, rows, columns, channels } = *image;
        let (row_taps, row) =
            rows.taps(index % rows.out, convolution.patches.size, convolution.patches.stride);
        let start = index / rows.out * rows.length + row;
        let (min, max) = (simd.splat_f32s(convolution.clamp.0), simd.splat_f32s(convolution.clamp.1));
        for (column, out) in line.chunks_exact_mut(channels).enumerate() {
            let (column_taps, first) =
                columns.taps(column, convolution.patches.size, convolution.patches.stride);
            // The sums of this many channels stay in registers for all taps.
            let channels_at_once = REGISTERS * S::F32_LANES;
            let mut channel = 0;
            while channel < channels {
                let count = (channels - channel).min(channels_at_once);
                let mut sums = [simd.splat_f32s(0.0); REGISTERS];
                load(simd, &bias[channel..][..count], &mut sums);
                for (tap, row) in row_taps.clone().zip(start..) {
                    let pixels = (row * columns.length + first) * channels + channel;
                    let weights = (tap * convolution.patches.size + column_taps.start) * channels + channel;
                    for index in 0..column_taps.len() {
                        let pixel = &x[pixels + index * channels..][..count];
                        let weight = &taps[weights + index * channels..][..count];
                        add_product(simd, pixel, weight, &mut sums);
                    }
                }
                let to = &mut out[channel..][..count];
                for (to, sum) in to.chunks_mut(S::F32_LANES).zip(sums) {
                    // On some CPUs the min and max instructions drop NaN.
                    let is_number = simd.equal_f32s(sum, sum);
                    let bounded = simd.min_f32s(max, simd.max_f32s(min, sum));
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

/// `sums` += `pixel` · `weight`, channel by channel.
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

#[cfg(test)]
mod tests {
    use super::super::testing::{difference, noise, on_every_cpu, to_f64};
    use super::*;

    /// The convolution of `x` `[images, height, width, channels]` by the formula, in f64.
    fn expected(filters: &Filters<'_>, x: &[f64], [images, height, width]: [usize; 3]) -> Vec<f64> {
        let Filters { weights, bias, patches, clamp, is_depthwise } = filters;
        let Patches { size, stride, .. } = *patches;
        let channels = x.len() / (images * height * width);
        let (rows, columns) = (patches.side(height), patches.side(width));
        let per_out_channel = weights.len() / bias.len();
        let mut out = Vec::new();
        for index in 0..images * rows.out * columns.out {
            let (line, column) = (index / columns.out, index % columns.out);
            let (image, line) = (line / rows.out, line % rows.out);
            // A pixel of the patch; none outside the image.
            let pixel = |tap: usize| {
                let row =
                    (line * stride + tap / size).checked_sub(rows.before).filter(|row| *row < height)?;
                let column = (column * stride + tap % size).checked_sub(columns.before);
                let column = column.filter(|column| *column < width)?;
                Some(&x[((image * height + row) * width + column) * channels..][..channels])
            };
            for (index, bias) in bias.iter().enumerate() {
                let weights = to_f64(&weights[index * per_out_channel..][..per_out_channel]);
                let mut sum = f64::from(*bias);
                for (tap, weights) in weights.chunks_exact(per_out_channel / (size * size)).enumerate() {
                    let Some(pixel) = pixel(tap) else { continue };
                    let pixel = if *is_depthwise { &pixel[index..=index] } else { pixel };
                    sum += pixel.iter().zip(weights).map(|(x, weight)| x * weight).sum::<f64>();
                }
                out.push(sum.clamp(clamp.0.into(), clamp.1.into()));
            }
        }
        out
    }

    #[test]
    fn it_equals_its_formula_for_every_shape_on_every_cpu() {
        on_every_cpu(|| {
            for (size, stride) in [(1, 1), (1, 2), (3, 1), (3, 2), (5, 2), (5, 1), (7, 2), (8, 8)] {
                for padding in [Padding::Same, Padding::Each(0), Padding::Each(1)] {
                    equals_its_formula(Patches { size, stride, padding });
                }
            }
        });
    }

    fn equals_its_formula(patches: Patches) {
        let shapes = [(9, 12, 3, Clamp::RELU), (8, 8, 19, Clamp::NONE), (10, 8, 80, Clamp::RELU6)];
        for ((height, width, channels, clamp), is_depthwise) in
            shapes.into_iter().flat_map(|it| [(it, false), (it, true)])
        {
            // Size 8 is a patch embedding: without padding, and of sides that are multiples of 8.
            let is_whole = height % 8 + width % 8 == 0;
            if patches.size == 8 && (patches.padding != Padding::Each(0) || !is_whole) {
                continue;
            }
            let (out, in_per_filter) = if is_depthwise { (channels, 1) } else { (5, channels) };
            let weights = noise(&[out, patches.size, patches.size, in_per_filter], 0.5, 1);
            let bias = noise(&[out], 0.5, 2);
            let filters = || Filters { weights: &weights, bias: bias.clone(), patches, clamp, is_depthwise };
            let x = noise(&[2, height, width, channels], 1.0, 3);
            let expected = expected(&filters(), &to_f64(&x), [2, height, width]);
            let convolution = Convolution::new(filters());
            assert_eq!(convolution.channels(), channels);
            let (ours, shape) = convolution.forward(&x, [2, height, width]);
            assert_eq!((ours.len(), shape[3]), (shape.iter().product(), out));
            let error = difference(&ours, &expected);
            assert!(error < 5e-5, "{patches:?}, depthwise: {is_depthwise}: {error}");
        }
    }

    #[test]
    fn nan_stays_nan() {
        on_every_cpu(|| {
            for is_depthwise in [false, true] {
                let weights = noise(&[5, 3, 3, if is_depthwise { 1 } else { 5 }], 0.5, 1);
                let (patches, clamp) = (Patches { size: 3, stride: 1, padding: Padding::Same }, Clamp::RELU6);
                let bias = noise(&[5], 0.5, 2);
                let convolution =
                    Convolution::new(Filters { weights: &weights, bias, patches, clamp, is_depthwise });
                let (out, _) = convolution.forward(&[f32::NAN; 45], [1, 3, 3]);
                assert!(out.iter().all(|x| x.is_nan()), "{out:?}");
            }
        });
    }
}
