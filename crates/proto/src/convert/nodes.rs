//! Registered nodes and their addresses, for clients that transfer bytes.

use moontide_types::NodeId;

use super::ConvertError;
use super::check::{at_least, at_most};
use super::response::{Response, ResponseBody, response_of};
use super::session::{Address, Topology};
use crate::limits::NODES_MAX;
use crate::v1;

/// Response of GetNodes.
pub type GetNodesResponse<'a> = Response<'a, NodeDirectory<'a>>;

/// Registered nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeDirectory<'a> {
    /// One entry per node, sorted by id.
    pub nodes: Vec<NodeDetail<'a>>,
}

/// A registered node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeDetail<'a> {
    /// Id of the node.
    pub node: NodeId,
    /// Number of the node's registration; changes when the node registers again.
    pub registration: u64,
    /// Addresses of its transfer engines.
    pub addresses: Vec<Address<'a>>,
    /// Location in the data centre.
    pub topology: Topology<'a>,
    /// The node is being emptied.
    pub draining: bool,
}

impl<'a> ResponseBody<'a> for NodeDirectory<'a> {
    response_of!(v1::GetNodesResponse);

    fn read(m: &'a v1::GetNodesResponse) -> Result<Self, ConvertError> {
        Ok(NodeDirectory { nodes: NodeDetail::all(&m.nodes)? })
    }

    fn write(&self) -> v1::GetNodesResponse {
        v1::GetNodesResponse { context: None, nodes: self.nodes.iter().map(NodeDetail::to_wire).collect() }
    }
}

impl<'a> NodeDetail<'a> {
    pub(super) fn all(nodes: &'a [v1::NodeDetail]) -> Result<Vec<NodeDetail<'a>>, ConvertError> {
        at_most("nodes", nodes.len(), NODES_MAX)?;
        let node = |m: &'a v1::NodeDetail| {
            at_least("nodes.node", m.node, 1u64)?;
            at_least("nodes.registration", m.registration, 1u64)?;
            Ok(NodeDetail {
                node: NodeId(m.node),
                registration: m.registration,
                addresses: Address::all(&m.addresses)?,
                topology: Topology::of(&m.topology)?,
                draining: m.draining,
            })
        };
        nodes.iter().map(node).collect()
    }

    pub(super) fn to_wire(&self) -> v1::NodeDetail {
        v1::NodeDetail {
            node: self.node.0,
            registration: self.registration,
            addresses: self.addresses.iter().map(|address| address.to_wire()).collect(),
            topology: Some(self.topology.to_wire()),
            draining: self.draining,
        }
    }
}
