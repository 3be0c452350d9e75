//! Chaos: a cluster of real processes in network namespaces, with clients that read, write and remove, while processes are
//! killed and stopped, the network is cut and disks run full. Every value says what it is, so that whoever reads it can
//! check it; every call is noted, and at the end all of them are judged together.
//!
//! ```text
//!   master 10.79.0.1 ─┐                                     every process: kill -9, SIGSTOP, start again
//!   node   10.79.0.11 ┤   ◀ client, by mapped memory        every pair of namespaces: cut, both ways or one
//!   node   10.79.0.12 ┤   ◀ client, by mapped memory        disks: tmpfs, filled up
//!   node   10.79.0.13 ┼── bridge, in a namespace of its own, where this test sits
//!   node   10.79.0.14 ┤
//!   client 10.79.0.21 ┤
//!   client 10.79.0.22 ┘
//! ```
//!
//! | file | what |
//! |---|---|
//! | `net` | namespaces, the bridge, cuts |
//! | `process` | a process with a name and a namespace, and whoever starts it again |
//! | `world` | which processes there are, and with which words they are started |
//! | `faults` | what can happen, drawn from a seed |
//! | `value` | keys and values that say what they are |
//! | `journal` | what clients note of their calls |
//! | `client` | what a client does |
//! | `judge` | which reads are wrong |
//! | `report` | tables |
//!
//! What must hold: a get brings bytes that were put under its key, never other ones, and never a version that was removed, or
//! replaced, with an answer that says so before the get began; every get ends by its deadline; and when all is healed and
//! removed no process holds a byte.
//!
//! Needs root, `ip` and `nft`. Ignored unless asked for, by `cargo xtask chaos`:
//!
//! | variable | meaning |
//! |---|---|
//! | `MOONTIDE_SEED` | repeats the faults and the choices of clients (not their interleaving, which is the machine's) |
//! | `MOONTIDE_CHAOS_SECONDS` | how long things happen; 60 unless set |
//! | `MOONTIDE_CHAOS_MASTERS` | how many masters; with more than one an `etcd` is started, too. One unless set |
//! | `MOONTIDE_ETCD` | the program of `etcd`, if it is not in the path |

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

#[path = "chaos/client.rs"]
mod client;
#[path = "cluster/content.rs"]
mod content;
#[path = "chaos/faults.rs"]
mod faults;
#[path = "chaos/journal.rs"]
mod journal;
#[path = "chaos/judge.rs"]
mod judge;
#[path = "cluster/kit.rs"]
mod kit;
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
use kit::Folder;
use world::{Shape, World};

/// The name by which this test starts itself again as a client.
pub const TEST: &str = "no_read_is_wrong_whatever_is_killed_stopped_cut_or_full";

/// At least one fault in so many seconds.
const SECONDS_PER_FAULT_MAX: u64 = 6;
/// At least so many keys are written per second: 100,000 in ten minutes.
const KEYS_PER_SECOND_MIN: u64 = 170;

#[test]
#[ignore = "takes a minute or more, and needs root; see `cargo xtask chaos`"]
fn no_read_is_wrong_whatever_is_killed_stopped_cut_or_full() {
    if let Ok(role) = std::env::var(client::ROLE) {
        return client::run(&role);
    }
    if let Some(missing) = net::missing() {
        // Whoever asks for this test by its name wants it to run.
        panic!("this machine cannot run it: {missing}");
    }
    let seconds = std::env::var("MOONTIDE_CHAOS_SECONDS").map_or(60, |text| text.parse().expect("seconds"));
    let mut rng = Rng::seeded();
    let folder = Folder::new();
    let mut world = World::start(Shape::from_environment(), folder.path(), rng.draw());
    let (mut faults, begun) = (Faults::new(rng.fork()), Instant::now());
    while begun.elapsed() < Duration::from_secs(seconds) {
        faults.step(&mut world);
        world.tend();
        std::thread::sleep(Duration::from_millis(20));
    }
    faults.heal(&mut world);
    world.settle();
    world.end_clients();
    world.settle();
    report::faults(&faults.done);

    let journals = journal::read_all(folder.path());
    let verdict = judge::judge(&journals, &faults.stops());
    verdict.print(&faults.done);
    let left = world.remove_everything();
    println!("held at the end: {left:#?}");
    world.print_restarts();
    let errors = world.log_errors();

    assert!(verdict.wrong.is_empty(), "wrong reads: {:#?}", &verdict.wrong[..verdict.wrong.len().min(20)]);
    assert!(
        verdict.longest_get <= client::DEADLINE + client::LATE,
        "a get took {:?}, its deadline is {:?}",
        verdict.longest_get,
        client::DEADLINE
    );
    assert!(left.is_empty(), "held by somebody after everything was removed: {left:#?}");
    assert!(errors.is_empty(), "somebody should have looked: {errors:#?}");
    let least = seconds * KEYS_PER_SECOND_MIN;
    assert!(verdict.keys_written >= least, "{} keys were written, {least} are wanted", verdict.keys_written);
    let least = (seconds / SECONDS_PER_FAULT_MAX) as usize;
    assert!(faults.done.len() >= least, "{} faults happened, {least} are wanted", faults.done.len());
}
