//! `moontide node`: runs a node until it is told to stop.
//!
//! Settings are described once, in [`Settings`]: flags, variables and the file have the same names, and the printed file
//! takes its comments from the help texts.

mod settings;

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use moontide_node::{Node, NodeConfig, StartError};
use tracing::warn;

use super::{Failure, written};
use crate::process::{LOG_SERVER, Signals, abort_on_panic, log_to_stderr};
use settings::{ENVIRONMENT_PREFIX, Settings, SettingsError};

const EXAMPLES: &str = "\
Examples:
  moontide node --memory-bytes 4GiB
      for a master on this host, reachable on this host only
  moontide node --master master-0:7400 --memory-bytes 64GiB --listen 10.0.0.7:7500
      for a master on another host
  moontide node --listen 0.0.0.0:7500 --advertise 10.0.0.7:7500
      on all cards, known to others by one of them
  moontide node --config /etc/moontide/node.toml --rack r12
      settings from a file, one of them by a flag
  moontide node --print-config > node.toml
      every setting with its meaning, as a file to begin with
  moontide node --memory-bytes 64GiB --disk-dir /mnt/ssd/moontide --disk-limit 200GiB
      with a disk for what does not fit into memory

When it serves it prints `node ID`, `tcp ADDRESS`, `door PATH`, `disk DIR`, `admin URL` and `ready`, a line each. Every
setting can also be given by the environment, as MOONTIDE_NODE_MEMORY_BYTES=4GiB; in the file, those of the disk are the
table [disk]. MOONTIDE_LOG names what is logged to stderr.
Exit codes: 0 stopped by SIGTERM or ctrl-c, 1 failure, 2 usage, 4 the master cannot be reached.";

/// How it is run.
#[derive(Debug, ClapArgs)]
struct Args {
    /// TOML file with settings; the environment and flags win over it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the settings in force as a TOML file, and do nothing else
    #[arg(long)]
    print_config: bool,
    #[command(flatten)]
    settings: Settings,
}

pub(crate) fn command() -> Command {
    let node = Command::new("node");
    // After the arguments, whose own description would stand in its place.
    Args::augment_args(node).about("Run a node: owner of memory, server of transfers").after_help(EXAMPLES)
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let args = Args::from_arg_matches(matches).map_err(Failure::usage)?;
    let config = configure(args.settings, args.config).map_err(Failure::usage)?;
    config.validate().map_err(Failure::usage)?;
    if args.print_config {
        return written(std::io::stdout().write_all(settings::to_toml(&config).as_bytes()));
    }
    log_to_stderr(LOG_SERVER);
    abort_on_panic();
    for variable in settings::unknown_variables() {
        warn!(variable, prefix = ENVIRONMENT_PREFIX, "a variable begins like ours and names no setting");
    }
    let signals = Signals::catch().map_err(Failure::failed)?;
    let disk = config.disk.as_ref().map(|disk| disk.dir.clone());
    let node = Node::start(config).map_err(start_failure)?;
    announce(&node, disk.as_deref(), "admin").map_err(Failure::failed)?;
    signals.wait();
    node.shutdown();
    Ok(())
}

/// Defaults, then the file, then flags and environment.
fn configure(given: Settings, file: Option<PathBuf>) -> Result<NodeConfig, SettingsError> {
    let from_file = file.map(|path| Settings::read(&path)).transpose()?.unwrap_or_default();
    let mut config = NodeConfig::default();
    from_file.apply(&mut config);
    given.apply(&mut config);
    Ok(config)
}

pub(super) fn start_failure(error: StartError) -> Failure {
    match error {
        StartError::Config(_) | StartError::Plan(_) => Failure::usage(error),
        StartError::Master { .. } => Failure::Unreachable(Box::new(error)),
        _ => Failure::failed(error),
    }
}

/// One line per fact, for people and for scripts that asked for port 0. The last one is `ready`.
pub(super) fn announce(node: &Node, disk: Option<&Path>, admin: &str) -> std::io::Result<()> {
    let addresses = node.addresses();
    let mut out = std::io::stdout().lock();
    writeln!(out, "node {:016x}", node.id().0)?;
    addresses.tcp.iter().try_for_each(|address| writeln!(out, "tcp {address}"))?;
    if let Some(door) = &addresses.door {
        writeln!(out, "door {}", door.display())?;
    }
    if let Some(dir) = disk {
        writeln!(out, "disk {}", dir.display())?;
    }
    if let Some(address) = addresses.admin {
        writeln!(out, "{admin} http://{address}")?;
    }
    writeln!(out, "ready")?;
    out.flush()
}
