//! Chaos test: a cluster of real processes in network namespaces, with clients that read, write and remove, while
//! processes are killed and stopped, the network is partitioned and disks run full. Every value encodes its key and
//! version, so that a reader can check it; clients record every call, and a checker examines all records at the end.
//!
//! ```text
//!   master 10.79.0.1  ┐                                     every process: kill -9, SIGSTOP, restart
//!   master 10.79.0.2  ┤                                     every pair of namespaces: partition, both ways or one
//!   master 10.79.0.3  ┤                                     every namespace: partition from all others
//!   node   10.79.0.11 ┤   ◀ client, shared memory           disks: tmpfs, filled up
//!   node   10.79.0.12 ┤   ◀ client, shared memory
//!   node   10.79.0.13 ┼── bridge, in a separate namespace, where this test runs
//!   node   10.79.0.14 ┤
//!   client 10.79.0.21 ┤
//!   client 10.79.0.22 ┤
//!   etcd   10.79.0.31 ┘
//! ```
//!
//! | file | content |
//! |---|---|
//! | `net` | namespaces, the bridge, partitions |
//! | `process` | a process with a name and a namespace, and its restarts |
//! | `world` | processes of the cluster and their arguments |
//! | `faults` | faults, drawn from a seed |
//! | `value` | self-describing keys and values |
//! | `journal` | records of the clients' calls |
//! | `client` | client process |
//! | `linearizability` | detection of wrong gets of one key |
//! | `checker` | wrong gets of all keys, failures, numbers of calls |
//! | `group_monitor` | times of groups without a master |
//! | `machine` | time that the machine lost to others |
//! | `report` | tables |
//!
//! Invariants: a get returns bytes that were put under its key; puts, upserts, removals and gets of each key are
//! linearizable (see `linearizability` for the exceptions), so that a get never returns a version whose removal or
//! replacement was acknowledged before the get started; every get ends by its timeout; no group is without a master for
//! long while masters and registry are healthy; after healing, every client call succeeds again; after removing all
//! objects, no process uses memory for objects. All keys are read after healing, and again when everything was removed and
//! all masters and nodes were killed after that. A late call or a late election is excused if the machine lost a tenth of
//! that time to others (`machine`), and the number of keys that must be written is then a quarter; nothing excuses wrong
//! bytes.
//!
//! With slow disks, a node delays every sync by a random time up to a maximum that is drawn for each life of the node, and
//! the disks are file systems in files on a real disk. Its backends are `bucket` and `offset`; the backend `file` syncs
//! directories for every record, and would do little else.
//!
//! Needs root, `ip`, `nft` and `etcd`. Ignored by default; run it with `cargo xtask chaos`:
//!
//! | variable | meaning |
//! |---|---|
//! | `MOONTIDE_SEED` | repeats the faults and the random choices of clients (not their interleaving) [default: drawn] |
//! | `MOONTIDE_CHAOS_SECONDS` | duration of the faults in seconds [default: 60] |
//! | `MOONTIDE_CHAOS_MASTERS` | number of masters; with more than one, an `etcd` is started [default: 3] |
//! | `MOONTIDE_CHAOS_SLOW_DISKS` | `true`: with slow disks [default: false] |
//! | `MOONTIDE_ETCD` | path of `etcd`, if it is not in PATH |

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

#[path = "chaos/checker.rs"]
mod checker;
#[path = "chaos/client.rs"]
mod client;
#[path = "cluster/content.rs"]
mod content;
#[path = "chaos/faults.rs"]
mod faults;
#[path = "chaos/group_monitor.rs"]
mod group_monitor;
#[path = "cluster/harness.rs"]
mod harness;
#[path = "chaos/journal.rs"]
mod journal;
#[path = "chaos/linearizability.rs"]
mod linearizability;
#[path = "chaos/machine.rs"]
mod machine;
#[path = "chaos/net.rs"]
mod net;
#[path = "chaos/process.rs"]
mod process;
#[path = "chaos/report.rs"]
mod report;
#[path = "chaos/value.rs"]
mod value;
#[path = "chaos/world.rs"]
mod world;

use std::time::{Duration, Instant};

use content::Rng;
use faults::Faults;
use group_monitor::GroupMonitor;
use harness::Folder;
use machine::MachineMonitor;
use world::{Shape, World};

/// Name with which this test starts itself again as a client.
pub const TEST: &str = "reads_are_correct_under_random_faults";

/// Maximum mean time between faults, in seconds.
const SECONDS_PER_FAULT_MAX: u64 = 6;
/// Minimum rate of written keys: 100,000 in ten minutes.
const KEYS_PER_SECOND_MIN: u64 = 170;
/// The same with slow disks: puts wait until a disk has taken older objects.
const KEYS_PER_SECOND_SLOW_MIN: u64 = 40;

/// Time that clients continue after healing.
const QUIET: Duration = Duration::from_secs(4);
/// Time after healing from which every get must succeed.
const QUIET_AFTER: Duration = Duration::from_secs(1);

#[test]
#[ignore = "takes a minute or more, and needs root; see `cargo xtask chaos`"]
fn reads_are_correct_under_random_faults() {
    if let Ok(role) = std::env::var(client::ROLE) {
        return client::run(&role);
    }
    if let Some(missing) = net::missing() {
        // The test is ignored by default, so a run is explicit: do not skip it.
        panic!("cannot run on this machine: {missing}");
    }
    let shape = Shape::from_environment();
    if let Some(missing) = shape.missing() {
        panic!("cannot run on this machine: {missing}");
    }
    let seconds = std::env::var("MOONTIDE_CHAOS_SECONDS").map_or(60, |text| text.parse().expect("seconds"));
    let mut rng = Rng::seeded();
    let folder = Folder::new();
    if shape.slow_disks {
        let path = folder.path();
        assert!(!world::is_tmpfs(path), "slow disks need a real disk, and {} is in memory", path.display());
    }
    let mut world = World::start(shape, folder.path(), rng.draw());
    let machine = MachineMonitor::start();
    let monitor = GroupMonitor::start(&world::master_pages_at(shape));
    let (mut faults, started) = (Faults::new(rng.fork(), shape.slow_disks), Instant::now());
    while started.elapsed() < Duration::from_secs(seconds) {
        faults.step(&mut world);
        world.supervise();
        std::thread::sleep(Duration::from_millis(20));
    }
    faults.heal(&mut world);
    world.settle();
    let quiet = journal::now() + QUIET_AFTER.as_nanos() as u64;
    std::thread::sleep(QUIET);
    world.end_clients();
    world.settle();
    let vacancies = monitor.end();
    report::faults(&faults.done);

    let mut records = journal::read_all(folder.path());
    let keys = checker::keys(&records);
    records.extend(world.read_all(&keys));
    let left = world.remove_everything(&mut records);
    println!("{} uses of memory at the end", left.len());
    world.restart_masters_and_nodes();
    records.extend(world.read_all(&keys));
    let lost = machine.end();
    let verdict = checker::judge(&records, &faults.stops(), quiet, &lost);
    verdict.print(&faults.done);
    let vacant = group_monitor::judge(&vacancies, &faults.done, &lost);
    report::machine(&lost);
    world.print_restarts();
    let errors = world.log_errors();

    // Reports all failures together.
    let mut failures = vec![];
    let mut check = |is_so: bool, what: String| {
        if !is_so {
            failures.push(what);
        }
    };
    let (wrong, described) = (&verdict.wrong, verdict.described.join("\n"));
    check(wrong.is_empty(), format!("wrong gets: {wrong:?}\n{described}"));
    let late = verdict.late_get;
    check(late.is_none(), format!("a get took {late:?}, its deadline is {:?}", client::DEADLINE));
    check(verdict.unanswered.is_empty(), format!("calls failed after healing: {:#?}", verdict.unanswered));
    check(vacant.is_empty(), format!("groups without a master although masters were healthy: {vacant:#?}"));
    let some = &left[..left.len().min(40)];
    check(some.is_empty(), format!("memory in use after all objects were removed: {some:#?}"));
    check(errors.is_empty(), format!("errors in logs: {errors:#?}"));
    let rate = if shape.slow_disks { KEYS_PER_SECOND_SLOW_MIN } else { KEYS_PER_SECOND_MIN };
    let rate = if lost.is_large() { rate / 4 } else { rate };
    let (written, least) = (verdict.keys_written, seconds * rate);
    check(written >= least, format!("only {written} keys were written, expected {least}"));
    let (happened, least) = (faults.done.len(), (seconds / SECONDS_PER_FAULT_MAX) as usize);
    check(happened >= least, format!("only {happened} faults, expected {least}"));
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
