//! Reads the addresses of brokers, of the collector of spans, and of the launcher's HTTP server. Connects to nothing,
//! and never puts a broker's address into an error.

use std::fmt;
use std::net::SocketAddr;

use ::config::{Value, ValueKind};
use serde::{Deserialize, Serialize};

use super::super::redact::split_urls;
use super::reader::Expected;
use super::values::{parse_array, text};

/// The collector's path for spans.
const TRACES_PATH: &str = "/v1/traces";

/// A value that must not be shown: `Debug` masks it, and there is no `Display`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The secret itself, for the code that uses it. It must never be logged.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// A secret, or `""` for none.
pub(crate) fn optional_secret(value: &Value) -> Result<Option<Secret>, Expected> {
    let written = text(value)?;
    Ok((!written.is_empty()).then(|| Secret::new(written)))
}

/// The addresses of `broker.url`: one text with commas between them, or a list.
pub(crate) fn urls(value: &Value) -> Result<Vec<Secret>, Expected> {
    match &value.kind {
        ValueKind::String(text) if text.trim_start().starts_with('[') => {
            urls(&parse_array(text).ok_or_else(expected_address)?)
        }
        ValueKind::String(text) => {
            split_urls(text.trim()).into_iter().map(without_comma).map(checked_address).collect()
        }
        ValueKind::Array(items) if !items.is_empty() => items
            .iter()
            .map(|item| match &item.kind {
                ValueKind::String(text) => checked_address(text.trim()),
                _ => Err(expected_address()),
            })
            .collect(),
        _ => Err(expected_address()),
    }
}

/// A part of [`split_urls`] without the comma at its end. `split_urls` keeps separators, because the masking of
/// passwords uses it too and shows the text between addresses.
fn without_comma(part: &str) -> &str {
    part.trim_end().strip_suffix(',').unwrap_or(part).trim()
}

fn checked_address(address: &str) -> Result<Secret, Expected> {
    match address.split_once(':') {
        Some(("embedded", path)) if !path.is_empty() => {}
        Some((scheme, rest)) if is_amqp(scheme) => {
            let rest = rest.strip_prefix("//").ok_or_else(expected_address)?;
            check_authority(rest)?;
        }
        _ => return Err(expected_address()),
    }
    Ok(Secret::new(address))
}

fn is_amqp(scheme: &str) -> bool {
    scheme.eq_ignore_ascii_case("amqp") || scheme.eq_ignore_ascii_case("amqps")
}

/// Checks the part of an address after `amqp://`.
fn check_authority(rest: &str) -> Result<(), Expected> {
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let host_and_port = match authority.rsplit_once('@') {
        Some((user, _)) if user.contains('@') => return Err(expected_encoding()),
        Some((_, host_and_port)) => host_and_port,
        None if path.contains('@') => return Err(expected_encoding()),
        None => authority,
    };
    // The AMQP client does not recognize a host in brackets, and would connect to localhost instead.
    if host_and_port.starts_with('[') {
        return Err("a host name or IPv4 address; IPv6 needs a host name".to_owned());
    }
    let (host, port) = match host_and_port.split_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (host_and_port, None),
    };
    if !is_host(host) {
        return Err(expected_host("amqp://user:password@host:5672/vhost"));
    }
    check_port(port)
}

fn is_host_character(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_')
}

fn is_host(text: &str) -> bool {
    !text.is_empty() && text.chars().all(is_host_character)
}

/// Whether a collector's path may have this character.
fn is_path_character(c: char) -> bool {
    is_host_character(c) || matches!(c, '/' | '~' | '%' | '+')
}

fn check_port(port: Option<&str>) -> Result<(), Expected> {
    match port {
        Some(port) if !port.parse::<u16>().is_ok_and(|port| port > 0) => {
            Err("an address whose port is a number from 1 to 65535".to_owned())
        }
        _ => Ok(()),
    }
}

fn expected_host(example: &str) -> Expected {
    format!("an address with a host: {example}")
}

fn expected_address() -> Expected {
    "an address with amqp:// or amqps://, or several with commas between them".to_owned()
}

fn expected_encoding() -> Expected {
    "an address in which `@`, `/`, `?` and `#` of user and password are percent-encoded: `@` as %40"
        .to_owned()
}

/// The address of a collector, or `""` for none.
pub(crate) fn endpoint(value: &Value) -> Result<Option<String>, Expected> {
    let address = text(value)?;
    if address.is_empty() {
        return Ok(None);
    }
    let rest = ["http://", "https://"].iter().find_map(|scheme| address.strip_prefix(scheme));
    let rest = rest.ok_or("\"\", or an address with http:// or https://: http://127.0.0.1:4318")?;
    if rest.contains('@') {
        return Err("an address without user and password: OTEL_EXPORTER_OTLP_HEADERS takes them".to_owned());
    }
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let (host, port) = match authority.rsplit_once(':') {
        // In an IPv6 address without a port, as in `[::1]`, the last colon is within the brackets.
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (authority, None),
    };
    let is_host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(inside) => inside.parse::<std::net::Ipv6Addr>().is_ok(),
        None => is_host(host),
    };
    if !is_host {
        return Err(expected_host("http://host:4318"));
    }
    check_port(port)?;
    if !path.chars().all(is_path_character) {
        return Err("an address that ends with its path, without `?`, `#` or blanks".to_owned());
    }
    if path.trim_end_matches('/').ends_with(TRACES_PATH) {
        return Err(format!(
            "the collector's address alone, such as http://host:4318: {TRACES_PATH} is appended to it"
        ));
    }
    Ok(Some(address))
}

/// A socket's address, or `""` for none.
pub(crate) fn listen(value: &Value) -> Result<Option<SocketAddr>, Expected> {
    let expected =
        || "an address and a port, such as \"127.0.0.1:9464\" or \"[::]:9464\", or \"\"".to_owned();
    match text(value).map_err(|_| expected())?.trim() {
        "" => Ok(None),
        address => address.parse().map(Some).map_err(|_| expected()),
    }
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
    fn several_addresses_may_be_separated_by_commas_or_be_a_list() {
        let expected = Ok(vec!["amqp://a:p@h1".to_owned(), "amqps://h2:5671/v".to_owned()]);
        assert_eq!(read("amqp://a:p@h1, amqps://h2:5671/v"), expected);
        assert_eq!(read(r#"["amqp://a:p@h1", "amqps://h2:5671/v"]"#), expected);
        let list = Value::from(vec!["amqp://a:p@h1", "amqps://h2:5671/v"]);
        assert_eq!(urls(&list).map(|urls| urls.len()), Ok(2));
    }

    #[test]
    fn an_invalid_address_is_refused_without_being_repeated() {
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

    #[test]
    fn a_collectors_address_is_taken_as_it_is() {
        for address in [
            "http://127.0.0.1:4318",
            "http://127.0.0.1:4318/",
            "https://collector.example.org/otlp/team-1",
            "http://[::1]:4318",
            "http://[::1]",
        ] {
            assert_eq!(endpoint(&Value::from(address)), Ok(Some(address.to_owned())));
        }
        assert_eq!(endpoint(&Value::from("")), Ok(None));
    }

    #[test]
    fn an_invalid_collectors_address_is_refused() {
        for address in [
            "127.0.0.1:4318",
            "grpc://h:4317",
            "http://",
            "http://:4318",
            "http://h:port",
            "http://h:0",
            "http://h:70000",
            "http://me:secret@h",
            "http://h/v1?token=x",
            "http://h/a b",
            "http://h h",
            "http://[::1",
            "http://[h]:1",
        ] {
            assert!(endpoint(&Value::from(address)).is_err(), "{address}");
        }
    }

    #[test]
    fn a_collectors_address_that_already_has_the_traces_path_is_refused() {
        for address in ["http://c:4318/v1/traces", "http://c/v1/traces/", "https://c/otlp/v1/traces"] {
            assert!(
                endpoint(&Value::from(address)).is_err_and(|error| error.contains("/v1/traces is appended"))
            );
        }
        assert!(endpoint(&Value::from("http://c:4318/v1")).is_ok());
    }
}
