//! The feed-forward sublayer of a transformer block. Its last product is
//!
//! - without a gate: (activation(x·U + bias))·D
//! - with a gate G: (activation(x·U) * (x·G))·D
//!
//! An [`Epilogue`] adds the bias of D to this product. With a norm, it also adds x, and then norms the sum. Decides the
//! layout of its weights, and owns them. Computes in blocks of rows, so that the intermediate numbers stay in a near
//! cache.

use std::cell::RefCell;

use super::activation::{Activation, activate};
use super::add_norm::Epilogue;
use super::gemm::{Linear, NotWholeGroups, NumberFormat, Panels, RUN, Rows, by_blocks};

/// One feed-forward sublayer.
pub struct FeedForward {
    weights: Weights,
    activation: Activation,
}

enum Weights {
    /// In f32. The bias is padded with zeros to a multiple of [`RUN`].
    F32 { up: Panels, up_bias: Vec<f32>, gate: Option<Panels>, down: Panels },
    /// In any other number format.
    Narrow { up: Linear, up_bias: Vec<f32>, gate: Option<Linear>, down: Linear },
}

/// The weights as in the model's file, with one row for each output.
pub struct FeedForwardWeights<'a> {
    /// U `[inner, hidden]`.
    pub up: &'a [f32],
    /// U's bias `[inner]`.
    pub up_bias: Vec<f32>,
    /// The gate G `[inner, hidden]`. If there is one, U's bias must be 0.
    pub gate: Option<&'a [f32]>,
    /// D `[hidden, inner]`.
    pub down: &'a [f32],
    /// The format in which the matrices are kept.
    pub format: NumberFormat,
}

impl FeedForward {
    /// Packs the weights.
    ///
    /// # Errors
    /// The length of a row is not a multiple of the group size of `format`.
    pub fn new(weights: FeedForwardWeights<'_>, activation: Activation) -> Result<Self, NotWholeGroups> {
        let FeedForwardWeights { up, mut up_bias, gate, down, format } = weights;
        let (hidden, inner) = (up.len() / up_bias.len(), up_bias.len());
        let weights = if format == NumberFormat::F32 {
            up_bias.resize(inner.next_multiple_of(RUN), 0.0);
            let gate = gate.map(|gate| Panels::new(gate, hidden));
            let (up, down) = (Panels::new(up, hidden), Panels::new(down, inner));
            Weights::F32 { up, up_bias, gate, down }
        } else {
            let gate = gate.map(|gate| Linear::new(gate, hidden, format)).transpose()?;
            let (up, down) = (Linear::new(up, hidden, format)?, Linear::new(down, inner, format)?);
            Weights::Narrow { up, up_bias, gate, down }
        };
        Ok(Self { weights, activation })
    }

    /// The width of a row of `x`.
    pub fn hidden(&self) -> usize {
        match &self.weights {
            Weights::F32 { up, .. } => up.depth(),
            Weights::Narrow { up, .. } => up.depth(),
        }
    }

    /// Computes the sublayer in place on `x` `[rows, hidden]`, and ends with `epilogue`. In parallel if there are several
    /// threads.
    pub fn forward(&self, x: &mut [f32], epilogue: Epilogue<'_>) {
        by_blocks(x, self.hidden(), |_, x| self.forward_block(x, epilogue));
    }

    /// As [`forward`](Self::forward), on this thread, for a block of rows that fits into a near cache.
    pub(crate) fn forward_block(&self, x: &mut [f32], epilogue: Epilogue<'_>) {
        let activation = self.activation;
        match &self.weights {
            Weights::F32 { up, up_bias, gate, down } => {
                F32Layer { up, up_bias, gate: gate.as_ref(), down, activation }.forward(x, epilogue);
            }
            Weights::Narrow { up, up_bias, gate, down } => {
                NarrowLayer { up, up_bias, gate: gate.as_ref(), down, activation }.forward(x, epilogue);
            }
        }
    }
}

struct F32Layer<'a> {
    up: &'a Panels,
    up_bias: &'a [f32],
    gate: Option<&'a Panels>,
    down: &'a Panels,
    activation: Activation,
}

/// The buffers of one block of rows.
#[derive(Default)]
struct Scratch {
    rows: Rows,
    inner: Rows,
    gate: Rows,
    out: Vec<f32>,
}

thread_local! {
    /// Reused by the next block: new memory costs a page fault every 4 KiB.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl F32Layer<'_> {
    fn forward(&self, x: &mut [f32], epilogue: Epilogue<'_>) {
        let hidden = self.up.depth();
        let mut scratch = SCRATCH.take();
        scratch.out.resize(x.len(), 0.0);
        scratch.rows.pack(x, hidden);
        scratch.rows.multiply_activated(self.up, self.up_bias, self.activation, &mut scratch.inner);
        if let Some(gate) = self.gate {
            // A gate has no bias, so it gets U's, which is 0 if there is a gate.
            scratch.rows.multiply_activated(gate, self.up_bias, Activation::Identity, &mut scratch.gate);
            scratch.inner.gate(&scratch.gate);
        }
        scratch.inner.multiply(0, self.down, &mut scratch.out, hidden);
        epilogue.apply(x, &scratch.out);
        SCRATCH.set(scratch);
    }
}

struct NarrowLayer<'a> {
    up: &'a Linear,
    up_bias: &'a [f32],
    gate: Option<&'a Linear>,
    down: &'a Linear,
    activation: Activation,
}

thread_local! {
    /// As `SCRATCH`: the intermediate numbers, those of the gate, and the result.
    static NARROW_SCRATCH: RefCell<[Vec<f32>; 3]> = RefCell::default();
}

impl NarrowLayer<'_> {
    fn forward(&self, x: &mut [f32], epilogue: Epilogue<'_>) {
        let (hidden, width) = (self.up.depth(), self.up.width());
        let [mut inner, mut gates, mut out] = NARROW_SCRATCH.take();
        let count = x.len() / hidden * width;
        inner.resize(count, 0.0);
        self.up.multiply_single_threaded(x, &mut inner);
        activate(&mut inner, self.up_bias, self.activation);
        if let Some(gate) = self.gate {
            gates.resize(count, 0.0);
            gate.multiply_single_threaded(x, &mut gates);
            inner.iter_mut().zip(&gates).for_each(|(x, gate)| *x *= gate);
        }
        out.resize(x.len(), 0.0);
        self.down.multiply_single_threaded(&inner, &mut out);
        epilogue.apply(x, &out);
        NARROW_SCRATCH.set([inner, gates, out]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{difference, linear, noise, on_every_cpu, to_f64};
    use super::*;

    #[test]
    fn it_equals_its_formula_on_every_cpu() {
        on_every_cpu(|| {
            for (rows, hidden, inner) in [(1, 32, 64), (50, 24, 40), (131, 96, 384)] {
                for format in [NumberFormat::F32, NumberFormat::Bf16] {
                    equals_its_formula([rows, hidden, inner], format);
                }
            }
        });
    }

    fn equals_its_formula([rows, hidden, inner]: [usize; 3], format: NumberFormat) {
        let (up, down) = (noise(&[inner, hidden], 0.1, 1), noise(&[hidden, inner], 0.1, 2));
        let (gate, bias) = (noise(&[inner, hidden], 0.1, 8), noise(&[hidden], 0.5, 9));
        let given = noise(&[rows, hidden], 1.0, 7);
        for gate in [None, Some(&gate)] {
            let up_bias = if gate.is_some() { vec![0.0; inner] } else { noise(&[inner], 0.5, 6) };
            let mut inner_values = linear(&to_f64(&given), &up, &up_bias);
            inner_values.iter_mut().for_each(|x| *x /= 1.0 + (-*x).exp());
            if let Some(gate) = gate {
                let gates = linear(&to_f64(&given), gate, &vec![0.0; inner]);
                inner_values.iter_mut().zip(gates).for_each(|(x, gate)| *x *= gate);
            }
            let expected = linear(&inner_values, &down, &bias);
            let gate = gate.map(Vec::as_slice);
            let weights = FeedForwardWeights { up: &up, up_bias, gate, down: &down, format };
            let sublayer = FeedForward::new(weights, Activation::Silu).unwrap();
            assert_eq!(sublayer.hidden(), hidden);
            let mut x = given.clone();
            sublayer.forward(&mut x, Epilogue::Bias(&bias));
            let tolerance = if format == NumberFormat::F32 { 2e-5 } else { 2e-2 };
            let error = difference(&x, &expected);
            assert!(
                error < tolerance,
                "{rows}×{hidden}×{inner} {format:?}, gate: {}: {error}",
                gate.is_some()
            );
        }
    }
}
