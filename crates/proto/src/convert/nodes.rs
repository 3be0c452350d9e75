//! Which nodes there are, and how to reach them: what whoever moves bytes must know beside where they are.

use moontide_types::{NodeId, SessionId};

use super::ConvertError;
use super::answer::{Answer, AnswerBody, answer_of};
use super::check::{at_least, at_most};
use super::session::{Address, Topology};
use crate::limits::NODES_MAX;
use crate::v1;

/// The answer of GetNodes.
pub type NodeList<'a> = Answer<'a, NodeDetails<'a>>;

/// The nodes that are registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeDetails<'a> {
    /// One per node, by their number.
    pub nodes: Vec<NodeDetail<'a>>,
}

/// A node that is registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeDetail<'a> {
    /// The node.
    pub node: NodeId,
    /// Its session: another one when it has registered again.
    pub session: SessionId,
    /// How to reach it.
    pub addresses: Vec<Address<'a>>,
    /// Where it stands.
    pub topology: Topology<'a>,
}

impl<'a> AnswerBody<'a> for NodeDetails<'a> {
    answer_of!(v1::GetNodesResponse);

    fn read(m: &'a v1::GetNodesResponse) -> Result<Self, ConvertError> {
        at_most("nodes", m.nodes.len(), NODES_MAX)?;
        let node = |m: &'a v1::NodeDetail| {
            at_least("nodes.node", m.node, 1u64)?;
            at_least("nodes.session", m.session, 1u64)?;
            Ok(NodeDetail {
                node: NodeId(m.node),
                session: SessionId(m.session),
                addresses: Address::all(&m.addresses)?,
                topology: Topology::of(&m.topology)?,
            })
        };
        Ok(NodeDetails { nodes: m.nodes.iter().map(node).collect::<Result<_, ConvertError>>()? })
    }

    fn write(&self) -> v1::GetNodesResponse {
        let node = |detail: &NodeDetail<'_>| v1::NodeDetail {
            node: detail.node.0,
            session: detail.session.0,
            addresses: detail.addresses.iter().map(|address| address.to_wire()).collect(),
            topology: Some(detail.topology.to_wire()),
        };
        v1::GetNodesResponse { context: None, nodes: self.nodes.iter().map(node).collect() }
    }
}
