//! [`AsyncLink`]: a link for tasks of a tokio runtime. The handle; the work is done by its [`driver`](super::driver).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use moontide_types::{Key, Tenant};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout_at;

use super::call::{self, Call, KeyResult, Located, LookupReply, Outcome};
use super::config::{Deadline, Known, LinkConfig, LinkLoad};
use super::driver::{Ask, COMMANDS_MAX, Command, Driver, Shared, SingleKey};
use super::error::LinkError;
use super::frames::{Frame, Outgoing};
use super::traffic::Gathered;

/// A link to a master for tasks; clones share it. Its driver ends with the last clone.
///
/// Calls wait until the deadline of [`LinkConfig`], or of their own context; a call that is dropped is forgotten.
#[derive(Clone, Debug)]
pub struct AsyncLink {
    commands: mpsc::Sender<Command>,
    shared: Arc<Shared>,
}

impl AsyncLink {
    /// Connects, and starts the driver on the current runtime. Fails within [`LinkConfig::connect_ms`], saying where
    /// and why.
    pub async fn connect(config: LinkConfig) -> Result<AsyncLink, LinkError> {
        config.validate()?;
        let (commands, receiver) = mpsc::channel(COMMANDS_MAX);
        let shared = Arc::new(Shared::new(config));
        tokio::spawn(Driver::connect(shared.clone(), receiver).await?.run());
        Ok(AsyncLink { commands, shared })
    }

    /// Is the key a complete object? Leaves at once, or together with other keys of this tenant.
    pub async fn exist_one(&self, tenant: Tenant<'_>, key: Key<'_>) -> Result<KeyResult<bool>, LinkError> {
        let ask = Ask::Single(SingleKey::new(Gathered::Exist, tenant, key, 0));
        self.submit(ask, self.shared.config.deadline()).await.map(Outcome::into_exist)
    }

    /// Where is the object? Leaves at once, or together with other keys of this tenant and lease. 0 asks for no lease.
    pub async fn lookup_one(
        &self,
        tenant: Tenant<'_>,
        key: Key<'_>,
        lease_ms: u32,
    ) -> Result<KeyResult<Located>, LinkError> {
        call::check_lease(lease_ms)?;
        let ask = Ask::Single(SingleKey::new(Gathered::Lookup, tenant, key, lease_ms));
        self.submit(ask, self.shared.config.deadline()).await.map(Outcome::into_lookup)
    }

    /// Which keys are complete objects?
    pub async fn exist(
        &self,
        tenant: Tenant<'_>,
        keys: &[Key<'_>],
    ) -> Result<Vec<KeyResult<bool>>, LinkError> {
        let deadline = self.shared.config.deadline();
        let context = self.shared.config.context(tenant, *self.shared.known.lock(), deadline.ms);
        let frame = self.exchange(call::outgoing_exist(&context, call::pack(keys)?)?, deadline).await?;
        call::read_exist(frame, keys.len(), &self.shared.address)
    }

    /// Where are the objects? 0 asks for no lease.
    pub async fn lookup(
        &self,
        tenant: Tenant<'_>,
        keys: &[Key<'_>],
        lease_ms: u32,
        attributes: bool,
    ) -> Result<LookupReply, LinkError> {
        let deadline = self.shared.config.deadline();
        let context = self.shared.config.context(tenant, *self.shared.known.lock(), deadline.ms);
        let outgoing = call::outgoing_lookup(&context, call::pack(keys)?, lease_ms, attributes)?;
        call::read_lookup(self.exchange(outgoing, deadline).await?, keys.len(), &self.shared.address)
    }

    /// Any call of the framed protocol, with the deadline of its context. The answer may say, in its own context,
    /// that the call failed.
    pub async fn call<'a, C: Call<'a>>(&self, request: &C) -> Result<C::Reply, LinkError> {
        let outgoing = call::outgoing(request)?;
        let deadline = Deadline::after(request.context().deadline_ms);
        call::read(self.exchange(outgoing, deadline).await?, &self.shared.address)
    }

    /// What the contexts of further calls say about the master.
    pub fn set_known(&self, known: Known) {
        *self.shared.known.lock() = known;
    }

    /// How busy the link was when its driver last looked.
    pub fn load(&self) -> LinkLoad {
        // Relaxed: two numbers for a metric, ordered with nothing.
        LinkLoad {
            in_flight: self.shared.in_flight.load(Ordering::Relaxed),
            gathered: self.shared.gathered.load(Ordering::Relaxed),
        }
    }

    async fn exchange(&self, outgoing: Outgoing, deadline: Deadline) -> Result<Frame, LinkError> {
        self.submit(Ask::Call(outgoing), deadline).await.map(Outcome::into_frame)
    }

    /// Hands a command to the driver, waiting for room, and waits for the outcome.
    async fn submit(&self, ask: Ask, deadline: Deadline) -> Result<Outcome, LinkError> {
        let (reply, outcome) = oneshot::channel();
        let command = Command { ask, deadline, reply };
        // The driver drops a command without an outcome when its time is over, or when the runtime ends.
        let dropped = || match deadline.remaining() {
            Some(_) => LinkError::lost(&self.shared.address),
            None => deadline.error(&self.shared.address),
        };
        let work = async {
            self.commands.send(command).await.map_err(|_| dropped())?;
            outcome.await.map_err(|_| dropped())?
        };
        let waited = timeout_at(deadline.at.into(), work).await;
        waited.unwrap_or_else(|_| Err(deadline.error(&self.shared.address)))
    }
}
