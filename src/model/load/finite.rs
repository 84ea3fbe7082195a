//! Finds the first number that is not finite in a tensor's bytes, and words the error. Pure.

use half::{bf16, f16};

/// What is wrong with a tensor that holds this number at this position.
pub(super) fn problem(tensor: &str, position: usize, number: f32) -> String {
    format!(
        "tensor {tensor} is not finite: its number {position} is {number}, so the model cannot be computed; export the \
         model again"
    )
}

/// The first of the little-endian f32 numbers that is not finite, with its position.
pub(super) fn not_finite_f32(bytes: &[u8]) -> Option<(usize, f32)> {
    not_finite(bytes, f32::from_le_bytes)
}

/// As [`not_finite_f32`], for f64, whose numbers are read as f32.
pub(super) fn not_finite_f64(bytes: &[u8]) -> Option<(usize, f32)> {
    not_finite(bytes, |x| f64::from_le_bytes(x) as f32)
}

/// As [`not_finite_f32`], for bf16.
pub(super) fn not_finite_bf16(bytes: &[u8]) -> Option<(usize, f32)> {
    not_finite(bytes, |x| bf16::from_le_bytes(x).to_f32())
}

/// As [`not_finite_f32`], for f16.
pub(super) fn not_finite_f16(bytes: &[u8]) -> Option<(usize, f32)> {
    not_finite(bytes, |x| f16::from_le_bytes(x).to_f32())
}

fn not_finite<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f32) -> Option<(usize, f32)> {
    let mut numbers = bytes.as_chunks().0.iter().map(|x| number(*x)).enumerate();
    numbers.find(|(_, number)| !number.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_number_that_is_not_finite_is_found_in_every_type() {
        let (inf, largest) = (f32::INFINITY, f32::MAX.to_le_bytes());
        let f32s = [largest, (-inf).to_le_bytes(), f32::NAN.to_le_bytes()].concat();
        assert_eq!(not_finite_f32(&f32s), Some((1, -inf)));
        assert_eq!(not_finite_f32(&f32s[..4]), None);
        let f64s = [f64::from(f32::MAX), 1e300].map(f64::to_le_bytes).concat();
        assert_eq!(not_finite_f64(&f64s), Some((1, inf)));
        // The largest number, then infinity.
        let bytes = |bits: [u16; 2]| bits.map(u16::to_le_bytes).concat();
        assert_eq!(not_finite_bf16(&bytes([0x7f7f, 0x7f80])), Some((1, inf)));
        assert_eq!(not_finite_f16(&bytes([0x7bff, 0xfc00])), Some((1, -inf)));
        assert!(not_finite_f16(&bytes([0x7c01, 0])).is_some_and(|(at, number)| at == 0 && number.is_nan()));
        assert_eq!(not_finite_f16(&bytes([0x7bff, 0x0001])), None);
    }
}
