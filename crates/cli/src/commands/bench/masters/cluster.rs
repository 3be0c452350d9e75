//! [`Cluster`]: masters that meet at an [`Etcd`], and nodes, each a process of its own that ends with its value.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use moontide_client::{BlockingLink, LinkConfig, PutItem, PutOptions, Store, StoreConfig};
use moontide_proto::convert::CallerId;
use moontide_types::{ErrorCode, Tenant};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::super::figures::{BenchError, cpu_time, io};
use super::super::transfer::wrong;
use super::{Args, BATCH, CALL, PATIENT, content, key, keys_of};

/// Nodes of each cluster.
const NODES: usize = 2;
/// Memory of an object in a node: payload, digests and key in units of 512 bytes.
const SLOT_BYTES: u64 = 1024;
/// Whatever is waited for has happened by then, or the benchmark fails.
const SOON: Duration = Duration::from_secs(60);
/// How long a process may take to end by itself.
const END_WAIT: Duration = Duration::from_secs(10);
/// How often pages of masters are read while something is waited for.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Masters that meet at an etcd, and nodes.
pub(super) struct Cluster {
    /// Nodes first: they say goodbye to the masters.
    nodes: Vec<Process>,
    pub(super) masters: Vec<Master>,
    registry: String,
    /// Where masters write what they do.
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
        std::fs::create_dir(&dir).map_err(io("making a directory"))?;
        let registry = format!("etcd://{}/{name}", etcd.address);
        let mut cluster = Cluster { nodes: vec![], masters: vec![], registry, dir, started: 0 };
        for _ in 0..masters {
            cluster.add_master(args)?;
        }
        until("groups are spread", || Ok(is_spread(&cluster.hosted()?, args.groups)))?;
        // Twice what the objects take, so that nothing is evicted although groups fill unevenly.
        let bytes = (2 * args.objects * SLOT_BYTES / NODES as u64).max(u64::from(args.groups) * (4 << 20));
        for number in 0..NODES {
            let door = cluster.dir.join(format!("node-{number}.sock")).display().to_string();
            let words = [
                "node",
                "--master",
                &cluster.addresses(),
                "--memory-bytes",
                &bytes.to_string(),
                "--slot-bytes",
                &SLOT_BYTES.to_string(),
                "--door",
                &door,
            ];
            let (node, _) = Process::start(&words.map(str::to_owned), "ready", None)?;
            cluster.nodes.push(node);
        }
        Ok(cluster)
    }

    pub(super) fn add_master(&mut self, args: &Args) -> Result<(), BenchError> {
        let free = "127.0.0.1:0";
        let log = self.dir.join(format!("master-{}.log", self.started));
        self.started += 1;
        let words = [
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
            "--lease-ms",
            &args.lease_ms.to_string(),
        ];
        self.masters.push(Master::start(&words.map(str::to_owned), log)?);
        Ok(())
    }

    /// Where all masters serve gRPC; any of them will do.
    fn addresses(&self) -> String {
        let addresses: Vec<&str> = self.masters.iter().map(|master| &*master.grpc).collect();
        addresses.join(",")
    }

    /// A caller who remembers nothing and maps no memory: it asks masters every time.
    pub(super) fn store(&self, deadline: Duration) -> Result<Store, BenchError> {
        let config =
            StoreConfig { deadline, local: false, locations: 0, ..StoreConfig::new(self.addresses()) };
        Store::connect(config).map_err(wrong)
    }

    pub(super) fn links(&self) -> Result<Vec<BlockingLink>, BenchError> {
        let link = |(master, number): (&Master, u64)| {
            BlockingLink::connect(LinkConfig::new(master.frame.clone(), CallerId(1000 + number)))
                .map_err(wrong)
        };
        self.masters.iter().zip(0..).map(link).collect()
    }

    /// Which master, by its position, has which key: whoever does not say that it is another one's.
    pub(super) fn hosts(&self, objects: u64) -> Result<Vec<u8>, BenchError> {
        let mut hosts = vec![u8::MAX; objects as usize];
        for (link, host) in self.links()?.iter().zip(0u8..) {
            for from in (0..objects).step_by(BATCH) {
                let numbers: Vec<u64> = (from..(from + BATCH as u64).min(objects)).collect();
                let keys: Vec<String> = numbers.iter().copied().map(key).collect();
                let answers = link.exist(Tenant::DEFAULT, &keys_of(&keys)).map_err(wrong)?;
                for (number, answer) in numbers.into_iter().zip(answers) {
                    if answer != Err(ErrorCode::WrongMaster) {
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
        let store = self.store(PATIENT)?;
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
                Err(wrong(format!("{stored} of {} objects are there: too little memory", args.objects)))
            }
            _ => Ok(()),
        }
    }

    /// Objects that masters know.
    pub(super) fn stored(&self) -> Result<u64, BenchError> {
        self.masters.iter().map(Master::stored).sum()
    }

    /// Groups of each master.
    pub(super) fn hosted(&self) -> Result<Vec<u64>, BenchError> {
        self.masters.iter().map(Master::groups).collect()
    }

    pub(super) fn masters_cpu(&self) -> Result<Duration, BenchError> {
        self.masters.iter().map(|master| cpu_time(master.process.child.id())).sum()
    }
}

/// A master.
pub(super) struct Master {
    pub(super) process: Process,
    grpc: String,
    frame: String,
    admin: String,
    log: PathBuf,
}

impl Master {
    pub(super) fn start(words: &[String], log: PathBuf) -> Result<Master, BenchError> {
        let (process, said) = Process::start(words, "admin ", Some(&log))?;
        let address = |name: &str| {
            let line = said.iter().find_map(|line| line.strip_prefix(name));
            line.map(|address| address.trim_start_matches("http://").to_owned())
                .ok_or_else(|| wrong(format!("a master did not say its address for{name}")))
        };
        let [grpc, frame, admin] = [address("grpc ")?, address("frame ")?, address("admin ")?];
        Ok(Master { process, grpc, frame, admin, log })
    }

    fn page(&self, path: &str) -> Result<String, BenchError> {
        let bytes = crate::http::get(&self.admin, path, CALL).map_err(wrong)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(super) fn groups(&self) -> Result<u64, BenchError> {
        let role: Value = serde_json::from_str(&self.page("/role")?).map_err(wrong)?;
        role["groups"].as_u64().ok_or_else(|| wrong(format!("a master says that its role is {role}")))
    }

    pub(super) fn stored(&self) -> Result<u64, BenchError> {
        let page = self.page("/metrics")?;
        let line = page.lines().find_map(|line| line.strip_prefix("moontide_master_stored_objects "));
        line.and_then(|value| value.parse().ok()).ok_or_else(|| wrong("a master does not count its objects"))
    }

    /// Objects that others handed to it with their groups: it says so in its log.
    pub(super) fn inherited(&self) -> Result<u64, BenchError> {
        let log = std::fs::read_to_string(&self.log).map_err(io("reading a master's log"))?;
        let numbers = log.split("inherited=").skip(1);
        Ok(numbers.filter_map(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).sum())
    }
}

// ---------------------------------------------------------------------------------------------------------- processes

/// A process that ends with this value.
pub(super) struct Process {
    child: Child,
    /// Kept open: a program whose output nobody takes ends.
    _out: BufReader<ChildStdout>,
}

impl Process {
    /// Starts this program with these words, and takes its lines up to one that begins like this.
    pub(super) fn start(
        words: &[String],
        last: &str,
        log: Option<&Path>,
    ) -> Result<(Process, Vec<String>), BenchError> {
        let program = std::env::current_exe().map_err(io("finding this program"))?;
        let mut command = Command::new(program);
        command.args(words);
        match log {
            Some(log) => {
                let file = File::create(log).map_err(io("making a log"))?;
                command.stderr(file).env("MOONTIDE_LOG", "moontide_master=info,warn");
            }
            None => {
                let wanted = std::env::var("MOONTIDE_LOG").unwrap_or_else(|_| "error".into());
                command.env("MOONTIDE_LOG", wanted);
            }
        }
        let mut child = spawn(&mut command)?;
        let mut out = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut said = vec![];
        loop {
            let mut line = String::new();
            if out.read_line(&mut line).map_err(io("reading a process's output"))? == 0 {
                let _ = child.wait();
                let log = log.and_then(|log| std::fs::read_to_string(log).ok()).unwrap_or_default();
                return Err(wrong(format!("a process ended before it said {last:?}\n{log}")));
            }
            said.push(line.trim_end().to_owned());
            if line.starts_with(last) {
                return Ok((Process { child, _out: out }, said));
            }
        }
    }

    /// Ends it without a word.
    pub(super) fn kill(&mut self) -> Result<(), BenchError> {
        self.child.kill().map_err(io("killing a master"))?;
        self.child.wait().map(drop).map_err(io("waiting for a master's end"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

fn spawn(command: &mut Command) -> Result<Child, BenchError> {
    // A group of its own: a signal from the terminal ends the benchmark, which then ends its processes.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    command.spawn().map_err(io("starting a process"))
}

/// Asks a process to end, and waits for it.
fn end(child: &mut Child) {
    if !matches!(child.try_wait(), Ok(None)) {
        return;
    }
    let _ = kill_process(Pid::from_child(child), Signal::TERM);
    let until = Instant::now() + END_WAIT;
    while Instant::now() < until {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// The registry: one server, which ends with this value.
pub(super) struct Etcd {
    child: Child,
    address: String,
}

impl Etcd {
    pub(super) fn start(dir: &Path) -> Result<Etcd, BenchError> {
        // Somebody else may take a port between our knowing it and etcd's.
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
            wrong(format!(
                "{program}: {error}; install etcd, or say where it is: MOONTIDE_ETCD=/path/to/etcd"
            ))
        })?;
        let mut etcd = Etcd { child, address: address.to_string() };
        until("etcd is healthy", || {
            if let Ok(Some(status)) = etcd.child.try_wait() {
                return Err(wrong(format!("etcd ended: {status}")));
            }
            let said = crate::http::get(&etcd.address, "/health", CALL).map_err(wrong)?;
            Ok(String::from_utf8_lossy(&said).contains("true"))
        })?;
        Ok(etcd)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

/// Whether all groups have a master, and none has two more than another.
pub(super) fn is_spread(hosted: &[u64], groups: u16) -> bool {
    let (most, least) = (hosted.iter().max(), hosted.iter().min());
    let even = most.zip(least).is_some_and(|(most, least)| most - least <= 1);
    even && hosted.iter().sum::<u64>() == u64::from(groups)
}

/// Looks until it is so. A page that cannot be read is read again.
pub(super) fn until(
    what: &str,
    mut is_so: impl FnMut() -> Result<bool, BenchError>,
) -> Result<(), BenchError> {
    let end = Instant::now() + SOON;
    loop {
        let last = is_so();
        if matches!(last, Ok(true)) {
            return Ok(());
        }
        if Instant::now() > end {
            let why = last.err().map(|error| format!(": {error}")).unwrap_or_default();
            return Err(wrong(format!("{what}: not within {SOON:?}{why}")));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_spread_when_all_are_hosted_and_nobody_has_two_more() {
        for (hosted, is_so) in [
            (&[16][..], true),
            (&[15], false),
            (&[6, 5, 5], true),
            (&[6, 6, 4], false),
            (&[8, 8, 0], false),
            (&[], false),
        ] {
            assert_eq!(is_spread(hosted, 16), is_so, "{hosted:?}");
        }
    }
}
