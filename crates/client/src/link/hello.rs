//! How a connection begins: both links [`prepare`] the socket, send [`offer`] and judge what comes by [`accepted`].

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use moontide_proto::{FixedRecord, FrameHeader, FrameKind, Hello, ProtocolVersions};
use moontide_types::NodeId;
use rustix::net::sockopt;

use super::config::LinkConfig;
use super::error::{LinkError, ProtocolError, Rejection};
use super::frames::Frame;

/// The number of Hello; requests have larger ones.
const HELLO_REQUEST: u64 = 0;

/// How long the peer's host may leave bytes unacknowledged, or its process unread. Without this a host that lost power
/// would keep its connections for a quarter of an hour, and every call on them would run into its deadline.
const UNANSWERED_MS_MAX: u32 = 10_000;

/// Sets what a socket needs: requests are small and wait for nothing to fill a packet.
pub(super) fn prepare(socket: impl AsFd) -> io::Result<()> {
    sockopt::set_tcp_nodelay(&socket, true)?;
    sockopt::set_tcp_user_timeout(&socket, UNANSWERED_MS_MAX)?;
    Ok(())
}

/// The frame that opens a connection.
pub(super) fn offer(config: &LinkConfig) -> Vec<u8> {
    let hello = Hello {
        node: NodeId(0), // a client
        caller: config.caller.0,
        versions: ProtocolVersions::CURRENT,
        inflight_max: config.inflight_max.into(),
        features: 0,
        token: config.token,
    };
    let header = FrameHeader {
        body_len: Hello::BYTES as u32, // 96
        deadline_ms: config.connect_ms,
        ..FrameHeader::new(FrameKind::Hello, HELLO_REQUEST)
    };
    let mut frame = header.encode().to_vec();
    hello.encode(&mut frame);
    frame
}

/// Judges the answer; says how many requests may be in flight.
pub(super) fn accepted(frame: &Frame, config: &LinkConfig, address: &Arc<str>) -> Result<u16, LinkError> {
    let header = &frame.header;
    if let Some(code) = header.status {
        return Err(Rejection::from_frame(code, &frame.body));
    }
    let broke = |source: ProtocolError| LinkError::protocol(address, source);
    if header.kind != FrameKind::HelloAck {
        return Err(broke(ProtocolError::Kind { expected: FrameKind::HelloAck, found: header.kind }));
    }
    let ack = Hello::decode_body(&frame.body).map_err(|error| broke(error.into()))?;
    let (found, ours) = (ack.versions, ProtocolVersions::CURRENT);
    if found.min != found.max || ours.common(found).is_none() {
        return Err(broke(ProtocolError::Version { found, ours }));
    }
    Ok(u16::try_from(ack.inflight_max).unwrap_or(u16::MAX).min(config.inflight_max))
}
