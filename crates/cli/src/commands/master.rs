//! `moontide master`: runs a master until SIGTERM or SIGINT.
//!
//! Its flags are the settings of [`MasterConfig`].

use std::io::Write;

use clap::{ArgMatches, Args as _, Command, FromArgMatches};
use moontide_master::{MasterConfig, Server, StartError};

use super::CommandError;
use crate::process::{LOG_SERVER, Signals, abort_on_panic, log_to_stderr};
use crate::settings::{SettingsArgs, warn_of_unknown_variables};

const EXAMPLES: &str = "\
Examples:
  moontide master
      on this host only, without persistent state
  moontide master --data-dir /var/lib/moontide/master
      keeps the cluster's identity across restarts
  moontide master --config /etc/moontide/master.toml --frame-threads 8
      settings from a file, one overridden by a flag
  moontide master --grpc-listen 0.0.0.0:7400 --grpc-advertise master-0:7400 \\
                  --frame-listen 0.0.0.0:7401 --frame-advertise master-0:7401
      reachable by other hosts as master-0
  moontide master --print-config > master.toml
      all settings with comments, as a starting point

Every setting can also be set by the environment, e.g. MOONTIDE_MASTER_GROUPS=4. MOONTIDE_LOG sets the log filter of
stderr: error, warn, info, debug, or per module. Exit codes: 0 stopped by SIGTERM or ctrl-c, 1 failure, 2 usage.";

pub(crate) fn command() -> Command {
    SettingsArgs::<MasterConfig>::augment_args(Command::new("master"))
        .about("Run a master: the metadata server of a cluster")
        .after_help(EXAMPLES)
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    let args = SettingsArgs::<MasterConfig>::from_arg_matches(matches).map_err(CommandError::usage)?;
    let loaded = args.load()?;
    if args.is_print() {
        return args.print(&loaded.config);
    }
    log_to_stderr(LOG_SERVER);
    abort_on_panic();
    warn_of_unknown_variables(&loaded);
    let mut signals = Signals::catch().map_err(CommandError::failed)?;
    let server = Server::start(loaded.config).map_err(|error| match error {
        StartError::Config(_) => CommandError::usage(error),
        _ => CommandError::failed(error),
    })?;
    announce(&server).map_err(CommandError::failed)?;
    signals.wait();
    server.shutdown();
    Ok(())
}

/// Prints one line per address; scripts that use port 0 read them.
pub(super) fn announce(server: &Server) -> std::io::Result<()> {
    let addresses = server.addresses();
    let mut out = std::io::stdout().lock();
    writeln!(out, "grpc {}", addresses.grpc)?;
    writeln!(out, "frame {}", addresses.frame)?;
    writeln!(out, "admin {}", server.admin_url())?;
    out.flush()
}
