//! Launches of `choice.cu`.

use super::{Argument, Launch, Matrix, Pointer, Source, Words};

/// Threads of a block, which computes a row.
const THREADS: u32 = 512;
/// What the kernel writes if there is no token to choose.
const NO_TOKEN: u32 = u32::MAX;

/// How the next token of a sequence is chosen. The numbers are those of `Sampling` in `model::sequences`.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// Multiplies the logits; 0 takes the likeliest token.
    pub inverse_temperature: f32,
    /// Draws only from this many of the likeliest tokens; 0 means all.
    pub top_k: usize,
    /// Draws only from the likeliest tokens that together have this probability.
    pub top_p: f32,
    /// Draws only from tokens with at least this share of the likeliest token's probability.
    pub min_p: f32,
    /// The random number.
    pub uniform: f64,
    /// The tokens that occurred, and how often each was generated.
    pub counts: Vec<[u32; 2]>,
    /// Subtracted for each time a token was generated.
    pub frequency_penalty: f32,
    /// Subtracted if a token was generated.
    pub presence_penalty: f32,
    /// Divides positive logits of tokens that occurred, and multiplies negative ones.
    pub repetition_penalty: f32,
}

/// The draws of a step: indices in its words.
#[derive(Clone, Copy, Debug)]
pub struct Draws {
    first_draw: usize,
    first_count: usize,
    /// The number of draws.
    pub count: usize,
}

impl Draws {
    /// Appends draws to `words`, each with its row of the logits.
    pub fn new(words: &mut Words, draws: &[(usize, Draw)]) -> Self {
        let mut counts_so_far = 0;
        let first_draw = words.append(draws.iter().flat_map(|(row, draw)| {
            let first_count = counts_so_far;
            counts_so_far += draw.counts.len();
            let uniform = draw.uniform.to_bits();
            [
                *row as u32,
                draw.inverse_temperature.to_bits(),
                draw.top_k as u32,
                draw.top_p.to_bits(),
                draw.min_p.to_bits(),
                uniform as u32,
                (uniform >> 32) as u32,
                first_count as u32,
                draw.counts.len() as u32,
                draw.frequency_penalty.to_bits(),
                draw.presence_penalty.to_bits(),
                draw.repetition_penalty.to_bits(),
            ]
        }));
        let counts = draws.iter().flat_map(|(_, draw)| draw.counts.iter().flatten().copied());
        Self { first_draw, first_count: words.append(counts), count: draws.len() }
    }
}

/// `chosen` ← the tokens of `draws`. `logits` `[_, vocabulary]` are divided by `divisor`, and then bounded by `cap` if there
/// is one. `scratch` has room for `[draws, vocabulary]` in f32. `words` is the address of the step's [`Words`].
pub fn choose(
    [chosen, scratch, words]: [Pointer; 3],
    logits: Matrix,
    (divisor, cap): (f32, Option<f32>),
    draws: Draws,
) -> Launch {
    let address = |first_word: usize| Argument::Pointer(words + (first_word * size_of::<u32>()) as Pointer);
    Launch {
        source: Source::Choice,
        kernel: format!("choose_{}", logits.element_type.name()),
        grid: [draws.count as u32, 1, 1],
        threads: THREADS,
        shared_bytes: 0,
        arguments: vec![
            Argument::Pointer(chosen),
            Argument::Pointer(scratch),
            Argument::Pointer(logits.address),
            address(draws.first_draw),
            address(draws.first_count),
            Argument::F32(divisor),
            Argument::F32(cap.unwrap_or(0.0)),
            Argument::U32(logits.width),
        ],
    }
}

/// The token that the kernel wrote; none if a logit was NaN or infinite.
pub fn chosen_token(written: u32) -> Option<u32> {
    (written != NO_TOKEN).then_some(written)
}
