//! Errors that name the exit code with which they end the program. Owns no state.

use std::error::Error;
use std::fmt::{self, Display};

use crate::shutdown::Exit;

/// An error with the exit code that it ends the program with. It displays only the inner error, because the exit code
/// is for the calling program.
#[derive(Debug)]
pub(crate) struct WithExit {
    pub(crate) exit: Exit,
    pub(crate) error: anyhow::Error,
}

impl Display for WithExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl Error for WithExit {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}

/// Attaches an exit code to an error; of several attached codes, the last one counts. If an exit code follows from the
/// error's kind, as for an error of the broker, `app` prefers that one to any attached code.
pub(crate) trait ExitsWith {
    /// The type of `self`, with an exit code.
    type Output;

    /// If this is an error, it ends the program with `exit`.
    fn exits_with(self, exit: Exit) -> Self::Output;
}

impl ExitsWith for anyhow::Error {
    type Output = Self;

    fn exits_with(self, exit: Exit) -> Self {
        Self::new(WithExit { exit, error: self })
    }
}

impl<T, E: Into<anyhow::Error>> ExitsWith for Result<T, E> {
    type Output = anyhow::Result<T>;

    fn exits_with(self, exit: Exit) -> anyhow::Result<T> {
        self.map_err(|error| error.into().exits_with(exit))
    }
}
