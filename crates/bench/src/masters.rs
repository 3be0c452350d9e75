//! `moontide bench masters`: compares one master with three that share an etcd registry, and measures failover and
//! rebalancing when one of the three is killed and another one added.
//!
//! ```text
//!   etcd ──┬── one master ────── 2 nodes ─┐
//!          │                              ├── callers of this process, alternately
//!          └── three masters ─── 2 nodes ─┘
//!                 │
//!                 kill -9 of one ──▶ lease expires ──▶ first hit on its keys ──▶ all indexed ──▶ another is added ──▶ balanced
//! ```
//!
//! All processes share one host. With few cores, three masters are not faster than one; then the relevant result is the
//! CPU time of masters and callers per million keys.

mod cluster;
mod rebalance;

use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_client::{BlockingLink, PutItem, PutOptions, Store};
use moontide_rt::SplitMix64;
use moontide_types::{Key, Tenant};

use self::cluster::{Cluster, Etcd};
use self::rebalance::{AddResult, KillResult};
use crate::measure::{median, relative_range};
use crate::process::cpu_time;
use crate::results::{BenchError, ResultRow, io, wrong};
use crate::scratch::Scratch;

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench masters                                          100,000 objects, five kills: 90 seconds
  moontide bench masters --objects 2000 --seconds 0.2 --repeats 1   about 15 seconds
  MOONTIDE_ETCD=/opt/etcd/etcd moontide bench masters             with an etcd outside of PATH

Every result is one JSON object per line on standard output. `one_` and `three_` are results of one master and of three,
measured alternately; ratio and range compare consecutive measurements.
  exist_100, lookup_100   batches of 100 keys: existence, locations
  lives_100               batches of 100 objects of 256 bytes: put, get, remove; a key counts once
  *_cpu_s_per_million     CPU seconds per million keys, of all masters, and of this process, which calls them
  kill                    one of three masters is killed; times count from the signal, *_leases in registry leases
    first_hit_s             first get of one of its keys, by a client without location cache
    all_known_s             the other masters have indexed all its keys
    found_share             share of its keys that exist then
    others_gap_s            longest time between two hits on keys of the other two masters
  add                     another master starts; times count from its start
    moving_s                from the first moved group to the last
    balanced_s              the masters' numbers of groups differ by at most one
    handoff_objects         objects that were handed off with their groups
    failed, first_failure   keys whose call failed, and the error of the first such call
    hit_share               share of the requested keys that were found, from the start until a lease after the last move
    longest_call_s          duration of the slowest of these calls";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Number of objects in each of the two clusters
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1000..=10_000_000))]
    objects: u64,
    /// Number of groups of each cluster
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(3..=4096))]
    groups: u16,
    /// Duration of one measurement in seconds
    #[arg(long, default_value_t = 1.0, value_parser = span)]
    seconds: f64,
    /// Repeats of each measurement, and of killing and adding a master
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeats: u16,
    /// Number of calling threads, each a separate client
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    callers: u16,
    /// Setting of the masters with the same name; etcd leases last at least 2 s
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1000..=60_000))]
    registry_lease_ms: u32,
    /// Seed of the requested keys
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Args {
    fn lease(&self) -> Duration {
        Duration::from_millis(self.registry_lease_ms.into())
    }
}

fn span(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.05..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("not a number of seconds from 0.05 to 3600".into()),
    }
}

/// Number of masters of the larger cluster.
const MANY: usize = 3;
/// Keys per batch.
const BATCH: usize = 100;
/// Bytes of an object.
const OBJECT_BYTES: usize = 256;
/// Timeout of a call during failover. Short, because callers retry.
const CALL_TIMEOUT: Duration = Duration::from_millis(500);
/// Timeout of a call otherwise.
const RELAXED_TIMEOUT: Duration = Duration::from_secs(20);

pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let scratch =
        Scratch::new(&std::env::temp_dir(), "moontide-masters").map_err(io("creating a directory"))?;
    let etcd = Etcd::start(scratch.path())?;
    let one = Cluster::start(args, &etcd, scratch.path(), "one", 1)?;
    let mut many = Cluster::start(args, &etcd, scratch.path(), "many", MANY)?;
    one.fill(args)?;
    many.fill(args)?;
    compare(args, &one, &many)?;
    drop(one);
    let (mut kills, mut adds) = (vec![], vec![]);
    for repeat in 0..args.repeats {
        eprintln!("kill {} of {} …", repeat + 1, args.repeats);
        let kill = many.kill_one(args, repeat)?;
        kill.line(args, "kill").with("repeat", repeat).print();
        kills.push(kill);
        eprintln!("another master …");
        let add = many.add_one(args, repeat)?;
        add.line(args, "add").with("repeat", repeat).print();
        adds.push(add);
    }
    summary(args, &kills, &adds);
    Ok(())
}

fn summary(args: &Args, kills: &[KillResult], adds: &[AddResult]) {
    let of_kills = |value: fn(&KillResult) -> f64| -> Vec<f64> { kills.iter().map(value).collect() };
    let of_adds = |value: fn(&AddResult) -> f64| -> Vec<f64> { adds.iter().map(value).collect() };
    let lease = args.lease().as_secs_f64();
    for (case, values) in [
        ("kill_first_hit", of_kills(|kill| kill.first_hit)),
        ("kill_all_known", of_kills(|kill| kill.all_known)),
        ("kill_others_gap", of_kills(|kill| kill.others_gap)),
        ("add_balanced", of_adds(|add| add.balanced)),
        ("add_moving", of_adds(|add| add.moving)),
        ("add_longest_call", of_adds(|add| add.longest_call)),
    ] {
        let worst = values.iter().copied().fold(0.0, f64::max);
        ResultRow::new("masters", case)
            .with("objects", args.objects)
            .with("registry_lease_ms", args.registry_lease_ms)
            .with("repeats", values.len())
            .number("median_s", median(values.clone()))
            .number("median_leases", median(values.clone()) / lease)
            .number("range", relative_range(&values))
            .number("worst_s", worst)
            .number("worst_leases", worst / lease)
            .print();
    }
    let least = |shares: Vec<f64>| shares.into_iter().fold(1.0, f64::min);
    ResultRow::new("masters", "shares")
        .with("objects", args.objects)
        .with("repeats", kills.len())
        .with("kill_found_share_least", least(of_kills(|kill| kill.found)))
        .with("add_hit_share_least", least(of_adds(|add| add.hit_share())))
        .print();
}

// -------------------------------------------------------------------------------------------------------- comparison

/// Operation that a caller repeats.
#[derive(Clone, Copy, Debug)]
enum Case {
    Exist,
    Lookup,
    Lives,
}

impl Case {
    fn name(self) -> &'static str {
        match self {
            Case::Exist => "exist_100",
            Case::Lookup => "lookup_100",
            Case::Lives => "lives_100",
        }
    }
}

/// Result of one measurement.
#[derive(Clone, Copy, Debug)]
struct Span {
    keys_per_s: f64,
    masters_cpu_s_per_million: f64,
    callers_cpu_s_per_million: f64,
}

fn compare(args: &Args, one: &Cluster, many: &Cluster) -> Result<(), BenchError> {
    for case in [Case::Exist, Case::Lookup, Case::Lives] {
        eprintln!("{}, one master and {MANY} …", case.name());
        let clusters = [one, many];
        let mut callers = [callers(one, args)?, callers(many, args)?];
        let mut spans: [Vec<Span>; 2] = [vec![], vec![]];
        for repeat in 0..usize::from(args.repeats) {
            // Alternating order, so that a host that becomes slower does not favour one side.
            for turn in 0..2 {
                let which = (turn + repeat) % 2;
                spans[which].push(measure(args, case, clusters[which], &mut callers[which])?);
            }
        }
        let of =
            |which: usize, value: fn(&Span) -> f64| -> Vec<f64> { spans[which].iter().map(value).collect() };
        let middle = |which, value| median(of(which, value));
        let ratios: Vec<f64> = of(1, |s| s.keys_per_s)
            .iter()
            .zip(of(0, |s| s.keys_per_s))
            .map(|(many, one)| many / one)
            .collect();
        ResultRow::new("masters", case.name())
            .with("objects", args.objects)
            .with("callers", args.callers)
            .number("one_keys_per_s", middle(0, |s| s.keys_per_s))
            .number("three_keys_per_s", middle(1, |s| s.keys_per_s))
            .number("ratio", median(ratios.clone()))
            .number("range", relative_range(&ratios))
            .number("one_masters_cpu_s_per_million", middle(0, |s| s.masters_cpu_s_per_million))
            .number("three_masters_cpu_s_per_million", middle(1, |s| s.masters_cpu_s_per_million))
            .number("one_callers_cpu_s_per_million", middle(0, |s| s.callers_cpu_s_per_million))
            .number("three_callers_cpu_s_per_million", middle(1, |s| s.callers_cpu_s_per_million))
            .print();
    }
    Ok(())
}

/// Runs all callers for `args.seconds`.
fn measure(args: &Args, case: Case, cluster: &Cluster, callers: &mut [Caller]) -> Result<Span, BenchError> {
    let before = (cluster.masters_cpu()?, cpu_time(std::process::id())?);
    let started = Instant::now();
    let done: Result<Vec<u64>, BenchError> = std::thread::scope(|scope| {
        let work = |caller: &mut Caller| {
            let mut keys = 0;
            while started.elapsed().as_secs_f64() < args.seconds {
                keys += caller.turn(case, args.objects)?;
            }
            Ok(keys)
        };
        let handles: Vec<_> = callers.iter_mut().map(|caller| scope.spawn(move || work(caller))).collect();
        handles.into_iter().map(|handle| handle.join().expect("callers do not panic")).collect()
    });
    let keys = done?.iter().sum::<u64>().max(1) as f64;
    let seconds = started.elapsed().as_secs_f64();
    let spent = |now: Duration, then: Duration| now.saturating_sub(then).as_secs_f64() / keys * 1e6;
    Ok(Span {
        keys_per_s: keys / seconds,
        masters_cpu_s_per_million: spent(cluster.masters_cpu()?, before.0),
        callers_cpu_s_per_million: spent(cpu_time(std::process::id())?, before.1),
    })
}

/// Creates `args.callers` callers.
fn callers(cluster: &Cluster, args: &Args) -> Result<Vec<Caller>, BenchError> {
    let hosts = cluster.hosts(args.objects)?;
    (0..u64::from(args.callers))
        .map(|number| {
            Ok(Caller {
                number,
                store: cluster.store(RELAXED_TIMEOUT)?,
                links: cluster.links()?,
                hosts: hosts.clone(),
                rng: SplitMix64::new(args.seed + number),
                turns: 0,
            })
        })
        .collect()
}

/// State of a calling thread: a separate client, like an inference engine.
struct Caller {
    number: u64,
    store: Store,
    /// Link to each master, for lookups without data transfer.
    links: Vec<BlockingLink>,
    /// Index of the master of each key, by the key's number.
    hosts: Vec<u8>,
    rng: SplitMix64,
    turns: u64,
}

impl Caller {
    /// Runs one batch; returns the number of keys.
    fn turn(&mut self, case: Case, objects: u64) -> Result<u64, BenchError> {
        self.turns += 1;
        match case {
            Case::Exist => {
                let keys: Vec<String> = self.draw(objects).into_iter().map(key).collect();
                let exist = self.store.exists_batch(&bytes_of(&keys)).into_iter();
                let found = exist.map(|exists| exists.map(usize::from)).sum::<Result<usize, _>>();
                all_found(found.map_err(wrong)?)
            }
            Case::Lookup => {
                let mut parts: Vec<Vec<String>> = vec![vec![]; self.links.len()];
                for number in self.draw(objects) {
                    parts[usize::from(self.hosts[number as usize])].push(key(number));
                }
                let mut found = 0;
                for (link, part) in self.links.iter().zip(parts).filter(|(_, part)| !part.is_empty()) {
                    let reply = link.lookup(Tenant::DEFAULT, &keys_of(&part), 0, false).map_err(wrong)?;
                    let replicas = reply.replicas().map_err(wrong)?;
                    found += replicas.list.iter().filter(|(object, _)| object.code.is_none()).count();
                }
                all_found(found)
            }
            Case::Lives => {
                let name = |at| format!("lives-{}-{}-{at}", self.number, self.turns);
                let keys: Vec<String> = (0..BATCH).map(name).collect();
                let keys = bytes_of(&keys);
                let content = content(self.turns);
                let parts = [&content[..]];
                let items: Vec<PutItem<'_>> = keys.iter().map(|key| PutItem { key, parts: &parts }).collect();
                for outcome in self.store.put_batch(&items, &PutOptions::default()) {
                    outcome.map_err(wrong)?;
                }
                let mut found = 0;
                for outcome in self.store.get_batch(&keys) {
                    found +=
                        usize::from(outcome.map_err(wrong)?.is_some_and(|bytes| bytes[..] == content[..]));
                }
                for outcome in self.store.remove_batch(&keys, true) {
                    outcome.map_err(wrong)?;
                }
                all_found(found)
            }
        }
    }

    fn draw(&mut self, objects: u64) -> Vec<u64> {
        (0..BATCH).map(|_| self.rng.index(objects as usize) as u64).collect()
    }
}

fn all_found(found: usize) -> Result<u64, BenchError> {
    if found == BATCH { Ok(found as u64) } else { Err(wrong(format!("found only {found} of {BATCH} keys"))) }
}

fn key(number: u64) -> String {
    format!("masters-{number:09}")
}

fn bytes_of(keys: &[String]) -> Vec<&[u8]> {
    keys.iter().map(String::as_bytes).collect()
}

fn keys_of(keys: &[String]) -> Vec<Key<'_>> {
    keys.iter().map(|key| Key::new(key.as_bytes()).expect("a short key")).collect()
}

/// Returns the bytes of an object, derived from its number.
fn content(number: u64) -> Vec<u8> {
    let mut rng = SplitMix64::new(number);
    (0..OBJECT_BYTES / 8).flat_map(|_| rng.next_u64().to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn span_rejects_zero_and_non_numbers() {
        for (text, is_ok) in [("0.2", true), ("1", true), ("0", false), ("soon", false), ("NaN", false)] {
            assert_eq!(span(text).is_ok(), is_ok, "{text}");
        }
    }
}
