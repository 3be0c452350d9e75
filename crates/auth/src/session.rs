//! [`Session`]: TLS of one connection without its socket, for code that blocks on sockets itself.
//!
//! The owner moves bytes between the socket and the session: what arrives goes into [`Session::space`], what must be sent is in
//! [`Session::unsent`]. Both are buffers of the session, which are reused: a record is decrypted once and copied once, to where the
//! reader wants it, and many records are received or sent with one system call.
//!
//! ```text
//!   socket ──▶ space ─ decrypt ─▶ read        write ─ encrypt ─▶ unsent ──▶ socket
//! ```
//!
//! The methods never wait. Reading and writing may alternate freely; the owner keeps them apart with a lock.

use std::sync::Arc;

use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use rustls::{ClientConfig, Error, ServerConfig};

use crate::identity::Identity;
use crate::verifier::peer_identity;

/// Bytes that are encrypted at a time, four records: a system call costs far less than their encryption.
const WRITE_BYTES: usize = 64 << 10;

/// Bytes that are received at a time.
const INCOMING_BYTES: usize = 64 << 10;

/// Longest record on the wire, with header and tag. The buffer for incoming bytes has room for a part of one besides a whole one.
const RECORD_BYTES_MAX: usize = 5 + (16 << 10) + 256;

/// Largest payload of a record, and what a record adds to it.
const PAYLOAD_BYTES_MAX: usize = 16 << 10;
const RECORD_OVERHEAD: usize = 22;

/// Room for messages of the protocol itself. A handshake is refused if it needs more: certificates are short.
const PROTOCOL_BYTES_MAX: usize = 64 << 10;

const OUTGOING_BYTES: usize =
    WRITE_BYTES + (WRITE_BYTES / PAYLOAD_BYTES_MAX + 1) * RECORD_OVERHEAD + PROTOCOL_BYTES_MAX;

const _: () = assert!(INCOMING_BYTES >= 2 * RECORD_BYTES_MAX);

enum Connection {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// TLS of one connection.
pub struct Session {
    connection: Connection,
    /// Encrypted bytes that have arrived: `incoming[received]`.
    incoming: Vec<u8>,
    received: std::ops::Range<usize>,
    /// Encrypted bytes to send: `outgoing[pending]`.
    outgoing: Vec<u8>,
    pending: std::ops::Range<usize>,
    /// Rest of the last record that was read.
    plain: Vec<u8>,
    plain_read: usize,
    is_established: bool,
    is_closed: bool,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("is_established", &self.is_established)
            .field("received", &self.received.len())
            .field("unsent", &self.pending.len())
            .finish_non_exhaustive()
    }
}

/// What [`Session::process`] has found.
enum Step {
    /// More may follow at once.
    Again,
    /// More bytes of the peer are needed.
    Blocked,
}

/// Takes the next step of a connection; client and server have the same methods, but no common trait.
macro_rules! step {
    ($connection:expr, $incoming:expr, $session:ident, $sink:expr) => {{
        let UnbufferedStatus { mut discard, state, .. } = $connection.process_tls_records($incoming);
        let step = match state {
            Err(error) => Err(error),
            Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
                // Data follows the last message of the handshake.
                $session.is_established = true;
                match traffic.next_record() {
                    None => break Ok(Step::Again),
                    Some(Err(error)) => break Err(error),
                    Some(Ok(record)) => {
                        discard += record.discard;
                        $sink(record.payload);
                    }
                }
            },
            Ok(ConnectionState::EncodeTlsData(mut data)) => {
                let free = &mut $session.outgoing[$session.pending.end..];
                match data.encode(free) {
                    Ok(len) => {
                        $session.pending.end += len;
                        Ok(Step::Again)
                    }
                    Err(EncodeError::InsufficientSize(_)) => {
                        Err(Error::General("handshake is too long".into()))
                    }
                    Err(EncodeError::AlreadyEncoded) => unreachable!("each state is encoded once"),
                }
            }
            Ok(ConnectionState::TransmitTlsData(data)) => {
                // The bytes are in `outgoing`, in front of all that follows.
                data.done();
                Ok(Step::Again)
            }
            Ok(ConnectionState::WriteTraffic(_)) => {
                $session.is_established = true;
                Ok(Step::Blocked)
            }
            Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => {
                $session.is_closed = true;
                Ok(Step::Blocked)
            }
            Ok(ConnectionState::ReadEarlyData(_)) => Err(Error::General("early data was not offered".into())),
            Ok(_) => Ok(Step::Blocked),
        };
        $session.received.start += discard;
        step
    }};
}

impl Session {
    /// Creates the client's side of a connection.
    ///
    /// # Errors
    /// If the configuration cannot be used.
    pub fn client(config: Arc<ClientConfig>) -> Result<Session, Error> {
        // Not sent, and not compared: the identity in the certificate is.
        let name = ServerName::try_from("moontide").expect("a valid name");
        Ok(Session::new(Connection::Client(UnbufferedClientConnection::new(config, name)?)))
    }

    /// Creates the server's side of a connection.
    ///
    /// # Errors
    /// If the configuration cannot be used.
    pub fn server(config: Arc<ServerConfig>) -> Result<Session, Error> {
        Ok(Session::new(Connection::Server(UnbufferedServerConnection::new(config)?)))
    }

    fn new(connection: Connection) -> Session {
        Session {
            connection,
            incoming: vec![0; INCOMING_BYTES],
            received: 0..0,
            outgoing: vec![0; OUTGOING_BYTES],
            pending: 0..0,
            plain: Vec::new(),
            plain_read: 0,
            is_established: false,
            is_closed: false,
        }
    }

    /// Makes all possible progress of the handshake. Returns whether this side has completed it; before, the bytes in
    /// [`Session::unsent`] must be sent, and then more be received.
    ///
    /// # Errors
    /// If the peer is refused or breaks the protocol. [`Session::unsent`] then has an alert, which tells the peer; nothing else may be
    /// called.
    pub fn handshake(&mut self) -> Result<bool, Error> {
        while !self.is_established {
            // Data that comes with the last message of the handshake is kept.
            match self.process(0, &mut |_| {}) {
                Ok(Step::Again) => {}
                Ok(Step::Blocked) => break,
                Err(error) => {
                    // One more step, which encodes the alert.
                    let _ = self.process(0, &mut |_| {});
                    return Err(error);
                }
            }
        }
        Ok(self.is_established)
    }

    /// Returns the identity of the peer, if it has a certificate. After the handshake.
    pub fn peer(&self) -> Option<Identity> {
        match &self.connection {
            Connection::Client(connection) => peer_identity(connection),
            Connection::Server(connection) => peer_identity(connection),
        }
    }

    /// Returns where bytes that arrive must be written; never empty. [`Session::received`] tells how many there are.
    pub fn space(&mut self) -> &mut [u8] {
        if self.received.is_empty() {
            self.received = 0..0;
        } else if self.incoming.len() - self.received.end < RECORD_BYTES_MAX {
            self.incoming.copy_within(self.received.clone(), 0);
            self.received = 0..self.received.len();
        }
        &mut self.incoming[self.received.end..]
    }

    /// Bytes have been written to [`Session::space`].
    pub fn received(&mut self, bytes: usize) {
        self.received.end += bytes;
        assert!(self.received.end <= self.incoming.len(), "more bytes than space");
    }

    /// Passes at most `max` bytes to `sink`, in order and in pieces. Returns their number; 0 if more bytes must be received first.
    ///
    /// # Errors
    /// If bytes were changed on the way, or the peer breaks the protocol.
    pub fn read(&mut self, max: usize, sink: &mut dyn FnMut(&[u8])) -> Result<usize, Error> {
        let rest = &self.plain[self.plain_read..];
        let mut done = rest.len().min(max);
        if done > 0 {
            sink(&rest[..done]);
            self.plain_read += done;
        }
        while done < max && !self.received.is_empty() {
            let before = self.received.len();
            let mut read = 0;
            let step = self.process(max - done, &mut |piece| {
                read += piece.len();
                sink(piece);
            })?;
            done += read;
            if matches!(step, Step::Blocked) || (read == 0 && self.received.len() == before) {
                break;
            }
        }
        Ok(done)
    }

    /// Returns whether [`Session::read`] can make progress without more bytes of the peer.
    pub fn is_readable(&self) -> bool {
        let arrived = &self.incoming[self.received.clone()];
        // A record begins with its type, version and length.
        let is_whole =
            |header: &[u8; 5]| arrived.len() >= 5 + usize::from(u16::from_be_bytes([header[3], header[4]]));
        self.plain_read < self.plain.len() || arrived.first_chunk().is_some_and(is_whole)
    }

    /// Returns whether the peer has ended the connection, and everything that it sent was read.
    pub fn is_closed(&self) -> bool {
        self.is_closed && self.plain_read == self.plain.len()
    }

    /// Encrypts the first bytes, as many as there is room for behind those that are unsent. Returns their number. After the handshake.
    ///
    /// # Errors
    /// If the keys of the connection are used up, or it has ended.
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        let room = OUTGOING_BYTES
            - PROTOCOL_BYTES_MAX / 2
            - self.pending.end.min(OUTGOING_BYTES - PROTOCOL_BYTES_MAX / 2);
        let whole = room / (PAYLOAD_BYTES_MAX + RECORD_OVERHEAD) * PAYLOAD_BYTES_MAX;
        let rest = (room % (PAYLOAD_BYTES_MAX + RECORD_OVERHEAD)).saturating_sub(RECORD_OVERHEAD);
        let bytes = &bytes[..bytes.len().min(WRITE_BYTES).min(whole + rest)];
        if bytes.is_empty() {
            return Ok(0);
        }
        loop {
            let Session { connection, outgoing, pending, .. } = self;
            // Messages of the protocol come first: a peer that asked for new keys gets them before the next bytes.
            macro_rules! encrypt {
                ($connection:expr) => {
                    match $connection.process_tls_records(&mut []).state? {
                        ConnectionState::WriteTraffic(mut traffic) => {
                            Some(traffic.encrypt(bytes, &mut outgoing[pending.end..]))
                        }
                        ConnectionState::EncodeTlsData(mut data) => {
                            let len = data.encode(&mut outgoing[pending.end..]);
                            pending.end += len.map_err(|error| Error::General(error.to_string()))?;
                            None
                        }
                        ConnectionState::TransmitTlsData(data) => {
                            data.done();
                            None
                        }
                        _ => return Err(Error::General("connection has ended".into())),
                    }
                };
            }
            let encrypted = match connection {
                Connection::Client(connection) => encrypt!(connection),
                Connection::Server(connection) => encrypt!(connection),
            };
            match encrypted {
                None => {}
                Some(Ok(len)) => {
                    self.pending.end += len;
                    return Ok(bytes.len());
                }
                Some(Err(EncryptError::EncryptExhausted)) => return Err(Error::EncryptError),
                Some(Err(EncryptError::InsufficientSize(_))) => {
                    unreachable!("the buffer has room for WRITE_BYTES and all overhead")
                }
            }
        }
    }

    /// Returns the encrypted bytes to send, in order.
    pub fn unsent(&self) -> &[u8] {
        &self.outgoing[self.pending.clone()]
    }

    /// The first bytes of [`Session::unsent`] have been sent.
    pub fn sent(&mut self, bytes: usize) {
        self.pending.start += bytes;
        assert!(self.pending.start <= self.pending.end, "more bytes than unsent");
        if self.pending.is_empty() {
            self.pending = 0..0;
        }
    }

    /// Handles the next record or message. Passes at most `max` bytes of data to `sink`, and keeps the others.
    fn process(&mut self, max: usize, sink: &mut dyn FnMut(&[u8])) -> Result<Step, Error> {
        debug_assert_eq!(self.plain_read, self.plain.len(), "earlier bytes come first");
        self.plain.clear();
        self.plain_read = 0;
        let mut left = max;
        let Session { connection, incoming, received, plain, .. } = self;
        let bytes = &mut incoming[received.clone()];
        let mut split = |payload: &[u8]| {
            let now = payload.len().min(left);
            sink(&payload[..now]);
            left -= now;
            plain.extend_from_slice(&payload[now..]);
        };
        struct Parts<'a> {
            outgoing: &'a mut Vec<u8>,
            pending: &'a mut std::ops::Range<usize>,
            received: &'a mut std::ops::Range<usize>,
            is_established: bool,
            is_closed: bool,
        }
        let mut parts = Parts {
            outgoing: &mut self.outgoing,
            pending: &mut self.pending,
            received,
            is_established: self.is_established,
            is_closed: self.is_closed,
        };
        let step = match connection {
            Connection::Client(connection) => step!(connection, bytes, parts, split),
            Connection::Server(connection) => step!(connection, bytes, parts, split),
        };
        (self.is_established, self.is_closed) = (parts.is_established, parts.is_closed);
        step
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Authority, Directory};
    use crate::{ClientCertificates, Credentials, ExpectedServer, Role};
    use moontide_types::NodeId;

    /// Moves at most `step` bytes from one session to another. Returns their number.
    fn carry(from: &mut Session, to: &mut Session, step: usize) -> usize {
        let space = to.space();
        let len = from.unsent().len().min(step).min(space.len());
        space[..len].copy_from_slice(&from.unsent()[..len]);
        to.received(len);
        from.sent(len);
        len
    }

    /// Returns the two ends of a connection after the handshake, whose bytes were carried in pieces of `step`.
    fn pair(step: usize) -> (Session, Session) {
        let (directory, authority) = (Directory::new(), Authority::new());
        let load =
            |name: &str, role: Role| Credentials::load(authority.issue(&directory, name, role)).unwrap();
        let (node, tenant) =
            (load("node", Role::Node(NodeId(3))), load("tenant", Role::Tenant("acme".into())));
        let mut server = Session::server(node.server(ClientCertificates::Required, &[])).unwrap();
        let mut client = Session::client(tenant.client(ExpectedServer::Node(NodeId(3)), &[])).unwrap();
        for _ in 0..100_000 {
            let ended = [client.handshake().unwrap(), server.handshake().unwrap()];
            let moved = carry(&mut client, &mut server, step) + carry(&mut server, &mut client, step);
            if ended == [true, true] && moved == 0 {
                assert_eq!(client.peer().unwrap().role(), &Role::Node(NodeId(3)));
                assert_eq!(server.peer().unwrap().role(), &Role::Tenant("acme".into()));
                return (client, server);
            }
        }
        panic!("the handshake does not end")
    }

    #[test]
    fn bytes_arrive_in_order_whatever_the_sizes_of_writes_reads_and_packets() {
        for (step, write, read) in
            [(usize::MAX, 300_000, usize::MAX), (1, 200, 7), (1000, 70_000, 16_385), (65_536, 5, 3)]
        {
            let (mut client, mut server) = pair(step);
            let total = if step == 1 { 2_000 } else { 500_000 };
            let sent: Vec<u8> = (0..total).map(|n: usize| (n * 7 + n / 251) as u8).collect();
            let (mut written, mut got) = (0, vec![]);
            while got.len() < total {
                if written < total {
                    written += client.write(&sent[written..total.min(written + write)]).unwrap();
                }
                carry(&mut client, &mut server, step);
                loop {
                    let now = server.read(read, &mut |piece| got.extend_from_slice(piece)).unwrap();
                    assert!(now <= read);
                    if now == 0 {
                        break;
                    }
                }
            }
            assert_eq!(got, sent);
            assert!(!server.is_closed());
        }
    }

    #[test]
    fn data_that_comes_with_the_end_of_the_handshake_is_kept() {
        let (directory, authority) = (Directory::new(), Authority::new());
        let load =
            |name: &str, role: Role| Credentials::load(authority.issue(&directory, name, role)).unwrap();
        let (node, operator) = (load("node", Role::Node(NodeId(3))), load("operator", Role::Operator));
        let mut server = Session::server(node.server(ClientCertificates::Required, &[])).unwrap();
        let mut client = Session::client(operator.client(ExpectedServer::Node(NodeId(3)), &[])).unwrap();
        while !client.handshake().unwrap() {
            carry(&mut client, &mut server, usize::MAX);
            assert!(!server.handshake().unwrap());
            carry(&mut server, &mut client, usize::MAX);
        }
        assert_eq!(client.write(b"hello").unwrap(), 5);
        carry(&mut client, &mut server, usize::MAX);
        assert!(server.handshake().unwrap() && server.is_readable());
        let mut got = vec![];
        assert_eq!(server.read(100, &mut |piece| got.extend_from_slice(piece)).unwrap(), 5);
        assert_eq!(got, b"hello");
    }

    #[test]
    fn changed_byte_is_an_error() {
        let (mut client, mut server) = pair(usize::MAX);
        client.write(&[7; 1000]).unwrap();
        let at = client.pending.start + 500;
        client.outgoing[at] ^= 1;
        carry(&mut client, &mut server, usize::MAX);
        let mut got = 0;
        let error = server.read(usize::MAX, &mut |piece| got += piece.len()).unwrap_err();
        assert_eq!((error, got), (Error::DecryptError, 0));
    }

    #[test]
    fn refused_client_sees_alert() {
        let (directory, authority) = (Directory::new(), Authority::new());
        let load = |authority: &Authority, name: &str| {
            let files = authority.issue(&directory, name, Role::Master);
            std::fs::write(&files.ca, {
                let own = authority.issue(&directory, "any", Role::Master);
                std::fs::read(own.ca).unwrap()
            })
            .unwrap();
            files
        };
        let good = load(&authority, "good");
        let mut bad = load(&Authority::new(), "bad");
        bad.ca = good.ca.clone();
        let server = Credentials::load(good).unwrap().server(ClientCertificates::Required, &[]);
        let client = Credentials::load(bad).unwrap().client(ExpectedServer::Master, &[]);
        let (mut client, mut server) = (Session::client(client).unwrap(), Session::server(server).unwrap());
        let refused = loop {
            let _ = client.handshake().unwrap();
            carry(&mut client, &mut server, usize::MAX);
            match server.handshake() {
                Ok(_) => carry(&mut server, &mut client, usize::MAX),
                Err(error) => break error,
            };
        };
        assert!(refused.to_string().contains("UnknownIssuer"), "{refused}");
        assert!(!server.unsent().is_empty(), "the client is told");
        carry(&mut server, &mut client, usize::MAX);
        let told = client.read(1, &mut |_| {}).unwrap_err();
        assert!(matches!(told, Error::AlertReceived(_)), "{told}");
    }
}
