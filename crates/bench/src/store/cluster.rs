//! [`BenchCluster`]: a master and nodes as child processes.

use std::path::PathBuf;
use std::time::Duration;

use moontide_client::{Store, StoreConfig};

use crate::process::ServerProcess;
use crate::results::{BenchError, wrong};

/// Size of a cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) nodes: usize,
    pub(crate) node_bytes: u64,
    pub(crate) groups: u16,
}

/// Disk tier of a node.
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

/// A cluster, which is stopped on drop.
#[derive(Debug)]
pub(crate) struct BenchCluster {
    /// Dropped before the master, because nodes unregister from it.
    nodes: Vec<ServerProcess>,
    master: ServerProcess,
    /// gRPC address of the master.
    pub(crate) address: String,
}

impl BenchCluster {
    /// Starts a cluster and waits until all nodes serve.
    pub(crate) fn start(size: Size) -> Result<BenchCluster, BenchError> {
        BenchCluster::start_with_disk(size, None)
    }

    /// As [`BenchCluster::start`], with a disk; for a cluster of one node.
    pub(crate) fn start_with_disk(size: Size, disk: Option<&Disk>) -> Result<BenchCluster, BenchError> {
        eprintln!("starting a master and {} node(s) of {} MiB …", size.nodes, size.node_bytes >> 20);
        let free = "127.0.0.1:0";
        let groups = size.groups.to_string();
        let master_args = [
            "master",
            "--grpc-listen",
            free,
            "--frame-listen",
            free,
            "--admin-listen",
            free,
            "--groups",
            &groups,
            "--reallocation-delay-ms",
            "0",
        ];
        let (master, lines) = ServerProcess::start(&master_args, "admin ")?;
        let grpc = lines.iter().find_map(|line| line.strip_prefix("grpc "));
        let address = grpc.ok_or_else(|| wrong("master printed no gRPC address"))?.to_owned();
        let mut nodes = Vec::with_capacity(size.nodes);
        for _ in 0..size.nodes {
            let bytes = size.node_bytes.to_string();
            let mut args = vec!["node", "--master", &address, "--memory-bytes", &bytes];
            let disk_args = disk.map(Disk::args).unwrap_or_default();
            args.extend(disk_args.iter().map(String::as_str));
            let (node, _) = ServerProcess::start(&args, "ready")?;
            nodes.push(node);
        }
        Ok(BenchCluster { nodes, master, address })
    }

    /// Connects a client.
    pub(crate) fn store(&self, change: impl FnOnce(&mut StoreConfig)) -> Result<Store, BenchError> {
        let mut config = StoreConfig::new(&self.address);
        config.timeout = Duration::from_secs(20);
        change(&mut config);
        Store::connect(config).map_err(wrong)
    }

    /// Process ids of nodes and master.
    pub(crate) fn pids(&self) -> impl Iterator<Item = u32> + '_ {
        self.nodes.iter().chain([&self.master]).map(|process| process.id())
    }
}
