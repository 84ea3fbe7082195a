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

/// Asserts that a text is split after each ` | `.
fn assert_split(text: &str) {
    let expected: Vec<&str> = text.split(" | ").collect();
    let whole = expected.join(" ");
    assert_eq!(AMERICAN.sentences(&whole).collect::<Vec<_>>(), expected, "{whole:?}");
}

fn assert_same_phonemes(text: &str, as_text: &str) {
    assert_eq!(AMERICAN.of_sentence(text), AMERICAN.of_sentence(as_text), "{text:?}, {as_text:?}");
}

#[test]
fn a_period_after_an_abbreviation_does_not_end_the_sentence() {
    for text in [
        "I bought Chanel No. 5 yesterday.",
        "See Fig. 3, figs. 4 and 5, and Fig. B for details.",
        "It is in vol. 2, Vol. I, Ch. IV, p. 12, pp. 3 to 4, sec. 3.2 and Eq. (5).",
        "We met on Mar. 3rd, in Sept. 2020, on Mon. Jan. 5, and on Fri. 3 Feb. again.",
        "The U.S. Senate and the U.N. Council met J. K. Rowling, J.R.R. Tolkien and J.-P. Sartre, Ph.D. Students.",
        "Non-U.S. Companies moved to the U.S. 20 years ago.",
        "We meet at 9 a.m. Tuesday, 7:30 p.m. ET, 10 a.m. London time, 5 p.m. (EST), 5 p.m. 3 March.",
        "We have a 9 a.m. Zoom call.",
        "It costs approx. $30, est. 1,500 or max. 5 a day, e.g. Excel, i.e. Microsoft Excel, cf. Brown vs. Jones.",
        "She moved to Apt. 4, Apt. B, Ste. 300, Rm. 12, Bldg. 7, 12 Oak St. Apt. 4, and 5th Ave. New York.",
        "Warner Bros. Pictures and Acme Inc. Chairman Smith left Johnson & Co. & Sons.",
        "He (b. 1950, d. 1999) is 6 ft. 2 in. tall, 7 lbs. 3 oz. heavy.",
        "Pvt. Ryan, Brig. Gen. Lee and Det. Smith saw [Fig. 3] and No.\u{a0}5 and No. #5.",
        "He saw cats, dogs, etc. (see below) and more.",
    ] {
        assert_split(text);
    }
}

#[test]
fn a_period_after_an_abbreviation_ends_the_sentence_where_another_begins() {
    for text in [
        "He lives in the U.S. | The weather is nice.",
        "He lives in the U.S. | No one knows.",
        "Did he come? | No. | He did not.",
        "Did he come? | No. | I think not.",
        "Did he come? | No. | A man came.",
        "Did he come? | No. 5 people came.",
        "We left at 9 a.m. | Everyone slept.",
        "Doors open at 7 p.m. | Tickets cost $10.",
        "We left at 5 p.m. | 20 people stayed.",
        "Wait a sec. | I need to go.",
        "It snowed in Jan. | Sales fell.",
        "He joined Acme Inc. | It grew.",
        "He lives on Oak St. | She does not.",
        "He has a Ph.D. | In 1999 he left.",
        "Take vitamin C. | It helps.",
        "He likes cats, dogs, etc. | My friend likes birds.",
        "It is 5 ft. | The other is 6 ft. | This is all.",
        "I like art. | 5 of us do.",
    ] {
        assert_split(text);
    }
}

#[test]
fn abbreviations_are_written_out_before_numbers() {
    for (text, as_text) in [
        ("Chanel No. 5", "Chanel Number 5"),
        ("Nos. 3 and 4, no. five, the no. of items", "Numbers 3 and 4, number five, the number of items"),
        ("See Fig. 3, Figs. 3 and 4, Fig. B", "See Figure 3, Figures 3 and 4, Figure B"),
        ("vol. 2, Vol. I, vols. 1 and 2, Ch. XIV", "volume 2, Volume 1, volumes 1 and 2, Chapter 14"),
        ("p. 5, Sec. 3.2, Eq. 5, Pt. II, Rm. 12", "page 5, Section 3.2, Equation 5, Part 2, Room 12"),
        ("12 Oak St. Apt. 4", "12 Oak Street Apartment 4"),
        ("on Mar. 3rd", "on March third"),
        ("approx. 30, ca. 1900, max. 5", "approximately 30, circa 1900, maximum 5"),
        ("est. 1890, est. 30 people", "established 1890, estimated 30 people"),
        ("(b. 1950, d. 1999)", "(born 1950, died 1999)"),
        ("6 ft. 2 in. tall", "6 feet 2 inches tall"),
        ("It takes 5 min. Or 3 sec. at most", "It takes 5 minutes. Or 3 seconds. at most"),
        ("Pvt. Ryan", "Private Ryan"),
    ] {
        assert_same_phonemes(text, as_text);
    }
    // The package reads it as "number".
    assert_eq!(AMERICAN.of_sentence("He said no."), "hˌi sˈɛd nˈO.");
}

#[test]
fn decimal_digits_of_all_scripts_are_read() {
    let class = regex::Regex::new(r"^\p{Nd}$").expect("a pattern");
    let digits = ('\0'..=char::MAX).filter(|c| class.is_match(c.encode_utf8(&mut [0; 4])));
    // Each script has ten of them, in order.
    for (index, digit) in digits.enumerate() {
        let expected = AMERICAN.of_sentence(&format!("{} wan1{0}x", index % 10));
        assert_eq!(AMERICAN.of_sentence(&format!("{digit} wan1{digit}x")), expected, "{digit:?}");
    }
    assert_same_phonemes("It is ٣٫٥, ١٬٢٣٤ or ５０％.", "It is 3.5, 1,234 or 50%.");
}

#[test]
fn numbers_in_circles_and_the_like_are_read() {
    let runs = ["①⑳", "⑴⒇", "⒈⒛", "㉑㉟", "㊱㊿", "⓪⓪"];
    for (run, first) in runs.into_iter().zip([1, 1, 1, 21, 36, 0]) {
        let (start, end) = (run.chars().next().unwrap(), run.chars().next_back().unwrap());
        for (number, c) in (first..).zip(start..=end) {
            assert_same_phonemes(&format!("I see {c} cats"), &format!("I see {number} cats"));
        }
    }
    assert_same_phonemes("wan②② and ①②③", "wan 2 2 and 1 2 3");
    assert_same_phonemes("Louis ⅩⅣ, Chapter Ⅳ", "Louis the fourteenth, Chapter 4");
    assert_same_phonemes(
        "H₂O, x⁴, 10⁻⁶, note¹²",
        "H2O, x to the power of 4, 10 to the power of minus 6, note 12",
    );
    assert_same_phonemes("⅓ cup, ⅞ mile, 1⁄3", "1/3 cup, 7/8 mile, 1/3");
}

#[test]
fn words_keep_their_digits_whatever_the_tagger_takes_them_for() {
    let seven = AMERICAN.of_sentence("77");
    for word in ["wan", "x", "qwen", "no", "zyx", "Win", "iphone"] {
        for text in ["{}", "{}=wan77", "“{}”", "...{}", "{}?", "<{}>", "x: {}", "the {}, and {}"] {
            for word in [format!("{word}77"), format!("{word}77q"), format!("77{word}")] {
                let text = text.replace("{}", &word);
                let phonemes = AMERICAN.of_sentence(&text);
                let (read, written) = (phonemes.matches(&seven).count(), text.matches("77").count());
                assert_eq!(read, written, "{text:?}: {phonemes}");
            }
        }
    }
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
        "No. 5 ",
        "U.S. Senate ",
        "U.S.\t",
        "-Dr.\t",
        "a.m. Zoom Time ",
        "e.g. X ",
        "6 ft. 2 in. ",
        "¹",
        "x⁴",
        "①",
        "Ⅳ",
        "⅓",
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
