//! A group that goes from a master that lives to another one takes along what it knows.
//!
//! The next master is rebuilt from what nodes report, as after a crash; that is the only way in which its books are made.
//! Until the reports are there it answers from what it inherited: where objects were. That can be out of date, and does no
//! harm: whoever reads names a version, and the node refuses what it does not have. What reports do not tell comes along,
//! too: what was removed while a node was away, and pins that were changed after the put.

use hashbrown::HashMap;
use moontide_types::record::PinClass;
use moontide_types::{Epoch, Generation, NodeId, ObjectId, SegmentId, Term, UnixMillis};

use super::lookup::{Ask, ObjectState};
use super::{Group, ObjectView, PlaceView};
use crate::segment::SegmentPhase;
use crate::time::Now;

/// What a group's master hands to the next one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inheritance {
    /// The term of the master that hands it on.
    pub term: Term,
    /// Complete objects.
    pub objects: Vec<Heirloom>,
    /// Removed versions that nodes may still have.
    pub tombstones: Vec<(ObjectId, Epoch)>,
    /// Segments, and disks, that have something of the group or may come back with it.
    pub segments: Vec<ExpectedSegment>,
    /// No other segment has anything of it.
    pub all_segments: bool,
    /// No other disk has.
    pub all_disks: bool,
}

/// A segment, or a disk, that is expected to mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExpectedSegment {
    /// Its node.
    pub node: NodeId,
    /// Its number.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// It came too late, and may still have what was removed without it.
    pub late: bool,
}

/// An object, as the master before knew it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heirloom {
    /// Its id.
    pub id: ObjectId,
    /// Its key.
    pub key: Box<[u8]>,
    /// Its version.
    pub epoch: Epoch,
    /// Its length.
    pub object_len: u64,
    /// Its root digest.
    pub root: u64,
    /// Without digests.
    pub digestless: bool,
    /// How strongly it resists eviction.
    pub pin: PinClass,
    /// When it expires.
    pub expires: Option<UnixMillis>,
    /// How many replicas are listed.
    pub replicas: u8,
    /// Complete replicas, one after the other, stripe by stripe.
    pub places: Vec<PlaceView>,
}

/// What was inherited, by id.
pub(super) type Inherited = HashMap<ObjectId, Heirloom>;

impl Group {
    /// Everything that the next master should know. Looks at every object: the group is not served meanwhile. Of a group with
    /// more objects than `objects_max` none is told: their nodes' reports, of which each is served as it comes, are faster.
    pub fn bequeath(&self, now: Now, objects_max: usize) -> Inheritance {
        let tells = self.slab.len() + self.inherited.len() <= objects_max;
        let mut objects = Vec::with_capacity(if tells { self.slab.len() } else { 0 });
        let mut cursor = None;
        while let Some(at) = self.slab.before(cursor).filter(|_| tells) {
            cursor = Some(at);
            let (record, key) = self.slab.with_key(at);
            if self.state_of(record, now) != ObjectState::Complete {
                continue;
            }
            let mut places = vec![];
            let replicas = self.replica_views(record, &mut places);
            let view = self.object_view(record, &places, replicas);
            objects.push(Heirloom {
                id: view.id,
                key: key.into(),
                epoch: view.epoch,
                object_len: view.object_len,
                root: view.root,
                digestless: view.digestless,
                pin: view.pin,
                expires: view.expires,
                replicas,
                places,
            });
        }
        // What this master inherited itself and has not heard of since.
        let known = |heirloom: &&Heirloom| self.find_id(heirloom.id).is_none();
        let handed_on = self.inherited.values().filter(known).filter(|_| tells);
        let mut handed_on: Vec<Heirloom> = handed_on.cloned().collect();
        handed_on.sort_unstable_by_key(|heirloom| heirloom.id); // a hash map's order is nobody's business
        objects.append(&mut handed_on);
        let mut tombstones: Vec<(ObjectId, Epoch)> =
            self.tombstones.iter().map(|(&id, &epoch)| (id, epoch)).collect();
        tombstones.sort_unstable();
        let mounted = self.segments.iter().flatten().filter(|s| s.phase != SegmentPhase::Lost);
        // A disk that is late stays so by not being expected.
        let mounted = mounted.filter(|segment| !(segment.is_disk() && segment.is_late));
        let mounted = mounted.map(|segment| ExpectedSegment {
            node: segment.node,
            segment: segment.id,
            generation: segment.generation,
            late: segment.is_late,
        });
        let absent = self.absent.iter().map(|(&(node, segment), absence)| ExpectedSegment {
            node,
            segment,
            generation: absence.generation,
            late: absence.late,
        });
        let disk = |&node| ExpectedSegment {
            node,
            segment: SegmentId::DISK,
            generation: Generation(0),
            late: false,
        };
        let disks = self.absent_disks.keys().map(disk);
        let mut segments: Vec<_> = mounted.chain(absent).chain(disks).collect();
        segments.sort_unstable();
        Inheritance {
            term: self.config.term,
            objects,
            tombstones,
            segments,
            all_segments: now.mono >= self.settled_at,
            all_disks: now.mono >= self.disk_reports_until,
        }
    }

    /// Takes over what the master before has handed on. Only before anything else has happened in the group.
    pub fn inherit(&mut self, now: Now, inheritance: Inheritance) {
        let (group, groups, term) = (self.config.group, self.config.groups, self.config.term);
        let ours = |id: &ObjectId| id.group(groups) == group;
        let older = |epoch: Epoch| epoch.term() < term;
        let objects =
            inheritance.objects.into_iter().filter(|object| ours(&object.id) && older(object.epoch));
        // They are expected back; when all have reported, what is not there is nowhere.
        for ExpectedSegment { node, segment, generation, late } in inheritance.segments {
            if segment == SegmentId::DISK {
                let until = self.ticker.end(now.mono, self.config.disk_absence_max);
                self.absent_disks.insert(node, until);
            } else {
                self.miss_segment(
                    (node, segment),
                    generation,
                    late && !moontide_types::planted("lateness-not-inherited"),
                    now,
                );
            }
        }
        self.all_listed = inheritance.all_segments;
        if inheritance.all_segments {
            self.settled_at = now.mono;
        }
        if inheritance.all_disks {
            self.disk_reports_until = now.mono;
        }
        self.inherited = objects.map(|object| (object.id, object)).collect();
        if moontide_types::planted("tombstones-not-inherited") {
            return;
        }
        self.tombstones
            .extend(inheritance.tombstones.into_iter().filter(|(id, epoch)| ours(id) && older(*epoch)));
    }

    /// An object that was inherited and of which no node has said anything yet; its places that may still be there are put
    /// into `places`.
    pub(super) fn heirloom(&self, ask: &Ask<'_>, now: Now, places: &mut Vec<PlaceView>) -> Option<&Heirloom> {
        if self.inherited.is_empty() {
            return None;
        }
        let heirloom = self.inherited.get(&ask.id).filter(|heirloom| *heirloom.key == *ask.key.as_bytes())?;
        let removed = self.tombstones.get(&ask.id).is_some_and(|&removed| removed >= heirloom.epoch);
        let removed = removed && !moontide_types::planted("heirloom-although-removed");
        if removed || heirloom.expires.is_some_and(|at| at <= now.unix) {
            return None;
        }
        // A segment that has reported everything does not have it, or it would be known.
        let reported = |place: &PlaceView| {
            let index = self.by_name.get(&(place.node, place.segment));
            index.is_some_and(|&index| self.segment(index).phase != SegmentPhase::Reporting)
        };
        let stripes = heirloom.places.first().map_or(1, |place| usize::from(place.stripe.count)).max(1);
        places.clear();
        for replica in heirloom.places.chunks(stripes).filter(|replica| !replica.iter().any(reported)) {
            let number = (places.len() / stripes) as u8; // ≤ REPLICAS_MAX
            places.extend(replica.iter().map(|place| PlaceView { replica: number, ..*place }));
        }
        (!places.is_empty()).then_some(heirloom)
    }

    /// A node has said what it has of the object: that counts from now on. The answer is its pin, if it is the same version.
    pub(super) fn heirloom_reported(&mut self, id: ObjectId, epoch: Epoch) -> Option<PinClass> {
        if self.inherited.is_empty() {
            return None;
        }
        let heirloom = self.inherited.remove(&id)?;
        (heirloom.epoch == epoch).then_some(heirloom.pin)
    }
}

impl Heirloom {
    pub(super) fn view<'a>(&'a self, places: &'a [PlaceView]) -> ObjectView<'a> {
        let stripes = places.first().map_or(1, |place| usize::from(place.stripe.count)).max(1);
        ObjectView {
            id: self.id,
            epoch: self.epoch,
            object_len: self.object_len,
            root: self.root,
            digestless: self.digestless,
            fewer_replicas: false,
            pin: self.pin,
            expires: self.expires,
            cohort: None,
            parent: None,
            inherited: true,
            replicas: (places.len() / stripes) as u8, // ≤ REPLICAS_MAX
            places,
        }
    }
}
