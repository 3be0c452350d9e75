//! [`Node`]: a shipped [`NodeHeap`] with real shared memory, and what a node's process does around it: a session with
//! the master, a report of what it holds and of every change, and the orders that it carries out.
//!
//! Rules of a node that are not in the heap:
//! - it obeys the term of its session before it looks at what it holds;
//! - it takes writes only for grants of its present session;
//! - a node that no master has heard of for [`FORGET_MS`] comes back empty: what it holds may have been removed.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use moontide_heap::{Grant, HeapConfig, HugePages, Killed, NewRecord, NodeHeap, Transition, Writer};
use moontide_meta::{Order, OrderKind, OrderOutcome, PlaceView, ReportState, Rng};
use moontide_types::bounds::{LEASE_MS_MAX, UNIT_BYTES};
use moontide_types::record::{Attributes, Flags, KeySection, State};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, Key, MonoTime, SegmentId, SessionId, SlotId, Tenant,
    TenantGeneration, Term,
};

use crate::client::{key_bytes, key_of, object_id};
use crate::event::{Ask, Event, Events, Message, Payload, Request, Told, node_id};
use crate::network::Network;
use crate::oracle::pattern;

/// Less than a new master waits before it takes the absent for lost, with the slowest message in flight.
const FORGET_MS: u64 = 25_000;
const BEAT_MS: u64 = 1_000;
const REPEAT_MS: u64 = 300;
pub(crate) const TICK_MS: u64 = 200;
/// Records in one message of a report.
const CHUNK: usize = 7;
/// Segments of a node: units and slots.
const SEGMENTS: [(u32, u32); 2] = [(512, 48), (1024, 96)];

/// A slot as it was at some time.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) slot: SlotId,
    pub(crate) state: ReportState,
    pub(crate) epoch: Epoch,
    pub(crate) key: usize,
    pub(crate) key_bytes: Vec<u8>,
    pub(crate) len: u64,
    pub(crate) root: u64,
    pub(crate) extent: Extent,
}

/// The node's side of a session.
#[derive(Debug)]
struct Link {
    session: SessionId,
    term: Term,
    /// Requests that were not answered; the first one is under way.
    requests: VecDeque<Request>,
    /// The number of the first one.
    number: u64,
    sent_at: MonoTime,
    beaten_at: MonoTime,
    /// Records reported per segment.
    reported: Vec<u64>,
    /// The number of the next order.
    next_order: u64,
}

/// Bytes on their way to a slot.
#[derive(Debug)]
struct Write {
    client: usize,
    op: u64,
    which: usize,
    place: PlaceView,
    epoch: Epoch,
    len: u64,
    token: u64,
}

/// A node's process.
#[derive(Debug)]
pub(crate) struct Node {
    index: usize,
    heap: NodeHeap,
    incarnation: u64,
    rng: Rng,
    link: Option<Link>,
    attempts: u64,
    opened_at: MonoTime,
    /// When a master last had all that is here.
    safe_at: MonoTime,
    /// The last term that each segment has adopted.
    terms: Vec<Term>,
    writes: BTreeMap<u64, Write>,
    write_count: u64,
}

fn new_heap(index: usize, incarnation: u64) -> NodeHeap {
    let slots_max = SEGMENTS.iter().map(|&(_, slots)| u64::from(slots)).sum();
    let huge = HugePages::IfAllowed;
    let config = HeapConfig { node: node_id(index), generation: Generation(incarnation), slots_max, huge };
    let heap = NodeHeap::create(config).expect("memory for a small heap");
    for (units, slots) in SEGMENTS {
        heap.add_segment(slots, units, huge).expect("memory for a small segment");
    }
    heap
}

impl Node {
    pub(crate) fn new(index: usize, seed: u64) -> Node {
        Node {
            index,
            heap: new_heap(index, 1),
            incarnation: 1,
            rng: Rng::new(seed),
            link: None,
            attempts: 0,
            opened_at: MonoTime(0),
            safe_at: MonoTime(0),
            terms: vec![Term::ZERO; SEGMENTS.len()],
            writes: BTreeMap::new(),
            write_count: 0,
        }
    }

    /// The process ends and starts again: its memory is new.
    pub(crate) fn restart(&mut self) {
        self.incarnation += 1;
        self.heap = new_heap(self.index, self.incarnation);
        self.link = None;
        self.writes.clear();
    }

    /// What waits for time.
    pub(crate) fn tick(&mut self, events: &mut Events, network: &mut Network) {
        let now = events.now();
        self.free(now, events, network);
        let forgotten = now.since(self.safe_at) > Duration::from_millis(FORGET_MS);
        let mounting = self
            .link
            .as_ref()
            .is_some_and(|link| link.requests.iter().any(|request| matches!(request, Request::Mount { .. })));
        if forgotten && (self.link.is_none() || mounting) && self.holds_anything() {
            self.restart();
        }
        match &mut self.link {
            None if now.since(self.opened_at) >= Duration::from_millis(REPEAT_MS) => {
                self.attempts += 1;
                self.opened_at = now;
                let open = Message::Open { node: self.index, boot: self.incarnation, attempt: self.attempts };
                network.send(events, open);
            }
            None => {}
            Some(link) => {
                if now.since(link.beaten_at) >= Duration::from_millis(BEAT_MS) {
                    link.beaten_at = now;
                    network.send(events, Message::Beat { node: self.index, session: link.session });
                }
                if now.since(link.sent_at) >= Duration::from_millis(REPEAT_MS) {
                    self.send_request(events, network);
                }
            }
        }
    }

    fn holds_anything(&self) -> bool {
        let mut any = false;
        for segment in self.heap.segments() {
            segment.for_each_record(|_, _, _| any = true);
        }
        any
    }

    fn send_request(&mut self, events: &mut Events, network: &mut Network) {
        let Some(link) = &mut self.link else { return };
        let Some(request) = link.requests.front() else { return };
        link.sent_at = events.now();
        let (session, number) = (link.session, link.number);
        network
            .send(events, Message::Request { node: self.index, session, number, request: request.clone() });
    }

    /// The session is open: first obey, then look, then report.
    pub(crate) fn opened(
        &mut self,
        attempt: u64,
        session: SessionId,
        term: Term,
        events: &mut Events,
        network: &mut Network,
    ) {
        if attempt != self.attempts || self.link.is_some() {
            return;
        }
        let mut requests = VecDeque::new();
        let mut reported = vec![0; SEGMENTS.len()];
        for (at, segment) in self.heap.segments().iter().enumerate() {
            if segment.obey(term) > term {
                return; // an older master's answer
            }
            let shape = segment.shape();
            let mut changes = vec![];
            segment.for_each_record(|slot, header, _| {
                let units = header.layout().expect("the heap checked it").units();
                let extent = Extent { start: (header.payload_offset / UNIT_BYTES) as u32, units };
                let state = match header.word.state() {
                    State::Free => ReportState::Free,
                    State::Writing => ReportState::Writing,
                    State::Ready => ReportState::Ready,
                    State::Dead => ReportState::Dead,
                };
                let key = key_of(header.id);
                changes.push(Change {
                    slot,
                    state,
                    epoch: header.word.epoch(),
                    key,
                    key_bytes: key_bytes(key),
                    len: header.object_len,
                    root: header.root,
                    extent,
                });
            });
            let generation = Generation(self.incarnation);
            requests.push_back(Request::Mount {
                segment: shape.segment,
                generation,
                units: shape.units,
                slots: shape.slots,
                term: std::mem::replace(&mut self.terms[at], term),
                occupied: !changes.is_empty(),
            });
            let records = changes.len() as u64;
            for chunk in changes.chunks(CHUNK) {
                let (first, changes) = (reported[at], chunk.to_vec());
                reported[at] += chunk.len() as u64;
                requests.push_back(Request::Report {
                    segment: shape.segment,
                    generation,
                    term,
                    first,
                    changes,
                });
            }
            requests.push_back(Request::ReportEnd { segment: shape.segment, generation, term, records });
        }
        let (sent_at, beaten_at) = (events.now(), events.now());
        self.link =
            Some(Link { session, term, requests, number: 1, sent_at, beaten_at, reported, next_order: 1 });
        self.send_request(events, network);
    }

    /// The master has heard us, or does not know the session any more.
    pub(crate) fn heard(&mut self, session: SessionId, alive: bool, now: MonoTime) {
        let Some(link) = self.link.as_ref().filter(|link| link.session == session) else { return };
        let mounted = !link.requests.iter().any(|request| matches!(request, Request::Mount { .. }));
        if !alive {
            self.link = None;
        } else if mounted {
            self.safe_at = now;
        }
    }

    /// A request was answered.
    pub(crate) fn answered(
        &mut self,
        session: SessionId,
        number: u64,
        result: Result<(), ErrorCode>,
        events: &mut Events,
        network: &mut Network,
    ) {
        let Some(link) = self.link.as_mut().filter(|link| (link.session, link.number) == (session, number))
        else {
            return;
        };
        link.number += 1;
        link.requests.pop_front();
        if result.is_err() {
            // The master does not see it as we do: from the beginning.
            self.link = None;
        } else {
            self.send_request(events, network);
        }
    }

    fn tell(&mut self, segment: SegmentId, change: Change, events: &mut Events, network: &mut Network) {
        let generation = Generation(self.incarnation);
        let Some(link) = &mut self.link else { return };
        let first = link.reported[segment.0 as usize];
        link.reported[segment.0 as usize] += 1;
        let term = link.term;
        link.requests.push_back(Request::Report { segment, generation, term, first, changes: vec![change] });
        if link.requests.len() == 1 {
            self.send_request(events, network);
        }
    }

    /// A change of which only slot and epoch count.
    fn tell_bare(
        &mut self,
        (segment, slot, epoch): (SegmentId, SlotId, Epoch),
        state: ReportState,
        events: &mut Events,
        network: &mut Network,
    ) {
        let extent = Extent { start: 0, units: 1 };
        let change = Change { slot, state, epoch, key: 0, key_bytes: key_bytes(0), len: 0, root: 0, extent };
        self.tell(segment, change, events, network);
    }

    /// Frees what is due, and says so.
    fn free(&mut self, now: MonoTime, events: &mut Events, network: &mut Network) {
        for freed in self.heap.reclaim(now).freed {
            let what = (freed.segment, freed.slot, freed.epoch);
            self.tell_bare(what, ReportState::Free, events, network);
        }
    }

    /// An order of the session, in its turn.
    pub(crate) fn order(
        &mut self,
        session: SessionId,
        number: u64,
        order: Order,
        events: &mut Events,
        network: &mut Network,
    ) {
        let Some(link) = self.link.as_mut().filter(|link| link.session == session) else { return };
        if number > link.next_order {
            return; // one before it was lost, and comes again
        }
        link.next_order = link.next_order.max(number + 1);
        let outcome = if order.generation != Generation(self.incarnation) {
            OrderOutcome::Refused(ErrorCode::StaleGeneration)
        } else {
            match order.kind {
                OrderKind::Kill => self.kill(order, events, network),
                OrderKind::Reclaim => self.reclaim(order, events, network),
                // These nodes have no disk.
                OrderKind::Offload | OrderKind::Promote { .. } => {
                    OrderOutcome::Refused(ErrorCode::Unsupported)
                }
            }
        };
        network.send(events, Message::Outcome { node: self.index, session, number, outcome });
    }

    fn kill(&mut self, order: Order, events: &mut Events, network: &mut Network) -> OrderOutcome {
        let what = (order.segment, order.slot, order.epoch);
        // A lease may be out, at most the longest one there is. A Reclaim says that it is over.
        let not_before = events.now().after(Duration::from_millis(u64::from(LEASE_MS_MAX)));
        match self.heap.kill(order.segment, order.slot, order.epoch, not_before) {
            Killed::Dying => {
                self.tell_bare(what, ReportState::Dead, events, network);
                OrderOutcome::Accepted
            }
            Killed::Already => OrderOutcome::Accepted,
            Killed::NotThere => OrderOutcome::Refused(ErrorCode::Gone),
        }
    }

    fn reclaim(&mut self, order: Order, events: &mut Events, network: &mut Network) -> OrderOutcome {
        let Order { segment, slot, epoch, .. } = order;
        match self.heap.burn(segment, slot, epoch) {
            Transition::Done(_) => {
                self.tell_bare((segment, slot, epoch), ReportState::Free, events, network);
                OrderOutcome::Done
            }
            Transition::Already => OrderOutcome::Done,
            Transition::Refused(word) if word.epoch() > epoch => OrderOutcome::Done,
            Transition::Refused(word) if word.epoch() < epoch => OrderOutcome::Refused(ErrorCode::Overlap),
            Transition::Refused(_) => {
                if self.heap.kill(segment, slot, epoch, events.now()) == Killed::Dying {
                    self.tell_bare((segment, slot, epoch), ReportState::Dead, events, network);
                }
                self.free(events.now(), events, network);
                OrderOutcome::Accepted
            }
        }
    }

    /// A client's request.
    pub(crate) fn ask(
        &mut self,
        (client, op, which): (usize, u64, usize),
        ask: Ask,
        events: &mut Events,
        network: &mut Network,
    ) {
        match ask {
            Ask::Write { place, session, key, epoch, object_len, token } => {
                let write = Write { client, op, which, place, epoch, len: object_len, token };
                if let Err(code) = self.begin(&write, session, key, events, network) {
                    let told = Told::Written(Err(code));
                    network.send(events, Message::Told { client, op, place: which, told });
                }
            }
            Ask::Read { place, key, epoch } => {
                let told = self.read(&place, key, epoch);
                network.send(events, Message::Told { client, op, place: which, told });
            }
        }
    }

    fn read(&self, place: &PlaceView, key: usize, epoch: Epoch) -> Told {
        if place.generation != Generation(self.incarnation) {
            return Told::NotThere;
        }
        match self.heap.pin(place.segment, place.slot, epoch) {
            Some(pin) if pin.header().id == object_id(key) => {
                Told::Bytes { epoch, root: pin.header().root, bytes: Payload(pin.payload().to_vec()) }
            }
            _ => Told::NotThere,
        }
    }

    fn begin(
        &mut self,
        write: &Write,
        session: SessionId,
        key: usize,
        events: &mut Events,
        network: &mut Network,
    ) -> Result<(), ErrorCode> {
        let link =
            self.link.as_ref().filter(|link| link.session == session).ok_or(ErrorCode::StaleSession)?;
        let Write { place, epoch, len, .. } = *write;
        let name = key_bytes(key);
        let record = NewRecord {
            id: object_id(key),
            flags: Flags::NONE,
            object_len: len,
            stripe_index: 0,
            stripe_count: 1,
            stripe_offset: 0,
            stripe_len: len,
            key: KeySection { tenant: Tenant::DEFAULT, key: Key::new(&name).expect("short") },
            attributes: &Attributes::default(),
            id_key: 1,
            tenant_generation: TenantGeneration(0),
        };
        let (term, writer) = (link.term, Writer::Node);
        let grant = Grant { slot: place.slot, epoch, term, extent: place.extent, record, writer };
        self.heap.begin(place.segment, &grant).map_err(|error| error.code())?;
        if self.writes.values().any(|under_way| under_way.epoch == epoch && under_way.which == write.which) {
            return Ok(()); // the message came twice
        }
        let (slot, state, extent) = (place.slot, ReportState::Writing, place.extent);
        let change = Change { slot, state, epoch, key, key_bytes: name, len, root: 0, extent };
        self.tell(place.segment, change, events, network);
        self.write_count += 1;
        self.writes.insert(self.write_count, Write { ..*write });
        let slow = self.rng.below(50) == 0;
        let ms = if slow { self.rng.below(8_000) } else { 1 + self.rng.below(40) };
        events.after_ms(ms as u64, Event::Written { node: self.index, write: self.write_count });
        Ok(())
    }

    /// All bytes are here: they are copied in and published.
    pub(crate) fn written(&mut self, write: u64, events: &mut Events, network: &mut Network) {
        let Some(write) = self.writes.remove(&write) else { return };
        let (segment, slot, epoch) = (write.place.segment, write.place.slot, write.epoch);
        let filled = self
            .heap
            .claim(segment, slot, epoch)
            .map(|mut claim| claim.fill(&pattern(write.token, write.len)));
        let result = filled.ok_or(ErrorCode::StaleEpoch).and_then(|root| {
            let committed = self.heap.commit(segment, slot, epoch, root, Writer::Node);
            committed.map(|()| root).map_err(|error| error.code())
        });
        if let Ok(root) = result {
            let pin = self.heap.pin(segment, slot, epoch).expect("it was just published");
            let key = key_of(pin.header().id);
            drop(pin);
            let (state, extent) = (ReportState::Ready, write.place.extent);
            let change =
                Change { slot, state, epoch, key, key_bytes: key_bytes(key), len: write.len, root, extent };
            self.tell(segment, change, events, network);
        }
        let (client, op, place) = (write.client, write.op, write.which);
        network.send(events, Message::Told { client, op, place, told: Told::Written(result) });
    }
}
