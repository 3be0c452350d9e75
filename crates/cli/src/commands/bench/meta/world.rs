//! Groups full of objects, without a network: what the in-process cases measure.

use std::num::NonZeroU16;

use moontide_meta::{
    Ask, Effect, Effects, Group, GroupConfig, Medium, MountSpec, Now, OrderKind, OrderOutcome, PutEnd,
    PutOptions, PutStart, TenantIx, TickBudget, Waiter,
};
use moontide_types::record::PinClass;
use moontide_types::{
    Clock, Generation, GroupId, IdKey, Key, NodeId, ObjectId, SegmentId, SessionId, SystemClock, Tenant,
    TenantGeneration, Term,
};

use parking_lot::Mutex;

use super::super::figures::{BenchError, Progress};

/// Keys are 64 bytes, as engines' hashes in hexadecimal are.
pub(super) const KEY_BYTES: usize = 64;

/// A record of such an object takes one unit of 512 bytes.
pub(super) const OBJECT_BYTES: u64 = 100;

pub(super) const TENANT: Tenant<'static> = Tenant::DEFAULT;

/// The key of a number: hexadecimal digits that look like a hash.
pub(super) fn key(number: u64) -> [u8; KEY_BYTES] {
    let mut key = [0; KEY_BYTES];
    for (part, chunk) in (0u64..).zip(key.chunks_exact_mut(16)) {
        let mut mixed = (number ^ part << 56).wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
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

/// Ids of some keys, as the master computes them.
pub(super) fn ids(id_key: &IdKey, keys: &[[u8; KEY_BYTES]]) -> Vec<ObjectId> {
    let mut ids = Vec::with_capacity(keys.len());
    let keys = keys.iter().map(|key| Key::new(key).expect("64 bytes are a key"));
    id_key.object_ids(TENANT, TenantGeneration(0), keys, &mut ids);
    ids
}

/// Groups and the one node that has all of their segments.
pub(super) struct World {
    pub(super) groups: Vec<Group>,
    pub(super) count: NonZeroU16,
    pub(super) id_key: IdKey,
    tenant: Vec<TenantIx>,
    effects: Effects,
}

const NODE: NodeId = NodeId(1);
const SESSION: SessionId = SessionId(1);

impl World {
    /// Groups with room for so many objects.
    pub(super) fn new(groups: u16, objects: u64) -> World {
        let count = NonZeroU16::new(groups).expect("at least one group");
        let term = Term::new(1).expect("1 is a term");
        let mut effects = Effects::new();
        let mut tenants = vec![];
        // Uniform ids spread within some standard deviations; a fifth more leaves eviction out of it.
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
                    occupied: false,
                    known: Term::ZERO,
                    away: std::time::Duration::ZERO,
                    one_sided: false,
                };
                group.mount(now(), &spec, &mut effects).expect("a fresh segment is mounted");
                group
            })
            .collect();
        World { groups, count, id_key: id_key(), tenant: tenants, effects }
    }

    /// The groups, each behind a lock as in a master, and the rest.
    pub(super) fn into_locked(mut self) -> (Vec<Mutex<Group>>, World) {
        (std::mem::take(&mut self.groups).into_iter().map(Mutex::new).collect(), self)
    }

    /// Back together.
    pub(super) fn with(mut self, groups: Vec<Mutex<Group>>) -> World {
        self.groups = groups.into_iter().map(Mutex::into_inner).collect();
        self
    }

    pub(super) fn group_of(&self, id: ObjectId) -> usize {
        id.group(self.count).0.into()
    }

    /// Puts objects by start and end, as writers do.
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
                    ask: Ask { id, key: Key::new(key).expect("64 bytes are a key") },
                    tenant: self.tenant[index],
                    caller: 1,
                    object_len: OBJECT_BYTES,
                    attributes_len: 0,
                    pin: PinClass::None,
                    expires: None,
                    cohort: None,
                    parent: None,
                    options: &options,
                };
                let group = &mut self.groups[index];
                let started = group.put_start(time, &put, &mut self.effects);
                let epoch = match started {
                    Ok(reservation) => reservation.object.epoch,
                    Err(code) => return Err(BenchError::Wrong(format!("a put was refused: {code}"))),
                };
                let end = PutEnd { id, epoch, root: 1, outcomes: &[None], stripe_roots: &[] };
                let ended = group.put_end(time, &end, &mut self.effects);
                ended.map_err(|code| BenchError::Wrong(format!("a put did not end: {code}")))?;
            }
            progress.at(from);
        }
        Ok(())
    }

    /// Removes an object, with the node answering at once.
    pub(super) fn remove(&mut self, ask: &Ask<'_>) {
        let index = self.group_of(ask.id);
        let _ = self.groups[index].remove(now(), ask, true, Waiter(0), &mut self.effects);
        self.answer(index);
    }

    /// Time passes.
    pub(super) fn tick(&mut self) {
        for index in 0..self.groups.len() {
            while self.groups[index].tick(now(), &TickBudget::default(), &mut self.effects) {
                self.answer(index);
            }
            self.answer(index);
        }
    }

    /// The node does everything that it was ordered to.
    pub(super) fn answer(&mut self, group: usize) {
        let effects = std::mem::take(&mut self.effects);
        for effect in &effects {
            answer_order(&mut self.groups[group], effect, &mut self.effects);
        }
        self.effects.clear();
    }
}

/// A node that obeys at once.
pub(super) fn answer_order(group: &mut Group, effect: &Effect, effects: &mut Effects) {
    if let Effect::Order { order, .. } = effect {
        let outcome = match order.kind {
            OrderKind::Kill => OrderOutcome::Accepted,
            OrderKind::Reclaim => OrderOutcome::Done,
            OrderKind::Offload | OrderKind::Promote { .. } => unreachable!("the node has no disk"),
        };
        group.order_outcome((NODE, order.segment), order.kind, order.slot, order.epoch, outcome, effects);
    }
}
