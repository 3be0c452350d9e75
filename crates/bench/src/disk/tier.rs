//! The measured disk tier: generated records, and reads as a node performs them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_disk::{
    AlignedBuf, BLOCK_BYTES, Backend, BackendConfig, BackendKind, DiskLayout, EvictionPolicy, OsStorage,
    Queue, QueueConfig, ReadJob, RecordId, RecordSource, RegisteredMemory, Storage, read_records,
};
use moontide_rt::SplitMix64;
use moontide_types::limits::PAGE_BYTES;
use moontide_types::record::{DigestContext, Header, KeySection, RecordFlags, State, Word, trailer_crc};
use moontide_types::{Epoch, Key, ObjectId, Tenant, TenantGeneration};

use super::{BATCH_BYTES, Measurement};
use crate::process::cpu_time;
use crate::results::BenchError;

/// Maximum size of the pool of random bytes; payloads are slices of it at different offsets.
const RANDOM_POOL_BYTES: u64 = 64 << 20;

/// Parameters of a case.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) record_bytes: u64,
    /// Records in flight.
    pub(super) depth: u64,
    /// Maximum memory for reads.
    pub(super) memory_bytes: u64,
    pub(super) span: Duration,
    pub(super) seed: u64,
}

impl Case {
    /// Operations in flight: the bytes of `depth` records, in pieces of a page.
    fn queue_depth(&self) -> usize {
        (self.depth * self.record_bytes.div_ceil(PAGE_BYTES)) as usize
    }

    /// Records per batch: one at depth 1, else enough that draining the queue at the end of a batch has little effect.
    pub(super) fn batch(&self) -> u64 {
        if self.depth == 1 {
            return 1;
        }
        (16 * self.depth).min(self.memory_bytes / self.record_bytes).max(2 * self.depth)
    }
}

/// A disk tier.
pub(super) struct Tier {
    storage: Arc<OsStorage>,
    backend: Box<dyn Backend>,
    /// Separate queue for writes, as in a node.
    writer: Box<dyn Queue>,
    random_pool: AlignedBuf,
    names: Vec<RecordId>,
}

/// All parts of a record except the payload.
struct PreparedRecord {
    header: Header,
    digests: Vec<u8>,
    key: Vec<u8>,
    /// Offset of the payload in the random pool.
    at: usize,
}

/// Queue and memory for the reads of one case.
pub(super) struct Reader {
    /// Dropped before the memory that is registered with it.
    queue: Box<dyn Queue>,
    arena: AlignedBuf,
}

impl Reader {
    pub(super) fn is_registered(&self) -> bool {
        self.queue.is_registered()
    }
}

impl Tier {
    /// Size limit of a tier with `payload_bytes` of payload: includes preambles, metadata and unfinished files.
    pub(super) fn limit_bytes(payload_bytes: u64) -> u64 {
        (payload_bytes / 4).saturating_mul(5).saturating_add(256 << 20)
    }

    /// Opens an empty tier for `payload_bytes` of payload in records of `record_bytes`.
    pub(super) fn open(
        storage: Arc<OsStorage>,
        kind: BackendKind,
        payload_bytes: u64,
        record_bytes: u64,
    ) -> Result<Tier, BenchError> {
        let mut writer = storage.queue(&QueueConfig::default());
        let config = BackendConfig {
            limit_bytes: Tier::limit_bytes(payload_bytes),
            eviction_policy: EvictionPolicy::Fifo,
        };
        let opened = kind.open(Arc::clone(&storage) as Arc<dyn Storage>, &mut *writer, config, &mut |_| {});
        let (backend, _) = opened.map_err(|error| BenchError::Wrong(error.to_string()))?;
        let mut random_pool = AlignedBuf::zeroed(
            payload_bytes.clamp(record_bytes, RANDOM_POOL_BYTES.max(record_bytes)) as usize,
        );
        let mut rng = SplitMix64::new(payload_bytes);
        rng.fill(&mut random_pool);
        Ok(Tier { storage, backend, writer, random_pool, names: vec![] })
    }

    /// Writes `count` records from number `first` on, in batches.
    pub(super) fn write(
        &mut self,
        first: u64,
        count: u64,
        record_bytes: u64,
    ) -> Result<Measurement, BenchError> {
        let prepared: Vec<PreparedRecord> =
            (first..first + count).map(|number| prepare(&self.random_pool, number, record_bytes)).collect();
        let sources: Vec<RecordSource<'_>> = prepared
            .iter()
            .map(|record| RecordSource {
                header: &record.header,
                payload: &self.random_pool[record.at..][..record_bytes as usize],
                digests: &record.digests,
                key: &record.key,
                attributes: &[],
            })
            .collect();
        let cpu_before = cpu_time(std::process::id())?;
        let started = Instant::now();
        for batch in sources.chunks((BATCH_BYTES / record_bytes).max(1) as usize) {
            for outcome in self.backend.write(&mut *self.writer, batch) {
                outcome.map_err(|error| BenchError::Wrong(format!("writing a record: {error}")))?;
            }
        }
        let took = started.elapsed();
        let cpu = cpu_time(std::process::id())?.saturating_sub(cpu_before);
        self.names.extend(prepared.iter().map(|record| RecordId::of(&record.header)));
        Ok(Measurement::new(count * record_bytes, took, cpu))
    }

    /// Creates queue and memory for a case.
    pub(super) fn reader(&self, case: &Case) -> Reader {
        let record_len = disk_len(case.record_bytes);
        let mut arena = AlignedBuf::zeroed((case.batch() * record_len) as usize);
        // Page faults are not measured.
        arena.iter_mut().step_by(BLOCK_BYTES).for_each(|byte| *byte = 1);
        let registered = Some(RegisteredMemory { address: arena.as_ptr().addr(), len: arena.len() });
        let queue = self.storage.queue(&QueueConfig { depth: case.queue_depth(), registered });
        Reader { queue, arena }
    }

    /// Finds, reads and verifies random records for `case.span`.
    pub(super) fn read(
        &self,
        reader: &mut Reader,
        case: &Case,
        round: u64,
    ) -> Result<Measurement, BenchError> {
        let mut rng = SplitMix64::new(case.seed ^ (round << 32) ^ (case.depth << 16) ^ case.record_bytes);
        let Reader { queue, arena } = reader;
        let record_len = disk_len(case.record_bytes) as usize;
        let mut bytes = 0;
        let cpu_before = cpu_time(std::process::id())?;
        let started = Instant::now();
        while started.elapsed() < case.span {
            let mut jobs = Vec::with_capacity(case.batch() as usize);
            for into in arena.chunks_exact_mut(record_len) {
                let name = self.names[rng.index(self.names.len())];
                let location = self.backend.locate(&name).ok_or_else(|| wrong("not found"))?;
                jobs.push(ReadJob::whole(name, location, into));
            }
            for outcome in read_records(&mut **queue, jobs) {
                bytes += outcome.map_err(wrong)?.stripe_len;
            }
        }
        let took = started.elapsed();
        let cpu = cpu_time(std::process::id())?.saturating_sub(cpu_before);
        Ok(Measurement::new(bytes, took, cpu))
    }
}

fn wrong(error: impl ToString) -> BenchError {
    BenchError::Wrong(format!("reading a record: {}", error.to_string()))
}

/// Bytes of a record on disk; all keys have the same length.
fn disk_len(record_bytes: u64) -> u64 {
    DiskLayout::of(&header(0, record_bytes, 1, 0, &key(0))).len
}

/// Encoded tenant and key of a record.
fn key(number: u64) -> Vec<u8> {
    let mut encoded = vec![];
    let text = format!("bench/disk/{number:016x}");
    let key = Key::new(text.as_bytes()).expect("a short key");
    KeySection { tenant: Tenant::DEFAULT, key }.encode(&mut encoded);
    encoded
}

fn id(number: u64) -> ObjectId {
    let mut rng = SplitMix64::new(number);
    let mut id = [0; 16];
    rng.fill(&mut id);
    ObjectId(id)
}

fn header(number: u64, record_bytes: u64, version: u64, root: u64, key: &[u8]) -> Header {
    Header {
        flags: RecordFlags::NONE,
        id: id(number),
        word: Word::new(Epoch::from_bits(version).expect("a version of 62 bits"), State::Ready),
        object_len: record_bytes,
        stripe_offset: 0,
        stripe_len: record_bytes,
        payload_offset: BLOCK_BYTES as u64,
        root,
        stripe_index: 0,
        stripe_count: 1,
        key_len: key.len() as u32,
        attributes_len: 0,
        trailer_crc: trailer_crc(key, &[]),
        id_key: 0,
        tenant_generation: TenantGeneration(0),
    }
}

/// Prepares the record with this number. All versions are 1.
fn prepare(random_pool: &[u8], number: u64, record_bytes: u64) -> PreparedRecord {
    let offsets = (random_pool.len() - record_bytes as usize) / BLOCK_BYTES + 1;
    let at = number as usize * 17 % offsets * BLOCK_BYTES;
    let version = Epoch::from_bits(1).expect("a version of 62 bits");
    let context = DigestContext { id: id(number), version, stripe: 0, len: record_bytes };
    let mut digests = vec![];
    let payload = &random_pool[at..][..record_bytes as usize];
    let root = context.payload(payload, |digest| digests.extend(digest.to_le_bytes()));
    let key = key(number);
    PreparedRecord { header: header(number, record_bytes, 1, root, &key), digests, key, at }
}
