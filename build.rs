//! Finds what `sconce --version` says of this build: its commit, target and features. Compiles the GPU's kernels to
//! PTX, where CUDA is built in: `scripts/build-cuda` says with which compiler (`NVCC`) and for which cards
//! (`CUDA_COMPUTE_CAP`).

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The features that `--version` names, in its order.
const FEATURES: [&str; 6] = ["candle-transformers", "cuda", "http", "otlp", "tables", "top"];
const FOLDER: &str = "src/model/ops/gpu";
const KERNELS: [&str; 8] =
    ["activation", "add_norm", "attention", "choice", "paged_attention", "pooling", "rms_norm", "rotation"];

fn main() -> Result<(), String> {
    println!("cargo:rerun-if-changed=build.rs");
    describe()?;
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return Ok(());
    }
    for variable in ["NVCC", "CUDA_COMPUTE_CAP"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    println!("cargo:rerun-if-changed={FOLDER}");
    let compiler = env::var("NVCC").unwrap_or_else(|_| "nvcc".into());
    let capability = env::var("CUDA_COMPUTE_CAP").unwrap_or_else(|_| "80".into());
    let out = env::var("OUT_DIR").map_err(|error| format!("OUT_DIR: {error}"))?;
    for kernel in KERNELS {
        let source = format!("{FOLDER}/{kernel}.cu");
        let ptx = Path::new(&out).join(format!("{kernel}.ptx"));
        let architecture = format!("-arch=compute_{capability}");
        let mut command = Command::new(&compiler);
        command.args(["-ptx", "-O3", "--std=c++17", &architecture, &source, "-o"]).arg(ptx);
        let status = command.status().map_err(|error| {
            format!("{compiler} cannot be started ({error}); scripts/build-cuda brings a compiler")
        })?;
        if !status.success() {
            return Err(format!("{compiler} cannot compile {source}: {status}"));
        }
    }
    Ok(())
}

/// Sets what `src/cli/mod.rs` reads. The names do not begin with `SCONCE_`: cargo hands them on to what it runs and
/// tests, and sconce refuses such a variable that is no setting.
fn describe() -> Result<(), String> {
    let target = env::var("TARGET").map_err(|error| format!("TARGET: {error}"))?;
    let is_on = |name: &&str| {
        env::var_os(format!("CARGO_FEATURE_{}", name.to_uppercase().replace('-', "_"))).is_some()
    };
    let features: Vec<&str> = FEATURES.into_iter().filter(is_on).collect();
    let features = if features.is_empty() { "none".to_owned() } else { features.join(", ") };
    println!("cargo:rustc-env=BUILD_COMMIT={}", commit());
    println!("cargo:rustc-env=BUILD_TARGET={target}");
    println!("cargo:rustc-env=BUILD_FEATURES={features}");
    Ok(())
}

/// `SCONCE_COMMIT`, for an image that is built without the repository; else what git says; else "unknown". A debug build
/// does not ask: each commit would compile the crate and its tests again.
fn commit() -> String {
    println!("cargo:rerun-if-env-changed=SCONCE_COMMIT");
    let given = env::var("SCONCE_COMMIT").unwrap_or_default();
    if let Some(given) = given.split_whitespace().next() {
        return given.to_owned();
    }
    if env::var("PROFILE").is_ok_and(|profile| profile == "debug") {
        return "of a debug build".to_owned();
    }
    // Without a `.git` of its own (a folder in a worktree has a file of that name) the folder may lie in a repository
    // of somebody else.
    let found = Path::new(".git").exists().then(|| git(&["rev-parse", "--short=12", "HEAD"])).flatten();
    if found.is_some() {
        watch_head();
    }
    found.unwrap_or_else(|| "unknown".to_owned())
}

/// Has cargo run this again when HEAD moves: to another branch, or with its branch. git says where each lies, because a
/// worktree's HEAD is not in the folder of its branches. Only what exists is named: cargo takes a missing file for
/// changed, at each build.
fn watch_head() {
    let place = |name: &str| git(&["rev-parse", "--git-path", name]).map(PathBuf::from);
    let mut watched = vec![place("HEAD")];
    if let Some(branch) = git(&["symbolic-ref", "--quiet", "HEAD"]).and_then(|name| place(&name)) {
        if branch.exists() {
            watched.push(Some(branch));
        } else {
            // It is packed. Its next commit makes its file, in the nearest folder above that exists.
            watched.push(place("packed-refs"));
            watched.push(branch.ancestors().find(|folder| folder.exists()).map(PathBuf::from));
        }
    }
    for path in watched.into_iter().flatten().filter(|path| path.exists()) {
        println!("cargo:rerun-if-changed={}", path.display());
    }
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
