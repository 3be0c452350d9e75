//! [`Obedience`]: carries out a master's orders, and reclaims.

use std::collections::BTreeSet;

use moontide_node::decide::orders::{
    Answer, Drains, Known, Name, Next, Numbered, admissible, after_burn, after_kill,
};
use moontide_node::decide::pace::reclaim_interval;
use moontide_node::decide::report::Change;
use moontide_proto::limits::SESSION_RECORDS_MAX;
use moontide_proto::{Order, OrderKind, OrderPhase, OrderResult};
use moontide_types::record::{State, Word};
use moontide_types::{ErrorCode, MonoTime, SessionId};

use super::{LONG_AGO, Node, NodeEvent, NodeTimer, Work};
use crate::event::Timer;
use crate::scene::Scene;

/// A killed slot is not due before its Reclaim is ordered.
const NEVER: MonoTime = MonoTime(u64::MAX);

#[derive(Debug)]
pub(super) struct Obedience {
    /// Those that have begun and not ended.
    sessions: BTreeSet<SessionId>,
    drains: Drains,
    /// Orders of this round that wait for their slot.
    fresh: Vec<(Numbered, Name)>,
    /// Orders whose slot holds something older, which has to go first.
    again: Vec<(SessionId, Order)>,
    results: Vec<(SessionId, OrderResult)>,
    progress: MonoTime,
    /// Which reclaim is waited for.
    round: u64,
}

impl Default for Obedience {
    fn default() -> Obedience {
        Obedience {
            sessions: BTreeSet::new(),
            drains: Drains::default(),
            fresh: Vec::new(),
            again: Vec::new(),
            results: Vec::new(),
            progress: LONG_AGO,
            round: 0,
        }
    }
}

impl Node {
    pub(super) fn take_work(&mut self, scene: &mut Scene<'_>) {
        for work in std::mem::take(&mut self.work) {
            match work {
                Work::Session { begins, ends } => self.begin_session(begins, ends, scene),
                Work::Orders { session, orders } => {
                    orders.iter().for_each(|order| self.carry_out(session, order, scene));
                }
                Work::GivenUp(names) => {
                    let now = scene.now();
                    names.into_iter().for_each(|name| self.obedience.drains.add(name, now));
                    self.obedience.progress = now;
                }
            }
        }
        self.round(scene);
    }

    pub(super) fn reclaim_due(&mut self, round: u64, scene: &mut Scene<'_>) {
        if round == self.obedience.round {
            self.round(scene);
        }
    }

    pub(super) fn wake_to_reclaim(&mut self, scene: &mut Scene<'_>) {
        let obedience = &mut self.obedience;
        obedience.round += 1;
        let wait = reclaim_interval(!obedience.drains.is_empty(), obedience.progress, scene.now());
        scene.wake_in(wait, Timer::Node(NodeTimer::Reclaim { round: obedience.round }));
    }

    fn begin_session(&mut self, begins: Option<SessionId>, ends: Option<SessionId>, scene: &mut Scene<'_>) {
        self.answer_all(scene);
        if let Some(ends) = ends {
            self.obedience.fresh.retain(|&((session, _), _)| session != ends);
            self.obedience.again.retain(|&(session, _)| session != ends);
            self.obedience.drains.end_session(ends);
            self.obedience.sessions.remove(&ends);
        }
        self.obedience.sessions.extend(begins);
    }

    fn carry_out(&mut self, session: SessionId, order: &Order, scene: &mut Scene<'_>) {
        let number = (session, order.order);
        let waits = |&(session, order): &(SessionId, Order)| (session, order.order) == number;
        let is_known = self.obedience.drains.knows(number) || self.obedience.again.iter().any(waits);
        if !self.obedience.sessions.contains(&session) || is_known {
            return; // it is over; or it was sent again on a new stream, and is still under way
        }
        let known = self.memory.side(order.segment).map(|side| Known {
            generation: side.segment.shape().generation,
            obeyed: side.segment.obeyed(),
            slots: side.segment.shape().slots,
        });
        if let Err(code) = admissible(order, known, self.disk.is_some()) {
            return self.answer(number, Answer::refused(code, Word::default()));
        }
        // Nothing is to appear there any more.
        if let (Some(disk), OrderKind::Kill | OrderKind::Reclaim) = (&mut self.disk, order.kind) {
            disk.cancel_promotion(order.segment, order.slot);
        }
        let done = Answer::done(Word::default());
        match order.kind {
            OrderKind::Kill => self.kill(number, order, scene),
            OrderKind::Reclaim | OrderKind::Burn => self.burn(number, order, scene),
            OrderKind::Drain => {
                self.memory.side_mut(order.segment).expect("it is known").closed = true;
                self.answer(number, done);
            }
            OrderKind::AdoptTerm => {
                let side = self.memory.side_mut(order.segment).expect("it is known");
                side.granted(order.group, order.term);
                self.tell(NodeEvent::Report(order.segment), scene);
                self.answer(number, done);
            }
            OrderKind::Offload | OrderKind::Promote | OrderKind::DropDisk => {
                self.disk_order(session, order, scene);
            }
            OrderKind::Scrub => {
                self.answer(number, Answer::refused(ErrorCode::Unsupported, Word::default()));
            }
        }
    }

    fn kill(&mut self, number: Numbered, order: &Order, scene: &mut Scene<'_>) {
        let killed = self.memory.heap.kill(order.segment, order.slot, order.epoch, NEVER);
        match after_kill(order.epoch, killed) {
            Next::Answer(answer) => {
                self.memory.note(order.segment, order.slot, order.epoch, State::Dead, None);
                // After a crash a disk would bring it back: that it was removed is durable before it is said.
                match self.disk {
                    Some(_) => self.remove_from_disk(number.0, order, answer, scene),
                    None => self.answer(number, answer),
                }
            }
            Next::Burn | Next::Drain | Next::Clear(_) => self.burn(number, order, scene),
        }
    }

    fn burn(&mut self, number: Numbered, order: &Order, scene: &mut Scene<'_>) {
        let (segment, slot, epoch) = (order.segment, order.slot, order.epoch);
        let burnt = self.memory.heap.burn(segment, slot, epoch);
        match after_burn(order.kind, epoch, burnt) {
            Next::Answer(answer) => {
                if answer.phase == OrderPhase::Done {
                    self.memory.note(segment, slot, epoch, State::Free, None);
                }
                self.answer(number, answer);
            }
            Next::Clear(older) => {
                let _ = self.memory.heap.kill(segment, slot, older, LONG_AGO);
                self.memory.note(segment, slot, older, State::Dead, None);
                let now = scene.now();
                self.obedience.drains.add((segment, slot, older), now);
                self.obedience.again.push((number.0, *order));
                self.obedience.progress = now;
            }
            Next::Drain | Next::Burn => {
                // Due at once, also if it was killed before and was to wait.
                let _ = self.memory.heap.kill(segment, slot, epoch, LONG_AGO);
                self.memory.note(segment, slot, epoch, State::Dead, None);
                let now = scene.now();
                self.obedience.drains.add_order(number, (segment, slot, epoch), now);
                self.obedience.fresh.push((number, (segment, slot, epoch)));
                self.obedience.progress = now;
            }
        }
    }

    /// Reclaims, and says what came of it.
    fn round(&mut self, scene: &mut Scene<'_>) {
        let now = scene.now();
        let reclaimed = self.memory.heap.reclaim(now);
        for freed in &reclaimed.freed {
            let (segment, slot, epoch) = (freed.segment, freed.slot, freed.epoch);
            self.memory.note(segment, slot, epoch, State::Free, None);
            let orders = self.obedience.drains.freed((segment, slot, epoch));
            if orders.is_empty() {
                self.tell(NodeEvent::Change(Change::Freed { segment, slot, epoch }), scene);
            }
            for order in orders {
                self.answer(order, Answer::done(Word::new(epoch, State::Free)));
            }
            self.obedience.progress = now;
        }
        for (session, order) in std::mem::take(&mut self.obedience.again) {
            self.burn((session, order.order), &order, scene);
        }
        // What is left is dead as far as readers can tell, and the master need not wait to say so.
        for (order, (_, _, epoch)) in std::mem::take(&mut self.obedience.fresh) {
            if self.obedience.drains.knows(order) {
                self.answer(order, Answer::accepted(epoch));
            }
        }
        self.answer_all(scene);
        self.wake_to_reclaim(scene);
    }

    fn answer(&mut self, (session, order): Numbered, answer: Answer) {
        self.obedience.results.push((session, answer.to(order)));
    }

    fn answer_all(&mut self, scene: &mut Scene<'_>) {
        let mut all = std::mem::take(&mut self.obedience.results);
        all.sort_by_key(|&(session, _)| session);
        for of_session in all.chunk_by(|one, other| one.0 == other.0) {
            for results in of_session.chunks(SESSION_RECORDS_MAX) {
                let (session, results) = (results[0].0, results.iter().map(|&(_, result)| result).collect());
                self.tell(NodeEvent::Results { session, results }, scene);
            }
        }
    }

    /// These are dead, and the master did not order it.
    pub(super) fn gave_up(&mut self, names: Vec<Name>, scene: &mut Scene<'_>) {
        for &(segment, slot, epoch) in &names {
            self.memory.note(segment, slot, epoch, State::Dead, None);
            self.tell(NodeEvent::Change(Change::Killed { segment, slot, epoch }), scene);
        }
        self.give_work(Work::GivenUp(names), scene);
    }
}
