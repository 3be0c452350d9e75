//! [`RecvBuffer`]: bytes received ahead of their use, so that a header and its body cost one system call instead of
//! two.
//!
//! Payload does not pass through it, except for a few bytes that directly follow a body.

use moontide_rt::time::Instant;

use crate::error::ConnectionError;
use crate::tcp::payload::Chunk;
use crate::tcp::socket::{IoError, IoTimeout, Socket};

/// Buffer of received bytes. Bytes `from … to` of `bytes` have been received and not been used.
#[derive(Debug)]
pub(crate) struct RecvBuffer {
    bytes: Box<[u8]>,
    from: usize,
    to: usize,
}

impl RecvBuffer {
    /// Creates an empty buffer of `capacity` bytes.
    pub(crate) fn new(capacity: usize) -> RecvBuffer {
        RecvBuffer { bytes: vec![0; capacity].into(), from: 0, to: 0 }
    }

    /// Returns the number of unused bytes.
    pub(crate) fn len(&self) -> usize {
        self.to - self.from
    }

    /// Returns the free space up to a total of `limit` bytes, or up to the capacity.
    fn free_space(&mut self, limit: usize) -> &mut [u8] {
        self.bytes.copy_within(self.from..self.to, 0);
        (self.from, self.to) = (0, self.to - self.from);
        let end = limit.clamp(self.to, self.bytes.len());
        &mut self.bytes[self.to..end]
    }

    /// Receives the bytes that arrive first, at most until `end`, and up to a total of `limit` bytes in the buffer.
    pub(crate) fn receive_first(
        &mut self,
        socket: &Socket,
        limit: usize,
        end: Instant,
    ) -> Result<(), IoError> {
        self.to += socket.receive_first(self.free_space(limit), end)?;
        Ok(())
    }

    /// As [`RecvBuffer::receive_first`], but receives only bytes that are available now.
    pub(crate) fn try_receive(&mut self, socket: &Socket, limit: usize) -> Result<(), ConnectionError> {
        self.to += socket.try_receive(self.free_space(limit))?;
        Ok(())
    }

    /// Fills `into` from the buffer, and then directly from the socket.
    pub(crate) fn receive(
        &mut self,
        socket: &Socket,
        into: &mut [u8],
        timeout: IoTimeout,
    ) -> Result<(), IoError> {
        let buffered = self.len().min(into.len());
        into[..buffered].copy_from_slice(&self.bytes[self.from..self.from + buffered]);
        self.from += buffered;
        if buffered < into.len() { socket.receive(&mut into[buffered..], timeout) } else { Ok(()) }
    }

    /// Moves buffered bytes into a chunk.
    ///
    /// # Safety
    /// The chunk's memory is valid for writes, and no other code uses it during the call.
    pub(crate) unsafe fn drain_into(&mut self, chunk: &mut Chunk) {
        while self.len() > 0 && chunk.bytes() > 0 {
            let iovec = chunk.iovecs()[0];
            let len = iovec.iov_len.min(self.len());
            // SAFETY: inside the iovec, which is valid by the contract; no other code uses the buffer.
            unsafe {
                std::ptr::copy_nonoverlapping(self.bytes[self.from..].as_ptr(), iovec.iov_base.cast(), len)
            };
            self.from += len;
            chunk.advance(len);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;
    use crate::error::PeerName;

    fn pair() -> (Socket, UnixStream) {
        let (local, remote) = UnixStream::pair().unwrap();
        (Socket::new(local.into(), PeerName::Local(0)).unwrap(), remote)
    }

    #[test]
    fn recv_buffer_returns_bytes_in_order() {
        let (socket, mut peer) = pair();
        let sent: Vec<u8> = (0..200).collect();
        peer.write_all(&sent).unwrap();
        let end = Instant::now() + Duration::from_secs(5);
        let timeout = IoTimeout::until(end);
        let mut buffer = RecvBuffer::new(64);
        buffer.receive_first(&socket, 50, end).unwrap();
        assert_eq!(buffer.len(), 50);
        let mut got = vec![0; 10];
        buffer.receive(&socket, &mut got, timeout).unwrap();
        buffer.try_receive(&socket, 1000).unwrap();
        assert_eq!(buffer.len(), 64, "limited by the capacity");
        let mut memory = vec![0u8; 20];
        let mut chunk = Chunk::new();
        chunk.push(memory.as_mut_ptr(), 5);
        chunk.push(memory[5..].as_mut_ptr(), 15);
        // SAFETY: only this test uses the memory.
        unsafe { buffer.drain_into(&mut chunk) };
        assert_eq!(chunk.bytes(), 0);
        let mut rest = vec![0; 170];
        buffer.receive(&socket, &mut rest, timeout).unwrap();
        assert_eq!([got, memory, rest].concat(), sent);
        assert_eq!(buffer.len(), 0);
    }
}
