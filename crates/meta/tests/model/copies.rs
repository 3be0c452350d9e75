//! Copies of records between nodes: what the nodes do, and what the group must make of it.

use moontide_meta::{
    CommandKind, CommandOutcome, CopySource, LookupKey, NodeCommand, RemoteReads, ReportState,
    StripeLocation, StripeRange,
};
use moontide_types::{ErrorCode, Extent, Key, Medium, NodeId, SegmentId, SlotId};

use crate::harness::{Check, ModelHarness, ensure, id_of, key_of};
use crate::node::RecordModel;

impl ModelHarness {
    /// Makes the next copy into a slot of a node. Returns whether there was one.
    pub(crate) fn copy_next(&mut self, node: usize) -> Result<bool, String> {
        let Some(command) = self.nodes[node].copies.pop_front() else { return Ok(false) };
        let CommandKind::Copy { stripe, extent, source, .. } = command.kind else {
            unreachable!("queue contains only copies")
        };
        let record = self.source_record(&command, source, stripe);
        if let Some(record) = &record {
            ensure!(record.root == source.root, "{command:?} has the wrong root: {:x}", record.root);
            ensure!(record.extent.units == extent.units, "{command:?} has the wrong size: {record:?}");
        }
        let node = &mut self.nodes[node];
        let target = node.segments.iter_mut().find(|segment| {
            (segment.id, segment.generation) == (command.segment, command.generation)
                && segment.words[command.slot.0 as usize].is_free()
        });
        let outcome = match (record, target) {
            (Some(record), Some(target)) => {
                target.copy_in(command.slot.0, command.epoch, RecordModel { extent, ..record });
                CommandOutcome::Done
            }
            _ => CommandOutcome::Refused(ErrorCode::Gone),
        };
        node.responses.push_back((command, outcome));
        Ok(true)
    }

    /// Returns the record of a source, if it is still there.
    fn source_record(&self, command: &NodeCommand, source: CopySource, stripe: u16) -> Option<RecordModel> {
        let node = self.nodes.iter().find(|node| node.id == source.node)?;
        if source.segment == SegmentId::DISK {
            return node.disk.as_ref()?.records.get(&(command.id, command.epoch, stripe)).cloned();
        }
        let segment = node.segments.iter().find(|segment| segment.id == source.segment)?;
        let word = &segment.words[source.slot.0 as usize];
        let is_there = segment.generation == source.generation
            && (word.epoch, word.state) == (command.epoch, ReportState::Ready);
        word.record
            .clone()
            .filter(|record| is_there && (record.id, record.stripe.index) == (command.id, stripe))
    }

    /// Checks a Copy command: the slot may be used, and the source is a location that readers get, too.
    pub(crate) fn take_copy(
        &mut self,
        node: usize,
        command: NodeCommand,
        stripe: u16,
        extent: Extent,
    ) -> Check {
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
        // An earlier copy of the version into this slot was refused, and the slot is free again.
        let segment = self.nodes[node].segments.iter_mut().find(|segment| segment.id == command.segment);
        if let Some(mount) = segment.and_then(|segment| segment.mount.as_mut()) {
            mount.commanded.remove(&(command.slot.0, command.epoch));
        }
        self.nodes[node].commands.push_back(command);
        Ok(())
    }

    /// Whether the group must make the slot of a copy a location of its object: the copy is done, neither the object nor the
    /// copy was removed in the meantime, and no other segment of the node has the object.
    pub(crate) fn copy_adds_location(
        &self,
        node: usize,
        command: &NodeCommand,
        outcome: CommandOutcome,
    ) -> bool {
        let CommandKind::Copy { stripe, source, purpose, .. } = command.kind else { return false };
        let segment = self.nodes[node].segments.iter().find(|segment| segment.id == command.segment);
        let is_killed = segment
            .and_then(|segment| segment.mount.as_ref())
            .is_none_or(|mount| mount.commanded.contains(&(command.slot.0, command.epoch)));
        // Another segment of the node has reported the stripe in the meantime, and the group needs no second one there.
        let is_there = self.finds(command).into_iter().flatten().any(|found| {
            let is_source =
                (found.node, found.segment, found.slot) == (source.node, source.segment, source.slot);
            let is_replaced = is_source && purpose.is_move();
            found.node == self.nodes[node].id
                && found.medium == Medium::Memory
                && found.stripe.index == stripe
                && !is_replaced
        });
        outcome == CommandOutcome::Done && !is_killed && !is_there
    }

    /// A host reads much of an object: the group may copy it to the node there.
    pub(crate) fn remote_reads(&mut self, key: u8, reader: u8) {
        let bytes = key_of(key);
        let lookup = LookupKey { id: id_of(key), key: Key::new(&bytes).unwrap() };
        let Some(detail) = self.group.query(self.now, &lookup) else { return };
        let Some(location) = detail.locations.iter().find(|location| location.medium == Medium::Memory)
        else {
            return;
        };
        let reads = RemoteReads {
            segment: location.segment,
            generation: location.generation,
            slot: location.slot,
            epoch: detail.epoch,
            reader: self.nodes[usize::from(reader) % self.nodes.len()].id,
            bytes: 1 << 30,
        };
        let node = location.node;
        self.group.remote_reads(self.now, node, &reads, &mut self.effects);
    }

    pub(crate) fn finds(&self, command: &NodeCommand) -> Option<Vec<StripeLocation>> {
        let bytes = key_of(command.id.0[0] - 1);
        let lookup = LookupKey { id: command.id, key: Key::new(&bytes).unwrap() };
        let detail = self.group.query(self.now, &lookup)?;
        (detail.epoch == command.epoch && !detail.writing).then_some(detail.locations)
    }

    /// Checks that a copy is a location of its object now, and that the source of a move is not.
    pub(crate) fn copy_added_location(&mut self, node: usize, command: &NodeCommand) -> Check {
        let CommandKind::Copy { source, purpose, .. } = command.kind else {
            unreachable!("only called for copies")
        };
        // Not found while another stripe is lost: its node may return with it.
        let found = self.finds(command);
        let at = |name: (NodeId, SegmentId, SlotId)| {
            found.iter().flatten().copied().find(|found| (found.node, found.segment, found.slot) == name)
        };
        let target = at((self.nodes[node].id, command.segment, command.slot));
        ensure!(target.is_some() || found.is_none(), "{command:?} is done, and not a location: {found:?}");
        if source.medium == Medium::Memory && purpose.is_move() {
            let left = at((source.node, source.segment, source.slot));
            ensure!(left.is_none(), "source of {command:?} is still a location");
            let from = self.nodes.iter().position(|node| node.id == source.node).expect("node exists");
            self.replaced_by_copy.insert((from, source.segment, source.slot.0, command.epoch));
        }
        let segment = self.nodes[node].segments.iter_mut().find(|segment| segment.id == command.segment);
        let mount = segment.and_then(|segment| segment.mount.as_mut()).expect("copy_adds_location found it");
        // Without a view of it, the object may be gone: then the group frees the copy.
        if target.is_some() {
            mount.known_ready.insert(command.slot.0, command.epoch);
        }
        let number = mount.number;
        // From now on, the object must be found at the new location: in place of the source, or of a lost one.
        let is_found = |name: (NodeId, SegmentId, SlotId)| {
            found.iter().flatten().any(|found| (found.node, found.segment, found.slot) == name)
        };
        let CommandKind::Copy { stripe, .. } = command.kind else { unreachable!("checked above") };
        let is_replaced = |location: &StripeLocation| {
            let name = (location.node, location.segment, location.slot);
            match purpose.is_move() {
                true => name == (source.node, source.segment, source.slot),
                false => location.stripe.index == stripe && !is_found(name),
            }
        };
        for put in self.puts.iter_mut().filter(|put| put.epoch == command.epoch) {
            put.seen = true; // only complete objects are copied
            if let Some(index) = put.locations.iter().position(is_replaced) {
                let source = put.locations[index];
                let CommandKind::Copy { extent, .. } = command.kind else { continue };
                put.locations[index] = target.unwrap_or(StripeLocation {
                    node: self.nodes[node].id,
                    segment: command.segment,
                    generation: command.generation,
                    slot: command.slot,
                    extent,
                    ..source
                });
                // Known to the master without a report.
                put.mounts[index] = number;
            }
        }
        Ok(())
    }
}
