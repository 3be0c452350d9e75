//! [`Sessions`]: the live nodes of a master. A session ends when its node opens a new one or sends no heartbeat for the
//! TTL.

use std::time::Duration;

use hashbrown::HashMap;
use moontide_types::{MonoTime, NodeId, SessionId, Term};

/// Configuration of sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionConfig {
    /// Time without a heartbeat after which a session ends.
    pub ttl: Duration,
}

impl Default for SessionConfig {
    /// 10 s: long enough for a node whose process is briefly stopped, short enough that lookups soon stop returning
    /// locations on a dead node.
    fn default() -> SessionConfig {
        SessionConfig { ttl: Duration::from_secs(10) }
    }
}

/// A session and its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// Session id; its upper bits are the master's term.
    pub session: SessionId,
    /// Node that opened the session.
    pub node: NodeId,
    /// Random number that the node draws at every start.
    pub boot_id: u64,
    /// Time of the last heartbeat.
    pub last_heartbeat: MonoTime,
}

/// Result of a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum HeartbeatOutcome {
    /// The session continues.
    Alive,
    /// The session does not exist: the node must open a new one.
    Stale,
}

/// Sessions of a master. Session ids begin with its term, so that ids of different masters never collide.
#[derive(Debug)]
pub struct Sessions {
    config: SessionConfig,
    term: Term,
    opened: u64,
    by_node: HashMap<NodeId, SessionInfo>,
    by_session: HashMap<SessionId, NodeId>,
}

impl Sessions {
    /// Creates an empty set of sessions for a master of this term.
    pub fn new(config: SessionConfig, term: Term) -> Sessions {
        Sessions { config, term, opened: 0, by_node: HashMap::new(), by_session: HashMap::new() }
    }

    /// Time without a heartbeat after which a session ends.
    pub fn ttl(&self) -> Duration {
        self.config.ttl
    }

    /// Opens a session. The second part of the result is the node's earlier session, which ends by this call.
    pub fn open(&mut self, now: MonoTime, node: NodeId, boot: u64) -> (SessionId, Option<SessionId>) {
        self.opened += 1;
        let session = SessionId(u64::from(self.term.get()) << 40 | self.opened);
        let info = SessionInfo { session, node, boot_id: boot, last_heartbeat: now };
        let earlier = self.by_node.insert(node, info).map(|earlier| earlier.session);
        if let Some(earlier) = earlier {
            self.by_session.remove(&earlier);
        }
        self.by_session.insert(session, node);
        (session, earlier)
    }

    /// Returns the node of a live session.
    pub fn node(&self, session: SessionId) -> Option<NodeId> {
        self.by_session.get(&session).copied()
    }

    /// Records a heartbeat.
    pub fn heartbeat(&mut self, now: MonoTime, session: SessionId) -> HeartbeatOutcome {
        let Some(node) = self.by_session.get(&session) else { return HeartbeatOutcome::Stale };
        let info = self.by_node.get_mut(node).expect("both maps hold the same sessions");
        info.last_heartbeat = info.last_heartbeat.max(now);
        HeartbeatOutcome::Alive
    }

    /// Ends one session, even if its heartbeats still arrive.
    pub fn close(&mut self, session: SessionId) -> Option<NodeId> {
        let node = self.by_session.remove(&session)?;
        self.by_node.remove(&node);
        Some(node)
    }

    /// Ends the sessions whose last heartbeat is older than the TTL. Scans all sessions: there is one per node.
    pub fn expire(&mut self, now: MonoTime) -> Vec<SessionInfo> {
        let ttl = self.config.ttl;
        let mut ended: Vec<SessionInfo> =
            self.by_node.values().copied().filter(|info| now.since(info.last_heartbeat) > ttl).collect();
        ended.sort_by_key(|info| info.session); // the order of a hash map is not deterministic
        for info in &ended {
            self.by_node.remove(&info.node);
            self.by_session.remove(&info.session);
        }
        ended
    }

    /// Returns all sessions, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &SessionInfo> {
        self.by_node.values()
    }

    /// Number of sessions.
    pub fn len(&self) -> usize {
        self.by_node.len()
    }

    /// Whether there are no sessions.
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
    fn session_ends_by_timeout_or_newer_session() {
        let mut sessions = Sessions::new(SessionConfig::default(), Term::new(3).unwrap());
        let (first, none) = sessions.open(at(0), NodeId(1), 7);
        let (other, _) = sessions.open(at(0), NodeId(2), 8);
        assert_eq!(none, None);
        assert_eq!(first.0 >> 40, 3);
        assert_eq!(sessions.heartbeat(at(9), first), HeartbeatOutcome::Alive);
        let ended = sessions.expire(at(11));
        assert_eq!(ended.iter().map(|e| e.session).collect::<Vec<_>>(), [other]);
        assert_eq!(sessions.heartbeat(at(11), other), HeartbeatOutcome::Stale);
        let (second, replaced) = sessions.open(at(12), NodeId(1), 9);
        assert_eq!(replaced, Some(first));
        assert_eq!((sessions.node(first), sessions.node(second)), (None, Some(NodeId(1))));
        assert_eq!(sessions.close(second), Some(NodeId(1)));
        assert!(sessions.is_empty());
    }
}
