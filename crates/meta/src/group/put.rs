//! The put: a reservation, its end, and giving it up.

use std::num::NonZeroU32;
use std::time::Duration;

use moontide_heap::alloc::Align;
use moontide_types::bounds::{
    OBJECT_BYTES_MAX, PAGE_BYTES, PAYLOAD_ALIGN, REPLICAS_MAX, STRIPES_MAX, UNIT_BYTES,
};
use moontide_types::record::{Flags, PinClass, RecordLayout};
use moontide_types::{Epoch, ErrorCode, NodeId, ObjectId, SegmentId, UnixMillis};

use super::Group;
use super::lookup::{Ask, ObjectState};
use super::view::{ObjectView, PlaceView, stripe_of};
use crate::effect::Effects;
use crate::extra::Extra;
use crate::placement::{Place as Placed, Wish};
use crate::record::{Flag, NONE, Place, Record};
use crate::segment::{Medium, SegmentPhase};
use crate::slab::Ref;
use crate::tenant::TenantIx;
use crate::time::Now;

/// How an object is to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutOptions {
    /// Replicas wanted.
    pub replicas: u8,
    /// Fewest that are acceptable.
    pub replicas_min: u8,
    /// Stripes per replica; `None` cuts what is longer than the group's longest stripe.
    pub stripes: Option<u16>,
    /// The node on the writer's host, tried before any other.
    pub local_node: Option<NodeId>,
    /// Segments to try next.
    pub preferred_segments: Vec<(NodeId, SegmentId)>,
    /// Nodes to try then.
    pub preferred_nodes: Vec<NodeId>,
    /// Replace a complete object of the same key.
    pub upsert: bool,
    /// The writer moves bytes one-sidedly.
    pub one_sided: bool,
    /// The record has no digests.
    pub digestless: bool,
    /// What the replicas' memory is made of.
    pub medium: Medium,
    /// Time to live in milliseconds; 0 for ever.
    pub ttl_ms: u64,
}

impl Default for PutOptions {
    /// One replica, the rest left to the group.
    fn default() -> PutOptions {
        PutOptions {
            replicas: 1,
            replicas_min: 1,
            stripes: None,
            local_node: None,
            preferred_segments: vec![],
            preferred_nodes: vec![],
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
    /// Its key and id.
    pub ask: Ask<'a>,
    /// Whose it is.
    pub tenant: TenantIx,
    /// Who writes it: a number that the calling process drew. 0 is nobody in particular.
    pub caller: u64,
    /// Its length.
    pub object_len: u64,
    /// Length of the attributes section in its record.
    pub attributes_len: u32,
    /// How strongly it resists eviction.
    pub pin: PinClass,
    /// When it expires, if the writer says so; the earlier of this and the time to live counts.
    pub expires: Option<UnixMillis>,
    /// Label of objects that are leased and evicted together.
    pub cohort: Option<&'a [u8]>,
    /// The block before it.
    pub parent: Option<&'a [u8]>,
    /// How it is to be stored.
    pub options: &'a PutOptions,
}

/// Space that was reserved. The object's `root` is 0.
#[derive(Clone, Copy, Debug)]
pub struct Reservation<'a> {
    /// Epoch, length and places.
    pub object: ObjectView<'a>,
    /// How long the writer has, counted from now.
    pub window: Duration,
}

/// How the writing of an object went.
#[derive(Clone, Copy, Debug)]
pub struct PutEnd<'a> {
    /// The object.
    pub id: ObjectId,
    /// The version that the reservation gave.
    pub epoch: Epoch,
    /// Its root digest.
    pub root: u64,
    /// Outcome per replica, in the reservation's order.
    pub outcomes: &'a [Option<ErrorCode>],
    /// Roots of the stripes, if there are several.
    pub stripe_roots: &'a [u64],
}

/// Segments drawn by the strategy before all of them are looked at.
const DRAWS: usize = 8;

/// Objects that a put may evict at once to stay within its tenant's quota.
const QUOTA_VICTIMS_MAX: usize = 64;

/// How an object is cut.
struct Cut {
    stripes: usize,
    stripe_len: u64,
    /// Units of each stripe's record but the last one's, and of the last one's.
    units: NonZeroU32,
    last_units: NonZeroU32,
    align: Align,
}

impl Cut {
    /// Units of one replica.
    fn all_units(&self) -> u64 {
        u64::from(self.units.get()) * (self.stripes as u64 - 1) + u64::from(self.last_units.get())
    }

    /// How many stripes are as long as the first one; a shorter last one finds room beside them.
    fn full_stripes(&self) -> usize {
        self.stripes - usize::from(self.last_units < self.units)
    }

    /// How many full stripes an empty segment holds.
    fn stripes_in(&self, segment_units: u32) -> usize {
        let align_units = if self.align == Align::Page { (PAYLOAD_ALIGN / UNIT_BYTES) as u32 } else { 1 };
        let left = segment_units.checked_sub(self.units.get());
        left.map_or(0, |left| 1 + (left / self.units.get().next_multiple_of(align_units)) as usize)
    }
}

impl Group {
    /// Reserves space. A complete object of the same key is `AlreadyExists` unless it is to be replaced; one that
    /// somebody else is writing is `InProgress`; one that the same caller was writing is started again.
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
            return Err(ErrorCode::Unsupported); // objects get there when memory is short
        }
        let existing = self.find_id(put.ask.id);
        if let Some(at) = existing {
            self.may_replace(at, put, now)?;
        } else if !put.options.upsert && self.heirloom(&put.ask, now, &mut vec![]).is_some() {
            return Err(ErrorCode::AlreadyExists);
        }
        let cut = self.cut(put)?;
        self.make_quota_room(now, put, &cut, effects)?;
        // What made room may have given the record another name.
        let existing = self.find_id(put.ask.id);
        let places = match self.place_replicas(put, &cut) {
            Ok(places) => places,
            Err(code) => {
                let units = cut.all_units() * u64::from(replicas_min);
                if self.room_would_help(put, &cut) {
                    self.want_space(now, units, effects);
                }
                self.stats.puts_no_space += 1;
                return Err(code);
            }
        };
        let epoch = match self.next_epoch() {
            Ok(epoch) => epoch,
            Err(code) => {
                self.unreserve(&places);
                return Err(code);
            }
        };
        if let Some(at) = existing {
            self.replace_object(at, now, put.ask.id, effects);
        }
        let at = match self.add_reservation(now, put, &cut, epoch, &places) {
            Ok(at) => at,
            Err(code) => {
                self.unreserve(&places);
                self.departs(put.ask.id, false);
                return Err(code);
            }
        };
        self.stats.puts_started += 1;
        let record = *self.slab.get(at);
        let mut views: Vec<PlaceView> = std::mem::take(&mut self.scratch);
        views.clear();
        let replicas = self.replica_views(&record, &mut views);
        self.scratch = views;
        let object = self.object_view(&record, &self.scratch, replicas);
        Ok(Reservation { object, window: self.config.reservation })
    }

    /// Ends a put. May be repeated: an object that is complete in this version stays so.
    ///
    /// `Gone`: the reservation is over, or no replica was written. `Retry`: nodes have yet to report what they have,
    /// or an older version is still being killed; ask again.
    pub fn put_end(&mut self, now: Now, end: &PutEnd<'_>, effects: &mut Effects) -> Result<(), ErrorCode> {
        if !end.outcomes.is_empty() && end.outcomes.iter().all(Option::is_some) {
            // The writer itself says that nothing was written: whatever nodes have yet to report, it is to start again. If
            // the object is complete all the same, this end is a late one, and as good as any other.
            if self.put_revoke(now, end.id, end.epoch, effects) != Err(ErrorCode::AlreadyExists) {
                return Err(ErrorCode::Gone);
            }
        }
        let Some(at) = self.find_id(end.id) else {
            return Err(if self.memory_is_unsettled(now) { ErrorCode::Retry } else { ErrorCode::Gone });
        };
        let record = *self.slab.get(at);
        if record.epoch() != end.epoch && !moontide_types::planted("put-end-without-epoch") {
            // A newer version is there, or an older one that a report brought: then ours may still be reported.
            let may_come = record.epoch() < end.epoch && self.memory_is_unsettled(now);
            return Err(if may_come { ErrorCode::Retry } else { ErrorCode::Gone });
        }
        let early = moontide_types::planted("upsert-before-kill");
        if self.replacing.contains_key(&end.id) && !early {
            return Err(ErrorCode::Retry);
        }
        if !record.has(Flag::Writing) {
            return if record.root == end.root { Ok(()) } else { Err(ErrorCode::InvalidArgument) };
        }
        // An older version that a node brought back, or that was given up a moment ago, may still be alive there.
        if self.has_undead(end.id) && !early {
            return Err(ErrorCode::Retry);
        }
        let stripes = self.stripes(&record);
        if stripes > 1 && end.stripe_roots.len() != stripes {
            return Err(ErrorCode::InvalidArgument);
        }
        // A reservation that a report brought back lists its places in the order in which they were reported: which
        // replica failed is not known then. What a node said to be READY counts, the rest only if nothing failed.
        let rebuilt = record.has(Flag::Reported);
        let all_written = end.outcomes.iter().all(Option::is_none);
        for replica in 0..self.place_count(&record) / stripes {
            let places = replica * stripes..(replica + 1) * stripes;
            let written = if rebuilt {
                all_written || places.clone().all(|index| self.is_committed(&record, index))
            } else {
                end.outcomes.get(replica).is_some_and(Option::is_none)
            };
            let there = places.clone().all(|index| self.is_readable(self.place(&record, index)));
            if !(written && there) {
                for index in places {
                    self.give_up_place(at, index, None, effects);
                }
            }
        }
        if !self.has_complete_replica(self.slab.get(at)) {
            self.drop_object(at, now, effects);
            let may_come = self.memory_is_unsettled(now) && rebuilt;
            return Err(if may_come { ErrorCode::Retry } else { ErrorCode::Gone });
        }
        if stripes > 1 {
            self.extra_mut(at).stripe_roots = end.stripe_roots.to_vec();
        }
        self.complete_object(at, end.root);
        Ok(())
    }

    /// Gives a reservation back.
    pub fn put_revoke(
        &mut self,
        now: Now,
        id: ObjectId,
        epoch: Epoch,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        let at = self.find_id(id).ok_or(ErrorCode::Gone)?;
        let record = self.slab.get(at);
        match (record.epoch() == epoch, record.has(Flag::Writing)) {
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
            return record.has(Flag::Committed);
        }
        self.extras.get(record.extra).is_some_and(|extra| extra.committed.get(index) == Some(&true))
    }

    /// Whether a put may take the place of what is there under its id.
    fn may_replace(&self, at: Ref, put: &PutStart<'_>, now: Now) -> Result<(), ErrorCode> {
        let (record, key) = self.slab.with_key(at);
        if key != put.ask.key.as_bytes() {
            // Two keys with one id of 128 keyed bits: it is more likely that the caller's id is wrong.
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

    /// Longest stripe of an object that the group may cut as it likes: two of them, with what stands behind them, fit
    /// into the largest segment that it may be in. Two, because a segment that has to be empty for a stripe to fit would
    /// hardly ever take one.
    fn stripe_bytes_max(&self, put: &PutStart<'_>, trailer_len: u64) -> u64 {
        let Some(units) = self.sizes.largest(put.options.medium, put.tenant) else {
            return self.config.stripe_bytes_max;
        };
        let half = u64::from(units) * UNIT_BYTES / 2 / PAYLOAD_ALIGN * PAYLOAD_ALIGN;
        let digests_len = half.div_ceil(PAGE_BYTES) * 8;
        let payload = half.saturating_sub(digests_len + trailer_len) / PAGE_BYTES * PAGE_BYTES;
        self.config.stripe_bytes_max.min(payload).max(PAGE_BYTES)
    }

    /// What the record of one stripe of an object that is on disk needs in memory.
    pub(super) fn units_of_stripe(&self, at: Ref, stripe: usize) -> Option<(NonZeroU32, Align)> {
        let (record, key) = self.slab.with_key(at);
        let extra = self.extras.get(record.extra);
        let stripe_len = extra.map_or(record.object_len(), |extra| extra.stripe_len);
        let part = stripe_of(record.object_len(), stripe_len, stripe, self.stripes(record));
        let key_len = (4 + self.tenants.get(record.tenant()).name.len() + key.len()) as u32;
        let layout = RecordLayout::new(part.len, key_len, record.attributes_len(), Flags::NONE).ok()?;
        let align = if stripe_len >= PAYLOAD_ALIGN { Align::Page } else { Align::Unit };
        Some((NonZeroU32::new(layout.units())?, align))
    }

    /// How the object is cut, and what its records need.
    fn cut(&self, put: &PutStart<'_>) -> Result<Cut, ErrorCode> {
        let len = put.object_len;
        if len > OBJECT_BYTES_MAX {
            return Err(ErrorCode::TooLarge);
        }
        let key_len = 4 + self.tenants.get(put.tenant).name.len() + put.ask.key.as_bytes().len();
        let trailer_len = key_len as u64 + u64::from(put.attributes_len);
        let wanted = match put.options.stripes {
            Some(stripes) => u64::from(stripes).max(1),
            None => len.div_ceil(self.stripe_bytes_max(put, trailer_len)).max(1),
        };
        // Stripes begin on pages; rounding up may leave fewer of them than were asked for, and none empty.
        let stripe_len = if wanted == 1 { len } else { len.div_ceil(wanted).next_multiple_of(PAGE_BYTES) };
        let stripes = if stripe_len == 0 { 1 } else { len.div_ceil(stripe_len).max(1) };
        if stripes > STRIPES_MAX as u64 {
            return Err(ErrorCode::TooLarge);
        }
        let stripes = stripes as usize;
        let flags = if put.options.digestless { Flags::DIGESTLESS } else { Flags::NONE };
        let units = |stripe: usize| -> Result<NonZeroU32, ErrorCode> {
            let part = stripe_of(len, stripe_len, stripe, stripes);
            let layout = RecordLayout::new(part.len, key_len as u32, put.attributes_len, flags);
            let layout = layout.map_err(|_| ErrorCode::TooLarge)?;
            Ok(NonZeroU32::new(layout.units()).expect("a record takes at least one unit"))
        };
        let align = if stripe_len >= PAYLOAD_ALIGN { Align::Page } else { Align::Unit };
        Ok(Cut { stripes, stripe_len, units: units(0)?, last_units: units(stripes - 1)?, align })
    }

    /// Within its quota a tenant may put; at its limit its own oldest objects make room. An object that is to be
    /// replaced counts as gone, and stays: it has to be killed, not evicted.
    fn make_quota_room(
        &mut self,
        now: Now,
        put: &PutStart<'_>,
        cut: &Cut,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        let bytes = cut.all_units() * UNIT_BYTES * u64::from(put.options.replicas);
        let replaced = self.find_id(put.ask.id).map(|at| self.tenant_bytes(self.slab.get(at)));
        for _ in 0..QUOTA_VICTIMS_MAX {
            if self.tenants.get(put.tenant).has_room_for(bytes, replaced) {
                return Ok(());
            }
            if self.evict_from(put.tenant, put.ask.id, now, effects).is_none() {
                break;
            }
        }
        let fits = self.tenants.get(put.tenant).has_room_for(bytes, replaced);
        if fits { Ok(()) } else { Err(ErrorCode::QuotaExceeded) }
    }

    /// The bytes for which a record counts in its tenant's quota.
    fn tenant_bytes(&self, record: &Record) -> u64 {
        let places = (0..self.place_count(record)).map(|index| self.place(record, index));
        let units = places
            .filter(|place| !place.is_lost())
            .map(|place| u64::from(self.segment(place.segment).extent(place.block).units));
        units.sum::<u64>() * UNIT_BYTES
    }

    /// Places for all replicas that fit, replica by replica; at least as many as are acceptable.
    fn place_replicas(&mut self, put: &PutStart<'_>, cut: &Cut) -> Result<Vec<Place>, ErrorCode> {
        let mut places: Vec<Place> = Vec::with_capacity(usize::from(put.options.replicas) * cut.stripes);
        let mut others: Vec<Placed> = vec![];
        let near = put.options.local_node.and_then(|node| self.nodes.get(&node)).map(|node| node.topology);
        let nodes_max = self.nodes_per_replica(put, cut);
        for replica in 0..usize::from(put.options.replicas) {
            let first = places.len();
            for stripe in 0..cut.stripes {
                let units = if stripe + 1 == cut.stripes { cut.last_units } else { cut.units };
                let wish = Wish { near, others: &others };
                match self.place_stripe(put, &wish, units, cut.align, (&places[first..], nodes_max)) {
                    Some(place) => places.push(place),
                    None => {
                        self.unreserve(&places[first..]);
                        places.truncate(first);
                        break;
                    }
                }
            }
            if places.len() == first {
                // Another replica needs other nodes than these and fits no better.
                if replica < usize::from(put.options.replicas_min) {
                    self.unreserve(&places);
                    return Err(ErrorCode::NoSpace);
                }
                break;
            }
            for place in &places[first..] {
                let segment = self.segment(place.segment);
                let placed = Placed { node: segment.node, topology: segment.topology };
                // Stripes share nodes, and every further stripe looks through this.
                if others.iter().all(|other| other.node != placed.node) {
                    others.push(placed);
                }
            }
        }
        Ok(places)
    }

    /// How many nodes the stripes of one replica are spread over: replicas have no node in common, so the first must not
    /// take them all.
    fn nodes_per_replica(&self, put: &PutStart<'_>, cut: &Cut) -> usize {
        if cut.stripes == 1 || put.options.replicas == 1 {
            return usize::MAX;
        }
        let nodes = self.stripes_by_node(put, cut).len();
        (nodes / usize::from(put.options.replicas)).max(1)
    }

    /// Nodes that could take stripes if they were empty, and how many each.
    fn stripes_by_node(&self, put: &PutStart<'_>, cut: &Cut) -> Vec<(NodeId, usize)> {
        let mut nodes: Vec<(NodeId, usize)> = vec![];
        for candidate in &self.candidates {
            let segment = self.segment(candidate.index);
            let suits = segment.medium == put.options.medium
                && segment.tenant.is_none_or(|tenant| tenant == put.tenant);
            let held = if suits { cut.stripes_in(segment.units) } else { 0 };
            match nodes.iter_mut().find(|(node, _)| *node == candidate.node) {
                _ if held == 0 => {}
                Some((_, stripes)) => *stripes += held,
                None => nodes.push((candidate.node, held)),
            }
        }
        nodes
    }

    /// A place for one stripe: where the writer wishes, else where the strategy says, else anywhere. Beside it stand the
    /// replica's other stripes, which are on at most so many nodes.
    fn place_stripe(
        &mut self,
        put: &PutStart<'_>,
        wish: &Wish<'_>,
        units: NonZeroU32,
        align: Align,
        (own, nodes_max): (&[Place], usize),
    ) -> Option<Place> {
        let options = put.options;
        let mut own_nodes: Vec<NodeId> = vec![];
        if nodes_max < usize::MAX {
            for place in own {
                let node = self.segment(place.segment).node;
                if !own_nodes.contains(&node) {
                    own_nodes.push(node);
                }
            }
        }
        let only = (own_nodes.len() >= nodes_max).then_some(&own_nodes[..]);
        let mut named: Vec<u32> = vec![];
        if let Some(node) = options.local_node.and_then(|node| self.nodes.get(&node)) {
            named.extend(&node.segments);
        }
        named.extend(options.preferred_segments.iter().filter_map(|name| self.by_name.get(name)));
        for node in options.preferred_nodes.iter().filter_map(|node| self.nodes.get(node)) {
            named.extend(&node.segments);
        }
        for index in named {
            if let Some(place) = self.try_segment(index, put, wish, only, units, align) {
                return Some(place);
            }
        }
        if self.candidates.is_empty() {
            return None;
        }
        let used = |index: u32| own.iter().any(|place| place.segment == index);
        for _ in 0..DRAWS {
            let drawn = self.placement.draw(&self.candidates, wish, &mut self.rng);
            let index = self.candidates[drawn].index;
            // Stripes of one replica are there to be moved in parallel: rather not through one segment.
            if used(index) && own.len() < self.candidates.len() {
                continue;
            }
            if let Some(place) = self.try_segment(index, put, wish, only, units, align) {
                return Some(place);
            }
        }
        let start = self.rng.below(self.candidates.len());
        for at in (start..self.candidates.len()).chain(0..start) {
            let index = self.candidates[at].index;
            if let Some(place) = self.try_segment(index, put, wish, only, units, align) {
                return Some(place);
            }
        }
        None
    }

    fn try_segment(
        &mut self,
        index: u32,
        put: &PutStart<'_>,
        wish: &Wish<'_>,
        only: Option<&[NodeId]>,
        units: NonZeroU32,
        align: Align,
    ) -> Option<Place> {
        let segment = self.segments[index as usize].as_mut()?;
        let allowed = segment.phase == SegmentPhase::Serving
            && segment.medium == put.options.medium
            && segment.tenant.is_none_or(|tenant| tenant == put.tenant)
            && segment.free_units() >= units.get()
            && wish.others.iter().all(|other| other.node != segment.node)
            && only.is_none_or(|only| only.contains(&segment.node));
        if !allowed {
            return None;
        }
        let place = segment.reserve(index, units, align)?;
        segment.one_sided |= put.options.one_sided;
        self.note_free(index);
        Some(place)
    }

    /// Whether nothing but free space was missing. A put that could not be placed in an empty group either (no segment
    /// takes new objects yet, too few nodes, too large a stripe or too many of them, no such medium) must not empty the
    /// cache in vain.
    fn room_would_help(&self, put: &PutStart<'_>, cut: &Cut) -> bool {
        let replicas = usize::from(put.options.replicas_min);
        let mut nodes = self.stripes_by_node(put, cut);
        if nodes.len() < replicas {
            return false;
        }
        // The nodes with most room, so many for each replica: the last of them has the least.
        nodes.sort_by_key(|&(_, stripes)| std::cmp::Reverse(stripes));
        let each = self.nodes_per_replica(put, cut).min(nodes.len() / replicas);
        let held = |replica: usize| -> usize {
            nodes[replica * each..(replica + 1) * each].iter().map(|(_, held)| held).sum()
        };
        (0..replicas).all(|replica| held(replica) >= cut.full_stripes())
    }

    /// Gives back what nobody has heard of.
    fn unreserve(&mut self, places: &[Place]) {
        for &place in places {
            self.segment_mut(place.segment).unreserve(place);
            self.note_free(place.segment);
        }
    }

    fn add_reservation(
        &mut self,
        now: Now,
        put: &PutStart<'_>,
        cut: &Cut,
        epoch: Epoch,
        places: &[Place],
    ) -> Result<Ref, ErrorCode> {
        let PutStart { ask, tenant, .. } = *put;
        let mut record = Record::new(ask.id, epoch, tenant, ask.key.as_bytes().len(), put.object_len);
        record.root = put.caller;
        record.set_place(places[0]);
        record.set_until(self.ticker.end(now.mono, self.config.reservation));
        record.set(Flag::Writing, true);
        record.set(Flag::Digestless, put.options.digestless);
        record.set(Flag::Fewer, places.len() < usize::from(put.options.replicas) * cut.stripes);
        record.set_pin(put.pin);
        let ttl = (put.options.ttl_ms > 0).then(|| UnixMillis(now.unix.0.saturating_add(put.options.ttl_ms)));
        let expires = [ttl, put.expires].into_iter().flatten().min();
        if places.len() > 1 || expires.is_some() || put.cohort.is_some() || put.parent.is_some() {
            let cohort = put.cohort.map_or(NONE, |label| self.cohorts.join(tenant, label, ask.id));
            record.extra = self.extras.add(Extra {
                stripes: cut.stripes as u16, // ≤ STRIPES_MAX
                stripe_len: cut.stripe_len,
                places: places[1..].to_vec(),
                committed: vec![],
                stripe_roots: if cut.stripes > 1 { vec![0; cut.stripes] } else { vec![] },
                expires,
                cohort,
                parent: put.parent.map(Into::into),
            });
        }
        let added = self.add_object(&record, ask.key.as_bytes());
        if added.is_err()
            && let Some(extra) = self.extras.remove(record.extra)
            && extra.cohort != NONE
        {
            self.cohorts.leave(extra.cohort, ask.id);
        }
        added
    }
}
