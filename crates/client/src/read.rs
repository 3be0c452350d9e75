//! [`ObjectRead`]: reads objects with known locations directly into the caller's buffers.
//!
//! ```text
//!   for each stripe: sorted replicas ─▶ batches by node ─▶ run, hedged ─▶ digests match? ─▶ done
//!                        ▲                                        │              │ no
//!                        └──────── next replica ◀─────────────────┴──────────────┘
//! ```
//!
//! Invariant: a successful read has filled its buffer with bytes whose digests lead to the master's root. After a
//! failed read the content of the buffer is unspecified, and the caller is not given its length.

use std::sync::Arc;
use std::time::Duration;

use moontide_rt::time::Instant;
use moontide_transfer::{
    Batch, EngineKind, Link, Op, Target, TransferError, Winner, run_batches, run_batches_unless_late,
    run_hedged,
};
use moontide_types::limits::PAGE_BYTES;
use moontide_types::{Clock, ErrorCode, Medium, NodeId, SystemClock};

use crate::cluster::next_counter;
use crate::config::Hedge;
use crate::error::StoreError;
use crate::logic::{Distance, NodeHealth, ReplicaCandidate, RetryDecision, classify, sort_replicas};
use crate::nodes::{Node, is_connection_error};
use crate::replica_list::ReplicaList;
use crate::store::Inner;

/// Longest wait for the masters' node list in a read whose node has failed.
const REFRESH_WAIT: Duration = Duration::from_millis(250);

/// Read of one object.
#[derive(Debug)]
pub(crate) struct ObjectRead<'m> {
    pub(crate) location: Arc<ReplicaList>,
    /// Exactly as long as the object.
    pub(crate) into: &'m mut [u8],
    pub(crate) outcome: Outcome,
}

/// Outcome of a read.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    /// Unfinished.
    Open,
    /// The buffer holds verified bytes.
    Done(ReadSource),
    /// The location is stale: look it up again. The error, if another look-up that ends the same way must not count as a
    /// miss.
    Stale(Option<StoreError>),
    /// The only copies were on disks, and these cannot read them: a miss for the caller.
    Lost,
    /// All replicas failed, or the error is final.
    Failed(StoreError),
}

/// Source of the bytes of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadSource {
    /// Memory of a node at this distance.
    Memory(Distance),
    /// Disk of a node.
    Disk,
}

/// Read of one stripe.
struct StripeRead {
    read: usize,
    stripe: usize,
    /// Replicas in the order in which they are tried.
    replicas: Vec<usize>,
    next: usize,
    done: bool,
    /// Whether the bytes came from a disk.
    from_disk: bool,
    /// Whether a disk that holds the stripe failed to read it.
    disk_failed: bool,
    /// Whether a node that holds the stripe on its disk had no memory for the read.
    disk_busy: bool,
    corrupt: Vec<NodeId>,
    last: Option<StoreError>,
}

/// Destination of a stripe, and the digests of its pages.
struct StripeBuffer<'m> {
    into: &'m mut [u8],
    digests: Vec<u64>,
}

/// Stripe reads that go to one node.
struct NodeReads {
    node: Arc<Node>,
    link: Arc<dyn Link>,
    /// Whether the stripes have further replicas.
    has_alternative: bool,
    /// Index of the stripe read, and its replica.
    sent: Vec<(usize, usize)>,
}

/// A node and the link to it.
pub(crate) type Reached = Result<(Arc<Node>, Arc<dyn Link>), StoreError>;

/// Result of a stripe read in one round.
struct ReadResult {
    job: usize,
    replica: usize,
    node: NodeId,
    result: Result<(), StoreError>,
}

impl Inner {
    /// Runs all reads. Afterwards every read has an outcome.
    pub(crate) fn read_all(&self, reads: &mut [ObjectRead<'_>], deadline: Instant) {
        let locations: Vec<Arc<ReplicaList>> = reads.iter().map(|read| Arc::clone(&read.location)).collect();
        let mut round = ReadRound {
            store: self,
            locations: &locations,
            outcomes: vec![Outcome::Open; reads.len()],
            jobs: Vec::with_capacity(reads.len()),
            deadline,
        };
        let mut buffers: Vec<StripeBuffer<'_>> = Vec::with_capacity(reads.len());
        for (index, read) in reads.iter_mut().enumerate() {
            let mut rest = &mut *read.into;
            let counter = next_counter();
            for stripe in 0..read.location.stripes() {
                let len = read.location.handle(0, stripe).stripe_len as usize;
                let (into, after) = rest.split_at_mut(len);
                rest = after;
                let digests = vec![0; (len as u64).div_ceil(PAGE_BYTES) as usize];
                buffers.push(StripeBuffer { into, digests });
                round.jobs.push(StripeRead {
                    read: index,
                    stripe,
                    replicas: self.replicas_of(&read.location, stripe, counter),
                    next: 0,
                    done: false,
                    from_disk: false,
                    disk_failed: false,
                    disk_busy: false,
                    corrupt: Vec::new(),
                    last: None,
                });
            }
            self.budget.lock().earn();
        }
        // Each round advances every unfinished stripe by one replica, so the loop ends.
        while round.run(&mut buffers) {}
        drop(buffers);
        for (read, outcome) in reads.iter_mut().zip(round.outcomes) {
            read.outcome = outcome;
        }
    }

    /// Returns the replicas of a stripe in the order in which they are tried.
    fn replicas_of(&self, location: &ReplicaList, stripe: usize, counter: u64) -> Vec<usize> {
        if location.replica_count() == 1 {
            return vec![0];
        }
        let candidate = |replica: usize| {
            let node = self.nodes.get(location.handle(replica, stripe).node);
            ReplicaCandidate {
                replica,
                disk: location.is_on_disk(replica),
                distance: node.as_ref().map_or(Distance::Remote, |node| node.distance),
                health: node.as_ref().map_or(NodeHealth::Failed, |node| node.health()),
            }
        };
        let mut candidates: Vec<ReplicaCandidate> = (0..location.replica_count()).map(candidate).collect();
        sort_replicas(&mut candidates, counter);
        candidates.iter().map(|candidate| candidate.replica).collect()
    }

    /// Returns a node and the link to it.
    pub(crate) fn reach(&self, node: NodeId, deadline: Instant) -> Reached {
        let found = match self.nodes.get(node) {
            Some(found) => found,
            // The node may have registered after the last refresh, however recent that was.
            None => {
                self.refresh_nodes_now(deadline)?;
                self.nodes.get(node).ok_or(StoreError::UnknownNode { node })?
            }
        };
        let found = match found.health() {
            NodeHealth::Good | NodeHealth::Slow => found,
            // A failed node may have restarted: with a disk it keeps its id, at another address.
            // Masters that do not respond must not delay the read for longer.
            NodeHealth::Failed => match self.refresh_nodes_now(deadline.min(Instant::now() + REFRESH_WAIT)) {
                Ok(()) => self.nodes.get(node).ok_or(StoreError::UnknownNode { node })?,
                Err(_) => found,
            },
        };
        let link = self.nodes.link(&found, deadline)?;
        Ok((found, link))
    }

    /// As [`Inner::reach`], for several nodes at once: a node that does not respond delays the others at most by the
    /// timeout of an attempt.
    pub(crate) fn reach_all(&self, nodes: &[NodeId], deadline: Instant) -> Vec<Reached> {
        if let &[node] = nodes {
            return vec![self.reach(node, deadline)];
        }
        let until = deadline.min(Instant::now() + self.cluster.attempt_timeout());
        let open = |node: &NodeId| {
            let found = self.nodes.get(*node).filter(|node| node.health() != NodeHealth::Failed)?;
            let link = found.open_link()?;
            Some((found, link))
        };
        std::thread::scope(|scope| {
            let start = |&node: &NodeId| match open(&node) {
                Some(reached) => Err(Ok(reached)),
                None => {
                    let run = move || self.reach(node, until);
                    let thread = std::thread::Builder::new().name("moontide-connect".into());
                    // Too many threads: this one connects.
                    thread.spawn_scoped(scope, run).map_err(|_| self.reach(node, until))
                }
            };
            let started: Vec<_> = nodes.iter().map(start).collect();
            let join = |started: Result<std::thread::ScopedJoinHandle<'_, Reached>, Reached>| match started {
                Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(reached) => reached,
            };
            started.into_iter().map(join).collect()
        })
    }
}

/// State of [`Inner::read_all`].
struct ReadRound<'a> {
    store: &'a Inner,
    locations: &'a [Arc<ReplicaList>],
    outcomes: Vec<Outcome>,
    jobs: Vec<StripeRead>,
    deadline: Instant,
}

impl ReadRound<'_> {
    fn is_open(&self, read: usize) -> bool {
        matches!(self.outcomes[read], Outcome::Open)
    }

    /// Sends every unfinished stripe read to its next replica. Returns whether any remains unfinished.
    fn run(&mut self, buffers: &mut [StripeBuffer<'_>]) -> bool {
        let per_node = self.group_by_node();
        for read_result in self.send(&per_node, buffers) {
            self.record_result(read_result, buffers);
        }
        for read in 0..self.outcomes.len() {
            if self.is_open(read) && self.jobs.iter().all(|job| job.read != read || job.done) {
                let node = self.locations[read].nodes(0).next().and_then(|node| self.store.nodes.get(node));
                let distance = node.map_or(Distance::Remote, |node| node.distance);
                let from_disk = self.jobs.iter().any(|job| job.read == read && job.from_disk);
                let source = if from_disk { ReadSource::Disk } else { ReadSource::Memory(distance) };
                self.outcomes[read] = Outcome::Done(source);
            }
        }
        self.jobs.iter().any(|job| !job.done && self.is_open(job.read))
    }

    /// Groups the unfinished stripe reads by the node of their next replica.
    fn group_by_node(&mut self) -> Vec<NodeReads> {
        let mut per_node: Vec<NodeReads> = Vec::new();
        // Each node is reached once per round, not once per stripe: reaching a failed node costs a call to the masters.
        let nodes = self.next_nodes();
        let reached = self.store.reach_all(&nodes, self.deadline);
        for index in 0..self.jobs.len() {
            let job = &mut self.jobs[index];
            if job.done || !matches!(self.outcomes[job.read], Outcome::Open) {
                continue;
            }
            let Some(&replica) = job.replicas.get(job.next) else {
                self.outcomes[job.read] = job.exhausted();
                continue;
            };
            job.next += 1;
            if Instant::now() >= self.deadline {
                self.outcomes[job.read] = Outcome::Failed(self.store.timeout_error());
                continue;
            }
            // Reading another replica costs the cluster no more than the first would have: no retry budget is spent.
            if job.next > 1 {
                self.store.metrics.retries.inc();
            }
            let handle = self.locations[job.read].handle(replica, job.stripe);
            if handle.stripe_len == 0 {
                job.done = true; // an empty object has no bytes to read
                continue;
            }
            let reached_at = nodes.iter().position(|node| *node == handle.node).expect("collected above");
            let (node, link) = match &reached[reached_at] {
                Ok(reached) => reached,
                Err(error) => {
                    job.last = Some(error.clone());
                    continue;
                }
            };
            // Reads without a replica on another node wait until the deadline, the others do not.
            let node_of = |replica: usize| self.locations[job.read].handle(replica, job.stripe).node;
            let has_alternative = job.replicas[job.next..].iter().any(|&other| node_of(other) != handle.node);
            let is_same = |node_reads: &NodeReads| {
                node_reads.node.info.node == handle.node && node_reads.has_alternative == has_alternative
            };
            let at = per_node.iter().position(is_same).unwrap_or_else(|| {
                let (node, link) = (Arc::clone(node), Arc::clone(link));
                per_node.push(NodeReads { node, link, has_alternative, sent: Vec::new() });
                per_node.len() - 1
            });
            let node_reads = &mut per_node[at];
            // The remote side does not check one-sided reads: they depend on the lease.
            let leased = self.locations[job.read].lease_expires_at;
            if node_reads.link.engine() == EngineKind::Ucx
                && leased.is_none_or(|until| until <= SystemClock.now())
            {
                self.outcomes[job.read] = Outcome::Stale(None);
                continue;
            }
            node_reads.sent.push((index, replica));
        }
        per_node.retain(|node_reads| !node_reads.sent.is_empty());
        per_node
    }

    /// Returns the nodes of the next replicas of the unfinished stripe reads.
    fn next_nodes(&self) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = Vec::new();
        for job in self.jobs.iter().filter(|job| !job.done && self.is_open(job.read)) {
            let Some(&replica) = job.replicas.get(job.next) else { continue };
            let handle = self.locations[job.read].handle(replica, job.stripe);
            if handle.stripe_len > 0 && !nodes.contains(&handle.node) {
                nodes.push(handle.node);
            }
        }
        nodes
    }

    /// Transfers the bytes.
    fn send(&self, per_node: &[NodeReads], buffers: &mut [StripeBuffer<'_>]) -> Vec<ReadResult> {
        let mut unused: Vec<Option<&mut StripeBuffer<'_>>> = buffers.iter_mut().map(Some).collect();
        let mut batches: Vec<Batch<'_, '_>> = per_node
            .iter()
            .map(|node_reads| {
                let op = |&(job, replica): &(usize, usize)| {
                    let buffer = unused[job].take().expect("a stripe read goes to one node");
                    self.op(job, replica, buffer.into, &mut buffer.digests)
                };
                Batch::new(&*node_reads.link, node_reads.sent.iter().map(op).collect())
            })
            .collect();
        let hedge = match (&mut batches[..], per_node) {
            ([batch], [node_reads]) => self.hedged(batch, node_reads),
            (batches, _) => {
                let has_alternative: Vec<bool> = per_node.iter().map(|reads| reads.has_alternative).collect();
                if has_alternative.contains(&true) {
                    let grace = self.store.cluster.attempt_timeout();
                    run_batches_unless_late(batches, &has_alternative, grace, self.deadline);
                } else {
                    run_batches(batches, self.deadline);
                }
                None
            }
        };
        let is_lost = |op: &Op<'_>| op.outcome() == Some(Err(ErrorCode::ConnectionLost));
        let mut results: Vec<ReadResult> = Vec::new();
        for (node_reads, batch) in per_node.iter().zip(&batches) {
            results.extend(results_of(node_reads, batch));
            match &batch.result {
                Some(Err(TransferError::Aborted)) => node_reads.node.mark_slow(),
                Some(Err(error)) if is_connection_error(error) => node_reads.node.suspect(),
                _ => {}
            }
            if batch.ops.iter().any(is_lost) {
                node_reads.node.suspect(); // the next attempt asks the masters for its successor
            }
        }
        drop(batches);
        if let Some(hedge) = hedge {
            for (read_result, scratch) in results.iter_mut().zip(hedge.scratch) {
                buffers[read_result.job].into.copy_from_slice(&scratch.bytes);
                buffers[read_result.job].digests = scratch.digests;
                *read_result = ReadResult {
                    job: read_result.job,
                    replica: scratch.replica,
                    node: hedge.node,
                    result: Ok(()),
                };
            }
        }
        results
    }

    fn op<'m>(&self, job: usize, replica: usize, into: &'m mut [u8], digests: &'m mut [u64]) -> Op<'m> {
        let (location, stripe) = (&self.locations[self.jobs[job].read], self.jobs[job].stripe);
        let handle = location.handle(replica, stripe);
        let op = Op::get(Target::of(handle, location.id(), location.epoch()), 0, into);
        if location.is_digestless() {
            return op;
        }
        op.digested(location.digest_context(handle), digests).expect("a whole stripe is whole pages")
    }

    /// Runs the reads of one node, and reads from a second node if the first takes too long. Returns the result of the
    /// second node if it was faster.
    fn hedged(&self, batch: &mut Batch<'_, '_>, node_reads: &NodeReads) -> Option<HedgeResult> {
        let store = self.store;
        let bytes: u64 = batch.ops.iter().map(|op| op.core().len()).sum();
        let delay = match store.config().hedge {
            Hedge::Off => None,
            Hedge::Adaptive => Some(store.hedge.lock().delay(bytes)),
            Hedge::After(delay) => Some(delay),
        };
        let started = Instant::now();
        let second = delay.and_then(|delay| Some((started + delay, self.second_choice(node_reads)?)));
        let Some((hedge_at, (node, replicas))) = second else {
            run_batches(std::slice::from_mut(batch), self.deadline);
            if batch.result.as_ref().is_some_and(Result::is_ok) {
                store.hedge.lock().observe(bytes, started.elapsed());
            }
            return None;
        };
        let mut scratch: Vec<Scratch> = Vec::new();
        let mut link: Option<Arc<dyn Link>> = None;
        let (scratch_out, link_out) = (&mut scratch, &mut link);
        let (winner, other) = run_hedged(
            batch,
            hedge_at,
            move || {
                if !store.budget.lock().spend() {
                    return None;
                }
                // Do not wait for a connection while the first node may finish any moment.
                let reached = store.nodes.get(node)?.open_link()?;
                if reached.engine() == EngineKind::Ucx {
                    return None; // the lease may expire during the wait
                }
                store.metrics.hedges.inc();
                let scratch = |(&(job, _), &replica): (&(usize, usize), &usize)| {
                    let len =
                        self.locations[self.jobs[job].read].handle(replica, self.jobs[job].stripe).stripe_len;
                    let pages = len.div_ceil(PAGE_BYTES) as usize;
                    Scratch { replica, bytes: vec![0; len as usize], digests: vec![0; pages] }
                };
                *scratch_out = node_reads.sent.iter().zip(&replicas).map(scratch).collect();
                let ops = node_reads.sent.iter().zip(scratch_out.iter_mut()).map(|(&(job, _), scratch)| {
                    self.op(job, scratch.replica, &mut scratch.bytes, &mut scratch.digests)
                });
                let ops = ops.collect();
                Some(Batch::new(&**link_out.insert(reached), ops))
            },
            self.deadline,
        );
        let all_ok = |batch: &Batch<'_, '_>| batch.ops.iter().all(|op| op.outcome() == Some(Ok(())));
        let won = winner == Winner::Second && other.as_ref().is_some_and(all_ok);
        drop(other);
        if won {
            node_reads.node.mark_slow();
            store.metrics.hedges_won.inc();
            return Some(HedgeResult { node, scratch });
        }
        if winner == Winner::First && batch.result.as_ref().is_some_and(Result::is_ok) {
            store.hedge.lock().observe(bytes, started.elapsed());
        }
        None
    }

    /// Returns another node that has all stripes of these reads, and the replicas there.
    fn second_choice(&self, node_reads: &NodeReads) -> Option<(NodeId, Vec<usize>)> {
        if node_reads.link.engine() == EngineKind::Shm {
            return None; // nothing to wait for
        }
        let choice = |&(job, _): &(usize, usize)| {
            let job = &self.jobs[job];
            let &replica = job.replicas.get(job.next)?;
            Some((self.locations[job.read].handle(replica, job.stripe).node, replica))
        };
        let choices: Vec<(NodeId, usize)> = node_reads.sent.iter().map(choice).collect::<Option<_>>()?;
        let node = choices.first()?.0;
        let is_other_node =
            node != node_reads.node.info.node && choices.iter().all(|(other, _)| *other == node);
        is_other_node.then(|| (node, choices.into_iter().map(|(_, replica)| replica).collect()))
    }

    /// Records the result of a stripe read: it is done if its digests match.
    fn record_result(&mut self, read_result: ReadResult, buffers: &[StripeBuffer<'_>]) {
        let ReadResult { job, replica, node, result } = read_result;
        let job = &mut self.jobs[job];
        let location = &self.locations[job.read];
        let handle = location.handle(replica, job.stripe);
        match result {
            Ok(()) => {
                let digests = buffers[read_result.job].digests.iter().copied();
                if location.is_digestless()
                    || moontide_rt::mutation_enabled("digest-unchecked")
                    || location.digest_context(handle).root_of(digests) == handle.stripe_root
                {
                    job.done = true;
                    job.from_disk = handle.medium == Medium::Disk;
                    return;
                }
                self.store.metrics.corrupt.inc();
                tracing::warn!(%node, "bytes mismatch their digest; not returned");
                job.corrupt.push(node);
            }
            // A cache entry that the disk cannot read is a miss, not a failure.
            Err(error) if handle.medium == Medium::Disk && is_disk_error(error.code()) => {
                job.disk_failed = true;
                job.last = Some(error);
            }
            Err(error) if handle.medium == Medium::Disk && error.code() == ErrorCode::Busy => {
                job.disk_busy = true;
                job.last = Some(error);
            }
            Err(error) => match classify(error.code()) {
                RetryDecision::Relookup => {
                    self.outcomes[job.read] = Outcome::Stale(unless_gone(error));
                }
                RetryDecision::Final => self.outcomes[job.read] = Outcome::Failed(error),
                RetryDecision::OtherReplica => {
                    if error.code() == ErrorCode::StaleSession
                        && let Some(node) = self.store.nodes.get(node)
                    {
                        node.suspect(); // it is leaving
                    }
                    job.last = Some(error);
                }
            },
        }
    }
}

impl StripeRead {
    /// Returns the outcome when no replica is left.
    fn exhausted(&mut self) -> Outcome {
        if !self.corrupt.is_empty() {
            return Outcome::Failed(StoreError::Corrupt { nodes: std::mem::take(&mut self.corrupt) });
        }
        let last = self.last.take().unwrap_or(StoreError::refused(ErrorCode::Unreachable));
        // The staging memory of the last node is full: ask again, the object may be in memory by then.
        if self.disk_busy && last.code() == ErrorCode::Busy {
            return Outcome::Stale(None);
        }
        if self.disk_failed && is_disk_error(last.code()) { Outcome::Lost } else { Outcome::Failed(last) }
    }
}

/// Returns the error of a stale location unless it means that the object is gone. A node that refuses the capabilities that the
/// master has just signed does not say that the object does not exist.
pub(crate) fn unless_gone(error: StoreError) -> Option<StoreError> {
    (error.code() == ErrorCode::PermissionDenied).then_some(error)
}

/// Returns whether the code means that a disk cannot read a record: it failed, the record is corrupt, or the node has
/// too little memory for it.
pub(crate) fn is_disk_error(code: ErrorCode) -> bool {
    matches!(code, ErrorCode::DiskError | ErrorCode::DiskFull | ErrorCode::Corrupt | ErrorCode::TooLarge)
}

/// Result of a hedge.
struct HedgeResult {
    node: NodeId,
    /// One for each stripe read of the node.
    scratch: Vec<Scratch>,
}

struct Scratch {
    replica: usize,
    bytes: Vec<u8>,
    digests: Vec<u64>,
}

fn results_of(node_reads: &NodeReads, batch: &Batch<'_, '_>) -> Vec<ReadResult> {
    let node = node_reads.node.info.node;
    let read_result = |(&(job, replica), op): (&(usize, usize), &Op<'_>)| {
        let result = match (op.outcome(), &batch.result) {
            (Some(Ok(())), _) => Ok(()),
            (Some(Err(code)), _) => Err(StoreError::refused(code)),
            (None, Some(Err(source))) => Err(StoreError::Node { node, source: source.clone() }),
            (None, _) => Err(StoreError::refused(ErrorCode::Internal)),
        };
        ReadResult { job, replica, node, result }
    };
    node_reads.sent.iter().zip(&batch.ops).map(read_result).collect()
}
