//! Attention by candle's operations, for any device and number format; the reference for the kernels. Decides which
//! texts are computed together, padded to the longest of them: those of similar lengths, so that there is little
//! padding.

use candle_core::{D, DType, Result, Tensor, bail};
use sconce_kernels::{PositionTerms, positions_in_texts};

use super::super::position_terms::{relative_scores, rotated, score_terms};

/// The largest number of scores of a head that are computed at once (16 MiB in f32). A single text may have more, since
/// a text is never split.
const MAX_SCORES: usize = 1 << 22;
/// Less than one row in 20 is padding.
const ROWS_PER_PADDING: usize = 20;

/// softmax(Q·Kᵀ/√d)·V for each text and head. `qkv` is `[tokens, 3·heads·d]`: Q, K and V side by side. `lengths` are
/// the numbers of tokens of the texts; their sum is `tokens`. `relative` are the vectors of relative positions, if
/// attention is disentangled. Returns `[tokens, heads·d]`.
///
/// # Errors
/// Shapes or types do not match: a bug of the caller.
pub fn attention(
    qkv: &Tensor,
    heads: usize,
    lengths: &[usize],
    position_terms: &PositionTerms,
    relative: Option<&[Tensor; 2]>,
) -> Result<Tensor> {
    let (tokens, width) = qkv.dims2()?;
    let tokens_of_texts: usize = lengths.iter().sum();
    if tokens_of_texts != tokens || tokens == 0 {
        bail!("attention over texts of {tokens_of_texts} tokens in all got {tokens} rows");
    }
    let rotated_qkv = position_terms.rotary.as_ref().map(|rotary| {
        let parts = qkv.reshape((tokens, 3 * heads, width / 3 / heads))?;
        let (qk, values) = (parts.narrow(1, 0, 2 * heads)?, parts.narrow(1, 2 * heads, heads)?);
        let qk = rotated(rotary, &qk, &positions_in_texts(lengths))?;
        Tensor::cat(&[qk, values], 1)?.reshape((tokens, width))
    });
    let rotated_qkv = rotated_qkv.transpose()?;
    let qkv = rotated_qkv.as_ref().unwrap_or(qkv);
    // The row of each token among the padded rows of all groups.
    let mut rows = vec![0u32; tokens];
    let mut padded = 0;
    let mut attended = Vec::new();
    for group in groups(lengths) {
        for (text, start) in group.starts.iter().enumerate() {
            for token in 0..group.lengths[text] {
                rows[start + token] = (padded + text * group.longest + token) as u32;
            }
        }
        padded += group.starts.len() * group.longest;
        attended.push(group.attend(qkv, heads, position_terms, relative)?);
    }
    Tensor::cat(&attended, 0)?.index_select(&Tensor::from_vec(rows, tokens, qkv.device())?, 0)
}

/// Texts of similar lengths.
#[derive(Debug, PartialEq)]
struct Group {
    /// The first row of each text in the batch.
    starts: Vec<usize>,
    lengths: Vec<usize>,
    /// The sum of the lengths.
    tokens: usize,
    /// The largest length.
    longest: usize,
}

impl Group {
    /// Whether a text of this length may join. It must not be shorter than the texts of the group.
    fn has_room_for(&self, length: usize) -> bool {
        let rows = (self.starts.len() + 1) * length;
        ROWS_PER_PADDING * (rows - self.tokens - length) < rows && rows * length <= MAX_SCORES
    }
}

/// Sorts the texts by length, and groups those of similar lengths.
fn groups(lengths: &[usize]) -> Vec<Group> {
    let starts = lengths.iter().scan(0, |start, n| Some(std::mem::replace(start, *start + n)));
    let mut texts: Vec<(usize, usize)> =
        lengths.iter().copied().zip(starts).filter(|(n, _)| *n > 0).collect();
    texts.sort_unstable();
    let mut groups: Vec<Group> = Vec::new();
    for (n, start) in texts {
        match groups.last_mut().filter(|group| group.has_room_for(n)) {
            Some(group) => {
                group.starts.push(start);
                group.lengths.push(n);
                group.tokens += n;
                group.longest = n;
            }
            None => groups.push(Group { starts: vec![start], lengths: vec![n], tokens: n, longest: n }),
        }
    }
    groups
}

impl Group {
    /// Computes the attention of these texts, padded to the longest of them. Returns `[texts·longest, heads·d]`.
    fn attend(
        &self,
        qkv: &Tensor,
        heads: usize,
        position_terms: &PositionTerms,
        relative: Option<&[Tensor; 2]>,
    ) -> Result<Tensor> {
        let (texts, n, device) = (self.starts.len(), self.longest, qkv.device());
        let mut rows = Vec::with_capacity(texts * n);
        let mut mask = Vec::with_capacity(texts * n);
        for (start, length) in self.starts.iter().zip(&self.lengths) {
            rows.extend((0..n).map(|token| (start + token.min(length - 1)) as u32));
            mask.extend((0..n).map(|token| if token < *length { 0.0 } else { f32::NEG_INFINITY }));
        }
        let qkv = qkv.index_select(&Tensor::from_vec(rows, texts * n, device)?, 0)?;
        let d = qkv.dim(1)? / 3 / heads;
        let qkv = qkv.reshape((texts, n, 3, heads, d))?.permute((2, 0, 3, 1, 4))?;
        let part = |index| qkv.get(index)?.contiguous();
        // Queries are scaled before the product, and scores are f32: 16 bits have too little range and too few
        // digits.
        let (queries, keys) = ((part(0)? / (d as f64).sqrt())?, part(1)?);
        let mut scores = queries.matmul(&keys.t()?)?.to_dtype(DType::F32)?;
        if let (Some(disentangled), Some(vectors)) = (&position_terms.disentangled, relative) {
            let terms = relative_scores(disentangled, vectors, &queries, &keys)?;
            scores = (scores + terms.to_dtype(DType::F32)?)?;
        }
        let mut scores = scores.broadcast_add(&Tensor::from_vec(mask, (texts, 1, 1, n), device)?)?;
        if position_terms.bias.is_some() || position_terms.window.is_some() {
            scores = scores.broadcast_add(&score_terms(position_terms, heads, n, device)?)?;
        }
        let weights = candle_nn::ops::softmax(&scores, D::Minus1)?.to_dtype(qkv.dtype())?;
        weights.matmul(&part(2)?)?.transpose(1, 2)?.reshape((texts * n, heads * d))
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{difference, noise};
    use super::*;

    /// The formula, applied to one text after the other.
    fn one_by_one(qkv: &Tensor, heads: usize, lengths: &[usize]) -> Result<Tensor> {
        let d = qkv.dim(1)? / 3 / heads;
        let mut start = 0;
        let mut texts = Vec::new();
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

    #[test]
    fn grouped_texts_have_the_results_of_single_texts() {
        let lengths = [5, 1, 40, 6, 31, 38, 7, 1, 300];
        let qkv = noise(&[lengths.iter().sum(), 3 * 24], 2.0, 1).unwrap();
        let expected = one_by_one(&qkv, 3, &lengths).unwrap();
        let error =
            difference(&attention(&qkv, 3, &lengths, &PositionTerms::default(), None).unwrap(), &expected)
                .unwrap();
        assert!(error < 2e-6, "{error}");
    }

    #[test]
    fn groups_have_similar_lengths_and_are_bounded() {
        let lengths = [40, 8, 10, 11, 42, 42, 45];
        let sizes: Vec<_> = groups(&lengths).into_iter().map(|group| (group.lengths, group.starts)).collect();
        let pair = (vec![10, 11], vec![48, 58]);
        assert_eq!(
            sizes,
            [(vec![8], vec![40]), pair, (vec![40, 42, 42], vec![0, 69, 111]), (vec![45], vec![153])]
        );
        for group in groups(&[512; 200]) {
            assert!(group.starts.len() <= 16, "{} texts of 512 tokens", group.starts.len());
        }
    }
}
