//! What the master is told about the disk: [`NoticeBuilder`] packs records, [`DiskTier::begin_telling`] tells all of them
//! anew.

use std::sync::Arc;
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
use crate::decide::groups::GroupSet;
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

    /// The message for those records that `keep` wants.
    fn message(&self, recovered: bool, keep: impl Fn(&RecordName) -> bool) -> v1::OffloadNotice {
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

/// How far a session is with being told.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Telling {
    /// Scans that have been announced, and are not at their end.
    pub(super) running: usize,
    /// Bytes that its master has not heard yet.
    pub(super) unheard: usize,
}

/// Sessions, and the groups that each is told about.
#[derive(Debug, Default)]
pub(super) struct Audience(Vec<(SessionId, GroupSet)>);

impl Audience {
    fn add(&mut self, session: SessionId, groups: &GroupSet) {
        match self.0.iter_mut().find(|(of, _)| *of == session) {
            Some((_, known)) => known.extend(groups),
            None => self.0.push((session, groups.clone())),
        }
    }

    pub(super) fn end(&mut self, session: SessionId) {
        self.0.retain(|(of, _)| *of != session);
    }

    pub(super) fn narrow(&mut self, session: SessionId, groups: &GroupSet) {
        if let Some((_, known)) = self.0.iter_mut().find(|(of, _)| *of == session) {
            *known = known.without(&known.without(groups));
        }
    }

    pub(super) fn is_live(&self, session: SessionId) -> bool {
        self.0.iter().any(|(of, _)| *of == session)
    }
}

impl DiskTier {
    /// A session is about to be told of more groups: until then it is not told that everything is known.
    pub(crate) fn announce_telling(&self, session: SessionId) {
        self.tellings.lock().entry(session).or_default().running += 1;
    }

    /// A session has begun, or is responsible for more groups, which was announced: everything of them that is on the disk is told, by a thread
    /// of its own.
    pub(crate) fn begin_telling(self: &Arc<Self>, session: SessionId, groups: GroupSet) {
        self.audience.write().add(session, &groups);
        let tier = Arc::clone(self);
        let spawned = std::thread::Builder::new()
            .name("moontide-tell".into())
            .spawn(move || tier.tell_all(session, &groups));
        if let Err(error) = spawned {
            warn!(%error, "what is on the disk cannot be told: no thread");
        }
    }

    fn tell_all(&self, session: SessionId, groups: &GroupSet) {
        let began = Instant::now();
        let mut queue = self.queue(false);
        let mut builder = NoticeBuilder::default();
        let mut told = 0u64;
        let untold = self.backend.scan(&mut *queue, &mut |found| {
            if !groups.has_object(found.header.id) {
                return;
            }
            builder.push(found.header, found.key, found.attributes);
            if builder.is_full() {
                told += builder.records.len() as u64;
                self.tell_found(session, &mut builder);
            }
        });
        told += builder.records.len() as u64;
        self.tell_found(session, &mut builder);
        // That everything is known is said of all groups of the session, when it is so.
        let left = self.tellings.lock().get_mut(&session).map(|telling| {
            telling.running -= 1;
            telling.running
        });
        if left != Some(0) || !self.is_live(session) {
            return; // more is told; or another session has begun, and is told again
        }
        let end = v1::OffloadNotice { recovery_end: true, ..builder.message(true, |_| true) };
        self.events.send(Event::Offloaded { session, notice: end });
        if told > 0 || untold > 0 {
            let took_ms = began.elapsed().as_millis() as u64;
            info!(records = told, untold, took_ms, "the master was told what is on the disk");
        }
    }

    /// Tells what was found and is still there.
    fn tell_found(&self, session: SessionId, builder: &mut NoticeBuilder) {
        let unheard = || self.tellings.lock().get(&session).map_or(0, |telling| telling.unheard);
        while unheard() > UNHEARD_MAX && self.is_live(session) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let builder = std::mem::take(builder);
        if builder.is_empty() || !self.is_live(session) {
            return;
        }
        self.trial.reached(Point::Found);
        let _telling = self.telling.lock();
        let unseen = self.trial.planted(Bug::ToldUnseen);
        let notice = builder.message(true, |name| unseen || self.backend.contains(name));
        if !notice.records.is_empty() {
            self.events.send(Event::Offloaded { session, notice });
        }
    }

    /// Tells what was just written, by order of a session, and is still there. If that session is over, those that there are
    /// now are told: their scans may have begun too early to find them.
    pub(super) fn tell_written(&self, ordered_by: SessionId, builder: &mut NoticeBuilder) {
        let builder = std::mem::take(builder);
        let _telling = self.telling.lock();
        let audience = self.audience.read();
        let tell = |session, recovered, concerns: &dyn Fn(&RecordName) -> bool| {
            let notice = builder.message(recovered, |name| concerns(name) && self.backend.contains(name));
            if !notice.records.is_empty() {
                self.events.send(Event::Offloaded { session, notice });
            }
        };
        if audience.is_live(ordered_by) || self.trial.planted(Bug::ToldToEnded) {
            return tell(ordered_by, false, &|_| true);
        }
        for (session, groups) in &audience.0 {
            tell(*session, true, &|name| groups.has_object(name.id));
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

    /// As [`DiskTier::tell_gone`], by whoever holds the lock already. Answers when the masters have heard all of it, or
    /// their sessions are over.
    pub(super) fn send_gone(&self, names: &[RecordName]) -> Vec<oneshot::Receiver<()>> {
        self.shut(&self.staged.take(names));
        let mut heard = Vec::new();
        for (session, groups) in &self.audience.read().0 {
            let concerned: Vec<&RecordName> =
                names.iter().filter(|name| groups.has_object(name.id)).collect();
            for names in concerned.chunks(SESSION_RECORDS_MAX) {
                let versions: PackedBuilder<VersionedId> =
                    names.iter().map(|name| VersionedId { id: name.id, epoch: name.version }).collect();
                let (sender, receiver) = oneshot::channel();
                let evicted = v1::DiskEvicted { versions: versions.finish().into() };
                if self.events.send(Event::DiskEvicted { session: *session, evicted, heard: sender }) {
                    heard.push(receiver);
                }
            }
        }
        heard
    }
}
