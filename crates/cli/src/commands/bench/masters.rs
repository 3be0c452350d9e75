//! `moontide bench masters`: one master beside three that meet at an etcd, and what happens when one of three is killed and
//! when another one is added.
//!
//! ```text
//!   etcd ──┬── one master ────── 2 nodes ─┐
//!          │                              ├── callers of this process, in turns
//!          └── three masters ─── 2 nodes ─┘
//!                 │
//!                 kill -9 of one ──▶ its lease ends ──▶ first hit on its keys ──▶ all known ──▶ another one is added ──▶ spread
//! ```
//!
//! All processes share one host. Where it has few cores, three masters cannot answer more than one: there the figure to look
//! at is the processor time that masters and callers take per million keys.

mod cluster;
mod moves;

use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_client::{BlockingLink, PutItem, PutOptions, Store};
use moontide_meta::Rng;
use moontide_types::{Key, Tenant};

use self::cluster::{Cluster, Etcd};
use self::moves::{Add, Kill};
use super::figures::{BenchError, Line, cpu_time, io, median, spread};
use super::transfer::wrong;
use crate::scratch::Scratch;

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench masters                                          100,000 objects, five kills: a minute and a half
  moontide bench masters --objects 2000 --seconds 0.2 --repeats 1   the same in some 15 seconds
  MOONTIDE_ETCD=/opt/etcd/etcd moontide bench masters             with an etcd that is not in the path

Every result is one JSON object per line on standard output. `one_` and `three_` are figures of one master and of three,
measured in turns; ratio and spread are of neighbours in time.
  exist_100, lookup_100   batches of 100 keys: are they there, and where
  lives_100               batches of 100 objects of 256 bytes: put, got, removed; a key counts once
  *_cpu_s_per_million     processor seconds per million keys, of all masters, and of this process, which calls them
  kill                    one of three is killed; times count from the signal, and in leases where that is said
    first_hit_s             the first get of one of its keys, by a caller who remembers nothing
    all_known_s             the others know all its keys
    found_share             keys of it that were found then, of all it had
    others_gap_s            longest time between two hits on keys of the other two
  add                     another master starts; times count from its start
    moving_s                from the first group that moved to the last
    spread_s                no master has two groups more than another
    inherited_objects       objects that were handed over with their groups
    failed, first_failure   keys whose call failed, and what the first of these calls said
    hit_share               keys that were found, of all that were asked for from its start until a lease after the last move
    longest_call_s          the slowest of these calls";

/// How it is measured.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Objects in each of the two clusters.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1000..=10_000_000))]
    objects: u64,
    /// Groups of each cluster.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(3..=4096))]
    groups: u16,
    /// How long one rate is measured, in seconds.
    #[arg(long, default_value_t = 1.0, value_parser = span)]
    seconds: f64,
    /// How often each is measured, and how often a master is killed and another one added.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeats: u16,
    /// Threads that call, each as a client of its own.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    callers: u16,
    /// The masters' setting of the same name. Etcd makes leases of two seconds at least.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1000..=60_000))]
    lease_ms: u32,
    /// Decides which keys are asked for.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Args {
    fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms.into())
    }
}

fn span(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.05..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("it takes seconds from 0.05 to 3600".into()),
    }
}

/// Masters of the larger cluster.
const MANY: usize = 3;
/// Keys of one batch.
const BATCH: usize = 100;
/// Bytes of an object.
const OBJECT_BYTES: usize = 256;
/// What a single call may take while masters come and go. Short: a caller that gives up asks again.
const CALL: Duration = Duration::from_millis(500);
/// The same where nothing is wrong.
const PATIENT: Duration = Duration::from_secs(20);

pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let scratch =
        Scratch::new(&std::env::temp_dir(), "moontide-masters").map_err(io("making a directory"))?;
    let etcd = Etcd::start(scratch.path())?;
    let one = Cluster::start(args, &etcd, scratch.path(), "one", 1)?;
    let mut many = Cluster::start(args, &etcd, scratch.path(), "many", MANY)?;
    one.fill(args)?;
    many.fill(args)?;
    side_by_side(args, &one, &many)?;
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

fn summary(args: &Args, kills: &[Kill], adds: &[Add]) {
    let of_kills = |figure: fn(&Kill) -> f64| -> Vec<f64> { kills.iter().map(figure).collect() };
    let of_adds = |figure: fn(&Add) -> f64| -> Vec<f64> { adds.iter().map(figure).collect() };
    let lease = args.lease().as_secs_f64();
    for (case, figures) in [
        ("kill_first_hit", of_kills(|kill| kill.first_hit)),
        ("kill_all_known", of_kills(|kill| kill.all_known)),
        ("kill_others_gap", of_kills(|kill| kill.others_gap)),
        ("add_spread", of_adds(|add| add.spread)),
        ("add_moving", of_adds(|add| add.moving)),
        ("add_longest_call", of_adds(|add| add.longest_call)),
    ] {
        let worst = figures.iter().copied().fold(0.0, f64::max);
        Line::new("masters", case)
            .with("objects", args.objects)
            .with("lease_ms", args.lease_ms)
            .with("repeats", figures.len())
            .number("median_s", median(figures.clone()))
            .number("median_leases", median(figures.clone()) / lease)
            .number("spread", spread(&figures))
            .number("worst_s", worst)
            .number("worst_leases", worst / lease)
            .print();
    }
    let least = |shares: Vec<f64>| shares.into_iter().fold(1.0, f64::min);
    Line::new("masters", "shares")
        .with("objects", args.objects)
        .with("repeats", kills.len())
        .with("kill_found_share_least", least(of_kills(|kill| kill.found)))
        .with("add_hit_share_least", least(of_adds(|add| add.hit_share())))
        .print();
}

// ------------------------------------------------------------------------------------------------------ side by side

/// What a caller does again and again.
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

/// What one span gave.
#[derive(Clone, Copy, Debug)]
struct Span {
    keys_per_s: f64,
    masters_cpu_s_per_million: f64,
    callers_cpu_s_per_million: f64,
}

fn side_by_side(args: &Args, one: &Cluster, many: &Cluster) -> Result<(), BenchError> {
    for case in [Case::Exist, Case::Lookup, Case::Lives] {
        eprintln!("{}, one master and {MANY} …", case.name());
        let clusters = [one, many];
        let mut callers = [callers(one, args)?, callers(many, args)?];
        let mut spans: [Vec<Span>; 2] = [vec![], vec![]];
        for repeat in 0..usize::from(args.repeats) {
            // Each time in another order: a machine that becomes slower must not speak for one side.
            for turn in 0..2 {
                let which = (turn + repeat) % 2;
                spans[which].push(measure(args, case, clusters[which], &mut callers[which])?);
            }
        }
        let of = |which: usize, figure: fn(&Span) -> f64| -> Vec<f64> {
            spans[which].iter().map(figure).collect()
        };
        let middle = |which, figure| median(of(which, figure));
        let ratios: Vec<f64> = of(1, |s| s.keys_per_s)
            .iter()
            .zip(of(0, |s| s.keys_per_s))
            .map(|(many, one)| many / one)
            .collect();
        Line::new("masters", case.name())
            .with("objects", args.objects)
            .with("callers", args.callers)
            .number("one_keys_per_s", middle(0, |s| s.keys_per_s))
            .number("three_keys_per_s", middle(1, |s| s.keys_per_s))
            .number("ratio", median(ratios.clone()))
            .number("spread", spread(&ratios))
            .number("one_masters_cpu_s_per_million", middle(0, |s| s.masters_cpu_s_per_million))
            .number("three_masters_cpu_s_per_million", middle(1, |s| s.masters_cpu_s_per_million))
            .number("one_callers_cpu_s_per_million", middle(0, |s| s.callers_cpu_s_per_million))
            .number("three_callers_cpu_s_per_million", middle(1, |s| s.callers_cpu_s_per_million))
            .print();
    }
    Ok(())
}

/// Lets all callers call for a while.
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
        handles.into_iter().map(|handle| handle.join().expect("a caller ends")).collect()
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

/// As many as are asked for.
fn callers(cluster: &Cluster, args: &Args) -> Result<Vec<Caller>, BenchError> {
    let hosts = cluster.hosts(args.objects)?;
    (0..u64::from(args.callers))
        .map(|number| {
            Ok(Caller {
                number,
                store: cluster.store(PATIENT)?,
                links: cluster.links()?,
                hosts: hosts.clone(),
                rng: Rng::new(args.seed + number),
                turns: 0,
            })
        })
        .collect()
}

/// A thread that calls. A client of its own, as an engine would be.
struct Caller {
    number: u64,
    store: Store,
    /// One to each master, for look-ups without the bytes.
    links: Vec<BlockingLink>,
    /// Which of them knows a key; by the key's number.
    hosts: Vec<u8>,
    rng: Rng,
    turns: u64,
}

impl Caller {
    /// One batch; says how many keys it was.
    fn turn(&mut self, case: Case, objects: u64) -> Result<u64, BenchError> {
        self.turns += 1;
        match case {
            Case::Exist => {
                let keys: Vec<String> = self.draw(objects).into_iter().map(key).collect();
                let there = self.store.exists_batch(&bytes_of(&keys)).map_err(wrong)?;
                all_there(there.iter().filter(|there| **there).count())
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
                all_there(found)
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
                all_there(found)
            }
        }
    }

    fn draw(&mut self, objects: u64) -> Vec<u64> {
        (0..BATCH).map(|_| self.rng.below(objects as usize) as u64).collect()
    }
}

fn all_there(found: usize) -> Result<u64, BenchError> {
    if found == BATCH { Ok(found as u64) } else { Err(wrong(format!("{found} of {BATCH} keys were found"))) }
}

fn key(number: u64) -> String {
    format!("masters-{number:09}")
}

fn bytes_of(keys: &[String]) -> Vec<&[u8]> {
    keys.iter().map(String::as_bytes).collect()
}

fn keys_of(keys: &[String]) -> Vec<Key<'_>> {
    keys.iter().map(|key| Key::new(key.as_bytes()).expect("it is short")).collect()
}

/// An object's bytes follow from its number.
fn content(number: u64) -> Vec<u8> {
    let mut rng = Rng::new(number);
    (0..OBJECT_BYTES / 8).flat_map(|_| rng.next_u64().to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_has_a_length() {
        for (text, is_ok) in [("0.2", true), ("1", true), ("0", false), ("soon", false), ("NaN", false)] {
            assert_eq!(span(text).is_ok(), is_ok, "{text}");
        }
    }
}
