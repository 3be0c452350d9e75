//! GetNodes: registered nodes with their addresses, and its limits.

mod support;

use moontide_proto::convert::{Address, GetNodesResponse, NodeDetail, Topology, Wire};
use moontide_proto::limits::{ADDRESS_BYTES_MAX, ADDRESSES_MAX, ENGINE_BYTES_MAX, NODES_MAX};
use moontide_proto::v1::{self, master_nodes_client::MasterNodesClient};
use moontide_types::limits::REQUEST_BYTES_MAX;
use moontide_types::{ErrorCode, NodeId};
use prost::Message;
use support::*;

fn registration(node: u64, addresses: Vec<v1::Address>) -> v1::OpenSessionRequest {
    v1::OpenSessionRequest {
        context: context(),
        node,
        boot_id: 1,
        addresses,
        topology: Some(v1::Topology { host: format!("host-{node}"), rack: "r".into(), zone: String::new() }),
        protocol_min: 2,
        protocol_max: 2,
        highest_term: 0,
    }
}

fn address(engine: &str, address: &str) -> v1::Address {
    v1::Address { engine: engine.into(), address: address.into() }
}

#[test]
fn get_nodes_returns_registered_nodes_with_addresses() {
    let server = start();
    let runtime = runtime();
    let (mut grpc, mut nodes) = runtime.block_on(async {
        let nodes = MasterNodesClient::new(channel(server.addresses().grpc).await);
        (grpc(server.addresses().grpc).await, nodes)
    });
    let mut open = |node, addresses| {
        let opened =
            runtime.block_on(nodes.open_session(registration(node, addresses))).unwrap().into_inner();
        assert_ne!(opened.session, 0);
        opened.session
    };
    let mut get_nodes =
        |context| runtime.block_on(grpc.get_nodes(v1::GetNodesRequest { context })).unwrap().into_inner();

    let none = get_nodes(context());
    assert_eq!(GetNodesResponse::from_wire(&none).unwrap().into_result().unwrap().nodes, []);
    open(9, vec![address("tcp", "10.0.0.9:7000"), address("shm", "boot:/run/node")]);
    let first = open(4, vec![]);
    // Registered again with another address: only the new session is returned.
    let again = open(4, vec![address("tcp", "10.0.0.4:7001")]);
    assert_ne!(first, again);

    let response = get_nodes(context());
    let list = GetNodesResponse::from_wire(&response).unwrap();
    assert_eq!(list.context().term, server.term());
    // Registered as the third and as the first. The response contains no session.
    let detail = |node, number, host, addresses| NodeDetail {
        node: NodeId(node),
        registration: u64::from(server.term().get()) << 40 | number,
        addresses,
        topology: Topology { host, rack: "r", zone: "" },
        draining: false,
    };
    let shm = Address { engine: "shm", address: "boot:/run/node" };
    let expected = [
        detail(4, 3, "host-4", vec![Address { engine: "tcp", address: "10.0.0.4:7001" }]),
        detail(9, 1, "host-9", vec![Address { engine: "tcp", address: "10.0.0.9:7000" }, shm]),
    ];
    assert_eq!(list.into_result().unwrap().nodes, expected);

    let refused = get_nodes(None);
    let code = GetNodesResponse::from_wire(&refused).unwrap().into_result().unwrap_err().code;
    assert_eq!(code, Some(ErrorCode::InvalidArgument));
}

#[test]
fn get_nodes_truncates_response_at_size_and_count_limits() {
    let server = start();
    let service = server.service();
    let longest = address(&"e".repeat(ENGINE_BYTES_MAX), &"a".repeat(ADDRESS_BYTES_MAX));
    // 9 KiB each: 16 MiB hold 1,854 of them.
    for node in 1..=2_000 {
        service.open_session(&registration(node, vec![longest.clone(); ADDRESSES_MAX]));
    }
    let response = service.get_nodes(&v1::GetNodesRequest { context: context() });
    assert!(
        response.encoded_len() <= REQUEST_BYTES_MAX && response.encoded_len() > REQUEST_BYTES_MAX - 20_000
    );
    assert!(
        GetNodesResponse::from_wire(&response).unwrap().body().is_some_and(|list| list.nodes.len() > 1_800)
    );
    // Small entries, up to the maximum count.
    for node in 1..=NODES_MAX as u64 + 1 {
        service.open_session(&registration(node, vec![]));
    }
    let response = service.get_nodes(&v1::GetNodesRequest { context: context() });
    assert_eq!(GetNodesResponse::from_wire(&response).unwrap().body().unwrap().nodes.len(), NODES_MAX);
}
