//! [`Subject::requests`]: each call of the table of rights, over each protocol that has it.

use std::cell::Cell;

use moontide_auth::Call;
use moontide_master::Server;
use moontide_proto::convert::{LoadRequest, encode};
use moontide_proto::limits::OPS_PER_FRAME_MAX;
use moontide_proto::v1::master_client::MasterClient;
use moontide_proto::v1::master_nodes_client::MasterNodesClient;
use moontide_proto::v1::master_peers_client::MasterPeersClient;
use moontide_proto::{
    Capability, CommitEntry, CommitFlags, FixedRecord, FrameKind, OpFlags, OpKind, Packed, PackedBuilder,
    PutEndEntry, PutEndFlags, PutEntry, VersionedId, v1,
};
use moontide_transfer::{Link, Target};
use moontide_types::limits::REPLICAS_MAX;
use moontide_types::{Generation, NodeId, SegmentId, SlotId};
use prost::Message;

use crate::caller::{Frame, Request};
use crate::support::{self, Client, Reserved, keys};

/// Bytes of each record.
pub const LEN: usize = 1000;

/// A node that no process of the test is.
const NO_NODE: u64 = 0x77;

/// For whom a request is: the tenant that it names, or the node.
pub struct Subject<'a> {
    pub master: &'a Server,
    pub client: &'a Client<'a>,
    /// To the node, as a client of the tenant.
    pub link: &'a dyn Link,
    pub tenant: &'a str,
    pub node: NodeId,
    /// In place of the capability that the master has granted.
    pub capability: Option<Capability>,
    /// Number of the next key.
    pub next_key: &'a Cell<u32>,
}

/// A gRPC call: method, and message.
macro_rules! grpc {
    ($client:ident.$method:ident, $message:expr) => {{
        let message = $message;
        Request::Grpc(Box::new(move |channel| {
            Box::pin(async move {
                let response = $client::new(channel).$method(message).await?.into_inner();
                Ok(response.context.map_or(0, |context| context.code))
            })
        }))
    }};
}

/// A call to a master over both of its protocols: method, kind of the frame, and what returns a message.
macro_rules! both {
    ($method:ident, $kind:ident, $message:expr) => {{
        let message = $message;
        let frame = frame(FrameKind::$kind, message().encode_to_vec());
        vec![grpc!(MasterClient.$method, message()), Request::MasterFrame(frame)]
    }};
}

fn frame(kind: FrameKind, body: Vec<u8>) -> Frame {
    Frame { kind, body, payload: vec![] }
}

fn on_node(frame: Frame) -> Vec<Request> {
    vec![Request::NodeFrame(frame)]
}

fn page() -> Option<v1::Pagination> {
    Some(v1::Pagination { limit: 1, ..Default::default() })
}

impl Subject<'_> {
    /// Returns the requests of a call. A peer that has the right to the call gets an answer that depends on the state of the cluster.
    pub fn requests(&self, call: Call) -> Vec<Request> {
        let context = self.context();
        match call {
            Call::Exist => {
                both!(exist, Exist, || v1::ExistRequest { context: self.context(), keys: keys(&["k"]) })
            }
            Call::GetReplicaList => both!(get_replica_list, GetReplicaList, || v1::GetReplicaListRequest {
                context: self.context(),
                keys: keys(&["k"]),
                ..Default::default()
            }),
            Call::PutStart => both!(put_start, PutStart, || self.put_start()),
            Call::PutEnd => both!(put_end, PutEnd, || put_end(self.context(), &self.granted(), 0x5eed)),
            Call::PutRevoke => {
                vec![grpc!(MasterClient.put_revoke, put_revoke(context, &self.granted()))]
            }
            Call::Touch => {
                vec![grpc!(MasterClient.touch, v1::TouchRequest { context, keys: keys(&["k"]), lease_ms: 0 })]
            }
            Call::SetPin => {
                vec![grpc!(MasterClient.set_pin, v1::SetPinRequest { context, keys: keys(&["k"]), pin: 0 })]
            }
            Call::Prefetch => vec![grpc!(
                MasterClient.prefetch,
                v1::PrefetchRequest { context, keys: keys(&["k"]), target_node: 0 }
            )],
            Call::Remove => both!(remove, Remove, || v1::RemoveRequest {
                context: self.context(),
                keys: keys(&["k"]),
                force: false,
            }),
            Call::RemoveByPrefix => vec![grpc!(
                MasterClient.remove_by_prefix,
                v1::RemoveByPrefixRequest { context, prefix: "k".into(), ..Default::default() }
            )],
            Call::RemoveByRegex => vec![grpc!(
                MasterClient.remove_by_regex,
                v1::RemoveByRegexRequest { context, pattern: "^k$".into(), ..Default::default() }
            )],
            Call::RemoveAll => {
                vec![grpc!(MasterClient.remove_all, v1::RemoveAllRequest { context, ..Default::default() })]
            }
            Call::GetJob => {
                vec![grpc!(MasterClient.get_job, v1::GetJobRequest { context, job: 1, groups: vec![] })]
            }
            Call::ListKeys => vec![grpc!(
                MasterClient.list_keys,
                v1::ListKeysRequest { context, page: page(), ..Default::default() }
            )],
            Call::QueryKeys => {
                vec![grpc!(MasterClient.query_keys, v1::QueryKeysRequest { context, keys: keys(&["k"]) })]
            }
            Call::PollInvalidations => {
                let cursors = vec![v1::InvalidationCursor::default()];
                let request = v1::PollInvalidationsRequest { context, cursors, wait_ms: 0, cluster: 0 };
                vec![grpc!(MasterClient.poll_invalidations, request)]
            }
            Call::GetGroupMap => {
                vec![grpc!(MasterClient.get_group_map, v1::GetGroupMapRequest { context })]
            }
            Call::GetClusterInfo => {
                vec![grpc!(MasterClient.get_cluster_info, v1::GetClusterInfoRequest { context })]
            }
            Call::GetNodes => vec![grpc!(MasterClient.get_nodes, v1::GetNodesRequest { context })],
            Call::Evict => {
                vec![grpc!(MasterClient.evict, v1::EvictRequest { context, target_permille: 1000 })]
            }
            Call::GetTenants => {
                vec![grpc!(MasterClient.get_tenants, v1::GetTenantsRequest { context, page: page() })]
            }
            Call::SetTenantQuota => vec![grpc!(
                MasterClient.set_tenant_quota,
                v1::SetTenantQuotaRequest { context, bytes_max: 0, objects_max: 0 }
            )],
            Call::ListSegments => vec![grpc!(
                MasterClient.list_segments,
                v1::ListSegmentsRequest { context, page: page(), node: 0 }
            )],
            Call::DrainSegment => {
                let segment = Some(v1::SegmentRef { node: NO_NODE, segment: 0 });
                let request = v1::DrainSegmentRequest { context, segment, evict: false };
                vec![grpc!(MasterClient.drain_segment, request)]
            }
            Call::DrainNode => vec![grpc!(
                MasterClient.drain_node,
                v1::DrainNodeRequest { context, node: NO_NODE, undrain: false }
            )],
            Call::OpenSession => vec![grpc!(MasterNodesClient.open_session, self.open_session())],
            Call::MountSegments => {
                let opened = self.session();
                let context = self.context_of(&opened);
                let capability_rotation = opened.capability_key.expect("a key").rotation;
                let request = v1::MountSegmentsRequest { context, capability_rotation, ..Default::default() };
                vec![grpc!(MasterNodesClient.mount_segments, request)]
            }
            Call::UnmountSegments => {
                let context = self.context_of(&self.session());
                let request = v1::UnmountSegmentsRequest { context, segments: vec![] };
                vec![grpc!(MasterNodesClient.unmount_segments, request)]
            }
            Call::Session => vec![self.session_stream()],
            Call::HandoffGroup => {
                // Of another cluster, so that the master is not changed.
                let replicas = Some(v1::GetReplicaListResponse::default());
                let request = v1::HandoffGroupRequest { context, replicas, ..Default::default() };
                vec![grpc!(MasterPeersClient.handoff_group, request)]
            }
            Call::Health => vec![
                Request::MasterPage("GET /health"),
                Request::MasterPage("GET /ready"),
                Request::NodePage("GET /health"),
            ],
            Call::Metrics => vec![
                Request::MasterPage("GET /metrics"),
                Request::MasterPage("GET /role"),
                Request::NodePage("GET /metrics"),
            ],
            Call::Inspect => vec![
                Request::MasterPage("GET /get_all_nodes"),
                Request::MasterPage("GET /get_all_segments"),
                Request::MasterPage("GET /get_all_keys"),
                Request::MasterPage("GET /get_all_tenants"),
                Request::MasterPage("GET /query_key?key=k"),
                Request::MasterPage("GET /batch_query_keys?keys=k"),
                Request::MasterPage("POST /batch_query_keys"),
                Request::MasterPage("GET /jobs/1"),
                Request::MasterPage("GET /no_such_page"),
                Request::NodePage("GET /segments"),
                Request::NodePage("GET /segments/0"),
                Request::NodePage("GET /no_such_page"),
            ],
            Call::Change => vec![
                Request::MasterPage("POST /set_pin"),
                Request::MasterPage("POST /touch"),
                Request::MasterPage("POST /prefetch"),
                Request::MasterPage("POST /remove_by_prefix?prefix=k"),
                Request::MasterPage("POST /remove_by_regex?regex=k"),
                Request::MasterPage("POST /remove_all?tenant=none"),
                Request::MasterPage("POST /evict?target_permille=1000"),
                Request::MasterPage("POST /tenants/none/quota"),
                Request::MasterPage("POST /segments/77/0/drain"),
                Request::MasterPage("POST /nodes/77/drain"),
                Request::MasterPage("POST /nodes/77/undrain"),
                Request::NodePage("POST /segments"),
            ],
            Call::Begin => on_node(begin(&self.with_capability(self.granted()))),
            Call::Write => {
                let reserved = self.begun();
                on_node(write(&self.with_capability(reserved)))
            }
            Call::Commit => {
                let reserved = self.begun();
                let root = support::write(self.link, &reserved, &content());
                on_node(commit(&self.with_capability(reserved), root))
            }
            Call::Read => on_node(operation(&self.with_capability(self.complete()), FrameKind::Read)),
            Call::Load => on_node(load(&self.with_capability(self.complete()))),
            Call::Release => on_node(operation(&self.with_capability(self.complete()), FrameKind::Release)),
            Call::Describe => on_node(operation(&self.with_capability(self.complete()), FrameKind::Describe)),
            Call::PingNode => on_node(frame(FrameKind::Ping, vec![])),
            Call::PingMaster => vec![Request::MasterFrame(frame(FrameKind::Ping, vec![]))],
        }
    }

    fn context(&self) -> Option<v1::RequestContext> {
        support::context().map(|context| v1::RequestContext { tenant: self.tenant.to_owned(), ..context })
    }

    fn key(&self) -> String {
        self.next_key.set(self.next_key.get() + 1);
        format!("object-{}", self.next_key.get())
    }

    // ----------------------------------------------------------------------------------- objects

    fn put_start(&self) -> v1::PutStartRequest {
        let objects: PackedBuilder<PutEntry> =
            [PutEntry { len: LEN as u64, config: 0 }].into_iter().collect();
        v1::PutStartRequest {
            context: self.context(),
            keys: keys(&[&self.key()]),
            configs: vec![v1::PutConfig { replicas: 1, replicas_min: 1, ..Default::default() }],
            objects: objects.finish().into(),
            attributes: Default::default(),
        }
    }

    /// Space for a new object of the tenant.
    pub fn granted(&self) -> Reserved {
        self.client.put_start_in(self.context(), &self.key(), LEN as u64, false).expect("memory is free")
    }

    /// A record that can be written.
    fn begun(&self) -> Reserved {
        let reserved = self.granted();
        assert_eq!(support::begin(self.link, &reserved), None);
        reserved
    }

    /// A record that can be read.
    fn complete(&self) -> Reserved {
        let reserved = self.begun();
        let root = support::write(self.link, &reserved, &content());
        assert_eq!(support::commit(self.link, &reserved, root, CommitFlags::NONE), None);
        let end = put_end(self.context(), &reserved, root);
        assert_eq!(support::one_code(&self.master.service().put_end(&end)), None);
        self.client.lookup_in(self.context(), &reserved.name).expect("it was put")
    }

    fn with_capability(&self, mut reserved: Reserved) -> Reserved {
        if let Some(capability) = self.capability {
            reserved.handles[0].capability = capability;
        }
        reserved
    }

    // ----------------------------------------------------------------------------------- sessions

    fn open_session(&self) -> v1::OpenSessionRequest {
        let addresses = vec![v1::Address { engine: "tcp".into(), address: "127.0.0.1:1".into() }];
        let (context, node) = (self.context(), self.node.0);
        let versions = moontide_proto::ProtocolVersions::CURRENT;
        v1::OpenSessionRequest {
            context,
            node,
            boot_id: 5,
            addresses,
            topology: Some(v1::Topology::default()),
            protocol_min: versions.min.into(),
            protocol_max: versions.max.into(),
            highest_term: 0,
        }
    }

    /// Opens a session of the node without a socket.
    fn session(&self) -> v1::OpenSessionResponse {
        let response = self.master.service().open_session(&self.open_session());
        assert_eq!(response.context.as_ref().expect("a context").code, 0, "the node may register");
        response
    }

    fn context_of(&self, opened: &v1::OpenSessionResponse) -> Option<v1::RequestContext> {
        self.context().map(|context| v1::RequestContext { session: opened.session, ..context })
    }

    fn session_stream(&self) -> Request {
        let message = v1::NodeMessage { session: self.session().session, sequence: 1, ..Default::default() };
        Request::Grpc(Box::new(move |channel| {
            Box::pin(async move {
                let messages = tokio_stream::iter([message]);
                let mut answers = MasterNodesClient::new(channel).session(messages).await?.into_inner();
                answers.message().await.map(|_| 0)
            })
        }))
    }
}

/// Returns the request that completes a put.
pub fn put_end(context: Option<v1::RequestContext>, reserved: &Reserved, root: u64) -> v1::PutEndRequest {
    let entry = PutEndEntry {
        id: reserved.id,
        epoch: reserved.object.epoch,
        root,
        outcomes: [None; REPLICAS_MAX],
        replica_count: 1,
        flags: PutEndFlags::NONE,
        stripe_count: 1,
    };
    let entries: PackedBuilder<PutEndEntry> = [entry].into_iter().collect();
    v1::PutEndRequest { context, entries: entries.finish().into(), stripe_roots: vec![] }
}

/// Returns the request that gives the space of a put back.
pub fn put_revoke(context: Option<v1::RequestContext>, reserved: &Reserved) -> v1::PutRevokeRequest {
    let mut versions = Vec::new();
    VersionedId { id: reserved.id, epoch: reserved.object.epoch }.encode(&mut versions);
    v1::PutRevokeRequest { context, versions: versions.into() }
}

fn content() -> Vec<u8> {
    support::content(1, LEN)
}

fn begin(reserved: &Reserved) -> Frame {
    frame(FrameKind::Begin, support::begin_body(reserved))
}

fn write(reserved: &Reserved) -> Frame {
    Frame { payload: content(), ..operation(reserved, FrameKind::Write) }
}

fn commit(reserved: &Reserved, root: u64) -> Frame {
    let handle = &reserved.handles[0];
    let entry = CommitEntry {
        id: reserved.id,
        epoch: reserved.object.epoch,
        generation: handle.generation,
        segment: handle.segment,
        slot: handle.slot,
        root,
        capability: handle.capability,
        term: handle.term,
        flags: CommitFlags::NONE,
    };
    let mut entries = Vec::new();
    entry.encode(&mut entries);
    frame(FrameKind::Commit, v1::CommitRequest { entries: entries.into() }.encode_to_vec())
}

/// Returns a frame whose body is one operation on the whole record.
fn operation(reserved: &Reserved, kind: FrameKind) -> Frame {
    let operation = match kind {
        FrameKind::Write => OpKind::Write,
        FrameKind::Release => OpKind::Release,
        _ => OpKind::Read,
    };
    let mut body = Vec::new();
    reserved.target().to_wire(operation, 0, LEN as u64).encode(&mut body);
    frame(kind, body)
}

fn load(reserved: &Reserved) -> Frame {
    // Records on a disk have no slot.
    let (segment, generation, slot) = (SegmentId(0), Generation(0), SlotId(0));
    let target = Target { segment, generation, slot, flags: OpFlags::DISK, ..reserved.target() };
    let mut ops = Vec::new();
    target.to_wire(OpKind::Load, 0, LEN as u64).encode(&mut ops);
    let request = LoadRequest { ops: Packed::decode(&ops, OPS_PER_FRAME_MAX).unwrap(), lease_ms: 5_000 };
    frame(FrameKind::Load, encode(&request).unwrap())
}
