//! The calls of a session, made and read: everything about the wire that needs no decision.

use std::num::NonZeroU16;
use std::time::Duration;

use moontide_heap::Medium;
use moontide_proto::convert::{MountSegmentsResponse, OpenSessionResponse, SegmentGrant, Wire};
use moontide_proto::v1::master_client::MasterClient;
use moontide_proto::v1::master_nodes_client::MasterNodesClient;
use moontide_proto::{ProtocolVersions, v1};
use moontide_types::bounds::REQUEST_BYTES_MAX;
use moontide_types::{ErrorCode, Generation, GroupId, SegmentId, SessionId, Term};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::{CALL_MAX, Facts};
use crate::memory::Side;

pub(crate) type Client = MasterNodesClient<Channel>;

/// Under this name a status carries the stable number of an [`ErrorCode`].
const CODE_METADATA: &str = "moontide-code";

/// A report chunk of half a megabyte is under way while the one before it is applied.
const WINDOW_BYTES: u32 = 4 << 20;

/// Why the master was not reached, or does not want this node.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(
        "cannot connect to {master}: {}; is the master running there, and is it its gRPC address?",
        chain(source)
    )]
    Connect { master: String, source: tonic::transport::Error },
    #[error("the master says: {}", .0.message())]
    Status(Box<Status>),
    #[error("the master refuses to {what}: {code}; {}", code.hint())]
    Refused { what: &'static str, code: ErrorCode },
    #[error("the master's message makes no sense: {0}; run the same release on both sides")]
    Message(moontide_proto::convert::ConvertError),
    #[error("the master's message is of another session")]
    OtherSession,
    #[error(
        "the master belongs to another cluster ({found:016x}, not {expected:016x}): what is stored here cannot be found by its \
         keys; restart this node to begin anew, or give the master its data_dir back"
    )]
    OtherCluster { expected: u64, found: u64 },
    #[error("the master does not answer in time")]
    Slow,
    #[error("the master acknowledges no heartbeats")]
    Silent,
    #[error("the master ended the stream")]
    Ended,
    #[error("the master hosts no group any more")]
    NotMaster,
}

impl From<Status> for Failure {
    fn from(status: Status) -> Failure {
        Failure::Status(Box::new(status))
    }
}

/// An error with its causes, of which the last says most.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// The stable code of a status, if it carries one.
pub(crate) fn code_of(status: &Status) -> Option<ErrorCode> {
    let number = status.metadata().get(CODE_METADATA)?.to_str().ok()?;
    ErrorCode::try_from(number.parse::<u32>().ok()?).ok()
}

async fn connect(master: &str) -> Result<Channel, Failure> {
    let failed = |source| Failure::Connect { master: master.to_owned(), source };
    let endpoint = Endpoint::from_shared(format!("http://{master}")).map_err(failed)?;
    endpoint
        .tcp_nodelay(true)
        .connect_timeout(CALL_MAX)
        .initial_stream_window_size(WINDOW_BYTES)
        .connect()
        .await
        .map_err(failed)
}

/// What a node must know of the cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cluster {
    pub(crate) number: u64,
    pub(crate) groups: NonZeroU16,
}

/// Asks the master about its cluster.
pub(crate) async fn learn_cluster(master: &str, caller: u64) -> Result<Cluster, Failure> {
    cluster_of(connect(master).await?, caller).await
}

async fn cluster_of(channel: Channel, caller: u64) -> Result<Cluster, Failure> {
    let request = v1::GetClusterInfoRequest { context: context(caller, None) };
    let answer = MasterClient::new(channel).get_cluster_info(request).await?.into_inner();
    accepted("tell about the cluster", answer.context.as_ref())?;
    let groups = u16::try_from(answer.groups).ok().and_then(NonZeroU16::new);
    let what = "tell about the cluster";
    let groups = groups.ok_or(Failure::Refused { what, code: ErrorCode::Internal })?;
    Ok(Cluster { number: answer.cluster, groups })
}

/// Which master hosts which group, as the master at this address sees it.
pub(super) async fn group_map(master: &str, caller: u64) -> Result<v1::GroupMap, Failure> {
    let channel = connect(master).await?;
    let request = v1::GetGroupMapRequest { context: context(caller, None) };
    let answer = MasterClient::new(channel).get_group_map(request).await?.into_inner();
    accepted("tell who hosts what", answer.context.as_ref())?;
    answer.map.ok_or(Failure::Refused { what: "tell who hosts what", code: ErrorCode::Internal })
}

/// Connects, and makes sure that it is still the same cluster.
pub(crate) async fn reach(master: &str, facts: &Facts) -> Result<Client, Failure> {
    let channel = connect(master).await?;
    let found = cluster_of(channel.clone(), facts.boot).await?.number;
    if found != facts.cluster {
        return Err(Failure::OtherCluster { expected: facts.cluster, found });
    }
    let max = REQUEST_BYTES_MAX;
    Ok(MasterNodesClient::new(channel).max_decoding_message_size(max).max_encoding_message_size(max))
}

fn context(caller: u64, session: Option<SessionId>) -> Option<v1::RequestContext> {
    Some(v1::RequestContext {
        caller,
        session: session.map_or(0, |session| session.0),
        deadline_ms: CALL_MAX.as_millis() as u32,
        ..Default::default()
    })
}

fn accepted(what: &'static str, context: Option<&v1::ResponseContext>) -> Result<(), Failure> {
    let code = context.map_or(ErrorCode::Internal as u32, |context| context.code);
    match code {
        0 => Ok(()),
        code => {
            Err(Failure::Refused { what, code: ErrorCode::try_from(code).unwrap_or(ErrorCode::Internal) })
        }
    }
}

pub(super) fn open_session(facts: &Facts, highest_term: Term) -> v1::OpenSessionRequest {
    let versions = ProtocolVersions::CURRENT;
    v1::OpenSessionRequest {
        context: context(facts.boot, None),
        node: facts.node.0,
        boot: facts.boot,
        addresses: facts.addresses.clone(),
        topology: Some(facts.topology.clone()),
        protocol_min: versions.min.into(),
        protocol_max: versions.max.into(),
        highest_term: highest_term.get(),
    }
}

/// A session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opened {
    pub(super) session: SessionId,
    pub(super) ttl: Duration,
    pub(super) term: Term,
    pub(super) groups: u32,
}

pub(super) fn opened(answer: v1::OpenSessionResponse) -> Result<Opened, Failure> {
    accepted("open a session", answer.context.as_ref())?;
    let answer = OpenSessionResponse::from_wire(&answer).map_err(Failure::Message)?;
    let grant =
        answer.body().ok_or(Failure::Refused { what: "open a session", code: ErrorCode::Internal })?;
    Ok(Opened {
        session: grant.session,
        ttl: Duration::from_millis(grant.ttl_ms.into()),
        term: answer.context().term,
        groups: grant.groups.into(),
    })
}

/// A segment as it is offered. `away`: how long ago a master of its group last knew of everything, and its
/// term, if one ever did.
pub(super) fn spec(side: &Side, group: Option<GroupId>, away: Option<(Duration, Term)>) -> v1::SegmentSpec {
    let shape = side.segment().shape();
    let grant = side.grant();
    v1::SegmentSpec {
        segment: shape.segment.0,
        generation: shape.generation.0,
        medium: match shape.medium {
            Medium::Host => v1::Medium::Memory,
            Medium::Device => v1::Medium::Device,
        }
        .into(),
        units: shape.units,
        slots: shape.slots,
        numa: 0,
        group: group.map(|group| group.0.into()),
        term: grant.map_or(0, |(_, term)| term.get()),
        occupied: side.is_occupied(),
        tenant: String::new(),
        away_ms: away.map_or(0, |(away, _)| away.as_millis() as u64),
        known_term: away.map_or(0, |(_, term)| term.get()),
    }
}

/// The node's disk as it is offered.
pub(super) fn disk_spec(generation: Generation, occupied: bool) -> v1::SegmentSpec {
    v1::SegmentSpec {
        segment: SegmentId::DISK.0,
        generation: generation.0,
        medium: v1::Medium::Disk.into(),
        // Its size is told with every heartbeat; none is given out by units.
        units: 1,
        slots: 1,
        occupied,
        ..Default::default()
    }
}

pub(super) fn mount_segments(
    facts: &Facts,
    session: SessionId,
    segments: Vec<v1::SegmentSpec>,
) -> v1::MountSegmentsRequest {
    v1::MountSegmentsRequest { context: context(facts.boot, Some(session)), segments }
}

/// The grants, one per segment; each says for itself whether it is one.
pub(super) fn mounted(
    answer: v1::MountSegmentsResponse,
    expected: usize,
) -> Result<Vec<SegmentGrant>, Failure> {
    let what = "mount the segments";
    accepted(what, answer.context.as_ref())?;
    let answer = MountSegmentsResponse::from_wire(&answer).map_err(Failure::Message)?;
    let grants = answer.body().map_or(&[][..], |body| &body.grants);
    if grants.len() != expected {
        return Err(Failure::Refused { what, code: ErrorCode::Internal });
    }
    Ok(grants.to_vec())
}

pub(super) fn unmount_segments(
    facts: &Facts,
    session: SessionId,
    segments: Vec<u32>,
) -> v1::UnmountSegmentsRequest {
    v1::UnmountSegmentsRequest { context: context(facts.boot, Some(session)), segments }
}

pub(super) fn segment_status(side: &Side) -> v1::SegmentStatus {
    let (shape, usage) = (side.segment().shape(), side.usage());
    let state = if side.is_closed() { v1::SegmentState::Draining } else { v1::SegmentState::Serving };
    v1::SegmentStatus {
        segment: shape.segment.0,
        generation: shape.generation.0,
        state: state.into(),
        // Each is at most the segment's size, which is a u32.
        live_units: usage.live_units as u32,
        writing_units: usage.writing_units as u32,
        draining_units: usage.draining_units as u32,
        free_units: usage.free_units as u32,
        free_slots: usage.free_slots as u32,
    }
}

/// Reads since a session began.
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
