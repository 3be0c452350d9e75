//! `moontide put`: stores a file, or what comes from standard input, under a key.

use std::ffi::OsString;
use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use moontide_client::{Put, PutOptions};
use moontide_types::bounds::OBJECT_BYTES_MAX;
use moontide_types::record::PinClass;
use serde_json::json;

use super::super::{EXIT_CODES, Failure, written};
use super::StoreArgs;
use crate::text;

/// From here on somebody at a terminal wants to see that something happens.
const PROGRESS_BYTES_MIN: u64 = 64 << 20;
/// Read at a time.
const READ_BYTES: usize = 4 << 20;

const EXAMPLES: &str = "\
Examples:
  moontide put hello - <<< world                      from standard input
  moontide put model/7b/prefix-0001 block.bin         from a file
  moontide put config settings.json --upsert          replace what is there
  moontide put hot/block block.bin --replicas 2 --ttl 10m --pin soft

Without --upsert an object that is there stays as it is, which is no failure: the answer is `existed`.";

/// What is stored, and how.
#[derive(Debug, ClapArgs)]
struct Args {
    /// The key
    key: OsString,
    /// The file with the value; - is standard input
    #[arg(default_value = "-")]
    file: PathBuf,
    /// Replace an object of the same key
    #[arg(long)]
    upsert: bool,
    /// Copies, each on another node
    #[arg(long, value_name = "N", default_value_t = 1)]
    replicas: u8,
    /// Fewest copies that will do [default: as many as --replicas]
    #[arg(long, value_name = "N")]
    replicas_min: Option<u8>,
    /// Stripes of each copy [default: as many as its length needs]
    #[arg(long, value_name = "N")]
    stripes: Option<u16>,
    /// It may be forgotten after this time: 30s, 10m, 2h
    #[arg(long, value_name = "TIME", value_parser = text::duration)]
    ttl: Option<Duration>,
    /// How strongly it resists eviction
    #[arg(long, value_enum, default_value_t = Pin::None)]
    pin: Pin,
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Pin {
    /// Evicted when room is needed
    None,
    /// Evicted last
    Soft,
    /// Never evicted
    Hard,
}

/// The value could not be read.
#[derive(Debug, thiserror::Error)]
enum InputError {
    #[error("{file}: {source}")]
    Unreadable { file: String, source: std::io::Error },
    #[error(
        "{file} is longer than {}; an object has at most that many bytes: cut it",
        text::bytes(OBJECT_BYTES_MAX)
    )]
    TooLong { file: String },
}

pub(crate) fn command() -> Command {
    let put = Command::new("put");
    // After the arguments, whose own description would stand in its place.
    Args::augment_args(put).about("Store an object").after_help(format!("{EXAMPLES}\n{EXIT_CODES}"))
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let args = Args::from_arg_matches(matches).map_err(Failure::usage)?;
    let key = args.store.key(&args.key)?;
    // First the store: nobody types a long input for a master that is not there.
    let store = args.store.connect()?;
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    let value = read(&args.file, &bar).map_err(Failure::failed)?;
    let options = PutOptions {
        replicas: args.replicas,
        replicas_min: args.replicas_min.unwrap_or(args.replicas),
        stripes: args.stripes,
        upsert: args.upsert,
        ttl: args.ttl,
        pin: match args.pin {
            Pin::None => PinClass::None,
            Pin::Soft => PinClass::Soft,
            Pin::Hard => PinClass::Hard,
        },
        ..PutOptions::default()
    };
    bar.set_message("storing");
    let outcome = store.put_with(&key, &[&value], &options);
    bar.finish_and_clear();
    let name = match outcome? {
        Put::Stored => "stored",
        Put::Existed => "existed",
    };
    let (shown, len) = (text::escaped(&key), value.len());
    let mut out = std::io::stdout().lock();
    written(if args.store.json {
        writeln!(out, "{}", json!({ "key": shown, "outcome": name, "bytes": len }))
    } else if name == "existed" {
        writeln!(out, "existed {shown}; --upsert replaces it")
    } else {
        writeln!(out, "stored {shown} ({})", text::bytes(len as u64))
    })
}

/// The whole input. Large ones draw the bar on a terminal.
fn read(file: &Path, bar: &ProgressBar) -> Result<Vec<u8>, InputError> {
    let unreadable = |source| InputError::Unreadable { file: file.display().to_string(), source };
    let (mut input, expected): (Box<dyn Read>, Option<u64>) = if file == Path::new("-") {
        (Box::new(std::io::stdin().lock()), None)
    } else {
        let opened = File::open(file).map_err(unreadable)?;
        let metadata = opened.metadata().map_err(unreadable)?;
        (Box::new(opened), metadata.is_file().then_some(metadata.len()))
    };
    if expected.is_some_and(|expected| expected > OBJECT_BYTES_MAX) {
        return Err(InputError::TooLong { file: file.display().to_string() });
    }
    let mut value = Vec::with_capacity(expected.unwrap_or(0) as usize);
    loop {
        let n = input.by_ref().take(READ_BYTES as u64).read_to_end(&mut value).map_err(unreadable)?;
        if n == 0 {
            return Ok(value);
        }
        let len = value.len() as u64;
        if len > OBJECT_BYTES_MAX {
            return Err(InputError::TooLong { file: file.display().to_string() });
        }
        if bar.is_hidden() && expected.unwrap_or(len) >= PROGRESS_BYTES_MIN && std::io::stderr().is_terminal()
        {
            show(bar, expected);
        }
        bar.set_position(len);
    }
}

fn show(bar: &ProgressBar, expected: Option<u64>) {
    let template = if expected.is_some() {
        "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}"
    } else {
        "{msg} {spinner} {bytes} {bytes_per_sec}"
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    if let Some(expected) = expected {
        bar.set_length(expected);
    }
    bar.set_message("reading");
    bar.set_draw_target(ProgressDrawTarget::stderr());
    bar.enable_steady_tick(Duration::from_millis(200));
}
