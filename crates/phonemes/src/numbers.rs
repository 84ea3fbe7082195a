//! Numbers in words: cardinals, ordinals, years, decimals. Numbers of more than 36 digits, for which there is no name,
//! are read digit by digit.

const SMALL: [&str; 20] = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
];
const TENS: [&str; 8] = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];
const THOUSANDS: [&str; 12] = [
    "",
    " thousand",
    " million",
    " billion",
    " trillion",
    " quadrillion",
    " quintillion",
    " sextillion",
    " septillion",
    " octillion",
    " nonillion",
    " decillion",
];
/// Maximum number of digits of a number that has a name.
const MAX_DIGITS: usize = 3 * THOUSANDS.len();

fn digit(c: u8) -> &'static str {
    SMALL[usize::from(c.wrapping_sub(b'0') % 10)]
}

/// Digits, one by one.
pub fn digit_by_digit(digits: &str) -> String {
    digits.bytes().map(digit).collect::<Vec<_>>().join(" ")
}

fn below_thousand(n: usize) -> String {
    let below_hundred = |n: usize| match n {
        0..20 => SMALL[n].to_owned(),
        _ if n.is_multiple_of(10) => TENS[n / 10 - 2].to_owned(),
        _ => format!("{}-{}", TENS[n / 10 - 2], SMALL[n % 10]),
    };
    match (n / 100, n % 100) {
        (0, rest) => below_hundred(rest),
        (hundreds, 0) => format!("{} hundred", SMALL[hundreds]),
        (hundreds, rest) => format!("{} hundred and {}", SMALL[hundreds], below_hundred(rest)),
    }
}

/// A number in ASCII digits as words, such as "one thousand, two hundred and five". No digits mean 0.
pub fn cardinal(digits: &str) -> String {
    let digits = digits.trim_start_matches('0');
    if digits.len() > MAX_DIGITS {
        return digit_by_digit(digits);
    }
    let groups = digits.as_bytes().rchunks(3).enumerate().filter_map(|(scale, group)| {
        let n = group.iter().fold(0, |n, c| 10 * n + usize::from(c - b'0'));
        (n > 0).then(|| (scale, n, below_thousand(n) + THOUSANDS[scale]))
    });
    let mut groups: Vec<_> = groups.collect();
    groups.reverse();
    let Some(((scale, n, last), before)) = groups.split_last() else {
        return SMALL[0].to_owned();
    };
    let joint = if *scale == 0 && *n < 100 { " and " } else { ", " };
    if before.is_empty() {
        return last.clone();
    }
    before.iter().map(|(_, _, words)| words.as_str()).collect::<Vec<_>>().join(", ") + joint + last
}

/// The ordinal of a number in ASCII digits, such as "twenty-third".
pub fn ordinal(digits: &str) -> String {
    let words = cardinal(digits);
    let last = words.rfind([' ', '-']).map_or(0, |at| at + 1);
    let (before, last) = words.split_at(last);
    let last = match last {
        "one" => "first",
        "two" => "second",
        "three" => "third",
        "five" => "fifth",
        "eight" => "eighth",
        "nine" => "ninth",
        "twelve" => "twelfth",
        _ => match last.strip_suffix('y') {
            Some(stem) => return format!("{before}{stem}ieth"),
            None => return format!("{before}{last}th"),
        },
    };
    format!("{before}{last}")
}

/// A year of four ASCII digits, such as "nineteen oh-five".
pub fn year(digits: &str) -> String {
    let (high, low) = digits.split_at(digits.len().saturating_sub(2));
    if high.trim_start_matches('0').is_empty() || (high.ends_with('0') && low.starts_with('0')) {
        return cardinal(digits);
    }
    let low = match low.strip_prefix('0') {
        Some("0") => "hundred".to_owned(),
        Some(low) => format!("oh-{}", cardinal(low)),
        None => cardinal(low),
    };
    format!("{} {low}", cardinal(high))
}

/// A number with one period among its ASCII digits. Zeros at its end are not read.
pub fn decimal(number: &str) -> String {
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    let part = part.trim_end_matches('0');
    if part.is_empty() {
        cardinal(whole)
    } else {
        format!("{} point {}", cardinal(whole), digit_by_digit(part))
    }
}
