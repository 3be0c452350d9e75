//! Session between a node and a master: registration, mounting of segments, and the message stream.
//!
//! [`open`]: registration and mounting. [`heartbeat`]: periodic status. This file: the messages of the stream.

mod heartbeat;
mod open;

pub use heartbeat::{
    DiskState, DiskStatus, FlushStatus, Heartbeat, Pressure, ReadCounters, RemoteReads, SegmentState,
    SegmentStatus, TouchBitmap,
};
pub use open::{
    Address, MountResult, MountResults, MountSegmentsRequest, MountSegmentsResponse, NumberedKey,
    OpenSessionRequest, OpenSessionResponse, SegmentSpec, SessionGrant, SyncMark, Topology,
    UnmountSegmentsRequest,
};

use moontide_types::limits::GROUPS_MAX;
use moontide_types::{GroupId, MapVersion, SessionId, Term};

use super::check::{self, at_least, at_most, copied, required};
use super::nodes::NodeDetail;
use super::report::{OffloadNotice, ReportChunk, ReportEnd};
use super::{ConvertError, Wire};
use crate::limits::SESSION_RECORDS_MAX;
use crate::packed::Packed;
use crate::records::{CommandKind, CommandResult, CopySource, NodeCommand, VersionedId};
use crate::v1;

/// Message of a node to a master.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeMessage<'a> {
    /// Session of the node.
    pub session: SessionId,
    /// Number of the message in the session, from 1 on.
    pub sequence: u64,
    /// Highest term known to the node.
    pub highest_term: Term,
    /// Content of the message.
    pub body: NodeMessageBody<'a>,
}

/// Content of a node's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeMessageBody<'a> {
    /// Periodic status; keeps the session alive.
    Heartbeat(Heartbeat<'a>),
    /// Results of commands.
    CommandResults(Packed<'a, CommandResult>),
    /// Part of the report of a segment.
    Report(ReportChunk<'a>),
    /// End of the snapshot of a segment.
    ReportEnd(ReportEnd),
    /// Records on disk.
    Offloaded(OffloadNotice<'a>),
    /// Versions that the node is about to evict from its disk.
    DiskEvicted(Packed<'a, VersionedId>),
    /// The node accepts capabilities that are signed with the key of this rotation number.
    CapabilityKeyHeld(u64),
}

impl<'a> Wire<'a> for NodeMessage<'a> {
    type Message = v1::NodeMessage;

    fn from_wire(m: &'a v1::NodeMessage) -> Result<Self, ConvertError> {
        use v1::node_message::Body;
        let max = SESSION_RECORDS_MAX;
        at_least("session", m.session, 1u64)?;
        at_least("sequence", m.sequence, 1u64)?;
        let body = match required("body", &m.body)? {
            Body::Heartbeat(m) => NodeMessageBody::Heartbeat(Heartbeat::from_wire(m)?),
            Body::CommandResults(m) => {
                NodeMessageBody::CommandResults(check::records("results", &m.results, max)?)
            }
            Body::Report(m) => NodeMessageBody::Report(ReportChunk::from_wire(m)?),
            Body::ReportEnd(m) => NodeMessageBody::ReportEnd(ReportEnd::from_wire(m)?),
            Body::Offloaded(m) => NodeMessageBody::Offloaded(OffloadNotice::from_wire(m)?),
            Body::DiskEvicted(m) => {
                NodeMessageBody::DiskEvicted(check::records("versions", &m.versions, max)?)
            }
            Body::CapabilityKeyHeld(m) => NodeMessageBody::CapabilityKeyHeld(m.rotation),
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
            NodeMessageBody::Heartbeat(body) => Body::Heartbeat(body.to_wire()),
            NodeMessageBody::CommandResults(results) => {
                Body::CommandResults(v1::CommandResults { results: copied(results.as_encoded()) })
            }
            NodeMessageBody::Report(body) => Body::Report(body.to_wire()),
            NodeMessageBody::ReportEnd(body) => Body::ReportEnd(body.to_wire()),
            NodeMessageBody::Offloaded(body) => Body::Offloaded(body.to_wire()),
            NodeMessageBody::DiskEvicted(versions) => {
                Body::DiskEvicted(v1::DiskEvicted { versions: copied(versions.as_encoded()) })
            }
            &NodeMessageBody::CapabilityKeyHeld(rotation) => {
                Body::CapabilityKeyHeld(v1::CapabilityKeyHeld { rotation })
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

/// Message of a master to a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MasterMessage<'a> {
    /// Session of the node.
    pub session: SessionId,
    /// Term of the master.
    pub term: Term,
    /// Version of the master's group map.
    pub map_version: MapVersion,
    /// The master has applied every message of the node up to this number.
    pub acked_sequence: u64,
    /// Content of the message.
    pub body: MasterMessageBody<'a>,
}

/// Content of a master's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MasterMessageBody<'a> {
    /// Commands to execute.
    Commands(Commands<'a>),
    /// Acknowledges a heartbeat.
    HeartbeatAck {
        /// Number of the acknowledged heartbeat.
        heartbeat_id: u64,
        /// New TTL of the session in milliseconds, counted from the sending of the heartbeat.
        ttl_ms: u32,
        /// Groups with which the node is in sync, each with its number of exclusions.
        in_sync: Vec<(GroupId, u32)>,
        /// State of the flush, if the heartbeat announced one.
        flush: Option<FlushStatus>,
        /// Whether an operator wants the node to drain; `None`: as before.
        drain: Option<bool>,
    },
    /// Next key of the capabilities for this node.
    CapabilityKey(NumberedKey),
}

/// Commands to a node.
///
/// Invariant: there is one source per Copy command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commands<'a> {
    /// The commands.
    pub commands: Packed<'a, NodeCommand>,
    /// Sources of the Copy commands, in order.
    pub sources: Packed<'a, CopySource>,
    /// Nodes of the sources.
    pub nodes: Vec<NodeDetail<'a>>,
}

impl<'a> Commands<'a> {
    fn from_wire(m: &'a v1::Commands) -> Result<Self, ConvertError> {
        let commands: Packed<'a, NodeCommand> = check::records("commands", &m.commands, SESSION_RECORDS_MAX)?;
        let sources: Packed<'a, CopySource> = check::records("sources", &m.sources, SESSION_RECORDS_MAX)?;
        let copies = commands.iter().filter(|command| command.kind == CommandKind::Copy).count();
        check::rule("sources", sources.len() == copies, "there is one source per Copy command")?;
        Ok(Commands { commands, sources, nodes: NodeDetail::all(&m.nodes)? })
    }

    fn to_wire(&self) -> v1::Commands {
        v1::Commands {
            commands: copied(self.commands.as_encoded()),
            sources: copied(self.sources.as_encoded()),
            nodes: self.nodes.iter().map(NodeDetail::to_wire).collect(),
        }
    }
}

impl<'a> Wire<'a> for MasterMessage<'a> {
    type Message = v1::MasterMessage;

    fn from_wire(m: &'a v1::MasterMessage) -> Result<Self, ConvertError> {
        use v1::master_message::Body;
        at_least("session", m.session, 1u64)?;
        let body = match required("body", &m.body)? {
            Body::Commands(m) => MasterMessageBody::Commands(Commands::from_wire(m)?),
            Body::HeartbeatAck(m) => {
                open::check_ttl(m.ttl_ms)?;
                at_most("in_sync", m.in_sync.len(), GROUPS_MAX)?;
                let group =
                    |of: &v1::GroupExclusion| Ok((check::group("in_sync.group", of.group)?, of.exclusion));
                MasterMessageBody::HeartbeatAck {
                    heartbeat_id: m.heartbeat_id,
                    ttl_ms: m.ttl_ms,
                    in_sync: m.in_sync.iter().map(group).collect::<Result<_, ConvertError>>()?,
                    flush: m.flush,
                    drain: m.drain,
                }
            }
            Body::CapabilityKey(m) => MasterMessageBody::CapabilityKey(NumberedKey::from_wire(m)?),
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
        let body = match &self.body {
            MasterMessageBody::Commands(commands) => Body::Commands(commands.to_wire()),
            &MasterMessageBody::HeartbeatAck { heartbeat_id, ttl_ms, ref in_sync, flush, drain } => {
                let group = |&(group, exclusion): &(GroupId, u32)| v1::GroupExclusion {
                    group: group.0.into(),
                    exclusion,
                };
                let in_sync = in_sync.iter().map(group).collect();
                Body::HeartbeatAck(v1::HeartbeatAck { heartbeat_id, ttl_ms, in_sync, flush, drain })
            }
            MasterMessageBody::CapabilityKey(key) => Body::CapabilityKey(key.to_wire()),
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
