//! Formats numbers, durations and long texts for a limited number of columns of the terminal. Does no I/O.

use ratatui::text::Span;

use crate::commands::ctl::span;

const UNITS: [&str; 4] = ["", "k", "M", "G"];

/// A rate or a count, in at most 5 columns.
pub(super) fn short(value: f64) -> String {
    let power = (0..UNITS.len() - 1).find(|power| value / 1e3_f64.powi(*power as i32) < 9_999.5);
    let power = power.unwrap_or(UNITS.len() - 1);
    let (value, unit) = (value / 1e3_f64.powi(power as i32), UNITS[power]);
    if value < 99.95 { format!("{value:.1}{unit}") } else { format!("{value:.0}{unit}") }
}

/// A count, in at most 5 columns.
pub(super) fn count(count: u64) -> String {
    if count < 100_000 { count.to_string() } else { short(count as f64) }
}

/// A duration in seconds, in at most 5 columns up to 9,999 s.
pub(super) fn seconds(seconds: f64) -> String {
    match seconds {
        it if it < 0.009_95 => format!("{:.1}ms", 1e3 * it),
        it if it < 0.999_5 => format!("{:.0}ms", 1e3 * it),
        it if it < 99.95 => format!("{it:.1}s"),
        it => format!("{it:.0}s"),
    }
}

/// An age, given in milliseconds, in at most 6 columns.
pub(super) fn age(ms: u64) -> String {
    let days = ms / 86_400_000;
    if days < 100 { span(ms) } else { format!("{days}d") }
}

pub(super) fn percent(share: f64) -> String {
    format!("{:.0}%", 100.0 * share)
}

pub(super) fn bytes(bytes: u64) -> String {
    match bytes as f64 / f64::from(1 << 20) {
        mebibytes if mebibytes < 1_023.5 => format!("{mebibytes:.0} MiB"),
        mebibytes => format!("{:.1} GiB", mebibytes / 1_024.0),
    }
}

/// A bar of `width` columns, filled to this share.
pub(super) fn bar(share: f64, width: usize) -> String {
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (share.clamp(0.0, 1.0) * 8.0 * width as f64).round() as usize;
    let full = "█".repeat(eighths / 8) + PARTS[eighths % 8];
    format!("{full:<width$}")
}

/// The width of a text, in columns of the terminal.
pub(super) fn width(text: &str) -> usize {
    Span::raw(text).width()
}

/// The text, cut to at most `columns` columns. A cut text ends with `…`.
pub(super) fn cut(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    match columns {
        0 => String::new(),
        columns => format!("{}…", &text[..prefix_bytes(text, columns - 1)]),
    }
}

/// The text, cut in the middle to at most `columns` columns. For a worker's name, which has the launcher at its
/// beginning and the slot at its end.
pub(super) fn cut_middle(text: &str, columns: usize) -> String {
    if width(text) <= columns || columns < 3 {
        return cut(text, columns);
    }
    let reversed: String = text.chars().rev().collect();
    let tail = &reversed[..prefix_bytes(&reversed, (columns - 1).div_ceil(2))];
    let head = &text[..prefix_bytes(text, columns - 1 - width(tail))];
    format!("{head}…{}", tail.chars().rev().collect::<String>())
}

/// The text in lines of at most `columns` columns. Lines are broken between words, and within words that are longer.
pub(super) fn wrap(text: &str, columns: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for paragraph in text.lines() {
        let mut line = String::new();
        for word in paragraph.split_whitespace() {
            if !line.is_empty() && width(&line) + 1 + width(word) <= columns {
                line = format!("{line} {word}");
                continue;
            }
            lines.extend(Some(std::mem::replace(&mut line, word.to_owned())).filter(|line| !line.is_empty()));
            while width(&line) > columns {
                let first = line.chars().next().map_or(0, char::len_utf8);
                let rest = line.split_off(prefix_bytes(&line, columns).max(first));
                lines.push(std::mem::replace(&mut line, rest));
            }
        }
        lines.extend(Some(line).filter(|line| !line.is_empty()));
    }
    lines
}

/// As [`wrap`], but at most `max_lines` lines. The last line of a text that has more ends with `…`.
pub(super) fn wrap_at_most(text: &str, columns: usize, max_lines: usize) -> Vec<String> {
    let mut lines = wrap(text, columns);
    if lines.len() > max_lines {
        lines.truncate(max_lines);
        lines[max_lines - 1] = cut(&format!("{} …", lines[max_lines - 1]), columns);
    }
    lines
}

/// The length in bytes of the longest prefix that takes at most `columns` columns.
fn prefix_bytes(text: &str, columns: usize) -> usize {
    let mut taken = 0;
    for (start, character) in text.char_indices() {
        taken += width(&text[start..start + character.len_utf8()]);
        if taken > columns {
            return start;
        }
    }
    text.len()
}
