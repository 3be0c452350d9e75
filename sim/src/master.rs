//! [`Master`]: the shipped [`Group`] and [`Sessions`] behind the simulated network.
//!
//! What a master's process does around them stands here: it numbers the orders of a session, repeats those that are not
//! answered, answers each request of a session once, and remembers who waits for a removal.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU16;

use moontide_meta::{
    Ask, Beat, Effect, Effects, Group, GroupConfig, Medium, MountSpec, Now, Order, OrderOutcome, PlaceView,
    PutEnd, PutOptions, PutStart, Removal, ReportRecord, SessionConfig, Sessions, StripeView, TenantIx,
    TickBudget, Waiter,
};
use moontide_types::record::PinClass;
use moontide_types::{ErrorCode, GroupId, Key, MonoTime, NodeId, SessionId, Tenant, Term, UnixMillis};

use crate::client::{key_bytes, object_id};
use crate::event::{Answer, Call, Events, Message, Request, node_id};
use crate::network::Network;

/// Orders are repeated after this time.
const REPEAT_MS: u64 = 300;

/// Ticks between two audits, which look at everything.
const AUDIT_EVERY: u64 = 20;

/// The master's side of a session.
#[derive(Debug, Default)]
struct Link {
    /// The last request that was answered, and how.
    answered: Option<(u64, Result<(), ErrorCode>)>,
    /// Orders that are not answered yet.
    orders: BTreeMap<u64, Order>,
    order_count: u64,
    repeat_at: MonoTime,
}

/// A master's process.
#[derive(Debug)]
pub(crate) struct Master {
    pub(crate) group: Group,
    pub(crate) term: Term,
    sessions: Sessions,
    links: HashMap<SessionId, Link>,
    by_node: HashMap<NodeId, SessionId>,
    /// Clients that wait for a removal, with their op.
    waiting: HashMap<Waiter, (usize, u64)>,
    waiters: u64,
    ticks: u64,
    effects: Effects,
}

/// Calendar time runs with the monotonic one.
fn now(mono: MonoTime) -> Now {
    Now { mono, unix: UnixMillis(1_700_000_000_000 + mono.0 / 1_000_000) }
}

impl Master {
    pub(crate) fn start(term: Term, mono: MonoTime) -> Master {
        let config = GroupConfig::new(GroupId(0), NonZeroU16::MIN, term);
        let mut group = Group::new(config, now(mono));
        group.tenant(Tenant::DEFAULT).expect("there is room for a tenant");
        Master {
            group,
            term,
            sessions: Sessions::new(SessionConfig::default(), term),
            links: HashMap::new(),
            by_node: HashMap::new(),
            waiting: HashMap::new(),
            waiters: 0,
            ticks: 0,
            effects: vec![],
        }
    }

    /// What waits for time.
    pub(crate) fn tick(&mut self, events: &mut Events, network: &mut Network) -> Result<(), String> {
        let mono = events.now();
        for ended in self.sessions.expire(mono) {
            self.end_session(mono, ended.node, ended.session);
        }
        let _more = self.group.tick(now(mono), &TickBudget::default(), &mut self.effects);
        self.take_effects(events, network);
        let mut due: Vec<SessionId> =
            self.links.keys().copied().filter(|s| self.links[s].repeat_at <= mono).collect();
        due.sort();
        for session in due {
            self.send_orders(session, events, network);
        }
        self.ticks += 1;
        if !self.ticks.is_multiple_of(AUDIT_EVERY) {
            return Ok(());
        }
        self.group.audit(now(mono)).map(|_| ()).map_err(|violation| violation.to_string())
    }

    fn end_session(&mut self, mono: MonoTime, node: NodeId, session: SessionId) {
        self.links.remove(&session);
        self.group.node_lost(now(mono), node, session, &mut self.effects);
    }

    /// Sends everything that is not answered, in order.
    fn send_orders(&mut self, session: SessionId, events: &mut Events, network: &mut Network) {
        let Some(node) = self.sessions.node(session) else { return };
        let Some(link) = self.links.get_mut(&session) else { return };
        link.repeat_at = events.now().after(std::time::Duration::from_millis(REPEAT_MS));
        for (&number, &order) in &link.orders {
            let node = node.0 as usize - 1;
            network.send(events, Message::Order { node, session, number, order });
        }
    }

    fn take_effects(&mut self, events: &mut Events, network: &mut Network) {
        for effect in std::mem::take(&mut self.effects) {
            match effect {
                Effect::Order { session, order } => {
                    let Some(node) = self.sessions.node(session) else { continue };
                    let Some(link) = self.links.get_mut(&session) else { continue };
                    link.order_count += 1;
                    let number = link.order_count;
                    link.orders.insert(number, order);
                    let node = node.0 as usize - 1;
                    network.send(events, Message::Order { node, session, number, order });
                }
                Effect::Removed { waiter, code } => {
                    if let Some((client, op)) = self.waiting.remove(&waiter) {
                        network.send(events, Message::Answer { client, op, answer: Answer::Removed(code) });
                    }
                }
                Effect::StepDown { seen } => panic!("term {seen} was never elected"),
            }
        }
    }

    /// A client's call.
    pub(crate) fn call(
        &mut self,
        client: usize,
        op: u64,
        call: Call,
        events: &mut Events,
        network: &mut Network,
    ) {
        if let Some(answer) = self.answer(client, op, call, now(events.now())) {
            network.send(events, Message::Answer { client, op, answer });
        }
        self.take_effects(events, network);
    }

    fn answer(&mut self, client: usize, op: u64, call: Call, now: Now) -> Option<Answer> {
        Some(match call {
            Call::PutStart { key, len, replicas, upsert } => {
                let bytes = key_bytes(key);
                let options = PutOptions { replicas, upsert, ..PutOptions::default() };
                let put = PutStart {
                    ask: Ask { id: object_id(key), key: Key::new(&bytes).expect("short") },
                    tenant: TenantIx(0),
                    caller: op,
                    object_len: len,
                    attributes_len: 0,
                    pin: PinClass::None,
                    expires: None,
                    cohort: None,
                    parent: None,
                    options: &options,
                };
                match self.group.put_start(now, &put, &mut self.effects) {
                    Ok(given) => {
                        let with_session = |place: &PlaceView| (*place, self.by_node[&place.node]);
                        let places = given.object.places.iter().map(with_session).collect();
                        Answer::Granted { epoch: given.object.epoch, places }
                    }
                    Err(code) => Answer::Refused(code),
                }
            }
            Call::PutEnd { key, epoch, root, outcomes } => {
                let end = PutEnd { id: object_id(key), epoch, root, outcomes: &outcomes, stripe_roots: &[] };
                match self.group.put_end(now, &end, &mut self.effects) {
                    Ok(()) => Answer::Ended,
                    Err(code) => Answer::Refused(code),
                }
            }
            Call::Lookup { key, lease_ms } => {
                let bytes = key_bytes(key);
                let ask = Ask { id: object_id(key), key: Key::new(&bytes).expect("short") };
                let mut answer = None;
                self.group.lookup(now, lease_ms, &[ask], |_, found| {
                    answer = Some(match found {
                        Ok(object) => Answer::Found {
                            epoch: object.epoch,
                            object_len: object.object_len,
                            root: object.root,
                            places: object.places.to_vec(),
                        },
                        Err(code) => Answer::Refused(code),
                    });
                });
                answer.expect("every key is answered")
            }
            Call::Remove { key } => {
                let bytes = key_bytes(key);
                let ask = Ask { id: object_id(key), key: Key::new(&bytes).expect("short") };
                self.waiters += 1;
                let waiter = Waiter(self.waiters);
                match self.group.remove(now, &ask, true, waiter, &mut self.effects) {
                    Removal::Done(code) => Answer::Removed(code),
                    Removal::Waiting => {
                        self.waiting.insert(waiter, (client, op));
                        return None;
                    }
                }
            }
        })
    }

    /// A node wants a session.
    pub(crate) fn open(
        &mut self,
        node: usize,
        boot: u64,
        attempt: u64,
        events: &mut Events,
        network: &mut Network,
    ) {
        let (session, earlier) = self.sessions.open(events.now(), node_id(node), boot);
        if let Some(earlier) = earlier {
            self.end_session(events.now(), node_id(node), earlier);
        }
        self.links.insert(session, Link::default());
        self.by_node.insert(node_id(node), session);
        network.send(events, Message::Opened { node, attempt, session, term: self.term });
        self.take_effects(events, network);
    }

    /// A node is alive.
    pub(crate) fn beat(
        &mut self,
        node: usize,
        session: SessionId,
        events: &mut Events,
        network: &mut Network,
    ) {
        let alive = self.sessions.beat(events.now(), session) == Beat::Alive;
        network.send(events, Message::Heard { node, session, alive });
    }

    /// A request of a session: done once, answered as often as it is asked.
    pub(crate) fn request(
        &mut self,
        node: usize,
        session: SessionId,
        number: u64,
        request: &Request,
        events: &mut Events,
        network: &mut Network,
    ) {
        let Some(link) = self.links.get(&session) else { return };
        let result = match link.answered {
            Some((last, result)) if last == number => result,
            Some((last, _)) if last + 1 != number => return,
            None if number != 1 => return,
            _ => {
                let result = self.do_request(node, session, request, events.now());
                if let Some(link) = self.links.get_mut(&session) {
                    link.answered = Some((number, result));
                }
                result
            }
        };
        network.send(events, Message::Answered { node, session, number, result });
        self.take_effects(events, network);
    }

    fn do_request(
        &mut self,
        node: usize,
        session: SessionId,
        request: &Request,
        mono: MonoTime,
    ) -> Result<(), ErrorCode> {
        match *request {
            Request::Mount { segment, generation, units, slots, term, occupied } => {
                let spec = MountSpec {
                    node: node_id(node),
                    session,
                    segment,
                    generation,
                    medium: Medium::Memory,
                    units,
                    slots,
                    labels: [""; 3],
                    tenant: None,
                    term,
                    occupied,
                    away: std::time::Duration::ZERO,
                    one_sided: true,
                };
                self.group.mount(now(mono), &spec, &mut self.effects).map(|_| ())
            }
            Request::Report { segment, generation, term, first, ref changes } => {
                let records = changes.iter().map(|change| ReportRecord {
                    slot: change.slot,
                    state: change.state,
                    epoch: change.epoch,
                    id: object_id(change.key),
                    tenant: TenantIx(0),
                    key: &change.key_bytes,
                    object_len: change.len,
                    stripe: StripeView { index: 0, count: 1, offset: 0, len: change.len },
                    root: change.root,
                    extent: change.extent,
                    payload_offset: change.extent.span().offset(),
                    digestless: false,
                    one_sided: false,
                    touched: false,
                    pin: PinClass::None,
                    expires: None,
                    cohort: None,
                    parent: None,
                });
                let name = (node_id(node), segment);
                self.group.report(now(mono), name, generation, term, first, records, &mut self.effects)
            }
            Request::ReportEnd { segment, generation, term, records } => {
                let name = (node_id(node), segment);
                self.group.report_end(now(mono), name, generation, term, records, &mut self.effects)
            }
        }
    }

    /// What became of an order.
    pub(crate) fn outcome(
        &mut self,
        session: SessionId,
        number: u64,
        outcome: OrderOutcome,
        events: &mut Events,
        network: &mut Network,
    ) {
        let Some(node) = self.sessions.node(session) else { return };
        let Some(link) = self.links.get_mut(&session) else { return };
        let Some(&order) = link.orders.get(&number) else { return };
        // Of a reclaim that drains the report says when it is done: it needs no second answer.
        link.orders.remove(&number);
        let name = (node, order.segment);
        self.group.order_outcome(name, order.kind, order.slot, order.epoch, outcome, &mut self.effects);
        self.take_effects(events, network);
    }
}
