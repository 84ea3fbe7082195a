//! Attention by candle's own operations, for any device and precision: the reference of the kernel
//! beside it. Decides which texts go through a product together.

use candle_core::{D, DType, Result, Tensor};

/// softmax(Q·Kᵀ/√d)·V for each text and head. `qkv` is `[tokens, 3·heads·d]`, the three products side
/// by side; `lengths` are the texts' tokens, which add up to `tokens`. Gives `[tokens, heads·d]`.
///
/// # Errors
/// When shapes or types do not fit: a fault of the caller.
pub fn attention(qkv: &Tensor, heads: usize, lengths: &[usize]) -> Result<Tensor> {
    let d = qkv.dim(1)? / 3 / heads;
    let mut start = 0;
    let mut texts = Vec::with_capacity(lengths.len());
    for &n in lengths {
        let text = qkv.narrow(0, start, n)?.reshape((n, 3, heads, d))?.permute((1, 2, 0, 3))?;
        let part = |index| text.get(index)?.contiguous();
        let scores = (part(0)?.matmul(&part(1)?.t()?)? / (d as f64).sqrt())?;
        // Half precision has not the digits for a sum of many.
        let weights = candle_nn::ops::softmax(&scores.to_dtype(DType::F32)?, D::Minus1)?;
        let seen = weights.to_dtype(qkv.dtype())?.matmul(&part(2)?)?;
        texts.push(seen.transpose(0, 1)?.reshape((n, heads * d))?);
        start += n;
    }
    Tensor::cat(&texts, 0)
}
