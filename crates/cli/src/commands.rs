//! The subcommands, and what their failures have in common.

pub(crate) mod bench;
pub(crate) mod completions;
pub(crate) mod dev;
pub(crate) mod doctor;
pub(crate) mod inspect;
pub(crate) mod master;
pub(crate) mod node;
pub(crate) mod store;

use std::fmt;
use std::process::ExitCode;

/// What the numbers mean, for help texts.
pub(crate) const EXIT_CODES: &str = "\
Exit codes: 0 success, 1 failure, 2 wrong usage, 3 no such object, 4 the master cannot be reached.";

/// Why a command did not succeed.
pub(crate) enum Failure {
    /// It was called in a way that makes no sense: exit code 2.
    Usage(Box<dyn std::error::Error>),
    /// It could not do what it should: exit code 1.
    Failed(Box<dyn std::error::Error>),
    /// What was asked for is not there: exit code 3.
    NotFound(Box<dyn std::error::Error>),
    /// Nobody answers where a master should be: exit code 4.
    Unreachable(Box<dyn std::error::Error>),
}

impl Failure {
    pub(crate) fn usage(error: impl Into<Box<dyn std::error::Error>>) -> Failure {
        Failure::Usage(error.into())
    }

    pub(crate) fn failed(error: impl Into<Box<dyn std::error::Error>>) -> Failure {
        Failure::Failed(error.into())
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Failure::Failed(_) => ExitCode::from(1),
            Failure::Usage(_) => ExitCode::from(2),
            Failure::NotFound(_) => ExitCode::from(3),
            Failure::Unreachable(_) => ExitCode::from(4),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Failure::Usage(error)
        | Failure::Failed(error)
        | Failure::NotFound(error)
        | Failure::Unreachable(error)) = self;
        error.fmt(f)
    }
}

/// The end of an output. Whoever closes a pipe has seen enough; that is no failure.
pub(crate) fn written(result: std::io::Result<()>) -> Result<(), Failure> {
    match result {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(Failure::failed),
    }
}
