//! The `sconce` program: the library with its built-in models.

use std::process::ExitCode;

use sconce::app::{self, Allocator, Registry};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() -> ExitCode {
    app::main(&Registry::default())
}
