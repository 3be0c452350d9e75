//! `moontide put`: stores a file or standard input under a key.

use std::ffi::OsString;
use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{ArgMatches, Args as ClapArgs, Command, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use moontide_bench::format_bytes;
use moontide_client::{Place, PutOptions, PutOutcome, Spread};
use moontide_settings::parse_duration;
use moontide_types::ErrorCode;
use moontide_types::limits::OBJECT_BYTES_MAX;
use moontide_types::record::PinClass;
use serde_json::json;

use super::super::{CommandError, EXIT_CODES, ignore_broken_pipe};
use super::{StoreArgs, parse};
use crate::format;
use crate::settings::PRINT_CONFIG;

/// Input length from which a terminal shows a progress bar.
const PROGRESS_BYTES_MIN: u64 = 64 << 20;
/// Bytes per read.
const READ_BYTES: usize = 4 << 20;

const EXAMPLES: &str = "\
Examples:
  moontide put hello - <<< world                      from standard input
  moontide put model/7b/prefix-0001 block.bin         from a file
  moontide put config settings.json --upsert          replace an existing object
  moontide put hot/block block.bin --replicas 2 --ttl 10m --pin soft
  moontide put safe block.bin --replicas 2 --spread rack     in two racks, or not at all
  moontide put k f --prefer 14c4daf3bcb05a85 --prefer 6d0b2f1c9e8a7f34/0   on these nodes, if they have space

Without --upsert an existing object is not changed; this is not an error: the outcome is `already_exists`.";

#[derive(Debug, ClapArgs)]
struct Args {
    /// Key of the object
    #[arg(required = false, required_unless_present = PRINT_CONFIG)]
    key: OsString,
    /// File with the value; - for standard input
    #[arg(default_value = "-")]
    file: PathBuf,
    /// Replace an existing object
    #[arg(long)]
    upsert: bool,
    /// Number of replicas, each on another node
    #[arg(long, value_name = "N", default_value_t = 1)]
    replicas: u8,
    /// Minimum number of replicas [default: --replicas]
    #[arg(long, value_name = "N")]
    replicas_min: Option<u8>,
    /// Disks that shall have the object, besides memory; written after the put
    #[arg(long, value_name = "N", default_value_t = 0)]
    disk_replicas: u8,
    /// Stripes per replica [default: by length]
    #[arg(long, value_name = "N")]
    stripes: Option<u16>,
    /// What the replicas must not share [default: only their node]
    #[arg(long, value_enum)]
    spread: Option<SpreadArg>,
    /// Node or segment to try first; may be repeated up to eight times, in order of preference
    #[arg(long, value_name = "NODE[/SEGMENT]")]
    prefer: Vec<Place>,
    /// Time after which the object expires, e.g. 30s, 10m or 2h [default: never]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    ttl: Option<Duration>,
    /// Resistance to eviction
    #[arg(long, value_enum, default_value_t = Pin::None)]
    pin: Pin,
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Pin {
    /// Evicted under memory pressure
    None,
    /// Evicted last
    Soft,
    /// Never evicted
    Hard,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SpreadArg {
    /// Each replica on a different host
    Host,
    /// Each replica in a different rack
    Rack,
    /// Each replica in a different zone
    Zone,
}

impl From<SpreadArg> for Spread {
    fn from(spread: SpreadArg) -> Spread {
        match spread {
            SpreadArg::Host => Spread::Host,
            SpreadArg::Rack => Spread::Rack,
            SpreadArg::Zone => Spread::Zone,
        }
    }
}

/// Error of reading the value.
#[derive(Debug, thiserror::Error)]
enum InputError {
    #[error("{file}: {source}")]
    Unreadable { file: String, source: std::io::Error },
    #[error("{file} is longer than {}, the maximum of an object; split it", format_bytes(OBJECT_BYTES_MAX))]
    TooLong { file: String },
}

pub(crate) fn command() -> Command {
    let put = Command::new("put");
    // Set after the arguments: the doc comment of the struct would replace it otherwise.
    Args::augment_args(put).about("Store an object").after_help(format!("{EXAMPLES}\n{EXIT_CODES}"))
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    let Some(args) = parse::<Args>(matches)? else { return Ok(()) };
    let key = args.store.key(&args.key)?;
    // Connect first, so that an unreachable master is reported before input is read.
    let store = args.store.connect()?;
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    let value = read(&args.file, &bar).map_err(CommandError::failed)?;
    let options = PutOptions {
        replicas: args.replicas,
        replicas_min: args.replicas_min.unwrap_or(args.replicas),
        disk_replicas: args.disk_replicas,
        stripes: args.stripes,
        spread: args.spread.map(Spread::from),
        prefer: args.prefer,
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
    let name = match outcome {
        Ok(PutOutcome::Stored) => "stored",
        Ok(PutOutcome::AlreadyExists) => "already_exists",
        Err(error) if error.code() == ErrorCode::Pending => "pending",
        Err(error) => return Err(error.into()),
    };
    let (shown, len) = (format::escaped(&key), value.len());
    let mut out = std::io::stdout().lock();
    ignore_broken_pipe(if args.store.json {
        writeln!(out, "{}", json!({ "key": shown, "outcome": name, "bytes": len }))
    } else if name == "already_exists" {
        writeln!(out, "already exists: {shown}; --upsert replaces it")
    } else {
        write!(out, "stored {shown} ({})", format_bytes(len as u64)).and_then(|()| match name {
            "pending" => {
                writeln!(out, "; pending: a node is unreachable and may return with the replaced object")
            }
            _ => writeln!(out),
        })
    })
}

/// Reads the whole input. Large input shows a progress bar on a terminal.
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
