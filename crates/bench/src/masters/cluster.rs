//! [`Cluster`]: masters with an [`Etcd`] registry, and nodes; all are child processes that are stopped on drop.

use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use moontide_client::{BlockingLink, LinkConfig, PutItem, PutOptions, Store, StoreConfig};
use moontide_proto::convert::CallerId;
use moontide_types::{ErrorCode, Tenant};
use serde_json::Value;

use super::{Args, BATCH, CALL_TIMEOUT, RELAXED_TIMEOUT, content, key, keys_of};
use crate::http;
use crate::process::{ServerProcess, cpu_time, stop};
use crate::results::{BenchError, io, wrong};

/// Nodes of each cluster.
const NODES: usize = 2;
/// Memory of an object in a node: payload, digests and key in units of 512 bytes.
const SLOT_BYTES: u64 = 1024;
/// Timeout of each step of the benchmark.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval of reading the masters' endpoints while waiting.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Masters with an etcd registry, and nodes.
pub(super) struct Cluster {
    /// Dropped before the masters, because nodes unregister from them.
    nodes: Vec<ServerProcess>,
    pub(super) masters: Vec<Master>,
    registry: String,
    /// Directory of the masters' logs.
    dir: PathBuf,
    started: usize,
}

impl Cluster {
    pub(super) fn start(
        args: &Args,
        etcd: &Etcd,
        dir: &Path,
        name: &str,
        masters: usize,
    ) -> Result<Cluster, BenchError> {
        eprintln!("{masters} master(s) and {NODES} nodes …");
        let dir = dir.join(name);
        std::fs::create_dir(&dir).map_err(io("creating a directory"))?;
        let registry = format!("etcd://{}/{name}", etcd.address);
        let mut cluster = Cluster { nodes: vec![], masters: vec![], registry, dir, started: 0 };
        for _ in 0..masters {
            cluster.add_master(args)?;
        }
        wait_until("waiting for balanced groups", || Ok(is_balanced(&cluster.hosted()?, args.groups)))?;
        // Twice the size of the objects, so that nothing is evicted although groups fill unevenly.
        let bytes = (2 * args.objects * SLOT_BYTES / NODES as u64).max(u64::from(args.groups) * (4 << 20));
        for number in 0..NODES {
            let socket = cluster.dir.join(format!("node-{number}.sock")).display().to_string();
            let args_list = [
                "node",
                "--master",
                &cluster.addresses(),
                "--memory-bytes",
                &bytes.to_string(),
                "--bytes-per-slot",
                &SLOT_BYTES.to_string(),
                "--shm-socket",
                &socket,
            ];
            let (node, _) = ServerProcess::start(&args_list, "ready")?;
            cluster.nodes.push(node);
        }
        Ok(cluster)
    }

    pub(super) fn add_master(&mut self, args: &Args) -> Result<(), BenchError> {
        let free = "127.0.0.1:0";
        let log = self.dir.join(format!("master-{}.log", self.started));
        self.started += 1;
        let args_list = [
            "master",
            "--grpc-listen",
            free,
            "--frame-listen",
            free,
            "--admin-listen",
            free,
            "--groups",
            &args.groups.to_string(),
            "--registry",
            &self.registry,
            "--registry-lease-ms",
            &args.registry_lease_ms.to_string(),
        ];
        self.masters.push(Master::start(&args_list, log)?);
        Ok(())
    }

    /// gRPC addresses of all masters, separated by commas.
    fn addresses(&self) -> String {
        let addresses: Vec<&str> = self.masters.iter().map(|master| &*master.grpc).collect();
        addresses.join(",")
    }

    /// Connects a client without location cache and shared memory, which calls the masters every time.
    pub(super) fn store(&self, timeout: Duration) -> Result<Store, BenchError> {
        let config = StoreConfig {
            timeout,
            shm: false,
            location_cache_entries: 0,
            ..StoreConfig::new(self.addresses())
        };
        Store::connect(config).map_err(wrong)
    }

    pub(super) fn links(&self) -> Result<Vec<BlockingLink>, BenchError> {
        let link = |(master, number): (&Master, u64)| {
            BlockingLink::connect(LinkConfig::new(master.frame.clone(), CallerId(1000 + number)))
                .map_err(wrong)
        };
        self.masters.iter().zip(0..).map(link).collect()
    }

    /// Returns the index of the master of each key: the one that does not respond with `WrongMaster`.
    pub(super) fn hosts(&self, objects: u64) -> Result<Vec<u8>, BenchError> {
        let mut hosts = vec![u8::MAX; objects as usize];
        for (link, host) in self.links()?.iter().zip(0u8..) {
            for from in (0..objects).step_by(BATCH) {
                let numbers: Vec<u64> = (from..(from + BATCH as u64).min(objects)).collect();
                let keys: Vec<String> = numbers.iter().copied().map(key).collect();
                let results = link.exist(Tenant::DEFAULT, &keys_of(&keys)).map_err(wrong)?;
                for (number, result) in numbers.into_iter().zip(results) {
                    if result != Err(ErrorCode::WrongMaster) {
                        hosts[number as usize] = host;
                    }
                }
            }
        }
        let without = hosts.iter().filter(|host| **host == u8::MAX).count();
        if without > 0 { Err(wrong(format!("{without} keys have no master"))) } else { Ok(hosts) }
    }

    /// Stores all objects.
    pub(super) fn fill(&self, args: &Args) -> Result<(), BenchError> {
        let store = self.store(RELAXED_TIMEOUT)?;
        for from in (0..args.objects).step_by(1000) {
            let objects: Vec<(String, Vec<u8>)> =
                (from..(from + 1000).min(args.objects)).map(|n| (key(n), content(n))).collect();
            let parts: Vec<[&[u8]; 1]> = objects.iter().map(|(_, bytes)| [&bytes[..]]).collect();
            let items: Vec<PutItem<'_>> = objects
                .iter()
                .zip(&parts)
                .map(|((key, _), parts)| PutItem { key: key.as_bytes(), parts })
                .collect();
            for outcome in store.put_batch(&items, &PutOptions::default()) {
                outcome.map_err(wrong)?;
            }
        }
        match self.stored()? {
            stored if stored < args.objects => {
                Err(wrong(format!("only {stored} of {} objects are stored: too little memory", args.objects)))
            }
            _ => Ok(()),
        }
    }

    /// Number of objects in the indexes of all masters.
    pub(super) fn stored(&self) -> Result<u64, BenchError> {
        self.masters.iter().map(Master::stored).sum()
    }

    /// Number of groups of each master.
    pub(super) fn hosted(&self) -> Result<Vec<u64>, BenchError> {
        self.masters.iter().map(Master::groups).collect()
    }

    pub(super) fn masters_cpu(&self) -> Result<Duration, BenchError> {
        self.masters.iter().map(|master| cpu_time(master.process.id())).sum()
    }
}

/// A master process.
pub(super) struct Master {
    pub(super) process: ServerProcess,
    grpc: String,
    frame: String,
    admin: String,
    log: PathBuf,
}

impl Master {
    fn start(args_list: &[&str], log: PathBuf) -> Result<Master, BenchError> {
        let (process, lines) = ServerProcess::start_with_log(args_list, "admin ", &log)?;
        let address = |name: &str| {
            let line = lines.iter().find_map(|line| line.strip_prefix(name));
            line.map(|address| address.trim_start_matches("http://").to_owned())
                .ok_or_else(|| wrong(format!("master printed no {name}address")))
        };
        let [grpc, frame, admin] = [address("grpc ")?, address("frame ")?, address("admin ")?];
        Ok(Master { process, grpc, frame, admin, log })
    }

    fn page(&self, path: &str) -> Result<String, BenchError> {
        let bytes = http::get(&self.admin, path, CALL_TIMEOUT).map_err(wrong)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(super) fn groups(&self) -> Result<u64, BenchError> {
        let role: Value = serde_json::from_str(&self.page("/role")?).map_err(wrong)?;
        role["groups"].as_u64().ok_or_else(|| wrong(format!("unexpected role of a master: {role}")))
    }

    pub(super) fn stored(&self) -> Result<u64, BenchError> {
        let page = self.page("/metrics")?;
        let line = page.lines().find_map(|line| line.strip_prefix("moontide_master_objects "));
        line.and_then(|value| value.parse().ok())
            .ok_or_else(|| wrong("master has no metric moontide_master_objects"))
    }

    /// Number of objects that it received by handoff, from its log.
    pub(super) fn handoff_objects(&self) -> Result<u64, BenchError> {
        let log = std::fs::read_to_string(&self.log).map_err(io("reading a master's log"))?;
        let numbers = log.split("handoff_objects=").skip(1);
        Ok(numbers.filter_map(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).sum())
    }
}

/// The registry: one etcd server, which is stopped on drop.
pub(super) struct Etcd {
    child: Child,
    address: String,
}

impl Etcd {
    pub(super) fn start(dir: &Path) -> Result<Etcd, BenchError> {
        // Another process may take the port before etcd binds it.
        let mut tries = 0;
        loop {
            tries += 1;
            match Etcd::try_start(&dir.join(format!("etcd-{tries}"))) {
                Ok(etcd) => return Ok(etcd),
                Err(BenchError::Wrong(_)) if tries < 3 => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn try_start(data: &Path) -> Result<Etcd, BenchError> {
        let program = std::env::var("MOONTIDE_ETCD").unwrap_or_else(|_| "etcd".into());
        let free = || TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let (address, peer) = (free().map_err(io("finding a port"))?, free().map_err(io("finding a port"))?);
        let (clients, peers) = (format!("http://{address}"), format!("http://{peer}"));
        let mut command = Command::new(&program);
        command.args([
            "--name",
            "bench",
            "--listen-client-urls",
            &clients,
            "--advertise-client-urls",
            &clients,
        ]);
        command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        command.arg("--initial-cluster").arg(format!("bench={peers}")).arg("--data-dir").arg(data);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        let child = command.spawn().map_err(|error| {
            wrong(format!("{program}: {error}; install etcd, or set MOONTIDE_ETCD=/path/to/etcd"))
        })?;
        let mut etcd = Etcd { child, address: address.to_string() };
        wait_until("waiting for etcd", || {
            if let Ok(Some(status)) = etcd.child.try_wait() {
                return Err(wrong(format!("etcd exited: {status}")));
            }
            let health = http::get(&etcd.address, "/health", CALL_TIMEOUT).map_err(wrong)?;
            Ok(String::from_utf8_lossy(&health).contains("true"))
        })?;
        Ok(etcd)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        stop(&mut self.child);
    }
}

/// Returns true if all groups have a master, and the masters' numbers of groups differ by at most one.
pub(super) fn is_balanced(hosted: &[u64], groups: u16) -> bool {
    let (most, least) = (hosted.iter().max(), hosted.iter().min());
    let even = most.zip(least).is_some_and(|(most, least)| most - least <= 1);
    even && hosted.iter().sum::<u64>() == u64::from(groups)
}

/// Polls `is_reached` until it returns true; errors are retried until [`STEP_TIMEOUT`].
pub(super) fn wait_until(
    what: &str,
    mut is_reached: impl FnMut() -> Result<bool, BenchError>,
) -> Result<(), BenchError> {
    let end = Instant::now() + STEP_TIMEOUT;
    loop {
        let last = is_reached();
        if matches!(last, Ok(true)) {
            return Ok(());
        }
        if Instant::now() > end {
            let reason = last.err().map(|error| format!(": {error}")).unwrap_or_default();
            return Err(wrong(format!("{what}: timed out after {STEP_TIMEOUT:?}{reason}")));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_balanced_requires_all_groups_and_difference_at_most_one() {
        for (hosted, is_reached) in [
            (&[16][..], true),
            (&[15], false),
            (&[6, 5, 5], true),
            (&[6, 6, 4], false),
            (&[8, 8, 0], false),
            (&[], false),
        ] {
            assert_eq!(is_balanced(hosted, 16), is_reached, "{hosted:?}");
        }
    }
}
