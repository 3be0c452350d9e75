//! What stands behind the payload and its digests: tenant and key, and the attributes.
//!
//! ```text
//!  tenant + key:   tenant length u16 │ tenant │ key length u16 │ key
//!  attributes:     ( kind u16 │ length u16 │ value )*            kinds ascending, each at most once
//! ```
//!
//! Kinds that a reader does not know are skipped, so that a newer writer does not make its records
//! unreadable; known kinds are checked strictly.

use crate::bounds::{COHORT_BYTES_MAX, NOTE_BYTES_MAX, PARENT_HASH_BYTES_MAX};
use crate::clock::UnixMillis;
use crate::key::{Key, KeyError, Tenant};
use crate::record::layout::ATTRIBUTES_BYTES_MAX;

/// Why a trailer cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrailerError {
    /// It ends in the middle of something.
    #[error("the trailer is cut off")]
    Truncated,
    /// There are bytes left over.
    #[error("{left} bytes follow the trailer")]
    Excess {
        /// How many.
        left: usize,
    },
    /// Tenant or key break their rules.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The attributes exceed their bound.
    #[error("attributes of {len} bytes, at most {ATTRIBUTES_BYTES_MAX} are allowed")]
    AttributesTooLong {
        /// Their length.
        len: usize,
    },
    /// Kinds must ascend.
    #[error("attribute kind {kind} is out of order")]
    Order {
        /// The kind that came too late.
        kind: u16,
    },
    /// A known kind has a value that it cannot have.
    #[error("attribute kind {kind} has an invalid value of {len} bytes")]
    Value {
        /// The kind.
        kind: u16,
        /// Length of its value.
        len: usize,
    },
}

// The kinds of attributes.
const PIN: u16 = 1;
const EXPIRES: u16 = 2;
const COHORT: u16 = 3;
const PARENT: u16 = 4;
const NOTE: u16 = 5;

/// CRC-32C over both sections, as the header carries it.
pub fn trailer_crc(key_section: &[u8], attributes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(key_section), attributes)
}

/// Tenant and key as they stand in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeySection<'a> {
    /// Whose object it is.
    pub tenant: Tenant<'a>,
    /// The full key.
    pub key: Key<'a>,
}

impl<'a> KeySection<'a> {
    /// Length of the encoded form.
    pub fn encoded_len(&self) -> usize {
        2 + self.tenant.as_str().len() + 2 + self.key.as_bytes().len()
    }

    /// Appends the encoded form to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        for part in [self.tenant.as_str().as_bytes(), self.key.as_bytes()] {
            out.extend_from_slice(&(part.len() as u16).to_le_bytes()); // both are bounded by 4 KiB
            out.extend_from_slice(part);
        }
    }

    /// Reads the section; it must be used up.
    pub fn decode(bytes: &'a [u8]) -> Result<KeySection<'a>, TrailerError> {
        let mut rest = bytes;
        let tenant = Tenant::from_bytes(take_prefixed(&mut rest)?)?;
        let key = Key::new(take_prefixed(&mut rest)?)?;
        if !rest.is_empty() {
            return Err(TrailerError::Excess { left: rest.len() });
        }
        Ok(KeySection { tenant, key })
    }
}

/// How strongly an object resists eviction.
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
    /// The class with this number.
    pub fn from_number(number: u8) -> Option<PinClass> {
        match number {
            0 => Some(PinClass::None),
            1 => Some(PinClass::Soft),
            2 => Some(PinClass::Hard),
            _ => None,
        }
    }
}

/// Hash of the block before this one in a chain of prompt blocks: up to 32 bytes of the engine's choosing.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ParentHash(Box<[u8]>);

impl ParentHash {
    /// 1 to [`PARENT_HASH_BYTES_MAX`] bytes.
    pub fn new(bytes: &[u8]) -> Option<ParentHash> {
        Self::check(bytes).map(|bytes| ParentHash(bytes.into()))
    }

    /// The bytes, if they can be a parent hash.
    fn check(bytes: &[u8]) -> Option<&[u8]> {
        (1..=PARENT_HASH_BYTES_MAX).contains(&bytes.len()).then_some(bytes)
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// What an object says about itself beyond its bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// How strongly it resists eviction.
    pub pin: PinClass,
    /// When it expires, if ever.
    pub expires: Option<UnixMillis>,
    /// Label of objects that are leased and evicted together; 1 to [`COHORT_BYTES_MAX`] bytes.
    pub cohort: Option<Box<[u8]>>,
    /// The block before this one.
    pub parent: Option<ParentHash>,
    /// Bytes that mean something to the engine alone; 1 to [`NOTE_BYTES_MAX`] bytes.
    pub note: Option<Box<[u8]>>,
}

impl Attributes {
    /// Whether all parts keep to their bounds.
    pub fn check(&self) -> Result<(), TrailerError> {
        self.borrowed().check()
    }

    /// The same, borrowed.
    pub fn borrowed(&self) -> AttributesRef<'_> {
        AttributesRef {
            pin: self.pin,
            expires: self.expires,
            cohort: self.cohort.as_deref(),
            parent: self.parent.as_ref().map(ParentHash::as_bytes),
            note: self.note.as_deref(),
        }
    }

    /// Appends the encoded form to `out`; nothing at all for default attributes.
    ///
    /// # Panics
    /// If a part exceeds its bound: attributes that cannot be read back must never be written.
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
            put(EXPIRES, &expires.0.to_le_bytes());
        }
        if let Some(cohort) = &self.cohort {
            put(COHORT, cohort);
        }
        if let Some(parent) = &self.parent {
            put(PARENT, parent.as_bytes());
        }
        if let Some(note) = &self.note {
            put(NOTE, note);
        }
    }

    /// Reads the section.
    pub fn decode(bytes: &[u8]) -> Result<Attributes, TrailerError> {
        AttributesRef::decode(bytes).map(AttributesRef::to_owned)
    }
}

/// [`Attributes`] as they stand in a record: read without allocating.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttributesRef<'a> {
    /// How strongly it resists eviction.
    pub pin: PinClass,
    /// When it expires, if ever.
    pub expires: Option<UnixMillis>,
    /// Label of objects that are leased and evicted together; 1 to [`COHORT_BYTES_MAX`] bytes.
    pub cohort: Option<&'a [u8]>,
    /// Hash of the block before this one; 1 to [`PARENT_HASH_BYTES_MAX`] bytes.
    pub parent: Option<&'a [u8]>,
    /// Bytes that mean something to the engine alone; 1 to [`NOTE_BYTES_MAX`] bytes.
    pub note: Option<&'a [u8]>,
}

impl<'a> AttributesRef<'a> {
    /// Whether all parts keep to their bounds.
    pub fn check(self) -> Result<(), TrailerError> {
        let bounded = |kind, value: Option<&[u8]>, max| match value {
            Some(v) if v.is_empty() || v.len() > max => Err(TrailerError::Value { kind, len: v.len() }),
            _ => Ok(()),
        };
        bounded(COHORT, self.cohort, COHORT_BYTES_MAX)?;
        bounded(PARENT, self.parent, PARENT_HASH_BYTES_MAX)?;
        bounded(NOTE, self.note, NOTE_BYTES_MAX)
    }

    /// Reads the section.
    pub fn decode(bytes: &'a [u8]) -> Result<AttributesRef<'a>, TrailerError> {
        if bytes.len() > ATTRIBUTES_BYTES_MAX {
            return Err(TrailerError::AttributesTooLong { len: bytes.len() });
        }
        let mut attributes = AttributesRef::default();
        let (mut rest, mut last_kind) = (bytes, 0);
        while !rest.is_empty() {
            let kind = take_u16(&mut rest)?;
            if kind <= last_kind {
                return Err(TrailerError::Order { kind });
            }
            last_kind = kind;
            let value = take_prefixed(&mut rest)?;
            let invalid = TrailerError::Value { kind, len: value.len() };
            match kind {
                PIN => {
                    let &[number] = value else { return Err(invalid) };
                    attributes.pin = PinClass::from_number(number).ok_or(invalid)?;
                }
                EXPIRES => {
                    let value = value.try_into().map_err(|_| invalid)?;
                    attributes.expires = Some(UnixMillis(u64::from_le_bytes(value)));
                }
                COHORT => attributes.cohort = Some(value),
                PARENT => attributes.parent = Some(ParentHash::check(value).ok_or(invalid)?),
                NOTE => attributes.note = Some(value),
                _unknown => {}
            }
        }
        attributes.check()?;
        Ok(attributes)
    }

    /// The same, owned.
    ///
    /// # Panics
    /// If the parent hash exceeds its bound, which [`AttributesRef::decode`] never lets through.
    pub fn to_owned(self) -> Attributes {
        Attributes {
            pin: self.pin,
            expires: self.expires,
            cohort: self.cohort.map(Into::into),
            parent: self.parent.map(|parent| ParentHash::new(parent).expect("checked when it was read")),
            note: self.note.map(Into::into),
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
            note: Some((*b"tokens").into()),
        }
    }

    #[test]
    fn what_is_written_is_read() {
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
    }

    #[test]
    fn every_truncation_is_noticed() {
        let mut bytes = vec![];
        full().encode(&mut bytes);
        for len in 1..bytes.len() {
            // A cut between two attributes leaves a valid, shorter list; the header's CRC is there for that.
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
        assert_eq!(KeySection::decode(&bytes), Err(TrailerError::Excess { left: 1 }));
    }

    #[test]
    fn unknown_kinds_are_skipped_and_known_ones_checked() {
        assert_eq!(Attributes::decode(&[99, 0, 2, 0, 1, 1]), Ok(Attributes::default()));
        let refused = |bytes: &[u8]| Attributes::decode(bytes).unwrap_err();
        assert_eq!(refused(&[1, 0, 1, 0, 3]), TrailerError::Value { kind: 1, len: 1 });
        assert_eq!(refused(&[1, 0, 0, 0]), TrailerError::Value { kind: 1, len: 0 });
        assert_eq!(refused(&[2, 0, 1, 0, 3]), TrailerError::Value { kind: 2, len: 1 });
        assert_eq!(refused(&[3, 0, 0, 0]), TrailerError::Value { kind: 3, len: 0 });
        assert_eq!(refused(&[1, 0, 1, 0, 1, 1, 0, 1, 0, 1]), TrailerError::Order { kind: 1 });
        assert_eq!(refused(&[0, 0, 0, 0]), TrailerError::Order { kind: 0 });
        assert_eq!(refused(&vec![0; 5000]), TrailerError::AttributesTooLong { len: 5000 });
    }

    #[test]
    fn borrowed_attributes_stand_in_the_section() {
        let (attributes, mut bytes) = (full(), vec![]);
        attributes.encode(&mut bytes);
        let borrowed = AttributesRef::decode(&bytes).unwrap();
        assert_eq!(borrowed, attributes.borrowed());
        for part in [borrowed.cohort, borrowed.parent, borrowed.note] {
            let part = part.unwrap();
            assert!(bytes.as_ptr_range().contains(&part.as_ptr()), "{part:?} was copied");
        }
        assert_eq!(borrowed.to_owned(), attributes);
    }

    #[test]
    fn every_bounded_part_is_checked() {
        type With = fn(&[u8]) -> AttributesRef<'_>;
        let parts: [(u16, usize, With); 3] = [
            (COHORT, COHORT_BYTES_MAX, |v| AttributesRef { cohort: Some(v), ..AttributesRef::default() }),
            (PARENT, PARENT_HASH_BYTES_MAX, |v| AttributesRef {
                parent: Some(v),
                ..AttributesRef::default()
            }),
            (NOTE, NOTE_BYTES_MAX, |v| AttributesRef { note: Some(v), ..AttributesRef::default() }),
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
