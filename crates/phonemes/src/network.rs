//! Reads words that no dictionary has: a transformer over letters, of four layers, which names up to four phonemes for
//! each letter. Repeated phonemes are merged, and phoneme 0 is the blank, as in CTC. Decides how the weights are used;
//! owns them.

use std::collections::HashMap;

use safetensors::{Dtype, SafeTensors};
use sconce_kernels::{Activation, Panels, activate, exponentials, layer_norm, multiply_rows};
use serde::Deserialize;

use crate::Error;

/// Number of attention heads. The weights do not tell it.
const HEADS: usize = 4;
/// Added to the variance of each norm.
const EPS: f32 = 1e-5;

/// The alphabets of a network, `oov.json`.
#[derive(Deserialize)]
pub struct Alphabet {
    r#in: Vec<char>,
    out: Vec<char>,
    /// Maximum number of phonemes of a letter.
    slots: usize,
    /// Maximum number of letters of a word.
    maxlen: usize,
}

struct Linear {
    weight: Panels,
    bias: Vec<f32>,
}

struct Norm {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

struct Layer {
    norms: [Norm; 2],
    /// To queries, keys and values.
    inputs: Linear,
    output: Linear,
    inner: Linear,
    outer: Linear,
}

pub struct Network {
    letters: HashMap<char, usize>,
    phonemes: Vec<char>,
    slots: usize,
    max_letters: usize,
    width: usize,
    embeddings: Vec<f32>,
    positions: Vec<f32>,
    layers: Vec<Layer>,
    norm: Norm,
    head: Linear,
}

/// The tensors of a file.
struct Weights<'a>(SafeTensors<'a>);

impl Weights<'_> {
    fn get(&self, name: &str, count: Option<usize>) -> Result<Vec<f32>, Error> {
        let tensor = self.0.tensor(name).map_err(|error| Error::Network(format!("{name}: {error}")))?;
        let numbers = tensor
            .data()
            .chunks_exact(4)
            .map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]));
        let numbers: Vec<f32> = numbers.collect();
        if tensor.dtype() != Dtype::F32 || count.is_some_and(|count| count != numbers.len()) {
            return Err(Error::Network(format!("{name} is not f32, or its size does not fit")));
        }
        Ok(numbers)
    }

    fn linear(&self, weight: &str, bias: &str, depth: usize) -> Result<Linear, Error> {
        let bias = self.get(bias, None)?;
        Ok(Linear { weight: Panels::new(&self.get(weight, Some(depth * bias.len()))?, depth), bias })
    }

    fn norm(&self, name: &str, width: usize) -> Result<Norm, Error> {
        let [weight, bias] = ["weight", "bias"].map(|part| self.get(&format!("{name}.{part}"), Some(width)));
        Ok(Norm { weight: weight?, bias: bias? })
    }

    fn layer(&self, index: usize, width: usize) -> Result<Layer, Error> {
        let prefix = format!("m.layers.{index}");
        let attention = |weight: &str, bias: &str| {
            self.linear(&format!("{prefix}.self_attn.{weight}"), &format!("{prefix}.self_attn.{bias}"), width)
        };
        let linear = |name: &str, depth| {
            self.linear(&format!("{prefix}.{name}.weight"), &format!("{prefix}.{name}.bias"), depth)
        };
        let inner = linear("linear1", width)?;
        let layer = Layer {
            norms: [
                self.norm(&format!("{prefix}.norm1"), width)?,
                self.norm(&format!("{prefix}.norm2"), width)?,
            ],
            inputs: attention("in_proj_weight", "in_proj_bias")?,
            output: attention("out_proj.weight", "out_proj.bias")?,
            outer: linear("linear2", inner.bias.len())?,
            inner,
        };
        let fits = [&layer.inputs, &layer.output, &layer.outer].map(|linear| linear.bias.len());
        if fits == [3 * width, width, width] {
            Ok(layer)
        } else {
            Err(Error::Network(format!("{prefix} does not fit")))
        }
    }
}

impl Linear {
    /// `rows` times the weights; the bias is not added.
    fn product(&self, rows: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; rows.len() / self.weight.depth() * self.bias.len()];
        multiply_rows(rows, &self.weight, &mut out, |_, _| ());
        out
    }

    fn apply(&self, rows: &[f32]) -> Vec<f32> {
        let mut out = self.product(rows);
        add_to_rows(&mut out, &self.bias);
        out
    }
}

fn add_to_rows(rows: &mut [f32], row: &[f32]) {
    for each in rows.chunks_exact_mut(row.len()) {
        each.iter_mut().zip(row).for_each(|(x, y)| *x += y);
    }
}

impl Norm {
    fn apply(&self, rows: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; rows.len()];
        layer_norm(rows, &self.weight, &self.bias, EPS, &mut out);
        out
    }
}

impl Layer {
    fn apply(&self, x: &mut [f32], width: usize) {
        let mixed = attend(&self.inputs.apply(&self.norms[0].apply(x)), width);
        let sum = |x: &mut [f32], y: Vec<f32>| x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
        sum(x, self.output.apply(&mixed));
        let mut inner = self.inner.product(&self.norms[1].apply(x));
        activate(&mut inner, &self.inner.bias, Activation::Gelu);
        sum(x, self.outer.apply(&inner));
    }
}

/// Attention of each letter over all, from queries, keys and values `[letters, 3 * width]`.
fn attend(inputs: &[f32], width: usize) -> Vec<f32> {
    let (row, size) = (3 * width, width / HEADS);
    let count = inputs.len() / row;
    let mut out = vec![0.0; count * width];
    let mut weights = vec![0.0; count];
    for (letter, out) in out.chunks_exact_mut(width).enumerate() {
        for (head, out) in out.chunks_exact_mut(size).enumerate() {
            let query = &inputs[letter * row + head * size..][..size];
            for (weight, other) in weights.iter_mut().zip(inputs.chunks_exact(row)) {
                let key = &other[width + head * size..][..size];
                *weight = query.iter().zip(key).map(|(q, k)| q * k).sum();
            }
            let sum = exponentials(&mut weights, 1.0 / (size as f32).sqrt());
            for (weight, other) in weights.iter().zip(inputs.chunks_exact(row)) {
                let value = &other[2 * width + head * size..][..size];
                out.iter_mut().zip(value).for_each(|(x, value)| *x += weight / sum * value);
            }
        }
    }
    out
}

impl Network {
    pub fn new(alphabet: Alphabet, file: &[u8]) -> Result<Self, Error> {
        let tensors = SafeTensors::deserialize(file).map_err(|error| Error::Network(error.to_string()))?;
        let weights = Weights(tensors);
        let Alphabet { r#in: letters, out: phonemes, slots, maxlen: max_letters } = alphabet;
        let norm = weights.get("m.norm.weight", None)?;
        let width = norm.len();
        let layers = (0..).take_while(|i| weights.0.tensor(&format!("m.layers.{i}.norm1.weight")).is_ok());
        let network = Self {
            width,
            embeddings: weights.get("m.emb.weight", Some((letters.len() + 1) * width))?,
            positions: weights.get("m.pos", Some(max_letters * width))?,
            layers: layers.map(|index| weights.layer(index, width)).collect::<Result<_, _>>()?,
            norm: weights.norm("m.norm", width)?,
            head: weights.linear("m.head.weight", "m.head.bias", width)?,
            letters: letters.into_iter().zip(1..).collect(),
            phonemes,
            slots,
            max_letters,
        };
        let fits = network.head.bias.len() == slots * (network.phonemes.len() + 1);
        if fits && width.is_multiple_of(HEADS) && slots > 0 {
            Ok(network)
        } else {
            Err(Error::Network("the alphabet does not fit the network".to_owned()))
        }
    }

    /// The letters that the network reads: the known ones of the word, at most `max_letters`.
    fn known_letters<'a>(&'a self, word: &'a str) -> impl Iterator<Item = usize> + 'a {
        word.chars().filter_map(|c| self.letters.get(&c).copied()).take(self.max_letters)
    }

    /// The number of letters of a word that are read. The work is proportional to it.
    pub fn count_letters(&self, word: &str) -> usize {
        self.known_letters(word).count()
    }

    /// The phonemes of a word. Unknown letters, and known ones after the first `max_letters`, are skipped.
    pub fn read(&self, word: &str) -> String {
        let rows =
            self.known_letters(word).flat_map(|letter| &self.embeddings[letter * self.width..][..self.width]);
        let mut x: Vec<f32> = rows.zip(&self.positions).map(|(x, position)| x + position).collect();
        if x.is_empty() {
            return String::new();
        }
        for layer in &self.layers {
            layer.apply(&mut x, self.width);
        }
        let scores = self.head.apply(&self.norm.apply(&x));
        let mut read = String::new();
        let mut before = 0;
        for scores in scores.chunks_exact(scores.len() / (x.len() / self.width) / self.slots) {
            let best = (0..scores.len()).reduce(|best, i| if scores[i] > scores[best] { i } else { best });
            let best = best.unwrap_or(0);
            if best != before && best != 0 {
                read.extend(self.phonemes.get(best - 1));
            }
            before = best;
        }
        read
    }
}
