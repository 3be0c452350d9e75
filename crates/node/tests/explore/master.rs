//! [`ScriptedMaster`]: a master without decisions of its own. It acknowledges what the node sends, passes on the commands of a
//! test, and checks what the node tells about the one object of the test.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use moontide_proto::{
    CommandKind, CommandResult, CommandStatus, NodeCommand, OffloadRecord, Packed, PackedBuilder,
    ReportRecord, v1,
};
use moontide_tasks::sim::{Network, Reply};
use moontide_types::limits::BATCH_KEYS_MAX;
use moontide_types::record::State;
use moontide_types::{ErrorCode, ObjectId, Term};
use prost::Message;
use tonic::{Code, Status};
use v1::master_message::Body as FromMaster;
use v1::node_message::Body as FromNode;

pub(crate) const ADDRESS: &str = "master:1";
pub(crate) const CLUSTER: u64 = 5;
pub(crate) const TTL_MS: u32 = 10_000;
const VERSIONS: u32 = 2;
pub(crate) const CAPABILITY_KEY: [u8; 32] = [8; 32];

/// Term of the master.
pub(crate) fn term() -> Term {
    Term::new(1).unwrap()
}

struct Call {
    path: String,
    reply: Reply,
}

/// What the master has seen.
#[derive(Debug, Default)]
struct Seen {
    /// The session, and the number of its stream once there is one.
    session: u64,
    stream: Option<u64>,
    commands: u64,
    /// Kills that are not answered.
    kills: BTreeSet<u64>,
    /// Whether the removal was acknowledged: the object must never be told of again.
    is_removed: bool,
    /// Whether the session has received all that was on the disk.
    has_inventory: bool,
    /// Whether the object was told to be on the disk.
    was_on_disk: bool,
    violation: Option<String>,
    /// How often the hosting has changed. While the number is odd, the master hosts no group.
    hosting: u64,
}

impl Seen {
    fn map_version(&self) -> u64 {
        1 + self.hosting
    }
}

#[derive(Default)]
struct Inner {
    last: u64,
    calls: BTreeMap<u64, Call>,
    seen: Seen,
}

/// See the top of the file.
pub(crate) struct ScriptedMaster {
    id: ObjectId,
    inner: RefCell<Inner>,
}

impl ScriptedMaster {
    pub(crate) fn new(id: ObjectId) -> ScriptedMaster {
        ScriptedMaster { id, inner: RefCell::default() }
    }

    /// Whether the node has a session, and has told what is on its disk.
    pub(crate) fn is_synced(&self) -> bool {
        let seen = &self.inner.borrow().seen;
        seen.stream.is_some() && seen.has_inventory
    }

    pub(crate) fn is_removed(&self) -> bool {
        self.inner.borrow().seen.is_removed
    }

    pub(crate) fn was_on_disk(&self) -> bool {
        self.inner.borrow().seen.was_on_disk
    }

    pub(crate) fn violation(&self) -> Option<String> {
        self.inner.borrow().seen.violation.clone()
    }

    /// Sends a command. Returns false without a session.
    pub(crate) fn command(&self, command: impl FnOnce(u64) -> NodeCommand) -> bool {
        let mut inner = self.inner.borrow_mut();
        let Inner { calls, seen, .. } = &mut *inner;
        let Some(call) = seen.stream.and_then(|stream| calls.get(&stream)) else { return false };
        seen.commands += 1;
        let command = command(seen.commands);
        if command.kind == CommandKind::Kill {
            seen.kills.insert(seen.commands);
        }
        let commands: PackedBuilder<NodeCommand> = [command].into_iter().collect();
        let commands = v1::Commands { commands: commands.finish().into(), ..Default::default() };
        send(call, (seen.session, seen.map_version()), 0, FromMaster::Commands(commands));
        true
    }

    /// Changes whether the master hosts the group.
    pub(crate) fn toggle_hosting(&self) {
        self.inner.borrow_mut().seen.hosting += 1;
    }

    /// Ends the session: the node opens another one.
    pub(crate) fn end_session(&self) {
        let mut inner = self.inner.borrow_mut();
        let Some(call) = inner.seen.stream.take().and_then(|stream| inner.calls.remove(&stream)) else {
            return;
        };
        inner.seen.kills.clear();
        let mut status = Status::failed_precondition("the session is over");
        let code = (ErrorCode::StaleSession as u32).to_string().parse().unwrap();
        status.metadata_mut().insert("moontide-code", code);
        call.reply.end(status);
    }

    /// The process of the node has ended.
    pub(crate) fn node_ended(&self) {
        let mut inner = self.inner.borrow_mut();
        inner.calls.clear();
        inner.seen.stream = None;
        inner.seen.kills.clear();
    }

    fn answer(&self, number: u64, message: &impl Message) {
        let Some(call) = self.inner.borrow_mut().calls.remove(&number) else { return };
        call.reply.started();
        call.reply.message(message.encode_to_vec().into());
        call.reply.end(Status::new(Code::Ok, ""));
    }

    fn hears(&self, number: u64, message: &v1::NodeMessage) {
        let mut inner = self.inner.borrow_mut();
        let Inner { calls, seen, .. } = &mut *inner;
        let Some(call) = calls.get(&number) else { return };
        if message.session != seen.session {
            return; // a stream that was open when another session began
        }
        if seen.stream != Some(number) {
            seen.stream = Some(number);
            call.reply.started();
        }
        let body = message.body.as_ref().expect("a node sends no empty message");
        let what = match body {
            FromNode::CommandResults(results) => {
                for result in
                    Packed::<CommandResult>::decode(&results.results, BATCH_KEYS_MAX).unwrap().iter()
                {
                    let is_certain = result.status != CommandStatus::Refused
                        || matches!(result.code, Some(ErrorCode::NotFound | ErrorCode::StaleGeneration));
                    seen.is_removed |= seen.kills.remove(&result.command_id) && is_certain;
                }
                None
            }
            FromNode::Report(chunk) => {
                let records = Packed::<ReportRecord>::decode(&chunk.records, BATCH_KEYS_MAX).unwrap();
                let is_there = |record: ReportRecord| {
                    record.id == self.id && matches!(record.word.state(), State::Ready | State::Writing)
                };
                records.iter().any(is_there).then_some("in memory")
            }
            FromNode::Offloaded(notice) => {
                let records = Packed::<OffloadRecord>::decode(&notice.records, BATCH_KEYS_MAX).unwrap();
                let is_there = records.iter().any(|record: OffloadRecord| record.id == self.id);
                if is_there && notice.recovered && seen.has_inventory {
                    seen.violation = Some("told as recovered after the end of the inventory".to_owned());
                }
                seen.was_on_disk |= is_there;
                seen.has_inventory |= notice.recovery_end;
                is_there.then_some("on the disk")
            }
            FromNode::Heartbeat(_)
            | FromNode::ReportEnd(_)
            | FromNode::DiskEvicted(_)
            | FromNode::CapabilityKeyHeld(_) => None,
        };
        if let Some(place) = what.filter(|_| seen.is_removed) {
            seen.violation = Some(format!("told of {place} after its removal was acknowledged"));
        }
        let body = match body {
            FromNode::Heartbeat(heartbeat) => FromMaster::HeartbeatAck(v1::HeartbeatAck {
                heartbeat_id: heartbeat.heartbeat_id,
                ttl_ms: TTL_MS,
                ..Default::default()
            }),
            _ => FromMaster::Commands(v1::Commands::default()),
        };
        send(call, (message.session, seen.map_version()), message.sequence, body);
    }
}

fn send(call: &Call, (session, map_version): (u64, u64), acked_sequence: u64, body: FromMaster) {
    let message =
        v1::MasterMessage { session, term: term().get(), map_version, acked_sequence, body: Some(body) };
    call.reply.message(message.encode_to_vec().into());
}

impl Network for ScriptedMaster {
    fn begin(&self, address: &str, path: &str, reply: Reply) -> u64 {
        assert_eq!(address, ADDRESS);
        let mut inner = self.inner.borrow_mut();
        inner.last += 1;
        let number = inner.last;
        inner.calls.insert(number, Call { path: path.to_owned(), reply });
        number
    }

    fn message(&self, number: u64, message: Bytes) {
        let Some(path) = self.inner.borrow().calls.get(&number).map(|call| call.path.clone()) else { return };
        let version = self.inner.borrow().seen.map_version();
        let context =
            Some(v1::ResponseContext { map_version: version, term: term().get(), ..Default::default() });
        match path.rsplit('/').next().unwrap() {
            "GetClusterInfo" => self.answer(
                number,
                &v1::GetClusterInfoResponse { context, cluster: CLUSTER, groups: 1, ..Default::default() },
            ),
            "GetGroupMap" => {
                let groups = if version % 2 == 1 { vec![0] } else { vec![] };
                let master = v1::MasterEntry {
                    grpc_address: ADDRESS.into(),
                    term: term().get(),
                    terms: vec![term().get(); groups.len()],
                    groups,
                    ..Default::default()
                };
                let map = v1::GroupMap { version, groups: 1, masters: vec![master], single_master: false };
                self.answer(number, &v1::GetGroupMapResponse { context, map: Some(map) });
            }
            "OpenSession" => {
                let session = {
                    let seen = &mut self.inner.borrow_mut().seen;
                    seen.session += 1;
                    (seen.stream, seen.has_inventory) = (None, false);
                    seen.session
                };
                let response = v1::OpenSessionResponse {
                    context,
                    session,
                    ttl_ms: TTL_MS,
                    protocol: VERSIONS,
                    groups: 1,
                    id_key: 1,
                    id_key_secret: vec![7; 32].into(),
                    capability_key: Some(v1::CapabilityKey {
                        rotation: 1,
                        key: CAPABILITY_KEY.to_vec().into(),
                    }),
                };
                self.answer(number, &response);
            }
            "MountSegments" => {
                let request = v1::MountSegmentsRequest::decode(message).unwrap();
                let result = |spec: &v1::SegmentSpec| v1::MountResult {
                    segment: spec.segment,
                    term: term().get(),
                    ..Default::default()
                };
                let results = request.segments.iter().map(result).collect();
                self.answer(number, &v1::MountSegmentsResponse { context, results });
            }
            "Session" => self.hears(number, &v1::NodeMessage::decode(message).unwrap()),
            path => panic!("a node does not call {path} here"),
        }
    }

    fn half_close(&self, _: u64) {}

    fn cancel(&self, number: u64) {
        let mut inner = self.inner.borrow_mut();
        inner.calls.remove(&number);
        if inner.seen.stream == Some(number) {
            inner.seen.stream = None;
        }
    }
}
