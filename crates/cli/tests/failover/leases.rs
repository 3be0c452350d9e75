//! A process is killed while it holds objects: its pins are released immediately, leased objects after the lease
//! expires.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use moontide_client::{BlockingLink, LinkConfig, PutItem, PutOptions, PutOutcome, StoreConfig};
use moontide_proto::convert::CallerId;
use moontide_types::{ErrorCode, Key, Tenant};

use crate::content::Rng;
use crate::harness::{CALL, Cluster, KIB, STEP_TIMEOUT, Shape, connect, sized, words};
use crate::readers::{Got, Object, Way, read};

/// Environment variable of a holder process: `how address`.
const ROLE: &str = "MOONTIDE_TEST_LEASE_HOLDER";

/// Maximum time from the kill until all memory is free.
const FREE: Duration = Duration::from_secs(1);

/// Number of held objects.
const HELD: usize = 6;

/// A holder process, which is killed on drop.
struct Holder {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Holder {
    fn start(test: &str, how: &str, address: &str) -> Holder {
        let me = std::env::current_exe().expect("a path to this test");
        let mut child = Command::new(me)
            .args(["--exact", test, "--nocapture"])
            .env(ROLE, format!("{how} {address}"))
            .stdout(Stdio::piped())
            .spawn()
            .expect("this test can be started");
        let out = child.stdout.take().expect("piped");
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            BufReader::new(out).lines().map_while(Result::ok).try_for_each(|line| send.send(line))
        });
        Holder { child, lines }
    }

    #[track_caller]
    fn wait_for(&self, word: &str) {
        let end = Instant::now() + STEP_TIMEOUT;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            if line.unwrap_or_else(|error| panic!("holder did not print {word}: {error}")) == word {
                return;
            }
        }
    }

    /// Kills it; returns the time of the kill.
    fn kill(mut self) -> Instant {
        let killed_at = Instant::now();
        self.child.kill().expect("our child");
        self.child.wait().expect("our child");
        killed_at
    }
}

/// Also kills the process when the test fails.
impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn print_line(line: &str) {
    println!("\n{line}");
    let _ = std::io::stdout().flush();
}

fn held_key(number: usize) -> String {
    format!("held-{number}")
}

/// Runs a holder process until it is killed.
fn hold(role: &str) {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).expect("prctl");
    let (how, address) = role.split_once(' ').expect("how, and an address");
    if how == "lease" {
        let link = BlockingLink::connect(LinkConfig::new(address.to_owned(), CallerId(7))).expect("a link");
        let key = held_key(0);
        let key = Key::new(key.as_bytes()).expect("a key");
        let reply = link.lookup(Tenant::DEFAULT, &[key], LEASE_MS, false).expect("an answer");
        assert_eq!(reply.replicas().expect("locations").list.len(), 1);
        print_line("held");
        std::thread::sleep(STEP_TIMEOUT);
        return;
    }
    let local = how == "local";
    let store = connect(StoreConfig { shm: local, timeout: CALL, ..StoreConfig::new(address) });
    let keys: Vec<String> = (0..HELD).map(held_key).collect();
    let mut holds = Vec::new();
    if local {
        for key in &keys {
            let held = store.get_ref(key.as_bytes()).expect("an answer").expect("it was put");
            assert!(held.is_zero_copy(), "{key} is not held in place");
            holds.push(held);
        }
    }
    std::thread::scope(|scope| {
        // The kill also hits a writer over shared memory, or a reader that receives data over TCP. A writer over TCP
        // keeps its reservation until it expires, because it may reconnect.
        if local {
            scope.spawn(|| {
                for number in 0.. {
                    let key = format!("scratch-{}-{number}", std::process::id());
                    let _ = store.put(key.as_bytes(), &[7; 300 * KIB]);
                    let _ = store.remove(key.as_bytes(), true);
                }
            });
        } else {
            scope.spawn(|| {
                for key in keys.iter().cycle() {
                    let _ = store.get(key.as_bytes());
                }
            });
        }
        std::thread::sleep(Duration::from_millis(5));
        print_line("held");
        std::thread::sleep(STEP_TIMEOUT);
    });
}

#[test]
fn pins_and_writes_of_killed_process_are_freed_within_a_second() {
    if let Ok(role) = std::env::var(ROLE) {
        return hold(&role);
    }
    let mut rng = Rng::seeded();
    // The master releases reservations that a writer had not begun when they expire.
    let master_words = words("--reservation-ms 2000");
    let cluster = Cluster::start(Shape { nodes: 2, memory_mib: 64, master_words, ..Shape::default() });
    let store = cluster.local();
    let kills = sized(30, 1000);
    let sum = |part: &str| {
        cluster.nodes.iter().map(|node| node.metrics().node(&format!("memory_{part}_bytes"))).sum::<u64>()
    };
    let (mut longest, mut drained) = (Duration::ZERO, 0);
    for kill in 0..kills {
        let objects: Vec<Object> = (0..HELD)
            .map(|n| Object { key: held_key(n), ..Object::new("", n, &mut rng, KIB..512 * KIB) })
            .collect();
        let contents: Vec<Vec<u8>> = objects.iter().map(Object::content).collect();
        let parts: Vec<[&[u8]; 1]> = contents.iter().map(|content| [&content[..]]).collect();
        let items = objects.iter().zip(&parts);
        let items: Vec<PutItem<'_>> =
            items.map(|(object, parts)| PutItem { key: object.key(), parts }).collect();
        for put in store.put_batch(&items, &PutOptions::default()) {
            assert_eq!(put.expect("there is space"), PutOutcome::Stored);
        }
        let how = if kill % 3 == 2 { "remote" } else { "local" };
        let holder = Holder::start(
            "leases::pins_and_writes_of_killed_process_are_freed_within_a_second",
            how,
            cluster.grpc(),
        );
        holder.wait_for("held");
        let keys: Vec<&[u8]> = objects.iter().map(Object::key).collect();
        for removed in store.remove_batch(&keys, true) {
            assert!(removed.expect("all nodes are there"), "it was put");
        }
        if how == "local" {
            let held: usize = objects.iter().map(|object| object.len).sum();
            assert!(sum("draining") >= held as u64, "held memory was freed");
            drained += held;
        }
        let killed_at = holder.kill();
        loop {
            let rest = [sum("draining"), sum("writing")];
            let took = killed_at.elapsed();
            if rest == [0, 0] {
                longest = longest.max(took);
                break;
            }
            assert!(
                took <= FREE,
                "kill {kill}, {how}: {rest:?} bytes are draining and written {took:?} after it"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        // Its last object may have been complete when it was killed; no other object of it exists.
        let left = store.list(b"scratch-", b"", 100).expect("a list").keys;
        assert!(left.len() <= 1, "{left:?}");
        for key in left {
            store.remove(&key, true).expect("all nodes are there");
        }
    }
    println!("{kills} kills, {drained} bytes held, free after {longest:?} at the latest");
    drop(store);
    cluster.check_accounting();
    for node in &cluster.nodes {
        let page = node.metrics();
        assert_eq!(
            page.node("memory_free_bytes"),
            page.node("memory_capacity_bytes"),
            "memory in use after all objects were removed"
        );
    }
    cluster.end();
}

const LEASE_MS: u32 = 800;

#[test]
fn object_leased_by_killed_process_is_removable_after_lease_expiry() {
    if let Ok(role) = std::env::var(ROLE) {
        return hold(&role);
    }
    let mut rng = Rng::seeded();
    let cluster = Cluster::start(Shape { nodes: 1, ..Shape::default() });
    let store = cluster.remote();
    let lease = Duration::from_millis(LEASE_MS.into());
    let mut longest = Duration::ZERO;
    for _ in 0..sized(3, 20) {
        let object = Object { key: held_key(0), ..Object::new("", 0, &mut rng, KIB..64 * KIB) };
        assert_eq!(object.put(&store, &PutOptions::default()).expect("there is space"), PutOutcome::Stored);
        let test = "leases::object_leased_by_killed_process_is_removable_after_lease_expiry";
        let holder = Holder::start(test, "lease", cluster.master.printed("frame"));
        holder.wait_for("held");
        let leased_by = Instant::now();
        let refused = store.remove(object.key(), false);
        assert!(
            refused.as_ref().is_err_and(|error| error.code() == ErrorCode::Leased),
            "removal of a leased object returned {refused:?}"
        );
        let got = read(&store, Way::Copy, &object);
        assert!(matches!(got, Got::Right), "{got:?}");
        holder.kill();
        loop {
            match store.remove(object.key(), false) {
                Ok(there) => break assert!(there, "the object existed"),
                Err(error) if error.code() == ErrorCode::Leased => {}
                Err(error) => panic!("{error}"),
            }
            // Includes a tick of the master, and tolerance for a busy machine.
            assert!(leased_by.elapsed() < lease + FREE, "leased for {:?} and more", leased_by.elapsed());
            std::thread::sleep(Duration::from_millis(5));
        }
        longest = longest.max(leased_by.elapsed());
    }
    println!("a lease of {lease:?} of a killed process was over after {longest:?} at the latest");
    cluster.check_accounting();
    cluster.end();
}
