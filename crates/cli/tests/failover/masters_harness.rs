//! Several masters that share the groups through an `etcd` on loopback.
//!
//! Without `etcd` (`MOONTIDE_ETCD` is its path, if it is not in PATH), tests that need it print a message and pass.

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use moontide_client::{Store, StoreConfig};
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{
    CALL, Cluster, Folder, Numbers, Process, STEP_TIMEOUT, Shape, connect, free_address, until, words,
};
use crate::not_run::not_run;
use crate::readers::Object;

pub const LEASE: Duration = Duration::from_millis(2000);
pub const GROUPS: usize = 8;

/// A registry of one process, which is killed on drop.
pub struct Etcd {
    child: Child,
    address: String,
    _folder: Memory,
}

/// A directory in /dev/shm if it exists, because a registry syncs every change.
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
            not_run("MOONTIDE_ETCD=skip");
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
                not_run("needs etcd");
                return None;
            }
        };
        let etcd = Etcd { child, address, _folder: folder };
        until("etcd accepts connections", STEP_TIMEOUT, || TcpStream::connect(&etcd.address).is_ok());
        Some(etcd)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("the child process exists");
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A cluster of several masters. Dropped in this order: the cluster's lock is held until all other fields are dropped.
pub struct MasterCluster {
    /// All masters but the first; `None`: killed.
    masters: Vec<Option<Process>>,
    /// Their addresses: gRPC, frame, admin.
    addresses_by_master: Vec<[String; 3]>,
    pub etcd: Etcd,
    /// The nodes, and the first of the masters.
    pub cluster: Cluster,
    first_runs: bool,
    master_words: String,
}

/// Response of `/role`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Role {
    pub groups: usize,
    pub confirmed: bool,
}

fn role_of(master: &Process) -> Role {
    let page = master.page("/role");
    let digits = page.split("\"groups\":").nth(1).unwrap_or_default();
    let digits: String = digits.chars().take_while(char::is_ascii_digit).collect();
    Role { groups: digits.parse().unwrap_or(0), confirmed: page.contains("\"lease_confirmed\":true") }
}

impl MasterCluster {
    /// Returns `None` without `etcd`.
    pub fn start(masters: usize, nodes: usize) -> Option<MasterCluster> {
        let etcd = Etcd::start()?;
        let registry =
            format!("--registry etcd://{}/failover --registry-lease-ms {}", etcd.address, LEASE.as_millis());
        let shape = Shape {
            nodes: 0,
            groups: GROUPS,
            session_ttl_ms: 1500,
            master_words: words(&registry),
            ..Shape::default()
        };
        let master_words = format!(
            "--groups {GROUPS} --session-ttl-ms {} --reallocation-delay-ms {} {registry}",
            shape.session_ttl_ms, shape.reallocation_delay_ms
        );
        let cluster = Cluster::start(shape);
        let mut cluster = MasterCluster {
            masters: vec![],
            addresses_by_master: vec![],
            etcd,
            cluster,
            first_runs: true,
            master_words,
        };
        for _ in 1..masters {
            cluster.add_master();
        }
        cluster.wait_for_shares();
        for at in 0..nodes {
            let node = cluster.start_node(at);
            cluster.cluster.nodes.push(node);
        }
        cluster.wait_for_nodes();
        Some(cluster)
    }

    fn start_node(&self, at: usize) -> Process {
        let (folder, name) = (self.cluster.folder(), format!("node-{at}"));
        let all = words(&format!(
            "node --master {} --memory-bytes 128MiB --admin-listen 127.0.0.1:0 --listen {} --shm-socket {}.sock",
            self.addresses(),
            free_address(),
            folder.join(&name).display()
        ));
        Process::start(folder, &name, &[], &all, "ready")
    }

    /// Starts one more master, and returns its number.
    pub fn add_master(&mut self) -> usize {
        let addresses = [(); 3].map(|()| free_address());
        self.addresses_by_master.push(addresses);
        self.masters.push(None);
        let number = self.masters.len();
        self.start_master(number);
        number
    }

    fn start_master(&mut self, number: usize) {
        let [grpc, frame, admin] = &self.addresses_by_master[number - 1];
        let all = words(&format!(
            "master --grpc-listen {grpc} --frame-listen {frame} --admin-listen {admin} {}",
            self.master_words
        ));
        let name = format!("master-{number}");
        self.masters[number - 1] = Some(Process::start(self.cluster.folder(), &name, &[], &all, "admin"));
    }

    /// Running masters, with their numbers.
    pub fn masters(&self) -> impl Iterator<Item = (usize, &Process)> {
        let more = (1..).zip(&self.masters).filter_map(|(number, master)| Some((number, master.as_ref()?)));
        self.first_runs.then_some((0, &self.cluster.master)).into_iter().chain(more)
    }

    /// Master with the most groups, and their number.
    pub fn most_loaded(&self) -> (usize, usize) {
        let loads = self.masters().map(|(number, master)| (role_of(master).groups, number));
        let (groups, number) = loads.max().expect("a master runs");
        (number, groups)
    }

    /// Kills a master with SIGKILL.
    pub fn kill_master(&mut self, number: usize) {
        if number == 0 {
            self.cluster.master.kill();
            self.first_runs = false;
        } else {
            self.masters[number - 1].take().expect("it lives").kill();
        }
    }

    /// Restarts a killed master with its addresses.
    pub fn restart_master(&mut self, number: usize) {
        if number == 0 {
            self.cluster.restart_master();
            self.first_runs = true;
        } else {
            self.start_master(number);
        }
    }

    /// gRPC addresses of the running masters.
    pub fn addresses(&self) -> String {
        let addresses: Vec<&str> = self.masters().map(|(_, master)| master.printed("grpc")).collect();
        addresses.join(",")
    }

    pub fn roles(&self) -> Vec<Role> {
        self.masters().map(|(_, master)| role_of(master)).collect()
    }

    /// Waits until each running master has its share of the groups and a confirmed lease.
    #[track_caller]
    pub fn wait_for_shares(&self) {
        until("each master has its share", STEP_TIMEOUT, || {
            let roles = self.roles();
            let (least, sum) = (GROUPS / roles.len(), roles.iter().map(|role| role.groups).sum::<usize>());
            sum == GROUPS && roles.iter().all(|role| role.groups >= least && role.confirmed)
        });
    }

    /// Waits until all running masters have confirmed leases, and every group has a master.
    #[track_caller]
    pub fn wait_until_sure(&self) {
        until("leases are confirmed, and all groups are hosted", STEP_TIMEOUT, || {
            let roles = self.roles();
            roles.iter().all(|role| role.confirmed)
                && roles.iter().map(|role| role.groups).sum::<usize>() == GROUPS
        });
    }

    fn pages(&self) -> Vec<Numbers> {
        self.masters().map(|(_, master)| master.metrics()).collect()
    }

    /// Waits until all segments of all nodes are mounted; their reports may be incomplete.
    #[track_caller]
    pub fn wait_for_nodes(&self) {
        let segments = (self.cluster.nodes.len() * GROUPS) as u64;
        until("all segments are known", STEP_TIMEOUT, || {
            self.pages().iter().map(|page| page.master("segments")).sum::<u64>() == segments
        });
    }

    /// Returns true if this master hosts the group of an object.
    pub fn hosts(&self, number: usize, object: &Object) -> bool {
        let (_, master) = self.masters().find(|(at, _)| *at == number).expect("it lives");
        let admin = master.printed("admin").trim_start_matches("http://");
        crate::harness::http_get(admin, &format!("/query_key?key={}", object.key)).is_ok()
    }

    /// Connects a client over TCP without location cache, which calls the masters at each get.
    pub fn uncached(&self, timeout: Duration) -> Store {
        connect(StoreConfig {
            shm: false,
            location_cache_entries: 0,
            timeout,
            ..StoreConfig::new(self.addresses())
        })
    }

    pub fn relaxed(&self) -> Store {
        self.uncached(CALL)
    }

    /// Ends a test: asserts that the memory accounting of masters and nodes agrees, no memory is reserved or draining,
    /// and no process has logged an error.
    #[track_caller]
    pub fn end(self) {
        until("memory accounting agrees, and nothing is reserved or draining", STEP_TIMEOUT, || {
            let (masters, nodes) = (self.pages(), &self.cluster.nodes);
            let nodes: Vec<Numbers> = nodes.iter().map(Process::metrics).collect();
            let of_masters = |part: &str| -> u64 {
                masters.iter().map(|page| page.master(&format!("memory_{part}_bytes"))).sum()
            };
            let of_nodes = |part: &str| -> u64 {
                nodes.iter().map(|page| page.node(&format!("memory_{part}_bytes"))).sum()
            };
            ["live", "free", "capacity"].iter().all(|part| of_masters(part) == of_nodes(part))
                && of_masters("reserved")
                    + of_masters("draining")
                    + of_nodes("writing")
                    + of_nodes("draining")
                    == 0
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
