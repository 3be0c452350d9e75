//! Notices to masters about the disk: records that were written, records that are gone, and complete inventories
//! ([`DiskTier::start_inventory`]).

use std::io;
use std::sync::Arc;
use std::time::Duration;

use moontide_disk::RecordId;
use moontide_proto::limits::SESSION_RECORDS_MAX;
use moontide_proto::{PackedBuilder, VersionedId, v1};
use moontide_rt::mark;
use moontide_rt::time::Instant;
use moontide_types::{Epoch, ObjectId, SessionId};
use tracing::{info, warn};

use super::DiskTier;
use super::device::Device;
use super::test_hooks::{HookPoint, Mutation};
use crate::event_router::NodeEvent;
use crate::logic::groups::GroupSet;
use crate::logic::notice::OffloadNoticeBuilder;

/// Limit of unacknowledged bytes above which the inventory thread waits.
const UNACKED_BYTES_MAX: usize = 8 << 20;

/// Progress of the inventories of a session.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InventoryProgress {
    /// Scans that were announced.
    pub(super) announced: u32,
    /// Scans that were announced and have not ended.
    pub(super) running: usize,
    /// Bytes that the master has not acknowledged.
    pub(super) unacked_bytes: usize,
}

impl DiskTier {
    /// Announces an inventory of further groups for a session: until it ends, the master does not receive
    /// `recovery_end`.
    pub(crate) fn announce_inventory(&self, session: SessionId) {
        let mut inventories = self.inventories.lock();
        let progress = inventories.entry(session).or_default();
        progress.announced += 1;
        progress.running += 1;
    }

    /// Sends an announced inventory of `groups` to a session that has begun or has received further groups, from a
    /// separate thread.
    pub(crate) fn start_inventory(self: &Arc<Self>, session: SessionId, groups: GroupSet) {
        self.subscribers.write().add(session, &groups);
        let tier = Arc::clone(self);
        let spawned = moontide_rt::thread::Builder::new()
            .name("moontide-scan".into())
            .spawn(move || tier.send_inventory(session, &groups));
        if let Err(error) = spawned {
            warn!(%error, "cannot start a thread for the inventory of the disk");
        }
    }

    fn send_inventory(self: &Arc<Self>, session: SessionId, groups: &GroupSet) {
        let started = Instant::now();
        let scans = self.devices().map(|device| {
            let (tier, of, groups) = (Arc::clone(self), Arc::clone(device), groups.clone());
            let scan = moontide_rt::thread::Builder::new().name("moontide-scan".into());
            Ok((device, scan.spawn(move || tier.scan(&of, session, &groups))?))
        });
        let scans = match scans.collect::<io::Result<Vec<_>>>() {
            Ok(scans) => scans,
            Err(error) => {
                warn!(%error, "cannot start a thread for the inventory of the disk");
                return; // without an end, masters do not take what is missing for gone
            }
        };
        let (mut sent, mut unreadable) = (0, 0);
        for (device, scan) in scans {
            while !scan.is_finished() && !device.is_excluded() {
                moontide_rt::thread::sleep(Duration::from_millis(1));
            }
            match scan.is_finished().then(|| scan.join()) {
                Some(Ok((sent_there, unreadable_there))) => {
                    sent += sent_there;
                    unreadable += unreadable_there.len();
                    self.remove_unreadable(device, session, &unreadable_there);
                }
                Some(Err(_)) => return,
                None => {} // it may hang; the records there are gone
            }
        }
        self.wait_for_open_jobs(session, groups);
        // `recovery_end` holds for all groups of the session, so only the last inventory sends it.
        let left = self.inventories.lock().get_mut(&session).map(|inventory| {
            inventory.running -= 1;
            (inventory.running, inventory.announced)
        });
        let Some((0, inventories)) = left.filter(|_| self.is_live(session)) else {
            return; // another inventory follows; or the session has ended, and the next one starts another
        };
        // Not before the evictions that have begun are durable: their records may not be in the inventory, and a crash
        // would restore them.
        self.wait_for_evictions(session);
        let _guard = self.notify_lock.lock();
        let empty = OffloadNoticeBuilder::default().message(true, |_| true);
        let end = v1::OffloadNotice { recovery_end: true, inventories, ..empty };
        self.events.send(NodeEvent::Offloaded { session, notice: end });
        if sent > 0 || unreadable > 0 {
            let took_ms = started.elapsed().as_millis() as u64;
            info!(records = sent, unreadable, took_ms, "inventory of the disk sent to the master");
        }
    }

    /// Removes records durably that could not be read and so are not in the inventory. A master takes them for gone, and
    /// they must not return when they can be read again, after their object was removed. Tries until it succeeds, the
    /// session ends, or the directory is excluded.
    fn remove_unreadable(&self, device: &Device, session: SessionId, names: &[RecordId]) {
        if names.is_empty() || self.test_hooks.mutation.is_enabled(Mutation::UnreadableKept) {
            return;
        }
        warn!(dir = ?device.dir, records = names.len(), "records cannot be read; removing them");
        let versions: Vec<(ObjectId, Epoch)> = names.iter().map(|name| (name.id, name.version)).collect();
        while let Err(error) = device.backend.remove(&mut *device.queue(None), &versions) {
            warn!(dir = ?device.dir, %error, "unreadable records cannot be removed; trying again");
            moontide_rt::thread::sleep(self.write_pause);
            if device.is_excluded() || !self.is_live(session) {
                return;
            }
        }
    }

    /// Sends what is in a directory. Returns the number of records, and those that could not be read.
    fn scan(&self, device: &Device, session: SessionId, groups: &GroupSet) -> (u64, Vec<RecordId>) {
        let (mut builder, mut sent) = (OffloadNoticeBuilder::default(), 0);
        let mut unreadable = device.backend.scan(&mut *device.queue(None), &mut |found| {
            if !groups.has_object(found.header.id) {
                return;
            }
            let (id, version) = (found.header.id, found.header.word.epoch());
            let was_in_memory = self.memory_list.lock().contains(id, version);
            builder.push(found.header, found.key, found.attributes, was_in_memory);
            if builder.is_full() {
                sent += builder.len() as u64;
                self.send_found(session, &mut builder);
            }
        });
        sent += builder.len() as u64;
        self.send_found(session, &mut builder);
        unreadable.retain(|name| groups.has_object(name.id));
        (sent, unreadable)
    }

    /// Waits for writes that another session commanded, and for removals that are not durable: a record may return by
    /// either, and the master takes what is not in the inventory for gone. Until then, it answers removals as pending.
    fn wait_for_open_jobs(&self, session: SessionId, groups: &GroupSet) {
        if self.test_hooks.mutation.is_enabled(Mutation::JobsNotAwaited) {
            return;
        }
        let tickets = self.open_jobs.before_end_of_inventory(session, groups);
        while self.open_jobs.any_open(&tickets) && self.is_live(session) {
            moontide_rt::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for the evictions in progress.
    fn wait_for_evictions(&self, session: SessionId) {
        let begun: Vec<(&Arc<Device>, u64)> = self
            .devices()
            .flat_map(|device| {
                device.evictions.lock().running.keys().map(|number| (device, *number)).collect::<Vec<_>>()
            })
            .collect();
        let is_running = |(device, number): &(&Arc<Device>, u64)| {
            !device.is_excluded() && device.evictions.lock().running.contains_key(number)
        };
        while begun.iter().any(is_running) && self.is_live(session) {
            moontide_rt::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends the records that were found and still exist.
    fn send_found(&self, session: SessionId, builder: &mut OffloadNoticeBuilder) {
        let unacked = || self.inventories.lock().get(&session).map_or(0, |inventory| inventory.unacked_bytes);
        while unacked() > UNACKED_BYTES_MAX && self.is_live(session) {
            moontide_rt::thread::sleep(Duration::from_millis(1));
        }
        let builder = std::mem::take(builder);
        if builder.is_empty() || !self.is_live(session) {
            return;
        }
        self.test_hooks.reached(HookPoint::Found);
        let _guard = self.notify_lock.lock();
        let skip_check = self.test_hooks.mutation.is_enabled(Mutation::ToldUnseen);
        let notice = builder.message(true, |name| skip_check || self.contains(name));
        let all = || builder.message(true, |_| true).records.len();
        mark!("record evicted or removed between scan and notice", notice.records.len() < all());
        if !notice.records.is_empty() {
            self.events.send(NodeEvent::Offloaded { session, notice });
        }
    }

    /// Sends the records that were just written for a command of `session`, if they still exist. Another session that
    /// has their groups by now receives them as recovered: its scan may have started too early to find them.
    pub(super) fn notify_written(&self, session: SessionId, builder: &mut OffloadNoticeBuilder) {
        let builder = std::mem::take(builder);
        let _guard = self.notify_lock.lock();
        let subscribers = self.subscribers.read();
        let send = |session, recovered, concerns: &dyn Fn(&RecordId) -> bool| {
            let notice = builder.message(recovered, |name| concerns(name) && self.contains(name));
            if !notice.records.is_empty() {
                self.events.send(NodeEvent::Offloaded { session, notice });
            }
        };
        if self.test_hooks.mutation.is_enabled(Mutation::ToldToEnded) {
            return send(session, false, &|_| true);
        }
        for (subscriber, groups) in subscribers.iter() {
            send(*subscriber, *subscriber != session, &|name| groups.has_object(name.id));
        }
    }

    /// Notifies the masters that a record is not on the disk, if that is so. Returns `false` if it is: it was written
    /// meanwhile, or only its file cannot be opened.
    pub(super) fn notify_gone(&self, name: RecordId) -> bool {
        let _guard = self.notify_lock.lock();
        // The eviction sends it when the record is durably gone.
        if self.devices().any(|device| device.is_evicting(&name)) {
            return true;
        }
        let is_gone = !self.contains(&name) || self.test_hooks.mutation.is_enabled(Mutation::GoneUnseen);
        if is_gone {
            self.send_gone(&[name]);
        }
        is_gone
    }

    /// Whether a record is durably gone: it cannot be found, and is not being evicted. For a caller that holds the lock.
    pub(super) fn is_gone(&self, name: &RecordId) -> bool {
        !self.contains(name) && !self.devices().any(|device| device.is_evicting(name))
    }

    /// Like [`DiskTier::notify_gone`], for a caller that holds the lock.
    pub(super) fn send_gone(&self, names: &[RecordId]) {
        self.unpublish(&self.cache.take(names));
        for (session, groups) in self.subscribers.read().iter() {
            let concerned: Vec<&RecordId> = names.iter().filter(|name| groups.has_object(name.id)).collect();
            for names in concerned.chunks(SESSION_RECORDS_MAX) {
                let versions: PackedBuilder<VersionedId> =
                    names.iter().map(|name| VersionedId { id: name.id, epoch: name.version }).collect();
                let evicted = v1::DiskEvicted { versions: versions.finish().into() };
                self.events.send(NodeEvent::DiskEvicted { session: *session, evicted });
            }
        }
    }
}
