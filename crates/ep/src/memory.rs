//! [`ChannelMemory`]: location of the parts of a channel in this process. Computes addresses and accesses the memory
//! behind them; `step.rs` decides when that is allowed.
//!
//! The rules that make it sound, for a step whose dispatch is phase p and whose combine is phase q > p:
//!
//! | part of the region of d | written by | from … to | read by | from … to |
//! |---|---|---|---|---|
//! | header, metadata, rows of s | s | s begins … s arrives in p | d | d has completed p … d arrives in q |
//! | results for source s (pull) | d | d has completed p … d arrives in q | s | s has completed q … s arrives next |
//! | results of worker w (push) | w | w has completed p … w arrives in q | d | d has completed q … d arrives next |
//!
//! "s begins" is after s has completed the phase before p. With one buffer that is the combine of the step before. With
//! two buffers, if combines and dispatches share their phases, the step before the last used this buffer, and its
//! combine is over. A rank reads only what the writer has announced as complete (`dispatched`, `combined`) for that
//! very phase. So an excluded rank, as writer or as reader, reads nothing that is being written; and it writes only its
//! own slots, which no rank reads.

use std::ptr::NonNull;

use moontide_symmetric::{Rank, World};

use crate::layout::{CACHE_LINE_BYTES, Layout};

#[derive(Debug)]
pub(crate) struct ChannelMemory {
    /// Start of the channel in each rank's region.
    bases: Vec<NonNull<u8>>,
    layout: Layout,
    tokens_max: usize,
    top_k: usize,
}

// SAFETY: addresses of regions that the channel's world keeps mapped.
unsafe impl Send for ChannelMemory {}
// SAFETY: as above.
unsafe impl Sync for ChannelMemory {}

/// Metadata of one token of a source for one destination.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenMeta {
    at: NonNull<u8>,
    top_k: usize,
}

impl ChannelMemory {
    pub(crate) fn new(
        world: &World,
        offset: u64,
        layout: Layout,
        tokens_max: usize,
        top_k: usize,
    ) -> ChannelMemory {
        assert!(offset.is_multiple_of(CACHE_LINE_BYTES as u64));
        let ranks = 0..world.shape().ranks;
        let bases = ranks.map(|rank| world.at(Rank(rank), offset, layout.bytes)).collect();
        ChannelMemory { bases, layout, tokens_max, top_k }
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

    /// Returns the address of `slot` in a table of slots.
    #[inline]
    fn in_slot(&self, owner: Rank, table: u64, slot: usize, stride: usize) -> NonNull<u8> {
        assert!(slot < self.bases.len() * self.tokens_max);
        self.at(owner, table + (slot * stride) as u64)
    }

    /// Writes the source header of `source`'s block.
    ///
    /// # Safety
    /// By the table above: `source` is this rank, and it has begun and not arrived.
    pub(crate) unsafe fn write_source_header(
        &self,
        owner: Rank,
        buffer: usize,
        source: Rank,
        stamp: u64,
        tokens: u64,
    ) {
        let header = self.source_header(owner, buffer, source);
        // SAFETY: in bounds and aligned; by the contract only this rank accesses it.
        unsafe {
            header.write(stamp);
            header.add(1).write(tokens);
        }
    }

    /// Reads the source header of `source`'s block: its stamp and its number of tokens.
    ///
    /// # Safety
    /// By the table above: this rank is the owner, and `source` has announced that it is complete.
    pub(crate) unsafe fn read_source_header(&self, owner: Rank, buffer: usize, source: Rank) -> (u64, u64) {
        let header = self.source_header(owner, buffer, source);
        // SAFETY: in bounds and aligned; complete by the contract.
        unsafe { (header.read(), header.add(1).read()) }
    }

    fn source_header(&self, owner: Rank, buffer: usize, source: Rank) -> *mut u64 {
        let headers = self.layout.buffers[buffer].source_headers;
        self.at(owner, headers + (source.index() * CACHE_LINE_BYTES) as u64).cast().as_ptr()
    }

    #[inline]
    pub(crate) fn token_meta(&self, owner: Rank, buffer: usize, slot: usize) -> TokenMeta {
        let (table, stride) = (self.layout.buffers[buffer].token_meta, self.layout.meta_stride);
        TokenMeta { at: self.in_slot(owner, table, slot, stride), top_k: self.top_k }
    }

    /// Returns the address of a token's row: `row_bytes` bytes.
    #[inline]
    pub(crate) fn row(&self, owner: Rank, buffer: usize, slot: usize) -> *mut u8 {
        self.in_slot(owner, self.layout.buffers[buffer].rows, slot, self.layout.row_stride).as_ptr()
    }

    /// Returns the address of a result: `result_bytes` bytes.
    #[inline]
    pub(crate) fn result(&self, owner: Rank, buffer: usize, slot: usize) -> *mut u8 {
        self.in_slot(owner, self.layout.buffers[buffer].results, slot, self.layout.result_stride).as_ptr()
    }

    /// Overwrites everything that `source` wrote into `owner`'s region: stamp, count and numbers become invalid.
    ///
    /// # Safety
    /// By the table above: this rank is the owner, and reads it no more.
    pub(crate) unsafe fn poison_received(&self, owner: Rank, buffer: usize, source: Rank) {
        let first = self.slot(source, 0);
        let Layout { meta_stride, row_stride, .. } = self.layout;
        // SAFETY: the block of a source is contiguous in each table; by the contract it is this rank's until it
        // arrives.
        unsafe {
            self.source_header(owner, buffer, source).cast::<u8>().write_bytes(0xff, CACHE_LINE_BYTES);
            self.token_meta(owner, buffer, first).at.write_bytes(0xff, self.tokens_max * meta_stride);
            self.row(owner, buffer, first).write_bytes(0xff, self.tokens_max * row_stride);
        }
    }

    /// The same for results between `owner` and `peer`.
    ///
    /// # Safety
    /// By the table above: this rank writes them, or reads them no more.
    pub(crate) unsafe fn poison_results(&self, owner: Rank, buffer: usize, peer: Rank) {
        let first = self.slot(peer, 0);
        // SAFETY: as above.
        unsafe {
            self.result(owner, buffer, first).write_bytes(0xff, self.tokens_max * self.layout.result_stride)
        };
    }
}

impl TokenMeta {
    /// Sets the number of the token's experts at the destination.
    ///
    /// # Safety
    /// The caller has exclusive access to the metadata.
    #[inline]
    pub(crate) unsafe fn set_hits(self, hits: usize) {
        debug_assert!(hits <= self.top_k);
        // SAFETY: the first two bytes of the metadata, which is aligned to 8.
        unsafe { self.at.cast::<u16>().write(hits as u16) }
    }

    /// Sets expert and weight of one of them.
    ///
    /// # Safety
    /// As [`TokenMeta::set_hits`].
    #[inline]
    pub(crate) unsafe fn set_hit(self, hit: usize, expert: u16, weight: f32) {
        assert!(hit < self.top_k);
        // SAFETY: inside the metadata: weights from byte 4, experts behind K of them.
        unsafe {
            self.at.add(4 + hit * 4).cast::<f32>().write(weight);
            self.at.add(4 + self.top_k * 4 + hit * 2).cast::<u16>().write(expert);
        }
    }

    /// Returns the number of the token's experts on this rank.
    ///
    /// # Safety
    /// The metadata is complete, and the caller may read it.
    #[inline]
    pub(crate) unsafe fn hits(self) -> usize {
        // SAFETY: as in `set_hits`.
        unsafe { self.at.cast::<u16>().read() }.into()
    }

    /// Returns expert and weight of one of them.
    ///
    /// # Safety
    /// As [`TokenMeta::hits`].
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
