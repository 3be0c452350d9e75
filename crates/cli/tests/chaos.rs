//! Chaos: a cluster of real processes in network namespaces, with clients that read, write and remove, while processes are
//! killed and stopped, the network is cut and disks run full. Every value says what it is, so that whoever reads it can
//! check it; every call is noted, and at the end all of them are judged together.
//!
//! ```text
//!   master 10.79.0.1  ┐                                     every process: kill -9, SIGSTOP, start again
//!   master 10.79.0.2  ┤                                     every pair of namespaces: cut, both ways or one
//!   master 10.79.0.3  ┤                                     every namespace: cut off from all others
//!   node   10.79.0.11 ┤   ◀ client, by mapped memory        disks: tmpfs, filled up
//!   node   10.79.0.12 ┤   ◀ client, by mapped memory
//!   node   10.79.0.13 ┼── bridge, in a namespace of its own, where this test sits
//!   node   10.79.0.14 ┤
//!   client 10.79.0.21 ┤
//!   client 10.79.0.22 ┤
//!   etcd   10.79.0.31 ┘
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
//! | `watch` | when groups had no master |
//! | `report` | tables |
//!
//! What must hold: a get brings bytes that were put under its key, never other ones, and never a version that was removed, or
//! replaced, with an answer that says so before the get began; every get ends by its deadline; no group is without a master for
//! long while masters and their registry are well; when all is healed every client is answered again; and when all is removed
//! no process holds a byte.
//!
//! Needs root, `ip`, `nft` and `etcd`. Ignored unless asked for, by `cargo xtask chaos`:
//!
//! | variable | meaning |
//! |---|---|
//! | `MOONTIDE_SEED` | repeats the faults and the choices of clients (not their interleaving, which is the machine's) |
//! | `MOONTIDE_CHAOS_SECONDS` | how long things happen; 60 unless set |
//! | `MOONTIDE_CHAOS_MASTERS` | how many masters; with more than one an `etcd` is started, too. Three unless set |
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
#[path = "chaos/watch.rs"]
mod watch;
#[path = "chaos/world.rs"]
mod world;

use std::time::{Duration, Instant};

use content::Rng;
use faults::Faults;
use kit::Folder;
use watch::Watch;
use world::{Shape, World};

/// The name by which this test starts itself again as a client.
pub const TEST: &str = "no_read_is_wrong_whatever_is_killed_stopped_cut_or_full";

/// At least one fault in so many seconds.
const SECONDS_PER_FAULT_MAX: u64 = 6;
/// At least so many keys are written per second: 100,000 in ten minutes.
const KEYS_PER_SECOND_MIN: u64 = 170;

/// How long clients go on when all is healed, and after which part of it every get must be answered.
const CALM: Duration = Duration::from_secs(4);
const CALM_AFTER: Duration = Duration::from_secs(1);

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
    let shape = Shape::from_environment();
    if let Some(missing) = shape.missing() {
        panic!("this machine cannot run it: {missing}");
    }
    let seconds = std::env::var("MOONTIDE_CHAOS_SECONDS").map_or(60, |text| text.parse().expect("seconds"));
    let mut rng = Rng::seeded();
    let folder = Folder::new();
    let mut world = World::start(shape, folder.path(), rng.draw());
    let watch = Watch::start(&world::master_pages_at(shape));
    let (mut faults, begun) = (Faults::new(rng.fork()), Instant::now());
    while begun.elapsed() < Duration::from_secs(seconds) {
        faults.step(&mut world);
        world.tend();
        std::thread::sleep(Duration::from_millis(20));
    }
    faults.heal(&mut world);
    world.settle();
    let calm = journal::now() + CALM_AFTER.as_nanos() as u64;
    std::thread::sleep(CALM);
    world.end_clients();
    world.settle();
    let vacancies = watch.end();
    report::faults(&faults.done);

    let journals = journal::read_all(folder.path());
    let verdict = judge::judge(&journals, &faults.stops(), calm);
    verdict.print(&faults.done);
    let vacant = watch::judge(&vacancies, &faults.done);
    let left = world.remove_everything();
    println!("{} things are held at the end", left.len());
    world.print_restarts();
    let errors = world.log_errors();

    // All of it is said, whatever comes first.
    let mut failures = vec![];
    let mut check = |is_so: bool, what: String| {
        if !is_so {
            failures.push(what);
        }
    };
    let wrong = &verdict.wrong[..verdict.wrong.len().min(20)];
    check(wrong.is_empty(), format!("wrong reads: {wrong:#?}"));
    let (longest, deadline) = (verdict.longest_get, client::DEADLINE);
    check(
        longest <= deadline + client::LATE,
        format!("a get took {longest:?}, its deadline is {deadline:?}"),
    );
    check(verdict.unanswered.is_empty(), format!("after all was healed: {:#?}", verdict.unanswered));
    check(vacant.is_empty(), format!("masters were there: {vacant:#?}"));
    let some = &left[..left.len().min(40)];
    check(some.is_empty(), format!("held by somebody after everything was removed: {some:#?}"));
    check(errors.is_empty(), format!("somebody should have looked: {errors:#?}"));
    let (written, least) = (verdict.keys_written, seconds * KEYS_PER_SECOND_MIN);
    check(written >= least, format!("{written} keys were written, {least} are wanted"));
    let (happened, least) = (faults.done.len(), (seconds / SECONDS_PER_FAULT_MAX) as usize);
    check(happened >= least, format!("{happened} faults happened, {least} are wanted"));
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
