//! A node's session: orders on their way to it, and the stream that carries them.
//!
//! Orders are numbered here, kept until the node has answered them for good, and sent again when the node comes back
//! with a new stream of the same session. There are never more of them than the node has slots, for an order means
//! one that is being given back; [`ORDERS_MAX`] is for a node that takes orders and answers none.

use std::collections::BTreeMap;
use std::sync::Arc;

use hashbrown::HashMap;
use moontide_meta::{Order, OrderKind, OrderOutcome};
use moontide_proto::convert::DiskStatus;
use moontide_proto::limits::SESSION_RECORDS_MAX;
use moontide_proto::{
    Order as WireOrder, OrderFlags, OrderKind as WireKind, OrderPhase, OrderResult, PackedBuilder, v1,
};
use moontide_types::{ErrorCode, Extent, MapVersion, NodeId, SegmentId, SessionId, Term};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Service;
use super::stats::Reads;

/// Orders without an answer, per session: 16 million take a gigabyte. Beyond that the session ends.
const ORDERS_MAX: usize = 1 << 24;

/// A node that is registered.
#[derive(Debug)]
pub(super) struct NodeSession {
    pub(super) node: NodeId,
    session: SessionId,
    number: Term,
    pub(super) labels: [Box<str>; 3],
    pub(super) addresses: Vec<(Box<str>, Box<str>)>,
    outbox: Mutex<Outbox>,
    news: Notify,
    /// Which group has which segment.
    pub(super) segments: Mutex<HashMap<SegmentId, usize>>,
    pub(super) reads: Mutex<Reads>,
    /// How its disk is, if it has one.
    pub(super) disk: Mutex<Option<DiskStatus>>,
}

#[derive(Debug, Default)]
struct Outbox {
    /// Orders given so far: the last number.
    ordered: u64,
    /// By number. One that a reader holds up stays for long, and those behind it do not wait for it.
    unanswered: BTreeMap<u64, Sent>,
    /// Orders from here on have not been sent on the current stream.
    unsent: u64,
    /// Messages of the node that were applied.
    acked: u64,
    /// What the node was told of that.
    acked_told: u64,
    beat: Option<(u64, u32)>,
    /// Which stream is the current one.
    stream: u64,
    ended: bool,
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    group: usize,
    /// The group's.
    term: Term,
    order: Order,
}

/// An order that the node has answered.
#[derive(Debug)]
pub(super) struct Answered {
    pub(super) group: usize,
    pub(super) order: Order,
    pub(super) outcome: OrderOutcome,
}

impl NodeSession {
    pub(super) fn new(
        node: NodeId,
        session: SessionId,
        number: Term,
        labels: [Box<str>; 3],
        addresses: Vec<(Box<str>, Box<str>)>,
    ) -> NodeSession {
        NodeSession {
            node,
            session,
            number,
            labels,
            addresses,
            outbox: Mutex::new(Outbox { unsent: 1, ..Outbox::default() }),
            news: Notify::new(),
            segments: Mutex::default(),
            reads: Mutex::default(),
            disk: Mutex::default(),
        }
    }

    pub(super) fn session(&self) -> SessionId {
        self.session
    }

    pub(super) fn orders_outstanding(&self) -> usize {
        self.outbox.lock().unanswered.len()
    }

    /// Puts an order on its way.
    pub(super) fn order(&self, group: usize, term: Term, order: Order) {
        let mut outbox = self.outbox.lock();
        if outbox.unanswered.len() >= ORDERS_MAX {
            outbox.ended = true;
        }
        if !outbox.ended {
            outbox.ordered += 1;
            let number = outbox.ordered;
            let term = if moontide_types::planted("order-in-the-masters-term") { self.number } else { term };
            outbox.unanswered.insert(number, Sent { group, term, order });
        }
        drop(outbox);
        self.news.notify_one();
    }

    /// A group is hosted here no more: its orders mean nothing.
    pub(super) fn forget_orders(&self, group: usize) {
        self.outbox.lock().unanswered.retain(|_, sent| sent.group != group);
    }

    /// Whether peers reach its memory without asking it.
    pub(super) fn is_one_sided(&self) -> bool {
        self.addresses.iter().any(|(engine, _)| &**engine == "ucx")
    }

    /// Whether the session is over.
    pub(super) fn is_ended(&self) -> bool {
        self.outbox.lock().ended
    }

    /// The session is over: its stream ends.
    pub(super) fn end(&self) {
        self.outbox.lock().ended = true;
        self.news.notify_waiters();
        self.news.notify_one();
    }

    /// A new stream of this session: what has no answer is sent again.
    pub(super) fn attach(&self) -> u64 {
        let mut outbox = self.outbox.lock();
        outbox.stream += 1;
        outbox.unsent = if moontide_types::planted("orders-not-repeated") { outbox.unsent } else { 1 };
        outbox.acked_told = 0;
        let stream = outbox.stream;
        drop(outbox);
        self.news.notify_waiters();
        stream
    }

    /// Whether a message is the next one: `Ok(false)` if it was applied before.
    pub(super) fn expect(&self, sequence: u64) -> Result<bool, ErrorCode> {
        let outbox = self.outbox.lock();
        if outbox.ended {
            return Err(ErrorCode::StaleSession);
        }
        match sequence.cmp(&(outbox.acked + 1)) {
            std::cmp::Ordering::Less => Ok(false),
            std::cmp::Ordering::Equal => Ok(true),
            std::cmp::Ordering::Greater => Err(ErrorCode::Retry),
        }
    }

    /// A message was applied.
    pub(super) fn applied(&self, sequence: u64, beat: Option<(u64, u32)>) {
        let mut outbox = self.outbox.lock();
        outbox.acked = outbox.acked.max(sequence);
        outbox.beat = beat.or(outbox.beat);
        drop(outbox);
        self.news.notify_one();
    }

    /// Takes answers of the node. Unknown numbers are answers that came twice.
    pub(super) fn answered(&self, results: impl Iterator<Item = OrderResult>) -> Vec<Answered> {
        let mut outbox = self.outbox.lock();
        let mut answered = vec![];
        for result in results {
            let Some(&Sent { group, order, .. }) = outbox.unanswered.get(&result.order) else { continue };
            let (outcome, last) = match (result.phase, result.code) {
                (OrderPhase::Refused, code) => {
                    (OrderOutcome::Refused(code.unwrap_or(ErrorCode::Internal)), true)
                }
                (OrderPhase::Done, _) => (OrderOutcome::Done, true),
                // A kill needs no more; a reclaim is done only when the slot is free.
                (OrderPhase::Accepted, _) => (OrderOutcome::Accepted, order.kind == OrderKind::Kill),
            };
            if last {
                outbox.unanswered.remove(&result.order);
            }
            answered.push(Answered { group, order, outcome });
        }
        answered
    }

    /// The next message for a stream, if there is something to say; `Err`: this stream is over.
    fn message(&self, stream: u64, map_version: MapVersion) -> Result<Option<v1::MasterMessage>, StreamOver> {
        let mut outbox = self.outbox.lock();
        if outbox.ended || outbox.stream != stream {
            return Err(StreamOver);
        }
        let outbox = &mut *outbox;
        let mut orders = PackedBuilder::<WireOrder>::with_capacity(0);
        for (&number, sent) in outbox.unanswered.range(outbox.unsent..).take(SESSION_RECORDS_MAX) {
            orders.push(&wire_order(number, &sent.order, sent.term));
            outbox.unsent = number + 1;
        }
        let body = if !orders.is_empty() {
            let orders = orders.finish().into();
            Some(v1::master_message::Body::Orders(v1::Orders { orders }))
        } else if let Some((beat, ttl_ms)) = outbox.beat.take() {
            Some(v1::master_message::Body::HeartbeatAck(v1::HeartbeatAck { beat, ttl_ms }))
        } else if outbox.acked > outbox.acked_told {
            // Nothing to do, but the node wants to know how far it was heard: an empty list of orders.
            Some(v1::master_message::Body::Orders(v1::Orders::default()))
        } else {
            None
        };
        Ok(body.map(|body| {
            outbox.acked_told = outbox.acked;
            v1::MasterMessage {
                session: self.session.0,
                term: self.number.get(),
                map_version: map_version.0,
                acked_sequence: outbox.acked,
                body: Some(body),
            }
        }))
    }
}

/// A stream that says nothing any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamOver;

fn wire_order(number: u64, order: &Order, term: Term) -> WireOrder {
    let (kind, flags) = match order.kind {
        OrderKind::Kill | OrderKind::Reclaim if order.segment == SegmentId::DISK => {
            return WireOrder {
                flags: OrderFlags::TOMBSTONE,
                epoch: order.epoch,
                id: order.id,
                ..WireOrder::new(number, WireKind::DropDisk, term)
            };
        }
        OrderKind::Kill => (WireKind::Kill, OrderFlags::TOMBSTONE),
        OrderKind::Reclaim => (WireKind::Reclaim, OrderFlags::NONE),
        OrderKind::Offload => (WireKind::Offload, OrderFlags::NONE),
        OrderKind::Promote { .. } => (WireKind::Promote, OrderFlags::NONE),
    };
    let (stripe, extent) = match order.kind {
        OrderKind::Promote { stripe, extent } => (stripe, extent),
        _ => (0, Extent::default()),
    };
    WireOrder {
        stripe,
        extent,
        payload_offset: extent.span().offset(),
        flags,
        segment: order.segment,
        generation: order.generation,
        slot: order.slot,
        epoch: order.epoch,
        id: order.id,
        ..WireOrder::new(number, kind, term)
    }
}

/// One stream of a session, for the door that carries it.
#[derive(Debug)]
pub struct SessionStream {
    service: Arc<Service>,
    node: Arc<NodeSession>,
    stream: u64,
}

impl SessionStream {
    pub(super) fn new(service: Arc<Service>, node: Arc<NodeSession>) -> SessionStream {
        let stream = node.attach();
        SessionStream { service, node, stream }
    }

    /// Applies a message of the node. An error ends the stream; the node comes back with a new one.
    pub fn receive(&self, message: &v1::NodeMessage) -> Result<(), ErrorCode> {
        if message.session != self.node.session().0 {
            return Err(ErrorCode::StaleSession);
        }
        self.service.node_says(&self.node, message)
    }

    /// The next message to the node, if there is one now. An error: the session is over, or has another stream.
    pub fn next_now(&self) -> Result<Option<v1::MasterMessage>, StreamOver> {
        self.node.message(self.stream, self.service.map_version())
    }

    /// The next message to the node, as soon as there is one. None: the session is over, or has another stream.
    pub async fn next(&self) -> Option<v1::MasterMessage> {
        loop {
            // Registered before looking, so that no news is missed in between.
            let news = self.node.news.notified();
            match self.next_now() {
                Ok(Some(message)) => return Some(message),
                Ok(None) => news.await,
                Err(StreamOver) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moontide_proto::{FixedRecord, Packed};
    use moontide_types::record::{State, Word};
    use moontide_types::{Epoch, Generation, ObjectId, SlotId};

    fn order(slot: u32, kind: OrderKind) -> Order {
        Order {
            kind,
            segment: SegmentId(3),
            generation: Generation(1),
            slot: SlotId(slot),
            epoch: Epoch::new(Term::new(2).unwrap(), 5).unwrap(),
            id: ObjectId([1; 16]),
        }
    }

    fn node() -> NodeSession {
        let empty = || Box::from("");
        NodeSession::new(NodeId(1), SessionId(9), Term::new(2).unwrap(), [empty(), empty(), empty()], vec![])
    }

    fn numbers(message: Option<v1::MasterMessage>) -> Vec<u64> {
        let Some(v1::master_message::Body::Orders(orders)) = message.and_then(|m| m.body) else {
            return vec![];
        };
        Packed::<WireOrder>::decode(&orders.orders, SESSION_RECORDS_MAX)
            .unwrap()
            .iter()
            .map(|o| o.order)
            .collect()
    }

    fn result(order: u64, phase: OrderPhase) -> OrderResult {
        OrderResult { order, word: Word::new(Epoch::ZERO, State::Dead), code: None, phase }
    }

    #[test]
    fn what_has_no_answer_is_sent_again_on_a_new_stream() {
        let node = node();
        let first = node.attach();
        for slot in 0..4 {
            node.order(
                0,
                Term::new(2).unwrap(),
                order(slot, if slot == 0 { OrderKind::Kill } else { OrderKind::Reclaim }),
            );
        }
        assert_eq!(numbers(node.message(first, MapVersion(1)).ok().unwrap()), [1, 2, 3, 4]);
        assert!(node.message(first, MapVersion(1)).ok().unwrap().is_none());
        // Accepted ends a kill, not a reclaim; done ends both.
        let results = [(1, OrderPhase::Accepted), (2, OrderPhase::Accepted), (3, OrderPhase::Done)];
        assert_eq!(node.answered(results.map(|(n, phase)| result(n, phase)).into_iter()).len(), 3);
        let second = node.attach();
        assert!(node.message(first, MapVersion(1)).is_err(), "the older stream is over");
        assert_eq!(numbers(node.message(second, MapVersion(1)).ok().unwrap()), [2, 4]);
        // Answers that come twice, or to what was never ordered, change nothing.
        let strange = [1, 3, 99, 0].map(|n| result(n, OrderPhase::Done));
        assert!(node.answered(strange.into_iter()).is_empty());
        assert_eq!(node.answered([2, 4].map(|n| result(n, OrderPhase::Done)).into_iter()).len(), 2);
        assert_eq!(node.orders_outstanding(), 0);
        node.end();
        assert!(node.message(second, MapVersion(1)).is_err());
        assert_eq!(WireOrder::BYTES, 80);
    }

    #[test]
    fn messages_are_applied_once_and_in_order() {
        let node = node();
        let stream = node.attach();
        assert_eq!(node.expect(1), Ok(true));
        node.applied(1, Some((7, 10_000)));
        assert_eq!(node.expect(1), Ok(false));
        assert_eq!(node.expect(3), Err(ErrorCode::Retry));
        let message = node.message(stream, MapVersion(1)).ok().unwrap().unwrap();
        assert_eq!(message.acked_sequence, 1);
        assert!(matches!(message.body, Some(v1::master_message::Body::HeartbeatAck(ack)) if ack.beat == 7));
        node.applied(2, None);
        assert_eq!(node.message(stream, MapVersion(1)).ok().unwrap().unwrap().acked_sequence, 2);
    }
}
