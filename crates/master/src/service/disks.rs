//! Disks of nodes: mounted in every group, because objects of all groups go to a node's one disk.

use moontide_meta::{DiskSpec, Effects, ReportRecord, ReportState};
use moontide_proto::convert::{DiskState, DiskStatus, OffloadNotice, SegmentGrant, SegmentSpec};
use moontide_proto::{OffloadFlags, Packed, VersionedId};
use moontide_types::record::AttributesRef;
use moontide_types::{ErrorCode, Extent, GroupId, SegmentId, SlotId};

use super::Service;
use super::nodes::stripe_view;
use super::outbox::NodeSession;

impl Service {
    pub(super) fn mount_disk(&self, node: &NodeSession, spec: &SegmentSpec<'_>) -> SegmentGrant {
        let grant =
            SegmentGrant { segment: spec.segment, code: None, group: GroupId(0), term: self.config.term };
        if spec.segment != SegmentId::DISK {
            return SegmentGrant { code: Some(ErrorCode::InvalidArgument), ..grant };
        }
        let [host, rack, zone] = &node.labels;
        let disk = DiskSpec {
            node: node.node,
            session: node.session(),
            generation: spec.generation,
            labels: [host, rack, zone],
            occupied: spec.occupied,
        };
        let mut effects = Effects::new();
        for mut group in self.hosted() {
            // As for segments: a session that ends is marked before its node is taken out of the groups.
            if node.is_ended() {
                return SegmentGrant { code: Some(ErrorCode::StaleSession), ..grant };
            }
            // Of a group that the node has not heard of it does not tell what is on its disk.
            if !node.segments.lock().is_empty() && !group.knows_node(node.node, node.session()) {
                continue;
            }
            group.mount_disk(self.now(), &disk, &mut effects);
            self.deliver(&group, &mut effects);
        }
        *node.disk.lock() = Some(DiskStatus {
            state: if spec.occupied { DiskState::Recovering } else { DiskState::Serving },
            used_bytes: 0,
            limit_bytes: 0,
            objects: 0,
            backlog_bytes: 0,
        });
        grant
    }

    pub(super) fn unmount_disk(&self, node: &NodeSession) -> Result<(), ErrorCode> {
        node.disk.lock().take().ok_or(ErrorCode::NotFound)?;
        let mut effects = Effects::new();
        for mut group in self.hosted() {
            // Of a group that has lost the node nothing has to be taken.
            let _ = group.unmount(self.now(), node.node, SegmentId::DISK, &mut effects);
            self.deliver(&group, &mut effects);
        }
        Ok(())
    }

    /// How a disk is, by the node's heartbeat.
    pub(super) fn disk_status(&self, node: &NodeSession, status: Option<DiskStatus>) {
        let mut known = node.disk.lock();
        let (Some(before), Some(status)) = (*known, status) else { return };
        *known = Some(status);
        drop(known);
        let takes = |status: DiskStatus| matches!(status.state, DiskState::Serving | DiskState::Recovering);
        if takes(before) != takes(status) {
            tracing::warn!(node = node.node.0, state = ?status.state, "the node's disk has changed its state");
        }
        for mut group in self.hosted() {
            group.disk_status(node.node, node.session(), takes(status));
        }
    }

    /// Records are on a node's disk.
    pub(super) fn offloaded(&self, node: &NodeSession, notice: &OffloadNotice<'_>) -> Result<(), ErrorCode> {
        let id_key = self.config.id_key.number();
        let told = notice.records.iter().map(|r| (r.tenant, r.tenant_generation, r.id_key == id_key));
        let generations = self.learn_generations(&notice.tenants, told);
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
            // Ids of another key or of an earlier generation of the tenant cannot be looked up any more.
            let current = record.id_key == id_key && record.tenant_generation == generations[tenant];
            // What another master hosts, it hears from the node, too.
            let Ok(mut group) = self.books(self.group_of(record.id)) else { continue };
            let Ok(tenant) = group.tenant(tenant_name) else {
                tracing::warn!(
                    node = node.node.0,
                    tenant = tenant_name.as_str(),
                    "too many tenants: a record on disk was passed over"
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
                touched: false,
                pin: attributes.pin,
                expires: attributes.expires,
                cohort: attributes.cohort,
                parent: attributes.parent,
            };
            let told = (&reported, attributes_len);
            let outcome = group.disk_notice(now, name, told, notice.recovered && current, &mut effects);
            self.deliver(&group, &mut effects);
            match outcome {
                // Of a disk that is not mounted any more, or a record that cannot be: the rest is heard all the same.
                Err(code @ (ErrorCode::NotFound | ErrorCode::StaleSession | ErrorCode::OutOfBounds)) => {
                    tracing::warn!(node = node.node.0, %code, "a record on disk was passed over");
                }
                outcome => outcome?,
            }
        }
        if notice.recovery_end {
            for mut group in self.hosted() {
                let _ = group.disk_recovered(node.node, node.session());
            }
            tracing::info!(node = node.node.0, "everything on the node's disk is known");
        }
        Ok(())
    }

    /// Versions are about to leave a node's disk.
    pub(super) fn disk_evicted(
        &self,
        node: &NodeSession,
        evicted: &Packed<'_, VersionedId>,
    ) -> Result<(), ErrorCode> {
        let now = self.now();
        let mut effects = Effects::new();
        for version in evicted.iter() {
            let Ok(mut group) = self.books(self.group_of(version.id)) else { continue };
            let name = (node.node, node.session());
            let _ = group.disk_evicted(now, name, version.id, version.epoch, &mut effects);
            self.deliver(&group, &mut effects);
        }
        Ok(())
    }
}
