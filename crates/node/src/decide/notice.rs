//! What masters are told of a disk, and which of them: [`NoticeBuilder`] packs records into messages, [`Audience`] knows who
//! is told about which groups.

use hashbrown::HashMap;
use moontide_disk::{DiskLayout, RecordName};
use moontide_proto::limits::SESSION_RECORDS_MAX;
use moontide_proto::{OffloadFlags, OffloadRecord, PackedBuilder, PackedBytesBuilder, PackedKeysBuilder, v1};
use moontide_types::SessionId;
use moontide_types::record::{Header, KeySection};
use tracing::warn;

use super::groups::GroupSet;

/// Bytes of keys and attributes in one message, about: well below what a message may have.
const NOTICE_BYTES_MAX: usize = 2 << 20;

/// Packs records into messages.
#[derive(Debug, Default)]
pub struct NoticeBuilder {
    names: Vec<RecordName>,
    records: Vec<Noted>,
    bytes: usize,
}

#[derive(Debug)]
struct Noted {
    header: Header,
    key: Box<[u8]>,
    attributes: Box<[u8]>,
}

impl NoticeBuilder {
    /// Adds a record; key and attributes as they are stored.
    pub fn push(&mut self, header: &Header, key: &[u8], attributes: &[u8]) {
        self.names.push(RecordName::of(header));
        self.bytes += key.len() + attributes.len();
        self.records.push(Noted { header: *header, key: key.into(), attributes: attributes.into() });
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether they fill a message.
    pub fn is_full(&self) -> bool {
        self.records.len() >= SESSION_RECORDS_MAX || self.bytes >= NOTICE_BYTES_MAX
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The message for those records that `keep` wants.
    pub fn message(&self, recovered: bool, keep: impl Fn(&RecordName) -> bool) -> v1::OffloadNotice {
        let mut records = PackedBuilder::<OffloadRecord>::with_capacity(self.records.len());
        let mut keys = PackedKeysBuilder::default();
        let mut attributes = PackedBytesBuilder::default();
        let (mut tenants, mut numbers): (Vec<String>, HashMap<String, u16>) = Default::default();
        let mut some_attributes = false;
        for (name, noted) in self.names.iter().zip(&self.records).filter(|(name, _)| keep(name)) {
            // What cannot be read back was not written by this release: it stays, and nobody is told.
            let Ok(section) = KeySection::decode(&noted.key) else {
                warn!(id = %name.id, "a record on disk has no readable key");
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
            records.push(&offload_record(&noted.header, number));
            keys.push(section.key).expect("a notice is far below a message's bound");
            attributes.push(&noted.attributes).expect("as above");
            some_attributes |= !noted.attributes.is_empty();
        }
        v1::OffloadNotice {
            records: records.finish().into(),
            keys: keys.finish().into(),
            tenants,
            attributes: if some_attributes { attributes.finish().into() } else { Default::default() },
            recovered,
            recovery_end: false,
        }
    }
}

fn offload_record(header: &Header, tenant: u16) -> OffloadRecord {
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
        flags: if header.flags.digestless() { OffloadFlags::DIGESTLESS } else { OffloadFlags::NONE },
    }
}

/// Sessions, and the groups that each is told about.
#[derive(Debug, Default)]
pub struct Audience(Vec<(SessionId, GroupSet)>);

impl Audience {
    /// A session is told about these groups, too.
    pub fn add(&mut self, session: SessionId, groups: &GroupSet) {
        match self.0.iter_mut().find(|(of, _)| *of == session) {
            Some((_, known)) => known.extend(groups),
            None => self.0.push((session, groups.clone())),
        }
    }

    /// A session is over.
    pub fn end(&mut self, session: SessionId) {
        self.0.retain(|(of, _)| *of != session);
    }

    /// A session is not told any more about groups that are not among these.
    pub fn narrow(&mut self, session: SessionId, groups: &GroupSet) {
        if let Some((_, known)) = self.0.iter_mut().find(|(of, _)| *of == session) {
            *known = known.without(&known.without(groups));
        }
    }

    /// Whether a session is told anything.
    pub fn is_live(&self, session: SessionId) -> bool {
        self.0.iter().any(|(of, _)| *of == session)
    }

    /// Everybody, and what they are told about.
    pub fn iter(&self) -> impl Iterator<Item = &(SessionId, GroupSet)> {
        self.0.iter()
    }
}
