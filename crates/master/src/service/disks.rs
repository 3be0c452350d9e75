//! Disks of nodes. A disk is mounted in every group, because a node has one disk for the objects of all groups.

use std::sync::atomic::Ordering;

use moontide_meta::{DiskSpec, Effects, ReportRecord, ReportState};
use moontide_proto::convert::{
    DiskState, DiskStatus, FlushStatus, MountResult, OffloadNotice, SegmentSpec, SyncMark,
};
use moontide_proto::{OffloadFlags, Packed, VersionedId};
use moontide_types::record::AttributesRef;
use moontide_types::{ErrorCode, Extent, GroupId, SegmentId, SlotId};

use super::Service;
use super::node_session::NodeSession;
use super::nodes::{mark_of, stripe_view};

impl Service {
    pub(super) fn mount_disk(
        &self,
        node: &NodeSession,
        spec: &SegmentSpec<'_>,
        synced: &[SyncMark],
        rotation: u64,
    ) -> MountResult {
        let result =
            MountResult { segment: spec.segment, code: None, group: GroupId(0), term: self.config.term };
        if spec.segment != SegmentId::DISK {
            return MountResult { code: Some(ErrorCode::InvalidArgument), ..result };
        }
        let [host, rack, zone] = &node.labels;
        let disk = DiskSpec {
            node: node.node,
            session: node.session(),
            generation: spec.generation,
            labels: [host, rack, zone],
            occupied: spec.has_records,
            synced: moontide_meta::SyncMark::NONE,
        };
        let (mut effects, mut is_new) = (Effects::new(), false);
        for mut group in self.hosted() {
            // As for segments: an ending session is marked before its node is removed from the groups.
            if node.is_ended() {
                return MountResult { code: Some(ErrorCode::StaleSession), ..result };
            }
            // A node does not report its disk for a group that it has not mounted a segment in.
            if !node.segments.lock().is_empty() && !group.knows_node(node.node, node.session()) {
                continue;
            }
            let disk = DiskSpec { synced: mark_of(synced, group.index), ..disk };
            is_new |= group.mount_disk(self.now(), &disk, &mut effects);
            self.signer.mounted(group.index, node.node, node.session(), rotation);
            self.deliver(&group, &mut effects);
        }
        // Relaxed: the count guards no other data.
        node.disk_mounts.fetch_add(is_new.into(), Ordering::Relaxed);
        *node.disk.lock() = Some(DiskStatus {
            state: if spec.has_records { DiskState::Recovering } else { DiskState::Serving },
            used_bytes: 0,
            limit_bytes: 0,
            objects: 0,
            backlog_bytes: 0,
        });
        result
    }

    pub(super) fn unmount_disk(&self, node: &NodeSession) -> Result<(), ErrorCode> {
        node.disk.lock().take().ok_or(ErrorCode::NotFound)?;
        let mut effects = Effects::new();
        for mut group in self.hosted() {
            // An error means that the group has removed the node already.
            let _ = group.unmount(self.now(), node.node, SegmentId::DISK, &mut effects);
            self.deliver(&group, &mut effects);
        }
        Ok(())
    }

    /// Records the status of a disk from the heartbeat of its node.
    pub(super) fn disk_status(&self, node: &NodeSession, status: Option<DiskStatus>) {
        let mut known = node.disk.lock();
        let (Some(before), Some(status)) = (*known, status) else { return };
        *known = Some(status);
        drop(known);
        let accepts_writes =
            |status: DiskStatus| matches!(status.state, DiskState::Serving | DiskState::Recovering);
        if accepts_writes(before) != accepts_writes(status) {
            tracing::warn!(node = %node.node, state = ?status.state, "state of the node's disk changed");
        }
        for mut group in self.hosted() {
            group.disk_status(node.node, node.session(), accepts_writes(status));
        }
    }

    /// Continues the flush of a node that is about to stop, in all hosted groups. Returns its state.
    pub(super) fn flush(&self, node: &NodeSession) -> FlushStatus {
        let mut sum = FlushStatus::default();
        for mut group in self.hosted() {
            // An error means that the node has no segment in this group.
            let _ = group.flush(node.node, node.session());
            let progress = group.flush_progress(node.session()).unwrap_or_default();
            sum.objects += progress.objects;
            sum.bytes += progress.bytes;
            sum.refused += progress.refused;
        }
        sum
    }

    /// Applies a report of records on a node's disk.
    pub(super) fn offloaded(&self, node: &NodeSession, notice: &OffloadNotice<'_>) -> Result<(), ErrorCode> {
        let id_key = self.config.id_key.number();
        let reported = notice.records.iter().map(|r| (r.tenant, r.tenant_generation, r.id_key == id_key));
        let generations = self.update_generations(&notice.tenants, reported);
        let now = self.now();
        let name = (node.node, node.session());
        let mut effects = Effects::new();
        let mut sections = notice.attributes.as_ref().map(|sections| sections.iter());
        for (record, key) in notice.records.iter().zip(notice.keys.iter()) {
            let (attributes, attributes_len) = match &mut sections {
                Some(sections) => {
                    let section = sections.next().expect("one section per record");
                    (section.decode_ref(), section.as_bytes().len() as u32) // ≤ 4 KiB
                }
                None => (AttributesRef::default(), 0),
            };
            let tenant = usize::from(record.tenant);
            let tenant_name = *notice.tenants.get(tenant).ok_or(ErrorCode::InvalidArgument)?;
            // Ids of another id key or of an earlier generation of the tenant cannot be looked up.
            let current = record.id_key == id_key && record.tenant_generation == generations[tenant];
            // The node reports records of other groups to their masters, too.
            let Ok(mut group) = self.group_for_node(self.group_of(record.id)) else { continue };
            let Ok(tenant) = group.tenant(tenant_name) else {
                tracing::warn!(
                    node = %node.node,
                    tenant = tenant_name.as_str(),
                    "too many tenants; record on disk ignored"
                );
                continue;
            };
            let reported = ReportRecord {
                slot: SlotId(0),
                state: ReportState::Ready,
                epoch: record.epoch,
                id: record.id,
                tenant,
                key: key.as_bytes(),
                object_len: record.object_len,
                stripe: stripe_view(record.stripe()),
                root: record.root,
                extent: Extent::default(),
                payload_offset: 0,
                digestless: record.flags.contains(OffloadFlags::DIGESTLESS),
                one_sided: false,
                touched: record.flags.contains(OffloadFlags::WAS_IN_MEMORY),
                pin: attributes.pin,
                expires: attributes.expires,
                cohort: attributes.cohort,
                parent: attributes.parent,
                extra_replicas: attributes.extra_replicas,
                spread: attributes.spread,
                disk_replicas: attributes.disk_replicas,
            };
            let record = (&reported, attributes_len);
            let outcome = group.disk_notice(now, name, record, notice.recovered && current, &mut effects);
            self.deliver(&group, &mut effects);
            match outcome {
                // The disk is no longer mounted, or the record is invalid: the other records are still applied.
                Err(code @ (ErrorCode::NotFound | ErrorCode::StaleSession | ErrorCode::OutOfBounds)) => {
                    tracing::warn!(node = %node.node, %code, "record on disk ignored");
                }
                outcome => outcome?,
            }
        }
        // An inventory that ended before the last mount does not contain the records of its groups.
        let is_outdated = notice.inventories < node.disk_mounts.load(Ordering::Relaxed);
        if notice.recovery_end && !is_outdated {
            for mut group in self.hosted() {
                let _ = group.disk_recovered(node.node, node.session());
            }
            tracing::info!(node = %node.node, "node's disk is completely reported");
        }
        Ok(())
    }

    /// Applies a notice of versions that a node is about to evict from its disk.
    pub(super) fn disk_evicted(
        &self,
        node: &NodeSession,
        evicted: &Packed<'_, VersionedId>,
    ) -> Result<(), ErrorCode> {
        let now = self.now();
        let mut effects = Effects::new();
        for version in evicted.iter() {
            let Ok(mut group) = self.group_for_node(self.group_of(version.id)) else { continue };
            let name = (node.node, node.session());
            let _ = group.disk_evicted(now, name, version.id, version.epoch, &mut effects);
            self.deliver(&group, &mut effects);
        }
        Ok(())
    }
}
