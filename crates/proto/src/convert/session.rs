//! A node and its master: opening a session, mounting segments, and the stream between them.
//!
//! [`opening`] is what happens once, [`heartbeat`] what is said all the time; here is the stream itself.

mod heartbeat;
mod opening;

pub use heartbeat::{
    DiskState, DiskStatus, Heartbeat, Pressure, ReadCounters, SegmentState, SegmentStatus, TouchBitmap,
};
pub use opening::{
    Address, MountSegmentsRequest, MountSegmentsResponse, OpenSessionRequest, OpenSessionResponse,
    SegmentGrant, SegmentGrants, SegmentSpec, SessionGrant, Topology, UnmountSegmentsRequest,
};

use moontide_types::{MapVersion, SessionId, Term};

use super::check::{self, at_least, copied, required};
use super::report::{OffloadNotice, ReportChunk, ReportEnd};
use super::{ConvertError, Wire};
use crate::limits::SESSION_RECORDS_MAX;
use crate::packed::Packed;
use crate::records::{Order, OrderResult, VersionedId};
use crate::v1;

/// From a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeMessage<'a> {
    /// The session.
    pub session: SessionId,
    /// Counts the messages of the session from 1 on.
    pub sequence: u64,
    /// Highest term that the node has seen.
    pub highest_term: Term,
    /// What it says.
    pub body: NodeBody<'a>,
}

/// What a node says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeBody<'a> {
    /// It lives.
    Heartbeat(Heartbeat<'a>),
    /// Orders were carried out or refused.
    OrderResults(Packed<'a, OrderResult>),
    /// Some slots of a segment.
    Report(ReportChunk<'a>),
    /// A segment's snapshot is complete.
    ReportEnd(ReportEnd),
    /// Objects are on disk.
    Offloaded(OffloadNotice<'a>),
    /// Objects are about to leave the disk.
    DiskEvicted(Packed<'a, VersionedId>),
}

impl<'a> Wire<'a> for NodeMessage<'a> {
    type Message = v1::NodeMessage;

    fn from_wire(m: &'a v1::NodeMessage) -> Result<Self, ConvertError> {
        use v1::node_message::Body;
        let max = SESSION_RECORDS_MAX;
        at_least("session", m.session, 1u64)?;
        at_least("sequence", m.sequence, 1u64)?;
        let body = match required("body", &m.body)? {
            Body::Heartbeat(m) => NodeBody::Heartbeat(Heartbeat::from_wire(m)?),
            Body::OrderResults(m) => NodeBody::OrderResults(check::records("results", &m.results, max)?),
            Body::Report(m) => NodeBody::Report(ReportChunk::from_wire(m)?),
            Body::ReportEnd(m) => NodeBody::ReportEnd(ReportEnd::from_wire(m)?),
            Body::Offloaded(m) => NodeBody::Offloaded(OffloadNotice::from_wire(m)?),
            Body::DiskEvicted(m) => NodeBody::DiskEvicted(check::records("versions", &m.versions, max)?),
        };
        Ok(NodeMessage {
            session: SessionId(m.session),
            sequence: m.sequence,
            highest_term: check::term(m.highest_term)?,
            body,
        })
    }

    fn to_wire(&self) -> v1::NodeMessage {
        use v1::node_message::Body;
        let body = match &self.body {
            NodeBody::Heartbeat(body) => Body::Heartbeat(body.to_wire()),
            NodeBody::OrderResults(results) => {
                Body::OrderResults(v1::OrderResults { results: copied(results.as_encoded()) })
            }
            NodeBody::Report(body) => Body::Report(body.to_wire()),
            NodeBody::ReportEnd(body) => Body::ReportEnd(body.to_wire()),
            NodeBody::Offloaded(body) => Body::Offloaded(body.to_wire()),
            NodeBody::DiskEvicted(versions) => {
                Body::DiskEvicted(v1::DiskEvicted { versions: copied(versions.as_encoded()) })
            }
        };
        v1::NodeMessage {
            session: self.session.0,
            sequence: self.sequence,
            highest_term: self.highest_term.get(),
            body: Some(body),
        }
    }
}

/// From the master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MasterMessage<'a> {
    /// The session.
    pub session: SessionId,
    /// The master's term.
    pub term: Term,
    /// Its group map.
    pub map_version: MapVersion,
    /// Every message of the node up to this one has been applied.
    pub acked_sequence: u64,
    /// What it says.
    pub body: MasterBody<'a>,
}

/// What a master says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MasterBody<'a> {
    /// Do these.
    Orders(Packed<'a, Order>),
    /// The heartbeat arrived.
    HeartbeatAck {
        /// Its beat.
        beat: u64,
        /// New time to live of the session, from the sending of the beat on.
        ttl_ms: u32,
    },
}

impl<'a> Wire<'a> for MasterMessage<'a> {
    type Message = v1::MasterMessage;

    fn from_wire(m: &'a v1::MasterMessage) -> Result<Self, ConvertError> {
        use v1::master_message::Body;
        at_least("session", m.session, 1u64)?;
        let body = match required("body", &m.body)? {
            Body::Orders(m) => MasterBody::Orders(check::records("orders", &m.orders, SESSION_RECORDS_MAX)?),
            Body::HeartbeatAck(m) => {
                opening::check_ttl(m.ttl_ms)?;
                MasterBody::HeartbeatAck { beat: m.beat, ttl_ms: m.ttl_ms }
            }
        };
        Ok(MasterMessage {
            session: SessionId(m.session),
            term: check::term(m.term)?,
            map_version: MapVersion(m.map_version),
            acked_sequence: m.acked_sequence,
            body,
        })
    }

    fn to_wire(&self) -> v1::MasterMessage {
        use v1::master_message::Body;
        let body = match self.body {
            MasterBody::Orders(orders) => Body::Orders(v1::Orders { orders: copied(orders.as_encoded()) }),
            MasterBody::HeartbeatAck { beat, ttl_ms } => {
                Body::HeartbeatAck(v1::HeartbeatAck { beat, ttl_ms })
            }
        };
        v1::MasterMessage {
            session: self.session.0,
            term: self.term.get(),
            map_version: self.map_version.0,
            acked_sequence: self.acked_sequence,
            body: Some(body),
        }
    }
}
