//! `moontide inspect disk`: lists and verifies the records in the directory of a node's disk.
//!
//! It reads the files, changes none of them and contacts no node. Records are printed as they are found, so that memory
//! use does not depend on the size of the tier; the totals come last.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use moontide_bench::format_bytes;
use moontide_disk::{
    BackendKind, InspectedRecord, InspectedState, IoEngine, OpenError, OsStorage, QueueConfig, Storage,
};
use serde_json::{Value, json};

use super::super::{CommandError, ignore_broken_pipe};
use crate::format;

const EXAMPLES: &str = "\
Examples:
  moontide inspect disk --dir /mnt/ssd/moontide                totals and corrupt records
  moontide inspect disk --dir /mnt/ssd/moontide --verify       also verify every payload
  moontide inspect disk --dir /mnt/ssd/moontide --all          every record
  moontide inspect disk --dir /mnt/ssd/moontide --all --json | jq 'select(.state == \"removed\")'

Read-only. Stop the node first: while it runs, a record that is being written or deleted may be missing or look
corrupt. Without --verify only header, key and attributes of a record are checked; with it, the payload is also read
with direct I/O and compared with its digests. --json prints one object per listed record, and one with the totals at
the end.
Exit codes: 0 success, 1 failure or corrupt records, 2 wrong usage.";

#[derive(Debug, ClapArgs)]
struct Args {
    /// Directory of the disk tier, the node's disk.dir
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Disk layout: bucket, file or offset [default: detected from the files]
    #[arg(long, value_name = "NAME")]
    backend: Option<BackendKind>,
    /// Read and verify every payload
    #[arg(long)]
    verify: bool,
    /// List every record, not only corrupt ones
    #[arg(long)]
    all: bool,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
}

/// Error of an inspection.
#[derive(Debug, thiserror::Error)]
enum InspectError {
    #[error("{dir}: {source}; pass the directory of a node's disk with --dir")]
    Unreadable { dir: String, source: std::io::Error },
    #[error(
        "{dir} has no files of a disk tier; pass the directory of a node's disk with --dir, or its --backend"
    )]
    Nothing { dir: String },
    #[error("{dir} has files of the backends {}; select one with --backend", names(found))]
    Ambiguous { dir: String, found: Vec<BackendKind> },
    #[error("{dir}: {source}")]
    Tier { dir: String, source: OpenError },
    #[error("{dir}: {corrupt} records are corrupt; nodes skip them; check the disk if the number grows")]
    Corrupt { dir: String, corrupt: u64 },
}

fn names(kinds: &[BackendKind]) -> String {
    kinds.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
}

pub(super) fn command() -> Command {
    // Set after the arguments: the doc comment of the struct would replace it otherwise.
    Args::augment_args(Command::new("disk"))
        .about("List and verify the records on a node's disk")
        .after_help(EXAMPLES)
}

pub(super) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    let args = Args::from_arg_matches(matches).map_err(CommandError::usage)?;
    let dir = args.dir.display().to_string();
    let unreadable = |source| CommandError::usage(InspectError::Unreadable { dir: dir.clone(), source });
    let found = kinds_in(&args.dir).map_err(unreadable)?;
    let (kind, guessed) = match (args.backend, &*found) {
        (Some(kind), _) => (kind, false),
        (None, [kind]) => (*kind, true),
        (None, []) => return Err(CommandError::usage(InspectError::Nothing { dir })),
        (None, _) => return Err(CommandError::usage(InspectError::Ambiguous { dir, found })),
    };
    let storage = OsStorage::open(&args.dir, IoEngine::Auto).map_err(unreadable)?;
    let engine = storage.engine();
    let storage: Arc<dyn Storage> = Arc::new(storage);
    let inspect = |verify, each: &mut dyn FnMut(InspectedRecord<'_>)| {
        let mut queue = storage.queue(&QueueConfig::default());
        let inspected = kind.inspect(&storage, &mut *queue, verify, each);
        inspected.map_err(|source| CommandError::failed(InspectError::Tier { dir: dir.clone(), source }))
    };

    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    if args.verify && std::io::stderr().is_terminal() {
        // A first pass without payloads finds the number of bytes to read.
        let mut expected = 0;
        inspect(false, &mut |record| expected += record.len)?;
        show(&bar, expected);
    }
    let mut out = std::io::stdout().lock();
    let mut output = Ok(());
    let mut totals = Totals::default();
    let started = Instant::now();
    inspect(args.verify, &mut |record| {
        let corrupt = totals.add(&record);
        bar.set_position(totals.bytes);
        if (args.all || corrupt) && output.is_ok() {
            output = bar.suspend(|| match args.json {
                true => writeln!(out, "{}", as_json(&record)),
                false => write_record(&mut out, &record, totals.listed == 0),
            });
            totals.listed += 1;
        }
    })?;
    let took = started.elapsed();
    bar.finish_and_clear();
    if output.is_ok() {
        let scan = ScanOptions { dir: &dir, kind, guessed, engine, verified: args.verify.then_some(took) };
        output = match args.json {
            true => writeln!(out, "{}", totals.json(&scan)),
            false => totals.write(&mut out, &scan),
        };
    }
    ignore_broken_pipe(output)?;
    match totals.corrupt {
        0 => Ok(()),
        corrupt => Err(CommandError::failed(InspectError::Corrupt { dir, corrupt })),
    }
}

/// Returns the backends whose files are in a directory. An empty tier looks the same with all backends; then the result
/// is the default backend.
fn kinds_in(dir: &Path) -> std::io::Result<Vec<BackendKind>> {
    let mut is_tier = false;
    let mut found = [false; BackendKind::ALL.len()];
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let is_two_digits = name.len() == 2 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_tier |= ["node.id", "removed.log"].contains(&&*name);
        let kind = match &*name {
            "data.moontide" => BackendKind::Offset,
            name if name.ends_with(".bucket") => BackendKind::Bucket,
            _ if is_two_digits && entry.file_type()?.is_dir() => BackendKind::File,
            _ => continue,
        };
        found[kind as usize] = true;
    }
    if is_tier && found == [false; BackendKind::ALL.len()] {
        return Ok(vec![BackendKind::default()]);
    }
    Ok(BackendKind::ALL.into_iter().filter(|kind| found[*kind as usize]).collect())
}

/// Parameters of the scan, for the totals.
struct ScanOptions<'a> {
    dir: &'a str,
    kind: BackendKind,
    guessed: bool,
    engine: &'static str,
    /// Time to read all payloads, if `--verify` was given.
    verified: Option<Duration>,
}

/// Totals of a tier.
#[derive(Debug, Default)]
struct Totals {
    /// Hashes of the file names: a tier of the file backend has millions of files.
    files: HashSet<u64>,
    records: u64,
    /// Bytes of all records of known length, in any state.
    bytes: u64,
    served_bytes: u64,
    removed: u64,
    removed_bytes: u64,
    corrupt: u64,
    corrupt_bytes: u64,
    listed: u64,
}

impl Totals {
    /// Adds a record; returns true if it is corrupt.
    fn add(&mut self, record: &InspectedRecord<'_>) -> bool {
        let mut hasher = DefaultHasher::new();
        record.file.hash(&mut hasher);
        self.files.insert(hasher.finish());
        self.bytes += record.len;
        let (count, bytes) = match record.state {
            InspectedState::Ok => (&mut self.records, &mut self.served_bytes),
            InspectedState::Removed => (&mut self.removed, &mut self.removed_bytes),
            InspectedState::Corrupt { .. } => (&mut self.corrupt, &mut self.corrupt_bytes),
        };
        *count += 1;
        *bytes += record.len;
        matches!(record.state, InspectedState::Corrupt { .. })
    }

    fn json(&self, scan: &ScanOptions<'_>) -> Value {
        json!({
            "dir": scan.dir, "backend": scan.kind.name(), "engine": scan.engine,
            "files": self.files.len(), "records": self.records, "bytes": self.served_bytes,
            "removed": self.removed, "removed_bytes": self.removed_bytes,
            "corrupt": self.corrupt, "corrupt_bytes": self.corrupt_bytes,
            "verified": scan.verified.is_some(),
            "seconds": scan.verified.map(|took| took.as_secs_f64()),
        })
    }

    fn write(&self, out: &mut impl Write, scan: &ScanOptions<'_>) -> std::io::Result<()> {
        if self.listed > 0 {
            writeln!(out)?;
        }
        writeln!(out, "=== Disk {} ===", scan.dir)?;
        let how = if scan.guessed { "detected" } else { "--backend" };
        writeln!(out, "  Backend: {} ({how}), Engine: {}", scan.kind, scan.engine)?;
        writeln!(out, "  Files    {:>12}", self.files.len())?;
        for (name, count, bytes) in [
            ("Records", self.records, self.served_bytes),
            ("Removed", self.removed, self.removed_bytes),
            ("Corrupt", self.corrupt, self.corrupt_bytes),
        ] {
            writeln!(out, "  {name:<8} {count:>12}  {:>10}", format_bytes(bytes))?;
        }
        let Some(took) = scan.verified else {
            return writeln!(out, "  Payloads were not verified; use --verify.");
        };
        let read = self.served_bytes + self.corrupt_bytes;
        let speed = read as f64 / took.as_secs_f64().max(1e-9) / 1e9;
        writeln!(out, "  Verified {} in {:.1} s, {speed:.2} GB/s", format_bytes(read), took.as_secs_f64())
    }
}

fn show(bar: &ProgressBar, expected: u64) {
    let template = "verifying {binary_bytes} of {binary_total_bytes} {wide_bar} {binary_bytes_per_sec}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_length(expected);
    bar.set_draw_target(ProgressDrawTarget::stderr());
}

fn state_name(state: &InspectedState) -> &'static str {
    match state {
        InspectedState::Ok => "ok",
        InspectedState::Corrupt { .. } => "corrupt",
        InspectedState::Removed => "removed",
    }
}

fn as_json(record: &InspectedRecord<'_>) -> Value {
    let header = record.name.as_ref().map(|(header, _)| *header);
    let section = record.name.as_ref().map(|(_, section)| section);
    let reason = match &record.state {
        InspectedState::Corrupt { reason } => Some(reason),
        _ => None,
    };
    json!({
        "file": record.file, "offset": record.offset, "bytes": record.len,
        "state": state_name(&record.state), "reason": reason,
        "tenant": section.map(|section| section.tenant.as_str()),
        "key": section.map(|section| format::escaped(section.key.as_bytes())),
        "id": header.map(|header| header.id.to_string()),
        "epoch": header.map(|header| header.word.epoch().to_string()),
        "stripe_index": header.map(|header| header.stripe_index),
        "stripe_count": header.map(|header| header.stripe_count),
        "length": header.map(|header| header.stripe_len),
    })
}

fn write_record(out: &mut impl Write, record: &InspectedRecord<'_>, first: bool) -> std::io::Result<()> {
    if first {
        writeln!(
            out,
            "{:<8} {:>14} {:>12} {:>12} {:>9}  file, key",
            "state", "epoch", "offset", "bytes", "stripe"
        )?;
    }
    let (epoch, stripe, key) = match &record.name {
        None => ("-".to_owned(), "-".to_owned(), "unknown".to_owned()),
        Some((header, section)) => {
            let tenant = section.tenant.as_str();
            let key = format::escaped(section.key.as_bytes());
            let tenant = if tenant == "default" {
                String::new()
            } else {
                format!("{}:", format::escaped(tenant.as_bytes()))
            };
            (
                header.word.epoch().to_string(),
                format!("{}/{}", u32::from(header.stripe_index) + 1, header.stripe_count),
                format!("{tenant}{key}"),
            )
        }
    };
    let reason = match &record.state {
        InspectedState::Corrupt { reason } => format!(": {reason}"),
        _ => String::new(),
    };
    writeln!(
        out,
        "{:<8} {epoch:>14} {:>12} {:>12} {stripe:>9}  {}, {key}{reason}",
        state_name(&record.state),
        record.offset,
        record.len,
        format::escaped(record.file.as_bytes())
    )
}
