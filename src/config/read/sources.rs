//! Reads `pool.allowed_sources`: prefixes of the URLs that tasks may give in the place of files. Fetches nothing.

use ::config::{Value, ValueKind};
use serde::{Deserialize, Serialize};
use url::{Host, Url};

use super::super::public_address::is_public;
use super::reader::Expected;
use super::values::{list, parse_array, switch, text};

/// The schemes of URLs that can be fetched.
pub(crate) const SCHEMES: [&str; 4] = ["file", "http", "https", "s3"];

/// A prefix of URLs that a task may give in the place of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllowedSource {
    /// A scheme, a host with its port, and a path that ends with `/`. The host of `s3` is the bucket, `file` has none.
    pub url: Url,
    /// Whether the host may have an address that is private, such as 10.0.0.1 or 127.0.0.1.
    pub private: bool,
}

/// A list whose items are URLs or tables `{ url = "…", private = true }`.
pub(crate) fn sources(value: &Value) -> Result<Vec<AllowedSource>, Expected> {
    match &value.kind {
        ValueKind::String(written) if written.trim_start().starts_with('[') => {
            sources(&parse_array(written).ok_or_else(expected_list)?)
        }
        ValueKind::String(_) => list(value)?.iter().map(|url| source(url, false)).collect(),
        ValueKind::Array(items) => items.iter().map(item).collect(),
        _ => Err(expected_list()),
    }
}

fn item(value: &Value) -> Result<AllowedSource, Expected> {
    let ValueKind::Table(fields) = &value.kind else {
        return source(&text(value).map_err(|_| expected_list())?, false);
    };
    if let Some(unknown) = fields.keys().find(|key| !["url", "private"].contains(&key.as_str())) {
        return Err(format!("entries with the keys url and private, got {unknown}"));
    }
    let url = text(fields.get("url").ok_or_else(expected_list)?)?;
    let private = match fields.get("private") {
        Some(value) => switch(value).map_err(|_| expected_list())?,
        None => false,
    };
    source(&url, private)
}

fn source(written: &str, private: bool) -> Result<AllowedSource, Expected> {
    let url = Url::parse(written).map_err(|error| format!("URLs, got {written:?} ({error})"))?;
    let is_file = url.scheme() == "file";
    let is_valid = SCHEMES.contains(&url.scheme())
        && url.has_host() != is_file
        && url.path().ends_with('/')
        && url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none()
        && (url.scheme() != "s3" || url.port().is_none());
    if !is_valid {
        return Err(format!(
            "URLs of the form scheme://host:port/path/, with a / at the end, where the scheme is one of {}; file:// has \
             no host, and the host of s3:// is the bucket",
            SCHEMES.join(", ")
        ));
    }
    let is_wildcard = |part: &str| part == "*" || part == "**";
    if url.host_str().is_some_and(|host| host.contains('*')) || url.path().split('/').any(is_wildcard) {
        return Err(format!(
            "URLs without *, got {written:?}: each host is named by itself, and a prefix covers everything below it"
        ));
    }
    if !private && names_private_host(&url) {
        return Err(format!(
            "{{ url = {written:?}, private = true }}, because the address of this host is private: otherwise no task \
             can fetch from it"
        ));
    }
    Ok(AllowedSource { url, private })
}

/// Whether the host of a web server is written as an address that is not public, or is this computer by its name. Other
/// names are resolved only when a file is fetched.
fn names_private_host(url: &Url) -> bool {
    match url.host().filter(|_| url.scheme().starts_with("http")) {
        Some(Host::Ipv4(address)) => !is_public(address.into()),
        Some(Host::Ipv6(address)) => !is_public(address.into()),
        Some(Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        None => false,
    }
}

/// The address of a service, or `""` for none.
pub(crate) fn service(value: &Value) -> Result<Option<Url>, Expected> {
    let expected = || "\"\", or an address such as \"https://minio.example.org:9000\"".to_owned();
    let written = text(value).map_err(|_| expected())?;
    if written.is_empty() {
        return Ok(None);
    }
    let url = Url::parse(&written).map_err(|_| expected())?;
    let is_plain = ["http", "https"].contains(&url.scheme())
        && url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none();
    if is_plain { Ok(Some(url)) } else { Err(expected()) }
}

fn expected_list() -> Expected {
    "a list such as [\"https://media.example.org/in/\", { url = \"http://10.0.0.5/in/\", private = true }]"
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(written: &str) -> Result<Vec<(String, bool)>, Expected> {
        let read = sources(&Value::from(written))?;
        Ok(read.into_iter().map(|it| (it.url.to_string(), it.private)).collect())
    }

    #[test]
    fn sources_are_urls_or_tables() {
        let all = r#"["file:///data/in/", {url = "http://10.0.0.5:81/", private = true}, {url = "s3://bucket/in/"}]"#;
        let expected =
            [("file:///data/in/", false), ("http://10.0.0.5:81/", true), ("s3://bucket/in/", false)];
        assert_eq!(read(all), Ok(expected.map(|(url, private)| (url.to_owned(), private)).to_vec()));
        assert_eq!(read("https://a.org/b/,https://c.org/").map(|all| all.len()), Ok(2));
        assert_eq!(read(""), Ok(Vec::new()));
    }

    #[test]
    fn a_source_without_a_whole_prefix_is_refused() {
        for wrong in [
            "https://host/in",
            "https://me@host/in/",
            "https://me:pw@host/",
            "https://host/?a=/",
            "https://host/#/",
            "ftp://host/",
            "file://host/data/",
            "s3://bucket:80/",
            "data/in/",
            "in/",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        assert!(read(r#"[{url = "https://host/", privat = true}]"#).unwrap_err().contains("privat"));
        for wrong in [r#"[{private = true}]"#, r#"[{url = "https://host/", private = "often"}]"#, "[1]"] {
            assert!(read(wrong).unwrap_err().starts_with("a list such as"), "{wrong}");
        }
    }

    #[test]
    fn a_source_that_could_never_match_is_refused() {
        for private in
            ["http://10.0.0.5/in/", "https://127.0.0.1:8443/", "http://[::1]/", "http://localhost:9000/in/"]
        {
            let error = read(private).unwrap_err();
            assert!(error.contains(private) && error.contains("private = true"), "{error}");
            assert!(read(&format!("[{{url = \"{private}\", private = true}}]")).is_ok(), "{private}");
        }
        assert!(
            read("http://8.8.8.8/in/,http://[2606:4700::1111]/,http://localhosts/,s3://127.0.0.1/").is_ok()
        );
        for wildcard in
            ["https://*.example.org/", "https://media*/in/", "https://host/*/", "s3://*/", "file:///data/**/"]
        {
            assert!(read(wildcard).unwrap_err().contains("without *"), "{wildcard}");
        }
    }
}
