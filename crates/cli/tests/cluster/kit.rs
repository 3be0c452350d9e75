//! A cluster of real processes: a master and nodes on free ports of loopback, what they print, and their pages.
//!
//! Every wait has a deadline. Processes are killed by their pid when their handle is dropped; their logs are shown if the
//! test is failing then.

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

/// Whatever goes well is done by then, on a machine that has much else to do.
pub const SOON: Duration = Duration::from_secs(30);

/// What a call of a test may take: a slow machine is no failure.
pub const CALL: Duration = Duration::from_secs(20);

/// Whether the full sizes are wanted.
pub fn is_full() -> bool {
    std::env::var("MOONTIDE_CLUSTER").is_ok_and(|form| form == "full")
}

/// So much in the short form, so much in the full one.
pub fn sized<T>(short: T, full: T) -> T {
    if is_full() { full } else { short }
}

/// Polls until something is so.
#[track_caller]
pub fn until(what: &str, within: Duration, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + within;
    while !is_so() {
        assert!(Instant::now() < end, "{what}: not within {within:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// One cluster at a time, also where the tests of a binary run on several threads.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|failed_elsewhere| failed_elsewhere.into_inner())
}

/// A free port of loopback that the kernel gives to nobody by itself: who is started again finds it free again.
pub fn free_address() -> String {
    // Below those that the kernel gives away, which begin at 32768; each process of a test run begins elsewhere.
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

/// A folder that is gone at the end.
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

/// A process that prints what it is and serves. Killed when it is dropped.
pub struct Process {
    child: Child,
    name: String,
    log: PathBuf,
    lines: HashMap<String, Vec<String>>,
    /// When it was started.
    pub started: Instant,
}

impl Process {
    /// Starts `moontide` with these words, behind others that start it elsewhere, and waits until it has printed a line
    /// that begins with `last`.
    pub fn start(folder: &Path, name: &str, through: &[String], words: &[String], last: &str) -> Process {
        Process::start_prepared(folder, name, through, words, last, &|_| ())
    }

    /// The same, by a command that was prepared in some way.
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
        let out = process.child.stdout.take().expect("it is piped");
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    break;
                }
            }
        });
        let end = Instant::now() + SOON;
        loop {
            let line = match told.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => line,
                Err(why) => panic!("{name} does not serve ({why}):\n{}", process.log_text()),
            };
            let (first, rest) = line.split_once(' ').unwrap_or((&line, ""));
            process.lines.entry(first.to_owned()).or_default().push(rest.to_owned());
            if first == last {
                return process;
            }
        }
    }

    /// What it printed behind a word.
    #[track_caller]
    pub fn said(&self, word: &str) -> &str {
        let lines = self.lines.get(word).and_then(|lines| lines.first());
        lines.unwrap_or_else(|| panic!("{} said {:?}, nothing about {word}", self.name, self.lines))
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("our child takes our signals");
    }

    /// Ends it without a word.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Whether it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("our child")
    }

    pub fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// A page for operators.
    #[track_caller]
    pub fn page(&self, path: &str) -> String {
        let address = self.said("admin").trim_start_matches("http://");
        http_get(address, path).unwrap_or_else(|error| panic!("{} does not show {path}: {error}", self.name))
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
            eprintln!("---- the end of the log of {} ----\n{}", self.name, tail.join("\n"));
        }
    }
}

// ------------------------------------------------------------------------------------------------------------ pages

/// GET over HTTP/1.0: the answer ends where the connection does.
pub fn http_get(address: &str, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(CALL))?;
    stream.set_write_timeout(Some(CALL))?;
    write!(stream, "GET {path} HTTP/1.0\r\nhost: {address}\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(std::io::ErrorKind::UnexpectedEof)?;
    if head.split(' ').nth(1) != Some("200") {
        return Err(std::io::Error::other(format!("{head}: {body}")));
    }
    Ok(body.to_owned())
}

/// A page of `/metrics`, by name with labels.
#[derive(Clone, Debug)]
pub struct Numbers(pub HashMap<String, u64>);

impl Numbers {
    pub fn read(page: &str) -> Numbers {
        let number = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse::<f64>().ok()? as u64))
        };
        Numbers(page.lines().filter(|line| !line.starts_with('#')).filter_map(number).collect())
    }

    #[track_caller]
    pub fn get(&self, name: &str) -> u64 {
        *self.0.get(name).unwrap_or_else(|| panic!("there is no {name} among {:?}", self.0.keys()))
    }

    /// The sum over all labels that have this part.
    pub fn sum(&self, name: &str, label: &str) -> u64 {
        let of_name = self.0.iter().filter(|(whole, _)| {
            whole.split_once('{').is_some_and(|(first, labels)| first == name && labels.contains(label))
        });
        of_name.map(|(_, value)| value).sum()
    }

    /// Of a master, without the part that all names share.
    #[track_caller]
    pub fn master(&self, name: &str) -> u64 {
        self.get(&format!("moontide_master_{name}"))
    }

    /// Of a node, without the part that all names share.
    #[track_caller]
    pub fn node(&self, name: &str) -> u64 {
        self.get(&format!("moontide_node_{name}"))
    }
}

/// Sums that hold on every page of a master.
#[track_caller]
pub fn check_master_sums(page: &Numbers) {
    let space = ["live", "reserved", "draining", "free"];
    let space: u64 = space.iter().map(|part| page.master(&format!("space_{part}_units"))).sum();
    assert_eq!(space, page.master("space_all_units"), "units of the master");
    let reads = ["memory_hits", "device_hits", "disk_hits", "misses"];
    let reads: u64 = reads.iter().map(|part| page.master(&format!("reads_{part}_keys_total"))).sum();
    assert_eq!(reads, page.master("reads_requested_keys_total"), "reads of the master");
}

/// Sums that hold on every page of a node.
#[track_caller]
pub fn check_node_sums(page: &Numbers) {
    let memory = ["live", "writing", "draining", "free"];
    let memory: u64 = memory.iter().map(|part| page.node(&format!("memory_{part}_bytes"))).sum();
    assert_eq!(memory, page.node("memory_all_bytes"), "memory of a node");
    let orders = ["done", "accepted", "refused", "void"];
    let orders: u64 = orders.iter().map(|part| page.node(&format!("orders_{part}_total"))).sum();
    let outstanding = page.node("orders_outstanding");
    assert_eq!(orders + outstanding, page.node("orders_received_total"), "orders of a node");
}

// ------------------------------------------------------------------------------------------------------ the cluster

/// How a cluster is started.
#[derive(Clone, Debug)]
pub struct Shape {
    pub nodes: usize,
    pub memory_mib: usize,
    pub groups: usize,
    pub session_ttl_ms: u64,
    /// How long nothing is given out in memory that an earlier master or session used. Nobody reads one-sidedly here.
    pub reallocate_wait_ms: u64,
    /// More words for the master, and for each node.
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
            reallocate_wait_ms: 0,
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
    // Dropped in this order: nodes, master, their folder, and then it is another test's turn.
    pub nodes: Vec<Process>,
    pub master: Process,
    shape: Shape,
    folder: Folder,
    _alone: MutexGuard<'static, ()>,
}

impl Cluster {
    pub fn start(shape: Shape) -> Cluster {
        let alone = alone();
        let folder = Folder::new();
        let master = start_master(&folder, &shape, &[(); 3].map(|()| free_address()));
        let mut cluster = Cluster { nodes: Vec::new(), master, shape: shape.clone(), folder, _alone: alone };
        for _ in 0..shape.nodes {
            cluster.add_node(&[]);
        }
        cluster
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Starts one more node, with these words beside its shape's.
    pub fn add_node(&mut self, more: &[String]) {
        let name = format!("node-{}", self.nodes.len());
        let node = self.start_node(&name, more);
        self.nodes.push(node);
    }

    /// Starts one more node, behind words that start it elsewhere, by a command that was prepared in some way.
    pub fn add_node_prepared(&mut self, through: &[String], prepare: &dyn Fn(&mut Command)) {
        let name = format!("node-{}", self.nodes.len());
        let words = self.node_words(&name, &[]);
        let node = Process::start_prepared(self.folder.path(), &name, through, &words, "ready", prepare);
        self.nodes.push(node);
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
        let door = self.folder.path().join(format!("{name}.sock"));
        all.extend(["--door".to_owned(), door.display().to_string()]);
        all.extend(shape.node_words.iter().cloned());
        all.extend(more.iter().cloned());
        all
    }

    /// Starts a node again where it was and under its number, after it has ended.
    pub fn restart_node(&mut self, at: usize) {
        let node = &self.nodes[at];
        let more = words(&format!("--node {} --listen {}", node.said("node"), node.said("tcp")));
        self.nodes[at] = self.start_node(&format!("node-{at}"), &more);
    }

    /// Starts the master again where it was, after it has ended.
    pub fn restart_master(&mut self) {
        let addresses = ["grpc", "frame", "admin"]
            .map(|door| self.master.said(door).trim_start_matches("http://").to_owned());
        self.master = start_master(&self.folder, &self.shape, &addresses);
    }

    /// Where the master serves gRPC.
    pub fn grpc(&self) -> &str {
        self.master.said("grpc")
    }

    pub fn id(&self, node: usize) -> NodeId {
        NodeId(u64::from_str_radix(self.nodes[node].said("node"), 16).expect("a node's number"))
    }

    pub fn ids(&self) -> Vec<NodeId> {
        (0..self.nodes.len()).map(|node| self.id(node)).collect()
    }

    pub fn config(&self) -> StoreConfig {
        StoreConfig { deadline: CALL, ..StoreConfig::new(self.grpc()) }
    }

    /// Reads in place.
    pub fn near(&self) -> Store {
        connect(self.config())
    }

    /// Reads over TCP.
    pub fn far(&self) -> Store {
        connect(StoreConfig { local: false, ..self.config() })
    }

    /// Waits until the master has so many nodes, all of whose segments it knows.
    #[track_caller]
    pub fn wait_for_nodes(&self, nodes: usize) {
        let segments = (nodes * self.shape.groups) as u64;
        until(&format!("{nodes} nodes"), SOON, || {
            let page = self.master.metrics();
            page.master("open_sessions") == nodes as u64 && page.master("mounted_segments") == segments
        });
    }

    /// Waits until nothing is being written or drained, and then compares the books: the master's with the nodes'.
    #[track_caller]
    pub fn check_books(&self) {
        let differences = || {
            let master = self.master.metrics();
            check_master_sums(&master);
            let nodes: Vec<Numbers> = self.nodes.iter().map(Process::metrics).collect();
            nodes.iter().for_each(check_node_sums);
            let of_nodes =
                |part: &str| nodes.iter().map(|node| node.node(&format!("memory_{part}_bytes"))).sum::<u64>();
            let of_master = |part: &str| master.master(&format!("space_{part}_units")) * 512;
            let mut different = Vec::new();
            for (part, same) in [
                ("live", "live"),
                ("reserved", "writing"),
                ("draining", "draining"),
                ("free", "free"),
                ("all", "all"),
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
        let end = Instant::now() + SOON;
        loop {
            let different = differences();
            if different.is_empty() {
                return;
            }
            assert!(Instant::now() < end, "the books of the master and of its nodes differ: {different:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The end of a test: nobody has logged an error, which is what a person should look at.
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
         --reallocate-wait-ms {}",
        shape.groups, shape.session_ttl_ms, shape.reallocate_wait_ms
    ));
    all.extend(["--data-dir".to_owned(), folder.path().join("master").display().to_string()]);
    all.extend(shape.master_words.iter().cloned());
    Process::start(folder.path(), "master", &[], &all, "admin")
}

#[track_caller]
pub fn connect(config: StoreConfig) -> Store {
    Store::connect(config).expect("the master is there")
}
