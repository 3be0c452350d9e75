//! [`Desk`]: how a master's election reaches the world. It is one task that waits for answers and for time; here the
//! answers come by the simulated network, and the task goes on whenever anything happens at its master.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use moontide_master::Service;
use moontide_master::election::{Document, MasterAddresses, Snapshot, Token};
use moontide_meta::Inheritance;
use moontide_types::{GroupId, MonoTime, Term};

use super::{ANSWER_MAX, addresses_of, index_of};
use crate::dice::Dice;
use crate::event::{Message, RegistryAnswer, RegistryRequest, Who};

/// What arrived.
#[derive(Debug)]
pub(super) enum Reply {
    Registry(RegistryAnswer),
    Bequeathed,
}

/// What was handed to this master, and since when it is here.
type Estates = BTreeMap<GroupId, (Arc<Inheritance>, MonoTime)>;

/// Between the election and the world.
pub(super) struct Desk {
    pub(super) index: usize,
    pub(super) now: Cell<MonoTime>,
    pub(super) dice: RefCell<Dice>,
    /// Numbers of calls begin with the life of the process, so that none is used twice.
    pub(super) calls: Cell<u64>,
    pub(super) letters: RefCell<Vec<(Who, Message)>>,
    /// When it wants to be woken.
    pub(super) wakes: RefCell<Vec<Duration>>,
    pub(super) replies: RefCell<BTreeMap<u64, Option<Reply>>>,
    pub(super) estates: RefCell<Estates>,
    /// Made when the master has joined.
    pub(super) service: OnceCell<Arc<Service>>,
    pub(super) open: Box<dyn Fn(Term) -> Arc<Service>>,
    /// Until then nobody else takes its groups.
    pub(super) confirmed_until: Cell<MonoTime>,
    pub(super) retires: Cell<bool>,
    pub(super) handed_over: Cell<u64>,
}

/// The registry did not answer.
#[derive(Debug)]
pub(super) struct Away;

impl Desk {
    pub(super) fn addresses(&self) -> MasterAddresses {
        addresses_of(self.index)
    }

    pub(super) fn random_part(&self, longest: Duration) -> Duration {
        self.dice.borrow_mut().up_to(longest)
    }

    /// Until so much time has passed, or the master is to retire.
    pub(super) async fn sleep(self: &Rc<Desk>, span: Duration) {
        self.wakes.borrow_mut().push(span);
        Waits { desk: Rc::clone(self), call: 0, until: self.now.get().after(span) }.await;
    }

    async fn ask(self: &Rc<Desk>, to: Who, message: impl FnOnce(u64) -> Message) -> Option<Reply> {
        let call = self.calls.get() + 1;
        self.calls.set(call);
        self.letters.borrow_mut().push((to, message(call)));
        self.replies.borrow_mut().insert(call, None);
        self.wakes.borrow_mut().push(ANSWER_MAX);
        let reply = Waits { desk: Rc::clone(self), call, until: self.now.get().after(ANSWER_MAX) }.await;
        self.replies.borrow_mut().remove(&call);
        reply
    }

    async fn registry(self: &Rc<Desk>, request: RegistryRequest) -> Result<RegistryAnswer, Away> {
        match self.ask(Who::Registry, |call| Message::Registry { call, request }).await {
            Some(Reply::Registry(answer)) => Ok(answer),
            _ => Err(Away),
        }
    }

    pub(super) async fn read(self: &Rc<Desk>) -> Result<Snapshot, Away> {
        match self.registry(RegistryRequest::Read).await? {
            RegistryAnswer::Seen(seen) => Ok(seen),
            _ => Err(Away),
        }
    }

    pub(super) async fn write(self: &Rc<Desk>, token: Option<&Token>, next: &Document) -> Result<bool, Away> {
        let request = RegistryRequest::Write { token: token.cloned(), document: next.clone() };
        Ok(matches!(self.registry(request).await?, RegistryAnswer::Wrote(true)))
    }

    pub(super) async fn join(self: &Rc<Desk>, number: Term, lease: Duration) -> Result<(), Away> {
        let addresses = self.addresses();
        self.registry(RegistryRequest::Join { number, addresses, lease }).await.map(|_| ())
    }

    pub(super) async fn renew(self: &Rc<Desk>, number: Term) -> Result<bool, Away> {
        let answer = self.registry(RegistryRequest::Renew { number }).await?;
        Ok(matches!(answer, RegistryAnswer::Renewed(true)))
    }

    pub(super) async fn remove(self: &Rc<Desk>, number: Term) -> Result<(), Away> {
        self.registry(RegistryRequest::Remove { number }).await.map(|_| ())
    }

    /// Hands on what is known of a group. Whether it arrived makes no difference to what follows.
    pub(super) async fn bequeath(
        self: &Rc<Desk>,
        heir: &MasterAddresses,
        group: GroupId,
        estate: Inheritance,
    ) {
        let (to, estate) = (Who::Master(index_of(&heir.grpc)), Arc::new(estate));
        let _ = self.ask(to, |call| Message::Bequest { call, group, estate }).await;
    }
}

/// An answer, or the end of waiting for it.
struct Waits {
    desk: Rc<Desk>,
    call: u64,
    until: MonoTime,
}

impl Future for Waits {
    type Output = Option<Reply>;

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Reply>> {
        let reply = self.desk.replies.borrow_mut().get_mut(&self.call).and_then(Option::take);
        let woken = self.call == 0 && self.desk.retires.get();
        match reply {
            Some(reply) => Poll::Ready(Some(reply)),
            None if woken || self.desk.now.get() >= self.until => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}
