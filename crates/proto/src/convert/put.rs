//! The put: start, end, revoke.

use moontide_types::NodeId;
use moontide_types::bounds::{BATCH_KEYS_MAX, REPLICAS_MAX, STRIPES_MAX};

use super::answer::{Answer, AnswerBody, answer_of};
use super::check::{self, at_least, at_most, copied, count, known};
use super::context::RequestContext;
use super::objects::{AttributeSections, ListKind, ObjectList};
use super::operator::SegmentRef;
use super::{ConvertError, Wire};
use crate::limits::{CONFIGS_MAX, HANDLES_PER_ANSWER_MAX, TTL_MS_MAX};
use crate::packed::{Packed, PackedKeys};
use crate::records::{Medium, PutEndEntry, PutEntry, VersionedId};
use crate::v1;

/// How objects are to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutConfig {
    /// Replicas wanted.
    pub replicas: u8,
    /// Fewest that are acceptable.
    pub replicas_min: u8,
    /// Stripes per replica; `None` leaves it to the master.
    pub stripes: Option<u16>,
    /// Segments to try first.
    pub preferred_segments: Vec<SegmentRef>,
    /// Nodes to try next.
    pub preferred_nodes: Vec<NodeId>,
    /// The node on the caller's host, tried before any other.
    pub local_node: Option<NodeId>,
    /// Replace a complete object of the same key.
    pub upsert: bool,
    /// The writer moves bytes one-sidedly.
    pub one_sided: bool,
    /// A GPU kernel writes the record, without digests.
    pub digestless: bool,
    /// Where the replicas go; `None` leaves it to the master.
    pub medium: Option<Medium>,
    /// Time to live; 0 for ever.
    pub ttl_ms: u64,
}

impl Default for PutConfig {
    /// One replica, the rest left to the master.
    fn default() -> PutConfig {
        PutConfig {
            replicas: 1,
            replicas_min: 1,
            stripes: None,
            preferred_segments: vec![],
            preferred_nodes: vec![],
            local_node: None,
            upsert: false,
            one_sided: false,
            digestless: false,
            medium: None,
            ttl_ms: 0,
        }
    }
}

impl<'a> Wire<'a> for PutConfig {
    type Message = v1::PutConfig;

    fn from_wire(m: &'a v1::PutConfig) -> Result<Self, ConvertError> {
        at_least("config.replicas", m.replicas, 1u32)?;
        at_least("config.replicas_min", m.replicas_min, 1u32)?;
        at_most("config.replicas_min", m.replicas_min, m.replicas)?;
        at_most("config.preferred_segments", m.preferred_segments.len(), REPLICAS_MAX)?;
        at_most("config.preferred_nodes", m.preferred_nodes.len(), REPLICAS_MAX)?;
        at_most("config.ttl_ms", m.ttl_ms, TTL_MS_MAX)?;
        let stripes = check::narrow("config.stripes", m.stripes, STRIPES_MAX as u16)?;
        Ok(PutConfig {
            replicas: check::narrow("config.replicas", m.replicas, REPLICAS_MAX as u8)?,
            replicas_min: check::narrow("config.replicas_min", m.replicas_min, REPLICAS_MAX as u8)?,
            stripes: (stripes != 0).then_some(stripes),
            preferred_segments: m
                .preferred_segments
                .iter()
                .map(SegmentRef::from_wire)
                .collect::<Result<_, _>>()?,
            preferred_nodes: m.preferred_nodes.iter().map(|&node| NodeId(node)).collect(),
            local_node: (m.local_node != 0).then_some(NodeId(m.local_node)),
            upsert: m.upsert,
            one_sided: m.one_sided,
            digestless: m.digestless,
            medium: if m.medium == 0 { None } else { Some(medium("config.medium", m.medium)?) },
            ttl_ms: m.ttl_ms,
        })
    }

    fn to_wire(&self) -> v1::PutConfig {
        v1::PutConfig {
            replicas: self.replicas.into(),
            replicas_min: self.replicas_min.into(),
            stripes: self.stripes.unwrap_or(0).into(),
            preferred_segments: self.preferred_segments.iter().map(Wire::to_wire).collect(),
            preferred_nodes: self.preferred_nodes.iter().map(|node| node.0).collect(),
            local_node: self.local_node.map_or(0, |node| node.0),
            upsert: self.upsert,
            one_sided: self.one_sided,
            digestless: self.digestless,
            medium: self.medium.map_or(0, |medium| medium as i32),
            ttl_ms: self.ttl_ms,
        }
    }
}

/// A medium that is named, not wished for.
pub(super) fn medium(field: &'static str, number: i32) -> Result<Medium, ConvertError> {
    known(field, number, u8::try_from(number).ok().and_then(Medium::from_number))
}

/// Reserve space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutStartRequest<'a> {
    /// Who asks.
    pub context: RequestContext<'a>,
    /// Which keys.
    pub keys: PackedKeys<'a>,
    /// The distinct configurations.
    pub configs: Vec<PutConfig>,
    /// One per key.
    pub objects: Packed<'a, PutEntry>,
    /// One section per key; `None` when none has any.
    pub attributes: Option<AttributeSections<'a>>,
}

impl<'a> Wire<'a> for PutStartRequest<'a> {
    type Message = v1::PutStartRequest;

    fn from_wire(m: &'a v1::PutStartRequest) -> Result<Self, ConvertError> {
        let context = RequestContext::of(&m.context)?;
        let keys = check::keys("keys", &m.keys)?;
        at_most("configs", m.configs.len(), CONFIGS_MAX)?;
        let configs = m.configs.iter().map(PutConfig::from_wire).collect::<Result<Vec<_>, _>>()?;
        let objects: Packed<'a, PutEntry> = check::records("objects", &m.objects, BATCH_KEYS_MAX)?;
        count("objects", objects.len(), keys.len())?;
        let exist = objects.iter().all(|object| usize::from(object.config) < configs.len());
        check::rule("objects.config", exist, "the configuration exists")?;
        let attributes = AttributeSections::from_wire(&m.attributes, keys.len())?;
        Ok(PutStartRequest { context, keys, configs, objects, attributes })
    }

    fn to_wire(&self) -> v1::PutStartRequest {
        v1::PutStartRequest {
            context: Some(self.context.to_wire()),
            keys: copied(self.keys.as_encoded()),
            configs: self.configs.iter().map(Wire::to_wire).collect(),
            objects: copied(self.objects.as_encoded()),
            attributes: AttributeSections::to_wire(self.attributes),
        }
    }
}

/// The answer of PutStart.
pub type PutStartResponse<'a> = Answer<'a, Reservations<'a>>;

/// What was reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservations<'a> {
    /// One entry per key; its window is the life of the reservation.
    pub list: ObjectList<'a>,
    /// Empty, or one per key: when it expires in milliseconds since 1970, 0 for never.
    pub expires_unix_ms: &'a [u64],
}

impl<'a> AnswerBody<'a> for Reservations<'a> {
    answer_of!(v1::PutStartResponse);

    fn read(m: &'a v1::PutStartResponse) -> Result<Self, ConvertError> {
        let list = ObjectList::from_wire(&m.objects, &m.handles, ListKind::Answer)?;
        if !m.expires_unix_ms.is_empty() {
            count("expires_unix_ms", m.expires_unix_ms.len(), list.len())?;
        }
        Ok(Reservations { list, expires_unix_ms: &m.expires_unix_ms })
    }

    fn write(&self) -> v1::PutStartResponse {
        v1::PutStartResponse {
            context: None,
            objects: self.list.objects_to_wire(),
            handles: self.list.handles_to_wire(),
            expires_unix_ms: self.expires_unix_ms.to_vec(),
        }
    }
}

/// How the writing went.
///
/// Invariant: there is exactly one root for every stripe of every entry with more than one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutEndRequest<'a> {
    /// Who asks.
    pub context: RequestContext<'a>,
    /// The objects.
    pub entries: Packed<'a, PutEndEntry>,
    /// Roots of the stripes of striped objects, in order.
    pub stripe_roots: &'a [u64],
}

impl<'a> PutEndRequest<'a> {
    /// Each entry with the roots of its stripes; none if it has only one, which is the object's.
    pub fn iter(&self) -> impl Iterator<Item = (PutEndEntry, &'a [u64])> + use<'a> {
        let mut rest = self.stripe_roots;
        self.entries.iter().map(move |entry| {
            let (roots, left) = rest.split_at(roots_of(&entry)); // from_wire compared the sum
            rest = left;
            (entry, roots)
        })
    }
}

fn roots_of(entry: &PutEndEntry) -> usize {
    if entry.stripe_count > 1 { entry.stripe_count.into() } else { 0 }
}

impl<'a> Wire<'a> for PutEndRequest<'a> {
    type Message = v1::PutEndRequest;

    fn from_wire(m: &'a v1::PutEndRequest) -> Result<Self, ConvertError> {
        let entries: Packed<'a, PutEndEntry> = check::records("entries", &m.entries, BATCH_KEYS_MAX)?;
        at_most("stripe_roots", m.stripe_roots.len(), HANDLES_PER_ANSWER_MAX)?;
        let expected = entries.iter().map(|entry| roots_of(&entry)).sum();
        count("stripe_roots", m.stripe_roots.len(), expected)?;
        Ok(PutEndRequest { context: RequestContext::of(&m.context)?, entries, stripe_roots: &m.stripe_roots })
    }

    fn to_wire(&self) -> v1::PutEndRequest {
        v1::PutEndRequest {
            context: Some(self.context.to_wire()),
            entries: copied(self.entries.as_encoded()),
            stripe_roots: self.stripe_roots.to_vec(),
        }
    }
}

/// Give reservations back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutRevokeRequest<'a> {
    /// Who asks.
    pub context: RequestContext<'a>,
    /// Which ones.
    pub versions: Packed<'a, VersionedId>,
}

impl<'a> Wire<'a> for PutRevokeRequest<'a> {
    type Message = v1::PutRevokeRequest;

    fn from_wire(m: &'a v1::PutRevokeRequest) -> Result<Self, ConvertError> {
        Ok(PutRevokeRequest {
            context: RequestContext::of(&m.context)?,
            versions: check::records("versions", &m.versions, BATCH_KEYS_MAX)?,
        })
    }

    fn to_wire(&self) -> v1::PutRevokeRequest {
        v1::PutRevokeRequest {
            context: Some(self.context.to_wire()),
            versions: copied(self.versions.as_encoded()),
        }
    }
}
