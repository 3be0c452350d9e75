//! What a node has: report chunks of its segments, notices about its disk.

use moontide_types::bounds::{BATCH_KEYS_MAX, SLOTS_PER_SEGMENT_MAX};
use moontide_types::record::State;
use moontide_types::{Generation, Key, SegmentId, Tenant, Term};

use super::check::{self, at_most, copied, count, known, rule};
use super::objects::AttributeSections;
use super::{ConvertError, Wire};
use crate::limits::SESSION_RECORDS_MAX;
use crate::packed::{Packed, PackedBytes, PackedKeys};
use crate::records::{OffloadRecord, ReportRecord};
use crate::v1;

/// What a report chunk is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportKind {
    /// The state of slots at the time of the snapshot.
    Snapshot,
    /// Changes since, in order.
    Delta,
}

/// Some slots of a segment.
///
/// Invariants: one key per record, empty exactly for FREE ones; every record's tenant is in the table; a
/// snapshot contains no FREE record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportChunk<'a> {
    /// The segment.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// Term that it had adopted.
    pub term: Term,
    /// What this is part of.
    pub kind: ReportKind,
    /// Number of the first record in this segment's report.
    pub first_record: u64,
    /// The slots.
    pub records: Packed<'a, ReportRecord>,
    /// Their keys.
    pub keys: PackedBytes<'a>,
    /// The tenants that they refer to.
    pub tenants: Vec<Tenant<'a>>,
    /// Their attributes, if any has some.
    pub attributes: Option<AttributeSections<'a>>,
}

impl<'a> ReportChunk<'a> {
    /// Each record with its key; a FREE one has none.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (ReportRecord, Option<Key<'a>>)> + use<'a> {
        self.records.iter().zip(self.keys.iter()).map(|(record, key)| (record, Key::new(key).ok()))
    }
}

/// Tenants that records refer to by index.
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
                rule("report.records", kind == ReportKind::Delta, "a snapshot has no free slots")?;
                rule("report.keys", key.is_empty(), "a free slot has no key")?;
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
        rule("report.first_record", end.is_some(), "records can be numbered")?;
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

/// A segment's snapshot is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportEnd {
    /// The segment.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// Term that it had adopted.
    pub term: Term,
    /// Records in the snapshot.
    pub records: u64,
}

impl<'a> Wire<'a> for ReportEnd {
    type Message = v1::ReportEnd;

    fn from_wire(m: &'a v1::ReportEnd) -> Result<Self, ConvertError> {
        at_most("report.records", m.records, SLOTS_PER_SEGMENT_MAX)?; // a snapshot has one record per slot
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

/// Objects are on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffloadNotice<'a> {
    /// The records.
    pub records: Packed<'a, OffloadRecord>,
    /// Their keys.
    pub keys: PackedKeys<'a>,
    /// The tenants that they refer to.
    pub tenants: Vec<Tenant<'a>>,
    /// Their attributes, if any has some.
    pub attributes: Option<AttributeSections<'a>>,
    /// Found by the scan after a start, not just written.
    pub recovered: bool,
    /// The scan is complete.
    pub recovery_end: bool,
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
        rule("offloaded.recovery_end", m.recovered || !m.recovery_end, "only a recovery can end")?;
        Ok(OffloadNotice {
            attributes: AttributeSections::from_wire(&m.attributes, records.len())?,
            records,
            keys,
            tenants,
            recovered: m.recovered,
            recovery_end: m.recovery_end,
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
        }
    }
}

const _: () = assert!(SESSION_RECORDS_MAX <= BATCH_KEYS_MAX, "every record's key fits in one array");
