//! Sessions of nodes: who can open one, whose term counts, and that no process can guess one.

mod support;

use std::sync::Arc;

use moontide_master::{Role, Service, ServiceConfig, SessionStream};
use moontide_proto::v1;
use moontide_types::{ErrorCode, SessionId, SystemClock, Term};
use support::{context, put_start};

/// Boot ids of two processes.
const OURS: u64 = 0xa1;
const OTHER: u64 = 0xb2;

/// Returns a single master with term 1.
fn service() -> Arc<Service> {
    Service::new(ServiceConfig::for_tests(), Arc::new(SystemClock))
}

fn code(context: Option<&v1::ResponseContext>) -> Option<ErrorCode> {
    let code = context.expect("every response has a context").code;
    (code != 0).then(|| ErrorCode::try_from(code).unwrap())
}

fn open(service: &Service, boot_id: u64, highest_term: u32) -> Result<u64, ErrorCode> {
    let response = service.open_session(&v1::OpenSessionRequest {
        context: context(),
        node: 4,
        boot_id,
        topology: Some(v1::Topology::default()),
        protocol_min: 2,
        protocol_max: 2,
        highest_term,
        ..Default::default()
    });
    code(response.context.as_ref()).map_or(Ok(response.session), Err)
}

fn with_session(session: u64) -> Option<v1::RequestContext> {
    context().map(|context| v1::RequestContext { session, ..context })
}

/// Mounts a segment that has this term.
fn mount(service: &Service, session: u64, segment: u32, term: u32) -> Option<ErrorCode> {
    let spec = v1::SegmentSpec {
        segment,
        generation: 1,
        medium: v1::Medium::Memory as i32,
        units: 1_000,
        slots: 10,
        term,
        ..Default::default()
    };
    let segments = vec![spec];
    let request = v1::MountSegmentsRequest {
        context: with_session(session),
        segments,
        capability_rotation: 1,
        ..Default::default()
    };
    let response = service.mount_segments(&request);
    code(response.context.as_ref()).or_else(|| {
        let code = response.results[0].code;
        (code != 0).then(|| ErrorCode::try_from(code).unwrap())
    })
}

fn heartbeat(
    stream: &SessionStream,
    session: u64,
    sequence: u64,
    highest_term: u32,
) -> Result<(), ErrorCode> {
    let heartbeat = v1::Heartbeat { heartbeat_id: sequence, ..Default::default() };
    let body = Some(v1::node_message::Body::Heartbeat(heartbeat));
    stream.receive(&v1::NodeMessage { session, sequence, highest_term, body })
}

/// Whether a client is served.
fn serves(service: &Service) -> bool {
    code(service.put_start(&put_start(&["key"], 100)).context.as_ref()).is_none()
}

#[test]
fn node_with_a_stream_is_not_taken_over_by_another_process() {
    let service = service();
    let session = open(&service, OURS, 0).unwrap();
    assert_eq!(mount(&service, session, 0, 0), None);
    let stream = service.attach(SessionId(session)).unwrap();
    assert_eq!(open(&service, OTHER, 0), Err(ErrorCode::Retry));
    assert_eq!(heartbeat(&stream, session, 1, 0), Ok(()), "the session goes on");
    // The same process opens a new session and a new stream; the end of the old stream changes nothing.
    let again = open(&service, OURS, 0).unwrap();
    let newer = service.attach(SessionId(again)).unwrap();
    drop(stream);
    assert_eq!(open(&service, OTHER, 0), Err(ErrorCode::Retry));
    // The process was killed, and its connection is closed: the next one is registered at once.
    drop(newer);
    assert!(open(&service, OTHER, 0).is_ok());
}

#[test]
fn guessed_and_foreign_sessions_are_refused() {
    let service = service();
    let session = open(&service, OURS, 0).unwrap();
    assert_eq!(mount(&service, session, 0, 0), None);
    // As ids were formed before: the master's term and a count.
    for guess in (0..4).map(|number| 1 << 40 | number).chain([0, session ^ 1, session + 1, u64::MAX]) {
        let request = v1::UnmountSegmentsRequest { context: with_session(guess), segments: vec![0] };
        let unmounted = code(service.unmount_segments(&request).context.as_ref());
        assert_eq!(unmounted, Some(ErrorCode::StaleSession), "{guess:x}");
        assert_eq!(mount(&service, guess, 1, 0), Some(ErrorCode::StaleSession), "{guess:x}");
        assert!(service.attach(SessionId(guess)).is_none(), "{guess:x}");
    }
    // A stream accepts messages of its own session only.
    let stream = service.attach(SessionId(session)).unwrap();
    assert_eq!(heartbeat(&stream, session ^ 1, 1, 0), Err(ErrorCode::StaleSession));
    assert_eq!(heartbeat(&stream, session, 1, 0), Ok(()));
}

#[test]
fn single_master_serves_on_after_a_stranger_names_a_newer_term() {
    // Failure: one call made a master step down. Cause: any process could register with the highest term.
    // Fix: a term counts if it comes from a process whose segments the master has mounted.
    let service = service();
    let session = open(&service, OURS, 0).unwrap();
    assert_eq!(mount(&service, session, 0, 0), None);
    let newest = Term::MAX.get();
    assert_eq!(open(&service, OTHER, newest), Err(ErrorCode::StaleTerm));
    // A process with a session, but without a segment here.
    let stranger = service.open_session(&v1::OpenSessionRequest {
        context: context(),
        node: 5,
        boot_id: OTHER,
        topology: Some(v1::Topology::default()),
        protocol_min: 2,
        protocol_max: 2,
        ..Default::default()
    });
    assert_eq!(mount(&service, stranger.session, 0, newest), Some(ErrorCode::StaleTerm));
    let stream = service.attach(SessionId(stranger.session)).unwrap();
    assert_eq!(heartbeat(&stream, stranger.session, 1, newest), Err(ErrorCode::StaleTerm));
    assert_eq!(service.role(), Role::Leader { term: Term::new(1).unwrap() });
    assert!(serves(&service));
}

#[test]
fn single_master_steps_down_when_its_own_node_names_a_newer_term() {
    // Another single master, with a copy of the data directory, has mounted the segments since.
    type Proof = fn(&Arc<Service>, u64) -> Option<ErrorCode>;
    let proofs: [Proof; 3] = [
        |service, _| open(service, OURS, 2).err(),
        |service, session| mount(service, session, 1, 2),
        |service, session| heartbeat(&service.attach(SessionId(session)).unwrap(), session, 1, 2).err(),
    ];
    for proof in proofs {
        let service = service();
        let session = open(&service, OURS, 0).unwrap();
        assert_eq!(mount(&service, session, 0, 1), None);
        assert_eq!(proof(&service, session), Some(ErrorCode::WrongMaster));
        assert_eq!(service.role(), Role::SteppedDown { seen: Term::new(2).unwrap() });
        assert!(!serves(&service));
    }
}
