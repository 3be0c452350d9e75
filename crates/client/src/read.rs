//! [`Read`]: the bytes of objects whose places are known, straight into the caller's memory.
//!
//! ```text
//!   for each stripe: replicas in order ─▶ batches by node ─▶ run, hedged ─▶ digests right? ─▶ done
//!                        ▲                                        │              │ no
//!                        └──────── next replica ◀─────────────────┴──────────────┘
//! ```
//!
//! Invariant: a read that ends well has filled its memory with bytes whose digests lead to the master's root. One that
//! does not may have written anything there; nobody is told that it holds something.

use std::sync::Arc;
use std::time::Instant;

use moontide_proto::Medium;
use moontide_transfer::{Batch, EngineKind, Link, Op, Target, Winner, run_hedged, run_together};
use moontide_types::bounds::PAGE_BYTES;
use moontide_types::{Clock, ErrorCode, NodeId, SystemClock};

use crate::cluster::spread;
use crate::config::Hedge;
use crate::decide::{Candidate, Nearness, Trust, Verdict, judge, order};
use crate::error::StoreError;
use crate::nodes::{Node, is_of_connection};
use crate::place::Placed;
use crate::store::Inner;

/// One object to be read.
#[derive(Debug)]
pub(crate) struct Read<'m> {
    pub(crate) placed: Arc<Placed>,
    /// As long as the object.
    pub(crate) into: &'m mut [u8],
    pub(crate) outcome: Outcome,
}

/// What became of a read.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    /// Not done yet.
    Open,
    /// The bytes are there.
    Done(Served),
    /// The object is not where the master said: ask again.
    Stale,
    /// It was on disks only, and those could not bring it back: for the caller it is not there.
    Lost,
    /// It failed.
    Failed(StoreError),
}

/// Where bytes came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// From memory that is this far away.
    Memory(Nearness),
    /// From a disk.
    Disk,
}

/// One stripe that is not there yet.
struct Job {
    read: usize,
    stripe: usize,
    /// Replicas in the order in which they are asked.
    replicas: Vec<usize>,
    next: usize,
    done: bool,
    /// It came from a disk.
    from_disk: bool,
    /// A disk that was to have it could not bring it back.
    hurt_disk: bool,
    corrupt: Vec<NodeId>,
    last: Option<StoreError>,
}

/// A stripe's memory, and the digests of its pages.
struct Space<'m> {
    into: &'m mut [u8],
    digests: Vec<u64>,
}

/// Jobs that are sent to one node.
struct Lot {
    node: Arc<Node>,
    link: Arc<dyn Link>,
    /// Which jobs, and which replica of each.
    sent: Vec<(usize, usize)>,
}

/// What became of a job in a round.
struct Fate {
    job: usize,
    replica: usize,
    node: NodeId,
    result: Result<(), StoreError>,
}

impl Inner {
    /// Reads all of them. Each has an outcome afterwards.
    pub(crate) fn read_all(&self, reads: &mut [Read<'_>], deadline: Instant) {
        let placed: Vec<Arc<Placed>> = reads.iter().map(|read| Arc::clone(&read.placed)).collect();
        let mut round = Round {
            store: self,
            placed: &placed,
            outcomes: vec![Outcome::Open; reads.len()],
            jobs: Vec::with_capacity(reads.len()),
            deadline,
        };
        let mut spaces: Vec<Space<'_>> = Vec::with_capacity(reads.len());
        for (index, read) in reads.iter_mut().enumerate() {
            let mut rest = &mut *read.into;
            let draw = spread();
            for stripe in 0..read.placed.stripes() {
                let len = read.placed.handle(0, stripe).stripe_len as usize;
                let (into, after) = rest.split_at_mut(len);
                rest = after;
                let digests = vec![0; (len as u64).div_ceil(PAGE_BYTES) as usize];
                spaces.push(Space { into, digests });
                round.jobs.push(Job {
                    read: index,
                    stripe,
                    replicas: self.replicas_of(&read.placed, stripe, draw),
                    next: 0,
                    done: false,
                    from_disk: false,
                    hurt_disk: false,
                    corrupt: Vec::new(),
                    last: None,
                });
            }
            self.budget.lock().earn();
        }
        // Each round takes every open job one replica further, so this ends.
        while round.run(&mut spaces) {}
        drop(spaces);
        for (read, outcome) in reads.iter_mut().zip(round.outcomes) {
            read.outcome = outcome;
        }
    }

    /// Replicas of a stripe in the order in which they are asked.
    fn replicas_of(&self, placed: &Placed, stripe: usize, draw: u64) -> Vec<usize> {
        if placed.replica_count() == 1 {
            return vec![0];
        }
        let candidate = |replica: usize| {
            let node = self.nodes.get(placed.handle(replica, stripe).node);
            Candidate {
                replica,
                disk: placed.is_on_disk(replica),
                nearness: node.as_ref().map_or(Nearness::Far, |node| node.nearness),
                trust: node.as_ref().map_or(Trust::Failed, |node| node.trust()),
            }
        };
        let mut candidates: Vec<Candidate> = (0..placed.replica_count()).map(candidate).collect();
        order(&mut candidates, draw);
        candidates.iter().map(|candidate| candidate.replica).collect()
    }

    /// A node that the master named, and the link to it.
    pub(crate) fn reach(
        &self,
        node: NodeId,
        deadline: Instant,
    ) -> Result<(Arc<Node>, Arc<dyn Link>), StoreError> {
        let known = match self.nodes.get(node) {
            Some(known) => known,
            // It has come after we asked last, however short ago that was.
            None => {
                self.refresh_nodes_anew(deadline)?;
                self.nodes.get(node).ok_or(StoreError::UnknownNode { node })?
            }
        };
        let known = match known.trust() {
            Trust::Good | Trust::Slow => known,
            // One that failed may have been started again: with a disk it keeps its number, at another address.
            Trust::Failed => {
                self.refresh_nodes_anew(deadline)?;
                self.nodes.get(node).ok_or(StoreError::UnknownNode { node })?
            }
        };
        let link = self.nodes.link(&known, deadline)?;
        Ok((known, link))
    }
}

/// Reads that go on until each has an outcome.
struct Round<'a> {
    store: &'a Inner,
    placed: &'a [Arc<Placed>],
    outcomes: Vec<Outcome>,
    jobs: Vec<Job>,
    deadline: Instant,
}

impl Round<'_> {
    fn is_open(&self, read: usize) -> bool {
        matches!(self.outcomes[read], Outcome::Open)
    }

    /// Sends every open job to its next replica. Whether something is left to do.
    fn run(&mut self, spaces: &mut [Space<'_>]) -> bool {
        let lots = self.lots();
        for fate in self.send(&lots, spaces) {
            self.judge(fate, spaces);
        }
        for read in 0..self.outcomes.len() {
            if self.is_open(read) && self.jobs.iter().all(|job| job.read != read || job.done) {
                let node = self.placed[read].nodes(0).next().and_then(|node| self.store.nodes.get(node));
                let nearness = node.map_or(Nearness::Far, |node| node.nearness);
                let from_disk = self.jobs.iter().any(|job| job.read == read && job.from_disk);
                let served = if from_disk { Served::Disk } else { Served::Memory(nearness) };
                self.outcomes[read] = Outcome::Done(served);
            }
        }
        self.jobs.iter().any(|job| !job.done && self.is_open(job.read))
    }

    /// The next replica of every open job, by node.
    fn lots(&mut self) -> Vec<Lot> {
        let mut lots: Vec<Lot> = Vec::new();
        // Nodes that cannot be reached are not tried again for every job.
        let mut failed: Vec<(NodeId, StoreError)> = Vec::new();
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
                self.outcomes[job.read] = Outcome::Failed(self.store.too_late());
                continue;
            }
            // Another replica costs the cluster nothing more than the first would have: it is not drawn from the budget.
            if job.next > 1 {
                self.store.metrics.retries.inc();
            }
            let handle = self.placed[job.read].handle(replica, job.stripe);
            if handle.stripe_len == 0 {
                job.done = true; // an empty object has no bytes to ask for
                continue;
            }
            if let Some((_, error)) = failed.iter().find(|(node, _)| *node == handle.node) {
                job.last = Some(error.clone());
                continue;
            }
            // Each node is reached for once, and not for every job: if it has failed before, that costs a question to the masters.
            let lot = match lots.iter().position(|lot| lot.node.info.node == handle.node) {
                Some(at) => &mut lots[at],
                None => match self.store.reach(handle.node, self.deadline) {
                    Ok((node, link)) => {
                        lots.push(Lot { node, link, sent: Vec::new() });
                        lots.last_mut().expect("pushed above")
                    }
                    Err(error) => {
                        failed.push((handle.node, error.clone()));
                        job.last = Some(error);
                        continue;
                    }
                },
            };
            // Nobody checks a one-sided read at the far end: it depends on the lease.
            let leased = self.placed[job.read].leased_until;
            if lot.link.engine() == EngineKind::Ucx && leased.is_none_or(|until| until <= SystemClock.now()) {
                self.outcomes[job.read] = Outcome::Stale;
                continue;
            }
            lot.sent.push((index, replica));
        }
        lots.retain(|lot| !lot.sent.is_empty());
        lots
    }

    /// Moves the bytes.
    fn send(&self, lots: &[Lot], spaces: &mut [Space<'_>]) -> Vec<Fate> {
        let mut lent: Vec<Option<&mut Space<'_>>> = spaces.iter_mut().map(Some).collect();
        let mut batches: Vec<Batch<'_, '_>> = lots
            .iter()
            .map(|lot| {
                let op = |&(job, replica): &(usize, usize)| {
                    let space = lent[job].take().expect("a job is in one lot");
                    self.op(job, replica, space.into, &mut space.digests)
                };
                Batch::new(&*lot.link, lot.sent.iter().map(op).collect())
            })
            .collect();
        let hedge = match (&mut batches[..], lots) {
            ([batch], [lot]) => self.hedged(batch, lot),
            (batches, _) => {
                run_together(batches, self.deadline);
                None
            }
        };
        let mut fates: Vec<Fate> = Vec::new();
        for (lot, batch) in lots.iter().zip(&batches) {
            fates.extend(fates_of(lot, batch));
            if batch.result.as_ref().is_some_and(|result| result.as_ref().is_err_and(is_of_connection)) {
                lot.node.suspect();
            }
        }
        drop(batches);
        if let Some(hedge) = hedge {
            for (fate, scratch) in fates.iter_mut().zip(hedge.scratch) {
                spaces[fate.job].into.copy_from_slice(&scratch.bytes);
                spaces[fate.job].digests = scratch.digests;
                *fate = Fate { job: fate.job, replica: scratch.replica, node: hedge.node, result: Ok(()) };
            }
        }
        fates
    }

    fn op<'m>(&self, job: usize, replica: usize, into: &'m mut [u8], digests: &'m mut [u64]) -> Op<'m> {
        let (placed, stripe) = (&self.placed[self.jobs[job].read], self.jobs[job].stripe);
        let handle = placed.handle(replica, stripe);
        let op = Op::get(Target::of(handle, placed.id(), placed.epoch()), 0, into);
        if placed.is_digestless() {
            return op;
        }
        op.digested(placed.digest_context(handle), digests).expect("a whole stripe is whole pages")
    }

    /// Runs one lot, and asks a second replica if the first takes too long. What the second gave, if it was first.
    fn hedged(&self, batch: &mut Batch<'_, '_>, lot: &Lot) -> Option<Hedged> {
        let store = self.store;
        let bytes: u64 = batch.ops.iter().map(|op| op.core().len()).sum();
        let patience = match store.config().hedge {
            Hedge::Off => None,
            Hedge::Adaptive => Some(store.hedge.lock().patience(bytes)),
            Hedge::After(patience) => Some(patience),
        };
        let started = Instant::now();
        let second = patience.and_then(|patience| Some((started + patience, self.second_choice(lot)?)));
        let Some((impatient, (node, replicas))) = second else {
            run_together(std::slice::from_mut(batch), self.deadline);
            if batch.result.as_ref().is_some_and(Result::is_ok) {
                store.hedge.lock().observe(bytes, started.elapsed());
            }
            return None;
        };
        let mut scratch: Vec<Scratch> = Vec::new();
        let mut link: Option<Arc<dyn Link>> = None;
        let (scratch_place, link_place) = (&mut scratch, &mut link);
        let (winner, other) = run_hedged(
            batch,
            impatient,
            move || {
                if !store.budget.lock().spend() {
                    return None;
                }
                // Nobody waits for a connection while the first may be done any moment.
                let reached = store.nodes.get(node)?.open_link()?;
                if reached.engine() == EngineKind::Ucx {
                    return None; // its lease may end while it is waited for
                }
                store.metrics.hedges.inc();
                let scratch = |(&(job, _), &replica): (&(usize, usize), &usize)| {
                    let len =
                        self.placed[self.jobs[job].read].handle(replica, self.jobs[job].stripe).stripe_len;
                    let pages = len.div_ceil(PAGE_BYTES) as usize;
                    Scratch { replica, bytes: vec![0; len as usize], digests: vec![0; pages] }
                };
                *scratch_place = lot.sent.iter().zip(&replicas).map(scratch).collect();
                let ops = lot.sent.iter().zip(scratch_place.iter_mut()).map(|(&(job, _), scratch)| {
                    self.op(job, scratch.replica, &mut scratch.bytes, &mut scratch.digests)
                });
                let ops = ops.collect();
                Some(Batch::new(&**link_place.insert(reached), ops))
            },
            self.deadline,
        );
        let all_well = |batch: &Batch<'_, '_>| batch.ops.iter().all(|op| op.outcome() == Some(Ok(())));
        let won = winner == Winner::Second && other.as_ref().is_some_and(all_well);
        drop(other);
        if won {
            lot.node.was_slow();
            store.metrics.hedges_won.inc();
            return Some(Hedged { node, scratch });
        }
        if winner == Winner::First && batch.result.as_ref().is_some_and(Result::is_ok) {
            store.hedge.lock().observe(bytes, started.elapsed());
        }
        None
    }

    /// Another node that has all stripes of a lot, and its replicas.
    fn second_choice(&self, lot: &Lot) -> Option<(NodeId, Vec<usize>)> {
        if lot.link.engine() == EngineKind::Shm {
            return None; // nothing to wait for
        }
        let choice = |&(job, _): &(usize, usize)| {
            let job = &self.jobs[job];
            let &replica = job.replicas.get(job.next)?;
            Some((self.placed[job.read].handle(replica, job.stripe).node, replica))
        };
        let choices: Vec<(NodeId, usize)> = lot.sent.iter().map(choice).collect::<Option<_>>()?;
        let node = choices.first()?.0;
        let alike = node != lot.node.info.node && choices.iter().all(|(other, _)| *other == node);
        alike.then(|| (node, choices.into_iter().map(|(_, replica)| replica).collect()))
    }

    /// Takes in what became of a job: done if its digests are right.
    fn judge(&mut self, fate: Fate, spaces: &[Space<'_>]) {
        let Fate { job, replica, node, result } = fate;
        let job = &mut self.jobs[job];
        let placed = &self.placed[job.read];
        let handle = placed.handle(replica, job.stripe);
        match result {
            Ok(()) => {
                let digests = spaces[fate.job].digests.iter().copied();
                if placed.is_digestless()
                    || moontide_types::planted("digest-unchecked")
                    || placed.digest_context(handle).root_of(digests) == handle.stripe_root
                {
                    job.done = true;
                    job.from_disk = handle.medium == Medium::Disk;
                    return;
                }
                self.store.metrics.corrupt.inc();
                tracing::warn!(node = node.0, "bytes do not match their digest; not returned");
                job.corrupt.push(node);
            }
            // A cache that cannot read its disk has lost something, and is not out of order.
            Err(error) if is_of_disk(error.code()) && handle.medium == Medium::Disk => {
                job.hurt_disk = true;
                job.last = Some(error);
            }
            Err(error) => match judge(error.code()) {
                Verdict::Stale => self.outcomes[job.read] = Outcome::Stale,
                Verdict::Final => self.outcomes[job.read] = Outcome::Failed(error),
                Verdict::Elsewhere => {
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

impl Job {
    /// No replica is left.
    fn exhausted(&mut self) -> Outcome {
        if !self.corrupt.is_empty() {
            return Outcome::Failed(StoreError::Corrupt { nodes: std::mem::take(&mut self.corrupt) });
        }
        let last = self.last.take().unwrap_or(StoreError::refused(ErrorCode::Unreachable));
        if self.hurt_disk && is_of_disk(last.code()) { Outcome::Lost } else { Outcome::Failed(last) }
    }
}

/// Whether a node says that its disk, or what was on it, is damaged.
pub(crate) fn is_of_disk(code: ErrorCode) -> bool {
    matches!(code, ErrorCode::DiskError | ErrorCode::DiskFull | ErrorCode::Corrupt)
}

/// What a second replica gave.
struct Hedged {
    node: NodeId,
    /// One for each job of the lot.
    scratch: Vec<Scratch>,
}

struct Scratch {
    replica: usize,
    bytes: Vec<u8>,
    digests: Vec<u64>,
}

fn fates_of(lot: &Lot, batch: &Batch<'_, '_>) -> Vec<Fate> {
    let node = lot.node.info.node;
    let fate = |(&(job, replica), op): (&(usize, usize), &Op<'_>)| {
        let result = match (op.outcome(), &batch.result) {
            (Some(Ok(())), _) => Ok(()),
            (Some(Err(code)), _) => Err(StoreError::refused(code)),
            (None, Some(Err(source))) => Err(StoreError::Node { node, source: source.clone() }),
            (None, _) => Err(StoreError::refused(ErrorCode::Internal)),
        };
        Fate { job, replica, node, result }
    };
    lot.sent.iter().zip(&batch.ops).map(fate).collect()
}
