//! [`BenchCluster`]: a master and nodes, each a process of this program.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use moontide_client::{Store, StoreConfig};
use rustix::process::{Pid, Signal, kill_process};

use super::super::figures::{BenchError, io};
use super::super::transfer::wrong;

/// How long a process may take to end by itself.
const END_WAIT: Duration = Duration::from_secs(10);

/// How large a cluster is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) nodes: usize,
    pub(crate) node_bytes: u64,
    pub(crate) groups: u16,
}

/// A node's disk.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    pub(crate) dir: PathBuf,
    pub(crate) limit_bytes: u64,
    pub(crate) staging_bytes: u64,
}

impl Disk {
    fn args(&self) -> Vec<String> {
        let dir = self.dir.display().to_string();
        let sizes = [("--disk-limit", self.limit_bytes), ("--disk-staging", self.staging_bytes)];
        let mut args = vec!["--disk-dir".to_owned(), dir];
        args.extend(sizes.into_iter().flat_map(|(name, bytes)| [name.to_owned(), bytes.to_string()]));
        args
    }
}

/// A cluster that ends with this value.
#[derive(Debug)]
pub(crate) struct BenchCluster {
    /// Nodes first: they say goodbye to the master.
    nodes: Vec<Process>,
    master: Process,
    /// Where the master serves gRPC.
    pub(crate) address: String,
}

impl BenchCluster {
    /// Starts it, and waits until all nodes serve.
    pub(crate) fn start(size: Size) -> Result<BenchCluster, BenchError> {
        BenchCluster::start_with_disk(size, None)
    }

    /// The same with a disk, for a cluster of one node.
    pub(crate) fn start_with_disk(size: Size, disk: Option<&Disk>) -> Result<BenchCluster, BenchError> {
        eprintln!("starting a master and {} node(s) of {} MiB …", size.nodes, size.node_bytes >> 20);
        let free = "127.0.0.1:0";
        let groups = size.groups.to_string();
        let master = Process::start(&[
            "master",
            "--grpc-listen",
            free,
            "--frame-listen",
            free,
            "--admin-listen",
            free,
            "--groups",
            &groups,
            "--reallocate-wait-ms",
            "0",
        ]);
        let (master, said) = master.and_then(|mut master| {
            let said = master.read_until("admin ")?;
            Ok((master, said))
        })?;
        let grpc = said.iter().find_map(|line| line.strip_prefix("grpc "));
        let address = grpc.ok_or_else(|| wrong("the master did not say where it serves gRPC"))?.to_owned();
        let mut nodes = Vec::with_capacity(size.nodes);
        for _ in 0..size.nodes {
            let bytes = size.node_bytes.to_string();
            let mut args = vec!["node", "--master", &address, "--memory-bytes", &bytes];
            let of_disk = disk.map(Disk::args).unwrap_or_default();
            args.extend(of_disk.iter().map(String::as_str));
            let mut node = Process::start(&args)?;
            node.read_until("ready")?;
            nodes.push(node);
        }
        Ok(BenchCluster { nodes, master, address })
    }

    /// Connects to it.
    pub(crate) fn store(&self, change: impl FnOnce(&mut StoreConfig)) -> Result<Store, BenchError> {
        let mut config = StoreConfig::new(&self.address);
        config.deadline = Duration::from_secs(20);
        change(&mut config);
        Store::connect(config).map_err(wrong)
    }

    /// Its processes.
    pub(crate) fn pids(&self) -> impl Iterator<Item = u32> + '_ {
        self.nodes.iter().chain([&self.master]).map(|process| process.child.id())
    }
}

#[derive(Debug)]
struct Process {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Process {
    fn start(args: &[&str]) -> Result<Process, BenchError> {
        let program = std::env::current_exe().map_err(io("finding this program"))?;
        let mut command = Command::new(program);
        // A group of its own: a signal from the terminal ends the benchmark, which then ends its processes.
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
        command.env("MOONTIDE_LOG", std::env::var("MOONTIDE_LOG").unwrap_or_else(|_| "error".into()));
        let mut child = command.spawn().map_err(io("starting a process"))?;
        let out = BufReader::new(child.stdout.take().expect("it is piped"));
        Ok(Process { child, out })
    }

    /// Its lines up to one that begins like this.
    fn read_until(&mut self, start: &str) -> Result<Vec<String>, BenchError> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            let count = self.out.read_line(&mut line).map_err(io("reading a process's output"))?;
            if count == 0 {
                return Err(wrong(format!("a process ended before it said {start:?}; its error is above")));
            }
            lines.push(line.trim_end().to_owned());
            if line.starts_with(start) {
                return Ok(lines);
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let end = Instant::now() + END_WAIT;
        while Instant::now() < end {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
