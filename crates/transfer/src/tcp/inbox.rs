//! [`Inbox`]: bytes that were received ahead of their use, so that a header and its body cost one call and not two.
//!
//! Payload does not come this way, but for a few bytes that stood right behind a body.

use std::time::Instant;

use crate::error::Failure;
use crate::tcp::flow::Chunk;
use crate::tcp::socket::{Halt, Patience, Socket};

/// Bytes `from … to` of `bytes` have been received and not been used.
#[derive(Debug)]
pub(crate) struct Inbox {
    bytes: Box<[u8]>,
    from: usize,
    to: usize,
}

impl Inbox {
    /// Empty, with room for so many bytes.
    pub(crate) fn new(capacity: usize) -> Inbox {
        Inbox { bytes: vec![0; capacity].into(), from: 0, to: 0 }
    }

    /// How many bytes are there.
    pub(crate) fn len(&self) -> usize {
        self.to - self.from
    }

    /// Room for what brings the number of bytes to `limit`, or to the capacity.
    fn room(&mut self, limit: usize) -> &mut [u8] {
        self.bytes.copy_within(self.from..self.to, 0);
        (self.from, self.to) = (0, self.to - self.from);
        let end = limit.clamp(self.to, self.bytes.len());
        &mut self.bytes[self.to..end]
    }

    /// Receives what comes first, at most until `end`, and at most `limit` bytes together with those that are there.
    pub(crate) fn receive_first(&mut self, socket: &Socket, limit: usize, end: Instant) -> Result<(), Halt> {
        self.to += socket.receive_first(self.room(limit), end)?;
        Ok(())
    }

    /// As [`Inbox::receive_first`], but takes only what is there right now.
    pub(crate) fn try_receive(&mut self, socket: &Socket, limit: usize) -> Result<(), Failure> {
        self.to += socket.try_receive(self.room(limit))?;
        Ok(())
    }

    /// Fills `into` with what is here, and then straight from the socket.
    pub(crate) fn receive(
        &mut self,
        socket: &Socket,
        into: &mut [u8],
        patience: Patience,
    ) -> Result<(), Halt> {
        let here = self.len().min(into.len());
        into[..here].copy_from_slice(&self.bytes[self.from..self.from + here]);
        self.from += here;
        if here < into.len() { socket.receive(&mut into[here..], patience) } else { Ok(()) }
    }

    /// Copies what is here into a chunk.
    ///
    /// # Safety
    /// The chunk's memory is valid for writes, and nobody else uses it meanwhile.
    pub(crate) unsafe fn drain_into(&mut self, chunk: &mut Chunk) {
        while self.len() > 0 && chunk.bytes() > 0 {
            let piece = chunk.pieces()[0];
            let len = piece.iov_len.min(self.len());
            // SAFETY: inside the piece, which is as the caller says; the inbox is nobody else's.
            unsafe {
                std::ptr::copy_nonoverlapping(self.bytes[self.from..].as_ptr(), piece.iov_base.cast(), len)
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
    use crate::error::Name;

    fn pair() -> (Socket, UnixStream) {
        let (here, there) = UnixStream::pair().unwrap();
        (Socket::new(here.into(), Name::Local(0)).unwrap(), there)
    }

    #[test]
    fn bytes_come_out_in_order_wherever_they_were() {
        let (socket, mut peer) = pair();
        let sent: Vec<u8> = (0..200).collect();
        peer.write_all(&sent).unwrap();
        let end = Instant::now() + Duration::from_secs(5);
        let patience = Patience::until(end);
        let mut inbox = Inbox::new(64);
        inbox.receive_first(&socket, 50, end).unwrap();
        assert_eq!(inbox.len(), 50);
        let mut got = vec![0; 10];
        inbox.receive(&socket, &mut got, patience).unwrap();
        inbox.try_receive(&socket, 1000).unwrap();
        assert_eq!(inbox.len(), 64, "no more than it has room for");
        let mut memory = vec![0u8; 20];
        let mut chunk = Chunk::new();
        chunk.push(memory.as_mut_ptr(), 5);
        chunk.push(memory[5..].as_mut_ptr(), 15);
        // SAFETY: the memory is this test's.
        unsafe { inbox.drain_into(&mut chunk) };
        assert_eq!(chunk.bytes(), 0);
        let mut rest = vec![0; 170];
        inbox.receive(&socket, &mut rest, patience).unwrap();
        assert_eq!([got, memory, rest].concat(), sent);
        assert_eq!(inbox.len(), 0);
    }
}
