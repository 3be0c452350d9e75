//! [`OpenJobs`]: offloads and removals that are queued or in progress.
//!
//! The master takes the end of an inventory as a promise: what was not listed is not on the disk. A write that another
//! session commanded, and a removal that is not durable yet, would break it. So the end waits for both.

use std::collections::BTreeMap;

use moontide_rt::sync::Mutex;
use moontide_types::{ObjectId, SessionId};

use crate::logic::groups::GroupSet;

/// Number of an open job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct JobTicket(u64);

#[derive(Clone, Copy, Debug)]
enum OpenJob {
    /// A record that this session commanded to write.
    Offload(SessionId, ObjectId),
    Removal(ObjectId),
}

/// Jobs that have not ended.
#[derive(Debug, Default)]
pub(super) struct OpenJobs(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    last: u64,
    open: BTreeMap<JobTicket, OpenJob>,
}

impl OpenJobs {
    pub(super) fn begin_offload(&self, session: SessionId, id: ObjectId) -> JobTicket {
        self.begin(OpenJob::Offload(session, id))
    }

    pub(super) fn begin_removal(&self, id: ObjectId) -> JobTicket {
        self.begin(OpenJob::Removal(id))
    }

    fn begin(&self, job: OpenJob) -> JobTicket {
        let mut state = self.0.lock();
        state.last += 1;
        let ticket = JobTicket(state.last);
        state.open.insert(ticket, job);
        ticket
    }

    pub(super) fn end(&self, ticket: JobTicket) {
        self.0.lock().open.remove(&ticket);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().open.is_empty()
    }

    /// Whether a removal of the object is not durable.
    pub(super) fn has_removal(&self, id: ObjectId) -> bool {
        self.0.lock().open.values().any(|job| matches!(job, OpenJob::Removal(removed) if *removed == id))
    }

    /// Number of removals that are not durable; 0 while the jobs are locked.
    #[cfg(feature = "testing")]
    pub(super) fn removals(&self) -> usize {
        let Some(state) = self.0.try_lock() else { return 0 };
        state.open.values().filter(|job| matches!(job, OpenJob::Removal(_))).count()
    }

    /// Returns the jobs for which an inventory of `groups` for a session has to wait before it ends.
    pub(super) fn before_end_of_inventory(&self, session: SessionId, groups: &GroupSet) -> Vec<JobTicket> {
        let state = self.0.lock();
        let concerns = |job: &OpenJob| match *job {
            OpenJob::Offload(by, id) => by != session && groups.has_object(id),
            OpenJob::Removal(id) => groups.has_object(id),
        };
        state.open.iter().filter(|(_, job)| concerns(job)).map(|(&ticket, _)| ticket).collect()
    }

    /// Whether any of these jobs has not ended.
    pub(super) fn any_open(&self, tickets: &[JobTicket]) -> bool {
        let state = self.0.lock();
        tickets.iter().any(|ticket| state.open.contains_key(ticket))
    }
}
