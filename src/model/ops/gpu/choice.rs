//! Launches of `choice.cu`.

use super::{Argument, Launch, Matrix, Pointer, Source, Words};

/// Threads of a block, which computes a row.
const THREADS: u32 = 512;
/// What the kernel writes if there is no token to choose, or to list.
const NO_TOKEN: u32 = u32::MAX;
/// The mask of a draw that may choose any token.
const NO_MASK: u32 = u32::MAX;

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
    /// How many of the likeliest tokens are listed with their probabilities, beside that of the chosen one. None if no
    /// probability is wanted.
    pub logprobs: Option<usize>,
    /// Whether a mask of bits says which tokens may be chosen.
    pub is_masked: bool,
}

/// The draws of a step: indices in its words.
#[derive(Clone, Copy, Debug)]
pub struct Draws {
    first_draw: usize,
    first_count: usize,
    /// The number of draws.
    pub count: usize,
    /// The words of a draw's result.
    result_words: usize,
}

/// The result of a draw.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The token. None if a logit was NaN or infinite, or if no token may be chosen.
    pub id: Option<u32>,
    /// The logarithm of its probability. 0 if no probability is wanted.
    pub logprob: f32,
    /// The likeliest tokens, with the logarithms of their probabilities.
    pub top: Vec<(u32, f32)>,
}

impl Draws {
    /// Appends draws to `words`, each with its row of the logits.
    pub fn new(words: &mut Words, draws: &[(usize, Draw)]) -> Self {
        let (mut counts_so_far, mut masks) = (0, 0..NO_MASK);
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
                draw.logprobs.map_or(0, |count| 1 + count as u32),
                if draw.is_masked { masks.next().unwrap_or(NO_MASK) } else { NO_MASK },
            ]
        }));
        let counts = draws.iter().flat_map(|(_, draw)| draw.counts.iter().flatten().copied());
        let listed = draws.iter().filter_map(|(_, draw)| draw.logprobs).max();
        Self {
            first_draw,
            first_count: words.append(counts),
            count: draws.len(),
            result_words: listed.map_or(1, |count| 2 + 2 * count),
        }
    }

    /// The number of words of all results.
    pub fn words_of_results(self) -> usize {
        self.count * self.result_words
    }

    /// The results of `draws` that the kernel has written.
    pub fn results(self, written: &[u32], draws: &[(usize, Draw)]) -> Vec<Drawn> {
        let result = |(words, (_, draw)): (&[u32], &(usize, Draw))| {
            let top = words.get(2..).unwrap_or_default().as_chunks().0.iter();
            let listed = top.take(draw.logprobs.unwrap_or_default()).filter(|[id, _]| *id != NO_TOKEN);
            Drawn {
                id: Some(words[0]).filter(|id| *id != NO_TOKEN),
                logprob: draw.logprobs.map_or(0.0, |_| f32::from_bits(words[1])),
                top: listed.map(|[id, logprob]| (*id, f32::from_bits(*logprob))).collect(),
            }
        };
        written.chunks_exact(self.result_words).zip(draws).map(result).collect()
    }
}

/// `results` ← the results of `draws`, of [`Draws::words_of_results`] words. `logits` `[_, vocabulary]` are divided by `divisor`, and then bounded by `cap` if there
/// is one. `scratch` has room for `[draws, vocabulary]` in f32. `words` is the address of the step's [`Words`]. `masks` has a
/// bit for each token, in whole words, for each draw with a mask; it may be 0 if there is none.
pub fn choose(
    [results, scratch, words, masks]: [Pointer; 4],
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
            Argument::Pointer(results),
            Argument::Pointer(scratch),
            Argument::Pointer(logits.address),
            address(draws.first_draw),
            address(draws.first_count),
            Argument::Pointer(masks),
            Argument::F32(divisor),
            Argument::F32(cap.unwrap_or(0.0)),
            Argument::U32(logits.width),
            Argument::U32(draws.result_words as u32),
        ],
    }
}
