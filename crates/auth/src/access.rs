//! The table of rights: which role may make which call, for all protocols of masters and nodes.
//!
//! A server names each of its calls by a variant of [`Call`], so a call without a rule does not compile. The table is about roles.
//! A tenant may make its calls for its own objects only, and a node for itself only: [`Caller::tenant`] and [`Caller::is_node`] say which.

use std::sync::Arc;

use moontide_types::NodeId;

use crate::identity::{Identity, Role};

/// Who makes a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// The server runs without TLS: every process that reaches it may do everything.
    Trusted,
    /// The connection is encrypted, and the peer has no certificate.
    Anonymous,
    /// The certificate of the peer has this identity.
    Known(Arc<Identity>),
}

/// Error: a caller may not make a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{caller} may not call {call:?}; it is allowed for: {allowed}")]
pub struct NotAllowed {
    caller: String,
    call: Call,
    allowed: String,
}

/// Who may make a call, besides masters among themselves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// Everybody, also without a certificate.
    Anonymous,
    /// Every process with a certificate.
    Known,
    /// Tenants, for their own objects, and operators, for those of any tenant.
    Tenant,
    /// Nodes, for themselves.
    Node,
    /// Tenants, operators, and nodes that copy records.
    TenantOrNode,
    /// Masters.
    Master,
    /// Operators.
    Operator,
    /// Scrapers of metrics, and operators.
    Scraper,
}

impl Rule {
    fn allows(self, role: Option<&Role>) -> bool {
        match role {
            None => self == Rule::Anonymous,
            Some(_) if matches!(self, Rule::Anonymous | Rule::Known) => true,
            Some(Role::Master) => self == Rule::Master,
            Some(Role::Node(_)) => matches!(self, Rule::Node | Rule::TenantOrNode),
            Some(Role::Operator) => {
                matches!(self, Rule::Tenant | Rule::TenantOrNode | Rule::Operator | Rule::Scraper)
            }
            Some(Role::Scraper) => self == Rule::Scraper,
            Some(Role::Tenant(_)) => matches!(self, Rule::Tenant | Rule::TenantOrNode),
        }
    }

    fn names(self) -> &'static str {
        match self {
            Rule::Anonymous => "everybody",
            Rule::Known => "everybody with a certificate",
            Rule::Tenant => "tenant, operator",
            Rule::Node => "node",
            Rule::TenantOrNode => "tenant, node, operator",
            Rule::Master => "master",
            Rule::Operator => "operator",
            Rule::Scraper => "scraper, operator",
        }
    }
}

/// Declares the calls, and the list of all of them.
macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A call of a master or a node.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Call {
            $($(#[$doc])* $name,)*
        }

        impl Call {
            /// All calls.
            pub const ALL: &'static [Call] = &[$(Call::$name,)*];
        }
    };
}

calls! {
    /// gRPC and frames: which keys are complete objects.
    Exist,
    /// gRPC and frames: locations of objects.
    GetReplicaList,
    /// gRPC and frames: space for new objects.
    PutStart,
    /// gRPC and frames: objects are complete.
    PutEnd,
    /// gRPC: space is given back.
    PutRevoke,
    /// gRPC: objects are in use.
    Touch,
    /// gRPC: pin class of objects.
    SetPin,
    /// gRPC: promotion of objects from disk.
    Prefetch,
    /// gRPC and frames: removal of objects.
    Remove,
    /// gRPC: removal of all keys with a prefix.
    RemoveByPrefix,
    /// gRPC: removal of all keys that match an expression.
    RemoveByRegex,
    /// gRPC: removal of all objects of a tenant.
    RemoveAll,
    /// gRPC: progress of a removal.
    GetJob,
    /// gRPC: keys of a tenant.
    ListKeys,
    /// gRPC: metadata of objects.
    QueryKeys,
    /// gRPC: ids of the tenant's objects that can no longer be read.
    PollInvalidations,
    /// gRPC: which master hosts which group.
    GetGroupMap,
    /// gRPC: number of groups, and the key of the ids of the tenant's objects.
    GetClusterInfo,
    /// gRPC: addresses of the nodes.
    GetNodes,
    /// gRPC: eviction on request.
    Evict,
    /// gRPC: tenants with their use.
    GetTenants,
    /// gRPC: quota of a tenant.
    SetTenantQuota,
    /// gRPC: segments with their state.
    ListSegments,
    /// gRPC: drain of a segment.
    DrainSegment,
    /// gRPC: drain of a node.
    DrainNode,
    /// gRPC: registration of a node.
    OpenSession,
    /// gRPC: segments of a node.
    MountSegments,
    /// gRPC: segments of a node that leave.
    UnmountSegments,
    /// gRPC: stream of a session.
    Session,
    /// gRPC: state of a group for its next master.
    HandoffGroup,
    /// Admin pages: whether the process lives, and whether it serves.
    Health,
    /// Admin pages: metrics and the role of a master.
    Metrics,
    /// Admin pages: listings.
    Inspect,
    /// Admin pages: requests that change something.
    Change,
    /// Frames of nodes: begin of a record.
    Begin,
    /// Frames of nodes: bytes of a record.
    Write,
    /// Frames of nodes: end of a record.
    Commit,
    /// Frames of nodes: bytes of a record to the caller.
    Read,
    /// Frames of nodes: record from disk into memory.
    Load,
    /// Frames of nodes: loaded record is no longer needed.
    Release,
    /// Frames of nodes: header of a record that is copied.
    Describe,
    /// Frames of nodes: test of the connection. A node refuses connections of peers that may not make it.
    PingNode,
    /// Frames of masters: test of the connection.
    PingMaster,
}

fn rule(call: Call) -> Rule {
    match call {
        Call::Exist
        | Call::GetReplicaList
        | Call::PutStart
        | Call::PutEnd
        | Call::PutRevoke
        | Call::Touch
        | Call::SetPin
        | Call::Prefetch
        | Call::Remove
        | Call::RemoveByPrefix
        | Call::RemoveByRegex
        | Call::RemoveAll
        | Call::GetJob
        | Call::ListKeys
        | Call::QueryKeys
        | Call::PollInvalidations
        | Call::GetNodes => Rule::Tenant,
        Call::GetGroupMap | Call::GetClusterInfo => Rule::TenantOrNode,
        Call::Evict
        | Call::GetTenants
        | Call::SetTenantQuota
        | Call::ListSegments
        | Call::DrainSegment
        | Call::DrainNode => Rule::Operator,
        Call::OpenSession | Call::MountSegments | Call::UnmountSegments | Call::Session => Rule::Node,
        Call::HandoffGroup => Rule::Master,
        Call::Health => Rule::Anonymous,
        Call::Metrics => Rule::Scraper,
        Call::Inspect | Call::Change => Rule::Operator,
        Call::Begin | Call::Write | Call::Commit | Call::Load | Call::Release => Rule::Tenant,
        Call::Read | Call::PingNode => Rule::TenantOrNode,
        Call::Describe => Rule::Node,
        Call::PingMaster => Rule::Known,
    }
}

impl Role {
    /// Returns whether a process of this role may make a call.
    pub fn may(&self, call: Call) -> bool {
        rule(call).allows(Some(self))
    }
}

impl Caller {
    /// Returns the caller of a connection: `is_tls`, and the identity of its certificate.
    pub fn of_connection(is_tls: bool, peer: Option<&Arc<Identity>>) -> Caller {
        match peer {
            Some(peer) => Caller::Known(Arc::clone(peer)),
            None if is_tls => Caller::Anonymous,
            None => Caller::Trusted,
        }
    }

    /// Checks whether this caller may make a call.
    ///
    /// # Errors
    /// If its role has no right to it. The error names those that have.
    pub fn check(&self, call: Call) -> Result<(), NotAllowed> {
        let role = match self {
            Caller::Trusted => return Ok(()),
            Caller::Anonymous => None,
            Caller::Known(identity) => Some(identity.role()),
        };
        let rule = rule(call);
        if rule.allows(role) {
            return Ok(());
        }
        let caller = role.map_or_else(|| "a peer without certificate".to_owned(), Role::to_string);
        Err(NotAllowed { caller, call, allowed: rule.names().to_owned() })
    }

    /// Returns the only tenant for which this caller may act; `None`: any.
    pub fn tenant(&self) -> Option<&str> {
        match self {
            Caller::Known(identity) => identity.role().tenant(),
            Caller::Trusted | Caller::Anonymous => None,
        }
    }

    /// Returns whether this caller may act for a node.
    pub fn is_node(&self, node: NodeId) -> bool {
        match self {
            Caller::Trusted => true,
            Caller::Anonymous => false,
            Caller::Known(identity) => *identity.role() == Role::Node(node),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(role: Role) -> Caller {
        Caller::Known(Arc::new(Identity::new("d", "c", role).unwrap()))
    }

    #[test]
    fn each_role_may_make_exactly_its_calls() {
        let count = |caller: &Caller| Call::ALL.iter().filter(|&&call| caller.check(call).is_ok()).count();
        let tenant = caller(Role::Tenant("acme".into()));
        let [node, master] = [Role::Node(NodeId(1)), Role::Master].map(caller);
        let [operator, scraper] = [Role::Operator, Role::Scraper].map(caller);
        assert_eq!(count(&Caller::Trusted), Call::ALL.len());
        assert_eq!(count(&Caller::Anonymous), 1);
        assert_eq!(Caller::Anonymous.check(Call::Health), Ok(()));
        // Its own rule, Health and PingMaster.
        assert_eq!(count(&scraper), 3);
        assert_eq!(count(&master), 3);
        let allowed = |caller: &Caller, calls: &[Call]| calls.iter().all(|&call| caller.check(call).is_ok());
        let denied = |caller: &Caller, calls: &[Call]| calls.iter().all(|&call| caller.check(call).is_err());
        let objects = [Call::PutStart, Call::GetReplicaList, Call::Remove, Call::Begin, Call::Read];
        let sessions = [Call::OpenSession, Call::MountSegments, Call::UnmountSegments, Call::Session];
        let cluster = [Call::Evict, Call::SetTenantQuota, Call::DrainNode, Call::Change, Call::Inspect];
        assert!(allowed(&tenant, &objects) && denied(&tenant, &sessions) && denied(&tenant, &cluster));
        assert!(allowed(&operator, &objects) && denied(&operator, &sessions) && allowed(&operator, &cluster));
        assert!(allowed(&node, &sessions) && denied(&node, &cluster) && denied(&node, &objects[..4]));
        assert!(allowed(&node, &[Call::Read, Call::Describe]) && denied(&tenant, &[Call::Describe]));
        assert!(denied(&node, &[Call::HandoffGroup]) && denied(&operator, &[Call::HandoffGroup]));
    }

    #[test]
    fn refusal_names_caller_call_and_who_may() {
        let error = caller(Role::Tenant("acme".into())).check(Call::DrainNode).unwrap_err();
        assert_eq!(error.to_string(), "tenant/acme may not call DrainNode; it is allowed for: operator");
        let error = Caller::Anonymous.check(Call::Metrics).unwrap_err();
        assert!(error.to_string().starts_with("a peer without certificate may not"), "{error}");
    }

    #[test]
    fn caller_acts_for_itself_only() {
        let node = caller(Role::Node(NodeId(1)));
        assert!(node.is_node(NodeId(1)) && !node.is_node(NodeId(2)) && Caller::Trusted.is_node(NodeId(2)));
        assert!(!Caller::Anonymous.is_node(NodeId(1)) && !caller(Role::Operator).is_node(NodeId(1)));
        assert_eq!(caller(Role::Tenant("acme".into())).tenant(), Some("acme"));
        assert_eq!(caller(Role::Operator).tenant(), None);
    }
}
