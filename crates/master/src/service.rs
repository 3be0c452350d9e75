//! [`Service`]: handler of all calls, for both protocols.
//!
//! Owns the groups, the sessions of nodes and the state of tenants; translates messages to calls of [`moontide_meta`]
//! and effects to messages. Opens no socket and starts no thread: a call runs on the thread that received it, so that
//! a single caller waits for no thread switch, and calls run on all threads in parallel.
//!
//! Each group has its own lock. A batch is sorted by group first; a group is locked for at most [`KEYS_PER_LOCK`]
//! keys at a time.
//!
//! Lock order: `tenants`, one group, then one of the leaves (`sessions`, a command queue, `removals`, keys of a group). A thread never
//! holds the locks of two groups.

mod admin;
mod disks;
mod hosting;
mod invalidations;
mod jobs;
mod node_session;
mod nodes;
mod objects;
mod remove;
mod signing;
mod stats;

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hashbrown::HashMap;
use moontide_auth::Credentials;
use moontide_meta::{
    Admission, Effect, Effects, EvictionTrials, GroupConfig, LookupKey, Now, OffloadTrigger, PlacementKind,
    Quota, SessionConfig, Sessions,
};
use moontide_proto::convert::{ConvertError, IdKeySecret, RequestContext};
use moontide_proto::{CapabilitySecret, PackedKeys, v1};
use moontide_types::{Clock, ErrorCode, GroupId, IdKey, ObjectId, SessionId, Tenant, TenantGeneration, Term};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, mpsc};

use crate::election::{GroupAssignment, HandoffInbox, Proposal, TenantState};
use hosting::{GroupGuard, GroupSlot};
use invalidations::Watchers;
use jobs::Jobs;
use node_session::NodeSession;
use remove::Removals;
use signing::CapabilitySigner;

pub use node_session::{SessionStream, StreamClosed};
pub use nodes::NodeInfo;
pub(crate) use objects::handle;
pub use stats::{MasterStats, ReadTotals};

/// Maximum number of keys per lock of a group: some tens of microseconds, for which other threads may wait.
const KEYS_PER_LOCK: usize = 128;

/// Secret from which the ids of sessions are computed.
#[derive(Clone)]
pub struct SessionSecret(pub [u8; 32]);

impl std::fmt::Debug for SessionSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SessionSecret")
    }
}

/// Configuration of the service.
#[derive(Clone, Debug)]
pub struct ServiceConfig {
    /// Number of groups of the cluster.
    pub groups: NonZeroU16,
    /// Id of the cluster.
    pub cluster: u64,
    /// Key of the object ids.
    pub id_key: IdKey,
    /// Secret of the id key, for clients and nodes. Its debug output contains no bytes.
    pub id_key_secret: IdKeySecret,
    /// Secret of the capabilities, drawn at the start. Its debug output contains no bytes.
    pub capability_secret: CapabilitySecret,
    /// Interval at which nodes get a new key for capabilities.
    pub capability_rotation: Duration,
    /// Id of this master; for a single master it is also the term of all groups.
    pub term: Term,
    /// For a single master: number of exclusions of each group; empty if there were none.
    pub exclusions: Vec<u32>,
    /// For a single master: tenants with a quota or a generation above 0.
    pub tenants: BTreeMap<String, TenantState>,
    /// Whether the cluster has several masters.
    pub multi_master: bool,
    /// Time without a heartbeat after which the session of a node ends.
    pub session_ttl: Duration,
    /// Secret of the session ids. Its debug output contains no bytes.
    pub session_secret: SessionSecret,
    /// Address of the gRPC server for clients.
    pub grpc_address: String,
    /// Address of the frame server for clients.
    pub frame_address: String,
    /// Placement policy of new objects.
    pub placement: PlacementKind,
    /// When objects are written to disk.
    pub offload: OffloadTrigger,
    /// Admission policy of offloads.
    pub admission: Admission,
    /// Usage above which eviction starts, in thousandths.
    pub eviction_high_watermark_permille: u16,
    /// Usage below which eviction stops, in thousandths.
    pub eviction_low_watermark_permille: u16,
    /// Time of a writer from PutStart to PutEnd.
    pub reservation: Duration,
    /// Time without allocations in a segment that an earlier master or session used.
    pub reallocation_delay: Duration,
    /// Time within which an absent node may rejoin with its records.
    pub rejoin_window: Duration,
    /// Time from the loss of replicas until they are made again.
    pub repair_delay: Duration,
    /// Bytes per second that each node may receive for the balance of the nodes.
    pub rebalance_bytes_per_s: u64,
    /// Difference between the fullest and the emptiest node above which records move, in thousandths.
    pub rebalance_skew_permille: u16,
    /// Bytes of an object that the processes of one host must read for a copy on its node.
    pub hot_copy_bytes: u64,
    /// Time after which such a copy is released if it is not read.
    pub hot_copy_idle: Duration,
    /// Longest stripe in bytes.
    pub stripe_bytes_max: u64,
    /// Seed of the random placement.
    pub seed: u64,
    /// Certificate of this master; `None`: no TLS.
    pub credentials: Option<Arc<Credentials>>,
}

impl ServiceConfig {
    /// Returns a configuration for tests and benchmarks in one process.
    pub fn for_tests() -> ServiceConfig {
        let group = GroupConfig::new(GroupId(0), NonZeroU16::MIN, Term::new(1).expect("term 1 is in range"));
        ServiceConfig {
            groups: group.groups,
            cluster: 1,
            id_key: IdKey::new(1, [7; 32]),
            id_key_secret: IdKeySecret([7; 32]),
            capability_secret: CapabilitySecret::new([9; 32]),
            capability_rotation: Duration::from_secs(300),
            term: group.term,
            exclusions: vec![],
            tenants: BTreeMap::new(),
            multi_master: false,
            session_ttl: Duration::from_secs(10),
            session_secret: SessionSecret([9; 32]),
            grpc_address: "127.0.0.1:1".into(),
            frame_address: "127.0.0.1:2".into(),
            placement: group.placement,
            offload: group.offload,
            admission: group.admission,
            eviction_high_watermark_permille: group.eviction_high_watermark_permille,
            eviction_low_watermark_permille: group.eviction_low_watermark_permille,
            reservation: group.reservation,
            reallocation_delay: group.reallocation_delay,
            rejoin_window: group.rejoin_window,
            repair_delay: group.repair_delay,
            rebalance_bytes_per_s: group.rebalance_bytes_per_s,
            rebalance_skew_permille: group.rebalance_skew_permille,
            hot_copy_bytes: group.hot_copy_bytes,
            hot_copy_idle: group.hot_copy_idle,
            stripe_bytes_max: group.stripe_bytes_max,
            seed: 1,
            credentials: None,
        }
    }
}

/// Role of a master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A single master that serves.
    Leader {
        /// Term of all groups.
        term: Term,
    },
    /// A single master that no longer serves, because a node knows a higher term.
    SteppedDown {
        /// The higher term.
        seen: Term,
    },
    /// One of several masters.
    Member {
        /// Id of the master.
        number: Term,
        /// Number of hosted groups.
        groups: usize,
        /// Whether the registry lease is confirmed.
        confirmed: bool,
    },
}

/// State of a tenant with a generation above 0 or a quota. All others have the default state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct TenantInfo {
    generation: TenantGeneration,
    /// Quota in the whole cluster; the groups have shares of it.
    quota: Quota,
}

/// Handler of all calls.
#[derive(Debug)]
pub struct Service {
    config: ServiceConfig,
    clock: Arc<dyn ClockDebug>,
    group_slots: Vec<CachePadded<Mutex<GroupSlot>>>,
    /// Chooses the eviction rule of all groups.
    eviction_trials: Mutex<EvictionTrials>,
    /// Mounted units per group, to distribute segments.
    group_units: Vec<AtomicU64>,
    tenants: RwLock<HashMap<Box<str>, TenantInfo>>,
    sessions: Mutex<Sessions>,
    nodes: RwLock<HashMap<SessionId, Arc<NodeSession>>>,
    signer: CapabilitySigner,
    removals: Removals,
    watchers: Watchers,
    jobs: Mutex<Jobs>,
    /// Highest known term above the own term; 0 while this master serves.
    stepped_down: AtomicU32,
    /// When the last refusal of a node was logged, in nanoseconds of the clock; 0: never.
    refusal_logged: AtomicU64,
    /// Groups for which nodes know a higher term, in a cluster with several masters.
    superseded: Mutex<Vec<(GroupId, Term)>>,
    superseded_notify: Notify,
    /// Handoffs received from other masters.
    pub(crate) handoffs: HandoffInbox,
    /// Channel to the elector for changes of the cluster state.
    proposals: OnceLock<mpsc::Sender<Proposal>>,
    /// Highest term in which this master hosts or hosted a group.
    newest_term: AtomicU32,
    /// Time until which the registry lease is confirmed, in nanoseconds of the clock.
    confirmed_until: AtomicU64,
    /// Last known group map.
    map: RwLock<v1::GroupMap>,
    /// Read counters of ended sessions.
    past_reads: Mutex<stats::NodeReads>,
    /// Time of the last split of quotas, in nanoseconds of the clock.
    quotas_split: AtomicU64,
}

/// Clock with `Debug`.
trait ClockDebug: Clock + std::fmt::Debug {}
#[derive(Clone)]
struct AnyClock(Arc<dyn Clock>);
impl std::fmt::Debug for AnyClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Clock")
    }
}
impl Clock for AnyClock {
    fn now(&self) -> moontide_types::MonoTime {
        self.0.now()
    }
    fn unix(&self) -> moontide_types::UnixMillis {
        self.0.unix()
    }
}
impl ClockDebug for AnyClock {}

/// Value in separate cache lines: avoids false sharing between locks of groups.
#[derive(Debug)]
#[repr(align(128))]
struct CachePadded<T>(T);

/// Context of a valid request, and the generation of its tenant.
struct CallContext<'a> {
    context: RequestContext<'a>,
    generation: TenantGeneration,
}

impl Service {
    /// Creates a master without nodes. A single master hosts all groups, one of several masters none yet.
    pub fn new(config: ServiceConfig, clock: Arc<dyn Clock>) -> Arc<Service> {
        let sessions = SessionConfig { ttl: config.session_ttl, secret: config.session_secret.0 };
        let sessions = Sessions::new(sessions, config.term);
        let groups = config.groups.get();
        let single = v1::GroupMap {
            // Increases with every start, as the term does.
            version: config.term.get().into(),
            groups: groups.into(),
            masters: vec![v1::MasterEntry {
                grpc_address: config.grpc_address.clone(),
                frame_address: config.frame_address.clone(),
                term: config.term.get(),
                groups: (0..u32::from(groups)).collect(),
                terms: vec![config.term.get(); groups.into()],
            }],
            single_master: true,
        };
        let empty = v1::GroupMap { version: 0, groups: groups.into(), masters: vec![], single_master: false };
        let service = Service {
            group_slots: (0..groups).map(|_| CachePadded(Mutex::default())).collect(),
            eviction_trials: Mutex::default(),
            group_units: (0..groups).map(|_| AtomicU64::new(0)).collect(),
            clock: Arc::new(AnyClock(Arc::clone(&clock))),
            tenants: RwLock::default(),
            sessions: Mutex::new(sessions),
            nodes: RwLock::default(),
            signer: CapabilitySigner::new(
                config.capability_secret.clone(),
                config.capability_rotation,
                groups,
                clock.now(),
            ),
            removals: Removals::default(),
            watchers: Watchers::new(groups.into()),
            jobs: Mutex::default(),
            stepped_down: AtomicU32::new(0),
            refusal_logged: AtomicU64::new(0),
            superseded: Mutex::default(),
            newest_term: AtomicU32::new(0),
            superseded_notify: Notify::new(),
            handoffs: HandoffInbox::default(),
            proposals: OnceLock::new(),
            confirmed_until: AtomicU64::new(0),
            map: RwLock::new(if config.multi_master { empty } else { single }),
            past_reads: Mutex::default(),
            quotas_split: AtomicU64::new(0),
            config,
        };
        if !service.config.multi_master {
            let term = service.config.term;
            let previous = Term::new(term.get().saturating_sub(1)).expect("a smaller number is a term");
            let exclusion =
                |group: u16| service.config.exclusions.get(usize::from(group)).copied().unwrap_or_default();
            let assignment = |group| GroupAssignment {
                group: GroupId(group),
                term,
                previous,
                exclusion: exclusion(group),
            };
            (0..groups).for_each(|group| service.host(assignment(group), None));
            for (name, state) in &service.config.tenants {
                service.set_tenant_state(name, *state);
            }
        }
        Arc::new(service)
    }

    /// Returns the role of this master.
    pub fn role(&self) -> Role {
        if self.config.multi_master {
            let (groups, confirmed) = (self.hosted_count(), !self.is_unconfirmed());
            return Role::Member { number: self.config.term, groups, confirmed };
        }
        // Relaxed: no other data depends on the number.
        match self.stepped_down.load(Ordering::Relaxed) {
            0 => Role::Leader { term: self.config.term },
            seen => Role::SteppedDown { seen: Term::new(seen).unwrap_or(Term::MAX) },
        }
    }

    /// Returns the id of this master; for a single master it is also the term of all groups.
    pub fn term(&self) -> Term {
        self.config.term
    }

    /// Returns whether this master hosts groups and at least one node is registered. Lookups are served before that,
    /// too.
    pub fn is_ready(&self) -> bool {
        let serves = match self.role() {
            Role::Leader { .. } => true,
            Role::SteppedDown { .. } => false,
            Role::Member { groups, .. } => groups > 0,
        };
        serves && !self.nodes.read().is_empty()
    }

    /// Sets the channel for changes of the cluster state.
    pub(crate) fn set_proposals(&self, proposals: mpsc::Sender<Proposal>) {
        assert!(self.proposals.set(proposals).is_ok(), "set once, at the start");
    }

    /// Returns the certificate of this master; `None`: no TLS.
    pub(crate) fn credentials(&self) -> Option<&Arc<Credentials>> {
        self.config.credentials.as_ref()
    }

    fn now(&self) -> Now {
        Now { mono: self.clock.now(), unix: self.clock.unix() }
    }

    /// Checks the context of a request. Fails with the code for the whole call.
    fn caller<'a>(&self, context: RequestContext<'a>) -> Result<CallContext<'a>, ErrorCode> {
        // A client with a higher term must refresh its map. Only nodes, which enforce terms, make a master step down.
        if context.term > self.newest_term() || self.stepped_down.load(Ordering::Relaxed) != 0 {
            return Err(ErrorCode::WrongMaster);
        }
        let generation = self.tenant_info(context.tenant).generation;
        Ok(CallContext { context, generation })
    }

    fn tenant_info(&self, tenant: Tenant<'_>) -> TenantInfo {
        self.tenants.read().get(tenant.as_str()).copied().unwrap_or_default()
    }

    fn step_down(&self, seen: Term) {
        self.stepped_down.fetch_max(seen.get(), Ordering::Relaxed);
    }

    /// Returns the highest term of this master. Higher terms belong to other masters.
    pub(crate) fn newest_term(&self) -> Term {
        let hosted = self.newest_term.load(Ordering::Relaxed);
        self.config.term.max(Term::new(hosted).expect("stored from a term"))
    }

    /// Creates the context of a response.
    fn context(&self, caller: Option<&CallContext<'_>>) -> v1::ResponseContext {
        v1::ResponseContext {
            map_version: self.map_version().0,
            term: self.config.term.get(),
            code: 0,
            retry_after_ms: 0,
            tenant_generation: caller.map_or(0, |caller| caller.generation.0),
            newer_map: None,
        }
    }

    /// Creates the context of a response that contains only an error code.
    fn refusal(&self, code: ErrorCode) -> v1::ResponseContext {
        let retry_after_ms = match code {
            ErrorCode::Busy | ErrorCode::Retry | ErrorCode::NoSpace => RETRY_AFTER_MS,
            _ => 0,
        };
        let newer_map = (code == ErrorCode::WrongMaster).then(|| self.map.read().clone());
        v1::ResponseContext { code: code as u32, retry_after_ms, newer_map, ..self.context(None) }
    }

    fn group_of(&self, id: ObjectId) -> usize {
        id.group(self.config.groups).0.into()
    }

    /// Computes ids and sorts keys by group.
    fn sort<'a>(&self, caller: &CallContext<'_>, keys: PackedKeys<'a>) -> KeysByGroup<'a> {
        let mut ids = Vec::with_capacity(keys.len());
        let id_key = self.config.id_key.of_tenant(caller.context.tenant);
        id_key.object_ids(caller.generation, keys.iter(), &mut ids);
        let lookups = keys.iter().zip(ids).map(|(key, id)| LookupKey { id, key });
        KeysByGroup::new(self.group_slots.len(), self.config.groups, lookups)
    }

    /// Executes the effects of a call. Called under the lock of the group, so that commands for one slot keep their
    /// order.
    fn deliver(&self, group: &GroupGuard<'_>, effects: &mut Effects) {
        if effects.is_empty() {
            return;
        }
        let mut last: Option<Arc<NodeSession>> = None;
        for effect in effects.drain(..) {
            match effect {
                Effect::Command { session, command } => {
                    if last.as_ref().is_none_or(|node| node.session() != session) {
                        last = self.nodes.read().get(&session).cloned();
                    }
                    if let Some(node) = &last {
                        node.enqueue(group.index, group.term(), command);
                    }
                }
                Effect::Removed { waiter, code } => self.removals.finish(waiter, code),
                Effect::StepDown { seen } if self.config.multi_master => {
                    self.superseded.lock().push((GroupId(group.index as u16), seen)); // ≤ GROUPS_MAX
                    self.superseded_notify.notify_one();
                }
                Effect::StepDown { seen } => self.step_down(seen),
            }
        }
    }
}

/// Retry delay in responses: eviction and reclaim take about that long.
const RETRY_AFTER_MS: u32 = 20;

/// Keys of a batch, sorted by group, with their positions in the request.
struct KeysByGroup<'a> {
    lookups: Vec<LookupKey<'a>>,
    positions: Vec<u32>,
    /// (group, end in `lookups`), ascending; groups without keys are omitted.
    ends: Vec<(usize, usize)>,
}

impl<'a> KeysByGroup<'a> {
    fn new(
        groups: usize,
        count: NonZeroU16,
        lookups: impl ExactSizeIterator<Item = LookupKey<'a>>,
    ) -> KeysByGroup<'a> {
        if lookups.len() == 1 || groups == 1 {
            let lookups: Vec<LookupKey<'a>> = lookups.collect();
            let group = lookups.first().map_or(0, |lookup| lookup.id.group(count).0.into());
            let positions = (0..lookups.len() as u32).collect();
            let ends = if lookups.is_empty() { vec![] } else { vec![(group, lookups.len())] };
            return KeysByGroup { lookups, positions, ends };
        }
        // Counting sort: batches have up to 4,096 keys, clusters up to 4,096 groups.
        let lookups: Vec<LookupKey<'a>> = lookups.collect();
        let of: Vec<u16> = lookups.iter().map(|lookup| lookup.id.group(count).0).collect();
        let mut starts = vec![0u32; groups + 1];
        for &group in &of {
            starts[usize::from(group) + 1] += 1;
        }
        let mut ends = Vec::with_capacity(groups.min(lookups.len()));
        for group in 0..groups {
            let here = starts[group + 1];
            starts[group + 1] += starts[group];
            if here > 0 {
                ends.push((group, starts[group + 1] as usize));
            }
        }
        let mut positions = vec![0u32; lookups.len()];
        for (position, &group) in (0u32..).zip(&of) {
            let next = &mut starts[usize::from(group)];
            positions[*next as usize] = position;
            *next += 1;
        }
        let lookups = positions.iter().map(|&position| lookups[position as usize]).collect();
        KeysByGroup { lookups, positions, ends }
    }

    /// Iterates over parts of at most [`KEYS_PER_LOCK`] keys of one group: group, keys, positions in the request.
    fn parts(&self) -> impl Iterator<Item = (usize, &[LookupKey<'a>], &[u32])> {
        let mut start = 0;
        self.ends.iter().flat_map(move |&(group, end)| {
            let range = start..end;
            start = end;
            let keys = self.lookups[range.clone()].chunks(KEYS_PER_LOCK);
            keys.zip(self.positions[range].chunks(KEYS_PER_LOCK)).map(move |(a, p)| (group, a, p))
        })
    }
}

/// Converts the error of a message to the code of the whole response.
fn refused(error: ConvertError) -> ErrorCode {
    error.code()
}

/// Packed outcomes, set in any order.
struct OutcomeCodes(Vec<u8>);

impl OutcomeCodes {
    fn new(len: usize) -> OutcomeCodes {
        OutcomeCodes(vec![0; 2 * len])
    }

    fn set(&mut self, at: usize, code: Option<ErrorCode>) {
        let number = code.map_or(0, |code| code as u16);
        self.0[2 * at..2 * at + 2].copy_from_slice(&number.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moontide_types::Key;

    #[test]
    fn keys_by_group_preserves_positions() {
        let keys: Vec<[u8; 2]> = (0u16..1000).map(|n| n.to_le_bytes()).collect();
        for groups in [1u16, 3, 16, 4096] {
            let count = NonZeroU16::new(groups).unwrap();
            let lookups = keys.iter().map(|key| {
                let mut id = [0; 16];
                id[..2].copy_from_slice(key);
                id[9] = 77;
                LookupKey { id: ObjectId(id), key: Key::new(key).unwrap() }
            });
            let sorted = KeysByGroup::new(groups.into(), count, lookups);
            let mut seen = vec![false; keys.len()];
            for (group, lookups, positions) in sorted.parts() {
                assert!(lookups.len() <= KEYS_PER_LOCK && lookups.len() == positions.len());
                for (lookup, &position) in lookups.iter().zip(positions) {
                    assert_eq!(usize::from(lookup.id.group(count).0), group);
                    assert_eq!(lookup.key.as_bytes(), keys[position as usize]);
                    assert!(!std::mem::replace(&mut seen[position as usize], true));
                }
            }
            assert!(seen.into_iter().all(|seen| seen), "{groups} groups");
        }
        assert_eq!(KeysByGroup::new(4, NonZeroU16::new(4).unwrap(), [].into_iter()).parts().count(), 0);
    }
}
