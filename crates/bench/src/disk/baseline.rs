//! The limit without `fio`: the same I/O engine on plain files, without records, index and verification.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use moontide_disk::{
    AlignedBuf, BLOCK_BYTES, Buffer, Completion, File, Op, OpKind, OpSource, OpenMode, OsStorage,
    QueueConfig, Storage, sync,
};
use moontide_rt::SplitMix64;

use super::tier::Case;
use super::{BATCH_BYTES, Measurement};
use crate::process::cpu_time;
use crate::results::{BenchError, io};

/// Block size of sequential writes.
const WRITE_BLOCK_BYTES: usize = 1 << 20;

/// Plain files and the I/O engine.
pub(super) struct BaselineLoop {
    storage: Arc<OsStorage>,
    seed: u64,
    files: Vec<(File, u64)>,
}

impl BaselineLoop {
    pub(super) fn new(storage: Arc<OsStorage>, seed: u64) -> BaselineLoop {
        BaselineLoop { storage, seed, files: vec![] }
    }

    /// Writes a new file in blocks of 1 MiB, with a sync after each batch.
    pub(super) fn write(&mut self, bytes: u64) -> Result<Measurement, BenchError> {
        let block = WRITE_BLOCK_BYTES as u64;
        let blocks = bytes.div_ceil(block);
        let mut queue = self.storage.queue(&QueueConfig::default());
        let mut content = AlignedBuf::zeroed(WRITE_BLOCK_BYTES);
        let mut rng = SplitMix64::new(self.seed);
        rng.fill(&mut content);
        let name = format!("loop-{}", self.files.len());
        let file = self.storage.open(Path::new(&name), OpenMode::Create).map_err(io("creating a file"))?;
        let cpu_before = cpu_time(std::process::id())?;
        let started = Instant::now();
        self.storage.allocate(&file, blocks * block).map_err(io("allocating a file"))?;
        let numbers: Vec<u64> = (0..blocks).collect();
        for batch in numbers.chunks((BATCH_BYTES / block) as usize) {
            let ops = batch.iter().map(|number| Op {
                tag: 0,
                kind: OpKind::Write,
                file: file.clone(),
                offset: number * block,
                buffer: Buffer::Borrowed(&content),
            });
            for done in moontide_disk::run_all(&mut *queue, ops) {
                done.result.map_err(io("writing a file"))?;
            }
            sync(&mut *queue, &file).map_err(io("syncing a file"))?;
        }
        let took = started.elapsed();
        let cpu = cpu_time(std::process::id())?.saturating_sub(cpu_before);
        self.files.push((file, blocks * block));
        Ok(Measurement::new(blocks * block, took, cpu))
    }

    /// Reads random blocks for `case.span`, with `case.depth` in flight.
    pub(super) fn read(&self, case: &Case, round: u64) -> Result<Measurement, BenchError> {
        let block = case.record_bytes.next_multiple_of(BLOCK_BYTES as u64);
        let mut queue =
            self.storage.queue(&QueueConfig { depth: case.depth as usize, ..QueueConfig::default() });
        // As much memory as the tier uses: reads into memory in the CPU cache are faster.
        let mut memory = AlignedBuf::zeroed((case.batch() * block) as usize);
        memory.iter_mut().step_by(BLOCK_BYTES).for_each(|byte| *byte = 1);
        let cpu_before = cpu_time(std::process::id())?;
        let started = Instant::now();
        let mut reads = Reads {
            files: &self.files,
            block,
            until: started + case.span,
            rng: SplitMix64::new(self.seed ^ round << 32),
            idle: memory.chunks_exact_mut(block as usize).collect(),
            bytes: 0,
            error: None,
        };
        queue.run(&mut reads);
        let took = started.elapsed();
        let cpu = cpu_time(std::process::id())?.saturating_sub(cpu_before);
        match reads.error {
            Some(error) => Err(io("reading a file")(error)),
            None => Ok(Measurement::new(reads.bytes, took, cpu)),
        }
    }
}

/// Source of random reads until a point in time.
struct Reads<'a, 'f> {
    files: &'f [(File, u64)],
    block: u64,
    until: Instant,
    rng: SplitMix64,
    /// Free buffers, used in turn so that all of the memory is used.
    idle: VecDeque<&'a mut [u8]>,
    bytes: u64,
    error: Option<std::io::Error>,
}

impl<'a> OpSource<'a> for Reads<'a, '_> {
    fn next(&mut self) -> Option<Op<'a>> {
        if self.error.is_some() || Instant::now() >= self.until {
            return None;
        }
        let buffer = Buffer::BorrowedMut(self.idle.pop_front()?);
        let (file, len) = &self.files[self.rng.index(self.files.len())];
        let offset = self.rng.index((len / self.block) as usize) as u64 * self.block;
        Some(Op { tag: 0, kind: OpKind::Read, file: file.clone(), offset, buffer })
    }

    fn done(&mut self, done: Completion<'a>) {
        match (done.result, done.buffer) {
            (Ok(()), Buffer::BorrowedMut(buffer)) => {
                self.bytes += self.block;
                self.idle.push_back(buffer);
            }
            (Err(error), _) => self.error = Some(error),
            (Ok(()), _) => unreachable!("a queue returns the buffer of its operation"),
        }
    }
}
