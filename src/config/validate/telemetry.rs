//! The rules of `[telemetry]`.

use ::config::Value;

use super::super::settings::Telemetry;
use super::section::{Expected, Section};
use super::values::{share, text};

/// Where a collector takes spans.
const TRACES: &str = "/v1/traces";

/// Reads `[telemetry]`.
pub(super) fn telemetry(mut section: Section<'_>) -> Option<Telemetry> {
    let otlp_endpoint = section.read("otlp_endpoint", endpoint);
    let trace_sample = section.read("trace_sample", share);
    section.finish();
    Some(Telemetry { otlp_endpoint: otlp_endpoint?, trace_sample: trace_sample? })
}

/// The address of a collector, or `""` for none.
fn endpoint(value: &Value) -> Result<Option<String>, Expected> {
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
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (authority, None),
    };
    let is_host_letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let inside = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_host = match inside {
        Some(inside) => inside.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.chars().all(is_host_letter),
    };
    if !is_host {
        return Err("an address with a host: http://host:4318".to_owned());
    }
    if port.is_some_and(|port| !port.parse::<u16>().is_ok_and(|port| port > 0)) {
        return Err("an address whose port is a number from 1 to 65535".to_owned());
    }
    if !path.chars().all(|c| is_host_letter(c) || matches!(c, '/' | '~' | '%' | '+')) {
        return Err("an address that ends with its path, without `?`, `#` or blanks".to_owned());
    }
    if path.trim_end_matches('/').ends_with(TRACES) {
        return Err(format!(
            "the collector's address alone, such as http://host:4318: {TRACES} is put behind it"
        ));
    }
    Ok(Some(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_taken_as_they_are() {
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
    fn what_is_no_address_is_refused() {
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
    fn an_address_with_the_path_of_traces_is_refused_because_it_would_be_doubled() {
        for address in ["http://c:4318/v1/traces", "http://c/v1/traces/", "https://c/otlp/v1/traces"] {
            assert!(endpoint(&Value::from(address)).is_err_and(|words| words.contains("/v1/traces is put")));
        }
        assert!(endpoint(&Value::from("http://c:4318/v1")).is_ok());
    }
}
