//! `moontide master`: runs a master until it is told to stop.
//!
//! Flags are made from [`MasterConfig::SETTINGS`], so that help texts, the printed file and what is in force agree.

use std::io::Write;
use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use moontide_master::{ENVIRONMENT_PREFIX, MasterConfig, Server, StartError};
use tracing::warn;

use super::Failure;
use crate::process::{LOG_SERVER, Signals, abort_on_panic, log_to_stderr};

const EXAMPLES: &str = "\
Examples:
  moontide master
      on this host only, forgetting everything at the end
  moontide master --data-dir /var/lib/moontide/master
      keeps the cluster's identity over restarts
  moontide master --config /etc/moontide/master.toml --frame-threads 8
      settings from a file, one of them by a flag
  moontide master --grpc-listen 0.0.0.0:7400 --grpc-advertise master-0:7400 \\
                  --frame-listen 0.0.0.0:7401 --frame-advertise master-0:7401
      reachable by other hosts as master-0
  moontide master --print-config > master.toml
      every setting with its meaning, as a file to begin with

Every setting can also be given by the environment, as MOONTIDE_MASTER_GROUPS=4. MOONTIDE_LOG names what is logged to
stderr: error, warn, info, debug, or per module. Exit codes: 0 stopped by SIGTERM or ctrl-c, 1 failure, 2 usage.";

pub(crate) fn command() -> Command {
    let settings = MasterConfig::SETTINGS.iter().map(|setting| {
        let default = (setting.default)().unwrap_or_else(|| "not set".to_owned());
        Arg::new(setting.name)
            .long(setting.name.replace('_', "-"))
            .value_name("VALUE")
            .help(format!("{} [default: {default}]", setting.help.trim()))
    });
    Command::new("master")
        .about("Run a master: the index of a cluster")
        .after_help(EXAMPLES)
        .arg(
            Arg::new("config")
                .long("config")
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .help("TOML file with settings; the environment and flags win over it"),
        )
        .arg(
            Arg::new("print-config")
                .long("print-config")
                .action(ArgAction::SetTrue)
                .help("Print the settings in force as a TOML file, and do nothing else"),
        )
        .args(settings)
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let flags = MasterConfig::SETTINGS.iter().filter_map(|setting| {
        let value = matches.get_one::<String>(setting.name)?;
        Some((setting.name, value.as_str()))
    });
    // Variables that are not UTF-8 are nobody's setting.
    let environment = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let file = matches.get_one::<PathBuf>("config").map(PathBuf::as_path);
    let loaded = MasterConfig::load(file, environment, flags).map_err(Failure::usage)?;
    if matches.get_flag("print-config") {
        let valid = loaded.config.validate().map_err(Failure::usage)?;
        return std::io::stdout().write_all(valid.to_toml().as_bytes()).map_err(Failure::failed);
    }
    log_to_stderr(LOG_SERVER);
    abort_on_panic();
    for variable in loaded.unknown_variables {
        warn!(variable, prefix = ENVIRONMENT_PREFIX, "a variable begins like ours and names no setting");
    }
    let signals = Signals::catch().map_err(Failure::failed)?;
    let server = Server::start(loaded.config).map_err(|error| match error {
        StartError::Config(_) => Failure::usage(error),
        _ => Failure::failed(error),
    })?;
    announce(&server).map_err(Failure::failed)?;
    signals.wait();
    server.shutdown();
    Ok(())
}

/// One line per address, for people and for scripts that asked for port 0.
pub(super) fn announce(server: &Server) -> std::io::Result<()> {
    let addresses = server.addresses();
    let mut out = std::io::stdout().lock();
    writeln!(out, "grpc {}", addresses.grpc)?;
    writeln!(out, "frame {}", addresses.frame)?;
    writeln!(out, "admin http://{}", addresses.admin)?;
    out.flush()
}
