//! `put`, `get`, `rm`, `ls`, `stat`, `pin`, `touch` and `prefetch`: commands on objects.
//!
//! This file has their common arguments, key parsing and the mapping of errors to exit codes. All calls go through
//! [`moontide_client`].

pub(crate) mod get;
pub(crate) mod ls;
pub(crate) mod mark;
pub(crate) mod put;
pub(crate) mod rm;
pub(crate) mod stat;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use clap::{ArgMatches, Args as ClapArgs, FromArgMatches};
use moontide_client::{Store, StoreConfig, StoreError};
use moontide_types::{ErrorCode, Key};

use super::CommandError;
use crate::format;
use crate::process::{LOG_TERMINAL, log_to_stderr};
use crate::settings::{SettingsArgs, warn_of_unknown_variables};

/// Keys per page of a listing: a page is a few hundred kilobytes at most.
const PAGE_KEYS: u32 = 1000;

/// Common arguments: settings of the client, key and output format.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct StoreArgs {
    #[command(flatten)]
    settings: SettingsArgs<StoreConfig>,
    /// Read keys on the command line as percent-escaped, as printed by ls
    #[arg(long)]
    escaped: bool,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
}

impl StoreArgs {
    fn connect(&self) -> Result<Store, CommandError> {
        log_to_stderr(LOG_TERMINAL);
        let loaded = self.settings.load()?;
        warn_of_unknown_variables(&loaded);
        Store::connect(loaded.config).map_err(CommandError::from)
    }

    /// Converts a key or prefix from the command line to bytes.
    fn bytes_of(&self, argument: &OsStr) -> Result<Vec<u8>, CommandError> {
        if self.escaped {
            format::unescaped(argument.as_bytes()).map_err(CommandError::usage)
        } else {
            Ok(argument.as_bytes().to_vec())
        }
    }

    /// Converts a key from the command line and validates it.
    fn key(&self, argument: &OsStr) -> Result<Vec<u8>, CommandError> {
        let key = self.bytes_of(argument)?;
        Key::new(&key).map_err(CommandError::usage)?;
        Ok(key)
    }
}

/// Parses the arguments of a command. With `--print-config`: prints the settings of the client and returns `None`; the
/// other arguments may be absent.
fn parse<A: FromArgMatches>(matches: &ArgMatches) -> Result<Option<A>, CommandError> {
    let settings = SettingsArgs::<StoreConfig>::from_arg_matches(matches).map_err(CommandError::usage)?;
    if settings.is_print() {
        settings.print(&settings.load()?.config)?;
        return Ok(None);
    }
    A::from_arg_matches(matches).map(Some).map_err(CommandError::usage)
}

/// Keys without an object.
#[derive(Debug, thiserror::Error)]
#[error("no such object: {}", keys.join(", "))]
struct ObjectNotFound {
    keys: Vec<String>,
}

fn not_found(keys: &[Vec<u8>]) -> CommandError {
    let keys = keys.iter().map(|key| format::escaped(key)).collect();
    CommandError::NotFound(Box::new(ObjectNotFound { keys }))
}

impl From<StoreError> for CommandError {
    fn from(error: StoreError) -> CommandError {
        let is_link = matches!(error, StoreError::Master(_));
        match (&error, error.code()) {
            (StoreError::NoMaster { .. }, _) => CommandError::Unreachable(Box::new(error)),
            (_, ErrorCode::Unreachable | ErrorCode::ConnectionLost) if is_link => {
                CommandError::Unreachable(Box::new(error))
            }
            (
                StoreError::InvalidArgument { .. }
                | StoreError::Config(_)
                | StoreError::Key(_)
                | StoreError::Range { .. },
                _,
            ) => CommandError::usage(error),
            (_, ErrorCode::NotFound) => CommandError::NotFound(Box::new(error)),
            _ => CommandError::failed(error),
        }
    }
}

/// Calls `each` with every page of keys with a prefix until it returns false. Returns whether `each` got all keys.
fn for_each_page(
    store: &Store,
    prefix: &[u8],
    mut each: impl FnMut(Vec<Vec<u8>>) -> Result<bool, CommandError>,
) -> Result<bool, CommandError> {
    let mut cursor = vec![];
    loop {
        let page = store.list(prefix, &cursor, PAGE_KEYS)?;
        let wants_more = each(page.keys)?;
        if page.next.is_empty() {
            return Ok(true);
        }
        if !wants_more {
            return Ok(false);
        }
        cursor = page.next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_errors_map_to_command_error_kinds() {
        let no_master = StoreError::NoMaster { address: "x:1".into(), reason: "refused".into() };
        assert!(matches!(CommandError::from(no_master), CommandError::Unreachable(_)));
        let wrong = StoreError::InvalidArgument { what: "replicas", rule: "1 to 8" };
        assert!(matches!(CommandError::from(wrong), CommandError::Usage(_)));
        let gone = StoreError::Refused { code: ErrorCode::NotFound };
        assert!(matches!(CommandError::from(gone), CommandError::NotFound(_)));
        let full = StoreError::Refused { code: ErrorCode::NoSpace };
        assert!(matches!(CommandError::from(full), CommandError::Failed(_)));
        let node = StoreError::UnknownNode { node: moontide_types::NodeId(1) };
        assert!(matches!(CommandError::from(node), CommandError::Failed(_)), "a node is not the master");
    }
}
