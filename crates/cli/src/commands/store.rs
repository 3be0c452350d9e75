//! `put`, `get`, `rm`, `ls` and `stat`: objects of a store, one by one.
//!
//! Here is what they share: how a store is named, how keys are written, which failure has which exit code. They decide
//! nothing; everything is asked of [`moontide_client`].

pub(crate) mod get;
pub(crate) mod ls;
pub(crate) mod put;
pub(crate) mod rm;
pub(crate) mod stat;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use clap::Args as ClapArgs;
use moontide_client::{Store, StoreConfig, StoreError};
use moontide_types::{ErrorCode, Key};

use super::Failure;
use crate::process::{LOG_TERMINAL, log_to_stderr};
use crate::text;

/// Keys of one request for a listing: a page is a few hundred kilobytes at most.
const PAGE_KEYS: u32 = 1000;

/// Which store, and how it is spoken to.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct StoreArgs {
    /// The master, as host:port of its gRPC
    #[arg(long, env = "MOONTIDE_MASTER", value_name = "HOST:PORT", default_value = moontide_node::MASTER_DEFAULT)]
    master: String,
    /// Whose keys are meant
    #[arg(long, env = "MOONTIDE_TENANT", default_value = "default")]
    tenant: String,
    /// How long a call may take
    #[arg(long, value_name = "TIME", value_parser = text::duration, default_value = "30s")]
    deadline: Duration,
    /// Keys on the command line are percent-escaped, as ls shows them
    #[arg(long)]
    escaped: bool,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
}

impl StoreArgs {
    fn connect(&self) -> Result<Store, Failure> {
        log_to_stderr(LOG_TERMINAL);
        let mut config = StoreConfig::new(&self.master);
        config.tenant.clone_from(&self.tenant);
        config.deadline = self.deadline;
        Store::connect(config).map_err(Failure::from)
    }

    /// A key, or the beginning of one, as it stands on the command line.
    fn bytes_of(&self, written: &OsStr) -> Result<Vec<u8>, Failure> {
        if self.escaped {
            text::unescaped(written.as_bytes()).map_err(Failure::usage)
        } else {
            Ok(written.as_bytes().to_vec())
        }
    }

    /// A key that the store would take.
    fn key(&self, written: &OsStr) -> Result<Vec<u8>, Failure> {
        let key = self.bytes_of(written)?;
        Key::new(&key).map_err(Failure::usage)?;
        Ok(key)
    }
}

/// What was asked for is not there.
#[derive(Debug, thiserror::Error)]
#[error("there is no object under {}", keys.join(", "))]
struct NoObject {
    keys: Vec<String>,
}

fn not_found(keys: &[Vec<u8>]) -> Failure {
    let keys = keys.iter().map(|key| text::escaped(key)).collect();
    Failure::NotFound(Box::new(NoObject { keys }))
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        let is_link = matches!(error, StoreError::Master(_));
        match (&error, error.code()) {
            (StoreError::NoMaster { .. }, _) => Failure::Unreachable(Box::new(error)),
            (_, ErrorCode::Unreachable | ErrorCode::ConnectionLost) if is_link => {
                Failure::Unreachable(Box::new(error))
            }
            (StoreError::Argument { .. } | StoreError::Key(_) | StoreError::Range { .. }, _) => {
                Failure::usage(error)
            }
            (_, ErrorCode::NotFound) => Failure::NotFound(Box::new(error)),
            _ => Failure::failed(error),
        }
    }
}

/// All keys with a prefix, page by page, to `each`, until it says that it has had enough. Whether it saw all.
fn for_each_page(
    store: &Store,
    prefix: &[u8],
    mut each: impl FnMut(Vec<Vec<u8>>) -> Result<bool, Failure>,
) -> Result<bool, Failure> {
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
    fn failures_have_the_exit_codes_that_are_documented() {
        let no_master = StoreError::NoMaster { address: "x:1".into(), why: "refused".into() };
        assert!(matches!(Failure::from(no_master), Failure::Unreachable(_)));
        let wrong = StoreError::Argument { what: "replicas", rule: "1 to 8" };
        assert!(matches!(Failure::from(wrong), Failure::Usage(_)));
        let gone = StoreError::Refused { code: ErrorCode::NotFound };
        assert!(matches!(Failure::from(gone), Failure::NotFound(_)));
        let full = StoreError::Refused { code: ErrorCode::NoSpace };
        assert!(matches!(Failure::from(full), Failure::Failed(_)));
        let node = StoreError::UnknownNode { node: moontide_types::NodeId(1) };
        assert!(matches!(Failure::from(node), Failure::Failed(_)), "a node is not the master");
    }
}
