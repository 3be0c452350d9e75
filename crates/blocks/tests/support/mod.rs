//! Shared code of the cache tests: random numbers, a store in memory with injected faults, a long-lived reader.

#![allow(dead_code, reason = "each test file uses a part")]

use std::cell::RefCell;
use std::collections::HashMap;

use moontide_blocks::{
    BlockHash, BlockSource, BlockStore, BlockTarget, CacheShape, Guard, PinnedBlocks, Plane, Reader, Rows,
    SequenceId, View,
};
use moontide_rt::SplitMix64;

/// Returns random numbers of a seed. The seed is mixed; otherwise the sequence of one seed would be that of the next seed,
/// shifted by one.
pub(crate) fn random(seed: u64) -> SplitMix64 {
    let mut random = SplitMix64::new(mix(mix(seed)));
    random.next_u64(); // seeds of earlier failures count from the second number
    random
}

/// Returns a deterministic pseudo-random number.
pub(crate) fn mix(number: u64) -> u64 {
    SplitMix64::new(number).next_u64()
}

/// Fault mode of a store.
#[derive(Clone, Copy, Debug, Default)]
enum FaultMode {
    #[default]
    None,
    /// Every request fails.
    FailAll,
    /// Saves and loads only this many blocks of a request; of the next one it writes a part.
    Limit(usize),
}

/// A store in memory.
#[derive(Debug, Default)]
pub(crate) struct MemoryStore {
    blocks: RefCell<HashMap<BlockHash, Vec<u8>>>,
    fault_mode: FaultMode,
}

/// Injected failure.
#[derive(Debug, thiserror::Error)]
#[error("injected store failure")]
pub(crate) struct Failed;

impl MemoryStore {
    /// Changes the fault mode, and sometimes drops a block.
    pub(crate) fn change_fault_mode(&mut self, random: &mut SplitMix64) {
        self.fault_mode = match random.below(10) {
            0 => FaultMode::FailAll,
            1 => FaultMode::Limit(random.below(3) as usize),
            _ => FaultMode::None,
        };
        if random.below(4) == 0 {
            let mut blocks = self.blocks.borrow_mut();
            let mut all: Vec<_> = blocks.keys().copied().collect();
            all.sort_unstable();
            if !all.is_empty() {
                blocks.remove(&all[random.below(all.len() as u64) as usize]);
            }
        }
    }

    /// Drops a block.
    pub(crate) fn remove(&self, hash: &BlockHash) {
        assert!(self.blocks.borrow_mut().remove(hash).is_some(), "block did not exist");
    }

    fn block_limit(&self) -> Result<usize, Failed> {
        match self.fault_mode {
            FaultMode::None => Ok(usize::MAX),
            FaultMode::FailAll => Err(Failed),
            FaultMode::Limit(count) => Ok(count),
        }
    }
}

impl BlockStore for MemoryStore {
    type Error = Failed;

    fn prefix(&self, blocks: &[BlockHash]) -> Result<usize, Failed> {
        self.block_limit()?;
        let stored = self.blocks.borrow();
        Ok(blocks.iter().take_while(|hash| stored.contains_key(hash)).count())
    }

    fn load(&self, blocks: &mut [BlockTarget<'_>]) -> Result<usize, Failed> {
        let block_limit = self.block_limit()?;
        let stored = self.blocks.borrow();
        for (at, block) in blocks.iter_mut().enumerate() {
            let Some(bytes) = stored.get(&block.hash) else { return Ok(at) };
            let mut rest = &bytes[..];
            for piece in &mut block.pieces {
                let (now, later) = rest.split_at(piece.len());
                piece.copy_from_slice(now);
                rest = later;
                if at >= block_limit {
                    return Ok(at);
                }
            }
            assert!(rest.is_empty(), "saved block is longer than the target");
        }
        Ok(blocks.len())
    }

    fn save(&self, blocks: &[BlockSource<'_>]) -> Result<usize, Failed> {
        let block_limit = self.block_limit()?.min(blocks.len());
        for block in &blocks[..block_limit] {
            let bytes = block.pieces.concat();
            let before = self.blocks.borrow_mut().insert(block.hash, bytes.clone());
            // Different content under an existing hash means a wrong hash.
            assert!(before.is_none_or(|before| before == bytes), "different content under the same hash");
        }
        Ok(block_limit)
    }
}

/// An active reader, and its view of a sequence.
pub(crate) struct Watch {
    view: View<'static>,
    guard: Option<Guard<'static>>,
    reader: *mut Reader,
}

impl Watch {
    pub(crate) fn new(reader: Reader, id: SequenceId) -> Watch {
        let reader = Box::into_raw(Box::new(reader));
        // SAFETY: freed in `drop`, after the guard.
        let guard = unsafe { &mut *reader }.enter();
        let view = guard.view(id).expect("sequence exists");
        // SAFETY: the view is dropped, or not used any more, when the guard is.
        let view = unsafe { std::mem::transmute::<View<'_>, View<'static>>(view) };
        Watch { view, guard: Some(guard), reader }
    }

    pub(crate) fn view(&self) -> View<'_> {
        self.view
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: from `Box::into_raw`, and nothing borrows from it any more.
        drop(unsafe { Box::from_raw(self.reader) });
    }
}

/// Returns the bytes of a head, by its row's number, plane, layer, head and length.
type Bytes<'a> = &'a dyn Fn(u64, Plane, u32, usize, usize) -> Vec<u8>;

/// Checks that a view has these rows.
pub(crate) fn check_view(shape: &CacheShape, view: &View<'_>, rows: &[u64], bytes: Bytes<'_>) {
    assert_eq!((view.tokens(), view.block_count()), (rows.len(), shape.blocks_for(rows.len())));
    for (plane, layer) in all_planes_and_layers(shape) {
        let blocks = (0..view.block_count()).map(|at| view.rows(plane, layer, at)).collect();
        check_rows(shape, (plane, layer), blocks, view.contiguous(plane, layer), rows, bytes);
    }
}

/// Checks that a pin has these rows.
pub(crate) fn check_pinned(shape: &CacheShape, pinned: &PinnedBlocks, rows: &[u64], bytes: Bytes<'_>) {
    assert_eq!((pinned.tokens(), pinned.len()), (rows.len(), shape.blocks_for(rows.len())));
    for (plane, layer) in all_planes_and_layers(shape) {
        let blocks = (0..pinned.len()).map(|at| pinned.rows(plane, layer, at)).collect();
        check_rows(shape, (plane, layer), blocks, pinned.contiguous(plane, layer), rows, bytes);
    }
}

fn all_planes_and_layers(shape: &CacheShape) -> impl Iterator<Item = (Plane, u32)> {
    shape.planes().iter().flat_map(|plane| (0..shape.layers).map(|layer| (*plane, layer)))
}

fn check_rows(
    shape: &CacheShape,
    (plane, layer): (Plane, u32),
    blocks: Vec<Rows<'_>>,
    contiguous: Option<Rows<'_>>,
    rows: &[u64],
    bytes: Bytes<'_>,
) {
    for (at, block) in blocks.iter().enumerate() {
        for token in 0..block.tokens() {
            let index = at * shape.block_tokens as usize + token;
            for head in 0..shape.heads() {
                let expected = bytes(rows[index], plane, layer, head, shape.row_bytes());
                assert_eq!(block.head(token, head), expected, "token {index} in block {at}");
                if let Some(contiguous) = &contiguous {
                    assert_eq!(
                        contiguous.head(index, head),
                        expected,
                        "token {index} of the contiguous view"
                    );
                }
            }
        }
    }
}
