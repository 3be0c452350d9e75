//! Bytes: [`Outgoing`] puts a request into a frame, [`FrameReader`] takes replies out of a stream.
//!
//! Neither knows a socket. A frame is built in one buffer, header first, so that it leaves in one write; its number
//! is filled in last, when it has a place in the table.

use moontide_proto::convert::{ConvertError, RequestContext};
use moontide_proto::limits::DEADLINE_MS_MAX;
use moontide_proto::{FRAME_HEADER_BYTES, FrameError, FrameHeader, FrameKind};
use moontide_types::GroupId;
use moontide_types::bounds::{GROUPS_MAX, REQUEST_BYTES_MAX};
use prost::Message;
use prost::bytes::Bytes;

use super::config::within;

/// A request that has no number yet.
#[derive(Debug)]
pub(super) struct Outgoing {
    header: FrameHeader,
    /// Room for the header, then the body.
    frame: Vec<u8>,
}

impl Outgoing {
    /// Encodes a message. What could not stand in a header is refused here.
    pub(super) fn new(
        kind: FrameKind,
        context: &RequestContext<'_>,
        message: &impl Message,
    ) -> Result<Outgoing, ConvertError> {
        within("context.deadline_ms", context.deadline_ms, DEADLINE_MS_MAX)?;
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
            deadline_ms: context.deadline_ms,
            group: context.group,
            term: context.term,
            map_version: context.map_version,
            ..FrameHeader::new(kind, 0)
        };
        Ok(Outgoing { header, frame })
    }

    pub(super) fn kind(&self) -> FrameKind {
        self.header.kind
    }

    /// The frame, ready to be sent.
    pub(super) fn numbered(mut self, request: u64) -> Vec<u8> {
        self.header.request = request;
        self.frame[..FRAME_HEADER_BYTES].copy_from_slice(&self.header.encode());
        self.frame
    }
}

/// Tells the master that nobody waits for `request` any more.
pub(super) fn cancel(request: u64) -> [u8; FRAME_HEADER_BYTES] {
    FrameHeader::new(FrameKind::Cancel, request).encode()
}

/// A frame that came.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) header: FrameHeader,
    pub(super) body: Bytes,
}

/// Bytes that are read ahead. Replies to single keys have some hundred bytes, so that one read takes many; what is
/// longer is read into a buffer of its own, without another copy.
const AHEAD_BYTES: usize = 16 << 10;

/// Cuts a stream into frames: read into [`space`](FrameReader::space), say how much, take frames until there are none.
///
/// Invariant: `start ≤ end ≤ AHEAD_BYTES`; while `long` is there, nothing is read ahead.
#[derive(Debug)]
pub(super) struct FrameReader {
    ahead: Box<[u8]>,
    start: usize,
    end: usize,
    long: Option<LongBody>,
}

/// A body that does not fit into the bytes that are read ahead.
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

    /// Where the next bytes go; never empty after [`next`](FrameReader::next) has said that there is no frame.
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

    /// `count` bytes were put into the space.
    pub(super) fn filled(&mut self, count: usize) {
        match &mut self.long {
            Some(long) => long.filled += count,
            None => self.end += count,
        }
    }

    /// The next frame, if all of it is there. Frames with payload are nothing that a master answers: they come
    /// out without it, and their kind ends the connection.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        if let Some(long) = self.long.take_if(|long| long.filled == long.body.len()) {
            return Ok(Some(Frame { header: long.header, body: long.body.into() }));
        }
        let Some((header, rest)) = self.ahead[self.start..self.end].split_first_chunk() else {
            return Ok(None);
        };
        let header = FrameHeader::decode(header)?;
        let body_len = header.body_len as usize; // ≤ the bound of its kind
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
    fn any_cut_of_the_stream_gives_the_same_frames() {
        let lengths = [0, 1, 100, AHEAD_BYTES - FRAME_HEADER_BYTES, AHEAD_BYTES, 3 * AHEAD_BYTES, 7, 0];
        let bodies: Vec<Vec<u8>> = lengths.iter().map(|&len| (0..len).map(|i| i as u8).collect()).collect();
        let stream: Vec<u8> = (1..).zip(&bodies).flat_map(|(request, body)| frame(request, body)).collect();
        for step in [1, 63, 64, 65, 1000, AHEAD_BYTES, usize::MAX] {
            let (mut reader, mut rest, mut found) = (FrameReader::new(), &stream[..], Vec::new());
            while !rest.is_empty() {
                let space = reader.space();
                let count = step.min(space.len()).min(rest.len());
                assert!(count > 0, "there is always space after the frames were taken");
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
    fn garbage_is_no_frame() {
        let mut reader = FrameReader::new();
        reader.space()[..FRAME_HEADER_BYTES].fill(0xee);
        reader.filled(FRAME_HEADER_BYTES);
        assert!(matches!(reader.next(), Err(FrameError::Magic { .. })));
    }
}
