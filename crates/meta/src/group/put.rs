//! Puts: reservation, completion and revocation.

use std::num::NonZeroU32;
use std::time::Duration;

use moontide_heap::alloc::Align;
use moontide_types::limits::{
    OBJECT_BYTES_MAX, PAGE_BYTES, PAYLOAD_ALIGN, REPLICAS_MAX, STRIPES_MAX, UNIT_BYTES,
};
use moontide_types::record::{PinClass, RecordFlags, RecordLayout};
use moontide_types::{Domain, Epoch, ErrorCode, Medium, NodeId, ObjectId, Place, Spread, UnixMillis};

use super::Group;
use super::exclusion::Certainty;
use super::lookup::{LookupKey, ObjectState};
use super::view::{ObjectView, StripeLocation, stripe_of};
use crate::effect::Effects;
use crate::ids::{NONE, RecordRef, TenantIndex};
use crate::placement::{PlacementRequest, ReplicaSite};
use crate::record::{Record, RecordFlag, SlotLocation};
use crate::record_extension::RecordExtension;
use crate::segment::{Segment, SegmentPhase};
use crate::time::Now;

/// Storage options of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutOptions {
    /// Requested number of replicas.
    pub replicas: u8,
    /// Minimum number of replicas.
    pub replicas_min: u8,
    /// Stripes per replica; `None` splits objects that are longer than the group's maximum stripe length.
    pub stripes: Option<u16>,
    /// Places to try first, in order.
    pub preferred: Vec<Place>,
    /// Node on the writer's host, tried next.
    pub local_node: Option<NodeId>,
    /// Replace a complete object of the same key.
    pub upsert: bool,
    /// The writer moves bytes one-sidedly.
    pub one_sided: bool,
    /// The record has no digests.
    pub digestless: bool,
    /// Storage medium of the replicas.
    pub medium: Medium,
    /// Time to live in milliseconds; 0 is no limit.
    pub ttl_ms: u64,
}

impl Default for PutOptions {
    /// One replica, all other choices left to the group.
    fn default() -> PutOptions {
        PutOptions {
            replicas: 1,
            replicas_min: 1,
            stripes: None,
            preferred: vec![],
            local_node: None,
            upsert: false,
            one_sided: false,
            digestless: false,
            medium: Medium::Memory,
            ttl_ms: 0,
        }
    }
}

/// An object to be put.
#[derive(Clone, Copy, Debug)]
pub struct PutStart<'a> {
    /// Key and id of the object.
    pub object: LookupKey<'a>,
    /// Tenant that owns the object.
    pub tenant: TenantIndex,
    /// Random number of the writing process; 0 is an anonymous writer.
    pub caller: u64,
    /// Length of the object in bytes.
    pub object_len: u64,
    /// Length of the attributes section in its record, in bytes.
    pub attributes_len: u32,
    /// Resistance to eviction.
    pub pin: PinClass,
    /// What the replicas must not share, besides their node.
    pub spread: Option<Spread>,
    /// Disks that shall have the object, besides memory. Best effort: of the nodes with the replicas, those with a disk write it
    /// after the put.
    pub disk_replicas: u8,
    /// Time at which the object expires, if the writer sets one; the earlier of this and the time to live counts.
    pub expires: Option<UnixMillis>,
    /// Label of objects that are leased and evicted together.
    pub cohort: Option<&'a [u8]>,
    /// Hash of the preceding block.
    pub parent: Option<&'a [u8]>,
    /// Storage options.
    pub options: &'a PutOptions,
}

/// Reserved space. The object's `root` is 0.
#[derive(Clone, Copy, Debug)]
pub struct Reservation<'a> {
    /// Epoch, length and locations.
    pub object: ObjectView<'a>,
    /// Duration of the reservation, counted from now.
    pub window: Duration,
}

/// Result of a put's writes.
#[derive(Clone, Copy, Debug)]
pub struct PutEnd<'a> {
    /// Id of the object.
    pub id: ObjectId,
    /// Version from the reservation.
    pub epoch: Epoch,
    /// Root digest of the object.
    pub root: u64,
    /// Outcome per replica, in the reservation's order; `None` is success.
    pub outcomes: &'a [Option<ErrorCode>],
    /// Roots of the stripes, if there are several.
    pub stripe_roots: &'a [u64],
    /// The put may replace an existing version, and the caller relies on it.
    pub replaces: bool,
}

/// Choices of the strategy before the group scans all segments.
const PLACEMENT_ATTEMPTS: usize = 8;

/// Maximum number of objects that a put may evict immediately to stay within its tenant's quota.
const QUOTA_VICTIMS_MAX: usize = 64;

/// Division of an object into stripes.
struct StripePlan {
    stripes: usize,
    stripe_len: u64,
    /// Units of each stripe's record but the last one's, and of the last one's.
    units: NonZeroU32,
    last_units: NonZeroU32,
    align: Align,
}

impl StripePlan {
    /// Units of one replica.
    fn all_units(&self) -> u64 {
        u64::from(self.units.get()) * (self.stripes as u64 - 1) + u64::from(self.last_units.get())
    }

    /// Number of stripes that are as long as the first one.
    fn full_stripes(&self) -> usize {
        self.stripes - usize::from(self.last_units < self.units)
    }

    /// Number of full stripes that an empty segment holds.
    fn stripes_in(&self, segment_units: u32) -> usize {
        let left = segment_units.checked_sub(self.units.get());
        left.map_or(0, |left| 1 + (left / self.aligned_units()) as usize)
    }

    /// Whether the last stripe fits into an empty segment next to as many full ones as fit.
    fn last_fits_in(&self, segment_units: u32) -> bool {
        let full = self.stripes_in(segment_units) as u64 * u64::from(self.aligned_units());
        u64::from(segment_units) >= full + u64::from(self.last_units.get())
    }

    /// Distance of two stripes in a segment.
    fn aligned_units(&self) -> u32 {
        let align_units = if self.align == Align::Page { (PAYLOAD_ALIGN / UNIT_BYTES) as u32 } else { 1 };
        self.units.get().next_multiple_of(align_units)
    }
}

/// Whether the options of a put allow this segment.
pub(super) fn may_hold(segment: &Segment, put: &PutStart<'_>) -> bool {
    segment.medium == put.options.medium && segment.tenant.is_none_or(|tenant| tenant == put.tenant)
}

impl Group {
    /// Reserves space. A complete object of the same key is `AlreadyExists` unless it is to be replaced; one that
    /// another caller is writing is `InProgress`; one that the same caller was writing is restarted. One that does not fit
    /// into the empty memory of the nodes is `TooLarge`; [`largest_object`](Group::largest_object) fits.
    pub fn put_start(
        &mut self,
        now: Now,
        put: &PutStart<'_>,
        effects: &mut Effects,
    ) -> Result<Reservation<'_>, ErrorCode> {
        let PutOptions { replicas, replicas_min, .. } = *put.options;
        if replicas == 0 || usize::from(replicas) > REPLICAS_MAX || !(1..=replicas).contains(&replicas_min) {
            return Err(ErrorCode::InvalidArgument);
        }
        if put.options.medium == Medium::Disk {
            return Err(ErrorCode::Unsupported); // objects reach a disk by offload only
        }
        let existing = self.find_id(put.object.id);
        if let Some(at) = existing {
            let may_replace = self.may_replace(at, put, now);
            if may_replace == Err(ErrorCode::AlreadyExists) {
                // The writer computed it once more: it would have used it.
                self.note_use(at);
            }
            may_replace?;
        } else if !put.options.upsert && self.find_in_handoff(&put.object, now, &mut vec![]).is_some() {
            return Err(ErrorCode::AlreadyExists);
        }
        let plan = self.plan_stripes(put)?;
        self.make_quota_space(now, put, &plan, effects)?;
        // The eviction may have changed the record's number.
        let existing = self.find_id(put.object.id);
        let locations = match self.place_replicas(put, &plan) {
            Ok(locations) => locations,
            Err(code) => {
                let units = plan.all_units() * u64::from(replicas_min);
                let space_would_help = self.space_would_help(put, &plan);
                if space_would_help {
                    self.request_space(now, put, units, effects);
                }
                if !space_would_help && self.never_fits(put, &plan) && self.expects_no_more_memory(now) {
                    return Err(ErrorCode::TooLarge);
                }
                self.stats.puts_no_space += 1;
                return Err(code);
            }
        };
        let epoch = match self.next_epoch() {
            Ok(epoch) => epoch,
            Err(code) => {
                self.unreserve(&locations);
                return Err(code);
            }
        };
        let replaces_complete = existing.is_some_and(|at| !self.slab.get(at).has(RecordFlag::Writing));
        if put.options.upsert || replaces_complete {
            self.add_replacement_tombstone(put.object.id, epoch.predecessor(), now);
        }
        if let Some(at) = existing {
            self.replace_object(at, now, put.object.id, effects);
        }
        let at = match self.add_reservation(now, put, &plan, epoch, &locations) {
            Ok(at) => at,
            Err(code) => {
                self.unreserve(&locations);
                self.invalidate(put.tenant, put.object.id, false);
                return Err(code);
            }
        };
        self.stats.puts_started += 1;
        let record = *self.slab.get(at);
        let mut views: Vec<StripeLocation> = std::mem::take(&mut self.scratch);
        views.clear();
        let replicas = self.replica_views(&record, &mut views);
        self.scratch = views;
        let object = self.object_view(&record, &self.scratch, replicas);
        Ok(Reservation { object, window: self.config.reservation })
    }

    /// Completes a put. May be repeated: a complete object of this version stays complete.
    ///
    /// `Gone`: the reservation is over, or no replica was written. `Retry`: nodes have yet to report, an older version is
    /// still being killed, or an exclusion is not durable yet; the caller repeats the call. `Pending`: the object is
    /// complete, but an unreachable node may have the version that it replaces, and return with it after this version is
    /// lost.
    pub fn put_end(&mut self, now: Now, end: &PutEnd<'_>, effects: &mut Effects) -> Result<(), ErrorCode> {
        let certainty = if end.replaces { self.certainty(now) } else { Certainty::Certain };
        if certainty == Certainty::AfterExclusion {
            return Err(ErrorCode::Retry);
        }
        self.complete_put(now, end, effects)?;
        let uncertain = end.replaces
            && (certainty == Certainty::Uncertain
                || self.disks_are_returning()
                || self.uncertain_replacements.contains(&end.id))
            && !moontide_rt::mutation_enabled("upsert-certain-while-unsettled");
        if !uncertain {
            return Ok(());
        }
        // The PutStart may have been answered by the preceding master, or before a node left.
        self.add_replacement_tombstone(end.id, end.epoch.predecessor(), now);
        Err(ErrorCode::Pending)
    }

    fn complete_put(&mut self, now: Now, end: &PutEnd<'_>, effects: &mut Effects) -> Result<(), ErrorCode> {
        if !end.outcomes.is_empty() && end.outcomes.iter().all(Option::is_some) {
            // The writer reports that it wrote nothing: it must start again, whatever nodes have yet to report. If the
            // object is nevertheless complete, this call is a late repetition and handled like any other.
            if self.put_revoke(now, end.id, end.epoch, effects) != Err(ErrorCode::AlreadyExists) {
                return Err(ErrorCode::Gone);
            }
        }
        let Some(at) = self.find_id(end.id) else {
            return Err(if self.memory_is_unsettled(now) { ErrorCode::Retry } else { ErrorCode::Gone });
        };
        let record = *self.slab.get(at);
        if record.epoch() != end.epoch && !moontide_rt::mutation_enabled("put-end-without-epoch") {
            // The existing version is newer, or it is an older one from a report: then this put's version may still be
            // reported.
            let may_come = record.epoch() < end.epoch && self.memory_is_unsettled(now);
            return Err(if may_come { ErrorCode::Retry } else { ErrorCode::Gone });
        }
        let skip_kill_check = moontide_rt::mutation_enabled("upsert-before-kill");
        if self.replacing.contains_key(&end.id) && !skip_kill_check {
            return Err(ErrorCode::Retry);
        }
        // A complete version does not wait for older ones that a node reports later, but its replacement is not certain yet.
        if end.replaces
            && self.unconfirmed_versions(end.id).any(|older| older.epoch < end.epoch)
            && !skip_kill_check
        {
            return Err(ErrorCode::Retry);
        }
        if !record.has(RecordFlag::Writing) {
            // The root of an object with missing stripes may not be known yet.
            return match record.root == end.root {
                true => Ok(()),
                false if self.lacks_stripes(&record) => Err(ErrorCode::Retry),
                false => Err(ErrorCode::InvalidArgument),
            };
        }
        // An older version that a node reported, or that was released a moment ago, may still be READY there.
        if self.has_unconfirmed_kill(end.id) && !skip_kill_check {
            return Err(ErrorCode::Retry);
        }
        let stripes = self.stripes(&record);
        if stripes > 1 && end.stripe_roots.len() != stripes {
            return Err(ErrorCode::InvalidArgument);
        }
        // A reservation from a report lists its locations in order of arrival, so the failed replica is not known.
        // Locations reported as READY count; the others count only if nothing failed.
        let rebuilt = record.has(RecordFlag::Reported);
        let all_written = end.outcomes.iter().all(Option::is_none);
        for replica in 0..self.location_count(&record) / stripes {
            let locations = replica * stripes..(replica + 1) * stripes;
            let written = if rebuilt {
                all_written || locations.clone().all(|index| self.is_committed(&record, index))
            } else {
                end.outcomes.get(replica).is_some_and(Option::is_none)
            };
            let readable = locations.clone().all(|index| self.is_readable(self.location(&record, index)));
            if !(written && readable) {
                for index in locations {
                    self.release_location(at, index, None, effects);
                }
            }
        }
        if !self.has_complete_replica(self.slab.get(at)) {
            self.drop_object(at, now, effects);
            let may_come = self.memory_is_unsettled(now) && rebuilt;
            return Err(if may_come { ErrorCode::Retry } else { ErrorCode::Gone });
        }
        if stripes > 1 {
            self.extension_mut(at).stripe_roots = end.stripe_roots.to_vec();
        }
        self.complete_object(at, end.root);
        self.repair_if_lacking(at);
        Ok(())
    }

    /// Releases a reservation.
    pub fn put_revoke(
        &mut self,
        now: Now,
        id: ObjectId,
        epoch: Epoch,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        let at = self.find_id(id).ok_or(ErrorCode::Gone)?;
        let record = self.slab.get(at);
        match (record.epoch() == epoch, record.has(RecordFlag::Writing)) {
            (true, true) => {
                self.drop_object(at, now, effects);
                Ok(())
            }
            (true, false) => Err(ErrorCode::AlreadyExists),
            (false, _) => Err(ErrorCode::Gone),
        }
    }

    pub(super) fn is_committed(&self, record: &Record, index: usize) -> bool {
        if index == 0 {
            return record.has(RecordFlag::Committed);
        }
        self.extensions
            .get(record.extension)
            .is_some_and(|extension| extension.committed.get(index) == Some(&true))
    }

    /// Whether a put may replace the existing record of its id.
    fn may_replace(&self, at: RecordRef, put: &PutStart<'_>, now: Now) -> Result<(), ErrorCode> {
        let (record, key) = self.slab.with_key(at);
        if key != put.object.key.as_bytes() {
            // Two keys with one id of 128 keyed bits: a wrong id from the caller is more likely.
            return Err(ErrorCode::InvalidArgument);
        }
        match self.state_of(record, now) {
            ObjectState::Gone => Ok(()),
            ObjectState::Complete if put.options.upsert => Ok(()),
            ObjectState::Complete => Err(ErrorCode::AlreadyExists),
            ObjectState::Writing if record.root == put.caller && put.caller != 0 => Ok(()),
            ObjectState::Writing => Err(ErrorCode::InProgress),
        }
    }

    /// Maximum stripe length of an object that the group may split freely: two stripes, with digests and trailers, fit
    /// into the largest segment that the object may use. Two, because a segment that has to be empty for a stripe to
    /// fit would rarely accept one.
    fn stripe_bytes_max(&self, put: &PutStart<'_>, trailer_len: u64) -> u64 {
        let Some(units) = self.sizes.largest(put.options.medium, put.tenant) else {
            return self.config.stripe_bytes_max;
        };
        let half = u64::from(units) * UNIT_BYTES / 2 / PAYLOAD_ALIGN * PAYLOAD_ALIGN;
        let digests_len = half.div_ceil(PAGE_BYTES) * 8;
        let payload = half.saturating_sub(digests_len + trailer_len) / PAGE_BYTES * PAGE_BYTES;
        self.config.stripe_bytes_max.min(payload).max(PAGE_BYTES)
    }

    /// Returns the memory units and the alignment of one stripe's record, for an object on disk.
    pub(super) fn units_of_stripe(&self, at: RecordRef, stripe: usize) -> Option<(NonZeroU32, Align)> {
        let (record, key) = self.slab.with_key(at);
        let extension = self.extensions.get(record.extension);
        let stripe_len = extension.map_or(record.object_len(), |extension| extension.stripe_len);
        let part = stripe_of(record.object_len(), stripe_len, stripe, self.stripes(record));
        let key_len = (4 + self.tenants.get(record.tenant()).name.len() + key.len()) as u32;
        let layout = RecordLayout::new(part.len, key_len, record.attributes_len(), RecordFlags::NONE).ok()?;
        let align = if stripe_len >= PAYLOAD_ALIGN { Align::Page } else { Align::Unit };
        Some((NonZeroU32::new(layout.units())?, align))
    }

    /// Divides the object into stripes, and computes the space of their records.
    fn plan_stripes(&self, put: &PutStart<'_>) -> Result<StripePlan, ErrorCode> {
        let len = put.object_len;
        if len > OBJECT_BYTES_MAX {
            return Err(ErrorCode::TooLarge);
        }
        let key_len = 4 + self.tenants.get(put.tenant).name.len() + put.object.key.as_bytes().len();
        let trailer_len = key_len as u64 + u64::from(put.attributes_len);
        let requested = match put.options.stripes {
            Some(stripes) => u64::from(stripes).max(1),
            None => len.div_ceil(self.stripe_bytes_max(put, trailer_len)).max(1),
        };
        // Stripes begin on pages. Rounding up may give fewer stripes than requested, but no empty one.
        // A single one is as long as the object: nodes report it so.
        let stripe_len = match requested {
            1 => len,
            _ => len.div_ceil(requested).next_multiple_of(PAGE_BYTES).min(len),
        };
        let stripes = if stripe_len == 0 { 1 } else { len.div_ceil(stripe_len).max(1) };
        if stripes > STRIPES_MAX as u64 {
            return Err(ErrorCode::TooLarge);
        }
        let stripes = stripes as usize;
        let flags = if put.options.digestless { RecordFlags::DIGESTLESS } else { RecordFlags::NONE };
        let units = |stripe: usize| -> Result<NonZeroU32, ErrorCode> {
            let part = stripe_of(len, stripe_len, stripe, stripes);
            let layout = RecordLayout::new(part.len, key_len as u32, put.attributes_len, flags);
            let layout = layout.map_err(|_| ErrorCode::TooLarge)?;
            Ok(NonZeroU32::new(layout.units()).expect("record has at least one unit"))
        };
        let align = if stripe_len >= PAYLOAD_ALIGN { Align::Page } else { Align::Unit };
        Ok(StripePlan { stripes, stripe_len, units: units(0)?, last_units: units(stripes - 1)?, align })
    }

    /// Makes space in the tenant's quota: at the limit, evicts the tenant's oldest objects. An object that is to be
    /// replaced does not count and is not evicted: it has to be killed.
    fn make_quota_space(
        &mut self,
        now: Now,
        put: &PutStart<'_>,
        plan: &StripePlan,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        let bytes = plan.all_units() * UNIT_BYTES * u64::from(put.options.replicas);
        let replaced = self.find_id(put.object.id).map(|at| self.tenant_bytes(self.slab.get(at)));
        for _ in 0..QUOTA_VICTIMS_MAX {
            if self.tenants.get(put.tenant).fits_quota(bytes, replaced) {
                return Ok(());
            }
            if self.evict_from(put.tenant, put.object.id, now, effects).is_none() {
                break;
            }
        }
        let fits = self.tenants.get(put.tenant).fits_quota(bytes, replaced);
        if fits { Ok(()) } else { Err(ErrorCode::QuotaExceeded) }
    }

    /// Bytes that a record is charged to its tenant's quota.
    fn tenant_bytes(&self, record: &Record) -> u64 {
        let locations = (0..self.location_count(record)).map(|index| self.location(record, index));
        let units = locations
            .filter(|location| !location.is_lost())
            .map(|location| u64::from(self.segment(location.segment).extent(location.block).units));
        units.sum::<u64>() * UNIT_BYTES
    }

    /// Reserves locations for all replicas that fit, replica by replica; at least `replicas_min`.
    fn place_replicas(
        &mut self,
        put: &PutStart<'_>,
        plan: &StripePlan,
    ) -> Result<Vec<SlotLocation>, ErrorCode> {
        let mut locations: Vec<SlotLocation> =
            Vec::with_capacity(usize::from(put.options.replicas) * plan.stripes);
        let mut sites: Vec<ReplicaSite> = vec![];
        let writer = put.options.local_node.and_then(|node| self.nodes.get(&node)).map(|node| node.topology);
        let domains_max = self.domains_per_replica(put, plan);
        for replica in 0..usize::from(put.options.replicas) {
            let first = locations.len();
            for stripe in 0..plan.stripes {
                let units = if stripe + 1 == plan.stripes { plan.last_units } else { plan.units };
                let request = PlacementRequest { writer, replicas: &sites };
                match self.place_stripe(put, &request, units, plan.align, (&locations[first..], domains_max))
                {
                    Some(location) => locations.push(location),
                    None => {
                        self.unreserve(&locations[first..]);
                        locations.truncate(first);
                        break;
                    }
                }
            }
            if locations.len() == first {
                // Another replica needs other nodes than these and fits no better.
                if replica < usize::from(put.options.replicas_min) {
                    self.unreserve(&locations);
                    return Err(ErrorCode::NoSpace);
                }
                break;
            }
            for location in &locations[first..] {
                let placed = self.segment(location.segment).site();
                // Stripes share nodes, and every further stripe scans this list.
                if sites.iter().all(|site| site.node != placed.node) {
                    sites.push(placed);
                }
            }
        }
        Ok(locations)
    }

    /// Number of domains that the stripes of one replica may use: replicas have no domain in common, so the first must not
    /// take all of them. A domain is a node, or a host, rack or zone.
    fn domains_per_replica(&self, put: &PutStart<'_>, plan: &StripePlan) -> usize {
        if plan.stripes == 1 || put.options.replicas == 1 {
            return usize::MAX;
        }
        let domains = self.stripes_by_domain(put, plan).len();
        (domains / usize::from(put.options.replicas)).max(1)
    }

    /// Returns the domains that could hold stripes if they were empty, with the number of stripes of each.
    fn stripes_by_domain(&self, put: &PutStart<'_>, plan: &StripePlan) -> Vec<(Domain<u32>, usize)> {
        let mut domains: Vec<(Domain<u32>, usize)> = vec![];
        for candidate in &self.candidates {
            let segment = self.segment(candidate.index);
            let held = if may_hold(segment, put) { plan.stripes_in(segment.units) } else { 0 };
            if held > 0 {
                domains.push((segment.site().domain(put.spread), held));
            }
        }
        domains.sort_unstable();
        domains.dedup_by(|next, sum| {
            let same = next.0 == sum.0;
            sum.1 += if same { next.1 } else { 0 };
            same
        });
        domains
    }

    /// Reserves a location for one stripe: in a preferred place, else one chosen by the strategy, else any. `own` are
    /// the replica's other stripes, which use at most `domains_max` domains.
    fn place_stripe(
        &mut self,
        put: &PutStart<'_>,
        request: &PlacementRequest<'_>,
        units: NonZeroU32,
        align: Align,
        (own, domains_max): (&[SlotLocation], usize),
    ) -> Option<SlotLocation> {
        let options = put.options;
        let mut own_domains: Vec<Domain<u32>> = vec![];
        if domains_max < usize::MAX {
            for location in own {
                let domain = self.segment(location.segment).site().domain(put.spread);
                if !own_domains.contains(&domain) {
                    own_domains.push(domain);
                }
            }
        }
        let only = (own_domains.len() >= domains_max).then_some(&own_domains[..]);
        let mut preferred: Vec<u32> = vec![];
        for place in options.preferred.iter().copied().chain(options.local_node.map(Place::from)) {
            match place.segment {
                Some(segment) => preferred.extend(self.by_name.get(&(place.node, segment))),
                None => {
                    preferred.extend(self.nodes.get(&place.node).into_iter().flat_map(|node| &node.segments));
                }
            }
        }
        for index in preferred {
            if let Some(location) = self.try_segment(index, put, request, only, units, align) {
                return Some(location);
            }
        }
        if self.candidates.is_empty() {
            return None;
        }
        let used = |index: u32| own.iter().any(|location| location.segment == index);
        for _ in 0..PLACEMENT_ATTEMPTS {
            let chosen = self.placement.choose(&self.candidates, request, &mut self.rng);
            let index = self.candidates[chosen].index;
            // Stripes of one replica are transferred in parallel, so they should not share a segment.
            if used(index) && own.len() < self.candidates.len() {
                continue;
            }
            if let Some(location) = self.try_segment(index, put, request, only, units, align) {
                return Some(location);
            }
        }
        let start = self.rng.index(self.candidates.len());
        // First the segments without a stripe of this replica.
        for may_share in [false, true] {
            for at in (start..self.candidates.len()).chain(0..start) {
                let index = self.candidates[at].index;
                if used(index) != may_share {
                    continue;
                }
                if let Some(location) = self.try_segment(index, put, request, only, units, align) {
                    return Some(location);
                }
            }
        }
        None
    }

    fn try_segment(
        &mut self,
        index: u32,
        put: &PutStart<'_>,
        request: &PlacementRequest<'_>,
        only: Option<&[Domain<u32>]>,
        units: NonZeroU32,
        align: Align,
    ) -> Option<SlotLocation> {
        let segment = self.segments[index as usize].as_mut()?;
        let allowed = segment.phase == SegmentPhase::Serving
            && may_hold(segment, put)
            && segment.free_units() >= units.get()
            && request.replicas.iter().all(|other| other.is_apart(&segment.site(), put.spread))
            && only.is_none_or(|only| only.contains(&segment.site().domain(put.spread)));
        if !allowed {
            return None;
        }
        let location = segment.reserve(index, units, align)?;
        segment.one_sided |= put.options.one_sided;
        self.note_free(index);
        Some(location)
    }

    /// Whether only free space was missing. A put that could not be placed in an empty group either (no segment accepts
    /// new objects yet, too few domains, too large a stripe or too many of them, no such medium) must not evict objects
    /// in vain.
    fn space_would_help(&self, put: &PutStart<'_>, plan: &StripePlan) -> bool {
        let replicas = usize::from(put.options.replicas_min);
        let mut domains = self.stripes_by_domain(put, plan);
        if domains.len() < replicas {
            return false;
        }
        // Assigns the domains with most space first, `each` per replica: the last replica has the least.
        domains.sort_by_key(|&(_, stripes)| std::cmp::Reverse(stripes));
        let each = self.domains_per_replica(put, plan).min(domains.len() / replicas);
        (0..replicas).all(|replica| {
            let own = &domains[replica * each..(replica + 1) * each];
            let held: usize = own.iter().map(|(_, held)| held).sum();
            let last_fits = || {
                let is_own = |segment: &Segment| {
                    let is_among = |domain| own.iter().any(|&(own, _)| own == domain);
                    replicas == 1 || is_among(segment.site().domain(put.spread))
                };
                let mut segments = self.candidates.iter().map(|candidate| self.segment(candidate.index));
                segments.any(|segment| {
                    may_hold(segment, put) && is_own(segment) && plan.last_fits_in(segment.units)
                })
            };
            held >= plan.stripes || (held >= plan.full_stripes() && last_fits())
        })
    }

    /// Returns the length of an object that fits into empty memory with the options of this put, while one that is a byte longer
    /// does not. `None`: none fits, e.g. because there are fewer nodes, or domains, than
    /// replicas.
    pub fn largest_object(&self, put: &PutStart<'_>) -> Option<u64> {
        let (mut fitting, mut too_large) = (0, OBJECT_BYTES_MAX + 1);
        if !self.fits_into_empty_memory(put, fitting) {
            return None;
        }
        while too_large - fitting > 1 {
            let middle = fitting + (too_large - fitting) / 2;
            if self.fits_into_empty_memory(put, middle) {
                fitting = middle;
            } else {
                too_large = middle;
            }
        }
        Some(fitting)
    }

    fn fits_into_empty_memory(&self, put: &PutStart<'_>, object_len: u64) -> bool {
        let put = PutStart { object_len, ..*put };
        self.plan_stripes(&put).is_ok_and(|plan| self.space_would_help(&put, &plan))
    }

    /// Whether a put that does not fit into empty memory fails because of its size. Of several replicas only the sum of the
    /// stripes counts: [`space_would_help`](Self::space_would_help) does not try all divisions of the domains.
    fn never_fits(&self, put: &PutStart<'_>, plan: &StripePlan) -> bool {
        let replicas = usize::from(put.options.replicas_min);
        let held: usize = self.stripes_by_domain(put, plan).iter().map(|(_, held)| held).sum();
        (replicas == 1 || held < replicas * plan.full_stripes()) && self.fits_into_empty_memory(put, 0)
    }

    /// Whether no node is expected to add memory soon. After the start of a cluster nodes join one after the other.
    fn expects_no_more_memory(&self, now: Now) -> bool {
        let is_settled = |segment: &Segment| {
            segment.is_disk() || matches!(segment.phase, SegmentPhase::Serving | SegmentPhase::Draining)
        };
        now.mono >= self.memory_expected_until.max(self.unknown_nodes_until)
            && self.absent.is_empty()
            && self.segments.iter().flatten().all(is_settled)
    }

    /// Undoes reservations that have not been sent to a client.
    fn unreserve(&mut self, locations: &[SlotLocation]) {
        for &location in locations {
            self.segment_mut(location.segment).unreserve(location);
            self.note_free(location.segment);
        }
    }

    fn add_reservation(
        &mut self,
        now: Now,
        put: &PutStart<'_>,
        plan: &StripePlan,
        epoch: Epoch,
        locations: &[SlotLocation],
    ) -> Result<RecordRef, ErrorCode> {
        let PutStart { object, tenant, .. } = *put;
        let mut record = Record::new(object.id, epoch, tenant, object.key.as_bytes().len(), put.object_len);
        record.root = put.caller;
        record.set_location(locations[0]);
        record.set_until(self.ticker.end(now.mono, self.config.reservation));
        record.set(RecordFlag::Writing, true);
        record.set(RecordFlag::Digestless, put.options.digestless);
        record.set(
            RecordFlag::UnderReplicated,
            locations.len() < usize::from(put.options.replicas) * plan.stripes,
        );
        record.set_pin(put.pin);
        let ttl = (put.options.ttl_ms > 0).then(|| UnixMillis(now.unix.0.saturating_add(put.options.ttl_ms)));
        let expires = [ttl, put.expires].into_iter().flatten().min();
        let extra_replicas = put.options.replicas.saturating_sub(1);
        let is_plain = expires.is_none()
            && put.cohort.is_none()
            && put.parent.is_none()
            && put.spread.is_none()
            && put.disk_replicas == 0;
        if locations.len() > 1 || extra_replicas > 0 || !is_plain {
            let cohort = put.cohort.map_or(NONE, |label| self.cohorts.join(tenant, label, object.id));
            record.extension = self.extensions.add(RecordExtension {
                stripes: plan.stripes as u16, // ≤ STRIPES_MAX
                stripe_len: plan.stripe_len,
                locations: locations[1..].to_vec(),
                committed: vec![],
                stripe_roots: if plan.stripes > 1 { vec![0; plan.stripes] } else { vec![] },
                lacks_stripes: false,
                is_awaited: false,
                expires,
                cohort,
                parent: put.parent.map(Into::into),
                extra_replicas,
                spread: put.spread,
                disk_replicas: put.disk_replicas,
            });
        }
        let added = self.add_object(&record, object.key.as_bytes());
        if added.is_err()
            && let Some(extension) = self.extensions.remove(record.extension)
            && extension.cohort != NONE
        {
            self.cohorts.leave(extension.cohort, object.id);
        }
        added
    }
}
