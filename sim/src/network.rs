//! [`Network`]: when a message arrives: late, out of order, twice, or never.
//!
//! Every message is on its own. Where the shipped code relies on an order (the orders and the report of a session), the
//! two ends number what they send and repeat it until it is answered, as a connection does that is opened again after a
//! break.

use moontide_meta::Rng;
use moontide_types::MonoTime;

use crate::event::{Event, Events, Message};

/// How bad the network is, in thousandths.
#[derive(Clone, Copy, Debug)]
pub struct NetworkPlan {
    /// Messages that never arrive.
    pub lost_permille: u32,
    /// Messages that arrive twice.
    pub twice_permille: u32,
    /// Messages that take up to some seconds.
    pub slow_permille: u32,
}

impl Default for NetworkPlan {
    fn default() -> NetworkPlan {
        NetworkPlan { lost_permille: 10, twice_permille: 20, slow_permille: 10 }
    }
}

#[derive(Debug)]
pub(crate) struct Network {
    plan: NetworkPlan,
    rng: Rng,
    /// Nodes that nothing reaches and that reach nobody, until then.
    silent: Vec<MonoTime>,
    pub(crate) lost: u64,
}

impl Network {
    pub(crate) fn new(plan: NetworkPlan, seed: u64, nodes: usize) -> Network {
        Network { plan, rng: Rng::new(seed), silent: vec![MonoTime(0); nodes], lost: 0 }
    }

    /// Cuts a node off.
    pub(crate) fn silence(&mut self, node: usize, until: MonoTime) {
        self.silent[node] = self.silent[node].max(until);
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, events: &mut Events, message: Message) {
        let copies = 1 + usize::from(self.draws(self.plan.twice_permille));
        for _ in 0..copies {
            if self.draws(self.plan.lost_permille) || self.is_cut(&message, events.now()) {
                self.lost += 1;
                continue;
            }
            let slow = self.draws(self.plan.slow_permille);
            let micros = if slow { self.rng.below(3_000_000) } else { 100 + self.rng.below(5_000) };
            let at = MonoTime(events.now().0 + micros as u64 * 1_000);
            events.at(at, Event::Arrives(message.clone()));
        }
    }

    /// Whether a message that arrives now is lost after all.
    pub(crate) fn is_cut(&self, message: &Message, now: MonoTime) -> bool {
        node_of(message).is_some_and(|node| self.silent[node] > now)
    }

    fn draws(&mut self, permille: u32) -> bool {
        self.rng.below(1000) < permille as usize
    }
}

/// The node at one end of a message. A client's answer from a node has left it already.
fn node_of(message: &Message) -> Option<usize> {
    match *message {
        Message::Ask { node, .. }
        | Message::Open { node, .. }
        | Message::Opened { node, .. }
        | Message::Beat { node, .. }
        | Message::Heard { node, .. }
        | Message::Request { node, .. }
        | Message::Answered { node, .. }
        | Message::Order { node, .. }
        | Message::Outcome { node, .. } => Some(node),
        Message::Call { .. } | Message::Answer { .. } | Message::Told { .. } => None,
    }
}
