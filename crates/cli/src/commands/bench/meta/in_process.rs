//! The index without a network: memory, lookups, eviction, reports.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_master::{Service, ServiceConfig};
use moontide_meta::{Ask, Effects};
use moontide_proto::convert::decode;
use moontide_types::{Key, ObjectId, SessionId, SystemClock};
use parking_lot::Mutex;
use prost::Message;
use prost::bytes::Bytes;

use super::super::figures::{BenchError, Line, Percentiles, Progress, median, resident_bytes, spread};
use super::reports::{self, Reports};
use super::world::{KEY_BYTES, World, answer_order, id_key, ids, key, now};
use super::{Args, Dice};

/// Keys of one lookup call.
const BATCH: usize = 100;

/// From this number of objects on, memory after a removal is held against its target.
const REMOVAL_JUDGED_FROM: u64 = 2_000_000;

/// Lease of a lookup, as one-sided readers ask for.
const LEASE_MS: u32 = 5_000;

/// Memory per object, lookups, what eviction does to lookups, and what removal gives back.
pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let pid = std::process::id();
    let before = resident_bytes(pid)?;
    let mut world = World::new(args.groups, args.objects);
    let started = Instant::now();
    world.fill(args.objects)?;
    let fill = started.elapsed();
    let grown = resident_bytes(pid)?.saturating_sub(before);
    let per_object = grown as f64 / args.objects as f64;
    Line::new("meta", "memory")
        .with("objects", args.objects)
        .with("key_bytes", KEY_BYTES)
        .with("groups", args.groups)
        .against("bytes_per_object", per_object, 200.0, false)
        .number("puts_per_s", args.objects as f64 / fill.as_secs_f64())
        .print();

    lookups(args, &mut world)?;
    let mut world = eviction(args, world)?;
    removal(args, &mut world, before, grown)
}

/// Applies reports on one core, from their bytes to the index: all but the wire.
pub(super) fn ingest(args: &Args) -> Result<(), BenchError> {
    let groups = NonZeroU16::new(args.groups).expect("at least one group");
    let service = Service::new(
        ServiceConfig { groups, id_key: id_key(), ..ServiceConfig::for_tests() },
        Arc::new(SystemClock),
    );
    let opened = service.open_session(&reports::open_session());
    reports::accepted(&opened.context)?;
    let session = opened.session;
    reports::accepted(&service.mount_segments(&reports::mount(session, args.groups, args.objects)).context)?;
    let stream = service.attach(SessionId(session)).ok_or(BenchError::Wrong("no session".into()))?;
    let mut reports = Reports::new(session, service.term().get(), groups, id_key(), args.objects);
    let mut progress = Progress::new(format!("applying reports of {} objects", args.objects), args.objects);
    let (mut spent, mut rates) = (Duration::ZERO, vec![]);
    loop {
        // Made ahead: making them is not what is measured.
        let encoded: Vec<(u64, Bytes)> = reports
            .by_ref()
            .take(128)
            .map(|message| (reports::records(&message), message.encode_to_vec().into()))
            .collect();
        if encoded.is_empty() {
            break;
        }
        let records: u64 = encoded.iter().map(|(records, _)| records).sum();
        let started = Instant::now();
        for (_, bytes) in encoded {
            let message = decode(bytes).map_err(|error| BenchError::Wrong(error.to_string()))?;
            stream
                .receive(&message)
                .map_err(|code| BenchError::Wrong(format!("a report was refused: {code}")))?;
        }
        let took = started.elapsed();
        spent += took;
        if records > 100_000 {
            rates.push(records as f64 / took.as_secs_f64());
        }
        progress.at(reports.drawn());
    }
    let objects = service.stats().objects;
    if objects != args.objects {
        return Err(BenchError::Wrong(format!("{objects} of {} objects arrived", args.objects)));
    }
    let rate = args.objects as f64 / spent.as_secs_f64();
    Line::new("meta", "report_ingest_in_process")
        .with("objects", args.objects)
        .against("records_per_s", rate, 1_500_000.0, true)
        .number("ns_per_record", 1e9 / rate)
        .number("spread", spread(&rates))
        .print();
    Ok(())
}

/// Looks up random keys in batches on one core, id hash and lease included.
fn lookups(args: &Args, world: &mut World) -> Result<(), BenchError> {
    for batch in [BATCH, 1] {
        let mut dice = Dice::new(args.seed);
        let mut rates = vec![];
        for _ in 0..args.repeats {
            // Keys are made ahead; there are more of them than a cache holds.
            let keys: Vec<[u8; KEY_BYTES]> = (0..200_000).map(|_| key(dice.below(args.objects))).collect();
            let started = Instant::now();
            let mut found = 0;
            for keys in keys.chunks(batch) {
                found += lookup(world, keys);
            }
            rates.push(keys.len() as f64 / started.elapsed().as_secs_f64());
            if found != keys.len() {
                return Err(BenchError::Wrong(format!("{} of {} keys were found", found, keys.len())));
            }
        }
        let line = Line::new("meta", "lookup_in_process").with("objects", args.objects).with("batch", batch);
        let rate = median(rates.clone());
        let line = if batch == BATCH {
            line.against("keys_per_s", rate, 1_500_000.0, true)
        } else {
            line.number("keys_per_s", rate)
        };
        line.number("spread", spread(&rates)).number("ns_per_key", 1e9 / rate).print();
    }
    Ok(())
}

fn lookup(world: &mut World, keys: &[[u8; KEY_BYTES]]) -> usize {
    let time = now();
    let mut found = 0;
    let asks = keys.iter().zip(ids(&world.id_key, keys));
    let asks = asks.map(|(key, id)| Ask { id, key: Key::new(key).expect("64 bytes are a key") });
    let mut asks: Vec<Ask<'_>> = asks.collect();
    let count = world.count;
    asks.sort_unstable_by_key(|ask| ask.id.group(count));
    for asks in asks.chunk_by(|a, b| a.id.group(count) == b.id.group(count)) {
        let group = &mut world.groups[usize::from(asks[0].id.group(count).0)];
        group.lookup(time, LEASE_MS, asks, |_, answer| found += usize::from(answer.is_ok()));
    }
    found
}

/// One thread looks up key by key while another one evicts; each waits for the other's group as in a master.
fn eviction(args: &Args, world: World) -> Result<World, BenchError> {
    let victims = (args.objects / 100).max(1);
    let (groups, world) = world.into_locked();
    let evicting = AtomicBool::new(true);
    let mut dice = Dice::new(args.seed + 1);
    let asked: Vec<([u8; KEY_BYTES], ObjectId)> = {
        let keys: Vec<_> = (0..200_000).map(|_| key(dice.below(args.objects))).collect();
        let ids = ids(&world.id_key, &keys);
        keys.into_iter().zip(ids).collect()
    };
    let sample = |until_done: bool| -> Vec<u32> {
        let mut nanos = Vec::with_capacity(1 << 20);
        let started = Instant::now();
        for (key, id) in asked.iter().cycle() {
            let time = Instant::now();
            let ask = Ask { id: *id, key: Key::new(key).expect("64 bytes are a key") };
            let group: &Mutex<_> = &groups[usize::from(id.group(world.count).0)];
            group.lock().lookup(now(), 0, &[ask], |_, _| {});
            nanos.push(u32::try_from(time.elapsed().as_nanos()).unwrap_or(u32::MAX));
            let over = if until_done {
                !evicting.load(Ordering::Relaxed)
            } else {
                started.elapsed() > Duration::from_millis(500)
            };
            if over || nanos.len() == nanos.capacity() && !until_done {
                break;
            }
        }
        nanos
    };
    let quiet = Percentiles::new(sample(false));
    let (during, evicted, took) = std::thread::scope(|scope| {
        let evictor = scope.spawn(|| {
            let started = Instant::now();
            let mut evicted = 0;
            let mut effects = Effects::new();
            let mut answers = Effects::new();
            let mut index = 0;
            while evicted < victims {
                {
                    let mut group = groups[index].lock();
                    evicted += group.evict(now(), 0, 256, &mut effects).objects;
                    for effect in effects.drain(..) {
                        answer_order(&mut group, &effect, &mut answers);
                    }
                    answers.clear();
                }
                index = (index + 1) % groups.len();
                // As the master's ticks do: others get the group in between.
                std::thread::sleep(Duration::from_micros(200));
                if started.elapsed() > Duration::from_secs(120) {
                    break;
                }
            }
            evicting.store(false, Ordering::Relaxed);
            (evicted, started.elapsed())
        });
        let during = Percentiles::new(sample(true));
        let (evicted, took) = evictor.join().expect("the evictor ends");
        (during, evicted, took)
    });
    if evicted < victims {
        return Err(BenchError::Wrong(format!("only {evicted} of {victims} objects could be evicted")));
    }
    Line::new("meta", "lookup_during_eviction")
        .with("objects", args.objects)
        .with("evicted", evicted)
        .number("evicted_per_s", evicted as f64 / took.as_secs_f64())
        .number("quiet_p50_us", quiet.micros(0.5))
        .number("quiet_p99_us", quiet.micros(0.99))
        .number("p50_us", during.micros(0.5))
        .against("p99_us", during.micros(0.99), 1000.0, false)
        .number("p999_us", during.micros(0.999))
        .print();
    Ok(world.with(groups))
}

/// Removes nine of ten objects, drawn at random, and looks at what the process gives back.
fn removal(args: &Args, world: &mut World, before: u64, grown: u64) -> Result<(), BenchError> {
    let mut progress = Progress::new("removing nine of ten objects", args.objects);
    let mut dice = Dice::new(args.seed + 2);
    let started = Instant::now();
    let mut removed = 0u64;
    for number in 0..args.objects {
        if dice.below(10) == 0 {
            continue;
        }
        let key = key(number);
        let id = ids(&world.id_key, std::slice::from_ref(&key))[0];
        world.remove(&Ask { id, key: Key::new(&key).expect("64 bytes are a key") });
        removed += 1;
        progress.at(number);
    }
    let took = started.elapsed();
    let ended = Instant::now();
    let share = |resident: u64| resident.saturating_sub(before) as f64 / grown as f64;
    let mut left = share(resident_bytes(std::process::id())?);
    while left > 0.4 && ended.elapsed() < Duration::from_secs(10) {
        // Leases of the lookups before run out in the meantime, and ticks see to what they held back.
        std::thread::sleep(Duration::from_millis(100));
        world.tick();
        left = share(resident_bytes(std::process::id())?);
    }
    let objects: usize = world.groups.iter().map(|group| group.objects()).sum();
    let line =
        Line::new("meta", "memory_after_removal").with("removed", removed).with("objects_left", objects);
    // With fewer objects, what the benchmark itself has used and freed is a large part of the memory.
    let line = if args.objects >= REMOVAL_JUDGED_FROM {
        line.against("share_of_growth", left, 0.4, false)
    } else {
        line.number("share_of_growth", left)
    };
    line.number("waited_s", ended.elapsed().as_secs_f64())
        .number("removals_per_s", removed as f64 / took.as_secs_f64())
        .print();
    Ok(())
}
