//! Calls of operators: quotas and usage of tenants, eviction on request, and the segments of the nodes.
//!
//! Every master answers for its own groups, so these calls ask all of them and sum up. Drains of nodes are in `drain`,
//! removals of many objects in `bulk`.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use moontide_proto::convert::{RequestContext, Wire};
use moontide_proto::v1;
use moontide_rt::time::Instant;
use moontide_types::limits::{BATCH_KEYS_MAX, UNIT_BYTES};
use moontide_types::{ErrorCode, Medium, NodeId, SegmentId, Tenant};

use crate::cluster::{Cluster, Master, next_counter};
use crate::error::StoreError;
use crate::logic::{RETRY_BACKOFF, is_unanswered};
use crate::metadata::check_context;
use crate::store::Store;

/// Quota and usage of a tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantInfo {
    /// Name of the tenant.
    pub name: String,
    /// Maximum number of bytes in memory; 0 for no limit.
    pub bytes_max: u64,
    /// Maximum number of objects; 0 for no limit.
    pub objects_max: u64,
    /// Bytes in memory.
    pub bytes: u64,
    /// Number of objects.
    pub objects: u64,
    /// Number of times that all objects of the tenant were removed with `force`.
    pub generation: u32,
}

/// Result of an eviction on request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Number of objects that leave memory.
    pub objects: u64,
    /// Their bytes in memory.
    pub bytes: u64,
}

/// State of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentState {
    /// It accepts new objects.
    Serving,
    /// It accepts no new objects, and is being emptied.
    Draining,
    /// Its node has yet to report its records.
    Reporting,
    /// It does not respond.
    Failed,
}

impl SegmentState {
    /// Returns the name, as in JSON and in Python.
    pub fn name(self) -> &'static str {
        match self {
            SegmentState::Serving => "serving",
            SegmentState::Draining => "draining",
            SegmentState::Reporting => "reporting",
            SegmentState::Failed => "failed",
        }
    }
}

/// A segment of a node's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Node that owns the segment.
    pub node: NodeId,
    /// Id of the segment on its node.
    pub segment: SegmentId,
    /// Kind of memory.
    pub medium: Medium,
    /// Group that places objects in it.
    pub group: u16,
    /// State.
    pub state: SegmentState,
    /// Size in bytes.
    pub bytes: u64,
    /// Bytes of objects.
    pub live_bytes: u64,
    /// Bytes that are reserved for puts.
    pub writing_bytes: u64,
    /// Bytes of removed or evicted objects that are not free yet.
    pub draining_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
}

impl Store {
    /// Returns the tenants with their quotas and usage, sorted by name.
    pub fn tenants(&self) -> Result<Vec<TenantInfo>, StoreError> {
        self.of_all_masters(|master, deadline| self.tenants_of(master, deadline)).map(|parts| {
            let mut tenants: BTreeMap<String, TenantInfo> = BTreeMap::new();
            for part in parts.into_iter().flatten() {
                let sum = tenants.entry(part.name.clone()).or_default();
                *sum = TenantInfo {
                    name: part.name,
                    // All masters learn a new quota, one after the other: a limit of any of them is shown.
                    bytes_max: sum.bytes_max.max(part.bytes_max),
                    objects_max: sum.objects_max.max(part.objects_max),
                    bytes: sum.bytes + part.bytes,
                    objects: sum.objects + part.objects,
                    generation: sum.generation.max(part.generation),
                };
            }
            tenants.into_values().collect()
        })
    }

    fn tenants_of(&self, master: &Master, deadline: Instant) -> Result<Vec<TenantInfo>, StoreError> {
        let (mut all, mut cursor) = (vec![], Bytes::new());
        loop {
            let (context, page) = self.page_of(cursor, deadline);
            let request = v1::GetTenantsRequest { context, page };
            let response = self
                .inner
                .cluster
                .call(master, deadline, move |mut master| async move { master.get_tenants(request).await })?;
            check_context(&response.context)?;
            all.extend(response.tenants.into_iter().map(|tenant| TenantInfo {
                name: tenant.name,
                bytes_max: tenant.bytes_max,
                objects_max: tenant.objects_max,
                bytes: tenant.bytes,
                objects: tenant.objects,
                generation: tenant.generation,
            }));
            if response.next_cursor.is_empty() {
                return Ok(all);
            }
            cursor = response.next_cursor;
        }
    }

    /// Sets the quota of a tenant, which need not be the one of this store; 0 is no limit. The masters keep it, and split
    /// it among the groups by their usage. A tenant over its quota loses its oldest objects to its new ones, and is the
    /// first that an eviction visits. Other masters of a cluster learn it within a second.
    pub fn set_tenant_quota(&self, tenant: &str, bytes_max: u64, objects_max: u64) -> Result<(), StoreError> {
        let tenant = Tenant::new(tenant)
            .map_err(|_| StoreError::InvalidArgument { what: "a tenant", rule: "a name of 1 to 64 bytes" })?;
        let deadline = self.inner.deadline();
        let mut backoff = RETRY_BACKOFF;
        loop {
            let mut result = Err(StoreError::refused(ErrorCode::WrongMaster));
            // One master that accepts it is enough: it writes it to where all of them read it.
            for master in self.inner.cluster.masters().hosts() {
                result = self.set_quota_at(master, tenant, (bytes_max, objects_max), deadline);
                if !matches!(&result, Err(error) if is_unanswered(error.code())) {
                    break;
                }
            }
            match result {
                Err(error) if is_unanswered(error.code()) && Instant::now() < deadline => {
                    self.wait_for_masters(backoff.pause(Duration::ZERO, next_counter()), deadline);
                }
                done => return done,
            }
        }
    }

    fn set_quota_at(
        &self,
        master: &Master,
        tenant: Tenant<'_>,
        (bytes_max, objects_max): (u64, u64),
        deadline: Instant,
    ) -> Result<(), StoreError> {
        let context = RequestContext { tenant, ..self.inner.cluster.context(deadline) };
        let request = v1::SetTenantQuotaRequest { context: Some(context.to_wire()), bytes_max, objects_max };
        let response =
            self.inner.cluster.call(master, self.attempt_end(deadline), move |mut master| async move {
                master.set_tenant_quota(request).await
            })?;
        check_context(&response.context)
    }

    /// Evicts objects until at most `target_permille` thousandths of the memory are used, in the order in which the masters
    /// evict under pressure. Leased and hard-pinned objects stay. With a disk tier the objects move to disk, in the
    /// background. Returns what was evicted when no more can be, or at the timeout.
    pub fn evict(&self, target_permille: u32) -> Result<Evicted, StoreError> {
        if target_permille > 1000 {
            return Err(StoreError::InvalidArgument { what: "target_permille", rule: "0 to 1,000" });
        }
        let deadline = self.inner.deadline();
        let mut sum = Evicted::default();
        for master in self.inner.cluster.masters().hosts() {
            loop {
                let context = Some(self.inner.cluster.context(deadline).to_wire());
                let request = v1::EvictRequest { context, target_permille };
                let response = self
                    .inner
                    .cluster
                    .call(master, deadline, move |mut master| async move { master.evict(request).await })?;
                check_context(&response.context)?;
                sum.objects += response.objects;
                sum.bytes += response.bytes;
                // One call evicts a bounded number.
                if response.objects == 0 || Instant::now() >= deadline {
                    break;
                }
            }
        }
        Ok(sum)
    }

    /// Returns the segments of all nodes, or of one, without disks, sorted by node and id.
    pub fn segments(&self, node: Option<NodeId>) -> Result<Vec<SegmentInfo>, StoreError> {
        let parts = self.of_all_masters(|master, deadline| self.segments_of(master, node, deadline))?;
        let mut segments: Vec<SegmentInfo> = parts.into_iter().flatten().collect();
        segments.sort_by_key(|segment| (segment.node, segment.segment));
        // A segment whose group moves may be listed twice.
        segments.dedup_by_key(|segment| (segment.node, segment.segment));
        Ok(segments)
    }

    fn segments_of(
        &self,
        master: &Master,
        node: Option<NodeId>,
        deadline: Instant,
    ) -> Result<Vec<SegmentInfo>, StoreError> {
        let (mut all, mut cursor) = (vec![], Bytes::new());
        loop {
            let (context, page) = self.page_of(cursor, deadline);
            let request = v1::ListSegmentsRequest { context, page, node: node.map_or(0, |node| node.0) };
            let response = self.inner.cluster.call(master, deadline, move |mut master| async move {
                master.list_segments(request).await
            })?;
            check_context(&response.context)?;
            all.extend(response.segments.iter().filter_map(segment_info));
            if response.next_cursor.is_empty() {
                return Ok(all);
            }
            cursor = response.next_cursor;
        }
    }

    /// Starts the drain of one segment: it accepts no new objects, and its objects move to other segments, or with `evict`
    /// are evicted unless they are in use. [`Store::segments`] tells how far it is. Fails with `NotFound` if no such segment
    /// is mounted. The order is known to the master of its group alone, and ends when another master takes the group over.
    pub fn drain_segment(&self, node: NodeId, segment: SegmentId, evict: bool) -> Result<(), StoreError> {
        let wanted = v1::SegmentRef { node: node.0, segment: segment.0 };
        let started = self.of_all_masters(|master, deadline| {
            let context = Some(self.inner.cluster.context(deadline).to_wire());
            let request = v1::DrainSegmentRequest { context, segment: Some(wanted), evict };
            let response = self.inner.cluster.call(master, deadline, move |mut master| async move {
                master.drain_segment(request).await
            })?;
            match check_context(&response.context) {
                // Another master has it.
                Err(error) if error.code() == ErrorCode::NotFound => Ok(false),
                done => done.map(|()| true),
            }
        })?;
        match started.contains(&true) {
            true => Ok(()),
            false => Err(StoreError::refused(ErrorCode::NotFound)),
        }
    }

    /// Calls all masters, one after the other. Repeats it until the deadline while a group moves or has no master, because
    /// its part would be missing.
    pub(crate) fn of_all_masters<T>(
        &self,
        call: impl Fn(&Master, Instant) -> Result<T, StoreError>,
    ) -> Result<Vec<T>, StoreError> {
        let deadline = self.inner.deadline();
        let mut backoff = RETRY_BACKOFF;
        loop {
            let masters = self.inner.cluster.masters();
            let parts = match masters.is_complete() {
                true => masters.hosts().map(|master| call(master, self.attempt_end(deadline))).collect(),
                false => Err(StoreError::refused(ErrorCode::WrongMaster)),
            };
            match parts {
                Err(error) if is_unanswered(error.code()) && Instant::now() < deadline => {
                    self.wait_for_masters(backoff.pause(Duration::ZERO, next_counter()), deadline);
                }
                done => return done,
            }
        }
    }

    /// Returns the end of one attempt at one master: with several, one that does not respond may no longer be a master, and
    /// the rest of the time is for another attempt.
    pub(crate) fn attempt_end(&self, deadline: Instant) -> Instant {
        let cluster = &self.inner.cluster;
        match cluster.is_single_master() {
            true => deadline,
            false => deadline.min(Instant::now() + cluster.attempt_timeout()),
        }
    }

    /// Waits, and refreshes the group map.
    fn wait_for_masters(&self, pause: Duration, deadline: Instant) {
        std::thread::sleep(pause);
        let cluster: &Cluster = &self.inner.cluster;
        cluster.refresh_map(cluster.masters().version(), deadline);
    }

    fn page_of(
        &self,
        cursor: Bytes,
        deadline: Instant,
    ) -> (Option<v1::RequestContext>, Option<v1::Pagination>) {
        let context = Some(self.inner.cluster.context(deadline).to_wire());
        (context, Some(v1::Pagination { cursor, limit: BATCH_KEYS_MAX as u32 })) // 4,096
    }
}

/// Converts a segment. `None`: it has no description, or one that this version does not know.
fn segment_info(detail: &v1::SegmentDetail) -> Option<SegmentInfo> {
    let (spec, status) = (detail.spec.as_ref()?, detail.status.as_ref()?);
    let bytes = |units: u32| u64::from(units) * UNIT_BYTES;
    Some(SegmentInfo {
        node: NodeId(detail.node),
        segment: SegmentId(spec.segment),
        medium: Medium::from_number(u8::try_from(spec.medium).ok()?)?,
        group: u16::try_from(spec.group?).ok()?,
        state: match status.state() {
            v1::SegmentState::Serving => SegmentState::Serving,
            v1::SegmentState::Draining => SegmentState::Draining,
            v1::SegmentState::Reporting => SegmentState::Reporting,
            v1::SegmentState::Failed | v1::SegmentState::Unspecified => SegmentState::Failed,
        },
        bytes: bytes(spec.units),
        live_bytes: bytes(status.live_units),
        writing_bytes: bytes(status.writing_units),
        draining_bytes: bytes(status.draining_units),
        free_bytes: bytes(status.free_units),
    })
}
