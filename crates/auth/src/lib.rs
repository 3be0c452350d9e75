//! Who a process is, and who its peer is: identities in certificates, credentials that are reloaded, and mutual TLS 1.3.
//!
//! - [`Identity`]: trust domain, cluster and role of a process, as a SPIFFE URI in its certificate.
//! - [`Credentials`]: certificate, key and CA of this process, read again when their files change.
//! - [`Credentials::server`] and [`Credentials::client`]: configurations of rustls that accept only peers of the same trust domain
//!   and cluster, and servers of the expected role.
//! - [`Session`]: TLS of one connection for code that blocks on sockets itself.
//! - [`peer_identity`]: the identity of a peer whose handshake succeeded.
//!
//! - [`Caller`] and [`Call`]: who may make which call.
//!
//! The crate opens no socket.
//!
//! # Example: the identity of a node
//!
//! ```
//! use moontide_auth::{Identity, Role};
//!
//! let uri = "spiffe://example.org/moontide/prod/node/00000000000000a7";
//! let identity: Identity = uri.parse()?;
//! assert_eq!((identity.cluster(), identity.role()), ("prod", &Role::Node(moontide_types::NodeId(0xa7))));
//! assert_eq!(identity.to_string(), uri);
//! # Ok::<(), moontide_auth::InvalidIdentity>(())
//! ```

#![forbid(unsafe_code)]

mod access;
mod credentials;
mod identity;
mod session;
mod verifier;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use access::{Call, Caller, NotAllowed};
pub use credentials::{
    CertificateInfo, ClientCertificates, CredentialFiles, Credentials, CredentialsError, certificate_info,
};
pub use identity::{Identity, InvalidIdentity, Role, authority_namespace, identity_of};
/// The library that does TLS; its types are in the interface of this crate.
pub use rustls;
pub use session::Session;
pub use verifier::{ExpectedServer, peer_identity};
