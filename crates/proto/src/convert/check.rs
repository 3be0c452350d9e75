//! The checks that conversions are made of. Each names the field it judged.

use moontide_types::bounds::{GROUPS_MAX, SEGMENTS_PER_NODE_MAX};
use moontide_types::{ErrorCode, GroupId, SegmentId, Term};
use prost::bytes::Bytes;

use crate::convert::ConvertError;
use crate::layout::FixedRecord;
use crate::packed::{Codes, Packed, PackedBytes, PackedError, PackedKeys};

type Result<T> = std::result::Result<T, ConvertError>;

/// What must be there.
pub(super) fn required<'a, T>(field: &'static str, value: &'a Option<T>) -> Result<&'a T> {
    value.as_ref().ok_or(ConvertError::Missing { field })
}

/// `found ≤ max`.
pub(super) fn at_most(field: &'static str, found: impl TryInto<u64>, max: impl TryInto<u64>) -> Result<()> {
    let (found, max) = (number(found), number(max));
    if found <= max { Ok(()) } else { Err(ConvertError::TooLarge { field, found, max }) }
}

/// `found ≥ min`.
pub(super) fn at_least(field: &'static str, found: impl TryInto<u64>, min: impl TryInto<u64>) -> Result<()> {
    let (found, min) = (number(found), number(min));
    if found >= min { Ok(()) } else { Err(ConvertError::TooSmall { field, found, min }) }
}

/// Lengths and counts fit in 64 bits on every machine we run on.
fn number(value: impl TryInto<u64>) -> u64 {
    value.try_into().unwrap_or(u64::MAX)
}

/// A number that stands in a narrower field of ours.
pub(super) fn narrow<T: Copy + TryFrom<u32> + Into<u64>>(
    field: &'static str,
    found: u32,
    max: T,
) -> Result<T> {
    at_most(field, found, max.into())?;
    T::try_from(found).map_err(|_| ConvertError::TooLarge { field, found: found.into(), max: max.into() })
}

/// As many as there should be.
pub(super) fn count(field: &'static str, found: usize, expected: usize) -> Result<()> {
    if found == expected { Ok(()) } else { Err(ConvertError::Count { field, found, expected }) }
}

/// A relation between fields.
pub(super) fn rule(field: &'static str, holds: bool, rule: &'static str) -> Result<()> {
    if holds { Ok(()) } else { Err(ConvertError::Relation { field, rule }) }
}

/// A text or byte string within its lengths.
pub(super) fn length<T: AsRef<[u8]> + ?Sized>(
    field: &'static str,
    value: &T,
    min: usize,
    max: usize,
) -> Result<()> {
    at_least(field, value.as_ref().len(), min)?;
    at_most(field, value.as_ref().len(), max)
}

/// A value of an enum that this release knows.
pub(super) fn known<T>(field: &'static str, found: i32, value: Option<T>) -> Result<T> {
    value.ok_or(ConvertError::Unknown { field, found: found.into() })
}

pub(super) fn term(number: u32) -> Result<Term> {
    Ok(Term::new(number)?)
}

/// 0 is success.
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

/// How many groups a cluster has.
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

pub(super) fn copied(bytes: &[u8]) -> Bytes {
    Bytes::copy_from_slice(bytes)
}
