//! [`FailoverCluster`]: a master and nodes as child processes, the clients of the benchmark, and one kill.

use std::net::TcpListener;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{PutItem, PutOptions, Store, StoreConfig};

use super::callers::{CACHED_KEYS, Reader, StopAtEnd, WriterThread, first_after, longest_gap};
use super::{Args, KillResult, STEP_TIMEOUT, content, key};
use crate::http;
use crate::process::ServerProcess;
use crate::results::{BenchError, Progress, wrong};

/// Objects per batch while the cluster is filled.
const BATCH: u64 = 1000;
/// Threads that fill the cluster: enough to keep two cores busy.
const FILLERS: u64 = 4;
/// Interval of reading the master's metrics during recovery. Reading takes at most a tenth of it.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Time of undisturbed calls before each kill and after each recovery.
const WARMUP: Duration = Duration::from_millis(500);
/// Timeout of a call. Short, because callers retry.
const CALL_TIMEOUT: Duration = Duration::from_millis(500);

/// Processes and clients.
#[derive(Debug)]
pub(super) struct FailoverCluster {
    /// Without location cache and shared memory. Clients are dropped before the nodes, whose memory they map.
    uncached: Store,
    cached: Store,
    local: Store,
    writing: Store,
    _nodes: Vec<ServerProcess>,
    /// `None` between a kill and the restart.
    master: Option<ServerProcess>,
    master_args: Vec<String>,
    admin: String,
}

impl FailoverCluster {
    pub(super) fn start(args: &Args, dir: &Path) -> Result<FailoverCluster, BenchError> {
        let mut taken = vec![];
        let [grpc, frame, admin] =
            [free_address(&mut taken)?, free_address(&mut taken)?, free_address(&mut taken)?];
        let master_args: Vec<String> = [
            "master",
            "--grpc-listen",
            &grpc,
            "--frame-listen",
            &frame,
            "--admin-listen",
            &admin,
            "--groups",
            &args.groups.to_string(),
            "--reallocation-delay-ms",
            &args.reallocation_delay_ms.to_string(),
            "--data-dir",
            &dir.join("master").display().to_string(),
        ]
        .map(str::to_owned)
        .into();
        let (master, _) = ServerProcess::start(&master_args, "admin ")?;
        // An object takes its payload and about 64 bytes of digests and key, in units of 512 bytes. Twice that, so that
        // nothing is evicted although groups fill unevenly.
        let object_bytes = (args.bytes + 64).next_multiple_of(512).max(1024);
        let node_bytes =
            (2 * args.objects * object_bytes / u64::from(args.nodes)).max(u64::from(args.groups) * (4 << 20));
        eprintln!("a master and {} node(s) of {} MiB …", args.nodes, node_bytes >> 20);
        let mut nodes = vec![];
        for number in 0..args.nodes {
            let socket = dir.join(format!("node-{number}.sock")).display().to_string();
            let args_list = [
                "node",
                "--master",
                &grpc,
                "--memory-bytes",
                &node_bytes.to_string(),
                "--bytes-per-slot",
                &object_bytes.to_string(),
                "--shm-socket",
                &socket,
            ];
            let (node, _) = ServerProcess::start(&args_list, "ready")?;
            nodes.push(node);
        }
        let store = |change: fn(&mut StoreConfig)| {
            let mut config = StoreConfig { timeout: CALL_TIMEOUT, ..StoreConfig::new(&grpc) };
            change(&mut config);
            Store::connect(config).map_err(wrong)
        };
        Ok(FailoverCluster {
            uncached: store(|config| (config.shm, config.location_cache_entries) = (false, 0))?,
            cached: store(|config| config.shm = false)?,
            local: store(|_| ())?,
            writing: store(|config| config.shm = false)?,
            _nodes: nodes,
            master: Some(master),
            master_args,
            admin,
        })
    }

    /// Stores all objects.
    pub(super) fn fill(&self, args: &Args) -> Result<(), BenchError> {
        let mut progress = Progress::new(format!("{} objects", args.objects), args.objects);
        let (next, done, failed) = (AtomicU64::new(0), AtomicU64::new(0), Mutex::new(None));
        let fill = || -> Result<(), BenchError> {
            let config = StoreConfig { timeout: Duration::from_secs(20), ..StoreConfig::new(self.grpc()) };
            let store = Store::connect(config).map_err(wrong)?;
            loop {
                let from = next.fetch_add(BATCH, Ordering::Relaxed);
                if from >= args.objects || failed.lock().expect("no holder panics").is_some() {
                    return Ok(());
                }
                let objects: Vec<(String, Vec<u8>)> = (from..(from + BATCH).min(args.objects))
                    .map(|number| (key(number), content(number, args.bytes)))
                    .collect();
                let parts: Vec<[&[u8]; 1]> = objects.iter().map(|(_, bytes)| [&bytes[..]]).collect();
                let items: Vec<PutItem<'_>> = objects
                    .iter()
                    .zip(&parts)
                    .map(|((key, _), parts)| PutItem { key: key.as_bytes(), parts })
                    .collect();
                for outcome in store.put_batch(&items, &PutOptions::default()) {
                    outcome.map_err(wrong)?;
                }
                done.fetch_add(items.len() as u64, Ordering::Relaxed);
            }
        };
        std::thread::scope(|scope| {
            let fillers: Vec<_> = (0..FILLERS)
                .map(|_| {
                    scope.spawn(|| {
                        if let Err(error) = fill() {
                            failed.lock().expect("no holder panics").get_or_insert(error);
                        }
                    })
                })
                .collect();
            while fillers.iter().any(|filler| !filler.is_finished()) {
                progress.at(done.load(Ordering::Relaxed));
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        if let Some(error) = failed.into_inner().expect("no holder panics") {
            return Err(error);
        }
        let known = self.metrics()?.stored_objects;
        if known < args.objects {
            return Err(wrong(format!(
                "only {known} of {} objects are stored: too little memory",
                args.objects
            )));
        }
        Ok(())
    }

    fn grpc(&self) -> &str {
        &self.master_args[2]
    }

    fn metrics(&self) -> Result<MasterMetrics, BenchError> {
        let bytes = http::get(&self.admin, "/metrics", CALL_TIMEOUT).map_err(wrong)?;
        Ok(MasterMetrics::read(&String::from_utf8_lossy(&bytes)))
    }

    /// Kills the master, restarts it, and waits until it has indexed all objects.
    pub(super) fn kill_master(&mut self, args: &Args, repeat: u16) -> Result<KillResult, BenchError> {
        let (stop, seed) = (AtomicBool::new(false), args.seed + 10 * u64::from(repeat));
        let [uncached, cached, local] =
            [Reader::new(&self.uncached), Reader::new(&self.cached), Reader::new(&self.local)];
        let writer = WriterThread::new(&self.writing);
        // Fills the location cache.
        for number in 0..CACHED_KEYS.min(args.objects) {
            self.cached.get(key(number).as_bytes()).map_err(wrong)?;
        }
        std::thread::scope(|scope| {
            let _stop = StopAtEnd(&stop);
            scope.spawn(|| uncached.run(&stop, args.objects, args.bytes, seed));
            scope.spawn(|| cached.run(&stop, CACHED_KEYS.min(args.objects), args.bytes, seed + 1));
            scope.spawn(|| local.run(&stop, args.objects, args.bytes, seed + 2));
            scope.spawn(|| writer.run(&stop, repeat, args.bytes));
            std::thread::sleep(WARMUP);
            // Includes the objects of the writer; those that it stores later are about a thousandth.
            let all = self.metrics()?.stored_objects;

            let killed_at = Instant::now();
            let mut master = self.master.take().expect("a master is running");
            master.kill()?;
            drop(master);
            let (restarted, _) = ServerProcess::start(&self.master_args, "admin ")?;
            self.master = Some(restarted);
            let mut kill = KillResult { serving: killed_at.elapsed().as_secs_f64(), ..KillResult::default() };
            let end = killed_at + STEP_TIMEOUT;
            while kill.indexed_all == 0.0 {
                if Instant::now() > end {
                    return Err(wrong(format!("master has not indexed all objects within {STEP_TIMEOUT:?}")));
                }
                // The time is read after the metrics, so it is an upper bound.
                if let Ok(metrics) = self.metrics() {
                    let now = killed_at.elapsed().as_secs_f64();
                    let set_once = |value: &mut f64, is_reached: bool| {
                        if *value == 0.0 && is_reached {
                            *value = now;
                        }
                    };
                    set_once(&mut kill.sessions, metrics.open_sessions == u64::from(args.nodes));
                    set_once(&mut kill.indexed_99, metrics.stored_objects >= all / 100 * 99);
                    set_once(&mut kill.indexed_all, metrics.stored_objects >= all);
                }
                std::thread::sleep(POLL_INTERVAL);
            }
            kill.first_hit = first_after(&uncached.hits, killed_at, end, "get")?;
            kill.first_put = first_after(&writer.stored, killed_at, end, "put")?;
            std::thread::sleep(WARMUP);
            kill.gap_remote = longest_gap(&cached.hits);
            kill.gap_local = longest_gap(&local.hits);
            for reader in [&uncached, &cached, &local] {
                reader.check()?;
            }
            kill.found = self.found(args)?;
            Ok(kill)
        })
    }

    /// Returns the share of all keys that exist.
    fn found(&self, args: &Args) -> Result<f64, BenchError> {
        let mut found = 0;
        for from in (0..args.objects).step_by(BATCH as usize) {
            let keys: Vec<String> = (from..(from + BATCH).min(args.objects)).map(key).collect();
            let keys: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
            for exists in self.uncached.exists_batch(&keys) {
                found += u64::from(exists.map_err(wrong)?);
            }
        }
        Ok(found as f64 / args.objects as f64)
    }
}

/// Metrics of the master that the benchmark reads.
#[derive(Debug)]
struct MasterMetrics {
    stored_objects: u64,
    open_sessions: u64,
}

impl MasterMetrics {
    fn read(text: &str) -> MasterMetrics {
        let number = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|value| value.parse().ok()).unwrap_or(0)
        };
        MasterMetrics {
            stored_objects: number("moontide_master_objects"),
            open_sessions: number("moontide_master_node_sessions"),
        }
    }
}

/// Returns a free loopback address outside of the ephemeral ports, so that it is still free when the master restarts.
fn free_address(taken: &mut Vec<u16>) -> Result<String, BenchError> {
    // Ephemeral ports start at 32768.
    let first = 12_000 + std::process::id() % 10_000;
    for port in (first..32_000).map(|port| port as u16) {
        if !taken.contains(&port) && TcpListener::bind(("127.0.0.1", port)).is_ok() {
            taken.push(port);
            return Ok(format!("127.0.0.1:{port}"));
        }
    }
    Err(wrong("no port below 32000 is free"))
}
