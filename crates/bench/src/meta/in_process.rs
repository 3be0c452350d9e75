//! Cases without network: memory, lookups, eviction, reports.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_master::{Service, ServiceConfig};
use moontide_meta::{Effects, LookupKey};
use moontide_proto::convert::decode;
use moontide_rt::SplitMix64;
use moontide_types::{Key, ObjectId, SessionId, SystemClock};
use parking_lot::Mutex;
use prost::Message;
use prost::bytes::Bytes;

use super::Args;
use super::fixture::{KEY_BYTES, MetaFixture, apply_command, id_key, ids, key, now};
use super::reports::{self, Reports};
use crate::measure::{Percentiles, median, relative_range};
use crate::process::resident_bytes;
use crate::results::{BenchError, Progress, ResultRow};

/// Keys of one lookup call.
const BATCH: usize = 100;

/// Number of objects from which memory after a removal is compared with its target.
const REMOVAL_JUDGED_FROM: u64 = 2_000_000;

/// Lease of a lookup, as requested by one-sided readers.
const LEASE_MS: u32 = 5_000;

/// Measures memory per object, lookups, lookups during eviction, and memory after removal.
pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let pid = std::process::id();
    let before = resident_bytes(pid)?;
    let mut fixture = MetaFixture::new(args.groups, args.objects);
    let started = Instant::now();
    fixture.fill(args.objects)?;
    let fill = started.elapsed();
    let grown = resident_bytes(pid)?.saturating_sub(before);
    let per_object = grown as f64 / args.objects as f64;
    ResultRow::new("meta", "memory")
        .with("objects", args.objects)
        .with("key_bytes", KEY_BYTES)
        .with("groups", args.groups)
        .with_target("bytes_per_object", per_object, 200.0, false)
        .number("puts_per_s", args.objects as f64 / fill.as_secs_f64())
        .print();

    lookups(args, &mut fixture)?;
    let mut fixture = eviction(args, fixture)?;
    removal(args, &mut fixture, before, grown)
}

/// Measures decoding and applying reports on one core, without network.
pub(super) fn ingest(args: &Args) -> Result<(), BenchError> {
    let groups = NonZeroU16::new(args.groups).expect("at least one group");
    let service = Service::new(
        ServiceConfig { groups, id_key: id_key(), ..ServiceConfig::for_tests() },
        Arc::new(SystemClock),
    );
    let opened = service.open_session(&reports::open_session());
    reports::accepted(&opened.context)?;
    let session = opened.session;
    reports::accepted(&service.mount_segments(&reports::mount(&opened, args.groups, args.objects)).context)?;
    let stream = service.attach(SessionId(session)).ok_or(BenchError::Wrong("no session".into()))?;
    let mut reports = Reports::new(session, service.term().get(), groups, id_key(), args.objects);
    let mut progress = Progress::new(format!("applying reports of {} objects", args.objects), args.objects);
    let (mut spent, mut rates) = (Duration::ZERO, vec![]);
    loop {
        // Encoded in advance: encoding is not measured.
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
            stream.receive(&message).map_err(|code| BenchError::Wrong(format!("report rejected: {code}")))?;
        }
        let took = started.elapsed();
        spent += took;
        if records > 100_000 {
            rates.push(records as f64 / took.as_secs_f64());
        }
        progress.at(reports.generated());
    }
    let objects = service.stats().objects;
    if objects != args.objects {
        return Err(BenchError::Wrong(format!("index has {objects} of {} objects", args.objects)));
    }
    let rate = args.objects as f64 / spent.as_secs_f64();
    ResultRow::new("meta", "report_ingest_in_process")
        .with("objects", args.objects)
        .with_target("records_per_s", rate, 1_500_000.0, true)
        .number("ns_per_record", 1e9 / rate)
        .number("range", relative_range(&rates))
        .print();
    Ok(())
}

/// Measures lookups of random keys on one core, including id hash and lease.
fn lookups(args: &Args, fixture: &mut MetaFixture) -> Result<(), BenchError> {
    for batch in [BATCH, 1] {
        let mut rng = SplitMix64::new(args.seed);
        let mut rates = vec![];
        for _ in 0..args.repeats {
            // Keys are generated in advance; they do not fit into a CPU cache.
            let keys: Vec<[u8; KEY_BYTES]> = (0..200_000).map(|_| key(rng.below(args.objects))).collect();
            let started = Instant::now();
            let mut found = 0;
            for keys in keys.chunks(batch) {
                found += lookup(fixture, keys);
            }
            rates.push(keys.len() as f64 / started.elapsed().as_secs_f64());
            if found != keys.len() {
                return Err(BenchError::Wrong(format!("{} of {} keys were found", found, keys.len())));
            }
        }
        let row =
            ResultRow::new("meta", "lookup_in_process").with("objects", args.objects).with("batch", batch);
        let rate = median(rates.clone());
        let row = if batch == BATCH {
            row.with_target("keys_per_s", rate, 1_500_000.0, true)
        } else {
            row.number("keys_per_s", rate)
        };
        row.number("range", relative_range(&rates)).number("ns_per_key", 1e9 / rate).print();
    }
    Ok(())
}

fn lookup(fixture: &mut MetaFixture, keys: &[[u8; KEY_BYTES]]) -> usize {
    let time = now();
    let mut found = 0;
    let lookups = keys.iter().zip(ids(&fixture.id_key, keys));
    let lookups = lookups.map(|(key, id)| LookupKey { id, key: Key::new(key).expect("64 bytes are a key") });
    let mut lookups: Vec<LookupKey<'_>> = lookups.collect();
    let count = fixture.count;
    lookups.sort_unstable_by_key(|ask| ask.id.group(count));
    for lookups in lookups.chunk_by(|a, b| a.id.group(count) == b.id.group(count)) {
        let group = &mut fixture.groups[usize::from(lookups[0].id.group(count).0)];
        group.lookup(time, LEASE_MS, lookups, |_, result| found += usize::from(result.is_ok()));
    }
    found
}

/// Measures single lookups while another thread evicts; both lock the groups as in a master.
fn eviction(args: &Args, fixture: MetaFixture) -> Result<MetaFixture, BenchError> {
    let victims = (args.objects / 100).max(1);
    let (groups, fixture) = fixture.into_locked();
    let evicting = AtomicBool::new(true);
    let mut rng = SplitMix64::new(args.seed + 1);
    let keys_and_ids: Vec<([u8; KEY_BYTES], ObjectId)> = {
        let keys: Vec<_> = (0..200_000).map(|_| key(rng.below(args.objects))).collect();
        let ids = ids(&fixture.id_key, &keys);
        keys.into_iter().zip(ids).collect()
    };
    let sample = |until_done: bool| -> Vec<u32> {
        let mut nanos = Vec::with_capacity(1 << 20);
        let started = Instant::now();
        for (key, id) in keys_and_ids.iter().cycle() {
            let time = Instant::now();
            let ask = LookupKey { id: *id, key: Key::new(key).expect("64 bytes are a key") };
            let group: &Mutex<_> = &groups[usize::from(id.group(fixture.count).0)];
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
            let mut outcomes = Effects::new();
            let mut index = 0;
            while evicted < victims {
                {
                    let mut group = groups[index].lock();
                    evicted += group.evict(now(), 0, 256, &mut effects).objects;
                    for effect in effects.drain(..) {
                        apply_command(&mut group, &effect, &mut outcomes);
                    }
                    outcomes.clear();
                }
                index = (index + 1) % groups.len();
                // Releases the group between batches, as the ticks of a master do.
                std::thread::sleep(Duration::from_micros(200));
                if started.elapsed() > Duration::from_secs(120) {
                    break;
                }
            }
            evicting.store(false, Ordering::Relaxed);
            (evicted, started.elapsed())
        });
        let during = Percentiles::new(sample(true));
        let (evicted, took) = evictor.join().expect("the evictor does not panic");
        (during, evicted, took)
    });
    if evicted < victims {
        return Err(BenchError::Wrong(format!("evicted only {evicted} of {victims} objects")));
    }
    ResultRow::new("meta", "lookup_during_eviction")
        .with("objects", args.objects)
        .with("evicted", evicted)
        .number("evicted_per_s", evicted as f64 / took.as_secs_f64())
        .number("quiet_p50_us", quiet.micros(0.5))
        .number("quiet_p99_us", quiet.micros(0.99))
        .number("p50_us", during.micros(0.5))
        .with_target("p99_us", during.micros(0.99), 1000.0, false)
        .number("p999_us", during.micros(0.999))
        .print();
    Ok(fixture.with(groups))
}

/// Removes 90 % of the objects at random and measures the memory that the process frees.
fn removal(args: &Args, fixture: &mut MetaFixture, before: u64, grown: u64) -> Result<(), BenchError> {
    let mut progress = Progress::new("removing 90 % of the objects", args.objects);
    let mut rng = SplitMix64::new(args.seed + 2);
    let started = Instant::now();
    let mut removed = 0u64;
    for number in 0..args.objects {
        if rng.below(10) == 0 {
            continue;
        }
        let key = key(number);
        let id = ids(&fixture.id_key, std::slice::from_ref(&key))[0];
        fixture.remove(&LookupKey { id, key: Key::new(&key).expect("64 bytes are a key") });
        removed += 1;
        progress.at(number);
    }
    let took = started.elapsed();
    let ended = Instant::now();
    let share = |resident: u64| resident.saturating_sub(before) as f64 / grown as f64;
    let mut left = share(resident_bytes(std::process::id())?);
    while left > 0.4 && ended.elapsed() < Duration::from_secs(10) {
        // Leases of earlier lookups expire meanwhile; ticks then free the objects that they held.
        std::thread::sleep(Duration::from_millis(100));
        fixture.tick();
        left = share(resident_bytes(std::process::id())?);
    }
    let objects: usize = fixture.groups.iter().map(|group| group.objects()).sum();
    let row =
        ResultRow::new("meta", "memory_after_removal").with("removed", removed).with("objects_left", objects);
    // With fewer objects, memory that the benchmark itself used and freed is a large share.
    let row = if args.objects >= REMOVAL_JUDGED_FROM {
        row.with_target("share_of_growth", left, 0.4, false)
    } else {
        row.number("share_of_growth", left)
    };
    row.number("waited_s", ended.elapsed().as_secs_f64())
        .number("removals_per_s", removed as f64 / took.as_secs_f64())
        .print();
    Ok(())
}
