//! `moontide rm`: removes objects by key, by prefix, or all of a tenant.

use std::ffi::OsString;
use std::io::Write;

use clap::{ArgGroup, ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use moontide_client::{Store, StoreError};
use moontide_types::ErrorCode;
use serde_json::json;

use super::super::{EXIT_CODES, Failure, written};
use super::{StoreArgs, for_each_page, not_found};
use crate::text;

const EXAMPLES: &str = "\
Examples:
  moontide rm hello world                 two objects
  moontide rm --prefix model/7b/          everything below
  moontide rm --all --tenant test         everything of a tenant
  moontide rm hot/block --force           also if it is leased or pinned

A key under which there is nothing is told at the end, with exit code 3; the others are removed all the same.";

/// What is removed.
#[derive(Debug, ClapArgs)]
#[command(group = ArgGroup::new("what").required(true).args(["keys", "prefix", "all"]))]
struct Args {
    /// The keys
    keys: Vec<OsString>,
    /// Everything whose key begins so
    #[arg(long, value_name = "PREFIX")]
    prefix: Option<OsString>,
    /// Everything of the tenant
    #[arg(long)]
    all: bool,
    /// Also what is leased or pinned
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    store: StoreArgs,
}

/// An empty variable in a script must not empty a store.
#[derive(Debug, thiserror::Error)]
#[error("an empty prefix stands for every object; say --all if that is meant")]
struct EmptyPrefix;

/// Some could not be removed.
#[derive(Debug, thiserror::Error)]
#[error("{count} objects were not removed; the first, {key}: {source}")]
struct NotRemoved {
    count: usize,
    key: String,
    source: StoreError,
}

pub(crate) fn command() -> Command {
    let rm = Command::new("rm");
    // After the arguments, whose own description would stand in its place.
    Args::augment_args(rm).about("Remove objects").after_help(format!("{EXAMPLES}\n{EXIT_CODES}"))
}

/// What came of it.
#[derive(Default)]
struct Tally {
    removed: u64,
    /// Out of the index; a node that cannot be reached has yet to confirm it.
    pending: u64,
    missing: Vec<Vec<u8>>,
    refused: Vec<(Vec<u8>, StoreError)>,
}

impl Tally {
    fn remove(&mut self, store: &Store, keys: Vec<Vec<u8>>, force: bool) {
        let borrowed: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        for (key, answer) in keys.iter().zip(store.remove_batch(&borrowed, force)) {
            match answer {
                Ok(true) => self.removed += 1,
                Ok(false) => self.missing.push(key.clone()),
                Err(error) if error.code() == ErrorCode::Pending => self.pending += 1,
                Err(error) => self.refused.push((key.clone(), error)),
            }
        }
    }
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let args = Args::from_arg_matches(matches).map_err(Failure::usage)?;
    let keys: Vec<Vec<u8>> = args.keys.iter().map(|key| args.store.key(key)).collect::<Result<_, _>>()?;
    let prefix = args.prefix.as_ref().map(|prefix| args.store.bytes_of(prefix)).transpose()?;
    if prefix.as_ref().is_some_and(Vec::is_empty) {
        return Err(Failure::usage(EmptyPrefix));
    }
    let store = args.store.connect()?;
    let mut tally = Tally::default();
    if keys.is_empty() {
        for_each_page(&store, &prefix.unwrap_or_default(), |keys| {
            tally.remove(&store, keys, args.force);
            Ok(true)
        })?;
        // Whoever was faster has done what was asked for.
        tally.missing.clear();
    } else {
        tally.remove(&store, keys, args.force);
    }
    let Tally { removed, pending, missing, refused } = tally;
    let mut out = std::io::stdout().lock();
    written(if args.store.json {
        let shown: Vec<String> = missing.iter().map(|key| text::escaped(key)).collect();
        writeln!(
            out,
            "{}",
            json!({ "removed": removed, "pending": pending, "missing": shown, "refused": refused.len() })
        )
    } else {
        match pending {
            0 => writeln!(out, "removed {removed}"),
            _ => writeln!(
                out,
                "removed {removed}, and {pending} that a node which cannot be reached has yet to confirm"
            ),
        }
    })?;
    let count = refused.len();
    match refused.into_iter().next() {
        Some((key, source)) => Err(Failure::failed(NotRemoved { count, key: text::escaped(&key), source })),
        None if missing.is_empty() => Ok(()),
        None => Err(not_found(&missing)),
    }
}
