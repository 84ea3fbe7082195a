//! Masks the passwords of broker addresses. When in doubt it masks, because addresses may be malformed. Never
//! parses an address for use: `read::urls` does that.

const MASK: &str = "***";

/// The text with the password of every address in it replaced by `***`; all else is unchanged. Takes one address,
/// several with commas between them, or text that only resembles one. Within an address, everything from the first
/// `:` after `//` to the last `@` is masked.
pub fn redact_url(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut within_password = false;
    for address in split_urls(text) {
        let (head, rest) = split_head(address);
        match rest.rfind('@') {
            // This part looked like an address, but is the end of the password before it.
            Some(at_sign) if within_password => shown.push_str(&format!("{head}{MASK}{}", &rest[at_sign..])),
            None if within_password => shown.push_str(&format!("{head}{MASK}")),
            _ => shown.push_str(&redact_one(address)),
        }
        // Whether a password begins in this part and may end in a later one.
        let begins = !head.is_empty() && password_without_host(rest).is_some();
        within_password = !rest.contains('@') && (within_password || begins);
    }
    shown
}

/// Splits the address after its scheme and slashes, if it has any.
fn split_head(address: &str) -> (&str, &str) {
    address.split_at(address.find("//").map_or(0, |slashes| slashes + 2))
}

/// Splits before each `amqp://`, `amqps://` and `embedded:` that follows a separator. A separator stays at the end of
/// the part before it. A comma that no scheme follows, as in a password, splits nothing.
pub(super) fn split_urls(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut start = 0;
    for (index, _) in text.char_indices().skip(1) {
        let after_separator = text[..index].ends_with(is_separator);
        if after_separator && starts_with_scheme(&text[index..]) && index > start {
            parts.push(&text[start..index]);
            start = index;
        }
    }
    parts.push(&text[start..]);
    parts
}

fn is_separator(character: char) -> bool {
    character.is_whitespace() || matches!(character, ',' | ';' | '"' | '\'' | '[')
}

fn starts_with_scheme(text: &str) -> bool {
    ["amqp://", "amqps://", "embedded:"]
        .iter()
        .any(|scheme| text.get(..scheme.len()).is_some_and(|head| head.eq_ignore_ascii_case(scheme)))
}

fn redact_one(address: &str) -> String {
    let (head, rest) = split_head(address);
    if let Some(at_sign) = rest.rfind('@') {
        return match rest[..at_sign].find(':') {
            Some(colon) => format!("{head}{}{MASK}{}", &rest[..=colon], &rest[at_sign..]),
            None => address.to_owned(),
        };
    }
    match password_without_host(rest) {
        Some(colon) if !head.is_empty() => format!("{head}{}{MASK}", &rest[..=colon]),
        _ => address.to_owned(),
    }
}

/// Finds a password in `user:password` without an `@`, where it stands in the place of a port. Returns the position of
/// the colon before it. None if it can be a port.
fn password_without_host(rest: &str) -> Option<usize> {
    let host_end = match rest.strip_prefix('[') {
        Some(inside) => inside.find(']').map_or(0, |bracket| bracket + 2),
        None => 0,
    };
    let colon = host_end + rest[host_end..].find([':', '/', '?', '#'])?;
    let port = rest[colon..].strip_prefix(':')?;
    let after_digits = port.trim_start_matches(|c: char| c.is_ascii_digit());
    let is_port = after_digits.is_empty()
        || after_digits.starts_with(['/', '?', '#', ']'])
        || after_digits.starts_with(is_separator);
    (!is_port).then_some(colon)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_password_is_masked_and_the_user_kept() {
        for (written, shown) in [
            ("amqp://me:pw@host:5672/%2f", "amqp://me:***@host:5672/%2f"),
            ("amqps://me:p%40w@host", "amqps://me:***@host"),
            ("AMQP://me:pw@host", "AMQP://me:***@host"),
            ("amqp://:pw@host", "amqp://:***@host"),
            ("amqp://me:@host", "amqp://me:***@host"),
        ] {
            assert_eq!(redact_url(written), shown);
        }
    }

    #[test]
    fn an_address_without_a_password_is_shown_as_it_is() {
        for written in [
            "amqp://host:5672/%2f",
            "amqp://me@host",
            "amqp://[::1]:5672/v",
            "amqp://a:1,amqp://b:2",
            "embedded:/tmp/a.sock",
            "org/name@revision",
            "cuda:1",
            "",
        ] {
            assert_eq!(redact_url(written), written);
        }
    }

    #[test]
    fn each_of_several_addresses_is_masked() {
        assert_eq!(
            redact_url("amqp://a:p1@h1, amqps://b:p2@h2,amqp://h3:5672"),
            "amqp://a:***@h1, amqps://b:***@h2,amqp://h3:5672"
        );
        assert_eq!(
            redact_url(r#"["amqp://a:p1@h1","amqp://b:p2@h2"]"#),
            r#"["amqp://a:***@h1","amqp://b:***@h2"]"#
        );
    }

    #[test]
    fn a_malformed_address_shows_no_part_of_its_password() {
        for (written, shown) in [
            ("amqp://me:p@ss@host", "amqp://me:***@host"),
            ("amqp://me:p/s:s@host/v", "amqp://me:***@host/v"),
            ("amqp://me:p,b://s@host", "amqp://me:***@host"),
            ("amqp://me:p,s,amqp://a:q@h", "amqp://me:***amqp://***@h"),
            ("amqp://me:p,amqps://secret@host", "amqp://me:***amqps://***@host"),
            ("amqp://me:p,amqps://secret;amqp://it@host", "amqp://me:***amqps://***amqp://***@host"),
            ("amqp://me:secret", "amqp://me:***"),
            ("amqp://me:12secret/v", "amqp://me:***"),
            ("me:secret@host", "me:***@host"),
            ("amqp:me:secret@host", "amqp:***@host"),
            ("http://me:secret@host", "http://me:***@host"),
            ("url = amqp://me:secret@host", "url = amqp://me:***@host"),
        ] {
            assert_eq!(redact_url(written), shown);
        }
    }

    proptest! {
        #[test]
        fn no_password_is_ever_shown(
            password in "[^\\s]{0,6}S3CRET[^\\s]{0,6}",
            host in "[a-z]{1,8}",
        ) {
            let shown = redact_url(&format!("amqp://me:{password}@{host}:5672/%2f"));
            prop_assert!(!shown.contains("S3CRET"), "{}", shown);
        }

        #[test]
        fn any_text_can_be_redacted(text in "\\PC*") {
            redact_url(&text);
        }
    }
}
