//! A cluster of real processes: a master and nodes on free loopback ports, their output and admin endpoints.
//!
//! Every wait has a timeout. Dropping the handle of a process kills it by its pid, and prints its log if the test
//! fails.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, mpsc};
use std::time::{Duration, Instant};

use moontide_client::{Store, StoreConfig};
use moontide_types::NodeId;
use rustix::process::{Pid, Signal, kill_process};

pub const KIB: usize = 1 << 10;
pub const MIB: usize = 1 << 20;

/// Timeout of every step, on a busy machine.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// Timeout of a call; long, because a slow machine is not a failure.
pub const CALL: Duration = Duration::from_secs(20);

/// Returns true if `MOONTIDE_TESTS=full` requests the full sizes.
pub fn is_full() -> bool {
    std::env::var("MOONTIDE_TESTS").is_ok_and(|form| form == "full")
}

/// Returns `short` or `full`, depending on [`is_full`].
pub fn sized<T>(short: T, full: T) -> T {
    if is_full() { full } else { short }
}

/// Polls until `is_so` returns true.
#[track_caller]
pub fn until(what: &str, within: Duration, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + within;
    while !is_so() {
        assert!(Instant::now() < end, "{what}: timed out after {within:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Serializes clusters, also if the tests of a binary run on several threads.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|failed_elsewhere| failed_elsewhere.into_inner())
}

/// Returns a free loopback address outside of the ephemeral ports, so that it is still free after a restart.
pub fn free_address() -> String {
    // Ephemeral ports start at 32768; each process of a test run starts at another port.
    const PORTS: std::ops::Range<u16> = 12_000..32_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id() as usize * 97;
    for _ in PORTS {
        let at = (first + usize::from(NEXT.fetch_add(1, Ordering::Relaxed))) % PORTS.len();
        let address = format!("127.0.0.1:{}", PORTS.start + at as u16);
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
    panic!("no port of {PORTS:?} is free")
}

/// A directory, which is removed on drop.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name =
            format!("moontide-cluster-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a folder for logs");
        Folder(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

// -------------------------------------------------------------------------------------------------------- processes

/// A server process, which is killed on drop.
pub struct Process {
    child: Child,
    name: String,
    log: PathBuf,
    lines: HashMap<String, Vec<String>>,
    /// Time of its start.
    pub started: Instant,
}

impl Process {
    /// Starts `moontide` with arguments `words`, through the command prefix `through`, and waits until it has printed a
    /// line that starts with `last`.
    pub fn start(folder: &Path, name: &str, through: &[String], words: &[String], last: &str) -> Process {
        Process::start_prepared(folder, name, through, words, last, &|_| ())
    }

    /// As [`Process::start`], with a change of the command by `prepare`.
    pub fn start_prepared(
        folder: &Path,
        name: &str,
        through: &[String],
        words: &[String],
        last: &str,
        prepare: &dyn Fn(&mut Command),
    ) -> Process {
        let log = folder.join(format!("{name}.log"));
        let logged = File::options().create(true).append(true).open(&log).expect("a log");
        let all = through.iter().cloned().chain([env!("CARGO_BIN_EXE_moontide").to_owned()]);
        let all: Vec<String> = all.chain(words.iter().cloned()).collect();
        let mut command = Command::new(&all[0]);
        command.args(&all[1..]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(logged);
        prepare(&mut command);
        let started = Instant::now();
        let child = command.spawn().expect("the command starts");
        let mut process = Process { child, name: name.to_owned(), log, lines: HashMap::new(), started };
        let out = process.child.stdout.take().expect("stdout is piped");
        let (send, receive) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        let end = Instant::now() + STEP_TIMEOUT;
        loop {
            let line = match receive.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => line,
                Err(error) => panic!("{name} did not print {last:?} ({error}):\n{}", process.log_text()),
            };
            let (first, rest) = line.split_once(' ').unwrap_or((&line, ""));
            process.lines.entry(first.to_owned()).or_default().push(rest.to_owned());
            if first == last {
                return process;
            }
        }
    }

    /// Returns the text that it printed after `word`.
    #[track_caller]
    pub fn printed(&self, word: &str) -> &str {
        let lines = self.lines.get(word).and_then(|lines| lines.first());
        lines.unwrap_or_else(|| panic!("{} printed {:?}, without {word}", self.name, self.lines))
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("the child process exists");
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Returns the exit status if it has exited.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("our child")
    }

    pub fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Fetches an admin endpoint.
    #[track_caller]
    pub fn page(&self, path: &str) -> String {
        let address = self.printed("admin").trim_start_matches("http://");
        http_get(address, path).unwrap_or_else(|error| panic!("{}: cannot get {path}: {error}", self.name))
    }

    #[track_caller]
    pub fn metrics(&self) -> Numbers {
        Numbers::read(&self.page("/metrics"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let text = self.log_text();
            let from = text.lines().count().saturating_sub(40);
            let tail: Vec<&str> = text.lines().skip(from).collect();
            eprintln!("---- tail of the log of {} ----\n{}", self.name, tail.join("\n"));
        }
    }
}

// ------------------------------------------------------------------------------------------------------------ pages

/// GET over HTTP/1.0: the response ends with the connection.
pub fn http_get(address: &str, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(CALL))?;
    stream.set_write_timeout(Some(CALL))?;
    write!(stream, "GET {path} HTTP/1.0\r\nhost: {address}\r\n\r\n")?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    let (head, body) = response.split_once("\r\n\r\n").ok_or(std::io::ErrorKind::UnexpectedEof)?;
    if head.split(' ').nth(1) != Some("200") {
        return Err(std::io::Error::other(format!("{head}: {body}")));
    }
    Ok(body.to_owned())
}

/// Metrics by name with labels.
#[derive(Clone, Debug)]
pub struct Numbers(pub HashMap<String, u64>);

impl Numbers {
    pub fn read(page: &str) -> Numbers {
        let number = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse::<f64>().ok()?.ceil() as u64))
        };
        Numbers(page.lines().filter(|line| !line.starts_with('#')).filter_map(number).collect())
    }

    #[track_caller]
    pub fn get(&self, name: &str) -> u64 {
        *self.0.get(name).unwrap_or_else(|| panic!("no metric {name} among {:?}", self.0.keys()))
    }

    /// Sum of a metric over all label sets that contain `label`.
    pub fn sum(&self, name: &str, label: &str) -> u64 {
        let of_name = self.0.iter().filter(|(whole, _)| {
            whole.split_once('{').is_some_and(|(first, labels)| first == name && labels.contains(label))
        });
        of_name.map(|(_, value)| value).sum()
    }

    /// Metric of a master, by its name without the prefix.
    #[track_caller]
    pub fn master(&self, name: &str) -> u64 {
        self.get(&format!("moontide_master_{name}"))
    }

    /// Metric of a node, by its name without the prefix.
    #[track_caller]
    pub fn node(&self, name: &str) -> u64 {
        self.get(&format!("moontide_node_{name}"))
    }
}

/// Checks sums that hold in all metrics of a master.
#[track_caller]
pub fn check_master_sums(page: &Numbers) {
    let space = ["live", "reserved", "draining", "free"];
    let space: u64 = space.iter().map(|part| page.master(&format!("memory_{part}_bytes"))).sum();
    assert_eq!(space, page.master("memory_capacity_bytes"), "memory of the master");
    let reads = ["memory_hits", "device_hits", "disk_hits", "misses"];
    let reads: u64 = reads.iter().map(|part| page.master(&format!("read_{part}_total"))).sum();
    assert_eq!(reads, page.master("read_keys_total"), "reads of the master");
}

/// Checks sums that hold in all metrics of a node.
#[track_caller]
pub fn check_node_sums(page: &Numbers) {
    let memory = ["live", "writing", "draining", "free"];
    let memory: u64 = memory.iter().map(|part| page.node(&format!("memory_{part}_bytes"))).sum();
    assert_eq!(memory, page.node("memory_capacity_bytes"), "memory of a node");
    let commands = ["done", "accepted", "refused", "cancelled"];
    let commands: u64 = commands.iter().map(|part| page.node(&format!("commands_{part}_total"))).sum();
    let outstanding = page.node("commands_pending");
    assert_eq!(commands + outstanding, page.node("commands_received_total"), "commands of a node");
}

// ------------------------------------------------------------------------------------------------------ the cluster

/// Parameters of a cluster.
#[derive(Clone, Debug)]
pub struct Shape {
    pub nodes: usize,
    pub memory_mib: usize,
    pub groups: usize,
    pub session_ttl_ms: u64,
    /// Delay before memory of an earlier master or session is reallocated. 0 is safe without one-sided readers.
    pub reallocation_delay_ms: u64,
    /// Further arguments of the master, and of each node.
    pub master_words: Vec<String>,
    pub node_words: Vec<String>,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape {
            nodes: 3,
            memory_mib: 256,
            groups: 2,
            session_ttl_ms: 10_000,
            reallocation_delay_ms: 0,
            master_words: Vec::new(),
            node_words: Vec::new(),
        }
    }
}

pub fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// A master and nodes, each a process.
pub struct Cluster {
    // Dropped in this order: nodes, master, their directory, then the lock that admits the next test.
    pub nodes: Vec<Process>,
    pub master: Process,
    shape: Shape,
    /// Further arguments of each node.
    node_words: Vec<Vec<String>>,
    folder: Folder,
    _alone: MutexGuard<'static, ()>,
}

impl Cluster {
    pub fn start(shape: Shape) -> Cluster {
        let alone = alone();
        let folder = Folder::new();
        let master = start_master(&folder, &shape, &[(); 3].map(|()| free_address()));
        let (nodes, node_words) = (Vec::new(), Vec::new());
        let mut cluster = Cluster { nodes, master, shape: shape.clone(), node_words, folder, _alone: alone };
        for _ in 0..shape.nodes {
            cluster.add_node(&[]);
        }
        cluster
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Starts one more node, with further arguments.
    pub fn add_node(&mut self, more: &[String]) {
        let name = format!("node-{}", self.nodes.len());
        let node = self.start_node(&name, more);
        self.nodes.push(node);
        self.node_words.push(more.to_vec());
    }

    /// Starts one more node without the arguments of the shape.
    pub fn add_plain_node(&mut self) {
        let shape = Shape { node_words: Vec::new(), ..self.shape.clone() };
        let shape = std::mem::replace(&mut self.shape, shape);
        self.add_node(&[]);
        self.shape = shape;
    }

    /// Starts one more node through a command prefix, with a change of the command by `prepare`.
    pub fn add_node_prepared(&mut self, through: &[String], prepare: &dyn Fn(&mut Command)) {
        let name = format!("node-{}", self.nodes.len());
        let words = self.node_words(&name, &[]);
        let node = Process::start_prepared(self.folder.path(), &name, through, &words, "ready", prepare);
        self.nodes.push(node);
        self.node_words.push(Vec::new());
    }

    fn start_node(&self, name: &str, more: &[String]) -> Process {
        Process::start(self.folder.path(), name, &[], &self.node_words(name, more), "ready")
    }

    fn node_words(&self, name: &str, more: &[String]) -> Vec<String> {
        let shape = &self.shape;
        let mut all = words(&format!(
            "node --master {} --memory-bytes {}MiB --admin-listen 127.0.0.1:0",
            self.grpc(),
            shape.memory_mib
        ));
        if !more.iter().any(|word| word == "--listen") {
            all.extend(["--listen".to_owned(), free_address()]);
        }
        let socket = self.folder.path().join(format!("{name}.sock"));
        all.extend(["--shm-socket".to_owned(), socket.display().to_string()]);
        all.extend(shape.node_words.iter().cloned());
        all.extend(more.iter().cloned());
        all
    }

    /// Restarts a node that has exited, with its arguments, its address and its id.
    pub fn restart_node(&mut self, at: usize) {
        let node = &self.nodes[at];
        let mut more = self.node_words[at].clone();
        if !more.iter().any(|word| word == "--listen") {
            more.extend(["--listen".to_owned(), node.printed("tcp").to_owned()]);
        }
        if !more.iter().any(|word| word == "--node-id") {
            more.extend(["--node-id".to_owned(), node.printed("node").to_owned()]);
        }
        self.nodes[at] = self.start_node(&format!("node-{at}"), &more);
    }

    /// Restarts the master with its addresses, after it has exited.
    pub fn restart_master(&mut self) {
        let addresses = ["grpc", "frame", "admin"]
            .map(|name| self.master.printed(name).trim_start_matches("http://").to_owned());
        self.master = start_master(&self.folder, &self.shape, &addresses);
    }

    /// gRPC address of the master.
    pub fn grpc(&self) -> &str {
        self.master.printed("grpc")
    }

    pub fn id(&self, node: usize) -> NodeId {
        self.nodes[node].printed("node").parse().expect("a node id")
    }

    pub fn ids(&self) -> Vec<NodeId> {
        (0..self.nodes.len()).map(|node| self.id(node)).collect()
    }

    pub fn config(&self) -> StoreConfig {
        StoreConfig { timeout: CALL, ..StoreConfig::new(self.grpc()) }
    }

    /// Connects a client with shared memory.
    pub fn local(&self) -> Store {
        connect(self.config())
    }

    /// Connects a client over TCP only.
    pub fn remote(&self) -> Store {
        connect(StoreConfig { shm: false, ..self.config() })
    }

    /// Waits until the master has `nodes` nodes with all their segments.
    #[track_caller]
    pub fn wait_for_nodes(&self, nodes: usize) {
        let segments = (nodes * self.shape.groups) as u64;
        until(&format!("{nodes} nodes"), STEP_TIMEOUT, || {
            let page = self.master.metrics();
            page.master("node_sessions") == nodes as u64 && page.master("segments") == segments
        });
    }

    /// Waits until nothing is being written or drained, and the memory accounting of master and nodes agrees.
    #[track_caller]
    pub fn check_accounting(&self) {
        let differences = || {
            let master = self.master.metrics();
            check_master_sums(&master);
            let nodes: Vec<Numbers> = self.nodes.iter().map(Process::metrics).collect();
            nodes.iter().for_each(check_node_sums);
            let of_nodes =
                |part: &str| nodes.iter().map(|node| node.node(&format!("memory_{part}_bytes"))).sum::<u64>();
            let of_master = |part: &str| master.master(&format!("memory_{part}_bytes"));
            let mut different = Vec::new();
            for (part, same) in [
                ("live", "live"),
                ("reserved", "writing"),
                ("draining", "draining"),
                ("free", "free"),
                ("capacity", "capacity"),
            ] {
                if of_master(part) != of_nodes(same) {
                    different.push(format!("{part}: {} and {}", of_master(part), of_nodes(same)));
                }
            }
            for rest in ["reserved", "draining"] {
                if of_master(rest) != 0 {
                    different.push(format!("{rest}: {} at rest", of_master(rest)));
                }
            }
            different
        };
        let end = Instant::now() + STEP_TIMEOUT;
        loop {
            let different = differences();
            if different.is_empty() {
                return;
            }
            assert!(Instant::now() < end, "memory accounting of master and nodes differs: {different:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Ends a test: asserts that no process has logged an error.
    #[track_caller]
    pub fn end(self) {
        for process in self.nodes.iter().chain([&self.master]) {
            let text = process.log_text();
            let errors: Vec<&str> = text
                .lines()
                .filter(|line| line.contains(" ERROR ") || line.contains("panicked at"))
                .collect();
            assert!(errors.is_empty(), "{} logged {errors:?}", process.name);
        }
    }
}

fn start_master(folder: &Folder, shape: &Shape, [grpc, frame, admin]: &[String; 3]) -> Process {
    let mut all = words(&format!(
        "master --grpc-listen {grpc} --frame-listen {frame} --admin-listen {admin} --groups {} --session-ttl-ms {} \
         --reallocation-delay-ms {}",
        shape.groups, shape.session_ttl_ms, shape.reallocation_delay_ms
    ));
    all.extend(["--data-dir".to_owned(), folder.path().join("master").display().to_string()]);
    all.extend(shape.master_words.iter().cloned());
    Process::start(folder.path(), "master", &[], &all, "admin")
}

#[track_caller]
pub fn connect(config: StoreConfig) -> Store {
    Store::connect(config).expect("the master is reachable")
}
