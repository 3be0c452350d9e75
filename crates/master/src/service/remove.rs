//! Remove: the only hot call that waits: nodes must kill their records.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hashbrown::HashMap;
use moontide_meta::{Effects, RemoveOutcome, WaiterId};
use moontide_proto::convert::{RemoveRequest, Wire};
use moontide_proto::v1;
use moontide_types::ErrorCode;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{OutcomeCodes, Service, refused};

/// Keys of all calls that wait for nodes, by waiter.
#[derive(Debug, Default)]
pub(super) struct Removals {
    next_waiter: AtomicU64,
    waiting: Mutex<HashMap<WaiterId, PendingKey>>,
}

/// A key that waits for nodes.
#[derive(Debug)]
struct PendingKey {
    call: Arc<PendingRemoval>,
    position: u32,
    group: usize,
}

/// A call with keys that wait for nodes.
#[derive(Debug, Default)]
struct PendingRemoval {
    state: Mutex<CallState>,
    done: Notify,
}

#[derive(Debug, Default)]
struct CallState {
    left: usize,
    finished: Vec<(u32, Option<ErrorCode>)>,
}

impl PendingRemoval {
    /// Waits until no key is left. A notification may be outdated: from a time before the waiting keys were added.
    async fn finished(&self) {
        loop {
            let notified = self.done.notified();
            if self.state.lock().left == 0 {
                return;
            }
            notified.await;
        }
    }
}

impl Removals {
    /// Adds a key. Called before the removal in the group, so that its completion cannot come too early.
    fn add(&self, call: &Arc<PendingRemoval>, position: u32, group: usize) -> WaiterId {
        // Relaxed: the number only has to be unique.
        let waiter = WaiterId(self.next_waiter.fetch_add(1, Ordering::Relaxed));
        call.state.lock().left += 1;
        self.waiting.lock().insert(waiter, PendingKey { call: Arc::clone(call), position, group });
        waiter
    }

    /// Completes a removal. Callers that stopped waiting were removed before.
    pub(super) fn finish(&self, waiter: WaiterId, code: Option<ErrorCode>) {
        let Some(PendingKey { call, position, .. }) = self.waiting.lock().remove(&waiter) else { return };
        let mut state = call.state.lock();
        state.left -= 1;
        state.finished.push((position, code));
        if state.left == 0 {
            call.done.notify_one();
        }
    }

    /// Completes all removals in a group that another master owns with `Pending`.
    pub(super) fn abandon(&self, group: usize) {
        let of_group = |(waiter, key): (&WaiterId, &PendingKey)| (key.group == group).then_some(*waiter);
        let mut abandoned: Vec<WaiterId> = self.waiting.lock().iter().filter_map(of_group).collect();
        abandoned.sort_unstable(); // independent of the order of the hash map
        for waiter in abandoned {
            self.finish(waiter, Some(ErrorCode::Pending));
        }
    }

    fn cancel(&self, waiters: &[WaiterId]) {
        let mut waiting = self.waiting.lock();
        for waiter in waiters {
            waiting.remove(waiter);
        }
    }
}

impl Service {
    /// Removes objects. Keys that nodes have not confirmed within the timeout return `Pending`; their removal
    /// continues.
    pub async fn remove(&self, m: &v1::RemoveRequest) -> v1::OutcomesResponse {
        let understood = RemoveRequest::from_wire(m)
            .map_err(refused)
            .and_then(|request| Ok((self.caller(request.context)?, request)));
        let (caller, request) = match understood {
            Ok(understood) => understood,
            Err(code) => {
                return v1::OutcomesResponse { context: Some(self.refusal(code)), ..Default::default() };
            }
        };
        let now = self.now();
        let mut codes = OutcomeCodes::new(request.keys.len());
        let call = Arc::new(PendingRemoval::default());
        let mut waiters = vec![];
        let mut effects = Effects::new();
        for (index, lookups, positions) in self.sort(&caller, request.keys).parts() {
            let mut group = match self.group(index) {
                Ok(group) => group,
                Err(code) => {
                    positions.iter().for_each(|&position| codes.set(position as usize, Some(code)));
                    continue;
                }
            };
            for (lookup, &position) in lookups.iter().zip(positions) {
                let waiter = self.removals.add(&call, position, index);
                match group.remove(now, lookup, request.force, waiter, &mut effects) {
                    RemoveOutcome::Waiting => {
                        codes.set(position as usize, Some(ErrorCode::Pending));
                        waiters.push(waiter);
                    }
                    RemoveOutcome::Done(code) => self.removals.finish(waiter, code),
                }
            }
            self.deliver(&group, &mut effects);
        }
        if !waiters.is_empty() {
            let timeout = Duration::from_millis(caller.context.timeout_ms.into());
            // A disconnected caller drops this future; the guard then removes its waiters.
            let _guard = WaiterGuard { removals: &self.removals, waiters: &waiters };
            let _ = tokio::time::timeout(timeout, call.finished()).await;
        }
        // Another master may own the group already, with objects that this master does not know.
        let unconfirmed =
            self.is_unconfirmed() && !moontide_rt::mutation_enabled("unconfirmed-removal-certain");
        for (position, code) in call.state.lock().finished.drain(..) {
            let certain = !unconfirmed || !matches!(code, None | Some(ErrorCode::NotFound));
            codes.set(position as usize, if certain { code } else { Some(ErrorCode::Pending) });
        }
        v1::OutcomesResponse { context: Some(self.context(Some(&caller))), codes: codes.0.into() }
    }
}

struct WaiterGuard<'a> {
    removals: &'a Removals,
    waiters: &'a [WaiterId],
}

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        self.removals.cancel(self.waiters);
    }
}
