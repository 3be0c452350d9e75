//! The subcommands, their common error type and exit codes.

pub(crate) mod bench;
pub(crate) mod certs;
pub(crate) mod completions;
pub(crate) mod dev;
pub(crate) mod doctor;
pub(crate) mod evict;
pub(crate) mod inspect;
pub(crate) mod master;
pub(crate) mod node;
pub(crate) mod segments;
pub(crate) mod store;
pub(crate) mod tenant;

use std::fmt;
use std::process::ExitCode;

use clap::Args;
use moontide_client::{Store, StoreConfig};

use crate::process::{LOG_TERMINAL, log_to_stderr};
use crate::settings::{SettingsArgs, argument_id, warn_of_unknown_variables};

/// Exit codes, for help texts.
pub(crate) const EXIT_CODES: &str = "\
Exit codes: 0 success, 1 failure, 2 wrong usage, 3 no such object, 4 the master cannot be reached.";

/// Error of a command; the variant determines the exit code.
pub(crate) enum CommandError {
    /// Invalid arguments or settings: exit code 2.
    Usage(Box<dyn std::error::Error>),
    /// Any other failure: exit code 1.
    Failed(Box<dyn std::error::Error>),
    /// The requested object does not exist: exit code 3.
    NotFound(Box<dyn std::error::Error>),
    /// The master or node cannot be reached: exit code 4.
    Unreachable(Box<dyn std::error::Error>),
}

impl CommandError {
    pub(crate) fn usage(error: impl Into<Box<dyn std::error::Error>>) -> CommandError {
        CommandError::Usage(error.into())
    }

    pub(crate) fn failed(error: impl Into<Box<dyn std::error::Error>>) -> CommandError {
        CommandError::Failed(error.into())
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            CommandError::Failed(_) => ExitCode::from(1),
            CommandError::Usage(_) => ExitCode::from(2),
            CommandError::NotFound(_) => ExitCode::from(3),
            CommandError::Unreachable(_) => ExitCode::from(4),
        }
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (CommandError::Usage(error)
        | CommandError::Failed(error)
        | CommandError::NotFound(error)
        | CommandError::Unreachable(error)) = self;
        error.fmt(f)
    }
}

/// The cluster of a command for operators, and the format of the output.
#[derive(Clone, Debug, Args)]
pub(crate) struct Target {
    #[command(flatten)]
    settings: SettingsArgs<StoreConfig>,
    /// Print JSON, one object per line
    #[arg(long)]
    pub(crate) json: bool,
}

impl Target {
    pub(crate) fn connect(&self) -> Result<Store, CommandError> {
        log_to_stderr(LOG_TERMINAL);
        let loaded = self.settings.load()?;
        warn_of_unknown_variables(&loaded);
        Store::connect(loaded.config).map_err(CommandError::from)
    }
}

/// Refuses the flag `--tenant` for a command that is about all tenants: ignored, it would do more than was asked for. The variable and
/// the file of settings are for all commands.
pub(crate) fn refuse_tenant(matches: &clap::ArgMatches) -> Result<(), CommandError> {
    match matches.value_source(&argument_id("tenant")) {
        Some(clap::parser::ValueSource::CommandLine) => {
            Err(CommandError::usage("this command is about all tenants: leave out --tenant"))
        }
        _ => Ok(()),
    }
}

/// Converts the result of a write to standard output. A reader that closes the pipe early is not a failure.
pub(crate) fn ignore_broken_pipe(result: std::io::Result<()>) -> Result<(), CommandError> {
    match result {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(CommandError::failed),
    }
}
