//! Reports of a node: chunks about its segments, notices about its disk.

use moontide_types::limits::{BATCH_KEYS_MAX, SLOTS_PER_SEGMENT_MAX};
use moontide_types::record::State;
use moontide_types::{Generation, Key, SegmentId, Tenant, Term};

use super::check::{self, at_most, copied, count, known, rule};
use super::objects::AttributeSections;
use super::{ConvertError, Wire};
use crate::limits::SESSION_RECORDS_MAX;
use crate::packed::{Packed, PackedBytes, PackedKeys};
use crate::records::{OffloadRecord, ReportRecord};
use crate::v1;

/// Kind of a report chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportKind {
    /// State of the slots at the time of the snapshot.
    Snapshot,
    /// Changes since the snapshot, in order.
    Delta,
}

/// Part of the report of a segment.
///
/// Invariants: one key per record, empty exactly for FREE records; the tenant of every record is in the table; a
/// snapshot contains no FREE record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportChunk<'a> {
    /// Id of the segment.
    pub segment: SegmentId,
    /// Generation of the segment.
    pub generation: Generation,
    /// Term that the segment has adopted.
    pub term: Term,
    /// Snapshot or delta.
    pub kind: ReportKind,
    /// Index of the first record in the report of this segment.
    pub first_record: u64,
    /// Slots, one record each.
    pub records: Packed<'a, ReportRecord>,
    /// Keys of the records.
    pub keys: PackedBytes<'a>,
    /// Tenants to which the records refer by index.
    pub tenants: Vec<Tenant<'a>>,
    /// Attributes of the records; `None` if no record has any.
    pub attributes: Option<AttributeSections<'a>>,
}

impl<'a> ReportChunk<'a> {
    /// Iterates over the records with their keys; a FREE record has none.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (ReportRecord, Option<Key<'a>>)> + use<'a> {
        self.records.iter().zip(self.keys.iter()).map(|(record, key)| (record, Key::new(key).ok()))
    }
}

/// Converts the tenants to which records refer by index.
fn tenants(names: &[String]) -> Result<Vec<Tenant<'_>>, ConvertError> {
    at_most("tenants", names.len(), SESSION_RECORDS_MAX)?;
    Ok(names.iter().map(|name| Tenant::new(name)).collect::<Result<_, _>>()?)
}

fn names(tenants: &[Tenant<'_>]) -> Vec<String> {
    tenants.iter().map(|tenant| tenant.as_str().into()).collect()
}

impl<'a> Wire<'a> for ReportChunk<'a> {
    type Message = v1::ReportChunk;

    fn from_wire(m: &'a v1::ReportChunk) -> Result<Self, ConvertError> {
        let kind = match v1::ReportKind::try_from(m.kind) {
            Ok(v1::ReportKind::Snapshot) => Some(ReportKind::Snapshot),
            Ok(v1::ReportKind::Delta) => Some(ReportKind::Delta),
            _ => None,
        };
        let kind = known("report.kind", m.kind, kind)?;
        let records: Packed<'a, ReportRecord> =
            check::records("report.records", &m.records, SESSION_RECORDS_MAX)?;
        let keys = check::byte_strings("report.keys", &m.keys)?;
        count("report.keys", keys.len(), records.len())?;
        let tenants = tenants(&m.tenants)?;
        for (record, key) in records.iter().zip(keys.iter()) {
            if record.word.state() == State::Free {
                rule("report.records", kind == ReportKind::Delta, "a snapshot has no FREE records")?;
                rule("report.keys", key.is_empty(), "a FREE record has no key")?;
            } else {
                Key::new(key)?;
                rule(
                    "report.records",
                    usize::from(record.tenant) < tenants.len(),
                    "the tenant is in the table",
                )?;
            }
        }
        let end = m.first_record.checked_add(records.len() as u64);
        rule("report.first_record", end.is_some(), "first_record + count fits in 64 bits")?;
        Ok(ReportChunk {
            segment: check::segment("report.segment", m.segment)?,
            generation: Generation(m.generation),
            term: check::term(m.term)?,
            kind,
            first_record: m.first_record,
            attributes: AttributeSections::from_wire(&m.attributes, records.len())?,
            records,
            keys,
            tenants,
        })
    }

    fn to_wire(&self) -> v1::ReportChunk {
        let kind = match self.kind {
            ReportKind::Snapshot => v1::ReportKind::Snapshot,
            ReportKind::Delta => v1::ReportKind::Delta,
        };
        v1::ReportChunk {
            segment: self.segment.0,
            generation: self.generation.0,
            term: self.term.get(),
            kind: kind.into(),
            first_record: self.first_record,
            records: copied(self.records.as_encoded()),
            keys: copied(self.keys.as_encoded()),
            tenants: names(&self.tenants),
            attributes: AttributeSections::to_wire(self.attributes),
        }
    }
}

/// End of the snapshot of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportEnd {
    /// Id of the segment.
    pub segment: SegmentId,
    /// Generation of the segment.
    pub generation: Generation,
    /// Term that the segment has adopted.
    pub term: Term,
    /// Number of records of the snapshot.
    pub records: u64,
}

impl<'a> Wire<'a> for ReportEnd {
    type Message = v1::ReportEnd;

    fn from_wire(m: &'a v1::ReportEnd) -> Result<Self, ConvertError> {
        at_most("report.records", m.records, SLOTS_PER_SEGMENT_MAX)?; // at most one record per slot
        Ok(ReportEnd {
            segment: check::segment("report.segment", m.segment)?,
            generation: Generation(m.generation),
            term: check::term(m.term)?,
            records: m.records,
        })
    }

    fn to_wire(&self) -> v1::ReportEnd {
        v1::ReportEnd {
            segment: self.segment.0,
            generation: self.generation.0,
            term: self.term.get(),
            records: self.records,
        }
    }
}

/// Report of records on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffloadNotice<'a> {
    /// Records on disk.
    pub records: Packed<'a, OffloadRecord>,
    /// Keys of the records.
    pub keys: PackedKeys<'a>,
    /// Tenants to which the records refer by index.
    pub tenants: Vec<Tenant<'a>>,
    /// Attributes of the records; `None` if no record has any.
    pub attributes: Option<AttributeSections<'a>>,
    /// The records were found by the scan after a start; otherwise they were just written.
    pub recovered: bool,
    /// The scan is complete.
    pub recovery_end: bool,
    /// With `recovery_end`: number of scans of this session that are complete.
    pub inventories: u32,
}

impl<'a> Wire<'a> for OffloadNotice<'a> {
    type Message = v1::OffloadNotice;

    fn from_wire(m: &'a v1::OffloadNotice) -> Result<Self, ConvertError> {
        let records: Packed<'a, OffloadRecord> =
            check::records("offloaded.records", &m.records, SESSION_RECORDS_MAX)?;
        let keys = check::keys("offloaded.keys", &m.keys)?;
        count("offloaded.keys", keys.len(), records.len())?;
        let tenants = tenants(&m.tenants)?;
        let known = records.iter().all(|record| usize::from(record.tenant) < tenants.len());
        rule("offloaded.records", known, "the tenant is in the table")?;
        rule("offloaded.recovery_end", m.recovered || !m.recovery_end, "recovery_end only with recovered")?;
        Ok(OffloadNotice {
            attributes: AttributeSections::from_wire(&m.attributes, records.len())?,
            records,
            keys,
            tenants,
            recovered: m.recovered,
            recovery_end: m.recovery_end,
            inventories: m.inventories,
        })
    }

    fn to_wire(&self) -> v1::OffloadNotice {
        v1::OffloadNotice {
            records: copied(self.records.as_encoded()),
            keys: copied(self.keys.as_encoded()),
            tenants: names(&self.tenants),
            attributes: AttributeSections::to_wire(self.attributes),
            recovered: self.recovered,
            recovery_end: self.recovery_end,
            inventories: self.inventories,
        }
    }
}

const _: () = assert!(SESSION_RECORDS_MAX <= BATCH_KEYS_MAX, "the keys of all records fit in one array");
