//! [`NodeHost`]: a host whose process is a shipped node. The process is stopped, killed and started again; the disk remains.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use moontide_disk::SimulatedDisk;
use moontide_node::testing::{NodeWithoutSockets, TestNodeConfig};
use moontide_node::{DiskConfig, SELF_FENCE_TIMEOUT_DEFAULT};
use moontide_proto::convert::{ObjectListBuilder, ObjectListKind};
use moontide_proto::limits::OPS_PER_FRAME_MAX;
use moontide_proto::{Codes, FixedRecord as _, FrameKind, OpKind, PackedKeysBuilder, v1};
use moontide_rt::sim::{Process, ProcessClock, mark, set_files_fail};
use moontide_rt::thread;
use moontide_rt::time::Instant;
use moontide_transfer::{
    CarriedEngine, CarriedRequest, Owner, PeerIdentity, Target, serve_read, serve_write,
};
use moontide_types::{ErrorCode, Generation, Key, NodeId, Tenant};
use prost::Message as _;

use crate::client::key_bytes;
use crate::event::{Message, NodeOp, NodeReply, Payload, ProcessId};
use crate::links::{Links, NodesOfWorld, Outgoing};
use crate::master::{CLUSTER, address_of};
use crate::oracle::pattern;
use crate::plan::RunPlan;
use crate::rng::SimRng;

/// How long a node works on a request at most. A client gives up before.
const SERVE_TIMEOUT: Duration = Duration::from_secs(3);

/// What a read of an object counts: a server samples one read in this number of bytes.
const SAMPLED_BYTES: u64 = 1 << 20;

/// How many requests of clients come, or are read, slowly.
const SLOW_PERMILLE: u32 = 30;

/// The node of a process, once it has started. Never dropped: its destructors would stop threads, and wait for them, also when the
/// process was killed or the world has failed.
type Running = Rc<RefCell<Option<ManuallyDrop<NodeWithoutSockets>>>>;

/// A host with a node.
pub(crate) struct NodeHost {
    index: usize,
    disk: Option<SimulatedDisk>,
    /// Whether the power has failed, or will fail, since the last start.
    lost_power: bool,
    incarnation: u32,
    process: Option<(Process, Running)>,
    rng: RefCell<SimRng>,
}

impl NodeHost {
    pub(crate) fn new(index: usize, plan: &RunPlan, seed: u64) -> NodeHost {
        let disk = plan.disk.as_ref().map(|disk| {
            let simulated = SimulatedDisk::new(seed);
            simulated.set_faults(disk.faults);
            simulated
        });
        let rng = RefCell::new(SimRng::new(seed ^ 0x510e));
        NodeHost { index, disk, lost_power: false, incarnation: 0, process: None, rng }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.process.is_some()
    }

    pub(crate) fn incarnation(&self) -> u32 {
        self.incarnation
    }

    /// Whether the power has failed, or will soon, while the process runs.
    pub(crate) fn is_losing_power(&self) -> bool {
        self.lost_power && self.is_running()
    }

    /// Directory of the disk; the files of its process are below it.
    fn dir(&self) -> PathBuf {
        PathBuf::from(format!("/host-{}", self.index))
    }

    /// Starts a process. It serves when it has opened its disk. Returns its node id.
    pub(crate) fn start(
        &mut self,
        plan: &RunPlan,
        seed: u64,
        clock: ProcessClock,
        links: &Rc<Links>,
    ) -> NodeId {
        self.incarnation += 1;
        if let Some(disk) = &self.disk {
            if self.lost_power { disk.restart() } else { disk.end_process() }
        }
        self.lost_power = false;
        let mut rng = SimRng::new(seed);
        // A disk belongs to one node: its number is on it.
        let keeps_id = plan.stable_node_ids || plan.disk.is_some();
        let node = NodeId(if keeps_id { self.index as u64 + 1 } else { (seed >> 16) | 1 });
        let disk = self.disk.clone().zip(plan.disk.as_ref()).map(|(storage, disk)| {
            let config = DiskConfig {
                dir: vec![self.dir()],
                backend: disk.backend,
                limit_bytes: Some(disk.limit_bytes),
                eviction_policy: disk.eviction_policy,
                staging_bytes: disk.staging_bytes,
                read_threads: disk.read_threads,
                ..DiskConfig::default()
            };
            (self.dir(), config, Arc::new(storage) as _)
        });
        let config = TestNodeConfig {
            node,
            boot: rng.next_u64(),
            cluster: CLUSTER,
            groups: NonZeroU16::new(plan.groups).expect("a cluster has a group"),
            // The product takes it from the calendar; it only has to differ.
            generation: Generation(rng.next_u64() >> 1),
            segments: (plan.segments as u32, plan.units, plan.slots),
            masters: (0..plan.masters).map(address_of).collect(),
            address: address_of_node(self.index),
            host: format!("host-{}", self.index),
            self_fence_timeout: SELF_FENCE_TIMEOUT_DEFAULT,
            copy_bytes_per_s: plan.copy_bytes_per_s,
            engine: Some(Arc::new(CarriedEngine(Arc::new(NodesOfWorld)))),
            disk,
        };
        let process = Process::new(&format!("node {}, start {}", self.index, self.incarnation), clock);
        links.started(process, self.index);
        let running = Running::default();
        self.process = Some((process, Rc::clone(&running)));
        let (index, incarnation, links) = (self.index, self.incarnation, Rc::clone(links));
        process.spawn("main", move || match NodeWithoutSockets::start(config) {
            Ok(node) => *running.borrow_mut() = Some(ManuallyDrop::new(node)),
            Err(reason) => links.send(Outgoing::Ended { node: index, incarnation, reason }),
        });
        node
    }

    /// Ends the process at once. Nothing of it runs again.
    pub(crate) fn kill(&mut self, links: &Links) -> bool {
        let (open, failed) = self.with_node(NodeWithoutSockets::removals).unwrap_or_default();
        if open > 0 {
            mark(if self.lost_power {
                "power lost while a removal is not durable"
            } else {
                "process killed while a removal is not durable"
            });
        }
        if failed > 0 {
            mark("process ends while a removal waits for another attempt");
        }
        let Some((process, running)) = self.process.take() else { return false };
        process.kill();
        // A host without power closes nothing: its masters wait for the end of the session.
        if !self.lost_power {
            links.close_connections(process);
        }
        links.killed(process);
        running.take();
        true
    }

    /// Lets the process stop as by a signal. It has ended when nothing of it runs: see [`NodeHost::has_stopped`].
    /// Returns false if it has not started.
    pub(crate) fn shutdown(&self) -> bool {
        let Some((process, running)) = &self.process else { return false };
        let Some(node) = running.borrow_mut().take() else { return false };
        process.spawn("moontide-stop", move || ManuallyDrop::into_inner(node).shutdown());
        true
    }

    /// Whether all threads of the process have ended.
    pub(crate) fn has_stopped(&self) -> bool {
        self.process.as_ref().is_none_or(|(process, _)| process.has_ended())
    }

    /// Ends the process and the power of its disk.
    pub(crate) fn lose_power(&mut self, links: &Links) -> bool {
        self.lost_power = true;
        if let Some(disk) = &self.disk {
            disk.crash_after(0);
        }
        self.kill(links)
    }

    /// Lets the power fail after this number of operations of the disk. The process goes on until [`NodeHost::lose_power`].
    pub(crate) fn lose_power_after(&mut self, operations: u64) {
        self.lost_power = true;
        if let Some(disk) = &self.disk {
            disk.crash_after(operations);
        }
    }

    pub(crate) fn stop(&self) {
        self.process.iter().for_each(|(process, _)| process.stop());
    }

    pub(crate) fn resume(&self) {
        self.process.iter().for_each(|(process, _)| process.resume());
    }

    pub(crate) fn jump_calendar(&self, by_ms: i64) {
        self.process.iter().for_each(|(process, _)| process.jump_calendar(by_ms));
    }

    /// Sets whether nothing can be written to the disk.
    pub(crate) fn set_disk_fails(&self, plan: &RunPlan, failure: Option<DiskFailure>) {
        let (Some(disk), Some(disk_plan)) = (&self.disk, &plan.disk) else { return };
        let mut faults = disk_plan.faults;
        match failure {
            Some(DiskFailure::Writes) => {
                (faults.sync_error_permille, faults.write_error_permille) = (1000, 1000)
            }
            Some(DiskFailure::Full) => faults.no_space_permille = 1000,
            None => {}
        }
        disk.set_faults(faults);
        set_files_fail(&self.dir(), failure.is_some());
    }

    /// Ends all faults of the disk.
    pub(crate) fn heal_disk(&self) {
        if let Some(disk) = &self.disk {
            disk.set_faults(moontide_disk::Faults::default());
            disk.end_stalls();
        }
        set_files_fail(&self.dir(), false);
    }

    /// A request of a client arrives, on whose host is the node `near`. A process that has not started does not answer.
    pub(crate) fn ask(
        &self,
        (from, near): (ProcessId, Option<NodeId>),
        call: u64,
        ask: NodeOp,
        links: &Rc<Links>,
    ) {
        let Some((process, running)) = &self.process else { return };
        let Some(owner) = running.borrow().as_ref().map(|node| node.owner()) else { return };
        let (links, node) = (Rc::clone(links), ProcessId::Node(self.index));
        // A few clients are slow, while the node has a record pinned or claimed for them.
        let mut rng = self.rng.borrow_mut();
        let pause = rng.permille(SLOW_PERMILLE).then(|| rng.up_to(SERVE_TIMEOUT)).unwrap_or_default();
        process.spawn("moontide-serve", move || {
            let deadline = Instant::now() + SERVE_TIMEOUT;
            let reply =
                serve(&*owner, (from, near), &ask, deadline, pause).unwrap_or_else(NodeReply::Refused);
            let message = Message::NodeReply { call, reply };
            links.send(Outgoing::Message { from: node, to: from, message });
        });
    }

    /// A request of another node arrives, which was sent to this node id.
    pub(crate) fn fetch(
        &self,
        from: ProcessId,
        call: u64,
        (to, request): (NodeId, CarriedRequest),
        links: &Rc<Links>,
    ) {
        let Some((process, running)) = &self.process else { return };
        let Some(owner) = running.borrow().as_ref().map(|node| node.owner()) else { return };
        let (links, node) = (Rc::clone(links), ProcessId::Node(self.index));
        let mut rng = self.rng.borrow_mut();
        let pause = rng.permille(SLOW_PERMILLE).then(|| rng.up_to(SERVE_TIMEOUT)).unwrap_or_default();
        process.spawn("moontide-serve", move || {
            let deadline = Instant::now() + SERVE_TIMEOUT;
            let reply = match request {
                // A connection to an earlier process of the host.
                _ if owner.node() != to => Err(ErrorCode::ConnectionLost),
                CarriedRequest::Call(kind, body) => {
                    owner.call(PeerIdentity::Remote(0), None, kind, &body, deadline)
                }
                CarriedRequest::Read(op) => serve_read(&*owner, None, &op, deadline, || thread::sleep(pause)),
            };
            let message = Message::Fetched { call, reply: reply.map(Payload) };
            links.send(Outgoing::Message { from: node, to: from, message });
        });
    }

    /// Whether it has announced that it is to be emptied.
    pub(crate) fn is_draining(&self) -> bool {
        self.with_node(NodeWithoutSockets::is_draining).unwrap_or(false)
    }

    fn with_node<T>(&self, what: impl FnOnce(&NodeWithoutSockets) -> T) -> Option<T> {
        self.process.as_ref()?.1.borrow().as_ref().map(|node| what(node))
    }

    /// Id of its node, while the process runs.
    pub(crate) fn id(&self) -> Option<NodeId> {
        self.with_node(|node| node.owner().node())
    }

    /// Whether the masters know all records of the node.
    pub(crate) fn is_reported(&self) -> bool {
        self.with_node(NodeWithoutSockets::is_reported).unwrap_or(false)
    }

    /// Units of memory that are not free.
    pub(crate) fn taken_units(&self) -> u64 {
        self.with_node(NodeWithoutSockets::taken_units).unwrap_or(0)
    }

    /// Records on the disk.
    pub(crate) fn disk_records(&self) -> u64 {
        self.with_node(NodeWithoutSockets::disk_records).unwrap_or(0)
    }
}

/// Where other nodes reach a node.
fn address_of_node(index: usize) -> String {
    format!("node-{index}:1")
}

/// The node at an address.
pub(crate) fn index_of(address: &str) -> Option<usize> {
    address.strip_prefix("node-")?.split(':').next()?.parse().ok()
}

/// How a disk fails for a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DiskFailure {
    /// Writes and syncs fail.
    Writes,
    /// It is full.
    Full,
}

/// Serves a request with the shipped code behind the sockets.
fn serve(
    owner: &dyn Owner,
    (from, near): (ProcessId, Option<NodeId>),
    ask: &NodeOp,
    deadline: Instant,
    pause: Duration,
) -> Result<NodeReply, ErrorCode> {
    let waits = || thread::sleep(pause);
    let ProcessId::Client(client) = from else { unreachable!("only clients ask nodes") };
    let peer = PeerIdentity::Remote(client as u64 + 1);
    let call = |kind, body: Vec<u8>| {
        let reply = owner.call(peer, None, kind, &body, deadline)?;
        let outcomes = v1::SlotOutcomes::decode(&reply[..]).expect("a node encodes its reply");
        let codes = Codes::decode(&outcomes.codes, OPS_PER_FRAME_MAX).expect("a node encodes its reply");
        codes.iter().next().expect("one slot was named").map_or(Ok(NodeReply::Done), Err)
    };
    match ask {
        NodeOp::Begin { object, handle, key, attributes } => {
            let mut keys = PackedKeysBuilder::new();
            let key = key_bytes(*key);
            keys.push(Key::new(&key).expect("a short key")).expect("one key");
            let mut list = ObjectListBuilder::with_capacity(ObjectListKind::Begin, 1);
            list.push(*object, &[*handle], attributes).expect("part of a valid answer");
            let fields = list.finish();
            let request = v1::BeginRequest {
                tenant: Tenant::DEFAULT.as_str().to_owned(),
                keys: keys.finish().into(),
                objects: fields.objects,
                handles: fields.handles,
                attributes: fields.attributes,
            };
            call(FrameKind::Begin, request.encode_to_vec())
        }
        NodeOp::Write { object, handle, token } => {
            let op = Target::of(handle, object.id, object.epoch).to_wire(OpKind::Write, 0, handle.stripe_len);
            let root = serve_write(owner, None, &op, &pattern(*token, handle.stripe_len), deadline, waits)?;
            Ok(NodeReply::Written { root })
        }
        NodeOp::Commit(entry) => {
            let mut entries = Vec::new();
            entry.encode(&mut entries);
            call(FrameKind::Commit, v1::CommitRequest { entries: entries.into() }.encode_to_vec())
        }
        NodeOp::Read { id, epoch, handle } => {
            let op = Target::of(handle, *id, *epoch).to_wire(OpKind::Read, 0, handle.stripe_len);
            let bytes = serve_read(owner, None, &op, deadline, waits)?;
            if let Some(near) = near.filter(|&near| near != owner.node()) {
                owner.on_remote_reads(near, &op, SAMPLED_BYTES);
            }
            Ok(NodeReply::Bytes(Payload(bytes)))
        }
    }
}
