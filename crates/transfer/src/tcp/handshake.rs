//! Handshake that opens a connection, client and server side.

use moontide_proto::{FRAME_HEADER_BYTES, FrameHeader, FrameKind, Hello, ProtocolVersions, Token};
use moontide_rt::time::Instant;
use moontide_types::{ErrorCode, NodeId};

use crate::error::ConnectionError;
use crate::tcp::socket::{IoError, IoTimeout, Socket};

/// Sends a Hello, with the node on the host of this process, and checks the reply of the peer.
pub(crate) fn client_handshake(
    socket: &Socket,
    (local, near): (&Hello, NodeId),
    expected: NodeId,
    deadline: Instant,
) -> Result<Hello, ConnectionError> {
    let timeout = IoTimeout::until(deadline);
    let peer = socket.name();
    send_hello(socket, FrameKind::Hello, (local, near), timeout)
        .map_err(|error| handshake_error(socket, error))?;
    let (header, body) = recv_hello(socket, timeout).map_err(|error| handshake_error(socket, error))?;
    let unexpected = ConnectionError::UnexpectedReply { peer, kind: header.kind, request: header.request };
    match (header.kind, header.status) {
        (FrameKind::HelloAck, None) => {}
        (FrameKind::HelloAck | FrameKind::Error, Some(code)) => {
            return Err(ConnectionError::HandshakeRefused { peer, code });
        }
        _ => return Err(unexpected),
    }
    let hello = Hello::decode_body(&body).map_err(|source| ConnectionError::Handshake { peer, source })?;
    if hello.versions.negotiate(ProtocolVersions::CURRENT).is_none() {
        return Err(ConnectionError::HandshakeRefused { peer, code: ErrorCode::Unsupported });
    }
    if hello.node != expected {
        return Err(ConnectionError::WrongNode { peer, found: hello.node, expected });
    }
    Ok(hello)
}

/// Receives a Hello and replies with the result of `authorize`: the Hello of this node, or a code. Returns the Hello, and the
/// node on the host of the peer.
pub(crate) fn server_handshake(
    socket: &Socket,
    deadline: Instant,
    authorize: impl FnOnce(&Hello) -> Result<Hello, ErrorCode>,
) -> Result<(Hello, NodeId), ConnectionError> {
    let timeout = IoTimeout::until(deadline);
    let peer = socket.name();
    let (header, body) = recv_hello(socket, timeout).map_err(|error| handshake_error(socket, error))?;
    if header.kind != FrameKind::Hello {
        return Err(ConnectionError::UnexpectedReply { peer, kind: header.kind, request: header.request });
    }
    let hello = Hello::decode_body(&body).map_err(|source| ConnectionError::Handshake { peer, source })?;
    let authorized = match hello.versions.negotiate(ProtocolVersions::CURRENT) {
        Some(version) => authorize(&hello)
            .map(|local| Hello { versions: ProtocolVersions { min: version, max: version }, ..local }),
        None => Err(ErrorCode::Unsupported),
    };
    match authorized {
        Ok(local) => {
            send_hello(socket, FrameKind::HelloAck, (&local, NodeId(0)), timeout)
                .map_err(|error| handshake_error(socket, error))?;
            Ok((hello, Hello::near_node(&body)))
        }
        Err(code) => {
            let refusal =
                FrameHeader { status: Some(code), ..FrameHeader::new(FrameKind::Error, header.request) };
            // Best effort: the peer may have closed the connection.
            let _ = socket.send(&refusal.encode(), timeout);
            Err(ConnectionError::HandshakeRefused { peer, code })
        }
    }
}

/// Creates a Hello of this process.
pub(crate) fn hello(node: NodeId, caller: u64, inflight_max: u32, token: Token) -> Hello {
    Hello { node, caller, versions: ProtocolVersions::CURRENT, inflight_max, features: 0, token }
}

fn send_hello(
    socket: &Socket,
    kind: FrameKind,
    (hello, near): (&Hello, NodeId),
    timeout: IoTimeout,
) -> Result<(), IoError> {
    let mut body = Vec::new();
    hello.encode_body(near, &mut body);
    let header = FrameHeader { body_len: body.len() as u32, ..FrameHeader::new(kind, 0) };
    let mut bytes = header.encode().to_vec();
    bytes.extend_from_slice(&body);
    socket.send(&bytes, timeout)
}

fn recv_hello(socket: &Socket, timeout: IoTimeout) -> Result<(FrameHeader, Vec<u8>), IoError> {
    let mut bytes = [0; FRAME_HEADER_BYTES];
    socket.receive(&mut bytes, timeout)?;
    let peer = socket.name();
    let header = FrameHeader::decode(&bytes).map_err(|source| ConnectionError::Frame { peer, source })?;
    if !matches!(header.kind, FrameKind::Hello | FrameKind::HelloAck | FrameKind::Error) {
        return Err(
            ConnectionError::UnexpectedReply { peer, kind: header.kind, request: header.request }.into()
        );
    }
    let mut body = vec![0; header.body_len as usize]; // ≤ 4 KiB in these kinds
    socket.receive(&mut body, timeout)?;
    Ok((header, body))
}

fn handshake_error(socket: &Socket, error: IoError) -> ConnectionError {
    match error {
        IoError::Deadline => {
            let source = rustix::io::Errno::TIMEDOUT;
            ConnectionError::System { what: "receive the handshake of", peer: socket.name(), source }
        }
        IoError::Failed(failure) => failure,
    }
}
