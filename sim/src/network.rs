//! [`Network`]: delivers messages late, out of order, twice, or never.
//!
//! Calls and replies are independent. Messages of a stream arrive once and in the order in which they were sent, or the
//! stream breaks and nothing arrives on it any more, as on a connection: its ends get a notice, or detect it later.

use std::collections::BTreeMap;
use std::time::Duration;

use moontide_types::{MonoTime, NodeId};

use crate::event::{Envelope, Event, Events, Message, ProcessId};
use crate::faults::{FaultCounts, FaultKind};
use crate::plan::NetworkPlan;
use crate::rng::SimRng;

/// Processes between which no message passes.
#[derive(Clone, Copy, Debug, Hash)]
pub(crate) enum Partition {
    Around(ProcessId),
    Between(ProcessId, ProcessId),
    OneWay(ProcessId, ProcessId),
}

impl Partition {
    fn stops(self, from: ProcessId, to: ProcessId) -> bool {
        match self {
            Partition::Around(process) => from == process || to == process,
            Partition::Between(one, other) => (from, to) == (one, other) || (from, to) == (other, one),
            Partition::OneWay(source, target) => (from, to) == (source, target),
        }
    }
}

#[derive(Debug, Default)]
struct Stream {
    /// Arrival time of the last message, by receiver.
    last: BTreeMap<ProcessId, MonoTime>,
    broken: bool,
}

#[derive(Debug)]
pub(crate) struct Network {
    plan: NetworkPlan,
    rng: SimRng,
    cuts: Vec<(Partition, MonoTime)>,
    /// Time until which each node is slow.
    slow: Vec<MonoTime>,
    streams: BTreeMap<u64, Stream>,
    /// Index of each node id. Ids of exited processes are kept: the current process rejects messages for them.
    directory: BTreeMap<NodeId, usize>,
    /// Arrival time of the last call or reply.
    last: BTreeMap<(ProcessId, ProcessId), MonoTime>,
    pub(crate) counts: FaultCounts,
}

impl Network {
    pub(crate) fn new(plan: NetworkPlan, seed: u64, nodes: usize) -> Network {
        Network {
            plan,
            rng: SimRng::new(seed),
            cuts: Vec::new(),
            slow: vec![MonoTime(0); nodes],
            streams: BTreeMap::new(),
            directory: BTreeMap::new(),
            last: BTreeMap::new(),
            counts: FaultCounts::default(),
        }
    }

    /// A node has started.
    pub(crate) fn register(&mut self, node: NodeId, index: usize) {
        self.directory.insert(node, index);
    }

    /// Where a node is.
    pub(crate) fn find(&self, node: NodeId) -> Option<usize> {
        self.directory.get(&node).copied()
    }

    /// Lets nothing pass for a while.
    pub(crate) fn cut(&mut self, cut: Partition, now: MonoTime, until: MonoTime) {
        self.cuts.retain(|&(_, until)| until > now);
        self.cuts.push((cut, until));
    }

    /// A node takes its time for a while.
    pub(crate) fn slow_down(&mut self, node: usize, until: MonoTime) {
        self.slow[node] = self.slow[node].max(until);
    }

    /// From now on everything arrives.
    pub(crate) fn heal(&mut self) {
        self.plan = NetworkPlan::default();
        self.cuts.clear();
        self.slow.fill(MonoTime(0));
    }

    fn cut_until(&self, from: ProcessId, to: ProcessId, now: MonoTime) -> Option<MonoTime> {
        let active = self.cuts.iter().filter(|(cut, until)| *until > now && cut.stops(from, to));
        active.map(|&(_, until)| until).max()
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, events: &mut Events, from: ProcessId, to: ProcessId, message: Message) {
        match message.stream() {
            Some(stream) => self.send_on(stream, events, Envelope { from, to, message }),
            None => self.send_alone(events, Envelope { from, to, message }),
        }
    }

    fn send_alone(&mut self, events: &mut Events, envelope: Envelope) {
        // Clients repeat calls when a connection breaks. Nodes open another session instead; masters read the registry
        // again.
        let by_client =
            [envelope.from, envelope.to].into_iter().any(|process| matches!(process, ProcessId::Client(_)));
        let twice = by_client && self.rng.permille(self.plan.twice_permille);
        if twice {
            self.counts.add(FaultKind::Twice);
            self.send_once(events, envelope.clone());
        }
        self.send_once(events, envelope);
    }

    fn send_once(&mut self, events: &mut Events, envelope: Envelope) {
        let now = events.now();
        if self.rng.permille(self.plan.lost_permille)
            || self.cut_until(envelope.from, envelope.to, now).is_some()
        {
            self.counts.add(FaultKind::Lost);
            return;
        }
        let at = now.after(self.travel(&envelope, now));
        let last = self.last.entry((envelope.from, envelope.to)).or_default();
        if at < *last {
            self.counts.add(FaultKind::Overtaken);
        }
        *last = at.max(*last);
        events.at(at, Event::Deliver(Box::new(envelope)));
    }

    fn travel(&mut self, envelope: &Envelope, now: MonoTime) -> Duration {
        let slow_node = [envelope.from, envelope.to].into_iter().any(|process| match process {
            ProcessId::Node(node) => self.slow[node] > now,
            ProcessId::Registry | ProcessId::Master(_) | ProcessId::Client(_) => false,
        });
        let micros = if self.rng.permille(self.plan.slow_permille) {
            self.counts.add(FaultKind::Delayed);
            self.rng.within(5_000, 4_000_000)
        } else if slow_node {
            self.rng.within(5_000, 400_000)
        } else {
            self.rng.within(50, 2_000)
        };
        Duration::from_micros(micros)
    }

    fn send_on(&mut self, number: u64, events: &mut Events, envelope: Envelope) {
        let now = events.now();
        if matches!(envelope.message, Message::StreamOpen { .. }) {
            self.streams.insert(number, Stream::default());
        }
        if self.streams.get(&number).is_none_or(|stream| stream.broken) {
            return;
        }
        let mut at = now.after(self.travel(&envelope, now));
        let cut = self.cut_until(envelope.from, envelope.to, now);
        // Lost packets are retransmitted, so that a short partition is only a delay; or the connection breaks.
        if let Some(until) = cut
            && !self.breaks_over(until.since(now))
        {
            at = at.max(until.after(until.since(now) / 2));
        } else if cut.is_some() || self.rng.permille(self.plan.lost_permille / 4) {
            return self.break_stream(number, events, envelope.from, envelope.to);
        }
        let stream = self.streams.get_mut(&number).expect("looked at above");
        let last = stream.last.entry(envelope.to).or_default();
        at = at.max(MonoTime(last.0 + 1));
        *last = at;
        events.at(at, Event::Deliver(Box::new(envelope)));
    }

    fn breaks_over(&mut self, silence: Duration) -> bool {
        silence > Duration::from_secs(30) || self.rng.permille(500)
    }

    /// Breaks a stream. Half of the time, reachable ends get a notice.
    pub(crate) fn break_stream(
        &mut self,
        number: u64,
        events: &mut Events,
        one: ProcessId,
        other: ProcessId,
    ) {
        let Some(stream) = self.streams.get_mut(&number).filter(|stream| !stream.broken) else { return };
        stream.broken = true;
        self.counts.add(FaultKind::StreamBroken);
        for (from, to) in [(one, other), (other, one)] {
            if self.rng.permille(500) {
                let message = Message::StreamEnd { stream: number, code: None };
                let span = Duration::from_micros(self.rng.within(100, 50_000));
                events.after(span, Event::Deliver(Box::new(Envelope { from, to, message })));
            }
        }
    }

    /// Whether a message that arrives now is lost after all.
    pub(crate) fn drops(&mut self, envelope: &Envelope, now: MonoTime) -> bool {
        let lost = match envelope.message.stream() {
            // The news that it is broken is no message on it.
            Some(_) if matches!(envelope.message, Message::StreamEnd { code: None, .. }) => false,
            Some(stream) => self.streams.get(&stream).is_none_or(|stream| stream.broken),
            None => self.cut_until(envelope.from, envelope.to, now).is_some(),
        };
        if lost {
            self.counts.add(FaultKind::Lost);
        }
        lost
    }
}
