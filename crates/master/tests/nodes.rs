//! Which nodes there are: what callers are told, and when it changes.

mod support;

use moontide_proto::convert::{Address, NodeDetail, NodeList, Topology, Wire};
use moontide_proto::limits::{ADDRESS_BYTES_MAX, ADDRESSES_MAX, ENGINE_BYTES_MAX, NODES_MAX};
use moontide_proto::v1::{self, master_nodes_client::MasterNodesClient};
use moontide_types::bounds::REQUEST_BYTES_MAX;
use moontide_types::{ErrorCode, NodeId, SessionId};
use prost::Message;
use support::*;

fn registration(node: u64, addresses: Vec<v1::Address>) -> v1::OpenSessionRequest {
    v1::OpenSessionRequest {
        context: context(),
        node,
        boot: 1,
        addresses,
        topology: Some(v1::Topology { host: format!("host-{node}"), rack: "r".into(), zone: String::new() }),
        protocol_min: 1,
        protocol_max: 1,
        highest_term: 0,
    }
}

fn address(engine: &str, address: &str) -> v1::Address {
    v1::Address { engine: engine.into(), address: address.into() }
}

#[test]
fn registered_nodes_are_told_with_their_addresses() {
    let server = start();
    let runtime = runtime();
    let (mut grpc, mut nodes) = runtime.block_on(async {
        let nodes = MasterNodesClient::new(channel(server.addresses().grpc).await);
        (grpc(server.addresses().grpc).await, nodes)
    });
    let mut open = |node, addresses| {
        let opened =
            runtime.block_on(nodes.open_session(registration(node, addresses))).unwrap().into_inner();
        SessionId(opened.session)
    };
    let mut ask =
        |context| runtime.block_on(grpc.get_nodes(v1::GetNodesRequest { context })).unwrap().into_inner();

    let none = ask(context());
    assert_eq!(NodeList::from_wire(&none).unwrap().into_result().unwrap().nodes, []);
    let late = open(9, vec![address("tcp", "10.0.0.9:7000"), address("shm", "boot:/run/node")]);
    let first = open(4, vec![]);
    // Registered again, elsewhere: only that counts.
    let again = open(4, vec![address("tcp", "10.0.0.4:7001")]);
    assert_ne!(first, again);

    let answer = ask(context());
    let list = NodeList::from_wire(&answer).unwrap();
    assert_eq!(list.context().term, server.term());
    let detail = |node, session, host, addresses| NodeDetail {
        node: NodeId(node),
        session,
        addresses,
        topology: Topology { host, rack: "r", zone: "" },
    };
    let near = Address { engine: "shm", address: "boot:/run/node" };
    let expected = [
        detail(4, again, "host-4", vec![Address { engine: "tcp", address: "10.0.0.4:7001" }]),
        detail(9, late, "host-9", vec![Address { engine: "tcp", address: "10.0.0.9:7000" }, near]),
    ];
    assert_eq!(list.into_result().unwrap().nodes, expected);

    let refused = ask(None);
    let code = NodeList::from_wire(&refused).unwrap().into_result().unwrap_err().code;
    assert_eq!(code, Some(ErrorCode::InvalidArgument));
}

#[test]
fn more_nodes_than_an_answer_holds_are_left_off() {
    let server = start();
    let service = server.service();
    let longest = address(&"e".repeat(ENGINE_BYTES_MAX), &"a".repeat(ADDRESS_BYTES_MAX));
    // 9 KiB each: 16 MiB hold 1,854 of them.
    for node in 1..=2_000 {
        service.open_session(&registration(node, vec![longest.clone(); ADDRESSES_MAX]));
    }
    let answer = service.get_nodes(&v1::GetNodesRequest { context: context() });
    assert!(answer.encoded_len() <= REQUEST_BYTES_MAX && answer.encoded_len() > REQUEST_BYTES_MAX - 20_000);
    assert!(NodeList::from_wire(&answer).unwrap().body().is_some_and(|list| list.nodes.len() > 1_800));
    // Short ones, of which there may be as many as the count allows.
    for node in 1..=NODES_MAX as u64 + 1 {
        service.open_session(&registration(node, vec![]));
    }
    let answer = service.get_nodes(&v1::GetNodesRequest { context: context() });
    assert_eq!(NodeList::from_wire(&answer).unwrap().body().unwrap().nodes.len(), NODES_MAX);
}
