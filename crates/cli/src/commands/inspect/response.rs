//! Responses of a node's admin endpoints, as far as they are shown. Unknown fields are ignored.

use serde::Deserialize;

use super::map::{Extent, Kind};
use crate::format;

/// `GET /segments`.
#[derive(Debug, Deserialize)]
pub(super) struct Node {
    /// Node id: 16 hexadecimal digits.
    pub(super) node: String,
    pub(super) segments: Vec<Segment>,
}

/// `GET /segments/{n}`, and an entry of the list.
#[derive(Debug, Deserialize)]
pub(super) struct Segment {
    pub(super) segment: u32,
    pub(super) generation: String,
    /// Group to which the segment is granted, if any.
    pub(super) group: Option<u16>,
    pub(super) term: Option<u64>,
    #[serde(default)]
    pub(super) draining: bool,
    pub(super) unit_bytes: u64,
    pub(super) units: u64,
    pub(super) live_units: u64,
    pub(super) writing_units: u64,
    pub(super) draining_units: u64,
    pub(super) free_units: u64,
    pub(super) slots: u64,
    pub(super) free_slots: u64,
    #[serde(default)]
    pub(super) records: Vec<Record>,
    #[serde(default)]
    pub(super) truncated: bool,
}

impl Segment {
    pub(super) fn bytes(&self) -> u64 {
        self.units.saturating_mul(self.unit_bytes)
    }

    pub(super) fn taken_slots(&self) -> u64 {
        self.slots.saturating_sub(self.free_slots)
    }
}

/// A record header of a segment.
#[derive(Debug, Deserialize)]
pub(super) struct Record {
    pub(super) slot: u32,
    pub(super) state: String,
    pub(super) epoch: String,
    id: String,
    tenant: Option<String>,
    key: Option<String>,
    pub(super) extent_start: u64,
    pub(super) extent_units: u64,
    pub(super) stripe_index: u32,
    pub(super) stripe_count: u32,
    pub(super) length: u64,
}

impl Record {
    /// State of the record; `None` if the slot is free.
    pub(super) fn kind(&self) -> Option<Kind> {
        match self.state.as_str() {
            "ready" => Some(Kind::Live),
            "writing" => Some(Kind::Writing),
            "dead" => Some(Kind::Draining),
            _ => None,
        }
    }

    pub(super) fn extent(&self) -> Option<Extent> {
        Some(Extent { start: self.extent_start, units: self.extent_units, kind: self.kind()? })
    }

    /// The key, prefixed by its tenant unless that is the default one; the id while the key is not written yet.
    pub(super) fn name(&self) -> String {
        match (&self.key, self.tenant.as_deref()) {
            (Some(key), None | Some("default")) => format::escaped(key.as_bytes()),
            (Some(key), Some(tenant)) => {
                format!("{}:{}", format::escaped(tenant.as_bytes()), format::escaped(key.as_bytes()))
            }
            (None, _) => format!("id {}", format::escaped(self.id.as_bytes())),
        }
    }
}
