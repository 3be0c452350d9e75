//! [`Claims`]: who writes which record, so that none is written twice at a time.
//!
//! The second writer of a record waits until the first one has ended, and only then learns whether it is on the disk:
//! told earlier, it would believe in a write that may still fail. Nobody waits while others may wait for it: what
//! somebody else writes is put off until one's own records are done.

use hashbrown::HashSet;
use moontide_types::ObjectId;
use parking_lot::{Condvar, Mutex};

use crate::backend::RecordName;

/// Records that are being written.
#[derive(Debug, Default)]
pub(super) struct Claims {
    names: Mutex<HashSet<RecordName>>,
    released: Condvar,
}

/// The right to write some records.
#[derive(Debug)]
pub(super) struct Claimed<'c> {
    claims: &'c Claims,
    names: Vec<RecordName>,
}

impl Claims {
    /// Runs `write` for the places of all names, each name once at a time: first for those that nobody writes, then for
    /// the others.
    pub(super) fn write_each(&self, names: &[RecordName], mut write: impl FnMut(&[usize])) {
        let mut left: Vec<usize> = (0..names.len()).collect();
        while let Some(&first) = left.first() {
            let (mine, others, claimed) = self.claim(names, &left);
            if mine.is_empty() {
                self.wait(&names[first]);
                continue;
            }
            write(&mine);
            drop(claimed);
            left = others;
        }
    }

    /// All objects of which a record is being written.
    pub(super) fn objects(&self) -> HashSet<ObjectId> {
        self.names.lock().iter().map(|name| name.id).collect()
    }

    fn claim(&self, names: &[RecordName], places: &[usize]) -> (Vec<usize>, Vec<usize>, Claimed<'_>) {
        let mut claimed = self.names.lock();
        let (mine, others): (Vec<_>, Vec<_>) =
            places.iter().partition(|&&place| claimed.insert(names[place]));
        let names = mine.iter().map(|&place: &usize| names[place]).collect();
        (mine, others, Claimed { claims: self, names })
    }

    fn wait(&self, name: &RecordName) {
        let mut claimed = self.names.lock();
        while claimed.contains(name) {
            self.released.wait(&mut claimed);
        }
    }
}

impl Drop for Claimed<'_> {
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

    fn name(number: u64) -> RecordName {
        RecordName { id: crate::samples::id(number), version: Epoch::ZERO, stripe: 0 }
    }

    #[test]
    fn twins_are_written_one_after_the_other() {
        let claims = Claims::default();
        let names = [1, 2, 1, 1, 3].map(name);
        let mut rounds = vec![];
        claims.write_each(&names, |places| {
            assert!(claims.objects().contains(&names[places[0]].id));
            rounds.push(places.to_vec());
        });
        assert_eq!(rounds, [vec![0, 1, 4], vec![2], vec![3]]);
        assert!(claims.objects().is_empty());
    }

    #[test]
    fn writers_of_the_same_records_neither_meet_nor_wait_for_ever() {
        let claims = Claims::default();
        let inside = Mutex::new(HashSet::new());
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (claims, inside) = (&claims, &inside);
                scope.spawn(move || {
                    for round in 0..200 {
                        let names: Vec<_> =
                            (0..4).map(|number| name((number + thread + round) % 5)).collect();
                        claims.write_each(&names, |places| {
                            for &place in places {
                                assert!(inside.lock().insert(names[place]), "two write the same record");
                            }
                            std::thread::yield_now();
                            for place in places {
                                inside.lock().remove(&names[*place]);
                            }
                        });
                    }
                });
            }
        });
    }
}
