//! [`Network`]: when a message arrives: late, out of order, twice, or never.
//!
//! Calls and their answers are on their own. Messages of a stream arrive in the order in which they were sent, once, or
//! the stream is broken and nothing arrives on it any more, as on a connection: its ends may be told, or find out.

use std::collections::BTreeMap;
use std::time::Duration;

use moontide_types::{MonoTime, NodeId};

use crate::dice::Dice;
use crate::event::{Event, Events, Letter, Message, Who};
use crate::faults::{FaultCounts, FaultKind};
use crate::plan::NetworkPlan;

/// Between whom nothing passes.
#[derive(Clone, Copy, Debug, Hash)]
pub(crate) enum Cut {
    Around(Who),
    Between(Who, Who),
    OneWay(Who, Who),
}

impl Cut {
    fn stops(self, from: Who, to: Who) -> bool {
        match self {
            Cut::Around(who) => from == who || to == who,
            Cut::Between(one, other) => (from, to) == (one, other) || (from, to) == (other, one),
            Cut::OneWay(source, target) => (from, to) == (source, target),
        }
    }
}

#[derive(Debug, Default)]
struct Stream {
    /// When the last message arrives, by who gets it.
    last: BTreeMap<Who, MonoTime>,
    broken: bool,
}

#[derive(Debug)]
pub(crate) struct Network {
    plan: NetworkPlan,
    dice: Dice,
    cuts: Vec<(Cut, MonoTime)>,
    /// Nodes that take their time, until then.
    slow: Vec<MonoTime>,
    streams: BTreeMap<u64, Stream>,
    /// Where nodes are, by their numbers. Those of processes that have ended stay: whoever is there now says no.
    directory: BTreeMap<NodeId, usize>,
    /// When the last call or answer arrives.
    last: BTreeMap<(Who, Who), MonoTime>,
    pub(crate) counts: FaultCounts,
}

impl Network {
    pub(crate) fn new(plan: NetworkPlan, seed: u64, nodes: usize) -> Network {
        Network {
            plan,
            dice: Dice::new(seed),
            cuts: Vec::new(),
            slow: vec![MonoTime(0); nodes],
            streams: BTreeMap::new(),
            directory: BTreeMap::new(),
            last: BTreeMap::new(),
            counts: FaultCounts::default(),
        }
    }

    /// A node has started.
    pub(crate) fn enlist(&mut self, node: NodeId, index: usize) {
        self.directory.insert(node, index);
    }

    /// Where a node is.
    pub(crate) fn find(&self, node: NodeId) -> Option<usize> {
        self.directory.get(&node).copied()
    }

    /// Lets nothing pass for a while.
    pub(crate) fn cut(&mut self, cut: Cut, now: MonoTime, until: MonoTime) {
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

    fn cut_until(&self, from: Who, to: Who, now: MonoTime) -> Option<MonoTime> {
        let active = self.cuts.iter().filter(|(cut, until)| *until > now && cut.stops(from, to));
        active.map(|&(_, until)| until).max()
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, events: &mut Events, from: Who, to: Who, message: Message) {
        match message.stream() {
            Some(stream) => self.send_on(stream, events, Letter { from, to, message }),
            None => self.send_alone(events, Letter { from, to, message }),
        }
    }

    fn send_alone(&mut self, events: &mut Events, letter: Letter) {
        // Clients say things again when a connection breaks. Nodes do not: they open another session. Masters look again.
        let by_client = [letter.from, letter.to].into_iter().any(|who| matches!(who, Who::Client(_)));
        let twice = by_client && self.dice.permille(self.plan.twice_permille);
        if twice {
            self.counts.add(FaultKind::Twice);
            self.send_once(events, letter.clone());
        }
        self.send_once(events, letter);
    }

    fn send_once(&mut self, events: &mut Events, letter: Letter) {
        let now = events.now();
        if self.dice.permille(self.plan.lost_permille)
            || self.cut_until(letter.from, letter.to, now).is_some()
        {
            self.counts.add(FaultKind::Lost);
            return;
        }
        let at = now.after(self.travel(&letter, now));
        let last = self.last.entry((letter.from, letter.to)).or_default();
        if at < *last {
            self.counts.add(FaultKind::Overtaken);
        }
        *last = at.max(*last);
        events.at(at, Event::Arrives(Box::new(letter)));
    }

    fn travel(&mut self, letter: &Letter, now: MonoTime) -> Duration {
        let slow_node = [letter.from, letter.to].into_iter().any(|who| match who {
            Who::Node(node) => self.slow[node] > now,
            Who::Registry | Who::Master(_) | Who::Client(_) => false,
        });
        let micros = if self.dice.permille(self.plan.slow_permille) {
            self.counts.add(FaultKind::Delayed);
            self.dice.within(5_000, 4_000_000)
        } else if slow_node {
            self.dice.within(5_000, 400_000)
        } else {
            self.dice.within(50, 2_000)
        };
        Duration::from_micros(micros)
    }

    fn send_on(&mut self, number: u64, events: &mut Events, letter: Letter) {
        let now = events.now();
        if matches!(letter.message, Message::StreamOpen { .. }) {
            self.streams.insert(number, Stream::default());
        }
        if self.streams.get(&number).is_none_or(|stream| stream.broken) {
            return;
        }
        let mut at = now.after(self.travel(&letter, now));
        let cut = self.cut_until(letter.from, letter.to, now);
        // What is lost is sent again, so that a short cut is only a delay; or the connection is given up over it.
        if let Some(until) = cut
            && !self.breaks_over(until.since(now))
        {
            at = at.max(until.after(until.since(now) / 2));
        } else if cut.is_some() || self.dice.permille(self.plan.lost_permille / 4) {
            return self.break_stream(number, events, letter.from, letter.to);
        }
        let stream = self.streams.get_mut(&number).expect("looked at above");
        let last = stream.last.entry(letter.to).or_default();
        at = at.max(MonoTime(last.0 + 1));
        *last = at;
        events.at(at, Event::Arrives(Box::new(letter)));
    }

    fn breaks_over(&mut self, silence: Duration) -> bool {
        silence > Duration::from_secs(30) || self.dice.permille(500)
    }

    /// The connection breaks. Half of the time whoever is reached is told.
    pub(crate) fn break_stream(&mut self, number: u64, events: &mut Events, one: Who, other: Who) {
        let Some(stream) = self.streams.get_mut(&number).filter(|stream| !stream.broken) else { return };
        stream.broken = true;
        self.counts.add(FaultKind::StreamBroken);
        for (from, to) in [(one, other), (other, one)] {
            if self.dice.permille(500) {
                let message = Message::StreamEnd { stream: number, code: None };
                let span = Duration::from_micros(self.dice.within(100, 50_000));
                events.after(span, Event::Arrives(Box::new(Letter { from, to, message })));
            }
        }
    }

    /// Whether a message that arrives now is lost after all.
    pub(crate) fn is_lost(&mut self, letter: &Letter, now: MonoTime) -> bool {
        let lost = match letter.message.stream() {
            // The news that it is broken is no message on it.
            Some(_) if matches!(letter.message, Message::StreamEnd { code: None, .. }) => false,
            Some(stream) => self.streams.get(&stream).is_none_or(|stream| stream.broken),
            None => self.cut_until(letter.from, letter.to, now).is_some(),
        };
        if lost {
            self.counts.add(FaultKind::Lost);
        }
        lost
    }
}
