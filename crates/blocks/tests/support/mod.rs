//! What tests of the cache have in common: numbers by chance, a store in memory that fails now and then, a reader that
//! stays.

#![allow(dead_code, reason = "each test file uses some of it")]

use std::cell::RefCell;
use std::collections::HashMap;

use moontide_blocks::{
    BlockHash, Destination, Guard, Held, Plane, Reader, Rows, SequenceId, Shape, Source, Store, View,
};

/// SplitMix64. The seed is mixed, or the numbers of one seed would be those of the next, one step on.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(mix(mix(seed)))
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0) % end
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A number that looks like chance, and is always the same.
pub(crate) fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(GOLDEN);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// What a store does for a while.
#[derive(Clone, Copy, Debug, Default)]
enum Mood {
    #[default]
    Well,
    /// Answers nothing.
    Fails,
    /// Takes, and brings, only so many blocks of a request; of the next one it writes half.
    Partly(usize),
}

/// A store in memory.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    blocks: RefCell<HashMap<BlockHash, Vec<u8>>>,
    mood: Mood,
}

/// It was told to fail.
#[derive(Debug, thiserror::Error)]
#[error("the store is in a bad mood")]
pub(crate) struct Failed;

impl Memory {
    /// Another mood, and perhaps something forgotten.
    pub(crate) fn moody(&mut self, random: &mut Random) {
        self.mood = match random.below(10) {
            0 => Mood::Fails,
            1 => Mood::Partly(random.below(3) as usize),
            _ => Mood::Well,
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

    /// Loses a block.
    pub(crate) fn forget(&self, hash: &BlockHash) {
        assert!(self.blocks.borrow_mut().remove(hash).is_some(), "it was there");
    }

    fn most(&self) -> Result<usize, Failed> {
        match self.mood {
            Mood::Well => Ok(usize::MAX),
            Mood::Fails => Err(Failed),
            Mood::Partly(count) => Ok(count),
        }
    }
}

impl Store for Memory {
    type Error = Failed;

    fn prefix(&self, blocks: &[BlockHash]) -> Result<usize, Failed> {
        self.most()?;
        let stored = self.blocks.borrow();
        Ok(blocks.iter().take_while(|hash| stored.contains_key(hash)).count())
    }

    fn load(&self, blocks: &mut [Destination<'_>]) -> Result<usize, Failed> {
        let most = self.most()?;
        let stored = self.blocks.borrow();
        for (at, block) in blocks.iter_mut().enumerate() {
            let Some(bytes) = stored.get(&block.hash) else { return Ok(at) };
            let mut rest = &bytes[..];
            for piece in &mut block.pieces {
                let (now, later) = rest.split_at(piece.len());
                piece.copy_from_slice(now);
                rest = later;
                if at >= most {
                    return Ok(at);
                }
            }
            assert!(rest.is_empty(), "as long as what was saved");
        }
        Ok(blocks.len())
    }

    fn save(&self, blocks: &[Source<'_>]) -> Result<usize, Failed> {
        let most = self.most()?.min(blocks.len());
        for block in &blocks[..most] {
            let bytes = block.pieces.concat();
            let before = self.blocks.borrow_mut().insert(block.hash, bytes.clone());
            // Who saves something else under a name that is taken has named it wrongly.
            assert!(before.is_none_or(|before| before == bytes), "another content under the same name");
        }
        Ok(most)
    }
}

/// A reader that is in, and what it sees of a sequence.
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
        let view = guard.view(id).expect("a sequence that is there");
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

/// What the bytes of a head are, by its row's number, plane, layer, head and length.
type Bytes<'a> = &'a dyn Fn(u64, Plane, u32, usize, usize) -> Vec<u8>;

/// That a view shows these rows.
pub(crate) fn check_view(shape: &Shape, view: &View<'_>, rows: &[u64], bytes: Bytes<'_>) {
    assert_eq!((view.tokens(), view.block_count()), (rows.len(), shape.blocks_for(rows.len())));
    for (plane, layer) in everywhere(shape) {
        let blocks = (0..view.block_count()).map(|at| view.rows(plane, layer, at)).collect();
        check_rows(shape, (plane, layer), blocks, view.contiguous(plane, layer), rows, bytes);
    }
}

/// That what is pinned shows these rows.
pub(crate) fn check_pinned(shape: &Shape, pinned: &Held, rows: &[u64], bytes: Bytes<'_>) {
    assert_eq!((pinned.tokens(), pinned.len()), (rows.len(), shape.blocks_for(rows.len())));
    for (plane, layer) in everywhere(shape) {
        let blocks = (0..pinned.len()).map(|at| pinned.rows(plane, layer, at)).collect();
        check_rows(shape, (plane, layer), blocks, pinned.contiguous(plane, layer), rows, bytes);
    }
}

fn everywhere(shape: &Shape) -> impl Iterator<Item = (Plane, u32)> {
    shape.planes().iter().flat_map(|plane| (0..shape.layers).map(|layer| (*plane, layer)))
}

fn check_rows(
    shape: &Shape,
    (plane, layer): (Plane, u32),
    blocks: Vec<Rows<'_>>,
    whole: Option<Rows<'_>>,
    rows: &[u64],
    bytes: Bytes<'_>,
) {
    for (at, block) in blocks.iter().enumerate() {
        for token in 0..block.tokens() {
            let index = at * shape.block_tokens as usize + token;
            for head in 0..shape.heads() {
                let expected = bytes(rows[index], plane, layer, head, shape.row_bytes());
                assert_eq!(block.head(token, head), expected, "token {index} in block {at}");
                if let Some(whole) = &whole {
                    assert_eq!(whole.head(index, head), expected, "token {index} of the whole");
                }
            }
        }
    }
}
