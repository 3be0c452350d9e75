//! [`NodeWithoutSockets`]: the shipped parts of a node, composed as in production, on any storage. Simulated worlds run it.

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use moontide_disk::Storage;
use moontide_heap::HugePages;
use moontide_proto::{CapabilityKey, v1};
use moontide_rt::time::Instant;
use moontide_tasks::JoinHandle;
use moontide_transfer::{Engine, Engines, Metrics, Owner};
use moontide_types::{Generation, NodeId};
use tokio::sync::watch;

use crate::config::DiskConfig;
use crate::core::{CoreConfig, NodeCore};
use crate::disk::DiskTier;
use crate::logic::segment_plan::SegmentPlan;
use crate::node::SESSIONS_STOP_TIMEOUT;
use crate::session::NodeDescriptor;

/// Interval at which a stop looks whether the sessions have ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Properties of a node.
#[derive(Clone, Debug)]
pub struct TestNodeConfig {
    /// Id of the node.
    pub node: NodeId,
    /// Random number of the process.
    pub boot: u64,
    /// Number of the cluster.
    pub cluster: u64,
    /// Groups of the cluster.
    pub groups: NonZeroU16,
    /// Larger than at each earlier start with the same id.
    pub generation: Generation,
    /// Number of segments, and units and slots of each.
    pub segments: (u32, u32, u32),
    /// Addresses of the masters.
    pub masters: Vec<String>,
    /// Address of the node, as clients get it.
    pub address: String,
    /// Name of the host.
    pub host: String,
    /// Time without a master after which reads are refused.
    pub self_fence_timeout: Duration,
    /// Most bytes per second that are copied from other nodes; 0 for no limit.
    pub copy_bytes_per_s: u64,
    /// Engine that reaches other nodes; `None`: they cannot be reached.
    pub engine: Option<Arc<dyn Engine>>,
    /// Directory of the disk, and the disk itself; the directory also has the marks of the sessions.
    pub disk: Option<(PathBuf, DiskConfig, Arc<dyn Storage>)>,
}

/// A node without listeners.
#[derive(Debug)]
pub struct NodeWithoutSockets {
    core: NodeCore,
    stop_sessions: watch::Sender<bool>,
    sessions: JoinHandle<()>,
}

impl NodeWithoutSockets {
    /// Starts the node, and its sessions as a task of the calling thread's runtime or world.
    ///
    /// # Errors
    /// If the memory cannot be allocated, or the disk cannot be opened; as text.
    pub fn start(config: TestNodeConfig) -> Result<NodeWithoutSockets, String> {
        let TestNodeConfig { node, groups, generation, masters, disk, .. } = config;
        let (count, units, slots) = config.segments;
        let mark_dirs: Vec<PathBuf> = disk.iter().map(|(dir, ..)| dir.clone()).collect();
        let core_config = CoreConfig {
            node,
            groups,
            generation,
            plan: SegmentPlan { count, units, slots },
            huge_pages: HugePages::Auto,
            external: None,
            disk: disk.as_ref().map(|(_, config, _)| config.clone()),
            self_fence_timeout: config.self_fence_timeout,
            copy_bytes_per_s: config.copy_bytes_per_s,
            engines: Engines::new(config.engine.into_iter().collect(), Metrics::new()),
            capability_key: CapabilityKey::new(std::array::from_fn(|at| config.boot.to_le_bytes()[at % 8])),
        };
        let open_disk = move |config, memory: &Arc<_>, router: &Arc<_>| {
            let (dir, _, storage) = disk.expect("only a node with a disk opens it");
            DiskTier::open_in(&dir, storage, config, Arc::clone(memory), Arc::clone(router))
        };
        let core = NodeCore::start(core_config, &mark_dirs, Box::new(open_disk));
        let core = core.map_err(|error| error.to_string())?;
        let descriptor = NodeDescriptor {
            credentials: None,
            node,
            boot: config.boot,
            addresses: vec![v1::Address { engine: "tcp".into(), address: config.address }],
            topology: v1::Topology { host: config.host, ..Default::default() },
            cluster: config.cluster,
            groups,
        };
        let (stop_sessions, sessions_stopped) = watch::channel(false);
        let sessions = moontide_tasks::spawn(core.sessions(descriptor, masters, sessions_stopped).run());
        Ok(NodeWithoutSockets { core, stop_sessions, sessions })
    }

    /// Returns what serves the requests of peers.
    pub fn owner(&self) -> Arc<dyn Owner> {
        Arc::clone(&self.core.owner) as Arc<dyn Owner>
    }

    /// Whether the masters know all records of the node, also those on its disk.
    pub fn is_reported(&self) -> bool {
        let is_told = self.core.disk.as_ref().is_none_or(|disk| disk.is_inventoried());
        self.core.status.is_mounted() && is_told
    }

    /// Whether it is to be emptied.
    pub fn is_draining(&self) -> bool {
        self.core.drain.is_draining()
    }

    /// Units of memory that are not free.
    pub fn taken_units(&self) -> u64 {
        let usage = self.core.memory.usage();
        usage.live_units + usage.writing_units + usage.draining_units
    }

    /// Records on the disk.
    pub fn disk_records(&self) -> u64 {
        self.core.disk.as_ref().map_or(0, |disk| disk.status().objects)
    }

    /// Number of removals that are not durable, and of those that a write has refused.
    pub fn removals(&self) -> (usize, usize) {
        self.core.disk.as_ref().map_or((0, 0), |disk| disk.removals())
    }

    /// Stops the node as [`Node::shutdown`](crate::Node::shutdown) does without a drain and without writes to the disk: unmounts
    /// its segments, and ends its threads.
    pub fn shutdown(mut self) {
        self.core.close();
        self.stop_sessions.send_replace(true);
        let begun = Instant::now();
        while !self.sessions.is_finished() && begun.elapsed() < SESSIONS_STOP_TIMEOUT {
            moontide_rt::thread::sleep(POLL_INTERVAL);
        }
        self.core.stop_offloads();
        self.core.stop();
    }
}
