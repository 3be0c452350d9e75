//! What peers ask of a node: begin, write, commit, read.

use moontide_disk::RecordName;
use moontide_heap::{Grant, NewRecord, Writer};
use moontide_node::decide::report::{Change, Reported};
use moontide_proto::convert::AttributeSection;
use moontide_proto::{CommitEntry, Handle, Medium, ObjectEntry, ReportFlags, ReportRecord};
use moontide_types::record::{Attributes, Flags, KeySection, State, Word};
use moontide_types::{Epoch, ErrorCode, Key, ObjectId, Tenant};

use super::{Node, NodeEvent};
use crate::client::key_bytes;
use crate::event::{Ask, Payload, Told};
use crate::oracle::pattern;
use crate::scene::Scene;

impl Node {
    pub(super) fn serve(&mut self, ask: Ask, scene: &mut Scene<'_>) -> Told {
        let told = match ask {
            Ask::Begin { object, handle, key, attributes } => {
                self.begin(&object, &handle, key, &attributes, scene).map(|()| Told::Done)
            }
            Ask::Write { object, handle, token } => self.write(&object, &handle, token),
            Ask::Commit(entry) => self.commit(&entry, scene).map(|()| Told::Done),
            Ask::Read { .. } if self.is_stale(scene.now()) => Err(ErrorCode::StaleSession),
            Ask::Read { id, epoch, handle } if handle.medium == Medium::Disk => {
                let name = RecordName { id, version: epoch, stripe: handle.stripe_index };
                let bytes = self.disk.as_ref().and_then(|disk| disk.read(&name)).ok_or(ErrorCode::Gone);
                bytes.map(|bytes| {
                    scene.oracle.tally.from_disk += 1;
                    Told::Bytes(Payload(bytes))
                })
            }
            Ask::Read { id, epoch, handle } => self.read(id, epoch, &handle),
        };
        told.unwrap_or_else(Told::Refused)
    }

    fn begin(
        &mut self,
        object: &ObjectEntry,
        handle: &Handle,
        key: usize,
        attributes: &[u8],
        scene: &mut Scene<'_>,
    ) -> Result<(), ErrorCode> {
        let side = self.memory.side(handle.segment).ok_or(ErrorCode::StaleGeneration)?;
        if handle.node != self.id || handle.generation != side.segment.shape().generation {
            return Err(ErrorCode::StaleGeneration);
        }
        if side.closed {
            return Err(ErrorCode::StaleEpoch);
        }
        let name = key_bytes(key);
        let key = KeySection { tenant: Tenant::DEFAULT, key: Key::new(&name).expect("short") };
        let section = AttributeSection::new(attributes);
        let decoded = section.map_or_else(|_| Attributes::default(), AttributeSection::decode);
        let record = NewRecord {
            id: object.id,
            flags: Flags::NONE,
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
        let (slot, epoch, writer) = (handle.slot, object.epoch, Writer::Node);
        let grant = Grant { slot, epoch, term: handle.term, extent: handle.extent, record, writer };
        self.memory.heap.begin(handle.segment, &grant).map_err(|error| error.code())?;
        let units = Some(handle.extent.units);
        self.memory.note(handle.segment, slot, epoch, State::Writing, units);
        if scene.now() < self.tell_until {
            let reported = Reported {
                record: begun_record(object, handle),
                tenant: Tenant::DEFAULT.as_str().into(),
                key: name.into(),
                attributes: attributes.into(),
            };
            let change = Change::Begun(handle.segment, Box::new(reported));
            self.tell(NodeEvent::Change(change), scene);
        }
        Ok(())
    }

    fn write(&mut self, object: &ObjectEntry, handle: &Handle, token: u64) -> Result<Told, ErrorCode> {
        self.check_generation(handle.segment, handle.generation)?;
        let claim = self.memory.heap.claim(handle.segment, handle.slot, object.epoch);
        let mut claim = claim.ok_or(ErrorCode::StaleEpoch)?;
        let root = claim.fill(&pattern(token, handle.stripe_len));
        Ok(Told::Written { root })
    }

    fn commit(&mut self, entry: &CommitEntry, scene: &mut Scene<'_>) -> Result<(), ErrorCode> {
        self.check_generation(entry.segment, entry.generation)?;
        let CommitEntry { segment, slot, epoch, root, .. } = *entry;
        self.memory.heap.publish(segment, slot, epoch, root).map_err(|error| error.code())?;
        self.memory.note(segment, slot, epoch, State::Ready, None);
        if scene.now() < self.tell_until {
            let change = Change::Committed { segment, slot, epoch, root };
            self.tell(NodeEvent::Change(change), scene);
        }
        Ok(())
    }

    fn check_generation(
        &self,
        segment: moontide_types::SegmentId,
        generation: moontide_types::Generation,
    ) -> Result<(), ErrorCode> {
        let side = self.memory.side(segment).ok_or(ErrorCode::StaleGeneration)?;
        let same = side.segment.shape().generation == generation;
        if same { Ok(()) } else { Err(ErrorCode::StaleGeneration) }
    }

    fn read(&mut self, id: ObjectId, epoch: Epoch, handle: &Handle) -> Result<Told, ErrorCode> {
        self.check_generation(handle.segment, handle.generation)?;
        self.memory.touch(handle.segment, handle.slot);
        let pin = self.memory.heap.pin(handle.segment, handle.slot, epoch).ok_or(ErrorCode::Gone)?;
        if pin.header().id != id {
            return Err(ErrorCode::Gone);
        }
        Ok(Told::Bytes(Payload(pin.payload().to_vec())))
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
