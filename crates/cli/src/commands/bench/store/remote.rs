//! `moontide bench remote`: objects in another process's memory, over TCP on loopback, beside bare sockets.

use std::sync::atomic::{AtomicU64, Ordering};

use clap::Args as ClapArgs;
use moontide_client::{PutItem, PutOptions, Store};
use moontide_meta::Rng;
use moontide_transfer::sample::SampleConfig;
use moontide_types::record::DigestContext;

use super::super::figures::{BenchError, Line, Progress, io, nothing_is_grossly_slow};
use super::super::transfer::{Bare, OwnerProcess, Run, timed, wrong};
use super::cluster::{BenchCluster, Size};
use super::turns::{compared, percentiles, take_turns};
use super::{Effort, noise};

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench remote                     gets and puts of 64 KiB to 16 MiB, and the latency of 4 KiB; some minutes
  moontide bench remote --quick             two sizes, half a minute; figures are rough
  moontide bench remote --sizes 1M,4M --seconds 1

Every result is one JSON object per line on standard output. The bare side is a process with plain blocking sockets:
16 bytes ask, the bytes come, nothing is checked; `bare_digest` hashes every page as well, as ours does.
  get, put         one caller and four; ratio is ours / bare, the middle of the repeats
  latency_4k       one get of 4 KiB: `cached` from a place that is remembered, `lookup` asking the master each time;
                   bare: one bare get of 4 KiB, which is one round trip
  ratio_digest     ours / (bare + digests)";

/// How it is measured.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    effort: Effort,
}

/// Callers that are measured.
const CALLERS: [usize; 2] = [1, 4];

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let effort = &args.effort;
    let node_bytes = (4 * effort.set_bytes()).next_multiple_of(1 << 30);
    let cluster = BenchCluster::start(Size { nodes: 1, node_bytes, groups: 1 })?;
    let store = cluster.store(|config| config.local = false)?;
    let asking = cluster.store(|config| (config.local, config.locations) = (false, 0))?;
    latency(&store, &asking, effort)?;
    let sizes = effort.sizes();
    let mut progress = Progress::new(format!("remote, {} sizes", sizes.len()), 2 * sizes.len() as u64);
    warm_up(&store, node_bytes)?;
    for (done, &bytes) in sizes.iter().enumerate() {
        let world = World::start(bytes, effort)?;
        gets(&store, &world, effort)?;
        progress.at(2 * done as u64 + 1);
        puts(&store, &world, effort)?;
        progress.at(2 * done as u64 + 2);
    }
    if effort.gate { nothing_is_grossly_slow() } else { Ok(()) }
}

/// Touches all memory of the node, so that nobody pays for its pages later.
fn warm_up(store: &Store, node_bytes: u64) -> Result<(), BenchError> {
    let block = noise(1, 16 << 20);
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

/// The bare side: a process with as many records of the same size.
pub(super) struct World {
    bytes: u64,
    config: SampleConfig,
    _owner: OwnerProcess,
    connections: Vec<Bare>,
}

impl World {
    pub(super) fn start(bytes: u64, effort: &Effort) -> Result<World, BenchError> {
        let records = (effort.set_bytes() / bytes).max(8) as u32;
        let config = SampleConfig {
            record_bytes: bytes,
            readable: records,
            writable: records / 2,
            digests: true,
            ..SampleConfig::default()
        };
        let owner = OwnerProcess::start(&config)?;
        // As many as our link has: one thread each.
        let connections = moontide_transfer::tcp::CONNECTIONS_DEFAULT;
        let connections = (0..connections).map(|_| Bare::connect(owner.bare)).collect::<Result<_, _>>();
        let connections = connections.map_err(io("connecting to the bare server"))?;
        Ok(World { bytes, config, _owner: owner, connections })
    }

    /// Moves records of the bare side, with as many threads as it has connections for.
    pub(super) fn run(
        &self,
        put: bool,
        digests: bool,
        callers: usize,
        seed: u64,
        effort: &Effort,
    ) -> Result<Run, BenchError> {
        let threads = callers.min(self.connections.len());
        let mover =
            |(thread, connection): (usize, _)| self.mover(connection, put, digests, seed ^ thread as u64);
        let movers = self.connections.iter().take(threads).enumerate().map(mover).collect();
        timed(movers, effort.span(), self.bytes)
    }

    fn mover<'a>(
        &'a self,
        connection: &'a Bare,
        put: bool,
        digests: bool,
        seed: u64,
    ) -> impl FnMut() -> Result<(), BenchError> + Send + 'a {
        let mut rng = Rng::new(seed);
        let len = self.bytes as usize;
        let mut memory = noise(seed, ARENA.max(len));
        let places = memory.len() / len;
        let (from, count) =
            if put { (self.config.readable, self.config.writable) } else { (0, self.config.readable) };
        move || {
            let record = from + rng.below(count as usize) as u32;
            let context: DigestContext = self.config.digest_context(record);
            let (offset, context) = (self.config.target(record).payload_offset, digests.then_some(&context));
            let memory = &mut memory[rng.below(places) * len..][..len];
            let moved = match put {
                true => connection.put(offset, memory, context),
                false => connection.get(offset, memory, context),
            };
            moved.map_err(io("a bare transfer"))
        }
    }
}

/// Memory of a caller: more than the caches of a core.
const ARENA: usize = 64 << 20;

fn gets(store: &Store, world: &World, effort: &Effort) -> Result<(), BenchError> {
    let (bytes, len) = (world.bytes, world.bytes as usize);
    let count = (effort.set_bytes() / bytes).max(8) as usize;
    let keys: Vec<String> = (0..count).map(|n| format!("get-{bytes}-{n}")).collect();
    let content = noise(effort.seed, len);
    for key in &keys {
        store.put(key.as_bytes(), &content).map_err(wrong)?;
    }
    let mut one_caller = None;
    for callers in CALLERS {
        let ours = |repeat: u64| {
            let movers = (0..callers).map(|caller| {
                let mut rng = Rng::new(effort.seed ^ repeat << 8 ^ caller as u64);
                let mut memory = vec![1u8; ARENA.max(len)];
                let (keys, places) = (&keys, ARENA.max(len) / len);
                move || {
                    let into = &mut memory[rng.below(places) * len..][..len];
                    let found =
                        store.get_into(keys[rng.below(keys.len())].as_bytes(), into).map_err(wrong)?;
                    if found == Some(len) { Ok(()) } else { Err(wrong("an object is missing")) }
                }
            });
            timed(movers.collect(), effort.span(), bytes)
        };
        ours(99)?;
        let sides = take_turns(effort.repeats(), |side, repeat| match side {
            0 => ours(repeat),
            1 => world.run(false, false, callers, repeat, effort),
            _ => world.run(false, true, callers, repeat, effort),
        });
        let [ours, bare, bare_digest] = sides?;
        // One caller is held against bare sockets, several against what hashes as well.
        let target = match (callers, bytes) {
            (1, 0x4_0000) => Some(0.85),
            (1, 0x10_0000..) => Some(0.9),
            _ => None,
        };
        let line = Line::new("remote", "get").with("bytes", bytes).with("callers", callers);
        let line = compared(line, &ours, &bare, target);
        let over_digest = super::super::figures::median(ours.over(&bare_digest));
        let line = match callers {
            4 if bytes >= 256 << 10 => line.also_against("ratio_digest", over_digest, 0.95, true),
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

fn puts(store: &Store, world: &World, effort: &Effort) -> Result<(), BenchError> {
    let (bytes, len) = (world.bytes, world.bytes as usize);
    let number = AtomicU64::new(0);
    for callers in CALLERS {
        let sides = take_turns(effort.repeats(), |side, repeat| {
            if side > 0 {
                return world.run(true, side == 2, callers, repeat, effort);
            }
            let mut written: Vec<Vec<String>> = vec![Vec::new(); callers];
            let movers = written.iter_mut().enumerate().map(|(caller, written)| {
                let mut rng = Rng::new(effort.seed ^ repeat << 8 ^ caller as u64);
                let memory = noise(caller as u64, ARENA.max(len));
                let (number, places) = (&number, memory.len() / len);
                move || {
                    let key = format!("put-{bytes}-{}", number.fetch_add(1, Ordering::Relaxed));
                    let from = &memory[rng.below(places) * len..][..len];
                    store.put(key.as_bytes(), from).map_err(wrong)?;
                    written.push(key);
                    Ok(())
                }
            });
            let run = timed(movers.collect(), effort.span(), bytes)?;
            // Room for the next one, outside of the measurement.
            remove(store, &written.concat())?;
            Ok(run)
        });
        let [ours, bare, bare_digest] = sides?;
        let line = Line::new("remote", "put").with("bytes", bytes).with("callers", callers);
        let target = (bytes >= 256 << 10 && callers == 1).then_some(0.7);
        let line = compared(line, &ours, &bare, target);
        let over_digest = super::super::figures::median(ours.over(&bare_digest));
        match bytes >= 256 << 10 && callers == 1 {
            true => line.also_against("ratio_digest", over_digest, 0.95, true).print(),
            false => line.number("ratio_digest", over_digest).print(),
        }
    }
    Ok(())
}

/// One get of 4 KiB, in bare round trips.
fn latency(store: &Store, asking: &Store, effort: &Effort) -> Result<(), BenchError> {
    const LEN: usize = 4096;
    let world = World::start(LEN as u64, &Effort { quick: true, ..effort.clone() })?;
    let keys: Vec<String> = (0..10_000).map(|n| format!("small-{n}")).collect();
    let content = noise(effort.seed, LEN);
    for part in keys.chunks(1000) {
        let parts: [&[u8]; 1] = [&content];
        let items: Vec<PutItem<'_>> =
            part.iter().map(|key| PutItem { key: key.as_bytes(), parts: &parts }).collect();
        for put in store.put_batch(&items, &PutOptions::default()) {
            put.map_err(wrong)?;
        }
    }
    let get = |store: &Store, repeat: u64| {
        let mut rng = Rng::new(effort.seed ^ repeat);
        let mut into = [0; LEN];
        let (keys, store) = (&keys, store.clone());
        let mover = move || {
            let found = store.get_into(keys[rng.below(keys.len())].as_bytes(), &mut into).map_err(wrong)?;
            if found == Some(LEN) { Ok(()) } else { Err(wrong("an object is missing")) }
        };
        timed(vec![mover], effort.span(), LEN as u64)
    };
    get(store, 99)?;
    get(asking, 99)?;
    let sides = take_turns(effort.repeats(), |side, repeat| match side {
        0 => get(store, repeat),
        1 => get(asking, repeat),
        _ => world.run(false, false, 1, repeat, effort),
    });
    let [cached, looked_up, bare] = sides?;
    let bare_p50 = bare.took().micros(0.5);
    for (how, runs, target) in [("cached", &cached, 2.0), ("lookup", &looked_up, 3.5)] {
        let took = runs.took();
        let line = Line::new("remote", "latency_4k").with("location", how);
        percentiles(line, &took)
            .number("bare_p50_us", bare_p50)
            .against("round_trips", took.micros(0.5) / bare_p50, target, false)
            .print();
    }
    remove(store, &keys)
}
