//! Owner of the memory: `moontide bench transfer-owner`, a child process that the benchmark starts from its own
//! program. It prints its addresses, serves, and exits at the end of its standard input, that is, with its parent.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_transfer::sample::{SampleNode, SampleNodeConfig};
use moontide_transfer::shm::{ShmServer, ShmServerConfig, address};
use moontide_transfer::tcp::{TcpServer, TcpServerConfig};
use moontide_transfer::{Metrics, Owner};
use moontide_types::SegmentId;
use serde_json::{Value, json};

use super::baseline;
use crate::process::this_program;
use crate::results::{BenchError, io, wrong};

/// Time for an owner to exit after the end of its input, before it is killed.
const END_WAIT: Duration = Duration::from_secs(5);

/// Time without a heartbeat after which a client regards the owner as dead.
const STALE_AFTER: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct OwnerArgs {
    /// Length of each record in bytes
    #[arg(long)]
    record_bytes: u64,
    /// Number of readable records
    #[arg(long)]
    readable: u32,
    /// Number of writable records
    #[arg(long)]
    writable: u32,
    /// Compute digests of the records
    #[arg(long)]
    digests: bool,
    /// Leave the begin of writable records to clients
    #[arg(long)]
    unbegun: bool,
}

impl OwnerArgs {
    fn config(&self) -> SampleNodeConfig {
        let OwnerArgs { record_bytes, readable, writable, digests, unbegun } = *self;
        SampleNodeConfig {
            record_bytes,
            readable,
            writable,
            digests,
            begun: !unbegun,
            ..SampleNodeConfig::default()
        }
    }
}

// ----------------------------------------------------------------------------------------------------- owner process

/// Serves until standard input ends.
pub(crate) fn serve(args: &OwnerArgs) -> Result<(), BenchError> {
    let sample = Arc::new(SampleNode::new(args.config()).map_err(wrong)?);
    touch(&sample);
    let server = TcpServer::start(TcpServerConfig::default(), Arc::clone(&sample) as _, Metrics::new());
    let server = server.map_err(wrong)?;
    let tcp = server.addresses().first().ok_or_else(|| wrong("tcp server has no address"))?;
    let baseline = baseline::serve(&sample).map_err(io("listening for baseline connections"))?;
    let directory = std::env::temp_dir().join(format!("moontide-bench-{}", std::process::id()));
    std::fs::create_dir_all(&directory).map_err(io("creating a directory for the shm socket"))?;
    let served = serve_local(&sample, &directory.join("shm.sock"), tcp, baseline);
    // Also after an error.
    let removed = std::fs::remove_dir_all(&directory).map_err(io("removing the directory of the shm socket"));
    served.and(removed)
}

/// Starts the shm server, prints the addresses, and waits for the end of standard input.
fn serve_local(
    sample: &Arc<SampleNode>,
    socket: &Path,
    tcp: &SocketAddr,
    baseline: SocketAddr,
) -> Result<(), BenchError> {
    let config = ShmServerConfig {
        socket: socket.into(),
        extra_uids: Vec::new(),
        stale_after: STALE_AFTER,
        streams_max: 16,
    };
    // SAFETY: the benchmark is the only client, and follows the protocol.
    let host = unsafe { ShmServer::start(config, Arc::clone(sample) as _, Metrics::new()) }.map_err(wrong)?;
    let shm = address(host.socket()).ok_or_else(|| wrong("boot id of this host cannot be read"))?;
    let heartbeat_sample = Arc::clone(sample);
    let heartbeat = move || {
        loop {
            heartbeat_sample.heap().heartbeat();
            std::thread::sleep(STALE_AFTER / 20);
        }
    };
    std::thread::Builder::new().name("heartbeat".into()).spawn(heartbeat).map_err(io("starting a thread"))?;
    let addresses = json!({ "tcp": tcp.to_string(), "baseline": baseline.to_string(), "shm": shm });
    let mut out = std::io::stdout().lock();
    writeln!(out, "{addresses}")
        .and_then(|()| out.flush())
        .map_err(io("printing the addresses of the owner"))?;
    std::io::stdin().lock().read_to_end(&mut Vec::new()).map_err(io("reading the owner's input"))?;
    Ok(())
}

/// Writes to all writable records, so that page faults are not measured.
fn touch(sample: &SampleNode) {
    let config = sample.config();
    for record in config.readable..config.records() {
        let target = config.target(record);
        if let Some(mut claim) = sample.heap().claim(SegmentId(0), target.slot, target.epoch) {
            let all = claim.range();
            claim.bytes_mut(all).fill(1);
        }
    }
}

// ---------------------------------------------------------------------------------------------------- parent process

/// An owner process, which is stopped on drop.
#[derive(Debug)]
pub(crate) struct OwnerProcess {
    child: Child,
    /// Address of the TCP engine.
    pub(super) tcp: SocketAddr,
    /// Address of the baseline server.
    pub(crate) baseline: SocketAddr,
    /// Address of the shm server.
    pub(super) shm: String,
}

impl OwnerProcess {
    /// Starts an owner and waits until it serves.
    pub(crate) fn start(config: &SampleNodeConfig) -> Result<OwnerProcess, BenchError> {
        let mut command = this_program()?;
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
        // A separate process group: a signal from the terminal ends only the parent; the owner then exits and cleans
        // up.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(io("starting an owner"))?;
        let mut out = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let mut line = String::new();
        let unknown = SocketAddr::from(([0, 0, 0, 0], 0));
        // From here on drop stops the child, also after an error.
        let mut owner = OwnerProcess { child, tcp: unknown, baseline: unknown, shm: String::new() };
        out.read_line(&mut line).map_err(io("reading the owner's output"))?;
        let addresses: Value =
            serde_json::from_str(&line).map_err(|_| wrong("owner exited before it printed its addresses"))?;
        let address = |name: &str| {
            let address = addresses[name].as_str().and_then(|address| address.parse().ok());
            address.ok_or_else(|| wrong(format!("owner printed no address for {name}")))
        };
        (owner.tcp, owner.baseline) = (address("tcp")?, address("baseline")?);
        owner.shm = addresses["shm"].as_str().unwrap_or_default().into();
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
