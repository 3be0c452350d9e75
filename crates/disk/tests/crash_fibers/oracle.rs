//! [`Oracle`]: what each thread has called and what was answered, and what follows for each record.
//!
//! Calls and answers have places in one order. What holds for a record at a place follows from the calls that had
//! ended before it and from those that may overlap with it. The oracle knows nothing of a backend but its answers.
//!
//! * Stored for certain: a write was acknowledged; no removal of it was called; no eviction that may have met this write named
//!   it; no reader dropped it as corrupt.
//! * Gone for certain: a removal was acknowledged; or the last eviction that named it ended without an error, no write of it
//!   was open when that began or was called later, and no earlier write or eviction of it has failed by an I/O error. A file
//!   that could not be deleted after such a failure holds the record, too, and a crash may restore it; the backends
//!   say so. The same holds if a reader dropped the record as corrupt: its file stays. (The bytes are right, and a tombstone
//!   still covers them.)

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use moontide_disk::samples::SampleRecord;
use moontide_disk::{RecordId, WriteError};
use moontide_rt::{SplitMix64, sim};
use moontide_types::{Epoch, ObjectId};

const LENS: [usize; 7] = [0, 300, 3000, 4096, 5000, 9000, 30_000];

/// Returns a record whose length and content follow from its number and version.
pub(crate) fn sample(number: u64, version: u64) -> SampleRecord {
    let len = LENS[SplitMix64::new(number * 8 + version).index(LENS.len())];
    SampleRecord::new(number, version, len)
}

/// A place in the order of calls and answers.
pub(crate) type Place = u64;

#[derive(Default)]
pub(crate) struct Oracle {
    // The lock of std: it is never held while another thread runs.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: Place,
    histories: BTreeMap<RecordId, RecordHistory>,
    /// By number of the call.
    removals: Vec<Removal>,
    /// Evictions whose choice of records is under way.
    choices: usize,
    evictions: Vec<Eviction>,
    coincidences: Coincidences,
}

/// What has happened to a record.
#[derive(Default)]
struct RecordHistory {
    number: u64,
    version: u64,
    writes: Vec<Write>,
    dropped: bool,
}

#[derive(Debug)]
struct Write {
    called: Place,
    answered: Option<Place>,
    acknowledged: bool,
    /// It ended by an error of the disk: a part of it may be there, or all.
    failed: bool,
}

#[derive(Debug)]
struct Removal {
    names: Vec<(ObjectId, Epoch)>,
    answered: Option<Place>,
    acknowledged: bool,
}

#[derive(Debug)]
struct Eviction {
    names: Vec<RecordId>,
    /// Before and after the choice of the records.
    began: Place,
    chosen: Place,
    /// When it ended without an error.
    done: Option<Place>,
}

/// Numbers of events that bugs between threads depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Coincidences {
    /// A removal was acknowledged while a write of the same version was open.
    pub(crate) removals_during_write: u64,
    /// A write was acknowledged after a removal of the version had been called.
    pub(crate) writes_acknowledged_during_removal: u64,
    /// A record was chosen for eviction while a removal of it was open.
    pub(crate) evictions_during_removal: u64,
    /// The power failed while a write was open.
    pub(crate) writes_interrupted: u64,
    /// The power failed while a removal was open.
    pub(crate) removals_interrupted: u64,
}

impl Oracle {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// Returns the present place.
    pub(crate) fn place(&self) -> Place {
        self.state().place()
    }

    pub(crate) fn coincidences(&self) -> Coincidences {
        self.state().coincidences.clone()
    }

    /// Returns all that happened to a record, for the message of a failure.
    pub(crate) fn story(&self, name: &RecordId) -> String {
        self.state().story(name)
    }

    /// Returns the names of all records for which a write was called.
    pub(crate) fn names(&self) -> Vec<RecordId> {
        self.state().histories.keys().copied().collect()
    }

    /// Returns the record with this name.
    pub(crate) fn sample(&self, name: &RecordId) -> SampleRecord {
        let state = self.state();
        let history = &state.histories[name];
        sample(history.number, history.version)
    }

    // -- calls and answers --------------------------------------------------------------------------------------------

    /// A thread is about to write these records. Returns those that may be written: a version whose removal was
    /// acknowledged is never written again, which is up to the masters.
    pub(crate) fn write_called(&self, records: &[(u64, u64)]) -> (Place, Vec<SampleRecord>) {
        let state = &mut *self.state();
        let place = state.place();
        let mut samples: Vec<SampleRecord> = vec![];
        for &(number, version) in records {
            let sample = sample(number, version);
            let name = sample.name();
            let removed = state.removals_of(&name).any(|removal| removal.acknowledged);
            if removed || samples.iter().any(|sample| sample.name() == name) {
                continue;
            }
            let history = state.histories.entry(name).or_default();
            (history.number, history.version) = (number, version);
            history.writes.push(Write { called: place, answered: None, acknowledged: false, failed: false });
            samples.push(sample);
        }
        (place, samples)
    }

    /// A write of these records has ended. Each thread has one write open at a time, so the open one of `called` is its own.
    pub(crate) fn write_answered(
        &self,
        called: Place,
        samples: &[SampleRecord],
        results: &[Result<(), WriteError>],
    ) {
        let state = &mut *self.state();
        let place = state.place();
        for (sample, result) in samples.iter().zip(results) {
            let name = sample.name();
            sim::record(result.is_ok().into());
            let removals = state.removals_of(&name).count();
            match result {
                Ok(()) => state.coincidences.writes_acknowledged_during_removal += u64::from(removals > 0),
                Err(WriteError::Removed) => {
                    assert!(removals > 0, "{name:?} is refused as removed, but was not")
                }
                Err(WriteError::Corrupt | WriteError::Digestless) => {
                    panic!("{name:?} is refused: {result:?}")
                }
                Err(_) => {}
            }
            let history = state.histories.get_mut(&name).expect("its write was called");
            let open =
                history.writes.iter_mut().find(|write| write.called == called && write.answered.is_none());
            let write = open.expect("its write is open");
            write.answered = Some(place);
            write.acknowledged = result.is_ok();
            write.failed = matches!(result, Err(WriteError::Io | WriteError::NoSpace));
        }
    }

    /// A thread is about to remove these versions and all older ones. Returns the number of the call.
    pub(crate) fn remove_called(&self, names: &[(ObjectId, Epoch)]) -> usize {
        let state = &mut *self.state();
        state.removals.push(Removal { names: names.to_vec(), answered: None, acknowledged: false });
        state.removals.len() - 1
    }

    pub(crate) fn remove_answered(&self, call: usize, acknowledged: bool) {
        let state = &mut *self.state();
        sim::record(acknowledged.into());
        let place = state.place();
        let removal = &mut state.removals[call];
        (removal.answered, removal.acknowledged) = (Some(place), acknowledged);
        if acknowledged {
            let removal = &state.removals[call];
            let open = state.histories.iter().filter(|(name, history)| {
                removal.covers(name) && history.writes.iter().any(|write| write.answered.is_none())
            });
            state.coincidences.removals_during_write += open.count() as u64;
        }
    }

    /// A thread is about to choose records for an eviction.
    pub(crate) fn eviction_called(&self) -> Place {
        let state = &mut *self.state();
        state.choices += 1;
        state.place()
    }

    /// These records were chosen. Returns the number of the eviction.
    pub(crate) fn eviction_chosen(&self, began: Place, names: Vec<RecordId>) -> usize {
        let state = &mut *self.state();
        state.choices -= 1;
        let chosen = state.place();
        for name in &names {
            assert!(
                state.histories.contains_key(name),
                "{name:?} was chosen for eviction, but never written"
            );
            if let Some(why) = state.gone(name, began) {
                panic!("{name:?} was chosen for eviction after its {why}");
            }
            let removing = state.removals_of(name).any(|removal| removal.answered.is_none());
            state.coincidences.evictions_during_removal += u64::from(removing);
        }
        state.evictions.push(Eviction { names, began, chosen, done: None });
        state.evictions.len() - 1
    }

    pub(crate) fn eviction_done(&self, eviction: usize) {
        let state = &mut *self.state();
        state.evictions[eviction].done = Some(state.next);
        state.next += 1;
    }

    /// A reader is about to drop a record as corrupt.
    pub(crate) fn dropped(&self, name: &RecordId) {
        self.state().histories.get_mut(name).expect("a record that is read was written").dropped = true;
    }

    /// The power has failed.
    pub(crate) fn power_failed(&self) {
        let state = &mut *self.state();
        let is_open = |history: &&RecordHistory| history.writes.iter().any(|write| write.answered.is_none());
        let writes = state.histories.values().filter(is_open).count();
        let removals = state.removals.iter().filter(|removal| removal.answered.is_none()).count();
        state.coincidences.writes_interrupted += writes as u64;
        state.coincidences.removals_interrupted += removals as u64;
    }

    // -- what follows -------------------------------------------------------------------------------------------------

    /// Checks that a record which was found by a call that began at `began` may exist.
    pub(crate) fn assert_may_exist(&self, name: &RecordId, began: Place, how: &str) {
        let state = self.state();
        assert!(state.histories.contains_key(name), "{name:?} {how}, but was never written");
        if let Some(why) = state.gone(name, began) {
            let story = state.story(name);
            drop(state);
            panic!("{name:?} {how} after its {why}{story}");
        }
    }

    /// Whether a record was stored for certain from `began` until now.
    pub(crate) fn is_stored(&self, name: &RecordId, began: Place) -> bool {
        let state = self.state();
        let history = &state.histories[name];
        if state.choices > 0 || history.dropped || state.removals_of(name).next().is_some() {
            return false;
        }
        history.writes.iter().any(|write| {
            write.acknowledged
                && write.answered.is_some_and(|answered| answered < began)
                && !state
                    .evictions
                    .iter()
                    .any(|eviction| eviction.chosen > write.called && eviction.names.contains(name))
        })
    }
}

impl State {
    fn place(&mut self) -> Place {
        self.next += 1;
        self.next - 1
    }

    /// Returns all that happened to a record, for the message of a failure.
    fn story(&self, name: &RecordId) -> String {
        let mut story = String::new();
        for write in &self.histories[name].writes {
            story += &format!("\n    {write:?}");
        }
        for removal in self.removals_of(name) {
            story += &format!("\n    {removal:?}");
        }
        for Eviction { began, chosen, done, .. } in self.evictions.iter().filter(|it| it.names.contains(name))
        {
            story += &format!("\n    Eviction {{ began: {began}, chosen: {chosen}, done: {done:?} }}");
        }
        story
    }

    fn removals_of<'a>(&'a self, name: &'a RecordId) -> impl Iterator<Item = &'a Removal> {
        self.removals.iter().filter(|removal| removal.covers(name))
    }

    /// Returns why a record was gone for certain at a place.
    fn gone(&self, name: &RecordId, at: Place) -> Option<&'static str> {
        let removed =
            |removal: &Removal| removal.acknowledged && removal.answered.is_some_and(|end| end < at);
        if self.removals_of(name).any(removed) {
            return Some("removal");
        }
        let ended = |write: &Write, eviction: &Eviction| {
            !write.failed && write.answered.is_some_and(|end| end < eviction.began)
        };
        let RecordHistory { writes, dropped, .. } = &self.histories[name];
        let mut evictions = self.evictions.iter().filter(|eviction| eviction.names.contains(name)).peekable();
        let evicted = !dropped
            && evictions.peek().is_some()
            && evictions.all(|eviction| eviction.done.is_some_and(|done| done < at))
            && self.evictions.iter().any(|eviction| {
                eviction.names.contains(name) && writes.iter().all(|write| ended(write, eviction))
            });
        evicted.then_some("eviction")
    }
}

impl Removal {
    fn covers(&self, name: &RecordId) -> bool {
        self.names.iter().any(|(id, version)| name.id == *id && name.version <= *version)
    }
}
