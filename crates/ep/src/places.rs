//! [`Places`]: where the parts of a channel lie in this process. Computes addresses and touches what they point to;
//! when that is allowed is said in `step.rs`.
//!
//! The rules that make it sound, for a step whose dispatch is phase p and whose return is phase q > p:
//!
//! | what, in the region of d | written by | from … to | read by | from … to |
//! |---|---|---|---|---|
//! | head, notes, rows of source s | s | s begins … s arrives in p | d | d has met in p … d arrives in q |
//! | backs of source s (pull) | d | d has met in p … d arrives in q | s | s has met in q … s arrives next |
//! | backs of worker w (push) | w | w has met in p … w arrives in q | d | d has met in q … d arrives next |
//!
//! "s begins" is after s has met in the phase before p. With one buffer that is the return of the step before; with two,
//! if returns and dispatches share their phases, the step before the last used this buffer, and its return is over.
//! Reading happens only on the writer's word (`sends`, `gives`) for that very phase, so a rank that was left out, on
//! either side, reads nothing that is being written; and it writes only slots of its own, which nobody reads.

use std::ptr::NonNull;

use moontide_heap::{Rank, World};

use crate::layout::{LINE, Layout};

#[derive(Debug)]
pub(crate) struct Places {
    /// The channel's start in each rank's region.
    bases: Vec<NonNull<u8>>,
    layout: Layout,
    tokens_max: usize,
    top_k: usize,
}

// SAFETY: addresses of regions that the channel's world keeps mapped.
unsafe impl Send for Places {}
// SAFETY: as above.
unsafe impl Sync for Places {}

/// What a source says about one of its tokens to one destination.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Note {
    at: NonNull<u8>,
    top_k: usize,
}

impl Places {
    pub(crate) fn new(world: &World, offset: u64, layout: Layout, tokens_max: usize, top_k: usize) -> Places {
        assert!(offset.is_multiple_of(LINE as u64));
        let ranks = 0..world.shape().ranks;
        let bases = ranks.map(|rank| world.at(Rank(rank), offset, layout.bytes)).collect();
        Places { bases, layout, tokens_max, top_k }
    }

    pub(crate) fn tokens_max(&self) -> usize {
        self.tokens_max
    }

    #[inline]
    pub(crate) fn slot(&self, rank: Rank, token: usize) -> usize {
        debug_assert!(token < self.tokens_max);
        rank.index() * self.tokens_max + token
    }

    #[inline]
    fn at(&self, owner: Rank, offset: u64) -> NonNull<u8> {
        debug_assert!(offset < self.layout.bytes);
        // SAFETY: `new` has checked that the whole channel is inside the region, and offsets come from its layout.
        unsafe { self.bases[owner.index()].add(offset as usize) }
    }

    /// `slot` in a table of slots.
    #[inline]
    fn in_slot(&self, owner: Rank, table: u64, slot: usize, stride: usize) -> NonNull<u8> {
        assert!(slot < self.bases.len() * self.tokens_max);
        self.at(owner, table + (slot * stride) as u64)
    }

    /// Writes the head of `source`'s block.
    ///
    /// # Safety
    /// By the table above: `source` is this rank, and it has begun and not arrived.
    pub(crate) unsafe fn write_head(
        &self,
        owner: Rank,
        buffer: usize,
        source: Rank,
        stamp: u64,
        tokens: u64,
    ) {
        let head = self.head(owner, buffer, source);
        // SAFETY: in bounds and aligned; ours alone, says the caller.
        unsafe {
            head.write(stamp);
            head.add(1).write(tokens);
        }
    }

    /// Reads the head of `source`'s block: its stamp and how many tokens.
    ///
    /// # Safety
    /// By the table above: this rank is the owner, and it has `source`'s word.
    pub(crate) unsafe fn read_head(&self, owner: Rank, buffer: usize, source: Rank) -> (u64, u64) {
        let head = self.head(owner, buffer, source);
        // SAFETY: in bounds and aligned; complete, says the caller.
        unsafe { (head.read(), head.add(1).read()) }
    }

    fn head(&self, owner: Rank, buffer: usize, source: Rank) -> *mut u64 {
        let heads = self.layout.buffers[buffer].heads;
        self.at(owner, heads + (source.index() * LINE) as u64).cast().as_ptr()
    }

    #[inline]
    pub(crate) fn note(&self, owner: Rank, buffer: usize, slot: usize) -> Note {
        let (notes, stride) = (self.layout.buffers[buffer].notes, self.layout.note_stride);
        Note { at: self.in_slot(owner, notes, slot, stride), top_k: self.top_k }
    }

    /// A token's row: `row_bytes` bytes.
    #[inline]
    pub(crate) fn row(&self, owner: Rank, buffer: usize, slot: usize) -> *mut u8 {
        self.in_slot(owner, self.layout.buffers[buffer].rows, slot, self.layout.row_stride).as_ptr()
    }

    /// A result's row: `back_bytes` bytes.
    #[inline]
    pub(crate) fn back(&self, owner: Rank, buffer: usize, slot: usize) -> *mut u8 {
        self.in_slot(owner, self.layout.buffers[buffer].backs, slot, self.layout.back_stride).as_ptr()
    }

    /// Makes everything that `source` wrote into `owner`'s region unreadable: no stamp, no count, no number is what it was.
    ///
    /// # Safety
    /// By the table above: this rank is the owner, and reads it no more.
    pub(crate) unsafe fn poison_received(&self, owner: Rank, buffer: usize, source: Rank) {
        let first = self.slot(source, 0);
        let Layout { note_stride, row_stride, .. } = self.layout;
        // SAFETY: the block of a source is contiguous in each table; ours until we arrive, says the caller.
        unsafe {
            self.head(owner, buffer, source).cast::<u8>().write_bytes(0xff, LINE);
            self.note(owner, buffer, first).at.write_bytes(0xff, self.tokens_max * note_stride);
            self.row(owner, buffer, first).write_bytes(0xff, self.tokens_max * row_stride);
        }
    }

    /// The same for results between `owner` and `peer`.
    ///
    /// # Safety
    /// By the table above: they are this rank's to write, or to read no more.
    pub(crate) unsafe fn poison_backs(&self, owner: Rank, buffer: usize, peer: Rank) {
        let first = self.slot(peer, 0);
        // SAFETY: as above.
        unsafe {
            self.back(owner, buffer, first).write_bytes(0xff, self.tokens_max * self.layout.back_stride)
        };
    }
}

impl Note {
    /// Sets how many of the token's experts are at the destination.
    ///
    /// # Safety
    /// The note is the caller's to write.
    #[inline]
    pub(crate) unsafe fn set_hits(self, hits: usize) {
        debug_assert!(hits <= self.top_k);
        // SAFETY: the first two bytes of a note, which is aligned to 8.
        unsafe { self.at.cast::<u16>().write(hits as u16) }
    }

    /// Names one of these experts.
    ///
    /// # Safety
    /// As [`Note::set_hits`].
    #[inline]
    pub(crate) unsafe fn set_hit(self, hit: usize, expert: u16, weight: f32) {
        assert!(hit < self.top_k);
        // SAFETY: inside the note: weights from byte 4, experts behind K of them.
        unsafe {
            self.at.add(4 + hit * 4).cast::<f32>().write(weight);
            self.at.add(4 + self.top_k * 4 + hit * 2).cast::<u16>().write(expert);
        }
    }

    /// How many of the token's experts are here.
    ///
    /// # Safety
    /// The note is complete and the caller's to read.
    #[inline]
    pub(crate) unsafe fn hits(self) -> usize {
        // SAFETY: as in `set_hits`.
        unsafe { self.at.cast::<u16>().read() }.into()
    }

    /// One of them: expert and weight.
    ///
    /// # Safety
    /// As [`Note::hits`].
    #[inline]
    pub(crate) unsafe fn hit(self, hit: usize) -> (u16, f32) {
        assert!(hit < self.top_k);
        // SAFETY: as in `set_hit`.
        unsafe {
            let expert = self.at.add(4 + self.top_k * 4 + hit * 2).cast::<u16>().read();
            (expert, self.at.add(4 + hit * 4).cast::<f32>().read())
        }
    }
}
