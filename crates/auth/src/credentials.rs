//! [`Credentials`]: certificate, key and CA of this process, from files that are read again when they change.
//!
//! Certificates live for hours or days, and a process must not restart for a new one. Tools replace the files (cert-manager swaps a
//! symbolic link, others rename), so each use looks at the files, at most once in [`LOOK_INTERVAL`]. New files that cannot be used
//! are reported once, and the earlier ones stay in use: tools do not replace three files at one moment.
//!
//! Sessions of TLS are never resumed. A resumed one would skip the check of the certificates, and so outlive a CA that was
//! replaced; connections here are few and long.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use moontide_rt::sync::{Mutex, lock};
use moontide_rt::time::Instant;
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::NoServerSessionStorage;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tracing::{info, warn};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::identity::{Identity, identity_of};
use crate::verifier::{ClientVerifier, ExpectedServer, ServerVerifier};

/// Shortest interval between two looks at the files: a connection costs a handshake anyway, and a new certificate is used well before
/// the old one expires.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Most bytes of a file: some hundred certificates.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Files in PEM format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialFiles {
    /// Certificates of the authorities that peers' certificates must come from; several during a change of the CA.
    pub ca: PathBuf,
    /// Certificate of this process, followed by intermediate ones.
    pub cert: PathBuf,
    /// Private key of this process.
    pub key: PathBuf,
}

impl CredentialFiles {
    /// Returns the files that three settings name; `None` if none of them is set.
    ///
    /// # Errors
    /// The name of a setting that is missing, if others are set.
    pub fn of_settings(
        ca: Option<&Path>,
        cert: Option<&Path>,
        key: Option<&Path>,
    ) -> Result<Option<CredentialFiles>, &'static str> {
        match (ca, cert, key) {
            (None, None, None) => Ok(None),
            (Some(ca), Some(cert), Some(key)) => {
                Ok(Some(CredentialFiles { ca: ca.into(), cert: cert.into(), key: key.into() }))
            }
            (None, ..) => Err("ca"),
            (_, None, _) => Err("cert"),
            (_, _, None) => Err("key"),
        }
    }
}

/// Error: credentials cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A file cannot be read.
    #[error("cannot read {what} {}: {source}; check the path and that this user may read it", path.display())]
    Read {
        /// What the file has.
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// I/O error.
        source: io::Error,
    },
    /// A file has no usable content.
    #[error("{what} {} cannot be used: {reason}", path.display())]
    Content {
        /// What the file has.
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Reason.
        reason: String,
    },
}

/// Whether a client must have a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// Without one, the handshake fails.
    Required,
    /// Without one, the peer has no identity. A certificate that is sent must be valid.
    Optional,
}

/// What a person wants to know about the certificate in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateInfo {
    /// Identity of this process.
    pub identity: Identity,
    /// Expiry in seconds since 1970.
    pub expires_unix_s: i64,
}

/// Identifies the content of a file without reading it: device, inode, length and time of the last change.
type Stamp = (u64, u64, u64, i64, i64);

/// One set of files, as they were at one time.
struct Loaded {
    info: CertificateInfo,
    roots: Arc<RootCertStore>,
    resolver: Arc<SingleCertAndKey>,
}

struct State {
    loaded: Arc<Loaded>,
    stamps: Option<[Stamp; 3]>,
    looked_at: Instant,
}

/// Certificate, key and CA of this process.
pub struct Credentials {
    files: CredentialFiles,
    provider: Arc<CryptoProvider>,
    state: Mutex<State>,
}

impl fmt::Debug for Credentials {
    /// Omits the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("identity", &self.info().identity.to_string())
            .finish_non_exhaustive()
    }
}

impl Credentials {
    /// Reads the files.
    ///
    /// # Errors
    /// If one of them cannot be read or used. The error names it.
    pub fn load(files: CredentialFiles) -> Result<Arc<Credentials>, CredentialsError> {
        let provider = Arc::new(ring::default_provider());
        // Stamps first: a change in between is seen by the next look.
        let stamps = stamps(&files).ok();
        let loaded = Arc::new(read(&files, &provider)?);
        let state = Mutex::new(State { loaded, stamps, looked_at: Instant::now() });
        Ok(Arc::new(Credentials { files, provider, state }))
    }

    /// Returns the identity and the expiry of the certificate in use.
    pub fn info(&self) -> CertificateInfo {
        self.current().info.clone()
    }

    /// Returns a configuration for a server. `alpn`: the protocols that it speaks over TLS.
    pub fn server(&self, clients: ClientCertificates, alpn: &[&[u8]]) -> Arc<ServerConfig> {
        let loaded = self.current();
        let verifier = ClientVerifier::new(&loaded.roots, &loaded.info.identity, clients, &self.provider);
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the provider has TLS 1.3")
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::clone(&loaded.resolver) as _);
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        config.alpn_protocols = alpn.iter().map(|&protocol| protocol.to_vec()).collect();
        Arc::new(config)
    }

    /// Returns a configuration for a client of this server. `alpn`: the protocols that it speaks over TLS.
    pub fn client(&self, server: ExpectedServer, alpn: &[&[u8]]) -> Arc<ClientConfig> {
        let loaded = self.current();
        let verifier = ServerVerifier::new(&loaded.roots, &loaded.info.identity, server, &self.provider);
        let mut config = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the provider has TLS 1.3")
            .dangerous() // the name of this method: our verifier checks chain, validity and identity
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(Arc::clone(&loaded.resolver) as _);
        config.resumption = Resumption::disabled();
        config.enable_sni = false; // the name of the server is in its identity, not in DNS
        config.alpn_protocols = alpn.iter().map(|&protocol| protocol.to_vec()).collect();
        Arc::new(config)
    }

    /// Returns the content of the files, as new as the last look.
    fn current(&self) -> Arc<Loaded> {
        let mut state = lock(&self.state);
        let now = Instant::now();
        if now.saturating_duration_since(state.looked_at) < LOOK_INTERVAL {
            return Arc::clone(&state.loaded);
        }
        state.looked_at = now;
        let Ok(stamps) = stamps(&self.files) else { return Arc::clone(&state.loaded) }; // being replaced
        if state.stamps != Some(stamps) && !moontide_rt::mutation_enabled("renewed-certificate-ignored") {
            state.stamps = Some(stamps);
            match read(&self.files, &self.provider) {
                Ok(loaded) => {
                    info!(identity = %loaded.info.identity, expires_unix_s = loaded.info.expires_unix_s, "new certificate in use");
                    state.loaded = Arc::new(loaded);
                }
                Err(error) => {
                    warn!(%error, "new certificate files cannot be used; the earlier ones stay in use")
                }
            }
        }
        Arc::clone(&state.loaded)
    }
}

fn stamps(files: &CredentialFiles) -> io::Result<[Stamp; 3]> {
    let stamp = |path: &Path| {
        let found = fs::metadata(path)?;
        Ok::<Stamp, io::Error>((found.dev(), found.ino(), found.len(), found.mtime(), found.mtime_nsec()))
    };
    Ok([stamp(&files.ca)?, stamp(&files.cert)?, stamp(&files.key)?])
}

fn read(files: &CredentialFiles, provider: &CryptoProvider) -> Result<Loaded, CredentialsError> {
    let unusable =
        |what, path: &Path, reason: String| CredentialsError::Content { what, path: path.to_owned(), reason };
    let mut roots = RootCertStore::empty();
    for certificate in certificates("CA", &files.ca)? {
        roots.add(certificate).map_err(|error| unusable("CA", &files.ca, error.to_string()))?;
    }
    let chain = certificates("certificate", &files.cert)?;
    let info = info_of(&chain[0], &files.cert)?;
    let key = PrivateKeyDer::from_pem_slice(&content("key", &files.key)?)
        .map_err(|error| unusable("key", &files.key, pem_reason(error, "private key")))?;
    let certified = CertifiedKey::from_der(chain, key, provider).map_err(|error| {
        unusable(
            "key",
            &files.key,
            format!("{error}; it must belong to the certificate {}", files.cert.display()),
        )
    })?;
    Ok(Loaded { info, roots: Arc::new(roots), resolver: Arc::new(SingleCertAndKey::from(certified)) })
}

/// Returns the certificates of a file, at least one.
fn certificates(what: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let unusable = |reason| CredentialsError::Content { what, path: path.to_owned(), reason };
    let found: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(&content(what, path)?).collect();
    let found = found.map_err(|error| unusable(pem_reason(error, "certificate")))?;
    if found.is_empty() { Err(unusable("it has no certificate in PEM format".into())) } else { Ok(found) }
}

/// Returns identity and expiry of the first certificate of a file.
///
/// # Errors
/// If the file cannot be read, or its certificate has no identity.
pub fn certificate_info(path: &Path) -> Result<CertificateInfo, CredentialsError> {
    info_of(&certificates("certificate", path)?[0], path)
}

fn info_of(certificate: &[u8], path: &Path) -> Result<CertificateInfo, CredentialsError> {
    let unusable = |reason| CredentialsError::Content { what: "certificate", path: path.to_owned(), reason };
    let identity = identity_of(certificate)
        .map_err(|reason| unusable(format!("{reason} (`moontide certs` creates certificates)")))?;
    let expires_unix_s = X509Certificate::from_der(certificate)
        .map(|(_, parsed)| parsed.validity().not_after.timestamp())
        .map_err(|error| unusable(error.to_string()))?;
    Ok(CertificateInfo { identity, expires_unix_s })
}

fn pem_reason(error: pem::Error, what: &str) -> String {
    match error {
        pem::Error::NoItemsFound => format!("it has no {what} in PEM format"),
        other => other.to_string(),
    }
}

fn content(what: &'static str, path: &Path) -> Result<Vec<u8>, CredentialsError> {
    let failed = |source| CredentialsError::Read { what, path: path.to_owned(), source };
    let len = fs::metadata(path).map_err(failed)?.len();
    if len > FILE_BYTES_MAX {
        let reason = format!("it has {len} bytes, more than {FILE_BYTES_MAX}");
        return Err(CredentialsError::Content { what, path: path.to_owned(), reason });
    }
    fs::read(path).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Role;
    use crate::testing::{Authority, Directory};
    use moontide_types::NodeId;

    /// Lets the next use look at the files.
    fn look_again(credentials: &Credentials) {
        lock(&credentials.state).looked_at = Instant::now() - 2 * LOOK_INTERVAL;
    }

    #[test]
    fn changed_files_are_read_again_and_invalid_ones_are_not_used() {
        let (directory, authority) = (Directory::new(), Authority::new());
        let files = authority.issue(&directory, "one", Role::Node(NodeId(1)));
        let credentials = Credentials::load(files.clone()).unwrap();
        assert_eq!(credentials.info().identity.role(), &Role::Node(NodeId(1)));
        let other = authority.issue(&directory, "two", Role::Node(NodeId(2)));

        // The certificate alone does not belong to the key.
        fs::copy(&other.cert, directory.path().join("cert.new")).unwrap();
        fs::rename(directory.path().join("cert.new"), &files.cert).unwrap();
        look_again(&credentials);
        assert_eq!(
            credentials.info().identity.role(),
            &Role::Node(NodeId(1)),
            "the earlier pair stays in use"
        );

        fs::copy(&other.key, directory.path().join("key.new")).unwrap();
        fs::rename(directory.path().join("key.new"), &files.key).unwrap();
        assert_eq!(credentials.info().identity.role(), &Role::Node(NodeId(1)), "no look within the interval");
        look_again(&credentials);
        assert_eq!(credentials.info().identity.role(), &Role::Node(NodeId(2)));

        fs::remove_file(&files.ca).unwrap();
        look_again(&credentials);
        assert_eq!(
            credentials.info().identity.role(),
            &Role::Node(NodeId(2)),
            "a file is missing for a moment"
        );
    }

    #[test]
    fn unusable_file_is_named_with_reason() {
        let (directory, authority) = (Directory::new(), Authority::new());
        let files = authority.issue(&directory, "one", Role::Master);
        let other = authority.issue(&directory, "two", Role::Master);
        let error = |files: CredentialFiles| Credentials::load(files).unwrap_err().to_string();
        let absent = directory.path().join("absent");
        let found = error(CredentialFiles { ca: absent.clone(), ..files.clone() });
        assert!(found.contains("cannot read CA") && found.contains("absent"), "{found}");
        let found = error(CredentialFiles { cert: files.key.clone(), ..files.clone() });
        assert!(found.contains("no certificate in PEM format"), "{found}");
        let found = error(CredentialFiles { key: files.cert.clone(), ..files.clone() });
        assert!(found.contains("no private key in PEM format"), "{found}");
        let found = error(CredentialFiles { key: other.key, ..files.clone() });
        assert!(found.contains("must belong to the certificate"), "{found}");
        let found = error(CredentialFiles { cert: files.ca.clone(), ..files.clone() });
        assert!(found.contains("no identity"), "{found}");
        fs::write(&absent, vec![b'x'; FILE_BYTES_MAX as usize + 1]).unwrap();
        assert!(error(CredentialFiles { key: absent, ..files }).contains("more than 1048576"));
    }
}
