//! [`Books`]: for every block how many have it, what it is called, and when it was last let go.
//!
//! ```text
//!             take                     let go by the last one
//!   free ───────────────▶ held ───────────────────────────────▶ cached   it has a name: the next request with the
//!    ▲                     ▲  │                                  │   │    same prefix finds it
//!    │                     │  └────────────▶ waiting ◀───────────┘   │    waiting: a reader may still look at it
//!    │                     └─── found by its name ───────────────────┘
//!    └────────────────── no reader can have it any more
//! ```
//!
//! Invariants: a block is in the list of cached ones if and only if it has a name and nobody has it (or it is
//! [shielded](Books::shield) for a moment); both lists are in the order of their stamps.

use std::collections::{HashMap, VecDeque, hash_map};
use std::hash::BuildHasherDefault;

use crate::hash::{BlockHash, FirstBytes};
use crate::pool::Block;
use crate::readers::Stamp;

const NONE: u32 = u32::MAX;

/// Of a block's count: it has a name, and more stands in its [`Entry`].
const NAMED: u32 = 1 << 31;

/// What is said of blocks that have a name.
#[derive(Clone, Debug)]
struct Entry {
    /// Neighbours in the list of cached ones: older and newer.
    older: u32,
    newer: u32,
    /// When it was let go; means something while it is cached.
    since: Option<Stamp>,
    /// Under which name it is found. Its bytes are complete, and do not change as long as it has one.
    hash: Option<BlockHash>,
    /// Whether the store has it, as far as is known here.
    saved: bool,
}

#[derive(Debug)]
pub(crate) struct Books {
    /// How many sequences and [holds](crate::Held) have each block, and whether it is [`NAMED`]: all that most operations
    /// need to know.
    counts: Vec<u32>,
    entries: Vec<Entry>,
    by_hash: HashMap<BlockHash, Block, BuildHasherDefault<FirstBytes>>,
    oldest: u32,
    newest: u32,
    cached: u32,
    waiting: VecDeque<(Stamp, Block)>,
}

impl Books {
    pub(crate) fn new(blocks_max: u32) -> Books {
        let empty = Entry { older: NONE, newer: NONE, since: None, hash: None, saved: false };
        Books {
            counts: vec![0; blocks_max as usize],
            entries: vec![empty; blocks_max as usize],
            by_hash: HashMap::default(),
            oldest: NONE,
            newest: NONE,
            cached: 0,
            waiting: VecDeque::new(),
        }
    }

    pub(crate) fn refs(&self, block: Block) -> u32 {
        self.counts[block as usize] & !NAMED
    }

    pub(crate) fn is_named(&self, block: Block) -> bool {
        self.counts[block as usize] & NAMED != 0
    }

    pub(crate) fn hash(&self, block: Block) -> Option<BlockHash> {
        self.entries[block as usize].hash
    }

    pub(crate) fn cached(&self) -> u32 {
        self.cached
    }

    pub(crate) fn waiting(&self) -> u32 {
        self.waiting.len() as u32
    }

    pub(crate) fn is_saved(&self, block: Block) -> bool {
        self.entries[block as usize].saved
    }

    pub(crate) fn waiting_blocks(&self) -> std::collections::HashSet<Block> {
        self.waiting.iter().map(|(_, block)| *block).collect()
    }

    /// The store has it. Of no consequence if it was given another content meanwhile: then its name is another.
    pub(crate) fn set_saved(&mut self, block: Block, hash: BlockHash) {
        let entry = &mut self.entries[block as usize];
        entry.saved |= entry.hash == Some(hash);
    }

    /// A block that was free is somebody's now.
    pub(crate) fn take(&mut self, block: Block) {
        let count = &mut self.counts[block as usize];
        assert_eq!(*count, 0, "block {block} was not free");
        *count = 1;
    }

    /// One more has it.
    pub(crate) fn share(&mut self, block: Block) {
        assert!(self.refs(block) > 0, "block {block} belongs to nobody");
        self.counts[block as usize] += 1;
    }

    /// The block of this name, if there is one.
    pub(crate) fn find(&self, hash: &BlockHash) -> Option<Block> {
        self.by_hash.get(hash).copied()
    }

    /// Protects a block that was found from being given up, without changing its place in the list: until it is
    /// [taken up](Books::take_up) or no longer [shielded](Books::unshield).
    pub(crate) fn shield(&mut self, block: Block) {
        self.counts[block as usize] += 1;
    }

    pub(crate) fn unshield(&mut self, block: Block) {
        self.counts[block as usize] -= 1;
    }

    /// A block that was shielded is somebody's now.
    pub(crate) fn take_up(&mut self, block: Block) {
        if self.entries[block as usize].since.is_some() {
            self.unlink(block);
        }
    }

    /// Its bytes are complete: it can be found from now on, unless another one has the name already.
    pub(crate) fn name(&mut self, block: Block, hash: BlockHash) {
        assert!(self.refs(block) > 0 && !self.is_named(block), "block {block} cannot be named");
        if let hash_map::Entry::Vacant(free) = self.by_hash.entry(hash) {
            free.insert(block);
            self.entries[block as usize].hash = Some(hash);
            self.counts[block as usize] |= NAMED;
        }
    }

    /// One has it no longer. The last one says when that was.
    pub(crate) fn let_go(&mut self, block: Block, stamp: Stamp) {
        assert!(self.refs(block) > 0, "block {block} belongs to nobody");
        self.counts[block as usize] -= 1;
        match self.counts[block as usize] {
            0 => return self.waiting.push_back((stamp, block)),
            NAMED => {}
            _ => return,
        }
        let entry = &mut self.entries[block as usize];
        (entry.since, entry.older, entry.newer) = (Some(stamp), self.newest, NONE);
        match self.newest {
            NONE => self.oldest = block,
            newest => self.entries[newest as usize].newer = block,
        }
        self.newest = block;
        self.cached += 1;
    }

    /// A block that nobody can be reading any more, of those that wait for that.
    pub(crate) fn settled(&mut self, oldest: Stamp) -> Option<Block> {
        self.waiting.pop_front_if(|(stamp, _)| *stamp < oldest).map(|(_, block)| block)
    }

    /// The longest unused blocks that nobody can be reading any more: so many, or `None`.
    pub(crate) fn victims(&self, count: u32, oldest: Stamp) -> Option<Vec<Block>> {
        let mut found = Vec::with_capacity(count as usize);
        let mut block = self.oldest;
        while found.len() < count as usize && block != NONE {
            let entry = &self.entries[block as usize];
            if entry.since.is_none_or(|since| since >= oldest) {
                break;
            }
            if self.refs(block) == 0 {
                found.push(block);
            }
            block = entry.newer;
        }
        (found.len() == count as usize).then_some(found)
    }

    /// Cached blocks from this one on.
    pub(crate) fn cached_from(&self, first: Block) -> Vec<Block> {
        let all = self.entries.iter().enumerate().skip(first as usize);
        all.filter(|(_, entry)| entry.since.is_some()).map(|(block, _)| block as Block).collect()
    }

    /// Forgets a cached block: nobody finds it any more.
    pub(crate) fn evict(&mut self, block: Block) -> Stamp {
        let since = self.entries[block as usize].since.expect("a cached block");
        self.unlink(block);
        self.forget_name(block);
        since
    }

    /// An evicted block waits until nobody can be reading it.
    pub(crate) fn wait(&mut self, block: Block, since: Stamp) {
        // Its stamp may be older than those that wait already: the newest one is safe for both.
        let since = self.waiting.back().map_or(since, |(stamp, _)| since.max(*stamp));
        self.waiting.push_back((since, block));
    }

    /// What so many sequences had under one number they have under another now, and it is found there. `to` was just
    /// taken; what else has `from` keeps it.
    pub(crate) fn rename(&mut self, from: Block, to: Block, moved: u32, stamp: Stamp) {
        self.counts[to as usize] = moved;
        let entry = &mut self.entries[from as usize];
        let (hash, saved) = (entry.hash.take(), std::mem::take(&mut entry.saved));
        if let Some(hash) = hash {
            (self.entries[to as usize].hash, self.entries[to as usize].saved) = (Some(hash), saved);
            self.by_hash.insert(hash, to);
            self.counts[from as usize] &= !NAMED;
            self.counts[to as usize] |= NAMED;
        }
        for _ in 0..moved {
            self.let_go(from, stamp);
        }
    }

    /// Everything cached, to be forgotten.
    pub(crate) fn clear_cached(&mut self) -> Vec<(Block, Stamp)> {
        let mut all = Vec::new();
        while self.oldest != NONE {
            let block = self.oldest;
            all.push((block, self.evict(block)));
        }
        all
    }

    /// Nobody finds it under its name any more, as it will be written again.
    pub(crate) fn forget_name(&mut self, block: Block) {
        let entry = &mut self.entries[block as usize];
        entry.saved = false;
        if let Some(hash) = entry.hash.take() {
            self.by_hash.remove(&hash);
            self.counts[block as usize] &= !NAMED;
        }
    }

    fn unlink(&mut self, block: Block) {
        let entry = &mut self.entries[block as usize];
        let (older, newer) = (entry.older, entry.newer);
        (entry.since, entry.older, entry.newer) = (None, NONE, NONE);
        match older {
            NONE => self.oldest = newer,
            _ => self.entries[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            _ => self.entries[newer as usize].older = older,
        }
        self.cached -= 1;
    }
}
