//! Baseline of streams: a request of 16 bytes, then the payload. It uses blocking sockets, one thread per connection,
//! on the same memory as the engine.
//!
//! It checks only bounds, and no epochs or capabilities. Engine and baseline alternate, so no other thread uses a
//! record at the same time.

use std::hint::black_box;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use moontide_transfer::sample::SampleNode;
use moontide_transfer::{Direction, Owner};
use moontide_types::limits::PAGE_BYTES;
use moontide_types::record::DigestContext;
use moontide_types::{Epoch, ObjectId, SegmentId};
use rustix::net::{RecvFlags, SendFlags};

/// Request: 16 bytes, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Request {
    /// First byte in the owner's segment.
    offset: u64,
    len: u32,
    direction: Direction,
    /// The receiver hashes the payload page by page.
    digests: bool,
}

impl Request {
    fn encode(self) -> [u8; 16] {
        let kind = u32::from(self.direction == Direction::Put) | u32::from(self.digests) << 1;
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.offset.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..].copy_from_slice(&kind.to_le_bytes());
        bytes
    }

    fn decode(bytes: [u8; 16]) -> Request {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let kind = word(12);
        Request {
            offset: u64::from(word(0)) | u64::from(word(4)) << 32,
            len: word(8),
            direction: if kind & 1 == 0 { Direction::Get } else { Direction::Put },
            digests: kind & 2 != 0,
        }
    }
}

// ----------------------------------------------------------------------------------------------------------- server

/// Serves the memory of a sample node; the threads run until the process exits.
pub(super) fn serve(sample: &Arc<SampleNode>) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let address = listener.local_addr()?;
    let sample = Arc::clone(sample);
    std::thread::Builder::new().name("baseline-accept".into()).spawn(move || {
        for stream in listener.incoming() {
            let sample = Arc::clone(&sample);
            let served = stream.and_then(|stream| {
                stream.set_nodelay(true)?;
                std::thread::Builder::new().name("baseline-serve".into()).spawn(move || {
                    // Until the peer closes the connection.
                    let _ = serve_requests(&stream, &sample);
                })
            });
            if let Err(error) = served {
                eprintln!("cannot serve a baseline connection: {error}");
            }
        }
    })?;
    Ok(address)
}

fn serve_requests(stream: &TcpStream, sample: &SampleNode) -> io::Result<()> {
    let segment = sample.heap().segment(SegmentId(0)).expect("a sample node has segment 0");
    let region = segment.payload();
    let context = dummy_context(sample.config().record_bytes);
    loop {
        let mut bytes = [0; 16];
        receive(stream, &mut bytes)?;
        let Request { offset, len, direction, digests } = Request::decode(bytes);
        let end = offset.checked_add(len.into()).ok_or(io::ErrorKind::InvalidInput)?;
        if end > region.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: inside the region, which lives as long as the segment.
        let base = unsafe { region.base().as_ptr().add(offset as usize) };
        match direction {
            Direction::Get => {
                // SAFETY: no thread writes the record while it is sent: engine and baseline alternate.
                send(stream, unsafe { std::slice::from_raw_parts(base, len as usize) }, false)?;
            }
            Direction::Put => {
                // SAFETY: the record is in state WRITING, so no reader is admitted, and engine and baseline alternate.
                let into = unsafe { std::slice::from_raw_parts_mut(base, len as usize) };
                receive_pages(stream, into, digests.then_some(&context))?;
                send(stream, &[1], false)?;
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------- client

/// A connection to the baseline server.
#[derive(Debug)]
pub(crate) struct BaselineConnection(TcpStream);

impl BaselineConnection {
    pub(crate) fn connect(to: SocketAddr) -> io::Result<BaselineConnection> {
        let stream = TcpStream::connect(to)?;
        stream.set_nodelay(true)?;
        // The benchmark fails instead of hanging.
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.set_write_timeout(Some(Duration::from_secs(10)))?;
        Ok(BaselineConnection(stream))
    }

    /// Reads from the owner's memory. With a context, hashes every page after its receipt.
    pub(crate) fn get(
        &self,
        offset: u64,
        into: &mut [u8],
        digests: Option<&DigestContext>,
    ) -> io::Result<()> {
        let (len, direction) = (into.len() as u32, Direction::Get);
        let request = Request { offset, len, direction, digests: digests.is_some() };
        send(&self.0, &request.encode(), false)?;
        receive_pages(&self.0, into, digests)
    }

    /// Writes to the owner's memory. With a context, hashes every page before it is sent; the owner hashes it again
    /// after its receipt.
    pub(crate) fn put(&self, offset: u64, from: &[u8], digests: Option<&DigestContext>) -> io::Result<()> {
        let (len, direction) = (from.len() as u32, Direction::Put);
        let request = Request { offset, len, direction, digests: digests.is_some() };
        send(&self.0, &request.encode(), !from.is_empty())?;
        match digests {
            None => send(&self.0, from, false)?,
            Some(context) => {
                let mut pages = from.chunks(PAGE_BYTES as usize).enumerate().peekable();
                while let Some((index, page)) = pages.next() {
                    black_box(context.page(index as u64, page));
                    send(&self.0, page, pages.peek().is_some())?;
                }
            }
        }
        receive(&self.0, &mut [0])
    }
}

// ------------------------------------------------------------------------------------------------------------- both

/// Digest context of the owner, which computes digests only for their cost and ignores them.
fn dummy_context(len: u64) -> DigestContext {
    DigestContext { id: ObjectId([0; 16]), version: Epoch::from_bits(1).expect("an epoch"), stripe: 0, len }
}

fn receive_pages(stream: &TcpStream, into: &mut [u8], digests: Option<&DigestContext>) -> io::Result<()> {
    let Some(context) = digests else { return receive(stream, into) };
    for (index, page) in into.chunks_mut(PAGE_BYTES as usize).enumerate() {
        receive(stream, page)?;
        black_box(context.page(index as u64, page));
    }
    Ok(())
}

/// Fills `into`. `WAITALL` requests all of it at once, which saves system calls.
fn receive(stream: &TcpStream, mut into: &mut [u8]) -> io::Result<()> {
    while !into.is_empty() {
        match rustix::net::recv(stream, &mut *into, RecvFlags::WAITALL) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((count, _)) => into = &mut into[count..],
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Sends all of `bytes`. `more`: further bytes of the same message follow.
fn send(stream: &TcpStream, mut bytes: &[u8], more: bool) -> io::Result<()> {
    let flags = SendFlags::NOSIGNAL | if more { SendFlags::MORE } else { SendFlags::empty() };
    while !bytes.is_empty() {
        match rustix::net::send(stream, bytes, flags) {
            Ok(count) => bytes = &bytes[count..],
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_encoding_round_trips() {
        for direction in [Direction::Get, Direction::Put] {
            for digests in [false, true] {
                let request = Request { offset: 0x0123_4567_89ab_cdef, len: 0xfedc_ba98, direction, digests };
                assert_eq!(Request::decode(request.encode()), request);
            }
        }
    }
}
