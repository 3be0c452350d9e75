//! Frame encoding: [`RequestFrame`] encodes a request, [`FrameReader`] splits a stream into replies.
//!
//! Neither uses a socket. A frame is built in one buffer, header first, so that it is sent in one write. Its request
//! number is filled in last, when it has an index in the table.

use moontide_proto::convert::{ConvertError, RequestContext};
use moontide_proto::limits::TIMEOUT_MS_MAX;
use moontide_proto::{FRAME_HEADER_BYTES, FrameError, FrameHeader, FrameKind};
use moontide_types::GroupId;
use moontide_types::limits::{GROUPS_MAX, REQUEST_BYTES_MAX};
use prost::Message;
use prost::bytes::Bytes;

use super::config::within;

/// Encoded request without a request number.
#[derive(Debug)]
pub(super) struct RequestFrame {
    header: FrameHeader,
    /// Space for the header, then the body.
    frame: Vec<u8>,
}

impl RequestFrame {
    /// Encodes a message. Fails if a value does not fit into the header.
    pub(super) fn new(
        kind: FrameKind,
        context: &RequestContext<'_>,
        message: &impl Message,
    ) -> Result<RequestFrame, ConvertError> {
        within("context.timeout_ms", context.timeout_ms, TIMEOUT_MS_MAX)?;
        if let Some(GroupId(found)) = context.group
            && found >= GROUPS_MAX
        {
            let max = u64::from(GROUPS_MAX - 1);
            return Err(ConvertError::TooLarge { field: "context.group", found: found.into(), max });
        }
        let body_len = message.encoded_len();
        if body_len > REQUEST_BYTES_MAX {
            let max = REQUEST_BYTES_MAX as u64;
            return Err(ConvertError::TooLarge { field: "message", found: body_len as u64, max });
        }
        let mut frame = Vec::with_capacity(FRAME_HEADER_BYTES + body_len);
        frame.resize(FRAME_HEADER_BYTES, 0);
        message.encode(&mut frame).expect("a vector grows as needed");
        let header = FrameHeader {
            body_len: body_len as u32, // ≤ REQUEST_BYTES_MAX
            timeout_ms: context.timeout_ms,
            group: context.group,
            term: context.term,
            map_version: context.map_version,
            ..FrameHeader::new(kind, 0)
        };
        Ok(RequestFrame { header, frame })
    }

    pub(super) fn kind(&self) -> FrameKind {
        self.header.kind
    }

    /// Sets the request number and returns the frame.
    pub(super) fn numbered(mut self, request: u64) -> Vec<u8> {
        self.header.request = request;
        self.frame[..FRAME_HEADER_BYTES].copy_from_slice(&self.header.encode());
        self.frame
    }
}

/// Returns a frame that cancels `request` at the master.
pub(super) fn cancel(request: u64) -> [u8; FRAME_HEADER_BYTES] {
    FrameHeader::new(FrameKind::Cancel, request).encode()
}

/// Received frame.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) header: FrameHeader,
    pub(super) body: Bytes,
}

/// Size of the read-ahead buffer. Replies to single keys have a few hundred bytes, so one read returns many of them.
/// Longer bodies are read directly into their own buffer, without another copy.
const AHEAD_BYTES: usize = 16 << 10;

/// Splits a stream into frames: read into [`space`](FrameReader::space), call [`filled`](FrameReader::filled), then
/// [`next`](FrameReader::next) until it returns `None`.
///
/// Invariant: `start ≤ end ≤ AHEAD_BYTES`; while `long` is set, the read-ahead buffer is empty.
#[derive(Debug)]
pub(super) struct FrameReader {
    ahead: Box<[u8]>,
    start: usize,
    end: usize,
    long: Option<LongBody>,
}

/// Body that does not fit into the read-ahead buffer.
#[derive(Debug)]
struct LongBody {
    header: FrameHeader,
    body: Vec<u8>,
    filled: usize,
}

impl FrameReader {
    pub(super) fn new() -> FrameReader {
        FrameReader { ahead: vec![0; AHEAD_BYTES].into(), start: 0, end: 0, long: None }
    }

    /// Returns the buffer for the next bytes; never empty after [`next`](FrameReader::next) has returned `None`.
    pub(super) fn space(&mut self) -> &mut [u8] {
        if let Some(long) = &mut self.long {
            return &mut long.body[long.filled..];
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 {
            self.ahead.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.ahead[self.end..]
    }

    /// Records that `count` bytes were read into the space.
    pub(super) fn filled(&mut self, count: usize) {
        match &mut self.long {
            Some(long) => long.filled += count,
            None => self.end += count,
        }
    }

    /// Returns the next complete frame. A master never sends frames with payload: they are returned without it, and
    /// their kind ends the connection.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        if let Some(long) = self.long.take_if(|long| long.filled == long.body.len()) {
            return Ok(Some(Frame { header: long.header, body: long.body.into() }));
        }
        let Some((header, rest)) = self.ahead[self.start..self.end].split_first_chunk() else {
            return Ok(None);
        };
        let header = FrameHeader::decode(header)?;
        let body_len = header.body_len as usize; // ≤ the limit of its kind
        if let Some(body) = rest.get(..body_len) {
            let body = Bytes::copy_from_slice(body);
            self.start += FRAME_HEADER_BYTES + body_len;
            return Ok(Some(Frame { header, body }));
        }
        if FRAME_HEADER_BYTES + body_len > AHEAD_BYTES {
            let (mut body, filled) = (vec![0; body_len], rest.len());
            body[..filled].copy_from_slice(rest);
            (self.start, self.end) = (0, 0);
            self.long = Some(LongBody { header, body, filled });
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(request: u64, body: &[u8]) -> Vec<u8> {
        let mut header = FrameHeader::new(FrameKind::ExistReply, request);
        header.body_len = body.len() as u32;
        [&header.encode()[..], body].concat()
    }

    #[test]
    fn frame_reader_yields_same_frames_for_any_read_size() {
        let lengths = [0, 1, 100, AHEAD_BYTES - FRAME_HEADER_BYTES, AHEAD_BYTES, 3 * AHEAD_BYTES, 7, 0];
        let bodies: Vec<Vec<u8>> = lengths.iter().map(|&len| (0..len).map(|i| i as u8).collect()).collect();
        let stream: Vec<u8> = (1..).zip(&bodies).flat_map(|(request, body)| frame(request, body)).collect();
        for step in [1, 63, 64, 65, 1000, AHEAD_BYTES, usize::MAX] {
            let (mut reader, mut rest, mut found) = (FrameReader::new(), &stream[..], Vec::new());
            while !rest.is_empty() {
                let space = reader.space();
                let count = step.min(space.len()).min(rest.len());
                assert!(count > 0, "no space although all frames were taken");
                space[..count].copy_from_slice(&rest[..count]);
                rest = &rest[count..];
                reader.filled(count);
                while let Some(frame) = reader.next().expect("valid") {
                    found.push((frame.header.request, frame.body.to_vec()));
                }
            }
            assert!(found.iter().map(|(_, body)| body).eq(&bodies), "step {step}");
            assert!(found.iter().map(|&(request, _)| request).eq(1..=bodies.len() as u64));
        }
    }

    #[test]
    fn frame_with_bad_magic_is_rejected() {
        let mut reader = FrameReader::new();
        reader.space()[..FRAME_HEADER_BYTES].fill(0xee);
        reader.filled(FRAME_HEADER_BYTES);
        assert!(matches!(reader.next(), Err(FrameError::Magic { .. })));
    }
}
