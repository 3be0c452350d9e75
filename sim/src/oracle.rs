//! [`Oracle`]: what was promised to clients. It sees calls and answers only, never the inside of anything.
//!
//! Promises:
//! - a get gives the bytes that were written under this key in the version that it names, and nothing else;
//! - a version whose put was acknowledged before a removal was called is not given by a get that is called after the
//!   removal was acknowledged;
//! - no epoch is given twice.

use std::collections::{BTreeMap, HashMap};

use moontide_types::{Epoch, MonoTime};

/// A version, from its reservation on.
#[derive(Clone, Copy, Debug)]
struct Version {
    key: usize,
    len: u64,
    token: u64,
    acked: Option<MonoTime>,
    removed: Option<MonoTime>,
}

/// Everything that was promised.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    versions: HashMap<Epoch, Version>,
    by_key: BTreeMap<usize, Vec<Epoch>>,
    pub(crate) puts: u64,
    pub(crate) removals: u64,
    pub(crate) hits: u64,
    pub(crate) misses: u64,
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
    /// A client got a reservation and will write these bytes.
    pub(crate) fn granted(&mut self, epoch: Epoch, key: usize, len: u64, token: u64) -> Result<(), String> {
        let version = Version { key, len, token, acked: None, removed: None };
        match self.versions.insert(epoch, version) {
            Some(earlier) => Err(format!("epoch {epoch} was given twice, before for {earlier:?}")),
            None => {
                self.by_key.entry(key).or_default().push(epoch);
                Ok(())
            }
        }
    }

    /// The put's end was acknowledged.
    pub(crate) fn put_acked(&mut self, epoch: Epoch, now: MonoTime) {
        let version = self.versions.get_mut(&epoch).expect("it was granted");
        if version.acked.is_none() {
            version.acked = Some(now);
            self.puts += 1;
        }
    }

    /// A removal that was called at `called` is acknowledged.
    pub(crate) fn removed(&mut self, key: usize, called: MonoTime, now: MonoTime) {
        self.removals += 1;
        for epoch in self.by_key.get(&key).into_iter().flatten() {
            let version = self.versions.get_mut(epoch).expect("it was granted");
            if version.acked.is_some_and(|acked| acked < called) && version.removed.is_none() {
                version.removed = Some(now);
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
        self.hits += 1;
        let version = self.versions.get(&epoch).ok_or_else(|| format!("epoch {epoch} was never granted"))?;
        if version.key != key {
            return Err(format!("a get of key {key} gave {epoch} of key {}", version.key));
        }
        if bytes != pattern(version.token, version.len) {
            return Err(format!("a get of key {key} gave {} wrong bytes for {epoch}", bytes.len()));
        }
        if let Some(removed) = version.removed.filter(|&removed| removed < called) {
            return Err(format!(
                "a get of key {key} called at {called:?} gave {epoch}, removed at {removed:?}"
            ));
        }
        Ok(())
    }

    /// A get found nothing.
    pub(crate) fn missed(&mut self) {
        self.misses += 1;
    }
}
