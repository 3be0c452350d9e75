//! [`Obedience`]: the thread that carries out a master's orders, and the only one that reclaims.
//!
//! Reclaim runs right after each batch of orders, every few milliseconds while somebody waits for a slot, and now and
//! then anyway. What was freed by order is answered; what was freed without one is told to the master as a change.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use moontide_disk::RecordName;
use moontide_proto::limits::SESSION_RECORDS_MAX;
use moontide_proto::{Order, OrderKind, OrderPhase, OrderResult};
use moontide_types::bounds::LEASE_MS_MAX;
use moontide_types::record::{State, Word};
use moontide_types::{Clock, Epoch, ErrorCode, MonoTime, SessionId, SystemClock};
use tracing::{debug, warn};

use crate::decide::orders::{
    Answer, Drains, Known, Name, Next, Numbered, admissible, after_burn, after_kill,
};
use crate::decide::pace::reclaim_interval;
use crate::decide::report::Change;
use crate::disk::{DiskTier, OffloadJob, PromoteJob, RemovalJob};
use crate::lines::Lines;
use crate::memory::Memory;
use crate::metrics::{Counters, OrderCounts};
use crate::session::Event;

/// A drain that lasts longer is worth a line: somebody holds on to what was removed.
const DRAIN_LONG: Duration = Duration::from_secs(10);

/// A killed slot is not due before its Reclaim is ordered.
const NEVER: MonoTime = MonoTime(u64::MAX);

/// What the thread is given to do.
#[derive(Debug)]
pub(crate) enum Work {
    /// A session has begun, or one has ended, or both: orders of one that has ended are void.
    Session { begins: Option<SessionId>, ends: Option<SessionId> },
    /// A master's orders.
    Orders { session: SessionId, orders: Vec<Order> },
    /// Records that were given up and are dead.
    GivenUp(Vec<Name>),
    /// The end.
    Stop,
}

/// Carries out orders.
#[derive(Debug)]
pub(crate) struct Obedience {
    memory: Arc<Memory>,
    disk: Option<Arc<DiskTier>>,
    counters: Arc<Counters>,
    events: Arc<Lines>,
    drains: Drains,
    /// Orders of this round that wait for their slot.
    fresh: Vec<(Numbered, Name)>,
    /// Orders whose slot holds something older, which has to go first.
    again: Vec<(SessionId, Order)>,
    results: Vec<(SessionId, OrderResult)>,
    counts: OrderCounts,
    /// When something was freed, or added, the last time.
    progress: MonoTime,
    /// The last order of each session to write to disk or to bring back from it. Those up to here were taken: they are
    /// answered, or will be, and answers that were not heard are said again.
    taken: BTreeMap<SessionId, u64>,
}

impl Obedience {
    pub(crate) fn new(
        memory: Arc<Memory>,
        disk: Option<Arc<DiskTier>>,
        counters: Arc<Counters>,
        events: Arc<Lines>,
    ) -> Obedience {
        Obedience {
            memory,
            disk,
            counters,
            events,
            drains: Drains::default(),
            fresh: Vec::new(),
            again: Vec::new(),
            results: Vec::new(),
            counts: OrderCounts::default(),
            progress: MonoTime(0),
            taken: BTreeMap::new(),
        }
    }

    /// Works until told to stop.
    pub(crate) fn run(mut self, work: &Receiver<Work>) {
        loop {
            let wait = reclaim_interval(!self.drains.is_empty(), self.progress, SystemClock.now());
            match work.recv_timeout(wait) {
                Ok(Work::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(first) => {
                    self.take(first);
                    while let Ok(more) = work.try_recv() {
                        match more {
                            Work::Stop => return,
                            more => self.take(more),
                        }
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.round(SystemClock.now());
        }
    }

    fn take(&mut self, work: Work) {
        match work {
            Work::Session { begins, ends } => self.begin_session(begins, ends),
            Work::Orders { session, orders } => {
                orders.iter().for_each(|order| self.carry_out(session, order));
            }
            Work::GivenUp(names) => {
                let now = SystemClock.now();
                names.into_iter().for_each(|name| self.drains.add(name, now));
                self.progress = now;
            }
            Work::Stop => {}
        }
    }

    fn begin_session(&mut self, begins: Option<SessionId>, ends: Option<SessionId>) {
        self.answer_all();
        if let Some(ends) = ends {
            self.fresh.retain(|&((session, _), _)| session != ends);
            let waiting = self.again.len();
            self.again.retain(|&(session, _)| session != ends);
            self.counts.void += (self.drains.end_session(ends) + waiting - self.again.len()) as u64;
            self.taken.remove(&ends);
        }
        self.taken.extend(begins.map(|begins| (begins, 0)));
    }

    fn carry_out(&mut self, session: SessionId, order: &Order) {
        let Some(&taken) = self.taken.get(&session) else { return }; // it is over
        let number = (session, order.order);
        let waits = |&(session, order): &(SessionId, Order)| (session, order.order) == number;
        if (self.drains.knows(number) || self.again.iter().any(waits))
            && !moontide_types::planted("order-done-twice")
        {
            return; // sent again on a new stream, and still under way
        }
        let is_disk_work = matches!(order.kind, OrderKind::Offload | OrderKind::Promote);
        if is_disk_work && order.order <= taken {
            return; // the same: what was cancelled meanwhile must not begin again
        }
        if is_disk_work {
            self.taken.insert(session, order.order);
        }
        self.counts.received += 1;
        let side = self.memory.side(order.segment);
        let known = side.map(|side| Known {
            generation: side.segment().shape().generation,
            obeyed: side.segment().obeyed(),
            slots: side.segment().shape().slots,
        });
        if let Err(code) = admissible(order, known, self.disk.is_some()) {
            return self.answer(number, Answer::refused(code, Word::default()));
        }
        if let Some(disk) = self.disk.clone() {
            match order.kind {
                OrderKind::DropDisk => return self.drop_from_disk(&disk, session, order),
                OrderKind::Offload => return self.offload(&disk, session, order),
                OrderKind::Promote => return self.promote(&disk, session, order),
                // Nothing is to appear there any more.
                OrderKind::Kill | OrderKind::Reclaim => {
                    disk.cancel_promotion(order.segment, order.slot);
                }
                _ => {}
            }
        }
        let Some(side) = side else { return };
        let done = Answer::done(Word::default());
        match order.kind {
            OrderKind::Kill => self.kill(session, order),
            OrderKind::Reclaim | OrderKind::Burn => self.burn(session, order),
            OrderKind::Scrub => {
                let answer = self.scrub(order);
                self.answer(number, answer);
            }
            OrderKind::Drain => {
                side.close();
                self.answer(number, done);
            }
            OrderKind::AdoptTerm => {
                side.granted(order.group, order.term);
                self.events.send(Event::Report(order.segment));
                self.answer(number, done);
            }
            OrderKind::Offload | OrderKind::Promote | OrderKind::DropDisk => {
                unreachable!("admissible with a disk only, and done above")
            }
        }
    }

    fn kill(&mut self, session: SessionId, order: &Order) {
        let heap = self.memory.heap();
        let killed = heap.kill(order.segment, order.slot, order.epoch, NEVER);
        match after_kill(order.epoch, killed) {
            Next::Answer(answer) => {
                self.memory.note(order.segment, order.slot, order.epoch, State::Dead);
                match self.disk.as_ref().filter(|disk| !disk.forgets_kills()) {
                    // After a crash the disk would bring it back: that it was removed is durable before it is said. Also if
                    // it cannot be found there: what is being written, or is on its way out, is on the disk all the same.
                    Some(disk) => {
                        disk.remove(removal(session, order, order.epoch, answer));
                        self.count(&answer);
                    }
                    None => self.answer((session, order.order), answer),
                }
            }
            Next::Burn | Next::Drain | Next::Clear(_) => self.burn(session, order),
        }
    }

    fn drop_from_disk(&mut self, disk: &DiskTier, session: SessionId, order: &Order) {
        let answer = Answer::done(Word::new(order.epoch, State::Free));
        disk.remove(removal(session, order, order.epoch, answer));
        self.count(&answer);
    }

    fn offload(&mut self, disk: &DiskTier, session: SessionId, order: &Order) {
        let Some(pin) = self.memory.heap().pin(order.segment, order.slot, order.epoch) else {
            return self.answer((session, order.order), Answer::refused(ErrorCode::Gone, Word::default()));
        };
        let bytes = pin.header().stripe_len;
        drop(pin);
        let lease_ms = if order.lease_ms == 0 { LEASE_MS_MAX } else { order.lease_ms };
        disk.offload(OffloadJob {
            session,
            order: order.order,
            segment: order.segment,
            slot: order.slot,
            epoch: order.epoch,
            id: order.id,
            bytes,
            until: Instant::now() + Duration::from_millis(lease_ms.into()),
        });
        self.counts.accepted += 1;
    }

    fn promote(&mut self, disk: &DiskTier, session: SessionId, order: &Order) {
        let begun = disk.begin_promotion(PromoteJob {
            session,
            order: order.order,
            name: RecordName { id: order.id, version: order.epoch, stripe: order.stripe },
            segment: order.segment,
            slot: order.slot,
            extent: order.extent,
            term: order.term,
        });
        if begun {
            self.counts.accepted += 1;
        } else {
            self.answer((session, order.order), Answer::refused(ErrorCode::Busy, Word::default()));
        }
    }

    fn burn(&mut self, session: SessionId, order: &Order) {
        let burnt = self.memory.heap().burn(order.segment, order.slot, order.epoch);
        match after_burn(order.kind, order.epoch, burnt) {
            Next::Answer(answer) => {
                if answer.phase == OrderPhase::Done {
                    self.memory.note(order.segment, order.slot, order.epoch, State::Free);
                }
                self.answer((session, order.order), answer);
            }
            Next::Clear(older) => {
                let _ = self.memory.heap().kill(order.segment, order.slot, older, MonoTime(0));
                self.memory.note(order.segment, order.slot, older, State::Dead);
                let now = SystemClock.now();
                self.drains.add((order.segment, order.slot, older), now);
                self.again.push((session, *order));
                self.progress = now;
            }
            Next::Drain | Next::Burn => {
                let name = (order.segment, order.slot, order.epoch);
                // Due at once, also if it was killed before and was to wait.
                let _ = self.memory.heap().kill(order.segment, order.slot, order.epoch, MonoTime(0));
                self.memory.note(order.segment, order.slot, order.epoch, State::Dead);
                let now = SystemClock.now();
                let number = (session, order.order);
                self.drains.add_order(number, name, now);
                self.fresh.push((number, name));
                self.progress = now;
            }
        }
    }

    /// Compares a record with its digests.
    fn scrub(&self, order: &Order) -> Answer {
        let word = Word::new(order.epoch, State::Ready);
        let Some(pin) = self.memory.heap().pin(order.segment, order.slot, order.epoch) else {
            return Answer::refused(ErrorCode::Gone, Word::default());
        };
        let header = pin.header();
        if header.flags.digestless() {
            return Answer::refused(ErrorCode::Unsupported, word);
        }
        if header.digest_context().payload(pin.payload(), |_| ()) == header.root {
            return Answer::done(word);
        }
        self.counters.corrupt();
        warn!(segment = order.segment.0, slot = order.slot.0, epoch = %order.epoch, "a record does not match its digests");
        Answer::refused(ErrorCode::Corrupt, word)
    }

    /// Reclaims, and says what came of it.
    fn round(&mut self, now: MonoTime) {
        let mut reclaimed = self.memory.heap().reclaim(now);
        // Of staging no master knows.
        reclaimed.freed.retain(|freed| self.memory.side(freed.segment).is_some());
        for freed in &reclaimed.freed {
            let (segment, slot, epoch) = (freed.segment, freed.slot, freed.epoch);
            self.memory.note(segment, slot, epoch, State::Free);
            let orders = self.drains.freed((segment, slot, epoch));
            if orders.is_empty() {
                self.events.send(Event::Change(Change::Freed { segment, slot, epoch }));
            }
            for order in orders {
                self.answer(order, Answer::done(Word::new(epoch, State::Free)));
            }
        }
        if !reclaimed.freed.is_empty() {
            self.progress = now;
            self.counters.freed(reclaimed.freed.iter().map(|freed| freed.extent.span().len()).sum());
        }
        for (session, order) in std::mem::take(&mut self.again) {
            self.burn(session, &order);
        }
        // What is left is dead as far as readers can tell, and the master need not wait to say so.
        for (order, (_, _, epoch)) in std::mem::take(&mut self.fresh) {
            if self.drains.knows(order) {
                self.results.push((order.0, Answer::accepted(epoch).to(order.1)));
            }
        }
        self.answer_all();
        self.complain(now);
        self.counts.outstanding = (self.drains.orders() + self.again.len()) as u64;
        self.counters.orders(self.counts, self.drains.overdue() as u64);
    }

    fn answer(&mut self, (session, order): Numbered, answer: Answer) {
        self.count(&answer);
        self.results.push((session, answer.to(order)));
    }

    /// Orders that the disk's threads answer later are counted as what they will be if all goes well.
    fn count(&mut self, answer: &Answer) {
        match answer.phase {
            OrderPhase::Done => self.counts.done += 1,
            OrderPhase::Accepted => self.counts.accepted += 1,
            OrderPhase::Refused => self.counts.refused += 1,
        }
    }

    fn answer_all(&mut self) {
        let mut all = std::mem::take(&mut self.results);
        all.sort_by_key(|&(session, _)| session);
        for of_session in all.chunk_by(|a, b| a.0 == b.0) {
            for results in of_session.chunks(SESSION_RECORDS_MAX) {
                let (session, results) = (results[0].0, results.iter().map(|&(_, result)| result).collect());
                debug!(session = session.0, "orders answered");
                self.events.send(Event::Results { session, results });
            }
        }
    }

    fn complain(&mut self, now: MonoTime) {
        let overdue = self.drains.take_overdue(now, DRAIN_LONG);
        if overdue.is_empty() {
            return;
        }
        self.counters.overdue(overdue.len() as u64);
        for late in overdue {
            let (segment, slot, epoch): (_, _, Epoch) = late.name;
            // Who it is the ledgers do not tell; how many it may be they do.
            let clients = self.memory.heap().ledgers().clients().len();
            let seconds = now.since(late.since).as_secs();
            warn!(segment = segment.0, slot = slot.0, %epoch, seconds, clients,
                "a removed object is still held, and its space is not free");
        }
    }
}

fn removal(session: SessionId, order: &Order, version: Epoch, answer: Answer) -> RemovalJob {
    RemovalJob { session, order: order.order, id: order.id, version, answer }
}

#[cfg(test)]
mod tests;
