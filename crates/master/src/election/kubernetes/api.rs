//! [`Api`]: HTTP to an API server, and [`KubernetesServer`]: where it is.
//!
//! HTTP/1.1 with connections that are kept. A call that is not answered in time takes its connection with it, so the next one
//! finds a new one. Nothing is tried again here: what failed may have been done.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout_at};

use super::objects::{Event, Refusal};
use crate::election::registry::root_cause;

/// How long a call may take in all.
pub(super) const CALL: Duration = Duration::from_millis(1500);
/// How long a connection may take: a second try must fit into the callers' patience.
const CONNECT: Duration = Duration::from_millis(1000);
/// How long a connection is kept that nobody uses; servers close theirs after minutes.
const IDLE: Duration = Duration::from_secs(30);
/// The largest answer: an object is 1.5 MB at most, and there are few.
const ANSWER_BYTES_MAX: usize = 16 << 20;
/// Where a pod finds what it needs to call its API server.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Where an API server is, and how one is let in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesServer {
    /// Such as `https://10.0.0.1:443`.
    pub url: String,
    /// A file that holds a token. It is read for every call, because tokens are replaced while a pod runs.
    pub token_file: Option<PathBuf>,
    /// A file with the certificates that may vouch for the server.
    pub ca_file: Option<PathBuf>,
}

impl KubernetesServer {
    /// The server of the cluster that this process runs in. The error says what is missing.
    pub fn in_cluster() -> Result<KubernetesServer, String> {
        let variable = |name: &str| {
            std::env::var(name).map_err(|_| {
                format!("{name} is not set; outside of a pod the registry kubernetes:// cannot be used")
            })
        };
        let (host, port) = (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
        let folder = Path::new(SERVICE_ACCOUNT);
        Ok(KubernetesServer {
            url: url(&host, &port),
            token_file: Some(folder.join("token")),
            ca_file: Some(folder.join("ca.crt")),
        })
    }
}

fn url(host: &str, port: &str) -> String {
    // An address of version 6 needs brackets.
    if host.contains(':') { format!("https://[{host}]:{port}") } else { format!("https://{host}:{port}") }
}

/// Why a call did not do what it should.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    /// There was no answer, or not in time.
    #[error("{0}")]
    NoAnswer(String),
    /// The server said no.
    #[error("{code}: {message}")]
    Refused { code: u16, message: String },
    /// It said something that is not understood.
    #[error("{0}")]
    Malformed(#[from] serde_json::Error),
    /// What is needed to call it cannot be read.
    #[error("{0}")]
    Credentials(String),
}

impl ApiError {
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, ApiError::Refused { code: 404, .. })
    }

    /// Somebody was faster: the object exists already, or is not the one that was meant.
    pub(super) fn is_conflict(&self) -> bool {
        matches!(self, ApiError::Refused { code: 409, .. })
    }

    pub(super) fn is_denied(&self) -> bool {
        matches!(self, ApiError::Refused { code: 401 | 403, .. } | ApiError::Credentials(_))
    }
}

/// Calls to a server.
pub(super) struct Api {
    server: KubernetesServer,
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api").field("server", &self.server).finish_non_exhaustive()
    }
}

impl Api {
    pub(super) fn new(server: KubernetesServer) -> Result<Api, ApiError> {
        let mut roots = RootCertStore::empty();
        if let Some(path) = &server.ca_file {
            let unreadable = |why: &dyn fmt::Display| {
                ApiError::Credentials(format!("cannot read certificates from {}: {why}", path.display()))
            };
            for certificate in CertificateDer::pem_file_iter(path).map_err(|error| unreadable(&error))? {
                let certificate = certificate.map_err(|error| unreadable(&error))?;
                roots.add(certificate).map_err(|error| unreadable(&error))?;
            }
        }
        let provider = rustls::crypto::ring::default_provider();
        let tls = ClientConfig::builder_with_provider(provider.into())
            .with_safe_default_protocol_versions()
            .map_err(|error| ApiError::Credentials(error.to_string()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut http = HttpConnector::new();
        http.set_connect_timeout(Some(CONNECT));
        http.set_nodelay(true);
        http.enforce_http(false);
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_or_http()
            .enable_http1()
            .wrap_connector(http);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .build(connector);
        Ok(Api { server, client })
    }

    /// A call with an object for an object.
    pub(super) async fn call<Q: Serialize, A: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        object: Option<&Q>,
    ) -> Result<A, ApiError> {
        let body = object.map(serde_json::to_vec).transpose()?.unwrap_or_default();
        let until = Instant::now() + CALL;
        let answer = timeout_at(until, async {
            let response = self.send(method, path, body.into()).await?;
            read(response).await
        });
        let body = answer.await.map_err(|_| no_answer())??;
        Ok(serde_json::from_slice(&body)?)
    }

    /// Opens a watch.
    pub(super) async fn watch(&self, path: &str) -> Result<Watch, ApiError> {
        let response = timeout_at(Instant::now() + CALL, self.send(Method::GET, path, Bytes::new()));
        let response = response.await.map_err(|_| no_answer())??;
        if response.status().is_success() {
            return Ok(Watch { body: response.into_body(), buffer: vec![] });
        }
        let refused = timeout_at(Instant::now() + CALL, read(response)).await.map_err(|_| no_answer())?;
        Err(refused.err().unwrap_or_else(no_answer))
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>, ApiError> {
        let mut request = Request::new(Full::new(body));
        let uri = format!("{}{path}", self.server.url).parse();
        *request.uri_mut() =
            uri.map_err(|error| ApiError::NoAnswer(format!("{}: {error}", self.server.url)))?;
        *request.method_mut() = method;
        let headers = request.headers_mut();
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(path) = &self.server.token_file {
            let token = std::fs::read_to_string(path).map_err(|error| {
                ApiError::Credentials(format!("cannot read the token {}: {error}", path.display()))
            })?;
            let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim()))
                .map_err(|_| ApiError::Credentials(format!("{} does not hold a token", path.display())))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        self.client.request(request).await.map_err(|error| ApiError::NoAnswer(root_cause(&error)))
    }
}

async fn read(response: Response<Incoming>) -> Result<Bytes, ApiError> {
    let status: StatusCode = response.status();
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    let body = body.map_err(|error| ApiError::NoAnswer(error.to_string()))?.to_bytes();
    if status.is_success() {
        return Ok(body);
    }
    // What stands between us and the server may answer something else than a status.
    let Refusal { message, .. } = serde_json::from_slice(&body).unwrap_or_default();
    let message = if message.is_empty() { status.to_string() } else { message };
    Err(ApiError::Refused { code: status.as_u16(), message })
}

pub(super) fn no_answer() -> ApiError {
    ApiError::NoAnswer(format!("no answer within {} ms", CALL.as_millis()))
}

/// A watch that is open: lines of events.
pub(super) struct Watch {
    body: Incoming,
    buffer: Vec<u8>,
}

impl Watch {
    /// The next event; none when the server has ended the watch. Nothing is lost if it is not waited for to the end.
    pub(super) async fn next(&mut self) -> Result<Option<Event>, ApiError> {
        loop {
            if let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Ok(Some(Event::decode(&line)?));
            }
            if self.buffer.len() > ANSWER_BYTES_MAX {
                return Err(ApiError::NoAnswer("a line of a watch has no end".into()));
            }
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            let frame = frame.map_err(|error| ApiError::NoAnswer(root_cause(&error)))?;
            self.buffer.extend_from_slice(frame.data_ref().map_or(&[], |data| &data[..]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_of_both_families_make_an_address() {
        assert_eq!(url("10.0.0.1", "443"), "https://10.0.0.1:443");
        assert_eq!(url("fd00::1", "443"), "https://[fd00::1]:443");
    }
}
