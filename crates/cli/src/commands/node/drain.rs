//! `moontide node drain` and `moontide node undrain`: empty a running node, so that it can be stopped without a loss.

use std::io::Write;
use std::time::{Duration, Instant};

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use moontide_bench::format_bytes;
use moontide_client::{DrainProgress, Store, StoreError};
use moontide_settings::parse_duration;
use moontide_types::{ErrorCode, NodeId};
use serde_json::json;

use super::super::{CommandError, Target, ignore_broken_pipe};

const EXAMPLES: &str = "\
Examples:
  moontide node drain 00f1c2d3e4a5b697 --master master-0:7400   empty the node, then `systemctl stop` it
  moontide node drain 00f1c2d3e4a5b697 --wait 10m               wait ten minutes at most
  moontide node drain 00f1c2d3e4a5b697 --wait 0s                return at once; run it again to see how far it is
  moontide node undrain 00f1c2d3e4a5b697                        let it get new objects again

The node gets no new objects, and those in its memory move to the memory of other nodes, the most used ones first. If these
are full, the objects that were used least are evicted, wherever they are. Objects on its disk stay there. The drain goes on
until the node stops or `undrain`, also if this command ends. `copy_bytes_per_s` of the other nodes limits its speed.
Exit codes: 0 the node is empty, 1 objects are left, 2 wrong usage, 3 no such node, 4 the master cannot be reached.";

const UNDRAIN_EXAMPLES: &str = "\
Examples:
  moontide node undrain 00f1c2d3e4a5b697

The node gets new objects again. Those that have moved stay where they are.
Exit codes: 0 success, 1 failure, 2 wrong usage, 3 no such node, 4 the master cannot be reached.";

/// Interval at which the masters are asked for the progress.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Time without progress after which the command says what may be wrong.
const STALL_HINT_AFTER: Duration = Duration::from_secs(10);

#[derive(Debug, ClapArgs)]
struct DrainArgs {
    /// Id of the node, as `moontide node` prints it
    node: NodeId,
    /// Longest time to wait until the node is empty; 0s returns at once
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1h")]
    wait: Duration,
    #[command(flatten)]
    target: Target,
}

#[derive(Debug, ClapArgs)]
struct UndrainArgs {
    /// Id of the node
    node: NodeId,
    #[command(flatten)]
    target: Target,
}

/// No node has this id.
#[derive(Debug, thiserror::Error)]
#[error("no node {node} is registered; registered are: {}", known.join(", "))]
struct NoSuchNode {
    node: NodeId,
    known: Vec<String>,
}

/// The wait has ended before the drain.
#[derive(Debug, thiserror::Error)]
#[error(
    "{left} are left on the node after {waited:.0?}; the drain goes on: run the command again, or check that other nodes \
     have space"
)]
struct NotEmpty {
    left: String,
    waited: Duration,
}

pub(super) fn command() -> Command {
    // The texts are set after the arguments: the doc comment of the struct would replace them otherwise.
    DrainArgs::augment_args(Command::new("drain"))
        .about("Move the objects of a node to other nodes")
        .after_help(EXAMPLES)
}

pub(super) fn undrain_command() -> Command {
    UndrainArgs::augment_args(Command::new("undrain"))
        .about("Let a drained node get new objects again")
        .after_help(UNDRAIN_EXAMPLES)
}

pub(super) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    let DrainArgs { node, wait, target } =
        DrainArgs::from_arg_matches(matches).map_err(CommandError::usage)?;
    let store = target.connect()?;
    let before = store.drain_progress(node).map_err(|error| of_node(&store, node, error))?;
    store.drain_node(node).map_err(|error| of_node(&store, node, error))?;
    let started = Instant::now();
    let progress = if wait.is_zero() { before } else { wait_until_empty(&store, node, before, wait)? };
    let moved = before.bytes_left.saturating_sub(progress.bytes_left);
    let mut out = std::io::stdout().lock();
    ignore_broken_pipe(if target.json {
        let object = json!({
            "node": node.to_string(), "empty": progress.is_empty(), "bytes_left": progress.bytes_left,
            "bytes_gone": moved, "seconds": started.elapsed().as_secs_f64(),
        });
        writeln!(out, "{object}")
    } else if progress.is_empty() {
        writeln!(out, "node {node} is empty: {} moved", format_bytes(moved))
    } else {
        writeln!(out, "node {node} drains: {} left", format_bytes(progress.bytes_left))
    })?;
    if wait.is_zero() || progress.is_empty() {
        return Ok(());
    }
    let left = format_bytes(progress.bytes_left);
    Err(CommandError::failed(NotEmpty { left, waited: started.elapsed() }))
}

pub(super) fn run_undrain(matches: &ArgMatches) -> Result<(), CommandError> {
    let UndrainArgs { node, target } = UndrainArgs::from_arg_matches(matches).map_err(CommandError::usage)?;
    let store = target.connect()?;
    store.undrain_node(node).map_err(|error| of_node(&store, node, error))?;
    let mut out = std::io::stdout().lock();
    ignore_broken_pipe(match target.json {
        true => writeln!(out, "{}", json!({ "node": node.to_string(), "drain": false })),
        false => writeln!(out, "node {node} gets new objects again"),
    })
}

/// Waits until a node is empty, with a progress bar on a terminal.
fn wait_until_empty(
    store: &Store,
    node: NodeId,
    before: DrainProgress,
    wait: Duration,
) -> Result<DrainProgress, CommandError> {
    let bar = ProgressBar::with_draw_target(Some(before.bytes_left), ProgressDrawTarget::stderr());
    let style = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} ETA {eta}";
    bar.set_style(ProgressStyle::with_template(style).expect("template is valid"));
    bar.set_message("draining");
    let started = Instant::now();
    let (mut least, mut progressed, mut is_hinted) = (u64::MAX, started, false);
    loop {
        let progress = store.drain_progress(node).map_err(|error| of_node(store, node, error))?;
        bar.set_position(before.bytes_left.saturating_sub(progress.bytes_left));
        if progress.is_empty() || started.elapsed() >= wait {
            bar.finish_and_clear();
            return Ok(progress);
        }
        if progress.bytes_left < least {
            (least, progressed) = (progress.bytes_left, Instant::now());
        } else if progressed.elapsed() >= STALL_HINT_AFTER && !is_hinted {
            is_hinted = true;
            bar.suspend(|| {
                eprintln!(
                    "moontide: no progress for {} s: the other nodes may be full, or there are none; objects without digests \
                     and objects being written cannot move",
                    STALL_HINT_AFTER.as_secs()
                );
            });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Names the registered nodes if there is none with this id.
fn of_node(store: &Store, node: NodeId, error: StoreError) -> CommandError {
    if error.code() != ErrorCode::NotFound {
        return CommandError::from(error);
    }
    let known = store.nodes().unwrap_or_default();
    let known = known.iter().map(|info| info.node.to_string()).collect();
    CommandError::NotFound(Box::new(NoSuchNode { node, known }))
}
