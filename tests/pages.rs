//! Holds the pages to what they promise: links and anchors lead somewhere, paths of pages that sources and messages name
//! exist, and the users' pages stay short. What `sh` blocks say of commands is checked in `src/cli`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot read the tree fails")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The most words of the users' pages together.
const MOST_WORDS: usize = 24_000;
/// The most pages to which the README may link, besides the index.
const MOST_PAGES: usize = 6;
const INDEX: &str = "docs/README.md";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// All files below a folder of the repository, or the file itself.
fn files(path: &str) -> Vec<String> {
    let whole = root().join(path);
    if !whole.is_dir() {
        return vec![path.to_owned()];
    }
    let entries = fs::read_dir(whole).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let below = entries.filter(|name| !["target", "fixtures", "__pycache__"].contains(&name.as_str()));
    let mut found: Vec<_> = below.flat_map(|name| files(&format!("{path}/{name}"))).collect();
    found.sort();
    found
}

fn pages() -> Vec<String> {
    let named = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "python/README.md"];
    let further = ["benches/RESULTS.md", "deploy/kubernetes/README.md"];
    let docs = files("docs").into_iter().filter(|file| file.ends_with(".md"));
    named.into_iter().chain(further).map(str::to_owned).chain(docs).collect()
}

fn users_pages() -> Vec<String> {
    let of_users = |page: &String| page.starts_with("docs/") && !page.starts_with("docs/contributing/");
    pages().into_iter().filter(of_users).collect()
}

/// The lines of a page outside its blocks of code.
fn prose(text: &str) -> Vec<&str> {
    let mut in_code = false;
    let lines = text.lines().filter(|line| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        !in_code && !is_fence
    });
    lines.collect()
}

/// The targets of a page's links, without those of the web.
fn links(text: &str) -> Vec<String> {
    // What stands between single backquotes is no link, but may be a link's text.
    let text = prose(text).join("\n");
    let text: String = text.split('`').step_by(2).collect();
    let (mut found, mut rest) = (Vec::new(), text.as_str());
    while let Some((_, behind)) = rest.split_once("](") {
        let (target, after) = behind.split_once(')').unwrap();
        found.push(target.to_owned());
        rest = after;
    }
    found.retain(|target| !target.contains("://"));
    found
}

/// A page's anchors, as GitHub makes them of its headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for heading in prose(text).iter().filter(|line| line.starts_with('#')) {
        let title = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
        let anchor = kept.collect::<String>().replace(' ', "-");
        let mut numbered = (0..).map(|number| match number {
            0 => anchor.clone(),
            _ => format!("{anchor}-{number}"),
        });
        found.insert(numbered.find(|anchor| !found.contains(anchor)).unwrap());
    }
    found
}

/// A path beside a page, without `..`.
fn beside(page: &str, path: &str) -> PathBuf {
    let mut whole = Path::new(page).parent().unwrap().to_owned();
    for component in Path::new(path).components() {
        match component {
            Component::ParentDir => assert!(whole.pop(), "{page}: {path} leads out of the repository"),
            other => whole.push(other),
        }
    }
    whole
}

/// Why a path with an optional anchor leads nowhere.
fn missing(path: &Path, anchor: Option<&str>) -> Option<String> {
    let whole = root().join(path);
    if !whole.exists() {
        return Some(format!("{} does not exist", path.display()));
    }
    let anchor = anchor?;
    let has_anchor = path.extension().is_some_and(|ending| ending == "md")
        && anchors(&fs::read_to_string(whole).unwrap()).contains(anchor);
    (!has_anchor).then(|| format!("{} has no anchor {anchor}", path.display()))
}

#[test]
fn every_link_and_anchor_of_a_page_leads_somewhere() {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for page in pages() {
        for link in links(&read(&page)) {
            seen += 1;
            let (path, anchor) =
                link.split_once('#').map_or((link.as_str(), None), |(path, it)| (path, Some(it)));
            let path = if path.is_empty() { PathBuf::from(&page) } else { beside(&page, path) };
            wrong.extend(missing(&path, anchor).map(|why| format!("{page}: {link}: {why}")));
        }
    }
    assert!(seen > 200, "{seen} links were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_page_that_a_source_or_a_message_names_exists() {
    let places =
        ["src", "crates", "tests", "scripts", "python", "deploy", "benches/peers", "config", "examples"];
    let single = [
        "Makefile",
        "Cargo.toml",
        "build.rs",
        "Dockerfile",
        "Dockerfile.cuda",
        "Dockerfile.python",
        "docker-compose.yml",
    ];
    let mut wrong = Vec::new();
    let mut seen = 0;
    for file in places.into_iter().chain(single).flat_map(files) {
        let Ok(text) = fs::read_to_string(root().join(&file)) else { continue };
        for (start, _) in text.match_indices("docs/").chain(text.match_indices("benches/RESULTS")) {
            let is_of_path = |letter: char| letter.is_ascii_alphanumeric() || "/-_.#".contains(letter);
            let named = text[start..].split(|letter| !is_of_path(letter)).next().unwrap_or_default();
            let Some((page, behind)) = named.split_once(".md") else { continue };
            seen += 1;
            let anchor = behind.strip_prefix('#').map(|anchor| anchor.trim_end_matches('.'));
            // A release's notes are tried with an anchor that no page has.
            let anchor = anchor.filter(|_| !file.ends_with("test_release.py"));
            wrong.extend(
                missing(Path::new(&format!("{page}.md")), anchor).map(|why| format!("{file}: {why}")),
            );
        }
    }
    assert!(seen > 40, "{seen} names were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_script_and_target_of_make_on_a_page_exists() {
    let makefile = read("Makefile");
    let mut seen = 0;
    for page in pages() {
        let text = read(&page);
        for block in text.split("```sh\n").skip(1).filter_map(|behind| behind.split("```").next()) {
            let code = block.lines().map(|line| line.split(" #").next().unwrap_or_default());
            for words in code.map(|line| line.split_whitespace().collect::<Vec<_>>()) {
                if words.first() == Some(&"make") && words.get(1).is_some_and(|target| !target.contains('='))
                {
                    seen += 1;
                    let rule = format!("\n{}:", words[1]);
                    assert!(makefile.contains(&rule), "{page}: make {} is no target", words[1]);
                }
                for script in words.iter().filter(|word| word.starts_with("scripts/")) {
                    seen += 1;
                    assert!(root().join(script).exists(), "{page}: {script} does not exist");
                }
            }
        }
    }
    assert!(seen > 10, "{seen} commands were found");
}

#[test]
fn the_users_pages_stay_short_enough_to_be_read() {
    let words = |page: &String| read(page).split_whitespace().count();
    let counts: Vec<_> = users_pages().iter().map(|page| (words(page), page.clone())).collect();
    let all: usize = counts.iter().map(|(words, _)| words).sum();
    assert!(all <= MOST_WORDS, "the users' pages have {all} words, more than {MOST_WORDS}: {counts:?}");
}

#[test]
fn the_readme_links_to_few_pages_and_the_index_to_all() {
    let pages_of = |page: &str| -> BTreeSet<String> {
        let targets = links(&read(page)).into_iter();
        let paths = targets.map(|link| link.split('#').next().unwrap_or_default().to_owned());
        let whole =
            paths.filter(|path| !path.is_empty()).map(|path| beside(page, &path).display().to_string());
        let is_page = |path: &String| {
            path.ends_with(".md") && (path.starts_with("docs/") || path.starts_with("benches/"))
        };
        whole.filter(is_page).collect()
    };
    let mut of_readme = pages_of("README.md");
    assert!(of_readme.remove(INDEX), "the README links to the index");
    assert!(of_readme.len() <= MOST_PAGES, "the README links to {of_readme:?}");
    let of_index = pages_of(INDEX);
    let docs = files("docs").into_iter().filter(|file| file.ends_with(".md") && file != INDEX);
    let unlisted: Vec<_> = docs.filter(|page| !of_index.contains(page)).collect();
    assert!(unlisted.is_empty(), "the index lacks {unlisted:?}");
}
