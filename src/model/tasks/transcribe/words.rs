//! Finds when each word was spoken, as openai/whisper does, from the weights with which the decoder's alignment heads
//! attend to the sound of each token. The weights are normalised and smoothed over time. Dynamic time warping finds the
//! monotonic path with the largest sum through them. Pure functions.

use super::rules::{Rules, TIMESTAMP_STEP};
use crate::model::load::vocabulary::TokenTexts;

/// Each weight is smoothed to the median of this many positions.
const MEDIAN: usize = 7;
/// The neighbours of a position on each side.
const SIDE: usize = MEDIAN / 2;
/// The number of medians found at a time, so that the compiler uses vector instructions.
const LANES: usize = 16;
/// Punctuation that belongs to the word after it.
const OPENING: &str = "\"'“¿([{-";
/// Punctuation that belongs to the word before it.
const CLOSING: &str = "\"'.。,，!！?？:：”)]}、";
/// Punctuation that ends a sentence, after which a pause is likely.
const SENTENCE_ENDS: &str = ".。!！?？";
/// The upper bound of the median duration of words, in seconds.
const MAX_MEDIAN_SECONDS: f64 = 0.7;
/// The codes of languages that are written without spaces. Each of their characters counts as a word.
const WITHOUT_SPACES: [&str; 6] = ["zh", "ja", "th", "lo", "my", "yue"];

/// When a token or a word was spoken, in seconds of its window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimeRange {
    /// The beginning.
    pub start: f64,
    /// The end.
    pub end: f64,
}

/// A word of a window.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedWord {
    /// With its punctuation, and with the space before it.
    pub text: String,
    /// When it was spoken.
    pub time: TimeRange,
    /// The number of tokens of text.
    pub tokens: usize,
}

/// When each of `tokens` tokens was spoken, by `weights` `[heads, rows, keys]`: a row for each token, and perhaps one
/// more for what follows the last one. A key is a [`TIMESTAMP_STEP`] of the window; the first key is step `first_step`.
pub fn token_times(
    weights: Vec<f32>,
    rows: usize,
    keys: usize,
    tokens: usize,
    first_step: usize,
) -> Vec<TimeRange> {
    let first_keys = path(&smoothed(weights, rows, keys), keys);
    let second = |key: usize| (first_step + key) as f64 * TIMESTAMP_STEP;
    let end = |token: usize| first_keys.get(token + 1).copied().unwrap_or(keys);
    let time = |token| Some(TimeRange { start: second(*first_keys.get(token)?), end: second(end(token)) });
    (0..tokens).filter_map(time).collect()
}

/// The mean over the heads of `weights` `[heads, rows, keys]`, after each key's weights were brought to the mean 0 and
/// the variance 1 over the rows, and each row was smoothed.
fn smoothed(mut weights: Vec<f32>, rows: usize, keys: usize) -> Vec<f32> {
    let heads = weights.len() / (rows * keys).max(1);
    let mut sum = vec![0.0; rows * keys];
    for head in weights.chunks_exact_mut((rows * keys).max(1)) {
        normalise(head, rows, keys);
        for (row, sum) in head.chunks_exact(keys).zip(sum.chunks_exact_mut(keys)) {
            add_medians(row, sum);
        }
    }
    sum.iter_mut().for_each(|x| *x /= heads as f32);
    sum
}

/// Brings each column of `[rows, keys]` to the mean 0 and the variance 1.
fn normalise(head: &mut [f32], rows: usize, keys: usize) {
    // `scale` is first the sum of the squares, and then 1 divided by the standard deviation.
    let (mut mean, mut scale) = (vec![0.0; keys], vec![0.0; keys]);
    for row in head.chunks_exact(keys) {
        mean.iter_mut().zip(row).for_each(|(mean, x)| *mean += x);
    }
    mean.iter_mut().for_each(|mean| *mean /= rows as f32);
    for row in head.chunks_exact(keys) {
        let columns = scale.iter_mut().zip(row).zip(&mean);
        columns.for_each(|((sum, x), mean)| *sum += (x - mean) * (x - mean));
    }
    // A key to which all tokens attend equally says nothing.
    scale.iter_mut().for_each(|sum| *sum = if *sum > 0.0 { (rows as f32 / *sum).sqrt() } else { 0.0 });
    for row in head.chunks_exact_mut(keys) {
        let columns = row.iter_mut().zip(&mean).zip(&scale);
        columns.for_each(|((x, mean), scale)| *x = (*x - mean) * scale);
    }
}

/// Adds to `sum` the median of each number of `row` and its neighbours. Beyond its ends the row is continued by its
/// mirror image. A row too short for that is added as it is.
fn add_medians(row: &[f32], sum: &mut [f32]) {
    let keys = row.len();
    if keys <= SIDE {
        sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        return;
    }
    let before = (1..=SIDE).rev();
    let after = (1..=SIDE).map(|distance| keys - 1 - distance);
    let mut mirrored: Vec<f32> = before.chain(0..keys).chain(after).map(|key| row[key]).collect();
    mirrored.resize(keys.next_multiple_of(LANES) + 2 * SIDE, 0.0);
    for (first, sum) in (0..keys).step_by(LANES).zip(sum.chunks_mut(LANES)) {
        let neighbours: [[f32; LANES]; MEDIAN] =
            std::array::from_fn(|shift| std::array::from_fn(|lane| mirrored[first + shift + lane]));
        sum.iter_mut().zip(medians(neighbours)).for_each(|(sum, x)| *sum += x);
    }
}

/// The median of each lane, by a network of exchanges without branches.
fn medians(mut x: [[f32; LANES]; MEDIAN]) -> [f32; LANES] {
    for (a, b) in EXCHANGES {
        let (one, other) = (x[a], x[b]);
        x[a] = std::array::from_fn(|lane| if one[lane] < other[lane] { one[lane] } else { other[lane] });
        x[b] = std::array::from_fn(|lane| if one[lane] < other[lane] { other[lane] } else { one[lane] });
    }
    x[SIDE]
}

/// A sorting network for seven numbers: the pairs of places that are compared and exchanged, in order.
#[rustfmt::skip]
const EXCHANGES: [(usize, usize); 16] = [
    (0, 6), (2, 3), (4, 5), (0, 2), (1, 4), (3, 6), (0, 1), (2, 5), (3, 4), (1, 2), (4, 6), (2, 3), (4, 5), (1, 2),
    (3, 4), (5, 6),
];

/// A step of the path to a cell.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// From the row before, at the key before.
    Diagonal,
    /// From the row before, at the same key.
    Up,
    /// From the key before, in the same row.
    Left,
}

/// Finds the monotonic path through `gains` `[rows, keys]`, from the first cell to the last, whose sum is the largest.
/// Returns the first key of the path in each row.
fn path(gains: &[f32], keys: usize) -> Vec<usize> {
    let rows = gains.len() / keys.max(1);
    if rows == 0 {
        return Vec::new();
    }
    let mut steps = vec![Step::Left; gains.len()];
    // The sums of the row before, with a border before the first key.
    let mut above = vec![f64::NEG_INFINITY; keys + 1];
    above[0] = 0.0;
    for (gains, steps) in gains.chunks_exact(keys).zip(steps.chunks_exact_mut(keys)) {
        let mut left = f64::NEG_INFINITY;
        let mut diagonal = above[0];
        above[0] = f64::NEG_INFINITY;
        for (key, (gain, step)) in gains.iter().zip(steps).enumerate() {
            let up = above[key + 1];
            let (best, from) = if diagonal > up && diagonal > left {
                (diagonal, Step::Diagonal)
            } else if up > diagonal && up > left {
                (up, Step::Up)
            } else {
                (left, Step::Left)
            };
            *step = from;
            diagonal = up;
            left = best + f64::from(*gain);
            above[key + 1] = left;
        }
    }
    let mut first = vec![0; rows];
    let (mut row, mut key) = (rows - 1, keys - 1);
    loop {
        first[row] = key;
        match steps[row * keys + key] {
            Step::Diagonal if row > 0 && key > 0 => (row, key) = (row - 1, key - 1),
            Step::Up if row > 0 => row -= 1,
            Step::Left if key > 0 => key -= 1,
            _ if row > 0 => row -= 1,
            _ if key > 0 => key -= 1,
            _ => return first,
        }
    }
}

/// The words of a window's text. `token_times` has a time for each token of text, or is empty: then there are no words.
/// `language` is the code of the text's language; without one, words are separated at spaces.
pub fn timed_words(
    tokens: &[u32],
    token_times: &[TimeRange],
    language: Option<&str>,
    rules: &Rules,
    token_texts: &TokenTexts,
) -> Vec<TimedWord> {
    let has_spaces = language.is_none_or(|code| !WITHOUT_SPACES.contains(&code));
    let text_tokens = tokens.iter().filter(|id| rules.is_text(**id));
    let mut words: Vec<TimedWord> = Vec::new();
    for unit in whole_characters(text_tokens, token_times, token_texts) {
        let trimmed = unit.text.trim();
        let is_punctuation = !trimmed.is_empty() && trimmed.chars().all(|it| it.is_ascii_punctuation());
        match words.last_mut() {
            Some(word) if has_spaces && !unit.text.starts_with(' ') && !is_punctuation => {
                word.append_text(&unit);
                word.time.end = unit.time.end;
            }
            _ => words.push(unit),
        }
    }
    shorten_words_at_pauses(&mut words);
    join_punctuation(words)
}

impl TimedWord {
    /// Appends the text and the tokens of `other`. The time stays as it is.
    fn append_text(&mut self, other: &Self) {
        self.text += &other.text;
        self.tokens += other.tokens;
    }
}

/// The smallest groups of tokens that are whole characters. Bytes at the end that are no whole character go to the last
/// group.
fn whole_characters<'a>(
    text_tokens: impl Iterator<Item = &'a u32>,
    token_times: &[TimeRange],
    token_texts: &TokenTexts,
) -> Vec<TimedWord> {
    let mut units: Vec<TimedWord> = Vec::new();
    // The bytes, the time and the number of tokens of a group that is not complete yet.
    let (mut bytes, mut incomplete): (Vec<u8>, Option<(TimeRange, usize)>) = (Vec::new(), None);
    for (id, token_time) in text_tokens.zip(token_times) {
        bytes.extend_from_slice(token_texts.get(*id));
        let (start, tokens) = match incomplete {
            Some((time, tokens)) => (time.start, tokens + 1),
            None => (token_time.start, 1),
        };
        let time = TimeRange { start, end: token_time.end };
        match std::str::from_utf8(&bytes) {
            Ok(text) => {
                units.push(TimedWord { text: text.to_owned(), time, tokens });
                bytes.clear();
                incomplete = None;
            }
            Err(_) => incomplete = Some((time, tokens)),
        }
    }
    if let (Some((time, tokens)), Some(last)) = (incomplete, units.last_mut()) {
        last.text += &String::from_utf8_lossy(&bytes);
        last.tokens += tokens;
        last.time.end = time.end;
    }
    units
}

/// Shortens what the path spreads over the pause after a sentence: the mark that ends the sentence, which is an item of its
/// own here, or the word after that mark. Either gets at most twice the median duration.
fn shorten_words_at_pauses(words: &mut [TimedWord]) {
    let mut durations: Vec<f64> =
        words.iter().map(|it| it.time.end - it.time.start).filter(|it| *it > 0.0).collect();
    durations.sort_by(f64::total_cmp);
    let Some(median) = durations.get(durations.len() / 2) else { return };
    let max_seconds = 2.0 * median.min(MAX_MEDIAN_SECONDS);
    let ends_sentence = |word: &TimedWord| {
        let text = word.text.trim();
        !text.is_empty() && text.chars().all(|it| SENTENCE_ENDS.contains(it))
    };
    for index in 1..words.len() {
        let TimeRange { start, end } = words[index].time;
        if end - start <= max_seconds {
            continue;
        }
        if ends_sentence(&words[index]) {
            words[index].time.end = start + max_seconds;
        } else if ends_sentence(&words[index - 1]) {
            words[index].time.start = end - max_seconds;
        }
    }
}

/// Joins punctuation to its word. The word keeps its own time.
fn join_punctuation(words: Vec<TimedWord>) -> Vec<TimedWord> {
    let has_only = |text: &str, marks: &str| !text.is_empty() && text.chars().all(|it| marks.contains(it));
    let mut joined: Vec<TimedWord> = Vec::new();
    for word in words {
        match joined.last_mut() {
            Some(last) if has_only(&word.text, CLOSING) && !last.text.ends_with(' ') => {
                last.append_text(&word);
            }
            Some(last) if last.text.starts_with(' ') && has_only(last.text.trim_start(), OPENING) => {
                last.append_text(&word);
                last.time = word.time;
            }
            _ => joined.push(word),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> Rules {
        Rules { end: 90, first_time: 100, ..Rules::default() }
    }

    /// Times of a tenth of a second for each token.
    fn tenths(count: usize) -> Vec<TimeRange> {
        let tenths = |index: usize| index as f64 / 10.0;
        (0..count).map(|index| TimeRange { start: tenths(index), end: tenths(index + 1) }).collect()
    }

    /// The words of tokens that are numbered from 0 on, with their times in tenths of a second.
    fn found(texts: &[&[u8]], language: Option<&str>) -> Vec<(String, i64, i64)> {
        let tokens: Vec<u32> = (0..texts.len() as u32).collect();
        let texts = TokenTexts::of(texts);
        let words = timed_words(&tokens, &tenths(tokens.len()), language, &rules(), &texts);
        let tenth = |second: f64| (second * 10.0).round() as i64;
        words.into_iter().map(|it| (it.text, tenth(it.time.start), tenth(it.time.end))).collect()
    }

    #[test]
    fn the_path_is_the_monotonic_one_with_the_largest_sum() {
        // Each row prefers later keys than the one before.
        let mut gains = vec![-1.0; 4 * 12];
        for (row, keys) in [0..3, 3..4, 4..9, 9..12].into_iter().enumerate() {
            keys.for_each(|key| gains[row * 12 + key] = 1.0);
        }
        assert_eq!(path(&gains, 12), [0, 3, 4, 9]);
        assert_eq!(path(&[1.0; 3], 1), [0, 0, 0], "more rows than keys");
        assert_eq!(path(&[1.0; 3], 3), [0]);
        assert!(path(&[], 5).is_empty());
    }

    #[test]
    fn the_median_of_seven_is_their_fourth() {
        let mut state = 1_u32;
        for _ in 0..500 {
            let x: [f32; MEDIAN] = std::array::from_fn(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 28) as f32
            });
            let mut sorted = x;
            sorted.sort_by(f32::total_cmp);
            assert_eq!(medians(x.map(|x| [x; LANES])), [sorted[SIDE]; LANES], "{x:?}");
        }
    }

    #[test]
    fn a_row_goes_on_at_its_ends_as_in_a_mirror() {
        let mut sum = vec![0.0; 5];
        add_medians(&[5.0, 1.0, 2.0, 3.0, 4.0], &mut sum);
        // 3 2 1 [5 1 2 3 4] 3 2 1
        assert_eq!(sum, [2.0, 2.0, 3.0, 3.0, 2.0]);
        let mut short = vec![1.0; 3];
        add_medians(&[1.0, 2.0, 3.0], &mut short);
        assert_eq!(short, [2.0, 3.0, 4.0]);
    }

    #[test]
    fn a_token_is_said_from_its_own_key_to_that_of_the_next() {
        // One head whose rows look at ten keys each.
        let mut weights = vec![0.01; 4 * 40];
        for row in 0..4 {
            weights[row * 40 + 10 * row..][..10].fill(1.0);
        }
        let times = token_times(weights, 4, 40, 3, 100);
        let steps: Vec<(i64, i64)> = times
            .iter()
            .map(|it| ((it.start * 50.0).round() as i64, (it.end * 50.0).round() as i64))
            .collect();
        assert_eq!(steps, [(100, 110), (110, 120), (120, 130)]);
    }

    #[test]
    fn a_word_begins_with_a_space_and_has_its_punctuation() {
        let texts: [&[u8]; 8] =
            [b" \xe2\x80\x9c", b"He", b"llo", b",", b" wor", b"ld", b".", b"\xe2\x80\x9d"];
        let expected = [(" \u{201c}Hello,", 0, 3), (" world.\u{201d}", 4, 6)];
        assert_eq!(found(&texts, None), expected.map(|(text, start, end)| (text.to_owned(), start, end)));
    }

    #[test]
    fn in_languages_without_spaces_each_character_is_a_word() {
        // The second character is in two tokens.
        let texts: [&[u8]; 4] = ["你".as_bytes(), b"\xe5\xa5", b"\xbd", "。".as_bytes()];
        let expected = [("你", 0, 1), ("好。", 1, 3)];
        let expected = expected.map(|(text, start, end)| (text.to_owned(), start, end));
        assert_eq!(found(&texts, Some("zh")), expected);
        assert_eq!(found(&[b" a", b"\xe5"], None), [(" a\u{fffd}".to_owned(), 0, 2)]);
    }

    #[test]
    fn a_word_is_not_spread_over_the_pause_after_a_sentence() {
        let word = |text: &str, start: f64, end: f64| TimedWord {
            text: text.to_owned(),
            time: TimeRange { start, end },
            tokens: 1,
        };
        let mut words = [
            word(" a", 0.0, 0.5),
            word(".", 0.5, 4.0),
            word(" b", 4.0, 9.0),
            word(" c", 9.0, 9.5),
            word(" d", 9.5, 15.0),
            word(" e", 15.0, 15.5),
        ];
        shorten_words_at_pauses(&mut words);
        let times = words.map(|it| (it.time.start, it.time.end));
        // Twice 0.7 s at most; only beside the end of a sentence.
        assert_eq!(times, [(0.0, 0.5), (0.5, 1.9), (7.6, 9.0), (9.0, 9.5), (9.5, 15.0), (15.0, 15.5)]);
    }
}
