//! [`SimulatedQueue`]: runs operations in flight in a random order, so that callers cannot rely on one.

use std::fmt;
use std::io;

use moontide_rt::{SplitMix64, thread};

use super::state::Kind;
use super::{SECTOR_BYTES, SimulatedDisk};
use crate::storage::{Completion, Op, OpKind, OpSource, Queue, check};

/// Runs operations on a simulated disk.
pub(super) struct SimulatedQueue {
    disk: SimulatedDisk,
    depth: usize,
    rng: SplitMix64,
}

impl SimulatedQueue {
    pub(super) fn new(disk: SimulatedDisk, depth: usize, seed: u64) -> SimulatedQueue {
        SimulatedQueue { disk, depth: depth.max(1), rng: SplitMix64::new(seed) }
    }

    fn perform<'a>(&mut self, mut op: Op<'a>) -> Completion<'a> {
        let result = match check(&op, true) {
            Ok(true) => match op.kind {
                OpKind::Read => self.read(&mut op),
                OpKind::Write => self.write(&op),
                OpKind::Sync => {
                    let inode = self.disk.inode(&op.file);
                    self.disk.run(Kind::Sync, |state| state.sync(inode))
                }
            },
            Ok(false) => Ok(()),
            Err(err) => Err(err),
        };
        Completion { tag: op.tag, result, buffer: op.buffer }
    }

    fn read(&mut self, op: &mut Op<'_>) -> io::Result<()> {
        let inode = self.disk.inode(&op.file);
        let buffer = op.buffer.as_mut_slice().expect("checked");
        let after = self.disk.wait_before(Kind::Read);
        let (steps, flipped) = {
            let mut state = self.disk.state.lock();
            state.begin(Kind::Read)?;
            state.node(inode.id, inode.boot)?;
            let permille = state.faults.read_error_permille;
            state.fail_by_chance(permille)?;
            let faults = state.faults;
            let steps = steps(&mut self.rng, buffer.len(), faults.short_permille);
            state.counters.short_transfers += u64::from(steps.len() > 1);
            let flipped = self.rng.chance(faults.flipped_read_permille);
            (steps, flipped)
        };
        let mut start = 0;
        for end in steps {
            let mut state = self.disk.state.lock();
            state.read(inode, op.offset + start as u64, &mut buffer[start..end])?;
            start = end;
            drop(state);
            if start < buffer.len() {
                thread::yield_now();
            }
        }
        if flipped {
            let bit = self.rng.below(buffer.len() as u64 * 8) as usize;
            buffer[bit / 8] ^= 1 << (bit % 8);
            self.disk.state.lock().counters.flipped_reads += 1;
        }
        self.disk.pause(after);
        Ok(())
    }

    fn write(&mut self, op: &Op<'_>) -> io::Result<()> {
        let inode = self.disk.inode(&op.file);
        let bytes = op.buffer.as_slice();
        let after = self.disk.wait_before(Kind::Write);
        let steps = {
            let mut state = self.disk.state.lock();
            state.begin(Kind::Write)?;
            state.admit_write(inode, op.offset, bytes)?;
            let permille = state.faults.short_permille;
            let steps = steps(&mut self.rng, bytes.len(), permille);
            state.counters.short_transfers += u64::from(steps.len() > 1);
            if steps.len() == 1 {
                // The power may go off after this operation: it completes before.
                state.put(inode, op.offset, bytes)?;
                drop(state);
                self.disk.pause(after);
                return Ok(());
            }
            steps
        };
        let mut start = 0;
        for end in steps {
            let mut state = self.disk.state.lock();
            state.put(inode, op.offset + start as u64, &bytes[start..end])?;
            start = end;
            drop(state);
            if start < bytes.len() {
                thread::yield_now();
            }
        }
        self.disk.pause(after);
        Ok(())
    }
}

impl Queue for SimulatedQueue {
    fn engine(&self) -> &'static str {
        "simulated"
    }

    fn run<'a>(&mut self, source: &mut dyn OpSource<'a>) {
        let mut taken: Vec<Op<'a>> = vec![];
        loop {
            while taken.len() < self.depth {
                match source.next() {
                    Some(op) => taken.push(op),
                    None => break,
                }
            }
            if taken.is_empty() {
                return;
            }
            let index = self.rng.below(taken.len() as u64) as usize;
            let op = taken.swap_remove(index);
            source.done(self.perform(op));
        }
    }
}

impl fmt::Debug for SimulatedQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedQueue").field("depth", &self.depth).finish()
    }
}

/// Returns the ends of the steps of a transfer, multiples of a sector.
fn steps(rng: &mut SplitMix64, len: usize, permille: u32) -> Vec<usize> {
    let mut ends = vec![];
    if rng.chance(permille) {
        let mut at = 0;
        loop {
            at += (1 + rng.below((len / SECTOR_BYTES) as u64) as usize) * SECTOR_BYTES;
            if at >= len {
                break;
            }
            ends.push(at);
        }
    }
    ends.push(len);
    ends
}
