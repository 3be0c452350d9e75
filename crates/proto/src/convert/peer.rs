//! What masters say to each other: a group goes to another one.

use moontide_types::bounds::GROUPS_MAX;
use moontide_types::{Generation, GroupId, NodeId, SegmentId};

use super::answer::AnswerBody;
use super::check::{self, at_most, copied, count, rule};
use super::context::RequestContext;
use super::lookup::Replicas;
use super::{ConvertError, Wire};
use crate::limits::{BEQUEST_PARTS_MAX, BEQUEST_SEGMENTS_MAX, BEQUEST_TOMBSTONES_MAX};
use crate::packed::{Packed, PackedKeys};
use crate::records::VersionedId;
use crate::v1;

/// Part of what a master knows of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bequest<'a> {
    /// Who asks.
    pub context: RequestContext<'a>,
    /// The cluster that both belong to.
    pub cluster: u64,
    /// The group.
    pub group: GroupId,
    /// Which part of it.
    pub part: u32,
    /// Whether it was the last one.
    pub last: bool,
    /// Keys of objects.
    pub keys: PackedKeys<'a>,
    /// Where each of them is.
    pub replicas: Replicas<'a>,
    /// What was removed, and nodes may still have.
    pub tombstones: Packed<'a, VersionedId>,
    /// Segments and disks that are known.
    pub segments: Vec<KnownSegment>,
    /// Whether there are no other segments of the group.
    pub all_segments: bool,
    /// Whether there are no other disks.
    pub all_disks: bool,
}

/// A segment that a master knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownSegment {
    /// Its node.
    pub node: NodeId,
    /// Its number.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// It came too late, and may still have what was removed without it.
    pub late: bool,
}

impl<'a> Wire<'a> for Bequest<'a> {
    type Message = v1::Bequest;

    fn from_wire(m: &'a v1::Bequest) -> Result<Self, ConvertError> {
        let keys = check::keys("keys", &m.keys)?;
        let replicas = m.replicas.as_ref().ok_or(ConvertError::Missing { field: "replicas" })?;
        let replicas = Replicas::read(replicas)?;
        count("replicas", replicas.list.len(), keys.len())?;
        rule("replicas", replicas.list.iter().all(|(object, _)| object.code.is_none()), "all are there")?;
        at_most("part", m.part, BEQUEST_PARTS_MAX)?;
        at_most("segments", m.segments.len(), BEQUEST_SEGMENTS_MAX)?;
        let segment = |known: &v1::KnownSegment| {
            rule("segments.node", known.node != 0, "a node has a number")?;
            let segment = check::segment("segments.segment", known.segment)?;
            let (node, generation) = (NodeId(known.node), Generation(known.generation));
            Ok(KnownSegment { node, segment, generation, late: known.late })
        };
        Ok(Bequest {
            context: RequestContext::of(&m.context)?,
            cluster: m.cluster,
            group: GroupId(check::narrow("group", m.group, GROUPS_MAX - 1)?),
            part: m.part,
            last: m.last,
            keys,
            replicas,
            tombstones: check::records("tombstones", &m.tombstones, BEQUEST_TOMBSTONES_MAX)?,
            segments: m.segments.iter().map(segment).collect::<Result<_, ConvertError>>()?,
            all_segments: m.all_segments,
            all_disks: m.all_disks,
        })
    }

    fn to_wire(&self) -> v1::Bequest {
        let known = |known: &KnownSegment| v1::KnownSegment {
            node: known.node.0,
            segment: known.segment.0,
            generation: known.generation.0,
            late: known.late,
        };
        v1::Bequest {
            context: Some(self.context.to_wire()),
            cluster: self.cluster,
            group: self.group.0.into(),
            part: self.part,
            last: self.last,
            keys: copied(self.keys.as_encoded()),
            replicas: Some(self.replicas.write()),
            tombstones: copied(self.tombstones.as_encoded()),
            segments: self.segments.iter().map(known).collect(),
            all_segments: self.all_segments,
            all_disks: self.all_disks,
        }
    }
}
