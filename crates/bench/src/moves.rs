//! Benchmarks of objects that move between nodes while clients get and put: drain of a node, rolling restart, a node that joins,
//! copies of a hot object. The load is the same in all of them ([`load`]).

pub(crate) mod drain;
pub(crate) mod fanout;
pub(crate) mod join;
mod load;
pub(crate) mod rolling;

use moontide_types::NodeId;

use crate::process::ServerProcess;
use crate::results::{BenchError, wrong};
use crate::scratch::Scratch;

/// A master without a registry, and where it listens.
struct SingleMaster {
    _process: ServerProcess,
    grpc: String,
    admin: String,
}

/// Starts a master on an address of this host, or of the namespace of the words before the command.
fn start_master(
    inside: &[String],
    scratch: &Scratch,
    host: &str,
    words: &[&str],
) -> Result<SingleMaster, BenchError> {
    let dir = scratch.path().join("master").display().to_string();
    let any = format!("{host}:0");
    let all = [
        "master",
        "--grpc-listen",
        &any,
        "--frame-listen",
        &any,
        "--admin-listen",
        &any,
        "--data-dir",
        &dir,
        "--insecure-no-tls",
        "true",
    ];
    let (process, lines) = ServerProcess::start_in(inside, &[&all[..], words].concat(), "admin ")?;
    let (grpc, admin) = (printed(&lines, "grpc")?, printed(&lines, "admin")?);
    Ok(SingleMaster { _process: process, grpc, admin })
}

/// Starts a node with this number and memory. Returns its id, too.
fn start_node(
    scratch: &Scratch,
    grpc: &str,
    number: u64,
    memory: u64,
) -> Result<(ServerProcess, NodeId), BenchError> {
    let socket = scratch.path().join(format!("{number}.sock")).display().to_string();
    let bytes = memory.to_string();
    let words = ["node", "--master", grpc, "--memory-bytes", &bytes, "--shm-socket", &socket];
    let (process, lines) = ServerProcess::start(&words, "ready")?;
    Ok((process, printed(&lines, "node")?.parse().map_err(wrong)?))
}

/// Returns what a process printed after a word.
fn printed(lines: &[String], word: &str) -> Result<String, BenchError> {
    let found = lines.iter().find_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
    found.map(str::to_owned).ok_or_else(|| wrong(format!("{word:?} not printed: {lines:?}")))
}
