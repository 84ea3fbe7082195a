//! The phonemes of texts, compared with those of the Python package (`scripts/make-phoneme-fixtures.py`), and how long
//! strangers' texts take.
//!
//! The tables are not part of the repository: `SCONCE_G2P` names their folder, or it is `models/hibari/g2p` in the root
//! of the workspace.

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use sconce_phonemes::{Accent, Memory, Phonemes};
use serde::Deserialize;

#[derive(Deserialize)]
struct Cases {
    phonemes: Vec<Case>,
    sentences: Vec<Split>,
    long: Vec<Long>,
}

#[derive(Deserialize)]
struct Case {
    accent: String,
    text: String,
    phonemes: String,
}

#[derive(Deserialize)]
struct Split {
    text: String,
    sentences: Vec<String>,
}

#[derive(Deserialize)]
struct Long {
    text: String,
    parts: Vec<String>,
}

fn cases() -> Cases {
    serde_json::from_str(include_str!("cases.json")).expect("cases.json")
}

fn load(accent: Accent) -> Phonemes {
    let beside = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/hibari/g2p");
    let folder = std::env::var_os("SCONCE_G2P").map_or_else(beside, PathBuf::from);
    Phonemes::load(&folder, accent).unwrap_or_else(|error| panic!("{error}; run scripts/fetch-hibari"))
}

static AMERICAN: LazyLock<Phonemes> = LazyLock::new(|| load(Accent::American));
static BRITISH: LazyLock<Phonemes> = LazyLock::new(|| load(Accent::British));

#[test]
fn texts_are_read_as_the_package_reads_them() {
    let cases = cases().phonemes;
    assert!(cases.len() >= 120, "{} cases", cases.len());
    let wrong = cases.iter().filter_map(|case| {
        let phonemes = if case.accent == "gb" { &BRITISH } else { &AMERICAN }.of_sentence(&case.text);
        (phonemes != case.phonemes)
            .then(|| format!("{}: {}\n  {phonemes}\n  not\n  {}", case.accent, case.text, case.phonemes))
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn texts_are_split_as_the_package_splits_them() {
    for Split { text, sentences } in cases().sentences {
        assert_eq!(AMERICAN.sentences(&text).collect::<Vec<_>>(), sentences, "{text:?}");
    }
}

#[test]
fn long_sentences_are_cut_as_the_package_cuts_them() {
    for Long { text, parts } in cases().long {
        let sentences = AMERICAN.sentences(&text).map(|sentence| AMERICAN.of_sentence(sentence));
        let ours = sentences.flat_map(|phonemes| {
            sconce_phonemes::parts(&phonemes, 400).map(str::to_owned).collect::<Vec<_>>()
        });
        assert_eq!(ours.collect::<Vec<_>>(), parts);
    }
}

#[test]
fn no_part_is_longer_than_asked_for() {
    for phonemes in ["ˈæ".repeat(500), "ˈæ ".repeat(300), "ˈæ, ˈæ ˈæ ".repeat(100), String::new()] {
        let parts: Vec<&str> = sconce_phonemes::parts(&phonemes, 100).collect();
        assert!(parts.iter().all(|part| (1..=100).contains(&part.chars().count())), "{parts:?}");
        assert_eq!(parts.concat().replace(' ', ""), phonemes.replace(' ', ""));
    }
}

#[test]
fn a_numeral_needs_a_letter_unlike_in_the_package() {
    // The package reads them as "Class 0Library" and "King the zerothCharles".
    assert_eq!(AMERICAN.of_sentence("Class Library"), "klˈæs lˈIbɹˌɛɹi");
    assert_eq!(AMERICAN.of_sentence("King Charles"), "kˈɪŋ ʧˈɑɹlz");
}

#[test]
fn a_number_without_a_name_is_read_digit_by_digit() {
    assert_eq!(AMERICAN.of_sentence(&"7".repeat(37)), vec!["sˈɛvən"; 37].join(" "));
}

#[test]
fn remembered_words_do_not_change_phonemes() {
    let mut memory = Memory::default();
    let sentence = "Zyxwolf met Blorptz, and Zyxwolf left.";
    let first = BRITISH.of_sentence_with(sentence, &mut memory);
    assert_eq!(first, BRITISH.of_sentence_with(sentence, &mut memory));
    assert_eq!(first, BRITISH.of_sentence(sentence));
}

#[test]
fn a_repeated_unknown_word_is_read_once() {
    let text = "zyxwolf ".repeat(12_000);
    let phonemes = AMERICAN.of_sentence(&text);
    let words: Vec<&str> = phonemes.split(' ').collect();
    assert_eq!(words.len(), 12_000);
    assert!(words.iter().all(|word| *word == words[0] && !word.is_empty()));
}

#[test]
fn the_network_reads_a_bounded_part_of_a_sentence() {
    let letter = |n: u32| char::from_digit(10 + n % 26, 36).unwrap_or('z');
    let word = |n: u32| ["zyxwolfzyx", "q"].concat() + &String::from_iter([n, n / 26, n / 676].map(letter));
    let words: Vec<String> = (0..3000).map(word).collect();
    let phonemes = AMERICAN.of_sentence(&words.join(" ; "));
    let read = phonemes.split([' ', ';']).filter(|word| !word.is_empty()).count();
    // Their 14 letters count as 16.
    assert_eq!(read, 8192 / 16);
}

#[test]
fn unknown_characters_are_skipped() {
    for text in ["😀", "\u{1}\u{2}\u{1b}", "\u{202e}", "\u{301}\u{302}", "", " \n\t "] {
        assert_eq!(AMERICAN.of_sentence(text), "", "{text:?}");
    }
    assert_eq!(AMERICAN.of_sentence("a 😀 dog"), AMERICAN.of_sentence("a dog").replace(' ', "  "));
}

/// 100,000 characters of texts on which rules that look again and again at the same characters would take minutes.
fn hostile_texts() -> Vec<String> {
    let mut state = 1_u32;
    let mut random = |below: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % below
    };
    let any: String = (0..100_000).filter_map(|_| char::from_u32(33 + random(0x1_ffff))).collect();
    let mut word = |letters: usize| -> String {
        (0..letters).filter_map(|_| char::from_digit(10 + random(26), 36)).collect()
    };
    let words: String = (0..15_000).map(|_| word(6) + " ").collect();
    let joined: String = (0..15_000).map(|_| word(6) + "-").collect();
    let parts = [
        "a",
        "A",
        "7",
        "'",
        "-",
        ".",
        "(",
        "[",
        ")",
        "’",
        "_",
        "^",
        "#",
        "=",
        "±",
        "½",
        "²",
        "\n",
        " ",
        "\0",
        "[a](/",
        "[a](/x/)",
        "[a](",
        "$1",
        "$1 ",
        "$1.",
        "1,234,",
        "1,234.5",
        "1-",
        "1/2",
        "12:34",
        "😀",
        "😀 ",
        "שלום עולם ",
        "\u{202e}abc ",
        "e\u{301}",
        "\u{301}",
        "\u{301} ",
        "a1",
        "é1",
        "aB",
        "IsIs",
        "is-",
        "a.",
        "ab.cde.",
        "a/",
        "'s",
        "don't",
        "Dr. ",
        "Dr.\t",
        ".\t",
        "Jan. 5 ",
        "Chapter IV ",
        "555-1234 ",
        "¥1 ",
        "5 pm ",
        "a@",
        "a.com/",
        "……",
        ".)",
        "100,000ing",
        "to2to",
        "ﷺ",
        "٣",
        "İ",
    ];
    let repeated = parts.iter().map(|part| part.chars().cycle().take(100_000).collect());
    let openers = "(".repeat(30_000) + &".\t".repeat(35_000);
    let link = format!("[{}](/{}/)", "a 1".repeat(16_000), "b".repeat(50_000));
    repeated.chain([any, words, joined, openers, link]).collect()
}

#[test]
fn no_text_of_strangers_takes_long() {
    // The slowest takes a second in release on one core.
    let most = Duration::from_secs(6);
    for text in hostile_texts() {
        let start = Instant::now();
        let phonemes = AMERICAN.of_sentence(&text);
        let sentences = AMERICAN.sentences(&text).count();
        let took = start.elapsed();
        let begin: String = text.chars().take(20).collect();
        assert!(took < most, "{begin:?}: {took:?}, {} bytes, {sentences} sentences", phonemes.len());
    }
}
