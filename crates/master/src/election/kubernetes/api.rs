//! [`Api`]: HTTP client of an API server. [`KubernetesServer`]: its address and credentials.
//!
//! HTTP/1.1 with a connection pool. A call that times out closes its connection, so the next call uses a new one. There
//! are no retries here: a failed call may have been executed.

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

use super::objects::{ApiStatus, Event};
use crate::election::registry::root_cause;

/// Timeout of a call.
pub(super) const CALL: Duration = Duration::from_millis(1500);
/// Timeout of a connect: shorter than the timeout of a call, so that a second attempt is possible.
const CONNECT: Duration = Duration::from_millis(1000);
/// Idle timeout of a pooled connection; API servers close idle connections after minutes.
const IDLE: Duration = Duration::from_secs(30);
/// Largest response in bytes: an object has at most 1.5 MB, and there are few.
const RESPONSE_BYTES_MAX: usize = 16 << 20;
/// Directory with the credentials of a pod for the API server.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Address and credentials of an API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesServer {
    /// URL, e.g. `https://10.0.0.1:443`.
    pub url: String,
    /// File with a token. Read for every call, because tokens are replaced while a pod runs.
    pub token_file: Option<PathBuf>,
    /// File with the CA certificates of the server.
    pub ca_file: Option<PathBuf>,
}

impl KubernetesServer {
    /// Returns the API server of the cluster in which this process runs. The error names the missing variable.
    pub fn in_cluster() -> Result<KubernetesServer, String> {
        let variable = |name: &str| {
            std::env::var(name)
                .map_err(|_| format!("{name} is not set; the registry kubernetes:// works only inside a pod"))
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
    // An IPv6 address needs brackets.
    if host.contains(':') { format!("https://[{host}]:{port}") } else { format!("https://{host}:{port}") }
}

/// Error of a call.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    /// The API server did not respond in time.
    #[error("{0}")]
    NoResponse(String),
    /// The API server rejected the call.
    #[error("{code}: {message}")]
    Refused { code: u16, message: String },
    /// The response is invalid.
    #[error("{0}")]
    Malformed(#[from] serde_json::Error),
    /// Token or certificates cannot be read.
    #[error("{0}")]
    Credentials(String),
}

impl ApiError {
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, ApiError::Refused { code: 404, .. })
    }

    /// Another process was faster: the object exists already, or has another version.
    pub(super) fn is_conflict(&self) -> bool {
        matches!(self, ApiError::Refused { code: 409, .. })
    }

    pub(super) fn is_denied(&self) -> bool {
        matches!(self, ApiError::Refused { code: 401 | 403, .. } | ApiError::Credentials(_))
    }
}

/// HTTP client of an API server.
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
            let unreadable = |error: &dyn fmt::Display| {
                ApiError::Credentials(format!("cannot read certificates from {}: {error}", path.display()))
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

    /// Makes a call with an optional object as body, and decodes the object in the response.
    pub(super) async fn call<Req: Serialize, Resp: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        object: Option<&Req>,
    ) -> Result<Resp, ApiError> {
        let body = object.map(serde_json::to_vec).transpose()?.unwrap_or_default();
        let deadline = Instant::now() + CALL;
        let response = timeout_at(deadline, async {
            let response = self.send(method, path, body.into()).await?;
            read(response).await
        });
        let body = response.await.map_err(|_| no_response())??;
        Ok(serde_json::from_slice(&body)?)
    }

    /// Opens a watch.
    pub(super) async fn watch(&self, path: &str) -> Result<Watch, ApiError> {
        let response = timeout_at(Instant::now() + CALL, self.send(Method::GET, path, Bytes::new()));
        let response = response.await.map_err(|_| no_response())??;
        if response.status().is_success() {
            return Ok(Watch { body: response.into_body(), buffer: vec![] });
        }
        let refused = timeout_at(Instant::now() + CALL, read(response)).await.map_err(|_| no_response())?;
        Err(refused.err().unwrap_or_else(no_response))
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>, ApiError> {
        let mut request = Request::new(Full::new(body));
        let uri = format!("{}{path}", self.server.url).parse();
        *request.uri_mut() =
            uri.map_err(|error| ApiError::NoResponse(format!("{}: {error}", self.server.url)))?;
        *request.method_mut() = method;
        let headers = request.headers_mut();
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(path) = &self.server.token_file {
            let token = std::fs::read_to_string(path).map_err(|error| {
                ApiError::Credentials(format!("cannot read token {}: {error}", path.display()))
            })?;
            let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim()))
                .map_err(|_| ApiError::Credentials(format!("{} contains no valid token", path.display())))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        self.client.request(request).await.map_err(|error| ApiError::NoResponse(root_cause(&error)))
    }
}

async fn read(response: Response<Incoming>) -> Result<Bytes, ApiError> {
    let status: StatusCode = response.status();
    let body = Limited::new(response.into_body(), RESPONSE_BYTES_MAX).collect().await;
    let body = body.map_err(|error| ApiError::NoResponse(error.to_string()))?.to_bytes();
    if status.is_success() {
        return Ok(body);
    }
    // A proxy may return a body that is no Status.
    let ApiStatus { message, .. } = serde_json::from_slice(&body).unwrap_or_default();
    let message = if message.is_empty() { status.to_string() } else { message };
    Err(ApiError::Refused { code: status.as_u16(), message })
}

pub(super) fn no_response() -> ApiError {
    ApiError::NoResponse(format!("no response within {} ms", CALL.as_millis()))
}

/// An open watch: a stream of events, one per line.
pub(super) struct Watch {
    body: Incoming,
    buffer: Vec<u8>,
}

impl Watch {
    /// Returns the next event; `None` when the server has ended the watch. Cancel-safe: no event is lost.
    pub(super) async fn next(&mut self) -> Result<Option<Event>, ApiError> {
        loop {
            if let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Ok(Some(Event::decode(&line)?));
            }
            if self.buffer.len() > RESPONSE_BYTES_MAX {
                return Err(ApiError::NoResponse("line of a watch is too long".into()));
            }
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            let frame = frame.map_err(|error| ApiError::NoResponse(root_cause(&error)))?;
            self.buffer.extend_from_slice(frame.data_ref().map_or(&[], |data| &data[..]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_server_url_brackets_ipv6_hosts() {
        assert_eq!(url("10.0.0.1", "443"), "https://10.0.0.1:443");
        assert_eq!(url("fd00::1", "443"), "https://[fd00::1]:443");
    }
}
