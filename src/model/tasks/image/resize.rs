//! Resizes 8-bit RGB pixels exactly as Pillow's `Image.resize` does before version 13. From version 13 on, Pillow swaps
//! the order of the two passes for some sizes, and its samples differ by 1 at most. Pure functions.
//!
//! When an image shrinks, the filter is stretched over all source pixels of a target pixel, so that pixels are averaged
//! instead of skipped. The first pass resizes rows, the second columns. Each has integer weights and rounds to 8 bits.

use std::f64::consts::PI;
use std::ops::Range;

use super::decode::Rgb8;

/// How a target pixel is computed from the source pixels around its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// The nearest source pixel.
    Nearest,
    /// The mean of the covered source pixels.
    Box,
    /// A triangle: weights fall linearly to both sides.
    Bilinear,
    /// A sinc in a Hamming window, one pixel to each side.
    Hamming,
    /// A cubic with a = -0.5.
    Bicubic,
    /// A windowed sinc, three pixels to each side.
    Lanczos,
}

impl Filter {
    /// The filter with Pillow's number, as in the field `resample` of preprocessor_config.json.
    pub fn from_pillow(number: u64) -> Option<Self> {
        let filters = [Self::Nearest, Self::Lanczos, Self::Bilinear, Self::Bicubic, Self::Box, Self::Hamming];
        filters.get(usize::try_from(number).ok()?).copied()
    }

    /// The filter's support: pixels at a greater distance have no weight. The unit is a source pixel when an image is
    /// enlarged, and a target pixel when it is shrunk.
    fn support(self) -> f64 {
        match self {
            Self::Nearest | Self::Box => 0.5,
            Self::Bilinear | Self::Hamming => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    /// The weight of a pixel that lies `x` pixels after the position.
    fn weight(self, x: f64) -> f64 {
        let distance = x.abs();
        match self {
            Self::Nearest | Self::Box => f64::from(x > -0.5 && x <= 0.5),
            Self::Bilinear => (1.0 - distance).max(0.0),
            Self::Hamming if distance == 0.0 => 1.0,
            Self::Hamming if distance >= 1.0 => 0.0,
            Self::Hamming => (distance * PI).sin() / (distance * PI) * (0.54 + 0.46 * (distance * PI).cos()),
            Self::Bicubic if distance < 1.0 => (1.5 * distance - 2.5) * distance * distance + 1.0,
            Self::Bicubic if distance < 2.0 => ((distance - 5.0) * distance + 8.0) * distance * -0.5 + 2.0,
            Self::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
            Self::Bicubic | Self::Lanczos => 0.0,
        }
    }
}

fn sinc(x: f64) -> f64 {
    if x == 0.0 { 1.0 } else { (x * PI).sin() / (x * PI) }
}

/// The part of the resized image that is computed. It is not empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Columns of the resized image.
    pub columns: Range<usize>,
    /// Rows of the resized image.
    pub rows: Range<usize>,
}

/// The `window` of `image` resized to `width` by `height`, each at least 1.
pub fn resize(image: &Rgb8, width: usize, height: usize, filter: Filter, window: &Window) -> Rgb8 {
    let columns = all_weights(image.width, width, filter, &window.columns);
    let rows = all_weights(image.height, height, filter, &window.rows);
    let first = rows.iter().map(|pixel| pixel.first).min().unwrap_or(0);
    let end = rows.iter().map(|pixel| pixel.first + pixel.weights.len()).max().unwrap_or(0);
    let resized_rows = resize_rows(image, &columns, first..end);
    let pixels = resize_columns(&resized_rows, columns.len() * 3, &rows, first);
    Rgb8 { width: columns.len(), height: rows.len(), pixels }
}

/// Weights are multiples of 2^-22, as in Pillow. An i32 also holds the 8 bits of a sample, and 2 bits for weighted sums
/// that are negative or above 255, which filters with negative weights give.
const FRACTION_BITS: u32 = 32 - 8 - 2;
const ONE: i32 = 1 << FRACTION_BITS;

/// The source pixels of one target pixel in one direction, with their weights.
struct PixelWeights {
    /// The index of the first source pixel. The others follow it, one for each weight.
    first: usize,
    weights: Vec<i32>,
}

/// The weights of the `wanted` target pixels, if `source` pixels are resized to `target` pixels.
fn all_weights(source: usize, target: usize, filter: Filter, wanted: &Range<usize>) -> Vec<PixelWeights> {
    let step = source as f64 / target as f64;
    if source == target {
        return wanted.clone().map(|index| PixelWeights { first: index, weights: vec![ONE] }).collect();
    }
    if filter == Filter::Nearest {
        // Pillow adds up the steps, and the accumulated rounding can decide which pixel is the nearest.
        let positions = std::iter::successors(Some(step * 0.5), |position| Some(position + step));
        let nearest = positions
            .map(|position| PixelWeights { first: (position as usize).min(source - 1), weights: vec![ONE] });
        return nearest.skip(wanted.start).take(wanted.len()).collect();
    }
    wanted
        .clone()
        .map(|index| weights_at(source, (index as f64 + 0.5) * step, step.max(1.0), filter))
        .collect()
}

/// The weights of the target pixel at the position `centre` among `source` pixels. The filter is `stretch` times as
/// wide as for enlarging.
fn weights_at(source: usize, centre: f64, stretch: f64, filter: Filter) -> PixelWeights {
    let support = filter.support() * stretch;
    // A cast of a negative number gives 0.
    let first = (centre - support + 0.5) as usize;
    let end = ((centre + support + 0.5) as usize).min(source);
    let scale = 1.0 / stretch;
    let weights: Vec<f64> = (first..end).map(|x| filter.weight((x as f64 - centre + 0.5) * scale)).collect();
    let sum: f64 = weights.iter().sum();
    let to_fixed_point = |weight: &f64| {
        let share = if sum == 0.0 { *weight } else { weight / sum } * f64::from(ONE);
        (share + 0.5_f64.copysign(share)) as i32
    };
    PixelWeights { first, weights: weights.iter().map(to_fixed_point).collect() }
}

/// The rows `rows` of the image, each resized to the width of `columns`.
fn resize_rows(image: &Rgb8, columns: &[PixelWeights], rows: Range<usize>) -> Vec<u8> {
    let stride = image.width * 3;
    let mut out = Vec::with_capacity(rows.len() * columns.len() * 3);
    for row in image.pixels[rows.start * stride..rows.end * stride].chunks_exact(stride) {
        for target in columns {
            let mut sums = [ONE / 2; 3];
            for (pixel, weight) in row[target.first * 3..].chunks_exact(3).zip(&target.weights) {
                for (sum, sample) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(*sample) * weight;
                }
            }
            out.extend(sums.map(rounded));
        }
    }
    out
}

/// Computes the `target_rows` from `rows` of `stride` samples each. The first of these has the index `first_row` in the
/// source image.
fn resize_columns(rows: &[u8], stride: usize, target_rows: &[PixelWeights], first_row: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(target_rows.len() * stride);
    let mut sums = vec![0; stride];
    for target in target_rows {
        sums.fill(ONE / 2);
        let source_rows = rows[(target.first - first_row) * stride..].chunks_exact(stride);
        for (row, weight) in source_rows.zip(&target.weights) {
            for (sum, sample) in sums.iter_mut().zip(row) {
                *sum += i32::from(*sample) * weight;
            }
        }
        out.extend(sums.iter().map(|sum| rounded(*sum)));
    }
    out
}

/// The sample of a weighted sum to which half of [`ONE`] was added, so that the shift rounds.
fn rounded(sum: i32) -> u8 {
    (sum >> FRACTION_BITS).clamp(0, 255) as u8
}

#[cfg(test)]
mod tests {
    use super::super::test_files::{expected, png};
    use super::*;

    fn whole(width: usize, height: usize) -> Window {
        Window { columns: 0..width, rows: 0..height }
    }

    #[test]
    fn every_filter_equals_pillow() {
        for row in expected()["resized"].as_array().unwrap() {
            let file = row["file"].as_str().unwrap();
            let pillow = png(file);
            let filter = Filter::from_pillow(row["resample"].as_u64().unwrap()).unwrap();
            let source = png(row["source"].as_str().unwrap());
            let ours =
                resize(&source, pillow.width, pillow.height, filter, &whole(pillow.width, pillow.height));
            let differences = ours.pixels.iter().zip(&pillow.pixels).map(|(a, b)| a.abs_diff(*b));
            assert_eq!(differences.max(), Some(0), "{file}");
        }
    }

    #[test]
    fn a_window_equals_that_part_of_the_whole() {
        let source = png("rgb.png");
        for filter in (0..6).filter_map(Filter::from_pillow) {
            let all = resize(&source, 50, 31, filter, &whole(50, 31));
            let part = resize(&source, 50, 31, filter, &Window { columns: 7..20, rows: 11..30 });
            for y in 0..19 {
                let line = &all.pixels[((y + 11) * 50 + 7) * 3..][..13 * 3];
                assert_eq!(&part.pixels[y * 13 * 3..][..13 * 3], line, "{filter:?}");
            }
        }
    }

    #[test]
    fn the_same_size_changes_nothing() {
        let source = png("rgb.png");
        for filter in (0..6).filter_map(Filter::from_pillow) {
            assert_eq!(resize(&source, 64, 43, filter, &whole(64, 43)), source);
        }
        assert_eq!(Filter::from_pillow(6), None);
    }

    #[test]
    fn extreme_shapes_are_resized() {
        let line = Rgb8 { width: 1, height: 5000, pixels: vec![7; 15_000] };
        for filter in (0..6).filter_map(Filter::from_pillow) {
            let window = Window { columns: 100..104, rows: 900_000..900_003 };
            assert_eq!(resize(&line, 256, 1_280_000, filter, &window).pixels, [7; 36]);
            assert_eq!(resize(&line, 1, 1, filter, &whole(1, 1)).pixels, [7; 3]);
        }
    }
}
