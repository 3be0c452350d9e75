//! [`Credential`]: what a peer shows to a server, right or wrong, and connections with it.
//!
//! Peers do not check the servers, so that only the server can be the reason of a refusal.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use moontide_auth::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use moontide_auth::rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use moontide_auth::rustls::pki_types::pem::PemObject;
use moontide_auth::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use moontide_auth::rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme, version};
use moontide_auth::testing::{Authority, Directory, Validity};
use moontide_auth::{CredentialFiles, Role};
use moontide_tasks::MaybeTls;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, TlsStream};

/// Why a certificate is not valid in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    OtherAuthority,
    OtherCluster,
    OtherTrustDomain,
    Expired,
    NotYetValid,
    NoIdentity,
}

impl Flaw {
    pub const ALL: [Flaw; 6] = [
        Flaw::OtherAuthority,
        Flaw::OtherCluster,
        Flaw::OtherTrustDomain,
        Flaw::Expired,
        Flaw::NotYetValid,
        Flaw::NoIdentity,
    ];
}

/// What a peer shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    /// Bytes without TLS.
    NoTls,
    /// TLS without a certificate.
    NoCertificate,
    /// A certificate that would give this role, but for its flaw.
    Flawed(Flaw, Role),
    /// A certificate of the cluster.
    Valid(Role),
}

impl fmt::Display for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Credential::NoTls => f.write_str("no TLS"),
            Credential::NoCertificate => f.write_str("no certificate"),
            Credential::Flawed(flaw, role) => write!(f, "certificate of {role}, {flaw:?}"),
            Credential::Valid(role) => write!(f, "certificate of {role}"),
        }
    }
}

/// Issues certificates, of the cluster and others.
pub struct Issuer {
    directory: Directory,
    authority: Authority,
    other: Authority,
}

impl Issuer {
    pub fn new() -> Issuer {
        Issuer { directory: Directory::new(), authority: Authority::new(), other: Authority::new() }
    }

    /// Issues a certificate of the cluster.
    pub fn issue(&self, role: &Role) -> CredentialFiles {
        self.authority.issue(&self.directory, &role.to_string().replace('/', "-"), role.clone())
    }

    /// Returns how to connect with a credential; `None`: without TLS.
    pub fn client(&self, credential: &Credential) -> Option<ClientConfig> {
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&version::TLS13])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyServer(provider)));
        let files = match credential {
            Credential::NoTls => return None,
            Credential::NoCertificate => return Some(builder.with_no_client_auth()),
            Credential::Valid(role) => self.issue(role),
            Credential::Flawed(flaw, role) => self.issue_flawed(*flaw, role),
        };
        let chain = CertificateDer::pem_file_iter(&files.cert).unwrap().map(Result::unwrap).collect();
        let key = PrivateKeyDer::from_pem_file(&files.key).unwrap();
        Some(builder.with_client_auth_cert(chain, key).unwrap())
    }

    fn issue_flawed(&self, flaw: Flaw, role: &Role) -> CredentialFiles {
        let of_cluster = format!("spiffe://test/moontide/cluster/{role}");
        let (authority, identity, validity) = match flaw {
            Flaw::OtherAuthority => (&self.other, of_cluster, Validity::Now),
            Flaw::OtherCluster => {
                (&self.authority, format!("spiffe://test/moontide/else/{role}"), Validity::Now)
            }
            Flaw::OtherTrustDomain => {
                (&self.authority, format!("spiffe://else/moontide/cluster/{role}"), Validity::Now)
            }
            Flaw::Expired => (&self.authority, of_cluster, Validity::Past),
            Flaw::NotYetValid => (&self.authority, of_cluster, Validity::Future),
            Flaw::NoIdentity => (&self.authority, format!("https://test/cluster/{role}"), Validity::Now),
        };
        authority.issue_identity(&self.directory, "flawed", &identity, validity)
    }
}

/// Accepts every server.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        unreachable!("only TLS 1.3 is offered")
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Connects to a server that speaks the protocol `alpn`.
pub async fn connect(
    address: SocketAddr,
    client: Option<&ClientConfig>,
    alpn: &[u8],
) -> io::Result<MaybeTls<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let Some(client) = client else { return Ok(MaybeTls::Plain(stream)) };
    let mut config = client.clone();
    config.alpn_protocols = vec![alpn.to_vec()];
    let name = ServerName::try_from("moontide").unwrap();
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    Ok(MaybeTls::Tls(Box::new(TlsStream::Client(stream)), None))
}
