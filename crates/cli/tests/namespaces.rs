//! A cluster with a network partition: master, nodes and client in separate network namespaces, joined by a bridge.
//!
//! ```text
//!   master 10.78.0.1 ──┐
//!   node   10.78.0.2 ──┤
//!   node   10.78.0.3 ──┼── bridge, in a separate namespace
//!   node   10.78.0.4 ──┤
//!   client 10.78.0.9 ──┘
//! ```
//!
//! The partition of a node drops packets in both directions, without a reset: by `nft`, which drops input and output,
//! or without it by `ip`, which removes the node's port from the bridge.
//!
//! Needs root and `ip`; without them the test is not run, which is a failure under `CI=true`. The client is this binary, started again
//! with an environment variable.

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

#[path = "cluster/content.rs"]
mod content;
#[path = "cluster/harness.rs"]
mod harness;
#[path = "../../types/tests/support/not_run.rs"]
mod not_run;
#[path = "cluster/readers.rs"]
mod readers;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use content::Rng;
use harness::{Folder, KIB, Process, STEP_TIMEOUT, connect, sized, until, words};
use moontide_client::StoreConfig;
use not_run::not_run;
use readers::{Got, Object, StopAtEnd, Tally, Way, put_all, read, read_until, replicas};

/// Environment variable of the client process: `master seed`.
const ROLE: &str = "MOONTIDE_NAMESPACES_CLIENT";

const TTL_MS: u64 = 2000;
/// From the partition until the client knows: session expiry, a tick of the master, the client's next poll of the map.
const KNOWN_AFTER: Duration = Duration::from_millis(TTL_MS + 3000);
/// Duration of the partition: longer than the session TTL, and long enough to observe the time after it.
const CUT: Duration = Duration::from_millis(TTL_MS + 5000);
/// Timeout of a call of the client.
const DEADLINE: Duration = Duration::from_secs(4);
/// Tolerance for late responses on a machine with two cores that runs five busy processes.
const LATE: Duration = Duration::from_millis(1000);

const NODES: usize = 3;

fn missing() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("creating network namespaces needs root");
    }
    if Command::new("ip").arg("-V").output().is_err() {
        return Some("needs ip (iproute2)");
    }
    match Command::new("unshare").args(["--net", "true"]).output() {
        Ok(made) if made.status.success() => None,
        _ => Some("cannot create network namespaces"),
    }
}

// ------------------------------------------------------------------------------------------------------ namespaces

/// A namespace per process, and one for the bridge. Removed on drop.
struct TestNetwork {
    name: String,
    has_nft: bool,
}

/// Names of the namespaces, and the last byte of their addresses.
const SIDES: [(&str, u8); 5] = [("m", 1), ("0", 2), ("1", 3), ("2", 4), ("c", 9)];
const BRIDGE: &str = "s";

#[track_caller]
fn ip(words: &str) {
    let output = Command::new("ip").args(words.split_whitespace()).output().expect("ip runs");
    assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
}

impl TestNetwork {
    fn new() -> TestNetwork {
        TestNetwork::sweep();
        let has_nft = Command::new("nft").arg("-v").output().is_ok_and(|output| output.status.success());
        let network = TestNetwork { name: format!("mc{}", std::process::id()), has_nft };
        let name = &network.name;
        ip(&format!("netns add {name}{BRIDGE}"));
        ip(&format!("-n {name}{BRIDGE} link add bridge type bridge"));
        ip(&format!("-n {name}{BRIDGE} link set bridge up"));
        for (side, host) in SIDES {
            ip(&format!("netns add {name}{side}"));
            ip(&format!(
                "link add eth netns {name}{side} type veth peer name port{side} netns {name}{BRIDGE}"
            ));
            ip(&format!("-n {name}{side} address add 10.78.0.{host}/24 dev eth"));
            ip(&format!("-n {name}{side} link set eth up"));
            ip(&format!("-n {name}{side} link set lo up"));
            ip(&format!("-n {name}{BRIDGE} link set port{side} master bridge"));
            ip(&format!("-n {name}{BRIDGE} link set port{side} up"));
        }
        println!("nodes are partitioned by {}", if has_nft { "nft" } else { "ip link" });
        network
    }

    /// Removes namespaces of killed runs.
    fn sweep() {
        let Ok(entries) = std::fs::read_dir("/run/netns") else { return };
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let mut pid = name.strip_prefix("mc").unwrap_or_default().to_owned();
            pid.pop();
            if pid.parse::<u32>().is_ok() && !std::path::Path::new(&format!("/proc/{pid}")).exists() {
                let _ = Command::new("ip").args(["netns", "del", &name]).status();
            }
        }
    }

    fn inside(&self, side: &str) -> Vec<String> {
        ["ip".into(), "netns".into(), "exec".into(), format!("{}{side}", self.name)].into()
    }

    fn nft(&self, side: &str, rules: &str) {
        let words = self.inside(side);
        let output =
            Command::new(&words[0]).args(&words[1..]).args(["nft", rules]).output().expect("nft runs");
        assert!(output.status.success(), "nft {rules}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Drops all packets of a namespace from now on.
    fn cut(&self, side: &str) {
        if self.has_nft {
            let chain = |name: &str, hook: &str| {
                format!("add chain inet cut {name} {{ type filter hook {hook} priority 0; policy drop; }};")
            };
            let (comes, goes) = (chain("comes", "input"), chain("goes", "output"));
            self.nft(side, &format!("add table inet cut; {comes} {goes}"));
        } else {
            ip(&format!("-n {}{BRIDGE} link set port{side} nomaster", self.name));
        }
    }

    fn heal(&self, side: &str) {
        if self.has_nft {
            self.nft(side, "delete table inet cut");
        } else {
            ip(&format!("-n {}{BRIDGE} link set port{side} master bridge", self.name));
        }
    }
}

impl Drop for TestNetwork {
    fn drop(&mut self) {
        for side in SIDES.map(|(side, _)| side).into_iter().chain([BRIDGE]) {
            let _ = Command::new("ip").args(["netns", "del", &format!("{}{side}", self.name)]).status();
        }
    }
}

// ---------------------------------------------------------------------------------------------------------- client

/// The client process, which is killed on drop.
struct Client {
    child: Child,
    input: ChildStdin,
    lines: mpsc::Receiver<String>,
}

impl Client {
    fn start(network: &TestNetwork, master: &str, seed: u64) -> Client {
        let through = network.inside("c");
        let me = std::env::current_exe().expect("a path to this test");
        let mut child = Command::new(&through[0])
            .args(&through[1..])
            .arg(me)
            .args(["--exact", "reads_bypass_partitioned_node_and_node_rejoins", "--nocapture"])
            .env(ROLE, format!("{master} {seed}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this test starts");
        let (input, out) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            BufReader::new(out).lines().map_while(Result::ok).try_for_each(|line| send.send(line))
        });
        Client { child, input, lines }
    }

    /// Returns the rest of the next line that starts with `about`; prints other lines.
    #[track_caller]
    fn line(&self, about: &str) -> String {
        let end = Instant::now() + 2 * STEP_TIMEOUT;
        loop {
            let line = self.lines.recv_timeout(end.saturating_duration_since(Instant::now()));
            let line = line.unwrap_or_else(|error| panic!("client printed no {about:?}: {error}"));
            match line.strip_prefix(about) {
                Some(rest) => return rest.trim().to_owned(),
                None if line.starts_with("right ") => {}
                None => println!("client: {line}"),
            }
        }
    }

    /// Waits until the client has read `more` more objects.
    #[track_caller]
    fn reads(&self, more: u64) {
        let right = |line: String| line.parse::<u64>().expect("a number");
        let first = right(self.line("right "));
        let end = Instant::now() + STEP_TIMEOUT;
        while right(self.line("right ")) < first + more {
            assert!(Instant::now() < end, "client has not read {more} objects within {STEP_TIMEOUT:?}");
        }
    }

    fn send(&mut self, word: &str) {
        writeln!(self.input, "{word}").expect("the client reads its input");
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn print_line(line: &str) {
    println!("{line}");
    let _ = std::io::stdout().flush();
}

/// Runs the client: puts, then gets until the line `end`; other lines mark events.
fn be_client(role: &str) {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).expect("prctl");
    let (master, seed) = role.split_once(' ').expect("a master and a seed");
    let mut rng = Rng::new(seed.parse().expect("a seed"));
    let config = StoreConfig { shm: false, timeout: DEADLINE, ..StoreConfig::new(master) };
    let store = connect(config.clone());
    let twice = replicas(2);
    let objects: Vec<Object> =
        (0..sized(60, 600)).map(|n| Object::new("remote", n, &mut rng, 1..300 * KIB)).collect();
    put_all(&store, &objects, &twice);
    // The newline separates this from the output of the test harness.
    print_line("\nput");
    let (stop, tally) = (AtomicBool::new(false), Tally::default());
    let moments = Mutex::new(Vec::<(String, Instant)>::new());
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for _ in 0..2 {
            let (rng, stop, store, objects, tally) = (rng.fork(), &stop, &store, &objects, &tally);
            scope.spawn(move || read_until(stop, store, objects, rng, &Way::ALL, tally));
        }
        let (stop, tally) = (&stop, &tally);
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                print_line(&format!("right {}", tally.right()));
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        for line in std::io::stdin().lock().lines() {
            let line = line.expect("the test writes lines");
            if line == "end" {
                return;
            }
            moments.lock().expect("no holder panics").push((line, Instant::now()));
        }
    });
    tally.summary("gets");
    let moment = |word: &str| {
        let moments = moments.lock().expect("no holder panics");
        moments.iter().find(|(event, _)| event == word).expect("the event was sent").1
    };
    let longest = tally.longest();
    assert!(longest <= DEADLINE + LATE, "a get took {longest:?}, its deadline is {DEADLINE:?}");
    let misses = tally.lost().iter().filter(|lost| lost.reason == "a miss").count();
    assert_eq!(misses, 0, "gets of objects with another replica missed");
    let lost = tally.lost().into_iter().filter(|lost| lost.began > moment("cut") + KNOWN_AFTER);
    let lost: Vec<_> = lost.map(|lost| (lost.began - moment("cut"), lost.reason)).collect();
    assert!(lost.is_empty(), "gets failed after the session of the node had ended: {lost:?}");
    assert_eq!(store.metrics().stats().corrupt, 0);

    // All objects exist, and all nodes accept objects again.
    until("all nodes rejoin", STEP_TIMEOUT, || store.nodes().is_ok_and(|nodes| nodes.len() == NODES));
    let everywhere = replicas(3);
    let last = Object::new("last", 0, &mut rng, 100 * KIB..200 * KIB);
    until("a put on all nodes", STEP_TIMEOUT, || last.put(&store, &everywhere).is_ok());
    for store in [&store, &connect(config)] {
        for object in objects.iter().chain([&last]) {
            let got = read(store, Way::Copy, object);
            assert!(matches!(got, Got::Right), "{} {got:?}", object.key);
        }
    }
    print_line("done");
}

// ------------------------------------------------------------------------------------------------------------ test

#[test]
fn reads_bypass_partitioned_node_and_node_rejoins() {
    if let Ok(role) = std::env::var(ROLE) {
        return be_client(&role);
    }
    if let Some(missing) = missing() {
        return not_run(missing);
    }
    let seed = Rng::seeded().draw();
    let (network, folder) = (TestNetwork::new(), Folder::new());
    let master = words(&format!(
        "master --grpc-listen 10.78.0.1:7400 --frame-listen 10.78.0.1:7401 --admin-listen 10.78.0.1:7402 --insecure-no-tls true --groups 2 \
         --session-ttl-ms {TTL_MS} --reallocation-delay-ms 0"
    ));
    let master = Process::start(folder.path(), "master", &network.inside("m"), &master, "admin");
    let nodes: Vec<Process> = (0..NODES)
        .map(|node| {
            // No shm: the nodes are on different hosts.
            let all = words(&format!(
                "node --master 10.78.0.1:7400 --memory-bytes 128MiB --listen 10.78.0.{}:7500 --insecure-no-tls true --shm false \
                 --host host-{node}",
                node + 2
            ));
            Process::start(
                folder.path(),
                &format!("node-{node}"),
                &network.inside(&node.to_string()),
                &all,
                "ready",
            )
        })
        .collect();
    let mut client = Client::start(&network, master.printed("grpc"), seed);
    client.line("put");
    client.reads(200);
    client.send("cut");
    network.cut("1");
    let cut_at = Instant::now();
    client.reads(100);
    println!("100 more objects were read {:?} after the partition", cut_at.elapsed());
    until("end of the partition", 2 * CUT, || cut_at.elapsed() > CUT);
    client.reads(200);
    client.send("heal");
    network.heal("1");
    client.reads(500);
    client.send("end");
    client.line("done");
    let status = client.child.wait().expect("our child");
    assert!(status.success(), "client failed: {status}");
    for process in nodes.iter().chain([&master]) {
        let text = process.log_text();
        assert!(!text.contains(" ERROR ") && !text.contains("panicked at"), "{text}");
    }
}
