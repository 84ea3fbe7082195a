//! The feed-forward sublayer of a transformer block. Its last product is
//!
//! - without a gate: (activation(x·U + bias))·D
//! - with a gate G: (activation(x·U) * (x·G))·D
//!
//! An [`End`] adds the bias of D to this product. With a norm, it also adds x, and then norms the sum. Decides the
//! layout of its weights, and owns them. Computes in blocks of rows, so that the intermediate numbers stay in a near
//! cache.

use std::cell::RefCell;

use super::activation::{Activation, activate};
use super::add_norm::End;
use super::gemm::{Matrix, NotWholeGroups, NumberFormat, Panels, RUN, Rows, by_blocks, narrow};

/// One feed-forward sublayer.
pub struct FeedForward {
    weights: Weights,
    activation: Activation,
}

enum Weights {
    /// In f32. The bias is padded with zeros to a multiple of [`RUN`].
    Whole { up: Panels, up_bias: Vec<f32>, gate: Option<Panels>, down: Panels },
    /// In any other number format.
    Narrow { up: Matrix, up_bias: Vec<f32>, gate: Option<Matrix>, down: Matrix },
}

/// The weights as in the model's file, with one row for each output.
pub struct Published<'a> {
    /// U `[inner, hidden]`.
    pub up: &'a [f32],
    /// U's bias `[inner]`.
    pub up_bias: Vec<f32>,
    /// The gate G `[inner, hidden]`. If there is one, U's bias must be 0.
    pub gate: Option<&'a [f32]>,
    /// D `[hidden, inner]`.
    pub down: &'a [f32],
    /// The format in which the matrices are kept.
    pub numbers: NumberFormat,
}

impl FeedForward {
    /// Lays out the weights.
    ///
    /// # Errors
    /// The length of a row is not a multiple of the group size of `numbers`.
    pub fn new(published: Published<'_>, activation: Activation) -> Result<Self, NotWholeGroups> {
        let Published { up, mut up_bias, gate, down, numbers } = published;
        let (hidden, inner) = (up.len() / up_bias.len(), up_bias.len());
        let weights = if numbers == NumberFormat::F32 {
            up_bias.resize(inner.next_multiple_of(RUN), 0.0);
            let gate = gate.map(|gate| Panels::new(gate, hidden));
            let (up, down) = (Panels::new(up, hidden), Panels::new(down, inner));
            Weights::Whole { up, up_bias, gate, down }
        } else {
            let gate = gate.map(|gate| narrow(gate, hidden, numbers)).transpose()?;
            let (up, down) = (narrow(up, hidden, numbers)?, narrow(down, inner, numbers)?);
            Weights::Narrow { up, up_bias, gate, down }
        };
        Ok(Self { weights, activation })
    }

    /// The width of a row of `x`.
    pub fn hidden(&self) -> usize {
        match &self.weights {
            Weights::Whole { up, .. } => up.depth(),
            Weights::Narrow { up, .. } => up.depth(),
        }
    }

    /// Computes the sublayer in place on `x` `[rows, hidden]`, and ends with `end`.
    pub fn forward(&self, x: &mut [f32], end: End<'_>) {
        let activation = self.activation;
        match &self.weights {
            Weights::Whole { up, up_bias, gate, down } => {
                Whole { up, up_bias, gate: gate.as_ref(), down, activation }.forward(x, end);
            }
            Weights::Narrow { up, up_bias, gate, down } => {
                Narrow { up, up_bias, gate: gate.as_ref(), down, activation }.forward(x, end);
            }
        }
    }
}

struct Whole<'a> {
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

impl Whole<'_> {
    fn forward(&self, x: &mut [f32], end: End<'_>) {
        let hidden = self.up.depth();
        by_blocks(x, hidden, |_, x| {
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
            end.rows(x, &scratch.out);
            SCRATCH.set(scratch);
        });
    }
}

struct Narrow<'a> {
    up: &'a Matrix,
    up_bias: &'a [f32],
    gate: Option<&'a Matrix>,
    down: &'a Matrix,
    activation: Activation,
}

thread_local! {
    /// As `SCRATCH`: the intermediate numbers, those of the gate, and the result.
    static NARROW_SCRATCH: RefCell<[Vec<f32>; 3]> = RefCell::default();
}

impl Narrow<'_> {
    fn forward(&self, x: &mut [f32], end: End<'_>) {
        let (hidden, width) = (self.up.depth(), self.up.width());
        by_blocks(x, hidden, |_, x| {
            let [mut inner, mut gates, mut out] = NARROW_SCRATCH.take();
            let count = x.len() / hidden * width;
            inner.resize(count, 0.0);
            self.up.multiply_alone(x, &mut inner);
            activate(&mut inner, self.up_bias, self.activation);
            if let Some(gate) = self.gate {
                gates.resize(count, 0.0);
                gate.multiply_alone(x, &mut gates);
                inner.iter_mut().zip(&gates).for_each(|(x, gate)| *x *= gate);
            }
            out.resize(x.len(), 0.0);
            self.down.multiply_alone(&inner, &mut out);
            end.rows(x, &out);
            NARROW_SCRATCH.set([inner, gates, out]);
        });
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
                for numbers in [NumberFormat::F32, NumberFormat::Bf16] {
                    equals_its_formula([rows, hidden, inner], numbers);
                }
            }
        });
    }

    fn equals_its_formula([rows, hidden, inner]: [usize; 3], numbers: NumberFormat) {
        let (up, down) = (noise(&[inner, hidden], 0.1, 1), noise(&[hidden, inner], 0.1, 2));
        let (gate, bias) = (noise(&[inner, hidden], 0.1, 8), noise(&[hidden], 0.5, 9));
        let given = noise(&[rows, hidden], 1.0, 7);
        for gate in [None, Some(&gate)] {
            let up_bias = if gate.is_some() { vec![0.0; inner] } else { noise(&[inner], 0.5, 6) };
            let mut between = linear(&to_f64(&given), &up, &up_bias);
            between.iter_mut().for_each(|x| *x /= 1.0 + (-*x).exp());
            if let Some(gate) = gate {
                let gates = linear(&to_f64(&given), gate, &vec![0.0; inner]);
                between.iter_mut().zip(gates).for_each(|(x, gate)| *x *= gate);
            }
            let right = linear(&between, &down, &bias);
            let gate = gate.map(Vec::as_slice);
            let published = Published { up: &up, up_bias, gate, down: &down, numbers };
            let sublayer = FeedForward::new(published, Activation::Silu).unwrap();
            assert_eq!(sublayer.hidden(), hidden);
            let mut x = given.clone();
            sublayer.forward(&mut x, End::Bias(&bias));
            let within = if numbers == NumberFormat::F32 { 2e-5 } else { 2e-2 };
            let off = difference(&x, &right);
            assert!(off < within, "{rows}×{hidden}×{inner} {numbers:?}, gate: {}: {off}", gate.is_some());
        }
    }
}
