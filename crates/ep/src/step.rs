//! A step, from tokens to results, as types:
//!
//! ```text
//!   Channel ── start_dispatch ──▶ Dispatching ── wait ──▶ Dispatched
//!   Dispatched ── start_combine ──▶ Combining ── finish ──▶ Channel
//!   Dispatched ── start_combine_and_dispatch (two buffers) ──▶ Overlapped ── sum_into ──▶ Dispatched
//! ```
//!
//! A wait that times out returns its guard ([`StepTimeout`]): the caller waits again, or excludes the missing ranks and
//! waits again. A caller that cannot keep a guard drops it and resumes the step later ([`Channel::resume`]). The table
//! in `memory.rs` lists which memory may be accessed in which stage.

use std::time::Duration;

use moontide_symmetric::{PhaseOutcome, Rank, RankSet, WaitError};

use crate::channel::{Channel, Stage};
use crate::layout::{Buffering, CombineMode};
use crate::memory::ChannelMemory;
use crate::route::ExpertAssignment;
use crate::tokens::{DispatchError, Tokens, check};

/// A wait timed out, or this rank was excluded: the error, and the guard to continue with.
#[derive(Debug)]
pub struct StepTimeout<S> {
    /// Error of the wait.
    pub error: WaitError,
    /// Guard of the step, unchanged.
    pub stage: S,
}

impl<S: StepStage> StepTimeout<S> {
    /// Returns the ranks that have not arrived; empty if this rank was excluded.
    pub fn missing(&self) -> RankSet {
        match self.error {
            WaitError::Missing(ranks) => ranks,
            WaitError::Excluded => RankSet::EMPTY,
        }
    }

    /// Excludes the missing ranks: the others no longer wait for them. The caller then waits again.
    pub fn exclude_missing(mut self) -> S {
        let missing = self.missing();
        self.stage.channel().exclude(missing);
        self.stage
    }
}

/// A guard of a step that waits.
pub trait StepStage {
    /// Returns the channel of the step.
    fn channel(&mut self) -> &mut Channel;
}

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CombineReport {
    /// Ranks whose experts took part in this rank's results. Other ranks contributed nothing, as if their experts had
    /// weight 0.
    pub ranks: RankSet,
}

/// Error of a whole step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// The dispatch was rejected; nothing was sent.
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
    /// A wait timed out. The step can be finished with [`Channel::abort_step`].
    #[error(transparent)]
    Wait(#[from] WaitError),
}

impl<S> From<StepTimeout<S>> for StepError {
    fn from(timeout: StepTimeout<S>) -> StepError {
        StepError::Wait(timeout.error)
    }
}

/// Tokens have been sent, and this rank has arrived.
#[derive(Debug)]
#[must_use = "an unfinished step keeps the other ranks waiting"]
pub struct Dispatching<'a> {
    channel: &'a mut Channel,
    tokens: Tokens<'a>,
}

/// The tokens of all ranks for this rank's experts have been received.
#[derive(Debug)]
#[must_use = "an unfinished step keeps the other ranks waiting"]
pub struct Dispatched<'a> {
    channel: &'a mut Channel,
    tokens: Tokens<'a>,
}

/// Results have been sent, and this rank has arrived.
#[derive(Debug)]
#[must_use = "an unfinished step keeps the other ranks waiting"]
pub struct Combining<'a> {
    channel: &'a mut Channel,
}

/// Results of a step and tokens of the next have been sent, and this rank has arrived.
#[derive(Debug)]
#[must_use = "an unfinished step keeps the other ranks waiting"]
pub struct Overlapped<'a> {
    channel: &'a mut Channel,
    tokens: Tokens<'a>,
}

/// Guard of an unfinished step.
#[derive(Debug)]
pub enum StepInProgress<'a> {
    /// Tokens have been sent.
    Sent(Dispatching<'a>),
    /// Tokens have been received.
    Received(Dispatched<'a>),
    /// Results have been sent.
    Returned(Combining<'a>),
    /// Results and the next tokens have been sent.
    Crossed(Overlapped<'a>),
}

impl Channel {
    /// Resumes a step whose guard was dropped, for callers that cannot keep a guard, such as bindings of another
    /// language. `rows` are the rows that were sent with the step whose results are outstanding; they are ignored in
    /// the stage [`StepInProgress::Returned`]. Returns `None` between steps.
    ///
    /// # Panics
    /// If the number of rows is not that of the sent tokens.
    pub fn resume<'a>(&'a mut self, rows: &'a [u8]) -> Option<StepInProgress<'a>> {
        let step = match self.stage {
            Stage::Idle | Stage::Rejoining => return None,
            Stage::Combining => return Some(StepInProgress::Returned(Combining { channel: self })),
            Stage::Dispatching | Stage::Dispatched => self.step,
            Stage::Overlapped => self.step + 1,
        };
        let sent = self.sent[(step & 1) as usize].tokens;
        assert_eq!(rows.len(), sent * self.layout.row_bytes, "rows of {sent} tokens");
        let tokens = Tokens { rows, ..Tokens::NONE };
        Some(match self.stage {
            Stage::Dispatched => StepInProgress::Received(Dispatched { channel: self, tokens }),
            Stage::Overlapped => StepInProgress::Crossed(Overlapped { channel: self, tokens }),
            _ => StepInProgress::Sent(Dispatching { channel: self, tokens }),
        })
    }

    /// Writes tokens to the ranks of their experts, once to each rank however many of its experts they have, and
    /// arrives. Does not wait.
    pub fn start_dispatch<'a>(&'a mut self, tokens: Tokens<'a>) -> Result<Dispatching<'a>, DispatchError> {
        match self.stage {
            Stage::Idle => {}
            Stage::Rejoining => return Err(DispatchError::Excluded),
            _ => return Err(DispatchError::StepInProgress),
        }
        let count = check(&tokens, &self.shape, &self.layout)?;
        let phase = self.barrier.phase() + 1;
        let members = self.barrier.membership(phase).map_err(|_| DispatchError::Excluded)?.members;
        self.heartbeat();
        self.write(&tokens, count, self.step, members, phase);
        self.barrier.arrive(members, RankSet::EMPTY);
        self.stage = Stage::Dispatching;
        Ok(Dispatching { channel: self, tokens })
    }

    /// Runs [`Channel::start_dispatch`] and [`Dispatching::wait`].
    pub fn dispatch<'a>(
        &'a mut self,
        tokens: Tokens<'a>,
        timeout: Duration,
    ) -> Result<Dispatched<'a>, StepError> {
        Ok(self.start_dispatch(tokens)?.wait(timeout)?)
    }

    /// Runs a whole step: dispatch, `compute`, which fills the outputs, and combine into `results`.
    pub fn moe_forward(
        &mut self,
        tokens: Tokens<'_>,
        results: &mut [u8],
        timeout: Duration,
        compute: impl FnOnce(&mut Dispatched<'_>),
    ) -> Result<CombineReport, StepError> {
        let mut dispatched = self.dispatch(tokens, timeout)?;
        compute(&mut dispatched);
        Ok(dispatched.start_combine().finish(results, timeout)?)
    }

    /// Writes source headers, token metadata and rows of a step to all members. `phase` is the phase of its dispatch.
    fn write(&mut self, tokens: &Tokens<'_>, count: usize, step: u64, members: RankSet, phase: u64) {
        let (me, buffer, top_k) = (self.me, self.buffer(step), self.shape.top_k);
        let per_rank = self.shape.experts_per_rank as u32;
        let row_bytes = self.layout.row_bytes;
        let sent = &mut self.sent[(step & 1) as usize];
        (sent.tokens, sent.targets) = (count, members);
        for rank in members.iter() {
            // SAFETY: this rank's block; this rank has begun, because it completed the phase before, and has not
            // arrived.
            unsafe { self.memory.write_source_header(rank, buffer, me, phase, count as u64) };
        }
        let routes = tokens.experts.chunks_exact(top_k).zip(tokens.weights.chunks_exact(top_k));
        for (token, (experts, weights)) in routes.enumerate() {
            let slot = self.memory.slot(me, token);
            let mut hits = [0u8; moontide_symmetric::RANKS_MAX];
            for (&expert, &weight) in experts.iter().zip(weights).filter(|(expert, _)| **expert >= 0) {
                let rank = Rank(expert as u32 / per_rank);
                if members.contains(rank) {
                    let hit = &mut hits[rank.index()];
                    let local = (expert as u32 % per_rank) as u16;
                    // SAFETY: this rank's slot; as above.
                    unsafe {
                        self.memory.token_meta(rank, buffer, slot).set_hit(usize::from(*hit), local, weight)
                    };
                    *hit += 1;
                }
            }
            let mut destinations = RankSet::EMPTY;
            for rank in members.iter() {
                let hits = usize::from(hits[rank.index()]);
                // SAFETY: this rank's slot; as above.
                unsafe { self.memory.token_meta(rank, buffer, slot).set_hits(hits) };
                if hits == 0 {
                    continue;
                }
                destinations.insert(rank);
                if rank != me {
                    let row = &tokens.rows[token * row_bytes..][..row_bytes];
                    // SAFETY: this rank's slot, which has space for a row; `row` is memory of the caller, not of a
                    // region that another rank writes.
                    unsafe {
                        let target = self.memory.row(rank, buffer, slot);
                        std::ptr::copy_nonoverlapping(row.as_ptr(), target, row_bytes);
                    }
                }
            }
            sent.destinations[token] = destinations;
        }
    }

    /// Returns the address for this rank's result for `source`'s token in `slot`.
    fn result_for(&self, step: u64, source: Rank, slot: usize) -> *mut u8 {
        let buffer = self.buffer(step);
        match self.shape.combine_mode {
            CombineMode::Pull => self.memory.result(self.me, buffer, slot),
            CombineMode::Push => {
                let token = slot - self.memory.slot(source, 0);
                self.memory.result(source, buffer, self.memory.slot(self.me, token))
            }
        }
    }

    /// Returns the address of `worker`'s result for this rank's token.
    fn result_from(&self, step: u64, worker: Rank, token: usize) -> *const u8 {
        let buffer = self.buffer(step);
        match self.shape.combine_mode {
            CombineMode::Pull => self.memory.result(worker, buffer, self.memory.slot(self.me, token)),
            CombineMode::Push => self.memory.result(self.me, buffer, self.memory.slot(worker, token)),
        }
    }

    /// Reads the token metadata of the ranks that sent, after the phase of the dispatch.
    fn receive(&mut self, step: u64, outcome: PhaseOutcome, packed: Option<&mut [u8]>, own: &Tokens<'_>) {
        self.sources = outcome.dispatched;
        let (me, buffer, phase) = (self.me, self.buffer(step), self.barrier.phase());
        if self.poisons && self.shape.combine_mode == CombineMode::Pull {
            for source in outcome.dispatched.iter() {
                // SAFETY: this rank has completed the dispatch, and writes these rows from now on.
                unsafe { self.memory.poison_results(me, buffer, source) };
            }
        }
        let (memory, row_bytes) = (&self.memory, self.layout.row_bytes);
        let rows_max = self.routing.rows_max();
        let mut packed = packed;
        // SAFETY: these ranks have announced in this phase that their tokens are complete.
        unsafe {
            self.routing.read(memory, me, buffer, outcome.dispatched, phase, |hit, received| {
                let Some(packed) = packed.as_deref_mut() else { return };
                let at = (hit.expert as usize * rows_max + hit.row as usize) * row_bytes;
                let row = row_in(memory, buffer, me, received.source, received.slot as usize, own, row_bytes);
                packed[at..][..row_bytes].copy_from_slice(row);
            });
        }
    }

    /// Poisons the received tokens before other ranks may write their slots again.
    fn poison_received(&self, step: u64) {
        for source in self.sources.iter().filter(|_| self.poisons) {
            // SAFETY: this rank has completed the dispatch, has not arrived in the combine, and reads no more.
            unsafe { self.memory.poison_received(self.me, self.buffer(step), source) };
        }
    }

    /// Sums the results for each token, in the order of ranks, after the phase of the combine.
    fn sum(&mut self, step: u64, outcome: PhaseOutcome, results: &mut [u8]) -> CombineReport {
        let result_bytes = self.layout.result_bytes;
        let sent = &self.sent[(step & 1) as usize];
        let ranks = sent.targets.and(outcome.combined);
        for (token, result) in results.chunks_exact_mut(result_bytes).enumerate() {
            let rows = sent.destinations[token].and(ranks).iter().map(|rank| {
                // SAFETY: the rank has announced in this phase that it is complete, and writes it no more until this
                // rank arrives again.
                unsafe { std::slice::from_raw_parts(self.result_from(step, rank, token), result_bytes) }
            });
            self.shape.combine_dtype.sum(rows, self.shape.hidden, result);
        }
        if self.poisons && self.shape.combine_mode == CombineMode::Push {
            for rank in ranks.iter() {
                // SAFETY: complete, read, and not written again before this rank arrives.
                unsafe { self.memory.poison_results(self.me, self.buffer(step), rank) };
            }
        }
        CombineReport { ranks }
    }

    fn assert_results_len(&self, step: u64, results: &[u8]) {
        let tokens = self.sent[(step & 1) as usize].tokens;
        assert_eq!(results.len(), tokens * self.layout.result_bytes, "results of {tokens} tokens");
    }
}

/// Returns the row of a token in `slot` of `me`: in the region, or for this rank's own tokens in the caller's memory.
///
/// # Safety
/// `source` has announced that it is complete, or is `me`.
unsafe fn row_in<'a>(
    memory: &ChannelMemory,
    buffer: usize,
    me: Rank,
    source: Rank,
    slot: usize,
    own: &'a Tokens<'_>,
    row_bytes: usize,
) -> &'a [u8] {
    if source == me {
        return &own.rows[(slot - memory.slot(me, 0)) * row_bytes..][..row_bytes];
    }
    // SAFETY: complete by the contract, and not written again before this rank arrives, which consumes the guard.
    unsafe { std::slice::from_raw_parts(memory.row(me, buffer, slot), row_bytes) }
}

impl StepStage for Dispatching<'_> {
    fn channel(&mut self) -> &mut Channel {
        self.channel
    }
}

impl StepStage for Combining<'_> {
    fn channel(&mut self) -> &mut Channel {
        self.channel
    }
}

impl StepStage for Overlapped<'_> {
    fn channel(&mut self) -> &mut Channel {
        self.channel
    }
}

impl<'a> Dispatching<'a> {
    /// Waits for the tokens of all ranks, and sorts them by expert.
    pub fn wait(self, timeout: Duration) -> Result<Dispatched<'a>, StepTimeout<Dispatching<'a>>> {
        self.wait_and_pack(timeout, None)
    }

    /// As [`Dispatching::wait`], and in the same pass copies the rows into the grouped layout,
    /// `[experts_per_rank][ranks × tokens_max]` rows without gaps, of which each expert's first
    /// [`Dispatched::rows_per_expert`] are filled.
    ///
    /// # Panics
    /// If `packed` has another length.
    pub fn wait_packed(
        self,
        packed: &mut [u8],
        timeout: Duration,
    ) -> Result<Dispatched<'a>, StepTimeout<Dispatching<'a>>> {
        let shape = &self.channel.shape;
        let rows = shape.experts_per_rank * shape.slots();
        assert_eq!(packed.len(), rows * self.channel.layout.row_bytes, "buffer of {rows} rows");
        self.wait_and_pack(timeout, Some(packed))
    }

    fn wait_and_pack(
        self,
        timeout: Duration,
        packed: Option<&mut [u8]>,
    ) -> Result<Dispatched<'a>, StepTimeout<Dispatching<'a>>> {
        match self.channel.wait_phase(timeout) {
            Err(error) => Err(StepTimeout { error, stage: self }),
            Ok(outcome) => {
                let Dispatching { channel, tokens } = self;
                channel.receive(channel.step, outcome, packed, &tokens);
                channel.stage = Stage::Dispatched;
                Ok(Dispatched { channel, tokens })
            }
        }
    }
}

/// A token with an expert on this rank.
#[derive(Debug)]
pub struct ExpertInput<'w> {
    /// Slot of the token: source × T_cap + its index at the source.
    pub slot: usize,
    /// Rank that sent the token.
    pub source: Rank,
    /// Row of the token, in the dispatch dtype of the channel.
    pub row: &'w [u8],
    /// Experts of the token on this rank, in the order of [`Tokens::experts`].
    pub hits: &'w [ExpertAssignment],
    /// Result for the source, in the combine dtype: the weighted sum of the results of these experts.
    pub output: &'w mut [u8],
}

/// Rows of one source's tokens at their location in memory.
#[derive(Clone, Copy, Debug)]
pub struct SourceRows<'r> {
    /// All rows, with padding between them.
    pub bytes: &'r [u8],
    /// Number of rows.
    pub tokens: usize,
    /// Bytes from one row to the next.
    pub stride: usize,
}

impl<'a> Dispatched<'a> {
    /// Returns the number of rows of each expert of this rank: masked_m.
    pub fn rows_per_expert(&self) -> &[u32] {
        self.channel.routing.rows()
    }

    /// Returns the slots of an expert's rows, in the order of the grouped layout.
    pub fn group(&self, expert: usize) -> &[u32] {
        self.channel.routing.group(expert)
    }

    /// Returns the token in a slot. A token without an expert on this rank was not sent here: its bytes are
    /// unspecified.
    ///
    /// # Panics
    /// If the slot belongs to no source, or to none of its tokens.
    pub fn row(&self, slot: usize) -> &[u8] {
        let tokens_max = self.channel.shape.tokens_max;
        let SourceRows { bytes, tokens, stride } = self.rows_of(Rank((slot / tokens_max) as u32));
        let token = slot % tokens_max;
        assert!(token < tokens, "no token {token} of {tokens}");
        &bytes[token * stride..][..self.channel.layout.row_bytes]
    }

    /// Returns all tokens of a source at their location, row after row. As in [`Dispatched::row`], the bytes of tokens
    /// without an expert on this rank are unspecified.
    ///
    /// # Panics
    /// If `source` is not in [`Dispatched::sources`].
    pub fn rows_of(&self, source: Rank) -> SourceRows<'_> {
        let channel = &*self.channel;
        let is_counted = source.index() < channel.shape.ranks && channel.sources.contains(source);
        assert!(is_counted, "rank {source} sent nothing");
        let tokens = channel.routing.tokens_of(source);
        if source == channel.me {
            return SourceRows { bytes: self.tokens.rows, tokens, stride: channel.layout.row_bytes };
        }
        let stride = channel.layout.row_stride;
        let first =
            channel.memory.row(channel.me, channel.buffer(channel.step), channel.memory.slot(source, 0));
        // SAFETY: the block of a source is contiguous. It is one of `sources`, so it has announced that its tokens are
        // complete, and it writes no more before this rank arrives, which consumes the guard.
        let bytes = unsafe { std::slice::from_raw_parts(first, tokens * stride) };
        SourceRows { bytes, tokens, stride }
    }

    /// Returns the ranks whose tokens were received.
    pub fn sources(&self) -> RankSet {
        self.channel.sources
    }

    /// Calls `work` for every token with an expert on this rank, in the order of slots. It must fill the output.
    pub fn for_each(&mut self, mut work: impl FnMut(ExpertInput<'_>)) {
        let channel = &*self.channel;
        let (step, buffer, me) = (channel.step, channel.buffer(channel.step), channel.me);
        let (row_bytes, result_bytes) = (channel.layout.row_bytes, channel.layout.result_bytes);
        for &received in channel.routing.received() {
            let (slot, source) = (received.slot as usize, received.source);
            let hits = channel.routing.hits(received);
            // SAFETY: the row is complete, as in `row`. The result is this rank's to write until it arrives, which
            // consumes this guard; each slot occurs once, so no two references to it exist.
            let (row, output) = unsafe {
                let row = row_in(&channel.memory, buffer, me, source, slot, &self.tokens, row_bytes);
                let output = channel.result_for(step, source, slot);
                (row, std::slice::from_raw_parts_mut(output, result_bytes))
            };
            work(ExpertInput { slot, source, row, hits, output });
        }
    }

    /// Computes the outputs from the experts' results in the grouped layout (combine dtype, laid out as by
    /// [`Dispatching::wait_packed`]): for each token the sum of its experts' results times their weights.
    ///
    /// # Panics
    /// If `grouped` has another length.
    pub fn scatter(&mut self, grouped: &[u8]) {
        let (dtype, hidden) = (self.channel.shape.combine_dtype, self.channel.shape.hidden);
        let (bytes, rows_max) = (self.channel.layout.result_bytes, self.channel.routing.rows_max());
        let rows = self.channel.shape.experts_per_rank * rows_max;
        assert_eq!(grouped.len(), rows * bytes, "results of {rows} rows");
        self.for_each(|input| {
            let rows = input.hits.iter().map(|hit| {
                let at = (hit.expert as usize * rows_max + hit.row as usize) * bytes;
                (hit.weight, &grouped[at..][..bytes])
            });
            dtype.weighted_sum(rows, hidden, input.output);
        });
    }

    /// Announces that the results are complete. Does not wait.
    pub fn start_combine(self) -> Combining<'a> {
        let channel = self.channel;
        channel.poison_received(channel.step);
        channel.arrive(RankSet::EMPTY, channel.sources, channel.step + 1);
        channel.stage = Stage::Combining;
        Combining { channel }
    }

    /// The same, and sends the tokens of the next step, with one arrival for both. These tokens cannot depend on the
    /// results of this step: for two alternating batches.
    pub fn start_combine_and_dispatch(
        self,
        tokens: Tokens<'a>,
    ) -> Result<Overlapped<'a>, (DispatchError, Dispatched<'a>)> {
        let channel = &*self.channel;
        if channel.shape.buffering == Buffering::Single {
            return Err((DispatchError::SingleBuffered, self));
        }
        let phase = channel.barrier.phase() + 1;
        let checked = check(&tokens, &channel.shape, &channel.layout).and_then(|count| {
            let membership = channel.barrier.membership(phase).map_err(|_| DispatchError::Excluded)?;
            Ok((count, membership.members))
        });
        let (count, members) = match checked {
            Err(error) => return Err((error, self)),
            Ok(checked) => checked,
        };
        let channel = self.channel;
        channel.heartbeat();
        channel.poison_received(channel.step);
        channel.write(&tokens, count, channel.step + 1, members, phase);
        channel.arrive(members, channel.sources, channel.step + 2);
        channel.stage = Stage::Overlapped;
        Ok(Overlapped { channel, tokens })
    }

    /// Runs [`Dispatched::start_combine`] and [`Combining::finish`].
    pub fn combine(self, results: &mut [u8], timeout: Duration) -> Result<CombineReport, StepError> {
        Ok(self.start_combine().finish(results, timeout)?)
    }
}

impl<'a> Combining<'a> {
    /// Waits for the results of all ranks and writes their sums, a row per token, in the combine dtype.
    ///
    /// # Panics
    /// If `results` has another length than this rank's tokens need.
    pub fn finish(
        self,
        results: &mut [u8],
        timeout: Duration,
    ) -> Result<CombineReport, StepTimeout<Combining<'a>>> {
        self.channel.assert_results_len(self.channel.step, results);
        match self.channel.wait_phase(timeout) {
            Err(error) => Err(StepTimeout { error, stage: self }),
            Ok(outcome) => {
                let report = self.channel.sum(self.channel.step, outcome, results);
                self.channel.next_step();
                Ok(report)
            }
        }
    }
}

impl<'a> Overlapped<'a> {
    /// Waits for the results and the next tokens of all ranks; sums the former and sorts the latter.
    ///
    /// # Panics
    /// As [`Combining::finish`].
    pub fn sum_into(
        self,
        results: &mut [u8],
        timeout: Duration,
    ) -> Result<(CombineReport, Dispatched<'a>), StepTimeout<Overlapped<'a>>> {
        self.channel.assert_results_len(self.channel.step, results);
        match self.channel.wait_phase(timeout) {
            Err(error) => Err(StepTimeout { error, stage: self }),
            Ok(outcome) => {
                let Overlapped { channel, tokens } = self;
                let report = channel.sum(channel.step, outcome, results);
                channel.step += 1;
                channel.receive(channel.step, outcome, None, &tokens);
                channel.stage = Stage::Dispatched;
                Ok((report, Dispatched { channel, tokens }))
            }
        }
    }
}
