//! Compiles the GPU's kernels to PTX, where CUDA is built in: `scripts/build-cuda` says with which compiler
//! (`NVCC`) and for which cards (`CUDA_COMPUTE_CAP`).

use std::env;
use std::path::Path;
use std::process::Command;

const FOLDER: &str = "src/model/ops/gpu";
const KERNELS: [&str; 4] = ["activation", "add_norm", "attention", "pooling"];

fn main() -> Result<(), String> {
    println!("cargo:rerun-if-changed=build.rs");
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
