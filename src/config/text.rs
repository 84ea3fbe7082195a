//! Writes a value as TOML text, for problems and for the effective settings. Pure; its callers mask secrets.

use ::config::{Value, ValueKind};

/// A TOML basic string: JSON's escapes are TOML's too, but TOML refuses a bare DEL as well.
pub(super) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007F")
}

/// A value as TOML; a table is only named, since its keys are settings of their own.
pub(super) fn of_value(value: &Value) -> String {
    match &value.kind {
        ValueKind::String(text) => quoted(text),
        ValueKind::Array(items) => {
            let items: Vec<String> = items.iter().map(of_value).collect();
            format!("[{}]", items.join(", "))
        }
        ValueKind::Table(_) => "{…}".to_owned(),
        ValueKind::Nil => "nothing".to_owned(),
        other => other.to_string(),
    }
}

/// The text with control characters replaced, so that it stays on its line.
pub(super) fn without_controls(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
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
        assert_eq!(of_value(&Value::from(3_i64)), "3");
        assert_eq!(of_value(&Value::from(true)), "true");
        assert_eq!(of_value(&Value::from(vec!["a", "b"])), r#"["a", "b"]"#);
    }
}
