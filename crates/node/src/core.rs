//! [`NodeCore`]: what a node is without its sockets and its runtime: memory, disk tier, requests of peers, commands, local
//! index and sessions. `node` composes it with listeners, and a simulated world runs it as it is.

use std::io;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use moontide_heap::HugePages;
use moontide_proto::CapabilityKey;
use moontide_rt::mark;
use moontide_rt::sync::mpsc;
use moontide_rt::thread::JoinHandle;
use moontide_transfer::Engines;
use moontide_types::{Generation, NodeId, SegmentId};
use tokio::sync::watch;
use tracing::{error, info};

use crate::capabilities::CapabilityKeys;
use crate::config::DiskConfig;
use crate::copier::{COPY_THREADS, Copier};
use crate::disk::{DeviceThread, DiskDirectories, DiskError, DiskTier};
use crate::drain::DrainState;
use crate::event_router::EventRouter;
use crate::executor::{CommandExecutor, ExecutorTask};
use crate::flush::FlushState;
use crate::index_gate::IndexGate;
use crate::logic::groups::group_of_segment;
use crate::logic::segment_plan::SegmentPlan;
use crate::memory::{ExternalMemory, MemoryError, NodeMemory};
use crate::metrics::Counters;
use crate::owner::NodeOwner;
use crate::session::{NodeComponents, NodeDescriptor, SessionManager};
use crate::status::Status;
use crate::sync_marks::SyncMarkStore;

/// Memory and disk of a node that is about to start.
#[derive(Debug)]
pub(crate) struct CoreConfig<'a> {
    pub(crate) node: NodeId,
    pub(crate) groups: NonZeroU16,
    pub(crate) generation: Generation,
    pub(crate) plan: SegmentPlan,
    pub(crate) huge_pages: HugePages,
    pub(crate) external: Option<&'a ExternalMemory>,
    pub(crate) disk: Option<DiskConfig>,
    pub(crate) self_fence_timeout: Duration,
    /// Most bytes per second that are copied from other nodes; 0 for no limit.
    pub(crate) copy_bytes_per_s: u64,
    /// Engines that reach other nodes.
    pub(crate) engines: Engines,
    /// Random key of the node's own capabilities.
    pub(crate) capability_key: CapabilityKey,
}

/// Failure to start the parts of a node.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CoreError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    Threads(#[from] io::Error),
}

/// What opens the disk tier on the memory of the node.
pub(crate) type OpenDisk<'a> =
    dyn FnOnce(DiskConfig, &Arc<NodeMemory>, &Arc<EventRouter>) -> Result<DiskTier, DiskError> + 'a;

/// The running parts of a node.
#[derive(Debug)]
pub(crate) struct NodeCore {
    pub(crate) memory: Arc<NodeMemory>,
    pub(crate) disk: Option<Arc<DiskTier>>,
    copier: Arc<Copier>,
    pub(crate) owner: Arc<NodeOwner>,
    pub(crate) capabilities: Arc<CapabilityKeys>,
    pub(crate) index_gate: Arc<IndexGate>,
    pub(crate) router: Arc<EventRouter>,
    pub(crate) status: Arc<Status>,
    pub(crate) flush: Arc<FlushState>,
    pub(crate) drain: Arc<DrainState>,
    pub(crate) counters: Arc<Counters>,
    tasks: mpsc::Sender<ExecutorTask>,
    stop_heartbeat: mpsc::Sender<()>,
    threads: Vec<JoinHandle<()>>,
    disk_threads: Vec<DeviceThread>,
}

impl NodeCore {
    /// Allocates the memory, opens the disk, and starts the threads. `mark_dirs` are the directories of the disk.
    pub(crate) fn start(
        config: CoreConfig<'_>,
        mark_dirs: &[PathBuf],
        open_disk: Box<OpenDisk<'_>>,
    ) -> Result<NodeCore, CoreError> {
        let CoreConfig { node, groups, generation, plan, huge_pages, external, disk, .. } = config;
        let (self_fence_timeout, engines) = (config.self_fence_timeout, config.engines);
        let staging_bytes = disk.as_ref().map(|disk| disk.staging_bytes);
        let memory = NodeMemory::create(node, generation, plan, huge_pages, staging_bytes, external);
        let memory = Arc::new(memory?);
        info!(
            node = %node,
            segments = plan.count,
            segment_bytes = plan.bytes(),
            slots = plan.slots,
            groups,
            "memory allocated"
        );
        let counters = Arc::<Counters>::default();
        let group = |number| group_of_segment(node, SegmentId(number), groups);
        let router = EventRouter::new((0..plan.count).map(group).collect(), SyncMarkStore::open(mark_dirs));
        let (tasks, task_receiver) = mpsc::channel();
        let disk = disk.map(|disk| open_disk(disk, &memory, &router)).transpose()?.map(Arc::new);
        let capabilities = Arc::new(CapabilityKeys::new(groups, config.capability_key));
        let owner = Arc::new(NodeOwner::new(
            node,
            Arc::clone(&memory),
            disk.clone(),
            Arc::clone(&capabilities),
            Arc::clone(&counters),
            Arc::clone(&router),
            tasks.clone(),
        ));
        let copier = Arc::new(Copier::new(
            Arc::clone(&memory),
            Arc::clone(&router),
            Arc::clone(&counters),
            engines,
            config.copy_bytes_per_s,
        ));
        let index_gate = Arc::new(IndexGate::new(Arc::clone(&memory), self_fence_timeout));
        // Publish a heartbeat before any client can check it.
        memory.heap().heartbeat();
        let (stop_heartbeat, heartbeat_stopped) = mpsc::channel();
        // From here on, dropping `core` ends the threads.
        let mut core = NodeCore {
            memory: Arc::clone(&memory),
            disk: disk.clone(),
            copier: Arc::clone(&copier),
            owner,
            capabilities,
            index_gate: Arc::clone(&index_gate),
            router: Arc::clone(&router),
            status: Arc::default(),
            flush: Arc::default(),
            drain: Arc::default(),
            counters: Arc::clone(&counters),
            tasks,
            stop_heartbeat,
            threads: Vec::new(),
            disk_threads: Vec::new(),
        };
        if let Some(disk) = &disk {
            core.disk_threads = disk.start()?;
        }
        for _ in 0..COPY_THREADS {
            let copier = Arc::clone(&copier);
            core.threads.push(spawn("moontide-copy", move || copier.run())?);
        }
        let executor = CommandExecutor::new(memory, disk, copier, counters, router);
        core.threads.push(spawn("moontide-exec", move || executor.run(&task_receiver))?);
        core.threads.push(spawn("moontide-gate", move || index_gate.run(&heartbeat_stopped))?);
        Ok(core)
    }

    /// Returns the sessions with the masters, which run until `stop` becomes true. `seeds` are the configured masters.
    pub(crate) fn sessions(
        &self,
        descriptor: NodeDescriptor,
        seeds: Vec<String>,
        stop: watch::Receiver<bool>,
    ) -> SessionManager {
        let components = NodeComponents {
            memory: Arc::clone(&self.memory),
            disk: self.disk.clone(),
            copier: Arc::clone(&self.copier),
            owner: Arc::clone(&self.owner),
            capabilities: Arc::clone(&self.capabilities),
            index_gate: Arc::clone(&self.index_gate),
            status: Arc::clone(&self.status),
            flush: Arc::clone(&self.flush),
            drain: Arc::clone(&self.drain),
            counters: Arc::clone(&self.counters),
            tasks: self.tasks.clone(),
        };
        SessionManager::new(descriptor, components, Arc::clone(&self.router), seeds, stop)
    }

    /// Refuses peers and closes the local index. Before the masters unmount the segments: they can no longer invalidate what is
    /// removed or replaced after that.
    pub(crate) fn close(&self) {
        mark!("node stops with jobs of its disk", self.disk.as_ref().is_some_and(|disk| !disk.is_idle()));
        self.owner.close();
        self.index_gate.close();
    }

    /// Ends writes to disk that have not begun, once the sessions have ended: no master waits for them any more, and a write
    /// that waits for its turn pins its record.
    pub(crate) fn stop_offloads(&self) {
        self.disk.iter().for_each(|disk| disk.stop_offloads());
    }

    /// Ends the threads, and waits for them. Queued jobs are dropped.
    pub(crate) fn stop(&mut self) {
        // Errors: a thread that has already exited has logged its reason.
        if let Some(disk) = &self.disk {
            disk.stop();
        }
        self.copier.stop();
        let _ = self.tasks.send(ExecutorTask::Stop);
        let _ = self.stop_heartbeat.send(());
        for thread in self.threads.drain(..) {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            if thread.join().is_err() {
                error!(thread = name, "node thread panicked");
            }
        }
        if let Some(disk) = &self.disk {
            disk.join(std::mem::take(&mut self.disk_threads));
        }
    }
}

impl Drop for NodeCore {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Opens the disk tier in the directories of the node.
pub(crate) fn open_disk<'a>(directories: Option<DiskDirectories>) -> Box<OpenDisk<'a>> {
    Box::new(move |config, memory, router| {
        let directories = directories.expect("a node with a disk has opened its directories");
        let staging = memory.staging().expect("a node with a disk has staging memory");
        DiskTier::open(directories, config, Arc::clone(memory), Arc::clone(staging), Arc::clone(router))
    })
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    moontide_rt::thread::Builder::new().name(name.to_owned()).spawn(run)
}
