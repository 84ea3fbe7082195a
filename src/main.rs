//! The `sconce` program: the library with its built-in models.

use std::process::ExitCode;

use sconce::app::{self, Registry};

// Large outputs cost page faults with the system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    app::main(&Registry::default())
}
