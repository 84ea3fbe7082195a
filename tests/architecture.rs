//! Holds the tree to the table in `src/lib.rs`: who imports whom, and which crates stay in which room.

#![allow(clippy::unwrap_used, reason = "a test that cannot read the tree fails")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Rooms and what each may import.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("kernels", &[]),
    ("named", &[]),
    ("protocol", &[]),
    ("batching", &[]),
    ("backoff", &[]),
    ("shutdown", &[]),
    ("config", &["backoff"]),
    ("telemetry", &[]),
    ("model", &["protocol", "batching", "config"]),
    ("broker", &["protocol", "backoff", "config"]),
    ("fetch", &["config"]),
    ("engine", &["protocol", "batching", "telemetry", "model"]),
    ("python", &["protocol", "config", "model", "engine"]),
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
    ("flacenc", "src/protocol"),
    ("png", "src/protocol"),
    ("sconce_phonemes", "src/model/tasks/speak"),
    ("arrow_array", "src/client/batch_file"),
    ("arrow_cast", "src/client/batch_file"),
    ("arrow_csv", "src/client/batch_file"),
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

/// Rooms without any asynchronous runtime.
const WITHOUT_TOKIO: &[&str] = &["protocol", "batching", "backoff", "model", "config", "cli", "telemetry"];

struct Source {
    path: String,
    room: String,
    code: String,
}

/// Every source file, without its inline tests and comments.
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
                found.push(source(root, path));
            }
        }
    }
    assert!(found.len() > 40, "the tree was not found");
    found
}

fn source(root: &Path, path: PathBuf) -> Source {
    let text = fs::read_to_string(&path).unwrap();
    let tests = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    let code: String = text[..tests]
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .map(|line| format!("{line}\n"))
        .collect();
    let path = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
    let room = module(&path).split("::").next().unwrap().to_owned();
    Source { path, room, code }
}

fn names(code: &str, name: &str) -> bool {
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    code.match_indices(name).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        !before.is_some_and(is_word) && code[at + name.len()..].starts_with("::")
    })
}

/// Whether code names a room of this crate: `cli` is not named by `crate::client`.
fn imports(code: &str, room: &str) -> bool {
    let path = format!("crate::{room}");
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    code.match_indices(&path).any(|(at, _)| !code[at + path.len()..].starts_with(is_word))
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
        for (room, _) in MAY_IMPORT {
            if imports(&source.code, room) && *room != source.room && !may.contains(room) {
                wrong.push(format!("{} imports {room}", source.path));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The files beside it in its folder, or in a folder beside, that a file names in its code, by module path. The
/// face of a folder (`mod.rs`) and what is in the folder belong together, and may name each other.
fn needs(source: &Source, room: &BTreeMap<String, &Source>) -> Vec<String> {
    let own = module(&source.path);
    let above = own.rsplit_once("::").map_or("", |(above, _)| above);
    let is_needed = |other: &&String| {
        let is_face = own.starts_with(&format!("{other}::")) || other.starts_with(&format!("{own}::"));
        let sibling = other.strip_prefix(&format!("{above}::")).filter(|rest| !rest.contains("::"));
        let by_crate = other.strip_prefix("kernels::").unwrap_or(other);
        let written = [Some(format!("crate::{by_crate}::")), sibling.map(|name| format!("super::{name}::"))];
        **other != own && !is_face && written.iter().flatten().any(|written| source.code.contains(written))
    };
    room.keys().filter(is_needed).cloned().collect()
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
fn no_files_of_a_room_need_each_other_in_a_circle() {
    let sources = sources();
    let modules: BTreeMap<String, &Source> =
        sources.iter().map(|source| (module(&source.path), source)).collect();
    let mut wrong = Vec::new();
    for room in MAY_IMPORT.iter().map(|(room, _)| *room) {
        let own: BTreeMap<String, &Source> =
            modules.iter().filter(|(_, it)| it.room == room).map(|(name, it)| (name.clone(), *it)).collect();
        let mut edges: BTreeMap<String, Vec<String>> =
            own.iter().map(|(name, source)| (name.clone(), needs(source, &own))).collect();
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
            if names(&source.code, name) && !source.path.starts_with(folder) && !excepted {
                wrong.push(format!("{} names {name}", source.path));
            }
        }
        if WITHOUT_TOKIO.contains(&source.room.as_str()) && names(&source.code, "tokio") {
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
    for example in ["image-classifier", "segformer", "text-head", "toy-generator"] {
        let text = fs::read_to_string(root.join("examples").join(example).join("src/main.rs")).unwrap();
        let is_code = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
        assert!(text.lines().filter(is_code).count() < 100, "{example}");
    }
}
