//! The greeting that opens a connection, from both sides.

use std::time::Instant;

use moontide_proto::{
    FRAME_HEADER_BYTES, FixedRecord, FrameHeader, FrameKind, Hello, ProtocolVersions, Token,
};
use moontide_types::{ErrorCode, NodeId};

use crate::error::Failure;
use crate::tcp::socket::{Halt, Patience, Socket};

/// Greets, and hears what the peer says.
pub(crate) fn greet(
    socket: &Socket,
    me: &Hello,
    expected: NodeId,
    deadline: Instant,
) -> Result<Hello, Failure> {
    let patience = Patience::until(deadline);
    let peer = socket.name();
    say(socket, FrameKind::Hello, me, patience).map_err(|halt| late(socket, halt))?;
    let (header, body) = hear(socket, patience).map_err(|halt| late(socket, halt))?;
    let unexpected = Failure::Answer { peer, kind: header.kind, request: header.request };
    match (header.kind, header.status) {
        (FrameKind::HelloAck, None) => {}
        (FrameKind::HelloAck | FrameKind::Error, Some(code)) => return Err(Failure::Refused { peer, code }),
        _ => return Err(unexpected),
    }
    let hello = Hello::decode_body(&body).map_err(|source| Failure::Greeting { peer, source })?;
    if hello.versions.common(ProtocolVersions::CURRENT).is_none() {
        return Err(Failure::Refused { peer, code: ErrorCode::Unsupported });
    }
    if hello.node != expected {
        return Err(Failure::Node { peer, found: hello.node, expected });
    }
    Ok(hello)
}

/// Hears a greeting, and answers it with what `judge` says: who this is, or why not.
pub(crate) fn welcome(
    socket: &Socket,
    deadline: Instant,
    judge: impl FnOnce(&Hello) -> Result<Hello, ErrorCode>,
) -> Result<Hello, Failure> {
    let patience = Patience::until(deadline);
    let peer = socket.name();
    let (header, body) = hear(socket, patience).map_err(|halt| late(socket, halt))?;
    if header.kind != FrameKind::Hello {
        return Err(Failure::Answer { peer, kind: header.kind, request: header.request });
    }
    let hello = Hello::decode_body(&body).map_err(|source| Failure::Greeting { peer, source })?;
    let judged = match hello.versions.common(ProtocolVersions::CURRENT) {
        Some(version) => {
            judge(&hello).map(|me| Hello { versions: ProtocolVersions { min: version, max: version }, ..me })
        }
        None => Err(ErrorCode::Unsupported),
    };
    match judged {
        Ok(me) => {
            say(socket, FrameKind::HelloAck, &me, patience).map_err(|halt| late(socket, halt))?;
            Ok(hello)
        }
        Err(code) => {
            let refusal =
                FrameHeader { status: Some(code), ..FrameHeader::new(FrameKind::Error, header.request) };
            // Best effort: it may have gone.
            let _ = socket.send(&refusal.encode(), patience);
            Err(Failure::Refused { peer, code })
        }
    }
}

/// A greeting of this process.
pub(crate) fn hello(node: NodeId, caller: u64, inflight_max: u32, token: Token) -> Hello {
    Hello { node, caller, versions: ProtocolVersions::CURRENT, inflight_max, features: 0, token }
}

fn say(socket: &Socket, kind: FrameKind, hello: &Hello, patience: Patience) -> Result<(), Halt> {
    let header = FrameHeader { body_len: Hello::BYTES as u32, ..FrameHeader::new(kind, 0) };
    let mut bytes = header.encode().to_vec();
    hello.encode(&mut bytes);
    socket.send(&bytes, patience)
}

fn hear(socket: &Socket, patience: Patience) -> Result<(FrameHeader, Vec<u8>), Halt> {
    let mut bytes = [0; FRAME_HEADER_BYTES];
    socket.receive(&mut bytes, patience)?;
    let peer = socket.name();
    let header = FrameHeader::decode(&bytes).map_err(|source| Failure::Frame { peer, source })?;
    if !matches!(header.kind, FrameKind::Hello | FrameKind::HelloAck | FrameKind::Error) {
        return Err(Failure::Answer { peer, kind: header.kind, request: header.request }.into());
    }
    let mut body = vec![0; header.body_len as usize]; // ≤ 4 KiB in these kinds
    socket.receive(&mut body, patience)?;
    Ok((header, body))
}

fn late(socket: &Socket, halt: Halt) -> Failure {
    match halt {
        Halt::Deadline => {
            let source = rustix::io::Errno::TIMEDOUT;
            Failure::System { what: "wait for the greeting of", peer: socket.name(), source }
        }
        Halt::Failed(failure) => failure,
    }
}
