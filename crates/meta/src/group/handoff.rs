//! Group handoff: metadata that a live master sends to the next master of a group.
//!
//! The next master rebuilds its state from reports of nodes, as after a crash; there is no other way. Until the reports
//! arrive, it responds from the handoff: the locations of objects. They can be outdated, which is harmless: a reader
//! names a version, and the node rejects versions that it does not have. The handoff also contains state that reports
//! lack: removals during a node's absence, and pins that were changed after the put.

use hashbrown::HashMap;
use moontide_types::record::PinClass;
use moontide_types::{Epoch, Generation, NodeId, ObjectId, SegmentId, Term, UnixMillis};

use super::lookup::{LookupKey, ObjectState};
use super::{Group, ObjectView, StripeLocation};
use crate::segment::SegmentPhase;
use crate::time::Now;

/// State that a group's master sends to the next one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupHandoff {
    /// Term of the sending master.
    pub term: Term,
    /// Complete objects.
    pub objects: Vec<HandoffObject>,
    /// Removed versions that nodes may still have.
    pub tombstones: Vec<(ObjectId, Epoch)>,
    /// Segments and disks that have objects of the group or may return with some.
    pub segments: Vec<ExpectedSegment>,
    /// No other segment has objects of the group.
    pub segments_complete: bool,
    /// No other disk has objects of the group.
    pub disks_complete: bool,
    /// The next certain answer needs an exclusion first.
    pub exclusion_needed: bool,
    /// Keys with which the sending master signed capabilities for nodes. The server around a group adds and uses them.
    pub node_keys: Vec<NodeKey>,
}

/// Key of the capabilities for a node.
#[derive(Clone, PartialEq, Eq)]
pub struct NodeKey {
    /// The node.
    pub node: NodeId,
    /// The key.
    pub key: [u8; 32],
}

impl std::fmt::Debug for NodeKey {
    /// Prints no byte of the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeKey").field("node", &self.node).finish_non_exhaustive()
    }
}

/// A segment or disk that is expected to mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExpectedSegment {
    /// Node that owns the segment.
    pub node: NodeId,
    /// Id of the segment on its node.
    pub segment: SegmentId,
    /// Incarnation of the segment.
    pub generation: Generation,
    /// Mounted stale: it may still have objects that were removed in its absence.
    pub stale: bool,
}

/// An object, as known to the preceding master.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandoffObject {
    /// Id of the object.
    pub id: ObjectId,
    /// Key of the object.
    pub key: Box<[u8]>,
    /// Version.
    pub epoch: Epoch,
    /// Length in bytes.
    pub object_len: u64,
    /// Root digest.
    pub root: u64,
    /// The object has no digests.
    pub digestless: bool,
    /// Resistance to eviction.
    pub pin: PinClass,
    /// Time at which the object expires.
    pub expires: Option<UnixMillis>,
    /// Number of replicas in `locations`.
    pub replicas: u8,
    /// Locations of complete replicas, one after the other, stripe by stripe.
    pub locations: Vec<StripeLocation>,
}

/// Objects of a handoff, by id.
pub(super) type HandoffIndex = HashMap<ObjectId, HandoffObject>;

impl Group {
    /// Returns the state for the next master. Visits every object: the group is not served in the meantime. A group
    /// with more than `objects_max` objects lists none: reports of the nodes, which are served as they arrive, are
    /// faster.
    pub fn export_handoff(&self, now: Now, objects_max: usize) -> GroupHandoff {
        let with_objects = self.slab.len() + self.handoff.len() <= objects_max;
        let mut objects = Vec::with_capacity(if with_objects { self.slab.len() } else { 0 });
        let mut cursor = None;
        while let Some(at) = self.slab.previous(cursor).filter(|_| with_objects) {
            cursor = Some(at);
            let (record, key) = self.slab.with_key(at);
            if self.state_of(record, now) != ObjectState::Complete {
                continue;
            }
            let mut locations = vec![];
            let replicas = self.replica_views(record, &mut locations);
            let view = self.object_view(record, &locations, replicas);
            objects.push(HandoffObject {
                id: view.id,
                key: key.into(),
                epoch: view.epoch,
                object_len: view.object_len,
                root: view.root,
                digestless: view.digestless,
                pin: view.pin,
                expires: view.expires,
                replicas,
                locations,
            });
        }
        // Objects from the handoff that this master received, not reported since.
        let unreported = |object: &&HandoffObject| self.find_id(object.id).is_none();
        let unconfirmed = self.handoff.values().filter(unreported).filter(|_| with_objects);
        let mut unconfirmed: Vec<HandoffObject> = unconfirmed.cloned().collect();
        unconfirmed.sort_unstable_by_key(|object| object.id); // the order of a hash map is not deterministic
        objects.append(&mut unconfirmed);
        let mut tombstones: Vec<(ObjectId, Epoch)> =
            self.tombstones.iter().map(|(&id, &epoch)| (id, epoch)).collect();
        tombstones.sort_unstable();
        let mounted = self.segments.iter().flatten().filter(|s| s.phase != SegmentPhase::Lost);
        // A stale disk stays stale because it is not expected.
        let mounted = mounted.filter(|segment| !(segment.is_disk() && segment.is_stale));
        let mounted = mounted.map(|segment| ExpectedSegment {
            node: segment.node,
            segment: segment.id,
            generation: segment.generation,
            stale: segment.is_stale,
        });
        let absent = self.absent.iter().map(|(&(node, segment), absent)| ExpectedSegment {
            node,
            segment,
            generation: absent.generation,
            stale: absent.stale,
        });
        let disk = |&node| ExpectedSegment {
            node,
            segment: SegmentId::DISK,
            generation: Generation(0),
            stale: false,
        };
        let disks = self.absent_disks.keys().map(disk);
        let mut segments: Vec<_> = mounted.chain(absent).chain(disks).collect();
        segments.sort_unstable();
        GroupHandoff {
            term: self.config.term,
            objects,
            tombstones,
            segments,
            segments_complete: now.mono >= self.unknown_nodes_until,
            disks_complete: now.mono >= self.disk_reports_until,
            exclusion_needed: self.exclusion_needed,
            node_keys: vec![],
        }
    }

    /// Imports the handoff of the preceding master. To be called only before any other call of the group.
    pub fn import_handoff(&mut self, now: Now, handoff: GroupHandoff) {
        let (group, groups, term) = (self.config.group, self.config.groups, self.config.term);
        let ours = |id: &ObjectId| id.group(groups) == group;
        let older = |epoch: Epoch| epoch.term() < term;
        let objects = handoff.objects.into_iter().filter(|object| ours(&object.id) && older(object.epoch));
        // These segments are expected to return. When all have reported, an object that is not in the index does not
        // exist.
        for ExpectedSegment { node, segment, generation, stale } in handoff.segments {
            if segment == SegmentId::DISK {
                let until = self.ticker.end(now.mono, self.config.disk_rejoin_window);
                self.absent_disks.insert(node, until);
            } else {
                self.mark_segment_absent(
                    (node, segment),
                    generation,
                    stale && !moontide_rt::mutation_enabled("lateness-not-inherited"),
                    now,
                );
            }
        }
        self.exclusion_needed = handoff.exclusion_needed;
        if handoff.segments_complete {
            self.unknown_nodes_until = now.mono;
        }
        if handoff.disks_complete {
            self.disk_reports_until = now.mono;
        }
        self.handoff = objects.map(|object| (object.id, object)).collect();
        if moontide_rt::mutation_enabled("tombstones-not-inherited") {
            return;
        }
        self.tombstones
            .extend(handoff.tombstones.into_iter().filter(|(id, epoch)| ours(id) && older(*epoch)));
    }

    /// Returns an object from the handoff that no node has reported yet. Fills `locations` with its locations that may
    /// still be valid.
    pub(super) fn find_in_handoff(
        &self,
        lookup: &LookupKey<'_>,
        now: Now,
        locations: &mut Vec<StripeLocation>,
    ) -> Option<&HandoffObject> {
        if self.handoff.is_empty() {
            return None;
        }
        let object = self.handoff.get(&lookup.id).filter(|object| *object.key == *lookup.key.as_bytes())?;
        let removed = self.tombstones.get(&lookup.id).is_some_and(|&removed| removed >= object.epoch);
        let removed = removed && !moontide_rt::mutation_enabled("handoff-although-removed");
        if removed || object.expires.is_some_and(|at| at <= now.unix) {
            return None;
        }
        // A segment that has reported completely does not have the object, or it would be in the index.
        let reported = |location: &StripeLocation| {
            let index = self.by_name.get(&(location.node, location.segment));
            index.is_some_and(|&index| self.segment(index).phase != SegmentPhase::Reporting)
        };
        let stripes =
            object.locations.first().map_or(1, |location| usize::from(location.stripe.count)).max(1);
        locations.clear();
        for replica in object.locations.chunks(stripes).filter(|replica| !replica.iter().any(reported)) {
            let number = (locations.len() / stripes) as u8; // ≤ REPLICAS_MAX
            locations.extend(replica.iter().map(|location| StripeLocation { replica: number, ..*location }));
        }
        (!locations.is_empty()).then_some(object)
    }

    /// Changes the pin of an object from the handoff.
    pub(super) fn set_handoff_pin(&mut self, id: ObjectId, pin: PinClass) {
        if let Some(object) = self.handoff.get_mut(&id) {
            object.pin = pin;
        }
    }

    /// Ends the use of a handoff object after a node has reported it. Returns its pin, if the version is the same.
    pub(super) fn confirm_handoff(&mut self, id: ObjectId, epoch: Epoch) -> Option<PinClass> {
        if self.handoff.is_empty() {
            return None;
        }
        let object = self.handoff.remove(&id)?;
        (object.epoch == epoch).then_some(object.pin)
    }
}

impl HandoffObject {
    pub(super) fn view<'a>(&'a self, locations: &'a [StripeLocation]) -> ObjectView<'a> {
        let stripes = locations.first().map_or(1, |location| usize::from(location.stripe.count)).max(1);
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
            from_handoff: true,
            replicas: (locations.len() / stripes) as u8, // ≤ REPLICAS_MAX
            locations,
        }
    }
}
