//! [`Service`]: the one handler behind both doors.
//!
//! Owns the groups, the sessions of nodes and what is known of tenants; turns messages into commands of
//! [`moontide_meta`] and effects into messages. Opens no socket and starts no thread: a call runs on the thread that
//! read it, so that a lone caller waits for no hand-over, and as many threads as there are call at a time.
//!
//! Each group stands behind a lock of its own and is used by one thread at a time. A batch is sorted by group first;
//! a group is held for at most [`KEYS_PER_LOCK`] keys in a row.
//!
//! Locks, in the order in which they may be taken: `tenants`, one group, then one of the leaves (`sessions`, an
//! outbox, `removals`). No group is locked while another one is.

mod departures;
mod disks;
mod hosting;
mod hot;
mod jobs;
mod nodes;
mod operator;
mod outbox;
mod remove;
mod stats;

use std::num::NonZeroU16;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hashbrown::HashMap;
use moontide_meta::{
    Admission, Ask, Effect, Effects, GroupConfig, Now, PlacementKind, Quota, SessionConfig, Sessions,
};
use moontide_proto::PackedKeys;
use moontide_proto::convert::{ConvertError, IdKeySecret, RequestContext};
use moontide_proto::v1;
use moontide_types::{Clock, ErrorCode, GroupId, IdKey, ObjectId, SessionId, Tenant, TenantGeneration, Term};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, mpsc};

use crate::election::{Estates, Hosting, Proposal};
use departures::Watchers;
use hosting::{Held, Seat};
use jobs::Jobs;
use outbox::NodeSession;
use remove::Removals;

pub(crate) use hot::handle;
pub use nodes::NodeInfo;
pub use outbox::{SessionStream, StreamOver};
pub use stats::{MasterStats, ReadSums};

/// Keys for which a group is held in a row: some tens of microseconds, which is how long another thread may wait.
const KEYS_PER_LOCK: usize = 128;

/// What the service must know.
#[derive(Clone, Debug)]
pub struct ServiceConfig {
    /// Groups of the cluster.
    pub groups: NonZeroU16,
    /// Number of the cluster.
    pub cluster: u64,
    /// The key of ids.
    pub id_key: IdKey,
    /// Its secret, for clients and nodes. Not shown when printed.
    pub id_key_secret: IdKeySecret,
    /// This master's number: the term of all groups, if it is alone.
    pub term: Term,
    /// Whether other masters host some of the groups.
    pub shared: bool,
    /// How long a node's session lasts without a heartbeat.
    pub session_ttl: Duration,
    /// Where clients reach gRPC.
    pub grpc_address: String,
    /// Where clients reach the framed protocol.
    pub frame_address: String,
    /// Where new objects go.
    pub placement: PlacementKind,
    /// What is worth being written to a disk.
    pub admission: Admission,
    /// Eviction begins above this share, in thousandths.
    pub high_permille: u16,
    /// Eviction ends below this share, in thousandths.
    pub low_permille: u16,
    /// How long a writer has.
    pub reservation: Duration,
    /// How long nothing is given out in a segment of an earlier time.
    pub reallocate_wait: Duration,
    /// How long a node that went away may come back.
    pub absence_max: Duration,
    /// Longest stripe.
    pub stripe_bytes_max: u64,
    /// Decides placements.
    pub seed: u64,
}

impl ServiceConfig {
    /// One that serves nobody: for tests and benchmarks in one process.
    pub fn for_tests() -> ServiceConfig {
        let group = GroupConfig::new(GroupId(0), NonZeroU16::MIN, Term::new(1).expect("1 is a term"));
        ServiceConfig {
            groups: group.groups,
            cluster: 1,
            id_key: IdKey::new(1, [7; 32]),
            id_key_secret: IdKeySecret([7; 32]),
            term: group.term,
            shared: false,
            session_ttl: Duration::from_secs(10),
            grpc_address: "127.0.0.1:1".into(),
            frame_address: "127.0.0.1:2".into(),
            placement: group.placement,
            admission: group.admission,
            high_permille: group.high_permille,
            low_permille: group.low_permille,
            reservation: group.reservation,
            reallocate_wait: group.reallocate_wait,
            absence_max: group.absence_max,
            stripe_bytes_max: group.stripe_bytes_max,
            seed: 1,
        }
    }
}

/// Whether this master answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It does.
    Leader {
        /// Its term.
        term: Term,
    },
    /// Somebody knows a higher term.
    SteppedDown {
        /// That term.
        seen: Term,
    },
    /// One of several masters.
    Member {
        /// Its number.
        number: Term,
        /// How many groups it hosts.
        groups: usize,
        /// Whether the registry has confirmed that they are its own.
        confirmed: bool,
    },
}

/// A tenant, as the whole master knows it.
#[derive(Clone, Copy, Debug, Default)]
struct TenantFacts {
    generation: TenantGeneration,
    /// Of the whole cluster; the groups have shares.
    quota: Quota,
}

/// The handler.
#[derive(Debug)]
pub struct Service {
    config: ServiceConfig,
    clock: Arc<dyn ClockDebug>,
    seats: Vec<Padded<Mutex<Seat>>>,
    /// Units mounted per group, to spread segments.
    group_units: Vec<AtomicU64>,
    tenants: RwLock<HashMap<Box<str>, TenantFacts>>,
    sessions: Mutex<Sessions>,
    nodes: RwLock<HashMap<SessionId, Arc<NodeSession>>>,
    removals: Removals,
    watchers: Watchers,
    jobs: Mutex<Jobs>,
    /// The highest foreign term that was seen above ours; 0 while we lead.
    stepped_down: AtomicU32,
    /// Groups of which nodes know a higher term, where there are several masters.
    ousted: Mutex<Vec<(GroupId, Term)>>,
    ousted_news: Notify,
    /// What other masters have handed to us.
    pub(crate) estates: Estates,
    /// Where changes go that all masters must agree on.
    proposals: OnceLock<mpsc::Sender<Proposal>>,
    /// The highest term in which a group is or was hosted here.
    newest_term: AtomicU32,
    /// Until when the registry has confirmed our lease, in nanoseconds of the clock.
    confirmed_until: AtomicU64,
    /// Which master hosts which group, as far as we know.
    map: RwLock<v1::GroupMap>,
    /// Counters of sessions that have ended.
    past_reads: Mutex<stats::Reads>,
    /// When quotas were split last, in nanoseconds of the clock.
    quotas_split: AtomicU64,
}

/// A clock that can stand in a struct with `Debug`.
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

/// A lock with cache lines of its own: two cores at two groups do not slow each other down.
#[derive(Debug)]
#[repr(align(128))]
struct Padded<T>(T);

/// A request that was understood: its tenant, and what the answer's context will say.
struct Caller<'a> {
    context: RequestContext<'a>,
    generation: TenantGeneration,
}

impl Service {
    /// A master of all groups, or, where there are several masters, of none yet; without nodes.
    pub fn new(config: ServiceConfig, clock: Arc<dyn Clock>) -> Arc<Service> {
        let sessions = Sessions::new(SessionConfig { ttl: config.session_ttl }, config.term);
        let groups = config.groups.get();
        let alone = v1::GroupMap {
            // Rises with every start, as the term does.
            version: config.term.get().into(),
            groups: groups.into(),
            masters: vec![v1::MasterEntry {
                grpc_address: config.grpc_address.clone(),
                frame_address: config.frame_address.clone(),
                term: config.term.get(),
                groups: (0..u32::from(groups)).collect(),
                terms: vec![config.term.get(); groups.into()],
            }],
            alone: true,
        };
        let shared = v1::GroupMap { version: 0, groups: groups.into(), masters: vec![], alone: false };
        let service = Service {
            seats: (0..groups).map(|_| Padded(Mutex::default())).collect(),
            group_units: (0..groups).map(|_| AtomicU64::new(0)).collect(),
            clock: Arc::new(AnyClock(clock)),
            tenants: RwLock::default(),
            sessions: Mutex::new(sessions),
            nodes: RwLock::default(),
            removals: Removals::default(),
            watchers: Watchers::new(groups.into()),
            jobs: Mutex::default(),
            stepped_down: AtomicU32::new(0),
            ousted: Mutex::default(),
            newest_term: AtomicU32::new(0),
            ousted_news: Notify::new(),
            estates: Estates::default(),
            proposals: OnceLock::new(),
            confirmed_until: AtomicU64::new(0),
            map: RwLock::new(if config.shared { shared } else { alone }),
            past_reads: Mutex::default(),
            quotas_split: AtomicU64::new(0),
            config,
        };
        if !service.config.shared {
            let term = service.config.term;
            let previous = Term::new(term.get().saturating_sub(1)).expect("less than a term is one");
            let hosting = |group| Hosting { group: GroupId(group), term, previous, witnessed: false };
            (0..groups).for_each(|group| service.host(hosting(group), None));
        }
        Arc::new(service)
    }

    /// Whether this master answers.
    pub fn role(&self) -> Role {
        if self.config.shared {
            let (groups, confirmed) = (self.hosted_count(), !self.is_unconfirmed());
            return Role::Member { number: self.config.term, groups, confirmed };
        }
        // Relaxed: the number stands for itself.
        match self.stepped_down.load(Ordering::Relaxed) {
            0 => Role::Leader { term: self.config.term },
            seen => Role::SteppedDown { seen: Term::new(seen).unwrap_or(Term::MAX) },
        }
    }

    /// This master's number: the term of all groups, if it is alone.
    pub fn term(&self) -> Term {
        self.config.term
    }

    /// Whether it has a node to give space on. Lookups are answered before that, too.
    pub fn is_ready(&self) -> bool {
        let serves = match self.role() {
            Role::Leader { .. } => true,
            Role::SteppedDown { .. } => false,
            Role::Member { groups, .. } => groups > 0,
        };
        serves && !self.nodes.read().is_empty()
    }

    /// Where changes go that all masters must agree on.
    pub(crate) fn set_proposals(&self, proposals: mpsc::Sender<Proposal>) {
        assert!(self.proposals.set(proposals).is_ok(), "it is set once, at the start");
    }

    fn now(&self) -> Now {
        Now { mono: self.clock.now(), unix: self.clock.unix() }
    }

    /// Understands who asks, or says why the call as a whole fails.
    fn caller<'a>(&self, context: RequestContext<'a>) -> Result<Caller<'a>, ErrorCode> {
        // A client that believes in a higher term is asked to look again; only nodes, which obey terms, end a master's.
        if context.term > self.newest_term() || self.stepped_down.load(Ordering::Relaxed) != 0 {
            return Err(ErrorCode::WrongMaster);
        }
        let generation = self.tenant_facts(context.tenant).generation;
        Ok(Caller { context, generation })
    }

    fn tenant_facts(&self, tenant: Tenant<'_>) -> TenantFacts {
        self.tenants.read().get(tenant.as_str()).copied().unwrap_or_default()
    }

    fn step_down(&self, seen: Term) {
        self.stepped_down.fetch_max(seen.get(), Ordering::Relaxed);
    }

    /// The highest term that is our own. What is higher was given to somebody else.
    pub(crate) fn newest_term(&self) -> Term {
        let hosted = self.newest_term.load(Ordering::Relaxed);
        self.config.term.max(Term::new(hosted).expect("it was one"))
    }

    /// Somebody knows this term. A master that is alone has been replaced if it is higher; one of several cannot tell: it
    /// may be that of another group.
    fn hears_of(&self, seen: Term) -> Result<(), ErrorCode> {
        if self.config.shared || seen <= self.config.term {
            return Ok(());
        }
        self.step_down(seen);
        Err(ErrorCode::WrongMaster)
    }

    /// The context of an answer.
    fn context(&self, caller: Option<&Caller<'_>>) -> v1::ResponseContext {
        v1::ResponseContext {
            map_version: self.map_version().0,
            term: self.config.term.get(),
            code: 0,
            retry_after_ms: 0,
            tenant_generation: caller.map_or(0, |caller| caller.generation.0),
            newer_map: None,
        }
    }

    /// The context of an answer that says only why there is none.
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
    fn sort<'a>(&self, caller: &Caller<'_>, keys: PackedKeys<'a>) -> Sorted<'a> {
        let mut ids = Vec::with_capacity(keys.len());
        self.config.id_key.object_ids(caller.context.tenant, caller.generation, keys.iter(), &mut ids);
        let asks = keys.iter().zip(ids).map(|(key, id)| Ask { id, key });
        Sorted::new(self.seats.len(), self.config.groups, asks)
    }

    /// Sees to what a command asked for. Called under the group's lock, so that orders to one slot keep their order.
    fn deliver(&self, group: &Held<'_>, effects: &mut Effects) {
        if effects.is_empty() {
            return;
        }
        let mut last: Option<Arc<NodeSession>> = None;
        for effect in effects.drain(..) {
            match effect {
                Effect::Order { session, order } => {
                    if last.as_ref().is_none_or(|node| node.session() != session) {
                        last = self.nodes.read().get(&session).cloned();
                    }
                    if let Some(node) = &last {
                        node.order(group.index, group.term(), order);
                    }
                }
                Effect::Removed { waiter, code } => self.removals.finish(waiter, code),
                Effect::StepDown { seen } if self.config.shared => {
                    self.ousted.lock().push((GroupId(group.index as u16), seen)); // ≤ GROUPS_MAX
                    self.ousted_news.notify_one();
                }
                Effect::StepDown { seen } => self.step_down(seen),
            }
        }
    }
}

/// When another attempt makes sense: eviction and reclaim take about that long.
const RETRY_AFTER_MS: u32 = 20;

/// Keys of a batch, sorted by group. Positions say where a key stood in the request.
struct Sorted<'a> {
    asks: Vec<Ask<'a>>,
    positions: Vec<u32>,
    /// (group, end in `asks`), ascending; groups without keys are left out.
    ends: Vec<(usize, usize)>,
}

impl<'a> Sorted<'a> {
    fn new(groups: usize, count: NonZeroU16, asks: impl ExactSizeIterator<Item = Ask<'a>>) -> Sorted<'a> {
        if asks.len() == 1 || groups == 1 {
            let asks: Vec<Ask<'a>> = asks.collect();
            let group = asks.first().map_or(0, |ask| ask.id.group(count).0.into());
            let positions = (0..asks.len() as u32).collect();
            let ends = if asks.is_empty() { vec![] } else { vec![(group, asks.len())] };
            return Sorted { asks, positions, ends };
        }
        // Counting sort: batches have up to 4,096 keys, clusters up to 4,096 groups.
        let asks: Vec<Ask<'a>> = asks.collect();
        let of: Vec<u16> = asks.iter().map(|ask| ask.id.group(count).0).collect();
        let mut starts = vec![0u32; groups + 1];
        for &group in &of {
            starts[usize::from(group) + 1] += 1;
        }
        let mut ends = Vec::with_capacity(groups.min(asks.len()));
        for group in 0..groups {
            let here = starts[group + 1];
            starts[group + 1] += starts[group];
            if here > 0 {
                ends.push((group, starts[group + 1] as usize));
            }
        }
        let mut positions = vec![0u32; asks.len()];
        for (position, &group) in (0u32..).zip(&of) {
            let next = &mut starts[usize::from(group)];
            positions[*next as usize] = position;
            *next += 1;
        }
        let asks = positions.iter().map(|&position| asks[position as usize]).collect();
        Sorted { asks, positions, ends }
    }

    /// Parts of one group each and of at most [`KEYS_PER_LOCK`] keys: group, keys, and where they stood.
    fn parts(&self) -> impl Iterator<Item = (usize, &[Ask<'a>], &[u32])> {
        let mut start = 0;
        self.ends.iter().flat_map(move |&(group, end)| {
            let range = start..end;
            start = end;
            let asks = self.asks[range.clone()].chunks(KEYS_PER_LOCK);
            asks.zip(self.positions[range].chunks(KEYS_PER_LOCK)).map(move |(a, p)| (group, a, p))
        })
    }
}

/// Why a message was refused, as the code of the whole answer.
fn refused(error: ConvertError) -> ErrorCode {
    error.code()
}

/// Packed outcomes, filled in any order.
struct Codes(Vec<u8>);

impl Codes {
    fn new(len: usize) -> Codes {
        Codes(vec![0; 2 * len])
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
    fn a_batch_is_sorted_by_group_and_keeps_its_positions() {
        let keys: Vec<[u8; 2]> = (0u16..1000).map(|n| n.to_le_bytes()).collect();
        for groups in [1u16, 3, 16, 4096] {
            let count = NonZeroU16::new(groups).unwrap();
            let asks = keys.iter().map(|key| {
                let mut id = [0; 16];
                id[..2].copy_from_slice(key);
                id[9] = 77;
                Ask { id: ObjectId(id), key: Key::new(key).unwrap() }
            });
            let sorted = Sorted::new(groups.into(), count, asks);
            let mut seen = vec![false; keys.len()];
            for (group, asks, positions) in sorted.parts() {
                assert!(asks.len() <= KEYS_PER_LOCK && asks.len() == positions.len());
                for (ask, &position) in asks.iter().zip(positions) {
                    assert_eq!(usize::from(ask.id.group(count).0), group);
                    assert_eq!(ask.key.as_bytes(), keys[position as usize]);
                    assert!(!std::mem::replace(&mut seen[position as usize], true));
                }
            }
            assert!(seen.into_iter().all(|seen| seen), "{groups} groups");
        }
        assert_eq!(Sorted::new(4, NonZeroU16::new(4).unwrap(), [].into_iter()).parts().count(), 0);
    }
}
