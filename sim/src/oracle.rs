//! [`Oracle`]: what was promised to clients. It sees calls and answers only, never the inside of anything, and it alone
//! knows what time it really is.
//!
//! Promises:
//! - a get gives exactly the bytes that were written under this key in some version, or nothing;
//! - a version whose put was acknowledged before a removal was called is not given by a get that is called after the
//!   removal was acknowledged (`Pending` is no acknowledgement; that there was nothing to remove is one);
//! - a version whose put was acknowledged before a replacing put was called is not given by a get that is called after
//!   the replacing put was acknowledged, unless there was trouble while it was replaced: a node without a session in
//!   which it has told everything, or a master that has yet to hear from nodes of the time before it. Nodes that cannot
//!   be reached are not waited for by a put;
//! - no epoch is given twice by a group, and nothing by two masters in the same group and term.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::num::NonZeroU16;
use std::time::Duration;

use moontide_types::{Epoch, MonoTime, ObjectId, Term};

/// Trouble is noticed now and then: what was noticed so short a time ago may be there still.
const TROUBLE_LASTS: Duration = Duration::from_secs(1);

/// A version, from its reservation on.
#[derive(Clone, Copy, Debug)]
struct Version {
    len: u64,
    token: u64,
    acked: Option<MonoTime>,
    removed: Option<MonoTime>,
    replaced: Option<MonoTime>,
}

/// What clients have seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Operations begun.
    pub ops: u64,
    /// Puts acknowledged.
    pub puts: u64,
    /// Of these, those that replaced something and were checked for it.
    pub replacements: u64,
    /// Puts that found the object there.
    pub existed: u64,
    /// Removals acknowledged.
    pub removals: u64,
    /// Removals of which the answer was `Pending`.
    pub pending: u64,
    /// Gets that gave bytes.
    pub hits: u64,
    /// Gets that found nothing.
    pub misses: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Reads from a place that was remembered.
    pub remembered: u64,
    /// Second replicas asked beside a slow one.
    pub hedges: u64,
    /// Reads that a disk answered.
    pub from_disk: u64,
}

impl Tally {
    /// Those of another run, too.
    pub fn merge(&mut self, other: &Tally) {
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

/// Everything that was promised.
#[derive(Debug)]
pub(crate) struct Oracle {
    groups: NonZeroU16,
    given: HashSet<(u16, Epoch)>,
    /// Which process gave something in a group and term.
    givers: HashMap<(u16, Term), (usize, u32)>,
    /// By key.
    versions: HashMap<usize, BTreeMap<Epoch, Version>>,
    /// When there was trouble the last time.
    trouble: MonoTime,
    pub(crate) tally: Tally,
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
            trouble: MonoTime(0),
            tally: Tally::default(),
        }
    }

    /// Something is out of order now.
    pub(crate) fn trouble(&mut self, now: MonoTime) {
        self.trouble = self.trouble.max(now);
    }

    /// A master gives a reservation.
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

    /// The end of a put that was called at `called` was acknowledged.
    pub(crate) fn put_acked(
        &mut self,
        key: usize,
        epoch: Epoch,
        upsert: bool,
        called: MonoTime,
        now: MonoTime,
    ) {
        self.tally.puts += 1;
        let versions = self.versions.get_mut(&key).expect("it was granted");
        if upsert && self.trouble.after(TROUBLE_LASTS) < called {
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
            version.ok_or_else(|| format!("a get of key {key} gave {epoch}, which nobody wrote"))?;
        if bytes.len() as u64 != version.len || bytes != pattern(version.token, version.len) {
            return Err(format!("a get of key {key} gave {} wrong bytes for {epoch}", bytes.len()));
        }
        let before = |time: Option<MonoTime>| time.filter(|&time| time < called);
        if let Some(removed) = before(version.removed) {
            return Err(format!(
                "a get of key {key} called at {called:?} gave {epoch}, removed at {removed:?}"
            ));
        }
        if let Some(replaced) = before(version.replaced) {
            return Err(format!(
                "a get of key {key} called at {called:?} gave {epoch}, replaced at {replaced:?}"
            ));
        }
        Ok(())
    }
}
