//! GetDepartures: what has left, for those who told others of it. The one call beside Remove that waits.
//!
//! A call asks the groups, and if none has anything to tell it sleeps until the tick has found that one has. So news are up
//! to a tick late, and an object that leaves costs the thread that lets it go nothing but its number.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use moontide_proto::convert::{DepartureCursor, GetDeparturesRequest, Wire};
use moontide_proto::limits::DEPARTURES_PER_ANSWER_MAX;
use moontide_proto::v1;
use moontide_types::{ErrorCode, ObjectId, Term};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::{Service, refused};

/// Calls that wait at a time. A router or an engine has one; each costs a look at its groups when there are news, which is ten
/// times a second at most.
const WATCHERS_MAX: usize = 1024;

/// Those who wait.
#[derive(Debug)]
pub(super) struct Watchers {
    seats: Semaphore,
    news: Notify,
    /// The number of each group's next departure when the tick came by; 0 while it tells nothing.
    seen: Vec<AtomicU64>,
}

impl Watchers {
    pub(super) fn new(groups: usize) -> Watchers {
        Watchers {
            seats: Semaphore::new(WATCHERS_MAX),
            news: Notify::new(),
            seen: (0..groups).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// What the next departure of a group is called now. The answer is whether that is another number than before.
    pub(super) fn is_news(&self, group: usize, next: u64) -> bool {
        // Relaxed: who is woken looks at the group itself, under its lock.
        self.seen[group].swap(next, Ordering::Relaxed) != next
    }

    /// Has all who wait look again.
    pub(super) fn wake(&self) {
        self.news.notify_waiters();
    }
}

impl Service {
    /// What has left some groups. Waits if there is nothing.
    pub async fn get_departures(&self, m: &v1::GetDeparturesRequest) -> v1::GetDeparturesResponse {
        let refusal =
            |code| v1::GetDeparturesResponse { context: Some(self.refusal(code)), ..Default::default() };
        let understood = GetDeparturesRequest::from_wire(m)
            .map_err(refused)
            .and_then(|request| Ok((self.caller(request.context)?, request)));
        let (caller, request) = match understood {
            Ok(understood) => understood,
            Err(code) => return refusal(code),
        };
        let Ok(_seat) = self.watchers.seats.try_acquire() else { return refusal(ErrorCode::Busy) };
        let wait_ms = request.wait_ms.min(caller.context.deadline_ms);
        let until = Instant::now() + Duration::from_millis(wait_ms.into());
        loop {
            // Made before the groups are asked, so that no news are missed between.
            let news = self.watchers.news.notified();
            let groups = self.departures(request.cluster, &request.cursors);
            if !groups.is_empty() || timeout_at(until, news).await.is_err() {
                let context = Some(self.context(Some(&caller)));
                return v1::GetDeparturesResponse { context, groups, cluster: self.config.cluster };
            }
        }
    }

    /// Groups with something to tell, and those that are not here.
    fn departures(&self, cluster: u64, cursors: &[DepartureCursor]) -> Vec<v1::GroupDepartures> {
        let mut told = vec![];
        // Who may have been replaced may let go of what the group's master still has.
        if self.is_unconfirmed() {
            return told;
        }
        let (now, mut left) = (self.now(), DEPARTURES_PER_ANSWER_MAX);
        for cursor in cursors {
            let (index, group) = (usize::from(cursor.group.0), u32::from(cursor.group.0));
            let failed =
                |code: ErrorCode| v1::GroupDepartures { group, code: code as u32, ..Default::default() };
            if index >= self.seats.len() {
                told.push(failed(ErrorCode::InvalidArgument));
                continue;
            }
            match self.group(index) {
                Ok(mut held) => {
                    let term = held.term();
                    // A number of another master means nothing here.
                    let is_ours = cluster == self.config.cluster && cursor.term == term;
                    let since = if is_ours { cursor.next } else { 0 };
                    let Some(departures) = held.departures(now, since, left) else { continue };
                    drop(held);
                    if departures.gap || !departures.ids.is_empty() {
                        left -= departures.ids.len();
                        told.push(group_departures(group, term, departures));
                    }
                }
                // On its way to another master, which will tell of a gap.
                Err(ErrorCode::Retry) => {}
                Err(code) => told.push(failed(code)),
            }
        }
        told
    }
}

fn group_departures(group: u32, term: Term, departures: moontide_meta::Departures) -> v1::GroupDepartures {
    let moontide_meta::Departures { ids, next, gap } = departures;
    let mut packed = Vec::with_capacity(ids.len() * size_of::<ObjectId>());
    ids.iter().for_each(|id| packed.extend_from_slice(&id.0));
    v1::GroupDepartures { group, code: 0, term: term.get(), next, gap, ids: packed.into() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use moontide_types::SystemClock;
    use tokio::task::JoinSet;

    use super::*;
    use crate::service::ServiceConfig;

    fn ask(cursors: &[(u32, u32, u64)], wait_ms: u32) -> v1::GetDeparturesRequest {
        let cursor = |&(group, term, next)| v1::DepartureCursor { group, term, next };
        let context = v1::RequestContext { deadline_ms: 60_000, ..Default::default() };
        v1::GetDeparturesRequest {
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

    /// Whether there is a gap, by group, or the code.
    fn gaps(answer: &v1::GetDeparturesResponse) -> Vec<(u32, Result<bool, u32>)> {
        let gap = |m: &v1::GroupDepartures| (m.group, if m.code == 0 { Ok(m.gap) } else { Err(m.code) });
        answer.groups.iter().map(gap).collect()
    }

    #[test]
    fn a_number_counts_in_its_own_term_and_cluster_only() {
        run(async |service| {
            let first = service.get_departures(&ask(&[(0, 0, 0)], 30_000)).await;
            assert_eq!(gaps(&first), [(0, Ok(true))]);
            let (term, next) = (first.groups[0].term, first.groups[0].next);
            let nothing = service.get_departures(&ask(&[(0, term, next)], 10)).await;
            assert_eq!(gaps(&nothing), [], "it waited in vain");
            let foreign = service.get_departures(&ask(&[(0, term + 1, next)], 30_000)).await;
            assert_eq!(gaps(&foreign), [(0, Ok(true))]);
            let other = v1::GetDeparturesRequest { cluster: 77, ..ask(&[(0, term, next)], 30_000) };
            assert_eq!(gaps(&service.get_departures(&other).await), [(0, Ok(true))]);
            let unknown = service.get_departures(&ask(&[(9, term, next)], 30_000)).await;
            assert_eq!(gaps(&unknown), [(9, Err(ErrorCode::InvalidArgument as u32))]);
        });
    }

    #[test]
    fn who_waits_is_bounded_and_is_told_when_the_group_goes() {
        run(async |service| {
            let first = service.get_departures(&ask(&[(0, 0, 0)], 0)).await;
            let waits = ask(&[(0, first.groups[0].term, first.groups[0].next)], 30_000);
            let mut waiting = JoinSet::new();
            for _ in 0..WATCHERS_MAX {
                let (service, waits) = (Arc::clone(&service), waits.clone());
                waiting.spawn(async move { service.get_departures(&waits).await });
            }
            while service.watchers.seats.available_permits() > 0 {
                tokio::task::yield_now().await;
            }
            let refused = service.get_departures(&waits).await.context.unwrap();
            assert_eq!(refused.code, ErrorCode::Busy as u32);
            assert!(refused.retry_after_ms > 0);
            let began = Instant::now();
            service.lose(moontide_types::GroupId(0));
            while let Some(answer) = waiting.join_next().await {
                assert_eq!(gaps(&answer.unwrap()), [(0, Err(ErrorCode::WrongMaster as u32))]);
            }
            assert!(began.elapsed() < Duration::from_secs(10));
            assert_eq!(
                service.get_departures(&waits).await.context.unwrap().code,
                0,
                "there are seats again"
            );
        });
    }
}
