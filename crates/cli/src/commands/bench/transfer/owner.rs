//! The owner of the memory, in a process of its own: `moontide bench transfer-owner`, which the benchmark starts from its
//! own program. It says where it listens, serves, and ends when its input does: with its parent, however that ends.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_transfer::sample::{Sample, SampleConfig};
use moontide_transfer::shm::{Host, HostConfig, address};
use moontide_transfer::tcp::{Server, ServerConfig};
use moontide_transfer::{Metrics, Owner};
use moontide_types::SegmentId;
use serde_json::{Value, json};

use super::super::figures::{BenchError, io};
use super::bare;

/// How long an owner may take to end by itself.
const END_WAIT: Duration = Duration::from_secs(5);

/// How long a client believes the owner without a beat.
const STALE_AFTER: Duration = Duration::from_secs(10);

/// What the owner has.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct OwnerArgs {
    /// Length of each record.
    #[arg(long)]
    record_bytes: u64,
    /// How many can be read.
    #[arg(long)]
    readable: u32,
    /// How many can be written.
    #[arg(long)]
    writable: u32,
    /// Whether records have digests.
    #[arg(long)]
    digests: bool,
    /// Leave it to clients to begin those that can be written.
    #[arg(long)]
    unbegun: bool,
}

impl OwnerArgs {
    fn config(&self) -> SampleConfig {
        let OwnerArgs { record_bytes, readable, writable, digests, unbegun } = *self;
        SampleConfig { record_bytes, readable, writable, digests, begun: !unbegun, ..SampleConfig::default() }
    }
}

// ----------------------------------------------------------------------------------------------- the owner's process

/// Serves until standard input ends.
pub(in super::super) fn serve(args: &OwnerArgs) -> Result<(), BenchError> {
    let sample = Arc::new(Sample::new(args.config()).map_err(wrong)?);
    touch(&sample);
    let server = Server::start(ServerConfig::default(), Arc::clone(&sample) as _, Metrics::new());
    let server = server.map_err(wrong)?;
    let tcp = server.addresses().first().ok_or_else(|| wrong("the server listens nowhere"))?;
    let bare = bare::serve(&sample).map_err(io("listening for bare connections"))?;
    let folder = std::env::temp_dir().join(format!("moontide-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(io("making a folder for the door"))?;
    let served = serve_local(&sample, &folder.join("door"), tcp, bare);
    // Whatever happened, nothing is left behind.
    let removed = std::fs::remove_dir_all(&folder).map_err(io("removing the door"));
    served.and(removed)
}

/// Opens the door as well, says where everything is, and waits for the end of standard input.
fn serve_local(
    sample: &Arc<Sample>,
    door: &Path,
    tcp: &SocketAddr,
    bare: SocketAddr,
) -> Result<(), BenchError> {
    let config =
        HostConfig { door: door.into(), more_uids: Vec::new(), stale_after: STALE_AFTER, streams_max: 16 };
    // SAFETY: the benchmark is the only client, and keeps to the protocol.
    let host = unsafe { Host::start(config, Arc::clone(sample) as _, Metrics::new()) }.map_err(wrong)?;
    let shm = address(host.door()).ok_or_else(|| wrong("this host has no name for its boot"))?;
    let beating = Arc::clone(sample);
    let beat = move || {
        loop {
            beating.heap().beat();
            std::thread::sleep(STALE_AFTER / 20);
        }
    };
    std::thread::Builder::new().name("beat".into()).spawn(beat).map_err(io("starting a thread"))?;
    let said = json!({ "tcp": tcp.to_string(), "bare": bare.to_string(), "shm": shm });
    let mut out = std::io::stdout().lock();
    writeln!(out, "{said}").and_then(|()| out.flush()).map_err(io("saying where the owner listens"))?;
    std::io::stdin().lock().read_to_end(&mut Vec::new()).map_err(io("reading the owner's input"))?;
    Ok(())
}

/// Writes to the records that will be written, so that the first to come does not pay for their pages.
fn touch(sample: &Sample) {
    let config = sample.config();
    for record in config.readable..config.records() {
        let target = config.target(record);
        if let Some(mut claim) = sample.heap().claim(SegmentId(0), target.slot, target.epoch) {
            let all = claim.range();
            claim.bytes_mut(all).fill(1);
        }
    }
}

// ---------------------------------------------------------------------------------------------- the parent's process

/// An owner that ends with this value.
#[derive(Debug)]
pub(in super::super) struct OwnerProcess {
    child: Child,
    /// Where ours listens.
    pub(super) tcp: SocketAddr,
    /// Where the bare server listens.
    pub(in super::super) bare: SocketAddr,
    /// Where its door is.
    pub(super) shm: String,
}

impl OwnerProcess {
    /// Starts it, and waits until it serves.
    pub(in super::super) fn start(config: &SampleConfig) -> Result<OwnerProcess, BenchError> {
        let program = std::env::current_exe().map_err(io("finding this program"))?;
        let mut command = Command::new(program);
        command.args(["bench", "transfer-owner"]);
        command.arg(format!("--record-bytes={}", config.record_bytes));
        command.arg(format!("--readable={}", config.readable));
        command.arg(format!("--writable={}", config.writable));
        if config.digests {
            command.arg("--digests");
        }
        if !config.begun {
            command.arg("--unbegun");
        }
        // A group of its own: a signal from the terminal ends the parent, and the owner then cleans up.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(io("starting an owner"))?;
        let mut out = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut line = String::new();
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        // From here on it is ended, whatever happens.
        let mut owner = OwnerProcess { child, tcp: nowhere, bare: nowhere, shm: String::new() };
        out.read_line(&mut line).map_err(io("reading the owner's output"))?;
        let said: Value = serde_json::from_str(&line)
            .map_err(|_| wrong("the owner ended before it said where it listens"))?;
        let address = |name: &str| {
            let address = said[name].as_str().and_then(|address| address.parse().ok());
            address.ok_or_else(|| wrong(format!("the owner did not say where it listens for {name}")))
        };
        (owner.tcp, owner.bare) = (address("tcp")?, address("bare")?);
        owner.shm = said["shm"].as_str().unwrap_or_default().into();
        Ok(owner)
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for OwnerProcess {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let end = Instant::now() + END_WAIT;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() >= end {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

pub(in super::super) fn wrong(what: impl std::fmt::Display) -> BenchError {
    BenchError::Wrong(what.to_string())
}
