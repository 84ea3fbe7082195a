//! The nearest known name to a mistyped one. Pure.

/// The known name closest to what was written, if it is close enough to be a slip: at most a third
/// of its letters wrong.
pub(super) fn nearest<'a>(written: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|name| (distance(written, name), name))
        .filter(|(distance, name)| *distance <= (name.len() / 3).max(1))
        .min()
        .map(|(_, name)| name)
}

/// Letters to insert, drop, change or swap with their neighbour to make one word of the other.
fn distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().map(fold).collect();
    let b: Vec<char> = b.chars().map(fold).collect();
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i.max(j)
            } else {
                let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                let mut least = change.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                let swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
                if swapped {
                    least = least.min(rows[i - 2][j - 2] + 1);
                }
                least
            };
        }
    }
    rows[a.len()][b.len()]
}

fn fold(letter: char) -> char {
    match letter {
        '-' | ' ' => '_',
        other => other.to_ascii_lowercase(),
    }
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
