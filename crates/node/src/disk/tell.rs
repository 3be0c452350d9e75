//! What masters are told about the disk: what was written, what is gone, and, by [`DiskTier::begin_telling`], everything
//! anew.

use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_disk::RecordName;
use moontide_proto::limits::SESSION_RECORDS_MAX;
use moontide_proto::{PackedBuilder, VersionedId, v1};
use moontide_types::SessionId;
use tracing::{info, warn};

use super::DiskTier;
use super::planted::{Bug, Point};
use crate::decide::groups::GroupSet;
use crate::decide::notice::NoticeBuilder;
use crate::session::Event;

/// Unheard bytes above which the telling thread waits.
const UNHEARD_MAX: usize = 8 << 20;

/// How far a session is with being told.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Telling {
    /// Scans that have been announced, and are not at their end.
    pub(super) running: usize,
    /// Bytes that its master has not heard yet.
    pub(super) unheard: usize,
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
                told += builder.len() as u64;
                self.tell_found(session, &mut builder);
            }
        });
        told += builder.len() as u64;
        self.tell_found(session, &mut builder);
        // That everything is known is said of all groups of the session, when it is so.
        let left = self.tellings.lock().get_mut(&session).map(|telling| {
            telling.running -= 1;
            telling.running
        });
        if left != Some(0) || !self.is_live(session) {
            return; // more is told; or another session has begun, and is told again
        }
        // Not while something is on its way out: it was not told, and a crash would bring it back.
        let _telling = self.telling.lock();
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
        for (session, groups) in audience.iter() {
            tell(*session, true, &|name| groups.has_object(name.id));
        }
    }

    /// Tells that a record is not on the disk, if that is so. False: it is there, because it was written meanwhile, or
    /// because it is only that its file cannot be opened.
    pub(super) fn tell_gone(&self, name: RecordName) -> bool {
        let _telling = self.telling.lock();
        let is_gone = !self.backend.contains(&name) || self.trial.planted(Bug::GoneUnseen);
        if is_gone {
            self.send_gone(&[name]);
        }
        is_gone
    }

    /// As [`DiskTier::tell_gone`], by whoever holds the lock already.
    pub(super) fn send_gone(&self, names: &[RecordName]) {
        self.shut(&self.staged.take(names));
        for (session, groups) in self.audience.read().iter() {
            let concerned: Vec<&RecordName> =
                names.iter().filter(|name| groups.has_object(name.id)).collect();
            for names in concerned.chunks(SESSION_RECORDS_MAX) {
                let versions: PackedBuilder<VersionedId> =
                    names.iter().map(|name| VersionedId { id: name.id, epoch: name.version }).collect();
                let evicted = v1::DiskEvicted { versions: versions.finish().into() };
                self.events.send(Event::DiskEvicted { session: *session, evicted });
            }
        }
    }
}
