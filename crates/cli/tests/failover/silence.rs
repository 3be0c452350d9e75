//! Silent processes: a master or a node, or one of each, is stopped or partitioned from the network, and a client makes
//! each of its calls. No call exceeds its deadline by more than [`LATE`], and batches return the results of all other
//! masters and nodes.
//!
//! Every process has its own network namespace, see [`Net`]. A process is silent for one call, which is shorter than the
//! leases of masters and the sessions of nodes: no process is replaced meanwhile. `MOONTIDE_TESTS=full` runs all calls
//! with all faults, and prints a table.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moontide_client::{PutItem, PutOptions, PutOutcome, Store, StoreConfig, StoreError};
use moontide_types::NodeId;
use rustix::process::Signal;

use crate::content::Rng;
use crate::harness::{CALL, Folder, KIB, Process, STEP_TIMEOUT, alone, connect, is_full, until, words};
use crate::net::{Host, Net, missing};
use crate::not_run::not_run;
use crate::readers::{Object, replicas};

/// Timeout of every call of the client.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Time by which a call may exceed it.
const LATE: Duration = Duration::from_millis(100);
/// Longer than a process is silent, twice: a lease is unconfirmed after half of it.
const LEASE_MS: u64 = 6000;
const SESSION_TTL_MS: u64 = 10_000;

const MASTERS: u8 = 3;
const NODES: u8 = 3;
const GROUPS: usize = 6;
const OBJECTS: usize = 1000;
/// Objects with two replicas.
const REPLICATED: usize = 300;
/// The silent ones.
const MASTER: usize = 1;
const NODE: usize = 1;

// ---------------------------------------------------------------------------------------------------------- faults

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Master,
    Node,
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Stopped,
    Partitioned,
}

/// A call of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Connect,
    Get,
    GetBatch,
    /// By a client that knows all locations.
    CachedBatch,
    /// By a client that connects during the silence.
    NewBatch,
    /// Objects with two replicas.
    ReplicatedBatch,
    PutBatch,
    Put,
    GetRange,
    Remove,
    RemoveBatch,
    /// `exists_batch`, `touch` and `prefetch`.
    Metadata,
}

impl Op {
    const ALL: [Op; 12] = [
        Op::Connect,
        Op::Get,
        Op::GetBatch,
        Op::CachedBatch,
        Op::NewBatch,
        Op::ReplicatedBatch,
        Op::PutBatch,
        Op::Put,
        Op::GetRange,
        Op::Remove,
        Op::RemoveBatch,
        Op::Metadata,
    ];
}

type Cell = (Who, How, Op);

fn cells() -> Vec<Cell> {
    if !is_full() {
        return vec![
            (Who::Both, How::Stopped, Op::GetBatch),
            (Who::Both, How::Partitioned, Op::NewBatch),
            (Who::Both, How::Stopped, Op::PutBatch),
            (Who::Node, How::Partitioned, Op::ReplicatedBatch),
        ];
    }
    let mut cells = vec![];
    for who in [Who::Master, Who::Node, Who::Both] {
        for how in [How::Stopped, How::Partitioned] {
            cells.extend(Op::ALL.map(|op| (who, how, op)));
        }
    }
    cells
}

// --------------------------------------------------------------------------------------------------------- cluster

struct Etcd(Child);

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Dropped in this order: processes before their network.
struct SilenceCluster {
    nodes: Vec<Process>,
    masters: Vec<Process>,
    _etcd: Etcd,
    net: Net,
    _folder: Folder,
    _alone: MutexGuard<'static, ()>,
}

fn master_host(at: usize) -> Host {
    Host::new(format!("m{at}"), 1 + at as u8)
}

fn node_host(at: usize) -> Host {
    Host::new(format!("n{at}"), 11 + at as u8)
}

fn masters_address() -> String {
    let addresses = (0..MASTERS).map(|at| format!("{}:7400", master_host(at.into()).ip()));
    addresses.collect::<Vec<_>>().join(",")
}

fn config() -> StoreConfig {
    StoreConfig {
        shm: false,
        timeout: TIMEOUT,
        connect_timeout: TIMEOUT,
        location_cache_entries: 0,
        ..StoreConfig::new(masters_address())
    }
}

/// Connects a client that prepares or checks, and may be slow.
fn relaxed() -> Store {
    connect(StoreConfig { timeout: CALL, connect_timeout: CALL, ..config() })
}

impl SilenceCluster {
    fn start() -> SilenceCluster {
        let (alone, folder) = (alone(), Folder::new());
        let registry = Host::new("e", 31);
        let hosts: Vec<Host> = (0..MASTERS)
            .map(|at| master_host(at.into()))
            .chain((0..NODES).map(|at| node_host(at.into())))
            .chain([registry.clone()])
            .collect();
        let net = Net::new(&hosts);
        let ip = registry.ip();
        let (clients, peers) = (format!("http://{ip}:2379"), format!("http://{ip}:2380"));
        let mut all = net.inside(&registry);
        all.push(registry_program());
        all.extend(words(&format!(
            "--name one --data-dir {} --listen-client-urls {clients} --advertise-client-urls {clients} \
             --listen-peer-urls {peers} --initial-advertise-peer-urls {peers} --initial-cluster one={peers}",
            folder.path().join("etcd").display()
        )));
        let mut command = Command::new(&all[0]);
        command.args(&all[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let etcd = Etcd(command.spawn().expect("etcd starts"));
        let master_words = |at: usize| {
            let ip = master_host(at).ip();
            words(&format!(
                "master --grpc-listen {ip}:7400 --frame-listen {ip}:7401 --admin-listen {ip}:7402 --insecure-no-tls true --groups {GROUPS} \
                 --session-ttl-ms {SESSION_TTL_MS} --reallocation-delay-ms 0 \
                 --registry etcd://{}:2379/silence --registry-lease-ms {LEASE_MS}",
                registry.ip()
            ))
        };
        let start_master = |at: usize| {
            let through = net.inside(&master_host(at));
            Process::start(folder.path(), &format!("master-{at}"), &through, &master_words(at), "admin")
        };
        let masters: Vec<Process> = (0..MASTERS.into()).map(start_master).collect();
        let start_node = |at: usize| {
            let (host, ip) = (node_host(at), node_host(at).ip());
            let all = words(&format!(
                "node --master {} --memory-bytes 128MiB --listen {ip}:7500 --admin-listen {ip}:7600 --insecure-no-tls true --shm false \
                 --host {}",
                masters_address(),
                host.name
            ));
            Process::start(folder.path(), &format!("node-{at}"), &net.inside(&host), &all, "ready")
        };
        let nodes: Vec<Process> = (0..NODES.into()).map(start_node).collect();
        let cluster = SilenceCluster { nodes, masters, _etcd: etcd, net, _folder: folder, _alone: alone };
        until("each master has its share", STEP_TIMEOUT, || {
            cluster.masters.iter().all(|master| {
                let role = master.page("/role");
                role.contains(&format!("\"groups\":{}", GROUPS / usize::from(MASTERS)))
                    && role.contains("\"lease_confirmed\":true")
            })
        });
        until("all segments are known", STEP_TIMEOUT, || {
            let segments = cluster.masters.iter().map(|master| master.metrics().master("segments"));
            segments.sum::<u64>() == u64::from(NODES) * GROUPS as u64
        });
        cluster
    }

    fn id(&self, node: usize) -> NodeId {
        self.nodes[node].printed("node").parse().expect("a node id")
    }

    /// Keys of the silent master.
    fn keys_of_silent_master(&self, prefix: &str) -> BTreeSet<String> {
        let page =
            self.masters[MASTER].page(&format!("/get_all_keys?limit=100000&format=text&prefix={prefix}"));
        page.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).map(str::to_owned).collect()
    }

    fn silence(&mut self, who: Who, how: How) {
        let (master, node) = (who != Who::Node, who != Who::Master);
        let processes = [(master, &self.masters[MASTER]), (node, &self.nodes[NODE])];
        let hosts = [(master, master_host(MASTER)), (node, node_host(NODE))];
        match how {
            How::Stopped => {
                processes.iter().filter(|(silent, _)| *silent).for_each(|(_, p)| p.signal(Signal::STOP));
            }
            How::Partitioned => {
                hosts.iter().filter(|(silent, _)| *silent).for_each(|(_, host)| self.net.silence(host));
            }
        }
    }

    /// Ends the silence, and waits until all objects can be read again.
    fn resume(&mut self, objects: &[Object]) {
        for process in [&self.masters[MASTER], &self.nodes[NODE]] {
            process.signal(Signal::CONT);
        }
        self.net.heal_host(&master_host(MASTER));
        self.net.heal_host(&node_host(NODE));
        until("leases are confirmed", STEP_TIMEOUT, || {
            self.masters.iter().all(|master| master.page("/role").contains("\"lease_confirmed\":true"))
        });
        let keys: Vec<&[u8]> = objects.iter().map(Object::key).collect();
        until("all objects are read", STEP_TIMEOUT, || {
            relaxed().get_batch(&keys).iter().all(|got| matches!(got, Ok(Some(_))))
        });
    }
}

fn registry_program() -> String {
    std::env::var("MOONTIDE_ETCD").unwrap_or_else(|_| "etcd".to_owned())
}

// ----------------------------------------------------------------------------------------------------- measurement

/// Records how late the threads of this process run.
struct StallMonitor {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

/// A machine that runs a thread so much later than it should cannot keep deadlines to [`LATE`].
const STALL: Duration = Duration::from_millis(50);

impl StallMonitor {
    fn start() -> StallMonitor {
        const PROBE: Duration = Duration::from_millis(10);
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut latest = Duration::ZERO;
            while !seen.load(Ordering::Relaxed) {
                let started = Instant::now();
                std::thread::sleep(PROBE);
                latest = latest.max(started.elapsed().saturating_sub(PROBE));
            }
            latest
        });
        StallMonitor { stop, thread }
    }

    /// Longest delay of a thread.
    fn finish(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the monitor does not panic")
    }
}

/// Results of the calls of a cell.
#[derive(Debug, Default)]
struct Results {
    /// Longest call.
    took: Duration,
    /// Keys on masters and nodes that respond, and how many of them have the right result.
    healthy: usize,
    right: usize,
    /// Other keys with a result, and in total.
    others_right: usize,
    others: usize,
    /// The first wrong results.
    wrong: Vec<String>,
    /// Longest delay of a thread during the calls.
    stall: Duration,
}

impl Results {
    fn add(&mut self, key: &str, is_healthy: bool, result: Result<(), String>) {
        let right = usize::from(result.is_ok());
        if is_healthy {
            (self.healthy, self.right) = (self.healthy + 1, self.right + right);
        } else {
            (self.others, self.others_right) = (self.others + 1, self.others_right + right);
        }
        if let Err(reason) = result
            && is_healthy
            && self.wrong.len() < 5
        {
            self.wrong.push(format!("{key}: {reason}"));
        }
    }

    fn timed<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = call();
        self.took = self.took.max(started.elapsed());
        result
    }

    fn overshoot(&self) -> Duration {
        self.took.saturating_sub(TIMEOUT)
    }
}

fn checked<B: AsRef<[u8]>>(object: &Object, got: Result<Option<B>, StoreError>) -> Result<(), String> {
    match got {
        Ok(Some(bytes)) => {
            object.check(bytes.as_ref(), "during the silence");
            Ok(())
        }
        Ok(None) => Err("a miss".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Objects, and where they are.
struct Objects {
    objects: Vec<Object>,
    nodes: BTreeMap<String, Vec<NodeId>>,
    of_silent_master: BTreeSet<String>,
}

impl Objects {
    fn put(cluster: &SilenceCluster, name: &str, count: usize, copies: u8, rng: &mut Rng) -> Objects {
        let objects: Vec<Object> = (0..count).map(|n| Object::new(name, n, rng, KIB..4 * KIB)).collect();
        let store = relaxed();
        for put in put_batch(&store, &objects, &replicas(copies)) {
            assert_eq!(put.expect("a put"), PutOutcome::Stored);
        }
        let nodes = |object: &Object| {
            let info = store.stat(object.key()).expect("a master").expect("the object exists");
            (object.key.clone(), info.stripes.iter().map(|stripe| stripe.node).collect())
        };
        let nodes = objects.iter().map(nodes).collect();
        let of_silent_master = cluster.keys_of_silent_master(&format!("{name}-"));
        Objects { objects, nodes, of_silent_master }
    }

    fn keys(&self) -> Vec<&[u8]> {
        self.objects.iter().map(Object::key).collect()
    }

    fn by_silent_master(&self, object: &Object) -> bool {
        self.of_silent_master.contains(&object.key)
    }

    fn only_on(&self, object: &Object, node: NodeId) -> bool {
        self.nodes[&object.key].iter().all(|other| *other == node)
    }
}

fn put_batch(store: &Store, objects: &[Object], options: &PutOptions) -> Vec<Result<PutOutcome, StoreError>> {
    let contents: Vec<Vec<u8>> = objects.iter().map(Object::content).collect();
    let parts: Vec<[&[u8]; 1]> = contents.iter().map(|content| [&content[..]]).collect();
    let items: Vec<PutItem<'_>> =
        objects.iter().zip(&parts).map(|(object, parts)| PutItem { key: object.key(), parts }).collect();
    store.put_batch(&items, options)
}

// ------------------------------------------------------------------------------------------------------------ cells

type MetadataCall<'a> = dyn Fn() -> Vec<Result<bool, StoreError>> + Sync + 'a;

struct Matrix {
    cluster: SilenceCluster,
    objects: Objects,
    replicated: Objects,
    rng: Rng,
    number: usize,
}

impl Matrix {
    /// Runs a cell once.
    fn run(&mut self, (who, how, op): Cell) -> Results {
        self.number += 1;
        let silent_node = self.cluster.id(NODE);
        let (master_is_silent, node_is_silent) = (who != Who::Node, who != Who::Master);
        // Prepared before the silence: the client has links to all masters and nodes.
        let cached = op == Op::CachedBatch;
        let store =
            connect(StoreConfig { location_cache_entries: if cached { 4 * OBJECTS } else { 0 }, ..config() });
        until("all objects are read", STEP_TIMEOUT, || {
            store.get_batch(&self.objects.keys()).iter().all(|got| matches!(got, Ok(Some(_))))
        });
        let mut own = None;
        if matches!(op, Op::PutBatch | Op::Put | Op::Remove | Op::RemoveBatch) {
            let (name, count) =
                (format!("own-{}", self.number), if op == Op::PutBatch { OBJECTS } else { 300 });
            let objects = Objects::put(&self.cluster, &name, count, 1, &mut self.rng);
            if matches!(op, Op::PutBatch | Op::Put) {
                // Their masters are known now.
                until("all are removed", STEP_TIMEOUT, || {
                    relaxed().remove_batch(&objects.keys(), true).iter().all(Result::is_ok)
                });
            }
            own = Some(objects);
        }
        let objects =
            own.as_ref().unwrap_or(if op == Op::ReplicatedBatch { &self.replicated } else { &self.objects });
        let master_answers = |object: &Object| !(master_is_silent && objects.by_silent_master(object));
        let is_healthy = |object: &Object| {
            let node_answers = !(node_is_silent && objects.only_on(object, silent_node));
            node_answers && (master_answers(object) || cached)
        };
        self.cluster.silence(who, how);
        let (monitor, mut results) = (StallMonitor::start(), Results::default());
        match op {
            Op::Connect => {
                let connected = results.timed(|| Store::connect(config()));
                let connected = connected.map(drop).map_err(|error| error.to_string());
                results.add("connect", true, connected);
            }
            Op::GetBatch | Op::CachedBatch | Op::ReplicatedBatch | Op::NewBatch => {
                let new = (op == Op::NewBatch).then(|| Store::connect(config()).expect("masters respond"));
                let store = new.as_ref().unwrap_or(&store);
                let got = results.timed(|| store.get_batch(&objects.keys()));
                for (object, got) in objects.objects.iter().zip(got) {
                    assert!(!matches!(got, Ok(None)), "{}: silence is not a miss", object.key);
                    results.add(&object.key, is_healthy(object), checked(object, got));
                }
            }
            Op::PutBatch => {
                let put = results.timed(|| put_batch(&store, &objects.objects, &PutOptions::default()));
                for (object, put) in objects.objects.iter().zip(put) {
                    let names_node =
                        matches!(&put, Err(StoreError::Node { node, .. }) if *node == silent_node);
                    let is_healthy = master_answers(object) && !(node_is_silent && names_node);
                    results.add(&object.key, is_healthy, put.map(drop).map_err(|error| error.to_string()));
                }
            }
            Op::RemoveBatch => {
                let removed = results.timed(|| store.remove_batch(&objects.keys(), true));
                for (object, removed) in objects.objects.iter().zip(removed) {
                    let removed = removed.map(|existed| assert!(existed, "{}", object.key));
                    results.add(&object.key, is_healthy(object), removed.map_err(|error| error.to_string()));
                }
            }
            Op::Metadata => {
                let keys = objects.keys();
                let calls: [(&str, &MetadataCall<'_>); 3] = [
                    ("exists_batch", &|| store.exists_batch(&keys)),
                    ("touch", &|| store.touch(&keys)),
                    ("prefetch", &|| store.prefetch(&keys)),
                ];
                let found = results.timed(|| {
                    std::thread::scope(|scope| {
                        let started = calls.map(|(name, call)| (name, scope.spawn(call)));
                        started.map(|(name, thread)| (name, thread.join().expect("no call panics")))
                    })
                });
                for (name, found) in found {
                    for (object, found) in objects.objects.iter().zip(found) {
                        let found = found.map(|found| assert!(found, "{name} {}", object.key));
                        results.add(
                            &object.key,
                            master_answers(object),
                            found.map_err(|error| error.to_string()),
                        );
                    }
                }
            }
            Op::Get | Op::Put | Op::GetRange | Op::Remove => {
                // One key of each kind, all at once.
                let by_master = |object: &&Object| objects.by_silent_master(object);
                let by_node = |object: &&Object| objects.only_on(object, silent_node);
                let find = |of_master: bool, of_node: bool| {
                    let mut all = objects.objects.iter();
                    all.find(|o| by_master(o) == of_master && by_node(o) == of_node).expect("of each kind")
                };
                let chosen = [find(false, false), find(true, false), find(false, true)];
                let healthy_node = self.cluster.id(0);
                let call = |object: &Object| match op {
                    Op::Get => checked(object, store.get(object.key())),
                    Op::GetRange => {
                        let (content, mut into) = (object.content(), vec![0; 500]);
                        let read = store.get_range(object.key(), 100, &mut into);
                        let read = read.map_err(|error| error.to_string())?;
                        assert_eq!(read, Some(500), "{}: silence is not a miss", object.key);
                        assert!(into == content[100..600], "{}", object.key);
                        Ok(())
                    }
                    Op::Put => {
                        let options =
                            PutOptions { prefer: vec![healthy_node.into()], ..PutOptions::default() };
                        object.put(&store, &options).map(drop).map_err(|error| error.to_string())
                    }
                    _ => store.remove(object.key(), true).map(drop).map_err(|error| error.to_string()),
                };
                let calls: Vec<(Result<(), String>, Results)> = std::thread::scope(|scope| {
                    let start = |object| {
                        scope.spawn(move || {
                            let mut results = Results::default();
                            (results.timed(|| call(object)), results)
                        })
                    };
                    let started = chosen.map(start);
                    started.into_iter().map(|thread| thread.join().expect("no call panics")).collect()
                });
                for (object, (result, timed)) in chosen.into_iter().zip(calls) {
                    results.took = results.took.max(timed.took);
                    let is_healthy = if op == Op::Put { master_answers(object) } else { is_healthy(object) };
                    results.add(&object.key, is_healthy, result);
                }
            }
        }
        results.stall = monitor.finish();
        self.cluster.resume(&self.objects.objects);
        if let Some(objects) = own {
            // None of them is needed any more, and those whose put or removal failed may or may not exist.
            let store = relaxed();
            for (object, got) in objects.objects.iter().zip(store.get_batch(&objects.keys())) {
                if let Ok(Some(bytes)) = got {
                    object.check(&bytes, "after the silence");
                }
            }
            until("all are removed", STEP_TIMEOUT, || {
                store.remove_batch(&objects.keys(), true).iter().all(Result::is_ok)
            });
        }
        results
    }
}

/// Runs a cell, again if the machine stalled. Prints a line of the table, and returns what is wrong.
fn measure(matrix: &mut Matrix, cell: Cell) -> Option<String> {
    const RUNS_MAX: usize = 4;
    for run in 1.. {
        let results = matrix.run(cell);
        let stall = results.stall;
        let (who, how, op) = cell;
        println!(
            "{:6} {:11} {:15} {:5} ms {:4} ms late   {:4} of {:4} healthy   {:4} of {:4} others{}",
            format!("{who:?}"),
            format!("{how:?}"),
            format!("{op:?}"),
            results.took.as_millis(),
            results.overshoot().as_millis(),
            results.right,
            results.healthy,
            results.others_right,
            results.others,
            if stall >= STALL { format!("   (machine stalled for {stall:?})") } else { String::new() }
        );
        let in_time = results.overshoot() <= LATE;
        let complete = results.right * 100 >= results.healthy * 99;
        if in_time && complete {
            return None;
        }
        if stall < STALL || run == RUNS_MAX {
            return Some(format!("{cell:?}: {results:?}"));
        }
    }
    unreachable!("the loop returns")
}

#[test]
fn silent_processes_delay_no_call_beyond_its_deadline_and_only_their_own_keys() {
    if let Some(missing) = missing() {
        return not_run(missing);
    }
    if Command::new(registry_program()).arg("--version").output().is_err() {
        return not_run("needs etcd");
    }
    // A thread of its own: it enters a network namespace.
    let test = std::thread::spawn(|| {
        let mut rng = Rng::seeded();
        let cluster = SilenceCluster::start();
        let objects = Objects::put(&cluster, "kept", OBJECTS, 1, &mut rng);
        let replicated = Objects::put(&cluster, "replicated", REPLICATED, 2, &mut rng);
        let mut matrix = Matrix { cluster, objects, replicated, rng, number: 0 };
        let wrong: Vec<String> = cells().into_iter().filter_map(|cell| measure(&mut matrix, cell)).collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    });
    test.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}
