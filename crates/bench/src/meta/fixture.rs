//! Groups full of objects, without network, for the in-process cases.

use std::num::NonZeroU16;

use moontide_meta::{
    CommandKind, CommandOutcome, Effect, Effects, Group, GroupConfig, LookupKey, MountSpec, Now, PutEnd,
    PutOptions, PutStart, SyncMark, TenantIndex, TickBudget, WaiterId,
};
use moontide_rt::SplitMix64;
use moontide_types::record::PinClass;
use moontide_types::{
    Clock, Generation, GroupId, IdKey, Key, Medium, NodeId, ObjectId, SegmentId, SessionId, SystemClock,
    Tenant, TenantGeneration, Term,
};

use parking_lot::Mutex;

use crate::results::{BenchError, Progress};

/// Length of a key: 64 bytes, as the hexadecimal hashes of inference engines.
pub(super) const KEY_BYTES: usize = 64;

/// Length of an object; its record takes one unit of 512 bytes.
pub(super) const OBJECT_BYTES: u64 = 100;

pub(super) const TENANT: Tenant<'static> = Tenant::DEFAULT;

/// Returns the key of a number: hexadecimal digits like those of a hash.
pub(super) fn key(number: u64) -> [u8; KEY_BYTES] {
    let mut key = [0; KEY_BYTES];
    for (part, chunk) in (0u64..).zip(key.chunks_exact_mut(16)) {
        let mixed = SplitMix64::new(number ^ part << 56).next_u64();
        for (at, digit) in chunk.iter_mut().enumerate() {
            *digit = b"0123456789abcdef"[(mixed >> (4 * at) & 15) as usize];
        }
    }
    key
}

pub(super) fn id_key() -> IdKey {
    IdKey::new(1, [7; 32])
}

pub(super) fn now() -> Now {
    Now { mono: SystemClock.now(), unix: SystemClock.unix() }
}

/// Computes the ids of keys as the master does.
pub(super) fn ids(id_key: &IdKey, keys: &[[u8; KEY_BYTES]]) -> Vec<ObjectId> {
    let mut ids = Vec::with_capacity(keys.len());
    let keys = keys.iter().map(|key| Key::new(key).expect("64 bytes are a key"));
    id_key.of_tenant(TENANT).object_ids(TenantGeneration(0), keys, &mut ids);
    ids
}

/// Groups and a node with all of their segments.
pub(super) struct MetaFixture {
    pub(super) groups: Vec<Group>,
    pub(super) count: NonZeroU16,
    pub(super) id_key: IdKey,
    tenant: Vec<TenantIndex>,
    effects: Effects,
}

const NODE: NodeId = NodeId(1);
const SESSION: SessionId = SessionId(1);

impl MetaFixture {
    /// Creates groups with space for `objects` objects.
    pub(super) fn new(groups: u16, objects: u64) -> MetaFixture {
        let count = NonZeroU16::new(groups).expect("at least one group");
        let term = Term::new(1).expect("1 is a term");
        let mut effects = Effects::new();
        let mut tenants = vec![];
        // The ids are uniformly distributed; 20 % extra slots exceed their deviation, so that nothing is evicted.
        let share = (objects / u64::from(groups)).max(1) as u32;
        let slots = share + share / 5 + 1024;
        let groups = (0..groups)
            .map(|number| {
                let config = GroupConfig::new(GroupId(number), count, term);
                let mut group = Group::new(config, now());
                tenants.push(group.tenant(TENANT).expect("the first tenant"));
                let spec = MountSpec {
                    node: NODE,
                    session: SESSION,
                    segment: SegmentId(number.into()),
                    generation: Generation(1),
                    medium: Medium::Memory,
                    units: slots + slots / 20,
                    slots,
                    labels: ["", "", ""],
                    tenant: None,
                    term: Term::ZERO,
                    has_records: false,
                    synced: SyncMark::NONE,
                    one_sided: false,
                };
                group.mount(now(), &spec, &mut effects).expect("a new segment can be mounted");
                group
            })
            .collect();
        MetaFixture { groups, count, id_key: id_key(), tenant: tenants, effects }
    }

    /// Takes the groups out, each behind a lock as in a master.
    pub(super) fn into_locked(mut self) -> (Vec<Mutex<Group>>, MetaFixture) {
        (std::mem::take(&mut self.groups).into_iter().map(Mutex::new).collect(), self)
    }

    /// Puts the groups of [`MetaFixture::into_locked`] back.
    pub(super) fn with(mut self, groups: Vec<Mutex<Group>>) -> MetaFixture {
        self.groups = groups.into_iter().map(Mutex::into_inner).collect();
        self
    }

    pub(super) fn group_of(&self, id: ObjectId) -> usize {
        id.group(self.count).0.into()
    }

    /// Puts `objects` objects with PutStart and PutEnd.
    pub(super) fn fill(&mut self, objects: u64) -> Result<(), BenchError> {
        let mut progress = Progress::new(format!("putting {objects} objects"), objects);
        let options = PutOptions::default();
        let mut numbers = 0..objects;
        while !numbers.is_empty() {
            let from = numbers.start;
            let keys: Vec<_> = numbers.by_ref().take(1024).map(key).collect();
            let time = now();
            for (key, id) in keys.iter().zip(ids(&self.id_key, &keys)) {
                let index = self.group_of(id);
                let put = PutStart {
                    object: LookupKey { id, key: Key::new(key).expect("64 bytes are a key") },
                    tenant: self.tenant[index],
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
                let group = &mut self.groups[index];
                let started = group.put_start(time, &put, &mut self.effects);
                let epoch = match started {
                    Ok(reservation) => reservation.object.epoch,
                    Err(code) => return Err(BenchError::Wrong(format!("put_start failed: {code}"))),
                };
                let end =
                    PutEnd { id, epoch, root: 1, outcomes: &[None], stripe_roots: &[], replaces: false };
                let ended = group.put_end(time, &end, &mut self.effects);
                ended.map_err(|code| BenchError::Wrong(format!("put_end failed: {code}")))?;
            }
            progress.at(from);
        }
        Ok(())
    }

    /// Removes an object; the node executes the commands immediately.
    pub(super) fn remove(&mut self, ask: &LookupKey<'_>) {
        let index = self.group_of(ask.id);
        let _ = self.groups[index].remove(now(), ask, true, WaiterId(0), &mut self.effects);
        self.apply_commands(index);
    }

    /// Ticks all groups until they have no more work.
    pub(super) fn tick(&mut self) {
        for index in 0..self.groups.len() {
            while self.groups[index].tick(now(), &TickBudget::default(), &mut self.effects) {
                self.apply_commands(index);
            }
            self.apply_commands(index);
        }
    }

    /// Executes the pending commands of a group for the node.
    pub(super) fn apply_commands(&mut self, group: usize) {
        let effects = std::mem::take(&mut self.effects);
        for effect in &effects {
            apply_command(&mut self.groups[group], effect, &mut self.effects);
        }
        self.effects.clear();
    }
}

/// Reports the success of a command to the group.
pub(crate) fn apply_command(group: &mut Group, effect: &Effect, effects: &mut Effects) {
    if let Effect::Command { command, .. } = effect {
        let outcome = match command.kind {
            CommandKind::Kill => CommandOutcome::Accepted,
            CommandKind::Reclaim => CommandOutcome::Done,
            CommandKind::Offload | CommandKind::Promote { .. } => unreachable!("the node has no disk"),
            CommandKind::Copy { .. } => unreachable!("no segment drains"),
        };
        group.command_outcome(
            (NODE, command.segment),
            command.kind,
            command.slot,
            command.epoch,
            outcome,
            effects,
        );
    }
}
