//! PollInvalidations: objects of a tenant that can no longer be read. Besides Remove the only call that waits.
//!
//! A caller receives those of the tenant in the context of its request, which is that of its certificate if it has one of a tenant.
//!
//! A call polls the groups. If no group has invalidations, it waits until the tick detects some. So invalidations are
//! up to one tick late, and the thread that removes an object only increments a number.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use moontide_proto::convert::{InvalidationCursor, PollInvalidationsRequest, Wire};
use moontide_proto::limits::INVALIDATIONS_PER_RESPONSE_MAX;
use moontide_proto::v1;
use moontide_types::{ErrorCode, ObjectId, Tenant, Term};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::{Service, refused};

/// Maximum number of waiting calls. A router or an inference engine has one; each polls its groups when there are
/// invalidations, at most ten times per second.
const WATCHERS_MAX: usize = 1024;

/// Waiting calls.
#[derive(Debug)]
pub(super) struct Watchers {
    permits: Semaphore,
    notify: Notify,
    /// Count of the invalidations of each group at the last tick; 0 while the group records none.
    seen: Vec<AtomicU64>,
}

impl Watchers {
    pub(super) fn new(groups: usize) -> Watchers {
        Watchers {
            permits: Semaphore::new(WATCHERS_MAX),
            notify: Notify::new(),
            seen: (0..groups).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Sets the count of the invalidations of a group. Returns whether it has changed.
    pub(super) fn advance(&self, group: usize, count: u64) -> bool {
        // Relaxed: a woken call reads the group itself, under its lock.
        self.seen[group].swap(count, Ordering::Relaxed) != count
    }

    /// Wakes all waiting calls.
    pub(super) fn wake(&self) {
        self.notify.notify_waiters();
    }
}

impl Service {
    /// Returns the invalidations of a tenant in groups. Waits if there are none.
    pub async fn poll_invalidations(
        &self,
        m: &v1::PollInvalidationsRequest,
    ) -> v1::PollInvalidationsResponse {
        let refusal =
            |code| v1::PollInvalidationsResponse { context: Some(self.refusal(code)), ..Default::default() };
        let understood = PollInvalidationsRequest::from_wire(m)
            .map_err(refused)
            .and_then(|request| Ok((self.caller(request.context)?, request)));
        let (caller, request) = match understood {
            Ok(understood) => understood,
            Err(code) => return refusal(code),
        };
        let Ok(_permit) = self.watchers.permits.try_acquire() else { return refusal(ErrorCode::Busy) };
        let wait_ms = request.wait_ms.min(caller.context.timeout_ms);
        let deadline = Instant::now() + Duration::from_millis(wait_ms.into());
        loop {
            // Created before the groups are polled, so that no notification is missed.
            let notified = self.watchers.notify.notified();
            let groups = self.collect_invalidations(caller.context.tenant, request.cluster, &request.cursors);
            if !groups.is_empty() || timeout_at(deadline, notified).await.is_err() {
                let context = Some(self.context(Some(&caller)));
                return v1::PollInvalidationsResponse { context, groups, cluster: self.config.cluster };
            }
        }
    }

    /// Returns the groups with invalidations, and those that are not hosted here.
    fn collect_invalidations(
        &self,
        tenant: Tenant<'_>,
        cluster: u64,
        cursors: &[InvalidationCursor],
    ) -> Vec<v1::GroupInvalidations> {
        let mut found = vec![];
        // An unconfirmed master may drop objects that the current master of the group still has.
        if self.is_unconfirmed() {
            return found;
        }
        let (now, mut left) = (self.now(), INVALIDATIONS_PER_RESPONSE_MAX);
        for cursor in cursors {
            let (index, group) = (usize::from(cursor.group.0), u32::from(cursor.group.0));
            let failed =
                |code: ErrorCode| v1::GroupInvalidations { group, code: code as u32, ..Default::default() };
            if index >= self.group_slots.len() {
                found.push(failed(ErrorCode::InvalidArgument));
                continue;
            }
            match self.group(index) {
                Ok(mut hosted) => {
                    let term = hosted.term();
                    // A cursor of another master or cluster is not valid here.
                    let is_valid = cluster == self.config.cluster && cursor.term == term;
                    let since = if is_valid { cursor.next_sequence } else { 0 };
                    let Some(invalidations) = hosted.invalidations(now, tenant, since, left) else {
                        continue;
                    };
                    drop(hosted);
                    if invalidations.gap || !invalidations.ids.is_empty() {
                        left -= invalidations.ids.len();
                        found.push(group_invalidations(group, term, invalidations));
                    }
                }
                // In a handoff to another master, which will report a gap.
                Err(ErrorCode::Retry) => {}
                Err(code) => found.push(failed(code)),
            }
        }
        found
    }
}

fn group_invalidations(
    group: u32,
    term: Term,
    invalidations: moontide_meta::Invalidations,
) -> v1::GroupInvalidations {
    let moontide_meta::Invalidations { ids, next, gap } = invalidations;
    let mut packed = Vec::with_capacity(ids.len() * size_of::<ObjectId>());
    ids.iter().for_each(|id| packed.extend_from_slice(&id.0));
    v1::GroupInvalidations { group, code: 0, term: term.get(), next_sequence: next, gap, ids: packed.into() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use moontide_types::SystemClock;
    use tokio::task::JoinSet;

    use super::*;
    use crate::service::ServiceConfig;

    fn poll(cursors: &[(u32, u32, u64)], wait_ms: u32) -> v1::PollInvalidationsRequest {
        let cursor = |&(group, term, next)| v1::InvalidationCursor { group, term, next_sequence: next };
        let context = v1::RequestContext { timeout_ms: 60_000, ..Default::default() };
        v1::PollInvalidationsRequest {
            context: Some(context),
            cursors: cursors.iter().map(cursor).collect(),
            wait_ms,
            cluster: ServiceConfig::for_tests().cluster,
        }
    }

    fn run<T>(test: impl AsyncFnOnce(Arc<Service>) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(test(Service::new(ServiceConfig::for_tests(), Arc::new(SystemClock))))
    }

    /// Returns for each group whether there is a gap, or the error code.
    fn gaps(response: &v1::PollInvalidationsResponse) -> Vec<(u32, Result<bool, u32>)> {
        let gap = |m: &v1::GroupInvalidations| (m.group, if m.code == 0 { Ok(m.gap) } else { Err(m.code) });
        response.groups.iter().map(gap).collect()
    }

    #[test]
    fn invalidation_cursor_of_other_term_or_cluster_returns_gap() {
        run(async |service| {
            let first = service.poll_invalidations(&poll(&[(0, 0, 0)], 30_000)).await;
            assert_eq!(gaps(&first), [(0, Ok(true))]);
            let (term, next) = (first.groups[0].term, first.groups[0].next_sequence);
            let nothing = service.poll_invalidations(&poll(&[(0, term, next)], 10)).await;
            assert_eq!(gaps(&nothing), [], "the wait timed out");
            let foreign = service.poll_invalidations(&poll(&[(0, term + 1, next)], 30_000)).await;
            assert_eq!(gaps(&foreign), [(0, Ok(true))]);
            let other = v1::PollInvalidationsRequest { cluster: 77, ..poll(&[(0, term, next)], 30_000) };
            assert_eq!(gaps(&service.poll_invalidations(&other).await), [(0, Ok(true))]);
            let unknown = service.poll_invalidations(&poll(&[(9, term, next)], 30_000)).await;
            assert_eq!(gaps(&unknown), [(9, Err(ErrorCode::InvalidArgument as u32))]);
        });
    }

    #[test]
    fn invalidation_waiters_are_limited_and_woken_on_group_release() {
        run(async |service| {
            let first = service.poll_invalidations(&poll(&[(0, 0, 0)], 0)).await;
            let request = poll(&[(0, first.groups[0].term, first.groups[0].next_sequence)], 30_000);
            let mut waiting = JoinSet::new();
            for _ in 0..WATCHERS_MAX {
                let (service, request) = (Arc::clone(&service), request.clone());
                waiting.spawn(async move { service.poll_invalidations(&request).await });
            }
            while service.watchers.permits.available_permits() > 0 {
                tokio::task::yield_now().await;
            }
            let refused = service.poll_invalidations(&request).await.context.unwrap();
            assert_eq!(refused.code, ErrorCode::Busy as u32);
            assert!(refused.retry_after_ms > 0);
            let started = Instant::now();
            service.release_group(moontide_types::GroupId(0));
            while let Some(response) = waiting.join_next().await {
                assert_eq!(gaps(&response.unwrap()), [(0, Err(ErrorCode::WrongMaster as u32))]);
            }
            assert!(started.elapsed() < Duration::from_secs(10));
            assert_eq!(
                service.poll_invalidations(&request).await.context.unwrap().code,
                0,
                "permits are free again"
            );
        });
    }
}
