//! Call between masters: handoff of a group to its next owner.

use moontide_types::limits::GROUPS_MAX;
use moontide_types::{Generation, GroupId, NodeId, SegmentId};

use super::check::{self, at_most, copied, count, rule};
use super::context::RequestContext;
use super::lookup::Replicas;
use super::response::ResponseBody;
use super::{ConvertError, Wire};
use crate::capability::CapabilityKey;
use crate::limits::{HANDOFF_CHUNKS_MAX, HANDOFF_SEGMENTS_MAX, HANDOFF_TOMBSTONES_MAX};
use crate::packed::{Packed, PackedKeys};
use crate::records::VersionedId;
use crate::v1;

/// One chunk of the state of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandoffGroupRequest<'a> {
    /// Request context.
    pub context: RequestContext<'a>,
    /// Id of the cluster of both masters.
    pub cluster: u64,
    /// Group that is handed off.
    pub group: GroupId,
    /// Index of the chunk, from 0 on.
    pub chunk: u32,
    /// Whether this is the last chunk.
    pub is_last: bool,
    /// Keys of objects.
    pub keys: PackedKeys<'a>,
    /// Locations of these objects, one entry per key.
    pub replicas: Replicas<'a>,
    /// Removed versions that nodes may still have.
    pub tombstones: Packed<'a, VersionedId>,
    /// Known segments and disks.
    pub segments: Vec<KnownSegment>,
    /// Whether `segments` contains all segments of the group.
    pub segments_complete: bool,
    /// Whether `segments` contains all disks.
    pub disks_complete: bool,
    /// Whether the next certain removal needs an exclusion first.
    pub exclusion_needed: bool,
    /// Keys with which the sender signed capabilities for nodes.
    pub node_keys: Vec<(NodeId, CapabilityKey)>,
}

/// A segment known to a master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownSegment {
    /// Node that owns the segment.
    pub node: NodeId,
    /// Id of the segment.
    pub segment: SegmentId,
    /// Generation of the segment.
    pub generation: Generation,
    /// The segment was mounted stale: it may still have records that were removed in its absence.
    pub stale: bool,
}

impl<'a> Wire<'a> for HandoffGroupRequest<'a> {
    type Message = v1::HandoffGroupRequest;

    fn from_wire(m: &'a v1::HandoffGroupRequest) -> Result<Self, ConvertError> {
        let keys = check::keys("keys", &m.keys)?;
        let replicas = m.replicas.as_ref().ok_or(ConvertError::Missing { field: "replicas" })?;
        let replicas = Replicas::read(replicas)?;
        count("replicas", replicas.list.len(), keys.len())?;
        rule(
            "replicas",
            replicas.list.iter().all(|(object, _)| object.code.is_none()),
            "every object is complete",
        )?;
        at_most("chunk", m.chunk, HANDOFF_CHUNKS_MAX)?;
        at_most("segments", m.segments.len(), HANDOFF_SEGMENTS_MAX)?;
        let segment = |known: &v1::KnownSegment| {
            rule("segments.node", known.node != 0, "node ≠ 0")?;
            let segment = check::segment("segments.segment", known.segment)?;
            let (node, generation) = (NodeId(known.node), Generation(known.generation));
            Ok(KnownSegment { node, segment, generation, stale: known.stale })
        };
        at_most("node_keys", m.node_keys.len(), HANDOFF_SEGMENTS_MAX)?;
        let node_key = |of: &v1::HandoffKey| {
            rule("node_keys.node", of.node != 0, "node ≠ 0")?;
            Ok((NodeId(of.node), check::capability_key("node_keys.key", &of.key)?))
        };
        Ok(HandoffGroupRequest {
            context: RequestContext::of(&m.context)?,
            cluster: m.cluster,
            group: GroupId(check::narrow("group", m.group, GROUPS_MAX - 1)?),
            chunk: m.chunk,
            is_last: m.is_last,
            keys,
            replicas,
            tombstones: check::records("tombstones", &m.tombstones, HANDOFF_TOMBSTONES_MAX)?,
            segments: m.segments.iter().map(segment).collect::<Result<_, ConvertError>>()?,
            segments_complete: m.segments_complete,
            disks_complete: m.disks_complete,
            exclusion_needed: m.exclusion_needed,
            node_keys: m.node_keys.iter().map(node_key).collect::<Result<_, ConvertError>>()?,
        })
    }

    fn to_wire(&self) -> v1::HandoffGroupRequest {
        let known = |known: &KnownSegment| v1::KnownSegment {
            node: known.node.0,
            segment: known.segment.0,
            generation: known.generation.0,
            stale: known.stale,
        };
        v1::HandoffGroupRequest {
            context: Some(self.context.to_wire()),
            cluster: self.cluster,
            group: self.group.0.into(),
            chunk: self.chunk,
            is_last: self.is_last,
            keys: copied(self.keys.as_encoded()),
            replicas: Some(self.replicas.write()),
            tombstones: copied(self.tombstones.as_encoded()),
            segments: self.segments.iter().map(known).collect(),
            segments_complete: self.segments_complete,
            disks_complete: self.disks_complete,
            exclusion_needed: self.exclusion_needed,
            node_keys: self
                .node_keys
                .iter()
                .map(|(node, key)| v1::HandoffKey { node: node.0, key: copied(key.as_bytes()) })
                .collect(),
        }
    }
}
