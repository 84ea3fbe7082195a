//! Probabilities from logits, in f32 by way of f64. Owns no state.

/// 1 / (1 + e^-x).
pub fn sigmoid(x: f32) -> f32 {
    (1.0 / (1.0 + (-f64::from(x)).exp())) as f32
}

/// The softmax of `logits`, in place.
pub fn softmax(logits: &mut [f32]) {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - largest).exp()).sum();
    logits.iter_mut().for_each(|x| *x = (f64::from(*x - largest).exp() / sum) as f32);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_survive_large_numbers() {
        let mut numbers = [1e30, 1e30, -1e30];
        softmax(&mut numbers);
        assert_eq!(numbers, [0.5, 0.5, 0.0]);
        assert_eq!((sigmoid(1e30), sigmoid(-1e30)), (1.0, 0.0));
    }
}
