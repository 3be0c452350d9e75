//! [`EtcdConnector`]: opens the connections to etcd, with TLS if files are given.
//!
//! Each new connection looks at the files and uses their current content, so that certificates are replaced without a restart.
//! Existing connections go on. New files that cannot be used are reported once, and the earlier content stays in use: tools do not
//! replace three files at one moment.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use moontide_tasks::MaybeTls;
use parking_lot::Mutex;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, TlsStream};
use tonic::codegen::http::Uri;
use tower_service::Service;
use tracing::{info, warn};

use crate::election::address::EtcdTlsFiles;

/// Protocol of gRPC over TLS.
const ALPN: &[u8] = b"h2";

/// Opens connections to etcd.
#[derive(Clone, Debug)]
pub(super) struct EtcdConnector(Option<Arc<TlsFiles>>);

impl EtcdConnector {
    /// Reads the files.
    ///
    /// # Errors
    /// If one of them cannot be read or used. The text names it.
    pub(super) fn new(files: Option<&EtcdTlsFiles>) -> Result<EtcdConnector, String> {
        let files = files.map(|files| TlsFiles::load(files.clone())).transpose()?;
        Ok(EtcdConnector(files.map(Arc::new)))
    }
}

impl Service<Uri> for EtcdConnector {
    type Response = TokioIo<MaybeTls<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let files = self.0.clone();
        Box::pin(async move {
            let host = uri.host().unwrap_or_default();
            let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
            let port = uri.port_u16().ok_or_else(|| io::Error::other("address has no port"))?;
            let stream = TcpStream::connect((host, port)).await?;
            stream.set_nodelay(true)?;
            let Some(files) = files else { return Ok(TokioIo::new(MaybeTls::Plain(stream))) };
            let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
            let stream = TlsConnector::from(files.current()).connect(name, stream).await?;
            // etcd is no process of the cluster, and has no identity in it.
            Ok(TokioIo::new(MaybeTls::Tls(Box::new(TlsStream::Client(stream)), None)))
        })
    }
}

/// Identifies the content of the files without reading it: device, inode, length and time of the last change of each.
type Stamps = Vec<(u64, u64, u64, i64, i64)>;

/// Files for TLS, and their content.
struct TlsFiles {
    files: EtcdTlsFiles,
    /// `None`: a file could not be found.
    loaded: Mutex<(Option<Stamps>, Arc<ClientConfig>)>,
}

impl fmt::Debug for TlsFiles {
    /// Omits the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.files.fmt(f)
    }
}

impl TlsFiles {
    fn load(files: EtcdTlsFiles) -> Result<TlsFiles, String> {
        // Stamps first: a change in between is seen by the next connection.
        let stamps = stamps(&files).ok();
        let config = config_of(&files)?;
        Ok(TlsFiles { files, loaded: Mutex::new((stamps, config)) })
    }

    /// Returns the configuration by the current content of the files.
    fn current(&self) -> Arc<ClientConfig> {
        let (seen, config) = &mut *self.loaded.lock();
        // An error: a file is being replaced.
        if let Ok(stamps) = stamps(&self.files)
            && seen.as_ref() != Some(&stamps)
        {
            *seen = Some(stamps);
            match config_of(&self.files) {
                Ok(new) => {
                    info!("new certificate files for etcd in use");
                    *config = new;
                }
                Err(reason) => {
                    warn!(
                        reason,
                        "new certificate files for etcd cannot be used; the earlier ones stay in use"
                    );
                }
            }
        }
        Arc::clone(config)
    }
}

fn stamps(files: &EtcdTlsFiles) -> io::Result<Stamps> {
    let client = files.client.iter().flat_map(|(cert, key)| [cert, key]);
    let stamp = |path| {
        let found = fs::metadata(path)?;
        Ok((found.dev(), found.ino(), found.len(), found.mtime(), found.mtime_nsec()))
    };
    std::iter::once(&files.ca).chain(client).map(stamp).collect()
}

fn config_of(files: &EtcdTlsFiles) -> Result<Arc<ClientConfig>, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&files.ca)? {
        roots.add(certificate).map_err(|error| unusable(&files.ca, &error))?;
    }
    let builder = ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    let mut config = match &files.client {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => {
            let private =
                PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|error| unusable(key, &error))?;
            let both = format!("{} and {}", cert.display(), key.display());
            builder
                .with_client_auth_cert(certificates(cert)?, private)
                .map_err(|error| unusable(Path::new(&both), &error))?
        }
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Arc::new(config))
}

/// Returns the certificates of a file, at least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    let found = found.map_err(|error| unusable(path, &error))?;
    if found.is_empty() { Err(unusable(path, &"it has no certificate in PEM format")) } else { Ok(found) }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

fn unusable(path: &Path, reason: &dyn fmt::Display) -> String {
    format!("cannot use {}: {reason}", path.display())
}
