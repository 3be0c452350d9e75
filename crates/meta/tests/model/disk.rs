//! [`DiskModel`]: a simple model of a node's disk: records and tombstones, which survive the node's process, and
//! operations in progress, which do not.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use moontide_meta::{
    Audit, CommandKind, CommandOutcome, DiskSpec, LookupKey, NodeCommand, ReportRecord, ReportState,
    StripeLocation, StripeRange, TenantIndex, TickBudget,
};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, Key, Medium, NodeId, ObjectId, SegmentId, SlotId,
};

use crate::harness::{Check, KEYS, MayEnd, ModelHarness, ensure, id_of, key_of, rack_of};
use crate::node::{NodeModel, RecordModel, Word};

/// Object, version and stripe.
pub(crate) type Name = (ObjectId, Epoch, u16);

/// A write in progress, with the command to respond to afterwards if its session still exists.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) name: Name,
    record: RecordModel,
    from: (SegmentId, u32),
    command: Option<NodeCommand>,
}

/// State of the disk's mount at the current master in the current session.
#[derive(Clone, Debug, Default)]
pub(crate) struct DiskMount {
    unreported: VecDeque<Name>,
    pub(crate) recovered: bool,
    pub(crate) accepts: bool,
    pub(crate) reported: BTreeSet<Name>,
    /// Versions that the master has commanded to drop.
    pub(crate) commanded: BTreeSet<(ObjectId, Epoch)>,
}

/// A disk.
#[derive(Clone, Debug, Default)]
pub(crate) struct DiskModel {
    pub(crate) records: BTreeMap<Name, RecordModel>,
    tombstones: BTreeSet<(ObjectId, Epoch)>,
    pub(crate) mount: Option<DiskMount>,
    pub(crate) writes: VecDeque<Write>,
    notices: VecDeque<(Name, Option<NodeCommand>)>,
    promotions: VecDeque<NodeCommand>,
}

impl DiskModel {
    /// Whether the disk has a version, or will have it.
    pub(crate) fn may_have(&self, epoch: Epoch) -> bool {
        let exists = self.records.keys().any(|&(_, of, _)| of == epoch);
        let will_have = |write: &Write| {
            let (id, of, _) = write.name;
            of == epoch && !self.tombstones.contains(&(id, of))
        };
        exists || self.writes.iter().any(will_have)
    }

    /// Removes a version and keeps a tombstone that also stops writes in progress.
    fn add_tombstone(&mut self, id: ObjectId, epoch: Epoch) {
        self.tombstones.insert((id, epoch));
        self.records.retain(|&(of, version, _), _| (of, version) != (id, epoch));
    }

    fn has_or_writes(&self, id: ObjectId, epoch: Epoch) -> bool {
        self.records
            .keys()
            .chain(self.writes.iter().map(|write| &write.name))
            .any(|name| (name.0, name.1) == (id, epoch))
    }

    /// Ends the session. Writes continue; promotions do not.
    pub(crate) fn disconnect(&mut self) {
        self.mount = None;
        self.notices.clear();
        self.promotions.clear();
        self.writes.iter_mut().for_each(|write| write.command = None);
    }

    /// Ends the process.
    pub(crate) fn crash(&mut self) {
        self.disconnect();
        self.writes.clear();
    }
}

impl NodeModel {
    /// Executes a command that concerns the disk. Returns `false` if it concerns only a memory slot.
    pub(crate) fn execute_on_disk(&mut self, command: NodeCommand, refuse: bool) -> bool {
        let refused = |code| CommandOutcome::Refused(code);
        let Some(disk) = &mut self.disk else {
            assert!(
                command.segment != SegmentId::DISK
                    && matches!(command.kind, CommandKind::Kill | CommandKind::Reclaim)
            );
            return false;
        };
        let at = self.segments.iter().position(|segment| segment.id == command.segment);
        match command.kind {
            CommandKind::Kill | CommandKind::Reclaim if command.segment == SegmentId::DISK => {
                disk.add_tombstone(command.id, command.epoch);
                self.responses.push_back((command, CommandOutcome::Done));
                return true;
            }
            CommandKind::Kill | CommandKind::Reclaim => {
                let same = |promotion: &NodeCommand| {
                    (promotion.segment, promotion.slot) == (command.segment, command.slot)
                };
                if let Some(index) = disk.promotions.iter().position(same) {
                    let promotion = disk.promotions.remove(index).expect("position was found above");
                    self.responses.push_back((promotion, refused(ErrorCode::Gone)));
                }
                if command.kind == CommandKind::Kill && disk.has_or_writes(command.id, command.epoch) {
                    disk.add_tombstone(command.id, command.epoch);
                }
                return false;
            }
            CommandKind::Offload => {
                let segment = &mut self.segments[at.expect("segment exists")];
                let word = &mut segment.words[command.slot.0 as usize];
                let is_ready = segment.generation == command.generation
                    && (word.epoch, word.state) == (command.epoch, ReportState::Ready);
                let removed = disk.tombstones.contains(&(command.id, command.epoch));
                if refuse || !is_ready || removed || disk.mount.is_none() {
                    self.responses.push_back((command, refused(ErrorCode::Busy)));
                    return true;
                }
                word.pinned = true;
                let record = word.record.clone().expect("READY slot has a record");
                let name = (command.id, command.epoch, record.stripe.index);
                let from = (command.segment, command.slot.0);
                disk.writes.push_back(Write { name, record, from, command: Some(command) });
            }
            CommandKind::Promote { stripe, .. } => {
                let exists = disk.records.contains_key(&(command.id, command.epoch, stripe));
                let segment = &self.segments[at.expect("segment exists")];
                if refuse || !exists || segment.generation != command.generation {
                    self.responses.push_back((command, refused(ErrorCode::NotFound)));
                } else {
                    disk.promotions.push_back(command);
                }
            }
            CommandKind::Copy { .. } => unreachable!("handled by the node"),
        }
        true
    }

    /// Completes the next write: the record is durable.
    pub(crate) fn write_next(&mut self) -> bool {
        let Some(disk) = &mut self.disk else { return false };
        let Some(write) = disk.writes.pop_front() else { return false };
        let (id, epoch, _) = write.name;
        if disk.tombstones.contains(&(id, epoch)) {
            let gone = CommandOutcome::Refused(ErrorCode::Gone);
            self.responses.extend(write.command.map(|command| (command, gone)));
        } else {
            disk.records.insert(write.name, write.record);
            match &mut disk.mount {
                Some(mount) if !mount.recovered && write.command.is_none() => {
                    mount.unreported.push_back(write.name);
                }
                Some(_) => disk.notices.push_back((write.name, write.command)),
                None => {}
            }
        }
        let others = disk.writes.iter().any(|other| other.from == write.from);
        let segment =
            self.segments.iter_mut().find(|segment| segment.id == write.from.0).expect("segment exists");
        segment.unpin(write.from.1, epoch, others, &mut self.responses);
        true
    }

    /// Completes the next promotion: the slot is READY.
    pub(crate) fn promote_next(&mut self) -> bool {
        let Some(disk) = &mut self.disk else { return false };
        let Some(command) = disk.promotions.pop_front() else { return false };
        let CommandKind::Promote { stripe, extent } = command.kind else {
            unreachable!("queue contains only promotions")
        };
        let segment =
            self.segments.iter_mut().find(|segment| segment.id == command.segment).expect("segment exists");
        let record = disk.records.get(&(command.id, command.epoch, stripe));
        let outcome = match record {
            Some(record)
                if segment.words[command.slot.0 as usize].is_free()
                    && segment.generation == command.generation =>
            {
                segment.copy_in(command.slot.0, command.epoch, RecordModel { extent, ..record.clone() });
                CommandOutcome::Done
            }
            _ => CommandOutcome::Refused(ErrorCode::Gone),
        };
        self.responses.push_back((command, outcome));
        true
    }
}

impl ModelHarness {
    pub(crate) fn mount_disk(&mut self, node: usize) {
        let Some(session) = self.nodes[node].session else { return };
        let synced = self.nodes[node].sync_mark(self.now.mono);
        let NodeModel { id, disk: Some(disk), .. } = &mut self.nodes[node] else { return };
        if disk.mount.is_some() {
            return;
        }
        let unreported: VecDeque<Name> = disk.records.keys().copied().collect();
        // Writes of an earlier session may still add records: the inventory ends after them.
        let occupied = !unreported.is_empty() || !disk.writes.is_empty();
        disk.mount =
            Some(DiskMount { unreported, recovered: !occupied, accepts: true, ..DiskMount::default() });
        let spec = DiskSpec {
            node: *id,
            session,
            generation: Generation(1),
            labels: ["", rack_of(*id), "zone"],
            occupied,
            synced,
        };
        self.group.mount_disk(self.now, &spec, &mut self.effects);
    }

    /// Sends the next notice about a disk: of a record found after a start, or of a written one.
    pub(crate) fn send_disk_notice(&mut self, node: usize, found: bool) -> Check {
        let Some(session) = self.nodes[node].session else { return Ok(()) };
        let NodeModel { id: node_id, disk: Some(disk), responses, .. } = &mut self.nodes[node] else {
            return Ok(());
        };
        let node_session = (*node_id, session);
        let Some(mount) = &mut disk.mount else { return Ok(()) };
        let (name, command) = if found {
            match mount.unreported.pop_front() {
                Some(name) => (name, None),
                None if disk.writes.iter().any(|write| write.command.is_none()) => return Ok(()),
                None => {
                    mount.recovered = true;
                    let response = self.group.disk_recovered(node_session.0, node_session.1);
                    ensure!(response.is_ok(), "end of recovery refused with {response:?}");
                    return Ok(());
                }
            }
        } else {
            let Some(notice) = disk.notices.pop_front() else { return Ok(()) };
            notice
        };
        let key = name.0.0[0] - 1;
        let bit = 1 << key;
        self.may_end = match self.may_end {
            MayEnd::Keys(others) => MayEnd::Keys(others | bit),
            _ => MayEnd::Keys(bit),
        };
        if let Some(record) = disk.records.get(&name) {
            let notice = ReportRecord {
                slot: SlotId(0),
                state: ReportState::Ready,
                epoch: name.1,
                id: name.0,
                tenant: TenantIndex(record.tenant.into()),
                key: &record.key,
                object_len: record.object_len,
                stripe: record.stripe,
                root: record.root,
                extent: record.extent,
                payload_offset: 0,
                digestless: false,
                one_sided: record.one_sided,
                touched: found && key % 2 == 0,
                pin: record.pin,
                expires: record.expires,
                cohort: record.cohort.as_deref(),
                parent: record.parent.as_deref(),
                extra_replicas: record.extra_replicas,
                spread: record.spread,
                disk_replicas: record.disk_replicas,
            };
            let response =
                self.group.disk_notice(self.now, node_session, (&notice, 16), found, &mut self.effects);
            ensure!(response.is_ok(), "notice refused with {response:?}");
            mount.reported.insert(name);
        }
        responses.extend(command.map(|command| (command, CommandOutcome::Done)));
        Ok(())
    }

    /// Evicts a record from a full disk; the master is notified first.
    pub(crate) fn evict_from_disk(&mut self, node: usize, index: u8) -> Check {
        let Some(session) = self.nodes[node].session else { return Ok(()) };
        let NodeModel { id: node_id, disk: Some(disk), .. } = &mut self.nodes[node] else { return Ok(()) };
        let (false, Some(mount)) = (disk.records.is_empty(), &mut disk.mount) else { return Ok(()) };
        let name =
            *disk.records.keys().nth(usize::from(index) % disk.records.len()).expect("disk is not empty");
        // Notices of this record that were not sent yet are dropped.
        mount.unreported.retain(|&other| other != name);
        let mut pending = vec![];
        disk.notices.retain(|&(other, command)| {
            pending.extend(command.filter(|_| other == name));
            other != name
        });
        disk.records.remove(&name);
        mount.reported.remove(&name);
        let key = name.0.0[0] - 1;
        self.may_end = MayEnd::Keys(1 << key);
        let node_session = (*node_id, session);
        let response = self.group.disk_evicted(self.now, node_session, name.0, name.1, &mut self.effects);
        ensure!(response.is_ok(), "eviction refused with {response:?}");
        self.nodes[node].responses.extend(pending.into_iter().map(|command| (command, CommandOutcome::Done)));
        Ok(())
    }

    pub(crate) fn disk_status(&mut self, node: usize, accepts: bool) {
        let Some(session) = self.nodes[node].session else { return };
        let NodeModel { id, disk: Some(disk), .. } = &mut self.nodes[node] else { return };
        if let Some(mount) = &mut disk.mount {
            mount.accepts = accepts;
            self.group.disk_status(*id, session, accepts);
        }
    }

    /// A node announces that it is about to stop.
    pub(crate) fn flush(&mut self, node: usize) -> Check {
        let Some(session) = self.nodes[node].session else { return Ok(()) };
        let response = self.group.flush(self.nodes[node].id, session);
        ensure!(response.is_ok(), "flush refused with {response:?}");
        Ok(())
    }

    /// Flushes a node until nothing is left. Afterwards all of its objects that could be written are on a disk.
    pub(crate) fn flush_completely(&mut self, node: usize) -> Check {
        let Some(session) = self.nodes[node].session else { return Ok(()) };
        self.settle()?;
        // An object that left the disk after it was written in an earlier flush is not written again.
        let is_first = self.group.flush_progress(session).is_none();
        self.flush(node)?;
        let mut progress = None;
        for _ in 0..4 {
            self.may_end = MayEnd::Any;
            while self.group.tick(self.now, &TickBudget::default(), &mut self.effects) {}
            self.take_effects()?;
            self.settle()?;
            progress = self.group.flush_progress(session);
        }
        let progress = progress.ok_or("a flush in a live session has no progress")?;
        let is_empty = progress.objects == 0 && progress.bytes == 0;
        ensure!(is_empty || !is_first, "flush does not end: {progress:?}");
        let accepts = |id: NodeId| {
            let disk = self.nodes.iter().find(|other| other.id == id).and_then(|node| node.disk.as_ref());
            disk.and_then(|disk| disk.mount.as_ref()).is_some_and(|mount| mount.recovered && mount.accepts)
        };
        let is_complete = is_first && progress.refused == 0 && accepts(self.nodes[node].id);
        for key in (0..KEYS).filter(|_| is_complete) {
            let bytes = key_of(key);
            let lookup = LookupKey { id: id_of(key), key: Key::new(&bytes).unwrap() };
            let Some(detail) = self.group.query(self.now, &lookup).filter(|detail| !detail.writing) else {
                continue;
            };
            let is_on = |medium: Medium| {
                let at = move |location: &&StripeLocation| location.medium == medium;
                detail.locations.iter().filter(at).map(|location| location.node)
            };
            let is_here = is_on(Medium::Memory).any(|id| id == self.nodes[node].id);
            ensure!(
                !is_here || is_on(Medium::Disk).next().is_some(),
                "{} of key {key} is not on a disk after a flush",
                detail.epoch
            );
        }
        Ok(())
    }

    /// Ends a node's process: its memory is gone, its disk is not.
    pub(crate) fn crash_node(&mut self, node: usize) {
        let rejoin_window = self.group.config().rejoin_window;
        let node = &mut self.nodes[node];
        let Some(session) = node.session else { return };
        self.group.node_lost(self.now, node.id, session, &mut self.effects);
        node.disconnect(self.now.mono.after(rejoin_window));
        node.segments.iter_mut().for_each(|segment| segment.wipe());
        node.disk.iter_mut().for_each(DiskModel::crash);
    }

    pub(crate) fn prefetch(&mut self, key: u8) -> Check {
        let bytes = key_of(key);
        let lookup = LookupKey { id: id_of(key), key: Key::new(&bytes).unwrap() };
        let exists = self.group.query(self.now, &lookup).is_some_and(|detail| !detail.writing);
        let response = self.group.prefetch(self.now, &lookup);
        ensure!(response.is_ok() == exists, "response to a prefetch: {response:?}");
        Ok(())
    }

    pub(crate) fn take_disk_command(&mut self, node: usize, command: NodeCommand) -> Check {
        let disk =
            self.nodes[node].disk.as_mut().ok_or_else(|| format!("{command:?} for a node without disk"))?;
        let mount = disk.mount.as_mut().ok_or_else(|| format!("{command:?} for an unmounted disk"))?;
        if command.segment == SegmentId::DISK {
            mount.commanded.insert((command.id, command.epoch));
        } else if command.kind == CommandKind::Offload {
            ensure!(mount.recovered, "{command:?} for a disk that is still reporting");
        } else if let CommandKind::Promote { stripe, extent } = command.kind {
            ensure!(
                mount.reported.contains(&(command.id, command.epoch, stripe)),
                "{command:?} of a record that was not reported"
            );
            let location = StripeLocation {
                node: self.nodes[node].id,
                segment: command.segment,
                generation: command.generation,
                slot: command.slot,
                extent,
                medium: Medium::Memory,
                stripe: StripeRange { index: stripe, count: 1, offset: 0, len: 0 },
                root: 0,
                replica: 0,
                verify: false,
            };
            crate::check::may_be_granted(self, &location)?;
            self.drop_earlier_messages(node, &command);
        }
        self.nodes[node].commands.push_back(command);
        Ok(())
    }

    /// A promoted or copied version may be in a slot for the second time. Earlier reports that were overtaken by
    /// responses, and commands that resulted from them, would be applied to the new copy; but a real node sends messages
    /// about a slot in order.
    pub(crate) fn drop_earlier_messages(&mut self, node: usize, command: &NodeCommand) {
        let same = |other: &NodeCommand| (other.segment, other.slot) == (command.segment, command.slot);
        let node = &mut self.nodes[node];
        node.commands.retain(|other| !same(other));
        node.responses.retain(|(other, _)| !same(other));
        for segment in node.segments.iter_mut().filter(|segment| segment.id == command.segment) {
            if let Some(mount) = &mut segment.mount {
                mount.stream.retain(|change| change.slot != command.slot.0);
            }
        }
    }

    /// Checks that a record listed on a disk exists there.
    pub(crate) fn may_be_read_from_disk(
        &self,
        epoch: Epoch,
        id: ObjectId,
        location: &StripeLocation,
    ) -> Check {
        let node = self.nodes.iter().find(|node| node.id == location.node).expect("node exists");
        let disk = node.disk.as_ref().ok_or("location on a node without disk")?;
        ensure!(disk.mount.is_some(), "{epoch}: {location:?} is not mounted");
        let record = disk.records.get(&(id, epoch, location.stripe.index));
        let matches =
            record.is_some_and(|record| (record.stripe, record.root) == (location.stripe, location.root));
        ensure!(matches, "{epoch}: {location:?} is {record:?}");
        ensure!(location.extent == Extent::default(), "{epoch}: {location:?} has an extent");
        Ok(())
    }

    /// Whether the master knows that a stripe is on a reachable disk, and has not released it.
    pub(crate) fn master_knows_on_disk(&self, name: Name, audit: &Audit) -> bool {
        // A leased location drains without a command.
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
                    mount.reported.contains(&name) && !mount.commanded.contains(&(name.0, name.1))
                })
        })
    }

    /// Returns objects of one stripe that an eviction must not lose: they are on disk, or their node's disk accepts
    /// them.
    pub(crate) fn protected(&self) -> Vec<(u8, Epoch)> {
        let views: Vec<_> = self.group.segments().collect();
        let accepts = |node: NodeId| {
            let disk = self.nodes.iter().find(|other| other.id == node).and_then(|node| node.disk.as_ref());
            let mount = disk.and_then(|disk| disk.mount.as_ref());
            mount.is_some_and(|mount| mount.recovered && mount.accepts)
        };
        let safe = |location: &StripeLocation| {
            let is_segment = |view: &&moontide_meta::SegmentView| {
                (view.node, view.segment) == (location.node, location.segment)
            };
            // The segment of an earlier session of the node may still be listed, under the same name.
            let mut phases = views.iter().filter(is_segment).map(|view| view.phase).peekable();
            let drains =
                phases.peek().is_none() || phases.any(|phase| phase == moontide_meta::SegmentPhase::Draining);
            !drains && accepts(location.node)
        };
        let mut protected = vec![];
        for key in 0..KEYS {
            let bytes = key_of(key);
            let lookup = LookupKey { id: id_of(key), key: Key::new(&bytes).unwrap() };
            let Some(detail) = self.group.query(self.now, &lookup).filter(|detail| !detail.writing) else {
                continue;
            };
            if detail.locations.iter().all(|location| location.stripe.count == 1)
                && detail.locations.iter().any(safe)
            {
                protected.push((key, detail.epoch));
            }
        }
        protected
    }

    /// Checks that the protected objects still exist.
    pub(crate) fn nothing_lost(&self, protected: &[(u8, Epoch)]) -> Check {
        for &(key, epoch) in protected {
            let bytes = key_of(key);
            let lookup = LookupKey { id: id_of(key), key: Key::new(&bytes).unwrap() };
            let exists = self
                .group
                .query(self.now, &lookup)
                .is_some_and(|detail| detail.epoch == epoch && !detail.writing);
            ensure!(exists, "{epoch} of key {key} lost although its node has a disk");
        }
        Ok(())
    }
}

impl crate::node::SegmentModel {
    /// FREE(e) → READY(version), in any order of the two epochs: the slot's epoch is e again when it is free.
    pub(crate) fn copy_in(&mut self, slot: u32, version: Epoch, record: RecordModel) {
        let epoch_before_copy = self.words[slot as usize].epoch;
        let state = ReportState::Ready;
        self.words[slot as usize] = Word {
            epoch: version,
            state,
            record: Some(record),
            epoch_before_copy,
            is_copy: true,
            ..Word::new()
        };
    }
}
