//! Spells out what the lexicon cannot read: times, dates, units, amounts of money, abbreviations, Roman numerals,
//! telephone numbers, fractions, ranges, symbols. It decides which of them are found, in which order, and how they are
//! written out; the words are in `normalize.json`, or else in `abbreviations`.
//!
//! Each rule is a pattern without look-around (the crate `regex` is linear in the text) whose first group is what must
//! come before, and whose last group that matched is what must come after. What is between them is replaced.

use regex::{Captures, Regex};
use unicode_normalization::UnicodeNormalization as _;

use crate::characters::{WORD, is_space, to_ascii_digit, with_ascii_digits};
use crate::numbers::{cardinal, ordinal};
use crate::tables::{MONTHS, Tables, one_of};
use crate::{Error, abbreviations};

const NUMBER: &str = r"\d+(?:,\d{3})*(?:\.\d+)?";
/// A Roman numeral that begins with C, L, X, V or I; or nothing.
const ROMAN: &str = "((?:CM|CD|C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3}))";
const SCALES: &str = "hundred|thousand|million|billion|trillion";

/// Digits as superscripts.
const RAISED: &str = "⁰¹²³⁴⁵⁶⁷⁸⁹";
/// A match of a rule.
struct Found<'a> {
    groups: Captures<'a>,
    /// The text from the end of the replaced part on.
    after: &'a str,
}

impl Found<'_> {
    /// The text of a group; "" if it did not match.
    fn group(&self, index: usize) -> &str {
        self.groups.get(index).map_or("", |group| group.as_str())
    }

    fn number(&self, index: usize) -> usize {
        self.group(index).chars().map(to_ascii_digit).collect::<String>().parse().unwrap_or(0)
    }
}

/// What replaces a match; none to leave it as it is.
type Rewrite = fn(&Tables, &Found) -> Option<String>;

pub struct Normalization {
    rules: Vec<(Regex, Rewrite)>,
    symbols: Vec<(String, Symbol)>,
    pub tables: Tables,
}

enum Symbol {
    /// Replaced everywhere.
    Anywhere(String),
    /// Replaced between two characters that are no spaces.
    Between(Regex, String),
}

impl Normalization {
    /// Refuses tables that lack an entry that a rule takes for granted.
    pub fn new(tables: Tables) -> Result<Self, Error> {
        if let Some(lacking) = ["$", "£", "€", "¥", "₹", "₩", "¢", "Rs", "USD", "EUR", "GBP"]
            .into_iter()
            .find(|symbol| !tables.currency.contains_key(*symbol))
        {
            return Err(Error::Lacks(lacking));
        }
        let rules = rules(&tables).into_iter().map(|(pattern, rewrite)| Ok((Regex::new(&pattern)?, rewrite)));
        let symbol = |(symbol, word): &(String, String)| {
            let word = if word.is_empty() { " ".to_owned() } else { format!(" {word} ") };
            let how = if matches!(symbol.as_str(), "=" | "<" | ">" | "~") {
                Symbol::Between(Regex::new(&format!(r"(\S) ?{} ?(\S)", regex::escape(symbol)))?, word)
            } else {
                Symbol::Anywhere(word)
            };
            Ok((symbol.clone(), how))
        };
        Ok(Self {
            rules: rules.collect::<Result<_, Error>>()?,
            symbols: tables.symbols.0.iter().map(symbol).collect::<Result<_, Error>>()?,
            tables,
        })
    }

    pub fn normalize(&self, text: &str) -> String {
        let mut text = spaced_once(&with_ascii_digits(text));
        text = text.replace('’', "'").replace('‒', "-").replace('―', "—");
        for (pattern, rewrite) in &self.rules {
            text = replaced(pattern, &text, |found| rewrite(&self.tables, found)).unwrap_or(text);
        }
        for (symbol, how) in &self.symbols {
            if text.contains(symbol.as_str()) {
                text = match how {
                    Symbol::Anywhere(word) => text.replace(symbol.as_str(), word),
                    Symbol::Between(pattern, word) => {
                        replaced(pattern, &text, |_| Some(word.clone())).unwrap_or(text)
                    }
                };
            }
        }
        without_space_before_punctuation(&spaced_once(&text))
    }
}

/// The text with each match replaced; none if there is none.
fn replaced(pattern: &Regex, text: &str, rewrite: impl Fn(&Found) -> Option<String>) -> Option<String> {
    let mut result: Option<String> = None;
    let (mut copied, mut from) = (0, 0);
    // Finding a match alone is many times faster than finding its groups too.
    while let Some(whole) = pattern.find_at(text, from) {
        let groups = pattern.captures_at(text, whole.start())?;
        let start = groups.get(1)?.end();
        let end = groups.iter().flatten().last()?.start();
        let found = Found { groups, after: &text[end..] };
        let result = result.get_or_insert_default();
        result.push_str(&text[copied..start]);
        match rewrite(&found) {
            Some(words) => result.push_str(&words),
            None => result.push_str(&text[start..end]),
        }
        copied = end;
        // The last character of this match may be what comes before the next match.
        let last = text[..end].char_indices().next_back().map_or(end, |(at, _)| at);
        from = if last > whole.start() { last } else { end };
    }
    result.map(|result| result + &text[copied..])
}

fn spaced_once(text: &str) -> String {
    let mut words = text.split(is_space).filter(|word| !word.is_empty());
    let mut spaced = words.next().unwrap_or_default().to_owned();
    spaced.reserve(text.len());
    for word in words {
        spaced.push(' ');
        spaced.push_str(word);
    }
    spaced
}

fn without_space_before_punctuation(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, ',' | '.' | ';' | ':' | '!' | '?') {
            kept.truncate(kept.trim_end_matches(' ').len());
        }
        kept.push(c);
    }
    kept.trim_matches(is_space).to_owned()
}

/// All rules in the order in which they apply.
fn rules(tables: &Tables) -> Vec<(String, Rewrite)> {
    let not_word = format!("[^{WORD}]");
    // At the start of a word.
    let start = format!("(^|{not_word})");
    // At the start of a word that no period joins to another.
    let apart = format!("(^|[^{WORD}.])");
    // At the end of a word.
    let end = format!("($|{not_word})");
    // Around a telephone number, and around a range.
    let (alone_start, alone_end) = (format!(r"(^|[^{WORD}.\-])"), format!(r"($|[^{WORD}.\-])"));
    let range_end = format!(r"($|[^{WORD}.\-%])");
    let short = MONTHS.iter().map(|month| &month[..3]);
    let months = one_of(MONTHS.into_iter().chain(short).chain(["Sept"]));
    let (units, titles) = (one_of(tables.units.keys()), one_of(tables.titles.keys()));
    // "no." may also be the word "no" at the end of a sentence. A rule below replaces it before numbers.
    let abbreviations = tables.abbreviations.keys().filter(|word| !matches!(word.as_str(), "no." | "nos."));
    let abbreviations = one_of(abbreviations);
    let (counted, ranked) = (one_of(&tables.roman_cardinal), one_of(&tables.roman_ordinal));
    let roman_end = format!(r"($|[^{WORD}.'’]|[.'’](?:$|{not_word}))");
    let first: Vec<(String, Rewrite)> = vec![
        (
            format!(
                r"{start}(\d{{1,2}}):(\d{{2}})(?::(\d{{2}}))?(?: ?([AaPp])\.?[Mm]\.?($|[^A-Za-z\d])|($|\D))"
            ),
            time,
        ),
        (format!(r"{start}(\d{{4}})-(\d{{2}})-(\d{{2}}){end}"), |_, found| {
            date(found.group(2), found.number(3), found.number(4))
        }),
        (format!(r"{start}(\d{{1,2}})/(\d{{1,2}})/(\d{{4}}|\d{{2}}){end}"), american_date),
        (format!(r"()([$£€])({NUMBER}) ?(?:({SCALES})()|([kKmMbB]){end})"), |tables, found| {
            let scale = scale(found.group(4), found.group(6));
            Some(format!("{} {scale} {}", found.group(3), tables.currency[found.group(2)][1]))
        }),
        (format!("{apart}({NUMBER}) ?¢()"), |tables, found| {
            Some(counted_in(found.group(2), &tables.currency["¢"]))
        }),
        (
            format!(r"{start}([¥₹₩]|Rs\.?|USD|EUR|GBP) ?({NUMBER})(?: ?({SCALES})()| ?([kKmMbB]){end}|())"),
            money,
        ),
        (format!("{apart}(-?{NUMBER}) ?° ?([CF])?{end}"), |_, found| {
            let degrees = counted_in(found.group(2), &["degree".to_owned(), "degrees".to_owned()]);
            Some(match found.group(3) {
                "C" => degrees + " Celsius",
                "F" => degrees + " Fahrenheit",
                _ => degrees,
            })
        }),
        // Without the period between "6 ft." and "2 in.".
        (
            format!(r"{apart}(-?{NUMBER}) ?({units})\.( {NUMBER} ?(?:{units}|in)(?:$|{not_word}))"),
            |tables, found| Some(counted_in(found.group(2), &tables.units[found.group(3)])),
        ),
        (format!(r"((?:feet|foot) {NUMBER}) in(?:\.( \p{{Ll}})|(\.))"), |_, _| Some(" inches".to_owned())),
        (format!("{apart}(-?{NUMBER}) ?({units}){end}"), |tables, found| {
            Some(counted_in(found.group(2), &tables.units[found.group(3)]))
        }),
        (
            format!(r"{start}({months})\.? (\d{{1,2}})(?:st|nd|rd|th)?(?:(,? \d{{4}}){end}|($|[^{WORD}:%]))"),
            |_, found| {
                let (month, day) = (month(found.group(2))?, found.number(3));
                let date = || format!("{month} {}{}", ordinal(&day.to_string()), found.group(4));
                (1..=31).contains(&day).then(date)
            },
        ),
        (format!(r"{start}(?:the )?(\d{{1,2}}) (?:of )?({months})(?:\.()|{end})"), |_, found| {
            let (day, month) = (found.number(2), month(found.group(3))?);
            (1..=31).contains(&day).then(|| format!("the {} of {month}", ordinal(&day.to_string())))
        }),
    ];
    let abbreviated = abbreviations::replaced().map(|(forms, follows)| -> (String, Rewrite) {
        (format!(r"(^|[^{WORD}.]|\.\.)({forms})\. ?#?{follows}"), abbreviation)
    });
    let rooms = "Apartment|Apt|Suite|Ste|Unit|Room|Rm|Building|Bldg|Floor|N[EW]|S[EW]";
    let rest: Vec<(String, Rewrite)> = vec![
        // Before the rest of an address, "St." is no saint, and "Dr." no doctor.
        (format!(r"{start}(St|Dr)\.?(,? (?:(?:{rooms})(?:$|{not_word})|#|[NS]\.[EW]\.))"), |_, found| {
            Some(if found.group(2) == "St" { "Street" } else { "Drive" }.to_owned())
        }),
        (format!(r"{start}({titles})\.? ([A-Z])"), |tables, found| {
            Some(format!("{} ", tables.titles[found.group(2)]))
        }),
        (format!("{apart}({abbreviations}){end}"), |tables, found| {
            let period = if found.after.is_empty() && found.group(2).ends_with('.') { "." } else { "" };
            Some(format!("{}{period}", tables.abbreviations[found.group(2)]))
        }),
        (format!(r"(^|[^{WORD}&])#(\d)"), |_, _| Some("number ".to_owned())),
        (format!("{start}({counted}) {ROMAN}{roman_end}"), |_, found| {
            roman(found.group(3)).map(|n| format!("{} {n}", found.group(2)))
        }),
        (format!("{start}({ranked}) {ROMAN}{roman_end}"), |_, found| {
            roman(found.group(3)).map(|n| format!("{} the {}", found.group(2), ordinal(&n.to_string())))
        }),
        (format!(r"{alone_start}((?:\d{{3}}-)?\d{{3}}-\d{{4}}){alone_end}"), |_, found| {
            let each = |c: char| if c == '-' { ", ".to_owned() } else { format!("{c} ") };
            Some(found.group(2).chars().map(each).collect::<String>().trim_end().to_owned())
        }),
        (format!(r"(^|[^{WORD}./])(\d{{1,2}})/(\d{{1,2}})($|[^{WORD}./])"), fraction),
        (format!(r"{alone_start}(\d{{1,4}}) ?[-–] ?(\d{{1,4}}){range_end}"), |_, found| {
            Some(format!("{} to {}", found.group(2), found.group(3)))
        }),
        (format!(r"(^|[^{WORD}+])\+(\d)"), |_, _| Some("plus ".to_owned())),
    ];
    raised().into_iter().chain(first).chain(abbreviated).chain(rest).collect()
}

/// The rules for raised digits.
fn raised() -> Vec<(String, Rewrite)> {
    vec![
        // A power follows a digit, a bracket or a single letter. Other raised numbers are notes. The symbols ² and ³
        // have words in the tables.
        (format!(r"((?:^|[^\p{{L}}])\p{{L}}|[\d)])([⁺⁻]?[{RAISED}]+)()"), |_, found| {
            let minus = if found.group(2).starts_with('⁻') { "minus " } else { "" };
            let power = || format!(" to the power of {minus}{} ", nfkc_digits(found.group(2)));
            (!matches!(found.group(2), "²" | "³")).then(power)
        }),
        (format!(r"(^|[^{RAISED}])([{RAISED}]{{2,}}|[⁰¹⁴-⁹])()"), |_, found| {
            Some(format!(" {} ", nfkc_digits(found.group(2))))
        }),
    ]
}

/// The word of an abbreviation, and the number that follows if it is a Roman one.
fn abbreviation(_: &Tables, found: &Found) -> Option<String> {
    let digits = found.after.bytes().take_while(u8::is_ascii_digit).count();
    let word = match found.group(2) {
        "est" | "Est" if digits == 4 => "established".to_owned(),
        abbreviation => abbreviations::word(abbreviation)?,
    };
    Some(format!("{word} {}", roman(found.group(3)).map_or(String::new(), |n| n.to_string())))
}

/// The digits of a text in NFKC.
fn nfkc_digits(text: &str) -> String {
    text.nfkc().filter(char::is_ascii_digit).collect()
}

fn time(_: &Tables, found: &Found) -> Option<String> {
    let (hour, minute, second) = (found.number(2), found.number(3), found.number(4));
    let (has_second, meridiem) = (!found.group(4).is_empty(), found.group(5).to_uppercase());
    if hour > 24 || minute > 59 || second > 59 {
        return None;
    }
    let in_words = |n: usize| cardinal(&n.to_string());
    let minutes = match minute {
        0 if meridiem.is_empty() && !has_second => " o'clock".to_owned(),
        0 => String::new(),
        1..10 => format!(" oh {}", in_words(minute)),
        _ => format!(" {}", in_words(minute)),
    };
    let seconds = match second {
        _ if !has_second => String::new(),
        1 => " and one second".to_owned(),
        _ => format!(" and {} seconds", in_words(second)),
    };
    // With periods, so that the letters of AM and PM are spelled.
    let meridiem = match meridiem.as_str() {
        "" => meridiem,
        _ if found.after.starts_with('.') => format!(" {meridiem}.M"),
        _ => format!(" {meridiem}.M."),
    };
    Some(in_words(hour) + &minutes + &seconds + &meridiem)
}

/// The month that begins with the same three letters.
fn month(name: &str) -> Option<&'static str> {
    MONTHS.into_iter().find(|month| name.starts_with(&month[..3]))
}

fn date(year: &str, month: usize, day: usize) -> Option<String> {
    let month = MONTHS.get(month.checked_sub(1)?)?;
    let year = if year.is_empty() { String::new() } else { format!(", {year}") };
    (1..=31).contains(&day).then(|| format!("{month} {}{year}", ordinal(&day.to_string())))
}

/// A date that begins with the month, or with the day if the first number is no month.
fn american_date(_: &Tables, found: &Found) -> Option<String> {
    let (first, second, year) = (found.number(2), found.number(3), found.group(4));
    let century = match year.chars().count() {
        2 if found.number(4) > 30 => "19",
        2 => "20",
        _ => "",
    };
    let (month, day) = if first <= 12 { (first, second) } else { (second, first) };
    date(&format!("{century}{year}"), month, day)
}

/// The word for thousands and the like: a name, or the letter `k`, `m` or `b`.
fn scale<'a>(name: &'a str, letter: &str) -> &'a str {
    match letter {
        "k" | "K" => "thousand",
        "m" | "M" => "million",
        "b" | "B" => "billion",
        _ => name,
    }
}

/// A number with its unit, in the singular or plural.
fn counted_in(number: &str, [one, several]: &[String; 2]) -> String {
    let is_one = matches!(number.replace(',', "").as_str(), "1" | "1.0" | "-1");
    format!("{number} {}", if is_one { one } else { several })
}

fn money(tables: &Tables, found: &Found) -> Option<String> {
    let words = &tables.currency[found.group(2).trim_end_matches('.')];
    Some(match scale(found.group(4), found.group(6)) {
        "" => counted_in(found.group(3), words),
        scale => format!("{} {scale} {}", found.group(3), words[1]),
    })
}

/// The value of a Roman numeral; none for an empty one.
fn roman(numeral: &str) -> Option<usize> {
    let value = |c| match c {
        'I' => 1,
        'V' => 5,
        'X' => 10,
        'L' => 50,
        'C' => 100,
        'D' => 500,
        _ => 1000,
    };
    let values: Vec<usize> = numeral.to_uppercase().chars().map(value).collect();
    let sum = |(before, after): (usize, usize), value: usize| {
        if value < after { (before.saturating_sub(value), value) } else { (before + value, value) }
    };
    let (total, _) = values.iter().rev().fold((0, 0), |state, value| sum(state, *value));
    (total > 0).then_some(total)
}

fn fraction(_: &Tables, found: &Found) -> Option<String> {
    const PARTS: [&str; 9] =
        ["half", "third", "quarter", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"];
    let (above, below) = (found.number(2), found.number(3));
    if 0 < above && above < below && below <= 10 {
        return Some(match (above, below) {
            (1, 2) => "one half".to_owned(),
            (1, _) => format!("1 {}", PARTS[below - 2]),
            _ => format!("{above} {}s", PARTS[below - 2]),
        });
    }
    let day = (1..=12).contains(&above).then(|| date("", above, below)).flatten();
    Some(day.unwrap_or_else(|| format!("{above} slash {below}")))
}
