//! A step, from tokens to results, as types:
//!
//! ```text
//!   Channel ── send ──▶ Sent ── wait ──▶ Received ── give_back ──▶ Returned ── sum_into ──▶ Channel
//!                                           │  (two buffers)
//!                                           └─ give_back_and_send ──▶ Crossed ── sum_into ──▶ Received
//! ```
//!
//! What waits gives itself back when somebody is late ([`Late`]): wait again, or leave them behind and wait again. Who
//! cannot hold on to a guard lets it go and takes the step up again ([`Channel::resume`]). Which memory may be touched in
//! which of these is the table in `places.rs`.

use std::time::Duration;

use moontide_heap::{Met, Rank, RankSet, WaitError};

use crate::channel::{Channel, Stage};
use crate::layout::{Buffers, Returns};
use crate::places::Places;
use crate::route::Hit;
use crate::tokens::{SendError, Tokens, check};

/// Somebody was late, or this rank was: the guard, to go on with.
#[derive(Debug)]
pub struct Late<S> {
    /// What happened.
    pub error: WaitError,
    /// The step as it was.
    pub stage: S,
}

impl<S: InStep> Late<S> {
    /// Those that have not come; nobody if it was this rank that was left behind.
    pub fn missing(&self) -> RankSet {
        match self.error {
            WaitError::Missing(ranks) => ranks,
            WaitError::Excluded => RankSet::EMPTY,
        }
    }

    /// Goes on without those that are missing: nobody waits for them any more. Then wait again.
    pub fn leave_behind(mut self) -> S {
        let missing = self.missing();
        self.stage.channel().exclude(missing);
        self.stage
    }
}

/// A guard of a step that waits.
pub trait InStep {
    /// Its channel.
    fn channel(&mut self) -> &mut Channel;
}

/// What came of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summed {
    /// The ranks whose experts took part in this rank's results. Whoever is not among them contributed nothing, as
    /// if its experts had the weight 0.
    pub ranks: RankSet,
}

/// Why a whole step failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// Nothing was sent.
    #[error(transparent)]
    Send(#[from] SendError),
    /// Somebody was late. The step can be finished with [`Channel::abandon`].
    #[error(transparent)]
    Wait(#[from] WaitError),
}

impl<S> From<Late<S>> for StepError {
    fn from(late: Late<S>) -> StepError {
        StepError::Wait(late.error)
    }
}

/// Tokens are on their way.
#[derive(Debug)]
#[must_use = "who does not finish a step keeps the others waiting"]
pub struct Sent<'a> {
    channel: &'a mut Channel,
    tokens: Tokens<'a>,
}

/// Everyone's tokens for this rank's experts are here.
#[derive(Debug)]
#[must_use = "who does not finish a step keeps the others waiting"]
pub struct Received<'a> {
    channel: &'a mut Channel,
    tokens: Tokens<'a>,
}

/// Results are on their way.
#[derive(Debug)]
#[must_use = "who does not finish a step keeps the others waiting"]
pub struct Returned<'a> {
    channel: &'a mut Channel,
}

/// Results of a step and tokens of the next are on their way.
#[derive(Debug)]
#[must_use = "who does not finish a step keeps the others waiting"]
pub struct Crossed<'a> {
    channel: &'a mut Channel,
    tokens: Tokens<'a>,
}

/// A step that is under way.
#[derive(Debug)]
pub enum UnderWay<'a> {
    /// Tokens are on their way.
    Sent(Sent<'a>),
    /// They are here.
    Received(Received<'a>),
    /// Results are on their way.
    Returned(Returned<'a>),
    /// So are the next tokens.
    Crossed(Crossed<'a>),
}

impl Channel {
    /// Takes up a step whose guard was dropped, for callers that cannot hold on to one, such as those of another
    /// language. `rows` are those that were sent with it, and whose results are still to come; once results are on their way,
    /// and nothing else is, they are not looked at. `None` between steps.
    ///
    /// # Panics
    /// If these are not as many rows as were sent.
    pub fn resume<'a>(&'a mut self, rows: &'a [u8]) -> Option<UnderWay<'a>> {
        let step = match self.stage {
            Stage::Idle | Stage::Out => return None,
            Stage::Returned => return Some(UnderWay::Returned(Returned { channel: self })),
            Stage::Sent | Stage::Received => self.step,
            Stage::Crossed => self.step + 1,
        };
        let sent = self.out[(step & 1) as usize].tokens;
        assert_eq!(rows.len(), sent * self.layout.row_bytes, "the rows of {sent} tokens");
        let tokens = Tokens { rows, ..Tokens::NONE };
        Some(match self.stage {
            Stage::Received => UnderWay::Received(Received { channel: self, tokens }),
            Stage::Crossed => UnderWay::Crossed(Crossed { channel: self, tokens }),
            _ => UnderWay::Sent(Sent { channel: self, tokens }),
        })
    }

    /// Writes tokens to where their experts are, once to each rank however many of its experts they have, and arrives.
    /// Does not wait.
    pub fn send<'a>(&'a mut self, tokens: Tokens<'a>) -> Result<Sent<'a>, SendError> {
        match self.stage {
            Stage::Idle => {}
            Stage::Out => return Err(SendError::Excluded),
            _ => return Err(SendError::Unfinished),
        }
        let count = check(&tokens, &self.shape, &self.layout)?;
        let phase = self.barrier.phase() + 1;
        let members = self.barrier.roll(phase).map_err(|_| SendError::Excluded)?.members;
        self.beat();
        self.write(&tokens, count, self.step, members, phase);
        self.barrier.arrive(members, RankSet::EMPTY);
        self.stage = Stage::Sent;
        Ok(Sent { channel: self, tokens })
    }

    /// [`Channel::send`] and [`Sent::wait`] in one.
    pub fn dispatch<'a>(
        &'a mut self,
        tokens: Tokens<'a>,
        timeout: Duration,
    ) -> Result<Received<'a>, StepError> {
        Ok(self.send(tokens)?.wait(timeout)?)
    }

    /// A whole step: dispatch, `compute`, which fills the rows that go back, and combine into `results`.
    pub fn moe_forward(
        &mut self,
        tokens: Tokens<'_>,
        results: &mut [u8],
        timeout: Duration,
        compute: impl FnOnce(&mut Received<'_>),
    ) -> Result<Summed, StepError> {
        let mut received = self.dispatch(tokens, timeout)?;
        compute(&mut received);
        Ok(received.give_back().sum_into(results, timeout)?)
    }

    /// Writes heads, notes and rows of a step to all members. In a step of which `phase` is the dispatch.
    fn write(&mut self, tokens: &Tokens<'_>, count: usize, step: u64, members: RankSet, phase: u64) {
        let (me, buffer, top_k) = (self.me, self.buffer(step), self.shape.top_k);
        let per_rank = self.shape.experts_per_rank as u32;
        let row_bytes = self.layout.row_bytes;
        let out = &mut self.out[(step & 1) as usize];
        (out.tokens, out.targets) = (count, members);
        for rank in members.iter() {
            // SAFETY: our block; begun, because we met in the phase before, and not arrived.
            unsafe { self.places.write_head(rank, buffer, me, phase, count as u64) };
        }
        let routes = tokens.experts.chunks_exact(top_k).zip(tokens.weights.chunks_exact(top_k));
        for (token, (experts, weights)) in routes.enumerate() {
            let slot = self.places.slot(me, token);
            let mut hits = [0u8; moontide_heap::RANKS_MAX];
            for (&expert, &weight) in experts.iter().zip(weights).filter(|(expert, _)| **expert >= 0) {
                let rank = Rank(expert as u32 / per_rank);
                if members.contains(rank) {
                    let hit = &mut hits[rank.index()];
                    let local = (expert as u32 % per_rank) as u16;
                    // SAFETY: our slot; as above.
                    unsafe { self.places.note(rank, buffer, slot).set_hit(usize::from(*hit), local, weight) };
                    *hit += 1;
                }
            }
            let mut went_to = RankSet::EMPTY;
            for rank in members.iter() {
                let hits = usize::from(hits[rank.index()]);
                // SAFETY: our slot; as above.
                unsafe { self.places.note(rank, buffer, slot).set_hits(hits) };
                if hits == 0 {
                    continue;
                }
                went_to.insert(rank);
                if rank != me {
                    let row = &tokens.rows[token * row_bytes..][..row_bytes];
                    // SAFETY: our slot, which has room for a row; `row` is memory of the caller's, not of a region
                    // that somebody writes.
                    unsafe {
                        let place = self.places.row(rank, buffer, slot);
                        std::ptr::copy_nonoverlapping(row.as_ptr(), place, row_bytes);
                    }
                }
            }
            out.went_to[token] = went_to;
        }
    }

    /// Where what this rank makes of `source`'s token in `slot` goes.
    fn back_place(&self, step: u64, source: Rank, slot: usize) -> *mut u8 {
        let buffer = self.buffer(step);
        match self.shape.returns {
            Returns::Pull => self.places.back(self.me, buffer, slot),
            Returns::Push => {
                let token = slot - self.places.slot(source, 0);
                self.places.back(source, buffer, self.places.slot(self.me, token))
            }
        }
    }

    /// Where what `worker` made of this rank's token is.
    fn back_of(&self, step: u64, worker: Rank, token: usize) -> *const u8 {
        let buffer = self.buffer(step);
        match self.shape.returns {
            Returns::Pull => self.places.back(worker, buffer, self.places.slot(self.me, token)),
            Returns::Push => self.places.back(self.me, buffer, self.places.slot(worker, token)),
        }
    }

    /// After the dispatch: reads the notes of those who sent.
    fn receive(&mut self, step: u64, met: Met, packed: Option<&mut [u8]>, own: &Tokens<'_>) {
        self.sources = met.sends;
        let (me, buffer, phase) = (self.me, self.buffer(step), self.barrier.phase());
        if self.poisons && self.shape.returns == Returns::Pull {
            for source in met.sends.iter() {
                // SAFETY: this rank has met in the dispatch, and writes these rows from now on.
                unsafe { self.places.poison_backs(me, buffer, source) };
            }
        }
        let (places, row_bytes) = (&self.places, self.layout.row_bytes);
        let rows_max = self.routing.rows_max();
        let mut packed = packed;
        // SAFETY: they have said so in this phase.
        unsafe {
            self.routing.read(places, me, buffer, met.sends, phase, |hit, received| {
                let Some(packed) = packed.as_deref_mut() else { return };
                let at = (hit.expert as usize * rows_max + hit.row as usize) * row_bytes;
                let row = row_in(places, buffer, me, received.source, received.slot as usize, own, row_bytes);
                packed[at..][..row_bytes].copy_from_slice(row);
            });
        }
    }

    /// Before what a rank has worked on is anybody else's again.
    fn poison_worked_on(&self, step: u64) {
        for source in self.sources.iter().filter(|_| self.poisons) {
            // SAFETY: this rank has met in the dispatch, has not arrived in the return, and reads no more.
            unsafe { self.places.poison_received(self.me, self.buffer(step), source) };
        }
    }

    /// After the return: sums what came back for each token, in the order of ranks.
    fn sum(&mut self, step: u64, met: Met, results: &mut [u8]) -> Summed {
        let back_bytes = self.layout.back_bytes;
        let out = &self.out[(step & 1) as usize];
        let ranks = out.targets.and(met.gives);
        for (token, result) in results.chunks_exact_mut(back_bytes).enumerate() {
            let rows = out.went_to[token].and(ranks).iter().map(|rank| {
                // SAFETY: the rank has said in this phase that it is complete, and writes it no more until this rank
                // arrives again.
                unsafe { std::slice::from_raw_parts(self.back_of(step, rank, token), back_bytes) }
            });
            self.shape.back.sum(rows, self.shape.hidden, result);
        }
        if self.poisons && self.shape.returns == Returns::Push {
            for rank in ranks.iter() {
                // SAFETY: complete, read, and not written again before this rank arrives.
                unsafe { self.places.poison_backs(self.me, self.buffer(step), rank) };
            }
        }
        Summed { ranks }
    }

    fn assert_room(&self, step: u64, results: &[u8]) {
        let tokens = self.out[(step & 1) as usize].tokens;
        assert_eq!(results.len(), tokens * self.layout.back_bytes, "room for the results of {tokens} tokens");
    }
}

/// The row of a token in `slot` of `me`: where its source wrote it, or where this rank's caller has it.
///
/// # Safety
/// `source` has said that it is complete, or is `me`.
unsafe fn row_in<'a>(
    places: &Places,
    buffer: usize,
    me: Rank,
    source: Rank,
    slot: usize,
    own: &'a Tokens<'_>,
    row_bytes: usize,
) -> &'a [u8] {
    if source == me {
        return &own.rows[(slot - places.slot(me, 0)) * row_bytes..][..row_bytes];
    }
    // SAFETY: complete, says the caller, and not written again before this rank arrives, which takes the guard.
    unsafe { std::slice::from_raw_parts(places.row(me, buffer, slot), row_bytes) }
}

impl InStep for Sent<'_> {
    fn channel(&mut self) -> &mut Channel {
        self.channel
    }
}

impl InStep for Returned<'_> {
    fn channel(&mut self) -> &mut Channel {
        self.channel
    }
}

impl InStep for Crossed<'_> {
    fn channel(&mut self) -> &mut Channel {
        self.channel
    }
}

impl<'a> Sent<'a> {
    /// Waits for everyone's tokens, and sorts them by expert.
    pub fn wait(self, timeout: Duration) -> Result<Received<'a>, Late<Sent<'a>>> {
        self.wait_and_pack(timeout, None)
    }

    /// As [`Sent::wait`], and in the same pass copies the rows into the grouped layout,
    /// `[experts_per_rank][ranks × tokens_max]` rows without gaps, of which each expert's first
    /// [`Received::rows_per_expert`] are filled.
    ///
    /// # Panics
    /// If `packed` has another length.
    pub fn wait_packed(self, packed: &mut [u8], timeout: Duration) -> Result<Received<'a>, Late<Sent<'a>>> {
        let shape = &self.channel.shape;
        let rows = shape.experts_per_rank * shape.slots();
        assert_eq!(packed.len(), rows * self.channel.layout.row_bytes, "room for {rows} rows");
        self.wait_and_pack(timeout, Some(packed))
    }

    fn wait_and_pack(
        self,
        timeout: Duration,
        packed: Option<&mut [u8]>,
    ) -> Result<Received<'a>, Late<Sent<'a>>> {
        match self.channel.meet(timeout) {
            Err(error) => Err(Late { error, stage: self }),
            Ok(met) => {
                let Sent { channel, tokens } = self;
                channel.receive(channel.step, met, packed, &tokens);
                channel.stage = Stage::Received;
                Ok(Received { channel, tokens })
            }
        }
    }
}

/// A token that has an expert on this rank.
#[derive(Debug)]
pub struct Work<'w> {
    /// Its slot: source × T_cap + its number there.
    pub slot: usize,
    /// Whose token it is.
    pub source: Rank,
    /// The token, as the channel's `send` dtype has it.
    pub row: &'w [u8],
    /// Its experts on this rank, in the order in which its owner named them.
    pub hits: &'w [Hit],
    /// What goes back to the owner, as the `back` dtype has it: the weighted sum of these experts' results.
    pub back: &'w mut [u8],
}

/// Rows of one source's tokens where they lie.
#[derive(Clone, Copy, Debug)]
pub struct Block<'r> {
    /// All of them, with what is between.
    pub bytes: &'r [u8],
    /// How many.
    pub tokens: usize,
    /// Bytes from one to the next.
    pub stride: usize,
}

impl<'a> Received<'a> {
    /// How many rows each expert of this rank has: masked_m.
    pub fn rows_per_expert(&self) -> &[u32] {
        self.channel.routing.rows()
    }

    /// The slots of an expert's rows, in the order of the grouped layout.
    pub fn group(&self, expert: usize) -> &[u32] {
        self.channel.routing.group(expert)
    }

    /// The token in a slot. One that has no expert here was not sent here: whatever is in its place is shown.
    ///
    /// # Panics
    /// If no source that is counted in has this slot, or not this many tokens.
    pub fn row(&self, slot: usize) -> &[u8] {
        let tokens_max = self.channel.shape.tokens_max;
        let Block { bytes, tokens, stride } = self.rows_of(Rank((slot / tokens_max) as u32));
        let token = slot % tokens_max;
        assert!(token < tokens, "no token {token} of {tokens}");
        &bytes[token * stride..][..self.channel.layout.row_bytes]
    }

    /// All tokens of a source where they lie, row after row. As [`Received::row`], those that have no expert here are not
    /// its tokens.
    ///
    /// # Panics
    /// If the source is not counted in.
    pub fn rows_of(&self, source: Rank) -> Block<'_> {
        let channel = &*self.channel;
        let is_counted = source.index() < channel.shape.ranks && channel.sources.contains(source);
        assert!(is_counted, "rank {source} sent nothing");
        let tokens = channel.routing.tokens_of(source);
        if source == channel.me {
            return Block { bytes: self.tokens.rows, tokens, stride: channel.layout.row_bytes };
        }
        let stride = channel.layout.row_stride;
        let first =
            channel.places.row(channel.me, channel.buffer(channel.step), channel.places.slot(source, 0));
        // SAFETY: the block of a source is contiguous. Counted in, so its word was given, and it writes no more before
        // this rank arrives, which takes the guard.
        let bytes = unsafe { std::slice::from_raw_parts(first, tokens * stride) };
        Block { bytes, tokens, stride }
    }

    /// Whose tokens are here.
    pub fn sources(&self) -> RankSet {
        self.channel.sources
    }

    /// Calls `work` for every token that has an expert here, in the order of slots. It must fill what goes back.
    pub fn for_each(&mut self, mut work: impl FnMut(Work<'_>)) {
        let channel = &*self.channel;
        let (step, buffer, me) = (channel.step, channel.buffer(channel.step), channel.me);
        let (row_bytes, back_bytes) = (channel.layout.row_bytes, channel.layout.back_bytes);
        for &received in channel.routing.received() {
            let (slot, source) = (received.slot as usize, received.source);
            let hits = channel.routing.hits(received);
            // SAFETY: the row is complete, as in `row`. The back row is this rank's to write until it arrives, which takes
            // this guard; each slot comes once, so no two references to it exist.
            let (row, back) = unsafe {
                let row = row_in(&channel.places, buffer, me, source, slot, &self.tokens, row_bytes);
                let back = channel.back_place(step, source, slot);
                (row, std::slice::from_raw_parts_mut(back, back_bytes))
            };
            work(Work { slot, source, row, hits, back });
        }
    }

    /// From experts' results in the grouped layout (`back` dtype, as [`Sent::wait_packed`] lays tokens out) to what goes
    /// back: for each token the sum of its experts' results times their weights.
    ///
    /// # Panics
    /// If `grouped` has another length.
    pub fn scatter(&mut self, grouped: &[u8]) {
        let (back, hidden) = (self.channel.shape.back, self.channel.shape.hidden);
        let (bytes, rows_max) = (self.channel.layout.back_bytes, self.channel.routing.rows_max());
        let rows = self.channel.shape.experts_per_rank * rows_max;
        assert_eq!(grouped.len(), rows * bytes, "results of {rows} rows");
        self.for_each(|work| {
            let rows = work.hits.iter().map(|hit| {
                let at = (hit.expert as usize * rows_max + hit.row as usize) * bytes;
                (hit.weight, &grouped[at..][..bytes])
            });
            back.weighted_sum(rows, hidden, work.back);
        });
    }

    /// Says that what goes back is complete. Does not wait.
    pub fn give_back(self) -> Returned<'a> {
        let channel = self.channel;
        channel.poison_worked_on(channel.step);
        channel.arrive_giving(RankSet::EMPTY, channel.sources, channel.step + 1);
        channel.stage = Stage::Returned;
        Returned { channel }
    }

    /// The same, and sends the next step's tokens, with one arrival for both. These tokens cannot depend on the results
    /// of this step: for two batches that take turns.
    pub fn give_back_and_send(self, tokens: Tokens<'a>) -> Result<Crossed<'a>, (SendError, Received<'a>)> {
        let channel = &*self.channel;
        if channel.shape.buffers == Buffers::One {
            return Err((SendError::OneBuffer, self));
        }
        let phase = channel.barrier.phase() + 1;
        let checked = check(&tokens, &channel.shape, &channel.layout).and_then(|count| {
            let roll = channel.barrier.roll(phase).map_err(|_| SendError::Excluded)?;
            Ok((count, roll.members))
        });
        let (count, members) = match checked {
            Err(error) => return Err((error, self)),
            Ok(checked) => checked,
        };
        let channel = self.channel;
        channel.beat();
        channel.poison_worked_on(channel.step);
        channel.write(&tokens, count, channel.step + 1, members, phase);
        channel.arrive_giving(members, channel.sources, channel.step + 2);
        channel.stage = Stage::Crossed;
        Ok(Crossed { channel, tokens })
    }

    /// [`Received::give_back`] and [`Returned::sum_into`] in one.
    pub fn combine(self, results: &mut [u8], timeout: Duration) -> Result<Summed, StepError> {
        Ok(self.give_back().sum_into(results, timeout)?)
    }
}

impl<'a> Returned<'a> {
    /// Waits for everyone's results and writes their sums, a row per token, as the `back` dtype has them.
    ///
    /// # Panics
    /// If `results` has another length than this rank's tokens need.
    pub fn sum_into(self, results: &mut [u8], timeout: Duration) -> Result<Summed, Late<Returned<'a>>> {
        self.channel.assert_room(self.channel.step, results);
        match self.channel.meet(timeout) {
            Err(error) => Err(Late { error, stage: self }),
            Ok(met) => {
                let summed = self.channel.sum(self.channel.step, met, results);
                self.channel.next_step();
                Ok(summed)
            }
        }
    }
}

impl<'a> Crossed<'a> {
    /// Waits for everyone's results and next tokens; sums the former and sorts the latter.
    ///
    /// # Panics
    /// As [`Returned::sum_into`].
    pub fn sum_into(
        self,
        results: &mut [u8],
        timeout: Duration,
    ) -> Result<(Summed, Received<'a>), Late<Crossed<'a>>> {
        self.channel.assert_room(self.channel.step, results);
        match self.channel.meet(timeout) {
            Err(error) => Err(Late { error, stage: self }),
            Ok(met) => {
                let Crossed { channel, tokens } = self;
                let summed = channel.sum(channel.step, met, results);
                channel.step += 1;
                channel.receive(channel.step, met, None, &tokens);
                channel.stage = Stage::Received;
                Ok((summed, Received { channel, tokens }))
            }
        }
    }
}
