//! Shared helpers for tests of a running master: start, a client of the frame server, a fake node.

// Each test binary uses a part of this file.
#![allow(dead_code, unreachable_pub)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use moontide_master::{MasterConfig, Server};
use moontide_proto::v1::master_client::MasterClient;
use moontide_proto::v1::master_nodes_client::MasterNodesClient;
use moontide_proto::{
    CommandKind, CommandResult, CommandStatus, FRAME_HEADER_BYTES, FixedRecord, FrameHeader, FrameKind,
    Hello, NodeCommand, ObjectEntry, Packed, PackedBuilder, PackedKeysBuilder, ProtocolVersions, PutEndEntry,
    PutEndFlags, PutEntry, Token, v1,
};
use moontide_types::limits::{BATCH_KEYS_MAX, REPLICAS_MAX};
use moontide_types::record::{State, Word};
use moontide_types::{Key, NodeId, ObjectId};
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};

/// Returns a configuration with free ports, 4 groups and no reallocation delay.
pub fn config() -> MasterConfig {
    let free = "127.0.0.1:0".parse().unwrap();
    MasterConfig {
        grpc_listen: free,
        frame_listen: free,
        admin_listen: free,
        groups: Some(4),
        reallocation_delay_ms: 0,
        ..MasterConfig::default()
    }
}

pub fn start() -> Server {
    Server::start(config()).unwrap()
}

pub fn context() -> Option<v1::RequestContext> {
    Some(v1::RequestContext { timeout_ms: 5_000, caller: 77, ..Default::default() })
}

pub fn keys<K: AsRef<[u8]>>(keys: impl IntoIterator<Item = K>) -> bytes::Bytes {
    let mut packed = PackedKeysBuilder::new();
    for key in keys {
        packed.push(Key::new(key.as_ref()).unwrap()).unwrap();
    }
    packed.finish().into()
}

pub fn exist(names: &[&str]) -> v1::ExistRequest {
    v1::ExistRequest { context: context(), keys: keys(names) }
}

pub fn put_start(names: &[&str], len: u64) -> v1::PutStartRequest {
    let config = v1::PutConfig { replicas: 1, replicas_min: 1, ..Default::default() };
    let objects: PackedBuilder<PutEntry> = names.iter().map(|_| PutEntry { len, config: 0 }).collect();
    v1::PutStartRequest {
        context: context(),
        keys: keys(names),
        configs: vec![config],
        objects: objects.finish().into(),
        attributes: Default::default(),
    }
}

/// Creates a PutEnd that completes every granted put of a PutStart successfully.
pub fn put_end(ids: &[ObjectId], started: &v1::PutStartResponse) -> v1::PutEndRequest {
    let objects = Packed::<ObjectEntry>::decode(&started.objects, BATCH_KEYS_MAX).unwrap();
    let granted = ids.iter().zip(objects.iter()).filter(|(_, object)| object.code.is_none());
    let entries: PackedBuilder<PutEndEntry> = granted
        .map(|(&id, object)| PutEndEntry {
            id,
            epoch: object.epoch,
            root: 0x5eed,
            outcomes: [None; REPLICAS_MAX],
            replica_count: object.replica_count,
            flags: PutEndFlags::NONE,
            stripe_count: 1,
        })
        .collect();
    v1::PutEndRequest { context: context(), entries: entries.finish().into(), stripe_roots: vec![] }
}

/// Returns the codes of a response of PutStart or GetReplicaList.
pub fn object_codes(objects: &[u8]) -> Vec<u16> {
    let objects = Packed::<ObjectEntry>::decode(objects, BATCH_KEYS_MAX).unwrap();
    objects.iter().map(|object| object.code.map_or(0, |code| code as u16)).collect()
}

/// Computes the ids of keys, as a client of the default tenant does.
pub fn ids(info: &v1::GetClusterInfoResponse, names: &[&str]) -> Vec<ObjectId> {
    use moontide_types::{TenantGeneration, TenantIdKey};
    let key = TenantIdKey::new(info.id_key, info.tenant_id_key[..].try_into().unwrap());
    let id = |name: &&str| key.object_id(TenantGeneration(0), Key::new(name.as_bytes()).unwrap());
    names.iter().map(id).collect()
}

pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

pub async fn channel(address: SocketAddr) -> Channel {
    Endpoint::from_shared(format!("http://{address}")).unwrap().tcp_nodelay(true).connect().await.unwrap()
}

pub async fn grpc(address: SocketAddr) -> MasterClient<Channel> {
    let max = moontide_types::limits::REQUEST_BYTES_MAX;
    MasterClient::new(channel(address).await)
        .max_decoding_message_size(max)
        .max_encoding_message_size(2 * max)
}

// ---------------------------------------------------------------------------------------------- frame client

/// A received frame.
#[derive(Debug)]
pub struct Reply {
    pub header: FrameHeader,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn message<M: Message + Default>(&self) -> M {
        M::decode(&self.body[..]).unwrap()
    }
}

/// A client of the frame server.
pub struct FrameCaller {
    pub socket: TcpStream,
    request: u64,
}

impl FrameCaller {
    /// Connects and sends a Hello.
    pub fn connect(address: SocketAddr) -> FrameCaller {
        let mut caller = FrameCaller::connect_without_hello(address);
        let reply = caller.hello(ProtocolVersions::CURRENT).unwrap();
        assert_eq!(reply.header.kind, FrameKind::HelloAck);
        caller
    }

    pub fn connect_without_hello(address: SocketAddr) -> FrameCaller {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_nodelay(true).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        FrameCaller { socket, request: 0 }
    }

    pub fn hello(&mut self, versions: ProtocolVersions) -> std::io::Result<Reply> {
        self.socket.write_all(&hello(versions, 64))?;
        self.read()
    }

    /// Returns the bytes of a request.
    pub fn frame(&mut self, kind: FrameKind, message: &impl Message) -> Vec<u8> {
        self.request += 1;
        frame(kind, self.request, 5_000, &message.encode_to_vec())
    }

    pub fn call(&mut self, kind: FrameKind, message: &impl Message) -> Reply {
        let frame = self.frame(kind, message);
        self.socket.write_all(&frame).unwrap();
        let reply = self.read().unwrap();
        assert_eq!(reply.header.request, self.request);
        reply
    }

    /// Reads the next frame. Fails when the master closes the connection.
    pub fn read(&mut self) -> std::io::Result<Reply> {
        let mut bytes = [0; FRAME_HEADER_BYTES];
        self.socket.read_exact(&mut bytes)?;
        let header = FrameHeader::decode(&bytes).expect("a master sends valid headers");
        let mut body = vec![0; header.body_len as usize];
        self.socket.read_exact(&mut body)?;
        Ok(Reply { header, body })
    }

    /// Waits until the master closes the connection. Returns false on a timeout.
    pub fn is_closed(&mut self) -> bool {
        loop {
            match self.read() {
                Ok(_) => {}
                Err(error) => return error.kind() != std::io::ErrorKind::WouldBlock,
            }
        }
    }
}

pub fn frame(kind: FrameKind, request: u64, timeout_ms: u32, body: &[u8]) -> Vec<u8> {
    let mut header = FrameHeader::new(kind, request);
    header.timeout_ms = timeout_ms;
    header.body_len = body.len() as u32;
    let mut frame = header.encode().to_vec();
    frame.extend_from_slice(body);
    frame
}

pub fn hello(versions: ProtocolVersions, inflight_max: u32) -> Vec<u8> {
    let mut body = Vec::new();
    let hello =
        Hello { node: NodeId(0), caller: 77, versions, inflight_max, features: 0, token: Token::NONE };
    hello.encode(&mut body);
    frame(FrameKind::Hello, 1, 5_000, &body)
}

// -------------------------------------------------------------------------------------------------- fake node

/// A node with segments that sends heartbeats and executes every command immediately.
pub struct FakeNode {
    task: tokio::task::JoinHandle<Result<(), tonic::Status>>,
}

/// A tenth of the default session TTL.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// Parameters of a fake node.
#[derive(Clone, Copy)]
pub struct FakeNodeConfig {
    pub segments: u32,
    pub units: u32,
    pub slots: u32,
    /// Whether the node executes commands.
    pub executes_commands: bool,
}

impl Default for FakeNodeConfig {
    fn default() -> FakeNodeConfig {
        FakeNodeConfig { segments: 8, units: 1 << 20, slots: 1 << 16, executes_commands: true }
    }
}

impl FakeNode {
    pub async fn start(address: SocketAddr, node: u64, config: FakeNodeConfig) -> FakeNode {
        let mut client = MasterNodesClient::new(channel(address).await);
        let request = v1::OpenSessionRequest {
            context: context(),
            node,
            boot_id: 1,
            addresses: vec![],
            topology: Some(v1::Topology::default()),
            protocol_min: 2,
            protocol_max: 2,
            highest_term: 0,
        };
        let opened = client.open_session(request).await.unwrap().into_inner();
        assert_eq!(opened.context.unwrap().code, 0);
        let session = opened.session;
        let mut mount_context = context();
        mount_context.as_mut().unwrap().session = session;
        let spec = |segment| v1::SegmentSpec {
            segment,
            generation: 1,
            medium: v1::Medium::Memory as i32,
            units: config.units,
            slots: config.slots,
            ..Default::default()
        };
        let request = v1::MountSegmentsRequest {
            context: mount_context,
            segments: (0..config.segments).map(spec).collect(),
            synced: vec![],
            capability_rotation: opened.capability_key.as_ref().unwrap().rotation,
        };
        let mounted = client.mount_segments(request).await.unwrap().into_inner();
        assert_eq!(mounted.context.unwrap().code, 0);
        assert!(mounted.results.iter().all(|result| result.code == 0), "{:?}", mounted.results);

        let (to_master, messages) = mpsc::channel(64);
        to_master.send(heartbeat(session, 1, 1)).await.unwrap();
        let stream = client.session(ReceiverStream::new(messages)).await.unwrap().into_inner();
        let task = tokio::spawn(run_node(session, stream, to_master, config.executes_commands));
        FakeNode { task }
    }

    /// Waits for the end of the stream. Returns its status.
    pub async fn end(self) -> Result<(), tonic::Status> {
        self.task.await.unwrap()
    }

    /// Returns whether the stream is still open.
    pub fn is_alive(&self) -> bool {
        !self.task.is_finished()
    }
}

async fn run_node(
    session: u64,
    mut stream: tonic::Streaming<v1::MasterMessage>,
    to_master: mpsc::Sender<v1::NodeMessage>,
    executes_commands: bool,
) -> Result<(), tonic::Status> {
    // The first heartbeat was sent before the stream was open. Without heartbeats the session would end, and the master
    // would drop the objects of the node.
    let (mut sequence, mut heartbeats) = (1, 1);
    let mut clock = tokio::time::interval(HEARTBEAT_INTERVAL);
    loop {
        let message = tokio::select! {
            message = stream.message() => message?,
            _ = clock.tick() => {
                (sequence, heartbeats) = (sequence + 1, heartbeats + 1);
                if to_master.send(heartbeat(session, sequence, heartbeats)).await.is_err() {
                    return read_to_end(stream).await;
                }
                continue;
            }
        };
        let Some(message) = message else { return Ok(()) };
        let Some(v1::master_message::Body::Commands(commands)) = message.body else { continue };
        let commands = Packed::<NodeCommand>::decode(&commands.commands, BATCH_KEYS_MAX).unwrap();
        if commands.is_empty() || !executes_commands {
            continue;
        }
        let results: PackedBuilder<CommandResult> = commands.iter().map(|command| done(&command)).collect();
        sequence += 1;
        let results = v1::CommandResults { results: results.finish().into() };
        let body = Some(v1::node_message::Body::CommandResults(results));
        if to_master.send(v1::NodeMessage { session, sequence, highest_term: 0, body }).await.is_err() {
            return read_to_end(stream).await;
        }
    }
}

/// Reads the last messages and the status after the master has closed the stream.
async fn read_to_end(mut stream: tonic::Streaming<v1::MasterMessage>) -> Result<(), tonic::Status> {
    while stream.message().await?.is_some() {}
    Ok(())
}

/// Creates a heartbeat with read counters.
fn heartbeat(session: u64, sequence: u64, heartbeat_id: u64) -> v1::NodeMessage {
    let heartbeat = v1::Heartbeat {
        heartbeat_id,
        reads: Some(v1::ReadCounters { local_memory: 5, local_disk: 2, ..Default::default() }),
        pressure: Some(v1::Pressure::default()),
        ..Default::default()
    };
    let body = Some(v1::node_message::Body::Heartbeat(heartbeat));
    v1::NodeMessage { session, sequence, highest_term: 0, body }
}

fn done(command: &NodeCommand) -> CommandResult {
    let (status, state) = match command.kind {
        CommandKind::Kill => (CommandStatus::Accepted, State::Dead),
        _ => (CommandStatus::Done, State::Free),
    };
    CommandResult {
        command_id: command.command_id,
        word: Word::new(command.epoch, state),
        code: None,
        status,
    }
}

// ------------------------------------------------------------------------------------------------------- HTTP

/// Sends a request to the admin endpoints. Returns status, headers and body of the response.
pub fn http(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> (u16, String, String) {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let admin = if method == "POST" { "moontide-admin: 1\r\n" } else { "" };
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\n{admin}Connection: close\r\n{headers}Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    socket.write_all(request.as_bytes()).unwrap();
    let mut response = Vec::new();
    socket.read_to_end(&mut response).unwrap();
    let response = String::from_utf8(response).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_ascii_lowercase(), body.to_owned())
}

pub fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let (status, _, body) = http(address, "GET", path, "", "");
    (status, body)
}

// ---------------------------------------------------------------------------------------------------- process

/// Returns the resident memory of this process in bytes.
pub fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Returns the number of open sockets of this process.
pub fn sockets() -> usize {
    let links =
        std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| entry.ok()?.path().read_link().ok());
    links.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

/// Waits until `holds` returns true. `what` describes the condition.
pub fn eventually(what: &str, holds: impl Fn() -> bool) {
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(std::time::Instant::now() < end, "timeout waiting for: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
