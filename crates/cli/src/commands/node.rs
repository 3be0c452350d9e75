//! `moontide node`: runs a node until SIGTERM or SIGINT. Its flags are the settings of [`NodeConfig`]. `node drain` and
//! `node undrain` ([`drain`]) concern nodes that run elsewhere.

mod drain;

use std::io::Write;
use std::path::PathBuf;

use clap::{ArgMatches, Args as _, Command, FromArgMatches};
use moontide_node::{Node, NodeConfig, StartError};

use super::CommandError;
use crate::process::{LOG_SERVER, Signals, abort_on_panic, log_to_stderr};
use crate::settings::{SettingsArgs, warn_of_unknown_variables};

const EXAMPLES: &str = "\
Examples:
  moontide node --memory-bytes 4GiB
      master on this host; reachable on this host only
  moontide node --master master-0:7400 --memory-bytes 64GiB --listen 10.0.0.7:7500
      master on another host
  moontide node --listen 0.0.0.0:7500 --advertise 10.0.0.7:7500 \\
                --ca ca.pem --cert node.pem --key node-key.pem
      listen on all interfaces, advertise one of them
  moontide node --config /etc/moontide/node.toml --rack r12
      settings from a file, one overridden by a flag
  moontide node --print-config > node.toml
      all settings with comments, as a starting point
  moontide node --memory-bytes 64GiB --disk-dir /mnt/ssd/moontide --disk-limit 200GiB
      with a disk tier for objects that do not fit into memory; repeat --disk-dir for several SSDs
  moontide node drain 00f1c2d3e4a5b697
      move the objects of a running node to the others; see `moontide node drain --help`

Prints `node ID`, `tcp ADDRESS`, `shm PATH`, `disk DIR`, `admin URL` and `ready`, one per line, when it serves. Every
setting can also be set by the environment, e.g. MOONTIDE_NODE_MEMORY_BYTES=4GiB; in the file, disk settings are in
the table [disk]. MOONTIDE_LOG sets the log filter of stderr.
On SIGTERM or ctrl-c, a node first moves its objects to other nodes if --drain-on-stop is set, and one with a disk writes
them to it; a second signal ends that.
Exit codes: 0 stopped by SIGTERM or ctrl-c, 1 failure, 2 usage, 4 the master cannot be reached.";

pub(crate) fn command() -> Command {
    SettingsArgs::<NodeConfig>::augment_args(Command::new("node"))
        .about("Run a node: owns memory and disk, serves the data plane")
        .after_help(EXAMPLES)
        .args_conflicts_with_subcommands(true)
        .subcommand(drain::command())
        .subcommand(drain::undrain_command())
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    match matches.subcommand() {
        Some(("drain", matches)) => return drain::run(matches),
        Some(("undrain", matches)) => return drain::run_undrain(matches),
        _ => {}
    }
    let args = SettingsArgs::<NodeConfig>::from_arg_matches(matches).map_err(CommandError::usage)?;
    let loaded = args.load()?;
    if args.is_print() {
        return args.print(&loaded.config);
    }
    log_to_stderr(LOG_SERVER);
    abort_on_panic();
    warn_of_unknown_variables(&loaded);
    raise_limit_of_files();
    let mut signals = Signals::catch().map_err(CommandError::failed)?;
    let disk = loaded.config.disk.as_ref().map_or_else(Vec::new, |disk| disk.dir.clone());
    let node = Node::start(loaded.config).map_err(start_failure)?;
    announce(&node, &disk, "admin").map_err(CommandError::failed)?;
    signals.wait();
    let flush = node.flush_canceller();
    // Ends with the process, if no second signal arrives.
    std::thread::spawn(move || {
        signals.wait();
        flush.cancel();
    });
    node.shutdown();
    Ok(())
}

/// Allows as many open files as the system lets this process have: the usual limit of 1,024, for programs that cannot handle
/// more, is too low for the connections of a large cluster.
fn raise_limit_of_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // If it fails, the node accepts fewer connections, and says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

pub(super) fn start_failure(error: StartError) -> CommandError {
    match error {
        StartError::Config(_) | StartError::Plan(_) => CommandError::usage(error),
        StartError::Master { .. } => CommandError::Unreachable(Box::new(error)),
        _ => CommandError::failed(error),
    }
}

/// Prints one line per address; scripts that use port 0 read them. The last line is `ready`.
pub(super) fn announce(node: &Node, disk: &[PathBuf], admin: &str) -> std::io::Result<()> {
    let addresses = node.addresses();
    let mut out = std::io::stdout().lock();
    writeln!(out, "node {}", node.id())?;
    addresses.tcp.iter().try_for_each(|address| writeln!(out, "tcp {address}"))?;
    if let Some(socket) = &addresses.shm_socket {
        writeln!(out, "shm {}", socket.display())?;
    }
    disk.iter().try_for_each(|dir| writeln!(out, "disk {}", dir.display()))?;
    if let Some(url) = node.admin_url() {
        writeln!(out, "{admin} {url}")?;
    }
    writeln!(out, "ready")?;
    out.flush()
}
