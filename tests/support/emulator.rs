//! A GPU that is made of this CPU: the libraries of tests/fixtures/emulator and tests/fixtures/nvml in the
//! place of NVIDIA's, compiled once for a test binary.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// A folder with the libraries that stand in for NVIDIA's; to be `LD_LIBRARY_PATH`.
pub static DRIVER: LazyLock<PathBuf> = LazyLock::new(|| {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("driver");
    fs::create_dir_all(&folder).unwrap();
    let mut compiler = Command::new("c++");
    compiler.args([
        "-std=c++17",
        "-O3",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-Wno-clobbered",
    ]);
    compiler.args(["-shared", "-fPIC", "-I"]).arg(root.join("src/model/ops/gpu"));
    compiler.arg("-o").arg(folder.join("libcuda.so")).arg(root.join("tests/fixtures/emulator/driver.cpp"));
    assert!(compiler.status().unwrap().success(), "c++ cannot compile the driver");
    for name in ["libcublas.so", "libcurand.so"] {
        let _ = fs::remove_file(folder.join(name));
        // One library by three names: they are of one device.
        std::os::unix::fs::symlink("libcuda.so", folder.join(name)).unwrap();
    }
    let source = root.join("tests/fixtures/nvml/nvml.c");
    let library = folder.join("libnvidia-ml.so.1");
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(library).arg(source).status();
    assert!(compiled.unwrap().success(), "cc cannot compile the driver's NVML");
    folder
});
