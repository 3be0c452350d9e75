//! [`World`]: processes of the test, their hosts and arguments, and the memory that they use at the end.
//!
//! Several masters share the groups through a registry, a single `etcd` process. [`Shape`] has the number of masters;
//! with one there is no registry. [`registry_words`] returns the registry arguments of a master, and
//! [`masters_address`] the master addresses for nodes and clients.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use moontide_client::{Store, StoreConfig};
use moontide_types::ErrorCode;
use rustix::fs::{FallocateFlags, fallocate};

use crate::client::{Role, end_file};
use crate::content::Rng;
use crate::harness::{Numbers, http_get, words};
use crate::journal::{Outcome, Record, now};
use crate::net::{Host, Net};
use crate::process::Process;
use crate::value::{KeyId, check};

/// Kinds of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    Registry,
    Master,
    Node,
    Client,
}

impl Part {
    /// In the order of their start.
    pub const ALL: [Part; 4] = [Part::Registry, Part::Master, Part::Node, Part::Client];
}

/// Numbers of processes.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub masters: u8,
    pub nodes: u8,
    /// Clients on nodes' hosts, with shared memory.
    pub local: u8,
    pub remote: u8,
    /// Syncs of the nodes' disks take long.
    pub slow_disks: bool,
}

impl Shape {
    /// Reads the number of masters from `MOONTIDE_CHAOS_MASTERS` [default: 3], and `MOONTIDE_CHAOS_SLOW_DISKS`.
    pub fn from_environment() -> Shape {
        let masters = std::env::var("MOONTIDE_CHAOS_MASTERS");
        let masters = masters.map_or(3, |text| text.parse().expect("a number of masters"));
        let slow_disks = std::env::var("MOONTIDE_CHAOS_SLOW_DISKS");
        let slow_disks = slow_disks.is_ok_and(|text| text.parse().expect("true or false"));
        Shape { masters, nodes: 4, local: 2, remote: 2, slow_disks }
    }

    fn has_registry(self) -> bool {
        self.masters > 1
    }

    /// Returns the missing requirement, if any.
    pub fn missing(self) -> Option<String> {
        if self.slow_disks && Command::new("mkfs.ext4").arg("-V").output().is_err() {
            return Some("slow disks need mkfs.ext4 (e2fsprogs)".to_owned());
        }
        let program = registry_program();
        let is_there = !self.has_registry() || Command::new(&program).arg("--version").output().is_ok();
        let what = "several masters need etcd; cannot start";
        (!is_there).then(|| format!("{what} `{program}`; set MOONTIDE_ETCD to its path"))
    }
}

pub const GROUPS: usize = 6;
const NODE_MIB: usize = 48;
/// Session TTL of nodes: shorter than some faults, longer than others.
const SESSION_TTL_MS: u64 = 2000;
/// Timeout of reservations: memory of killed writers is free after it.
const RESERVATION_MS: u64 = 5000;
/// Registry lease of masters.
pub const LEASE_MS: u64 = 2000;
const DISK_MIB: usize = 96;
/// Disk of etcd, which preallocates 64 MiB for its log, and again for the next one.
const REGISTRY_MIB: usize = 512;
const DISK_LIMIT_MIB: usize = 64;
/// Longest delay of a sync with slow disks, one of these for each life of a node: from a good SSD to a disk that needs
/// as long as a session.
const SYNC_MS_MAX: [u64; 5] = [5, 50, 250, 1000, 2000];

/// Timeout until all processes are connected after healing.
const SETTLED: Duration = Duration::from_secs(60);
/// Timeout until removed memory is free: reservations of killed writers expire, and commands reach their nodes.
const EMPTY: Duration = Duration::from_secs(60);

/// Whether a path is on a file system in memory.
pub fn is_tmpfs(path: &Path) -> bool {
    /// From `linux/magic.h`.
    const MAGIC: [i64; 2] = [0x0102_1994, 0x8584_58f6]; // tmpfs, ramfs
    let stat = rustix::fs::statfs(path).expect("the path exists");
    MAGIC.contains(&stat.f_type)
}

/// A small file system, unmounted on drop.
#[derive(Debug)]
pub struct Disk {
    path: PathBuf,
}

impl Disk {
    /// Mounts a file system in memory.
    fn in_memory(path: PathBuf, mib: usize) -> Disk {
        let size = format!("size={mib}m");
        Disk::mount(path, &["-t", "tmpfs", "-o", &size, "none"])
    }

    /// Mounts a file system in a file beside its path.
    fn in_file(path: PathBuf, mib: usize) -> Disk {
        let image = path.with_extension("image");
        let file = std::fs::File::create(&image).expect("a file");
        file.set_len((mib << 20) as u64).expect("a sparse file");
        // Without space that is reserved for root, as which the nodes run.
        let status = Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0"]).arg(&image).status();
        assert!(status.is_ok_and(|status| status.success()), "cannot create a file system");
        let disk = Disk::mount(path, &["-o", "loop", image.to_str().expect("a path in UTF-8")]);
        assert!(!is_tmpfs(&image) && !is_tmpfs(&disk.path), "{disk:?} is in memory");
        disk
    }

    fn mount(path: PathBuf, words: &[&str]) -> Disk {
        std::fs::create_dir_all(&path).expect("a folder for a disk");
        let status = Command::new("mount").args(words).arg(&path).status();
        assert!(status.is_ok_and(|status| status.success()), "cannot mount a file system");
        Disk { path }
    }

    /// Fills it up. Allocates without writing, because writing takes seconds on a real disk.
    pub fn fill(&mut self) {
        let ballast = std::fs::File::create(self.path.join("ballast")).expect("a file");
        let mut len = 0;
        for part in [8 << 20, 1 << 20, 64 << 10, 4 << 10] {
            while fallocate(&ballast, FallocateFlags::empty(), len, part).is_ok() {
                len += part;
            }
        }
    }

    pub fn empty(&mut self) {
        std::fs::remove_file(self.path.join("ballast")).expect("the ballast exists");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazily: a process with an open file does not prevent it.
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

/// The processes. Dropped in this order: before their network and their disks.
pub struct World {
    clients: Vec<Process>,
    nodes: Vec<Process>,
    masters: Vec<Process>,
    registry: Vec<Process>,
    pub disks: Vec<Disk>,
    /// In memory, because the registry syncs every change and the disk of this machine may be slow.
    _registry_disk: Option<Disk>,
    pub net: Net,
    folder: PathBuf,
    shape: Shape,
}

fn master_host(at: u8) -> Host {
    Host::new(format!("m{at}"), 1 + at)
}

fn registry_host() -> Host {
    Host::new("e0", 31)
}

fn registry_program() -> String {
    std::env::var("MOONTIDE_ETCD").unwrap_or_else(|_| "etcd".to_owned())
}

/// Command of the registry: one `etcd`, which keeps its data when it is killed.
fn registry_command(folder: &Path) -> Vec<String> {
    let ip = registry_host().ip();
    let (clients, peers) = (format!("http://{ip}:2379"), format!("http://{ip}:2380"));
    let mut all = vec![registry_program()];
    all.extend(words(&format!(
        "--name chaos --data-dir {} --listen-client-urls {clients} --advertise-client-urls {clients} \
         --listen-peer-urls {peers} --initial-advertise-peer-urls {peers} --initial-cluster chaos={peers}",
        folder.join("etcd/data").display()
    )));
    all
}

/// Registry arguments of a master, or its data directory.
fn registry_words(shape: Shape, folder: &Path, at: u8) -> String {
    if shape.has_registry() {
        format!("--registry etcd://{}:2379/chaos --registry-lease-ms {LEASE_MS}", registry_host().ip())
    } else {
        format!("--data-dir {}", folder.join(format!("master-{at}")).display())
    }
}

fn node_host(at: u8) -> Host {
    Host::new(format!("n{at}"), 11 + at)
}

/// gRPC addresses of the masters, separated by commas.
fn masters_address(shape: Shape) -> String {
    let addresses = (0..shape.masters).map(|at| format!("{}:7400", master_host(at).ip()));
    addresses.collect::<Vec<_>>().join(",")
}

/// Admin addresses of the masters.
pub fn master_pages_at(shape: Shape) -> Vec<String> {
    (0..shape.masters.into()).map(master_admin).collect()
}

fn master_admin(at: usize) -> String {
    format!("{}:7402", master_host(at as u8).ip())
}

fn node_admin(at: usize) -> String {
    format!("{}:7600", node_host(at as u8).ip())
}

/// Life of the test itself in the records of its own calls.
pub const TEST_LIFE: u32 = 0;
/// Keys per call of [`World::read_all`].
const READ_KEYS: usize = 64;

/// Unique number of a life of a client.
pub fn client_life(client: usize, life: u32) -> u32 {
    client as u32 * 10_000 + life
}

fn moontide(rest: &str) -> Vec<String> {
    let mut all = vec![env!("CARGO_BIN_EXE_moontide").to_owned()];
    all.extend(words(rest));
    all
}

impl World {
    pub fn start(shape: Shape, folder: &Path, seed: u64) -> World {
        let remote_host = |at: u8| Host::new(format!("c{at}"), 21 + at);
        let hosts: Vec<Host> = (0..shape.masters)
            .map(master_host)
            .chain((0..shape.nodes).map(node_host))
            .chain((0..shape.remote).map(remote_host))
            .chain(shape.has_registry().then(registry_host))
            .collect();
        let net = Net::new(&hosts);
        // Every second node has a disk; the first nodes serve shared memory to the local clients.
        let has_disk = |at: u8| at % 2 == 1;
        let is_open = |at: u8| at < shape.local;
        let disk_path = |at: u8| folder.join(format!("disk-{at}"));
        let disks = (0..shape.nodes)
            .filter(|at| has_disk(*at))
            .map(|at| {
                let mount = if shape.slow_disks { Disk::in_file } else { Disk::in_memory };
                mount(disk_path(at), DISK_MIB)
            })
            .collect();

        let registry_disk = shape.has_registry().then(|| Disk::in_memory(folder.join("etcd"), REGISTRY_MIB));
        let registry = shape.has_registry().then(|| {
            let all = registry_command(folder);
            Process::new(&net, folder, "etcd", &registry_host(), Box::new(move |_| (all.clone(), vec![])))
        });
        let masters = (0..shape.masters).map(|at| {
            let host = master_host(at);
            let ip = host.ip();
            let all = moontide(&format!(
                "master --grpc-listen {ip}:7400 --frame-listen {ip}:7401 --admin-listen {ip}:7402 --insecure-no-tls true --groups {GROUPS} \
                 --session-ttl-ms {SESSION_TTL_MS} --reservation-ms {RESERVATION_MS} --reallocation-delay-ms 0 {}",
                registry_words(shape, folder, at)
            ));
            Process::new(&net, folder, &host.name, &host, Box::new(move |_| (all.clone(), vec![])))
        });
        let nodes = (0..shape.nodes).map(|at| {
            let host = node_host(at);
            let (ip, name) = (host.ip(), &host.name);
            let socket = folder.join(format!("{name}.sock"));
            let mut rest = format!(
                "node --master {} --node-id {:016x} --memory-bytes {NODE_MIB}MiB --bytes-per-slot 1KiB --listen {ip}:7500 \
                 --admin-listen {ip}:7600 --insecure-no-tls true --host {name} --shm {} --shm-socket {}",
                masters_address(shape),
                0xc0de + u64::from(at),
                is_open(at),
                socket.display()
            );
            if has_disk(at) {
                let backend = match at % 4 {
                    1 => "bucket",
                    _ if shape.slow_disks => "offset",
                    _ => "file",
                };
                rest += &format!(
                    " --disk-dir {} --disk-limit {DISK_LIMIT_MIB}MiB --disk-staging 8MiB --disk-backend {backend}",
                    disk_path(at).join("records").display()
                );
            }
            let all = moontide(&rest);
            let mut rng = Rng::new(seed ^ u64::from(at) << 32);
            let words = move |_| {
                let mut variables = vec![];
                if shape.slow_disks {
                    let ms_max = SYNC_MS_MAX[rng.within(0, SYNC_MS_MAX.len())];
                    variables.push(("MOONTIDE_SLOW_SYNCS".to_owned(), format!("{ms_max},{}", rng.draw())));
                }
                (all.clone(), variables)
            };
            Process::new(&net, folder, name, &host, Box::new(words))
        });
        let clients = (0..shape.local + shape.remote).map(|at| {
            let local = at < shape.local;
            let host = if local { node_host(at) } else { remote_host(at - shape.local) };
            let role = Role {
                folder: folder.to_owned(),
                life: 0,
                writer: at.into(),
                writers: (shape.local + shape.remote).into(),
                masters: masters_address(shape),
                local,
                seed: seed ^ u64::from(at) << 48,
            };
            let me = std::env::current_exe().expect("a path to this test").display().to_string();
            let all =
                vec![me, "--exact".into(), crate::TEST.into(), "--ignored".into(), "--nocapture".into()];
            let words = move |starts| {
                let life = client_life(at.into(), starts + 1);
                let role = Role { life, seed: role.seed + u64::from(starts), ..role.clone() };
                (all.clone(), vec![(crate::client::ROLE.to_owned(), role.encode())])
            };
            Process::new(&net, folder, format!("client-{at}"), &host, Box::new(words))
        });
        let (masters, nodes, clients) = (masters.collect(), nodes.collect(), clients.collect());
        let (registry, folder) = (registry.into_iter().collect(), folder.to_owned());
        let mut world = World {
            clients,
            nodes,
            masters,
            registry,
            disks,
            _registry_disk: registry_disk,
            net,
            folder,
            shape,
        };
        for part in Part::ALL {
            world.part(part).iter_mut().for_each(Process::start);
        }
        world.settle();
        world
    }

    pub fn part(&mut self, part: Part) -> &mut [Process] {
        match part {
            Part::Registry => &mut self.registry,
            Part::Master => &mut self.masters,
            Part::Node => &mut self.nodes,
            Part::Client => &mut self.clients,
        }
    }

    /// Restarts processes that have exited by themselves.
    pub fn supervise(&mut self) {
        for part in Part::ALL {
            self.part(part).iter_mut().for_each(Process::supervise);
        }
    }

    fn master_pages(&self) -> std::io::Result<Vec<Numbers>> {
        let pages = (0..self.masters.len()).map(|at| http_get(&master_admin(at), "/metrics"));
        pages.map(|page| page.map(|page| Numbers::read(&page))).collect()
    }

    fn node_pages(&self) -> std::io::Result<Vec<Numbers>> {
        let pages = (0..self.nodes.len()).map(|at| http_get(&node_admin(at), "/metrics"));
        pages.map(|page| page.map(|page| Numbers::read(&page))).collect()
    }

    /// Waits until all processes run and the masters have mounted all segments of all nodes.
    pub fn settle(&mut self) {
        let (end, segments) = (Instant::now() + SETTLED, (self.nodes.len() * GROUPS) as u64);
        loop {
            self.supervise();
            let known =
                |pages: Vec<Numbers>| -> u64 { pages.iter().map(|page| page.master("segments")).sum() };
            let mounted = |pages: Vec<Numbers>| pages.iter().all(|page| page.node("synced") == 1);
            let there = self.master_pages().map(known);
            if there.as_ref().is_ok_and(|known| *known == segments) && self.node_pages().is_ok_and(mounted) {
                return;
            }
            assert!(Instant::now() < end, "not settled within {SETTLED:?}: {there:?} of {segments} segments");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Ends the clients and asserts that they succeed.
    pub fn end_clients(&mut self) {
        std::fs::write(end_file(&self.folder), "").expect("a file");
        for client in &mut self.clients {
            if let Err(error) = client.wait(Duration::from_secs(30)) {
                panic!("client failed: {error}");
            }
        }
    }

    fn store(&self) -> Store {
        let config = StoreConfig {
            shm: false,
            timeout: Duration::from_secs(10),
            ..StoreConfig::new(masters_address(self.shape))
        };
        Store::connect(config).expect("a master is reachable")
    }

    /// Gets keys, and returns the records of these calls.
    pub fn read_all(&self, keys: &[KeyId]) -> Vec<Record> {
        let store = self.store();
        let mut records = vec![];
        for keys in keys.chunks(READ_KEYS) {
            let names: Vec<String> = keys.iter().map(|key| key.name()).collect();
            let names: Vec<&[u8]> = names.iter().map(String::as_bytes).collect();
            let start = now();
            let got = store.get_batch(&names);
            let end = now();
            records.extend(keys.iter().zip(got).map(|(key, got)| {
                let got = got.map(|got| got.map(|bytes| check(*key, &bytes)));
                Record::of_get(TEST_LIFE, *key, start, end, &got)
            }));
        }
        let found = records.iter().filter(|record| record.outcome == Outcome::Ok).count();
        println!("{found} of {} keys were read", keys.len());
        records
    }

    /// Kills masters and nodes, and starts them again.
    pub fn restart_masters_and_nodes(&mut self) {
        for part in [Part::Master, Part::Node] {
            self.part(part).iter_mut().for_each(Process::kill);
        }
        for part in [Part::Master, Part::Node] {
            self.part(part).iter_mut().for_each(Process::start);
        }
        self.settle();
    }

    /// Removes every key, with records of these calls, and returns what is still in use after that.
    pub fn remove_everything(&mut self, records: &mut Vec<Record>) -> Vec<String> {
        let store = self.store();
        let end = Instant::now() + EMPTY;
        let (mut removed, mut pending) = (0, 0);
        // Repeats the listing until a complete pass over all masters finds nothing.
        let (mut cursor, mut found) = (vec![], 0);
        loop {
            let page = store.list(b"", &cursor, 1000).expect("a list");
            let keys: Vec<&[u8]> = page.keys.iter().map(|key| &key[..]).collect();
            found += keys.len();
            let start = now();
            let outcomes = store.remove_batch(&keys, true);
            let ended = now();
            for (key, removal) in keys.iter().zip(outcomes) {
                match &removal {
                    Ok(_) => removed += 1,
                    Err(error) if error.code() == ErrorCode::Pending => pending += 1,
                    Err(error) => panic!("removal failed after healing: {error}"),
                }
                let key = str::from_utf8(key).ok().and_then(KeyId::of_name).expect("a key of this test");
                records.push(Record::of_removal(TEST_LIFE, key, start, ended, &removal));
            }
            if page.next.is_empty() && std::mem::take(&mut found) == 0 {
                break;
            }
            cursor = page.next;
            assert!(Instant::now() < end, "keys remain: {removed} removed, {pending} pending");
        }
        println!("{removed} keys were removed at the end, {pending} pending");
        let began = Instant::now();
        loop {
            let held = self.held();
            if held.is_empty() {
                println!("all memory was free {:?} later", began.elapsed());
                return held;
            }
            if Instant::now() > end {
                return held;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Files on the disks, except the node id, the sync marks, the removal log, which is compacted when it is long, and the
    /// large file of the backend `offset`, whose records the node counts.
    fn on_disks(&self) -> Vec<String> {
        let mut found = vec![];
        let mut folders: Vec<PathBuf> = self.disks.iter().map(|disk| disk.path.clone()).collect();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
                let (path, data) = (entry.path(), entry.metadata());
                match data {
                    Ok(data) if data.is_dir() => folders.push(path),
                    Ok(data)
                        if data.len() > 0
                            && !["removed.log", "node.id", "sync.marks", "data.moontide"]
                                .contains(&&*entry.file_name().to_string_lossy()) =>
                    {
                        found.push(format!("{}: {} bytes", path.display(), data.len()));
                    }
                    _ => {}
                }
            }
        }
        found
    }

    /// Memory and disk space in use.
    fn held(&self) -> Vec<String> {
        let (masters, nodes) = match (self.master_pages(), self.node_pages()) {
            (Ok(masters), Ok(nodes)) => (masters, nodes),
            (masters, nodes) => return vec![format!("pages: {:?} {:?}", masters.err(), nodes.err())],
        };
        let mut held = self.on_disks();
        let mut none = |process: &str, page: &Numbers, name: &str| {
            if let Some(number) = page.0.get(name).filter(|number| **number != 0) {
                held.push(format!("{process}: {name} {number}"));
            }
        };
        for (process, page) in self.masters.iter().zip(&masters) {
            let gauges = "objects objects_writing memory_live_bytes memory_reserved_bytes memory_draining_bytes \
                          slots_used objects_disk_only offload_pending_bytes commands_pending";
            for gauge in gauges.split_whitespace() {
                none(&process.name, page, &format!("moontide_master_{gauge}"));
            }
        }
        for (process, page) in self.nodes.iter().zip(&nodes) {
            let gauges = "memory_live_bytes memory_writing_bytes memory_draining_bytes commands_pending \
                          overdue_drains shm_clients disk_records disk_offload_backlog_bytes disk_full \
                          disk_write_failed";
            for gauge in gauges.split_whitespace() {
                none(&process.name, page, &format!("moontide_node_{gauge}"));
            }
        }
        // All capacity is free.
        for (process, page) in self.nodes.iter().zip(&nodes) {
            for (free, all) in [
                ("memory_free_bytes", "memory_capacity_bytes"),
                ("slots_free", "slots_capacity"),
                ("disk_staging_free_bytes", "disk_staging_capacity_bytes"),
            ] {
                let [free_is, all_is] = [free, all].map(|name| page.0.get(&format!("moontide_node_{name}")));
                if free_is != all_is {
                    held.push(format!("{}: {free} is {free_is:?} of {all_is:?}", process.name));
                }
            }
        }
        held
    }

    pub fn print_restarts(&self) {
        for process in self.registry.iter().chain(&self.masters).chain(&self.nodes).chain(&self.clients) {
            let Process { name, starts, ended_by_itself, .. } = process;
            println!("{name:10} started {starts} times, exited {ended_by_itself} times by itself");
        }
    }

    /// Error lines of the logs.
    pub fn log_errors(&self) -> Vec<String> {
        let mut errors = vec![];
        for process in self.registry.iter().chain(&self.masters).chain(&self.nodes).chain(&self.clients) {
            let text = process.log_text();
            let lines = text.lines().filter(|line| line.contains(" ERROR ") || line.contains("panicked at"));
            // Full disks are intended here.
            let lines = lines.filter(|line| !line.contains("No space left on device"));
            errors.extend(lines.take(10).map(|line| format!("{}: {line}", process.name)));
        }
        errors
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let kept = std::env::temp_dir().join(format!("moontide-chaos-logs-{}", std::process::id()));
        let _ = std::fs::create_dir_all(&kept);
        for entry in std::fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|end| end == "log" || end == "journal") {
                let _ = std::fs::copy(entry.path(), kept.join(entry.file_name()));
            }
        }
        eprintln!("logs and journals are in {}", kept.display());
    }
}
