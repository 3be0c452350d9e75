//! [`ModelHarness`]: the group under test and its models: nodes, puts, leases, removals.
//!
//! Every command is applied to the group and to the models. Each response of the group is checked immediately;
//! conditions between commands are in [`check`](crate::check).

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU16;
use std::time::Duration;

use moontide_meta::{
    CommandKind, Effect, Effects, Group, GroupConfig, JobId, JobKind, NodeCommand, Now, OffloadTrigger,
    PlacementKind, Quota, ReportState, StripeLocation, TenantIndex, TickBudget,
};
use moontide_types::limits::UNIT_BYTES;
use moontide_types::record::{PinClass, object_root};
use moontide_types::{
    Epoch, Extent, Generation, GroupId, MonoTime, NodeId, ObjectId, SegmentId, SessionId, SlotId, Spread,
    Term, UnixMillis,
};

use crate::command::Command;
use crate::node::NodeModel;
use crate::watcher::Watcher;

/// `Ok`, or the violated condition.
pub(crate) type Check = Result<(), String>;

/// Returns an error with a message unless the condition holds.
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

/// Complete objects that a command may drop.
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
    pub(crate) locations: Vec<StripeLocation>,
    /// Mount in which each location was granted.
    pub(crate) mounts: Vec<u64>,
    pub(crate) committed: Vec<bool>,
    pub(crate) deadline: MonoTime,
    pub(crate) expires: Option<UnixMillis>,
    pub(crate) pin: PinClass,
    pub(crate) pin_stored: PinClass,
    pub(crate) one_sided: bool,
    pub(crate) cohort: Option<Vec<u8>>,
    pub(crate) parent: Option<Vec<u8>>,
    pub(crate) extra_replicas: u8,
    pub(crate) spread: Option<Spread>,
    pub(crate) disk_replicas: u8,
    /// It replaces an existing version.
    pub(crate) upsert: bool,
    /// The PutEnd was acknowledged.
    pub(crate) acked: bool,
    /// A reader received it as complete.
    pub(crate) seen: bool,
    /// Its removal was acknowledged.
    pub(crate) removed: bool,
    /// The response to its removal was `Pending`: it does not reappear under this master.
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

/// An extent that a one-sided reader may read.
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
pub(crate) struct ModelHarness {
    pub(crate) now: Now,
    pub(crate) group: Group,
    pub(crate) term: Term,
    /// Durable number of exclusions.
    pub(crate) exclusion: u32,
    pub(crate) nodes: Vec<NodeModel>,
    pub(crate) puts: Vec<PutModel>,
    pub(crate) leases: Vec<Lease>,
    pub(crate) quotas: [Quota; 2],
    /// Of the last command, including the node commands that it caused.
    pub(crate) may_end: MayEnd,
    pub(crate) placement: PlacementKind,
    pub(crate) offload: OffloadTrigger,
    pub(crate) epochs: BTreeSet<Epoch>,
    /// Removals in progress: the key, and the versions that are permanently gone once the removal is acknowledged.
    pub(crate) removals: BTreeMap<u64, (u8, BTreeSet<Epoch>)>,
    /// Complete versions that a put is about to replace, by key.
    pub(crate) replaced: BTreeMap<u8, Epoch>,
    pub(crate) forced_job: bool,
    pub(crate) any_job: bool,
    /// Forced jobs in progress: the versions of each key that are permanently gone once the job is done.
    pub(crate) jobs: BTreeMap<JobId, Vec<(u8, BTreeSet<Epoch>)>>,
    /// Locations that were replaced by a copy, by node and slot. The master releases them.
    pub(crate) replaced_by_copy: BTreeSet<(usize, SegmentId, u32, Epoch)>,
    pub(crate) mounts: u64,
    pub(crate) sessions: u64,
    pub(crate) effects: Effects,
    pub(crate) watcher: Watcher,
}

/// Label of a node.
pub(crate) fn rack_of(node: NodeId) -> &'static str {
    ["rack-a", "rack-b"][node.0 as usize % 2]
}

pub(crate) fn id_of(key: u8) -> ObjectId {
    ObjectId([key + 1; 16])
}

pub(crate) fn key_of(key: u8) -> Vec<u8> {
    format!("key-{key}").into_bytes()
}

/// Peers access every second node without its process, so that granted leases and reservations end only by time.
pub(crate) fn is_one_sided(node: NodeId) -> bool {
    node.0.is_multiple_of(2)
}

pub(crate) fn tenant_of(key: u8) -> u8 {
    key % 2
}

pub(crate) fn config(term: Term, placement: PlacementKind, offload: OffloadTrigger) -> GroupConfig {
    // Short enough that disks become stale within a sequence, too.
    let disk_rejoin_window = Duration::from_secs(90);
    GroupConfig {
        placement,
        offload,
        disk_rejoin_window,
        repair_delay: Duration::from_secs(3),
        ..GroupConfig::new(GroupId(0), NonZeroU16::MIN, term)
    }
}

impl ModelHarness {
    pub(crate) fn new(placement: PlacementKind, offload: OffloadTrigger) -> ModelHarness {
        let now = Now { mono: MonoTime(1_000_000_007), unix: UnixMillis(1_700_000_000_000) };
        let term = Term::new(1).unwrap();
        let mut harness = ModelHarness {
            now,
            group: Group::new(config(term, placement, offload), now),
            term,
            exclusion: 0,
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
            offload,
            epochs: BTreeSet::new(),
            removals: BTreeMap::new(),
            replaced: BTreeMap::new(),
            forced_job: false,
            any_job: false,
            jobs: BTreeMap::new(),
            replaced_by_copy: BTreeSet::new(),
            mounts: 0,
            sessions: 0,
            effects: vec![],
            watcher: Watcher::default(),
        };
        harness.add_tenants();
        harness
    }

    /// Applies one command and checks everything.
    pub(crate) fn step(&mut self, command: &Command) -> Check {
        self.effects.clear();
        self.may_end = MayEnd::Nothing;
        self.apply(command)?;
        self.take_effects()?;
        crate::check::check(self)?;
        self.watch()
    }

    /// Stores the exclusion that the group wants; the group hears of it one tick later.
    fn exclude(&mut self) {
        if let Some(number) = self.group.wanted_exclusion(self.now) {
            if self.exclusion == number {
                self.group.excluded(number, &mut self.effects);
            }
            self.exclusion = number;
        }
    }

    /// Tells the nodes in sync the number of exclusions.
    fn answer_heartbeats(&mut self) {
        for node in &mut self.nodes {
            let in_sync = |session| self.group.is_in_sync(node.id, session, node.disk.is_some());
            if node.session.is_some_and(in_sync) {
                node.synced = Some((self.group.exclusion(), self.now.mono));
            }
        }
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
            Command::WriteAll { put } => self.with_put(put, |harness, put| {
                harness.write_all(put);
                Ok(())
            }),
            Command::WriteSome { put, published } => self.with_put(put, |harness, put| {
                for location in 0..harness.puts[put].locations.len() {
                    harness.begin(put, location);
                    if published >> (location % 8) & 1 == 1 {
                        harness.commit(put, location);
                    }
                }
                Ok(())
            }),
            Command::Begin { put, location } => self.with_put(put, |harness, put| {
                let location = usize::from(location) % harness.puts[put].locations.len();
                harness.begin(put, location);
                Ok(())
            }),
            Command::Commit { put, location } => self.with_put(put, |harness, put| {
                let location = usize::from(location) % harness.puts[put].locations.len();
                harness.commit(put, location);
                Ok(())
            }),
            Command::WriterDies { put } => self.with_put(put, |harness, put| {
                harness.writer_dies(put);
                Ok(())
            }),
            Command::PutEnd { put, failed } => {
                self.with_put(put, |harness, put| harness.put_end(put, failed))
            }
            Command::Revoke { put } => self.with_put(put, |harness, put| harness.put_revoke(put)),
            Command::Lookup { key, lease_ms } => self.lookup(key % KEYS, lease_ms),
            Command::Exist { key } => self.exist(key % KEYS),
            Command::Touch { key, lease_ms } => self.touch(key % KEYS, lease_ms),
            Command::SetPin { key, pin } => self.set_pin(key % KEYS, pin),
            Command::Remove { key, force } => self.remove(key % KEYS, force),
            Command::Job { tenant, kind, force } => {
                let (kind, keys) = match kind {
                    0 => (JobKind::All, 0..KEYS),
                    1 => (JobKind::Prefix(b"key-1".as_slice().into()), 1..2),
                    _ => (JobKind::pattern("[0-3]$").unwrap(), 0..4),
                };
                let started = self.group.start_job(TenantIndex(tenant.into()), kind, force);
                if let (Ok(job), true) = (&started, force) {
                    let of_tenant = keys.filter(|&key| tenant_of(key) == tenant);
                    let removed = of_tenant.map(|key| (key, self.epochs_of_removal(key))).collect();
                    self.jobs.insert(*job, removed);
                }
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
            Command::Respond { node, count } => self.respond(node.into(), count.into()),
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
            Command::ReleaseReaders { node } => {
                let node = &mut self.nodes[usize::from(node)];
                for segment in &mut node.segments {
                    segment.release_readers(&mut node.responses);
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
                    limit => TickBudget {
                        expiries: limit,
                        evictions: limit,
                        swept_slots: limit,
                        job_objects: limit,
                        reclaims: limit,
                        promotions: limit,
                        flushed_slots: limit * 4,
                        warmed_slots: limit * 4,
                        write_backs: limit,
                        drained_slots: limit * 4,
                        repair_objects: limit * 4,
                        copies: limit,
                    },
                };
                let protected = if self.any_job { vec![] } else { self.protected() };
                let _more = self.group.tick(self.now, &budget, &mut self.effects);
                self.exclude();
                self.answer_heartbeats();
                self.check_jobs()?;
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
                self.group.set_quota(TenantIndex(tenant.into()), quota);
                Ok(())
            }
            Command::Drain { segment, mode } => {
                let (node, at) = self.segment_at(segment.into());
                let (node, segment) = (self.nodes[node].id, self.nodes[node].segments[at].id);
                let _drained = self.group.drain(node, segment, mode);
                Ok(())
            }
            Command::Undrain { segment } => {
                let (node, at) = self.segment_at(segment.into());
                let (node, segment) = (self.nodes[node].id, self.nodes[node].segments[at].id);
                let _undrained = self.group.undrain(self.now, node, segment);
                Ok(())
            }
            Command::RemoteReads { key, reader } => {
                self.remote_reads(key % KEYS, reader);
                Ok(())
            }
            Command::Copy { node } => self.copy_next(node.into()).map(|_| ()),
            Command::Unmount { segment } => self.unmount(segment.into()),
            Command::Lose { node } => {
                let rejoin_window = self.group.config().rejoin_window;
                let node = &mut self.nodes[usize::from(node)];
                if let Some(session) = node.session {
                    self.group.node_lost(self.now, node.id, session, &mut self.effects);
                    node.disconnect(self.now.mono.after(rejoin_window));
                }
                Ok(())
            }
            Command::Mount { node, segments } => self.mount(node.into(), segments),
            Command::Reconnect { node, segments } => {
                let rejoin_window = self.group.config().rejoin_window;
                if self.nodes[usize::from(node)].session.is_none() {
                    return Ok(());
                }
                self.nodes[usize::from(node)].disconnect(self.now.mono.after(rejoin_window));
                // The first segment mounted in the new session informs the master of it.
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
            Command::DiskNotice { node, found, count } => {
                for _ in 0..count {
                    self.send_disk_notice(node.into(), found)?;
                }
                Ok(())
            }
            Command::DiskPromote { node } => {
                self.nodes[usize::from(node)].promote_next();
                Ok(())
            }
            Command::DiskEvict { node, index } => self.evict_from_disk(node.into(), index),
            Command::DiskStatus { node, accepts } => {
                self.disk_status(node.into(), accepts);
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
                        self.send_disk_notice(node, false)?;
                    }
                    // Every other time, also the commands that result from this, and their responses.
                    if objects % 2 == 1 {
                        self.take_effects()?;
                        while self.nodes[node].execute_next(false) {}
                        self.respond(node, usize::MAX)?;
                    }
                }
                Ok(())
            }
            Command::Promote { key } => {
                self.may_end = MayEnd::Any;
                self.prefetch(key % KEYS)?;
                let promotions_only = TickBudget {
                    expiries: 0,
                    evictions: 0,
                    swept_slots: 0,
                    job_objects: 0,
                    reclaims: 0,
                    promotions: 8,
                    flushed_slots: 0,
                    warmed_slots: 0,
                    write_backs: 0,
                    drained_slots: 0,
                    repair_objects: 0,
                    copies: 0,
                };
                let _more = self.group.tick(self.now, &promotions_only, &mut self.effects);
                self.take_effects()?;
                for node in &mut self.nodes {
                    while node.execute_next(false) {}
                }
                Ok(())
            }
            Command::Flush { node } => self.flush(node.into()),
            Command::StopAndStart { node } => {
                self.may_end = MayEnd::Any;
                self.flush_completely(node.into())?;
                self.crash_node(node.into());
                self.mount(node.into(), 0)?;
                self.settle()
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

    /// Calls `act` with the put that is `back` puts before the newest.
    pub(crate) fn with_put(
        &mut self,
        back: u8,
        act: impl FnOnce(&mut ModelHarness, usize) -> Check,
    ) -> Check {
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
        let node = self.nodes.iter().position(|other| other.id == node).expect("node exists");
        let at = self.nodes[node].segments.iter().position(|other| other.id == segment);
        (node, at.expect("segment exists"))
    }

    pub(crate) fn put_of(&self, key: u8, epoch: Epoch) -> Option<usize> {
        self.puts.iter().position(|put| put.key == key && put.epoch == epoch)
    }

    pub(crate) fn take_effects(&mut self) -> Check {
        for effect in std::mem::take(&mut self.effects) {
            match effect {
                Effect::Command { session, command } => self.take_command(session, command)?,
                Effect::Removed { waiter, code } => {
                    let (key, epochs) =
                        self.removals.remove(&waiter.0).ok_or("unknown waiter of a removal")?;
                    match code {
                        None => self.removed(key, &epochs)?,
                        Some(_) => self.removal_pending(&epochs),
                    }
                }
                Effect::StepDown { seen } => return Err(format!("unexpected step down to term {seen}")),
            }
        }
        Ok(())
    }

    fn take_command(&mut self, session: SessionId, command: NodeCommand) -> Check {
        let node = self.nodes.iter_mut().position(|node| node.session == Some(session));
        let node = node.ok_or_else(|| format!("{command:?} for an ended session"))?;
        let is_for_disk = command.segment == SegmentId::DISK;
        if is_for_disk || matches!(command.kind, CommandKind::Offload | CommandKind::Promote { .. }) {
            return self.take_disk_command(node, command);
        }
        let (_, at) = self.position(self.nodes[node].id, command.segment);
        let now = self.now;
        // One replica of several, which was not read.
        let is_surplus = matches!(self.may_end, MayEnd::Any)
            && self.finds(&command).is_some_and(|locations| !locations.is_empty());
        let segment = &mut self.nodes[node].segments[at];
        let mount = segment.mount.as_mut().ok_or_else(|| format!("{command:?} for an unmounted segment"))?;
        if command.kind == CommandKind::Reclaim {
            let lease = self.leases.iter().find(|lease| {
                (lease.mount, lease.slot, lease.epoch) == (mount.number, command.slot, command.epoch)
                    && lease.until > now.mono
            });
            ensure!(lease.is_none(), "{command:?} although {lease:?} at {:?}", now.mono);
        }
        if let CommandKind::Copy { stripe, extent, .. } = command.kind {
            return self.take_copy(node, command, stripe, extent);
        }
        let slot = command.slot.0;
        let key = command.id.0[0] - 1;
        let is_replaced = self.replaced_by_copy.contains(&(node, command.segment, slot, command.epoch));
        if mount.commanded.insert((slot, command.epoch))
            && mount.known_ready.get(&slot) == Some(&command.epoch)
            && let Some(put) = self.puts.iter().find(|put| put.epoch == command.epoch)
            && (put.acked || put.seen)
            && put.expires.is_none_or(|at| at > now.unix)
            && !segment.words[slot as usize].scrubbed
        {
            let allowed = match self.may_end {
                MayEnd::Nothing => false,
                MayEnd::Keys(keys) => keys >> key & 1 == 1,
                MayEnd::Any => {
                    // A pin that was set later is not part of the node's record.
                    [put.pin, put.pin_stored] != [PinClass::Hard; 2]
                        || put.locations.len() > 1
                        || self.forced_job
                        || self.replaced.contains_key(&key)
                }
            };
            ensure!(
                allowed || is_replaced || is_surplus,
                "{command:?} against a complete object: {:?}",
                self.may_end
            );
        }
        self.nodes[node].commands.push_back(command);
        Ok(())
    }
}
