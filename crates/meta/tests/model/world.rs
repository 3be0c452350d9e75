//! [`World`]: the group under test beside what it should be: nodes, puts, leases, removals.
//!
//! Every command goes to the group and to the models. What the group answers is checked at once; what must hold
//! between commands is in [`check`](crate::check).

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU16;
use std::time::Duration;

use moontide_meta::{
    Effect, Effects, Group, GroupConfig, JobKind, Now, Order, OrderKind, PlaceView, PlacementKind, Quota,
    ReportState, TenantIx, TickBudget,
};
use moontide_types::bounds::UNIT_BYTES;
use moontide_types::record::{PinClass, object_root};
use moontide_types::{
    Epoch, Extent, Generation, GroupId, MonoTime, NodeId, ObjectId, SegmentId, SessionId, SlotId, Term,
    UnixMillis,
};

use crate::command::Command;
use crate::node::NodeModel;
use crate::watcher::Watcher;

/// Nothing, or what was violated.
pub(crate) type Check = Result<(), String>;

/// Fails with a message unless the condition holds.
macro_rules! ensure {
    ($holds:expr, $($what:tt)*) => {
        if !$holds {
            return Err(format!($($what)*));
        }
    };
}
pub(crate) use ensure;

pub(crate) const KEYS: u8 = 6;
pub(crate) const TENANTS: [&str; 2] = ["left", "right"];

/// Which complete objects a command may give up.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MayEnd {
    Nothing,
    Keys(u8),
    Any,
}

/// A put, from its reservation on.
#[derive(Clone, Debug)]
pub(crate) struct PutModel {
    pub(crate) key: u8,
    pub(crate) epoch: Epoch,
    pub(crate) object_len: u64,
    pub(crate) stripes: usize,
    pub(crate) places: Vec<PlaceView>,
    /// The mounts in which the places were given.
    pub(crate) mounts: Vec<u64>,
    pub(crate) committed: Vec<bool>,
    pub(crate) deadline: MonoTime,
    pub(crate) expires: Option<UnixMillis>,
    pub(crate) pin: PinClass,
    pub(crate) pin_stored: PinClass,
    pub(crate) one_sided: bool,
    pub(crate) cohort: Option<Vec<u8>>,
    pub(crate) parent: Option<Vec<u8>>,
    /// The put's end was acknowledged.
    pub(crate) acked: bool,
    /// A reader was told that it is complete.
    pub(crate) seen: bool,
    /// Its removal was acknowledged.
    pub(crate) removed: bool,
    /// Its removal was answered with `Pending`: as long as this master lives it does not come back.
    pub(crate) removal_pending: bool,
}

impl PutModel {
    pub(crate) fn stripe_roots(&self) -> Vec<u64> {
        (0..self.stripes as u64)
            .map(|stripe| self.epoch.bits().wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ stripe)
            .collect()
    }

    pub(crate) fn root(&self) -> u64 {
        object_root(id_of(self.key), self.epoch, self.object_len, &self.stripe_roots())
    }
}

/// A range that a one-sided reader may read.
#[derive(Clone, Debug)]
pub(crate) struct Lease {
    pub(crate) node: NodeId,
    pub(crate) segment: SegmentId,
    pub(crate) generation: Generation,
    pub(crate) mount: u64,
    pub(crate) slot: SlotId,
    pub(crate) extent: Extent,
    pub(crate) epoch: Epoch,
    pub(crate) until: MonoTime,
}

/// Group and models.
pub(crate) struct World {
    pub(crate) now: Now,
    pub(crate) group: Group,
    pub(crate) term: Term,
    pub(crate) nodes: Vec<NodeModel>,
    pub(crate) puts: Vec<PutModel>,
    pub(crate) leases: Vec<Lease>,
    pub(crate) quotas: [Quota; 2],
    /// The last command's, with its orders.
    pub(crate) may_end: MayEnd,
    pub(crate) placement: PlacementKind,
    pub(crate) epochs: BTreeSet<Epoch>,
    /// Removals that wait: the key and the versions that are gone for good once they are acknowledged.
    pub(crate) removals: BTreeMap<u64, (u8, BTreeSet<Epoch>)>,
    /// Complete versions that a put is about to replace, by key.
    pub(crate) replaced: BTreeMap<u8, Epoch>,
    pub(crate) forced_job: bool,
    pub(crate) any_job: bool,
    pub(crate) mounts: u64,
    pub(crate) sessions: u64,
    pub(crate) effects: Effects,
    pub(crate) watcher: Watcher,
}

pub(crate) fn id_of(key: u8) -> ObjectId {
    ObjectId([key + 1; 16])
}

pub(crate) fn key_of(key: u8) -> Vec<u8> {
    format!("key-{key}").into_bytes()
}

/// Every second node is reached by peers without being asked, so that what they were promised ends by time alone.
pub(crate) fn is_one_sided(node: NodeId) -> bool {
    node.0.is_multiple_of(2)
}

pub(crate) fn tenant_of(key: u8) -> u8 {
    key % 2
}

pub(crate) fn config(term: Term, placement: PlacementKind) -> GroupConfig {
    // Short enough that disks come too late within a sequence, too.
    let disk_absence_max = Duration::from_secs(90);
    GroupConfig { placement, disk_absence_max, ..GroupConfig::new(GroupId(0), NonZeroU16::MIN, term) }
}

impl World {
    pub(crate) fn new(placement: PlacementKind) -> World {
        let now = Now { mono: MonoTime(1_000_000_007), unix: UnixMillis(1_700_000_000_000) };
        let term = Term::new(1).unwrap();
        let mut world = World {
            now,
            group: Group::new(config(term, placement), now),
            term,
            nodes: vec![
                NodeModel::new(1, &[(64, 8), (1100, 6)], true),
                NodeModel::new(2, &[(96, 12)], false),
                NodeModel::new(3, &[(1100, 8), (80, 6)], true),
                NodeModel::new(4, &[(128, 16)], true),
            ],
            puts: vec![],
            leases: vec![],
            quotas: [Quota::default(); 2],
            may_end: MayEnd::Nothing,
            placement,
            epochs: BTreeSet::new(),
            removals: BTreeMap::new(),
            replaced: BTreeMap::new(),
            forced_job: false,
            any_job: false,
            mounts: 0,
            sessions: 0,
            effects: vec![],
            watcher: Watcher::default(),
        };
        world.introduce_tenants();
        world
    }

    /// Does one command and checks everything.
    pub(crate) fn step(&mut self, command: &Command) -> Check {
        self.effects.clear();
        self.may_end = MayEnd::Nothing;
        self.apply(command)?;
        self.take_effects()?;
        crate::check::check(self)?;
        self.watch()
    }

    fn apply(&mut self, command: &Command) -> Check {
        match *command {
            Command::PutStart(ref put) => self.put_start(put).map(|_| ()),
            Command::PutWhole(ref put) => {
                if let Some(put) = self.put_start(put)? {
                    self.take_effects()?;
                    self.write_all(put);
                    self.put_end(put, 0)?;
                }
                Ok(())
            }
            Command::WriteAll { put } => self.with_put(put, |world, put| {
                world.write_all(put);
                Ok(())
            }),
            Command::WriteSome { put, published } => self.with_put(put, |world, put| {
                for place in 0..world.puts[put].places.len() {
                    world.begin(put, place);
                    if published >> (place % 8) & 1 == 1 {
                        world.commit(put, place);
                    }
                }
                Ok(())
            }),
            Command::Begin { put, place } => self.with_put(put, |world, put| {
                let place = usize::from(place) % world.puts[put].places.len();
                world.begin(put, place);
                Ok(())
            }),
            Command::Commit { put, place } => self.with_put(put, |world, put| {
                let place = usize::from(place) % world.puts[put].places.len();
                world.commit(put, place);
                Ok(())
            }),
            Command::WriterDies { put } => self.with_put(put, |world, put| {
                world.writer_dies(put);
                Ok(())
            }),
            Command::PutEnd { put, failed } => self.with_put(put, |world, put| world.put_end(put, failed)),
            Command::Revoke { put } => self.with_put(put, |world, put| world.put_revoke(put)),
            Command::Lookup { key, lease_ms } => self.lookup(key % KEYS, lease_ms),
            Command::Exist { key } => self.exist(key % KEYS),
            Command::Touch { key, lease_ms } => self.touch(key % KEYS, lease_ms),
            Command::SetPin { key, pin } => self.set_pin(key % KEYS, pin),
            Command::Remove { key, force } => self.remove(key % KEYS, force),
            Command::Job { tenant, kind, force } => {
                let kind = match kind {
                    0 => JobKind::All,
                    1 => JobKind::Prefix(b"key-1".as_slice().into()),
                    _ => JobKind::pattern("[0-3]$").unwrap(),
                };
                let started = self.group.start_job(TenantIx(tenant.into()), kind, force);
                self.forced_job |= force && started.is_ok();
                self.any_job |= started.is_ok();
                Ok(())
            }
            Command::Execute { node, count, refuse } => {
                let node = &mut self.nodes[usize::from(node)];
                for at in 0..count {
                    if !node.execute_next(refuse && at == 0) {
                        break;
                    }
                }
                Ok(())
            }
            Command::Answer { node, count } => {
                self.answer(node.into(), count.into());
                Ok(())
            }
            Command::Report { segment, count } => self.report(segment.into(), count.into()),
            Command::ReportEnd { segment } => self.report_end(segment.into()),
            Command::Settle => self.settle(),
            Command::Hold { segment, slot } => {
                let (node, at) = self.segment_at(segment.into());
                let words = &mut self.nodes[node].segments[at].words;
                let slot = usize::from(slot) % words.len();
                if words[slot].state == ReportState::Ready {
                    words[slot].holders += 1;
                }
                Ok(())
            }
            Command::LetGo { node } => {
                let node = &mut self.nodes[usize::from(node)];
                for segment in &mut node.segments {
                    segment.let_go(&mut node.answers);
                }
                Ok(())
            }
            Command::Scrub { segment, slot } => {
                let (node, at) = self.segment_at(segment.into());
                let segment = &mut self.nodes[node].segments[at];
                let slot = u32::from(slot) % segment.words.len() as u32;
                segment.scrub(slot);
                Ok(())
            }
            Command::Tick { budget } => {
                self.may_end = MayEnd::Any;
                let budget = match usize::from(budget) {
                    255 => TickBudget::default(),
                    few => TickBudget {
                        expiries: few,
                        evictions: few,
                        swept_slots: few,
                        job_objects: few,
                        reclaims: few,
                        promotions: few,
                    },
                };
                let protected = if self.any_job { vec![] } else { self.protected() };
                let _more = self.group.tick(self.now, &budget, &mut self.effects);
                self.nothing_lost(&protected)
            }
            Command::Advance { ms } => {
                self.now.mono = self.now.mono.after(Duration::from_millis(ms.into()));
                self.now.unix = UnixMillis(self.now.unix.0 + u64::from(ms));
                Ok(())
            }
            Command::Evict { target_permille, objects } => {
                self.may_end = MayEnd::Any;
                let protected = self.protected();
                self.group.evict(self.now, target_permille, objects.into(), &mut self.effects);
                self.nothing_lost(&protected)
            }
            Command::Quota { tenant, units, objects } => {
                let quota = Quota { bytes_max: u64::from(units) * UNIT_BYTES, objects_max: objects.into() };
                self.quotas[usize::from(tenant)] = quota;
                self.group.set_quota(TenantIx(tenant.into()), quota);
                Ok(())
            }
            Command::Drain { segment, evict } => {
                let (node, at) = self.segment_at(segment.into());
                let (node, segment) = (self.nodes[node].id, self.nodes[node].segments[at].id);
                let _drained = self.group.drain(node, segment, evict);
                Ok(())
            }
            Command::Unmount { segment } => self.unmount(segment.into()),
            Command::Lose { node } => {
                let away = self.group.config().absence_max;
                let node = &mut self.nodes[usize::from(node)];
                if let Some(session) = node.session {
                    self.group.node_lost(self.now, node.id, session, &mut self.effects);
                    node.disconnect(self.now.mono.after(away));
                }
                Ok(())
            }
            Command::Mount { node, segments } => self.mount(node.into(), segments),
            Command::Reconnect { node, segments } => {
                let away = self.group.config().absence_max;
                if self.nodes[usize::from(node)].session.is_none() {
                    return Ok(());
                }
                self.nodes[usize::from(node)].disconnect(self.now.mono.after(away));
                // The master hears of the new session by the first segment mounted in it.
                let all = (1 << self.nodes[usize::from(node)].segments.len()) - 1;
                self.mount(node.into(), if segments & all == all { 0 } else { segments })
            }
            Command::Crash => {
                self.crash();
                Ok(())
            }
            Command::DiskWrite { node } => {
                self.nodes[usize::from(node)].write_next();
                Ok(())
            }
            Command::DiskTell { node, found, count } => {
                for _ in 0..count {
                    self.tell_disk(node.into(), found)?;
                }
                Ok(())
            }
            Command::DiskPromote { node } => {
                self.nodes[usize::from(node)].promote_next();
                Ok(())
            }
            Command::DiskEvict { node, which } => self.evict_from_disk(node.into(), which),
            Command::DiskStatus { node, takes } => {
                self.disk_status(node.into(), takes);
                Ok(())
            }
            Command::Demote { objects } => {
                self.may_end = MayEnd::Any;
                let protected = self.protected();
                self.group.evict(self.now, 0, objects.into(), &mut self.effects);
                self.nothing_lost(&protected)?;
                self.take_effects()?;
                for node in 0..self.nodes.len() {
                    while self.nodes[node].execute_next(false) {}
                    while self.nodes[node].write_next() {
                        self.tell_disk(node, false)?;
                    }
                    // What nodes were ordered by this, and their answers, every other time.
                    if objects % 2 == 1 {
                        self.take_effects()?;
                        while self.nodes[node].execute_next(false) {}
                        self.answer(node, usize::MAX);
                    }
                }
                Ok(())
            }
            Command::Promote { key } => {
                self.may_end = MayEnd::Any;
                self.prefetch(key % KEYS)?;
                let nothing = TickBudget {
                    expiries: 0,
                    evictions: 0,
                    swept_slots: 0,
                    job_objects: 0,
                    reclaims: 0,
                    promotions: 8,
                };
                let _more = self.group.tick(self.now, &nothing, &mut self.effects);
                self.take_effects()?;
                for node in &mut self.nodes {
                    while node.execute_next(false) {}
                }
                Ok(())
            }
            Command::Restart { node } => {
                self.crash_node(node.into());
                self.take_effects()?;
                self.mount(node.into(), 0)
            }
            Command::CrashNode { node } => {
                self.crash_node(node.into());
                Ok(())
            }
            Command::Prefetch { key } => self.prefetch(key % KEYS),
            Command::ForeignTerm { segment } => self.foreign_term(segment.into()),
        }
    }

    /// Names the put that is `back` puts before the newest.
    pub(crate) fn with_put(&mut self, back: u8, act: impl FnOnce(&mut World, usize) -> Check) -> Check {
        match self.puts.len() {
            0 => Ok(()),
            len => act(self, len - 1 - usize::from(back) % len),
        }
    }

    pub(crate) fn segment_at(&self, number: usize) -> (usize, usize) {
        let all = (0..self.nodes.len())
            .flat_map(|node| (0..self.nodes[node].segments.len()).map(move |at| (node, at)));
        let all: Vec<_> = all.collect();
        all[number % all.len()]
    }

    pub(crate) fn position(&self, node: NodeId, segment: SegmentId) -> (usize, usize) {
        let node = self.nodes.iter().position(|known| known.id == node).expect("nodes are known");
        let at = self.nodes[node].segments.iter().position(|known| known.id == segment);
        (node, at.expect("segments are known"))
    }

    pub(crate) fn put_of(&self, key: u8, epoch: Epoch) -> Option<usize> {
        self.puts.iter().position(|put| put.key == key && put.epoch == epoch)
    }

    pub(crate) fn take_effects(&mut self) -> Check {
        for effect in std::mem::take(&mut self.effects) {
            match effect {
                Effect::Order { session, order } => self.take_order(session, order)?,
                Effect::Removed { waiter, code } => {
                    let (key, meant) =
                        self.removals.remove(&waiter.0).ok_or("nobody waits for this removal")?;
                    match code {
                        None => self.removed(key, &meant)?,
                        Some(_) => self.removal_pending(&meant),
                    }
                }
                Effect::StepDown { seen } => return Err(format!("nobody has seen term {seen}")),
            }
        }
        Ok(())
    }

    fn take_order(&mut self, session: SessionId, order: Order) -> Check {
        let node = self.nodes.iter_mut().position(|node| node.session == Some(session));
        let node = node.ok_or_else(|| format!("{order:?} for a session that has ended"))?;
        let of_disk = order.segment == SegmentId::DISK;
        if of_disk || matches!(order.kind, OrderKind::Offload | OrderKind::Promote { .. }) {
            return self.take_disk_order(node, order);
        }
        let (_, at) = self.position(self.nodes[node].id, order.segment);
        let now = self.now;
        let segment = &mut self.nodes[node].segments[at];
        let mount =
            segment.mount.as_mut().ok_or_else(|| format!("{order:?} for a segment that is not mounted"))?;
        if order.kind == OrderKind::Reclaim {
            let early = self.leases.iter().find(|lease| {
                (lease.mount, lease.slot, lease.epoch) == (mount.number, order.slot, order.epoch)
                    && lease.until > now.mono
            });
            ensure!(early.is_none(), "{order:?} although {early:?} at {:?}", now.mono);
        }
        let slot = order.slot.0;
        let key = order.id.0[0] - 1;
        if mount.ordered.insert((slot, order.epoch))
            && mount.known_ready.get(&slot) == Some(&order.epoch)
            && let Some(put) = self.puts.iter().find(|put| put.epoch == order.epoch)
            && (put.acked || put.seen)
            && put.expires.is_none_or(|at| at > now.unix)
            && !segment.words[slot as usize].scrubbed
        {
            let allowed = match self.may_end {
                MayEnd::Nothing => false,
                MayEnd::Keys(keys) => keys >> key & 1 == 1,
                MayEnd::Any => {
                    // A pin that was set later does not come back with its node.
                    [put.pin, put.pin_stored] != [PinClass::Hard; 2]
                        || put.places.len() > 1
                        || self.forced_job
                        || self.replaced.contains_key(&key)
                }
            };
            ensure!(allowed, "{order:?} against a complete object: {:?}", self.may_end);
        }
        self.nodes[node].orders.push_back(order);
        Ok(())
    }
}
