//! [`Identity`]: who a process is, as a URI in its certificate.
//!
//! ```text
//!   spiffe://<trust domain>/moontide/<cluster>/master
//!                                             /node/<id>          16 hexadecimal digits, or a name
//!                                             /operator
//!                                             /scraper
//!                                             /tenant/<name>
//! ```
//!
//! The form is that of SPIFFE ids, so that tools that issue such certificates (SPIRE, cert-manager) can be used. Invariants: a
//! certificate has exactly one such URI; two texts that differ are two identities, except for the names of nodes.

use std::fmt;
use std::str::FromStr;

use moontide_types::{NodeId, Tenant};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Most bytes of a trust domain: the limit of SPIFFE.
const TRUST_DOMAIN_BYTES_MAX: usize = 255;

/// Most bytes of the name of a cluster or a node: the limit of a DNS label, which such names often are.
const NAME_BYTES_MAX: usize = 63;

/// Most bytes of an identity: the limit of SPIFFE.
const IDENTITY_BYTES_MAX: usize = 2048;

/// What a process is in its cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Master.
    Master,
    /// Node with this id.
    Node(NodeId),
    /// Person or program that manages the cluster.
    Operator,
    /// Program that reads metrics.
    Scraper,
    /// Client of this tenant.
    Tenant(Box<str>),
}

impl Role {
    /// Returns the only tenant for which a process of this role may act; `None`: any.
    pub fn tenant(&self) -> Option<&str> {
        match self {
            Role::Tenant(name) => Some(name),
            Role::Master | Role::Node(_) | Role::Operator | Role::Scraper => None,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Role::Master => f.write_str("master"),
            Role::Node(id) => write!(f, "node/{id}"),
            Role::Operator => f.write_str("operator"),
            Role::Scraper => f.write_str("scraper"),
            Role::Tenant(name) => write!(f, "tenant/{name}"),
        }
    }
}

/// Trust domain, cluster and role of a process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    trust_domain: Box<str>,
    cluster: Box<str>,
    role: Role,
}

/// Error: a text is no identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no identity: {reason}; use spiffe://DOMAIN/moontide/CLUSTER/ROLE with the role master, node/ID, operator, \
     scraper or tenant/NAME"
)]
pub struct InvalidIdentity {
    text: String,
    reason: &'static str,
}

impl Identity {
    /// Creates an identity.
    ///
    /// # Errors
    /// If a name has a wrong length or a character that is not allowed.
    pub fn new(trust_domain: &str, cluster: &str, role: Role) -> Result<Identity, InvalidIdentity> {
        let identity = Identity { trust_domain: trust_domain.into(), cluster: cluster.into(), role };
        identity.to_string().parse()
    }

    /// Returns the trust domain: who issues the certificates.
    pub fn trust_domain(&self) -> &str {
        &self.trust_domain
    }

    /// Returns the name of the cluster.
    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// Returns the role.
    pub fn role(&self) -> &Role {
        &self.role
    }

    /// Returns whether the other process belongs to the same cluster.
    pub fn is_of_cluster(&self, other: &Identity) -> bool {
        self.trust_domain == other.trust_domain && self.cluster == other.cluster
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "spiffe://{}/moontide/{}/{}", self.trust_domain, self.cluster, self.role)
    }
}

impl FromStr for Identity {
    type Err = InvalidIdentity;

    fn from_str(text: &str) -> Result<Identity, InvalidIdentity> {
        parse(text).map_err(|reason| InvalidIdentity { text: text.chars().take(200).collect(), reason })
    }
}

fn parse(text: &str) -> Result<Identity, &'static str> {
    if text.len() > IDENTITY_BYTES_MAX {
        return Err("it is longer than 2,048 bytes");
    }
    let rest = text.strip_prefix("spiffe://").ok_or("it does not begin with spiffe://")?;
    let mut parts = rest.split('/');
    let mut next = || parts.next();
    let trust_domain =
        next().filter(|domain| is_trust_domain(domain)).ok_or("the trust domain is invalid")?;
    if next() != Some("moontide") {
        return Err("the first part of its path is not \"moontide\"");
    }
    let cluster = next().filter(|cluster| is_name(cluster)).ok_or("the name of the cluster is invalid")?;
    let role = match (next(), next()) {
        (Some("master"), None) => Role::Master,
        (Some("operator"), None) => Role::Operator,
        (Some("scraper"), None) => Role::Scraper,
        (Some("node"), Some(id)) => Role::Node(node_id(id).ok_or("the id of the node is invalid")?),
        (Some("tenant"), Some(name)) => {
            // All bytes of such names are allowed in SPIFFE ids.
            let tenant = Tenant::new(name).ok().filter(|_| name != "." && name != "..");
            Role::Tenant(tenant.ok_or("the name of the tenant is invalid")?.as_str().into())
        }
        _ => return Err("it has no known role"),
    };
    match parts.next() {
        None => Ok(Identity { trust_domain: trust_domain.into(), cluster: cluster.into(), role }),
        Some(_) => Err("its path is too long"),
    }
}

fn is_trust_domain(text: &str) -> bool {
    let valid = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-' | b'_');
    (1..=TRUST_DOMAIN_BYTES_MAX).contains(&text.len()) && text.bytes().all(valid)
}

fn is_name(text: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&text.len())
        && text.bytes().all(is_path_byte)
        && text != "."
        && text != ".."
}

/// Bytes that SPIFFE allows in a path.
fn is_path_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_')
}

/// Returns the id of a node: 16 hexadecimal digits, or the hash of a name. A platform that names its processes needs no table of
/// ids then.
fn node_id(text: &str) -> Option<NodeId> {
    if !is_name(text) {
        return None;
    }
    let id = text.parse().unwrap_or_else(|_| {
        let hash = blake3::Hasher::new_derive_key("moontide node name").update(text.as_bytes()).finalize();
        NodeId(u64::from_le_bytes(*hash.as_bytes().first_chunk().expect("BLAKE3 hash has 32 bytes")))
    });
    (id != NodeId(0)).then_some(id)
}

/// Returns the prefix of the identities that an authority of `moontide certs` issues: `spiffe://DOMAIN/moontide/CLUSTER`. The
/// authority's certificate, in PEM format, has the domain as its SPIFFE id and the cluster as organizational unit.
///
/// # Errors
/// A reason that a person understands.
pub fn authority_namespace(pem: &str) -> Result<String, String> {
    let der = CertificateDer::from_pem_slice(pem.as_bytes())
        .map_err(|error| format!("certificate of the authority cannot be read: {error}"))?;
    let uri = uri_of(&der)?;
    let (_, parsed) = X509Certificate::from_der(&der).map_err(|error| error.to_string())?;
    let cluster = parsed.subject().iter_organizational_unit().next().and_then(|unit| unit.as_str().ok());
    let cluster = cluster.ok_or(
        "certificate of the authority names no cluster; `moontide certs init` creates one that does",
    )?;
    let namespace = format!("{uri}/moontide/{cluster}");
    // A namespace with a role is an identity.
    format!("{namespace}/master").parse::<Identity>().map_err(|error| error.to_string())?;
    Ok(namespace)
}

/// Returns the identity in a certificate, which must have exactly one.
///
/// # Errors
/// A reason that a person understands.
pub fn identity_of(certificate: &[u8]) -> Result<Identity, String> {
    uri_of(certificate)?.parse().map_err(|error: InvalidIdentity| error.to_string())
}

/// Returns the only SPIFFE id of a certificate.
fn uri_of(certificate: &[u8]) -> Result<String, String> {
    let (_, parsed) = X509Certificate::from_der(certificate)
        .map_err(|error| format!("certificate cannot be read: {error}"))?;
    let names = parsed
        .subject_alternative_name()
        .map_err(|error| format!("names of the certificate cannot be read: {error}"))?
        .map_or(&[][..], |names| &names.value.general_names);
    let mut uris = names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) if uri.starts_with("spiffe:") => Some(*uri),
        _ => None,
    });
    let uri = uris
        .next()
        .ok_or("certificate has no identity: no URI \"spiffe://…\" among its alternative names")?;
    if uris.next().is_some() {
        return Err("certificate has several identities: more than one URI \"spiffe://…\"".into());
    }
    Ok(uri.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_round_trips_as_text() {
        let long = format!("spiffe://{}/moontide/{}/master", "d".repeat(255), "c".repeat(63));
        for text in [
            "spiffe://example.org/moontide/prod/master",
            "spiffe://example.org/moontide/prod/operator",
            "spiffe://a_b-c/moontide/eu-1.test/scraper",
            "spiffe://example.org/moontide/prod/node/00000000000000ff",
            "spiffe://example.org/moontide/prod/tenant/acme",
            "spiffe://example.org/moontide/prod/tenant/Team_a-1.x",
            &long,
        ] {
            assert_eq!(text.parse::<Identity>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn node_name_is_hashed_to_id() {
        let role = |name: &str| {
            let text = format!("spiffe://d/moontide/c/node/{name}");
            text.parse::<Identity>().unwrap().role().clone()
        };
        assert_eq!(role("00000000000000ff"), Role::Node(NodeId(0xff)));
        assert_ne!(role("node-1"), role("node-2"));
        // Frozen: a node keeps its records across versions.
        assert_eq!(role("node-1"), Role::Node(NodeId(NODE_1)));
    }

    const NODE_1: u64 = 0x5a4b_6a56_bfe6_b273;

    #[test]
    fn invalid_identity_is_refused_with_reason() {
        let too_long = format!("spiffe://{}/moontide/c/master", "d".repeat(256));
        let huge = format!("spiffe://d/moontide/c/tenant/{}", "a".repeat(2048));
        for (text, reason) in [
            ("https://d/moontide/c/master", "spiffe://"),
            ("spiffe:///moontide/c/master", "trust domain"),
            ("spiffe://D/moontide/c/master", "trust domain"),
            (&too_long, "trust domain"),
            ("spiffe://d/other/c/master", "moontide"),
            ("spiffe://d/moontide//master", "cluster"),
            ("spiffe://d/moontide/../master", "cluster"),
            ("spiffe://d/moontide/c", "role"),
            ("spiffe://d/moontide/c/root", "role"),
            ("spiffe://d/moontide/c/master/", "role"),
            ("spiffe://d/moontide/c/node", "role"),
            ("spiffe://d/moontide/c/node/", "id of the node"),
            ("spiffe://d/moontide/c/node/0000000000000000", "id of the node"),
            ("spiffe://d/moontide/c/node/1/2", "too long"),
            ("spiffe://d/moontide/c/tenant/", "tenant"),
            ("spiffe://d/moontide/c/tenant/%41", "tenant"),
            ("spiffe://d/moontide/c/tenant/a b", "tenant"),
            ("spiffe://d/moontide/c/tenant/..", "tenant"),
            (&huge, "2,048"),
        ] {
            let error = text.parse::<Identity>().unwrap_err();
            assert!(error.reason.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn certificate_must_have_exactly_one_identity() {
        let certificate = |uris: &[&str]| {
            let mut params = rcgen::CertificateParams::new(vec!["host.example".to_owned()]).unwrap();
            for uri in uris {
                params.subject_alt_names.push(rcgen::SanType::URI((*uri).try_into().unwrap()));
            }
            let key = rcgen::KeyPair::generate().unwrap();
            params.self_signed(&key).unwrap().der().to_vec()
        };
        let master = "spiffe://d/moontide/c/master";
        assert_eq!(identity_of(&certificate(&[master, "https://d/"])).unwrap().role(), &Role::Master);
        assert!(identity_of(&certificate(&[])).unwrap_err().contains("no identity"));
        assert!(identity_of(&certificate(&[master, master])).unwrap_err().contains("several"));
        assert!(identity_of(&certificate(&["spiffe://d/else"])).unwrap_err().contains("is no identity"));
        assert!(identity_of(b"no certificate").unwrap_err().contains("cannot be read"));
    }
}
