//! Settings from a file, the environment and flags. Whatever surrounds it and wherever it stands, a
//! password is in no error and on no page; what is valid is rendered as settings that read back as
//! the same.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use sconce::config::{LoadedSettings, load};

const SECRET: &str = "S3CRET";

/// In memory where there is such a place.
static FILE: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = PathBuf::from("/dev/shm");
    let folder = if folder.is_dir() { folder } else { std::env::temp_dir() };
    folder.join(format!("sconce-fuzz-{}.toml", std::process::id()))
});

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data).replace(SECRET, "");
    // Lines: NAME=VALUE of the environment, `--set path=value`, what surrounds the password, TOML.
    let mut environment = Vec::new();
    let mut flags = Vec::new();
    let mut toml = String::new();
    let mut around = None;
    for line in text.lines() {
        if let Some(flag) = line.strip_prefix("--set ") {
            flags.extend(flag.split_once('=').map(|(path, value)| (path.to_owned(), value.to_owned())));
        } else if let Some(variable) = line.strip_prefix('$') {
            environment
                .extend(variable.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned())));
        } else if let Some(rest) = line.strip_prefix('@') {
            around = rest.split_once('@').map(|(place, rest)| (place.to_owned(), rest.to_owned()));
        } else {
            toml.push_str(line);
            toml.push('\n');
        }
    }
    let misplaced = around.as_ref().is_some_and(|(place, _)| place == "other");
    if let Some((place, around)) = around {
        let (before, behind) = around.split_once('@').unwrap_or((&around, ""));
        // With an address inside, nobody can tell a password from a list of addresses.
        if around.contains("//") || around.to_ascii_lowercase().contains("embedded:") {
            return;
        }
        let address = format!("amqp://me:{before}{SECRET}{behind}@host");
        match place.as_str() {
            "env" => environment.push(("SCONCE_BROKER__URL".into(), address)),
            "amqp" => environment.push(("AMQP_URL".into(), address)),
            "flag" => flags.push(("broker.url".into(), address)),
            "path" => flags.push((address, "x".into())),
            "other" => flags.push(("pool[0].model".into(), address)),
            _ => toml = format!("broker.url = \"{address}\"\n{toml}"),
        }
    }
    std::fs::write(&*FILE, &toml).expect("a file in memory");
    match load(&[FILE.clone()], environment, &flags) {
        // The page masks what stands in the wrong place; it does not read back as it was.
        Ok(loaded) if misplaced => assert!(!loaded.effective.contains(SECRET), "{}", loaded.effective),
        Ok(loaded) => check_rendering(&loaded),
        Err(error) => {
            let shown = format!("{error} {error:?}");
            assert!(!shown.contains(SECRET), "{shown}");
            assert_eq!(error.to_string().lines().count(), 1 + error.problems().len());
            let longest = error.problems().iter().map(|problem| problem.to_string().len()).max();
            assert!(longest <= Some(4_000), "{longest:?}");
        }
    }
});

fn check_rendering(loaded: &LoadedSettings) {
    assert!(!loaded.effective.contains(SECRET), "{}", loaded.effective);
    assert!(!format!("{loaded:?}").contains(SECRET));
    // An address in the place of another setting is masked as well, and does not read back.
    if loaded.effective.lines().any(|line| line.contains("***") && !line.starts_with("url = ")) {
        return;
    }
    let file = FILE.with_extension("again");
    std::fs::write(&file, &loaded.effective).expect("a file in memory");
    let again =
        load(&[file], Vec::new(), &[]).unwrap_or_else(|error| panic!("{error}\n{}", loaded.effective));
    // Masked passwords apart.
    let (mut first, mut second) = (loaded.settings.clone(), again.settings);
    first.broker.url.clear();
    second.broker.url.clear();
    assert_eq!(first, second, "{}", loaded.effective);
}
