//! Which folder a pool's `model` may name: relative to the settings file that names it; from flags and variables, to the
//! current folder; of the built-in default, in `models/`. Does not know whether the folder is there, or whether `model`
//! names something else.

use std::path::{Component, Path, PathBuf};

use super::files::{BUILT_IN, OF_FILE};

/// Where `scripts/fetch-model` puts the default model.
const FETCHED: &str = "models";

/// The folder that `model` names, a value of this origin. Without leading `..`, so that logs and metrics show a plain path.
pub(super) fn of(model: &str, origin: &str) -> PathBuf {
    let file = origin.strip_prefix(OF_FILE).map(Path::new);
    let base = file.and_then(Path::parent).filter(|folder| !folder.as_os_str().is_empty());
    // In a path without links, `a/..` is nothing.
    let Ok(base) = base.unwrap_or(Path::new(".")).canonicalize() else { return PathBuf::from(model) };
    match Path::new(model).file_name() {
        Some(name) if origin == BUILT_IN => base.join(FETCHED).join(name),
        _ => joined(base, Path::new(model)),
    }
}

fn joined(mut base: PathBuf, path: &Path) -> PathBuf {
    let mut parts = path.components().peekable();
    while let Some(up @ (Component::CurDir | Component::ParentDir)) = parts.peek() {
        if *up == Component::ParentDir {
            base.pop();
        }
        parts.next();
    }
    base.join(parts.collect::<PathBuf>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_relative_to_the_file_that_names_it_else_to_the_current_one() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("config")).unwrap();
        let here = std::env::current_dir().unwrap().canonicalize().unwrap();
        let file = format!("{OF_FILE}{}", root.join("config/a.toml").display());
        for (model, origin, expected) in [
            ("./m", file.as_str(), root.join("config/m")),
            ("../m", &file, root.join("m")),
            ("../m/../n", &file, root.join("m/../n")),
            ("org/name", &file, root.join("config/org/name")),
            ("/srv/m", &file, PathBuf::from("/srv/m")),
            ("./m", "flag --set pool[0].model", here.join("m")),
            ("m", "environment variable SCONCE_POOL__0__MODEL", here.join("m")),
            ("m", "file a.toml", here.join("m")),
            ("org/name", BUILT_IN, here.join("models/name")),
        ] {
            assert_eq!(of(model, origin), expected, "{model} {origin}");
        }
    }
}
