//! The limit where there is no `fio`: the same engine on plain files, without records, index and verification.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use moontide_disk::{
    Aligned, BLOCK_BYTES, Buffer, Done, File, Mode, Op, OpKind, OsStorage, QueueConfig, Storage, Work, sync,
};
use moontide_meta::Rng;

use super::super::figures::{BenchError, cpu_time, io};
use super::tier::Case;
use super::{BATCH_BYTES, Measured};

/// Blocks of sequential writes.
const WRITE_BLOCK_BYTES: usize = 1 << 20;

/// Plain files, and our engine.
pub(super) struct BareLoop {
    storage: Arc<OsStorage>,
    seed: u64,
    files: Vec<(File, u64)>,
}

impl BareLoop {
    pub(super) fn new(storage: Arc<OsStorage>, seed: u64) -> BareLoop {
        BareLoop { storage, seed, files: vec![] }
    }

    /// Writes a new file in blocks of 1 MiB, with a sync after each batch.
    pub(super) fn write(&mut self, bytes: u64) -> Result<Measured, BenchError> {
        let block = WRITE_BLOCK_BYTES as u64;
        let blocks = bytes.div_ceil(block);
        let mut queue = self.storage.queue(&QueueConfig::default());
        let mut content = Aligned::zeroed(WRITE_BLOCK_BYTES);
        let mut rng = Rng::new(self.seed);
        content.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&rng.next_u64().to_le_bytes()));
        let name = format!("loop-{}", self.files.len());
        let file = self.storage.open(Path::new(&name), Mode::Create).map_err(io("making a file"))?;
        let cpu_before = cpu_time(std::process::id())?;
        let started = Instant::now();
        self.storage.allocate(&file, blocks * block).map_err(io("making room for a file"))?;
        let numbers: Vec<u64> = (0..blocks).collect();
        for batch in numbers.chunks((BATCH_BYTES / block) as usize) {
            let ops = batch.iter().map(|number| Op {
                tag: 0,
                kind: OpKind::Write,
                file: file.clone(),
                offset: number * block,
                buffer: Buffer::Lent(&content),
            });
            for done in moontide_disk::run_all(&mut *queue, ops) {
                done.result.map_err(io("writing a file"))?;
            }
            sync(&mut *queue, &file).map_err(io("syncing a file"))?;
        }
        let took = started.elapsed();
        let cpu = cpu_time(std::process::id())?.saturating_sub(cpu_before);
        self.files.push((file, blocks * block));
        Ok(Measured::new(blocks * block, took, cpu))
    }

    /// Reads blocks at random, as many at a time as the case says, until the time is over.
    pub(super) fn read(&self, case: &Case, round: u64) -> Result<Measured, BenchError> {
        let block = case.record_bytes.next_multiple_of(BLOCK_BYTES as u64);
        let mut queue =
            self.storage.queue(&QueueConfig { depth: case.depth as usize, ..QueueConfig::default() });
        // The same memory as ours has: what stays in a processor's cache is filled faster.
        let mut memory = Aligned::zeroed((case.batch() * block) as usize);
        memory.iter_mut().step_by(BLOCK_BYTES).for_each(|byte| *byte = 1);
        let cpu_before = cpu_time(std::process::id())?;
        let started = Instant::now();
        let mut reads = Reads {
            files: &self.files,
            block,
            until: started + case.span,
            rng: Rng::new(self.seed ^ round << 32),
            idle: memory.chunks_exact_mut(block as usize).collect(),
            bytes: 0,
            error: None,
        };
        queue.run(&mut reads);
        let took = started.elapsed();
        let cpu = cpu_time(std::process::id())?.saturating_sub(cpu_before);
        match reads.error {
            Some(error) => Err(io("reading a file")(error)),
            None => Ok(Measured::new(reads.bytes, took, cpu)),
        }
    }
}

/// Reads at random until some time.
struct Reads<'a, 'f> {
    files: &'f [(File, u64)],
    block: u64,
    until: Instant,
    rng: Rng,
    /// Used one after the other, so that all of it is.
    idle: VecDeque<&'a mut [u8]>,
    bytes: u64,
    error: Option<std::io::Error>,
}

impl<'a> Work<'a> for Reads<'a, '_> {
    fn next(&mut self) -> Option<Op<'a>> {
        if self.error.is_some() || Instant::now() >= self.until {
            return None;
        }
        let buffer = Buffer::Fill(self.idle.pop_front()?);
        let (file, len) = &self.files[self.rng.below(self.files.len())];
        let offset = self.rng.below((len / self.block) as usize) as u64 * self.block;
        Some(Op { tag: 0, kind: OpKind::Read, file: file.clone(), offset, buffer })
    }

    fn done(&mut self, done: Done<'a>) {
        match (done.result, done.buffer) {
            (Ok(()), Buffer::Fill(buffer)) => {
                self.bytes += self.block;
                self.idle.push_back(buffer);
            }
            (Err(error), _) => self.error = Some(error),
            (Ok(()), _) => unreachable!("a queue gives back the buffer that it took"),
        }
    }
}
