//! Who is alive: a table of (member, generation, heartbeat) in shared memory.
//!
//! Used wherever processes of one host must judge each other: a node and its clients, the ranks of a
//! symmetric heap, the expert exchange. The row's place is the member's number. A member writes its own row;
//! anyone may read any row. That a connection is open says nothing, because a killed process with large
//! mappings takes its time to vanish; beats and deadlines decide.
//!
//! ```text
//!   row (64 B):   generation:32 │ pid:32     beat: ns of CLOCK_MONOTONIC     zeros
//!                                 └ 0: nobody is in the row
//! ```
//!
//! Invariants: the generation grows with every join and never falls; a dead occupant is put out before
//! another one comes in, so a beat that is newer than an occupant is never taken for that occupant's.

use std::time::Duration;

use moontide_types::{Generation, MonoTime};

use crate::planted::{Bug, planted, weakened};
use crate::sync::{AtomicU64, Ordering};

/// One member's row.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Row {
    occupant: AtomicU64,
    beat_ns: AtomicU64,
    _spare: [u64; 6],
}

/// What a row says about its member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// Nobody is in the row, or it is changing hands right now.
    Absent,
    /// Somebody is in it and has shown a sign of life recently enough.
    Alive(Occupant),
    /// Somebody is in it but has been silent for this long, which is too long.
    Silent(Occupant, Duration),
}

/// Who is in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupant {
    /// Which incarnation of the member.
    pub generation: Generation,
    /// Its process.
    pub pid: u32,
}

/// The row is not the caller's: somebody else is in it, or nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the row is at generation {}, process {}", .0.generation, .0.pid)]
pub struct NotYours(pub Occupant);

impl Occupant {
    fn bits(self) -> u64 {
        self.generation.0 << 32 | u64::from(self.pid)
    }

    fn from_bits(bits: u64) -> Occupant {
        Occupant { generation: Generation(bits >> 32), pid: bits as u32 }
    }
}

impl Row {
    /// An empty row outside of shared memory. Zeroed memory is one, too.
    pub fn vacant() -> Row {
        Row { occupant: AtomicU64::new(0), beat_ns: AtomicU64::new(0), _spare: [0; 6] }
    }

    /// Enters the row if it is empty.
    ///
    /// # Panics
    /// If `pid` is 0, or after 2³² joins.
    pub fn join(&self, pid: u32, now: MonoTime) -> Result<Occupant, NotYours> {
        assert_ne!(pid, 0, "0 means that nobody is there");
        let seen = self.occupant.load(Ordering::Acquire);
        let last = Occupant::from_bits(seen);
        if last.pid != 0 {
            return Err(NotYours(last));
        }
        assert!(last.generation.0 < u32::MAX.into(), "the row has been used 2³² times");
        let mine = Occupant { generation: Generation(last.generation.0 + 1), pid };
        // The beat comes before the name, so that nobody sees the name with an old beat.
        if !planted(Bug::JoinUnsigned) {
            self.sign(now);
        }
        match self.occupant.compare_exchange(seen, mine.bits(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(mine),
            Err(other) => Err(NotYours(Occupant::from_bits(other))),
        }
    }

    /// A sign of life of `mine`.
    pub fn beat(&self, mine: Occupant, now: MonoTime) -> Result<(), NotYours> {
        let seen = Occupant::from_bits(self.occupant.load(Ordering::Acquire));
        if seen != mine {
            return Err(NotYours(seen));
        }
        // Stopped between the check and here, and put out meanwhile, it may sign for its successor. The time
        // is a true one from before, so at most the successor's own last beat is repeated.
        self.sign(now);
        Ok(())
    }

    /// Puts an occupant out: itself when it leaves, or a dead one by whoever saw its process end.
    pub fn put_out(&self, occupant: Occupant) -> Result<(), NotYours> {
        let empty = Occupant { pid: 0, ..occupant };
        self.occupant
            .compare_exchange(occupant.bits(), empty.bits(), Ordering::AcqRel, Ordering::Acquire)
            .map(|_| ())
            .map_err(|seen| NotYours(Occupant::from_bits(seen)))
    }

    /// What the row says at `now`, if a member may be silent for `ttl`.
    pub fn read(&self, now: MonoTime, ttl: Duration) -> Liveness {
        let seen = self.occupant.load(Ordering::Acquire);
        let occupant = Occupant::from_bits(seen);
        if occupant.pid == 0 {
            return Liveness::Absent;
        }
        // Acquire; pairs with the Release in `sign`: whoever sees a successor's beat sees below that the
        // row changed hands.
        let beat = MonoTime(self.beat_ns.load(weakened(Bug::RelaxedBeatRead, Ordering::Acquire)));
        if !planted(Bug::RowReadOnce) && self.occupant.load(Ordering::Relaxed) != seen {
            return Liveness::Absent;
        }
        let silent = now.since(beat);
        if silent <= ttl { Liveness::Alive(occupant) } else { Liveness::Silent(occupant, silent) }
    }

    /// The last sign of life.
    #[inline]
    pub fn last_beat(&self) -> MonoTime {
        MonoTime(self.beat_ns.load(Ordering::Acquire))
    }

    fn sign(&self, now: MonoTime) {
        if planted(Bug::BeatByStore) {
            return self.beat_ns.store(now.0, Ordering::Release);
        }
        self.beat_ns.fetch_max(now.0, weakened(Bug::RelaxedSign, Ordering::Release));
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_nanos(100);

    #[test]
    fn a_member_joins_beats_falls_silent_and_leaves() {
        let row = Row::vacant();
        assert_eq!(row.read(MonoTime(0), TTL), Liveness::Absent);
        let mine = row.join(42, MonoTime(10)).unwrap();
        assert_eq!(mine, Occupant { generation: Generation(1), pid: 42 });
        assert_eq!(row.read(MonoTime(110), TTL), Liveness::Alive(mine));
        assert_eq!(row.read(MonoTime(111), TTL), Liveness::Silent(mine, Duration::from_nanos(101)));
        assert_eq!(row.join(43, MonoTime(20)), Err(NotYours(mine)));
        row.beat(mine, MonoTime(200)).unwrap();
        assert_eq!(row.read(MonoTime(300), TTL), Liveness::Alive(mine));
        row.put_out(mine).unwrap();
        assert_eq!(row.read(MonoTime(300), TTL), Liveness::Absent);
        assert!(row.beat(mine, MonoTime(301)).is_err() && row.put_out(mine).is_err());
        assert_eq!(row.join(44, MonoTime(400)).unwrap().generation, Generation(2));
    }

    #[test]
    fn a_member_that_was_put_out_cannot_beat_any_more() {
        let row = Row::vacant();
        let dead = row.join(10, MonoTime(0)).unwrap();
        row.put_out(dead).unwrap();
        let new = row.join(11, MonoTime(50)).unwrap();
        assert_eq!(row.beat(dead, MonoTime(60)), Err(NotYours(new)));
        assert_eq!(row.put_out(dead), Err(NotYours(new)));
        row.beat(new, MonoTime(60)).unwrap();
        assert_eq!(row.last_beat(), MonoTime(60));
    }
}
