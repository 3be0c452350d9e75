//! `moontide pin`, `touch` and `prefetch`: how the masters treat objects. Each is one call for all keys.

use std::ffi::OsString;
use std::io::Write;

use clap::{ArgMatches, Args as ClapArgs, Command, ValueEnum};
use moontide_client::{PinClass, Store, StoreError};
use serde_json::json;

use super::super::{CommandError, EXIT_CODES, ignore_broken_pipe};
use super::{StoreArgs, not_found, parse};
use crate::format;
use crate::settings::PRINT_CONFIG;

const PIN_EXAMPLES: &str = "\
Examples:
  moontide pin system-prompt --class hard     never evict it
  moontide pin doc/1 doc/2 --class soft       evict them after all others
  moontide pin system-prompt --class none     an ordinary object again

`moontide stat KEY` shows the class. The masters keep it, and hand it over when a group moves. If a master is lost without a
handoff, the next one knows only the class of the put (`moontide put --pin`).
Missing keys are reported at the end, with exit code 3; the other objects are changed.";

const TOUCH_EXAMPLES: &str = "\
Examples:
  moontide touch system-prompt doc/1

The objects count as used now, and are evicted later. Missing keys are reported at the end, with exit code 3.";

const PREFETCH_EXAMPLES: &str = "\
Examples:
  moontide prefetch doc/1 doc/2

Objects that are on disk move to memory, as soon as there is space; the command does not wait for them. Missing keys are
reported at the end, with exit code 3.";

#[derive(Debug, ClapArgs)]
struct KeyArgs {
    /// Keys of the objects
    #[arg(required = false, required_unless_present = PRINT_CONFIG)]
    keys: Vec<OsString>,
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Debug, ClapArgs)]
struct PinArgs {
    #[command(flatten)]
    common: KeyArgs,
    /// Resistance to eviction
    #[arg(long, value_name = "CLASS", required = false, required_unless_present = PRINT_CONFIG)]
    class: Class,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Class {
    /// Evicted under pressure
    None,
    /// Evicted after all others
    Soft,
    /// Never evicted
    Hard,
}

/// Objects that were not changed.
#[derive(Debug, thiserror::Error)]
#[error("{count} objects were not changed; the first, {key}: {source}")]
struct NotChanged {
    count: usize,
    key: String,
    source: StoreError,
}

pub(crate) fn pin_command() -> Command {
    // Texts are set after the arguments: the doc comment of the struct would replace them otherwise.
    PinArgs::augment_args(Command::new("pin"))
        .about("Change how objects resist eviction")
        .after_help(format!("{PIN_EXAMPLES}\n{EXIT_CODES}"))
}

pub(crate) fn touch_command() -> Command {
    KeyArgs::augment_args(Command::new("touch"))
        .about("Mark objects as used")
        .after_help(format!("{TOUCH_EXAMPLES}\n{EXIT_CODES}"))
}

pub(crate) fn prefetch_command() -> Command {
    KeyArgs::augment_args(Command::new("prefetch"))
        .about("Move objects from disk to memory")
        .after_help(format!("{PREFETCH_EXAMPLES}\n{EXIT_CODES}"))
}

pub(crate) fn run_pin(matches: &ArgMatches) -> Result<(), CommandError> {
    let Some(PinArgs { common, class }) = parse::<PinArgs>(matches)? else { return Ok(()) };
    let class = match class {
        Class::None => PinClass::None,
        Class::Soft => PinClass::Soft,
        Class::Hard => PinClass::Hard,
    };
    run(&common, "pinned", |store, keys| store.set_pin(keys, class))
}

pub(crate) fn run_touch(matches: &ArgMatches) -> Result<(), CommandError> {
    let Some(args) = parse::<KeyArgs>(matches)? else { return Ok(()) };
    run(&args, "touched", Store::touch)
}

pub(crate) fn run_prefetch(matches: &ArgMatches) -> Result<(), CommandError> {
    let Some(args) = parse::<KeyArgs>(matches)? else { return Ok(()) };
    run(&args, "prefetched", Store::prefetch)
}

/// Makes the call and prints the number of objects that it reached.
fn run(
    args: &KeyArgs,
    done: &str,
    call: impl FnOnce(&Store, &[&[u8]]) -> Vec<Result<bool, StoreError>>,
) -> Result<(), CommandError> {
    let keys: Vec<Vec<u8>> = args.keys.iter().map(|key| args.store.key(key)).collect::<Result<_, _>>()?;
    let store = args.store.connect()?;
    let borrowed: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let (mut reached, mut missing, mut refused) = (0, vec![], vec![]);
    for (key, result) in keys.iter().zip(call(&store, &borrowed)) {
        match result {
            Ok(true) => reached += 1,
            Ok(false) => missing.push(key.clone()),
            Err(error) => refused.push((key, error)),
        }
    }
    let mut out = std::io::stdout().lock();
    ignore_broken_pipe(match args.store.json {
        true => {
            let shown: Vec<String> = missing.iter().map(|key| format::escaped(key)).collect();
            writeln!(out, "{}", json!({ done: reached, "missing": shown, "refused": refused.len() }))
        }
        false => writeln!(out, "{done} {reached}"),
    })?;
    let count = refused.len();
    match refused.into_iter().next() {
        Some((key, source)) => {
            Err(CommandError::failed(NotChanged { count, key: format::escaped(key), source }))
        }
        None if missing.is_empty() => Ok(()),
        None => Err(not_found(&missing)),
    }
}
