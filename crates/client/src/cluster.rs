//! [`Cluster`]: what a client knows of the cluster: which masters there are, and which of them is asked about which key.
//!
//! Hot calls go over framed links ([`BlockingLink`]), one to each master; everything else over gRPC, on a small runtime of
//! the client's own, so that it works from any thread, with or without a runtime around it.

use std::collections::BTreeSet;
use std::future::Future;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_proto::convert::{CallerId, ClusterInfo, GroupMap, RequestContext, Wire};
use moontide_proto::v1::master_client::MasterClient;
use moontide_proto::{ProtocolVersions, v1};
use moontide_types::bounds::REQUEST_BYTES_MAX;
use moontide_types::{ErrorCode, IdKey, MapVersion, ObjectId, Tenant, TenantGeneration, Term};
use parking_lot::{Mutex, RwLock};
use tokio::runtime::Runtime;
use tokio::task::AbortHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};
use tracing::debug;

use crate::config::StoreConfig;
use crate::decide::{Backoff, Routes, is_misrouted};
use crate::error::StoreError;
use crate::link::{BlockingLink, KeyResult, LinkConfig, LinkError};

/// The map is not looked at more often than this, however many calls go wrong.
const LOOK_MIN: Duration = Duration::from_millis(50);

/// The shortest time for which one of several masters is waited for, and what its answer may take longer than it was told.
const ATTEMPT_MIN: Duration = Duration::from_millis(250);
const ATTEMPT_SLACK: Duration = Duration::from_millis(100);

/// How long masters have to answer.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// What ids are made of.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) cluster: u64,
    pub(crate) id_key: IdKey,
    pub(crate) generation: TenantGeneration,
}

/// The masters, and what they told.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// Dropped in the background: a client may be dropped by a task.
    runtime: Option<Runtime>,
    pub(crate) config: StoreConfig,
    pub(crate) caller: CallerId,
    masters: RwLock<Arc<Masters>>,
    /// When the map was looked at last; held by whoever looks.
    looked: Mutex<Instant>,
}

/// Who hosts what, as far as it is known.
#[derive(Debug)]
pub(crate) struct Masters {
    version: u64,
    routes: Routes,
    /// There is one, and never another.
    alone: bool,
    all: Vec<Arc<Master>>,
}

/// One master.
#[derive(Debug)]
pub(crate) struct Master {
    grpc_address: String,
    /// Where the framed protocol is served.
    frame_address: String,
    channel: Channel,
    /// Whether it hosts any group.
    hosts: bool,
    link: Mutex<Option<Arc<BlockingLink>>>,
    /// It has said nothing when it was asked last.
    is_silent: AtomicBool,
}

impl Master {
    /// The framed link, which is made when it is first needed.
    pub(crate) fn link(&self, cluster: &Cluster) -> Result<Arc<BlockingLink>, StoreError> {
        // Whoever connects makes others wait, but not for longer than they would by themselves.
        let Some(mut link) = self.link.try_lock_for(cluster.config.connect.min(cluster.config.deadline)) else {
            return Err(StoreError::refused(ErrorCode::Unreachable));
        };
        if let Some(link) = &*link {
            return Ok(Arc::clone(link));
        }
        let mut config = link_config(&cluster.config, &self.frame_address, cluster.caller);
        if !cluster.is_alone() {
            // A little more than what the master is told, so that its answer is heard.
            let slack = ATTEMPT_SLACK.min(cluster.config.deadline / 10);
            config.deadline_ms = (cluster.attempt() + slack).as_millis().max(1) as u32; // ≤ the deadline
            config.connect_ms = config.connect_ms.min(config.deadline_ms);
        }
        Ok(Arc::clone(link.insert(Arc::new(BlockingLink::connect(config)?))))
    }

    /// For calls that are not hot.
    pub(crate) fn client(&self) -> MasterClient<Channel> {
        client(&self.channel)
    }
}

impl Cluster {
    /// Asks the masters at the configured addresses who they are, and opens a framed link.
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
        let caller = CallerId(draw());
        let until = Instant::now() + config.connect;
        let context = context(&config, caller, config.connect);
        let (mut map, mut why) = (None, "this is no host:port".to_owned());
        let named = config.masters();
        for (at, address) in named.iter().enumerate() {
            let channel = channel(&runtime, address, config.connect).map_err(unreachable)?;
            // One that says nothing leaves time for those behind it.
            let left = until.saturating_duration_since(Instant::now()) / (named.len() - at) as u32;
            let cold = Cold { runtime: &runtime, channel: &channel, until: Instant::now() + left };
            let asked = context.clone();
            let answer = cold.call(move |mut master| async move {
                master.get_group_map(v1::GetGroupMapRequest { context: Some(asked) }).await
            });
            match answer {
                Ok(answer) => {
                    map = answer.map.map(|map| (map, channel));
                    break;
                }
                Err(status) => why = said(&status),
            }
        }
        let Some((map, channel)) = map else { return Err(unreachable(why)) };
        let first = Cold { runtime: &runtime, channel: &channel, until };
        let info = first.call(move |mut master| async move {
            master.get_cluster_info(v1::GetClusterInfoRequest { context: Some(context) }).await
        });
        let identity = identity(&info.map_err(|status| unreachable(said(&status)))?)?;
        let cluster = Cluster {
            masters: RwLock::new(Arc::new(Masters {
                version: 0,
                routes: Routes::new(NonZeroU16::MIN, []),
                alone: false,
                all: vec![],
            })),
            runtime: Some(runtime),
            config,
            caller,
            looked: Mutex::new(Instant::now()),
        };
        cluster.follow(&map)?;
        // A cluster that elects a master just now has one soon.
        while cluster.masters().hosts().next().is_none() && Instant::now() < until {
            std::thread::sleep(LOOK_MIN);
            cluster.look(cluster.masters().version, until);
        }
        let masters = cluster.masters();
        let Some(master) = masters.hosts().next() else {
            let (address, why) = (cluster.config.master.clone(), "no master hosts a group".into());
            return Err(StoreError::NoMaster { address, why });
        };
        if masters.alone {
            master.link(&cluster)?;
        }
        Ok((cluster, identity))
    }

    pub(crate) fn masters(&self) -> Arc<Masters> {
        Arc::clone(&self.masters.read())
    }

    /// Whether there is one master, and never another.
    pub(crate) fn is_alone(&self) -> bool {
        self.masters.read().alone
    }

    /// Asks masters about the entries of a batch, each about its own: `ask` is given a master and positions, and answers
    /// for each of these. What was asked of the wrong one, or of one that is not there, is asked again when the map has been
    /// looked at, until the deadline.
    pub(crate) fn route<T>(
        &self,
        count: usize,
        deadline: Instant,
        id_of: impl Fn(usize) -> ObjectId,
        mut ask: impl FnMut(&Master, &[usize]) -> Result<Vec<KeyResult<T>>, StoreError>,
    ) -> Vec<Result<KeyResult<T>, StoreError>> {
        let mut answers: Vec<Option<Result<KeyResult<T>, StoreError>>> = (0..count).map(|_| None).collect();
        let mut backoff = Backoff::default();
        loop {
            let masters = self.masters();
            let open = (0..count).filter(|&at| answers[at].is_none());
            let mut parts = match masters.all.len() {
                1 if masters.alone => vec![(Some(0), open.collect())],
                _ => masters.routes.split(open.map(|at| (at, id_of(at)))),
            };
            // One that may be dead is waited for when the others have answered. Relaxed: a hint.
            let is_silent = |host: u16| masters.all[usize::from(host)].is_silent.load(Ordering::Relaxed);
            parts.sort_by_key(|&(host, _)| host.is_some_and(is_silent));
            let mut last = StoreError::refused(ErrorCode::WrongMaster);
            for (host, part) in parts.into_iter().filter(|(_, part)| !part.is_empty()) {
                let Some(host) = host else { continue };
                if !masters.alone && Instant::now() >= deadline {
                    break;
                }
                let master = &masters.all[usize::from(host)];
                let asked = ask(master, &part);
                if !masters.alone {
                    let says_nothing = |code| is_misrouted(code) && code != ErrorCode::WrongMaster;
                    let is_silent = asked.as_ref().is_err_and(|error| says_nothing(error.code()));
                    master.is_silent.store(is_silent, Ordering::Relaxed);
                }
                match asked {
                    Ok(found) => {
                        for (&at, found) in part.iter().zip(found) {
                            let found = match found {
                                Err(ErrorCode::WrongMaster) if moontide_types::planted("wrong-master-a-miss") => {
                                    Err(ErrorCode::NotFound)
                                }
                                found => found,
                            };
                            // Retry: the group is on its way to another master.
                            let again = matches!(found, Err(ErrorCode::WrongMaster | ErrorCode::Retry));
                            answers[at] = (masters.alone || !again).then_some(Ok(found));
                        }
                    }
                    Err(error) if !masters.alone && is_misrouted(error.code()) => last = error,
                    Err(error) => part.iter().for_each(|&at| answers[at] = Some(Err(error.clone()))),
                }
            }
            if answers.iter().all(Option::is_some) {
                return answers.into_iter().map(|answer| answer.expect("all are there")).collect();
            }
            let pause = backoff.pause(Duration::ZERO, spread());
            if Instant::now() + pause >= deadline {
                return answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(last.clone()))).collect();
            }
            std::thread::sleep(pause);
            self.look(masters.version, deadline);
        }
    }

    /// A map that a master has mentioned by the way.
    pub(crate) fn heard_of(&self, map: &v1::GroupMap) {
        let known = self.masters();
        let newer = map.version > known.version;
        let other = map.version == known.version && map.masters.len() != known.all.len();
        if !known.alone
            && (newer || other)
            && let Err(error) = self.follow(map)
        {
            debug!(%error, "a map was not understood");
        }
    }

    /// Looks at the map, unless somebody has found a newer one than `seen`, or has just looked.
    pub(crate) fn look(&self, seen: u64, deadline: Instant) {
        let Some(mut looked) = self.looked.try_lock_until(deadline) else { return };
        if self.masters().version != seen || looked.elapsed() < LOOK_MIN {
            return;
        }
        let known = self.masters().all.iter().map(|master| master.grpc_address.clone()).collect::<Vec<_>>();
        let addresses: BTreeSet<String> = self.config.masters().into_iter().chain(known).collect();
        let patience = deadline.saturating_duration_since(Instant::now()).min(LOOK_MAX);
        let (sender, answers) = std::sync::mpsc::channel();
        for address in addresses {
            let Ok(channel) = channel(self.runtime(), &address, patience) else { continue };
            let (sender, context) = (sender.clone(), context(&self.config, self.caller, LOOK_MAX));
            self.spawn(async move {
                let request = v1::GetGroupMapRequest { context: Some(context) };
                if let Ok(Ok(answer)) = tokio::time::timeout(patience, client(&channel).get_group_map(request)).await {
                    // Nobody may wait any more.
                    let _ = sender.send(answer.into_inner());
                }
            });
        }
        drop(sender);
        let until = Instant::now() + patience;
        let mut newest: Option<v1::GroupMap> = None;
        while let Ok(answer) = answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
            let Some(map) = answer.map else { continue };
            let is_newer = newest.as_ref().is_none_or(|newest| newest.version < map.version);
            if is_newer {
                let enough = map.version > seen;
                newest = Some(map);
                if enough {
                    break; // those that do not answer are not worth waiting for
                }
            }
        }
        if let Some(map) = newest.filter(|map| map.version != seen)
            && let Err(error) = self.follow(&map)
        {
            debug!(%error, "a map was not understood");
        }
        *looked = Instant::now();
    }

    /// Takes a map over. Links to masters that are still there are kept.
    fn follow(&self, map: &v1::GroupMap) -> Result<(), StoreError> {
        let parsed = GroupMap::from_wire(map).map_err(StoreError::Answer)?;
        let before = self.masters();
        let mut all = Vec::with_capacity(parsed.masters.len());
        for master in &parsed.masters {
            // One that is alone may be reached in another way than it knows of.
            let named = self.config.masters().into_iter().next().filter(|_| parsed.alone);
            let grpc_address = named.unwrap_or_else(|| master.grpc_address.to_owned());
            let hosts = !master.groups.is_empty();
            let same = |known: &&Arc<Master>| {
                (known.hosts, &*known.grpc_address, &*known.frame_address)
                    == (hosts, &*grpc_address, master.frame_address)
            };
            if let Some(known) = before.all.iter().find(same) {
                all.push(Arc::clone(known));
                continue;
            }
            let address = self.config.master.clone();
            let unreachable = |why: String| StoreError::NoMaster { address, why: why.into() };
            if master.frame_address.is_empty() {
                return Err(unreachable("it serves no framed protocol".into()));
            }
            let channel = channel(self.runtime(), &grpc_address, self.config.connect).map_err(unreachable)?;
            let frame_address = master.frame_address.to_owned();
            let (link, is_silent) = (Mutex::default(), AtomicBool::new(false));
            all.push(Arc::new(Master { grpc_address, frame_address, channel, hosts, link, is_silent }));
        }
        let groups = NonZeroU16::new(parsed.groups).unwrap_or(NonZeroU16::MIN);
        let routes = Routes::new(groups, map.masters.iter().map(|master| &master.groups[..]));
        let masters = Masters { version: map.version, routes, alone: parsed.alone, all };
        *self.masters.write() = Arc::new(masters);
        Ok(())
    }

    /// The context of a call.
    pub(crate) fn context(&self, deadline: Instant) -> RequestContext<'_> {
        let mut left = deadline.saturating_duration_since(Instant::now());
        if !self.is_alone() {
            left = left.min(self.attempt());
        }
        let left = left.as_millis();
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

    /// How long one master is waited for where there are several: one that says nothing may not be the master any more.
    fn attempt(&self) -> Duration {
        // Never all of the time: who has none left does not look who else there is.
        (self.config.deadline / 4).max(ATTEMPT_MIN).min(self.config.deadline / 2)
    }

    /// Whose keys are meant.
    pub(crate) fn tenant(&self) -> Tenant<'_> {
        Tenant::new(&self.config.tenant).expect("validated when it was connected")
    }

    /// A call over gRPC to one master. What it says in the answer's context is left to the caller.
    pub(crate) fn call<R: Send + 'static, F>(
        &self,
        master: &Master,
        deadline: Instant,
        call: impl FnOnce(MasterClient<Channel>) -> F,
    ) -> Result<R, StoreError>
    where
        F: Future<Output = Result<Response<R>, Status>> + Send + 'static,
    {
        let cold = Cold { runtime: self.runtime(), channel: &master.channel, until: deadline };
        cold.call(call).map_err(|status| StoreError::NoMaster {
            address: master.grpc_address.clone(),
            why: said(&status).into(),
        })
    }

    /// The same to each master that hosts something, one after the other.
    pub(crate) fn call_each<R: Send + 'static, F>(
        &self,
        deadline: Instant,
        mut call: impl FnMut(MasterClient<Channel>) -> F,
    ) -> Vec<Result<R, StoreError>>
    where
        F: Future<Output = Result<Response<R>, Status>> + Send + 'static,
    {
        self.masters().hosts().map(|master| self.call(master, deadline, &mut call)).collect()
    }

    /// Runs something in the background as long as the client lives.
    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.runtime().spawn(future);
    }

    /// The same for something that can be stopped.
    pub(crate) fn start(&self, future: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        self.runtime().spawn(future).abort_handle()
    }

    /// Clients of all masters that host something, for tasks.
    pub(crate) fn clients(&self) -> Vec<MasterClient<Channel>> {
        self.masters().hosts().map(|master| master.client()).collect()
    }

    /// For a link of tasks to a master that is alone.
    pub(crate) fn link_config(&self) -> Option<LinkConfig> {
        let masters = self.masters();
        let master = masters.all.first().filter(|_| masters.alone)?;
        Some(link_config(&self.config, &master.frame_address, self.caller))
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("there until it is dropped")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Masters {
    /// The version of the map.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Those that host something, each with its place in the map.
    pub(crate) fn by_place(&self) -> impl Iterator<Item = (u16, &Arc<Master>)> {
        (0u16..).zip(&self.all).filter(|(_, master)| master.hosts)
    }

    /// The groups of the master in this place.
    pub(crate) fn groups_of(&self, place: u16) -> impl Iterator<Item = u16> {
        self.routes.groups_of(place)
    }

    /// Whether every group has a master.
    pub(crate) fn is_complete(&self) -> bool {
        self.routes.is_complete()
    }

    /// Those that host something, in an order that stays the same.
    pub(crate) fn hosts(&self) -> impl Iterator<Item = &Arc<Master>> {
        self.all.iter().filter(|master| master.hosts)
    }
}

/// A channel that connects when it is used. The error says what is wrong with the address.
fn channel(runtime: &Runtime, address: &str, connect: Duration) -> Result<Channel, String> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| format!("this is no host:port ({error})"))?
        .tcp_nodelay(true)
        .connect_timeout(connect.max(Duration::from_millis(1)));
    // The channel starts tasks where it is made.
    let _entered = runtime.enter();
    Ok(endpoint.connect_lazy())
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
