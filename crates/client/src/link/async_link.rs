//! [`AsyncLink`]: link for tasks of a tokio runtime. This file is the handle; its [`driver`](super::driver) does the
//! work.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use moontide_rt::time::Instant;
use moontide_types::{Key, Tenant};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::call::{self, Call, KeyResult, LookupEntry, LookupReply, Outcome};
use super::config::{Deadline, LinkConfig, LinkLoad, MasterHint};
use super::driver::{COMMANDS_MAX, Command, CommandBody, LinkDriver, QueuedKey, Shared};
use super::error::LinkError;
use super::frames::{Frame, RequestFrame};
use super::tracker::BatchedCall;

/// Link to a master for tasks; clones share it. Its driver ends with the last clone.
///
/// Calls wait until the deadline of [`LinkConfig`], or of their own context. Dropping the future of a call cancels it.
#[derive(Clone, Debug)]
pub struct AsyncLink {
    commands: mpsc::Sender<Command>,
    shared: Arc<Shared>,
}

impl AsyncLink {
    /// Connects, and starts the driver on the current runtime. Fails within [`LinkConfig::connect_timeout_ms`]; the
    /// error names the address and the reason.
    pub async fn connect(config: LinkConfig) -> Result<AsyncLink, LinkError> {
        config.validate()?;
        let (commands, receiver) = mpsc::channel(COMMANDS_MAX);
        let shared = Arc::new(Shared::new(config));
        tokio::spawn(LinkDriver::connect(shared.clone(), receiver).await?.run());
        Ok(AsyncLink { commands, shared })
    }

    /// Returns whether the key is a complete object. Sent at once, or batched with other keys of this tenant.
    pub async fn exist_one(&self, tenant: Tenant<'_>, key: Key<'_>) -> Result<KeyResult<bool>, LinkError> {
        let body = CommandBody::Single(QueuedKey::new(BatchedCall::Exist, tenant, key, 0));
        self.submit(body, self.shared.config.deadline(None)).await.map(Outcome::into_exist)
    }

    /// Returns the locations of an object. Sent at once, or batched with other keys of this tenant and lease.
    /// `lease_ms` 0 requests no lease.
    pub async fn lookup_one(
        &self,
        tenant: Tenant<'_>,
        key: Key<'_>,
        lease_ms: u32,
    ) -> Result<KeyResult<LookupEntry>, LinkError> {
        call::check_lease(lease_ms)?;
        let body = CommandBody::Single(QueuedKey::new(BatchedCall::Lookup, tenant, key, lease_ms));
        self.submit(body, self.shared.config.deadline(None)).await.map(Outcome::into_lookup)
    }

    /// Returns which keys are complete objects.
    pub async fn exist(
        &self,
        tenant: Tenant<'_>,
        keys: &[Key<'_>],
    ) -> Result<Vec<KeyResult<bool>>, LinkError> {
        let deadline = self.shared.config.deadline(None);
        let context = self.shared.config.context(tenant, *self.shared.hint.lock(), deadline.ms);
        let frame = self.exchange(call::outgoing_exist(&context, call::pack(keys)?)?, deadline).await?;
        call::read_exist(frame, keys.len(), &self.shared.address)
    }

    /// Returns the locations of objects. `lease_ms` 0 requests no lease.
    pub async fn lookup(
        &self,
        tenant: Tenant<'_>,
        keys: &[Key<'_>],
        lease_ms: u32,
        attributes: bool,
    ) -> Result<LookupReply, LinkError> {
        let deadline = self.shared.config.deadline(None);
        let context = self.shared.config.context(tenant, *self.shared.hint.lock(), deadline.ms);
        let outgoing = call::outgoing_lookup(&context, call::pack(keys)?, lease_ms, attributes)?;
        call::read_lookup(self.exchange(outgoing, deadline).await?, keys.len(), &self.shared.address)
    }

    /// Makes any call of the framed protocol, with the deadline of its context. The context of the reply may hold an
    /// error.
    pub async fn call<'a, C: Call<'a>>(&self, request: &C) -> Result<C::Reply, LinkError> {
        let outgoing = call::outgoing(request)?;
        let deadline = Deadline::after(request.context().timeout_ms);
        call::read(self.exchange(outgoing, deadline).await?, &self.shared.address)
    }

    /// Sets the map version and term that further calls send to the master.
    pub fn set_known(&self, known: MasterHint) {
        *self.shared.hint.lock() = known;
    }

    /// Returns the load of the link when its driver last ran.
    pub fn load(&self) -> LinkLoad {
        // Relaxed: two numbers for a metric that order nothing.
        LinkLoad {
            in_flight: self.shared.in_flight.load(Ordering::Relaxed),
            queued_keys: self.shared.queued_keys.load(Ordering::Relaxed),
        }
    }

    async fn exchange(&self, outgoing: RequestFrame, deadline: Deadline) -> Result<Frame, LinkError> {
        self.submit(CommandBody::Call(outgoing), deadline).await.map(Outcome::into_frame)
    }

    /// Sends a command to the driver, waiting for space in the channel, and waits for the outcome.
    async fn submit(&self, body: CommandBody, deadline: Deadline) -> Result<Outcome, LinkError> {
        let (reply, outcome) = oneshot::channel();
        let command = Command { body, deadline, reply };
        // The driver drops a command without an outcome at its deadline, and when the runtime ends.
        let dropped = || match deadline.remaining() {
            Some(_) => LinkError::lost(&self.shared.address),
            None => deadline.error(&self.shared.address),
        };
        let work = async {
            self.commands.send(command).await.map_err(|_| dropped())?;
            outcome.await.map_err(|_| dropped())?
        };
        let waited = timeout(deadline.at.saturating_duration_since(Instant::now()), work).await;
        waited.unwrap_or_else(|_| Err(deadline.error(&self.shared.address)))
    }
}
