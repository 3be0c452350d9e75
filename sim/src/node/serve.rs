//! What peers ask of a node: begin, write, commit, read.

use moontide_disk::RecordId;
use moontide_heap::{Grant, PayloadWriter, RecordSpec};
use moontide_node::logic::report::{ReportedRecord, SlotChange};
use moontide_proto::convert::AttributeSection;
use moontide_proto::{CommitEntry, Handle, ObjectEntry, ReportFlags, ReportRecord};
use moontide_types::record::{Attributes, KeySection, RecordFlags, State, Word};
use moontide_types::{Epoch, ErrorCode, Key, Medium, ObjectId, Tenant};

use super::{Node, NodeEvent};
use crate::client::key_bytes;
use crate::context::ProcessContext;
use crate::event::{NodeOp, NodeReply, Payload};
use crate::oracle::pattern;

impl Node {
    pub(super) fn serve(&mut self, ask: NodeOp, cx: &mut ProcessContext<'_>) -> NodeReply {
        let reply = match ask {
            NodeOp::Begin { object, handle, key, attributes } => {
                self.begin(&object, &handle, key, &attributes, cx).map(|()| NodeReply::Done)
            }
            NodeOp::Write { object, handle, token } => self.write(&object, &handle, token),
            NodeOp::Commit(entry) => self.commit(&entry, cx).map(|()| NodeReply::Done),
            NodeOp::Read { .. } if self.is_stale(cx.now()) => Err(ErrorCode::StaleSession),
            NodeOp::Read { id, epoch, handle } if handle.medium == Medium::Disk => {
                let name = RecordId { id, version: epoch, stripe: handle.stripe_index };
                let bytes = self.disk.as_ref().and_then(|disk| disk.read(&name)).ok_or(ErrorCode::Gone);
                bytes.map(|bytes| {
                    cx.oracle.tally.from_disk += 1;
                    NodeReply::Bytes(Payload(bytes))
                })
            }
            NodeOp::Read { id, epoch, handle } => self.read(id, epoch, &handle),
        };
        reply.unwrap_or_else(NodeReply::Refused)
    }

    fn begin(
        &mut self,
        object: &ObjectEntry,
        handle: &Handle,
        key: usize,
        attributes: &[u8],
        cx: &mut ProcessContext<'_>,
    ) -> Result<(), ErrorCode> {
        let node_segment = self.memory.node_segment(handle.segment).ok_or(ErrorCode::StaleGeneration)?;
        if handle.node != self.id || handle.generation != node_segment.segment.shape().generation {
            return Err(ErrorCode::StaleGeneration);
        }
        if node_segment.closed {
            return Err(ErrorCode::StaleEpoch);
        }
        let name = key_bytes(key);
        let key = KeySection { tenant: Tenant::DEFAULT, key: Key::new(&name).expect("short") };
        let section = AttributeSection::new(attributes);
        let decoded = section.map_or_else(|_| Attributes::default(), AttributeSection::decode);
        let record = RecordSpec {
            id: object.id,
            flags: RecordFlags::NONE,
            object_len: object.object_len,
            stripe_index: handle.stripe_index,
            stripe_count: handle.stripe_count,
            stripe_offset: handle.stripe_offset,
            stripe_len: handle.stripe_len,
            key,
            attributes: &decoded,
            id_key: object.id_key,
            tenant_generation: object.tenant_generation,
        };
        let (slot, epoch, writer) = (handle.slot, object.epoch, PayloadWriter::Node);
        let grant = Grant { slot, epoch, term: handle.term, extent: handle.extent, record, writer };
        self.memory.heap.begin(handle.segment, &grant).map_err(|error| error.code())?;
        let units = Some(handle.extent.units);
        self.memory.note(handle.segment, slot, epoch, State::Writing, units);
        if cx.now() < self.tell_until {
            let reported = ReportedRecord {
                record: begun_record(object, handle),
                tenant: Tenant::DEFAULT.as_str().into(),
                key: name.into(),
                attributes: attributes.into(),
            };
            let change = SlotChange::Begun(handle.segment, Box::new(reported));
            self.send_event(NodeEvent::Change(change), cx);
        }
        Ok(())
    }

    fn write(&mut self, object: &ObjectEntry, handle: &Handle, token: u64) -> Result<NodeReply, ErrorCode> {
        self.check_generation(handle.segment, handle.generation)?;
        let claim = self.memory.heap.claim(handle.segment, handle.slot, object.epoch);
        let mut claim = claim.ok_or(ErrorCode::StaleEpoch)?;
        let root = claim.fill(&pattern(token, handle.stripe_len));
        Ok(NodeReply::Written { root })
    }

    fn commit(&mut self, entry: &CommitEntry, cx: &mut ProcessContext<'_>) -> Result<(), ErrorCode> {
        self.check_generation(entry.segment, entry.generation)?;
        let CommitEntry { segment, slot, epoch, root, .. } = *entry;
        self.memory.heap.publish(segment, slot, epoch, root).map_err(|error| error.code())?;
        self.memory.note(segment, slot, epoch, State::Ready, None);
        if cx.now() < self.tell_until {
            let change = SlotChange::Committed { segment, slot, epoch, root };
            self.send_event(NodeEvent::Change(change), cx);
        }
        Ok(())
    }

    fn check_generation(
        &self,
        segment: moontide_types::SegmentId,
        generation: moontide_types::Generation,
    ) -> Result<(), ErrorCode> {
        let node_segment = self.memory.node_segment(segment).ok_or(ErrorCode::StaleGeneration)?;
        let same = node_segment.segment.shape().generation == generation;
        if same { Ok(()) } else { Err(ErrorCode::StaleGeneration) }
    }

    fn read(&mut self, id: ObjectId, epoch: Epoch, handle: &Handle) -> Result<NodeReply, ErrorCode> {
        self.check_generation(handle.segment, handle.generation)?;
        self.memory.touch(handle.segment, handle.slot);
        let pin = self.memory.heap.pin(handle.segment, handle.slot, epoch).ok_or(ErrorCode::Gone)?;
        if pin.header().id != id {
            return Err(ErrorCode::Gone);
        }
        Ok(NodeReply::Bytes(Payload(pin.payload().to_vec())))
    }
}

fn begun_record(object: &ObjectEntry, handle: &Handle) -> ReportRecord {
    ReportRecord {
        slot: handle.slot,
        tenant: 0,
        flags: ReportFlags::NONE,
        extent: handle.extent,
        word: Word::new(object.epoch, State::Writing),
        id: object.id,
        object_len: object.object_len,
        root: 0,
        stripe_offset: handle.stripe_offset,
        stripe_len: handle.stripe_len,
        payload_offset: handle.payload_offset,
        stripe_index: handle.stripe_index,
        stripe_count: handle.stripe_count,
        id_key: object.id_key,
        tenant_generation: object.tenant_generation,
    }
}
