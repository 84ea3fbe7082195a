//! The nearest known name to a mistyped one. Pure.

/// The message for a key that is not known in its section.
pub(super) fn unknown_key<'a>(key: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    match nearest(key, known) {
        Some(name) => format!("unknown key; did you mean `{name}`?"),
        None => "unknown key".to_owned(),
    }
}

/// The closest known name, if the written one is likely a slip: at most a third of its letters wrong.
fn nearest<'a>(written: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let written = written.to_ascii_lowercase().replace(['-', ' '], "_");
    let distances = known.into_iter().map(|name| (strsim::osa_distance(&written, name), name));
    let close = distances.filter(|(distance, name)| *distance <= (name.len() / 3).max(1));
    close.min().map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: [&str; 4] = ["name", "task_queue", "reply_queue", "url"];

    #[test]
    fn a_slip_finds_the_name_that_was_meant() {
        assert_eq!(nearest("nmae", KNOWN), Some("name"));
        assert_eq!(nearest("taskqueue", KNOWN), Some("task_queue"));
        assert_eq!(nearest("Task-Queue", KNOWN), Some("task_queue"));
        assert_eq!(nearest("urls", KNOWN), Some("url"));
    }

    #[test]
    fn something_else_entirely_finds_nothing() {
        assert_eq!(nearest("gpu", KNOWN), None);
        assert_eq!(nearest("concurrency", KNOWN), None);
        assert_eq!(nearest("", KNOWN), None);
    }
}
