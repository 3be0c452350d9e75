//! Liveness table: (generation, pid, heartbeat) of each member, in shared memory.
//!
//! Used by processes of one host that must detect each other's failure: a node and its clients, the ranks of a
//! symmetric heap, the expert exchange. The index of a row is the member's number. A member writes its own row; every
//! process may read any row. An open connection proves nothing, because a killed process with large mappings takes
//! long to exit; heartbeats and timeouts decide.
//!
//! ```text
//!   row (64 B):   generation:32 │ pid:32     heartbeat: ns of CLOCK_MONOTONIC     zeros
//!                                 └ 0: the row is empty
//! ```
//!
//! Invariants: the generation grows with every join and never decreases. A dead member is evicted before another one
//! joins, so a heartbeat that is newer than a member is never taken for that member's.

use std::time::Duration;

use moontide_rt::sync::{AtomicU64, Ordering};
use moontide_rt::{mutation_enabled, weakened};
use moontide_types::{Generation, MonoTime};

use crate::mutation::Mutation;

/// Row of one member.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct LivenessRow {
    member: AtomicU64,
    heartbeat_ns: AtomicU64,
    _reserved: [u64; 6],
}

/// State of a row's member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// The row is empty, or its member is changing.
    Absent,
    /// The row has a member with a recent heartbeat.
    Alive(MemberId),
    /// The row has a member whose last heartbeat is this old, which exceeds the limit.
    Silent(MemberId, Duration),
}

/// Member of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberId {
    /// Incarnation: number of joins of this row, from 1.
    pub generation: Generation,
    /// Process id; 0 in an empty row.
    pub pid: u32,
}

/// The row does not belong to the caller: it is empty or has the given other member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("liveness row belongs to generation {}, process {}", .0.generation, .0.pid)]
pub struct NotOwner(pub MemberId);

impl MemberId {
    fn bits(self) -> u64 {
        self.generation.0 << 32 | u64::from(self.pid)
    }

    fn from_bits(bits: u64) -> MemberId {
        MemberId { generation: Generation(bits >> 32), pid: bits as u32 }
    }
}

impl LivenessRow {
    /// Creates an empty row outside of shared memory. Zeroed memory is an empty row, too.
    pub fn vacant() -> LivenessRow {
        LivenessRow { member: AtomicU64::new(0), heartbeat_ns: AtomicU64::new(0), _reserved: [0; 6] }
    }

    /// Joins the row if it is empty.
    ///
    /// # Panics
    /// If `pid` is 0, or after 2³² joins.
    pub fn join(&self, pid: u32, now: MonoTime) -> Result<MemberId, NotOwner> {
        assert_ne!(pid, 0, "pid 0 marks an empty row");
        let seen = self.member.load(Ordering::Acquire);
        let last = MemberId::from_bits(seen);
        if last.pid != 0 {
            return Err(NotOwner(last));
        }
        assert!(last.generation.0 < u32::MAX.into(), "liveness row has been used 2³² times");
        let mine = MemberId { generation: Generation(last.generation.0 + 1), pid };
        // The heartbeat comes before the member id, so that no reader sees the id with an old heartbeat.
        if !mutation_enabled(Mutation::JoinWithoutHeartbeat) {
            self.store_heartbeat(now);
        }
        match self.member.compare_exchange(seen, mine.bits(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(mine),
            Err(other) => Err(NotOwner(MemberId::from_bits(other))),
        }
    }

    /// Stores a heartbeat of `mine`.
    pub fn heartbeat(&self, mine: MemberId, now: MonoTime) -> Result<(), NotOwner> {
        let seen = MemberId::from_bits(self.member.load(Ordering::Acquire));
        if seen != mine {
            return Err(NotOwner(seen));
        }
        // A member that was stopped between the check and here, and evicted meanwhile, may store a heartbeat for its
        // successor. The time is a true one from the past, so at most the successor's own last heartbeat is repeated.
        self.store_heartbeat(now);
        Ok(())
    }

    /// Evicts a member: the member itself when it leaves, or the process that saw a dead member's process exit.
    pub fn evict(&self, member: MemberId) -> Result<(), NotOwner> {
        let empty = MemberId { pid: 0, ..member };
        self.member
            .compare_exchange(member.bits(), empty.bits(), Ordering::AcqRel, Ordering::Acquire)
            .map(|_| ())
            .map_err(|seen| NotOwner(MemberId::from_bits(seen)))
    }

    /// Returns the state of the member at `now`, if heartbeats may be up to `ttl` old.
    pub fn read(&self, now: MonoTime, ttl: Duration) -> Liveness {
        let seen = self.member.load(Ordering::Acquire);
        let member = MemberId::from_bits(seen);
        if member.pid == 0 {
            return Liveness::Absent;
        }
        // Acquire; pairs with the Release in `store_heartbeat`: a reader that sees a successor's heartbeat sees below
        // that the member changed.
        let order = weakened(Mutation::RelaxedHeartbeatRead, Ordering::Acquire);
        let heartbeat = MonoTime(self.heartbeat_ns.load(order));
        if !mutation_enabled(Mutation::RowReadOnce) && self.member.load(Ordering::Relaxed) != seen {
            return Liveness::Absent;
        }
        let silent = now.since(heartbeat);
        if silent <= ttl { Liveness::Alive(member) } else { Liveness::Silent(member, silent) }
    }

    /// Returns the time of the last heartbeat.
    #[inline]
    pub fn last_heartbeat(&self) -> MonoTime {
        MonoTime(self.heartbeat_ns.load(Ordering::Acquire))
    }

    fn store_heartbeat(&self, now: MonoTime) {
        if mutation_enabled(Mutation::HeartbeatByStore) {
            return self.heartbeat_ns.store(now.0, Ordering::Release);
        }
        self.heartbeat_ns.fetch_max(now.0, weakened(Mutation::RelaxedHeartbeat, Ordering::Release));
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_nanos(100);

    #[test]
    fn liveness_row_tracks_join_heartbeat_timeout_and_eviction() {
        let row = LivenessRow::vacant();
        assert_eq!(row.read(MonoTime(0), TTL), Liveness::Absent);
        let mine = row.join(42, MonoTime(10)).unwrap();
        assert_eq!(mine, MemberId { generation: Generation(1), pid: 42 });
        assert_eq!(row.read(MonoTime(110), TTL), Liveness::Alive(mine));
        assert_eq!(row.read(MonoTime(111), TTL), Liveness::Silent(mine, Duration::from_nanos(101)));
        assert_eq!(row.join(43, MonoTime(20)), Err(NotOwner(mine)));
        row.heartbeat(mine, MonoTime(200)).unwrap();
        assert_eq!(row.read(MonoTime(300), TTL), Liveness::Alive(mine));
        row.evict(mine).unwrap();
        assert_eq!(row.read(MonoTime(300), TTL), Liveness::Absent);
        assert!(row.heartbeat(mine, MonoTime(301)).is_err() && row.evict(mine).is_err());
        assert_eq!(row.join(44, MonoTime(400)).unwrap().generation, Generation(2));
    }

    #[test]
    fn heartbeat_of_evicted_member_fails() {
        let row = LivenessRow::vacant();
        let dead = row.join(10, MonoTime(0)).unwrap();
        row.evict(dead).unwrap();
        let new = row.join(11, MonoTime(50)).unwrap();
        assert_eq!(row.heartbeat(dead, MonoTime(60)), Err(NotOwner(new)));
        assert_eq!(row.evict(dead), Err(NotOwner(new)));
        row.heartbeat(new, MonoTime(60)).unwrap();
        assert_eq!(row.last_heartbeat(), MonoTime(60));
    }
}
