//! `moontide bench remote`: objects in the memory of another process, over TCP on loopback, compared with plain
//! sockets.

use std::sync::atomic::{AtomicU64, Ordering};

use clap::Args as ClapArgs;
use moontide_client::{PutItem, PutOptions, Store};
use moontide_rt::SplitMix64;
use moontide_transfer::sample::SampleNodeConfig;
use moontide_types::record::DigestContext;

use super::cluster::{BenchCluster, Size};
use super::{BenchEffort, random_bytes};
use crate::measure::{Run, compared, interleave, median, percentiles, timed};
use crate::results::{BenchError, Progress, ResultRow, check_gates, io, wrong};
use crate::transfer::{BaselineConnection, OwnerProcess};

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench remote                     gets and puts of 64 KiB to 16 MiB, and latency of 4 KiB; a few minutes
  moontide bench remote --quick             two sizes, half a minute; less precise
  moontide bench remote --sizes 1M,4M --seconds 1

Every result is one JSON object per line on standard output. The baseline is a process with plain blocking sockets: a
request of 16 bytes, then the payload, without checks; `baseline_digest` also hashes every page, as the store does.
  get, put         one caller and four callers; ratio is store / baseline, median of the repeats
  latency_4k       one get of 4 KiB: `cached` with a cached location, `lookup` with a call to the master each time;
                   baseline: one baseline get of 4 KiB, which is one round trip
  ratio_digest     store / (baseline with digests)";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    effort: BenchEffort,
}

/// Numbers of callers.
const CALLERS: [usize; 2] = [1, 4];

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let effort = &args.effort;
    let node_bytes = (4 * effort.set_bytes()).next_multiple_of(1 << 30);
    let cluster = BenchCluster::start(Size { nodes: 1, node_bytes, groups: 1 })?;
    let store = cluster.store(|config| config.shm = false)?;
    let uncached = cluster.store(|config| (config.shm, config.location_cache_entries) = (false, 0))?;
    latency(&store, &uncached, effort)?;
    let sizes = effort.sizes();
    let mut progress = Progress::new(format!("remote, {} sizes", sizes.len()), 2 * sizes.len() as u64);
    warm_up(&store, node_bytes)?;
    for (done, &bytes) in sizes.iter().enumerate() {
        let baseline_process = BaselineProcess::start(bytes, effort)?;
        gets(&store, &baseline_process, effort)?;
        progress.at(2 * done as u64 + 1);
        puts(&store, &baseline_process, effort)?;
        progress.at(2 * done as u64 + 2);
    }
    if effort.gate { check_gates() } else { Ok(()) }
}

/// Touches all memory of the node, so that page faults are not measured.
fn warm_up(store: &Store, node_bytes: u64) -> Result<(), BenchError> {
    let block = random_bytes(1, 16 << 20);
    let count = node_bytes / 10 * 9 / (block.len() as u64 + 8192);
    let keys: Vec<String> = (0..count).map(|n| format!("warm-{n}")).collect();
    for key in &keys {
        store.put(key.as_bytes(), &block).map_err(wrong)?;
    }
    remove(store, &keys)
}

fn remove(store: &Store, keys: &[String]) -> Result<(), BenchError> {
    for removed in store.remove_batch(&keys.iter().map(|key| key.as_bytes()).collect::<Vec<_>>(), true) {
        removed.map_err(wrong)?;
    }
    Ok(())
}

/// Baseline process with as many records of the same size.
pub(super) struct BaselineProcess {
    bytes: u64,
    config: SampleNodeConfig,
    _owner: OwnerProcess,
    connections: Vec<BaselineConnection>,
}

impl BaselineProcess {
    pub(super) fn start(bytes: u64, effort: &BenchEffort) -> Result<BaselineProcess, BenchError> {
        let records = (effort.set_bytes() / bytes).max(8) as u32;
        let config = SampleNodeConfig {
            record_bytes: bytes,
            readable: records,
            writable: records / 2,
            digests: true,
            ..SampleNodeConfig::default()
        };
        let owner = OwnerProcess::start(&config)?;
        // As many as the link of the store has: one thread each.
        let connections = moontide_transfer::tcp::CONNECTIONS_DEFAULT;
        let connections =
            (0..connections).map(|_| BaselineConnection::connect(owner.baseline)).collect::<Result<_, _>>();
        let connections = connections.map_err(io("connecting to the baseline server"))?;
        Ok(BaselineProcess { bytes, config, _owner: owner, connections })
    }

    /// Measures baseline transfers, with at most one thread per connection.
    pub(super) fn run(
        &self,
        put: bool,
        digests: bool,
        callers: usize,
        seed: u64,
        effort: &BenchEffort,
    ) -> Result<Run, BenchError> {
        let threads = callers.min(self.connections.len());
        let mover =
            |(thread, connection): (usize, _)| self.mover(connection, put, digests, seed ^ thread as u64);
        let movers = self.connections.iter().take(threads).enumerate().map(mover).collect();
        timed(movers, effort.span(), self.bytes)
    }

    fn mover<'a>(
        &'a self,
        connection: &'a BaselineConnection,
        put: bool,
        digests: bool,
        seed: u64,
    ) -> impl FnMut() -> Result<(), BenchError> + Send + 'a {
        let mut rng = SplitMix64::new(seed);
        let len = self.bytes as usize;
        let mut memory = random_bytes(seed, ARENA.max(len));
        let offsets = memory.len() / len;
        let (from, count) =
            if put { (self.config.readable, self.config.writable) } else { (0, self.config.readable) };
        move || {
            let record = from + rng.index(count as usize) as u32;
            let context: DigestContext = self.config.digest_context(record);
            let (offset, context) = (self.config.target(record).payload_offset, digests.then_some(&context));
            let memory = &mut memory[rng.index(offsets) * len..][..len];
            let moved = match put {
                true => connection.put(offset, memory, context),
                false => connection.get(offset, memory, context),
            };
            moved.map_err(io("a baseline transfer"))
        }
    }
}

/// Memory of a caller: larger than the caches of a core.
const ARENA: usize = 64 << 20;

fn gets(store: &Store, baseline_process: &BaselineProcess, effort: &BenchEffort) -> Result<(), BenchError> {
    let (bytes, len) = (baseline_process.bytes, baseline_process.bytes as usize);
    let count = (effort.set_bytes() / bytes).max(8) as usize;
    let keys: Vec<String> = (0..count).map(|n| format!("get-{bytes}-{n}")).collect();
    let content = random_bytes(effort.seed, len);
    for key in &keys {
        store.put(key.as_bytes(), &content).map_err(wrong)?;
    }
    let mut one_caller = None;
    for callers in CALLERS {
        let ours = |repeat: u64| {
            let movers = (0..callers).map(|caller| {
                let mut rng = SplitMix64::new(effort.seed ^ repeat << 8 ^ caller as u64);
                let mut memory = vec![1u8; ARENA.max(len)];
                let (keys, offsets) = (&keys, ARENA.max(len) / len);
                move || {
                    let into = &mut memory[rng.index(offsets) * len..][..len];
                    let found =
                        store.get_into(keys[rng.index(keys.len())].as_bytes(), into).map_err(wrong)?;
                    if found == Some(len) { Ok(()) } else { Err(wrong("an object is missing")) }
                }
            });
            timed(movers.collect(), effort.span(), bytes)
        };
        ours(99)?;
        let sides = interleave(effort.repeats(), |side, repeat| match side {
            0 => ours(repeat),
            1 => baseline_process.run(false, false, callers, repeat, effort),
            _ => baseline_process.run(false, true, callers, repeat, effort),
        });
        let [ours, baseline, baseline_digest] = sides?;
        // One caller is compared with plain sockets, several with the baseline that also hashes.
        let target = match (callers, bytes) {
            (1, 0x4_0000) => Some(0.85),
            (1, 0x10_0000..) => Some(0.9),
            _ => None,
        };
        let line = ResultRow::new("remote", "get").with("bytes", bytes).with("callers", callers);
        let line = compared(line, &ours, &baseline, target);
        let over_digest = median(ours.over(&baseline_digest));
        let line = match callers {
            4 if bytes >= 256 << 10 => line.with_second_target("ratio_digest", over_digest, 0.95, true),
            _ => line.number("ratio_digest", over_digest),
        };
        let rate = ours.rate();
        match one_caller {
            None => {
                one_caller = Some(rate);
                line.print();
            }
            Some(one) => line.number("over_one_caller", rate / one).print(),
        }
    }
    remove(store, &keys)
}

fn puts(store: &Store, baseline_process: &BaselineProcess, effort: &BenchEffort) -> Result<(), BenchError> {
    let (bytes, len) = (baseline_process.bytes, baseline_process.bytes as usize);
    let number = AtomicU64::new(0);
    for callers in CALLERS {
        let sides = interleave(effort.repeats(), |side, repeat| {
            if side > 0 {
                return baseline_process.run(true, side == 2, callers, repeat, effort);
            }
            let mut written: Vec<Vec<String>> = vec![Vec::new(); callers];
            let movers = written.iter_mut().enumerate().map(|(caller, written)| {
                let mut rng = SplitMix64::new(effort.seed ^ repeat << 8 ^ caller as u64);
                let memory = random_bytes(caller as u64, ARENA.max(len));
                let (number, offsets) = (&number, memory.len() / len);
                move || {
                    let key = format!("put-{bytes}-{}", number.fetch_add(1, Ordering::Relaxed));
                    let from = &memory[rng.index(offsets) * len..][..len];
                    store.put(key.as_bytes(), from).map_err(wrong)?;
                    written.push(key);
                    Ok(())
                }
            });
            let run = timed(movers.collect(), effort.span(), bytes)?;
            // Frees space for the next measurement; not measured.
            remove(store, &written.concat())?;
            Ok(run)
        });
        let [ours, baseline, baseline_digest] = sides?;
        let line = ResultRow::new("remote", "put").with("bytes", bytes).with("callers", callers);
        let target = (bytes >= 256 << 10 && callers == 1).then_some(0.7);
        let line = compared(line, &ours, &baseline, target);
        let over_digest = median(ours.over(&baseline_digest));
        match bytes >= 256 << 10 && callers == 1 {
            true => line.with_second_target("ratio_digest", over_digest, 0.95, true).print(),
            false => line.number("ratio_digest", over_digest).print(),
        }
    }
    Ok(())
}

/// Measures one get of 4 KiB in baseline round trips.
fn latency(store: &Store, uncached: &Store, effort: &BenchEffort) -> Result<(), BenchError> {
    const LEN: usize = 4096;
    let baseline_process =
        BaselineProcess::start(LEN as u64, &BenchEffort { quick: true, ..effort.clone() })?;
    let keys: Vec<String> = (0..10_000).map(|n| format!("small-{n}")).collect();
    let content = random_bytes(effort.seed, LEN);
    for part in keys.chunks(1000) {
        let parts: [&[u8]; 1] = [&content];
        let items: Vec<PutItem<'_>> =
            part.iter().map(|key| PutItem { key: key.as_bytes(), parts: &parts }).collect();
        for put in store.put_batch(&items, &PutOptions::default()) {
            put.map_err(wrong)?;
        }
    }
    let get = |store: &Store, repeat: u64| {
        let mut rng = SplitMix64::new(effort.seed ^ repeat);
        let mut into = [0; LEN];
        let (keys, store) = (&keys, store.clone());
        let mover = move || {
            let found = store.get_into(keys[rng.index(keys.len())].as_bytes(), &mut into).map_err(wrong)?;
            if found == Some(LEN) { Ok(()) } else { Err(wrong("an object is missing")) }
        };
        timed(vec![mover], effort.span(), LEN as u64)
    };
    get(store, 99)?;
    get(uncached, 99)?;
    let sides = interleave(effort.repeats(), |side, repeat| match side {
        0 => get(store, repeat),
        1 => get(uncached, repeat),
        _ => baseline_process.run(false, false, 1, repeat, effort),
    });
    let [cached, looked_up, baseline] = sides?;
    let baseline_p50 = baseline.took().micros(0.5);
    for (how, runs, target) in [("cached", &cached, 2.0), ("lookup", &looked_up, 3.5)] {
        let took = runs.took();
        let line = ResultRow::new("remote", "latency_4k").with("location", how);
        percentiles(line, &took)
            .number("baseline_p50_us", baseline_p50)
            .with_target("round_trips", took.micros(0.5) / baseline_p50, target, false)
            .print();
    }
    remove(store, &keys)
}
