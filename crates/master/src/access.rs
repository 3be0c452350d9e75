//! Checks of callers: their role against the table of rights, and the tenant or node of a request against their own.
//!
//! Both protocol servers and the admin endpoints check each request here before they handle it. Without TLS every caller is trusted.

use moontide_auth::{Call, Caller};
use moontide_proto::v1;
use moontide_types::{ErrorCode, NodeId, Tenant};

/// Refusal of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) code: ErrorCode,
    pub(crate) text: String,
}

impl Refused {
    fn denied(text: String) -> Refused {
        Refused { code: ErrorCode::PermissionDenied, text }
    }
}

/// Checks whether the caller may make a call.
pub(crate) fn check_call(caller: &Caller, call: Call) -> Result<(), Refused> {
    if moontide_rt::mutation_enabled("call-unchecked") {
        return Ok(());
    }
    caller.check(call).map_err(|error| match caller {
        Caller::Anonymous => Refused { code: ErrorCode::Unauthenticated, text: error.to_string() },
        _ => Refused::denied(error.to_string()),
    })
}

/// Checks whether the caller may make a call with this context: a tenant acts for itself only.
pub(crate) fn check(
    caller: &Caller,
    call: Call,
    context: Option<&v1::RequestContext>,
) -> Result<(), Refused> {
    check_call(caller, call)?;
    let Some(own) = caller.tenant() else { return Ok(()) };
    let named = context.map_or("", |context| &context.tenant);
    let named = if named.is_empty() { Tenant::DEFAULT.as_str() } else { named };
    if named == own || moontide_rt::mutation_enabled("tenant-of-call-unchecked") {
        return Ok(());
    }
    // Text of the caller: shown escaped, and not in full.
    let named: String = named.chars().take(100).collect();
    Err(Refused::denied(format!(
        "the request is for tenant {named:?}, but the certificate is that of tenant {own}"
    )))
}

/// Checks whether the caller may act for this node.
pub(crate) fn check_node(caller: &Caller, node: NodeId) -> Result<(), Refused> {
    if caller.is_node(node) || moontide_rt::mutation_enabled("node-of-call-unchecked") {
        Ok(())
    } else {
        Err(Refused::denied(format!(
            "the request is for node {node}, but the certificate is that of another process"
        )))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use moontide_auth::{Identity, Role};

    use super::*;

    fn caller(role: Role) -> Caller {
        Caller::Known(Arc::new(Identity::new("d", "c", role).unwrap()))
    }

    fn context(tenant: &str) -> Option<v1::RequestContext> {
        Some(v1::RequestContext { tenant: tenant.into(), ..Default::default() })
    }

    #[test]
    fn tenant_acts_for_itself_only_in_every_call() {
        let (acme, default) = (caller(Role::Tenant("acme".into())), caller(Role::Tenant("default".into())));
        for &call in Call::ALL {
            let allowed = acme.check(call).is_ok();
            let outcome =
                |caller: &Caller, tenant: &str| check(caller, call, context(tenant).as_ref()).is_ok();
            assert_eq!(outcome(&acme, "acme"), allowed, "{call:?}");
            assert!(
                !outcome(&acme, "beta") && !outcome(&acme, "") && check(&acme, call, None).is_err(),
                "{call:?}"
            );
            assert_eq!(outcome(&default, ""), allowed, "{call:?}: no name is the default tenant");
        }
    }

    #[test]
    fn refusal_says_why() {
        let refused = check(&caller(Role::Tenant("acme".into())), Call::Exist, context("be\nta").as_ref());
        let expected = "the request is for tenant \"be\\nta\", but the certificate is that of tenant acme";
        assert_eq!(refused, Err(Refused::denied(expected.into())));
        let anonymous = check(&Caller::Anonymous, Call::Exist, context("acme").as_ref()).unwrap_err();
        assert_eq!(anonymous.code, ErrorCode::Unauthenticated);
        assert!(check_node(&caller(Role::Node(NodeId(1))), NodeId(1)).is_ok());
        assert!(check_node(&caller(Role::Node(NodeId(1))), NodeId(2)).is_err());
        assert!(check(&Caller::Trusted, Call::DrainNode, None).is_ok());
    }
}
