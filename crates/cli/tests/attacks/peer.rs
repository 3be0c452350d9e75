//! [`Peer`]: a connection to a master or a node, made by hand, and the requests of a put.

#![allow(dead_code, reason = "each file of attacks uses its own part")]

use std::io::{self, Read, Write};
use std::net::TcpStream;

use moontide_proto::convert::{PutStartResponse, SlotOutcomes, Wire};
use moontide_proto::{
    CommitEntry, CommitFlags, FRAME_HEADER_BYTES, FixedRecord, FrameHeader, FrameKind, Handle, Hello,
    ObjectEntry, OpKind, PackedBuilder, PackedKeysBuilder, ProtocolVersions, PutEntry, Token, v1,
};
use moontide_transfer::Target;
use moontide_types::{ErrorCode, Key, NodeId};
use prost::Message;

use crate::harness::CALL;

/// A connection after its handshake.
pub struct Peer {
    pub stream: TcpStream,
}

/// Reply to a request.
pub struct Reply {
    pub header: FrameHeader,
    pub body: Vec<u8>,
    pub payload: Vec<u8>,
}

/// Space that a master has granted.
#[derive(Clone)]
pub struct Granted {
    pub key: Vec<u8>,
    pub tenant: String,
    pub object: ObjectEntry,
    pub handle: Handle,
}

/// Encodes a frame.
pub fn frame(kind: FrameKind, body: &[u8], payload: &[u8]) -> Vec<u8> {
    let (body_len, payload_len) = (body.len() as u32, payload.len() as u64);
    let timeout_ms = CALL.as_millis() as u32;
    let header = FrameHeader { body_len, payload_len, timeout_ms, ..FrameHeader::new(kind, 1) };
    [&header.encode()[..], body, payload].concat()
}

/// Returns the context of a call to a master.
pub fn context(tenant: &str) -> Option<v1::RequestContext> {
    Some(v1::RequestContext { tenant: tenant.into(), timeout_ms: 5000, caller: 7, ..Default::default() })
}

impl Peer {
    /// Connects to `address`, and runs the handshake without credentials.
    pub fn connect(address: &str) -> Peer {
        Peer::try_connect(address).expect("the server accepts connections")
    }

    pub fn try_connect(address: &str) -> io::Result<Peer> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(CALL))?;
        stream.set_write_timeout(Some(CALL))?;
        let mut peer = Peer { stream };
        let (node, versions) = (NodeId(0), ProtocolVersions::CURRENT);
        let hello =
            Hello { node, caller: 0x1234, versions, inflight_max: 64, features: 0, token: Token::NONE };
        let mut body = Vec::new();
        hello.encode(&mut body);
        peer.send(&frame(FrameKind::Hello, &body, &[]))?;
        match peer.receive()?.header {
            FrameHeader { kind: FrameKind::HelloAck, status: None, .. } => Ok(peer),
            refused => Err(io::Error::other(format!("handshake refused: {refused:?}"))),
        }
    }

    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    pub fn receive(&mut self) -> io::Result<Reply> {
        let mut bytes = [0; FRAME_HEADER_BYTES];
        self.stream.read_exact(&mut bytes)?;
        let header = FrameHeader::decode(&bytes).map_err(io::Error::other)?;
        let (mut body, mut payload) =
            (vec![0; header.body_len as usize], vec![0; header.payload_len as usize]);
        self.stream.read_exact(&mut body)?;
        self.stream.read_exact(&mut payload)?;
        Ok(Reply { header, body, payload })
    }

    /// Sends a request, and returns its reply; an error frame is an error.
    pub fn call(&mut self, kind: FrameKind, body: &[u8], payload: &[u8]) -> Result<Reply, ErrorCode> {
        self.send(&frame(kind, body, payload)).expect("the server receives");
        let reply = self.receive().expect("the server replies");
        match reply.header.status {
            None => Ok(reply),
            Some(code) => Err(code),
        }
    }

    /// Reserves space for an object at a master, over its frame protocol.
    pub fn put_start(&mut self, tenant: &str, key: &[u8], len: u64) -> Granted {
        let mut keys = PackedKeysBuilder::new();
        keys.push(Key::new(key).expect("a short key")).expect("one key");
        let mut objects = PackedBuilder::with_capacity(1);
        objects.push(&PutEntry { len, config: 0 });
        let request = v1::PutStartRequest {
            context: context(tenant),
            keys: keys.finish().into(),
            configs: vec![v1::PutConfig { replicas: 1, replicas_min: 1, ..Default::default() }],
            objects: objects.finish().into(),
            attributes: Default::default(),
        };
        let reply = self.call(FrameKind::PutStart, &request.encode_to_vec(), &[]).expect("a response");
        let message = v1::PutStartResponse::decode(&reply.body[..]).expect("a response");
        let response = PutStartResponse::from_wire(&message).expect("a valid response");
        let granted = response.body().expect("the master grants");
        let (object, handles) = granted.list.iter().next().expect("one object");
        assert_eq!(object.code, None, "space was granted");
        let handle = handles.iter().next().expect("one stripe");
        Granted { key: key.to_vec(), tenant: tenant.to_owned(), object, handle }
    }

    /// Begins the record of a grant at its node.
    pub fn begin(&mut self, granted: &Granted) -> Result<(), ErrorCode> {
        let mut keys = PackedKeysBuilder::new();
        keys.push(Key::new(&granted.key).expect("a short key")).expect("one key");
        let (mut objects, mut handles) = (PackedBuilder::with_capacity(1), PackedBuilder::with_capacity(1));
        objects.push(&ObjectEntry { first_handle: 0, ..granted.object });
        handles.push(&granted.handle);
        let request = v1::BeginRequest {
            tenant: granted.tenant.clone(),
            keys: keys.finish().into(),
            objects: objects.finish().into(),
            handles: handles.finish().into(),
            attributes: Default::default(),
        };
        one_code(self.call(FrameKind::Begin, &request.encode_to_vec(), &[])?)
    }

    /// Writes a part of the payload.
    pub fn write(&mut self, granted: &Granted, offset: u64, bytes: &[u8]) -> Result<(), ErrorCode> {
        let target = Target::of(&granted.handle, granted.object.id, granted.object.epoch);
        let mut body = Vec::new();
        target.to_wire(OpKind::Write, offset, bytes.len() as u64).encode(&mut body);
        let reply = self.call(FrameKind::Write, &body, bytes)?;
        code_of(u16::from_le_bytes([reply.body[0], reply.body[1]]))
    }

    /// Reads a part of the payload.
    pub fn read(&mut self, granted: &Granted, offset: u64, len: u64) -> Result<Vec<u8>, ErrorCode> {
        let target = Target::of(&granted.handle, granted.object.id, granted.object.epoch);
        let mut body = Vec::new();
        target.to_wire(OpKind::Read, offset, len).encode(&mut body);
        let reply = self.call(FrameKind::Read, &body, &[])?;
        code_of(u16::from_le_bytes([reply.body[0], reply.body[1]]))?;
        Ok(reply.payload)
    }

    /// Commits the record with this root.
    pub fn commit(&mut self, granted: &Granted, root: u64) -> Result<(), ErrorCode> {
        let Granted { object, handle, .. } = granted;
        let entry = CommitEntry {
            id: object.id,
            epoch: object.epoch,
            generation: handle.generation,
            segment: handle.segment,
            slot: handle.slot,
            root,
            capability: handle.capability,
            term: handle.term,
            flags: CommitFlags::NONE,
        };
        let mut entries = Vec::new();
        entry.encode(&mut entries);
        let body = v1::CommitRequest { entries: entries.into() }.encode_to_vec();
        one_code(self.call(FrameKind::Commit, &body, &[])?)
    }
}

fn code_of(number: u16) -> Result<(), ErrorCode> {
    ErrorCode::try_from(u32::from(number)).map_or(Ok(()), Err)
}

fn one_code(reply: Reply) -> Result<(), ErrorCode> {
    let message = v1::SlotOutcomes::decode(&reply.body[..]).expect("a valid reply");
    let outcomes = SlotOutcomes::from_wire(&message).expect("a valid reply");
    outcomes.codes.iter().next().expect("one slot").map_or(Ok(()), Err)
}
