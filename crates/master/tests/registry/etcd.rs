//! Real etcd servers on loopback, each with a directory of its own, which end with the value that stands for them.

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

/// How long etcd may take to come up: it waits for an election, on a machine that may be busy.
const START: Duration = Duration::from_secs(30);

/// The binary: `MOONTIDE_ETCD`, or `etcd` from the path. None if the variable says `skip`.
fn binary() -> Option<PathBuf> {
    let named = std::env::var("MOONTIDE_ETCD").ok();
    if named.as_deref() == Some("skip") {
        println!("NOT RUN: MOONTIDE_ETCD=skip");
        return None;
    }
    let binary = PathBuf::from(named.as_deref().unwrap_or("etcd"));
    let version = Command::new(&binary).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    assert!(
        version.is_ok_and(|status| status.success()),
        "{} cannot be run: install etcd (`apt install etcd-server`), say where it is (MOONTIDE_ETCD=/path/to/etcd), \
         or leave these tests out (MOONTIDE_ETCD=skip)",
        binary.display()
    );
    Some(binary)
}

fn free_ports(count: usize) -> Vec<u16> {
    // All are held until all are known: none comes twice.
    let held: Vec<TcpListener> =
        (0..count).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    held.iter().map(|listener| listener.local_addr().expect("it is bound").port()).collect()
}

/// A server.
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
        command.spawn().expect("it said its version a moment ago")
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it is our child");
    }

    /// It is there, and does nothing.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it is our child");
        self.child.wait().expect("it is our child");
    }

    /// Again, with what it has on disk.
    pub(crate) fn restart(&mut self) {
        self.child = Server::spawn(&self.binary, &self.arguments);
    }

    fn has_ended(&mut self) -> Option<String> {
        self.child.try_wait().expect("it is our child")?;
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
}

impl Etcd {
    /// None if these tests are to be left out.
    pub(crate) async fn start(count: usize) -> Option<Etcd> {
        let binary = binary()?;
        // Somebody else may take a port between our knowing it and etcd's.
        for _ in 0..3 {
            let mut etcd = Etcd::spawn(&binary, count);
            if etcd.comes_up().await {
                return Some(etcd);
            }
        }
        panic!("etcd did not come up in three tries");
    }

    fn spawn(binary: &PathBuf, count: usize) -> Etcd {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let ports = free_ports(2 * count);
        let (clients, peers) = ports.split_at(count);
        let at = |port: u16| format!("http://127.0.0.1:{port}");
        let all: Vec<String> = (0..count).map(|n| format!("s{n}={}", at(peers[n]))).collect();
        let cluster = all.join(",");
        let servers = (0..count).map(|n| {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let name = format!("moontide-etcd-{}-{number}", std::process::id());
            let directory = std::env::temp_dir().join(name);
            let arguments: Vec<String> = [
                ("name", format!("s{n}")),
                ("data-dir", directory.display().to_string()),
                ("listen-client-urls", at(clients[n])),
                ("advertise-client-urls", at(clients[n])),
                ("listen-peer-urls", at(peers[n])),
                ("initial-advertise-peer-urls", at(peers[n])),
                ("initial-cluster", cluster.clone()),
                ("logger", "zap".into()),
                // What it says goes into a pipe that is read when it has ended: it must fit.
                ("log-level", "fatal".into()),
            ]
            .into_iter()
            .map(|(name, value)| format!("--{name}={value}"))
            .collect();
            let child = Server::spawn(binary, &arguments);
            let endpoint = format!("127.0.0.1:{}", clients[n]);
            Server { arguments, binary: binary.clone(), endpoint, directory, child }
        });
        Etcd { servers: servers.collect() }
    }

    async fn comes_up(&mut self) -> bool {
        let until = Instant::now() + START;
        let registry = self.open("is-it-there");
        loop {
            for server in &mut self.servers {
                if let Some(said) = server.has_ended() {
                    println!("etcd ended at once: {said}");
                    return false;
                }
            }
            if registry.read().await.is_ok() {
                return true;
            }
            assert!(Instant::now() < until, "etcd is not ready after {START:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// A registry of its own, as another process would have it.
    pub(crate) fn open(&self, place: &str) -> Arc<dyn Registry> {
        let endpoints: Vec<&str> = self.servers.iter().map(|server| server.endpoint.as_str()).collect();
        open_at(&endpoints.join(","), place)
    }
}

fn open_at(endpoints: &str, place: &str) -> Arc<dyn Registry> {
    let address: RegistryAddress = format!("etcd://{endpoints}/{place}").parse().expect("an address");
    address.connect().expect("nothing is asked yet").expect("etcd is a registry")
}

/// A way to a server on which answers may be lost, each with its connection.
pub(crate) struct LossyWay {
    endpoint: String,
    loses: Arc<AtomicBool>,
    running: JoinHandle<()>,
}

impl LossyWay {
    pub(crate) async fn to(server: &Server) -> LossyWay {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let endpoint = listener.local_addr().expect("it is bound").to_string();
        let (target, loses) = (server.endpoint.clone(), Arc::new(AtomicBool::new(false)));
        let losing = Arc::clone(&loses);
        let running = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(&target).await.expect("etcd listens");
                tokio::spawn(carry(client, server, Arc::clone(&losing)));
            }
        });
        LossyWay { endpoint, loses, running }
    }

    pub(crate) fn open(&self, place: &str) -> Arc<dyn Registry> {
        open_at(&self.endpoint, place)
    }

    /// The next answer is lost, and only that one.
    pub(crate) fn lose_one(&self) {
        self.loses.store(true, Ordering::Relaxed);
    }
}

impl Drop for LossyWay {
    fn drop(&mut self) {
        self.running.abort();
    }
}

async fn carry(client: TcpStream, server: TcpStream, loses: Arc<AtomicBool>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let asking = tokio::io::copy(&mut from_client, &mut to_server);
    let answering = async {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(length @ 1..) = from_server.read(&mut buffer).await {
            if has_answer(&buffer[..length]) && loses.swap(false, Ordering::Relaxed) {
                return;
            }
            if to_client.write_all(&buffer[..length]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! { _ = asking => {}, () = answering => {} }
}

/// Whether there is a frame of HTTP/2 that belongs to an answer: headers or data, and not what keeps the connection. Answers
/// here are small, so what was read begins with a frame.
fn has_answer(mut bytes: &[u8]) -> bool {
    while let [high, middle, low, kind, ..] = *bytes {
        if matches!(kind, 0 | 1) {
            return true;
        }
        let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        bytes = bytes.get(9 + length..).unwrap_or_default();
    }
    false
}
