//! [`TlsLayer`]: encryption of a [`Socket`].
//!
//! The lock of the session is held while bytes are encrypted or decrypted and while the socket takes or gives what it has, never
//! during a wait. So one thread can send while another receives.
//!
//! Bytes that were accepted are encrypted in portions. A portion counts as sent only when the socket has accepted all of it:
//! the rest of it would stay unsent else.

use moontide_auth::{Identity, Session, rustls};
use moontide_rt::sync::{Mutex, lock};
use moontide_rt::time::Instant;

use crate::error::ConnectionError;
use crate::tcp::socket::Socket;

/// Name of the protocol over TLS: a peer that speaks another one is refused by the handshake.
pub(super) const ALPN: &[u8] = b"moontide-data";

/// TLS of a connection, after its handshake.
#[derive(Debug)]
pub(super) struct TlsLayer {
    state: Mutex<TlsState>,
    peer: Option<Identity>,
}

#[derive(Debug)]
struct TlsState {
    session: Session,
    /// Bytes of the caller in the portion that is being sent.
    portion: usize,
}

impl TlsLayer {
    /// Runs the handshake on a socket, until `deadline`.
    pub(super) fn handshake(
        socket: &Socket,
        session: Result<Session, rustls::Error>,
        deadline: Instant,
    ) -> Result<TlsLayer, ConnectionError> {
        let peer = socket.name();
        let refused = |error: rustls::Error| ConnectionError::Tls { peer, reason: error.to_string().into() };
        let mut session = session.map_err(refused)?;
        loop {
            let progress = session.handshake();
            let is_done = match progress {
                Ok(is_done) => is_done,
                Err(error) => {
                    // The peer learns the reason from an alert, if it can be sent at once.
                    let _ = socket.try_send_raw(session.unsent());
                    return Err(refused(error));
                }
            };
            while !session.unsent().is_empty() {
                let sent = socket.try_send_raw(session.unsent())?;
                session.sent(sent);
                if sent == 0 && !socket.wait(false, true, deadline)?.writable {
                    return Err(timed_out(socket));
                }
            }
            if is_done {
                let peer = session.peer();
                return Ok(TlsLayer { state: Mutex::new(TlsState { session, portion: 0 }), peer });
            }
            if !socket.wait(true, false, deadline)?.readable {
                return Err(timed_out(socket));
            }
            let received = socket.try_receive_raw(session.space())?;
            session.received(received);
        }
    }

    /// Returns the identity of the peer, if it has a certificate.
    pub(super) fn peer(&self) -> Option<&Identity> {
        self.peer.as_ref()
    }

    /// Returns whether bytes have arrived that the socket no longer has.
    pub(super) fn is_readable(&self) -> bool {
        lock(&self.state).session.is_readable()
    }

    /// Receives the bytes that are available now into the iovecs, in order. Returns their number.
    ///
    /// # Safety
    /// The iovecs are valid for writes, and no other code uses them during the call.
    pub(super) unsafe fn try_receive(
        &self,
        socket: &Socket,
        iovecs: &mut [libc::iovec],
    ) -> Result<usize, ConnectionError> {
        let mut state = lock(&self.state);
        let session = &mut state.session;
        let wanted: usize = iovecs.iter().map(|iovec| iovec.iov_len).sum();
        let mut cursor = IovecCursor { iovecs, at: 0 };
        let mut done = 0;
        while done < wanted {
            // SAFETY: the caller upholds the contract, which is the same, and `read` passes at most as many bytes as are left.
            let mut copy = |piece: &[u8]| unsafe { cursor.write(piece) };
            let read = session.read(wanted - done, &mut copy);
            done += read.map_err(|error| tls_error(socket, error))?;
            if done == wanted {
                break;
            }
            if session.is_closed() {
                return if done > 0 {
                    Ok(done)
                } else {
                    Err(ConnectionError::Closed { peer: socket.name() })
                };
            }
            let received = match socket.try_receive_raw(session.space()) {
                Ok(received) => received,
                Err(_) if done > 0 => return Ok(done), // the next call fails
                Err(error) => return Err(error),
            };
            if received == 0 {
                break;
            }
            session.received(received);
        }
        Ok(done)
    }

    /// Sends the first bytes of the iovecs. Returns their number; 0 if the socket cannot take all of them now: then the next call must
    /// be given the same bytes.
    ///
    /// # Safety
    /// The iovecs are valid for reads, and no other code writes them during the call.
    pub(super) unsafe fn try_send(
        &self,
        socket: &Socket,
        iovecs: &[libc::iovec],
    ) -> Result<usize, ConnectionError> {
        let mut state = lock(&self.state);
        let TlsState { session, portion } = &mut *state;
        if *portion == 0 {
            for iovec in iovecs.iter().filter(|iovec| iovec.iov_len > 0) {
                // SAFETY: the caller promises that the memory is valid and not written.
                let bytes = unsafe { std::slice::from_raw_parts(iovec.iov_base.cast::<u8>(), iovec.iov_len) };
                let written = session.write(bytes).map_err(|error| tls_error(socket, error))?;
                *portion += written;
                if written < bytes.len() {
                    break;
                }
            }
        }
        while !session.unsent().is_empty() {
            let sent = socket.try_send_raw(session.unsent())?;
            if sent == 0 {
                return Ok(0);
            }
            session.sent(sent);
        }
        Ok(std::mem::take(portion))
    }
}

/// Position in the memory of iovecs.
struct IovecCursor<'a> {
    iovecs: &'a [libc::iovec],
    /// Bytes of the first iovec that have been written.
    at: usize,
}

impl IovecCursor<'_> {
    /// Writes the next bytes.
    ///
    /// # Safety
    /// The iovecs are valid for writes, not used by other code, and have room for the bytes.
    unsafe fn write(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let first = self.iovecs[0];
            let len = bytes.len().min(first.iov_len - self.at);
            // SAFETY: the range is inside of the first iovec, which is valid for writes by the contract.
            unsafe {
                let to = first.iov_base.cast::<u8>().add(self.at);
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, len);
            }
            bytes = &bytes[len..];
            self.at += len;
            if self.at == first.iov_len {
                self.iovecs = &self.iovecs[1..];
                self.at = 0;
            }
        }
    }
}

fn timed_out(socket: &Socket) -> ConnectionError {
    let (what, source) = ("complete the TLS handshake with", rustix::io::Errno::TIMEDOUT);
    ConnectionError::System { what, peer: socket.name(), source }
}

fn tls_error(socket: &Socket, error: rustls::Error) -> ConnectionError {
    ConnectionError::Tls { peer: socket.name(), reason: error.to_string().into() }
}
