//! `moontide segments`: the segments of the nodes, as the masters see them, and the drain of one.

use std::io::Write;

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use moontide_bench::format_bytes;
use moontide_client::SegmentInfo;
use moontide_types::{ErrorCode, NodeId, SegmentId};
use serde_json::json;

use super::{CommandError, EXIT_CODES, Target, ignore_broken_pipe, refuse_tenant};

const EXAMPLES: &str = "\
Examples:
  moontide segments                                   all segments of all nodes
  moontide segments --node 00f1c2d3e4a5b697           of one node
  moontide segments drain 00f1c2d3e4a5b697 3          empty segment 3 of that node

`moontide inspect` shows what is in a segment.";

const DRAIN_EXAMPLES: &str = "\
Examples:
  moontide segments drain 00f1c2d3e4a5b697 3           move its objects to other segments
  moontide segments drain 00f1c2d3e4a5b697 3 --evict   evict them instead

The segment accepts no new objects, and is empty when `moontide segments` shows no bytes in it. The order ends when another
master takes its group over. `moontide node drain` empties a whole node.
Exit codes: 0 success, 1 failure, 2 wrong usage, 3 no such segment, 4 the master cannot be reached.";

#[derive(Debug, ClapArgs)]
struct ListArgs {
    /// Only segments of this node
    #[arg(long, value_name = "ID")]
    node: Option<NodeId>,
    #[command(flatten)]
    target: Target,
}

#[derive(Debug, ClapArgs)]
struct DrainArgs {
    /// Id of the node
    node: NodeId,
    /// Id of the segment
    segment: u32,
    /// Evict the objects that are not in use; otherwise they move to other segments
    #[arg(long)]
    evict: bool,
    #[command(flatten)]
    target: Target,
}

/// No segment has this id.
#[derive(Debug, thiserror::Error)]
#[error("node {node} has no segment {segment}; `moontide segments` lists all")]
struct NoSuchSegment {
    node: NodeId,
    segment: u32,
}

pub(crate) fn command() -> Command {
    let drain =
        DrainArgs::augment_args(Command::new("drain")).about("Empty a segment").after_help(DRAIN_EXAMPLES);
    ListArgs::augment_args(Command::new("segments"))
        .about("List the segments of the nodes")
        .after_help(format!("{EXAMPLES}\n\n{EXIT_CODES}"))
        .args_conflicts_with_subcommands(true)
        .subcommand(drain)
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    if let Some(("drain", matches)) = matches.subcommand() {
        return drain(matches);
    }
    refuse_tenant(matches)?;
    let ListArgs { node, target } = ListArgs::from_arg_matches(matches).map_err(CommandError::usage)?;
    let segments = target.connect()?.segments(node)?;
    let mut out = std::io::stdout().lock();
    ignore_broken_pipe(segments.iter().try_for_each(|segment| match target.json {
        true => writeln!(out, "{}", to_json(segment)),
        false => writeln!(out, "{}", to_line(segment)),
    }))
}

fn to_json(segment: &SegmentInfo) -> serde_json::Value {
    json!({
        "node": segment.node.to_string(),
        "segment": segment.segment.0,
        "medium": segment.medium.name(),
        "group": segment.group,
        "state": segment.state.name(),
        "bytes": segment.bytes,
        "live_bytes": segment.live_bytes,
        "writing_bytes": segment.writing_bytes,
        "draining_bytes": segment.draining_bytes,
        "free_bytes": segment.free_bytes,
    })
}

fn to_line(segment: &SegmentInfo) -> String {
    format!(
        "{} {:>5} {:<6} group {:<4} {:<9} {:>10} of {:>10} used",
        segment.node,
        segment.segment.0,
        segment.medium.name(),
        segment.group,
        segment.state.name(),
        format_bytes(segment.bytes - segment.free_bytes),
        format_bytes(segment.bytes),
    )
}

fn drain(matches: &ArgMatches) -> Result<(), CommandError> {
    let DrainArgs { node, segment, evict, target } =
        DrainArgs::from_arg_matches(matches).map_err(CommandError::usage)?;
    let store = target.connect()?;
    store.drain_segment(node, SegmentId(segment), evict).map_err(|error| match error.code() {
        ErrorCode::NotFound => CommandError::NotFound(Box::new(NoSuchSegment { node, segment })),
        _ => error.into(),
    })?;
    let mut out = std::io::stdout().lock();
    ignore_broken_pipe(match target.json {
        true => writeln!(out, "{}", json!({ "node": node.to_string(), "segment": segment, "drain": true })),
        false => writeln!(out, "segment {segment} of node {node} drains"),
    })
}
