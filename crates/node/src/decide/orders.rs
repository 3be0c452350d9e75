//! What a master's order means for a slot, given what the heap says of it, and [`Drains`]: who waits for which slot.
//!
//! | order | slot | what is done | answer |
//! |---|---|---|---|
//! | Kill | WRITING or READY of the epoch | killed; its space waits for the Reclaim | Accepted |
//! | | DEAD of the epoch | nothing | Accepted |
//! | | FREE of an earlier epoch | burnt: it never began, and shall not | Done |
//! | Reclaim | FREE of an earlier epoch | burnt | Done |
//! | | FREE of this epoch or a later one | nothing | Done |
//! | | WRITING, READY or DEAD of the epoch | killed, due at once | Done when it is free, until then Accepted |
//! | Burn | FREE | burnt, or was past it already | Done |
//! | Offload | READY of the epoch | written to the disk, and told | Done |
//! | Promote | FREE | what the disk has of the version is brought there | Done |
//! | DropDisk | (none) | the version, and all before it, is removed from the disk for good | Done |
//! | any | taken in another epoch | nothing | Refused: StaleEpoch |
//!
//! FREE of this epoch is what a repeated order finds, so all of them can be repeated without harm.

use std::collections::BTreeMap;
use std::time::Duration;

use moontide_heap::{Killed, Transition};
use moontide_proto::{Order, OrderKind, OrderPhase, OrderResult};
use moontide_types::record::{State, Word};
use moontide_types::{Epoch, ErrorCode, Generation, MonoTime, SegmentId, SessionId, SlotId, Term};

/// A version of a slot.
pub type Name = (SegmentId, SlotId, Epoch);

/// An order: sessions number theirs by themselves.
pub type Numbered = (SessionId, u64);

/// What the node knows of the segment that an order names.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    pub generation: Generation,
    /// The term that the segment obeys.
    pub obeyed: Term,
    pub slots: u32,
}

/// Whether the order is one to be carried out at all. `segment`: nothing if there is none of this number.
pub fn admissible(order: &Order, segment: Option<Known>, has_disk: bool) -> Result<(), ErrorCode> {
    if matches!(order.kind, OrderKind::Offload | OrderKind::Promote | OrderKind::DropDisk) && !has_disk {
        return Err(ErrorCode::Unsupported);
    }
    if order.kind == OrderKind::DropDisk {
        return Ok(()); // of no segment
    }
    let known = segment.ok_or(ErrorCode::NotFound)?;
    if known.generation != order.generation {
        return Err(ErrorCode::StaleGeneration);
    }
    // A term is adopted by mounting or by an order to do so, never by the way.
    let of_its_master = if order.kind == OrderKind::AdoptTerm {
        order.term >= known.obeyed
    } else {
        order.term == known.obeyed || moontide_types::planted("order-of-any-term-obeyed")
    };
    if !of_its_master {
        return Err(ErrorCode::StaleTerm);
    }
    if order.slot.0 < known.slots { Ok(()) } else { Err(ErrorCode::OutOfBounds) }
}

/// What follows from what the heap said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// That is all.
    Answer(Answer),
    /// Kill it, due at once, and wait until it is free.
    Drain,
    /// Try to burn it: that tells what the slot is.
    Burn,
    /// Something older is in the slot, of which the master knows nothing: its reservation was given up before it began. Kill
    /// it, due at once, and try again when it is free.
    Clear(Epoch),
}

/// What is said of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    pub phase: OrderPhase,
    pub code: Option<ErrorCode>,
    pub word: Word,
}

impl Answer {
    pub fn done(word: Word) -> Answer {
        Answer { phase: OrderPhase::Done, code: None, word }
    }

    pub fn accepted(epoch: Epoch) -> Answer {
        Answer { phase: OrderPhase::Accepted, code: None, word: Word::new(epoch, State::Dead) }
    }

    pub fn refused(code: ErrorCode, word: Word) -> Answer {
        Answer { phase: OrderPhase::Refused, code: Some(code), word }
    }

    pub fn to(self, order: u64) -> OrderResult {
        OrderResult { order, word: self.word, code: self.code, phase: self.phase }
    }
}

/// A Kill was tried.
pub fn after_kill(epoch: Epoch, killed: Killed) -> Next {
    match killed {
        Killed::Dying | Killed::Already => Next::Answer(Answer::accepted(epoch)),
        Killed::NotThere => Next::Burn,
    }
}

/// A burn was tried, for an order of this kind.
pub fn after_burn(kind: OrderKind, epoch: Epoch, burnt: Transition) -> Next {
    let found = match burnt {
        Transition::Done(_) | Transition::Already => {
            return Next::Answer(Answer::done(Word::new(epoch, State::Free)));
        }
        Transition::Refused(found) => found,
    };
    let free_already = found.state() == State::Free && found.epoch() >= epoch;
    let its_own = found.epoch() == epoch;
    match kind {
        _ if free_already => Next::Answer(Answer::done(found)),
        OrderKind::Reclaim if its_own && moontide_types::planted("reclaim-done-while-held") => {
            Next::Answer(Answer::done(found))
        }
        OrderKind::Reclaim if its_own => Next::Drain,
        OrderKind::Reclaim if found.epoch() < epoch && !moontide_types::planted("late-begin-left") => {
            Next::Clear(found.epoch())
        }
        OrderKind::Kill if its_own => Next::Answer(Answer::accepted(epoch)),
        _ => Next::Answer(Answer::refused(ErrorCode::StaleEpoch, found)),
    }
}

/// Slots that somebody waits for to be free: a master, by order, or the node itself, for a record that its writer gave
/// up.
#[derive(Debug, Default)]
pub struct Drains {
    waiting: BTreeMap<Name, Waiting>,
    /// By session and number, so that one that is sent again is known.
    orders: BTreeMap<Numbered, Name>,
}

#[derive(Debug)]
struct Waiting {
    since: MonoTime,
    orders: Vec<Numbered>,
    /// Whether it has been complained about.
    overdue: bool,
}

/// A slot that drains for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overdue {
    pub name: Name,
    pub since: MonoTime,
}

impl Drains {
    /// An order waits for the slot.
    pub fn add_order(&mut self, order: Numbered, name: Name, now: MonoTime) {
        self.add(name, now);
        if self.orders.insert(order, name).is_none() {
            self.waiting.entry(name).and_modify(|waiting| waiting.orders.push(order));
        }
    }

    /// The node itself does.
    pub fn add(&mut self, name: Name, now: MonoTime) {
        self.waiting.entry(name).or_insert(Waiting { since: now, orders: Vec::new(), overdue: false });
    }

    /// Whether the order waits already: it was sent again.
    pub fn knows(&self, order: Numbered) -> bool {
        self.orders.contains_key(&order)
    }

    /// The slot is free: the orders that waited for it. None: only the node did, and the master does not know of it.
    pub fn freed(&mut self, name: Name) -> Vec<Numbered> {
        let orders = self.waiting.remove(&name).map_or_else(Vec::new, |waiting| waiting.orders);
        for order in &orders {
            self.orders.remove(order);
        }
        orders
    }

    /// The session ended, and with it its orders. Their slots go on draining, and the next master hears of it.
    pub fn end_session(&mut self, session: SessionId) -> usize {
        let before = self.orders.len();
        self.orders.retain(|&(of, _), _| of != session);
        for waiting in self.waiting.values_mut() {
            waiting.orders.retain(|&(of, _)| of != session);
        }
        before - self.orders.len()
    }

    /// Orders that wait.
    pub fn orders(&self) -> usize {
        self.orders.len()
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Slots that have drained for longer than `limit`, and how many of them; each is told once.
    pub fn take_overdue(&mut self, now: MonoTime, limit: Duration) -> Vec<Overdue> {
        let late = |waiting: &Waiting| !waiting.overdue && now.since(waiting.since) >= limit;
        let newly = self.waiting.iter_mut().filter(|(_, waiting)| late(waiting));
        newly
            .map(|(&name, waiting)| {
                waiting.overdue = true;
                Overdue { name, since: waiting.since }
            })
            .collect()
    }

    /// How many have.
    pub fn overdue(&self) -> usize {
        self.waiting.values().filter(|waiting| waiting.overdue).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ErrorCode::{NotFound, StaleEpoch, StaleGeneration, StaleTerm, Unsupported};

    const S: SessionId = SessionId(1);
    const T: SessionId = SessionId(2);

    fn epoch(bits: u64) -> Epoch {
        Epoch::from_bits(bits).unwrap()
    }

    fn word(bits: u64, state: State) -> Word {
        Word::new(epoch(bits), state)
    }

    fn term(term: u32) -> Term {
        Term::new(term).unwrap()
    }

    #[test]
    fn orders_for_others_are_refused_with_the_reason() {
        let known = Some(Known { generation: Generation(9), obeyed: term(5), slots: 8 });
        let cases = [
            (OrderKind::Kill, 9, 5, known, Ok(())),
            (OrderKind::Kill, 9, 5, None, Err(NotFound)),
            (OrderKind::Kill, 8, 5, known, Err(StaleGeneration)),
            (OrderKind::Reclaim, 10, 5, known, Err(StaleGeneration)),
            (OrderKind::Reclaim, 9, 4, known, Err(StaleTerm)),
            (OrderKind::Burn, 9, 6, known, Err(StaleTerm)),
            (OrderKind::AdoptTerm, 9, 6, known, Ok(())),
            (OrderKind::AdoptTerm, 9, 5, known, Ok(())),
            (OrderKind::AdoptTerm, 9, 4, known, Err(StaleTerm)),
            (OrderKind::Offload, 9, 5, known, Err(Unsupported)),
            (OrderKind::Promote, 9, 5, known, Err(Unsupported)),
            (OrderKind::DropDisk, 0, 5, None, Err(Unsupported)),
        ];
        for (kind, generation, of_term, known, expected) in cases {
            let order = Order { generation: Generation(generation), ..Order::new(1, kind, term(of_term)) };
            assert_eq!(admissible(&order, known, false), expected, "{kind:?} {generation} {of_term}");
        }
        for (slot, expected) in [(7, Ok(())), (8, Err(ErrorCode::OutOfBounds))] {
            let order = Order { slot: SlotId(slot), ..Order::new(1, OrderKind::Reclaim, term(5)) };
            let order = Order { generation: Generation(9), ..order };
            assert_eq!(admissible(&order, known, false), expected, "slot {slot}");
        }
    }

    #[test]
    fn a_kill_is_accepted_or_tried_as_a_burn() {
        assert_eq!(after_kill(epoch(5), Killed::Dying), Next::Answer(Answer::accepted(epoch(5))));
        assert_eq!(after_kill(epoch(5), Killed::Already), Next::Answer(Answer::accepted(epoch(5))));
        assert_eq!(after_kill(epoch(5), Killed::NotThere), Next::Burn);
    }

    #[test]
    fn every_word_leads_to_its_answer() {
        use OrderKind::{Burn, Kill, Reclaim};
        use Transition::{Already, Done, Refused};
        let done = |w| Next::Answer(Answer::done(w));
        let stale = |w| Next::Answer(Answer::refused(StaleEpoch, w));
        let (free4, free5, free6) = (word(4, State::Free), word(5, State::Free), word(6, State::Free));
        let mut cases = vec![];
        for kind in [Kill, Reclaim, Burn] {
            cases.push((kind, Done(free4), done(free5)));
            cases.push((kind, Already, done(free5)));
            cases.push((kind, Refused(free6), done(free6)));
            for state in [State::Writing, State::Ready, State::Dead] {
                // Of something older the master knows nothing; what it reclaims is to be free.
                let older = if kind == Reclaim { Next::Clear(epoch(4)) } else { stale(word(4, state)) };
                cases.push((kind, Refused(word(4, state)), older));
                cases.push((kind, Refused(word(6, state)), stale(word(6, state))));
                let own = match kind {
                    Reclaim => Next::Drain,
                    Kill => Next::Answer(Answer::accepted(epoch(5))),
                    _ => stale(word(5, state)),
                };
                cases.push((kind, Refused(word(5, state)), own));
            }
        }
        for (kind, burnt, expected) in cases {
            assert_eq!(after_burn(kind, epoch(5), burnt), expected, "{kind:?} {burnt:?}");
        }
    }

    #[test]
    fn a_slot_that_is_free_answers_all_who_wait_for_it() {
        let mut drains = Drains::default();
        let (first, second) = ((SegmentId(0), SlotId(1), epoch(5)), (SegmentId(0), SlotId(2), epoch(6)));
        drains.add_order((S, 7), first, MonoTime(0));
        drains.add_order((T, 8), second, MonoTime(0));
        drains.add_order((S, 9), first, MonoTime(0));
        assert!(drains.knows((S, 7)) && !drains.knows((T, 7)) && !drains.knows((S, 1)));
        assert_eq!(drains.freed(first), [(S, 7), (S, 9)]);
        assert_eq!(drains.end_session(S), 0);
        assert!(drains.freed(first).is_empty());
        assert_eq!(drains.end_session(T), 1);
        assert!(!drains.is_empty(), "its slot goes on draining");
        assert!(drains.freed(second).is_empty());
        assert!(drains.is_empty());
    }

    #[test]
    fn a_drain_that_lasts_is_told_once() {
        let mut drains = Drains::default();
        let name = (SegmentId(0), SlotId(1), epoch(5));
        let limit = Duration::from_nanos(10);
        drains.add(name, MonoTime(5));
        assert!(drains.take_overdue(MonoTime(14), limit).is_empty());
        assert_eq!(drains.take_overdue(MonoTime(15), limit), [Overdue { name, since: MonoTime(5) }]);
        assert!(drains.take_overdue(MonoTime(99), limit).is_empty());
        assert_eq!(drains.overdue(), 1);
        drains.freed(name);
        assert_eq!(drains.overdue(), 0);
    }
}
