//! [`ApiServer`]: fake API server of Kubernetes on loopback, for Leases and Secrets, with these rules:
//!
//! | operation | rule |
//! |---|---|
//! | versions | one counter for all objects; every change increments it |
//! | create | 409 if the object exists; a version must not be given |
//! | update | 409 unless version and uid match the object; a missing Lease is created if no uid is given |
//! | delete | 409 unless the preconditions hold |
//! | watch | events since a version, then new events; bookmarks; 410 if the version is too old; ends at its timeout |
//!
//! Source: "Kubernetes API Concepts" at https://kubernetes.io/docs/reference/using-api/.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::Response;
use futures_util::stream;
use moontide_master::election::{KubernetesRegistry, KubernetesServer, Registry};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

const NAMESPACE: &str = "storage";
/// Interval of bookmarks; real servers send one per minute.
const BOOKMARK: Duration = Duration::from_millis(200);

/// Injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Response with this status code.
    Refuse(u16),
    /// No response.
    Hang,
    /// The connection breaks within the response; the call is not executed.
    Cut,
    /// The connection breaks within the response; the call is executed.
    DoneButCut,
    /// Older versions are compacted, and a new version exists.
    Forget,
}

#[derive(Default)]
struct ServerState {
    version: u64,
    /// Versions below this one are compacted.
    compacted: u64,
    objects: BTreeMap<String, Value>,
    /// Version, event type, path and object.
    history: Vec<(u64, &'static str, String, Value)>,
    always: Option<Fault>,
    once: VecDeque<Fault>,
    next_watch: Option<Fault>,
    /// Whether the next object to delete changes right before the deletion.
    slow_delete: bool,
    watches: usize,
    token: Option<String>,
}

type Refusal = (u16, &'static str, String);

impl ServerState {
    fn next_version(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    fn store(&mut self, path: &str, mut object: Value, kind: &'static str) -> Value {
        let version = self.next_version();
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        if kind == "DELETED" {
            self.objects.remove(path);
        } else {
            self.objects.insert(path.into(), object.clone());
        }
        self.history.push((version, kind, path.into(), object.clone()));
        object
    }

    fn create(&mut self, collection: &str, mut object: Value) -> Result<Value, Refusal> {
        check(&object)?;
        let name = text(&object, "name").to_owned();
        let path = format!("{collection}/{name}");
        if !text(&object, "resourceVersion").is_empty() {
            let reason = "resourceVersion should not be set on objects to be created";
            return Err((500, "InternalError", reason.into()));
        }
        if self.objects.contains_key(&path) {
            return Err((409, "AlreadyExists", format!("\"{name}\" already exists")));
        }
        object["metadata"]["uid"] = json!(format!("uid-{}", self.version + 1));
        object["metadata"]["namespace"] = json!(NAMESPACE);
        object["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
        Ok(self.store(&path, object, "ADDED"))
    }

    fn update(&mut self, path: &str, mut object: Value) -> Result<Value, Refusal> {
        check(&object)?;
        let (uid, version) = (text(&object, "uid").to_owned(), text(&object, "resourceVersion").to_owned());
        let Some(stored) = self.objects.get(path) else {
            if uid.is_empty() {
                let collection = path.rsplit_once('/').expect("a path").0.to_owned();
                object["metadata"]["resourceVersion"] = json!("");
                return self.create(&collection, object);
            }
            return Err((409, "Conflict", "Precondition failed: UID in object meta: ".into()));
        };
        if version.is_empty() {
            let reason = "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update";
            return Err((422, "Invalid", reason.into()));
        }
        if text(stored, "resourceVersion") != version || (!uid.is_empty() && text(stored, "uid") != uid) {
            return Err((409, "Conflict", "the object has been modified; please apply your changes".into()));
        }
        for kept in ["uid", "namespace", "creationTimestamp"] {
            object["metadata"][kept] = stored["metadata"][kept].clone();
        }
        Ok(self.store(path, object, "MODIFIED"))
    }

    fn delete(&mut self, path: &str, options: &Value) -> Result<Value, Refusal> {
        if std::mem::take(&mut self.slow_delete) {
            let stored = self.get(path)?;
            self.store(path, stored, "MODIFIED");
        }
        let stored = self.get(path)?;
        for field in ["uid", "resourceVersion"] {
            let wanted = &options["preconditions"][field];
            if !wanted.is_null() && *wanted != stored["metadata"][field] {
                return Err((409, "Conflict", format!("Precondition failed: {field}")));
            }
        }
        self.store(path, stored, "DELETED");
        Ok(json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}))
    }

    fn get(&self, path: &str) -> Result<Value, Refusal> {
        self.objects.get(path).cloned().ok_or_else(|| (404, "NotFound", format!("{path} not found")))
    }

    fn list(&self, collection: &str, selector: &str) -> Value {
        let is_listed = |(path, object): &(&String, &Value)| {
            path.rsplit_once('/').is_some_and(|(folder, _)| folder == collection)
                && is_selected(object, selector)
        };
        // Items of a list have no kind.
        let items: Vec<Value> = self
            .objects
            .iter()
            .filter(is_listed)
            .map(|(_, object)| json!({"metadata": object["metadata"], "spec": object["spec"]}))
            .collect();
        json!({
            "kind": "LeaseList",
            "apiVersion": "coordination.k8s.io/v1",
            "metadata": {"resourceVersion": self.version.to_string()},
            "items": items,
        })
    }

    /// Returns the lines of a watch for events after `since`, and the last version.
    fn lines(&self, collection: &str, selector: &str, since: u64) -> Result<(String, u64), String> {
        if since < self.compacted {
            let reason = format!("too old resource version: {since} ({})", self.compacted);
            return Err(line("ERROR", &status(410, "Expired", &reason)));
        }
        let mut lines = String::new();
        for (version, kind, path, object) in &self.history {
            let inside = path.rsplit_once('/').is_some_and(|(folder, _)| folder == collection);
            if *version > since && inside && is_selected(object, selector) {
                lines += &line(kind, object);
            }
        }
        Ok((lines, self.version))
    }
}

fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object["metadata"][field].as_str().unwrap_or_default()
}

/// Checks an object as an API server does.
fn check(object: &Value) -> Result<(), Refusal> {
    let invalid = |reason: String| Err((422, "Invalid", reason));
    match (object["apiVersion"].as_str(), object["kind"].as_str()) {
        (Some("coordination.k8s.io/v1"), Some("Lease")) | (Some("v1"), Some("Secret")) => {}
        other => return invalid(format!("unknown kind {other:?}")),
    }
    if text(object, "name").is_empty() {
        return invalid("metadata.name: Required value".into());
    }
    let spec = &object["spec"];
    if spec
        .get("leaseDurationSeconds")
        .is_some_and(|seconds| seconds.as_u64().is_none_or(|seconds| seconds == 0))
    {
        return invalid("spec.leaseDurationSeconds: must be greater than 0".into());
    }
    for field in ["acquireTime", "renewTime"] {
        let Some(time) = spec.get(field) else { continue };
        let shape: String = time.as_str().unwrap_or_default().chars().map(digit).collect();
        if shape != "dddd-dd-ddTdd:dd:dd.ddddddZ" {
            return Err((400, "BadRequest", format!("{field}: parsing time {time}")));
        }
    }
    Ok(())
}

fn digit(c: char) -> char {
    if c.is_ascii_digit() { 'd' } else { c }
}

fn is_selected(object: &Value, selector: &str) -> bool {
    let Some((label, value)) = selector.split_once('=') else { return true };
    object["metadata"]["labels"][label].as_str() == Some(value)
}

fn line(kind: &str, object: &Value) -> String {
    format!("{}\n", json!({"type": kind, "object": object}))
}

fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    })
}

/// Handle of the server. Drop stops it.
pub(crate) struct ApiServer {
    shared: Arc<Shared>,
    url: String,
    serving: JoinHandle<()>,
}

struct Shared {
    state: Mutex<ServerState>,
    /// Current version, for watches.
    changes: watch::Sender<u64>,
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl ApiServer {
    pub(crate) async fn start() -> ApiServer {
        let shared =
            Arc::new(Shared { state: Mutex::new(ServerState::default()), changes: watch::Sender::new(0) });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("the listener is bound"));
        let router = Router::new().fallback(handle).with_state(Arc::clone(&shared));
        let serving =
            tokio::spawn(async move { axum::serve(listener, router).await.expect("the server listens") });
        ApiServer { shared, url, serving }
    }

    /// Opens a separate registry client, as another process would.
    pub(crate) fn open(&self, name: &str) -> Arc<dyn Registry> {
        let server = KubernetesServer { url: self.url.clone(), token_file: None, ca_file: None };
        Arc::new(KubernetesRegistry::connect(server, NAMESPACE, name).expect("connect makes no call"))
    }

    pub(crate) fn open_with_token(&self, name: &str, file: &Path) -> Arc<dyn Registry> {
        let server = KubernetesServer { url: self.url.clone(), token_file: Some(file.into()), ca_file: None };
        Arc::new(KubernetesRegistry::connect(server, NAMESPACE, name).expect("connect makes no call"))
    }

    /// Injects a fault into every call from now on, or none.
    pub(crate) fn always(&self, fault: Option<Fault>) {
        self.shared.state.lock().always = fault;
    }

    /// Injects a fault into the next call.
    pub(crate) fn once(&self, fault: Fault) {
        self.shared.state.lock().once.push_back(fault);
    }

    /// Injects a fault into the next watch.
    pub(crate) fn next_watch(&self, fault: Fault) {
        self.shared.state.lock().next_watch = Some(fault);
    }

    /// Changes the next object to delete right before its deletion.
    pub(crate) fn next_delete_is_late(&self) {
        self.shared.state.lock().slow_delete = true;
    }

    /// Deletes a Lease, as an operator would.
    pub(crate) fn lose(&self, name: &str) {
        let path = format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{name}");
        self.shared.state.lock().delete(&path, &Value::Null).expect("the lease exists");
    }

    /// Returns the number of watches so far.
    pub(crate) fn watches(&self) -> usize {
        self.shared.state.lock().watches
    }

    /// Accepts only calls with this token from now on.
    pub(crate) fn expect_token(&self, token: &str) {
        self.shared.state.lock().token = Some(token.into());
    }
}

fn respond(outcome: Result<Value, Refusal>) -> Response {
    let (code, body) = match outcome {
        Ok(object) => (200, object),
        Err((code, reason, message)) => (code, status(code, reason, &message)),
    };
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = StatusCode::from_u16(code).expect("a code");
    response
}

/// Returns a response that breaks within the body.
fn cut() -> Response {
    let halves = [Ok(Bytes::from_static(b"{\"kind\": ")), Err(std::io::Error::other("cut"))];
    Response::new(Body::from_stream(stream::iter(halves)))
}

async fn handle(
    State(shared): State<Arc<Shared>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let query: HashMap<String, String> = uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.replace("%2F", "/").replace("%3D", "=")))
        .collect();
    let is_watch = query.contains_key("watch");
    let fault = {
        let mut state = shared.state.lock();
        let expected = state.token.as_ref().map(|token| format!("Bearer {token}"));
        let given = headers.get("authorization").and_then(|value| value.to_str().ok());
        if expected.is_some() && given != expected.as_deref() {
            return respond(Err((401, "Unauthorized", "Unauthorized".into())));
        }
        state.watches += usize::from(is_watch);
        let watch_fault = if is_watch { state.next_watch.take() } else { None };
        state.always.or(watch_fault).or_else(|| state.once.pop_front())
    };
    match fault {
        Some(Fault::Refuse(code)) => return respond(Err((code, "Injected", format!("injected {code}")))),
        Some(Fault::Hang) => {
            sleep(Duration::from_secs(3600)).await;
            return cut();
        }
        Some(Fault::Cut) => return cut(),
        Some(Fault::Forget) => {
            let mut state = shared.state.lock();
            let version = state.next_version();
            state.compacted = version;
            state.history.clear();
        }
        Some(Fault::DoneButCut) | None => {}
    }
    if is_watch {
        return watching(shared, uri.path().to_owned(), query);
    }
    let path = uri.path();
    let object: Value = serde_json::from_slice(&body).unwrap_or_default();
    let is_collection = path.ends_with("/leases") || path.ends_with("/secrets");
    let outcome = {
        let mut state = shared.state.lock();
        let outcome = match method {
            Method::GET if is_collection => {
                Ok(state.list(path, query.get("labelSelector").map_or("", |selector| selector)))
            }
            Method::GET => state.get(path),
            Method::POST => state.create(path, object),
            Method::PUT => state.update(path, object),
            Method::DELETE => state.delete(path, &object),
            _ => Err((405, "MethodNotAllowed", "the server does not allow this method".into())),
        };
        shared.changes.send_replace(state.version);
        outcome
    };
    if fault == Some(Fault::DoneButCut) { cut() } else { respond(outcome) }
}

struct Watching {
    shared: Arc<Shared>,
    changes: watch::Receiver<u64>,
    path: String,
    selector: String,
    since: u64,
    end: Instant,
    is_done: bool,
}

fn watching(shared: Arc<Shared>, path: String, query: HashMap<String, String>) -> Response {
    let number = |name: &str| query.get(name).and_then(|text| text.parse::<u64>().ok());
    let watching = Watching {
        changes: shared.changes.subscribe(),
        shared,
        path,
        selector: query.get("labelSelector").cloned().unwrap_or_default(),
        since: number("resourceVersion").expect("a watch has a start version"),
        end: Instant::now() + Duration::from_secs(number("timeoutSeconds").unwrap_or(1800)),
        is_done: false,
    };
    Response::new(Body::from_stream(stream::unfold(watching, |mut watching| async move {
        if watching.is_done {
            return None;
        }
        loop {
            watching.changes.borrow_and_update();
            let lines =
                watching.shared.state.lock().lines(&watching.path, &watching.selector, watching.since);
            let text = match lines {
                Err(last) => {
                    watching.is_done = true;
                    last
                }
                Ok((lines, last)) => {
                    watching.since = last;
                    lines
                }
            };
            if !text.is_empty() {
                return Some((Ok::<_, std::io::Error>(Bytes::from(text)), watching));
            }
            let left = watching.end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            if timeout(left.min(BOOKMARK), watching.changes.changed()).await.is_err() {
                let version = json!({"resourceVersion": watching.since.to_string()});
                let object =
                    json!({"kind": "Lease", "apiVersion": "coordination.k8s.io/v1", "metadata": version});
                return Some((Ok(Bytes::from(line("BOOKMARK", &object))), watching));
            }
        }
    })))
}
