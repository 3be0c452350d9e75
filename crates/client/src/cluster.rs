//! [`Cluster`]: what a client knows of the cluster, and the calls to the master that are not hot.
//!
//! Hot calls go over the framed link ([`BlockingLink`]); everything else over gRPC, on a small runtime of the client's
//! own, so that it works from any thread, with or without a runtime around it.

use std::future::Future;
use std::time::{Duration, Instant};

use moontide_proto::convert::{CallerId, ClusterInfo, RequestContext, Wire};
use moontide_proto::v1::master_client::MasterClient;
use moontide_proto::{ProtocolVersions, v1};
use moontide_types::bounds::REQUEST_BYTES_MAX;
use moontide_types::{ErrorCode, IdKey, MapVersion, Tenant, TenantGeneration, Term};
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

use crate::config::StoreConfig;
use crate::error::StoreError;
use crate::link::{BlockingLink, LinkConfig, LinkError};

/// What ids are made of.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) cluster: u64,
    pub(crate) id_key: IdKey,
    pub(crate) generation: TenantGeneration,
}

/// The master, and what it told.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// Dropped in the background: a client may be dropped by a task.
    runtime: Option<Runtime>,
    channel: Channel,
    pub(crate) config: StoreConfig,
    pub(crate) caller: CallerId,
    pub(crate) link: BlockingLink,
    /// Where the framed protocol is served.
    pub(crate) frame_address: String,
}

impl Cluster {
    /// Asks the master at the configured address who it is, and opens the framed link.
    pub(crate) fn connect(config: StoreConfig) -> Result<(Cluster, Identity), StoreError> {
        config.validate()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("moontide-client")
            .enable_all()
            .build()
            .map_err(|error| StoreError::system("start the client's runtime", error))?;
        let unreachable =
            |why: String| StoreError::NoMaster { address: config.master.clone(), why: why.into() };
        let endpoint = Endpoint::from_shared(format!("http://{}", config.master))
            .map_err(|error| unreachable(format!("this is no host:port ({error})")))?
            .tcp_nodelay(true)
            .connect_timeout(config.connect);
        let channel = {
            // The channel starts tasks where it is made.
            let _entered = runtime.enter();
            endpoint.connect_lazy()
        };
        let caller = CallerId(draw());
        let until = Instant::now() + config.connect;
        let context = context(&config, caller, config.connect);
        let first = Cold { runtime: &runtime, channel: &channel, until };
        let asked = context.clone();
        let map = first.call(move |mut master| async move {
            master.get_group_map(v1::GetGroupMapRequest { context: Some(asked) }).await
        });
        let map = map.map_err(|status| unreachable(said(&status)))?;
        let asked = context.clone();
        let info = first.call(move |mut master| async move {
            master.get_cluster_info(v1::GetClusterInfoRequest { context: Some(asked) }).await
        });
        let identity = identity(&info.map_err(|status| unreachable(said(&status)))?)?;
        let frame_address = map
            .map
            .and_then(|map| map.masters.into_iter().next())
            .map(|master| master.frame_address)
            .filter(|address| !address.is_empty())
            .ok_or_else(|| unreachable("it serves no framed protocol".into()))?;
        let link = BlockingLink::connect(link_config(&config, &frame_address, caller))?;
        Ok((Cluster { runtime: Some(runtime), channel, config, caller, link, frame_address }, identity))
    }

    /// The context of a call.
    pub(crate) fn context(&self, deadline: Instant) -> RequestContext<'_> {
        let left = deadline.saturating_duration_since(Instant::now()).as_millis();
        RequestContext {
            tenant: self.tenant(),
            group: None,
            map_version: MapVersion(0),
            term: Term::ZERO,
            caller: self.caller,
            session: None,
            deadline_ms: left.clamp(1, 600_000) as u32, // clamped
            token: self.config.token,
        }
    }

    /// Whose keys are meant.
    pub(crate) fn tenant(&self) -> Tenant<'_> {
        Tenant::new(&self.config.tenant).expect("validated when it was connected")
    }

    /// A call over gRPC. What the master says in the answer's context is left to the caller.
    pub(crate) fn call<R: Send + 'static, F>(
        &self,
        deadline: Instant,
        call: impl FnOnce(MasterClient<Channel>) -> F,
    ) -> Result<R, StoreError>
    where
        F: Future<Output = Result<Response<R>, Status>> + Send + 'static,
    {
        let cold = Cold { runtime: self.runtime(), channel: &self.channel, until: deadline };
        cold.call(call).map_err(|status| self.failed(&status))
    }

    /// Runs something in the background as long as the client lives.
    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.runtime().spawn(future);
    }

    /// A client of the master, for tasks.
    pub(crate) fn master(&self) -> MasterClient<Channel> {
        client(&self.channel)
    }

    pub(crate) fn link_config(&self) -> LinkConfig {
        link_config(&self.config, &self.frame_address, self.caller)
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("there until it is dropped")
    }

    fn failed(&self, status: &Status) -> StoreError {
        StoreError::NoMaster { address: self.config.master.clone(), why: said(status).into() }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A call over gRPC from a thread that waits.
struct Cold<'a> {
    runtime: &'a Runtime,
    channel: &'a Channel,
    until: Instant,
}

impl Cold<'_> {
    fn call<R: Send + 'static, F>(&self, call: impl FnOnce(MasterClient<Channel>) -> F) -> Result<R, Status>
    where
        F: Future<Output = Result<Response<R>, Status>> + Send + 'static,
    {
        let (answer, answered) = std::sync::mpsc::sync_channel(1);
        let future = call(client(self.channel));
        let task = self.runtime.spawn(async move {
            // Nobody may wait any more.
            let _ = answer.send(future.await.map(Response::into_inner));
        });
        let left = self.until.saturating_duration_since(Instant::now());
        answered.recv_timeout(left).unwrap_or_else(|_| {
            task.abort();
            Err(Status::deadline_exceeded("no answer in time"))
        })
    }
}

fn client(channel: &Channel) -> MasterClient<Channel> {
    let max = REQUEST_BYTES_MAX;
    MasterClient::new(channel.clone()).max_decoding_message_size(2 * max).max_encoding_message_size(max)
}

fn link_config(config: &StoreConfig, address: &str, caller: CallerId) -> LinkConfig {
    let deadline_ms = config.deadline.as_millis() as u32; // validated
    let connect_ms = config.connect.as_millis() as u32; // validated
    LinkConfig { token: config.token, deadline_ms, connect_ms, ..LinkConfig::new(address, caller) }
}

fn context(config: &StoreConfig, caller: CallerId, deadline: Duration) -> v1::RequestContext {
    v1::RequestContext {
        tenant: config.tenant.clone(),
        caller: caller.0,
        deadline_ms: deadline.as_millis() as u32, // validated
        token: config.token.as_bytes().to_vec().into(),
        ..Default::default()
    }
}

/// What the master said about the cluster.
pub(crate) fn identity(message: &v1::GetClusterInfoResponse) -> Result<Identity, StoreError> {
    let answer = ClusterInfo::from_wire(message).map_err(StoreError::Answer)?;
    let generation = answer.context().tenant_generation;
    let facts = answer
        .into_result()
        .map_err(|context| StoreError::refused(context.code.unwrap_or(ErrorCode::Internal)))?;
    if ProtocolVersions::CURRENT.common(facts.protocol).is_none() {
        return Err(StoreError::refused(ErrorCode::Unsupported));
    }
    let secret = facts.id_key_secret.ok_or(StoreError::refused(ErrorCode::Unauthenticated))?;
    Ok(Identity { cluster: facts.cluster, id_key: IdKey::new(facts.id_key, secret.0), generation })
}

/// A status in words, with what is behind it.
fn said(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    if text.is_empty() { format!("{:?}", status.code()) } else { text }
}

/// Says something again that may be said twice, if the connection was lost over it: a master that was started anew is
/// found by the next attempt, and nobody should have to know.
pub(crate) fn insisting<T>(mut say: impl FnMut() -> Result<T, LinkError>) -> Result<T, LinkError> {
    match say() {
        Err(LinkError::Lost { .. }) => say(),
        answer => answer,
    }
}

/// A number that nobody else draws.
pub(crate) fn draw() -> u64 {
    let mut bytes = [0; 8];
    // Never short for 8 bytes; a zero in a chroot without randomness is as good as any number.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_le_bytes(bytes)
}

/// A cheap number that differs from call to call, for spreading load. Not random in any stronger sense.
pub(crate) fn spread() -> u64 {
    thread_local!(static NEXT: std::cell::Cell<u64> = std::cell::Cell::new(draw()));
    NEXT.with(|next| {
        let word = next.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        next.set(word);
        (word ^ (word >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 17
    })
}
