//! Checks of the certificate of a peer: its chain and validity, by webpki, and its identity.
//!
//! DNS names and addresses are not compared: clients find nodes by addresses that masters tell them, and a node is known by its id.

use std::fmt;
use std::sync::Arc;

use moontide_types::NodeId;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, CommonState, DigitallySignedStruct, DistinguishedName, Error, OtherError,
    PeerIncompatible, RootCertStore, SignatureScheme,
};

use crate::credentials::ClientCertificates;
use crate::identity::{Identity, Role, identity_of};

/// Role that a server must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpectedServer {
    /// A master.
    Master,
    /// The node with this id.
    Node(NodeId),
    /// A master or any node: for admin pages, whose address a person names.
    MasterOrNode,
}

impl fmt::Display for ExpectedServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExpectedServer::Master => f.write_str("master"),
            ExpectedServer::Node(id) => write!(f, "node/{id}"),
            ExpectedServer::MasterOrNode => f.write_str("a master or a node"),
        }
    }
}

/// Returns the identity of the peer of a connection, if it has a certificate. The handshake must have succeeded.
pub fn peer_identity(connection: &CommonState) -> Option<Identity> {
    // The verifier has read the identity before.
    identity_of(connection.peer_certificates()?.first()?).ok()
}

/// Error: a valid certificate is that of another peer.
#[derive(thiserror::Error)]
enum WrongPeer {
    #[error("{0}")]
    NoIdentity(String),
    #[error("peer is {found}, which is not in this cluster: {}/{}", own.trust_domain(), own.cluster())]
    Cluster { found: Identity, own: Identity },
    #[error("peer is {found}, expected {expected}")]
    Role { found: Identity, expected: ExpectedServer },
}

impl fmt::Debug for WrongPeer {
    /// As `Display`: rustls shows this one in its own errors.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<WrongPeer> for Error {
    fn from(error: WrongPeer) -> Error {
        Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(error))))
    }
}

/// Returns the identity in a certificate, of a peer in the own cluster.
fn identity_in_cluster(certificate: &[u8], own: &Identity) -> Result<Identity, WrongPeer> {
    let found = identity_of(certificate).map_err(WrongPeer::NoIdentity)?;
    if found.is_of_cluster(own) || moontide_rt::mutation_enabled("cluster-of-peer-unchecked") {
        Ok(found)
    } else {
        Err(WrongPeer::Cluster { found, own: own.clone() })
    }
}

/// Refuses TLS 1.2, which is never negotiated.
fn no_tls12() -> Result<HandshakeSignatureValid, Error> {
    Err(Error::PeerIncompatible(PeerIncompatible::Tls13RequiredForQuic))
}

/// Checks the certificates of servers.
#[derive(Debug)]
pub(crate) struct ServerVerifier {
    roots: Arc<RootCertStore>,
    own: Identity,
    expected: ExpectedServer,
    provider: Arc<CryptoProvider>,
}

impl ServerVerifier {
    pub(crate) fn new(
        roots: &Arc<RootCertStore>,
        own: &Identity,
        expected: ExpectedServer,
        provider: &Arc<CryptoProvider>,
    ) -> ServerVerifier {
        ServerVerifier {
            roots: Arc::clone(roots),
            own: own.clone(),
            expected,
            provider: Arc::clone(provider),
        }
    }
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, algorithms)?;
        let found = identity_in_cluster(end_entity, &self.own)?;
        let is_expected = match self.expected {
            ExpectedServer::Master => *found.role() == Role::Master,
            ExpectedServer::Node(id) => *found.role() == Role::Node(id),
            ExpectedServer::MasterOrNode => matches!(found.role(), Role::Master | Role::Node(_)),
        };
        if is_expected {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(WrongPeer::Role { found, expected: self.expected }.into())
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Checks the certificates of clients.
#[derive(Debug)]
pub(crate) struct ClientVerifier {
    webpki: Arc<dyn ClientCertVerifier>,
    own: Identity,
}

impl ClientVerifier {
    pub(crate) fn new(
        roots: &Arc<RootCertStore>,
        own: &Identity,
        clients: ClientCertificates,
        provider: &Arc<CryptoProvider>,
    ) -> ClientVerifier {
        let builder = WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider));
        let builder = match clients {
            ClientCertificates::Required => builder,
            ClientCertificates::Optional => builder.allow_unauthenticated(),
        };
        // The names of the authorities are not sent: clients have one certificate.
        let webpki =
            builder.clear_root_hint_subjects().build().expect("there is a CA, and no revocation list");
        ClientVerifier { webpki, own: own.clone() }
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn offer_client_auth(&self) -> bool {
        self.webpki.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.webpki.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.webpki.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.webpki.verify_client_cert(end_entity, intermediates, now)?;
        identity_in_cluster(end_entity, &self.own)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.webpki.verify_tls13_signature(message, cert, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.webpki.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read, Write};

    use rustls::{ClientConnection, ServerConnection, Stream};

    use super::*;
    use crate::credentials::Credentials;
    use crate::testing::{Authority, Directory, Validity};

    /// The identities that client and server see.
    type Identities = (Option<Identity>, Option<Identity>);

    /// Runs a handshake in memory. Returns the identities that client and server see, or the first error and the side that has it.
    fn handshake(
        client: Arc<rustls::ClientConfig>,
        server: Arc<rustls::ServerConfig>,
    ) -> Result<Identities, (&'static str, Error)> {
        let name = ServerName::try_from("moontide").unwrap();
        let mut client = ClientConnection::new(client, name).unwrap();
        let mut server = ServerConnection::new(server).unwrap();
        // Until nothing is left to say: a client learns only then that its certificate was refused.
        while client.wants_write() || server.wants_write() {
            let mut wire = vec![];
            while client.wants_write() {
                client.write_tls(&mut wire).unwrap();
            }
            let mut rest = &wire[..];
            while !rest.is_empty() {
                server.read_tls(&mut rest).unwrap();
                server.process_new_packets().map_err(|error| ("server", error))?;
            }
            wire.clear();
            while server.wants_write() {
                server.write_tls(&mut wire).unwrap();
            }
            let mut rest = &wire[..];
            while !rest.is_empty() {
                client.read_tls(&mut rest).unwrap();
                client.process_new_packets().map_err(|error| ("client", error))?;
            }
        }
        assert!(!client.is_handshaking() && !server.is_handshaking());
        let identities = (peer_identity(&client), peer_identity(&server));
        // The connection carries bytes.
        let mut pipe = Pipe::default();
        client.writer().write_all(b"hello").unwrap();
        client.write_tls(&mut pipe).unwrap();
        let mut heard = [0; 5];
        Stream::new(&mut server, &mut pipe).read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"hello");
        Ok(identities)
    }

    #[derive(Default)]
    struct Pipe(Vec<u8>);

    impl Read for Pipe {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let len = into.len().min(self.0.len());
            into[..len].copy_from_slice(&self.0[..len]);
            self.0.drain(..len);
            Ok(len)
        }
    }

    impl Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const NODE: NodeId = NodeId(7);

    #[test]
    fn peers_of_one_cluster_know_each_other() {
        let (directory, authority) = (Directory::new(), Authority::new());
        let load =
            |name: &str, role: Role| Credentials::load(authority.issue(&directory, name, role)).unwrap();
        let (node, tenant) = (load("node", Role::Node(NODE)), load("tenant", Role::Tenant("acme".into())));
        let server = node.server(ClientCertificates::Required, &[]);
        let client = tenant.client(ExpectedServer::Node(NODE), &[]);
        let (of_server, of_client) = handshake(client, server).unwrap();
        assert_eq!(of_server.unwrap().role(), &Role::Node(NODE));
        assert_eq!(of_client.unwrap().role(), &Role::Tenant("acme".into()));
    }

    #[test]
    fn server_with_another_role_or_id_is_refused_by_the_client() {
        let (directory, authority) = (Directory::new(), Authority::new());
        let load =
            |name: &str, role: Role| Credentials::load(authority.issue(&directory, name, role)).unwrap();
        let (client, master, node) =
            (load("c", Role::Operator), load("m", Role::Master), load("n", Role::Node(NODE)));
        let tenant = load("t", Role::Tenant("acme".into()));
        for (server, expected, found) in [
            (&master, ExpectedServer::Node(NODE), "/master, expected node/0000000000000007"),
            (&node, ExpectedServer::Master, "/node/0000000000000007, expected master"),
            (
                &node,
                ExpectedServer::Node(NodeId(8)),
                "/node/0000000000000007, expected node/0000000000000008",
            ),
            (&tenant, ExpectedServer::Master, "/tenant/acme, expected master"),
            (&tenant, ExpectedServer::MasterOrNode, "/tenant/acme, expected a master or a node"),
        ] {
            let server = server.server(ClientCertificates::Required, &[]);
            let (side, error) = handshake(client.client(expected, &[]), server).unwrap_err();
            assert!(side == "client" && error.to_string().contains(found), "{side}: {error}");
        }
        for server in [&master, &node] {
            let config = server.server(ClientCertificates::Required, &[]);
            handshake(client.client(ExpectedServer::MasterOrNode, &[]), config).unwrap();
        }
    }

    #[test]
    fn certificate_of_another_authority_cluster_or_time_is_refused_by_both_sides() {
        let (directory, authority) = (Directory::new(), Authority::new());
        let good = Credentials::load(authority.issue(&directory, "good", Role::Master)).unwrap();
        // Each has the CA of the good one, so that only its own certificate is wrong.
        let bad = |name: &str, authority: &Authority, identity: &str, validity| {
            let files = authority.issue_identity(&directory, name, identity, validity);
            std::fs::copy(directory.path().join("good-ca.pem"), &files.ca).unwrap();
            Credentials::load(files).unwrap()
        };
        let master = "spiffe://test/moontide/cluster/master";
        let cases = [
            (bad("ca", &Authority::new(), master, Validity::Now), "UnknownIssuer"),
            (bad("past", &authority, master, Validity::Past), "expired"),
            (bad("future", &authority, master, Validity::Future), "not valid yet"),
            (
                bad("cluster", &authority, "spiffe://test/moontide/other/master", Validity::Now),
                "not in this cluster",
            ),
            (
                bad("domain", &authority, "spiffe://other/moontide/cluster/master", Validity::Now),
                "not in this cluster",
            ),
        ];
        for (bad, reason) in &cases {
            let pairs = [(bad, &good, "server"), (&good, bad, "client")];
            for (client, server, refuses) in pairs {
                let config = server.server(ClientCertificates::Required, &[]);
                let (side, error) =
                    handshake(client.client(ExpectedServer::Master, &[]), config).unwrap_err();
                // A client of another cluster refuses the server before the server sees its certificate.
                let by_other = *reason == "not in this cluster" && refuses == "server" && side == "client";
                assert!(side == refuses || by_other, "{reason}: refused by the {side}: {error}");
                assert!(error.to_string().contains(reason), "{reason}: {error}");
            }
        }
    }

    #[test]
    fn client_without_certificate_is_admitted_only_where_it_is_optional() {
        let (directory, authority) = (Directory::new(), Authority::new());
        let server = Credentials::load(authority.issue(&directory, "master", Role::Master)).unwrap();
        let anonymous = || {
            let mut roots = RootCertStore::empty();
            roots.add(authority.certificate()).unwrap();
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let own: Identity = "spiffe://test/moontide/cluster/operator".parse().unwrap();
            let verifier = ServerVerifier::new(&Arc::new(roots), &own, ExpectedServer::Master, &provider);
            let config = rustls::ClientConfig::builder_with_provider(provider)
                .with_protocol_versions(&[&rustls::version::TLS13])
                .unwrap()
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(verifier))
                .with_no_client_auth();
            Arc::new(config)
        };
        let (side, error) =
            handshake(anonymous(), server.server(ClientCertificates::Required, &[])).unwrap_err();
        assert_eq!((side, error), ("server", Error::NoCertificatesPresented));
        let (_, of_client) =
            handshake(anonymous(), server.server(ClientCertificates::Optional, &[])).unwrap();
        assert_eq!(of_client, None);
    }
}
