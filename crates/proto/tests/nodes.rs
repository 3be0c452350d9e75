//! Limits of the list of nodes: the largest valid values are accepted, the next ones are rejected.

use moontide_proto::convert::{ConvertError, GetNodesResponse, Wire};
use moontide_proto::limits::{
    ADDRESS_BYTES_MAX, ADDRESSES_MAX, ENGINE_BYTES_MAX, LABEL_BYTES_MAX, NODES_MAX,
};
use moontide_proto::v1;
use moontide_types::{ErrorCode, NodeId};

fn node() -> v1::NodeDetail {
    v1::NodeDetail {
        node: 7,
        registration: 8,
        addresses: vec![v1::Address { engine: "tcp".into(), address: "10.0.0.1:7000".into() }],
        topology: Some(v1::Topology { host: "h".into(), rack: "r".into(), zone: String::new() }),
        draining: false,
    }
}

/// Returns the error code for a response with one node changed by the closure.
fn code(change: impl Fn(&mut v1::NodeDetail)) -> Option<ErrorCode> {
    let mut node = node();
    change(&mut node);
    let message = v1::GetNodesResponse { context: Some(Default::default()), nodes: vec![node] };
    GetNodesResponse::from_wire(&message).err().map(|error: ConvertError| error.code())
}

#[test]
fn node_list_decodes_ids_addresses_and_topology() {
    let message = v1::GetNodesResponse { context: Some(Default::default()), nodes: vec![node()] };
    let list = GetNodesResponse::from_wire(&message).unwrap().into_result().unwrap();
    let [node] = &list.nodes[..] else { panic!("{list:?}") };
    assert_eq!((node.node, node.registration), (NodeId(7), 8));
    assert_eq!((node.addresses[0].engine, node.addresses[0].address), ("tcp", "10.0.0.1:7000"));
    assert_eq!((node.topology.host, node.topology.rack, node.topology.zone), ("h", "r", ""));
}

#[test]
fn node_list_limits_are_enforced() {
    let (invalid, large) = (Some(ErrorCode::InvalidArgument), Some(ErrorCode::TooLarge));
    assert_eq!(code(|_| ()), None);
    assert_eq!(code(|n| n.node = 0), invalid);
    assert_eq!(code(|n| n.registration = 0), invalid);
    assert_eq!(code(|n| n.topology = None), invalid);
    let label = |len| code(|n| n.topology.as_mut().unwrap().zone = "z".repeat(len));
    assert_eq!((label(LABEL_BYTES_MAX), label(LABEL_BYTES_MAX + 1)), (None, large));
    let addresses = |count| code(|n| n.addresses = vec![n.addresses[0].clone(); count]);
    assert_eq!((addresses(0), addresses(ADDRESSES_MAX), addresses(ADDRESSES_MAX + 1)), (None, None, large));
    let engine = |len| code(|n| n.addresses[0].engine = "e".repeat(len));
    assert_eq!((engine(0), engine(ENGINE_BYTES_MAX), engine(ENGINE_BYTES_MAX + 1)), (invalid, None, large));
    let address = |len| code(|n| n.addresses[0].address = "a".repeat(len));
    assert_eq!(
        (address(0), address(ADDRESS_BYTES_MAX), address(ADDRESS_BYTES_MAX + 1)),
        (invalid, None, large)
    );

    let many = |count| {
        let message = v1::GetNodesResponse { context: Some(Default::default()), nodes: vec![node(); count] };
        GetNodesResponse::from_wire(&message).err().map(|error| error.code())
    };
    assert_eq!((many(0), many(NODES_MAX), many(NODES_MAX + 1)), (None, None, large));
}
