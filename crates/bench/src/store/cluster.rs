//! [`BenchCluster`]: a master and nodes as child processes.

use std::path::PathBuf;
use std::time::Duration;

use moontide_client::{Store, StoreConfig};

use crate::http;
use crate::process::ServerProcess;
use crate::results::{BenchError, wrong};

const METRICS_TIMEOUT: Duration = Duration::from_secs(5);

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
    pub(crate) offload: OffloadTrigger,
}

/// When objects are written to disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum OffloadTrigger {
    /// When they leave memory.
    #[default]
    Evict,
    /// After their put.
    Put,
}

impl OffloadTrigger {
    /// Name in the settings of a master.
    pub(crate) fn name(self) -> &'static str {
        match self {
            OffloadTrigger::Evict => "evict",
            OffloadTrigger::Put => "put",
        }
    }
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
    nodes: Vec<BenchNode>,
    master: ServerProcess,
    /// gRPC address of the master.
    pub(crate) address: String,
}

/// A node of a cluster.
#[derive(Debug)]
struct BenchNode {
    process: ServerProcess,
    args: Vec<String>,
    admin: String,
}

impl BenchNode {
    fn start(args: Vec<String>) -> Result<BenchNode, BenchError> {
        let (process, lines) = ServerProcess::start(&args, "ready")?;
        let admin = lines.iter().find_map(|line| line.strip_prefix("admin "));
        let admin = admin.ok_or_else(|| wrong("node printed no admin address"))?.to_owned();
        Ok(BenchNode { process, args, admin })
    }
}

impl BenchCluster {
    /// Starts a cluster and waits until all nodes serve.
    pub(crate) fn start(size: Size) -> Result<BenchCluster, BenchError> {
        BenchCluster::start_with_disk(size, None)
    }

    /// As [`BenchCluster::start`], with a disk; for a cluster of one node.
    pub(crate) fn start_with_disk(size: Size, disk: Option<&Disk>) -> Result<BenchCluster, BenchError> {
        BenchCluster::launch(size, disk, &[], &[])
    }

    /// As [`BenchCluster::start`], with more arguments for the master, and for each node.
    pub(crate) fn start_with_args(
        size: Size,
        of_master: &[String],
        of_node: &[String],
    ) -> Result<BenchCluster, BenchError> {
        BenchCluster::launch(size, None, of_master, of_node)
    }

    fn launch(
        size: Size,
        disk: Option<&Disk>,
        of_master: &[String],
        of_node: &[String],
    ) -> Result<BenchCluster, BenchError> {
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
            "--offload",
            disk.map_or_else(OffloadTrigger::default, |disk| disk.offload).name(),
        ];
        let master_args: Vec<&str> =
            master_args.into_iter().chain(of_master.iter().map(String::as_str)).collect();
        let (master, lines) = ServerProcess::start(&master_args, "admin ")?;
        let grpc = lines.iter().find_map(|line| line.strip_prefix("grpc "));
        let address = grpc.ok_or_else(|| wrong("master printed no gRPC address"))?.to_owned();
        let mut nodes = Vec::with_capacity(size.nodes);
        for _ in 0..size.nodes {
            let bytes = size.node_bytes.to_string();
            let args = ["node", "--master", &address, "--memory-bytes", &bytes, "--admin-listen", free];
            let mut args: Vec<String> = args.map(str::to_owned).to_vec();
            args.extend(disk.map(Disk::args).unwrap_or_default());
            args.extend_from_slice(of_node);
            nodes.push(BenchNode::start(args)?);
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

    /// Stops the only node with SIGTERM, and starts it again with the same arguments. In between, `change` may change its
    /// disk.
    pub(crate) fn restart_node(
        &mut self,
        change: impl FnOnce() -> Result<(), BenchError>,
    ) -> Result<(), BenchError> {
        let [BenchNode { process, args, .. }] = std::mem::take(&mut self.nodes).try_into().expect("one node");
        drop(process);
        change()?;
        self.nodes.push(BenchNode::start(args)?);
        Ok(())
    }

    /// Returns the sum of a metric of all nodes.
    pub(crate) fn node_metric(&self, name: &str) -> Result<f64, BenchError> {
        let mut sum = 0.0;
        for node in &self.nodes {
            let text = http::get(&node.admin, "/metrics", METRICS_TIMEOUT).map_err(wrong)?;
            let text = String::from_utf8_lossy(&text);
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            let value = value.and_then(|value| value.parse::<f64>().ok());
            sum += value.ok_or_else(|| wrong(format!("node has no metric {name}")))?;
        }
        Ok(sum)
    }

    /// Process ids of nodes and master.
    pub(crate) fn pids(&self) -> impl Iterator<Item = u32> + '_ {
        let nodes = self.nodes.iter().map(|node| &node.process);
        nodes.chain([&self.master]).map(|process| process.id())
    }
}
