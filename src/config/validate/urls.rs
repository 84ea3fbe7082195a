//! Decides what is a broker address. Splits and checks; connects to nothing, and never puts an
//! address into its complaints.

use ::config::{Value, ValueKind};

use super::super::redact::split_urls;
use super::super::settings::Secret;
use super::section::Expected;
use super::values::parse_array;

/// The addresses of `broker.url`: one text with commas between them, or a list.
pub(super) fn urls(value: &Value) -> Result<Vec<Secret>, Expected> {
    match &value.kind {
        ValueKind::String(text) if text.trim_start().starts_with('[') => {
            urls(&parse_array(text).ok_or_else(an_address)?)
        }
        ValueKind::String(text) => split_urls(text.trim())
            .into_iter()
            .map(|part| part.trim_end().strip_suffix(',').unwrap_or(part).trim())
            .map(checked)
            .collect(),
        ValueKind::Array(items) if !items.is_empty() => items
            .iter()
            .map(|item| match &item.kind {
                ValueKind::String(text) => checked(text.trim()),
                _ => Err(an_address()),
            })
            .collect(),
        _ => Err(an_address()),
    }
}

fn checked(address: &str) -> Result<Secret, Expected> {
    match address.split_once(':') {
        Some(("embedded", path)) if !path.is_empty() => {}
        Some((scheme, rest)) if is_amqp(scheme) => {
            let rest = rest.strip_prefix("//").ok_or_else(an_address)?;
            check_authority(rest)?;
        }
        _ => return Err(an_address()),
    }
    Ok(Secret::new(address))
}

fn is_amqp(scheme: &str) -> bool {
    scheme.eq_ignore_ascii_case("amqp") || scheme.eq_ignore_ascii_case("amqps")
}

fn check_authority(rest: &str) -> Result<(), Expected> {
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let host_and_port = match authority.rsplit_once('@') {
        Some((user, _)) if user.contains('@') => return Err(encoded()),
        Some((_, host_and_port)) => host_and_port,
        None if path.contains('@') => return Err(encoded()),
        None => authority,
    };
    // The AMQP client reads an address in brackets as no host at all, and connects to localhost.
    if host_and_port.starts_with('[') {
        return Err("a host name or IPv4 address; IPv6 needs a host name".to_owned());
    }
    let (host, port) = match host_and_port.split_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (host_and_port, None),
    };
    let is_host_letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if host.is_empty() || !host.chars().all(is_host_letter) {
        return Err("an address with a host: amqp://user:password@host:5672/vhost".to_owned());
    }
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
    if port.is_some_and(|port| !is_port(port)) {
        return Err("an address whose port is a number from 1 to 65535".to_owned());
    }
    Ok(())
}

fn an_address() -> Expected {
    "an address with amqp:// or amqps://, or several with commas between them".to_owned()
}

fn encoded() -> Expected {
    "an address in which `@`, `/`, `?` and `#` of user and password are percent-encoded: `@` as %40"
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<String>, Expected> {
        let urls = urls(&Value::from(text))?;
        Ok(urls.iter().map(|url| url.expose().to_owned()).collect())
    }

    #[test]
    fn addresses_are_taken_as_they_are() {
        for text in [
            "amqp://guest:guest@127.0.0.1:5672/%2f",
            "amqps://me:p%40w@rabbit.example.org",
            "AMQP://rabbit_1/v?heartbeat=5",
            "amqp://me:a,b@host",
            "embedded:/tmp/a.sock",
        ] {
            assert_eq!(read(text), Ok(vec![text.to_owned()]));
        }
    }

    #[test]
    fn several_addresses_come_with_commas_or_as_a_list() {
        let expected = Ok(vec!["amqp://a:p@h1".to_owned(), "amqps://h2:5671/v".to_owned()]);
        assert_eq!(read("amqp://a:p@h1, amqps://h2:5671/v"), expected);
        assert_eq!(read(r#"["amqp://a:p@h1", "amqps://h2:5671/v"]"#), expected);
        let list = Value::from(vec!["amqp://a:p@h1", "amqps://h2:5671/v"]);
        assert_eq!(urls(&list).map(|urls| urls.len()), Ok(2));
    }

    #[test]
    fn what_is_no_address_is_refused_without_being_repeated() {
        for text in [
            "",
            " ",
            ",",
            "rabbit:5672",
            "http://host",
            "amqp:host",
            "amqp://",
            "amqp://:5672",
            "amqp:///v",
            "amqp://hunter2@",
            "amqp://me:hunter2@host:port",
            "amqp://host:0",
            "amqp://host:99999",
            "amqp://me:hunter2",
            "amqp://me:hun/ter2@host",
            "amqp://me:hun@ter2@host",
            "amqp://[::1]:5672",
            "amqp://ho st",
            "amqp://a,b",
            "embedded:",
            "[]",
            "[1]",
            "[\"amqp://host\"",
            "amqp://a,,amqp://b",
        ] {
            let expected = read(text).expect_err(text);
            assert!(!expected.contains("hunter2"), "{expected}");
        }
    }
}
