//! `moontide rm`: removes objects by key, by prefix, by expression, or all objects of a tenant.

use std::ffi::OsString;
use std::io::Write;
use std::time::{Duration, Instant};

use clap::{ArgGroup, ArgMatches, Args as ClapArgs, Command};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use moontide_client::{BulkRemoval, BulkSelection, Store, StoreError};
use moontide_settings::parse_duration;
use moontide_types::ErrorCode;
use serde_json::json;

use super::super::{CommandError, EXIT_CODES, ignore_broken_pipe};
use super::{StoreArgs, not_found, parse};
use crate::format;
use crate::settings::PRINT_CONFIG;

const EXAMPLES: &str = "\
Examples:
  moontide rm hello world                 two objects
  moontide rm --prefix model/7b/          all keys with this prefix
  moontide rm --regex '/layer-[0-9]+$'    all keys that match a regular expression
  moontide rm --all --tenant test         all objects of a tenant
  moontide rm hot/block --force           even if it is leased or pinned

Missing keys are reported at the end, with exit code 3; the other objects are removed. With --prefix, --regex or --all the
command ends when no object can come back, also with a node that is absent now: then it waits for that node. The exit code is 1
if objects are left: kept because they are in use, or on an absent node. The masters go on; run the command again.";

#[derive(Debug, ClapArgs)]
#[command(group = ArgGroup::new("what").required(true).args(["keys", "prefix", "regex", "all", PRINT_CONFIG]))]
struct Args {
    /// Keys of the objects
    keys: Vec<OsString>,
    /// Remove all objects with this key prefix
    #[arg(long, value_name = "PREFIX")]
    prefix: Option<OsString>,
    /// Remove all objects whose keys match this regular expression
    #[arg(long, value_name = "PATTERN")]
    regex: Option<String>,
    /// Remove all objects of the tenant
    #[arg(long)]
    all: bool,
    /// Remove objects even if they are leased or pinned
    #[arg(long)]
    force: bool,
    /// Longest time to wait without progress, as for an absent node, with --prefix, --regex or --all
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1h")]
    wait: Duration,
    #[command(flatten)]
    store: StoreArgs,
}

/// Empty `--prefix` or `--regex`: an empty variable in a script must not remove all objects.
#[derive(Debug, thiserror::Error)]
#[error("an empty prefix or expression matches every object; use --all to remove all")]
struct EmptySelection;

/// The masters refuse the pattern.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a regular expression, or too long a one; the syntax is that of the Rust crate regex")]
struct InvalidPattern(String);

/// Objects that were kept by a removal of many.
#[derive(Debug, thiserror::Error)]
#[error("{0} objects were kept: leased, pinned or being written; repeat it later, or with --force")]
struct Kept(u64);

/// Nodes may return with removed objects.
#[derive(Debug, thiserror::Error)]
#[error(
    "{removed} objects are removed, but after {waited:.0?} a node is still absent that may return with some; the masters go on: \
     run the command again when the node is back"
)]
struct NotConfirmed {
    removed: u64,
    waited: Duration,
}

/// Some objects could not be removed.
#[derive(Debug, thiserror::Error)]
#[error("{count} objects were not removed; the first, {key}: {source}")]
struct NotRemoved {
    count: usize,
    key: String,
    source: StoreError,
}

pub(crate) fn command() -> Command {
    let rm = Command::new("rm");
    // Set after the arguments: the doc comment of the struct would replace it otherwise.
    Args::augment_args(rm).about("Remove objects").after_help(format!("{EXAMPLES}\n{EXIT_CODES}"))
}

/// Counts of the results.
#[derive(Default)]
struct Tally {
    removed: u64,
    /// Removed from the index; an unreachable node has not confirmed it yet.
    pending: u64,
    missing: Vec<Vec<u8>>,
    refused: Vec<(Vec<u8>, StoreError)>,
}

impl Tally {
    fn remove(&mut self, store: &Store, keys: Vec<Vec<u8>>, force: bool) {
        let borrowed: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        for (key, result) in keys.iter().zip(store.remove_batch(&borrowed, force)) {
            match result {
                Ok(true) => self.removed += 1,
                Ok(false) => self.missing.push(key.clone()),
                Err(error) if error.code() == ErrorCode::Pending => self.pending += 1,
                Err(error) => self.refused.push((key.clone(), error)),
            }
        }
    }
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    let Some(args) = parse::<Args>(matches)? else { return Ok(()) };
    let keys: Vec<Vec<u8>> = args.keys.iter().map(|key| args.store.key(key)).collect::<Result<_, _>>()?;
    let prefix = args.prefix.as_ref().map(|prefix| args.store.bytes_of(prefix)).transpose()?;
    if prefix.as_ref().is_some_and(Vec::is_empty) || args.regex.as_ref().is_some_and(String::is_empty) {
        return Err(CommandError::usage(EmptySelection));
    }
    let store = args.store.connect()?;
    let selection = match (prefix, &args.regex, args.all) {
        (Some(prefix), ..) => Some(BulkSelection::Prefix(prefix)),
        (_, Some(pattern), _) => Some(BulkSelection::Regex(pattern.clone())),
        (.., true) => Some(BulkSelection::All),
        _ => None,
    };
    if let Some(selection) = selection {
        return print_bulk(remove_selected(&store, &selection, &args)?, args.store.json);
    }
    let mut tally = Tally::default();
    tally.remove(&store, keys, args.force);
    let Tally { removed, pending, missing, refused } = tally;
    let mut out = std::io::stdout().lock();
    ignore_broken_pipe(if args.store.json {
        let shown: Vec<String> = missing.iter().map(|key| format::escaped(key)).collect();
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
                "removed {removed}, {pending} pending: a node is unreachable and has not confirmed them"
            ),
        }
    })?;
    let count = refused.len();
    match refused.into_iter().next() {
        Some((key, source)) => {
            Err(CommandError::failed(NotRemoved { count, key: format::escaped(&key), source }))
        }
        None if missing.is_empty() => Ok(()),
        None => Err(not_found(&missing)),
    }
}

/// Removes many objects, with a progress bar on a terminal. Waits for absent nodes.
fn remove_selected(
    store: &Store,
    selection: &BulkSelection,
    args: &Args,
) -> Result<BulkRemoval, CommandError> {
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    let style = "removing {wide_bar} {pos}/{len} objects examined, {msg} ETA {eta}";
    bar.set_style(ProgressStyle::with_template(style).expect("template is valid"));
    let started = Instant::now();
    let mut removed = 0;
    let result = store.remove_selected(selection, args.force, args.wait, |progress| {
        removed = progress.removed;
        bar.set_length(progress.total);
        bar.set_position(progress.examined);
        bar.set_message(format!(
            "{removed} removed, {} of {} groups done,",
            progress.groups_done, progress.groups
        ));
    });
    bar.finish_and_clear();
    result.map_err(|error| match (error.code(), selection) {
        (ErrorCode::Pending, _) => CommandError::failed(NotConfirmed { removed, waited: started.elapsed() }),
        (ErrorCode::InvalidArgument, BulkSelection::Regex(pattern)) => {
            CommandError::usage(InvalidPattern(pattern.clone()))
        }
        _ => error.into(),
    })
}

fn print_bulk(BulkRemoval { removed, kept }: BulkRemoval, is_json: bool) -> Result<(), CommandError> {
    let mut out = std::io::stdout().lock();
    ignore_broken_pipe(match is_json {
        true => writeln!(out, "{}", json!({ "removed": removed, "kept": kept })),
        false => writeln!(out, "removed {removed}"),
    })?;
    if kept > 0 { Err(CommandError::failed(Kept(kept))) } else { Ok(()) }
}
