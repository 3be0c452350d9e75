//! [`ElectionIo`]: connects a master's election to the simulated world. The election is one task that waits for replies
//! and time; the replies arrive over the simulated network, and the task is polled whenever something happens at its
//! master.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use moontide_master::Service;
use moontide_master::election::{ClusterState, DocumentVersion, MasterAddresses, Snapshot};
use moontide_meta::GroupHandoff;
use moontide_types::{GroupId, MonoTime, Term};

use super::{REPLY_TIMEOUT, addresses_of, index_of};
use crate::event::{Message, ProcessId, RegistryRequest, RegistryResponse};
use crate::rng::SimRng;

/// A reply that has arrived.
#[derive(Debug)]
pub(super) enum Reply {
    Registry(RegistryResponse),
    HandoffAck,
}

/// Handoffs received by this master, with the time of arrival.
type Handoffs = BTreeMap<GroupId, (Arc<GroupHandoff>, MonoTime)>;

/// Interface between the election and the world.
pub(super) struct ElectionIo {
    pub(super) index: usize,
    pub(super) now: Cell<MonoTime>,
    pub(super) rng: RefCell<SimRng>,
    /// Call numbers start with the incarnation of the process, so that none is used twice.
    pub(super) calls: Cell<u64>,
    pub(super) outbox: RefCell<Vec<(ProcessId, Message)>>,
    /// When it wants to be woken.
    pub(super) wakes: RefCell<Vec<Duration>>,
    pub(super) replies: RefCell<BTreeMap<u64, Option<Reply>>>,
    pub(super) handoffs: RefCell<Handoffs>,
    /// Made when the master has joined.
    pub(super) service: OnceCell<Arc<Service>>,
    pub(super) open: Box<dyn Fn(Term) -> Arc<Service>>,
    /// Until then no other master takes its groups.
    pub(super) confirmed_until: Cell<MonoTime>,
    pub(super) retires: Cell<bool>,
    pub(super) handed_over: Cell<u64>,
}

/// The registry did not reply.
#[derive(Debug)]
pub(super) struct RegistryUnavailable;

impl ElectionIo {
    pub(super) fn addresses(&self) -> MasterAddresses {
        addresses_of(self.index)
    }

    pub(super) fn random_part(&self, longest: Duration) -> Duration {
        self.rng.borrow_mut().up_to(longest)
    }

    /// Until so much time has passed, or the master is to retire.
    pub(super) async fn sleep(self: &Rc<ElectionIo>, span: Duration) {
        self.wakes.borrow_mut().push(span);
        PendingReply { io: Rc::clone(self), call: 0, until: self.now.get().after(span) }.await;
    }

    async fn ask(
        self: &Rc<ElectionIo>,
        to: ProcessId,
        message: impl FnOnce(u64) -> Message,
    ) -> Option<Reply> {
        let call = self.calls.get() + 1;
        self.calls.set(call);
        self.outbox.borrow_mut().push((to, message(call)));
        self.replies.borrow_mut().insert(call, None);
        self.wakes.borrow_mut().push(REPLY_TIMEOUT);
        let reply =
            PendingReply { io: Rc::clone(self), call, until: self.now.get().after(REPLY_TIMEOUT) }.await;
        self.replies.borrow_mut().remove(&call);
        reply
    }

    async fn registry(
        self: &Rc<ElectionIo>,
        request: RegistryRequest,
    ) -> Result<RegistryResponse, RegistryUnavailable> {
        match self.ask(ProcessId::Registry, |call| Message::Registry { call, request }).await {
            Some(Reply::Registry(reply)) => Ok(reply),
            _ => Err(RegistryUnavailable),
        }
    }

    pub(super) async fn read(self: &Rc<ElectionIo>) -> Result<Snapshot, RegistryUnavailable> {
        match self.registry(RegistryRequest::Read).await? {
            RegistryResponse::Seen(seen) => Ok(seen),
            _ => Err(RegistryUnavailable),
        }
    }

    pub(super) async fn write(
        self: &Rc<ElectionIo>,
        token: Option<&DocumentVersion>,
        next: &ClusterState,
    ) -> Result<bool, RegistryUnavailable> {
        let request = RegistryRequest::Write { token: token.cloned(), document: next.clone() };
        Ok(matches!(self.registry(request).await?, RegistryResponse::Wrote(true)))
    }

    pub(super) async fn join(
        self: &Rc<ElectionIo>,
        number: Term,
        lease: Duration,
    ) -> Result<(), RegistryUnavailable> {
        let addresses = self.addresses();
        self.registry(RegistryRequest::Join { number, addresses, lease }).await.map(|_| ())
    }

    pub(super) async fn renew(self: &Rc<ElectionIo>, number: Term) -> Result<bool, RegistryUnavailable> {
        let reply = self.registry(RegistryRequest::Renew { number }).await?;
        Ok(matches!(reply, RegistryResponse::Renewed(true)))
    }

    pub(super) async fn remove(self: &Rc<ElectionIo>, number: Term) -> Result<(), RegistryUnavailable> {
        self.registry(RegistryRequest::Remove { number }).await.map(|_| ())
    }

    /// Sends a handoff. The following steps do not depend on its arrival.
    pub(super) async fn send_handoff(
        self: &Rc<ElectionIo>,
        new_owner: &MasterAddresses,
        group: GroupId,
        handoff: GroupHandoff,
    ) -> bool {
        let (to, handoff) = (ProcessId::Master(index_of(&new_owner.grpc)), Arc::new(handoff));
        self.ask(to, |call| Message::Handoff { call, group, handoff }).await.is_some()
    }
}

/// Future of a reply; resolves to `None` on timeout.
struct PendingReply {
    io: Rc<ElectionIo>,
    call: u64,
    until: MonoTime,
}

impl Future for PendingReply {
    type Output = Option<Reply>;

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Reply>> {
        let reply = self.io.replies.borrow_mut().get_mut(&self.call).and_then(Option::take);
        let woken = self.call == 0 && self.io.retires.get();
        match reply {
            Some(reply) => Poll::Ready(Some(reply)),
            None if woken || self.io.now.get() >= self.until => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}
