//! All tests of `tcp.rs` over TLS, and what TLS refuses.

#[path = "tcp.rs"]
mod over_tls;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_auth::testing::{Authority, Validity};
use moontide_auth::{Credentials, Role};
use moontide_proto::FrameKind;
use moontide_transfer::sample::SampleNodeConfig;
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::{Engine, Metrics, Op, TransferError};
use moontide_types::ErrorCode;
use over_tls::common::{self, AUTHORITY, TestNode, get};

fn node() -> TestNode {
    TestNode::new(SampleNodeConfig { record_bytes: 1000, readable: 1, writable: 0, ..Default::default() })
}

/// Tries to get a record with these credentials. Returns the error.
fn refused(node: &TestNode, credentials: Option<Arc<Credentials>>) -> TransferError {
    let config = TcpConfig { credentials, ..TcpConfig::default() };
    let engine = TcpEngine::new(config, Metrics::new());
    let deadline = Instant::now() + Duration::from_secs(2);
    match engine.connect(&node.peer(), deadline) {
        Err(error) => error,
        Ok(link) => {
            let mut bytes = vec![0; 1000];
            let mut ops = [Op::get(node.config().target(0), 0, &mut bytes)];
            moontide_transfer::run(&*link, &mut ops, deadline).expect_err("the peer is refused")
        }
    }
}

#[test]
fn peers_without_a_valid_certificate_of_the_cluster_are_refused() {
    let node = node();
    let (authority, directory) = &*AUTHORITY;
    let identity = "spiffe://test/moontide/cluster/operator";
    let ca = authority.issue(directory, "right", Role::Operator).ca;
    let load = |authority: &Authority, name: &str, identity: &str, validity| {
        let files = authority.issue_identity(directory, name, identity, validity);
        // The client trusts the node, so that only its own certificate is wrong.
        std::fs::copy(&ca, &files.ca).unwrap();
        Some(Credentials::load(files).unwrap())
    };
    let cases = [
        ("without TLS", None),
        ("wrong CA", load(&Authority::new(), "other-ca", identity, Validity::Now)),
        ("expired", load(authority, "expired", identity, Validity::Past)),
        ("not valid yet", load(authority, "future", identity, Validity::Future)),
        ("other cluster", load(authority, "cluster", "spiffe://test/moontide/else/operator", Validity::Now)),
        ("other domain", load(authority, "domain", "spiffe://else/moontide/cluster/operator", Validity::Now)),
    ];
    for (case, credentials) in cases {
        let error = refused(&node, credentials);
        assert!(
            matches!(
                error.code(),
                ErrorCode::Unauthenticated | ErrorCode::ConnectionLost | ErrorCode::Unreachable
            ),
            "{case}: {error}"
        );
    }
    // The node still serves.
    let link = node.link(1);
    assert!(get(&*link, node.config(), 0).unwrap().is_ok());
}

#[test]
fn frames_are_for_the_roles_of_the_table() {
    let node = node();
    let outcome = |role: Role, kind: FrameKind| {
        let config = TcpConfig { credentials: common::credentials(role), ..TcpConfig::default() };
        let deadline = Instant::now() + Duration::from_secs(5);
        let link = TcpEngine::new(config, Metrics::new()).connect(&node.peer(), deadline).unwrap();
        moontide_transfer::call(&*link, kind, vec![], deadline).map_err(|error| error.code())
    };
    let denied = Err(ErrorCode::PermissionDenied);
    for kind in [FrameKind::Begin, FrameKind::Commit] {
        assert_eq!(outcome(Role::Node(moontide_types::NodeId(9)), kind), denied, "{kind:?}");
        for role in [Role::Tenant("acme".into()), Role::Operator] {
            assert_ne!(outcome(role, kind), denied, "{kind:?}");
        }
    }
}

#[test]
fn records_are_for_the_tenant_of_the_certificate_whatever_the_capability() {
    let config =
        SampleNodeConfig { record_bytes: 1000, readable: 1, writable: 1, begun: true, ..Default::default() };
    let node = TestNode::new(config);
    let bytes = node.config().content(1);
    let outcomes = |role: Role| {
        let config = TcpConfig { credentials: common::credentials(role), ..TcpConfig::default() };
        let deadline = Instant::now() + Duration::from_secs(5);
        let link = TcpEngine::new(config, Metrics::new()).connect(&node.peer(), deadline).unwrap();
        let read = get(&*link, node.config(), 0).unwrap().map(|_| ());
        let mut ops = [Op::put(node.config().target(1), 0, &bytes)];
        moontide_transfer::run(&*link, &mut ops, deadline).unwrap();
        (read, ops[0].outcome().unwrap())
    };
    let denied = Err(ErrorCode::PermissionDenied);
    assert_eq!(outcomes(Role::Tenant("other".into())), (denied, denied));
    for role in [Role::Tenant("default".into()), Role::Operator] {
        assert_eq!(outcomes(role.clone()), (Ok(()), Ok(())), "{role}");
    }
}

#[test]
fn peer_that_sends_no_tls_is_disconnected() {
    let node = node();
    let mut stream = TcpStream::connect(node.server.addresses()[0]).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(&[b'M'; 200]).unwrap();
    let mut answer = vec![];
    // An alert, then the end; or a reset, because bytes were not read.
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.len() < 100, "{answer:?}");
}
