//! Each call of the table of rights, over real sockets and TLS, by every kind of peer: those that may make it are answered, and no
//! other one.

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

mod support;

#[path = "rights/caller.rs"]
mod caller;
#[path = "rights/calls.rs"]
mod calls;
#[path = "rights/credentials.rs"]
mod credentials;

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use caller::{Outcome, Request, Servers, make, node_page};
use calls::{Subject, put_end, put_revoke};
use credentials::{Credential, Flaw, Issuer};
use moontide_auth::rustls::ClientConfig;
use moontide_auth::{Call, Caller, Credentials, Role};
use moontide_master::{MasterConfig, Server};
use moontide_node::{DiskConfig, Node, NodeConfig};
use moontide_proto::{Capability, FrameKind, v1};
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::{Engine, Link, Metrics};
use moontide_types::{ErrorCode, NodeId};
use support::*;

/// Id of the node that runs.
const NODE: NodeId = NodeId(1);
/// A node that registers, and one that acts for it.
const OWN_NODE: NodeId = NodeId(9);
const OTHER_NODE: NodeId = NodeId(8);
/// A tenant, and one that acts for it.
const OWN_TENANT: &str = "default";
const OTHER_TENANT: &str = "beta";

/// Calls of the data plane. Each operation needs a capability, too.
const DATA_PLANE: [Call; 7] =
    [Call::Begin, Call::Write, Call::Commit, Call::Read, Call::Load, Call::Release, Call::Describe];

fn roles() -> Vec<Role> {
    vec![
        Role::Master,
        Role::Node(OWN_NODE),
        Role::Operator,
        Role::Scraper,
        Role::Tenant(OWN_TENANT.into()),
        Role::Tenant(OTHER_TENANT.into()),
    ]
}

/// A master, a node with a disk, and those who issue certificates.
struct Cluster {
    runtime: tokio::runtime::Runtime,
    issuer: Issuer,
    link: Arc<dyn Link>,
    servers: Servers,
    _node: Node,
    master: Server,
    _disk: TempDir,
}

impl Cluster {
    fn start(capability_rotation_ms: u32) -> Cluster {
        init_logs();
        let (issuer, disk) = (Issuer::new(), TempDir::new());
        let files = issuer.issue(&Role::Master);
        let master = Server::start(MasterConfig {
            ca: Some(files.ca),
            cert: Some(files.cert),
            key: Some(files.key),
            capability_rotation_ms,
            ..master_config()
        })
        .unwrap();
        let files = issuer.issue(&Role::Node(NODE));
        let node = Node::start(NodeConfig {
            ca: Some(files.ca),
            cert: Some(files.cert),
            key: Some(files.key),
            disk: Some(DiskConfig { staging_bytes: 32 << 20, ..DiskConfig::new(disk.0.clone()) }),
            ..node_config(master.addresses().grpc)
        })
        .unwrap();
        assert!(node.wait_until_mounted(TIMEOUT));
        // An operator writes records of all tenants.
        let credentials = Credentials::load(issuer.issue(&Role::Operator)).unwrap();
        let config = TcpConfig { credentials: Some(credentials), ..TcpConfig::default() };
        let link = TcpEngine::new(config, Metrics::new()).connect(&peer(&node), deadline()).unwrap();
        let addresses = master.addresses();
        let servers = Servers {
            grpc: addresses.grpc,
            frames: addresses.frame,
            master_pages: addresses.admin,
            data: node.addresses().tcp[0],
            node_pages: node.addresses().admin.unwrap(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Cluster { runtime, issuer, link, servers, _node: node, master, _disk: disk }
    }

    fn subject<'a>(&'a self, client: &'a Client<'a>, next_key: &'a Cell<u32>) -> Subject<'a> {
        Subject {
            master: &self.master,
            client,
            link: &*self.link,
            tenant: OWN_TENANT,
            node: OWN_NODE,
            capability: None,
            next_key,
        }
    }

    fn make(&self, client: Option<&ClientConfig>, request: Request) -> Outcome {
        self.runtime.block_on(make(self.servers, client, request))
    }
}

/// How a request must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// The table allows it.
    Handled,
    /// The peer is in the cluster, and has no right to it.
    Denied,
    /// The peer is not in the cluster: it gets no answer at all.
    Closed,
}

impl Expected {
    fn is(self, call: Call, outcome: Outcome) -> bool {
        match (self, outcome) {
            // The record is not on the disk, and not in staging memory.
            (Expected::Handled, Outcome::Handled(_)) if matches!(call, Call::Load | Call::Release) => true,
            (Expected::Handled, Outcome::Handled(code)) => !DATA_PLANE.contains(&call) || code.is_none(),
            (Expected::Denied, Outcome::Denied) | (Expected::Closed, Outcome::Closed) => true,
            _ => false,
        }
    }
}

fn expected(call: Call, request: &Request, credential: &Credential) -> Expected {
    let by_table = |may| if may { Expected::Handled } else { Expected::Denied };
    match credential {
        Credential::Valid(role) => by_table(role.may(call)),
        Credential::NoCertificate if request.is_page() => by_table(Caller::Anonymous.check(call).is_ok()),
        Credential::NoCertificate | Credential::NoTls | Credential::Flawed(..) => Expected::Closed,
    }
}

/// Who makes a call in place of whom it is for: another tenant, or another node.
fn impostor(call: Call, request: &Request) -> Option<Role> {
    let (tenant, node) = (Role::Tenant(OTHER_TENANT.into()), Role::Node(OTHER_NODE));
    match request {
        Request::Grpc(_) if tenant.may(call) => Some(tenant),
        Request::Grpc(_) if node.may(call) => Some(node),
        Request::MasterFrame(frame) if frame.kind != FrameKind::Ping => Some(tenant),
        _ => None,
    }
}

#[test]
fn calls_are_answered_to_the_roles_of_the_table_alone() {
    let began = Instant::now();
    // No key changes during the test.
    let cluster = Cluster::start(MasterConfig::default().capability_rotation_ms);
    let (client, next_key) = (Client::new(&cluster.master), Cell::new(0));
    let own = cluster.subject(&client, &next_key);
    let other = Subject { tenant: OTHER_TENANT, ..cluster.subject(&client, &next_key) };

    let mut credentials = vec![Credential::NoTls, Credential::NoCertificate];
    credentials.extend(roles().into_iter().map(Credential::Valid));
    for flaw in Flaw::ALL {
        credentials.extend(roles().into_iter().map(|role| Credential::Flawed(flaw, role)));
    }
    let clients: Vec<Option<ClientConfig>> =
        credentials.iter().map(|credential| cluster.issuer.client(credential)).collect();
    let impostors: Vec<(Role, Option<ClientConfig>)> =
        [Role::Tenant(OTHER_TENANT.into()), Role::Node(OTHER_NODE)]
            .map(|role| (role.clone(), cluster.issuer.client(&Credential::Valid(role))))
            .into();

    let (mut outcomes, mut by_table, mut wrong) = (vec![], 0, vec![]);
    let mut cell =
        |call: Call, who: String, request: Request, client: Option<&ClientConfig>, expected: Expected| {
            let protocol = request.protocol();
            let outcome = cluster.make(client, request);
            outcomes.push((expected, outcome));
            if !expected.is(call, outcome) {
                wrong.push(format!("{call:?} ({protocol}) with {who}: {outcome:?}, expected {expected:?}"));
            }
        };
    for &call in Call::ALL {
        let protocols = own.requests(call).len();
        by_table += protocols * roles().iter().filter(|role| role.may(call)).count();
        let pages = own.requests(call).iter().filter(|request| request.is_page()).count();
        by_table += if Caller::Anonymous.check(call).is_ok() { pages } else { 0 };
        for (credential, client) in credentials.iter().zip(&clients) {
            // A certificate with a flaw would allow the call otherwise: a server that does not see the flaw is found.
            if matches!(credential, Credential::Flawed(_, role) if !role.may(call)) {
                continue;
            }
            let subject = match credential {
                Credential::Valid(Role::Tenant(name)) if **name == *OTHER_TENANT => &other,
                _ => &own,
            };
            for request in subject.requests(call) {
                let expected = expected(call, &request, credential);
                cell(call, credential.to_string(), request, client.as_ref(), expected);
            }
        }
        for request in own.requests(call) {
            let Some(role) = impostor(call, &request) else { continue };
            let (_, client) = impostors.iter().find(|(of, _)| *of == role).unwrap();
            cell(
                call,
                format!("certificate of {role}, for another"),
                request,
                client.as_ref(),
                Expected::Denied,
            );
        }
    }
    let count = |is: &dyn Fn(Expected, Outcome) -> bool| {
        outcomes.iter().filter(|&&(expected, outcome)| is(expected, outcome)).count()
    };
    let handled = count(&|_, outcome| matches!(outcome, Outcome::Handled(_)));
    let denied = count(&|_, outcome| outcome == Outcome::Denied);
    let closed = count(&|_, outcome| outcome == Outcome::Closed);
    let admitted =
        count(&|expected, outcome| expected != Expected::Handled && matches!(outcome, Outcome::Handled(_)));
    println!(
        "{} cells of {} calls in {:?}: {handled} handled, of {by_table} that the table allows; {denied} denied, {closed} closed \
         without an answer; {admitted} admitted that should not be",
        outcomes.len(),
        Call::ALL.len(),
        began.elapsed()
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!((handled, admitted), (by_table, 0), "cells that were handled");
    assert_eq!(denied + closed, outcomes.len() - by_table, "all others were refused");
}

#[test]
fn tenant_cannot_end_or_revoke_puts_of_another_tenant() {
    // Failure: a tenant completed or revoked the puts of another one: the ids of all objects can be computed by every client, and
    // versions count up. Cause: both calls name objects by id, and the tenant of the request was not compared with that of the
    // object. Fix: the master compares them.
    let cluster = Cluster::start(MasterConfig::default().capability_rotation_ms);
    let (client, next_key) = (Client::new(&cluster.master), Cell::new(0));
    let own = cluster.subject(&client, &next_key);
    let victim = own.granted();
    let context_of =
        |tenant: &str| context().map(|context| v1::RequestContext { tenant: tenant.to_owned(), ..context });
    let service = cluster.master.service();
    // As if there was no such object: a tenant must not learn what others have.
    let refused = Some(ErrorCode::Gone);
    let other = || context_of(OTHER_TENANT);
    assert_eq!(one_code(&service.put_revoke(&put_revoke(other(), &victim))), refused);
    assert_eq!(one_code(&service.put_end(&put_end(other(), &victim, 0))), refused);
    assert!(!client.exists(&victim.name));
    // Its writer can go on.
    assert_eq!(begin(&*cluster.link, &victim), None);
    let root = write(&*cluster.link, &victim, &content(1, calls::LEN));
    assert_eq!(commit(&*cluster.link, &victim, root, moontide_proto::CommitFlags::NONE), None);
    assert_eq!(client.put_end(&victim, root), None);
    assert!(client.get(&*cluster.link, &victim.name).unwrap() == content(1, calls::LEN));
    // The same calls, each by the tenant of its object.
    let own_put = client.put_start_in(other(), "own", 100, false).unwrap();
    assert_eq!(one_code(&service.put_revoke(&put_revoke(other(), &own_put))), None);
    let own_put = client.put_start_in(other(), "another", 100, false).unwrap();
    assert_eq!(one_code(&service.put_end(&put_end(other(), &own_put, 0))), None);
}

#[test]
fn records_of_a_tenant_are_refused_to_another_one_that_has_their_capabilities() {
    let cluster = Cluster::start(MasterConfig::default().capability_rotation_ms);
    let (client, next_key) = (Client::new(&cluster.master), Cell::new(0));
    let own = cluster.subject(&client, &next_key);
    let made = |tenant: &str, request| {
        let tls = cluster.issuer.client(&Credential::Valid(Role::Tenant(tenant.into())));
        cluster.make(tls.as_ref(), request)
    };
    // Records on the disk and in staging memory: `capabilities.rs`. Nodes describe those of all tenants.
    for call in [Call::Begin, Call::Write, Call::Commit, Call::Read] {
        let request = || own.requests(call).pop().unwrap();
        let refused = made(OTHER_TENANT, request());
        let is_refused =
            matches!(refused, Outcome::Denied | Outcome::Handled(Some(ErrorCode::PermissionDenied)));
        assert!(is_refused, "{call:?}: {refused:?}");
        assert_eq!(made(OWN_TENANT, request()), Outcome::Handled(None), "{call:?}");
    }
}

#[test]
fn forged_and_retired_capabilities_are_refused_over_tls() {
    let cluster = Cluster::start(1_000);
    let (client, next_key) = (Client::new(&cluster.master), Cell::new(0));
    let role_of = |call| if call == Call::Describe { Role::Node(OWN_NODE) } else { Role::Operator };
    let made = |call: Call, subject: &Subject<'_>| -> Request {
        let mut requests = subject.requests(call);
        assert_eq!(requests.len(), 1, "{call:?}");
        requests.pop().unwrap()
    };
    let outcome = |call: Call, request: Request| {
        let tls = cluster.issuer.client(&Credential::Valid(role_of(call)));
        cluster.make(tls.as_ref(), request)
    };
    let refused = Outcome::Handled(Some(ErrorCode::PermissionDenied));
    // Requests with what the master has granted; they are sent when its key is retired.
    let retired: Vec<(Call, Request)> =
        DATA_PLANE.map(|call| (call, made(call, &cluster.subject(&client, &next_key)))).into();
    let scraper = cluster.issuer.client(&Credential::Valid(Role::Scraper));
    let keys_held = || {
        let page = cluster.runtime.block_on(node_page(cluster.servers, scraper.as_ref(), "GET /metrics"));
        let name = "moontide_node_capability_keys_total ";
        let line = page.lines().find_map(|line| line.strip_prefix(name)).expect("a counter of keys");
        line.trim().parse::<u64>().unwrap()
    };
    let first = keys_held();
    for capability in [Capability::default(), Capability([0x5a; 16]), Capability([0xff; 16])] {
        for call in DATA_PLANE {
            let subject = Subject { capability: Some(capability), ..cluster.subject(&client, &next_key) };
            assert_eq!(outcome(call, made(call, &subject)), refused, "{call:?} with {capability:?}");
        }
    }
    eventually("three more keys", || keys_held() >= first + 3);
    for (call, request) in retired {
        assert_eq!(outcome(call, request), refused, "{call:?} with the capability of a retired key");
    }
}
