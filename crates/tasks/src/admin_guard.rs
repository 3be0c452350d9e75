//! [`AdminGuard`]: which requests of a browser an admin server refuses, since the server asks for no password.
//!
//! A page of any site can make the browser of an operator send requests to an address that only the operator reaches. Two
//! rules prevent that it does any good to the page:
//!
//! - The header `Host` names an address or a name of this host. A site whose own name leads to this address (DNS rebinding)
//!   could read the responses otherwise.
//! - A request that changes something has the header [`ADMIN_HEADER`]. A browser sends it to another site only after asking
//!   this server, which does not allow it.

use std::net::IpAddr;

use axum::http::{HeaderMap, Method, Uri, header};
use moontide_auth::Call;

/// Header of requests that change something; its value does not matter.
pub const ADMIN_HEADER: &str = "moontide-admin";

/// Returns the call that a request for an admin page is.
pub fn call_of_page(method: &Method, path: &str) -> Call {
    match path {
        "/health" | "/ready" => Call::Health,
        "/metrics" | "/role" => Call::Metrics,
        // Reads, with the keys in the body.
        "/batch_query_keys" => Call::Inspect,
        _ if *method == Method::GET || *method == Method::HEAD => Call::Inspect,
        _ => Call::Change,
    }
}

/// Reason why a request is refused. Its text says what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Denied {
    /// The request is for a host that this is not.
    OtherHost(String),
    /// The header [`ADMIN_HEADER`] is missing, in a request for this path.
    NoAdminHeader(String),
}

impl std::fmt::Display for Denied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Denied::OtherHost(host) => {
                write!(
                    f,
                    "the request is for host {host:?}, which is no name of this server; use its address, or add the name \
                     to the setting admin_hosts"
                )
            }
            Denied::NoAdminHeader(path) => {
                write!(
                    f,
                    "requests that change something need the header {ADMIN_HEADER}, e.g. \
                     curl -X POST -H '{ADMIN_HEADER}: 1' 'http://ADDRESS{path}'"
                )
            }
        }
    }
}

/// Checks requests. IP addresses and `localhost` are always names of this host.
#[derive(Clone, Debug, Default)]
pub struct AdminGuard {
    /// In lower case, without ports.
    hosts: Vec<String>,
}

impl AdminGuard {
    /// Creates a guard that accepts these names, with or without ports.
    pub fn new(names: impl IntoIterator<Item = impl AsRef<str>>) -> AdminGuard {
        let hosts = names.into_iter().map(|name| name_of(name.as_ref())).filter(|name| !name.is_empty());
        AdminGuard { hosts: hosts.collect() }
    }

    /// Checks a request.
    pub fn check(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<(), Denied> {
        // Two names that differ would be a trick, so each of them must be right. A browser always sends one.
        let of_headers = headers.get_all(header::HOST).iter().map(|host| host.to_str().unwrap_or("?"));
        let of_uri = uri.authority().map(|authority| authority.as_str());
        for host in of_headers.chain(of_uri) {
            if !self.is_own(host) {
                // Enough to recognize it.
                return Err(Denied::OtherHost(host.chars().take(100).collect()));
            }
        }
        let changes = !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS);
        if changes && !headers.contains_key(ADMIN_HEADER) {
            return Err(Denied::NoAdminHeader(uri.path().chars().take(100).collect()));
        }
        Ok(())
    }

    fn is_own(&self, host: &str) -> bool {
        let name = name_of(host);
        let is_address = name.parse::<IpAddr>().is_ok();
        is_address || name == "localhost" || self.hosts.contains(&name)
    }
}

/// Returns the name or address in `name`, `name:port` or `[address]:port`, in lower case and without the dot of the root.
fn name_of(host: &str) -> String {
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        // More than one colon: an IPv6 address without a port.
        None => match host.split_once(':') {
            Some((name, port)) if !port.contains(':') => name,
            _ => host,
        },
    };
    name.trim_end_matches('.').to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(guard: &AdminGuard, method: Method, hosts: &[&str], has_header: bool) -> Result<(), Denied> {
        let mut headers = HeaderMap::new();
        for host in hosts {
            headers.append(header::HOST, host.parse().unwrap());
        }
        if has_header {
            headers.insert(ADMIN_HEADER, "1".parse().unwrap());
        }
        guard.check(&method, &Uri::from_static("/evict?target_permille=0"), &headers)
    }

    #[test]
    fn only_names_of_the_host_are_accepted() {
        let guard = AdminGuard::new(["Master-0.Example:7400", "m0", "", "[2001:db8::1]:7400"]);
        let get = |hosts: &[&str]| check(&guard, Method::GET, hosts, false);
        for host in [
            "127.0.0.1:7402",
            "10.1.2.3",
            "[::1]:7402",
            "[2001:db8::7]",
            "localhost",
            "LOCALHOST:7402",
            "master-0.example",
            "master-0.example.:7402",
            "M0:80",
        ] {
            assert_eq!(get(&[host]), Ok(()), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:7402",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "master-0.example.evil",
            "m0@evil",
            "",
            ":7402",
            "[evil]",
        ] {
            assert_eq!(get(&[host]), Err(Denied::OtherHost(host.to_owned())), "{host}");
        }
        assert_eq!(get(&[]), Ok(()), "no browser");
        assert!(get(&["localhost", "evil.example"]).is_err());
        let uri = Uri::from_static("http://evil.example/metrics");
        assert!(guard.check(&Method::GET, &uri, &HeaderMap::new()).is_err());
        let message = get(&["evil.example"]).unwrap_err().to_string();
        assert!(message.contains("admin_hosts") && message.contains("evil.example"), "{message}");
    }

    #[test]
    fn requests_that_change_something_need_the_header() {
        let guard = AdminGuard::default();
        for method in [Method::POST, Method::PUT, Method::DELETE, Method::PATCH] {
            let denied = check(&guard, method.clone(), &["localhost"], false).unwrap_err();
            assert_eq!(denied, Denied::NoAdminHeader("/evict".to_owned()));
            assert!(
                denied.to_string().contains("curl -X POST -H 'moontide-admin: 1' 'http://ADDRESS/evict'")
            );
            assert_eq!(check(&guard, method.clone(), &["localhost"], true), Ok(()));
            assert!(check(&guard, method, &["evil.example"], true).is_err());
        }
        assert_eq!(check(&guard, Method::GET, &["localhost"], false), Ok(()));
    }
}
