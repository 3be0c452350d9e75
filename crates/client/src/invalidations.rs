//! [`Invalidations`]: notices of objects that can no longer be read, for programs that track the content of the store.
//!
//! The client keeps one long poll per master that hosts a group; the master answers it when there is an invalidation.
//! The client keeps the cursor of every group, so that a lost response loses nothing: the next poll asks for it again.
//! A group that moves to another master starts a new sequence there, which begins with a gap.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use moontide_proto::convert::{
    InvalidationCursor, PollInvalidationsRequest, PollInvalidationsResponse, RequestContext, Wire,
};
use moontide_proto::limits::INVALIDATIONS_WAIT_MS_MAX;
use moontide_proto::v1;
use moontide_rt::time::Instant;
use moontide_types::{ErrorCode, GroupId, Key, ObjectId, Term};
use tokio::task::AbortHandle;
use tracing::debug;

use crate::cluster::{Master, Masters};
use crate::error::StoreError;
use crate::store::{Inner, Store};

/// Wait of a long poll at the master. Long enough to cause no load, short enough that middleboxes do not drop the
/// connection.
const WAIT: Duration = Duration::from_secs(10);
const _: () = assert!(WAIT.as_millis() <= INVALIDATIONS_WAIT_MS_MAX as u128);

/// Extra time after which a poll counts as failed.
const SLACK: Duration = Duration::from_secs(5);

/// Longest wait, one year, so that no sum of times overflows.
const WAIT_MAX: Duration = Duration::from_secs(365 * 86_400);

/// Pause before a failed master is polled again, and between refreshes of the map.
const PAUSE: Duration = Duration::from_millis(500);

/// A change that a watcher of the store must act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalidation {
    /// The object can no longer be read, unless it was put again since.
    Removed(ObjectId),
    /// Invalidations may have been missed: the caller must re-check its keys. Returned first, after a change of master,
    /// and if the caller polled too late.
    Gap,
}

/// Stream of the invalidations of the store's tenant. For one thread; several streams are independent.
pub struct Invalidations {
    inner: Arc<Inner>,
    masters: Arc<Masters>,
    /// Term and next sequence number of each group; valid in `cluster`.
    cursors: HashMap<u16, (Term, u64)>,
    cluster: u64,
    /// Open polls, by the master's index in the map.
    polls: HashMap<u16, AbortHandle>,
    sender: Sender<(u64, u16, PollResult)>,
    responses: Receiver<(u64, u16, PollResult)>,
    /// Count of map changes. Responses to polls of an older map are ignored.
    map_generation: u64,
    /// Whether a group may have another master than the map shows.
    stale: bool,
    refreshed_at: Option<Instant>,
}

type PollResult = Result<v1::PollInvalidationsResponse, String>;

impl fmt::Debug for Invalidations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups = self.cursors.len();
        f.debug_struct("Invalidations").field("groups", &groups).finish_non_exhaustive()
    }
}

impl Store {
    /// Starts a stream of invalidations.
    pub fn invalidations(&self) -> Invalidations {
        let (sender, responses) = channel();
        Invalidations {
            masters: self.inner.cluster.masters(),
            inner: Arc::clone(&self.inner),
            cursors: HashMap::new(),
            cluster: 0,
            polls: HashMap::new(),
            sender,
            responses,
            map_generation: 0,
            stale: false,
            refreshed_at: None,
        }
    }

    /// Returns the id by which [`Invalidations`] names an object. It changes when all objects of the tenant are
    /// removed.
    pub fn object_id(&self, key: &[u8]) -> Result<ObjectId, StoreError> {
        let inner = &*self.inner;
        Ok(inner.local_nodes.id(Key::new(key)?))
    }
}

impl Invalidations {
    /// Waits for the next invalidations; `None` on timeout. The list is never empty. An unreachable master is polled
    /// again until it responds, and then reports a gap.
    pub fn next(&mut self, timeout: Duration) -> Option<Vec<Invalidation>> {
        let until = Instant::now() + timeout.min(WAIT_MAX);
        loop {
            self.follow_map(until);
            self.poll_all();
            let left = until.saturating_duration_since(Instant::now());
            let left = if self.stale { left.min(PAUSE) } else { left };
            match self.responses.recv_timeout(left) {
                Ok((generation, master, response)) if generation == self.map_generation => {
                    self.polls.remove(&master);
                    let invalidations = self.handle_response(master, response);
                    if !invalidations.is_empty() {
                        return Some(invalidations);
                    }
                }
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(_) => return None,
            }
        }
    }

    /// Adopts a newer map. Refreshes the map if it seems to be stale.
    fn follow_map(&mut self, until: Instant) {
        let cluster = &self.inner.cluster;
        let due = self.refreshed_at.is_none_or(|refreshed_at| refreshed_at.elapsed() >= PAUSE);
        if self.stale && due && !cluster.is_single_master() {
            self.refreshed_at = Some(Instant::now());
            cluster.refresh_map(self.masters.version(), until);
        }
        let masters = cluster.masters();
        if !Arc::ptr_eq(&masters, &self.masters) {
            self.masters = masters;
            self.map_generation += 1;
            self.stale = false;
            self.polls.drain().for_each(|(_, task)| task.abort());
        }
        // A group without a master will get one.
        self.stale |= !self.masters.is_complete();
    }

    /// Starts a poll at each master that has none.
    fn poll_all(&mut self) {
        let masters = Arc::clone(&self.masters);
        for (at, master) in masters.hosting() {
            if !self.polls.contains_key(&at) {
                self.poll(at, master, Duration::ZERO);
            }
        }
    }

    fn poll(&mut self, at: u16, master: &Master, pause: Duration) {
        let cursor = |group: u16| {
            let (term, next) = self.cursors.get(&group).copied().unwrap_or((Term::ZERO, 0));
            InvalidationCursor { group: GroupId(group), term, next_sequence: next }
        };
        let cursors: Vec<InvalidationCursor> = self.masters.groups_of(at).map(cursor).collect();
        if cursors.is_empty() {
            return;
        }
        let cluster = &self.inner.cluster;
        let timeout_ms = (WAIT + SLACK).as_millis() as u32; // a constant
        let context = RequestContext { timeout_ms, ..cluster.context(Instant::now()) };
        let wait_ms = WAIT.as_millis() as u32; // a constant
        let request = PollInvalidationsRequest { context, cursors, wait_ms, cluster: self.cluster };
        let request = request.to_wire();
        let (mut client, sender, generation) = (master.client(), self.sender.clone(), self.map_generation);
        let task = cluster.start(async move {
            tokio::time::sleep(pause).await;
            let response = match tokio::time::timeout(WAIT + SLACK, client.poll_invalidations(request)).await
            {
                Ok(Ok(response)) => Ok(response.into_inner()),
                Ok(Err(status)) => Err(status.message().to_owned()),
                Err(_) => Err("timed out".to_owned()),
            };
            // The receiver may be dropped.
            let _ = sender.send((generation, at, response));
        });
        self.polls.insert(at, task);
    }

    fn handle_response(&mut self, at: u16, response: PollResult) -> Vec<Invalidation> {
        let parsed = response.and_then(|message| {
            if let Some(map) = message.context.as_ref().and_then(|context| context.newer_map.as_ref()) {
                self.inner.cluster.observe_map(map);
            }
            self.parse_response(&message)
        });
        parsed.unwrap_or_else(|reason| {
            debug!(reason, "poll for invalidations failed");
            self.stale = true;
            let masters = Arc::clone(&self.masters);
            if let Some((_, master)) = masters.hosting().find(|(index, _)| *index == at) {
                self.poll(at, master, PAUSE);
            }
            vec![]
        })
    }

    fn parse_response(
        &mut self,
        message: &v1::PollInvalidationsResponse,
    ) -> Result<Vec<Invalidation>, String> {
        let response = PollInvalidationsResponse::from_wire(message).map_err(|error| error.to_string())?;
        let body = response.into_result().map_err(|context| match context.code {
            Some(code) => code.to_string(),
            None => ErrorCode::Internal.to_string(),
        })?;
        if body.cluster != self.cluster {
            self.cluster = body.cluster;
            self.cursors.clear();
        }
        let (mut invalidations, mut gap) = (vec![], false);
        let mut wrong_master = None;
        for (group, parsed) in body.groups {
            match parsed {
                Ok(parsed) => {
                    gap |= parsed.gap;
                    invalidations.extend(parsed.ids().map(Invalidation::Removed));
                    self.cursors.insert(group.0, (parsed.term, parsed.next_sequence));
                }
                Err(code) => wrong_master = Some(code),
            }
        }
        if gap {
            invalidations.push(Invalidation::Gap);
        }
        self.stale = wrong_master.is_some();
        match wrong_master {
            // An immediate poll would get the same response.
            Some(code) if invalidations.is_empty() => Err(code.to_string()),
            _ => Ok(invalidations),
        }
    }
}

impl Drop for Invalidations {
    fn drop(&mut self) {
        self.polls.drain().for_each(|(_, task)| task.abort());
    }
}
