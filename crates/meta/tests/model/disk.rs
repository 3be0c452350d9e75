//! [`DiskModel`]: a node's disk in the plainest form: records and tombstones that outlive the node's process, and what is
//! under way there, which does not.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use moontide_meta::{
    Ask, Audit, DiskSpec, Order, OrderKind, OrderOutcome, PlaceView, ReportRecord, ReportState, StripeView,
    TenantIx,
};
use moontide_types::{Epoch, ErrorCode, Extent, Generation, Key, NodeId, ObjectId, SegmentId, SlotId};

use crate::node::{NodeModel, RecordModel, Word};
use crate::world::{Check, KEYS, MayEnd, World, ensure, id_of, key_of};

/// Object, version and stripe.
pub(crate) type Name = (ObjectId, Epoch, u16);

/// A record that is being written, with the order that is answered afterwards if its session lives.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) name: Name,
    record: RecordModel,
    from: (SegmentId, u32),
    order: Option<Order>,
}

/// What the current master has been told in the current session.
#[derive(Clone, Debug, Default)]
pub(crate) struct DiskMount {
    to_tell: VecDeque<Name>,
    pub(crate) recovered: bool,
    pub(crate) takes: bool,
    pub(crate) told: BTreeSet<Name>,
    /// What the master has ordered to go.
    pub(crate) ordered: BTreeSet<(ObjectId, Epoch)>,
}

/// A disk.
#[derive(Clone, Debug, Default)]
pub(crate) struct DiskModel {
    pub(crate) records: BTreeMap<Name, RecordModel>,
    tombstones: BTreeSet<(ObjectId, Epoch)>,
    pub(crate) mount: Option<DiskMount>,
    pub(crate) writes: VecDeque<Write>,
    notices: VecDeque<(Name, Option<Order>)>,
    promotions: VecDeque<Order>,
}

impl DiskModel {
    /// Whether a version is there, or will be.
    pub(crate) fn may_have(&self, epoch: Epoch) -> bool {
        let there = self.records.keys().any(|&(_, of, _)| of == epoch);
        let coming = |write: &Write| {
            let (id, of, _) = write.name;
            of == epoch && !self.tombstones.contains(&(id, of))
        };
        there || self.writes.iter().any(coming)
    }

    /// The version goes, and stays away whatever is under way.
    fn bury(&mut self, id: ObjectId, epoch: Epoch) {
        self.tombstones.insert((id, epoch));
        self.records.retain(|&(of, version, _), _| (of, version) != (id, epoch));
    }

    fn is_about(&self, id: ObjectId, epoch: Epoch) -> bool {
        self.records
            .keys()
            .chain(self.writes.iter().map(|write| &write.name))
            .any(|name| (name.0, name.1) == (id, epoch))
    }

    /// The session is over. What is being written goes on; promotions do not.
    pub(crate) fn disconnect(&mut self) {
        self.mount = None;
        self.notices.clear();
        self.promotions.clear();
        self.writes.iter_mut().for_each(|write| write.order = None);
    }

    /// The process is over.
    pub(crate) fn crash(&mut self) {
        self.disconnect();
        self.writes.clear();
    }
}

impl NodeModel {
    /// An order about the disk, or to it. False: it is for a slot alone.
    pub(crate) fn execute_on_disk(&mut self, order: Order, refuse: bool) -> bool {
        let refused = |code| OrderOutcome::Refused(code);
        let Some(disk) = &mut self.disk else {
            assert!(
                order.segment != SegmentId::DISK
                    && matches!(order.kind, OrderKind::Kill | OrderKind::Reclaim)
            );
            return false;
        };
        let at = self.segments.iter().position(|segment| segment.id == order.segment);
        match order.kind {
            OrderKind::Kill | OrderKind::Reclaim if order.segment == SegmentId::DISK => {
                disk.bury(order.id, order.epoch);
                self.answers.push_back((order, OrderOutcome::Done));
                return true;
            }
            OrderKind::Kill | OrderKind::Reclaim => {
                let same =
                    |promotion: &Order| (promotion.segment, promotion.slot) == (order.segment, order.slot);
                if let Some(which) = disk.promotions.iter().position(same) {
                    let promotion = disk.promotions.remove(which).expect("it was just found");
                    self.answers.push_back((promotion, refused(ErrorCode::Gone)));
                }
                if order.kind == OrderKind::Kill && disk.is_about(order.id, order.epoch) {
                    disk.bury(order.id, order.epoch);
                }
                return false;
            }
            OrderKind::Offload => {
                let segment = &mut self.segments[at.expect("memory")];
                let word = &mut segment.words[order.slot.0 as usize];
                let there = segment.generation == order.generation
                    && (word.epoch, word.state) == (order.epoch, ReportState::Ready);
                let buried = disk.tombstones.contains(&(order.id, order.epoch));
                if refuse || !there || buried || disk.mount.is_none() {
                    self.answers.push_back((order, refused(ErrorCode::Busy)));
                    return true;
                }
                word.pinned = true;
                let record = word.record.clone().expect("READY has a record");
                let name = (order.id, order.epoch, record.stripe.index);
                let from = (order.segment, order.slot.0);
                disk.writes.push_back(Write { name, record, from, order: Some(order) });
            }
            OrderKind::Promote { stripe, .. } => {
                let there = disk.records.contains_key(&(order.id, order.epoch, stripe));
                let segment = &self.segments[at.expect("memory")];
                if refuse || !there || segment.generation != order.generation {
                    self.answers.push_back((order, refused(ErrorCode::NotFound)));
                } else {
                    disk.promotions.push_back(order);
                }
            }
        }
        true
    }

    /// The next record that is being written is on disk for good.
    pub(crate) fn write_next(&mut self) -> bool {
        let Some(disk) = &mut self.disk else { return false };
        let Some(write) = disk.writes.pop_front() else { return false };
        let (id, epoch, _) = write.name;
        if disk.tombstones.contains(&(id, epoch)) {
            let gone = OrderOutcome::Refused(ErrorCode::Gone);
            self.answers.extend(write.order.map(|order| (order, gone)));
        } else {
            disk.records.insert(write.name, write.record);
            if disk.mount.is_some() {
                disk.notices.push_back((write.name, write.order));
            }
        }
        let others = disk.writes.iter().any(|other| other.from == write.from);
        let segment = self.segments.iter_mut().find(|segment| segment.id == write.from.0).expect("known");
        segment.unpin(write.from.1, epoch, others, &mut self.answers);
        true
    }

    /// The next promotion is READY.
    pub(crate) fn promote_next(&mut self) -> bool {
        let Some(disk) = &mut self.disk else { return false };
        let Some(order) = disk.promotions.pop_front() else { return false };
        let OrderKind::Promote { stripe, extent } = order.kind else {
            unreachable!("only promotions are there")
        };
        let segment = self.segments.iter_mut().find(|segment| segment.id == order.segment).expect("known");
        let record = disk.records.get(&(order.id, order.epoch, stripe));
        let outcome = match record {
            Some(record)
                if segment.words[order.slot.0 as usize].is_free()
                    && segment.generation == order.generation =>
            {
                segment.copy_in(order.slot.0, order.epoch, RecordModel { extent, ..record.clone() });
                OrderOutcome::Done
            }
            _ => OrderOutcome::Refused(ErrorCode::Gone),
        };
        self.answers.push_back((order, outcome));
        true
    }
}

impl World {
    pub(crate) fn mount_disk(&mut self, node: usize) {
        let Some(session) = self.nodes[node].session else { return };
        let NodeModel { id, disk: Some(disk), .. } = &mut self.nodes[node] else { return };
        if disk.mount.is_some() {
            return;
        }
        let to_tell: VecDeque<Name> = disk.records.keys().copied().collect();
        let occupied = !to_tell.is_empty();
        disk.mount = Some(DiskMount { to_tell, recovered: !occupied, takes: true, ..DiskMount::default() });
        let spec = DiskSpec {
            node: *id,
            session,
            generation: Generation(1),
            labels: ["", ["rack-a", "rack-b"][id.0 as usize % 2], "zone"],
            occupied,
        };
        self.group.mount_disk(self.now, &spec, &mut self.effects);
    }

    /// The node says the next thing about its disk: what it found there after its start, or what it wrote.
    pub(crate) fn tell_disk(&mut self, node: usize, found: bool) -> Check {
        let Some(session) = self.nodes[node].session else { return Ok(()) };
        let NodeModel { id: node_id, disk: Some(disk), answers, .. } = &mut self.nodes[node] else {
            return Ok(());
        };
        let name = (*node_id, session);
        let Some(mount) = &mut disk.mount else { return Ok(()) };
        let (told, order) = if found {
            match mount.to_tell.pop_front() {
                Some(told) => (told, None),
                None => {
                    mount.recovered = true;
                    let answer = self.group.disk_recovered(name.0, name.1);
                    ensure!(answer.is_ok(), "the end of a recovery was refused with {answer:?}");
                    return Ok(());
                }
            }
        } else {
            let Some(notice) = disk.notices.pop_front() else { return Ok(()) };
            notice
        };
        let key = told.0.0[0] - 1;
        let bit = 1 << key;
        self.may_end = match self.may_end {
            MayEnd::Keys(others) => MayEnd::Keys(others | bit),
            _ => MayEnd::Keys(bit),
        };
        if let Some(record) = disk.records.get(&told) {
            let told_record = ReportRecord {
                slot: SlotId(0),
                state: ReportState::Ready,
                epoch: told.1,
                id: told.0,
                tenant: TenantIx(record.tenant.into()),
                key: &record.key,
                object_len: record.object_len,
                stripe: record.stripe,
                root: record.root,
                extent: record.extent,
                payload_offset: 0,
                digestless: false,
                one_sided: record.one_sided,
                touched: false,
                pin: record.pin,
                expires: record.expires,
                cohort: record.cohort.as_deref(),
                parent: record.parent.as_deref(),
            };
            let answer = self.group.disk_notice(self.now, name, (&told_record, 16), found, &mut self.effects);
            ensure!(answer.is_ok(), "a notice was refused with {answer:?}");
            mount.told.insert(told);
        }
        answers.extend(order.map(|order| (order, OrderOutcome::Done)));
        Ok(())
    }

    /// A disk is full: something leaves it, which the master hears first.
    pub(crate) fn evict_from_disk(&mut self, node: usize, which: u8) -> Check {
        let Some(session) = self.nodes[node].session else { return Ok(()) };
        let NodeModel { id: node_id, disk: Some(disk), .. } = &mut self.nodes[node] else { return Ok(()) };
        let (false, Some(mount)) = (disk.records.is_empty(), &mut disk.mount) else { return Ok(()) };
        let name = *disk.records.keys().nth(usize::from(which) % disk.records.len()).expect("not empty");
        // What was not told yet is not told any more.
        mount.to_tell.retain(|&other| other != name);
        let mut unanswered = vec![];
        disk.notices.retain(|&(other, order)| {
            unanswered.extend(order.filter(|_| other == name));
            other != name
        });
        disk.records.remove(&name);
        mount.told.remove(&name);
        let key = name.0.0[0] - 1;
        self.may_end = MayEnd::Keys(1 << key);
        let said = (*node_id, session);
        let answer = self.group.disk_evicted(self.now, said, name.0, name.1, &mut self.effects);
        ensure!(answer.is_ok(), "an eviction was refused with {answer:?}");
        self.nodes[node].answers.extend(unanswered.into_iter().map(|order| (order, OrderOutcome::Done)));
        Ok(())
    }

    pub(crate) fn disk_status(&mut self, node: usize, takes: bool) {
        let Some(session) = self.nodes[node].session else { return };
        let NodeModel { id, disk: Some(disk), .. } = &mut self.nodes[node] else { return };
        if let Some(mount) = &mut disk.mount {
            mount.takes = takes;
            self.group.disk_status(*id, session, takes);
        }
    }

    /// The node's process ends: its memory is gone, its disk is not.
    pub(crate) fn crash_node(&mut self, node: usize) {
        let away = self.group.config().absence_max;
        let node = &mut self.nodes[node];
        let Some(session) = node.session else { return };
        self.group.node_lost(self.now, node.id, session, &mut self.effects);
        node.disconnect(self.now.mono.after(away));
        node.segments.iter_mut().for_each(|segment| segment.wipe());
        node.disk.iter_mut().for_each(DiskModel::crash);
    }

    pub(crate) fn prefetch(&mut self, key: u8) -> Check {
        let bytes = key_of(key);
        let ask = Ask { id: id_of(key), key: Key::new(&bytes).unwrap() };
        let there = self.group.query(self.now, &ask).is_some_and(|detail| !detail.writing);
        let answer = self.group.prefetch(self.now, &ask);
        ensure!(answer.is_ok() == there, "a prefetch was answered with {answer:?}");
        Ok(())
    }

    pub(crate) fn take_disk_order(&mut self, node: usize, order: Order) -> Check {
        let disk = self.nodes[node].disk.as_mut().ok_or_else(|| format!("{order:?} without a disk"))?;
        let mount = disk.mount.as_mut().ok_or_else(|| format!("{order:?} for a disk that is away"))?;
        if order.segment == SegmentId::DISK {
            mount.ordered.insert((order.id, order.epoch));
        } else if order.kind == OrderKind::Offload {
            ensure!(mount.recovered, "{order:?} for a disk that has not told all");
        } else if let OrderKind::Promote { stripe, extent } = order.kind {
            ensure!(mount.told.contains(&(order.id, order.epoch, stripe)), "{order:?} of what is not there");
            let place = PlaceView {
                node: self.nodes[node].id,
                segment: order.segment,
                generation: order.generation,
                slot: order.slot,
                extent,
                medium: moontide_meta::Medium::Memory,
                stripe: StripeView { index: stripe, count: 1, offset: 0, len: 0 },
                root: 0,
                replica: 0,
                verify: false,
            };
            crate::check::may_be_given(self, &place)?;
            self.forget_earlier_lives(node, &order);
        }
        self.nodes[node].orders.push_back(order);
        Ok(())
    }

    /// A version that comes back may stand in a slot for the second time. Reports that answers have overtaken, and orders
    /// that they gave rise to, would be taken for this life of it; but what a node says of a slot it says in order.
    fn forget_earlier_lives(&mut self, node: usize, order: &Order) {
        let same = |other: &Order| (other.segment, other.slot) == (order.segment, order.slot);
        let node = &mut self.nodes[node];
        node.orders.retain(|other| !same(other));
        node.answers.retain(|(other, _)| !same(other));
        for segment in node.segments.iter_mut().filter(|segment| segment.id == order.segment) {
            if let Some(mount) = &mut segment.mount {
                mount.stream.retain(|change| change.slot != order.slot.0);
            }
        }
    }

    /// What a reader is told to be on disk is there.
    pub(crate) fn may_be_read_from_disk(&self, epoch: Epoch, id: ObjectId, place: &PlaceView) -> Check {
        let node = self.nodes.iter().find(|node| node.id == place.node).expect("nodes are known");
        let disk = node.disk.as_ref().ok_or("a place on a disk that nobody has")?;
        ensure!(disk.mount.is_some(), "{epoch}: {place:?} is away");
        let record = disk.records.get(&(id, epoch, place.stripe.index));
        let right = record.is_some_and(|record| (record.stripe, record.root) == (place.stripe, place.root));
        ensure!(right, "{epoch}: {place:?} is {record:?}");
        ensure!(place.extent == Extent::default(), "{epoch}: {place:?} has an extent");
        Ok(())
    }

    /// Whether the master knows that a stripe is on a disk within reach, and has not given it up.
    pub(crate) fn is_known_on_disk(&self, name: Name, audit: &Audit) -> bool {
        // While it is leased, no order says that it was given up.
        let drains = |node: NodeId| {
            audit.ranges.iter().any(|range| {
                range.draining
                    && (range.node, range.segment, range.id, range.epoch)
                        == (node, SegmentId::DISK, name.0, name.1)
            })
        };
        let disks = self.nodes.iter().filter_map(|node| Some((node.id, node.disk.as_ref()?)));
        disks.into_iter().any(|(node, disk)| {
            disk.records.contains_key(&name)
                && !drains(node)
                && disk.mount.as_ref().is_some_and(|mount| {
                    mount.told.contains(&name) && !mount.ordered.contains(&(name.0, name.1))
                })
        })
    }

    /// Objects of one stripe that an eviction must not lose: they are on disk, or their node's disk takes them.
    pub(crate) fn protected(&self) -> Vec<(u8, Epoch)> {
        let views: Vec<_> = self.group.segments().collect();
        let takes = |node: NodeId| {
            let disk = self.nodes.iter().find(|known| known.id == node).and_then(|known| known.disk.as_ref());
            let mount = disk.and_then(|disk| disk.mount.as_ref());
            mount.is_some_and(|mount| mount.recovered && mount.takes)
        };
        let safe = |place: &PlaceView| {
            let is_place =
                |view: &&moontide_meta::SegmentView| (view.node, view.segment) == (place.node, place.segment);
            let drains = views
                .iter()
                .find(is_place)
                .is_none_or(|view| view.phase == moontide_meta::SegmentPhase::Draining);
            !drains && takes(place.node)
        };
        let mut protected = vec![];
        for key in 0..KEYS {
            let bytes = key_of(key);
            let ask = Ask { id: id_of(key), key: Key::new(&bytes).unwrap() };
            let Some(detail) = self.group.query(self.now, &ask).filter(|detail| !detail.writing) else {
                continue;
            };
            if detail.places.iter().all(|place| place.stripe.count == 1) && detail.places.iter().any(safe) {
                protected.push((key, detail.epoch));
            }
        }
        protected
    }

    /// What was protected is still there.
    pub(crate) fn nothing_lost(&self, protected: &[(u8, Epoch)]) -> Check {
        for &(key, epoch) in protected {
            let bytes = key_of(key);
            let ask = Ask { id: id_of(key), key: Key::new(&bytes).unwrap() };
            let there = self
                .group
                .query(self.now, &ask)
                .is_some_and(|detail| detail.epoch == epoch && !detail.writing);
            ensure!(there, "{epoch} of key {key} was lost although its node has a disk");
        }
        Ok(())
    }
}

impl crate::node::SegmentModel {
    /// FREE(e) → READY(version), whatever the order of the two: e is the slot's epoch again when it is free.
    fn copy_in(&mut self, slot: u32, version: Epoch, record: RecordModel) {
        let floor = self.words[slot as usize].epoch;
        let state = ReportState::Ready;
        self.words[slot as usize] =
            Word { epoch: version, state, record: Some(record), floor, is_copy: true, ..Word::new() };
    }
}
