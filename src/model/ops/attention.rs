//! The attention sublayer of a block on any device: LayerNorm(attention(x)·O + bias + x), or attention(x)·O + bias.
//! Each text attends to its own tokens. Decides the form in which its weights are kept, and owns them.

use candle_core::{CpuStorage, Error, InplaceOp1, Layout, Result, Tensor, bail};
use sconce_kernels::attention::{Attention, multiply_vector};
use sconce_kernels::{NumberFormat, PositionTerms};

use super::add_norm::Epilogue;
use super::position_terms::relative_vectors;
use super::{host_values, rows_of};

mod composed;

use composed::attention;

/// One attention sublayer.
pub struct SelfAttention {
    weights: Weights,
    heads: usize,
    position_terms: PositionTerms,
    /// The last step, with the bias of O.
    epilogue: Epilogue,
}

enum Weights {
    /// For a CPU, if the given weights are f32; kept in the format [`AttentionWeights::format`].
    Packed(Attention),
    /// `[hidden, 3·hidden]`, `[3·hidden]`, `[hidden, hidden]`, and the vectors of relative positions if attention is
    /// disentangled.
    Plain { qkv: Tensor, qkv_bias: Tensor, out: Tensor, relative: Option<[Tensor; 2]> },
    /// For a GPU with a kernel for these heads. `q_bias` is f32. The bias of the keys is left out, since it changes no
    /// attention weight. The bias of the values is multiplied by O and added to the bias of `epilogue`.
    #[cfg(feature = "cuda")]
    Kernel { qkv: Tensor, q_bias: Tensor, out: Tensor, heads: super::gpu::Heads },
}

/// The weights of one attention sublayer as in the model's file: matrices `[hidden, hidden]`, one row for each output.
pub struct AttentionWeights {
    /// The projections to queries, keys and values, each with its bias.
    pub qkv: [(Tensor, Tensor); 3],
    /// The output projection O.
    pub out: Tensor,
    /// Heads; they divide `hidden`.
    pub heads: usize,
    /// The positional terms: relative bias, rotary embedding, sliding window. If keys are rotated, their bias must be
    /// 0.
    pub position_terms: PositionTerms,
    /// If the matrices are f32 and on a CPU, the format to which they are converted.
    pub format: NumberFormat,
}

impl SelfAttention {
    /// Prepares the weights for the device. `epilogue` has O's bias.
    ///
    /// # Errors
    /// Shapes or types do not match, or the device fails.
    pub fn new(weights: AttentionWeights, mut epilogue: Epilogue) -> Result<Self> {
        let AttentionWeights { qkv: [q, k, v], out, heads, position_terms, format } = weights;
        let matrices = [&q.0, &k.0, &v.0];
        let biases = [&q.1, &k.1, &v.1];
        let weights = if let Some(out) = host_values(&out)? {
            let host = |tensor: &Tensor| tensor.flatten_all()?.to_vec1();
            let [q, k, v] = [host(matrices[0])?, host(matrices[1])?, host(matrices[2])?];
            let (q_bias, v_bias) = (host(biases[0])?, host(biases[2])?);
            epilogue = epilogue.with_added_bias(&multiply_vector(&out, &v_bias))?;
            let packed = Attention::new([q, k, v], q_bias, &out, heads, format);
            Weights::Packed(packed.map_err(Error::msg)?)
        } else {
            #[cfg(feature = "cuda")]
            if position_terms.is_empty()
                && let Some(weights) = kernel_weights(&matrices, &biases, &out, heads)?
            {
                let host =
                    |tensor: &Tensor| tensor.to_dtype(candle_core::DType::F32)?.flatten_all()?.to_vec1();
                let v_bias_after_out = multiply_vector(&host(&out)?, &host(biases[2])?);
                epilogue = epilogue.with_added_bias(&v_bias_after_out)?;
                return Ok(Self { weights, heads, position_terms, epilogue });
            }
            Weights::Plain {
                qkv: Tensor::cat(&matrices, 0)?.t()?.contiguous()?,
                qkv_bias: Tensor::cat(&biases, 0)?,
                relative: relative_tensors(&position_terms, heads, &out)?,
                out: out.t()?.contiguous()?,
            }
        };
        Ok(Self { weights, heads, position_terms, epilogue })
    }

    /// Computes the sublayer on `x` `[tokens, hidden]`, in `x`'s memory. `lengths` are the numbers of tokens of
    /// the texts; their sum is `tokens`.
    ///
    /// # Errors
    /// Shapes or types do not match: a bug of the caller.
    pub fn forward(&self, x: Tensor, lengths: &[usize]) -> Result<Tensor> {
        match &self.weights {
            Weights::Packed(weights) => {
                x.inplace_op1(&Attend {
                    weights,
                    lengths,
                    position_terms: &self.position_terms,
                    epilogue: &self.epilogue,
                })?;
                Ok(x)
            }
            Weights::Plain { qkv, qkv_bias, out, relative } => {
                let qkv = x.matmul(qkv)?.broadcast_add(qkv_bias)?;
                let attended = attention(&qkv, self.heads, lengths, &self.position_terms, relative.as_ref())?;
                self.epilogue.apply(x, &attended.matmul(out)?)
            }
            #[cfg(feature = "cuda")]
            Weights::Kernel { heads, .. } => {
                // Attention reads neither ids nor positions from the plan.
                let unused = vec![0; lengths.iter().sum()];
                let plan = super::gpu::Plan::new(&unused, &unused, lengths, heads.queries_per_warp());
                let words = Tensor::from_slice(&plan.words, plan.words.len(), x.device())?;
                let planned = super::gpu::cuda::Planned { plan, lengths: lengths.to_vec(), words };
                self.forward_planned(x, &planned)
            }
        }
    }

    /// As [`forward`](Self::forward), for a batch whose plan is already on the device.
    ///
    /// # Errors
    /// The driver's error.
    #[cfg(feature = "cuda")]
    pub fn forward_planned(&self, x: Tensor, planned: &super::gpu::cuda::Planned) -> Result<Tensor> {
        let Weights::Kernel { qkv, q_bias, out, heads } = &self.weights else {
            return self.forward(x, &planned.lengths);
        };
        let attended = super::gpu::cuda::attend(&x.matmul(qkv)?, q_bias, *heads, planned)?;
        self.epilogue.apply(x, &attended.matmul(out)?)
    }
}

/// The vectors of relative positions, in the type and on the device of the matrix `out`.
fn relative_tensors(
    position_terms: &PositionTerms,
    heads: usize,
    out: &Tensor,
) -> Result<Option<[Tensor; 2]>> {
    let disentangled = position_terms.disentangled.as_deref();
    disentangled.map(|it| relative_vectors(it, heads, out.dtype(), out.device())).transpose()
}

/// The CPU's kernel, applied to a batch.
struct Attend<'a> {
    weights: &'a Attention,
    lengths: &'a [usize],
    position_terms: &'a PositionTerms,
    epilogue: &'a Epilogue,
}

impl InplaceOp1 for Attend<'_> {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(&self, x: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let hidden = self.weights.hidden();
        let x = rows_of(x, layout, hidden)?;
        let (rows, tokens) = (x.len() / hidden, self.lengths.iter().sum::<usize>());
        if rows != tokens {
            bail!("attention over texts of {tokens} tokens in all got {rows} rows");
        }
        self.weights.attend(x, self.lengths, self.position_terms, self.epilogue.on_host());
        Ok(())
    }
}

/// The weights in the form for the GPU's kernel; none if no kernel fits these heads.
#[cfg(feature = "cuda")]
fn kernel_weights(
    matrices: &[&Tensor; 3],
    biases: &[&Tensor; 3],
    out: &Tensor,
    heads: usize,
) -> Result<Option<Weights>> {
    let (dtype, hidden) = (out.dtype(), out.dim(0)?);
    let heads =
        super::gpu::cuda::heads_with_kernel(dtype, heads, hidden / heads).filter(|_| out.device().is_cuda());
    let Some(heads) = heads else { return Ok(None) };
    Ok(Some(Weights::Kernel {
        qkv: Tensor::cat(matrices, 0)?.t()?.contiguous()?,
        q_bias: biases[0].to_dtype(candle_core::DType::F32)?.contiguous()?,
        out: out.t()?.contiguous()?,
        heads,
    }))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use sconce_kernels::{Disentangled, RelativeBias, Rotary};

    use super::super::testing::{difference, noise, norm_params};
    use super::*;

    fn weights(heads: usize, hidden: usize, range: f32) -> AttentionWeights {
        let projection = |seed| {
            let matrix = noise(&[hidden, hidden], range, seed).unwrap();
            (matrix, noise(&[hidden], 0.5, seed + 10).unwrap())
        };
        let out = noise(&[hidden, hidden], 0.2, 4).unwrap();
        let position_terms = PositionTerms::default();
        AttentionWeights {
            qkv: [projection(1), projection(2), projection(3)],
            out,
            heads,
            position_terms,
            format: NumberFormat::F32,
        }
    }

    fn plain(weights: AttentionWeights, epilogue: Epilogue) -> SelfAttention {
        let AttentionWeights { qkv: [q, k, v], out, heads, position_terms, .. } = weights;
        let qkv = Tensor::cat(&[q.0, k.0, v.0], 0).unwrap().t().unwrap().contiguous().unwrap();
        let qkv_bias = Tensor::cat(&[q.1, k.1, v.1], 0).unwrap();
        let relative = relative_tensors(&position_terms, heads, &out).unwrap();
        let out = out.t().unwrap().contiguous().unwrap();
        SelfAttention {
            weights: Weights::Plain { qkv, qkv_bias, out, relative },
            heads,
            position_terms,
            epilogue,
        }
    }

    /// The largest difference between the results of the CPU's kernel (`Packed`) and of candle's operations.
    fn largest_error(heads: usize, d: usize, lengths: &[usize], range: f32) -> f32 {
        let hidden = heads * d;
        let x = noise(&[lengths.iter().sum(), hidden], 1.0, 7).unwrap();
        let norm = || Epilogue::Norm(norm_params(hidden, 20).unwrap());
        let reference = plain(weights(heads, hidden, range), norm());
        let ours = SelfAttention::new(weights(heads, hidden, range), norm()).unwrap();
        assert!(matches!(ours.weights, Weights::Packed(_)));
        let expected = reference.forward(x.copy().unwrap(), lengths).unwrap();
        difference(&ours.forward(x, lengths).unwrap(), &expected).unwrap()
    }

    #[test]
    fn the_kernel_equals_candles_operations_for_any_length_and_head_size() {
        for (heads, d) in [(12, 32), (2, 64), (4, 8), (3, 5), (1, 1)] {
            let error = largest_error(heads, d, &[1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 64, 65], 0.2);
            assert!(error < 2e-5, "{heads} heads of {d}: {error}");
        }
        assert!(largest_error(2, 32, &[512], 0.2) < 1e-5);
    }

    /// Vectors of relative positions for keys without a bias. Far distances share one of 11 vectors.
    fn disentangled(hidden: usize, longest: usize) -> Disentangled {
        let vectors =
            |seed| noise(&[hidden, 11], 0.7, seed).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let last = longest as i64 - 1;
        let by_distance = (-last..=last).map(|distance| (5 - distance.clamp(-5, 5)) as u32).collect();
        Disentangled::new(vectors(31), &vectors(32), vec![0.0; hidden], by_distance)
    }

    #[test]
    fn the_kernel_equals_candles_operations_with_positional_terms() {
        let lengths = [1, 2, 17, 33, 70];
        let bias = RelativeBias::new(4, 70, |head, distance| (head as f32 + 0.3 * distance as f32).sin());
        let cases = [
            PositionTerms { bias: Some(Arc::new(bias)), ..PositionTerms::default() },
            PositionTerms { rotary: Some(Arc::new(Rotary::new(100.0, 8, 70))), ..PositionTerms::default() },
            PositionTerms { window: Some(5), ..PositionTerms::default() },
            PositionTerms { disentangled: Some(Arc::new(disentangled(32, 70))), ..PositionTerms::default() },
        ];
        for position_terms in cases {
            let weights = || {
                let mut weights = weights(4, 32, 0.3);
                // Rotated keys have no bias.
                weights.qkv[1].1 = weights.qkv[1].1.zeros_like().unwrap();
                AttentionWeights { position_terms: position_terms.clone(), ..weights }
            };
            let x = noise(&[lengths.iter().sum(), 32], 1.0, 1).unwrap();
            let bias = || Epilogue::bias(&noise(&[32], 0.5, 9).unwrap()).unwrap();
            for epilogue in [bias, || Epilogue::Norm(norm_params(32, 20).unwrap())] {
                let ours = SelfAttention::new(weights(), epilogue()).unwrap();
                assert!(matches!(ours.weights, Weights::Packed(_)));
                let expected = plain(weights(), epilogue()).forward(x.copy().unwrap(), &lengths).unwrap();
                let error =
                    difference(&ours.forward(x.copy().unwrap(), &lengths).unwrap(), &expected).unwrap();
                assert!(error < 2e-5, "{position_terms:?}: {error}");
            }
        }
    }

    #[test]
    fn lengths_whose_sum_is_not_the_number_of_rows_are_refused() {
        let sublayer =
            SelfAttention::new(weights(4, 32, 0.5), Epilogue::Norm(norm_params(32, 5).unwrap())).unwrap();
        let error = sublayer.forward(noise(&[30, 32], 1.0, 1).unwrap(), &[11, 18]).unwrap_err().to_string();
        assert!(error.contains("texts of 29 tokens") && error.contains("30 rows"), "{error}");
    }
}
