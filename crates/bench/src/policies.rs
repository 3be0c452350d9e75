//! `moontide bench policies`: hit rates of eviction policies on a recorded trace.
//!
//! The row `moontide` is the shipped code: a group of `moontide-meta` with its records, queues and allocator, driven with
//! the calls and the time of the trace; only the node is missing. The other rows are plain implementations of published
//! policies, and Belady's algorithm, which knows the future.
//!
//! A cache holds a share of the trace's distinct blocks. A request hits its leading stored blocks up to the first missing
//! one: an engine cannot use the others. It then stores all blocks that are missing.

mod list;
mod mix;
mod node_disk;
mod reference;
mod shipped;

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;

use crate::plot::{self, Axis, PlotRow};
use crate::results::{BenchError, Progress, ResultRow, io};
use crate::trace::{Request, open, unread};
use mix::Mix;
use node_disk::DiskEviction;
use reference::{Arc, Belady, InclusiveLru, Lru, S3Fifo, WTinyLfu};
use shipped::Shipped;

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench policies conversation_trace.jsonl
  moontide bench policies agents.jsonl --capacity 1,5 --policies moontide,lru,belady
  moontide bench policies agents.jsonl --groups 16 --touch-delay 1s
  moontide bench policies *.jsonl.zst --plots plots
  moontide bench policies agents.jsonl --capacity 5 --disk 40
  moontide bench policies agents.jsonl --mix scan

One table per trace on standard output, or JSON lines with --json. A cell is the share of the requested blocks that were
hits. Columns are capacities in percent of the trace's distinct blocks.

  moontide    the code that a master runs
  lru         least recently used
  s3-fifo     three FIFO queues (Yang et al., 2023)
  arc         adaptive replacement cache (Megiddo and Modha, 2003)
  w-tinylfu   window, frequency sketch, segmented LRU (Einziger et al., 2017)
  belady      evicts what is used latest in the future: the limit

With --disk, the rows are moontide, lru (in both tiers; a block that is read from the disk is promoted, and stays there) and
belady (one tier as large as both). The columns, for each size of the memory:

  hits        share of the requested blocks that were hits
  memory      share of the requested blocks that were hits in memory
  disk        share of the requested blocks that were hits on the disk
  written     blocks written to the disk per hit
  promoted    blocks copied from the disk to memory per hit";

/// Policies in the order of the rows.
const POLICIES: [&str; 6] = ["moontide", "lru", "s3-fifo", "arc", "w-tinylfu", "belady"];

/// Policies of two tiers.
const POLICIES_OF_TIERS: [&str; 3] = ["moontide", "lru", "belady"];

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Traces of Moontide, Mooncake, Bailian or Dynamo, also compressed; see docs/trace.md for the formats
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Capacities in percent of the distinct blocks
    #[arg(long, value_delimiter = ',', default_value = "1,2,5,10,20,40")]
    capacity: Vec<f64>,
    /// Rows of the table
    #[arg(long, value_delimiter = ',', default_values = POLICIES, value_parser = POLICIES)]
    policies: Vec<String>,
    /// Groups of the row `moontide`; each evicts by itself
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4096))]
    groups: u16,
    /// Time until the master learns of a hit, as with reads of shared memory
    #[arg(long, value_name = "TIME", value_parser = moontide_settings::parse_duration, default_value = "0s")]
    touch_delay: std::time::Duration,
    /// Add a disk that holds this many percent of the distinct blocks, and print the hits of each tier
    #[arg(long, value_name = "PERCENT", conflicts_with_all = ["touch_delay", "plots"])]
    disk: Option<f64>,
    /// Order in which the disk of the row `moontide` evicts
    #[arg(long, value_enum, default_value_t = DiskEviction::Fifo, requires = "disk")]
    disk_eviction: DiskEviction,
    /// Add traffic in which a policy is easily wrong: half of the requested blocks are then of it
    #[arg(long, value_enum)]
    mix: Option<Mix>,
    /// Maximum number of requests of a trace
    #[arg(long)]
    requests: Option<usize>,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
    /// Write a plot of each trace into this directory, as SVG
    #[arg(long, value_name = "DIRECTORY")]
    plots: Option<PathBuf>,
}

/// A trace whose blocks are numbered from 0 in order of their first use.
#[derive(Clone)]
pub(crate) struct NumberedTrace {
    pub(crate) requests: Vec<NumberedRequest>,
    pub(crate) distinct: usize,
}

#[derive(Clone)]
pub(crate) struct NumberedRequest {
    pub(crate) at_us: u64,
    pub(crate) blocks: Vec<u32>,
}

impl NumberedTrace {
    pub(crate) fn new(requests: impl IntoIterator<Item = Request>) -> NumberedTrace {
        let mut numbers = std::collections::HashMap::new();
        let requests = requests
            .into_iter()
            .map(|request| {
                let mut number = |block| {
                    let next = numbers.len() as u32;
                    *numbers.entry(block).or_insert(next)
                };
                let blocks = request.blocks.into_iter().map(&mut number).collect();
                NumberedRequest { at_us: request.at_us, blocks }
            })
            .collect();
        NumberedTrace { requests, distinct: numbers.len() }
    }

    fn read(path: &Path, requests_max: usize) -> Result<NumberedTrace, BenchError> {
        let requests = open(path)?.take(requests_max).collect::<Result<Vec<Request>, _>>();
        let requests = requests.map_err(unread(path))?;
        Ok(NumberedTrace::new(requests))
    }

    /// Number of blocks of all requests.
    fn references(&self) -> usize {
        self.requests.iter().map(|request| request.blocks.len()).sum()
    }
}

/// Where a block is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tier {
    Memory,
    Disk,
}

/// Blocks that were copied between the tiers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TierCounts {
    /// From memory to the disk.
    pub(crate) written: u64,
    /// From the disk to memory.
    pub(crate) promoted: u64,
}

/// A cache of blocks.
pub(crate) trait Cache {
    /// Returns where a block is stored. A block in both tiers is read from memory.
    fn tier(&mut self, block: u32) -> Option<Tier>;

    /// Handles a request of which the first `hits` blocks were stored: they are used, the others are stored.
    fn request(&mut self, index: usize, request: &NumberedRequest, hits: usize) -> Result<(), BenchError>;

    fn counts(&self) -> TierCounts {
        TierCounts::default()
    }
}

/// Result of a replay, in blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Replayed {
    requested: u64,
    memory_hits: u64,
    disk_hits: u64,
    counts: TierCounts,
}

impl Replayed {
    /// Share of the requested blocks that were hits, in both tiers.
    pub(crate) fn hit_rate(&self) -> f64 {
        self.share(self.memory_hits + self.disk_hits)
    }

    fn share(&self, blocks: u64) -> f64 {
        blocks as f64 / self.requested.max(1) as f64
    }

    fn per_hit(&self, blocks: u64) -> f64 {
        blocks as f64 / (self.memory_hits + self.disk_hits).max(1) as f64
    }
}

/// Replays a trace.
pub(crate) fn replay(
    trace: &NumberedTrace,
    cache: &mut dyn Cache,
    progress: &mut Progress,
) -> Result<Replayed, BenchError> {
    let mut replayed = Replayed { requested: trace.references() as u64, ..Replayed::default() };
    for (index, request) in trace.requests.iter().enumerate() {
        let mut hits = 0;
        for tier in request.blocks.iter().map_while(|&block| cache.tier(block)) {
            hits += 1;
            match tier {
                Tier::Memory => replayed.memory_hits += 1,
                Tier::Disk => replayed.disk_hits += 1,
            }
        }
        cache.request(index, request, hits)?;
        progress.at(index as u64);
    }
    replayed.counts = cache.counts();
    Ok(replayed)
}

/// Sizes in blocks, and properties of the row `moontide`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheSpec {
    capacity: usize,
    disk: Option<usize>,
    disk_eviction: DiskEviction,
    groups: u16,
    touch_delay: std::time::Duration,
}

/// Creates a cache.
pub(crate) fn cache(policy: &str, trace: &NumberedTrace, spec: &CacheSpec) -> Box<dyn Cache> {
    let (distinct, capacity) = (trace.distinct, spec.capacity);
    match (policy, spec.disk) {
        ("moontide", _) => Box::new(Shipped::new(distinct, spec)),
        ("lru", None) => Box::new(Lru::new(distinct, capacity)),
        ("lru", Some(disk)) => Box::new(InclusiveLru::new(distinct, capacity, disk)),
        ("s3-fifo", _) => Box::new(S3Fifo::new(distinct, capacity)),
        ("arc", _) => Box::new(Arc::new(distinct, capacity)),
        ("w-tinylfu", _) => Box::new(WTinyLfu::new(distinct, capacity)),
        ("belady", disk) => Box::new(Belady::new(trace, capacity + disk.unwrap_or(0))),
        (other, _) => unreachable!("the parser accepts no policy {other}"),
    }
}

impl Args {
    fn spec(&self, trace: &NumberedTrace, memory_percent: f64) -> CacheSpec {
        let blocks = |percent: f64| ((trace.distinct as f64 * percent / 100.0) as usize).max(16);
        CacheSpec {
            capacity: blocks(memory_percent),
            disk: self.disk.map(blocks),
            disk_eviction: self.disk_eviction,
            groups: self.groups,
            touch_delay: self.touch_delay,
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    if let Some(wrong) = args.capacity.iter().chain(&args.disk).find(|share| !(0.01..=100.0).contains(*share))
    {
        return Err(BenchError::Wrong(format!(
            "--capacity and --disk must be 0.01 to 100 percent, not {wrong}"
        )));
    }
    let has_row = |policy: &String| args.disk.is_none() || POLICIES_OF_TIERS.contains(&policy.as_str());
    if !args.policies.iter().any(has_row) {
        return Err(BenchError::Wrong(format!(
            "with --disk, the policies are {}",
            POLICIES_OF_TIERS.join(", ")
        )));
    }
    for path in &args.files {
        let trace = NumberedTrace::read(path, args.requests.unwrap_or(usize::MAX))?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if !args.json {
            let (requests, blocks) = (trace.requests.len(), trace.references());
            println!("{name}: {requests} requests, {blocks} blocks, {} distinct", trace.distinct);
        }
        match args.disk {
            None => run_memory(args, &name, &trace)?,
            Some(disk) => run_tiers(args, disk, &name, &trace)?,
        }
    }
    Ok(())
}

/// Adds the other traffic, if there is any.
fn with_mix<'t>(args: &Args, trace: &'t NumberedTrace, spec: &CacheSpec) -> Cow<'t, NumberedTrace> {
    match args.mix {
        Some(mix) => Cow::Owned(mix.add_to(trace, spec.capacity)),
        None => Cow::Borrowed(trace),
    }
}

/// One tier: a row per policy, a column per capacity.
fn run_memory(args: &Args, name: &str, trace: &NumberedTrace) -> Result<(), BenchError> {
    if !args.json {
        let columns: String =
            args.capacity.iter().map(|share| format!("{:>7}", format!("{share}%"))).collect();
        println!("  {:<10}{columns}", "policy");
    }
    let mut rows = vec![];
    for policy in &args.policies {
        let (mut line, mut rates) = (String::new(), vec![]);
        for &share in &args.capacity {
            let spec = args.spec(trace, share);
            let trace = with_mix(args, trace, &spec);
            let rate = replay_with(policy, name, share, &trace, &spec)?.hit_rate();
            line += &format!("{rate:>7.3}");
            rates.push(rate);
            if args.json {
                result_row(args, policy, name, share, &spec).with("hit_rate", rate).print();
            }
        }
        if !args.json {
            println!("  {policy:<10}{line}");
        }
        rows.push(PlotRow { name: policy, is_subject: policy == "moontide", rates });
    }
    let Some(directory) = &args.plots else { return Ok(()) };
    let labels: Vec<_> = args.capacity.iter().map(|share| (*share, format!("{share} %"))).collect();
    let axis = Axis {
        title: "memory, as a share of the distinct blocks",
        values: &args.capacity,
        labels: &labels,
        is_logarithmic: true,
    };
    let name = args.mix.map_or(name.to_owned(), |mix| format!("{name}-{}", mix.name()));
    let title = format!("{name}: hit rates, {} requests of the trace", trace.requests.len());
    std::fs::create_dir_all(directory).map_err(io("creating the directory of the plots"))?;
    plot::write(&directory.join(format!("{name}.svg")), &plot::svg(&title, &axis, &rows))
}

/// Memory and a disk: a table per capacity of the memory.
fn run_tiers(args: &Args, disk: f64, name: &str, trace: &NumberedTrace) -> Result<(), BenchError> {
    let has_tiers = |policy: &&String| POLICIES_OF_TIERS.contains(&policy.as_str());
    for &share in &args.capacity {
        let spec = args.spec(trace, share);
        let trace = with_mix(args, trace, &spec);
        if !args.json {
            println!("  memory {share}%, disk {disk}%");
            println!(
                "  {:<10}{:>9}{:>9}{:>9}{:>9}{:>9}",
                "policy", "hits", "memory", "disk", "written", "promoted"
            );
        }
        for policy in args.policies.iter().filter(has_tiers) {
            let replayed = replay_with(policy, name, share, &trace, &spec)?;
            let (rate, counts) = (replayed.hit_rate(), replayed.counts);
            let memory = replayed.share(replayed.memory_hits);
            let on_disk = replayed.share(replayed.disk_hits);
            let (written, promoted) = (replayed.per_hit(counts.written), replayed.per_hit(counts.promoted));
            if args.json {
                let mut row = result_row(args, policy, name, share, &spec)
                    .with("disk_percent", disk)
                    .with("hit_rate", rate);
                if policy != "belady" {
                    row = row
                        .with("memory_hit_rate", memory)
                        .with("disk_hit_rate", on_disk)
                        .with("written_per_hit", written)
                        .with("promoted_per_hit", promoted);
                }
                row.print();
            } else if policy == "belady" {
                println!("  {policy:<10}{rate:>9.3}");
            } else {
                println!("  {policy:<10}{rate:>9.3}{memory:>9.3}{on_disk:>9.3}{written:>9.3}{promoted:>9.3}");
            }
        }
    }
    Ok(())
}

fn replay_with(
    policy: &str,
    name: &str,
    share: f64,
    trace: &NumberedTrace,
    spec: &CacheSpec,
) -> Result<Replayed, BenchError> {
    let mut progress = Progress::new(format!("{name}: {policy} at {share}%"), trace.requests.len() as u64);
    replay(trace, &mut *cache(policy, trace, spec), &mut progress)
}

fn result_row(args: &Args, policy: &str, name: &str, share: f64, spec: &CacheSpec) -> ResultRow {
    let row = ResultRow::new("policies", policy);
    let row = match args.mix {
        Some(mix) => row.with("mix", mix.name()),
        None => row,
    };
    let row = match spec.disk {
        Some(_) => row.with("disk_eviction", spec.disk_eviction.name()),
        None => row,
    };
    row.with("trace", name)
        .with("touch_delay_ms", spec.touch_delay.as_millis() as u64)
        .with("capacity_percent", share)
        .with("capacity_blocks", spec.capacity)
        .with("groups", spec.groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn spec(capacity: usize, disk: Option<usize>) -> CacheSpec {
        CacheSpec {
            capacity,
            disk,
            disk_eviction: DiskEviction::Fifo,
            groups: 1,
            touch_delay: Duration::ZERO,
        }
    }

    fn excerpt(name: &str) -> NumberedTrace {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces").join(name);
        NumberedTrace::read(&path, usize::MAX).expect("the excerpt is a trace")
    }

    fn rate(trace: &NumberedTrace, policy: &str, percent: usize) -> f64 {
        let capacity = trace.distinct * percent / 100;
        replayed(trace, policy, &spec(capacity, None)).hit_rate()
    }

    fn replayed(trace: &NumberedTrace, policy: &str, spec: &CacheSpec) -> Replayed {
        let mut progress = Progress::new("test", trace.requests.len() as u64);
        replay(trace, &mut *cache(policy, trace, spec), &mut progress).expect("no put fails")
    }

    #[test]
    fn shipped_policy_is_close_to_lru_on_recorded_traffic() {
        for name in ["mooncake_1000.jsonl", "agents_24.jsonl"] {
            let trace = excerpt(name);
            for percent in [10, 20, 40] {
                let [ours, lru, belady] =
                    ["moontide", "lru", "belady"].map(|policy| rate(&trace, policy, percent));
                eprintln!("{name} {percent} %: {ours:.3}, LRU {lru:.3}, Belady {belady:.3}");
                // LRU sees the blocks of a request from the last to the first, all at once. The master sees batches of puts.
                assert!(ours >= lru - 0.01, "{name} {percent} %: {ours} is below LRU, {lru}");
                assert!(ours <= belady + 1e-9, "{name} {percent} %: {ours} is above Belady, {belady}");
            }
        }
    }

    #[test]
    fn shipped_policy_is_better_than_lru_with_little_memory() {
        let trace = excerpt("mooncake_1000.jsonl");
        let gain = |percent| rate(&trace, "moontide", percent) - rate(&trace, "lru", percent);
        let gains = [2, 5, 10, 20].map(gain);
        eprintln!("gains over LRU: {gains:.3?}");
        assert!(gains.iter().sum::<f64>() > 0.03, "{gains:?}");
    }

    #[test]
    fn shipped_policy_is_close_to_lru_with_other_traffic() {
        let trace = excerpt("agents_24.jsonl");
        for mix in [Mix::Scan, Mix::Loop] {
            for percent in [10, 20, 40] {
                let capacity = trace.distinct * percent / 100;
                let mixed = mix.add_to(&trace, capacity);
                let [ours, lru] = ["moontide", "lru"]
                    .map(|policy| replayed(&mixed, policy, &spec(capacity, None)).hit_rate());
                eprintln!("{mix:?} {percent} %: {ours:.3}, LRU {lru:.3}");
                assert!(ours >= lru - 0.01, "{mix:?} {percent} %: {ours} is below LRU, {lru}");
            }
        }
    }

    #[test]
    fn shipped_policy_of_two_tiers_is_close_to_inclusive_lru() {
        for name in ["mooncake_1000.jsonl", "agents_24.jsonl"] {
            let trace = excerpt(name);
            let spec = spec(trace.distinct / 20, Some(trace.distinct * 2 / 5));
            let [ours, lru, belady] =
                ["moontide", "lru", "belady"].map(|policy| replayed(&trace, policy, &spec));
            eprintln!("{name}: {ours:?}, LRU {lru:?}, Belady {:.3}", belady.hit_rate());
            assert!(ours.hit_rate() >= lru.hit_rate() - 0.01, "{name}: {ours:?}, LRU {lru:?}");
            assert!(ours.hit_rate() <= belady.hit_rate() + 1e-9, "{name}: {ours:?}");
            let written = |replayed: &Replayed| replayed.per_hit(replayed.counts.written);
            assert!(written(&ours) <= written(&lru) * 1.1, "{name}: {ours:?}, LRU {lru:?}");
        }
    }

    #[test]
    fn shipped_policy_keeps_part_of_loop_larger_than_memory() {
        let blocks = |document: u32| (document * 8..document * 8 + 8).collect();
        let request =
            |index: u32| NumberedRequest { at_us: u64::from(index) * 1000, blocks: blocks(index % 150) };
        let trace = NumberedTrace { requests: (0..6000).map(request).collect(), distinct: 1200 };
        let [ours, lru, belady] = ["moontide", "lru", "belady"].map(|policy| rate(&trace, policy, 83));
        eprintln!("loop of 1.2 times the memory: {ours:.3}, LRU {lru:.3}, Belady {belady:.3}");
        assert!(lru == 0.0 && ours > 0.5, "{ours}, LRU {lru}");
    }

    #[test]
    fn infinite_cache_misses_each_block_once() {
        let trace = excerpt("mooncake_1000.jsonl");
        let ideal = 1.0 - trace.distinct as f64 / trace.references() as f64;
        for policy in POLICIES {
            let found = rate(&trace, policy, 110);
            assert!((found - ideal).abs() < 0.001, "{policy}: {found}, not {ideal}");
        }
    }
}
