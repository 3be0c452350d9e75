//! `moontide bench policies`: hit rates of eviction policies on a recorded trace.
//!
//! The row `moontide` is the shipped code: a group of `moontide-meta` with its records, queues and allocator, driven with
//! the calls and the time of the trace; only the node is missing. The other rows are plain implementations of published
//! policies, and Belady's algorithm, which knows the future.
//!
//! A cache holds a share of the trace's distinct blocks. A request hits its leading stored blocks up to the first missing
//! one: an engine cannot use the others. It then stores all blocks that are missing.

mod list;
mod reference;
mod shipped;

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;

use crate::plot::{self, Axis, PlotRow};
use crate::results::{BenchError, Progress, ResultRow, io};
use crate::trace::{Request, open, unread};
use reference::{Arc, Belady, Lru, S3Fifo, WTinyLfu};
use shipped::Shipped;

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench policies conversation_trace.jsonl
  moontide bench policies agents.jsonl --capacity 1,5 --policies moontide,lru,belady
  moontide bench policies agents.jsonl --groups 16 --touch-delay 1s
  moontide bench policies *.jsonl.zst --plots plots

One table per trace on standard output, or JSON lines with --json. A cell is the share of the requested blocks that were
hits. Columns are capacities in percent of the trace's distinct blocks.

  moontide    the code that a master runs
  lru         least recently used
  s3-fifo     three FIFO queues (Yang et al., 2023)
  arc         adaptive replacement cache (Megiddo and Modha, 2003)
  w-tinylfu   window, frequency sketch, segmented LRU (Einziger et al., 2017)
  belady      evicts what is used latest in the future: the limit";

/// Policies in the order of the rows.
const POLICIES: [&str; 6] = ["moontide", "lru", "s3-fifo", "arc", "w-tinylfu", "belady"];

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
pub(crate) struct NumberedTrace {
    pub(crate) requests: Vec<NumberedRequest>,
    pub(crate) distinct: usize,
}

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

/// A cache of blocks.
pub(crate) trait Cache {
    /// Returns whether a block is stored.
    fn contains(&mut self, block: u32) -> bool;

    /// Handles a request of which the first `hits` blocks were stored: they are used, the others are stored.
    fn request(&mut self, index: usize, request: &NumberedRequest, hits: usize) -> Result<(), BenchError>;
}

/// Returns the share of the blocks of all requests that were hits.
pub(crate) fn hit_rate(
    trace: &NumberedTrace,
    cache: &mut dyn Cache,
    progress: &mut Progress,
) -> Result<f64, BenchError> {
    let mut hits = 0;
    for (index, request) in trace.requests.iter().enumerate() {
        let leading = request.blocks.iter().take_while(|&&block| cache.contains(block)).count();
        hits += leading;
        cache.request(index, request, leading)?;
        progress.at(index as u64);
    }
    Ok(hits as f64 / trace.references().max(1) as f64)
}

/// Creates a cache of `capacity` blocks.
pub(crate) fn cache(
    policy: &str,
    trace: &NumberedTrace,
    capacity: usize,
    groups: u16,
    touch_delay: std::time::Duration,
) -> Box<dyn Cache> {
    match policy {
        "moontide" => Box::new(Shipped::new(trace.distinct, capacity, groups, touch_delay)),
        "lru" => Box::new(Lru::new(trace.distinct, capacity)),
        "s3-fifo" => Box::new(S3Fifo::new(trace.distinct, capacity)),
        "arc" => Box::new(Arc::new(trace.distinct, capacity)),
        "w-tinylfu" => Box::new(WTinyLfu::new(trace.distinct, capacity)),
        "belady" => Box::new(Belady::new(trace, capacity)),
        other => unreachable!("the parser accepts no policy {other}"),
    }
}

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    if let Some(wrong) = args.capacity.iter().find(|share| !(0.01..=100.0).contains(*share)) {
        return Err(BenchError::Wrong(format!("--capacity must be 0.01 to 100 percent, not {wrong}")));
    }
    for path in &args.files {
        let trace = NumberedTrace::read(path, args.requests.unwrap_or(usize::MAX))?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let (requests, blocks) = (trace.requests.len(), trace.references());
        if !args.json {
            println!("{name}: {requests} requests, {blocks} blocks, {} distinct", trace.distinct);
            let columns: String =
                args.capacity.iter().map(|share| format!("{:>7}", format!("{share}%"))).collect();
            println!("  {:<10}{columns}", "policy");
        }
        let mut rows = vec![];
        for policy in &args.policies {
            let (mut line, mut rates) = (String::new(), vec![]);
            for &share in &args.capacity {
                let capacity = ((trace.distinct as f64 * share / 100.0) as usize).max(16);
                let mut cache = cache(policy, &trace, capacity, args.groups, args.touch_delay);
                let mut progress = Progress::new(format!("{name}: {policy} at {share}%"), requests as u64);
                let rate = hit_rate(&trace, &mut *cache, &mut progress)?;
                line += &format!("{rate:>7.3}");
                rates.push(rate);
                if args.json {
                    ResultRow::new("policies", policy)
                        .with("trace", name.as_str())
                        .with("capacity_percent", share)
                        .with("capacity_blocks", capacity)
                        .with("groups", args.groups)
                        .with("hit_rate", rate)
                        .print();
                }
            }
            if !args.json {
                println!("  {policy:<10}{line}");
            }
            rows.push(PlotRow { name: policy, is_subject: policy == "moontide", rates });
        }
        if let Some(directory) = &args.plots {
            let labels: Vec<_> = args.capacity.iter().map(|share| (*share, format!("{share} %"))).collect();
            let axis = Axis {
                title: "memory, as a share of the distinct blocks",
                values: &args.capacity,
                labels: &labels,
                is_logarithmic: true,
            };
            let title = format!("{name}: hit rates of {requests} requests");
            std::fs::create_dir_all(directory).map_err(io("creating the directory of the plots"))?;
            plot::write(&directory.join(format!("{name}.svg")), &plot::svg(&title, &axis, &rows))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn excerpt(name: &str) -> NumberedTrace {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces").join(name);
        NumberedTrace::read(&path, usize::MAX).expect("the excerpt is a trace")
    }

    fn rate(trace: &NumberedTrace, policy: &str, percent: usize) -> f64 {
        let capacity = trace.distinct * percent / 100;
        let mut cache = cache(policy, trace, capacity, 1, Duration::ZERO);
        let mut progress = Progress::new("test", trace.requests.len() as u64);
        hit_rate(trace, &mut *cache, &mut progress).expect("no put fails")
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
