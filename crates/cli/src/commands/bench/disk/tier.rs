//! Ours: a tier in a directory, records made up for it, and reads of them as a node reads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_disk::{
    Aligned, BLOCK_BYTES, Backend, BackendConfig, BackendKind, DiskLayout, EvictionOrder, OsStorage, Queue,
    QueueConfig, ReadJob, RecordName, RegisteredMemory, Source, Storage, read_records,
};
use moontide_meta::Rng;
use moontide_types::bounds::PAGE_BYTES;
use moontide_types::record::{DigestContext, Flags, Header, KeySection, State, Word, trailer_crc};
use moontide_types::{Epoch, Key, ObjectId, Tenant, TenantGeneration};

use super::super::figures::{BenchError, cpu_time};
use super::{BATCH_BYTES, Measured};

/// Payloads are cut from so many bytes at most, each from another place.
const NOISE_BYTES: u64 = 64 << 20;

/// How records are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) record_bytes: u64,
    /// Records in flight.
    pub(super) depth: u64,
    /// Memory that is read into, at most.
    pub(super) memory_bytes: u64,
    pub(super) span: Duration,
    pub(super) seed: u64,
}

impl Case {
    /// Operations in flight: as many bytes as `depth` blocks of a record's size have, in pieces of a page.
    fn queue_depth(&self) -> usize {
        (self.depth * self.record_bytes.div_ceil(PAGE_BYTES)) as usize
    }

    /// Records that are handed over together: with one in flight one, else enough that draining the queue at the end of
    /// a batch hardly shows.
    pub(super) fn batch(&self) -> u64 {
        if self.depth == 1 {
            return 1;
        }
        (16 * self.depth).min(self.memory_bytes / self.record_bytes).max(2 * self.depth)
    }
}

/// A tier.
pub(super) struct Tier {
    storage: Arc<OsStorage>,
    backend: Box<dyn Backend>,
    /// Writes go through one of its own, as a node's do.
    writer: Box<dyn Queue>,
    noise: Aligned,
    names: Vec<RecordName>,
}

/// Everything of a record but its payload.
struct Made {
    header: Header,
    digests: Vec<u8>,
    key: Vec<u8>,
    /// Where its payload starts in the noise.
    at: usize,
}

/// What reads of one case need.
pub(super) struct Reader {
    /// Gone before the memory that is registered with it.
    queue: Box<dyn Queue>,
    arena: Aligned,
}

impl Reader {
    pub(super) fn is_registered(&self) -> bool {
        self.queue.is_registered()
    }
}

impl Tier {
    /// Bytes that a tier with so many bytes of payload may use: fronts, books and unfinished files beside them.
    pub(super) fn limit_bytes(payload_bytes: u64) -> u64 {
        (payload_bytes / 4).saturating_mul(5).saturating_add(256 << 20)
    }

    /// An empty tier for so many bytes of payload, in records of this size.
    pub(super) fn open(
        storage: Arc<OsStorage>,
        kind: BackendKind,
        payload_bytes: u64,
        record_bytes: u64,
    ) -> Result<Tier, BenchError> {
        let mut writer = storage.queue(&QueueConfig::default());
        let config =
            BackendConfig { limit_bytes: Tier::limit_bytes(payload_bytes), order: EvictionOrder::Fifo };
        let opened = kind.open(Arc::clone(&storage) as Arc<dyn Storage>, &mut *writer, config, &mut |_| {});
        let (backend, _) = opened.map_err(|error| BenchError::Wrong(error.to_string()))?;
        let mut noise =
            Aligned::zeroed(payload_bytes.clamp(record_bytes, NOISE_BYTES.max(record_bytes)) as usize);
        let mut rng = Rng::new(payload_bytes);
        noise.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&rng.next_u64().to_le_bytes()));
        Ok(Tier { storage, backend, writer, noise, names: vec![] })
    }

    /// Writes records with these numbers, a batch at a time.
    pub(super) fn write(
        &mut self,
        first: u64,
        count: u64,
        record_bytes: u64,
    ) -> Result<Measured, BenchError> {
        let made: Vec<Made> =
            (first..first + count).map(|number| make(&self.noise, number, record_bytes)).collect();
        let sources: Vec<Source<'_>> = made
            .iter()
            .map(|made| Source {
                header: &made.header,
                payload: &self.noise[made.at..][..record_bytes as usize],
                digests: &made.digests,
                key: &made.key,
                attributes: &[],
            })
            .collect();
        let cpu_before = cpu_time(std::process::id())?;
        let started = Instant::now();
        for batch in sources.chunks((BATCH_BYTES / record_bytes).max(1) as usize) {
            for outcome in self.backend.write(&mut *self.writer, batch) {
                outcome.map_err(|error| BenchError::Wrong(format!("a record was not written: {error}")))?;
            }
        }
        let took = started.elapsed();
        let cpu = cpu_time(std::process::id())?.saturating_sub(cpu_before);
        self.names.extend(made.iter().map(|made| RecordName::of(&made.header)));
        Ok(Measured::new(count * record_bytes, took, cpu))
    }

    /// A queue and memory for a case.
    pub(super) fn reader(&self, case: &Case) -> Reader {
        let record_len = disk_len(case.record_bytes);
        let mut arena = Aligned::zeroed((case.batch() * record_len) as usize);
        // The first touch of a page is not the disk's time.
        arena.iter_mut().step_by(BLOCK_BYTES).for_each(|byte| *byte = 1);
        let registered = Some(RegisteredMemory { address: arena.as_ptr().addr(), len: arena.len() });
        let queue = self.storage.queue(&QueueConfig { depth: case.queue_depth(), registered });
        Reader { queue, arena }
    }

    /// Finds, reads and verifies records at random until the time is over.
    pub(super) fn read(&self, reader: &mut Reader, case: &Case, round: u64) -> Result<Measured, BenchError> {
        let mut rng = Rng::new(case.seed ^ (round << 32) ^ (case.depth << 16) ^ case.record_bytes);
        let Reader { queue, arena } = reader;
        let record_len = disk_len(case.record_bytes) as usize;
        let mut bytes = 0;
        let cpu_before = cpu_time(std::process::id())?;
        let started = Instant::now();
        while started.elapsed() < case.span {
            let mut jobs = Vec::with_capacity(case.batch() as usize);
            for into in arena.chunks_exact_mut(record_len) {
                let name = self.names[rng.below(self.names.len())];
                let location = self.backend.locate(&name).ok_or_else(|| wrong("a record cannot be found"))?;
                jobs.push(ReadJob { name, location, into });
            }
            for outcome in read_records(&mut **queue, jobs) {
                bytes += outcome.map_err(wrong)?.stripe_len;
            }
        }
        let took = started.elapsed();
        let cpu = cpu_time(std::process::id())?.saturating_sub(cpu_before);
        Ok(Measured::new(bytes, took, cpu))
    }
}

fn wrong(error: impl ToString) -> BenchError {
    BenchError::Wrong(format!("reading a record: {}", error.to_string()))
}

/// Bytes of a record on disk: all of one size have keys of one size.
fn disk_len(record_bytes: u64) -> u64 {
    DiskLayout::of(&header(0, record_bytes, 1, 0, &key(0))).len
}

/// Tenant and key of a record, as they are stored.
fn key(number: u64) -> Vec<u8> {
    let mut encoded = vec![];
    let text = format!("bench/disk/{number:016x}");
    let key = Key::new(text.as_bytes()).expect("a short key");
    KeySection { tenant: Tenant::DEFAULT, key }.encode(&mut encoded);
    encoded
}

fn id(number: u64) -> ObjectId {
    let mut rng = Rng::new(number);
    let mut id = [0; 16];
    id.chunks_mut(8).for_each(|half| half.copy_from_slice(&rng.next_u64().to_le_bytes()));
    ObjectId(id)
}

fn header(number: u64, record_bytes: u64, version: u64, root: u64, key: &[u8]) -> Header {
    Header {
        flags: Flags::NONE,
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

/// The record with this number. All versions are 1.
fn make(noise: &[u8], number: u64, record_bytes: u64) -> Made {
    let places = (noise.len() - record_bytes as usize) / BLOCK_BYTES + 1;
    let at = number as usize * 17 % places * BLOCK_BYTES;
    let version = Epoch::from_bits(1).expect("a version of 62 bits");
    let context = DigestContext { id: id(number), version, stripe: 0, len: record_bytes };
    let mut digests = vec![];
    let payload = &noise[at..][..record_bytes as usize];
    let root = context.payload(payload, |digest| digests.extend(digest.to_le_bytes()));
    let key = key(number);
    Made { header: header(number, record_bytes, 1, root, &key), digests, key, at }
}
