//! `moontide bench failover`: kills a master, restarts it immediately, and measures the time until readers and writers
//! continue and until the index is complete again.
//!
//! ```text
//!   master ── kill -9 ── restart, same directory, same addresses
//!     │                         │
//!     t = 0                     nodes reconnect and report ──▶ first hit ──▶ first put ──▶ 99 % ──▶ all
//! ```
//!
//! Times count from just before the signal. A hit is a get by a client without location cache and shared memory, which
//! must call the new master. Clients with a location cache or shared memory need no master for known objects; for them
//! the result is the longest time between two hits.
//!
//! | file | content |
//! |---|---|
//! | `cluster` | processes and clients; one kill |
//! | `callers` | threads that get and put objects meanwhile |

mod callers;
mod cluster;

use std::time::Duration;

use clap::Args as ClapArgs;
use moontide_rt::SplitMix64;

use crate::measure::{median, relative_range};
use crate::results::{BenchError, ResultRow, check_gates, io};
use crate::scratch::Scratch;
use cluster::FailoverCluster;

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench failover                                 one million objects, five kills: 2 GiB, half a minute
  moontide bench failover --objects 100000 --repeats 2    a few seconds
  moontide bench failover --nodes 4

Every result is one JSON object per line on standard output: one per kill, then a summary. Seconds count from the kill.
  serving_s      the new master serves
  sessions_s     all nodes have a session with the new master
  first_hit_s    first get of a client without location cache, which calls the master
  first_put_s    first successful put
  indexed_99_s   the new master has indexed 99 % of the objects
  indexed_all_s  the new master has indexed all objects
  gap_remote_s   longest time between two hits of a client with a location cache
  gap_local_s    longest time between two hits of a client with shared memory
  target, met    target for one million objects on two cores, for the slowest kill";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Number of stored objects
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1000..=100_000_000))]
    objects: u64,
    /// Bytes per object
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(16..=65536))]
    bytes: u64,
    /// Number of nodes
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    nodes: u16,
    /// Number of groups
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=4096))]
    groups: u16,
    /// Number of kills
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeats: u16,
    /// Setting of the master with the same name; 0 is safe here, because there are no one-sided readers
    #[arg(long, default_value_t = 0)]
    reallocation_delay_ms: u32,
    /// Seed of the requested keys
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Fail if a result misses its target by more than a factor of two
    #[arg(long)]
    gate: bool,
}

/// Timeout of each step of the benchmark.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);

/// Targets for one million objects.
const FIRST_HIT_S: f64 = 3.0;
const INDEXED_99_S: f64 = 5.0;

pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let scratch =
        Scratch::new(&std::env::temp_dir(), "moontide-failover").map_err(io("creating a directory"))?;
    let mut cluster = FailoverCluster::start(args, scratch.path())?;
    cluster.fill(args)?;
    let mut kills = Vec::with_capacity(args.repeats.into());
    for repeat in 0..args.repeats {
        eprintln!("kill {} of {} …", repeat + 1, args.repeats);
        let kill = cluster.kill_master(args, repeat)?;
        kill.print(args, repeat);
        kills.push(kill);
    }
    summary(args, &kills);
    if args.gate { check_gates() } else { Ok(()) }
}

/// Result of one kill, in seconds after it.
#[derive(Clone, Debug, Default)]
struct KillResult {
    serving: f64,
    sessions: f64,
    first_hit: f64,
    first_put: f64,
    indexed_99: f64,
    indexed_all: f64,
    gap_remote: f64,
    gap_local: f64,
    /// Share of all keys that exist at the end.
    found: f64,
}

impl KillResult {
    fn print(&self, args: &Args, repeat: u16) {
        ResultRow::new("failover", "master_kill")
            .with("objects", args.objects)
            .with("nodes", args.nodes)
            .with("repeat", repeat)
            .number("serving_s", self.serving)
            .number("sessions_s", self.sessions)
            .number("first_hit_s", self.first_hit)
            .number("first_put_s", self.first_put)
            .number("indexed_99_s", self.indexed_99)
            .number("indexed_all_s", self.indexed_all)
            .number("gap_remote_s", self.gap_remote)
            .number("gap_local_s", self.gap_local)
            .number("found_share", self.found)
            .print();
    }
}

fn summary(args: &Args, kills: &[KillResult]) {
    let of = |value: fn(&KillResult) -> f64| -> Vec<f64> { kills.iter().map(value).collect() };
    let cases: [(&str, Vec<f64>, Option<f64>); 4] = [
        ("first_hit", of(|kill| kill.first_hit), Some(FIRST_HIT_S)),
        ("first_put", of(|kill| kill.first_put), None),
        ("indexed_99", of(|kill| kill.indexed_99), Some(INDEXED_99_S)),
        ("indexed_all", of(|kill| kill.indexed_all), None),
    ];
    for (case, values, target) in cases {
        let worst = values.iter().copied().fold(0.0, f64::max);
        let line = ResultRow::new("failover", case)
            .with("objects", args.objects)
            .with("nodes", args.nodes)
            .with("kills", kills.len())
            .number("median_s", median(values.clone()))
            .number("range", relative_range(&values));
        match target {
            Some(target) => line.with_target("worst_s", worst, target, false),
            None => line.number("worst_s", worst),
        }
        .print();
    }
}

fn key(number: u64) -> String {
    format!("failover-{number:09}")
}

/// Returns the bytes of an object, derived from its number.
fn content(number: u64, len: u64) -> Vec<u8> {
    let mut rng = SplitMix64::new(number);
    let mut bytes = Vec::with_capacity(len as usize + 8);
    while (bytes.len() as u64) < len {
        bytes.extend_from_slice(&rng.next_u64().to_le_bytes());
    }
    bytes.truncate(len as usize);
    bytes
}
