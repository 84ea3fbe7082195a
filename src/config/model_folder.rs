//! Decides which folder a pool's `model` may name. A relative path is resolved against the folder of the settings file
//! that contains it, or against the current folder if it comes from a flag or a variable. The built-in default is in
//! `models/` of the current folder. Does not check whether the folder exists, or whether `model` names something else.

use std::path::{Component, Path, PathBuf};

use super::files::{BUILT_IN, FILE_PREFIX};

/// Where `scripts/fetch-model` puts the default model.
const FETCHED_MODELS: &str = "models";

/// The folder that `model` may name, if the value has this origin. A leading `..` is resolved, so that logs and metrics
/// show a plain path.
pub(super) fn of(model: &str, origin: &str) -> PathBuf {
    let file = origin.strip_prefix(FILE_PREFIX).map(Path::new);
    let base = file.and_then(Path::parent).filter(|folder| !folder.as_os_str().is_empty());
    // A canonical path has no links, so a following `..` can be resolved by removing the last component.
    let Ok(base) = base.unwrap_or(Path::new(".")).canonicalize() else { return PathBuf::from(model) };
    match Path::new(model).file_name() {
        Some(name) if origin == BUILT_IN => base.join(FETCHED_MODELS).join(name),
        _ => join(base, Path::new(model)),
    }
}

/// Appends `path` to `base`, and resolves its leading `.` and `..`.
fn join(mut base: PathBuf, path: &Path) -> PathBuf {
    let mut parts = path.components().peekable();
    while let Some(dots @ (Component::CurDir | Component::ParentDir)) = parts.peek() {
        if *dots == Component::ParentDir {
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
        let file = format!("{FILE_PREFIX}{}", root.join("config/a.toml").display());
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
