//! Convolution over time. Sequences of frames follow each other without padding, `[frames, channels]`; zeros precede
//! and follow each sequence, so that it keeps its length. Owns the packed weights.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::dispatch;
use super::gemm::{Linear, NotWholeGroups, NumberFormat, by_blocks};

/// The weights of a convolution as stored in the checkpoint.
pub struct TimeFilters<'a> {
    /// `[out, in, taps]`, or for a depthwise convolution `[channels, 1, taps]`.
    pub weights: &'a [f32],
    /// `[out]`.
    pub bias: Vec<f32>,
    /// Number of frames from which each result is computed; it is odd.
    pub taps: usize,
    /// The distance of two neighbouring taps, in frames.
    pub dilation: usize,
    /// Whether this is a depthwise convolution: each channel is convolved separately.
    pub is_depthwise: bool,
    /// The format in which the weights are kept. A depthwise convolution always keeps them in f32.
    pub format: NumberFormat,
}

/// One convolution with its bias.
pub struct TimeConvolution {
    weights: Weights,
    bias: Vec<f32>,
    taps: usize,
    dilation: usize,
}

enum Weights {
    /// `[taps·in, out]`.
    Packed(Linear),
    /// `[taps, channels]`.
    Depthwise(Vec<f32>),
}

impl TimeConvolution {
    /// Packs the weights.
    ///
    /// # Errors
    /// The product of channels and taps is not a multiple of the group size of the format.
    pub fn new(filters: TimeFilters<'_>) -> Result<Self, NotWholeGroups> {
        let TimeFilters { weights, bias, taps, dilation, is_depthwise, format } = filters;
        let of_tap =
            |filter: &[f32], tap: usize| filter[tap..].iter().step_by(taps).copied().collect::<Vec<_>>();
        let weights = if is_depthwise {
            Weights::Depthwise((0..taps).flat_map(|tap| of_tap(weights, tap)).collect())
        } else {
            let depth = weights.len() / bias.len();
            let filters = weights.chunks_exact(depth);
            let columns = filters.flat_map(|filter| (0..taps).flat_map(|tap| of_tap(filter, tap)));
            Weights::Packed(Linear::new(&columns.collect::<Vec<_>>(), depth, format)?)
        };
        Ok(Self { weights, bias, taps, dilation })
    }

    /// Number of channels of a frame.
    pub fn channels(&self) -> usize {
        match &self.weights {
            Weights::Packed(matrix) => matrix.depth() / self.taps,
            Weights::Depthwise(_) => self.width(),
        }
    }

    /// Number of channels of a result.
    pub fn width(&self) -> usize {
        self.bias.len()
    }

    /// `[frames, width]` from frames `x` `[frames, channels]`. `lengths` are the numbers of frames of the
    /// sequences; their sum is `frames`.
    pub fn forward(&self, x: &[f32], lengths: &[usize]) -> Vec<f32> {
        let channels = self.channels();
        let mut out = vec![0.0; x.len() / channels * self.width()];
        match &self.weights {
            Weights::Packed(matrix) if self.taps == 1 => self.product(x, matrix, &mut out),
            Weights::Packed(matrix) => self.product(&self.patches(x, lengths), matrix, &mut out),
            Weights::Depthwise(_) => {
                let sequences = sequences(lengths);
                by_blocks(&mut out, channels, |first, out| self.depthwise_block(x, &sequences, first, out));
            }
        }
        out
    }

    /// Computes a depthwise convolution for a block of frames, `out`, whose first frame has the index `first`, on this
    /// thread.
    pub(crate) fn depthwise_block(
        &self,
        x: &[f32],
        sequences: &[Range<usize>],
        first: usize,
        out: &mut [f32],
    ) {
        let Weights::Depthwise(taps) = &self.weights else { panic!("the convolution is not depthwise") };
        let sequences = &sequences[first..];
        dispatch(Depthwise { convolution: self, x, taps, sequences, first, out });
    }

    fn product(&self, rows: &[f32], matrix: &Linear, out: &mut [f32]) {
        matrix.multiply(rows, out, |_, block| {
            for row in block.chunks_exact_mut(self.width()) {
                row.iter_mut().zip(&self.bias).for_each(|(x, bias)| *x += bias);
            }
        });
    }

    /// The frames that each result is computed from, `[frames, taps·channels]`.
    fn patches(&self, x: &[f32], lengths: &[usize]) -> Vec<f32> {
        let channels = self.channels();
        let sequences = sequences(lengths);
        let mut patches = vec![0.0; x.len() * self.taps];
        by_blocks(&mut patches, self.taps * channels, |first, block| {
            for (index, patch) in block.chunks_exact_mut(self.taps * channels).enumerate() {
                let frame = first + index;
                for (tap, to) in patch.chunks_exact_mut(channels).enumerate() {
                    if let Some(from) = self.frame_of(tap, frame, &sequences[frame]) {
                        to.copy_from_slice(&x[from * channels..][..channels]);
                    }
                }
            }
        });
        patches
    }

    /// The frame that a tap of the result `frame` reads. None outside the sequence.
    #[inline(always)]
    fn frame_of(&self, tap: usize, frame: usize, sequence: &Range<usize>) -> Option<usize> {
        let found = (frame + tap * self.dilation).checked_sub(self.taps / 2 * self.dilation)?;
        sequence.contains(&found).then_some(found)
    }
}

/// For each frame, the frames of its sequence.
pub(crate) fn sequences(lengths: &[usize]) -> Vec<Range<usize>> {
    let mut start = 0;
    let of_sequence = |length: &usize| {
        let sequence = start..start + length;
        start += length;
        std::iter::repeat_n(sequence, *length)
    };
    lengths.iter().flat_map(of_sequence).collect()
}

/// Computes some frames of a depthwise convolution.
struct Depthwise<'a> {
    convolution: &'a TimeConvolution,
    x: &'a [f32],
    taps: &'a [f32],
    /// For each of these frames, the sequence that it belongs to.
    sequences: &'a [Range<usize>],
    /// The index of the first of these frames.
    first: usize,
    out: &'a mut [f32],
}

impl WithSimd for Depthwise<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { convolution, x, taps, sequences, first, out } = self;
        let channels = convolution.bias.len();
        for (index, (out, sequence)) in out.chunks_exact_mut(channels).zip(sequences).enumerate() {
            out.copy_from_slice(&convolution.bias);
            for (tap, weights) in taps.chunks_exact(channels).enumerate() {
                if let Some(from) = convolution.frame_of(tap, first + index, sequence) {
                    add_product(simd, &x[from * channels..][..channels], weights, out);
                }
            }
        }
    }
}

/// `out` += `x` * `weights`, element by element.
#[inline(always)]
fn add_product<S: Simd>(simd: S, x: &[f32], weights: &[f32], out: &mut [f32]) {
    let ((x, x_tail), (weights, weights_tail)) = (S::as_simd_f32s(x), S::as_simd_f32s(weights));
    let (out, out_tail) = S::as_mut_simd_f32s(out);
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weights) {
        *out = simd.mul_add_e_f32s(*x, *weight, *out);
    }
    if !out_tail.is_empty() {
        let (x, weight) = (simd.partial_load_f32s(x_tail), simd.partial_load_f32s(weights_tail));
        let sum = simd.mul_add_e_f32s(x, weight, simd.partial_load_f32s(out_tail));
        simd.partial_store_f32s(out_tail, sum);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{difference, noise, on_every_cpu};
    use super::*;

    /// The convolution of one sequence by its formula, in f64.
    fn expected(filters: &TimeFilters<'_>, x: &[f32], channels: usize) -> Vec<f64> {
        let TimeFilters { weights, bias, taps, dilation, is_depthwise, .. } = filters;
        let (length, half) = ((x.len() / channels) as isize, (taps / 2 * dilation) as isize);
        let depth = weights.len() / bias.len();
        let mut out = Vec::new();
        for frame in 0..length {
            for (index, bias) in bias.iter().enumerate() {
                let filter = &weights[index * depth..][..depth];
                let mut sum = f64::from(*bias);
                for tap in 0..*taps {
                    let from = frame + (tap * dilation) as isize - half;
                    if !(0..length).contains(&from) {
                        continue;
                    }
                    let row = &x[from as usize * channels..][..channels];
                    let row = if *is_depthwise { &row[index..=index] } else { row };
                    let weights = filter[tap..].iter().step_by(*taps);
                    sum += row.iter().zip(weights).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
                }
                out.push(sum);
            }
        }
        out
    }

    #[test]
    fn each_sequence_is_convolved_by_itself_on_every_cpu() {
        on_every_cpu(|| {
            for (channels, taps, dilation) in [(3, 1, 1), (19, 3, 1), (80, 7, 1), (80, 7, 8), (16, 5, 2)] {
                for is_depthwise in [false, true] {
                    let (out, in_per_filter) = if is_depthwise { (channels, 1) } else { (5, channels) };
                    let weights = noise(&[out, in_per_filter, taps], 0.5, 1);
                    let bias = noise(&[out], 0.5, 2);
                    let filters = || TimeFilters {
                        weights: &weights,
                        bias: bias.clone(),
                        taps,
                        dilation,
                        is_depthwise,
                        format: NumberFormat::F32,
                    };
                    let lengths = [1, 40, 7];
                    let x = noise(&[48, channels], 1.0, 3);
                    let mut all_expected = Vec::new();
                    let mut start = 0;
                    for length in lengths {
                        let sequence = &x[start * channels..][..length * channels];
                        all_expected.extend(expected(&filters(), sequence, channels));
                        start += length;
                    }
                    let convolution = TimeConvolution::new(filters()).unwrap();
                    assert_eq!((convolution.channels(), convolution.width()), (channels, out));
                    let largest_error = difference(&convolution.forward(&x, &lengths), &all_expected);
                    assert!(
                        largest_error < 5e-5,
                        "{channels} channels, {taps} taps, {dilation}, {is_depthwise}: {largest_error}"
                    );
                }
            }
        });
    }
}
