//! Encoders of the frames that a master sends. Each frame is encoded in the output buffer: 64 bytes are reserved for
//! the header, the message is appended, then the header is written.

use moontide_proto::limits::ERROR_TEXT_BYTES_MAX;
use moontide_proto::{
    FRAME_HEADER_BYTES, FixedRecord, FrameHeader, FrameKind, Hello, ProtocolVersions, Token, v1,
};
use moontide_types::{ErrorCode, MapVersion, NodeId, Term};
use prost::Message;

/// A response of the service.
pub(super) trait Response: Message {
    /// Returns the context of the response.
    fn context(&self) -> Option<&v1::ResponseContext>;
}

macro_rules! responses {
    ($($message:ident),*) => {$(
        impl Response for v1::$message {
            fn context(&self) -> Option<&v1::ResponseContext> {
                self.context.as_ref()
            }
        }
    )*};
}
responses!(ExistResponse, GetReplicaListResponse, PutStartResponse, OutcomesResponse);

/// Appends the reply to `request`, a frame of kind `kind`.
pub(super) fn push_response<M: Response>(out: &mut Vec<u8>, request: u64, kind: FrameKind, message: &M) {
    let start = out.len();
    out.resize(start + FRAME_HEADER_BYTES, 0);
    message.encode(out).expect("writing to a Vec cannot fail");
    let body_len = out.len() - start - FRAME_HEADER_BYTES;
    if body_len > kind.body_len_max() {
        // The service limits its responses; a bug there must not create a frame that receivers reject.
        out.truncate(start);
        push_error(out, request, ErrorCode::Internal, "response exceeds the frame limit");
        return;
    }
    let mut header = FrameHeader::new(kind, request);
    header.body_len = body_len as u32; // ≤ REQUEST_BYTES_MAX
    if let Some(context) = message.context() {
        header.term = Term::new(context.term).unwrap_or(Term::ZERO);
        header.map_version = MapVersion(context.map_version);
        if context.code != 0 {
            header.status = Some(ErrorCode::try_from(context.code).unwrap_or(ErrorCode::Internal));
        }
    }
    out[start..start + FRAME_HEADER_BYTES].copy_from_slice(&header.encode());
}

/// Appends an error frame. Truncates text that is too long.
pub(super) fn push_error(out: &mut Vec<u8>, request: u64, code: ErrorCode, text: &str) {
    let text = &text[..text.floor_char_boundary(ERROR_TEXT_BYTES_MAX)];
    let mut header = FrameHeader::new(FrameKind::Error, request);
    header.status = Some(code);
    header.body_len = text.len() as u32; // ≤ ERROR_TEXT_BYTES_MAX
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(text.as_bytes());
}

/// Appends a Pong.
pub(super) fn push_pong(out: &mut Vec<u8>, request: u64) {
    out.extend_from_slice(&FrameHeader::new(FrameKind::Pong, request).encode());
}

/// Appends a HelloAck.
pub(super) fn push_hello_ack(out: &mut Vec<u8>, request: u64, caller: u64, version: u16, inflight_max: u32) {
    let mut header = FrameHeader::new(FrameKind::HelloAck, request);
    header.body_len = Hello::BYTES as u32; // 96
    out.extend_from_slice(&header.encode());
    let hello = Hello {
        node: NodeId(0),
        caller,
        versions: ProtocolVersions { min: version, max: version },
        inflight_max,
        features: 0,
        token: Token::NONE,
    };
    hello.encode(out);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(frame: &[u8]) -> FrameHeader {
        FrameHeader::decode(frame.first_chunk().unwrap()).unwrap()
    }

    #[test]
    fn response_header_carries_context() {
        let context = v1::ResponseContext { code: 300, term: 7, map_version: 9, ..Default::default() };
        let message = v1::OutcomesResponse { context: Some(context), codes: Default::default() };
        let mut out = vec![1, 2, 3];
        push_response(&mut out, 42, FrameKind::PutEndReply, &message);
        let header = header(&out[3..]);
        assert_eq!((header.kind, header.request, header.term.get()), (FrameKind::PutEndReply, 42, 7));
        assert_eq!((header.status, header.map_version.0), (Some(ErrorCode::WrongMaster), 9));
        let body = &out[3 + FRAME_HEADER_BYTES..];
        assert_eq!(header.body_len as usize, body.len());
        assert_eq!(v1::OutcomesResponse::decode(body).unwrap(), message);
    }

    #[test]
    fn oversized_response_becomes_internal_error() {
        let codes = vec![0; moontide_types::limits::REQUEST_BYTES_MAX + 1].into();
        let mut out = Vec::new();
        push_response(&mut out, 1, FrameKind::RemoveReply, &v1::OutcomesResponse { context: None, codes });
        assert_eq!(header(&out).status, Some(ErrorCode::Internal));
        assert!(out.len() < 200);
    }

    #[test]
    fn error_text_is_truncated_at_character_boundary() {
        let mut out = Vec::new();
        push_error(&mut out, 1, ErrorCode::Busy, &"é".repeat(ERROR_TEXT_BYTES_MAX));
        let body = &out[FRAME_HEADER_BYTES..];
        assert_eq!(body.len(), header(&out).body_len as usize);
        assert!(std::str::from_utf8(body).is_ok() && body.len() <= ERROR_TEXT_BYTES_MAX);
    }
}
