//! Checks whether a device computes correctly and fast enough: it multiplies two known matrices of whole numbers, and
//! on a GPU the multiplication is timed. Whether a network computes correctly is checked in `nets`. Owns no state.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};

use super::{GpuUnits, forward_error, open};
use crate::config::Dtype;
use crate::model::random::splitmix64;
use crate::model::{ForwardError, LoadError, Unfit};

/// The smallest number of rows of the matrices. It is used on a CPU, where a product should take a fraction of a
/// millisecond, and on a GPU whose memory is nearly full.
const MIN_ROWS: usize = 128;
/// Rows and columns of a tile. On a GPU the product has two tiles for each multiprocessor, so that all multiprocessors
/// are busy. The product takes one millisecond at most.
const TILE: usize = 128;
/// The largest number of rows of the matrices. It suffices for more multiprocessors than any GPU has.
const MAX_ROWS: usize = 2560;
/// f32 represents all whole numbers up to this one.
const MAX_EXACT: f32 = 16_777_216.0;
/// The largest entry of the matrices in f32: the entries of their product stay far below [`MAX_EXACT`].
const MAX_ENTRY: i32 = 8;
/// The largest entry in 16 bits: the product's entries stay below 256, up to which bf16 represents all whole
/// numbers (f16: up to 2048).
const MAX_ENTRY_HALF: i32 = 1;
/// How long a GPU may take to reach the required speed: its clock rises only under load, and other processes may
/// compute on it at the same time.
const SPEED_TIMEOUT: Duration = Duration::from_secs(3);

/// A device that has passed the check. While it is kept, opening the same device again is cheap.
#[derive(Debug)]
pub struct Proven {
    _device: Device,
}

/// Opens `device` and checks that it multiplies correctly, in f32 and in `dtype`. A GPU is too slow if it reaches less
/// than the share `min_speed` of its peak speed in f32.
///
/// # Errors
/// [`LoadError::Device`] if it cannot be opened or cannot multiply, [`LoadError::Unfit`] if it multiplies
/// wrongly or too slowly.
pub fn prove(device: &str, dtype: Dtype, min_speed: f64) -> Result<Proven, LoadError> {
    let (opened, name) = open(device)?;
    let failed = |error: candle_core::Error| {
        let reason = match forward_error(&error) {
            ForwardError::OutOfMemory(message) => {
                format!("not enough memory for the test multiplication: {message}")
            }
            ForwardError::Failed(message) | ForwardError::Device(message) => {
                format!("the test multiplication fails: {message}")
            }
        };
        LoadError::Device { device: name.clone(), reason }
    };
    let unfit = |why, reason| LoadError::Unfit { device: name.clone(), why, reason };
    let units = gpu_units(&opened);
    let rows = units.as_ref().map_or(MIN_ROWS, |units| rows(units.multiprocessors));
    let check = |known: &KnownMatrices, product: &[f32], dtype| {
        known.check(product, dtype).map_err(|reason| unfit(Unfit::WrongResult, reason))
    };
    let (in_f32, product) = KnownMatrices::computed(rows, MAX_ENTRY, &opened, DType::F32).map_err(failed)?;
    check(&in_f32, &product, DType::F32)?;
    let half = match dtype {
        // Only a CPU multiplies in int8. The comparison of the network with its reference checks these products.
        Dtype::F32 | Dtype::Int8 => None,
        Dtype::Bf16 => Some(DType::BF16),
        Dtype::F16 => Some(DType::F16),
    };
    if let Some(half) = half {
        let (known, product) =
            KnownMatrices::computed(rows, MAX_ENTRY_HALF, &opened, half).map_err(failed)?;
        check(&known, &product, half)?;
    }
    // A smaller product does not show the device's speed.
    let peak_rate = units.and_then(|units| units.peak_rate).filter(|_| in_f32.rows == rows);
    if let Some(peak_rate) = peak_rate.filter(|_| min_speed > 0.0) {
        let factors = in_f32.upload(&opened, DType::F32).map_err(failed)?;
        let wanted = peak_rate * min_speed;
        let reached = best_rate(2.0 * (rows as f64).powi(3), wanted, || factors.time()).map_err(failed)?;
        let (gflops, possible_gflops) = (reached / 1e9, peak_rate / 1e9);
        tracing::debug!(device = name, gflops, possible_gflops, "known products computed");
        check_rate(reached, peak_rate, min_speed).map_err(|reason| unfit(Unfit::TooSlow, reason))?;
    }
    Ok(Proven { _device: opened })
}

/// The arithmetic units of a GPU. None if the device is a CPU, or if the driver does not report them.
#[cfg(feature = "cuda")]
fn gpu_units(device: &Device) -> Option<GpuUnits> {
    super::cuda::gpu_units(device)
}

#[cfg(not(feature = "cuda"))]
fn gpu_units(_: &Device) -> Option<GpuUnits> {
    None
}

/// The number of rows of the matrices for this many multiprocessors.
fn rows(multiprocessors: usize) -> usize {
    let tiles = (1..).find(|tiles| tiles * tiles >= 2 * multiprocessors);
    tiles.map_or(MAX_ROWS, |tiles| (TILE * tiles).min(MAX_ROWS))
}

/// Two square matrices of whole numbers, the same at each start.
struct KnownMatrices {
    rows: usize,
    left: Vec<i32>,
    right: Vec<i32>,
}

impl KnownMatrices {
    /// Numbers from -`largest` to `largest`.
    fn new(rows: usize, largest: i32) -> Self {
        let number = |index: usize| (splitmix64(index as u64) >> 33) as i32 % (2 * largest + 1) - largest;
        let count = rows * rows;
        let matrix = |first: usize| (first..first + count).map(number).collect();
        Self { rows, left: matrix(0), right: matrix(count) }
    }

    /// Two known matrices, and their product computed by the device. They have fewer rows if the device has no memory
    /// for `rows`.
    fn computed(
        mut rows: usize,
        largest: i32,
        device: &Device,
        dtype: DType,
    ) -> candle_core::Result<(Self, Vec<f32>)> {
        loop {
            let known = Self::new(rows, largest);
            match known.upload(device, dtype).and_then(Factors::multiply) {
                Err(error)
                    if rows > MIN_ROWS && matches!(forward_error(&error), ForwardError::OutOfMemory(_)) =>
                {
                    rows = (rows / 2).max(MIN_ROWS);
                }
                product => return Ok((known, product?)),
            }
        }
    }

    fn upload(&self, device: &Device, dtype: DType) -> candle_core::Result<Factors> {
        let tensor = |numbers: &[i32]| {
            let numbers: Vec<f32> = numbers.iter().map(|number| *number as f32).collect();
            Tensor::from_vec(numbers, (self.rows, self.rows), device)?.to_dtype(dtype)
        };
        Ok(Factors { left: tensor(&self.left)?, right: tensor(&self.right)? })
    }

    /// Checks `product`: it must be exact.
    fn check(&self, product: &[f32], dtype: DType) -> Result<(), String> {
        let wrong = self.wrong_rows(product);
        let Some(first) = wrong.first() else { return Ok(()) };
        let (rows, count, dtype) = (self.rows, wrong.len(), dtype.as_str());
        Err(format!(
            "it multiplies wrongly: of a known product of {rows} x {rows} numbers in {dtype}, {count} rows are \
             wrong, row {first} first; look at the card (dcgmi diag -r 3, nvidia-smi -q -d ECC) and take it out \
             of `devices`"
        ))
    }

    /// The rows of `product` that are wrong, by Freivalds' algorithm: (left · right) · x = left · (right · x) for a
    /// random x. A row with one wrong number is always found, since no number of x is 0. A row with several wrong
    /// numbers is missed with a probability of 1 in 2²⁰.
    fn wrong_rows(&self, product: &[f32]) -> Vec<usize> {
        let x: Vec<i64> = (0..self.rows).map(|row| (splitmix64(!(row as u64)) >> 44) as i64 + 1).collect();
        let times_x = |row: &[i32]| row.iter().zip(&x).map(|(a, x)| i64::from(*a) * x).sum();
        let right_x: Vec<i64> = self.right.chunks_exact(self.rows).map(times_x).collect();
        let expected = self
            .left
            .chunks_exact(self.rows)
            .map(|row| -> i64 { row.iter().zip(&right_x).map(|(a, b)| i64::from(*a) * b).sum() });
        let found = product.chunks_exact(self.rows).map(|row| {
            let terms = row.iter().zip(&x).map(|(number, x)| {
                let is_exact = number.fract() == 0.0 && number.abs() <= MAX_EXACT;
                is_exact.then(|| *number as i64 * x)
            });
            terms.sum::<Option<i64>>()
        });
        let pairs = expected.zip(found.chain(std::iter::repeat(None))).enumerate();
        pairs.filter(|(_, (expected, found))| Some(*expected) != *found).map(|(row, _)| row).collect()
    }
}

/// The two matrices on a device.
struct Factors {
    left: Tensor,
    right: Tensor,
}

impl Factors {
    fn multiply(self) -> candle_core::Result<Vec<f32>> {
        self.left.matmul(&self.right)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
    }

    fn time(&self) -> candle_core::Result<Duration> {
        let device = self.left.device();
        device.synchronize()?;
        let began = Instant::now();
        let product = self.left.matmul(&self.right)?;
        device.synchronize()?;
        let took = began.elapsed();
        drop(product);
        Ok(took)
    }
}

/// Multiplies until the rate, in operations per second, reaches `wanted` or [`SPEED_TIMEOUT`] is over; returns the best
/// rate. `operations` is the number for one product. The first product is not counted, since it loads code.
fn best_rate<E>(
    operations: f64,
    wanted: f64,
    mut product: impl FnMut() -> Result<Duration, E>,
) -> Result<f64, E> {
    product()?;
    let (mut best, mut spent) = (0.0, Duration::ZERO);
    while best < wanted && spent < SPEED_TIMEOUT {
        let took = product()?.max(Duration::from_nanos(1));
        best = f64::max(best, operations / took.as_secs_f64());
        spent += took;
    }
    Ok(best)
}

fn check_rate(reached: f64, peak: f64, min_speed: f64) -> Result<(), String> {
    let share = reached / peak;
    if share >= min_speed {
        return Ok(());
    }
    Err(format!(
        "it multiplies too slowly: {:.0} GFLOP/s in f32, {:.1} % of the {:.0} that its multiprocessors and \
         clock make possible, and {:.1} % is asked for; look for a clock that does not rise (nvidia-smi -q -d \
         PERFORMANCE,CLOCK), heat, missing power; where other programs use it too, lower pool.min_speed",
        reached / 1e9,
        share * 100.0,
        peak / 1e9,
        min_speed * 100.0,
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "what is missing in a helper fails its test")]
mod tests {
    use super::*;

    fn multiplied(known: &KnownMatrices, dtype: DType) -> Vec<f32> {
        known.upload(&Device::Cpu, dtype).and_then(Factors::multiply).unwrap()
    }

    #[test]
    fn a_correct_cpu_is_fit_in_every_precision_at_any_speed() {
        for (dtype, _) in Dtype::ALL {
            prove("cpu", dtype, 1.0).unwrap();
        }
        assert!(matches!(prove("GPU-5a", Dtype::F32, 0.0), Err(LoadError::Device { .. })));
    }

    /// For the largest matrices of a GPU. If this did not hold, a correct product could count as wrong.
    #[test]
    fn known_products_are_exact_in_their_precision() {
        for (largest, bound) in [(MAX_ENTRY, MAX_EXACT), (MAX_ENTRY_HALF, 256.0)] {
            let known = KnownMatrices::new(MAX_ROWS, largest);
            let product = multiplied(&known, DType::F32);
            assert!(known.check(&product, DType::F32).is_ok());
            let max = product.iter().fold(0.0, |max: f32, number| max.max(number.abs()));
            assert!(max <= bound && max > bound.min(4096.0) / 4.0, "{max} of {bound}");
        }
    }

    #[test]
    fn the_product_has_two_tiles_for_each_multiprocessor() {
        // One multiprocessor, a seventh of an A100, T4, A100, H100, B200, and more than any GPU has.
        let expected =
            [(1, 256), (14, 768), (40, 1152), (108, 1920), (132, 2176), (148, 2304), (9_999, MAX_ROWS)];
        assert!(expected.iter().all(|(count, expected)| rows(*count) == *expected));
    }

    #[test]
    fn one_wrong_number_is_found_and_its_row_is_named() {
        let known = KnownMatrices::new(MIN_ROWS, MAX_ENTRY);
        let product = multiplied(&known, DType::F32);
        assert_eq!(known.check(&product, DType::F32), Ok(()));
        let index = 77 * MIN_ROWS + 5;
        let flipped = f32::from_bits(product[index].to_bits() ^ 1 << 12);
        for bad in [product[index] + 1.0, flipped, product[index] + 0.5, f32::NAN, f32::INFINITY, 3e20] {
            let mut wrong = product.clone();
            wrong[index] = bad;
            let message = known.check(&wrong, DType::F32).unwrap_err();
            assert!(message.contains("1 rows are") && message.contains("row 77 first"), "{bad}: {message}");
        }
        let message = known.check(&product[..index], DType::F32).unwrap_err();
        assert!(message.contains("row 77 first"), "cut off: {message}");
        let zeros = vec![0.0; product.len()];
        assert!(known.check(&zeros, DType::F32).unwrap_err().contains("128 rows"), "no result at all");
    }

    #[test]
    fn a_device_is_slow_only_if_no_product_is_fast_enough() {
        let took = |milliseconds: &'static [u64]| {
            let mut times = milliseconds.iter().chain(std::iter::repeat(milliseconds.last().unwrap()));
            move || Ok::<_, ()>(Duration::from_millis(*times.next().unwrap()))
        };
        let rate = |times| best_rate(1e9, 1e10, took(times)).unwrap();
        assert_eq!(rate(&[5_000, 1]), 1e12, "the first loads code");
        assert_eq!(rate(&[1, 500, 500, 500, 1]), 1e12, "its clock rose, or another process finished");
        assert_eq!(rate(&[1, 2_000, 4_000, 1]), 5e8, "it took too long");
        assert_eq!(check_rate(2e11, 1e12, 0.2), Ok(()));
        let message = check_rate(1e11, 1e12, 0.2).unwrap_err();
        for part in ["100 GFLOP/s", "10.0 %", "1000 that", "20.0 % is asked for", "pool.min_speed"] {
            assert!(message.contains(part), "{part:?} is not in {message}");
        }
    }
}
