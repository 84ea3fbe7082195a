//! The positional terms of attention (relative bias, rotary embedding, sliding window, vectors of relative positions) as
//! tensors for candle's operations.

use candle_core::{DType, Device, Result, Tensor};
use sconce_kernels::{Disentangled, PositionTerms, Rotary};

/// The terms that [`PositionTerms::apply`] adds to the scores of a text of `n` tokens: `[heads, n, n]`.
///
/// # Errors
/// The device fails.
pub fn score_terms(
    position_terms: &PositionTerms,
    heads: usize,
    n: usize,
    device: &Device,
) -> Result<Tensor> {
    let mut terms = vec![0.0; heads * n * n];
    for (index, scores) in terms.chunks_exact_mut(n).enumerate() {
        position_terms.apply(index / n, index % n, scores);
    }
    Tensor::from_vec(terms, (heads, n, n), device)
}

/// The position keys and position queries of disentangled attention as tensors, each `[heads, d, vectors]`.
///
/// # Errors
/// The device fails.
pub fn relative_vectors(
    disentangled: &Disentangled,
    heads: usize,
    dtype: DType,
    device: &Device,
) -> Result<[Tensor; 2]> {
    let [keys, queries] = disentangled.vectors();
    let hidden = disentangled.hidden();
    let tensor = |rows: &[f32]| {
        Tensor::from_slice(rows, (heads, hidden / heads, rows.len() / hidden), device)?.to_dtype(dtype)
    };
    Ok([tensor(keys)?, tensor(queries)?])
}

/// What disentangled attention adds to the scores of texts of `n` tokens: `[texts, heads, n, n]`. `queries`, which are
/// scaled, and `keys` are `[texts, heads, n, d]`, and `vectors` those of [`relative_vectors`].
///
/// # Errors
/// Shapes or types do not match, or the device fails.
pub fn relative_scores(
    disentangled: &Disentangled,
    [position_keys, position_queries]: &[Tensor; 2],
    queries: &Tensor,
    keys: &Tensor,
) -> Result<Tensor> {
    let mut indices = disentangled.indices(queries.dim(2)?).to_vec();
    let in_order = |vectors: &Tensor, indices: &[u32]| {
        vectors.index_select(&Tensor::from_slice(indices, indices.len(), vectors.device())?, 2)
    };
    let of_queries = queries.broadcast_matmul(&in_order(position_keys, &indices)?)?;
    // Seen from a key, distances have the opposite sign.
    indices.reverse();
    let of_keys = keys.broadcast_matmul(&in_order(position_queries, &indices)?)?;
    by_token(&of_queries)? + by_token(&of_keys)?.t()?
}

/// `[…, n, n]` from products with the vectors of all distances, `[…, n, 2·n - 1]`: number `j` of row `i` is the product for
/// the distance `j - i`.
fn by_token(products: &Tensor) -> Result<Tensor> {
    let (texts, heads, n, distances) = products.dims4()?;
    if n == 1 {
        return Ok(products.clone());
    }
    // In rows that are one number shorter, each row begins one distance earlier than the row before.
    let numbers = products.reshape((texts, heads, n * distances))?;
    let numbers = numbers.narrow(2, n - 1, n * (distances - 1))?.contiguous()?;
    numbers.reshape((texts, heads, n, distances - 1))?.narrow(3, 0, n)
}

/// The cosines and sines of the rotation at these positions, each `[positions, half]`, in f32.
///
/// # Errors
/// The device fails.
pub fn cos_sin(rotary: &Rotary, positions: &[usize], device: &Device) -> Result<[Tensor; 2]> {
    let table = |part: fn(&(f32, f32)) -> f32| {
        let numbers: Vec<f32> =
            positions.iter().flat_map(|position| rotary.rotations_at(*position)).map(part).collect();
        Tensor::from_vec(numbers, (positions.len(), rotary.half()), device)
    };
    Ok([table(|(cos, _)| *cos)?, table(|(_, sin)| *sin)?])
}

/// [`Rotary::rotate`] of `x` `[tokens, heads, d]`.
///
/// # Errors
/// Shapes or types do not match, or the device fails.
pub fn rotated(rotary: &Rotary, x: &Tensor, positions: &[usize]) -> Result<Tensor> {
    let [cos, sin] = cos_sin(rotary, positions, x.device())?;
    let for_heads = |table: Tensor| table.unsqueeze(1)?.to_dtype(x.dtype());
    let (cos, sin) = (for_heads(cos)?, for_heads(sin)?);
    let half = rotary.half();
    let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    Tensor::cat(&[first, second], 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotation_by_tensors_equals_the_kernel() {
        let rotary = Rotary::new(100.0, 4, 8);
        let mut token = [1.0, 2.0, 3.0, 4.0];
        let x = Tensor::from_slice(&token, (1, 1, 4), &Device::Cpu).unwrap();
        rotary.rotate(3, &mut token);
        let composed: Vec<f32> =
            rotated(&rotary, &x, &[3]).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        assert_eq!(composed, token);
    }
}
