//! [`Copier`]: copies records of other nodes into slots of this node, on command of a master.
//!
//! ```text
//!   Copy command ─▶ queue by urgency ─▶ batch of one source ─▶ describe ─▶ begin ─▶ read ─▶ publish ─▶ result
//! ```
//!
//! The master names the source and the root of its digests. The copier asks the source for the description of the record,
//! reads the payload directly into the slot, digests it on arrival, and publishes the record only if its digests lead to
//! that root. A Kill or Reclaim of the slot cancels the copy ([`SlotFills`](crate::slot_fills::SlotFills)), and so does
//! the end of the session. Payload moves from node to node; masters only see the commands and their results.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use moontide_heap::NodeClaim;
use moontide_proto::convert::{DescribeReply, Wire, decode};
use moontide_proto::limits::NODES_MAX;
use moontide_proto::{
    CommandResult, CopyPurpose, CopySource, FrameKind, OpFlags, OpKind, PackedBuilder, TransferOp, v1,
};
use moontide_rt::collections::HashMap;
use moontide_rt::mark;
use moontide_rt::sync::{Condvar, Mutex};
use moontide_rt::time::Instant;
use moontide_transfer::{Engines, Link, Op, Peer, Target, TransferError, call, run};
use moontide_types::limits::{PAGE_BYTES, UNIT_BYTES};
use moontide_types::record::{Attributes, RecordDescription, State, Word};
use moontide_types::{Clock, ErrorCode, NodeId, ObjectId, SessionId, Span, SystemClock};
use tracing::debug;

use crate::event_router::EventRouter;
use crate::logic::batch::ByteThrottle;
use crate::logic::commands::CommandReply;
use crate::memory::NodeMemory;
use crate::metrics::Counters;
use crate::slot_fills::{FillSource, FillTarget, SkippedChecks};

/// Threads that copy. While some verify or wait for a source, others read.
pub(crate) const COPY_THREADS: usize = 4;

/// Most records that one request describes, and whose payloads are read together.
const BATCH_RECORDS_MAX: usize = 64;

/// Bytes at which a batch gets no further record. Few, because the bytes of a batch come at once: readers wait behind them on the
/// network and for the cores.
const BATCH_BYTES: u64 = 2 << 20;

/// Time limit of connecting to a source.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Time limit of a request to a source, and of the reads of a batch.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(5);

/// A record to copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyJob {
    pub(crate) target: FillTarget,
    pub(crate) id: ObjectId,
    pub(crate) stripe: u16,
    pub(crate) source: CopySource,
    /// The copy is cancelled if it has not begun by then.
    pub(crate) until: Instant,
}

impl CopyJob {
    fn bytes(&self) -> u64 {
        u64::from(self.target.extent.units) * UNIT_BYTES
    }

    fn session(&self) -> SessionId {
        self.target.command.0
    }
}

/// A node that may be a source, with the link to it.
#[derive(Debug)]
struct Source {
    /// Number of its registration.
    registration: u64,
    peer: Peer,
    link: Option<Arc<dyn Link>>,
}

#[derive(Debug, Default)]
struct CopyQueue {
    /// By urgency and order of the commands.
    jobs: BTreeMap<(u8, u64), CopyJob>,
    count: u64,
    stopped: bool,
}

/// Copies records of other nodes.
#[derive(Debug)]
pub(crate) struct Copier {
    memory: Arc<NodeMemory>,
    events: Arc<EventRouter>,
    counters: Arc<Counters>,
    engines: Engines,
    sources: Mutex<HashMap<NodeId, Source>>,
    queue: Mutex<CopyQueue>,
    changed: Condvar,
    throttle: Mutex<ByteThrottle>,
}

/// A record that is being copied.
struct Copying<'a> {
    job: CopyJob,
    target: Target,
    claim: NodeClaim<'a>,
    digests: Vec<u64>,
}

impl Copier {
    /// Creates a copier that copies at most `bytes_per_s` bytes per second; 0 for no limit.
    pub(crate) fn new(
        memory: Arc<NodeMemory>,
        events: Arc<EventRouter>,
        counters: Arc<Counters>,
        engines: Engines,
        bytes_per_s: u64,
    ) -> Copier {
        Copier {
            memory,
            events,
            counters,
            engines,
            sources: Mutex::default(),
            queue: Mutex::default(),
            changed: Condvar::new(),
            throttle: Mutex::new(ByteThrottle::new(bytes_per_s)),
        }
    }

    /// Returns a copier that reaches no node, and whose threads do not run.
    #[cfg(test)]
    pub(crate) fn idle(memory: &Arc<NodeMemory>, events: &Arc<EventRouter>) -> Arc<Copier> {
        let engines = Engines::new(vec![], moontide_transfer::Metrics::new());
        Arc::new(Copier::new(Arc::clone(memory), Arc::clone(events), Arc::default(), engines, 0))
    }

    /// Learns the addresses of nodes, each with the number of its registration: with another one it is another process.
    pub(crate) fn learn(&self, nodes: Vec<(u64, Peer)>) {
        let mut sources = self.sources.lock();
        if sources.len() + nodes.len() > NODES_MAX {
            sources.clear();
        }
        for (registration, peer) in nodes {
            let known = sources.get(&peer.node).is_some_and(|known| known.registration == registration);
            if !known {
                sources.insert(peer.node, Source { registration, peer, link: None });
            }
        }
    }

    /// Queues a copy. Returns `false` if the copier has stopped.
    pub(crate) fn enqueue(&self, job: CopyJob) -> bool {
        self.memory.fills.list(&job.target, FillSource::Node(job.source.node));
        let mut queue = self.queue.lock();
        let is_queued = !queue.stopped;
        if is_queued {
            queue.count += 1;
            let number = queue.count;
            queue.jobs.insert((urgency(job.source.purpose), number), job);
        }
        drop(queue);
        if is_queued {
            self.changed.notify_one();
        } else {
            self.memory.fills.unlist(&job.target);
        }
        is_queued
    }

    /// Stops the threads. Queued copies are dropped.
    pub(crate) fn stop(&self) {
        let mut queue = self.queue.lock();
        queue.stopped = true;
        queue.jobs.clear();
        drop(queue);
        self.changed.notify_all();
    }

    /// Runs a thread of the copier, until it is stopped.
    pub(crate) fn run(&self) {
        moontide_rt::thread::lower_priority();
        while let Some(jobs) = self.next_batch() {
            let bytes = jobs.iter().map(CopyJob::bytes).sum();
            let wait = self.throttle.lock().take(bytes, SystemClock.now());
            if !self.wait_unless_stopped(wait) {
                return;
            }
            self.copy_and_answer(jobs);
        }
    }

    /// Makes all queued copies.
    #[cfg(test)]
    fn run_queued(&self) {
        while self.queued() > 0 {
            let jobs = self.next_batch().expect("jobs are queued");
            self.copy_and_answer(jobs);
        }
    }

    #[cfg(test)]
    fn queued(&self) -> usize {
        self.queue.lock().jobs.len()
    }

    fn copy_and_answer(&self, jobs: Vec<CopyJob>) {
        let outcomes = self.copy(jobs);
        let results = outcomes.into_iter().map(|(job, outcome)| self.result(&job, outcome)).collect();
        mark!("about to tell of copied records");
        self.events.send_results(results);
    }

    /// Waits for jobs, and returns the most urgent one with others of the same source.
    fn next_batch(&self) -> Option<Vec<CopyJob>> {
        let mut queue = self.queue.lock();
        let first = loop {
            if queue.stopped {
                return None;
            }
            if let Some((_, first)) = queue.jobs.pop_first() {
                break first;
            }
            self.changed.wait(&mut queue);
        };
        let (mut jobs, mut bytes) = (vec![first], first.bytes());
        let same = queue.jobs.iter().filter(|(_, job)| job.source.node == first.source.node);
        let keys: Vec<(u8, u64)> = same.map(|(&key, _)| key).take(BATCH_RECORDS_MAX - 1).collect();
        for key in keys {
            if bytes >= BATCH_BYTES {
                break;
            }
            let job = queue.jobs.remove(&key).expect("key was found under the lock");
            bytes += job.bytes();
            jobs.push(job);
        }
        Some(jobs)
    }

    /// Waits, unless the copier is stopped meanwhile. Returns whether it is not.
    fn wait_unless_stopped(&self, wait: Duration) -> bool {
        let until = Instant::now() + wait;
        let mut queue = self.queue.lock();
        while !queue.stopped && Instant::now() < until {
            // Further jobs wake this thread, too.
            self.changed.wait_until(&mut queue, until);
        }
        !queue.stopped
    }

    fn result(&self, job: &CopyJob, outcome: Result<(), ErrorCode>) -> (SessionId, CommandResult) {
        self.memory.fills.unlist(&job.target);
        self.counters.copied(outcome.is_ok().then(|| job.bytes()));
        let reply = match outcome {
            Ok(()) => CommandReply::done(Word::new(job.target.epoch, State::Ready)),
            Err(code) => {
                debug!(id = %job.id, source = %job.source.node, %code, "record not copied");
                CommandReply::refused(code, Word::default())
            }
        };
        (job.session(), reply.to(job.target.command.1))
    }

    /// Copies records of one source. Returns the outcome of each.
    fn copy(&self, jobs: Vec<CopyJob>) -> Vec<(CopyJob, Result<(), ErrorCode>)> {
        let mut outcomes = Vec::with_capacity(jobs.len());
        let now = Instant::now();
        let (jobs, late): (Vec<CopyJob>, Vec<CopyJob>) =
            jobs.into_iter().partition(|job| job.until > now && self.memory.fills.is_current(&job.target));
        outcomes.extend(late.into_iter().map(|job| (job, Err(ErrorCode::Cancelled))));
        let Some(node) = jobs.first().map(|job| job.source.node) else { return outcomes };
        let deadline = now + TRANSFER_TIMEOUT;
        let link = match self.link(node, now + CONNECT_TIMEOUT) {
            Ok(link) => link,
            Err(code) => {
                outcomes.extend(jobs.into_iter().map(|job| (job, Err(code))));
                return outcomes;
            }
        };
        mark!("about to describe records");
        let described = match describe(&*link, &jobs, deadline) {
            Ok(body) => body,
            Err(error) => {
                self.lost(node, &link);
                outcomes.extend(jobs.into_iter().map(|job| (job, Err(error.code()))));
                return outcomes;
            }
        };
        let described = DescribeReply::from_wire(&described);
        let described = described.ok().filter(|described| described.codes.len() == jobs.len());
        let Some(described) = described else {
            outcomes.extend(jobs.into_iter().map(|job| (job, Err(ErrorCode::Internal))));
            return outcomes;
        };
        let mut copying = Vec::with_capacity(jobs.len());
        for ((job, code), record) in
            jobs.into_iter().zip(described.codes.iter()).zip(described.records.iter())
        {
            mark!("source of a copy is gone", code == Some(ErrorCode::Gone));
            let begun = code.map_or(Ok(()), Err).and_then(|()| self.begin(job, record));
            match begun {
                Ok(begun) => copying.push(begun),
                Err(code) => outcomes.push((job, Err(code))),
            }
        }
        let read = read(&*link, &mut copying, deadline);
        if read.contains(&Err(ErrorCode::ConnectionLost)) {
            self.lost(node, &link);
        }
        mark!("about to publish copied records");
        for (copying, read) in copying.into_iter().zip(read) {
            let (job, published) = self.publish(copying, read);
            outcomes.push((job, published));
        }
        outcomes
    }

    /// Begins the record of a copy from its description.
    fn begin(&self, job: CopyJob, record: &[u8]) -> Result<Copying<'_>, ErrorCode> {
        let RecordDescription { header, key, attributes } =
            RecordDescription::decode(record).map_err(|_| ErrorCode::Corrupt)?;
        let is_asked_for = (header.id, header.word.epoch(), header.stripe_index)
            == (job.id, job.target.epoch, job.stripe)
            && header.root == job.source.root
            && !header.flags.digestless();
        if !is_asked_for {
            return Err(ErrorCode::Corrupt);
        }
        let attributes = Attributes::decode(attributes).map_err(|_| ErrorCode::Corrupt)?;
        let is_live = || self.is_live(job.session());
        let skipped =
            SkippedChecks { begin: moontide_rt::mutation_enabled("copy-begun-after-kill"), publish: false };
        mark!("about to begin a copied record");
        let begun = self.memory.begin_fill(&job.target, &header, key, &attributes, (&is_live, skipped));
        mark!("copy cancelled before its begin", matches!(begun, Err(ErrorCode::Cancelled)));
        let claim = begun?;
        let CopySource { segment, generation, slot, term, capability, .. } = job.source;
        let target = Target {
            segment,
            generation,
            slot,
            term,
            epoch: job.target.epoch,
            id: job.id,
            stripe: job.stripe,
            payload_offset: header.payload_offset,
            capability,
            flags: OpFlags::BACKGROUND,
        };
        let digests = vec![0; header.stripe_len.div_ceil(PAGE_BYTES) as usize];
        Ok(Copying { job, target, claim, digests })
    }

    /// Publishes a record whose payload was read. Its digests must lead to the root that the master named.
    fn publish(&self, copying: Copying<'_>, read: Result<(), ErrorCode>) -> (CopyJob, Result<(), ErrorCode>) {
        let Copying { job, mut claim, digests, .. } = copying;
        if let Err(code) = read {
            drop(claim);
            self.memory.abandon_fill(&job.target);
            return (job, Err(code));
        }
        for (page, digest) in (0..).zip(digests) {
            claim.set_page_digest(page, digest);
        }
        let is_live = || self.is_live(job.session());
        let skipped = SkippedChecks {
            begin: false,
            publish: moontide_rt::mutation_enabled("copy-published-after-kill"),
        };
        let published = self.memory.publish_fill(&job.target, claim, job.source.root, (&is_live, skipped));
        mark!("copy cancelled between begin and publication", published == Err(ErrorCode::Cancelled));
        let is_for = |purpose| published.is_ok() && job.source.purpose == purpose;
        mark!("record copied to the host of its readers", is_for(CopyPurpose::Hot));
        mark!("record moved for the balance of the nodes", is_for(CopyPurpose::Rebalance));
        (job, published)
    }

    fn is_live(&self, session: SessionId) -> bool {
        self.events.has_session(session) || moontide_rt::mutation_enabled("copy-outlives-session")
    }

    /// Returns the link to a source; opens one if there is none.
    fn link(&self, node: NodeId, deadline: Instant) -> Result<Arc<dyn Link>, ErrorCode> {
        let (registration, peer) = {
            let sources = self.sources.lock();
            // A node without addresses has left.
            let source = sources.get(&node).ok_or(ErrorCode::Unreachable)?;
            if let Some(link) = source.link.as_ref().filter(|link| !link.is_closed()) {
                return Ok(Arc::clone(link));
            }
            (source.registration, source.peer.clone())
        };
        let link = self.engines.connect(&peer, deadline).map_err(|error| error.code())?;
        let mut sources = self.sources.lock();
        if let Some(source) = sources.get_mut(&node).filter(|source| source.registration == registration) {
            source.link = Some(Arc::clone(&link));
        }
        Ok(link)
    }

    /// Forgets a link that has failed.
    fn lost(&self, node: NodeId, link: &Arc<dyn Link>) {
        if let Some(source) = self.sources.lock().get_mut(&node)
            && source.link.as_ref().is_some_and(|known| Arc::ptr_eq(known, link))
        {
            source.link = None;
        }
    }
}

/// Copies with a lower number are made first.
fn urgency(purpose: CopyPurpose) -> u8 {
    match purpose {
        // Until the copy is complete, another loss may lose the object.
        CopyPurpose::Repair => 0,
        CopyPurpose::Drain => 1,
        // Readers wait for the network until then.
        CopyPurpose::Hot => 2,
        CopyPurpose::Rebalance => 3,
    }
}

/// Asks a source for the descriptions of records.
fn describe(
    link: &dyn Link,
    jobs: &[CopyJob],
    deadline: Instant,
) -> Result<v1::DescribeReply, TransferError> {
    let op = |job: &CopyJob| TransferOp {
        kind: OpKind::Read,
        flags: OpFlags::BACKGROUND,
        stripe: job.stripe,
        segment: job.source.segment,
        generation: job.source.generation,
        slot: job.source.slot,
        term: job.source.term,
        epoch: job.target.epoch,
        id: job.id,
        offset: 0,
        len: 0,
        capability: job.source.capability,
    };
    let ops: PackedBuilder<TransferOp> = jobs.iter().map(op).collect();
    let reply = call(link, FrameKind::Describe, ops.finish(), deadline)?;
    decode(reply.into()).map_err(|error| TransferError::Refused { code: error.code() })
}

/// Reads the payloads into the claimed slots. Returns the outcome of each.
fn read(link: &dyn Link, copying: &mut [Copying<'_>], deadline: Instant) -> Vec<Result<(), ErrorCode>> {
    let mut ops: Vec<Op<'_>> = Vec::with_capacity(copying.len());
    let mut op_of: Vec<Option<usize>> = Vec::with_capacity(copying.len());
    for Copying { target, claim, digests, .. } in copying.iter_mut() {
        let header = *claim.header();
        let whole = Span::new(0, header.stripe_len).expect("a record has an end");
        // An empty object has no bytes to read.
        op_of.push((!whole.is_empty()).then_some(ops.len()));
        if !whole.is_empty() {
            let op = Op::get(*target, 0, claim.bytes_mut(whole));
            let op = op.digested(header.digest_context(), digests);
            ops.push(op.expect("a whole stripe is whole pages"));
        }
    }
    let ended = if ops.is_empty() { Ok(()) } else { run(link, &mut ops, deadline) };
    let outcome = |at: usize| match (ops[at].outcome(), &ended) {
        (Some(outcome), _) => outcome,
        (None, Err(error)) => Err(error.code()),
        (None, Ok(())) => Err(ErrorCode::Internal),
    };
    op_of.into_iter().map(|at| at.map_or(Ok(()), outcome)).collect()
}

#[cfg(test)]
mod tests;
