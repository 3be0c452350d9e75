//! Test server: performs the handshake, replies by a rule, and injects configured faults.
//!
//! The rule: a key whose last byte is even exists; one whose last byte is 255 gets `Busy`; any other does not exist.
//! The entry of a look-up carries the key in its id, so that a caller can recognise its own reply.

#![allow(dead_code)] // each test file uses a part

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use moontide_proto::convert::{
    self, Bounded, ExistRequest, GetReplicaListRequest, ObjectListBuilder, ObjectListKind, Outcomes,
    Presence, RemoveRequest, Response, ResponseContext, Wire,
};
use moontide_proto::{
    Bitmap, BitmapBuilder, Capability, Codes, CodesBuilder, FRAME_HEADER_BYTES, FixedRecord, FrameHeader,
    FrameKind, Handle, HandleFlags, Hello, ObjectEntry, ObjectFlags, ProtocolVersions, v1,
};
use moontide_rt::sync::{Condvar, Mutex};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, Key, Medium, NodeId, ObjectId, SegmentId, SlotId, TenantGeneration,
    Term,
};

/// Handling of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    Reply,
    /// Keeps the reply until [`Server::release`].
    Hold,
    /// Sends no reply.
    Forget,
    /// Sends bytes that are not a header.
    Garbage,
    /// Sends a part of the reply, then closes the connection.
    Truncate,
    /// Sends a reply of another kind.
    WrongKind,
    /// Sends an Error frame.
    Reject(ErrorCode),
    /// Sends a reply with this code in its context.
    Fail(ErrorCode),
    /// Stops reading.
    StopReading,
}

/// Handling of a Hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Greeting {
    Accept,
    Reject(ErrorCode),
    Silence,
    Version(u16),
}

pub(crate) struct Server {
    pub(crate) address: String,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    plan: Mutex<Plan>,
    plan_changed: Condvar,
    greeting: Mutex<Greeting>,
    inflight_max: AtomicU32,
    stopping: AtomicBool,
    connections: AtomicUsize,
    open: AtomicUsize,
    frames: AtomicUsize,
    keys: AtomicUsize,
    cancels: AtomicUsize,
    held: Mutex<Held>,
    streams: Mutex<Vec<Arc<TcpStream>>>,
}

#[derive(Default)]
struct Held {
    replies: Vec<(Arc<TcpStream>, Vec<u8>)>,
    most: usize,
}

impl Server {
    pub(crate) fn start() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        let shared = Arc::new(Shared {
            plan: Mutex::new(Plan::Reply),
            plan_changed: Condvar::new(),
            greeting: Mutex::new(Greeting::Accept),
            inflight_max: AtomicU32::new(1000),
            stopping: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            frames: AtomicUsize::new(0),
            keys: AtomicUsize::new(0),
            cancels: AtomicUsize::new(0),
            held: Mutex::default(),
            streams: Mutex::default(),
        });
        let accepting = thread::spawn({
            let shared = shared.clone();
            move || accept(&listener, &shared)
        });
        Server { address, shared, accepting: Some(accepting) }
    }

    pub(crate) fn set_plan(&self, plan: Plan) {
        *self.shared.plan.lock() = plan;
        self.shared.plan_changed.notify_all();
    }

    pub(crate) fn set_greeting(&self, greeting: Greeting) {
        *self.shared.greeting.lock() = greeting;
    }

    pub(crate) fn set_inflight_max(&self, inflight_max: u32) {
        self.shared.inflight_max.store(inflight_max, SeqCst);
    }

    /// Replies from now on. Sends the held replies in reverse order.
    pub(crate) fn release(&self) {
        let mut held = self.shared.held.lock();
        self.set_plan(Plan::Reply);
        for (stream, reply) in held.replies.drain(..).rev() {
            let _ = (&*stream).write_all(&reply); // the client may have closed it
        }
    }

    /// Closes all connections and drops the held replies.
    pub(crate) fn hang_up(&self) {
        self.shared.held.lock().replies.clear();
        for stream in self.shared.streams.lock().drain(..) {
            let _ = stream.shutdown(Shutdown::Both); // the client may have closed it
        }
    }

    pub(crate) fn connections(&self) -> usize {
        self.shared.connections.load(SeqCst)
    }

    /// Returns the number of open connections.
    pub(crate) fn open(&self) -> usize {
        self.shared.open.load(SeqCst)
    }

    /// Returns the number of requests, without Hello and Cancel.
    pub(crate) fn frames(&self) -> usize {
        self.shared.frames.load(SeqCst)
    }

    pub(crate) fn keys(&self) -> usize {
        self.shared.keys.load(SeqCst)
    }

    pub(crate) fn cancels(&self) -> usize {
        self.shared.cancels.load(SeqCst)
    }

    /// Returns the largest number of replies held at once.
    pub(crate) fn held_most(&self) -> usize {
        self.shared.held.lock().most
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stopping.store(true, SeqCst);
        self.set_plan(Plan::Reply);
        self.hang_up();
        let _ = TcpStream::connect(&self.address); // wakes the accepting thread
        if let Some(accepting) = self.accepting.take() {
            accepting.join().expect("the server did not panic");
        }
    }
}

/// Waits until a condition holds; fails after one minute, which suffices on a busy machine.
pub(crate) fn eventually(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < until, "timed out: {what}");
        thread::sleep(Duration::from_micros(200));
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    let mut serving = Vec::new();
    for stream in listener.incoming() {
        let stream = Arc::new(stream.expect("a connection"));
        if shared.stopping.load(SeqCst) {
            break;
        }
        stream.set_nodelay(true).expect("a socket");
        shared.connections.fetch_add(1, SeqCst);
        shared.open.fetch_add(1, SeqCst);
        shared.streams.lock().push(stream.clone());
        let shared = shared.clone();
        serving.push(thread::spawn(move || {
            let _ = serve(&stream, &shared); // the client may disconnect at any time
            let _ = stream.shutdown(Shutdown::Both);
            shared.open.fetch_sub(1, SeqCst);
        }));
    }
    for thread in serving {
        thread.join().expect("the server did not panic");
    }
}

fn serve(stream: &Arc<TcpStream>, shared: &Shared) -> io::Result<()> {
    let mut input = io::BufReader::with_capacity(64 << 10, &**stream);
    loop {
        let mut header = [0; FRAME_HEADER_BYTES];
        input.read_exact(&mut header)?;
        let header = FrameHeader::decode(&header).expect("clients send valid headers");
        let mut body = vec![0; header.body_len as usize];
        input.read_exact(&mut body)?;
        match header.kind {
            FrameKind::Cancel => {
                shared.cancels.fetch_add(1, SeqCst);
                continue;
            }
            FrameKind::Hello => {
                greet(stream, shared, &header, &body)?;
                continue;
            }
            _ => shared.frames.fetch_add(1, SeqCst),
        };
        let plan = *shared.plan.lock();
        let fail = match plan {
            Plan::Fail(code) => Some(code),
            _ => None,
        };
        let reply = reply(&header, body, shared, fail);
        match plan {
            Plan::Reply | Plan::Fail(_) => (&**stream).write_all(&reply)?,
            Plan::Hold => hold(stream, shared, reply)?,
            Plan::Forget => {}
            Plan::Garbage => (&**stream).write_all(&[0xee; 200])?,
            Plan::Truncate => {
                (&**stream).write_all(&reply[..FRAME_HEADER_BYTES + 3])?;
                return Ok(());
            }
            Plan::WrongKind => (&**stream).write_all(&frame(FrameKind::PutEndReply, header.request, &[]))?,
            Plan::Reject(code) => {
                let mut header = FrameHeader::new(FrameKind::Error, header.request);
                header.status = Some(code);
                (&**stream).write_all(&with_body(header, b"not today"))?;
            }
            Plan::StopReading => {
                let mut plan = shared.plan.lock();
                shared.plan_changed.wait_while(&mut plan, |plan| *plan == Plan::StopReading);
            }
        }
    }
}

/// Holds a reply. The plan may have changed since it was read: then the reply is sent.
fn hold(stream: &Arc<TcpStream>, shared: &Shared, reply: Vec<u8>) -> io::Result<()> {
    let mut held = shared.held.lock();
    if *shared.plan.lock() != Plan::Hold {
        return (&**stream).write_all(&reply);
    }
    held.replies.push((stream.clone(), reply));
    held.most = held.most.max(held.replies.len());
    Ok(())
}

fn greet(stream: &TcpStream, shared: &Shared, header: &FrameHeader, body: &[u8]) -> io::Result<()> {
    let hello = Hello::decode_body(body).expect("clients send a valid Hello");
    assert!(hello.versions.negotiate(ProtocolVersions::CURRENT).is_some());
    let greeting = *shared.greeting.lock();
    let version = match greeting {
        Greeting::Silence => return Ok(()),
        Greeting::Reject(code) => {
            let mut header = FrameHeader::new(FrameKind::Error, header.request);
            header.status = Some(code);
            return (&mut &*stream).write_all(&with_body(header, b"rejected by the test"));
        }
        Greeting::Version(version) => version,
        Greeting::Accept => ProtocolVersions::CURRENT.max,
    };
    let ack = Hello {
        versions: ProtocolVersions { min: version, max: version },
        inflight_max: shared.inflight_max.load(SeqCst),
        ..hello
    };
    let mut bytes = Vec::new();
    ack.encode(&mut bytes);
    (&mut &*stream).write_all(&frame(FrameKind::HelloAck, header.request, &bytes))
}

fn frame(kind: FrameKind, request: u64, body: &[u8]) -> Vec<u8> {
    with_body(FrameHeader::new(kind, request), body)
}

fn with_body(mut header: FrameHeader, body: &[u8]) -> Vec<u8> {
    header.body_len = body.len() as u32;
    [&header.encode()[..], body].concat()
}

/// Returns the result of a key by the rule.
pub(crate) fn rule(key: Key<'_>) -> Result<bool, ErrorCode> {
    match key.as_bytes().last() {
        Some(255) => Err(ErrorCode::Busy),
        Some(byte) => Ok(byte.is_multiple_of(2)),
        None => unreachable!("no key is empty"),
    }
}

/// Returns the id in the entry of a look-up: the first bytes of the key.
pub(crate) fn id_of(key: Key<'_>) -> ObjectId {
    let mut id = [0; 16];
    let len = key.as_bytes().len().min(16);
    id[..len].copy_from_slice(&key.as_bytes()[..len]);
    ObjectId(id)
}

fn decoded<M: Bounded>(body: Vec<u8>) -> M {
    convert::decode(body.into()).expect("clients send valid messages")
}

fn reply(header: &FrameHeader, body: Vec<u8>, shared: &Shared, fail: Option<ErrorCode>) -> Vec<u8> {
    let context = ResponseContext { retry_after_ms: 7, ..ResponseContext::default() };
    let body = match header.kind {
        FrameKind::Exist => {
            let message: v1::ExistRequest = decoded(body);
            let request = ExistRequest::from_wire(&message).expect("valid");
            assert_eq!(request.context.timeout_ms, header.timeout_ms);
            shared.keys.fetch_add(request.keys.len(), SeqCst);
            let present: BitmapBuilder = request.keys.iter().map(|key| rule(key) == Ok(true)).collect();
            let (present, count) = (present.finish(), request.keys.len());
            let codes: CodesBuilder = request.keys.iter().map(|key| rule(key).err()).collect();
            let codes = codes.finish();
            let codes = Codes::decode(&codes, count).expect("codes");
            let presence = Presence {
                present: Bitmap::decode(&present, count).expect("a bitmap"),
                codes: codes.iter().any(|code| code.is_some()).then_some(codes),
            };
            encode(response(context, presence, fail))
        }
        FrameKind::GetReplicaList => {
            let message: v1::GetReplicaListRequest = decoded(body);
            let request = GetReplicaListRequest::from_wire(&message).expect("valid");
            shared.keys.fetch_add(request.keys.len(), SeqCst);
            if let Some(code) = fail {
                let failed = v1::ResponseContext { code: code as u32, ..context.to_wire() };
                prost::Message::encode_to_vec(&v1::GetReplicaListResponse {
                    context: Some(failed),
                    ..Default::default()
                })
            } else {
                let mut list = ObjectListBuilder::with_capacity(ObjectListKind::Response, request.keys.len());
                for key in request.keys.iter() {
                    let pushed = match rule(key) {
                        Ok(true) => list.push(entry(key, request.lease_ms), &[handle(key)], &[]),
                        Ok(false) => list.push(ObjectEntry::failed(ErrorCode::NotFound, 0), &[], &[]),
                        Err(code) => list.push(ObjectEntry::failed(code, 0), &[], &[]),
                    };
                    pushed.expect("an entry");
                }
                let fields = list.finish();
                prost::Message::encode_to_vec(&v1::GetReplicaListResponse {
                    context: Some(context.to_wire()),
                    objects: fields.objects,
                    handles: fields.handles,
                    attributes: fields.attributes,
                })
            }
        }
        FrameKind::Remove => {
            let message: v1::RemoveRequest = decoded(body);
            let request = RemoveRequest::from_wire(&message).expect("valid");
            let codes: CodesBuilder = request.keys.iter().map(|key| rule(key).err()).collect();
            let codes = codes.finish();
            let codes = Codes::decode(&codes, request.keys.len()).expect("codes");
            encode(response(context, Outcomes { codes }, fail))
        }
        kind => panic!("the tests send no {kind:?}"),
    };
    frame(header.kind.reply().expect("a request"), header.request, &body)
}

fn response<'a, T>(context: ResponseContext<'a>, body: T, fail: Option<ErrorCode>) -> Response<'a, T> {
    match fail {
        Some(code) => Response::error(context, code),
        None => Response::new(context, body),
    }
}

fn encode<'a, T: Wire<'a>>(reply: T) -> Vec<u8> {
    convert::encode(&reply).expect("a valid reply")
}

fn entry(key: Key<'_>, lease_ms: u32) -> ObjectEntry {
    ObjectEntry {
        code: None,
        flags: ObjectFlags::NONE,
        valid_ms: lease_ms,
        id: id_of(key),
        epoch: Epoch::ZERO,
        object_len: 100,
        root: 1,
        first_handle: 0,
        handle_count: 1,
        replica_count: 1,
        format: 0,
        tenant_generation: TenantGeneration(0),
        id_key: 1,
    }
}

fn handle(key: Key<'_>) -> Handle {
    Handle {
        node: NodeId(key.as_bytes().len() as u64),
        segment: SegmentId(0),
        slot: SlotId(0),
        generation: Generation(0),
        extent: Extent::default(),
        payload_offset: 0,
        stripe_offset: 0,
        stripe_len: 100,
        stripe_root: 1,
        capability: Capability([0; 16]),
        term: Term::ZERO,
        stripe_index: 0,
        stripe_count: 1,
        replica: 0,
        medium: Medium::Disk,
        flags: HandleFlags::NONE,
    }
}
