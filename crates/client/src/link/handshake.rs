//! Handshake: both links [`prepare`] the socket, send [`hello_frame`] and check the reply with [`check_hello_ack`].

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use moontide_proto::{FixedRecord, FrameHeader, FrameKind, Hello, ProtocolVersions};
use moontide_types::NodeId;
use rustix::net::sockopt;

use super::config::LinkConfig;
use super::error::{LinkError, ProtocolError, Rejection};
use super::frames::Frame;

/// Name of the protocol over TLS: a server that speaks another one refuses the handshake.
pub(super) const ALPN: &[u8] = b"moontide-frames";

/// Request number of Hello; requests have larger ones.
const HELLO_REQUEST: u64 = 0;

/// Longest time for which sent bytes may stay unacknowledged or the peer's receive window closed. Without it,
/// connections to a host that lost power would last for a quarter of an hour, and every call on them would time out.
const UNACKNOWLEDGED_MS_MAX: u32 = 10_000;

/// Sets the socket options. No delay: requests are small and must not wait to fill a packet.
pub(super) fn prepare(socket: impl AsFd) -> io::Result<()> {
    sockopt::set_tcp_nodelay(&socket, true)?;
    sockopt::set_tcp_user_timeout(&socket, UNACKNOWLEDGED_MS_MAX)?;
    Ok(())
}

/// Builds the frame that opens a connection.
pub(super) fn hello_frame(config: &LinkConfig) -> Vec<u8> {
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
        timeout_ms: config.connect_timeout_ms,
        ..FrameHeader::new(FrameKind::Hello, HELLO_REQUEST)
    };
    let mut frame = header.encode().to_vec();
    hello.encode(&mut frame);
    frame
}

/// Checks the reply. Returns the allowed number of requests in flight.
pub(super) fn check_hello_ack(
    frame: &Frame,
    config: &LinkConfig,
    address: &Arc<str>,
) -> Result<u16, LinkError> {
    let header = &frame.header;
    if let Some(code) = header.status {
        return Err(Rejection::from_frame(code, &frame.body));
    }
    let violation = |source: ProtocolError| LinkError::protocol(address, source);
    if header.kind != FrameKind::HelloAck {
        return Err(violation(ProtocolError::Kind { expected: FrameKind::HelloAck, found: header.kind }));
    }
    let ack = Hello::decode_body(&frame.body).map_err(|error| violation(error.into()))?;
    let (found, ours) = (ack.versions, ProtocolVersions::CURRENT);
    if found.min != found.max || ours.negotiate(found).is_none() {
        return Err(violation(ProtocolError::Version { found, ours }));
    }
    Ok(u16::try_from(ack.inflight_max).unwrap_or(u16::MAX).min(config.inflight_max))
}
