//! The row `moontide`: groups as in a master, with the time of the trace.

use std::collections::VecDeque;
use std::num::NonZeroU16;
use std::time::Duration;

use moontide_meta::{
    CommandKind, CommandOutcome, DiskSpec, Effect, Effects, EvictionTrials, Group, GroupConfig, LookupKey,
    MountSpec, NodeCommand, Now, PutEnd, PutOptions, PutStart, SyncMark, TenantIndex, TickBudget,
};
use moontide_types::record::PinClass;
use moontide_types::{
    ErrorCode, Generation, GroupId, Key, Medium, MonoTime, NodeId, ObjectId, SegmentId, SessionId, Tenant,
    TenantGeneration, TenantIdKey, Term, UnixMillis,
};

use super::node_disk::{NodeDisk, written_record};
use super::{Cache, CacheSpec, NumberedRequest, Tier, TierCounts};
use crate::meta::fixture::apply_command;
use crate::results::BenchError;

/// Length of an object: its record takes one unit.
const OBJECT_BYTES: u64 = 100;

/// Blocks that a client puts with one call.
const PUT_BATCH: usize = 64;

const NODE: NodeId = NodeId(1);
const SESSION: SessionId = SessionId(1);

/// Attempts of a put for which there is no space; each evicts.
const ATTEMPTS: usize = 8;

pub(super) struct Shipped {
    groups: Vec<Group>,
    tenants: Vec<TenantIndex>,
    ids: Vec<ObjectId>,
    count: NonZeroU16,
    trials: EvictionTrials,
    effects: Effects,
    disk: Option<NodeDisk>,
    touch_delay: Duration,
    /// Hits that the groups have not learned of: (time, blocks).
    hits: VecDeque<(Now, Vec<u32>)>,
    ticked: Now,
}

fn key(block: u32) -> [u8; 8] {
    u64::from(block).to_be_bytes()
}

fn lookup_key<'k>(id: ObjectId, key: &'k [u8; 8]) -> LookupKey<'k> {
    LookupKey { id, key: Key::new(key).expect("8 bytes are a key") }
}

impl Shipped {
    pub(super) fn new(blocks: usize, spec: &CacheSpec) -> Shipped {
        let CacheSpec { capacity, disk, disk_eviction, groups, touch_delay } = *spec;
        let count = NonZeroU16::new(groups).expect("the parser accepts no 0");
        let start = now(0);
        let mut effects = Effects::new();
        let mut tenants = vec![];
        let groups = (0..groups)
            .map(|number| {
                let mut config = GroupConfig::new(GroupId(number), count, Term::new(1).expect("1 is a term"));
                if disk.is_none() {
                    // The whole memory is used, so that capacities are equal to those of the other policies. With a disk,
                    // the free part is the space for promotions.
                    config.eviction_high_watermark_permille = 1000;
                    config.eviction_low_watermark_permille = 1000;
                }
                let mut group = Group::new(config, start);
                tenants.push(group.tenant(Tenant::DEFAULT).expect("the first tenant"));
                let share = |upto: usize| capacity * upto / usize::from(count.get());
                let slots = share(usize::from(number) + 1) - share(usize::from(number));
                let spec = MountSpec {
                    node: NODE,
                    session: SESSION,
                    segment: SegmentId(number.into()),
                    generation: Generation(1),
                    medium: Medium::Memory,
                    units: slots.max(1) as u32,
                    slots: slots.max(1) as u32,
                    labels: ["", "", ""],
                    tenant: None,
                    term: Term::ZERO,
                    has_records: false,
                    synced: SyncMark::NONE,
                    one_sided: false,
                };
                group.mount(start, &spec, &mut effects).expect("a new segment can be mounted");
                if disk.is_some() {
                    let spec = DiskSpec {
                        node: NODE,
                        session: SESSION,
                        generation: Generation(1),
                        labels: ["", "", ""],
                        occupied: false,
                        synced: SyncMark::NONE,
                    };
                    group.mount_disk(start, &spec, &mut effects);
                }
                group
            })
            .collect();
        let keys: Vec<_> = (0..blocks as u32).map(key).collect();
        let mut ids = Vec::with_capacity(blocks);
        let all = keys.iter().map(|key| Key::new(key).expect("8 bytes are a key"));
        TenantIdKey::new(1, [7; 32]).object_ids(TenantGeneration(0), all, &mut ids);
        Shipped {
            groups,
            tenants,
            disk: disk.map(|capacity| NodeDisk::new(&ids, capacity, disk_eviction)),
            ids,
            count,
            trials: EvictionTrials::default(),
            effects,
            touch_delay,
            hits: VecDeque::new(),
            ticked: start,
        }
    }

    fn group_of(&self, block: u32) -> usize {
        self.ids[block as usize].group(self.count).0.into()
    }

    /// Lets the node carry out all commands of a group, and those that follow from them.
    fn apply_commands(&mut self, now: Now, group: usize) {
        let mut pending: VecDeque<(usize, Effect)> =
            self.effects.drain(..).map(|effect| (group, effect)).collect();
        while let Some((group, effect)) = pending.pop_front() {
            self.apply_command(now, group, &effect, &mut pending);
            pending.extend(self.effects.drain(..).map(|effect| (group, effect)));
        }
    }

    fn apply_command(
        &mut self,
        now: Now,
        group: usize,
        effect: &Effect,
        pending: &mut VecDeque<(usize, Effect)>,
    ) {
        let Effect::Command { command, .. } = effect else { return };
        let &NodeCommand { kind, segment, slot, epoch, id, .. } = command;
        let Some(disk) = &mut self.disk else {
            return apply_command(&mut self.groups[group], effect, &mut self.effects);
        };
        match kind {
            CommandKind::Offload => {
                while let Some((victim, version)) = disk.pop_victim() {
                    let id = self.ids[victim as usize];
                    let group = id.group(self.count).0.into();
                    let mut effects = Effects::new();
                    let evicted = Group::disk_evicted(
                        &mut self.groups[group],
                        now,
                        (NODE, SESSION),
                        id,
                        version,
                        &mut effects,
                    );
                    evicted.expect("the disk is mounted");
                    pending.extend(effects.into_iter().map(|effect| (group, effect)));
                }
                let block = disk.block(id);
                disk.write(block, epoch);
                let key = key(block);
                let record = written_record((id, epoch), &key, self.tenants[group], OBJECT_BYTES);
                let group = &mut self.groups[group];
                let noticed = group.disk_notice(now, (NODE, SESSION), (&record, 0), false, &mut self.effects);
                noticed.expect("the disk is mounted");
            }
            CommandKind::Copy { .. } => unreachable!("no segment drains"),
            CommandKind::Promote { .. } => disk.counts.promoted += 1,
            CommandKind::Kill | CommandKind::Reclaim if segment == SegmentId::DISK => {
                disk.remove(disk.block(id))
            }
            CommandKind::Kill | CommandKind::Reclaim => {
                return apply_command(&mut self.groups[group], effect, &mut self.effects);
            }
        }
        let done = CommandOutcome::Done;
        self.groups[group].command_outcome((NODE, segment), kind, slot, epoch, done, &mut self.effects);
    }

    /// Tells the groups of hits, in the order of the keys, as a lookup does.
    fn use_blocks(&mut self, now: Now, blocks: &[u32]) {
        let mut of_group: Vec<Vec<u32>> = vec![vec![]; self.groups.len()];
        for &block in blocks {
            of_group[self.group_of(block)].push(block);
        }
        for (group, blocks) in self.groups.iter_mut().zip(&of_group) {
            let keys: Vec<[u8; 8]> = blocks.iter().map(|&block| key(block)).collect();
            let lookups: Vec<LookupKey<'_>> = blocks
                .iter()
                .zip(&keys)
                .map(|(&block, key)| lookup_key(self.ids[block as usize], key))
                .collect();
            group.lookup(now, 0, &lookups, |_, _| {});
        }
    }

    /// Starts a put. Returns the version, or nothing if the block is stored.
    fn start(&mut self, now: Now, block: u32) -> Result<Option<PutEndArgs>, BenchError> {
        let (group, id, key, options) =
            (self.group_of(block), self.ids[block as usize], key(block), PutOptions::default());
        let put = PutStart {
            object: lookup_key(id, &key),
            tenant: self.tenants[group],
            caller: 1,
            object_len: OBJECT_BYTES,
            attributes_len: 0,
            pin: PinClass::None,
            spread: None,
            disk_replicas: 0,
            expires: None,
            cohort: None,
            parent: None,
            options: &options,
        };
        for _ in 0..ATTEMPTS {
            let started = self.groups[group].put_start(now, &put, &mut self.effects);
            let started = started.map(|reservation| reservation.object.epoch);
            self.apply_commands(now, group);
            match started {
                Ok(epoch) => return Ok(Some(PutEndArgs { group, id, epoch })),
                Err(ErrorCode::AlreadyExists | ErrorCode::InProgress) => return Ok(None),
                Err(ErrorCode::NoSpace) => {}
                Err(code) => return Err(BenchError::Wrong(format!("put_start failed: {code}"))),
            }
        }
        // All objects of the group are being written: the request is larger than the memory.
        Ok(None)
    }
}

struct PutEndArgs {
    group: usize,
    id: ObjectId,
    epoch: moontide_types::Epoch,
}

fn now(at_us: u64) -> Now {
    // Not 0: a group treats the time of its creation like any other, but a clock never reads 0.
    Now { mono: MonoTime(1_000_000_000 + at_us * 1000), unix: UnixMillis(1_000_000 + at_us / 1000) }
}

impl Cache for Shipped {
    fn tier(&mut self, block: u32) -> Option<Tier> {
        let key = key(block);
        let lookup = lookup_key(self.ids[block as usize], &key);
        let group = self.group_of(block);
        let found = self.groups[group].query(self.ticked, &lookup)?;
        let is_in_memory = found.locations.iter().any(|location| location.medium == Medium::Memory);
        Some(if is_in_memory { Tier::Memory } else { Tier::Disk })
    }

    fn counts(&self) -> TierCounts {
        self.disk.as_ref().map(|disk| disk.counts).unwrap_or_default()
    }

    fn request(&mut self, _: usize, request: &NumberedRequest, hits: usize) -> Result<(), BenchError> {
        let now = now(request.at_us);
        let delay = self.touch_delay;
        while let Some((_, blocks)) = self.hits.pop_front_if(|hit| hit.0.mono.after(delay) <= now.mono) {
            self.use_blocks(now, &blocks);
        }
        if now.mono.since(self.ticked.mono) >= Duration::from_millis(100) {
            self.ticked = now;
            for group in 0..self.groups.len() {
                self.groups[group].exchange_eviction_trials(&mut self.trials);
                while self.groups[group].tick(now, &TickBudget::default(), &mut self.effects) {
                    self.apply_commands(now, group);
                }
                self.apply_commands(now, group);
            }
        }
        let (hit, missing) = request.blocks.split_at(hits);
        for &block in hit {
            if self.disk.is_some() && self.tier(block) == Some(Tier::Disk) {
                self.disk.as_mut().expect("there is a disk").read(block);
            }
        }
        if self.touch_delay.is_zero() {
            self.use_blocks(now, hit);
        } else {
            self.hits.push_back((now, hit.to_vec()));
        }
        for batch in missing.chunks(PUT_BATCH) {
            let mut started = vec![];
            for &block in batch {
                started.extend(self.start(now, block)?);
            }
            // As the master does: the last block of a batch ends first.
            for PutEndArgs { group, id, epoch } in started.into_iter().rev() {
                let end =
                    PutEnd { id, epoch, root: 1, outcomes: &[None], stripe_roots: &[], replaces: false };
                let ended = self.groups[group].put_end(now, &end, &mut self.effects);
                ended.map_err(|code| BenchError::Wrong(format!("put_end failed: {code}")))?;
                self.apply_commands(now, group);
            }
        }
        Ok(())
    }
}
