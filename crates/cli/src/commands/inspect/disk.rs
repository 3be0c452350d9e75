//! `moontide inspect disk`: what is in the directory of a node's disk, and whether it is what was written.
//!
//! Looks at the files themselves and changes none of them; no node is asked. What is listed is printed as it is found,
//! so that a tier of any size needs no memory; the totals come last.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use moontide_disk::{
    BackendKind, EngineChoice, Inspected, InspectedState, OpenError, OsStorage, QueueConfig, Storage,
};
use serde_json::{Value, json};

use super::super::{Failure, written};
use crate::text;

const EXAMPLES: &str = "\
Examples:
  moontide inspect disk --dir /mnt/ssd/moontide                totals, and what is damaged
  moontide inspect disk --dir /mnt/ssd/moontide --verify       the same, with every byte of it read
  moontide inspect disk --dir /mnt/ssd/moontide --all          every record
  moontide inspect disk --dir /mnt/ssd/moontide --all --json | jq 'select(.state == \"removed\")'

Nothing is changed. The node should be stopped: of one that runs, a record that is just being written or deleted may be
missing, or look damaged. Without --verify a record is judged by its header, key and attributes; with it, its payload is
read past the page cache and compared with its digests. --json prints an object per listed record, and one with the
totals at the end.
Exit codes: 0 success, 1 failure or something is damaged, 2 wrong usage.";

/// What is looked at.
#[derive(Debug, ClapArgs)]
struct Args {
    /// The directory, as in the node's disk.dir
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// How records stand in it: bucket, file or offset [default: what its files look like]
    #[arg(long, value_name = "NAME")]
    backend: Option<BackendKind>,
    /// Read and verify every payload
    #[arg(long)]
    verify: bool,
    /// List every record, not only those that are damaged
    #[arg(long)]
    all: bool,
    /// Print JSON, an object per line
    #[arg(long)]
    json: bool,
}

/// Why a directory cannot be looked at.
#[derive(Debug, thiserror::Error)]
enum InspectError {
    #[error("{dir}: {source}; name the directory of a node's disk with --dir")]
    Unreadable { dir: String, source: std::io::Error },
    #[error(
        "{dir} has no files of a disk tier; name the directory of a node's disk with --dir, or its --backend"
    )]
    Nothing { dir: String },
    #[error("{dir} has files of the backends {}; say which one is meant with --backend", names(found))]
    Ambiguous { dir: String, found: Vec<BackendKind> },
    #[error("{dir}: {source}")]
    Tier { dir: String, source: OpenError },
    #[error(
        "{dir}: {damaged} records are damaged; a node passes them over, and nothing needs to be done unless there are more each time"
    )]
    Damaged { dir: String, damaged: u64 },
}

fn names(kinds: &[BackendKind]) -> String {
    kinds.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
}

pub(super) fn command() -> Command {
    // After the arguments, whose own description would stand in its place.
    Args::augment_args(Command::new("disk"))
        .about("List and verify what is on a node's disk, from its files")
        .after_help(EXAMPLES)
}

pub(super) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let args = Args::from_arg_matches(matches).map_err(Failure::usage)?;
    let dir = args.dir.display().to_string();
    let unreadable = |source| Failure::usage(InspectError::Unreadable { dir: dir.clone(), source });
    let found = kinds_in(&args.dir).map_err(unreadable)?;
    let (kind, guessed) = match (args.backend, &*found) {
        (Some(kind), _) => (kind, false),
        (None, [kind]) => (*kind, true),
        (None, []) => return Err(Failure::usage(InspectError::Nothing { dir })),
        (None, _) => return Err(Failure::usage(InspectError::Ambiguous { dir, found })),
    };
    let storage = OsStorage::open(&args.dir, EngineChoice::Auto).map_err(unreadable)?;
    let engine = storage.engine();
    let storage: Arc<dyn Storage> = Arc::new(storage);
    let look = |verify, each: &mut dyn FnMut(Inspected<'_>)| {
        let mut queue = storage.queue(&QueueConfig::default());
        let looked = kind.inspect(&storage, &mut *queue, verify, each);
        looked.map_err(|source| Failure::failed(InspectError::Tier { dir: dir.clone(), source }))
    };

    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    if args.verify && std::io::stderr().is_terminal() {
        // How much there is to read is known after a look without reading it.
        let mut expected = 0;
        look(false, &mut |record| expected += record.len)?;
        show(&bar, expected);
    }
    let mut out = std::io::stdout().lock();
    let mut output = Ok(());
    let mut totals = Totals::default();
    let started = Instant::now();
    look(args.verify, &mut |record| {
        let damaged = totals.add(&record);
        bar.set_position(totals.bytes);
        if (args.all || damaged) && output.is_ok() {
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
        let seen = Seen { dir: &dir, kind, guessed, engine, verified: args.verify.then_some(took) };
        output = match args.json {
            true => writeln!(out, "{}", totals.json(&seen)),
            false => totals.write(&mut out, &seen),
        };
    }
    written(output)?;
    match totals.damaged {
        0 => Ok(()),
        damaged => Err(Failure::failed(InspectError::Damaged { dir, damaged })),
    }
}

/// Which backends' files stand in a directory. A disk on which nothing was written yet looks the same with all of them.
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

/// How it was looked at.
struct Seen<'a> {
    dir: &'a str,
    kind: BackendKind,
    guessed: bool,
    engine: &'static str,
    /// How long it took to read all payloads, if they were.
    verified: Option<Duration>,
}

/// What is in a tier.
#[derive(Debug, Default)]
struct Totals {
    /// Hashes of their names: a tier of the file backend has millions.
    files: HashSet<u64>,
    records: u64,
    /// Of all that is known how long it is, whatever it is worth.
    bytes: u64,
    served_bytes: u64,
    removed: u64,
    removed_bytes: u64,
    damaged: u64,
    damaged_bytes: u64,
    listed: u64,
}

impl Totals {
    /// Whether it is damaged.
    fn add(&mut self, record: &Inspected<'_>) -> bool {
        let mut hasher = DefaultHasher::new();
        record.file.hash(&mut hasher);
        self.files.insert(hasher.finish());
        self.bytes += record.len;
        let (count, bytes) = match record.state {
            InspectedState::Ok => (&mut self.records, &mut self.served_bytes),
            InspectedState::Removed => (&mut self.removed, &mut self.removed_bytes),
            InspectedState::Damaged { .. } => (&mut self.damaged, &mut self.damaged_bytes),
        };
        *count += 1;
        *bytes += record.len;
        matches!(record.state, InspectedState::Damaged { .. })
    }

    fn json(&self, seen: &Seen<'_>) -> Value {
        json!({
            "dir": seen.dir, "backend": seen.kind.name(), "engine": seen.engine,
            "files": self.files.len(), "records": self.records, "bytes": self.served_bytes,
            "removed": self.removed, "removed_bytes": self.removed_bytes,
            "damaged": self.damaged, "damaged_bytes": self.damaged_bytes,
            "verified": seen.verified.is_some(),
            "seconds": seen.verified.map(|took| took.as_secs_f64()),
        })
    }

    fn write(&self, out: &mut impl Write, seen: &Seen<'_>) -> std::io::Result<()> {
        if self.listed > 0 {
            writeln!(out)?;
        }
        writeln!(out, "=== Disk {} ===", seen.dir)?;
        let how = if seen.guessed { "by its files" } else { "as told" };
        writeln!(out, "  Backend: {} ({how}), Engine: {}", seen.kind, seen.engine)?;
        writeln!(out, "  Files    {:>12}", self.files.len())?;
        for (name, count, bytes) in [
            ("Records", self.records, self.served_bytes),
            ("Removed", self.removed, self.removed_bytes),
            ("Damaged", self.damaged, self.damaged_bytes),
        ] {
            writeln!(out, "  {name:<8} {count:>12}  {:>10}", text::bytes(bytes))?;
        }
        let Some(took) = seen.verified else {
            return writeln!(out, "  Payloads were not read: --verify does.");
        };
        let read = self.served_bytes + self.damaged_bytes;
        let speed = read as f64 / took.as_secs_f64().max(1e-9) / 1e9;
        writeln!(out, "  Verified {} in {:.1} s, {speed:.2} GB/s", text::bytes(read), took.as_secs_f64())
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
        InspectedState::Damaged { .. } => "damaged",
        InspectedState::Removed => "removed",
    }
}

fn as_json(record: &Inspected<'_>) -> Value {
    let header = record.name.as_ref().map(|(header, _)| *header);
    let section = record.name.as_ref().map(|(_, section)| section);
    let why = match &record.state {
        InspectedState::Damaged { why } => Some(why),
        _ => None,
    };
    json!({
        "file": record.file, "offset": record.offset, "bytes": record.len,
        "state": state_name(&record.state), "why": why,
        "tenant": section.map(|section| section.tenant.as_str()),
        "key": section.map(|section| text::escaped(section.key.as_bytes())),
        "id": header.map(|header| header.id.to_string()),
        "epoch": header.map(|header| header.word.epoch().to_string()),
        "stripe_index": header.map(|header| header.stripe_index),
        "stripe_count": header.map(|header| header.stripe_count),
        "length": header.map(|header| header.stripe_len),
    })
}

fn write_record(out: &mut impl Write, record: &Inspected<'_>, first: bool) -> std::io::Result<()> {
    if first {
        writeln!(
            out,
            "{:<8} {:>14} {:>12} {:>12} {:>9}  file, key",
            "state", "epoch", "offset", "bytes", "stripe"
        )?;
    }
    let (epoch, stripe, key) = match &record.name {
        None => ("-".to_owned(), "-".to_owned(), "not known".to_owned()),
        Some((header, section)) => {
            let tenant = section.tenant.as_str();
            let key = text::escaped(section.key.as_bytes());
            let tenant = if tenant == "default" {
                String::new()
            } else {
                format!("{}:", text::escaped(tenant.as_bytes()))
            };
            (
                header.word.epoch().to_string(),
                format!("{}/{}", u32::from(header.stripe_index) + 1, header.stripe_count),
                format!("{tenant}{key}"),
            )
        }
    };
    let why = match &record.state {
        InspectedState::Damaged { why } => format!(": {why}"),
        _ => String::new(),
    };
    writeln!(
        out,
        "{:<8} {epoch:>14} {:>12} {:>12} {stripe:>9}  {}, {key}{why}",
        state_name(&record.state),
        record.offset,
        record.len,
        text::escaped(record.file.as_bytes())
    )
}
