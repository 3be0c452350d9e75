//! `moontide inspect`: shows the memory layout of a node, or the contents of its disk.
//!
//! | file | content |
//! |---|---|
//! | `response` | responses of a node's admin endpoints |
//! | `map` | space of a segment: extents, free ranges, a drawing |
//! | `disk` | files of a node's disk |
//!
//! For memory it only queries the node and draws the response.

mod disk;
mod map;
mod response;

use std::io::{IsTerminal, Write};
use std::time::Duration;

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use moontide_bench::{
    format_bytes,
    http::{self, HttpError},
};
use moontide_settings::parse_duration;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{CommandError, ignore_broken_pipe};
use crate::format;
use crate::settings::CertificateArgs;
use map::{Kind, Map};
use response::{Node, Record, Segment};

const EXAMPLES: &str = "\
Examples:
  moontide inspect --admin 127.0.0.1:7403          all segments of a node
  moontide inspect --admin 127.0.0.1:7403 0        one segment: map, holes, records
  moontide inspect --admin 127.0.0.1:7403 0 --records 0 --width 120
  moontide inspect disk --dir /mnt/ssd/moontide    contents of the disk; see `moontide inspect disk --help`
  moontide inspect --admin 127.0.0.1:7403 0 --json | jq '.records[] | select(.state == \"writing\")'

`moontide node` prints the address after `admin`. If it begins with https://, --ca, --cert and --key (or MOONTIDE_CA, MOONTIDE_CERT
and MOONTIDE_KEY) must be set to the certificate of an operator. In a map # is live, w being written, d draining (killed, not yet
reclaimed), . free. Fragmentation is 1 - largest hole / free: 0 if the free space is contiguous.
Exit codes: 0 success, 1 failure, 2 wrong usage, 3 no such segment, 4 the node cannot be reached.";

/// Rows of the map: half a screen.
const ROWS: usize = 16;
/// Width without a terminal.
const WIDTH_DEFAULT: usize = 80;
const RECORDS_DEFAULT: usize = 40;

#[derive(Debug, ClapArgs)]
struct Args {
    /// Segment to show [default: list all segments]
    segment: Option<u32>,
    /// Admin address of the node: host:port, http://host:port or https://host:port
    #[arg(long, env = "MOONTIDE_ADMIN", value_name = "URL")]
    admin: String,
    /// Number of records to list, in address order; 0 for all
    #[arg(long, value_name = "N", default_value_t = RECORDS_DEFAULT)]
    records: usize,
    /// Characters per line [default: width of the terminal, or 80]
    #[arg(long, value_parser = clap::value_parser!(u16).range(20..=1000))]
    width: Option<u16>,
    /// Timeout of the request
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10s")]
    timeout: Duration,
    /// Print the response of the node as one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    certificate: CertificateArgs,
}

/// The server is not a Moontide node, or has another release.
#[derive(Debug, thiserror::Error)]
#[error("unexpected response of {admin} ({source}); check that it is a node of the same release")]
struct UnexpectedResponse {
    admin: String,
    source: serde_json::Error,
}

pub(crate) fn command() -> Command {
    let inspect = Command::new("inspect");
    // Set after the arguments: the doc comment of the struct would replace it otherwise.
    Args::augment_args(inspect)
        .about("Show the memory layout of a node, or the contents of its disk")
        .after_help(EXAMPLES)
        .subcommand(disk::command())
        .args_conflicts_with_subcommands(true)
        .subcommand_negates_reqs(true)
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    if let Some(("disk", matches)) = matches.subcommand() {
        return disk::run(matches);
    }
    let args = Args::from_arg_matches(matches).map_err(CommandError::usage)?;
    let mut out = std::io::stdout().lock();
    let path = args.segment.map_or("/segments".to_owned(), |segment| format!("/segments/{segment}"));
    let credentials = args.certificate.load()?;
    let body = http::get_as(credentials.as_deref(), &args.admin, &path, args.timeout);
    let body = body.map_err(|error| match error {
        HttpError::Unreachable { .. } | HttpError::NeedsCertificate { .. } | HttpError::Tls { .. } => {
            CommandError::Unreachable(Box::new(error))
        }
        HttpError::Status { status: 404, .. } if args.segment.is_some() => {
            CommandError::NotFound(Box::new(error))
        }
        _ => CommandError::failed(error),
    })?;
    if args.json {
        let page: Value = parse(&args, &body)?;
        return ignore_broken_pipe(writeln!(out, "{page}"));
    }
    ignore_broken_pipe(match args.segment {
        None => print_node(&mut out, &parse(&args, &body)?),
        Some(_) => print_segment(&mut out, &parse(&args, &body)?, width(&args), args.records),
    })
}

fn parse<T: DeserializeOwned>(args: &Args, body: &[u8]) -> Result<T, CommandError> {
    let not = |source| CommandError::failed(UnexpectedResponse { admin: args.admin.clone(), source });
    serde_json::from_slice(body).map_err(not)
}

fn width(args: &Args) -> usize {
    let terminal = || {
        let out = std::io::stdout();
        let columns = out.is_terminal().then(|| rustix::termios::tcgetwinsize(&out).ok())??.ws_col;
        (columns >= 20).then_some(usize::from(columns))
    };
    args.width.map(usize::from).or_else(terminal).unwrap_or(WIDTH_DEFAULT)
}

fn print_node(out: &mut impl Write, node: &Node) -> std::io::Result<()> {
    writeln!(out, "=== Node {} ===", format::escaped(node.node.as_bytes()))?;
    writeln!(
        out,
        "{:>7} {:>5} {:>5} {:>10} {:>6} {:>6} {:>6} {:>6} {:>10} {:>10}",
        "segment", "group", "term", "size", "live", "wrtng", "drain", "free", "slots", "taken"
    )?;
    for segment in &node.segments {
        let share = |units: u64| format!("{:.1}%", 100.0 * units as f64 / segment.units.max(1) as f64);
        writeln!(
            out,
            "{:>7} {:>5} {:>5} {:>10} {:>6} {:>6} {:>6} {:>6} {:>10} {:>10}{}",
            segment.segment,
            segment.group.map_or("-".to_owned(), |group| group.to_string()),
            segment.term.map_or("-".to_owned(), |term| term.to_string()),
            format_bytes(segment.bytes()),
            share(segment.live_units),
            share(segment.writing_units),
            share(segment.draining_units),
            share(segment.free_units),
            segment.slots,
            segment.taken_slots(),
            if segment.draining { "  draining" } else { "" },
        )?;
    }
    Ok(())
}

fn print_segment(out: &mut impl Write, segment: &Segment, width: usize, most: usize) -> std::io::Result<()> {
    let unit = segment.unit_bytes;
    let size = |units: u64| format_bytes(units.saturating_mul(unit));
    let map = Map::new(segment.units, segment.records.iter().filter_map(Record::extent));
    writeln!(out, "=== Segment {} ===", segment.segment)?;
    writeln!(out, "Configuration:")?;
    match (segment.group, segment.term) {
        (Some(group), Some(term)) => {
            writeln!(out, "  Group: {group}, Term: {term}, Generation: {}", segment.generation)?
        }
        _ => writeln!(out, "  Group: none yet, Generation: {}", segment.generation)?,
    }
    writeln!(
        out,
        "  Unit: {unit} B, Units: {} ({}), Slots: {}",
        segment.units,
        size(segment.units),
        segment.slots
    )?;
    writeln!(out, "\nAllocation State:")?;
    for (name, units) in [
        ("Live", segment.live_units),
        ("Writing", segment.writing_units),
        ("Draining", segment.draining_units),
        ("Free", segment.free_units),
    ] {
        writeln!(out, "  {name:<8} {units:>10} units  {:>10}", size(units))?;
    }
    let count = |kind: Kind| segment.records.iter().filter(|record| record.kind() == Some(kind)).count();
    writeln!(
        out,
        "  Records  {:>10} live, {} writing, {} draining; {} of {} slots taken",
        count(Kind::Live),
        count(Kind::Writing),
        count(Kind::Draining),
        segment.taken_slots(),
        segment.slots
    )?;
    let holes = map.holes();
    writeln!(
        out,
        "  Holes    {:>10}, {} units free, the largest {} units ({})",
        holes.count,
        holes.free,
        holes.largest,
        size(holes.largest)
    )?;
    writeln!(out, "  Fragmentation: {:.2}", holes.fragmentation())?;
    if segment.truncated {
        writeln!(
            out,
            "  The node listed only its first {} records: map and holes are incomplete.",
            segment.records.len()
        )?;
    }
    let drawing = map.draw(width.saturating_sub(2).max(1), ROWS);
    writeln!(
        out,
        "\nBlock map (# live, w writing, d draining, . free; a character is {} units, {}):",
        drawing.step,
        size(drawing.step)
    )?;
    drawing.rows.iter().try_for_each(|row| writeln!(out, "  {row}"))?;
    print_records(out, segment, most)
}

fn print_records(out: &mut impl Write, segment: &Segment, most: usize) -> std::io::Result<()> {
    let mut records: Vec<&Record> = segment.records.iter().collect();
    records.sort_by_key(|record| (record.extent_start, record.slot));
    let shown = if most == 0 { records.len() } else { most.min(records.len()) };
    writeln!(out, "\nRecords:")?;
    if records.is_empty() {
        return writeln!(out, "  none");
    }
    writeln!(
        out,
        "  {:>8} {:<7} {:>14} {:>22} {:>12} {:>9}  key",
        "slot", "state", "epoch", "units", "length", "stripe"
    )?;
    for record in &records[..shown] {
        let units = format!("[{}, +{}]", record.extent_start, record.extent_units);
        let stripe = format!("{}/{}", record.stripe_index + 1, record.stripe_count);
        writeln!(
            out,
            "  {:>8} {:<7} {:>14} {units:>22} {:>12} {stripe:>9}  {}",
            record.slot,
            record.state,
            record.epoch,
            record.length,
            record.name()
        )?;
    }
    match records.len() - shown {
        0 => Ok(()),
        more => writeln!(out, "  … and {more} more; --records 0 lists all"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment() -> Segment {
        let page = serde_json::json!({
            "segment": 3, "generation": "17", "group": 1, "term": 2, "draining": false, "unit_bytes": 512,
            "units": 100, "live_units": 30, "writing_units": 10, "draining_units": 5, "free_units": 55,
            "slots": 64, "free_slots": 60,
            "records": [
                {"slot": 0, "state": "ready", "epoch": "2.1", "id": "00ff", "tenant": "default", "key": "model/a\u{1b}[2J",
                 "extent_start": 0, "extent_units": 30, "stripe_index": 0, "stripe_count": 1, "length": 15000},
                {"slot": 1, "state": "writing", "epoch": "2.2", "id": "01ff", "tenant": null, "key": null,
                 "extent_start": 40, "extent_units": 10, "stripe_index": 1, "stripe_count": 2, "length": 5000},
                {"slot": 2, "state": "dead", "epoch": "1.9", "id": "02ff", "tenant": "other", "key": "b",
                 "extent_start": 95, "extent_units": 5, "stripe_index": 0, "stripe_count": 1, "length": 2000},
            ],
            "truncated": false,
        });
        serde_json::from_value(page).unwrap()
    }

    fn shown(most: usize) -> String {
        let mut out = vec![];
        print_segment(&mut out, &segment(), 52, most).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn segment_output_shows_map_free_ranges_and_records() {
        let shown = shown(0);
        for part in [
            "=== Segment 3 ===",
            "Group: 1, Term: 2",
            "2, 55 units free, the largest 45 units",
            "Fragmentation: 0.18",
            "1 live, 1 writing, 1 draining; 4 of 64 slots taken",
            "a character is 1 units",
            "  ##############################..........wwwwwwwwww\n  .............................................ddddd\n",
            "[40, +10]",
            "2/2",
            "other:b",
            "id 01ff",
        ] {
            assert!(shown.contains(part), "{part:?} is not in\n{shown}");
        }
        assert!(!shown.contains('\u{1b}'), "control characters of a key reached the terminal");
    }

    #[test]
    fn long_record_list_is_truncated_with_count() {
        assert!(shown(1).contains("… and 2 more"));
        assert!(!shown(3).contains("more"));
    }

    #[test]
    fn node_output_lists_segments() {
        let node = Node { node: "0000000000001234".to_owned(), segments: vec![segment()] };
        let mut out = vec![];
        print_node(&mut out, &node).unwrap();
        let shown = String::from_utf8(out).unwrap();
        assert!(shown.contains("Node 0000000000001234") && shown.contains("30.0%"), "{shown}");
    }
}
