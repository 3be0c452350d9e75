//! Calls of a session: requests and responses on the wire, without decisions.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use moontide_auth::Credentials;
use moontide_heap::PayloadMemory;
use moontide_proto::convert::{MountResult, MountSegmentsResponse, NumberedKey, OpenSessionResponse, Wire};
use moontide_proto::v1::master_client::MasterClient;
use moontide_proto::v1::master_nodes_client::MasterNodesClient;
use moontide_proto::{ProtocolVersions, v1};
use moontide_tasks::rpc::{self, Channel, ConnectError};
use moontide_types::limits::REQUEST_BYTES_MAX;
use moontide_types::{ErrorCode, Generation, GroupId, IdKey, SegmentId, SessionId, Term};
use tonic::Status;

use super::{CALL_TIMEOUT, NodeDescriptor};
use crate::memory::NodeSegment;

pub(crate) type Client = MasterNodesClient<Channel>;

/// Metadata key of a status with the stable number of an [`ErrorCode`].
const CODE_METADATA: &str = "moontide-code";

/// Stream window: a report chunk of half a megabyte is in flight while the previous one is applied.
const WINDOW_BYTES: u32 = 4 << 20;

/// Failure to reach a master, or its refusal of this node.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MasterError {
    #[error(
        "cannot connect to {master}: {}; check that a master runs there, and that it is its gRPC address",
        chain(source)
    )]
    Connect { master: String, source: ConnectError },
    #[error("master error: {}", .0.message())]
    Status(Box<Status>),
    #[error("master refused to {what}: {code}; {}", code.hint())]
    Refused { what: &'static str, code: ErrorCode },
    #[error("invalid message from the master: {0}; run the same release on node and master")]
    Message(moontide_proto::convert::ConvertError),
    #[error("message from the master is of another session")]
    OtherSession,
    #[error(
        "the master belongs to another cluster ({found:016x}, not {expected:016x}), where records of this node \
         cannot be found by their keys; restart this node to start empty, or restore the master's data_dir"
    )]
    OtherCluster { expected: u64, found: u64 },
    #[error(
        "the master computes ids of objects with another key than the masters before it; check that all masters have \
         the same registry, and restart this node"
    )]
    OtherIdKey,
    #[error("timeout of a call to the master")]
    Timeout,
    #[error("the master does not acknowledge heartbeats")]
    NoHeartbeatAck,
    #[error("the master ended the stream")]
    Ended,
    #[error("the master hosts no group any more")]
    NotMaster,
}

impl From<Status> for MasterError {
    fn from(status: Status) -> MasterError {
        MasterError::Status(Box::new(status))
    }
}

/// Formats an error with its causes; the last one is the most specific.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Returns the stable code of a status, if it carries one.
pub(crate) fn code_of(status: &Status) -> Option<ErrorCode> {
    let number = status.metadata().get(CODE_METADATA)?.to_str().ok()?;
    ErrorCode::try_from(number.parse::<u32>().ok()?).ok()
}

async fn connect(master: &str, credentials: Option<&Arc<Credentials>>) -> Result<Channel, MasterError> {
    let connected = rpc::connect(master, CALL_TIMEOUT, WINDOW_BYTES, credentials).await;
    connected.map_err(|source| MasterError::Connect { master: master.to_owned(), source })
}

/// Parameters of the cluster that a node needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClusterParams {
    pub(crate) number: u64,
    pub(crate) groups: NonZeroU16,
}

/// Fetches the cluster parameters from a master.
pub(crate) async fn learn_cluster(
    master: &str,
    caller: u64,
    credentials: Option<&Arc<Credentials>>,
) -> Result<ClusterParams, MasterError> {
    cluster_of(connect(master, credentials).await?, caller).await
}

async fn cluster_of(channel: Channel, caller: u64) -> Result<ClusterParams, MasterError> {
    let request = v1::GetClusterInfoRequest { context: context(caller, None) };
    let response = MasterClient::new(channel).get_cluster_info(request).await?.into_inner();
    let what = "return the cluster parameters";
    accepted(what, response.context.as_ref())?;
    let groups = u16::try_from(response.groups).ok().and_then(NonZeroU16::new);
    let groups = groups.ok_or(MasterError::Refused { what, code: ErrorCode::Internal })?;
    Ok(ClusterParams { number: response.cluster, groups })
}

/// Fetches the group map of the master at this address.
pub(super) async fn group_map(
    master: &str,
    caller: u64,
    credentials: Option<&Arc<Credentials>>,
) -> Result<v1::GroupMap, MasterError> {
    let channel = connect(master, credentials).await?;
    let request = v1::GetGroupMapRequest { context: context(caller, None) };
    let response = MasterClient::new(channel).get_group_map(request).await?.into_inner();
    let what = "return the group map";
    accepted(what, response.context.as_ref())?;
    response.map.ok_or(MasterError::Refused { what, code: ErrorCode::Internal })
}

/// Connects, and verifies that it is still the same cluster.
pub(crate) async fn connect_and_verify(
    master: &str,
    descriptor: &NodeDescriptor,
) -> Result<Client, MasterError> {
    let channel = connect(master, descriptor.credentials.as_ref()).await?;
    let found = cluster_of(channel.clone(), descriptor.boot).await?.number;
    if found != descriptor.cluster {
        return Err(MasterError::OtherCluster { expected: descriptor.cluster, found });
    }
    let max = REQUEST_BYTES_MAX;
    Ok(MasterNodesClient::new(channel).max_decoding_message_size(max).max_encoding_message_size(max))
}

fn context(caller: u64, session: Option<SessionId>) -> Option<v1::RequestContext> {
    Some(v1::RequestContext {
        caller,
        session: session.map_or(0, |session| session.0),
        timeout_ms: CALL_TIMEOUT.as_millis() as u32,
        ..Default::default()
    })
}

fn accepted(what: &'static str, context: Option<&v1::ResponseContext>) -> Result<(), MasterError> {
    let code = context.map_or(ErrorCode::Internal as u32, |context| context.code);
    match code {
        0 => Ok(()),
        code => {
            Err(MasterError::Refused { what, code: ErrorCode::try_from(code).unwrap_or(ErrorCode::Internal) })
        }
    }
}

pub(super) fn open_session(descriptor: &NodeDescriptor, highest_term: Term) -> v1::OpenSessionRequest {
    let versions = ProtocolVersions::CURRENT;
    v1::OpenSessionRequest {
        context: context(descriptor.boot, None),
        node: descriptor.node.0,
        boot_id: descriptor.boot,
        addresses: descriptor.addresses.clone(),
        topology: Some(descriptor.topology.clone()),
        protocol_min: versions.min.into(),
        protocol_max: versions.max.into(),
        highest_term: highest_term.get(),
    }
}

/// An opened session.
#[derive(Clone, Debug)]
pub(super) struct OpenedSession {
    pub(super) session: SessionId,
    pub(super) ttl: Duration,
    pub(super) term: Term,
    pub(super) groups: u32,
    pub(super) id_key: IdKey,
    /// Key with which the master signs capabilities for this node.
    pub(super) key: NumberedKey,
}

pub(super) fn opened(response: v1::OpenSessionResponse) -> Result<OpenedSession, MasterError> {
    let what = "open a session";
    accepted(what, response.context.as_ref())?;
    let response = OpenSessionResponse::from_wire(&response).map_err(MasterError::Message)?;
    let grant = response.body().ok_or(MasterError::Refused { what, code: ErrorCode::Internal })?;
    // Without the key, the node would have to refuse every write.
    let no_key = MasterError::Refused { what: "send the id key", code: ErrorCode::PermissionDenied };
    let secret = grant.id_key_secret.as_ref().ok_or(no_key)?;
    Ok(OpenedSession {
        session: grant.session,
        ttl: Duration::from_millis(grant.ttl_ms.into()),
        term: response.context().term,
        groups: grant.groups.into(),
        id_key: IdKey::new(grant.id_key, secret.0),
        key: grant.capability_key.clone(),
    })
}

/// Returns the description of a segment for a mount.
pub(super) fn spec(node_segment: &NodeSegment, group: Option<GroupId>) -> v1::SegmentSpec {
    let shape = node_segment.segment().shape();
    let grant = node_segment.grant();
    v1::SegmentSpec {
        segment: shape.segment.0,
        generation: shape.generation.0,
        medium: match shape.medium {
            PayloadMemory::Host => v1::Medium::Memory,
            PayloadMemory::Device => v1::Medium::Device,
        }
        .into(),
        units: shape.units,
        slots: shape.slots,
        numa: 0,
        group: group.map(|group| group.0.into()),
        term: grant.map_or(0, |(_, term)| term.get()),
        has_records: node_segment.is_occupied(),
        tenant: String::new(),
    }
}

/// Returns the description of the node's disk for a mount.
pub(super) fn disk_spec(generation: Generation, occupied: bool) -> v1::SegmentSpec {
    v1::SegmentSpec {
        segment: SegmentId::DISK.0,
        generation: generation.0,
        medium: v1::Medium::Disk.into(),
        // Every heartbeat reports the size; masters allocate no units of it.
        units: 1,
        slots: 1,
        has_records: occupied,
        ..Default::default()
    }
}

pub(super) fn mount_segments(
    descriptor: &NodeDescriptor,
    session: SessionId,
    segments: Vec<v1::SegmentSpec>,
    synced: Vec<v1::SyncMark>,
    capability_rotation: u64,
) -> v1::MountSegmentsRequest {
    let context = context(descriptor.boot, Some(session));
    v1::MountSegmentsRequest { context, segments, synced, capability_rotation }
}

/// Returns the results of a mount, one per segment; each has its own error code.
pub(super) fn mounted(
    response: v1::MountSegmentsResponse,
    expected: usize,
) -> Result<Vec<MountResult>, MasterError> {
    let what = "mount the segments";
    accepted(what, response.context.as_ref())?;
    let response = MountSegmentsResponse::from_wire(&response).map_err(MasterError::Message)?;
    let grants = response.body().map_or(&[][..], |body| &body.results);
    if grants.len() != expected {
        return Err(MasterError::Refused { what, code: ErrorCode::Internal });
    }
    Ok(grants.to_vec())
}

pub(super) fn unmount_segments(
    descriptor: &NodeDescriptor,
    session: SessionId,
    segments: Vec<u32>,
) -> v1::UnmountSegmentsRequest {
    v1::UnmountSegmentsRequest { context: context(descriptor.boot, Some(session)), segments }
}

pub(super) fn segment_status(node_segment: &NodeSegment) -> v1::SegmentStatus {
    let (shape, usage) = (node_segment.segment().shape(), node_segment.usage());
    let state = if node_segment.is_closed() { v1::SegmentState::Draining } else { v1::SegmentState::Serving };
    v1::SegmentStatus {
        segment: shape.segment.0,
        generation: shape.generation.0,
        state: state.into(),
        // Each value is at most the segment's size, which is a u32.
        live_units: usage.live_units as u32,
        writing_units: usage.writing_units as u32,
        draining_units: usage.draining_units as u32,
        free_units: usage.free_units as u32,
        free_slots: usage.free_slots as u32,
    }
}

/// Returns the reads since `before`.
pub(super) fn since(now: v1::ReadCounters, before: &v1::ReadCounters) -> v1::ReadCounters {
    v1::ReadCounters {
        local_memory: now.local_memory.saturating_sub(before.local_memory),
        local_misses: now.local_misses.saturating_sub(before.local_misses),
        remote_memory: now.remote_memory.saturating_sub(before.remote_memory),
        remote_disk: now.remote_disk.saturating_sub(before.remote_disk),
        bytes: now.bytes.saturating_sub(before.bytes),
        corrupt: now.corrupt.saturating_sub(before.corrupt),
        ..Default::default()
    }
}
