//! What happens once: a node registers and offers its segments.

use moontide_types::bounds::{BATCH_KEYS_MAX, SLOTS_PER_SEGMENT_MAX};
use moontide_types::{ErrorCode, Generation, GroupId, NodeId, SegmentId, SessionId, Tenant, Term};

use crate::convert::answer::{Answer, AnswerBody, answer_of};
use crate::convert::check::{self, at_least, at_most, length, required, rule};
use crate::convert::context::RequestContext;
use crate::convert::operator::IdKeySecret;
use crate::convert::put::medium;
use crate::convert::{ConvertError, Wire};
use crate::hello::ProtocolVersions;
use crate::limits::{ADDRESS_BYTES_MAX, ADDRESSES_MAX, DEADLINE_MS_MAX, ENGINE_BYTES_MAX, LABEL_BYTES_MAX};
use crate::records::Medium;
use crate::v1;

/// A way to reach a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address<'a> {
    /// The transfer engine.
    pub engine: &'a str,
    /// The engine's own notation.
    pub address: &'a str,
}

/// Where a node stands; empty what is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Topology<'a> {
    /// Host.
    pub host: &'a str,
    /// Rack.
    pub rack: &'a str,
    /// Zone.
    pub zone: &'a str,
}

impl<'a> Address<'a> {
    /// Reads the addresses of a node.
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
    /// Reads where a node stands.
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

/// Register.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenSessionRequest<'a> {
    /// Who asks.
    pub context: RequestContext<'a>,
    /// The node.
    pub node: NodeId,
    /// Drawn at every start.
    pub boot: u64,
    /// How to reach it.
    pub addresses: Vec<Address<'a>>,
    /// Where it stands.
    pub topology: Topology<'a>,
    /// Versions it speaks.
    pub protocol: ProtocolVersions,
    /// Highest term it has seen.
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
            boot: m.boot,
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
            boot: self.boot,
            addresses: self.addresses.iter().map(|address| address.to_wire()).collect(),
            topology: Some(self.topology.to_wire()),
            protocol_min: self.protocol.min.into(),
            protocol_max: self.protocol.max.into(),
            highest_term: self.highest_term.get(),
        }
    }
}

/// A session lives for a bounded time without heartbeats.
pub(super) fn check_ttl(ttl_ms: u32) -> Result<(), ConvertError> {
    at_least("ttl_ms", ttl_ms, 1u32)?;
    at_most("ttl_ms", ttl_ms, DEADLINE_MS_MAX)
}

/// The answer of OpenSession.
pub type OpenSessionResponse<'a> = Answer<'a, SessionGrant>;

/// What a node is told when it is registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionGrant {
    /// The session.
    pub session: SessionId,
    /// It ends after this time without a heartbeat.
    pub ttl_ms: u32,
    /// Protocol version chosen.
    pub protocol: u16,
    /// Groups of the cluster.
    pub groups: u16,
    /// Number of the current id key.
    pub id_key: u32,
    /// Its secret.
    pub id_key_secret: Option<IdKeySecret>,
}

impl<'a> AnswerBody<'a> for SessionGrant {
    answer_of!(v1::OpenSessionResponse);

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
            id_key_secret: IdKeySecret::from_wire(&m.id_key_secret)?,
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
        }
    }
}

/// What a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentSpec<'a> {
    /// Its number.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// What it is made of: memory or device.
    pub medium: Medium,
    /// Its size in units.
    pub units: u32,
    /// Its header slots.
    pub slots: u32,
    /// Its NUMA node, if known.
    pub numa: Option<u32>,
    /// Group that it is for.
    pub group: Option<GroupId>,
    /// Term it adopted last.
    pub term: Term,
    /// Whether it holds records to be reported.
    pub occupied: bool,
    /// Tenant it is reserved for.
    pub tenant: Option<Tenant<'a>>,
    /// How long ago a master of its group last knew of everything in it; 0 if none ever did.
    pub away_ms: u64,
    /// The term of that master; zero if none ever did.
    pub known_term: Term,
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
            "the disk has the largest number, and no other",
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
            occupied: m.occupied,
            tenant: if m.tenant.is_empty() { None } else { Some(Tenant::new(&m.tenant)?) },
            away_ms: m.away_ms,
            known_term: check::term(m.known_term)?,
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
            occupied: self.occupied,
            tenant: self.tenant.map_or_else(String::new, |tenant| tenant.as_str().into()),
            away_ms: self.away_ms,
            known_term: self.known_term.get(),
        }
    }
}

/// Offer segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountSegmentsRequest<'a> {
    /// Who asks, with the session.
    pub context: RequestContext<'a>,
    /// The segments.
    pub segments: Vec<SegmentSpec<'a>>,
}

impl<'a> Wire<'a> for MountSegmentsRequest<'a> {
    type Message = v1::MountSegmentsRequest;

    fn from_wire(m: &'a v1::MountSegmentsRequest) -> Result<Self, ConvertError> {
        at_most("segments", m.segments.len(), BATCH_KEYS_MAX)?;
        Ok(MountSegmentsRequest {
            context: RequestContext::of(&m.context)?,
            segments: m.segments.iter().map(SegmentSpec::from_wire).collect::<Result<_, _>>()?,
        })
    }

    fn to_wire(&self) -> v1::MountSegmentsRequest {
        v1::MountSegmentsRequest {
            context: Some(self.context.to_wire()),
            segments: self.segments.iter().map(Wire::to_wire).collect(),
        }
    }
}

/// What becomes of one offered segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentGrant {
    /// The segment.
    pub segment: SegmentId,
    /// Why it was refused.
    pub code: Option<ErrorCode>,
    /// The group it belongs to from now on.
    pub group: GroupId,
    /// The term to adopt for it.
    pub term: Term,
}

/// The answer of MountSegments.
pub type MountSegmentsResponse<'a> = Answer<'a, SegmentGrants>;

/// What becomes of the offered segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentGrants {
    /// One per segment, in order.
    pub grants: Vec<SegmentGrant>,
}

impl<'a> AnswerBody<'a> for SegmentGrants {
    answer_of!(v1::MountSegmentsResponse);

    fn read(m: &'a v1::MountSegmentsResponse) -> Result<Self, ConvertError> {
        at_most("grants", m.grants.len(), BATCH_KEYS_MAX)?;
        let grant = |grant: &v1::SegmentGrant| {
            Ok(SegmentGrant {
                segment: check::segment("grants.segment", grant.segment)?,
                code: check::code(grant.code)?,
                group: check::group("grants.group", grant.group)?,
                term: check::term(grant.term)?,
            })
        };
        Ok(SegmentGrants { grants: m.grants.iter().map(grant).collect::<Result<_, ConvertError>>()? })
    }

    fn write(&self) -> v1::MountSegmentsResponse {
        let grant = |grant: &SegmentGrant| v1::SegmentGrant {
            segment: grant.segment.0,
            code: check::code_number(grant.code),
            group: grant.group.0.into(),
            term: grant.term.get(),
        };
        v1::MountSegmentsResponse { context: None, grants: self.grants.iter().map(grant).collect() }
    }
}

/// Take segments away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnmountSegmentsRequest<'a> {
    /// Who asks, with the session.
    pub context: RequestContext<'a>,
    /// Which ones.
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
