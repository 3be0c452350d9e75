//! `moontide dev`: a master and a node in this process, to try things out.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use moontide_master::{MasterConfig, Server, StartError};
use moontide_node::{DiskConfig, Node, NodeConfig};

use super::{Failure, master, node};
use crate::process::{LOG_DEV, Signals, abort_on_panic, log_to_stderr};
use crate::scratch::Scratch;
use crate::text;

const EXAMPLES: &str = "\
Examples:
  moontide dev
  moontide dev --memory 4GiB --port-base 9400
  moontide dev --port-base 0            free ports, for tests
  moontide dev --memory 64MiB --disk-dir /mnt/ssd --disk-limit 4GiB
      little memory and a disk, to see what leaves one for the other

It prints `grpc`, `frame` and `admin` of the master, `node`, `tcp`, `door`, `disk` and `node-admin` of the node, and
`ready`, a line each. It listens on this host only and forgets everything at the end. The disk is a new directory in
--disk-dir, which goes with the process. MOONTIDE_LOG names what is logged to stderr.
Exit codes: 0 stopped by SIGTERM or ctrl-c, 1 failure, 2 usage.";

/// A port, and the four behind it: gRPC, frames and HTTP of the master; HTTP and transfers of the node.
const PORT_BASE_DEFAULT: u16 = 7400;
/// Enough to see objects spread, few enough for a small memory.
const GROUPS: u16 = 4;

/// How it is run.
#[derive(Debug, ClapArgs)]
struct Args {
    /// Memory for objects
    #[arg(long, value_name = "SIZE", value_parser = text::size, default_value = "1GiB")]
    memory: u64,
    /// First of five ports; 0 takes free ones
    #[arg(long, value_name = "PORT", default_value_t = PORT_BASE_DEFAULT,
        value_parser = clap::value_parser!(u16).range(0..=65_531))]
    port_base: u16,
    /// Give the node a disk, in a new directory under this one
    #[arg(long, value_name = "DIR")]
    disk_dir: Option<PathBuf>,
    /// Most bytes on the disk [default: nine tenths of what is free]
    #[arg(long, value_name = "SIZE", value_parser = text::size, requires = "disk_dir")]
    disk_limit: Option<u64>,
}

/// There is no place for the disk.
#[derive(Debug, thiserror::Error)]
#[error("no disk can be made in {}: {source}; name a directory that this user may write with --disk-dir", dir.display())]
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
    // After the arguments, whose own description would stand in its place.
    Args::augment_args(dev)
        .about("Run a master and a node in one process, to try things out")
        .after_help(EXAMPLES)
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let args = Args::from_arg_matches(matches).map_err(Failure::usage)?;
    log_to_stderr(LOG_DEV);
    abort_on_panic();
    let signals = Signals::catch().map_err(Failure::failed)?;
    let server = Server::start(MasterConfig {
        grpc_listen: args.address(0),
        frame_listen: args.address(1),
        admin_listen: args.address(2),
        groups: GROUPS,
        // Nobody remembers anything of an earlier master.
        reallocate_wait_ms: 0,
        ..MasterConfig::default()
    })
    .map_err(|error| match error {
        StartError::Config(_) => Failure::usage(error),
        _ => Failure::failed(error),
    })?;
    let grpc = server.addresses().grpc;
    // What is in it belongs to a cluster that never comes back.
    let scratch = args.disk_dir.as_deref().map(|dir| {
        Scratch::new(dir, "moontide-dev")
            .map_err(|source| Failure::usage(NoDisk { dir: dir.to_owned(), source }))
    });
    let scratch = scratch.transpose()?;
    let disk = scratch
        .as_ref()
        .map(|scratch| DiskConfig { limit_bytes: args.disk_limit, ..DiskConfig::new(scratch.path()) });
    let started = Node::start(NodeConfig {
        master: grpc.to_string(),
        memory_bytes: args.memory,
        admin_listen: Some(args.address(3)),
        listen: vec![args.address(4)],
        disk,
        ..NodeConfig::default()
    })
    .map_err(node::start_failure)?;
    master::announce(&server).map_err(Failure::failed)?;
    node::announce(&started, scratch.as_ref().map(Scratch::path), "node-admin").map_err(Failure::failed)?;
    advise(grpc, started.addresses().admin);
    signals.wait();
    // The node first: it says goodbye to the master.
    started.shutdown();
    server.shutdown();
    Ok(())
}

/// What to try next, for people: scripts read standard output.
fn advise(grpc: SocketAddr, node_admin: Option<SocketAddr>) {
    let name = if grpc.port() == PORT_BASE_DEFAULT { String::new() } else { format!(" --master {grpc}") };
    eprintln!("\nTry in another terminal:");
    eprintln!("  moontide put hello -{name} <<< world");
    eprintln!("  moontide get hello{name}");
    eprintln!("  moontide ls -l{name}");
    if let Some(admin) = node_admin {
        eprintln!("  moontide inspect --admin {admin}");
    }
    eprintln!("ctrl-c ends it, and forgets everything.");
}
