//! A driver's library that answers from a table, and from a story that a test tells while it is in use: see
//! tests/fixtures/nvml/nvml.c. The real one is opened in the same way.

use std::path::Path;
use std::process::Command;

/// A GPU.
pub const WHOLE: &str = "GPU-a0000000-1111-2222-3333-444444444444";
/// One that is divided into `PARTS`.
pub const DIVIDED: &str = "GPU-c0000000-1111-2222-3333-444444444444";
pub const PARTS: [&str; 2] =
    ["MIG-5a1b2c3d-0000-5000-8000-000000000001", "MIG-5a1b2c3d-0000-5000-8000-000000000002"];
/// One that has fallen off the bus.
pub const LOST: &str = "GPU-e0000000-1111-2222-3333-444444444444";

/// A folder with that library, to be found through `LD_LIBRARY_PATH`.
pub fn driver() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/nvml/nvml.c");
    let library = folder.path().join("libnvidia-ml.so.1");
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(library).arg(&source).status();
    assert!(compiled.unwrap().success(), "cc cannot compile {}", source.display());
    folder
}
