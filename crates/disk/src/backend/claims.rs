//! [`WriteClaims`]: prevents concurrent writes of the same record.
//!
//! The second writer of a record waits until the first one has ended, and only then learns whether the record is on the
//! disk: an earlier result could refer to a write that fails later. To avoid deadlocks, a writer does not wait while it
//! holds claims: records claimed by other writers are deferred until its own records are done.

use moontide_rt::collections::HashSet;
use moontide_rt::sync::{Condvar, Mutex};
use moontide_types::ObjectId;

use crate::backend::RecordId;

/// Records that are being written.
#[derive(Debug, Default)]
pub(super) struct WriteClaims {
    names: Mutex<HashSet<RecordId>>,
    released: Condvar,
}

/// Exclusive right to write some records.
#[derive(Debug)]
pub(super) struct WriteClaim<'c> {
    claims: &'c WriteClaims,
    names: Vec<RecordId>,
}

impl WriteClaims {
    /// Calls `write` with the indices of all names, each name in one writer at a time: first those that no other writer
    /// has claimed, then the others.
    pub(super) fn write_each(&self, names: &[RecordId], mut write: impl FnMut(&[usize])) {
        let mut left: Vec<usize> = (0..names.len()).collect();
        while let Some(&first) = left.first() {
            let (own, others, claim) = self.claim(names, &left);
            if own.is_empty() {
                self.wait(&names[first]);
                continue;
            }
            write(&own);
            drop(claim);
            left = others;
        }
    }

    /// Returns all objects of which a record is being written.
    pub(super) fn objects(&self) -> HashSet<ObjectId> {
        self.names.lock().iter().map(|name| name.id).collect()
    }

    fn claim(&self, names: &[RecordId], indices: &[usize]) -> (Vec<usize>, Vec<usize>, WriteClaim<'_>) {
        let mut claimed = self.names.lock();
        let (own, others): (Vec<_>, Vec<_>) =
            indices.iter().partition(|&&index| claimed.insert(names[index]));
        let names = own.iter().map(|&index: &usize| names[index]).collect();
        (own, others, WriteClaim { claims: self, names })
    }

    fn wait(&self, name: &RecordId) {
        let mut claimed = self.names.lock();
        while claimed.contains(name) {
            self.released.wait(&mut claimed);
        }
    }
}

impl Drop for WriteClaim<'_> {
    fn drop(&mut self) {
        let mut claimed = self.claims.names.lock();
        for name in &self.names {
            claimed.remove(name);
        }
        self.claims.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use moontide_types::Epoch;

    use super::*;

    fn name(number: u64) -> RecordId {
        RecordId { id: crate::samples::id(number), version: Epoch::ZERO, stripe: 0 }
    }

    #[test]
    fn duplicate_records_in_a_batch_are_written_serially() {
        let claims = WriteClaims::default();
        let names = [1, 2, 1, 1, 3].map(name);
        let mut rounds = vec![];
        claims.write_each(&names, |indices| {
            assert!(claims.objects().contains(&names[indices[0]].id));
            rounds.push(indices.to_vec());
        });
        assert_eq!(rounds, [vec![0, 1, 4], vec![2], vec![3]]);
        assert!(claims.objects().is_empty());
    }

    #[test]
    fn writers_of_same_records_exclude_each_other_without_deadlock() {
        let claims = WriteClaims::default();
        let inside = Mutex::new(HashSet::new());
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (claims, inside) = (&claims, &inside);
                scope.spawn(move || {
                    for round in 0..200 {
                        let names: Vec<_> =
                            (0..4).map(|number| name((number + thread + round) % 5)).collect();
                        claims.write_each(&names, |indices| {
                            for &index in indices {
                                assert!(inside.lock().insert(names[index]), "two writers of the same record");
                            }
                            std::thread::yield_now();
                            for index in indices {
                                inside.lock().remove(&names[*index]);
                            }
                        });
                    }
                });
            }
        });
    }
}
