//! `moontide dev`: a master and a node in one process, for experiments and tests.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use moontide_bench::Scratch;
use moontide_master::{MasterConfig, Server, StartError};
use moontide_node::{DiskConfig, Node, NodeConfig};
use moontide_settings::parse_size;

use super::{CommandError, master, node};
use crate::process::{LOG_DEV, Signals, abort_on_panic, log_to_stderr};

const EXAMPLES: &str = "\
Examples:
  moontide dev
  moontide dev --memory 4GiB --port-base 9400
  moontide dev --port-base 0            free ports, for tests
  moontide dev --memory 64MiB --disk-dir /mnt/ssd --disk-limit 4GiB
      little memory and a disk tier, to watch offloading

Prints `grpc`, `frame` and `admin` of the master, `node`, `tcp`, `shm`, `disk` and `node-admin` of the node, and
`ready`, one per line. Listens on loopback only; all objects are lost at exit. The disk is a new directory in
--disk-dir, which is removed at exit. MOONTIDE_LOG sets the log filter of stderr.
Exit codes: 0 stopped by SIGTERM or ctrl-c, 1 failure, 2 usage.";

/// First of five consecutive ports: gRPC, frame server and HTTP of the master; HTTP and data plane of the node.
const PORT_BASE_DEFAULT: u16 = 7400;

#[derive(Debug, ClapArgs)]
struct Args {
    /// Memory for objects
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "1GiB")]
    memory: u64,
    /// First of five ports; 0 takes free ports
    #[arg(long, value_name = "PORT", default_value_t = PORT_BASE_DEFAULT,
        value_parser = clap::value_parser!(u16).range(0..=65_531))]
    port_base: u16,
    /// Directory in which the node's disk tier is created [default: no disk tier]
    #[arg(long, value_name = "DIR")]
    disk_dir: Option<PathBuf>,
    /// Disk space limit, e.g. 4GiB [default: 90 % of the free space]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "disk_dir")]
    disk_limit: Option<u64>,
}

/// The directory of the disk tier could not be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot create a disk tier in {}: {source}; pass a writable directory with --disk-dir", dir.display())]
struct NoDisk {
    dir: PathBuf,
    source: std::io::Error,
}

impl Args {
    fn address(&self, nth: u16) -> SocketAddr {
        let port = if self.port_base == 0 { 0 } else { self.port_base + nth };
        (Ipv4Addr::LOCALHOST, port).into()
    }
}

pub(crate) fn command() -> Command {
    let dev = Command::new("dev");
    // Set after the arguments: the doc comment of the struct would replace it otherwise.
    Args::augment_args(dev)
        .about("Run a master and a node in one process, for experiments")
        .after_help(EXAMPLES)
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    let args = Args::from_arg_matches(matches).map_err(CommandError::usage)?;
    log_to_stderr(LOG_DEV);
    abort_on_panic();
    let mut signals = Signals::catch().map_err(CommandError::failed)?;
    let server = Server::start(MasterConfig {
        grpc_listen: args.address(0),
        frame_listen: args.address(1),
        admin_listen: args.address(2),
        // No client has leases of an earlier master.
        reallocation_delay_ms: 0,
        ..MasterConfig::default()
    })
    .map_err(|error| match error {
        StartError::Config(_) => CommandError::usage(error),
        _ => CommandError::failed(error),
    })?;
    let grpc = server.addresses().grpc;
    // Removed at exit: its records belong to a cluster that cannot be restarted.
    let scratch = args.disk_dir.as_deref().map(|dir| {
        Scratch::new(dir, "moontide-dev")
            .map_err(|source| CommandError::usage(NoDisk { dir: dir.to_owned(), source }))
    });
    let scratch = scratch.transpose()?;
    let disk = scratch
        .as_ref()
        // No other start would find what a flush writes.
        .map(|scratch| DiskConfig {
            limit_bytes: args.disk_limit,
            flush_timeout: Duration::ZERO,
            ..DiskConfig::new(scratch.path())
        });
    let started = Node::start(NodeConfig {
        master: grpc.to_string(),
        memory_bytes: args.memory,
        admin_listen: Some(args.address(3)),
        listen: vec![args.address(4)],
        disk,
        ..NodeConfig::default()
    })
    .map_err(node::start_failure)?;
    master::announce(&server).map_err(CommandError::failed)?;
    let dirs: Vec<PathBuf> = scratch.iter().map(|scratch| scratch.path().to_owned()).collect();
    node::announce(&started, &dirs, "node-admin").map_err(CommandError::failed)?;
    advise(grpc, started.addresses().admin);
    signals.wait();
    // The node first: it unregisters from the master.
    started.shutdown();
    server.shutdown();
    Ok(())
}

/// Prints example commands to standard error; scripts read standard output.
fn advise(grpc: SocketAddr, node_admin: Option<SocketAddr>) {
    let name = if grpc.port() == PORT_BASE_DEFAULT { String::new() } else { format!(" --master {grpc}") };
    eprintln!("\nTry in another terminal:");
    eprintln!("  moontide put hello -{name} <<< world");
    eprintln!("  moontide get hello{name}");
    eprintln!("  moontide ls -l{name}");
    if let Some(admin) = node_admin {
        eprintln!("  moontide inspect --admin {admin}");
    }
    eprintln!("Stop with ctrl-c; all objects are lost.");
}
