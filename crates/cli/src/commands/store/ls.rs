//! `moontide ls`: lists keys.

use std::ffi::OsString;
use std::io::{ErrorKind, StdoutLock, Write};

use clap::{ArgMatches, Args as ClapArgs, Command};
use moontide_client::{ObjectInfo, Store};
use serde_json::{Value, json};

use super::super::{CommandError, EXIT_CODES};
use super::stat::{pin_name, replicas};
use super::{StoreArgs, for_each_page, parse};
use crate::format;

/// Fits on a few screens.
const LIMIT_DEFAULT: u64 = 1000;

const EXAMPLES: &str = "\
Examples:
  moontide ls                                 the first thousand keys
  moontide ls model/7b/ -l                    with length, replicas and pin
  moontide ls --limit 0 --json | wc -l        all keys, one JSON object per line

With a limit the keys are sorted; with --limit 0 their order is unspecified. Bytes of a key that are not printable are
percent-escaped; other commands accept such keys with --escaped.";

#[derive(Debug, ClapArgs)]
struct Args {
    /// List only keys with this prefix
    #[arg(default_value = "")]
    prefix: OsString,
    /// Maximum number of keys; 0 for all
    #[arg(long, value_name = "N", default_value_t = LIMIT_DEFAULT)]
    limit: u64,
    /// Show length, replicas, state and pin of each object
    #[arg(short, long)]
    long: bool,
    #[command(flatten)]
    store: StoreArgs,
}

pub(crate) fn command() -> Command {
    let ls = Command::new("ls");
    // Set after the arguments: the doc comment of the struct would replace it otherwise.
    Args::augment_args(ls).about("List keys").after_help(format!("{EXAMPLES}\n{EXIT_CODES}"))
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    let Some(args) = parse::<Args>(matches)? else { return Ok(()) };
    let prefix = args.store.bytes_of(&args.prefix)?;
    let store = args.store.connect()?;
    let mut out = std::io::stdout().lock();
    if args.limit == 0 {
        for_each_page(&store, &prefix, |keys| print(&args, &store, &keys, &mut out))?;
        return Ok(());
    }
    let mut keys: Vec<Vec<u8>> = vec![];
    let limit = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let is_complete = for_each_page(&store, &prefix, |page| {
        keys.extend(page);
        Ok(keys.len() < limit)
    })?;
    let is_complete = is_complete && keys.len() <= limit;
    keys.sort_unstable();
    keys.truncate(limit);
    if print(&args, &store, &keys, &mut out)? && !is_complete {
        eprintln!("moontide: there are more keys; use --limit 0 for all");
    }
    Ok(())
}

/// Prints keys; returns false if standard output was closed.
fn print(
    args: &Args,
    store: &Store,
    keys: &[Vec<u8>],
    out: &mut StdoutLock<'_>,
) -> Result<bool, CommandError> {
    let infos = match args.long {
        true => {
            let borrowed: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
            store.stat_batch(&borrowed)
        }
        false => vec![],
    };
    let mut infos = infos.into_iter();
    for key in keys {
        let shown = format::escaped(key);
        let line = if args.long {
            // `None`: the object was removed since it was listed.
            let Some(info) = infos.next().transpose()?.flatten() else { continue };
            if args.store.json { json_line(&shown, Some(&info)) } else { long_line(&shown, &info) }
        } else if args.store.json {
            json_line(&shown, None)
        } else {
            shown
        };
        match writeln!(out, "{line}") {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(false),
            Err(error) => return Err(CommandError::failed(error)),
        }
    }
    Ok(true)
}

fn long_line(key: &str, info: &ObjectInfo) -> String {
    let state = if info.writing { "writing" } else { "ready" };
    let (len, copies, pin) = (info.len, replicas(info), pin_name(info.pin));
    format!("{len:>14} {copies} {state:<7} {pin:<4} {key}")
}

fn json_line(key: &str, info: Option<&ObjectInfo>) -> String {
    let mut line = json!({ "key": key });
    if let Some(info) = info {
        line["bytes"] = info.len.into();
        line["replicas"] = replicas(info).into();
        line["writing"] = info.writing.into();
        line["pin"] = Value::from(pin_name(info.pin));
    }
    line.to_string()
}
