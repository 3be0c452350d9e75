//! Calls of a put: start, end, revoke.

use moontide_types::limits::{BATCH_KEYS_MAX, PREFERRED_PLACES_MAX, REPLICAS_MAX, STRIPES_MAX};
use moontide_types::{Medium, NodeId, Place};

use super::check::{self, at_least, at_most, copied, count, known};
use super::context::RequestContext;
use super::objects::{AttributeSections, ObjectList, ObjectListKind};
use super::response::{Response, ResponseBody, response_of};
use super::{ConvertError, Wire};
use crate::limits::{CONFIGS_MAX, HANDLES_PER_RESPONSE_MAX, TTL_MS_MAX};
use crate::packed::{Packed, PackedKeys};
use crate::records::{PutEndEntry, PutEntry, VersionedId};
use crate::v1;

/// Storage options of objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutConfig {
    /// Requested number of replicas.
    pub replicas: u8,
    /// Minimum number of replicas; the put fails with fewer.
    pub replicas_min: u8,
    /// Stripes per replica; `None`: the master decides.
    pub stripes: Option<u16>,
    /// Places to try first, in order.
    pub preferred: Vec<Place>,
    /// Node on the caller's host, tried next.
    pub local_node: Option<NodeId>,
    /// Whether to replace a complete object of the same key.
    pub upsert: bool,
    /// Whether the writer transfers bytes one-sidedly.
    pub one_sided: bool,
    /// Whether a GPU kernel writes the record, without digests.
    pub digestless: bool,
    /// Medium of the replicas; `None`: the master decides.
    pub medium: Option<Medium>,
    /// TTL in milliseconds; 0: no expiry.
    pub ttl_ms: u64,
}

impl Default for PutConfig {
    /// Returns options with one replica; the master decides the rest.
    fn default() -> PutConfig {
        PutConfig {
            replicas: 1,
            replicas_min: 1,
            stripes: None,
            preferred: vec![],
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
        at_most("config.preferred", m.preferred.len(), PREFERRED_PLACES_MAX)?;
        at_most("config.ttl_ms", m.ttl_ms, TTL_MS_MAX)?;
        let stripes = check::narrow("config.stripes", m.stripes, STRIPES_MAX as u16)?;
        Ok(PutConfig {
            replicas: check::narrow("config.replicas", m.replicas, REPLICAS_MAX as u8)?,
            replicas_min: check::narrow("config.replicas_min", m.replicas_min, REPLICAS_MAX as u8)?,
            stripes: (stripes != 0).then_some(stripes),
            preferred: m.preferred.iter().map(Place::from_wire).collect::<Result<_, _>>()?,
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
            preferred: self.preferred.iter().map(Wire::to_wire).collect(),
            local_node: self.local_node.map_or(0, |node| node.0),
            upsert: self.upsert,
            one_sided: self.one_sided,
            digestless: self.digestless,
            medium: self.medium.map_or(0, |medium| medium as i32),
            ttl_ms: self.ttl_ms,
        }
    }
}

impl<'a> Wire<'a> for Place {
    type Message = v1::Place;

    fn from_wire(m: &'a v1::Place) -> Result<Self, ConvertError> {
        let segment = m.segment.map(|segment| check::segment("config.preferred.segment", segment));
        Ok(Place { node: NodeId(m.node), segment: segment.transpose()? })
    }

    fn to_wire(&self) -> v1::Place {
        v1::Place { node: self.node.0, segment: self.segment.map(|segment| segment.0) }
    }
}

/// Converts a medium. Fails for 0: the medium is required here.
pub(super) fn medium(field: &'static str, number: i32) -> Result<Medium, ConvertError> {
    known(field, number, u8::try_from(number).ok().and_then(Medium::from_number))
}

/// Reserves space for objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutStartRequest<'a> {
    /// Request context.
    pub context: RequestContext<'a>,
    /// Keys of the objects.
    pub keys: PackedKeys<'a>,
    /// Distinct configurations.
    pub configs: Vec<PutConfig>,
    /// One entry per key.
    pub objects: Packed<'a, PutEntry>,
    /// One section per key; `None` if no object has attributes.
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
        let all_exist = objects.iter().all(|object| usize::from(object.config) < configs.len());
        check::rule("objects.config", all_exist, "the configuration exists")?;
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

/// Response of PutStart.
pub type PutStartResponse<'a> = Response<'a, Reservations<'a>>;

/// Reserved locations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservations<'a> {
    /// One entry per key; its validity is that of the reservation.
    pub list: ObjectList<'a>,
    /// Empty, or one per key: expiry time in milliseconds since 1970, 0 for none.
    pub expires_unix_ms: &'a [u64],
}

impl<'a> ResponseBody<'a> for Reservations<'a> {
    response_of!(v1::PutStartResponse);

    fn read(m: &'a v1::PutStartResponse) -> Result<Self, ConvertError> {
        let list = ObjectList::from_wire(&m.objects, &m.handles, ObjectListKind::Response)?;
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

/// Ends the put of objects, with their outcomes.
///
/// Invariant: `stripe_roots` has exactly one root for every stripe of every entry with more than one stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutEndRequest<'a> {
    /// Request context.
    pub context: RequestContext<'a>,
    /// One entry per object.
    pub entries: Packed<'a, PutEndEntry>,
    /// Roots of the stripes of striped objects, in order.
    pub stripe_roots: &'a [u64],
}

impl<'a> PutEndRequest<'a> {
    /// Iterates over the entries with the roots of their stripes; no roots for a single stripe (the object's root).
    pub fn iter(&self) -> impl Iterator<Item = (PutEndEntry, &'a [u64])> + use<'a> {
        let mut rest = self.stripe_roots;
        self.entries.iter().map(move |entry| {
            let (roots, left) = rest.split_at(roots_of(&entry)); // from_wire checked the sum
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
        at_most("stripe_roots", m.stripe_roots.len(), HANDLES_PER_RESPONSE_MAX)?;
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

/// Revokes reservations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutRevokeRequest<'a> {
    /// Request context.
    pub context: RequestContext<'a>,
    /// Reserved versions.
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
