//! The path of one setting, in three spellings: `pool[0].model` in messages and flags, `pool.0.model` in flags,
//! `POOL__0__MODEL` in variables. Does no I/O, and does not know which settings exist.

use std::fmt;

/// One step of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The name of a section or of a setting.
    Key(String),
    /// The position in a list, counted from 0.
    Index(usize),
}

/// The steps from the root to one setting; at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SettingPath(Vec<Step>);

impl SettingPath {
    /// Parses a variable's name, given without the prefix. None if it is malformed, for example with an empty level.
    pub(super) fn from_variable(name: &str) -> Option<Self> {
        let steps = name.split("__").map(|level| parse_step(&level.to_lowercase()));
        steps.collect::<Option<_>>().map(Self)
    }

    /// Parses a flag's path, with an index in brackets or between dots. None if it is malformed.
    pub(super) fn from_flag(text: &str) -> Option<Self> {
        let mut steps = Vec::new();
        for part in text.trim().split('.') {
            let (name, indices) = part.split_at(part.find('[').unwrap_or(part.len()));
            steps.push(parse_step(name)?);
            for index in indices.split_inclusive(']') {
                let digits = index.strip_prefix('[')?.strip_suffix(']')?;
                steps.push(Step::Index(digits.parse().ok()?));
            }
        }
        Some(Self(steps))
    }

    /// The steps, from the root.
    pub(super) fn steps(&self) -> &[Step] {
        &self.0
    }
}

impl fmt::Display for SettingPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, step) in self.0.iter().enumerate() {
            match step {
                Step::Key(key) if position == 0 => f.write_str(key)?,
                Step::Key(key) => write!(f, ".{key}")?,
                Step::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

fn parse_step(text: &str) -> Option<Step> {
    let is_key_letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if text.is_empty() || !text.chars().all(is_key_letter) {
        return None;
    }
    if text.chars().all(|c| c.is_ascii_digit()) {
        return text.parse().ok().map(Step::Index);
    }
    Some(Step::Key(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flag(text: &str) -> Option<String> {
        SettingPath::from_flag(text).map(|path| path.to_string())
    }

    fn variable(text: &str) -> Option<String> {
        SettingPath::from_variable(text).map(|path| path.to_string())
    }

    #[test]
    fn the_three_spellings_name_the_same_setting() {
        let expected = Some("pool[0].batch.max_tokens".to_owned());
        assert_eq!(flag("pool[0].batch.max_tokens"), expected);
        assert_eq!(flag("pool.0.batch.max_tokens"), expected);
        assert_eq!(variable("POOL__0__BATCH__MAX_TOKENS"), expected);
    }

    #[test]
    fn a_malformed_path_is_none() {
        for text in ["", ".", "a.", "a..b", "a[", "a[x]", "a[0]b", "[0]", "a[-1]", "a b", "a:b"] {
            assert_eq!(flag(text), None, "{text}");
        }
        for text in ["", "A__", "__A", "A____B", "A__99999999999999999999999"] {
            assert_eq!(variable(text), None, "{text}");
        }
    }
}
