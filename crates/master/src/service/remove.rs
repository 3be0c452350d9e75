//! Remove: the one hot call that waits, for nodes to kill what they have.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hashbrown::HashMap;
use moontide_meta::{Effects, Removal, Waiter};
use moontide_proto::convert::{RemoveRequest, Wire};
use moontide_proto::v1;
use moontide_types::ErrorCode;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{Codes, Service, refused};

/// Keys of all calls that wait for nodes.
#[derive(Debug, Default)]
pub(super) struct Removals {
    drawn: AtomicU64,
    waiting: Mutex<HashMap<Waiter, Waits>>,
}

/// A key that waits.
#[derive(Debug)]
struct Waits {
    call: Arc<Call>,
    position: u32,
    group: usize,
}

/// A call with keys that are not done yet.
#[derive(Debug, Default)]
struct Call {
    state: Mutex<CallState>,
    done: Notify,
}

#[derive(Debug, Default)]
struct CallState {
    left: usize,
    finished: Vec<(u32, Option<ErrorCode>)>,
}

impl Call {
    /// Until no key is left. A notice may be of an earlier moment, when keys that wait had not been added yet.
    async fn finished(&self) {
        loop {
            let notice = self.done.notified();
            if self.state.lock().left == 0 {
                return;
            }
            notice.await;
        }
    }
}

impl Removals {
    /// A key that has to wait. Known before the group is asked, so that no end can come too early.
    fn add(&self, call: &Arc<Call>, position: u32, group: usize) -> Waiter {
        // Relaxed: a number that nobody else draws.
        let waiter = Waiter(self.drawn.fetch_add(1, Ordering::Relaxed));
        call.state.lock().left += 1;
        self.waiting.lock().insert(waiter, Waits { call: Arc::clone(call), position, group });
        waiter
    }

    /// A removal has come to its end; whoever gave up waiting has been forgotten before.
    pub(super) fn finish(&self, waiter: Waiter, code: Option<ErrorCode>) {
        let Some(Waits { call, position, .. }) = self.waiting.lock().remove(&waiter) else { return };
        let mut state = call.state.lock();
        state.left -= 1;
        state.finished.push((position, code));
        if state.left == 0 {
            call.done.notify_one();
        }
    }

    /// The group is somebody else's: whoever waits for it hears that it is not certain.
    pub(super) fn abandon(&self, group: usize) {
        let of_group = |(waiter, waits): (&Waiter, &Waits)| (waits.group == group).then_some(*waiter);
        let mut abandoned: Vec<Waiter> = self.waiting.lock().iter().filter_map(of_group).collect();
        abandoned.sort_unstable(); // a hash map's order is nobody's business
        for waiter in abandoned {
            self.finish(waiter, Some(ErrorCode::Pending));
        }
    }

    fn forget(&self, waiters: &[Waiter]) {
        let mut waiting = self.waiting.lock();
        for waiter in waiters {
            waiting.remove(waiter);
        }
    }
}

impl Service {
    /// Removes objects. What nodes have not confirmed when the caller's deadline comes is `Pending`; it goes on.
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
        let mut codes = Codes::new(request.keys.len());
        let call = Arc::new(Call::default());
        let mut waiters = vec![];
        let mut effects = Effects::new();
        for (index, asks, positions) in self.sort(&caller, request.keys).parts() {
            let mut group = match self.group(index) {
                Ok(group) => group,
                Err(code) => {
                    positions.iter().for_each(|&position| codes.set(position as usize, Some(code)));
                    continue;
                }
            };
            for (ask, &position) in asks.iter().zip(positions) {
                let waiter = self.removals.add(&call, position, index);
                match group.remove(now, ask, request.force, waiter, &mut effects) {
                    Removal::Waiting => {
                        codes.set(position as usize, Some(ErrorCode::Pending));
                        waiters.push(waiter);
                    }
                    Removal::Done(code) => self.removals.finish(waiter, code),
                }
            }
            self.deliver(&group, &mut effects);
        }
        if !waiters.is_empty() {
            let deadline = Duration::from_millis(caller.context.deadline_ms.into());
            // A caller that has gone away drops this future, and what it left here must go, too.
            let _forget = Forget { removals: &self.removals, waiters: &waiters };
            let _ = tokio::time::timeout(deadline, call.finished()).await;
        }
        // Another master may have the group by now, and objects that we do not know of.
        let unconfirmed = self.is_unconfirmed() && !moontide_types::planted("unconfirmed-removal-certain");
        for (position, code) in call.state.lock().finished.drain(..) {
            let certain = !unconfirmed || !matches!(code, None | Some(ErrorCode::NotFound));
            codes.set(position as usize, if certain { code } else { Some(ErrorCode::Pending) });
        }
        v1::OutcomesResponse { context: Some(self.context(Some(&caller))), codes: codes.0.into() }
    }
}

struct Forget<'a> {
    removals: &'a Removals,
    waiters: &'a [Waiter],
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.removals.forget(self.waiters);
    }
}
