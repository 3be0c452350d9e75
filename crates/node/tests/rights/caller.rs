//! [`Request`]: one call over one protocol, and what became of it.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use moontide_auth::rustls::ClientConfig;
use moontide_master::code_of;
use moontide_proto::{
    Codes, FRAME_HEADER_BYTES, FixedRecord, FrameHeader, FrameKind, Hello, ObjectEntry, Packed,
    ProtocolVersions, Token, v1,
};
use moontide_tasks::{ALPN_GRPC, ALPN_HTTP, MaybeTls};
use moontide_types::limits::BATCH_KEYS_MAX;
use moontide_types::{ErrorCode, NodeId};
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::credentials::connect;

/// Protocols of the frame servers over TLS.
const ALPN_MASTER_FRAMES: &[u8] = b"moontide-frames";
const ALPN_NODE_FRAMES: &[u8] = b"moontide-data";

/// Longest time of one call: none of them waits.
const CALL_MAX: Duration = Duration::from_secs(10);

/// Makes a gRPC call, and returns the error code in the context of its response.
pub type GrpcCall = Box<dyn FnOnce(Channel) -> Pin<Box<dyn Future<Output = Result<u32, Status>>>>>;

/// A frame to send.
#[derive(Clone, Debug)]
pub struct Frame {
    pub kind: FrameKind,
    pub body: Vec<u8>,
    pub payload: Vec<u8>,
}

/// A call over one protocol.
pub enum Request {
    Grpc(GrpcCall),
    MasterFrame(Frame),
    NodeFrame(Frame),
    /// Method and path.
    MasterPage(&'static str),
    NodePage(&'static str),
}

impl Request {
    pub fn protocol(&self) -> String {
        match self {
            Request::Grpc(_) => "gRPC".into(),
            Request::MasterFrame(frame) => format!("frame {:?} to a master", frame.kind),
            Request::NodeFrame(frame) => format!("frame {:?} to a node", frame.kind),
            Request::MasterPage(page) => format!("{page} of a master"),
            Request::NodePage(page) => format!("{page} of a node"),
        }
    }

    /// Whether the request is for an admin page, whose server also takes clients without a certificate.
    pub fn is_page(&self) -> bool {
        matches!(self, Request::MasterPage(_) | Request::NodePage(_))
    }
}

/// Addresses of the servers.
#[derive(Clone, Copy, Debug)]
pub struct Servers {
    pub grpc: SocketAddr,
    pub frames: SocketAddr,
    pub master_pages: SocketAddr,
    pub data: SocketAddr,
    pub node_pages: SocketAddr,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The server ended the connection before it answered.
    Closed,
    /// The server has answered that the peer may not make the call.
    Denied,
    /// The server has handled the request. For frames of nodes: the code of the first record.
    Handled(Option<ErrorCode>),
    /// There was no answer in time.
    Silence,
}

/// Makes a request over a connection of its own.
pub async fn make(servers: Servers, client: Option<&ClientConfig>, request: Request) -> Outcome {
    let made = async {
        match request {
            Request::Grpc(call) => grpc(servers.grpc, client, call).await,
            Request::MasterFrame(frame) => {
                exchange(connect(servers.frames, client, ALPN_MASTER_FRAMES).await, &frame).await
            }
            Request::NodeFrame(frame) => {
                exchange(connect(servers.data, client, ALPN_NODE_FRAMES).await, &frame).await
            }
            Request::MasterPage(page) => {
                get(connect(servers.master_pages, client, ALPN_HTTP).await, page).await
            }
            Request::NodePage(page) => get(connect(servers.node_pages, client, ALPN_HTTP).await, page).await,
        }
    };
    tokio::time::timeout(CALL_MAX, made).await.unwrap_or(Outcome::Silence)
}

/// Returns the outcome of a request that was answered with this code.
fn outcome_of(code: Option<ErrorCode>) -> Outcome {
    match code {
        Some(ErrorCode::PermissionDenied | ErrorCode::Unauthenticated) => Outcome::Denied,
        code => Outcome::Handled(code),
    }
}

// --------------------------------------------------------------------------------------------------- gRPC

async fn grpc(address: SocketAddr, client: Option<&ClientConfig>, call: GrpcCall) -> Outcome {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let Ok(channel) = endpoint.connect_with_connector(Connector { address, client: client.cloned() }).await
    else {
        return Outcome::Closed;
    };
    match call(channel).await {
        Ok(code) => outcome_of(ErrorCode::try_from(code).ok()),
        Err(status) => match (code_of(&status), status.code()) {
            (Some(code), _) => outcome_of(Some(code)),
            (None, Code::PermissionDenied | Code::Unauthenticated) => Outcome::Denied,
            (None, _) => Outcome::Closed,
        },
    }
}

/// Opens the stream of a gRPC connection.
struct Connector {
    address: SocketAddr,
    client: Option<ClientConfig>,
}

impl tower_service::Service<Uri> for Connector {
    type Response = TokioIo<MaybeTls<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _uri: Uri) -> Self::Future {
        let (address, client) = (self.address, self.client.clone());
        Box::pin(async move { connect(address, client.as_ref(), ALPN_GRPC).await.map(TokioIo::new) })
    }
}

// ------------------------------------------------------------------------------------------------- frames

fn encode(frame: &Frame) -> Vec<u8> {
    let (body_len, payload_len) = (frame.body.len() as u32, frame.payload.len() as u64);
    let timeout_ms = CALL_MAX.as_millis() as u32;
    let header = FrameHeader { body_len, payload_len, timeout_ms, ..FrameHeader::new(frame.kind, 1) };
    [&header.encode()[..], &frame.body, &frame.payload].concat()
}

async fn receive(stream: &mut MaybeTls<TcpStream>) -> io::Result<(FrameHeader, Vec<u8>)> {
    let mut bytes = [0; FRAME_HEADER_BYTES];
    stream.read_exact(&mut bytes).await?;
    let header = FrameHeader::decode(&bytes).map_err(io::Error::other)?;
    let mut body = vec![0; header.body_len as usize];
    stream.read_exact(&mut body).await?;
    Ok((header, body))
}

/// Runs the handshake of the framed protocol, and sends one frame.
async fn exchange(stream: io::Result<MaybeTls<TcpStream>>, frame: &Frame) -> Outcome {
    let replied = async {
        let mut stream = stream?;
        let hello = Hello {
            node: NodeId(0),
            caller: 77,
            versions: ProtocolVersions::CURRENT,
            inflight_max: 64,
            features: 0,
            token: Token::NONE,
        };
        let mut body = Vec::new();
        hello.encode(&mut body);
        let hello = Frame { kind: FrameKind::Hello, body, payload: vec![] };
        stream.write_all(&encode(&hello)).await?;
        stream.flush().await?;
        let (header, _) = receive(&mut stream).await?;
        if header.kind != FrameKind::HelloAck {
            return Ok((header, vec![]));
        }
        stream.write_all(&encode(frame)).await?;
        stream.flush().await?;
        receive(&mut stream).await
    };
    let replied: io::Result<(FrameHeader, Vec<u8>)> = replied.await;
    let Ok((header, body)) = replied else { return Outcome::Closed };
    if let Some(code) = header.status {
        return outcome_of(Some(code));
    }
    if header.kind.is_control() {
        // Every response has its context in the same field.
        let response = v1::DrainNodeResponse::decode(&body[..]).expect("a response");
        return outcome_of(ErrorCode::try_from(response.context.expect("a context").code).ok());
    }
    Outcome::Handled(first_code(header.kind, &body))
}

/// Returns the code of the first record in a reply of a node.
fn first_code(kind: FrameKind, body: &[u8]) -> Option<ErrorCode> {
    let first = |codes: &[u8]| Codes::decode(codes, BATCH_KEYS_MAX).unwrap().iter().next().unwrap();
    match kind {
        FrameKind::BeginReply | FrameKind::CommitReply => {
            first(&v1::SlotOutcomes::decode(body).unwrap().codes)
        }
        FrameKind::DescribeReply => first(&v1::DescribeReply::decode(body).unwrap().codes),
        FrameKind::ReadReply | FrameKind::WriteReply | FrameKind::ReleaseReply => first(body),
        FrameKind::LoadReply => {
            let reply = v1::LoadReply::decode(body).unwrap();
            let objects = Packed::<ObjectEntry>::decode(&reply.objects, BATCH_KEYS_MAX).unwrap();
            objects.iter().next().unwrap().code
        }
        FrameKind::Pong => None,
        other => panic!("{other:?} is no reply to a request of this test"),
    }
}

// -------------------------------------------------------------------------------------------- admin pages

async fn get(stream: io::Result<MaybeTls<TcpStream>>, page: &str) -> Outcome {
    match page_of(stream, page).await {
        Ok((403, _)) => Outcome::Denied,
        Ok(_) => Outcome::Handled(None),
        Err(_) => Outcome::Closed,
    }
}

/// Returns status and body of a page.
async fn page_of(stream: io::Result<MaybeTls<TcpStream>>, page: &str) -> io::Result<(u16, String)> {
    let mut stream = stream?;
    let request = format!(
        "{page} HTTP/1.1\r\nHost: localhost\r\nmoontide-admin: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    stream.flush().await?;
    let mut answer = vec![];
    // The server may end the connection without the last message of TLS.
    let ended = stream.read_to_end(&mut answer).await;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
    match (status, ended) {
        (Some(status), _) => Ok((status, answer)),
        (None, Err(error)) => Err(error),
        (None, Ok(_)) => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Returns a page of a node.
pub async fn node_page(servers: Servers, client: Option<&ClientConfig>, page: &str) -> String {
    let stream = connect(servers.node_pages, client, ALPN_HTTP).await;
    let (status, answer) = page_of(stream, page).await.unwrap();
    assert_eq!(status, 200, "{answer}");
    answer
}
