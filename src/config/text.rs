//! How values are written: as TOML text, for problems and for the effective settings, and durations and sizes with
//! their units. Does no I/O. Its callers mask secrets and check ranges.

use std::time::Duration;

use ::config::{Value, ValueKind};
use jiff::fmt::friendly::{Spacing, SpanParser, SpanPrinter};

/// Writes the text as a TOML basic string. JSON's escapes are valid in TOML. DEL is escaped too, as TOML requires.
pub(super) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007F")
}

/// Writes a value as TOML. A table is written as `{…}`, since its keys are settings of their own.
pub(super) fn as_toml(value: &Value) -> String {
    match &value.kind {
        ValueKind::String(text) => quoted(text),
        ValueKind::Array(items) => {
            let items: Vec<String> = items.iter().map(as_toml).collect();
            format!("[{}]", items.join(", "))
        }
        ValueKind::Table(_) => "{…}".to_owned(),
        ValueKind::Nil => "nothing".to_owned(),
        other => other.to_string(),
    }
}

/// The text with control characters replaced, so that it stays on one line.
pub(super) fn without_controls(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// The expected form of a duration, for problems.
pub(super) const A_DURATION: &str =
    "a duration with its unit, such as \"500ms\", \"20s\", \"1m30s\" or \"1h\"";
/// The expected form of a size, for problems.
pub(super) const A_SIZE: &str = "a size with its unit, such as \"100B\", \"512KiB\" or \"16MiB\"";

const SIZE_UNITS: [(&str, u64); 7] = [
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

/// Reads `"5ms"`, `"2s"`, `"1m30s"`, `"1h"`; none for anything else, such as a bare number.
pub(super) fn parse_duration(text: &str) -> Option<Duration> {
    // The parser also takes signs, "ago" and clock times ("00:01:30"), which are not written in settings.
    if !text.starts_with(|c: char| c.is_ascii_digit()) || text.contains([':', '+', '-']) {
        return None;
    }
    SpanParser::new().parse_unsigned_duration(text).ok()
}

/// Writes a duration so that [`parse_duration`] reads it back.
pub(super) fn show_duration(duration: Duration) -> String {
    SpanPrinter::new().spacing(Spacing::None).unsigned_duration_to_string(&duration)
}

/// Reads a whole number of bytes with its unit; none for anything else. Case does not matter.
pub(super) fn parse_size(text: &str) -> Option<u64> {
    let digits_end = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(digits_end);
    let unit = unit.trim();
    let (_, bytes) = SIZE_UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?;
    number.parse::<u64>().ok()?.checked_mul(*bytes)
}

/// Writes a size in the largest unit that leaves a whole number.
pub(super) fn show_size(bytes: u64) -> String {
    let fitting = SIZE_UNITS.iter().find(|(_, unit)| bytes >= *unit && bytes.is_multiple_of(*unit));
    match fitting {
        Some((name, unit)) => format!("{}{name}", bytes / unit),
        None => format!("{bytes}B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::config::{Config, File, FileFormat};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_text_survives_being_quoted(text in "\\PC*|[\\x00-\\x9f\"\\\\]*") {
            let written = format!("key = {}", quoted(&text));
            let read = Config::builder()
                .add_source(File::from_str(&written, FileFormat::Toml))
                .build()
                .expect("quoted text is TOML");
            prop_assert_eq!(read.get_string("key").expect("a string"), text);
        }
    }

    #[test]
    fn values_are_shown_as_they_would_be_written() {
        assert_eq!(as_toml(&Value::from(3_i64)), "3");
        assert_eq!(as_toml(&Value::from(true)), "true");
        assert_eq!(as_toml(&Value::from(vec!["a", "b"])), r#"["a", "b"]"#);
    }

    #[test]
    fn durations_carry_a_unit() {
        for (written, milliseconds) in [
            ("5ms", 5),
            ("0ms", 0),
            ("2s", 2_000),
            ("1.5s", 1_500),
            ("1m30s", 90_000),
            ("1m 30s", 90_000),
            ("1h", 3_600_000),
        ] {
            let expected = Some(Duration::from_millis(milliseconds));
            assert_eq!(parse_duration(written), expected, "{written}");
        }
    }

    #[test]
    fn a_bare_number_or_a_strange_unit_is_no_duration() {
        for written in [
            "",
            "5",
            "0",
            "-5ms",
            "+5ms",
            "5ms ago",
            "5 parsecs",
            "ms",
            "00:01:30",
            "PT5S",
            "1d",
            "99999999999999999999h",
        ] {
            assert_eq!(parse_duration(written), None, "{written}");
        }
    }

    #[test]
    fn sizes_are_whole_numbers_of_bytes() {
        for (written, bytes) in [
            ("100B", 100),
            ("512KiB", 524_288),
            ("8MB", 8_000_000),
            ("16MiB", 16_777_216),
            ("16 mib", 16_777_216),
            ("1GiB", 1_073_741_824),
        ] {
            assert_eq!(parse_size(written), Some(bytes), "{written}");
        }
    }

    #[test]
    fn a_bare_number_or_a_strange_unit_is_no_size() {
        for written in ["", "5", "MiB", "-1B", "1.5MiB", "5 parsecs", "5M", "99999999999GiB"] {
            assert_eq!(parse_size(written), None, "{written}");
        }
    }

    proptest! {
        #[test]
        fn shown_durations_and_sizes_read_back(nanos in 0..u64::MAX / 2, bytes: u64) {
            let duration = Duration::from_nanos(nanos);
            prop_assert_eq!(parse_duration(&show_duration(duration)), Some(duration));
            prop_assert_eq!(parse_size(&show_size(bytes)), Some(bytes));
        }
    }

    #[test]
    fn durations_and_sizes_are_shown_in_short_form() {
        assert_eq!(show_duration(Duration::from_secs(90)), "1m30s");
        assert_eq!(show_duration(Duration::from_millis(2)), "2ms");
        assert_eq!(show_duration(Duration::ZERO), "0s");
        assert_eq!(show_size(8 << 20), "8MiB");
        assert_eq!(show_size(1_500), "1500B");
    }
}
