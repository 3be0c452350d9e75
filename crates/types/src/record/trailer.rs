//! Trailer of a record, after the payload and its digests: tenant and key, then the attributes.
//!
//! ```text
//!  tenant + key:   tenant length u16 │ tenant │ key length u16 │ key
//!  attributes:     ( kind u16 │ length u16 │ value )*            kinds ascending, each at most once
//! ```
//!
//! A reader skips unknown kinds, so that it can read records of newer writers; it checks known kinds strictly.

use crate::clock::UnixMillis;
use crate::key::{Key, KeyError, Tenant};
use crate::limits::{COHORT_BYTES_MAX, PARENT_HASH_BYTES_MAX, REPLICAS_MAX, USER_DATA_BYTES_MAX};
use crate::placement::Spread;
use crate::record::layout::ATTRIBUTES_BYTES_MAX;

/// Error of the decoding of a trailer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrailerError {
    /// The bytes end within a length or a value.
    #[error("trailer is truncated")]
    Truncated,
    /// Bytes follow the key.
    #[error("{left} bytes follow the trailer")]
    TrailingBytes {
        /// Number of these bytes.
        left: usize,
    },
    /// The tenant or the key is invalid.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The attributes are longer than 4 KiB.
    #[error("attributes of {len} bytes, at most {ATTRIBUTES_BYTES_MAX} are allowed")]
    AttributesTooLong {
        /// Length in bytes.
        len: usize,
    },
    /// The kinds do not ascend, or a kind occurs twice.
    #[error("attribute kind {kind} is out of order")]
    OutOfOrder {
        /// First kind that is not greater than its predecessor.
        kind: u16,
    },
    /// The value of a known kind is invalid.
    #[error("attribute kind {kind} has an invalid value of {len} bytes")]
    Value {
        /// Number of the kind.
        kind: u16,
        /// Length of the value in bytes.
        len: usize,
    },
}

// Kinds of attributes.
const PIN: u16 = 1;
const EXPIRY: u16 = 2;
const COHORT: u16 = 3;
const PARENT: u16 = 4;
const USER_DATA: u16 = 5;
const EXTRA_REPLICAS: u16 = 6;
const SPREAD: u16 = 7;
const DISK_REPLICAS: u16 = 8;

/// Returns the CRC-32C over both sections, as stored in the header.
pub fn trailer_crc(key_section: &[u8], attributes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(key_section), attributes)
}

/// Tenant and key section of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeySection<'a> {
    /// Tenant that owns the object.
    pub tenant: Tenant<'a>,
    /// The full key.
    pub key: Key<'a>,
}

impl<'a> KeySection<'a> {
    /// Returns the length of the encoded form in bytes.
    pub fn encoded_len(&self) -> usize {
        2 + self.tenant.as_str().len() + 2 + self.key.as_bytes().len()
    }

    /// Appends the encoded form to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        for part in [self.tenant.as_str().as_bytes(), self.key.as_bytes()] {
            out.extend_from_slice(&(part.len() as u16).to_le_bytes()); // both are at most 4 KiB
            out.extend_from_slice(part);
        }
    }

    /// Offset of the tenant's name in the encoded form; its length stands before it.
    pub const TENANT_AT: usize = 2;

    /// Returns whether an encoded section, or the first bytes of one, has this tenant.
    pub fn starts_with_tenant(bytes: &[u8], tenant: &str) -> bool {
        let Some((len, rest)) = bytes.split_first_chunk() else { return false };
        usize::from(u16::from_le_bytes(*len)) == tenant.len() && rest.starts_with(tenant.as_bytes())
    }

    /// Decodes the section. Fails if bytes are left over.
    pub fn decode(bytes: &'a [u8]) -> Result<KeySection<'a>, TrailerError> {
        let mut rest = bytes;
        let tenant = Tenant::from_bytes(take_prefixed(&mut rest)?)?;
        let key = Key::new(take_prefixed(&mut rest)?)?;
        if !rest.is_empty() {
            return Err(TrailerError::TrailingBytes { left: rest.len() });
        }
        Ok(KeySection { tenant, key })
    }
}

/// Resistance of an object to eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PinClass {
    /// Evicted under pressure.
    #[default]
    None = 0,
    /// Evicted last.
    Soft = 1,
    /// Never evicted.
    Hard = 2,
}

impl PinClass {
    /// Returns the class with this number.
    pub fn from_number(number: u8) -> Option<PinClass> {
        match number {
            0 => Some(PinClass::None),
            1 => Some(PinClass::Soft),
            2 => Some(PinClass::Hard),
            _ => None,
        }
    }
}

/// Hash of the previous block in a chain of prompt blocks: up to 32 bytes, chosen by the inference engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ParentHash(Box<[u8]>);

impl ParentHash {
    /// Creates a hash of 1 to [`PARENT_HASH_BYTES_MAX`] bytes; `None` for other lengths.
    pub fn new(bytes: &[u8]) -> Option<ParentHash> {
        Self::check(bytes).map(|bytes| ParentHash(bytes.into()))
    }

    /// Returns the bytes if their length is valid.
    fn check(bytes: &[u8]) -> Option<&[u8]> {
        (1..=PARENT_HASH_BYTES_MAX).contains(&bytes.len()).then_some(bytes)
    }

    /// Returns the bytes of the hash.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Optional properties of an object, stored in its trailer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Resistance to eviction.
    pub pin: PinClass,
    /// Expiry time; `None`: the object does not expire.
    pub expires: Option<UnixMillis>,
    /// Label of objects that are leased and evicted together; 1 to [`COHORT_BYTES_MAX`] bytes.
    pub cohort: Option<Box<[u8]>>,
    /// Hash of the previous block in a chain of prompt blocks.
    pub parent: Option<ParentHash>,
    /// Opaque bytes of the inference engine; 1 to [`USER_DATA_BYTES_MAX`] bytes.
    pub user_data: Option<Box<[u8]>>,
    /// Replicas that the writer asked for, besides the first. Masters make those that are lost again.
    pub extra_replicas: u8,
    /// What the replicas must not share, besides their node.
    pub spread: Option<Spread>,
    /// Disks that shall have the object, besides memory; at most [`REPLICAS_MAX`].
    pub disk_replicas: u8,
}

impl Attributes {
    /// Fails if an attribute violates its length limit.
    pub fn check(&self) -> Result<(), TrailerError> {
        self.borrowed().check()
    }

    /// Returns the attributes in borrowed form.
    pub fn borrowed(&self) -> AttributesRef<'_> {
        AttributesRef {
            pin: self.pin,
            expires: self.expires,
            cohort: self.cohort.as_deref(),
            parent: self.parent.as_ref().map(ParentHash::as_bytes),
            user_data: self.user_data.as_deref(),
            extra_replicas: self.extra_replicas,
            spread: self.spread,
            disk_replicas: self.disk_replicas,
        }
    }

    /// Appends the encoded form to `out`; no bytes for default attributes.
    ///
    /// # Panics
    /// If an attribute violates its length limit: attributes that cannot be decoded must never be written.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.check().expect("attributes must be valid before they are written");
        let mut put = |kind: u16, value: &[u8]| {
            out.extend_from_slice(&kind.to_le_bytes());
            out.extend_from_slice(&(value.len() as u16).to_le_bytes());
            out.extend_from_slice(value);
        };
        if self.pin != PinClass::None {
            put(PIN, &[self.pin as u8]);
        }
        if let Some(expires) = self.expires {
            put(EXPIRY, &expires.0.to_le_bytes());
        }
        if let Some(cohort) = &self.cohort {
            put(COHORT, cohort);
        }
        if let Some(parent) = &self.parent {
            put(PARENT, parent.as_bytes());
        }
        if let Some(user_data) = &self.user_data {
            put(USER_DATA, user_data);
        }
        if self.extra_replicas > 0 {
            put(EXTRA_REPLICAS, &[self.extra_replicas]);
        }
        if let Some(spread) = self.spread {
            put(SPREAD, &[spread.number()]);
        }
        if self.disk_replicas > 0 {
            put(DISK_REPLICAS, &[self.disk_replicas]);
        }
    }

    /// Decodes the section.
    pub fn decode(bytes: &[u8]) -> Result<Attributes, TrailerError> {
        AttributesRef::decode(bytes).map(AttributesRef::to_owned)
    }
}

/// [`Attributes`] that borrow from the bytes of a record: decoding does not allocate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttributesRef<'a> {
    /// Resistance to eviction.
    pub pin: PinClass,
    /// Expiry time; `None`: the object does not expire.
    pub expires: Option<UnixMillis>,
    /// Label of objects that are leased and evicted together; 1 to [`COHORT_BYTES_MAX`] bytes.
    pub cohort: Option<&'a [u8]>,
    /// Hash of the previous block; 1 to [`PARENT_HASH_BYTES_MAX`] bytes.
    pub parent: Option<&'a [u8]>,
    /// Opaque bytes of the inference engine; 1 to [`USER_DATA_BYTES_MAX`] bytes.
    pub user_data: Option<&'a [u8]>,
    /// Replicas that the writer asked for, besides the first; fewer than [`REPLICAS_MAX`].
    pub extra_replicas: u8,
    /// What the replicas must not share, besides their node.
    pub spread: Option<Spread>,
    /// Disks that shall have the object, besides memory; at most [`REPLICAS_MAX`].
    pub disk_replicas: u8,
}

impl<'a> AttributesRef<'a> {
    /// Fails if an attribute violates its length limit.
    pub fn check(self) -> Result<(), TrailerError> {
        let bounded = |kind, value: Option<&[u8]>, max| match value {
            Some(v) if v.is_empty() || v.len() > max => Err(TrailerError::Value { kind, len: v.len() }),
            _ => Ok(()),
        };
        bounded(COHORT, self.cohort, COHORT_BYTES_MAX)?;
        bounded(PARENT, self.parent, PARENT_HASH_BYTES_MAX)?;
        bounded(USER_DATA, self.user_data, USER_DATA_BYTES_MAX)?;
        if usize::from(self.extra_replicas) >= REPLICAS_MAX {
            return Err(TrailerError::Value { kind: EXTRA_REPLICAS, len: 1 });
        }
        if usize::from(self.disk_replicas) > REPLICAS_MAX {
            return Err(TrailerError::Value { kind: DISK_REPLICAS, len: 1 });
        }
        Ok(())
    }

    /// Decodes the section.
    pub fn decode(bytes: &'a [u8]) -> Result<AttributesRef<'a>, TrailerError> {
        if bytes.len() > ATTRIBUTES_BYTES_MAX {
            return Err(TrailerError::AttributesTooLong { len: bytes.len() });
        }
        let mut attributes = AttributesRef::default();
        let (mut rest, mut last_kind) = (bytes, 0);
        while !rest.is_empty() {
            let kind = take_u16(&mut rest)?;
            if kind <= last_kind {
                return Err(TrailerError::OutOfOrder { kind });
            }
            last_kind = kind;
            let value = take_prefixed(&mut rest)?;
            let invalid = TrailerError::Value { kind, len: value.len() };
            match kind {
                PIN => {
                    let &[number] = value else { return Err(invalid) };
                    attributes.pin = PinClass::from_number(number).ok_or(invalid)?;
                }
                EXPIRY => {
                    let value = value.try_into().map_err(|_| invalid)?;
                    attributes.expires = Some(UnixMillis(u64::from_le_bytes(value)));
                }
                COHORT => attributes.cohort = Some(value),
                PARENT => attributes.parent = Some(ParentHash::check(value).ok_or(invalid)?),
                USER_DATA => attributes.user_data = Some(value),
                EXTRA_REPLICAS => {
                    let &[number @ 1..=u8::MAX] = value else { return Err(invalid) };
                    attributes.extra_replicas = number;
                }
                SPREAD => {
                    let &[number] = value else { return Err(invalid) };
                    attributes.spread = Some(Spread::from_number(number).ok_or(invalid)?);
                }
                DISK_REPLICAS => {
                    let &[number @ 1..=u8::MAX] = value else { return Err(invalid) };
                    attributes.disk_replicas = number;
                }
                _unknown => {}
            }
        }
        attributes.check()?;
        Ok(attributes)
    }

    /// Returns the attributes in owned form.
    ///
    /// # Panics
    /// If the length of the parent hash is invalid; [`AttributesRef::decode`] never returns such a value.
    pub fn to_owned(self) -> Attributes {
        Attributes {
            pin: self.pin,
            expires: self.expires,
            cohort: self.cohort.map(Into::into),
            parent: self.parent.map(|parent| ParentHash::new(parent).expect("checked by decode")),
            user_data: self.user_data.map(Into::into),
            extra_replicas: self.extra_replicas,
            spread: self.spread,
            disk_replicas: self.disk_replicas,
        }
    }
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8], TrailerError> {
    let (taken, left) = rest.split_at_checked(len).ok_or(TrailerError::Truncated)?;
    *rest = left;
    Ok(taken)
}

fn take_u16(rest: &mut &[u8]) -> Result<u16, TrailerError> {
    let bytes = take(rest, 2)?;
    Ok(u16::from_le_bytes([bytes[0], bytes[1]]))
}

fn take_prefixed<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], TrailerError> {
    let len = take_u16(rest)?;
    take(rest, len.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full() -> Attributes {
        Attributes {
            pin: PinClass::Soft,
            expires: Some(UnixMillis(1_800_000_000_000)),
            cohort: Some((*b"session-7").into()),
            parent: ParentHash::new(&[9; 32]),
            user_data: Some((*b"tokens").into()),
            extra_replicas: 1,
            spread: Some(Spread::Rack),
            disk_replicas: 2,
        }
    }

    #[test]
    fn attributes_and_key_section_round_trip() {
        for attributes in [Attributes::default(), full()] {
            let mut bytes = vec![];
            attributes.encode(&mut bytes);
            assert_eq!(Attributes::decode(&bytes), Ok(attributes));
        }
        let section = KeySection { tenant: Tenant::DEFAULT, key: Key::new(b"k\0\xff").unwrap() };
        let mut bytes = vec![];
        section.encode(&mut bytes);
        assert_eq!(bytes.len(), section.encoded_len());
        assert_eq!(KeySection::decode(&bytes), Ok(section));
        let tenant = Tenant::DEFAULT.as_str();
        assert!(KeySection::starts_with_tenant(&bytes, tenant));
        assert!(KeySection::starts_with_tenant(&bytes[..KeySection::TENANT_AT + tenant.len()], tenant));
        let longer = format!("{tenant}x");
        for other in ["", "other", &tenant[1..], &tenant[..tenant.len() - 1], &longer] {
            assert!(!KeySection::starts_with_tenant(&bytes, other), "{other:?}");
        }
        for len in 0..KeySection::TENANT_AT + tenant.len() {
            assert!(!KeySection::starts_with_tenant(&bytes[..len], tenant), "{len} bytes");
        }
    }

    #[test]
    fn truncated_trailer_is_rejected_or_decodes_to_prefix() {
        let mut bytes = vec![];
        full().encode(&mut bytes);
        for len in 1..bytes.len() {
            // Truncation between two attributes leaves a valid, shorter list; `trailer_crc` in the header detects it.
            if let Ok(shorter) = Attributes::decode(&bytes[..len]) {
                let mut again = vec![];
                shorter.encode(&mut again);
                assert_eq!(again, &bytes[..len]);
            }
        }
        let mut bytes = vec![];
        KeySection { tenant: Tenant::DEFAULT, key: Key::new(b"abc").unwrap() }.encode(&mut bytes);
        for len in 0..bytes.len() {
            assert!(KeySection::decode(&bytes[..len]).is_err());
        }
        bytes.push(0);
        assert_eq!(KeySection::decode(&bytes), Err(TrailerError::TrailingBytes { left: 1 }));
    }

    #[test]
    fn unknown_attribute_is_skipped_and_invalid_value_rejected() {
        assert_eq!(Attributes::decode(&[99, 0, 2, 0, 1, 1]), Ok(Attributes::default()));
        let error_of = |bytes: &[u8]| Attributes::decode(bytes).unwrap_err();
        assert_eq!(error_of(&[1, 0, 1, 0, 3]), TrailerError::Value { kind: 1, len: 1 });
        assert_eq!(error_of(&[1, 0, 0, 0]), TrailerError::Value { kind: 1, len: 0 });
        assert_eq!(error_of(&[2, 0, 1, 0, 3]), TrailerError::Value { kind: 2, len: 1 });
        assert_eq!(error_of(&[3, 0, 0, 0]), TrailerError::Value { kind: 3, len: 0 });
        for replicas in [0, 8, 255] {
            assert_eq!(error_of(&[6, 0, 1, 0, replicas]), TrailerError::Value { kind: 6, len: 1 });
        }
        assert_eq!(Attributes::decode(&[6, 0, 1, 0, 7]).unwrap().extra_replicas, 7);
        for spread in [0, 4, 255] {
            assert_eq!(error_of(&[7, 0, 1, 0, spread]), TrailerError::Value { kind: 7, len: 1 });
        }
        assert_eq!(error_of(&[7, 0, 2, 0, 1, 0]), TrailerError::Value { kind: 7, len: 2 });
        assert_eq!(Attributes::decode(&[7, 0, 1, 0, 3]).unwrap().spread, Some(Spread::Zone));
        for replicas in [0, 9, 255] {
            assert_eq!(error_of(&[8, 0, 1, 0, replicas]), TrailerError::Value { kind: 8, len: 1 });
        }
        assert_eq!(Attributes::decode(&[8, 0, 1, 0, 8]).unwrap().disk_replicas, 8);
        assert_eq!(error_of(&[1, 0, 1, 0, 1, 1, 0, 1, 0, 1]), TrailerError::OutOfOrder { kind: 1 });
        assert_eq!(error_of(&[0, 0, 0, 0]), TrailerError::OutOfOrder { kind: 0 });
        assert_eq!(error_of(&vec![0; 5000]), TrailerError::AttributesTooLong { len: 5000 });
    }

    #[test]
    fn borrowed_attributes_point_into_section() {
        let (attributes, mut bytes) = (full(), vec![]);
        attributes.encode(&mut bytes);
        let borrowed = AttributesRef::decode(&bytes).unwrap();
        assert_eq!(borrowed, attributes.borrowed());
        for part in [borrowed.cohort, borrowed.parent, borrowed.user_data] {
            let part = part.unwrap();
            assert!(bytes.as_ptr_range().contains(&part.as_ptr()), "{part:?} was copied");
        }
        assert_eq!(borrowed.to_owned(), attributes);
    }

    #[test]
    fn attribute_length_limits_are_enforced() {
        type With = fn(&[u8]) -> AttributesRef<'_>;
        let parts: [(u16, usize, With); 3] = [
            (COHORT, COHORT_BYTES_MAX, |v| AttributesRef { cohort: Some(v), ..AttributesRef::default() }),
            (PARENT, PARENT_HASH_BYTES_MAX, |v| AttributesRef {
                parent: Some(v),
                ..AttributesRef::default()
            }),
            (USER_DATA, USER_DATA_BYTES_MAX, |v| AttributesRef {
                user_data: Some(v),
                ..AttributesRef::default()
            }),
        ];
        for (kind, max, with) in parts {
            for (len, fits) in [(0, false), (1, true), (max, true), (max + 1, false)] {
                let value = vec![7; len];
                let expected = if fits { Ok(()) } else { Err(TrailerError::Value { kind, len }) };
                assert_eq!(with(&value).check(), expected);
                let mut bytes = [kind.to_le_bytes(), (len as u16).to_le_bytes()].concat();
                bytes.extend_from_slice(&value);
                assert_eq!(AttributesRef::decode(&bytes), expected.map(|()| with(&value)));
            }
        }
    }
}
