//! Registration of a node, and mounting of its segments.

use moontide_types::limits::{BATCH_KEYS_MAX, GROUPS_MAX, SLOTS_PER_SEGMENT_MAX};
use moontide_types::{ErrorCode, Generation, GroupId, Medium, NodeId, SegmentId, SessionId, Tenant, Term};

use crate::capability::CapabilityKey;
use crate::convert::admin::IdKeySecret;
use crate::convert::check::{self, at_least, at_most, length, required, rule};
use crate::convert::context::RequestContext;
use crate::convert::put::medium;
use crate::convert::response::{Response, ResponseBody, response_of};
use crate::convert::{ConvertError, Wire};
use crate::hello::ProtocolVersions;
use crate::limits::{ADDRESS_BYTES_MAX, ADDRESSES_MAX, ENGINE_BYTES_MAX, LABEL_BYTES_MAX, TIMEOUT_MS_MAX};
use crate::v1;

/// Address of a transfer engine of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address<'a> {
    /// Name of the transfer engine.
    pub engine: &'a str,
    /// Address in the format of the engine.
    pub address: &'a str,
}

/// Location of a node in the data centre; unknown labels are empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Topology<'a> {
    /// Label of the host.
    pub host: &'a str,
    /// Label of the rack.
    pub rack: &'a str,
    /// Label of the zone.
    pub zone: &'a str,
}

impl<'a> Address<'a> {
    /// Converts the addresses of a node.
    pub(in crate::convert) fn all(messages: &'a [v1::Address]) -> Result<Vec<Address<'a>>, ConvertError> {
        at_most("addresses", messages.len(), ADDRESSES_MAX)?;
        let address = |a: &'a v1::Address| {
            length("addresses.engine", &a.engine, 1, ENGINE_BYTES_MAX)?;
            length("addresses.address", &a.address, 1, ADDRESS_BYTES_MAX)?;
            Ok(Address { engine: &a.engine, address: &a.address })
        };
        messages.iter().map(address).collect()
    }

    pub(in crate::convert) fn to_wire(self) -> v1::Address {
        v1::Address { engine: self.engine.into(), address: self.address.into() }
    }
}

impl<'a> Topology<'a> {
    /// Converts the location of a node.
    pub(in crate::convert) fn of(message: &'a Option<v1::Topology>) -> Result<Topology<'a>, ConvertError> {
        let v1::Topology { host, rack, zone } = required("topology", message)?;
        for label in [host, rack, zone] {
            length("topology", label, 0, LABEL_BYTES_MAX)?;
        }
        Ok(Topology { host, rack, zone })
    }

    pub(in crate::convert) fn to_wire(self) -> v1::Topology {
        v1::Topology { host: self.host.into(), rack: self.rack.into(), zone: self.zone.into() }
    }
}

/// Registers a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenSessionRequest<'a> {
    /// Request context.
    pub context: RequestContext<'a>,
    /// Id of the node.
    pub node: NodeId,
    /// Random number, chosen at every start.
    pub boot_id: u64,
    /// Addresses of its transfer engines.
    pub addresses: Vec<Address<'a>>,
    /// Location in the data centre.
    pub topology: Topology<'a>,
    /// Supported protocol versions.
    pub protocol: ProtocolVersions,
    /// Highest term known to the node.
    pub highest_term: Term,
}

impl<'a> Wire<'a> for OpenSessionRequest<'a> {
    type Message = v1::OpenSessionRequest;

    fn from_wire(m: &'a v1::OpenSessionRequest) -> Result<Self, ConvertError> {
        at_least("node", m.node, 1u64)?;
        let protocol = ProtocolVersions {
            min: check::narrow("protocol_min", m.protocol_min, u16::MAX)?,
            max: check::narrow("protocol_max", m.protocol_max, u16::MAX)?,
        };
        rule("protocol_min", protocol.is_valid(), "1 ≤ lowest version ≤ highest")?;
        Ok(OpenSessionRequest {
            context: RequestContext::of(&m.context)?,
            node: NodeId(m.node),
            boot_id: m.boot_id,
            addresses: Address::all(&m.addresses)?,
            topology: Topology::of(&m.topology)?,
            protocol,
            highest_term: check::term(m.highest_term)?,
        })
    }

    fn to_wire(&self) -> v1::OpenSessionRequest {
        v1::OpenSessionRequest {
            context: Some(self.context.to_wire()),
            node: self.node.0,
            boot_id: self.boot_id,
            addresses: self.addresses.iter().map(|address| address.to_wire()).collect(),
            topology: Some(self.topology.to_wire()),
            protocol_min: self.protocol.min.into(),
            protocol_max: self.protocol.max.into(),
            highest_term: self.highest_term.get(),
        }
    }
}

/// Checks the TTL of a session: 1 to [`TIMEOUT_MS_MAX`] milliseconds.
pub(super) fn check_ttl(ttl_ms: u32) -> Result<(), ConvertError> {
    at_least("ttl_ms", ttl_ms, 1u32)?;
    at_most("ttl_ms", ttl_ms, TIMEOUT_MS_MAX)
}

/// A key of capabilities, with its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumberedKey {
    /// Rotation number, from 1 on.
    pub rotation: u64,
    /// The key.
    pub key: CapabilityKey,
}

impl Wire<'_> for NumberedKey {
    type Message = v1::CapabilityKey;

    fn from_wire(m: &v1::CapabilityKey) -> Result<Self, ConvertError> {
        at_least("capability_key.rotation", m.rotation, 1u64)?;
        Ok(NumberedKey { rotation: m.rotation, key: check::capability_key("capability_key.key", &m.key)? })
    }

    fn to_wire(&self) -> v1::CapabilityKey {
        v1::CapabilityKey { rotation: self.rotation, key: check::copied(self.key.as_bytes()) }
    }
}

/// Response of OpenSession.
pub type OpenSessionResponse<'a> = Response<'a, SessionGrant>;

/// Parameters of a new session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionGrant {
    /// Id of the session.
    pub session: SessionId,
    /// Time without a heartbeat after which the session ends, in milliseconds.
    pub ttl_ms: u32,
    /// Negotiated protocol version.
    pub protocol: u16,
    /// Number of groups of the cluster.
    pub groups: u16,
    /// Number of the current id key.
    pub id_key: u32,
    /// Secret of the id key, if the node may have it.
    pub id_key_secret: Option<IdKeySecret>,
    /// Key of the capabilities for this node.
    pub capability_key: NumberedKey,
}

impl<'a> ResponseBody<'a> for SessionGrant {
    response_of!(v1::OpenSessionResponse);

    fn read(m: &'a v1::OpenSessionResponse) -> Result<Self, ConvertError> {
        at_least("session", m.session, 1u64)?;
        at_least("protocol", m.protocol, 1u32)?;
        check_ttl(m.ttl_ms)?;
        Ok(SessionGrant {
            session: SessionId(m.session),
            ttl_ms: m.ttl_ms,
            protocol: check::narrow("protocol", m.protocol, u16::MAX)?,
            groups: check::groups("groups", m.groups)?,
            id_key: m.id_key,
            id_key_secret: IdKeySecret::from_wire("id_key_secret", &m.id_key_secret)?,
            capability_key: NumberedKey::from_wire(required("capability_key", &m.capability_key)?)?,
        })
    }

    fn write(&self) -> v1::OpenSessionResponse {
        v1::OpenSessionResponse {
            context: None,
            session: self.session.0,
            ttl_ms: self.ttl_ms,
            protocol: self.protocol.into(),
            groups: self.groups.into(),
            id_key: self.id_key,
            id_key_secret: IdKeySecret::to_wire(&self.id_key_secret),
            capability_key: Some(self.capability_key.to_wire()),
        }
    }
}

/// Description of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentSpec<'a> {
    /// Id of the segment.
    pub segment: SegmentId,
    /// Generation of the segment.
    pub generation: Generation,
    /// Storage medium; disk only with [`SegmentId::DISK`].
    pub medium: Medium,
    /// Size in units.
    pub units: u32,
    /// Number of header slots.
    pub slots: u32,
    /// NUMA node, if known.
    pub numa: Option<u32>,
    /// Group of the segment, if it has one.
    pub group: Option<GroupId>,
    /// Term that the segment adopted last.
    pub term: Term,
    /// Whether the segment contains records to report.
    pub has_records: bool,
    /// Tenant for which the segment is reserved.
    pub tenant: Option<Tenant<'a>>,
}

impl<'a> Wire<'a> for SegmentSpec<'a> {
    type Message = v1::SegmentSpec;

    fn from_wire(m: &'a v1::SegmentSpec) -> Result<Self, ConvertError> {
        at_least("segments.units", m.units, 1u32)?;
        at_least("segments.slots", m.slots, 1u32)?;
        at_most("segments.slots", m.slots, SLOTS_PER_SEGMENT_MAX)?;
        let medium = medium("segments.medium", m.medium)?;
        let segment = check::segment("segments.segment", m.segment)?;
        let is_disk = segment == SegmentId::DISK;
        rule(
            "segments.medium",
            (medium == Medium::Disk) == is_disk,
            "exactly the disk has the largest segment id",
        )?;
        Ok(SegmentSpec {
            segment,
            generation: Generation(m.generation),
            medium,
            units: m.units,
            slots: m.slots,
            numa: m.numa.checked_sub(1),
            group: m.group.map(|g| check::group("segments.group", g)).transpose()?,
            term: check::term(m.term)?,
            has_records: m.has_records,
            tenant: if m.tenant.is_empty() { None } else { Some(Tenant::new(&m.tenant)?) },
        })
    }

    fn to_wire(&self) -> v1::SegmentSpec {
        v1::SegmentSpec {
            segment: self.segment.0,
            generation: self.generation.0,
            medium: self.medium as i32,
            units: self.units,
            slots: self.slots,
            numa: self.numa.map_or(0, |numa| numa.saturating_add(1)),
            group: self.group.map(|g| g.0.into()),
            term: self.term.get(),
            has_records: self.has_records,
            tenant: self.tenant.map_or_else(String::new, |tenant| tenant.as_str().into()),
        }
    }
}

/// When a node was last in sync with a master of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncMark {
    /// Id of the group.
    pub group: GroupId,
    /// Number of exclusions of the group at that time.
    pub exclusion: u32,
    /// Time since then in milliseconds; [`u64::MAX`] if unknown, because the node has started again.
    pub ago_ms: u64,
}

impl Wire<'_> for SyncMark {
    type Message = v1::SyncMark;

    fn from_wire(m: &v1::SyncMark) -> Result<Self, ConvertError> {
        let group = check::group("synced.group", m.group)?;
        Ok(SyncMark { group, exclusion: m.exclusion, ago_ms: m.ago_ms })
    }

    fn to_wire(&self) -> v1::SyncMark {
        v1::SyncMark { group: self.group.0.into(), exclusion: self.exclusion, ago_ms: self.ago_ms }
    }
}

/// Mounts segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountSegmentsRequest<'a> {
    /// Request context, with the session.
    pub context: RequestContext<'a>,
    /// Segments to mount.
    pub segments: Vec<SegmentSpec<'a>>,
    /// Groups with which the node was in sync.
    pub synced: Vec<SyncMark>,
    /// Rotation number of the session's key that the node accepts for the groups of the segments.
    pub capability_rotation: u64,
}

impl<'a> Wire<'a> for MountSegmentsRequest<'a> {
    type Message = v1::MountSegmentsRequest;

    fn from_wire(m: &'a v1::MountSegmentsRequest) -> Result<Self, ConvertError> {
        at_most("segments", m.segments.len(), BATCH_KEYS_MAX)?;
        at_most("synced", m.synced.len(), GROUPS_MAX)?;
        Ok(MountSegmentsRequest {
            context: RequestContext::of(&m.context)?,
            segments: m.segments.iter().map(SegmentSpec::from_wire).collect::<Result<_, _>>()?,
            synced: m.synced.iter().map(SyncMark::from_wire).collect::<Result<_, _>>()?,
            capability_rotation: m.capability_rotation,
        })
    }

    fn to_wire(&self) -> v1::MountSegmentsRequest {
        v1::MountSegmentsRequest {
            context: Some(self.context.to_wire()),
            segments: self.segments.iter().map(Wire::to_wire).collect(),
            synced: self.synced.iter().map(Wire::to_wire).collect(),
            capability_rotation: self.capability_rotation,
        }
    }
}

/// Result of the mount of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountResult {
    /// Id of the segment.
    pub segment: SegmentId,
    /// Reason of a refusal.
    pub code: Option<ErrorCode>,
    /// Group to which the segment belongs from now on.
    pub group: GroupId,
    /// Term that the segment must adopt.
    pub term: Term,
}

/// Response of MountSegments.
pub type MountSegmentsResponse<'a> = Response<'a, MountResults>;

/// Results of the mount of segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountResults {
    /// One result per segment, in order.
    pub results: Vec<MountResult>,
}

impl<'a> ResponseBody<'a> for MountResults {
    response_of!(v1::MountSegmentsResponse);

    fn read(m: &'a v1::MountSegmentsResponse) -> Result<Self, ConvertError> {
        at_most("results", m.results.len(), BATCH_KEYS_MAX)?;
        let result = |result: &v1::MountResult| {
            Ok(MountResult {
                segment: check::segment("results.segment", result.segment)?,
                code: check::code(result.code)?,
                group: check::group("results.group", result.group)?,
                term: check::term(result.term)?,
            })
        };
        Ok(MountResults { results: m.results.iter().map(result).collect::<Result<_, ConvertError>>()? })
    }

    fn write(&self) -> v1::MountSegmentsResponse {
        let result = |result: &MountResult| v1::MountResult {
            segment: result.segment.0,
            code: check::code_number(result.code),
            group: result.group.0.into(),
            term: result.term.get(),
        };
        v1::MountSegmentsResponse { context: None, results: self.results.iter().map(result).collect() }
    }
}

/// Unmounts segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnmountSegmentsRequest<'a> {
    /// Request context, with the session.
    pub context: RequestContext<'a>,
    /// Segments to unmount.
    pub segments: Vec<SegmentId>,
}

impl<'a> Wire<'a> for UnmountSegmentsRequest<'a> {
    type Message = v1::UnmountSegmentsRequest;

    fn from_wire(m: &'a v1::UnmountSegmentsRequest) -> Result<Self, ConvertError> {
        at_most("segments", m.segments.len(), BATCH_KEYS_MAX)?;
        Ok(UnmountSegmentsRequest {
            context: RequestContext::of(&m.context)?,
            segments: m
                .segments
                .iter()
                .map(|&segment| check::segment("segments", segment))
                .collect::<Result<_, _>>()?,
        })
    }

    fn to_wire(&self) -> v1::UnmountSegmentsRequest {
        v1::UnmountSegmentsRequest {
            context: Some(self.context.to_wire()),
            segments: self.segments.iter().map(|segment| segment.0).collect(),
        }
    }
}
