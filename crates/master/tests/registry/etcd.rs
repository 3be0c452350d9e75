//! Real etcd servers on loopback, each with its own directory. Drop kills them.

use std::io::Read as _;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use moontide_master::election::{Registry, RegistryAddress};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::not_run::not_run;

/// Timeout of the start of etcd: it waits for an election, on a machine that may be busy.
const START: Duration = Duration::from_secs(30);

/// Returns the path of etcd: `MOONTIDE_ETCD`, or `etcd` from the search path. `None` if the variable is `skip`.
fn binary() -> Option<PathBuf> {
    let named = std::env::var("MOONTIDE_ETCD").ok();
    if named.as_deref() == Some("skip") {
        not_run("MOONTIDE_ETCD=skip");
        return None;
    }
    let binary = PathBuf::from(named.as_deref().unwrap_or("etcd"));
    let version = Command::new(&binary).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    assert!(
        version.is_ok_and(|status| status.success()),
        "cannot run {}; install etcd (`apt install etcd-server`), set its path (MOONTIDE_ETCD=/path/to/etcd), \
         or skip these tests (MOONTIDE_ETCD=skip)",
        binary.display()
    );
    Some(binary)
}

fn free_ports(count: usize) -> Vec<u16> {
    // All listeners remain open until all ports are known, so no port is returned twice.
    let listeners: Vec<TcpListener> =
        (0..count).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    listeners.iter().map(|listener| listener.local_addr().expect("the listener is bound").port()).collect()
}

/// An etcd server.
pub(crate) struct Server {
    arguments: Vec<String>,
    binary: PathBuf,
    endpoint: String,
    directory: PathBuf,
    child: Child,
}

impl Server {
    fn spawn(binary: &PathBuf, arguments: &[String]) -> Child {
        let mut command = Command::new(binary);
        command.args(arguments).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().expect("etcd can be started")
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("the child process exists");
    }

    /// Stops the process with SIGSTOP.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn resume(&self) {
        self.signal(Signal::CONT);
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("the child process exists");
        self.child.wait().expect("the child process exists");
    }

    /// Starts the server again with its data.
    pub(crate) fn restart(&mut self) {
        self.child = Server::spawn(&self.binary, &self.arguments);
    }

    fn has_ended(&mut self) -> Option<String> {
        self.child.try_wait().expect("the child process exists")?;
        let mut text = String::new();
        let _ = self.child.stderr.take()?.read_to_string(&mut text);
        Some(text)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// An etcd of one or several servers.
pub(crate) struct Etcd {
    pub(crate) servers: Vec<Server>,
    /// Options of the addresses by which it is opened.
    query: String,
}

impl Etcd {
    /// Starts `count` servers. Returns `None` if the tests are skipped.
    pub(crate) async fn start(count: usize) -> Option<Etcd> {
        Etcd::start_with(count, &[], "").await
    }

    /// As [`Etcd::start`], with flags of the servers, and options of the addresses by which it is opened, as `?ca=file`. With options
    /// the servers use TLS.
    pub(crate) async fn start_with(count: usize, flags: &[String], query: &str) -> Option<Etcd> {
        let binary = binary()?;
        // Another process may take a port before etcd binds it.
        for _ in 0..3 {
            let mut etcd = Etcd::spawn(&binary, count, flags, query);
            if etcd.is_ready().await {
                return Some(etcd);
            }
        }
        panic!("etcd did not start in three attempts");
    }

    fn spawn(binary: &PathBuf, count: usize, flags: &[String], query: &str) -> Etcd {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let ports = free_ports(2 * count);
        let (clients, peers) = ports.split_at(count);
        let at = |port: u16| format!("http://127.0.0.1:{port}");
        let scheme = if query.is_empty() { "http" } else { "https" };
        let for_clients = |port: u16| format!("{scheme}://127.0.0.1:{port}");
        let all: Vec<String> = (0..count).map(|n| format!("s{n}={}", at(peers[n]))).collect();
        let cluster = all.join(",");
        let servers = (0..count).map(|n| {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let name = format!("moontide-etcd-{}-{number}", std::process::id());
            let directory = std::env::temp_dir().join(name);
            let arguments: Vec<String> = [
                ("name", format!("s{n}")),
                ("data-dir", directory.display().to_string()),
                ("listen-client-urls", for_clients(clients[n])),
                ("advertise-client-urls", for_clients(clients[n])),
                ("listen-peer-urls", at(peers[n])),
                ("initial-advertise-peer-urls", at(peers[n])),
                ("initial-cluster", cluster.clone()),
                ("logger", "zap".into()),
                // The log goes into a pipe that is read only after the exit, so it must be short.
                ("log-level", "fatal".into()),
            ]
            .into_iter()
            .map(|(name, value)| format!("--{name}={value}"))
            .chain(flags.iter().cloned())
            .collect();
            let child = Server::spawn(binary, &arguments);
            let endpoint = format!("127.0.0.1:{}", clients[n]);
            Server { arguments, binary: binary.clone(), endpoint, directory, child }
        });
        Etcd { servers: servers.collect(), query: query.to_owned() }
    }

    async fn is_ready(&mut self) -> bool {
        let deadline = Instant::now() + START;
        let registry = self.open("readiness");
        loop {
            for server in &mut self.servers {
                if let Some(output) = server.has_ended() {
                    println!("etcd exited at its start: {output}");
                    return false;
                }
            }
            if registry.read().await.is_ok() {
                return true;
            }
            assert!(Instant::now() < deadline, "etcd is not ready after {START:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Opens a separate registry client, as another process would.
    pub(crate) fn open(&self, prefix: &str) -> Arc<dyn Registry> {
        self.open_with(prefix, &self.query)
    }

    /// As [`Etcd::open`], with other options of the address.
    pub(crate) fn open_with(&self, prefix: &str, query: &str) -> Arc<dyn Registry> {
        open_at(&self.endpoints(), prefix, query)
    }

    /// Returns the addresses of the servers, separated by commas.
    pub(crate) fn endpoints(&self) -> String {
        let endpoints: Vec<&str> = self.servers.iter().map(|server| server.endpoint.as_str()).collect();
        endpoints.join(",")
    }
}

fn open_at(endpoints: &str, prefix: &str, query: &str) -> Arc<dyn Registry> {
    let address: RegistryAddress = format!("etcd://{endpoints}/{prefix}{query}").parse().expect("an address");
    address.connect().expect("connect makes no call").expect("etcd is a registry")
}

/// Proxy to a server that can lose a response and close its connection.
pub(crate) struct LossyProxy {
    endpoint: String,
    lose_next: Arc<AtomicBool>,
    running: JoinHandle<()>,
}

impl LossyProxy {
    pub(crate) async fn start(server: &Server) -> LossyProxy {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let endpoint = listener.local_addr().expect("the listener is bound").to_string();
        let (target, lose_next) = (server.endpoint.clone(), Arc::new(AtomicBool::new(false)));
        let lose = Arc::clone(&lose_next);
        let running = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(&target).await.expect("etcd listens");
                tokio::spawn(forward(client, server, Arc::clone(&lose)));
            }
        });
        LossyProxy { endpoint, lose_next, running }
    }

    pub(crate) fn open(&self, prefix: &str) -> Arc<dyn Registry> {
        open_at(&self.endpoint, prefix, "")
    }

    /// Loses the next response only.
    pub(crate) fn lose_one(&self) {
        self.lose_next.store(true, Ordering::Relaxed);
    }
}

impl Drop for LossyProxy {
    fn drop(&mut self) {
        self.running.abort();
    }
}

async fn forward(client: TcpStream, server: TcpStream, lose_next: Arc<AtomicBool>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let requests = tokio::io::copy(&mut from_client, &mut to_server);
    let responses = async {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(length @ 1..) = from_server.read(&mut buffer).await {
            if has_response(&buffer[..length]) && lose_next.swap(false, Ordering::Relaxed) {
                return;
            }
            if to_client.write_all(&buffer[..length]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! { _ = requests => {}, () = responses => {} }
}

/// Returns whether the bytes contain an HTTP/2 frame of a response: headers or data. Responses here are small, so every
/// read starts at a frame boundary.
fn has_response(mut bytes: &[u8]) -> bool {
    while let [high, middle, low, kind, ..] = *bytes {
        if matches!(kind, 0 | 1) {
            return true;
        }
        let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        bytes = bytes.get(9 + length..).unwrap_or_default();
    }
    false
}
