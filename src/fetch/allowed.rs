//! Decides whether the settings admit a URL that a task names, and where its file is. Compares parsed parts of URLs,
//! never their text. Pure: resolves no host and opens no file.

use std::collections::HashSet;
use std::path::PathBuf;

use percent_encoding::percent_decode_str;
use url::Url;

use crate::config::AllowedSource;

/// Maximum length of a URL in bytes. Signed URLs of S3 are shorter.
const MAX_URL_BYTES: usize = 4_096;
/// Escapes that would change the meaning of a path if a server decoded them before it splits the path: of `/`, `\` and
/// NUL.
const AMBIGUOUS_ESCAPES: [&str; 3] = ["%2f", "%5c", "%00"];

/// Where a file is.
#[derive(Debug, PartialEq, Eq)]
pub enum Location {
    /// At the relative path `path` in `folder`, which the settings name.
    File { folder: PathBuf, path: PathBuf },
    /// On a server. `allows_private` says whether its host may have a private address, such as 10.0.0.1.
    Web { url: Url, allows_private: bool },
    /// In a bucket of S3. `allows_private` is as for [`Location::Web`].
    Bucket { bucket: String, key: String, allows_private: bool },
}

impl Location {
    /// The server that has the file. All local files count as one server, and all buckets of S3 as another.
    pub(super) fn server(&self) -> &str {
        match self {
            Self::File { .. } => "file",
            Self::Web { url, .. } => url.host_str().unwrap_or_default(),
            Self::Bucket { .. } => "s3",
        }
    }
}

/// How many servers the settings admit, counted as by [`Location::server`].
pub(super) fn servers(allowed: &[AllowedSource]) -> usize {
    let server = |entry: &AllowedSource| match entry.url.scheme() {
        scheme @ ("file" | "s3") => scheme.to_owned(),
        _ => entry.url.host_str().unwrap_or_default().to_owned(),
    };
    allowed.iter().map(server).collect::<HashSet<_>>().len()
}

/// Finds out where the file of the URL `written` is.
///
/// # Errors
/// Why the file is not fetched. The text is put after the URL.
pub fn locate(written: &str, allowed: &[AllowedSource]) -> Result<Location, String> {
    if written.len() > MAX_URL_BYTES {
        return Err(format!("has {} bytes; a URL may have at most {MAX_URL_BYTES}", written.len()));
    }
    if written.contains(|c: char| c.is_control() || c == '\\') {
        return Err("has control characters or backslashes".to_owned());
    }
    // The parser resolves `..` segments, so that they cannot be seen later.
    if written.split(['/', '?', '#']).any(|part| percent_decode_str(part).eq(*b"..")) {
        return Err("has the path segment \"..\"".to_owned());
    }
    let url = Url::parse(written).map_err(|error| format!("is no URL: {error}"))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err("has a user name or a password".to_owned());
    }
    if url.fragment().is_some() {
        return Err("has a fragment (#)".to_owned());
    }
    let path = url.path().to_ascii_lowercase();
    if AMBIGUOUS_ESCAPES.iter().any(|encoded| path.contains(encoded)) {
        return Err("has an encoded slash, backslash or NUL in its path".to_owned());
    }
    let Some(entry) = allowed.iter().find(|entry| is_below(&url, &entry.url)) else {
        return Err("is not below one of the allowed_sources of this pool".to_owned());
    };
    let allows_private = entry.private;
    match url.scheme() {
        "http" | "https" => Ok(Location::Web { url, allows_private }),
        _ if url.query().is_some() => Err("has a query (?)".to_owned()),
        "file" => {
            let paths = entry.url.to_file_path().and_then(|folder| Ok((folder, url.to_file_path()?)));
            let (folder, path) = paths.map_err(|()| "is no path".to_owned())?;
            let path = path.strip_prefix(&folder).map_err(|_| "is not below its folder".to_owned())?;
            Ok(Location::File { path: path.to_owned(), folder })
        }
        _ => {
            // The parser drops `.` segments, and a store has other objects without them.
            let path = written.split(['?', '#']).next().unwrap_or_default();
            if path.split('/').any(|part| percent_decode_str(part).eq(*b".")) {
                return Err("has the path segment \".\"".to_owned());
            }
            let key = url.path().strip_prefix('/').unwrap_or_default();
            if key.starts_with('/') {
                return Err("has a key that begins with a slash, which is not supported".to_owned());
            }
            let key = percent_decode_str(key).decode_utf8();
            let key = key.map_err(|_| "is not UTF-8".to_owned())?.into_owned();
            Ok(Location::Bucket {
                bucket: url.host_str().unwrap_or_default().to_owned(),
                key,
                allows_private,
            })
        }
    }
}

/// Whether `url` names something below `prefix`, whose path ends with a slash.
fn is_below(url: &Url, prefix: &Url) -> bool {
    let is_same_host = url.scheme() == prefix.scheme()
        && url.host() == prefix.host()
        && url.port_or_known_default() == prefix.port_or_known_default();
    let (Some(mut segments), Some(prefix_segments)) = (url.path_segments(), prefix.path_segments()) else {
        return false;
    };
    let folders = prefix_segments.filter(|segment| !segment.is_empty());
    let is_in_folders = folders.into_iter().all(|folder| segments.next() == Some(folder));
    is_same_host && is_in_folders && segments.any(|segment| !segment.is_empty())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn allowed() -> Vec<AllowedSource> {
        ["file:///data/in/", "https://media.org/in/", "http://10.0.0.5:81/", "s3://bucket/in/"]
            .map(|url| AllowedSource { url: Url::parse(url).unwrap(), private: url.starts_with("http:") })
            .to_vec()
    }

    fn web(url: &str, allows_private: bool) -> Result<Location, String> {
        Ok(Location::Web { url: Url::parse(url).unwrap(), allows_private })
    }

    #[test]
    fn what_is_below_an_allowed_source_is_located() {
        let file = |path: &str| Ok(Location::File { folder: "/data/in".into(), path: path.into() });
        let located = |url: &str| locate(url, &allowed());
        assert_eq!(located("file:///data/in/a%20b/c.wav"), file("a b/c.wav"));
        assert_eq!(located("file://localhost/data/in/c.wav"), file("c.wav"));
        assert_eq!(located("https://media.org/in/c.wav?a=b"), web("https://media.org/in/c.wav?a=b", false));
        assert_eq!(located("HTTPS://MEDIA.org:443/in/c"), web("https://media.org/in/c", false));
        assert_eq!(located("http://10.0.0.5:81/c"), web("http://10.0.0.5:81/c", true));
        let bucket = |key: &str| {
            Ok(Location::Bucket { bucket: "bucket".to_owned(), key: key.to_owned(), allows_private: false })
        };
        assert_eq!(located("s3://bucket/in/a%20b.flac"), bucket("in/a b.flac"));
    }

    #[test]
    fn what_is_not_below_an_allowed_source_is_refused() {
        for url in [
            "file:///etc/passwd",
            "file:///data/in",
            "file:///data/in/",
            "file:///data/inside/c.wav",
            "file:///data/in/../../etc/passwd",
            "file:///data/in/%2e%2E/secret",
            "file:///data/in/..%2f..%2fetc%2fpasswd",
            "file:///data/in/a%00b",
            "file:///data/in/a\\..\\b",
            "file:///data/in/.\n./b",
            "file://other/data/in/c.wav",
            "file:///data/in/c.wav?x",
            "/data/in/c.wav",
            "https://media.org/inside",
            "https://media.org/IN/c",
            "https://media.org:8443/in/c",
            "https://media.org.evil.org/in/c",
            "https://media.org@evil.org/in/c",
            "https://me:pw@media.org/in/c",
            "https://evil.org/https://media.org/in/c",
            "https://media.org/in/../out/c",
            "https://media.org/in/..%2fout/c",
            "https://media.org/in/%2e%2e/out/c",
            "https://media.org/in/c#https://evil.org",
            "http://media.org/in/c",
            "http://10.0.0.5/c",
            "http://10.0.0.5:8181/c",
            "s3://bucket2/in/c",
            "s3://bucket/out/c",
            "s3://bucket/in/../out/c",
            "s3://bucket//in/c",
            "s3://bucket/in/./c",
            "s3://bucket/in/%2e/c",
            "s3://bucket/in/c?versionId=1",
            "ftp://media.org/in/c",
            "gopher://10.0.0.5:81/c",
            "",
        ] {
            assert!(locate(url, &allowed()).is_err(), "{url}");
        }
        let long = format!("https://media.org/in/{}", "a".repeat(MAX_URL_BYTES));
        assert!(locate(&long, &allowed()).unwrap_err().contains("4096"), "{long}");
        assert!(locate("https://media.org/in/c", &[]).is_err());
    }

    proptest! {
        #[test]
        fn no_text_leads_out_of_a_folder(tail in "(\\.|%2e|%2E|/|%2f|\\\\|%5c|a|\t|\\?|#|@|:){0,12}") {
            if let Ok(Location::File { path, .. }) = locate(&format!("file:///data/in/{tail}"), &allowed()) {
                let is_plain = |part: std::path::Component<'_>| matches!(part, std::path::Component::Normal(_));
                prop_assert!(path.components().all(is_plain), "{path:?}");
            }
            if let Ok(Location::Web { url, .. }) = locate(&format!("https://media.org/in/{tail}"), &allowed()) {
                prop_assert!(url.host_str() == Some("media.org") && url.path().starts_with("/in/"), "{url}");
            }
        }
    }
}
