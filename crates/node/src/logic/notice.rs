//! Disk notices to masters: [`OffloadNoticeBuilder`] packs records into messages, [`NoticeSubscribers`] holds the
//! groups of each subscribed session.

use moontide_disk::{DiskLayout, RecordId};
use moontide_proto::limits::SESSION_RECORDS_MAX;
use moontide_proto::{OffloadFlags, OffloadRecord, PackedBuilder, PackedBytesBuilder, PackedKeysBuilder, v1};
use moontide_rt::collections::HashMap;
use moontide_types::record::{Header, KeySection};
use moontide_types::{ObjectId, SessionId};
use tracing::warn;

use super::groups::GroupSet;

/// Approximate limit of the keys and attributes in one message, in bytes: well below the limit of a message.
const NOTICE_BYTES_MAX: usize = 2 << 20;

/// Packs records into notices.
#[derive(Debug, Default)]
pub(crate) struct OffloadNoticeBuilder {
    ids: Vec<RecordId>,
    records: Vec<NoticeRecord>,
    bytes: usize,
}

#[derive(Debug)]
struct NoticeRecord {
    header: Header,
    key: Box<[u8]>,
    attributes: Box<[u8]>,
    was_in_memory: bool,
}

impl OffloadNoticeBuilder {
    /// Adds a record, with key and attributes as they are stored. `was_in_memory`: its object was in memory when the node was
    /// stopped.
    pub(crate) fn push(&mut self, header: &Header, key: &[u8], attributes: &[u8], was_in_memory: bool) {
        self.ids.push(RecordId::of(header));
        self.bytes += key.len() + attributes.len();
        let (key, attributes) = (key.into(), attributes.into());
        self.records.push(NoticeRecord { header: *header, key, attributes, was_in_memory });
    }

    /// Number of records.
    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether the records fill a message.
    pub(crate) fn is_full(&self) -> bool {
        self.records.len() >= SESSION_RECORDS_MAX || self.bytes >= NOTICE_BYTES_MAX
    }

    /// Whether there are no records.
    pub(crate) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Returns the message with the records that `keep` selects.
    pub(crate) fn message(&self, recovered: bool, keep: impl Fn(&RecordId) -> bool) -> v1::OffloadNotice {
        let mut records = PackedBuilder::<OffloadRecord>::with_capacity(self.records.len());
        let mut keys = PackedKeysBuilder::default();
        let mut attributes = PackedBytesBuilder::default();
        let (mut tenants, mut numbers): (Vec<String>, HashMap<String, u16>) = Default::default();
        let mut some_attributes = false;
        for (id, record) in self.ids.iter().zip(&self.records).filter(|(id, _)| keep(id)) {
            // A record without a readable key was not written by this release: it remains on disk, and no master is
            // notified.
            let Ok(section) = KeySection::decode(&record.key) else {
                warn!(id = %id.id, "record on disk has no readable key");
                continue;
            };
            let tenant = section.tenant.as_str();
            let number = match numbers.get(tenant) {
                Some(&number) => number,
                None => {
                    let number = tenants.len() as u16; // ≤ SESSION_RECORDS_MAX
                    tenants.push(tenant.into());
                    numbers.insert(tenant.into(), number);
                    number
                }
            };
            records.push(&offload_record(record, number));
            keys.push(section.key).expect("a notice is far below a message's bound");
            attributes.push(&record.attributes).expect("a notice is far below a message's bound");
            some_attributes |= !record.attributes.is_empty();
        }
        v1::OffloadNotice {
            records: records.finish().into(),
            keys: keys.finish().into(),
            tenants,
            attributes: if some_attributes { attributes.finish().into() } else { Default::default() },
            recovered,
            recovery_end: false,
            inventories: 0,
        }
    }
}

fn offload_record(record: &NoticeRecord, tenant: u16) -> OffloadRecord {
    let header = &record.header;
    let mut flags = OffloadFlags::NONE;
    if header.flags.digestless() {
        flags = flags.with(OffloadFlags::DIGESTLESS);
    }
    if record.was_in_memory {
        flags = flags.with(OffloadFlags::WAS_IN_MEMORY);
    }
    OffloadRecord {
        id: header.id,
        epoch: header.word.epoch(),
        object_len: header.object_len,
        stripe_offset: header.stripe_offset,
        stripe_len: header.stripe_len,
        root: header.root,
        bucket: 0,
        offset: 0,
        disk_len: DiskLayout::of(header).len,
        stripe_index: header.stripe_index,
        stripe_count: header.stripe_count,
        id_key: header.id_key,
        tenant_generation: header.tenant_generation,
        tenant,
        flags,
    }
}

/// Sessions, and the groups about which each is notified.
#[derive(Debug, Default)]
pub(crate) struct NoticeSubscribers(Vec<(SessionId, GroupSet)>);

impl NoticeSubscribers {
    /// Adds groups to a session.
    pub(crate) fn add(&mut self, session: SessionId, groups: &GroupSet) {
        match self.0.iter_mut().find(|(of, _)| *of == session) {
            Some((_, subscribed)) => subscribed.extend(groups),
            None => self.0.push((session, groups.clone())),
        }
    }

    /// Removes a session that has ended.
    pub(crate) fn end(&mut self, session: SessionId) {
        self.0.retain(|(of, _)| *of != session);
    }

    /// Removes all groups that are not in `groups` from a session.
    pub(crate) fn restrict(&mut self, session: SessionId, groups: &GroupSet) {
        if let Some((_, subscribed)) = self.0.iter_mut().find(|(of, _)| *of == session) {
            *subscribed = subscribed.without(&subscribed.without(groups));
        }
    }

    /// Whether a session is subscribed.
    pub(crate) fn is_live(&self, session: SessionId) -> bool {
        self.0.iter().any(|(of, _)| *of == session)
    }

    /// Whether a session is subscribed to the group of an object.
    pub(crate) fn has_object(&self, session: SessionId, id: ObjectId) -> bool {
        self.0.iter().any(|(of, groups)| *of == session && groups.has_object(id))
    }

    /// Iterates over the sessions and their groups.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &(SessionId, GroupSet)> {
        self.0.iter()
    }
}
