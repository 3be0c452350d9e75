//! What a node's admin pages say, as far as it is drawn. Fields that are not known are passed over.

use serde::Deserialize;

use super::map::{Extent, Kind};
use crate::text;

/// `GET /segments`.
#[derive(Debug, Deserialize)]
pub(super) struct Node {
    /// Its number, in decimal: it has 64 bits.
    pub(super) node: String,
    pub(super) segments: Vec<Segment>,
}

impl Node {
    /// The number as the node prints it at its start.
    pub(super) fn hex(&self) -> String {
        self.node
            .parse::<u64>()
            .map_or_else(|_| text::escaped(self.node.as_bytes()), |node| format!("{node:016x}"))
    }
}

/// `GET /segments/{n}`, and an entry of the list.
#[derive(Debug, Deserialize)]
pub(super) struct Segment {
    pub(super) segment: u32,
    pub(super) generation: String,
    /// To whom it is granted, if to anybody.
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

/// One header of a segment.
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
    /// What its place holds; none if it is free.
    pub(super) fn kind(&self) -> Option<Kind> {
        match self.state.as_str() {
            "ready" => Some(Kind::Live),
            "writing" => Some(Kind::Writing),
            "dead" => Some(Kind::Dying),
            _ => None,
        }
    }

    pub(super) fn extent(&self) -> Option<Extent> {
        Some(Extent { start: self.extent_start, units: self.extent_units, kind: self.kind()? })
    }

    /// The key, with its tenant if that is not the usual one; the id while the key is not written yet.
    pub(super) fn name(&self) -> String {
        match (&self.key, self.tenant.as_deref()) {
            (Some(key), None | Some("default")) => text::escaped(key.as_bytes()),
            (Some(key), Some(tenant)) => {
                format!("{}:{}", text::escaped(tenant.as_bytes()), text::escaped(key.as_bytes()))
            }
            (None, _) => format!("id {}", text::escaped(self.id.as_bytes())),
        }
    }
}
