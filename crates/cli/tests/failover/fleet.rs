//! Several masters that share the groups by an `etcd`, which is started here, on loopback.
//!
//! Where there is no `etcd` (`MOONTIDE_ETCD` names one that is not in the path), tests that need it say so and pass.

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use moontide_client::{Store, StoreConfig};
use rustix::process::{Pid, Signal, kill_process};

use crate::kit::{CALL, Cluster, Folder, Numbers, Process, SOON, Shape, connect, free_address, until, words};
use crate::readers::Object;

pub const LEASE: Duration = Duration::from_millis(2000);
pub const GROUPS: usize = 8;

/// A registry of one process. Killed when it is dropped.
pub struct Etcd {
    child: Child,
    address: String,
    _folder: Memory,
}

/// A folder in memory if there is a place for such: a registry waits for its disk at every change.
struct Memory {
    path: PathBuf,
    _elsewhere: Option<Folder>,
}

impl Memory {
    fn new() -> Memory {
        let shared = Path::new("/dev/shm");
        let path = shared.join(format!("moontide-failover-{}-{}", std::process::id(), free_address()));
        if shared.is_dir() && std::fs::create_dir(&path).is_ok() {
            return Memory { path, _elsewhere: None };
        }
        let folder = Folder::new();
        Memory { path: folder.path().to_owned(), _elsewhere: Some(folder) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

impl Etcd {
    fn start() -> Option<Etcd> {
        let named = std::env::var("MOONTIDE_ETCD");
        let program = named.as_deref().unwrap_or("etcd");
        if program == "skip" {
            println!("passed over: MOONTIDE_ETCD=skip");
            return None;
        }
        let folder = Memory::new();
        let (address, peers) = (free_address(), free_address());
        let all = words(&format!(
            "--name one --data-dir {} --listen-client-urls http://{address} --advertise-client-urls http://{address} \
             --listen-peer-urls http://{peers} --initial-advertise-peer-urls http://{peers} \
             --initial-cluster one=http://{peers}",
            folder.path.join("data").display()
        ));
        let mut command = Command::new(program);
        command.args(all).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                assert!(named.is_err(), "MOONTIDE_ETCD is {program}: {error}");
                println!("passed over: it needs etcd, and there is none");
                return None;
            }
        };
        let etcd = Etcd { child, address, _folder: folder };
        until("etcd is there", SOON, || TcpStream::connect(&etcd.address).is_ok());
        Some(etcd)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("our child takes our signals");
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A cluster of several masters. Dropped in this order: the cluster's lock is held until all others are gone.
pub struct Fleet {
    /// All but the first; None: it was killed.
    masters: Vec<Option<Process>>,
    /// Where these serve gRPC, frames and pages.
    places: Vec<[String; 3]>,
    pub etcd: Etcd,
    /// The nodes, and the first of the masters.
    pub cluster: Cluster,
    first_lives: bool,
    master_words: String,
}

/// What `/role` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Role {
    pub groups: usize,
    pub confirmed: bool,
}

fn role_of(master: &Process) -> Role {
    let page = master.page("/role");
    let digits = page.split("\"groups\":").nth(1).unwrap_or_default();
    let digits: String = digits.chars().take_while(char::is_ascii_digit).collect();
    Role { groups: digits.parse().unwrap_or(0), confirmed: page.contains("\"confirmed\":true") }
}

impl Fleet {
    /// None: there is no `etcd` here.
    pub fn start(masters: usize, nodes: usize) -> Option<Fleet> {
        let etcd = Etcd::start()?;
        let registry =
            format!("--registry etcd://{}/failover --lease-ms {}", etcd.address, LEASE.as_millis());
        let shape = Shape {
            nodes: 0,
            groups: GROUPS,
            session_ttl_ms: 1500,
            master_words: words(&registry),
            ..Shape::default()
        };
        let master_words = format!(
            "--groups {GROUPS} --session-ttl-ms {} --reallocate-wait-ms {} {registry}",
            shape.session_ttl_ms, shape.reallocate_wait_ms
        );
        let cluster = Cluster::start(shape);
        let mut fleet =
            Fleet { masters: vec![], places: vec![], etcd, cluster, first_lives: true, master_words };
        for _ in 1..masters {
            fleet.add_master();
        }
        fleet.wait_for_shares();
        for at in 0..nodes {
            let node = fleet.start_node(at);
            fleet.cluster.nodes.push(node);
        }
        fleet.wait_for_nodes();
        Some(fleet)
    }

    fn start_node(&self, at: usize) -> Process {
        let (folder, name) = (self.cluster.folder(), format!("node-{at}"));
        let all = words(&format!(
            "node --master {} --memory-bytes 128MiB --admin-listen 127.0.0.1:0 --listen {} --door {}.sock",
            self.addresses(),
            free_address(),
            folder.join(&name).display()
        ));
        Process::start(folder, &name, &[], &all, "ready")
    }

    /// Starts one more, and gives its number.
    pub fn add_master(&mut self) -> usize {
        let addresses = [(); 3].map(|()| free_address());
        self.places.push(addresses);
        self.masters.push(None);
        let number = self.masters.len();
        self.start_master(number);
        number
    }

    fn start_master(&mut self, number: usize) {
        let [grpc, frame, admin] = &self.places[number - 1];
        let all = words(&format!(
            "master --grpc-listen {grpc} --frame-listen {frame} --admin-listen {admin} {}",
            self.master_words
        ));
        let name = format!("master-{number}");
        self.masters[number - 1] = Some(Process::start(self.cluster.folder(), &name, &[], &all, "admin"));
    }

    /// Those that live, with their numbers.
    pub fn masters(&self) -> impl Iterator<Item = (usize, &Process)> {
        let more = (1..).zip(&self.masters).filter_map(|(number, master)| Some((number, master.as_ref()?)));
        self.first_lives.then_some((0, &self.cluster.master)).into_iter().chain(more)
    }

    /// The one that hosts most, and how many groups those are.
    pub fn richest(&self) -> (usize, usize) {
        let loads = self.masters().map(|(number, master)| (role_of(master).groups, number));
        let (groups, number) = loads.max().expect("one lives");
        (number, groups)
    }

    /// Ends one without a word.
    pub fn kill_master(&mut self, number: usize) {
        if number == 0 {
            self.cluster.master.kill();
            self.first_lives = false;
        } else {
            self.masters[number - 1].take().expect("it lives").kill();
        }
    }

    /// Starts one that was killed again, where it was.
    pub fn restart_master(&mut self, number: usize) {
        if number == 0 {
            self.cluster.restart_master();
            self.first_lives = true;
        } else {
            self.start_master(number);
        }
    }

    /// Where those that live serve gRPC.
    pub fn addresses(&self) -> String {
        let addresses: Vec<&str> = self.masters().map(|(_, master)| master.said("grpc")).collect();
        addresses.join(",")
    }

    pub fn roles(&self) -> Vec<Role> {
        self.masters().map(|(_, master)| role_of(master)).collect()
    }

    /// Until each master that lives has its share of the groups, and is sure of it.
    #[track_caller]
    pub fn wait_for_shares(&self) {
        until("each master has its share", SOON, || {
            let roles = self.roles();
            let (least, sum) = (GROUPS / roles.len(), roles.iter().map(|role| role.groups).sum::<usize>());
            sum == GROUPS && roles.iter().all(|role| role.groups >= least && role.confirmed)
        });
    }

    /// Until all masters that live are sure of their groups, and every group is somebody's.
    #[track_caller]
    pub fn wait_until_sure(&self) {
        until("masters are sure, and all groups are hosted", SOON, || {
            let roles = self.roles();
            roles.iter().all(|role| role.confirmed)
                && roles.iter().map(|role| role.groups).sum::<usize>() == GROUPS
        });
    }

    fn pages(&self) -> Vec<Numbers> {
        self.masters().map(|(_, master)| master.metrics()).collect()
    }

    /// Until all segments of all nodes are mounted somewhere; what is in them may still be under way.
    #[track_caller]
    pub fn wait_for_nodes(&self) {
        let segments = (self.cluster.nodes.len() * GROUPS) as u64;
        until("all segments are known", SOON, || {
            self.pages().iter().map(|page| page.master("mounted_segments")).sum::<u64>() == segments
        });
    }

    /// Whether this master answers for an object.
    pub fn hosts(&self, number: usize, object: &Object) -> bool {
        let (_, master) = self.masters().find(|(at, _)| *at == number).expect("it lives");
        let admin = master.said("admin").trim_start_matches("http://");
        crate::kit::http_get(admin, &format!("/query_key?key={}", object.key)).is_ok()
    }

    /// Over TCP, asking masters at each get.
    pub fn asking(&self, deadline: Duration) -> Store {
        connect(StoreConfig { local: false, locations: 0, deadline, ..StoreConfig::new(self.addresses()) })
    }

    pub fn patient(&self) -> Store {
        self.asking(CALL)
    }

    /// The end of a test: the books of masters and nodes agree, nothing is held, and nobody has logged an error.
    #[track_caller]
    pub fn end(self) {
        until("masters and nodes have the same books, and are at rest", SOON, || {
            let (masters, nodes) = (self.pages(), &self.cluster.nodes);
            let nodes: Vec<Numbers> = nodes.iter().map(Process::metrics).collect();
            let units = |part: &str| -> u64 {
                masters.iter().map(|page| page.master(&format!("space_{part}_units")) * 512).sum()
            };
            let bytes = |part: &str| -> u64 {
                nodes.iter().map(|page| page.node(&format!("memory_{part}_bytes"))).sum()
            };
            ["live", "free", "all"].iter().all(|part| units(part) == bytes(part))
                && units("reserved") + units("draining") + bytes("writing") + bytes("draining") == 0
        });
        for (number, master) in self.masters() {
            let text = master.log_text();
            let is_error = |line: &&str| line.contains(" ERROR ") || line.contains("panicked at");
            let errors: Vec<&str> = text.lines().filter(is_error).collect();
            assert!(errors.is_empty(), "master {number} logged {errors:?}");
        }
        self.cluster.end();
    }
}
