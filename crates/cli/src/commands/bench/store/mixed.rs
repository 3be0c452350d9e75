//! `moontide bench mixed`: many callers who read and write, as many as can be served, or more than that.
//!
//! A read that finds nothing is followed by a put, as an engine would. With `--overload` requests arrive whether or not
//! earlier ones have been answered (open loop): first the peak is measured with callers who wait, then so many times as
//! many requests come, then callers who wait again, to see how soon all is as before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Args as ClapArgs;
use moontide_client::{AsyncStore, PutOptions, StoreConfig};
use moontide_meta::Rng;
use parking_lot::Mutex;

use super::super::figures::{BenchError, Line, Percentiles, resident_bytes};
use super::super::transfer::{seconds, size, wrong};
use super::cluster::{BenchCluster, Size};
use super::noise;
use super::turns::percentiles;

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench mixed                            16 callers, 256 KiB objects, 10 seconds
  moontide bench mixed --bytes 64K --callers 64 --seconds 30
  moontide bench mixed --overload 10 --seconds 60   ten times as many requests as can be served
  moontide bench mixed --master 10.0.0.7:7400     in a cluster that is there

Progress goes to standard error every second, results as JSON lines to standard output:
  closed            callers who wait: requests per second, hit rate, latency
  overload          goodput is answers within --deadline-ms; `share` is goodput over the peak; refused are those that
                    were told at once to go on without; memory is the largest resident set of the client process
  recovered         how long after the overload callers who wait got nine tenths of the peak again";

/// How it is measured.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Callers who wait for their answers.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=4096))]
    callers: u16,
    /// Length of an object, in bytes or with K or M behind it.
    #[arg(long, default_value = "256K", value_parser = size)]
    bytes: u64,
    /// Different objects; those asked for most often are asked for much more often than others.
    #[arg(long, default_value_t = 4000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    objects: u32,
    /// How long.
    #[arg(long, default_value = "10", value_parser = long_seconds)]
    seconds: f64,
    /// So many times the peak arrive, whether or not they can be served.
    #[arg(long, value_name = "TIMES", value_parser = seconds)]
    overload: Option<f64>,
    /// How long an answer may take.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    deadline_ms: u32,
    /// Read memory of this host in place, too; otherwise everything goes over TCP.
    #[arg(long)]
    local: bool,
    /// Use a cluster that is there, by its master's gRPC address, instead of starting one.
    #[arg(long, value_name = "HOST:PORT")]
    master: Option<String>,
    /// Decides which objects are asked for.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Fail if goodput falls below half of what is aimed at.
    #[arg(long)]
    gate: bool,
}

fn long_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("seconds from 0.1 to 86400".into()),
    }
}

/// Goodput under overload, over the peak.
const SHARE_TARGET: f64 = 0.8;
/// How soon all must be as before.
const RECOVERY_TARGET_S: f64 = 5.0;
/// How long the peak is measured.
const PEAK: Duration = Duration::from_secs(5);

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let node_bytes = (u64::from(args.objects) * (args.bytes + 8192)).max(256 << 20).next_multiple_of(1 << 28);
    let cluster = match &args.master {
        Some(_) => None,
        None => Some(BenchCluster::start(Size { nodes: 1, node_bytes, groups: 4 })?),
    };
    let address = args.master.clone().or(cluster.as_ref().map(|c| c.address.clone())).expect("one of them");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(wrong)?;
    let others: Vec<u32> = cluster.iter().flat_map(BenchCluster::pids).collect();
    let outcome = runtime.block_on(measure(args, address, &others));
    // Tasks that still wait for answers are dropped with it.
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome?;
    if args.gate { super::super::figures::nothing_is_grossly_slow() } else { Ok(()) }
}

async fn measure(args: &Args, address: String, others: &[u32]) -> Result<(), BenchError> {
    // Of master and node, the latter's store included.
    let memory = || -> Result<f64, BenchError> {
        let bytes = others.iter().map(|&pid| resident_bytes(pid)).sum::<Result<u64, _>>()?;
        Ok(bytes as f64 / 1048576.0)
    };
    let config = StoreConfig {
        local: args.local,
        deadline: Duration::from_millis(args.deadline_ms.into()),
        // Those that wait are served within half of the deadline, if one takes about a millisecond.
        waiting: (args.deadline_ms as usize).max(16),
        ..StoreConfig::new(address)
    };
    let store = AsyncStore::connect(config).await.map_err(wrong)?;
    let world = Arc::new(World {
        store,
        value: noise(args.seed, args.bytes as usize).into(),
        objects: args.objects,
        counts: Counts::default(),
    });
    let Some(times) = args.overload else {
        let span = Duration::from_secs_f64(args.seconds);
        let peak = closed(&world, args.callers, span, args.seed).await?;
        return peak.print("closed", args);
    };
    // Once, so that everything is stored and known.
    closed(&world, args.callers, PEAK, args.seed).await?;
    let peak = closed(&world, args.callers, PEAK, args.seed).await?;
    peak.print("closed", args)?;
    let rate = peak.good_per_s * times;
    let before = memory()?;
    let span = Duration::from_secs_f64(args.seconds);
    let over = open(&world, rate, span, args).await?;
    over.line("overload", args)
        .number("times", times)
        .number("offered_per_s", over.offered_per_s)
        .number("refused_per_s", over.refused_per_s)
        .number("late_per_s", over.late_per_s)
        .number("memory_mib", over.memory as f64 / 1048576.0)
        .number("cluster_memory_mib_before", before)
        .number("cluster_memory_mib", memory()?)
        .against("share", over.good_per_s / peak.good_per_s, SHARE_TARGET, true)
        .print();
    // Callers who wait, second by second, until it is as before.
    let ended = Instant::now();
    let mut recovered = None;
    while recovered.is_none() && ended.elapsed() < Duration::from_secs(30) {
        let after = closed(&world, args.callers, Duration::from_secs(1), args.seed).await?;
        if after.good_per_s >= 0.9 * peak.good_per_s {
            recovered = Some(ended.elapsed().as_secs_f64() - 1.0);
        }
    }
    let took = recovered.unwrap_or(f64::from(u16::MAX));
    Line::new("mixed", "recovered").against("seconds", took, RECOVERY_TARGET_S, false).print();
    Ok(())
}

/// What all callers share.
struct World {
    store: AsyncStore,
    value: Bytes,
    objects: u32,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    offered: AtomicU64,
    hits: AtomicU64,
    puts: AtomicU64,
    refused: AtomicU64,
    late: AtomicU64,
    failed: AtomicU64,
    nanos: Mutex<Vec<u32>>,
}

/// What happened in some time.
struct Figures {
    good_per_s: f64,
    offered_per_s: f64,
    refused_per_s: f64,
    late_per_s: f64,
    failed: u64,
    hit_rate: f64,
    took: Percentiles,
    memory: u64,
}

impl Counts {
    /// Takes everything counted so far.
    fn take(&self, span: Duration, memory: u64) -> Figures {
        let take = |counter: &AtomicU64| counter.swap(0, Ordering::Relaxed) as f64;
        let (hits, puts) = (take(&self.hits), take(&self.puts));
        let per_s = |count: f64| count / span.as_secs_f64();
        Figures {
            good_per_s: per_s(hits + puts),
            offered_per_s: per_s(take(&self.offered)),
            refused_per_s: per_s(take(&self.refused)),
            late_per_s: per_s(take(&self.late)),
            failed: take(&self.failed) as u64,
            hit_rate: hits / (hits + puts).max(1.0),
            took: Percentiles::new(std::mem::take(&mut self.nanos.lock())),
            memory,
        }
    }
}

impl Figures {
    fn line(&self, case: &str, args: &Args) -> Line {
        let line = Line::new("mixed", case)
            .with("bytes", args.bytes)
            .with("local", args.local)
            .number("good_per_s", self.good_per_s)
            .number("gb_per_s", self.good_per_s * args.bytes as f64 / 1e9)
            .number("hit_rate", self.hit_rate)
            .with("failed", self.failed);
        percentiles(line, &self.took)
    }

    fn print(&self, case: &str, args: &Args) -> Result<(), BenchError> {
        self.line(case, args).with("callers", args.callers).print();
        Ok(())
    }
}

impl World {
    /// An object that somebody wants: small numbers much more often than large ones.
    fn choose(&self, rng: &mut Rng) -> Vec<u8> {
        let unit = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let rank = (f64::from(self.objects).powf(unit) - 1.0) as u32;
        format!("mixed-{rank}").into_bytes()
    }

    /// One request: a get, and a put if there was nothing.
    async fn request(&self, key: &[u8]) -> Result<bool, moontide_client::StoreError> {
        if self.store.get(key).await?.is_some_and(|bytes| bytes.len() == self.value.len()) {
            return Ok(true);
        }
        self.store.put(key, self.value.clone(), &PutOptions::default()).await?;
        Ok(false)
    }

    /// One request, counted.
    async fn serve(&self, key: Vec<u8>, deadline: Duration) {
        use moontide_types::ErrorCode::{Busy, DeadlineExceeded, InProgress};
        let counts = &self.counts;
        let asked = Instant::now();
        counts.offered.fetch_add(1, Ordering::Relaxed);
        let answer = self.request(&key).await;
        let took = asked.elapsed();
        match answer {
            Ok(_) if took > deadline => counts.late.fetch_add(1, Ordering::Relaxed),
            Ok(true) => counts.hits.fetch_add(1, Ordering::Relaxed),
            Ok(false) => counts.puts.fetch_add(1, Ordering::Relaxed),
            Err(error) => match error.code() {
                Busy | InProgress => counts.refused.fetch_add(1, Ordering::Relaxed),
                DeadlineExceeded => counts.late.fetch_add(1, Ordering::Relaxed),
                _ => counts.failed.fetch_add(1, Ordering::Relaxed),
            },
        };
        let mut nanos = counts.nanos.lock();
        if nanos.len() < 4 << 20 {
            nanos.push(took.as_nanos().min(u32::MAX.into()) as u32);
        }
    }
}

/// Callers who wait.
async fn closed(world: &Arc<World>, callers: u16, span: Duration, seed: u64) -> Result<Figures, BenchError> {
    let over = Arc::new(AtomicBool::new(false));
    let began = Instant::now();
    let deadline = Duration::from_secs(3600);
    let tasks: Vec<_> = (0..callers)
        .map(|caller| {
            let (world, over) = (Arc::clone(world), Arc::clone(&over));
            let mut rng = Rng::new(seed ^ u64::from(caller) << 32);
            tokio::spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    world.serve(world.choose(&mut rng), deadline).await;
                }
            })
        })
        .collect();
    tell(world, began, span, "callers who wait").await;
    over.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.map_err(wrong)?;
    }
    Ok(world.counts.take(began.elapsed(), resident_bytes(std::process::id())?))
}

/// Requests that come at a rate.
async fn open(world: &Arc<World>, rate: f64, span: Duration, args: &Args) -> Result<Figures, BenchError> {
    let began = Instant::now();
    let deadline = Duration::from_millis(args.deadline_ms.into());
    let (arrivals, mut rng) = (Arc::clone(world), Rng::new(args.seed ^ 77));
    let memory = Arc::new(AtomicU64::new(0));
    let largest = Arc::clone(&memory);
    let source = tokio::spawn(async move {
        let mut clock = tokio::time::interval(Duration::from_millis(1));
        let (mut sent, mut ticks) = (0u64, 0u64);
        while began.elapsed() < span {
            clock.tick().await;
            // Those that have become due, also those that are late because this task was.
            let due = (began.elapsed().as_secs_f64() * rate) as u64;
            for _ in sent..due {
                let (world, key) = (Arc::clone(&arrivals), arrivals.choose(&mut rng));
                tokio::spawn(async move { world.serve(key, deadline).await });
            }
            sent = due.max(sent);
            ticks += 1;
            if ticks.is_multiple_of(64) {
                largest.fetch_max(resident_bytes(std::process::id()).unwrap_or(0), Ordering::Relaxed);
            }
        }
    });
    tell(world, began, span, "more requests than can be served").await;
    source.await.map_err(wrong)?;
    let memory = memory.load(Ordering::Relaxed).max(resident_bytes(std::process::id())?);
    Ok(world.counts.take(began.elapsed(), memory))
}

/// Says every second how it goes.
async fn tell(world: &World, began: Instant, span: Duration, what: &str) {
    let mut last = 0;
    while began.elapsed() < span {
        let left = span.saturating_sub(began.elapsed());
        tokio::time::sleep(left.min(Duration::from_secs(1))).await;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let served = count(&world.counts.hits) + count(&world.counts.puts);
        let seconds = began.elapsed().as_secs_f64();
        let (refused, late) = (count(&world.counts.refused), count(&world.counts.late));
        eprintln!(
            "  {what}: {seconds:.0} s, {} answers/s, {refused} refused, {late} late",
            served.saturating_sub(last)
        );
        last = served;
    }
}
