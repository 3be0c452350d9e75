//! Checks of single fields. Each error names its field.

use moontide_types::limits::{GROUPS_MAX, SEGMENTS_PER_NODE_MAX};
use moontide_types::{ErrorCode, GroupId, SegmentId, Term};
use prost::bytes::Bytes;

use crate::capability::CapabilityKey;
use crate::convert::ConvertError;
use crate::layout::FixedRecord;
use crate::packed::{Codes, Packed, PackedBytes, PackedError, PackedKeys};

type Result<T> = std::result::Result<T, ConvertError>;

/// Fails if the field is missing.
pub(super) fn required<'a, T>(field: &'static str, value: &'a Option<T>) -> Result<&'a T> {
    value.as_ref().ok_or(ConvertError::Missing { field })
}

/// Checks `found ≤ max`.
pub(super) fn at_most(field: &'static str, found: impl TryInto<u64>, max: impl TryInto<u64>) -> Result<()> {
    let (found, max) = (number(found), number(max));
    if found <= max { Ok(()) } else { Err(ConvertError::TooLarge { field, found, max }) }
}

/// Checks `found ≥ min`.
pub(super) fn at_least(field: &'static str, found: impl TryInto<u64>, min: impl TryInto<u64>) -> Result<()> {
    let (found, min) = (number(found), number(min));
    if found >= min { Ok(()) } else { Err(ConvertError::TooSmall { field, found, min }) }
}

/// Converts a length or count. They fit in 64 bits on every supported platform.
fn number(value: impl TryInto<u64>) -> u64 {
    value.try_into().unwrap_or(u64::MAX)
}

/// Converts a number to a narrower type. Fails if it exceeds `max`.
pub(super) fn narrow<T: Copy + TryFrom<u32> + Into<u64>>(
    field: &'static str,
    found: u32,
    max: T,
) -> Result<T> {
    at_most(field, found, max.into())?;
    T::try_from(found).map_err(|_| ConvertError::TooLarge { field, found: found.into(), max: max.into() })
}

/// Checks the number of elements.
pub(super) fn count(field: &'static str, found: usize, expected: usize) -> Result<()> {
    if found == expected { Ok(()) } else { Err(ConvertError::Count { field, found, expected }) }
}

/// Checks a relation between fields.
pub(super) fn rule(field: &'static str, holds: bool, rule: &'static str) -> Result<()> {
    if holds { Ok(()) } else { Err(ConvertError::Relation { field, rule }) }
}

/// Checks the length of a text or byte string.
pub(super) fn length<T: AsRef<[u8]> + ?Sized>(
    field: &'static str,
    value: &T,
    min: usize,
    max: usize,
) -> Result<()> {
    at_least(field, value.as_ref().len(), min)?;
    at_most(field, value.as_ref().len(), max)
}

/// Fails if an enum value is unknown to this release.
pub(super) fn known<T>(field: &'static str, found: i32, value: Option<T>) -> Result<T> {
    value.ok_or(ConvertError::Unknown { field, found: found.into() })
}

pub(super) fn term(number: u32) -> Result<Term> {
    Ok(Term::new(number)?)
}

/// Converts an error code; 0 is success.
pub(super) fn code(number: u32) -> Result<Option<ErrorCode>> {
    if number == 0 { Ok(None) } else { Ok(Some(ErrorCode::try_from(number)?)) }
}

pub(super) fn code_number(code: Option<ErrorCode>) -> u32 {
    code.map_or(0, |code| code as u32)
}

pub(super) fn group(field: &'static str, number: u32) -> Result<GroupId> {
    Ok(GroupId(narrow(field, number, GROUPS_MAX - 1)?))
}

pub(super) fn segment(field: &'static str, number: u32) -> Result<SegmentId> {
    at_most(field, number, SEGMENTS_PER_NODE_MAX - 1)?;
    Ok(SegmentId(number))
}

/// Checks the number of groups of a cluster.
pub(super) fn groups(field: &'static str, number: u32) -> Result<u16> {
    at_least(field, number, 1u32)?;
    narrow(field, number, GROUPS_MAX)
}

fn packed<T>(field: &'static str, result: std::result::Result<T, PackedError>) -> Result<T> {
    result.map_err(|source| ConvertError::Packed { field, source })
}

pub(super) fn keys<'a>(field: &'static str, encoded: &'a Bytes) -> Result<PackedKeys<'a>> {
    packed(field, PackedKeys::decode(encoded))
}

pub(super) fn byte_strings<'a>(field: &'static str, encoded: &'a Bytes) -> Result<PackedBytes<'a>> {
    packed(field, PackedBytes::decode(encoded))
}

pub(super) fn records<'a, T: FixedRecord>(
    field: &'static str,
    encoded: &'a Bytes,
    max: usize,
) -> Result<Packed<'a, T>> {
    packed(field, Packed::decode(encoded, max))
}

pub(super) fn codes<'a>(field: &'static str, encoded: &'a Bytes, max: usize) -> Result<Codes<'a>> {
    packed(field, Codes::decode(encoded, max))
}

pub(super) fn bitmap<'a>(field: &'static str, encoded: &'a Bytes, len: usize) -> Result<crate::Bitmap<'a>> {
    packed(field, crate::Bitmap::decode(encoded, len))
}

pub(super) fn capability_key(field: &'static str, bytes: &Bytes) -> Result<CapabilityKey> {
    let key =
        bytes[..].try_into().map_err(|_| ConvertError::Count { field, found: bytes.len(), expected: 32 })?;
    Ok(CapabilityKey::new(key))
}

pub(super) fn copied(bytes: &[u8]) -> Bytes {
    Bytes::copy_from_slice(bytes)
}
