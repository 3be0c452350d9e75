//! [`Sessions`]: which nodes live. A session ends when its node opens a new one or has not been heard of for too long.

use std::time::Duration;

use hashbrown::HashMap;
use moontide_types::{MonoTime, NodeId, SessionId, Term};

/// How long a session lasts without a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionConfig {
    /// The time.
    pub ttl: Duration,
}

impl Default for SessionConfig {
    /// Long enough for a node whose process is stopped for a moment, short enough that readers soon stop being sent
    /// to a dead one.
    fn default() -> SessionConfig {
        SessionConfig { ttl: Duration::from_secs(10) }
    }
}

/// A session and its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// The session.
    pub session: SessionId,
    /// The node.
    pub node: NodeId,
    /// Drawn by the node at every start.
    pub boot: u64,
    /// When it was heard of last.
    pub heard: MonoTime,
}

/// What a heartbeat met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Beat {
    /// The session lives on.
    Alive,
    /// There is no such session: the node must open a new one.
    Stale,
}

/// The sessions of a master. Their numbers begin with its term, so that no other master's can be taken for one.
#[derive(Debug)]
pub struct Sessions {
    config: SessionConfig,
    term: Term,
    opened: u64,
    by_node: HashMap<NodeId, SessionInfo>,
    by_session: HashMap<SessionId, NodeId>,
}

impl Sessions {
    /// None so far.
    pub fn new(config: SessionConfig, term: Term) -> Sessions {
        Sessions { config, term, opened: 0, by_node: HashMap::new(), by_session: HashMap::new() }
    }

    /// How long a session lasts without a heartbeat.
    pub fn ttl(&self) -> Duration {
        self.config.ttl
    }

    /// Opens a session. The second part is the node's earlier one, which has ended by this.
    pub fn open(&mut self, now: MonoTime, node: NodeId, boot: u64) -> (SessionId, Option<SessionId>) {
        self.opened += 1;
        let session = SessionId(u64::from(self.term.get()) << 40 | self.opened);
        let info = SessionInfo { session, node, boot, heard: now };
        let earlier = self.by_node.insert(node, info).map(|earlier| earlier.session);
        if let Some(earlier) = earlier {
            self.by_session.remove(&earlier);
        }
        self.by_session.insert(session, node);
        (session, earlier)
    }

    /// The node of a session that lives.
    pub fn node(&self, session: SessionId) -> Option<NodeId> {
        self.by_session.get(&session).copied()
    }

    /// A node was heard of.
    pub fn beat(&mut self, now: MonoTime, session: SessionId) -> Beat {
        let Some(node) = self.by_session.get(&session) else { return Beat::Stale };
        let info = self.by_node.get_mut(node).expect("both maps hold the same sessions");
        info.heard = info.heard.max(now);
        Beat::Alive
    }

    /// Ends one session, whether it is heard of or not.
    pub fn close(&mut self, session: SessionId) -> Option<NodeId> {
        let node = self.by_session.remove(&session)?;
        self.by_node.remove(&node);
        Some(node)
    }

    /// Ends the sessions that were not heard of for too long. Looks at all: there is one per node.
    pub fn expire(&mut self, now: MonoTime) -> Vec<SessionInfo> {
        let ttl = self.config.ttl;
        let mut ended: Vec<SessionInfo> =
            self.by_node.values().copied().filter(|info| now.since(info.heard) > ttl).collect();
        ended.sort_by_key(|info| info.session); // a hash map's order is nobody's business
        for info in &ended {
            self.by_node.remove(&info.node);
            self.by_session.remove(&info.session);
        }
        ended
    }

    /// All sessions, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &SessionInfo> {
        self.by_node.values()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.by_node.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_node.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> MonoTime {
        MonoTime(seconds * 1_000_000_000)
    }

    #[test]
    fn a_session_ends_by_silence_and_by_a_newer_one() {
        let mut sessions = Sessions::new(SessionConfig::default(), Term::new(3).unwrap());
        let (first, none) = sessions.open(at(0), NodeId(1), 7);
        let (other, _) = sessions.open(at(0), NodeId(2), 8);
        assert_eq!(none, None);
        assert_eq!(first.0 >> 40, 3);
        assert_eq!(sessions.beat(at(9), first), Beat::Alive);
        let ended = sessions.expire(at(11));
        assert_eq!(ended.iter().map(|e| e.session).collect::<Vec<_>>(), [other]);
        assert_eq!(sessions.beat(at(11), other), Beat::Stale);
        let (second, replaced) = sessions.open(at(12), NodeId(1), 9);
        assert_eq!(replaced, Some(first));
        assert_eq!((sessions.node(first), sessions.node(second)), (None, Some(NodeId(1))));
        assert_eq!(sessions.close(second), Some(NodeId(1)));
        assert!(sessions.is_empty());
    }
}
