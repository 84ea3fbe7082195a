//! Makes entities from the probabilities of tokens' labels, as the pipeline `token-classification` of the transformers
//! library does. Decides the label of a word, which neighbours are one entity, and which of two overlapping entities of
//! a text is kept. Pure.

use std::collections::HashSet;
use std::ops::Range;

use super::body::Strategy;

/// A token of a text, but none of the special tokens that the tokenizer adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// Its index among all tokens of its window, special ones included.
    pub index: usize,
    /// Its id.
    pub id: u32,
    /// Its characters in the text as it was sent, `[start, end]`.
    pub span: [u32; 2],
    /// Whether it continues the word of the token before.
    pub continues_word: bool,
}

/// A token or a word, with its label.
#[derive(Clone, Debug, PartialEq)]
pub struct Labelled {
    /// The index of the label.
    pub label: usize,
    /// Its probability.
    pub score: f32,
    /// Its tokens.
    pub tokens: Range<usize>,
}

/// An entity, or a token by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct FoundEntity<'a> {
    /// Its kind; for a token by itself its label.
    pub name: &'a str,
    /// The mean of the probabilities of its parts.
    pub score: f32,
    /// The index of its window.
    pub window: usize,
    /// Its parts among the labelled tokens or words of its window.
    pub parts: Range<usize>,
    /// Its characters in the text as it was sent, `[start, end]`.
    pub span: [u32; 2],
}

/// Whether `strategy` labels words instead of tokens.
pub fn is_by_word(strategy: Strategy) -> bool {
    matches!(strategy, Strategy::First | Strategy::Average | Strategy::Max)
}

/// Labels each token or, by some strategies, each word. `row` returns the probabilities of a token's labels.
pub fn label_parts<'r>(
    tokens: &[Token],
    strategy: Strategy,
    row: impl Fn(&Token) -> &'r [f32],
) -> Vec<Labelled> {
    let mut all: Vec<Labelled> = Vec::new();
    let mut first = 0;
    while first < tokens.len() {
        let rest = tokens[first + 1..].iter();
        let more = rest.take_while(|token| is_by_word(strategy) && token.continues_word).count();
        let range = first..first + 1 + more;
        let rows = || tokens[range.clone()].iter().map(&row);
        let (label, score) = match strategy {
            Strategy::None | Strategy::Simple | Strategy::First => best(row(&tokens[first])),
            // If scores are equal, the first token counts.
            Strategy::Max => rows()
                .map(best)
                .reduce(|found, other| if other.1 > found.1 { other } else { found })
                .unwrap_or_default(),
            Strategy::Average => {
                let mut means = vec![0.0; row(&tokens[first]).len()];
                for row in rows() {
                    means.iter_mut().zip(row).for_each(|(sum, probability)| *sum += probability);
                }
                means.iter_mut().for_each(|sum| *sum /= range.len() as f32);
                best(&means)
            }
        };
        first = range.end;
        all.push(Labelled { label, score, tokens: range });
    }
    all
}

/// The index of the highest probability, of equal ones the first, and the probability.
fn best(probabilities: &[f32]) -> (usize, f32) {
    let mut best = (0, f32::NEG_INFINITY);
    for (label, probability) in probabilities.iter().enumerate() {
        if *probability > best.1 {
            best = (label, *probability);
        }
    }
    best
}

/// Groups the labelled tokens or words of a window into entities, without those whose name is in `ignored`. By the strategy
/// `none` each token stays by itself.
pub fn entities<'a>(
    window: usize,
    tokens: &[Token],
    labelled: &[Labelled],
    names: &'a [String],
    strategy: Strategy,
    ignored: &HashSet<String>,
) -> Vec<FoundEntity<'a>> {
    let mut found = Vec::new();
    let mut first = 0;
    while first < labelled.len() {
        let label = names[labelled[first].label].as_str();
        let continues = |part: &&Labelled| {
            let (begins, kind) = split_label(&names[part.label]);
            !begins && kind == split_label(label).1
        };
        let (name, more) = match strategy {
            Strategy::None => (label, 0),
            _ => (kind_of_group(label), labelled[first + 1..].iter().take_while(continues).count()),
        };
        let parts = first..first + 1 + more;
        first = parts.end;
        if ignored.contains(name) {
            continue;
        }
        let group = &labelled[parts.clone()];
        let sum: f64 = group.iter().map(|part| f64::from(part.score)).sum();
        let (first_token, last_token) = (group[0].tokens.start, group[group.len() - 1].tokens.end - 1);
        found.push(FoundEntity {
            name,
            score: (sum / group.len() as f64) as f32,
            window,
            parts,
            span: [tokens[first_token].span[0], tokens[last_token].span[1]],
        });
    }
    found
}

/// Splits a label such as `B-PER` into whether it begins a new entity, and the kind of entity.
fn split_label(label: &str) -> (bool, &str) {
    match label.strip_prefix("B-") {
        Some(kind) => (true, kind),
        None => (false, label.strip_prefix("I-").unwrap_or(label)),
    }
}

/// The kind of an entity whose first label is `label`. The library drops any prefix here, not only `B-` and `I-`.
fn kind_of_group(label: &str) -> &str {
    label.split_once('-').map_or(label, |(_, kind)| kind)
}

/// The entities of all windows of a text, sorted by their starts. If entities overlap, the longest is kept; if they
/// are equally long, the one with the highest score. If the first entity has no characters it comes twice, as in the
/// library.
pub fn without_overlaps(mut found: Vec<FoundEntity<'_>>) -> Vec<FoundEntity<'_>> {
    found.sort_by_key(|entity| entity.span[0]);
    let mut kept: Vec<FoundEntity<'_>> = Vec::new();
    let mut previous: Option<FoundEntity<'_>> = found.first().cloned();
    for entity in found {
        let Some(before) = &previous else { break };
        if (before.span[0]..before.span[1]).contains(&entity.span[0]) {
            let length = |entity: &FoundEntity<'_>| entity.span[1] - entity.span[0];
            let order = length(&entity).cmp(&length(before)).then(entity.score.total_cmp(&before.score));
            if order.is_gt() {
                previous = Some(entity);
            }
        } else {
            kept.extend(previous.replace(entity));
        }
    }
    kept.extend(previous);
    kept
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};

    use super::*;

    const STRATEGIES: [Strategy; 5] =
        [Strategy::None, Strategy::Simple, Strategy::First, Strategy::Average, Strategy::Max];

    fn names() -> Vec<String> {
        ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "X-I-PER", "PER"].map(Into::into).into()
    }

    /// Tokens of two characters each with a space between them, unless they continue a word.
    fn tokens(continues: &[bool]) -> Vec<Token> {
        let mut start = 0;
        let token = |(index, continues_word): (usize, &bool)| {
            start += u32::from(index > 0 && !continues_word);
            let span = [start, start + 2];
            start += 2;
            Token { index, id: 0, span, continues_word: *continues_word }
        };
        continues.iter().enumerate().map(token).collect()
    }

    #[test]
    fn a_word_has_the_label_of_its_first_token_the_best_token_or_the_best_mean() {
        let tokens = tokens(&[false, true, true, false]);
        let rows = [[0.4, 0.3, 0.3], [0.1, 0.0, 0.9], [0.0, 0.95, 0.05], [0.5, 0.5, 0.0]];
        let words = |strategy| {
            let words = label_parts(&tokens, strategy, |token| &rows[token.index]);
            assert_eq!(words.iter().map(|word| word.tokens.clone()).collect::<Vec<_>>(), [0..3, 3..4]);
            assert_eq!((words[1].label, words[1].score), (0, 0.5), "of equal ones the first");
            (words[0].label, (words[0].score * 1e4).round() / 1e4)
        };
        assert_eq!(words(Strategy::First), (0, 0.4));
        assert_eq!(words(Strategy::Max), (1, 0.95));
        assert_eq!(words(Strategy::Average), (1, 0.4167));
        assert_eq!(label_parts(&tokens, Strategy::Simple, |token| &rows[token.index]).len(), 4);
    }

    #[test]
    fn prefixes_begin_and_continue_entities() {
        let names = names();
        let tokens = tokens(&[false; 9]);
        // O, B-PER I-PER PER, B-PER, I-LOC B-LOC, X-I-PER twice.
        let labels = [0, 1, 2, 6, 1, 4, 3, 5, 5];
        let part =
            |(at, label): (usize, &usize)| Labelled { label: *label, score: at as f32, tokens: at..at + 1 };
        let parts: Vec<Labelled> = labels.iter().enumerate().map(part).collect();
        let found = entities(0, &tokens, &parts, &names, Strategy::Simple, &["O".to_owned()].into());
        let shown: Vec<_> = found.iter().map(|it| (it.name, it.parts.clone(), it.score)).collect();
        assert_eq!(
            shown,
            [
                ("PER", 1..4, 2.0),
                ("PER", 4..5, 4.0),
                ("LOC", 5..6, 5.0),
                ("LOC", 6..7, 6.0),
                ("I-PER", 7..9, 7.5)
            ]
        );
        assert_eq!(found[0].span, [3, 11]);
        let alone = entities(0, &tokens, &parts, &names, Strategy::None, &["B-PER".to_owned()].into());
        assert_eq!(alone.iter().map(|it| it.name).collect::<Vec<_>>()[..3], ["O", "I-PER", "PER"]);
    }

    #[test]
    fn of_overlapping_entities_the_longest_then_the_likeliest_is_kept() {
        let entity = |span: [u32; 2], score| FoundEntity { name: "PER", score, window: 0, parts: 0..1, span };
        let kept = |all: &[FoundEntity<'static>]| -> Vec<_> {
            without_overlaps(all.to_vec()).iter().map(|it| (it.span, it.score)).collect()
        };
        let found = [entity([0, 4], 0.5), entity([6, 9], 0.9), entity([2, 8], 0.3), entity([6, 9], 0.8)];
        assert_eq!(kept(&found), [([2, 8], 0.3)]);
        let found = [entity([5, 8], 0.5), entity([0, 4], 0.5), entity([5, 8], 0.7), entity([8, 9], 0.1)];
        assert_eq!(kept(&found), [([0, 4], 0.5), ([5, 8], 0.7), ([8, 9], 0.1)]);
        assert_eq!(kept(&[entity([3, 3], 0.5), entity([4, 5], 0.5)]).len(), 3, "an empty one comes twice");
        assert_eq!(kept(&[]), []);
    }

    proptest! {
        #[test]
        fn words_and_entities_divide_the_tokens_in_their_order(
            rows in prop::collection::vec((prop::array::uniform7(0.0_f32..1.0), any::<bool>()), 0..40),
        ) {
            let names = names();
            let tokens = tokens(&rows.iter().map(|(_, continues)| *continues).collect::<Vec<_>>());
            for strategy in STRATEGIES {
                let parts = label_parts(&tokens, strategy, |token| &rows[token.index].0);
                let of_tokens: Vec<usize> = parts.iter().flat_map(|part| part.tokens.clone()).collect();
                prop_assert_eq!(of_tokens, (0..tokens.len()).collect::<Vec<_>>());
                for part in &parts {
                    let mut inner = tokens[part.tokens.clone()].iter().skip(1);
                    prop_assert!(inner.all(|token| token.continues_word));
                    prop_assert!(part.score <= 1.0 && part.score >= 0.0);
                }
                let found = entities(0, &tokens, &parts, &names, strategy, &HashSet::new());
                let of_parts: Vec<usize> = found.iter().flat_map(|it| it.parts.clone()).collect();
                prop_assert_eq!(of_parts, (0..parts.len()).collect::<Vec<_>>());
                for it in &found {
                    let later = &parts[it.parts.clone()][1..];
                    prop_assert!(later.iter().all(|part| !names[part.label].starts_with("B-")));
                    prop_assert!(strategy != Strategy::None || later.is_empty());
                }
                let shown: Vec<_> = found.iter().filter(|it| it.name != "O" && it.name != "PER").collect();
                let ignored = ["O", "PER"].map(str::to_owned).into();
                let rest = entities(0, &tokens, &parts, &names, strategy, &ignored);
                prop_assert_eq!(rest.iter().collect::<Vec<_>>(), shown);
                prop_assert_eq!(without_overlaps(found.clone()), found, "the tokens of one window do not overlap");
            }
        }
    }
}
