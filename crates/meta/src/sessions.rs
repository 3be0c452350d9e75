//! [`Sessions`]: the live nodes of a master. A session ends when its node opens a new one or sends no heartbeat for the
//! TTL.
//!
//! A session belongs to the process that opened it. While it has a stream, no other process can take its node away.

use std::time::Duration;

use hashbrown::HashMap;
use moontide_types::{MonoTime, NodeId, SessionId, Term};

/// Configuration of sessions.
#[derive(Clone, Copy)]
pub struct SessionConfig {
    /// Time without a heartbeat after which a session ends. 10 s by default: long enough for a node whose process is
    /// briefly stopped, short enough that lookups soon stop returning locations on a dead node.
    pub ttl: Duration,
    /// Secret from which session ids are computed.
    pub secret: [u8; 32],
}

/// Omits the secret.
impl std::fmt::Debug for SessionConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionConfig").field("ttl", &self.ttl).finish_non_exhaustive()
    }
}

/// A session and its node.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SessionInfo {
    /// Session id.
    pub session: SessionId,
    /// Number of the session at this master: the newer session of a node has the larger one.
    pub number: u64,
    /// Node that opened the session.
    pub node: NodeId,
    /// Random number that the node draws at every start. Only the node and its masters know it.
    pub boot_id: u64,
    /// Time of the last heartbeat.
    pub last_heartbeat: MonoTime,
}

/// Omits the boot id.
impl std::fmt::Debug for SessionInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let SessionInfo { session, number, node, last_heartbeat, .. } = self;
        let mut shown = f.debug_struct("SessionInfo");
        shown.field("session", session).field("number", number).field("node", node);
        shown.field("last_heartbeat", last_heartbeat).finish_non_exhaustive()
    }
}

/// An opened session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenedSession {
    /// Session id.
    pub session: SessionId,
    /// Number of the session at this master.
    pub number: u64,
    /// Earlier session of the node, which has ended by this.
    pub earlier: Option<SessionId>,
}

/// Error: another process has a session of this node, with a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("another process is registered as this node")]
pub struct NodeTaken;

/// Result of a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum HeartbeatOutcome {
    /// The session continues.
    Alive,
    /// The session does not exist: the node must open a new one.
    Stale,
}

/// Sessions of a master.
#[derive(Debug)]
pub struct Sessions {
    config: SessionConfig,
    term: Term,
    opened: u64,
    by_node: HashMap<NodeId, SessionInfo>,
    by_session: HashMap<SessionId, NodeId>,
}

impl Sessions {
    /// Creates an empty set of sessions for the master with this id.
    pub fn new(config: SessionConfig, term: Term) -> Sessions {
        Sessions { config, term, opened: 0, by_node: HashMap::new(), by_session: HashMap::new() }
    }

    /// Time without a heartbeat after which a session ends.
    pub fn ttl(&self) -> Duration {
        self.config.ttl
    }

    /// Opens a session for the process with this boot id. The node's earlier session ends. Fails if that belongs to another
    /// process, has a stream, and its heartbeats arrive.
    pub fn open(
        &mut self,
        now: MonoTime,
        node: NodeId,
        boot_id: u64,
        has_stream: impl FnOnce(SessionId) -> bool,
    ) -> Result<OpenedSession, NodeTaken> {
        let earlier = self.by_node.get(&node);
        let is_taken = earlier.is_some_and(|earlier| {
            earlier.boot_id != boot_id
                && now.since(earlier.last_heartbeat) <= self.config.ttl
                && has_stream(earlier.session)
                && !moontide_rt::mutation_enabled("node-taken-over")
        });
        if is_taken {
            return Err(NodeTaken);
        }
        let session = self.next_id();
        let number = self.opened;
        let info = SessionInfo { session, number, node, boot_id, last_heartbeat: now };
        let earlier = self.by_node.insert(node, info).map(|earlier| earlier.session);
        if let Some(earlier) = earlier {
            self.by_session.remove(&earlier);
        }
        self.by_session.insert(session, node);
        Ok(OpenedSession { session, number, earlier })
    }

    /// Returns an id that no session has. 0 means no session.
    fn next_id(&mut self) -> SessionId {
        loop {
            self.opened += 1;
            let session = SessionId::keyed(&self.config.secret, self.term, self.opened);
            if session != SessionId(0) && !self.by_session.contains_key(&session) {
                return session;
            }
        }
    }

    /// Returns the live session of a node.
    pub fn of_node(&self, node: NodeId) -> Option<&SessionInfo> {
        self.by_node.get(&node)
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
        ended.sort_by_key(|info| info.number); // the order of a hash map is not deterministic
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

    fn sessions(term: u32) -> Sessions {
        let config = SessionConfig { ttl: Duration::from_secs(10), secret: [3; 32] };
        Sessions::new(config, Term::new(term).unwrap())
    }

    #[test]
    fn session_ends_by_timeout_or_newer_session() {
        let mut sessions = sessions(3);
        let first = sessions.open(at(0), NodeId(1), 7, |_| unreachable!("it has no session")).unwrap();
        let other = sessions.open(at(0), NodeId(2), 8, |_| unreachable!("it has no session")).unwrap();
        assert_eq!((first.earlier, first.number, other.number), (None, 1, 2));
        assert_eq!(sessions.heartbeat(at(9), first.session), HeartbeatOutcome::Alive);
        let ended = sessions.expire(at(11));
        assert_eq!(ended.iter().map(|e| e.session).collect::<Vec<_>>(), [other.session]);
        assert_eq!(sessions.heartbeat(at(11), other.session), HeartbeatOutcome::Stale);
        let second = sessions.open(at(12), NodeId(1), 9, |_| false).unwrap();
        assert_eq!(second.earlier, Some(first.session));
        let nodes = (sessions.node(first.session), sessions.node(second.session));
        assert_eq!(nodes, (None, Some(NodeId(1))));
        assert_eq!(sessions.close(second.session), Some(NodeId(1)));
        assert!(sessions.is_empty());
    }

    #[test]
    fn node_with_stream_is_kept_from_other_processes_until_its_session_ends() {
        let mut sessions = sessions(3);
        let first = sessions.open(at(0), NodeId(1), 7, |_| false).unwrap();
        assert_eq!(sessions.open(at(1), NodeId(1), 8, |_| true), Err(NodeTaken));
        assert_eq!(sessions.node(first.session), Some(NodeId(1)), "the refusal changes nothing");
        let again = sessions.open(at(2), NodeId(1), 7, |_| true).unwrap();
        assert_eq!(again.earlier, Some(first.session), "the same process replaces its session");
        // No heartbeat: the session is over, although no tick has removed it.
        assert_eq!(sessions.open(at(12), NodeId(1), 8, |_| true), Err(NodeTaken));
        assert_eq!(sessions.open(at(13), NodeId(1), 8, |_| true).unwrap().earlier, Some(again.session));
        // The stream of a killed process ends at once.
        assert!(sessions.open(at(14), NodeId(1), 9, |_| false).is_ok());
    }

    #[test]
    fn session_ids_differ_by_secret_master_and_number() {
        let mut ids = vec![];
        for (secret, term) in [(1, 1), (1, 2), (2, 1)] {
            let config = SessionConfig { ttl: Duration::from_secs(10), secret: [secret; 32] };
            let mut sessions = Sessions::new(config, Term::new(term).unwrap());
            ids.extend((0..100).map(|_| sessions.open(at(0), NodeId(1), 7, |_| true).unwrap().session.0));
        }
        // About half of the bits differ between any two neighbours.
        let differing: u32 = ids.windows(2).map(|pair| (pair[0] ^ pair[1]).count_ones()).sum();
        let mean = f64::from(differing) / (ids.len() - 1) as f64;
        assert!((28.0..36.0).contains(&mean), "{mean} of 64 bits differ");
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 300);
    }

    #[test]
    fn texts_contain_neither_session_id_nor_boot_id() {
        let mut sessions = sessions(3);
        let opened = sessions.open(at(0), NodeId(1), 0xb00d_b00d_b00d, |_| false).unwrap();
        let text = format!("{sessions:?} {opened:?} {}", opened.session);
        for hidden in [opened.session.0, 0xb00d_b00d_b00d] {
            assert!(!text.contains(&hidden.to_string()) && !text.contains(&format!("{hidden:x}")), "{text}");
        }
        assert!(!text.contains("3, 3, 3"), "the secret: {text}");
    }
}
