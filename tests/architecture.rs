//! Holds the tree to the table in `src/lib.rs`: who imports whom, and which crates stay in which room.

#![allow(clippy::unwrap_used, reason = "a test that cannot read the tree fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Rooms and what each may import.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("kernels", &[]),
    ("enum_names", &[]),
    ("protocol", &[]),
    ("batching", &[]),
    ("backoff", &[]),
    ("shutdown", &[]),
    ("config", &["protocol", "batching", "backoff"]),
    ("telemetry", &[]),
    ("model", &["protocol", "batching", "config"]),
    ("broker", &["protocol", "backoff", "config"]),
    ("fetch", &["batching", "config"]),
    ("engine", &["protocol", "batching", "telemetry", "model"]),
    ("python", &["protocol", "shutdown", "config", "model", "engine"]),
    (
        "worker",
        &[
            "protocol",
            "batching",
            "backoff",
            "shutdown",
            "config",
            "telemetry",
            "fetch",
            "model",
            "engine",
            "broker",
        ],
    ),
    ("launcher", &["protocol", "backoff", "shutdown", "config"]),
    ("admin", &["protocol", "shutdown", "telemetry", "broker", "launcher"]),
    ("cli", &["protocol", "shutdown"]),
    ("client", &["protocol", "config", "broker"]),
    ("app", &["config", "shutdown", "launcher", "worker", "broker", "client", "cli", "commands"]),
    (
        "commands",
        &[
            "protocol",
            "batching",
            "shutdown",
            "config",
            "telemetry",
            "model",
            "engine",
            "python",
            "broker",
            "client",
            "worker",
            "launcher",
            "admin",
            "cli",
        ],
    ),
];

/// Crates, and the only folder that may name them.
const FENCES: &[(&str, &str)] = &[
    ("lapin", "src/broker/amqp"),
    ("sconce_broker_stream", "src/broker/amqp"),
    ("sconce_kernels", "src/model"),
    ("candle_core", "src/model"),
    ("candle_nn", "src/model"),
    ("memmap2", "src/model"),
    ("safetensors", "src/model"),
    ("tokenizers", "src/model"),
    ("hf_hub", "src/model"),
    ("symphonia", "src/model/sound"),
    ("rubato", "src/model/sound"),
    ("rusty_s3", "src/fetch"),
    ("rustls_platform_verifier", "src/fetch"),
    ("tokio_rustls", "src/fetch"),
    ("realfft", "src/model/sound"),
    ("flacenc", "src/model/tasks/speak"),
    ("png", "src/model/tasks/image_generation"),
    ("sconce_phonemes", "src/model/tasks/speak"),
    ("arrow_array", "src/client/batch_file"),
    ("csv", "src/client/batch_file"),
    ("parquet", "src/client/batch_file"),
    ("axum", "src/admin"),
    ("prometheus_client", "src/admin"),
    ("ratatui", "src/commands"),
    ("opentelemetry", "src/telemetry"),
    ("opentelemetry_http", "src/telemetry"),
    ("opentelemetry_otlp", "src/telemetry"),
    ("opentelemetry_sdk", "src/telemetry"),
    ("nvml_wrapper", "src/launcher/gpus"),
    ("clap", "src/cli"),
    ("indicatif", "src/commands"),
];

/// Clap's entry point is the app's too. A setting chooses the kernels' vector units, by the kernels' names for them.
const EXCEPTIONS: &[(&str, &str)] =
    &[("clap", "src/app/mod.rs"), ("sconce_kernels", "src/config/settings.rs")];

/// The crate of the CPU's kernels.
const KERNELS: &str = "crates/kernels";

/// Crates that the kernels may name: none that knows tensors, models or settings.
const KERNELS_NEED: &[&str] = &["libc", "memmap2", "pulp", "rayon", "serde", "thiserror"];

/// The same for their tests and benches.
const KERNELS_TESTS_NEED: &[&str] = &["criterion", "half", "libm", "mimalloc"];

/// The crates in `examples/`.
const EXAMPLES: [&str; 4] = ["image-classifier", "segformer", "text-head", "toy-generator"];

/// Rooms without any asynchronous runtime.
const WITHOUT_TOKIO: &[&str] = &["protocol", "batching", "backoff", "model", "config", "cli", "telemetry"];

/// A source file, without its inline tests.
struct Source {
    path: String,
    room: String,
    /// Its module, as [`module`] gives it.
    module: String,
    /// The paths that it imports or names, as they are written.
    paths: Vec<Named>,
}

/// A path in the code.
struct Named {
    path: Vec<String>,
    /// The name that it gets in its module, if it is imported.
    imported_as: Option<String>,
}

/// Every source file.
fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    let mut folders = vec![root.join("src"), root.join(KERNELS).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                // Tests of a room may import what they need.
                folders.extend(Some(path).filter(|path| !path.ends_with("tests")));
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let path = path.strip_prefix(root).unwrap().to_str().unwrap();
                found.push(source(path, &text));
            }
        }
    }
    assert!(found.len() > 40, "the tree was not found");
    found
}

fn source(path: &str, text: &str) -> Source {
    let tests = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    let module = module(path);
    let room = module.split("::").next().unwrap().to_owned();
    Source { path: path.to_owned(), room, module, paths: paths(&tokens(&text[..tests])) }
}

/// Words, `::`, and single characters. Comments are left out, and of texts and characters only the quotes are kept.
fn tokens(code: &str) -> Vec<&str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut rest = code;
    let mut found = Vec::new();
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(hashes) = rest
            .strip_prefix('r')
            .and_then(|raw| raw.find('"'))
            .filter(|hashes| rest[1..][..*hashes].chars().all(|c| c == '#'))
        {
            let (begin, end) = (hashes + 2, format!("\"{}", "#".repeat(hashes)));
            rest[begin..].find(&end).map_or(rest.len(), |at| begin + at + end.len())
        } else if first == '"' {
            let mut is_escaped = false;
            let end = rest[1..].find(|c| {
                let ends = c == '"' && !is_escaped;
                is_escaped = c == '\\' && !is_escaped;
                ends
            });
            end.map_or(rest.len(), |end| end + 2)
        } else if first == '\'' {
            // A lifetime has no second quote.
            let inner = rest[1..].chars().next().map_or(0, char::len_utf8);
            let is_escape = rest[1..].starts_with('\\');
            let end = if is_escape { rest[3..].find('\'').map(|end| end + 3) } else { Some(1 + inner) };
            end.filter(|end| rest[*end..].starts_with('\'')).map_or(1, |end| end + 1)
        } else if is_word(first) {
            rest.find(|c| !is_word(c)).unwrap_or(rest.len())
        } else if rest.starts_with("::") {
            2
        } else {
            first.len_utf8()
        };
        let (token, after) = rest.split_at(length);
        let is_left_out = token.starts_with("//") || token.starts_with("/*") || first.is_whitespace();
        found.extend(Some(token).filter(|_| !is_left_out));
        rest = after;
    }
    found
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_') && !token.ends_with('"')
}

/// The paths in `use` declarations, and all others with at least one `::`.
fn paths(tokens: &[&str]) -> Vec<Named> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let next = tokens.get(at + 1).copied().unwrap_or_default();
        if tokens[at] == "use" && next != "<" {
            at += 1;
            use_tree(tokens, &mut at, &[], &mut found);
        } else if is_name(tokens[at]) && next == "::" {
            let mut path = vec![tokens[at].to_owned()];
            while tokens.get(at + 1) == Some(&"::") && tokens.get(at + 2).is_some_and(|name| is_name(name)) {
                path.push(tokens[at + 2].to_owned());
                at += 2;
            }
            found.push(Named { path, imported_as: None });
        }
        at += 1;
    }
    found
}

/// Reads one branch of a `use` declaration, whose path begins with `before`.
fn use_tree(tokens: &[&str], at: &mut usize, before: &[String], found: &mut Vec<Named>) {
    let (mut path, mut alias, mut is_self) = (before.to_vec(), None, false);
    while let Some(token) = tokens.get(*at) {
        match *token {
            "::" => {}
            "as" => {
                *at += 1;
                alias = tokens.get(*at).map(|name| (*name).to_owned());
            }
            "{" => {
                while !matches!(tokens.get(*at), Some(&"}") | None) {
                    *at += 1;
                    use_tree(tokens, at, &path, found);
                }
                *at += 1;
                return;
            }
            ";" | "," | "}" => break,
            // In a group it stands for what is before the group.
            "self" if !path.is_empty() => is_self = true,
            name => path.push(name.to_owned()),
        }
        *at += 1;
    }
    // After the last comma of a group there is no branch.
    if path.len() > before.len() || is_self {
        let imported_as = alias.or_else(|| path.last().cloned());
        found.push(Named { path, imported_as });
    }
}

impl Source {
    /// A path as a module path from the root of its crate, with `kernels` before those of the kernels; none for one of
    /// another crate, or of something in scope.
    fn absolute(&self, path: &[String], modules: &dyn Fn(&str) -> bool) -> Option<Vec<String>> {
        let own: Vec<&str> = self.module.split("::").filter(|name| !["lib", "main"].contains(name)).collect();
        let ups = path.iter().take_while(|name| *name == "super").count();
        let (base, rest) = match path[0].as_str() {
            "crate" if self.room == "kernels" => (vec!["kernels"], &path[1..]),
            "crate" => (Vec::new(), &path[1..]),
            "self" => (own, &path[1..]),
            "super" => (own[..own.len().checked_sub(ups)?].to_vec(), &path[ups..]),
            first if modules(&format!("{}::{first}", self.module)) => (own, path),
            _ => return None,
        };
        Some(base.into_iter().map(str::to_owned).chain(rest.iter().cloned()).collect())
    }

    /// Whether it names a third-party crate.
    fn names(&self, name: &str) -> bool {
        self.paths.iter().any(|named| named.path[0] == name)
    }

    /// The rooms that it imports.
    fn rooms(&self) -> Vec<String> {
        let paths = self.paths.iter().filter_map(|named| self.absolute(&named.path, &|_| false));
        paths.filter_map(|path| path.into_iter().next()).collect()
    }

    /// The path of an item that this module imports by this name.
    fn import(&self, name: &str, is_known: &dyn Fn(&str) -> bool) -> Option<Vec<String>> {
        let import = self.paths.iter().find(|named| named.imported_as.as_deref() == Some(name))?;
        self.absolute(&import.path, is_known)
    }

    /// The modules of its room that it needs, also by way of one that imports an item from another. The face of a folder
    /// (`mod.rs`) and what is in the folder belong together, and may name each other.
    fn needs(&self, room: &BTreeMap<String, &Source>) -> Vec<String> {
        let is_known = |name: &str| room.contains_key(name);
        let own = &self.module;
        let mut found = BTreeSet::new();
        let mut left: Vec<_> =
            self.paths.iter().filter_map(|named| self.absolute(&named.path, &is_known)).collect();
        let mut seen = BTreeSet::new();
        while let Some(path) = left.pop() {
            for length in 1..=path.len() {
                let other = path[..length].join("::");
                let Some(module) = room.get(&other) else { continue };
                // A name before `::` is the module's, also where a function has it too.
                let is_module = path.len() > length + 1 && room.contains_key(&path[..=length].join("::"));
                let item = path.get(length).filter(|_| other != *own && !is_module);
                let import = item.and_then(|item| module.import(item, &is_known));
                left.extend(import.filter(|import| seen.insert(import.clone())));
                let is_face =
                    own.starts_with(&format!("{other}::")) || other.starts_with(&format!("{own}::"));
                if other != *own && !is_face {
                    found.insert(other);
                }
            }
        }
        found.into_iter().collect()
    }
}

/// `src/a/b/mod.rs` and `src/a/b.rs` are `a::b`; what is in the crate of the kernels is in `kernels`, as in a room.
fn module(path: &str) -> String {
    let inside = match path.strip_prefix("crates/kernels/src/") {
        Some(inside) => format!("kernels/{inside}"),
        None => path.strip_prefix("src/").unwrap_or(path).to_owned(),
    };
    inside.trim_end_matches(".rs").trim_end_matches("/mod").replace('/', "::")
}

#[test]
fn imports_only_point_down() {
    let allowed: BTreeMap<_, _> = MAY_IMPORT.iter().copied().collect();
    let mut wrong = Vec::new();
    for source in sources() {
        if source.room == "lib" || source.room == "main" {
            continue;
        }
        let may =
            allowed.get(source.room.as_str()).unwrap_or_else(|| panic!("{}: no such room", source.path));
        for room in source.rooms() {
            let is_wrong = allowed.contains_key(room.as_str()) && !may.contains(&room.as_str());
            if is_wrong && room != source.room {
                wrong.push(format!("{} imports {room}", source.path));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The modules and the other room that `src/room/one.rs` is seen to need if this is its code. Beside it are
/// `two`, and `three` with `four` in it.
fn seen(code: &str) -> (Vec<String>, bool) {
    let [face, one, two, three, four] = [
        ("src/room/mod.rs", "pub use two::Public; use self::two::{Private as Renamed};"),
        ("src/room/one.rs", code),
        ("src/room/two.rs", ""),
        ("src/room/three/mod.rs", ""),
        ("src/room/three/four.rs", ""),
    ]
    .map(|(path, code)| source(path, code));
    let room = [&face, &one, &two, &three, &four].into_iter().map(|it| (it.module.clone(), it)).collect();
    (one.needs(&room), one.rooms().contains(&"other".to_owned()))
}

fn needs_two(code: &str) {
    assert_eq!(seen(code).0, ["room::two"], "{code}");
}

#[test]
fn an_import_of_an_item_is_seen() {
    needs_two("use super::two::Item;");
    needs_two("pub(super) use crate::room::two::Item as Other;");
}

#[test]
fn an_import_of_a_module_is_seen() {
    needs_two("use super::two;");
    needs_two("use crate::room::two as it;");
}

#[test]
fn an_import_of_all_items_is_seen() {
    needs_two("use super::two::*;");
}

#[test]
fn imports_in_a_group_are_seen() {
    needs_two("use super::{two, Item};");
    needs_two("use super::{\n    Item,\n    two::{self, Other},\n};");
    needs_two("use {crate::room::two::Item, std::fs};");
    assert_eq!(
        seen("use super::{three::{four::Item}, two};").0,
        ["room::three", "room::three::four", "room::two"]
    );
}

#[test]
fn an_import_from_further_up_is_seen() {
    needs_two("use super::super::room::two::Item;");
    assert!(seen("use super::super::other::Item;").1);
}

#[test]
fn an_import_within_a_function_or_an_inline_path_is_seen() {
    needs_two("fn main() { use super::two::Item; }");
    needs_two("fn main() { super::two::run(); }");
    needs_two("fn main(it: &crate::room::two::Item<'_>) -> char { '\\'' }");
}

#[test]
fn an_item_that_another_module_imports_is_seen() {
    needs_two("use super::Public;");
    needs_two("use crate::room::{self as room, Renamed};");
    assert_eq!(seen("use super::Own;").0, [""; 0]);
}

#[test]
fn another_room_is_seen_in_each_form() {
    for code in [
        "use crate::other;",
        "use crate::{other::Item, room};",
        "use crate::other as it;",
        "$crate::other::run()",
    ] {
        assert!(seen(code).1, "{code}");
    }
}

#[test]
fn what_is_no_import_is_not_seen() {
    let code = "// use super::two;\nlet a = \"use super::two;\"; let b = r#\"use super::two;\"#; impl Sized + use<'a>;";
    assert_eq!(seen(code), (Vec::new(), false));
    assert!(!seen("use crate::otherwise;").1);
}

#[test]
fn no_files_of_a_room_need_each_other_in_a_circle() {
    let sources = sources();
    let mut wrong = Vec::new();
    for room in MAY_IMPORT.iter().map(|(room, _)| *room) {
        let own: BTreeMap<String, &Source> =
            sources.iter().filter(|it| it.room == room).map(|it| (it.module.clone(), it)).collect();
        let mut edges: BTreeMap<String, Vec<String>> =
            own.iter().map(|(name, source)| (name.clone(), source.needs(&own))).collect();
        // Files that need none that is left are taken out, until only circles are.
        loop {
            let free: Vec<String> = edges
                .iter()
                .filter(|(_, needs)| needs.iter().all(|it| !edges.contains_key(it)))
                .map(|(name, _)| name.clone())
                .collect();
            if free.is_empty() {
                break;
            }
            free.iter().for_each(|name| _ = edges.remove(name));
        }
        for (name, needs) in &edges {
            let needs: Vec<&String> = needs.iter().filter(|it| edges.contains_key(*it)).collect();
            wrong.push(format!("{name} needs {needs:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn third_party_crates_stay_behind_their_fences() {
    let mut wrong = Vec::new();
    for source in sources().into_iter().filter(|source| source.room != "kernels") {
        for (name, folder) in FENCES {
            let excepted = EXCEPTIONS.contains(&(name, source.path.as_str()));
            if source.names(name) && !source.path.starts_with(folder) && !excepted {
                wrong.push(format!("{} names {name}", source.path));
            }
        }
        if WITHOUT_TOKIO.contains(&source.room.as_str()) && source.names("tokio") {
            wrong.push(format!("{} names tokio", source.path));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_kernels_know_no_tensors_models_or_settings() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join(KERNELS).join("Cargo.toml");
    let text = fs::read_to_string(manifest).unwrap();
    let named = |section: &str| -> Vec<String> {
        let lines = text.lines().skip_while(|line| *line != section).skip(1);
        let lines = lines.take_while(|line| !line.starts_with('['));
        lines.filter_map(|line| line.split_once(" = ")).map(|(name, _)| name.to_owned()).collect()
    };
    assert_eq!(named("[dependencies]"), KERNELS_NEED);
    assert_eq!(named("[dev-dependencies]"), KERNELS_TESTS_NEED);
}

#[test]
fn every_file_opens_by_saying_what_it_decides() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for source in sources() {
        let text = fs::read_to_string(root.join(&source.path)).unwrap();
        assert!(text.starts_with("//! "), "{}", source.path);
    }
}

#[test]
fn the_examples_of_models_of_ones_own_stay_short() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for example in EXAMPLES {
        let text = fs::read_to_string(root.join("examples").join(example).join("src/main.rs")).unwrap();
        let is_code = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
        assert!(text.lines().filter(is_code).count() < 100, "{example}");
    }
}

/// Tests compile them as examples of sconce itself, where a dependency that the manifest lacks would not be missed.
#[test]
fn every_crate_that_an_example_names_is_in_its_manifest() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let manifest = fs::read_to_string(folder.join("../Cargo.toml")).unwrap();
    let dependency = |line: &str| line.split_once(" = ").map(|(name, _)| name.to_owned());
    let ours = manifest.lines().filter_map(dependency).chain(["sconce".to_owned()]).collect::<BTreeSet<_>>();
    for example in EXAMPLES {
        let code = fs::read_to_string(folder.join(example).join("src/main.rs")).unwrap();
        let manifest = fs::read_to_string(folder.join(example).join("Cargo.toml")).unwrap();
        let its = manifest.lines().filter_map(dependency).collect::<BTreeSet<_>>();
        // A name ends a longer one too: `ring::` is in `String::`.
        let is_named = |name: &&String| {
            let path = format!("{}::", name.replace('-', "_"));
            let is_whole = |at: usize| !code[..at].ends_with(|it: char| it.is_alphanumeric() || it == '_');
            code.match_indices(&path).any(|(at, _)| is_whole(at))
        };
        let named = ours.iter().filter(is_named).collect::<Vec<_>>();
        assert!(named.len() > 1 && named.iter().all(|name| its.contains(*name)), "{example}: {named:?}");
    }
}
