//! What the master is told about the disk: [`NoticeBuilder`] packs records, [`DiskTier::begin_telling`] tells all of them
//! anew.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use moontide_disk::{DiskLayout, RecordName};
use moontide_proto::limits::SESSION_RECORDS_MAX;
use moontide_proto::{
    OffloadFlags, OffloadRecord, PackedBuilder, PackedBytesBuilder, PackedKeysBuilder, VersionedId, v1,
};
use moontide_types::SessionId;
use moontide_types::record::{Header, KeySection};
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::DiskTier;
use super::planted::{Bug, Point};
use crate::session::Event;

/// Unheard bytes above which the telling thread waits.
const UNHEARD_MAX: usize = 8 << 20;

/// Bytes of keys and attributes in one message, about: well below what a message may have.
const NOTICE_BYTES_MAX: usize = 2 << 20;

/// Packs records into messages.
#[derive(Debug, Default)]
pub(super) struct NoticeBuilder {
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
    pub(super) fn push(&mut self, header: &Header, key: &[u8], attributes: &[u8]) {
        self.names.push(RecordName::of(header));
        self.bytes += key.len() + attributes.len();
        self.records.push(Noted { header: *header, key: key.into(), attributes: attributes.into() });
    }

    pub(super) fn is_full(&self) -> bool {
        self.records.len() >= SESSION_RECORDS_MAX || self.bytes >= NOTICE_BYTES_MAX
    }

    pub(super) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The message for those records that `keep` wants, and the next one starts empty.
    pub(super) fn take(&mut self, recovered: bool, keep: impl Fn(&RecordName) -> bool) -> v1::OffloadNotice {
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
        *self = NoticeBuilder::default();
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

impl DiskTier {
    /// A session has begun: everything on the disk is told, by a thread of its own. What was promised to the session
    /// before is void.
    pub(crate) fn begin_telling(self: &Arc<Self>, session: SessionId) {
        self.session.store(session.0, Ordering::SeqCst);
        self.cancel_promotions();
        self.is_telling.store(true, Ordering::SeqCst);
        let tier = Arc::clone(self);
        let spawned =
            std::thread::Builder::new().name("moontide-tell".into()).spawn(move || tier.tell_all(session));
        if let Err(error) = spawned {
            warn!(%error, "what is on the disk cannot be told: no thread");
        }
    }

    fn tell_all(&self, session: SessionId) {
        let began = Instant::now();
        let mut queue = self.queue(false);
        let mut builder = NoticeBuilder::default();
        let mut told = 0u64;
        let untold = self.backend.scan(&mut *queue, &mut |found| {
            builder.push(found.header, found.key, found.attributes);
            if builder.is_full() {
                told += builder.records.len() as u64;
                self.tell_found(session, &mut builder);
            }
        });
        told += builder.records.len() as u64;
        self.tell_found(session, &mut builder);
        if self.session() != session {
            return; // another one has begun, and tells again
        }
        let end = v1::OffloadNotice { recovery_end: true, ..builder.take(true, |_| true) };
        let _ = self.events.send(Event::Offloaded { session, notice: end });
        self.is_telling.store(false, Ordering::SeqCst);
        if told > 0 || untold > 0 {
            let took_ms = began.elapsed().as_millis() as u64;
            info!(records = told, untold, took_ms, "the master was told what is on the disk");
        }
    }

    /// Tells what was found and is still there.
    fn tell_found(&self, session: SessionId, builder: &mut NoticeBuilder) {
        while self.unheard.load(Ordering::Relaxed) > UNHEARD_MAX && self.session() == session {
            std::thread::sleep(Duration::from_millis(1));
        }
        if builder.is_empty() || self.session() != session {
            return;
        }
        self.trial.reached(Point::Found);
        let _telling = self.telling.lock();
        let unseen = self.trial.planted(Bug::ToldUnseen);
        let notice = builder.take(true, |name| unseen || self.backend.contains(name));
        if !notice.records.is_empty() {
            let _ = self.events.send(Event::Offloaded { session, notice });
        }
    }

    /// Tells what was just written, by order of a session, and is still there. If that session is over, the one that
    /// there is now is told: its scan may have begun too early to find them.
    pub(super) fn tell_written(&self, ordered_by: SessionId, builder: &mut NoticeBuilder) {
        let _telling = self.telling.lock();
        let session = if self.trial.planted(Bug::ToldToEnded) { ordered_by } else { self.session() };
        while !builder.is_empty() {
            let notice = builder.take(session != ordered_by, |name| self.backend.contains(name));
            if !notice.records.is_empty() {
                let _ = self.events.send(Event::Offloaded { session, notice });
            }
        }
    }

    /// Tells that a record is not on the disk, if that is so. False: it is there, because it was written meanwhile, or
    /// because it is only that its file cannot be opened.
    pub(super) fn tell_gone(&self, name: RecordName) -> bool {
        let _telling = self.telling.lock();
        let is_gone = !self.backend.contains(&name) || self.trial.planted(Bug::GoneUnseen);
        if is_gone {
            let _ = self.send_gone(&[name]);
        }
        is_gone
    }

    /// As [`DiskTier::tell_gone`], by whoever holds the lock already. Answers when the master has heard all of it, or
    /// its session is over.
    pub(super) fn send_gone(&self, names: &[RecordName]) -> Vec<oneshot::Receiver<()>> {
        self.shut(&self.staged.take(names));
        let session = self.session();
        let mut heard = Vec::new();
        for names in names.chunks(SESSION_RECORDS_MAX) {
            let versions: PackedBuilder<VersionedId> =
                names.iter().map(|name| VersionedId { id: name.id, epoch: name.version }).collect();
            let (sender, receiver) = oneshot::channel();
            let evicted = v1::DiskEvicted { versions: versions.finish().into() };
            if self.events.send(Event::DiskEvicted { session, evicted, heard: sender }).is_ok() {
                heard.push(receiver);
            }
        }
        heard
    }
}
