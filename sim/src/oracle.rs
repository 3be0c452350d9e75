//! [`Oracle`]: checks the guarantees to clients. It sees only calls and results, never internal state, and it alone
//! uses the world time.
//!
//! Guarantees:
//! - A get returns exactly the bytes that were written under this key in some version, or nothing.
//! - A version whose put was acknowledged before a removal was called is not returned by a get that is called after the
//!   removal was acknowledged. `Pending` is not an acknowledgement; `NotFound` is one.
//! - A version whose put was acknowledged before a replacing put was called is not returned by a get that is called
//!   after the replacing put was acknowledged. Here, too, `Pending` is not an acknowledgement of the replacement: the new
//!   version is stored, but a node was unreachable.
//! - A group assigns no epoch twice, and no two masters assign one in the same group and term.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::num::NonZeroU16;

use moontide_types::{Epoch, MonoTime, ObjectId, Term};

/// How a violation begins that a client has seen: it was given an object that was removed or replaced.
pub(crate) const WRONG_ANSWER: &str = "a get of key";

/// A version, from its reservation on.
#[derive(Clone, Copy, Debug)]
struct Version {
    len: u64,
    token: u64,
    acked: Option<MonoTime>,
    removed: Option<MonoTime>,
    replaced: Option<MonoTime>,
}

/// Totals of the operations of all clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpTotals {
    /// Operations started.
    pub ops: u64,
    /// Puts acknowledged.
    pub puts: u64,
    /// Acknowledged replacements: no older version may be read.
    pub replacements: u64,
    /// Puts of existing objects.
    pub existed: u64,
    /// Removals acknowledged.
    pub removals: u64,
    /// Removals and replacements that returned `Pending`.
    pub pending: u64,
    /// Gets that returned bytes.
    pub hits: u64,
    /// Gets that returned nothing.
    pub misses: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Reads that started from a cached location.
    pub remembered: u64,
    /// Hedges.
    pub hedges: u64,
    /// Reads served from a disk.
    pub from_disk: u64,
}

impl OpTotals {
    /// Adds the totals of another run.
    pub fn merge(&mut self, other: &OpTotals) {
        self.ops += other.ops;
        self.puts += other.puts;
        self.replacements += other.replacements;
        self.existed += other.existed;
        self.removals += other.removals;
        self.pending += other.pending;
        self.hits += other.hits;
        self.misses += other.misses;
        self.failed += other.failed;
        self.remembered += other.remembered;
        self.hedges += other.hedges;
        self.from_disk += other.from_disk;
    }
}

/// State of all keys, as clients may observe it.
#[derive(Debug)]
pub(crate) struct Oracle {
    groups: NonZeroU16,
    given: HashSet<(u16, Epoch)>,
    /// Process that assigned epochs in a group and term.
    givers: HashMap<(u16, Term), (usize, u32)>,
    /// By key.
    versions: HashMap<usize, BTreeMap<Epoch, Version>>,
    pub(crate) tally: OpTotals,
}

/// The bytes of a put.
pub(crate) fn pattern(token: u64, len: u64) -> Vec<u8> {
    let mut state = token | 1;
    let mut bytes = Vec::with_capacity(len as usize + 8);
    while (bytes.len() as u64) < len {
        state = state.wrapping_mul(0x2545_f491_4f6c_dd1d).rotate_left(17) ^ token;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len as usize);
    bytes
}

impl Oracle {
    pub(crate) fn new(groups: u16) -> Oracle {
        Oracle {
            groups: NonZeroU16::new(groups).expect("a cluster has a group"),
            given: HashSet::new(),
            givers: HashMap::new(),
            versions: HashMap::new(),
            tally: OpTotals::default(),
        }
    }

    /// Checks the epoch of a reservation.
    pub(crate) fn epoch_given(
        &mut self,
        id: ObjectId,
        epoch: Epoch,
        master: (usize, u32),
    ) -> Result<(), String> {
        let of = (id.group(self.groups).0, epoch.term());
        let first = *self.givers.entry(of).or_insert(master);
        if first != master {
            return Err(format!("masters {first:?} and {master:?} both gave in group and term {of:?}"));
        }
        match self.given.insert((id.group(self.groups).0, epoch)) {
            true => Ok(()),
            false => Err(format!("epoch {epoch} was given twice")),
        }
    }

    /// A client got a reservation and will write these bytes.
    pub(crate) fn granted(&mut self, key: usize, epoch: Epoch, len: u64, token: u64) {
        let version = Version { len, token, acked: None, removed: None, replaced: None };
        self.versions.entry(key).or_default().insert(epoch, version);
    }

    /// The end of a put that was called at `called` was acknowledged. `replaces`: so was the replacement of older versions.
    pub(crate) fn put_acked(
        &mut self,
        key: usize,
        epoch: Epoch,
        replaces: bool,
        called: MonoTime,
        now: MonoTime,
    ) {
        self.tally.puts += 1;
        let versions = self.versions.get_mut(&key).expect("it was granted");
        if replaces {
            self.tally.replacements += 1;
            for version in versions.range_mut(..epoch).map(|(_, version)| version) {
                if version.acked.is_some_and(|acked| acked < called) {
                    version.replaced.get_or_insert(now);
                }
            }
        }
        versions.get_mut(&epoch).expect("it was granted").acked.get_or_insert(now);
    }

    /// A removal that was called at `called` is acknowledged.
    pub(crate) fn removed(&mut self, key: usize, called: MonoTime, now: MonoTime) {
        self.tally.removals += 1;
        for version in self.versions.get_mut(&key).into_iter().flat_map(BTreeMap::values_mut) {
            if version.acked.is_some_and(|acked| acked < called) {
                version.removed.get_or_insert(now);
            }
        }
    }

    /// A get that was called at `called` gave these bytes.
    pub(crate) fn read(
        &mut self,
        key: usize,
        epoch: Epoch,
        bytes: &[u8],
        called: MonoTime,
    ) -> Result<(), String> {
        self.tally.hits += 1;
        let version = self.versions.get(&key).and_then(|versions| versions.get(&epoch));
        let version =
            version.ok_or_else(|| format!("a get of key {key} gave {epoch}, which no client wrote"))?;
        if bytes.len() as u64 != version.len || bytes != pattern(version.token, version.len) {
            return Err(format!("a get of key {key} gave {} wrong bytes for {epoch}", bytes.len()));
        }
        let before = |time: Option<MonoTime>| time.filter(|&time| time < called);
        if let Some(removed) = before(version.removed) {
            return Err(format!(
                "{WRONG_ANSWER} {key} called at {called:?} gave {epoch}, removed at {removed:?}"
            ));
        }
        if let Some(replaced) = before(version.replaced) {
            return Err(format!(
                "{WRONG_ANSWER} {key} called at {called:?} gave {epoch}, replaced at {replaced:?}"
            ));
        }
        Ok(())
    }
}
