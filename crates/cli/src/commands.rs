//! The subcommands, and what their failures have in common.

pub(crate) mod bench;
pub(crate) mod master;

use std::fmt;
use std::process::ExitCode;

/// Why a command did not succeed.
pub(crate) enum Failure {
    /// It was called in a way that makes no sense: exit code 2.
    Usage(Box<dyn std::error::Error>),
    /// It could not do what it should: exit code 1.
    Failed(Box<dyn std::error::Error>),
}

impl Failure {
    pub(crate) fn usage(error: impl std::error::Error + 'static) -> Failure {
        Failure::Usage(Box::new(error))
    }

    pub(crate) fn failed(error: impl std::error::Error + 'static) -> Failure {
        Failure::Failed(Box::new(error))
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Failure::Usage(_) => ExitCode::from(2),
            Failure::Failed(_) => ExitCode::from(1),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Failure::Usage(error) | Failure::Failed(error)) = self;
        error.fmt(f)
    }
}
