//! Attention of each text over its own tokens, in a batch whose texts lie one behind the other
//! without padding. Decides the memory layout of one head; owns its scratch for one call.

use candle_core::{CpuStorage, CustomOp2, D, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::values;

mod head;

use head::{Head, HeadShape};

/// softmax(Q·Kᵀ/√d)·V for each text and head.
///
/// `qkv` is `[tokens, 3·heads·d]`, the three products side by side, still without their `bias`
/// `[3·heads·d]`; `lengths` are the texts' tokens, which add up to `tokens`. Gives
/// `[tokens, heads·d]`, f32.
///
/// # Errors
/// When shapes or types do not fit: a fault of the caller.
pub fn attention(qkv: &Tensor, bias: &Tensor, heads: usize, lengths: &[usize]) -> Result<Tensor> {
    if qkv.device().is_cpu() {
        qkv.apply_op2_no_bwd(bias, &Attention { heads, lengths: lengths.to_vec() })
    } else {
        composed(qkv, bias, heads, lengths)
    }
}

fn composed(qkv: &Tensor, bias: &Tensor, heads: usize, lengths: &[usize]) -> Result<Tensor> {
    let qkv = qkv.broadcast_add(bias)?;
    let d = qkv.dim(1)? / 3 / heads;
    let mut start = 0;
    let mut texts = Vec::with_capacity(lengths.len());
    for &n in lengths {
        let text = qkv.narrow(0, start, n)?.reshape((n, 3, heads, d))?.permute((1, 2, 0, 3))?;
        let part = |index| text.get(index)?.contiguous();
        let scores = (part(0)?.matmul(&part(1)?.t()?)? / (d as f64).sqrt())?;
        let weights = candle_nn::ops::softmax(&scores, D::Minus1)?;
        texts.push(weights.matmul(&part(2)?)?.transpose(0, 1)?.reshape((n, heads * d))?);
        start += n;
    }
    Tensor::cat(&texts, 0)
}

struct Attention {
    heads: usize,
    lengths: Vec<usize>,
}

impl CustomOp2 for Attention {
    fn name(&self) -> &'static str {
        "packed-attention"
    }

    fn cpu_fwd(
        &self,
        qkv: &CpuStorage,
        qkv_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let bias = values(bias, bias_layout)?;
        let tokens: usize = self.lengths.iter().sum();
        if qkv_layout.dims() != [tokens, bias.len()] || bias.len() % (3 * self.heads) != 0 {
            candle_core::bail!("attention over {tokens} tokens of {:?}", qkv_layout.dims());
        }
        let out = self.compute(values(qkv, qkv_layout)?, bias);
        Ok((CpuStorage::F32(out), (tokens, bias.len() / 3).into()))
    }
}

impl Attention {
    fn compute(&self, qkv: &[f32], bias: &[f32]) -> Vec<f32> {
        let width = bias.len() / 3;
        let shape = HeadShape { d: width / self.heads, width };
        let mut out = vec![0f32; qkv.len() / 3];
        let heads = self.heads;
        let mut start = 0;
        let texts = self.lengths.iter().map(|&n| {
            let rows = start..start + n;
            start += n;
            rows
        });
        let tasks = texts.flat_map(|rows| (0..heads).map(move |head| (rows.clone(), head)));
        if rayon::current_num_threads() == 1 {
            let mut scratch = Head::new(shape);
            for (rows, head) in tasks {
                scratch.attend(&qkv[rows.start * 3 * width..rows.end * 3 * width], bias, head);
                scratch.scatter(&mut out[rows.start * width..rows.end * width], head);
            }
            return out;
        }
        let done: Vec<_> = tasks
            .collect::<Vec<_>>()
            .into_par_iter()
            .map(|(rows, head)| {
                let mut scratch = Head::new(shape);
                scratch.attend(&qkv[rows.start * 3 * width..rows.end * 3 * width], bias, head);
                (rows, head, scratch)
            })
            .collect();
        for (rows, head, result) in done {
            result.scatter(&mut out[rows.start * width..rows.end * width], head);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{difference, noise};
    use super::*;

    fn off(heads: usize, d: usize, lengths: &[usize], range: f32) -> f32 {
        let tokens = lengths.iter().sum();
        let qkv = noise(&[tokens, 3 * heads * d], range, 1).unwrap();
        let bias = noise(&[3 * heads * d], 0.5, 2).unwrap();
        let right = composed(&qkv, &bias, heads, lengths).unwrap();
        difference(&attention(&qkv, &bias, heads, lengths).unwrap(), &right).unwrap()
    }

    #[test]
    fn it_equals_softmax_of_products_for_any_length_and_head_size() {
        for (heads, d) in [(12, 32), (2, 64), (4, 8), (3, 5), (1, 1)] {
            let off = off(heads, d, &[1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 64, 65], 2.0);
            assert!(off < 2e-6, "{heads} heads of {d}: {off}");
        }
        assert!(off(2, 32, &[512], 1.0) < 2e-6);
    }

    #[test]
    fn large_scores_do_not_overflow() {
        assert!(off(2, 32, &[9, 40], 60.0) < 1e-3);
    }

    #[test]
    fn a_text_attends_to_its_own_tokens_only() {
        let qkv = noise(&[30, 96], 1.0, 1).unwrap();
        let bias = noise(&[96], 0.5, 2).unwrap();
        let together = attention(&qkv, &bias, 4, &[11, 19]).unwrap();
        let second = qkv.narrow(0, 11, 19).unwrap();
        let alone = attention(&second, &bias, 4, &[19]).unwrap();
        assert_eq!(difference(&together.narrow(0, 11, 19).unwrap(), &alone).unwrap(), 0.0);
    }
}
