//! Decides in which number formats this CPU multiplies faster than in f32, and whether its instructions for bf16 are
//! used. Owns the measured rate of AVX512-BF16.

use std::fmt;
use std::hint::black_box;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::matrix::Matrix;
use super::number_format::{NumberFormat, RowFormat};
use crate::cpu::{CpuFeatures, allows_avx512, has_amx, has_avx2, has_bf16, has_vnni, may_use_avx512};

/// How matrices in bf16 are multiplied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bf16Products {
    /// In f32, to which the matrices are widened: the CPU has no instructions for bf16, or its settings exclude them.
    Widened,
    /// By AMX, which gained 2.66 × where it was measured.
    Amx,
    /// By AVX512-BF16, or widened as above: whichever is faster.
    Avx512 {
        /// The rate of products by AVX512-BF16, divided by that of widened ones.
        rate: f64,
    },
}

impl Bf16Products {
    /// Of a CPU with AVX512-BF16 and without AMX. Each round is the time of a product by AVX512-BF16, and of the same
    /// product widened. The least time of each counts, because other programs can only make a product slower.
    fn of_rounds(rounds: &[[Duration; 2]]) -> Self {
        let least = |of: usize| rounds.iter().map(|round| round[of]).min().unwrap_or_default().as_secs_f64();
        Self::Avx512 { rate: least(1) / least(0) }
    }

    /// Whether the CPU's instructions for bf16 are used.
    pub fn use_unit(self) -> bool {
        match self {
            Self::Widened => false,
            Self::Amx => true,
            Self::Avx512 { rate } => rate > 1.0,
        }
    }
}

impl fmt::Display for Bf16Products {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Widened => {
                f.write_str("bf16 is widened to f32: the vector units in use have no instructions for it")
            }
            Self::Amx => f.write_str("bf16 is multiplied by AMX"),
            Self::Avx512 { rate } if self.use_unit() => {
                write!(
                    f,
                    "bf16 is multiplied by AVX512-BF16, measured at {rate:.2} × the rate of widening it to f32"
                )
            }
            Self::Avx512 { rate } => {
                write!(
                    f,
                    "bf16 is widened to f32: AVX512-BF16 was measured at {rate:.2} × that rate on this CPU"
                )
            }
        }
    }
}

/// How this CPU multiplies matrices in bf16 with these vector units. The first call in a process can take some
/// milliseconds.
pub fn bf16_products(features: CpuFeatures) -> Bf16Products {
    if allows_avx512(features) { with_avx512() } else { Bf16Products::Widened }
}

/// Whether rows may be rounded to bf16 before they are multiplied with a matrix in bf16 ([`Matrix::with_rows_as`]): the
/// CPU has AMX, or its AVX512-BF16 is fast, and the vector units that were set allow it.
///
/// [`Matrix::with_rows_as`]: super::Matrix::with_rows_as
pub fn may_use_bf16() -> bool {
    may_use_avx512() && with_avx512().use_unit()
}

/// The number formats in which this CPU multiplies matrices faster than in f32 with these vector units, the fastest first.
/// Measured for AVX2, AVX-VNNI, AVX512-VNNI with and without a fast AVX512-BF16, and AMX (benches/RESULTS.md, "Lower
/// precision"). AVX-512 without AVX512-VNNI has not been measured for int8, and has no fast int8.
pub fn fast_formats(features: CpuFeatures) -> &'static [NumberFormat] {
    match () {
        () if features == CpuFeatures::None || !has_avx2() => &[],
        () if !allows_avx512(features) => &[NumberFormat::Bits8],
        () => fast_with_avx512(has_vnni(), bf16_products(features)),
    }
}

/// As [`fast_formats`], for a CPU with AVX-512.
fn fast_with_avx512(has_vnni: bool, bf16: Bf16Products) -> &'static [NumberFormat] {
    match (has_vnni, bf16.use_unit()) {
        (true, true) => &[NumberFormat::Bits8, NumberFormat::Bf16],
        (true, false) => &[NumberFormat::Bits8],
        (false, true) => &[NumberFormat::Bf16],
        (false, false) => &[],
    }
}

/// How a CPU with AVX-512 multiplies matrices in bf16.
///
/// AVX512-BF16 is measured, because neither its presence nor the CPU's model tells its rate: an Intel Xeon computed
/// texts with it at 0.6 × the rate of f32 and AMD Zen 4 at 1.5 ×, and virtual machines show models that the CPU is not.
/// Both are so far from 1 that noise does not make workers on the same kind of CPU choose differently.
fn with_avx512() -> Bf16Products {
    static PRODUCTS: OnceLock<Bf16Products> = OnceLock::new();
    *PRODUCTS.get_or_init(|| {
        if !has_bf16() {
            return Bf16Products::Widened;
        }
        if has_amx() {
            return Bf16Products::Amx;
        }
        measured()
    })
}

/// Measures AVX512-BF16 with a product of MiniLM's size, on this thread alone: other threads may wait for the result.
fn measured() -> Bf16Products {
    const ROWS: usize = 192;
    const WIDTH: usize = 384;
    const ROUNDS: usize = 5;
    let numbers = |count: usize| (0..count).map(|at| (at % 251) as f32 / 125.0 - 1.0).collect::<Vec<_>>();
    let (rows, columns) = (numbers(ROWS * WIDTH), numbers(WIDTH * WIDTH));
    let by_unit = Matrix::of_bf16(&columns, WIDTH).with_rows_as(RowFormat::Bf16);
    let widened = Matrix::of_bf16(&columns, WIDTH);
    let mut out = vec![0.0; ROWS * WIDTH];
    let mut time = |matrix: &Matrix| {
        let start = Instant::now();
        matrix.multiply_single_threaded(black_box(&rows), black_box(&mut out));
        start.elapsed()
    };
    // In turns, so that other programs and a changing clock rate disturb both alike. The first round fills the caches.
    let rounds: [[Duration; 2]; ROUNDS] = std::array::from_fn(|_| [time(&by_unit), time(&widened)]);
    Bf16Products::of_rounds(&rounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds whose products take these microseconds, and one that another program has slowed down.
    fn measured([by_unit, widened]: [u64; 2]) -> Bf16Products {
        let rounds = [[by_unit + 90, widened], [by_unit, widened + 5_000], [by_unit + 7_000, widened + 3]];
        Bf16Products::of_rounds(&rounds.map(|round| round.map(Duration::from_micros)))
    }

    #[test]
    fn avx512_bf16_is_used_only_where_it_was_faster_than_widening() {
        let (xeon, zen4) = (measured([1_000, 590]), measured([500, 900]));
        assert_eq!([xeon, zen4].map(Bf16Products::use_unit), [false, true]);
        assert!(!measured([700, 700]).use_unit());
        assert!(Bf16Products::Amx.use_unit() && !Bf16Products::Widened.use_unit());
        let said = [xeon, zen4].map(|products| products.to_string());
        assert!(said[0].contains("widened to f32: AVX512-BF16 was measured at 0.59 ×"), "{}", said[0]);
        assert!(said[1].contains("by AVX512-BF16, measured at 1.80 ×"), "{}", said[1]);
    }

    #[test]
    fn bf16_is_a_fast_format_only_where_it_is_not_widened() {
        use NumberFormat::{Bf16, Bits8};
        let (slow, fast) = (measured([1_000, 590]), measured([500, 900]));
        for (has_vnni, bf16, expected) in [
            (true, slow, &[Bits8][..]),
            (true, fast, &[Bits8, Bf16]),
            (true, Bf16Products::Amx, &[Bits8, Bf16]),
            (true, Bf16Products::Widened, &[Bits8]),
            (false, slow, &[]),
            (false, fast, &[Bf16]),
        ] {
            assert_eq!(fast_with_avx512(has_vnni, bf16), expected, "{has_vnni} {bf16:?}");
        }
    }

    #[test]
    fn linear_layers_use_the_unit_that_the_cpu_is_said_to_use() {
        // No test sets the vector units, so they are those of `Auto`.
        let products = bf16_products(CpuFeatures::Auto);
        assert_eq!(products.use_unit(), may_use_bf16());
        assert_eq!(fast_formats(CpuFeatures::Auto).contains(&NumberFormat::Bf16), may_use_bf16());
        assert_eq!(bf16_products(CpuFeatures::Avx2), Bf16Products::Widened);
        // It is measured once: a second measurement would not give the same rate.
        assert_eq!(bf16_products(CpuFeatures::Auto), products);
    }
}
